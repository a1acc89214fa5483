"""``cudnn-core demo``."""

from __future__ import annotations

import json
from pathlib import Path

from cudnn_core._cli import _demo


def test_demo_runs_the_example_of_a_checkout_with_its_arguments(cli, monkeypatch, machine):
    example = machine / "examples" / "sentence_search"
    example.mkdir(parents=True)
    (example / "__main__.py").write_text("import sys\nprint('on stdout')\nsys.exit(int(sys.argv[1]))\n")
    monkeypatch.setattr(_demo, "__file__", str(machine / "cudnn_core" / "_cli" / "_demo.py"))
    with (machine / "log").open("w") as log:
        monkeypatch.setattr("sys.stderr", log)
        for code in (0, 1, 3):
            status, out, _ = cli("demo", "--json", "--", str(code))
            assert (status, json.loads(out)) == (code, {"schema": 1, "example": str(example), "exit": code})
    assert "on stdout" in (machine / "log").read_text()


def test_a_wheel_says_where_the_demo_is(cli, monkeypatch, machine):
    monkeypatch.setattr(_demo, "__file__", str(machine / "site" / "cudnn_core" / "_cli" / "_demo.py"))
    code, out, err = cli("demo")
    assert (code, out) == (3, "")
    assert "examples/sentence_search" in err


def test_the_checkout_has_the_demo():
    assert (Path(_demo.__file__).parents[2] / "examples" / "sentence_search" / "__main__.py").is_file()

"""docs/writing-an-engine.md: its plugin installs, its examples run, its reference is complete."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cudnn_core
from cudnn_core._declines import CATALOGUE
from cudnn_core._hooks import HOOKS
from cudnn_core._knobs import KnobSpec
from cudnn_core._manifest import EngineSpec, parse
from cudnn_core._ops._table import in_tree

GUIDE = Path(__file__).parents[3] / "docs" / "writing-an-engine.md"
TEXT = GUIDE.read_text(encoding="utf-8")
# (what to do with it, argument, language, content) of every marked block
BLOCKS = re.findall(r"<!-- (\w+)(?:: (\S+))? -->\n```(\w+)\n(.*?)```", TEXT, re.DOTALL)
RUNS = [content for kind, _, _, content in BLOCKS if kind == "run"]


@pytest.fixture(scope="module")
def with_plugin(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An environment with the guide's plugin, built from the guide's files."""
    from .conftest import installed

    project = tmp_path_factory.mktemp("guide")
    for kind, name, _, content in BLOCKS:
        if kind in ("file", "append"):
            path = project / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(
                (path.read_text(encoding="utf-8") + "\n" if kind == "append" else "") + content, encoding="utf-8"
            )
    target = project / "dist"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(project)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    return installed(wheel, tmp_path_factory.mktemp("env"))


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_example_runs(number: int, with_plugin: Any, tmp_path: Path) -> None:
    with_plugin.script(RUNS[number], env={"CUDNN_CORE_CACHE_DIR": str(tmp_path)}, cwd=tmp_path)


def test_the_guides_plugin_passes_the_kit(with_plugin: Any, tmp_path: Path) -> None:
    command = [str(with_plugin.python), "-m", "cudnn_core", "plugin", "test", "my_engines"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_manifest_example_is_valid_and_shows_every_field() -> None:
    (text,) = [content for kind, _, _, content in BLOCKS if kind == "manifest"]
    manifest = parse(text)
    (engine,) = manifest.engines
    assert set(EngineSpec._fields) - {"plugin"} <= set(re.findall(r"^\[?\[?(?:engine\.)?(\w+)", text, re.MULTILINE))
    assert engine.knobs["stages"].default == 4
    table = TEXT[TEXT.index("| field |") : TEXT.index("## Reading a graph")]
    assert "`[engine.knobs.NAME]`" in table
    fields = {*EngineSpec._fields, *KnobSpec._fields, "schema", "api", "hooks", "provides", "[[op]]", "dist", "accept"}
    assert [field for field in sorted(fields - {"knobs"}) if f"`{field}`" not in table] == []


def test_json_blocks_are_json() -> None:
    assert [json.loads(content) for kind, _, _, content in BLOCKS if kind == "json"]


def test_names_in_the_guide_exist() -> None:
    """Hooks, decline codes and public names."""
    assert set(re.findall(r"cudnn_core_\w+", TEXT)) == set(HOOKS)
    areas = {code.partition(".")[0] for code in CATALOGUE if "." in code}
    named = {code for code in re.findall(r"`([a-z]+\.[a-z_]+)`", TEXT) if code.partition(".")[0] in areas}
    assert named
    assert named <= set(CATALOGUE)
    public = set(re.findall(r"\bcudnn_core\.(\w+)", TEXT)) - {"engines", "executors", "testing", "refresh"}
    assert public <= set(cudnn_core.__all__)
    groups = {row.group for row in in_tree().values()}
    assert {"pointwise", "norm", "conv", "sdpa"} <= groups
    for method in re.findall(
        r"^\| `(\w+)\(", TEXT[TEXT.index("`checks(graph, ctx)` collects") :].split("## Knobs")[0], re.MULTILINE
    ):
        assert hasattr(cudnn_core.checks, method), method


def test_links_lead_somewhere() -> None:
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
        for line in TEXT.splitlines()
        if line.startswith(("## ", "### "))
    }
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        else:
            assert (GUIDE.parent / target).exists(), target


def test_five_minute_start(environment: Any, tmp_path: Path) -> None:
    """`plugin new` gives a project whose wheel builds and installs, and whose engine is found."""
    command = [str(environment.python), "-m", "cudnn_core", "plugin", "new", "acme_first"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "acme_first").iterdir()} >= {
        "pyproject.toml",
        "acme_first",
        "tests",
        "README.md",
    }

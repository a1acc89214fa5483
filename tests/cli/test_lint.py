"""``cudnn-core plugin lint``: each rule finds its fault, and a sound plugin has none."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from cudnn_core._cli import _new


@pytest.fixture
def project(machine):
    """``project(file={old: new}, ...)``: a sound project with replacements in files; None deletes the file."""

    def make(changes=()):
        _new.write_distribution("acme_linted", Path("project"))
        for file, change in dict(changes).items():
            path = Path("project", file)
            if change is None:
                path.unlink()
                continue
            text = path.read_text()
            for old, new in change.items():
                assert old in text
                text = text.replace(old, new)
            path.write_text(text)
        return Path("project")

    return make


ENGINE, MANIFEST, PROJECT = "acme_linted/engine.py", "acme_linted/cudnn_plugin.toml", "pyproject.toml"
IMPORT = "from typing import TYPE_CHECKING\n"

CASES = {
    "no entry point": ({PROJECT: {"cudnn_core.engines": "other.group"}}, "entry-point", "no entry point"),
    "entry point to code": (
        {PROJECT: {'"acme_linted:cudnn_plugin.toml"': '"acme_linted.engine:Elementwise"'}},
        "entry-point",
        "PACKAGE:FILE.toml",
    ),
    "other name": ({MANIFEST: {'plugin = "acme_linted"': 'plugin = "acme"'}}, "entry-point", "the manifest's plugin"),
    "no manifest": ({MANIFEST: None}, "manifest", "no such file"),
    "unknown field": ({MANIFEST: {"maturity": "maturty"}}, "manifest", "did you mean 'maturity'"),
    "empty knob domain": (
        {MANIFEST: {"[[engine]]": '[[engine]]\nknobs = { tile = { type = "int", choices = [] } }'}},
        "manifest",
        "choices",
    ),
    "newer API": ({MANIFEST: {'api = "1.0"': 'api = "1.99"'}}, "api", "api.too_new"),
    "no such class": ({MANIFEST: {"engine:Elementwise": "engine:Elementwize"}}, "factory", "no Elementwize"),
    "no such module": ({MANIFEST: {"engine:Elementwise": "engines:Elementwise"}}, "factory", "no module"),
    "unknown op": ({MANIFEST: {'["add",': '["adds",'}}, "manifest", "did you mean 'add'"),
    "no requirement": ({PROJECT: {'"cudnn-core>=0.1,<1", ': ""}}, "requires", "no requirement"),
    "no lower bound": ({PROJECT: {"cudnn-core>=0.1,<1": "cudnn-core<1"}}, "requires", "lower bound"),
    "no upper bound": ({PROJECT: {"cudnn-core>=0.1,<1": "cudnn-core>=0.1"}}, "requires", "upper bound"),
    "no changelog": ({"CHANGELOG.md": None}, "changelog", "no CHANGELOG"),
    "untyped": ({"acme_linted/py.typed": None}, "typed", "py.typed"),
    "no Python": ({ENGINE: {"class Elementwise": "klass Elementwise"}}, "source", "can't be parsed"),
    "numpy at import": ({ENGINE: {IMPORT: f"{IMPORT}import numpy as np\n"}}, "imports", "imports numpy"),
    "torch in a try": (
        {ENGINE: {"__all__": "try:\n    import torch\nexcept ImportError:\n    torch = None\n__all__"}},
        "imports",
        "imports torch",
    ),
    "numpy by way of the plan": (
        {ENGINE: {IMPORT: f"{IMPORT}from .plan import ElementwisePlan\n"}},
        "imports",
        "plan.py",
    ),
    "numpy in the package": (
        {"acme_linted/__init__.py": {"__version__": "import numpy\n__version__"}},
        "imports",
        "numpy",
    ),
    "unknown code": ({ENGINE: {'"op.count"': '"op.counts"'}}, "codes", "did you mean 'op.count'"),
    "foreign code": ({ENGINE: {'"op.count"': '"x.acme.count"'}}, "codes", "begin with x.acme_linted."),
    "private import": (
        {ENGINE: {"from cudnn_core import": "from cudnn_core._engine import"}},
        "private",
        "private to cudnn-core",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_found(cli_json, project, case):
    changes, check, message = CASES[case]
    code, document = cli_json("plugin", "lint", project(changes), "--no-build")
    found = [row for row in document["findings"] if row["check"] == check]
    assert any(message in row["where"] + " " + row["message"] for row in found), document["findings"]
    assert code == (1 if any(row["severity"] == "error" for row in document["findings"]) else 0)
    assert len({row["check"] for row in document["findings"]}) == 1


def test_a_sound_project_is_ok(cli, project):
    code, out, _ = cli("plugin", "lint", project(), "--no-build")
    assert (code, out) == (0, "acme-linted: ok\n")


def test_own_codes_lazy_imports_and_type_checking_imports_are_fine(cli, project):
    changes = {
        ENGINE: {
            '"op.count"': '"x.acme_linted.count"',
            "if TYPE_CHECKING:\n": "if TYPE_CHECKING:\n    import torch\n",
            "        from .plan": "        import numpy\n        from .plan",
        }
    }
    assert cli("plugin", "lint", project(changes), "--no-build")[0] == 0


def test_a_wheel_without_its_manifest_is_found(cli_json, machine):
    wheel = machine / "work" / "acme-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("acme/__init__.py", '__version__ = "2.0"\n')
        archive.writestr("acme-1.0.dist-info/METADATA", "Name: acme\nVersion: 1.0\nRequires-Dist: cudnn-core>=0.1,<1\n")
        archive.writestr("acme-1.0.dist-info/entry_points.txt", "[cudnn_core.engines]\nacme = acme:cudnn_plugin.toml\n")
    code, document = cli_json("plugin", "lint", wheel)
    assert code == 1
    assert [(row["check"], row["where"]) for row in document["findings"]] == [("wheel", "acme/cudnn_plugin.toml")]


def test_versions_must_agree(cli_json, machine):
    wheel = machine / "work" / "acme-1.0-py3-none-any.whl"
    manifest = {"schema": 1, "plugin": "acme", "api": "1.0",
                "engine": [{"name": "e", "factory": "acme:E", "ops": ["add"], "devices": ["cpu"]}]}  # fmt: skip
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("acme/__init__.py", '__version__ = "2.0"\nclass E: ...\n')
        archive.writestr("acme/cudnn_plugin.json", json.dumps(manifest))
        archive.writestr("acme/py.typed", "")
        archive.writestr("acme-1.0.dist-info/METADATA", "Name: acme\nVersion: 1.0\nRequires-Dist: cudnn-core>=0.1,<1\n")
        archive.writestr("acme-1.0.dist-info/entry_points.txt", "[cudnn_core.engines]\nacme = acme:cudnn_plugin.json\n")
    _, document = cli_json("plugin", "lint", wheel)
    assert [row["check"] for row in document["findings"]] == ["version"]


@pytest.mark.parametrize("subject", ["nowhere", "bad.whl", "empty"])
def test_what_is_no_plugin_is_a_usage_error(cli, machine, subject):
    Path("bad.whl").write_bytes(b"PK")
    Path("empty").mkdir()
    code, out, err = cli("plugin", "lint", subject)
    assert (code, out) == (2, "")
    assert subject in err


@pytest.mark.parametrize("plugin", ["torch_reference", "frost_gemm", "linear_attention", "cudnn_backend"])
def test_the_in_tree_plugins_have_no_errors(cli_json, plugin):
    code, document = cli_json("plugin", "lint", plugin)
    assert (code, document["errors"]) == (0, 0), document["findings"]

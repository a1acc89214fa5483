"""``cudnn-core plugin new`` and ``plugin test``: the distribution builds, installs, passes its kit, lint and own tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cudnn_core._cli import _new

pytest.importorskip("build")
pytest.importorskip("hatchling")

PLUGIN = "acme_made"


def run(*command, site, cwd, **options):
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment, **options
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(project folder, wheel, site directory with the wheel installed)."""
    root = tmp_path_factory.mktemp("made")
    project, site = root / "project", root / "site"
    _new.write_distribution(PLUGIN, project)
    done = run("-m", "build", "--wheel", "--no-isolation", "--outdir", root, project, site=site, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = root.glob("*.whl")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    done = run(*pip, site=site, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    return project, wheel, site


def test_new_writes_a_complete_distribution(cli, cli_json, machine):
    code, document = cli_json("plugin", "new", "acme_gemm", "--dir", "somewhere")
    assert code == 0
    files = {str(path.relative_to("somewhere")) for path in Path("somewhere").rglob("*") if path.is_file()}
    assert files == set(document["files"])
    wanted = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tests/test_engine.py", "acme_gemm/py.typed"}
    assert wanted <= files
    text = "".join((Path("somewhere") / name).read_text() for name in files)
    assert "@PLUGIN@" not in text
    assert '"cudnn-core>=0.1,<1"' in text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Acme", "not a plugin id"),
        ("3d", "not a plugin id"),
        ("a-b", "not a plugin id"),
        ("../a", "not a plugin id"),
        ("json", "Python has that name"),
        ("match", "Python has that name"),
        ("numpy", "can be imported already"),
        ("torch_reference", "installed already"),
    ],
)
def test_a_name_that_can_not_be_is_refused(cli, machine, name, why):
    code, _, err = cli("plugin", "new", name)
    assert code == 2
    assert why in err
    assert list(Path().iterdir()) == []


def test_nothing_is_overwritten(cli, machine):
    Path("acme_gemm").mkdir()
    Path("acme_gemm/mine").write_text("mine")
    assert cli("plugin", "new", "acme_gemm")[0] == 2
    assert [path.name for path in Path("acme_gemm").iterdir()] == ["mine"]


def test_the_wheel_carries_manifest_and_types(made):
    with zipfile.ZipFile(made[1]) as archive:
        names = set(archive.namelist())
    assert {f"{PLUGIN}/{name}" for name in ("cudnn_plugin.toml", "py.typed", "engine.py", "plan.py")} <= names


def test_the_wheel_of_the_core_carries_the_templates(tmp_path):
    root = Path(__file__).parents[2]
    done = run("-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, root, site=tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        names = set(archive.namelist())
    templates = {f"cudnn_core/_cli/template/{name}.tmpl" for name in _new._FILES if name != "py.typed"}
    assert templates <= names


def test_the_made_plugin_passes_the_kit_unchanged(made, tmp_path):
    done = run("-m", "cudnn_core", "plugin", "test", PLUGIN, "--json", site=made[2], cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert (document["ok"], document["failed"], document["failures"]) == (True, 0, [])
    assert document["passed"] >= 10


def test_the_made_plugins_own_tests_pass(made, tmp_path):
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not conformance", made[0] / "tests")
    done = run(*arguments, site=made[2], cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_made_plugin_is_clean_for_lint_as_project_wheel_and_installed(made, tmp_path):
    for subject in (made[0], made[1], PLUGIN):
        done = run("-m", "cudnn_core", "plugin", "lint", subject, site=made[2], cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "acme-made 0.1.0: ok\n"), done.stdout + done.stderr


def test_the_made_plugin_outranks_the_reference_and_is_right(made, tmp_path, graph_file):
    done = run("-m", "cudnn_core", "run", graph_file(), "--json", site=made[2], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["engine"] == f"{PLUGIN}:elementwise@1"


def test_a_plugin_that_lies_fails_its_kit(made, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(made[1]) as archive:
        archive.extractall(site)
    plan = site / PLUGIN / "plan.py"
    plan.write_text(plan.read_text().replace('"sub": np.subtract', '"sub": np.add'))
    done = run("-m", "cudnn_core", "plugin", "test", PLUGIN, "--json", site=site, cwd=tmp_path, timeout=300)
    document = json.loads(done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    assert document["ok"] is False
    assert document["failures"]


def test_test_of_a_plugin_that_is_not_installed(cli):
    code, _, err = cli("plugin", "test", "torch_referense")
    assert code == 3
    assert "did you mean 'torch_reference'" in err

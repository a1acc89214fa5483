"""Every in-tree plugin as a wheel: what it carries, and that it is found and constructed when installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
# Run outside the source tree, with the unpacked wheel before the editable install.
INSTALLED = """
import sys
site, plugin, dist = sys.argv[1:]
sys.path.insert(0, site)
import cudnn_core
entries = [entry for entry in cudnn_core.registry().engines if entry.id.startswith(plugin + ":")]
assert entries and {entry.dist for entry in entries} == {dist}, entries
assert all(entry.instance() is not None for entry in entries)
assert sys.modules[plugin].__file__.startswith(site), sys.modules[plugin]
"""


def build_wheel(project: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(project)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugin_wheel_works_installed(plugin: str, tmp_path: Path) -> None:
    wheel = build_wheel(ROOT / "plugins" / plugin, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")  # a pure wheel is its installed form
    assert {f"{plugin}/{name}" for name in ("__init__.py", "cudnn_plugin.toml", "py.typed")} <= set(names)
    assert {name.split("/")[0].split(".")[0] for name in names} == {plugin, wheel.name.split("-")[0] + "-0"}

    dist = wheel.name.split("-")[0].replace("_", "-")
    command = [sys.executable, "-c", INSTALLED, str(tmp_path / "site"), plugin, dist]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_core_wheel_carries_the_package_alone(tmp_path: Path) -> None:
    wheel = build_wheel(ROOT, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"cudnn_core", next(top for top in tops if top.endswith(".dist-info"))}
    assert "cudnn_core/py.typed" in names
    for extra in ("cpu", "frost", "linear-attention", "backend", "all"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_plugins_depend_on_the_core_up_to_its_next_major_version() -> None:
    for plugin in PLUGINS:
        assert '"cudnn-core>=0.1,<1"' in (ROOT / "plugins" / plugin / "pyproject.toml").read_text(encoding="utf-8")

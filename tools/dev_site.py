"""Makes the in-tree packages visible to an interpreter that can install nothing (an offline GPU machine).

    python tools/dev_site.py DIR        then PYTHONPATH=DIR python ...     (`PYTHON=python make gpu-test` does both)

For the core and every plugin, DIR gets a link to the package and a ``.dist-info`` with its name, version, requirements and
entry points, read from pyproject.toml, and the folder that it comes from, as an editable install has it: what discovery and
``importlib.metadata`` look at. It needs tomli, as the core does.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def main(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for pyproject in (
        ROOT / "pyproject.toml",
        *sorted(ROOT.glob("plugins/*/pyproject.toml")),
        ROOT / "emulator" / "pyproject.toml",
    ):
        publish(pyproject, target)


def publish(pyproject: Path, target: Path) -> None:
    """Links the packages of one project into ``target`` and writes its metadata."""
    settings = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = settings["project"]
    packages = [pyproject.parent / path for path in settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    for package in packages:
        (target / package.name).symlink_to(package, target_is_directory=True)
    version = project.get("version") or version_of(pyproject.parent / settings["tool"]["hatch"]["version"]["path"])
    info = target / f"{re.sub(r'[-_.]+', '_', project['name'])}-{version}.dist-info"
    info.mkdir()
    metadata = [f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"]
    metadata += [f"Requires-Dist: {requirement}\n" for requirement in project.get("dependencies", [])]
    (info / "METADATA").write_text("".join(metadata), encoding="utf-8")
    (info / "INSTALLER").write_text("tools/dev_site.py\n", encoding="utf-8")
    source = {"url": pyproject.parent.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(source), encoding="utf-8")
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def version_of(module: Path) -> str:
    found = re.search(r'^__version__ = "([^"]+)"', module.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{module}: no __version__")
    return found.group(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

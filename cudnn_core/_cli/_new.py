"""``cudnn-core plugin new``: writes a complete distribution from the files in ``template/``.

``@NAME@`` in a template is replaced; nothing else is interpreted. The result passes ``plugin lint`` and the conformance kit.
"""

from __future__ import annotations

import keyword
import sys
from pathlib import Path
from typing import Any

from ._output import UsageProblem, emit_json

__all__ = ["new", "write_distribution"]

# template -> where it goes
_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "LICENSE": "LICENSE",
    "gitignore": ".gitignore",
    "__init__.py": "@PLUGIN@/__init__.py",
    "engine.py": "@PLUGIN@/engine.py",
    "plan.py": "@PLUGIN@/plan.py",
    "cudnn_plugin.toml": "@PLUGIN@/cudnn_plugin.toml",
    "py.typed": "@PLUGIN@/py.typed",
    "test_engine.py": "tests/test_engine.py",
}


def new(options: Any) -> int:
    _check_name(options.name)
    folder = Path(options.dir or options.name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageProblem(f"{folder} is there already; --dir names another folder")
    written = write_distribution(options.name, folder)
    if options.json:
        emit_json({"schema": 1, "plugin": options.name, "folder": str(folder), "files": written})
        return 0
    print(f"{folder}: {len(written)} files")
    for name in written:
        print(f"  {name}")
    print(f"next: pip install -e '{folder}[test]' && cudnn-core plugin test {options.name}")
    return 0


def write_distribution(plugin: str, folder: Path) -> list[str]:
    """Write the files; returns their names relative to ``folder``."""
    values = _values(plugin)
    written = []
    for template, place in _FILES.items():
        target = folder / _filled(place, values)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_filled(_template(template), values), encoding="utf-8")
        written.append(str(target.relative_to(folder)))
    return written


def _values(plugin: str) -> dict[str, str]:
    from .. import __version__
    from .._engine import API

    major, minor = __version__.split(".")[:2]
    return {
        "PLUGIN": plugin,
        "DIST": plugin.replace("_", "-"),
        "API": f"{API[0]}.{API[1]}",
        "BOUNDS": f">={major}.{minor},<{int(major) + 1}",
    }


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _template(name: str) -> str:
    if name == "py.typed":
        return ""
    from importlib.resources import files

    return (files(__package__) / "template" / f"{name}.tmpl").read_text(encoding="utf-8")


def _check_name(name: str) -> None:
    """UsageProblem unless ``name`` can be a plugin id and the name of a new top-level package."""
    from .._discovery import locate
    from .._manifest import IDENTIFIER
    from .._registry import current

    if not IDENTIFIER.match(name):
        raise UsageProblem(f"{name!r} is not a plugin id: lower-case letters, digits and _, a letter first, 48 at most")
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in sys.stdlib_module_names or name == "tests":
        raise UsageProblem(f"{name!r} can't be the name of a package: Python has that name already")
    installed = [plugin.plugin for plugin in current(enforce=False).plugins]
    if name in installed:
        raise UsageProblem(f"a plugin {name!r} is installed already")
    if locate(name)[0]:
        raise UsageProblem(f"a package {name!r} can be imported already; the plugin would hide it")

"""What ``cudnn-core plugin lint`` looks at: a project folder, a wheel, or an installed distribution, in one form.

Imported by ``_lint``. Only building a folder's wheel runs anything of the subject: its build backend.
"""

from __future__ import annotations

import email
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ._output import EnvironmentProblem, UsageProblem

__all__ = ["Subject", "subject_of"]

_GROUP = "cudnn_core.engines"
_LIMIT = 4 << 20  # bytes of one file that lint reads


class Subject(NamedTuple):
    """A distribution.

    points    plugin id -> entry-point value
    files     path inside the wheel -> text, of Python, TOML and JSON files
    packed    whether ``files`` are what a wheel carries (not what lies in a source tree)
    changelog "" if there is none, None where it can't be known
    """

    where: str
    dist: str
    version: str
    requires: tuple[str, ...]
    points: Mapping[str, str]
    files: Mapping[str, str]
    packed: bool
    changelog: str | None = None
    notes: tuple[str, ...] = ()


def subject_of(name: str, *, build: bool) -> Subject:
    """The subject called ``name``. Raises UsageProblem if there is none."""
    path = Path(name)
    if path.is_dir():
        return _project(path, build)
    if path.is_file():
        return _wheel(path)
    return _installed(name)


def _project(folder: Path, build: bool) -> Subject:
    import tomli

    file = folder / "pyproject.toml"
    try:
        project: dict[str, Any] = tomli.loads(file.read_text(encoding="utf-8")).get("project", {})
    except FileNotFoundError:
        raise UsageProblem(f"{folder}: no pyproject.toml in it") from None
    except (OSError, ValueError) as error:
        raise UsageProblem(f"{file}: {error}") from None
    found = [item for item in folder.iterdir() if item.name.lower().startswith(("changelog", "changes", "news"))]
    changelog = "\n".join(_text(item) for item in found if item.is_file())
    points = project.get("entry-points", {}).get(_GROUP, {})
    packages = {str(value).partition(":")[0] for value in points.values()}
    notes: tuple[str, ...] = ()
    if build:
        with tempfile.TemporaryDirectory(prefix="cudnn-lint-") as target:
            wheel = _built(folder, Path(target))
            if isinstance(wheel, Path):
                return _wheel(wheel)._replace(where=str(folder), changelog=changelog)
            notes = (wheel,)
    root = folder / "src" if (folder / "src").is_dir() else folder
    files = {}
    for package in packages:
        for item in sorted((root / package).rglob("*")):
            if item.suffix in (".py", ".toml", ".json", ".typed") and "__pycache__" not in item.parts:
                files[item.relative_to(root).as_posix()] = _text(item)
    return Subject(
        str(folder),
        str(project.get("name", "")),
        str(project.get("version", "")),
        tuple(map(str, project.get("dependencies", ()))),
        points,
        files,
        False,
        changelog,
        notes,
    )


def _built(folder: Path, target: Path) -> Path | str:
    """The folder's wheel, or why there is none. Nothing is installed for it."""
    from importlib.util import find_spec

    if find_spec("build") is None:
        return "the wheel was not built: `build` is not installed"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = list(target.glob("*.whl"))
    if done.returncode or not wheels:
        last = [line for line in (done.stdout + done.stderr).strip().splitlines() if line.strip()][-1:]
        return f"the wheel could not be built: {last[0] if last else f'exit code {done.returncode}'}"
    return wheels[0]


def _wheel(path: Path) -> Subject:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [item.filename for item in archive.infolist() if item.file_size <= _LIMIT]
            texts = {name: archive.read(name).decode("utf-8", "replace") for name in names if _is_text(name)}
    except (OSError, zipfile.BadZipFile, RuntimeError) as error:
        raise UsageProblem(f"{path}: not a wheel: {error}") from None
    metadata = next((name for name in texts if name.endswith(".dist-info/METADATA")), None)
    if metadata is None:
        raise UsageProblem(f"{path}: not a wheel: it has no METADATA")
    folder = metadata.removesuffix("METADATA")
    return _from_metadata(str(path), texts[metadata], texts.get(f"{folder}entry_points.txt", ""), texts)


def _installed(name: str) -> Subject:
    from .._errors import nearest
    from .._registry import current
    from .._versions import normalise

    found = current(enforce=False).discovery.plugins
    plugin = next((item for item in found if name == item.plugin or normalise(name) == normalise(item.dist)), None)
    if plugin is None:
        known = [item.plugin for item in found]
        raise UsageProblem(f"{name}: neither a folder, a wheel nor an installed plugin{nearest(name, known)}")
    if not plugin.manifest_path or plugin.manifest is not None:
        if plugin.problem is not None:
            raise EnvironmentProblem(f"{name}: {plugin.problem}")
        raise EnvironmentProblem(f"{name}: installed in a zip file; lint its wheel instead")
    package = Path(plugin.manifest_path).parent
    files = {
        f"{package.name}/{item.relative_to(package).as_posix()}": _text(item)
        for item in sorted(package.rglob("*"))
        if item.is_file() and _is_text(item.name) and "__pycache__" not in item.parts
    }
    origin = Path(plugin.origin)
    metadata = _text(origin / ("METADATA" if (origin / "METADATA").exists() else "PKG-INFO"))
    return _from_metadata(f"{plugin.dist} {plugin.version}", metadata, _text(origin / "entry_points.txt"), files)


def _from_metadata(where: str, metadata: str, entry_points: str, files: Mapping[str, str]) -> Subject:
    message = email.message_from_string(metadata)
    return Subject(
        where,
        message.get("Name", ""),
        message.get("Version", ""),
        tuple(message.get_all("Requires-Dist") or ()),
        dict(_points(entry_points.splitlines())),
        {name: text for name, text in files.items() if ".dist-info/" not in name},
        True,
    )


def _points(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    section = ""
    for line in map(str.strip, lines):
        if line.startswith("["):
            section = line.strip("[] ")
        elif section == _GROUP and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()


def _is_text(name: str) -> bool:
    return name.endswith((".py", ".toml", ".json", ".typed", "/METADATA", "/entry_points.txt"))


def _text(path: Path) -> str:
    try:
        return path.read_bytes()[:_LIMIT].decode("utf-8", "replace")
    except OSError:
        return ""

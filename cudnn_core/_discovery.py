"""Finding what is installed: entry points and versions, read as bytes from dist-info directories.

``scan`` walks ``sys.path`` in its own order and imports neither plugins nor ``importlib.metadata`` (47 ms to import, and
114 ms for ``entry_points()`` among 1,100 distributions, where this scan takes 8). Only zip files on the path and foreign
metadata finders are asked through ``importlib.metadata``. Imported by the registry and the doctor.

Rules
- The first distribution of a normalised name on ``sys.path`` wins, as it does for ``importlib.metadata``; later ones are
  ``shadowed``. Two *different* distributions with one plugin id are the registry's business.
- The current directory doesn't register, however it got onto ``sys.path``, unless it is a site directory; what was left
  out is listed in ``ignored``.
- A manifest counts only if its package is the one that the distribution installed (``_origin.belongs``): another one of
  that name, earlier on ``sys.path`` or in the current directory, makes the plugin unusable.
- Metadata that can't be read is listed in ``broken`` and costs nothing else. Only regular files are opened.
"""

# pathlib costs 12 ms to import, and a Path for each of 1,000 directories as much again:
# ruff: noqa: PTH112, PTH113, PTH118, PTH119, PTH120, PTH208
from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ._declines import Decline
from ._origin import belongs, here, locate, read_bytes, real, recorded
from ._versions import normalise

__all__ = ["Broken", "Discovery", "Found", "Point", "Skipped", "locate", "read_bytes", "scan"]

ENGINES = "cudnn_core.engines"
EXECUTORS = "cudnn_core.executors"

_SUFFIXES = (".dist-info", ".egg-info")
_MAX_ENTRY_POINTS = 1 << 20
_HEADER = re.compile(r"\[([^\[\]]+)\]\Z")
_PLUGIN_VALUE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*):([A-Za-z0-9_][A-Za-z0-9_.]*\.(?:toml|json))\Z")


class Point(NamedTuple):
    """One entry point of one of our groups. ``origin`` is the metadata directory that declares it."""

    group: str
    name: str
    value: str
    dist: str
    version: str
    origin: str


class Found(NamedTuple):
    """A plugin: the entry point ``plugin = value`` of ``dist``.

    manifest_path  the manifest's file, or "" if ``problem`` says why there is none
    manifest       its bytes, for a package that is not in a directory (a zip file); else None
    """

    plugin: str
    dist: str
    version: str
    origin: str
    value: str
    manifest_path: str = ""
    manifest: bytes | None = None
    problem: Decline | None = None


class Broken(NamedTuple):
    """Metadata that could not be used, and why."""

    path: str
    reason: str


class Skipped(NamedTuple):
    """A distribution that does not count: shadowed by ``by``, or (``by`` empty) in the current directory."""

    dist: str
    version: str
    path: str
    by: str = ""


class Discovery(NamedTuple):
    """What one scan found.

    plugins    in ``sys.path`` order, then by directory and file order
    executors  entry points of ``cudnn_core.executors``
    broken     unusable metadata
    shadowed   distributions of a name that an earlier path entry has, if either has one of our entry points
    ignored    distributions with one of our entry points in the current directory
    dists      normalised name -> version of everything installed
    """

    plugins: tuple[Found, ...] = ()
    executors: tuple[Point, ...] = ()
    broken: tuple[Broken, ...] = ()
    shadowed: tuple[Skipped, ...] = ()
    ignored: tuple[Skipped, ...] = ()
    dists: Mapping[str, str] = MappingProxyType({})


class _Dist(NamedTuple):
    """One metadata directory: ``text`` is its entry_points.txt if that names one of our groups, else b""."""

    name: str
    version: str
    path: str
    text: bytes


def scan(path: Sequence[str] | None = None, *, thorough: bool = False) -> Discovery:
    """Everything installed on ``path`` (default ``sys.path``).

    ``thorough`` (the doctor) also reads the metadata of distributions that have nothing to do with us, to report the
    nameless and half-removed ones.
    """
    entries = list(sys.path if path is None else path)
    cwd = here()
    broken: list[Broken] = []
    shadowed: list[Skipped] = []
    ignored: list[Skipped] = []
    winners: dict[str, _Dist] = {}
    points: list[Point] = []
    for dist, local in _dists(entries, cwd, broken, thorough, finders=path is None):
        if local:
            if dist.text:
                ignored.append(Skipped(dist.name, dist.version, dist.path))
            continue
        winner = winners.setdefault(normalise(dist.name), dist)
        if winner is not dist:
            if (dist.text or winner.text) and dist.path != winner.path:
                shadowed.append(Skipped(dist.name, dist.version, dist.path, by=winner.path))
            continue
        if dist.text:
            points.extend(_points(dist, broken))
    return Discovery(
        plugins=_disowned([_found(point, cwd) for point in points if point.group == ENGINES]),
        executors=tuple(point for point in points if point.group == EXECUTORS),
        broken=tuple(broken),
        shadowed=tuple(shadowed),
        ignored=tuple(ignored),
        dists={name: dist.version for name, dist in winners.items()},
    )


def _dists(
    entries: Iterable[str], cwd: str, broken: list[Broken], thorough: bool, *, finders: bool
) -> Iterator[tuple[_Dist, bool]]:
    """Every distribution, in path order, with whether it lies in the current directory."""
    seen: set[str] = set()
    for entry in entries:
        place = real(entry) if entry else cwd
        if not place or place in seen:
            continue
        seen.add(place)
        local = place == cwd and not _is_site(place)
        root = entry or cwd
        try:
            names = sorted(name for name in os.listdir(root) if name.endswith(_SUFFIXES))
        except NotADirectoryError:
            for dist in _foreign(root, broken):
                yield dist, local
            continue
        except FileNotFoundError:
            continue
        except OSError as error:
            broken.append(Broken(root, f"can't be listed: {error.strerror}"))
            continue
        if root.endswith(".egg") and os.path.isdir(os.path.join(root, "EGG-INFO")):
            names.append("EGG-INFO")
        for name in names:
            found = _read(root, name, broken, thorough)
            if found is not None:
                yield found, local
    if finders:
        for finder in sys.meta_path:
            # The importlib_metadata backport's finder repeats what the path gave.
            name = getattr(finder, "__name__", type(finder).__name__)
            if hasattr(finder, "find_distributions") and name not in ("PathFinder", "MetadataPathFinder"):
                for dist in _foreign(finder, broken):
                    yield dist, False


def _foreign(source: Any, broken: list[Broken]) -> Iterator[_Dist]:
    """The distributions of an archive (a path) or of a metadata finder, through ``importlib.metadata``."""
    if isinstance(source, str):
        import zipfile

        if not os.path.isfile(source) or not zipfile.is_zipfile(source):
            return
    from ._metadata import read

    found, failures = read(source)
    broken.extend(Broken(place, reason) for place, reason in failures)
    for name, version, place, text in found:
        yield _Dist(name, version, place, text if b"cudnn_core." in text else b"")


def _read(root: str, directory: str, broken: list[Broken], thorough: bool) -> _Dist | None:
    """The distribution of one metadata directory (or single-file egg-info), or None after a report in ``broken``."""
    path = f"{root}/{directory}"
    stem = os.path.basename(root) if directory == "EGG-INFO" else directory
    stem = stem[: stem.rindex(".")]
    name, _, version = stem.partition("-")
    if name.startswith("~") or not name:
        broken.append(Broken(path, "half-removed by pip"))
        return None
    if not directory.endswith(".dist-info"):
        version = version.partition("-py")[0]
    text = b""
    try:
        text = read_bytes(f"{path}/entry_points.txt", _MAX_ENTRY_POINTS)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        broken.append(Broken(path, f"entry_points.txt can't be read: {error.strerror}"))
        return None
    ours = b"cudnn_core." in text
    if thorough and not ours:
        list(_points(_Dist(name, version, path, text), broken))
    if ours or thorough or not version:
        try:
            header = _header(path, directory)
        except OSError as error:
            broken.append(Broken(path, f"its METADATA can't be read: {error.strerror}"))
            return None
        if header is None:
            if ours or thorough:
                broken.append(Broken(path, "has no METADATA: half-installed or half-removed"))
                return None
        elif not header[0]:
            broken.append(Broken(path, "its METADATA has no Name"))
            return None
        else:
            name, version = header[0], header[1] or version
    return _Dist(name, version, path, text if ours else b"")


def _header(path: str, directory: str) -> tuple[str, str] | None:
    """Name and Version of the metadata file, "" for what it lacks, or None if there is none. OSError: unreadable."""
    file_names = ("METADATA",) if directory.endswith(".dist-info") else ("PKG-INFO", "")
    for file_name in file_names:
        try:
            head = read_bytes(f"{path}/{file_name}" if file_name else path, 4096)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        fields = {"name": "", "version": ""}
        for line in head.decode("utf-8", "replace").splitlines():
            if not line.strip():
                break
            key, _, value = line.partition(":")
            if key.strip().lower() in fields:
                fields[key.strip().lower()] = value.strip()
        return fields["name"], fields["version"]
    return None


def _points(dist: _Dist, broken: list[Broken]) -> Iterator[Point]:
    """Our entry points in ``dist.text``; the first line that means nothing is reported, and all such lines skipped."""
    try:
        text = dist.text.decode("utf-8")
    except UnicodeDecodeError as error:
        broken.append(Broken(dist.path, f"entry_points.txt is not UTF-8 (byte {error.start})"))
        return
    group = wrong = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        if line[0] == "[":
            header = _HEADER.match(line)
            group = header[1].strip() if header else ""
            if header is None:
                wrong = wrong or f"entry_points.txt:{number}: {line[:80]!r} is not '[group]'"
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not name or not value:
            wrong = wrong or f"entry_points.txt:{number}: {line[:80]!r} is not 'name = value'"
        elif group in (ENGINES, EXECUTORS):
            yield Point(group, name, value, dist.name, dist.version, dist.path)
    if wrong:
        broken.append(Broken(dist.path, wrong))


def _found(point: Point, cwd: str) -> Found:
    """The plugin of ``point`` with its manifest located, or with the problem that stands in the way."""

    def problem(expected: str, actual: str, hint: str = "") -> Found:
        return _unusable(
            Found(point.name, point.dist, point.version, point.origin, point.value), expected, actual, hint
        )

    value = _PLUGIN_VALUE.match(point.value)
    if value is None:
        return problem("top_level_package:manifest.toml (or .json)", point.value)
    package, file_name = value.groups()
    try:
        directories, loader = locate(package)
    except Exception as error:  # a foreign import hook may raise anything
        return problem(f"package {package}", f"{type(error).__name__}: {error}")
    if not directories:
        return problem(f"package {package}", "not importable", f"reinstall {point.dist}")
    strangers = [directory for directory in directories if not belongs(point.origin, directory, file_name)]
    local = [directory for directory in strangers if real(os.path.dirname(directory)) == cwd]
    if local or len(strangers) == len(directories):
        stranger = (local or strangers)[0]
        hint = (
            f"it hides the installed package: take {os.path.dirname(stranger)} off sys.path, or reinstall {point.dist}"
        )
        if local:
            hint = "the current directory hides the installed package: work elsewhere, or `pip install -e .` if this is its source"
        return problem(f"package {package} of {point.dist} {point.version}", stranger, hint)
    missing = "no such file"
    for directory in directories:
        if directory in strangers:  # another distribution's part of a namespace package
            continue
        path = f"{directory}{os.sep}{file_name}"
        if os.path.isfile(path):
            return Found(point.name, point.dist, point.version, point.origin, point.value, path)
        if os.path.lexists(path):
            missing = "not a regular file"
        get_data = getattr(loader, "get_data", None)
        if get_data is not None and not os.path.isdir(directory):
            try:
                return Found(point.name, point.dist, point.version, point.origin, point.value, path, get_data(path))
            except OSError:
                continue
    return problem(os.path.join(directories[0], file_name), missing, f"reinstall {point.dist}")


def _disowned(plugins: Sequence[Found]) -> tuple[Found, ...]:
    """``plugins``; of several distributions with one manifest, those whose RECORD lacks what another one's lists lose it."""
    claims: dict[str, list[Found]] = {}
    for found in plugins:
        if found.manifest_path:
            claims.setdefault(found.manifest_path, []).append(found)
    if all(len(claimants) == 1 for claimants in claims.values()):
        return tuple(plugins)

    def owned(found: Found) -> Found:
        claimants = claims.get(found.manifest_path, ())
        if len(claimants) < 2 or recorded(found.origin, found.manifest_path):
            return found
        owners = [other for other in claimants if recorded(other.origin, other.manifest_path)]
        if not owners:
            return found
        owner = f"{owners[0].dist} {owners[0].version} ({owners[0].origin})"
        return _unusable(found, f"a manifest of {found.dist} {found.version}", f"{found.manifest_path} of {owner}")

    return tuple(map(owned, plugins))


def _unusable(found: Found, expected: str, actual: str, hint: str = "") -> Found:
    decline = Decline("plugin.bad_manifest", found.plugin, expected, actual, hint, found.origin)
    return found._replace(manifest_path="", manifest=None, problem=decline)


def _is_site(directory: str) -> bool:
    if os.path.basename(directory) in ("site-packages", "dist-packages"):
        return True
    site = sys.modules.get("site")
    if site is None:
        return False
    try:
        known = [*site.getsitepackages(), site.getusersitepackages()]
    except Exception:  # site is absent or cut down in embedded and frozen interpreters
        return False
    return any(real(item) == directory for item in known)

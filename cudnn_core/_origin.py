"""Where a plugin's package lies, and whether it is the one that its distribution installed.

A name on ``sys.path`` belongs to whoever comes first. A plugin's manifest and code must be those of the distribution that
declares it, so the package that Python would import is compared with the distribution's own metadata. Imported by the
discovery.
"""

# As in _discovery:
# ruff: noqa: PTH109, PTH110, PTH116, PTH117, PTH119, PTH120
from __future__ import annotations

import errno
import os
import stat
import sys
from typing import Any

__all__ = ["belongs", "here", "locate", "read_bytes", "real", "recorded"]

_MAX_RECORD = 1 << 26
_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)


def locate(package: str) -> tuple[tuple[str, ...], Any]:
    """The directories of top-level ``package`` (several for a namespace package) and the loader that reads from them.

    Does not import the package. Asks ``sys.meta_path``, so that editable installs with an import hook are found.
    No directory if there is no such package.
    """
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None:
            continue
        spec = find_spec(package, None)
        if spec is None:
            continue
        return tuple(map(str, spec.submodule_search_locations or ())), spec.loader
    return (), None


def belongs(origin: str, directory: str, file_name: str) -> bool:
    """Whether package ``directory`` is the one of the distribution with metadata directory ``origin``.

    It is if it lies beside the metadata, in the source folder of an editable install, or where the distribution's RECORD
    lists its ``file_name`` (a .pth file's folder, another site directory). A metadata finder that keeps no files can't be
    compared with anything, and is believed.
    """
    root = os.path.dirname(origin.rstrip("/"))
    parent = os.path.dirname(directory)
    if parent == root or not os.path.exists(root) or real(parent) == real(root):
        return True
    project = _editable_project(origin)
    if project and os.path.commonpath((project, real(directory))) == project:
        return True
    return recorded(origin, f"{directory}/{file_name}") is True


def recorded(origin: str, path: str) -> bool | None:
    """Whether the RECORD in ``origin`` lists ``path``; None if there is no RECORD, or an empty one."""
    try:
        record = read_bytes(f"{origin}/RECORD", _MAX_RECORD)
    except OSError:
        return None
    if not record.strip():
        return None
    root = real(os.path.dirname(origin))
    name = os.path.relpath(f"{real(os.path.dirname(path))}/{os.path.basename(path)}", root).replace(os.sep, "/")
    return f"\n{name},".encode("utf-8", "surrogateescape") in b"\n" + record


def _editable_project(origin: str) -> str:
    """The source folder of an editable install, which its direct_url.json names (PEP 610); "" for any other one."""
    try:
        data = read_bytes(f"{origin}/direct_url.json", 65536)
    except OSError:
        return ""
    from urllib.parse import unquote, urlsplit

    from ._canonical import FormatError, loads

    try:
        found = loads(data)
        editable, url = found["dir_info"]["editable"], urlsplit(found["url"])
    except (FormatError, LookupError, TypeError, ValueError, AttributeError):
        return ""
    path = unquote(url.path)
    return real(path) if editable is True and url.scheme == "file" and os.path.isabs(path) else ""


def real(path: str) -> str:
    return os.path.realpath(path)


def here() -> str:
    """The current directory, or "" if it has been removed."""
    try:
        return real(os.getcwd())
    except OSError:
        return ""


def read_bytes(path: str, limit: int) -> bytes:
    """At most ``limit`` bytes of a regular file; OSError for anything else, which is not opened (a FIFO would block).

    ``open`` costs three times as much, and 1,000 of them are half of a scan.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a directory", path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    descriptor = os.open(path, _FLAGS)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)

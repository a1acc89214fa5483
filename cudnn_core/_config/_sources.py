"""Finds and reads the configuration files and variables, lowest layer first.

No file is looked at before ``read_layers`` is called, and the TOML parser is imported only when there is text to parse.
Everything that exists and can't be honoured is a ConfigError: a layer is never skipped in silence. But a project file of
another user is none of ours, and doesn't exist for us (``foreign_files`` lists it). Imported by the configuration's state
and by ``doctor`` (``foreign_files``, ``unknown_variables``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import ConfigError, nearest
from ._grammar import parse_bool
from ._layer import Layer, parse_layer
from ._locate import Lines
from ._locate import Path as KeyPath
from ._source import Source

__all__ = ["SYSTEM_FILE", "VARIABLES", "foreign_files", "read_layers", "unknown_variables"]

SYSTEM_FILE = Path("/etc/cudnn_core/config.toml")
VARIABLES = (
    "CUDNN_CORE_CONFIG",
    "CUDNN_CORE_PLUGINS",
    "CUDNN_CORE_ENGINES",
    "CUDNN_CORE_STRICT",
    "CUDNN_CORE_LOG",
    "CUDNN_CORE_CACHE_DIR",
)
_PROJECT_FILES = ("cudnn_core.toml", "pyproject.toml")
_LARGEST = 1 << 20  # bytes of a configuration file; a larger one is a mistake, or a device


class _File(NamedTuple):
    text: str
    status: os.stat_result


def read_layers(environ: Mapping[str, str], cwd: str | os.PathLike[str] | None) -> list[Layer]:
    """Every layer below ``configure()``, lowest first. ``cwd`` None is the current directory."""
    layers: list[Layer] = []
    for path in (SYSTEM_FILE, _user_file(environ)):
        file = _read(path) if path else None
        if path and file:
            layers.append(_file_layer("file", path, file))
    named = _named_file(environ, cwd)
    project = _project_layer(cwd, named[1].status if named else None)
    if project:
        layers.append(project)
    if named:
        layers.append(_file_layer("file", *named))
    variables = _variables_layer(environ)
    if variables:
        layers.append(variables)
    return layers


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """``(name, message)`` of every ``CUDNN_CORE_*`` variable that means nothing, for ``doctor``."""
    environ = os.environ if environ is None else environ
    return [
        (name, f"{name} is not a variable of cudnn-core{nearest(name, VARIABLES)}")
        for name in sorted(environ)
        if name.startswith("CUDNN_CORE_") and name not in VARIABLES
    ]


def _user_file(environ: Mapping[str, str]) -> Path | None:
    base = environ.get("XDG_CONFIG_HOME", "")
    if not Path(base).is_absolute():  # unset, empty or relative: the XDG specification says to ignore it
        home = environ.get("HOME", "") or os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises without a home
        if not Path(home).is_absolute():
            return None
        base = f"{home}/.config"
    return Path(base, "cudnn_core", "config.toml")


def _named_file(environ: Mapping[str, str], cwd: str | os.PathLike[str] | None) -> tuple[Path, _File] | None:
    name = environ.get("CUDNN_CORE_CONFIG")
    if name is None:
        return None
    origin = "env:CUDNN_CORE_CONFIG"
    if not name:
        raise ConfigError("names no file; unset it, or name one", origin=origin, key="CUDNN_CORE_CONFIG")
    path = Path(cwd or "", name).absolute()
    file = _read(path)
    if file is None:
        raise ConfigError(f"{path} does not exist", origin=origin, key="CUDNN_CORE_CONFIG")
    return path, file


def _read(path: Path) -> _File | None:
    """The file's text and status, or None if nothing of that name exists."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a FIFO must not block
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR) and not os.path.lexists(path):
            return None
        raise ConfigError(f"can't be read: {error.strerror}", origin=str(path)) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ConfigError("is not a regular file", origin=str(path))
    with os.fdopen(descriptor, "rb") as stream:
        try:
            data = stream.read(_LARGEST + 1)
        except OSError as error:
            raise ConfigError(f"can't be read: {error.strerror}", origin=str(path)) from None
    if len(data) > _LARGEST:
        raise ConfigError(f"is larger than {_LARGEST} bytes", origin=str(path))
    try:
        return _File(data.decode("utf-8"), status)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError("is not UTF-8 text", origin=f"{path}:{line}") from None


def _parse(path: Path, text: str) -> dict[str, Any]:
    import tomli

    try:
        document: dict[str, Any] = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"invalid TOML: {error}", origin=f"{path}:{line}" if line else str(path)) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets hundreds deep
        raise ConfigError(f"invalid TOML: {error}", origin=str(path)) from None
    return document


def _file_layer(kind: str, path: Path, file: _File) -> Layer:
    return parse_layer(Source(kind, str(path), lines=Lines(file.text)), _parse(path, file.text))


def _project_layer(cwd: str | os.PathLike[str] | None, named: os.stat_result | None) -> Layer | None:
    """The layer of the nearest directory, from ``cwd`` upwards, that has a project configuration.

    The file that CUDNN_CORE_CONFIG names is not a project file as well.
    """
    search = _Search(cwd)
    for folder in search.folders():
        found = list(search.files(folder))
        if len(found) > 1:
            raise ConfigError(
                f"{found[1][0]} has a [tool.cudnn_core] table too; keep one of them", origin=str(found[0][0])
            )
        if found:
            path, file, prefix = found[0]
            if named is not None and os.path.samestat(named, file.status):
                return None
            if file.status.st_mode & stat.S_IWOTH:
                raise ConfigError("is writable by everyone (chmod o-w)", origin=str(path))
            table: Any = _parse(path, file.text)
            for key in prefix:
                table = table[key]
            source = Source("project", str(path), lines=Lines(file.text), prefix=prefix)
            return parse_layer(source, source.table((), table))
    return None


def foreign_files(cwd: str | os.PathLike[str] | None = None) -> list[tuple[str, str]]:
    """``(path, why)`` of every project file that does not count because somebody else owns it, for ``doctor``."""
    search = _Search(cwd)
    with contextlib.suppress(ConfigError):  # of a file that does count, for whoever reads it
        for folder in search.folders():
            if any(True for _ in search.files(folder)):
                break
    return search.foreign


class _Search:
    """A walk from ``cwd`` upwards over what belongs to the user or to root.

    A project file comes with whatever directory one works in, and anybody can put one into /tmp. So another user's file
    does not count, whatever it holds, and the walk ends below another user's folder: neither is an error, or anybody
    could stop the programs of everybody who works further down. ``foreign`` lists them.
    """

    def __init__(self, cwd: str | os.PathLike[str] | None) -> None:
        self._cwd = cwd
        self.foreign: list[tuple[str, str]] = []

    def folders(self) -> Iterator[Path]:
        try:
            start = Path(self._cwd or "").absolute()
        except FileNotFoundError:  # the current directory has been removed
            return
        for folder in (start, *start.parents):
            try:
                owner = _foreign_owner(folder.stat())
            except OSError:
                owner = ""  # the files in it say what is wrong, if there are any
            if owner:
                names = [name for name in _PROJECT_FILES if os.path.lexists(folder / name)]
                self.foreign += [(str(folder / name), f"its folder is {owner}") for name in names[:1]]
                return
            yield folder

    def files(self, folder: Path) -> Iterator[tuple[Path, _File, KeyPath]]:
        for name in _PROJECT_FILES:
            path = folder / name
            try:
                owner = _foreign_owner(path.lstat())  # of a link too, before anything is opened
            except OSError:
                owner = ""
            file = None if owner else _read(path)
            owner = owner or (_foreign_owner(file.status) if file else "")
            if owner:
                self.foreign.append((str(path), f"is {owner}"))
            elif file and name == "cudnn_core.toml":
                yield path, file, ()
            elif file and "cudnn_core" in file.text:
                tool = _parse(path, file.text).get("tool")
                if isinstance(tool, dict) and "cudnn_core" in tool:
                    yield path, file, ("tool", "cudnn_core")


def _foreign_owner(status: os.stat_result) -> str:
    if not hasattr(os, "geteuid") or status.st_uid in (os.geteuid(), 0):
        return ""
    return f"owned by uid {status.st_uid}, neither you nor root"


def _variables_layer(environ: Mapping[str, str]) -> Layer | None:
    raw: dict[str, Any] = {}
    names: dict[KeyPath, str] = {}

    def put(variable: str, path: KeyPath, read: Callable[[str], object]) -> None:
        text = environ.get(variable)
        if text is None:
            return
        try:
            value = read(text)
        except ValueError as error:
            raise ConfigError(str(error), origin=f"env:{variable}", key=variable) from None
        *tables, leaf = path
        table = raw
        for name in tables:
            table = table.setdefault(str(name), {})
        table[str(leaf)] = value
        names[path] = variable

    put("CUDNN_CORE_PLUGINS", ("plugins", "allow"), _split)
    put("CUDNN_CORE_ENGINES", ("engines", "disable"), lambda text: _signed(text, "-"))
    put("CUDNN_CORE_ENGINES", ("engines", "enable"), lambda text: _signed(text, "+"))
    put("CUDNN_CORE_STRICT", ("strict",), parse_bool)
    put("CUDNN_CORE_LOG", ("log",), str)
    put("CUDNN_CORE_CACHE_DIR", ("cache_dir",), str)
    return parse_layer(Source("env", "environment", names=names), raw) if raw else None


def _split(text: str) -> list[str]:
    """Comma-separated items; an empty text is an empty list."""
    items = [item.strip() for item in text.split(",")] if text.strip() else []
    if "" in items:
        raise ValueError(f"{text!r} has an empty item")
    return items


def _signed(text: str, sign: str) -> list[str]:
    items = _split(text)
    for item in items:
        if item[0] not in "+-":
            raise ValueError(f"{item!r} needs a sign: -{item} disables, +{item} enables")
    return [item[1:] for item in items if item[0] == sign]

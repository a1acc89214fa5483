"""Where a layer's values come from: names every value's origin and builds the errors of the layer.

Imported by the validators of layers and rules, and by the readers of files and variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from .._errors import ConfigError, nearest
from ._locate import Lines, Path

__all__ = ["ConfigValue", "Entry", "Source", "dotted"]

T = TypeVar("T")

_BARE = re.compile(r"[A-Za-z0-9_-]+")


class ConfigValue(NamedTuple):
    """One merged value: its dotted key, the value, and the ``file:line``, ``env:NAME`` or ``configure()`` that set it."""

    key: str
    value: object
    origin: str


class Entry(NamedTuple):
    """One validated value of one layer."""

    path: Path
    value: Any
    origin: str


def dotted(path: Path) -> str:
    """``('engine', 'x:y', 'knobs')`` as ``engine."x:y".knobs``; positions as ``rule[0]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if _BARE.fullmatch(part) else '"' + part.replace("\\", "\\\\").replace('"', '\\"') + '"'
            text += f".{name}" if text else name
    return text


class Source:
    """One layer's origin.

    kind    "file", "project", "env" or "api"
    label   the file's path, or ``configure()``
    lines   of a file: where its keys stand; ``prefix`` leads to the configuration inside it
    names   of the environment: path -> variable
    """

    def __init__(
        self,
        kind: str,
        label: str,
        *,
        lines: Lines | None = None,
        prefix: Path = (),
        names: Mapping[Path, str] | None = None,
    ) -> None:
        self.kind = kind
        self.label = label
        self._lines = lines
        self._prefix = prefix
        self._names = names or {}

    def origin(self, path: Path, value: object = None) -> str:
        """``file:line`` of the key at ``path`` (of ``value`` inside its list), ``env:NAME`` or ``configure()``."""
        if path in self._names:
            return f"env:{self._names[path]}"
        line = self._lines.of(self._prefix + path, value) if self._lines else None
        return f"{self.label}:{line}" if line else self.label

    def error(self, path: Path, message: str, value: object = None) -> ConfigError:
        key = dotted(path)
        return ConfigError(f"{key}: {message}" if key else message, origin=self.origin(path, value), key=key)

    def unknown(self, path: Path, choices: Iterable[str], hint: str = "") -> ConfigError:
        """The error for a key that is none of ``choices``."""
        known = sorted(choices)
        guess = hint or nearest(str(path[-1]), known) or f" (known keys: {', '.join(known)})"
        return self.error(path, f"unknown key{guess}")

    # Typed reads: each returns the value or raises.

    def table(self, path: Path, value: object) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self.error(path, f"must be a table, got {_kind(value)}")
        return value

    def array(self, path: Path, value: object) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise self.error(path, f"must be a list, got {_kind(value)}")
        return list(value)

    def string(self, path: Path, value: object) -> str:
        if not isinstance(value, str):
            raise self.error(path, f"must be a string, got {_kind(value)}")
        return value

    def boolean(self, path: Path, value: object) -> bool:
        if not isinstance(value, bool):
            raise self.error(path, f"must be true or false, got {_kind(value)}")
        return value

    def strings(self, path: Path, value: object, check: Callable[[str], None]) -> list[str]:
        """A list of strings, each passed to ``check``, whose ValueError becomes the layer's error."""
        items = self.array(path, value)
        for index, item in enumerate(items):
            self.parsed(path, check, self.string((*path, index), item), value=item)
        return items

    def parsed(self, path: Path, parse: Callable[[Any], T], raw: object, *, value: object = None) -> T:
        """``parse(raw)`` with its ValueError turned into the layer's error."""
        try:
            return parse(raw)
        except ValueError as error:
            raise self.error(path, str(error), value) from None


def _kind(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "a list", dict: "a table"}
    return f"{names.get(type(value), type(value).__name__)} ({value!r})"

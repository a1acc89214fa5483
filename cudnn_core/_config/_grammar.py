"""The small languages of configuration values: ids, globs, ranges, sizes, booleans.

Pure functions of strings; a malformed value is a ValueError whose text says what is right. Imported by the layer
validator, the rules and the configuration check.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import NamedTuple

__all__ = [
    "Span",
    "bare_id",
    "check_engine",
    "check_plugin",
    "engine_matches",
    "is_exact",
    "parse_bool",
    "parse_extent",
    "parse_size",
    "split_engine",
]

# One segment of a glob: identifier characters, `*`, `?` and character sets. An exact name is a glob without the last three.
_SEGMENT = r"(?:[a-z0-9_*?]|\[!?[a-z0-9_-]+\])+"
_PLUGIN = re.compile(_SEGMENT)
_ENGINE = re.compile(rf"(?P<plugin>{_SEGMENT}):(?P<engine>{_SEGMENT})(?:/(?P<variant>{_SEGMENT}))?")
_REVISION = re.compile(r"@[0-9]+")
_SPAN = re.compile(r"\s*([0-9]*)\s*\.\.\s*([0-9]*)\s*")
_SIZE = re.compile(r"\s*([0-9]+)(?:\.([0-9]+))?\s*([A-Za-z]+)\s*")
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip
_BOOLS = {"0": False, "1": True, "false": False, "true": True}


def is_exact(pattern: str) -> bool:
    """Whether ``pattern`` is a name, not a glob."""
    return not any(char in pattern for char in "*?[")


def check_plugin(text: str) -> None:
    """Raises ValueError unless ``text`` is a plugin id or a glob of plugin ids."""
    if not _PLUGIN.fullmatch(text):
        raise ValueError(f"{text!r} is not a plugin id or glob like 'frost_gemm' or 'acme_*'{_why_not(text)}")


def check_engine(text: str) -> None:
    """Raises ValueError unless ``text`` is ``plugin:engine[/variant]`` or a glob of it."""
    if not _ENGINE.fullmatch(text):
        if _REVISION.search(text):
            raise ValueError(f"{text!r}: leave the revision out: {bare_id(text)!r}")
        raise ValueError(
            f"{text!r} is not an engine id or glob like 'frost_gemm:sm90_wgmma' or 'acme_*:*'{_why_not(text)}"
        )


def _why_not(text: str) -> str:
    if "/" in text or "\\" in text or "." in text:
        return "; configuration names installed engines, never modules or paths"
    return "; lower-case letters, digits and _, with *, ? and [...] in a glob"


def bare_id(engine: str) -> str:
    """``plugin:engine@revision[/variant]`` without the revision."""
    return _REVISION.sub("", engine)


def split_engine(engine: str) -> tuple[str, str, str]:
    """``(plugin, engine, variant)`` of an id or glob; absent parts are empty."""
    plugin, _, rest = bare_id(engine).partition(":")
    name, _, variant = rest.partition("/")
    return plugin, name, variant


def engine_matches(pattern: str, engine: str) -> bool:
    """Whether the glob covers the engine: segment by segment, the whole of each.

    A pattern without a variant covers every variant; one with a variant covers no engine that has none.
    """
    plugin, name, variant = split_engine(pattern)
    have_plugin, have_name, have_variant = split_engine(engine)
    if variant and not (have_variant and fnmatchcase(have_variant, variant)):
        return False
    return fnmatchcase(have_plugin, plugin) and fnmatchcase(have_name, name)


class Span(NamedTuple):
    """Sizes from ``low`` to ``high``, both included; None is an open end."""

    low: int | None
    high: int | None

    def admits(self, size: int) -> bool:
        return (self.low is None or size >= self.low) and (self.high is None or size <= self.high)

    def __str__(self) -> str:
        if self.low == self.high:
            return str(self.low)
        return f"{'' if self.low is None else self.low}..{'' if self.high is None else self.high}"


def parse_extent(value: object) -> tuple[Span, ...]:
    """An int, an inclusive range ``"a..b"`` with either end open, or a list of these."""
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError("an empty list matches nothing; leave the key out to match every size")
        return tuple(_parse_span(item) for item in value)
    return (_parse_span(value),)


def _parse_span(value: object) -> Span:
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative; leave the key out to match every size")
        return Span(value, value)
    matched = _SPAN.fullmatch(value) if isinstance(value, str) else None
    if matched is None:
        raise ValueError(f"{value!r} is not a size; write an int, a list, or a range like '1..64', '..64' or '4096..'")
    low, high = (int(end) if end else None for end in matched.groups())
    if low is None and high is None:
        raise ValueError("a range needs at least one end; leave the key out to match every size")
    if low is not None and high is not None and low > high:
        raise ValueError(f"the range {value!r} is empty")
    return Span(low, high)


def parse_size(value: object) -> int:
    """Bytes: an int, or a number with a unit such as ``"256 MiB"`` or ``"1.5 GB"``."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative")
        return value
    matched = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = _UNITS.get(matched[3]) if matched else None
    if matched is None or unit is None:
        raise ValueError(f"{value!r} is not a size; write bytes as an int, or a number with one of {', '.join(_UNITS)}")
    fraction = matched[2] or ""
    scale: int = 10 ** len(fraction)
    amount, rest = divmod(int(matched[1] + fraction) * unit, scale)
    if rest:
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return amount


def parse_bool(text: str) -> bool:
    """``0``, ``1``, ``true`` or ``false``, and nothing else."""
    try:
        return _BOOLS[text]
    except KeyError:
        raise ValueError(f"{text!r} is not one of 0, 1, true, false") from None

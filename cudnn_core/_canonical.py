"""Canonical JSON, and the strict reader of files that may come from elsewhere.

One spelling per value (sorted keys, no spaces, ASCII, shortest floats), so that equal values have equal digests. The reader
refuses what JSON parsers usually forgive: duplicate keys, NaN and infinities, unknown and missing fields. Imported by the
decision record, the tuning records, the compile cache and saved plans.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ._errors import nearest

__all__ = [
    "ANY",
    "BOOL",
    "COUNT",
    "LIST",
    "NOT_NEGATIVE",
    "OBJECT",
    "POSITIVE",
    "STR",
    "TEXT",
    "Field",
    "FormatError",
    "digest",
    "dumps",
    "loads",
    "one_of",
    "optional",
    "plain",
    "take",
]

_MAX_BYTES = 16 << 20
_MAX_DEPTH = 32


class FormatError(ValueError):
    """The text is not JSON, or not of the expected form; the message names the field."""


def dumps(value: object) -> str:
    """The canonical JSON of ``value``. Raises FormatError for what is not JSON (NaN and infinities included)."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}") from None


def digest(value: object) -> str:
    """sha256 of the canonical JSON, 64 hex digits."""
    return hashlib.sha256(dumps(value).encode()).hexdigest()


def loads(data: str | bytes, limit: int = _MAX_BYTES) -> Any:
    """``data`` parsed strictly. Raises FormatError."""
    if len(data) > limit:
        raise FormatError(f"larger than {limit} bytes")
    try:
        text = data if isinstance(data, str) else data.decode()
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}") from None


def plain(value: object, depth: int = _MAX_DEPTH) -> Any:
    """``value`` as something that JSON can say, for facts that plugins supply: never raises, never loses a field.

    Tuples become lists, sets sorted lists, non-finite floats and unknown objects strings.
    """
    if value is None or isinstance(value, (bool, int)):
        return value if value is None or type(value) in (bool, int) else int(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if depth > 0:
        if isinstance(value, Mapping):
            return {str(key): plain(item, depth - 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item, depth - 1) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted((plain(item, depth - 1) for item in value), key=dumps)
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


class Field(NamedTuple):
    """What a field must be: ``what`` for the message, ``ok`` the test."""

    what: str
    ok: Callable[[Any], bool]


ANY = Field("any value", lambda value: True)
STR = Field("a string", lambda value: isinstance(value, str))
TEXT = Field("a non-empty string", lambda value: isinstance(value, str) and value != "")
BOOL = Field("a boolean", lambda value: isinstance(value, bool))
COUNT = Field("an integer >= 0", lambda value: type(value) is int and value >= 0)
# Comparisons, unlike math.isfinite, also take an int that no float can hold.
POSITIVE = Field("a number > 0", lambda value: type(value) in (int, float) and 0 < value < math.inf)
NOT_NEGATIVE = Field("a number >= 0", lambda value: type(value) in (int, float) and 0 <= value < math.inf)
LIST = Field("an array", lambda value: isinstance(value, list))
OBJECT = Field("an object", lambda value: isinstance(value, dict))


def optional(field: Field) -> Field:
    return Field(f"{field.what} or null", lambda value: value is None or field.ok(value))


def one_of(*choices: object) -> Field:
    """Exactly one of ``choices``, type included (``true`` is not 1)."""
    types = {type(choice) for choice in choices}
    typed = {(type(choice), choice) for choice in choices}
    return Field(
        "one of " + " ".join(map(str, choices)),
        lambda value: type(value) in types and (type(value), value) in typed,
    )


def take(value: object, fields: Mapping[str, Field], where: str) -> dict[str, Any]:
    """``value`` if it is an object with exactly these fields, each as declared. FormatError names the place."""
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected an object, got {_short(value)}")
    for name in value:
        if name not in fields:
            raise FormatError(f"{where}: unknown field {name!r}{nearest(name, fields)}")
    for name, field in fields.items():
        if name not in value:
            raise FormatError(f"{where}: the field {name!r} is missing")
        if not field.ok(value[name]):
            raise FormatError(f"{where}.{name}: expected {field.what}, got {_short(value[name])}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise FormatError(f"duplicate field {next(name for name in names if names.count(name) > 1)!r}")
    return found


def _no_constant(name: str) -> Any:
    raise FormatError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise FormatError(f"{text} is out of range")
    return value

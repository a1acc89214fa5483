"""Arguments of public calls, made canonical: each function returns the value or raises GraphTypeError naming ``where``.

Imported by the graph, its builders and its call sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ._errors import GraphTypeError

__all__ = ["as_int", "as_list", "as_mapping", "as_name", "as_number", "shown"]

_LIMIT = 2**63  # sizes, strides and uids travel as 64-bit integers


def as_int(value: Any, where: str, minimum: int | None = None) -> int:
    """An int of 64 bits; anything with ``__index__`` counts, a bool does not."""
    number = None
    if not isinstance(value, bool) and hasattr(type(value), "__index__"):
        try:
            number = int(value.__index__())
        except Exception:  # a torch tensor of several elements, or of floats
            number = None
    if number is None or not -_LIMIT <= number < _LIMIT or (minimum is not None and number < minimum):
        least = "" if minimum is None else f" >= {minimum}"
        raise GraphTypeError(f"{where} must be an int{least}, got {shown(value)}")
    return number


def as_name(value: Any, where: str) -> str:
    """A string that can be written as UTF-8; None is the empty name."""
    if value is None:
        return ""
    if isinstance(value, str):
        try:
            value.encode()
            return str.__str__(value)
        except UnicodeEncodeError:
            pass
    raise GraphTypeError(f"{where} must be a string, got {shown(value)}")


def as_list(value: Any, where: str) -> list[Any]:
    """The items of any iterable but a string, bytes or a 0-dimensional array."""
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        try:
            return list(value)
        except TypeError:
            pass
    raise GraphTypeError(f"{where} must be a list, got {shown(value)}")


def as_mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise GraphTypeError(f"{where} must be a mapping, got {shown(value)}")
    return value


def as_number(value: Any) -> float | int | bool | None:
    """``value`` as a plain Python number if it is one (numpy's scalars are), else None."""
    if type(value) in (bool, int, float):
        return value  # type: ignore[no-any-return]
    if isinstance(value, (int, float)):  # bool has no subclasses; enums and numpy.float64 do
        return float(value) if isinstance(value, float) else int(value)
    numpy = sys.modules.get("numpy")  # a value of numpy's can't exist without it
    if numpy is not None and isinstance(value, numpy.generic):
        item = value.item()
        return item if type(item) in (bool, int, float) else None
    return None


def shown(value: Any) -> str:
    """``value`` for a message: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an int with too many digits to print, or a broken __repr__
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."

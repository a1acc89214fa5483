"""Attribute values: one canonical form per type, and its JSON.

``canonical`` makes the immutable value that nodes hold, of what a user or a row's default gives; ``encode`` writes it to JSON
and to the graph key, ``decode`` reads it back. For one type, ``encode`` maps different values to different JSON: a float
that is not finite stands as a string, which no float is, and a ``json`` value holds no such float. Imported by the op
schema, the builders and the graph JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._arguments import as_int, as_list, as_name, as_number, shown
from .._dtypes import as_dtype, data_type
from .._errors import GraphError, GraphTypeError, nearest

if TYPE_CHECKING:
    from ._schema import Attr

__all__ = ["TYPES", "canonical", "decode", "encode", "float_from_json", "float_to_json"]

_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def float_to_json(value: Any) -> Any:
    """A finite float (or anything else) as it is, a non-finite one as "inf", "-inf" or "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def float_from_json(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _bool(attr: Attr, value: Any) -> bool:
    number = as_number(value)
    if number is None or number not in (0, 1) or isinstance(number, float):
        raise ValueError
    return bool(number)


def _int(attr: Attr, value: Any) -> int:
    return as_int(value, attr.name)


def _float(attr: Attr, value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise ValueError
    return float(value)


def _str(attr: Attr, value: Any) -> str:
    if value is None:
        raise ValueError
    return as_name(value, attr.name)


def _ints(attr: Attr, value: Any) -> tuple[int, ...]:
    return tuple(_int(attr, item) for item in as_list(value, attr.name))


def _floats(attr: Attr, value: Any) -> tuple[float, ...]:
    return tuple(_float(attr, item) for item in as_list(value, attr.name))


def _enum(attr: Attr, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    name = str(value)
    for choice in attr.choices:
        if name.lower() == choice.lower():
            return choice
    raise GraphError(
        f"attribute {attr.name!r} has no value {name!r}{nearest(name, attr.choices)}",
        expected=" | ".join(attr.choices),
        actual=name,
    )


def _json(attr: Attr, value: Any) -> Any:
    """A JSON value without objects, its arrays as tuples. A slice is [start, stop, step]."""
    if value is None:
        return None
    if isinstance(value, str):
        return as_name(value, attr.name)
    if isinstance(value, slice):
        return tuple(_json(attr, item) for item in (value.start, value.stop, value.step))
    if isinstance(value, (list, tuple)):
        return tuple(_json(attr, item) for item in value)
    number = as_number(value)
    number = as_int(value, attr.name) if number is None else number
    if not math.isfinite(number):
        raise ValueError
    return number


TYPES = {
    "bool": _bool,
    "int": _int,
    "float": _float,
    "ints": _ints,
    "floats": _floats,
    "str": _str,
    "dtype": lambda attr, value: as_dtype(value),
    "enum": _enum,
    "json": _json,
}


def canonical(attr: Attr, value: Any, label: str) -> Any:
    """``value`` in the canonical form of the attribute's type; GraphTypeError names ``label`` and the attribute."""
    try:
        return TYPES[attr.type](attr, value)
    except GraphError as error:
        if attr.type in ("enum", "dtype"):
            raise GraphTypeError(str(error), node=label, port=attr.name) from None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    what = "json of finite numbers" if attr.type == "json" else attr.type
    raise GraphTypeError(f"attribute {attr.name!r} takes {what}, got {shown(value)}", node=label, port=attr.name)


def encode(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Canonical attributes as JSON values."""
    return {name: _encode(value) for name, value in attrs.items()}


def _encode(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value.value if isinstance(value, data_type) else float_to_json(value)


def decode(attr: Attr, value: Any, label: str) -> Any:
    """The canonical value of what ``encode`` wrote (None: the attribute has no value)."""
    if value is None:
        return None
    if attr.type == "float":
        value = float_from_json(value)
    elif attr.type == "floats" and isinstance(value, list):
        value = [float_from_json(item) for item in value]
    return canonical(attr, value, label)

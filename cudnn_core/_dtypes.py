"""Data types: the frontend's 20 members, one string vocabulary, and their sizes.

A ``data_type`` member *is* its string (``data_type.HALF == "float16"``), so the same value serves Python code,
manifests, configuration files and graph JSON. Imported by the graph, the manifest and the configuration.
"""

from __future__ import annotations

from enum import Enum

from ._errors import GraphError, nearest

__all__ = ["STORAGE_DTYPES", "as_dtype", "bits", "data_type", "is_float", "nbytes"]


class data_type(str, Enum):
    """Element types. Values are the vocabulary of manifests, configuration and JSON."""

    NOT_SET = "not_set"
    FLOAT = "float32"
    DOUBLE = "float64"
    HALF = "float16"
    INT8 = "int8"
    INT32 = "int32"
    INT8x4 = "int8x4"
    UINT8 = "uint8"
    UINT8x4 = "uint8x4"
    INT8x32 = "int8x32"
    BFLOAT16 = "bfloat16"
    INT64 = "int64"
    BOOLEAN = "boolean"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FAST_FLOAT_FOR_FP8 = "fast_float_for_fp8"
    FP8_E8M0 = "fp8_e8m0"
    FP8_E5M3 = "fp8_e5m3"
    FP4_E2M1 = "fp4_e2m1"
    INT4 = "int4"

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __int__(self) -> int:
        """The member's number in cuDNN's ``cudnnDataType_t`` order, as the frontend's enum has it."""
        return _FRONTEND_VALUES[self.value]


_FRONTEND_VALUES = {
    "not_set": 0, "float32": 1, "float64": 2, "float16": 3, "int8": 4, "int32": 5, "int8x4": 6, "uint8": 7,
    "uint8x4": 8, "int8x32": 9, "bfloat16": 10, "int64": 11, "boolean": 12, "fp8_e4m3": 14, "fp8_e5m2": 15,
    "fast_float_for_fp8": 16, "fp8_e8m0": 17, "fp8_e5m3": 18, "fp4_e2m1": 19, "int4": 20,
}  # fmt: skip

# Bits of one element. The packed vector types count one element as the whole vector.
_BITS = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "int64": 64, "int32": 32, "int8": 8, "uint8": 8,
    "boolean": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "fp8_e8m0": 8, "fp8_e5m3": 8, "fp4_e2m1": 4, "int4": 4,
    "int8x4": 32, "uint8x4": 32, "int8x32": 256,
}  # fmt: skip

_FLOATS = frozenset(
    ("float64", "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "fp8_e8m0", "fp8_e5m3", "fp4_e2m1")
)

STORAGE_DTYPES: tuple[str, ...] = tuple(_BITS)

# Names that torch, numpy and ml_dtypes print for a dtype, where they differ from the vocabulary.
_FOREIGN = {
    "bool": "boolean",
    "half": "float16",
    "double": "float64",
    "float": "float32",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e8m0fnu": "fp8_e8m0",
    "float4_e2m1fn_x2": "fp4_e2m1",
    "float4_e2m1fn": "fp4_e2m1",
}


def as_dtype(value: object) -> data_type:
    """``value`` (a member, a vocabulary string, a torch or a numpy dtype) as a ``data_type``.

    ``None`` means NOT_SET. Raises GraphError for anything else, a dtype of the other byte order too.
    """
    if isinstance(value, data_type):
        return value
    if value is None:
        return data_type.NOT_SET
    if isinstance(value, str):
        found = _BY_VALUE.get(value)
        name = value
    else:
        try:
            return _KNOWN[value]
        except (KeyError, TypeError):
            pass
        name = str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)
        name = name.removeprefix("torch.")
        if not getattr(value, "isnative", True):
            raise GraphError(f"data type {value!r} has another byte order than this machine")
        found = _BY_VALUE.get(_FOREIGN.get(name, name))
        if found is not None and value.__hash__ is not None:
            _KNOWN[value] = found
    if found is None:
        raise GraphError(f"unknown data type {value!r}{nearest(name, _BY_VALUE)}")
    return found


_KNOWN: dict[
    object, data_type
] = {}  # dtype objects of frameworks that were recognised: each call of execute asks again
_BY_VALUE = {member.value: member for member in data_type}


def bits(dtype: str) -> int:
    """Bits of one element; raises GraphError for NOT_SET and FAST_FLOAT_FOR_FP8, which are never stored."""
    try:
        return _BITS[dtype]
    except KeyError:
        raise GraphError(f"{str(dtype)!r} is not a storage type") from None


def nbytes(dtype: str, elements: int) -> int:
    """Bytes of ``elements`` consecutive elements; 4-bit types pack two a byte."""
    return (bits(dtype) * elements + 7) // 8


def is_float(dtype: str) -> bool:
    return dtype in _FLOATS

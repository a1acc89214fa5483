"""Data types in PyTorch: values, codes and the rounding between them.

A *value* tensor holds numbers: bool for ``boolean``, int64 for integers, float32 or float64 for floats (float32 represents
every narrower type exactly). A *storage* tensor holds what lies in memory: a native torch dtype, or uint8 codes for the
8-bit and 4-bit floats and for int4 (one code an element; packing is ``_memory``'s).

Rounding is to nearest, ties to even, in one step from the computed value. Overflow: fp16 and bf16 go to infinity; fp8
and fp4 saturate at the largest finite value, infinities too (``cvt.satfinite``, the only form that the hardware has);
integers saturate. NaN stays NaN where the type has one, is +6 in fp4_e2m1 and 0 in integers. fp8_e8m0 is rounded towards
zero to a power of two, as the OCP MX scale is (2**-127 for zero and below). Imported by the evaluator and the memory module.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

__all__ = ["NATIVE", "decode", "encode", "largest", "round_up", "round_value"]

Tensor = Any

# Types whose storage is a torch dtype of the same meaning.
NATIVE: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class _Format(NamedTuple):
    """A binary float format: ``mantissa`` stored bits, ``bias``, largest finite value, sign bit or none."""

    mantissa: int
    bias: int
    largest: float
    signed: bool = True
    infinite: bool = False

    @property
    def emin(self) -> int:
        return 1 - self.bias


# Sources: IEEE 754 (fp16), OCP 8-bit Floating Point Specification 1.0 (e4m3, e5m2), OCP Microscaling Formats 1.0
# (e2m1, e8m0). e5m3 is the unsigned scale format of NVIDIA GPUs: bias 15, 0xff is NaN, no infinity.
_FORMATS = {
    "float16": _Format(10, 15, 65504.0, infinite=True),
    "bfloat16": _Format(7, 127, 3.3895313892515355e38, infinite=True),
    "fp8_e4m3": _Format(3, 7, 448.0),
    "fp8_e5m2": _Format(2, 15, 57344.0),
    "fp8_e5m3": _Format(3, 15, 114688.0, signed=False),
    "fp4_e2m1": _Format(1, 1, 6.0),
}
_INTEGERS = {
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int4": (-8, 7),
}


def largest(dtype: str) -> float:
    """The largest finite value of a float or integer type."""
    if dtype in _FORMATS:
        return _FORMATS[dtype].largest
    return 2.0**127 if dtype == "fp8_e8m0" else float(_INTEGERS[dtype][1])


def round_value(value: Tensor, dtype: str) -> Tensor:
    """``value`` rounded to ``dtype``, as a value tensor."""
    if dtype == "boolean":
        return value if value.dtype == torch.bool else value != 0
    if dtype in _INTEGERS:
        return _to_integer(value, *_INTEGERS[dtype])
    if dtype == "float64":
        return value.to(torch.float64)
    if dtype == "float32":
        return value.to(torch.float32)
    if dtype in ("float16", "bfloat16") and value.dtype == torch.float32:
        return value.to(NATIVE[dtype]).to(torch.float32)
    if dtype == "fp8_e8m0":
        return _power_of_two(value, up=False)
    return _to_format(value, _FORMATS[dtype], torch.round)


def round_up(value: Tensor, dtype: str) -> Tensor:
    """``value`` >= 0 rounded towards +infinity to fp8_e8m0 or fp8_e5m3 (saturating), as block scales are."""
    return _power_of_two(value, up=True) if dtype == "fp8_e8m0" else _to_format(value, _FORMATS[dtype], torch.ceil)


def encode(value: Tensor, dtype: str) -> Tensor:
    """The storage tensor of a value tensor that is already rounded to ``dtype``."""
    if dtype == "boolean":
        return value.to(torch.uint8)
    if dtype in NATIVE:
        return value.to(NATIVE[dtype])
    if dtype == "int4":
        return (value & 0xF).to(torch.uint8)
    if dtype == "fp8_e8m0":
        _, exponent = torch.frexp(value.to(torch.float64))
        return torch.where(torch.isnan(value), 255, exponent.to(torch.int64) - 1 + 127).to(torch.uint8)
    form = _FORMATS[dtype]
    wide = value.to(torch.float64)
    magnitude = torch.where(torch.isnan(wide), 0.0, wide.abs())
    _, exponent = torch.frexp(magnitude)
    exponent = torch.where(magnitude == 0, form.emin, torch.clamp(exponent.to(torch.int64) - 1, min=form.emin))
    significand = (magnitude / _exp2(exponent - form.mantissa)).to(torch.int64)
    # A subnormal's significand lacks the hidden bit, so that adding the parts yields exponent field 0.
    code = ((exponent - form.emin) << form.mantissa) + significand
    if form.signed:
        code = code | (torch.signbit(wide).to(torch.int64) << (3 if dtype == "fp4_e2m1" else 7))
    if dtype != "fp4_e2m1":
        code = torch.where(torch.isnan(wide), 0xFF if not form.signed else 0x7F, code)
    return code.to(torch.uint8)


def decode(storage: Tensor, dtype: str) -> Tensor:
    """The value tensor of a storage tensor; float32 (float64 for ``float64``) if it is a float."""
    if dtype == "boolean":
        return storage != 0
    if dtype in _INTEGERS and dtype != "int4":
        return storage.to(torch.int64)
    if dtype in ("float32", "float64"):
        return storage
    if dtype in NATIVE:
        return storage.to(torch.float32)
    codes = storage.to(torch.int64)
    if dtype == "int4":
        return ((codes & 0xF) ^ 8) - 8
    return torch.tensor(_values(dtype), dtype=torch.float32, device=storage.device)[codes]


@cache
def _values(dtype: str) -> tuple[float, ...]:
    """The value of every code."""
    nan, inf = float("nan"), float("inf")
    if dtype == "fp8_e8m0":
        return (*(2.0 ** (code - 127) for code in range(255)), nan)
    form = _FORMATS[dtype]
    bits = 4 if dtype == "fp4_e2m1" else 8
    values = []
    for code in range(1 << bits):
        body = code & ((1 << (bits - 1)) - 1) if form.signed else code
        field, fraction = body >> form.mantissa, body & ((1 << form.mantissa) - 1)
        unit = 2.0 ** (max(field, 1) - form.bias - form.mantissa)
        value = (fraction + ((1 << form.mantissa) if field else 0)) * unit
        if value > form.largest:
            value = inf if dtype == "fp8_e5m2" and fraction == 0 else nan
        values.append(-value if body != code else value)
    return tuple(values)


def _to_integer(value: Tensor, low: int, high: int) -> Tensor:
    if not value.dtype.is_floating_point:
        return value.to(torch.int64).clamp(low, high)
    whole = torch.round(value.to(torch.float64))
    whole = torch.where(torch.isnan(whole), 0.0, whole)
    # 2**63 - 1 is no double: clamp below it, then write the bounds as integers.
    inside = whole.clamp(float(low), min(float(high), 2.0**63 - 1024)).to(torch.int64)
    return torch.where(whole >= float(high), high, torch.where(whole <= float(low), low, inside))


def _to_format(value: Tensor, form: _Format, rounder: Any) -> Tensor:
    wide = value.to(torch.float64)
    _, exponent = torch.frexp(wide)
    quantum = _exp2(torch.clamp(exponent.to(torch.int64) - 1, min=form.emin, max=1000) - form.mantissa)
    rounded = rounder(wide / quantum) * quantum
    if form.infinite:
        rounded = torch.where(
            rounded.abs() > form.largest, torch.copysign(rounded.new_tensor(float("inf")), wide), rounded
        )
    else:
        rounded = rounded.clamp(-form.largest if form.signed else 0.0, form.largest)
        if form.largest == 6.0:  # fp4 has no NaN: cvt.satfinite gives +largest
            rounded = torch.where(torch.isnan(wide), form.largest, rounded)
    if not form.signed:
        rounded = rounded.abs()  # no negative zero
    return rounded.to(torch.float32)


def _power_of_two(value: Tensor, up: bool) -> Tensor:
    wide = value.to(torch.float64)
    fraction, exponent = torch.frexp(wide)
    exponent = exponent.to(torch.int64) - 1
    if up:
        exponent = exponent + (fraction > 0.5).to(torch.int64)
    exponent = torch.where(wide > 0, exponent, -127)
    exponent = torch.where(torch.isinf(wide) & (wide > 0), 127, exponent).clamp(-127, 127)
    return torch.where(torch.isnan(wide), float("nan"), _exp2(exponent)).to(torch.float32)


def _exp2(exponent: Tensor) -> Tensor:
    """2.0**exponent in fp64, exactly, for exponents of normal numbers."""
    return ((exponent + 1023) << 52).view(torch.float64)

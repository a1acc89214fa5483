"""Bit-exact floating-point formats of PTX: decode codes to numbers, encode numbers to codes.

`decode(codes, name)` and `encode(values, name, rounding, saturate, random)` work on arrays of any shape. Sources:
PTX ISA 5.2.3 (alternate formats), 9.7.9.21 (cvt: rounding, satfinite, relu, NaN), OCP MX (e8m0, e2m1, e2m3, e3m2).
ue5m3 (sm_107 scale factors; unsigned, bias 15, 0xff is NaN, no infinity) is inferred from the compiler's type name
"FNU" and from public code; no public table was found.
Canonical NaNs (measured on an H200): 0x7fff f16 and bf16, 0x7fffffff f32 and tf32, 0x7f e4m3 and e5m2; 0xff ue8m0.
Used by `_convert`, `_arith` and `_matmul`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FORMATS",
    "Format",
    "decode",
    "decode_function",
    "encode",
    "flush",
    "quiet",
    "round_to_odd",
    "table",
    "two_sum",
]

Array: TypeAlias = "NDArray[Any]"


class Format(NamedTuple):
    """One format: total bits, mantissa bits, exponent bias, sign bit present, largest finite code, inf code or -1, NaN or -1."""

    name: str
    bits: int
    mantissa: int
    bias: int
    signed: bool
    maximum: int
    infinity: int
    nan: int


FORMATS = {
    f.name: f
    for f in (
        Format("f64", 64, 52, 1023, True, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FFFFFFFFFFFFFFF),
        Format("f32", 32, 23, 127, True, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF),
        Format("tf32", 19, 10, 127, True, 0x3FBFF, 0x3FC00, 0x3FFFF),
        Format("f16", 16, 10, 15, True, 0x7BFF, 0x7C00, 0x7FFF),
        Format("bf16", 16, 7, 127, True, 0x7F7F, 0x7F80, 0x7FFF),
        Format("e5m2", 8, 2, 15, True, 0x7B, 0x7C, 0x7F),
        Format("e4m3", 8, 3, 7, True, 0x7E, -1, 0x7F),
        Format("e3m2", 6, 2, 3, True, 0x1F, -1, -1),
        Format("e2m3", 6, 3, 1, True, 0x1F, -1, -1),
        Format("e2m1", 4, 1, 1, True, 0x07, -1, -1),
        Format("ue4m3", 8, 3, 7, False, 0x7E, -1, 0x7F),
        Format("ue5m3", 8, 3, 15, False, 0xFE, -1, 0xFF),
        Format("ue8m0", 8, 0, 127, False, 0xFE, -1, 0xFF),
    )
}


def _codes_to_float64(codes: Array, form: Format) -> Array:
    bits = codes.astype(np.int64)
    if form.name == "ue8m0":
        value = np.ldexp(1.0, (bits - 127).astype(np.int32))
        return np.where(bits == 0xFF, np.nan, value)
    magnitude = bits & ((1 << (form.bits - form.signed)) - 1)
    exponent, fraction = magnitude >> form.mantissa, magnitude & ((1 << form.mantissa) - 1)
    significand = fraction + np.where(exponent > 0, 1 << form.mantissa, 0)
    value = np.ldexp(
        significand.astype(np.float64), (np.maximum(exponent, 1) - form.bias - form.mantissa).astype(np.int32)
    )
    if form.infinity >= 0:
        value = np.where(magnitude == form.infinity, np.inf, value)
    if form.nan >= 0:
        value = np.where(magnitude > (form.infinity if form.infinity >= 0 else form.maximum), np.nan, value)
    return np.where(bits >> (form.bits - 1) & 1, -value, value) if form.signed else value


@cache
def table(name: str) -> Array:
    """float32 value of every code of a format of at most 16 bits; each value is exact."""
    form = FORMATS[name]
    with np.errstate(all="ignore"):
        values = _codes_to_float64(np.arange(1 << form.bits), form).astype(np.float32)
    values.flags.writeable = False
    return values


@cache
def decode_function(name: str) -> Callable[[Array], Array]:
    """codes -> float32 (float64 for f64); a code's bits above the format's width are ignored, as is tf32's low word part."""
    form = FORMATS[name]
    if name == "f64":
        return lambda codes: np.ascontiguousarray(codes, dtype=np.uint64).view(np.float64)
    if name == "f32":
        return lambda codes: np.ascontiguousarray(codes, dtype=np.uint32).view(np.float32)
    if name == "tf32":  # a 32-bit register or word: the tensor core reads its upper 19 bits
        mask = np.uint32(0xFFFFE000)
        return lambda codes: (np.ascontiguousarray(codes, dtype=np.uint32) & mask).view(np.float32)
    if name == "f16":
        return lambda codes: np.ascontiguousarray(codes, dtype=np.uint16).view(np.float16).astype(np.float32)
    if name == "bf16":
        return lambda codes: (np.ascontiguousarray(codes, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    values = table(name)
    if form.bits == 8:
        return lambda codes: values[np.asarray(codes, dtype=np.uint8)]
    mask8 = np.uint8((1 << form.bits) - 1)
    return lambda codes: values[np.asarray(codes, dtype=np.uint8) & mask8]


def decode(codes: Any, name: str) -> Array:
    """Values of codes: float64 for f64, else float32 (exact)."""
    return decode_function(name)(np.asarray(codes))


def flush(values: Array) -> Array:
    """float32 with subnormals replaced by zeros of the same sign (.ftz)."""
    bits = values.view(np.uint32)
    return np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000)).view(np.float32)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Knuth's exact addition: s = round(a + b) and the error a + b - s (float64; NaN where not finite)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def round_to_odd(s: Array, error: Array) -> Array:
    """float64 s = round-to-nearest(x) with x = s + error, as round-to-odd(x): a later rounding to <= 50 bits is exact."""
    bits = s.view(np.int64)
    change = (error != 0) & ((bits & 1) == 0) & np.isfinite(s) & np.isfinite(error)
    if not change.any():
        return s
    step = np.where((error > 0) == (s > 0), 1, -1)
    return np.where(change, bits + step, bits).view(np.float64)


def _saturated(codes: Array, form: Format, sign: Array, rounding: str, saturate: str) -> Array:
    over = codes > form.maximum
    if not over.any():
        return codes
    if saturate == "finite":
        limit: Any = form.maximum
    else:
        beyond = form.infinity if form.infinity >= 0 else form.nan if form.nan >= 0 else form.maximum
        if rounding in ("rn", "rna", "rs"):
            limit = beyond
        elif rounding == "rz":
            limit = form.maximum
        else:
            limit = np.where(sign == (rounding == "rm"), beyond, form.maximum)
    return np.where(over, limit, codes)


def encode(
    values: Any, name: str, rounding: str = "rn", saturate: str = "none", relu: bool = False, random: Any = None
) -> Array:
    """Codes (int64) of finite or special numbers, given exactly as float32/float64.

    rounding rn rz rm rp rna rs; saturate "none" (overflow to inf, to NaN where the format has only NaN, to the largest
    number where it has neither) or "finite"; relu clamps negative results, -0 too, to +0. rs adds `random` to the
    discarded bits aligned so that `random` has 16 bits just below the result's last bit (ISA 9.7.9.21, ".rs").
    NaN gives the canonical NaN; in formats without NaN the largest positive number. The result of f64 is only
    supported for rn of float64 input (a no-op). tf32 codes are 19 bits wide (`<< 13` for a register).
    """
    form = FORMATS[name]
    bits = np.asarray(values, dtype=np.float64).view(np.int64)
    sign = bits < 0
    magnitude = bits & 0x7FFFFFFFFFFFFFFF
    exponent = magnitude >> 52
    fraction = magnitude & ((1 << 52) - 1)
    significand = np.where(exponent > 0, fraction | (1 << 52), fraction)
    biased = np.maximum(exponent, 1) - 1023 + form.bias
    shift = np.minimum(52 - form.mantissa + np.maximum(1 - biased, 0), 62)
    quotient = significand >> shift
    rest = significand & ((np.int64(1) << shift) - 1)
    if rounding == "rz":
        up: Any = 0
    elif rounding in ("rn", "rna"):
        half = np.int64(1) << (shift - 1)
        up = (rest > half) | ((rest == half) & ((quotient & 1 == 1) if rounding == "rn" else True))
    elif rounding == "rs":
        aligned = np.where(shift >= 16, rest >> np.maximum(shift - 16, 0), rest << np.maximum(16 - shift, 0))
        up = (aligned + np.asarray(random, dtype=np.int64)) >> 16
    else:
        up = (rest != 0) & (sign == (rounding == "rm"))
    if name == "ue8m0":  # no mantissa, no sign, no zero: 2^-127 is code 0
        codes = np.where(exponent < 896, 0, exponent - 896 + _ue8m0_up(fraction, rounding))
    else:
        codes = quotient + up + ((np.maximum(biased, 1) - 1) << form.mantissa)
    codes = _saturated(codes, form, sign, rounding, saturate)
    special = exponent == 0x7FF
    if special.any():
        nan = form.nan if form.nan >= 0 else form.maximum
        infinite = form.infinity if form.infinity >= 0 else nan
        if saturate == "finite" or nan == form.maximum:
            infinite = form.maximum
        codes = np.where(special, np.where(fraction != 0, nan, infinite), codes)
    if form.signed:
        negative = sign & ~(special & (fraction != 0))
        codes = np.where(negative, 0 if relu else codes | (1 << (form.bits - 1)), codes)
    return codes


def _ue8m0_up(fraction: Array, rounding: str) -> Array:
    if rounding == "rp":
        return fraction != 0
    if rounding == "rn":
        return fraction >= (1 << 51)
    return np.zeros(fraction.shape, bool)


@cache
def narrow_table(name: str, rounding: str, saturate: str, relu: bool) -> Array:
    """Codes (uint32) of a format of at most 8 bits by the upper half of an f32 whose lost half is ORed into bit 0.

    That half is the f32 rounded to odd at 8 significant bits, two more than any of these formats keeps.
    """
    values = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        codes = encode(np.abs(values) if not FORMATS[name].signed else values, name, rounding, saturate, relu)
    codes = codes.astype(np.uint32)
    codes.flags.writeable = False
    return codes


def quiet(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """run(args) under errstate ignore; the bare function stays reachable as `.raw`."""

    def silenced(args: Any) -> Any:
        with np.errstate(all="ignore"):
            return run(args)

    silenced.raw = run  # type: ignore[attr-defined]
    return silenced

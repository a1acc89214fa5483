"""Data types of values in registers: rounding to a declared type, storage form and back.

A *wide* vector is what formulas compute with: Float32 for float types, Int32 for ``int32``, ``int8``, ``uint8`` and ``boolean`` (0 or 1);
Int64 for a result of integers that is about to become a float. A *narrow* vector has the storage type (``args.ELEMENTS``). Rounding is to
nearest even in one step; fp16 and bf16 overflow to infinity, fp8 saturates at its largest finite value, infinities too; integers
saturate, NaN becomes 0; ``boolean`` is ``!= 0``.

Conversions are inline PTX: in packed pairs, and opaque to the compiler, which folds chains such as int32 -> fp32 -> fp8 into conversions
that do not exist. Imported by the epilogue and by mainloop prologues.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import vector

from .args import ELEMENTS
from .vectors import assemble, each, inline, on_pairs, size

__all__ = ["BYTES", "INTEGERS", "as_float", "as_integer", "floats_of_bytes", "narrow", "rounded", "widen"]

INTEGERS = {"int32": (-(2**31), 2**31 - 1), "int8": (-128, 127), "uint8": (0, 255), "boolean": (0, 1)}

# PTX ISA, cvt: (instruction, type of the pair). The 8-bit forms exist with .satfinite alone.
_PACKED: dict[str, tuple[str, Any]] = {
    "bfloat16": ("cvt.rn.bf16x2.f32", cutlass.Int32),
    "float16": ("cvt.rn.f16x2.f32", cutlass.Int32),
    "fp8_e4m3": ("cvt.rn.satfinite.e4m3x2.f32", cutlass.Int16),
    "fp8_e5m2": ("cvt.rn.satfinite.e5m2x2.f32", cutlass.Int16),
}

BYTES = frozenset({"int8", "uint8"})


def floats_of_bytes(x: cute.TensorSSA, dtype: str) -> cute.TensorSSA:
    """The values of ``int8`` or ``uint8`` elements, a multiple of four, in fp32.

    A byte becomes the low bits of 2^23, from which 2^23 is then subtracted: a permutation and a sum of full rate, where a conversion
    from an integer has a quarter of it. The sign bit of int8 is flipped first, which adds 128.
    """
    signed = dtype == "int8"
    words = vector.bitcast(ir.VectorType.get([size(x) // 4], Int32.mlir_type), x)
    values = []
    for i in range(size(x) // 4):
        word = vector.extract(words, [], [i])
        if signed:
            word = inline("xor.b32 $0, $1, 0x80808080;", Int32.mlir_type, [word])
        values += [
            inline(f"prmt.b32 $0, $1, 0x4B000000, {0x7440 | byte:#x};", Float32.mlir_type, [word]) for byte in range(4)
        ]
    return assemble(values, Float32) - float(2**23 + 128 * signed)


def as_float(x: cute.TensorSSA) -> cute.TensorSSA:
    """A wide vector in fp32, rounded to nearest even."""
    if x.dtype is Int64:
        return each("cvt.rn.f32.s64", Float32, x)
    return x if x.dtype is Float32 else x.to(Float32)


def _on_the_way_to(dtype: str, x: cute.TensorSSA) -> cute.TensorSSA:
    """A wide vector in fp32, such that rounding it to the narrower float ``dtype`` is the only rounding.

    fp32 holds every integer up to 2^24. Beyond, fp16 and fp8 have overflowed, and for bf16 the integer is rounded to odd: towards zero,
    and where that was inexact the last bit is set (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008).
    """
    if x.dtype is Float32 or dtype != "bfloat16":
        return as_float(x)
    kind = "s64" if x.dtype is Int64 else "s32"
    down = each(f"cvt.rz.f32.{kind}", Float32, x)
    exact = each(f"cvt.rzi.{kind}.f32", x.dtype, down) == x
    bits = down.bitcast(Int32)
    return cute.where(exact, bits, bits | cute.full_like(bits, 1)).bitcast(Float32)


def as_integer(x: cute.TensorSSA) -> cute.TensorSSA:
    """A wide vector in int32: to nearest even, saturating, NaN is 0 (PTX ISA, cvt.rni.s32.f32)."""
    return x if x.dtype is Int32 else each("cvt.rni.s32.f32", Int32, x)


def narrow(x: cute.TensorSSA, dtype: str) -> cute.TensorSSA:
    """A wide vector rounded to ``dtype``, in its storage type."""
    if dtype in INTEGERS:
        integer = _rounded_integer(x, dtype)
        return integer if dtype == "int32" else integer.to(ELEMENTS[dtype])
    if dtype == "float32":
        return as_float(x)
    instruction, pair = _PACKED[dtype]
    return on_pairs(instruction, pair, ELEMENTS[dtype], _on_the_way_to(dtype, x))


def widen(x: cute.TensorSSA, dtype: str) -> cute.TensorSSA:
    """The wide vector of a narrow one of ``dtype``."""
    if dtype == "boolean":
        return _nonzero(x)
    return x.to(Int32) if dtype in INTEGERS else x.to(Float32)


def rounded(x: cute.TensorSSA, dtype: str) -> tuple[cute.TensorSSA, cute.TensorSSA | None]:
    """A wide vector rounded to ``dtype``: (wide, narrow). Narrow is None where it is not made on the way."""
    if dtype in INTEGERS:
        return _rounded_integer(x, dtype), None
    if dtype == "float32":
        return as_float(x), None
    small = narrow(x, dtype)
    return widen(small, dtype), small


def _rounded_integer(x: cute.TensorSSA, dtype: str) -> cute.TensorSSA:
    if dtype == "boolean":
        return _nonzero(x)
    low, high = INTEGERS[dtype]
    integer = as_integer(x)
    if dtype == "int32":
        return integer
    above = cute.where(integer < low, cute.full_like(integer, low), integer)
    return cute.where(above > high, cute.full_like(above, high), above)


def _nonzero(x: cute.TensorSSA) -> cute.TensorSSA:
    """1 where ``x`` is not 0 (NaN is not), else 0, in int32."""
    return cute.where(x != cute.full_like(x, 0), cute.full_like(x, 1, Int32), cute.full_like(x, 0, Int32))

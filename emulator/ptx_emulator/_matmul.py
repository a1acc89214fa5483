"""Matrix multiply-accumulate of the tensor cores on decoded operands: D = A * B^T + C with block scales.

`accumulate(a, b, c, kind)`: a [m, k] and b [n, k] are exact float32 (or int) values, c [m, n] or None, result [m, n].
Float kinds: exact products are summed in float64 and added to C in float64; the sum is rounded once to the accumulator's
type (f32, or f16 kept as float32 values). Hardware aligns and truncates the addends of one instruction (public studies
of Hopper and Blackwell; not stated by NVIDIA), so results may differ from it by the bound of `accumulation_bound`.
int: exact in int64, then wrapped or saturated to int32. tf32 operands are truncated to 10 mantissa bits on decoding.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._floats import FORMATS, decode_function

__all__ = ["accumulate", "accumulation_bound", "decode_elements", "decode_unpacked", "decompress", "expand_scales"]

Array: TypeAlias = "NDArray[Any]"
INTEGERS: dict[str, Any] = {"s8": np.int8, "u8": np.uint8}


def decode_elements(data: Array, name: str, container_bits: int = 0) -> Array:
    """Bytes [rows, kbytes] of an operand to values [rows, k]: float32, float64 for f64, int32 for s8 and u8.

    container_bits 8 for 4- and 6-bit types in shared memory of the f8f6f4 kinds: 16 elements packed at the start of
    every 16 bytes, the rest padding (ISA 9.7.16.10.4.4). 0: as wide as the type, 4-bit types two a byte, low half first.
    """
    if name in INTEGERS:
        return data.view(INTEGERS[name]).astype(np.int32)
    if container_bits and FORMATS[name].bits == 8:
        container_bits = 0
    bits = {"tf32": 32}.get(name, FORMATS[name].bits)
    read = decode_function(name)
    if bits == 16:
        return read(data.view(np.uint16))
    if bits >= 32:
        return read(data.view(np.uint32 if bits == 32 else np.uint64))
    if bits == 8:
        return read(data)
    rows = data.shape[0]
    if container_bits == 8:
        data = data.reshape(rows, -1, 16)[:, :, : 2 * bits].reshape(rows, -1)
    elif bits == 6:
        raise ValueError("6-bit elements are always padded in shared memory")
    return read(_split(data, bits))


def _split(data: Array, bits: int) -> Array:
    """Codes [rows, count] of packed 4- or 6-bit elements [rows, bytes], low bits first."""
    rows = data.shape[0]
    if bits == 4:
        return np.stack([data & np.uint8(15), data >> np.uint8(4)], axis=-1).reshape(rows, -1)
    words = data.reshape(rows, -1, 3).astype(np.uint32)
    packed = words[..., 0] | words[..., 1] << np.uint32(8) | words[..., 2] << np.uint32(16)
    codes = np.stack([packed >> np.uint32(6 * i) & np.uint32(63) for i in range(4)], axis=-1)
    return codes.reshape(rows, -1).astype(np.uint8)


def decompress(data: Array, bits: int, place: str) -> Array:
    """Rows of padded 4- or 6-bit elements (16 at the start of every 16 bytes) to one element a byte: .b8x16."""
    rows = data.shape[0]
    codes = _split(data.reshape(rows, -1, 16)[:, :, : 2 * bits].reshape(rows, -1), bits)
    return codes << np.uint8(_PLACE[place][bits])


# first bit of a narrow element in its byte: ISA 9.7.14.5.14 for registers, the documentation of CuTe DSL for tensor memory
# (and CUTLASS for what ldmatrix makes, which is not what mma.sync takes)
_PLACE = {"register": {4: 2, 6: 0}, "tensor": {4: 2, 6: 1}, "matrix load": {4: 0, 6: 0}}


def decode_unpacked(data: Array, name: str, place: str) -> Array:
    """As `decode_elements`, for narrow types one a byte: the f8f6f4 kinds in registers or in tensor memory (`place`).

    4-bit types sit in bits 2 to 5, 6-bit types in bits 0 to 5 of a register's byte and 1 to 6 of tensor memory's.
    """
    bits = FORMATS[name].bits if name in FORMATS else 8
    if bits == 8:
        return decode_elements(data, name)
    return decode_function(name)(data >> np.uint8(_PLACE[place][bits]) & np.uint8((1 << bits) - 1))


def expand_scales(codes: Array, name: str, vector: int) -> Array:
    """Scale codes [rows, count] to factors [rows, count * vector] (float32; ue4m3 is e4m3 without its sign)."""
    if name == "ue4m3":
        codes = codes & np.uint8(0x7F)
    return np.repeat(decode_function(name)(codes), vector, axis=1)


def accumulate(
    a: Array,
    b: Array,
    c: Array | None = None,
    kind: str = "f32",
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    saturate: bool = False,
) -> Array:
    """kind is the accumulator: "f32" and "f16" (float32 result holding f16 values), "f64" or "s32" (int32 result)."""
    if kind == "s32":
        # products of 8-bit numbers over k <= 2^20 terms are exact in float64, which multiplies on BLAS
        total = (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.int64)
        if c is not None:
            total = total + c
        return (np.clip(total, -(1 << 31), (1 << 31) - 1) if saturate else total).astype(np.int32)
    left, right = a.astype(np.float64), b.astype(np.float64)
    if a_scale is not None:
        left = left * a_scale
    if b_scale is not None:
        right = right * b_scale
    with np.errstate(all="ignore"):
        total = left @ right.T
        if c is not None:
            total = total + c
        if kind == "f64":
            return np.asarray(total)
        result = total.astype(np.float32)
        return total.astype(np.float16).astype(np.float32) if kind == "f16" else result


def accumulation_bound(a: Array, b: Array, c: Array | None = None) -> Array:
    """Largest difference [m, n] that another summation order in f32 can make: (k + 1) * 2^-22 of the sum of magnitudes.

    2^-22 instead of 2^-24 leaves room for addends truncated to 24 bits after alignment to the largest one.
    """
    total = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64).T
    if c is not None:
        total = total + np.abs(c)
    return (a.shape[1] + 1) * 2.0**-22 * total

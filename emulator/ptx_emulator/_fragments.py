"""Which lane and register holds which matrix element: mma, wgmma, ldmatrix/stmatrix, tcgen05.ld/st/cp, tensor memory.

All functions return read-only integer index arrays, cached. A "fragment" is (rows, columns), both [lanes, elements], the
elements of a lane in register order, low bits of a register first.
Sources: PTX ISA 9.7.14.5 (mma, ldmatrix, stmatrix), 9.7.15.5 (wgmma), 9.7.16.8 and 9.7.16.10.5 (tcgen05); the figures of
the ISA are read through CUTLASS' copy and fragment traits, which state the same maps as layouts. mma, wgmma and the
m8n8 forms of ldmatrix and stmatrix agree with an H200 (tests/test_h200_matrix.py); the m16n8 and m16n16 forms are those
of CuTe DSL's atoms, by which a public attention kernel gives the right numbers.
Inferred: the scale-factor positions of K = 96 (bytes run on into the next 4-column group, as CUTLASS tiles the factors
of its sm_103 kernel) and of K = 128 (the same).
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "accumulator_map",
    "copy_lanes",
    "ldmatrix_map",
    "mma_fragment",
    "scale_map",
    "stmatrix_map",
    "tmem_map",
    "tmem_operand_lanes",
    "wgmma_a",
    "wgmma_accumulator",
    "zero_column_mask",
]

Array: TypeAlias = "NDArray[Any]"
Fragment: TypeAlias = "tuple[Array, Array]"
LANES: Array = np.arange(32)


def _freeze(array: Array) -> Array:
    out = np.ascontiguousarray(array)
    out.flags.writeable = False
    return out


def _pair(first: Array, second: Array) -> Fragment:
    return _freeze(first), _freeze(second)


def _shape(shape: str) -> tuple[int, int, int]:
    m, _, rest = shape[1:].partition("n")
    n, _, k = rest.partition("k")
    return int(m), int(n), int(k)


@cache
def mma_fragment(shape: str, operand: str, bits: int) -> Fragment:
    """(rows, columns) of mma.sync m16n8kK (and m8n8k4 f64): operand "a" [m, k], "b" [k, n], "c" or "d" [m, n].

    bits is the element's width in a register: 4, 8, 16, 32, 64. The stored half of a sparse A lies as an A of half the k.
    """
    m, n, k = _shape(shape)
    g: Array = LANES[:, None] // 4
    t: Array = LANES[:, None] % 4
    if m == 8:  # m8n8k4.f64
        if operand == "a":
            return _pair(g + 0, t + 0)
        if operand == "b":
            return _pair(t + 0, g + 0)
        two = np.arange(2)[None, :]
        return _pair(g + 0 * two, 2 * t + two)
    if operand in ("c", "d"):
        i = np.arange(m * n // 32)[None, :]
        return _pair(g + 8 * (i >> 1 & 1) + 0 * t, 8 * (i >> 2) + 2 * t + (i & 1))
    e: Array = np.arange((m if operand == "a" else n) * k // 32)[None, :]
    if bits == 64:
        return _pair(g + 8 * (e & 1), t + 4 * (e >> 1)) if operand == "a" else _pair(t + 4 * e, g + 0 * e)
    per = 32 // bits
    register: Array = e // per
    position: Array = e % per
    if operand == "a":
        return _pair(g + 8 * (register & 1), per * t + position + 4 * per * (register >> 1))
    return _pair(per * t + position + 4 * per * register, g + 0 * e)


@cache
def wgmma_accumulator(n: int) -> Fragment:
    """(rows, columns) [128 threads, n / 2] of wgmma's D (m64nN): f32 and s32 one element a register, f16 two."""
    rows, columns = mma_fragment(f"m16n{n}k16", "d", 32)
    warps: Array = 16 * np.arange(4)[:, None, None]
    return _pair((rows + warps).reshape(128, -1), np.broadcast_to(columns, (4, 32, n // 2)).reshape(128, -1))


@cache
def wgmma_a(k: int, bits: int) -> Fragment:
    """(rows, columns) [128 threads, elements] of wgmma's A in registers (m64kK)."""
    rows, columns = mma_fragment(f"m16n8k{k}", "a", bits)
    warps: Array = 16 * np.arange(4)[:, None, None]
    return _pair((rows + warps).reshape(128, -1), np.broadcast_to(columns, (4, *columns.shape)).reshape(128, -1))


@cache
def ldmatrix_map(shape: str, num: int, trans: bool, bits: int) -> Fragment:
    """(source lane, byte offset) [32 lanes, registers, elements of a register]: element's place in the row that a lane addresses.

    shape "m8n8" with bits 16 (num 1, 2, 4) or "m16n16" with bits 8 and trans (num 1, 2: 2 registers each).
    """
    lane = LANES[:, None, None]
    if shape == "m8n8" and bits == 16:
        i, e = np.arange(num)[None, :, None], np.arange(2)[None, None, :]
        row, column = (2 * (lane % 4) + e, lane // 4 + 0 * e) if trans else (lane // 4 + 0 * e, 2 * (lane % 4) + e)
        return _pair(8 * i + row, 2 * column + 0 * i)
    if shape == "m16n16" and bits == 8 and trans:
        i, e = np.arange(2 * num)[None, :, None], np.arange(4)[None, None, :]
        return _pair(16 * (i >> 1) + 4 * (lane % 4) + e, lane // 4 + 8 * (i & 1) + 0 * e)
    raise ValueError(f"ldmatrix {shape} b{bits}{' trans' if trans else ''}")


@cache
def stmatrix_map(shape: str, num: int, trans: bool, bits: int) -> Fragment:
    """(destination lane, byte offset) [32 lanes, registers, elements]: "m8n8" b16, or "m16n8" b8 trans (num 1, 2, 4)."""
    if shape == "m8n8" and bits == 16:
        return ldmatrix_map(shape, num, trans, bits)
    if shape == "m16n8" and bits == 8 and trans:
        lane, i, e = LANES[:, None, None], np.arange(num)[None, :, None], np.arange(4)[None, None, :]
        return _pair(8 * i + 2 * (lane % 4) + (e & 1), lane // 4 + 8 * (e >> 1) + 0 * i)
    raise ValueError(f"stmatrix {shape} b{bits}{' trans' if trans else ''}")


@cache
def tmem_map(shape: str, num: int, split: int = 0) -> Fragment:
    """(tensor-memory lane, column) [32 lanes, registers] of tcgen05.ld/st, relative to the address, `.xnum`.

    split is the immediate half-split offset of 16x32bx2. With .pack::16b / .unpack::16b a "column" c of this map stands
    for the tensor-memory columns 2c (low half of the register) and 2c + 1; split is then in packed columns as well.
    """
    lane = LANES[:, None]
    if shape == "32x32b":
        j = np.arange(num)[None, :]
        return _pair(lane + 0 * j, j + 0 * lane)
    if shape == "16x64b":
        j = np.arange(num)[None, :]
        return _pair(lane // 4 + 8 * (lane & 1) + 0 * j, 2 * j + (lane >> 1 & 1))
    if shape == "16x128b":
        j = np.arange(2 * num)[None, :]
        return _pair(lane // 4 + 8 * (j & 1), 4 * (j >> 1) + lane % 4)
    if shape == "16x256b":
        j = np.arange(4 * num)[None, :]
        return _pair(lane // 4 + 8 * (j >> 1 & 1), 8 * (j >> 2) + 2 * (lane % 4) + (j & 1))
    if shape == "16x32bx2":
        j = np.arange(num)[None, :]
        return _pair(lane % 16 + 0 * j, j + split * (lane // 16))
    raise ValueError(f"tcgen05.ld/st {shape}")


@cache
def copy_lanes(shape: str, multicast: str = "") -> Array:
    """tcgen05.cp: [rows, copies] tensor-memory lanes that row r of the shared-memory matrix goes to.

    ("128x256b" | "128x128b" | "4x256b", ""), ("64x128b", "warpx2::02_13" | "warpx2::01_23"), ("32x128b", "warpx4"). The
    matrix's columns (16 or 32 bytes) go to consecutive 32-bit columns. The four rows of 4x256b go to one lane of every
    quarter (from TVM's public documentation; the ISA does not say).
    """
    if shape == "4x256b":
        return _freeze(32 * np.arange(4)[:, None])
    if shape in ("128x256b", "128x128b"):
        return _freeze(np.arange(128)[:, None])
    row = np.arange(64)[:, None]
    if (shape, multicast) == ("64x128b", "warpx2::02_13"):
        return _freeze(row + np.array([0, 64]))
    if (shape, multicast) == ("64x128b", "warpx2::01_23"):
        return _freeze(row % 32 + 64 * (row // 32) + np.array([0, 32]))
    if (shape, multicast) == ("32x128b", "warpx4"):
        return _freeze(row[:32] + np.array([0, 32, 64, 96]))
    raise ValueError(f"tcgen05.cp {shape} {multicast}")


@cache
def accumulator_map(
    m: int, n: int, cta_group: int = 1, ws: bool = False, sparse: bool = False
) -> tuple[Array, Array, Array]:
    """(CTA of the pair, lane, column), each [m, n], of tcgen05.mma's D relative to its address (layouts A to G)."""
    row, column = np.arange(m)[:, None], np.arange(n)[None, :]
    cta = row // (m // cta_group) + 0 * column
    local: Array = row % (m // cta_group)
    zero = 0 * (row + column)
    if local.max() == 127:  # A, D
        lane, col = local + zero, column + zero
    elif (cta_group == 2 and not sparse) or (ws and m == 64):  # B, E: the columns' upper half sits 64 lanes higher
        lane, col = local + 64 * (column // (n // 2)), column % (n // 2) + zero
    elif ws and m == 32:  # G
        lane, col = local + 32 * (column // (n // 4)), column % (n // 4) + zero
    else:  # C, F: 16 lanes of each 32
        lane, col = local % 16 + 32 * (local // 16) + zero, column + zero
    return _freeze(cta), _freeze(lane), _freeze(col)


@cache
def tmem_operand_lanes(m: int, cta_group: int = 1, ws: bool = False) -> Array:
    """Lane of each local row of A in tensor memory (relative to the address); M = 128 of a pair reads lanes 0-63.

    The data of the lower lanes must be duplicated in lanes 64-127 for that shape (and per 32 or 64 lanes for .ws).
    """
    rows = m // cta_group
    local = np.arange(rows)
    if rows == 64 and cta_group == 1 and not ws:
        return _freeze(local % 16 + 32 * (local // 16))
    return _freeze(local)


@cache
def zero_column_mask(value: int, m: int, n: int) -> tuple[Array, int]:
    """(columns of B that count as zero [n], column shift) of a zero-column mask descriptor (ISA 9.7.16.4.3).

    Runs follow the ISA's examples: a run of zero columns is the skip span + 1 long, one of used columns the use span + 1
    (the table describes the two fields the other way round).
    """
    parts = {128: 1, 64: 2, 32: 4}[m]
    skip, use, shift = (value >> 40 & 0xFF) + 1, (value >> 48 & 0xFF) + 1, value >> 56 & 0x3F
    mask: Array = np.zeros(n, np.bool_)
    if value >> 39 & 1:
        for part in range(parts):
            start, zero = value >> 8 * part & 0xFF, value >> 32 + part & 1
            period: Array = np.arange(start, start + n // parts) % (skip + use)
            mask[part * n // parts : (part + 1) * n // parts] = period < skip if zero else period >= use
    return _freeze(mask), shift


@cache
def scale_map(rows: int, count: int, scale_id: int = 0, split_pair: bool = False) -> tuple[Array, Array, Array]:
    """(lane, column, byte), each [rows, count], of a scale-factor matrix relative to its tensor-memory address.

    Row r sits in lane r % 32 (the copies in the other three lane groups must be equal), column r // 32, its factors in
    consecutive bytes from byte `scale_id`. Bytes past the word go on in the next group of columns (rows / 32 rounded up
    to 4 on), as a K = 96 or K = 128 instruction needs. `split_pair` is B of an M = 128 pair (2x2 datapaths): the upper
    half of the rows sits 64 lanes higher and the columns count from zero again.
    """
    half = rows // 2 if split_pair else rows
    row: Array = np.arange(rows)[:, None]
    factor: Array = np.arange(count)[None, :] + scale_id
    local: Array = row % half
    group = -(-half // 128) * 4
    lane = local % 32 + 64 * (row // half) + 0 * factor
    return _freeze(lane), _freeze(local // 32 + factor // 4 * group), _freeze(factor % 4 + 0 * row)

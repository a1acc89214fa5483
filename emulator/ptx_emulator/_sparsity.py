"""Structured sparsity of A: its metadata, and A with its zeros put back (PTX ISA 9.7.14.6, 9.7.15.6, 9.7.16.10.8).

A row of A has four bits of metadata per chunk: two 2-bit indices, low one first, of the elements (pairs of 4-bit elements,
16-bit halves of tf32 elements) that are stored. `metadata` gives them as [rows, chunks], `expand` the dense matrix.
Which lane holds the metadata of which chunk of mma.sp and wgmma.sp was measured on an H200.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["expand", "illegal", "metadata", "selectors", "tensor_columns", "tensor_metadata"]

Array: TypeAlias = "NDArray[Any]"
# chunk length by element bits: two of four elements are stored, one of two for 32 bits, two pairs of four for 4 bits
_CHUNK = {32: 2, 16: 4, 8: 4, 4: 8}


def selectors(k: int, bits: int) -> int:
    """How many values the sparsity selector has: 4 when one lane of a quad holds a row's metadata, 2 for two, 1 for all."""
    return 16 // (k // _CHUNK[bits])


def metadata(registers: Array, k: int, bits: int, selector: int) -> Array:
    """[16, chunks] codes of a warp's 16 rows from its 32 metadata registers."""
    chunks = k // _CHUNK[bits]
    lanes = chunks // 4  # of every quad that take part
    words = registers.astype(np.uint32).reshape(8, 4)[:, selector * lanes : (selector + 1) * lanes]
    if bits <= 8:  # a word is eight chunks of row g (even lanes) or g + 8 (odd lanes)
        codes = words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
        rows = codes.reshape(8, lanes // 2, 2, 8).transpose(2, 0, 1, 3)
    else:  # the low half is four chunks of row g, the high half of row g + 8
        halves = np.stack((words & np.uint32(0xFFFF), words >> np.uint32(16)))
        rows = halves[..., None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    return rows.reshape(16, chunks).astype(np.uint8)


def tensor_columns(k: int, bits: int) -> int:
    """32-bit columns of tensor memory that hold the metadata of one tcgen05.mma.sp with 128 rows."""
    return 1 if bits >= 16 else k // _CHUNK[bits] // 8


def tensor_metadata(words: Array, k: int, bits: int) -> Array:
    """[128, chunks] codes from the columns [128 lanes, columns] of tensor memory (CUTLASS' tmem_e_frg).

    8- and 4-bit types: lane r holds row r, chunk after chunk. 16- and 32-bit types: of every 16 lanes the first 8 hold the
    first half of K and the others the second, the rows r in the low and r + 8 in the high half of the word.
    """
    nibbles: Array = np.arange(0, 32, 4, dtype=np.uint32)
    if bits < 16:
        codes = words[:, :, None] >> nibbles & np.uint32(15)
        return codes.reshape(128, -1).astype(np.uint8)
    halves = (words[:, 0, None] >> nibbles & np.uint32(15)).reshape(8, 2, 8, 2, 4)  # 16 rows, half of K, r, + 8, chunk
    return halves.transpose(0, 3, 2, 1, 4).reshape(128, k // _CHUNK[bits]).astype(np.uint8)


def illegal(codes: Array, bits: int, ordered: bool) -> str:
    """Why metadata are undefined; empty when they are legal."""
    low, high = codes & 3, codes >> 2
    paired = low >= high if ordered else low == high
    wrong = (codes != 0b0100) & (codes != 0b1110) if bits == 32 else paired
    return f"sparsity metadata {int(codes[wrong][0]):#06b} are not defined" if wrong.any() else ""


def expand(values: Array, codes: Array, bits: int) -> Array:
    """A [rows, k] with zeros from the stored elements [rows, k / 2]."""
    rows, chunk = len(values), _CHUNK[bits]
    out = np.zeros((rows, codes.shape[1], chunk), values.dtype)
    kept = values.reshape(rows, codes.shape[1], -1)
    r, c = np.arange(rows)[:, None], np.arange(codes.shape[1])[None, :]
    if bits == 32:
        out[r, c, (codes >> 1) & 1] = kept[:, :, 0]
    elif bits == 4:
        for half in range(2):
            at = 2 * (codes >> 2 * half & 3)
            out[r, c, at], out[r, c, at + 1] = kept[:, :, 2 * half], kept[:, :, 2 * half + 1]
    else:
        for half in range(2):
            out[r, c, codes >> 2 * half & 3] = kept[:, :, half]
    return out.reshape(rows, -1)

"""T of a chunk: the columns of ``kda_inverse`` with beta, by way of a tile to memory. Imported by ``prepare_kda``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from .diagonal import LINE
from .inverse import BLOCK, BLOCKS
from .kda_inverse import columns
from .kda_words import load_floats, load_words, store_memory, store_words
from .warp import pack, store_matrices

__all__ = ["write_t"]


def write_t(io: str, scratch: Int32, tile: Int32, target: Int64, beta: Int32, thread: Int32) -> None:
    """T_ij = A_ij beta_j to ``target`` in memory, by way of the tile at ``tile``; ``beta``: address of 64 float32. By a warpgroup.

    A warp makes two pieces of every line and stores them itself: shared memory is free as soon as they have been read. A bulk copy keeps
    it longer, 1,800 cycles in a full GPU.
    """
    lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
    matrix, line = lane // 8, lane % 8
    clear_above(tile, lane, warp)

    def emit(r: int, c: int, values: Sequence[Float32]) -> None:
        factors = [load_floats(beta + (BLOCK * c + lane // 4 + 8 * h) * 4, 1)[0] for h in range(2)]
        words = [
            pack(io, values[4 * n + 2 * h] * factors[h], values[4 * n + 2 * h + 1] * factors[h])
            for n in range(2)
            for h in range(2)
        ]
        piece = (2 * c + matrix % 2) ^ line
        store_matrices(tile + (BLOCK * r + matrix // 2 * 8 + line) * LINE + (piece << 4), words, transposed=True)

    columns(scratch, warp, lane, emit)
    cute.arch.sync_warp()
    pieces = [piece_of(block, lane, warp) for block in range(BLOCKS)]
    for place, words in [(place, load_words(tile + place, 4)) for place in pieces]:
        store_memory(target + place, words)


@cute.jit
def clear_above(tile: Int32, lane: Int32, warp: Int32) -> None:
    """Zeros of T in the blocks above the diagonal: the warp's columns."""
    for block in cutlass.range(warp):
        store_words(tile + piece_of(block, lane, warp), [Int32(0)] * 4)


def piece_of(block: Any, lane: Int32, warp: Int32) -> Int32:
    """Where this lane's piece of columns 16 ``warp`` and on lies in a tile: in one of 16 lines of ``block``."""
    return (block * BLOCK + lane // 2) * LINE + (((2 * warp + lane % 2) ^ (lane // 2 % 8)) << 4)

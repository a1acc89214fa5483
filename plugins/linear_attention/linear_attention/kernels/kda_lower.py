"""M on its way to T: blocks of 8 x 8 scores into the scratch of ``inverse``, and its columns into T. Imported by ``prepare_kda``.

The scratch holds N = -M in the format that ``inverse`` states: blocks of 16 x 16, those below the diagonal as two halves of bf16, those
on it in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from .diagonal import GROUP, LINE
from .inverse import BLOCK, BLOCKS, block_number, unit_lower_inverse
from .kda_words import load_floats, load_words, store_floats, store_memory, store_words
from .warp import pack, split, store_matrices

__all__ = ["group_place", "put_lower", "write_t"]

_BYTES = 1024  # of a block
_REST = 512
_DIAGONAL = 6  # blocks below the diagonal come first


@cute.jit
def put_lower(scratch: Int32, group: Int32, column: Int32, pair: Sequence[Float32]) -> None:
    """A lane's two scores of M in row group * 8 + lane / 4, from column column * 8 + lane % 4 * 2 on; column <= group. By a warp."""
    lane = cute.arch.lane_idx()
    block, row = group // 2, group % 2 * GROUP + lane // 4
    byte = lane % 4
    negative = [-value for value in pair]
    if block == column // 2:
        place = column % 2 * 32 ^ ((row >> 1) & 1) * 32
        store_floats(scratch + (_DIAGONAL + block) * _BYTES + row * 64 + place + byte * 8, negative)
    else:
        place = (column % 2 ^ ((row >> 2) & 1)) * 16
        address = scratch + block_number(block, column // 2) * _BYTES + row * 32 + place + byte * 4
        first, rest = split(negative[0], negative[1])
        store_words(address, [Int32(first)])
        store_words(address + _REST, [Int32(rest)])


def group_place(scratch: Int32, group: Int32) -> Int32:
    """8 lines of 32 bytes, 64 apart, where nothing is before ``put_lower`` of the group's rows in its block of 16 x 16."""
    return scratch + (_DIAGONAL + group // 2) * _BYTES + group % 2 * (_BYTES // 2 + 32)


def write_t(
    io: str, scratch: Int32, tile: Int32, target: Int64, beta: Int32, thread: Int32, named_barrier: int
) -> None:
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

    unit_lower_inverse(scratch, thread, named_barrier, emit, grouped=True)
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

"""The inverse A of I - N, unit lower triangular 64 x 64, whose 8 x 8 blocks on the diagonal are the identity: by one warpgroup, from shared
memory to registers. Callers pass N = -M.

With blocks of 16, rows r and columns c, the block A_rr is I + N_rr: N_rr has one corner of 8 x 8 and its square is zero. Warp c makes column
c of A, transposed: W_c = I + N_cc^T, then W_r = S + S N_rr^T with S = sum over m = c .. r-1 of W_m N_rm^T. W_m stays in registers: the
fragment of a sum is the A operand of the next product. A product is three of mma.sync with operands split into two bf16 each, as in
``inverse``: of its keys errors are at most 2e-5 of the largest entry of A.

Scratch, ``SCRATCH_BYTES`` at a 16-byte boundary: the six blocks below the diagonal, row by row, of 16 rows of
32 bytes of bf16, first the upper halves, then at 512 the rest; the two 16-byte pieces of rows 4-7 and 12-15 trade places. Then the four
corners, 128 bytes each: 8 rows of 16 bytes, first the upper halves, then at 512 the rest. No access has bank conflicts.

Imported by ``prepare_kda`` and ``kda_lower``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from . import warp as w
from .diagonal import GROUP
from .inverse import BLOCKS, Emit

__all__ = ["SCRATCH_BYTES", "columns", "put_lower"]

_BYTES = 1024  # of a block below the diagonal
_REST = 512  # from the upper halves of a block's values to the rest
_CORNERS = BLOCKS * (BLOCKS - 1) // 2 * _BYTES
_CORNER_BYTES = 128
SCRATCH_BYTES = _CORNERS + 2 * BLOCKS * _CORNER_BYTES


def put_lower(scratch: Int32, group: Int32, column: Int32, pair: Sequence[Float32]) -> None:
    """A lane's two values of N in row group * 8 + lane / 4, from column column * 8 + lane % 4 * 2 on; column < group. By a warp."""
    lane = cute.arch.lane_idx()
    r, c = group >> 1, column >> 1
    row, piece = (group & 1) * GROUP + (lane >> 2), (column & 1) ^ (lane >> 4)
    below = scratch + _number(r, c) * _BYTES + row * 32 + piece * 16 + (lane & 3) * 4
    place = cutlass.select_(r == c, _corner(scratch, r) + lane * 4, below)
    for at, word in zip((0, _REST), w.split(*pair), strict=True):
        w.store_words(place + at, [word])


def columns(scratch: Int32, warp: Int32, lane: Int32, emit: Emit) -> None:
    """Column ``warp`` of blocks, when all of N is there. ``emit`` is that of ``inverse.columns``."""
    _Column(scratch, warp, lane, emit).run()


def _number(row: Int32, column: Int32) -> Int32:
    """The place of a block below the diagonal."""
    return (row * (row - 1) >> 1) + column


def _corner(scratch: Int32, block: Any) -> Int32:
    found: Int32 = scratch + _CORNERS + block * _CORNER_BYTES
    return found


class _Column:
    """A column of blocks. Block c + s is number s; the products of blocks before number s - 1 are issued before that one is made.

    Warps with fewer blocks leave early. Those that have one more to emit than to make read some block that is there for the products of
    the next ones, and drop them.
    """

    def __init__(self, scratch: Int32, warp: Int32, lane: Int32, emit: Emit) -> None:
        self.scratch, self.warp, self.lane, self.emit = scratch, warp, lane, emit
        row = lane % 8 + 8 * (lane >> 4)
        self.place = row * 32 + ((((lane >> 3) & 1) ^ ((row >> 2) & 1)) << 4)  # B operand, stored [n][k]
        self.rows = [cutlass.min(warp + s, BLOCKS - 1) for s in range(BLOCKS)]
        self.known: list[list[list[Uint32]]] = []

    def run(self) -> None:
        first, rest = self.corner(self.warp, transposed=True)
        g, t, one = self.lane >> 2, self.lane & 3, Uint32(0x3F80)
        ones = w.chosen(g >> 1 == t, w.chosen(g & 1 == 1, one << 16, one), Uint32(0))
        zero = Uint32(0)
        self.known.append([[ones, zero, first, ones], [zero, zero, rest, zero]])
        values = [value for pair in zip(*self.known[0], strict=True) for value in w.joined(*pair)]
        self.step(0, values, None)

    def step(self, s: int, values: Sequence[Float32], far: Any) -> None:
        """Emit block s; when it is not the last one, go on to the next. ``far``: of block s + 1, the products of those before s."""
        later: Any = None
        if s + 1 < BLOCKS:
            found = self.products(far, s + 1, s)
            for m in range(s + 1 if s + 2 < BLOCKS else 0):
                later = self.products(later, s + 2, m)
        self.emit(self.warp + s, self.warp, values)
        if s + 1 < BLOCKS:
            w.when(self.warp < BLOCKS - 1 - s, lambda: self.step(s + 1, self.completed(found, s + 1), later))

    def products(self, sums: Any, s: int, m: int) -> list[Any]:
        """W_m N_sm^T added to halves 0 and 1 of the columns of ``sums``."""
        row = self.rows[s]
        column = row - 1 if m == s - 1 else cutlass.min(self.warp + m, row - 1)
        block = self.scratch + _number(row, column) * _BYTES + self.place
        b = [w.load_matrices(block + at) for at in (0, _REST)]
        sums = sums or [None, None]
        for i, j in ((0, 0), (0, 1), (1, 0)):
            sums = [w.mma("bfloat16", self.known[m][i], b[j][2 * n : 2 * n + 2], sums[n]) for n in range(2)]
        return sums

    def completed(self, sums: Sequence[Sequence[Float32]], s: int) -> list[Float32]:
        """S + S N_ss^T of block s, which is known from then on."""
        b = self.corner(self.rows[s])
        left = _split(sums[0])
        right = sums[1]
        for i, j in ((0, 0), (0, 1), (1, 0)):
            right = w.mma("bfloat16", left[i], b[j : j + 1], right)
        if s + 1 < BLOCKS:
            self.known.append([x + y for x, y in zip(left, _split(right), strict=True)])
        return [*sums[0], *right]

    def corner(self, block: Int32, *, transposed: bool = False) -> list[Uint32]:
        """Upper halves and rest of N_rr's corner: a word each."""
        address = _corner(self.scratch, block) + self.lane % 8 * 16 + (self.lane // 8 % 2) * _REST
        return w.load_matrices(address, transposed=transposed)[:2]


def _split(values: Sequence[Float32]) -> list[list[Uint32]]:
    """Two words of upper halves, two of the rest."""
    pairs = [w.split(values[2 * i], values[2 * i + 1]) for i in range(2)]
    return [[pair[half] for pair in pairs] for half in range(2)]

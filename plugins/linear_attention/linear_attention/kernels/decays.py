"""Decays between the tokens of a chunk, exp(G_i - G_j) for j <= i, in the blocks that a warp has of a product [64, 64]: 16 rows of it.

G are inclusive sums of log decays, here to base 2. Every exponent is at most 0: of a block below the diagonal it is the sum of two, with the sum of
a token between rows and columns, here the row block's first one; blocks on the diagonal have one exponent a value. Imported by ``prepare_gdn``
and ``scores_gdn``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32

from . import warp as w
from .inverse import BLOCK, BLOCKS

__all__ = ["Decays", "Diagonal", "scaled"]

_DIAGONAL = [
    (n, h, e) for n, h in ((0, 0), (0, 1), (1, 1)) for e in range(2)
]  # of a block's values, but for zeros above


class Diagonal:
    """Of the blocks on the diagonal. ``rows``: G of rows g and g + 8 of the warp's, g = lane / 4; ``own``: of the columns of its block, [n][e]."""

    def __init__(self, thread: Int32, rows: Sequence[Float32], own: Sequence[Sequence[Float32]]) -> None:
        # Of the warp's number, which ptxas knows to be uniform, it makes predicates anew for every select.
        self.is_behind = [thread >= 32 * m for m in range(BLOCKS)]
        self.decays = {(n, h, e): w.exp2(rows[h] - own[n][e]) for n, h, e in _DIAGONAL}

    def own(self, values: Sequence[Float32], before: int = 0) -> list[Float32]:
        """Block (warp, warp - ``before``) of a product; of warps that have none, another one."""
        blocks = [values[8 * m : 8 * m + 8] for m in range(BLOCKS)]
        found = blocks[0]
        for m in range(1, BLOCKS - before):
            found = [w.chosen(self.is_behind[m + before], x, y) for x, y in zip(blocks[m], found, strict=True)]
        return list(found)

    def on_diagonal(self, block: Sequence[Float32], rows: Sequence[Float32]) -> list[Float32]:
        """The warp's block on the diagonal, decayed, times factors of rows. The upper parts of 8 x 8 matrices on the diagonal may be anything."""
        zeros = [Float32(0.0)] * 8
        for n, h, e in _DIAGONAL:
            zeros[4 * n + 2 * h + e] = block[4 * n + 2 * h + e] * (self.decays[n, h, e] * rows[h])
        return zeros


class Decays(Diagonal):
    """Of rows 16 warp to 16 warp + 15. ``rows``: G of rows g and g + 8, g = lane / 4. ``sums``: G of tokens 2 lane and 2 lane + 1.

    exp(G_i - G_j) is ``rows[h] * columns(m)[n][e]`` in blocks (warp, m), m < warp.
    """

    def __init__(
        self, thread: Int32, warp: Int32, lane: Int32, rows: Sequence[Float32], sums: Sequence[Float32]
    ) -> None:
        self.lane = lane
        anchor = w.shuffled(sums[0], 8 * warp)  # of the row block's first token
        self.rows = [w.exp2(x - anchor) for x in rows]
        self.behind = [w.exp2(anchor - x) for x in sums]  # of use in tokens before the row block
        super().__init__(thread, rows, spread(sums, warp, lane))

    def columns(self, block: Any) -> list[list[Float32]]:
        """[n][e] of the tokens of a block before the warp's rows."""
        return spread(self.behind, block, self.lane)


def scaled(block: Sequence[Float32], rows: Sequence[Float32], columns: Any) -> list[Float32]:
    """A block times factors of rows and columns."""
    return [block[4 * n + 2 * h + e] * (rows[h] * columns[n][e]) for n in range(2) for h in range(2) for e in range(2)]


def spread(pair: Sequence[Float32], block: Any, lane: Int32) -> list[list[Float32]]:
    """What the lanes hold of tokens 2 lane and 2 lane + 1, of tokens 16 block + 8 n + 2 t + e, t = lane % 4: [n][e]."""
    source = BLOCK // 2 * block + (lane & 3)
    return [[w.shuffled(x, source + 4 * n) for x in pair] for n in range(2)]

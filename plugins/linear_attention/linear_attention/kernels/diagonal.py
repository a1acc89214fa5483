"""Scores inside groups of 8 tokens, with a decay for every channel: a warp, its 8 tokens, all channels. Imported by ``prepare_kda``.

The score of row i and column j < i is sum_d x_i[d] k_j[d] e^(G_i[d] - G_j[d]), and e^(G_i - G_j) is the product of the decays of
tokens j + 1 to i: a number of [0, 1], whatever the gates. A matrix product needs it as a factor of row i times one of column j. With the
boundary b = i with its bits below the highest one of i ^ j cleared, j < b <= i, these are the products of decays b..i and j+1..b-1. So
level s (1, 2, 4, and with other warps' groups 8, 16, 32) is one product that serves all pairs whose highest differing bit is s: its
tokens with bit s are rows, scaled from their boundary on, the others are columns, scaled up to theirs. The diagonal is level 0, unscaled.

A level's operands lie in two tiles, of K (rows and columns) and of Q (rows), at the warp's own lines; the A fragment is 8 rows of Q over
the same 8 rows of K, so that one mma.sync gives both scores of a pair.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Float32, Int32, cute

from ..layout import MMA
from .kda_words import load_rows, load_words, multiply_add, pack, select, store_words
from .tiles import unpacked

__all__ = ["GROUP", "LINE", "Scores", "Tokens", "diagonal_scores", "fragment_address", "raw_scores"]

GROUP = 8
LINE = 128  # bytes


class Scores(NamedTuple):
    """A lane's part of 8 x 8 scores: row lane / 4, columns 2 (lane % 4) and the next one."""

    q: list[Float32]
    k: list[Float32]


class Tokens:
    """The warp's 8 tokens, a lane's 2 or 4 neighbouring channels of each, times decays of the tokens of a block around each. Blocks are
    of 1 token at first; ``widen`` joins two of them, ``widen_rows`` and ``widen_columns`` one with another warp's.

    rows_k, rows_q   registers of float32, [8 * channels]: k and q times the decays from the block's first token up to their own
    columns          k times the decays behind it, up to the block's last token
    totals           products of a block's decays, [channels], by its first token
    place            shared memory of the lane's channels of the first token's line, in the tile of K

    ``io`` is the type of the tiles as they were loaded; what goes to them is of ``layout.MMA``.
    """

    def __init__(self, io: str, channels: int, place: Int32) -> None:
        self.io, self.channels, self.place = io, channels, place
        self.totals: dict[int, list[Any]] = {}
        self.rows_k, self.rows_q, self.columns = (cute.make_rmem_tensor(GROUP * channels, Float32) for _ in range(3))

    def words(self, token: int, tile: Any) -> list[Any]:
        """This lane's channels of a line of the tile that lies ``tile`` bytes from that of K."""
        # 8 lines are one pattern of the swizzle: piece ^ line
        return load_words((self.place ^ Int32(token * (LINE + 16))) + tile, self.channels // 2)

    def begin(self, token: int, k: list[Any], q: list[Any], factor_k: Any, factor_q: Any, decay: list[Any]) -> None:
        """A block of one token: words as they lie in memory, factors that they keep (of k: None is 1), decays."""
        values_k, values_q = ([value for word in words for value in unpacked(self.io, word)] for words in (k, q))
        first = token * self.channels
        for i in range(self.channels):
            value = values_k[i] if factor_k is None else values_k[i] * factor_k
            self.columns[first + i] = value
            self.rows_k[first + i] = value * decay[i]
            self.rows_q[first + i] = values_q[i] * factor_q * decay[i]
        self.totals[token] = decay

    def widen(self, first: int, size: int) -> None:
        """The blocks of ``size`` tokens at ``first`` and behind it become one."""
        second = first + size
        before, behind = self.totals[first], self.totals.pop(second)
        self.widen_rows(before, second, second + size)
        self.widen_columns(behind, first, second)
        self.totals[first] = [x * y for x, y in zip(before, behind, strict=True)]

    def widen_rows(self, total: list[Any], first: int = 0, stop: int = GROUP) -> None:
        """A block with the product ``total`` joins those of these tokens, before them."""
        for at in range(first * self.channels, stop * self.channels):
            for held in (self.rows_k, self.rows_q):
                held[at] = held[at] * total[at % self.channels]

    def widen_columns(self, total: list[Any], first: int = 0, stop: int = GROUP) -> None:
        """The same, behind them."""
        for at in range(first * self.channels, stop * self.channels):
            self.columns[at] = self.columns[at] * total[at % self.channels]

    def put(self, held: Any, tile: Any, first: int = 0, stop: int = GROUP) -> None:
        """``held``, one of the registers, of these tokens to their lines of a tile."""
        for token in range(first, stop):
            at = range(token * self.channels, (token + 1) * self.channels, 2)
            words = [pack(MMA, held[i], held[i + 1]) for i in at]
            store_words((self.place ^ Int32(token * (LINE + 16))) + tile, words)


def fragment_address(rows: Int32, below: Int32, line: Int32) -> Int32:
    """The address that this lane gives to ``load_rows`` for lines ``line`` (a multiple of 8) and on of the tile at ``rows``, over the same
    lines of the tile at ``below``."""
    lane = cute.arch.lane_idx()
    tile = select((lane & 8) != 0, below, rows)
    return tile + (line + lane % 8) * LINE + ((lane // 16 ^ (lane % 8)) << 4)


def raw_scores(io: str, address: Int32, panel: int, steps: int, norms: bool) -> tuple[Any, Any, Any]:
    """Products of a token's q and k as they lie in the tiles, of token lane / 4: q k, and with ``norms`` q q and k k. Right in lanes
    where lane % 4 = lane / 8."""
    found, squares = _products(io, address, panel, steps, norms)
    odd = (cute.arch.lane_idx() // 4 & 1) != 0
    return tuple(select(odd, values[i + 1], values[i]) for values, i in ((found, 0), (squares, 0), (found, 2)))


def diagonal_scores(
    tokens: Tokens, address: Int32, behind_k: Int32, panel: int, steps: int, diagonal: Float32
) -> Scores:
    """Scores of the warp's tokens with each other, zero above the diagonal; on it, those of q are ``diagonal`` of the lanes that
    ``raw_scores`` names, those of k zero.

    ``address``: of the A fragment of Q over K; ``behind_k``: bytes from the tile of K to that of Q;
    ``steps``: channels / 16. The tiles' lines of these tokens are overwritten. The tokens are one block in the end.
    """
    lane = cute.arch.lane_idx()
    row, column = lane // 4, lane % 4 * 2
    apart = [row ^ column, row ^ (column + 1)]
    scores = [select(x == 0, diagonal, Float32(0.0)) for x in apart] + [Float32(0.0)] * 2
    # Above the diagonal there is no level.
    apart = [select(column + i < row, x, Int32(0)) for i, x in enumerate(apart)]
    for level in (1, 2, 4):
        cute.arch.sync_warp()  # all lanes have read the lines
        for first in range(0, GROUP, 2 * level):
            boundary = first + level
            tokens.put(tokens.columns, Int32(0), first, boundary)
            tokens.put(tokens.rows_k, Int32(0), boundary, boundary + level)
            tokens.put(tokens.rows_q, behind_k, boundary, boundary + level)
            tokens.widen(first, level)
        found, _ = _products(MMA, address, panel, steps, False)
        scores = [select(apart[i % 2] >= level, found[i], scores[i]) for i in range(4)]
    cute.arch.sync_warp()
    return Scores(scores[:2], scores[2:])


def _products(io: str, address: Int32, panel: int, steps: int, squares: bool) -> tuple[list[Any], list[Any]]:
    """Rows of Q and of K times K, and with ``squares`` rows of Q times Q."""
    cute.arch.sync_warp()
    found = [Float32(0.0)] * 4
    other = [Float32(0.0)] * 4
    for step in range(steps):
        a = load_rows(address, step, panel)
        # An 8 x 8 matrix lies in a B fragment as in an A fragment. With 8 channels a product B is one register, wherever it is.
        for half in (0, 2):
            found = multiply_add(io, found, a[half : half + 2], [a[half + 1]])
            if squares:
                other = multiply_add(io, other, a[half : half + 2], [a[half]])
    return found, other

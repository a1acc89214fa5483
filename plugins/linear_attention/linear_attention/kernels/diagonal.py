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

from .kda_words import load_rows, multiply_add, scaled, select, store_words

__all__ = ["GROUP", "Scores", "Tokens", "diagonal_scores", "fragment_address"]

GROUP = 8
LINE = 128  # bytes


class Scores(NamedTuple):
    """A lane's part of 8 x 8 scores: row lane / 4, columns 2 (lane % 4) and the next one."""

    q: list[Float32]
    k: list[Float32]


class Tokens:
    """The warp's 8 tokens, a lane's 2 or 4 neighbouring channels of each.

    k, q    words, [8][channels / 2]
    decay   float32, [8][channels]
    place   shared memory of the lane's channels of the first token's line, in the tile of K
    """

    def __init__(self, io: str, k: list[Any], q: list[Any], decay: list[Any], place: Int32) -> None:
        self.io, self.k, self.q, self.decay, self.place = io, k, q, decay, place

    def put(self, words: list[Any], token: int, tile: Any, factors: list[Any] | None) -> None:
        """``words`` of a token, times ``factors`` (None: as they are), to its line of the tile that lies ``tile`` bytes from that of K."""
        if factors is not None:
            words = [scaled(self.io, word, *factors[2 * i : 2 * i + 2]) for i, word in enumerate(words)]
        # 8 lines are one pattern of the swizzle: piece ^ line
        store_words((self.place ^ Int32(token * (LINE + 16))) + tile, words)

    def prefixes(self, start: list[Any] | None = None, first: int = 0, stop: int = GROUP) -> list[Any]:
        """Products of the decays of ``first`` up to each token, itself included, times ``start``."""
        found, product = [], start
        for token in range(first, stop):
            product = _times(product, self.decay[token])
            found.append(product)
        return found

    def suffixes(self, start: list[Any] | None = None, first: int = 0, stop: int = GROUP) -> list[Any]:
        """Products of the decays behind each token, up to ``stop``, times ``start``; None is 1."""
        found: list[Any] = []
        product = start
        for token in reversed(range(first, stop)):
            found.insert(0, product)
            product = _times(product, self.decay[token])
        return found


def _times(a: list[Any] | None, b: list[Any]) -> list[Any]:
    return b if a is None else [x * y for x, y in zip(a, b, strict=True)]


def fragment_address(rows: Int32, below: Int32, line: Int32) -> Int32:
    """The address that this lane gives to ``load_rows`` for lines ``line`` (a multiple of 8) and on of the tile at ``rows``, over the same
    lines of the tile at ``below``."""
    lane = cute.arch.lane_idx()
    tile = select((lane & 8) != 0, below, rows)
    return tile + (line + lane % 8) * LINE + ((lane // 16 ^ (lane % 8)) << 4)


def diagonal_scores(
    tokens: Tokens, k_tile: Int32, q_tile: Int32, line: Int32, panel: int, steps: int, norms: bool
) -> tuple[Scores, Any, Any]:
    """Scores of the warp's tokens with each other, zero above the diagonal and, of k, on it; and with ``norms`` the sums of squares of
    q and k of token lane / 4, which are right in lanes where lane % 4 = lane / 8.

    ``k_tile``, ``q_tile``: addresses; ``line``: of the first token; ``steps``: channels / 16. The tiles' lines of these tokens are overwritten.
    """
    lane = cute.arch.lane_idx()
    address = fragment_address(q_tile, k_tile, line)
    behind_k = q_tile - k_tile
    for token in range(GROUP):
        tokens.put(tokens.k[token], token, Int32(0), None)
        tokens.put(tokens.q[token], token, behind_k, None)
    found, squares = _products(tokens.io, address, panel, steps, norms)
    row, column = lane // 4, lane % 4 * 2
    apart = [row ^ column, row ^ (column + 1)]
    below = [column < row, column + 1 < row]
    scores = [select(apart[i % 2] == 0, found[i], Float32(0.0)) if i < 2 else Float32(0.0) for i in range(4)]
    odd = (row & 1) != 0
    squares_q, squares_k = select(odd, squares[1], squares[0]), select(odd, found[3], found[2])
    for level in (1, 2, 4):
        _write_level(tokens, level, behind_k)
        found, _ = _products(tokens.io, address, panel, steps, False)
        here = [below[i] & (apart[i] >= level) & (apart[i] < 2 * level) for i in range(2)]
        scores = [select(here[i % 2], found[i], scores[i]) for i in range(4)]
    cute.arch.sync_warp()
    return Scores(scores[:2], scores[2:]), squares_q, squares_k


def _write_level(tokens: Tokens, level: int, behind_k: Int32) -> None:
    """Operands of a level below that of the group; those of level 1's columns lie there."""
    cute.arch.sync_warp()
    for first in range(0, GROUP, 2 * level):
        boundary = first + level
        for token, factors in enumerate(tokens.prefixes(None, boundary, boundary + level), boundary):
            tokens.put(tokens.k[token], token, Int32(0), factors)
            tokens.put(tokens.q[token], token, behind_k, factors)
        if level > 1:
            for token, factors in enumerate(tokens.suffixes(None, first, boundary), first):
                tokens.put(tokens.k[token], token, Int32(0), factors)


def _products(io: str, address: Int32, panel: int, steps: int, squares: bool) -> tuple[list[Any], list[Any]]:
    """Rows of Q and of K times K, and with ``squares`` rows of Q times Q."""
    cute.arch.sync_warp()
    found = [Float32(0.0)] * 4
    other = [Float32(0.0)] * 4
    for step in range(steps):
        a = load_rows(address, step, panel)
        # An 8 x 8 matrix lies in a B fragment as in an A fragment.
        found = multiply_add(io, found, a, [a[1], a[3]])
        if squares:
            other = multiply_add(io, other, a, [a[0], a[2]])
    return found, other

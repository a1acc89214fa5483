"""Scores inside groups of 8 tokens, with a decay for every channel: a warp, its 8 tokens, all channels. Imported by ``prepare_kda``,
``kda_groups`` and ``kda_lower``.

The score of row i and column j < i is sum_d x_i[d] k_j[d] e^(G_i[d] - G_j[d]), and e^(G_i - G_j) is the product of the decays of
tokens j + 1 to i: a number of [0, 1], whatever the gates. A matrix product needs it as a factor of row i times one of column j. With the
boundary b = i with its bits below the highest one of i ^ j cleared, j < b <= i, these are the products of decays b..i and j+1..b-1. So
level s (1, 2, 4) is one product that serves all pairs whose highest differing bit is s: its tokens with bit s are rows, scaled from
their boundary on, the others are columns, scaled up to theirs. The diagonal is level 0, unscaled.

A level's operands lie in two tiles, of K (rows and columns) and of Q (rows), at the warp's own lines, level 2's where its gates were; the A fragment is 8 rows of Q over
the same 8 rows of K, so that one mma.sync gives both scores of a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cutlass import Float32, Int32, cute

from ..layout import MMA
from .kda_words import load_rows, load_words, multiplied, multiply_add, pack, select, store_words
from .tiles import unpacked

__all__ = ["GROUP", "LINE", "QUAD", "Beside", "Scores", "Tokens", "diagonal_scores", "fragment_address", "raw_scores"]

GROUP = 8
QUAD = 4
LINE = 128  # bytes


class Scores(NamedTuple):
    """A lane's part of 8 x 8 scores: row lane / 4, columns 2 (lane % 4) and the next one."""

    q: list[Float32]
    k: list[Float32]


class Tokens:
    """The warp's 8 tokens, a lane's 2 or 4 neighbouring channels of each, times decays of the tokens of a block around each. Blocks are
    of 1 token at first; ``widen`` joins two of them.

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
        return load_words(self._line(token) + tile, self.channels // 2)

    def begin(self, token: int, k: list[Any], q: list[Any], factor_k: Any, factor_q: Any, decay: list[Any]) -> None:
        """A block of one token: words as they lie in memory, factors that they keep (None is 1), decays."""
        values_k, values_q = ([value for word in words for value in unpacked(self.io, word)] for words in (k, q))
        first = token * self.channels
        for i in range(self.channels):
            value = values_k[i] if factor_k is None else values_k[i] * factor_k
            self.columns[first + i] = value
            self.rows_k[first + i] = value * decay[i]
            query = values_q[i] if factor_q is None else values_q[i] * factor_q
            self.rows_q[first + i] = query * decay[i]
        self.totals[token] = decay

    def widen(self, first: int, size: int) -> None:
        """The blocks of ``size`` tokens at ``first`` and behind it become one."""
        second = first + size
        before, behind = self.totals[first], self.totals.pop(second)
        for i in range(size * self.channels):
            for held in (self.rows_k, self.rows_q):
                at = second * self.channels + i
                held[at] = held[at] * before[i % self.channels]
            at = first * self.channels + i
            self.columns[at] = self.columns[at] * behind[i % self.channels]
        self.totals[first] = [x * y for x, y in zip(before, behind, strict=True)]

    def add(self, later: int, factors: Sequence[Any]) -> None:
        """To the columns of the tokens before ``later``, its own times theirs of ``factors``."""
        for at in range(later * self.channels):
            token, channel = divmod(at, self.channels)
            self.columns[at] = self.columns[at] + factors[token] * self.columns[later * self.channels + channel]

    def put(self, held: Any, tile: Any, first: int = 0, stop: int = GROUP) -> None:
        """``held``, one of the registers, of these tokens to their lines of a tile."""
        for token in range(first, stop):
            store_words(self._line(token) + tile, self.operands(held, token))

    def operands(self, held: Any, token: int) -> list[Any]:
        """A token's words."""
        values = [held[i] for i in range(token * self.channels, (token + 1) * self.channels)]
        return [pack(MMA, values[i], values[i + 1]) for i in range(0, self.channels, 2)]

    def put_words(self, words: Sequence[Any], tile: Int32, first: int) -> None:
        for token, line in enumerate(words, first):
            store_words(self._line(token) + tile, line)

    def move(self, source: Int32, tile: Int32, first: int, stop: int) -> None:
        """Words of these tokens' lines from a tile to another one."""
        for token in range(first, stop):
            store_words(self._line(token) + tile, self.words(token, source))

    def scale(self, source: Int32, tile: Int32, factors: Sequence[Any]) -> None:
        """Lines of a tile to another one, times factors of channels, rounded again."""
        words = [pack(MMA, factors[i], factors[i + 1]) for i in range(0, self.channels, 2)]
        # All loads come first: ptxas would not move them before stores.
        lines = [self.words(token, source) for token in range(GROUP)]
        for token, line in enumerate(lines):
            store_words(self._line(token) + tile, [multiplied(x, y) for x, y in zip(line, words, strict=True)])

    def _line(self, token: int) -> Int32:
        # 8 lines are one pattern of the swizzle: piece ^ line
        return self.place ^ Int32(token * (LINE + 16))


class Beside:
    """Room for the operands of a level of the warp's tokens, where its gates lie: 16 K bytes of a quad's gates have 4 lines of a tile of K,
    panel by panel, and 4 of Q.

    ``base``: of the warp; ``channel``: the first of the lane, ``key`` of all.
    """

    def __init__(self, base: Int32, channel: Int32, key: int) -> None:
        self.quad, self.behind_k, self.panel = 16 * key, 8 * key, QUAD * LINE
        in_panel = channel % (LINE // 2)
        self.place = base + channel // (LINE // 2) * self.panel + in_panel * 2
        lane = cute.arch.lane_idx()
        line = lane % GROUP
        tile = select((lane & 8) != 0, Int32(0), Int32(self.behind_k))
        self.fragment = base + line // QUAD * self.quad + tile + line % QUAD * LINE + ((lane // 16 ^ line) << 4)

    def put(self, tokens: Tokens, held: Any, tile: int, first: int, stop: int) -> None:
        for token in range(first, stop):
            line = self.place ^ Int32(token % QUAD * LINE + token * 16)
            store_words(line + (token // QUAD * self.quad + tile), tokens.operands(held, token))


def fragment_address(rows: Int32, below: Int32, line: Int32) -> Int32:
    """The address that this lane gives to ``load_rows`` for lines ``line`` (a multiple of 8) and on of the tile at ``rows``, over the same
    lines of the tile at ``below``."""
    lane = cute.arch.lane_idx()
    tile = select((lane & 8) != 0, below, rows)
    return tile + (line + lane % 8) * LINE + ((lane // 16 ^ (lane % 8)) << 4)


def raw_scores(io: str, address: Int32, panel: int, steps: int, norms: bool) -> tuple[Any, Any, Any]:
    """Products of a token's q and k as they lie in the tiles, of token lane / 4: q k, and with ``norms`` q q and k k. Right in lanes
    where lane % 4 = lane / 8."""
    cute.arch.sync_warp()
    found, squares = ([[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2))
    for step in range(steps):
        a = load_rows(address, step, panel)
        for half in range(2):
            rows, k, q = a[2 * half : 2 * half + 2], a[2 * half + 1], a[2 * half]
            found[half] = multiply_add(io, found[half], rows, [k])
            if norms:
                squares[half] = multiply_add(io, squares[half], rows, [q])
    odd = (cute.arch.lane_idx() // 4 & 1) != 0
    sums = [[x + y for x, y in zip(*halves, strict=True)] for halves in (found, squares)]
    return tuple(select(odd, values[i + 1], values[i]) for values, i in ((sums[0], 0), (sums[1], 0), (sums[0], 2)))


def diagonal_scores(
    tokens: Tokens, begin: Callable[[int], None], address: Int32, beside: Beside, behind_k: Int32, spare: Int32, panel: int,
    steps: int, diagonal: Float32,
) -> Scores:  # fmt: skip
    """Scores of the warp's tokens with each other, zero above the diagonal; on it, those of q are ``diagonal`` of the lanes that
    ``raw_scores`` names, those of k zero.

    ``begin(first)`` calls ``Tokens.begin`` for 4 tokens; ``address``: of the A fragment of Q over K; ``behind_k``, ``spare``: bytes from the
    tile of K to that of Q and to one whose lines are free; ``steps``: channels / 16. The tokens' lines and gates are overwritten. In the end
    the tokens are one block, and their rows lie in their lines of K and Q.
    """
    for quad in range(0, GROUP, QUAD):
        begin(quad)
        for first in range(quad, quad + QUAD, 2):
            _put(tokens, first, 1, behind_k)
            tokens.widen(first, 1)
        cute.arch.sync_warp()  # all lanes have read the quad's gates
        beside.put(tokens, tokens.columns, 0, quad, quad + 2)
        beside.put(tokens, tokens.rows_k, 0, quad + 2, quad + QUAD)
        beside.put(tokens, tokens.rows_q, beside.behind_k, quad + 2, quad + QUAD)
        tokens.widen(quad, 2)
        if quad == 0:
            tokens.put(tokens.rows_q, spare, 0, QUAD)
    found = _products((address, panel), (beside.fragment, beside.panel), steps=steps)
    cute.arch.sync_warp()  # all lanes have read the lines
    _put(tokens, 0, QUAD, behind_k)
    tokens.widen(0, QUAD)
    tokens.move(spare, behind_k, 0, QUAD)
    rest = [tokens.operands(tokens.rows_q, token) for token in range(QUAD, GROUP)]
    found += _products((address, panel), steps=steps)
    lane = cute.arch.lane_idx()
    row, column = lane // 4, lane % 4 * 2
    apart = [row ^ column, row ^ (column + 1)]
    scores = [select(x == 0, diagonal, Float32(0.0)) for x in apart] + [Float32(0.0)] * 2
    # Above the diagonal there is no level.
    apart = [select(column + i < row, x, Int32(0)) for i, x in enumerate(apart)]
    for level, sums in zip((1, 2, 4), found, strict=True):
        scores = [select(apart[i % 2] >= level, sums[i], scores[i]) for i in range(4)]
    cute.arch.sync_warp()
    tokens.put_words(rest, behind_k, QUAD)
    tokens.put(tokens.rows_k, Int32(0))
    return Scores(scores[:2], scores[2:])


def _put(tokens: Tokens, first: int, size: int, behind_k: Int32) -> None:
    """Operands of a level to the lines of the tokens: blocks of ``size`` tokens at ``first`` and behind it."""
    boundary = first + size
    tokens.put(tokens.columns, Int32(0), first, boundary)
    tokens.put(tokens.rows_k, Int32(0), boundary, boundary + size)
    tokens.put(tokens.rows_q, behind_k, boundary, boundary + size)


def _products(*fragments: tuple[Int32, int], steps: int) -> list[list[Any]]:
    """Rows of Q and of K times K, for every A fragment (address, bytes of a panel)."""
    cute.arch.sync_warp()
    # Sums of the channels of either half of a step: products wait for half as many before them.
    found = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in fragments]
    for step in range(steps):
        for sums, (address, panel) in zip(found, fragments, strict=True):
            a = load_rows(address, step, panel)
            # An 8 x 8 matrix lies in a B fragment as in an A fragment. With 8 channels a product B is one register, wherever it is.
            for half in range(2):
                sums[half] = multiply_add(MMA, sums[half], a[2 * half : 2 * half + 2], [a[2 * half + 1]])
    return [[x + y for x, y in zip(*sums, strict=True)] for sums in found]

"""The inverse A of a unit lower triangular 64 x 64 matrix I - N, by one warpgroup, from shared memory to registers.

Callers pass N = -L, in blocks of 16 x 16:

    put_far          block (r, m), r > m + 1, of N from a fragment
    put_beside       block (r, r - 1) of N
    put_diagonal     block (r, r) of N: what is on and above its diagonal does not count
    invert_diagonal  warp r makes D_r = (I - N_rr)^-1, and Z_r = D_r N_r,r-1
    barrier
    columns          warp c makes column c of blocks of A and hands them to ``emit``

Matrices of 8 x 8 on the diagonal are inverted by forward substitution in fp32, a column a lane; the rest are products (``_Pair``). Column c
of A, transposed: W_c = D_c^T, then W_r = W_r-1 Z_r^T + (sum over m = c .. r-2 of W_m N_rm^T) D_r^T, so that one product is all between a
block and the next one. W_m stays in registers: the fragment of a sum is the A operand of the next product. A product is three of
mma.m16n8k16 with operands split into two bf16 each: hi hi + hi lo + lo hi. That has the range of fp32, and 16 bits, where one of fp16 has
11. Bounds of the error of A, relative to its largest entry (``test_inverse``), for keys of norm 1 but in the last row:

    random, beta 0.5                      2e-6
    64 equal keys, beta 0.999             4e-6
    equal but for 0.01, beta 0.999        3e-5
    random, beta 2                        1e-5
    equal, beta 1.9                       2e-4
    equal but for 0.01, beta 1.999        1e-3
    random, of norm 3, beta 0.999         1e-4

Scratch, ``SCRATCH_BYTES`` at a 128-byte boundary: blocks (1, 0), (2, 1), (3, 2), (2, 0), (3, 0), (3, 1), then the four on the diagonal, 1024
bytes each.

    halves     16 rows of 32 bytes in bf16, first the upper halves, then at 512 the rest; the two 16-byte pieces of rows 4-7 and 12-15
               trade places. Blocks (2, 0), (3, 0), (3, 1) of N; D_r and Z_r, transposed, in the places of N_rr and N_r,r-1
    fp32       16 rows of 64 bytes (``_line``), of which those of 2, 3, 6, 7, 10, 11, 14, 15 trade their halves, and 4 and 5, 6 and 7, 12 and 13,
               14 and 15 their places. Blocks (r, r - 1) of N, with every second row in the place of its neighbour; of blocks (r, r)
               the two matrices on the diagonal, side by side

No access has bank conflicts. Imported by ``prepare_gdn``; the size of blocks also by ``decays``, ``scores_gdn``, ``kda_lower`` and, with
``Emit``, by ``kda_inverse``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from . import warp as w

__all__ = [
    "BLOCK", "BLOCKS", "SCRATCH_BYTES", "Emit", "columns", "invert_diagonal", "put_beside", "put_diagonal", "put_far",
]  # fmt: skip

BLOCK = 16
BLOCKS = 4  # of a side
_BYTES = 1024  # of a block
_REST = 512  # from the upper halves of a block's values to the rest
_BELOW = BLOCKS * (BLOCKS - 1) // 2
SCRATCH_BYTES = (_BELOW + BLOCKS) * _BYTES

Emit = Callable[[Int32, Int32, Sequence[Float32]], None]


def put_far(scratch: Int32, row: Any, column: Any, values: Sequence[Float32], lane: Int32) -> None:
    """Block (``row``, ``column``) of N, row > column + 1, from its fragment (``warp``). By a warp."""
    address = _far(scratch, row, column) + _piece(lane & 15, lane >> 4)
    for at, words in zip((0, _REST), _split(values), strict=True):
        w.store_matrices(address + at, words)


def put_beside(scratch: Int32, row: Any, values: Sequence[Float32], lane: Int32) -> None:
    """Block (``row``, ``row`` - 1) of N from its fragment. By warp ``row``."""
    place = _beside(scratch, row) + _line(lane >> 2, 64) + (lane & 3) * 8
    for n in range(2):
        for half in range(2):
            first = 4 * n + 2 * half
            w.store_words((place ^ (32 * n)) + 512 * half, values[first : first + 2])


def put_diagonal(scratch: Int32, index: Any, values: Sequence[Float32], lane: Int32) -> None:
    """Of diagonal block ``index`` of N, from its fragment, the two matrices of 8 x 8 on its own diagonal: what lies below that, the rest may
    be NaN. By warp ``index``."""
    g, t = lane >> 2, lane & 3
    zero = Float32(0.0)
    corners = [w.chosen(g > 2 * t + i % 2, values[i], zero) for i in (0, 1, 6, 7)]
    place = _diagonal(scratch, index) + _line(g, 0) + t * 8
    for half in range(2):
        w.store_words(place ^ (32 * half), corners[2 * half : 2 * half + 2])


def invert_diagonal(scratch: Int32, index: Any, corner: Sequence[Float32], lane: Int32) -> None:
    """D and Z of row ``index`` of blocks, in place. By warp ``index``, which has put the two blocks, all but ``corner``: values 2 and 3
    of the diagonal block's fragment, its matrix in rows 8 to 15 and columns 0 to 7."""
    cute.arch.sync_warp()
    _Pair(scratch, index, lane).run(corner)


def columns(scratch: Int32, warp: Int32, lane: Int32, emit: Emit) -> None:
    """Column ``warp`` of blocks, when all of N is there and ``invert_diagonal`` is done.

    ``emit(r, c, values)`` gets the fragment of block (r, c) of A *transposed*, r >= c: value 4n + 2h + e is
    A[16 r + 8 n + 2 t + e, 16 c + g + 8 h], r and c known at run time. It is called while the kernel is traced, for r - c = 0, 1, 2, 3, each
    inside the branch of the one before, which warps with r <= 3 take. Blocks with r < c are 0 and not emitted.

    All warps run one stream of instructions. Of four copies with constant places each runs once a chunk and has to be fetched for it: on an
    H200 half of the stalls in them were those of instruction fetch.
    """
    _Column(scratch, warp, lane, emit).run()


def _diagonal(scratch: Int32, index: Any) -> Any:
    return scratch + (_BELOW + index) * _BYTES


def _beside(scratch: Int32, row: Any) -> Any:
    """Of block (``row``, ``row`` - 1)."""
    return scratch + (row - 1) * _BYTES


def _far(scratch: Int32, row: Any, column: Any) -> Any:
    """Of block (``row``, ``column``), row > column + 1."""
    return scratch + (row + column + 1) * _BYTES


def _line(row: Any, turned: Any) -> Any:
    """Offset of a row of 16 floats. ``turned``: 64 where every second row is in the place of its neighbour, else 0. Bit 5 is the half's."""
    return (row >> 1) * 128 + (((((row & 1) ^ ((row >> 2) & 1)) << 6) ^ turned) | (((row >> 1) & 1) << 5))


def _piece(row: Any, piece: Any) -> Any:
    """Offset of a 16-byte piece of a row of halves."""
    return row * 32 + ((piece ^ ((row >> 2) & 1)) << 4)


def _halves(address: Int32, *, transposed: bool = False) -> list[list[Uint32]]:
    return [w.load_matrices(address + at, transposed=transposed) for at in (0, _REST)]


def _joined(halves: Sequence[Sequence[Uint32]]) -> list[Float32]:
    return [value for first, rest in zip(*halves, strict=True) for value in w.joined(first, rest)]


def _put_line(place: Int32, words: Sequence[Uint32], condition: Int32) -> None:
    """Four words, by lanes whose ``condition`` is not 0."""
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p st.shared.v4.b32 [$0], {$2, $3, $4, $5}; }"
    w.asm(text, [], [place, condition, *words], effects=True)


def _put_one(place: Int32, condition: Int32) -> None:
    """A one of I, in bf16, by lanes whose ``condition`` is not 0."""
    text = "{ .reg .pred p; .reg .b16 one; mov.b16 one, 0x3f80; setp.ne.s32 p, $1, 0; @p st.shared.b16 [$0], one; }"
    w.asm(text, [], [place, condition], effects=True)


class _Pair:
    """D and Z of a row of blocks.

    With N_rr = [[N0, 0], [M, N1]] and N_r,r-1 = [B0; B1]: D0 = (I - N0)^-1, D1 = (I - N1)^-1 and D0 B0 by substitution, lanes 0 to 7, 24 to 31
    and 8 to 23, a column each. Below them D1 M D0 and D1 (B1 + M D0 B0), as products, transposed.
    """

    def __init__(self, scratch: Int32, index: Any, lane: Int32) -> None:
        self.index, self.diagonal, self.lane = index, _diagonal(scratch, index), lane
        self.beside = w.chosen(index == 0, self.diagonal, _beside(scratch, index))

    def run(self, corner: Sequence[Float32]) -> None:
        """Row 0 has no block beside: what would be Z's is D's there."""
        lane, alone = self.lane, self.index == 0
        g, t = lane >> 2, lane & 3
        second = (lane + 8) & 16  # of lanes that have a column of Z
        own = w.chosen(second == 16, self.beside, self.diagonal)
        at = (lane & 15) ^ (second >> 1)
        x = self.substituted(own + w.chosen(alone, Int32(0), second * 4) + at * 4)
        below = self.beside + w.chosen(alone, Int32(0), Int32(512))
        below += t * 128 + ((((t >> 1) ^ 1) << 6) | ((t & 1) << 5)) + g * 4
        rest = [w.load_words(below ^ (64 * e) ^ (32 * h), 1)[0] for h in range(2) for e in range(2)]
        rest = [w.chosen(alone, Float32(0.0), value) for value in rest]
        halves = list(zip(*(w.split(x[i], x[i + 1]) for i in range(0, 8, 2)), strict=True))
        cute.arch.sync_warp()  # all lanes have read the blocks
        place = own + _piece(at, w.chosen(second == 16, Int32(0), at >> 3))
        # Of row 0, lanes of D alone: others have the same for the same places, where a one may be there by then.
        mine = (second ^ 16) | w.chosen(alone, Int32(0), Int32(16))
        for half, offset in enumerate((0, _REST)):
            _put_line(place + offset, halves[half], mine)
        _put_one(place + (at & 7) * 2, second ^ 16)
        cute.arch.sync_warp()
        row = lane & w.chosen(alone & (lane < 16), Int32(7), Int32(15))
        lines = w.chosen(lane < 16, self.beside, self.diagonal) + _piece(row, (row & lane >> 1) >> 3)
        left = [w.load_matrices(lines + offset) for offset in (0, _REST)]
        turned = w.load_matrices(
            self.diagonal + ((lane >> 3) & 1) * _REST + _piece(8 + (lane & 7), Int32(1)), transposed=True
        )
        zero = Uint32(0)
        m = w.split(*corner)
        sums = [self.product([x[:2] for x in left], m, rest), self.product([[x[2], zero] for x in left], m, None)]
        inner = self.halves(sums)
        sums = [
            self.product([half[:2] for half in inner], turned[:2], None),
            self.product([[half[2], zero] for half in inner], turned[:2], None),
        ]
        for words, offset in zip(self.halves(sums), (0, _REST), strict=True):
            w.store_matrices((lines ^ 16) + offset, [*words, zero])

    def halves(self, sums: Sequence[Sequence[Float32]]) -> list[list[Uint32]]:
        """Of the lines of Z, and the first 8 of D."""
        parts = [w.split(*sums[0][:2]), w.split(*sums[0][2:]), w.split(*sums[1][:2])]
        return [[part[half] for part in parts] for half in range(2)]

    def substituted(self, place: Int32) -> list[Float32]:
        """Rows 0 to 7 of the lane's column of N0 + N0 (D0 - I) and so on."""
        entries = self.diagonal + (((self.lane >> 3) + 1) >> 2) * 32
        x = []
        for row in range(8):
            turned = place ^ (_line(row, 0) & 96)
            x.append(w.load_words(turned + (row >> 1) * 128, 1)[0])
        for first in (0, 4):
            found = {}
            for row in range(first + 1, 8):
                count = min(row - first, 4)
                line = (entries ^ (_line(row, 0) & 32)) + (_line(row, 0) & ~32) + first * 4
                found[row] = w.load_words(line, 4 if count == 3 else count)
            for row in range(first + 1, first + 4):
                for i in range(row - first):
                    x[row] = x[row] + found[row][i] * x[first + i]
            for i in range(4):
                for row in range(first + 4, 8):
                    x[row] = x[row] + found[row][i] * x[first + i]
        return x

    def product(self, a: Sequence[Sequence[Uint32]], b: Sequence[Uint32], c: Any) -> Any:
        """Of 16 x 8 and 8 x 8, in halves."""
        for i, j in ((0, 0), (0, 1), (1, 0)):
            c = w.mma("bfloat16", a[i], [b[j]], c)
        return c


class _Column:
    """A column of blocks. Block c + s is number s; the products it needs are issued before number s - 1 is emitted.

    Warps with fewer blocks leave early. Those that have one more to emit than to make read some block that is there for the products of
    the next ones, and drop them.
    """

    def __init__(self, scratch: Int32, warp: Int32, lane: Int32, emit: Emit) -> None:
        self.scratch, self.warp, self.emit = scratch, warp, emit
        self.natural = _piece((lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1)  # B operand, stored [n][k]
        self.turned = _piece(lane & 15, lane >> 4)  # A operand; transposed, B operand stored [k][n]
        self.rows = [cutlass.min(warp + s, BLOCKS - 1) for s in range(BLOCKS)]
        self.known: list[Any] = []
        self.far: Any = None

    def run(self) -> None:
        self.known.append(_halves(_diagonal(self.scratch, self.warp) + self.turned))
        self.step(0, _joined(self.known[0]))

    def step(self, s: int, values: Sequence[Float32]) -> None:
        """Emit block s; when it is not the last one, go on to the next."""
        after, far = _Sum(), self.far
        if s + 1 < BLOCKS:
            if s:
                self.known.append(_split(values))
                after.add(_split(far.values()), self.inverted(s + 1))
            after.add(self.known[s], self.beside(s + 1))
        if s + 2 < BLOCKS:
            self.far = _Sum()
            for m in range(s + 1):
                self.far.add(self.known[m], self.below(s + 2, m))
        self.emit(self.warp + s, self.warp, values)
        if s + 1 < BLOCKS:
            w.when(self.warp < BLOCKS - 1 - s, lambda: self.step(s + 1, after.values()))

    def inverted(self, s: int) -> list[list[Uint32]]:
        return _halves(_diagonal(self.scratch, self.rows[s]) + self.turned, transposed=True)

    def beside(self, s: int) -> list[list[Uint32]]:
        return _halves(_beside(self.scratch, self.rows[s]) + self.turned, transposed=True)

    def below(self, s: int, m: int) -> list[list[Uint32]]:
        return _halves(_far(self.scratch, self.rows[s], self.warp + m) + self.natural)


def _split(values: Sequence[Float32]) -> list[list[Uint32]]:
    pairs = [w.split(values[2 * i], values[2 * i + 1]) for i in range(4)]
    return [[pair[half] for pair in pairs] for half in range(2)]


class _Sum:
    """A 16 x 16 sum of products of operands in halves."""

    def __init__(self) -> None:
        self.parts: list[list[Float32] | None] = [None, None]

    def add(self, a: Sequence[Sequence[Uint32]], b: Sequence[Sequence[Uint32]]) -> None:
        """a b; ``b`` as load_matrices gives it: two words for columns 0-7, two for 8-15."""
        for i, j in ((0, 0), (0, 1), (1, 0)):
            for n in range(2):
                self.parts[n] = w.mma("bfloat16", a[i], b[j][2 * n : 2 * n + 2], self.parts[n])

    def values(self) -> list[Float32]:
        return [x for part in self.parts for x in part or ()]

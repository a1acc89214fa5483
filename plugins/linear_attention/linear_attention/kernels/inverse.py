# ruff: noqa: ANN202  the DSL reads return annotations
"""The inverse A of a unit lower triangular 64 x 64 matrix I - N, by one warpgroup, from shared memory to registers.

Callers pass N = -L: nothing of it on and above the diagonal is read but for the diagonal blocks' zeros, which ``put_diagonal`` makes.

    put_block      block (r, m), r > m, of N from a fragment, by any warp
    put_diagonal   block (r, r) of N, by warp r
    unit_lower_inverse   warp c inverts diagonal block c; barrier; warp c makes column c of blocks and hands them to ``emit``

Diagonal blocks are inverted by forward substitution in fp32. Column c of A, transposed: W_c = D_c^-T, and for r > c
W_r = (sum over m = c .. r-1 of W_m N_rm^T) D_r^-T, where W_m stays in registers: the fragment of a sum is the A operand of the next
product. A product is three of mma.m16n8k16 with operands split into two bf16 each: hi hi + hi lo + lo hi. That has the range of fp32,
and 16 bits. Largest error of A for keys of norm 1, one fp16 product (11 bits) -> this:

    random, beta 0.5                      6e-5 -> 1e-6
    64 equal keys, beta 0.999             3e-4 -> 7e-6
    equal but for 0.01, beta 0.999        2e-3 -> 3e-5
    equal, beta 1.9                       6e-2 -> 4e-4
    equal but for 0.01, beta 1.999        1e-1 -> 6e-4

Scratch, ``SCRATCH_BYTES`` at a 16-byte boundary: the six blocks below the diagonal in the order of ``block_number``, then the four on it, 1024
bytes each. The former, and the inverses of the latter (transposed), are 16 rows of 32 bytes in bf16, first the upper halves, then at
512 the rest; the two 16-byte pieces of rows 4-7 and 12-15 trade places. A diagonal block of N is 16 rows of 16 fp32, in which
columns 0-7 and 8-15 of rows 2, 3, 6, 7, 10, 11, 14, 15 trade places. No access has bank conflicts.

Imported by ``prepare_gdn`` and ``prepare_kda``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from . import warp as w
from .tiles import fence_shared

__all__ = [
    "BLOCK", "BLOCKS", "SCRATCH_BYTES", "columns", "invert_diagonal", "put_block", "put_diagonal", "unit_lower_inverse",
]  # fmt: skip

BLOCK = 16
BLOCKS = 4  # of a side
_BYTES = 1024  # of a block
_REST = 512  # from the upper halves of a block's values to the rest
_BELOW = BLOCKS * (BLOCKS - 1) // 2
SCRATCH_BYTES = (_BELOW + BLOCKS) * _BYTES

Emit = Callable[[int, int, Sequence[Float32]], None]


def block_number(row: Any, column: Any) -> Any:
    """The place of a block below the diagonal; ints, or Int32 at run time."""
    return row * (row - 1) // 2 + column


def put_block(scratch: Int32, row: Any, column: Any, values: Sequence[Float32], lane: Int32) -> None:
    """Block (``row``, ``column``) of N, row > column, from its fragment (``warp``). By a warp."""
    pairs = [w.split(values[2 * i], values[2 * i + 1]) for i in range(4)]
    address = scratch + block_number(row, column) * _BYTES + _piece(lane % 16, lane >> 4)
    for half, at in enumerate((0, _REST)):
        w.store_matrices(address + at, [pair[half] for pair in pairs])


def put_diagonal(scratch: Int32, index: Any, values: Sequence[Float32], lane: Int32) -> None:
    """Diagonal block ``index`` of N from its fragment: what lies below its diagonal, the rest may be NaN. By warp ``index``, or a barrier before
    the inverse."""
    g, t = lane >> 2, lane & 3
    # Columns 8-15 trade places with 0-7 in every second pair of rows.
    address = _diagonal(scratch, index) + g * 64 + t * 8
    turned = ((g >> 1) & 1) * 32
    zero = Float32(0.0)
    corner = [w.chosen(g > 2 * t + e, x, zero) for e, x in enumerate(values[:2])]
    w.store_words(address + turned, corner)
    w.store_words(address + (turned ^ 32), [zero, zero])
    w.store_words(address + 512 + turned, values[2:4])
    corner = [w.chosen(g > 2 * t + e, x, zero) for e, x in enumerate(values[6:8])]
    w.store_words(address + 512 + (turned ^ 32), corner)


def unit_lower_inverse(scratch: Int32, thread: Int32, named_barrier: int, emit: Emit) -> None:
    """Warp c of the warpgroup (``thread`` 0 to 127) makes column c of blocks of A = (I - N)^-1: the three steps below.

    One meeting at barrier ``named_barrier`` of 128 threads. Scratch may be written again after the warpgroup has met once more.
    """
    lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
    invert_diagonal(scratch, warp, lane)
    cute.arch.barrier(barrier_id=named_barrier, number_of_threads=128)
    columns(scratch, warp, lane, emit)


def invert_diagonal(scratch: Int32, index: Int32, lane: Int32) -> None:
    """Diagonal block ``index``, in place. By the warp that put it there, or after a barrier."""
    cute.arch.sync_warp()
    _substitute(_diagonal(scratch, index), lane)


def columns(
    scratch: Int32, warp: Int32, lane: Int32, emit: Emit, *, besides: Callable[[int], None] | None = None
) -> None:
    """Column ``warp`` of blocks, when all of N is there and its diagonal blocks are inverted.

    ``emit(r, c, values)`` gets the fragment of block (r, c) of A *transposed*, r >= c: value 4n + 2h + e is
    A[16 r + 8 n + 2 t + e, 16 c + g + 8 h]. It is called while the kernel is traced, for every c and r, inside a branch that warp c takes; r and
    c are Python ints. Blocks with r < c are 0 and not emitted. ``besides(c)`` is called first in that branch: work that the compiler can
    put where products are waited for.

    Ends with a fence of the thread's writes to shared memory for the async proxy. It is inside the branches as ptxas makes predicated
    instructions of branches without one, and all warps would issue those of all four.
    """
    _Columns(scratch, lane, emit, besides).choose(warp)


def _diagonal(scratch: Int32, index: Any) -> Any:
    return scratch + (_BELOW + index) * _BYTES


def _piece(row: Any, piece: Any) -> Any:
    """Offset of a 16-byte piece of a row of 16 bf16."""
    return row * 32 + ((piece ^ ((row >> 2) & 1)) << 4)


def _substitute(address: Int32, lane: Int32) -> None:
    """Invert I - N for the diagonal block at ``address``, in place: lane j and lane j + 16 make column j, and store row j of the transpose."""
    column = lane % BLOCK
    x: list[Any] = []
    for row in range(BLOCK):
        value = cutlass.select_(column == row, Float32(1.0), Float32(0.0))
        for quad in range(-(-row // 4)):
            piece = quad ^ (((row >> 1) & 1) << 1)
            entries = w.load_words(address + row * 64 + piece * 16, 4)
            for i in range(min(4, row - 4 * quad)):
                value = value + entries[i] * x[4 * quad + i]
        x.append(value)
    pairs = [w.split(x[i], x[i + 1]) for i in range(0, BLOCK, 2)]
    words = [cutlass.select_(lane < BLOCK, first, rest) for first, rest in pairs]
    cute.arch.sync_warp()  # all lanes have read the block
    target = address + (lane >> 4) * _REST
    for piece in range(2):
        w.store_words(target + _piece(column, Int32(piece)), words[4 * piece : 4 * piece + 4])


class _Columns:
    """The columns of blocks, in straight code for each warp."""

    def __init__(self, scratch: Int32, lane: Int32, emit: Emit, besides: Callable[[int], None] | None) -> None:
        self.emit, self.besides = emit, besides
        self.natural = scratch + _piece(lane % 8 + 8 * (lane >> 4), (lane >> 3) & 1)  # B operand, stored [n][k]
        self.turned = scratch + _piece(lane % 16, lane >> 4)  # A operand; transposed, B operand stored [k][n]

    @cute.jit
    def choose(self, warp: Int32):
        for column in cutlass.range_constexpr(BLOCKS):
            if warp == column:
                self.column(column)

    def column(self, c: int) -> None:
        """Sums of a row are updated by each W as soon as it is there, so that only the last product is waited for."""
        if self.besides:
            self.besides(c)
        known = self._halves(self.turned, _BELOW + c, transposed=False)
        values = [value for first, rest in zip(*known, strict=True) for value in w.joined(first, rest)]
        sums: dict[int, _Sum] = {r: _Sum() for r in range(c + 1, BLOCKS)}
        for r in range(c, BLOCKS):
            if r > c:
                total = _halves_of(sums[r].values())
                product = _Sum()
                product.add(total, self._halves(self.turned, _BELOW + r, transposed=True), last=True)
                values = product.values()
                known = _halves_of(values)
            for later in range(r + 1, BLOCKS):
                below = self._halves(self.natural, block_number(later, r), transposed=False)
                sums[later].add(known, below, last=later == r + 1)
            self.emit(r, c, values)
        fence_shared()

    def _halves(self, address: Int32, number: int, *, transposed: bool) -> tuple[list[Uint32], list[Uint32]]:
        first, rest = (w.load_matrices(address + (number * _BYTES + at), transposed=transposed) for at in (0, _REST))
        return first, rest


def _halves_of(values: Sequence[Float32]) -> tuple[list[Uint32], list[Uint32]]:
    pairs = [w.split(values[2 * i], values[2 * i + 1]) for i in range(4)]
    return [first for first, _ in pairs], [rest for _, rest in pairs]


class _Sum:
    """A 16 x 16 sum of products of operands in halves. The last product's smaller two have their own sum, so that the large one does not wait for
    them; those before it have time, and take half of the registers."""

    def __init__(self) -> None:
        self.large: list[list[Float32] | None] = [None, None]
        self.small: list[list[Float32] | None] = [None, None]

    def add(self, a: Sequence[Sequence[Uint32]], b: Sequence[Sequence[Uint32]], *, last: bool) -> None:
        """a b; ``b`` as load_matrices gives it: two words for columns 0-7, two for 8-15."""
        small = self.small if last else self.large
        for part, (i, j) in ((self.large, (0, 0)), (small, (0, 1)), (small, (1, 0))):
            for n in range(2):
                part[n] = w.mma("bfloat16", a[i], b[j][2 * n : 2 * n + 2], part[n])

    def values(self) -> list[Float32]:
        large, small = ([*(part[0] or ()), *(part[1] or ())] for part in (self.large, self.small))
        return [x + y for x, y in zip(large, small, strict=True)]

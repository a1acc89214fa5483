# ruff: noqa: ANN202  the DSL reads return annotations
"""The prepare stage of GDN: T and the vectors of a chunk from its K tile and its gates, by one warpgroup.

With S = K K^T, g the log decays of tokens, G their inclusive sum, G_C that of the last valid token, nk = 1/sqrt(S_ii + 1e-6) (1 without
l2norm), L_ij = beta_i nk_i nk_j S_ij below the diagonal, A = (I + L)^-1:

    T_ij = exp(G_i - G_j) A_ij beta_j        j <= i, else 0
    a_j = exp(G_j) nk_j     c_j = exp(G_C - G_j) nk_j     and G, nk, for what ``scores_gdn`` makes

T is 64 x 64 of ``layout.MMA``, i the line (``tiles``); the vectors are fp32 [64], in ``records.VECTORS``' places behind it. Of tokens from ``valid``
on, rows and columns of T, a, c and nk are 0, whatever K, g and beta hold there; G is G_C.

What is computed instead: A' = (I + L')^-1 with L'_ij = exp(G_i - G_j) beta_i nk_i^2 S_ij, as then T_ij = A'_ij beta_j nk_j / nk_i: only the row's own
norm is needed before the inverse, and none of the gates after it. exp(G_i - G_j) of blocks below the diagonal is the product of two
factors, with the sum of the first token behind the column block between them. All exponents are to base 2, and so is G in memory. One warp
sums the gates (``gdn_tokens``).

What rounding takes from T_ij is added to T_i+8,j, decayed: errors of rows whose sum cancels, cancel too. With 64 equal keys and beta 0.999 the
error of O goes from 6e-3 to 3e-3 (model of the scan in fp64, with T in fp16).

    wgmma K K^T in flight          decays of the blocks on the diagonal
    K K^T                          warp r: rows 16r to 16r + 15 of -L' to shared memory, 1 / nk; the vectors to memory; its blocks of the inverse
    barrier
                                   warp c: columns 16c to 16c + 15 of A' and T, T to shared memory
    barrier, the caller's          T to memory, whole lines

Heads that share K share K K^T: with several of them it is kept in the place of K, a thread's values where that thread alone reads them.

All warps run one stream of instructions (``inverse.columns``): registers are chosen by selects, places by the warp. Imported by
``prepare_chunks_gdn``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32, cute

from ..layout import MMA
from ..problem import CHUNK, Problem
from ..records import VECTORS
from . import scores, tiles
from . import warp as w
from .decays import Diagonal, scaled
from .gdn_tokens import Tokens
from .inverse import BLOCK, BLOCKS, columns, invert_diagonal, put_beside, put_diagonal, put_far
from .inverse import SCRATCH_BYTES as INVERSE_BYTES

__all__ = ["PrepareGdn"]

_VECTOR = 4 * CHUNK  # bytes of a value a token
_INVERSES, _TOKENS = (
    INVERSE_BYTES,
    INVERSE_BYTES + _VECTOR,
)  # places in scratch, behind the inverse's: 1 / nk, and what is known of tokens
_TILE_BYTES = CHUNK * 128  # of T
_BLOCK_BYTES = 1024  # of a block of K K^T that is kept
_KEPT_BYTES = BLOCKS * (BLOCKS + 1) // 2 * _BLOCK_BYTES


class PrepareGdn:
    """Of a problem with the variant gdn, whose ``io`` is the type of the K tile. ``heads``: of a CTA, which share K.

    A head's record: ``tokens.put`` by a warp; then ``run``, of one head, or once ``keep`` and then ``run_kept``, of several; then ``send``. All
    warps meet before each of them.

    k_addr          the tile, complete, at the first of ``place_bytes`` bytes, which are overwritten
    scratch_addr    ``scratch_bytes`` for this warpgroup alone, at a 128-byte boundary
    record          address in memory of T and the vectors
    valid           tokens of the chunk, 1 to 64
    thread          0 to 127 of a warpgroup
    named_barrier   a hardware barrier for this warpgroup alone
    """

    def __init__(self, problem: Problem, heads: int = 1) -> None:
        self.problem = problem
        self.tokens = Tokens(problem, _TOKENS, heads)
        self.scratch_bytes = self.tokens.stop
        self.t_at = _KEPT_BYTES if heads > 1 else 0  # from ``k_addr``
        self.place_bytes = max(problem.key * 128, self.t_at + _TILE_BYTES)

    def run(
        self, k_addr: Int32, record: Int64, scratch_addr: Int32, valid: Int32, thread: Int32, named_barrier: int
    ) -> None:
        """Of the only head: T to its place in shared memory, the vectors to memory."""
        warp, lane = _numbers(thread)
        kk = scores.issue(self.problem.io, self.problem.key, k_addr, k_addr)
        stage = _Stage(self, scratch_addr, 0, thread, warp, lane)
        inside = _inside(warp, lane, valid)
        tiles.wait(0)
        blocks = _Product(_cleaned(tiles.landed(kk), inside, valid), stage.diagonal)
        stage.run(blocks, inside, k_addr + self.t_at, record, named_barrier)

    def keep(self, k_addr: Int32, valid: Int32, thread: Int32, named_barrier: int) -> None:
        """K K^T to the place of K."""
        warp, lane = _numbers(thread)
        kk = scores.issue(self.problem.io, self.problem.key, k_addr, k_addr)
        inside = _inside(warp, lane, valid)
        tiles.wait(0)
        values = _cleaned(tiles.landed(kk), inside, valid)
        cute.arch.barrier(barrier_id=named_barrier, number_of_threads=128)  # all have read K
        _Kept(k_addr, warp, lane).put(values)

    def run_kept(
        self,
        k_addr: Int32,
        record: Int64,
        scratch_addr: Int32,
        number: Int32,
        valid: Int32,
        thread: Int32,
        named_barrier: int,
    ) -> None:
        """``run`` of the CTA's head ``number``, from what has been kept."""
        warp, lane = _numbers(thread)
        stage = _Stage(self, scratch_addr, number, thread, warp, lane)
        stage.run(
            _Kept(k_addr, warp, lane), _inside(warp, lane, valid), k_addr + self.t_at, record, named_barrier
        )  # fmt: skip

    def send(self, k_addr: Int32, record: Int64, thread: Int32) -> None:
        """T to memory. A bulk copy of it would keep the CTA's place until it has been read."""
        place, target, step = k_addr + self.t_at + thread * 16, record + Int64(thread * 16), 16 * 128
        for words, at in [(w.load_words(place + at, 4, Uint32), at) for at in range(0, _TILE_BYTES, step)]:
            w.asm(f"st.global.v4.b32 [$0 + {at}], {{$1, $2, $3, $4}};", [], [target, *words], effects=True)


def _numbers(thread: Int32) -> tuple[Int32, Int32]:
    """Warp and lane."""
    thread = _opaque(thread)
    return cute.arch.make_warp_uniform(thread >> 5), thread & 31


def _opaque(value: Int32) -> Int32:
    """What the compiler makes of it, it makes behind this point: addresses made early take registers that others need."""
    return w.asm("mov.b32 $0, $1;", [Int32], [value], effects=True)[0]


def _inside(warp: Int32, lane: Int32, valid: Int32) -> list[Any]:
    """Whether rows g and g + 8 of the warp, g = lane / 4, are tokens."""
    return [BLOCK * warp + (lane >> 2) + 8 * half < valid for half in range(2)]


@cute.jit
def _cleaned(values: list[Float32], inside: list[Any], valid: Int32):
    """A product's values with 0 in rows that are not ``inside``. Full chunks pass by."""
    if valid < CHUNK:
        values = _zeroed(values, inside)
    return values


def _zeroed(values: list[Float32], inside: list[Any]) -> list[Float32]:
    """One piece of assembly, with a fence in it: ptxas makes no predicated instructions of the branch."""
    count = len(values)
    lines = [f"setp.ne.b32 {name}, $i{i}, 0;" for i, name in enumerate("pq")]
    lines += [f"selp.f32 $r{i}, $r{i}, 0f00000000, {'pq'[i >> 1 & 1]};" for i in range(count)]
    text = "\n".join(["{", ".reg .pred p, q;", "fence.proxy.async.shared::cta;", *lines, "}"])
    return tiles.assembly(text, [Float32] * count, values, [Int32(x) for x in inside])


class _Product:
    """A warp's blocks of K K^T, in registers."""

    def __init__(self, values: Sequence[Float32], diagonal: Diagonal) -> None:
        self.values, self.diagonal = values, diagonal

    def own(self, before: int) -> Sequence[Float32]:
        """Block (warp, warp - ``before``); of warps that have none, another one."""
        return self.diagonal.own(self.values, before)

    def far(self, m: int) -> Sequence[Float32]:
        """Block (warp, m)."""
        return self.values[8 * m : 8 * m + 8]


class _Kept:
    """A warp's blocks of K K^T up to the diagonal, in shared memory."""

    def __init__(self, place: Int32, warp: Int32, lane: Int32) -> None:
        self.warp = warp
        self.place = place + (warp * (warp + 1) >> 1) * _BLOCK_BYTES + lane * 16

    def put(self, values: Sequence[Float32]) -> None:
        for m in range(BLOCKS):
            w.when(self.warp >= m, partial(self.put_block, m, values[8 * m : 8 * m + 8]))

    def put_block(self, m: int, values: Sequence[Float32]) -> None:
        for half, place in enumerate(self.halves(m)):
            w.store_words(place, values[4 * half : 4 * half + 4])

    def own(self, before: int) -> Sequence[Float32]:
        """Block (warp, warp - ``before``), which there is."""
        return self.far(self.warp - before)

    def far(self, m: Any) -> Sequence[Float32]:
        """Block (warp, m)."""
        return [value for place in self.halves(m) for value in w.load_words(place, 4)]

    def halves(self, m: Any) -> list[Int32]:
        return [self.place + m * _BLOCK_BYTES + _BLOCK_BYTES // 2 * half for half in range(2)]


class _Stage:
    """From the product to T and the vectors, of the CTA's head ``number``."""

    def __init__(
        self, prepare: PrepareGdn, scratch: Int32, number: Any, thread: Int32, warp: Int32, lane: Int32
    ) -> None:
        self.l2norm, self.tokens, self.faded = prepare.problem.l2norm, prepare.tokens, prepare.tokens.faded(number)
        self.scratch, self.warp, self.lane = scratch, warp, lane
        self.lost: list[Any] = [None, None]
        self.norms: list[Float32] = []
        self.sums, self.betas = (self.of_rows(at) for at in (self.tokens.sums, self.tokens.betas))
        self.diagonal = Diagonal(thread, self.sums, self.of_block(self.tokens.sums, warp))

    def run(self, blocks: Any, inside: Sequence[Any], place: Int32, record: Int64, named_barrier: int) -> None:
        """T to ``place`` in shared memory."""
        corner = self.put_lower(blocks)
        self.put_vectors(record, inside)
        invert_diagonal(self.scratch, self.warp, corner, self.lane)
        cute.arch.barrier(barrier_id=named_barrier, number_of_threads=128)
        cute.arch.sync_warp()  # or ptxas takes the warps for diverged, and guards every shuffle behind it
        self.lane = _opaque(self.lane)
        self.t_place = self.place_of_t(place)
        self.put_zeros()
        columns(self.scratch, self.warp, self.lane, self.put_t)

    def place_of_t(self, tile: Int32) -> Int32:
        """stmatrix: lanes have the lines of matrices (rows 0-7, 8-15) x (columns 0-7, 8-15); of T, they are (columns) x (rows)."""
        lane = self.lane
        line, piece = (lane & 7) + 8 * (lane >> 4), (lane >> 3 & 1) ^ (lane & 7) ^ (2 * self.warp)
        return tile + line * 128 + (piece << 4)

    def of_rows(self, at: int) -> list[Float32]:
        """A vector's values of the lane's rows g and g + 8."""
        place = self.scratch + at + 4 * BLOCK * self.warp + (self.lane >> 2) * 4
        return [w.load_words(place + 32 * half, 1)[0] for half in range(2)]

    def of_block(self, at: Any, block: Any) -> list[list[Float32]]:
        """A vector's values of the lane's columns in a block: [n][e]."""
        place = self.scratch + at + 4 * BLOCK * block + (self.lane & 3) * 8
        return [w.load_words(place + 32 * n, 2) for n in range(2)]

    def put_lower(self, blocks: Any) -> list[Float32]:
        """From K K^T to what the inverse reads."""
        warp, lane, scratch = self.warp, self.lane, self.scratch
        own, scales = blocks.own(0), [-beta for beta in self.betas]
        if self.l2norm:
            # Of the 8 x 8 matrix (half, half) of the diagonal block.
            squares = [x + Float32(scores.NORM_EPSILON) for x in scores.diagonal([own[:2], own[6:]], lane)]
            self.norms = [w.rsqrt(x) for x in squares]
            scales = [x * (y * y) for x, y in zip(scales, self.norms, strict=True)]
            inverses = [x * y for x, y in zip(squares, self.norms, strict=True)]
            w.store_words(scratch + _INVERSES + self.row_place(), [w.chosen((lane & 1) == 1, *inverses[::-1])])
        block = self.diagonal.on_diagonal(own, scales)
        put_diagonal(scratch, warp, block, lane)

        def decayed(values: Sequence[Float32], m: Any) -> list[Float32]:
            anchor = w.load_words(scratch + self.tokens.sums + 4 * BLOCK * (m + 1), 1)[0]
            rows = [x * w.exp2(y - anchor) for x, y in zip(scales, self.sums, strict=True)]
            return scaled(values, rows, self.of_block(self.tokens.behind, m))

        def beside() -> None:
            put_beside(scratch, warp, decayed(blocks.own(1), warp - 1), lane)

        def far(m: int) -> None:
            put_far(scratch, warp, m, decayed(blocks.far(m), m), lane)

        w.when(warp > 0, beside)
        for m in range(BLOCKS - 2):
            w.when(warp > m + 1, partial(far, m))
        return block[2:4]

    def row_place(self) -> Int32:
        """Bytes to the lane's row in a vector: row g of the warp's rows in lanes of even t, g + 8 in the others."""
        return (self.lane >> 2) * 4 + (self.lane & 1) * 32 + 4 * BLOCK * self.warp

    def put_vectors(self, record: Int64, inside: Sequence[Any]) -> None:
        """Of the warp's rows: a and G by lanes with t < 2, c and nk by the others."""
        lane = self.lane
        last = w.load_words(self.scratch + self.tokens.last, 1)[0]
        odd, second = (lane & 1) == 1, (lane & 2) == 2
        total, inside = (w.chosen(odd, x[1], x[0]) for x in (self.sums, inside))
        norm = w.chosen(odd, self.norms[1], self.norms[0]) if self.norms else Float32(1.0)
        norm = w.chosen(inside, norm, Float32(0.0))
        first, then = ((VECTORS["a"], VECTORS["sums"]), (VECTORS["c"], VECTORS["norms"]))
        offset = self.row_place() + w.chosen(second, Int32(then[0]), Int32(first[0]))
        place = record + Int64(offset + _TILE_BYTES)
        values = w.exp2(w.chosen(second, last - total, total)) * norm, w.chosen(second, norm, total)
        for value, at in zip(values, (0, then[1] - then[0]), strict=True):
            w.asm(f"st.global.b32 [$0 + {at}], $1;", [], [place, value], effects=True)
        assert then[1] - then[0] == first[1] - first[0]

    def put_t(self, r: Int32, c: Int32, values: Sequence[Float32]) -> None:
        """Block (r, c) of T from that of A' transposed: of rows j = 16c + g + 8h and columns i. In increasing order of r."""
        factors, inverses = self.betas, None
        if self.l2norm:
            factors = [x * y for x, y in zip(factors, self.norms, strict=True)]
            inverses = self.of_block(_INVERSES, r)
        words, faded = [], self.of_block(self.faded, r)
        for n in range(2):
            for h in range(2):
                pair = values[4 * n + 2 * h : 4 * n + 2 * h + 2]
                if inverses:
                    pair = [x * y for x, y in zip(pair, inverses[n], strict=True)]
                pair = [x * factors[h] for x in pair]
                if self.lost[h]:
                    pair = [x + y * z for x, y, z in zip(pair, self.lost[h], faded[n], strict=True)]
                words.append(w.pack(MMA, *pair))
                self.lost[h] = [x - y for x, y in zip(pair, w.halves(words[-1]), strict=True)]
        w.store_matrices(self.t_place + r * (BLOCK * 128), words, transposed=True)

    def put_zeros(self) -> None:
        """Above the blocks of T on its diagonal."""
        for m in range(BLOCKS - 1):
            w.when(self.warp > m, partial(w.store_words, self.t_place + m * (BLOCK * 128), [Uint32(0)] * 4))

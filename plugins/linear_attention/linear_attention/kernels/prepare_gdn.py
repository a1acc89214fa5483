# ruff: noqa: ANN202  the DSL reads return annotations
"""The prepare stage of GDN: T and the vectors of a chunk from its K tile and its gates, by one warpgroup, in shared memory.

With S = K K^T, g the log decays of tokens, G their inclusive sum, G_C that of the last valid token, nk = 1/sqrt(S_ii + 1e-6) (1 without
l2norm), L_ij = beta_i nk_i nk_j S_ij below the diagonal, A = (I + L)^-1:

    T_ij = exp(G_i - G_j) A_ij beta_j        j <= i, else 0
    a_j = exp(G_j) nk_j     c_j = exp(G_C - G_j) nk_j     and G, nk, for what ``scores_gdn`` makes

T is 64 x 64 of ``layout.MMA``, i the line (``tiles``); the vectors are fp32 [64], in ``records.VECTORS``' places. Of tokens from ``valid`` on,
rows and columns of T, a, c and nk are 0, whatever K, g and beta hold there; G is G_C.

What is computed instead: A' = (I + L')^-1 with L'_ij = exp(G_i - G_j) beta_i nk_i^2 S_ij, as then T_ij = A'_ij beta_j nk_j / nk_i: only the row's own
norm is needed before the inverse, and none of the gates after it. exp(G_i - G_j) of blocks below the diagonal is the product of two
factors, with the sum of the row block's first token between them. All exponents are to base 2, and so is G in memory. Every warp sums all
gates, two tokens a lane. A log decay counts as at least -128 (base 2), which is 0 in fp32: so G stays small, and the decays after a reset
of the state keep their digits.

What rounding takes from T_ij is added to T_i+8,j, decayed: errors of rows whose sum cancels, cancel too. With 64 equal keys and beta 0.999 the
error of O goes from 6e-3 to 3e-3 (model of the scan in fp64, with T in fp16).

    wgmma K K^T in flight          gates, G
    K K^T                          warp r: rows 16r to 16r + 15 of -L' to shared memory, 1 / nk; its blocks of the inverse
    barrier
                                   warp c: columns 16c to 16c + 15 of A' and T, rows of the vectors; fence

All warps run one stream of instructions (``inverse.columns``): registers are chosen by selects, places by the warp. Imported by
``prepare_chunks_gdn``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from ..layout import MMA
from ..problem import CHUNK, Problem
from ..records import VECTORS
from . import scores, tiles
from . import warp as w
from .arguments import Args
from .decays import Decays, scaled, spread
from .gates import Beta, Gate
from .inverse import BLOCK, BLOCKS, columns, invert_diagonal, put_beside, put_diagonal, put_far
from .inverse import SCRATCH_BYTES as INVERSE_BYTES

__all__ = ["PrepareGdn"]

_LOG2_E = math.log2(math.e)
_SMALLEST = -128.0  # of a log decay, to base 2
_INVERSES = INVERSE_BYTES  # place in scratch of 1 / nk


class _Tokens(NamedTuple):
    """A warp's sums of gates (base 2) and betas, two tokens a lane, and the last sum."""

    sums: tuple[Float32, Float32]
    betas: tuple[Float32, Float32]
    total: Float32


class PrepareGdn:
    """Of a problem with the variant gdn, whose ``io`` is the type of the K tile.

    ``scratch_bytes``: what ``run`` needs at ``scratch_addr``."""

    scratch_bytes = INVERSE_BYTES + 4 * CHUNK

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.gate, self.beta = Gate.of(problem), Beta.of(problem)

    def parameters(self, args: Args, head: Int32) -> tuple[Float32, Float32]:
        """Amplitude and bias of a head's gate, for ``run``."""
        amplitude, bias = Float32(1.0), Float32(0.0)
        if self.problem.a_log_dtype:
            amplitude = self.gate.amplitude(Float32(args.a_log[head]))
        if self.problem.bias_dtype:
            bias = Float32(args.dt_bias[head])
        return amplitude, bias

    def gates(self, args: Args, head: Int32, first_token: Int32, valid: Int32, thread: Int32) -> tuple[Any, Any]:
        """(g, beta) for ``run``: of tokens 2 lane and 2 lane + 1 of the chunk, a pair each, as they lie in memory. The loads may be issued a
        chunk ahead. Tokens from ``valid`` (1 to 64) on are not read."""
        places = [first_token + cutlass.min(2 * (thread % 32) + i, valid - 1) for i in range(2)]
        return tuple(args.g[at, head] for at in places), tuple(args.beta[at, head] for at in places)

    def run(
        self,
        k_addr: Int32,
        t_addr: Int32,
        vec_addr: Int32,
        scratch_addr: Int32,
        g: Sequence[Any],
        beta: Sequence[Any],
        amplitude: Float32,
        bias: Float32,
        valid: Int32,
        thread: Int32,
        named_barrier: int,
    ) -> None:
        """One chunk, by the 128 threads ``thread`` of a warpgroup.

        k_addr                        the tile, complete
        t_addr, vec_addr              8192 and 1024 bytes, written when all warps have read the tile, in whose place they may lie; a thread's
                                      own writes are fenced for the async proxy
        scratch_addr                  ``scratch_bytes`` for this warpgroup alone; its warps have met since an earlier run
        g, beta, amplitude, bias      of ``gates`` and ``parameters``
        valid                         tokens of the chunk, 1 to 64
        named_barrier                 a hardware barrier for this warpgroup alone
        """
        p = self.problem
        # Opaque to the compiler, which would move the addresses out of the loop over chunks, and spill them.
        lane = w.asm("mov.b32 $0, $1;", [Int32], [thread % 32], effects=True)[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        kk = scores.issue(p.io, p.key, k_addr, k_addr)
        tokens = self._tokens(g, beta, amplitude, bias, valid, lane)
        stage = _Stage(p, scratch_addr, t_addr, warp, thread, lane, tokens, _Rows(tokens, warp, lane, valid))
        tiles.wait(0)
        stage.put_lower(_cleaned(tiles.landed(kk), stage.of_rows.inside, valid))
        invert_diagonal(scratch_addr, warp, lane)
        cute.arch.barrier(barrier_id=named_barrier, number_of_threads=128)
        cute.arch.sync_warp()  # or ptxas takes the warps for diverged, and guards every shuffle behind it
        stage.put_zeros()
        columns(scratch_addr, warp, lane, stage.put_t, besides=lambda: stage.put_vectors(vec_addr))
        w.when(valid < CHUNK, lambda: _clear(t_addr, valid, warp, lane))

    def _tokens(
        self, g: Sequence[Any], beta: Sequence[Any], amplitude: Float32, bias: Float32, valid: Int32, lane: Int32
    ) -> _Tokens:
        zero, steps, betas = Float32(0.0), [], []
        for i in range(2):
            inside = 2 * lane + i < valid
            step = self.gate.log_decay(Float32(g[i]), amplitude, bias) * Float32(_LOG2_E)
            step = w.asm("max.NaN.f32 $0, $1, $2;", [Float32], [step, Float32(_SMALLEST)])[0]
            steps.append(w.chosen(inside, step, zero))
            betas.append(w.chosen(inside, self.beta.value(Float32(beta[i])), zero))
        total = w.prefix_sum(steps[0] + steps[1])
        before = w.chosen(lane >= 1, cute.arch.shuffle_sync_up(total, 1), zero)
        return _Tokens((before + steps[0], total), (betas[0], betas[1]), w.shuffled(total, 31))


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


@cute.jit
def _clear(tile: Int32, first: Int32, warp: Int32, lane: Int32) -> None:
    """Zeros in rows of a tile from ``first`` on, in the warp's 16 columns."""
    cute.arch.sync_warp()
    for row in cutlass.range(first + (lane >> 1), CHUNK, 16, unroll=1):
        w.store_words(tile + row * 128 + (((2 * warp + (lane & 1)) ^ (row & 7)) << 4), [Uint32(0)] * 4)
    tiles.fence_shared()


class _Rows:
    """Rows g and g + 8 of a warp, g = lane / 4: ``inside`` if they are tokens, sums of gates and betas."""

    def __init__(self, tokens: _Tokens, warp: Int32, lane: Int32, valid: Int32) -> None:
        rows = [BLOCK * warp + (lane >> 2) + 8 * half for half in range(2)]
        self.inside = [row < valid for row in rows]
        self.sums, self.betas = _of_rows(tokens.sums, rows), _of_rows(tokens.betas, rows)


def _of_rows(pair: Sequence[Float32], rows: Sequence[Int32]) -> list[Float32]:
    """What the lanes hold of tokens 2 lane and 2 lane + 1, of these tokens."""
    found = []
    for row in rows:
        even, odd = (w.shuffled(value, row >> 1) for value in pair)
        found.append(w.chosen((row & 1) == 1, odd, even))
    return found


class _Stage:
    """From the product to T and the vectors."""

    def __init__(
        self,
        p: Problem,
        scratch: Int32,
        t_addr: Int32,
        warp: Int32,
        thread: Int32,
        lane: Int32,
        tokens: _Tokens,
        rows: _Rows,
    ) -> None:
        self.problem, self.scratch, self.warp, self.lane = p, scratch, warp, lane
        self.tokens, self.of_rows = tokens, rows
        # stmatrix: lanes have the lines of matrices (rows 0-7, 8-15) x (columns 0-7, 8-15); of T, they are (columns) x (rows).
        self.t_place = t_addr + (lane % 8 + 8 * (lane >> 4)) * 128 + (((lane >> 3 & 1) ^ (lane % 8) ^ (2 * warp)) << 4)
        self.lost: list[Any] = [None, None]
        self.faded = [w.exp2(x - cute.arch.shuffle_sync_up(x, 4)) for x in tokens.sums]  # in 8 tokens
        self.norms: list[Float32] = []
        self.decays = Decays(thread, warp, lane, rows.sums, tokens.sums)

    def put_lower(self, kk: Sequence[Float32]) -> None:
        """From K K^T to what the inverse reads."""
        warp, lane, decays = self.warp, self.lane, self.decays
        own, scales = decays.own(kk), [-beta for beta in self.of_rows.betas]
        if self.problem.l2norm:
            # Of the 8 x 8 matrix (half, half) of the diagonal block.
            squares = [x + Float32(scores.NORM_EPSILON) for x in scores.diagonal([own[:2], own[6:]], lane)]
            self.norms = [w.rsqrt(x) for x in squares]
            scales = [x * (y * y) for x, y in zip(scales, self.norms, strict=True)]
            inverses = [x * y for x, y in zip(squares, self.norms, strict=True)]
            w.store_words(self.scratch + _INVERSES + self.row_place(), [w.chosen((lane & 1) == 1, *inverses[::-1])])
        put_diagonal(self.scratch, warp, decays.on_diagonal(own, scales), lane)
        rows = [x * y for x, y in zip(scales, decays.rows, strict=True)]

        def beside() -> None:
            put_beside(self.scratch, warp, scaled(decays.own(kk, 1), rows, decays.columns(warp - 1)), lane)

        def far(m: int) -> None:
            put_far(self.scratch, warp, m, scaled(kk[8 * m : 8 * m + 8], rows, decays.columns(m)), lane)

        w.when(warp > 0, beside)
        for m in range(BLOCKS - 2):
            w.when(warp > m + 1, partial(far, m))

    def row_place(self) -> Int32:
        """Bytes to the lane's row in a vector: row g of the warp's rows in lanes of even t, g + 8 in the others."""
        return (self.lane >> 2) * 4 + (self.lane & 1) * 32 + 4 * BLOCK * self.warp

    def put_vectors(self, vectors: Int32) -> None:
        """Of the warp's rows: a and G by lanes with t < 2, c and nk by the others."""
        rows, lane, last = self.of_rows, self.lane, self.tokens.total
        odd, second = (lane & 1) == 1, (lane & 2) == 2
        total, inside = (w.chosen(odd, x[1], x[0]) for x in (rows.sums, rows.inside))
        norm = w.chosen(odd, self.norms[1], self.norms[0]) if self.norms else Float32(1.0)
        norm = w.chosen(inside, norm, Float32(0.0))
        first, then = ((VECTORS["a"], VECTORS["sums"]), (VECTORS["c"], VECTORS["norms"]))
        place = vectors + self.row_place() + w.chosen(second, Int32(then[0]), Int32(first[0]))
        w.store_words(place, [w.exp2(w.chosen(second, last - total, total)) * norm])
        w.store_words(place + (then[1] - then[0]), [w.chosen(second, norm, total)])
        assert then[1] - then[0] == first[1] - first[0]

    def put_t(self, r: Int32, c: Int32, values: Sequence[Float32]) -> None:
        """Block (r, c) of T from that of A' transposed: of rows j = 16c + g + 8h and columns i. In increasing order of r."""
        factors, inverses = self.of_rows.betas, None
        if self.problem.l2norm:
            factors = [x * y for x, y in zip(factors, self.norms, strict=True)]
            inverses = self.inverses(r)
        words, faded = [], spread(self.faded, r, self.lane)
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

    def inverses(self, block: Int32) -> list[list[Float32]]:
        """1 / nk of a block's tokens."""
        place = self.scratch + _INVERSES + block * (4 * BLOCK) + (self.lane & 3) * 8
        return [w.load_words(place + 32 * n, 2) for n in range(2)]

    def put_zeros(self) -> None:
        """Above the blocks of T on its diagonal."""
        for m in range(BLOCKS - 1):
            place = self.t_place + m * (BLOCK * 128)
            w.when(self.warp > m, partial(w.store_words, place, [Uint32(0)] * 4))

# ruff: noqa: ANN202  the DSL reads return annotations
"""The prepare stage of GDN: T, P and the vectors of a chunk from its K and Q tiles and its gates, by one warpgroup, in shared memory.

With S = K K^T, g the log decays of tokens, G their inclusive sum, G_C that of the last valid token, nk = 1/sqrt(S_ii + 1e-6) and nq likewise of
Q (both 1 without l2norm), L_ij = beta_i nk_i nk_j S_ij below the diagonal, A = (I + L)^-1:

    T_ij = exp(G_i - G_j) A_ij beta_j        P_ij = scale nq_i nk_j exp(G_i - G_j) (q_i . k_j)        j <= i, else 0
    a_j = exp(G_j) nk_j     c_j = exp(G_C - G_j) nk_j     d_i = exp(G_i) scale nq_i     decay = exp(G_C)

T and P are 64 x 64 of ``layout.MMA``, i the line (``tiles``); the vectors are fp32: a, c, d [64], decay, at 0, 256, 512, 768 bytes.
Rows and columns of tokens from ``valid`` on are 0, whatever K, Q, g and beta hold there.

What is computed instead: A' = (I + L')^-1 with L'_ij = exp(G_i - G_j) beta_i nk_i^2 S_ij, as then T_ij = A'_ij beta_j nk_j / nk_i: only the row's own
norm is needed before the inverse, and none of the gates after it. exp(G_i - G_j) of blocks below the diagonal is the product of two
factors, with the sum of the row block's first token between them. All exponents are to base 2. Every warp sums all gates, two tokens
a lane. A log decay counts as at least -128 (base 2), which is 0 in fp32: so G stays small, and the decays after a reset of the state
keep their digits.

What rounding takes from T_ij is added to T_i+8,j, decayed: errors of rows whose sum cancels, cancel too. With 64 equal keys and beta 0.999 the
error of O goes from 6e-3 to 3e-3 (model of the scan in fp64, with T in fp16).

    wgmma K K^T, Q K^T in flight   gates, G; squares of Q
    barrier                        scratch has been read, by the chunk before
    K K^T                          warp r: rows 16r to 16r + 15 of a, c, d, of -L' to shared memory, nk; its blocks of the inverse
    barrier
    Q K^T                          warp c: rows 16c to 16c + 15 of P, columns 16c to 16c + 15 of A' and T; fence

All warps run one stream of instructions (``inverse.columns``): registers are chosen by selects, places by the warp. Imported by
``prepare_chunks_gdn``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from ..layout import MMA
from ..problem import CHUNK, Problem
from . import scores, tiles
from . import warp as w
from .arguments import Args
from .gates import Beta, Gate
from .inverse import BLOCK, BLOCKS, columns, invert_diagonal, put_beside, put_diagonal, put_far
from .inverse import SCRATCH_BYTES as INVERSE_BYTES

__all__ = ["VECTORS", "PrepareGdn"]

VECTORS = {"a": 0, "c": 256, "d": 512, "decay": 768}
"""Bytes from the vectors' place to each."""
_LOG2_E = math.log2(math.e)
_DIAGONAL = [
    (n, h, e) for n, h in ((0, 0), (0, 1), (1, 1)) for e in range(2)
]  # values of a diagonal block, but for the zeros above
_SMALLEST = -128.0  # of a log decay, to base 2
_NORM_EPSILON = 1e-6
_NORMS, _INVERSES = INVERSE_BYTES, INVERSE_BYTES + 4 * CHUNK  # places in scratch: nk, 1 / nk
_END = INVERSE_BYTES + 8 * CHUNK


class _Tokens(NamedTuple):
    """A warp's sums of gates (base 2) and betas, two tokens a lane, and the last sum."""

    sums: tuple[Float32, Float32]
    betas: tuple[Float32, Float32]
    total: Float32


class PrepareGdn:
    """Of a problem with the variant gdn, whose ``io`` is the type of the K and Q tiles.

    ``scratch_bytes``: what ``run`` needs at ``scratch_addr``."""

    scratch_bytes = -(-_END // 1024) * 1024

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
        q_addr: Int32,
        t_addr: Int32,
        p_addr: Int32,
        vec_addr: Int32,
        scratch_addr: Int32,
        g: Sequence[Any],
        beta: Sequence[Any],
        amplitude: Float32,
        bias: Float32,
        valid: Int32,
        thread: Int32,
        named_barrier: int,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """One chunk, by the 128 threads ``thread`` of a warpgroup.

        k_addr, q_addr                the tiles, complete; read no more when ``run`` is over
        t_addr, p_addr, vec_addr      8192, 8192 and 784 bytes, which are written; a thread's own writes are fenced for the async proxy
        scratch_addr                  ``scratch_bytes`` for this warpgroup alone
        g, beta, amplitude, bias      of ``gates`` and ``parameters``
        valid                         tokens of the chunk, 1 to 64
        named_barrier                 a hardware barrier for this warpgroup alone
        release                       called once all warps have read the tiles, before T, P and the vectors are written
        """
        p = self.problem
        # Opaque to the compiler, which would move the addresses out of the loop over chunks, and spill them.
        lane = w.asm("mov.b32 $0, $1;", [Int32], [thread % 32], effects=True)[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        kk = scores.issue(p.io, p.key, k_addr, k_addr)
        # With norms too, registers are short until the first product has been used: the second one is issued behind it.
        qk = [] if p.l2norm else scores.issue(p.io, p.key, q_addr, k_addr)
        tokens = self._tokens(g, beta, amplitude, bias, valid, lane)
        rows = _Rows(p, tokens, q_addr, warp, lane, valid)
        stage = _Stage(p, scratch_addr, t_addr, p_addr, warp, thread, lane, tokens, rows)
        tiles.wait(int(bool(qk)))
        kk = _cleaned(tiles.landed(kk), rows.inside, valid)
        cute.arch.barrier(barrier_id=named_barrier, number_of_threads=128)
        stage.put_lower(kk)
        if p.l2norm:
            qk = scores.issue(p.io, p.key, q_addr, k_addr)
        invert_diagonal(scratch_addr, warp, lane)
        tiles.wait(0)
        stage.qk = _cleaned(tiles.landed(qk), rows.inside, valid)
        cute.arch.barrier(barrier_id=named_barrier, number_of_threads=128)
        release()
        cute.arch.sync_warp()  # or ptxas takes the warps for diverged, and guards every shuffle behind it
        stage.put_before()
        columns(scratch_addr, warp, lane, stage.put_t, besides=lambda: stage.put_rest(vec_addr))
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
    """Rows g and g + 8 of a warp, g = lane / 4: ``inside`` if they are tokens, sums of gates, betas, and what scales q."""

    def __init__(self, p: Problem, tokens: _Tokens, q_addr: Int32, warp: Int32, lane: Int32, valid: Int32) -> None:
        rows = [BLOCK * warp + (lane >> 2) + 8 * half for half in range(2)]
        self.inside = [row < valid for row in rows]
        self.sums, self.betas = _of_rows(tokens.sums, rows), _of_rows(tokens.betas, rows)
        self.scales = [Float32(p.scale)] * 2
        if p.l2norm:
            squares = scores.squares(p.io, p.key, q_addr, warp, lane)
            scales = [Float32(p.scale) * w.rsqrt(x + Float32(_NORM_EPSILON)) for x in squares]
            self.scales = [w.chosen(x, y, Float32(0.0)) for x, y in zip(self.inside, scales, strict=True)]


def _of_rows(pair: Sequence[Float32], rows: Sequence[Int32]) -> list[Float32]:
    """What the lanes hold of tokens 2 lane and 2 lane + 1, of these tokens."""
    found = []
    for row in rows:
        even, odd = (w.shuffled(value, row >> 1) for value in pair)
        found.append(w.chosen((row & 1) == 1, odd, even))
    return found


class _Stage:
    """From products to matrices. ``qk`` is set when it is there.

    exp(G_i - G_j) is ``rows[h] * columns(m)[n][e]`` in blocks (warp, m), m < warp, and ``decays[n, h, e]`` in the block on the diagonal, above
    which it may be anything.
    """

    def __init__(
        self,
        p: Problem,
        scratch: Int32,
        t_addr: Int32,
        p_addr: Int32,
        warp: Int32,
        thread: Int32,
        lane: Int32,
        tokens: _Tokens,
        rows: _Rows,
    ) -> None:
        self.problem, self.scratch, self.warp, self.lane, self.tokens, self.of_rows = (
            p,
            scratch,
            warp,
            lane,
            tokens,
            rows,
        )
        # stmatrix: lanes have the lines of matrices (rows 0-7, 8-15) x (columns 0-7, 8-15); of T, they are (columns) x (rows).
        self.t_place = t_addr + (lane % 8 + 8 * (lane >> 4)) * 128 + (((lane >> 3 & 1) ^ (lane % 8) ^ (2 * warp)) << 4)
        self.p_line = p_addr + (lane % 16 + BLOCK * warp) * 128
        self.p_piece = (lane >> 4) ^ (lane % 8)
        # Of the warp's number in a uniform register, ptxas makes predicates anew for every select.
        self.is_warp = [thread >> 5 == m for m in range(BLOCKS)]
        self.qk: Sequence[Float32] = ()
        self.kept: list[Float32] = []
        self.lost: list[Any] = [None, None]
        self.faded = [w.exp2(x - cute.arch.shuffle_sync_up(x, 4)) for x in tokens.sums]  # in 8 tokens
        self.norms: list[Float32] = []
        anchor = w.shuffled(tokens.sums[0], 8 * warp)  # of the row block's first token
        self.rows = [w.exp2(x - anchor) for x in rows.sums]
        self.behind = [w.exp2(anchor - x) for x in tokens.sums]  # of use in tokens before the row block
        sums = self.spread(tokens.sums, warp)
        self.decays = {(n, h, e): w.exp2(rows.sums[h] - sums[n][e]) for n, h, e in _DIAGONAL}

    def spread(self, pair: Sequence[Float32], block: Any) -> list[list[Float32]]:
        """What the lanes hold of tokens 2 lane and 2 lane + 1, of tokens 16 block + 8 n + 2 t + e: [n][e]."""
        source = 8 * block + (self.lane & 3)
        return [[w.shuffled(x, source + 4 * n) for x in pair] for n in range(2)]

    def columns(self, block: Any) -> list[list[Float32]]:
        return self.spread(self.behind, block)

    def own(self, values: Sequence[Float32], before: int = 0) -> list[Float32]:
        """Block (warp, warp - ``before``) of a product; of warps that have none, another one."""
        blocks = [values[8 * m : 8 * m + 8] for m in range(BLOCKS)]
        found = blocks[0]
        for m in range(1, BLOCKS - before):
            found = [w.chosen(self.is_warp[m + before], x, y) for x, y in zip(blocks[m], found, strict=True)]
        return list(found)

    def scaled(self, block: Sequence[Float32], rows: Sequence[Float32], columns: Any) -> list[Float32]:
        return [
            block[4 * n + 2 * h + e] * (rows[h] * columns[n][e]) for n in range(2) for h in range(2) for e in range(2)
        ]

    def on_diagonal(self, block: Sequence[Float32], rows: Sequence[Float32]) -> list[Float32]:
        """But for the 8 x 8 matrices on the diagonal, whose upper parts may be anything."""
        zeros = [Float32(0.0)] * 8
        for n, h, e in _DIAGONAL:
            zeros[4 * n + 2 * h + e] = block[4 * n + 2 * h + e] * (self.decays[n, h, e] * rows[h])
        return zeros

    def put_lower(self, kk: Sequence[Float32]) -> None:
        """From K K^T to what the inverse reads."""
        warp, lane = self.warp, self.lane
        own, scales = self.own(kk), [-beta for beta in self.of_rows.betas]
        if self.problem.l2norm:
            # Of the 8 x 8 matrix (half, half) of the diagonal block.
            squares = [x + Float32(_NORM_EPSILON) for x in scores.diagonal([own[:2], own[6:]], lane)]
            self.norms = [w.rsqrt(x) for x in squares]
            scales = [x * (y * y) for x, y in zip(scales, self.norms, strict=True)]
            inverses = [x * y for x, y in zip(squares, self.norms, strict=True)]
            odd, second = (lane & 1) == 1, (lane & 2) == 2
            norm, inverse = (w.chosen(odd, x[1], x[0]) for x in (self.norms, inverses))
            place = self.scratch + _NORMS + self.row_place() + w.chosen(second, Int32(_INVERSES - _NORMS), Int32(0))
            w.store_words(place, [w.chosen(second, inverse, norm)])
        put_diagonal(self.scratch, warp, self.on_diagonal(own, scales), lane)
        rows = [x * y for x, y in zip(scales, self.rows, strict=True)]

        def beside() -> None:
            put_beside(self.scratch, warp, self.scaled(self.own(kk, 1), rows, self.columns(warp - 1)), lane)

        def far(m: int) -> None:
            put_far(self.scratch, warp, m, self.scaled(kk[8 * m : 8 * m + 8], rows, self.columns(m)), lane)

        w.when(warp > 0, beside)
        for m in range(BLOCKS - 2):
            w.when(warp > m + 1, partial(far, m))

    def row_place(self) -> Int32:
        """Bytes to the lane's row in a vector: row g of the warp's rows in lanes of even t, g + 8 in the others."""
        return (self.lane >> 2) * 4 + (self.lane & 1) * 32 + 4 * BLOCK * self.warp

    def put_vectors(self, vectors: Int32) -> None:
        """Of the warp's rows: a and d by lanes with t < 2, c by the others."""
        rows, lane, last = self.of_rows, self.lane, self.tokens.total
        odd, second = (lane & 1) == 1, (lane & 2) == 2
        total, scale, inside = (w.chosen(odd, x[1], x[0]) for x in (rows.sums, rows.scales, rows.inside))
        value = w.exp2(w.chosen(second, last - total, total))
        value = w.chosen(inside, value, Float32(0.0))
        place = vectors + self.row_place()
        norm = w.chosen(odd, self.norms[1], self.norms[0]) if self.norms else None
        at = w.chosen(second, Int32(VECTORS["c"]), Int32(VECTORS["a"]))
        w.store_words(place + at, [value if norm is None else value * norm])
        w.when((lane & 2) == 0, lambda: w.store_words(place + VECTORS["d"], [value * scale]))
        w.when((self.warp == 0) & (lane == 0), lambda: w.store_words(vectors + VECTORS["decay"], [w.exp2(last)]))

    def put_t(self, r: Int32, c: Int32, values: Sequence[Float32]) -> None:
        """Block (r, c) of T from that of A' transposed: of rows j = 16c + g + 8h and columns i. In increasing order of r."""
        factors, inverses = self.of_rows.betas, None
        if self.problem.l2norm:
            factors = [x * y for x, y in zip(factors, self.norms, strict=True)]
            inverses = self.load_columns(_INVERSES, r)
        words, faded = [], self.spread(self.faded, r)
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

    def load_columns(self, vector: int, block: Any) -> list[list[Float32]]:
        place = self.scratch + vector + block * (4 * BLOCK) + (self.lane & 3) * 8
        return [w.load_words(place + 32 * n, 2) for n in range(2)]

    def put_before(self) -> None:
        """P left of the warp's diagonal block, which is kept for later, and the zeros around. So that the registers of ``qk`` are free."""
        zeros, warp = [Uint32(0)] * 4, self.warp
        rows = [x * y for x, y in zip(self.of_rows.scales, self.rows, strict=True)]
        self.kept = self.own(self.qk)

        def before(m: int) -> None:
            w.store_words(self.t_place + m * (BLOCK * 128), zeros)
            columns = self.columns(m)
            if self.problem.l2norm:
                norms = self.load_columns(_NORMS, m)
                columns = [[x * y for x, y in zip(*pair, strict=True)] for pair in zip(columns, norms, strict=True)]
            self.store_p(m, self.scaled(self.qk[8 * m : 8 * m + 8], rows, columns))

        for m in range(BLOCKS - 1):
            w.when(warp > m, partial(before, m))
            w.when(warp <= m, partial(self.zero_p, m + 1))

    def put_rest(self, vectors: Int32) -> None:
        """The diagonal block of P, and the vectors."""
        self.put_vectors(vectors)
        values = self.on_diagonal(self.kept, self.of_rows.scales)
        lower = (self.lane >> 2) - (self.lane & 3) * 2  # i - j in the 8 x 8 matrices on the diagonal
        for i in (0, 1, 6, 7):
            values[i] = w.chosen(lower >= i % 2, values[i], Float32(0.0))
        if self.problem.l2norm:
            norms = self.load_columns(_NORMS, self.warp)
            values = [x * norms[i // 4][i % 2] for i, x in enumerate(values)]
        self.store_p(self.warp, values)

    def p_place(self, column: Any) -> Any:
        return self.p_line + ((self.p_piece ^ (2 * column)) << 4)

    def zero_p(self, column: int) -> None:
        w.store_words(self.p_place(column), [Uint32(0)] * 4)

    def store_p(self, column: Any, values: Sequence[Float32]) -> None:
        words = [w.pack(MMA, *values[i : i + 2]) for i in range(0, 8, 2)]
        w.store_matrices(self.p_place(column), words)

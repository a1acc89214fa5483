# ruff: noqa: ANN202  the DSL reads return annotations
"""The prepare stage of GDN: T, P and the vectors of a chunk from its K and Q tiles and its gates, by one warpgroup, in shared memory.

With S = K K^T, g the log decays of tokens, G their inclusive sum, G_C that of the last valid token, nk = 1/sqrt(S_ii + 1e-6) and nq likewise of
Q (both 1 without l2norm), L_ij = beta_i nk_i nk_j S_ij below the diagonal, A = (I + L)^-1:

    T_ij = exp(G_i - G_j) A_ij beta_j        P_ij = scale nq_i nk_j exp(G_i - G_j) (q_i . k_j)        j <= i, else 0
    a_j = exp(G_j) nk_j     c_j = exp(G_C - G_j) nk_j     d_i = exp(G_i) scale nq_i     decay = exp(G_C)

T and P are 64 x 64 of the io type, i the line (``tiles``); the vectors are fp32: a, c, d [64], decay, at 0, 256, 512, 768 bytes.
Rows and columns of tokens from ``valid`` on are 0, whatever K, Q, g and beta hold there.

What is computed instead: A' = (I + L')^-1 with L'_ij = beta_i nk_i^2 S_ij, as A_ij = A'_ij nk_j / nk_i; only the row's own norm is needed before
the inverse. With H = G - log nk, T_ij = exp(H_i - H_j) A'_ij beta_j and P_ij = scale nq_i exp(G_i - H_j) (q_i . k_j). All exponents are to
base 2. Every warp sums all gates, two tokens a lane. A log decay counts as at least -128 (base 2), which is 0 in fp32: so G stays
small, and the decays after a reset of the state keep their digits.

    wgmma K K^T, Q K^T in flight   gates, G; squares of Q
    K K^T                          nk, G and beta of the warp's rows
    barrier                        scratch has been read: by the chunk before
    L', G, H, beta to scratch, a, c, d, decay; wait for Q K^T
    inverse                        warp r inverts diagonal block r; barrier; warp c makes column c of blocks
    T, P, fence                    warp c: columns 16c to 16c + 15 of T, rows 16c to 16c + 15 of P

Barriers: 2 a chunk. Imported by ``prefill``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from ..problem import CHUNK, Problem
from . import scores, tiles
from . import warp as w
from .arguments import Args
from .gates import Beta, Gate
from .inverse import BLOCK, BLOCKS, columns, invert_diagonal, put_block, put_diagonal
from .inverse import SCRATCH_BYTES as INVERSE_BYTES

__all__ = ["VECTORS", "PrepareGdn"]

VECTORS = {"a": 0, "c": 256, "d": 512, "decay": 768}
"""Bytes from the vectors' place to each."""
_LOG2_E = math.log2(math.e)
_SMALLEST = -128.0  # of a log decay, to base 2
_NORM_EPSILON = 1e-6
_H, _BETA = INVERSE_BYTES, INVERSE_BYTES + 4 * CHUNK  # places in scratch
_END = INVERSE_BYTES + 8 * CHUNK


class _Tokens(NamedTuple):
    """A warp's sums of gates (base 2) and betas, two tokens a lane, and the last sum."""

    sums: tuple[Float32, Float32]
    betas: tuple[Float32, Float32]
    total: Float32


class PrepareGdn:
    """Of a problem with the variant gdn. ``scratch_bytes``: what ``run`` needs at ``scratch_addr``."""

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
    ) -> None:
        """One chunk, by the 128 threads ``thread`` of a warpgroup.

        k_addr, q_addr                the tiles, complete; read no more when ``run`` is over
        t_addr, p_addr, vec_addr      8192, 8192 and 784 bytes, which are written; a thread's own writes are fenced for the async proxy
        scratch_addr                  ``scratch_bytes`` for this warpgroup alone
        g, beta, amplitude, bias      of ``gates`` and ``parameters``
        valid                         tokens of the chunk, 1 to 64
        named_barrier                 a hardware barrier for this warpgroup alone
        """
        io, key, l2norm = self.problem.io, self.problem.key, self.problem.l2norm
        lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
        kk = scores.issue(io, key, k_addr, k_addr)

        tokens = self._tokens(g, beta, amplitude, bias, valid, lane)
        rows = [BLOCK * warp + (lane >> 2) + 8 * half for half in range(2)]
        inside = [row < valid for row in rows]
        sums, betas = (_of_rows(pair, rows) for pair in (tokens.sums, tokens.betas))
        q_scale = [Float32(self.problem.scale)] * 2
        if l2norm:
            q_squares = scores.squares(io, key, q_addr, warp, lane)
            q_scale = [x * w.rsqrt(s + Float32(_NORM_EPSILON)) for x, s in zip(q_scale, q_squares, strict=True)]

        tiles.wait(0)
        kk = tiles.landed(kk)
        norms, shifted, row_scale = [Float32(1.0)] * 2, sums, [-beta for beta in betas]
        if l2norm:
            k_squares = [
                w.chosen(x, s + Float32(_NORM_EPSILON), Float32(1.0))
                for x, s in zip(inside, _warp_diagonal(kk, warp, lane), strict=True)
            ]
            norms = [w.rsqrt(s) for s in k_squares]
            shifted = [x + Float32(0.5) * w.log2(s) for x, s in zip(sums, k_squares, strict=True)]
            row_scale = [x * (norm * norm) for x, norm in zip(row_scale, norms, strict=True)]
        below = [w.chosen(inside[i >> 1 & 1], x * row_scale[i >> 1 & 1], Float32(0.0)) for i, x in enumerate(kk)]
        qk = scores.issue(io, key, q_addr, k_addr)

        cute.arch.barrier(barrier_id=named_barrier, number_of_threads=128)
        # Lanes of even t have row g, those of odd t row g + 8.
        odd = (lane & 1) == 1
        row, h, b, total, norm, scale, real = (
            w.chosen(odd, pair[1], pair[0]) for pair in (rows, shifted, betas, sums, norms, q_scale, inside)
        )
        place = row * 4
        w.store_words(scratch_addr + _H + place, [h])
        w.store_words(scratch_addr + _BETA + place, [b])
        decayed = w.exp2(total)
        for name, value in (("a", decayed * norm), ("c", w.exp2(tokens.total - total) * norm), ("d", decayed * scale)):
            w.store_words(vec_addr + (VECTORS[name] + place), [w.chosen(real, value, Float32(0.0))])
        # All lanes of the warps write the same value.
        w.store_words(vec_addr + VECTORS["decay"], [w.exp2(tokens.total)])
        stage = _Stage(io, scratch_addr, t_addr, p_addr, lane, below, rows, inside, sums, q_scale)
        stage.put(warp)
        invert_diagonal(scratch_addr, warp, lane)
        cute.arch.barrier(barrier_id=named_barrier, number_of_threads=128)
        tiles.wait(0)
        stage.qk = tiles.landed(qk)
        columns(scratch_addr, warp, lane, stage.put_t, besides=stage.put_p)
        tiles.fence_shared()

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
        total = steps[0] + steps[1]
        for distance in (1, 2, 4, 8, 16):
            other = cute.arch.shuffle_sync_up(total, distance)
            total = total + w.chosen(lane >= distance, other, zero)
        before = w.chosen(lane >= 1, cute.arch.shuffle_sync_up(total, 1), zero)
        return _Tokens((before + steps[0], total), (betas[0], betas[1]), w.shuffled(total, 31))


def _of_rows(pair: Sequence[Float32], rows: Sequence[Int32]) -> list[Float32]:
    """What the lanes hold of tokens 2 lane and 2 lane + 1, of these tokens."""
    found = []
    for row in rows:
        even, odd = (w.shuffled(value, row >> 1) for value in pair)
        found.append(w.chosen((row & 1) == 1, odd, even))
    return found


def _warp_diagonal(values: Sequence[Float32], warp: Int32, lane: Int32) -> list[Float32]:
    """The diagonal of a 64 x 64 product, of rows g and g + 8 of the warp."""
    pairs = []
    for half in range(2):
        at = [
            BLOCK // 2 * number + 6 * half for number in range(BLOCKS)
        ]  # the 8 x 8 matrix (half, half) of block ``number``
        pairs.append([_of_warp([values[i + e] for i in at], warp) for e in range(2)])
    return scores.diagonal(pairs, lane)


def _of_warp(values: Sequence[Any], warp: Int32) -> Any:
    """values[warp]."""
    low, high = (w.chosen((warp & 1) == 1, values[i + 1], values[i]) for i in (0, 2))
    return w.chosen(warp >= 2, high, low)


class _Stage:
    """What the warps do in straight code, each its own. ``qk`` is set when it is there."""

    def __init__(
        self,
        io: str,
        scratch: Int32,
        t_addr: Int32,
        p_addr: Int32,
        lane: Int32,
        below: Sequence[Float32],
        rows: Sequence[Int32],
        inside: Sequence[Any],
        sums: Sequence[Float32],
        q_scale: Sequence[Float32],
    ) -> None:
        self.io, self.scratch, self.lane, self.below = io, scratch, lane, below
        self.sums, self.q_scale = sums, q_scale
        # stmatrix: lanes have the lines of matrices (rows 0-7, 8-15) x (columns 0-7, 8-15); of T, they are (columns) x (rows).
        self.t_line = t_addr + (lane % 8 + 8 * (lane >> 4)) * 128
        self.t_piece = (lane >> 3 & 1) ^ (lane % 8)
        self.p_line = p_addr + lane % 16 * 128
        self.p_piece = (lane >> 4) ^ (lane % 8)
        # Columns of P before this one are in, counted from the thread's first.
        bounds = [w.chosen(x, row + 1, Int32(0)) for x, row in zip(inside, rows, strict=True)]
        self.inside = inside
        self.bounds = [bound - 2 * (lane & 3) for bound in bounds]
        self.qk: Sequence[Float32] = ()
        self.columns: dict[int, list[Any]] = {}

    def t_place(self, r: int, c: int) -> Any:
        return self.t_line + (r * BLOCK * 128) + ((self.t_piece ^ (2 * c)) << 4)

    def p_place(self, r: int, c: int) -> Any:
        return self.p_line + (r * BLOCK * 128) + ((self.p_piece ^ (2 * c)) << 4)

    @cute.jit
    def put(self, warp: Int32):
        """-L' of the warp's rows, for the inverse."""
        values = [_of_warp(self.below[i::8], warp) for i in range(8)]
        put_diagonal(self.scratch, warp, values, self.lane)
        for column in cutlass.range_constexpr(BLOCKS - 1):
            if warp > column:
                put_block(self.scratch, warp, column, self.below[8 * column : 8 * column + 8], self.lane)

    def put_t(self, r: int, c: int, values: Sequence[Float32]) -> None:
        """Block (r, c) of T from that of A' transposed."""
        g, t = self.lane >> 2, self.lane & 3
        if c not in self.columns:
            place = self.scratch + g * 4
            self.columns[c] = [
                w.load_words(place + (at + 4 * (BLOCK * c + 8 * half)), 1)[0] for at in (_H, _BETA) for half in range(2)
            ]
        h, beta = self.columns[c][:2], self.columns[c][2:]
        words = []
        for n in range(2):
            h_rows = w.load_words(self.scratch + t * 8 + (_H + 4 * (BLOCK * r + 8 * n)), 2)
            for half in range(2):
                pair = []
                for e in range(2):
                    exponent = h_rows[e] - h[half]
                    if r == c:  # A' is 0 above the diagonal, where the exponent may be anything
                        below = 2 * t + (8 * n + e) >= g + 8 * half
                        exponent = w.chosen(below, exponent, Float32(_SMALLEST))
                    pair.append(values[4 * n + 2 * half + e] * (w.exp2(exponent) * beta[half]))
                words.append(w.pack(self.io, *pair))
        w.store_matrices(self.t_place(r, c), words, transposed=True)

    def put_p(self, row: int) -> None:
        """The warp's rows of P, and the zeros above its columns of T."""
        zeros = [Uint32(0)] * 4
        for other in range(BLOCKS):
            if other < row:
                w.store_words(self.t_place(other, row), zeros)
            if other > row:
                w.store_words(self.p_place(row, other), zeros)
        for column in range(row + 1):
            words = []
            for n in range(2):
                first = BLOCK * column + 8 * n
                h = w.load_words(self.scratch + (self.lane & 3) * 8 + (_H + 4 * first), 2)
                for half in range(2):
                    pair = []
                    for e in range(2):
                        x = self.qk[4 * (2 * column + n) + 2 * half + e] * self.q_scale[half]
                        x = x * w.exp2(self.sums[half] - h[e])
                        held = self.inside[half] if column < row else self.bounds[half] > first + e
                        pair.append(w.chosen(held, x, Float32(0.0)))
                    words.append(w.pack(self.io, *pair))
            w.store_matrices(self.p_place(row, column), words)

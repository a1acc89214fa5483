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
    barrier                        scratch has been read, by the chunk before
    K K^T                          warp r: rows 16r to 16r + 15 of nk, -L', H, beta, a, c, d to shared memory; its blocks of the inverse
    barrier
    Q K^T                          warp c: rows 16c to 16c + 15 of P, columns 16c to 16c + 15 of A' and T; fence

Warps have branches of their own, so that registers are indexed by constants. A warp issues 800 to 920 instructions a chunk, and 950 to
1080 with l2norm and gates of logits (K = 128, sm_90a, 128 registers, nothing spilled). Imported by ``prefill``.
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
        p = self.problem
        # Opaque to the compiler, which would move the addresses of all branches out of the loop over chunks, and spill them.
        lane = w.asm("mov.b32 $0, $1;", [Int32], [thread % 32], effects=True)[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        kk = scores.issue(p.io, p.key, k_addr, k_addr)
        qk = scores.issue(p.io, p.key, q_addr, k_addr)
        tokens = self._tokens(g, beta, amplitude, bias, valid, lane)
        rows = _Rows(p, tokens, q_addr, warp, lane, valid)
        tiles.wait(1)
        kk = _cleaned(tiles.landed(kk), rows.inside, valid)
        cute.arch.barrier(barrier_id=named_barrier, number_of_threads=128)
        stage = _Stage(p, scratch_addr, t_addr, p_addr, vec_addr, lane, tokens, rows)
        stage.begin(kk, warp, named_barrier)
        tiles.wait(0)
        stage.qk = _cleaned(tiles.landed(qk), rows.inside, valid)
        columns(scratch_addr, warp, lane, stage.put_t, besides=stage.put_p)

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
    """One piece of assembly, with a fence in it: see ``_Stage``."""
    count = len(values)
    lines = [f"setp.ne.b32 {name}, $i{i}, 0;" for i, name in enumerate("pq")]
    lines += [f"selp.f32 $r{i}, $r{i}, 0f00000000, {'pq'[i >> 1 & 1]};" for i in range(count)]
    text = "\n".join(["{", ".reg .pred p, q;", "fence.proxy.async.shared::cta;", *lines, "}"])
    return tiles.assembly(text, [Float32] * count, values, [Int32(x) for x in inside])


class _Rows:
    """Rows g and g + 8 of a warp, g = lane / 4: ``inside`` if they are tokens, sums of gates, log2 of what scales q (without its sign)."""

    def __init__(self, p: Problem, tokens: _Tokens, q_addr: Int32, warp: Int32, lane: Int32, valid: Int32) -> None:
        rows = [BLOCK * warp + (lane >> 2) + 8 * half for half in range(2)]
        self.inside = [row < valid for row in rows]
        self.rows, self.sums = rows, _of_rows(tokens.sums, rows)
        scale = Float32(math.log2(abs(p.scale)) if p.scale else -math.inf)
        self.scales = [scale, scale]
        if p.l2norm:
            squares = scores.squares(p.io, p.key, q_addr, warp, lane)
            logs = [scale - Float32(0.5) * w.log2(x + Float32(_NORM_EPSILON)) for x in squares]
            self.scales = [w.chosen(x, y, Float32(0.0)) for x, y in zip(self.inside, logs, strict=True)]


def _of_rows(pair: Sequence[Float32], rows: Sequence[Int32]) -> list[Float32]:
    """What the lanes hold of tokens 2 lane and 2 lane + 1, of these tokens."""
    found = []
    for row in rows:
        even, odd = (w.shuffled(value, row >> 1) for value in pair)
        found.append(w.chosen((row & 1) == 1, odd, even))
    return found


class _Stage:
    """What the warps do in straight code, each its own. ``qk`` is set when it is there.

    In each of the four branches is a shuffle or a fence: without one, ptxas makes predicated instructions of the branches, and all warps
    issue those of all four (seen with 13.0 and branches of 400 instructions).
    """

    def __init__(
        self,
        p: Problem,
        scratch: Int32,
        t_addr: Int32,
        p_addr: Int32,
        vec_addr: Int32,
        lane: Int32,
        tokens: _Tokens,
        rows: _Rows,
    ) -> None:
        self.problem, self.scratch, self.vectors, self.lane = p, scratch, vec_addr, lane
        self.tokens, self.rows = tokens, rows
        # stmatrix: lanes have the lines of matrices (rows 0-7, 8-15) x (columns 0-7, 8-15); of T, they are (columns) x (rows).
        self.t_line = t_addr + (lane % 8 + 8 * (lane >> 4)) * 128
        self.t_piece = (lane >> 3 & 1) ^ (lane % 8)
        self.p_line = p_addr + lane % 16 * 128
        self.p_piece = (lane >> 4) ^ (lane % 8)
        self.qk: Sequence[Float32] = ()
        self.factors: dict[int, tuple[list[Float32], ...]] = {}

    def t_place(self, r: int, c: int) -> Any:
        return self.t_line + (r * BLOCK * 128) + ((self.t_piece ^ (2 * c)) << 4)

    def p_place(self, r: int, c: int) -> Any:
        return self.p_line + (r * BLOCK * 128) + ((self.p_piece ^ (2 * c)) << 4)

    @cute.jit
    def begin(self, kk: list[Float32], warp: Int32, named_barrier: Any):
        """From K K^T to what the inverse reads, and the vectors; ends with the meeting at the barrier."""
        for row in cutlass.range_constexpr(BLOCKS):
            if warp == row:
                self.put_row(kk, row)
                cute.arch.barrier(barrier_id=named_barrier, number_of_threads=128)

    def put_row(self, kk: Sequence[Float32], row: int) -> None:
        rows, lane = self.rows, self.lane
        betas = _of_rows(self.tokens.betas, rows.rows)
        norms, scale = [Float32(0.0)] * 2, [-beta for beta in betas]
        if self.problem.l2norm:
            # Of the 8 x 8 matrix (half, half) of the diagonal block.
            squares = scores.diagonal([kk[8 * row + 6 * half : 8 * row + 6 * half + 2] for half in range(2)], lane)
            squares = [x + Float32(_NORM_EPSILON) for x in squares]
            norms = [Float32(-0.5) * w.log2(x) for x in squares]
            scale = [x * w.reciprocal(y) for x, y in zip(scale, squares, strict=True)]
        for column in range(row + 1):
            values = [x * scale[i >> 1 & 1] for i, x in enumerate(kk[8 * column : 8 * column + 8])]
            if column < row:
                put_block(self.scratch, row, column, values, lane)
            else:
                put_diagonal(self.scratch, row, values, lane)
        self.put_vectors(betas, norms, row)
        invert_diagonal(self.scratch, row, lane)

    def put_vectors(self, betas: Sequence[Float32], norms: Sequence[Float32], row: int) -> None:
        """Of the warp's rows: lanes of even t have row g, those of odd t row g + 8. ``norms``: log2 nk."""
        rows, lane, last = self.rows, self.lane, self.tokens.total
        odd = (lane & 1) == 1
        pairs = norms, betas, rows.sums, rows.scales, rows.inside
        norm, beta, total, scale, inside = (w.chosen(odd, pair[1], pair[0]) for pair in pairs)
        place = (lane >> 2) * 4 + (lane & 1) * 32 + 4 * BLOCK * row
        w.store_words(self.scratch + _H + place, [total - norm])
        w.store_words(self.scratch + _BETA + place, [beta])
        vectors = self.vectors + place
        for name, exponent in (("a", total + norm), ("c", last - total + norm), ("d", total + scale)):
            value = w.exp2(exponent)
            if name == "d" and self.problem.scale < 0:
                value = -value
            w.store_words(vectors + VECTORS[name], [w.chosen(inside, value, Float32(0.0))])
        if row == 0:
            w.store_words(self.vectors + VECTORS["decay"], [w.exp2(last)])  # all lanes, the same value

    def h_of(self, block: int, half: int) -> list[Float32]:
        """H of tokens 2t and 2t + 1 of eight."""
        return w.load_words(self.scratch + (self.lane & 3) * 8 + (_H + 4 * (BLOCK * block + 8 * half)), 2)

    def put_t(self, r: int, c: int, values: Sequence[Float32]) -> None:
        """Block (r, c) of T from that of A' transposed: of rows j = 16c + g + 8h and columns i."""
        lower = (self.lane & 3) * 2 - (self.lane >> 2)  # i - j in the 8 x 8 matrices on the diagonal
        if r == c:
            place = self.scratch + (self.lane >> 2) * 4 + 4 * BLOCK * c
            h, beta = ([w.load_words(place + (at + 32 * i), 1)[0] for i in range(2)] for at in (_H, _BETA))
            # The first token behind the columns': below the diagonal blocks, exp(H_i - H_j) is the product of two such factors.
            anchor = w.load_words(self.scratch + (_H + 4 * BLOCK * (c + 1)), 1)[0] if c + 1 < BLOCKS else None
            below = [] if anchor is None else [w.exp2(anchor - x) * y for x, y in zip(h, beta, strict=True)]
            self.factors[c] = h, beta, below, [anchor]
        h, beta, below, (anchor,) = self.factors[c]
        words = []
        for n in range(2):
            h_rows = self.h_of(r, n)
            if r > c:
                factors = [w.exp2(x - anchor) for x in h_rows]
            for half in range(2):
                pair = []
                for e in range(2):
                    value = values[4 * n + 2 * half + e]
                    if r > c:
                        pair.append(value * factors[e] * below[half])
                    elif n < half:
                        pair.append(Float32(0.0))
                    else:
                        exponent = h_rows[e] - h[half]
                        if n == half:  # A' is 0 above the diagonal, where the exponent may be anything
                            exponent = w.chosen(lower >= -e, exponent, Float32(_SMALLEST))
                        pair.append(value * (w.exp2(exponent) * beta[half]))
                words.append(w.pack(self.problem.io, *pair))
        w.store_matrices(self.t_place(r, c), words, transposed=True)

    def put_p(self, row: int) -> None:
        """The warp's rows of P, and the zeros above its columns of T."""
        zeros = [Uint32(0)] * 4
        for other in range(BLOCKS):
            if other < row:
                w.store_words(self.t_place(other, row), zeros)
            if other > row:
                w.store_words(self.p_place(row, other), zeros)
        lower = (self.lane >> 2) - (self.lane & 3) * 2  # i - j in the 8 x 8 matrices on the diagonal
        logs = [x + y for x, y in zip(self.rows.sums, self.rows.scales, strict=True)]
        for column in range(row + 1):
            words = []
            for n in range(2):
                h = self.h_of(column, n)
                for half in range(2):
                    pair = []
                    for e in range(2):
                        if column == row and n > half:
                            pair.append(Float32(0.0))
                            continue
                        value = self.qk[4 * (2 * column + n) + 2 * half + e]
                        value = (-value if self.problem.scale < 0 else value) * w.exp2(logs[half] - h[e])
                        if column == row and n == half:
                            value = w.chosen(lower >= e, value, Float32(0.0))
                        pair.append(value)
                    words.append(w.pack(self.problem.io, *pair))
            w.store_matrices(self.p_place(row, column), words)

# ruff: noqa: ANN202  the DSL reads return annotations
"""The prepare stage of GDN: T and the vectors of a chunk from its K tile and its gates, by one warpgroup, in shared memory.

With S = K K^T, g the log decays of tokens, G their inclusive sum, G_C that of the last valid token, nk = 1/sqrt(S_ii + 1e-6) (1 without
l2norm), L_ij = beta_i nk_i nk_j S_ij below the diagonal, A = (I + L)^-1:

    T_ij = exp(G_i - G_j) A_ij beta_j        j <= i, else 0
    a_j = exp(G_j) nk_j     c_j = exp(G_C - G_j) nk_j     and G, nk, for what ``scores_gdn`` makes

T is 64 x 64 of ``layout.MMA``, i the line (``tiles``); the vectors are fp32 [64], in ``records.VECTORS``' places behind it. Of tokens from ``valid``
on, rows and columns of T, a, c and nk are 0, whatever K, g and beta hold there; G is G_C.

What is computed instead: A' = (I + L')^-1 with L'_ij = exp(G_i - G_j) beta_i nk_i^2 S_ij, as then T_ij = A'_ij beta_j nk_j / nk_i: only the row's own
norm is needed before the inverse, and none of the gates after it. exp(G_i - G_j) of blocks below the diagonal is the product of two
factors, with the sum of the first token behind the column block between them. All exponents are to base 2, and so is G in memory. One warp
sums the gates, two tokens a lane, and leaves what the others need of every token in shared memory. A log decay counts as at least -128 (base
2), which is 0 in fp32: so G stays small, and the decays after a reset of the state keep their digits.

What rounding takes from T_ij is added to T_i+8,j, decayed: errors of rows whose sum cancels, cancel too. With 64 equal keys and beta 0.999 the
error of O goes from 6e-3 to 3e-3 (model of the scan in fp64, with T in fp16).

    one warp                       ``gates``: G, beta and decays of tokens to shared memory
    wgmma K K^T in flight          decays of the blocks on the diagonal
    K K^T                          warp r: rows 16r to 16r + 15 of -L' to shared memory, 1 / nk, the vectors; its blocks of the inverse
    barrier
                                   warp c: columns 16c to 16c + 15 of A' and T

A block of T goes to memory as soon as it is made, by way of shared memory that its warp has for itself. All warps run one stream of instructions
(``inverse.columns``): registers are chosen by selects, places by the warp. Imported by ``prepare_chunks_gdn``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..layout import MMA
from ..problem import CHUNK, Problem
from ..records import VECTORS
from . import scores, tiles
from . import warp as w
from .arguments import Args
from .decays import Diagonal, scaled
from .gates import Beta, Gate
from .inverse import BLOCK, BLOCKS, columns, invert_diagonal, put_beside, put_diagonal, put_far
from .inverse import SCRATCH_BYTES as INVERSE_BYTES

__all__ = ["PrepareGdn"]

_LOG2_E = math.log2(math.e)
_SMALLEST = -128.0  # of a log decay, to base 2
_VECTOR = 4 * CHUNK  # bytes of a value a token
_SUMS, _BETAS, _BEHIND, _FADED, _INVERSES, _INVERSE = (i * _VECTOR for i in range(6))
_VALID = _INVERSE + INVERSE_BYTES
_SECOND = _VALID + 16
_KEPT_BYTES = BLOCKS * (BLOCKS + 1) // 2 * 1024
"""Places in scratch: of every token G, beta, exp(G of the next block's first token - G) and exp(G - G of 8 tokens before), 1 / nk; the inverse's;
the number of tokens."""


class PrepareGdn:
    """Of a problem with the variant gdn, whose ``io`` is the type of the K tile.

    ``scratch_bytes``: what ``gates`` and ``run`` need at ``scratch_addr``, at a 128-byte boundary."""

    def __init__(self, problem: Problem, heads: int = 1) -> None:
        self.problem, self.heads = problem, heads
        self.scratch_bytes = _SECOND + (_VECTOR if heads > 1 else 0)
        self.staging = _KEPT_BYTES if heads > 1 else 0
        self.place_bytes = max(problem.key * 128, self.staging + CHUNK * 128)
        self.gate, self.beta = Gate.of(problem), Beta.of(problem)

    def parameters(self, args: Args, head: Int32) -> tuple[Float32, Float32]:
        """Amplitude and bias of a head's gate."""
        amplitude, bias = Float32(1.0), Float32(0.0)
        if self.problem.a_log_dtype:
            amplitude = self.gate.amplitude(Float32(args.a_log[head]))
        if self.problem.bias_dtype:
            bias = Float32(args.dt_bias[head])
        return amplitude, bias

    def gates(
        self, args: Args, head: Int32, first_token: Int32, valid: Int32, scratch_addr: Int32, lane: Int32, number: Any = 0
    ) -> None:
        """What ``run`` needs of g and beta of a chunk of ``valid`` (1 to 64) tokens. By a warp, which the others meet before ``run``. Tokens from
        ``valid`` on are not read."""
        first = 2 * lane
        places = [first_token + cutlass.min(first + i, valid - 1) for i in range(2)]
        g, beta = ([tensor[at, head] for at in places] for tensor in (args.g, args.beta))
        amplitude, bias = self.parameters(args, head)
        zero, steps, betas = Float32(0.0), [], []
        for i in range(2):
            inside = first + i < valid
            step = self.gate.log_decay(Float32(g[i]), amplitude, bias) * Float32(_LOG2_E)
            step = w.asm("max.NaN.f32 $0, $1, $2;", [Float32], [step, Float32(_SMALLEST)])[0]
            steps.append(w.chosen(inside, step, zero))
            betas.append(w.chosen(inside, self.beta.value(Float32(beta[i])), zero))
        total = w.prefix_sum(steps[0] + steps[1])
        before = w.chosen(lane >= 1, cute.arch.shuffle_sync_up(total, 1), zero)
        sums = [before + steps[0], total]
        anchor = w.shuffled(sums[0], (lane | 7) + 1)
        behind = [w.exp2(anchor - x) for x in sums]
        faded = [w.exp2(x - cute.arch.shuffle_sync_up(x, 4)) for x in sums]
        faded = [w.chosen(first + i < valid, faded[i], zero) for i in range(2)]
        place = scratch_addr + 8 * lane
        for at, pair in ((_SUMS, sums), (_BETAS, betas), (_BEHIND, behind), (_faded(number), faded)):
            w.store_words(place + at, pair)

    def announce(self, scratch_addr: Int32, first: Int32, valid: Int32) -> None:
        """The chunk's first token, and how many it has."""
        w.store_words(scratch_addr + _VALID, [first, valid])

    def announced(self, scratch_addr: Int32) -> list[Int32]:
        return w.load_words(scratch_addr + _VALID, 2, Int32)

    def run(
        self,
        k_addr: Int32,
        record: Int64,
        scratch_addr: Int32,
        valid: Int32,
        thread: Int32,
        named_barrier: int,
    ) -> None:
        """One chunk, by the 128 threads ``thread`` of a warpgroup.

        k_addr          the tile, complete, 8192 bytes or more; it is overwritten
        record          address in memory of T and the vectors
        scratch_addr    ``scratch_bytes`` for this warpgroup alone, with what ``gates`` has left there
        valid           tokens of the chunk, 1 to 64
        named_barrier   a hardware barrier for this warpgroup alone
        """
        p = self.problem
        thread = _opaque(thread)
        lane, warp = thread & 31, cute.arch.make_warp_uniform(thread >> 5)
        kk = scores.issue(p.io, p.key, k_addr, k_addr)
        stage = _Stage(p, scratch_addr, _FADED, warp, thread, lane)
        inside = [BLOCK * warp + (lane >> 2) + 8 * half < valid for half in range(2)]
        tiles.wait(0)
        blocks = _Product(_cleaned(tiles.landed(kk), inside, valid), stage.decays)
        stage.run(blocks, inside, k_addr, record, named_barrier)

    def keep(self, k_addr: Int32, valid: Int32, thread: Int32, named_barrier: int) -> None:
        """K K^T to the place of K."""
        p = self.problem
        thread = _opaque(thread)
        lane, warp = thread & 31, cute.arch.make_warp_uniform(thread >> 5)
        kk = scores.issue(p.io, p.key, k_addr, k_addr)
        inside = [BLOCK * warp + (lane >> 2) + 8 * half < valid for half in range(2)]
        tiles.wait(0)
        values = _cleaned(tiles.landed(kk), inside, valid)
        cute.arch.barrier(barrier_id=named_barrier, number_of_threads=128)
        _Kept(k_addr, warp, lane).put(values)

    def run_kept(
        self, k_addr: Int32, record: Int64, scratch_addr: Int32, number: Int32, valid: Int32, thread: Int32, named_barrier: int
    ) -> None:
        """As ``run``, of what has been kept."""
        thread = _opaque(thread)
        lane, warp = thread & 31, cute.arch.make_warp_uniform(thread >> 5)
        inside = [BLOCK * warp + (lane >> 2) + 8 * half < valid for half in range(2)]
        stage = _Stage(self.problem, scratch_addr, _faded(number), warp, thread, lane)
        stage.run(_Kept(k_addr, warp, lane), inside, k_addr + self.staging, record, named_barrier)


    def send(self, k_addr: Int32, record: Int64, thread: Int32) -> None:
        """T to memory, when the warps have met."""
        place, target = k_addr + self.staging + thread * 16, record + Int64(thread * 16)
        for words, at in [(w.load_words(place + at, 4, Uint32), at) for at in range(0, CHUNK * 128, 2048)]:
            store(target, words, at)


def _faded(number: Any) -> Any:
    return _FADED if isinstance(number, int) else _FADED + (number & 1) * (_SECOND - _FADED)


class _Product:
    """Blocks of K K^T in registers."""

    def __init__(self, values: Sequence[Float32], decays: Diagonal) -> None:
        self.values, self.decays = values, decays

    def own(self, before: int) -> Sequence[Float32]:
        return self.decays.own(self.values, before)

    def far(self, m: int) -> Sequence[Float32]:
        return self.values[8 * m : 8 * m + 8]


class _Kept:
    """Blocks of K K^T in shared memory, those of a thread where no other one reads."""

    def __init__(self, place: Int32, warp: Int32, lane: Int32) -> None:
        self.warp, self.place = warp, place + (warp * (warp + 1) >> 1) * 1024 + lane * 16

    def put(self, values: Sequence[Float32]) -> None:
        for m in range(BLOCKS):
            w.when(self.warp >= m, partial(self.put_block, m, values))

    def put_block(self, m: int, values: Sequence[Float32]) -> None:
        for half in range(2):
            first = 8 * m + 4 * half
            w.store_words(self.place + m * 1024 + 512 * half, values[first : first + 4])

    def own(self, before: int) -> Sequence[Float32]:
        return self.far(self.warp - before)

    def far(self, m: Any) -> Sequence[Float32]:
        return [x for half in range(2) for x in w.load_words(self.place + m * 1024 + 512 * half, 4)]


def _opaque(value: Int32) -> Int32:
    """What the compiler makes of it, it makes behind this point: addresses made early take registers, and of a warp's number in a uniform
    register ptxas makes predicates anew for every select."""
    return w.asm("mov.b32 $0, $1;", [Int32], [value], effects=True)[0]


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


class _Stage:
    """From the product to T and the vectors."""

    def __init__(
        self,
        p: Problem,
        scratch: Int32,
        faded: Any,
        warp: Int32,
        thread: Int32,
        lane: Int32,
    ) -> None:
        self.problem, self.scratch, self.faded, self.warp, self.lane = p, scratch, faded, warp, lane
        self.inverse = scratch + _INVERSE
        self.lost: list[Any] = [None, None]
        self.norms: list[Float32] = []
        self.sums, self.betas = (self.of_rows(at) for at in (_SUMS, _BETAS))
        self.decays = Diagonal(thread, self.sums, self.of_block(_SUMS, warp))

    def run(self, blocks: Any, inside: Sequence[Any], staging: Int32, record: Int64, named_barrier: int) -> None:
        corner = self.put_lower(blocks)
        self.put_vectors(record, inside)
        invert_diagonal(self.inverse, self.warp, corner, self.lane)
        cute.arch.barrier(barrier_id=named_barrier, number_of_threads=128)
        cute.arch.sync_warp()  # or ptxas takes the warps for diverged, and guards every shuffle behind it
        self.place(_opaque(self.lane), staging)
        self.put_zeros()
        columns(self.inverse, self.warp, self.lane, self.put_t)

    def place(self, lane: Int32, staging: Int32) -> None:
        """Behind what needs most registers: where T goes, by way of ``staging``."""
        self.lane = lane
        # stmatrix: lanes have the lines of matrices (rows 0-7, 8-15) x (columns 0-7, 8-15); of T, they are (columns) x (rows).
        self.t_place = staging + ((lane & 7) + 8 * (lane >> 4)) * 128 + (((lane >> 3 & 1) ^ (lane & 7) ^ (2 * self.warp)) << 4)

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
        warp, lane, decays = self.warp, self.lane, self.decays
        own, scales = blocks.own(0), [-beta for beta in self.betas]
        if self.problem.l2norm:
            # Of the 8 x 8 matrix (half, half) of the diagonal block.
            squares = [x + Float32(scores.NORM_EPSILON) for x in scores.diagonal([own[:2], own[6:]], lane)]
            self.norms = [w.rsqrt(x) for x in squares]
            scales = [x * (y * y) for x, y in zip(scales, self.norms, strict=True)]
            inverses = [x * y for x, y in zip(squares, self.norms, strict=True)]
            w.store_words(self.scratch + _INVERSES + self.row_place(), [w.chosen((lane & 1) == 1, *inverses[::-1])])
        block = decays.on_diagonal(own, scales)
        put_diagonal(self.inverse, warp, block, lane)

        def decayed(values: Sequence[Float32], m: Any) -> list[Float32]:
            anchor = w.load_words(self.scratch + _SUMS + 4 * BLOCK * (m + 1), 1)[0]
            rows = [x * w.exp2(y - anchor) for x, y in zip(scales, self.sums, strict=True)]
            return scaled(values, rows, self.of_block(_BEHIND, m))

        def beside() -> None:
            put_beside(self.inverse, warp, decayed(blocks.own(1), warp - 1), lane)

        def far(m: int) -> None:
            put_far(self.inverse, warp, m, decayed(blocks.far(m), m), lane)

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
        last = w.load_words(self.scratch + _SUMS + _VECTOR - 4, 1)[0]
        odd, second = (lane & 1) == 1, (lane & 2) == 2
        total, inside = (w.chosen(odd, x[1], x[0]) for x in (self.sums, inside))
        norm = w.chosen(odd, self.norms[1], self.norms[0]) if self.norms else Float32(1.0)
        norm = w.chosen(inside, norm, Float32(0.0))
        first, then = ((VECTORS["a"], VECTORS["sums"]), (VECTORS["c"], VECTORS["norms"]))
        offset = self.row_place() + w.chosen(second, Int32(then[0]), Int32(first[0]))
        place = record + Int64(offset + CHUNK * 128)
        store(place, [w.exp2(w.chosen(second, last - total, total)) * norm])
        store(place, [w.chosen(second, norm, total)], then[1] - then[0])
        assert then[1] - then[0] == first[1] - first[0]

    def put_t(self, r: Int32, c: Int32, values: Sequence[Float32]) -> None:
        """Block (r, c) of T from that of A' transposed: of rows j = 16c + g + 8h and columns i. In increasing order of r."""
        factors, inverses = self.betas, None
        if self.problem.l2norm:
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


def store(address: Int64, words: Sequence[Any], offset: int = 0) -> None:
    """1 or 4 words of 32 bits to memory."""
    if len(words) == 1:
        w.asm(f"st.global.b32 [$0 + {offset}], $1;", [], [address, *words], effects=True)
    else:
        w.asm(f"st.global.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};", [], [address, *words], effects=True)

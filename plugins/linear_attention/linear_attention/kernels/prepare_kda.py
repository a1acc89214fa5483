# ruff: noqa: ANN201  the DSL reads return annotations
"""The prepare stage of KDA: a kernel that writes the ``records`` of all chunks. A CTA makes one: a chunk of one head.

8 warps, each 8 tokens; a lane has K / 32 neighbouring channels of them, their q, k and decays in registers. Every factor that a tile
needs is a product of decays, numbers of [0, 1]: nothing overflows, no gate is special, and the time depends on none of them.
Scores come from products of tensor cores over levels of tokens (``diagonal``): 1, 2 and 4 inside a warp, then

    level 8    between the tiles of K~ and Q~         | meanwhile level 16's operands go to the tile of K- and to free lines of Q~
    level 16                                          | those of level 32 to the lines of level 8
    level 32                                          | K- to its tile
    K~ and Q~, the inverse of I + M, T                | K~, Q~, K- and the decays go to memory

with a barrier of the CTA between two lines. The operands of a level are rounded to io once; norms, scale and beta are float32 factors of
scores, or part of the factor of a tile's element.

Padding tokens of a chunk: q, k and beta are 0 and the decay is 1, selected after loads that read nothing, so that M, P, K~ and the
others come out neutral. Launches may overlap the end of the one before and the start of the next (PTX ISA, griddepcontrol).

Imported by the prefill's host function.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from ..problem import Problem
from ..records import CHUNK, record_layout
from .arguments import Args
from .diagonal import GROUP, LINE, Scores, Tokens, diagonal_scores, fragment_address
from .gates import Beta, Gate
from .inverse import SCRATCH_BYTES
from .kda_chunks import find_chunk
from .kda_lower import put_lower, write_t
from .kda_words import (
    as_float,
    load_columns,
    load_floats,
    load_rows,
    multiply_add,
    pack,
    read_global,
    select,
    store_floats,
    store_words,
)
from .tiles import assembly, fence_shared, unpacked

__all__ = ["PrepareKda"]

WARPS = 8
THREADS = 32 * WARPS
EPSILON = 1e-6
ALIGNMENT = 1024
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Places(NamedTuple):
    """Addresses in shared memory. The record comes first; until T is written, its tile holds totals and vectors.

    totals    float32 [8][K]: the product of a warp's decays
    vectors   float32 [64] each: beta times the norm factor of k, scale times that of q, that of k
    beta      float32 [64]
    lower     scratch of the inverse
    """

    k_in: Int32
    q_in: Int32
    k_out: Int32
    t: Int32
    p: Int32
    decay: Int32
    totals: Int32
    vectors: Int32
    beta: Int32
    lower: Int32


class PrepareKda:
    """For a problem of variant "kda". ``launch`` is for host functions, at trace time."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.io = problem, problem.io
        self.channels = problem.key // 32  # of a lane
        self.words = self.channels // 2
        self.steps = problem.key // 16
        self.panel = CHUNK * LINE
        self.layout = record_layout(problem)
        self.gate, self.beta = Gate.of(problem), Beta.of(problem)
        self.shared_bytes = self.layout.used + CHUNK * 4 + SCRATCH_BYTES  # 76,544 for 128 channels: three CTAs an SM

    def launch(self, args: Args, stream: cuda.CUstream) -> None:
        """Write the records of ``args`` to its workspace."""
        slots = args.tokens // CHUNK + args.sequences
        self.kernel(args._replace(v=None, o=None, initial_state=None, final_state=None, state_indices=None)).launch(
            grid=[cutlass.max(slots * self.problem.heads, 1), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=2,
            preferred_smem_carveout=100,  # else the compiler asks the driver for it
            use_pdl=True,  # every access to memory comes after griddepcontrol.wait
            stream=stream,
        )

    @cute.kernel
    def kernel(self, args: Args):
        """The kernel: see the module's text."""
        heads = self.problem.heads
        index, _, _ = cute.arch.block_idx()
        slot = index // heads
        head = index - slot * heads
        smem = SmemAllocator().allocate(self.shared_bytes, ALIGNMENT)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if args.sequences > 0:
            chunk = find_chunk(args, slot)
            if chunk.valid > 0:
                self.prepare(smem.toint(), args, chunk.first, chunk.valid, slot, head)

    @cute.jit
    def prepare(self, smem: Int32, args: Args, first: Int32, valid: Int32, slot: Int32, head: Int32):
        """The record of the chunk whose first token is ``first``."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        at = self.places(smem)
        tokens = self.load(args, first, valid, head, warp, at)
        scores, squares_q, squares_k = diagonal_scores(
            tokens, at.k_in, at.q_in, warp * GROUP, self.panel, self.steps, self.problem.l2norm
        )
        self.put_vectors(args, at, first, valid, head, warp, squares_q, squares_k)
        total = tokens.prefixes()[-1]
        self.put_total(at, warp, total)
        self.write_level(tokens, warp, warp & 1, None, None, at.k_in - at.k_in, at.q_in - at.k_in)
        self.clear_above(at, warp)
        cute.arch.sync_threads()
        bases, tails = self.factors(at, warp)
        self.put_scores(at, scores, warp, warp)
        self.level_8(at, warp)
        # Level 16's rows of Q lie where warps with even numbers had theirs, level 32's where the others had.
        self.write_level(tokens, warp, warp & 2, bases[0], tails[0], at.k_out - at.k_in, self.free_q(at, warp, 16))
        cute.arch.sync_threads()
        self.level_16(at, warp)
        self.write_level(tokens, warp, warp & 4, bases[1], tails[1], at.k_in - at.k_in, self.free_q(at, warp, 32))
        cute.arch.sync_threads()
        self.level_32(at, warp)
        norms = self.norms(at, warp)
        self.write_k_out(at, tokens, tails[2], norms)
        cute.arch.sync_threads()
        self.write_in(at, tokens, bases[2], norms)
        self.write_decay(at, warp, bases[2], total)
        fence_shared()
        cute.arch.sync_threads()
        record = args.workspace.toint() + (Int64(slot) * self.problem.heads + head) * self.layout.size
        if warp < 4:
            write_t(self.io, at.lower, at.t, at.beta, cute.arch.thread_idx()[0], 2)
            fence_shared()
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            if cute.arch.thread_idx()[0] == 0:
                self.send(smem, record, self.layout.t, self.layout.decay)
        else:
            if cute.arch.thread_idx()[0] == 128:
                self.send(smem, record, self.layout.k_in, self.layout.t)
                self.send(smem, record, self.layout.decay, self.layout.used)

    def places(self, smem: Int32) -> Places:
        layout = self.layout
        return Places(
            k_in=smem + layout.k_in,
            q_in=smem + layout.q_in,
            k_out=smem + layout.k_out,
            t=smem + layout.t,
            p=smem + layout.p,
            decay=smem + layout.decay,
            totals=smem + layout.t,
            vectors=smem + layout.t + WARPS * self.problem.key * 4,
            beta=smem + layout.used,
            lower=smem + layout.used + CHUNK * 4,
        )

    # Loads.

    def lane_channel(self) -> Int32:
        """The first channel of this lane."""
        return cute.arch.lane_idx() * self.channels

    def load(self, args: Args, first: Int32, valid: Int32, head: Int32, warp: Int32, at: Places) -> Tokens:
        """This lane's channels of the warp's tokens."""
        p = self.problem
        token = first + warp * GROUP
        present = [warp * GROUP + i < valid for i in range(GROUP)]
        raw = [
            self.load_rows_of(tensor, dtype, token, head * heads // p.heads, present)
            for tensor, dtype, heads in (
                (args.g, p.gate_dtype, p.heads),
                (args.k, p.io, p.heads_k),
                (args.q, p.io, p.heads_q),
            )
        ]
        amplitude = self.amplitude(args, head)
        biases = self.biases(args, head)
        decay = [
            [
                select(here, self.gate.decay(g, amplitude, bias), Float32(1.0))
                for g, bias in zip(self.floats(words, p.gate_dtype), biases, strict=True)
            ]
            for words, here in zip(raw[0], present, strict=True)
        ]
        channel = self.lane_channel()
        panel = channel // (LINE // 2)
        place = at.k_in + panel * self.panel + warp * (GROUP * LINE) + (channel - panel * (LINE // 2)) * 2
        return Tokens(p.io, raw[1], raw[2], decay, place)

    def load_rows_of(self, tensor: Any, dtype: str, token: Int32, head: Int32, present: list[Any]) -> list[Any]:
        """Words of this lane's channels of 8 tokens of [T, heads, K]; zeros of those that are not ``present``."""
        size = _BYTES[dtype]
        stride = Int64(tensor.stride[0]) * size
        base = tensor.iterator.toint() + Int64(token) * stride
        base = base + (Int64(head) * tensor.stride[1] + Int64(self.lane_channel())) * size
        return [
            read_global(base + i * stride, self.channels * size // 4, Boolean(here)) for i, here in enumerate(present)
        ]

    def floats(self, words: list[Any], dtype: str) -> list[Any]:
        if dtype == "float32":
            return [as_float(word) for word in words]
        return [value for word in words for value in unpacked(dtype, word)]

    def amplitude(self, args: Args, head: Int32) -> Float32:
        if not self.problem.a_log_dtype:
            return Float32(1.0)
        return self.gate.amplitude(Float32(args.a_log[head]))

    def biases(self, args: Args, head: Int32) -> list[Any]:
        if not self.problem.bias_dtype:
            return [Float32(0.0)] * self.channels
        channel = self.lane_channel()
        return [Float32(args.dt_bias[head, channel + i]) for i in range(self.channels)]

    # Vectors.

    @cute.jit
    def put_vectors(
        self,
        args: Args,
        at: Places,
        first: Int32,
        valid: Int32,
        head: Int32,
        warp: Int32,
        squares_q: Float32,
        squares_k: Float32,
    ):
        """The vectors of the warp's tokens: by the lane that has a token's sums of squares."""
        lane = cute.arch.lane_idx()
        row = warp * GROUP + lane // 4
        if lane % 4 == lane // 8:
            here = row < valid
            token = first + cutlass.min(row, valid - 1)
            beta = select(here, self.beta.value(Float32(args.beta[token, head])), Float32(0.0))
            norm_q = norm_k = Float32(1.0)
            if cutlass.const_expr(self.problem.l2norm):
                norm_q, norm_k = rsqrt(squares_q + Float32(EPSILON)), rsqrt(squares_k + Float32(EPSILON))
            for i, value in enumerate((beta * norm_k, Float32(self.problem.scale) * norm_q, norm_k)):
                store_floats(at.vectors + (i * CHUNK + row) * 4, [value])
            store_floats(at.beta + row * 4, [beta])

    def put_total(self, at: Places, warp: Int32, total: list[Any]) -> None:
        store_floats(at.totals + (warp * self.problem.key + self.lane_channel()) * 4, total)

    def total(self, at: Places, warp: Any) -> list[Any]:
        return load_floats(at.totals + (warp * self.problem.key + self.lane_channel()) * 4, self.channels)

    def factors(self, at: Places, warp: Int32) -> tuple[list[Any], list[Any]]:
        """For levels 16, 32 and the tiles of the record: products of the decays of the tokens before this warp's, from the boundary
        of the level's block on, and of those behind it, up to that of the block."""
        bases, tails = [], []
        base = tail = [Float32(1.0)] * self.channels
        for size in (1, 2, 4):
            other = (warp ^ size) & Int32(-size)
            block = self.total(at, other)
            for i in range(1, size):
                block = [x * y for x, y in zip(block, self.total(at, other + i), strict=True)]
            second = (warp & size) != 0
            one = Float32(1.0)
            base = [x * select(second, y, one) for x, y in zip(base, block, strict=True)]
            tail = [x * select(second, one, y) for x, y in zip(tail, block, strict=True)]
            bases.append(base)
            tails.append(tail)
        return bases, tails

    def norms(self, at: Places, warp: Int32) -> list[list[Any]]:
        """Factors of the warp's rows: of k, of q."""
        return [
            [
                value
                for half in (0, 16)
                for value in load_floats(at.vectors + (vector * CHUNK + warp * GROUP) * 4 + half, 4)
            ]
            for vector in (2, 1)
        ]

    # Operands and tiles.

    @cute.jit
    def write_level(
        self, tokens: Tokens, warp: Int32, rows: Int32, base: list, tail: list, k_tile: Int32, q_tile: Int32
    ):
        """Operands of a level: ``rows`` is not 0 where the warp's tokens are rows. The tiles' distances from that of K~."""
        if rows != 0:
            put_rows(tokens, base, k_tile, q_tile)
        else:
            put_columns(tokens, tail, k_tile)

    def free_q(self, at: Places, warp: Int32, level: int) -> Int32:
        """The distance from the warp's lines of K~ to its rows of Q of level 16 or 32."""
        target = self.q_lines(warp, level)
        return at.q_in - at.k_in + (target - warp) * (GROUP * LINE)

    def q_lines(self, group: Int32, level: int) -> Int32:
        """Which group's lines of Q~ hold the rows of Q of ``group``, a row of level 16 (2, 3, 6, 7) or 32 (4 to 7)."""
        if level == 16:
            return (group // 4 * 2 + group % 2) * 2
        return (group - 4) * 2 + 1

    def write_k_out(self, at: Places, tokens: Tokens, tail: list[Any], norms: list[list[Any]]) -> None:
        for token, factors in enumerate(tokens.suffixes(tail)):
            tokens.put(tokens.k[token], token, at.k_out - at.k_in, self.normed(factors, norms[0][token]))

    def write_in(self, at: Places, tokens: Tokens, base: list[Any], norms: list[list[Any]]) -> None:
        """K~ and Q~."""
        for token, factors in enumerate(tokens.prefixes(base)):
            tokens.put(tokens.k[token], token, Int32(0), self.normed(factors, norms[0][token]))
            tokens.put(tokens.q[token], token, at.q_in - at.k_in, [factor * norms[1][token] for factor in factors])

    def normed(self, factors: list[Any], norm: Float32) -> list[Any]:
        return [factor * norm for factor in factors] if self.problem.l2norm else factors

    @cute.jit
    def write_decay(self, at: Places, warp: Int32, base: list, total: list):
        if warp == WARPS - 1:
            store_floats(at.decay + self.lane_channel() * 4, [x * y for x, y in zip(base, total, strict=True)])

    # Scores.

    @cute.jit
    def level_8(self, at: Places, warp: Int32):
        """Rows of the odd groups, columns of the group before."""
        if warp & 1 != 0:
            rows = fragment_address(at.q_in, at.k_in, warp * GROUP)
            self.put_scores(at, self.products(rows, at.k_in, warp - 1), warp, warp - 1)

    def level_16(self, at: Places, warp: Int32) -> None:
        """Rows of groups 2, 3, 6 and 7, columns of the two groups before them: each warp one block."""
        group = warp // 4 * 4 + 2 + (warp // 2) % 2
        column = warp // 4 * 4 + warp % 2
        rows = self.rows_address(at, at.k_out, group, 16)
        self.put_scores(at, self.products(rows, at.k_out, column), group, column)

    def level_32(self, at: Places, warp: Int32) -> None:
        """Rows of groups 4 to 7, columns of groups 0 to 3: each warp two blocks."""
        group, column = 4 + warp // 2, warp % 2 * 2
        rows = self.rows_address(at, at.k_in, group, 32)
        lane = cute.arch.lane_idx()
        line = lane % 8
        columns = at.k_in + ((column + lane // 16) * GROUP + line) * LINE + (((lane // 8) % 2 ^ line) << 4)
        sums = [[Float32(0.0)] * 4 for _ in range(2)]
        for step in range(self.steps):
            a, b = load_rows(rows, step, self.panel), load_columns(columns, step, self.panel)
            sums = [multiply_add(self.io, sums[i], a, b[2 * i : 2 * i + 2]) for i in range(2)]
        for i in range(2):
            self.put_scores(at, Scores(sums[i][:2], sums[i][2:]), group, column + i)

    def products(self, rows: Int32, k_tile: Int32, column: Int32) -> Scores:
        """Of the fragments at ``rows`` with the rows of group ``column`` of a tile."""
        lane = cute.arch.lane_idx()
        line = lane % 8
        columns = k_tile + (column * GROUP + line) * LINE + ((lane // 8 ^ line) << 4)
        sums = [Float32(0.0)] * 4
        for step in range(0, self.steps, 2):
            b = load_columns(columns, step, self.panel)
            sums = multiply_add(self.io, sums, load_rows(rows, step, self.panel), b[:2])
            sums = multiply_add(self.io, sums, load_rows(rows, step + 1, self.panel), b[2:])
        return Scores(sums[:2], sums[2:])

    def rows_address(self, at: Places, k_tile: Int32, group: Int32, level: int) -> Int32:
        """As ``fragment_address``: K rows of ``group``, Q rows where the level has them."""
        lines = GROUP * LINE
        return fragment_address(at.q_in + self.q_lines(group, level) * lines, k_tile + group * lines, Int32(0))

    def put_scores(self, at: Places, scores: Scores, group: Int32, column: Int32) -> None:
        """A block of 8 x 8 scores to P and M, with the factors of their rows and columns."""
        lane = cute.arch.lane_idx()
        line, pair = lane // 4, lane % 4
        row, first = group * GROUP + line, column * GROUP + pair * 2
        (of_k,) = load_floats(at.vectors + row * 4, 1)
        (of_q,) = load_floats(at.vectors + (CHUNK + row) * 4, 1)
        q, k = [value * of_q for value in scores.q], [value * of_k for value in scores.k]
        if self.problem.l2norm:
            norms = load_floats(at.vectors + (2 * CHUNK + first) * 4, 2)
            q, k = ([x * y for x, y in zip(values, norms, strict=True)] for values in (q, k))
        store_words(at.p + row * LINE + ((column ^ line) << 4) + pair * 4, [pack(self.io, *q)])
        put_lower(at.lower, group, column, k)

    @cute.jit
    def clear_above(self, at: Places, warp: Int32):
        """Zeros of P in the blocks above the diagonal: the warp's rows."""
        lane = cute.arch.lane_idx()
        line = lane % 8
        for i in cutlass.range_constexpr(2):
            column = lane // 8 + 4 * i
            if column > warp:
                zero = Int32(0)
                store_words(at.p + (warp * GROUP + line) * LINE + ((column ^ line) << 4), [zero] * 4)

    def send(self, smem: Int32, record: Int64, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` of the record, and wait until they have been read. By one thread."""
        assembly(
            f"cp.async.bulk.global.shared::cta.bulk_group [$i0], [$i1], {stop - start}; cp.async.bulk.commit_group; "
            "cp.async.bulk.wait_group.read 0;",
            inputs=[record + start, smem + start],
            memory=True,
        )


def put_rows(tokens: Tokens, base: list[Any] | None, k_tile: Int32, q_tile: Int32) -> None:
    """Both tiles' lines of the tokens, each times the decays up to it and ``base``."""
    for token, factors in enumerate(tokens.prefixes(base)):
        tokens.put(tokens.k[token], token, k_tile, factors)
        tokens.put(tokens.q[token], token, q_tile, factors)


def put_columns(tokens: Tokens, tail: list[Any] | None, k_tile: Int32) -> None:
    """Lines of K, each times the decays behind it and ``tail``."""
    for token, factors in enumerate(tokens.suffixes(tail)):
        tokens.put(tokens.k[token], token, k_tile, factors)


def rsqrt(x: Float32) -> Float32:
    found: Float32 = assembly("rsqrt.approx.ftz.f32 $r0, $i0;", [Float32], inputs=[x], volatile=False)[0]
    return found

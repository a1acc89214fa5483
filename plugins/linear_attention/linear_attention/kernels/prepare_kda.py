# ruff: noqa: ANN201  the DSL reads return annotations
"""The prepare stage of KDA: a kernel that writes the ``records`` of all chunks. A CTA makes one: a chunk of one head.

8 warps, each 8 tokens, a group. Every factor that a tile needs is a product of decays, numbers of [0, 1]: nothing overflows, no gate is
special, and the time depends on none of them.

    scores inside a group      by its warp: ``diagonal``; the columns of K take them up (``kda_groups``)
    operands of groups         to the tiles of K~, Q~ (rows, with the decays from the group's first token on) and ``columns``
                               (with those up to its last token), in ``layout.MMA``; the group's own decay to ``totals``
    barrier
    scores of pairs of groups  a product of the tensor cores each, with the decays of the groups between as factors on the columns' fragments:
                               two at a time, so that one's loads don't wait for the other's stores
    K-                         columns times the decays of the groups behind
    barrier
    K-, P to memory
    K~, Q~                     rows times the decays of the groups before, in place
    T                          by warps 0 to 3 (``kda_inverse``), to memory; K~ and Q~ to memory by warp 4

Three roundings of 11 bits make a tile: of the operand, of its factor, and of their product. In a model of all roundings, with random, equal
and nearly equal keys, errors are those of a single one within 2 % for O and a quarter for states: what counts there, that K- is rounded after
the fold, is left alone.

The last chunks come first: the scan begins with the first ones, which are then in the L2 cache. q, k and g of a later CTA are not brought
there: on an H200, prefetches of lines in the middle of a CTA cost 5 % of the whole op, and bulk ones at its end kept it from ending: 64 of
a warp take 7,200 clocks.

Operands have the norms in them, and the scale if there are any, else scores and Q~ get it; beta is a float32 factor of the scores.

Tokens that a chunk has not: q, k, g and beta are zeros, of which nothing is read, and the decay is 1, so that all tiles come out neutral.
Launches may overlap the end of the one before and the start of the next (PTX ISA, griddepcontrol).

Two CTAs share an SM, as registers allow, of 64 channels three. A CTA of 128 channels runs about 16,000 instructions of a warp. When 18
registers of a thread were spilled, that traffic through the L2 cache was as large as the records'.

Imported by the prefill's host function.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from ..layout import ALIGNMENT, MMA
from ..problem import Problem
from ..records import CHUNK, record_layout
from .arguments import Args
from .chunks import begin, end, find_chunk, most_chunks
from .diagonal import GROUP, LINE, QUAD, Beside, Scores, Tokens, diagonal_scores, fragment_address, raw_scores
from .gates import Beta, Gate
from .kda_gates import Decays
from .kda_groups import fold
from .kda_inverse import SCRATCH_BYTES, put_lower
from .kda_lower import write_t
from .kda_words import (
    copies_done,
    copies_end,
    copy_async,
    load_columns,
    load_floats,
    load_rows,
    load_words,
    multiplied,
    multiply_add,
    pack,
    select,
    send,
    store_floats,
    store_words,
)
from .scores import NORM_EPSILON
from .tiles import assembly, fence_shared, unpacked
from .warp import rsqrt

__all__ = ["PrepareKda"]

WARPS = 8
THREADS = 32 * WARPS
FACTORS = 512  # bytes of a warp
WRITTEN_BARRIER = 1  # a hardware barrier; 0 is the CTA's
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Places(NamedTuple):
    """Addresses in shared memory. The record comes first.

    beta      float32 [64]
    vectors   float32 [64] each: norm factors of k, and of q times scale
    totals    float32 [8][K]: the product of a warp's decays
    lower     scratch of the inverse
    factors   of each warp: the factors of two pairs in MMA; the scratch of its fold
    columns   a tile: columns of groups
    gates     g, 16 K bytes for 4 tokens; where K-, T and P come later
    """

    k_in: Int32
    q_in: Int32
    k_out: Int32
    t: Int32
    p: Int32
    decay: Int32
    beta: Int32
    vectors: Int32
    totals: Int32
    lower: Int32
    factors: Int32
    columns: Int32
    gates: Int32


class PrepareKda:
    """For a problem of variant "kda". ``launch`` is for host functions, at trace time."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.io = problem, problem.io
        self.channels = problem.key // 32  # of a lane
        self.resident = 2 if problem.key == 128 else 3  # CTAs of an SM
        self.words = self.channels // 2
        self.steps = problem.key // 16
        self.panel = CHUNK * LINE
        self.layout = record_layout(problem)
        self.gate, self.beta = Gate.of(problem), Beta.of(problem)
        # Of a gate that is 0: tokens that the chunk has not need no other one.
        self.neutral = problem.domain == "log" and not problem.safe
        self.scale = 1.0 if problem.l2norm else problem.scale  # of scores and of Q~; a factor of q's norm otherwise
        self.columns_at = self.layout.size
        self.beta_at = self.columns_at + CHUNK * problem.key * 2
        self.lower_at = self.beta_at + 3 * CHUNK * 4 + WARPS * problem.key * 4
        self.factors_at = self.lower_at + SCRATCH_BYTES
        self.shared_bytes = self.factors_at + WARPS * FACTORS  # 99,072 for 128 channels, 64,256 for 64

    def launch(self, args: Args, part: Int32, stream: cuda.CUstream) -> None:
        """Write the records of a part of the chunks of ``args`` to its workspace."""
        inside = args._replace(v=None, o=None, initial_state=None, final_state=None, state_indices=None)
        self.kernel(inside, part).launch(
            grid=[cutlass.max(most_chunks(args, part) * self.problem.heads, 1), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=100,  # else the compiler asks the driver for it
            use_pdl=True,  # see ``chunks``
            stream=stream,
        )

    @cute.kernel
    def kernel(self, args: Args, part: Int32):
        """The kernel: see the module's text."""
        heads = self.problem.heads
        index, _, _ = cute.arch.block_idx()
        number = index // heads
        head = index - number * heads
        number = cute.arch.grid_dim()[0] // heads - 1 - number
        smem = SmemAllocator().allocate(self.shared_bytes, ALIGNMENT)
        begin(part)
        if args.sequences > 0:
            chunk = find_chunk(args, part, number)
            if chunk.valid > 0:
                self.prepare(smem.toint(), args, chunk.first, chunk.valid, chunk.slot, head)
        end(part)

    @cute.jit
    def prepare(self, smem: Int32, args: Args, first: Int32, valid: Int32, slot: Int32, head: Int32):
        """The record of the chunk whose first token is ``first``."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        at = self.places(smem)
        self.load(args, at, first, valid, head, warp)
        decays = Decays(self.gate, self.amplitude(args, head), self.biases(args, head))
        beta = self.betas(args, first, valid, head, warp)
        copies_done(1)
        address, behind_k = fragment_address(at.q_in, at.k_in, warp * GROUP), at.q_in - at.k_in
        raw = raw_scores(self.io, address, self.panel, self.steps, self.problem.l2norm)
        copies_done()
        self.put_vectors(at, warp, beta, *raw[1:])
        tokens, scores = self.diagonal(at, valid, warp, decays, raw[0])
        scores = self.folded(at, tokens, scores, warp, valid)
        tokens.put(tokens.columns, at.columns - at.k_in)
        self.put_total(at, warp, tokens.totals[0])
        cute.arch.sync_threads()
        self.clear_above(at, warp)
        self.put_p(at, scores, warp, warp)
        before, behind = self.pairs(at, warp)
        tokens.scale(at.columns - at.k_in, at.k_out - at.k_in, behind)
        self.write_decay(at, warp, times(tokens.totals[0], behind))
        fence_shared()
        cute.arch.sync_threads()
        record = args.workspace.toint() + (Int64(slot) * self.problem.heads + head) * self.layout.size
        layout, thread = self.layout, cute.arch.thread_idx()[0]
        if thread == THREADS // 2:
            send(smem, record, (layout.k_out, layout.t), (layout.p, layout.decay))
        tokens.scale(Int32(0), Int32(0), before)
        tokens.scale(behind_k, behind_k, self.scaled(before))
        fence_shared()
        if warp < 4:
            cute.arch.barrier_arrive(barrier_id=WRITTEN_BARRIER, number_of_threads=THREADS)
            write_t(MMA, at.lower, at.t, record + layout.t, at.beta, thread)
        else:
            cute.arch.barrier(barrier_id=WRITTEN_BARRIER, number_of_threads=THREADS)
            if thread == THREADS // 2:
                send(smem, record, (layout.k_in, layout.k_out), (layout.decay, layout.used))
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    def places(self, smem: Int32) -> Places:
        layout = self.layout
        return Places(
            k_in=smem + layout.k_in,
            q_in=smem + layout.q_in,
            k_out=smem + layout.k_out,
            t=smem + layout.t,
            p=smem + layout.p,
            decay=smem + layout.decay,
            beta=smem + self.beta_at,
            vectors=smem + self.beta_at + CHUNK * 4,
            totals=smem + self.beta_at + 3 * CHUNK * 4,
            lower=smem + self.lower_at,
            factors=smem + self.factors_at,
            columns=smem + self.columns_at,
            gates=smem + layout.k_out,
        )

    # Loads.

    def lane_channel(self) -> Int32:
        """The first channel of this lane."""
        return cute.arch.lane_idx() * self.channels

    def load(self, args: Args, at: Places, first: Int32, valid: Int32, head: Int32, warp: Int32) -> None:
        """Copy the warp's tokens: q and k to their tiles, one group of copies, and g line after line, another one; zeros of those that the
        chunk has not."""
        p = self.problem
        lane = cute.arch.lane_idx()
        for (tensor, dtype, heads), tile in zip(self.sources(args), (at.k_in, at.q_in, at.gates), strict=True):
            size = _BYTES[dtype]
            pieces = p.key * size // 16  # of a token: 8, 16 or 32
            line, piece = lane // pieces, lane % pieces
            stride = Int64(tensor.stride[0]) * size
            source = tensor.iterator.toint() + Int64(head * heads // p.heads) * (Int64(tensor.stride[1]) * size)
            source = source + Int64(first + warp * GROUP + line) * stride + piece * 16
            for i in range(0, GROUP, 32 // pieces):
                token = i + line
                if tile is at.gates:
                    target = self.gates_of(at, warp, i) + line * (p.key * size) + piece * 16
                else:
                    lines = (piece // 8) * CHUNK + warp * GROUP + token
                    target = tile + lines * LINE + (((piece % 8) ^ token) << 4)
                copy_async(target, source + i * stride, Boolean(warp * GROUP + token < valid))
            if tile is not at.k_in:
                copies_end()

    def sources(self, args: Args) -> tuple[tuple[Any, str, int], ...]:
        """k, q and g: tensor, type, heads."""
        p = self.problem
        return (args.k, p.io, p.heads_k), (args.q, p.io, p.heads_q), (args.g, p.gate_dtype, p.heads)

    def gates_of(self, at: Places, warp: Int32, token: int) -> Int32:
        """The line of a token's gates. A quad has 16 K bytes, of which those that ``Beside`` has for Q are written in any case."""
        key, size = self.problem.key, _BYTES[self.problem.gate_dtype]
        quad, line = divmod(token, QUAD)
        return at.gates + (warp * GROUP + quad * QUAD) * (key * 4) + ((4 - size) * QUAD * key + line * (key * size))

    def gates(self, at: Places, warp: Int32, token: int) -> list[Any]:
        """This lane's channels of g of a token."""
        dtype = self.problem.gate_dtype
        size = _BYTES[dtype]
        place = self.gates_of(at, warp, token) + self.lane_channel() * size
        if dtype == "float32":
            return load_floats(place, self.channels)
        return [value for word in load_words(place, self.channels // 2) for value in unpacked(dtype, word)]

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

    def betas(self, args: Args, first: Int32, valid: Int32, head: Int32, warp: Int32) -> Float32:
        """beta of token lane / 4 of the warp's."""
        row = warp * GROUP + cute.arch.lane_idx() // 4
        raw = Float32(args.beta[first + cutlass.min(row, valid - 1), head])
        return select(row < valid, self.beta.value(raw), Float32(0.0))

    @cute.jit
    def put_vectors(self, at: Places, warp: Int32, beta: Float32, squares_q: Float32, squares_k: Float32):
        """The vectors of the warp's tokens: by the lane that has a token's sums of squares."""
        lane = cute.arch.lane_idx()
        row = warp * GROUP + lane // 4
        if lane % 4 == lane // 8:
            store_floats(at.beta + row * 4, [beta])
            if cutlass.const_expr(self.problem.l2norm):
                norm_q, norm_k = (rsqrt(squares + Float32(NORM_EPSILON)) for squares in (squares_q, squares_k))
                store_floats(at.vectors + row * 4, [norm_k])
                store_floats(at.vectors + (CHUNK + row) * 4, [Float32(self.problem.scale) * norm_q])
        cute.arch.sync_warp()

    def diagonal(
        self, at: Places, valid: Int32, warp: Int32, decays: Decays, diagonal: Float32
    ) -> tuple[Tokens, Scores]:
        """The warp's tokens, with the factors that they keep: norms and scale; and their scores with each other. ``diagonal``: products of
        q and k of token lane / 4."""
        p, lane = self.problem, cute.arch.lane_idx()
        channel = self.lane_channel()
        panel = channel // (LINE // 2)
        place = at.k_in + panel * self.panel + warp * (GROUP * LINE) + (channel - panel * (LINE // 2)) * 2
        tokens = Tokens(p.io, self.channels, place)
        beside = Beside(at.gates + warp * (GROUP * p.key * 4), channel, p.key)
        behind_k = at.q_in - at.k_in
        rows = [at.vectors + (vector * CHUNK + warp * GROUP) * 4 for vector in range(2)]
        if p.l2norm:
            own = [load_floats(row + lane // 4 * 4, 1)[0] for row in rows]
            diagonal = diagonal * own[0] * own[1]

        def begin(first: int) -> None:
            quad = range(first, first + QUAD)
            k, q = ([tokens.words(token, tile) for token in quad] for tile in (Int32(0), behind_k))
            gates = [self.gates(at, warp, token) for token in quad]
            norms = [[None] * QUAD] * 2
            if p.l2norm:
                norms = [load_floats(row + first * 4, QUAD) for row in rows]
            for i, token in enumerate(quad):
                decay = decays.of(gates[i])
                if not self.neutral:
                    # Zeros were loaded for a token that the chunk has not; its decay is 1, which no other exceeds.
                    least = select(warp * GROUP + token < valid, Float32(0.0), Float32(1.0))
                    decay = [largest(value, least) for value in decay]
                tokens.begin(token, k[i], q[i], norms[0][i], norms[1][i], decay)

        address = fragment_address(at.q_in, at.k_in, warp * GROUP)
        return tokens, diagonal_scores(
            tokens, begin, address, beside, behind_k, at.columns - at.k_in, self.panel, self.steps, diagonal
        )

    @cute.jit
    def folded(self, at: Places, tokens: Tokens, scores: Scores, warp: Int32, valid: Int32):
        """``fold`` of the warp's group: its scores of q afterwards; of k, there are none. In a branch, so that ptxas leaves what is before it alone."""
        q = list(scores.q)
        if warp * GROUP < valid:
            lane = cute.arch.lane_idx()
            (beta,) = load_floats(at.beta + (warp * GROUP + lane // 4) * 4, 1)
            q = fold(tokens, q, scores.k, beta, at.factors + warp * FACTORS, lane)
        return q

    def put_total(self, at: Places, warp: Int32, total: list[Any]) -> None:
        store_floats(at.totals + (warp * self.problem.key + self.lane_channel()) * 4, total)

    def total(self, at: Places, warp: Any) -> list[Any]:
        return load_floats(at.totals + (warp * self.problem.key + self.lane_channel()) * 4, self.channels)

    @cute.jit
    def write_decay(self, at: Places, warp: Int32, total: list):
        if warp == 0:
            store_floats(at.decay + self.lane_channel() * 4, total)

    # Scores.

    @cute.jit
    def pairs(self, at: Places, warp: Int32):
        """Scores of pairs of groups: those of the warp's rows with the 4 groups before them, and of its columns with groups 5 and more
        behind them. Returns the products of the totals before the warp's group, and behind it."""
        # Tensors, which loops may write to.
        before, behind = (cute.make_rmem_tensor(self.channels, Float32) for _ in range(2))
        for i in range(self.channels):
            before[i] = behind[i] = Float32(1.0)
        near, far = cutlass.max(warp - 4, 0), cutlass.min(warp + 5, WARPS)
        for i in cutlass.range(warp - 1, near - 1, -2, unroll=1):
            self.two_pairs(at, warp, [warp], [i, cutlass.max(i - 1, 0)], i > near, before)
        for i in cutlass.range(near, unroll=1):
            self.multiply(before, self.total(at, i))
        for i in cutlass.range(warp + 1, far, unroll=1):
            self.multiply(behind, self.total(at, i))
        for i in cutlass.range(far, WARPS, 2, unroll=1):
            self.two_pairs(at, warp, [i, cutlass.min(i + 1, WARPS - 1)], [warp], i + 1 < WARPS, behind)
        return [before[i] for i in range(self.channels)], [behind[i] for i in range(self.channels)]

    def multiply(self, held: Any, factors: list[Any]) -> None:
        for i, x in enumerate(factors):
            held[i] = held[i] * x

    def two_pairs(
        self, at: Places, warp: Int32, rows: list[Any], columns: list[Any], both: Boolean, factors: Any
    ) -> None:
        """Scores of two pairs of groups to P and N, or if not ``both`` of the first one: of one row group or one column group, with two of the
        others. ``factors``: the product of the decays of the groups before the first one, of the lane's channels; then of all that were.
        """
        lane = cute.arch.lane_idx()
        line = lane % 8
        place = at.factors + warp * FACTORS
        first, second = (self.total(at, group) for group in (columns if len(columns) == 2 else rows))
        cute.arch.sync_warp()
        self.put_factors(place, factors)
        self.multiply(factors, first)
        self.put_factors(place + FACTORS // 2, factors)
        self.multiply(factors, [select(both, x, Float32(1.0)) for x in second])
        cute.arch.sync_warp()
        rows_at = [fragment_address(at.q_in, at.k_in, row * GROUP) for row in rows]
        columns_at = [at.columns + (column * GROUP + line) * LINE + ((lane // 8 ^ line) << 4) for column in columns]
        sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2)]
        # Loads of two pairs come before products, as they would not be moved over stores of the first one's scores.
        for step in range(0, self.steps, 2):
            loaded = [load_columns(column, step, self.panel) for column in columns_at]
            a = [[load_rows(row, step + i, self.panel) for i in range(2)] for row in rows_at]
            for pair in range(2):
                words = load_words(place + pair * (FACTORS // 2) + lane % 4 * 16 + step * 32, 4)
                b = [multiplied(x, y) for x, y in zip(loaded[pair % len(loaded)], words, strict=True)]
                for i in range(2):
                    sums[pair][i] = multiply_add(MMA, sums[pair][i], a[pair % len(a)][i], b[2 * i : 2 * i + 2])
        scores = [joined(*parts) for parts in sums]
        self.put_scores(at, scores[0], rows[0], columns[0])
        self.put_scores_if(both, at, scores[1], rows[-1], columns[-1])

    @cute.jit
    def put_scores_if(self, wanted: Boolean, at: Places, scores: Scores, row: Int32, column: Int32):
        if wanted:
            self.put_scores(at, scores, row, column)

    def put_scores(self, at: Places, scores: Scores, row: Int32, column: Int32) -> None:
        (beta,) = load_floats(at.beta + (row * GROUP + cute.arch.lane_idx() // 4) * 4, 1)
        put_lower(at.lower, row, column, [-value * beta for value in scores.k])
        self.put_p(at, scores.q, row, column)

    def put_factors(self, place: Int32, factors: Any) -> None:
        """As lanes of B fragments load them: words of 4 steps' halves, by lane % 4."""
        lane = cute.arch.lane_idx()
        for i in range(self.words):
            pair = lane * self.words + i  # of channels
            step, half, t = pair // 8, pair // 4 % 2, pair % 4
            word = pack(MMA, factors[2 * i], factors[2 * i + 1])
            store_words(place + step // 2 * 64 + t * 16 + (step % 2 * 2 + half) * 4, [word])

    def put_p(self, at: Places, scores: list[Any], group: Int32, column: Int32) -> None:
        lane = cute.arch.lane_idx()
        line = lane // 4
        place = at.p + (group * GROUP + line) * LINE + ((column ^ line) << 4) + lane % 4 * 4
        store_words(place, [pack(MMA, *self.scaled(scores))])

    def scaled(self, values: list[Any]) -> list[Any]:
        return values if self.scale == 1.0 else [value * Float32(self.scale) for value in values]

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


def joined(a: list[Any], b: list[Any]) -> Scores:
    """The sum of two products: each waits for half as many of its own."""
    sums = [x + y for x, y in zip(a, b, strict=True)]
    return Scores(sums[:2], sums[2:])


def times(a: list[Any], b: list[Any]) -> list[Any]:
    return [x * y for x, y in zip(a, b, strict=True)]


def largest(a: Float32, b: Float32) -> Float32:
    """NaN if one is."""
    found: Float32 = assembly("max.NaN.f32 $r0, $i0, $i1;", [Float32], inputs=[a, b], volatile=False)[0]
    return found

# ruff: noqa: ANN201, SIM102  the DSL reads return annotations, and conditions of the trace stand apart
"""The state warpgroup of the prefill: the recurrence over chunks, X = S^T [64 v, K] float32 in registers. Imported by ``prefill``.

For every chunk, with columns j of a token, and h() and k() roundings to ``layout.MMA`` and to the type of K~, Q~ and K-:

    R  = k(X) K~^T                               issued first, behind the O of the chunk before, which is rounded and staged now
    O1 = k(X) Q~^T                               half of it runs while Y is made, half while U c_j is
    Y  = V^T - a_j R
    U  = h(Y) T^T                                waits for half of O1 only
    X  = decay X + k(U c_j) K-                   meanwhile O1 is scaled by d_i
    O  = d_i O1 + h(U) P^T                       waited for in the next chunk

Prepared tiles have a, c and d in them: GDN alone has these vectors, and a warpgroup that makes d and P meanwhile (``scorer``). And in GDN alone
k() may have 8 bits: of a work item's last chunk U c_j - k(U c_j) is added too. Where its keys are the same, updates take each other back
and their roundings add up, to 1.7e-2 of the state with beta near 1; those of earlier chunks are corrected by products of later ones, as long
as the keys stay the same. The warpgroup's warps meet nowhere in the loop: a warp's
16 rows of V are its own, in the slab of V, in X and in the slab of O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from ..layout import MMA, PANEL_BYTES, PrefillLayout
from ..problem import CHUNK, SLAB, Problem
from ..records import VECTORS
from . import tiles
from .arguments import ELEMENTS, Args, state_row
from .barriers import Barriers, Place, advanced
from .warp import exp2
from .work import Work

__all__ = ["Places", "Scan"]

_STEPS = CHUNK // tiles.K_STEP  # along tokens
_LINE_STEPS = tuple(32 * step for step in range(_STEPS))  # bytes between K steps of a line
Values = Sequence[Float32]


class Places(NamedTuple):
    """The next places in the rings of operands, of T and P, of slabs of O and of V."""

    operands: Place
    matrices: Place
    staging: Place
    values: Place


class Scan:
    """By 128 threads. ``summary``: the states that segments leave behind, without O."""

    def __init__(self, problem: Problem, layout: PrefillLayout, cluster: int, *, summary: bool) -> None:
        self.problem, self.layout, self.summary = problem, layout, summary
        self.barriers = Barriers(layout, cluster)
        self.scaled = not layout.prepared
        self.io = problem.io
        self.keys = MMA if layout.prepared else problem.io  # the type of K~, Q~, K- and of what multiplies them
        self.size = problem.key // 2  # values of X in a thread
        # K steps of K~ and Q~: along lines, then to the next panel; of K-: 16 lines further
        self.key_steps = tuple(step // 4 * PANEL_BYTES + step % 4 * 32 for step in range(problem.key // tiles.K_STEP))
        self.token_steps = tuple(2048 * step for step in range(_STEPS))

    # ------------------------------------------------------------------------------------------------------ the chunks

    @cute.jit
    def run(self, smem: cute.Pointer, args: Args, work: Work, places: Places):
        """A work item, from the seed to the final state."""
        thread = cute.arch.thread_idx()[0] % 128
        x = self.seed(args, work, thread)
        if work.chunks > 0:
            x, places = self.chunks(smem, work, x, thread, places)
        self.leave(args, work, thread, x)
        return places

    @cute.jit
    def chunks(self, smem: cute.Pointer, work: Work, x: Any, thread: Int32, places: Places):
        """X after the last chunk; there is at least one.

        A chunk's R is issued at the end of the one before it, so that the loop begins as it ends: with R alone in flight. The last
        chunk issues its own again, for nobody.
        """
        lane, warp = thread % 32, thread // 32
        base = smem.toint()
        # A lane's line of matrix lane / 8 of 16 tokens x 16 rows of V: lines of the slab are tokens.
        across = (8 * (lane >> 4) + lane % 8) * 128 + (((2 * warp + (lane >> 3 & 1)) ^ (lane % 8)) << 4)
        operands, matrices = self.layout.operands, self.layout.matrices
        stage, slot, slab, value = places
        place = base + (operands.start + stage.index * operands.size)
        self.barriers.wait(smem, "full", stage.index, stage.phase)
        words = tuple(tiles.packed(self.keys, x))
        r = tuple(tiles.multiply(self.keys, CHUNK, words, tiles.k_major(place), self.key_steps))
        for chunk in cutlass.range(work.chunks, unroll=1):
            t = base + (matrices.start + slot.index * matrices.size)
            vectors = t + self.layout.vectors
            self.barriers.wait(smem, "values", value.index, value.phase)
            v = self.values(base + (self.layout.values.start + value.index * PANEL_BYTES) + across)
            tiles.wait(0)
            y, v = tiles.landed(r), tiles.landed(v)
            if cutlass.const_expr(not self.summary):
                queries, half = tiles.k_major(place + self.layout.q), len(self.key_steps) // 2
                o = tiles.multiply(self.keys, CHUNK, words[: 4 * half], queries, self.key_steps[:half])
            self.barriers.wait(smem, "ready", slot.index, slot.phase)
            u, y = self.issue_u(t, y, self.unpacked(work, v), self.columns(vectors + VECTORS["a"], lane))
            cute.arch.sync_warp()
            if lane == 0:
                self.barriers.arrive(smem, "values_read", value.index)
            x = self.decayed(x, vectors, lane)
            c = self.columns(vectors + VECTORS["c"], lane)
            after, more = stage, chunk < work.chunks - 1
            if more:
                after = advanced(stage, operands.count)
            self.barriers.wait(smem, "full", after.index, after.phase)
            tiles.wait(0)
            tiles.kept(y)
            u = tuple(tiles.landed(u))
            update = self.times(u, c)
            if cutlass.const_expr(self.scaled):
                x = self.refined(not more, place, update, x)
            if cutlass.const_expr(not self.summary):
                o = tiles.multiply(self.keys, CHUNK, words[4 * half :], queries, self.key_steps[half:], tiles.landed(o))
            x, update = self.issue_x(place, update, x)
            if cutlass.const_expr(not self.summary):
                u = tuple(tiles.packed(MMA, u)) if self.scaled else update
                if cutlass.const_expr(self.scaled):
                    self.barriers.wait(smem, "scores", slot.index, slot.phase)
                d = self.columns(t + self.layout.d, lane)
                tiles.wait(1)
                tiles.kept(words)
                o = self.times(tiles.landed(o), d)
                o = tiles.multiply(MMA, CHUNK, u, tiles.k_major(t + self.layout.p), _LINE_STEPS, o)
                tiles.wait(1)
            else:
                tiles.wait(0)
            x = tuple(tiles.landed(x))
            tiles.kept(update)
            place = base + (operands.start + after.index * operands.size)
            r, words = self.issue_r(place, x)
            if more:
                self.barriers.release(smem, "empty", stage.index, lane)
            if cutlass.const_expr(self.summary):
                self.barriers.release(smem, "free", slot.index, lane)
            if cutlass.const_expr(not self.summary):
                tiles.wait(1)
                tiles.kept(u)
                self.stage(smem, slab, slot, tiles.landed(o), across, lane)
                slab = advanced(slab, self.layout.staging.count)
            stage, slot, value = after, advanced(slot, matrices.count), advanced(value, self.layout.values.count)
        tiles.wait(0)
        tiles.kept(words)
        tiles.landed(r)
        self.barriers.release(smem, "empty", stage.index, lane)
        return x, Places(advanced(stage, operands.count), slot, slab, value)

    @cute.jit
    def refined(self, last: Boolean, place: Int32, update: list, x: tuple):
        """X with what rounding is about to take from the last update. No product is in flight, before or after."""
        if last:
            rounded = [value for word in tiles.packed(self.keys, update) for value in tiles.unpacked(self.keys, word)]
            x, rest = self.issue_x(place, [full - less for full, less in zip(update, rounded, strict=True)], x)
            tiles.wait(0)
            x = tuple(tiles.landed(x))
            tiles.kept(rest)
        return x

    @cute.jit
    def stage(self, smem: cute.Pointer, slab: Place, slot: Place, o: list, across: Int32, lane: Int32):
        """O of a chunk to its place in shared memory, [token][v]; its T, P and vectors have been read."""
        ring = self.layout.staging
        words = tiles.packed(self.io, o)
        self.barriers.wait(smem, "stored", slab.index, slab.phase ^ 1)
        place = smem.toint() + (ring.start + slab.index * ring.size) + across
        for step in cutlass.range_constexpr(_STEPS):
            tiles.store_matrices(place + 2048 * step, words[4 * step : 4 * step + 4])
        tiles.fence_shared()
        cute.arch.sync_warp()
        if lane == 0:
            self.barriers.arrive(smem, "staged", slab.index)
        self.barriers.release(smem, "free", slot.index, lane)

    # Issued in halves: what the second one needs is rounded while the first one runs.

    def issue_r(self, place: Int32, x: Values) -> tuple[Any, Any]:
        """R, in flight, and k(X)."""
        return self.issue(self.keys, CHUNK, x, tiles.k_major(place), self.key_steps)

    def issue_u(self, place: Int32, r: Values, v: Values, a: Values) -> tuple[Any, Any]:
        """U, in flight, and h(Y)."""
        return self.issue(MMA, CHUNK, self.less(v, a, r), tiles.k_major(place), _LINE_STEPS)

    def issue_x(self, place: Int32, update: Values, x: Values) -> tuple[Any, Any]:
        """X, in flight, and the rounded update."""
        b = tiles.mn_major(place + self.layout.keys, PANEL_BYTES)
        return self.issue(self.keys, self.problem.key, update, b, self.token_steps, x, transposed=True)

    def issue(
        self, kind: str, columns: int, a: Values, b: Int64, offsets: tuple[int, ...], sums: Any = None, *,
        transposed: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        """A, rounded to ``kind``, times B as one group of two halves; and A."""
        half, words = len(offsets) // 2, []
        for last, part in enumerate((slice(0, half), slice(half, 2 * half))):
            mine = tiles.packed(kind, a[8 * part.start : 8 * part.stop])
            sums = tiles.multiply(
                kind, columns, mine, b, offsets[part], sums, transposed=transposed, commit=bool(last)
            )  # fmt: skip
            words += mine
        return tuple(sums), tuple(words)

    def values(self, place: Int32) -> list[Int32]:
        """V^T of a slab: the thread's 16 rows of V, all tokens, two a word."""
        return [word for step in range(_STEPS) for word in tiles.load_matrices(place + 2048 * step)]

    def unpacked(self, work: Work, words: list[Int32]) -> list[Float32]:
        """V^T in float32."""
        v = [value for word in words for value in tiles.unpacked(self.io, word)]
        return self.no_values(work, v) if self.summary else v

    def columns(self, vector: Int32, lane: Int32) -> list[Float32]:
        """A thread's values of a vector over the tokens."""
        return self.pairs(vector, lane, CHUNK) if self.scaled else []

    def decayed(self, x: Values, vectors: Int32, lane: Int32) -> tuple[Float32, ...]:
        """X times the decay of the chunk: one for all, or one a channel."""
        if not self.scaled:
            return tuple(self.times(x, self.pairs(vectors, lane, self.problem.key)))
        decay = exp2(
            tiles.load_value(vectors + VECTORS["sums"] + 4 * (CHUNK - 1))
        )  # of the last token: G stands still behind it
        return tuple(value * decay for value in x)

    @staticmethod
    def pairs(vector: Int32, lane: Int32, columns: int) -> list[Float32]:
        """A thread's columns of a vector."""
        place = vector + (lane % 4) * 8
        return [value for block in range(columns // 8) for value in tiles.load_pair(place + 32 * block)]

    def less(self, v: Values, a: Values, r: Values) -> list[Float32]:
        """V^T - a R."""
        if not self.scaled:
            return [left - right for left, right in zip(v, r, strict=True)]
        return [left - a[_column(i)] * right for i, (left, right) in enumerate(zip(v, r, strict=True))]

    @staticmethod
    def times(values: Values, factors: Values) -> list[Float32]:
        """Columns times their factors; without factors, the values."""
        return [value * factors[_column(i)] if factors else value for i, value in enumerate(values)]

    def no_values(self, work: Work, v: list[Float32]) -> list[Float32]:
        """V is 0 for rows of the identity."""
        real = work.slab < self.problem.slabs
        return [cutlass.select_(real, value, Float32(0.0)) for value in v]

    # ------------------------------------------------------------------------------------------------- before and after

    @cute.jit
    def seed(self, args: Args, work: Work, thread: Int32):
        """X before the first chunk."""
        row, column = _first(work, thread)
        x = tuple(Float32(0.0) for _ in range(self.size))
        identity = row - self.problem.value  # of a summary
        if cutlass.const_expr(self.problem.initial):
            # Of several segments, the summary reads it: the last one may have overwritten it by the time of the scan.
            first = work.slab < self.problem.slabs if self.summary else work.segments == 1
            if first & (work.segment == 0):
                state, inside = state_row(args, work.sequence)
                if inside:
                    x = self.read(args.initial_state, state, work.head, row, column)
        if cutlass.const_expr(self.summary):
            if work.slab >= self.problem.slabs:
                x = tuple(
                    cutlass.select_(identity + down == column + right, Float32(1.0), Float32(0.0))
                    for down, right in self.places()
                )
            elif work.segment == 0:
                self.write_summary(args, work, work.segments - 1, row, column, x)
        elif work.segments > 1:
            before = cutlass.select_(work.segment == 0, work.segments, work.segment) - 1
            x = self.read_summary(args, work, before, row, column)
        return x

    @cute.jit
    def leave(self, args: Args, work: Work, thread: Int32, x: tuple):
        """X after the last chunk goes to the summary, or to the final state."""
        row, column = _first(work, thread)
        if cutlass.const_expr(self.summary):
            self.write_summary(args, work, work.segment, row, column, x)
        elif cutlass.const_expr(self.problem.final):
            if work.segment == work.segments - 1:
                state, inside = state_row(args, work.sequence)
                if inside:
                    self.write(args.final_state, state, work.head, row, column, x)

    def places(self) -> list[tuple[int, int]]:
        """(rows, columns) of a thread's values from its first."""
        return [(8 * half, 8 * block + pair) for block in range(self.size // 4) for half in (0, 1) for pair in (0, 1)]

    def read(self, states: cute.Tensor, state: Int32, head: Int32, row: Int32, column: Int32) -> tuple[Float32, ...]:
        return tuple(Float32(states[state, head, row + down, column + right]) for down, right in self.places())

    def write(self, states: cute.Tensor, state: Int32, head: Int32, row: Int32, column: Int32, x: tuple) -> None:
        kind = ELEMENTS[self.problem.state_dtype]
        for (down, right), value in zip(self.places(), x, strict=True):
            states[state, head, row + down, column + right] = kind(value)

    def summary_rows(self, args: Args, work: Work, segment: Int32) -> cute.Tensor:
        """[V + K, K] of a segment: the state, then where it takes the rows of the identity."""
        key, rows = self.problem.key, self.problem.value + self.problem.key
        number = (Int64(work.sequence) * self.problem.heads + work.head) * work.segments + segment
        return cute.make_tensor(
            args.summaries + number * (rows * key), cute.make_layout((rows, key), stride=(key, 1))
        )  # fmt: skip

    def read_summary(self, args: Args, work: Work, segment: Int32, row: Int32, column: Int32) -> tuple[Float32, ...]:
        rows = self.summary_rows(args, work, segment)
        return tuple(rows[row + down, column + right] for down, right in self.places())

    def write_summary(self, args: Args, work: Work, segment: Int32, row: Int32, column: Int32, x: tuple) -> None:
        rows = self.summary_rows(args, work, segment)
        for (down, right), value in zip(self.places(), x, strict=True):
            rows[row + down, column + right] = value


def _column(index: int) -> int:
    """Of value ``index`` among the thread's columns."""
    return index // 4 * 2 + index % 2


def _first(work: Work, thread: Int32) -> tuple[Int32, Int32]:
    """Row and column of a thread's first value in the head's state."""
    return work.slab * SLAB + thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2

# ruff: noqa: ANN201  the DSL reads return annotations
"""The prefill kernel of sm_90a. A CTA keeps 64 rows of a head's state in registers, from a sequence's first chunk to its last.

    warpgroup 0       warp 0 loads operand tiles, warp 1 loads V, warp 2 stores O, warp 3 writes the zeros of tokens of no sequence
    warpgroups 1, 2   fused (GDN): make T, P and the vectors of every other chunk from its K and Q
    last warpgroup    the scan: see ``scan``

Prepared (KDA): T, P and the tiles that the gates have gone into come from the workspace, and there are no warpgroups that make them.

Segments: with too few heads and sequences for the SMs, a sequence is cut into segments that are scanned side by side, in two passes.
The first, the summary, leaves for every segment but the last

    slot s of summaries[sequence][head][segment], float32 [V + K, K]
        rows 0 to V - 1   the state behind segment s, from zero (s = 0: from the initial state)
        the other rows    what becomes of the rows of the identity, without V (from s = 1 on)
    slot S - 1, rows 0 to V - 1: the initial state, as the last segment may overwrite it while the first one reads

and ``combine`` replaces rows 0 to V - 1 of slot s by the state behind segment s. The second pass starts every segment with the slot
before it.

Clusters: two CTAs with two slabs of one head read the same operands and the same T, P and vectors. Each loads half of the operands
for both, and a prepare warpgroup of either makes every fourth chunk's T, P and vectors for both.

Launch: one CTA an SM, which takes one work item after the other. Dependent launches may begin as soon as every CTA has; none touches
memory before griddepcontrol.wait.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..layout import ALIGNMENT, GDN_VECTOR_BYTES, PANEL_BYTES, PrefillLayout
from ..problem import CHUNK, SLAB, Problem
from . import tiles
from .arguments import Args
from .barriers import Barriers, Place, advanced, room
from .gaps import zero_gaps
from .loads import Loader, store_zeros
from .output import Output
from .scan import Places, Scan
from .work import Work, locate

__all__ = ["Prefill"]

WARPGROUP = 128
WARPS = 4  # of a warpgroup
REGISTERS = (24, 128, 232)  # of a thread of warpgroup 0, that prepares, that scans: 64 Ki of 512 threads
PREPARE_BARRIER = 1  # hardware barriers 1 and 2: one for each prepare warpgroup


class Prefill:
    """``problem`` with the places of ``layout``."""

    def __init__(self, problem: Problem, layout: PrefillLayout, *, summary: bool = False) -> None:
        self.problem, self.layout, self.summary = problem, layout, summary
        self.slabs = problem.slabs + (problem.key // SLAB if summary else 0)
        self.cluster = 2 - self.slabs % 2
        self.barriers = Barriers(layout, self.cluster)
        self.workers = 2 * self.cluster  # prepare warpgroups that share the chunks
        self.loader = Loader(problem, layout, self.cluster, summary=summary)
        self.output = Output(problem, layout, self.cluster)
        self.scan = Scan(problem, layout, self.cluster, summary=summary)
        # (first byte, bytes) of T, P and the vectors; a summary has no P and no d
        whole = ((0, 2 * PANEL_BYTES + GDN_VECTOR_BYTES),)
        self.parts = ((0, PANEL_BYTES), (2 * PANEL_BYTES, 512), (2 * PANEL_BYTES + 768, 16)) if summary else whole
        self.prepare: Any = None if layout.prepared else _prepare(problem, summary)

    def launch(self, args: Args, stream: cuda.CUstream, ctas: Any = None) -> None:
        """One pass, by at most ``ctas`` CTAs (None: the SMs). For host code."""
        covered = args.segments - 1 if self.summary else args.segments
        items = args.sequences * (self.slabs * self.problem.heads) * covered
        ctas = args.sms if ctas is None else ctas
        inside = args._replace(q=None, k=None, v=None)
        self.kernel(self.loader.atoms(args), self.output.atom(args), inside, covered, items).launch(
            grid=[cutlass.min(items, ctas // self.cluster * self.cluster), 1, 1],
            block=[self.layout.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, loads: tuple, store: tuple, args: Args, covered: Int32, items: Int32):
        """The kernel: see the module's text."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(self.layout.shared_bytes, ALIGNMENT)
        if warp == 0:
            for atom, _ in (*loads, store):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                self.barriers.init(smem)
                if cutlass.const_expr(self.cluster > 1 and not self.layout.prepared):
                    self.clear_decays(smem.toint())
            cute.arch.mbarrier_init_fence()
        self.meet()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if warp < WARPS:
            self.registers(0)
            if warp == 0:
                self.load(smem, loads, args, covered, items)
            elif warp == 1:
                self.load_values(smem, loads[0], args, covered, items)
            elif warp == 2:
                self.store(smem, store, args, covered, items)
            else:
                self.zero(args, covered, items)
        elif warp >= self.layout.threads // 32 - WARPS:
            self.registers(2)
            self.scan_items(smem, args, covered, items)
        else:
            if cutlass.const_expr(not self.layout.prepared):
                self.registers(1)
                self.prepare_items(smem, loads, args, covered, items)
        if cutlass.const_expr(self.cluster > 1):  # the other CTA may still report here
            cute.arch.sync_warp()
            self.meet()

    def registers(self, role: int) -> None:
        """Of a thread, from here on."""
        if self.layout.prepared:
            return
        if role == 0:
            cute.arch.setmaxregister_decrease(REGISTERS[role])
        else:
            cute.arch.setmaxregister_increase(REGISTERS[role])

    def clear_decays(self, base: Int32) -> None:
        """The decay of a chunk is 4 bytes, and what goes to the other CTA 16: nobody else writes the rest."""
        ring = self.layout.matrices
        for index in range(ring.count):
            store_zeros(base + (ring.start + index * ring.size + 2 * PANEL_BYTES + GDN_VECTOR_BYTES - 16))
        tiles.fence_shared()

    def meet(self) -> None:
        """All threads of the cluster."""
        if self.cluster == 1:
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # The roles, each over the work items of the CTA.

    def locate(self, args: Args, covered: Int32, number: Int32) -> Work:
        return locate(self.problem, args, self.slabs, covered, number)

    @cute.jit
    def load(self, smem: cute.Pointer, loads: tuple, args: Args, covered: Int32, items: Int32):
        number, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        stage, slot, tail = Place(Int32(0), Int32(0)), Place(Int32(0), Int32(0)), Int32(0)
        free = room(self.layout.matrices.count)
        while number < items:
            work = self.locate(args, covered, number)
            if cutlass.const_expr(not self.layout.prepared):
                stage, tail = self.loader.load_operands(smem, loads, args, work, stage, tail)
            elif cute.arch.lane_idx() == 0:
                stage, slot, free = self.loader.load_records(smem, args, work, stage, slot, free)
            number += step

    @cute.jit
    def load_values(self, smem: cute.Pointer, atom: tuple, args: Args, covered: Int32, items: Int32):
        number, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        stage, tail = Place(Int32(0), Int32(0)), Int32(0)
        while number < items:
            work = self.locate(args, covered, number)
            slab = cutlass.min(work.slab, self.problem.slabs - 1)  # of a summary, V is of no use to the others
            stage, tail = self.loader.load_values(smem, atom, work, slab, stage, tail)
            number += step

    @cute.jit
    def store(self, smem: cute.Pointer, store: tuple, args: Args, covered: Int32, items: Int32):
        if cutlass.const_expr(not self.summary):
            number, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
            slab = Place(Int32(0), Int32(0))
            while number < items:
                slab = self.output.run(smem, store, args, self.locate(args, covered, number), slab)
                number += step

    @cute.jit
    def zero(self, args: Args, covered: Int32, items: Int32):
        if cutlass.const_expr(not self.summary):
            number, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
            while number < items:
                work = self.locate(args, covered, number)
                if work.segment == 0:
                    zero_gaps(self.problem, args, work.sequence, work.head, work.slab, cute.arch.lane_idx(), 32)
                number += step

    @cute.jit
    def scan_items(self, smem: cute.Pointer, args: Args, covered: Int32, items: Int32):
        number, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        places = Places(*(Place(Int32(0), Int32(0)) for _ in range(5)))
        while number < items:
            places = self.scan.run(smem, args, self.locate(args, covered, number), places)
            number += step

    @cute.jit
    def prepare_items(self, smem: cute.Pointer, loads: tuple, args: Args, covered: Int32, items: Int32):
        """The prepare warpgroups of a cluster take turns at chunks, across work items."""
        number, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP - 1)
        turn = group
        if cutlass.const_expr(self.cluster > 1):
            turn = group + cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) * 2
        slot, parity = advanced(Place(Int32(0), Int32(0)), self.layout.matrices.count, turn), Int32(0)
        free = advanced(room(self.layout.matrices.count), 2 * self.layout.matrices.count, turn)
        while number < items:
            work = self.locate(args, covered, number)
            if turn < work.chunks:
                slot, free, parity = self.prepare_chunks(smem, loads, args, work, group, turn, slot, free, parity)
            turn = (turn - work.chunks) & (self.workers - 1)
            number += step

    @cute.jit
    def prepare_chunks(
        self, smem: cute.Pointer, loads: tuple, args: Args, work: Work, group: Int32, first: Int32, slot: Place,
        free: Place, parity: Int32,
    ):  # fmt: skip
        """T, P and the vectors of the chunks from ``first`` on that are this warpgroup's, for all CTAs of the cluster.

        Once a chunk's scores are in registers, the next one's K and Q are on their way to the same place.
        """
        scores, matrices, scratch = self.layout.scores, self.layout.matrices, self.layout.scratch
        thread, base = cute.arch.thread_idx()[0] % WARPGROUP, smem.toint()
        place = base + (scores.start + group * scores.size)
        self.loader.load_scores(smem, loads, work, first, group, thread)
        amplitude, bias = self.prepare.parameters(args, work.head)
        g, beta = self.gates(args, work, first, thread)
        for chunk in cutlass.range(first, work.chunks, self.workers, unroll=1):
            t = base + (matrices.start + slot.index * matrices.size)
            valid = cutlass.select_(chunk == work.chunks - 1, work.valid, Int32(CHUNK))
            mine = g, beta
            g, beta = self.gates(args, work, cutlass.min(chunk + self.workers, work.chunks - 1), thread)
            self.barriers.wait(smem, "scores", group, parity)
            parity = parity ^ 1
            self.prepare.run(
                place, place + self.layout.q, t, t + PANEL_BYTES, t + 2 * PANEL_BYTES,
                base + (scratch.start + group * scratch.size), *mine, amplitude, bias, valid, thread,
                PREPARE_BARRIER + group,
                partial(self.released, smem, loads, work, chunk + self.workers, group, thread, free),
            )  # fmt: skip
            if cutlass.const_expr(self.cluster == 1):
                cute.arch.sync_warp()
            else:
                cute.arch.barrier(barrier_id=PREPARE_BARRIER + group, number_of_threads=WARPGROUP)
                self.send(smem, t, slot, thread)
            if thread % 32 == 0:
                self.barriers.arrive(smem, "ready", slot.index)
            for _ in cutlass.range_constexpr(self.workers // 2):
                slot, free = advanced(slot, matrices.count, 2), advanced(free, 2 * matrices.count, 2)
        return slot, free, parity

    def released(
        self, smem: cute.Pointer, loads: tuple, work: Work, chunk: Int32, group: Int32, thread: Int32, free: Place
    ) -> None:  # fmt: skip
        """A chunk's scores are in registers: load those of the next one, and wait for the place of T and P."""
        self.loader.load_scores(smem, loads, work, chunk, group, thread)
        self.barriers.wait(smem, "free", free.index, free.phase)

    def gates(self, args: Args, work: Work, chunk: Int32, thread: Int32) -> tuple[Any, Any]:
        """A chunk's gates and betas, on their way from memory."""
        valid = cutlass.select_(chunk == work.chunks - 1, work.valid, Int32(CHUNK))
        return self.prepare.gates(args, work.head, work.first + chunk * CHUNK, valid, thread)

    @cute.jit
    def send(self, smem: cute.Pointer, t: Int32, slot: Place, thread: Int32):
        """What lies at ``t`` to the other CTA, which sees the same arrivals as this one."""
        other = cute.arch.block_idx_in_cluster() ^ 1
        ready = self.barriers.of(smem, "ready", slot.index)
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, sum(size for _, size in self.parts), other)
            for first, size in self.parts:
                text = (
                    "{ .reg .b32 to, at; mapa.shared::cluster.u32 to, $i0, $i2; mapa.shared::cluster.u32 at, $i1, $i2; "
                    f"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [$i0], {size}, [at]; }}"
                )
                tiles.assembly(text, inputs=[t + first, ready.toint(), other], memory=True)
        elif thread % 32 == 0:
            cute.arch.mbarrier_arrive(ready, other)


def _prepare(problem: Problem, summary: bool) -> Any:
    from .prepare_gdn import PrepareGdn

    return PrepareGdn(problem, summary=summary)

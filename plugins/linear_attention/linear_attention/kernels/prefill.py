# ruff: noqa: ANN201, SIM102  the DSL reads return annotations, and conditions of the trace stand apart
"""The prefill kernel of sm_90a. A CTA keeps 64 rows of a head's state in registers, from a sequence's first chunk to its last.

    warpgroup 0   warp 0 loads K, Q and records, warp 1 loads V, warp 2 stores O, warp 3 writes the zeros of tokens of no sequence
    warpgroup 1   the scan: see ``scan``
    warpgroup 2   gdn: P and d, see ``scorer``; not in a summary

T and the vectors of a chunk come from its record in the workspace (``records``). KDA's records have P and the tiles that the gates have
gone into, too; GDN's K and Q are the tokens' own, and its P is made here: so no kernel writes it and only this one reads Q.

Segments: with too few heads and sequences for the SMs, a sequence is cut into segments that are scanned side by side, in two passes.
The first, the summary, leaves for every segment but the last

    slot s of summaries[sequence][head][segment], float32 [V + K, K]
        rows 0 to V - 1   the state behind segment s, from zero (s = 0: from the initial state)
        the other rows    what becomes of the rows of the identity, without V (from s = 1 on)
    slot S - 1, rows 0 to V - 1: the initial state, as the last segment may overwrite it while the first one reads

and ``combine`` replaces rows 0 to V - 1 of slot s by the state behind segment s. The second pass starts every segment with the slot
before it.

Clusters: two CTAs with two slabs of one head read the same operands and records. Each loads half of them for both, and makes every second P.

Launch: one CTA an SM, which takes one work item after the other. The next launch may begin as soon as every CTA has; behind a summary, when
every CTA's griddepcontrol.wait is over.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..layout import ALIGNMENT, PrefillLayout
from ..problem import SLAB, Problem
from .arguments import Args
from .barriers import Barriers, Place
from .gaps import zero_gaps
from .loads import Loader
from .output import Output
from .scan import Places, Scan
from .scorer import Scorer
from .work import Work, count_items, locate

__all__ = ["Prefill"]

WARPS = 4  # of a warpgroup
# Of a thread, by warpgroup: the scan needs more than a third of an SM's registers.
REGISTERS = {"loads": 80, "scan": 248, "scores": 176}


class Prefill:
    """``problem`` with the places of ``layout``."""

    def __init__(self, problem: Problem, layout: PrefillLayout, *, summary: bool = False) -> None:
        self.problem, self.layout, self.summary = problem, layout, summary
        self.slabs = problem.slabs + (problem.key // SLAB if summary else 0)
        self.cluster = 2 - self.slabs % 2
        # What becomes of the identity in the first segment is of no use: its slabs are left out, if they are whole clusters.
        self.fewer = self.slabs - problem.slabs if problem.slabs % self.cluster == 0 else 0
        self.barriers = Barriers(layout, self.cluster)
        self.loader = Loader(problem, layout, self.cluster, summary=summary)
        self.output = Output(problem, layout, self.cluster)
        self.scan = Scan(problem, layout, self.cluster, summary=summary)
        self.scorer: Any = None if layout.prepared or summary else Scorer(problem, layout, self.cluster)

    def launch(self, args: Args, stream: cuda.CUstream, ctas: Any = None) -> None:
        """One pass, by at most ``ctas`` CTAs (None: the SMs). For host code."""
        covered = args.segments - 1 if self.summary else args.segments
        count = count_items(self.problem, args, self.slabs, covered, self.fewer)
        ctas = args.sms if ctas is None else ctas
        inside = args._replace(q=None, k=None, v=None)
        self.kernel(self.loader.atoms(args), self.output.atom(args), inside, covered, count).launch(
            grid=[cutlass.min(count, ctas // self.cluster * self.cluster), 1, 1],
            block=[32 * WARPS * (3 if self.scorer else 2), 1, 1],
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
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.scorer):
            if warp >= 2 * WARPS:
                self.scorer.clear(smem)
        self.meet()
        if cutlass.const_expr(self.summary):  # what the next launch may touch without a wait: see ``chunks``
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        else:
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.scorer):
            if warp >= 2 * WARPS:
                cute.arch.setmaxregister_increase(REGISTERS["scores"])
                self.make_scores(smem, args, covered, items)
            elif warp >= WARPS:
                cute.arch.setmaxregister_increase(REGISTERS["scan"])
                self.scan_items(smem, args, covered, items)
            else:
                cute.arch.setmaxregister_decrease(REGISTERS["loads"])
                self.load_items(warp, smem, loads, store, args, covered, items)
        elif warp >= WARPS:
            self.scan_items(smem, args, covered, items)
        else:
            self.load_items(warp, smem, loads, store, args, covered, items)
        if cutlass.const_expr(self.cluster > 1):  # the other CTA may still report here
            cute.arch.sync_warp()
            self.meet()

    def meet(self) -> None:
        """All threads of the cluster."""
        if self.cluster == 1:
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # The roles, each over the work items of the CTA.

    def locate(self, args: Args, covered: Int32, number: Int32) -> Work:
        return locate(self.problem, args, self.slabs, covered, self.fewer, number)

    @cute.jit
    def load_items(
        self, warp: Int32, smem: cute.Pointer, loads: tuple, store: tuple, args: Args, covered: Int32, items: Int32
    ):
        """Of warpgroup 0."""
        if warp == 0:
            self.load(smem, loads, args, covered, items)
        elif warp == 1:
            self.load_values(smem, loads[0], args, covered, items)
        elif warp == 2:
            self.store(smem, store, args, covered, items)
        else:
            self.zero(args, covered, items)

    @cute.jit
    def load(self, smem: cute.Pointer, loads: tuple, args: Args, covered: Int32, items: Int32):
        number, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        stage, slot, tail = Place(Int32(0), Int32(0)), Place(Int32(0), Int32(0)), Int32(0)
        while number < items:
            work = self.locate(args, covered, number)
            if cutlass.const_expr(not self.layout.prepared):
                stage, slot, tail = self.loader.load_tokens(smem, loads, args, work, stage, slot, tail)
            elif cute.arch.lane_idx() == 0:
                stage, slot = self.loader.load_records(smem, args, work, stage, slot)
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
                    zero_gaps(args, work.sequence, work.head, work.slab, cute.arch.lane_idx(), 32)
                number += step

    @cute.jit
    def scan_items(self, smem: cute.Pointer, args: Args, covered: Int32, items: Int32):
        number, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        places = Places(*(Place(Int32(0), Int32(0)) for _ in range(4)))
        while number < items:
            places = self.scan.run(smem, args, self.locate(args, covered, number), places)
            number += step

    @cute.jit
    def make_scores(self, smem: cute.Pointer, args: Args, covered: Int32, items: Int32):
        number, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        stage, slot = Place(Int32(0), Int32(0)), Place(Int32(0), Int32(0))
        while number < items:
            stage, slot = self.scorer.run(smem, self.locate(args, covered, number), stage, slot)
            number += step

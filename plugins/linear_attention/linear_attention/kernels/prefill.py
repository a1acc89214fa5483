# ruff: noqa: ANN201, SIM102  the DSL reads return annotations, and conditions of the trace stand apart
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

Launch: one CTA an SM; dependent launches may begin as soon as every CTA has, none touches memory before griddepcontrol.wait.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..layout import ALIGNMENT, PANEL_BYTES, PrefillLayout
from ..problem import CHUNK, SLAB, Problem
from . import tiles
from .arguments import Args
from .barriers import Barriers, Place, advanced
from .gaps import zero_gaps
from .loads import Loader
from .output import Output
from .scan import Scan
from .work import Work, locate

__all__ = ["Prefill"]

WARPGROUP = 128
WARPS = 4  # of a warpgroup
REGISTERS = (24, 128, 232)  # of a thread of warpgroup 0, that prepares, that scans: 64 Ki of 512 threads
PREPARE_BARRIER = 1  # hardware barriers 1 and 2: one for each prepare warpgroup


class Prefill:
    """``problem`` with the places of ``layout``."""

    def __init__(self, problem: Problem, layout: PrefillLayout, *, summary: bool = False, prepare: Any = None) -> None:
        self.problem, self.layout, self.summary = problem, layout, summary
        self.barriers = Barriers(layout)
        self.loader, self.output = Loader(problem, layout, summary=summary), Output(problem, layout)
        self.scan = Scan(problem, layout, summary=summary)
        self.slabs = problem.slabs + (problem.key // SLAB if summary else 0)
        self.prepare: Any = None if layout.prepared else prepare or _prepare(problem)

    def launch(self, args: Args, stream: cuda.CUstream) -> None:
        """One pass. For host code."""
        covered = args.segments - 1 if self.summary else args.segments
        inside = args._replace(q=None, k=None, v=None)
        self.kernel(self.loader.atoms(args), self.output.atom(args), inside, covered).launch(
            grid=[self.slabs * self.problem.heads * args.sequences * covered, 1, 1],
            block=[self.layout.threads, 1, 1],
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, loads: tuple, store: tuple, args: Args, covered: Int32):
        """The kernel: see the module's text."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(self.layout.shared_bytes, ALIGNMENT)
        if warp == 0:
            for atom, _ in (*loads, store):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                self.barriers.init(smem)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if warp < WARPS:
            self.registers(0)
            self.move(smem, loads, store, args, locate(self.problem, args, self.slabs, covered), warp)
        elif warp >= self.layout.threads // 32 - WARPS:
            self.registers(2)
            self.scan.run(smem, args, locate(self.problem, args, self.slabs, covered))
        else:
            if cutlass.const_expr(not self.layout.prepared):
                self.registers(1)
                self.prepare_chunks(smem, args, locate(self.problem, args, self.slabs, covered))

    def registers(self, role: int) -> None:
        """Of a thread, from here on."""
        if self.layout.prepared:
            return
        if role == 0:
            cute.arch.setmaxregister_decrease(REGISTERS[role])
        else:
            cute.arch.setmaxregister_increase(REGISTERS[role])

    @cute.jit
    def move(self, smem: cute.Pointer, loads: tuple, store: tuple, args: Args, work: Work, warp: Int32):
        """Warpgroup 0."""
        if warp == 0:
            if cutlass.const_expr(not self.layout.prepared):
                self.loader.load_operands(smem, loads, args, work)
            elif cute.arch.lane_idx() == 0:
                self.loader.load_records(smem, args, work)
        elif warp == 1:
            self.loader.load_values(smem, loads[0], work, cutlass.min(work.slab, self.problem.slabs - 1))
        elif warp == 2:
            if cutlass.const_expr(not self.summary):
                self.output.run(smem, store, args, work)
        elif cutlass.const_expr(not self.summary):
            if work.segment == 0:
                zero_gaps(self.problem, args, work.sequence, work.head, work.slab, cute.arch.lane_idx(), 32)

    @cute.jit
    def prepare_chunks(self, smem: cute.Pointer, args: Args, work: Work):
        """T, P and the vectors of every other chunk. By a warpgroup."""
        operands, matrices, scratch, base = (
            self.layout.operands, self.layout.matrices, self.layout.scratch, smem.toint(),
        )  # fmt: skip
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP - 1)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        stage, slot = Place(group, Int32(0)), Place(group, Int32(0))
        if group < work.chunks:
            amplitude, bias = self.prepare.parameters(args, work.head)
            for chunk in cutlass.range(group, work.chunks, 2, unroll=1):
                place = base + (operands.start + stage.index * operands.size)
                t = base + (matrices.start + slot.index * matrices.size)
                valid = cutlass.select_(chunk == work.chunks - 1, work.valid, Int32(CHUNK))
                token = work.first + chunk * CHUNK
                g, beta = self.prepare.gates(args, work.head, token, valid, thread)
                self.prefetch(args, work.head, token + 2 * CHUNK, thread)
                self.barriers.wait(smem, "full", stage.index, stage.phase)
                self.barriers.wait(smem, "free", slot.index, slot.phase ^ 1)
                self.prepare.run(
                    place, place + self.layout.q, t, t + PANEL_BYTES, t + 2 * PANEL_BYTES,
                    base + (scratch.start + group * scratch.size), g, beta, amplitude, bias, valid, thread,
                    PREPARE_BARRIER + group,
                )  # fmt: skip
                cute.arch.sync_warp()
                if thread % 32 == 0:
                    self.barriers.arrive(smem, "ready", slot.index)
                    self.barriers.arrive(smem, "empty", stage.index)
                stage, slot = advanced(stage, operands.count, 2), advanced(slot, matrices.count, 2)

    def prefetch(self, args: Args, head: Int32, token: Int32, thread: Int32) -> None:
        """Bring gates and betas of 64 tokens to the L2 cache: registers that wait for memory are more than there are."""
        token = cutlass.min(token + thread % CHUNK, args.tokens - 1)
        g, beta = (Int64((x.iterator + cute.crd2idx((token, head), x.layout)).toint()) for x in (args.g, args.beta))
        tiles.assembly("prefetch.global.L2 [$i0];", inputs=[Int64(cutlass.select_(thread < CHUNK, g, beta))])


def _prepare(problem: Problem) -> Any:
    from .prepare_gdn import PrepareGdn

    return PrepareGdn(problem)

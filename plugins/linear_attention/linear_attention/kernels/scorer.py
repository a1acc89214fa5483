# ruff: noqa: ANN201  the DSL reads return annotations
"""The score warps of GDN's prefill: P and d of one chunk after the other, to their places in shared memory. Imported by ``prefill``.

Both CTAs of a cluster have the same Q, K and records: each makes every second chunk's scores and sends them to the other. A warp sends its 16
rows of P and of d, and the other CTA's warp of that number expects them there: none waits for another one. The place at the
other CTA is free when ``ready`` is: either CTA has loaded its share of a record after the scans of both had read the place.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from ..layout import PANEL_BYTES, PrefillLayout
from ..problem import CHUNK, Problem
from .barriers import Barriers, Place, advanced
from .scores_gdn import ScoresGdn, clear
from .tiles import assembly
from .work import Work

__all__ = ["Scorer"]

_WARPS = 4
_THREADS = 32 * _WARPS
_P_ROWS, _D_ROWS = PANEL_BYTES // _WARPS, 4 * CHUNK // _WARPS  # bytes of a warp's


class Scorer:
    """By the 128 threads of a warpgroup."""

    def __init__(self, problem: Problem, layout: PrefillLayout, cluster: int) -> None:
        self.layout, self.cluster, self.stage = layout, cluster, ScoresGdn(problem)
        self.barriers = Barriers(layout, cluster)
        # So that a stage of operands always has the same CTA's chunks, which then waits for every phase of it.
        assert layout.operands.count % cluster == 0

    def clear(self, smem: cute.Pointer) -> None:
        """Before anyone sends."""
        for slot in range(self.layout.matrices.count):
            clear(self.matrices(smem, slot) + self.layout.p, cute.arch.thread_idx()[0] % _THREADS)

    @cute.jit
    def run(self, smem: cute.Pointer, work: Work, stage: Place, slot: Place):
        """The chunks of a work item, from these places on."""
        for _ in cutlass.range(work.chunks, unroll=1):
            if cutlass.const_expr(self.cluster == 1) or stage.index % self.cluster == cute.arch.block_idx_in_cluster():
                self.make(smem, stage, slot)
            else:
                self.expect(smem, slot)
            stage, slot = advanced(stage, self.layout.operands.count), advanced(slot, self.layout.matrices.count)
        return stage, slot

    @cute.jit
    def make(self, smem: cute.Pointer, stage: Place, slot: Place):
        layout, thread = self.layout, cute.arch.thread_idx()[0] % _THREADS
        lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
        operands = smem.toint() + (layout.operands.start + stage.index * layout.operands.size)
        place = self.matrices(smem, slot.index)
        self.barriers.wait(smem, "full", stage.index, stage.phase)
        self.stage.run(
            operands, operands + layout.q, place + layout.vectors, place + layout.p, place + layout.d, thread,
            ready=lambda: self.barriers.wait(smem, "ready", slot.index, slot.phase),
        )  # fmt: skip
        cute.arch.sync_warp()
        if lane == 0:
            self.barriers.arrive(smem, "scores", slot.index)
            if cutlass.const_expr(self.cluster > 1):
                target = self.barriers.of(smem, "scores", slot.index).toint()
                for first, size in ((layout.p, _P_ROWS), (layout.d, _D_ROWS)):
                    send(place + first + warp * size, size, target, cute.arch.block_idx_in_cluster() ^ 1)

    @cute.jit
    def expect(self, smem: cute.Pointer, slot: Place):
        """What the other CTA sends."""
        self.barriers.wait(smem, "ready", slot.index, slot.phase)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.barriers.of(smem, "scores", slot.index), _P_ROWS + _D_ROWS)

    def matrices(self, smem: cute.Pointer, slot: int | Int32) -> Int32:
        ring = self.layout.matrices
        return smem.toint() + (ring.start + slot * ring.size)


def send(place: Int32, size: int, target: Int32, rank: Int32) -> None:
    """Copy bytes of shared memory to the same place of CTA ``rank`` of the cluster; they count at its barrier ``target``. By one thread."""
    text = (
        "{ .reg .b32 to, at; mapa.shared::cluster.u32 to, $i0, $i2; mapa.shared::cluster.u32 at, $i1, $i2; "
        f"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [$i0], {size}, [at]; }}"
    )
    assembly(text, inputs=[place, target, rank], memory=True)

# ruff: noqa: ANN201  the DSL reads return annotations
"""The loader warp of the prefill: operand tiles of one chunk after the other, from memory into the rings. Imported by ``prefill``.

Fused: K, Q and a slab of V by TMA. Prepared: K~, Q~, K- and, into the other ring, T, P and the decays by bulk copies of their images in the
workspace, V by TMA.

A chunk of fewer than 64 tokens is followed in memory by other sequences' tokens, NaN for all one knows. Its loads report to a barrier of
their own; the warp clears the rows of K and V that are not the sequence's, and then fills the stage itself. Rows of Q
that are not the sequence's give rows of O that nobody stores.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from ..layout import LINE, PANEL_BYTES, PrefillLayout, record_bytes
from ..problem import CHUNK, SLAB, Problem
from .arguments import ELEMENTS, Args
from .barriers import Barriers
from .tiles import assembly, fence_shared
from .work import Work

__all__ = ["Loader", "tile_layout"]

_PIECE = 16  # bytes


def tile_layout(io: str, columns: int) -> cute.ComposedLayout:
    """Shared memory of a tile of 64 tokens: see ``layout``."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, ELEMENTS[io])
    return cute.tile_to_shape(atom, (CHUNK, columns), (0, 1))


class Loader:
    """Loads for a CTA of ``problem``."""

    def __init__(self, problem: Problem, layout: PrefillLayout) -> None:
        self.problem, self.layout = problem, layout
        self.barriers = Barriers(layout)
        self.full = self.barriers.first["full"] - self.barriers.first["tail"]
        self.tile = problem.key * LINE
        p = problem
        # (port, heads, columns, offset in a stage)
        self.tensors = [("k", p.heads_k, p.key, 0), ("q", p.heads_q, p.key, layout.q)]
        if layout.prepared:
            self.tensors = []
        self.tensors.append(("v", p.heads_v, SLAB, layout.v))

    def atoms(self, args: Args) -> tuple[Any, ...]:
        """TMA atoms and tensors. For host code."""
        op = cpasync.CopyBulkTensorTileG2SOp()
        made = []
        for port, _, columns, _ in self.tensors:
            tensor = cute.make_tensor(getattr(args, port).iterator, cute.select(getattr(args, port).layout, [0, 2, 1]))
            made.append(
                cpasync.make_tiled_tma_atom(op, tensor, tile_layout(self.problem.io, columns), (CHUNK, columns))
            )
        return tuple(tuple(pair) for pair in made)

    @cute.jit
    def run(self, smem: cute.Pointer, atoms: tuple, args: Args, work: Work, slab: Int32, records: Int64):
        """All loads of the CTA. ``slab``: of V. ``records``: address of the workspace's records. By one warp."""
        lane = cute.arch.lane_idx()
        stage, phase = Int32(0), Int32(0)
        record = records + Int64(work.slot * self.problem.heads + work.head) * record_bytes(self.problem)
        for chunk in cutlass.range(work.chunks, unroll=1):
            self.barriers.wait(smem, "empty", stage, phase ^ 1)
            partial = Boolean(chunk == work.chunks - 1) & Boolean(work.valid < CHUNK)
            full = self.barriers.of(smem, "full", stage)
            target = self.barriers.of(smem, "tail", cutlass.select_(partial, Int32(0), self.full + stage))
            place = smem + (self.layout.ring + stage * self.layout.stage_bytes)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(target, self.layout.stage_bytes)
            for (atom, tensor), (_, heads, columns, offset) in zip(atoms, self.tensors, strict=True):
                self.load_tile(
                    atom, tensor, place + offset, columns, work.first + chunk * CHUNK,
                    slab if cutlass.const_expr(offset == self.layout.v) else Int32(0), work.head * heads // self.problem.heads, target,
                )  # fmt: skip
            if cutlass.const_expr(self.layout.prepared):
                self.load_record(smem, record, place, target, chunk, lane)
                record = record + Int64(self.problem.heads * record_bytes(self.problem))
            if partial:
                self.barriers.wait(smem, "tail", 0, 0)
                if cutlass.const_expr(not self.layout.prepared):
                    self.clear(place.toint(), self.problem.key * LINE // PANEL_BYTES, work.valid, lane)
                self.clear((place + self.layout.v).toint(), 1, work.valid, lane)
                fence_shared()
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(full)
            stage = stage + 1
            if stage == self.layout.stages:
                stage, phase = Int32(0), phase ^ 1

    def load_tile(
        self, atom: Any, tensor: Any, place: cute.Pointer, columns: int, token: Int32, column: Int32, head: Int32,
        target: cute.Pointer,
    ) -> None:  # fmt: skip
        """One TMA load of 64 tokens from ``token`` on and ``columns`` channels, block ``column`` of them."""
        layout = tile_layout(self.problem.io, columns)
        shared = cute.make_tensor(
            cute.recast_ptr(place, layout.inner, ELEMENTS[self.problem.io]), cute.group_modes(layout.outer, 0, 2)
        )
        tiles = cute.local_tile(cute.domain_offset((token, 0, 0), tensor), (CHUNK, columns), (0, None, None))
        to, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), shared, cute.group_modes(tiles, 0, 2)
        )  # fmt: skip
        cute.copy(atom, source[(None, column, head)], to, tma_bar_ptr=target)

    @cute.jit
    def load_record(
        self, smem: cute.Pointer, record: Int64, place: cute.Pointer, target: cute.Pointer,
        chunk: Int32, lane: Int32,
    ):  # fmt: skip
        """The operand tiles of a chunk into its stage, T, P and the decays into a slot of their own."""
        slot = chunk % self.layout.slots
        self.barriers.wait(smem, "free", slot, (chunk // self.layout.slots & 1) ^ 1)
        ready = self.barriers.of(smem, "ready", slot)
        rest = 2 * PANEL_BYTES + 4 * self.problem.key
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, rest)
            bulk_load(place.toint(), record, 3 * self.tile, target)
            bulk_load(
                (smem + (self.layout.slot_ring + slot * self.layout.slot_bytes)).toint(), record + 3 * self.tile, rest, ready
            )  # fmt: skip

    @cute.jit
    def clear(self, place: Int32, panels: int, valid: Int32, lane: Int32):
        """Zeros in the lines from ``valid`` on of the panels at ``place``. By a warp: a swizzled line is as long as any."""
        for line in cutlass.range(valid * (LINE // _PIECE) + lane, CHUNK * (LINE // _PIECE), 32, unroll=1):
            for panel in cutlass.range_constexpr(panels):
                store_zeros(place + panel * PANEL_BYTES + line * _PIECE)


def bulk_load(place: Int32, address: Int64, size: int, target: cute.Pointer) -> None:
    """Copy ``size`` bytes of global memory to shared memory; they count at the barrier ``target``."""
    assembly(
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$i0], [$i1], {size}, [$i2];",
        inputs=[place, address, target.toint()],
        memory=True,
    )


def store_zeros(place: Int32) -> None:
    """16 bytes."""
    assembly("st.shared.v4.b32 [$i0], {$i1, $i1, $i1, $i1};", inputs=[place, Int32(0)], memory=True)

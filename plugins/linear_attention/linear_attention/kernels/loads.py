# ruff: noqa: ANN201  the DSL reads return annotations
"""The loader warps of the prefill: operand tiles of one chunk after the other, from memory into the rings. Imported by ``prefill``;
``tile_layout`` also by ``output`` and ``prepare_chunks_gdn``, ``bulk_load`` by ``combine``.

One warp loads K and Q by TMA (gdn) or K~, Q~, K- (kda) and, into their own ring, T, the vectors and KDA's P. What is of a record comes by bulk
copies of its images in the workspace. Another warp loads slabs of V by TMA.

A chunk of fewer than 64 tokens is followed in memory by other sequences' tokens, NaN for all one knows. Its loads report to a barrier of
their own; the warp clears the rows of K and V that are not the sequence's, and then reports the stage full itself. Rows of Q
that are not the sequence's give rows of P and O that nobody stores.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from ..layout import LINE, PANEL_BYTES, PrefillLayout
from ..problem import CHUNK, SLAB, Problem
from ..records import record_layout
from .arguments import ELEMENTS, Args
from .barriers import Barriers, Place, advanced
from .tiles import assembly, fence_shared
from .work import Work

__all__ = ["Loader", "bulk_load", "tile_layout"]

_PIECE = 16  # bytes


def tile_layout(io: str, columns: int) -> cute.ComposedLayout:
    """Shared memory of a tile of 64 tokens: see ``layout``."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, ELEMENTS[io])
    return cute.tile_to_shape(atom, (CHUNK, columns), (0, 1))


class Loader:
    """Loads for a CTA of ``problem``, one work item after the other. ``summary``: without Q; of a record, without P, too."""

    def __init__(self, problem: Problem, layout: PrefillLayout, cluster: int, *, summary: bool) -> None:
        self.problem, self.layout, self.cluster, self.summary = problem, layout, cluster, summary
        self.record = record = record_layout(problem)
        # (first byte, bytes) of what goes to a stage of operands, and from T on to a place of matrices
        self.tiles = ((0, record.q_in), (record.k_out, record.t - record.k_out)) if summary else ((0, record.t),)
        rest = record.decay - record.t, record.used - record.decay
        without = ((0, record.p - record.t), rest)
        self.squares = without if summary and layout.prepared else ((0, sum(rest)),)
        self.barriers = Barriers(layout, cluster)

    def atoms(self, args: Args) -> tuple[Any, ...]:
        """TMA atoms and tensors: of V; not prepared, also of K and Q. For host code."""
        made = [self._atom(args.v, SLAB, 1)]
        if not self.layout.prepared:
            made += [self._atom(x, self.problem.key, self.cluster) for x in (args.k, args.q)]
        return tuple(made)

    def _atom(self, tensor: cute.Tensor, columns: int, sharers: int) -> tuple[Any, Any]:
        turned = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [0, 2, 1]))  # tokens, channels, heads
        kind = cpasync.CopyBulkTensorTileG2SMulticastOp if sharers > 1 else cpasync.CopyBulkTensorTileG2SOp
        layout = tile_layout(self.problem.io, columns)
        atom, coordinates = cpasync.make_tiled_tma_atom(kind(), turned, layout, (CHUNK, columns), sharers)
        return atom, coordinates

    @cute.jit
    def load_tokens(
        self, smem: cute.Pointer, atoms: tuple, args: Args, work: Work, stage: Place, slot: Place, tail: Int32
    ):  # fmt: skip
        """K and Q of a work item's chunks, from ``stage`` on, and their records. ``tail``: parity of the next partial chunk. By one warp."""
        lane, p, ring = cute.arch.lane_idx(), self.problem, self.layout.operands
        k_head, q_head = work.head * p.heads_k // p.heads, work.head * p.heads_q // p.heads
        record = self.first_record(args, work)
        for chunk in cutlass.range(work.chunks, unroll=1):
            partial = (chunk == work.chunks - 1) & (work.valid < CHUNK)
            place = smem + (ring.start + stage.index * ring.size)
            self.barriers.wait(smem, "empty", stage.index, stage.phase ^ 1)
            target = self.target(smem, "full", stage.index, 0, partial)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(target, ring.size // (1 + self.summary))
            token = work.first + chunk * CHUNK
            self.load_tile(atoms[1], place, p.key, token, Int32(0), k_head, target, self.cluster)
            if cutlass.const_expr(not self.summary):
                self.load_tile(atoms[2], place + self.layout.q, p.key, token, Int32(0), q_head, target, self.cluster)
            self.barriers.wait(smem, "free", slot.index, slot.phase ^ 1)
            if lane == 0:
                self.load_matrices(smem, record, slot)
            if partial:
                self.finish(smem, "full", stage.index, 0, tail, place.toint(), p.key * 2 // LINE, work.valid, lane)
                tail = tail ^ 1
            stage, slot = advanced(stage, ring.count), advanced(slot, self.layout.matrices.count)
            record = record + Int64(p.heads * self.record.size)
        return stage, slot, tail

    @cute.jit
    def load_values(self, smem: cute.Pointer, atom: tuple, work: Work, slab: Int32, stage: Place, tail: Int32):
        """V of a work item's chunks: as ``load_tokens``. By one warp."""
        lane, p, ring = cute.arch.lane_idx(), self.problem, self.layout.values
        head = work.head * p.heads_v // p.heads
        for chunk in cutlass.range(work.chunks, unroll=1):
            partial = (chunk == work.chunks - 1) & (work.valid < CHUNK)
            place = smem + (ring.start + stage.index * ring.size)
            self.barriers.wait(smem, "values_read", stage.index, stage.phase ^ 1)
            target = self.target(smem, "values", stage.index, 1, partial)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(target, ring.size)
            self.load_tile(atom, place, SLAB, work.first + chunk * CHUNK, slab, head, target, 1)
            if partial:
                self.finish(smem, "values", stage.index, 1, tail, place.toint(), 1, work.valid, lane)
                tail = tail ^ 1
            stage = advanced(stage, ring.count)
        return stage, tail

    @cute.jit
    def load_records(self, smem: cute.Pointer, args: Args, work: Work, stage: Place, slot: Place):
        """The prepared tiles of a work item's chunks. By one thread."""
        operands, matrices = self.layout.operands, self.layout.matrices
        record = self.first_record(args, work)
        for _ in cutlass.range(work.chunks, unroll=1):
            self.barriers.wait(smem, "empty", stage.index, stage.phase ^ 1)
            full = self.barriers.of(smem, "full", stage.index)
            self.load_parts((smem + (operands.start + stage.index * operands.size)).toint(), record, self.tiles, full)
            self.barriers.wait(smem, "free", slot.index, slot.phase ^ 1)
            self.load_matrices(smem, record, slot)
            stage, slot = advanced(stage, operands.count), advanced(slot, matrices.count)
            record = record + Int64(self.problem.heads * self.record.size)
        return stage, slot

    def first_record(self, args: Args, work: Work) -> Int64:
        """Address of the record of a work item's first chunk."""
        return args.workspace.toint() + (Int64(work.slot) * self.problem.heads + work.head) * self.record.size

    def load_matrices(self, smem: cute.Pointer, record: Int64, slot: Place) -> None:
        """T, the vectors and KDA's P of a record. By one thread."""
        matrices, ready = self.layout.matrices, self.barriers.of(smem, "ready", slot.index)
        place = (smem + (matrices.start + slot.index * matrices.size)).toint()
        self.load_parts(place, record + self.record.t, self.squares, ready)

    def load_parts(
        self, place: Int32, address: Int64, parts: tuple[tuple[int, int], ...], target: cute.Pointer
    ) -> None:
        """Bulk copies of this CTA's share of parts (first byte, bytes) of a record. By one thread."""
        cute.arch.mbarrier_arrive_and_expect_tx(target, sum(size for _, size in parts))
        for first, size in parts:
            if self.cluster == 1:
                bulk_load(place + first, address + first, size, target)
                continue
            rank, share = cute.arch.block_idx_in_cluster(), -(-size // (2 * _PIECE)) * _PIECE
            mine, rest = rank * share + first, size - share  # of whole pieces: the last share may be smaller
            count = share if share == rest else Int32(share - rank * (share - rest))
            bulk_load(place + mine, address + mine, count, target, self.cluster)

    def target(self, smem: cute.Pointer, row: str, index: Int32, tail: int, partial: Any) -> cute.Pointer:
        """The barrier that a chunk's loads report to."""
        first = self.barriers.first
        return self.barriers.of(smem, "tail", cutlass.select_(partial, Int32(tail), first[row] - first["tail"] + index))

    def load_tile(
        self, atom: tuple[Any, Any], place: cute.Pointer, columns: int, token: Int32, block: Int32, head: Int32,
        target: cute.Pointer, sharers: int,
    ) -> None:  # fmt: skip
        """One TMA load: 64 tokens from ``token`` on, ``columns`` channels, the ``block``th so many of them; or this CTA's share of it."""
        copy, tensor = atom
        layout = tile_layout(self.problem.io, columns)
        shared = cute.make_tensor(
            cute.recast_ptr(place, layout.inner, ELEMENTS[self.problem.io]), cute.group_modes(layout.outer, 0, 2)
        )
        tiles = cute.local_tile(cute.domain_offset((token, 0, 0), tensor), (CHUNK, columns), (0, None, None))
        rank = 0 if sharers == 1 else cute.arch.block_idx_in_cluster()
        to, source = cpasync.tma_partition(
            copy, rank, cute.make_layout(sharers), shared, cute.group_modes(tiles, 0, 2)
        )  # fmt: skip
        mask = None if sharers == 1 else cutlass.Int16((1 << sharers) - 1)
        cute.copy(copy, source[(None, block, head)], to, tma_bar_ptr=target, mcast_mask=mask)

    @cute.jit
    def finish(
        self, smem: cute.Pointer, row: cutlass.Constexpr, index: Int32, tail: cutlass.Constexpr, parity: Int32,
        place: Int32, panels: cutlass.Constexpr, valid: Int32, lane: Int32,
    ):  # fmt: skip
        """Wait for a partial chunk's loads, clear the lines from ``valid`` on of the panels at ``place``, and report it. By a warp."""
        self.barriers.wait(smem, "tail", tail, parity)
        pieces = LINE // _PIECE
        for piece in cutlass.range(valid * pieces + lane, CHUNK * pieces, 32, unroll=1):
            for panel in cutlass.range_constexpr(panels):
                store_zeros(place + panel * PANEL_BYTES + piece * _PIECE)
        fence_shared()
        cute.arch.sync_warp()
        if lane == 0:
            self.barriers.arrive(smem, row, index)


def bulk_load(place: Int32, address: Int64, size: int | Int32, target: cute.Pointer, sharers: int = 1) -> None:
    """Copy ``size`` bytes of global memory to shared memory, of all CTAs of a cluster of ``sharers``; they count at the barrier ``target``."""
    kind = ".multicast::cluster" if sharers > 1 else ""
    mask = f", {(1 << sharers) - 1}" if sharers > 1 else ""
    fixed = isinstance(size, int)
    count = size if fixed else "$i3"
    assembly(
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{kind} [$i0], [$i1], {count}, [$i2]{mask};",
        inputs=[place, address, target.toint(), *([] if fixed else [size])],
        memory=True,
    )


def store_zeros(place: Int32) -> None:
    """16 bytes."""
    assembly("st.shared.v4.b32 [$i0], {$i1, $i1, $i1, $i1};", inputs=[place, Int32(0)], memory=True)

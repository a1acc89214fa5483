# ruff: noqa: ANN201  the DSL reads return annotations
"""The output warp of the prefill: slabs of O from shared memory to memory. Imported by ``prefill``.

Whole chunks leave by TMA. The rows of a partial one that are the sequence's are stored one by one: what follows them belongs to others.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from ..layout import LINE, PrefillLayout
from ..problem import CHUNK, SLAB, Problem
from .arguments import ELEMENTS, Args
from .barriers import Barriers, Place, advanced
from .loads import tile_layout
from .tiles import assembly
from .work import Work

__all__ = ["Output"]

_PIECE = 16  # bytes
_PIECES = LINE // _PIECE


class Output:
    """Stores of a CTA of ``problem``."""

    def __init__(self, problem: Problem, layout: PrefillLayout, cluster: int) -> None:
        self.problem, self.layout = problem, layout
        self.barriers = Barriers(layout, cluster)

    def atom(self, args: Args) -> tuple[Any, Any]:
        """TMA atom and tensor. For host code."""
        tensor = cute.make_tensor(args.o.iterator, cute.select(args.o.layout, [0, 2, 1]))
        op = cpasync.CopyBulkTensorTileS2GOp()
        atom, coordinates = cpasync.make_tiled_tma_atom(op, tensor, tile_layout(self.problem.io, SLAB), (CHUNK, SLAB))
        return atom, coordinates

    @cute.jit
    def run(self, smem: cute.Pointer, store: tuple, args: Args, work: Work, slab: Place):
        """All slabs of a work item, from the place ``slab`` on. By one warp."""
        lane, ring = cute.arch.lane_idx(), self.layout.staging
        for chunk in cutlass.range(work.chunks, unroll=1):
            place = smem + (ring.start + slab.index * ring.size)
            self.barriers.wait(smem, "staged", slab.index, slab.phase)
            if (chunk == work.chunks - 1) & (work.valid < CHUNK):
                self.store_rows(place.toint(), args, work, chunk, lane)
                cute.arch.sync_warp()
            else:
                self.store_slab(place, store, work, chunk)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            if lane == 0:
                self.barriers.arrive(smem, "stored", slab.index)
            slab = advanced(slab, ring.count)
        return slab

    def store_slab(self, place: cute.Pointer, store: tuple[Any, Any], work: Work, chunk: Int32) -> None:
        """One TMA store of 64 tokens."""
        atom, tensor = store
        layout = tile_layout(self.problem.io, SLAB)
        shared = cute.make_tensor(
            cute.recast_ptr(place, layout.inner, ELEMENTS[self.problem.io]), cute.group_modes(layout.outer, 0, 2)
        )
        there = cute.domain_offset((work.first + chunk * CHUNK, 0, 0), tensor)
        tiles = cute.local_tile(there, (CHUNK, SLAB), (0, None, None))
        source, target = cpasync.tma_partition(atom, 0, cute.make_layout(1), shared, cute.group_modes(tiles, 0, 2))
        cute.copy(atom, source, target[(None, work.slab, work.head)])

    @cute.jit
    def store_rows(self, place: Int32, args: Args, work: Work, chunk: Int32, lane: Int32):
        """The first ``work.valid`` rows."""
        base = args.o.iterator.toint() + 2 * (Int64(work.head) * args.o.stride[1] + work.slab * SLAB)
        for index in cutlass.range(lane, work.valid * _PIECES, 32, unroll=1):
            line, piece = index // _PIECES, index % _PIECES
            token = Int64(work.first + chunk * CHUNK + line)
            copy_piece(
                base + 2 * token * args.o.stride[0] + piece * _PIECE, place + line * LINE + ((piece ^ line % 8) << 4)
            )


def copy_piece(address: Int64, place: Int32) -> None:
    """16 bytes from shared to global memory."""
    text = "{ .reg .b32 w<4>; ld.shared.v4.b32 {w0, w1, w2, w3}, [$i1]; st.global.v4.b32 [$i0], {w0, w1, w2, w3}; }"
    assembly(text, inputs=[address, place], memory=True)

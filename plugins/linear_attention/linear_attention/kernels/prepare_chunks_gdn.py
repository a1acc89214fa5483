# ruff: noqa: ANN201  the DSL reads return annotations
"""The prepare kernel of GDN: T and the vectors of all chunks to their ``records``. A CTA of a warpgroup makes one: a chunk of one head.

    mbarrier; what came before is over   launch_dependents, griddepcontrol.wait
    its chunk, from cu_seqlens           K by TMA, gates in flight
    ``PrepareGdn``                       K K^T; then T and the vectors to the place of K
    barrier                              the record to memory, one bulk copy

A stage of ``PrepareGdn`` waits more than it computes: six CTAs share an SM, with 80 registers a thread and 27 KB of shared memory each. The last
chunks come first: the scan begins with the first ones, which are then in the L2 cache. Slots that no chunk has are left alone.

Imported by the prefill's host function.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..layout import ALIGNMENT, LINE
from ..problem import CHUNK, Problem
from ..records import record_layout
from .arguments import ELEMENTS, Args
from .chunks import find_chunk, send
from .loads import tile_layout
from .prepare_gdn import PrepareGdn
from .tiles import fence_shared

__all__ = ["PrepareGdnChunks"]

THREADS = 128
RESIDENT = 6  # CTAs of an SM
NAMED_BARRIER = 1  # 0 is the CTA's
_BARRIER_BYTES = 16


class PrepareGdnChunks:
    """For a problem of variant "gdn". ``launch`` is for host functions, at trace time."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.stage = problem, PrepareGdn(problem)
        self.layout = layout = record_layout(problem)
        self.tile = problem.key * LINE
        # K, then the record in its place; scratch; the mbarrier of the load
        self.scratch_at = max(self.tile, layout.used)
        self.barrier_at = self.scratch_at + self.stage.scratch_bytes
        self.shared_bytes = self.barrier_at + _BARRIER_BYTES  # 26,896 for 128 channels, 19,728 for 64

    def launch(self, args: Args, stream: cuda.CUstream) -> None:
        """Write the records of ``args`` to its workspace."""
        slots = args.tokens // CHUNK + args.sequences
        inside = args._replace(q=None, k=None, v=None, o=None, initial_state=None, final_state=None, state_indices=None)
        self.kernel(self.atom(args.k), inside).launch(
            grid=[cutlass.max(slots * self.problem.heads, 1), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=RESIDENT,
            preferred_smem_carveout=100,  # else the compiler asks the driver for it
            use_pdl=True,  # every access to memory comes after griddepcontrol.wait
            stream=stream,
        )

    def atom(self, tensor: cute.Tensor) -> tuple[Any, Any]:
        """TMA atom and tensor of K. For host code."""
        turned = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [0, 2, 1]))  # tokens, channels, heads
        shape = (CHUNK, self.problem.key)
        atom, coordinates = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), turned, tile_layout(self.problem.io, self.problem.key), shape
        )
        return atom, coordinates

    @cute.kernel
    def kernel(self, k: tuple, args: Args):
        """The kernel: see the module's text."""
        heads = self.problem.heads
        index, _, _ = cute.arch.block_idx()
        slot = index // heads
        head = index - slot * heads
        slot = cute.arch.grid_dim()[0] // heads - 1 - slot
        smem = SmemAllocator().allocate(self.shared_bytes, ALIGNMENT)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            cpasync.prefetch_descriptor(k[0])
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(self.loaded(smem), 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if args.sequences > 0:
            chunk = find_chunk(args, slot)
            if chunk.valid > 0:
                self.prepare(smem, k, args, chunk.first, chunk.valid, slot, head)

    @cute.jit
    def prepare(self, smem: cute.Pointer, k: tuple, args: Args, first: Int32, valid: Int32, slot: Int32, head: Int32):
        """The record of the chunk whose first token is ``first``."""
        p, layout, thread, base = self.problem, self.layout, cute.arch.thread_idx()[0], smem.toint()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(self.loaded(smem), self.tile)
            self.load(k, smem, first, head * p.heads_k // p.heads, self.loaded(smem))
        gates = self.stage.gates(args, head, first, valid, thread)
        parameters = self.stage.parameters(args, head)
        cute.arch.mbarrier_wait(self.loaded(smem), 0)
        self.stage.run(
            base, base + layout.t, base + layout.decay, base + self.scratch_at, *gates, *parameters,
            valid, thread, NAMED_BARRIER,
        )  # fmt: skip
        fence_shared()
        cute.arch.sync_threads()
        if thread == 0:
            record = args.workspace.toint() + (Int64(slot) * p.heads + head) * layout.size
            send(base, record, (0, layout.used))
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def loaded(self, smem: cute.Pointer) -> cute.Pointer:
        return cute.recast_ptr(smem + self.barrier_at, dtype=Int64)

    def load(self, atom: tuple[Any, Any], place: cute.Pointer, token: Int32, head: Int32, target: cute.Pointer) -> None:
        """64 tokens from ``token`` on; those past the last one are zeros. By a warp."""
        copy, tensor = atom
        layout = tile_layout(self.problem.io, self.problem.key)
        shared = cute.make_tensor(
            cute.recast_ptr(place, layout.inner, ELEMENTS[self.problem.io]), cute.group_modes(layout.outer, 0, 2)
        )
        moved = cute.domain_offset((token, 0, 0), tensor)
        tiles = cute.local_tile(moved, (CHUNK, self.problem.key), (0, 0, None))
        to, source = cpasync.tma_partition(copy, 0, cute.make_layout(1), shared, cute.group_modes(tiles, 0, 2))
        cute.copy(copy, source[(None, head)], to, tma_bar_ptr=target)

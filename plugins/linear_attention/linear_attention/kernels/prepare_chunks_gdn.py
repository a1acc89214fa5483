# ruff: noqa: ANN201  the DSL reads return annotations
"""The prepare kernel of GDN: T and the vectors of all chunks to their ``records``. A CTA of a warpgroup makes those of a chunk for some heads
that share K: up to four, of one group.

    mbarrier; what came before is over   launch_dependents, griddepcontrol.wait
    warp 3: its chunk                    K by TMA; the first head's gates; a later CTA's K to the L2 cache
    mbarrier                             K and the gates are there
    ``PrepareGdn``, head by head         K K^T, once; the inverse; vectors to memory; T to shared memory; warp 3: the next head's gates
    barrier                              T to memory

Seven CTAs share an SM, with 72 registers a thread and 28 KB of shared memory each, 30 KB where there are several heads. The last chunks come
first: the scan begins with the first ones, which are then in the L2 cache. Slots that no chunk has are left alone.

Imported by the prefill's host function.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..layout import ALIGNMENT, LINE
from ..problem import CHUNK, Problem
from ..records import record_layout
from .arguments import ELEMENTS, Args
from .chunks import begin, end, find_chunk, most_chunks
from .loads import tile_layout
from .prepare_gdn import PrepareGdn

__all__ = ["PrepareGdnChunks"]

THREADS = 128
MOST_HEADS = 4  # of a CTA
RESIDENT = 7  # CTAs of an SM
NAMED_BARRIER = 1  # 0 is the CTA's
FIRST = 3  # the warp that the others wait for: it has the fewest columns
_BARRIER_BYTES = 16


class PrepareGdnChunks:
    """For a problem of variant "gdn". ``launch`` is for host functions, at trace time."""

    def __init__(self, problem: Problem) -> None:
        self.group = problem.heads // problem.heads_k  # heads that share K
        self.each = max(count for count in range(1, MOST_HEADS + 1) if self.group % count == 0)  # of a CTA
        self.problem, self.stage = problem, PrepareGdn(problem, self.each)
        self.layout, self.tile = record_layout(problem), problem.key * LINE
        # K, and what takes its place; scratch; the mbarrier of the load and the gates
        self.scratch_at = self.stage.place_bytes
        self.barrier_at = self.scratch_at + self.stage.scratch_bytes
        self.shared_bytes = self.barrier_at + _BARRIER_BYTES

    def launch(self, args: Args, part: Int32, stream: cuda.CUstream) -> None:
        """Write the records of a part of the chunks of ``args`` to its workspace."""
        chunks = most_chunks(args, part)
        inside = args._replace(q=None, k=None, v=None, o=None, initial_state=None, final_state=None, state_indices=None)
        self.kernel(self.atom(args.k), inside, part).launch(
            grid=[cutlass.max(chunks * (self.problem.heads // self.each), 1), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=RESIDENT,
            preferred_smem_carveout=100,  # else the compiler asks the driver for it
            use_pdl=True,  # see ``chunks``
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
    def kernel(self, k: tuple, args: Args, part: Int32):
        """The kernel: see the module's text."""
        heads = self.problem.heads // self.each
        index, _, _ = cute.arch.block_idx()
        number = index // heads
        head = (index - number * heads) * self.each
        number = cute.arch.grid_dim()[0] // heads - 1 - number
        smem = SmemAllocator().allocate(self.shared_bytes, ALIGNMENT)
        thread, _, _ = cute.arch.thread_idx()
        first = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == FIRST
        if first:
            cpasync.prefetch_descriptor(k[0])
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(self.loaded(smem), 32)  # lanes of the first warp
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        begin(part)
        if args.sequences > 0:
            scratch = smem.toint() + self.scratch_at
            if first:
                self.start(smem, k, args, part, number, head, thread & 31)
            cute.arch.mbarrier_wait(self.loaded(smem), 0)
            token, valid, slot = self.stage.tokens.announced(scratch)
            if valid > 0:
                record = args.workspace.toint() + (Int64(slot) * self.problem.heads + head) * self.layout.size
                if cutlass.const_expr(self.each > 1):
                    self.make_several(smem.toint(), record, scratch, args, head, token, valid, first, thread)
                else:
                    self.stage.run(smem.toint(), record, scratch, valid, thread, NAMED_BARRIER)
                    self.send(smem.toint(), record, thread)
        end(part)

    @cute.jit
    def make_several(
        self,
        place: Int32,
        record: Int64,
        scratch: Int32,
        args: Args,
        head: Int32,
        token: Int32,
        valid: Int32,
        first: Boolean,
        thread: Int32,
    ):
        """The records of ``each`` heads from ``head`` on, K and the gates of the first one being there."""
        self.stage.keep(place, valid, thread, NAMED_BARRIER)
        for i in cutlass.range(self.each, unroll=1):
            target = record + Int64(i) * self.layout.size
            self.stage.run_kept(place, target, scratch, i, valid, thread, NAMED_BARRIER)
            if first & (i + 1 < self.each):
                self.stage.tokens.put(args, head + i + 1, token, valid, scratch, thread & 31, i + 1)
            self.send(place, target, thread)

    def send(self, place: Int32, record: Int64, thread: Int32) -> None:
        cute.arch.barrier(barrier_id=NAMED_BARRIER, number_of_threads=THREADS)
        self.stage.send(place, record, thread)

    @cute.jit
    def start(self, smem: cute.Pointer, k: tuple, args: Args, part: Int32, number: Int32, head: Int32, lane: Int32):
        """Find the chunk, load K, put the gates of the first head. By a warp."""
        p, scratch, chunk = self.problem, smem.toint() + self.scratch_at, find_chunk(args, part, number)
        if chunk.valid > 0:
            if lane == 0:
                cute.arch.mbarrier_expect_tx(self.loaded(smem), self.tile)
            self.load(k, smem, chunk.first, head * p.heads_k // p.heads, self.loaded(smem))
            cute.arch.fence_acq_rel_cta()  # or ptxas puts the load behind the gates
            self.stage.tokens.put(args, head, chunk.first, chunk.valid, scratch, lane)
        self.stage.tokens.announce(scratch, chunk)
        cute.arch.mbarrier_arrive(self.loaded(smem))
        self.prefetch_next(k, args, chunk.first, number, head)

    @cute.jit
    def prefetch_next(self, k: tuple, args: Args, first: Int32, number: Int32, head: Int32):
        """Bring K of a later CTA to the L2 cache: about the one that takes this one's place on the SM, if all tokens are of one sequence.
        By a warp."""
        p = self.problem
        ahead = (args.sms * (RESIDENT * self.each) + p.heads - 1) // p.heads
        if (ahead <= number) & (head % self.group == 0):
            copy, _ = k
            tiles = self.tiles(k, cutlass.max(first - ahead * CHUNK, 0))
            shared = self.shared(cute.make_ptr(ELEMENTS[p.io], 0, cute.AddressSpace.smem, assumed_align=ALIGNMENT))
            _, source = cpasync.tma_partition(copy, 0, cute.make_layout(1), shared, cute.group_modes(tiles, 0, 2))
            cute.prefetch(copy, source[(None, head // self.group)])

    def loaded(self, smem: cute.Pointer) -> cute.Pointer:
        return cute.recast_ptr(smem + self.barrier_at, dtype=Int64)

    def load(self, atom: tuple[Any, Any], place: cute.Pointer, token: Int32, head: Int32, target: cute.Pointer) -> None:
        """64 tokens from ``token`` on; those past the last one are zeros. By a warp."""
        copy, _ = atom
        tiles = self.tiles(atom, token)
        to, source = cpasync.tma_partition(
            copy, 0, cute.make_layout(1), self.shared(place), cute.group_modes(tiles, 0, 2)
        )
        cute.copy(copy, source[(None, head)], to, tma_bar_ptr=target)

    def tiles(self, atom: tuple[Any, Any], token: Int32) -> cute.Tensor:
        moved = cute.domain_offset((token, 0, 0), atom[1])
        return cute.local_tile(moved, (CHUNK, self.problem.key), (0, 0, None))

    def shared(self, place: cute.Pointer) -> cute.Tensor:
        layout = tile_layout(self.problem.io, self.problem.key)
        pointer = cute.recast_ptr(place, layout.inner, ELEMENTS[self.problem.io])
        return cute.make_tensor(pointer, cute.group_modes(layout.outer, 0, 2))

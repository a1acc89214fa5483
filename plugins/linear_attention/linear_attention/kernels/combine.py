"""Between the passes over segments: the state that leaves each segment, from what the segments make of a seed of 0 and of the identity.

    for s in 1 .. S - 2:  X_s = X_{s-1} M_s + N_s

in place in ``Args.summaries``: rows 0..V-1 of slot s hold N_s [V, K] and then X_s, rows V.. hold M_s [K, K]; X_0 is there. A row
of X depends on the same row of the others alone: a CTA has 16 rows of one head, a thread 4 of them in 4 columns. M_s comes by bulk copies, one
segment ahead; rows of X are read from shared memory. All of it is float32: what one segment rounds, all later ones see.

Launch: waits for the launches before it (griddepcontrol.wait) when it first touches memory. Imported by ``host``.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.utils import SmemAllocator

from ..problem import Problem
from .arguments import Args
from .loads import bulk_load

__all__ = ["Combine"]

ROWS = 16  # of a CTA
QUAD = 4  # rows and columns of a thread
_FLOAT = 4  # bytes


class Combine:
    """For the summaries of ``problem``."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.key = problem, problem.key
        self.blocks = problem.value // ROWS
        self.quads = self.key // QUAD
        self.threads = self.quads * (ROWS // QUAD)
        self.slot_bytes = (problem.value + problem.key) * problem.key * _FLOAT

    def launch(self, args: Args, stream: cuda.CUstream) -> None:
        """For host code; ``args.segments`` is at least 3: of two, the summary leaves what the scan reads."""
        self.kernel(args.summaries, args.segments).launch(
            grid=[args.sequences * (self.problem.heads * self.blocks), 1, 1],
            block=[self.threads, 1, 1],
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, summaries: cute.Pointer, segments: Int32):  # noqa: ANN201  the DSL reads return annotations
        """The kernel: see the module's text."""
        key, thread = self.key, cute.arch.thread_idx()[0]
        number = cute.arch.block_idx()[0]
        head = number // self.blocks
        row = number % self.blocks * ROWS + thread // self.quads * QUAD
        column = thread % self.quads * QUAD
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2)
        maps = smem.allocate_tensor(Float32, cute.make_layout((2, key, key), stride=(key * key, key, 1)), 128)
        rows = smem.allocate_tensor(Float32, cute.make_layout((2, ROWS, key), stride=(ROWS * key, key, 1)), 128)
        if thread == 0:
            for slot in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(barriers + slot, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        first = summaries.toint() + Int64(head * segments) * self.slot_bytes
        mine = first + (row * key + column) * _FLOAT  # this thread's part of a slot
        sums = cute.make_rmem_tensor(cute.make_layout((QUAD, QUAD), stride=(QUAD, 1)), Float32)
        self.load(mine, sums)
        self.keep(rows, 0, row % ROWS, column, sums)
        if thread == 0 and segments > 2:
            self.fetch(maps, barriers, first, Int32(1))
        cute.arch.sync_threads()
        for s in cutlass.range(1, segments - 1, unroll=1):
            slot, phase = (s - 1) % 2, (s - 1) // 2 % 2
            if thread == 0 and s + 1 < segments - 1:
                self.fetch(maps, barriers, first, s + 1)
            here = mine + Int64(s) * self.slot_bytes
            self.load(here, sums)
            cute.arch.mbarrier_wait(barriers + slot, phase)
            self.multiply(rows, maps, slot, row % ROWS, column, sums)
            self.store(here, sums)
            self.keep(rows, s % 2, row % ROWS, column, sums)
            cute.arch.sync_threads()

    def fetch(self, maps: cute.Tensor, barriers: cute.Pointer, first: Int64, s: Int32) -> None:
        """M_s into its slot. By one thread."""
        slot = (s - 1) % 2
        source = first + Int64(s) * self.slot_bytes + self.problem.value * self.key * _FLOAT
        size = self.key * self.key * _FLOAT
        cute.arch.mbarrier_arrive_and_expect_tx(barriers + slot, size)
        bulk_load(maps[(slot, None, None)].iterator.toint(), source, size, barriers + slot)

    @cute.jit
    def multiply(self, rows: cute.Tensor, maps: cute.Tensor, slot: Int32, row: Int32, column: Int32, sums: cute.Tensor):  # noqa: ANN201
        """``sums`` += this thread's rows times its columns of M."""
        x, m = (
            cute.make_rmem_tensor(cute.make_layout((QUAD, QUAD), stride=(QUAD, 1)), Float32),
            cute.make_rmem_tensor((QUAD,), Float32),
        )
        for k in cutlass.range(0, self.key, QUAD, unroll=2):
            for r in cutlass.range_constexpr(QUAD):
                source = rows.iterator + ((slot * ROWS + row + r) * self.key + k)
                cute.autovec_copy(_quad(source), _part(x, r))
            for c in cutlass.range_constexpr(QUAD):
                cute.autovec_copy(_quad(maps.iterator + ((slot * self.key + k + c) * self.key + column)), m)
                for r in cutlass.range_constexpr(QUAD):
                    for j in cutlass.range_constexpr(QUAD):
                        sums[r, j] = sums[r, j] + x[r, c] * m[j]

    def keep(self, rows: cute.Tensor, slot: Int32, row: Int32, column: Int32, sums: cute.Tensor) -> None:
        """This thread's part of X into shared memory."""
        for r in range(QUAD):
            cute.autovec_copy(_part(sums, r), _quad(rows.iterator + ((slot * ROWS + row + r) * self.key + column)))

    def load(self, address: Int64, sums: cute.Tensor) -> None:
        for r in range(QUAD):
            cute.autovec_copy(_quad(self.line(address, r)), _part(sums, r))

    def store(self, address: Int64, sums: cute.Tensor) -> None:
        for r in range(QUAD):
            cute.autovec_copy(_part(sums, r), _quad(self.line(address, r)))

    def line(self, address: Int64, row: int) -> cute.Pointer:
        """Row ``row`` of a thread's, in global memory."""
        return cute.make_ptr(Float32, address + row * self.key * _FLOAT, cute.AddressSpace.gmem, assumed_align=16)


def _quad(pointer: cute.Pointer) -> cute.Tensor:
    """Four floats at a multiple of 16 bytes."""
    aligned = cute.make_ptr(Float32, pointer.toint(), pointer.memspace, assumed_align=16)
    return cute.make_tensor(aligned, cute.make_layout(QUAD))


def _part(values: cute.Tensor, row: int) -> cute.Tensor:
    return cute.make_tensor(values.iterator + row * QUAD, cute.make_layout(QUAD))

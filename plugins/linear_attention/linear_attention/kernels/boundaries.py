# ruff: noqa: ANN201  the DSL reads return annotations
"""The first kernel of a prefill with cu_seqlens: what its boundaries count as, for all kernels behind it.

    boundary n counts as the largest of boundaries 0 to n, each held to [0, T]

so that a boundary that decreases makes an empty sequence, and no token belongs to two. The result is int32, in the workspace.

One CTA, a boundary a thread, as many rounds as they need: prefix maxima of a warp, then the largest of the warps before it and of the rounds
before. Latency is all of its time: one load, five shuffles, a barrier, one store.

Launch: the kernel behind it may begin at once, and waits for it (griddepcontrol.wait) before it touches memory, as all do but the second prepare
kernel (``chunks``), which begins when this one is over. So results are there, and a workspace that the call before used is free. Imported by
``host``.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from ..problem import Problem
from .arguments import Args

__all__ = ["THREADS", "Boundaries"]

WARP = 32
THREADS = WARP * WARP
"""As many warps as a warp has lanes: one of them reads what all have found."""


class Boundaries:
    """For a problem with cu_seqlens."""

    def __init__(self, problem: Problem) -> None:
        assert problem.index_dtype
        self.problem = problem

    def launch(self, args: Args, stream: cuda.CUstream) -> None:
        """From ``args.cu_seqlens`` to ``args.boundaries``. For host code."""
        self.kernel(args.cu_seqlens, args.boundaries, args.sequences + 1, args.tokens).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(self, given: cute.Tensor, found: cute.Tensor, count: Int32, tokens: Int32):
        """The kernel: see the module's text."""
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Two rounds' maxima of warps: with a barrier a round, none is overwritten before it is read.
        maxima = SmemAllocator().allocate_tensor(Int32, cute.make_layout((2, WARP), stride=(WARP, 1)))
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        before = Int32(0)
        for first in cutlass.range(0, count, THREADS, unroll=1):
            at, side = first + thread, first // THREADS % 2
            largest = Int32(0)
            if at < count:
                largest = held(given[at], tokens)
            for distance in (1, 2, 4, 8, 16):
                largest = cutlass.max(largest, cute.arch.shuffle_sync_up(largest, distance))
            if lane == WARP - 1:
                maxima[side, warp] = largest
            cute.arch.sync_threads()
            of_lane = maxima[side, lane]
            earlier = cutlass.select_(lane < warp, of_lane, Int32(0))
            largest = cutlass.max(largest, cutlass.max(before, cute.arch.warp_redux_sync(earlier, "max")))
            if at < count:
                found[at] = largest
            before = cutlass.max(before, cute.arch.warp_redux_sync(of_lane, "max"))


def held(boundary: Any, tokens: Int32) -> Int32:
    """``boundary`` held to [0, tokens], compared in its own type: an int64 may not fit the result's."""
    kind = type(boundary)
    return Int32(cutlass.max(cutlass.min(boundary, kind(tokens)), kind(0)))

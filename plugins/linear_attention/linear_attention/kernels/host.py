"""The host function of a prefill: the launches of its kernels, one after the other. Imported by ``compile``.

    cu_seqlens      boundaries      what they count as
                    prepare         records of all chunks; of one sequence in segments, of all but the last segment's
    S > 1           summary         what every segment but the last makes of a state
    S > 1, N = 1    prepare         the records that are left, beside the summary: see ``chunks``
    S > 2           combine         the state behind every segment
                    scan            O and the final states

S is the word ``segments``, N ``sequences``: one compiled function serves whole sequences and segments.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute

from ..layout import plan_layout
from ..problem import Problem
from .arguments import Args, unpack
from .boundaries import Boundaries
from .chunks import ALL, FIRST
from .combine import Combine
from .prefill import Prefill

__all__ = ["PrefillHost"]


class PrefillHost:
    """``host(words, stream)`` for ``problem``; ``words`` is the host address of the block of ``arguments``."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        layout = plan_layout(problem)
        self.scan = Prefill(problem, layout)
        self.prepare = _prepare(problem)
        self.kernel_parts: dict[str, Any] = {"scan": self.scan, "prepare": self.prepare}
        if problem.index_dtype:
            self.boundaries = Boundaries(problem)
            self.kernel_parts |= {"boundaries": self.boundaries}
        if not problem.batch_invariant:
            self.summary, self.combine = Prefill(problem, layout, summary=True), Combine(problem)
            self.kernel_parts |= {"combine": self.combine}

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):  # noqa: ANN201  the DSL reads return annotations
        """Launch."""
        args = unpack(self.problem, words)
        if cutlass.const_expr(bool(self.problem.index_dtype)):
            self.boundaries.launch(args, stream)
            args = args._replace(cu_seqlens=None)  # nobody else reads what is not masked
        if cutlass.const_expr(self.problem.batch_invariant):
            self.prepare.launch(args, Int32(ALL), stream)
        else:
            self.in_segments(args, stream)
        self.scan.launch(args, stream)

    @cute.jit
    def in_segments(self, args: Args, stream: cuda.CUstream):  # noqa: ANN201
        """All launches before the scan, with one of the prepare kernel in the code: it is compiled for each."""
        apart = (args.segments > 1) & (args.sequences == 1)
        for turn in cutlass.range(cutlass.select_(apart, Int32(2), Int32(1)), unroll=1):
            self.prepare.launch(args, cutlass.select_(apart, FIRST + turn, Int32(ALL)), stream)
            if (turn == 0) & (args.segments > 1):
                self.summary.launch(args, stream)
        if args.segments > 2:
            self.combine.launch(args, stream)


def _prepare(problem: Problem) -> Any:
    if problem.variant == "kda":
        from .prepare_kda import PrepareKda

        return PrepareKda(problem)
    from .prepare_chunks_gdn import PrepareGdnChunks

    return PrepareGdnChunks(problem)

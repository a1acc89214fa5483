"""The host function of a prefill: the launches of its kernels, one after the other. Imported by ``compile``.

    cu_seqlens    boundaries            what they count as
                  prepare               records of all chunks
    S > 1         summary, combine      the state behind every segment
                  scan                  O and the final states

S is the word ``segments``: one compiled function serves whole sequences and segments.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int64, cute

from ..layout import plan_layout
from ..problem import Problem
from .arguments import unpack
from .boundaries import Boundaries
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
        self.prepare.launch(args, stream)
        if cutlass.const_expr(not self.problem.batch_invariant):  # noqa: SIM102  the inner one is a branch of host code
            if args.segments > 1:
                self.summary.launch(args, stream)
                self.combine.launch(args, stream)
        self.scan.launch(args, stream)


def _prepare(problem: Problem) -> Any:
    if problem.variant == "kda":
        from .prepare_kda import PrepareKda

        return PrepareKda(problem)
    from .prepare_chunks_gdn import PrepareGdnChunks

    return PrepareGdnChunks(problem)

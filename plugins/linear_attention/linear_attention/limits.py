"""What no launch can exceed: of the grid any, of tokens and strides a prefill's. Imports no DSL and not the core.

Imported by the lowerings, which decline sizes that a graph states, and by ``launch`` and ``decode_plan``, which refuse what a run brings.
"""

from __future__ import annotations

from .problem import Problem
from .records import record_slots

__all__ = ["GRID_LIMIT", "MOST_TOKENS", "STRIDE_LIMIT", "ctas"]

MOST_TOKENS = 2**28 - 2**12
"""The pieces of 16 bytes of a slab's rows of O, 8 a token, are counted in int32: 2^28 tokens have 2^31. Threads of a CTA count in
steps of their number, at most 1,024, so that the step past the last piece must fit too: 2^12 tokens leave room for 2^15."""
GRID_LIMIT = 2**31 - 1
"""CTAs along x."""
STRIDE_LIMIT = 2**40
"""Bytes, exclusive. CUDA driver API, cuTensorMapEncodeTiled: globalStrides."""


def ctas(problem: Problem, tokens: int, sequences: int, segments: int = 1) -> int:
    """Of the largest grid. Segments fill the SMs once, so that they never decide whether a grid is too large."""
    return problem.heads * max(problem.slabs * sequences * segments, record_slots(tokens, sequences))

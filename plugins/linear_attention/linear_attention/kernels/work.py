"""What a CTA of the prefill has to do: one work item after the other. Imported by ``prefill`` and its warp roles.

Every role derives its trip counts from the same ``Work``, so that no arrival depends on who counts.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32

from ..problem import CHUNK, Problem
from .arguments import Args, bounds

__all__ = ["Work", "locate"]


class Work(NamedTuple):
    """sequence, head (of HO), slab, segment: what is worked at; segments: of every sequence.

    first   the first token
    chunks  of 64 tokens, none of an empty segment
    valid   tokens of the last chunk, 1 to 64
    slot    of the first chunk in the workspace: see ``records.record_slots``
    """

    sequence: Int32
    head: Int32
    slab: Int32
    segment: Int32
    segments: Int32
    first: Int32
    chunks: Int32
    valid: Int32
    slot: Int32


def locate(problem: Problem, args: Args, slabs: int, covered: Int32, number: Int32) -> Work:
    """Work item ``number``: ``slabs`` items a head, ``covered`` of the segments, then sequences, the slowest.

    A sequence's segments have the same number of chunks, but for the last ones, which may be short or empty.
    """
    rest = number // slabs
    slab = number - rest * slabs
    number = rest // problem.heads
    head = rest - number * problem.heads
    sequence = number // covered
    segment = number - sequence * covered
    start, length = bounds(args, sequence)
    total = (length + CHUNK - 1) // CHUNK
    each = (total + args.segments - 1) // args.segments
    begin = cutlass.min(segment * each, total)
    chunks = cutlass.min(each, total - begin)
    first = start + begin * CHUNK
    valid = cutlass.min(Int32(CHUNK), length - (begin + chunks - 1) * CHUNK)
    return Work(
        sequence, head, slab, segment, args.segments, first, chunks, valid, start // CHUNK + sequence + begin
    )  # fmt: skip

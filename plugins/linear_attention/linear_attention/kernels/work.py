"""What a CTA of the prefill has to do: one work item after the other. Imported by ``prefill`` and its warp roles.

Every role derives its trip counts from the same ``Work``, so that no arrival depends on who counts.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32

from ..problem import CHUNK, Problem
from .arguments import Args, bounds
from .arguments import segment as split

__all__ = ["Work", "count_items", "locate"]


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


def count_items(problem: Problem, args: Args, slabs: int, covered: Int32, fewer: int) -> Int32:
    """How many there are for ``locate``."""
    return args.sequences * problem.heads * (slabs * covered - fewer)


def locate(problem: Problem, args: Args, slabs: int, covered: Int32, fewer: int, number: Int32) -> Work:
    """Work item ``number``: ``slabs`` items a head, in segment 0 ``fewer`` less (the last ones); ``covered`` of the segments, then sequences, the
    slowest.

    A sequence's segments have the same number of chunks, but for the last ones, which may be short or empty.
    """
    each = problem.heads * (slabs * covered - fewer)
    sequence = number // each
    number = number - sequence * each
    width = Int32(slabs)
    if fewer:
        first = problem.heads * (slabs - fewer)  # items of segment 0
        others = number >= first
        width = cutlass.select_(others, Int32(slabs), Int32(slabs - fewer))
        number = cutlass.select_(others, number - first, number)
    rest = number // width
    slab = number - rest * width
    segment = rest // problem.heads
    head = rest - segment * problem.heads
    if fewer:
        segment = segment + cutlass.select_(others, Int32(1), Int32(0))
    start, length = bounds(args, sequence)
    total = (length + CHUNK - 1) // CHUNK
    begin, chunks = split(total, args.segments, segment)
    first = start + begin * CHUNK
    valid = cutlass.min(Int32(CHUNK), length - (begin + chunks - 1) * CHUNK)
    return Work(
        sequence, head, slab, segment, args.segments, first, chunks, valid, start // CHUNK + sequence + begin
    )  # fmt: skip

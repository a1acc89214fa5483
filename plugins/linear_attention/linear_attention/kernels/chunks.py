"""What the prepare kernels share: which chunk a CTA has, and when it may begin. Imported by ``prepare_kda`` and
``prepare_chunks_gdn``; the parts also by ``host``.

The chunks of all sequences are prepared by one launch, ``ALL``, or, of one sequence in segments, by two: ``FIRST``, those of all segments but
the last, which is what the summary reads; and ``LAST``, the others, beside the summary, which leaves SMs idle. ``LAST`` begins when all CTAs of
the summary have triggered it, behind their griddepcontrol.wait: so what came before the summary is over, and the summary itself
writes nothing that a prepare kernel touches, nor the other way round. One thread of ``LAST`` waits for the summary before it ends: so the launch
after waits for both.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from ..records import CHUNK
from .arguments import Args, segment

__all__ = ["ALL", "FIRST", "LAST", "Chunk", "begin", "end", "find_chunk", "most_chunks"]

ALL, FIRST, LAST = 0, 1, 2
"""Parts of the chunks."""

_WARP = 32


class Chunk(NamedTuple):
    """first: the first token; valid: tokens, at most 0 where there is no chunk; slot: of the workspace."""

    first: Int32
    valid: Int32
    slot: Int32


class Owner(NamedTuple):
    """A sequence, its first token and the one behind its last."""

    sequence: Int32
    start: Int32
    stop: Int32


def most_chunks(args: Args, part: Int32) -> Int32:
    """At least as many as ``part`` has, for sequences of any lengths. For host code."""
    slots = args.tokens // CHUNK + args.sequences
    each = (slots + args.segments - 1) // args.segments
    some = cutlass.select_(part == LAST, each, (args.segments - 1) * each)
    return Int32(cutlass.select_(part == ALL, slots, some))


@cute.jit
def begin(part: Int32) -> None:
    """Before a CTA touches memory."""
    cute.arch.griddepcontrol_launch_dependents()
    if part != LAST:
        cute.arch.griddepcontrol_wait()


@cute.jit
def end(part: Int32) -> None:
    """By a thread of every CTA, when it has nothing else to do."""
    if (part == LAST) & (cute.arch.block_idx()[0] == cute.arch.grid_dim()[0] - 1):
        cute.arch.griddepcontrol_wait()


def find_chunk(args: Args, part: Int32, number: Int32) -> Chunk:
    """The chunk ``number`` of ``most_chunks``. By a warp."""
    owner = Owner(Int32(0), Int32(0), args.tokens) if args.boundaries is None else _owner(args, number)
    length, first_slot = owner.stop - owner.start, owner.start // CHUNK + owner.sequence
    last, _ = segment((length + CHUNK - 1) // CHUNK, args.segments, args.segments - 1)  # its first chunk
    chunk = number + cutlass.select_(part == ALL, -first_slot, cutlass.select_(part == LAST, last, Int32(0)))
    valid = cutlass.min(length - chunk * CHUNK, Int32(CHUNK))
    there = (chunk >= 0) & ((part != FIRST) | (chunk < last))
    return Chunk(owner.start + chunk * CHUNK, cutlass.select_(there, valid, Int32(0)), first_slot + chunk)


@cute.jit
def _owner(args: Args, slot: Int32) -> Owner:
    """The last sequence whose first slot is at most ``slot``: a search in 32 parts, one a lane. The boundaries come with it, so that up to
    32 sequences cost one access to memory and not two, one after the other."""
    lane = cute.arch.lane_idx()
    found, count, start, stop = Int32(0), args.sequences, Int32(0), Int32(0)
    while count > 0:
        part = (count + _WARP - 1) >> 5  # count is not negative
        sequence = cutlass.min(found + lane * part, args.sequences - 1)
        first, last = (args.boundaries[sequence + i] for i in range(2))
        before = (lane * part < count) & ((first >> 6) + sequence <= slot)
        parts = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(before)) - 1, Int32(0))
        start, stop = cute.arch.shuffle_sync(first, parts), cute.arch.shuffle_sync(last, parts)
        found += parts * part
        count = cutlass.select_(part == 1, Int32(0), cutlass.min(part, count - parts * part))
    return Owner(found, start, stop)

"""Which chunk a slot of the workspace belongs to. Device code, imported by ``prepare_kda``."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from ..records import CHUNK
from .arguments import Args, bounds, held

__all__ = ["Chunk", "find_chunk"]

_WARP = 32


class Chunk(NamedTuple):
    """first: the first token; valid: tokens, at most 0 of a slot that no chunk has."""

    first: Int32
    valid: Int32


def find_chunk(args: Args, slot: Int32) -> Chunk:
    """By a warp. Where boundaries decrease, some chunks are found by no slot, or by several."""
    sequence = Int32(0) if args.cu_seqlens is None else _owner(args, slot)
    start, length = bounds(args, sequence)
    before = (slot - start // CHUNK - sequence) * CHUNK
    valid = cutlass.min(length - before, Int32(CHUNK))
    return Chunk(start + before, cutlass.select_(before < 0, Int32(0), valid))


@cute.jit
def _owner(args: Args, slot: Int32) -> Int32:
    """The last sequence whose first slot is at most ``slot``: a search in 32 parts, one a lane."""
    lane = cute.arch.lane_idx()
    found, count = Int32(0), args.sequences
    while count > 1:
        part = (count + _WARP - 1) // _WARP
        sequence = cutlass.min(found + lane * part, args.sequences - 1)
        first_slot = held(args.cu_seqlens[sequence], args.tokens) // CHUNK + sequence
        before = (lane * part < count) & (first_slot <= slot)
        parts = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(before)) - 1, Int32(0))
        found += parts * part
        count = cutlass.min(part, count - parts * part)
    return found

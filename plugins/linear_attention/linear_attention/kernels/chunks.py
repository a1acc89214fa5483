"""What the prepare kernels share: which chunk a slot of the workspace has, and how its record gets there. Device code, imported by
``prepare_kda`` and ``prepare_chunks_gdn``."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from ..records import CHUNK
from .arguments import Args
from .tiles import assembly

__all__ = ["Chunk", "find_chunk", "send"]

_WARP = 32


class Chunk(NamedTuple):
    """first: the first token; valid: tokens, at most 0 of a slot that no chunk has."""

    first: Int32
    valid: Int32


class Owner(NamedTuple):
    """A sequence, its first token and the one behind its last."""

    sequence: Int32
    start: Int32
    stop: Int32


def find_chunk(args: Args, slot: Int32) -> Chunk:
    """By a warp."""
    owner = Owner(Int32(0), Int32(0), args.tokens) if args.boundaries is None else _owner(args, slot)
    before = (slot - owner.start // CHUNK - owner.sequence) * CHUNK
    valid = cutlass.min(owner.stop - owner.start - before, Int32(CHUNK))
    return Chunk(owner.start + before, cutlass.select_(before < 0, Int32(0), valid))


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


def send(smem: Int32, record: Int64, *spans: tuple[int, int]) -> None:
    """Spans of bytes of the record go to memory. By one thread."""
    for start, stop in spans:
        assembly(
            f"cp.async.bulk.global.shared::cta.bulk_group [$i0], [$i1], {stop - start};",
            inputs=[record + start, smem + start],
            memory=True,
        )
    cute.arch.cp_async_bulk_commit_group()

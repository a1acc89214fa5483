"""The record of a chunk of KDA: what the prepare kernel writes to the workspace and the scan reads.

One record for every (chunk slot, head of O), contiguous images of shared memory in this order, each a multiple of 1024 bytes but
for the last: K~, Q~, K- [64 tokens, K channels], T, P [64, 64] (``layout.MMA``, panels of 64 columns, lines of 128 bytes, SW128), and
decay [K] float32. Record ``slot * heads + head`` begins at that multiple of ``record_bytes``.

Chunk c of sequence n has slot cu[n] / 64 + n + c, which no other chunk has. Imports nothing: sizes are needed on the host too.
Imported by ``kernels/prepare_kda``, the scan's loader and the engines.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = ["CHUNK", "RecordLayout", "record_bytes", "record_layout", "record_slots", "records_bytes"]

CHUNK = 64  # tokens
_ALIGNMENT = 1024  # of a tile of swizzled lines
_SQUARE = CHUNK * CHUNK * 2  # bytes of T or P


class _Keys(Protocol):
    @property
    def key(self) -> int: ...


class RecordLayout(NamedTuple):
    """Byte offsets in a record; ``used`` ends the decays, ``size`` is the distance between records."""

    k_in: int  # K~
    q_in: int  # Q~
    k_out: int  # K-
    t: int
    p: int
    decay: int
    used: int
    size: int


def record_layout(problem: _Keys) -> RecordLayout:
    """Of a problem with ``key`` channels of q and k: 64 or 128."""
    tile = CHUNK * problem.key * 2
    decay = 3 * tile + 2 * _SQUARE
    used = decay + problem.key * 4
    return RecordLayout(
        0, tile, 2 * tile, 3 * tile, 3 * tile + _SQUARE, decay, used, -(-used // _ALIGNMENT) * _ALIGNMENT
    )


def record_bytes(problem: _Keys) -> int:
    """Of one record: 66,560 for 128 channels, 41,984 for 64."""
    return record_layout(problem).size


def record_slots(tokens: int, sequences: int) -> int:
    """Chunk slots of ``sequences`` sequences that have ``tokens`` tokens together: an upper bound of every slot, exclusive."""
    return tokens // CHUNK + sequences


def records_bytes(problem: _Keys, heads: int, tokens: int, sequences: int) -> int:
    """Of all records; ``heads`` are those of O."""
    return record_slots(tokens, sequences) * heads * record_bytes(problem)

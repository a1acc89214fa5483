"""The record of a chunk: what a prepare kernel writes to the workspace and the scan reads.

One record for every (chunk slot, head of O), contiguous images of shared memory in this order, each tile a multiple of 1024 bytes

    kda    K~, Q~, K- [64 tokens, K channels], T, P [64, 64], decay [K] float32
    gdn    T, then the vectors a, c, G, nk [64] float32 (``VECTORS``); K and Q are the tokens' own, and the scan's CTA makes P of them

Of kda, K-, T and P are those of updates folded in groups of 8 tokens (``kernels/kda_groups.py``): for the scan they are what they are.

Tiles are of ``layout.MMA``, panels of 64 columns, lines of 128 bytes, SW128. Record ``slot * heads + head`` begins at that multiple of
``record_bytes``.

Chunk c of sequence n has slot cu[n] / 64 + n + c, which no other chunk has. Imports nothing: sizes are needed on the host too.
Imported by the prepare kernels, the warp roles of the scan and the engines.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = ["CHUNK", "VECTORS", "RecordLayout", "record_bytes", "record_layout", "record_slots", "records_bytes"]

CHUNK = 64  # tokens
_ALIGNMENT = 1024  # of a tile of swizzled lines
_SQUARE = CHUNK * CHUNK * 2  # bytes of T or P
VECTORS = {"a": 0, "c": 256, "sums": 512, "norms": 768}
"""gdn: bytes from the vectors' place to a, c, G and nk (``kernels.prepare_gdn``)."""
_VECTOR_BYTES = len(VECTORS) * CHUNK * 4


class _Keys(Protocol):
    @property
    def variant(self) -> str: ...

    @property
    def key(self) -> int: ...


class RecordLayout(NamedTuple):
    """Byte offsets in a record; ``used`` ends what is written, ``size`` is the distance between records."""

    k_in: int  # K~
    q_in: int  # Q~
    k_out: int  # K-
    t: int
    p: int  # gdn: of no bytes
    decay: int  # gdn: the vectors
    used: int
    size: int


def record_layout(problem: _Keys) -> RecordLayout:
    """Of a problem with ``key`` channels of q and k: 64 or 128. Records of gdn have no tiles of K and Q: these are at 0."""
    if problem.variant == "kda":
        tile, squares, vectors = problem.key * CHUNK * 2, 2, problem.key * 4
    else:
        tile, squares, vectors = 0, 1, _VECTOR_BYTES
    t = 3 * tile
    decay = t + squares * _SQUARE
    used = decay + vectors
    return RecordLayout(0, tile, 2 * tile, t, t + _SQUARE, decay, used, -(-used // _ALIGNMENT) * _ALIGNMENT)


def record_bytes(problem: _Keys) -> int:
    """Of one record: 9,216 for gdn; for kda 66,560 for 128 channels, 41,984 for 64."""
    return record_layout(problem).size


def record_slots(tokens: int, sequences: int) -> int:
    """Chunk slots of ``sequences`` sequences that have ``tokens`` tokens together: an upper bound of every slot, exclusive."""
    return tokens // CHUNK + sequences


def records_bytes(problem: _Keys, heads: int, tokens: int, sequences: int) -> int:
    """Of all records; ``heads`` are those of O."""
    return record_slots(tokens, sequences) * heads * record_bytes(problem)

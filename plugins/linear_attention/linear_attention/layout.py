"""Shared memory and workspace of the prefill kernels: every byte's place, stated once. Imports no DSL.

Imported by ``plan``, which sizes the workspace, and by the kernels. Tiles are of 64 tokens (or rows); lines of 128 bytes in the
128-byte swizzle, so that one tile is a K-major operand of the matrix unit and, read across, an MN-major one.
"""

from __future__ import annotations

from dataclasses import dataclass

from .problem import CHUNK, SLAB, Problem

__all__ = [
    "PANEL_BYTES", "SHARED_LIMIT", "PrefillLayout", "plan_layout", "record_bytes", "record_slots", "summary_bytes",
]  # fmt: skip

SHARED_LIMIT = 232448
"""Bytes of shared memory that a CTA of sm_90 can have."""
LINE = 128  # bytes
PANEL_BYTES = CHUNK * LINE
"""A panel: 64 lines, 64 elements each. T, P, a slab of V or O are one; K or Q of 128 channels are two."""
ALIGNMENT = 1024  # of a tile in the 128-byte swizzle
BARRIER_BYTES = 1024
VECTOR_BYTES = 1024  # a[64], c[64], d[64] and the decays, float32
GDN_SCRATCH_BYTES = 16384  # at most, of one prepare warpgroup
MOST_STAGES = 4


@dataclass(frozen=True)
class PrefillLayout:
    """Of a CTA, which keeps 64 rows of a head's state.

    prepared    operand tiles and T, P come from the workspace; else warpgroups of the CTA make T and P from K and Q
    threads     of a CTA
    stages      ring of loads: each K, Q (prepared: K-, too) and a slab of V
    q, keys, v  byte offsets in a stage; K is at 0, ``keys`` is the tile that updates the state
    slots       ring of T, P and vectors, each ``slot_bytes``
    staged      ring of slabs of O on their way out
    scratch     of the prepare warpgroups, ``scratch_bytes`` each
    Offsets of the rings are from the start of shared memory, where the barriers are.
    """

    prepared: bool
    threads: int
    stages: int
    stage_bytes: int
    q: int
    keys: int
    v: int
    ring: int
    slots: int
    slot_bytes: int
    slot_ring: int
    staged: int
    staging: int
    scratch: int
    scratch_bytes: int
    shared_bytes: int


def plan_layout(problem: Problem) -> PrefillLayout:
    """The layout of a problem's prefill, with as many stages as fit."""
    prepared = problem.variant == "kda"
    tile = problem.key * LINE
    keys = 2 * tile if prepared else 0
    v = (3 if prepared else 2) * tile
    stage = v + PANEL_BYTES
    slots, slot = 2, 2 * PANEL_BYTES + VECTOR_BYTES
    staged = 2
    scratch = 0 if prepared else GDN_SCRATCH_BYTES
    rest = BARRIER_BYTES + slots * slot + staged * PANEL_BYTES + 2 * scratch
    stages = min(MOST_STAGES, (SHARED_LIMIT - rest) // stage)
    slot_ring = BARRIER_BYTES + stages * stage
    staging = slot_ring + slots * slot
    scratch_at = staging + staged * PANEL_BYTES
    return PrefillLayout(
        prepared=prepared,
        threads=256 if prepared else 512,
        stages=stages,
        stage_bytes=stage,
        q=tile,
        keys=keys,
        v=v,
        ring=BARRIER_BYTES,
        slots=slots,
        slot_bytes=slot,
        slot_ring=slot_ring,
        staged=staged,
        staging=staging,
        scratch=scratch_at,
        scratch_bytes=scratch,
        shared_bytes=scratch_at + 2 * scratch,
    )


def record_bytes(problem: Problem) -> int:
    """Of a chunk of a head in the workspace of a prepared problem: K~, Q~, K- , T, P as they lie in shared memory, decay [K] float32."""
    return _align(3 * problem.key * LINE + 2 * PANEL_BYTES + 4 * problem.key)


def record_slots(tokens: int, sequences: int) -> int:
    """Chunk slots of a batch. Chunk c of sequence n has slot start_n // 64 + n + c, its record is slot * HO + head."""
    return tokens // CHUNK + sequences + 1


def summary_bytes(problem: Problem, sequences: int, segments: int) -> int:
    """Of the states of all segments: [sequence, head, segment, V + K, K] float32; see ``kernels.prefill``."""
    return sequences * problem.heads * segments * (problem.value + problem.key) * problem.key * 4


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


assert SLAB * 2 == LINE

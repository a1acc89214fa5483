"""Shared memory of the prefill kernels: every byte's place, stated once. Imports no DSL.

Imported by the kernels and by ``engines``. Tiles are of 64 tokens (or rows); lines of 128 bytes in the
128-byte swizzle, so that one tile is a K-major operand of the matrix unit and, read across, an MN-major one.
"""

from __future__ import annotations

from dataclasses import dataclass

from .problem import CHUNK, SLAB, Problem

__all__ = ["MMA", "PANEL_BYTES", "SHARED_LIMIT", "PrefillLayout", "plan_layout"]

SHARED_LIMIT = 232448
"""Bytes of shared memory that a CTA of sm_90 can have."""
LINE = 128  # bytes
PANEL_BYTES = CHUNK * LINE
"""A panel: 64 lines, 64 elements each. T, P, a slab of V or O are one; K or Q of 128 channels are two."""
ALIGNMENT = 1024  # of a tile in the 128-byte swizzle
BARRIER_BYTES = 1024
VECTOR_BYTES = 1024  # gdn: a, c, G, nk of 64 tokens, and d in as much again; kda: the decays of channels; float32
MMA = "float16"
"""The type of T, P and what multiplies them, bfloat16 io too, and of all prepared tiles: colliding keys need its 11 bits."""
MOST_STAGES = 4


@dataclass(frozen=True)
class Ring:
    """``count`` places of ``size`` bytes each in shared memory, from ``start`` on."""

    start: int
    count: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.size


@dataclass(frozen=True)
class PrefillLayout:
    """Of a CTA, which keeps 64 rows of a head's state. Barriers are at byte 0.

    prepared   K~, Q~ and K- come from the workspace; else K and Q are the tokens', and vectors scale what they make
    operands   K at 0, Q at ``q``, and at ``keys`` what updates the state: K- (prepared) or K again
    values     slabs of V
    matrices   T at 0, ``p`` and ``vectors`` of a chunk as they lie in its record; not prepared: P is made here, with d behind it
    staging    slabs of O on their way out
    """

    prepared: bool
    operands: Ring
    q: int
    keys: int
    values: Ring
    matrices: Ring
    p: int
    vectors: int
    staging: Ring

    @property
    def d(self) -> int:
        """In a place of matrices; not prepared."""
        return self.p + PANEL_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.staging.stop


def plan_layout(problem: Problem) -> PrefillLayout:
    """The layout of a problem's prefill, with as many stages of operands as fit."""
    prepared = problem.variant == "kda"
    tile = problem.key * LINE
    stage = (3 if prepared else 2) * tile
    matrices = 2 * PANEL_BYTES + (1 if prepared else 2) * VECTOR_BYTES
    others = ((2 if prepared else 3, PANEL_BYTES), (3, matrices), (1, PANEL_BYTES))
    rest = BARRIER_BYTES + sum(count * size for count, size in others)
    rings, at = [], BARRIER_BYTES
    for count, size in ((min(MOST_STAGES, (SHARED_LIMIT - rest) // stage), stage), *others):
        rings.append(Ring(at, count, size))
        at = rings[-1].stop
    p, vectors = (PANEL_BYTES, 2 * PANEL_BYTES) if prepared else (PANEL_BYTES + VECTOR_BYTES, PANEL_BYTES)
    return PrefillLayout(
        prepared, rings[0], tile, 2 * tile if prepared else 0, rings[1], rings[2], p, vectors, rings[3]
    )


assert SLAB * 2 == LINE

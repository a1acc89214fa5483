"""The mbarriers of a prefill CTA and the positions in its rings. Imported by ``prefill`` and its warp roles.

    full, empty           of an operand stage: its tiles lie in shared memory [1: the loader]; they have been read [warps of the state]
    values, values_read   of a slab of V: likewise [1: its loader; warps of the state]
    ready, free           of T, the vectors and KDA's P: likewise
    scores                of GDN's P and d: they lie in their place [score warps]; they have been read when ``free`` is complete
    staged, stored        of a slab of O: it lies in its place [warps of the state]; it has been read [1: the output warp]
    tail[2]               the loads of a last, partial chunk, before its rows past the end are cleared: operands, values [1]

The counts in brackets are arrivals of a phase. In a cluster, ``empty`` and ``free`` are of the readers of both: either CTA fills places of both.
The score warps have read a stage of operands when the scans have, which wait for their ``scores`` before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from ..layout import BARRIER_BYTES, PrefillLayout

__all__ = ["Barriers", "Place", "advanced"]

_WARPS = 4  # of a warpgroup


class Place(NamedTuple):
    """A place in a ring, and the parity of the phase in which it is filled."""

    index: Int32
    phase: Int32


def advanced(place: Place, count: int) -> Place:
    """The next place in a ring of ``count``."""
    if count == 1:
        return Place(place.index, place.phase ^ 1)
    index = place.index + 1
    over = index == count
    return Place(cutlass.select_(over, Int32(0), index), place.phase ^ cutlass.select_(over, Int32(1), Int32(0)))


class Barriers:
    """At the start of shared memory."""

    def __init__(self, layout: PrefillLayout, cluster: int) -> None:
        self.cluster = cluster
        stages, values, matrices, staging = (
            ring.count for ring in (layout.operands, layout.values, layout.matrices, layout.staging)
        )
        rows = {
            "tail": (2, 1),
            "full": (stages, 1),
            "empty": (stages, _WARPS * cluster),
            "values": (values, 1),
            "values_read": (values, _WARPS),
            "ready": (matrices, 1),
            "free": (matrices, _WARPS * cluster),
            "scores": (matrices, _WARPS),
            "staged": (staging, _WARPS),
            "stored": (staging, 1),
        }
        self.first: dict[str, int] = {}
        self.counts: list[int] = []
        for name, (members, count) in rows.items():
            self.first[name] = len(self.counts)
            self.counts += [count] * members
        assert 8 * len(self.counts) <= BARRIER_BYTES

    def init(self, smem: cute.Pointer) -> None:
        """By one thread."""
        for index, count in enumerate(self.counts):
            cute.arch.mbarrier_init(self._at(smem, index), count)

    def of(self, smem: cute.Pointer, name: str, index: Any = 0) -> cute.Pointer:
        """Barrier ``index`` of the row ``name``."""
        return self._at(smem, self.first[name] + index)

    def wait(self, smem: cute.Pointer, name: str, index: Any, parity: Any) -> None:
        """Until the phase of ``parity`` is complete."""
        cute.arch.mbarrier_wait(self.of(smem, name, index), parity)

    def arrive(self, smem: cute.Pointer, name: str, index: Any) -> None:
        """Of one thread."""
        cute.arch.mbarrier_arrive(self.of(smem, name, index))

    @cute.jit
    def release(self, smem: cute.Pointer, name: cutlass.Constexpr, index: Int32, lane: Int32):  # noqa: ANN201  the DSL reads it
        """A warp has read a place that the CTAs of the cluster fill: its lanes meet, and some report for all."""
        cute.arch.sync_warp()
        if lane < self.cluster:
            if cutlass.const_expr(self.cluster == 1):
                self.arrive(smem, name, index)
            else:
                cute.arch.mbarrier_arrive(self.of(smem, name, index), lane)

    @staticmethod
    def _at(smem: cute.Pointer, index: Any) -> cute.Pointer:
        return cute.recast_ptr(smem, dtype=Int64) + index

"""The mbarriers of a prefill CTA. Imported by ``prefill`` and its warp roles.

    full[stages]   a stage's tiles lie in shared memory [1: its loader]
    empty[stages]  they have been read [warps of the state and, fused, of the prepare warpgroup whose chunk it is]
    ready[slots]   T, P and the vectors of a chunk lie in their slot [fused: the warps of a prepare warpgroup; prepared: 1, the loader]
    free[slots]    they have been read [warps of the state]
    staged[2]      a slab of O lies in its place [warps of the state]
    stored[2]      it has been read [1: the output warp]
    tail           the last, partial chunk's loads, before its rows past the end are cleared [1]

The counts in brackets are arrivals of a phase.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int64, cute

from ..layout import BARRIER_BYTES, PrefillLayout

__all__ = ["Barriers"]

_WARPS = 4  # of a warpgroup


class Barriers:
    """At the start of shared memory."""

    def __init__(self, layout: PrefillLayout) -> None:
        readers = _WARPS if layout.prepared else 2 * _WARPS
        rows = {
            "tail": (1, 1),
            "full": (layout.stages, 1),
            "empty": (layout.stages, readers),
            "ready": (layout.slots, 1 if layout.prepared else _WARPS),
            "free": (layout.slots, _WARPS),
            "staged": (layout.staged, _WARPS),
            "stored": (layout.staged, 1),
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

    @staticmethod
    def _at(smem: cute.Pointer, index: Any) -> cute.Pointer:
        return cute.recast_ptr(smem, dtype=Int64) + index

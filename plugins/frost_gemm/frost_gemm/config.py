"""The tile configuration of one kernel: everything that changes its speed and nothing that changes its result.

A frozen value, made by ``select`` or from a plan's knobs; ``layout.plan_layout`` turns it and a program into sizes and offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["TileConfig"]


@dataclass(frozen=True)
class TileConfig:
    """One kernel's geometry.

    tile_m, tile_n   output tile of one CTA, in elements (of the pair, where cta_group is 2: the pair shares tile_m and tile_n).
                     SM100: one or two instructions of 128 rows high (of 256 rows, by a pair)
    tile_k           bytes of K in one stage
    cluster_m, _n    CTAs of a cluster along M and N; they share operand tiles by multicast
    split_k          CTAs that share one output tile along K; their sums are added through distributed shared memory
    swap_ab          compute the transposed problem (small M)
    stages           depth of the operand ring; 0: as many as fit
    schedule         SM90: "cooperative" (the consumer warpgroups share a tile) or "pingpong" (each has its own)
    cta_group        SM100: CTAs that one MMA spans
    raster           tiles along one axis that are walked together so that L2 serves them; 0: chosen at launch
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 128
    cluster_m: int = 1
    cluster_n: int = 1
    split_k: int = 1
    swap_ab: bool = False
    stages: int = 0
    schedule: str = "cooperative"
    cta_group: int = 1
    raster: int = 0

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n * self.split_k

    def knobs(self, names: tuple[str, ...]) -> dict[str, Any]:
        """The knobs of an engine that has these."""
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_knobs(cls, knobs: Mapping[str, Any]) -> TileConfig:
        """The configuration that a plan's knobs name, exactly."""
        return cls(**knobs)

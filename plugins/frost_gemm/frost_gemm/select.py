"""Which configurations a program is worth trying with, best first by the cost model.

``choose`` gives up to eight configurations, each of which has a layout: what it offers can be built. Imported by ``engines``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from .config import TileConfig
from .facts import ArchFacts
from .ir import Program
from .layout import KernelLayout, LayoutError, check_program, plan_layout
from .model import Model, Shape, Work, coefficients, half_stages, machine, work

if TYPE_CHECKING:
    from cudnn_core import DeviceInfo

__all__ = ["LIMIT", "Choice", "choose"]

LIMIT = 8


class Choice(NamedTuple):
    config: TileConfig
    layout: KernelLayout
    us: float


def choose(
    program: Program, shape: Shape, facts: ArchFacts, device: DeviceInfo, limit: int = LIMIT
) -> list[Choice] | LayoutError:
    """Up to ``limit`` configurations with their layouts, the quickest first; or why there is none.

    Tiles are ranked without clusters; the best ones are ranked again with each cluster that suits them.
    """
    c = coefficients(facts.target, facts.mma)
    what = work(program)
    us = Model(what, shape, machine(device, facts, c), c).us
    seen: dict[bool, Program] = {}  # by swap_ab; checked

    def layout(config: TileConfig) -> KernelLayout:
        this = seen.get(config.swap_ab)
        if this is None:
            this = program.swapped() if config.swap_ab else program
            check_program(this, facts)
            seen[config.swap_ab] = this
        return plan_layout(this, config, facts, checked=True)

    ranked = sorted(((us(tile), i, tile) for i, tile in enumerate(_tiles(what, shape, facts))), key=itemgetter(0, 1))
    pool = ranked[:limit]
    for _, i, tile in ranked[:CLUSTERED]:
        for j, config in enumerate(_clusters(tile, shape, facts), 1):
            pool.append((us(config), i + j / 100, config))  # type: ignore[arg-type]
    pool.sort(key=itemgetter(0, 1))
    error: LayoutError | None = None
    chosen: list[Choice] = []
    taken: Counter[tuple[object, ...]] = Counter()
    for estimate, _, config in [*pool, *ranked[limit:]]:
        # Diverse: a wrong guess about one tile should not spoil the whole list.
        kind = (config.tile_m, config.tile_n, config.schedule, config.swap_ab, config.split_k, config.stages)
        if taken[kind] >= 2:
            continue
        try:
            chosen.append(Choice(config, layout(config), estimate))
        except LayoutError as found:
            error = error or (found.swapped() if config.swap_ab else found)
            continue
        taken[kind] += 1
        if len(chosen) == limit:
            break
    if not chosen:
        assert error is not None
        return error
    return chosen


# (tile_m, tile_n, tile_k) of SM90. The small ones stream weights: few barriers a byte. Pingpong and tiles of other sizes are for
# ``bench`` and pins: on an H200 none of them was the quickest of its problem.
_WGMMA_TILES = (
    (64, 16, 256), (64, 32, 256), (128, 16, 256), (128, 32, 256), (64, 64, 256), (64, 128, 128), (128, 64, 128), (128, 128, 128),
    (128, 160, 128), (128, 192, 128), (128, 224, 128), (128, 256, 128), (192, 128, 128), (192, 160, 128), (256, 64, 128),
    (256, 96, 128), (256, 128, 128), (64, 256, 128),
)  # fmt: skip
_TCGEN05_WIDTHS = (16, 32, 64, 96, 128, 160, 192, 224, 256)
_LEAST_ROWS = {"wgmma": 64, "tcgen05": 128}
_SPLITS = {"wgmma": (1, 2, 3, 4, 6, 8), "tcgen05": (1, 2, 4, 8)}
# Wider clusters of wgmma lose more to the SMs that they leave idle than they save.
_CLUSTERS = {"wgmma": ((2, 1), (1, 2)), "tcgen05": ((2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2))}
_SWAP_BELOW = 64  # rows from which a tile of 64 rows is full
CLUSTERED = 6  # tiles that are tried with clusters


@lru_cache(maxsize=8)
def _family(mma: str, swap: bool) -> tuple[tuple[TileConfig, ...], ...]:
    """Every tile of a generation, as the tuple of its splits."""
    if mma == "wgmma":
        geometries = [(m, n, k, 1) for m, n, k in _WGMMA_TILES]
    else:
        geometries = [(128 * group, n, 128, group) for group in (2, 1) for n in _TCGEN05_WIDTHS]
    return tuple(
        tuple(
            TileConfig(m, n, k, cluster_m=group, split_k=split, swap_ab=swap, cta_group=group) for split in _SPLITS[mma]
        )
        for m, n, k, group in geometries
    )


def _tiles(what: Work, shape: Shape, facts: ArchFacts) -> Iterator[TileConfig]:
    """Tiles worth ranking, without clusters of their own: none twice as large as the problem, split-K where SMs would idle, and
    small tiles also two to an SM."""
    sms, least = facts.sm_count, _LEAST_ROWS[facts.mma]
    for swap in (False, True):
        rows, cols = (shape.n, shape.m) if swap else (shape.m, shape.n)
        if swap and not (shape.m < _SWAP_BELOW < shape.n or (shape.m < shape.n // 8 and shape.m <= 256)):
            continue
        for splits in _family(facts.mma, swap):
            tile = splits[0]
            if (tile.tile_m > least and tile.tile_m >= 2 * rows) or (tile.tile_n > 16 and tile.tile_n >= 2 * cols):
                continue
            tiles = -(-rows // tile.tile_m) * tile.cta_group * -(-cols // tile.tile_n) * shape.l
            yield tile
            if tiles > sms and facts.mma == "wgmma" and tile.tile_m == 64 and tile.tile_n * what.gemms <= 128:
                short = half_stages(what, tile)
                if short >= 3:
                    yield _with_stages(tile, short)
            for config in splits[1:]:
                if tiles * config.split_k > 2 * sms or 2 * tiles > sms or shape.k < 256 * config.split_k:
                    break
                if config.split_k * tile.cta_group <= facts.max_cluster:
                    yield config


@lru_cache(maxsize=256)
def _with_stages(tile: TileConfig, stages: int) -> TileConfig:
    return replace(tile, stages=stages)


def _clusters(tile: TileConfig, shape: Shape, facts: ArchFacts) -> Iterator[TileConfig]:
    """The tile with each cluster whose CTAs along M and N all have work."""
    rows, cols = (shape.n, shape.m) if tile.swap_ab else (shape.m, shape.n)
    most_m, most_n = -(-rows // tile.tile_m) * tile.cta_group, -(-cols // tile.tile_n)
    for cluster_m, cluster_n in _CLUSTERS[facts.mma]:
        same = (cluster_m, cluster_n) == (tile.cluster_m, tile.cluster_n)
        fits = cluster_m * cluster_n * tile.split_k <= min(facts.max_cluster, 8)
        if not same and fits and cluster_m <= most_m and cluster_n <= most_n and cluster_m % tile.cta_group == 0:
            yield _with_cluster(tile, cluster_m, cluster_n)


@lru_cache(maxsize=1024)
def _with_cluster(tile: TileConfig, cluster_m: int, cluster_n: int) -> TileConfig:
    return replace(tile, cluster_m=cluster_m, cluster_n=cluster_n)

"""Which configurations a program is worth trying with, best first by the cost model.

``choose`` gives up to eight configurations, each of which has a layout: what it offers can be built. Imported by ``engines``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from heapq import heappop, heappush, merge
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from .config import TileConfig
from .facts import ArchFacts
from .ir import Program
from .layout import KernelLayout, LayoutError, check_program, plan_layout
from .model import Coefficients, Cost, Machine, Model, Operands, Shape, coefficients, cost, half_stages, machine, work

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
    gpu = machine(device, facts, c)
    kernels = _kernels(program, facts)
    candidates = _candidates(kernels.work.operands, facts, gpu, c)
    model = Model(kernels.work, shape, gpu, c)
    ranked = _ascending(model, candidates.tiles(shape))
    pool = list(islice(ranked, limit))
    for _, i, _, tile in pool[:CLUSTERED]:
        pool += [(model.time(one), i, j, one) for j, one in enumerate(candidates.clusters(tile, shape), 1)]
    pool.sort()
    error: LayoutError | None = None
    chosen: list[Choice] = []
    taken: dict[tuple[object, ...], int] = {}
    for estimate, _, _, (config, *_) in merge(pool, ranked):
        # Diverse: a wrong guess about one tile should not spoil the whole list.
        kind = (config.tile_m, config.tile_n, config.schedule, config.swap_ab, config.split_k, config.stages)
        before = taken.get(kind, 0)
        if before == 2:
            continue
        layout = kernels.layout(config)
        if isinstance(layout, LayoutError):
            error = error or (layout.swapped() if config.swap_ab else layout)
            continue
        chosen.append(Choice(config, layout, estimate))
        taken[kind] = before + 1
        if len(chosen) == limit:
            break
    if not chosen:
        assert error is not None
        return error
    return chosen


def _ascending(model: Model, tiles: Iterable[tuple[Cost, int]]) -> Iterator[tuple[float, int, int, Cost]]:
    """(time, index, 0, tile) of all tiles, the quickest first; of equal ones, the earlier one.

    A tile is estimated once its bound is reached: no later one can then be quicker than a time below that bound. Far slower tiles
    than the caller takes are never estimated, and the order is that of all times.
    """
    waiting: list[tuple[float, int, int, Cost]] = []
    least = model.least
    for bound, i, tile in sorted([(least(tile, clusters), i, tile) for i, (tile, clusters) in enumerate(tiles)]):
        while waiting and waiting[0][0] < bound:
            yield heappop(waiting)
        heappush(waiting, (model.time(tile), i, 0, tile))
    while waiting:
        yield heappop(waiting)


class _Kernels:
    """The kernels of one program on one architecture. No size is in them: graphs that differ in sizes alone share them."""

    def __init__(self, program: Program, facts: ArchFacts) -> None:
        self.work = work(program)
        self._program, self._facts = program, facts
        self._checked: dict[bool, Program | LayoutError] = {}  # by swap_ab
        self._layouts: dict[TileConfig, KernelLayout | LayoutError] = {}

    def layout(self, config: TileConfig) -> KernelLayout | LayoutError:
        """The layout of a configuration, or why it has none."""
        found = self._layouts.get(config)
        if found is None:
            found = self._layouts[config] = self._planned(config)
        return found

    def _planned(self, config: TileConfig) -> KernelLayout | LayoutError:
        swap = config.swap_ab
        program = self._checked.get(swap)
        try:
            if program is None:
                program = self._program.swapped() if swap else self._program
                check_program(program, self._facts)
                self._checked[swap] = program
            return (
                program if isinstance(program, LayoutError) else plan_layout(program, config, self._facts, checked=True)
            )
        except LayoutError as error:
            return error.with_traceback(None)  # it would keep the frames alive


_kernels = lru_cache(maxsize=64)(_Kernels)


# (tile_m, tile_n, tile_k) of SM90. The small ones stream weights: few barriers a byte.
_WGMMA_TILES = (
    (64, 16, 256), (64, 32, 256), (128, 16, 256), (128, 32, 256), (64, 64, 256), (64, 128, 128), (64, 128, 256), (128, 64, 128),
    (128, 64, 256), (128, 128, 128), (128, 160, 128), (128, 192, 128), (128, 224, 128), (128, 256, 128), (192, 128, 128),
    (192, 160, 128), (256, 64, 128), (256, 96, 128), (256, 128, 128), (64, 256, 128),
)  # fmt: skip
# Columns of pingpong's tiles, which have 64 rows, in pairs that share B: alone they would be bound by L2. Not where a warpgroup
# promotes: it would do so while nobody multiplies.
_PINGPONG_WIDTHS = (96, 112, 128, 160, 176, 208, 224, 240, 256)
_TCGEN05_WIDTHS = (16, 32, 64, 96, 128, 160, 192, 224, 256)
_TCGEN05_HIGH_WIDTHS = (128, 160, 192, 256)  # of tiles of two MMAs along M, which pay where B is kept between them
_LEAST_ROWS = {"wgmma": 64, "tcgen05": 128}
_SPLITS = {"wgmma": (2, 3, 4, 6, 8), "tcgen05": (2, 4, 8)}
# Wider clusters of wgmma lose more to the SMs that they leave idle than they save.
_CLUSTERS = {"wgmma": ((2, 1), (1, 2)), "tcgen05": ((2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2))}
_SWAP_BELOW = 64  # rows from which a tile of 64 rows is full
CLUSTERED = 6  # tiles that are tried with clusters


class _Group:
    """A tile as one CTA of an SM computes it; ``short``: as one of two CTAs, if that suits it; ``splits``: with K split, when asked."""

    def __init__(self, tile: Cost, short: Cost | None, splits: Callable[[], list[Cost]]) -> None:
        self.tile, self.short, self._splits = tile, short, splits

    @cached_property
    def splits(self) -> list[Cost]:
        return self._splits()


class _Candidates:
    """The configurations of a generation, with what no size changes of their costs."""

    def __init__(self, what: Operands, facts: ArchFacts, gpu: Machine, c: Coefficients) -> None:
        self._what, self._facts = what, facts
        self._cost = partial(cost, what, gpu, c)
        self._groups: dict[bool, list[_Group]] = {}  # by swap_ab
        self._clustered: dict[TileConfig, list[Cost]] = {}

    def tiles(self, shape: Shape) -> Iterator[tuple[Cost, int]]:
        """Tiles worth ranking, without clusters of their own: none twice as large as the problem, split-K where SMs would idle, and
        small tiles also two to an SM. With the number of tiles."""
        m, n, k, batches = shape
        sms, least = self._facts.sm_count, _LEAST_ROWS[self._facts.mma]
        for swap in (False, True):
            rows, cols = (n, m) if swap else (m, n)
            if swap and not (m < _SWAP_BELOW < n or (m < n // 8 and m <= 256)):
                continue
            for group in self._groups.get(swap) or self._made(swap):
                tile, short = group.tile, group.short
                tile_m, tile_n = tile.tile_m, tile.tile_n
                if (tile_m > least and tile_m >= 2 * rows) or (tile_n > 16 and tile_n >= 2 * cols):
                    continue
                if rows <= 64 and tile.cluster_m > tile.group:
                    continue
                count = -(-rows * tile.group // (tile_m * tile.cluster_m)) * -(-cols // tile_n) * batches
                tiles = count * tile.cluster_m
                yield tile, count
                if short is not None and tiles > sms:
                    yield short, count
                if 2 * tiles <= sms:
                    for split in group.splits:
                        split_k = split.config.split_k
                        if tiles * split_k > 2 * sms or k < 256 * split_k:
                            break
                        yield split, count

    def clusters(self, tile: Cost, shape: Shape) -> list[Cost]:
        """The tile with each cluster whose CTAs along M and N all have work."""
        rows, cols = (shape.n, shape.m) if tile.swap else (shape.m, shape.n)
        most_m, most_n = -(-rows // tile.tile_m) * tile.group, -(-cols // tile.tile_n)
        found = self._clustered.get(tile.config)
        if found is None:
            found = self._clustered[tile.config] = self._with_clusters(tile.config)
        return [one for one in found if one.cluster_m <= most_m and one.cluster_n <= most_n]

    def _made(self, swap: bool) -> list[_Group]:
        mma = self._facts.mma
        if mma == "wgmma":
            tiles = [TileConfig(m, n, k, swap_ab=swap) for m, n, k in _WGMMA_TILES]
            if not self._what.promote:
                shared = TileConfig(64, 128, 128, cluster_m=2, swap_ab=swap, schedule="pingpong")
                tiles += [replace(shared, tile_n=n) for n in _PINGPONG_WIDTHS]
        else:
            sizes = [(128, n) for n in _TCGEN05_WIDTHS]
            if self._facts.b_collector:
                sizes += [(256, n) for n in _TCGEN05_HIGH_WIDTHS]
            tiles = [
                TileConfig(m * group, n, 128, cluster_m=group, swap_ab=swap, cta_group=group)
                for group in (2, 1)
                for m, n in sizes
            ]
        groups = self._groups[swap] = [self._group(tile) for tile in tiles]
        return groups

    def _group(self, tile: TileConfig) -> _Group:
        facts, what = self._facts, self._what
        short = None
        pingpong = tile.schedule == "pingpong"
        if facts.mma == "wgmma" and not pingpong and tile.tile_m == 64 and tile.tile_n * what.gemms <= 128:
            stages = half_stages(what, tile)
            short = self._cost(replace(tile, stages=stages)) if stages >= 3 else None

        def splits() -> list[Cost]:
            most = 1 if pingpong else facts.max_cluster
            fitting = [split for split in _SPLITS[facts.mma] if split * tile.cta_group <= most]
            return [self._cost(replace(tile, split_k=split)) for split in fitting]

        return _Group(self._cost(tile), short, splits)

    def _with_clusters(self, tile: TileConfig) -> list[Cost]:
        most = min(self._facts.max_cluster, 8)
        return [
            self._cost(replace(tile, cluster_m=cluster_m, cluster_n=cluster_n))
            for cluster_m, cluster_n in _CLUSTERS[self._facts.mma]
            if (cluster_m, cluster_n) != (tile.cluster_m, tile.cluster_n)
            and cluster_m * cluster_n * tile.split_k <= most
            and cluster_m % tile.cta_group == 0
        ]


_candidates = lru_cache(maxsize=32)(_Candidates)

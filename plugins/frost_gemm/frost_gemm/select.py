"""Which configurations a program is worth trying with, best first: a closed-form model of the time that each one takes.

``choose`` gives up to eight configurations, each of which has a layout: what it offers can be built. The model knows waves, clusters,
bytes from L2 and memory, shared memory, the epilogue's exposed part and split-K; its coefficients are fitted to measurements by
``python -m frost_gemm.calibrate``. Pure arithmetic, no imports but the package's own. Imported by ``engines``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .config import TileConfig
from .facts import ArchFacts
from .ir import Program
from .layout import BITS, KernelLayout, LayoutError, plan_layout

if TYPE_CHECKING:
    from cudnn_core import DeviceInfo

__all__ = [
    "CALIBRATION",
    "LIMIT",
    "Choice",
    "Coefficients",
    "Machine",
    "Shape",
    "Work",
    "choose",
    "coefficients",
    "machine",
    "predict_us",
    "work",
]

LIMIT = 8
CALIBRATION = Path(__file__).parent / "calibration"


class Shape(NamedTuple):
    """Sizes of a problem; of runtime ones, the hint."""

    m: int
    n: int
    k: int
    l: int = 1  # noqa: E741  the letter of the contract

    def swapped(self) -> Shape:
        return Shape(self.n, self.m, self.k, self.l)


class Choice(NamedTuple):
    config: TileConfig
    layout: KernelLayout
    us: float


@dataclass(frozen=True)
class Coefficients:
    """What the model multiplies with. The defaults are round figures of a Hopper; ``calibrate`` fits them.

    launch_us          from the launch to the first instruction of a CTA, and from the last one to the end
    fill_us            from there until the first operand tile has come from memory
    tile_us            between two tiles of a persistent CTA: the ring runs dry, registers are handed over
    tensor             share of the published tensor rate that the mainloop reaches (clocks fall under load)
    promote            share of that where partial sums are added in registers
    smem_bytes_per_us  that one SM's MMAs read from shared memory
    sm_bytes_per_us    that one SM loads, from L2 or memory
    ingest_bytes_per_us  that arrive in one SM: what it loads and what others multicast to it
    l2_bytes_per_us    that all SMs together load from L2
    dram               share of the published memory rate
    store_bytes_per_us that one SM's epilogue loads and stores
    op_us              of one pointwise op on 1024 elements in one SM
    split_us           of one more CTA in a split-K group: its sums through distributed shared memory
    cluster_us         of one more CTA in a cluster: barriers across SMs
    tensor_flops_per_us, dram_bytes_per_us  of one SM in 16-bit types, and of the memory, where the device's rates are not published
    """

    launch_us: float = 3.0
    fill_us: float = 1.2
    tile_us: float = 0.25
    tensor: float = 0.80
    promote: float = 0.92
    smem_bytes_per_us: float = 220e3
    sm_bytes_per_us: float = 75e3
    ingest_bytes_per_us: float = 105e3
    l2_bytes_per_us: float = 6.5e6
    dram: float = 0.88
    store_bytes_per_us: float = 45e3
    op_us: float = 0.004
    split_us: float = 0.4
    cluster_us: float = 0.1
    tensor_flops_per_us: float = 7.5e6
    dram_bytes_per_us: float = 4.8e6


_DEFAULTS = {
    "wgmma": Coefficients(),
    "tcgen05": Coefficients(
        sm_bytes_per_us=110e3,
        ingest_bytes_per_us=150e3,
        l2_bytes_per_us=12e6,
        tensor_flops_per_us=15.2e6,
        dram_bytes_per_us=8e6,
        store_bytes_per_us=60e3,
    ),
}


class Machine(NamedTuple):
    """Rates of a device, as the model needs them: floating-point operations and bytes a microsecond."""

    sms: int
    l2_bytes: int
    tensor16: float  # of one SM; 8-bit types: twice
    dram: float
    overlapped: bool  # the epilogue of one tile runs while the next one is multiplied


@dataclass(frozen=True)
class Work:
    """What the model reads of a program, by the program's own M and N.

    a_bytes, b_bytes   of one element of all A operands together, and of B
    out_bytes          that the epilogue moves for each output element
    ops                pointwise ops on each output element; a reduction counts as two
    wide               operands have 8-bit elements, of which the MMA multiplies twice as many
    """

    a_bytes: float
    b_bytes: float
    out_bytes: float
    ops: int
    gemms: int
    wide: bool
    promote: bool
    a_batched: bool
    b_batched: bool

    def swapped(self) -> Work:
        return Work(
            self.b_bytes, self.a_bytes, self.out_bytes, self.ops, self.gemms, self.wide, self.promote, self.b_batched, self.a_batched
        )  # fmt: skip


def work(program: Program) -> Work:
    """The part of a program that its time depends on."""
    full = sum(BITS[aux.dtype] for aux in program.aux if aux.kind == "full")
    return Work(
        a_bytes=sum(BITS[m.dtype] for m in program.a) / 8,
        b_bytes=sum(BITS[m.dtype] for m in program.b) / 8,
        out_bytes=(full + sum(BITS[store.dtype] for store in program.stores)) / 8,
        ops=len(program.ops) + 2 * len(program.reductions),
        gemms=len(program.gemms),
        wide=BITS[program.a[0].mma_dtype] == 8,
        promote=program.promote,
        a_batched=any(m.batched for m in program.a),
        b_batched=any(m.batched for m in program.b),
    )


def machine(device: DeviceInfo, facts: ArchFacts, c: Coefficients) -> Machine:
    """The rates of a device: the published ones, or the coefficients' own."""
    peak = device.peak("bfloat16")
    tensor = peak / 1e6 / facts.sm_count if peak else c.tensor_flops_per_us
    dram = device.memory_bandwidth / 1e6 if device.memory_bandwidth else c.dram_bytes_per_us
    return Machine(facts.sm_count, device.l2_cache_bytes or 50 << 20, tensor, dram, facts.mma == "tcgen05")


@lru_cache(maxsize=8)
def coefficients(target: str, mma: str) -> Coefficients:
    """The fitted coefficients of an architecture such as "sm_90a", else the defaults of its generation."""
    path = CALIBRATION / f"{target.replace('_', '').removesuffix('a')}.json"
    if not path.is_file():
        return _DEFAULTS[mma]
    return replace(_DEFAULTS[mma], **json.loads(path.read_text())["coefficients"])


def predict_us(what: Work, shape: Shape, config: TileConfig, gpu: Machine, c: Coefficients) -> float:
    """Microseconds that one launch takes.

    A persistent CTA computes ``rounds`` tiles one after the other; that, and the memory's time for all bytes, bound the launch.
    """
    if config.swap_ab:
        what, shape = what.swapped(), shape.swapped()
    cta_m = config.tile_m // config.cta_group
    along_m = -(-shape.m // config.tile_m)
    along_n = -(-shape.n // config.tile_n)
    # The last clusters along an edge hold CTAs without work.
    grid_m = _round_up(along_m * config.cta_group, config.cluster_m)
    grid_n = _round_up(along_n, config.cluster_n)
    clusters = grid_m * grid_n // (config.cluster_m * config.cluster_n) * shape.l
    slots = _cluster_slots(gpu.sms, config.cluster) * _resident(what, config, gpu)
    rounds = -(-clusters // slots)
    active = min(clusters, slots) * config.cluster
    share = max(1.0, active / gpu.sms)  # CTAs that share an SM's rates

    element = 1 if what.wide else 2
    width = config.tile_k // element
    steps = max(1, -(-shape.k // (width * config.split_k)))
    flops = 2.0 * cta_m * config.tile_n * width * what.gemms
    rate = gpu.tensor16 * (2 if what.wide else 1) * c.tensor * (c.promote if what.promote else 1.0)
    # Every 64 rows of A meet all of B in shared memory (128 rows on tcgen05, where a pair halves B).
    rows = 128 if gpu.overlapped else 64
    b_reads = cta_m / rows * config.tile_n / config.cta_group * config.tile_k
    smem = (cta_m * config.tile_k + b_reads) * what.gemms / c.smem_bytes_per_us
    a_bytes = cta_m * width * what.a_bytes
    b_bytes = config.tile_n / config.cta_group * width * what.b_bytes
    loaded = a_bytes / config.cluster_n + b_bytes * config.cta_group / config.cluster_m
    step_us = max(
        share * flops / rate,
        share * smem,
        share * loaded / c.sm_bytes_per_us,
        share * (a_bytes + b_bytes) / c.ingest_bytes_per_us,
        loaded * active / c.l2_bytes_per_us,
    )

    elements = cta_m * config.tile_n
    epilogue = share * (elements * what.out_bytes / c.store_bytes_per_us + elements / 1024 * what.ops * c.op_us)
    epilogue += (config.split_k - 1) * c.split_us
    mainloop = steps * step_us
    if gpu.overlapped or config.schedule == "pingpong" or share > 1:  # hidden behind other tiles, but for the last one
        tiles_us = rounds * max(mainloop, epilogue) + epilogue
    else:
        tiles_us = rounds * (mainloop + epilogue)
    tiles_us += (rounds - 1) * c.tile_us

    dram_us = _dram_bytes(what, shape, config, gpu, active, along_n) / min(
        gpu.dram * c.dram, active * c.sm_bytes_per_us
    )
    return (
        c.launch_us + c.fill_us + config.cluster * c.cluster_us + max(tiles_us, dram_us) + 0.1 * min(tiles_us, dram_us)
    )


def _resident(what: Work, config: TileConfig, gpu: Machine) -> int:
    """CTAs on one SM: two of a small wgmma tile whose ring is kept short (``layout.wgmma_resident`` decides)."""
    small = config.tile_m == 64 and config.tile_n * what.gemms <= 128 and config.schedule == "cooperative"
    return 2 if small and not gpu.overlapped and 0 < config.stages <= _half_stages(what, config) else 1


def _half_stages(what: Work, config: TileConfig) -> int:
    """Stages of a ring that leaves room for a second CTA on the SM; staging and barriers take up to 17 KiB of each half."""
    element = 1 if what.wide else 2
    stage = (config.tile_m * what.a_bytes + config.tile_n * what.b_bytes) * config.tile_k / element
    partial = config.tile_m * config.tile_n * 4 * what.gemms if config.split_k > 1 else 0
    return int(((113 - 17) * 1024 - partial) / stage)


def _cluster_slots(sms: int, size: int) -> int:
    """Clusters that run at a time. A cluster lies in one GPC, whose SMs its size may not divide: a pair always fits."""
    if size <= 2:
        return max(1, sms // size)
    return max(1, int(sms * 0.97) // size)


def _dram_bytes(what: Work, shape: Shape, config: TileConfig, gpu: Machine, active: int, along_n: int) -> float:
    """Bytes from and to memory. The tiles in flight form a block; a column of such blocks reads A once and its part of B once."""
    a = shape.m * shape.k * what.a_bytes * (shape.l if what.a_batched else 1)
    b = shape.n * shape.k * what.b_bytes * (shape.l if what.b_batched else 1)
    out = shape.m * shape.n * shape.l * what.out_bytes
    if a + b > gpu.l2_bytes / 2 and a / max(1, shape.l) > gpu.l2_bytes / 4:
        width = max(1.0, math.sqrt(active / config.split_k * config.tile_m / config.tile_n))
        a *= max(1.0, along_n / width)
    return a + b + out


def choose(
    program: Program, shape: Shape, facts: ArchFacts, device: DeviceInfo, limit: int = LIMIT
) -> list[Choice] | LayoutError:
    """Up to ``limit`` configurations with their layouts, the quickest first; or why there is none.

    Tiles are ranked without clusters; the best ones are ranked again with each cluster that suits them.
    """
    c = coefficients(facts.target, facts.mma)
    gpu, what = machine(device, facts, c), work(program)
    swapped: list[Program] = []

    def layout(config: TileConfig) -> KernelLayout:
        if config.swap_ab and not swapped:
            swapped.append(program.swapped())
        return plan_layout(swapped[0] if config.swap_ab else program, config, facts)

    tiles = enumerate(_tiles(what, shape, facts, gpu))
    ranked = sorted(((predict_us(what, shape, tile, gpu, c), i, tile) for i, tile in tiles), key=itemgetter(0, 1))
    pool = [(us, 100 * i, tile) for us, i, tile in ranked[:limit]]
    for _, i, tile in pool[:]:
        for j, config in enumerate(_clusters(tile, shape, facts), 1):
            pool.append((predict_us(what, shape, config, gpu, c), i + j, config))
    pool.sort(key=itemgetter(0, 1))
    error: LayoutError | None = None
    chosen: list[Choice] = []
    taken: Counter[tuple[object, ...]] = Counter()
    for us, _, config in [*pool, *ranked[limit:]]:
        # Diverse: a wrong guess about one tile should not spoil the whole list.
        kind = (config.tile_m, config.tile_n, config.schedule, config.swap_ab, config.split_k, config.stages)
        if taken[kind] >= 2:
            continue
        try:
            chosen.append(Choice(config, layout(config), us))
        except LayoutError as found:
            error = error or found
            continue
        taken[kind] += 1
        if len(chosen) == limit:
            break
    if not chosen:
        assert error is not None
        return error
    return chosen


# (tile_m, tile_n, schedule) of SM90, by the rows of the tile that is wanted.
_WGMMA_TILES = (
    (64, 16, "cooperative"), (64, 32, "cooperative"), (64, 64, "cooperative"), (64, 128, "cooperative"), (64, 256, "cooperative"),
    (64, 128, "pingpong"), (64, 192, "pingpong"), (64, 256, "pingpong"),
    (128, 16, "cooperative"), (128, 32, "cooperative"), (128, 64, "cooperative"), (128, 128, "cooperative"),
    (128, 192, "cooperative"), (128, 256, "cooperative"), (128, 64, "pingpong"), (128, 128, "pingpong"),
    (192, 128, "cooperative"), (192, 160, "cooperative"), (256, 64, "cooperative"), (256, 128, "cooperative"),
)  # fmt: skip
_TCGEN05_WIDTHS = (16, 32, 64, 96, 128, 160, 192, 224, 256)
_LEAST_ROWS = {"wgmma": 64, "tcgen05": 128}
_SPLITS = (2, 4, 8)
_SWAP_BELOW = 64  # rows from which a tile of 64 rows is full


def _tiles(what: Work, shape: Shape, facts: ArchFacts, gpu: Machine) -> Iterator[TileConfig]:
    """Tiles worth ranking, without clusters of their own: none twice as large as the problem, split-K where SMs would idle, and
    small tiles also two to an SM."""
    for swap in (False, True):
        rows, cols = (shape.n, shape.m) if swap else (shape.m, shape.n)
        if swap and not (shape.m < _SWAP_BELOW < shape.n or (shape.m < shape.n // 8 and shape.m <= 256)):
            continue
        seen = what.swapped() if swap else what
        for tile_m, tile_n, schedule, group in _geometries(facts):
            if (tile_m > _LEAST_ROWS[facts.mma] and tile_m >= 2 * rows) or (tile_n > 16 and tile_n >= 2 * cols):
                continue
            tiles = -(-rows // tile_m) * group * -(-cols // tile_n) * shape.l
            for split in (1, *_SPLITS):
                config = TileConfig(
                    tile_m, tile_n, 128, cluster_m=group, split_k=split, swap_ab=swap, schedule=schedule, cta_group=group
                )  # fmt: skip
                half = replace(config, stages=_half_stages(seen, config))
                resident = 1 if half.stages < 3 else _resident(seen, half, gpu)
                if split > 1:
                    useful = (
                        tiles * split <= (resident + 1) * facts.sm_count and tiles <= resident * facts.sm_count // 2
                    )
                    if (
                        not useful
                        or schedule == "pingpong"
                        or shape.k < 256 * split
                        or split * group > facts.max_cluster
                    ):
                        break
                yield config
                if resident > 1 and tiles * split > facts.sm_count:
                    yield half


def _geometries(facts: ArchFacts) -> Iterator[tuple[int, int, str, int]]:
    if facts.mma == "wgmma":
        for tile_m, tile_n, schedule in _WGMMA_TILES:
            yield tile_m, tile_n, schedule, 1
        return
    for group in (2, 1):
        for tile_n in _TCGEN05_WIDTHS:
            yield 128 * group, tile_n, "cooperative", group


def _clusters(tile: TileConfig, shape: Shape, facts: ArchFacts) -> Iterator[TileConfig]:
    """The tile with each cluster whose CTAs along M and N all have work."""
    rows, cols = (shape.n, shape.m) if tile.swap_ab else (shape.m, shape.n)
    most_m, most_n = -(-rows // tile.tile_m) * tile.cta_group, -(-cols // tile.tile_n)
    for cluster_m, cluster_n in ((2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2)):
        same = (cluster_m, cluster_n) == (tile.cluster_m, tile.cluster_n)
        fits = cluster_m * cluster_n * tile.split_k <= min(facts.max_cluster, 8)
        if not same and fits and cluster_m <= most_m and cluster_n <= most_n and cluster_m % tile.cta_group == 0:
            yield replace(tile, cluster_m=cluster_m, cluster_n=cluster_n)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step

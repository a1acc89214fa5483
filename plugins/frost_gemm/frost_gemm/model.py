"""The cost model: a closed-form time of one launch under a configuration.

It knows waves, clusters, bytes from L2 and memory, how many stages are on their way, the epilogue's exposed part and split-K; its
coefficients are fitted to measurements by ``python -m frost_gemm.calibrate``. Pure arithmetic. Imported by ``select``, ``engines`` and
``calibrate``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .config import TileConfig
from .facts import ArchFacts
from .ir import Program
from .layout import BITS, MAX_STAGES

if TYPE_CHECKING:
    from cudnn_core import DeviceInfo

__all__ = [
    "CALIBRATION",
    "Coefficients",
    "Machine",
    "Model",
    "Shape",
    "Work",
    "coefficients",
    "half_stages",
    "machine",
    "work",
]

CALIBRATION = Path(__file__).parent / "calibration"
STAGING_BYTES = 18 * 1024  # two slots of 8 KiB and the barriers; a guess that the layout makes exact
HALF_SM_BYTES = 96 * 1024  # for the ring of one of two CTAs on an SM, and its split-K sums
OVERLAP = 6  # the exponent of ``_together``; the fit to an H200's times is best between 5 and 7


class Shape(NamedTuple):
    """Sizes of a problem; of runtime ones, the hint."""

    m: int
    n: int
    k: int
    l: int = 1  # noqa: E741  the letter of the contract

    def swapped(self) -> Shape:
        return Shape(self.n, self.m, self.k, self.l)


@dataclass(frozen=True)
class Coefficients:
    """What the model multiplies with. The defaults are round figures of a Hopper; ``calibrate`` fits them.

    launch_us          from the launch to the first instruction of a CTA, and from the last one to the end
    fill_us            from there until the first operand tile has come from memory
    tile_us            between two tiles of a persistent CTA: the ring runs dry, registers are handed over
    tensor             share of the published tensor rate that the mainloop reaches (clocks fall under load)
    promote            share of that where partial sums are added in registers; promote_parts: and where a warpgroup's do not fit at once.
                       Not fitted: of an H200 under load, the settings of one problem measured by turns
    smem_bytes_per_us  that one SM's MMAs read from shared memory
    sm_bytes_per_us    that one SM loads, from L2 or memory
    ingest_bytes_per_us  that arrive in one SM: what it loads and what others multicast to it
    l2_bytes_per_us    that all SMs together load from L2
    latency_us         from asking for a stage to its bytes: no more stages than the ring holds come in meanwhile
    dram               share of the published memory rate
    store_bytes_per_us that one SM's epilogue loads and stores
    op_us              of one pointwise op on 1024 elements in one SM
    split_us           of split-K's barriers between CTAs; exchange_bytes_per_us: of one CTA's sums through distributed shared memory
    cluster_us         of one more CTA in a cluster: barriers across SMs
    tensor_flops_per_us, dram_bytes_per_us  of one SM in 16-bit types, and of the memory, where the device's rates are not published
    """

    launch_us: float = 3.0
    fill_us: float = 1.2
    tile_us: float = 0.25
    tensor: float = 0.80
    promote: float = 0.92
    promote_parts: float = 0.95
    smem_bytes_per_us: float = 220e3
    sm_bytes_per_us: float = 75e3
    ingest_bytes_per_us: float = 105e3
    l2_bytes_per_us: float = 6.5e6
    latency_us: float = 1.0
    dram: float = 0.88
    store_bytes_per_us: float = 45e3
    op_us: float = 0.004
    split_us: float = 0.5
    exchange_bytes_per_us: float = 100e3
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
    shared_bytes: int  # of a CTA
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
    return Machine(
        facts.sm_count, device.l2_cache_bytes or 50 << 20, tensor, dram, facts.shared_bytes, facts.mma == "tcgen05"
    )


@lru_cache(maxsize=8)
def coefficients(target: str, mma: str) -> Coefficients:
    """The fitted coefficients of an architecture such as "sm_90a", else the defaults of its generation."""
    path = CALIBRATION / f"{target.replace('_', '').removesuffix('a')}.json"
    if not path.is_file():
        return _DEFAULTS[mma]
    return replace(_DEFAULTS[mma], **json.loads(path.read_text())["coefficients"])


class _Side(NamedTuple):
    """The problem as a configuration sees it, straight or swapped. Bytes are of one element, dram_ ones of everything."""

    m: int
    n: int
    a_bytes: float
    b_bytes: float
    dram_a: float
    dram_rest: float
    rereads: bool  # A does not stay in L2


def _side(what: Work, shape: Shape, l2_bytes: int) -> _Side:
    m, n, k, batches = shape
    a = m * k * what.a_bytes * (batches if what.a_batched else 1)
    b = n * k * what.b_bytes * (batches if what.b_batched else 1)
    rereads = a + b > l2_bytes / 2 and a / max(1, batches) > l2_bytes / 4
    return _Side(m, n, what.a_bytes, what.b_bytes, a, b + m * n * batches * what.out_bytes, rereads)


class Model:
    """The times of one problem: ``Model(work, shape, machine, coefficients).us(config)``. About 3 us a call."""

    def __init__(self, what: Work, shape: Shape, gpu: Machine, c: Coefficients) -> None:
        self.what, self.shape, self.gpu, self.c = what, shape, gpu, c
        self.sides = _side(what, shape, gpu.l2_bytes), _side(what.swapped(), shape.swapped(), gpu.l2_bytes)
        wide = 2 if what.wide else 1
        self.flops_per_us = gpu.tensor16 * wide * c.tensor * (c.promote if what.promote else 1.0)
        self.parts = c.promote_parts if what.promote and not gpu.overlapped else 1.0
        self.dram_bytes_per_us = gpu.dram * c.dram
        self.epilogue_us = what.out_bytes / c.store_bytes_per_us + what.ops * c.op_us / 1024  # of one element

    def us(self, config: TileConfig) -> float:
        """Microseconds that one launch takes.

        A persistent CTA computes ``rounds`` tiles one after the other; that, and the memory's time for all bytes, bound the launch.
        """
        what, gpu, c = self.what, self.gpu, self.c
        tile_m, tile_n, tile_k, group = config.tile_m, config.tile_n, config.tile_k, config.cta_group
        cluster_m, cluster_n, split = config.cluster_m, config.cluster_n, config.split_k
        m, n, a_bytes, b_bytes, dram_a, dram_rest, rereads = self.sides[config.swap_ab]
        cta_m = tile_m // group
        along_n = -(-n // tile_n)
        # The last clusters along an edge hold CTAs without work.
        grid = -(-(-(-m // tile_m) * group) // cluster_m) * -(-along_n // cluster_n)
        clusters = grid * self.shape.l
        size = cluster_m * cluster_n * split
        width = tile_k if what.wide else tile_k // 2
        a_stage, b_stage = cta_m * width * a_bytes, tile_n / group * width * b_bytes
        resident, stages = self._ring(config, a_stage + b_stage, size)
        slots = _cluster_slots(gpu.sms, size) * resident
        rounds = -(-clusters // slots)
        active = min(clusters, slots) * size
        share = max(1.0, active / gpu.sms)  # CTAs that share an SM's rates

        # Every 64 rows of A meet all of B in shared memory (128 rows on tcgen05, where a pair halves B).
        rows = 128 if gpu.overlapped else 64
        smem = (cta_m + cta_m / rows * tile_n / group) * tile_k * what.gemms
        loaded = a_stage / cluster_n + b_stage * group / cluster_m
        rate = self.flops_per_us * (self.parts if tile_n > 192 or tile_m > 192 else 1.0)
        step_us = _together(
            share * 2.0 * cta_m * tile_n * width * what.gemms / rate,
            share * smem / c.smem_bytes_per_us,
            share * loaded / c.sm_bytes_per_us,
            share * (a_stage + b_stage) / c.ingest_bytes_per_us,
            loaded * active / c.l2_bytes_per_us,
            c.latency_us / max(1, stages - 1),
        )
        mainloop = max(1, -(-self.shape.k // (width * split))) * step_us
        epilogue = share * cta_m * tile_n * self.epilogue_us
        if split > 1:
            epilogue += c.split_us + cta_m * tile_n * 4 * what.gemms / c.exchange_bytes_per_us
        if (
            gpu.overlapped or share > 1 or config.schedule == "pingpong"
        ):  # hidden behind other tiles, but for the last one
            tiles_us = rounds * max(mainloop, epilogue) + epilogue
        else:
            tiles_us = rounds * (mainloop + epilogue)
        tiles_us += (rounds - 1) * c.tile_us

        if rereads:  # the tiles in flight form a block; a column of such blocks reads A once and its part of B once
            dram_a *= max(1.0, along_n / max(1.0, math.sqrt(active / split * tile_m / tile_n)))
        dram_us = (dram_a + dram_rest) / min(self.dram_bytes_per_us, active * c.sm_bytes_per_us)
        return c.launch_us + c.fill_us + size * c.cluster_us + _together(tiles_us, dram_us)

    def _ring(self, config: TileConfig, stage_bytes: float, size: int) -> tuple[int, int]:
        """CTAs on one SM (two of a small wgmma tile whose ring is kept short: ``layout.wgmma_resident`` decides), and the depth of
        the operand ring, about: staging and barriers take some, and split-K sums where they can't lie over the ring."""
        if config.stages:
            small = config.tile_m == 64 and config.tile_n * self.what.gemms <= 128 and config.schedule == "cooperative"
            half = small and not self.gpu.overlapped and config.stages <= half_stages(self.what, config)
            return (2 if half else 1), config.stages
        sums = config.tile_m * config.tile_n * 4 * self.what.gemms if size > config.split_k > 1 else 0
        room = self.gpu.shared_bytes - STAGING_BYTES - sums
        return 1, max(1, min(MAX_STAGES, int(room // stage_bytes)))


def _together(*times: float) -> float:
    """The time of things that overlap: the longest, and more where others are nearly as long."""
    return float(sum([time**OVERLAP for time in times]) ** (1 / OVERLAP))  # a list: a generator takes twice as long


def half_stages(what: Work, config: TileConfig) -> int:
    """Stages of a ring that leaves room for a second CTA on the SM."""
    a_bytes, b_bytes = (what.b_bytes, what.a_bytes) if config.swap_ab else (what.a_bytes, what.b_bytes)
    element = 1 if what.wide else 2
    stage = (config.tile_m * a_bytes + config.tile_n * b_bytes) * config.tile_k / element
    partial = config.tile_m * config.tile_n * 4 * what.gemms if config.split_k > 1 else 0
    return int((HALF_SM_BYTES - partial) / stage)


def _cluster_slots(sms: int, size: int) -> int:
    """Clusters that run at a time. A cluster lies in one GPC, whose SMs its size may not divide: a pair always fits. Measured on an
    H200: 32 clusters of 4 are more than its 132 SMs hold at a time."""
    return max(1, sms // size if size <= 2 else int(sms * 0.9) // size)

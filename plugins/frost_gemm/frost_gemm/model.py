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
from .ir import Matrix, Program
from .layout import BITS, MAX_STAGES
from .ops import TABLE

if TYPE_CHECKING:
    from cudnn_core import DeviceInfo

__all__ = [
    "CALIBRATION",
    "Coefficients",
    "Cost",
    "Machine",
    "Model",
    "Operands",
    "Shape",
    "Work",
    "coefficients",
    "cost",
    "half_stages",
    "machine",
    "work",
]

CALIBRATION = Path(__file__).parent / "calibration"
STAGING_BYTES = 18 * 1024  # two slots of 8 KiB and the barriers; a guess that the layout makes exact
HALF_SM_BYTES = 96 * 1024  # for the ring of one of two CTAs on an SM, and its split-K sums
SMALL = 8
MOVING = 4
OVERLAP = 9  # the exponent of ``_powers``; fits to an H200's times are about equal from 6 to 12


class Shape(NamedTuple):
    """Sizes of a problem; of runtime ones, the hint."""

    m: int
    n: int
    k: int
    l: int = 1  # noqa: E741  the letter of the contract


@dataclass(frozen=True)
class Coefficients:
    """What the model multiplies with. The defaults are round figures of a Hopper; ``calibrate`` fits them.

    launch_us          from the launch to the first instruction of a CTA, and from the last one to the end
    fill_us            from there until the first operand tile has come from memory
    tile_us            between two tiles of a persistent CTA: the ring runs dry, registers are handed over
    tensor             share of the published tensor rate that the mainloop reaches (clocks fall under load)
    promote            share of that where partial sums are added in registers while another warpgroup multiplies
    alone              share of that where one warpgroup at a time multiplies, and waits while it adds
    pingpong           factor of the tensor rate where the next tile's product follows at once
    smem_bytes_per_us  that one SM's MMAs read from shared memory
    sm_bytes_per_us    that one SM loads, from L2 or memory
    l2_bytes_per_us    that all SMs together load from L2
    latency_us         from asking for a stage to its bytes: no more stages than the ring holds come in meanwhile
    dram               share of the published memory rate
    store_bytes_per_us that one SM's epilogue loads and stores
    op_us              of one instruction on 1024 elements in one SM
    make_us            of one instruction on 1024 elements of an operand with a prologue, while the tensor core multiplies; of two
                       products with int8 weights, not fitted
    split_us           of split-K's barriers between CTAs; exchange_bytes_per_us: of one CTA's sums through distributed shared memory
    cluster_us         of one more CTA in a cluster: barriers across SMs
    tensor_flops_per_us, dram_bytes_per_us  of one SM in 16-bit types, and of the memory, where the device's rates are not published
    """

    launch_us: float = 3.0
    fill_us: float = 1.2
    tile_us: float = 0.25
    tensor: float = 0.80
    promote: float = 0.92
    alone: float = 0.6
    pingpong: float = 1.05
    smem_bytes_per_us: float = 220e3
    sm_bytes_per_us: float = 75e3
    l2_bytes_per_us: float = 6.5e6
    latency_us: float = 1.0
    dram: float = 0.88
    store_bytes_per_us: float = 45e3
    op_us: float = 0.001
    make_us: float = 0.018
    split_us: float = 0.5
    exchange_bytes_per_us: float = 100e3
    cluster_us: float = 0.1
    tensor_flops_per_us: float = 7.5e6
    dram_bytes_per_us: float = 4.8e6


_DEFAULTS = {
    "wgmma": Coefficients(),
    "tcgen05": Coefficients(
        sm_bytes_per_us=110e3,
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
    overlapped: bool  # the epilogue of one tile runs while the next one is multiplied, if tensor memory has room for the sums of both
    tmem_columns: int = 0
    keeps_b: bool = False  # MMAs side by side along M read B once


class Operands(NamedTuple):
    """The part of ``Work`` that a step of the mainloop depends on."""

    a_bytes: float
    b_bytes: float
    gemms: int
    wide: bool
    promote: bool
    a_made: int = 0
    b_made: int = 0


@dataclass(frozen=True)
class Work:
    """What the model reads of a program, by the program's own M and N.

    a_bytes, b_bytes   of one element of all A operands together, and of B
    out_bytes          that the epilogue moves for each output element
    ops                instructions of the epilogue on each output element, about (``ops.Row.cost``); a reduction counts as two
    wide               operands have 8-bit elements, of which the MMA multiplies twice as many
    a_made, b_made     instructions that make an element of all A operands together, or of B, from what memory holds, about
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
    a_made: int = 0
    b_made: int = 0

    @property
    def operands(self) -> Operands:
        return Operands(
            self.a_bytes, self.b_bytes, self.gemms, self.wide, self.promote, self.a_made, self.b_made
        )  # fmt: skip


def _made(matrix: Matrix) -> int:
    """Instructions that make one element: the prologue's, and those that convert it and move it."""
    return MOVING + sum(TABLE[op.name].cost for op in matrix.prologue) if matrix.prologue else 0


def work(program: Program) -> Work:
    """The part of a program that its time depends on."""
    full = sum(BITS[aux.dtype] for aux in program.aux if aux.kind == "full")
    return Work(
        a_bytes=sum(BITS[m.dtype] for m in program.a) / 8,
        b_bytes=sum(BITS[m.dtype] for m in program.b) / 8,
        out_bytes=(full + sum(BITS[store.dtype] for store in program.stores)) / 8,
        ops=sum(TABLE[op.name].cost for op in program.ops) + 2 * len(program.reductions),
        gemms=len(program.gemms),
        wide=BITS[program.a[0].mma_dtype] == 8,
        promote=program.promote,
        a_batched=any(m.batched for m in program.a),
        b_batched=any(m.batched for m in program.b),
        a_made=sum(map(_made, program.a)),
        b_made=sum(map(_made, program.b)),
    )


def machine(device: DeviceInfo, facts: ArchFacts, c: Coefficients) -> Machine:
    """The rates of a device: the published ones, or the coefficients' own."""
    peak = device.peak("bfloat16")
    tensor = peak / 1e6 / facts.sm_count if peak else c.tensor_flops_per_us
    dram = device.memory_bandwidth / 1e6 if device.memory_bandwidth else c.dram_bytes_per_us
    return Machine(
        facts.sm_count, device.l2_cache_bytes or 50 << 20, tensor, dram, facts.shared_bytes, facts.mma == "tcgen05",
        facts.tmem_columns, facts.b_collector,
    )  # fmt: skip


@lru_cache(maxsize=8)
def coefficients(target: str, mma: str) -> Coefficients:
    """The fitted coefficients of an architecture such as "sm_90a", else the defaults of its generation."""
    path = CALIBRATION / f"{target.replace('_', '').removesuffix('a')}.json"
    if not path.is_file():
        return _DEFAULTS[mma]
    return replace(_DEFAULTS[mma], **json.loads(path.read_text())["coefficients"])


class Cost(NamedTuple):
    """What no size changes of the time of one configuration, for operands of one kind on one machine.

    group       CTAs of one MMA; size: of a cluster, with split-K's; slots: clusters that run at a time
    step_k      elements of K that the CTAs of a tile take in one step
    rates       the sum of a step's times on an SM of its own, to the power ``OVERLAP``; latency: the same of the time to the first byte
    element_us  a bound below a step's time, by ``step_k``
    loaded      bytes that a CTA loads from L2 in one step; shared_a, shared_b: of A and B that others multicast to it
    area        elements of a CTA's tile
    fixed_us    of a launch; split_us of split-K
    hidden      the epilogue of one tile runs while another one is multiplied
    """

    config: TileConfig
    swap: bool
    tile_m: int
    tile_n: int
    group: int
    cluster_m: int
    cluster_n: int
    size: int
    slots: int
    step_k: int
    rates: float
    latency: float
    element_us: float
    loaded: float
    shared_a: float
    shared_b: float
    area: int
    fixed_us: float
    split_us: float
    hidden: bool


def cost(what: Operands, gpu: Machine, c: Coefficients, config: TileConfig) -> Cost:
    """The part of ``Model`` that is computed once for all problems."""
    tile_m, tile_n, tile_k, group = config.tile_m, config.tile_n, config.tile_k, config.cta_group
    cluster_m, cluster_n, split = config.cluster_m, config.cluster_n, config.split_k
    a_bytes, b_bytes = (what.b_bytes, what.a_bytes) if config.swap_ab else (what.a_bytes, what.b_bytes)
    cta_m = tile_m // group
    size = cluster_m * cluster_n * split
    width = tile_k if what.wide else tile_k // 2
    a_stage, b_stage = cta_m * width * a_bytes, tile_n / group * width * b_bytes
    resident, stages = _ring(what, gpu, config, a_stage + b_stage, size)

    # Every 64 rows of A meet all of B in shared memory (128 rows on tcgen05, where a pair halves B).
    rows = 128 if gpu.overlapped else 64
    sums = cta_m // 128 * tile_n * what.gemms  # columns of tensor memory
    reads_b = 1.0 if gpu.keeps_b else cta_m / rows
    smem = (cta_m + reads_b * tile_n / group) * tile_k * what.gemms
    loaded = a_stage / cluster_n + b_stage * group / cluster_m
    flops_per_us = gpu.tensor16 * (2 if what.wide else 1) * c.tensor * (c.promote if what.promote else 1.0)
    if config.schedule == "pingpong":
        flops_per_us *= c.pingpong
    if what.promote and (tile_m == 64 or config.schedule == "pingpong"):
        flops_per_us *= c.alone
    a_made, b_made = (what.b_made, what.a_made) if config.swap_ab else (what.a_made, what.b_made)
    rates = _powers(
        (cta_m * a_made + tile_n / group * b_made) * width * c.make_us / 1024,
        2.0 * cta_m * tile_n * width * what.gemms / flops_per_us,
        smem / c.smem_bytes_per_us,
        loaded / c.sm_bytes_per_us,
    )
    latency = _powers(c.latency_us / max(1, stages - 1))
    return Cost(
        config=config,
        swap=config.swap_ab,
        tile_m=tile_m,
        tile_n=tile_n,
        group=group,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        size=size,
        slots=_cluster_slots(gpu.sms, size) * resident,
        step_k=width * split,
        rates=rates,
        latency=latency,
        element_us=(rates + latency) ** (1 / OVERLAP) / (width * split),
        loaded=loaded,
        shared_a=a_stage - a_stage / cluster_n,
        shared_b=b_stage - b_stage * group / cluster_m,
        area=cta_m * tile_n,
        fixed_us=c.launch_us + c.fill_us + size * c.cluster_us,
        split_us=c.split_us + cta_m * tile_n * 4 * what.gemms / c.exchange_bytes_per_us if split > 1 else 0.0,
        hidden=config.schedule == "pingpong" or (gpu.overlapped and 2 * sums <= gpu.tmem_columns),
    )


class _Side(NamedTuple):
    """The problem as a configuration sees it, straight or swapped: its sizes and the bytes that memory moves."""

    m: int
    n: int
    a: float
    rest: float
    rereads: bool  # A does not stay in L2
    small_a: bool  # by far the smaller operand: all CTAs read it, at about the same time, and sharing it saves nothing
    small_b: bool


class Model:
    """The times of one problem: ``Model(work, shape, machine, coefficients).us(config)``.

    ``time`` takes the ``cost`` of the configuration instead: about 1 us a call, which ``select`` makes up to a hundred times.
    """

    def __init__(self, what: Work, shape: Shape, gpu: Machine, c: Coefficients) -> None:
        self.what, self.gpu, self.c = what, gpu, c
        m, n, self.k, self.batches = shape
        a = m * self.k * what.a_bytes * (self.batches if what.a_batched else 1)
        b = n * self.k * what.b_bytes * (self.batches if what.b_batched else 1)
        out = m * n * self.batches * what.out_bytes
        self.sides = self._side(m, n, a, b, out), self._side(n, m, b, a, out)  # by swap_ab
        self.dram_bytes_per_us = gpu.dram * c.dram
        self.epilogue_us = what.out_bytes / c.store_bytes_per_us + what.ops * c.op_us / 1024  # of one element

    def _side(self, m: int, n: int, a: float, b: float, out: float) -> _Side:
        l2 = self.gpu.l2_bytes
        return _Side(
            m, n, a, b + out, a + b > l2 / 2 and a / max(1, self.batches) > l2 / 4, a * SMALL < b, b * SMALL < a
        )

    def us(self, config: TileConfig) -> float:
        """Microseconds that one launch takes."""
        return self.time(cost(self.what.operands, self.gpu, self.c, config))

    def least(self, cost: Cost, clusters: int) -> float:
        """A bound below ``time``, quick to find, for a configuration that computes the problem with so many clusters.

        ``time`` is ``fixed_us`` and the root of a sum, which is not below the tiles' own time; that is not below ``rounds * mainloop +
        epilogue``, whether epilogues are hidden or not; a mainloop has at least K / ``step_k`` steps, each of at least what its rates
        and its latency give without L2; and sharing an SM only adds to steps and epilogues. The last factor exceeds all rounding.
        """
        rounds = -(-clusters // cost.slots)
        mainloops = rounds * self.k * cost.element_us
        return (cost.fixed_us + mainloops + cost.area * self.epilogue_us + cost.split_us) * (1 - 1e-9)

    def time(self, cost: Cost) -> float:
        """Microseconds that one launch takes.

        A persistent CTA computes ``rounds`` tiles one after the other; that, and the memory's time for all bytes, bound the launch.
        """
        (
            config, swap, tile_m, tile_n, group, cluster_m, cluster_n, size, slots, step_k, rates, latency, _, loaded,
            shared_a, shared_b, area, fixed_us, split_us, hidden,
        ) = cost  # fmt: skip
        c, sms = self.c, self.gpu.sms
        m, n, dram_a, dram_rest, rereads, small_a, small_b = self.sides[swap]
        along_n = -(-n // tile_n)
        # The last clusters along an edge hold CTAs without work.
        clusters = -(-(-(-m // tile_m) * group) // cluster_m) * -(-along_n // cluster_n) * self.batches
        if clusters > slots:
            rounds, active = -(-clusters // slots), slots * size
        else:
            rounds, active = 1, clusters * size
        if small_a:
            loaded += shared_a
        elif small_b:
            loaded += shared_b
        epilogue = area * self.epilogue_us
        if active > sms:  # CTAs share an SM's rates, and hide each other's epilogues
            share, hidden = active / sms, True
            rates *= share**OVERLAP
            epilogue *= share
        epilogue += split_us

        step_us = (rates + (loaded * active / c.l2_bytes_per_us) ** OVERLAP + latency) ** (1 / OVERLAP)
        mainloop = -(-self.k // step_k) * step_us
        if hidden:  # behind other tiles, but for the last one
            tiles_us = rounds * (mainloop if mainloop > epilogue else epilogue) + epilogue
        else:
            tiles_us = rounds * (mainloop + epilogue)
        tiles_us += (rounds - 1) * c.tile_us

        if rereads:  # the tiles in flight form a block; a column of such blocks reads A once and its part of B once
            dram_a *= max(1.0, along_n / max(1.0, math.sqrt(active / config.split_k * tile_m / tile_n)))
        dram_us = (dram_a + dram_rest) / min(self.dram_bytes_per_us, active * c.sm_bytes_per_us)
        us: float = fixed_us + (tiles_us**OVERLAP + dram_us**OVERLAP) ** (1 / OVERLAP)
        return us


def _powers(*times: float) -> float:
    """The sum of ``times`` to the power ``OVERLAP``; its root is the time of things that overlap: the longest, and more where others
    are nearly as long."""
    return float(sum([time**OVERLAP for time in times]))  # a list: a generator takes twice as long


def _ring(what: Operands, gpu: Machine, config: TileConfig, stage_bytes: float, size: int) -> tuple[int, int]:
    """CTAs on one SM (two of a small wgmma tile whose ring is kept short: ``layout.wgmma_resident`` decides), and the depth of
    the operand ring, about: staging and barriers take some, and split-K sums where they can't lie over the ring."""
    if config.stages:
        small = config.tile_m == 64 and config.tile_n * what.gemms <= 128 and config.schedule == "cooperative"
        half = small and not gpu.overlapped and config.stages <= half_stages(what, config)
        return (2 if half else 1), config.stages
    sums = config.tile_m * config.tile_n * 4 * what.gemms if size > config.split_k > 1 else 0
    room = gpu.shared_bytes - STAGING_BYTES - sums
    return 1, max(1, min(MAX_STAGES, int(room // stage_bytes)))


def half_stages(what: Operands, config: TileConfig) -> int:
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

"""The layout of the Hopper kernel: what fits, what is declined and why. Needs no DSL but for one test."""

from dataclasses import replace
from itertools import product

import pytest
from frost_gemm.config import TileConfig
from frost_gemm.facts import arch_facts
from frost_gemm.ir import Gemm, Matrix, Op, Program, Ref, Store
from frost_gemm.layout import (
    BARRIER_BYTES,
    WGMMA_REGISTERS,
    LayoutError,
    plan_layout,
    wgmma_promoted_columns,
    wgmma_resident,
    wgmma_warpgroups,
)

from cudnn_core import DeviceInfo

KIB = 1024
FACTS = arch_facts(DeviceInfo.preset("H200"))
CONFIGS = [
    TileConfig(m, n, k, cluster_m, cluster_n, split_k, schedule=schedule)
    for m, n, k, cluster_m, cluster_n, split_k, schedule in product(
        (64, 128, 192, 256), (8, 24, 40, 64, 128, 192, 256), (64, 128, 256), (1, 2), (1, 2), (1, 2), ("cooperative", "pingpong")
    )
]  # fmt: skip


ABS = Op("abs", (Ref("val", -1),), "bfloat16")
NARROW = Matrix("int8", "mn", mma_dtype="bfloat16", prologue=(ABS,))  # lines of 8 bytes in a tile of 8 columns


def program(
    a="bfloat16", b=None, stores=(("float32", "n", 16),), gemms=1, b_major="k", ops=(), promote=False, **matrix
):
    accumulate = "int32" if matrix.get("mma_dtype", a) == "int8" else "float32"
    return Program(
        a=(Matrix(a, **matrix),),
        b=tuple(Matrix(b or a, b_major) for _ in range(gemms)),
        gemms=tuple(Gemm(0, i) for i in range(gemms)),
        stores=tuple(Store(Ref("acc", 0), *store) for store in stores),
        ops=ops,
        accumulate=accumulate,
        promote=promote,
    )


def plans(**options):
    """Every configuration that fits, with its layout."""
    for config in CONFIGS:
        try:
            yield config, plan_layout(program(**options), config, FACTS)
        except LayoutError:
            continue


def declined(config, made):
    with pytest.raises(LayoutError) as error:
        plan_layout(made, config, FACTS)
    return error.value.code, error.value.subject


OPTIONS = [
    {},
    {"a": "fp8_e4m3", "promote": True},
    {"gemms": 2},
    {"stores": (("bfloat16", "n", 16), ("fp8_e4m3", "n", 16), ("float32", "m", 16))},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_shared_memory_is_the_sum_of_its_parts_and_fits(options):
    found = 0
    for config, layout in plans(**options):
        made = program(**options)
        partials = 0 if layout.partials_in_ring else layout.partial_bytes
        fixed = BARRIER_BYTES + layout.staging_slots * layout.staging_bytes + partials
        slack = layout.shared_bytes - fixed - layout.stages * layout.stage_bytes
        assert 0 <= slack < KIB * (len(made.a) + len(made.b)), "only the alignment of the rings"
        assert layout.stages >= 2
        assert layout.shared_bytes <= FACTS.shared_bytes
        assert layout.stage_bytes == len(made.a) * layout.a_bytes + len(made.b) * layout.b_bytes
        assert (layout.a_bytes, layout.b_bytes) == (config.tile_m * config.tile_k, config.tile_n * config.tile_k)
        assert 2 * 8 * layout.stages + 64 <= BARRIER_BYTES
        found += 1
    assert found > 100


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_more_stage_never_fits(options):
    for config, layout in plans(**options):
        if layout.stages < 32 and not layout.partial_bytes:
            assert declined(replace(config, stages=layout.stages + 1), program(**options)) == (
                "device.smem",
                "knob:stages",
            )


def test_sums_of_a_split_lie_over_the_ring_only_where_no_multicast_comes_in():
    seen = set()
    for config, layout in plans():
        assert bool(layout.partial_bytes) == (config.split_k > 1)
        if layout.partials_in_ring:
            assert config.cluster_m == config.cluster_n == 1
            assert layout.partial_bytes == config.tile_m * config.tile_n * 4 <= layout.stages * layout.stage_bytes
        seen.add((config.split_k > 1, layout.partials_in_ring))
    assert seen == {(False, False), (True, False), (True, True)}


def test_operands_with_a_prologue_lie_as_in_memory_and_in_two_slots_as_they_are_multiplied():
    made = program("int8", "bfloat16", mma_dtype="bfloat16", prologue=(ABS,))
    layout = plan_layout(made, TileConfig(), FACTS)
    assert layout.raw_bytes == (128 * 64, 0)
    assert layout.stage_bytes == 128 * 64 + layout.b_bytes
    rings = layout.stages * layout.stage_bytes
    staged = layout.staging_slots * layout.staging_bytes
    assert layout.shared_bytes == BARRIER_BYTES + rings + staged + 2 * layout.a_bytes


def test_drained_parts_cover_the_tile_exactly():
    for config, layout in plans(stores=(("bfloat16", "n", 16), ("float32", "m", 16))):
        assert config.tile_n % layout.epi_n == 0
        rows = config.tile_m // (1 if config.schedule == "pingpong" else wgmma_warpgroups(config))
        assert rows % layout.epi_m == 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_registers_of_all_threads_fit_the_register_file(options):
    for config, layout in plans(**options):
        warpgroups = wgmma_warpgroups(config)
        consumer, loader = WGMMA_REGISTERS[warpgroups]
        assert layout.threads == 128 * (1 + warpgroups)
        assert 128 * (warpgroups * consumer + loader) <= 65536
        assert consumer % 8 == loader % 8 == 0
        # PTX ISA, setmaxnreg: a warpgroup waits until the registers that it asks for are free.
        at_launch = min(255, 65536 // layout.threads) // 8 * 8
        assert loader <= at_launch


def test_sums_that_registers_cannot_hold_are_declined():
    tight = ("knob.domain", "knob:tile_n")
    assert declined(TileConfig(256, 256), program()) == tight
    assert declined(TileConfig(128, 256, schedule="pingpong"), program()) == tight
    assert declined(TileConfig(128, 256), program(gemms=2)) == tight
    assert declined(TileConfig(192, 256), program()) == tight
    assert plan_layout(program(gemms=2), TileConfig(128, 128), FACTS)


def test_promoted_sums_share_the_registers():
    fp8 = program("fp8_e4m3", promote=True)
    for config, _ in plans(a="fp8_e4m3", promote=True):
        columns = wgmma_promoted_columns(fp8, config)
        assert config.tile_n % columns == 0
        assert columns % 8 == 0
    assert wgmma_promoted_columns(fp8, TileConfig(128, 128)) == 128
    assert wgmma_promoted_columns(fp8, TileConfig(128, 256)) == 128
    assert wgmma_promoted_columns(program("fp8_e4m3"), TileConfig(128, 256)) == 256


def test_two_small_kernels_share_an_sm():
    def resident(config, **options):
        made = program(**options)
        return wgmma_resident(made, config, plan_layout(made, config, FACTS).shared_bytes)

    assert resident(TileConfig(64, 64, stages=4)) == 2
    assert resident(TileConfig(64, 64)) == 1  # a long ring
    assert resident(TileConfig(64, 192, stages=2)) == 1  # too many registers
    assert resident(TileConfig(128, 32, stages=2)) == 1  # too many threads


ALIGNED, PACKED = ("bfloat16", "n", 16), ("bfloat16", "n", 2)


@pytest.mark.parametrize(
    ("store", "columns", "mode"),
    [
        (ALIGNED, 64, "tma"),
        (PACKED, 64, "vector"),
        (("bfloat16", "", 16), 64, "vector"),
        (("fp8_e4m3", "n", 16), 24, "vector"),  # 8 bytes: TMA copies 16 at a time
        (("fp8_e4m3", "m", 16), 24, "tma"),
        (("float32", "n", 0), 64, "vector"),
    ],
)
def test_store_modes(store, columns, mode):
    layout = plan_layout(program(stores=(store,)), TileConfig(64, columns), FACTS)
    assert layout.store_modes == (mode,)
    assert (layout.staging_bytes > 0) == (mode == "tma")


def test_staging_of_a_warpgroup_stays_small():
    for stores in ((ALIGNED,), (("float32", "n", 16),), (ALIGNED, ("float32", "m", 16)), (ALIGNED,) * 4):
        for config, layout in plans(stores=stores):
            assert layout.staging_bytes <= 8 * KIB * wgmma_warpgroups(config)


def test_epilogues_that_compute_drain_fewer_columns():
    op = Op("abs", (Ref("acc", 0),), "float32")
    plain, computing = (plan_layout(program(stores=(ALIGNED,), ops=ops), TileConfig(), FACTS) for ops in ((), (op,)))
    assert (plain.epi_n, computing.epi_n) == (64, 32)


@pytest.mark.parametrize(
    ("made", "config", "reason"),
    [
        (program("fp8_e4m3", b_major="mn"), TileConfig(), ("layout.order", "B0")),
        (program("int8", major="mn"), TileConfig(), ("layout.order", "A0")),
        (program("bfloat16", "float16"), TileConfig(), ("dtype.mixed", "A, B")),
        (program("float32"), TileConfig(), ("dtype.mixed", "A, B")),
        (replace(program("int8"), accumulate="float32"), TileConfig(), ("dtype.compute", "matmul")),
        (program(promote=True), TileConfig(), ("op.pattern", "promote")),
        (program(alignment=8), TileConfig(), ("layout.alignment", "A0")),
        (program(alignment=0), TileConfig(), ("layout.alignment", "A0")),
        (program("int8", "bfloat16", mma_dtype="bfloat16"), TileConfig(), ("op.pattern", "A0")),
        (program(prologue=(ABS,)), TileConfig(64, 64, schedule="pingpong"), ("knob.domain", "knob:schedule")),
        (program("int8", "bfloat16", mma_dtype="bfloat16", prologue=(ABS,)), TileConfig(128, 64, tile_k=16), ("knob.domain", "knob:tile_k")),
        (replace(program("bfloat16", b_major="mn"), b=(NARROW,)), TileConfig(64, 8), ("knob.domain", "B0")),
        (program("fp8_e4m3", prologue=(ABS,), promote=True), TileConfig(), ("op.pattern", "A0")),
        (program("int8"), TileConfig(64, 40), ("knob.domain", "knob:tile_n")),
        (program(), TileConfig(96), ("knob.domain", "knob:tile_m")),
        (program(), TileConfig(256, 64, schedule="pingpong"), ("knob.domain", "knob:tile_m")),
        (program(), TileConfig(128, 12), ("knob.domain", "knob:tile_n")),
        (program(), TileConfig(64, 264), ("knob.domain", "knob:tile_n")),
        (program(), TileConfig(tile_k=96), ("knob.domain", "knob:tile_k")),
        (program(), TileConfig(cta_group=2), ("knob.domain", "knob:cta_group")),
        (program(), TileConfig(schedule="static"), ("knob.domain", "knob:schedule")),
        (program(), TileConfig(64, 64, cluster_m=4, cluster_n=4), ("knob.domain", "cluster")),
        (program(), TileConfig(64, 24, cluster_m=2), ("knob.domain", "knob:tile_n")),
        (program(), TileConfig(192, 192, cluster_m=3), ("knob.domain", "knob:cluster_m")),
        (program(b_major="mn"), TileConfig(64, 64, tile_k=32, cluster_m=4), ("knob.domain", "knob:tile_k")),
        (program(), TileConfig(split_k=0), ("knob.domain", "knob:split_k")),
        (program(), TileConfig(64, 64, split_k=2, schedule="pingpong"), ("knob.domain", "knob:split_k")),
        (program(), TileConfig(64, 64, cluster_m=4, schedule="pingpong"), ("knob.domain", "knob:schedule")),
        (program(), TileConfig(stages=1), ("device.smem", "knob:stages")),
        (program(gemms=3), TileConfig(64, 128, tile_k=256), ("device.smem", "knob:stages")),
    ],
)  # fmt: skip
def test_declines_name_the_culprit(made, config, reason):
    assert declined(config, made) == reason


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_kernel_carves_shared_memory_as_the_layout_says(options):
    pytest.importorskip("cutlass")
    from frost_gemm.kernels.wgmma import WgmmaKernel

    for config, layout in plans(**options):
        WgmmaKernel(program(**options), config, layout, FACTS)
    with pytest.raises(AssertionError, match="shared memory ends"):
        WgmmaKernel(program(**options), config, replace(layout, shared_bytes=layout.shared_bytes + 1024), FACTS)

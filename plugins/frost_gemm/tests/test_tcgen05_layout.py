"""The layout of the Blackwell and Rubin kernel: what fits, what is declined and why. Needs no DSL."""

from dataclasses import replace
from itertools import product

import pytest
from frost_gemm.config import TileConfig
from frost_gemm.facts import arch_facts
from frost_gemm.ir import Gemm, Matrix, Op, Program, Ref, Store
from frost_gemm.issue import issues
from frost_gemm.layout import BARRIER_BYTES, LayoutError, plan_layout

import cudnn_core
from cudnn_core import DeviceInfo

KIB = 1024
CONFIGS = [
    TileConfig(128 * blocks * group, n, k, cluster_m * group, cluster_n, split_k, cta_group=group)
    for blocks, group, n, k, cluster_m, cluster_n, split_k in product(
        (1, 2), (1, 2), (16, 48, 96, 128, 256), (64, 128, 256), (1, 2), (1, 4), (1, 2)
    )
]  # fmt: skip


def facts(device="B200", **changes):
    return replace(arch_facts(DeviceInfo.preset(device)), **changes)


def program(a="bfloat16", b=None, stores=(("float32", "n", 16),), gemms=1, b_major="k", accumulate=None, **matrix):
    return Program(
        a=(Matrix(a, **matrix),),
        b=tuple(Matrix(b or a, b_major) for _ in range(gemms)),
        gemms=tuple(Gemm(0, i) for i in range(gemms)),
        stores=tuple(Store(Ref("acc", 0), *store) for store in stores),
        accumulate=accumulate or ("int32" if a == "int8" else "float32"),
    )


def plans(device="B200", **options):
    """Every configuration that fits, with its layout."""
    for config in CONFIGS:
        try:
            yield config, plan_layout(program(**options), config, facts(device))
        except LayoutError:
            continue


def declined(config, made, device="B200", **changes):
    with pytest.raises(LayoutError) as error:
        plan_layout(made, config, facts(device, **changes))
    return error.value.code, error.value.subject


OPTIONS = [
    {},
    {"a": "fp8_e4m3"},
    {"gemms": 2},
    {"stores": (("bfloat16", "n", 16), ("fp8_e4m3", "n", 16), ("float32", "m", 16))},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_shared_memory_is_the_sum_of_its_parts_and_fits(options):
    found = 0
    for config, layout in plans(**options):
        made = program(**options)
        operands = layout.stages * layout.stage_bytes
        fixed = BARRIER_BYTES + layout.staging_slots * layout.staging_bytes + layout.partial_bytes
        slack = layout.shared_bytes - fixed - operands
        assert 0 <= slack < KIB * (len(made.a) + len(made.b)), "only the alignment of the rings"
        assert layout.stages >= 2
        assert layout.shared_bytes <= facts().shared_bytes
        assert layout.stage_bytes == len(made.a) * layout.a_bytes + len(made.b) * layout.b_bytes
        assert config.cta_group * layout.a_bytes == config.tile_m * config.tile_k
        assert config.cta_group * layout.b_bytes == config.tile_n * config.tile_k
        found += 1
    assert found > 20


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_more_stage_never_fits(options):
    for config, layout in plans(**options):
        if layout.stages < 16:
            assert declined(replace(config, stages=layout.stages + 1), program(**options)) == (
                "device.smem",
                "knob:stages",
            )
        fewer = plan_layout(program(**options), replace(config, stages=2), facts())
        assert (fewer.stages, fewer.epi_n) == (2, layout.epi_n)


def test_drained_parts_cover_the_tile_exactly():
    for config, layout in plans():
        assert config.tile_n % layout.epi_n == 0
        assert layout.epi_m == 128
        assert layout.blocks * layout.epi_m * config.cta_group == config.tile_m
        spans = range(0, config.tile_n, layout.epi_n)
        assert sorted(column for start in spans for column in range(start, start + layout.epi_n)) == list(
            range(config.tile_n)
        )


@pytest.mark.parametrize(("device", "columns"), [("B200", 512), ("B300", 512), ("R200", 576)])
@pytest.mark.parametrize("gemms", [1, 2, 3])
def test_tensor_memory_holds_every_accumulator_in_a_legal_allocation(gemms, device, columns):
    """A power of two up to 512 columns; all 576 of 10.7 only where 512 do not hold them."""
    stages = set()
    for config, layout in plans(device, gemms=gemms):
        used = layout.acc_stages * layout.blocks * gemms * config.tile_n
        assert used <= layout.tmem_columns <= columns
        assert layout.tmem_columns >= 32
        assert layout.tmem_columns.bit_count() == 1 or (layout.tmem_columns == 576 and used > 512)
        assert layout.acc_stages == 2 or 2 * used > columns
        stages.add(layout.acc_stages)
    assert 2 in stages


@pytest.mark.parametrize(
    ("config", "gemms", "elsewhere"),
    [
        (TileConfig(256, 144, 128), 1, 1), (TileConfig(128, 96, 128), 3, 1), (TileConfig(128, 192, 64), 3, None),
        (TileConfig(512, 96, 128, 2, cta_group=2), 3, None),
    ],
    ids=str,
)  # fmt: skip
def test_the_columns_that_one_part_alone_has_are_used_where_sums_need_them(config, gemms, elsewhere):
    """A second accumulator, or the only one, that other parts have no room for (``elsewhere``: how many those have)."""
    layout = plan_layout(program(gemms=gemms), config, facts("R200"))
    assert layout.tmem_columns == 576 == layout.acc_stages * layout.blocks * gemms * config.tile_n
    if elsewhere:
        assert plan_layout(program(gemms=gemms), config, facts()).acc_stages == elsewhere
    else:
        assert declined(config, program(gemms=gemms)) == ("knob.domain", "knob:tile_n")


def test_accumulators_that_do_not_fit_are_declined():
    assert declined(TileConfig(128, 256, 64), program(gemms=3)) == ("knob.domain", "knob:tile_n")
    assert plan_layout(program(gemms=2), TileConfig(128, 256, 64), facts()).acc_stages == 1
    assert declined(TileConfig(256, 256, 64), program(gemms=2)) == ("knob.domain", "knob:tile_n")
    assert plan_layout(program(), TileConfig(256, 256, 64), facts()).acc_stages == 1


def test_two_blocks_of_rows_are_declined_where_a_has_a_prologue():
    made = Matrix("int8", mma_dtype="bfloat16", prologue=(Op("identity", (Ref("val", -1),), "bfloat16"),))
    config = TileConfig(256, 64, 128)
    assert declined(config, replace(program(), a=(made,))) == ("knob.domain", "knob:tile_m")
    assert plan_layout(replace(program(), b=(made,)), config, facts()).blocks == 2


def test_the_manifest_has_every_height():
    knobs = cudnn_core.registry().get("frost_gemm:sm100_tcgen05").spec.knobs
    assert sorted(knobs["tile_m"].choices) == sorted({config.tile_m for config, _ in plans()})


@pytest.mark.parametrize("device", ["B200", "B300", "R200"])
def test_operands_are_kept_where_the_part_keeps_them(device):
    """A by every part, B by 10.7 alone."""
    gemms = (Gemm(0, 0), Gemm(0, 1))
    rubin = device == "R200"
    assert issues(gemms[:1], 1, facts(device)) == ((0, 0, "discard", "discard"),)
    assert issues(gemms, 1, facts(device)) == ((0, 0, "fill", "discard"), (1, 0, "lastuse", "discard"))
    kept = ("fill", "lastuse") if rubin else ("discard", "discard")
    assert issues(gemms[:1], 2, facts(device)) == ((0, 0, "discard", kept[0]), (0, 1, "discard", kept[1]))
    if not rubin:
        a = "fill", "lastuse"
        order = (0, 0), (1, 0), (0, 1), (1, 1)
        assert issues(gemms, 2, facts(device)) == tuple((g, m, a[g], "discard") for g, m in order)
    assert issues(gemms, 2, facts(device, a_collector=False, b_collector=False))[0][2:] == ("discard", "discard")


@pytest.mark.parametrize("device", ["B200", "R200"])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("pairs", [((0, 0),), ((0, 0), (0, 1)), ((0, 1), (1, 0), (1, 1)), ((0, 0), (0, 0), (0, 1))])
def test_every_product_of_every_block_is_issued_once_and_uses_what_was_kept(pairs, blocks, device):
    gemms = tuple(Gemm(*pair) for pair in pairs)
    order = issues(gemms, blocks, facts(device))
    assert sorted((one.gemm, one.block) for one in order) == list(product(range(len(gemms)), range(blocks)))
    held = {"a": None, "b": None}
    for i, one in enumerate(order):
        operands = {"a": (gemms[one.gemm].a, one.block), "b": gemms[one.gemm].b}
        for name, operand in operands.items():
            word = getattr(one, name)
            assert word not in ("use", "lastuse") or held[name] == operand
            assert word not in ("fill", "use") or i + 1 < len(order), "what is filled is used"
            held[name] = operand if word in ("fill", "use") else None
    if device == "B200":
        assert {one.b for one in order} == {"discard"}
    elif blocks == 2:
        assert "discard" not in {one.b for one in order}


def test_rings_stay_within_the_reach_of_a_matrix_descriptor():
    """Start addresses have 14 bits of 16-byte units: the end of the rings, not the end of shared memory, is below 256 KiB."""
    large = facts("R200", shared_bytes=400 * KIB)
    outputs = tuple(("float32", "n", 16) for _ in range(4))
    for n, tile_k in product((16, 48, 256), (64, 128)):
        layout = plan_layout(program(stores=outputs), TileConfig(128, n, tile_k), large)
        staging = layout.staging_slots * layout.staging_bytes
        rings_end = KIB + layout.shared_bytes - staging
        assert rings_end <= 256 * KIB
        assert rings_end > 256 * KIB - layout.stage_bytes - 2 * KIB or layout.stages == 16
    assert (
        plan_layout(program(), TileConfig(128, 256, 128), large).stages
        > plan_layout(program(), TileConfig(128, 256, 128), facts()).stages
    )


def test_a_part_that_reports_no_oversized_memory_gets_none():
    for device in ("B200", "B300"):
        assert facts(device).shared_bytes == 227 * KIB


@pytest.mark.parametrize(
    ("store", "mode"),
    [
        (("bfloat16", "n", 16), "tma"), (("fp8_e5m2", "n", 32), "tma"), (("float32", "n", 8), "vector"), (("float32", "n", 0), "vector"),
        (("float32", "m", 16), "vector"), (("float32", "", 16), "vector"),
    ],
)  # fmt: skip
def test_only_aligned_rows_are_stored_by_tma(store, mode):
    layout = plan_layout(program(stores=(store,)), TileConfig(128, 64, 128), facts())
    assert layout.store_modes == (mode,)
    assert bool(layout.staging_bytes) == (mode == "tma")


@pytest.mark.parametrize("alignment", [0, 1, 4, 8, 12, 24])
def test_strides_that_a_tensor_map_cannot_hold_are_declined(alignment):
    assert declined(TileConfig(128, 64, 128), program(alignment=alignment)) == ("layout.alignment", "A0")


@pytest.mark.parametrize(
    ("changes", "knob"),
    [
        ({"tile_m": 64}, "tile_m"), ({"tile_m": 384}, "tile_m"), ({"tile_m": 512}, "tile_m"), ({"tile_n": 8}, "tile_n"), ({"tile_n": 40}, "tile_n"),
        ({"tile_n": 272}, "tile_n"), ({"tile_k": 32}, "tile_k"), ({"tile_k": 96}, "tile_k"), ({"cluster_n": 3}, "cluster_n"),
        ({"cluster_m": 0}, "cluster_m"), ({"split_k": 3}, "split_k"), ({"cta_group": 3}, "cta_group"),
        ({"tile_n": 16, "cluster_m": 4}, "tile_n"), ({"cta_group": 2, "tile_m": 128, "cluster_m": 2}, "tile_m"),
        ({"cta_group": 2, "tile_m": 384, "cluster_m": 2}, "tile_m"), ({"cta_group": 2, "tile_m": 1024, "cluster_m": 2}, "tile_m"),
        ({"cta_group": 2, "tile_m": 256}, "cluster_m"), ({"cta_group": 2, "tile_m": 256, "tile_n": 48, "cluster_m": 4}, "tile_n"),
    ],
    ids=str,
)  # fmt: skip
def test_tiles_that_the_matrix_unit_or_the_cluster_cannot_do_are_declined(changes, knob):
    assert declined(replace(TileConfig(128, 128, 128), **changes), program()) == ("knob.domain", f"knob:{knob}")


def test_clusters_beyond_the_hardware_are_declined():
    config = TileConfig(128, 128, 128, 4, 4)
    assert plan_layout(program(), config, facts()).stages
    assert declined(replace(config, split_k=2), program()) == ("knob.domain", "cluster")
    assert declined(config, program(), max_cluster=8) == ("knob.domain", "cluster")


@pytest.mark.parametrize("width", range(16, 257, 16))
def test_the_halves_of_a_pair_are_those_that_the_compiler_can_lay_out(width):
    """With others it ends the process, and no error could be raised."""
    pair = TileConfig(256, width, 128, 2, cta_group=2)
    if width == 16 or width % 32 == 0:
        assert plan_layout(program(), pair, facts()).stages
    else:
        assert declined(pair, program()) == ("knob.domain", "knob:tile_n")
    assert plan_layout(program(), replace(pair, tile_m=128, cluster_m=1, cta_group=1), facts()).stages


@pytest.mark.parametrize(("a", "step"), [("bfloat16", 16), ("fp8_e4m3", 32)])
def test_a_transposed_8_bit_b_needs_wider_tiles_in_a_pair(a, step):
    pair = TileConfig(256, step, 128, 2, cta_group=2)
    made = program(a, b_major="mn")
    assert plan_layout(made, pair, facts()).stages
    assert declined(replace(pair, tile_n=step // 2), made) == ("knob.domain", "knob:tile_n")
    alone = replace(pair, tile_m=128, tile_n=16, cluster_m=1, cta_group=1)
    assert plan_layout(made, alone, facts()).stages


@pytest.mark.parametrize(
    ("made", "device", "expected"),
    [
        (program("int8"), "B300", ("dtype.unsupported", "A0")),
        (program("int8"), "R200", ("dtype.unsupported", "A0")),
        (program("uint8"), "B200", ("dtype.mixed", "A, B")),
        (program("float32"), "B200", ("dtype.mixed", "A, B")),
        (program("bfloat16", "float16"), "B200", ("dtype.mixed", "A, B")),
        (program("fp8_e4m3", "bfloat16"), "B200", ("dtype.mixed", "A, B")),
        (program("int8", accumulate="float32"), "B200", ("dtype.compute", "matmul")),
        (program("bfloat16", accumulate="int32"), "B200", ("dtype.compute", "matmul")),
        (program("int8", mma_dtype="bfloat16"), "B200", ("op.pattern", "A0")),
    ],
    ids=str,
)
def test_operands_that_the_matrix_unit_cannot_multiply_are_declined(made, device, expected):
    assert declined(TileConfig(128, 64, 128), made, device) == expected


@pytest.mark.parametrize("device", ["B200", "B300", "R200"])
@pytest.mark.parametrize(("a", "b"), [("bfloat16", None), ("float16", None), ("fp8_e4m3", "fp8_e5m2")])
def test_every_part_multiplies_its_floats(device, a, b):
    assert plan_layout(program(a, b), TileConfig(256, 256, 128, 2, cta_group=2), facts(device)).stages >= 3


@pytest.mark.parametrize(
    ("dtype", "mma", "share"), [("int8", "bfloat16", 2), ("bfloat16", "bfloat16", 1), ("fp8_e5m2", "fp8_e4m3", 1)]
)
def test_an_operand_with_a_prologue_has_a_second_ring(dtype, mma, share):
    made = program(mma)
    weights = Matrix(dtype, mma_dtype=mma, prologue=(Op("identity", (Ref("val", -1),), mma),))
    made = replace(made, b=(weights,))
    plain, fused = (plan_layout(p, TileConfig(128, 64, 128, stages=2), facts()) for p in (program(mma), made))
    assert fused.raw_bytes == (0, fused.b_bytes // share)
    assert fused.stage_bytes == plain.stage_bytes + fused.b_bytes // share
    assert fused.shared_bytes == plain.shared_bytes + 2 * fused.b_bytes // share
    assert fused.threads == plain.threads + 128


def test_operands_wider_than_what_is_multiplied_are_declined():
    wide = Matrix("float32", mma_dtype="bfloat16", prologue=(Op("identity", (Ref("val", -1),), "bfloat16"),))
    assert declined(TileConfig(128, 64, 128), replace(program(), a=(wide,))) == ("dtype.unsupported", "A0")


def test_one_slot_of_sums_passes_between_parts_of_k():
    """The sums go along a chain, so that shared memory does not grow with the number of parts."""
    base = TileConfig(128, 128, 128, split_k=2)
    layouts = [plan_layout(program(gemms=2), replace(base, split_k=parts), facts()) for parts in (2, 4, 8, 16)]
    assert {layout.partial_bytes for layout in layouts} == {2 * 2 * 128 * layouts[0].epi_n * 4}
    assert plan_layout(program(gemms=2), replace(base, split_k=1), facts()).partial_bytes == 0

"""The Hopper GEMM kernel in the emulator: exact against numpy, free of findings. Shapes have tails along M, N and K."""

import re
from dataclasses import replace

import pytest
from frost_gemm.config import TileConfig
from frost_gemm.ir import Aux, Gemm, Matrix, Op, Program, Reduction, Ref, Store

pytest.importorskip("cutlass")
pytest.importorskip("ptx_emulator")
import ptx_emulator
from _wgmma import Operands, compiled, facts, plain, run
from frost_gemm.layout import plan_layout

ACC, VAL, AUX = (lambda i, kind=kind: Ref(kind, i) for kind in ("acc", "val", "aux"))


def tile(m=128, n=128, **knobs):
    return TileConfig(m, n, **knobs)


def pingpong(m=64, n=128, **knobs):
    return TileConfig(m, n, schedule="pingpong", **knobs)


def gated(dtype="bfloat16", **options):
    """Gate and up: one A, two B, both sums stored."""
    return Program(
        a=(Matrix(dtype),), b=(Matrix(dtype), Matrix(dtype)), gemms=(Gemm(0, 0), Gemm(0, 1)),
        stores=(Store(ACC(0), "bfloat16"), Store(ACC(1), "float32", "m")), **options,
    )  # fmt: skip


# name: program, configuration, (M, N, K, batches), SMs: fewer than tiles, so that the grid is persistent
CASES = {
    "64 rows": (plain(), tile(64, 64), (200, 136, 136, 2), 3),
    "128 rows": (plain(), tile(), (200, 264, 136, 1), 2),
    "192 rows": (plain(), tile(192, 64), (400, 136, 72, 1), 2),
    "256 rows": (plain(out="bfloat16"), tile(256), (300, 264, 136, 1), 2),
    "256 columns": (plain(out="bfloat16"), tile(128, 256), (200, 264, 136, 1), 2),
    "8 columns": (plain(), tile(64, 8), (130, 20, 136, 1), 3),
    "24 columns": (plain("float16"), tile(64, 24), (130, 60, 136, 1), 3),
    "72 columns, short stage": (plain(), tile(128, 72, tile_k=32), (130, 100, 72, 1), 2),
    "long stage": (plain(), tile(128, 16, tile_k=256), (200, 16, 300, 1), 2),
    "operand read once": (plain(), tile(64, 16, stages=3), (200, 16, 700, 2), 3),
    "operand read once, split": (plain(), tile(64, 64, stages=3, split_k=2), (60, 200, 900, 1), 4),
    "odd sizes": (plain(), tile(64, 32), (67, 35, 71, 3), 4),
    "one element": (plain(), tile(64, 64, cluster_m=2, cluster_n=2), (1, 1, 1, 1), 8),
    "cluster 2x1": (plain(), tile(cluster_m=2), (300, 136, 136, 1), 4),
    "cluster 1x2": (plain(), tile(cluster_n=2), (136, 300, 136, 1), 4),
    "cluster 2x2": (plain(), tile(128, 64, cluster_m=2, cluster_n=2), (300, 136, 136, 1), 16),
    "cluster 4x1": (plain(), tile(64, 32, cluster_m=4), (300, 40, 136, 1), 16),
    "cluster 1x4": (plain(), tile(64, 32, cluster_n=4), (72, 264, 136, 1), 16),
    "pingpong 64x256": (plain(out="bfloat16"), pingpong(64, 256), (200, 264, 200, 1), 1),
    "pingpong 128x128": (plain(), pingpong(128), (264, 264, 200, 1), 1),
    "pingpong, one tile": (plain(), pingpong(), (64, 128, 72, 1), 1),
    "pingpong, cluster 2x1": (plain(), pingpong(cluster_m=2), (300, 264, 136, 1), 2),
    "pingpong, cluster 1x2": (plain(), pingpong(64, 64, cluster_n=2), (200, 264, 136, 1), 2),
    "split 2": (plain(), tile(split_k=2), (200, 264, 200, 1), 2),
    "split 2, bfloat16": (plain(out="bfloat16"), tile(64, 64, split_k=2), (200, 72, 264, 2), 4),
    "split 3, cluster 2x1": (plain(), tile(64, 64, split_k=3, cluster_m=2), (200, 264, 300, 1), 16),
    "split 4, parts without K": (plain(), tile(64, 64, split_k=4), (136, 72, 72, 1), 16),
    "split 2 of 256 rows": (plain(), tile(256, 64, split_k=2), (300, 72, 200, 1), 4),
    "split 2 of 8 columns": (plain(), tile(64, 8, split_k=2), (136, 12, 264, 1), 4),
    "e4m3 x e5m2": (plain("fp8_e4m3", "fp8_e5m2"), tile(), (200, 264, 272, 1), 2),
    "promoted": (plain("fp8_e4m3", promote=True), tile(), (200, 136, 400, 1), 2),
    "promoted, long stage": (plain("fp8_e4m3", promote=True), tile(128, 64, tile_k=256), (200, 136, 720, 1), 2),
    "promoted 256 columns": (plain("fp8_e4m3", "fp8_e5m2", "bfloat16", promote=True), tile(128, 256), (200, 264, 272, 1), 2),
    "promoted 256 rows": (plain("fp8_e5m2", promote=True), tile(256), (300, 136, 272, 1), 2),
    "promoted pingpong": (plain("fp8_e4m3", promote=True), pingpong(), (200, 136, 400, 1), 1),
    "promoted split": (plain("fp8_e4m3", promote=True), tile(64, 64, split_k=2), (136, 72, 400, 1), 4),
    "int8": (plain("int8", out="int32"), tile(), (200, 264, 272, 1), 2),
    "int8 split": (plain("int8", out="int32"), tile(128, 64, split_k=2), (136, 72, 272, 1), 2),
    "int8, 24 columns": (plain("int8", out="int32"), tile(64, 24), (100, 40, 272, 1), 2),
    "A by columns": (plain(a_major="mn"), tile(), (200, 136, 136, 1), 2),
    "B by columns": (plain(b_major="mn"), tile(), (200, 136, 136, 1), 2),
    "A and B by columns, cluster 2x2": (
        plain(a_major="mn", b_major="mn"), tile(128, 96, cluster_m=2, cluster_n=2, tile_k=64), (300, 200, 136, 1), 64,
    ),
    "B by 8 columns": (plain(b_major="mn"), tile(64, 8), (72, 24, 136, 1), 2),
    "B by 16 columns, cluster 2x1": (plain(b_major="mn"), tile(64, 16, cluster_m=2), (200, 40, 136, 1), 4),
    "B by 40 columns": (plain("float16", b_major="mn"), tile(64, 40, tile_k=256), (72, 72, 200, 1), 2),
    "A by columns, pingpong": (plain(a_major="mn"), pingpong(128), (264, 136, 136, 1), 1),
    "one A for all batches": (plain(batched=(False, True)), tile(128, 64), (130, 100, 136, 3), 2),
    "one B for all batches": (plain(batched=(True, False)), tile(128, 64), (130, 100, 136, 3), 2),
    "gate and up": (gated(), tile(), (200, 264, 136, 1), 2),
    "gate and up, cluster 2x1": (gated(), tile(128, 64, cluster_m=2), (300, 136, 136, 1), 4),
    "gate and up, pingpong": (gated(), pingpong(), (200, 264, 136, 1), 1),
    "gate and up, split": (gated(), tile(128, 64, split_k=2), (200, 136, 200, 1), 2),
    "gate and up, promoted": (gated("fp8_e4m3", promote=True), tile(128, 64), (200, 136, 272, 1), 2),
    "two products": (
        Program(
            a=(Matrix("float16"), Matrix("float16")), b=(Matrix("float16"), Matrix("float16")), gemms=(Gemm(0, 0), Gemm(1, 1)),
            stores=(Store(ACC(0), "float16"), Store(ACC(1), "float32")),
        ), tile(128, 64), (200, 136, 136, 1), 2,
    ),
}  # fmt: skip
# Near relatives of other cases: L2.
RARE = (
    "64 rows", "24 columns", "odd sizes", "cluster 1x2", "cluster 1x4", "pingpong, one tile", "pingpong, cluster 1x2", "split 2, bfloat16",
    "split 2 of 256 rows", "promoted pingpong", "promoted split", "int8 split", "int8, 24 columns", "A by columns", "B by 40 columns",
    "A by columns, pingpong", "one A for all batches", "gate and up, cluster 2x1", "gate and up, pingpong", "gate and up, split",
)  # fmt: skip
FREQUENT = ("cluster 2x2", "pingpong 128x128", "split 3, cluster 2x1", "promoted", "gate and up")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.L2] * (case in RARE)) for case in CASES])
def test_product_is_exact(case):
    program, config, shape, sms = CASES[case]
    run(program, config, *shape, sms=sms)


@pytest.mark.parametrize("schedule", ["eager", "random"])
@pytest.mark.parametrize("case", FREQUENT)
def test_product_is_exact_in_other_schedules(case, schedule):
    program, config, shape, sms = CASES[case]
    run(program, config, *shape, sms=sms, seed=7, schedule=schedule, strict=True)


@pytest.mark.L2
@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
@pytest.mark.parametrize("case", CASES)
def test_product_is_exact_in_every_schedule(case, schedule):
    program, config, shape, sms = CASES[case]
    for seed in range(1, 6):
        run(program, config, *shape, sms=sms, seed=seed, schedule=schedule, strict=True)


RACY = {
    "alone": tile(64, 64, stages=2),
    "multicast": tile(64, 64, cluster_m=2, cluster_n=2, stages=2),
    "pingpong": pingpong(64, 64, stages=2),
    "split": tile(64, 64, split_k=2, stages=2),
    "split, three stages": tile(64, 64, split_k=2, stages=3),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("config", RACY.values(), ids=RACY)
def test_short_rings_are_free_of_races(config, seed):
    """Two stages, more K blocks than stages, several tiles of each CTA."""
    run(plain(), config, 264, 200, 400, sms=4, seed=seed, schedule="random", strict=True)


@pytest.mark.parametrize("seed", [2, 5])
def test_no_warp_misses_its_turn(seed):
    """Pingpong over tiles of one K block: a warp may be late by a whole mainloop of the other warpgroup."""
    run(plain(), pingpong(64, 64, tile_k=256, cluster_n=2), 135, 60, 49, 8, sms=2, seed=seed, schedule="random")


@pytest.mark.parametrize("major", ["n", "m"])
@pytest.mark.parametrize("out", ["float32", "bfloat16", "fp8_e4m3", "int8"])
def test_every_output_type_and_major(out, major):
    for n, columns in ((136, 128), (40, 24)):
        run(plain(out=out, store_major=major), tile(128, columns), 200, n, 72, sms=2, low=-1, high=2)


def test_outputs_that_tma_cannot_write():
    """Rows that are not aligned to 16 bytes, next to one that is."""
    stores = (
        Store(ACC(0), "bfloat16", "n", 2),
        Store(ACC(0), "float32", "m", 4),
        Store(ACC(0), "float16"),
        Store(ACC(0), "float32", ""),
    )
    program = Program((Matrix("bfloat16"),), (Matrix("bfloat16"),), (Gemm(),), stores)
    assert plan_layout(program, tile(64, 64), facts()).store_modes == ("vector", "vector", "tma", "vector")
    run(program, tile(64, 64), 136, 72, 72, sms=2)


FUSED = Program(
    a=(Matrix("bfloat16"),),
    b=(Matrix("bfloat16"),),
    gemms=(Gemm(),),
    aux=(Aux("float32", "scalar", by_value=True), Aux("float32", "col"), Aux("float32", "row"), Aux("bfloat16", "full", True, "n", alignment=16)),
    ops=(
        Op("mul", (ACC(0), AUX(0)), "float32"),
        Op("add", (VAL(0), AUX(1)), "float32"),
        Op("add", (VAL(1), AUX(2)), "float32"),
        Op("add", (VAL(2), AUX(3)), "float32"),
        Op("abs", (VAL(3),), "bfloat16"),
    ),
    stores=(Store(VAL(4), "bfloat16"), Store(VAL(2), "float32", "m")),
    reductions=(Reduction(VAL(3), "ADD", "m"), Reduction(VAL(4), "AMAX", "lmn"), Reduction(ACC(0), "MAX", "n")),
)  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [tile(128, 64), tile(64, 64, split_k=2), pingpong(64, 64), tile(64, 32, cluster_m=2, cluster_n=2)],
    ids=["cooperative", "split", "pingpong", "cluster"],
)
def test_epilogue_program_with_operands_outputs_and_reductions(config):
    run(FUSED, config, 136, 72, 200, 2, sms=8, low=-2, high=3)


def test_the_transposed_program_is_the_same_product():
    run(FUSED.swapped(), tile(64, 16), 136, 40, 136, 2, sms=4, low=-2, high=3)


def fused(dtype, *chain, mma="bfloat16", major="k"):
    """An operand with a prologue: each op is a name and the references besides the value so far."""
    last = len(chain) - 1
    ops = tuple(
        Op(name, (Ref("val", i - 1), *refs), mma if i == last else "float32") for i, (name, *refs) in enumerate(chain)
    )
    return Matrix(dtype, major, mma_dtype=mma, prologue=ops)


def product_of(a, b, scalars=0):
    aux = (Aux("float32", "scalar"),) * scalars
    return Program(a=(a,), b=(b,), gemms=(Gemm(),), stores=(Store(ACC(0), "float32"),), aux=aux)


BF16 = Matrix("bfloat16")
PROLOGUES = {
    "int8 A": (product_of(fused("int8", ("identity",)), BF16), tile(), (200, 136, 136, 1)),
    "scaled int8 B": (product_of(BF16, fused("int8", ("mul", AUX(0))), 1), tile(), (200, 136, 200, 2)),
    "chains on both": (
        product_of(fused("bfloat16", ("abs",), ("mul", AUX(0))), fused("bfloat16", ("neg",)), 1), tile(128, 64), (136, 72, 136, 1),
    ),
    "fp8 A by columns, cluster 2x1": (
        product_of(fused("fp8_e4m3", ("identity",), major="mn"), BF16), tile(128, 64, cluster_m=2), (300, 136, 136, 1),
    ),
    "int8 B by columns, cluster 2x2": (
        product_of(BF16, fused("int8", ("identity",), major="mn")), tile(64, 64, cluster_m=2, cluster_n=2), (200, 136, 136, 1),
    ),
    "float32 B": (product_of(BF16, fused("float32", ("identity",))), tile(64, 24), (72, 40, 136, 1)),
    "split": (product_of(fused("int8", ("identity",)), BF16), tile(64, 64, split_k=2), (72, 136, 264, 1)),
    "constants added to both, split beyond K": (
        product_of(fused("bfloat16", ("add", AUX(0))), fused("int8", ("add", AUX(1)), major="mn"), 2), tile(64, 64, split_k=4),
        (72, 72, 200, 2),
    ),
    "constants added to both, fp8": (
        product_of(
            fused("fp8_e4m3", ("add", AUX(0)), mma="fp8_e4m3"), fused("fp8_e5m2", ("add", AUX(0)), mma="fp8_e4m3"), 1
        ), tile(128, 64), (136, 72, 208, 1),
    ),
    "to fp8": (product_of(fused("bfloat16", ("identity",), mma="fp8_e4m3"), Matrix("fp8_e4m3")), tile(128, 64), (136, 72, 272, 1)),
    "long stage of 192 rows": (product_of(fused("int8", ("identity",)), BF16), tile(192, 40, tile_k=256), (200, 72, 264, 1)),
}  # fmt: skip


@pytest.mark.parametrize("case", PROLOGUES)
def test_operands_are_computed_before_the_product(case):
    program, config, shape = PROLOGUES[case]
    run(program, config, *shape, sms=3, seed=3, schedule="random", strict=True)


@pytest.mark.L2
@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
@pytest.mark.parametrize("case", PROLOGUES)
def test_operands_are_computed_in_every_schedule(case, schedule):
    program, config, shape = PROLOGUES[case]
    for seed in range(1, 6):
        run(program, config, *shape, sms=3, seed=seed, schedule=schedule, strict=True)


def test_computed_operands_stay_in_registers():
    program, config, _ = PROLOGUES["int8 A"]
    assert ".local" not in compiled(program, config, 132).ptx


INSTRUCTIONS = {
    "a CTA alone": (plain(), tile(), r"cp\.async\.bulk\.tensor\.3d\.shared::cta\.global", r"multicast|mapa|barrier\.cluster"),
    "cluster": (plain(), tile(cluster_m=2), r"multicast::cluster", r"ld\.shared::cluster"),
    "split": (plain(), tile(split_k=2), r"ld\.shared::cluster", r"multicast"),
    "16-bit outputs": (plain(out="bfloat16"), tile(), r"stmatrix.*\.x4\.shared", r"\.trans"),
    "16-bit outputs by columns": (plain(out="bfloat16", store_major="m"), tile(), r"stmatrix.*\.x4\.trans", r"st\.shared\.b16"),
}  # fmt: skip


@pytest.mark.parametrize("case", INSTRUCTIONS)
def test_instructions_that_a_configuration_is_for(case):
    program, config, present, absent = INSTRUCTIONS[case]
    text = compiled(program, config, 132).ptx
    assert re.search(present, text)
    assert not re.search(absent, text)


@pytest.mark.parametrize(
    "case", ["256 columns", "256 rows", "promoted 256 columns", "gate and up", "pingpong 64x256", "split 2"]
)
def test_sums_stay_in_registers(case):
    program, config, _, sms = CASES[case]
    assert ".local" not in compiled(program, config, sms).ptx


@pytest.mark.parametrize(
    ("config", "batches", "grid"),
    [
        (tile(), 1, (6, 1, 1)),  # as many clusters as tiles
        (tile(), 100, (132, 1, 1)),  # as many as SMs
        (tile(cluster_m=2), 100, (132, 1, 1)),
        (
            tile(64, 64, cluster_m=2, cluster_n=2),
            100,
            (1200, 2, 1),
        ),  # one for each tile: who knows how many run at once
        (tile(split_k=2), 2, (12, 1, 2)),
        (tile(64, 64, stages=4), 100, (264, 1, 1)),  # two on each SM
    ],
)
def test_grid_and_shared_memory_of_the_launch(config, batches, grid):
    program = plain()
    operands = Operands(program, (300, 200, 72, batches), 0, 0, 1)
    (launch,) = ptx_emulator.record(
        compiled(program, config, 132).artifact, operands.block(), None, buffers=operands.memory
    )
    layout = plan_layout(program, config, facts())
    assert launch.grid == grid
    assert launch.cluster == (config.cluster_m, config.cluster_n, config.split_k)
    assert (launch.block, launch.dynamic_smem) == ((layout.threads, 1, 1), layout.shared_bytes)


WAIT = "griddepcontrol.wait;"
EPILOGUE = Program(
    a=(Matrix("bfloat16"),), b=(Matrix("bfloat16"),), gemms=(Gemm(),), aux=(Aux("float32", "full"), Aux("float32", "scalar")),
    ops=(Op("mul", (ACC(0), AUX(1)), "float32"), Op("add", (VAL(0), AUX(0)), "float32")),
    stores=(Store(VAL(1), "bfloat16"),), reductions=(Reduction(VAL(1), "AMAX", "lmn", "float32"),),
)  # fmt: skip
DEPENDENT = {
    "epilogue and reduction": (EPILOGUE, tile(64, 32)),
    "cluster": (plain(), tile(64, 32, cluster_m=2, cluster_n=2)),
    "split": (plain(), tile(64, 32, split_k=2)),
    "pingpong": (plain(), pingpong(64, 32)),
    "prologue": PROLOGUES["chains on both"][:2],
}


@pytest.mark.parametrize("case", DEPENDENT)
def test_no_role_touches_memory_before_the_launches_before_have_ended(case):
    """Frost invariant 34. That the launch may begin early turns on the emulator's check of every access."""
    program, config = DEPENDENT[case]
    run(program, config, 72, 40, 72)
    operands = Operands(program, (72, 40, 72, 1), 0, 0, 1)
    *seeds, launch = ptx_emulator.record(
        compiled(program, config, 4).artifact, operands.block(), None, buffers=operands.memory
    )
    assert dict(launch.attributes)[6][0] == 1  # programmatic stream serialization
    assert not any(dict(seed.attributes).get(6, b"\0")[0] for seed in seeds)


def early(program, waits):
    """The statements that are found to come too early, where only `waits` of the kernel's two waits are left."""
    artifact, operands = compiled(program, tile(64, 32), 4).artifact, Operands(program, (40, 24, 40, 1), 0, 0, 1)
    assert artifact.ptx.count(WAIT) == 2
    mutant = artifact.ptx.replace(WAIT, "", 2 - waits)
    report = ptx_emulator.launch(artifact, operands.block(), None, ptx=mutant, buffers=operands.memory)
    assert {finding.kind for finding in report.findings} == {"dependent_launch"}
    return [mutant.splitlines()[finding.ptx_line - 1] for finding in report.findings]


@pytest.mark.parametrize("waits", [0, 1])
def test_a_loader_that_does_not_wait_for_the_launches_before_is_found(waits):
    """With the consumers' wait alone, and without: the stores come after the loads."""
    found = " ".join(early(replace(EPILOGUE, reductions=()), waits))
    assert ".mbarrier::complete_tx" in found
    assert all((instruction in found) == (waits == 0) for instruction in ("ld.global", "bulk_group"))


def test_a_reduction_that_does_not_wait_for_its_seed_is_found():
    """The seed's launch begins when all before it are over, so that nothing else is still in use."""
    assert all("red." in statement for statement in early(EPILOGUE, 0))

"""The Blackwell and Rubin GEMM kernel in the emulator: exact against numpy, free of findings.

Everything here runs for a target that is not at hand: see ``_tcgen05``. Shapes have tails along M, N and K.
"""

import numpy as np
import pytest
from frost_gemm.ir import Aux, Gemm, Matrix, Op, Program, Reduction, Ref, Store

pytest.importorskip("cutlass")
pytest.importorskip("ptx_emulator")
import ptx_emulator
from _tcgen05 import plain, recorded, run, tile

ACC, VAL, AUX = (lambda i, kind=kind: Ref(kind, i) for kind in ("acc", "val", "aux"))
PAIR = tile(n=128, pair=True)
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUDA driver API, CUlaunchAttributeID


def exact(found, *products):
    for store, product in zip(found.store, products or [found.product(0)], strict=True):
        np.testing.assert_array_equal(store, product)


CASES = {
    "bf16": ("B200", plain(), tile(n=128), (200, 136, 136, 2)),
    "one narrow tile": ("B300", plain(), tile(n=16), (40, 12, 72, 1)),
    "fp16 96 wide, long stage": ("B300", plain("float16", out="float16"), tile(n=96, k=256), (136, 104, 200, 1)),
    "odd tile, short stage": ("R200", plain(out="bfloat16"), tile(n=80, k=64), (136, 96, 72, 1)),
    "cluster 2x1": ("B200", plain(), tile(cluster_m=2), (264, 72, 136, 1)),
    "cluster 1x2": ("B300", plain(), tile(cluster_n=2), (136, 136, 136, 1)),
    "cluster 2x2": ("R200", plain(), tile(cluster_m=2, cluster_n=2), (300, 136, 200, 1)),
    "cluster 4x4": ("B200", plain(), tile(n=32, k=64, cluster_m=4, cluster_n=4), (136, 40, 72, 1)),
    "pair 256x128": ("B200", plain(), PAIR, (300, 136, 136, 1)),
    "pair 256x256": ("R200", plain(out="bfloat16"), tile(n=256, pair=True), (136, 264, 72, 1)),
    "pair, cluster 4x1": ("B300", plain(), tile(pair=True, cluster_m=2), (400, 72, 136, 1)),
    "pair, cluster 4x2": ("B200", plain(), tile(pair=True, cluster_m=2, cluster_n=2), (520, 136, 136, 1)),
    "e4m3 x e5m2": ("B200", plain("fp8_e4m3", "fp8_e5m2"), tile(), (136, 72, 272, 1)),
    "e5m2 x e4m3, K64": ("R200", plain("fp8_e5m2", "fp8_e4m3"), tile(), (136, 72, 272, 1)),
    "two blocks of rows": ("B200", plain(), tile(256), (264, 72, 136, 2)),
    "two blocks, 16 wide, B kept": ("R200", plain(out="float16"), tile(256, n=16), (136, 24, 136, 1)),
    "two blocks, every column of 10.7": ("R200", plain(), tile(256, n=144, k=64), (300, 152, 72, 2)),
    "two blocks, cluster 2x2, A by columns": (
        "R200",
        plain(a_major="mn"),
        tile(256, n=32, cluster_m=2, cluster_n=2),
        (520, 40, 72, 1),
    ),
    "two blocks of a pair, K64": (
        "R200",
        plain("fp8_e4m3", "fp8_e5m2"),
        tile(256, n=128, pair=True),
        (520, 136, 144, 1),
    ),
    "two blocks of a pair, cluster 2x2": (
        "B300",
        plain(b_major="mn"),
        tile(256, pair=True, cluster_n=2),
        (520, 136, 72, 1),
    ),
    "two blocks of int8": ("B200", plain("int8", out="int32"), tile(256), (264, 72, 144, 1)),
    "fp8 pair": ("B300", plain("fp8_e4m3"), PAIR, (264, 136, 144, 1)),
    "fp8 pair, K64, cluster 4x2": (
        "R200",
        plain("fp8_e4m3"),
        tile(pair=True, cluster_m=2, cluster_n=2),
        (264, 136, 144, 1),
    ),
    "int8": ("B200", plain("int8", out="int32"), tile(), (136, 72, 272, 1)),
    "int8 pair": ("B200", plain("int8", out="int32"), PAIR, (264, 136, 144, 1)),
    "A by columns": ("B200", plain(a_major="mn"), tile(), (136, 72, 136, 1)),
    "B by columns": ("B300", plain(b_major="mn"), tile(), (136, 72, 136, 1)),
    "A and B by columns, pair": ("B200", plain(a_major="mn", b_major="mn"), PAIR, (264, 136, 72, 1)),
    "A and B by columns, cluster 2x2": (
        "R200",
        plain(a_major="mn", b_major="mn"),
        tile(cluster_m=2, cluster_n=2),
        (264, 136, 72, 1),
    ),
    "fp8 by columns": ("B200", plain("fp8_e4m3", a_major="mn", b_major="mn"), tile(), (144, 80, 144, 1)),
    "fp8 by columns, K64, pair": ("R200", plain("fp8_e4m3", a_major="mn", b_major="mn"), PAIR, (272, 144, 80, 1)),
    "int8 by columns": ("B200", plain("int8", out="int32", a_major="mn", b_major="mn"), tile(), (144, 80, 144, 1)),
    "one A for all batches": ("B200", plain(batched=(False, True)), tile(), (136, 72, 72, 3)),
    "one B for all batches, pair": ("B300", plain(batched=(True, False)), tile(pair=True), (136, 72, 72, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_product_is_exact(case):
    device, program, config, shape = CASES[case]
    exact(run(program, config, device, *shape))


@pytest.mark.L2
@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
@pytest.mark.parametrize("case", CASES)
def test_product_is_exact_in_every_schedule(case, schedule):
    device, program, config, shape = CASES[case]
    for seed in (1, 2):
        exact(run(program, config, device, *shape, seed=seed, schedule=schedule))


RACY = {
    "alone": tile(stages=2),
    "multicast": tile(cluster_m=2, cluster_n=2, stages=2),
    "pair": tile(pair=True, cluster_n=2, stages=2),
    "two blocks, one accumulator": tile(256, n=256, k=64, stages=2),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("config", RACY.values(), ids=RACY)
def test_short_rings_are_free_of_races(config, seed):
    """Two stages, more steps than stages, more tiles than accumulators."""
    exact(run(plain(), config, "B200", 600, 136, 264, seed=seed, schedule="random"))


@pytest.mark.parametrize(
    ("config", "grid", "cluster"),
    [
        (tile(n=128), (5 * 3 * 2, 1, 1), (1, 1, 1)),
        (tile(n=64, pair=True, cluster_n=2), (2 * 3 * 3 * 2, 2, 1), (2, 2, 1)),
        (tile(n=32, k=64, cluster_m=2, split_k=2), (2 * 3 * 10 * 2, 1, 2), (2, 1, 2)),
    ],
    ids=["alone", "pairs", "parts"],
)
def test_launch_has_the_layout_s_memory_and_a_cluster_for_every_tile(config, grid, cluster):
    (launch,), layout = recorded(plain(), config, "B200", 600, 300, 72, 2)
    assert launch.dynamic_smem == layout.shared_bytes
    assert (launch.grid, launch.cluster, launch.block) == (grid, cluster, (layout.threads, 1, 1))


def test_launch_may_begin_before_the_one_ahead_has_ended():
    (launch,), _ = recorded(plain(), tile(), "B200", 136, 72, 72)
    assert dict(launch.attributes)[PROGRAMMATIC_STREAM_SERIALIZATION][0] == 1


def test_a_kernel_that_does_not_wait_for_the_launch_ahead_is_found():
    """The loads, the scalars and the stores of every run here come after it; without it, each one is reported."""
    with pytest.raises(ptx_emulator.FindingError, match="dependent_launch"):
        run(plain(), tile(n=16), "B200", 40, 16, 72, mutant=("griddepcontrol.wait;", ""))


def test_one_cluster_takes_over_the_tiles_of_clusters_that_have_not_begun():
    found = run(plain(), tile(n=32, k=64), "B200", 136, 104, 72, 2)
    exact(found)
    warps = found.report.counts["instructions.ret"]
    assert warps < 16 * 7, "7 warps for each CTA that ran, 16 tiles"


@pytest.mark.parametrize("device", ["B200", "B300", "R200"])
def test_results_are_rounded_to_the_stored_type(device):
    """Sums that bf16 and fp8 cannot hold: nearest even; fp8 saturates."""
    program = Program(
        a=(Matrix("bfloat16"),), b=(Matrix("bfloat16"),), gemms=(Gemm(),),
        stores=(Store(ACC(0), "bfloat16"), Store(ACC(0), "fp8_e4m3"), Store(ACC(0), "float32")),
    )  # fmt: skip
    found = run(program, tile(), device, 136, 80, 264, low=-9, high=10)
    product = found.product(0)
    assert np.abs(product).max() > 448
    exact(found, _rounded(product, 8, None), _rounded(product, 4, 448.0), product)


def _rounded(values, bits, limit):
    """To nearest even with ``bits`` of significand, saturating."""
    magnitude, exponent = np.frexp(values)
    near = np.ldexp(np.rint(np.ldexp(magnitude, bits)), exponent - bits)
    return near if limit is None else np.clip(near, -limit, limit)


# Epilogues

BIAS_RELU = Program(
    a=(Matrix("bfloat16"),),
    b=(Matrix("bfloat16"),),
    gemms=(Gemm(),),
    aux=(Aux("bfloat16", "col", alignment=16), Aux("float32", "row", batched=True, alignment=16)),
    ops=(
        Op("add", (ACC(0), AUX(0)), "float32"),
        Op("mul", (VAL(0), AUX(1)), "float32"),
        Op("relu", (VAL(1),), "float32"),
    ),
    stores=(Store(VAL(2), "float32"),),
)
RESIDUAL = Program(
    a=(Matrix("bfloat16"),),
    b=(Matrix("bfloat16"),),
    gemms=(Gemm(),),
    aux=(
        Aux("float32", "scalar", by_value=True),
        Aux("float32", "scalar", batched=True),
        Aux("bfloat16", "full", batched=True, major="n", alignment=16),
        Aux("float32", "full", major="m", alignment=4),
    ),
    ops=(
        Op("mul", (ACC(0), AUX(0)), "float32"),
        Op("mul", (AUX(2), AUX(1)), "float32"),
        Op("add", (VAL(0), VAL(1)), "float32"),
        Op("sub", (VAL(2), AUX(3)), "float32"),
    ),
    stores=(Store(VAL(3), "float32", "n", 4), Store(VAL(1), "float32", "m", 16), Store(ACC(0), "float32", "n", 16)),
)
SUMS = Program(
    a=(Matrix("fp8_e4m3"),),
    b=(Matrix("fp8_e4m3"),),
    gemms=(Gemm(),),
    ops=(Op("neg", (ACC(0),), "float32"),),
    stores=(Store(ACC(0), "float32"),),
    reductions=(
        Reduction(ACC(0), "ADD", "n"), Reduction(VAL(0), "MAX", "m"), Reduction(VAL(0), "AMAX", "lmn"), Reduction(ACC(0), "MIN", "mn"),
    ),
)  # fmt: skip
ANYWHERE = pytest.mark.parametrize(("device", "config"), [("B200", tile()), ("R200", PAIR)], ids=["alone", "pair"])


@ANYWHERE
def test_bias_scale_and_activation(device, config):
    found = run(BIAS_RELU, config, device, 136, 72, 72, 2)
    exact(found, np.maximum((found.product(0) + found.aux[0]) * found.aux[1], 0))


@ANYWHERE
def test_scaled_residual_and_outputs_of_both_majors(device, config):
    found = run(RESIDUAL, config, device, 136, 72, 72, 2)
    scaled = found.aux[2] * found.aux[1]
    exact(found, found.product(0) * found.aux[0] + scaled - found.aux[3], scaled, found.product(0))


@ANYWHERE
def test_reductions_skip_what_lies_outside(device, config):
    found = run(SUMS, config, device, 140, 80, 80, 2, low=1, high=4)  # every sum is positive: zeros outside would show
    product = found.product(0)
    exact(found, product)
    expected = (product.sum(2), (-product).max(1), product.max(), product.min((1, 2)))
    for reduction, want in zip(found.reduction, expected, strict=True):
        np.testing.assert_array_equal(reduction.ravel(), np.ravel(want))


def test_int32_sums_become_scaled_floats():
    program = Program(
        a=(Matrix("int8"),), b=(Matrix("int8"),), gemms=(Gemm(dtype="int32"),), accumulate="int32",
        aux=(Aux("float32", "row", alignment=16),),
        ops=(Op("identity", (ACC(0),), "float32"), Op("mul", (VAL(0), AUX(0)), "float32")),
        stores=(Store(VAL(1), "float32"),),
    )  # fmt: skip
    found = run(program, tile(), "B200", 136, 72, 144)
    exact(found, found.product(0) * found.aux[0])


# Several products

GATED = Program(
    a=(Matrix("bfloat16"),),
    b=(Matrix("bfloat16"), Matrix("bfloat16", "mn")),
    gemms=(Gemm(0, 0), Gemm(0, 1)),
    ops=(Op("relu", (ACC(0),), "float32"), Op("mul", (VAL(0), ACC(1)), "float32")),
    stores=(Store(VAL(1), "float32"), Store(ACC(1), "float32", "m")),
)
CROSSED = Program(
    a=(Matrix("fp8_e4m3"), Matrix("fp8_e5m2", batched=False)),
    b=(Matrix("fp8_e5m2"), Matrix("fp8_e4m3")),
    gemms=(Gemm(0, 1), Gemm(1, 0), Gemm(1, 1)),
    stores=tuple(Store(ACC(i), "float32") for i in range(3)),
)


@ANYWHERE
def test_gate_and_up_share_an_operand(device, config):
    found = run(GATED, config, device, 136, 72, 136)
    gate, up = found.product(0, 0, 0), found.product(1, 0, 1)
    exact(found, np.maximum(gate, 0) * up, up)


@pytest.mark.parametrize("device", ["B200", "R200"])
def test_products_of_two_blocks_share_both_operands(device):
    found = run(GATED, tile(256), device, 264, 72, 136)
    gate, up = found.product(0, 0, 0), found.product(1, 0, 1)
    exact(found, np.maximum(gate, 0) * up, up)


def test_reductions_of_two_blocks_skip_what_lies_outside():
    found = run(SUMS, tile(256), "R200", 268, 80, 80, low=1, high=4)
    product = found.product(0)
    exact(found, product)
    np.testing.assert_array_equal(found.reduction[0].ravel(), product.sum(2).ravel())
    np.testing.assert_array_equal(found.reduction[1].ravel(), (-product).max(1).ravel())


def test_an_int8_a_is_kept_for_two_products():
    program = Program(
        a=(Matrix("int8"),), b=(Matrix("int8"), Matrix("int8")), gemms=(Gemm(0, 0, "int32"), Gemm(0, 1, "int32")),
        stores=(Store(ACC(0), "int32"), Store(ACC(1), "int32")), accumulate="int32",
    )  # fmt: skip
    found = run(program, tile(n=32), "B200", 136, 40, 144)
    exact(found, found.product(0, 0, 0), found.product(1, 0, 1))


MISUSED = {
    "B that was not kept": (plain(), "b::fill", "b::discard", "of B, of which the collector holds nothing"),
    "B that was given up": (plain(), "b::lastuse", "b::fill", ""),
    "A that was not kept": (GATED, "a::fill", "a::discard", "of A, of which the collector holds nothing"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_an_operand_that_was_not_kept_would_be_found(case):
    """The emulator holds the kernel to what it says: a word of one instruction that is changed is reported, if it does harm."""
    program, word, other, finding = MISUSED[case]
    mutant = f"collector::{word}", f"collector::{other}"
    if finding:
        with pytest.raises(ptx_emulator.FindingError, match=finding):
            run(program, tile(256, n=16), "R200", 136, 24, 72, mutant=mutant)
    else:
        exact(run(program, tile(256, n=16), "R200", 136, 24, 72, mutant=mutant))


@ANYWHERE
def test_products_of_different_operands_and_types(device, config):
    found = run(CROSSED, config, device, 136, 72, 144, 2)
    exact(found, found.product(0, 0, 1), found.product(1, 1, 0), found.product(2, 1, 1))


def test_accumulators_that_fill_tensor_memory_are_not_doubled():
    program = Program(
        a=(Matrix("bfloat16"),), b=(Matrix("bfloat16"), Matrix("bfloat16")), gemms=(Gemm(0, 0), Gemm(0, 1)),
        stores=(Store(ACC(0), "float32"), Store(ACC(1), "float32")),
    )  # fmt: skip
    found = run(program, tile(n=256, k=64), "B200", 264, 264, 72)
    exact(found, found.product(0, 0, 0), found.product(1, 0, 1))


def test_products_of_a_pair_that_fill_every_column_of_10_7():
    """Three products of two blocks of 96 columns: 576."""
    found = run(CROSSED, tile(256, n=96, k=64, pair=True), "R200", 264, 40, 80)
    exact(found, found.product(0, 0, 1), found.product(1, 1, 0), found.product(2, 1, 1))


# Mainloop prologues

ELEMENT, SCALAR = Ref("val", -1), (Aux("float32", "scalar", batched=True),)


def fused(dtype, *ops, major="k", mma="bfloat16"):
    """An operand with a prologue: each op is a name and the references besides the value so far."""
    chain = [Op(name, (ELEMENT if i == 0 else VAL(i - 1), *rest), mma) for i, (name, *rest) in enumerate(ops)]
    return Matrix(dtype, major, mma_dtype=mma, prologue=tuple(chain))


def one_product(a, b, aux=()):
    return Program(a=(a,), b=(b,), gemms=(Gemm(),), aux=aux, stores=(Store(ACC(0), "float32"),))


def columns_of(b):
    return b.transpose(0, 2, 1)


PLAIN = Matrix("bfloat16")
PROLOGUES = {
    "int8 weights, two blocks of rows": (
        "R200", one_product(PLAIN, fused("int8", ("neg",))), tile(256, pair=True), lambda f: -f.product(0),
    ),
    "int8 weights, scaled": (
        "B200", one_product(PLAIN, fused("int8", ("identity",), ("mul", AUX(0))), SCALAR), tile(),
        lambda f: f.a[0] @ columns_of(f.b[0] * f.aux[0]),
    ),
    "relu of A by columns": (
        "B300", one_product(fused("bfloat16", ("relu",), major="mn"), PLAIN), tile(cluster_n=2), lambda f: np.maximum(f.a[0], 0) @ columns_of(f.b[0]),
    ),
    "fp8 weights by columns, pair": (
        "R200", one_product(PLAIN, fused("fp8_e4m3", ("neg",), major="mn")), tile(pair=True), lambda f: -f.product(0),
    ),
    "both operands, pairs that share": (
        "B200", one_product(fused("int8", ("abs",)), fused("int8", ("mul", ELEMENT), major="mn")), tile(pair=True, cluster_m=2, cluster_n=2),
        lambda f: np.abs(f.a[0]) @ columns_of(f.b[0] ** 2),
    ),
    "fp8 made for fp8, narrow tile, parts of K": (
        "R200", one_product(Matrix("fp8_e4m3"), fused("fp8_e5m2", ("add", AUX(0)), mma="fp8_e4m3"), SCALAR), tile(n=16, split_k=2),
        lambda f: f.a[0] @ columns_of(f.b[0] + f.aux[0]),
    ),
    "constants added to both, by rows and by columns": (
        "B200", one_product(fused("bfloat16", ("add", AUX(0))), fused("int8", ("add", AUX(0)), major="mn"), SCALAR), tile(pair=True),
        lambda f: (f.a[0] + f.aux[0]) @ columns_of(f.b[0] + f.aux[0]),
    ),
    "constants added to both, fp8, parts beyond K": (
        "R200", one_product(
            fused("fp8_e4m3", ("add", AUX(0)), mma="fp8_e4m3"), fused("fp8_e5m2", ("add", AUX(0)), mma="fp8_e4m3"), SCALAR
        ), tile(n=16, split_k=4), lambda f: (f.a[0] + f.aux[0]) @ columns_of(f.b[0] + f.aux[0]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PROLOGUES)
def test_operands_are_made_on_the_way(case):
    """Where constants are added to both, what they make of the zeros past the end of K would be multiplied."""
    device, program, config, expected = PROLOGUES[case]
    found = run(program, config, device, 144, 80, 208, 2)
    exact(found, expected(found))


@pytest.mark.L2
@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
@pytest.mark.parametrize("case", PROLOGUES)
def test_operands_are_made_in_every_schedule(case, schedule):
    device, program, config, expected = PROLOGUES[case]
    for seed in (1, 2):
        found = run(program, config, device, 144, 80, 400, 2, seed=seed, schedule=schedule)
        exact(found, expected(found))


# Split K

SPLIT = {
    "two parts": ("B200", plain(), tile(n=16, split_k=2), (136, 24, 400, 1)),
    "parts beyond K": ("B200", plain(), tile(n=16, split_k=4), (40, 16, 72, 1)),
    "pair": ("R200", plain("fp8_e4m3"), tile(n=16, pair=True, split_k=2), (136, 16, 272, 1)),
    "two blocks of rows": ("R200", plain(), tile(256, n=16, split_k=2), (264, 16, 136, 1)),
    "multicast": ("B300", plain(), tile(n=16, cluster_n=2, split_k=2), (40, 32, 200, 1)),
    "int8": ("B200", plain("int8", out="int32"), tile(n=16, split_k=2), (40, 16, 272, 1)),
}


@pytest.mark.parametrize("case", SPLIT)
def test_parts_of_k_add_up(case):
    device, program, config, shape = SPLIT[case]
    exact(run(program, config, device, *shape))


@pytest.mark.parametrize("seed", [1, 2])
def test_parts_never_overtake_each_other(seed):
    """Three subtiles in each of two tiles, through two slots."""
    exact(run(plain(), tile(n=96, k=64, split_k=4, stages=2), "B200", 136, 96, 200, seed=seed, schedule="random"))


@pytest.mark.L2
@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
@pytest.mark.parametrize("case", SPLIT)
def test_parts_of_k_add_up_in_every_schedule(case, schedule):
    device, program, config, shape = SPLIT[case]
    for seed in (1, 2):
        exact(run(program, config, device, *shape, seed=seed, schedule=schedule))


def test_epilogue_sees_the_whole_sum_once():
    found = run(SUMS, tile(n=32, split_k=2), "B200", 40, 48, 272, low=1, high=4)
    product = found.product(0)
    exact(found, product)
    np.testing.assert_array_equal(found.reduction[0].ravel(), product.sum(2).ravel())


def test_sums_are_added_in_the_same_order_every_time():
    """Floats of very different size: another order of the parts would give other bits."""
    program, config = plain(), tile(n=16, split_k=4)
    first, second = (
        run(program, config, "B200", 8, 16, 512, seed=0, schedule=schedule, low=-(2**12), high=2**12) for schedule in ("late", "random")
    )  # fmt: skip
    assert np.abs(first.product(0)).max() > 2**25
    np.testing.assert_array_equal(first.store[0], second.store[0])

"""Reductions of an output, compiled and executed in the emulator, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

from _epilogue import compiled, launch, strided
from frost_gemm.ir import Gemm, Matrix, Op, Program, Reduction, Ref
from frost_gemm.kernels import sinks
from frost_gemm.kernels.epilogue import Epilogue
from frost_gemm.ops import REDUCTIONS

PATTERNS = pytest.mark.parametrize("pattern", ["wgmma", "tcgen05"])
AXES = ("n", "m", "mn", "l", "lmn", "ln")
ACC = Ref("acc", 0)


def program(reductions, ops=(), accumulate="float32"):
    a, gemm = Matrix(accumulate, "k", alignment=4), Gemm(dtype=accumulate)
    return Program(
        (a,), (Matrix(accumulate),), (gemm,), reductions=tuple(reductions), ops=tuple(ops), accumulate=accumulate
    )


def definition(mode, x, axes):
    """The reduction in fp64 or int64; reduced axes keep one element."""
    along = tuple("lmn".index(axis) for axis in axes)
    values = np.abs(x) if mode in ("AMAX", "NORM1") else np.where(x == 0, 1, x) if mode == "MUL_NO_ZEROS" else x
    function = {"AMAX": np.max, "MAX": np.max, "MIN": np.min, "AVG": np.mean, "MUL": np.prod, "MUL_NO_ZEROS": np.prod}
    return function.get(mode, np.sum)(values, axis=along, keepdims=True)


def run(pattern, made, x, width=16):
    """The reduced outputs [L, M, N] of accumulators x."""
    batch, rows, cols = x.shape
    operands = {"a0": strided(x), "b0": (np.zeros(4, x.dtype), (1, 1, 0))}
    outputs = []
    for i, reduction in enumerate(made.reductions):
        shape = [1 if axis in reduction.axes else extent for axis, extent in zip("lmn", x.shape, strict=True)]
        outputs.append(np.full(shape, 77, reduction.dtype))
        b, m, n = (0 if extent == 1 else stride // 4 for extent, stride in zip(shape, outputs[-1].strides, strict=True))
        operands[f"reduction{i}"] = (outputs[-1], (m, n, b))
    launch(compiled(made, pattern, width), made, (rows, cols, cols, batch), operands)
    return outputs


def small_integers(shape, seed=0):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


SUMS = ("ADD", "AVG", "NORM1", "MAX", "MIN", "AMAX")


def agrees(pattern, reductions):
    """Ragged: what lies outside of the output does not count. Sums of small integers are exact."""
    x = small_integers((2, 70, 21))
    for reduction, got in zip(reductions, run(pattern, program(reductions), x), strict=True):
        want = definition(reduction.mode, x.astype(np.float64), reduction.axes)
        near = 1e-6 if reduction.mode == "AVG" else 0
        np.testing.assert_allclose(got, want, rtol=near, atol=near, err_msg=str(reduction))


@PATTERNS
def test_modes_agree_with_their_definitions(pattern):
    """Every mode and every set of axes twice."""
    agrees(pattern, [Reduction(ACC, mode, AXES[(i * 5 + j) % 6]) for i, mode in enumerate(SUMS) for j in (0, 3)])


@pytest.mark.L2
@PATTERNS
@pytest.mark.parametrize("axes", AXES)
def test_every_mode_over_every_set_of_axes(pattern, axes):
    agrees(pattern, [Reduction(ACC, mode, axes) for mode in SUMS])


@PATTERNS
def test_products_agree_with_their_definition(pattern):
    x = np.random.default_rng(1).choice(np.float32([-1, 1, 1, 1, 2, 0.5]), (2, 40, 21))
    x[0, 3, 5] = x[1, 20, 20] = 0
    made = program([Reduction(ACC, mode, axes) for mode in ("MUL", "MUL_NO_ZEROS") for axes in ("n", "m", "lmn")])
    for reduction, got in zip(made.reductions, run(pattern, made, x), strict=True):
        np.testing.assert_array_equal(
            got, definition(reduction.mode, x.astype(np.float64), reduction.axes), str(reduction)
        )


@PATTERNS
def test_int32_reductions_are_exact(pattern):
    modes = [mode for mode in REDUCTIONS if mode != "AVG"]
    x = np.random.default_rng(2).integers(-9, 10, (1, 66, 18)).astype(np.int32)
    made = program([Reduction(ACC, mode, axes, "int32") for mode in modes for axes in ("n", "m")], accumulate="int32")
    for reduction, got in zip(made.reductions, run(pattern, made, x), strict=True):
        want = definition(reduction.mode, x.astype(object if "MUL" in reduction.mode else np.int64), reduction.axes)
        np.testing.assert_array_equal(
            got, np.vectorize(lambda v: (int(v) + 2**31) % 2**32 - 2**31)(want), str(reduction)
        )


@PATTERNS
def test_the_size_of_the_smallest_int32_saturates(pattern):
    x = np.zeros((1, 64, 16), np.int32)
    x[0, 3, 4] = -(2**31)
    made = program([Reduction(ACC, mode, "mn", "int32") for mode in ("AMAX", "NORM1")], accumulate="int32")
    assert [got.item() for got in run(pattern, made, x)] == [2**31 - 1] * 2


@PATTERNS
def test_extremes_of_either_sign_infinities_and_nan(pattern):
    """Floats are compared as integers in memory: signs, zeros and NaNs are where that goes wrong."""
    x = small_integers((1, 64, 16), 3) - 10.0  # all negative
    x[0, 0] = np.abs(x[0, 0])  # all positive
    x[0, 1, 3] = np.nan
    x[0, 2, 15] = np.copysign(np.nan, -1.0)
    x[0, 3, 0], x[0, 4, 7] = np.inf, -np.inf
    x[0, 5] = -np.inf
    x[0, 6] = -0.0
    modes = ("MAX", "MIN", "AMAX")
    made = program([Reduction(ACC, mode, axes) for mode in modes for axes in ("n", "m", "mn")])
    for reduction, got in zip(made.reductions, run(pattern, made, x), strict=True):
        np.testing.assert_array_equal(
            got, definition(reduction.mode, x.astype(np.float64), reduction.axes), str(reduction)
        )


@PATTERNS
def test_a_reduction_reads_the_rounded_value(pattern):
    x = np.random.default_rng(4).standard_normal((1, 64, 16)).astype(np.float32) * 100
    made = program(
        [Reduction(Ref("val", 0), "AMAX", "mn"), Reduction(ACC, "AMAX", "mn")], [Op("identity", (ACC,), "int8")]
    )
    rounded, exact = run(pattern, made, x)
    assert rounded.item() == min(np.abs(np.rint(x)).max(), 128)
    assert exact.item() == np.abs(x).max()


def test_lanes_join_before_they_write():
    """wgmma: a row is shared by 4 lanes, a column by 8; tcgen05: a column by 32. One atomic is left for each element of a warp."""
    rows, cols = program([Reduction(ACC, "ADD", "n")]), program([Reduction(ACC, "ADD", "m")])
    counts = {}
    for pattern in ("wgmma", "tcgen05"):
        for name, made in (("rows", rows), ("cols", cols)):
            text = compiled(made, pattern, 32).__ptx__
            counts[pattern, name] = (text.count("shfl.sync.bfly"), text.count("red."))
    # wgmma, 32 columns: 2 rows and 8 columns in a thread. Halving: 8 columns over 3 exchanges take 4 + 2 + 1 shuffles.
    assert counts["wgmma", "rows"] == (2, 1)
    assert counts["wgmma", "cols"] == (7, 1)
    assert counts["tcgen05", "rows"] == (0, 1)
    assert counts["tcgen05", "cols"] == (31, 1)


def test_float_sums_depend_on_the_order_of_atomics_and_extremes_do_not():
    for mode in REDUCTIONS:
        sums = mode not in ("MAX", "MIN", "AMAX")
        assert Epilogue(program([Reduction(ACC, mode, "n")])).deterministic is not sums
        assert Epilogue(program([Reduction(ACC, mode, "n", "int32")], accumulate="int32")).deterministic
    assert not Epilogue(program([Reduction(ACC, "MAX", "n"), Reduction(ACC, "ADD", "n")])).deterministic


def test_neutral_elements_of_int32_are_its_limits():
    assert sinks.neutral(Reduction(ACC, "MAX", "n", "int32")) == -(2**31)
    assert sinks.neutral(Reduction(ACC, "MIN", "n", "int32")) == 2**31 - 1
    assert sinks.neutral(Reduction(ACC, "MUL", "n", "int32")) == 1

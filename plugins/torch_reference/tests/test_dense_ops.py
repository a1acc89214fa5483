"""matmul, reduction, structural ops, norms and convolution against loops and torch in fp64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Net, oracle, rand, run, single

D = torch.float64


# matmul


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        ((3, 5), (5, 2), (3, 2)),
        ((2, 1, 3, 5), (1, 4, 5, 2), (2, 4, 3, 2)),
        ((2, 3, 0), (2, 0, 4), (2, 3, 4)),
        ((0, 5), (5, 2), (0, 2)),
    ],
)
def test_matmul_broadcasts_batches(a, b, c):
    x, y = rand(*a, dtype=D), rand(*b, seed=1, dtype=D)
    graph = single(
        "matmul", {"A": ("float64", a), "B": ("float64", b)}, {"C": ("float64", c)}, {"padding": 0.0}, "float64"
    )
    out = run(graph, {"A": x, "B": y})["C"]
    np.testing.assert_allclose(out.numpy(), np.matmul(x.numpy(), y.numpy()), rtol=1e-13, atol=1e-13)


def test_matmul_reads_column_major_operands_and_rounds_once_to_bf16():
    x, w = rand(8, 64, dtype=torch.bfloat16), rand(32, 64, seed=1, dtype=torch.bfloat16)
    graph = single(
        "matmul", {"A": ("bfloat16", (8, 64)), "B": ("bfloat16", (64, 32), (1, 64))}, {"C": ("bfloat16", (8, 32))}
    )
    exact = x.double() @ w.double().T
    out = run(graph, {"A": x, "B": w})["C"]
    assert (out.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    assert torch.equal(oracle(graph, {"A": x, "B": w.T})["C"], exact.float().bfloat16().float())


def test_int8_matmul_is_exact():
    a = torch.full((1, 1, 4096), -128, dtype=torch.int8)
    b = torch.full((1, 4096, 1), -128, dtype=torch.int8)
    b[0, 0, 0] = 1
    graph = single(
        "matmul", {"A": ("int8", (1, 1, 4096)), "B": ("int8", (1, 4096, 1))}, {"C": ("int32", (1, 1, 1))}, {}, "int32"
    )
    assert run(graph, {"A": a, "B": b})["C"].item() == 4095 * 16384 - 128


def test_int8_matmul_saturates_to_int8():
    a, b = torch.full((1, 2), 127, dtype=torch.int8), torch.full((2, 1), -127, dtype=torch.int8)
    graph = single("matmul", {"A": ("int8", (1, 2)), "B": ("int8", (2, 1))}, {"C": ("int8", (1, 1))}, {}, "int32")
    assert run(graph, {"A": a, "B": b})["C"].item() == -128


def test_low_matmul_precision_of_the_process_is_not_followed():
    x = rand(64, 64)
    graph = single("matmul", {"A": ("float32", (64, 64)), "B": ("float32", (64, 64))}, {"C": ("float32", (64, 64))})
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        out = run(graph, {"A": x, "B": x})["C"]
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(out.double(), x.double() @ x.double(), rtol=1e-5, atol=1e-5)


# reduction


def _loop(mode, values):
    if mode == "ADD":
        return math.fsum(values)
    if mode == "AVG":
        return math.fsum(values) / len(values)
    if mode in ("MUL", "MUL_NO_ZEROS"):
        return math.prod(v for v in values if v or mode == "MUL")
    if mode in ("MIN", "MAX"):
        return (min if mode == "MIN" else max)(values)
    if mode == "AMAX":
        return max(map(abs, values))
    return math.fsum(map(abs, values)) if mode == "NORM1" else math.sqrt(math.fsum(v * v for v in values))


MODES = ["ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2", "MUL_NO_ZEROS"]


@pytest.mark.parametrize("mode", ["MUL", "MUL_NO_ZEROS"])
def test_a_product_of_integers_that_becomes_a_float_does_not_wrap(mode):
    x = torch.full((1, 4, 15), -100, dtype=torch.int32)
    graph = single(
        "reduction", {"input": ("int32", (1, 4, 15))}, {"Y": ("float32", (1, 4, 1))}, {"mode": mode}, "float32"
    )
    assert run(graph, {"input": x})["Y"].flatten().tolist() == pytest.approx([-1e30] * 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("out", [(1, 3, 1), (2, 1, 4), (1, 1, 1), (2, 3, 4)])
def test_reduction(mode, out):
    x = rand(2, 3, 4, dtype=D)
    x[0, 1, 2] = 0.0
    graph = single("reduction", {"input": ("float64", (2, 3, 4))}, {"Y": ("float64", out)}, {"mode": mode}, "float64")
    found = run(graph, {"input": x})["Y"]
    for index in itertools.product(*map(range, out)):
        ranges = [range(n) if o == 1 and n != 1 else [i] for n, o, i in zip(x.shape, out, index, strict=True)]
        expected = _loop(mode, [x[i].item() for i in itertools.product(*ranges)])
        assert found[index].item() == pytest.approx(expected, rel=1e-13, abs=1e-15)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("ADD", 0.0), ("MUL", 1.0), ("MUL_NO_ZEROS", 1.0), ("MIN", math.inf), ("MAX", -math.inf), ("AMAX", 0.0), ("NORM1", 0.0), ("NORM2", 0.0), ("AVG", math.nan)],
)  # fmt: skip
def test_an_empty_reduction_gives_the_neutral_element(mode, expected):
    graph = single("reduction", {"input": ("float32", (2, 0))}, {"Y": ("float32", (2, 1))}, {"mode": mode})
    out = run(graph, {"input": torch.empty(0)})["Y"]
    torch.testing.assert_close(out, torch.full((2, 1), expected), equal_nan=True)


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("ADD", [2**31 - 1, 1, 5], -(2**31) + 5),
        ("ADD", [-(2**31), -1, 3], 2**31 - 1 + 3 - 2**32),
        ("NORM1", [-(2**31), 0, 0], 2**31 - 1),  # the size of one element saturates
        ("NORM1", [-(2**31), 1, 0], -(2**31)),
        ("MUL", [2**16 + 1, 2**16, -1], -(2**16)),
        ("MUL_NO_ZEROS", [2**31 - 1, 0, 2], -2),
        ("AMAX", [-(2**31), 5, 0], 2**31 - 1),
    ],
)
@pytest.mark.parametrize("compute", ["int32", "float32"])
def test_sums_and_products_that_become_int32_are_modulo_two_to_the_32(mode, values, expected, compute):
    graph = single("reduction", {"input": ("int32", (3,))}, {"Y": ("int32", (1,))}, {"mode": mode}, compute)
    for x in (values, values[::-1]):
        assert run(graph, {"input": torch.tensor(x, dtype=torch.int32)})["Y"].item() == expected


@pytest.mark.parametrize(
    ("out", "compute", "expected"),
    [
        ("int32", "int32", -(2**31)),
        ("int8", "int32", -128),
        ("float32", "float32", -(2.0**31)),
        ("int64", "int32", 2**31),
    ],
)
def test_a_matmul_of_integers_is_summed_modulo_two_to_the_32(out, compute, expected):
    """Before its result is rounded; in int64 where one of its types is."""
    k = 2**17
    graph = single("matmul", {"A": ("int8", (1, k)), "B": ("int8", (k, 1))}, {"C": (out, (1, 1))}, {}, compute)
    x = torch.full((k,), -128, dtype=torch.int8)
    assert run(graph, {"A": x.reshape(1, k), "B": x.reshape(k, 1)})["C"].item() == expected


def test_integer_sums_are_exact_and_norm2_does_not_overflow():
    graph = single("reduction", {"input": ("int32", (3,))}, {"Y": ("int64", (1,))}, {"mode": "ADD"}, "int32")
    assert run(graph, {"input": torch.tensor([2**31 - 1, 2**31 - 1, 1], dtype=torch.int32)})["Y"].item() == 2**32 - 1
    graph = single("reduction", {"input": ("float32", (2,))}, {"Y": ("float32", (1,))}, {"mode": "NORM2"})
    assert run(graph, {"input": torch.tensor([3e30, 4e30])})["Y"].item() == pytest.approx(5e30)


@pytest.mark.parametrize("mode", ["MIN", "MAX", "AMAX", "ADD", "NORM2"])
def test_nan_propagates_through_reductions(mode):
    graph = single("reduction", {"input": ("float32", (3,))}, {"Y": ("float32", (1,))}, {"mode": mode})
    assert run(graph, {"input": torch.tensor([1.0, math.nan, math.inf])})["Y"].isnan().all()


@pytest.mark.parametrize(("offsets", "count"), [([0, 2, 2, 5], 4), ([0, 2, 2, 5, 6], 5)])
def test_grouped_reduction(offsets, count):
    x = rand(1, 6, 3, dtype=D)
    inputs = {"input": ("float64", (1, 6, 3)), "group_offset": ("int32", (count, 1, 1))}
    graph = single("reduction", inputs, {"Y": ("float64", (4, 1, 3))}, {"mode": "AMAX"}, "float64")
    out = run(graph, {"input": x, "group_offset": torch.tensor(offsets, dtype=torch.int32)})["Y"]
    rows = [x[0, 0:2], x[0, 2:2], x[0, 2:5], x[0, 5:6]]
    expected = torch.stack([r.abs().amax(0) if len(r) else torch.zeros(3, dtype=D) for r in rows])
    assert torch.equal(out[:, 0], expected)


# structural


def test_logical_reshape_goes_by_index_and_view_reshape_by_memory():
    x = torch.arange(6, dtype=torch.float32)  # [2, 3] column-major: element (i, j) is i + 2 j
    logical = single(
        "reshape", {"input": ("float32", (2, 3), (1, 2))}, {"Y": ("float32", (6,))}, {"reshape_mode": "LOGICAL"}
    )
    view = single(
        "reshape", {"input": ("float32", (2, 3), (1, 2))}, {"Y": ("float32", (6,))}, {"reshape_mode": "VIEW_ONLY"}
    )
    assert run(logical, {"input": x})["Y"].tolist() == [0, 2, 4, 1, 3, 5]
    assert run(view, {"input": x})["Y"].tolist() == [0, 1, 2, 3, 4, 5]


def test_view_reshape_of_a_virtual_tensor_swaps_dims_by_strides():
    net = Net()
    net.t("x", "float32", (2, 3))
    net.t("n", "float32", (2, 3), role="virtual")
    net.t("y", "float32", (3, 2), (1, 3), role="virtual")
    net.t("z", "float32", (3, 2))
    net.op("neg", {"in0": "x"}, {"out": "n"})
    net.op("reshape", {"input": "n"}, {"Y": "y"}, {"reshape_mode": "VIEW_ONLY"})
    net.op("identity", {"in0": "y"}, {"out": "z"})
    x = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert torch.equal(run(net.frozen(), {"x": x})["z"], -x.T)


def test_transpose_slice_concatenate():
    x = rand(2, 3, 4)
    graph = single(
        "transpose", {"input": ("float32", (2, 3, 4))}, {"Y": ("float32", (4, 2, 3))}, {"permutation": [2, 0, 1]}
    )
    assert torch.equal(run(graph, {"input": x})["Y"], x.permute(2, 0, 1))
    slices = [[0, 2, 1], [1, 3, 1], [1, None, 2]]
    graph = single("slice", {"input": ("float32", (2, 3, 4))}, {"Y": ("float32", (2, 2, 2))}, {"slices": slices})
    assert torch.equal(run(graph, {"input": x})["Y"], x[:, 1:3, 1::2])
    y = rand(2, 1, 4, seed=3)
    inputs = {"inputs": [("float32", (2, 3, 4)), ("float32", (2, 1, 4)), ("float32", (2, 0, 4))]}
    graph = single("concatenate", inputs, {"Y": ("float32", (2, 4, 4))}, {"axis": 1, "in_place_index": None})
    out = run(graph, {"inputs0": x, "inputs1": y, "inputs2": torch.empty(0)})["Y"]
    assert torch.equal(out, torch.cat((x, y), 1))


def test_structural_ops_keep_integers_exact():
    x = torch.tensor([[2**53 + 1], [7]], dtype=torch.int64)
    graph = single("transpose", {"input": ("int64", (2, 1))}, {"Y": ("int64", (1, 2))}, {"permutation": [1, 0]})
    assert run(graph, {"input": x})["Y"].tolist() == [[2**53 + 1, 7]]


# norms


@pytest.mark.parametrize(
    ("dim", "scale"), [((4, 6, 1, 1), (1, 6, 1, 1)), ((2, 3, 8), (1, 1, 8)), ((2, 3, 4), (1, 3, 4))]
)
@pytest.mark.parametrize("phase", ["TRAINING", "INFERENCE"])
@pytest.mark.parametrize("bias", [True, False])
def test_layernorm(dim, scale, phase, bias):
    axes = [axis for axis, size in enumerate(scale) if size != 1]
    stats = tuple(1 if axis in axes else size for axis, size in enumerate(dim))
    x, w, b = rand(*dim, dtype=D) * 3 + 100, rand(*scale, seed=1, dtype=D), rand(*scale, seed=2, dtype=D)
    inputs = {"input": ("float64", dim), "scale": ("float64", scale), "epsilon": ("float64", (1,) * len(dim))}
    values = {"input": x, "scale": w, "epsilon": torch.tensor([1e-3], dtype=D)}
    if bias:
        inputs["bias"], values["bias"] = ("float64", scale), b
    outputs = {"Y": ("float64", dim)}
    if phase == "TRAINING":
        outputs |= {"mean": ("float64", stats), "inv_variance": ("float64", stats)}
    out = run(single("layernorm", inputs, outputs, {"norm_forward_phase": phase}, "float64"), values)
    flat = x.movedim(axes, list(range(-len(axes), 0)))
    shape = [dim[axis] for axis in axes]
    y = F.layer_norm(flat, shape, w.reshape(shape), b.reshape(shape) if bias else None, 1e-3)
    torch.testing.assert_close(out["Y"], y.movedim(list(range(-len(axes), 0)), axes), rtol=1e-11, atol=1e-11)
    if phase == "TRAINING":
        torch.testing.assert_close(out["mean"], x.mean(axes, keepdim=True))
        torch.testing.assert_close(out["inv_variance"], (x.var(axes, keepdim=True, correction=0) + 1e-3) ** -0.5)


@pytest.mark.parametrize("bias", [True, False])
def test_rmsnorm(bias):
    x, w, b = rand(5, 16, dtype=D), rand(1, 16, seed=1, dtype=D), rand(1, 16, seed=2, dtype=D)
    inputs = {"input": ("float64", (5, 16)), "scale": ("float64", (1, 16)), "epsilon": ("float64", (1, 1))}
    values = {"input": x, "scale": w, "epsilon": torch.tensor([1e-5], dtype=D)}
    if bias:
        inputs["bias"], values["bias"] = ("float64", (1, 16)), b
    outputs = {"Y": ("float64", (5, 16)), "inv_variance": ("float64", (5, 1))}
    out = run(single("rmsnorm", inputs, outputs, {"norm_forward_phase": "TRAINING"}, "float64"), values)
    expected = F.rms_norm(x, (16,), w[0], 1e-5) + (b if bias else 0)
    torch.testing.assert_close(out["Y"], expected)
    torch.testing.assert_close(out["inv_variance"], ((x * x).mean(1, keepdim=True) + 1e-5) ** -0.5)


def test_epsilon_is_read_from_the_host_as_a_by_value_operand():
    net = Net()
    net.t("x", "float32", (2, 8))
    net.t("w", "float32", (1, 8))
    net.t("eps", "float32", (1, 1), by_value=True)
    net.t("y", "float32", (2, 8))
    net.op("rmsnorm", {"input": "x", "scale": "w", "epsilon": "eps"}, {"Y": "y"}, {"norm_forward_phase": "INFERENCE"})
    x = rand(2, 8)
    out = run(net.frozen(), {"x": x, "w": torch.ones(8), "eps": torch.tensor([0.5])})["y"]
    torch.testing.assert_close(out, F.rms_norm(x, (8,), None, 0.5))


# convolution


CONV = [
    ((2, 3, 9), (4, 3, 3), {"stride": [2], "dilation": [1], "pre": [1], "post": [1]}),
    ((2, 4, 6, 7), (6, 2, 3, 2), {"stride": [1, 2], "dilation": [2, 1], "pre": [2, 0], "post": [2, 0]}),
    (
        (1, 2, 4, 5, 6),
        (3, 2, 2, 2, 3),
        {"stride": [1, 1, 2], "dilation": [1, 2, 1], "pre": [0, 1, 1], "post": [0, 1, 1]},
    ),
]


@pytest.mark.parametrize(("image", "weight", "p"), CONV)
@pytest.mark.parametrize("mode", ["CROSS_CORRELATION", "CONVOLUTION"])
def test_conv_fprop(image, weight, p, mode):
    x, w = rand(*image, dtype=D), rand(*weight, seed=1, dtype=D)
    groups = image[1] // weight[1]
    function = (F.conv1d, F.conv2d, F.conv3d)[len(image) - 3]
    filters = w if mode == "CROSS_CORRELATION" else w.flip(list(range(2, w.ndim)))
    expected = function(x, filters, stride=p["stride"], padding=p["pre"], dilation=p["dilation"], groups=groups)
    attrs = {
        "pre_padding": p["pre"],
        "post_padding": p["post"],
        "stride": p["stride"],
        "dilation": p["dilation"],
        "convolution_mode": mode,
    }
    graph = single(
        "conv_fprop",
        {"image": ("float64", image), "weight": ("float64", weight)},
        {"Y": ("float64", tuple(expected.shape))},
        attrs,
        "float64",
    )
    torch.testing.assert_close(run(graph, {"image": x, "weight": w})["Y"], expected)


def test_conv_pads_each_side_by_its_own_amount_and_is_exact_in_int8():
    x = torch.tensor([[[1, 2, 3]]], dtype=torch.int8)
    w = torch.tensor([[[127, 127]]], dtype=torch.int8)
    attrs = {
        "pre_padding": [0],
        "post_padding": [2],
        "stride": [1],
        "dilation": [1],
        "convolution_mode": "CROSS_CORRELATION",
    }
    graph = single(
        "conv_fprop",
        {"image": ("int8", (1, 1, 3)), "weight": ("int8", (1, 1, 2))},
        {"Y": ("int32", (1, 1, 4))},
        attrs,
        "int32",
    )
    assert run(graph, {"image": x, "weight": w})["Y"].flatten().tolist() == [381, 635, 381, 0]


def test_a_convolution_of_integers_is_summed_modulo_two_to_the_32():
    x = torch.full((1, 2**17, 1), -128, dtype=torch.int8)
    attrs = {"pre_padding": [0], "post_padding": [0], "stride": [1], "dilation": [1], "convolution_mode": "CONVOLUTION"}
    ports = {"image": ("int8", tuple(x.shape)), "weight": ("int8", tuple(x.shape))}
    graph = single("conv_fprop", ports, {"Y": ("int32", (1, 1, 1))}, attrs, "int32")
    assert run(graph, {"image": x, "weight": x})["Y"].item() == -(2**31)


def test_conv_reads_channels_last():
    x, w = rand(1, 5, 5, 3), rand(2, 3, 3, 3, seed=1)
    attrs = {
        "pre_padding": [1, 1],
        "post_padding": [1, 1],
        "stride": [1, 1],
        "dilation": [1, 1],
        "convolution_mode": "CROSS_CORRELATION",
    }
    graph = single(
        "conv_fprop",
        {"image": ("float32", (1, 3, 5, 5), (75, 1, 15, 3)), "weight": ("float32", (2, 3, 3, 3), (27, 1, 9, 3))},
        {"Y": ("float32", (1, 2, 5, 5), (50, 1, 10, 2))},
        attrs,
    )
    expected = F.conv2d(x.permute(0, 3, 1, 2).double(), w.permute(0, 3, 1, 2).double(), padding=1)
    torch.testing.assert_close(run(graph, {"image": x, "weight": w})["Y"].double(), expected, rtol=1e-5, atol=1e-5)

"""Every pointwise op against scalar formulas, and every backward op against autograd in fp64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle, run, single
from torch_reference._lower import INTEGER, OTHER

INF, NAN = math.inf, math.nan
POINTS = [-30.0, -5.5, -2.0, -1.0, -0.75, -1e-3, -0.0, 0.0, 1e-3, 0.3, 1.0, 1.5, 2.0, 7.25, 30.0]


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


UNARY = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "erf": math.erf,
    "exp": math.exp,
    "floor": math.floor,
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "gelu_approx_tanh": lambda x: x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "identity": lambda x: x,
    "log": lambda x: math.log(x) if x > 0 else (-INF if x == 0 else NAN),
    "neg": lambda x: -x,
    "reciprocal": lambda x: 1 / x if x else math.copysign(INF, x),
    "rsqrt": lambda x: 1 / math.sqrt(x) if x > 0 else (math.copysign(INF, x) if x == 0 else NAN),
    "sigmoid": sigmoid,
    "sin": math.sin,
    "softplus": lambda x: math.log1p(math.exp(-abs(x))) + max(x, 0),
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else NAN,
    "tan": math.tan,
    "tanh": math.tanh,
}


@pytest.mark.parametrize("op", UNARY)
def test_unary(op):
    dim = (len(POINTS),)
    graph = single(op, {"in0": ("float64", dim)}, {"out": ("float64", dim)}, {}, "float64")
    out = run(graph, {"in0": torch.tensor(POINTS, dtype=torch.float64)})["out"]
    expected = torch.tensor([float(UNARY[op](x)) for x in POINTS], dtype=torch.float64)
    torch.testing.assert_close(out, expected, rtol=4e-15, atol=1e-200, equal_nan=True)


def _fmod(a, b):
    return math.fmod(a, b) if b and math.isfinite(a) else NAN


BINARY = {
    "add": lambda a, b: a + b,
    "add_square": lambda a, b: a + b * b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b if b else (NAN if a == 0 else math.copysign(INF, a) * math.copysign(1, b)),
    "max": max,
    "min": min,
    "mod": _fmod,
    "cmp_eq": lambda a, b: a == b,
    "cmp_neq": lambda a, b: a != b,
    "cmp_ge": lambda a, b: a >= b,
    "cmp_gt": lambda a, b: a > b,
    "cmp_le": lambda a, b: a <= b,
    "cmp_lt": lambda a, b: a < b,
    "logical_and": lambda a, b: bool(a) and bool(b),
    "logical_or": lambda a, b: bool(a) or bool(b),
}


@pytest.mark.parametrize("op", BINARY)
def test_binary_broadcasts_and_agrees_with_the_scalar_formula(op):
    n = len(POINTS)
    kind = "boolean" if op.startswith(("cmp", "logical")) else "float64"
    graph = single(op, {"in0": ("float64", (n, 1)), "in1": ("float64", (n,))}, {"out": (kind, (n, n))}, {}, "float64")
    points = torch.tensor(POINTS, dtype=torch.float64)
    out = run(graph, {"in0": points, "in1": points})["out"].double()
    expected = torch.tensor([[float(BINARY[op](a, b)) for b in POINTS] for a in POINTS], dtype=torch.float64)
    torch.testing.assert_close(out, expected, rtol=1e-15, atol=0, equal_nan=True)


def test_pow_of_a_positive_base():
    graph = single(
        "pow", {"in0": ("float64", (3,)), "in1": ("float64", (3,))}, {"out": ("float64", (3,))}, {}, "float64"
    )
    out = oracle(graph, {"in0": torch.tensor([2.0, 9.0, -2.0]), "in1": torch.tensor([10.0, 0.5, 3.0])})["out"]
    assert out.tolist() == [1024.0, 3.0, -8.0]


def test_binary_select_keeps_what_is_chosen_only():
    graph = single(
        "binary_select",
        {"in0": ("float32", (3,)), "in1": ("float32", (1,)), "in2": ("boolean", (3,))},
        {"out": ("float32", (3,))},
    )
    out = run(
        graph,
        {
            "in0": torch.tensor([1.0, NAN, 3.0]),
            "in1": torch.tensor([9.0]),
            "in2": torch.tensor([1, 0, 2], dtype=torch.uint8),
        },
    )
    assert out["out"].tolist() == [1.0, 9.0, 3.0]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gen_index(axis):
    graph = single("gen_index", {"in0": ("float32", (2, 3, 4))}, {"out": ("int32", (2, 3, 4))}, {"axis": axis})
    out = run(graph, {"in0": torch.zeros(24)})["out"]
    assert all(out[i].item() == i[axis] for i in [(a, b, c) for a in range(2) for b in range(3) for c in range(4)])


RELU = {"negative_slope": 0.0, "lower_clip": None, "upper_clip": None}


@pytest.mark.parametrize(
    ("attrs", "expected"),
    [
        ({}, [0.0, 0.0, 0.5, 3.0]),
        ({"negative_slope": 0.1}, [-0.2, -0.05, 0.5, 3.0]),
        ({"upper_clip": 1.0}, [0.0, 0.0, 0.5, 1.0]),
        ({"lower_clip": 0.75}, [0.75, 0.75, 0.75, 3.0]),
        ({"negative_slope": 1.0, "lower_clip": -1.0, "upper_clip": 2.0}, [-1.0, -0.5, 0.5, 2.0]),
    ],
)
def test_relu_clips_the_leaky_value(attrs, expected):
    graph = single("relu", {"in0": ("float64", (4,))}, {"out": ("float64", (4,))}, {**RELU, **attrs}, "float64")
    out = run(graph, {"in0": torch.tensor([-2.0, -0.5, 0.5, 3.0], dtype=torch.float64)})["out"]
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("attrs", "expected"),
    [
        ({}, [0.0, 0.0, 2.0, 2.0]),
        ({"negative_slope": 0.25}, [0.5, 0.5, 2.0, 2.0]),
        ({"upper_clip": 1.0}, [0.0, 0.0, 2.0, 0.0]),
        ({"negative_slope": 1.0, "lower_clip": -1.0}, [0.0, 2.0, 2.0, 2.0]),
    ],
)
def test_relu_backward_is_zero_where_a_clip_acts(attrs, expected):
    inputs = {"in0": ("float64", (1,)), "in1": ("float64", (4,))}
    graph = single("relu_backward", inputs, {"out": ("float64", (4,))}, {**RELU, **attrs}, "float64")
    x = torch.tensor([-2.0, -0.5, 0.5, 3.0], dtype=torch.float64)
    assert oracle(graph, {"in0": torch.tensor([2.0]), "in1": x})["out"].tolist() == expected


BACKWARD = {
    "elu_backward": F.elu,
    "gelu_backward": F.gelu,
    "gelu_approx_tanh_backward": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid_backward": torch.sigmoid,
    "softplus_backward": lambda x: torch.log1p(torch.exp(x)),
    "tanh_backward": torch.tanh,
    "swish_backward": lambda x: x * torch.sigmoid(1.7 * x),
}


@pytest.mark.parametrize("op", BACKWARD)
def test_backward_is_the_derivative_times_the_loss(op):
    x = torch.linspace(-6, 6, 97, dtype=torch.float64, requires_grad=True)
    loss = torch.linspace(1, 2, 97, dtype=torch.float64)
    (expected,) = torch.autograd.grad(BACKWARD[op](x), x, loss)
    attrs = {"swish_beta": 1.7} if op == "swish_backward" else {}
    graph = single(
        op, {"in0": ("float64", (97,)), "in1": ("float64", (97,))}, {"out": ("float64", (97,))}, attrs, "float64"
    )
    out = run(graph, {"in0": loss, "in1": x.detach()})["out"]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


def test_derivatives_do_not_cancel_in_the_tails():
    graph = single("tanh_backward", {"in0": ("float32", (1,)), "in1": ("float32", (1,))}, {"out": ("float32", (1,))})
    out = run(graph, {"in0": torch.ones(1), "in1": torch.tensor([12.0])})["out"]
    assert out.item() == pytest.approx(1 / math.cosh(12.0) ** 2, rel=1e-5)


def test_swish_with_beta():
    graph = single("swish", {"in0": ("float64", (3,))}, {"out": ("float64", (3,))}, {"swish_beta": 0.5}, "float64")
    x = torch.tensor([-3.0, 0.25, 4.0], dtype=torch.float64)
    torch.testing.assert_close(run(graph, {"in0": x})["out"], x / (1 + torch.exp(-0.5 * x)))


@pytest.mark.parametrize("op", ["max", "min", "add", "mul", "relu", "identity"])
def test_nan_propagates(op):
    ports = (
        {"in0": ("float32", (2,))}
        if op in ("relu", "identity")
        else {"in0": ("float32", (2,)), "in1": ("float32", (2,))}
    )
    graph = single(op, ports, {"out": ("float32", (2,))}, RELU if op == "relu" else {})
    values = {"in0": torch.tensor([NAN, 1.0]), "in1": torch.tensor([1.0, 1.0])}
    out = run(graph, {port: values[port] for port in ports})["out"]
    assert out.isnan().tolist() == [True, False]


def test_integers_are_exact_where_fp32_is_not():
    big = torch.tensor([2**24 + 1, -(2**31)], dtype=torch.int32)
    ports = {"in0": ("int32", (2,)), "in1": ("int32", (2,))}
    graph = single("sub", ports, {"out": ("int64", (2,))}, {}, "int32")
    out = run(graph, {"in0": big, "in1": torch.tensor([0, 2**31 - 1], dtype=torch.int32)})["out"]
    assert out.tolist() == [2**24 + 1, -(2**32) + 1]


@pytest.mark.parametrize(("op", "expected"), [("div", [-3, 0, 0]), ("mod", [-1, 0, 0])])
def test_integer_division_truncates_and_by_zero_is_zero(op, expected):
    graph = single(op, {"in0": ("int32", (3,)), "in1": ("int32", (3,))}, {"out": ("int32", (3,))}, {}, "int32")
    values = {"in0": torch.tensor([-7, 5, 0], dtype=torch.int32), "in1": torch.tensor([2, 0, 3], dtype=torch.int32)}
    assert run(graph, values)["out"].tolist() == expected


def test_every_pointwise_op_is_covered_by_a_test_of_this_module():
    covered = {*UNARY, *BINARY, *BACKWARD, "relu", "relu_backward", "swish", "gen_index", "binary_select", "pow"}
    assert {*INTEGER, *OTHER} - covered == {"logical_not"}
    graph = single("logical_not", {"in0": ("int8", (3,))}, {"out": ("boolean", (3,))})
    assert run(graph, {"in0": torch.tensor([0, 5, -1], dtype=torch.int8)})["out"].tolist() == [1, 0, 0]


def test_the_in_tree_rows_and_the_lowerings_name_the_same_pointwise_ops():
    rows = pytest.importorskip("cudnn_core._ops._pointwise").ROWS
    assert {row.name for row in rows} == {*INTEGER, *OTHER}

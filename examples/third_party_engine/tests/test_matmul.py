"""acme_cpu:fused_matmul against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import cudnn_core

ACTIVATIONS = {
    "": lambda y: y,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_approx_tanh": lambda y: functional.gelu(y, approximate="tanh"),
}


def build(graph: cudnn_core.Graph, a: Any, b: Any, bias: Any, activation: str, y: Any) -> dict[Any, Any]:
    """Adds the chain; returns its operands."""
    operands = {graph.tensor_like(a, name="a"): a, graph.tensor_like(b, name="b"): b}
    value = graph.matmul(*operands)
    if isinstance(bias, torch.Tensor):
        tensor = graph.tensor_like(bias, name="bias")
        operands[tensor] = bias
        value = graph.add(value, tensor)
    elif bias is not None:
        value = graph.add(bias, value)
    if activation:
        value = getattr(graph, activation)(value)
    value.set_output(True).set_name("y")
    if y.stride() != y.contiguous().stride():
        value.set_stride(y.stride())
    operands[value] = y
    return operands


def expected(a: Any, b: Any, bias: Any, activation: str) -> Any:
    y = a.double() @ b.double()
    if bias is not None:
        y = y + (bias.double() if isinstance(bias, torch.Tensor) else bias)
    return ACTIVATIONS[activation](y)


def assert_close(actual: Any, wanted: Any) -> None:
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [None, 0.25, (1, 1, 24), (1, 24), (2, 50, 24), (2, 50, 1)], ids=str)
def test_bias_and_activation(graph: Any, run: Any, activation: str, bias: Any) -> None:
    torch.manual_seed(0)
    a, b, y = torch.randn(2, 50, 16), torch.randn(1, 16, 24), torch.empty(2, 50, 24)
    if isinstance(bias, tuple):
        bias = torch.randn(bias)
    run(graph, build(graph, a, b, bias, activation, y), "fused_matmul", block_rows=16)
    assert_close(y, expected(a, b, bias, activation))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((7, 5), (5, 3)),
        ((2, 7, 5), (2, 5, 3)),
        ((2, 1, 7, 5), (1, 3, 5, 4)),
        ((3, 1, 5), (3, 5, 1)),
        ((4, 5), (2, 5, 3)),
    ],
    ids=str,
)
def test_batches_broadcast(graph: Any, run: Any, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(a), torch.randn(b)
    y = torch.empty((left @ right).shape)
    run(graph, build(graph, left, right, None, "relu", y), "fused_matmul")
    assert_close(y, expected(left, right, None, "relu"))


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(
    "which", ["a transposed", "b transposed", "a strided", "b strided", "y transposed", "y padded"]
)
def test_strides_are_honoured(graph: Any, run: Any, which: str, pack: bool) -> None:
    torch.manual_seed(0)
    a, b, y = torch.randn(2, 40, 12), torch.randn(2, 12, 20), torch.full((2, 40, 20), torch.nan)
    spread = torch.full((2, 80, 40), torch.nan)
    if which == "a transposed":
        a = torch.randn(2, 12, 40).transpose(1, 2)
    elif which == "b transposed":
        b = torch.randn(2, 20, 12).transpose(1, 2)
    elif which == "a strided":
        a = torch.randn(2, 80, 24)[:, ::2, ::2]
    elif which == "b strided":
        b = torch.randn(2, 24, 40)[:, ::2, ::2]
    elif which == "y transposed":
        y = torch.full((2, 20, 40), torch.nan).transpose(1, 2)
    else:
        y = spread[:, ::2, ::2]
    plan = run(graph, build(graph, a, b, None, "gelu", y), "fused_matmul", block_rows=32, pack=pack)
    assert_close(y, expected(a, b, None, "gelu"))
    assert torch.isnan(spread[:, 1::2]).all(), "wrote between the rows"
    assert torch.isnan(spread[:, :, 1::2]).all(), "wrote between the columns"
    packed = {"a strided": 32 * 12 * 4, "b strided": 12 * 20 * 4}.get(which, 0) * pack
    tile = 32 * 20 * 4 * (3 + which.startswith("y"))
    assert packed + tile <= plan.workspace_size < packed + tile + 5 * 256


@pytest.mark.parametrize("which", ["a", "bias", "y"])
def test_batches_that_do_not_step_evenly(graph: Any, run: Any, which: str) -> None:
    """B has no batches, but one other tensor skips rows between its batches."""
    torch.manual_seed(0)
    whole = {"a": torch.randn(3, 50, 16), "bias": torch.randn(3, 50, 24), "y": torch.full((3, 50, 24), torch.nan)}
    a, bias, y = (value[:, :40] if name == which else value[:, :40].contiguous() for name, value in whole.items())
    b = torch.randn(1, 16, 24)
    run(graph, build(graph, a, b, bias, "relu", y), "fused_matmul", block_rows=32)
    assert_close(y, expected(a, b, bias, "relu"))
    assert torch.isnan(whole["y"][:, 40:]).all()


@pytest.mark.parametrize("engine_knobs", [{}, {"block_rows": 16}])
def test_runtime_sizes_share_a_plan(graph: Any, run: Any, engine_knobs: dict[str, int]) -> None:
    torch.manual_seed(0)
    m = cudnn_core.Dim("m", min=1, max=512)
    b, bias = torch.randn(16, 24), torch.randn(1, 24)
    tensors = graph.tensor((m, 16), name="a"), graph.tensor((16, 24), name="b"), graph.tensor((1, 24), name="bias")
    y = graph.gelu(graph.bias(graph.matmul(*tensors[:2]), tensors[2])).set_output(True)
    plan = None
    for size in (1, 17, 512):
        a, out = torch.randn(size, 16), torch.full((size, 24), torch.nan)
        operands = dict(zip((*tensors, y), (a, b, bias, out), strict=True))
        if plan is None:
            plan = run(graph, operands, "fused_matmul", **engine_knobs)
        else:
            plan.execute(operands, run.workspace(plan))
        assert_close(out, expected(a, b, bias, "gelu"))


def test_a_residual_may_be_the_outputs_own_buffer(graph: Any, run: Any) -> None:
    torch.manual_seed(0)
    a, b, y = torch.randn(300, 16), torch.randn(16, 24), torch.randn(300, 24)
    wanted = expected(a, b, y, "")
    run(graph, build(graph, a, b, y, "", y), "fused_matmul", block_rows=64)
    assert_close(y, wanted)


def test_gelu_is_accurate_in_its_tails(graph: Any, run: Any) -> None:
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40, -1e30])))
    y = torch.empty(1, len(x))
    run(graph, build(graph, torch.ones(1, 1), x[None, :], None, "gelu", y), "fused_matmul")
    # From the definition, with erfc in place of 1 + erf, which cancels.
    wide = x.double()
    wanted = wide * 0.5 * torch.erfc(-wide * 0.5**0.5)
    torch.testing.assert_close(y[0].double(), wanted, rtol=8e-6, atol=1e-37, equal_nan=True)


def test_empty_sizes(graph: Any, run: Any) -> None:
    a, b, y = torch.empty(3, 0), torch.empty(0, 4), torch.full((3, 4), torch.nan)
    run(graph, build(graph, a, b, 1.5, "relu", y), "fused_matmul")
    assert (y == 1.5).all()


def test_bound_and_saved_plans_do_the_same(graph: Any, run: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    a, b, y = torch.randn(70, 16), torch.randn(16, 24), torch.empty(70, 24)
    operands = build(graph, a, b, 0.5, "gelu", y)
    plan = run(graph, operands, "fused_matmul", block_rows=32)
    first = y.clone()
    pack = cudnn_core.pack(plan, operands)
    workspace = run.workspace(plan)
    y.zero_()
    plan.bind(pack)(pack.pointers, workspace.data_ptr() if workspace.numel() else 0, 0)
    assert torch.equal(y, first)

    plan.save(tmp_path / "a.plan")
    for trust in (True, False):
        loaded = cudnn_core.Plan.load(tmp_path / "a.plan", trust=trust)
        assert (loaded.engine, dict(loaded.knobs)) == (plan.engine, dict(plan.knobs))
        y.zero_()
        loaded.execute({"a": a, "b": b, "y": y}, workspace)
        assert torch.equal(y, first)


def reasons(graph: Any) -> set[str]:
    """The codes with which the engine declines."""
    (row,) = (row for row in graph.explain(device="cpu").engines if row.id.startswith("acme_cpu:fused_matmul@"))
    assert row.state == "declined", row
    return {reason.code for reason in row.reasons}


def test_declines_name_every_reason(graph: Any) -> None:
    product = graph.matmul(graph.tensor((4, 8)), graph.tensor((8, 4)), compute_data_type="float64")
    biased = graph.bias(product, graph.tensor((1, 4), data_type="float64"))
    graph.relu(biased, negative_slope=0.1).set_output(True)
    assert reasons(graph) >= {"dtype.unsupported", "dtype.compute", "op.attribute"}


def test_declines_another_order(graph: Any) -> None:
    product = graph.matmul(graph.tensor((4, 8)), graph.tensor((8, 4)))
    graph.add(graph.relu(product), graph.tensor((1, 4))).set_output(True)
    assert reasons(graph) == {"op.pattern"}


def test_declines_two_products(graph: Any) -> None:
    product = graph.matmul(graph.tensor((4, 8)), graph.tensor((8, 4)))
    graph.matmul(product, graph.tensor((4, 4))).set_output(True)
    assert reasons(graph) == {"op.count"}


def test_declines_an_intermediate_output(graph: Any) -> None:
    product = graph.matmul(graph.tensor((4, 8)), graph.tensor((8, 4))).set_output(True)
    graph.relu(product).set_output(True)
    assert reasons(graph) == {"op.pattern"}


def test_is_filtered_on_a_gpu(graph: Any) -> None:
    graph.matmul(graph.tensor((4, 8)), graph.tensor((8, 4))).set_output(True)
    (row,) = (row for row in graph.explain(device="H200").engines if row.id.startswith("acme_cpu:fused_matmul@"))
    assert row.state == "filtered"
    assert {reason.code for reason in row.reasons} == {"device.type"}

"""acme_cpu:row_norm, and the op acme_rmsnorm_gated, against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import cudnn_core

EPSILON = 1e-5


def layernorm(x: Any, scale: Any, bias: Any, axes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    x = x.double()
    mean = x.mean(axes, keepdim=True)
    inverse = ((x - mean).square().mean(axes, keepdim=True) + EPSILON).rsqrt()
    y = (x - mean) * inverse * scale.double()
    return (y if bias is None else y + bias.double()), mean, inverse


def assert_close(actual: Any, wanted: Any) -> None:
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_rows", [1, 5, 64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "scale"),
    [((3, 7, 32), (1, 1, 32)), ((2, 3, 8, 4), (1, 1, 8, 4)), ((6, 48, 1, 1), (1, 48, 1, 1)), ((1, 5), (1, 5))],
    ids=str,
)
def test_layernorm_training(
    graph: Any, run: Any, shape: tuple[int, ...], scale: tuple[int, ...], bias: bool, block_rows: int
) -> None:
    torch.manual_seed(0)
    x, weight, offset = torch.randn(shape) * 3 + 2, torch.randn(scale), torch.randn(scale)
    axes = tuple(axis for axis, size in enumerate(scale) if size != 1)
    wanted = layernorm(x, weight, offset if bias else None, axes)
    outputs = [torch.full(tensor.shape, torch.nan) for tensor in wanted]
    tensors = graph.tensor_like(x), graph.tensor_like(weight), graph.tensor_like(offset) if bias else None
    results = graph.layernorm(*tensors, epsilon=EPSILON, norm_forward_phase="TRAINING")
    operands = dict(zip([t for t in tensors if t], [x, weight, offset], strict=False))
    for result, buffer in zip(results, outputs, strict=True):
        operands[result.set_output(True)] = buffer
    run(graph, operands, "row_norm", block_rows=block_rows)
    for buffer, value in zip(outputs, wanted, strict=True):
        assert_close(buffer, value)


def test_rmsnorm_with_epsilon_as_an_operand(graph: Any, run: Any) -> None:
    torch.manual_seed(0)
    x, scale, epsilon, y = torch.randn(9, 16), torch.randn(1, 16), torch.tensor([[EPSILON]]), torch.empty(9, 16)
    tensors = [graph.tensor_like(tensor) for tensor in (x, scale, epsilon)]
    result, inverse = graph.rmsnorm(tensors[0], tensors[1], epsilon=tensors[2], norm_forward_phase="INFERENCE")
    assert inverse is None
    operands = dict(zip((*tensors, result.set_output(True)), (x, scale, epsilon, y), strict=True))
    run(graph, operands, "row_norm")
    assert_close(y, functional.rms_norm(x.double(), (16,), scale[0].double(), EPSILON))


def test_rows_with_a_pitch(graph: Any, run: Any) -> None:
    torch.manual_seed(0)
    x, scale = torch.randn(6, 40)[:, :16], torch.randn(1, 16)
    whole = torch.full((6, 40), torch.nan)
    y = whole[:, :16]
    tensors = graph.tensor_like(x), graph.tensor_like(scale)
    result, _, _ = graph.layernorm(*tensors, None, epsilon=EPSILON, norm_forward_phase="INFERENCE")
    result.set_output(True).set_stride(y.stride())
    run(graph, {tensors[0]: x, tensors[1]: scale, result: y}, "row_norm")
    assert_close(y, layernorm(x, scale, None, (1,))[0])
    assert torch.isnan(whole[:, 16:]).all()


def test_declines_columns_with_a_stride(graph: Any) -> None:
    x = graph.tensor((6, 16), (1, 6), name="x")
    result, _ = graph.rmsnorm(x, graph.tensor((1, 16)), epsilon=EPSILON, norm_forward_phase="INFERENCE")
    result.set_output(True)
    (row,) = (row for row in graph.explain(device="cpu").engines if row.id.startswith("acme_cpu:row_norm@"))
    assert row.state == "declined"
    assert next((r.code, r.subject, r.actual) for r in row.reasons) == ("layout.stride", "x", (1, 6))


# --- the op of this package


def gated(x: Any, gate: Any, scale: Any, epsilon: float = 1e-6) -> tuple[Any, Any]:
    x, gate = x.double(), gate.double()
    inverse = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return x * inverse * scale.double() * functional.silu(gate), inverse


@pytest.mark.parametrize("scale_shape", [(32,), (1, 1, 32)], ids=str)
def test_gated_norm(graph: Any, run: Any, scale_shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, gate, scale = torch.randn(2, 9, 32), torch.randn(2, 9, 32) * 40, torch.randn(scale_shape)
    y, inverse = torch.empty(2, 9, 32), torch.empty(2, 9, 1)
    tensors = [graph.tensor_like(tensor) for tensor in (x, gate, scale)]
    outputs = [t.set_output(True) for t in graph.acme_rmsnorm_gated(*tensors, epsilon=1e-3, save_inv_rms=True)]
    run(graph, dict(zip((*tensors, *outputs), (x, gate, scale, y, inverse), strict=True)), "row_norm", block_rows=4)
    for actual, wanted in zip((y, inverse), gated(x, gate, scale, 1e-3), strict=True):
        assert_close(actual, wanted)


def test_gated_norm_with_runtime_sizes(graph: Any, run: Any) -> None:
    torch.manual_seed(0)
    rows = cudnn_core.Dim("rows", min=1, max=256)
    x, gate, scale = (graph.tensor(dim) for dim in ((2, rows, 32), (2, rows, 32), (1, 1, 32)))
    y, nothing = graph.acme_rmsnorm_gated(x, gate, scale)
    assert nothing is None
    y.set_output(True)
    for size in (3, 256):
        values = torch.randn(2, size, 32), torch.randn(2, size, 32), torch.randn(1, 1, 32)
        out = torch.empty(2, size, 32)
        run(graph, dict(zip((x, gate, scale, y), (*values, out), strict=True)), "row_norm")
        assert_close(out, gated(*values)[0])


def test_gated_norm_round_trips_through_json(graph: Any) -> None:
    x, gate, scale = (graph.tensor(dim) for dim in ((4, 32), (4, 32), (1, 32)))
    graph.acme_rmsnorm_gated(x, gate, scale, epsilon=1e-4)[0].set_output(True)
    again = cudnn_core.Graph.from_json(graph.to_json())
    assert again.key() == graph.key()
    assert again.nodes[0].attrs["epsilon"] == 1e-4


@pytest.mark.parametrize(
    ("gate", "scale", "epsilon", "port"),
    [((4, 16), (1, 32), 1e-6, "gate"), ((4, 32), (4, 32), 1e-6, "scale"), ((4, 32), (1, 32), 0.0, "epsilon")],
)
def test_gated_norm_is_validated(graph: Any, gate: Any, scale: Any, epsilon: float, port: str) -> None:
    graph.acme_rmsnorm_gated(graph.tensor((4, 32)), graph.tensor(gate), graph.tensor(scale), epsilon=epsilon)[
        0
    ].set_output(True)
    with pytest.raises(cudnn_core.GraphError) as caught:
        graph.validate()
    assert caught.value.port == port


def test_gated_norm_has_a_roofline(graph: Any) -> None:
    """Its row's cost gives the prior of any engine, here of the reference, on a GPU that is only described."""
    x, gate, scale = (graph.tensor(dim) for dim in ((1 << 16, 4096), (1 << 16, 4096), (1, 4096)))
    graph.acme_rmsnorm_gated(x, gate, scale)[0].set_output(True)
    decision = graph.explain(device="H200")
    (row,) = (row for row in decision.engines if row.id == decision.selected)
    at_least = 3 * 4096 * (1 << 16) * 4 / 4.8e12 * 1e6
    assert row.us is not None
    assert row.us > at_least

"""The graphs of the backend benchmark, as a program for the frontend writes them: the module is ``cudnn`` or ``cudnn_core``.

Used by backend.py; needs torch, and a GPU for the buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CASES", "Case", "Setup"]

Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]  # name -> dim, stride, data type
Build = Callable[[Any, Any, Shapes], dict[str, Any]]
_TORCH = {"BFLOAT16": torch.bfloat16, "HALF": torch.float16, "FLOAT": torch.float32}


@dataclass(frozen=True)
class Case:
    """A graph. ``shapes(n)`` are the operands with ``n`` more along the leading size; ``small``: the host's time counts."""

    name: str
    shapes: Callable[[int], Shapes]
    body: Build
    outputs: tuple[str, ...]
    small: bool = False

    def setup(self) -> Setup:
        generator = torch.Generator(device="cuda").manual_seed(len(self.name))
        buffers = {}
        for name, (dim, stride, kind) in self.shapes(0).items():
            size = 1 + sum((n - 1) * s for n, s in zip(dim, stride, strict=True))
            flat = torch.randn(size, generator=generator, device="cuda", dtype=torch.float32).to(_TORCH[kind])
            buffers[name] = flat.as_strided(dim, stride)
        return Setup(self, buffers)


@dataclass
class Setup:
    """A case with its buffers, outputs included."""

    case: Case
    buffers: dict[str, torch.Tensor]

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.case.outputs

    def build(self, module: Any, handle: Any, more: int = 0) -> tuple[Any, dict[str, Any]]:
        """(graph, its operand tensors by name)."""
        kinds = module.data_type
        graph = module.pygraph(
            handle=handle,
            io_data_type=kinds.BFLOAT16,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
        )
        shapes = self.case.shapes(more)
        tensors = {
            name: graph.tensor(name=name, dim=list(dim), stride=list(stride), data_type=getattr(kinds, kind))
            for name, (dim, stride, kind) in shapes.items()
            if name not in self.case.outputs
        }
        found = self.case.body(module, graph, tensors)
        for name, tensor in found.items():
            dim, stride, kind = shapes[name]
            tensor.set_output(True).set_data_type(getattr(kinds, kind)).set_dim(list(dim)).set_stride(list(stride))
        return graph, tensors | found


def _packed(*dim: int, kind: str = "BFLOAT16") -> tuple[tuple[int, ...], tuple[int, ...], str]:
    stride = [1]
    for n in reversed(dim[1:]):
        stride.insert(0, stride[0] * n)
    return dim, tuple(stride), kind


def _channels_last(n: int, c: int, h: int, w: int) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    return (n, c, h, w), (h * w * c, 1, w * c, c), "BFLOAT16"


def _columns(b: int, k: int, n: int) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    return (b, k, n), (k * n, 1, k), "BFLOAT16"


def _matmul(m: int, n: int, k: int) -> Callable[[int], Shapes]:
    return lambda more: {"x": _packed(1, m + 8 * more, k), "w": _columns(1, k, n), "y": _packed(1, m + 8 * more, n)}


def _mlp(m: int, n: int, k: int) -> Callable[[int], Shapes]:
    return lambda more: {**_matmul(m, n, k)(more), "b": _packed(1, 1, n)}


def _convolution(n: int, c: int, size: int) -> Callable[[int], Shapes]:
    return lambda more: {
        "x": _channels_last(n + more, c, size, size),
        "w": _channels_last(c, c, 3, 3),
        "y": _channels_last(n + more, c, size, size),
    }


def _attention(b: int, h: int, s: int, d: int) -> Callable[[int], Shapes]:
    return lambda more: {name: _packed(b + more, h, s, d) for name in ("q", "k", "v", "o")}


def _norm(rows: int, hidden: int) -> Callable[[int], Shapes]:
    return lambda more: {
        "x": _packed(rows + 8 * more, hidden, 1, 1),
        "scale": _packed(1, hidden, 1, 1),
        "bias": _packed(1, hidden, 1, 1),
        "y": _packed(rows + 8 * more, hidden, 1, 1),
    }


def _product(module: Any, graph: Any, t: dict[str, Any]) -> dict[str, Any]:
    return {"y": graph.matmul(A=t["x"], B=t["w"])}


def _biased_gelu(module: Any, graph: Any, t: dict[str, Any]) -> dict[str, Any]:
    return {"y": graph.gelu(input=graph.bias(input=graph.matmul(A=t["x"], B=t["w"]), bias=t["b"]))}


def _convolved(module: Any, graph: Any, t: dict[str, Any]) -> dict[str, Any]:
    y = graph.conv_fprop(image=t["x"], weight=t["w"], padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    return {"y": graph.relu(input=y)}


def _attended(module: Any, graph: Any, t: dict[str, Any]) -> dict[str, Any]:
    o, _ = graph.sdpa(
        name="sdpa", q=t["q"], k=t["k"], v=t["v"], is_inference=True, attn_scale=0.088, use_causal_mask=True
    )
    return {"o": o}


def _normalised(module: Any, graph: Any, t: dict[str, Any]) -> dict[str, Any]:
    epsilon = graph.tensor_scalar(1e-5, module.scalar_type.RUNTIME_PARAM)
    y, _, _ = graph.layernorm(
        name="norm", norm_forward_phase=module.norm_forward_phase.INFERENCE, input=t["x"], scale=t["scale"],
        bias=t["bias"], epsilon=epsilon,
    )  # fmt: skip
    return {"y": y}


CASES: tuple[Case, ...] = (
    Case("matmul 256x256x256", _matmul(256, 256, 256), _product, ("y",), small=True),
    Case("matmul + bias + gelu 128x256x256", _mlp(128, 256, 256), _biased_gelu, ("y",), small=True),
    Case("matmul 4096x4096x4096", _matmul(4096, 4096, 4096), _product, ("y",)),
    Case("matmul + bias + gelu 4096x14336x4096", _mlp(4096, 14336, 4096), _biased_gelu, ("y",)),
    Case("convolution + relu 32x256x56x56", _convolution(32, 256, 56), _convolved, ("y",)),
    Case("causal attention 1x2x128x64", _attention(1, 2, 128, 64), _attended, ("o",), small=True),
    Case("causal attention 4x16x4096x128", _attention(4, 16, 4096, 128), _attended, ("o",)),
    Case("layernorm 8192x4096", _norm(8192, 4096), _normalised, ("y",)),
)

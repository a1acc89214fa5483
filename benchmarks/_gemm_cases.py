"""The cases of the GEMM benchmark: what is multiplied, what surrounds it, and the target of the project for it.

A case makes its buffers, our graph over them, and torch's expression for the same thing. Weights come in several copies where the
case is bound by their bytes, so that no engine is served from L2. Used by gemm.py; needs torch, and a GPU for the buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["CASES", "Case", "Setup"]

_BF16, _FP8 = "bfloat16", "fp8_e4m3"
_TORCH = {_BF16: torch.bfloat16, _FP8: torch.float8_e4m3fn}
_L2_BYTES = 60 << 20
_SETS = 4  # copies of the weights of a memory-bound case


@dataclass
class Setup:
    """A case at hand. ``sets`` are the buffers by operand name, one mapping for each copy of the weights."""

    sets: list[dict[str, torch.Tensor]]
    graph: Any
    names: dict[str, Any]
    expression: Callable[..., torch.Tensor]
    reference: torch.Tensor
    peers: dict[str, Callable[[int], object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    kind    "plain", "bias_gelu", "swiglu", or "int8_weights": they are stored as int8 and scaled on their way to the product.
            fp8 is scaled by one fp32 number for each operand
    group   cases whose geometric mean has a target
    target  the least speed-up over ``peer``, or over the best one
    bytes_bound  count bytes, not FLOPs
    """

    m: int
    n: int
    k: int
    dtype: str
    kind: str = "plain"
    group: str = ""
    target: float = 0.0
    bytes_bound: bool = False
    peer: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.dtype} {self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * (2 if self.kind == "swiglu" else 1)

    @property
    def bytes(self) -> float:
        size = _TORCH[self.dtype].itemsize
        weights = self.n * self.k * {"swiglu": 2 * size, "int8_weights": 1}.get(self.kind, size)
        return weights + self.m * self.k * size + self.m * self.n * 2

    def setup(self, device: str = "cuda") -> Setup:
        """Buffers, graph and reference on ``device``. The reference is computed in fp64 from the stored operands."""
        generator = torch.Generator(device=device).manual_seed(self.m + 3 * self.n + 7 * self.k)

        def random(*shape: int, dtype: torch.dtype = _TORCH[self.dtype]) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(0.5).to(dtype)

        def stored(*shape: int) -> torch.Tensor:
            if self.kind != "int8_weights":
                return random(*shape)
            return torch.randint(-127, 128, shape, generator=generator, device=device, dtype=torch.int8)

        copies = _SETS if self.bytes_bound else 1
        x = random(1, self.m, self.k)
        weights = ["w"] if self.kind != "swiglu" else ["w_gate", "w_up"]
        sets: list[dict[str, torch.Tensor]] = []
        for _ in range(copies):
            one = {"x": x, "y": torch.empty(1, self.m, self.n, device=device, dtype=torch.bfloat16)}
            one |= {w: stored(1, self.n, self.k).transpose(1, 2) for w in weights}  # [K, N], contiguous along K
            if self.kind == "int8_weights":
                one["scale"] = torch.full((1, 1, 1), 1 / 64, device=device)
            if self.kind == "bias_gelu":
                one["bias"] = random(1, 1, self.n, dtype=torch.bfloat16)
            if self.dtype == _FP8:
                one |= {s: torch.full((1, 1, 1), v, device=device) for s, v in (("scale_x", 0.5), ("scale_w", 0.25))}
            sets.append(one)
        expression = _EXPRESSIONS[self.kind]
        exact = {name: t.double() for name, t in sets[0].items() if name != "y"}
        reference = expression(**exact)
        graph, names = self._graph(sets[0])
        return Setup(sets, graph, names, expression, reference)

    def _graph(self, buffers: dict[str, torch.Tensor]) -> tuple[Any, dict[str, Any]]:
        import cudnn_core

        g = cudnn_core.Graph(io_data_type=_BF16, intermediate_data_type="float32", compute_data_type="float32")
        t = {name: g.tensor_like(buffer, name=name) for name, buffer in buffers.items() if name != "y"}
        if self.kind == "swiglu":
            gate, up = (g.matmul(A=t["x"], B=t[w]) for w in ("w_gate", "w_up"))
            y = g.mul(a=g.swish(input=gate), b=up)
        else:
            w = t["w"] if self.kind != "int8_weights" else g.mul(a=t["w"], b=t["scale"]).set_data_type(_BF16)
            y = g.matmul(A=t["x"], B=w)
            if self.dtype == _FP8:
                y = g.mul(a=g.mul(a=y, b=t["scale_x"]), b=t["scale_w"])
            if self.kind == "bias_gelu":
                y = g.gelu(input=g.add(a=y, b=t["bias"]))
        t["y"] = y.set_output(True).set_data_type(_BF16).set_name("y")
        return g, t


def _plain(x: torch.Tensor, w: torch.Tensor, scale_x: Any = None, scale_w: Any = None) -> torch.Tensor:
    y = x @ w
    return y if scale_x is None else y * scale_x * scale_w


def _bias_gelu(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ w + bias)


def _swiglu(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x @ w_gate) * (x @ w_up)


def _int8_weights(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x @ (w * scale).to(x.dtype)


_EXPRESSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "plain": _plain,
    "bias_gelu": _bias_gelu,
    "swiglu": _swiglu,
    "int8_weights": _int8_weights,
}

_LARGE = ((8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 1024), (8192, 28672, 4096),
          (4096, 4096, 16384))  # fmt: skip

CASES: tuple[Case, ...] = (
    *(Case(*shape, _BF16, group="large bf16", target=0.96) for shape in _LARGE),
    *(Case(*shape, _FP8, group="large fp8", target=0.96) for shape in _LARGE),
    *(Case(m, 8192, 8192, dtype, target=target, bytes_bound=True)
      for dtype, target in ((_BF16, 1.20), (_FP8, 1.40)) for m in (16, 128)),
    *(Case(m, 14336, 4096, _BF16, kind=kind, target=1.10, bytes_bound=m == 16, peer="torch.compile")
      for kind in ("bias_gelu", "swiglu") for m in (4096, 16)),
    *(Case(m, 14336, 4096, _BF16, kind="int8_weights", bytes_bound=m == 16, peer="torch.compile") for m in (4096, 16)),
)  # fmt: skip

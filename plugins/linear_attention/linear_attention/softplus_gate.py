"""The softplus form of a KDA gate, found in a graph: g = -exp(a_log) softplus(g + dt_bias) as pointwise nodes before the kda node.

``graphs.build`` makes these nodes, as the row of kda has no such attribute. a_log [1, HO, 1] and dt_bias [1, HO, K] may be absent, the
operands of a sum or product may stand in either order. Imported by ``lowering`` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cudnn_core import FrozenGraph, FrozenNode, FrozenTensor

__all__ = ["POINTWISE", "Gate", "softplus_gate"]

POINTWISE = ("add", "softplus", "exp", "mul", "neg")


class Gate(NamedTuple):
    """``tensors``: g (the logits), a_log and dt_bias, or None; ``nodes``: the pointwise ones."""

    tensors: dict[str, FrozenTensor | None]
    nodes: tuple[FrozenNode, ...]


def softplus_gate(graph: FrozenGraph, kda: FrozenNode) -> Gate | str:
    """The gate of a graph whose only other nodes are those of its softplus form, or what is different in words."""
    try:
        return _Walk(graph, kda).gate()
    except _DifferentError as difference:
        return str(difference)


class _DifferentError(Exception):
    """The graph is no such form."""


class _Walk:
    def __init__(self, graph: FrozenGraph, kda: FrozenNode) -> None:
        self.graph, self.kda = graph, kda
        self.seen: list[FrozenNode] = []

    def gate(self) -> Gate:
        attrs, g = self.kda.attrs, self.kda.inputs["g"]
        if attrs["safe_gate"] or attrs["gate_domain"] != "log":
            raise _DifferentError("a gate that kda activates or takes as a decay")
        per_head = (1, g.dim[1], 1)
        (value,) = self._made(g, "neg")
        amplitude = None
        if self._op(value) == "mul":
            factors = self._made(value, "mul")
            scales = [factor for factor in factors if self._op(factor) == "exp"]
            rest = [factor for factor in factors if self._op(factor) == "softplus"]
            if len(scales) != 1 or len(rest) != 1:
                raise _DifferentError("a product of other factors than exp and softplus")
            value = rest[0]
            (amplitude,) = self._made(scales[0], "exp")
            self._input(amplitude, "a_log", per_head)
        (logits,) = self._made(value, "softplus")
        bias = None
        if self._op(logits) == "add":
            first, second = self._made(logits, "add")
            logits, bias = (first, second) if first.dim == g.dim else (second, first)
            self._input(bias, "dt_bias", (1, *g.dim[1:]))
        self._input(logits, "g", g.dim)
        if len(self.seen) + 1 != len(self.graph.nodes):
            raise _DifferentError("nodes that are no part of the gate")
        return Gate({"g": logits, "a_log": amplitude, "dt_bias": bias}, tuple(self.seen))

    def _op(self, tensor: FrozenTensor) -> str:
        return "" if tensor.producer is None else self.graph.nodes[tensor.producer[0]].op

    def _made(self, tensor: FrozenTensor, op: str) -> tuple[FrozenTensor, ...]:
        """The inputs of the ``op`` that makes an intermediate tensor in float32."""
        if self._op(tensor) != op or tensor.producer is None:
            raise _DifferentError(f"{self._op(tensor) or 'an input'} where {op} is")
        if tensor.role != "virtual":
            raise _DifferentError(f"the result of {op} as an output of the graph")
        if tensor.dtype != "float32":
            raise _DifferentError(f"the result of {op} in {tensor.dtype}")
        if len(tensor.consumers) != 1:
            raise _DifferentError(f"a result of {op} that several nodes read")
        node = self.graph.nodes[tensor.producer[0]]
        self.seen.append(node)
        return tuple(node.inputs[port] for port in ("in0", "in1") if port in node.inputs)

    def _input(self, tensor: FrozenTensor, name: str, dim: tuple[object, ...]) -> None:
        if tensor.role != "input" or tensor.by_value:
            raise _DifferentError(f"no tensor of the caller as {name}")
        if tensor.dim != dim:
            raise _DifferentError(f"{name} of {tuple(map(str, tensor.dim))}")

"""What a plugin needs to add an op: the row and its parts. See docs/writing-an-engine.md."""

from __future__ import annotations

from ._ops._schema import REQUIRED, Attr, Cost, Node, Op, Param, Port, Problem, Tensor, TensorSpec

__all__ = ["REQUIRED", "Attr", "Cost", "Node", "Op", "Param", "Port", "Problem", "Tensor", "TensorSpec"]

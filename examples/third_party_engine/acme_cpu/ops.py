"""The op that this package adds: ``acme_rmsnorm_gated``. Named by the manifest; loaded when a graph uses the op.

    Y = input * inv_rms * scale * silu(gate),  inv_rms = 1 / sqrt(mean(input^2) + epsilon),  silu(g) = g / (1 + exp(-g))

The mean runs over the last axis. input and gate [..., C], scale [C] or [1, ..., 1, C]; Y like input; inv_rms [..., 1].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from cudnn_core import nbytes, op_schema

__all__ = ["RMSNORM_GATED"]

_FLOATS = ("float64", "float32", "float16", "bfloat16")


def _wants_inv_rms(attrs: Mapping[str, Any]) -> bool:
    return bool(attrs["save_inv_rms"])


def _infer(node: op_schema.Node) -> Mapping[str, op_schema.TensorSpec]:
    dim = node.inputs["input"].dim
    specs = {"Y": op_schema.TensorSpec(dim)}
    if _wants_inv_rms(node.attrs):
        specs["inv_rms"] = op_schema.TensorSpec(None if dim is None else (*dim[:-1], 1), dtype="float32")
    return specs


def _validate(node: op_schema.Node) -> Iterable[op_schema.Problem]:
    x, gate, scale = (node.inputs[port] for port in ("input", "gate", "scale"))
    for port, tensor in (("input", x), ("gate", gate), ("scale", scale)):
        if tensor.dtype not in _FLOATS:
            yield op_schema.Problem(port, "wrong data type", " or ".join(_FLOATS), str(tensor.dtype))
    if tuple(gate.dim) != tuple(x.dim):
        yield op_schema.Problem("gate", "differs in shape from input", x.dim, gate.dim)
    if not scale.dim or len(scale.dim) > len(x.dim) or (*scale.dim[:-1], scale.dim[-1]) != _scale_shape(x, scale):
        yield op_schema.Problem(
            "scale", "must have the size of input's last axis, and 1 elsewhere", x.dim[-1], scale.dim
        )
    for port, spec in _infer(node).items():
        if tuple(node.outputs[port].dim) != spec.dim:
            yield op_schema.Problem(port, "wrong shape", spec.dim, node.outputs[port].dim)
    if not node.attrs["epsilon"] > 0:
        yield op_schema.Problem("epsilon", "must be positive", "> 0", node.attrs["epsilon"])


def _scale_shape(x: Any, scale: Any) -> tuple[Any, ...]:
    return (*(1 for _ in scale.dim[:-1]), x.dim[-1])


def _dims(node: op_schema.Node) -> Mapping[str, Any]:
    dim = node.inputs["input"].dim
    rows: Any = 1
    for size in dim[:-1]:
        rows = rows * size  # a Dim multiplies like an int
    return {"rows": rows, "cols": dim[-1]}


def _cost(node: op_schema.Node) -> op_schema.Cost:
    """At fixed sizes. An element costs a square and an addition, five operations of silu, three products."""
    tensors = [*node.inputs.values(), *node.outputs.values()]
    moved = sum(nbytes(tensor.dtype, math.prod(tensor.dim)) for tensor in tensors)
    return op_schema.Cost(10.0 * math.prod(node.inputs["input"].dim), float(moved))


RMSNORM_GATED = op_schema.Op(
    "acme_rmsnorm_gated",
    group="norm",
    inputs=(op_schema.Port("input"), op_schema.Port("gate"), op_schema.Port("scale")),
    outputs=(op_schema.Port("Y"), op_schema.Port("inv_rms", data=False, when=_wants_inv_rms)),
    attrs=(op_schema.Attr("epsilon", "float", 1e-6), op_schema.Attr("save_inv_rms", "bool", False)),
    infer=_infer,
    validate=_validate,
    dims=_dims,
    operands={"A": "input", "C": "Y", "gate": "gate", "scale": "scale"},
    cost=_cost,
    builders={
        "acme_rmsnorm_gated": (
            (
                op_schema.Param("input"),
                op_schema.Param("gate"),
                op_schema.Param("scale"),
                op_schema.Param("epsilon", 1e-6),
                op_schema.Param("save_inv_rms", False),
            ),
            None,
        )
    },
    reference="acme_cpu.reference:rmsnorm_gated",
    doc="Y = rmsnorm(input) * scale * silu(gate) over the last axis. Returns [Y, inv_rms]; inv_rms is None unless "
    "save_inv_rms. input, gate [..., C], scale [1, ..., 1, C] -> Y [..., C], inv_rms [..., 1].",
)

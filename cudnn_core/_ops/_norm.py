"""Rows of ``layernorm`` and ``rmsnorm`` (group ``norm``). Imported by the op table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._dims import Extent, product, same
from ._common import (
    FLOATS,
    TAIL_OUT_DIMS,
    Checks,
    broadcasts_to,
    dim_of,
    like_strides,
    node_bytes,
    numel,
    shape_text,
)
from ._schema import Attr, Cost, Node, Op, Param, Port, Problem, TensorSpec

__all__ = ["ROWS"]

_STATISTICS = ("mean", "inv_variance")


def _training(attrs: Mapping[str, Any]) -> bool:
    return bool(attrs["norm_forward_phase"] == "TRAINING")


def _infer(node: Node) -> Mapping[str, TensorSpec]:
    source, dim, scale = node.inputs["input"], dim_of(node, "input"), dim_of(node, "scale")
    specs = {"Y": TensorSpec(dim, like_strides(source, dim))}
    statistics = None
    if dim is not None and scale is not None and len(scale) == len(dim):
        statistics = tuple(size if same(scaled, 1) else 1 for size, scaled in zip(dim, scale, strict=True))
    if _training(node.attrs):
        for port in _STATISTICS if node.op == "layernorm" else _STATISTICS[1:]:
            specs[port] = TensorSpec(statistics, like_strides(source, statistics))
    return specs


def _validate(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    dim, scale = node.inputs["input"].dim, node.inputs["scale"].dim
    check.dtype("input", *FLOATS, "fp8_e4m3", "fp8_e5m2")
    for port in ("scale", "bias", *_STATISTICS):
        check.dtype(port, *FLOATS)
    check.scalar("epsilon", "float64", "float32", "float16", "bfloat16")
    if not check.require(
        broadcasts_to(scale, dim),
        "scale",
        "does not fit the input",
        f"each axis 1 or as in {shape_text(dim)}",
        shape_text(scale),
    ):
        return check.problems
    check.shape("bias", scale)
    check.require(
        not all(same(size, 1) for size in scale) or all(same(size, 1) for size in dim[1:]),
        "scale",
        "names no axis to normalise over (its axes other than 1 do)",
        "an axis of the input",
        shape_text(scale),
    )
    check.inferred(_infer(node))
    return check.problems


def _dims(node: Node) -> Mapping[str, Extent]:
    dim, scale = node.inputs["input"].dim, node.inputs["scale"].dim
    pairs = list(zip(dim, scale, strict=True))
    return {
        "rows": product(size for size, scaled in pairs if same(scaled, 1)),
        "cols": product(size for size, scaled in pairs if not same(scaled, 1)),
    }


def _cost(node: Node) -> Cost:
    """An element costs a square, an addition, two scalings; with a mean also a sum and a difference; with a bias one."""
    each = 4 + (2 if node.op == "layernorm" else 0) + ("bias" in node.inputs)
    return Cost(float(each * numel(node.inputs["input"])), node_bytes(node))


def _row(name: str, statistics: tuple[str, ...], formula: str) -> Op:
    params = (
        Param("input"),
        Param("scale", None),
        Param("bias", None),
        Param("epsilon"),
        Param("norm_forward_phase"),
        *TAIL_OUT_DIMS,
    )
    return Op(
        name,
        group="norm",
        inputs=(Port("input"), Port("scale"), Port("bias", optional=True), Port("epsilon", data=False)),
        outputs=(Port("Y"), *(Port(port, data=False, when=_training) for port in statistics)),
        attrs=(Attr("norm_forward_phase", "enum", choices=("INFERENCE", "TRAINING")),),
        infer=_infer,
        validate=_validate,
        dims=_dims,
        operands={"A": "input", "C": "Y", "scale": "scale"},
        cost=_cost,
        builders={name: (params, None)},
        doc=f"{formula} The axes on which scale differs from 1 are normalised over; scale and bias have the input's rank "
        f"and equal shapes, epsilon one element. Under TRAINING also {' and '.join(statistics)}, of size 1 on those axes.",
    )


ROWS: tuple[Op, ...] = (
    _row(
        "layernorm",
        _STATISTICS,
        "Y = (input - mean) * inv_variance * scale + bias, with inv_variance = 1 / sqrt(variance + epsilon) of the biased "
        "variance.",
    ),
    _row(
        "rmsnorm",
        ("inv_variance",),
        "Y = input * inv_variance * scale + bias, with inv_variance = 1 / sqrt(mean(input^2) + epsilon).",
    ),
)

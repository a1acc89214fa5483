"""Rows of the pointwise ops (group ``pointwise``), generated from one table. Imported by the op table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from .._dims import Extent
from ._common import (
    INTEGERS,
    TAIL,
    Checks,
    broadcast,
    broadcast_shape,
    elements,
    layout_axes,
    like_strides,
    node_bytes,
    numel,
    same_shape,
    shape_text,
)
from ._schema import REQUIRED, Attr, Cost, Node, Op, Param, Port, Problem, Tensor, TensorSpec

__all__ = ["ROWS"]

# The frontend takes these two by position where a builder is not generated from its table.
_TAIL_BY_POSITION = (Param("name", ""), Param("compute_data_type", None))
_PORTS = ("in0", "in1", "in2")

# name: (builder's tensor parameters, formula)
_TABLE: dict[str, tuple[tuple[str, ...], str]] = {
    "abs": (("input",), "|in0|"),
    "ceil": (("input",), "the least integer >= in0"),
    "cos": (("input",), "cos(in0)"),
    "elu": (("input",), "in0 > 0 ? in0 : exp(in0) - 1"),
    "erf": (("input",), "erf(in0)"),
    "exp": (("input",), "exp(in0)"),
    "floor": (("input",), "the greatest integer <= in0"),
    "gelu": (("input",), "in0 * (1 + erf(in0 / sqrt(2))) / 2"),
    "gelu_approx_tanh": (("input",), "in0 * (1 + tanh(sqrt(2 / pi) * (in0 + 0.044715 * in0^3))) / 2"),
    "identity": (("input",), "in0, converted to the data type of out"),
    "log": (("input",), "ln(in0)"),
    "logical_not": (("input",), "in0 == 0"),
    "neg": (("input",), "-in0"),
    "reciprocal": (("input",), "1 / in0"),
    "rsqrt": (("input",), "1 / sqrt(in0)"),
    "sigmoid": (("input",), "1 / (1 + exp(-in0))"),
    "sin": (("input",), "sin(in0)"),
    "softplus": (("input",), "ln(1 + exp(in0))"),
    "sqrt": (("input",), "sqrt(in0)"),
    "tan": (("input",), "tan(in0)"),
    "tanh": (("input",), "tanh(in0)"),
    "add": (("a", "b"), "in0 + in1"),
    "add_square": (("a", "b"), "in0 + in1 * in1"),
    "div": (("a", "b"), "in0 / in1"),
    "logical_and": (("a", "b"), "in0 != 0 and in1 != 0"),
    "logical_or": (("a", "b"), "in0 != 0 or in1 != 0"),
    "mul": (("a", "b"), "in0 * in1"),
    "sub": (("a", "b"), "in0 - in1"),
    "max": (("input0", "input1"), "the larger of in0 and in1"),
    "min": (("input0", "input1"), "the smaller of in0 and in1"),
    "mod": (("input0", "input1"), "the remainder of in0 / in1, with the sign of in0 (C's fmod)"),
    "pow": (("input0", "input1"), "in0 ^ in1"),
    "cmp_eq": (("input", "comparison"), "in0 == in1"),
    "cmp_ge": (("input", "comparison"), "in0 >= in1"),
    "cmp_gt": (("input", "comparison"), "in0 > in1"),
    "cmp_le": (("input", "comparison"), "in0 <= in1"),
    "cmp_lt": (("input", "comparison"), "in0 < in1"),
    "cmp_neq": (("input", "comparison"), "in0 != in1"),
    "elu_backward": (("loss", "input"), "in0 * elu'(in1)"),
    "gelu_approx_tanh_backward": (("loss", "input"), "in0 * gelu_approx_tanh'(in1)"),
    "gelu_backward": (("loss", "input"), "in0 * gelu'(in1)"),
    "sigmoid_backward": (("loss", "input"), "in0 * sigmoid'(in1)"),
    "softplus_backward": (("loss", "input"), "in0 * softplus'(in1)"),
    "tanh_backward": (("loss", "input"), "in0 * tanh'(in1)"),
    "binary_select": (("input0", "input1", "mask"), "in2 != 0 ? in0 : in1"),
}

# Builders that are a second name of an op.
_SYNONYMS = {"add": ("bias", ("input", "bias")), "mul": ("scale", ("input", "scale"))}

_SLOPE = Attr("negative_slope", "float", 0.0)
_CLIPS = (Attr("lower_clip", "float", None), Attr("upper_clip", "float", None))
_CLIP_PARAMS = (Param("negative_slope", None), Param("lower_clip", None), Param("upper_clip", None))


def _inputs(node: Node) -> list[Tensor]:
    return [node.inputs[port] for port in _PORTS if port in node.inputs]


def _out_dtype(op: str) -> str | None:
    if op.startswith(("cmp_", "logical_")):
        return "boolean"
    return "int32" if op == "gen_index" else None


def _infer(node: Node) -> Mapping[str, TensorSpec]:
    tensors = _inputs(node)
    dim = broadcast_shape(tensors)
    # The input of the full shape that says most of the layout, the first of equals.
    pattern = max((tensor for tensor in tensors if same_shape(tensor.dim, dim)), key=layout_axes, default=tensors[0])
    return {"out": TensorSpec(dim, like_strides(pattern, dim), _out_dtype(node.op))}


def _validate(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    shape: tuple[Extent, ...] = ()
    for port, tensor in node.inputs.items():
        joined, agree = broadcast((shape, tensor.dim))
        check.require(agree, port, "does not broadcast", shape_text(shape), shape_text(tensor.dim))
        shape = joined
    if not check.problems:
        check.shape("out", shape)
    if node.op.startswith("logical_"):
        for port in node.inputs:
            check.dtype(port, "boolean", *INTEGERS)
    if node.op == "binary_select":
        check.dtype("in2", "boolean", *INTEGERS)
    _validate_attrs(check, node.attrs)
    return check.problems


def _validate_attrs(check: Checks, attrs: Mapping[str, object]) -> None:
    for name in ("negative_slope", "lower_clip", "upper_clip", "swish_beta"):
        value = attrs.get(name)
        if isinstance(value, float | int):
            check.require(not math.isnan(value), name, "is not a number", "a number", value)
    low, high = attrs.get("lower_clip"), attrs.get("upper_clip")
    if isinstance(low, float | int):
        # cuDNN's and the frontend's own kernels differ on what these two combinations mean.
        check.require(low >= 0, "lower_clip", "is negative", ">= 0", low)
        check.require(not attrs["negative_slope"], "lower_clip", "excludes negative_slope", None, low)
        if isinstance(high, float | int):
            check.require(low <= high, "upper_clip", "is below lower_clip", f">= {low}", high)
    if "axis" in attrs:
        axis, rank = attrs["axis"], len(check.get("in0").dim)
        check.require(
            isinstance(axis, int) and 0 <= axis < rank, "axis", "is not an axis of in0", f"0 to {rank - 1}", axis
        )


def _dims(node: Node) -> Mapping[str, Extent]:
    return {"elements": elements(node.outputs["out"])}


def _cost(node: Node) -> Cost:
    return Cost(float(numel(node.outputs["out"])), node_bytes(node))


def _row(
    name: str,
    inputs: int,
    formula: str,
    builders: Mapping[str, tuple[Param, ...]],
    attrs: tuple[Attr, ...] = (),
) -> Op:
    ports = _PORTS[:inputs]
    return Op(
        name,
        group="pointwise",
        inputs=tuple(Port(port, data=not (name == "binary_select" and port == "in2")) for port in ports),
        outputs=(Port("out"),),
        attrs=attrs,
        infer=_infer,
        validate=_validate,
        dims=_dims,
        operands={port: port for port in (*ports, "out")},
        cost=_cost,
        builders={method: (params, None) for method, params in builders.items()},
        # A scalar or row operand can't alias out: exact aliasing needs the same shape, which the plan checks.
        alias=tuple(("out", port) for port in ports),
        doc=f"out = {formula}, element by element. Inputs broadcast as in numpy; out has the broadcast shape"
        + (" and is boolean (0 or 1 in another data type) by default." if _out_dtype(name) == "boolean" else "."),
    )


def _tensor_params(names: tuple[str, ...]) -> tuple[Param, ...]:
    return tuple(Param(name, to=port) for name, port in zip(names, _PORTS, strict=False))


def _table_rows() -> Iterable[Op]:
    for name, (params, formula) in _TABLE.items():
        builders = {name: (*_tensor_params(params), *TAIL)}
        if name in _SYNONYMS:
            method, other = _SYNONYMS[name]
            builders[method] = (*_tensor_params(other), *TAIL)
        yield _row(name, len(params), formula, builders)


def _special(inputs: tuple[str, ...], *params: Param) -> tuple[Param, ...]:
    return (*_tensor_params(inputs), *params, *_TAIL_BY_POSITION)


_RELU = "clip(in0 > 0 ? in0 : negative_slope * in0, lower_clip, upper_clip)"

ROWS: tuple[Op, ...] = (
    *_table_rows(),
    _row(
        "relu",
        1,
        f"{_RELU}; an absent clip does not clip",
        {
            "relu": _special(("input",), *_CLIP_PARAMS),
            "leaky_relu": _special(("input",), Param("negative_slope", REQUIRED)),
        },
        (_SLOPE, *_CLIPS),
    ),
    _row(
        "relu_backward",
        2,
        "in0 * d relu(in1): 0 where relu(in1) is clipped, negative_slope where in1 <= 0, else 1",
        {
            "relu_backward": _special(("loss", "input"), *_CLIP_PARAMS),
            "leaky_relu_backward": _special(("loss", "input"), Param("negative_slope", REQUIRED)),
        },
        (_SLOPE, *_CLIPS),
    ),
    _row(
        "swish",
        1,
        "in0 * sigmoid(swish_beta * in0)",
        {"swish": _special(("input",), Param("swish_beta", None))},
        (Attr("swish_beta", "float", 1.0),),
    ),
    _row(
        "swish_backward",
        2,
        "in0 * swish'(in1), at swish_beta",
        {"swish_backward": _special(("loss", "input"), Param("swish_beta", None))},
        (Attr("swish_beta", "float", 1.0),),
    ),
    _row(
        "gen_index",
        1,
        "the position along ``axis`` (int32 by default); in0 gives the shape only",
        {"gen_index": _special(("input",), Param("axis"))},
        (Attr("axis", "int"),),
    ),
)

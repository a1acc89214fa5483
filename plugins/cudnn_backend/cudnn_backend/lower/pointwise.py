"""Rows of the pointwise ops. Imported by the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .rows import Row

if TYPE_CHECKING:
    from cudnn_core import FrozenNode

    from .rows import Emitter

__all__ = ["ROWS"]

_PORTS = ("in0", "in1", "in2")

# The binding has a method of the same name that takes the inputs by position.
_PLAIN = (
    *("abs", "ceil", "cos", "elu", "erf", "exp", "floor", "gelu", "gelu_approx_tanh", "identity", "log", "logical_not"),
    *("neg", "reciprocal", "rsqrt", "sigmoid", "sin", "softplus", "sqrt", "tan", "tanh"),
    *("add", "add_square", "div", "logical_and", "logical_or", "max", "min", "mod", "mul", "pow", "sub"),
    *("cmp_eq", "cmp_ge", "cmp_gt", "cmp_le", "cmp_lt", "cmp_neq"),
    *("elu_backward", "gelu_approx_tanh_backward", "gelu_backward", "sigmoid_backward", "softplus_backward"),
    *("tanh_backward", "binary_select"),
)


def _emit(options: Callable[[Emitter, FrozenNode], dict[str, Any]]) -> Callable[[Emitter, FrozenNode], None]:
    def emit(e: Emitter, node: FrozenNode) -> None:
        inputs = [e.input(node.inputs[port]) for port in _PORTS if port in node.inputs]
        method = getattr(e.target, node.op)
        made = method(*inputs, compute_data_type=e.dtype(node.compute_dtype), **options(e, node))
        e.result(made, node.outputs["out"])

    return emit


def _none(e: Emitter, node: FrozenNode) -> dict[str, Any]:
    return {}


def _clips(e: Emitter, node: FrozenNode) -> dict[str, Any]:
    """What is given; a slope of 0 is the plain function, for which the backend has more engines."""
    given = {name: node.attrs[name] for name in ("negative_slope", "lower_clip", "upper_clip")}
    return {name: value for name, value in given.items() if value is not None and (value or name != "negative_slope")}


def _beta(e: Emitter, node: FrozenNode) -> dict[str, Any]:
    return {"swish_beta": node.attrs["swish_beta"]}


def _axis(e: Emitter, node: FrozenNode) -> dict[str, Any]:
    return {"axis": e.program.axis(node.inputs["in0"], node.attrs["axis"])}


ROWS = {
    **{name: Row(_emit(_none)) for name in _PLAIN},
    "relu": Row(_emit(_clips)),
    "relu_backward": Row(_emit(_clips)),
    "swish": Row(_emit(_beta)),
    "swish_backward": Row(_emit(_beta)),
    "gen_index": Row(_emit(_axis)),
}

"""Lowerings: op name -> function(node, inputs, math) -> {output port: value tensor}. Imported by the evaluator.

``node`` has fixed sizes; ``inputs`` maps the present ports to value tensors (a tuple of them for a variadic port);
``math`` says in which precision to compute. A lowering returns unrounded results in any dtype: the evaluator rounds them
to the declared types and checks their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["INTEGER", "LOWERED", "OTHER", "Lowering", "lowering"]

Lowering = Callable[[Any, Mapping[str, Any], Any], Mapping[str, Any]]

# Pointwise ops: those that integers stay integers in, and the others.
INTEGER = (
    "abs",
    "add",
    "add_square",
    "binary_select",
    "ceil",
    "cmp_eq",
    "cmp_ge",
    "cmp_gt",
    "cmp_le",
    "cmp_lt",
    "cmp_neq",
    "floor",
    "identity",
    "logical_and",
    "logical_not",
    "logical_or",
    "max",
    "min",
    "mod",
    "mul",
    "neg",
    "relu",
    "sub",
)
OTHER = (
    "cos",
    "div",
    "elu",
    "elu_backward",
    "erf",
    "exp",
    "gelu",
    "gelu_approx_tanh",
    "gelu_approx_tanh_backward",
    "gelu_backward",
    "gen_index",
    "log",
    "pow",
    "reciprocal",
    "relu_backward",
    "rsqrt",
    "sigmoid",
    "sigmoid_backward",
    "sin",
    "softplus",
    "softplus_backward",
    "sqrt",
    "swish",
    "swish_backward",
    "tan",
    "tanh",
    "tanh_backward",
)

# op name -> (module, function)
LOWERED: dict[str, tuple[str, str]] = {
    **dict.fromkeys((*INTEGER, *OTHER), ("_pointwise", "pointwise")),
    "matmul": ("_matmul", "matmul"),
    "reduction": ("_reduction", "reduction"),
    "reshape": ("_structural", "reshape"),
    "transpose": ("_structural", "transpose"),
    "slice": ("_structural", "slice_"),
    "concatenate": ("_structural", "concatenate"),
    "layernorm": ("_norm", "layernorm"),
    "rmsnorm": ("_norm", "rmsnorm"),
    "sdpa": ("_sdpa", "sdpa"),
    "conv_fprop": ("_conv", "conv_fprop"),
    "block_scale_dequantize": ("_block_scale", "dequantize"),
    "block_scale_quantize": ("_block_scale", "quantize"),
    "moe_grouped_matmul": ("_moe", "moe_grouped_matmul"),
    "gdn": ("_linear_attention", "gated_delta"),
    "kda": ("_linear_attention", "gated_delta"),
}


def lowering(op: str) -> Lowering:
    """The lowering of an in-tree op, or of a plugin's op through the reference that its row names."""
    if op in LOWERED:
        module, function = LOWERED[op]
        found: Lowering = getattr(import_module(f"{__name__}.{module}"), function)
        return found
    from cudnn_core import lookup_op

    module, _, function = lookup_op(op).reference.partition(":")
    reference = getattr(import_module(module), function)
    return lambda node, inputs, math: reference({port: math.as_floats(x) for port, x in inputs.items()}, node.attrs)

"""Pointwise ops and their backward forms, from the definitions, stable where the textbook form cancels.

Integers stay integers in the ops of ``INTEGER``; elsewhere they are computed as floats. NaN propagates, through min and
max too. ``mod`` has the sign of the dividend (C's fmod). Integer division by zero gives 0.
"""

from __future__ import annotations

import math as scalar_math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import INTEGER
from ._math import Math, is_integer

__all__ = ["pointwise"]

Tensor = Any
_SQRT_HALF = scalar_math.sqrt(0.5)
_SQRT_2_OVER_PI = scalar_math.sqrt(2.0 / scalar_math.pi)
_INTEGER_COMPUTE = ("int64", "int32", "int8", "uint8", "int4")


def pointwise(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    out = node.outputs["out"]
    operands = [inputs[port] for port in ("in0", "in1", "in2") if port in inputs]
    if node.op == "gen_index":
        axis = node.attrs["axis"]
        shape = [1] * len(out.dim)
        shape[axis] = out.dim[axis]
        index = torch.arange(out.dim[axis], dtype=torch.int64, device=math.device)
        return {"out": index.reshape(shape).expand(out.dim)}
    if node.op == "binary_select":
        chosen, other, mask = operands
        if not is_integer(chosen, other):
            chosen, other = math.as_float(chosen), math.as_float(other)
        return {"out": torch.where(mask != 0, chosen, other)}
    exact = is_integer(*operands) and (
        node.op in INTEGER or (node.op == "div" and node.compute_dtype in _INTEGER_COMPUTE)
    )
    if node.op == "relu" and (
        node.attrs.get("negative_slope")
        or any(node.attrs.get(name) is not None for name in ("lower_clip", "upper_clip"))
    ):
        exact = False
    operands = [value.to(torch.int64) if exact else math.as_float(value) for value in operands]
    function = _FUNCTIONS[node.op]
    if node.op in _WITH_ATTRS:
        return {"out": function(*operands, node.attrs)}
    return {"out": function(*operands)}


def _elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.expm1(torch.minimum(x, torch.zeros_like(x))))


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.special.erfc(-x * _SQRT_HALF)


def _gelu_backward(loss: Tensor, x: Tensor) -> Tensor:
    density = torch.exp(-0.5 * x * x) * scalar_math.sqrt(0.5 / scalar_math.pi)
    return loss * (_normal_cdf(x) + x * density)


def _tanh_argument(x: Tensor) -> Tensor:
    return _SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)


def _gelu_approx_tanh(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * _tanh_argument(x))  # 0.5 (1 + tanh u) = sigmoid(2 u), without cancellation


def _gelu_approx_tanh_backward(loss: Tensor, x: Tensor) -> Tensor:
    twice = 2 * _tanh_argument(x)
    gate = torch.sigmoid(twice)
    slope = 2 * _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x)
    return loss * (gate + x * gate * torch.sigmoid(-twice) * slope)


def _clipped(x: Tensor, attrs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """x or slope * x, before the clips, and whether a clip changes it."""
    slope = attrs.get("negative_slope") or 0.0
    leaky = torch.where(x > 0, x, x * slope if slope else torch.where(torch.isnan(x), x, torch.zeros_like(x)))
    lower, upper = attrs.get("lower_clip"), attrs.get("upper_clip")
    outside = torch.zeros_like(x, dtype=torch.bool)
    if lower is not None:
        outside = outside | (leaky < lower)
    if upper is not None:
        outside = outside | (leaky > upper)
    return leaky, outside


def _relu(x: Tensor, attrs: Mapping[str, Any]) -> Tensor:
    if not x.dtype.is_floating_point:
        return x.clamp(min=0)
    lower, upper = attrs.get("lower_clip"), attrs.get("upper_clip")
    leaky, _ = _clipped(x, attrs)
    return leaky.clamp(min=lower, max=upper) if lower is not None or upper is not None else leaky


def _relu_backward(loss: Tensor, x: Tensor, attrs: Mapping[str, Any]) -> Tensor:
    _, outside = _clipped(x, attrs)
    factor = torch.where(x > 0, torch.ones_like(x), torch.full_like(x, attrs.get("negative_slope") or 0.0))
    factor = torch.where(outside, torch.zeros_like(x), factor)
    return loss * torch.where(torch.isnan(x), x, factor)


def _swish(x: Tensor, attrs: Mapping[str, Any]) -> Tensor:
    return x * torch.sigmoid(attrs["swish_beta"] * x)


def _swish_backward(loss: Tensor, x: Tensor, attrs: Mapping[str, Any]) -> Tensor:
    beta = attrs["swish_beta"]
    gate = torch.sigmoid(beta * x)
    return loss * (gate + beta * x * gate * torch.sigmoid(-beta * x))


def _guarded(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def guarded(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype.is_floating_point:
            return function(a, b)
        a, b = torch.broadcast_tensors(a, b)
        return torch.where(b == 0, 0, function(a, torch.where(b == 0, 1, b)))

    return guarded


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.dtype.is_floating_point else torch.div(a, b, rounding_mode="trunc")


_WITH_ATTRS = frozenset(("relu", "relu_backward", "swish", "swish_backward"))
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "abs": torch.abs,
    "add": torch.add,
    "add_square": lambda a, b: a + b * b,
    "ceil": torch.ceil,
    "cmp_eq": torch.eq,
    "cmp_ge": torch.ge,
    "cmp_gt": torch.gt,
    "cmp_le": torch.le,
    "cmp_lt": torch.lt,
    "cmp_neq": torch.ne,
    "cos": torch.cos,
    "div": _guarded(_divide),
    "elu": _elu,
    "elu_backward": lambda loss, x: loss * torch.where(x > 0, torch.ones_like(x), torch.exp(x)),
    "erf": torch.erf,
    "exp": torch.exp,
    "floor": torch.floor,
    "gelu": lambda x: x * _normal_cdf(x),
    "gelu_approx_tanh": _gelu_approx_tanh,
    "gelu_approx_tanh_backward": _gelu_approx_tanh_backward,
    "gelu_backward": _gelu_backward,
    "identity": lambda x: x,
    "log": torch.log,
    "logical_and": lambda a, b: (a != 0) & (b != 0),
    "logical_not": lambda a: a == 0,
    "logical_or": lambda a, b: (a != 0) | (b != 0),
    "max": torch.maximum,
    "min": torch.minimum,
    "mod": _guarded(torch.fmod),
    "mul": torch.mul,
    "neg": torch.neg,
    "pow": torch.pow,
    "reciprocal": torch.reciprocal,
    "relu": _relu,
    "relu_backward": _relu_backward,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sigmoid_backward": lambda loss, x: loss * torch.sigmoid(x) * torch.sigmoid(-x),
    "sin": torch.sin,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "softplus_backward": lambda loss, x: loss * torch.sigmoid(x),
    "sqrt": torch.sqrt,
    "sub": torch.sub,
    "swish": _swish,
    "swish_backward": _swish_backward,
    "tan": torch.tan,
    "tanh": torch.tanh,
    # 1 - tanh(x)**2 = 4 sigmoid(2 x) sigmoid(-2 x), without cancellation
    "tanh_backward": lambda loss, x: loss * 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x),
}

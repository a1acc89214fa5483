"""The references of the pointwise ops: their definitions in numpy.

``REFERENCE[op](*args, **attrs)`` computes in fp64, or exactly in int64 where every argument is an integer (or boolean) array and the
op has an integer form; of a source (gen_index, constant) it is ``(shape, **attrs)``. Imports numpy, so the op table imports this
module when a reference is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["REFERENCE"]

Array = Any
_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715

_erf = np.vectorize(math.erf, otypes=["float64"])
_erfc = np.vectorize(math.erfc, otypes=["float64"])


def _is_integer(*values: Array) -> bool:
    return all(value.dtype.kind in "iub" for value in values)


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0 / (1.0 + e), e / (1.0 + e))


def _normal_cdf(x: Array) -> Array:
    return 0.5 * _erfc(-x * _SQRT_HALF)


def _gelu_backward(loss: Array, x: Array) -> Array:
    return loss * (_normal_cdf(x) + x * np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi))


def _twice_tanh_argument(x: Array) -> Array:
    return 2.0 * _SQRT_2_OVER_PI * (x + _CUBIC * x**3)


def _gelu_tanh_backward(loss: Array, x: Array) -> Array:
    twice = _twice_tanh_argument(x)
    gate = _sigmoid(twice)
    slope = 2.0 * _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * x * x)
    return loss * (gate + x * gate * _sigmoid(-twice) * slope)


def _swish_backward(loss: Array, x: Array, swish_beta: float) -> Array:
    gate = _sigmoid(swish_beta * x)
    return loss * (gate + swish_beta * x * gate * _sigmoid(-swish_beta * x))


def _leaky(x: Array, slope: float | None) -> Array:
    return np.where(x > 0, x, x * slope if slope else np.where(np.isnan(x), x, 0.0))


def _relu(x: Array, negative_slope: Any, lower_clip: Any, upper_clip: Any) -> Array:
    if _is_integer(x):
        return np.maximum(x, 0)
    y = _leaky(x, negative_slope)
    y = y if lower_clip is None else np.maximum(y, lower_clip)
    return y if upper_clip is None else np.minimum(y, upper_clip)


def _relu_backward(loss: Array, x: Array, negative_slope: Any, lower_clip: Any, upper_clip: Any) -> Array:
    y = _leaky(x, negative_slope)
    factor = np.where(x > 0, 1.0, negative_slope or 0.0)
    if lower_clip is not None:
        factor = np.where(y < lower_clip, 0.0, factor)
    if upper_clip is not None:
        factor = np.where(y > upper_clip, 0.0, factor)
    return loss * np.where(np.isnan(x), x, factor)


def _div(a: Array, b: Array) -> Array:
    if not _is_integer(a, b):
        return np.divide(a, b)
    divisor = np.where(b == 0, 1, b)
    return np.where(b == 0, 0, np.sign(a) * np.sign(divisor) * (np.abs(a) // np.abs(divisor)))


def _mod(a: Array, b: Array) -> Array:
    if not _is_integer(a, b):
        return np.fmod(a, b)
    return np.where(b == 0, 0, np.fmod(a, np.where(b == 0, 1, b)))


def _constant(shape: tuple[int, ...], value: Any) -> Array:
    return np.full(shape, value, np.float64 if isinstance(value, float) else np.int64)


REFERENCE: dict[str, Callable[..., Array]] = {
    "abs": np.abs,
    "add": np.add,
    "add_square": lambda a, b: a + b * b,
    "binary_select": lambda a, b, mask: np.where(mask != 0, a, b),
    "ceil": lambda x: x if _is_integer(x) else np.ceil(x),
    "cmp_eq": np.equal,
    "cmp_ge": np.greater_equal,
    "cmp_gt": np.greater,
    "cmp_le": np.less_equal,
    "cmp_lt": np.less,
    "cmp_neq": np.not_equal,
    "constant": _constant,
    "cos": np.cos,
    "div": _div,
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0.0))),
    "elu_backward": lambda loss, x: loss * np.where(x > 0, 1.0, np.exp(x)),
    "erf": _erf,
    "exp": np.exp,
    "floor": lambda x: x if _is_integer(x) else np.floor(x),
    "gelu": lambda x: x * _normal_cdf(x),
    "gelu_approx_tanh": lambda x: x * _sigmoid(_twice_tanh_argument(x)),
    "gelu_approx_tanh_backward": _gelu_tanh_backward,
    "gelu_backward": _gelu_backward,
    "gen_index": lambda shape, axis: np.indices(shape)[axis],
    "identity": lambda x: x,
    "log": np.log,
    "logical_and": lambda a, b: (a != 0) & (b != 0),
    "logical_not": lambda a: a == 0,
    "logical_or": lambda a, b: (a != 0) | (b != 0),
    "max": np.maximum,
    "min": np.minimum,
    "mod": _mod,
    "mul": np.multiply,
    "neg": np.negative,
    "pow": np.power,
    "reciprocal": lambda x: 1.0 / x,
    "relu": _relu,
    "relu_backward": _relu_backward,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sigmoid": _sigmoid,
    "sigmoid_backward": lambda loss, x: loss * _sigmoid(x) * _sigmoid(-x),
    "sin": np.sin,
    "softplus": lambda x: np.logaddexp(x, 0.0),
    "softplus_backward": lambda loss, x: loss * _sigmoid(x),
    "sqrt": np.sqrt,
    "sub": np.subtract,
    "swish": lambda x, swish_beta: x * _sigmoid(swish_beta * x),
    "swish_backward": _swish_backward,
    "tan": np.tan,
    "tanh": np.tanh,
    "tanh_backward": lambda loss, x: loss * 4.0 * _sigmoid(2.0 * x) * _sigmoid(-2.0 * x),
}

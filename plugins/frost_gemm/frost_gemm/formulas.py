"""The formulas of the pointwise ops, written once in terms of a facade ``m`` of vector arithmetic. Imported by the op table; imports
nothing else of the package.

The facade is for one compute type; ``m.integer`` says which. Its vectors are fp32, or int32. Masks (what comparisons give) are
whatever ``m`` likes: they only go into ``select`` and the logical functions, and are the result of a row whose ``result`` is "mask".
``m.wide`` says of an integer facade that results become floats: what may leave int32 (``mad``) is then int64, and the result of a row.

    const(x)                                  a constant, in the compute type
    index(axis)                               position along axis 0 (batch), 1 (row) or 2 (column): an integer facade only
    add sub mul div                           fp32: rounded to nearest, never fused or reassociated with their neighbours;
                                              div is IEEE division (int32: truncated); int32: modulo 2**32
    fma(a, b, c)                              a * b + c (fp32: rounded once)
    mad(a, b, c)                              a * b + c, an integer facade only: exact in int64 if ``m.wide``, else saturated
    neg abs
    min max                                   NaN if an argument is NaN (PTX min.NaN, max.NaN)
    lt le gt ge eq ne                         masks; comparisons with NaN are false, ``ne`` is true
    logical_and logical_or logical_not        of masks
    select(mask, a, b)                        a where the mask holds, else b
    fmod(a, b)                                the remainder with the sign of a, exact (int32: of the truncated division)
    floor ceil sqrt rsqrt rcp exp log         fp32 from here on: errors of a few ulp over the whole range, IEEE special values
    sin cos tan tanh erf pow                  (so tanh.approx, with 2**-11, is not enough)
    sigmoid(x)                                1 / (1 + exp(-x)), to a few ulp, and |x| half ulp for x < 0
    normal_cdf(x)                             (1 + erf(x / sqrt(2))) / 2, to a few ulp where it is small too
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__: list[str] = []

Value = Any  # a facade's vector, or its mask
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715  # of the tanh approximation of gelu
_TAIL = 30.0  # beyond it sigmoid(-2 u) of that approximation is 0 in fp32, and so is what it multiplies


def sigmoid(m: Any, x: Value) -> Value:
    return m.sigmoid(x)


def _log1p(m: Any, e: Value) -> Value:
    """ln(1 + e) for e >= 0. The quotient undoes the rounding of 1 + e (Higham, Accuracy and Stability, 1.14.1)."""
    one = m.const(1.0)
    u = m.add(one, e)
    return m.select(m.eq(u, one), e, m.mul(m.log(u), m.div(e, m.sub(u, one))))


def softplus(m: Any, x: Value) -> Value:
    return m.add(m.max(x, m.const(0.0)), _log1p(m, m.exp(m.neg(m.abs(x)))))


def elu(m: Any, x: Value) -> Value:
    # exp(x) - 1 = tanh(x / 2) (exp(x) + 1), without cancellation near 0
    low = m.min(x, m.const(0.0))
    return m.select(
        m.gt(x, m.const(0.0)),
        x,
        m.mul(m.tanh(m.mul(m.const(0.5), low)), m.add(m.exp(low), m.const(1.0))),
    )


def elu_backward(m: Any, loss: Value, x: Value) -> Value:
    return m.mul(loss, m.select(m.gt(x, m.const(0.0)), m.const(1.0), m.exp(x)))


def gelu(m: Any, x: Value) -> Value:
    return m.mul(x, m.normal_cdf(x))


def gelu_backward(m: Any, loss: Value, x: Value) -> Value:
    density = m.mul(m.exp(m.mul(m.const(-0.5), m.mul(x, x))), m.const(math.sqrt(0.5 / math.pi)))
    return m.mul(loss, m.fma(x, density, m.normal_cdf(x)))


def _twice_tanh_argument(m: Any, x: Value) -> Value:
    """2 sqrt(2 / pi) (x + 0.044715 x^3)"""
    return m.mul(m.mul(m.const(2.0 * _SQRT_2_OVER_PI), x), m.fma(m.mul(m.const(_CUBIC), x), x, m.const(1.0)))


def gelu_tanh(m: Any, x: Value) -> Value:
    return m.mul(x, sigmoid(m, _twice_tanh_argument(m, x)))  # (1 + tanh u) / 2 = sigmoid(2 u)


def gelu_tanh_backward(m: Any, loss: Value, x: Value) -> Value:
    near = m.min(m.max(x, m.const(-_TAIL)), m.const(_TAIL))  # else 0 * infinity where x^2 overflows
    twice = _twice_tanh_argument(m, near)
    gate = sigmoid(m, twice)
    slope = m.mul(m.const(2.0 * _SQRT_2_OVER_PI), m.fma(m.mul(m.const(3.0 * _CUBIC), near), near, m.const(1.0)))
    bend = m.mul(m.mul(gate, sigmoid(m, m.neg(twice))), slope)
    return m.mul(loss, m.fma(x, bend, gate))


def swish(m: Any, x: Value, swish_beta: float) -> Value:
    return m.mul(x, sigmoid(m, _scaled(m, x, swish_beta)))


def swish_backward(m: Any, loss: Value, x: Value, swish_beta: float) -> Value:
    scaled = _scaled(m, x, swish_beta)
    gate = sigmoid(m, scaled)
    bend = _scaled(m, m.mul(gate, sigmoid(m, m.neg(scaled))), swish_beta)
    return m.mul(loss, m.fma(x, bend, gate))


def _scaled(m: Any, x: Value, factor: float) -> Value:
    return x if factor == 1.0 else m.mul(m.const(factor), x)


def tanh_backward(m: Any, loss: Value, x: Value) -> Value:
    # 1 - tanh(x)^2 = 4 sigmoid(2 x) sigmoid(-2 x), without cancellation
    twice = m.add(x, x)
    return m.mul(loss, m.mul(m.const(4.0), m.mul(sigmoid(m, twice), sigmoid(m, m.neg(twice)))))


def sigmoid_backward(m: Any, loss: Value, x: Value) -> Value:
    return m.mul(loss, m.mul(sigmoid(m, x), sigmoid(m, m.neg(x))))


def _leaky(m: Any, x: Value, slope: float | None) -> Value:
    zero = m.const(0.0)
    return m.select(m.gt(x, zero), x, m.mul(m.const(slope), x)) if slope else m.max(x, zero)


def relu(m: Any, x: Value, negative_slope: Any, lower_clip: Any, upper_clip: Any) -> Value:
    if m.integer:
        return m.max(x, m.const(0))
    y = _leaky(m, x, negative_slope)
    if lower_clip is not None:
        y = m.max(y, m.const(lower_clip))
    return y if upper_clip is None else m.min(y, m.const(upper_clip))


def relu_backward(m: Any, loss: Value, x: Value, negative_slope: Any, lower_clip: Any, upper_clip: Any) -> Value:
    zero = m.const(0.0)
    factor = m.select(m.gt(x, zero), m.const(1.0), m.const(negative_slope or 0.0))
    if lower_clip is not None or upper_clip is not None:
        y = _leaky(m, x, negative_slope)
        if lower_clip is not None:
            factor = m.select(m.lt(y, m.const(lower_clip)), zero, factor)
        if upper_clip is not None:
            factor = m.select(m.gt(y, m.const(upper_clip)), zero, factor)
    return m.mul(loss, m.select(m.ne(x, x), x, factor))


def negated(m: Any, x: Value) -> Value:
    """-x; int32 saturates: -(-2**31) is 2**31 - 1, and as a float, rounded, 2**31 again."""
    if not m.integer:
        return m.neg(x)
    return m.select(m.eq(x, m.const(-(2**31))), m.const(2**31 - 1), m.neg(x))


def abs_(m: Any, x: Value) -> Value:
    return m.select(m.lt(x, m.const(0)), negated(m, x), x) if m.integer else m.abs(x)


def add(m: Any, a: Value, b: Value) -> Value:
    if not m.integer:
        return m.add(a, b)
    return m.mad(b, m.const(1), a) if m.wide else _saturated(m, m.add(a, b), a, m.ge(b, m.const(0)))


def sub(m: Any, a: Value, b: Value) -> Value:
    if not m.integer:
        return m.sub(a, b)
    return m.mad(b, m.const(-1), a) if m.wide else _saturated(m, m.sub(a, b), a, m.le(b, m.const(0)))


def mul(m: Any, a: Value, b: Value) -> Value:
    return m.mad(a, b, m.const(0)) if m.integer else m.mul(a, b)


def add_square(m: Any, a: Value, b: Value) -> Value:
    return m.mad(b, b, a) if m.integer else m.add(a, m.mul(b, b))


def _saturated(m: Any, wrapped: Value, a: Value, grows: Value) -> Value:
    """The saturated result of an int32 sum that can't be below ``a`` where ``grows`` holds, nor above it elsewhere."""
    top = m.select(m.lt(wrapped, a), m.const(2**31 - 1), wrapped)
    bottom = m.select(m.gt(wrapped, a), m.const(-(2**31)), wrapped)
    return m.select(grows, top, bottom)


def _guarded(m: Any, function: Callable[[Value, Value], Value], a: Value, b: Value) -> Value:
    """``function`` of integers, and 0 for a division by zero."""
    zero, one = m.const(0), m.const(1)
    none = m.eq(b, zero)
    return m.select(none, zero, function(a, m.select(none, one, b)))


def div(m: Any, a: Value, b: Value) -> Value:
    if not m.integer:
        return m.div(a, b)
    minus = m.eq(b, m.const(-1))  # kept out of the division: -2**31 / -1 has no int32
    return m.select(minus, negated(m, a), _guarded(m, m.div, a, m.select(minus, m.const(1), b)))


def mod(m: Any, a: Value, b: Value) -> Value:
    if not m.integer:
        return m.fmod(a, b)
    return _guarded(m, m.fmod, a, m.select(m.eq(b, m.const(-1)), m.const(1), b))


def whole(name: str) -> Callable[[Any, Value], Value]:
    return lambda m, x: x if m.integer else getattr(m, name)(x)


def named(name: str) -> Callable[..., Value]:
    return lambda m, *args: getattr(m, name)(*args)


def nonzero(m: Any, x: Value) -> Value:
    return m.ne(x, m.const(0))

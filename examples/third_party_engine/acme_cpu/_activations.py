"""Activations in place on a float32 block, with scratch blocks of its shape. Imported by the matmul plan.

gelu(x) = x * cdf(x) is evaluated as max(x, 0) - |x| * tail(|x|), where tail(t) = cdf(-t): the form has no cancellation at either
end, so that small results are as accurate, relatively, as large ones. tail(t) * exp(t^2 / 2) is smooth and falls like 1 / t; a
polynomial of degree 8 in 1 / (1 + p t) follows it to 4.4e-8 for t in [0, 14.5] (a weighted least-squares fit, reweighted
towards the minimax error; beyond 14.4 the exponential is 0 in float32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["activate"]

Array = Any

_P = np.float32(0.295)
_TAIL = tuple(
    np.float32(value)
    for value in (
        0.039138607517255765,
        -0.18212936660236212,
        0.26857518708032413,
        -0.11449759043584427,
        0.16465728754768616,
        0.08538059094845046,
        0.12155097645762522,
        0.11730829711700488,
        1.5993375222722448e-05,
    )
)
_FAR = np.float32(20.0)
_ZERO, _HALF, _ONE = (np.float32(value) for value in (0.0, 0.5, 1.0))
_TWICE_SQRT_2_OVER_PI = 2.0 * np.sqrt(2.0 / np.pi)
_LINEAR, _CUBIC = np.float32(-_TWICE_SQRT_2_OVER_PI), np.float32(-_TWICE_SQRT_2_OVER_PI * 0.044715)


def activate(name: str, x: Array, scratch: Sequence[Array]) -> None:
    """Apply activation ``name`` ("" is none) to ``x``."""
    if name == "relu":
        np.maximum(x, _ZERO, out=x)
    elif name == "gelu_approx_tanh":
        _gelu_approx_tanh(x, *scratch)
    elif name == "gelu":
        _gelu(x, *scratch)


def _gelu_approx_tanh(x: Array, t: Array) -> None:
    """x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    np.multiply(x, x, out=t)
    np.multiply(t, _CUBIC, out=t)
    np.add(t, _LINEAR, out=t)
    np.multiply(t, x, out=t)
    np.exp(t, out=t)
    np.add(t, _ONE, out=t)
    np.divide(x, t, out=x)


def _gelu(x: Array, t: Array, q: Array, tail: Array) -> None:
    # |x|, cut off on the positive side only: +inf then gives inf - 0, and -inf the NaN of its definition, -inf * 0.
    np.minimum(x, _FAR, out=t)
    np.negative(x, out=q)
    np.maximum(t, q, out=t)
    np.multiply(t, _P, out=q)
    np.add(q, _ONE, out=q)
    np.divide(_ONE, q, out=q)
    np.multiply(q, _TAIL[0], out=tail)
    for coefficient in _TAIL[1:-1]:
        np.add(tail, coefficient, out=tail)
        np.multiply(tail, q, out=tail)
    np.add(tail, _TAIL[-1], out=tail)
    np.multiply(tail, t, out=tail)
    np.multiply(t, t, out=t)
    np.multiply(t, -_HALF, out=t)
    np.exp(t, out=t)
    np.multiply(tail, t, out=tail)
    np.maximum(x, _ZERO, out=x)
    np.subtract(x, tail, out=x)

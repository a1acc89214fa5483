"""Correct rounding in exact rationals, lane by lane: directed rounding of div, rcp, sqrt and of all f64 arithmetic.

Slow and rare in kernels. Only `_arith_float` imports this.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import isqrt
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["quotient", "rational_operation", "sqrt_fraction"]

Array: TypeAlias = "NDArray[Any]"


def rational_operation(
    mode: str, kind: str, function: Callable[..., Fraction | None], native: Callable[..., Array]
) -> Callable[..., Array]:
    """Lane-by-lane exact evaluation, rounded by comparing with neighbouring numbers; special operands go to numpy."""
    dtype: Any = np.float64 if kind == "f64" else np.float32

    def run(*args: Array) -> Array:
        args = np.broadcast_arrays(*args)
        result = native(*args).astype(dtype)
        limit = Fraction(float(np.finfo(dtype).max))
        for i in np.ndindex(result.shape):
            operands = [float(a[i]) for a in args]
            if not all(np.isfinite(operands)):
                continue
            exact = function(*(Fraction(v) for v in operands))
            if exact is None or exact == 0:
                continue
            near = result[i]
            if not np.isfinite(near):
                near = dtype(np.copysign(np.finfo(dtype).max, near))
            if exact < -limit:
                low, high = dtype(-np.inf), -np.finfo(dtype).max
            else:  # low = largest number <= exact
                low = np.finfo(dtype).max if exact >= limit else near
                while Fraction(float(low)) > exact:
                    low = np.nextafter(low, dtype(-np.inf))
                while exact < limit and Fraction(float(np.nextafter(low, dtype(np.inf)))) <= exact:
                    low = np.nextafter(low, dtype(np.inf))
                high = np.nextafter(low, dtype(np.inf))
            if np.isfinite(low) and Fraction(float(low)) == exact:
                result[i] = low
            elif mode == "rn":
                result[i] = _nearest(exact, low, high)
            else:
                result[i] = low if mode == "rm" or (mode == "rz" and exact > 0) else high
        return result

    return run


def _nearest(exact: Fraction, low: Any, high: Any) -> Any:
    if np.isinf(low) or np.isinf(high):
        finite = float(high if np.isinf(low) else low)
        ulp = Fraction(abs(finite)) - Fraction(abs(float(np.nextafter(type(low)(finite), type(low)(0)))))
        beyond = abs(exact) >= Fraction(abs(finite)) + ulp / 2
        return (low if np.isinf(low) else high) if beyond else (high if np.isinf(low) else low)
    below, above = exact - Fraction(float(low)), Fraction(float(high)) - exact
    if below != above:
        return low if below < above else high
    even = low.view(np.int64 if low.dtype == np.float64 else np.int32) & 1 == 0
    return low if even else high


def sqrt_fraction(x: Fraction) -> Fraction | None:
    """A rational that sits between the same numbers as sqrt(x), to 200 bits, sticky."""
    if x <= 0:
        return None
    scaled = (x.numerator << 400) // x.denominator
    root = isqrt(scaled)
    inexact = root * root != scaled or (x.numerator << 400) % x.denominator != 0
    return Fraction(2 * root + inexact, 1 << 201)


def quotient(x: Fraction, y: Fraction) -> Fraction | None:
    return None if y == 0 else x / y

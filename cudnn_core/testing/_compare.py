"""Results against the oracle: per element, by kind and within the bound. Imported by the kit's run phase.

tolerance of an output = e (see ``_oracle``) + half the spacing of its type at |exact| + e. Integers: e + 0.5 where the exact
value is not whole or e > 0, else equality. NaN must be NaN and an infinity that infinity, where the type has them; what
may round beyond the largest value may overflow or saturate. Graphs that only move elements are compared bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._codec import FORMATS, INTEGERS, decode, encode, half_spacing

if TYPE_CHECKING:
    from .._graph._frozen import FrozenGraph
    from ._oracle import Val

__all__ = ["mismatch", "moves_only"]

Array = Any  # of numpy
_MOVING = frozenset(("reshape", "transpose", "slice", "concatenate"))


def moves_only(graph: FrozenGraph) -> bool:
    """Whether the graph copies elements and computes nothing."""
    return all(node.op in _MOVING for node in graph.nodes) and len({str(t.dtype) for t in graph.tensors}) == 1


def mismatch(codes: Array, dtype: str, expected: Val, *, bitwise: bool = False) -> str:
    """What is wrong with an output, or "": the worst element, and how many differ."""
    if not codes.size:
        return ""
    got = decode(codes, dtype)
    with np.errstate(all="ignore"):
        if bitwise:
            tolerance = np.zeros_like(got)
            wrong = (codes != encode(expected.v, dtype)) & ~(np.isnan(got) & np.isnan(expected.v))
            excess = wrong.astype(float)
        else:
            wrong, tolerance, excess = _outside(got, dtype, expected)
    if not wrong.any():
        return ""
    worst = np.unravel_index(int(np.where(wrong, excess, -1.0).argmax()), wrong.shape)
    where = ", ".join(map(str, worst))
    return (
        f"[{where}]: expected {_number(expected.v[worst], dtype)} within {tolerance[worst]:.3g}, got "
        f"{_number(got[worst], dtype)} ({int(wrong.sum())} of {wrong.size} elements are wrong)"
    )


def _number(value: float, dtype: str) -> str:
    return repr(int(value)) if dtype in INTEGERS and np.isfinite(value) and value == int(value) else f"{value:.9g}"


def _outside(got: Array, dtype: str, expected: Val) -> tuple[Array, Array, Array]:
    """(wrong, tolerance, how far outside) by element."""
    exact, bound = expected.v, expected.e
    form = FORMATS.get(dtype)
    if form is None:
        low, high = INTEGERS[dtype]
        inside = np.clip(exact, low, high)
        tolerance = np.where((inside != np.rint(inside)) | (bound > 0), bound + 0.5, 0.0)
        tolerance = np.where(dtype == "boolean", bound, tolerance)
        distance = np.abs(got - inside)
        return (distance > tolerance) & ~np.isnan(exact), tolerance, distance
    tolerance = bound + half_spacing(dtype, np.abs(exact) + bound) * (1 + 2.0**-20)
    target = exact
    if not form.infinite:  # conversions to the narrow types saturate
        target = np.clip(exact, -form.largest if form.signed else 0.0, form.largest)
        got = np.clip(got, -form.largest, form.largest)
    distance = np.abs(got - target)
    wrong = distance > tolerance
    kinds = np.isnan(got) != np.isnan(target)
    if dtype == "fp4_e2m1":  # it has no NaN
        kinds = kinds & False
        wrong = wrong & ~np.isnan(target)
    kinds = kinds | (np.isinf(target) & (got != target)) | (np.isinf(got) & (got != target))
    overflows = np.isinf(got) & (np.sign(got) == np.sign(exact)) & (np.abs(exact) + tolerance >= form.largest)
    wrong = (wrong | kinds) & ~overflows & ~np.isinf(bound)
    return wrong, tolerance, np.where(kinds, np.inf, np.nan_to_num(distance / np.maximum(tolerance, 1e-300), nan=0.0))

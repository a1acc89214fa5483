"""Executes a Program with numpy: exact products, every value rounded to its declared type. The oracle of the kernels' tests.

Arrays hold values, not storage: float64 for floats, int64 for integers and booleans (0 or 1), already rounded to the tensor's type.
``execute`` works in the program's orientation, ``evaluate`` takes and returns arrays of the operands' own shapes.

Products are summed in fp64 (modulo 2^32 for int8), then rounded to the matmul's type; ops are computed in fp64, or exactly in
int64 where the program computes them in int32, then rounded to the op's type. A kernel sums in fp32 (int32) and computes in fp32,
so it may differ by roundings; on small integers it may not. Rounding is that of the core's reference engine (``rounded``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .binding import Binding, Place
from .ir import Op, Program, Ref
from .ops import REDUCTIONS, TABLE

__all__ = ["Results", "evaluate", "execute", "rounded"]

Array = Any


class _Format(NamedTuple):
    """A binary float format: stored mantissa bits, least exponent of a normal number, largest finite value."""

    mantissa: int
    emin: int
    largest: float
    infinite: bool


# IEEE 754 (fp16), OCP 8-bit Floating Point Specification 1.0 (e4m3, e5m2). fp8 saturates as cvt.satfinite does, infinities too.
_FORMATS = {
    "float32": _Format(23, -126, 3.4028234663852886e38, True),
    "bfloat16": _Format(7, -126, 3.3895313892515355e38, True),
    "float16": _Format(10, -14, 65504.0, True),
    "fp8_e4m3": _Format(3, -6, 448.0, False),
    "fp8_e5m2": _Format(2, -14, 57344.0, False),
}
_INTEGERS = {"int32": (-(2**31), 2**31 - 1), "int8": (-128, 127), "uint8": (0, 255)}


class Results(NamedTuple):
    """Outputs in the order of the program: stores are [L, M, N], reductions have 1 in place of a reduced axis."""

    stores: tuple[Array, ...]
    reductions: tuple[Array, ...]


def rounded(value: Array, dtype: str) -> Array:
    """``value`` rounded to ``dtype``: to nearest even in one step, integers saturating and without NaN, boolean ``!= 0``."""
    value = np.asarray(value)
    if dtype == "boolean":
        return (value != 0).astype(np.int64)
    if dtype in _INTEGERS:
        return _to_integer(value, *_INTEGERS[dtype])
    form, wide = _FORMATS[dtype], _doubles(value)
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(wide)
        quantum = np.ldexp(1.0, np.clip(exponent - 1, form.emin, 1000) - form.mantissa)
        result = np.where(np.isfinite(wide), np.rint(wide / quantum) * quantum, wide)
    over = np.abs(result) > form.largest
    return np.where(over, np.copysign(np.inf if form.infinite else form.largest, wide), result)


def _doubles(value: Array) -> Array:
    """``value`` in fp64, such that rounding it to a narrower float is the only rounding: integers past 2^53 are rounded to odd."""
    if value.dtype.kind == "f":
        return value.astype(np.float64)
    value = value.astype(np.int64)
    odd = value >> 10 | ((value & 0x3FF) != 0)
    return np.where(np.abs(value) < 2**53, value.astype(np.float64), odd.astype(np.float64) * 1024.0)


def _to_integer(value: Array, low: int, high: int) -> Array:
    if value.dtype.kind != "f":
        return np.clip(value.astype(np.int64), low, high)
    whole = np.clip(np.rint(np.where(np.isnan(value), 0.0, value)), low, high)
    return whole.astype(np.int64)


def _wrapped(value: Array) -> Array:
    """Integers modulo 2^32, as int32 has them."""
    return value.astype(np.int64).astype(np.int32).astype(np.int64)


def execute(program: Program, a: Sequence[Array], b: Sequence[Array], aux: Sequence[Array] = ()) -> Results:
    """Run a program on A [L or 1, M, K], B [L or 1, N, K] and epilogue operands that broadcast to [L, M, N]."""
    accumulators = []
    for gemm in program.gemms:
        left = _prologue(program.a[gemm.a].prologue, a[gemm.a], aux)
        right = _prologue(program.b[gemm.b].prologue, b[gemm.b], aux)
        if program.accumulate == "float32":
            left, right = left.astype(np.float64), right.astype(np.float64)
        with np.errstate(all="ignore"):
            sums = np.matmul(left, np.swapaxes(right, -1, -2))
        accumulators.append(rounded(_wrapped(sums) if program.accumulate == "int32" else sums, gemm.dtype))
    shape = np.broadcast_shapes(*(accumulator.shape for accumulator in accumulators))
    values = _ops(program.ops, shape, {"acc": accumulators, "aux": list(aux)})
    stores = tuple(np.broadcast_to(_value(values, store.value), shape) for store in program.stores)
    reductions = tuple(
        rounded(_reduce(np.broadcast_to(_value(values, r.value), shape), r.mode, r.axes, r.dtype == "int32"), r.dtype)
        for r in program.reductions
    )
    return Results(stores, reductions)


def _prologue(ops: tuple[Op, ...], matrix: Array, aux: Sequence[Array]) -> Array:
    if not ops:
        return matrix
    values = _ops(ops, matrix.shape, {"element": [matrix], "aux": list(aux)})
    return np.broadcast_to(values["val"][-1], matrix.shape)


def _ops(ops: tuple[Op, ...], shape: tuple[int, ...], values: dict[str, list[Array]]) -> dict[str, list[Array]]:
    values["val"] = []
    for op in ops:
        row, attrs = TABLE[op.name], dict(op.attrs)
        kind = np.int64 if op.compute == "int32" else np.float64
        with np.errstate(all="ignore"):
            if row.arity:
                result = row.reference(*(_value(values, ref).astype(kind) for ref in op.args), **attrs)
            else:
                result = row.reference(shape, **attrs)
        values["val"].append(rounded(result, op.dtype))
    return values


def _value(values: Mapping[str, list[Array]], ref: Ref) -> Array:
    return values["element"][0] if ref == Ref("val", -1) else values[ref.kind][ref.index]


def _reduce(value: Array, mode: str, axes: str, integer: bool) -> Array:
    """``integer``: of values in int32, modulo 2^32."""
    value = rounded(value, "int32") if integer else value
    how = REDUCTIONS[mode]
    along = tuple("lmn".index(axis) for axis in axes)
    if how.prepare == "abs":
        value = rounded(np.abs(value), "int32") if integer else np.abs(value)
    elif how.prepare == "nonzero":
        value = np.where(value == 0, 1, value)
    if not integer:
        value = value.astype(np.float64)  # a product of integers whose result is a float does not wrap
    function: Any = {"add": np.sum, "mul": np.prod, "min": np.min, "max": np.max}[how.combine]
    with np.errstate(all="ignore"):
        result = function(value, axis=along, keepdims=True)
    count = int(np.prod([value.shape[axis] for axis in along]))
    if integer:
        return _wrapped(result)
    return result / count if how.divide else result


def evaluate(program: Program, binding: Binding, operands: Sequence[Array]) -> dict[int, Array]:
    """The outputs by their position among the operands.

    operands  an array of the operand's shape at every position; of an output it gives only the shape
    """
    groups: dict[str, list[Array]] = {"a": [], "b": [], "aux": []}
    outputs: list[Place] = []
    for place in binding.places:
        if place.group in groups:
            groups[place.group].append(_oriented(np.asarray(operands[place.operand]), place))
        else:
            outputs.append(place)
    results = execute(program, groups["a"], groups["b"], groups["aux"])
    arrays = (*results.stores, *results.reductions)
    return {
        place.operand: _restored(array, place, np.shape(operands[place.operand]))
        for place, array in zip(outputs, arrays, strict=True)
    }


def _oriented(operand: Array, place: Place) -> Array:
    """An operand as [L or 1, rows or 1, cols or 1]. Its last two axes are its rows and columns in one order or the other."""
    axes = [axis for axis in (place.rows, place.cols) if axis is not None]
    inner = range(max(operand.ndim - 2, 0), operand.ndim)
    for axis in inner:
        if axis not in axes:  # of one element, or repeated by a stride of 0
            operand = operand.take([0], axis)
    others = [axis for axis in range(operand.ndim) if axis not in axes]
    turned = operand.transpose([*others, *axes])
    turned = turned.reshape(-1, *turned.shape[len(others) :])
    if place.batch is None:
        turned = turned[:1]
    if place.rows is None:
        turned = turned[:, None]
    return turned if place.cols is not None else turned[..., None]


def _restored(array: Array, place: Place, shape: tuple[int, ...]) -> Array:
    """An output [L or 1, M or 1, N or 1] in the operand's own shape."""
    if place.rows is not None and place.cols is not None and place.rows > place.cols:
        array = np.swapaxes(array, -1, -2)
    return array.reshape(shape)

"""Oracle rules of matmul, reductions, norms and the structural ops; the rest is in ``_oracle_models``. See ``_oracle``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import _oracle_models  # noqa: F401  fills RULES
from ._oracle import RULES, Context, Val, largest_product, product_error, propagate, unjudged

__all__: list[str] = []

Array = Any  # of numpy


def _matmul(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    a, b = (c.factor(ports[port], node.inputs[port]) for port in ("A", "B"))
    largest = largest_product if c.reduces(node.inputs["A"], node.inputs["B"]) else None
    return {"C": product_error(a, b, np.matmul, a.v.shape[-1], c.u, largest=largest)}


RULES["matmul"] = _matmul


# --- reduction
def _reduction(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    x, mode, dim = ports["input"], node.attrs["mode"], node.outputs["Y"].dim
    if "group_offset" not in ports:
        return {"Y": _reduce(x, mode, dim, c)}
    starts = [int(start) for start in ports["group_offset"].v.reshape(-1)]
    ends = starts[1:] if len(starts) == dim[0] + 1 else [*starts[1:], x.v.shape[1]]
    parts = [
        _reduce(Val(x.v[:, a:b], x.e[:, a:b]), mode, (1, *dim[1:]), c)
        for a, b in zip(starts[: dim[0]], ends, strict=True)
    ]
    return {"Y": Val(np.concatenate([p.v for p in parts]), np.concatenate([p.e for p in parts]))}


def _reduce(x: Val, mode: str, dim: Sequence[int], c: Context) -> Val:
    axes = tuple(axis for axis, (have, want) in enumerate(zip(x.v.shape, dim, strict=True)) if have != want)
    result = _reduced(x, mode, axes, c)
    if not c.drops_nan:
        return result
    doubt = np.isinf(x.e) | (np.isnan(x.v) if mode in ("MIN", "MAX", "AMAX") else False)
    return unjudged(result, doubt.any(axes, keepdims=True) if axes else doubt)


def _reduced(x: Val, mode: str, axes: tuple[int, ...], c: Context) -> Val:
    count = int(np.prod([x.v.shape[axis] for axis in axes])) if axes else 1
    size = np.abs(x.v)

    def total(values: Array) -> Array:
        return np.asarray(values.sum(axes, keepdims=True)) if axes else values

    if mode in ("ADD", "AVG", "NORM1"):
        value = total(size if mode == "NORM1" else x.v)
        error = count * 2 * c.u * total(size) + total(x.e)
        return (
            Val(value / count, error / count + 2 * c.u * np.abs(value / count)) if mode == "AVG" else Val(value, error)
        )
    if mode == "NORM2":
        value = np.sqrt(total(size**2))
        moved = np.sqrt(total((size + x.e) ** 2)) - value
        tiny = np.sqrt(count * c.tiny)  # squares of smaller elements may vanish
        return Val(value, np.nan_to_num(moved, nan=0.0) + (count + 4) * 2 * c.u * value + tiny)
    if mode in ("MUL", "MUL_NO_ZEROS"):
        factors = np.where(x.v == 0, 1.0, x.v) if mode == "MUL_NO_ZEROS" else x.v
        value = factors.prod(axes, keepdims=True)
        largest = (np.abs(factors) + x.e).prod(axes, keepdims=True)
        return Val(value, largest - np.abs(value) + count * 2 * c.u * largest)
    pick, neutral, values = {
        "MIN": (np.minimum, np.inf, x.v),
        "MAX": (np.maximum, -np.inf, x.v),
        "AMAX": (np.maximum, 0.0, size),
    }[mode]
    value = np.asarray(pick.reduce(values, axis=axes, keepdims=True, initial=neutral)) if axes else values
    return Val(value, np.maximum.reduce(x.e, axis=axes, keepdims=True, initial=0.0) if axes else x.e)


RULES["reduction"] = _reduction


# --- norms
def _norm(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    x, scale, epsilon = ports["input"], ports["scale"], float(ports["epsilon"].v.reshape(-1)[0])
    axes = tuple(axis for axis, size in enumerate(scale.v.shape) if size != 1)
    count = int(np.prod([x.v.shape[axis] for axis in axes])) if axes else 1

    def mean(values: Array) -> Array:
        return np.asarray(values.mean(axes, keepdims=True)) if axes and values.size else values

    middle = Val(mean(x.v), count * 2 * c.u * mean(np.abs(x.v)) + mean(x.e))
    centre = x
    if node.op == "layernorm":
        centred = x.v - middle.v
        centre = Val(centred, x.e + middle.e + 2 * c.u * (np.abs(x.v) + np.abs(middle.v)))
    # One pass over squares is allowed: its rounding is relative to the mean of the squares, not to the variance.
    spread = mean(2 * np.abs(centre.v) * centre.e + centre.e**2) + (count + 4) * 2 * c.u * mean(x.v**2)
    variance = Val(mean(centre.v**2), spread)
    inverse = propagate(lambda v: 1 / np.sqrt(np.maximum(v, 0) + epsilon), [variance], c, exactly=False)
    y = _times(_times(centre, inverse, c), scale, c)
    if "bias" in ports:
        y = propagate(np.add, [y, ports["bias"]], c, exactly=False, cancels=np.abs(y.v) + np.abs(ports["bias"].v))
    return {"Y": y, "mean": middle, "inv_variance": inverse}


def _times(a: Val, b: Val, c: Context) -> Val:
    return propagate(np.multiply, [a, b], c, exactly=False)


RULES["layernorm"] = RULES["rmsnorm"] = _norm


# --- structural: elements move, and their bounds with them
def _moved(function: Any, *values: Val) -> dict[str, Val]:
    return {"Y": Val(function(*(x.v for x in values)), function(*(x.e for x in values)))}


def _transpose(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    return _moved(lambda x: np.transpose(x, node.attrs["permutation"]), ports["input"])


def _slice(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    key = tuple(slice(*bounds) for bounds in node.attrs["slices"])
    return _moved(lambda x: x[key], ports["input"])


def _concatenate(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    return _moved(lambda *parts: np.concatenate(parts, axis=node.attrs["axis"]), *ports["inputs"])


def _reshape(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    source, target = node.inputs["input"], node.outputs["Y"]
    if node.attrs["reshape_mode"] == "LOGICAL":
        return _moved(lambda x: x.reshape(target.dim), ports["input"])

    def view(x: Array) -> Array:
        """The element at memory offset i stays at memory offset i."""
        memory = np.zeros(x.size)
        memory[_offsets(source)] = x
        return memory[_offsets(target)]

    return _moved(view, ports["input"])


def _offsets(tensor: Any) -> Array:
    grid = np.indices(tensor.dim)
    return np.asarray(sum(axis * step for axis, step in zip(grid, tensor.stride, strict=True)), dtype=np.int64)


RULES.update(transpose=_transpose, slice=_slice, concatenate=_concatenate, reshape=_reshape)

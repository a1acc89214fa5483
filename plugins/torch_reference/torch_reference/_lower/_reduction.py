"""reduction: over every axis whose output size is 1 and whose input size is not.

With ``group_offset`` the rows (axis 1) fall into groups that start at its entries; axis 0 of the output counts groups.
Sums and products of integers whose declared result is int32 are modulo 2^32: any order and grouping gives the same.
An empty reduction gives the mode's neutral element: 0, 1 for products, -inf for MAX, +inf for MIN, NaN for AVG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._math import Math, is_integer, wrapped

__all__ = ["group_bounds", "reduction"]

Tensor = Any
_COMBINING = ("ADD", "NORM1", "MUL", "MUL_NO_ZEROS")


def reduction(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    x = inputs["input"]
    mode = node.attrs["mode"]
    # A product of integers soon exceeds int64; one that becomes a float need not.
    whole = mode not in ("AVG", "NORM2", "MUL", "MUL_NO_ZEROS") or (
        mode.startswith("MUL") and str(node.outputs["Y"].dtype).startswith(("int", "uint"))
    )
    exact = is_integer(x) and whole
    x = x.to(torch.int64) if exact else math.as_float(x)
    dim = node.outputs["Y"].dim
    narrow = exact and node.outputs["Y"].dtype == "int32"
    if narrow and mode == "NORM1" and node.inputs["input"].dtype == "int32":
        x = x.abs().clamp(max=2**31 - 1)  # the size of the smallest int32 is none
    if "group_offset" in inputs:
        bounds = group_bounds(inputs["group_offset"], x.shape[1], dim[0])
        parts = [_reduce(x[:, start:stop], mode, (1, *dim[1:])) for start, stop in bounds]
        y = torch.cat(parts) if parts else x.new_zeros(dim)
    else:
        y = _reduce(x, mode, dim)
    return {"Y": wrapped(y) if narrow and mode in _COMBINING else y}


def group_bounds(offsets: Tensor, rows: int, groups: int) -> list[tuple[int, int]]:
    """(first row, row after the last) of each group. ``offsets`` holds the starts, or the starts and the end."""
    starts = [min(max(start, 0), rows) for start in offsets.reshape(-1).tolist()]
    ends = starts[1:] if len(starts) == groups + 1 else [*starts[1:], rows]
    return [(start, max(start, end)) for start, end in zip(starts[:groups], ends, strict=True)]


def _reduce(x: Tensor, mode: str, dim: Sequence[int]) -> Tensor:
    axes = [axis for axis, (have, want) in enumerate(zip(x.shape, dim, strict=True)) if want == 1 and have != 1]
    if mode in ("AMAX", "NORM1", "NORM2"):
        x = x.abs()
    if mode in ("ADD", "NORM1"):
        return x.sum(axes, keepdim=True) if axes else x
    if mode == "AVG":
        return x.mean(axes, keepdim=True) if axes else x
    if mode == "NORM2":
        return _norm2(x, axes)
    if mode in ("MUL", "MUL_NO_ZEROS"):
        if mode == "MUL_NO_ZEROS":
            x = torch.where(x == 0, torch.ones_like(x), x)
        for axis in axes:
            x = x.prod(axis, keepdim=True)
        return x
    for axis in axes:
        if x.shape[axis] == 0:
            shape = [*x.shape]
            shape[axis] = 1
            x = torch.full(shape, _neutral(mode, x.dtype), dtype=x.dtype, device=x.device)
        else:
            x = x.amin(axis, keepdim=True) if mode == "MIN" else x.amax(axis, keepdim=True)
    return x


def _norm2(x: Tensor, axes: list[int]) -> Tensor:
    if not axes:
        return x
    if x.numel() == 0:
        return x.sum(axes, keepdim=True)
    # Scaled by the largest element, so that squares neither overflow nor vanish.
    scale = x.amax(axes, keepdim=True)
    usable = torch.isfinite(scale) & (scale > 0)
    ratio = x / torch.where(usable, scale, torch.ones_like(scale))
    return torch.where(usable, scale * ratio.square().sum(axes, keepdim=True).sqrt(), scale)


def _neutral(mode: str, dtype: torch.dtype) -> float | int:
    if mode == "AMAX":
        return 0
    if dtype.is_floating_point:
        return float("inf") if mode == "MIN" else float("-inf")
    limits = torch.iinfo(dtype)
    return int(limits.max if mode == "MIN" else limits.min)

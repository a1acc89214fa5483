"""Block scaling.

dequantize: Y = input * descale, a descale per block. quantize: scale = amax(block) / largest(Y's type), rounded up to
fp8_e8m0 and fp8_e5m3 and to nearest to other types; Y = input / scale, where the scale is the stored one, so that
dequantize reverses it; a zero scale gives Y = 0. Scales with F8_128x4 reordering have padded dims: padding is ignored when read and written as zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._rounding import largest, round_up, round_value
from ._math import Math

__all__ = ["block_of_axes", "dequantize", "quantize"]

Tensor = Any


def block_of_axes(block_size: Sequence[int], dim: Sequence[int], scale_dim: Sequence[int]) -> tuple[int, ...]:
    """The block size along each axis of the input.

    One size belongs to the last axis that is shorter in the scale than in the input; more of them to the last axes.
    """
    blocks = [1] * len(dim)
    if len(block_size) == 1:
        shorter = [axis for axis in range(len(dim)) if scale_dim[axis] < dim[axis]]
        blocks[shorter[-1] if shorter else -1] = block_size[0]
    else:
        blocks[len(dim) - len(block_size) :] = block_size
    return tuple(blocks)


def dequantize(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    x, scale = math.as_float(inputs["input"]), math.as_float(inputs["descale"])
    blocks = block_of_axes(node.attrs["block_size"], x.shape, scale.shape)
    return {"Y": x * _spread(scale, blocks, x.shape)}


def quantize(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    x = math.as_float(inputs["input"])
    axis, block = node.attrs.get("axis"), node.attrs["block_size"]
    axis = x.ndim - 1 if axis is None else axis % x.ndim
    y_type, scale_type = node.outputs["Y"].dtype, node.outputs["scale"].dtype

    count = -(-x.shape[axis] // block)
    shape = [*x.shape]
    shape[axis] = count * block
    padded = x.new_zeros(shape)
    padded.narrow(axis, 0, x.shape[axis]).copy_(x)
    split = padded.unflatten(axis, (count, block))
    amax = split.abs().amax(axis + 1) if block and split.numel() else x.new_zeros(split.shape[: axis + 1])
    rounder = round_up if scale_type in ("fp8_e8m0", "fp8_e5m3") else round_value
    scale = rounder(amax / largest(y_type), scale_type).to(math.dtype)

    spread = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, x.shape[axis])
    y = torch.where(spread == 0, torch.zeros_like(x), x / spread)
    return {"Y": y, "scale": _fit(scale, node.outputs["scale"].dim)}


def _spread(scale: Tensor, blocks: Sequence[int], dim: Sequence[int]) -> Tensor:
    for axis, (block, size) in enumerate(zip(blocks, dim, strict=True)):
        if scale.shape[axis] == 1 and size > 1 and block == 1:
            continue  # broadcast
        index = torch.arange(size, device=scale.device) // block
        scale = scale.index_select(axis, index)
    return scale


def _fit(scale: Tensor, dim: Sequence[int]) -> Tensor:
    """``scale`` in the declared, possibly padded dims; the last two axes may be declared swapped (column blocks)."""
    if any(have > want for have, want in zip(scale.shape, dim, strict=True)):
        scale = scale.transpose(-1, -2)
    if tuple(scale.shape) == tuple(dim):
        return scale
    padded = scale.new_zeros(dim)
    padded[tuple(slice(0, size) for size in scale.shape)] = scale
    return padded

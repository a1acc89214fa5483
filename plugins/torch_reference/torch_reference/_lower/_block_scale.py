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

__all__ = ["blocks_of", "dequantize", "quantize"]

Tensor = Any


def blocks_of(block_size: Sequence[int], dim: Sequence[int], scale_dim: Sequence[int]) -> tuple[list[int], bool]:
    """The block size along each axis of the input, and whether the scales' last two axes are declared swapped.

    Several sizes belong to the last axes; a single one to the last axis for which the shapes agree.
    """
    rank = len(dim)
    if len(block_size) > 1:
        readings = [[1] * (rank - len(block_size)) + list(block_size)]
    else:
        readings = [[block_size[0] if at == axis else 1 for at in range(rank)] for axis in reversed(range(rank))]
    for exact in (True, False):
        for blocks in readings:
            need = [-(-size // block) for size, block in zip(dim, blocks, strict=True)]
            for swapped in (False, True):
                shape = [*need[:-2], *reversed(need[-2:])] if swapped else need
                if _holds(scale_dim, shape, exact):
                    return blocks, swapped
    return readings[0], False


def _holds(scale_dim: Sequence[int], need: Sequence[int], exact: bool) -> bool:
    """Whether scales of shape ``need`` have the declared dims, or (not ``exact``) those padded to tiles."""
    if exact:
        return list(scale_dim) == list(need)
    padded = [
        sorted((-(-size // 4) * 4, -(-size // 128) * 128)) if at >= len(need) - 2 else [size]
        for at, size in enumerate(need)
    ]
    return all(size in allowed for size, allowed in zip(scale_dim, padded, strict=True))


def dequantize(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    x, scale = math.as_float(inputs["input"]), math.as_float(inputs["descale"])
    blocks, swapped = blocks_of(node.attrs["block_size"], x.shape, scale.shape)
    if swapped:
        scale = scale.transpose(-1, -2)
    for axis, (block, size) in enumerate(zip(blocks, x.shape, strict=True)):
        scale = scale.index_select(axis, torch.arange(size, device=scale.device) // block)
    return {"Y": x * scale}


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
    # In fp64: a quotient rounded to fp32 can fall onto a power of two that is too small.
    scale = rounder(amax.double() / largest(y_type), scale_type).to(math.dtype)

    spread = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, x.shape[axis])
    y = torch.where(spread == 0, torch.zeros_like(x), x / spread)
    return {"Y": y, "scale": _fit(scale, node.outputs["scale"].dim)}


def _fit(scale: Tensor, dim: Sequence[int]) -> Tensor:
    """``scale`` in the declared, possibly padded dims; the last two axes may be declared swapped (column blocks)."""
    if any(have > want for have, want in zip(scale.shape, dim, strict=True)):
        scale = scale.transpose(-1, -2)
    if tuple(scale.shape) == tuple(dim):
        return scale
    padded = scale.new_zeros(dim)
    padded[tuple(slice(0, size) for size in scale.shape)] = scale
    return padded

"""reshape, transpose, slice and concatenate: elements move, values do not change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ._math import Math, is_integer

__all__ = ["concatenate", "reshape", "slice_", "transpose"]


def reshape(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    """LOGICAL keeps the row-major order of the elements. VIEW_ONLY keeps their memory: the output's strides are read
    over the input's elements laid out with the input's strides."""
    x, source, target = inputs["input"], node.inputs["input"], node.outputs["Y"]
    if node.attrs["reshape_mode"] == "LOGICAL" or 0 in target.dim:
        return {"Y": x.reshape(target.dim)}
    memory = x.new_zeros(1 + sum((size - 1) * step for size, step in zip(source.dim, source.stride, strict=True)))
    memory.as_strided(source.dim, source.stride).copy_(x)
    return {"Y": memory.as_strided(target.dim, target.stride)}


def transpose(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    return {"Y": inputs["input"].permute(tuple(node.attrs["permutation"]))}


def slice_(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    return {"Y": inputs["input"][tuple(slice(*bounds) for bounds in node.attrs["slices"])]}


def concatenate(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    parts = inputs["inputs"]
    if not is_integer(*parts):
        parts = [math.as_float(part) for part in parts]
    return {"Y": torch.cat(list(parts), dim=node.attrs["axis"])}

"""layernorm and rmsnorm. The normalised axes are those along which ``scale`` is not 1; the variance is biased."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._math import Math

__all__ = ["layernorm", "rmsnorm"]

Tensor = Any


def layernorm(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    x, scale, axes, epsilon = _prepare(inputs, math)
    mean = x.mean(axes, keepdim=True) if axes else x
    centred = x - mean
    inv_variance = ((centred.square().mean(axes, keepdim=True) if axes else centred.square()) + epsilon).rsqrt()
    return {"Y": _affine(centred * inv_variance, scale, inputs, math), "mean": mean, "inv_variance": inv_variance}


def rmsnorm(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    x, scale, axes, epsilon = _prepare(inputs, math)
    inv_variance = ((x.square().mean(axes, keepdim=True) if axes else x.square()) + epsilon).rsqrt()
    return {"Y": _affine(x * inv_variance, scale, inputs, math), "inv_variance": inv_variance}


def _prepare(inputs: Mapping[str, Any], math: Math) -> tuple[Tensor, Tensor, list[int], Tensor]:
    x, scale = math.as_float(inputs["input"]), math.as_float(inputs["scale"])
    scale = scale.reshape((1,) * (x.ndim - scale.ndim) + tuple(scale.shape))
    axes = [axis for axis in range(x.ndim) if scale.shape[axis] != 1]
    return x, scale, axes, math.as_float(inputs["epsilon"]).reshape(-1)[0]


def _affine(normalised: Tensor, scale: Tensor, inputs: Mapping[str, Any], math: Math) -> Tensor:
    y = normalised * scale
    return y + math.as_float(inputs["bias"]) if "bias" in inputs else y

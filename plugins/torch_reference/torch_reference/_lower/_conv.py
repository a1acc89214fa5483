"""conv_fprop in one to three spatial dimensions: a matmul per filter tap, so that every dtype is exact or fp32/fp64.

Layout: image [N, C, *spatial], weight [K, C / groups, *filter]. CONVOLUTION flips the filter, CROSS_CORRELATION does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ._math import Math, integer_sums, is_integer, matmul

__all__ = ["conv_fprop"]

Tensor = Any


def conv_fprop(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    image, weight = inputs["image"], inputs["weight"]
    if not is_integer(image, weight):
        image, weight = math.as_float(image), math.as_float(weight)
    attrs = node.attrs
    out = node.outputs["Y"].dim
    if attrs["convolution_mode"] == "CONVOLUTION":
        weight = weight.flip(tuple(range(2, weight.ndim)))
    batch, channels = image.shape[:2]
    features, channels_in_group = weight.shape[:2]
    groups = channels // max(channels_in_group, 1)

    before, after = attrs["pre_padding"], attrs["post_padding"]
    sizes = [n + b + a for n, b, a in zip(image.shape[2:], before, after, strict=True)]
    padded = image.new_zeros((batch, channels, *sizes))
    _window(padded, [slice(b, b + n) for n, b in zip(image.shape[2:], before, strict=True)]).copy_(image)

    total = image.new_zeros(())
    for tap in itertools.product(*(range(size) for size in weight.shape[2:])):
        window = [
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, o, s in zip(tap, attrs["dilation"], out[2:], attrs["stride"], strict=True)
        ]
        pixels = _window(padded, window).reshape(batch, groups, channels_in_group, -1)
        filters = _window(weight, tap).reshape(1, groups, features // groups, channels_in_group)
        total = total + matmul(filters, pixels)
    total = total.reshape(out)
    return {"Y": integer_sums(node, total) if is_integer(total) else total}


def _window(x: Tensor, spatial: Sequence[slice | int]) -> Tensor:
    """A part of the spatial axes."""
    index: tuple[slice | int, ...] = (slice(None), slice(None), *spatial)
    return x[index]

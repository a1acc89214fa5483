"""conv_fprop in one to three spatial dimensions: a matmul per filter tap, so that every dtype is exact or fp32/fp64.

Layout: image [N, C, *spatial], weight [K, C / groups, *filter]. CONVOLUTION flips the filter, CROSS_CORRELATION does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ._math import Math, is_integer, matmul

__all__ = ["conv_fprop"]


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
    padded = image.new_zeros(
        (batch, channels, *(n + b + a for n, b, a in zip(image.shape[2:], before, after, strict=True)))
    )
    inside = tuple(slice(b, b + n) for n, b in zip(image.shape[2:], before, strict=True))
    padded[(slice(None), slice(None), *inside)] = image

    total = None
    for tap in itertools.product(*(range(size) for size in weight.shape[2:])):
        window = tuple(
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, o, s in zip(tap, attrs["dilation"], out[2:], attrs["stride"], strict=True)
        )
        pixels = padded[(slice(None), slice(None), *window)].reshape(batch, groups, channels_in_group, -1)
        filters = weight[(slice(None), slice(None), *tap)].reshape(1, groups, features // groups, channels_in_group)
        part = matmul(filters, pixels)
        total = part if total is None else total + part
    return {"Y": total.reshape(out)}

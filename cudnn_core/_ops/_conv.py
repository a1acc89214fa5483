"""The row of ``conv_fprop`` (group ``conv``). Imported by the op table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._dims import Extent, packed_strides, same
from .._errors import GraphError
from ._common import TAIL_OUT_DIMS, Checks, dim_of, node_bytes, numel, rank_of, shape_text
from ._schema import Attr, Cost, Node, Op, Param, Port, Problem, TensorSpec

__all__ = ["ROWS"]

# Spatial rank -> names of the input's, the filter's and the output's spatial sizes, as cuDNN has them.
_SPATIAL = {1: ("w", "s", "q"), 2: ("hw", "rs", "pq"), 3: ("dhw", "trs", "opq")}
_GEOMETRY = ("pre_padding", "post_padding", "stride", "dilation")


def _output_extent(size: Extent, taps: Extent, pre: int, post: int, stride: int, dilation: int) -> Extent | None:
    """None where a runtime size makes it inexpressible."""
    if isinstance(size, int) and isinstance(taps, int):
        return (size + pre + post - dilation * (taps - 1) - 1) // stride + 1 if stride > 0 else size
    if isinstance(taps, int) and stride == 1 and dilation * (taps - 1) == pre + post:
        return size
    return None


def _extents(image: Sequence[Extent], weight: Sequence[Extent], attrs: Mapping[str, Any]) -> list[Extent | None]:
    geometry = zip(*(attrs[name] for name in _GEOMETRY), strict=True)
    return [
        _output_extent(size, taps, *numbers)
        for size, taps, numbers in zip(image[2:], weight[2:], geometry, strict=True)
    ]


def _infer(node: Node) -> Mapping[str, TensorSpec]:
    image, weight = dim_of(node, "image"), dim_of(node, "weight")
    if image is None or weight is None:
        return {"Y": TensorSpec()}
    spatial = len(image) - 2
    if len(weight) != len(image) or any(len(node.attrs[name]) != spatial for name in _GEOMETRY):
        return {"Y": TensorSpec(image)}
    extents = _extents(image, weight, node.attrs)
    known = [max(0, extent) if isinstance(extent, int) else extent for extent in extents if extent is not None]
    if len(known) < len(extents):
        return {"Y": TensorSpec()}
    dim = (image[0], weight[0], *known)
    return {"Y": TensorSpec(dim, packed_strides(dim, [0, *range(2, len(dim)), 1]))}


def _validate(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    image, weight, attrs = node.inputs["image"], node.inputs["weight"], node.attrs
    if not check.rank("image", 3, 4, 5):
        return check.problems
    spatial = len(image.dim) - 2
    check.rank("weight", len(image.dim))
    check.require(weight.dtype == image.dtype, "weight", "data type differs from image", image.dtype, weight.dtype)
    for name, low in (("pre_padding", 0), ("post_padding", 0), ("stride", 1), ("dilation", 1)):
        values = attrs[name]
        check.require(len(values) == spatial, name, "needs one number a spatial axis", spatial, values)
        check.require(all(value >= low for value in values), name, "is too small", f">= {low}", values)
    if check.problems:
        return check.problems
    _validate_channels(check, image.dim[1], weight.dim[0], weight.dim[1])
    for axis, extent in enumerate(_extents(image.dim, weight.dim, attrs)):
        if isinstance(extent, int):
            check.require(
                extent > 0,
                "weight",
                f"is larger than the padded image on spatial axis {axis}",
                "an output of 1 or more",
                extent,
            )
    if not check.problems:
        check.inferred(_infer(node))
        out = node.outputs["Y"].dim
        want = (image.dim[0], weight.dim[0])
        check.require(
            len(out) == len(image.dim) and same(out[0], want[0]) and same(out[1], want[1]),
            "Y",
            "wrong shape",
            f"({want[0]}, {want[1]}, ...)",
            shape_text(out),
        )
    return check.problems


def _validate_channels(check: Checks, channels: Extent, filters: Extent, per_group: Extent) -> None:
    if not all(isinstance(size, int) for size in (channels, filters, per_group)):
        check.require(same(channels, per_group), "weight", "channels differ from the image's", channels, per_group)
        return
    assert isinstance(channels, int)
    assert isinstance(filters, int)
    assert isinstance(per_group, int)
    if check.require(
        per_group > 0 and channels % per_group == 0,
        "weight",
        "channels do not divide the image's",
        f"a divisor of {channels}",
        per_group,
    ):
        groups = channels // per_group
        check.require(
            filters % groups == 0, "weight", "filters do not divide into groups", f"a multiple of {groups}", filters
        )


def _dims(node: Node) -> Mapping[str, Extent]:
    image, weight, out = (tensor.dim for tensor in (node.inputs["image"], node.inputs["weight"], node.outputs["Y"]))
    named: dict[str, Extent] = {"n": image[0], "c": image[1], "k": weight[0]}
    for names, dim in zip(_SPATIAL[len(image) - 2], (image, weight, out), strict=True):
        named.update(zip(names, dim[2:], strict=True))
    return named


def _cost(node: Node) -> Cost:
    image, weight = node.inputs["image"], node.inputs["weight"]
    flops = 2.0 * numel(node.outputs["Y"]) * math.prod(weight.dim[1:])
    return Cost(flops, node_bytes(node), tensor=True, dtype=image.dtype)


def _prepare(graph: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """``padding`` -> pre_padding and post_padding; absent geometry -> zeros and ones."""
    image, weight = arguments["image"], arguments["weight"]
    padding = arguments.get("padding")
    for name in ("pre_padding", "post_padding"):
        if padding is not None and arguments.get(name) is not None:
            raise GraphError("excludes padding", port=name, expected="absent", actual=arguments[name])
    rank = rank_of(image) or rank_of(weight)
    spatial = 0 if rank is None else max(rank - 2, 0)
    result = {"image": image, "weight": weight}
    for name, default in (("pre_padding", 0), ("post_padding", 0), ("stride", 1), ("dilation", 1)):
        value = arguments.get(name)
        if value is None and name.endswith("padding"):
            value = padding
        result[name] = (default,) * spatial if value is None else tuple(value)
    if arguments.get("convolution_mode") is not None:
        result["convolution_mode"] = arguments["convolution_mode"]
    return result


ROWS: tuple[Op, ...] = (
    Op(
        "conv_fprop",
        group="conv",
        inputs=(Port("image"), Port("weight")),
        outputs=(Port("Y"),),
        attrs=(
            *(Attr(name, "ints") for name in _GEOMETRY),
            Attr("convolution_mode", "enum", "CROSS_CORRELATION", ("CONVOLUTION", "CROSS_CORRELATION")),
        ),
        infer=_infer,
        validate=_validate,
        dims=_dims,
        operands={"image": "image", "weight": "weight", "Y": "Y"},
        cost=_cost,
        builders={
            "conv_fprop": (
                (
                    Param("image"),
                    Param("weight"),
                    Param("padding", None, to="-"),
                    Param("pre_padding", None),
                    Param("post_padding", None),
                    Param("stride", None),
                    Param("dilation", None),
                    Param("convolution_mode", None),
                    *TAIL_OUT_DIMS,
                ),
                _prepare,
            )
        },
        doc="Y = image convolved with weight. image [N, C, (D,) (H,) W], weight [K, C / groups, (T,) (R,) S] -> "
        "Y [N, K, (O,) (P,) Q], an output extent being floor((size + pre_padding + post_padding - dilation * (taps - 1) "
        "- 1) / stride) + 1; channels-last strides by default. The number of groups follows from the channels. "
        "CROSS_CORRELATION (the default) slides the filter as it is, CONVOLUTION mirrored on every spatial axis.",
    ),
)

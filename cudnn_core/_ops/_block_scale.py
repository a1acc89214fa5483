"""Rows of ``block_scale_dequantize`` and ``block_scale_quantize`` (group ``block_scale``). Imported by the op table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._dims import Extent, packed_strides, product, same
from ._common import (
    FLOATS,
    INDEX,
    TAIL_OUT_DIMS,
    Checks,
    ceil_div,
    dim_of,
    like_strides,
    node_bytes,
    numel,
    reordering_of,
    round_up,
    same_shape,
    shape_text,
)
from ._schema import Attr, Cost, Node, Op, Param, Port, Problem, Tensor, TensorSpec

__all__ = ["ROWS"]

_NARROW = ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
_SCALES = ("fp8_e8m0", "fp8_e4m3", "fp8_e5m3", "float32")


def _scale_dim(dim: Sequence[Extent], blocks: Mapping[int, int]) -> tuple[Extent, ...] | None:
    """The shape of the scales of ``dim`` with ``blocks`` (axis -> block size); None where a size is inexpressible."""
    sizes = [ceil_div(size, blocks.get(axis, 1)) for axis, size in enumerate(dim)]
    known = tuple(size for size in sizes if size is not None)
    return known if len(known) == len(sizes) else None


def _padded(dim: Sequence[Extent], axis: int) -> tuple[Extent, ...] | None:
    """F8_128x4 tiles hold 128 rows of 4 scales: the scales' axis is padded to 4, the other of the last two to 128."""
    sizes: list[Extent | None] = list(dim)
    for at in (len(dim) - 2, len(dim) - 1):
        if at >= 0:
            sizes[at] = round_up(dim[at], 4 if at == axis else 128)
    known = tuple(size for size in sizes if size is not None)
    return known if len(known) == len(sizes) else None


def _fits(tensor: Tensor, dim: Sequence[Extent], axis: int) -> bool:
    """Whether scales have the shape ``dim``, or with F8_128x4 reordering ``dim`` padded to whole tiles."""
    if same_shape(tensor.dim, dim):
        return True
    padded = _padded(dim, axis) if reordering_of(tensor) == "F8_128x4" else None
    if padded is None:
        return False
    # Column blocks may be declared as they lie in the tiles, rows first.
    return same_shape(tensor.dim, padded) or (
        axis == len(dim) - 2 and same_shape(tensor.dim, (*padded[:-2], padded[-1], padded[-2]))
    )


# dequantize


def _candidates(node: Node) -> list[dict[int, int]]:
    """The readings of block_size: one number may block any axis, several block the last axes."""
    rank = len(node.inputs["input"].dim)
    sizes = node.attrs["block_size"]
    if len(sizes) == 1:
        return [{axis: sizes[0]} for axis in reversed(range(rank))]
    return [dict(zip(range(rank - len(sizes), rank), sizes, strict=True))]


def _infer_dequantize(node: Node) -> Mapping[str, TensorSpec]:
    dim = dim_of(node, "input")
    return {"Y": TensorSpec(dim, like_strides(node.inputs["input"], dim))}


def _validate_dequantize(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    source, descale, sizes = node.inputs["input"], node.inputs["descale"], node.attrs["block_size"]
    check.dtype("input", *_NARROW, "int8", "int4")
    check.dtype("descale", *_SCALES, "float16", "bfloat16")
    check.dtype("Y", *FLOATS)
    check.require(
        not node.attrs["is_negative_scale"],
        "is_negative_scale",
        "is not supported: what it does is not documented",
        False,
        True,
    )
    check.inferred(_infer_dequantize(node))
    rank = len(source.dim)
    valid = check.require(
        1 <= len(sizes) <= rank and all(size >= 1 for size in sizes),
        "block_size",
        "is not one positive number, or one for each of the last axes",
        f"1 to {rank} numbers >= 1",
        sizes,
    )
    if valid:
        shapes = [
            (_scale_dim(source.dim, blocks), max(blocks, key=lambda at: blocks[at])) for blocks in _candidates(node)
        ]
        known = [(dim, axis) for dim, axis in shapes if dim is not None]
        check.require(
            len(known) < len(shapes) or any(_fits(descale, dim, axis) for dim, axis in known),
            "descale",
            "does not have one scale a block",
            " or ".join(shape_text(dim) for dim, _ in known),
            shape_text(descale.dim),
        )
    return check.problems


def _prepare_dequantize(graph: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """A single number is a block size too."""
    result = {name: arguments[name] for name in ("input", "descale", "block_size")}
    if isinstance(result["block_size"], int):
        result["block_size"] = (result["block_size"],)
    if arguments.get("is_negative_scale") is not None:
        result["is_negative_scale"] = arguments["is_negative_scale"]
    return result


# quantize


def _axis(node: Node) -> int:
    axis = node.attrs["axis"]
    return len(node.inputs["input"].dim) - 1 if axis is None else int(axis)


def _transposed_strides(tensor: Tensor, dim: Sequence[Extent], axis: int) -> tuple[Extent, ...] | None:
    """Packed strides in the input's axis order, turned until ``axis`` is the fastest."""
    strides = like_strides(tensor, dim)
    if strides is None:
        strides = packed_strides(dim)
    order = sorted(range(len(dim)), key=lambda at: (same(strides[at], 1), at == axis))
    fast = [at for at in order if at != axis]
    return packed_strides(dim, [*fast, axis])


def _infer_quantize(node: Node) -> Mapping[str, TensorSpec]:
    source, dim = node.inputs["input"], dim_of(node, "input")
    size = node.attrs["block_size"]
    if dim is None:
        return {"Y": TensorSpec(), "scale": TensorSpec()}
    axis = _axis(node)
    blocked = _scale_dim(dim, {axis: size}) if size >= 1 and 0 <= axis < len(dim) else dim
    out = node.outputs.get("scale")
    if out is not None and out.dim is not None and blocked is not None and _fits(out, blocked, axis):
        blocked = tuple(out.dim)
    if node.attrs["transpose"] and 0 <= axis < len(dim):
        strides = [None if shape is None else _transposed_strides(source, shape, axis) for shape in (dim, blocked)]
    else:
        strides = [like_strides(source, dim), like_strides(source, blocked)]
    return {"Y": TensorSpec(dim, strides[0]), "scale": TensorSpec(blocked, strides[1])}


def _validate_quantize(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    source, size, axis = node.inputs["input"], node.attrs["block_size"], _axis(node)
    check.dtype("input", *FLOATS)
    check.dtype("Y", *_NARROW)
    check.dtype("scale", *_SCALES)
    check.dtype("group_offset", *INDEX)
    check.require(
        "group_offset" not in node.inputs or reordering_of(check.get("scale")) == "F8_128x4",
        "group_offset",
        "needs scales with F8_128x4 reordering (it aligns each group to a tile)",
        "F8_128x4",
        reordering_of(check.get("scale")),
    )
    check.require(size >= 1, "block_size", "is not positive", ">= 1", size)
    rank = len(source.dim)
    check.require(0 <= axis < rank, "axis", "is not an axis of the input", f"0 to {rank - 1}", axis)
    if check.problems:
        return check.problems
    if "group_offset" in node.inputs:
        check.require(axis == rank - 1, "group_offset", "is for blocks along the last axis", rank - 1, axis)
        check.shape("Y", source.dim)
    else:
        check.inferred(_infer_quantize(node))
    return check.problems


def _prepare_quantize(graph: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """A list with one block size is that size."""
    given = {name: arguments.get(name) for name in ("input", "group_offset", "block_size", "axis", "transpose")}
    size = given["block_size"]
    if isinstance(size, tuple | list) and len(size) == 1:
        given["block_size"] = size[0]
    return {name: value for name, value in given.items() if value is not None}


# both


def _dims(node: Node) -> Mapping[str, Extent]:
    dim = node.inputs["input"].dim
    return {"rows": product(dim[:-1]), "cols": dim[-1]}


def _cost_dequantize(node: Node) -> Cost:
    return Cost(float(numel(node.inputs["input"])), node_bytes(node))


def _cost_quantize(node: Node) -> Cost:
    """An element costs a comparison for the block's largest magnitude, and a scaling."""
    return Cost(2.0 * numel(node.inputs["input"]), node_bytes(node))


ROWS: tuple[Op, ...] = (
    Op(
        "block_scale_dequantize",
        group="block_scale",
        inputs=(Port("input"), Port("descale", data=False)),
        outputs=(Port("Y"),),
        attrs=(Attr("block_size", "ints"), Attr("is_negative_scale", "bool", False)),
        infer=_infer_dequantize,
        validate=_validate_dequantize,
        dims=_dims,
        operands={"A": "input", "scale": "descale", "C": "Y"},
        cost=_cost_dequantize,
        builders={
            "block_scale_dequantize": (
                (
                    Param("input"),
                    Param("descale"),
                    Param("block_size"),
                    Param("is_negative_scale", None),
                    *TAIL_OUT_DIMS,
                ),
                _prepare_dequantize,
            )
        },
        doc="Y = input * descale of the element's block. descale has the input's shape with each blocked axis divided by "
        "its block size (rounded up); with F8_128x4 reordering it may be padded to whole tiles. Several block sizes "
        "belong to the last axes; a single one to the one axis that the shapes tell.",
    ),
    Op(
        "block_scale_quantize",
        group="block_scale",
        inputs=(Port("input"), Port("group_offset", optional=True, data=False)),
        outputs=(Port("Y"), Port("scale", data=False)),
        attrs=(Attr("block_size", "int"), Attr("axis", "int", None), Attr("transpose", "bool", False)),
        infer=_infer_quantize,
        validate=_validate_quantize,
        dims=_dims,
        operands={"A": "input", "C": "Y", "scale": "scale"},
        cost=_cost_quantize,
        builders={
            "block_scale_quantize": (
                (
                    Param("input"),
                    Param("group_offset", None),
                    Param("block_size"),
                    Param("axis", None),
                    Param("transpose", None),
                    *TAIL_OUT_DIMS,
                ),
                _prepare_quantize,
            )
        },
        doc="scale = the block's largest magnitude / the largest value of Y's type, rounded up to an fp8_e8m0 or fp8_e5m3 "
        "scale and to nearest otherwise; Y = input / scale, to nearest even. Blocks of block_size run along ``axis`` (default: the last), a "
        "shorter one at the end. Y has the input's shape, scale the input's with that axis divided by block_size (rounded up). ``transpose`` makes "
        "the axis the packed one in the default strides of both, no more. Y's and scale's data types must be set.",
    ),
)

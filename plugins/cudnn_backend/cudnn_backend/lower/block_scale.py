"""Rows of ``block_scale_dequantize`` and ``block_scale_quantize``. Imported by the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .rows import Row

if TYPE_CHECKING:
    from cudnn_core import Checks, FrozenNode

    from .rows import Emitter

__all__ = ["ROWS"]


def _check_dequantize(c: Checks, node: FrozenNode) -> None:
    c.attr(node, "is_negative_scale", False)
    c.require(
        node.outputs["Y"].role == "virtual",
        "op.pattern",
        "block_scale_dequantize.Y",
        "a result that an operation of the graph reads",
        "an output",
    )


def _dequantize(e: Emitter, node: FrozenNode) -> None:
    made = e.target.block_scale_dequantize(
        e.input(node.inputs["input"]),
        e.input(node.inputs["descale"]),
        list(node.attrs["block_size"]),
        is_negative_scale=node.attrs["is_negative_scale"],
        compute_data_type=e.dtype(node.compute_dtype),
    )
    e.result(made, node.outputs["Y"])


def _check_quantize(c: Checks, node: FrozenNode) -> None:
    c.require(
        "group_offset" not in node.inputs,
        "op.pattern",
        "block_scale_quantize.group_offset",
        "no groups",
        "group_offset",
    )


def _quantize(e: Emitter, node: FrozenNode) -> None:
    source, axis = node.inputs["input"], node.attrs["axis"]
    made = e.target.block_scale_quantize(
        e.input(source),
        node.attrs["block_size"],
        axis=e.program.axis(source, source.rank - 1 if axis is None else axis),
        transpose=node.attrs["transpose"],
        compute_data_type=e.dtype(node.compute_dtype),
    )
    for result, port in zip(made, ("Y", "scale"), strict=True):
        e.result(result, node.outputs[port])


ROWS = {
    "block_scale_dequantize": Row(_dequantize, _check_dequantize),
    "block_scale_quantize": Row(_quantize, _check_quantize),
}

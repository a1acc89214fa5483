"""Rows of ``matmul``, ``moe_grouped_matmul`` and the block-scale ops. Imported by the table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .rows import Row

if TYPE_CHECKING:
    from cudnn_core import Checks, FrozenNode

    from .rows import Emitter

__all__ = ["ROWS"]


def _matmul(e: Emitter, node: FrozenNode) -> None:
    made = e.target.matmul(
        e.input(node.inputs["A"]),
        e.input(node.inputs["B"]),
        compute_data_type=e.dtype(node.compute_dtype),
        padding=node.attrs["padding"],
    )
    e.result(made, node.outputs["C"])


# Mixture of experts


def _check_moe(c: Checks, node: FrozenNode) -> None:
    offsets = node.inputs["first_token_offset"]
    experts = node.inputs["weight"].dim[0]
    count = math.prod(offsets.dim) if all(isinstance(size, int) for size in offsets.dim) else None
    # With boundaries the rows behind the last one belong to no group; the backend knows starts only.
    starts = (
        isinstance(count, int) and isinstance(experts, int) and (count % experts == 0 if experts > 1 else count == 1)
    )
    c.require(
        starts,
        "shape.range",
        "moe_grouped_matmul.first_token_offset",
        "one start for each group (no end), a multiple of the experts",
        count,
    )
    c.require(
        node.attrs["mode"] != "COMBINE",
        "op.attribute",
        "moe_grouped_matmul.mode",
        ["NONE", "GATHER", "SCATTER"],
        node.attrs["mode"],
    )


def _moe(e: Emitter, node: FrozenNode) -> None:
    made = e.target.moe_grouped_matmul(
        token=e.input(node.inputs["token"]),
        weight=e.input(node.inputs["weight"]),
        first_token_offset=e.input(node.inputs["first_token_offset"]),
        token_index=e.optional(node, "token_index"),
        token_ks=e.optional(node, "token_ks"),
        mode=e.enum("moe_grouped_matmul_mode", node.attrs["mode"]),
        compute_data_type=e.dtype(node.compute_dtype),
        top_k=node.attrs["top_k"] or 0,
        top_k_scores=e.optional(node, "top_k_scores"),
    )
    e.result(made, node.outputs["Y"])


# Block scale


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
    "matmul": Row(_matmul),
    "moe_grouped_matmul": Row(_moe, _check_moe, columns={"first_token_offset": 3}, kind="moe"),
    "block_scale_dequantize": Row(_dequantize, _check_dequantize),
    "block_scale_quantize": Row(_quantize, _check_quantize),
}

"""The row of ``conv_fprop``. Imported by the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .rows import Row

if TYPE_CHECKING:
    from cudnn_core import FrozenNode

    from .rows import Emitter

__all__ = ["ROWS"]


def _emit(e: Emitter, node: FrozenNode) -> None:
    made = e.target.conv_fprop(
        image=e.input(node.inputs["image"]),
        weight=e.input(node.inputs["weight"]),
        pre_padding=list(node.attrs["pre_padding"]),
        post_padding=list(node.attrs["post_padding"]),
        stride=list(node.attrs["stride"]),
        dilation=list(node.attrs["dilation"]),
        convolution_mode=e.enum("convolution_mode", node.attrs["convolution_mode"]),
        compute_data_type=e.dtype(node.compute_dtype),
    )
    e.result(made, node.outputs["Y"])


ROWS = {"conv_fprop": Row(_emit, kind="conv")}

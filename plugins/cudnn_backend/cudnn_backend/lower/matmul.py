"""The row of ``matmul``. Imported by the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .rows import Row

if TYPE_CHECKING:
    from cudnn_core import FrozenNode

    from .rows import Emitter

__all__ = ["ROWS"]


def _emit(e: Emitter, node: FrozenNode) -> None:
    made = e.target.matmul(
        e.input(node.inputs["A"]),
        e.input(node.inputs["B"]),
        compute_data_type=e.dtype(node.compute_dtype),
        padding=node.attrs["padding"],
    )
    e.result(made, node.outputs["C"])


ROWS = {"matmul": Row(_emit)}

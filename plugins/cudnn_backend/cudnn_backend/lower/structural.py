"""Rows of reshape, transpose, slice and concatenate, as far as they are not folded. Imported by the table.

The backend has the operations (since 9.22, concatenate since 9.7) but hardly an engine for them: what can't be folded is left
to its answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .rows import Row

if TYPE_CHECKING:
    from cudnn_core import FrozenNode, FrozenTensor

    from .rows import Emitter

__all__ = ["ROWS"]


def _shift(e: Emitter, tensor: FrozenTensor) -> int:
    """Axes of size 1 that the tensor got in front."""
    return len(e.program.layouts[e.program.resolve(tensor).index].dim) - tensor.rank


def _reshape(e: Emitter, node: FrozenNode) -> None:
    made = e.target.reshape(
        e.input(node.inputs["input"]), reshape_mode=e.enum("reshape_mode", node.attrs["reshape_mode"])
    )
    e.result(made, node.outputs["Y"])


def _transpose(e: Emitter, node: FrozenNode) -> None:
    source = node.inputs["input"]
    shift = _shift(e, source)
    permutation = [*range(shift), *(axis + shift for axis in node.attrs["permutation"])]
    made = e.target.transpose(e.input(source), permutation, compute_data_type=e.dtype(node.compute_dtype))
    e.result(made, node.outputs["Y"])


def _slice(e: Emitter, node: FrozenNode) -> None:
    source = node.inputs["input"]
    bounds = [
        slice(start or 0, size if stop is None else stop, 1 if step is None else step)
        for size, (start, stop, step) in zip(source.dim, node.attrs["slices"], strict=True)
    ]
    slices = [slice(0, 1, 1)] * _shift(e, source) + bounds
    made = e.target.slice(e.input(source), slices, compute_data_type=e.dtype(node.compute_dtype))
    e.result(made, node.outputs["Y"])


def _concatenate(e: Emitter, node: FrozenNode) -> None:
    tensors = node.inputs["inputs"]
    made = e.target.concatenate(
        [e.input(tensor) for tensor in tensors],
        node.attrs["axis"] + _shift(e, tensors[0]),
        in_place_index=node.attrs["in_place_index"],
    )
    e.result(made, node.outputs["Y"])


ROWS = {
    "reshape": Row(_reshape),
    "transpose": Row(_transpose),
    "slice": Row(_slice),
    "concatenate": Row(_concatenate),
}

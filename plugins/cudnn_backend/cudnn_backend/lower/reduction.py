"""The row of ``reduction``. Imported by the table.

The backend's descriptors take ADD, MUL, MIN, MAX and AMAX. Two modes more are exact in these: the sum of magnitudes, and a mean
of a power of two elements (scaled before the sum, for the backend fuses nothing behind a reduction). The others have no
equivalent and are declined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .rows import Row
from .views import typical

if TYPE_CHECKING:
    from cudnn_core import Checks, FrozenNode

    from .rows import Emitter

__all__ = ["ROWS"]

_DIRECT = frozenset({"ADD", "MUL", "MIN", "MAX", "AMAX"})
_EXPANDED = frozenset({"AVG", "NORM1"})
_PLAIN_FLOATS = frozenset({"float32", "float16", "bfloat16"})


def _count(node: FrozenNode) -> int:
    """Elements that go into one result (at the largest sizes; a mean over a Dim is declined)."""
    pairs = zip(node.inputs["input"].dim, node.outputs["Y"].dim, strict=True)
    count = 1
    for size, kept in pairs:
        count *= 1 if size == kept else typical(size)
    return count


def _check(c: Checks, node: FrozenNode) -> None:
    mode = node.attrs["mode"]
    if not c.attr(node, "mode", *sorted(_DIRECT | _EXPANDED)) or mode in _DIRECT:
        return
    c.require("group_offset" not in node.inputs, "op.pattern", "reduction.group_offset", "no groups", mode)
    c.dtype("reduction.input", node.inputs["input"], *sorted(_PLAIN_FLOATS))
    c.require(node.compute_dtype == "float32", "dtype.compute", "reduction", ["float32"], str(node.compute_dtype))
    if mode == "AVG" and "group_offset" not in node.inputs:
        fixed = all(isinstance(size, int) for size in node.inputs["input"].dim)
        count = _count(node)
        c.require(
            fixed and count & (count - 1) == 0,
            "op.attribute",
            "reduction.mode",
            "AVG of a power of two elements, or ADD and a scale",
            count,
        )


def _emit(e: Emitter, node: FrozenNode) -> None:
    source, mode = node.inputs["input"], node.attrs["mode"]
    value, compute = e.input(source), e.dtype(node.compute_dtype)
    if mode == "NORM1":
        value = e.temporary(e.target.abs(value, compute_data_type=compute), "FLOAT", source)
    elif mode == "AVG":
        scaled = e.target.mul(value, e.scalar(1.0 / _count(node)), compute_data_type=compute)
        value = e.temporary(scaled, "FLOAT", source)
    made = e.target.reduction(
        value,
        e.enum("reduction_mode", "ADD" if mode in _EXPANDED else mode),
        compute_data_type=compute,
        group_offset=e.optional(node, "group_offset"),
    )
    e.result(made, node.outputs["Y"])


ROWS = {"reduction": Row(_emit, _check, columns={"group_offset": 3})}

"""Broadcasts that the backend's engine for pointwise graphs is known to get right. Data, imported by ``program``.

cuDNN 9.19 has a plan for others whose numbers are wrong: on an H200 a rank-3 operand [1, 8, 1] or [1, 1, 512] of a result
[2, 8, 512] is garbage for all but the first index of the leading axis, whatever strides are declared. So nothing is let through
that nobody has compared with a reference: what stands here was, on an H200 with cuDNN 9.19, in float16 and float32. A result of
the graph itself that broadcasts (a relu of the bias) is garbage in each pattern that was tried, and never let through. To add a pattern: run it on a GPU, put it into ``RIGHT``, and take ``declined`` off
the cases (``tests/backend_cases.py``) that it lets through, so that the tests for a GPU compare their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudnn_core import Extent

    from .views import Frame, Layout

__all__ = ["RIGHT", "form", "pattern"]

# Form of a view -> patterns, a letter for each axis of the view: "1" the result has size 1 there, "=" the operand has the result's
# size, "b" it has size 1 and the result has not, "0" it has the result's size and stride 0. An operand that does not broadcast
# needs no row.
RIGHT: Mapping[str, frozenset[str]] = {
    # [A, B, C], row-major, [2, 8, 512] and [1, 16, 512]; wrong: b=b, bb=, =bb, =1b, =b1. cuDNN has no engine where two operands
    # broadcast.
    "row": frozenset({"1b=", "1=b", "1bb", "==b", "=b=", "b==", "bbb", "b=1", "b1=", "b1b", "bb1"}),
    # [B, A, C] in the memory of [A, B, C]; wrong: ==b, =bb, b=b
    "swapped": frozenset(),
    # [N, C, H, W], C fastest, [2, 8, 16, 32], [1, 8, 16, 32] and [2, 512, 8, 1]
    "last": frozenset({"b=bb", "=b==", "bbbb", "1b==", "1=bb", "1bbb", "bbb1"}),
    # the same of a graph with a reduction: a row for [rows, columns, 1, 1], compared on an H200
    "reduced": frozenset({"b=11"}),
}

_FORMS = {(0, 1, 2): "row", (1, 0, 2): "swapped", (0, 2, 3, 1): "last"}


def form(frame: Frame, *, reduces: bool) -> str:
    """The key of ``RIGHT`` for a frame, "" if it has none; ``reduces``: the graph has a reduction."""
    found = _FORMS.get(frame.order, "")
    return {"last": "reduced"}.get(found, "") if reduces else found


def pattern(result: Sequence[Extent], operand: Layout) -> str:
    """How an operand, as a view declares it, meets a result of these sizes."""
    axes = zip(result, operand.dim, operand.stride, strict=True)
    return "".join("1" if full == 1 else "b" if have == 1 else "=" if step else "0" for full, have, step in axes)

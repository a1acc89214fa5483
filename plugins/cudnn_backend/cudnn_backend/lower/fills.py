"""What a plan writes before cuDNN runs: results of attention past the sequences' lengths, which cuDNN leaves alone.

Imported by ``program``. The core's op says what stands there. Of ragged tensors those rows do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from cudnn_core import nbytes

if TYPE_CHECKING:
    from cudnn_core import Checks, FrozenNode, FrozenTensor

__all__ = ["Fill", "fills", "rows"]

_LENGTHS = ("seq_len_q", "cu_seq_len_q")
_VALUES = {"O": 0.0, "Stats": -math.inf, "score_max": -math.inf, "score_sum_exp": 0.0}
_MINUS_INFINITY = 0xFF800000  # of float32
_MAX_PITCH = 2**31 - 1  # bytes: CU_DEVICE_ATTRIBUTE_MAX_PITCH


class Fill(NamedTuple):
    """``height`` rows of ``width`` numbers of ``bits`` (8 or 32), each ``value``, ``pitch`` bytes apart, in operand ``slot``."""

    slot: int
    bits: int
    value: int
    width: int
    height: int
    pitch: int


def fills(
    c: Checks,
    nodes: tuple[FrozenNode, ...],
    resolve: Callable[[FrozenTensor], FrozenTensor],
    slots: dict[int, int],
) -> tuple[Fill, ...]:
    """The fills of a graph of fixed sizes; declines on ``c`` what can't be filled.

    ``resolve`` gives the operand in whose memory a folded tensor lies, ``slots`` its slot by the tensor's index.
    """
    found = []
    for node in nodes:
        if node.op != "sdpa" or not any(port in node.inputs for port in _LENGTHS):
            continue
        for port, value in _VALUES.items():
            given = node.outputs.get(port)
            if given is None or (given.role == "virtual" and not given.consumers):
                continue
            tensor, subject = resolve(given), f"sdpa.{port}"
            if tensor.ragged_offset is not None:
                continue
            if c.require(tensor.index in slots, "op.pattern", subject, "an output", "a tensor inside the graph") and (
                value == 0.0 or c.dtype(subject, tensor, "float32")
            ):
                fill = _fill(c, subject, tensor, value, slots[tensor.index])
                found += [] if fill is None else [fill]
    return tuple(found)


def _fill(c: Checks, subject: str, tensor: FrozenTensor, value: float, slot: int) -> Fill | None:
    size = nbytes(tensor.dtype, 1)
    dim = [extent for extent in tensor.dim if isinstance(extent, int)]
    stride = [step for step in tensor.stride if isinstance(step, int)]
    if len(dim) < tensor.rank or len(stride) < tensor.rank:
        return None  # sizes to come: asked again
    block = rows(dim, stride)
    if not c.require(
        block is not None and (block[1] == 1 or block[2] * size <= _MAX_PITCH),
        "layout.stride",
        subject,
        "a block of memory, or rows at even distances: what lies past the lengths is filled",
        list(map(str, tensor.stride)),
    ):
        return None
    assert block is not None
    width, height, pitch = block
    if value == 0.0:
        return Fill(slot, 8, 0, width * size, height, pitch * size)
    return Fill(slot, 32, _MINUS_INFINITY, width, height, pitch * size)


def rows(dim: list[int], stride: list[int]) -> tuple[int, int, int] | None:
    """(elements of a row, rows, elements from row to row) of a layout, or None where it is neither a block nor such rows."""
    runs = [(1, 1)]  # (step, size), merged
    for step, size in sorted((step, size) for size, step in zip(dim, stride, strict=True) if size != 1):
        inner_step, inner = runs[-1]
        if step == inner_step * inner:
            runs[-1] = (inner_step, inner * size)
        elif step > inner_step * inner:
            runs.append((step, size))
        else:
            return None
    if len(runs) > 2:
        return None
    width = runs[0][1]
    return (width, 1, width) if len(runs) == 1 else (width, runs[1][1], runs[1][0])

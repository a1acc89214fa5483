"""How the tensors of a graph lie against its [L, M, N] frame: axes, majors, alignments. Imported by ``lower`` alone.

Sizes and strides may be runtime values. The stride of an axis of one element never counts; a stride of 0 broadcasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

from .layout import BITS, TMA_ALIGNMENT

if TYPE_CHECKING:
    from cudnn_core import Extent, FrozenTensor

__all__ = ["Axes", "Frame", "alignment", "divisor", "major_of", "operand_major", "shown"]


class Axes(NamedTuple):
    """The axes of a tensor that run along the frame's rows, columns and batch, or None where it has one value for all."""

    row: int | None
    col: int | None
    batch: int | None


class Frame:
    """The shape [..., M, N] of the products of a graph. Its batch axes are the leading ones of more than one element."""

    __slots__ = ("batch_axes", "dim", "rank")

    def __init__(self, dim: tuple[Extent, ...]) -> None:
        self.dim = dim
        self.rank = len(dim)
        self.batch_axes = tuple(axis for axis in range(self.rank - 2) if dim[axis] != 1)

    def covers(self, dim: Sequence[Extent]) -> bool:
        """Whether a tensor of these sizes has every element of the frame."""
        shift = len(dim) - self.rank
        return shift >= 0 and tuple(dim[shift:]) == self.dim and all(size == 1 for size in dim[:shift])

    def axes(self, tensor: FrozenTensor) -> Axes | str:
        """The axes of a tensor that broadcasts to the frame, or what is wrong with it."""
        dim, stride, shift = tensor.dim, tensor.stride, tensor.rank - self.rank
        if any(size != 1 for size in dim[: max(shift, 0)]):
            return "is larger than the product"
        for axis in range(max(-shift, 0), self.rank):
            if dim[axis + shift] != self.dim[axis] and dim[axis + shift] != 1:
                return "does not broadcast to the product"
        row, col = (
            None if own < 0 or dim[own] == 1 or stride[own] == 0 else own for own in (tensor.rank - 2, tensor.rank - 1)
        )
        batch = self.batch(tensor)
        return batch if isinstance(batch, str) else Axes(row, col, batch)

    def batch(self, tensor: FrozenTensor) -> int | str | None:
        """The one axis that walks the batch, None for a tensor that every batch shares, or what is wrong with it."""
        dim, stride, shift = tensor.dim, tensor.stride, tensor.rank - self.rank
        own = [axis + shift for axis in self.batch_axes]
        walked = [axis for axis in own if axis >= 0 and dim[axis] != 1 and stride[axis] != 0]
        if not walked:
            return None
        if len(walked) != len(own):
            return "is broadcast along some of several batch axes"
        for outer, inner in pairwise(walked):
            if stride[outer] != stride[inner] * dim[inner]:
                return "has batch axes that are not evenly spaced in memory"
        return walked[-1]


def operand_major(tensor: FrozenTensor, row: int, col: int) -> str | None:
    """ "k" where the columns (K) of A or B have stride 1, "mn" where its rows have, None where neither."""
    dim, stride = tensor.dim, tensor.stride
    if stride[col] == 1 and dim[col] != 1:
        return "k"
    if stride[row] == 1 and dim[row] != 1:
        return "mn"
    return "k" if dim[col] == 1 else "mn" if dim[row] == 1 else None


def major_of(tensor: FrozenTensor, axes: Sequence[int | None]) -> str:
    """ "n" or "m" for the axis of unit stride of an [M, N] tensor (or of one of its vectors), "" where there is none."""
    dim, stride = tensor.dim, tensor.stride
    walked = [(axis, name) for axis, name in ((axes[1], "n"), (axes[0], "m")) if axis is not None]
    for axis, name in walked:
        if stride[axis] == 1 and dim[axis] != 1:
            return name
    for axis, name in walked:
        if dim[axis] == 1:
            return name
    return ""


def alignment(tensor: FrozenTensor, axes: Iterable[int | None]) -> int:
    """The largest power of two, at most 16, that the strides of ``axes`` in bytes are multiples of."""
    width = BITS[tensor.dtype] // 8
    value = TMA_ALIGNMENT
    for axis in axes:
        if axis is not None and tensor.dim[axis] != 1:
            value = gcd(value, divisor(tensor.stride[axis]) * width)
    return value


def divisor(size: Extent) -> int:
    """The largest number that certainly divides a size or stride (0: all do)."""
    if isinstance(size, int):
        return size
    result: int = getattr(size, "factor", 1)
    dims: Any = getattr(size, "dims", (size,))
    for dim in dims:
        result *= dim.multiple_of
    return result


def shown(sizes: Iterable[Extent]) -> list[object]:
    """Sizes as JSON-able data."""
    return [size if isinstance(size, int) else str(size) for size in sizes]

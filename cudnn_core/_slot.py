"""One operand of a plan before it is seen, and what a buffer must be to serve it. Imported by the layout and the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._buffers import View, rescale, unit_axis
from ._dims import packed_strides
from ._dtypes import as_dtype, bits
from ._engine import Operand
from ._errors import ExecutionError, GraphError

if TYPE_CHECKING:
    from ._graph._frozen import FrozenTensor

__all__ = ["Slot", "extent_bytes", "in_elements", "same_storage", "storage"]


class Slot:
    """What is known of one operand before it is seen.

    number  it takes a Python number on every device, and hence no address: it is, or would be on a GPU, passed by value
    ragged  its buffer holds rows at offsets that are data: shape and extent are not known
    shape   the sizes if all are fixed, else None
    """

    __slots__ = (
        "align",
        "by_value",
        "dim",
        "dtype",
        "label",
        "number",
        "operand",
        "packed",
        "ragged",
        "shape",
        "stride",
    )

    def __init__(self, tensor: FrozenTensor, operand: Operand) -> None:
        self.operand = operand
        self.label = operand.name or f"uid {operand.uid}"
        self.dtype = tensor.dtype.value
        self.by_value = operand.by_value
        self.number = operand.by_value or tensor.auto_by_value
        self.ragged = tensor.ragged_offset is not None
        self.dim = operand.dim
        self.stride = operand.stride
        fixed = all(isinstance(v, int) for v in (*operand.dim, *operand.stride))
        self.shape: tuple[int, ...] | None = tuple(operand.dim) if fixed else None  # type: ignore[arg-type]
        self.packed = fixed and operand.stride == packed_strides(operand.dim)
        # An address must be a multiple of the element, capped at 16 bytes for the packed vector types.
        self.align = min(16, max(1, bits(self.dtype) // 8))


def same_storage(have: str, want: str) -> bool:
    """Types that frameworks lack travel as bytes: fp8, 4-bit, packed vector types and booleans in uint8 or int8."""
    return have in ("uint8", "int8") and want in (
        "fp8_e4m3", "fp8_e5m2", "fp8_e8m0", "fp8_e5m3", "fp4_e2m1", "int4", "boolean", "int8x4", "uint8x4", "int8x32",
    )  # fmt: skip


def in_elements(slot: Slot, view: View) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides in elements of the declared type; ExecutionError if the buffer's type can't hold them."""
    if view.dtype == slot.dtype:
        return view.shape, view.stride
    if not same_storage(view.dtype, slot.dtype):
        raise ExecutionError(f"operand {slot.label} has data type {view.dtype}, needs {slot.dtype}", operand=slot.label)
    width = bits(slot.dtype)
    if width == 8 or len(view.shape) != len(slot.dim):
        return view.shape, view.stride
    try:
        axis = unit_axis(slot.dim, slot.stride)
        if view.stride[axis] != 1 and view.shape[axis] > 1:
            raise GraphError(f"the bytes of axis {axis} must be neighbours")
        return rescale(view.shape, view.stride, axis, 8, width)
    except GraphError as error:
        raise ExecutionError(
            f"operand {slot.label}: {slot.dtype} in a {view.dtype} buffer: {error}", operand=slot.label
        ) from None


def storage(dtype: str, dim: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the bytes that hold such a tensor of 4-bit elements or of packed vectors, in bytes."""
    return rescale(dim, stride, unit_axis(dim, stride), bits(dtype), 8)


def extent_bytes(dtype: str, dim: Sequence[int], stride: Sequence[int]) -> int:
    """Bytes from the first to past the last element; 0 for an empty tensor."""
    if 0 in dim:
        return 0
    last = sum((size - 1) * step for size, step in zip(dim, stride, strict=True))
    return (bits(as_dtype(dtype)) * (last + 1) + 7) // 8

"""One operand of a plan before it is seen, and how many bytes it has. Imported by the layout and the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._dims import packed_strides
from ._dtypes import as_dtype, bits
from ._engine import Operand
from ._errors import ExecutionError

if TYPE_CHECKING:
    from ._graph._frozen import FrozenTensor

__all__ = ["Slot", "extent_bytes", "same_storage", "unpack"]


class Slot:
    """What is known of one operand before it is seen."""

    __slots__ = (
        "align",
        "by_value",
        "dim",
        "dtype",
        "extent",
        "label",
        "operand",
        "packed",
        "shape",
        "stride",
        "tensor",
    )

    def __init__(self, tensor: FrozenTensor, operand: Operand) -> None:
        self.tensor = tensor
        self.operand = operand
        self.label = operand.name or f"uid {operand.uid}"
        self.dtype = tensor.dtype.value
        self.by_value = operand.by_value
        self.dim = operand.dim
        self.stride = operand.stride
        self.shape: tuple[int, ...] | None = None  # fixed sizes, else None
        fixed = all(isinstance(v, int) for v in (*operand.dim, *operand.stride))
        self.extent = 0
        if fixed:
            self.shape = tuple(operand.dim)  # type: ignore[arg-type]
            self.extent = extent_bytes(self.dtype, self.shape, operand.stride)  # type: ignore[arg-type]
        self.packed = fixed and operand.stride == packed_strides(operand.dim)
        # An address must be a multiple of the element, capped at 16 bytes for the packed vector types.
        self.align = min(16, max(1, bits(self.dtype) // 8))


def same_storage(have: str, want: str) -> bool:
    """Types that frameworks lack travel as bytes: fp8 and 4-bit types in uint8 or int8, int8x4 in int8 or int32."""
    if want in ("fp8_e4m3", "fp8_e5m2", "fp8_e8m0", "fp8_e5m3", "fp4_e2m1", "int4", "boolean"):
        return have in ("uint8", "int8")
    return want in ("int8x4", "uint8x4", "int8x32") and have in ("int8", "uint8")


def unpack(slot: Slot, view: Any, shape: Any, stride: Any) -> tuple[Any, Any]:
    """Shape and strides in elements of the declared type, for a buffer that holds bytes."""
    width = bits(slot.dtype)
    if width == 8:
        return shape, stride
    axis = next((i for i, step in enumerate(slot.stride) if step == 1), None)
    if axis is None or len(shape) != len(slot.stride) or stride[axis] not in (0, 1):
        raise ExecutionError(
            f"operand {slot.label}: {slot.dtype} in a {view.dtype} buffer needs a unit-stride axis",
            operand=slot.label,
        )
    shape, stride = list(shape), list(stride)
    if width == 4:
        shape[axis] *= 2
        stride = [step if i == axis else step * 2 for i, step in enumerate(stride)]
    else:
        ratio = width // 8
        if shape[axis] % ratio or any(step % ratio for i, step in enumerate(stride) if i != axis):
            raise ExecutionError(
                f"operand {slot.label}: bytes do not fill whole {slot.dtype} vectors", operand=slot.label
            )
        shape[axis] //= ratio
        stride = [step if i == axis else step // ratio for i, step in enumerate(stride)]
    return tuple(shape), tuple(stride)


def extent_bytes(dtype: str, dim: Sequence[int], stride: Sequence[int]) -> int:
    """Bytes from the first to past the last element; 0 for an empty tensor."""
    last = 0
    for size, step in zip(dim, stride, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * step
    return (bits(as_dtype(dtype)) * (last + 1) + 7) // 8

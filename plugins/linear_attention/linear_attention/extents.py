"""What is known of a size or stride before a run brings it. Imported by the lowerings; imports nothing at run time."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudnn_core import Extent

__all__ = ["divisor", "least", "shown"]


def least(size: Extent) -> int:
    """The smallest admissible size."""
    if isinstance(size, int):
        return size
    dims: Any = getattr(size, "dims", (size,))
    found: int = prod((dim.smallest for dim in dims), start=getattr(size, "factor", 1))
    return found


def divisor(stride: Extent) -> int:
    """A number that certainly divides a stride."""
    if isinstance(stride, int):
        return stride
    dims: Any = getattr(stride, "dims", (stride,))
    found: int = prod((dim.multiple_of for dim in dims), start=getattr(stride, "factor", 1))
    return found


def shown(size: Extent) -> object:
    """As a decline has it."""
    return size if isinstance(size, int) else str(size)

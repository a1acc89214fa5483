"""What is known of a size or stride before a run brings it. Imported by the lowerings; imports nothing at run time."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudnn_core import Extent

__all__ = ["divisor", "least", "shown"]


def least(size: Extent) -> int:
    """The smallest admissible size."""
    return _product(size, "smallest")


def divisor(stride: Extent) -> int:
    """A number that certainly divides a stride."""
    return _product(stride, "multiple_of")


def shown(size: Extent) -> object:
    """As a decline has it."""
    return size if isinstance(size, int) else str(size)


def _product(size: Extent, fact: str) -> int:
    """A size, or what is known of its runtime factors."""
    if isinstance(size, int):
        return size
    dims: Any = getattr(size, "dims", (size,))
    found: int = prod((getattr(dim, fact) for dim in dims), start=getattr(size, "factor", 1))
    return found

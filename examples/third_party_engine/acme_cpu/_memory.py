"""numpy arrays over addresses that the caller owns. Imported by the plans.

An array is made anew for each run from what ``bind`` has prepared: plans keep no reference to a caller's memory, and run from
many threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["Array", "array_at", "collapse", "ints", "viewer"]

Array = Any
FLOAT = np.dtype(np.float32)


def viewer(
    slot: int, shape: Sequence[int], stride: Sequence[int], dtype: Any = FLOAT
) -> Callable[[Sequence[int]], Array]:
    """A function from a run's pointers to the array in ``slot``. ``stride`` counts elements and is not negative."""
    width = np.dtype(dtype).itemsize
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    storage = ctypes.c_char * ((last + 1) * width if 0 not in shape else 0)
    shape, strides = tuple(shape), tuple(step * width for step in stride)

    def view(pointers: Sequence[int]) -> Array:
        return np.ndarray(shape, dtype, storage.from_address(pointers[slot]), 0, strides)

    return view


def array_at(address: int, rows: int, columns: int) -> Array:
    """A dense float32 array in the workspace."""
    storage = ctypes.c_char * (rows * columns * FLOAT.itemsize)
    return np.ndarray((rows, columns), FLOAT, storage.from_address(address))


def collapse(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int] | None:
    """(size, stride) of axes that step evenly, taken as one; None if they don't."""
    size, step = 1, 0
    for length, pitch in zip(reversed(shape), reversed(stride), strict=True):
        if length == 1:
            continue
        if size == 1:
            step = pitch
        elif pitch != step * size:
            return None
        size *= length
    return size, step


def ints(sizes: Sequence[Any]) -> tuple[int, ...]:
    """The sizes or strides of a pack's operand, which are ints: runtime sizes have been bound."""
    return tuple(int(size) for size in sizes)

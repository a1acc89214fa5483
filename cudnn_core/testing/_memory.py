"""Operand memory of the kit: images with guard bytes, on the host or on a CUDA device, and elements in them.

A ``Block`` is one buffer: ``image`` is what the host wrote, ``fetch`` what is there now. The payload lies between guards and
may be shifted off its alignment. Whatever a run did can thus be told byte by byte. Imported by the kit's run phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._dtypes import bits
from ._codec import code_dtype

if TYPE_CHECKING:
    from .._device import DeviceInfo

    Array = Any

__all__ = ["GUARD", "Block", "Layout", "first_change"]

GUARD = 512  # bytes before and after a payload; a multiple of the alignment that plans ask for
_ALIGN = 256


class Layout:
    """Where the elements of one operand lie: dims and strides in elements, as in the graph."""

    __slots__ = ("dim", "dtype", "nbytes", "offsets", "packed", "size")

    def __init__(self, dtype: str, dim: Sequence[int], stride: Sequence[int]) -> None:
        import numpy as np

        self.dtype = str(dtype)
        self.dim = tuple(dim)
        self.packed = bits(self.dtype) < 8
        self.size = max(1, bits(self.dtype) // 8)
        offsets: Any = np.zeros(self.dim, dtype=np.int64)
        for axis, (count, step) in enumerate(zip(self.dim, stride, strict=True)):
            shape = [1] * len(self.dim)
            shape[axis] = count
            offsets = offsets + (np.arange(count, dtype=np.int64) * step).reshape(shape)
        self.offsets = offsets
        extent = int(offsets.max()) + 1 if offsets.size else 0
        self.nbytes = (extent + 1) // 2 if self.packed else extent * self.size

    def read(self, image: Array, start: int) -> Array:
        """The codes of the elements, in the operand's shape."""
        payload = image[start : start + self.nbytes]
        if self.packed:
            return (payload[self.offsets >> 1] >> (4 * (self.offsets & 1)).astype(payload.dtype)) & 15
        return payload.view(code_dtype(self.dtype))[self.offsets]

    def write(self, image: Array, start: int, codes: Array) -> None:
        """Store codes; where elements share memory (stride 0) the last one stays."""
        payload = image[start : start + self.nbytes]
        if not self.packed:
            payload.view(code_dtype(self.dtype))[self.offsets] = codes
            return
        for half in (0, 1):
            here = (self.offsets & 1) == half
            at = self.offsets[here] >> 1
            payload[at] = (payload[at] & (0xF0 >> (4 * half))) | (codes[here].astype(payload.dtype) << (4 * half))


class Block:
    """``nbytes`` of memory filled with ``fill``, ``shift`` bytes off the alignment of 256, between guards."""

    __slots__ = ("_device", "_memory", "address", "image", "nbytes", "start")

    def __init__(self, device: DeviceInfo, nbytes: int, *, fill: int = 0, shift: int = 0) -> None:
        import numpy as np

        self.nbytes = nbytes
        self.start = GUARD + shift
        self.image: Any = np.full(GUARD + shift + nbytes + GUARD, fill, dtype=np.uint8)
        guard: Any = (np.arange(GUARD, dtype=np.int64) * 37 + 11).astype(np.uint8)
        self.image[: self.start] = np.resize(guard, self.start)
        self.image[self.start + nbytes :] = guard
        room = len(self.image) + _ALIGN
        self._device = device
        if device.type == "cuda":
            import torch

            whole = torch.empty(room, dtype=torch.uint8, device=f"cuda:{device.ordinal or 0}")
            base = whole.data_ptr()
        else:
            whole = np.empty(room, dtype=np.uint8)
            base = whole.ctypes.data
        skip = -base % _ALIGN
        self._memory: Any = whole[skip : skip + len(self.image)]
        self.address = base + skip + self.start

    def store(self) -> None:
        """Make the memory equal to ``image``."""
        if self._device.type == "cuda":
            import torch

            self._memory.copy_(torch.from_numpy(self.image))
            torch.cuda.synchronize(self._memory.device)
        else:
            self._memory[:] = self.image

    def fetch(self) -> Array:
        """A copy of the memory, after all work on the device."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._memory.device)
            found: Array = self._memory.cpu().numpy()
            return found
        copy: Array = self._memory.copy()
        return copy

    def stray(self, after: Array) -> str:
        """What changed outside the payload, or ""."""
        for name, part in (("before", slice(0, self.start)), ("past", slice(self.start + self.nbytes, None))):
            at = first_change(self.image[part], after[part])
            if at is not None:
                distance = self.start - at if name == "before" else at + 1
                return f"byte {distance} {name} the {self.nbytes} bytes"
        return ""


def first_change(before: Array, after: Array) -> int | None:
    """The index of the first byte that differs."""
    different = before != after
    return int(different.argmax()) if different.any() else None

"""The memory that a launch shares with its child: host buffers, their copies and their device addresses.

Contract: `Arena.add` collects byte ranges of the caller's memory, `Arena.place` merges those that overlap and gives
each a device address (a GPU allocation's alignment plus the original address modulo 256; unmapped gaps between them,
so that an access past the end of one is out of bounds and not the next one's), `copy_in` and `copy_out` move the bytes.
Device addresses are the same in every process: a run replays. An empty range has an address that nothing is mapped at.
Imported by `_arguments`, `_launch` and `_executor`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from typing import Any, NamedTuple

import numpy as np

from ._findings import EmulationError
from ._memory import host_buffer

__all__ = ["Arena", "Placed"]

DEVICE_BASE = 1 << 45  # far from host addresses in use, far below the emulator's own windows
GAP = 1 << 20
ALIGN = 256
EMPTY = DEVICE_BASE - GAP


class Range(NamedTuple):
    address: int
    size: int
    name: str
    fresh: bool  # counts as uninitialised
    writable: bool


class Placed(NamedTuple):
    """A merged range: host address, bytes, device address, offset in the shared file."""

    host: int
    size: int
    device: int
    offset: int
    name: str
    fresh: bool
    writable: bool


class Arena:
    def __init__(self) -> None:
        self._ranges: list[Range] = []
        self._keep: list[Any] = []
        self._empty: set[int] = set()
        self._file = -1
        self._map: mmap.mmap | None = None
        self.placed: tuple[Placed, ...] = ()

    def add(
        self, address: int, size: int, name: str, *, fresh: bool = False, writable: bool = True, keep: Any = None
    ) -> None:
        """Register bytes of the caller's memory; `keep` is their owner."""
        if size and not address:
            raise EmulationError(f"{name} is a null pointer")
        if size:
            self._ranges.append(Range(address, size, name, fresh, writable))
            self._keep.append(keep)
        elif address:
            self._empty.add(address)

    def add_tensor(self, value: Any, name: str, *, fresh: bool = False) -> int:
        """Register a numpy array or a CPU torch tensor; its address."""
        writable = not isinstance(value, np.ndarray) or bool(value.flags.writeable)
        address, data = host_buffer(value)
        self.add(address, len(data), name, fresh=fresh, writable=writable, keep=value)
        return address

    def place(self) -> None:
        """Merge overlapping ranges and assign device addresses and file offsets."""
        order = {id(item): number for number, item in enumerate(self._ranges)}
        merged: list[Range] = []
        first: list[int] = []  # of each merged range, when it was registered: addresses do not depend on the host's
        for item in sorted(self._ranges):
            if merged and item.address < merged[-1].address + merged[-1].size:
                last = merged[-1]
                end = max(last.address + last.size, item.address + item.size)
                merged[-1] = Range(last.address, end - last.address,
                                   last.name if last.name == item.name else f"{last.name}, {item.name}",
                                   last.fresh and item.fresh, last.writable or item.writable)  # fmt: skip
                first[-1] = min(first[-1], order[id(item)])
            else:
                merged.append(item)
                first.append(order[id(item)])
        device, offset, placed = DEVICE_BASE, 0, []
        for _, item in sorted(zip(first, merged, strict=True)):
            shift = item.address % ALIGN
            placed.append(Placed(item.address, item.size, device + shift, offset + shift, *item[2:]))
            device = -(-(device + shift + item.size) // GAP) * GAP + GAP
            offset = -(-(offset + shift + item.size) // ALIGN) * ALIGN
        self.placed = tuple(placed)
        self._length = max(offset, 1)

    def covers(self, address: int) -> bool:
        """Whether a registered range holds this host address or starts there; before or after `place`."""
        return address in self._empty or any(
            item.address <= address < item.address + item.size for item in self._ranges
        )

    def device(self, address: int) -> int | None:
        """Device address of a host address inside a placed range, else None."""
        for item in self.placed:
            if item.host <= address < item.host + item.size:
                return item.device + address - item.host
        return EMPTY + address % ALIGN if address in self._empty else None

    def share(self) -> tuple[int, int]:
        """File descriptor and length of the shared copies; the arena owns it."""
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("ptx_emulator")
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        os.ftruncate(self._file, self._length)
        self._map = mmap.mmap(self._file, self._length)
        return self._file, self._length

    def copy_in(self) -> None:
        view = self._view()
        for item in self.placed:
            raw = (ctypes.c_uint8 * item.size).from_address(item.host)
            view[item.offset : item.offset + item.size] = np.frombuffer(raw, np.uint8)

    def copy_out(self) -> None:
        """Write back what changed. Memory that cannot be written is left alone, and a change to it is an error."""
        view, refused = self._view(), []
        for item in self.placed:
            now = view[item.offset : item.offset + item.size]
            raw = np.frombuffer((ctypes.c_uint8 * item.size).from_address(item.host), np.uint8)
            if np.array_equal(now, raw):
                continue
            if item.writable:
                raw[...] = now
            else:
                refused.append(item.name)
        if refused:
            raise EmulationError(f"the kernel wrote to read-only memory: {', '.join(refused)}")

    def _view(self) -> Any:
        assert self._map is not None
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view of it is alive in a traceback
                self._map.close()
            self._map = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

"""Memory of the machine: byte regions with shadows, global allocations, the generic address map.

Contract: a `Region` holds bytes, which of them are initialised, and the order of accesses at a granule of 4 bytes
(narrower writes of different agents to one granule are not compared with each other). Every access goes through
`load`/`store` (whole warp, per lane offsets) or `gather`/`scatter` (asynchronous and matrix operations), which check
bounds, alignment, initialisation and order. Out-of-bounds lanes read zero and write nothing. Address map (this
package's, not the hardware's): shared::cluster addresses are `rank << 24 | offset`, the generic windows of shared,
param and local memory lie above every host address. PTX ISA 5.1 "State spaces", 6.4.1 "Generic addressing".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ._clocks import Access, Agents, Events, Order
from ._findings import EmulationError, Findings
from ._overlap import Beside, Overlap

__all__ = ["GLOBAL_LIMIT", "LOCAL_WINDOW", "PARAM_WINDOW", "SHARED_WINDOW", "GlobalMemory", "Region", "host_buffer"]

SHARED_WINDOW = 1 << 56
PARAM_WINDOW = 2 << 56
LOCAL_WINDOW = 3 << 56
GLOBAL_LIMIT = 1 << 56
OFFSET_MASK = (1 << 24) - 1

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Offsets: TypeAlias = "npt.NDArray[np.int64]"
_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_STEPS: Any = {width: np.arange(width, dtype=np.int64) for width in (1, 2, 4, 8, 16, 32, 64)}


class Region:
    """Bytes with shadows. `base` is subtracted from addresses by the callers; offsets start at 0."""

    def __init__(self, name: str, data: Bytes, findings: Findings, events: Events, agents: Agents,
                 initialised: bool, kind: str = "race") -> None:  # fmt: skip
        self.name, self.data, self.findings = name, data, findings
        self.size = len(data)
        padded = -(-self.size // 16) * 16
        self.init: Bytes = np.full(padded, int(initialised), np.uint8)
        self.complete = initialised  # nothing to look for
        self.order = Order(padded // 4, events, agents, findings, name, kind)
        self.beside: Beside | None = None  # other launches that may run at the same time

    def _clip(self, offsets: Offsets, width: int, access: Access) -> npt.NDArray[np.bool_] | None:
        """Mask of the lanes inside the region, or None when all are."""
        low, high = int(offsets.min()), int(offsets.max())
        if low >= 0 and high + width <= self.size:
            return None
        inside = (offsets >= 0) & (offsets + width <= self.size)
        first = int(offsets[~inside][0])
        self.findings.add("out_of_bounds", f"{width} bytes at {self.name} {first:+#x}: it has {self.size} bytes",
                          access.at, (self.order.agents.name(access.agent),))  # fmt: skip
        return inside

    def misaligned(self, offsets: Offsets, width: int, access: Access) -> bool:
        wrong = offsets % width if width & (width - 1) else offsets & (width - 1)
        if not wrong.any():
            return False
        first = int(offsets[np.argmax(wrong != 0)])
        self.findings.add("misaligned", f"{width}-byte access at {self.name} +{first:#x}", access.at,
                          (self.order.agents.name(access.agent),))  # fmt: skip
        return True

    def _uninitialised(self, first: int, access: Access, what: str = "read") -> None:
        self.findings.add("uninitialised", f"{what} of {self.name} +{first:#x}, which nothing wrote", access.at,
                          (self.order.agents.name(access.agent),))  # fmt: skip

    def _granules(self, offsets: Offsets, width: int) -> Any:
        if width <= 4:
            return offsets >> 2
        return (offsets[:, None] >> 2) + _STEPS[width // 4]

    def _beside(self, access: Access, offsets: Offsets, width: int, granules: Any, writes: bool) -> None:
        if self.beside is not None:
            word, where = (np.uint32, granules) if width >= 4 else (_WORDS[width], offsets // width)
            self.beside.touch(access, word, where, writes, self.order.agents)

    def load(self, offsets: Offsets, width: int, access: Access) -> Bytes:
        """Per lane `width` bytes at `offsets`; shape [lanes, width]."""
        lanes = len(offsets)
        inside = self._clip(offsets, width, access)
        if inside is not None:
            out: Any = np.zeros((lanes, width), np.uint8)
            if inside.any():
                out[inside] = self.load(offsets[inside], width, access)
            return out
        if self.misaligned(offsets, width, access):
            index = offsets[:, None] + _STEPS[width]
            got, known = self.data[index], self.init[index]
        else:
            word = _WORDS.get(width)
            if word is not None and self.size % width == 0:
                at = offsets // width
                got = self.data.view(word)[at].view(np.uint8).reshape(lanes, width)
                known = self.init.view(word)[at].view(np.uint8)
            else:
                index = offsets[:, None] + _STEPS[width]
                got, known = self.data[index], self.init[index]
        if not self.complete and not known.all():
            bad = ~known.reshape(lanes, width).all(axis=1)
            self._uninitialised(int(offsets[np.argmax(bad)]), access)
        granules = self._granules(offsets, width)
        self._beside(access, offsets, width, granules, False)
        self.order.read(access, granules, 4, width < 4)
        return got

    def store(self, offsets: Offsets, values: Bytes, access: Access) -> None:
        """Per lane bytes `values` [lanes, width] to `offsets`; on a conflict inside the warp the highest lane wins."""
        width = values.shape[1]
        inside = self._clip(offsets, width, access)
        if inside is not None:
            if inside.any():
                self.store(offsets[inside], values[inside], access)
            return
        aligned = not self.misaligned(offsets, width, access)
        granules = self._granules(offsets, width)
        self._beside(access, offsets, width, granules, True)
        self.order.write(access, granules, 4, width < 4, lambda: self._holds(offsets, values))
        if aligned and width in _WORDS and self.size % width == 0:
            word, at = _WORDS[width], offsets // width
            self.data.view(word)[at] = np.ascontiguousarray(values).view(word).reshape(-1)
            self.init.view(word)[at] = int.from_bytes(b"\1" * width, "little")
        else:
            index = offsets[:, None] + _STEPS[width]
            self.data[index] = values
            self.init[index] = 1

    def _holds(self, offsets: Offsets, values: Bytes) -> npt.NDArray[np.bool_]:
        """Which granules of a store have the value already: [lanes] up to 4 bytes a lane, else [lanes, width / 4]."""
        lanes, width = values.shape
        equal = self.data[offsets[:, None] + _STEPS[width]] == values
        return equal.all(axis=1) if width <= 4 else equal.reshape(lanes, width // 4, 4).all(axis=2)

    # asynchronous and matrix operations: order is checked at issue, bytes move at completion

    def check_chunks(self, offsets: Offsets, width: int, access: Access, writes: bool, valid: Any = None) -> bool:
        """Check an operation on chunks of `width` bytes at issue; False when one is out of bounds.

        Written chunks count as initialised from here on: a reader that does not wait is a race. `valid` limits the
        initialisation check of a read to some chunks.
        """
        if len(offsets) == 0:
            return True
        if self._clip(offsets, width, access) is not None:
            return False
        partial = bool(width & 3) or bool((offsets & 3).any())
        count = (width + 3) // 4 + (1 if partial else 0)
        granules = (offsets >> 2)[:, None] + np.arange(count)
        if partial:
            granules = np.minimum(granules, (offsets[:, None] + width - 1) >> 2)
        granules = granules.reshape(-1)
        if self.beside is not None:
            word, where = (np.uint8, offsets[:, None] + np.arange(width)) if partial else (np.uint32, granules)
            self.beside.touch(access, word, where, writes, self.order.agents)
        if writes:
            self.order.write(access, granules, 4, partial)
            if not self.complete:
                self.init[offsets[:, None] + np.arange(width)] = 1
            return True
        if not self.complete:
            if partial:
                known = self.init[offsets[:, None] + np.arange(width)].all(axis=1)
                if not known.all():
                    self._uninitialised(int(offsets[np.argmin(known)]), access, "async read")
            else:
                known = self.init.view(np.uint32)[granules] == 0x01010101
                if not known.all():
                    self._uninitialised(int(granules[np.argmin(known)]) * 4, access, "async read")
        self.order.read(access, granules, 4, partial)
        return True

    def check_range(self, start: int, length: int, access: Access, writes: bool) -> bool:
        """As `check_chunks` for one contiguous range whose ends are multiples of 4."""
        if start < 0 or start + length > self.size:
            self._clip(np.array([start]), length, access)
            return False
        granules = slice(start >> 2, -(-(start + length) // 4))
        if self.beside is not None:
            self.beside.touch(access, np.uint32, granules, writes, self.order.agents)
        if writes:
            self.order.write(access, granules, 4)
            self.init[start : start + length] = 1
        else:
            known = self.init[start : start + length]
            if not known.all():
                self._uninitialised(start + int(np.argmin(known)), access, "async read")
            self.order.read(access, granules, 4)
        return True


class Outputs:
    """The tensors of `outputs=`, recognised among arguments and buffers by identity: `id(value) in outputs`."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)
        self._missing = {id(value): number for number, value in enumerate(self._values)}
        self._ids = frozenset(self._missing)

    def __contains__(self, identity: int) -> bool:
        self._missing.pop(identity, None)
        return identity in self._ids

    @classmethod
    def of(cls, values: Sequence[Any] | Outputs) -> Outputs:
        return values if isinstance(values, Outputs) else cls(values)

    def check(self) -> None:
        """Raises EmulationError for one that was not asked for: it would have no effect."""
        for number in self._missing.values():
            raise EmulationError(
                f"outputs[{number}] is neither an argument nor a buffer of this launch: the very object is needed, not a view"
            )


def host_buffer(value: Any) -> tuple[int, Bytes]:
    """Address and writable bytes of a numpy array or a CPU torch tensor, its whole extent (strides included)."""
    if isinstance(value, np.ndarray):
        address = int(value.__array_interface__["data"][0])
        span = 0 if value.size == 0 else value.itemsize + sum(
            (n - 1) * abs(s) for n, s in zip(value.shape, value.strides, strict=True))  # fmt: skip
        if any(s < 0 for s in value.strides):
            raise EmulationError("arrays with negative strides are not supported as arguments")
        if value.dtype.hasobject:
            raise EmulationError(f"an array of {value.dtype} holds no numbers")
        if not value.flags.writeable:
            return address, np.frombuffer(ctypes.string_at(address, span), np.uint8).copy()
    elif hasattr(value, "data_ptr"):
        if value.device.type != "cpu":
            raise EmulationError(f"argument on {value.device}: the emulator takes CPU tensors")
        address, size = int(value.data_ptr()), int(value.element_size())
        span = 0 if value.numel() == 0 else size * (
            1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)))  # fmt: skip
    else:
        raise EmulationError(f"not a tensor: {type(value).__name__}")
    if span == 0:
        return address, np.zeros(0, np.uint8)
    raw = (ctypes.c_uint8 * span).from_address(address)
    return address, np.frombuffer(raw, np.uint8)


class GlobalMemory:
    """Registered host buffers. Addresses are the host's, or any others a caller gives (replays).

    `overlap`: the launch, and those that may run beside it.
    """

    def __init__(self, findings: Findings, events: Events, agents: Agents, overlap: Overlap) -> None:
        self.findings, self.events, self.agents, self.overlap = findings, events, agents, overlap
        self.regions: list[tuple[int, Region]] = []
        self._keep: list[Any] = []

    def register(self, address: int, data: Bytes, name: str, initialised: bool = True, keep: Any = None,
                 module: bool = False) -> None:  # fmt: skip
        """`module`: a variable of the kernel's own module, which other launches are taken not to use."""
        if len(data) == 0:
            return
        for start, region in self.regions:
            if address < start + region.size and start < address + len(data):
                if start <= address and address + len(data) <= start + region.size:
                    return  # a view of a registered buffer
                raise EmulationError(f"{name} overlaps {region.name} without lying inside it: pass the base tensor")
        region = Region(name, data, self.findings, self.events, self.agents, initialised)
        if not module:
            region.beside = self.overlap.beside(address, len(region.init), name, self.findings)
        self.regions.append((address, region))
        self._keep.append(keep)

    def renew(self, agents: Agents) -> None:
        self.agents = agents
        for _, region in self.regions:
            region.order.renew(agents)

    def find(self, address: int) -> tuple[int, Region] | None:
        for start, region in self.regions:
            if start <= address < start + region.size:
                return start, region
        return None

    def _split(self, addresses: Offsets, access: Access, width: int) -> Iterable[tuple[Any, int, Region]]:
        left: Any = np.ones(len(addresses), np.bool_)
        for start, region in self.regions:
            mine = left & (addresses >= start) & (addresses < start + region.size)
            if mine.any():
                yield mine, start, region
                left &= ~mine
                if not left.any():
                    return
        first = int(addresses[np.argmax(left)])
        near = min(self.regions, key=lambda r: min(abs(first - r[0]), abs(first - r[0] - r[1].size)), default=None)
        hint = "" if near is None else f"; nearest is {near[1].name}, {first - near[0]:+#x} from its start"
        self.findings.add("out_of_bounds", f"{width} bytes at global {first:#x}, outside every allocation{hint}",
                          access.at, (self.agents.name(access.agent),))  # fmt: skip

    def load(self, addresses: Offsets, width: int, access: Access) -> Bytes:
        low, high = int(addresses.min()), int(addresses.max())
        for start, region in self.regions:
            if start <= low and high < start + region.size:
                return region.load(addresses - start, width, access)
        out: Any = np.zeros((len(addresses), width), np.uint8)
        for mine, start, region in self._split(addresses, access, width):
            out[mine] = region.load(addresses[mine] - start, width, access)
        return out

    def store(self, addresses: Offsets, values: Bytes, access: Access) -> None:
        low, high = int(addresses.min()), int(addresses.max())
        for start, region in self.regions:
            if start <= low and high < start + region.size:
                region.store(addresses - start, values, access)
                return
        for mine, start, region in self._split(addresses, access, values.shape[1]):
            region.store(addresses[mine] - start, values[mine], access)

"""Arguments of a host function, and the memory behind them.

Contract: the plain C entry takes `void **`, one pointer for each flattened argument. `pack_compiled` asks the CuTe DSL
compiled function itself for them (the same conversion as its own call), so that static and dynamic layouts are as it
was compiled; `pack_plain` packs for an exported object, whose header says what each argument is (`_ffi_arguments` does
for TVM-FFI functions). Each registers every tensor with the arena and returns `Packed` values in which addresses are
still the caller's; `relocate` makes of one what the child reads (`_host_call`), with device addresses.
Imported by `_launch` and `_ffi_arguments`.
"""

from __future__ import annotations

import base64
import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._arena import Arena
from ._findings import EmulationError
from ._memory import Outputs

__all__ = ["Descriptor", "HostMemory", "Packed", "pack_compiled", "pack_plain", "relocate"]

_DESCRIPTOR_BYTES = 256  # at least those of a tensor with 16 dynamic extents and strides
_SCALAR_BYTES = 8
_WORD = 8


class Packed(NamedTuple):
    """One argument. `kind`: "bytes" (raw), "block" (`HostMemory`), and for TVM-FFI those of `_ffi_arguments`."""

    kind: str
    value: Any


class Descriptor:
    """A tensor argument of an exported object: `struct { void *data; int32_t shapes[]; int64_t strides[]; }`.

    `shapes` and `strides` are the dimensions whose extent or stride is dynamic, in the order of the exported header;
    a fully static tensor and a pointer argument need no descriptor: pass the tensor. `narrow`: strides are 32-bit too.
    """

    def __init__(
        self, tensor: Any, shapes: Sequence[int] = (), strides: Sequence[int] = (), *, narrow: bool = False
    ) -> None:
        self.tensor = tensor
        extents = [int(tensor.shape[i]) for i in shapes]
        size = tensor.itemsize if isinstance(tensor, np.ndarray) else 1
        steps = tensor.strides if isinstance(tensor, np.ndarray) else tensor.stride()
        packed = struct.pack(f"<{len(extents)}i", *extents)
        if strides and not narrow:
            packed += b"\0" * (-len(packed) % 8)
        self.tail = packed + struct.pack(
            f"<{len(strides)}{'i' if narrow else 'q'}", *(int(steps[i]) // size for i in strides)
        )


class HostMemory:
    """The checked fields of a host block: an object like `cudnn_core.HostBlock`, or any with its three attributes.

    data       the bytes that the host function finds at the address which it gets
    addresses  offsets of the 8-byte words in it that hold addresses of operands (0: none): the device's take their place
    values     (offset, bytes): the word at offset gets the host address of these bytes
    """

    def __init__(self, block: Any, name: str) -> None:
        self.name = name
        self.data = bytes(block.data)
        self.addresses = tuple(int(offset) for offset in block.addresses)
        self.values = tuple((int(offset), bytes(raw)) for offset, raw in getattr(block, "values", ()))
        words = [*self.addresses, *(offset for offset, _ in self.values)]
        for offset in words:
            if not 0 <= offset <= len(self.data) - _WORD:
                raise EmulationError(
                    f"{name}: the word at byte {offset} is not in the {len(self.data)} bytes of the host block"
                )
        crowded = [b for a, b in zip(sorted(words), sorted(words)[1:], strict=False) if b - a < _WORD]
        if crowded:
            raise EmulationError(f"{name}: the word at byte {crowded[0]} of the host block overlaps another one")

    def relocated(self, arena: Arena) -> bytes:
        """The data with device addresses."""
        moved = bytearray(self.data)
        for offset in self.addresses:
            (address,) = struct.unpack_from("<Q", self.data, offset)
            device = arena.device(address) if address else 0
            if device is None:
                raise EmulationError(f"{self.name}: the word at byte {offset} of the host block is {address:#x}, which lies in "
                                     "none of the tensors given: pass the tensor in buffers=[...]")  # fmt: skip
            struct.pack_into("<Q", moved, offset, device)
        return bytes(moved)

    @staticmethod
    def matches(value: Any) -> bool:
        return hasattr(value, "addresses") and hasattr(value, "data")


def pack_compiled(compiled: Any, args: Sequence[Any], arena: Arena, outputs: Sequence[Any] | Outputs) -> list[Packed]:
    """What `compiled(*args)` would hand to its host function. A host block stands for its address."""
    fresh = Outputs.of(outputs)
    pointers: list[tuple[int, int]] = []
    blocks: dict[int, HostMemory] = {}
    given: list[Any] = []
    keep: list[Any] = []
    for number, value in enumerate(args):
        if HostMemory.matches(value):
            block = HostMemory(value, f"argument {number}")
            keep.append(ctypes.create_string_buffer(block.data, max(len(block.data), 1)))
            address = ctypes.addressof(keep[-1])
            blocks[address] = block
            given.append(address)
            continue
        given.append(value)
        for leaf in leaves(value):
            pointer = register(leaf, f"argument {number}", arena, id(value) in fresh or id(leaf) in fresh)
            if pointer:
                pointers.append((number, pointer))
    arguments, owners = compiled.generate_execution_args(*given)
    packed = []
    with Path("/proc/self/mem").open(
        "rb", buffering=0
    ) as memory:  # a bounded read: a descriptor does not tell its size
        for argument in arguments:
            scalar = isinstance(argument, ctypes.c_void_p)
            place = argument.value if isinstance(argument, ctypes.c_void_p) else int(argument)
            size = _SCALAR_BYTES if scalar else _DESCRIPTOR_BYTES
            raw = os.pread(memory.fileno(), size, place) if place else bytes(8)
            found = blocks.get(int.from_bytes(raw[:8], "little"))
            packed.append(Packed("bytes", raw) if found is None else Packed("block", found))
    del owners, keep
    check_pointers(pointers, arena)
    return packed


def pack_plain(args: Sequence[Any], arena: Arena, outputs: Sequence[Any] | Outputs) -> list[Packed]:
    """Arguments of an exported object, in the order of its header.

    A tensor is its address (a pointer argument or a static tensor), `Descriptor` a tensor with dynamic dimensions, a host
    block the address of its memory, None a null stream, bytes are themselves; int, float and bool are int32, float32
    and uint8, numpy scalars and ctypes values have their own width.
    """
    fresh = Outputs.of(outputs)
    packed = []
    for number, value in enumerate(args):
        name = f"argument {number}"
        if HostMemory.matches(value):
            packed.append(Packed("block", HostMemory(value, name)))
        else:
            packed.append(Packed("bytes", _plain(value, name, arena, fresh)))
    return packed


def _plain(value: Any, name: str, arena: Arena, fresh: Outputs) -> bytes:
    if value is None:
        return bytes(8)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, bool):
        return bytes([value])
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise EmulationError(f"{name}: {value} does not fit into int32; pass a numpy integer of its width")
        return struct.pack("<i", value)
    if isinstance(value, float):
        return struct.pack("<f", value)
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):
        return bytes(value)
    if isinstance(value, Descriptor):
        address = arena.add_tensor(value.tensor, name, fresh=id(value.tensor) in fresh)
        return struct.pack("<Q", address) + value.tail
    return struct.pack("<Q", arena.add_tensor(value, name, fresh=id(value) in fresh))


def relocate(packed: Packed, arena: Arena) -> list[Any]:
    """The argument as JSON, with device addresses: the first word of bytes, integers, tensors, the words of a block."""
    kind, value = packed
    if kind == "bytes":
        device = arena.device(int.from_bytes(value[:8], "little")) if len(value) >= _WORD else None
        moved = value if device is None else struct.pack("<Q", device) + value[8:]
        return [kind, base64.b64encode(moved).decode()]
    if kind == "block":
        values = [(offset, base64.b64encode(raw).decode()) for offset, raw in value.values]
        return [kind, base64.b64encode(value.relocated(arena)).decode(), values]
    if kind == "int":
        device = arena.device(value)
        return [kind, value if device is None else device]
    if kind == "tensor":
        return [kind, {**value, "data": arena.device(value["data"]) or 0}]
    if kind == "array":
        return [kind, [relocate(item, arena) for item in value]]
    return [kind, value]


def leaves(value: Any) -> Iterator[Any]:
    """What nested lists, tuples and dicts hold."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def register(leaf: Any, name: str, arena: Arena, fresh: bool) -> int:
    """Register a torch or numpy tensor or a runtime `cute.Tensor`; the address of a runtime `cute.Pointer`, else 0."""
    if isinstance(leaf, np.ndarray) or (hasattr(leaf, "untyped_storage") and hasattr(leaf, "data_ptr")):
        arena.add_tensor(leaf, name, fresh=fresh)
    elif hasattr(leaf, "element_type") and isinstance(getattr(leaf, "data_ptr", None), int):
        stored = getattr(getattr(leaf, "_dltensor_wrapper", None), "dtype", None) or leaf.element_type
        last = sum((int(n) - 1) * abs(int(s)) for n, s in zip(leaf.shape, leaf.stride, strict=True))
        empty = any(int(n) == 0 for n in leaf.shape)
        arena.add(leaf.data_ptr, 0 if empty else -(-(last + 1) * int(stored.width) // 8), name, fresh=fresh, keep=leaf)
    elif hasattr(leaf, "memspace") and isinstance(getattr(leaf, "_pointer", None), int):
        return int(leaf._pointer)
    return 0


def check_pointers(pointers: Sequence[tuple[int, int]], arena: Arena) -> None:
    """Raise unless every (argument, address) lies in a registered tensor."""
    for number, address in pointers:
        if not arena.covers(address):
            raise EmulationError(f"argument {number} points to {address:#x}, into none of the tensors given: "
                                 "pass the tensor that it points to in buffers=[...]")  # fmt: skip

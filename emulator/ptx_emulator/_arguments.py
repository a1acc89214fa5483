"""Arguments of a host function: packed bytes with device addresses, and the memory behind them.

Contract: the host function takes `void **`, one pointer for each flattened argument. `pack_compiled` asks the CuTe DSL
compiled function itself for them (the same conversion as its own call), so that static and dynamic layouts are as it
was compiled; `pack_plain` packs for an exported object, whose header says what each argument is. Both register every
tensor with the arena and return bytes in which host addresses are still the caller's; `relocate` replaces them.
Imported by `_launch` and `_executor`.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._arena import Arena
from ._findings import EmulationError

__all__ = ["Descriptor", "pack_compiled", "pack_plain", "relocate"]

_DESCRIPTOR_BYTES = 256  # at least those of a tensor with 16 dynamic extents and strides
_SCALAR_BYTES = 8


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


def pack_compiled(compiled: Any, args: Sequence[Any], arena: Arena, outputs: Sequence[Any]) -> list[bytes]:
    """What `compiled(*args)` would hand to its host function."""
    fresh = {id(value) for value in outputs}
    pointers: list[tuple[int, int]] = []
    for number, value in enumerate(args):
        for leaf in _leaves(value):
            pointer = _register(leaf, f"argument {number}", arena, id(value) in fresh or id(leaf) in fresh)
            if pointer:
                pointers.append((number, pointer))
    arguments, keep = compiled.generate_execution_args(*args)
    packed = []
    with Path("/proc/self/mem").open(
        "rb", buffering=0
    ) as memory:  # a bounded read: a descriptor does not tell its size
        for argument in arguments:
            scalar = isinstance(argument, ctypes.c_void_p)
            address = argument.value if isinstance(argument, ctypes.c_void_p) else int(argument)
            size = _SCALAR_BYTES if scalar else _DESCRIPTOR_BYTES
            packed.append(os.pread(memory.fileno(), size, address) if address else bytes(8))
    del keep
    for number, address in pointers:
        if not arena.covers(address):
            raise EmulationError(f"argument {number} points to {address:#x}, into none of the tensors given: "
                                 "pass the tensor that it points to in buffers=[...]")  # fmt: skip
    return packed


def pack_plain(args: Sequence[Any], arena: Arena, outputs: Sequence[Any]) -> list[bytes]:
    """Arguments of an exported object, in the order of its header.

    A tensor is its address (a pointer argument or a static tensor), `Descriptor` a tensor with dynamic dimensions,
    None a null stream, bytes are themselves; int, float and bool are int32, float32 and uint8, numpy scalars and ctypes
    values have their own width.
    """
    fresh = {id(value) for value in outputs}
    packed = []
    for number, value in enumerate(args):
        name = f"argument {number}"
        if value is None:
            packed.append(bytes(8))
        elif isinstance(value, (bytes, bytearray, memoryview)):
            packed.append(bytes(value))
        elif isinstance(value, bool):
            packed.append(bytes([value]))
        elif isinstance(value, int):
            if not -(2**31) <= value < 2**31:
                raise EmulationError(f"{name}: {value} does not fit into int32; pass a numpy integer of its width")
            packed.append(struct.pack("<i", value))
        elif isinstance(value, float):
            packed.append(struct.pack("<f", value))
        elif isinstance(value, np.generic):
            packed.append(value.tobytes())
        elif isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):
            packed.append(bytes(value))
        elif isinstance(value, Descriptor):
            address = arena.add_tensor(value.tensor, name, fresh=id(value.tensor) in fresh)
            packed.append(struct.pack("<Q", address) + value.tail)
        else:
            packed.append(struct.pack("<Q", arena.add_tensor(value, name, fresh=id(value) in fresh)))
    return packed


def relocate(packed: bytes, arena: Arena) -> bytes:
    """The argument with its address, the first word of every descriptor and pointer, on the device."""
    if len(packed) < 8:
        return packed
    (address,) = struct.unpack_from("<Q", packed)
    device = arena.device(address)
    return packed if device is None else struct.pack("<Q", device) + packed[8:]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _register(leaf: Any, name: str, arena: Arena, fresh: bool) -> int:
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

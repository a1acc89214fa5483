"""Just enough of ELF64 to find a host function in an object and a cubin in memory.

Contract: `read_object(raw)` gives the names of defined and of undefined global symbols (System V gABI, "Symbol
Table"); `read_image(address, read)` the device code that a host function hands to the runtime: a bare cubin, or the
fat binary container that CuTe DSL 4.8 embeds (read off its bytes, no document describes it), of which the cubin in it
is returned where it is not compressed. Imported by the runtime builder and the child.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from ._findings import EmulationError

__all__ = ["ObjectSymbols", "read_image", "read_object"]

_MAGIC = b"\x7fELF\x02\x01"  # 64-bit, little-endian
_FAT_MAGIC = 0xBA55ED50
_SYMTAB, _NOBITS = 2, 8
_GLOBAL, _WEAK = 1, 2


class ObjectSymbols(NamedTuple):
    defined: tuple[str, ...]
    undefined: tuple[str, ...]


def read_object(raw: bytes) -> ObjectSymbols:
    """Global and weak symbols of a relocatable object or a shared library."""
    if raw[:6] != _MAGIC or len(raw) < 64:
        raise EmulationError("the host object is not a 64-bit little-endian ELF file")
    defined: list[str] = []
    undefined: list[str] = []
    try:
        start, size, count = _sections(raw)
        for index in range(count):
            header = struct.unpack_from("<IIQQQQIIQQ", raw, start + index * size)
            if header[1] != _SYMTAB:
                continue
            strings = struct.unpack_from("<IIQQQQIIQQ", raw, start + header[6] * size)[4]
            for at in range(header[4], header[4] + header[5], 24):
                name, info, _, section = struct.unpack_from("<IBBH", raw, at)
                if info >> 4 in (_GLOBAL, _WEAK) and name:
                    end = raw.index(b"\0", strings + name)
                    (defined if section else undefined).append(raw[strings + name : end].decode())
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        raise EmulationError(f"the host object is damaged: {error}") from None
    return ObjectSymbols(tuple(defined), tuple(undefined))


def read_image(address: int, read: Callable[[int, int], bytes]) -> bytes:
    """The cubin at `address`, the whole container if there is none in it, or b"" for something else."""
    head = read(address, 64)
    if head[:4] == _MAGIC[:4]:
        return read(address, _image_size(address, read))
    magic, _, header, length = struct.unpack_from("<IHHQ", head)
    if magic != _FAT_MAGIC or not 16 <= header <= 64:
        return b""
    at, end = address + header, address + header + length
    while at + 64 <= end:
        _, _, entry, payload = struct.unpack_from("<HHIQ", read(at, 16))
        if entry < 16 or at + entry + payload > end:
            break
        if payload >= 64 and read(at + entry, 4) == _MAGIC[:4]:
            return read(at + entry, _image_size(at + entry, read))
        at += entry + payload
    return read(address, header + length)


def _image_size(address: int, read: Callable[[int, int], bytes]) -> int:
    """Bytes of an ELF image: it ends with its headers or its last section."""
    head = read(address, 64)
    start, size, count = _sections(head)
    programs, program_size, programs_count = _programs(head)
    end = max(start + size * count, programs + program_size * programs_count)
    for index in range(count):
        header = struct.unpack("<IIQQQQIIQQ", read(address + start + index * size, 64))
        if header[1] != _NOBITS:
            end = max(end, header[4] + header[5])
    return int(end)


def _sections(head: bytes) -> tuple[int, int, int]:
    (start,) = struct.unpack_from("<Q", head, 40)
    size, count = struct.unpack_from("<HH", head, 58)
    return start, size, count


def _programs(head: bytes) -> tuple[int, int, int]:
    (start,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    return start, size, count

"""Shared-memory operand layouts of wgmma and tcgen05: swizzles, matrix descriptors, operand addresses, legality.

Sources: PTX ISA 9.7.15.5.1 (wgmma) and 9.7.16.4, 9.7.16.5.1, 9.7.16.10.6 (tcgen05), the canonical layouts that CuTe
states for its descriptors, and for sm_103/sm_107 fields the public descriptor documentation of CuTe DSL.
The wgmma side (every swizzle, both majornesses, base offsets) agrees with an H200 (tests/test_h200_matrix.py); a base
offset moves the row bits of the swizzle, so that the pattern starts at `base_offset * 128` modulo 1024.
Inferred, without a public statement or a GPU to ask: (1) tcgen05 uses base_offset as wgmma does; (2) a K-major row that runs past its swizzle span goes on at the leading offset (or at
the leading address in absolute mode, sm_103's 48-byte K steps); (3) the 15-bit start address of sm_107 (the compiler's
mask); (4) the 128-byte swizzle with 64-byte atoms exchanges the two halves of every second row.
Instruction descriptors are in `_descriptors`, tensor maps in `_tensor_map`; both are re-exported here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._descriptors import InstructionDescriptor, decode_instruction, encode_instruction, instruction_problems
from ._tensor_map import TensorMap, decode_tensor_map, encode_tensor_map, tensor_map_problems

__all__ = [
    "SWIZZLES",
    "InstructionDescriptor",
    "MatrixDescriptor",
    "TensorMap",
    "decode_instruction",
    "decode_tcgen05",
    "decode_tensor_map",
    "decode_wgmma",
    "encode_instruction",
    "encode_tcgen05",
    "encode_tensor_map",
    "encode_wgmma",
    "gather_operand",
    "instruction_problems",
    "matrix_problems",
    "operand_addresses",
    "operand_chunks",
    "swizzle",
    "swizzle_span",
    "tensor_map_problems",
]

Array: TypeAlias = "NDArray[Any]"
# name -> (row bits >> shift) & mask is XORed into the address; span in bytes; rows of one pattern
SWIZZLES: dict[str, tuple[int, int, int]] = {
    "none": (0, 0, 16),
    "32B": (3, 0x10, 32),
    "64B": (3, 0x30, 64),
    "128B": (3, 0x70, 128),
    "128B_32B": (2, 0x60, 128),
    "128B_64B": (1, 0x40, 128),
}
_WGMMA = ("none", "128B", "64B", "32B")
_TCGEN05 = {0: "none", 1: "128B_32B", 2: "128B", 4: "64B", 6: "32B"}


def swizzle(addresses: Any, mode: str, base_offset: int = 0) -> Any:
    """XOR swizzle of byte addresses (int or array); an involution. base_offset as in a matrix descriptor."""
    shift, mask, _ = SWIZZLES[mode]
    if not mask:
        return addresses
    rows = addresses - (base_offset << 7) if base_offset else addresses
    return addresses ^ ((rows >> shift) & mask)


def swizzle_span(mode: str) -> int:
    """Bytes of one row of the swizzle pattern (the inner extent a TMA box may have); 16 without swizzle."""
    return SWIZZLES[mode][2]


class MatrixDescriptor(NamedTuple):
    """A decoded 64-bit matrix descriptor; offsets and addresses in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: str
    base_offset: int = 0
    version: int = 1
    leading_absolute: bool = False
    k_segment: int = 0


def decode_wgmma(value: int) -> MatrixDescriptor:
    """wgmma's descriptor: 14-bit start, leading and stride (bytes >> 4), base offset 49-51, swizzle 62-63."""
    return MatrixDescriptor(
        (value & 0x3FFF) << 4,
        (value >> 16 & 0x3FFF) << 4,
        (value >> 32 & 0x3FFF) << 4,
        _WGMMA[value >> 62 & 3],
        value >> 49 & 7,
        0,
    )


def encode_wgmma(desc: MatrixDescriptor) -> int:
    return (
        (desc.start >> 4 & 0x3FFF)
        | (desc.leading >> 4 & 0x3FFF) << 16
        | (desc.stride >> 4 & 0x3FFF) << 32
        | desc.base_offset << 49
        | _WGMMA.index(desc.swizzle) << 62
    )


def decode_tcgen05(value: int, arch: str = "sm_100a") -> MatrixDescriptor:
    """tcgen05's descriptor; an invalid swizzle code decodes to "invalid<n>". sm_107 has 15-bit start and leading fields."""
    mask = 0x7FFF if arch.startswith("sm_107") else 0x3FFF
    code = value >> 61 & 7
    return MatrixDescriptor(
        (value & mask) << 4,
        (value >> 16 & mask) << 4,
        (value >> 32 & 0x3FFF) << 4,
        _TCGEN05.get(code, f"invalid{code}"),
        value >> 49 & 7,
        value >> 46 & 7,
        bool(value >> 52 & 1),
        value >> 53 & 1,
    )


def encode_tcgen05(desc: MatrixDescriptor, arch: str = "sm_100a") -> int:
    mask = 0x7FFF if arch.startswith("sm_107") else 0x3FFF
    code = next(c for c, name in _TCGEN05.items() if name == desc.swizzle)
    return (
        (desc.start >> 4 & mask)
        | (desc.leading >> 4 & mask) << 16
        | (desc.stride >> 4 & 0x3FFF) << 32
        | desc.version << 46
        | desc.base_offset << 49
        | int(desc.leading_absolute) << 52
        | desc.k_segment << 53
        | code << 61
    )


@lru_cache(maxsize=4096)
def _chunks(desc: MatrixDescriptor, rows: int, kbytes: int, mn_major: bool, bits: int) -> Array:
    span = swizzle_span(desc.swizzle)
    if not mn_major:
        row = np.arange(rows)[:, None]
        column = np.arange(0, kbytes, 16)[None, :]
        if desc.swizzle == "none":
            address = desc.start + row % 8 * 16 + row // 8 * desc.stride + column // 16 * desc.leading
        else:
            column = column + desc.start % span
            base = desc.start - desc.start % span
            slab: Any = column // span
            if desc.leading_absolute:
                origin: Any = np.where(slab > 0, desc.leading, base)
            else:
                origin = base + slab * desc.leading
            address = origin + column % span + row % 8 * span + row // 8 * desc.stride
    else:
        k = np.arange(kbytes * 8 // bits)[:, None]
        chunk = np.arange(rows * bits // 128)[None, :]
        if desc.swizzle == "none":
            address = desc.start + chunk * desc.stride + k % 8 * 16 + k // 8 * desc.leading
        else:
            per, group = span // 16, 4 if desc.swizzle == "128B_32B" else 8
            address = (
                desc.start
                + chunk % per * 16
                + chunk // per * desc.leading
                + k % group * span
                + k // group * desc.stride
            )
    result: Array = swizzle(address.astype(np.int64), desc.swizzle, desc.base_offset)
    result.flags.writeable = False
    return result


def operand_chunks(desc: MatrixDescriptor, rows: int, kbytes: int, major: str = "K", element_bits: int = 16) -> Array:
    """Address of every 16-byte piece of the operand: [rows, kbytes / 16] K-major, [k, rows * element_bits / 128] MN-major.

    The pattern is cached per start address modulo 1024, so a K loop over a ring of stages hits the cache.
    """
    if desc.leading_absolute:
        return _chunks(desc, rows, kbytes, major == "MN", element_bits)
    high = desc.start & ~1023
    pattern = _chunks(desc._replace(start=desc.start - high), rows, kbytes, major == "MN", element_bits)
    return pattern + high


def operand_addresses(
    desc: MatrixDescriptor, rows: int, kbytes: int, major: str = "K", element_bits: int = 16
) -> Array:
    """Byte addresses [rows, kbytes] of an operand: row r's bytes in K order, whatever the order in memory."""
    chunks = operand_chunks(desc, rows, kbytes, major, element_bits)
    octets = chunks[..., None] + np.arange(16)
    if major == "K":
        return octets.reshape(rows, kbytes)
    size, k = element_bits // 8, kbytes * 8 // element_bits
    return np.ascontiguousarray(octets.reshape(k, rows, size).transpose(1, 0, 2)).reshape(rows, kbytes)


def gather_operand(
    memory: Array, desc: MatrixDescriptor, rows: int, kbytes: int, major: str = "K", element_bits: int = 16
) -> Array:
    """The operand's bytes [rows, kbytes] from a uint8 shared memory whose index 0 is address 0 (length a multiple of 16)."""
    pieces = memory.view(np.dtype("V16"))[operand_chunks(desc, rows, kbytes, major, element_bits) >> 4]
    if major == "K":
        return pieces.view(np.uint8).reshape(rows, kbytes)
    dtype: Any = {8: np.uint8, 16: np.uint16, 32: np.uint32}[element_bits]
    elements = pieces.view(dtype).reshape(-1, rows)
    return np.ascontiguousarray(elements.T).view(np.uint8).reshape(rows, kbytes)


def matrix_problems(
    desc: MatrixDescriptor,
    rows: int,
    kbytes: int,
    major: str = "K",
    element_bits: int = 16,
    generation: str = "tcgen05",
    shared_bytes: int = 1 << 18,
) -> list[str]:
    """Why the operand is illegal (empty: legal): swizzle code, constants, majorness, 256 KiB wrap.

    A start address inside the swizzle pattern is legal: the swizzle goes by the absolute address, and public kernels
    start there with base offset 0. Whether the pattern itself is aligned cannot be seen from a descriptor; what a tensor
    copy wrote is compared with it when the operand is read (`_tcgen05.layout_problems`).
    """
    problems: list[str] = []
    if desc.swizzle not in SWIZZLES:
        return [f"swizzle code {desc.swizzle.removeprefix('invalid')} of the matrix descriptor is not defined"]
    if generation == "tcgen05" and desc.version != 1:
        problems.append(f"descriptor bits 46-48 are {desc.version:#05b}, the ISA wants 0b001")
    if desc.swizzle == "none" and desc.base_offset:
        problems.append("base offset is not zero without a swizzle")
    if desc.leading_absolute and (desc.swizzle != "128B" or desc.base_offset or major != "K"):
        problems.append("an absolute leading address needs the 128B swizzle, a K-major operand and base offset 0")
    if major == "MN":
        if element_bits not in (8, 16, 32):
            problems.append(f"MN-major operands of {element_bits}-bit elements do not exist")
        if generation == "wgmma" and element_bits != 16:
            problems.append("wgmma reads MN-major operands only of 16-bit elements")
        if generation == "tcgen05" and (element_bits == 32) != (desc.swizzle == "128B_32B"):
            problems.append("MN-major: 32-bit elements need the 128B swizzle with 32B atoms, others must not use it")
    if not problems:
        last = int(operand_chunks(desc, rows, kbytes, major, element_bits).max()) + 16
        if last > shared_bytes:
            problems.append(
                f"operand ends at {last:#x}, past the {shared_bytes:#x} bytes that the address field covers"
            )
    return problems

"""tensormap.replace and tensormap.cp_fenceproxy: tensor maps edited on the device (PTX ISA 9.7.9.28, 9.7.13.9).

Contract: fields are written in place in the 128-byte map, whose layout `_tensor_map` states. Extents and box extents
are given as such, the rank as rank - 1, strides in bytes. Not checked: the tensormap-proxy fence before the next use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._findings import UnsupportedError
from .._memory import OFFSET_MASK
from .._ptx import Imm, Instruction
from .._translate import Context, Run
from .memory import load_bytes, store_bytes

__all__ = ["TABLE"]


def _put(raw: bytearray, at: int, size: int, value: int) -> None:
    raw[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def _bits(raw: bytearray, word: int, shift: int, width: int, value: int) -> None:
    old = int.from_bytes(raw[4 * word : 4 * word + 4], "little")
    mask = ((1 << width) - 1) << shift
    _put(raw, 4 * word, 4, (old & ~mask) | ((value << shift) & mask))


# element types of the instruction (elemtype operand) -> type code of the map
_TYPES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8, 9: 9, 10: 10, 13: 11, 14: 12, 15: 13}
_FLAGGED = {11: 7, 12: 8}  # tf32 and tf32.ftz: an f32 code with bit 16


def replace(raw: bytearray, field: str, index: int, value: int) -> bool:
    """Write one field of a map; False for a field that is not known."""
    if field == "global_address":
        _put(raw, 0, 8, value)
    elif field == "rank":
        _bits(raw, 2, 4, 3, value)
    elif field == "global_dim":
        _put(raw, 32 + 4 * index, 4, value - 1)
    elif field == "global_stride":
        _put(raw, 12 + 4 * index, 4, value >> 4)
        _bits(raw, 7, 4 * index, 4, value >> 36)
    elif field == "box_dim":
        raw[55 + index] = (value - 1) & 0xFF
    elif field == "element_stride":
        _bits(raw, 13, 3 * index, 3, value - 1)
    elif field == "elemtype":
        _bits(raw, 2, 7, 4, _FLAGGED.get(value, _TYPES.get(value, value)))
        _bits(raw, 2, 16, 1, int(value in _FLAGGED))
    elif field == "interleave_layout":
        _bits(raw, 2, 11, 2, value)
    elif field == "swizzle_mode":
        _bits(raw, 2, 13, 2, value)
    elif field == "swizzle_atomicity":
        _bits(raw, 2, 19, 2, value)
    elif field == "fill_mode":
        _bits(raw, 2, 15, 1, value)
    else:
        return False
    return True


def _one_lane(w: Any, action: Any) -> Any:
    saved, full = w.mask, w.full
    w.mask, w.full = np.arange(32) == w.lead, False
    try:
        return action()
    finally:
        w.mask, w.full = saved, full


def _tensormap(instr: Instruction, ctx: Context) -> Run:
    words = instr.modifiers
    shared = any(m.startswith("shared") for m in words)
    if words[0] == "cp_fenceproxy":
        return _copy(instr, ctx)
    if words[0] != "replace" or len(words) < 3:
        raise UnsupportedError(instr.op, instr.line)
    field, operands = words[2], list(instr.operands)
    address = ctx.uniform_address(operands[0], instr)
    index = operands[1].value if len(operands) > 2 and isinstance(operands[1], Imm) else 0
    value = ctx.uniform(operands[-1], np.uint64 if "b64" in words else np.uint32, instr)
    if not replace(bytearray(128), field, 0, 1):
        raise UnsupportedError(instr.op, instr.line)
    space = "shared" if shared else "global" if "global" in words else "generic"

    def run(w: Any) -> None:
        where = np.array([address(w)])
        access = w.access(instr)

        def edit() -> None:
            raw = bytearray(load_bytes(space, w, where, 64, access).tobytes())
            replace(raw, field, index, value(w))
            store_bytes(space, w, where, np.frombuffer(bytes(raw), np.uint8).reshape(1, 64), access)

        _one_lane(w, edit)

    return run


def _copy(instr: Instruction, ctx: Context) -> Run:
    to, origin = ctx.uniform_address(instr.operands[0], instr), ctx.uniform_address(instr.operands[1], instr)

    def run(w: Any) -> None:
        access = w.access(instr)

        def move() -> None:
            raw = load_bytes("shared", w, np.array([origin(w)]), 64, access)
            store_bytes("global", w, np.array([to(w)]), raw, access)
            # nothing is in the upper half of a map, and CuTe's kernels leave it out of the one that they edit
            start = (origin(w) & OFFSET_MASK) + 64
            upper: Any = np.zeros((1, 64), np.uint8)
            held = w.cta.shared.data[start : start + 64]
            upper[0, : len(held)] = held
            store_bytes("global", w, np.array([to(w) + 64]), upper, access)

        _one_lane(w, move)

    return run


TABLE = {"tensormap": _tensormap}

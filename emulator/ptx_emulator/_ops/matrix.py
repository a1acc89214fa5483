"""Warp-level matrix instructions: ldmatrix, stmatrix, movmatrix, mma.sync (PTX ISA 9.7.15).

Contract: element places come from `_fragments`, arithmetic from `_matmul`. Sparse and block-scaled mma.sync are not
covered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._findings import UnsupportedError
from .._fragments import ldmatrix_map, mma_fragment, stmatrix_map
from .._matmul import accumulate, decode_elements
from .._ptx import Instruction
from .._translate import Context, Run
from .memory import load_bytes, store_bytes

__all__ = ["TABLE"]

_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f64": 64}


def _form(instr: Instruction) -> tuple[str, int, bool, int, str]:
    words = instr.modifiers
    shape = next(m for m in words if m[0] == "m" and "n" in m)
    num = int(next(m for m in words if m in ("x1", "x2", "x4"))[1:])
    space = "shared" if any(m.startswith("shared") for m in words) else "generic"
    bits = 8 if "b8" in words else 16
    if any(m.startswith(("b8x16", "b6x16", "b4x16")) for m in words):
        raise UnsupportedError(instr.op, instr.line)
    return shape, num, "trans" in words, bits, space


def _ldmatrix(instr: Instruction, ctx: Context) -> Run:
    shape, num, trans, bits, space = _form(instr)
    try:
        lanes, offsets = ldmatrix_map(shape, num, trans, bits)
    except ValueError as error:
        raise UnsupportedError(instr.op, instr.line) from error
    used = int(lanes.max()) + 1
    writers = [ctx.writer(o, instr) for o in ctx.vector(instr.operands[0])]
    address, check = ctx.address(instr.operands[1], instr), ctx.require_warp(instr)
    part: Any = {8: np.uint8, 16: np.uint16}[bits]
    size = bits // 8

    def run(w: Any) -> None:
        check(w)
        raw = load_bytes(space, w, address(w)[:used], 16, w.access(instr))
        values = np.ascontiguousarray(raw).view(part)[lanes, offsets // size]
        words = np.ascontiguousarray(values).view(np.uint32)[..., 0]
        for i, write in enumerate(writers):
            write(w, np.ascontiguousarray(words[:, i]))

    return run


def _stmatrix(instr: Instruction, ctx: Context) -> Run:
    shape, num, trans, bits, space = _form(instr)
    try:
        lanes, offsets = stmatrix_map(shape, num, trans, bits)
    except ValueError as error:
        raise UnsupportedError(instr.op, instr.line) from error
    used = int(lanes.max()) + 1
    slots = [ctx.slot(o, np.uint32, instr) for o in ctx.vector(instr.operands[1])]
    address, check = ctx.address(instr.operands[0], instr), ctx.require_warp(instr)
    part: Any = {8: np.uint8, 16: np.uint16}[bits]
    size = bits // 8

    def run(w: Any) -> None:
        check(w)
        words = np.stack([w.regs[s] for s in slots], axis=1)
        rows = np.zeros((used, 16 // size), part)
        rows[lanes, offsets // size] = words.view(part).reshape(32, len(slots), -1)
        store_bytes(space, w, address(w)[:used], rows.view(np.uint8), w.access(instr))

    return run


def _movmatrix(instr: Instruction, ctx: Context) -> Run:
    slot, write = ctx.slot(instr.operands[1], np.uint32, instr), ctx.writer(instr.operands[0], instr)

    def run(w: Any) -> None:
        matrix = np.ascontiguousarray(w.regs[slot]).view(np.uint16).reshape(8, 8)
        write(w, np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32))

    return run


def _mma(instr: Instruction, ctx: Context) -> Run:
    words = instr.modifiers
    types = [m for m in words if m in _BITS or m in ("f32", "s32")]
    if "sp" in words or "block_scale" in words or len(types) != 4 or "f64" in types:
        raise UnsupportedError(instr.op, instr.line)
    shape = next(m for m in words if m[0] == "m" and "n" in m)
    m, rest = shape[1:].split("n")
    n, k = (int(v) for v in rest.split("k"))
    d_type, a_type, b_type, c_type = types
    bits = _BITS[a_type]
    if shape.startswith("m8"):
        raise UnsupportedError(instr.op, instr.line)
    places = {name: mma_fragment(shape, name, bits if name in "ab" else 32) for name in "abcd"}
    writers = [ctx.writer(o, instr) for o in ctx.vector(instr.operands[0])]
    a_slots, b_slots, c_slots = ([ctx.slot(o, np.uint32, instr) for o in ctx.vector(v)] for v in instr.operands[1:4])
    part: Any = {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits]
    views: dict[str, Any] = {"f32": np.float32, "s32": np.int32, "f16": np.float16}
    check, saturate = ctx.require_warp(instr), "satfinite" in words

    def run(w: Any) -> None:
        check(w)

        def matrix(slots: list[int], place: Any, shape_: tuple[int, int], dtype: Any) -> Any:
            out = np.zeros(shape_, dtype)
            out[place] = np.stack([w.regs[s] for s in slots], axis=1).view(dtype)
            return out

        a = decode_elements(matrix(a_slots, places["a"], (int(m), k), part).view(np.uint8), a_type)
        raw = matrix(b_slots, places["b"], (k, n), part)
        b = decode_elements(np.ascontiguousarray(raw.T).view(np.uint8), b_type)
        c = matrix(c_slots, places["c"], (int(m), n), views[c_type])
        c = c if c_type == "s32" else c.astype(np.float32)
        result = accumulate(a, b, c, d_type, saturate=saturate)[places["d"]]
        out = np.ascontiguousarray(result.astype(np.float16) if d_type == "f16" else result).view(np.uint32)
        for i, write in enumerate(writers):
            write(w, np.ascontiguousarray(out[:, i]))

    return run


TABLE = {"ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "movmatrix": _movmatrix, "mma": _mma}

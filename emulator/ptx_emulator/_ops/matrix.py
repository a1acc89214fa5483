"""Warp-level matrix instructions: ldmatrix, stmatrix, movmatrix, mma.sync (PTX ISA 9.7.15).

Contract: element places come from `_fragments`, arithmetic from `_matmul`, sparsity from `_sparsity`. Not covered: 4-bit
and 1-bit integers, m8n8 shapes other than that of f64, f64 with a rounding other than to nearest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._findings import UnsupportedError
from .._fragments import ldmatrix_map, mma_fragment, stmatrix_map
from .._matmul import accumulate, decode_elements, decode_unpacked, decompress, expand_scales
from .._ptx import Imm, Instruction, Operand
from .._sparsity import expand, illegal, metadata, selectors
from .._translate import Context, Run
from .memory import load_bytes, store_bytes

__all__ = ["TABLE"]

# bits of an element in a register; the f8f6f4 kinds put 4- and 6-bit ones into bytes
_BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "e4m3": 8,
    "e5m2": 8,
    "e3m2": 8,
    "e2m3": 8,
    "e2m1": 4,
    "s8": 8,
    "u8": 8,
    "f64": 64,
}
_RESULTS: dict[str, Any] = {"f32": np.float32, "s32": np.int32, "f16": np.float16, "f64": np.float64}


def _form(instr: Instruction) -> tuple[str, int, bool, int, str]:
    words = instr.modifiers
    shape = next(m for m in words if m[0] == "m" and "n" in m)
    num = int(next(m for m in words if m in ("x1", "x2", "x4"))[1:])
    space = "shared" if any(m.startswith("shared") for m in words) else "generic"
    bits = 8 if "b8" in words or "b8x16" in words else 16
    return shape, num, "trans" in words, bits, space


def _ldmatrix(instr: Instruction, ctx: Context) -> Run:
    shape, num, trans, bits, space = _form(instr)
    narrow = 6 if "b6x16_p32" in instr.modifiers else 4 if "b4x16_p64" in instr.modifiers else 0
    if (narrow > 0) != ("b8x16" in instr.modifiers) or (narrow and shape == "m8n8"):
        raise UnsupportedError(instr.op, instr.line)
    if shape == "m8n16":  # a lane holds four bytes of a row, as of an m8n8 matrix of half words
        shape, bits = "m8n8", 16
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
        raw = decompress(raw, narrow, "matrix load") if narrow else raw
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


class _Types(NamedTuple):
    """Types of an mma: result, A, B, accumulator, scales ("" without)."""

    d: str
    a: str
    b: str
    c: str
    scale: str


def _types(instr: Instruction) -> _Types:
    """The types, refused where this module has no arithmetic for them."""
    words = instr.modifiers
    known = [m for m in words if m in _BITS or m in _RESULTS]
    scale = next((m for m in words if m in ("ue8m0", "ue4m3")), "")
    if len(known) != 4 or ("block_scale" in words) != (scale != ""):
        raise UnsupportedError(instr.op, instr.line)
    types = _Types(known[0], known[1], known[2], known[3], scale)
    if types.a not in _BITS or types.b not in _BITS or types.c not in _RESULTS or types.d not in _RESULTS:
        raise UnsupportedError(instr.op, instr.line)
    if any(m in words for m in ("rz", "rm", "rp", "xor", "and")):
        raise UnsupportedError(instr.op, instr.line)
    return types


def _scale_reader(instr: Instruction, ctx: Context, data: Operand, select: Operand, rows: int, count: int) -> Any:
    """Scale codes [rows, count]: A's from a pair of lanes of each quad, B's from one lane (ISA 9.7.14.3)."""
    slot, (byte, thread) = ctx.slot(data, np.uint32, instr), ctx.vector(select)
    byte_of, thread_of = ctx.uniform(byte, np.uint16, instr), ctx.uniform(thread, np.uint16, instr)

    def read(w: Any) -> Any:
        first, which = byte_of(w), thread_of(w)
        if first % count or first + count > 4 or which >= (2 if rows == 16 else 4):
            w.machine.findings.add("descriptor", f"byte {first} and thread {which} do not select {count} scale factors",
                                   instr, (w.name,))  # fmt: skip
            first, which = 0, 0
        words = np.ascontiguousarray(w.regs[slot]).reshape(8, 4)
        words = words[:, 2 * which : 2 * which + 2].T.reshape(16) if rows == 16 else words[:, which]
        return np.ascontiguousarray(words).view(np.uint8).reshape(rows, 4)[:, first : first + count]

    return read


def _sparse(instr: Instruction, ctx: Context, rest: list[Operand], k: int, bits: int) -> Any:
    """Reader of the metadata codes [16, chunks] of mma.sp: the register, then the selector."""
    slot, selector = ctx.slot(rest.pop(0), np.uint32, instr), rest.pop(0)
    if not isinstance(selector, Imm):
        raise UnsupportedError(instr.op, instr.line, "sparsity selector")
    ordered, value = "sp::ordered_metadata" in instr.modifiers, selector.value
    if value >= selectors(k, bits):
        raise UnsupportedError(instr.op, instr.line, f"sparsity selector {value}")

    def read(w: Any) -> Any:
        codes = metadata(w.regs[slot], k, bits, value)
        problem = illegal(codes, bits, ordered)
        if problem:
            w.machine.findings.add("descriptor", problem, instr, (w.name,))
        return codes

    return read


def _mma(instr: Instruction, ctx: Context) -> Run:
    """mma{.sp}.sync, block-scaled kinds included (9.7.14.5, 9.7.14.6)."""
    words, types = instr.modifiers, _types(instr)
    shape = next(m for m in words if m[0] == "m" and "n" in m)
    m, rest_ = shape[1:].split("n")
    n, k = (int(v) for v in rest_.split("k"))
    rows = int(m)
    if rows == 8 and types.a != "f64":
        raise UnsupportedError(instr.op, instr.line)
    narrow = any(w in ("kind::f8f6f4", "kind::mxf8f6f4") for w in words)
    bits = 8 if narrow else _BITS[types.a]
    sparse = any(w in ("sp", "sp::ordered_metadata") for w in words)
    stored = k // 2 if sparse else k
    places = {
        "a": mma_fragment(f"m{rows}n{n}k{stored}", "a", bits), "b": mma_fragment(shape, "b", bits),
        "c": mma_fragment(shape, "c", 64 if rows == 8 else 32), "d": mma_fragment(shape, "d", 64 if rows == 8 else 32),
    }  # fmt: skip
    writers = [ctx.writer(o, instr) for o in ctx.vector(instr.operands[0])]
    wide: Any = np.uint64 if types.a == "f64" else np.uint32
    a_slots, b_slots, c_slots = ([ctx.slot(o, wide, instr) for o in ctx.vector(v)] for v in instr.operands[1:4])
    rest = list(instr.operands[4:])
    codes = _sparse(instr, ctx, rest, k, 4 if bits == 4 else bits) if sparse else None
    vector, lines = _scale_vector(words), (16, n) if types.scale else ()
    readers = [_scale_reader(instr, ctx, rest.pop(0), rest.pop(0), count, k // vector) for count in lines]
    if rest:
        raise UnsupportedError(instr.op, instr.line, "operands")
    part: Any = {4: np.uint8, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    check, saturate = ctx.require_warp(instr), "satfinite" in words

    def matrix(w: Any, slots: list[int], place: Any, shape_: tuple[int, int], dtype: Any) -> Any:
        raw = np.stack([w.regs[s] for s in slots], axis=1)
        values = raw.view(dtype)
        if bits == 4 and dtype is part:  # two elements a byte
            values = np.stack((values & 15, values >> 4), axis=-1).reshape(32, -1)
        out = np.zeros(shape_, dtype)
        out[place] = values
        return out

    def operand(raw: Any, name: str) -> Any:
        if bits == 4:
            return decode_elements(raw[:, 0::2] | raw[:, 1::2] << 4, name)
        data = np.ascontiguousarray(raw).view(np.uint8)
        return decode_unpacked(data, name, "register") if narrow else decode_elements(data, name)

    def run(w: Any) -> None:
        check(w)
        a = operand(matrix(w, a_slots, places["a"], (rows, stored), part), types.a)
        if codes is not None:
            a = expand(a, codes(w), bits)
        b = operand(np.ascontiguousarray(matrix(w, b_slots, places["b"], (k, n), part).T), types.b)
        c = matrix(w, c_slots, places["c"], (rows, n), _RESULTS[types.c])
        c = c.astype(np.float32) if types.c == "f16" else c
        factors = [expand_scales(np.ascontiguousarray(read(w)), types.scale, vector) for read in readers]
        left, right = factors if factors else (None, None)
        result = accumulate(a, b, c, types.d, left, right, saturate)[places["d"]]
        out = np.ascontiguousarray(result.astype(np.float16) if types.d == "f16" else result).view(wide)
        for i, write in enumerate(writers):
            write(w, np.ascontiguousarray(out[:, i]))

    return run


def _scale_vector(words: tuple[str, ...]) -> int:
    """Elements per scale factor of a block-scaled mma."""
    if "kind::mxf8f6f4" in words or "scale_vec::2X" in words or "kind::mxf4" in words:
        return 32
    return 16


TABLE = {"ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "movmatrix": _movmatrix, "mma": _mma}

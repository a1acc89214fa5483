"""Atomic read-modify-write operations: atom and red (PTX ISA 9.7.13.5, 9.7.13.6).

Contract: the lanes of a warp take their turns in order; each is ordered by the table of clocks per address (`memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._findings import UnsupportedError
from .._floats import decode, encode
from .._ptx import Instruction, Reg
from .._translate import DTYPES, Context, Run, type_of, width_of
from .cp_async import store_async
from .memory import acquire, load_bytes, release, space_of, store_bytes

__all__ = ["TABLE"]

_ATOM: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "min": min, "max": max, "exch": lambda a, b: b,
}  # fmt: skip


def _atomic(instr: Instruction, ctx: Context) -> Run:
    """atom and red: lanes in order, each a read-modify-write (9.7.13.5, 9.7.13.7)."""
    returns = instr.opcode == "atom"
    kind, space = type_of(instr), space_of(instr)
    words = set(instr.modifiers)
    names = [m for m in instr.modifiers if m in _ATOM or m in ("cas", "inc", "dec")]
    if "async" in words:
        return store_async(instr, ctx)
    if len(names) != 1:
        raise UnsupportedError(instr.op, instr.line)
    name = names[0]
    if kind == "b128":
        return _atomic128(instr, ctx, name)
    count = next((int(m[1:]) for m in instr.modifiers if m in ("v2", "v4", "v8")), 1)
    dtype = DTYPES[kind]
    operands = instr.operands[1:] if returns else instr.operands
    address = ctx.address(operands[0], instr)
    sources = [ctx.slot(o, dtype, instr) for o in ctx.vector(operands[1])]
    compare = ctx.slot(operands[2], dtype, instr) if name == "cas" else -1
    writers = [ctx.writer(o, instr) for o in ctx.vector(instr.operands[0])] if returns else []
    width = width_of(kind)
    typed: Any = {"s32": np.int32, "s64": np.int64, "f32": np.float32, "f64": np.float64, "f16": np.float16,
                  "f16x2": np.float16}.get(kind, dtype)  # fmt: skip
    brain = kind in ("bf16", "bf16x2")

    def combine(old: Any, new: Any, lane: int, other: Any) -> Any:
        if name == "cas":
            return other if old == new else old
        if name == "inc":
            return dtype(0) if old >= new else dtype(old + dtype(1))
        if name == "dec":
            return new if old == 0 or old > new else dtype(old - dtype(1))
        if brain:
            parts = [np.atleast_1d(np.asarray(v).astype(dtype)).view(np.uint16) for v in (old, new)]
            a, b = (decode(p, "bf16") for p in parts)
            return (
                np.asarray(
                    encode(a + b if name == "add" else (np.minimum if name == "min" else np.maximum)(a, b), "bf16")
                )
                .astype(np.uint16)
                .view(dtype)[0]
            )
        a, b = np.atleast_1d(dtype(old)).view(typed), np.atleast_1d(dtype(new)).view(typed)
        result = {"min": np.fmin, "max": np.fmax}.get(name, _ATOM.get(name))(a, b)  # type: ignore[misc]
        return result.astype(typed).view(dtype)[0]

    def run(w: Any) -> None:
        access = w.access(instr, True)
        where = address(w)
        lanes = np.flatnonzero(w.mask)
        acquire(w, where[lanes])
        out = np.zeros((count, 32), dtype)
        for lane in lanes.tolist():
            for i in range(count):
                at = where[lane : lane + 1] + i * width
                saved, w.mask = w.mask, np.arange(32) == lane
                old = load_bytes(space, w, at, width, access).copy().view(dtype)[0, 0]
                new = w.regs[sources[i]][lane]
                value = combine(old, new, lane, w.regs[compare][lane] if compare >= 0 else None)
                store_bytes(space, w, at, np.array([[value]], dtype).view(np.uint8), access)
                w.mask = saved
                out[i, lane] = old
        release(w, where[lanes])
        for i, write in enumerate(writers):
            write(w, out[i])

    return run


def _atomic128(instr: Instruction, ctx: Context, name: str) -> Run:
    """atom.exch and atom.cas of 16 bytes."""
    registers = [o for o in instr.operands if isinstance(o, Reg) and o.type == "b128"]
    if name not in ("exch", "cas") or instr.opcode != "atom" or len(registers) != (2 if name == "exch" else 3):
        raise UnsupportedError(instr.op, instr.line)
    slots, address, space = [r.slot for r in registers], ctx.address(instr.operands[1], instr), space_of(instr)

    def run(w: Any) -> None:
        access, where, lanes = w.access(instr, True), address(w), np.flatnonzero(w.mask)
        acquire(w, where[lanes])
        out = w.regs[slots[0]].copy()
        for lane in lanes.tolist():
            saved, w.mask = w.mask, np.arange(32) == lane
            at = where[lane : lane + 1]
            old = np.ascontiguousarray(load_bytes(space, w, at, 16, access)).view(np.uint64)[0].copy()
            new = w.regs[slots[-1]][lane]
            if name == "cas" and (old != w.regs[slots[1]][lane]).any():
                new = old
            store_bytes(space, w, at, np.ascontiguousarray(new).view(np.uint8).reshape(1, 16), access)
            w.mask = saved
            out[lane] = old
        w.regs[slots[0]] = out
        release(w, where[lanes])

    return run


TABLE = {"atom": _atomic, "red": _atomic}

"""Warp-wide data movement: shfl, vote, match, redux, elect, activemask (PTX ISA 9.7.9.6, 9.7.13.8 - 9.7.13.14).

Contract: a source lane that is not executing gives the reader's own value (the ISA leaves it undefined) and, when the
member mask names it, a `divergence` finding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._findings import UnsupportedError
from .._ptx import Instruction
from .._translate import Context, Run
from .._warp import LANES

__all__ = ["TABLE"]

BITS = (1 << LANES.astype(np.uint64)).astype(np.uint32)


def _members(instr: Instruction, ctx: Context, operand: Any) -> Any:
    """Check that every lane named by the member mask executes the instruction."""
    mask = ctx.slot(operand, np.uint32, instr)
    add = ctx.machine.findings.add

    def check(w: Any) -> None:
        if w.full:
            return
        named = (int(w.regs[mask][w.lead]) & BITS) != 0
        if (named & ~w.mask).any() and not w.alone:
            add("divergence", f"{instr.op}: the member mask names lanes that do not execute it", instr, (w.name,))

    return check


def _shfl(instr: Instruction, ctx: Context) -> Run:
    mode = instr.modifiers[1]
    first, second = ctx.pair(instr.operands[0], instr)
    write, flag = ctx.writer(first, instr), ctx.writer(second, instr)
    a, b, c = (ctx.slot(o, np.uint32, instr) for o in instr.operands[1:4])
    check = _members(instr, ctx, instr.operands[4])

    def run(w: Any) -> None:
        check(w)
        values, lane = w.regs[a], w.regs[b].astype(np.int64) & 31
        control = w.regs[c].astype(np.int64)
        segment, clamp = (control >> 8) & 31, control & 31
        low = LANES & segment
        high = low | (clamp & ~segment)
        if mode == "up":
            source = LANES - lane
            inside = source >= high
        elif mode == "down":
            source = LANES + lane
            inside = source <= high
        elif mode == "bfly":
            source = LANES ^ lane
            inside = source <= high
        else:
            source = low | (lane & ~segment)
            inside = source <= high
        source = np.where(inside, source, LANES)
        if not w.full:
            source = np.where(w.mask[source], source, LANES)
        write(w, values[source])
        flag(w, inside)

    return run


def _vote(instr: Instruction, ctx: Context) -> Run:
    mode = instr.modifiers[1]
    write, source = ctx.writer(instr.operands[0], instr), ctx.predicate(instr.operands[1], instr)
    check = _members(instr, ctx, instr.operands[2])

    def run(w: Any) -> None:
        check(w)
        votes = source(w) & w.mask
        if mode == "ballot":
            write(w, np.full(32, int(BITS[votes].sum(dtype=np.uint64)), np.uint32))
            return
        count = int(np.count_nonzero(votes))
        value = {"all": count == w.active, "any": count > 0, "uni": count in (0, w.active)}[mode]
        write(w, np.full(32, value))

    return run


def _match(instr: Instruction, ctx: Context) -> Run:
    dtype: Any = np.uint64 if "b64" in instr.modifiers else np.uint32
    first, second = ctx.pair(instr.operands[0], instr)
    write, flag = ctx.writer(first, instr), ctx.writer(second, instr)
    a, every = ctx.slot(instr.operands[1], dtype, instr), instr.modifiers[0] == "all"
    check = _members(instr, ctx, instr.operands[2])

    def run(w: Any) -> None:
        check(w)
        same = (w.regs[a][:, None] == w.regs[a][None, :]) & w.mask[None, :]
        masks = (same * BITS[None, :].astype(np.uint64)).sum(axis=1)
        if every:
            whole = int(BITS[w.mask].sum(dtype=np.uint64))
            agree = bool((masks[w.mask] == whole).all())
            write(w, np.full(32, whole if agree else 0, np.uint32))
            flag(w, np.full(32, agree))
        else:
            write(w, masks.astype(np.uint32))

    return run


def _redux(instr: Instruction, ctx: Context) -> Run:
    words = instr.modifiers
    kind = words[-1]
    write, a = ctx.writer(instr.operands[0], instr), ctx.slot(instr.operands[1], np.uint32, instr)
    check = _members(instr, ctx, instr.operands[2])
    name = next(m for m in words if m in ("add", "min", "max", "and", "or", "xor"))
    typed: Any = {"s32": np.int32, "f32": np.float32}.get(kind, np.uint32)
    functions: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
                                 "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip
    reduce = functions[name]
    if kind == "f32" and "NaN" not in words:
        reduce = {"min": np.fmin, "max": np.fmax}[name]

    def run(w: Any) -> None:
        check(w)
        values = w.regs[a][w.mask]
        if "abs" in words:
            values = values & np.uint32(0x7FFFFFFF)
        result = reduce.reduce(values.view(typed))
        write(w, np.full(32, result, typed).view(np.uint32))

    return run


def _elect(instr: Instruction, ctx: Context) -> Run:
    """elect.sync d|p, mask: the lowest executing lane of the mask leads."""
    first, second = ctx.pair(instr.operands[0], instr)
    write, flag = ctx.writer(first, instr), ctx.writer(second, instr)
    mask = ctx.slot(instr.operands[1], np.uint32, instr)
    check = _members(instr, ctx, instr.operands[1])
    chosen = [lane == LANES for lane in range(32)]
    leaders: Any = [np.full(32, lane, np.uint32) for lane in range(32)]

    def run(w: Any) -> None:
        check(w)
        lane = w.lead
        if w.active != 32 or not w.full:
            named = w.mask & ((w.regs[mask][lane] & BITS) != 0)
            lane = int(named.argmax())
        write(w, leaders[lane])
        flag(w, chosen[lane])

    return run


def _activemask(instr: Instruction, ctx: Context) -> Run:
    write = ctx.writer(instr.operands[0], instr)
    return lambda w: write(w, np.full(32, int(BITS[w.mask].sum(dtype=np.uint64)), np.uint32))


def _sync_only(translator: Any) -> Any:
    def translate(instr: Instruction, ctx: Context) -> Run:
        if "sync" not in instr.modifiers:
            raise UnsupportedError(instr.op, instr.line)
        return translator(instr, ctx)  # type: ignore[no-any-return]

    return translate


TABLE = {
    "shfl": _sync_only(_shfl), "vote": _sync_only(_vote), "match": lambda i, c: _match(_drop_sync(i), c),
    "redux": _sync_only(_redux), "elect": _sync_only(_elect), "activemask": _activemask,
}  # fmt: skip


def _drop_sync(instr: Instruction) -> Instruction:
    words = tuple(m for m in instr.modifiers if m != "sync")
    return Instruction(instr.opcode, words, instr.operands, instr.predicate, instr.line, instr.loc)

"""Register instructions: arithmetic, comparison, conversion, mov, selp, cvta, mapa (PTX ISA 9.7.1 - 9.7.9).

Contract: values come from `_arith.operation` and `_convert.convert`; this module only fetches operands, handles
predicate results and writes destinations.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._arith import operation
from .._convert import convert
from .._findings import UnsupportedError
from .._memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW
from .._ptx import Imm, Instruction, Pair, Reg, Variable, Vec
from .._translate import DTYPES, Context, Run, type_of

__all__ = ["TABLE"]

_OPS = [
    "add",
    "sub",
    "mul",
    "mad",
    "mul24",
    "mad24",
    "sad",
    "div",
    "rem",
    "abs",
    "neg",
    "min",
    "max",
    "popc",
    "clz",
    "bfind",
    "fns",
    "brev",
    "bfe",
    "bfi",
    "bmsk",
    "szext",
    "dp4a",
    "dp2a",
    "fma",
    "rcp",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "lg2",
    "ex2",
    "tanh",
    "testp",
    "copysign",
    "and",
    "or",
    "xor",
    "not",
    "cnot",
    "lop3",
    "shf",
    "shl",
    "shr",
    "prmt",
    "slct",
    "vset",
    "set",
    "addc",
    "subc",
    "madc",
]


def _operands(instr: Instruction, ctx: Context) -> list[int]:
    kind = type_of(instr)
    dtype = DTYPES[kind]
    wide = {"u32": np.uint64, "s32": np.uint64, "u16": np.uint32, "s16": np.uint32}.get(kind)
    mixed = kind in ("f16", "bf16") and "f32" in instr.modifiers  # add.f32.f16: the last source is f32
    out = []
    for number, operand in enumerate(instr.operands[1:], 1):
        use: Any = dtype
        if "wide" in instr.modifiers and number == 3:
            use = wide
        if mixed and number == len(instr.operands) - 1:
            use = np.uint32
        if instr.opcode in ("shl", "shr") and number == 2:
            use = np.uint32
        if instr.opcode in ("bfe", "bfi", "shf", "bmsk", "szext") and isinstance(operand, Imm) and number >= 2:
            use = dtype if number == 2 and instr.opcode == "bfi" else np.uint32
        out.append(ctx.slot(operand, use, instr))
    return out


def _compute(instr: Instruction, ctx: Context) -> Run:
    if "pred" in instr.modifiers:
        return _predicate_logic(instr, ctx)
    if instr.opcode in ("addc", "subc", "madc") or "cc" in instr.modifiers:
        return _carried(instr, ctx)
    compute, slots = operation(instr.op), _operands(instr, ctx)
    first = instr.operands[0]
    if not isinstance(first, Reg):
        write = ctx.writer(first, instr)
        return lambda w: write(w, compute([w.regs[s] for s in slots]))
    slot, dtype = first.slot, ctx.dtypes[first.slot]
    if len(slots) == 2:
        a, b = slots

        def run(w: Any) -> None:
            regs = w.regs
            value = compute((regs[a], regs[b]))
            if value.dtype != dtype:
                value = value.astype(dtype)
            regs[slot] = value if w.full else np.where(w.mask, value, regs[slot])
    else:

        def run(w: Any) -> None:
            regs = w.regs
            value = compute([regs[s] for s in slots])
            if value.dtype != dtype:
                value = value.astype(dtype)
            regs[slot] = value if w.full else np.where(w.mask, value, regs[slot])

    return run


def _carried(instr: Instruction, ctx: Context) -> Run:
    """Extended precision: the condition code is a hidden predicate register (9.7.2)."""
    compute, slots = operation(instr.op), _operands(instr, ctx)
    write, carry = ctx.writer(instr.operands[0], instr), ctx.made("carry", np.bool_, lambda cta, warp: False)
    reads, writes = instr.opcode in ("addc", "subc", "madc"), "cc" in instr.modifiers
    if reads:
        slots.append(carry)

    def run(w: Any) -> None:
        result = compute([w.regs[s] for s in slots])
        if writes:
            result, out = result
            w.put(carry, out)
        write(w, result)

    return run


def _predicate_logic(instr: Instruction, ctx: Context) -> Run:
    write = ctx.writer(instr.operands[0], instr)
    sources = [ctx.predicate(o, instr) for o in instr.operands[1:]]
    table: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    if instr.opcode == "not":
        return lambda w: write(w, ~sources[0](w))
    if instr.opcode not in table:
        raise UnsupportedError(instr.op, instr.line)
    combine = table[instr.opcode]
    return lambda w: write(w, combine(sources[0](w), sources[1](w)))


def _setp(instr: Instruction, ctx: Context) -> Run:
    """setp.cmp{.boolop}.type p{|q}, a, b{, c}: E1 compares, the combination with c is done here (9.7.6.2)."""
    words = list(instr.modifiers)
    booleans = [w for w in words if w in ("and", "or", "xor")]
    for word in booleans:
        words.remove(word)
    compare = operation(".".join(("setp", *words)))
    dtype = DTYPES[type_of(instr)]
    a, b = (ctx.slot(o, dtype, instr) for o in instr.operands[1:3])
    first, second = ctx.pair(instr.operands[0], instr)
    write_p, write_q = ctx.writer(first, instr), ctx.writer(second, instr)
    paired = isinstance(instr.operands[0], Pair)
    if not booleans and not paired:
        return lambda w: write_p(w, compare((w.regs[a], w.regs[b])))
    combine: Any = (
        {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[booleans[0]] if booleans else None
    )
    third = ctx.predicate(instr.operands[3], instr) if booleans else None

    def run(w: Any) -> None:
        result = compare((w.regs[a], w.regs[b]))
        inverse = ~result
        if combine is not None and third is not None:
            other = third(w)
            result, inverse = combine(result, other), combine(inverse, other)
        write_p(w, result)
        if paired:
            write_q(w, inverse)

    return run


def _selp(instr: Instruction, ctx: Context) -> Run:
    dtype = DTYPES[type_of(instr)]
    a, b = (ctx.slot(o, dtype, instr) for o in instr.operands[1:3])
    pick, write = ctx.predicate(instr.operands[3], instr), ctx.writer(instr.operands[0], instr)
    return lambda w: write(w, np.where(pick(w), w.regs[a], w.regs[b]))


def _cvt_pack(instr: Instruction, ctx: Context) -> Run:
    """cvt.pack.sat: two s32 saturated to a narrow type and packed, b lowest; the rest is c from its bit 0 up (9.7.9.22)."""
    kind = instr.modifiers[2]
    if instr.modifiers[1] != "sat" or kind[0] not in "us" or instr.modifiers[3] != "s32":
        raise UnsupportedError(instr.op, instr.line)
    bits = int(kind[1:])
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    slots = [ctx.slot(o, np.uint32, instr) for o in instr.operands[1:]]
    write, mask = ctx.writer(instr.operands[0], instr), np.uint32((1 << bits) - 1)

    def run(w: Any) -> None:
        a, b = (np.clip(w.regs[s].view(np.int32), low, high).astype(np.int32).view(np.uint32) & mask for s in slots[:2])
        packed = b | a << np.uint32(bits)
        write(w, packed | w.regs[slots[2]] << np.uint32(2 * bits) if len(slots) == 3 else packed)

    return run


def _cvt(instr: Instruction, ctx: Context) -> Run:
    if instr.modifiers[:1] == ("pack",):
        return _cvt_pack(instr, ctx)
    compute = convert(instr.op)
    kinds = [m for m in instr.modifiers if m in DTYPES]
    dtype = DTYPES[kinds[-1]] if kinds and instr.modifiers[-1] in DTYPES else np.uint32
    if dtype is np.bool_:
        dtype = np.uint32
    slots = [ctx.slot(o, dtype, instr) for v in instr.operands[1:] for o in ctx.vector(v)]
    write = ctx.writer(instr.operands[0], instr)
    signed = len(kinds) >= 2 and kinds[-2][0] == "s"
    first = instr.operands[0]
    if signed and isinstance(first, Reg) and ctx.dtypes[first.slot] is np.uint64 and kinds[-2] != "s64":
        return lambda w: write(w, compute([w.regs[s] for s in slots]).view(np.int32).astype(np.int64).view(np.uint64))
    return lambda w: write(w, compute([w.regs[s] for s in slots]))


def _mov(instr: Instruction, ctx: Context) -> Run:
    """mov of a register, constant or address, and its packing and unpacking forms (9.7.9.4)."""
    kind = type_of(instr)
    target, source = instr.operands[:2]
    if kind == "b128":
        return _mov128(instr, ctx)
    if kind == "pred":
        pick, write = ctx.predicate(source, instr), ctx.writer(target, instr)
        return lambda w: write(w, pick(w))
    width = np.dtype(DTYPES[kind]).itemsize
    if isinstance(target, Vec):
        part: Any = {1: np.uint8, 2: np.uint16, 4: np.uint32}[width // len(target.items)]
        slot, count = ctx.slot(source, DTYPES[kind], instr), len(target.items)
        writers = [ctx.writer(o, instr) for o in target.items]

        def unpack(w: Any) -> None:
            parts = np.ascontiguousarray(w.regs[slot]).view(part).reshape(32, count)
            for i, write in enumerate(writers):
                write(w, np.ascontiguousarray(parts[:, i]))

        return unpack
    if isinstance(source, Vec):
        part = {1: np.uint8, 2: np.uint16, 4: np.uint32}[width // len(source.items)]
        slots, write = [ctx.slot(o, part, instr) for o in source.items], ctx.writer(target, instr)
        whole = DTYPES[kind]

        def pack(w: Any) -> None:
            parts = np.empty((32, len(slots)), part)
            for i, s in enumerate(slots):
                parts[:, i] = w.regs[s]
            write(w, parts.view(whole).reshape(32))

        return pack
    slot, write = ctx.slot(source, DTYPES[kind], instr), ctx.writer(target, instr)
    return lambda w: write(w, w.regs[slot])


def _mov128(instr: Instruction, ctx: Context) -> Run:
    target, source = instr.operands[:2]
    if isinstance(source, Vec) and isinstance(target, Reg):
        slots, slot = [ctx.slot(o, np.uint64, instr) for o in source.items], target.slot

        def pack(w: Any) -> None:
            value = np.stack([w.regs[s] for s in slots], axis=1)
            w.regs[slot] = value if w.full else np.where(w.mask[:, None], value, w.regs[slot])

        return pack
    if isinstance(target, Vec) and isinstance(source, Reg):
        origin, writers = source.slot, [ctx.writer(o, instr) for o in target.items]

        def unpack(w: Any) -> None:
            for i, write in enumerate(writers):
                write(w, np.ascontiguousarray(w.regs[origin][:, i]))

        return unpack
    if isinstance(target, Reg) and isinstance(source, Reg):
        to, origin = target.slot, source.slot

        def move(w: Any) -> None:
            w.regs[to] = w.regs[origin] if w.full else np.where(w.mask[:, None], w.regs[origin], w.regs[to])

        return move
    raise UnsupportedError(instr.op, instr.line)


def _cvta(instr: Instruction, ctx: Context) -> Run:
    """Windows of this package's generic address map (see `_memory`)."""
    dtype = DTYPES[type_of(instr)]
    source = instr.operands[1]
    to = "to" in instr.modifiers
    space = next((m.split("::")[0] for m in instr.modifiers if m != "to" and not m.startswith("u")), "")
    window = {"shared": SHARED_WINDOW, "param": PARAM_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)
    if isinstance(source, Variable) and source.space == "shared":
        dtype = np.uint64
    slot, write = ctx.slot(source, dtype, instr), ctx.writer(instr.operands[0], instr)
    if window == 0:
        return lambda w: write(w, w.regs[slot])
    if to:
        low = np.uint64((1 << 56) - 1)
        return lambda w: write(w, w.regs[slot].astype(np.uint64) & low)
    high = np.uint64(window)
    return lambda w: write(w, w.regs[slot].astype(np.uint64) | high)


def _mapa(instr: Instruction, ctx: Context) -> Run:
    """mapa{.shared::cluster}: the same offset in another CTA of the cluster (9.7.9.23)."""
    kind = DTYPES[type_of(instr)]
    a, b = ctx.slot(instr.operands[1], kind, instr), ctx.slot(instr.operands[2], np.uint32, instr)
    write = ctx.writer(instr.operands[0], instr)
    high = 0 if any(m.startswith("shared") for m in instr.modifiers) else SHARED_WINDOW

    def run(w: Any) -> None:
        low = w.regs[a].astype(np.uint64) & np.uint64(0xFFFFFF)
        write(w, low | (w.regs[b].astype(np.uint64) << np.uint64(24)) | np.uint64(high))

    return run


def _getctarank(instr: Instruction, ctx: Context) -> Run:
    a, write = ctx.slot(instr.operands[1], np.uint64, instr), ctx.writer(instr.operands[0], instr)
    return lambda w: write(w, (w.regs[a].astype(np.uint64) >> np.uint64(24)).astype(np.uint32) & np.uint32(0xFF))


def _isspacep(instr: Instruction, ctx: Context) -> Run:
    a, write = ctx.slot(instr.operands[1], np.uint64, instr), ctx.writer(instr.operands[0], instr)
    window = {"global": 0, "const": 0, "shared": 1, "param": 2, "local": 3}[instr.modifiers[0].split("::")[0]]
    return lambda w: write(w, (w.regs[a].astype(np.uint64) >> np.uint64(56)) == window)


def _createpolicy(instr: Instruction, ctx: Context) -> Run:
    """A cache policy is opaque and hints only: 0."""
    write = ctx.writer(instr.operands[0], instr)
    return lambda w: write(w, np.zeros(32, np.uint64))


TABLE = {
    **dict.fromkeys(_OPS, _compute),
    "createpolicy": _createpolicy,
    "setp": _setp, "selp": _selp, "cvt": _cvt, "mov": _mov, "cvta": _cvta, "mapa": _mapa, "getctarank": _getctarank,
    "isspacep": _isspacep,
}  # fmt: skip

"""wgmma: warpgroup matrix multiply with operands in shared memory or registers (PTX ISA 9.7.16).

Contract: each warp of the group computes its 16 rows of D. An operation is checked at issue and writes its
accumulators when the schedule completes it; operations of a warp complete in order. The operation is the warpgroup's:
wait_group returns when all warps of the group have done their parts of it, and orders what they read before what follows
(public attention kernels write their results over operands of the other warps). Using an accumulator register
between the issue and the wait_group that covers it is an `uncommitted` finding (the translator adds the check to the
instructions that use such registers). So is an operation that no wgmma.fence precedes; a strict run takes the ISA
(9.7.16.7.1) at its word and reports every operation on registers that others used since the last fence, of which
public kernels have some (moves that the compiler makes). Not checked: writes to A registers in flight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._clocks import Access
from .._findings import UnsupportedError
from .._fragments import mma_fragment
from .._layout import decode_wgmma, gather_operand, matrix_problems, operand_chunks
from .._matmul import accumulate, decode_elements
from .._ptx import Imm, Instruction, Reg, Vec
from .._schedule import Wait
from .._sparsity import expand, illegal, metadata, selectors
from .._tcgen05 import layout_problems, report_once
from .._translate import Context, Run
from .._warp import BLOCK

__all__ = ["TABLE"]

_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
_NAMES = {"f32": "f32", "f16": "f16", "s32": "s32"}


class _Groups:
    """wgmma groups of a warp: the open one and the committed ones, as numbers of operations (from 1)."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.committed: list[list[int]] = []
        self.pending: dict[int, int] = {}  # register slot -> number of the last operation that writes it
        self.clocks: list[int] = []  # of all operations, in order
        self.completed = 0


def _groups(w: Any) -> _Groups:
    groups = w.local.get("wgmma")
    if groups is None:
        groups = w.local["wgmma"] = _Groups()
        w.pending = groups.pending
    return groups  # type: ignore[no-any-return]


def _warpgroup(w: Any) -> list[Any]:
    first = w.index - w.index % 4
    return list(w.cta.warps[first : first + 4])


def _wgmma(instr: Instruction, ctx: Context) -> Run:
    action = instr.modifiers[0]
    if action == "fence":
        return _fence(instr)
    if action == "commit_group":

        def commit(w: Any) -> None:
            groups = _groups(w)
            groups.committed.append(groups.open)
            groups.open = []

        return commit
    if action == "wait_group":
        return _wait(instr, ctx)
    if action == "mma_async":
        return _mma(instr, ctx)
    raise UnsupportedError(instr.op, instr.line)


def _fence(instr: Instruction) -> Run:
    def run(w: Any) -> None:
        w.unfenced = set()

    return run


def _wait(instr: Instruction, ctx: Context) -> Run:
    operand = instr.operands[0]
    assert isinstance(operand, Imm)
    keep = operand.value

    def run(w: Any) -> Any:
        groups = _groups(w)
        count = max(len(groups.committed) - keep, 0)
        number = max((n for group in groups.committed[:count] for n in group), default=0)
        if not number:
            del groups.committed[:count]
            return None
        parts = [(warp, _groups(warp)) for warp in _warpgroup(w)]
        if any(part.completed < number for _, part in parts):
            w.wait = Wait(lambda: all(part.completed >= number for _, part in parts),
                          lambda: f"{count} wgmma groups of {w.name} and its warpgroup")  # fmt: skip
            return BLOCK
        del groups.committed[:count]
        for warp, part in parts:
            w.known[:, warp.engine] = np.maximum(w.known[:, warp.engine], part.clocks[number - 1])
        for slot in [s for s, n in groups.pending.items() if n <= number]:
            del groups.pending[slot]
        return None

    return run


def _sparse(instr: Instruction, ctx: Context, k: int, bits: int) -> Any:
    """Reader of the metadata codes [16, chunks] of a warp's rows; operands 3 and 4 are the register and the selector."""
    slot, selector = ctx.slot(instr.operands[3], np.uint32, instr), instr.operands[4]
    if not isinstance(selector, Imm) or selector.value >= selectors(k, bits):
        raise UnsupportedError(instr.op, instr.line, "sparsity selector")
    value = selector.value

    def read(w: Any) -> Any:
        codes = metadata(w.regs[slot], k, bits, value)
        problem = illegal(codes, bits, True)
        if problem:
            w.machine.findings.add("descriptor", problem, instr, (w.name,))
        return codes

    return read


def _mma(instr: Instruction, ctx: Context) -> Run:
    words = instr.modifiers
    shape = next(m for m in words if m.startswith("m64n"))
    n, k = (int(v) for v in shape[4:].split("k"))
    types = [m for m in words if m in _BITS or m in ("f32", "s32")]
    accumulator, a_type, b_type = types[0], types[1], types[2]
    bits = _BITS[a_type]
    kbytes = k * bits // 8
    operands = instr.operands
    sparse = _sparse(instr, ctx, k, bits) if "sp" in words else None
    stored = k
    if sparse is not None:
        operands, stored = operands[:3] + operands[5:], k // 2
    a_kbytes = stored * bits // 8
    if not isinstance(operands[0], Vec):
        raise UnsupportedError(instr.op, instr.line)
    slots = [o.slot for o in operands[0].items if isinstance(o, Reg)]
    in_registers = isinstance(operands[1], Vec)
    a_slots = [ctx.slot(o, np.uint32, instr) for o in ctx.vector(operands[1])] if in_registers else []
    a_desc = None if in_registers else ctx.uniform(operands[1], np.uint64, instr)
    used = {*slots, *(o.slot for o in ctx.vector(operands[1]) if in_registers and isinstance(o, Reg))}
    ctx.watch |= used if ctx.machine.strict else set(slots)
    b_desc, enable = ctx.uniform(operands[2], np.uint64, instr), ctx.predicate(operands[3], instr)
    extra = [o.value for o in operands[4:] if isinstance(o, Imm)]
    a_sign, b_sign = (extra[0], extra[1]) if len(extra) >= 2 else (1, 1)
    flags = extra[2:]
    a_major = "MN" if not in_registers and len(flags) == 2 and flags[0] else "K"
    b_major = "MN" if flags and flags[-1] else "K"
    rows, columns = mma_fragment(f"m16n{n}k16", "d", 32)
    halves = accumulator == "f16"
    if len(slots) != n // (4 if halves else 2):
        raise UnsupportedError(instr.op, instr.line, f"{len(slots)} accumulators")
    a_place = mma_fragment(f"m16n8k{stored}", "a", bits) if in_registers else None
    check, findings, saturate = ctx.require_warp(instr), ctx.machine.findings, "satfinite" in words
    count, strict = findings.count, ctx.machine.strict

    def run(w: Any) -> None:
        check(w)
        groups = _groups(w)
        if w.unfenced is None or (strict and not used.isdisjoint(w.unfenced)):
            why = "no wgmma.fence precedes it" if w.unfenced is None else "its registers were used since the last one"
            findings.add("uncommitted", f"{instr.op} without wgmma.fence: {why}", instr, (w.name,))
        clock = w.cta.cluster.agents.tick(w.engine)
        access = Access(w.engine, clock, w.known, False, instr)
        region, who, ok = w.cta.shared, w.name, True
        quarter = slice(16 * (w.index % 4), 16 * (w.index % 4) + 16)
        b = decode_wgmma(b_desc(w))
        ok &= report_once(
            findings, matrix_problems(b, n, kbytes, b_major, bits, "wgmma"), "descriptor of B", instr, who
        )
        a: Any = None
        if a_desc is not None:
            a = decode_wgmma(a_desc(w))
            ok &= report_once(
                findings, matrix_problems(a, 64, a_kbytes, a_major, bits, "wgmma"), "descriptor of A", instr, who
            )
        if ok:
            pieces = operand_chunks(b, n, kbytes, b_major, bits)
            ok &= region.check_chunks(pieces.reshape(-1), 16, access, False)
            wrong = layout_problems(region, pieces, b) if ok else []
            report_once(findings, wrong, "descriptor of B", instr, who)
            if a is not None:
                chunks = operand_chunks(a, 64, a_kbytes, a_major, bits)
                chunks = chunks[quarter] if a_major == "K" else chunks
                ok &= region.check_chunks(chunks.reshape(-1), 16, access, False)
                wrong = layout_problems(region, chunks, a) if ok else []
                report_once(findings, wrong, "descriptor of A", instr, who)
        held = np.stack([w.regs[s] for s in a_slots], axis=1) if in_registers else None
        codes = sparse(w) if sparse is not None else None
        adds = bool(enable(w)[w.lead])
        count("flops.wgmma", 2 * 16 * n * k)

        def complete() -> None:
            if ok:
                right = decode_elements(gather_operand(region.data, b, n, kbytes, b_major, bits), b_type)
                if held is not None and a_place is not None:
                    raw: Any = np.zeros((16, stored), {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])
                    raw[a_place] = held.view(raw.dtype)
                    left = decode_elements(raw.view(np.uint8), a_type)
                else:
                    left = decode_elements(gather_operand(region.data, a, 64, a_kbytes, a_major, bits)[quarter], a_type)
                if codes is not None:
                    left = expand(left, codes, bits)
                left, right = left * a_sign if a_sign != 1 else left, right * b_sign if b_sign != 1 else right
                c: Any = None
                if adds:
                    old = np.stack([w.regs[s] for s in slots], axis=1)
                    values = (
                        old.view(np.float16) if halves else old.view(np.int32 if accumulator == "s32" else np.float32)
                    )
                    c = np.empty((16, n), np.int32 if accumulator == "s32" else np.float32)
                    c[rows, columns] = values
                result = accumulate(left, right, c, _NAMES[accumulator], saturate=saturate)[rows, columns]
                out = np.ascontiguousarray(result.astype(np.float16) if halves else result).view(np.uint32)
                out = np.ascontiguousarray(out.T)
                for i, s in enumerate(slots):
                    w.regs[s] = out[i]
            groups.completed += 1

        groups.clocks.append(clock)
        groups.open.append(len(groups.clocks))
        for s in slots:
            groups.pending[s] = len(groups.clocks)
        w.cta.cluster.queue.post(complete, f"wgmma of {who}", instr, ("wgmma", w.engine))

    return run


TABLE = {"wgmma": _wgmma}

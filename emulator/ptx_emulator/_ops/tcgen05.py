"""tcgen05 instructions: allocation, mma, cp, ld, st, commit (PTX ISA 9.7.17).

Contract: mma, cp and commit of one warp complete in issue order through the cluster's queue; ld and st take effect at
once. In a strict run the registers of ld count as in flight until tcgen05.wait::ld, and st is an access of the warp's
engine until tcgen05.wait::st; known-good kernels leave both to the compiler. Not checked: tcgen05.fence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .._clocks import Access
from .._collectors import collector_words
from .._findings import UnsupportedError
from .._fragments import tmem_map
from .._memory import OFFSET_MASK
from .._ptx import Addr, Imm, Instruction, Operand, Reg, Vec
from .._schedule import Wait
from .._tcgen05 import CopyOp, Form, MatrixOp, Operands, ShiftOp, report_once
from .._translate import Context, Run
from .._warp import BLOCK
from .memory import store_bytes
from .sync import barrier_at

__all__ = ["TABLE"]


def _group(instr: Instruction) -> int:
    return 2 if "cta_group::2" in instr.modifiers else 1


def _pair(w: Any, group: int, instr: Instruction) -> list[Any]:
    if group == 1:
        return [w.cta]
    ctas, low = w.cta.cluster.ctas, w.cta.rank & ~1
    if low + 1 >= len(ctas):
        w.machine.findings.add("limits", "cta_group::2 in a cluster without a peer CTA", instr, (w.name,))
        return [w.cta]
    return [ctas[low], ctas[low + 1]]


def _engine(w: Any, instr: Instruction) -> Access:
    """An async-proxy access by the warp's matrix engine, ordered after everything the warp knows."""
    return Access(w.engine, w.cta.cluster.agents.tick(w.engine), w.known, False, instr)


def _tcgen05(instr: Instruction, ctx: Context) -> Run:
    action = instr.modifiers[0]
    table = {"alloc": _alloc, "dealloc": _dealloc, "relinquish_alloc_permit": _relinquish, "mma": _mma, "cp": _cp,
             "ld": _ld, "st": _st, "commit": _commit, "shift": _shift}  # fmt: skip
    if action in table:
        return table[action](instr, ctx)
    if action == "wait::ld":
        return lambda w: w.loading.clear()
    if action == "wait::st":
        return _wait_stores
    if action.startswith(("wait", "fence")):
        return lambda w: None
    raise UnsupportedError(instr.op, instr.line)


def _wait_stores(w: Any) -> None:
    clock = w.local.get("tcgen05.st", 0)
    w.known[:, w.engine] = np.maximum(w.known[:, w.engine], clock)


def _peer_allocation(peer: Any, count: int) -> Wait:
    return Wait(
        lambda: peer.tensor.allocations >= count or not peer.live,
        lambda: f"the tensor memory allocation of cta {peer.rank}",
    )


def _alloc(instr: Instruction, ctx: Context) -> Run:
    to, columns = ctx.uniform_address(instr.operands[0], instr), ctx.uniform(instr.operands[1], np.uint32, instr)
    group, check, exclusive = _group(instr), ctx.require_warp(instr), "exclusive" in instr.modifiers

    def run(w: Any) -> Any:
        check(w)
        got = w.local.pop("alloc", None)
        if got is None:
            got = w.cta.tensor.allocate(columns(w), group, exclusive, w, instr)
            if isinstance(got, Wait):
                w.wait = got
                return BLOCK
            w.cta.tensor.allocations += 1
        # with cta_group::2 one warp of each CTA takes part: neither goes on before the other
        mine = w.cta.tensor
        for peer in _pair(w, group, instr):
            if peer.tensor.allocations < mine.allocations and peer.live:
                w.local["alloc"] = got
                w.wait = _peer_allocation(peer, mine.allocations)
                return BLOCK
        raw = np.array([[got]], np.uint32).view(np.uint8)
        store_bytes("shared", w, np.array([to(w) & 0xFFFFFFFF]), raw, w.access(instr))
        return None

    return run


def _dealloc(instr: Instruction, ctx: Context) -> Run:
    address, columns = (ctx.uniform(o, np.uint32, instr) for o in instr.operands[:2])
    check, exclusive = ctx.require_warp(instr), "exclusive" in instr.modifiers

    def run(w: Any) -> None:
        check(w)
        w.cta.tensor.free(address(w), columns(w), exclusive, w, instr)
        w.cta.cluster.effects += 1

    return run


def _relinquish(instr: Instruction, ctx: Context) -> Run:
    def run(w: Any) -> None:
        w.cta.tensor.permit = False

    return run


def _mma(instr: Instruction, ctx: Context) -> Run:
    """mma{.sp}{.ws}.cta_group.kind [d], a, b, {[metadata]}, idesc, {scales}, {disable-output-lane}, enable-input-d
    (9.7.16.10.9)."""
    words = instr.modifiers
    kind = next(m for m in words if m.startswith("kind::")).removeprefix("kind::")
    group, ws, scaled = _group(instr), "ws" in words, "block_scale" in words
    d = ctx.uniform_address(instr.operands[0], instr)
    in_tmem = isinstance(instr.operands[1], Addr)
    a = ctx.uniform_address(instr.operands[1], instr) if in_tmem else ctx.uniform(instr.operands[1], np.uint64, instr)
    sparse, shift = "sp" in words, "ashift" in words
    b, rest = ctx.uniform(instr.operands[2], np.uint64, instr), list(instr.operands[3:])
    meta = ctx.uniform_address(rest.pop(0), instr) if sparse else None
    idesc = ctx.uniform(rest.pop(0), np.uint32, instr)
    if shift and not in_tmem:
        raise UnsupportedError(instr.op, instr.line, "A in shared memory")
    scales = [ctx.uniform_address(rest.pop(0), instr) for _ in range(2)] if scaled else []
    mask_slots: list[int] = []
    if rest and isinstance(rest[0], Vec):
        mask_slots = [ctx.slot(o, np.uint32, instr) for o in ctx.vector(rest.pop(0))]
    enable = ctx.predicate(rest.pop(0), instr)
    zero = ctx.uniform(rest.pop(0), np.uint64, instr) if rest and ws else None
    scale = rest.pop(0) if rest else Imm(0)
    if (
        rest
        or not isinstance(scale, Imm)
        or (scale.value and kind not in ("f16", "tf32"))
        or not 0 <= scale.value <= 15
    ):
        raise UnsupportedError(instr.op, instr.line, "operands")
    vector = _scale_vector(words, kind) * (2 if sparse else 1) if scaled else 0
    form = Form(kind, ws, vector, scale.value, sparse, shift)
    count, collectors = ctx.machine.findings.count, collector_words(words)

    def run(w: Any) -> None:
        lane = w.lead
        if w.active != 1:
            w.machine.findings.add(
                "divergence", f"{instr.op} issued by {w.active} lanes: each issues its own", instr, (w.name,)
            )
        masked = sum(int(w.regs[s][lane]) << 32 * i for i, s in enumerate(mask_slots))
        operands = Operands(d(w), a(w), in_tmem, b(w), idesc(w), bool(enable(w)[lane]),
                            (scales[0](w), scales[1](w)) if scaled else None, masked, zero(w) if zero else None,
                            meta(w) if meta else 0)  # fmt: skip
        op = MatrixOp(w, instr, form, _pair(w, group, instr), operands, _engine(w, instr))
        if op.ok:
            count("flops.tcgen05", 2 * op.i.m * op.i.n * op.i.k)
            problems = w.cta.collectors.issue(collectors, op.kept(), op.rows, shift, w.machine.module.target)
            report_once(w.machine.findings, problems, "collector", instr, w.name)
        w.cta.cluster.queue.post(op.complete, f"tcgen05.mma of {w.name}", instr, ("tcgen05", w.engine))

    return run


def _scale_vector(words: tuple[str, ...], kind: str) -> int:
    for word, value in (
        ("block16", 16),
        ("block32", 32),
        ("scale_vec::4X", 16),
        ("scale_vec::2X", 32),
        ("scale_vec::1X", 32),
    ):
        if word in words:
            return value
    return 16 if kind == "mxf4nvf4" else 32


def _cp(instr: Instruction, ctx: Context) -> Run:
    words = instr.modifiers
    shape = next(m for m in words if "x" in m and m.endswith("b") and m[0].isdigit())
    multicast = next((m for m in words if m.startswith("warpx")), "")
    narrow = 6 if "b6x16_p32" in words else 4 if "b4x16_p64" in words else 0
    if (narrow > 0) != ("b8x16" in words) or len(instr.operands) != 2:
        raise UnsupportedError(instr.op, instr.line)
    to, desc, group = (
        ctx.uniform_address(instr.operands[0], instr),
        ctx.uniform(instr.operands[1], np.uint64, instr),
        _group(instr),
    )

    def run(w: Any) -> None:
        op = CopyOp(w, instr, shape, multicast, narrow, _pair(w, group, instr), to(w), desc(w), _engine(w, instr))
        w.cta.cluster.queue.post(op.complete, f"tcgen05.cp of {w.name}", instr, ("tcgen05", w.engine))

    return run


def _shift(instr: Instruction, ctx: Context) -> Run:
    address, group = ctx.uniform_address(instr.operands[0], instr), _group(instr)
    if "down" not in instr.modifiers:
        raise UnsupportedError(instr.op, instr.line)

    def run(w: Any) -> None:
        op = ShiftOp(w, instr, _pair(w, group, instr), address(w), _engine(w, instr))
        w.cta.cluster.queue.post(op.complete, f"tcgen05.shift of {w.name}", instr, ("tcgen05", w.engine))

    return run


def _commit(instr: Instruction, ctx: Context) -> Run:
    """Arrive on mbarriers when every earlier tcgen05 operation of the warp is complete."""
    address, strict = ctx.uniform_address(instr.operands[0], instr), ctx.machine.strict
    mask = ctx.uniform(instr.operands[1], np.uint16, instr) if "multicast::cluster" in instr.modifiers else None

    def run(w: Any) -> None:
        cluster, where = w.cta.cluster, address(w) & 0xFFFFFFFF
        ranks = [r for r in range(16) if mask(w) >> r & 1] if mask is not None else [where >> 24]
        barriers = [barrier_at(w, r << 24 | where & OFFSET_MASK, instr, False) for r in ranks]
        clocks = w.release()
        clocks[:, w.engine] = cluster.agents.ticks[w.engine]

        def complete() -> None:
            for barrier in barriers:
                if barrier is not None:
                    barrier.arrive(clocks, instr, (w.name,))

        # the release of a last stage, which nobody waits for; operations before it that are not complete are reported
        cluster.queue.post(complete, f"tcgen05.commit of {w.name}", instr, ("tcgen05", w.engine), not strict)

    return run


def _shape(instr: Instruction) -> tuple[str, int, bool]:
    words = instr.modifiers
    shape = next(m for m in words if m[0].isdigit() and "x" in m)
    num = int(next(m for m in words if m[0] == "x" and m[1:].isdigit())[1:])
    return shape, num, any(m.endswith("::16b") for m in words)


def _access(instr: Instruction, ctx: Context, vector: Operand, split: Operand | None) -> Any:
    """(registers, lanes, column parts): where each register of the warp lies relative to the address."""
    shape, num, packed = _shape(instr)
    amount = split.value if isinstance(split, Imm) else 0
    try:
        lanes, columns = tmem_map(shape, num, amount)
    except ValueError as error:
        raise UnsupportedError(instr.op, instr.line) from error
    items = ctx.vector(vector)
    if len(items) != columns.shape[1]:
        raise UnsupportedError(instr.op, instr.line, f"{len(items)} registers, {columns.shape[1]} expected")
    return items, lanes, columns, packed, 32 if shape == "32x32b" else 16


def _place(
    w: Any, address: int, height: int, columns: Any, packed: bool, instr: Instruction, writes: bool, access: Access
) -> tuple[int, int, bool]:
    named, start = address >> 16 & 0xFFFF, address & 0xFFFF
    # a warp reaches its own quarter, whatever quarter the address names (documentation of CuTe DSL); public kernels name
    # the first one for all warps
    quarter, lane = w.index % 4, w.index % 4 * 32 + named % 32
    allowed = (quarter,) if w.machine.strict else (0, quarter)
    if named // 32 not in allowed or (named % 32 and (height == 32 or named % 16)):
        w.machine.findings.add("tensor_memory", f"{w.name} accesses lane {named}: it owns lanes {quarter * 32}.."
                               f"{quarter * 32 + 31}", instr, (w.name,))  # fmt: skip
    if named % 32 + height > 32:
        return lane, start, False
    width = (int(columns.max()) + 1) * (2 if packed else 1)
    slabs = tuple(range(lane // 16, (lane + height) // 16))
    ok = w.cta.tensor.check(slabs, start, width, access, writes, w.name)
    return lane, start, ok


def _ld(instr: Instruction, ctx: Context) -> Run:
    if "red" in instr.modifiers:
        return _ld_red(instr, ctx)
    split = instr.operands[2] if len(instr.operands) > 2 else None
    items, lanes, columns, packed, height = _access(instr, ctx, instr.operands[0], split)
    writers, slots = [ctx.writer(o, instr) for o in items], {o.slot for o in items if isinstance(o, Reg)}
    strict = ctx.machine.strict
    if strict:
        ctx.watch |= slots
    address, check = ctx.uniform_address(instr.operands[1], instr), ctx.require_warp(instr)
    count = ctx.machine.findings.count

    def run(w: Any) -> None:
        check(w)
        lane, start, ok = _place(w, address(w), height, columns, packed, instr, False, w.access(instr))
        if not ok:
            return
        data = w.cta.tensor.data
        if packed:
            low, high = data[lanes + lane, start + 2 * columns], data[lanes + lane, start + 2 * columns + 1]
            values = (low & np.uint32(0xFFFF)) | high << np.uint32(16)
        else:
            values = data[lanes + lane, start + columns]
        count("bytes.tcgen05.ld", values.size * 4)
        values = np.ascontiguousarray(values.T)
        if strict:
            w.loading |= slots
        for i, write in enumerate(writers):
            write(w, values[i])

    return run


def _ld_red(instr: Instruction, ctx: Context) -> Run:
    """ld.red{.abs}{.NaN}: a load, and the minimum or maximum over the columns of each lane (9.7.16.8.3)."""
    words = [m for m in instr.modifiers if m not in ("red", "min", "max", "abs", "NaN", "f32", "u32", "s32")]
    if "32x32b" not in words or len(instr.operands) != 3:  # which halves 16x32bx2 combines is not stated
        raise UnsupportedError(instr.op, instr.line)
    values, result, source = instr.operands
    load = _ld(replace(instr, modifiers=(*words, "b32"), operands=(values, source)), ctx)
    targets = ctx.vector(values)
    if len(targets) < 2 or not all(isinstance(o, Reg) for o in targets):
        raise UnsupportedError(instr.op, instr.line, "at least .x2 and no sink")
    slots, write = [ctx.slot(o, np.uint32, instr) for o in targets], ctx.writer(result, instr)
    kind = next(m for m in instr.modifiers if m in ("f32", "u32", "s32"))
    lowest, absolute, dtype = (
        "min" in instr.modifiers,
        "abs" in instr.modifiers,
        {"f32": np.float32, "s32": np.int32}.get(kind),
    )
    if kind == "f32":
        table: Any = (np.minimum, np.maximum) if "NaN" in instr.modifiers else (np.fmin, np.fmax)
    else:
        table = (np.minimum, np.maximum)
    reduce = table[0 if lowest else 1].reduce
    if ctx.machine.strict and isinstance(result, Reg):
        ctx.watch.add(result.slot)

    def run(w: Any) -> None:
        load(w)
        got = np.stack([w.regs[s] for s in slots])
        got = got if dtype is None else got.view(dtype)
        best = reduce(np.abs(got) if absolute else got, axis=0)
        if kind == "f32":  # the canonical NaN
            best = np.where(np.isnan(best), np.uint32(0x7FFFFFFF), best.view(np.uint32))
        write(w, np.ascontiguousarray(best).view(np.uint32))
        if ctx.machine.strict and isinstance(result, Reg):
            w.loading.add(result.slot)

    return run


def _st(instr: Instruction, ctx: Context) -> Run:
    split = instr.operands[1] if len(instr.operands) > 2 else None
    items, lanes, columns, packed, height = _access(instr, ctx, instr.operands[-1], split)
    slots, strict = [ctx.slot(o, np.uint32, instr) for o in items], ctx.machine.strict
    address, check = ctx.uniform_address(instr.operands[0], instr), ctx.require_warp(instr)
    count = ctx.machine.findings.count

    def run(w: Any) -> None:
        check(w)
        access = w.access(instr)._replace(generic=False)  # tensor memory has one proxy
        if strict:
            access = _engine(w, instr)
            w.local["tcgen05.st"] = access.clock
        lane, start, ok = _place(w, address(w), height, columns, packed, instr, True, access)
        if not ok:
            return
        data = w.cta.tensor.data
        values = np.stack([w.regs[s] for s in slots], axis=1)
        count("bytes.tcgen05.st", values.size * 4)
        if packed:
            data[lanes + lane, start + 2 * columns] = values & np.uint32(0xFFFF)
            data[lanes + lane, start + 2 * columns + 1] = values >> np.uint32(16)
        else:
            data[lanes + lane, start + columns] = values

    return run


TABLE = {"tcgen05": _tcgen05}

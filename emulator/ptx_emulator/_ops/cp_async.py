"""Asynchronous copies of single threads: cp.async, st.async, red.async (PTX ISA 9.7.9.12, 9.7.9.25.3, 9.7.13.7).

Contract: copies are late like every asynchronous one; groups and mbarrier arrivals complete them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._clocks import Access
from .._findings import UnsupportedError
from .._memory import OFFSET_MASK
from .._ptx import Imm, Instruction, Reg
from .._tma import combine
from .._translate import DTYPES, Context, Run, type_of
from .bulk import translate_bulk
from .memory import load_bytes

__all__ = ["TABLE", "store_async"]


def store_async(instr: Instruction, ctx: Context) -> Run:
    """st.async and red.async .shared::cluster.mbarrier::complete_tx::bytes{.vec}.type [a], b, [mbar] (9.7.9.12, 9.7.13.7)."""
    kind, reduces = type_of(instr), instr.opcode == "red"
    dtype, words = DTYPES[kind], instr.modifiers
    operation = next((m for m in words if m in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), "")
    if "mbarrier::complete_tx::bytes" not in words or reduces != bool(operation):
        raise UnsupportedError(instr.op, instr.line)
    typed = {"b32": "u32", "b64": "u64"}.get(kind, kind)
    address, barrier = ctx.address(instr.operands[0], instr), ctx.address(instr.operands[2], instr)
    slots = [ctx.slot(o, dtype, instr) for o in ctx.vector(instr.operands[1])]

    def run(w: Any) -> None:
        cluster, agents = w.cta.cluster, w.cta.cluster.agents
        values = np.stack([w.regs[s] for s in slots], axis=1).astype(dtype).view(np.uint8)
        for lane in np.flatnonzero(w.mask):
            place = cluster.resolve(int(address(w)[lane]), instr, w.name)
            mbar = cluster.resolve(int(barrier(w)[lane]), instr, w.name)
            if place is None or mbar is None:
                continue
            found = mbar[0].mbarriers.find(mbar[1], w.access(instr), w.name)
            slot = agents.slot(w.cta.rank)
            access = Access(slot, agents.tick(slot), w.known, True, instr, reduces)
            offset = np.array([place[1]])
            place[0].shared.misaligned(offset, values.shape[1], access)
            if not place[0].shared.check_chunks(offset, values.shape[1], access, True) or found is None:
                continue
            clocks, row = w.release(), values[lane].copy()
            clocks[:, slot] = access.clock

            def complete(found: Any = found, place: Any = place, row: Any = row, clocks: Any = clocks,
                         phase: int = found.phase) -> None:  # fmt: skip
                into = place[0].shared.data[place[1] : place[1] + len(row)]
                into[:] = combine(into[None], row[None], typed, operation)[0] if operation else row
                found.complete(len(row), phase, clocks, instr, (w.name,))

            cluster.queue.post(complete, f"{instr.opcode}.async of {w.name}", instr)

    return run


def _cp(instr: Instruction, ctx: Context) -> Run:
    """cp.async of one thread: late like every asynchronous copy; groups and mbarrier arrivals complete it."""
    words = instr.modifiers
    if "bulk" in words or "reduce" in words:
        return translate_bulk(instr, ctx)
    if words[:1] != ("async",):
        raise UnsupportedError(instr.op, instr.line)
    if "commit_group" in words:
        return lambda w: w.local.setdefault("cp", [[]]).append([])
    if "wait_group" in words or "wait_all" in words:
        keep = instr.operands[0].value if "wait_group" in words and isinstance(instr.operands[0], Imm) else 0
        everything = "wait_all" in words

        def wait(w: Any) -> None:
            groups = w.local.setdefault("cp", [[]])
            limit = len(groups) if everything else max(len(groups) - 1 - keep, 0)
            for group in groups[:limit]:
                for complete in group:
                    complete()
                group.clear()

        return wait
    if "mbarrier" in words:
        return _cp_arrive(instr, ctx)
    return _cp_async(instr, ctx)


def _cp_async(instr: Instruction, ctx: Context) -> Run:
    to, origin = ctx.address(instr.operands[0], instr), ctx.address(instr.operands[1], instr)
    size = instr.operands[2]
    if not isinstance(size, Imm):
        raise UnsupportedError(instr.op, instr.line)
    width = size.value
    extra = instr.operands[3] if len(instr.operands) > 3 else None
    ignored = ctx.predicate(extra, instr) if isinstance(extra, Reg) and extra.type == "pred" else None
    policy = any(m.startswith("L2::cache_hint") for m in instr.modifiers) and len(instr.operands) == 4
    source_size = ctx.slot(extra, np.uint32, instr) if extra is not None and ignored is None and not policy else -1

    def run(w: Any) -> None:
        mask = w.mask
        dst, src = to(w)[mask], origin(w)[mask]
        access = w.access(instr)
        sizes = w.regs[source_size][mask].astype(np.int64) if source_size >= 0 else np.full(len(dst), width)
        if ignored is not None:
            sizes = np.where(ignored(w)[mask], 0, sizes)
        values: Any = np.zeros((len(dst), width), np.uint8)
        for amount in np.unique(sizes):
            mine = sizes == amount
            if amount:
                if amount == width:
                    values[mine] = load_bytes("global", w, src[mine], width, access)
                else:
                    for b in range(int(amount)):
                        values[mine, b : b + 1] = load_bytes("global", w, src[mine] + b, 1, access)
        agents, region = w.cta.cluster.agents, w.cta.shared
        slot = agents.slot(w.cta.rank)
        record = Access(slot, agents.tick(slot), w.known, True, instr)
        offsets = dst & OFFSET_MASK
        region.misaligned(offsets, width, record)
        if not region.check_chunks(offsets, width, record, True):
            return

        def complete() -> None:
            region.data[offsets[:, None] + np.arange(width)] = values
            w.known[0, slot] = max(w.known[0, slot], record.clock)

        w.local.setdefault("cp", [[]])[-1].append(complete)

    return run


def _cp_arrive(instr: Instruction, ctx: Context) -> Run:
    """cp.async.mbarrier.arrive{.noinc}: an arrival when the thread's copies are complete; here they complete now."""
    barrier, noinc = ctx.address(instr.operands[0], instr), "noinc" in instr.modifiers

    def run(w: Any) -> None:
        for group in w.local.get("cp", []):
            for complete in group:
                complete()
            group.clear()
        for lane in np.flatnonzero(w.mask):
            place = w.cta.cluster.resolve(int(barrier(w)[lane]), instr, w.name)
            found = place and place[0].mbarriers.find(place[1], w.access(instr), w.name)
            if found:
                if not noinc:
                    found.pending += 1
                found.arrive(w.release(), instr, (w.name,))

    return run


TABLE = {"cp": _cp}

"""Bulk copies of plain byte ranges, reducing and multicast ones included (PTX ISA 9.7.9.25.4).

Contract: as for tensor copies, an operation is checked when it is issued and moves its bytes when the schedule completes
it. A byte mask does not narrow the checks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._clocks import Access
from .._findings import UnsupportedError
from .._memory import OFFSET_MASK
from .._ptx import Instruction
from .._tma import combine
from .._translate import Context, Run, width_of
from .bulk_groups import after, groups_of, record
from .sync import barrier_at

__all__ = ["translate_plain"]

_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_TYPES = {"b32": "u32", "b64": "u64"}


def _side(w: Any, space: str, address: int, amount: int, access: Access, writes: bool) -> Any:
    """(region, offset) of one end of a plain bulk copy, or None after a finding."""
    at = access.at
    if address % 16 or amount % 16:
        w.machine.findings.add("misaligned", f"bulk copy of {amount} bytes at {address:#x}: both must be multiples of 16",
                               at, (w.name,))  # fmt: skip
        return None
    if space == "global":
        found = w.machine.memory.find(address)
        if found is None:
            w.machine.findings.add(
                "out_of_bounds", f"bulk copy at global {address:#x}, outside every allocation", at, (w.name,)
            )
            return None
        base, region = found
    else:
        place = w.cta.cluster.resolve(address & 0xFFFFFFFF, at, w.name)
        if place is None:
            return None
        base, region = address - place[1], place[0].shared
    return (region, address - base) if region.check_range(address - base, amount, access, writes) else None


def translate_plain(instr: Instruction, ctx: Context) -> Run:
    """cp{.reduce}.async.bulk between global and shared memory, or to another CTA's shared memory."""
    words = instr.modifiers
    spaces = [m.split("::")[0] for m in words if m.split("::")[0] in ("global", "shared")]
    if len(spaces) != 2:
        raise UnsupportedError(instr.op, instr.line)
    to, origin = ctx.uniform_address(instr.operands[0], instr), ctx.uniform_address(instr.operands[1], instr)
    size, rest = ctx.uniform(instr.operands[2], np.uint32, instr), list(instr.operands[3:])
    if spaces[0] != "global":
        mbar = ctx.uniform_address(rest.pop(0), instr)
        mask = ctx.uniform(rest[0], np.uint16, instr) if "multicast::cluster" in words else None
        return _plain_load(instr, ctx, spaces[1], to, origin, size, mbar, mask)
    byte_mask = ctx.uniform(rest[-1], np.uint16, instr) if "cp_mask" in words else None
    return _plain_store(instr, ctx, to, origin, size, byte_mask)


def _operation(words: tuple[str, ...]) -> tuple[str, str, int]:
    """(reduction or "", its type, bytes of an element)."""
    if "reduce" not in words:
        return "", "", 1
    kind = words[-1]
    return next(m for m in words if m in _OPERATIONS), _TYPES.get(kind, kind), width_of(kind)


def _merge(into: Any, values: Any, operation: tuple[str, str, int]) -> Any:
    name, kind, width = operation
    if not name:
        return values
    return combine(into.reshape(-1, width), values.reshape(-1, width), kind, name).reshape(-1)


def _plain_load(
    instr: Instruction, ctx: Context, space: str, to: Any, origin: Any, size: Any, mbar: Any, mask: Any
) -> Run:
    """To shared memory of one CTA, or of those in a multicast mask; completes bytes at each one's mbarrier."""
    operation, count = _operation(instr.modifiers), ctx.machine.findings.count

    def run(w: Any) -> None:
        cluster, amount = w.cta.cluster, size(w)
        where, signal = to(w) & 0xFFFFFFFF, mbar(w) & 0xFFFFFFFF
        reading = record(w, instr, w.cta.rank)
        src = _side(w, space, origin(w), amount, reading, False)
        ends = [(where, signal)]
        if mask is not None:
            ends = [
                (r << 24 | where & OFFSET_MASK, r << 24 | signal & OFFSET_MASK) for r in range(16) if mask(w) >> r & 1
            ]
        targets = []
        for address, barrier_address in ends:
            writing = record(w, instr, w.cta.rank)
            dst = _side(w, "shared", address, amount, writing._replace(atomic=bool(operation[0])), True)
            barrier = barrier_at(w, barrier_address, instr, False)
            if barrier is not None:
                targets.append((dst, barrier, barrier.phase, after(w, reading, writing)))
        count(f"bytes.bulk.{space}_shared", amount * len(targets))

        def complete() -> None:
            values = src[0].data[src[1] : src[1] + amount].copy() if src is not None else None
            for dst, barrier, phase, clocks in targets:
                if dst is not None and values is not None:
                    into = dst[0].data[dst[1] : dst[1] + amount]
                    into[:] = _merge(into, values, operation)
                barrier.complete(amount, phase, clocks, instr, (w.name,))
            cluster.effects += 1

        cluster.queue.post(complete, f"bulk copy of {w.name}", instr)

    return run


def _plain_store(instr: Instruction, ctx: Context, to: Any, origin: Any, size: Any, byte_mask: Any) -> Run:
    """To global memory, in the warp's open bulk group; bit i of a byte mask lets byte i of every 16 through."""
    operation, count = _operation(instr.modifiers), ctx.machine.findings.count

    def run(w: Any) -> None:
        cluster, amount, group = w.cta.cluster, size(w), groups_of(w)[-1]
        reading, writing = record(w, instr, w.cta.rank), record(w, instr, w.cta.rank)
        src = _side(w, "shared", origin(w), amount, reading, False)
        keep: Any = None
        if byte_mask is not None:
            bits = byte_mask(w)
            keep = np.resize(np.array([bits >> i & 1 for i in range(16)], np.bool_), amount)
        dst = _side(w, "global", to(w), amount, writing._replace(atomic=bool(operation[0])), True)
        np.maximum(group.read_clocks, after(w, reading), out=group.read_clocks)
        np.maximum(group.clocks, after(w, reading, writing), out=group.clocks)
        group.reads += 1
        group.writes += 1
        group.at = group.at or instr
        count("bytes.bulk.shared_global", amount)

        def complete() -> None:
            if src is not None and dst is not None:
                values = src[0].data[src[1] : src[1] + amount].copy()
                into = dst[0].data[dst[1] : dst[1] + amount]
                values = _merge(into, values, operation)
                into[:] = values if keep is None else np.where(keep, values, into)
            group.reads -= 1
            group.writes -= 1
            cluster.effects += 1

        cluster.queue.post(complete, f"bulk copy of {w.name}", instr, may_outlive=True)

    return run

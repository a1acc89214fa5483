"""Cluster launch control (PTX ISA 9.7.13.17, 9.7.13.18).

Contract: try_cancel takes the next cluster that has not started from the machine, as an asynchronous operation that
completes 16 bytes at the mbarrier; query_cancel reads the response.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._findings import UnsupportedError
from .._memory import OFFSET_MASK
from .._ptx import Instruction
from .._translate import Context, Run
from .bulk_groups import after, aligned, record
from .sync import barrier_at

__all__ = ["TABLE"]


def _launch_control(instr: Instruction, ctx: Context) -> Run:
    """clusterlaunchcontrol: the response is {x, y, z, 1} of the cancelled cluster's first CTA, or {0, 0, 0, 0}."""
    words = instr.modifiers
    if words[0] == "try_cancel":
        return _try_cancel(instr, ctx)
    if words[0] != "query_cancel":
        raise UnsupportedError(instr.op, instr.line)
    response = ctx.slot(instr.operands[1], np.uint64, instr)
    if words[1] == "is_canceled":
        write = ctx.writer(instr.operands[0], instr)
        return lambda w: write(w, (w.regs[response][:, 1] >> np.uint64(32)) != 0)
    targets = ctx.vector(instr.operands[0])
    writers = [ctx.writer(o, instr) for o in targets]
    axis_name = words[1].partition("::")[2]
    axes = ["xyz".index(axis_name)] if axis_name else list(range(len(writers)))

    def query(w: Any) -> None:
        parts = np.ascontiguousarray(w.regs[response]).view(np.uint32)
        for write, axis in zip(writers, axes, strict=True):
            write(w, parts[:, axis].copy() if axis < 3 else np.zeros(32, np.uint32))

    return query


def _try_cancel(instr: Instruction, ctx: Context) -> Run:
    to, mbar = ctx.uniform_address(instr.operands[0], instr), ctx.uniform_address(instr.operands[1], instr)
    everyone = any(m.startswith("multicast") for m in instr.modifiers)

    def run(w: Any) -> None:
        cluster, machine = w.cta.cluster, w.machine
        offset, signal = to(w) & 0xFFFFFFFF, mbar(w) & 0xFFFFFFFF
        aligned(w, offset & OFFSET_MASK, 16, instr, "cluster launch control response")
        targets = []
        for cta in cluster.ctas if everyone else [w.cta]:
            barrier = barrier_at(w, cta.base | signal & OFFSET_MASK, instr, False)
            access = record(w, instr, w.cta.rank)
            start = offset & OFFSET_MASK
            cta.shared.order.fenced(access, slice(start >> 2, (start >> 2) + 4), 4)
            if barrier is not None and cta.shared.check_range(offset & OFFSET_MASK, 16, access, True):
                targets.append((cta, barrier, barrier.phase, after(w, access)))

        def complete() -> None:
            origin = machine.work.popleft() if machine.work else None
            words = np.array([*origin, 1] if origin else [0, 0, 0, 0], np.uint32).view(np.uint8)
            for cta, barrier, phase, clocks in targets:
                start = offset & OFFSET_MASK
                cta.shared.data[start : start + 16] = words
                barrier.complete(16, phase, clocks, instr, (w.name,))

        cluster.queue.post(complete, f"cluster launch control of {w.name}", instr)

    return run


TABLE = {"clusterlaunchcontrol": _launch_control}

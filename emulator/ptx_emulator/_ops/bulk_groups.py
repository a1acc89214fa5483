"""Bulk groups of a warp, and the records of asynchronous accesses (PTX ISA 9.7.9.25.3, 9.7.9.25.5).

Contract: a bulk group is complete when its writes are done; `.read` asks for its source reads only. A group whose reads
nobody waited for when the warp exits is an `exit_pending` finding. Groups are kept per warp, not per thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._clocks import Access
from .._findings import UnsupportedError
from .._ptx import Imm, Instruction
from .._schedule import Wait
from .._translate import Context, Run
from .._warp import BLOCK

__all__ = ["Group", "after", "aligned", "commit_group", "groups_of", "record", "wait_group"]


class Group:
    """A bulk group of a warp."""

    __slots__ = ("at", "clocks", "read_clocks", "reads", "waited", "writes")

    def __init__(self, known: Any) -> None:
        self.reads = self.writes = 0
        self.read_clocks, self.clocks = np.zeros_like(known), np.zeros_like(known)
        self.waited = False
        self.at: Any = None


def groups_of(w: Any) -> list[Group]:
    groups = w.local.get("bulk")
    if groups is None:
        groups = w.local["bulk"] = [Group(w.known)]
        w.local.setdefault("exit", {})["bulk"] = lambda: _exit_check(w)
    return groups  # type: ignore[no-any-return]


def _exit_check(w: Any) -> None:
    for group in w.local["bulk"]:
        if group.at is not None and not group.waited:
            w.machine.findings.add("exit_pending", f"{w.name} exits without waiting for the bulk stores that read its "
                                   "shared memory", group.at, (w.name,))  # fmt: skip


def commit_group(w: Any) -> None:
    groups_of(w).append(Group(w.known))


def wait_group(instr: Instruction, ctx: Context) -> Run:
    operand = instr.operands[0]
    if not isinstance(operand, Imm):
        raise UnsupportedError(instr.op, instr.line)
    keep, reads_only = operand.value, "read" in instr.modifiers

    def wait(w: Any) -> Any:
        groups = groups_of(w)
        done = groups[: max(len(groups) - 1 - keep, 0)]

        def ready() -> bool:
            return all(g.reads == 0 and (reads_only or g.writes == 0) for g in done)

        if not ready():
            w.wait = Wait(ready, lambda: f"{len(done)} bulk groups of {w.name}")
            return BLOCK
        for group in done:
            group.waited = True
            w.acquire(group.read_clocks if reads_only else group.clocks)
        if not reads_only:
            del groups[: len(done)]
        return None

    return wait


def record(w: Any, instr: Instruction, rank: int) -> Access:
    """A new async-proxy access with a clock of its own, ordered after everything the issuing warp knows."""
    agents = w.cta.cluster.agents
    slot = agents.slot(rank)
    return Access(slot, agents.tick(slot), w.known, False, instr)


def after(w: Any, *accesses: Access) -> Any:
    """What the completion of these accesses publishes; the warp's later events are not part of it."""
    clocks = w.release()
    for access in accesses:
        clocks[:, access.agent] = access.clock
    return clocks


def aligned(w: Any, offset: int, to: int, instr: Instruction, what: str) -> None:
    if offset % to:
        w.machine.findings.add(
            "misaligned", f"{what} at shared +{offset:#x} is not {to}-byte aligned", instr, (w.name,)
        )

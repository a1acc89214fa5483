"""Happens-before between agents: vector clocks, access events, and the order check of a memory region.

Contract: an agent is a warp, the matrix engine of a warp (tcgen05 or wgmma, in issue order) or a slot of an
asynchronous copy. `known[0, a]` of an agent is the clock of agent `a` up to which it is ordered after `a`
(PTX ISA 8 "Memory consistency model", causality order); `known[1, a]` the clock up to which the generic writes of
`a` are visible to the async proxy as well (8.6 "Proxy"), `known[2, a]` the clock up to which its mbarrier.init are
(fence.mbarrier_init or fence.proxy.async). Releases copy the array, acquires take the maximum. The last column is that of
the launches before: `known[0, BEFORE]` is 1 once the agent is ordered after a griddepcontrol.wait.
Atomics and `.relaxed` operations on global memory order as if they were release and acquire: an over-approximation
that can miss a race and never invents one. Lanes of one warp are one agent: races inside a warp are not looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ._findings import Findings

__all__ = ["BEFORE", "Access", "Agents", "Events", "Order"]

Ints: TypeAlias = "npt.NDArray[np.int32]"
BEFORE = -1  # column of the launches that a dependent one waits for


class Agents:
    """Names and clocks of the agents of one cluster. Agent 0 is the host and, with clock 1, another cluster."""

    SLOTS = 64

    def __init__(self, ctas: int, warps: int) -> None:
        self.stride = 2 * warps + self.SLOTS
        self.warps = warps
        self.size = 1 + ctas * self.stride + 1
        self.ticks: Any = np.zeros(self.size, np.int32)
        self._next = [0] * ctas

    def warp(self, rank: int, warp: int) -> int:
        return 1 + rank * self.stride + warp

    def engine(self, rank: int, warp: int) -> int:
        return 1 + rank * self.stride + self.warps + warp

    def slot(self, rank: int) -> int:
        """A slot for one asynchronous copy: taken in turn, so a slot is reused only after `SLOTS` later copies."""
        index = self._next[rank]
        self._next[rank] = (index + 1) % self.SLOTS
        return 1 + rank * self.stride + 2 * self.warps + index

    def tick(self, agent: int) -> int:
        self.ticks[agent] += 1
        return int(self.ticks[agent])

    def fresh(self) -> Ints:
        return np.zeros((3, self.size), np.int32)

    def name(self, agent: int) -> str:
        if agent == 0:
            return "another cluster"
        rank, index = divmod(agent - 1, self.stride)
        if index < self.warps:
            return f"cta {rank} warp {index}"
        if index < 2 * self.warps:
            return f"matrix engine of cta {rank} warp {index - self.warps}"
        return f"async copy of cta {rank}"


class Events:
    """Table of memory accesses: agent, clock, instruction, proxy. Event 0 is the host's initialisation.

    `swizzles` has the swizzle of writes by tensor copies, by event.
    """

    def __init__(self) -> None:
        self.agent: Any = np.zeros(1024, np.int32)
        self.clock: Any = np.zeros(1024, np.int32)
        self.generic: Any = np.zeros(1024, np.bool_)
        self.partial: Any = np.zeros(1024, np.bool_)
        self.at: list[Any] = [None]
        self.swizzles: dict[int, str] = {}  # of the writes that tensor copies made

    def new(self, agent: int, clock: int, generic: bool, partial: bool, at: Any) -> int:
        index = len(self.at)
        if index == len(self.agent):
            for name in ("agent", "clock", "generic", "partial"):
                table = getattr(self, name)
                setattr(self, name, np.concatenate((table, np.zeros_like(table))))
        self.at.append(at)
        self.agent[index], self.clock[index] = agent, clock
        self.generic[index], self.partial[index] = generic, partial
        return index

    def retire(self, start: int = 1) -> None:
        """The cluster ended: its accesses become those of "another cluster", ordered before nothing that follows."""
        count = len(self.at)
        self.agent[start:count] = 0
        self.clock[start:count] = 1

    def suspend(self) -> tuple[Ints, Ints]:
        """Another cluster runs for a while: to it, all accesses so far are another cluster's."""
        count = len(self.at)
        saved = self.agent[:count].copy(), self.clock[:count].copy()
        self.retire()
        return saved

    def resume(self, saved: tuple[Ints, Ints]) -> None:
        count = len(saved[0])
        self.agent[:count], self.clock[:count] = saved
        self.retire(count)


class Access(NamedTuple):
    """Who accesses: the agent recorded, its clock, what the issuer knows, the proxy and the instruction."""

    agent: int
    clock: int
    known: Ints
    generic: bool
    at: Any
    atomic: bool = False


class Order:
    """Last writer and last read per agent of each granule of one memory region, and the check of a new access."""

    def __init__(self, granules: int, events: Events, agents: Agents, findings: Findings, name: str, kind: str) -> None:
        self.events, self.agents, self.findings = events, agents, findings
        self.name, self.kind = name, kind
        self.writer: Any = np.zeros(granules, np.int32)
        self.written = False
        self.reads: dict[int, Ints] = {}
        self.latest: dict[int, int] = {}

    def renew(self, agents: Agents) -> None:
        """Next cluster: reads of the past one are kept as reads of another cluster's agent 0 by `Events.retire`."""
        self.agents = agents
        if self.reads:
            past = np.maximum.reduce(list(self.reads.values()))
            self.reads = {0: past}
            self.latest = {0: 1}

    def suspend(self) -> tuple[dict[int, Ints], dict[int, int]]:
        return dict(self.reads), dict(self.latest)

    def resume(self, agents: Agents, saved: tuple[dict[int, Ints], dict[int, int]]) -> None:
        """Back to a suspended cluster: its own reads, and the reads made meanwhile as another cluster's."""
        self.renew(agents)
        past = self.reads.get(0)
        self.reads, self.latest = saved
        if past is not None:
            self.reads[0] = np.maximum(self.reads[0], past) if 0 in self.reads else past
            self.latest[0] = 1

    def _report(self, what: str, event: int, access: Access, granule: int) -> None:
        other = self.events.at[event]
        names = (self.agents.name(access.agent), self.agents.name(int(self.events.agent[event])))
        place = f" at PTX line {other.line}" if other is not None else ""
        self.findings.add("proxy_fence" if what.startswith("proxy") else self.kind, {
            "raw": f"read of {self.name} +{granule:#x} is not ordered after the write by {names[1]}{place}",
            "waw": f"write of {self.name} +{granule:#x} is not ordered after the write by {names[1]}{place}",
            "war": f"write of {self.name} +{granule:#x} is not ordered after the read by {names[1]}{place}",
            "proxy": f"async-proxy read of {self.name} +{granule:#x}: the write by {names[1]}{place} has no "
                     "fence.proxy.async after it",
            "proxy_write": f"async-proxy write of {self.name} +{granule:#x}: the read by {names[1]}{place} has no "
                           "fence.proxy.async after it",
        }[what], access.at, names, key=(what, other.line if other is not None else 0))  # fmt: skip

    def _first(self, bad: npt.NDArray[np.bool_], ids: Ints, granules: Any) -> tuple[int, int]:
        where = int(np.argmax(bad))
        if isinstance(granules, slice):
            return int(ids[where]), int(granules.start) + where
        return int(ids.reshape(-1)[where]), int(np.asarray(granules).reshape(-1)[where])

    def read(self, access: Access, granules: Any, scale: int, partial: bool = False) -> None:
        """Check and record a read of `granules` (an index array or a slice)."""
        events = self.events
        if self.written:
            ids = self.writer[granules]
            agent, clock = events.agent[ids], events.clock[ids]
            bad = access.known[0][agent] < clock
            if access.agent > 0:
                bad &= agent != access.agent
            if bad.any():
                event, where = self._first(bad.reshape(-1), ids, granules)
                self._report("raw", event, access, where * scale)
            elif not access.generic:
                bad = (access.known[1][agent] < clock) & events.generic[ids]
                if bad.any():
                    event, where = self._first(bad.reshape(-1), ids, granules)
                    self._report("proxy", event, access, where * scale)
        table = self.reads.get(access.agent)
        if table is None:
            table = self.reads[access.agent] = np.zeros(len(self.writer), np.int32)
        table[granules] = events.new(access.agent, access.clock, access.generic, partial, access.at)
        self.latest[access.agent] = access.clock

    def fenced(self, access: Access, granules: Any, scale: int) -> None:
        """Earlier generic reads need a fence.proxy.async before this async-proxy write (asked for launch control only:
        known-good kernels refill TMA buffers that were read generically without one)."""
        events = self.events
        for table in self.reads.values():
            ids = table[granules]
            agent, clock = events.agent[ids], events.clock[ids]
            bad = (access.known[1][agent] < clock) & (access.known[0][agent] >= clock) & events.generic[ids]
            if bad.any():
                event, where = self._first(bad.reshape(-1), ids, granules)
                self._report("proxy_write", event, access, where * scale)

    def write(self, access: Access, granules: Any, scale: int, partial: bool = False,
              same: Callable[[], npt.NDArray[np.bool_]] | None = None) -> None:  # fmt: skip
        """Check and record a write. Two writes of parts of one granule are not compared.

        `same`: which granules hold the written value already. Known-good kernels let several warps of a CTA store one
        result: that is a race with the earlier store only in a strict run.
        """
        events, known = self.events, access.known[0]
        if self.written:
            ids = self.writer[granules]
            agent = events.agent[ids]
            bad = (known[agent] < events.clock[ids]) & (agent != access.agent)
            if partial:
                bad &= ~events.partial[ids]
            if access.atomic:
                bad &= False
            if same is not None and not self.findings.strict and bad.any():
                mine = (agent > 0) & ((agent - 1) // self.agents.stride == (access.agent - 1) // self.agents.stride)
                bad &= ~(same() & mine & events.generic[ids])
            if bad.any():
                event, where = self._first(bad.reshape(-1), ids, granules)
                self._report("waw", event, access, where * scale)
        for agent, latest in self.latest.items():
            if known[agent] >= latest or agent == access.agent or access.atomic:
                continue
            ids = self.reads[agent][granules]
            bad = known[agent] < events.clock[ids]
            if partial:
                bad &= ~events.partial[ids]
            if bad.any():
                event, where = self._first(bad.reshape(-1), ids, granules)
                self._report("war", event, access, where * scale)
        self.writer[granules] = events.new(access.agent, access.clock, access.generic, partial, access.at)
        self.written = True

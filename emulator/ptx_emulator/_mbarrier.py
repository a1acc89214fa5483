"""mbarrier objects: phases, pending arrivals, transaction bytes, and their misuse (PTX ISA 9.7.13.15).

Contract: a phase completes when no arrival is pending and the transaction count is zero. Arrivals carry the clocks of
the arriving agent, a successful wait joins the clocks of the completed phase. Bytes are accounted by phase: an
asynchronous operation completes its bytes in the phase that was current when it was issued, anything else is a
`transaction_bytes` finding, and so is a count that is not zero when the CTA exits. Objects live beside shared memory,
keyed by their offset.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._clocks import Access

__all__ = ["Mbarrier", "Mbarriers"]

MAX_COUNT = (1 << 20) - 1


class Mbarrier:
    """One object. `phase` counts completed phases; `expected` and `completed` are the bytes of the current one."""

    __slots__ = ("acc", "clock", "completed", "count", "done", "expected", "init", "offset", "owner", "pending",
                 "phase", "tx")  # fmt: skip

    def __init__(self, owner: Mbarriers, offset: int, count: int, init: Access) -> None:
        self.owner, self.offset, self.count, self.init = owner, offset, count, init
        self.clock = init.clock
        self.pending, self.tx, self.phase = count, 0, 0
        self.expected = self.completed = 0
        self.acc = np.zeros_like(init.known)
        self.done = np.zeros_like(init.known)

    def describe(self) -> str:
        return (f"mbarrier {self.owner.name} +{self.offset:#x} (phase {self.phase}: {self.pending} of {self.count} "
                f"arrivals missing, {self.completed} of {self.expected} bytes arrived)")  # fmt: skip

    def _settle(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.expected = self.completed = 0
            self.done, self.acc = self.acc, np.zeros_like(self.acc)
        self.owner.cta.cluster.effects += 1

    def expect(self, amount: int, at: Any, agents: tuple[str, ...]) -> None:
        self.tx += amount
        self.expected += amount
        if abs(self.tx) > MAX_COUNT:
            self.owner.add("transaction_bytes", f"{self.describe()}: transaction count out of range", at, agents)

    def arrive(self, clocks: Any, at: Any, agents: tuple[str, ...], count: int = 1, drop: bool = False) -> int:
        """Arrive `count` times; returns the phase arrived at."""
        phase = self.phase
        if drop:
            self.count -= count
        if self.pending < count:
            self.owner.add("mbarrier", f"more arrivals than expected at {self.describe()}", at, agents)
            self.pending = 0
        else:
            self.pending -= count
        if clocks is not None:
            np.maximum(self.acc, clocks, out=self.acc)
        self._settle()
        return phase

    def complete(self, amount: int, phase: int, clocks: Any, at: Any, agents: tuple[str, ...]) -> None:
        """complete_tx of an operation that was issued in `phase`."""
        if phase != self.phase:
            self.owner.add("transaction_bytes", f"{amount} bytes issued in phase {phase} of {self.describe()} arrive "
                           f"in phase {self.phase}: that phase expected fewer bytes than were copied", at, agents)  # fmt: skip
        self.tx -= amount
        self.completed += amount
        if clocks is not None:
            np.maximum(self.acc, clocks, out=self.acc)
        self._settle()


class Mbarriers:
    """The objects of one CTA."""

    def __init__(self, cta: Any) -> None:
        self.cta = cta
        self.name = f"cta {cta.rank} shared"
        self.table: dict[int, Mbarrier] = {}

    def add(self, kind: str, message: str, at: Any, agents: tuple[str, ...]) -> None:
        self.cta.machine.findings.add(kind, message, at, agents, key=message[:24])

    def init(self, offset: int, count: int, access: Access, who: str) -> None:
        if offset in self.table:
            self.add("mbarrier", f"init of a live {self.table[offset].describe()}", access.at, (who,))
        if not 0 < count <= MAX_COUNT:
            self.add(
                "mbarrier", f"arrival count {count} of mbarrier +{offset:#x} is not in 1..2^20-1", access.at, (who,)
            )
        if offset % 8:
            self.add("misaligned", f"mbarrier at +{offset:#x} is not 8-byte aligned", access.at, (who,))
        region = self.cta.shared
        if region.check_range(offset & ~7, 8, access, True):
            region.data[offset : offset + 8] = 0
        self.table[offset] = Mbarrier(self, offset, count, access)
        self.cta.cluster.effects += 1

    def invalidate(self, offset: int, access: Access, who: str) -> None:
        if self.find(offset, access, who) is not None:
            del self.table[offset]

    def find(self, offset: int, access: Access, who: str) -> Mbarrier | None:
        """The object at `offset`, or a finding. Its initialisation must be ordered before the use, and fenced before
        the async proxy signals it."""
        barrier = self.table.get(offset)
        if barrier is None:
            self.add("mbarrier", f"{self.name} +{offset:#x} holds no initialised mbarrier", access.at, (who,))
            return None
        init = barrier.init
        if access.known[0, init.agent] < init.clock:
            agents = self.cta.cluster.agents
            self.cta.machine.findings.add(
                "race", f"use of {barrier.describe()} is not ordered after its initialisation at PTX line "
                f"{init.at.line}", access.at, (who, agents.name(init.agent)), key=offset)  # fmt: skip
        elif not access.generic and access.known[2, init.agent] < init.clock:
            self.add("proxy_fence", f"asynchronous signal to {self.name} +{offset:#x}, whose initialisation at PTX line "
                     f"{init.at.line} has no fence.mbarrier_init or fence.proxy.async after it", access.at, (who,))  # fmt: skip
        return barrier

    def check_exit(self) -> None:
        """Transaction counts must be settled when the cluster ends."""
        for barrier in self.table.values():
            if barrier.tx:
                self.add("transaction_bytes", f"exit with unsettled bytes: {barrier.describe()}", barrier.init.at, ())

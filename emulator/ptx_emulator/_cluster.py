"""One cluster of CTAs, resident together: agents, asynchronous queue, cluster barrier (PTX ISA 2.2.3).

Contract: shared::cluster addresses are resolved here. `effects` counts everything that another warp could see; the
scheduler uses it to tell progress from spinning.
"""

from __future__ import annotations

from typing import Any

from ._clocks import Agents
from ._cta import Cta
from ._memory import OFFSET_MASK
from ._named_barriers import ClusterBarrier
from ._schedule import AsyncQueue

__all__ = ["Cluster"]


class Cluster:
    def __init__(self, machine: Any, origin: tuple[int, int, int], agents: Agents, queue: AsyncQueue) -> None:
        self.machine, self.origin, self.agents, self.queue = machine, origin, agents, queue
        self.effects = 0
        self.barrier = ClusterBarrier(self)
        x, y, z = machine.cluster
        self.threads = x * y * z * machine.threads
        self.ctas: list[Cta] = []
        for rank in range(x * y * z):
            place = (rank % x, rank // x % y, rank // (x * y))
            self.ctas.append(Cta(self, rank, tuple(o + p for o, p in zip(origin, place, strict=True))))

    def resolve(self, address: int, at: Any, who: str) -> tuple[Cta, int] | None:
        """CTA and offset of a shared::cluster address."""
        rank = address >> 24
        if not 0 <= rank < len(self.ctas):
            self.machine.findings.add("out_of_bounds", f"shared::cluster address {address:#x} names CTA {rank} of "
                                      f"{len(self.ctas)}", at, (who,))  # fmt: skip
            return None
        cta = self.ctas[rank]
        if cta.live == 0:
            self.machine.findings.add("exit_pending", f"access to the shared memory of CTA {rank}, which has exited",
                                      at, (who,))  # fmt: skip
        return cta, address & OFFSET_MASK

    def check_barriers(self) -> None:
        for cta in self.ctas:
            cta.mbarriers.check_exit()

    def unstick(self) -> bool:
        """Nothing can run. When a warp spins on memory, the next cluster may be what it waits for: run that first."""
        spinning = any(w.active for cta in self.ctas for w in cta.warps if not w.done)
        return bool(spinning and self.machine.run_next())

    def finish(self) -> None:
        """All warps exited: outstanding operations complete now, then the exit rules are checked."""
        for pending in self.queue.pending():
            if not pending.may_outlive:
                self.machine.findings.add("exit_pending", f"the cluster exits before the {pending.name} completes",
                                          pending.at, ())  # fmt: skip
        while self.queue.complete_one():
            pass
        self.check_barriers()
        for cta in self.ctas:
            cta.tensor.check_exit()

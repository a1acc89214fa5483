"""One CTA: its warps, shared memory, tensor memory, barriers (PTX ISA 2.2 "Thread hierarchy").

Contract: shared memory starts with the 1 KiB that the system reserves, then static variables, then the dynamic
window. The CTA is built by its cluster and checked by it at exit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._clocks import BEFORE
from ._collectors import Collectors
from ._mbarrier import Mbarriers
from ._memory import Region
from ._named_barriers import NamedBarriers
from ._tensor_memory import TensorMemory
from ._warp import LANES, Warp

__all__ = ["RESERVED", "Cta"]

RESERVED = 1024


class Cta:
    def __init__(self, cluster: Any, rank: int, index: tuple[int, int, int]) -> None:
        machine = cluster.machine
        self.cluster, self.machine, self.rank, self.index = cluster, machine, rank, index
        self.base = rank << 24
        self.shared = Region(f"cta {rank} shared", np.zeros(machine.shared_bytes, np.uint8), machine.findings,
                             machine.events, cluster.agents, False)  # fmt: skip
        self.mbarriers = Mbarriers(self)
        self.barriers = NamedBarriers(self)
        self.tensor = TensorMemory(self)
        self.collectors = Collectors()
        self.live = 0
        self.warps: list[Warp] = []
        threads = machine.threads
        for i in range(-(-threads // 32)):
            lanes = min(32, threads - 32 * i)
            self.warps.append(Warp(self, i, machine.registers(self, i), lanes))
        self.live = len(self.warps)

    def thread_ids(self, warp: int) -> tuple[Any, Any, Any]:
        x, y, _ = self.machine.block
        t: Any = warp * 32 + LANES
        return t % x, t // x % y, t // (x * y)

    def warp_exited(self, warp: Warp) -> None:
        self.live -= 1
        self.cluster.effects += 1
        threads = min(32, self.machine.threads - 32 * warp.index)
        self.cluster.barrier.exit(threads)
        for check in warp.local.get("exit", {}).values():
            check()
        if self.live == 0:  # at the latest now the next launch may begin, for this CTA
            self.machine.overlap.trigger(any(w.known[0, BEFORE] for w in self.warps))

"""Named barriers of a CTA and the barrier of a cluster (PTX ISA 9.7.13.1 "bar", 9.7.13.3 "barrier.cluster").

Contract: a named barrier completes when its thread count has arrived; participants publish their clocks and those
that sync join them. A thread count that differs between participants, or is not a multiple of the warp size, is a
`divergence` finding, since the outcome is undefined.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["ClusterBarrier", "NamedBarriers"]


class Generation:
    """One use of a barrier, from the first arrival to its completion."""

    __slots__ = ("arrived", "clocks", "done", "expected", "names", "reduction")

    def __init__(self, expected: int, like: Any) -> None:
        self.expected, self.arrived, self.done = expected, 0, False
        self.clocks = np.zeros_like(like)
        self.names: list[str] = []
        self.reduction: list[Any] = []


class NamedBarriers:
    def __init__(self, cta: Any) -> None:
        self.cta = cta
        self.current: dict[int, Generation] = {}

    def arrive(self, warp: Any, number: int, threads: int, at: Any, weight: int = 32) -> Generation:
        """Count the warp in and return the generation that it belongs to."""
        findings = self.cta.machine.findings
        if not 0 <= number < 16:
            findings.add("divergence", f"barrier {number} does not exist (0..15)", at, (warp.name,))
        if threads % 32 or threads <= 0:
            findings.add(
                "divergence", f"thread count {threads} of barrier {number} is not a multiple of 32", at, (warp.name,)
            )
        generation = self.current.get(number)
        if generation is None:
            generation = self.current[number] = Generation(threads, warp.known)
        elif generation.expected != threads:
            findings.add("divergence", f"barrier {number}: {warp.name} counts {threads} threads, "
                         f"{', '.join(generation.names)} {generation.expected}", at, (warp.name, *generation.names))  # fmt: skip
        generation.arrived += weight
        generation.names.append(warp.name)
        np.maximum(generation.clocks, warp.release(), out=generation.clocks)
        if generation.arrived >= generation.expected:
            generation.done = True
            del self.current[number]
        self.cta.cluster.effects += 1
        return generation

    def describe(self, number: int, generation: Generation) -> str:
        return (f"barrier {number} ({generation.arrived} of {generation.expected} threads arrived: "
                f"{', '.join(generation.names)})")  # fmt: skip


class ClusterBarrier:
    """barrier.cluster: every thread of the cluster arrives once per generation. Exited threads count as arrived."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.generation = 0
        self.arrived: dict[int, int] = {}
        self.clocks: Any = None
        self.done: Any = None
        self.exited = 0

    def arrive(self, warp: Any, release: bool) -> int:
        generation = self.generation
        if self.clocks is None:
            self.clocks = np.zeros_like(warp.known)
        published = warp.release() if release else warp.fenced
        if published is not None:
            np.maximum(self.clocks, published, out=self.clocks)
        self.arrived[warp.agent] = self.arrived.get(warp.agent, 0) + warp.active
        self._settle()
        self.cluster.effects += 1
        return generation

    def _settle(self) -> None:
        if self.arrived and sum(self.arrived.values()) + self.exited >= self.cluster.threads:
            self.generation += 1
            self.arrived = {}
            self.done, self.clocks = self.clocks, None

    def exit(self, threads: int) -> None:
        self.exited += threads
        self._settle()

    def describe(self) -> str:
        missing = [w.name for cta in self.cluster.ctas for w in cta.warps if w.agent not in self.arrived and not w.done]
        return f"the cluster barrier; missing: {', '.join(missing)}"

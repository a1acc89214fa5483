"""One warp: lane registers, divergence, predication and the instruction loop.

Contract: registers are immutable-by-convention arrays of 32 lanes, replaced on every write. Lanes that take different
paths form fragments; the fragment with the lowest program counter runs, fragments that meet at one counter merge
(reconvergence). A fragment that cannot go on is parked with a `Wait`, and others of the warp run meanwhile
(independent thread scheduling, PTX ISA 3.3). A fragment that reaches an instruction for the whole warp waits there for
the others; only when none of them can come any more does it execute alone, which is a `divergence` finding. Code is a list of `Step`s made once by the translator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ._clocks import Access
from ._schedule import Wait

__all__ = ["BLOCK", "BRANCH", "EXIT", "LANES", "NORMAL", "Step", "Warp"]

NORMAL, BRANCH, EXIT = 0, 1, 2
BLOCK = "block"  # a closure returns this after setting `warp.wait`; the instruction runs again when it is ready
LANES = np.arange(32)
Mask: TypeAlias = "npt.NDArray[np.bool_]"
ALL: Mask = np.ones(32, np.bool_)


class Step(NamedTuple):
    """A translated instruction. `guard` is the predicate's register slot, or -1."""

    run: Callable[[Any], Any]
    guard: int
    negated: bool
    kind: int
    target: int
    whole: bool = False  # wants every live lane of the warp


class Warp:
    """State of one warp of a CTA."""

    def __init__(self, cta: Any, index: int, registers: list[Any], lanes: int) -> None:
        self.cta, self.index = cta, index
        self.machine = cta.machine
        self.code: list[Step] = cta.machine.code
        self.hits: list[int] = cta.machine.hits
        agents = cta.cluster.agents
        self.agent: int = agents.warp(cta.rank, index)
        self.engine: int = agents.engine(cta.rank, index)
        self.name: str = agents.name(self.agent)
        self.known = agents.fresh()
        self.known[0, self.agent] = 1
        self.regs = registers
        self.pc = 0
        self.mask: Mask = ALL if lanes == 32 else lanes > LANES
        self.active = lanes
        self.alone = True  # no other fragment: writes to the other lanes are harmless
        self.full = True
        self.parked: list[tuple[int, Mask]] = []
        self.waiting: list[tuple[int, Mask, Wait]] = []
        self.wait: Wait | None = None
        self.gather = Wait(self._gathered, lambda: "the other lanes of its warp")
        self.apart = False  # lanes wait for each other at different instructions
        self.failed: Any = None  # last try_wait that returned false: (instruction, barrier, phase)
        self.local: dict[Any, Any] = {}  # state that operations keep per warp (bulk groups, wgmma groups, barriers)
        self.fenced: npt.NDArray[np.int32] | None = None  # what the last release fence lets a relaxed arrive publish
        self.pending: dict[int, int] = {}  # registers that a wgmma in flight writes
        self.loading: set[int] = set()  # registers that a tcgen05.ld writes, until tcgen05.wait::ld
        self.unfenced: set[int] | None = None  # registers of wgmma used since its last fence; None: it had none
        self.done = False

    # state for the scheduler

    def runnable(self) -> bool:
        if self.active:
            return True
        if self.parked:
            return True
        return any(w.ready() for _, _, w in self.waiting)

    def stuck(self) -> list[tuple[int, str]]:
        out = [(pc, w.describe()) for pc, _, w in self.waiting]
        if self.active:
            out.append((self.pc, "nothing: it loops without any effect"))
        return out

    # access descriptors

    def access(self, instr: Any, atomic: bool = False) -> Access:
        """A generic-proxy access by this warp now."""
        return Access(self.agent, int(self.known[0, self.agent]), self.known, True, instr, atomic)

    def release(self) -> npt.NDArray[np.int32]:
        """What a release operation publishes; later events of this warp are not covered by it."""
        out = self.known.copy()
        self.known[0, self.agent] += 1
        return out

    def acquire(self, clocks: npt.NDArray[np.int32]) -> None:
        np.maximum(self.known, clocks, out=self.known)

    def fence_proxy(self) -> None:
        """fence.proxy.async: everything this warp knows of becomes visible to the async proxy."""
        np.maximum(self.known[1], self.known[0], out=self.known[1])
        self.fence_init()

    def fence_init(self) -> None:
        """fence.mbarrier_init: the same for mbarrier objects only."""
        np.maximum(self.known[2], self.known[0], out=self.known[2])
        self.known[0, self.agent] += 1

    @property
    def lead(self) -> int:
        return int(self.mask.argmax())

    def put(self, slot: int, value: Any) -> None:
        self.regs[slot] = value if self.full else np.where(self.mask, value, self.regs[slot])

    # fragments

    def _gathered(self) -> bool:
        """All fragments that are left wait for the rest of the warp."""
        return not self.active and not self.parked and all(w is self.gather for _, _, w in self.waiting)

    def _load(self, pc: int, mask: Mask) -> None:
        self.pc, self.mask, self.active = pc, mask, int(np.count_nonzero(mask))
        self.alone = not self.parked and not self.waiting
        self.full = self.alone

    def _resume(self) -> bool:
        """Make the fragment with the lowest counter the current one; False when none can run."""
        if self.waiting:
            gathered = self._gathered()
            if gathered:
                self.apart = len({pc for pc, _, _ in self.waiting}) > 1
            still = []
            for pc, mask, wait in self.waiting:
                if wait.ready() if wait is not self.gather else gathered:
                    self.parked.append((pc, mask))
                    self.cta.cluster.effects += 1
                else:
                    still.append((pc, mask, wait))
            self.waiting = still
        if self.active:
            self.parked.append((self.pc, self.mask))
            self.active = 0
        if not self.parked:
            return False
        low = min(pc for pc, _ in self.parked)
        mask = np.zeros(32, np.bool_)
        rest = []
        for pc, lanes in self.parked:
            if pc == low:
                mask = mask | lanes
            else:
                rest.append((pc, lanes))
        self.parked = rest
        self._load(low, mask)
        return True

    def run(self, budget: int) -> None:
        """Run until nothing of the warp can go on, it exits, or `budget` instructions were executed."""
        code, regs, hits = self.code, self.regs, self.hits
        if not self._resume():
            return
        barrier = min((pc for pc, _ in self.parked), default=1 << 60)
        count_nonzero = np.count_nonzero
        while budget > 0:
            budget -= 1
            pc = self.pc
            if pc >= barrier:
                self._resume()
                barrier = min((p for p, _ in self.parked), default=1 << 60)
                continue
            run, guard, negated, kind, target, whole = code[pc]
            if whole and not self.alone:
                if not self.apart:
                    self.waiting.append((pc, self.mask, self.gather))
                    self.active = 0
                    if not self._resume():
                        return
                    barrier = min((p for p, _ in self.parked), default=1 << 60)
                    continue
                self.apart = False
            hits[pc] += 1
            if guard >= 0:
                mask = ~regs[guard] if negated else regs[guard]
                if self.active != 32:
                    mask = mask & self.mask
                taken = count_nonzero(mask)
                if taken == 0:
                    self.pc = pc + 1
                    continue
                if taken != self.active:
                    if kind == NORMAL:
                        saved, full, active = self.mask, self.full, self.active
                        self.mask, self.full, self.active = mask, False, int(taken)
                        signal = run(self)
                        self.mask, self.full, self.active = saved, full, active
                        if signal is None:
                            self.pc = pc + 1
                            continue
                        hits[pc] -= 1
                        # the guarded lanes wait, the others go on behind the instruction
                        assert self.wait is not None
                        self.waiting.append((pc, mask, self.wait))
                        self._load(pc + 1, self.mask & ~mask)
                        continue
                    rest = self.mask & ~mask
                    if kind == EXIT:
                        self.alone = self.alone and not self.parked and not self.waiting
                        self.mask, self.active = rest, int(count_nonzero(rest))
                        self.pc = pc + 1
                        continue
                    if target > pc:
                        self.parked.append((target, mask))
                        self._load(pc + 1, rest)
                    else:
                        self.parked.append((pc + 1, rest))
                        self._load(target, mask)
                    barrier = min(p for p, _ in self.parked)
                    continue
            if kind == NORMAL:
                if run(self) is None:
                    self.pc = pc + 1
                    continue
                assert self.wait is not None
                hits[pc] -= 1
                self.waiting.append((pc, self.mask, self.wait))
                self.active = 0
            elif kind == BRANCH:
                self.pc = target
                continue
            else:
                self.active = 0
                self.cta.cluster.effects += 1
            if not self._resume():
                if not self.waiting:
                    self.done = True
                    self.cta.warp_exited(self)
                return
            barrier = min((p for p, _ in self.parked), default=1 << 60)

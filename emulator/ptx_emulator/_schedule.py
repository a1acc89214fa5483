"""Which warp runs next and when asynchronous operations complete: a seeded, replayable schedule.

Contract: "late" (the default) completes an asynchronous operation only when no warp can run, so a missing wait reads
stale data; "eager" completes at issue; "random" also completes at random moments. Operations posted with the same
`lane` complete in order (the tcgen05 pipe of a warp), those without one in any order. Seed 0 takes warps and
completions in order, other seeds shuffle both; the same seed and mode replay the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from ._findings import EmulationError

__all__ = ["SCHEDULES", "AsyncQueue", "Wait", "run_cluster"]

SCHEDULES = ("late", "eager", "random")
TURN = 5000  # instructions of one warp before the next one gets a turn
IDLE_ROUNDS = 40  # rounds of full turns without any visible effect that count as a livelock


class Wait(NamedTuple):
    """Why a set of lanes cannot go on: `ready` is asked before every turn, `describe` names what is missing."""

    ready: Callable[[], bool]
    describe: Callable[[], str]


class Pending(NamedTuple):
    """`may_outlive`: nobody has to wait for it before the CTA exits."""

    complete: Callable[[], None]
    name: str
    serial: int
    at: Any
    may_outlive: bool


class AsyncQueue:
    """Asynchronous operations that were issued and have not completed."""

    def __init__(self, seed: int, mode: str) -> None:
        if mode not in SCHEDULES:
            raise EmulationError(f"schedule must be one of {', '.join(SCHEDULES)}, not {mode!r}")
        self.mode, self.seed = mode, seed
        self.rng = np.random.default_rng(seed)
        self.lanes: dict[Hashable, deque[Pending]] = {}
        self.serial = 0
        self.completed = 0

    def post(
        self, complete: Callable[[], None], name: str, at: Any, lane: Hashable = None, may_outlive: bool = False
    ) -> None:
        if self.mode == "eager":
            complete()
            return
        self.serial += 1
        self.lanes.setdefault(self.serial if lane is None else lane, deque()).append(
            Pending(complete, name, self.serial, at, may_outlive))  # fmt: skip

    def __len__(self) -> int:
        return sum(map(len, self.lanes.values()))

    def pending(self) -> list[Pending]:
        return [p for q in self.lanes.values() for p in q]

    def complete_one(self) -> bool:
        """Complete one operation: the oldest with seed 0, any head of a lane otherwise."""
        if not self.lanes:
            return False
        keys = list(self.lanes)
        if self.seed == 0:
            key = min(keys, key=lambda k: self.lanes[k][0].serial)
        else:
            key = keys[int(self.rng.integers(len(keys)))]
        queue = self.lanes[key]
        pending = queue.popleft()
        if not queue:
            del self.lanes[key]
        self.completed += 1
        try:
            pending.complete()
        except EmulationError:
            raise
        except Exception as error:
            raise _failed(error, f"the completion of {pending.name}", pending.at) from error
        return True


def _failed(error: Exception, what: str, instr: Any) -> EmulationError:
    """An exception of this package inside an instruction, with the instruction's line."""
    where = f" at PTX line {instr.line} ({instr.op})" if instr is not None else ""
    return EmulationError(f"{what} failed in the emulator{where}: {type(error).__name__}: {error}")


def _turn(warp: Any) -> None:
    try:
        warp.run(TURN)
    except EmulationError:
        raise
    except Exception as error:
        instructions = warp.machine.entry.instructions
        instr = instructions[warp.pc] if warp.pc < len(instructions) else None
        raise _failed(error, f"an instruction of {warp.name}", instr) from error


def run_cluster(cluster: Any) -> None:
    """Run every warp of the cluster to its exit, or report a deadlock and leave the rest of the cluster undone."""
    queue: AsyncQueue = cluster.queue
    live = [w for cta in cluster.ctas for w in cta.warps]
    idle = 0
    while live:
        if queue.seed:
            queue.rng.shuffle(live)
        before, ran = cluster.effects + queue.completed, False
        for warp in live:
            if warp.runnable():
                _turn(warp)
                ran = True
            if queue.mode == "random" and queue.rng.random() < 0.3:
                queue.complete_one()
        live = [w for w in live if not w.done]
        if cluster.effects + queue.completed != before:
            idle = 0
            continue
        if (live and not ran) or idle > 2:
            if queue.complete_one():
                idle = 0
                continue
            if not ran or idle > IDLE_ROUNDS:
                if cluster.unstick():
                    continue
                _deadlock(cluster, live)
                return
        idle += 1
    cluster.finish()


def _deadlock(cluster: Any, live: list[Any]) -> None:
    lines = []
    for warp in sorted(live, key=lambda w: w.agent):
        for pc, why in warp.stuck():
            instr = cluster.machine.entry.instructions[pc] if pc < len(cluster.machine.entry.instructions) else None
            where = f"PTX line {instr.line}" if instr is not None else "end"
            lines.append(f"{warp.name} at {where} waits for {why}")
    at = None
    for warp in live:
        for pc, _ in warp.stuck():
            at = cluster.machine.entry.instructions[pc]
            break
        if at is not None:
            break
    cluster.machine.findings.add("deadlock", "; ".join(lines), at, tuple(w.name for w in live))
    cluster.check_barriers()
    cluster.machine.aborted = True

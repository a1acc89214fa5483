"""Barriers, mbarrier, fences, and instructions that only hint (PTX ISA 9.7.13, 9.7.14, 9.7.19.5).

Contract: `bar`/`barrier` count warps when aligned and threads otherwise; `mbarrier` works on the objects of
`_mbarrier`; a `try_wait` that fails twice in a row at one place parks the warp until the phase completes, which the
ISA allows (it is potentially blocking). `fence.proxy.async` publishes what the executing warp knows to the async
proxy; `membar`/`fence` of memory scopes order nothing by themselves here (see `_clocks`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._clocks import BEFORE
from .._findings import UnsupportedError
from .._ptx import Instruction, Reg, Sink
from .._schedule import Wait
from .._translate import Context, Run
from .._warp import BLOCK

__all__ = ["TABLE", "barrier_at"]

LOW32 = (1 << 32) - 1


def barrier_at(w: Any, address: int, instr: Instruction, generic: bool = True) -> Any:
    """The mbarrier at a shared::cluster (or generic shared) address, or None after a finding.

    `generic` is False when an asynchronous operation will signal it."""
    place = w.cta.cluster.resolve(address & LOW32, instr, w.name)
    if place is None:
        return None
    return place[0].mbarriers.find(place[1], w.access(instr)._replace(generic=generic), w.name)


def _bar(instr: Instruction, ctx: Context) -> Run:
    words = [m for m in instr.modifiers if m != "cta"]
    if words[0] == "warp":
        return lambda w: None
    if words[0] == "cluster":
        return _cluster_barrier(instr, ctx, words)
    action = words[0]
    aligned = instr.opcode == "bar" or "aligned" in words
    operands = list(instr.operands)
    writer: Any = None
    predicate: Any = None
    if action == "red":
        writer, predicate = ctx.writer(operands.pop(0), instr), ctx.predicate(operands.pop(), instr)
    elif action not in ("sync", "arrive"):
        raise UnsupportedError(instr.op, instr.line)
    number = ctx.uniform(operands[0], np.uint32, instr)
    threads = ctx.uniform(operands[1], np.uint32, instr) if len(operands) > 1 else None
    machine, check = ctx.machine, ctx.require_warp(instr)
    mode = next((m for m in words if m in ("popc", "and", "or")), "")

    def run(w: Any) -> Any:
        key = ("bar", instr.line)
        state = w.local.get(key)
        if state is None:
            if aligned:
                check(w)
            which = number(w)
            count = threads(w) if threads is not None else -(-machine.threads // 32) * 32
            state = w.cta.barriers.arrive(w, which, count, instr, 32 if aligned else w.active)
            if predicate is not None:
                state.reduction.append(predicate(w)[w.mask])
            if action == "arrive":
                return None
            if not state.done:
                w.local[key] = state
                barriers, current = w.cta.barriers, state
                w.wait = Wait(lambda: current.done, lambda: barriers.describe(which, current))
                return BLOCK
        w.local.pop(key, None)
        w.acquire(state.clocks)
        if writer is not None:
            votes = np.concatenate(state.reduction)
            value: Any = {"popc": votes.sum, "and": votes.all, "or": votes.any}[mode]()
            writer(w, np.full(32, value, np.uint32 if mode == "popc" else np.bool_))
        return None

    return run


def _cluster_barrier(instr: Instruction, ctx: Context, words: list[str]) -> Run:
    if words[1] == "arrive":
        release = "relaxed" not in words

        def arrive(w: Any) -> None:
            generations = w.local.setdefault("cluster", np.full(32, -1))
            generations[w.mask] = w.cta.cluster.barrier.arrive(w, release)

        return arrive
    if words[1] != "wait":
        raise UnsupportedError(instr.op, instr.line)

    def wait(w: Any) -> Any:
        barrier = w.cta.cluster.barrier
        generations = w.local.setdefault("cluster", np.full(32, -1))
        generation = int(generations[w.lead])
        if generation < 0:
            w.machine.findings.add("divergence", "barrier.cluster.wait without an arrive", instr, (w.name,))
            return None
        if barrier.generation == generation:
            w.wait = Wait(lambda: barrier.generation != generation, barrier.describe)
            return BLOCK
        generations[w.mask] = -1
        if barrier.done is not None:
            w.acquire(barrier.done)
        return None

    return wait


def _mbarrier(instr: Instruction, ctx: Context) -> Run:
    action = instr.modifiers[0]
    table = {"init": _init, "inval": _inval, "arrive": _arrive, "arrive_drop": _arrive, "test_wait": _test,
             "try_wait": _test, "expect_tx": _expect, "complete_tx": _expect, "pending_count": _pending}  # fmt: skip
    if action not in table:
        raise UnsupportedError(instr.op, instr.line)
    return table[action](instr, ctx)


def _init(instr: Instruction, ctx: Context) -> Run:
    address, count = ctx.address(instr.operands[0], instr), ctx.slot(instr.operands[1], np.uint32, instr)

    def run(w: Any) -> None:
        lanes = np.flatnonzero(w.mask)
        where = address(w)[lanes] & LOW32
        for number, offset in enumerate(where.tolist()):
            place = w.cta.cluster.resolve(offset, instr, w.name)
            if place is not None:
                place[0].mbarriers.init(place[1], int(w.regs[count][lanes[number]]), w.access(instr), w.name)

    return run


def _inval(instr: Instruction, ctx: Context) -> Run:
    address = ctx.uniform_address(instr.operands[0], instr)

    def run(w: Any) -> None:
        place = w.cta.cluster.resolve(address(w) & LOW32, instr, w.name)
        if place is not None:
            place[0].mbarriers.invalidate(place[1], w.access(instr), w.name)

    return run


def _arrive(instr: Instruction, ctx: Context) -> Run:
    """arrive{_drop}{.expect_tx}{.noComplete}: one arrival per active lane, or the count given."""
    words = instr.modifiers
    operands = list(instr.operands)
    write = None
    if isinstance(operands[0], (Reg, Sink)):
        write = ctx.writer(operands.pop(0), instr)
    address = ctx.address(operands[0], instr)
    amount = ctx.slot(operands[1], np.uint32, instr) if len(operands) > 1 else ctx.constant(1, np.uint32)
    expects, drop, release = "expect_tx" in words, instr.modifiers[0] == "arrive_drop", "relaxed" not in words

    def run(w: Any) -> None:
        lanes = np.flatnonzero(w.mask)
        where = address(w)
        clocks = w.release() if release else w.fenced
        states: Any = np.zeros(32, np.uint64)  # the phase, and the arrivals pending before this one in the upper half
        if len(lanes) > 1 and not expects and (where[lanes] == where[lanes[0]]).all():
            barrier = barrier_at(w, int(where[lanes[0]]), instr)
            if barrier is not None:
                counts = w.regs[amount][lanes].astype(np.int64)
                before = np.maximum(barrier.pending - np.cumsum(counts) + counts, 0)
                phase = barrier.arrive(clocks, instr, (w.name,), int(counts.sum()), drop)
                states[lanes] = phase | before.astype(np.uint64) << np.uint64(32)
        else:
            for lane in lanes.tolist():
                barrier = barrier_at(w, int(where[lane]), instr)
                if barrier is None:
                    continue
                value = int(w.regs[amount][lane])
                if expects:
                    barrier.expect(value, instr, (w.name,))
                    value = 1
                pending = barrier.pending
                states[lane] = barrier.arrive(clocks, instr, (w.name,), value, drop) | pending << 32
        if write is not None:
            write(w, states)

    return run


def _expect(instr: Instruction, ctx: Context) -> Run:
    address, amount = ctx.address(instr.operands[0], instr), ctx.slot(instr.operands[1], np.uint32, instr)
    completes = instr.modifiers[0] == "complete_tx"

    def run(w: Any) -> None:
        for lane in np.flatnonzero(w.mask).tolist():
            barrier = barrier_at(w, int(address(w)[lane]), instr)
            if barrier is None:
                continue
            value = int(w.regs[amount][lane])
            if completes:
                barrier.complete(value, barrier.phase, None, instr, (w.name,))
            else:
                barrier.expect(value, instr, (w.name,))

    return run


def _test(instr: Instruction, ctx: Context) -> Run:
    """test_wait and try_wait: by parity, or by the phase token that arrive returned."""
    parity, acquire = "parity" in instr.modifiers, "relaxed" not in instr.modifiers
    write = ctx.writer(instr.operands[0], instr)
    address = ctx.address(instr.operands[1], instr)
    phase = ctx.slot(instr.operands[2], np.uint32 if parity else np.uint64, instr)

    def run(w: Any) -> Any:
        lane = w.lead
        where = address(w)
        wanted = w.regs[phase]
        if w.active > 1:
            lanes = w.mask
            if (where[lanes] != where[lane]).any() or (wanted[lanes] != wanted[lane]).any():
                return several(w, where, wanted)
        barrier = barrier_at(w, int(where[lane]), instr)
        if barrier is None:
            write(w, np.ones(32, np.bool_))
            return None
        ready = complete(barrier, int(wanted[lane]))
        if not ready:
            key = (instr.line, barrier, barrier.phase)
            if w.failed == key:
                current = barrier.phase
                w.wait = Wait(lambda: barrier.phase != current, barrier.describe)
                return BLOCK
            w.failed = key
        else:
            w.failed = None
            if acquire:
                w.acquire(barrier.done)
        write(w, np.full(32, ready))
        return None

    def complete(barrier: Any, token: int) -> bool:
        return bool((barrier.phase ^ token) & 1 == 1 if parity else barrier.phase != token & LOW32)

    def several(w: Any, where: Any, wanted: Any) -> Any:
        """Lanes that ask for different barriers or phases: each gets its answer; parked when all fail twice."""
        answers: Any = np.ones(32, np.bool_)
        asked: list[tuple[Any, int]] = []
        for lane in np.flatnonzero(w.mask).tolist():
            barrier = barrier_at(w, int(where[lane]), instr)
            if barrier is None:
                continue
            answers[lane] = complete(barrier, int(wanted[lane]))
            asked.append((barrier, barrier.phase))
            if answers[lane] and acquire:
                w.acquire(barrier.done)
        if answers[w.mask].any():
            w.failed = None
        else:
            key = (instr.line, tuple(asked))
            if w.failed == key:
                waited = list(dict.fromkeys(asked))
                w.wait = Wait(
                    lambda: any(b.phase != p for b, p in waited), lambda: " or ".join(b.describe() for b, _ in waited)
                )
                return BLOCK
            w.failed = key
        write(w, answers)
        return None

    return run


def _pending(instr: Instruction, ctx: Context) -> Run:
    """pending_count: the arrivals that were pending before the arrive that returned the state."""
    write, state = ctx.writer(instr.operands[0], instr), ctx.slot(instr.operands[1], np.uint64, instr)
    return lambda w: write(w, (w.regs[state] >> np.uint64(32)).astype(np.uint32))


def _fence(instr: Instruction, ctx: Context) -> Run:
    """fence and membar (9.7.13.4). Scopes are not told apart."""
    words = instr.modifiers
    if "proxy" in words and any(m.startswith("async") for m in words):
        return lambda w: w.fence_proxy()

    inits = any(m.startswith("mbarrier_init") for m in words)

    def fence(w: Any) -> None:
        if inits:
            w.fence_init()
        w.fenced = w.release()

    return fence


def _griddepcontrol(instr: Instruction, ctx: Context) -> Run:
    """wait orders the warp after the launch before, launch_dependents lets the next one begin (9.7.13.13)."""

    def wait(w: Any) -> None:
        w.known[0, BEFORE] = 1
        w.machine.overlap.wait()

    def trigger(w: Any) -> None:
        w.machine.overlap.trigger(bool(w.known[0, BEFORE]))

    return wait if instr.modifiers[:1] == ("wait",) else trigger


def _hint(instr: Instruction, ctx: Context) -> Run:
    """setmaxnreg, nanosleep, pmevent: no effect on values."""
    return lambda w: None


def _trap(instr: Instruction, ctx: Context) -> Run:
    def run(w: Any) -> None:
        w.machine.findings.add("assertion", f"{instr.opcode} executed", instr, (w.name,))

    return run


TABLE = {
    "bar": _bar, "barrier": _bar, "mbarrier": _mbarrier, "fence": _fence, "membar": _fence, "setmaxnreg": _hint,
    "griddepcontrol": _griddepcontrol, "nanosleep": _hint, "pmevent": _hint, "trap": _trap, "brkpt": _trap,
}  # fmt: skip

"""Bulk asynchronous copies, tensor copies, cluster launch control (PTX ISA 9.7.9.26 - 9.7.9.28, 9.7.13.16).

Contract: an operation checks addresses, descriptors and order when it is issued, as the async proxy, and is posted to
the cluster's queue; it moves bytes and signals when the schedule completes it. A bulk group is complete when its
writes are done; `.read` asks for its source reads only. A group whose reads nobody waited for when the warp exits is
an `exit_pending` finding. Groups are kept per warp, not per thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._clocks import Access
from .._findings import UnsupportedError
from .._memory import OFFSET_MASK
from .._ptx import Addr, Imm, Instruction, Vec
from .._schedule import Wait
from .._tma import PIECE, Box, checked_map, combine
from .._translate import Context, Run
from .._warp import BLOCK
from .memory import load_bytes
from .sync import barrier_at

__all__ = ["TABLE", "translate_bulk"]


class Group:
    """A bulk group of a warp."""

    __slots__ = ("at", "clocks", "read_clocks", "reads", "waited", "writes")

    def __init__(self, known: Any) -> None:
        self.reads = self.writes = 0
        self.read_clocks, self.clocks = np.zeros_like(known), np.zeros_like(known)
        self.waited = False
        self.at: Any = None


def _groups(w: Any) -> list[Group]:
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


def translate_bulk(instr: Instruction, ctx: Context) -> Run:
    words = instr.modifiers
    if "commit_group" in words:

        def commit(w: Any) -> None:
            _groups(w).append(Group(w.known))

        return commit
    if "wait_group" in words:
        return _wait_group(instr, ctx)
    if "prefetch" in words:
        return lambda w: None
    if "tensor" in words:
        return _tensor(instr, ctx)
    return _plain(instr, ctx)


def _wait_group(instr: Instruction, ctx: Context) -> Run:
    operand = instr.operands[0]
    if not isinstance(operand, Imm):
        raise UnsupportedError(instr.op, instr.line)
    keep, reads_only = operand.value, "read" in instr.modifiers

    def wait(w: Any) -> Any:
        groups = _groups(w)
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


def _record(w: Any, instr: Instruction, rank: int) -> Access:
    """A new async-proxy access with a clock of its own, ordered after everything the issuing warp knows."""
    agents = w.cta.cluster.agents
    slot = agents.slot(rank)
    return Access(slot, agents.tick(slot), w.known, False, instr)


def _after(w: Any, *accesses: Access) -> Any:
    """What the completion of these accesses publishes; the warp's later events are not part of it."""
    clocks = w.release()
    for access in accesses:
        clocks[:, access.agent] = access.clock
    return clocks


def _tensor(instr: Instruction, ctx: Context) -> Run:
    words = instr.modifiers
    rank = next((int(m[0]) for m in words if len(m) == 2 and m[1] == "d"), 0)
    if any(m.startswith("im2col::w") for m in words):
        raise UnsupportedError(instr.op, instr.line)
    gather = "tile::gather4" in words or "tile::scatter4" in words
    spaces = [m for m in words if m.split("::")[0] in ("global", "shared")]
    if spaces[0].startswith("shared"):
        return _tensor_load(instr, ctx, rank, gather)
    return _tensor_store(instr, ctx, rank, gather)


def _map_reader(operand: Any, instr: Instruction, ctx: Context) -> Any:
    """(map bytes, coordinates) of a [map, {coordinates}] operand."""
    if not isinstance(operand, Addr) or not operand.extra or not isinstance(operand.extra[0], Vec):
        raise UnsupportedError(instr.op, instr.line, "tensor map operand")
    address = ctx.uniform_address(operand, instr)
    readers = [ctx.uniform(o, np.uint32, instr) for o in operand.extra[0].items]
    findings = ctx.machine.findings

    def read(w: Any) -> tuple[bytes, list[int]]:
        where = address(w)
        if where % 64:
            findings.add("misaligned", f"tensor map at {where:#x} is not 64-byte aligned", instr, (w.name,))
        saved, w.mask = w.mask, w.mask & (np.arange(32) == w.lead)
        raw = load_bytes("generic", w, np.array([where]), 64, w.access(instr))
        w.mask = saved
        return raw.tobytes(), [(r(w) ^ 0x80000000) - 0x80000000 for r in readers]

    return read


def _box(w: Any, raw: bytes, coordinates: list[int], rank: int, gather: bool, instr: Instruction,
         offsets: list[int] | None = None) -> Box | None:  # fmt: skip
    findings = w.machine.findings
    tensor_map = checked_map(raw, rank if not gather else 2, findings, instr, w.name)
    if tensor_map is None:
        return None
    wanted = any(m.startswith("im2col") for m in instr.modifiers)
    if tensor_map.im2col != wanted:
        mode = "an im2col" if tensor_map.im2col else "a tiled"
        findings.add("descriptor", f"{mode} tensor map used by {instr.op}", instr, (w.name,))
        return None
    if gather and (rank != 2 or tensor_map.box[1] != 1 or len(coordinates) != 5):
        message = f"gather4 and scatter4 need a 2d map whose box has one row and five coordinates, not a box of {tensor_map.box}"
        findings.add("descriptor", message, instr, (w.name,))
        if rank != 2 or len(coordinates) != 5:
            return None
    box = (
        Box(tensor_map, [coordinates[0], 0], coordinates[1:5])
        if gather
        else Box(tensor_map, coordinates, None, offsets)
    )
    stores = instr.modifiers[0] == "reduce" or not any(m.startswith("mbarrier") for m in instr.modifiers)
    for problem in box.problems(coordinates, stores, instr.modifiers[0] == "reduce"):
        findings.add("descriptor", problem, instr, (w.name,), key=problem[:24])
        if "can't" in problem:
            return None
    return box


def _aligned(w: Any, offset: int, to: int, instr: Instruction, what: str) -> None:
    if offset % to:
        w.machine.findings.add(
            "misaligned", f"{what} at shared +{offset:#x} is not {to}-byte aligned", instr, (w.name,)
        )


def _tensor_load(instr: Instruction, ctx: Context, rank: int, gather: bool) -> Run:
    """global -> shared, one CTA or multicast; completes bytes at an mbarrier."""
    words = instr.modifiers
    destination = ctx.uniform_address(instr.operands[0], instr)
    source = _map_reader(instr.operands[1], instr, ctx)
    mbar = ctx.uniform_address(instr.operands[2], instr)
    multicast, pair = "multicast::cluster" in words, "cta_group::2" in words
    rest = list(instr.operands[3:])
    filters = [ctx.uniform(o, np.uint16, instr) for o in ctx.vector(rest.pop(0))] if "im2col" in words else []
    if filters and len(filters) != rank - 2:
        raise UnsupportedError(instr.op, instr.line, "im2col offsets")
    mask = ctx.uniform(rest[0], np.uint16, instr) if multicast else None
    count = ctx.machine.findings.count

    def run(w: Any) -> None:
        cluster = w.cta.cluster
        raw, coordinates = source(w)
        box = _box(w, raw, coordinates, rank, gather, instr, [f(w) & 0xFFFF for f in filters])
        to, signal = destination(w) & 0xFFFFFFFF, mbar(w) & 0xFFFFFFFF
        if box is None:
            return
        _aligned(w, to & OFFSET_MASK, 128, instr, "tensor copy destination")
        ranks = [r for r in range(16) if mask(w) >> r & 1] if mask is not None else [to >> 24]
        reading = _record(w, instr, w.cta.rank)
        found = box.check_global(w.machine.memory, reading, False)
        targets = []
        for r in ranks:
            place = cluster.resolve(r << 24 | to & OFFSET_MASK, instr, w.name)
            where = (r & ~1 | signal >> 24 & 1 if pair else r) if multicast else signal >> 24
            barrier = barrier_at(w, where << 24 | signal & OFFSET_MASK, instr, False)
            if place is None or barrier is None:
                continue
            pieces = box.pieces(place[1])
            writing = _record(w, instr, w.cta.rank)
            if place[0].shared.check_chunks(pieces.reshape(-1), 16, writing, True):
                targets.append((place[0], pieces, barrier, barrier.phase, _after(w, reading, writing)))
        count("bytes.tma.load", box.size * len(targets))

        def complete() -> None:
            values = box.fetch(*found) if found is not None else box.fetch(0, None)
            for cta, pieces, barrier, phase, clocks in targets:
                cta.shared.data.view(PIECE)[pieces >> 4] = values.view(PIECE)
                barrier.complete(box.size, phase, clocks, instr, (w.name,))

        cluster.queue.post(complete, f"tensor load of {w.name}", instr)

    return run


def _tensor_store(instr: Instruction, ctx: Context, rank: int, gather: bool) -> Run:
    """shared -> global, plain or reducing; belongs to the warp's open bulk group."""
    target = _map_reader(instr.operands[0], instr, ctx)
    source = ctx.uniform_address(instr.operands[1], instr)
    reduce = (
        next((m for m in instr.modifiers if m in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), "")
        if "reduce" in instr.modifiers
        else ""
    )
    count = ctx.machine.findings.count

    def run(w: Any) -> None:
        raw, coordinates = target(w)
        box = _box(w, raw, coordinates, rank, gather, instr)
        offset = source(w) & OFFSET_MASK
        if box is None:
            return
        _aligned(w, offset, 128, instr, "tensor copy source")
        group, region, cluster = _groups(w)[-1], w.cta.shared, w.cta.cluster
        reading, writing = _record(w, instr, w.cta.rank), _record(w, instr, w.cta.rank)
        pieces = box.pieces(offset)
        inside = pieces[box.row_ok].reshape(-1)
        ok = region.check_chunks(inside, 16, reading, False)
        found = box.check_global(w.machine.memory, writing._replace(atomic=bool(reduce)), True)
        np.maximum(group.read_clocks, _after(w, reading), out=group.read_clocks)
        np.maximum(group.clocks, _after(w, reading, writing), out=group.clocks)
        group.reads += 1
        group.writes += 1
        group.at = group.at or instr
        count("bytes.tma.store", box.size)

        def read() -> None:
            values = (
                region.data.view(PIECE)[pieces >> 4].view(np.uint8).reshape(len(box.rows), box.row_bytes)
                if ok
                else None
            )
            group.reads -= 1
            cluster.effects += 1

            def write() -> None:
                if found is not None and values is not None:
                    if reduce:
                        box.reduce(*found, values, reduce)
                    else:
                        box.put(*found, values)
                group.writes -= 1
                cluster.effects += 1

            cluster.queue.post(write, f"tensor store of {w.name}", instr, may_outlive=True)

        cluster.queue.post(read, f"tensor store of {w.name}", instr, may_outlive=True)

    return run


def _plain(instr: Instruction, ctx: Context) -> Run:
    """cp{.reduce}.async.bulk between global and shared memory, or to another CTA's shared memory."""
    words = instr.modifiers
    spaces = [m.split("::")[0] for m in words if m.split("::")[0] in ("global", "shared")]
    if len(spaces) != 2 or "multicast::cluster" in words or "cp_mask" in words:
        raise UnsupportedError(instr.op, instr.line)
    to, origin = ctx.uniform_address(instr.operands[0], instr), ctx.uniform_address(instr.operands[1], instr)
    size = ctx.uniform(instr.operands[2], np.uint32, instr)
    by_group = spaces[0] == "global"
    mbar = None if by_group else ctx.uniform_address(instr.operands[3], instr)
    reduce = (
        next((m for m in words if m in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), "")
        if "reduce" in words
        else ""
    )
    kind = words[-1]
    width = {"u32": 4, "s32": 4, "f32": 4, "u64": 8, "s64": 8, "f64": 8, "f16": 2, "bf16": 2, "b32": 4, "b64": 8}.get(
        kind, 4
    )
    data_type = {"b32": "u32", "b64": "u64"}.get(kind, kind)
    count = ctx.machine.findings.count

    def side(w: Any, space: str, address: int, amount: int, access: Access, writes: bool) -> Any:
        if address % 16 or amount % 16:
            w.machine.findings.add("misaligned", f"bulk copy of {amount} bytes at {address:#x}: both must be multiples of 16",
                                   instr, (w.name,))  # fmt: skip
            return None
        if space == "global":
            found = w.machine.memory.find(address)
            if found is None:
                w.machine.findings.add(
                    "out_of_bounds", f"bulk copy at global {address:#x}, outside every allocation", instr, (w.name,)
                )
                return None
            base, region = found
        else:
            place = w.cta.cluster.resolve(address & 0xFFFFFFFF, instr, w.name)
            if place is None:
                return None
            base, region = address - place[1], place[0].shared
        return (region, address - base) if region.check_range(address - base, amount, access, writes) else None

    def run(w: Any) -> None:
        cluster, amount = w.cta.cluster, size(w)
        reading, writing = _record(w, instr, w.cta.rank), _record(w, instr, w.cta.rank)
        src = side(w, spaces[1], origin(w), amount, reading, False)
        dst = side(w, spaces[0], to(w), amount, writing._replace(atomic=bool(reduce)), True)
        barrier = barrier_at(w, mbar(w), instr, False) if mbar is not None else None
        phase = barrier.phase if barrier is not None else 0
        group = _groups(w)[-1] if by_group else None
        clocks = _after(w, reading, writing)
        if group is not None:
            np.maximum(group.read_clocks, _after(w, reading), out=group.read_clocks)
            np.maximum(group.clocks, clocks, out=group.clocks)
            group.reads += 1
            group.writes += 1
            group.at = group.at or instr
        count(f"bytes.bulk.{spaces[1]}_{spaces[0]}", amount)

        def complete() -> None:
            if src is not None and dst is not None:
                values = src[0].data[src[1] : src[1] + amount].copy()
                into = dst[0].data[dst[1] : dst[1] + amount]
                into[:] = (
                    combine(into.reshape(-1, width), values.reshape(-1, width), data_type, reduce).reshape(-1)
                    if reduce
                    else values
                )
            if group is not None:
                group.reads -= 1
                group.writes -= 1
            if barrier is not None:
                barrier.complete(amount, phase, clocks, instr, (w.name,))
            cluster.effects += 1

        cluster.queue.post(complete, f"bulk copy of {w.name}", instr, may_outlive=by_group)

    return run


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
        _aligned(w, offset & OFFSET_MASK, 16, instr, "cluster launch control response")
        targets = []
        for cta in cluster.ctas if everyone else [w.cta]:
            barrier = barrier_at(w, cta.base | signal & OFFSET_MASK, instr, False)
            access = _record(w, instr, w.cta.rank)
            start = offset & OFFSET_MASK
            cta.shared.order.fenced(access, slice(start >> 2, (start >> 2) + 4), 4)
            if barrier is not None and cta.shared.check_range(offset & OFFSET_MASK, 16, access, True):
                targets.append((cta, barrier, barrier.phase, _after(w, access)))

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

"""Bulk asynchronous copies: the dispatch, and tensor copies (PTX ISA 9.7.9.25 - 9.7.9.28).

Contract: an operation checks addresses, descriptors and order when it is issued, as the async proxy, and is posted to
the cluster's queue; it moves bytes and signals when the schedule completes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._findings import UnsupportedError
from .._memory import OFFSET_MASK
from .._ptx import Addr, Instruction, Vec
from .._tma import PIECE, Box, checked_map
from .._translate import Context, Run
from .bulk_groups import after, aligned, commit_group, groups_of, record, wait_group
from .bulk_plain import translate_plain
from .memory import load_bytes
from .sync import barrier_at

__all__ = ["translate_bulk"]


def translate_bulk(instr: Instruction, ctx: Context) -> Run:
    words = instr.modifiers
    if "commit_group" in words:
        return commit_group
    if "wait_group" in words:
        return wait_group(instr, ctx)
    if "prefetch" in words:
        return lambda w: None
    if "tensor" in words:
        return _tensor(instr, ctx)
    return translate_plain(instr, ctx)


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
        kind = "misaligned" if problem.startswith("misaligned") else "descriptor"
        findings.add(kind, problem.removeprefix("misaligned: "), instr, (w.name,), key=problem[:24])
        if "can't" in problem:
            return None
    return box


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
        aligned(w, to & OFFSET_MASK, 128, instr, "tensor copy destination")
        ranks = [r for r in range(16) if mask(w) >> r & 1] if mask is not None else [to >> 24]
        reading = record(w, instr, w.cta.rank)
        found = box.check_global(w.machine.memory, reading, False)
        targets = []
        for r in ranks:
            place = cluster.resolve(r << 24 | to & OFFSET_MASK, instr, w.name)
            where = (r & ~1 | signal >> 24 & 1 if pair else r) if multicast else signal >> 24
            barrier = barrier_at(w, where << 24 | signal & OFFSET_MASK, instr, False)
            if place is None or barrier is None:
                continue
            pieces = box.pieces(place[1])
            writing = record(w, instr, w.cta.rank)
            if place[0].shared.check_chunks(pieces.reshape(-1), 16, writing, True):
                w.machine.events.swizzles[len(w.machine.events.at) - 1] = box.map.swizzle
                targets.append((place[0], pieces, barrier, barrier.phase, after(w, reading, writing)))
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
        aligned(w, offset, 128, instr, "tensor copy source")
        group, region, cluster = groups_of(w)[-1], w.cta.shared, w.cta.cluster
        reading, writing = record(w, instr, w.cta.rank), record(w, instr, w.cta.rank)
        pieces = box.pieces(offset)
        inside = pieces[box.row_ok].reshape(-1)
        ok = region.check_chunks(inside, 16, reading, False)
        found = box.check_global(w.machine.memory, writing._replace(atomic=bool(reduce)), True)
        np.maximum(group.read_clocks, after(w, reading), out=group.read_clocks)
        np.maximum(group.clocks, after(w, reading, writing), out=group.clocks)
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

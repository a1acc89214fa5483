"""Loads, stores, atomics, matrix loads and stores, non-bulk asynchronous copies (PTX ISA 9.7.9.8 - 9.7.9.25, 9.7.13.13).

Contract: addresses are resolved by state space, or by window for generic ones; every access goes through a `Region`.
Operations with a memory-order word (relaxed, acquire, release, volatile) and atomics synchronise through a table of
clocks per address, see `_clocks`. `ld` of a narrow type into a wide register extends by the type's sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._clocks import Access
from .._findings import UnsupportedError
from .._memory import OFFSET_MASK
from .._ptx import Imm, Instruction, Reg
from .._translate import DTYPES, Context, Run, type_of, width_of

__all__ = ["TABLE", "load_bytes", "store_bytes"]

Offsets: TypeAlias = "npt.NDArray[np.int64]"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"
STRONG = frozenset(("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"))


def _shared_load(w: Any, addresses: Offsets, width: int, access: Access) -> Bytes:
    ranks = addresses >> 24
    rank = int(ranks[0])
    if rank == w.cta.rank and (ranks == rank).all():
        return w.cta.shared.load(addresses & OFFSET_MASK, width, access)
    out: Any = np.zeros((len(addresses), width), np.uint8)
    for rank in np.unique(ranks):
        mine = ranks == rank
        found = w.cta.cluster.resolve(int(rank) << 24, access.at, w.name)
        if found is not None:
            out[mine] = found[0].shared.load(addresses[mine] & OFFSET_MASK, width, access)
    return out


def _shared_store(w: Any, addresses: Offsets, values: Bytes, access: Access) -> None:
    ranks = addresses >> 24
    rank = int(ranks[0])
    if rank == w.cta.rank and (ranks == rank).all():
        w.cta.shared.store(addresses & OFFSET_MASK, values, access)
        return
    for rank in np.unique(ranks):
        mine = ranks == rank
        found = w.cta.cluster.resolve(int(rank) << 24, access.at, w.name)
        if found is not None:
            found[0].shared.store(addresses[mine] & OFFSET_MASK, values[mine], access)


def _local(w: Any) -> Bytes:
    memory = w.local.get("memory")
    if memory is None:
        memory = w.local["memory"] = np.zeros((32, max(w.machine.entry.local_bytes, 16)), np.uint8)
    return memory


def _local_index(w: Any, addresses: Offsets, width: int, access: Access) -> Any:
    size = _local(w).shape[1]
    if int(addresses.min()) < 0 or int(addresses.max()) + width > size:
        w.machine.findings.add(
            "out_of_bounds", f"local memory +{int(addresses.max()):#x} of {size} bytes", access.at, (w.name,)
        )
        return None
    lanes = np.flatnonzero(w.mask)[: len(addresses)]
    return lanes[:, None], addresses[:, None] + np.arange(width)


def load_bytes(space: str, w: Any, addresses: Offsets, width: int, access: Access) -> Bytes:
    """Bytes [lanes, width] of the active lanes' `addresses`."""
    if space == "shared":
        return _shared_load(w, addresses, width, access)
    if space == "global":
        return w.machine.memory.load(addresses, width, access)
    if space == "param":
        return w.machine.params.load(addresses & ((1 << 56) - 1), width, access)
    if space == "local":
        index = _local_index(w, addresses & ((1 << 56) - 1), width, access)
        return np.zeros((len(addresses), width), np.uint8) if index is None else _local(w)[index]
    windows = addresses >> 56
    first = int(windows[0])
    if (windows == first).all():
        name = {0: "global", 1: "shared", 2: "param", 3: "local"}.get(first, "global")
        return load_bytes(name, w, addresses & ((1 << 56) - 1) if first else addresses, width, access)
    out: Any = np.zeros((len(addresses), width), np.uint8)
    for window in np.unique(windows):
        if window == 3:
            raise UnsupportedError("generic access of one warp to local and other memory", access.at.line)
        mine = windows == window
        out[mine] = load_bytes("generic", w, addresses[mine], width, access)
    return out


def store_bytes(space: str, w: Any, addresses: Offsets, values: Bytes, access: Access) -> None:
    w.cta.cluster.effects += 1
    if space == "shared":
        _shared_store(w, addresses, values, access)
    elif space == "global":
        w.machine.memory.store(addresses, values, access)
    elif space == "local":
        index = _local_index(w, addresses & ((1 << 56) - 1), values.shape[1], access)
        if index is not None:
            _local(w)[index] = values
    elif space == "generic":
        windows = addresses >> 56
        for window in np.unique(windows):
            mine = windows == window
            name = {0: "global", 1: "shared", 3: "local"}.get(int(window))
            if name is None or (name == "local" and not mine.all()):
                raise UnsupportedError("generic store to this space", access.at.line)
            store_bytes(name, w, addresses[mine] & ((1 << 56) - 1) if window else addresses, values[mine], access)
    else:
        raise UnsupportedError(f"store to .{space}", access.at.line)


def _space(instr: Instruction) -> str:
    for word in instr.modifiers:
        root = word.split("::")[0]
        if root in ("shared", "global", "local", "param"):
            return root
        if root == "const":
            return "global"
    return "generic"


def _acquire(w: Any, addresses: Offsets) -> None:
    table = w.machine.sync
    for address in addresses.tolist():
        entry = table.get(address)
        if entry is not None:
            cluster, clocks = entry
            if cluster is w.cta.cluster:
                w.acquire(clocks)
            else:
                w.known[0, 0] = 1  # another cluster's accesses are ordered from now on


def _release(w: Any, addresses: Offsets) -> None:
    clocks = w.release()
    table, cluster = w.machine.sync, w.cta.cluster
    for address in addresses.tolist():
        entry = table.get(address)
        if entry is not None and entry[0] is cluster:
            clocks = np.maximum(clocks, entry[1])
        table[address] = (cluster, clocks)


def _ld(instr: Instruction, ctx: Context) -> Run:
    kind, space = type_of(instr), _space(instr)
    count = next((int(m[1:]) for m in instr.modifiers if m in ("v2", "v4", "v8")), 1)
    if kind == "b128":
        raise UnsupportedError(instr.op, instr.line)
    width, dtype = width_of(kind), DTYPES[kind]
    signed: Any = {"s8": np.int8, "s16": np.int16, "s32": np.int32}.get(kind)
    strong = bool(STRONG & set(instr.modifiers))
    address = ctx.address(instr.operands[1], instr)
    writers = [ctx.writer(o, instr) for o in ctx.vector(instr.operands[0])]
    targets = ctx.vector(instr.operands[0])
    wide: list[Any] = [ctx.dtypes[o.slot] if isinstance(o, Reg) else dtype for o in targets]
    total = width * count
    counter, add = f"bytes.ld.{space}", ctx.machine.findings.count

    def run(w: Any) -> None:
        where = address(w)
        everyone = w.active == 32
        if not everyone:
            where = where[w.mask]
        if strong:
            _acquire(w, where)
        raw = load_bytes(space, w, where, total, w.access(instr, strong))
        add(counter, raw.size)
        values = np.ascontiguousarray(raw).view(dtype).reshape(-1, count)
        for i, write in enumerate(writers):
            value = values[:, i]
            if signed is not None and wide[i] is not dtype:
                value = value.view(signed).astype(np.int64).astype(wide[i])
            if not everyone:
                full = np.zeros(32, value.dtype)
                full[w.mask] = value
                value = full
            write(w, value)

    return run


def _st(instr: Instruction, ctx: Context) -> Run:
    if "async" in instr.modifiers:
        return _st_async(instr, ctx)
    kind, space = type_of(instr), _space(instr)
    dtype, strong = DTYPES[kind], bool(STRONG & set(instr.modifiers))
    address = ctx.address(instr.operands[0], instr)
    slots = [ctx.slot(o, dtype, instr) for o in ctx.vector(instr.operands[1])]
    counter, add = f"bytes.st.{space}", ctx.machine.findings.count

    def run(w: Any) -> None:
        where = address(w)
        values = np.empty((32, len(slots)), dtype)
        for i, s in enumerate(slots):
            values[:, i] = w.regs[s]
        raw = values.view(np.uint8)
        if w.active != 32:
            where, raw = where[w.mask], raw[w.mask]
        add(counter, raw.size)
        store_bytes(space, w, where, raw, w.access(instr, strong))
        if strong:
            _release(w, where)

    return run


def _st_async(instr: Instruction, ctx: Context) -> Run:
    """st.async{.weak}.shared::cluster.mbarrier::complete_tx::bytes{.vec}.type [a], b, [mbar] (9.7.9.12)."""
    dtype = DTYPES[type_of(instr)]
    address, barrier = ctx.address(instr.operands[0], instr), ctx.address(instr.operands[2], instr)
    slots = [ctx.slot(o, dtype, instr) for o in ctx.vector(instr.operands[1])]

    def run(w: Any) -> None:
        cluster, agents = w.cta.cluster, w.cta.cluster.agents
        values = np.stack([w.regs[s] for s in slots], axis=1).astype(dtype).view(np.uint8)
        for lane in np.flatnonzero(w.mask):
            place = cluster.resolve(int(address(w)[lane]), instr, w.name)
            mbar = cluster.resolve(int(barrier(w)[lane]), instr, w.name)
            if place is None or mbar is None:
                continue
            found = mbar[0].mbarriers.find(mbar[1], w.access(instr), w.name)
            slot = agents.slot(w.cta.rank)
            access = Access(slot, agents.tick(slot), w.known, True, instr)
            offset = np.array([place[1]])
            if not place[0].shared.check_chunks(offset, values.shape[1], access, True) or found is None:
                continue
            clocks, row = w.release(), values[lane].copy()
            clocks[:, slot] = access.clock

            def complete(found: Any = found, place: Any = place, row: Any = row, clocks: Any = clocks,
                         phase: int = found.phase) -> None:  # fmt: skip
                place[0].shared.data[place[1] : place[1] + len(row)] = row
                found.complete(len(row), phase, clocks, instr, (w.name,))

            cluster.queue.post(complete, f"st.async of {w.name}", instr)

    return run


_ATOM: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "min": min, "max": max, "exch": lambda a, b: b,
}  # fmt: skip


def _atomic(instr: Instruction, ctx: Context) -> Run:
    """atom and red: lanes in order, each a read-modify-write (9.7.13.5, 9.7.13.7)."""
    from .._floats import decode, encode

    returns = instr.opcode == "atom"
    kind, space = type_of(instr), _space(instr)
    words = set(instr.modifiers)
    names = [m for m in instr.modifiers if m in _ATOM or m in ("cas", "inc", "dec")]
    if len(names) != 1 or kind == "b128" or "async" in words:
        raise UnsupportedError(instr.op, instr.line)
    name = names[0]
    count = next((int(m[1:]) for m in instr.modifiers if m in ("v2", "v4", "v8")), 1)
    dtype = DTYPES[kind]
    operands = instr.operands[1:] if returns else instr.operands
    address = ctx.address(operands[0], instr)
    sources = [ctx.slot(o, dtype, instr) for o in ctx.vector(operands[1])]
    compare = ctx.slot(operands[2], dtype, instr) if name == "cas" else -1
    writers = [ctx.writer(o, instr) for o in ctx.vector(instr.operands[0])] if returns else []
    width = width_of(kind)
    typed: Any = {"s32": np.int32, "s64": np.int64, "f32": np.float32, "f64": np.float64, "f16": np.float16,
                  "f16x2": np.float16}.get(kind, dtype)  # fmt: skip
    brain = kind in ("bf16", "bf16x2")

    def combine(old: Any, new: Any, lane: int, other: Any) -> Any:
        if name == "cas":
            return other if old == new else old
        if name == "inc":
            return dtype(0) if old >= new else dtype(old + dtype(1))
        if name == "dec":
            return new if old == 0 or old > new else dtype(old - dtype(1))
        if brain:
            parts = [np.atleast_1d(np.asarray(v).astype(dtype)).view(np.uint16) for v in (old, new)]
            a, b = (decode(p, "bf16") for p in parts)
            return (
                np.asarray(
                    encode(a + b if name == "add" else (np.minimum if name == "min" else np.maximum)(a, b), "bf16")
                )
                .astype(np.uint16)
                .view(dtype)[0]
            )
        a, b = np.atleast_1d(dtype(old)).view(typed), np.atleast_1d(dtype(new)).view(typed)
        result = {"min": np.fmin, "max": np.fmax}.get(name, _ATOM.get(name))(a, b)  # type: ignore[misc]
        return result.astype(typed).view(dtype)[0]

    def run(w: Any) -> None:
        access = w.access(instr, True)
        where = address(w)
        lanes = np.flatnonzero(w.mask)
        _acquire(w, where[lanes])
        out = np.zeros((count, 32), dtype)
        for lane in lanes.tolist():
            for i in range(count):
                at = where[lane : lane + 1] + i * width
                saved, w.mask = w.mask, np.arange(32) == lane
                old = load_bytes(space, w, at, width, access).copy().view(dtype)[0, 0]
                new = w.regs[sources[i]][lane]
                value = combine(old, new, lane, w.regs[compare][lane] if compare >= 0 else None)
                store_bytes(space, w, at, np.array([[value]], dtype).view(np.uint8), access)
                w.mask = saved
                out[i, lane] = old
        _release(w, where[lanes])
        for i, write in enumerate(writers):
            write(w, out[i])

    return run


def _nothing(instr: Instruction, ctx: Context) -> Run:
    """prefetch, discard, applypriority: no effect on values; the address is not checked."""
    return lambda w: None


def _cp(instr: Instruction, ctx: Context) -> Run:
    """cp.async of one thread: late like every asynchronous copy; groups and mbarrier arrivals complete it."""
    words = instr.modifiers
    if "bulk" in words or "reduce" in words:
        from .bulk import translate_bulk

        return translate_bulk(instr, ctx)
    if words[:1] != ("async",):
        raise UnsupportedError(instr.op, instr.line)
    if "commit_group" in words:
        return lambda w: w.local.setdefault("cp", [[]]).append([])
    if "wait_group" in words or "wait_all" in words:
        keep = instr.operands[0].value if "wait_group" in words and isinstance(instr.operands[0], Imm) else 0
        everything = "wait_all" in words

        def wait(w: Any) -> None:
            groups = w.local.setdefault("cp", [[]])
            limit = len(groups) if everything else max(len(groups) - 1 - keep, 0)
            for group in groups[:limit]:
                for complete in group:
                    complete()
                group.clear()

        return wait
    if "mbarrier" in words:
        return _cp_arrive(instr, ctx)
    return _cp_async(instr, ctx)


def _cp_async(instr: Instruction, ctx: Context) -> Run:
    to, origin = ctx.address(instr.operands[0], instr), ctx.address(instr.operands[1], instr)
    size = instr.operands[2]
    if not isinstance(size, Imm):
        raise UnsupportedError(instr.op, instr.line)
    width = size.value
    extra = instr.operands[3] if len(instr.operands) > 3 else None
    ignored = ctx.predicate(extra, instr) if isinstance(extra, Reg) and extra.type == "pred" else None
    policy = any(m.startswith("L2::cache_hint") for m in instr.modifiers) and len(instr.operands) == 4
    source_size = ctx.slot(extra, np.uint32, instr) if extra is not None and ignored is None and not policy else -1

    def run(w: Any) -> None:
        mask = w.mask
        dst, src = to(w)[mask], origin(w)[mask]
        access = w.access(instr)
        sizes = w.regs[source_size][mask].astype(np.int64) if source_size >= 0 else np.full(len(dst), width)
        if ignored is not None:
            sizes = np.where(ignored(w)[mask], 0, sizes)
        values: Any = np.zeros((len(dst), width), np.uint8)
        for amount in np.unique(sizes):
            mine = sizes == amount
            if amount:
                if amount == width:
                    values[mine] = load_bytes("global", w, src[mine], width, access)
                else:
                    for b in range(int(amount)):
                        values[mine, b : b + 1] = load_bytes("global", w, src[mine] + b, 1, access)
        agents, region = w.cta.cluster.agents, w.cta.shared
        slot = agents.slot(w.cta.rank)
        record = Access(slot, agents.tick(slot), w.known, True, instr)
        offsets = dst & OFFSET_MASK
        region.misaligned(offsets, width, record)
        if not region.check_chunks(offsets, width, record, True):
            return

        def complete() -> None:
            region.data[offsets[:, None] + np.arange(width)] = values
            w.known[0, slot] = max(w.known[0, slot], record.clock)

        w.local.setdefault("cp", [[]])[-1].append(complete)

    return run


def _cp_arrive(instr: Instruction, ctx: Context) -> Run:
    """cp.async.mbarrier.arrive{.noinc}: an arrival when the thread's copies are complete; here they complete now."""
    barrier, noinc = ctx.address(instr.operands[0], instr), "noinc" in instr.modifiers

    def run(w: Any) -> None:
        for group in w.local.get("cp", []):
            for complete in group:
                complete()
            group.clear()
        for lane in np.flatnonzero(w.mask):
            place = w.cta.cluster.resolve(int(barrier(w)[lane]), instr, w.name)
            found = place and place[0].mbarriers.find(place[1], w.access(instr), w.name)
            if found:
                if not noinc:
                    found.pending += 1
                found.arrive(w.release(), instr, (w.name,))

    return run


TABLE = {
    "ld": _ld, "ldu": _ld, "st": _st, "atom": _atomic, "red": _atomic, "prefetch": _nothing, "prefetchu": _nothing,
    "discard": _nothing, "applypriority": _nothing, "cp": _cp,
}  # fmt: skip

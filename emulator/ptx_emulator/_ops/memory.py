"""Loads and stores (PTX ISA 9.7.9.8 - 9.7.9.15).

Contract: addresses are resolved by state space, or by window for generic ones; every access goes through a `Region`.
Operations with a memory-order word (relaxed, acquire, release, volatile) and atomics synchronise through a table of
clocks per address, see `_clocks`. `ld` of a narrow type into a wide register extends by the type's sign.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._clocks import Access
from .._findings import UnsupportedError
from .._memory import OFFSET_MASK
from .._ptx import Instruction, Operand, Reg
from .._translate import DTYPES, Context, Run, type_of, width_of

__all__ = ["TABLE", "acquire", "load_bytes", "release", "space_of", "store_bytes"]

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


@contextmanager
def _only(w: Any, mine: Any) -> Iterator[None]:
    """Make those of the active lanes that `mine` picks the active ones: local memory is kept per lane."""
    saved, lanes = w.mask, np.flatnonzero(w.mask)
    if len(lanes) == len(mine):
        w.mask = np.isin(np.arange(32), lanes[mine])
    try:
        yield
    finally:
        w.mask = saved


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
        mine = windows == window
        with _only(w, mine):
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
            if name is None:
                raise UnsupportedError("generic store to this space", access.at.line)
            with _only(w, mine):
                store_bytes(name, w, addresses[mine] & ((1 << 56) - 1), values[mine], access)
    else:
        raise UnsupportedError(f"store to .{space}", access.at.line)


def space_of(instr: Instruction) -> str:
    for word in instr.modifiers:
        root = word.split("::")[0]
        if root in ("shared", "global", "local", "param"):
            return root
        if root == "const":
            return "global"
    return "generic"


def acquire(w: Any, addresses: Offsets) -> None:
    table = w.machine.sync
    for address in addresses.tolist():
        entry = table.get(address)
        if entry is not None:
            cluster, clocks = entry
            if cluster is w.cta.cluster:
                w.acquire(clocks)
            else:
                w.known[0, 0] = 1  # another cluster's accesses are ordered from now on


def release(w: Any, addresses: Offsets) -> None:
    clocks = w.release()
    table, cluster = w.machine.sync, w.cta.cluster
    for address in addresses.tolist():
        entry = table.get(address)
        if entry is not None and entry[0] is cluster:
            clocks = np.maximum(clocks, entry[1])
        table[address] = (cluster, clocks)


def _ld(instr: Instruction, ctx: Context) -> Run:
    kind, space = type_of(instr), space_of(instr)
    count = next((int(m[1:]) for m in instr.modifiers if m in ("v2", "v4", "v8")), 1)
    if kind == "b128":
        return _ld128(instr, ctx)
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
            acquire(w, where)
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


def _wide_register(operand: Operand, instr: Instruction) -> int:
    """Slot of a .b128 register: [32, 2] 64-bit words."""
    if not isinstance(operand, Reg) or operand.type != "b128":
        raise UnsupportedError(instr.op, instr.line, "needs a .b128 register")
    return operand.slot


def _ld128(instr: Instruction, ctx: Context) -> Run:
    slot, space = _wide_register(instr.operands[0], instr), space_of(instr)
    address, strong = ctx.address(instr.operands[1], instr), bool(STRONG & set(instr.modifiers))
    counter, add = f"bytes.ld.{space}", ctx.machine.findings.count

    def run(w: Any) -> None:
        where = address(w)[w.mask]
        if strong:
            acquire(w, where)
        raw = load_bytes(space, w, where, 16, w.access(instr, strong))
        add(counter, raw.size)
        value = w.regs[slot].copy()
        value[w.mask] = np.ascontiguousarray(raw).view(np.uint64)
        w.regs[slot] = value

    return run


def _st128(instr: Instruction, ctx: Context) -> Run:
    slot, space = _wide_register(instr.operands[1], instr), space_of(instr)
    address, strong = ctx.address(instr.operands[0], instr), bool(STRONG & set(instr.modifiers))
    counter, add = f"bytes.st.{space}", ctx.machine.findings.count

    def run(w: Any) -> None:
        where = address(w)[w.mask]
        raw = np.ascontiguousarray(w.regs[slot][w.mask]).view(np.uint8)
        add(counter, raw.size)
        store_bytes(space, w, where, raw, w.access(instr, strong))
        if strong:
            release(w, where)

    return run


def _st_bulk(instr: Instruction, ctx: Context) -> Run:
    """st.bulk [a], size, 0: zeros to shared memory; address and size are multiples of 8 (9.7.9.13)."""
    address, size = ctx.address(instr.operands[0], instr), ctx.slot(instr.operands[1], np.uint64, instr)
    space, add = space_of(instr), ctx.machine.findings.count

    def run(w: Any) -> None:
        where = address(w)
        for lane in np.flatnonzero(w.mask).tolist():
            amount = int(w.regs[size][lane])
            if amount % 8:
                w.machine.findings.add("misaligned", f"st.bulk of {amount} bytes", instr, (w.name,))
            places = where[lane] + np.arange(0, amount // 8 * 8, 8, dtype=np.int64)
            if len(places):
                store_bytes(space, w, places, np.zeros((len(places), 8), np.uint8), w.access(instr))
                add(f"bytes.st.{space}", amount)

    return run


def _st(instr: Instruction, ctx: Context) -> Run:
    if "async" in instr.modifiers:
        from .cp_async import store_async

        return store_async(instr, ctx)
    if "bulk" in instr.modifiers:
        return _st_bulk(instr, ctx)
    kind, space = type_of(instr), space_of(instr)
    if kind == "b128":
        return _st128(instr, ctx)
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
            release(w, where)

    return run


def _nothing(instr: Instruction, ctx: Context) -> Run:
    """prefetch, discard, applypriority: no effect on values; the address is not checked."""
    return lambda w: None


TABLE = {
    "ld": _ld, "ldu": _ld, "st": _st, "prefetch": _nothing, "prefetchu": _nothing, "discard": _nothing,
    "applypriority": _nothing,
}  # fmt: skip

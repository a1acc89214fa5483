"""Tensor memory of a CTA: 128 lanes x 512 columns of 32 bits, its allocator and shadows (PTX ISA 9.7.17.1, 9.7.17.7).

Contract: addresses are `lane << 16 | column`. Allocation sizes are powers of two from 32 to 512 columns; sm_107 has 576
columns, all of which one `.exclusive` allocation gets (documentation of CuTe DSL). Columns that are not allocated may
not be touched; everything allocated must be freed before the CTA exits, nothing is allocated after the permit was given
up. Slabs of 16 lanes x 1 column are checked for initialisation and order; an access that is not ordered after a matrix
operation (a missing commit or wait) is a `race` with the matrix engine as other agent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._clocks import Access, Order
from ._schedule import Wait

__all__ = ["COLUMNS", "ROWS", "TensorMemory"]

ROWS, COLUMNS = 128, 512  # COLUMNS: that allocations share
EXCLUSIVE_COLUMNS = {"sm_107": 576}


class TensorMemory:
    def __init__(self, cta: Any) -> None:
        machine = cta.machine
        self.cta, self.findings = cta, machine.findings
        self.columns = EXCLUSIVE_COLUMNS.get(machine.module.target[:6], COLUMNS)
        self.name = f"cta {cta.rank} tensor memory"
        self.data: Any = np.zeros((ROWS, self.columns), np.uint32)
        self.init: Any = np.zeros(ROWS // 16 * self.columns, np.bool_)
        self._last: tuple[Any, list[int]] = (None, [])
        self.order = Order(
            ROWS // 16 * self.columns, machine.events, cta.cluster.agents, machine.findings, self.name, "race"
        )
        self.allocated: Any = np.zeros(self.columns, np.bool_)
        self.blocks: dict[int, int] = {}
        self.permit = True
        self.group = 0
        self.exclusive = False
        self.allocations = 0

    def allocate(self, columns: int, group: int, exclusive: bool, warp: Any, at: Any) -> int | Wait:
        """Start column, or what to wait for when no block is free."""

        def add(message: str) -> None:
            self.findings.add("tensor_memory", message, at, (warp.name,), key=message)

        if exclusive and self.columns == COLUMNS:
            add("an exclusive allocation, which this architecture does not have")
        whole = exclusive and columns == self.columns
        if not whole and (columns < 32 or columns > COLUMNS or columns & (columns - 1)):
            add(f"allocation of {columns} columns: must be a power of two in 32..512")
            columns = min(max(32, 1 << max(columns - 1, 1).bit_length()), COLUMNS)
        if not self.permit:
            add("allocation after the permit was relinquished")
        if self.group not in (0, group):
            add(f"cta_group::{group} allocation in a CTA that used cta_group::{self.group}")
        self.group = group
        starts = (0,) if exclusive else range(0, COLUMNS - columns + 1, columns)

        def free() -> list[int]:
            if self.exclusive or (exclusive and self.blocks):
                return []
            return [start for start in starts if not self.allocated[start : start + columns].any()]

        for start in free()[:1]:
            self.allocated[start : start + columns] = True
            self.init.reshape(-1, self.columns)[:, start : start + columns] = False
            self.blocks[start], self.exclusive = columns, exclusive
            return start
        return Wait(lambda: bool(free()), lambda: f"{columns} free columns of {self.name}")

    def free(self, address: int, columns: int, exclusive: bool, warp: Any, at: Any) -> None:
        start = address & 0xFFFF
        if self.blocks.get(start) != columns:
            held = ", ".join(f"{n} at {s}" for s, n in self.blocks.items()) or "nothing"
            self.findings.add("tensor_memory", f"deallocation of {columns} columns at {start}; allocated: {held}",
                              at, (warp.name,))  # fmt: skip
            return
        if exclusive != self.exclusive:
            words = ("", ".exclusive")
            message = f"dealloc{words[exclusive]} of what alloc{words[self.exclusive]} gave"
            self.findings.add("tensor_memory", message, at, (warp.name,))
        # whatever still uses the columns must be ordered before their deallocation
        self.check(tuple(range(8)), start, columns, warp.access(at), True, warp.name)
        del self.blocks[start]
        self.exclusive = False
        self.allocated[start : start + columns] = False

    def check_exit(self) -> None:
        if self.blocks:
            held = ", ".join(f"{n} columns at {s}" for s, n in self.blocks.items())
            self.findings.add("tensor_memory", f"{self.name} not freed at exit: {held}", None, (), key=self.cta.rank)

    def check(self, lanes: tuple[int, ...], start: int, columns: int, access: Access, writes: bool, who: str,
              reads: bool = False) -> bool:  # fmt: skip
        """Check an access to `columns` columns from `start` of the 16-lane slabs `lanes`; False if it must not happen.

        `reads` with `writes` is an accumulation. Repeats of one engine on the same cells only move its clock on.
        """
        if start < 0 or start + columns > self.columns:
            self.findings.add(
                "out_of_bounds", f"columns {start}..{start + columns - 1} of {self.name}", access.at, (who,)
            )
            return False
        key = (access.agent, lanes, start, columns, writes, reads)
        events = self.order.events
        if key == self._last[0]:
            for event in self._last[1]:
                events.clock[event], events.at[event] = access.clock, access.at
            for agent in {access.agent} & self.order.latest.keys():
                self.order.latest[agent] = access.clock
            return True
        if not self.allocated[start : start + columns].all():
            bad = start + int(np.argmin(self.allocated[start : start + columns]))
            self.findings.add("tensor_memory", f"column {bad} of {self.name} is not allocated", access.at, (who,))
        cells = (np.array(lanes)[:, None] * self.columns + np.arange(start, start + columns)).reshape(-1)
        made = []
        if reads or not writes:
            known = self.init[cells]
            if not known.all():
                bad = int(cells[np.argmin(known)])
                self.findings.add("uninitialised", f"read of {self.name} lane {bad // self.columns * 16} column "
                                  f"{bad % self.columns}, "
                                  "which nothing wrote", access.at, (who,))  # fmt: skip
            self.order.read(access, cells, 1)
            made.append(len(events.at) - 1)
        if writes:
            self.init[cells] = True
            self.order.write(access, cells, 1)
            made.append(len(events.at) - 1)
        self._last = (key, made)
        return True

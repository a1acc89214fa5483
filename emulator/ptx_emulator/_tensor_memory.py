"""Tensor memory of a CTA: 128 lanes x 512 columns of 32 bits, its allocator and shadows (PTX ISA 9.7.17.1, 9.7.17.7).

Contract: addresses are `lane << 16 | column`. Allocation sizes are powers of two from 32 to 512 columns; columns that
are not allocated may not be touched; everything allocated must be freed before the CTA exits, nothing is allocated
after the permit was given up. Slabs of 16 lanes x 1 column are checked for initialisation and order; an access that
is not ordered after a matrix operation (a missing commit or wait) is a `race` with the matrix engine as other agent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._clocks import Access, Order
from ._schedule import Wait

__all__ = ["COLUMNS", "ROWS", "TensorMemory"]

ROWS, COLUMNS = 128, 512


class TensorMemory:
    def __init__(self, cta: Any) -> None:
        machine = cta.machine
        self.cta, self.findings = cta, machine.findings
        self.name = f"cta {cta.rank} tensor memory"
        self.data: Any = np.zeros((ROWS, COLUMNS), np.uint32)
        self.init: Any = np.zeros(ROWS // 16 * COLUMNS, np.bool_)
        self._last: tuple[Any, list[int]] = (None, [])
        self.order = Order(
            ROWS // 16 * COLUMNS, machine.events, cta.cluster.agents, machine.findings, self.name, "race"
        )
        self.allocated: Any = np.zeros(COLUMNS, np.bool_)
        self.blocks: dict[int, int] = {}
        self.permit = True
        self.group = 0
        self.allocations = 0

    def allocate(self, columns: int, group: int, warp: Any, at: Any) -> int | Wait:
        """Start column, or what to wait for when no block is free."""

        def add(message: str) -> None:
            self.findings.add("tensor_memory", message, at, (warp.name,), key=message)

        if columns < 32 or columns > COLUMNS or columns & (columns - 1):
            add(f"allocation of {columns} columns: must be a power of two in 32..512")
            columns = min(max(32, 1 << max(columns - 1, 1).bit_length()), COLUMNS)
        if not self.permit:
            add("allocation after the permit was relinquished")
        if self.group not in (0, group):
            add(f"cta_group::{group} allocation in a CTA that used cta_group::{self.group}")
        self.group = group
        for start in range(0, COLUMNS - columns + 1, columns):
            if not self.allocated[start : start + columns].any():
                self.allocated[start : start + columns] = True
                self.init.reshape(-1, COLUMNS)[:, start : start + columns] = False
                self.blocks[start] = columns
                return start
        return Wait(lambda: any(not self.allocated[s : s + columns].any() for s in range(0, COLUMNS, columns)),
                    lambda: f"{columns} free columns of {self.name}")  # fmt: skip

    def free(self, address: int, columns: int, warp: Any, at: Any) -> None:
        start = address & 0xFFFF
        if self.blocks.get(start) != columns:
            held = ", ".join(f"{n} at {s}" for s, n in self.blocks.items()) or "nothing"
            self.findings.add("tensor_memory", f"deallocation of {columns} columns at {start}; allocated: {held}",
                              at, (warp.name,))  # fmt: skip
            return
        # whatever still uses the columns must be ordered before their deallocation
        self.check(tuple(range(8)), start, columns, warp.access(at), True, warp.name)
        del self.blocks[start]
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
        if start < 0 or start + columns > COLUMNS:
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
        cells = (np.array(lanes)[:, None] * COLUMNS + np.arange(start, start + columns)).reshape(-1)
        made = []
        if reads or not writes:
            known = self.init[cells]
            if not known.all():
                bad = int(cells[np.argmin(known)])
                self.findings.add("uninitialised", f"read of {self.name} lane {bad // COLUMNS * 16} column {bad % COLUMNS}, "
                                  "which nothing wrote", access.at, (who,))  # fmt: skip
            self.order.read(access, cells, 1)
            made.append(len(events.at) - 1)
        if writes:
            self.init[cells] = True
            self.order.write(access, cells, 1)
            made.append(len(events.at) - 1)
        self._last = (key, made)
        return True

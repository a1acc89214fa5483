"""Which launches of a host function may run at the same time, and whether they touch the same bytes.

Contract: launches are executed one after another, so what may overlap is derived (PTX ISA 9.7.13.13 "griddepcontrol"):
- a launch without programmatic stream serialization begins when all launches before it are complete;
- one with it, a *programmatic* one, may begin when each CTA of the launch before has executed launch_dependents or is over;
- wait returns when the launch before is complete, and no launch is complete before a wait of its own has returned.
An `Overlap` is a launch in this chain. The first has the surroundings before it: unknown launches, taken for one that uses
all bytes. A `Beside` holds the accesses to one region against those of the launches that may still run; what these have
read and written is kept by the byte. A launch that is complete counts as visible, waited for or not. Imported by
`_grid` and `_child`, which make launches, and `_memory`, which holds the regions.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from ._clocks import BEFORE, Access, Agents
from ._findings import Findings

__all__ = ["Beside", "Overlap"]

_ONES: dict[Any, int] = {np.uint8: 0x01, np.uint16: 0x0101, np.uint32: 0x01010101}


class Touched:
    """Which bytes of one region a launch has read, and which it has written: 1 for each."""

    def __init__(self, size: int) -> None:
        self.read: Any = np.zeros(size, np.uint8)
        self.written: Any = np.zeros(size, np.uint8)

    def conflict(self, word: Any, where: Any, writes: bool) -> tuple[str, int] | None:
        """How the launch uses the first of these words that an access may not share with it, and its number among them."""
        for use, table in (("write", self.written), ("read", self.read))[: 1 + writes]:
            hit = table.view(word)[where].reshape(-1) != 0
            if hit.any():
                return use, int(hit.argmax())
        return None

    def add(self, word: Any, where: Any, writes: bool) -> None:
        (self.written if writes else self.read).view(word)[where] = _ONES[word]


Others: TypeAlias = "list[tuple[Overlap, Touched | None]]"


class Overlap:
    """One launch, as the launches after it see it; made with no arguments, the surroundings of a host function.

    `before` and `after`: the launches that may still run before its griddepcontrol.wait, and after it, last ones first.
    `kept`: what it touches is recorded, since a later launch may run beside it; else it is taken to touch all bytes.
    """

    def __init__(self, name: str = "a launch before", before: tuple[Overlap, ...] = (), after: tuple[Overlap, ...] = (),
                 kept: bool = False) -> None:  # fmt: skip
        self.name, self.before, self.after, self.kept = name, before, after, kept
        self.touched: dict[int, Touched] = {}  # by address of the region
        self._waited = self._early = False

    def follow(self, name: str, programmatic: bool, kept: bool = False) -> Overlap:
        """The next launch, once this one has been executed. It is taken to begin before what this one waits for is over
        if a single CTA triggers before its wait."""
        if not programmatic:
            return Overlap(name, kept=kept)
        begins = self.after if self._waited and not self._early else self.before
        return Overlap(name, (self, *begins), self.after if self._waited else self.before, kept)

    def wait(self) -> None:
        """A thread executes griddepcontrol.wait."""
        self._waited = True

    def trigger(self, waited: bool) -> None:
        """A CTA triggers the next launch, or ends. `waited`: that is ordered after a wait."""
        self._early |= not waited

    def beside(self, address: int, size: int, name: str, findings: Findings) -> Beside | None:
        """The check of a region of this launch; None where nothing may run at the same time."""
        own = Touched(size) if self.kept else None
        if own is not None:
            self.touched[address] = own
        elif not self.before and not self.after:
            return None
        before, after = ([(o, o.touched.get(address)) for o in others] for others in (self.before, self.after))
        return Beside(name, before, after, own, findings)


class Beside:
    """Checks the accesses of a launch to one region, and records them in `own`."""

    def __init__(self, name: str, before: Others, after: Others, own: Touched | None, findings: Findings) -> None:
        self.name, self.findings = name, findings
        self._before, self._after, self._own = before, after, own

    def touch(self, access: Access, word: Any, where: Any, writes: bool, agents: Agents) -> None:
        """An access to the words `where` (an index array or a slice) of the unsigned type `word`."""
        waited = bool(access.known[0, BEFORE])
        for other, touched in self._after if waited else self._before:
            found = ("use", 0) if touched is None else touched.conflict(word, where, writes)
            if found is not None:
                use, number = found
                first = where.start + number if isinstance(where, slice) else where.reshape(-1)[number]
                place = f"{'write' if writes else 'read'} of {self.name} +{int(first) * word().itemsize:#x}"
                message = f"{place} is not ordered after a griddepcontrol.wait: {other.name} may still {use} it"
                if waited:
                    message = (f"{place} after the griddepcontrol.wait: {other.name} may still {use} it, since a launch between "
                               "ends without a wait")  # fmt: skip
                self.findings.add("dependent_launch", message, access.at, (agents.name(access.agent),), key=other.name)
                break
        if self._own is not None:
            self._own.add(word, where, writes)

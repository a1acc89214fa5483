"""What a run reports: findings of a closed list of kinds, counts, errors and the device limits they are judged by.

Contract: a *finding* is a defect of the kernel under test, a raised `EmulationError` is something that this package
cannot execute. `UnsupportedError` names the instruction and its line: an instruction is never skipped. Imported by
every other module of the package; imports none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

__all__ = ["KINDS", "EmulationError", "Finding", "FindingError", "Findings", "Limits", "Report", "UnsupportedError"]

KINDS: dict[str, str] = {
    "uninitialised": "read of shared, tensor or global memory that nothing wrote",
    "out_of_bounds": "address outside every allocation, shared window, tensor memory or parameter",
    "misaligned": "address that is not a multiple of the access size or of the alignment the instruction requires",
    "mbarrier": "mbarrier misuse: not initialised, initialised while live, more arrivals than expected, bad count",
    "transaction_bytes": "bytes expected by an mbarrier phase differ from the bytes that completed in it",
    "deadlock": "no warp can run and no asynchronous operation is left; the message says who waits for what",
    "proxy_fence": "generic-proxy write read through the async proxy with no fence.proxy.async in between",
    "race": "two accesses, one of them a write, with no ordering between their agents",
    "tensor_memory": "tensor memory misuse: allocation, deallocation, permit, lane restriction, not freed at exit",
    "uncommitted": "registers of wgmma or tcgen05.ld used before the wait that completes it, or without wgmma.fence",
    "descriptor": "illegal matrix, instruction or tensor-map descriptor, or one that does not match the instruction",
    "exit_pending": "exit with asynchronous operations whose completion nobody waited for",
    "dependent_launch": "global memory accessed by a programmatic launch while one before it may still use the same bytes",
    "divergence": "an .aligned or .sync instruction executed by a part of the warp that it requires",
    "assertion": "a failed assertion of the kernel, or an executed trap",
    "limits": "grid, cluster, block, shared memory or registers beyond the limits of the device",
}


class EmulationError(RuntimeError):
    """The run cannot continue: malformed PTX, wrong arguments or an instruction that is not covered."""


class UnsupportedError(EmulationError):
    """An instruction form that the emulator does not execute; carries the opcode and its PTX line."""

    def __init__(self, op: str, line: int = 0, detail: str = "") -> None:
        self.op, self.line = op, line
        where = f" (PTX line {line})" if line else ""
        super().__init__(f"not covered: {op}{where}{': ' + detail if detail else ''}")


class Finding(NamedTuple):
    """One defect: its kind (a key of `KINDS`), where it was seen and which agents take part."""

    kind: str
    message: str
    ptx_line: int
    source: str
    agents: tuple[str, ...]
    seed: int

    def __str__(self) -> str:
        where = f"PTX line {self.ptx_line}" + (f" ({self.source})" if self.source else "")
        return f"[{self.kind}] {self.message} at {where}; agents: {', '.join(self.agents)}; seed {self.seed}"


class FindingError(EmulationError):
    """Raised at the first finding of a run with check="raise"."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(str(finding))


class Report(NamedTuple):
    """Findings in the order of their first sight, and counts: instructions by class, bytes by path, repeats by kind."""

    findings: tuple[Finding, ...]
    counts: Mapping[str, int]


class Located(Protocol):
    """What a finding needs of an instruction."""

    line: int

    @property
    def source(self) -> str: ...


class Findings:
    """Collects findings; the same kind at the same place between the same places is one finding with a count.

    `strict` is for the detectors that depend on it.
    """

    def __init__(self, seed: int, check: str, strict: bool = False) -> None:
        if check not in ("report", "raise"):
            raise ValueError(f'check must be "report" or "raise", not {check!r}')
        self.seed, self.check, self.strict = seed, check, strict
        self.counts: dict[str, int] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._found: list[Finding] = []

    def add(self, kind: str, message: str, at: Located | None, agents: tuple[str, ...], key: Any = None) -> None:
        """Record a finding; `key` distinguishes several defects of one kind at one instruction."""
        assert kind in KINDS, kind
        self.counts["findings." + kind] = self.counts.get("findings." + kind, 0) + 1
        line = at.line if at is not None else 0
        if (kind, line, key) in self._seen:
            return
        self._seen.add((kind, line, key))
        finding = Finding(kind, message, line, at.source if at is not None else "", agents, self.seed)
        self._found.append(finding)
        if self.check == "raise":
            raise FindingError(finding)

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount

    def report(self) -> Report:
        return Report(tuple(self._found), dict(sorted(self.counts.items())))


@dataclass(frozen=True)
class Limits:
    """Launch limits of a device. CUDA C++ Programming Guide, technical specifications per compute capability."""

    shared_per_block: int = 232448
    static_shared: int = 49152
    threads_per_block: int = 1024
    cluster_size: int = 16
    grid_x: int = 2**31 - 1
    grid_yz: int = 65535
    tensor_columns: int = 512
    registers_per_block: int = 65536

    @classmethod
    def of(cls, target: str, overrides: Mapping[str, Any] | Limits | None = None) -> Limits:
        """Limits of a `.target` such as "sm_100a", with the values of `overrides` where it has them."""
        if isinstance(overrides, Limits):
            return overrides
        digits = "".join(c for c in target.removeprefix("sm_") if c.isdigit())
        arch = int(digits or 0)
        values: dict[str, int] = {}
        if arch >= 107 and arch < 110:
            values["shared_per_block"] = 327 * 1024  # what CuTe DSL 4.8.1 lets a kernel ask for
        elif arch >= 120:
            values.update(shared_per_block=101376, cluster_size=1, tensor_columns=0)
        elif 80 <= arch < 90:
            values.update(shared_per_block=166912 if arch == 80 else 101376, cluster_size=1, tensor_columns=0)
        elif 90 <= arch < 100:
            values["tensor_columns"] = 0
        known = {f.name for f in fields(cls)}
        for name, value in (overrides or {}).items():
            if name not in known:
                raise EmulationError(f"no limit is called {name!r}: {', '.join(sorted(known))}")
            if value is not None:
                values[name] = int(value)
        return cls(**values)

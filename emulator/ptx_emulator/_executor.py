"""The executor "emulator" of cudnn-core: runs the host objects and the PTX of a plan's artifacts.

Contract (docs/command-line.md, "Executors"): `executor(plan, pack, workspace, **options)` with host addresses; it returns when the
outputs are written, and raises when the run has findings: `cudnn-core run --executor emulator` then says so and exits
with 1. The arguments of a host function are `plan.host_arguments(artifact, pack, workspace)`, each what `launch` takes for
an exported object, a plain one or one for TVM-FFI. Imported through the entry point only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ._arena import Arena
from ._findings import EmulationError, Report
from ._launch import Subject, pack_arguments, run_host

__all__ = ["FoundError", "executor", "summary"]

_SHOWN = 10


class FoundError(EmulationError):
    """The kernels ran, and the report has findings."""

    def __init__(self, report: Report) -> None:
        self.report = report
        shown = "\n".join(f"  {finding}" for finding in report.findings[:_SHOWN])
        more = f"\n  and {len(report.findings) - _SHOWN} more" if len(report.findings) > _SHOWN else ""
        super().__init__(f"{len(report.findings)} finding(s):\n{shown}{more}")


def executor(
    plan: Any,
    pack: Any,
    workspace: int,
    *,
    seed: int = 0,
    schedule: Literal["late", "eager", "random"] = "late",
    strict: bool = False,
    timeout: float = 600.0,
) -> None:
    """Run the plan's artifacts on the operands of `pack`; the options are those of `launch`."""
    counts: dict[str, int] = {}
    findings: list[Any] = []
    for artifact, subject in _subjects(plan):
        arena = Arena()
        try:
            for operand, pointer in zip(pack.operands, pack.pointers, strict=True):
                if not operand.by_value:
                    arena.add(pointer, _extent(operand), _label(operand),
                              fresh=operand.role == "output", writable=operand.role != "input")  # fmt: skip
            arena.add(workspace, plan.workspace_size, "workspace", fresh=True)  # none: an address where nothing is
            packed = pack_arguments(subject, plan.host_arguments(artifact, pack, workspace), arena)
            report = run_host(subject, packed, arena, seed=seed, schedule=schedule, strict=strict, limits=plan.device,
                              timeout=timeout)  # fmt: skip
        finally:
            arena.close()
        findings += report.findings
        for name, amount in report.counts.items():
            counts[name] = counts.get(name, 0) + amount
    report = Report(tuple(findings), counts)
    sys.stderr.write(summary(report) + "\n")
    if report.findings:
        raise FoundError(report)


# Opcodes by class; what is in none of them computes.
CLASSES = {
    "tensor core": ("mma", "tcgen05", "wgmma"),
    "copy": ("clusterlaunchcontrol", "cp", "mapa", "prefetch", "tensormap"),
    "memory": ("atom", "ld", "ldmatrix", "red", "st", "stmatrix"),
    "synchronisation": ("activemask", "bar", "barrier", "elect", "fence", "griddepcontrol", "mbarrier", "membar",
                        "nanosleep", "setmaxnreg", "shfl", "vote"),
    "control": ("bra", "brx", "call", "exit", "ret"),
}  # fmt: skip
_CLASS_OF = {name: group for group, names in CLASSES.items() for name in names}


def by_class(counts: Mapping[str, int]) -> dict[str, int]:
    """Warp instructions by class, most first, of a report's counts."""
    found: dict[str, int] = {}
    for name, count in counts.items():
        if name.startswith("instructions."):
            group = _CLASS_OF.get(name.removeprefix("instructions.").partition(".")[0], "arithmetic")
            found[group] = found.get(group, 0) + count
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def summary(report: Report) -> str:
    """Three lines: launches and findings, instructions by class, bytes by path."""
    counts = report.counts

    def listed(prefix: str) -> str:
        found = {n.removeprefix(prefix): c for n, c in counts.items() if n.startswith(prefix)}
        return ", ".join(f"{n} {c:,}" for n, c in sorted(found.items(), key=lambda item: (-item[1], item[0]))) or "none"

    classes = ", ".join(f"{name} {count:,}" for name, count in by_class(counts).items())
    return (
        f"emulator: {counts.get('launches', 0)} launch(es), {len(report.findings)} finding(s)\n"
        f"warp instructions: {counts.get('instructions', 0):,}: {classes or 'none'}\n"
        f"bytes moved: {listed('bytes.')}"
    )


def _subjects(plan: Any) -> Iterator[tuple[Any, Subject]]:
    """One subject for each different host object, with the PTX of all artifacts that share it."""
    texts: dict[bytes, list[str]] = {}
    owner: dict[bytes, Any] = {}
    for artifact in plan.artifacts:
        if artifact.object:
            owner.setdefault(artifact.object, artifact)
            listed = texts.setdefault(artifact.object, [])
            if artifact.ptx and artifact.ptx not in listed:
                listed.append(artifact.ptx)
    if not owner:
        raise EmulationError(f"engine {plan.engine} gives no artifact with a host object: it compiles no kernel that the "
                             "emulator could run")  # fmt: skip
    for raw, artifact in owner.items():
        if not texts[raw]:
            raise EmulationError(f"artifact {artifact.name} of engine {plan.engine} has no PTX")
        yield artifact, Subject.of(raw, texts[raw])


def _extent(operand: Any) -> int:
    """Bytes from the first to past the last element."""
    from cudnn_core import nbytes

    if 0 in operand.dim:
        return 0
    return int(nbytes(operand.dtype, 1 + sum((n - 1) * s for n, s in zip(operand.dim, operand.stride, strict=True))))


def _label(operand: Any) -> str:
    return f"operand {operand.name or operand.uid}"

"""Timing and reporting that every benchmark here shares.

``medians`` times callables in one process, interleaved, so that a slow phase of the machine hits every one of them;
``Report`` collects rows, prints a table and writes the JSON lines (one object a line: ``case, unit, ours, peer,
peer_name, ratio, error, machine, versions``, and ``budget, gate, ok`` where there is a budget).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["ROOT", "Report", "Row", "child", "finish", "machine", "medians", "options", "quietest", "versions"]

ROOT = Path(__file__).resolve().parents[1]
_QUIET = 1.03  # a round is quiet if no callable took longer than this times its best
_DISTS = ("cudnn-core", "cudnn-core-emulator", "torch", "numpy", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "fla-core",
          "triton", "flash-qla", "flash_qla", "tilelang", "flash-kda", "flash_kda")  # fmt: skip


class Row(NamedTuple):
    """One measurement.

    ours, peer  in ``unit``; peer_name says what the peer is
    error       of the result against the reference (for a launch that computes nothing: wrong addresses); None: no result
    budget      of what ``gate`` names: "ours", "ratio" (ours / peer) or "difference" (ours - peer)
    """

    case: str
    unit: str
    ours: float
    peer: float | None = None
    peer_name: str = ""
    error: float | None = None
    budget: float | None = None
    gate: str = "ours"

    @property
    def ratio(self) -> float | None:
        return self.ours / self.peer if self.peer else None

    @property
    def gated(self) -> float | None:
        """The number that the budget is for."""
        if self.gate == "ratio":
            return self.ratio
        return self.ours if self.gate == "ours" or self.peer is None else self.ours - self.peer

    @property
    def ok(self) -> bool | None:
        if self.error:
            return False
        return None if self.budget is None or self.gated is None else self.gated <= self.budget


class Report:
    """Rows, printed as they come. ``quick`` asks the cases for a tenth of the effort, and less trustworthy numbers.

    state    a digest of the sources that are measured, or nothing
    """

    def __init__(self, *, table: bool = True, quick: bool = False, state: str = "") -> None:
        self.rows: list[Row] = []
        self.quick = quick
        self._table = table
        self._machine = machine()
        self._versions = versions()
        self._state = state

    def medians(self, calls: Mapping[str, Callable[[], object]], **options: Any) -> dict[str, float]:
        """``medians`` with the effort that was asked for."""
        return medians(calls, **({"rounds": 1, "most": 16, **options} if self.quick else options))

    def section(self, title: str) -> None:
        if self._table:
            print(
                f"\n{title}\n{'':4} {'case':62} {'ours':>10} {'peer':>10} {'unit':5} {'ratio':>6}  {'budget':14} peer"
            )

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self._table:
            print(_line(row), flush=True)

    def note(self, text: str) -> None:
        print(f"     {text}", file=sys.stdout if self._table else sys.stderr, flush=True)

    @property
    def missed(self) -> list[Row]:
        return [row for row in self.rows if row.ok is False]

    @property
    def identity(self) -> dict[str, Any]:
        """What all rows of a run share."""
        return {"machine": self._machine, "versions": self._versions, **({"state": self._state} if self._state else {})}

    def records(self) -> list[dict[str, Any]]:
        return [self._record(row) for row in self.rows]

    def json_lines(self) -> str:
        return "".join(json.dumps(record) + "\n" for record in self.records())

    def _record(self, row: Row) -> dict[str, Any]:
        record: dict[str, Any] = {
            "case": row.case,
            "unit": row.unit,
            "ours": _rounded(row.ours),
            "peer": _rounded(row.peer),
            "peer_name": row.peer_name or None,
            "ratio": _rounded(row.ratio),
            "error": row.error,
            **self.identity,
        }
        if row.budget is not None:
            record |= {"budget": row.budget, "gate": row.gate, "ok": row.ok}
        return record


def medians(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 5,
    rounds: int = 8,
    most: int = 60,
    seconds: float = 0.005,
) -> dict[str, float]:
    """Nanoseconds a call takes, for each of ``calls``: medians of ``repeats`` samples, in the quietest of the rounds.

    One sample runs a callable for about ``seconds``. Samples of all callables are interleaved, and all numbers are of one
    round, so that a ratio is never made of a quiet phase of the machine and a busy one. There are ``rounds`` of them, and on
    a busy machine more, up to ``most``, until one shows nearly the best time of every callable.
    """
    loops = {name: _loops(call, seconds) for name, call in calls.items()}
    found: list[dict[str, float]] = []
    enabled = gc.isenabled()
    gc.disable()
    try:
        while len(found) < rounds or (len(found) < max(rounds, most) and quietest(found)[1] > _QUIET):
            samples: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(repeats):
                for name, call in calls.items():
                    samples[name].append(_sample(call, loops[name]))
            found.append({name: statistics.median(values) for name, values in samples.items()})
            gc.collect()
    finally:
        if enabled:
            gc.enable()
    return quietest(found)[0]


def quietest(rounds: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], float]:
    """The round whose times are the nearest to the best of each, and by how much it is above them (1: not at all)."""
    least = {name: min(one[name] for one in rounds) for name in rounds[0]}
    above = [max(one[name] / least[name] for name in one) for one in rounds]
    best = min(range(len(rounds)), key=above.__getitem__)
    return dict(rounds[best]), above[best]


def _sample(call: Callable[[], object], loops: int) -> float:
    turns = range(loops)
    call()
    start = time.perf_counter_ns()
    for _ in turns:
        call()
    return (time.perf_counter_ns() - start) / loops


def _loops(call: Callable[[], object], seconds: float) -> int:
    """How often ``call`` runs in ``seconds``; warms it up on the way."""
    loops = 1
    while True:
        took = _sample(call, loops) * loops
        if took > seconds * 1e8 or loops >= 1 << 20:  # a tenth of the time is enough for an estimate
            return max(1, min(1 << 20, int(loops * seconds * 1e9 / took)))
        loops *= 4


def child(code: str, *, path: Sequence[str | Path] = (), site: bool = True) -> Any:
    """What ``code`` prints as JSON in a fresh interpreter, ``path`` before everything on its ``sys.path`` but the core.

    Without ``site`` the interpreter is bare: no site-packages, and none of the modules that their .pth files import.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CUDNN_CORE_")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling sources anew at each start is nobody's deployment
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *map(str, path)])
    done = subprocess.run(
        [sys.executable, *([] if site else ["-S"]), "-c", code],
        env=environ,
        cwd=os.sep,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the measured interpreter failed:\n{done.stderr}")
    return json.loads(done.stdout)


def machine() -> str:
    """Processor, usable cores, GPUs if torch sees some."""
    name = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        name = next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch = sys.modules.get("torch")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch else []
    return ", ".join([f"{name}, {cores} cores", *gpus])


def versions() -> dict[str, str]:
    """Of the interpreter, and of what is installed of the packages that matter here."""
    from importlib.metadata import distributions

    found = {dist.metadata["Name"]: dist.version for dist in distributions() if dist.metadata["Name"] in _DISTS}
    return {"python": platform.python_version(), **found}


def options(description: str) -> argparse.ArgumentParser:
    """The command line that every benchmark has; a benchmark adds its own options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="JSON lines; without FILE, on stdout alone"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a budget is missed")
    parser.add_argument("--quick", action="store_true", help="a tenth of the effort")
    return parser


def finish(report: Report, args: argparse.Namespace, written: bool = False) -> int:
    """Write what ``args`` ask for, unless the file has been ``written``; the exit status."""
    if args.json == "-":
        sys.stdout.write(report.json_lines())
    elif args.json and not written:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(report.json_lines(), encoding="utf-8")
    gated = sum(row.ok is not None for row in report.rows)
    report.note("")
    report.note(f"{gated - len(report.missed)} of {gated} budgets kept on {report._machine}")
    for row in report.missed:
        report.note(f"missed: {row.case}")
    return 1 if args.check and report.missed else 0


def _line(row: Row) -> str:
    mark = {True: "ok", False: "MISS", None: ""}[row.ok]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    budget = "" if row.budget is None else f"{'' if row.gate == 'ours' else row.gate + ' '}<= {row.budget:g}"
    wrong = f"  error {row.error:g}" if row.error else ""
    return (
        f"{mark:4} {row.case:62} {_number(row.ours):>10} {_number(row.peer):>10} {row.unit:5} {ratio:>6}  {budget:14}"
        f" {row.peer_name}{wrong}"
    ).rstrip()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")

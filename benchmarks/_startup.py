"""Start-up cases of host_overhead.py: the import, and discovery. Everything here is measured in fresh interpreters."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._harness import Report, Row, child

__all__ = ["discovery", "imports"]

_MODULES = """
import json, sys
before = set(sys.modules)
import cudnn_core
print(json.dumps(sorted(set(sys.modules) - before)))
"""
_TIMED = """
import json, sys, time
start = time.perf_counter_ns()
{statement}
took = time.perf_counter_ns() - start
print(json.dumps(took / 1e6))
"""
# Peak memory is VmHWM, the peak of this process' resident set. Not ru_maxrss: that of the parent survives into the child.
_PEAK = """
import json, sys
{statement}
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(json.dumps(peak / 1024))
"""
_PEAK_TRACED = """
import json, sys, tracemalloc
tracemalloc.start()
{statement}
print(json.dumps(tracemalloc.get_traced_memory()[1] / 2**20))
"""
_REGISTRY = "import cudnn_core; found = cudnn_core.registry().engines; assert len(found) >= {engines}, len(found)"
_ENTRY_POINTS = (
    "import importlib.metadata as metadata; found = metadata.entry_points(group='cudnn_core.engines');"
    " assert len(found) >= {plugins}, len(found)"
)


def imports(report: Report) -> None:
    report.section("Import of the package, in a fresh interpreter")
    times = _medians(report, {"import": _TIMED.format(statement="import cudnn_core")}, turns=15)
    report.add(Row("import cudnn_core", "ms", times["import"], budget=10))
    peak = _PEAK if Path("/proc/self/status").exists() else _PEAK_TRACED
    used = _medians(
        report, {"bare": peak.format(statement=""), "ours": peak.format(statement="import cudnn_core")}, turns=9
    )
    case = "peak memory (RSS) of the import" if peak is _PEAK else "peak memory (traced) of the import"
    report.add(Row(case, "MiB", used["ours"], used["bare"], "the bare interpreter", budget=5, gate="difference"))
    gained = [name for name in child(_MODULES) if name.partition(".")[0] != "cudnn_core"]
    report.add(Row("modules of others that the import loads", "", len(gained), budget=0))
    if gained:
        report.note(", ".join(gained))
    first = "import cudnn_core; cudnn_core.Graph(io_data_type='float32')"
    report.add(
        Row("import and the first Graph", "ms", _medians(report, {"x": _TIMED.format(statement=first)}, turns=5)["x"])
    )


def discovery(report: Report) -> None:
    from tests.zoo._make import write_many

    report.section("Discovery: the import, and the first registry() of a process, manifests parsed")
    peer_name = "importlib.metadata.entry_points(), no manifest"
    for plugins, others, budget in ((0, 0, None), (100, 0, None), (100, 900, 80)):
        with tempfile.TemporaryDirectory() as folder:
            write_many(Path(folder), plugins, others)
            codes = {
                "ours": _TIMED.format(statement=_REGISTRY.format(engines=3 * plugins)),
                "peer": _TIMED.format(statement=_ENTRY_POINTS.format(plugins=plugins)),
            }
            found = _medians(report, codes, turns=7, path=[folder])
        case = f"registry(), {plugins} more plugins among {plugins + others} dists"
        report.add(Row(case, "ms", found["ours"], found["peer"], peer_name, budget=budget))


def _medians(report: Report, codes: dict[str, str], *, turns: int, **options: Any) -> dict[str, float]:
    """The median of what each of ``codes`` prints, interleaved; the first turn (cold files, no bytecode) does not count."""
    samples: dict[str, list[float]] = {name: [] for name in codes}
    for turn in range((2 if report.quick else turns) + 1):
        for name, code in codes.items():
            value = child(code, **options)
            if turn:
                samples[name].append(value)
    return {name: statistics.median(values) for name, values in samples.items()}

"""Start-up cases of host_overhead.py: the import, and discovery. Everything here is measured in fresh interpreters."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._harness import Report, Row, child, quietest

__all__ = ["discovery", "imports"]

# The children import json last: it brings modules that the measured import may need.
_MODULES = """
import sys
before = set(sys.modules)
import cudnn_core
gained = sorted(set(sys.modules) - before)
import json
print(json.dumps(gained))
"""
_TIMED = """
{before}
import time
start = time.perf_counter_ns()
{statement}
print((time.perf_counter_ns() - start) / 1e6)
"""
# Peak memory is VmHWM, the peak of this process' resident set. Not ru_maxrss: that of the parent survives into the child.
_PEAK = """
{statement}
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(peak / 1024)
"""
_PEAK_TRACED = """
import tracemalloc
tracemalloc.start()
{statement}
print(tracemalloc.get_traced_memory()[1] / 2**20)
"""
_REGISTRY = "import cudnn_core; found = cudnn_core.registry().engines; assert len(found) >= {engines}, len(found)"
_ENTRY_POINTS = (
    "from importlib.metadata import entry_points; found = entry_points(group='cudnn_core.engines');"
    " assert len(found) >= {plugins}, len(found)"
)


def imports(report: Report) -> None:
    report.section("Import of the package, in a bare interpreter (-S)")
    times = _medians(report, {"import": _TIMED.format(before="", statement="import cudnn_core")}, rounds=3, site=False)
    report.add(Row("import cudnn_core", "ms", times["import"], budget=10))
    peak = _PEAK if Path("/proc/self/status").exists() else _PEAK_TRACED
    used = _medians(
        report,
        {"bare": peak.format(statement=""), "ours": peak.format(statement="import cudnn_core")},
        rounds=3,
        site=False,
    )
    case = "peak memory (RSS) of the import" if peak is _PEAK else "peak memory (traced) of the import"
    report.add(Row(case, "MiB", used["ours"], used["bare"], "the bare interpreter", budget=5, gate="difference"))
    gained = [name for name in child(_MODULES, site=False) if name.partition(".")[0] != "cudnn_core"]
    report.add(Row("modules of others that the import loads", "", len(gained), budget=0))
    if gained:
        report.note(", ".join(gained))
    first = "import cudnn_core; cudnn_core.Graph(io_data_type='float32')"
    report.add(
        Row(
            "import and the first Graph",
            "ms",
            _medians(report, {"x": _TIMED.format(before="", statement=first)}, site=False)["x"],
        )
    )


def discovery(report: Report) -> None:
    from tests.zoo._make import write_many

    report.section("Discovery: every distribution scanned, every manifest parsed and checked, in a fresh interpreter")
    for plugins, others, budget in ((0, 0, None), (100, 0, None), (100, 900, 80)):
        with tempfile.TemporaryDirectory() as folder:
            write_many(Path(folder), plugins, others)
            ours, peer = _REGISTRY.format(engines=3 * plugins), _ENTRY_POINTS.format(plugins=plugins)
            codes = {
                "ours": _TIMED.format(before="import cudnn_core._config, cudnn_core._registry, tomli", statement=ours),
                "peer": _TIMED.format(before="import importlib.metadata", statement=peer),
                "ours, all": _TIMED.format(before="", statement=ours),
                "peer, all": _TIMED.format(before="", statement=peer),
            }
            found = _medians(report, codes, rounds=4 if budget else 1, path=[folder])
        case = f"{plugins} more plugins among {plugins + others} dists"
        peer_name = "importlib.metadata.entry_points()"
        report.add(Row(f"registry(), {case}", "ms", found["ours"], found["peer"], peer_name, budget=budget))
        both = f"{peer_name} and its imports"
        report.add(Row(f"registry() and all imports, {case}", "ms", found["ours, all"], found["peer, all"], both))


def _medians(report: Report, codes: dict[str, str], *, rounds: int = 1, **options: Any) -> dict[str, float]:
    """The medians of 5 of what each of ``codes`` prints, interleaved, in the quietest of ``rounds``."""
    for code in codes.values():
        child(code, **options)  # cold files, no bytecode
    found: list[dict[str, float]] = []
    for _ in range(1 if report.quick else rounds):
        samples: dict[str, list[float]] = {name: [] for name in codes}
        for _ in range(2 if report.quick else 5):
            for name, code in codes.items():
                samples[name].append(child(code, **options))
        found.append({name: statistics.median(values) for name, values in samples.items()})
    return quietest(found)[0]

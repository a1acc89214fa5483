"""Time and memory of the PTX emulator, against the budgets of its design (a CPU with 2 cores).

    python benchmarks/emulator.py [--json [FILE]] [--only NAME ...] [--check]      (make bench-emulator)

Needs no GPU. The recorded kernels of emulator/tests/data/kernels run with numpy alone; where nvidia-cutlass-dsl is
installed, larger ones are compiled from emulator/tests/kernels, and the two cases with a time budget are among them.
Every case has an interpreter of its own: the first run parses and translates the PTX, the next ones do so again with
warm caches of the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "emulator"))
from ptx_emulator._executor import by_class  # noqa: E402

from benchmarks._harness import ROOT, Report, Row, child, finish, options  # noqa: E402

_EMULATOR = ROOT / "emulator"
_KERNELS = _EMULATOR / "tests" / "kernels"
_RECORDED = ("tma_copy.sm_90a", "wgmma_gemm.sm_90a", "tcgen05_gemm.sm_100a", "tcgen05_gemm_pair.sm_100a",
             "mxf8_gemm.sm_100a", "nvf4_gemm.sm_100a", "clc_gemm.sm_100a")  # fmt: skip
_PEAK = 2048  # MiB


class Fresh(NamedTuple):
    """A kernel of emulator/tests/kernels compiled at another size: the constants of its module are replaced."""

    title: str
    module: str
    function: str
    constants: dict[str, int]
    options: tuple[int, ...]
    make: str  # the inputs: an expression over emulator/tests/kernels/cases.py
    budget: float | None


_FRESH = {
    "tcgen05": Fresh(
        "tcgen05 f16 GEMM 128x128x256, 1 CTA", "tcgen05_gemm", "tcgen05_gemm", {"N": 128, "K": 256}, (1, 64),
        "_gemm(128, 128, 256)", 3.0,
    ),
    "pair": Fresh(
        "tcgen05 f16 GEMM 256x256x512, 2 CTAs", "tcgen05_gemm", "tcgen05_gemm", {"N": 256, "K": 512}, (2, 64),
        "_gemm(256, 256, 512)", None,
    ),
    "mxf8_pair": Fresh(
        "mxf8 GEMM 256x256x512, 2 CTAs", "block_scaled_pair", "mxf8_pair", {}, (), "_mxf8(256, 256, 512)", 20.0,
    ),
    "mxf8": Fresh(
        "mxf8 GEMM 128x128x512, 1 CTA", "block_scaled_gemm", "mxf8_gemm", {"K": 512}, (), "_mxf8(128, 128, 512)", None,
    ),
    "nvf4": Fresh(
        "nvf4 GEMM 128x128x512, 1 CTA", "block_scaled_gemm", "nvf4_gemm", {"K": 512}, (), "_nvf4(128, 128, 512)", None,
    ),
}  # fmt: skip

_COMPILE = """
import importlib, json, sys
from pathlib import Path
folder, kernels, emulator, name, module, function, constants, options = json.loads(sys.argv[1])
sys.path[:0] = [kernels, emulator]
import cases, record
for constant, value in constants.items():
    setattr(importlib.import_module(module), constant, value)
cases.CASES[name] = cases.Case(name, module, function, "sm_100a", None, tuple(options))
record.DATA = Path(folder)
record.record(name)
"""

_MEASURE = """
import json, lzma, runpy, time
import numpy as np
from ptx_emulator import run_ptx
path, kernels, name, make, repeats = json.loads({job!r})
scope = runpy.run_path(kernels + "/cases.py")
recorded = json.loads(lzma.decompress(open(path, "rb").read()))
arrays, answer = (eval(make, scope) if make else scope["CASES"][name].make)(np.random.default_rng(1))
views = [array.reshape(-1).view(np.uint8) for array in arrays]
seconds = []
for _ in range(1 + repeats):
    arrays[-1][:] = np.nan
    start = time.perf_counter()
    report = run_ptx(
        recorded["ptx"], recorded["entry"], recorded["grid"], recorded["block"], recorded["cluster"],
        [bytes.fromhex(p) for p in recorded["parameters"]], dynamic_smem=recorded["dynamic_smem"],
        buffers=dict(zip(recorded["addresses"], views)), outputs=[views[-1]],
    )
    seconds.append(time.perf_counter() - start)
    assert not report.findings, report.findings
try:
    status = open("/proc/self/status").read().partition("VmHWM:")[2].split()
    peak = int(status[0]) / 1024
except OSError:
    peak = None
print(json.dumps([seconds, report.counts, peak, float(np.abs(arrays[-1] - answer).max())]))
"""


class _Report(Report):
    """Rows of the house format; the first of a case carries its instructions by class and bytes by path."""

    def __init__(self, *, table: bool, quick: bool) -> None:
        super().__init__(table=False, quick=quick)
        self.shown = table
        self._extra: dict[str, dict[str, dict[str, int]]] = {}
        if table:
            print(f"{'':4} {'case':42} {'first s':>8} {'warm s':>8} {'peak MiB':>8}  budget")

    def note(self, text: str) -> None:
        print(f"     {text}", file=sys.stdout if self.shown else sys.stderr)

    def case(self, title: str, measured: list[Any], budget: float | None) -> None:
        seconds, counts, peak, error = measured
        instructions = by_class(counts)
        moved = {name[6:]: amount for name, amount in counts.items() if name.startswith("bytes.")}
        self._extra[title] = {"instructions": instructions, "bytes": moved}
        rows = [Row(title, "s", seconds[0], error=error, budget=budget)]
        rows += [Row(f"{title}, warm", "s", min(seconds[1:]), error=error)]
        if peak is not None:
            rows.append(Row(f"{title}, peak memory (RSS)", "MiB", peak, error=error, budget=_PEAK))
        for row in rows:
            self.add(row)
        if self.shown:
            missed = any(row.ok is False for row in rows)
            time = "" if budget is None else f"<= {budget:g} s, "
            memory = "" if peak is None else f"{peak:.0f}"
            print(f"{'MISS' if missed else 'ok':4} {title:42} {seconds[0]:8.3f} {min(seconds[1:]):8.3f} {memory:>8}"
                  f"  {time}<= {_PEAK} MiB{f'  error {error:g}' if error else ''}")  # fmt: skip
            for what, amounts in (("instructions", instructions), ("bytes", moved)):
                found = ", ".join(f"{name} {amount}" for name, amount in sorted(amounts.items()))
                print(f"{'':4}   {what}: {found}", flush=True)

    def _record(self, row: Row) -> dict[str, Any]:
        return {**super()._record(row), **self._extra.get(row.case, {})}


def _measure(report: _Report, title: str, path: Path, name: str, make: str, budget: float | None) -> None:
    job = json.dumps([str(path), str(_KERNELS), name, make, 1 if report.quick else 4])
    report.case(title, child(_MEASURE.replace("{job!r}", repr(job)), path=[_EMULATOR]), budget)


def _compile(name: str, fresh: Fresh, folder: Path, runtime: str) -> Path:
    """Compile one kernel in a child process, which fixes the architecture; where its recording is."""
    job = [str(folder), str(_KERNELS), str(_EMULATOR), name, fresh.module, fresh.function, fresh.constants]
    environ = {**os.environ, "CUTE_DSL_ARCH": "sm_100a", "CUTE_DSL_NO_CACHE": "1", "CUTE_DSL_LIBS": runtime}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, json.dumps([*job, fresh.options])],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{fresh.title} cannot be compiled:\n{done.stderr}")
    return folder / f"{name}.json.xz"


def main(argv: list[str] | None = None) -> int:
    parser = options(__doc__.split("\n\n", maxsplit=1)[0])
    names = [*_RECORDED, *_FRESH]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    args = parser.parse_args(argv)
    report = _Report(table=args.json != "-", quick=args.quick)
    for name in _RECORDED:
        if name in args.only:
            path = _EMULATOR / "tests" / "data" / "kernels" / f"{name}.json.xz"
            _measure(report, f"recorded {name}", path, name, "", None)
    fresh = [name for name in _FRESH if name in args.only]
    if fresh and find_spec("cutlass") is None:
        report.note(f"left out, nvidia-cutlass-dsl is not installed: {', '.join(fresh)}")
    elif fresh:
        sys.path.insert(1, str(_EMULATOR))
        from ptx_emulator._runtime import runtime_library

        with tempfile.TemporaryDirectory() as folder:
            for name in fresh:
                case = _FRESH[name]
                path = _compile(name, case, Path(folder), str(runtime_library()))
                _measure(report, case.title, path, name, case.make, case.budget)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())

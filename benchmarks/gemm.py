"""Dense GEMM on a GPU against cuBLAS, the cuDNN backend, torch.compile and quack, in one run.

    python benchmarks/gemm.py [--only TEXT ...] [--tune] [--json [FILE]] [--check]

Each case is checked first (against fp64, from the stored operands), then timed with its peers, interleaved, from CUDA graphs: host
time is not in the numbers; weights of memory-bound cases rotate over 4 copies for everyone. ``ours`` is the configuration that
``Graph.plan`` chooses of this engine; ``--tune`` times every one that the engine proposes and reports the best as a row of its own (as
``cudnn-core bench`` would choose). Ratios are ours / peer, so smaller is better; the peer of a row is the best one, and the others are
rows of the JSON.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import torch  # noqa: E402

from benchmarks._gemm_cases import CASES, Case, Setup  # noqa: E402
from benchmarks._gemm_host import host_rows  # noqa: E402
from benchmarks._gemm_peers import peers  # noqa: E402
from benchmarks._gpu_timing import gpu_times  # noqa: E402
from benchmarks._harness import Report, Row, finish, options  # noqa: E402

# Largest |y - reference| / (|reference| + its root mean square): outputs are rounded to bf16 once, relative 2^-9.
_TOLERANCE = 0.01
# Shown and not counted: torch._scaled_mm's fast accumulation keeps fewer bits of the sums than promotion does, and quack is not
# tuned here.
_NOT_COUNTED = frozenset({"cublas fast accumulation", "quack"})


def main() -> int:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cases whose name contains one of these")
    parser.add_argument("--tune", action="store_true", help="time every configuration that the engine proposes")
    parser.add_argument("--skip-peer", nargs="*", default=[], metavar="NAME", help="cublas, cudnn, compile, quack")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved replays of each callable (default: 9)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 3
    report = Report(table=args.json != "-", quick=args.quick)
    chosen = [case for case in CASES if not args.only or any(text in case.name for text in args.only)]
    report.section("GPU time")
    ratios: dict[str, list[float]] = {}
    for case in chosen:
        setup = case.setup()
        best = _case(report, case, setup, args)
        if case.group and best is not None:
            ratios.setdefault(case.group, []).append(best)
        del setup
        torch.cuda.empty_cache()
    for group, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        report.add(
            Row(f"{group}: geometric mean of ours / best peer", "", mean, 1.0, "best peer", budget=1.0, gate="ratio")
        )
    if not args.only or "host" in args.only:
        report.section("Host time of a launch")
        for row in host_rows(planned):
            report.add(row)
    return finish(report, args)


def _case(report: Report, case: Case, setup: Setup, args: Any) -> float | None:
    """Adds the rows of a case; ours / the best peer, or None where a result is wrong."""
    calls: dict[str, Callable[[int], object]] = {}
    plan = planned(setup.graph)
    calls["ours"] = bind(plan, setup)
    error = _error(calls["ours"], setup)
    if error > _TOLERANCE:
        report.add(Row(f"{case.name}: {plan.engine}", "us", 0.0, error=error))
        return None
    labels = {"ours": _label(plan)}
    if args.tune:
        for number, other in enumerate(_alternatives(plan, setup)):
            call = bind(other, setup)
            if _error(call, setup) <= _TOLERANCE:
                calls[f"tuned {number}"], labels[f"tuned {number}"] = call, _label(other)
            else:
                report.note(f"wrong result: {case.name} {_label(other)}")
    found, missing = peers(case, setup, frozenset(args.skip_peer))
    for name, reason in missing.items():
        report.note(f"{case.name}: without {name}: {reason}")
    times = gpu_times({**calls, **found}, rounds=args.rounds)
    comparable = {name: times[name] for name in found if name not in _NOT_COUNTED}
    peer = case.peer if case.peer in comparable else min(comparable, key=comparable.__getitem__, default="")
    budget = 1 / case.target if case.target else None
    report.add(Row(case.name, "us", times["ours"], comparable.get(peer), peer, budget=budget, gate="ratio"))
    report.note(f"{_rates(case, times['ours'])}  {labels['ours']}")
    for name in found:
        if name != peer:
            report.add(Row(f"  {case.name}", "us", times["ours"], times[name], name))
    if args.tune:
        best = min(calls, key=lambda name: times[name])
        report.add(Row(f"{case.name}, tuned", "us", times[best], comparable.get(peer), peer))
        report.note(f"{_rates(case, times[best])}  {labels[best]}")
        for name in sorted(calls, key=lambda name: times[name]):
            report.note(f"    {times[name]:9.2f} us  {labels[name]}")
    return times["ours"] / comparable[peer] if peer else None


def planned(graph: Any) -> Any:
    """The plan of this package's engine of the GPU, whatever else is installed."""
    import cudnn_core

    engine = "sm90_wgmma" if torch.cuda.get_device_capability()[0] == 9 else "sm100_tcgen05"
    rule = {"match": {"op": "matmul"}, "use": f"frost_gemm:{engine}"}
    with cudnn_core.configure(strict=True, rule=[rule]):
        return graph.plan()


def bind(plan: Any, setup: Setup) -> Callable[[int], object]:
    """Our launch: the bound run of the plan, for each set of buffers."""
    import cudnn_core

    workspace = torch.empty(max(1, plan.workspace_size), dtype=torch.uint8, device="cuda")
    packs = [cudnn_core.pack(plan, {setup.names[name]: t for name, t in one.items()}) for one in setup.sets]
    runs = [(plan.bind(pack), pack.pointers) for pack in packs]

    def call(i: int) -> None:
        run, pointers = runs[i % len(runs)]
        run(pointers, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)

    return call


def _alternatives(plan: Any, setup: Setup) -> Iterator[Any]:
    """The same graph with the engine's other configurations, pinned one after the other."""
    import cudnn_core

    engine = plan.engine.partition("@")[0]
    for config in plan_configs(plan, setup.graph):
        if config == dict(plan.knobs):
            continue
        rule = {"match": {"op": "matmul"}, "use": engine, "knobs": config}
        with cudnn_core.configure(strict=True, rule=[rule]):
            yield setup.graph.plan()


def plan_configs(plan: Any, graph: Any) -> list[dict[str, Any]]:
    """Every knob setting that the plan's engine proposes for the graph, best first."""
    import cudnn_core

    name = plan.engine.partition("@")[0].partition(":")[2]
    import frost_gemm.engines as engines

    engine = {"sm90_wgmma": engines.Sm90Wgmma, "sm100_tcgen05": engines.Sm100Tcgen05}[name]()
    support = engine.check_support(graph.freeze("cuda"), cudnn_core.ExecutionContext(None, plan.device))
    return [dict(config.knobs) for config in support.configs]


def _label(plan: Any) -> str:
    return f"{plan.engine} {json.dumps(dict(plan.knobs), separators=(',', ':'))}"


def _error(call: Callable[[int], object], setup: Setup) -> float:
    """Largest |y - reference| / (|reference| + its root mean square), of the first set of buffers."""
    y = setup.sets[0]["y"]
    y.fill_(float("nan"))
    call(0)
    torch.cuda.synchronize()
    scale = setup.reference.abs() + setup.reference.square().mean().sqrt()
    return float(((y.double() - setup.reference).abs() / scale).max())


def _rates(case: Case, us: float) -> str:
    return f"{case.flops / us / 1e6:.0f} TFLOP/s, {case.bytes / us / 1e6:.2f} TB/s"


if __name__ == "__main__":
    raise SystemExit(main())

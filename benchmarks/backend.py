"""The cuDNN backend plugin on a GPU against the frontend's own execution of the same engine and knobs, in one run.

    python benchmarks/backend.py [--only TEXT ...] [--json [FILE]] [--check]

For each graph the frontend plans by heuristic mode A; our plan is pinned to the engine and knobs that it chose, and both results are
compared first. Then: host time of one call (ours bound, the binding's raw execute of our plan, the frontend's ``graph.execute``),
GPU time from CUDA graphs, interleaved, and the time to plan from nothing to a built plan, by turns. Ratios are ours / peer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import torch  # noqa: E402

from benchmarks._backend_cases import CASES, Setup  # noqa: E402
from benchmarks._gpu_timing import gpu_times, host_times  # noqa: E402
from benchmarks._harness import Report, Row, finish, options  # noqa: E402

_LONG_US = 100.0  # kernels from which the GPU time has a budget


def main() -> int:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cases whose name contains one of these")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 3
    report = Report(table=args.json != "-", quick=args.quick)
    chosen = [case for case in CASES if not args.only or any(text in case.name for text in args.only)]
    setups = [(case, case.setup()) for case in chosen]
    report.section("GPU time, one engine and one setting of its knobs")
    calls = []
    for case, setup in setups:
        peer, ours = frontend(setup), Ours(setup)
        error = _difference(setup, peer.run, ours.run)
        times = gpu_times({"ours": lambda i, o=ours: o.run(), "peer": lambda i, p=peer: p.run()})
        budget = 1.02 if times["peer"] >= _LONG_US else None
        report.add(
            Row(case.name, "us", times["ours"], times["peer"], "frontend", error=error, budget=budget, gate="ratio")
        )
        report.note(f"{ours.plan.engine}/{ours.plan.variant} {dict(ours.plan.knobs)['engine_knobs']}")
        calls.append((case, peer, ours))
    report.section("Host time of a call")
    for case, peer, ours in calls:
        if case.small:
            times = host_times({"bound": ours.run, "raw": ours.raw(), "frontend": peer.run}, loops=200)
            bound = times["bound"]
            report.add(
                Row(f"{case.name}: bound run", "us", bound, times["frontend"], "frontend", budget=0.75, gate="ratio")
            )
            report.add(
                Row(f"{case.name}: bound run", "us", bound, times["raw"], "raw execute", budget=1.0, gate="difference")
            )
    report.section("Planning")
    for case, setup in setups:
        ours_ms, theirs_ms = _planning(setup, rounds=2 if report.quick else 5)
        report.add(Row(f"{case.name}: plan", "ms", ours_ms, theirs_ms, "frontend", budget=1.1, gate="ratio"))
    return finish(report, args)


class Peer:
    """A graph that the frontend has built, with its operands."""

    def __init__(self, graph: Any, pack: dict[Any, torch.Tensor], handle: int) -> None:
        import cudnn

        self.graph, self._pack, self._handle, self._cudnn = graph, pack, handle, cudnn
        size = graph.get_workspace_size()
        self._workspace = torch.empty(max(1, size), dtype=torch.uint8, device="cuda")

    def run(self) -> None:
        self._cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute(self._pack, self._workspace, handle=self._handle)

    def choice(self) -> tuple[int, dict[str, int]]:
        """The engine and its knobs by name."""
        engine, knobs = self.graph.get_engine_and_knobs_at_index(0)
        return engine, {kind.name: value for kind, value in knobs.items()}


def frontend(setup: Setup) -> Peer:
    """The frontend's own plan."""
    import cudnn

    handle = cudnn.create_handle()
    graph, tensors = setup.build(cudnn, handle)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return Peer(graph, {tensors[name]: buffer for name, buffer in setup.buffers.items()}, handle)


class Ours:
    """Our plan, pinned to the backend plugin, and to an engine and its knobs if they are given."""

    def __init__(self, setup: Setup) -> None:
        import cudnn_core

        graph, tensors = setup.build(cudnn_core, None)
        self.plan = _pinned(graph, frontend(setup).choice())
        pack = cudnn_core.pack(self.plan, {tensors[name]: buffer for name, buffer in setup.buffers.items()})
        self._bound, self._pointers = self.plan.bind(pack), pack.pointers
        self._pack = pack  # holds the values of operands by value
        space = torch.empty(max(1, self.plan.workspace_size), dtype=torch.uint8, device="cuda")
        self._space, self._workspace = space, space.data_ptr()

    def run(self) -> None:
        self._bound(self._pointers, self._workspace, torch.cuda.current_stream().cuda_stream)

    def raw(self) -> Callable[[], None]:
        """The binding's execute of this very plan, with everything prepared. The stream is read as ``run`` does."""
        import ctypes

        compiled: Any = self.plan._compiled
        target = compiled._target
        block = (ctypes.c_uint64 * len(self._pointers))(*self._pointers)
        address, count = ctypes.addressof(block), len(block)
        self.run()
        raw = compiled._mine.held.raw
        execute, workspace = target._execute_with_raw_ptrs, self._workspace

        def call() -> None:
            torch.cuda.current_stream().cuda_stream  # noqa: B018
            execute(address, count, workspace, raw, -1)
            block  # noqa: B018  kept alive

        return call


def _pinned(graph: Any, choice: tuple[int, dict[str, int]] | None) -> Any:
    import cudnn_core

    rule: dict[str, Any] = {"match": {}, "use": "cudnn_backend:graph"}
    if choice is not None:
        engine, knobs = choice
        settings = ",".join(f"{name}={value}" for name, value in sorted(knobs.items()))
        rule |= {"use": f"cudnn_backend:graph/eng{engine}", "knobs": {"engine_knobs": settings}}
    with cudnn_core.configure(strict=True, rule=[rule]):
        return graph.plan()


def _difference(setup: Setup, peer: Callable[[], None], ours: Callable[[], None]) -> float:
    """The largest difference of an output, relative to the peer's largest element."""
    found = []
    for call in (peer, ours):
        for name in setup.outputs:
            setup.buffers[name].fill_(float("nan"))
        call()
        torch.cuda.synchronize()
        found.append([setup.buffers[name].double() for name in setup.outputs])
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True))


def _planning(setup: Setup, rounds: int) -> tuple[float, float]:
    """Milliseconds from a new graph to a built plan: the medians of ours and of the frontend, by turns, after one of each. No graph is planned twice."""
    import cudnn

    import cudnn_core

    handle = cudnn.create_handle()

    def theirs(turn: int) -> None:
        graph, _ = setup.build(cudnn, handle, turn)
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])

    def mine(turn: int) -> None:
        graph, _ = setup.build(cudnn_core, None, turn)
        graph.plan()

    times: dict[Callable[[int], None], list[float]] = {theirs: [], mine: []}
    with cudnn_core.configure(strict=True, rule=[{"match": {}, "use": "cudnn_backend:graph"}]):
        for turn in range(rounds + 1):
            for call, samples in times.items():
                start = time.perf_counter()
                call(turn + 1)
                if turn:
                    samples.append((time.perf_counter() - start) * 1e3)
    return median(times[mine]), median(times[theirs])


if __name__ == "__main__":
    raise SystemExit(main())

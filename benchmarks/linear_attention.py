"""GDN and KDA on a GPU against flash-linear-attention and the cuDNN frontend's KDA engines, in one run.

    python benchmarks/linear_attention.py [--only TEXT ...] [--quick] [--json [FILE]] [--check]

Prefills run with strong gates (logsigmoid of normal numbers) and weak ones (a 16th), decode steps in place over a pool of states that is
larger than L2. Each result is checked first, against the recurrence in fp64 on two heads of the same operands; then all peers are timed,
interleaved, as CUDA graphs and again eagerly. ``ours`` is the plan of this package's engine, bound. Ratios are ours / peer, so smaller is
better; the peer of a row is the best one whose result is right, and the others have rows of their own. A floor is the larger of bytes at
4.27 TB/s and operations at 790 TFLOP/s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import torch

from benchmarks._gpu_timing import eager_times, gpu_times
from benchmarks._harness import Report, Row, finish, options
from benchmarks._la_cases import COPY_TBPS, GATES, Decode, Measured, chosen
from benchmarks._la_ours import Ours
from benchmarks._la_peers import peers
from benchmarks._la_reference import error, head_sample, sampled

_TOLERANCE = 5e-3  # relative RMS error of our outputs, which are rounded to bf16
_RIGHT = 2e-2  # of a peer's, to be compared with
_SPREAD = 1.05  # slowest / fastest kind of gates
_LAUNCHES = 1.5  # host time of one step of one sequence, in launches of that kernel through the driver
EMPTY = "empty kernel"


def main() -> int:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cases whose name contains one of these")
    parser.add_argument("--skip-peer", nargs="*", default=[], metavar="NAME", help="fla, cudnn")
    parser.add_argument("--rounds", type=int, default=0, help="interleaved replays of each callable (default: 9)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 3
    report = Report(table=args.json != "-", quick=args.quick)
    rounds = args.rounds or (3 if args.quick else 9)
    declined = 0
    for decode, title in ((False, "Prefill"), (True, "Decode, one token")):
        cases = [case for case in chosen(args.only, args.quick) if isinstance(case, Decode) == decode]
        if cases:
            report.section(title)
        for case in cases:
            measured = {}
            for gates in ("weak",) if decode else GATES:
                found = measure(report, case, gates, frozenset(args.skip_peer), rounds)
                torch.cuda.empty_cache()
                if found is None:
                    declined += 1
                else:
                    measured[gates] = found
            for row in rows(case, measured):
                report.add(row)
    if declined:
        report.note(f"{declined} times without a result of ours")
    return finish(report, args) or int(args.check and declined > 0)


def measure(report: Report, case: Any, gates: str, skip: frozenset[str], rounds: int) -> Measured | None:
    """Errors and times of ours and of every peer, or None where our engine declines or can't be captured."""
    import cudnn_core

    x = case.operands(gates)
    label = case.name if isinstance(case, Decode) else f"{case.name}, {gates} gates"
    try:
        ours = Ours(case, x)
    except cudnn_core.NoEngineError as reason:
        report.note(f"{label}: ours declined: {str(reason).splitlines()[0]}")
        return None
    judge = Judge(case, x)
    measured = Measured({}, {}, {"ours": judge.ours(ours)})
    found, missing = peers(case, x, skip)
    for name, call in found.items():
        measured.errors[name] = judge.peer(call)
    calls: dict[str, Callable[[int], object]] = {"ours": ours, **found}
    if isinstance(case, Decode) and case.batch == 1:
        calls[EMPTY] = lambda i: torch.cuda._sleep(0)
    failed: dict[str, str] = {}
    measured.graph |= gpu_times(calls, rounds=rounds, failed=failed)
    if "ours" in failed:
        report.note(f"{label}: ours can't be captured: {failed['ours']}")
        return None
    measured.eager |= eager_times({**calls, "front door": ours.front_door()}, rounds=rounds)
    if isinstance(case, Decode) and case.batch == 1:
        measured.host |= ours.host_times()
    for name, reason in {**missing, **{name: f"as a graph: {reason}" for name, reason in failed.items()}}.items():
        report.note(f"{label}: without {name}: {reason}")
    report.note(f"{label}: {ours.plan.engine}, errors {', '.join(f'{n} {e:.1e}' for n, e in measured.errors.items())}")
    return measured


class Judge:
    """Errors of a case's callables against the recurrence on ``head_sample``'s heads."""

    def __init__(self, case: Any, x: Mapping[str, torch.Tensor]) -> None:
        self._case, self._x, self._heads = case, x, list(head_sample(case))
        self._slots = x["slots"][0].long() if isinstance(case, Decode) else None
        self._states = None if self._slots is None else x["initial_state"][self._slots].clone()
        self._want = sampled(case, dict(x), self._slots)

    def ours(self, ours: Ours) -> float:
        """Of O and of the final state, NaN where nothing was written."""
        for tensor in ours.outputs.values():
            tensor.fill_(torch.nan)
        self._restore()
        ours(0)
        o = self._error(ours.outputs["O"])
        state = ours.outputs.get("final_state")
        if state is None:
            state = self._x["initial_state"][self._slots]
        return max(o, error(state[:, self._heads].unsqueeze(1), self._want["final_state"].unsqueeze(1)))

    def peer(self, call: Callable[[int], tuple[Any, Any]]) -> float:
        """Of o; a peer's states have other layouts."""
        self._restore()
        return self._error(call(0)[0])

    def _error(self, o: torch.Tensor) -> float:
        return error(o[:, self._heads].reshape(self._want["O"].shape), self._want["O"])

    def _restore(self) -> None:
        if self._slots is not None:
            self._x["initial_state"][self._slots] = self._states


def rows(case: Any, measured: Mapping[str, Measured]) -> list[Row]:
    """The rows of a case from what was measured with each kind of gates."""
    found: list[Row] = []
    for gates, one in measured.items():
        name = case.name if isinstance(case, Decode) else f"{case.name}, {gates} gates"
        if not one.errors["ours"] <= _TOLERANCE:
            found.append(Row(f"{name}: wrong result", "us", 0.0, error=one.errors["ours"]))
            continue
        found += _timed(case, name, one)
    found += _spreads(case, measured)
    return found


def _timed(case: Any, name: str, one: Measured) -> list[Row]:
    found: list[Row] = []
    for way, times in (("", one.graph), (", eager", one.eager)):
        comparable = {n: t for n, t in times.items() if one.errors.get(n, float("inf")) <= _RIGHT and n != "ours"}
        best = min(comparable, key=comparable.__getitem__, default="")
        budget = None if way else case.most_us
        found.append(Row(name + way, "us", times["ours"], comparable.get(best), best, budget=budget))
        for other, time in times.items():
            if other not in ("ours", best):
                wrong = one.errors.get(other, 0.0) > _RIGHT
                found.append(Row(f"  {name}{way}", "us", times["ours"], time, f"{other} (wrong)" if wrong else other))
    found.append(Row(f"  {name}", "us", one.graph["ours"], case.floor_us, "floor"))
    if isinstance(case, Decode):
        rate = case.bytes / one.graph["ours"] / 1e6
        found.append(Row(f"  {name}: state traffic", "TB/s", rate, COPY_TBPS, "device copy"))
    if one.host:
        run, bare = one.host["run"], one.host["driver"]
        found.append(Row(f"{name}: host", "us", run, bare, "cuLaunchKernelEx", budget=_LAUNCHES, gate="ratio"))
    found.append(Row(f"  {name}: relative RMS error", "", one.errors["ours"], budget=_TOLERANCE))
    return found


def _spreads(case: Any, measured: Mapping[str, Measured]) -> list[Row]:
    """Slowest over fastest kind of gates: ours, and every peer's that ran with all of them."""
    if len(measured) < 2:
        return []

    def spread(name: str) -> float | None:
        times = [one.graph.get(name) for one in measured.values()]
        return None if None in times else max(times) / min(times)  # type: ignore[type-var,operator]

    ours = spread("ours")
    if ours is None:
        return []
    title = f"{case.name}: slowest / fastest gates"
    found = [Row(title, "", ours, budget=_SPREAD)]
    names = dict.fromkeys(name for one in measured.values() for name in one.errors if name != "ours")
    theirs = {name: spread(name) for name in names}
    return [*found, *(Row(f"  {title}", "", ours, one, name) for name, one in theirs.items() if one is not None)]


if __name__ == "__main__":
    raise SystemExit(main())

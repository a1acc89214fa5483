"""GDN and KDA on a GPU against flash-linear-attention and the cuDNN frontend's KDA engines, in one run.

    python benchmarks/linear_attention.py [--only TEXT ...] [--quick] [--json [FILE]] [--append] [--check]

Prefills run with strong gates (logsigmoid of normal numbers) and weak ones (a 16th), decode steps in place over a pool of states that is
larger than L2. Each result is checked first, against the recurrence in fp64 on two heads of the same operands; then all peers are timed,
interleaved, as CUDA graphs and again eagerly. ``ours`` is the plan of this package's engine, bound. Ratios are ours / peer, so smaller is
better; the peer of a row is the best one whose result is right, and the others have rows of their own. A floor is the larger of bytes at
4.27 TB/s and operations at 790 TFLOP/s.

Measuring is done by a process of its own, which is stopped where a peer takes longer than ``--peer-seconds``; the run goes on without
that peer. The file of ``--json`` is written after each case, and ``--append`` fills it up in several runs of one state.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import torch

from benchmarks._gpu_timing import ROUNDS
from benchmarks._harness import Report, Row, finish, options
from benchmarks._la_cases import CASES, COPY_TBPS, GATES, Decode, Measured, chosen
from benchmarks._la_measure import Outcome, label, outcomes
from benchmarks._la_peers import FAMILIES
from benchmarks._results import OtherRunError, ResultFile
from benchmarks._watched import Stopped, watched

_TOLERANCE = 5e-3  # relative RMS error of our outputs, which are rounded to bf16
_RIGHT = 2e-2  # of a peer's, to be compared with
_SPREAD = 1.05  # slowest / fastest kind of gates
_LAUNCHES = 1.5  # host time of one step of one sequence, in launches of that kernel through the driver


def main() -> int:
    args = _arguments()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 3
    report = Report(table=args.json != "-", quick=args.quick, state=_state())
    try:
        file = _file(report, args)
    except OtherRunError as error:
        print(error, file=sys.stderr)
        return 2
    declined, section = 0, None
    measured: dict[Any, dict[str, Measured]] = {}
    for case, gates, (found, notes) in _outcomes(args):
        if isinstance(case, Decode) != section:
            section = isinstance(case, Decode)
            report.section("Decode, one token" if section else "Prefill")
        for note in notes:
            report.note(note)
        of_case = measured.setdefault(case, {})
        before = len(rows(case, of_case))
        if found is None:
            declined += 1
            continue
        of_case[gates] = found
        for row in rows(case, of_case)[before:]:
            report.add(row)
        if file is not None:
            file.write(report.records())
    if declined:
        report.note(f"{declined} times without a result of ours")
    return finish(report, args, written=file is not None) or int(args.check and declined > 0)


def _arguments() -> argparse.Namespace:
    parser = options((__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cases whose name contains one of these")
    parser.add_argument(
        "--skip-peer", nargs="*", default=[], metavar="NAME", help=f"of {', '.join(FAMILIES)}, or of one"
    )
    parser.add_argument("--rounds", type=int, default=0, help="interleaved replays of each callable (default: 9)")
    parser.add_argument(
        "--append",
        action="store_true",
        help="keep the rows of other cases that the file of --json has, of the same state",
    )
    parser.add_argument(
        "--peer-seconds", type=float, default=120.0, metavar="S",
        help="what a peer may take to compile, or to run once, before the run goes on without it (default: 120; 0: no limit)",
    )  # fmt: skip
    args = parser.parse_args()
    if args.append and args.json in (None, "-"):
        parser.error("--append needs --json FILE")
    return args


def _file(report: Report, args: argparse.Namespace) -> ResultFile | None:
    """The file that grows with each case, if results go to one."""
    if args.json in (None, "-"):
        return None
    return ResultFile(Path(args.json), [case.name for case in CASES], report.identity, append=args.append)


def _state() -> str:
    """A digest of the sources that are measured: the core's, the plugin's, and the cases'."""
    from cudnn_core.cute_dsl import sources_digest

    found = "".join(map(sources_digest, ("cudnn_core", "linear_attention", "benchmarks._la_cases")))
    return hashlib.sha256(found.encode()).hexdigest()[:16]


def _outcomes(args: argparse.Namespace) -> Iterator[tuple[Any, str, Outcome]]:
    """Of each case and kind of gates. A peer that the process was stopped for is left out from there on."""
    cases = chosen(args.only, args.quick)
    todo = [(case, gates) for case in cases for gates in (("weak",) if isinstance(case, Decode) else GATES)]
    skip = frozenset(args.skip_peer)
    rounds = args.rounds or (3 if args.quick else 9)
    late: list[str] = []
    while todo:
        for found in watched(outcomes, (list(todo), skip, rounds), args.peer_seconds):
            case, gates = todo[0]
            if isinstance(found, Stopped):
                if found.step not in ("", ROUNDS, *skip):
                    skip |= {found.step}
                    late.append(f"{label(case, gates)}: from here on without {found.step}: {found.reason}")
                    break
                where = found.step or "a step of ours"
                outcome = Outcome(None, [f"{label(case, gates)}: stopped in {where}: {found.reason}"])
            else:
                outcome = found
            del todo[0]
            yield case, gates, Outcome(outcome.measured, late + outcome.notes)
            late = []


def rows(case: Any, measured: Mapping[str, Measured]) -> list[Row]:
    """The rows of a case from what was measured with each kind of gates."""
    found: list[Row] = []
    for gates, one in measured.items():
        name = label(case, gates)
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

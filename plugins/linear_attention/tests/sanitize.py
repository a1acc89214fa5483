"""Runs every kernel of the package once under NVIDIA's compute-sanitizer, on small cases whose results are compared.

    python plugins/linear_attention/tests/sanitize.py [--tool NAME ...] [--only TEXT ...] [--jobs N] [--list]

First all cases run without a tool, which fills the compile cache. Then each has a process of its own under memcheck (with an allocation
for each tensor, so that a step outside of one is seen) and under racecheck, and a line with the number of findings.

What racecheck (compute-sanitizer of CUDA 13.0) does not follow, and the emulator checks instead:
    - Lanes of a warp write or read shared memory, meet, and one of them arrives at an mbarrier for all: ptxas leaves nothing of the meeting in
      converged code. So sequences are whole chunks here, as all lanes clear the rows behind a partial one; and every GDN prefill has one
      finding, d of the score warps (a store) and the scan (a load).
    - A bulk copy without a tensor map (cp.async.bulk) into a place that others have read before: rings that go round have one finding, the copy
      of a record and the loads of its vectors. FlashAttention has found the same: AI/RACECHECK_TMA_HAZARD.md in its repository.
``KNOWN`` has their number for each case, all of them in the scan. A case with more, or with one in another kernel, is not clean.

Exit status 1: a finding, a wrong result, or a tool that says nothing; 3: no GPU, or no compute-sanitizer. `make sanitize-la` does it, in
one to three minutes on 16 cores.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

TOOLS = ("memcheck", "racecheck")
PREFILL = (
    "d128", "zero-length-and-one-token", "slots", "k-major-rectangular", "all-in-kernel", "poisoned-padding", "steep-gates", "decreasing-boundaries",
)  # fmt: skip
SEGMENTS = {"segments": (2113,), "segments-of-two": (2048, 2033)}
DECODE = ("d128", "k-major", "8-tokens", "slots-skipped", "speculative-varlen", "all-in-kernel", "bf16-state")
KNOWN = {
    "racecheck": {
        **{f"gdn-{name}": 1 for name in PREFILL}, "kda-channel-moving": 1,
        "gdn-segments": 3, "gdn-segments-of-two": 3, "kda-segments": 2, "kda-segments-of-two": 2,
    }
}  # fmt: skip
ERRORS = 9  # exit status of compute-sanitizer where it found something
SECONDS = 150.0  # that a process may take
_SUMMARY = re.compile(r"^=+ (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", re.MULTILINE)
_RACE = re.compile(r"^=+ \w+: Race reported between \w+ access at (\S+)", re.MULTILINE)
_SAID = re.compile(r"^(\S+): (right|left out|WRONG)", re.MULTILINE)
_SHOWN = 60  # lines of the report of what is not clean


class Done(NamedTuple):
    """What a process said. ``findings``: the tool's number, None where it gave none (or there was no tool)."""

    code: int | None
    findings: int | None
    said: dict[str, str]
    output: str
    seconds: float


def cases() -> list[Any]:
    """For each op a few small cases, and prefills of few heads that are cut into segments: of one sequence, whose records come in two
    launches, and of two."""
    from la_cases.cases import named

    found = []
    for op in ("gdn", "kda"):
        found += [named(f"{op}-{name}") for name in (*PREFILL, *(("channel-moving",) if op == "kda" else ()))]
        plain = replace(named(f"{op}-d128"), heads=(1, 1, 2))
        found += [replace(plain, name=f"{op}-{name}", lengths=lengths) for name, lengths in SEGMENTS.items()]
        found += [named(f"{op}_decode-{name}") for name in DECODE]
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", nargs="*", default=list(TOOLS), metavar="NAME", help=f"default: {' '.join(TOOLS)}")
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cases whose name contains one of these")
    # compute-sanitizer tries 10 ports to reach its program, so no more than that run at a time.
    parser.add_argument(
        "--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), help="processes at a time"
    )
    parser.add_argument("--list", action="store_true", help="the names of the cases, and nothing else")
    parser.add_argument("--whole", action="store_true", help="prefills of whole chunks")
    parser.add_argument("--run", nargs="+", metavar="NAME", help="run these cases in this process, without a tool")
    args = parser.parse_args(arguments)
    chosen = [case for case in cases() if not args.only or any(text in case.name for text in args.only)]
    if args.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if args.run:
        return run([whole(case) if args.whole else case for case in chosen if case.name in args.run])
    import torch

    tool = sanitizer()
    if tool is None or not torch.cuda.is_available():
        print("no GPU" if tool else "no compute-sanitizer on PATH, in $CUDA_HOME or /usr/local/cuda", file=sys.stderr)
        return 3
    if not chosen:
        print("no case of that name", file=sys.stderr)
        return 1
    names = [case.name for case in chosen]
    # What is wrong without a tool says nothing about memory.
    return 0 if plain(tool, names, args.jobs) and not under(tool, args.tool, names, args.jobs) else 1


def plain(sanitizer: str, names: list[str], jobs: int) -> bool:
    """Whether all results are right without a tool. Each process compiles its share of the kernels."""
    start = time.perf_counter()
    shares = [share for first in range(jobs) if (share := names[first::jobs])]
    wrong = 0
    for share, done in _all([(share, lambda share=share: process(sanitizer, "", share)) for share in shares], jobs):
        bad = [name for name in share if done.said.get(name, "WRONG") == "WRONG"]
        wrong += len(bad) or (done.code != 0)
        if bad or done.code:
            print(f"without a tool: {', '.join(bad)}: {_end(done)}\n{_tail(done.output)}", flush=True)
    print(f"without a tool: {len(names)} cases, {wrong} wrong, {time.perf_counter() - start:.0f} s", flush=True)
    return not wrong


def under(sanitizer: str, tools: list[str], names: list[str], jobs: int) -> int:
    """How many runs under a tool were not clean; a line for each."""
    start = time.perf_counter()
    todo = [((tool, name), lambda t=tool, n=name: process(sanitizer, t, [n])) for tool in tools for name in names]
    unclean = dict.fromkeys(tools, 0)
    for (tool, name), done in _all(todo, jobs):
        said = done.said.get(name, "no result")
        known = is_known(tool, name, done)
        clean = said in ("right", "left out") and (known or (done.code == 0 and done.findings == 0))
        count = "no summary" if done.findings is None else f"{done.findings} findings"
        if known:
            count = f"{done.findings} known"
        print(f"{tool:9} {name:32} {count:12} {said:9} {_end(done)}, {done.seconds:.1f} s", flush=True)
        if not clean:
            unclean[tool] += 1
            print(_tail(done.output), flush=True)
    for tool, number in unclean.items():
        print(f"{tool}: {len(names)} cases, {number} not clean", flush=True)
    print(f"with the tools: {time.perf_counter() - start:.0f} s", flush=True)
    return sum(unclean.values())


def is_known(tool: str, name: str, done: Done) -> bool:
    """Whether there are findings, and no others than the known ones."""
    places = _RACE.findall(done.output)
    return (
        done.code == ERRORS
        and 0 < (done.findings or 0) == len(places) <= KNOWN.get(tool, {}).get(name, 0)
        and all("_scan_" in place for place in places)
    )


def process(sanitizer: str, tool: str, names: list[str]) -> Done:
    """The cases in a process of their own, under a tool if there is one."""
    start = time.perf_counter()
    try:
        ended = subprocess.run(
            command(sanitizer, tool, names), env=environment(tool), check=False, timeout=SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        code, output = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        code, output = None, said if isinstance(said, str) else said.decode(errors="replace")
    found = [int(errors or hazards) for errors, hazards in _SUMMARY.findall(output)] if tool else []
    return Done(code, sum(found) if found else None, dict(_SAID.findall(output)), output, time.perf_counter() - start)


def _all(todo: Iterable[tuple[Any, Callable[[], Done]]], jobs: int) -> Iterable[tuple[Any, Done]]:
    """What each does, as they end, ``jobs`` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(call): label for label, call in todo}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _end(done: Done) -> str:
    return {0: "ended", ERRORS: "FINDINGS", None: f"longer than {SECONDS:g} s"}.get(
        done.code, f"FAILED with {done.code}"
    )


def _tail(output: str) -> str:
    """The tool's report, or where there is none the end of what the program said."""
    report = [line for line in output.splitlines() if line.startswith("====")]
    return "\n".join(report[:_SHOWN] if len(report) > 4 else output.splitlines()[-_SHOWN:])


def whole(case: Any) -> Any:
    """A prefill with its sequences' ends at the ends of chunks, and no tokens behind the last one."""
    if case.decodes:
        return case
    return replace(case, lengths=tuple(-(-length // 64) * 64 for length in case.lengths), bounds=None, tail=0)


def sanitizer() -> str | None:
    """Where compute-sanitizer is."""
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin", Path("/usr/local/cuda/bin")]
    return shutil.which("compute-sanitizer") or next(
        (found for place in places if (found := shutil.which("compute-sanitizer", path=str(place)))), None
    )


def command(sanitizer: str, tool: str, names: list[str]) -> list[str]:
    """The command line of the cases under a tool, or, with no tool, by themselves."""
    program = [sys.executable, str(Path(__file__).resolve()), "--run", *names]
    if not tool:
        return program
    # cuda-python asks the driver for functions that it may not have: no errors of ours.
    options = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}.get(tool, [])
    whole_chunks = ["--whole"] if tool == "racecheck" else []
    return [
        sanitizer, "--tool", tool, *options, "--launch-timeout", "60", "--error-exitcode", str(ERRORS), "--print-limit", "20",
        *program, *whole_chunks,
    ]  # fmt: skip


def environment(tool: str) -> dict[str, str]:
    return {**os.environ, **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})}


def run(chosen: list[Any]) -> int:
    """Operands are made on the CPU and copied, so that nearly every kernel that runs is ours."""
    import torch
    from la_cases.kernels import ENGINES
    from la_cases.running import check, outputs

    torch.set_num_threads(1)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    wrong = 0
    for case in chosen:
        if not case.decodes and not hopper:
            print(f"{case.name}: left out, the kernels are for compute capability 9.0", flush=True)
            continue
        start = time.perf_counter()
        try:
            check(case, outputs(case, "cuda", ENGINES[case.op]))
            said = "right"
        except Exception as error:  # the other cases still tell something
            wrong += 1
            said = f"WRONG: {type(error).__name__}: {error}"
        print(f"{case.name}: {said}, {time.perf_counter() - start:.1f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    raise SystemExit(main(sys.argv[1:]))

"""Runs every kernel of the package once under NVIDIA's compute-sanitizer, on small cases whose results are compared.

    python plugins/linear_attention/tests/sanitize.py [--tool NAME ...] [--only TEXT ...] [--list]

The tools are memcheck (with an allocation for each tensor, so that a step outside of one is seen) and racecheck, in turn. The cases run
without a tool first: that compiles the kernels. Under racecheck sequences are whole chunks: the rows behind a partial one are cleared by all
lanes of a warp, which meet before one of them arrives at an mbarrier, and the tool knows neither that meeting (ptxas leaves nothing of
it in converged code) nor what it means for those who wait (compute-sanitizer of CUDA 13.0); the emulator checks it. Exit status 1: a finding or a wrong result; 3: no GPU, or no compute-sanitizer. It takes
a minute or so; `make sanitize-la` does it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck")
PREFILL = (
    "d128", "zero-length-and-one-token", "slots", "k-major-rectangular", "all-in-kernel", "poisoned-padding", "steep-gates",
)  # fmt: skip
DECODE = ("d128", "k-major", "8-tokens", "slots-skipped", "speculative-varlen", "all-in-kernel", "bf16-state")
ERRORS = 9  # exit status of compute-sanitizer where it found something


def cases() -> list[Any]:
    """For each op a few small cases, and a prefill of few heads that is cut into segments."""
    from la_cases.cases import named

    found = []
    for op in ("gdn", "kda"):
        found += [named(f"{op}-{name}") for name in (*PREFILL, *(("channel-moving",) if op == "kda" else ()))]
        long = replace(named(f"{op}-d128"), name=f"{op}-segments", lengths=(2048, 65), heads=(1, 1, 2))
        found += [long, *(named(f"{op}_decode-{name}") for name in DECODE)]
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", nargs="*", default=list(TOOLS), metavar="NAME", help=f"default: {' '.join(TOOLS)}")
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cases whose name contains one of these")
    parser.add_argument("--list", action="store_true", help="the names of the cases, and nothing else")
    parser.add_argument("--whole", action="store_true", help="prefills of whole chunks")
    parser.add_argument("--run", action="store_true", help="run the cases in this process, without a tool")
    args = parser.parse_args(arguments)
    chosen = [case for case in cases() if not args.only or any(text in case.name for text in args.only)]
    if args.whole:
        chosen = [whole(case) for case in chosen]
    if args.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if args.run:
        return run(chosen)
    import torch

    tool = sanitizer()
    if tool is None or not torch.cuda.is_available():
        print("no GPU" if tool else "no compute-sanitizer on PATH, in $CUDA_HOME or /usr/local/cuda", file=sys.stderr)
        return 3
    failed = []
    for name in ("", *args.tool):
        start = time.perf_counter()
        code = subprocess.run(command(tool, name, args.only), env=environment(name), check=False).returncode
        said = {0: "clean", ERRORS: "FINDINGS"}.get(code, f"FAILED with {code}")
        print(f"{name or 'without a tool'}: {said}, {time.perf_counter() - start:.0f} s", flush=True)
        if code:
            failed.append(name)
            if not name:
                break  # what is wrong without a tool says nothing about memory
    return 1 if failed else 0


def whole(case: Any) -> Any:
    """A prefill with its sequences' ends at the ends of chunks, and no tokens behind the last one."""
    if case.decodes:
        return case
    return replace(case, lengths=tuple(-(-length // 64) * 64 for length in case.lengths), tail=0)


def sanitizer() -> str | None:
    """Where compute-sanitizer is."""
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin", Path("/usr/local/cuda/bin")]
    return shutil.which("compute-sanitizer") or next(
        (found for place in places if (found := shutil.which("compute-sanitizer", path=str(place)))), None
    )


def command(sanitizer: str, tool: str, only: list[str]) -> list[str]:
    """The command line of the cases under a tool, or, with no tool, by themselves."""
    program = [sys.executable, str(Path(__file__).resolve()), "--run", *(["--only", *only] if only else [])]
    if not tool:
        return program
    # cuda-python asks the driver for functions that it may not have: no errors of ours.
    options = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}.get(tool, [])
    whole_chunks = ["--whole"] if tool == "racecheck" else []
    return [
        sanitizer,
        "--tool",
        tool,
        *options,
        "--error-exitcode",
        str(ERRORS),
        "--print-limit",
        "20",
        *program,
        *whole_chunks,
    ]


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

"""Runs the recorded kernels of tests/data/kernels in the emulator: see kernels/record.py for how they were made."""

import json
import lzma
import runpy
import zlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).parent
DATA = HERE / "data" / "kernels"


CASES = runpy.run_path(str(HERE / "kernels" / "cases.py"))["CASES"]


@cache
def recording(key):
    """Entry, launch, parameters and PTX of a case. A file may be the edits to the lines of another case's PTX."""
    found = json.loads(lzma.decompress((DATA / f"{key}.json.xz").read_bytes()))
    if "like" not in found:
        return found
    base = recording(found["like"])
    if zlib.crc32(base["ptx"].encode()) != found["crc"]:
        raise ValueError(f"{found['like']} was recorded anew: record {key} too")
    lines = base["ptx"].split("\n")
    for start, stop, new in reversed(found["edits"]):
        lines[start:stop] = new
    return {**base, "ptx": "\n".join(lines)}


class Outcome(NamedTuple):
    """Report of the emulator, largest error (nan: an element was never written)."""

    report: object
    error: float


def run(key, seed=0, ptx=None, parameters=None, **options):
    """Run a recorded kernel (or other `ptx` or `parameters` in place of its own) on the inputs of `seed` and compare with numpy."""
    from ptx_emulator import run_ptx

    recorded, case = recording(key), CASES[key]
    arrays, answer = case.make(np.random.default_rng(1000 + seed))
    output = arrays[-1]
    output[:] = np.nan
    buffers = {
        address: array.reshape(-1).view(np.uint8) for address, array in zip(recorded["addresses"], arrays, strict=True)
    }
    report = run_ptx(
        ptx or recorded["ptx"], recorded["entry"], recorded["grid"], recorded["block"], recorded["cluster"],
        parameters or [bytes.fromhex(p) for p in recorded["parameters"]], seed=seed, dynamic_smem=recorded["dynamic_smem"],
        buffers=buffers, outputs=[buffers[recorded["addresses"][-1]]], programmatic=recorded["programmatic"], **options,
    )  # fmt: skip
    return Outcome(report, float(np.abs(output - answer).max()))

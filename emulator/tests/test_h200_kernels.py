"""The recorded Hopper kernels against an H200: data/h200_kernels.npz holds what they returned there (kernels/record_h200.py).

Copies are compared bit for bit, GEMMs within `accumulation_bound`; where the sums are exact in float32, bit for bit too.
"""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator import run_ptx
from ptx_emulator._matmul import accumulation_bound

HERE = Path(__file__).parent
_RECORD = runpy.run_path(str(HERE / "kernels" / "record_h200.py"))
CASES, SHAPES, bitwise, crc, digest, inputs, sample = (
    _RECORD[name] for name in ("CASES", "SHAPES", "bitwise", "crc", "digest", "inputs", "sample")
)
recording = runpy.run_path(str(HERE / "_recorded.py"))["recording"]
with np.load(HERE / "data" / "h200_kernels.npz") as stored:
    OUTPUTS = dict(stored)
INDEX = json.loads(OUTPUTS["index"].tobytes())


def emulated(case):
    """What the emulator returns for the inputs of a case."""
    key, _ = CASES[case]
    recorded, (shape, dtype) = recording(key), SHAPES[key][-1]
    arrays = [*inputs(case), np.full(shape, np.nan, dtype)]
    assert crc(arrays[:-1]) == INDEX[case][0], "not the inputs that the GPU had"
    views = [array.reshape(-1).view(np.uint8) for array in arrays]
    report = run_ptx(
        recorded["ptx"], recorded["entry"], recorded["grid"], recorded["block"], recorded["cluster"],
        [bytes.fromhex(p) for p in recorded["parameters"]], dynamic_smem=recorded["dynamic_smem"],
        buffers=dict(zip(recorded["addresses"], views, strict=True)), outputs=[views[-1]],
    )  # fmt: skip
    assert report.findings == ()
    return arrays


def test_the_recording_is_of_an_h200_and_complete():
    assert "H200" in INDEX["device"]
    assert set(INDEX) - {"device", "driver"} == set(CASES)


@pytest.mark.parametrize("case", list(filter(bitwise, CASES)))
def test_copies_and_exact_sums_are_the_bits_that_the_h200_returns(case):
    output = emulated(case)[-1]
    np.testing.assert_array_equal(sample(output).view(np.uint32), OUTPUTS[case.replace("/", ".")].view(np.uint32))
    assert digest(output) == INDEX[case][1]


@pytest.mark.parametrize("case", [case for case in CASES if not bitwise(case)])
def test_gemm_returns_what_the_h200_does(case):
    a, b, output = emulated(case)
    expected = OUTPUTS[case.replace("/", ".")]
    assert digest(expected) == INDEX[case][1]
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(output), finite)
    np.testing.assert_array_equal(output[~finite], expected[~finite])  # infinities with their sign; NaN equals NaN
    with np.errstate(all="ignore"):
        bound = accumulation_bound(a.astype(np.float64), b.astype(np.float64))
        error = np.abs(output.astype(np.float64) - expected)
    assert (error[finite] <= bound[finite]).all()

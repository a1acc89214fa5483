"""mma.sync, wgmma, ldmatrix and stmatrix against an H200: data/h200_matrix.xz holds shared-memory images, descriptors
(every swizzle, both majornesses, base offsets, odd strides) and the registers that the GPU returned.

Of an image the bytes that an operand covers are kept (the others are zero here, and were not on the GPU), of the result of a
wgmma the registers of every 27th thread, and a digest of all.
"""

import hashlib
import runpy
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator._fragments import ldmatrix_map, mma_fragment, stmatrix_map, wgmma_a, wgmma_accumulator
from ptx_emulator._layout import decode_wgmma, gather_operand, matrix_problems
from ptx_emulator._matmul import accumulate, decode_elements

CASES, _blob = runpy.run_path(str(Path(__file__).with_name("_h200.py")))["load"]("h200_matrix")
BLOB = np.frombuffer(_blob, np.uint8)
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
RESULTS = {"f32": np.float32, "s32": np.int32, "f16": np.float16}


def _bytes(reference):
    return BLOB[reference[0] : reference[0] + reference[1]]


def _of(what):
    return [pytest.param(c, id=f"{i}-{c.get('type', c.get('num'))}") for i, c in enumerate(CASES) if c["what"] == what]


@pytest.mark.parametrize("case", _of("wgmma"))
def test_wgmma_reads_and_returns_what_the_h200_does(case):
    name, k, n = case["type"], case["k"], case["n"]
    memory, kbytes = _bytes(case["image"]), case["k"] * BITS[name] // 8

    def operand(value, rows, transposed):
        desc, major = decode_wgmma(value), "MN" if transposed else "K"
        assert matrix_problems(desc, rows, kbytes, major, BITS[name], "wgmma") == []
        return decode_elements(gather_operand(memory, desc, rows, kbytes, major, BITS[name]), name)

    if case["rs"]:
        registers = decode_elements(_bytes(case["a"]).reshape(128, 16), name)
        a = np.zeros((64, k), registers.dtype)
        a[wgmma_a(k, BITS[name])] = registers
    else:
        a = operand(case["a"], 64, case["ta"])
    kind = "s32" if name in ("s8", "u8") else "f32"
    result = accumulate(a, operand(case["b"], n, case["tb"]), None, kind)[wgmma_accumulator(n)]
    np.testing.assert_array_equal(result[::27], _bytes(case["out"]).view(RESULTS[kind]).reshape(5, -1))
    whole = np.ascontiguousarray(result, RESULTS[kind]).tobytes()
    assert hashlib.sha256(whole).hexdigest()[:16] == case["digest"]


@pytest.mark.parametrize("case", _of("mma"))
def test_mma_returns_what_the_h200_does(case):
    name, shape, k = case["type"], case["shape"], int(case["shape"].partition("k")[2])
    registers = _bytes(case["image"]).reshape(32, -1)
    a, b = np.zeros((16, k)), np.zeros((k, 8))
    a[mma_fragment(shape, "a", BITS[name])] = decode_elements(registers[:, : 4 * case["na"]], name)
    b[mma_fragment(shape, "b", BITS[name])] = decode_elements(registers[:, 4 * case["na"] :], name)
    result = accumulate(a, b.T, None, case["acc"])[mma_fragment(shape, "c", 32)]
    np.testing.assert_array_equal(result, _bytes(case["out"]).view(RESULTS[case["acc"]]).reshape(32, -1))


@pytest.mark.parametrize("case", _of("ldmatrix"))
def test_ldmatrix_returns_what_the_h200_does(case):
    source, offset = ldmatrix_map("m8n8", case["num"], bool(case["trans"]), 16)
    memory = _bytes(case["image"]).view(np.uint16)
    np.testing.assert_array_equal(memory[(source * 16 + offset) // 2].ravel(), _bytes(case["out"]).view(np.uint16))


@pytest.mark.parametrize("case", _of("stmatrix"))
def test_stmatrix_writes_what_the_h200_does(case):
    lane, offset = stmatrix_map("m8n8", case["num"], bool(case["trans"]), 16)
    memory = np.zeros(256, np.uint16)
    memory[(lane * 16 + offset) // 2] = _bytes(case["image"]).view(np.uint16).reshape(lane.shape)
    np.testing.assert_array_equal(memory, _bytes(case["out"]).view(np.uint16))

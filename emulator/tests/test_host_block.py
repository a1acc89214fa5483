"""Host memory as an argument: its address words become the device's, its value words host addresses."""

import runpy
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ptx_emulator import EmulationError, launch, record

HOSTS = runpy.run_path(str(Path(__file__).with_name("_hosts.py")))
host_object, axpy = HOSTS["host_object"], HOSTS["axpy"]
pytestmark = HOSTS["needs_compiler"]

FFI = "--keep-ptx --keep-cubin --enable-tvm-ffi"

# words: x, y, n, address of the scale
AXPY = """
    struct { float *x, *y; int64_t n; float *scale; } *w = *(void **)a[0];
    if ((uintptr_t)w % 16) { *result = 98; return; }
    dim one = {1, 1, 1}, block = {32, 1, 1}, grid = {(w->n + 31) / 32, 1, 1};
    void *p[] = {&w->x, &w->y, w->scale, &w->n};
    *result = run(grid, block, one, 0, p);
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PTX_EMULATOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "emulator_cache"))


def host_block(x, y, n=None, scale=2.0, **changes):
    words = struct.pack("<QQqQ", x.ctypes.data, y.ctypes.data, len(x) if n is None else n, 0)
    fields = {"data": words, "addresses": (0, 8), "values": ((24, struct.pack("<f", scale)),)}
    return SimpleNamespace(**{**fields, **changes})


def vectors(n=100):
    rng = np.random.default_rng(0)
    return rng.standard_normal(n).astype(np.float32), rng.standard_normal(n).astype(np.float32)


def test_a_host_function_reads_addresses_sizes_and_values_from_the_block():
    x, y = vectors()
    expected = y + x[0:] * np.float32(2)
    report = launch(host_object(AXPY), host_block(x, y), None, ptx=axpy(), buffers=[x, y])
    assert report.findings == ()
    np.testing.assert_allclose(y, expected, rtol=2**-23)


def test_addresses_inside_a_tensor_are_moved_with_it():
    base, y = vectors(300)
    before = y.copy()
    launch(host_object(AXPY), host_block(base[100:200], y[50:150]), ptx=axpy(), buffers=[base, y])
    before[50:150] += base[100:200] * 2
    np.testing.assert_allclose(y, before, rtol=2**-23)


def test_memory_behind_the_block_is_checked_as_any_other():
    x, y = vectors(32)
    report = launch(host_object(AXPY), host_block(x, y), ptx=axpy(), buffers=[x, y], outputs=[y])
    assert {finding.kind for finding in report.findings} == {"uninitialised"}
    report = launch(host_object(AXPY), host_block(x, y, n=33), ptx=axpy(), buffers=[x, y])
    assert {finding.kind for finding in report.findings} == {"out_of_bounds"}


def test_the_caller_s_block_is_left_alone_and_a_null_word_stays_null():
    body = "uint64_t *w = *(void **)a[0]; *result = w[0] ? 99 : w[1] != 7; w[0] = 1;"
    data = bytearray(struct.pack("<QQ", 0, 7))
    launch(host_object(body), SimpleNamespace(data=data, addresses=[0]), ptx=axpy())
    assert data == struct.pack("<QQ", 0, 7)


def test_an_address_of_nothing_that_was_given_is_an_error():
    x, y = vectors()
    with pytest.raises(EmulationError, match=r"argument 0: the word at byte 8 of the host block is 0x\w+, .*buffers="):
        launch(host_object(AXPY), host_block(x, y), ptx=axpy(), buffers=[x])


@pytest.mark.parametrize(("changes", "problem"), [
    ({"addresses": (0, 28)}, "the word at byte 28 is not in the 32 bytes of the host block"),
    ({"addresses": (-8,)}, "the word at byte -8 is not in"),
    ({"addresses": (0, 4)}, "the word at byte 4 of the host block overlaps another one"),
    ({"values": ((8, b"abcd"),)}, "the word at byte 8 of the host block overlaps another one"),
])  # fmt: skip
def test_words_outside_the_block_or_over_each_other_are_refused(changes, problem):
    x, y = vectors()
    with pytest.raises(EmulationError, match=f"argument 0: {problem}"):
        launch(host_object(AXPY), host_block(x, y, **changes), ptx=axpy(), buffers=[x, y])


@pytest.fixture(scope="module")
def dsl():
    pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    pytest.importorskip("torch")
    return runpy.run_path(str(Path(__file__).with_name("_dsl.py")))


@pytest.mark.parametrize("options", ["--keep-ptx --keep-cubin", FFI])
def test_a_compiled_function_takes_a_block_for_its_address(dsl, options):
    if options == FFI:
        pytest.importorskip("tvm_ffi")
    function = dsl["compile_in_block"]("sm_100a", options)
    x, y = vectors(50)
    block = host_block(x, y, scale=0.5)
    report = launch(function, block, dsl["stream"](), buffers=[x, y], outputs=[y])
    assert report.findings == ()
    np.testing.assert_array_equal(y, x * np.float32(0.5))
    (made,) = record(function, block, dsl["stream"](), buffers=[x, y])
    assert made.block == (64, 1, 1)

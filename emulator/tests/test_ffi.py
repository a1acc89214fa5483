"""Host functions compiled for TVM-FFI: written in C here, and at the end real CuTe DSL functions and their objects."""

import ctypes
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ptx_emulator import EmulationError, launch, record
from ptx_emulator._runtime import host_function

HOSTS = runpy.run_path(str(Path(__file__).with_name("_hosts.py")))
host_object, axpy = HOSTS["host_object"], HOSTS["axpy"]
pytestmark = HOSTS["needs_compiler"]

FFI = "--keep-ptx --keep-cubin --enable-tvm-ffi"

# x, y: tensors; scale: float; the stream
AXPY = """
    if (count != 4) return refuse("TypeError", "four arguments, ", "not this many");
    tensor *x = a[0].v.p, *y = a[1].v.p;
    float scale = a[2].v.f; int32_t n = x->shape[0];
    dim one = {1, 1, 1}, block = {32, 1, 1}, grid = {(n + 31) / 32, 1, 1};
    void *p[] = {&x->data, &y->data, &scale, &n};
    int error = run(grid, block, one, 0, p);
    if (error) { CuteDSLRT_TVMFFISetRaisedCudaError(TVMFFIErrorSetRaisedFromCStrParts, error); return -1; }
    return 0;
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PTX_EMULATOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "emulator_cache"))


@pytest.fixture(scope="module")
def add():
    return host_object(AXPY, ffi=True)


def vectors(n=100):
    rng = np.random.default_rng(0)
    return rng.standard_normal(n).astype(np.float32), rng.standard_normal(n).astype(np.float32)


def test_the_ffi_function_is_the_host_function(add):
    found = host_function(add)
    assert (found.call, found.ffi) == ("__tvm_ffi_k", True)
    with pytest.raises(EmulationError, match=r"whose name contains 'other', .*found: none"):
        host_function(add, "other")


def test_tensors_floats_and_a_null_stream_are_passed_as_any_values(add):
    x, y = vectors()
    expected = y + x * np.float32(2)
    report = launch(add, x, y, 2.0, None, ptx=axpy(), outputs=[])
    assert report.findings == ()
    np.testing.assert_allclose(y, expected, rtol=2**-23)


def test_a_dl_tensor_is_on_cuda_and_has_extents_strides_and_type():
    checks = """
    tensor *t = a[0].v.p; array *c = a[1].v.p;
    if (a[0].type != 7 || t->rank != 2 || t->device[0] != 2 || t->device[1] || t->at) return refuse("E", "tensor", 0);
    if (t->shape[0] != 3 || t->shape[1] != 4 || t->strides[0] != 16 || t->strides[1] != 2) return refuse("E", "layout", 0);
    if (t->code != 2 || t->bits != 16 || t->lanes != 1 || (uintptr_t)t->data % 256 != DATA) return refuse("E", "data", 0);
    if (a[1].type != 71 || c->type != 71 || c->size != 3 || c->references != 1) return refuse("E", "array", 0);
    if (c->items[0].type != 1 || c->items[0].v.i != -5) return refuse("E", "int", 0);
    if (c->items[1].type != 71 || ((array *)c->items[1].v.p)->items[0].v.p != t->data) return refuse("E", "address", 0);
    if (c->items[2].type != 2 || c->items[2].v.i != 1 || a[2].type != 3 || a[2].v.f != 0.1) return refuse("E", "bool, float", 0);
    if (a[3].type || a[3].v.i || a[4].type != 1 || a[4].v.p != t->data || a[5].v.i != 7) return refuse("E", "scalars", 0);
    return 0;
    """
    tensor = np.zeros((3, 16), np.float16)[:, :8:2]
    raw = host_object(checks.replace("DATA", str(tensor.ctypes.data % 256)), ffi=True)
    address = tensor.ctypes.data
    launch(raw, tensor, (-5, [address], True), 0.1, None, ctypes.c_void_p(address), np.int16(7), ptx=axpy())


@pytest.mark.parametrize(("dtype", "code", "bits", "lanes"), [
    ("bfloat16", 4, 16, 1), ("float8_e4m3fn", 10, 8, 1), ("float8_e5m2", 12, 8, 1), ("float8_e8m0fnu", 14, 8, 1),
    ("float4_e2m1fn_x2", 17, 4, 2), ("bool", 6, 8, 1), ("uint8", 1, 8, 1), ("int64", 0, 64, 1),
])  # fmt: skip
def test_torch_types_have_their_dlpack_codes(dtype, code, bits, lanes):
    torch = pytest.importorskip("torch")
    from ptx_emulator._arena import Arena
    from ptx_emulator._ffi_arguments import pack_ffi

    tensor = torch.zeros(16, dtype=torch.uint8).view(getattr(torch, dtype))
    ((kind, fields),) = pack_ffi([tensor], Arena(), ())
    assert (kind, fields["dtype"]) == ("tensor", (code, bits, lanes))
    assert (fields["shape"], fields["strides"]) == (list(tensor.shape), [1])


def test_an_empty_tensor_has_an_address_where_nothing_is(add):
    x, y = np.ones(32, np.float32), np.zeros(0, np.float32)
    report = launch(add, x, y, 2.0, None, ptx=axpy())
    assert {finding.kind for finding in report.findings} == {"out_of_bounds"}


def test_the_error_that_the_function_raises_is_the_message(add):
    with pytest.raises(EmulationError, match=r"failed in __tvm_ffi_k: TypeError: four arguments, not this many$"):
        launch(add, ptx=axpy())


def test_a_runtime_error_keeps_its_reason():
    raw = host_object(
        "int v; CuteDSLRT_TVMFFISetRaisedCudaError(0, _cudaDeviceGetAttribute(&v, 4711, 0)); return -1;", ffi=True
    )
    with pytest.raises(
        EmulationError, match=r"__tvm_ffi_k with cudaErrorInvalidValue: .*device attribute .*\(4711, 0\)"
    ):
        launch(raw, ptx=axpy())


def test_a_kernel_without_ptx_is_named():
    with pytest.raises(EmulationError, match="launches saxpy, of which there is no PTX"):
        launch(host_object(AXPY, kernel="saxpy", ffi=True), *vectors(), 2.0, None, ptx=axpy())


def test_what_is_no_argument_is_refused(add):
    for value, problem in (
        (object(), "argument 1: a TVM-FFI function takes no object"),
        (2**64, "argument 1: .* does not fit into 64 bits"),
        (np.zeros(2, np.complex64), "argument 1: DLPack has no data type for complex64"),
        (b"abc", "argument 1: a TVM-FFI function takes no bytes"),
    ):
        with pytest.raises(EmulationError, match=problem):
            launch(add, 1, value, ptx=axpy())


# --- real CuTe DSL functions
@pytest.fixture(scope="module")
def dsl():
    pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    pytest.importorskip("tvm_ffi")
    pytest.importorskip("torch")
    return runpy.run_path(str(Path(__file__).with_name("_dsl.py")))


@pytest.mark.parametrize("how", ["torch", "numpy", "cute"])
def test_a_function_compiled_for_tvm_ffi_runs_with_the_arguments_it_takes(dsl, how):
    import torch

    function = dsl["compile_axpy"]("sm_100a", FFI)
    x, y = torch.randn(1000), torch.randn(1000)
    out = torch.full((1000,), float("nan"))
    tensors = [x, y, out]
    given = {"torch": list, "numpy": lambda ts: [t.numpy() for t in ts], "cute": dsl["cute_tensors"]}[how](tensors)
    report = launch(function, *given, 2.0, dsl["stream"](), outputs=[given[2]])
    assert report.findings == ()
    torch.testing.assert_close(out, y + x * 2)


def test_its_own_checks_of_the_arguments_run(dsl):
    import torch

    function = dsl["compile_axpy"]("sm_100a", FFI)
    x = torch.ones(64)
    with pytest.raises(EmulationError, match="TypeError: Mismatched type on argument #1 .*expected Tensor"):
        launch(function, x, 3, x, 2.0, dsl["stream"]())
    with pytest.raises(EmulationError, match="ValueError: .*#1"):
        launch(function, x, torch.ones(65), torch.ones(64), 2.0, dsl["stream"]())


def test_tuples_booleans_and_pointers(dsl):
    import torch

    function = dsl["compile_scaled"]("sm_90a", FFI)
    x, y = torch.randn(50), torch.zeros(50)
    for pointer in (dsl["pointer"](y), y.data_ptr()):
        y.zero_()
        report = launch(
            function, (x, torch.ones(50)), 3.0, True, pointer, 50, dsl["stream"](), buffers=[y], outputs=[y]
        )
        assert report.findings == ()
        torch.testing.assert_close(y, x * -3)
    with pytest.raises(EmulationError, match=r"argument 3 points to 0x.* in buffers="):
        launch(function, (x, x), 3.0, True, dsl["pointer"](y), 50, dsl["stream"]())


def test_an_exported_object_or_its_artifact_needs_no_dsl(dsl, tmp_path):
    function = dsl["compile_axpy"]("sm_100a", FFI)
    function.export_to_c(str(tmp_path / "k.o"), function_name="k")
    x, y = vectors(1000)
    expected = y + x * np.float32(2)
    artifact = SimpleNamespace(name="k", object=(tmp_path / "k.o").read_bytes(), ptx=function.__ptx__)
    for subject, options in ((artifact, {}), (tmp_path / "k.o", {"ptx": function.__ptx__})):
        out = np.zeros(1000, np.float32)
        assert launch(subject, x, y, out, 2.0, None, **options).findings == ()
        np.testing.assert_allclose(out, expected, rtol=2**-22)
    (made,) = record(artifact, x, y, out, 2.0, None)
    assert made.grid == (4, 1, 1)
    assert made.cubin == function.__cubin__

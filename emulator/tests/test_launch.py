"""`launch` and `record`: with host objects written in C here, and at the end with real CuTe DSL functions."""

import ctypes
import io
import os
import re
import runpy
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ptx_emulator
import pytest
from ptx_emulator import Descriptor, EmulationError, FindingError, UnsupportedError, launch, record
from ptx_emulator._arena import Arena
from ptx_emulator._progress import Progress

HOSTS = runpy.run_path(str(Path(__file__).with_name("_hosts.py")))
host_object, axpy = HOSTS["host_object"], HOSTS["axpy"]
pytestmark = HOSTS["needs_compiler"]

LAUNCH = "dim one = {1, 1, 1}, block = {32, 1, 1}; void *p[] = {a[0], a[0], a[1], a[2]};"


@pytest.fixture(scope="module")
def add():
    return host_object()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PTX_EMULATOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "emulator_cache"))


def vectors(n=100, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(n).astype(np.float32), rng.standard_normal(n).astype(np.float32)


def run_axpy(add, x, y, scale=2.0, n=None, **options):
    tail = Descriptor(x, shapes=[0])
    if n is not None:
        tail.tail = struct.pack("<i", n)
    return launch(add, tail, Descriptor(y, shapes=[0]), scale, ptx=options.pop("ptx", axpy()), **options)


# --- running
def test_the_host_function_decides_the_launch_and_the_result_is_in_the_arguments(add):
    x, y = vectors()
    expected, before = y + x * np.float32(2), x.copy()
    report = run_axpy(add, x, y)
    assert report.findings == ()
    assert report.counts["launches"] == 1
    np.testing.assert_allclose(y, expected, rtol=2**-23)
    np.testing.assert_array_equal(x, before)


def test_torch_tensors_are_written_in_place(add):
    torch = pytest.importorskip("torch")
    x, y = (torch.from_numpy(v) for v in vectors())
    expected, pointer = y + x * 2, y.data_ptr()
    run_axpy(add, x, y)
    assert y.data_ptr() == pointer
    torch.testing.assert_close(y, expected)


def test_a_view_leaves_what_is_around_it_alone(add):
    base = np.arange(300, dtype=np.float32)
    x, _ = vectors()
    view = base[100:200]
    expected = base.copy()
    expected[100:200] += x * 2
    assert run_axpy(add, x, view).findings == ()
    np.testing.assert_allclose(base, expected, rtol=2**-23)


def test_arguments_may_share_memory(add):
    base = np.ones(300, np.float32)
    assert run_axpy(add, base[:100], base[100:200], buffers=[base[50:250]]).findings == ()
    assert run_axpy(add, base[:100], base[:100]).findings == ()
    np.testing.assert_array_equal(base, np.repeat(np.array([3, 3, 1], np.float32), 100))


def test_path_artifact_and_bytes_are_the_same_object(add, tmp_path):
    x, y = vectors()
    expected = y + x * np.float32(2)
    (tmp_path / "k.o").write_bytes(add)
    (tmp_path / "k.ptx").write_text(axpy())
    artifact = SimpleNamespace(name="k", arch="100a", entry="axpy", cubin=b"", ptx=axpy(), object=add)
    for subject, options in ((tmp_path / "k.o", {"ptx": tmp_path / "k.ptx"}), (artifact, {})):
        out = y.copy()
        launch(subject, Descriptor(x, shapes=[0]), Descriptor(out, shapes=[0]), 2.0, **options)
        np.testing.assert_allclose(out, expected, rtol=2**-23)


def test_launches_run_in_order_and_their_counts_add_up():
    twice = host_object(LAUNCH + "*result = run(one, block, one, 0, p) || run(one, block, one, 0, p);")
    y = np.ones(32, np.float32)
    report = launch(twice, y, 1.0, 32, ptx=axpy())
    assert report.counts["launches"] == 2
    np.testing.assert_array_equal(y, np.full(32, 4, np.float32))


def test_what_one_launch_leaves_unwritten_is_uninitialised_for_the_next():
    copy = axpy().replace("fma.rn.f32 %f4, %f2, %f1, %f3", "mul.rn.f32 %f4, %f2, %f1")
    copy = copy.replace("ld.global.f32 %f3, [%rd7];", "")
    body = """
    dim one = {1, 1, 1}, block = {32, 1, 1};
    void *first[] = {a[0], a[1], a[3], a[4]}, *second[] = {a[1], a[2], a[3], a[5]};
    *result = run(one, block, one, 0, first) || run(one, block, one, 0, second);
    """
    raw = host_object(body)
    for written, kinds in ((32, set()), (16, {"uninitialised"})):
        x, middle, out = (np.full(32, value, np.float32) for value in (1, np.nan, np.nan))
        report = launch(raw, x, middle, out, 2.0, written, 32, ptx=copy, outputs=[middle, out])
        assert {finding.kind for finding in report.findings} == kinds
        np.testing.assert_array_equal(out[:written], np.full(written, 4, np.float32))


# --- recording
def test_a_record_has_what_the_host_function_asked_for():
    body = LAUNCH + """
    dim grid = {4, 2, 6}, cluster = {2, 1, 3};
    _cudaFuncSetAttribute(kernel, 8, 100000);
    *result = run(grid, block, cluster, 100000, p);
    """  # fmt: skip
    y = np.ones(8, np.float32)
    (made,) = record(host_object(body), y, 1.5, 8, ptx=axpy())
    assert (made.kernel, made.grid, made.block, made.cluster) == ("axpy", (4, 2, 6), (32, 1, 1), (2, 1, 3))
    assert made.dynamic_smem == 100000
    assert [len(raw) for raw in made.params] == [8, 8, 4, 4]
    assert struct.unpack("<fi", made.params[2] + made.params[3]) == (1.5, 8)
    assert [kind for kind, _ in made.attributes] == [6, 4]
    np.testing.assert_array_equal(y, np.ones(8, np.float32))


def test_addresses_do_not_depend_on_the_process(add):
    params = []
    for seed in range(3):
        hold = [np.empty(1000 * seed, np.float32)]
        raw = [np.empty(100 * 4 + 256, np.uint8) for _ in range(2)]
        x, y = (r[-r.ctypes.data % 256 :][:400].view(np.float32) for r in (raw if seed != 1 else raw[::-1]))
        x[:], y[:] = vectors(seed=seed)
        params.append(record(add, Descriptor(x, shapes=[0]), Descriptor(y, shapes=[0]), 2.0, ptx=axpy())[0].params)
        del hold
    assert params[0] == params[1] == params[2]


# --- findings
def test_reading_an_output_is_a_finding(add):
    x, y = vectors(32)
    report = run_axpy(add, x, y, outputs=[y], seed=3)
    (finding,) = report.findings
    assert (finding.kind, finding.seed) == ("uninitialised", 3)
    assert isinstance(finding.agents, tuple)
    with pytest.raises(FindingError, match="uninitialised"):
        run_axpy(add, x, y, outputs=[y], check="raise")


def test_an_access_past_a_tensor_is_found_even_before_another_one(add):
    x, y = vectors(32)
    report = run_axpy(add, x, y, n=33)
    assert {finding.kind for finding in report.findings} == {"out_of_bounds"}


def test_more_dynamic_shared_memory_than_was_set_is_a_finding():
    grown = host_object(LAUNCH + "_cudaFuncSetAttribute(kernel, 8, 1000); *result = run(one, block, one, 2000, p);")
    y = np.ones(8, np.float32)
    (finding,) = launch(grown, y, 1.0, 8, ptx=axpy()).findings
    assert finding.kind == "limits"
    assert "2000 bytes of dynamic shared memory" in finding.message
    with pytest.raises(FindingError):
        launch(grown, y, 1.0, 8, ptx=axpy(), check="raise")


def test_a_strict_launch_applies_the_strict_rules(add):
    x, y = vectors(32)
    hasty = """ .shared .b32 where; .reg .b32 %t<4>; mov.b32 %t0, where;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%t0], 32; ld.shared.b32 %t1, [%t0]; mov.b32 %t2, 0;
 tcgen05.st.sync.aligned.32x32b.x1.b32 [%t1], {%t2}; tcgen05.wait::st.sync.aligned;
 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%t2}, [%t1]; add.u32 %t2, %t2, 1; tcgen05.wait::ld.sync.aligned;
 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t1, 32; ret;"""
    text = re.sub(r"(?<!\S)ret;", lambda _: hasty, axpy())
    assert not run_axpy(add, x, y, ptx=text).findings
    (finding,) = run_axpy(add, x, y, ptx=text, strict=True).findings
    assert finding.kind == "uncommitted"


# --- errors
def test_a_host_function_that_touches_device_memory_dies_readably():
    bad = host_object("**(volatile int **)a[0] = 1; *result = 0;")
    with pytest.raises(
        EmulationError, match=r"child process died of SIGSEGV in the host function; it wrote:\n[\s\S]*Fatal"
    ):
        launch(bad, np.ones(8, np.float32), ptx=axpy())


def test_a_child_that_exits_is_reported():
    with pytest.raises(EmulationError, match="exited with status 7 in the host function"):
        launch(host_object("_exit(7);"), ptx=axpy())


def test_a_timeout_ends_the_child():
    start = time.monotonic()
    with pytest.raises(EmulationError, match=r"did not end within 1\.5 s; pass timeout="):
        launch(host_object("for (;;) usleep(1000);"), ptx=axpy(), timeout=1.5)
    assert time.monotonic() - start < 10


def test_an_error_of_the_host_function_has_the_runtimes_reason():
    asks = host_object("int v; *result = _cudaDeviceGetAttribute(&v, 4711, 0);")
    with pytest.raises(EmulationError, match=r"cudaErrorInvalidValue: .*device attribute .*\(4711, 0\)"):
        launch(asks, ptx=axpy())
    with pytest.raises(EmulationError, match="with error 719"):
        launch(host_object("*result = 719;"), ptx=axpy())


def test_a_kernel_without_ptx_is_named():
    other = host_object(LAUNCH + "*result = run(one, block, one, 0, p);", kernel="saxpy")
    with pytest.raises(EmulationError, match=r"launches saxpy, of which there is no PTX \(there is of: axpy\)"):
        launch(other, np.ones(8, np.float32), 1.0, 8, ptx=axpy())


def test_an_instruction_that_is_not_covered_keeps_its_line(add):
    x, y = vectors()
    text = axpy().replace("fma.rn.f32 %f4, %f2, %f1, %f3;", "\n fma.rn.f33 %f4, %f2, %f1, %f3;")
    line = next(number for number, row in enumerate(text.splitlines(), 1) if "f33" in row)
    with pytest.raises(UnsupportedError, match=r"fma\.rn\.f33") as caught:
        launch(add, Descriptor(x, shapes=[0]), Descriptor(y, shapes=[0]), 1.0, ptx=text)
    assert (caught.value.op, caught.value.line) == ("fma.rn.f33", line)


def test_a_write_to_read_only_memory_is_an_error(add):
    x, y = vectors()
    y.flags.writeable = False
    with pytest.raises(EmulationError, match="wrote to read-only memory: argument 1"):
        run_axpy(add, x, y)


def test_what_cannot_be_launched_says_so(add):
    with pytest.raises(EmulationError, match="cannot launch a dict"):
        launch({})
    with pytest.raises(EmulationError, match="no PTX of the object's kernels: pass ptx="):
        launch(add)
    with pytest.raises(EmulationError, match="`object` is empty"):
        launch(SimpleNamespace(object=b"", ptx=axpy()))
    with pytest.raises(EmulationError, match="does not fit into int32"):
        launch(add, 2**31, ptx=axpy())
    with pytest.raises(EmulationError, match="argument 0 is a null pointer|not a tensor: object"):
        launch(add, object(), ptx=axpy())
    with pytest.raises(ValueError, match="check must be"):
        launch(add, ptx=axpy(), check="maybe")


def test_the_child_multiplies_on_one_thread_unless_the_environment_says_otherwise(monkeypatch):
    asks = host_object(
        'extern char *getenv(const char *); char *v = getenv("OPENBLAS_NUM_THREADS"); *result = v ? *v - 48 : 99;'
    )
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with pytest.raises(EmulationError, match="cudaErrorInvalidValue"):  # 1
        launch(asks, ptx=axpy())
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    with pytest.raises(EmulationError, match="error 3"):
        launch(asks, ptx=axpy())


def test_nothing_is_left_open(add):
    x, y = vectors()
    run_axpy(add, x, y)
    before = sorted(Path("/proc/self/fd").iterdir())
    run_axpy(add, x, y)
    with pytest.raises(EmulationError):
        launch(host_object("_exit(7);"), ptx=axpy())
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_values_are_packed_by_their_types():
    from ptx_emulator._arguments import pack_plain

    values = [7, 1.5, True, None, np.float16(1), ctypes.c_int64(-1), b"abc"]
    assert [raw for _, raw in pack_plain(values, Arena(), ())] == [
        struct.pack("<i", 7), struct.pack("<f", 1.5), b"\1", bytes(8), b"\0<", b"\xff" * 8, b"abc",
    ]  # fmt: skip


def test_a_descriptor_holds_the_dynamic_dimensions():
    tensor = np.zeros((3, 5, 8), np.float32)[:, :, ::2]
    assert Descriptor(tensor).tail == b""
    assert Descriptor(tensor, [1], [0]).tail == struct.pack("<iiq", 5, 0, 40)
    assert Descriptor(tensor, [0, 2], [0, 1], narrow=True).tail == struct.pack("<iiii", 3, 4, 40, 8)


# --- progress
def test_progress_is_for_terminals_and_leaves_no_line(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    quiet, shown = io.StringIO(), io.StringIO()
    for stream, show in ((quiet, None), (shown, True)):
        clock[0] = 0.0
        progress = Progress(stream, show=show)
        progress.launches(["first", "second"])
        progress.update(0, 0, 8, 10)
        clock[0] = 3.0
        progress.update(1, 4, 8, 1234567)
        progress.close()
    assert quiet.getvalue() == ""
    _, line, blank, end = shown.getvalue().split("\r")
    assert line == "second 2/2 [##########..........] 4/8 clusters, 1,234,567 warp instructions, 3 s"
    assert (blank.strip(), len(blank), end) == ("", len(line), "")


def test_a_long_launch_reports_its_progress(add, monkeypatch, capsys):
    monkeypatch.setattr("ptx_emulator._progress._PATIENCE", 0)
    x, y = vectors(32 * 2000)
    run_axpy(add, x, y)
    assert capsys.readouterr().err == ""
    run_axpy(add, x, y, progress=True)
    assert re.search(r"\raxpy \[[#.]{20}\] \d+/2000 clusters, [\d,]+ warp instructions, \d+ s", capsys.readouterr().err)


# --- the fixture
pytest_plugins = ["pytester"]


def test_the_fixture_raises_on_findings_and_takes_its_seed_from_the_command_line(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(ptx_emulator.__file__).parents[1]), prepend=os.pathsep)
    pytester.makepyfile(
        f"""
        import runpy, numpy as np, pytest
        from ptx_emulator import Descriptor, FindingError
        hosts = runpy.run_path({str(Path(__file__).with_name("_hosts.py"))!r})
        def test_it(emulate):
            raw, x, y = hosts["host_object"](), np.ones(8, np.float32), np.ones(8, np.float32)
            run = lambda **o: emulate(raw, Descriptor(x, [0]), Descriptor(y, [0]), 1.0, ptx=hosts["axpy"](), **o)
            run()
            with pytest.raises(FindingError) as caught:
                run(outputs=[y])
            assert caught.value.finding.seed == 5
            assert run(outputs=[y], check="report").findings
        """
    )
    plugin = [] if pytester_has_plugin() else ["-p", "ptx_emulator.pytest_plugin"]
    result = pytester.runpytest_subprocess(*plugin, "--emulator-seed", "5")
    result.assert_outcomes(passed=1)


def pytester_has_plugin():
    from importlib.metadata import entry_points

    return any(point.name == "ptx_emulator" for point in entry_points(group="pytest11"))


# --- real CuTe DSL functions
@pytest.fixture(scope="module")
def dsl():
    pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    pytest.importorskip("torch")
    return runpy.run_path(str(Path(__file__).with_name("_dsl.py")))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_107a"])
@pytest.mark.parametrize("how", ["torch", "numpy", "cute"])
def test_a_compiled_function_runs_with_the_arguments_it_takes(dsl, arch, how):
    import torch

    function = dsl["compile_axpy"](arch)
    x, y = torch.randn(1000), torch.randn(1000)
    out = torch.full((1000,), float("nan"))
    tensors = [x, y, out]
    given = {"torch": list, "numpy": lambda ts: [t.numpy() for t in ts], "cute": dsl["cute_tensors"]}[how](tensors)
    report = launch(function, *given, 2.0, dsl["stream"](), outputs=[given[2]])
    assert report.findings == ()
    assert report.counts["launches"] == 1
    torch.testing.assert_close(out, y + x * 2)


def test_a_compiled_function_records_its_launch_and_its_cubin(dsl):
    import torch

    function = dsl["compile_axpy"]("sm_90a")
    (made,) = record(function, *(torch.ones(1000) for _ in range(3)), 2.0, dsl["stream"]())
    assert (made.grid, made.block, made.cluster) == ((4, 1, 1), (256, 1, 1), (1, 1, 1))
    assert made.cubin == function.__cubin__
    assert [len(raw) for raw in made.params] == [16, 16, 16, 4]


def test_pointers_need_their_tensors(dsl):
    import torch

    function = dsl["compile_fill"]("sm_100a")
    out = torch.zeros(64)
    with pytest.raises(EmulationError, match=r"argument 0 points to 0x.* pass the tensor .* in buffers="):
        launch(function, dsl["pointer"](out), 64, dsl["stream"]())
    report = launch(function, dsl["pointer"](out), 64, dsl["stream"](), buffers=[out], outputs=[out])
    assert report.findings == ()
    assert out.tolist() == list(range(64))
    short = launch(function, dsl["pointer"](out), 65, dsl["stream"](), buffers=[out])
    assert {finding.kind for finding in short.findings} == {"out_of_bounds"}


def test_a_bool_argument_which_has_no_form_in_an_exported_header(dsl):
    import torch

    function = dsl["compile_flag"]("sm_90a")
    for value in (False, True):
        out = torch.zeros(32)
        assert launch(function, out, value, dsl["stream"]()).findings == ()
        assert out.tolist() == [float(value)] * 32


def test_a_cluster_launch_and_its_shared_memory_come_from_the_host_function(dsl):
    import torch

    function = dsl["compile_ranks"]("sm_90a")
    out = torch.full((8,), -1, dtype=torch.int32)
    (made,) = record(function, out, dsl["stream"]())
    assert (made.grid, made.cluster, made.dynamic_smem) == ((8, 1, 1), (4, 1, 1), 60000)
    assert launch(function, out, dsl["stream"]()).findings == ()
    assert out.tolist() == [0, 1, 2, 3] * 2


def test_a_compiled_function_without_ptx_says_which_option(dsl):
    with pytest.raises(EmulationError, match="--keep-ptx"):
        launch(dsl["compile_axpy"]("sm_90a", options=""))


def test_an_exported_object_runs_without_the_dsl_in_the_parent(dsl, tmp_path):
    function = dsl["compile_axpy"]("sm_100a")
    function.export_to_c(file_path=str(tmp_path), file_name="axpy", function_prefix="mine")
    (tmp_path / "axpy.ptx").write_text(function.__ptx__)
    x, y = vectors(1000)
    out = np.zeros(1000, np.float32)
    three = [Descriptor(v, shapes=[0]) for v in (x, y, out)]
    assert launch(tmp_path / "axpy.o", *three, 2.0, None, ptx=tmp_path / "axpy.ptx").findings == ()
    np.testing.assert_allclose(out, y + x * np.float32(2), rtol=2**-22)


def test_an_output_that_is_no_argument_is_refused(add):
    x, y = vectors()
    with pytest.raises(EmulationError, match=r"outputs\[0\] is neither an argument nor a buffer"):
        run_axpy(add, x, y, outputs=[y[:]])


@pytest.mark.parametrize(
    ("options", "text"),
    [({"seed": -1}, "seed"), ({"timeout": float("nan")}, "timeout"), ({"limits": {"grid_q": 1}}, "grid_q")],
)
def test_values_of_options_that_mean_nothing(add, options, text):
    with pytest.raises(EmulationError, match=text):
        run_axpy(add, *vectors(), **options)

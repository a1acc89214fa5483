"""Compilation: the target is pinned, kernels have names, the cache serves what it should and nothing else, failures say what failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cudnn_core import BuildError, CompileCache, DriverError, HostBlock, _cute_compile, _driver, cute_dsl

pytest.importorskip("cutlass")
from tests.cute_dsl import _kernels as kernels

PACKAGE = "tests.cute_dsl"


def build(cache, make=kernels.Sum, **changes):
    given = {"name": "acme_sum", "target": "sm_90a", "engine": "acme:sum@1", "program": {"op": "sum"}} | changes
    return cute_dsl.compiled(make, **{"package": PACKAGE, **given}, cache=cache)


@pytest.fixture
def cache(tmp_path):
    return CompileCache("acme", root=tmp_path / "cache")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return CompileCache("acme", root=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def made():
    """The number of compilations since the test began."""
    before = kernels.Sum.made
    return lambda: kernels.Sum.made - before


def entries(kernel):
    return re.findall(r"\.entry\s+([\w$]+)", kernel.ptx)


def run(kernel, *words):
    """out of a launch in the emulator with the words behind its address; none: with address 0."""
    np = pytest.importorskip("numpy")
    ptx_emulator = pytest.importorskip("ptx_emulator")
    out = np.full(2 * kernels.THREADS, -1, np.float32)
    block = HostBlock(np.array([out.ctypes.data, *words], np.int64).tobytes(), (0,)) if words else 0
    report = ptx_emulator.launch(kernel.artifact, block, None, buffers=[out], limits="90a")
    assert report.findings == ()
    return out[: kernels.THREADS]


# --- the target and the names
@pytest.mark.parametrize(("arch", "sm"), [("80", 80), ("90a", 90), ("100a", 100), ("103a", 103)])
def test_target_is_the_one_asked_for_in_the_ptx_and_in_the_cubin(shared, arch, sm):
    kernel = build(shared, target=f"sm_{arch}")
    assert kernel.arch == arch
    assert re.search(rf"^\.target sm_{arch}$", kernel.ptx, re.MULTILINE)
    assert cute_dsl.cubin_sm(kernel.cubin) == sm
    assert kernel.object[:4] == b"\x7fELF"
    assert kernel.cubin in kernel.object


def test_a_kernel_has_the_name_it_was_given(shared):
    kernel = build(shared)
    assert kernel.name == "acme_sum"
    assert [kernel.entry] == entries(kernel) == ["acme_sum_0"]
    assert kernel.artifact == ("acme_sum", "90a", kernel.entry, kernel.cubin, kernel.ptx, kernel.object)


def test_kernels_are_named_after_their_methods_and_parts_and_the_entry_is_the_main_one(shared):
    kernel = build(shared, kernels.Several, name="acme")
    assert sorted(entries(kernel)) == ["acme_2", "acme_add_1", "acme_fill_0"]
    assert kernel.entry == "acme_2"
    assert (run(kernel, 0, 0) == [2 * (3 + i) for i in range(kernels.THREADS)]).all()


def test_the_entry_of_a_class_without_a_main_kernel_is_the_first_launch(shared):
    assert build(shared, kernels.NoKernelMethod, name="acme_3").entry == "acme_3_first_0"


def test_the_function_launches_and_address_0_does_not(shared):
    kernel = build(shared, lambda: kernels.Sum(10), program={"scale": 10})
    assert (run(kernel, 3, 4) == [70 + i for i in range(kernels.THREADS)]).all()
    assert (run(kernel) == -1).all()


# --- the cache
def test_second_request_does_not_compile(cache, made):
    assert build(cache) == build(cache)
    assert made() == 1


@pytest.mark.parametrize(
    "change",
    [
        {"name": "acme_other"},
        {"target": "sm_100a"},
        {"engine": "acme:sum@2"},
        {"program": {"op": "sum", "scale": 1}},
        {"package": "tests.zoo"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_the_code_is_another_entry(cache, made, change):
    build(cache)
    build(cache, **change)
    assert made() == 2


@pytest.mark.parametrize("dist", ["nvidia-cutlass-dsl", "apache-tvm-ffi"])
def test_another_toolchain_is_a_miss(shared, made, monkeypatch, dist):
    build(shared)
    real, first = cute_dsl.toolchain(), made()
    assert dist in real
    monkeypatch.setattr(cute_dsl, "toolchain", lambda: {**real, dist: "9.9"})
    build(shared)
    assert made() == first + 1


def test_damaged_entry_is_compiled_anew(cache, made, tmp_path):
    kernel = build(cache)
    (marker,) = tmp_path.rglob("commit.json")
    for payload in marker.parent.iterdir():
        if payload.name != "commit.json":
            payload.write_bytes(payload.read_bytes()[:-1] + b"?")
    assert build(cache) == kernel
    assert made() == 2


def test_without_a_cache_it_is_the_plugins_own(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        cute_dsl, "CompileCache", lambda plugin: asked.append(plugin) or CompileCache(plugin, root=tmp_path)
    )
    build(None)
    assert asked == ["acme"]


def test_two_architectures_in_one_process_and_many_threads(cache, made):
    targets = ["sm_90a", "sm_100a", "sm_80"] * 2
    found = {}

    def work(number):
        found[number] = build(cache, target=targets[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(re.search(rf"^\.target {targets[n]}$", found[n].ptx, re.MULTILINE) for n in range(len(targets)))
    assert made() == 3


def test_nothing_is_left_in_the_working_directory_or_the_environment(shared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    assert callable(cute_dsl.load(build(shared, name="acme_tidy")))
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before


def test_a_new_process_needs_no_dsl_for_a_hit_and_no_compiler_to_load(cache, tmp_path):
    kernel = build(cache)
    program = (
        "import sys, pathlib\n"
        "sys.modules['torch'] = None  # two seconds of what the runtime imports where it can\n"
        "from cudnn_core import CompileCache, cute_dsl\n"
        "cute_dsl.sources_digest = lambda package: sys.argv[2]\n"
        "kernel = cute_dsl.compiled(None, name='acme_sum', target='sm_90a', engine='acme:sum@1', program={'op': 'sum'},\n"
        "    package='tests.cute_dsl', cache=CompileCache('acme', root=pathlib.Path(sys.argv[1])))\n"
        "print(kernel.entry, 'cutlass' in sys.modules)\n"
        "import cutlass.cute\n"
        "cutlass.cute.compile = None\n"
        "print(callable(cute_dsl.load(kernel)))\n"
    )
    arguments = [str(tmp_path / "cache"), cute_dsl.sources_digest(PACKAGE)]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [kernel.entry, "False", "True"]


# --- failures
def test_a_kernel_that_does_not_trace_is_a_build_error_with_its_reason(cache):
    with pytest.raises(BuildError, match=r"acme_sum does not compile for sm_90a.*no such tile"):
        build(cache, kernels.Untraceable)


def test_an_instruction_of_another_generation_is_a_build_error(cache):
    with pytest.raises(BuildError, match="acme_sum does not compile for sm_100a"):
        build(cache, kernels.OnlyForHopper, target="sm_100a")


def test_a_class_without_kernels_of_its_own_is_a_build_error(cache):
    build(cache, kernels.Several, name="acme")  # leaves no name on the class that it shares
    with pytest.raises(BuildError, match=r"acme_sum has no kernel of that name, only kernel_.*Fill"):
        build(cache, kernels.ForeignKernel)


def test_a_failure_is_not_kept(cache):
    with pytest.raises(BuildError):
        build(cache, kernels.Untraceable)
    assert build(cache).entry == "acme_sum_0"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "acme-sum"}, "'acme-sum' is not a name"),
        ({"target": "90a"}, "'90a' is not a target for acme_sum"),
        ({"engine": "Acme!"}, "'Acme!' is not a plugin id"),
        ({"program": {"tile": object()}}, "compile cache"),
        ({"package": "acme_not_here"}, "sources of acme_not_here are not found"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_build_errors(change, text, cache, made):
    with pytest.raises(BuildError, match=text):
        build(None if "engine" in change else cache, **change)
    assert made() == 0


def test_a_compiler_that_ignores_the_target_is_refused(shared):
    kernel = build(shared)
    with pytest.raises(
        BuildError, match=r"acme: the DSL compiled for sm_90a .* not for sm_100a: it can't pin its target"
    ):
        _cute_compile._check_target("acme", kernel.cubin, kernel.ptx, "sm_100a")
    with pytest.raises(BuildError, match="can't pin"):
        _cute_compile._check_target("acme", kernel.cubin, kernel.ptx.replace("sm_90a", "sm_100a"), "sm_100a")


def test_an_object_that_is_damaged_does_not_load(shared):
    import dataclasses

    kernel = build(shared)
    with pytest.raises(BuildError, match="the object of acme_sum can't be loaded"):
        cute_dsl.load(dataclasses.replace(kernel, object=kernel.object[:200]))


@pytest.mark.parametrize("missing", ["cutlass", "cutlass.cute"])
def test_a_missing_dsl_is_a_build_error_that_says_what_to_install(cache, made, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(BuildError, match=rf"acme_sum needs {missing}.*pip install 'nvidia-cutlass-dsl>=4.7'"):
        build(cache)
    assert made() == 0


def test_a_module_that_the_kernel_lacks_is_a_build_error(cache):
    def make():
        import acme_not_here  # noqa: F401

    with pytest.raises(BuildError, match="acme_sum needs acme_not_here"):
        build(cache, make)


# --- saved kernels
def test_a_kernel_survives_saving(shared):
    kernel = build(shared)
    header, payloads = kernel.serialize()
    assert cute_dsl.CompiledKernel.restored(header, payloads, "sm_90a") == kernel


def test_a_saved_kernel_of_something_else_is_refused(shared):
    header, payloads = build(shared).serialize()
    for change, text in (
        ({"header": {**header, "arch": "100a"}}, "acme_sum is of another architecture: 100a, not 90a"),
        ({"target": "sm_100a"}, "another architecture: 90a, not 100a"),
        ({"header": {**header, "runtime": {"nvidia-cutlass-dsl": "4.7.0"}}}, "another runtime"),
        ({"header": {**header, "entry": "other"}}, "another one's entry: other"),
        ({"header": {**header, "name": 1}}, "another one's entry"),
        ({"header": {}}, "not a plan with a compiled kernel"),
        ({"payloads": {}}, "not a plan with a compiled kernel"),
        ({"payloads": {**payloads, "ptx": b"\xff"}}, "not a plan with a compiled kernel"),
        ({"payloads": {**payloads, "cubin": b"another"}}, "acme_sum does not hold its cubin"),
    ):
        with pytest.raises(BuildError, match=text):
            cute_dsl.CompiledKernel.restored(**{"header": header, "payloads": payloads, "target": "sm_90a", **change})


# --- loading
@pytest.mark.parametrize("absent", [True, False])
def test_gpu_code_that_can_not_be_loaded_is_a_driver_error_with_the_cause(absent):
    """Without a driver the DSL's runtime raises a RuntimeError that names neither the kernel nor what to do."""

    def fail(words, stream):
        assert (words, stream) == (0, 0)
        raise RuntimeError("Got Cuda Runtime Error: \x1b[31mcudaErrorInsufficientDriver")

    text = "dep.driver libcuda .*; RuntimeError: Got" if absent else "can't be loaded: RuntimeError: Got"
    with _driver.use_driver(None if absent else object()), pytest.raises(DriverError, match=text) as raised:
        cute_dsl.load_code(fail)
    assert "\x1b" not in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_loaded_function_is_called_once_with_address_0_and_returned():
    calls = []
    assert cute_dsl.load_code(lambda *given: calls.append(given)) is not None
    assert calls == [(0, 0)]


def test_a_real_kernel_without_a_device_says_so(shared):
    if _driver.driver() is not None:
        pytest.skip("there is a device")
    function = cute_dsl.load(build(shared))
    with pytest.raises(DriverError, match="the kernel's GPU code can't be loaded: "):
        cute_dsl.load_code(function)


# --- the guide
def test_the_guides_kernel_compiles_and_runs(tmp_path, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs" / "writing-an-engine.md").read_text(encoding="utf-8")
    (kernel,) = re.findall(r"<!-- kernel -->\n```python\n# my_kernels/scale.py\n(.*?)```", guide, re.DOTALL)
    (use,) = re.findall(r"<!-- compiled -->\n```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "my_kernels").mkdir()
    (tmp_path / "my_kernels" / "scale.py").write_text(kernel, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cute_dsl, "CompileCache", lambda plugin: CompileCache(plugin, root=tmp_path / "cache"))
    space = {}
    exec(use, space)
    assert space["kernel"].entry == "my_scale_f32_0"
    np = pytest.importorskip("numpy")
    ptx_emulator = pytest.importorskip("ptx_emulator")
    x, y = np.arange(300, dtype=np.float32), np.zeros(300, np.float32)
    block = HostBlock(np.array([x.ctypes.data, y.ctypes.data, 300], np.int64).tobytes(), (0, 8))
    report = ptx_emulator.launch(space["kernel"].artifact, block, None, buffers=[x, y], limits="90a")
    assert report.findings == ()
    assert (y == 2 * x).all()

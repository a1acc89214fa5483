"""Compilation: the target is pinned, the cache serves what it should and nothing else, objects load without the compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from frost_gemm import compile as compiling
from frost_gemm.config import TileConfig
from frost_gemm.facts import arch_facts
from frost_gemm.ir import Gemm, Matrix, Op, Program, Ref, Store
from frost_gemm.layout import KernelLayout

from cudnn_core import BuildError, CompileCache, DeviceInfo

pytest.importorskip("cutlass")
import fake_kernels

ENGINE = "frost_gemm:fake@1"
PROGRAM = Program(
    a=(Matrix("bfloat16"),), b=(Matrix("bfloat16"),), gemms=(Gemm(),), stores=(Store(Ref("acc", 0), "float32"),)
)
CONFIG = TileConfig(tile_m=64)
LAYOUT = KernelLayout(
    stages=2, a_bytes=0, b_bytes=0, stage_bytes=0, threads=32, epi_m=64, epi_n=32, store_modes=("vector",),
    staging_bytes=0, staging_slots=0, partial_bytes=0, shared_bytes=0,
)  # fmt: skip


def facts(device):
    return arch_facts(DeviceInfo.preset(device))


@pytest.fixture
def cache(tmp_path):
    return CompileCache("frost_gemm", root=tmp_path)


@pytest.fixture
def made():
    """The number of compilations since the test began."""
    before = fake_kernels.SumOfSizes.made
    return lambda: fake_kernels.SumOfSizes.made - before


def build(cache, device="H200", program=PROGRAM, config=CONFIG, layout=LAYOUT, engine=ENGINE, kernel=None):
    return compiling.compiled(
        program, config, layout, facts(device), engine, cache=cache, kernel_class=kernel or fake_kernels.SumOfSizes
    )


@pytest.mark.parametrize(
    ("device", "arch", "sm"), [("H200", "90a", 90), ("B200", "100a", 100), ("B300", "103a", 103), ("R200", "107a", 107)]
)
def test_target_is_the_devices_in_the_ptx_and_in_the_cubin(cache, device, arch, sm):
    kernel = build(cache, device)
    assert kernel.arch == arch
    assert re.search(rf"^\.target sm_{arch}$", kernel.ptx, re.MULTILINE)
    assert kernel.cubin[:4] == b"\x7fELF"
    assert compiling.cubin_sm(kernel.cubin) == sm
    assert kernel.object[:4] == b"\x7fELF"
    assert kernel.cubin in kernel.object


def test_profilers_see_engine_generation_types_and_tile(cache):
    kernel = build(cache, config=TileConfig(128, 256, 128, cluster_m=2, schedule="pingpong", split_k=4, swap_ab=True))
    assert re.fullmatch(r"frost_sm90_bf16_128x256x64_2x1_pingpong_split4_swap_[0-9a-f]{8}", kernel.name)
    assert kernel.entry.startswith(kernel.name)
    assert f".entry {kernel.entry}(" in kernel.ptx
    assert kernel.artifact == (kernel.name, "90a", kernel.entry, kernel.cubin, kernel.ptx, kernel.object)


def test_names_tell_epilogues_and_mixed_types_apart():
    mixed = replace(PROGRAM, a=(Matrix("fp8_e4m3"),), b=(Matrix("fp8_e5m2"),))
    relu = replace(PROGRAM, ops=(Op("relu", (Ref("acc", 0),), "float32"),))
    cast = replace(PROGRAM, b=(Matrix("int8", mma_dtype="bfloat16"),))
    names = {compiling.kernel_name(p, CONFIG, facts("H200")) for p in (PROGRAM, mixed, relu, cast)}
    assert len(names) == 4
    assert any("_bf16_int8tobf16_" in name for name in names)
    assert any("e4m3_e5m2_64x128x128" in name for name in names)


def test_second_request_does_not_compile(cache, made):
    assert build(cache) == build(cache)
    assert made() == 1


@pytest.mark.parametrize(
    "change",
    [
        {"program": replace(PROGRAM, promote=True)},
        {"config": replace(CONFIG, stages=3)},
        {"layout": replace(LAYOUT, threads=64)},
        {"engine": "frost_gemm:fake@2"},
        {"device": "B200"},
        {"device": "B300"},
    ],
    ids=lambda change: next(iter(change)) + str(next(iter(change.values())))[:5],
)
def test_whatever_changes_the_code_is_another_entry(cache, made, change):
    build(cache)
    build(cache, **change)
    assert made() == 2


def test_changed_source_of_a_helper_is_a_miss(cache, made, monkeypatch):
    build(cache)
    monkeypatch.setattr(compiling, "sources_digest", lambda: "another")
    build(cache)
    assert made() == 2


def test_the_digest_covers_every_module_of_the_package(tmp_path, monkeypatch):
    package = tmp_path / "frost_gemm"
    (package / "kernels").mkdir(parents=True)
    for name in ("compile.py", "kernels/epilogue.py"):
        (package / name).write_text("1\n")
    monkeypatch.setattr(compiling, "__file__", str(package / "compile.py"))
    digest = compiling.sources_digest.__wrapped__
    before = digest()
    assert digest() == before
    (package / "kernels/epilogue.py").write_text("2\n")
    assert digest() != before


@pytest.mark.parametrize("dist", ["nvidia-cutlass-dsl", "apache-tvm-ffi", "nvidia-cutlass-dsl-libs-cu13"])
def test_another_toolchain_is_a_miss(cache, made, monkeypatch, dist):
    build(cache)
    real = compiling.toolchain()
    assert dist in real
    monkeypatch.setattr(compiling, "toolchain", lambda: {**real, dist: "9.9"})
    build(cache)
    assert made() == 2


def test_a_variable_that_steers_the_compiler_has_entries_of_its_own(monkeypatch):
    plain = compiling.toolchain()
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert compiling.toolchain() != plain


def test_damaged_entry_is_compiled_anew(cache, made, tmp_path):
    kernel = build(cache)
    (marker,) = tmp_path.rglob("commit.json")
    for payload in marker.parent.iterdir():
        if payload.name != "commit.json":
            payload.write_bytes(payload.read_bytes()[:-1] + b"?")
    assert build(cache) == kernel
    assert made() == 2


def test_two_architectures_in_one_process_and_many_threads(cache, made):
    devices = ["H200", "B200", "B300", "H200", "B200", "B300"]
    found: dict[int, compiling.CompiledKernel] = {}

    def work(number):
        found[number] = build(cache, devices[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number].arch for number in range(6)] == ["90a", "100a", "103a"] * 2
    assert all(f".target sm_{found[n].arch}" in found[n].ptx for n in range(6))
    assert made() == 3


def test_nothing_is_left_in_the_working_directory_or_the_environment(cache, tmp_path, monkeypatch):
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = dict(os.environ)
    compiling.load(build(cache))
    assert list(folder.iterdir()) == []
    assert dict(os.environ) == before


def test_a_kernel_that_does_not_trace_is_a_build_error_with_its_reason(cache):
    with pytest.raises(BuildError, match=r"does not compile for sm_90a.*no such tile"):
        build(cache, kernel=fake_kernels.Broken)


def test_the_compilers_message_is_repeated_on_one_line_without_colours():
    error = RuntimeError(
        "\x1b[91merror:\x1b[0m backend failed\n  log: bad ordering\n  \x1b[92msuggestion:\x1b[0m set a path"
    )
    assert compiling._said(error) == "RuntimeError: error: backend failed log: bad ordering"


def test_an_instruction_of_another_generation_is_a_build_error(cache):
    assert build(cache, "H200", kernel=fake_kernels.OnlyForHopper).arch == "90a"
    with pytest.raises(BuildError, match="does not compile for sm_100a"):
        build(cache, "B200", kernel=fake_kernels.OnlyForHopper)


def test_a_compiler_that_ignores_the_target_is_refused(cache):
    kernel = build(cache, "H200")
    with pytest.raises(BuildError, match=r"compiled for sm_90a .* not for sm_100a: it can't pin its target"):
        compiling._check_target(kernel.cubin, kernel.ptx, "sm_100a")
    with pytest.raises(BuildError, match="can't pin"):
        compiling._check_target(kernel.cubin, kernel.ptx.replace("sm_90a", "sm_100a"), "sm_100a")


def test_a_path_in_place_of_the_cubin_is_no_cubin():
    with pytest.raises(BuildError, match="no cubin"):
        compiling.cubin_sm(b"/tmp/dump/kernel.sm_90a.cubin" + bytes(60))


def test_a_missing_dsl_is_a_build_error_that_says_what_to_install(cache, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(compiling.importlib, "import_module", missing)
    with pytest.raises(BuildError, match=r"pip install 'nvidia-cutlass-dsl>=4.7'"):
        build(cache)


def test_an_object_that_is_damaged_does_not_load(cache):
    kernel = build(cache)
    with pytest.raises(BuildError, match="can't be loaded"):
        compiling.load(replace(kernel, object=kernel.object[:200]))


def test_a_new_process_loads_from_the_cache_without_compiling(cache, tmp_path):
    build(cache)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_compile as t, fake_kernels, pathlib\n"
        "from cudnn_core import CompileCache\n"
        "import cutlass.cute as cute\n"
        "def refuse(*a, **k): raise SystemExit('compiled')\n"
        "t.compiling.sources_digest = lambda: sys.argv[3]\n"
        "cute.compile = refuse\n"
        "kernel = t.build(CompileCache('frost_gemm', root=pathlib.Path(sys.argv[2])))\n"
        "print(callable(t.compiling.load(kernel)), fake_kernels.SumOfSizes.made)\n"
    )
    here = str(Path(__file__).parent)
    arguments = [here, str(tmp_path), compiling.sources_digest()]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0"]


def test_the_emulator_runs_what_the_object_holds(cache):
    np = pytest.importorskip("numpy")
    ptx_emulator = pytest.importorskip("ptx_emulator")
    import struct

    from frost_gemm.ir import argument_words

    kernel = build(cache)
    out = np.full(32, -1, np.float32)
    names = argument_words(PROGRAM)
    words = dict.fromkeys(names, 0) | {"m": 5, "n": 7, "k": 11, "l": 2, "store0.address": out.ctypes.data}

    class Block:
        data = struct.pack(f"<{len(names)}q", *words.values())
        addresses = (8 * names["store0.address"],)

    report = ptx_emulator.launch(kernel.artifact, Block(), None, buffers=[out], limits="90a")
    assert report.findings == ()
    assert (out == 64 * 25 + np.arange(32)).all()

"""Compilation: the target is the device's, the cache serves what it should and nothing else. The rest: tests/cute_dsl of the core."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
from frost_gemm import compile as compiling
from frost_gemm.config import TileConfig
from frost_gemm.facts import arch_facts
from frost_gemm.ir import Gemm, Matrix, Op, Program, Ref, Store
from frost_gemm.layout import KernelLayout

from cudnn_core import BuildError, CompileCache, DeviceInfo, cute_dsl

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
    assert cute_dsl.cubin_sm(kernel.cubin) == sm
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
    monkeypatch.setattr(cute_dsl, "sources_digest", lambda package: {"frost_gemm": "another"}[package])
    build(cache)
    assert made() == 2


def test_a_kernel_that_does_not_trace_is_a_build_error_with_its_reason(cache):
    with pytest.raises(BuildError, match=r"does not compile for sm_90a.*no such tile"):
        build(cache, kernel=fake_kernels.Broken)


def test_an_instruction_of_another_generation_is_a_build_error(cache):
    assert build(cache, "H200", kernel=fake_kernels.OnlyForHopper).arch == "90a"
    with pytest.raises(BuildError, match="does not compile for sm_100a"):
        build(cache, "B200", kernel=fake_kernels.OnlyForHopper)


def test_a_missing_dsl_is_a_build_error_that_says_what_to_install(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass.cute", None)
    with pytest.raises(BuildError, match=r"frost_sm90_bf16.*pip install 'nvidia-cutlass-dsl>=4.7'"):
        compiling.compiled(PROGRAM, CONFIG, LAYOUT, facts("H200"), ENGINE, cache=cache)


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

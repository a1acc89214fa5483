import ctypes
import json
import lzma
import os
import runpy
import stat
import struct
from pathlib import Path

import pytest
from ptx_emulator import EmulationError
from ptx_emulator._elf import read_image, read_object
from ptx_emulator._limits import capability, device_attributes, device_limits
from ptx_emulator._runtime import cache_folder, compiler, host_function, link_object, runtime_library
from ptx_emulator._tensor_map import TensorMap, decode_tensor_map, encode_tensor_map

HOSTS = runpy.run_path(str(Path(__file__).with_name("_hosts.py")))
needs_compiler, host_object = HOSTS["needs_compiler"], HOSTS["host_object"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PTX_EMULATOR_CACHE_DIR", str(folder))
    return folder


def tool(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


# --- building
@needs_compiler
def test_the_runtime_is_built_once_for_a_source_and_a_compiler(cache):
    first = runtime_library()
    made = first.stat().st_mtime_ns
    assert first.parent == cache
    assert runtime_library() == first
    assert first.stat().st_mtime_ns == made
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [path.name for path in cache.iterdir()] == [first.name]


@needs_compiler
def test_another_compiler_gets_its_own_runtime(cache, tmp_path, monkeypatch):
    first = runtime_library()
    real = compiler()[0]
    monkeypatch.setenv(
        "CC", str(tool(tmp_path, "mycc", f'[ "$1" = --version ] && echo other && exit; exec {real} "$@"'))
    )
    assert runtime_library() != first


def test_no_compiler_is_an_error_that_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmulationError, match=r"no C compiler \(cc, gcc and clang\).*Install gcc or clang"):
        compiler()
    monkeypatch.setenv("CC", "nocc -m64")
    with pytest.raises(EmulationError, match=r"no C compiler \(CC=nocc -m64\)"):
        compiler()


def test_what_a_failing_compiler_says_is_in_the_error(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", str(tool(tmp_path, "badcc", '[ "$1" = --version ] && exit; echo no room >&2; exit 1')))
    with pytest.raises(EmulationError, match=r"host runtime does not compile:\nno room"):
        runtime_library()
    with pytest.raises(EmulationError, match=r"host object does not link:\nno room"):
        link_object(b"", tmp_path)


def test_a_cache_that_others_can_write_is_refused(cache):
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(EmulationError, match="can be written by others"):
        cache_folder()


def test_the_cache_follows_xdg_unless_it_is_relative(monkeypatch, tmp_path):
    monkeypatch.delenv("PTX_EMULATOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "ptx_emulator"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / "home" / ".cache" / "ptx_emulator"


# --- host objects
@needs_compiler
def test_the_host_function_is_found_by_its_symbols(cache):
    raw = host_object()
    assert host_function(raw) == (
        "_mlir_t__mlir_ciface_host",
        "_mlir_t_cuda_init",
        "_mlir_t_cuda_load_to_device",
        False,
    )
    assert host_function(raw, "host") == host_function(raw)
    with pytest.raises(EmulationError, match="whose name contains 'guest'"):
        host_function(raw, "guest")


@needs_compiler
def test_a_runtime_function_that_is_missing_is_named(cache):
    with pytest.raises(EmulationError, match=r"runtime does not have: _cudaLibraryUnheardOf$"):
        host_function(host_object("*result = _cudaLibraryUnheardOf();"))


@needs_compiler
def test_symbols_are_those_of_the_object():
    defined, undefined = read_object(host_object())
    assert {"_mlir_t_cuda_init", "_mlir_t__mlir_ciface_host"} <= set(defined)
    assert {"_cudaLaunchKernelEx", "_cudaLibraryLoadData"} <= set(undefined)


@pytest.mark.parametrize("raw", [b"", b"MZ" * 64, b"\x7fELF\x01\x01" + bytes(80)])
def test_what_is_no_object_is_refused(raw):
    with pytest.raises(EmulationError, match="not a 64-bit little-endian ELF"):
        read_object(raw)


@needs_compiler
def test_a_cut_object_is_refused():
    raw = host_object()
    with pytest.raises(EmulationError, match="damaged"):
        read_object(raw[: len(raw) // 2])


@needs_compiler
def test_an_image_in_memory_is_read_to_its_end():
    cubin = host_object()
    entry = struct.pack("<HHIQ", 2, 0x101, 64, len(cubin)) + bytes(48)
    container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry) + len(cubin)) + entry + cubin
    packed = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64 + 64) + struct.pack("<HHIQ", 2, 0x101, 64, 64) + bytes(112)

    def read_from(memory):
        return lambda at, size: memory[at : at + size]

    assert read_image(0, read_from(cubin + b"tail")) == cubin
    assert read_image(0, read_from(container + b"tail" * 32)) == cubin
    assert read_image(0, read_from(packed + b"tail" * 32)) == packed
    assert read_image(0, read_from(b"no cubin" * 8)) == b""


# --- the runtime itself
@needs_compiler
def test_the_runtime_answers_from_its_tables_and_refuses_the_rest(cache):
    runtime = ctypes.CDLL(str(runtime_library()))
    runtime.ptxemu_problem.restype = ctypes.c_char_p
    table = (ctypes.c_int * 4)(8, 49152, 97, 232448)
    runtime.ptxemu_configure(None, table, 2)
    value = ctypes.c_int()
    assert (runtime._cudaDeviceGetAttribute(ctypes.byref(value), 97, 0), value.value) == (0, 232448)
    assert runtime._cudaDeviceGetAttribute(ctypes.byref(value), 1234, 0) == 1
    assert b"attribute, device (1234, 0)" in runtime.ptxemu_problem()
    assert runtime._cudaSetDevice(1) == 1
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    assert runtime._cudaLibraryLoadData(ctypes.byref(library), b"image", None, None, 0, None, None, 0) == 0
    assert runtime._cudaLibraryGetKernel(ctypes.byref(kernel), library, b"k" * 5000) == 0
    for setter in (lambda n: runtime._cudaFuncSetAttribute(kernel, 8, n),
                   lambda n: runtime._cudaKernelSetAttributeForDevice(kernel, 8, n, 0)):  # fmt: skip
        assert (runtime._cuKernelGetAttribute(ctypes.byref(value), 8, kernel, 0), value.value) == (0, 49152)
        assert setter(200000) == 0
        assert (runtime._cuKernelGetAttribute(ctypes.byref(value), 8, kernel, 0), value.value) == (0, 200000)
        assert setter(49152) == 0
        assert setter(-1) == 1
    assert runtime._cudaLaunchKernelEx(None, kernel, None) == 1
    assert runtime._cudaLibraryUnload(library) == 0


# --- limits
class Device:
    compute_capability, sm_count, shared_memory_per_block_optin, oversized_shared_memory_per_block = (
        (10, 3),
        160,
        200000,
        0,
    )


def test_limits_come_from_whatever_names_a_device():
    assert capability("sm_107a") == (10, 7)
    assert capability("90a") == (9, 0)
    assert device_limits("sm_100a", None).shared_per_block == 232448
    assert device_limits("sm_100a", {"shared_per_block": 1000}).shared_per_block == 1000
    assert device_limits("sm_100a", "100a") == device_limits("sm_100a", None)
    assert device_limits("sm_103a", Device()).shared_per_block == 200000
    attributes = dict(device_attributes("sm_103a", device_limits("sm_103a", Device()), Device()))
    assert (attributes[16], attributes[75], attributes[76], attributes[97]) == (160, 10, 3, 200000)


def test_limits_of_another_device_or_of_nothing_are_refused():
    with pytest.raises(EmulationError, match=r"compiled for sm_90a, the device is 10\.3"):
        device_limits("sm_90a", Device())
    with pytest.raises(EmulationError, match="compiled for sm_100a, the device is 90a"):
        device_limits("sm_100a", "90a")
    with pytest.raises(EmulationError, match="not an architecture: 'hopper'"):
        device_limits("sm_100a", "hopper")
    with pytest.raises(EmulationError, match="a mapping, an arch name or a DeviceInfo, not int"):
        device_limits("sm_100a", 3)


def test_a_core_device_is_a_device():
    core = pytest.importorskip("cudnn_core")
    device = core.DeviceInfo.preset("B200")
    assert device_limits("sm_100a", device).shared_per_block == device.shared_memory_per_block_optin


def test_the_process_is_not_changed():
    assert "CUTE_DSL_LIBS" not in os.environ


# --- tensor maps that a host function has the driver make
@needs_compiler
def test_tensor_maps_of_the_runtime_are_those_of_the_driver(cache):
    encode = ctypes.CDLL(str(runtime_library()))._cuTensorMapEncodeTiled
    maps = json.loads(lzma.decompress((Path(__file__).parent / "data" / "h200_tensor_maps.json.xz").read_bytes()))[
        "tiled"
    ]
    for m in maps:
        rank, out = len(m["dims"]), ctypes.create_string_buffer(128)
        wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        failed = encode(out, m["dtype"], rank, ctypes.c_void_p(m["address"]), wide(*m["dims"]), wide(*m["strides"]), narrow(*m["box"]),
                        narrow(*m["element_strides"]), m["interleave"], m["swizzle"], m["l2"], m["oob"])  # fmt: skip
        assert not failed
        assert out.raw[:64].hex() == m["hex"]
    assert len(maps) >= 100


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "swizzle", "name", "mode"),
    [(13, 0, "u4", "none"), (14, 3, "u4_padded", "128B"), (15, 6, "u6_padded", "128B_64B"), (7, 4, "f32", "128B_32B")],
)
def test_tensor_map_types_that_no_hopper_driver_makes(cache, kind, swizzle, name, mode):
    encode = ctypes.CDLL(str(runtime_library()))._cuTensorMapEncodeTiled
    out, pair, single = ctypes.create_string_buffer(128), ctypes.c_uint32 * 2, ctypes.c_uint64 * 1
    extents = (ctypes.c_uint64 * 2)(256, 16)
    assert not encode(
        out, kind, 2, ctypes.c_void_p(1 << 40), extents, single(1 << 10), pair(128, 8), pair(1, 1), 0, swizzle, 0, 0
    )
    expected = TensorMap(1 << 40, name, (256, 16), (1 << 10,), (128, 8), (1, 1), swizzle=mode)
    assert decode_tensor_map(out.raw) == expected
    assert out.raw == encode_tensor_map(expected)
    assert (
        encode(out, 16, 2, ctypes.c_void_p(1 << 40), extents, single(1 << 10), pair(128, 8), pair(1, 1), 0, 0, 0, 0)
        != 0
    )

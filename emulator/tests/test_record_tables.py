"""The script that records the H200 tables, as far as that goes without a GPU: its kernels, run here, return what is kept."""

import ctypes
import json
import lzma
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

HERE = Path(__file__).parent
RECORD = runpy.run_path(str(HERE / "record_tables.py"))
TABLES = runpy.run_path(str(HERE / "_tables.py"))
programs, same, emulator, approximate = (RECORD[name] for name in ("programs", "same", "emulator", "approximate"))
PROGRAMS = programs()
EXACT = [pytest.param(p, id=f"{p.name}-{p.what}") for p in PROGRAMS if not approximate(p)]


def test_every_opcode_and_case_has_a_program_of_its_own():
    assert len({p.name for p in PROGRAMS}) == len(PROGRAMS)
    assert {p.what for p in PROGRAMS} >= set(TABLES["opcodes"]())
    assert sum(bool(p.case) for p in PROGRAMS) == len(TABLES["load"]("h200_matrix")[0])


@pytest.mark.parametrize("program", EXACT[::6])
def test_a_program_returns_what_the_h200_did(program):
    assert same(program, emulator(program))


@pytest.mark.L2
@pytest.mark.parametrize("program", EXACT)
def test_every_program_returns_what_the_h200_did(program):
    assert same(program, emulator(program))


@pytest.mark.skipif(not shutil.which("ptxas"), reason="needs ptxas")
def test_the_assembler_takes_what_a_gpu_would_run(tmp_path):
    (tmp_path / "all.ptx").write_text(TABLES["HEAD"] + "".join(p.text for p in PROGRAMS))
    command = ["ptxas", "-arch=sm_90a", str(tmp_path / "all.ptx"), "-o", str(tmp_path / "all.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


class Driver:
    """The calls of record_h200.Device on host memory; a launch runs in the emulator."""

    name = "none"

    def __init__(self):
        self.memory, self.freed, self.text = {}, 0, ""

    def call(self, name, *args):
        return getattr(self, name)(*args)

    def cuModuleLoadData(self, text):
        assert text.endswith(b"\0")
        self.text = text[:-1].decode()
        return "module"

    def cuModuleGetFunction(self, module, name):
        return module, name.decode()

    def cuMemAlloc(self, size):
        self.memory[address := 0x7F00_0000_0000 + (len(self.memory) << 20)] = np.zeros(size, np.uint8)
        return address

    def cuMemcpyHtoD(self, target, source, size):
        self.memory[target][:size] = np.frombuffer(ctypes.string_at(source, size), np.uint8)

    def cuMemcpyDtoH(self, target, source, size):
        ctypes.memmove(target, self.memory[source].tobytes(), size)

    def cuLaunchKernel(self, function, *args):
        from ptx_emulator import run_ptx

        (module, name), grid, block, (shared, stream, table, extra) = function, args[:3], args[3:6], args[6:]
        assert (module, stream, extra) == ("module", 0, 0)
        entry = self.text[self.text.index(f".entry {name}(") :].partition(")")[0]
        places = (ctypes.c_void_p * entry.count(".param")).from_address(table)
        values = [ctypes.string_at(place, 8) for place in places]
        run_ptx(self.text, name, grid, block, args=values, dynamic_smem=shared, buffers=self.memory, check="raise")

    def cuCtxSynchronize(self):
        pass

    def cuMemFree(self, address):
        self.freed += 1


def test_the_gpu_form_passes_the_driver_what_it_needs(monkeypatch):
    driver, some = Driver(), [PROGRAMS[0], PROGRAMS[-1], next(p for p in PROGRAMS if p.case.get("rs"))]
    scope = RECORD["main"].__globals__
    monkeypatch.setitem(scope, "runpy", SimpleNamespace(run_path=lambda path: {"Device": lambda: driver}))
    gpu = scope["Gpu"](some)
    assert all(same(program, gpu(program)) for program in some)
    assert driver.freed == len(driver.memory) == 7


def test_another_result_is_told_apart():
    for program in (PROGRAMS[0], next(p for p in PROGRAMS if "digest" in p.case), PROGRAMS[-1]):
        result = emulator(program)
        assert same(program, result)
        result.reshape(-1).view(np.uint8)[program.output.itemsize] ^= (
            1  # the second element: of a wgmma a digest sees it
        )
        assert not same(program, result)


def test_seeded_inputs_have_special_values_and_are_the_same_each_time():
    first, second = (programs(seeded=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert [x.tobytes() for x in a.inputs] == [x.tobytes() for x in b.inputs]
    (fma,) = (p for p in first if p.what == "fma.rn.f32")
    values = np.concatenate([x.view(np.float32) for x in fma.inputs])
    assert np.isnan(values).any()
    assert np.isinf(values).any()
    assert (values == 0).any()
    assert ((np.abs(values) > 0.01) & (np.abs(values) < 1000)).sum() >= len(values) // 8


@pytest.mark.parametrize(
    ("kind", "shape"), [("f16", "f16"), ("bf16", "bf16"), ("tf32", "tf32"), ("e4m3", "e4m3"), ("e5m2", "e5m2")]
)
def test_seeded_elements_are_the_integers_whose_sums_are_exact(kind, shape):
    from ptx_emulator._matmul import decode_elements

    values = decode_elements(TABLES["_elements"]("any", kind, 4096), shape)
    assert set(np.unique(values)) == set(range(-4, 5))


def test_a_recording_is_read_back_as_it_was_made(tmp_path, capsys):
    seeded = programs(seeded=True)
    known = {p.what for p in seeded if not p.case}
    some = [p for p in seeded if p.what in ("fma.rn.f16", "setp.lt.u32", "cvt.rn.f32.u64")]
    some += [next(p for p in seeded if p.case.get("what") == "wgmma" and p.case["type"] == "s8" and p.case["rs"])]
    some += [next(p for p in seeded if p.case.get("what") == what) for what in ("mma", "ldmatrix", "stmatrix")]
    assert known >= {p.what for p in some[:3]}
    RECORD["record"](some, emulator, tmp_path)
    assert "h200_matrix" in capsys.readouterr().out
    results = {p.name: emulator(p) for p in some}

    def read(name):
        head, _, blob = lzma.decompress((tmp_path / f"{name}.xz").read_bytes()).partition(b"\n")
        return json.loads(head), blob

    index, blob = read("h200_numerics")
    expected = b"".join(a.tobytes() for p in some[:3] for a in (*p.inputs, results[p.name]))
    assert blob == expected
    assert index["setp.lt.u32"] == ["u4", "u4", "b1"]
    cases, blob = read("h200_matrix")
    wgmma = cases[0]
    assert wgmma["digest"] == RECORD["digest"](results[some[3].name])
    image = np.frombuffer(blob, np.uint8)[wgmma["image"][0] : sum(wgmma["image"])]
    covered = RECORD["covered"](some[3].case)
    np.testing.assert_array_equal(image, np.where(covered, some[3].inputs[0], 0))
    for case, program in zip(cases[1:], some[4:], strict=True):
        assert blob[case["out"][0] : sum(case["out"])] == results[program.name].tobytes()

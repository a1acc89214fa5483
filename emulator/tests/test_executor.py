"""The executor: by itself with a plan-like object, and through `cudnn-core run` with a real plan."""

import ctypes
import json
import runpy
import struct
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ptx_emulator import EmulationError, Report

cudnn_core = pytest.importorskip("cudnn_core")

from ptx_emulator._executor import FoundError, executor, summary  # noqa: E402  # needs cudnn_core when it is called

from cudnn_core._host_arguments import host_arguments  # noqa: E402

HOSTS = runpy.run_path(str(Path(__file__).with_name("_hosts.py")))
pytestmark = HOSTS["needs_compiler"]

# y = a + b: one pointer for each operand, the workspace if there is one, a null stream
ADD = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry add(.param .u64 a, .param .u64 b, .param .u64 y)
{
 .reg .b32 %r<2>; .reg .f32 %f<4>; .reg .b64 %rd<8>;
 ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [y];
 mov.u32 %r1, %tid.x; mul.wide.s32 %rd4, %r1, 4;
 add.s64 %rd5, %rd1, %rd4; ld.global.f32 %f1, [%rd5];
 add.s64 %rd6, %rd2, %rd4; ld.global.f32 %f2, [%rd6];
 add.f32 %f3, %f1, %f2; add.s64 %rd7, %rd3, %rd4; st.global.f32 [%rd7], %f3;
 ret;
}
"""
BODY = """
    dim one = {1, 1, 1}, block = {32, 1, 1};
    void *p[] = {a[0], a[1], a[2]};
    *result = count != 5 ? 99 : run(one, block, one, 0, p);
"""


@pytest.fixture(scope="module")
def artifact():
    raw = HOSTS["host_object"](BODY, kernel="add")
    return cudnn_core.Artifact(name="add", arch="100a", entry="add", ptx=ADD, object=raw)


def operand(name, array, role="input", **fields):
    fields = {"uid": 1, "by_value": False, "dtype": "float32", "dim": array.shape, "stride": (1,), **fields}
    return SimpleNamespace(name=name, role=role, **fields)


class Case:
    """Operands in memory and the plan-like object for them."""

    def __init__(self, *artifacts, n=32, workspace=0, **attributes):
        rng = np.random.default_rng(0)
        self.a, self.b = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
        self.y = np.full(n, np.nan, np.float32)
        self.space = np.zeros(workspace, np.uint8)
        arrays = (self.a, self.b, self.y)
        roles = ("input", "input", "output")
        operands = tuple(operand(name, x, role) for name, x, role in zip("aby", arrays, roles, strict=True))
        self.pack = SimpleNamespace(operands=operands, pointers=tuple(x.ctypes.data for x in arrays))
        device = cudnn_core.DeviceInfo.preset("B200")
        compiled = SimpleNamespace(workspace_size=workspace, **attributes)
        self.plan = SimpleNamespace(
            artifacts=artifacts, device=device, engine="t:add@1", workspace_size=workspace,
            host_arguments=partial(host_arguments, "t:add@1", compiled),
        )  # fmt: skip

    def run(self, **options):
        executor(self.plan, self.pack, self.space.ctypes.data, **options)


def test_operands_are_passed_in_the_order_of_the_plan(artifact, capsys):
    case = Case(artifact)
    case.run()
    np.testing.assert_array_equal(case.y, case.a + case.b)
    out, err = capsys.readouterr()
    assert out == ""
    assert "emulator: 1 launch(es), 0 finding(s)" in err
    assert "ld.global 256" in err


def test_a_workspace_comes_between_the_operands_and_the_stream(artifact):
    body = BODY.replace("a[2]}", "a[3]}").replace("!= 5", "!= 6 || *(void **)a[4]")
    case = Case(artifact._replace(object=HOSTS["host_object"](body, kernel="add")), workspace=256)
    case.run()
    np.testing.assert_array_equal(case.space[:128].view(np.float32), case.a + case.b)


def test_by_value_operands_are_passed_as_values(artifact):
    body = BODY.replace("a[1], a[2]}", "a[0], a[2]}").replace("!= 5", "!= 5 || *(float *)a[1] != 2.5f")
    case = Case(artifact._replace(object=HOSTS["host_object"](body, kernel="add")))
    value = ctypes.c_float(2.5)
    first, _, last = case.pack.operands
    case.pack.operands = (first, operand("b", np.zeros(1, np.float32), by_value=True), last)
    case.pack.pointers = (case.pack.pointers[0], ctypes.addressof(value), case.pack.pointers[2])
    case.run()
    np.testing.assert_array_equal(case.y, case.a + case.a)


def test_an_engine_may_give_its_own_arguments(artifact):
    def host_arguments(given, pack, workspace):
        assert (given, workspace) == (artifact, case.space.ctypes.data)
        a, _, y = (pointer.to_bytes(8, "little") for pointer in pack.pointers)
        return [a, a, y, np.int64(0)]

    case = Case(artifact, host_arguments=host_arguments)
    case.run()
    np.testing.assert_array_equal(case.y, case.a + case.a)


BLOCK = """
    struct { float *a, *none, *y; int64_t n; float *scale; } *w = *(void **)a[0];
    dim one = {1, 1, 1}, block = {w->n, 1, 1};
    void *p[] = {&w->a, &w->a, &w->y};
    *result = count != 3 || w->none || *w->scale != 2.5f ? 99 : run(one, block, one, 0, p);
"""
FFI_BLOCK = BLOCK.replace("*(void **)a[0]", "a[0].type != 1 ? 0 : a[0].v.p").replace(
    "*result = count != 3", "return count != 2 || a[1].type"
)


@pytest.mark.parametrize("ffi", [False, True])
def test_an_engine_may_pass_addresses_sizes_and_values_in_a_host_block(artifact, ffi):
    def arguments(given, pack, workspace):
        words = struct.pack("<5Q", pack.pointers[0], 0, pack.pointers[2], 32, 0)
        return cudnn_core.HostBlock(words, addresses=(0, 8, 16), values=((32, struct.pack("<f", 2.5)),)), None

    raw = HOSTS["host_object"](FFI_BLOCK if ffi else BLOCK, kernel="add", ffi=ffi)
    case = Case(artifact._replace(object=raw), host_arguments=arguments)
    case.run()
    np.testing.assert_array_equal(case.y, case.a + case.a)


def test_the_workspace_of_a_plan_without_one_is_an_address_where_nothing_is(artifact):
    def arguments(given, pack, workspace):
        return cudnn_core.HostBlock(struct.pack("<3Q", pack.pointers[0], workspace, pack.pointers[2]), (0, 8, 16)), None

    body = """
    struct { float *a, *space, *y; } *w = *(void **)a[0];
    dim one = {1, 1, 1}, block = {32, 1, 1};
    void *p[] = {&w->a, &w->SECOND, &w->y};
    *result = w->space && w->space != w->a ? run(one, block, one, 0, p) : 99;
    """
    for second, kinds in (("a", set()), ("space", {"out_of_bounds"})):
        raw = HOSTS["host_object"](body.replace("SECOND", second), kernel="add")
        case = Case(artifact._replace(object=raw), host_arguments=arguments)
        space = np.zeros(1, np.uint8)
        try:
            executor(case.plan, case.pack, space.ctypes.data)
            found = set()
        except FoundError as error:
            found = {finding.kind for finding in error.report.findings}
        assert found == kinds
    stray = cudnn_core.HostBlock(bytes(8) + b"\1" * 8, addresses=(0, 8))
    with pytest.raises(EmulationError, match="the word at byte 8 of the host block is 0x101010101010101"):
        Case(artifact, host_arguments=lambda *_: (stray, None)).run()


def test_a_tvm_ffi_function_gets_the_default_arguments_too(artifact):
    body = """
    dim one = {1, 1, 1}, block = {32, 1, 1};
    if (count != 5 || a[1].type != 3 || a[1].v.f != 2.5 || a[3].type != 1 || a[4].type) return refuse("E", "arguments", 0);
    void *p[] = {&a[0].v.p, &a[0].v.p, &a[3].v.p};
    return run(one, block, one, 0, p);
    """
    case = Case(artifact._replace(object=HOSTS["host_object"](body, kernel="add", ffi=True)), workspace=256)
    value = ctypes.c_float(2.5)
    first, _, last = case.pack.operands
    case.pack.operands = (first, operand("b", np.zeros(1, np.float32), by_value=True), last)
    case.pack.pointers = (case.pack.pointers[0], ctypes.addressof(value), case.pack.pointers[2])
    case.run()
    np.testing.assert_array_equal(case.space[:128].view(np.float32), case.a + case.a)


def test_inputs_are_read_only(artifact):
    case = Case(artifact)
    case.pack.operands = tuple(operand(name, case.a) for name in "aby")
    with pytest.raises(EmulationError, match="wrote to read-only memory: operand y"):
        case.run()


def test_findings_are_raised_after_the_outputs_are_written(artifact, capsys):
    case = Case(artifact, n=16)  # the kernel has 32 threads
    with pytest.raises(FoundError, match=r"\d finding\(s\):\n  \[out_of_bounds\]") as caught:
        case.run()
    assert {finding.kind for finding in caught.value.report.findings} == {"out_of_bounds"}
    np.testing.assert_array_equal(case.y, case.a + case.b)
    assert "finding(s)" in capsys.readouterr().err


def test_the_options_are_those_of_a_launch(artifact):
    with pytest.raises(FoundError) as caught:
        Case(artifact, n=16).run(seed=7)
    assert {finding.seed for finding in caught.value.report.findings} == {7}
    with pytest.raises(EmulationError, match=r"did not end within 0\.001 s"):
        Case(artifact).run(timeout=0.001)
    with pytest.raises(EmulationError, match="schedule must be one of"):
        Case(artifact).run(schedule="never")
    hasty = """ .shared .b32 where; .reg .b32 %t<4>; mov.b32 %t0, where;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%t0], 32; ld.shared.b32 %t1, [%t0]; mov.b32 %t2, 0;
 tcgen05.st.sync.aligned.32x32b.x1.b32 [%t1], {%t2}; tcgen05.wait::st.sync.aligned;
 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%t2}, [%t1]; add.u32 %t2, %t2, 1; tcgen05.wait::ld.sync.aligned;
 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t1, 32; ret;"""
    changed = artifact._replace(ptx=ADD.replace(" ret;", hasty))
    Case(changed).run()
    with pytest.raises(FoundError, match="uncommitted"):
        Case(changed).run(strict=True)


def test_plans_without_a_host_object_or_ptx_are_refused(artifact):
    with pytest.raises(EmulationError, match="engine t:add@1 gives no artifact with a host object"):
        Case().run()
    with pytest.raises(EmulationError, match="engine t:add@1 gives no artifact with a host object"):
        Case(artifact._replace(object=b"")).run()
    with pytest.raises(EmulationError, match="artifact add of engine t:add@1 has no PTX"):
        Case(artifact._replace(ptx="")).run()


def test_the_summary_lists_instructions_and_bytes():
    report = Report(
        (),
        {
            "launches": 1,
            "instructions": 1500,
            "instructions.ld": 500,
            "instructions.add": 1000,
            "bytes.ld.global": 4096,
        },
    )
    assert summary(report) == (
        "emulator: 1 launch(es), 0 finding(s)\n"
        "warp instructions: 1,500: arithmetic 1,000, memory 500\n"
        "bytes moved: ld.global 4,096"
    )


# --- through the command line
class Engine:
    artifact = None

    def check_support(self, graph, ctx):
        return cudnn_core.Support((cudnn_core.PlanConfig("", {}),), workspace=0)

    def build_plan(self, graph, config, ctx):
        def execute(pack, ctx):
            raise AssertionError("an executor runs the artifacts")

        return SimpleNamespace(workspace_size=0, artifacts=(self.artifact,), execute=execute)


@pytest.fixture
def command(artifact, tmp_path, monkeypatch, capsys):
    """`command(*options)` -> (exit code, document or error text) of `cudnn-core run` of an add on an absent B200."""
    from cudnn_core._cli import main
    from cudnn_core.testing import temporary_plugin

    info = tmp_path / "cudnn_core_emulator-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cudnn-core-emulator\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[cudnn_core.executors]\nemulator = ptx_emulator._executor:executor\n")
    if not any(point.name == "emulator" for point in _executors()):
        monkeypatch.syspath_prepend(str(tmp_path))
    graph = cudnn_core.Graph(io_data_type="float32", compute_data_type="float32")
    graph.add(graph.tensor((32,)), graph.tensor((32,))).set_output(True)
    (tmp_path / "graph.json").write_text(graph.to_json())
    cudnn_core.refresh()

    def run(*options, changed=artifact):
        kind = type("Emulated", (Engine,), {"artifact": changed})
        row = {"name": "add", "ops": ["add"], "devices": ["cuda"], "sm": ["100a"], "aot": True}
        with temporary_plugin({"plugin": "emulated", "engine": [row]}, {"add": kind}):
            code = main(["run", str(tmp_path / "graph.json"), "--device", "B200", "--executor", "emulator", *options])
        return code, *capsys.readouterr()

    yield run
    monkeypatch.undo()
    cudnn_core.refresh()


def _executors():
    from importlib.metadata import entry_points

    return entry_points(group="cudnn_core.executors")


def test_the_command_line_emulates_the_engine_of_an_absent_device_and_compares(command):
    pytest.importorskip("torch")
    code, out, err = command("--json")
    document = json.loads(out)
    assert code == 0, (out, err)
    assert (document["engine"], document["executor"], document["ok"]) == ("emulated:add@1", "emulator", True)
    assert document["outputs"][0]["max_abs"] == 0
    assert "emulator: 1 launch(es), 0 finding(s)" in err


def test_options_come_from_the_command_line(command, artifact):
    pytest.importorskip("torch")
    given = [part for option in ("seed=3", "schedule=random", "strict=true") for part in ("--executor-option", option)]
    code, out, err = command("--json", *given)
    assert code == 0, err
    assert json.loads(out)["executor_options"] == {"seed": 3, "schedule": "random", "strict": True}
    code, _, err = command("--executor-option", "schedule=never")
    assert (code, "one of late, eager, random is needed" in err) == (2, True)


def test_a_wrong_kernel_differs_and_a_defective_one_is_a_finding(command, artifact):
    pytest.importorskip("torch")
    code, _, _ = command(changed=artifact._replace(ptx=ADD.replace("add.f32", "sub.f32")))
    assert code == 1
    code, _, err = command(
        changed=artifact._replace(ptx=ADD.replace("add.s64 %rd7, %rd3, %rd4", "add.s64 %rd7, %rd3, 1"))
    )
    assert code == 1
    assert "misaligned" in err

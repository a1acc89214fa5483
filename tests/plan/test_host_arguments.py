"""What an executor is told to pass to the host function of an artifact."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

import cudnn_core
from cudnn_core import Artifact, ExecutionError, HostBlock, Operand, VariantPack
from cudnn_core.testing import temporary_plugin

ARTIFACT = Artifact("kernel", "90a", "kernel", object=b"object")


class Engine:
    compiled = None

    def check_support(self, graph, ctx):
        return cudnn_core.Support((cudnn_core.PlanConfig("", {}),))

    def build_plan(self, graph, config, ctx):
        return self.compiled


def plan_of(workspace=0, **methods):
    """A plan whose engine compiled to an object with these methods."""
    compiled = SimpleNamespace(
        workspace_size=workspace, artifacts=(ARTIFACT,), execute=lambda pack, ctx: None, **methods
    )
    graph = cudnn_core.Graph(io_data_type="float32", compute_data_type="float32")
    graph.add(graph.tensor((4,)), graph.tensor((4,))).set_output(True)
    row = {"name": "add", "ops": ["add"], "devices": ["cuda"], "sm": ["90a"], "aot": True}
    kind = type("Kind", (Engine,), {"compiled": compiled})
    with temporary_plugin({"plugin": "hosted", "engine": [row]}, {"add": kind}, isolated=True):
        return graph.plan(device=cudnn_core.DeviceInfo.preset("H200"))


def pack(*operands):
    """(dtype, by-value element or None) of each operand."""
    made = [
        Operand(uid, "", dtype, (1,), (1,), "input", value is not None) for uid, (dtype, value) in enumerate(operands)
    ]
    held = [np.zeros(4) if value is None else np.frombuffer(value, np.uint8) for _, value in operands]
    return VariantPack(tuple(made), tuple(array.ctypes.data for array in held), tuple(held))


def test_without_the_method_operands_workspace_and_a_null_stream_are_passed():
    given = pack(("float32", None), ("bfloat16", None))
    first, second, space, stream = plan_of(workspace=512).host_arguments(ARTIFACT, given, 4096)
    assert all(type(value) is ctypes.c_void_p for value in (first, second, space))
    assert (first.value, second.value, space.value, stream) == (*given.pointers, 4096, None)
    assert len(plan_of().host_arguments(ARTIFACT, given, 0)) == 3


@pytest.mark.parametrize(("dtype", "raw", "expected"), [
    ("float32", np.float32(2.5).tobytes(), ctypes.c_float(2.5)),
    ("float64", np.float64(0.1).tobytes(), ctypes.c_double(0.1)),
    ("int32", np.int32(-7).tobytes(), ctypes.c_int32(-7)),
    ("int64", np.int64(2**40).tobytes(), ctypes.c_int64(2**40)),
    ("boolean", b"\1", ctypes.c_bool(True)),
    ("bfloat16", b"\x20\x40", b"\x20\x40"),
    ("fp8_e4m3", b"\x38", b"\x38"),
])  # fmt: skip
def test_by_value_operands_are_passed_as_values_of_their_type(dtype, raw, expected):
    value, _ = plan_of().host_arguments(ARTIFACT, pack((dtype, raw)), 0)
    assert type(value) is type(expected)
    assert value == expected if isinstance(expected, bytes) else value.value == expected.value


def test_the_engine_s_own_arguments_are_passed_on():
    def host_arguments(artifact, pack, workspace):
        words = b"".join(pointer.to_bytes(8, "little") for pointer in (*pack.pointers, workspace))
        return [HostBlock(words, addresses=(0, 8)), np.int64(3), 4, None]

    given = pack(("float32", None))
    block, *rest = plan_of(host_arguments=host_arguments).host_arguments(ARTIFACT, given, 4096)
    assert block == (given.pointers[0].to_bytes(8, "little") + (4096).to_bytes(8, "little"), (0, 8), ())
    assert rest == [3, 4, None]


def test_what_is_no_argument_names_the_engine():
    def failing(artifact, pack, workspace):
        raise SystemExit("no")

    for method, problem in (
        (lambda *_: None, "engine hosted:add@1 gave host arguments that are no sequence: None"),
        (lambda *_: [1, "x"], "engine hosted:add@1 gave host argument 1 of kernel as 'x', which is no HostBlock"),
        (failing, "engine hosted:add@1 could not give the host arguments of kernel: .*no"),
    ):
        with pytest.raises(ExecutionError, match=problem):
            plan_of(host_arguments=method).host_arguments(ARTIFACT, pack(), 0)
    with pytest.raises(cudnn_core.NoEngineError, match="host_arguments that is no method"):
        plan_of(host_arguments=3)

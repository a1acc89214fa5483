"""``cudnn-core run``: outputs are checked against the reference engine, whichever is installed."""

from __future__ import annotations

import ctypes
import json
import sys

import numpy as np
import pytest

import cudnn_core
from cudnn_core import Dim
from cudnn_core._cli import _arena, _inputs, _reference
from cudnn_core.testing import temporary_plugin
from tests.zoo._make import write_dist

pytest.importorskip("torch_reference")
from torch_reference._engine import Eager


def test_a_right_engine_agrees_with_the_reference(cli, cli_json, graph_file, engines):
    with engines(isolated=False, one={}):
        code, out, _ = cli("run", graph_file())
        status, document = cli_json("run", graph_file())
    assert (code, status) == (0, 0)
    assert "one:add@1" in out
    assert document["engine"] == "one:add@1"
    assert document["reference"]["precision"] == "float64"
    assert document["reference"]["engine"] != "one:add@1"
    (output,) = document["outputs"]
    assert (output["name"], output["shape"], output["ok"]) == ("y", [4, 8], True)
    assert output["max_rel"] <= output["tolerance"] < 1e-5


def test_a_wrong_engine_is_a_finding(cli, cli_json, graph_file, engines):
    with engines(isolated=False, one={"error": 0.25}):
        code, out, _ = cli("run", graph_file())
        _, document = cli_json("run", graph_file())
    assert code == 1
    assert "DIFFERS" in out
    assert document["ok"] is False
    assert document["outputs"][0]["max_abs"] == pytest.approx(0.25, rel=1e-5)


def test_an_output_that_is_never_written_differs(cli_json, graph_file):
    class Nothing:
        def check_support(self, graph, ctx):
            return cudnn_core.Support((cudnn_core.PlanConfig("", {}),), workspace=0)

        def build_plan(self, graph, config, ctx):
            return type("Plan", (), {"workspace_size": 0, "execute": lambda self, pack, ctx: None})()

    manifest = {"plugin": "idle", "engine": [{"name": "add", "ops": ["add"], "devices": ["cpu"]}]}
    with temporary_plugin(manifest, {"add": Nothing}):
        code, document = cli_json("run", graph_file())
    assert code == 1
    assert document["outputs"][0]["strays"] == 32


def test_an_engine_that_raises_at_run_time_is_named(cli, graph_file, engines):
    class Raising:
        workspace_size = 0

        def execute(self, pack, ctx):
            raise RuntimeError("launch failed")

    base = type("Base", (), {"check_support": lambda *_: cudnn_core.Support((cudnn_core.PlanConfig("", {}),), 0),
                             "build_plan": lambda *_: Raising()})  # fmt: skip
    with engines(isolated=False, one={"base": base}):
        code, _, err = cli("run", graph_file())
    assert code == 1
    assert "engine one:add@1 raised RuntimeError: launch failed" in err


def test_without_a_reference_there_is_nothing_to_check_against(cli, graph_file, engines):
    with engines(isolated=True, one={}):
        code, out, err = cli("run", graph_file())
    assert (code, out) == (3, "")
    assert "no reference" in err
    assert "pip install" in err


def test_a_device_that_is_only_described_can_not_run(cli, graph_file, engines):
    with engines(isolated=False, one={}):
        code, _, err = cli("run", graph_file(), "--device", "H200")
    assert code == 3
    assert "only described" in err


# --- outputs that update an input
def pooled(graph, stride=None, attrs=()):
    """gdn whose states are rows 1, 0 of a pool of 4, updated in place."""
    q, k, v = (graph.tensor((6, 1, 8), name=name) for name in "qkv")
    g, beta = (graph.tensor((6, 1), name=name) for name in ("g", "beta"))
    bounds = graph.tensor((3,), data_type="int32", name="cu_seqlens")
    pool = graph.tensor((4, 1, 8, 8), name="pool")
    slots = graph.tensor((2,), data_type="int32", name="slots")
    attrs = {"overwrite_initial_state": True, "output_final_state": True, **dict(attrs)}
    made = graph.gdn(q, k, v, g, beta, bounds, initial_state=pool, state_indices=slots, **attrs)
    made[0].set_output(True).set_name("O")
    made[1].set_output(True).set_name("final")
    if stride:
        made[1].set_stride(stride)


class NamedRows:
    """The reference, but that of a pool it writes the rows alone that sequences name, as a kernel does."""

    def check_support(self, graph, ctx):
        return cudnn_core.Support((cudnn_core.PlanConfig("", {}),), workspace=0)

    def build_plan(self, graph, config, ctx):
        inner = Eager().build_plan(graph, config, ctx)

        def execute(plan, pack, ctx):
            at, slots = (
                next(i for i, one in enumerate(pack.operands) if one.name == name) for name in ("final", "slots")
            )
            made, rows = (
                np.empty(pack.operands[at].dim, np.float32),
                (ctypes.c_int32 * 2).from_address(pack.pointers[slots]),
            )
            pointers = [*pack.pointers[:at], made.ctypes.data, *pack.pointers[at + 1 :]]
            inner.execute(cudnn_core.VariantPack(pack.operands, tuple(pointers)), ctx)
            for row in rows:
                ctypes.memmove(pack.pointers[at] + made[row].nbytes * row, made[row].ctypes.data, made[row].nbytes)

        return type("Plan", (), {"workspace_size": 0, "execute": execute})()


def test_rows_of_a_pool_that_nobody_writes_keep_their_values(cli_json, graph_file):
    manifest = {"plugin": "rows", "engine": [{"name": "gdn", "ops": ["gdn"], "devices": ["cpu"]}]}
    with temporary_plugin(manifest, {"gdn": NamedRows}):
        code, document = cli_json("run", graph_file(pooled))
    assert (code, document["engine"]) == (0, "rows:gdn@1"), document
    assert all(output["ok"] for output in document["outputs"])


@pytest.mark.parametrize("stride", [None, (80, 80, 8, 1)])
def test_an_output_that_updates_an_input_lies_there_or_begins_with_its_values(graph_file, stride):
    graph = cudnn_core.Graph.from_json(graph_file(lambda graph: pooled(graph, stride)).read_text())
    plan = graph.plan(device="cpu")
    inputs = _inputs.make_inputs(plan.graph, 0)
    arena = _arena.Arena(plan, plan.graph, inputs)
    uids = {tensor.name: tensor.uid for tensor in plan.graph.operand_tensors()}
    addresses = dict(zip((operand.uid for operand in plan.operands), arena.pack().pointers, strict=True))
    assert (addresses[uids["final"]] == addresses[uids["pool"]]) == (stride is None)
    pool = inputs[uids["pool"]].view(np.float32).reshape(4, 64)
    final = arena.outputs()[uids["final"]].view(np.float32)
    apart = 64 if stride is None else stride[0]
    for row in range(4):
        assert (final[row * apart :][:64] == pool[row]).all()
    assert (arena.outputs()[uids["O"]] == 0xFF).all()


def test_without_the_attribute_an_output_begins_blank(graph_file):
    def build(graph):
        q, k, v = (graph.tensor((6, 1, 8), name=name) for name in "qkv")
        g, beta = (graph.tensor((6, 1), name=name) for name in ("g", "beta"))
        made = graph.gdn(
            q, k, v, g, beta, initial_state=graph.tensor((1, 1, 8, 8), name="state"), output_final_state=True
        )
        for tensor, name in zip(made, ("O", "final"), strict=False):
            tensor.set_output(True).set_name(name)

    plan = cudnn_core.Graph.from_json(graph_file(build).read_text()).plan(device="cpu")
    arena = _arena.Arena(plan, plan.graph, _inputs.make_inputs(plan.graph, 0))
    assert all((storage == 0xFF).all() for storage in arena.outputs().values())


# --- inputs
def linear(graph, op="gdn", dtype="float16", stride=None, **attrs):
    q, k, v = (
        graph.tensor((192, 2, 64), stride if name == "k" else None, data_type=dtype, name=name) for name in "qkv"
    )
    gates = (192, 2) if op == "gdn" else (192, 2, 64)
    g, beta = (
        graph.tensor(gates, name="g", data_type="float32"),
        graph.tensor((192, 2), name="beta", data_type="float32"),
    )
    getattr(graph, op)(q, k, v, g, beta, **attrs)[0].set_output(True).set_name("O")


def drawn(graph_file, **options):
    """Random inputs of ``linear`` by name, in memory order."""
    graph = cudnn_core.Graph.from_json(graph_file(lambda graph: linear(graph, **options)).read_text()).freeze()
    made = _inputs.make_inputs(graph, 0)
    return {tensor.name: _inputs.values_of(made[tensor.uid], str(tensor.dtype)) for tensor in graph.operand_tensors()
            if tensor.role == "input"}  # fmt: skip


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_states_of_linear_attention_stay_finite_on_random_inputs(cli_json, graph_file, op):
    """With longer keys every token multiplies them."""
    code, document = cli_json("run", graph_file(lambda graph: linear(graph, op)))
    assert code == 0, document
    assert 0 < document["outputs"][0]["max_abs"] < 1


def test_keys_have_length_1_whatever_their_strides_are(graph_file):
    keys = drawn(graph_file, stride=(160, 80, 1))["k"]
    rows = np.stack([keys[160 * t + 80 * h :][:64] for t in range(192) for h in range(2)])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=2e-3)
    assert np.linalg.norm(drawn(graph_file, use_qk_l2norm=True)["k"][:64]) > 4


def test_gates_and_weights_of_linear_attention_are_in_their_domains(graph_file):
    plain, linear, logits = drawn(graph_file), drawn(graph_file, gate_domain="linear"), drawn(
        graph_file, safe_gate=True, use_beta_sigmoid=True)  # fmt: skip
    assert -1 <= plain["g"].min() < plain["g"].max() <= 0
    assert 0 <= plain["beta"].min() < plain["beta"].max() <= 1
    assert 0.5 <= linear["g"].min() < linear["g"].max() <= 1
    for port in ("g", "beta"):
        assert logits[port].min() < -1 < 1 < logits[port].max()


def test_random_inputs_follow_the_seed(graph_file):
    graph = cudnn_core.Graph.from_json(graph_file().read_text()).freeze()
    first, same, other = (_inputs.make_inputs(graph, seed) for seed in (0, 0, 1))
    for uid in first:
        assert (first[uid] == same[uid]).all()
        assert (first[uid] != other[uid]).any()
    assert (first[graph.operands[0].uid] != first[graph.operands[1].uid]).any()


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8", "int32", "float64"]
)
def test_every_type_runs(cli_json, graph_file, dtype):
    code, document = cli_json("run", graph_file(dtype=dtype))
    assert code == 0, document
    assert document["outputs"][0]["dtype"] == dtype


def test_arrays_are_taken_by_name_or_uid(cli_json, graph_file, machine):
    file = graph_file()
    uids = {tensor["name"]: tensor["uid"] for tensor in json.loads(file.read_text())["tensors"]}
    a, b = np.arange(32.0, dtype=np.float32).reshape(4, 8), np.full((4, 8), 0.5, np.float32)
    np.savez("in.npz", a=a, **{str(uids["b"]): b})
    code, document = cli_json("run", file, "--inputs", "in.npz", "--outputs", "out.npz")
    assert code == 0
    assert document["seed"] is None
    np.testing.assert_array_equal(np.load("out.npz")["y"], a + b)


def test_strided_and_narrow_inputs_arrive_as_they_are(cli_json, graph_file):
    def build(graph):
        x = graph.tensor((2, 3), (1, 2), data_type="bfloat16", name="x")
        w = graph.tensor((2, 3), (4, 1), data_type="fp8_e4m3", name="w")
        graph.add(x, w).set_output(True).set_name("y").set_data_type("float32").set_stride((3, 1))

    x = np.array([[1, 2, 3], [4, 5, 6]], np.float64)
    w = np.array([[0.5, 1.5, -2], [8, 0, 448]])
    np.savez("in.npz", x=x, w=w)
    code, _ = cli_json("run", graph_file(build), "--inputs", "in.npz", "--outputs", "out.npz")
    assert code == 0
    np.testing.assert_array_equal(np.load("out.npz")["y"], x + w)


def test_codes_stand_for_types_that_numpy_lacks(cli_json, graph_file):
    def build(graph):
        x = graph.tensor((4,), data_type="bfloat16", name="x")
        graph.add(x, x).set_output(True).set_name("y").set_data_type("float32")

    codes = np.array([0x3F80, 0x4000, 0xBF80, 0x0000], np.uint16)  # 1, 2, -1, 0
    np.savez("in.npz", x=codes)
    cli_json("run", graph_file(build), "--inputs", "in.npz", "--outputs", "out.npz")
    np.testing.assert_array_equal(np.load("out.npz")["y"], [2, 4, -2, 0])


def test_array_shapes_give_runtime_sizes(cli_json, graph_file):
    n = Dim("n", 1, 64)
    file = graph_file(lambda g: g.add(g.tensor((n,), name="a"), g.tensor((n,), name="b")).set_output(True))
    np.savez("in.npz", a=np.ones(5, np.float32), b=np.ones(5, np.float32))
    code, document = cli_json("run", file, "--inputs", "in.npz")
    assert code == 0
    assert document["sizes"] == {"n": 5}
    np.savez("in.npz", a=np.ones(5, np.float32), b=np.ones(6, np.float32))
    code, document = cli_json("run", file, "--inputs", "in.npz")
    assert code == 2
    assert "b" in document["error"]["message"]


A = np.zeros((4, 8), np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": A}, "no array for b"),
        ({"a": A, "b": A, "c": A}, "no input 'c'"),
        ({"a": A, "b": A[:2]}, "b has shape (2, 8), the graph says (4, 8)"),
        ({"a": A, "b": A.astype(np.int64)}, "b has the type int64, the graph says float32"),
        ({"a": A, "b": A.astype(object)}, "b holds Python objects"),
    ],
)
def test_wrong_arrays_are_usage_errors(cli, graph_file, arrays, message):
    np.savez("in.npz", **arrays)
    code, out, err = cli("run", graph_file(), "--inputs", "in.npz")
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("data", [None, b"", b"no archive", b"PK\x03\x04 not a zip"])
def test_an_unreadable_npz_is_a_usage_error(cli, graph_file, machine, data):
    if data is not None:
        (machine / "work" / "in.npz").write_bytes(data)
    code, _, err = cli("run", graph_file(), "--inputs", "in.npz")
    assert code == 2
    assert "inputs in.npz" in err
    assert "pickle" not in err
    assert ("not an .npz file" in err) == (data is not None)


def test_an_array_that_is_rounded_is_mentioned(cli, graph_file):
    exact = np.full((4, 8), 0.5)
    np.savez("in.npz", a=exact, b=exact + 1e-12)
    code, _, err = cli("run", graph_file(), "--inputs", "in.npz")
    assert code == 0
    assert "b is float64 and was rounded to float32" in err
    assert "inputs: a " not in err


def _attention(graph):
    q, k, v = (graph.tensor((2, 2, 8, 16), name=name) for name in "qkv")
    lengths = {f"seq_len_{s}": graph.tensor((2, 1, 1, 1), data_type="int32", name=f"len_{s}") for s in ("q", "kv")}
    o, _ = graph.sdpa(q, k, v, generate_stats=False, attn_scale=0.25, use_padding_mask=True, **lengths)
    o.set_output(True).set_name("o")


def _experts(graph):
    token, weight = graph.tensor((1, 12, 8), name="token"), graph.tensor((3, 8, 4), name="weight")
    offsets = graph.tensor((3, 1, 1), data_type="int32", name="offsets")
    graph.moe_grouped_matmul(token, weight, offsets, mode="NONE").set_output(True).set_name("y")


def _norm(graph):
    x, scale = graph.tensor((4, 6, 1, 1), name="x"), graph.tensor((1, 6, 1, 1), name="scale")
    epsilon = graph.tensor((1, 1, 1, 1), is_pass_by_value=True, data_type="float32", name="epsilon")
    y, _ = graph.rmsnorm(norm_forward_phase="INFERENCE", input=x, scale=scale, epsilon=epsilon)
    y.set_output(True).set_name("y")


def _logarithm(graph):
    graph.log(graph.tensor((4, 8), name="x")).set_output(True).set_name("y")


@pytest.mark.parametrize("build", [_attention, _experts, _norm, _logarithm])
def test_ops_get_inputs_that_they_can_take(graph_file, build):
    graph = cudnn_core.Graph.from_json(graph_file(build).read_text())
    frozen = graph.freeze()
    found = _reference.oracle(graph, {}, _inputs.make_inputs(frozen, 0))
    for tensor in frozen.operand_tensors():
        if tensor.role == "output":
            values = _inputs.values_of(found.outputs[tensor.uid], str(tensor.dtype))
            assert np.isfinite(values).all()
            assert np.count_nonzero(values) > len(values) / 2


# --- tolerances
def test_the_tolerance_grows_with_narrow_types_and_long_sums():
    def limit(dtype, k):
        graph = cudnn_core.Graph(io_data_type=dtype, compute_data_type="float32")
        c = graph.matmul(graph.tensor((1, 4, k)), graph.tensor((1, k, 4))).set_output(True)
        frozen = graph.freeze()
        return _reference.tolerance(frozen, next(t for t in frozen.tensors if t.uid == c.uid))

    assert limit("float32", 16) == pytest.approx(2 * 2**-24 + 8 * 4 * 2**-24)
    assert limit("float32", 1024) == pytest.approx(2 * 2**-24 + 8 * 32 * 2**-24)
    assert limit("bfloat16", 16) == pytest.approx(2 * 2**-8 + 8 * 4 * 2**-24)
    graph = cudnn_core.Graph(io_data_type="int32", compute_data_type="int32")
    graph.add(graph.tensor((4,)), graph.tensor((4,))).set_output(True)
    frozen = graph.freeze()
    assert [_reference.tolerance(frozen, tensor) for tensor in frozen.tensors] == [0.0] * 3


def _integers(op, compute="float32", out="int32"):
    """(graph, output) of ``op`` on two int32."""
    graph = cudnn_core.Graph(io_data_type="int32", compute_data_type=compute)
    getattr(graph, op)(graph.tensor((4,)), graph.tensor((4,))).set_output(True).set_data_type(out)
    frozen = graph.freeze()
    return frozen, next(tensor for tensor in frozen.tensors if tensor.role == "output")


@pytest.mark.parametrize("op", ["add", "mul", "div"])
def test_integers_computed_in_floats_may_be_off_by_their_rounding(op):
    large = 2.0**31
    assert 2.0**-24 * large <= _reference.tolerance(*_integers(op), large) <= 1 + 2.0**-20 * large
    assert _reference.tolerance(*_integers(op, "int32"), large) == 0.0
    assert _reference.tolerance(*_integers(op, out="boolean"), large) == 0.0
    small = _reference.tolerance(*_integers(op), 1000.0)
    assert (small >= 1.0) == (op == "div")  # whole numbers stay whole


def test_the_comparison_of_integers_knows_their_size():
    graph, y = _integers("div")
    want = np.array([2**30, 5, 0, -7], dtype=np.int32)
    for off, ok in ((64, True), (2**20, False)):
        got = (want + np.array([off, 0, 0, 0])).astype(np.int32)
        (row,) = _reference.compare(graph, {y.uid: got}, {y.uid: want})
        assert (row.ok, row.max_abs) == (ok, off)


def test_sums_of_integers_declared_float32_wrap_as_they_are_documented_to():
    """Of int8 products: 140000 times 2**14 is more than int32 has."""
    k = 140_000
    graph = cudnn_core.Graph(io_data_type="int8", compute_data_type="float32")
    a, b = graph.tensor((1, 1, k), name="a"), graph.tensor((1, k, 1), name="b")
    c = graph.matmul(a, b).set_output(True).set_data_type("int32")
    storage = np.full(k, -128, dtype=np.int8)
    found = _reference.oracle(graph, {}, {tensor.uid: storage for tensor in (a, b)})
    assert int(found.outputs[c.uid].view(np.int32)[0]) == k * 2**14 - 2**32


# --- executors
@pytest.fixture
def site(machine, monkeypatch):
    folder = machine / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    cudnn_core.refresh()
    yield folder
    monkeypatch.undo()
    for name in [
        name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(str(folder))
    ]:
        del sys.modules[name]
    cudnn_core.refresh()


EXECUTOR = """
from __future__ import annotations
import ctypes
import sys
from typing import Literal

def emulate(plan, pack, workspace):
    assert plan.device.synthetic and plan.device.arch == "90a"
    a, b, y = ((ctypes.c_float * 32).from_address(pointer) for pointer in pack.pointers)
    assert [operand.role for operand in pack.operands] == ["input", "input", "output"]
    for index in range(32):
        y[index] = a[index] + b[index]

def broken(plan, pack, workspace):
    raise OSError("no emulator here")

def optional(plan, pack, workspace, *, seed: int = 0, scale: float = 1.0, fast: bool = False, order: Literal["up", "down"] = "up",
             label: str = ""):
    emulate(plan, pack, workspace)
    print("options:", repr((seed, scale, fast, order, label)), file=sys.stderr)
"""


def test_an_executor_runs_the_plan_of_an_absent_device(cli, cli_json, graph_file, engines, site):
    (site / "acme_emulator.py").write_text(EXECUTOR)
    points = "[cudnn_core.executors]\nacme = acme_emulator:emulate\nbroken = acme_emulator:broken\n"
    write_dist(site, "acme-emulator", entry_points=points)
    cudnn_core.refresh()
    with engines(isolated=False, one={"devices": ["cuda"], "sm": ["90a"], "aot": True}):
        arguments = ("run", graph_file(), "--device", "H200", "--executor")
        code, document = cli_json(*arguments, "acme")
        assert code == 0, document
        assert (document["engine"], document["executor"]) == ("one:add@1", "acme")
        code, _, err = cli(*arguments, "broken")
        assert code == 1
        assert "executor broken raised OSError: no emulator here" in err
        code, _, err = cli(*arguments, "acmee")
    assert code == 3
    assert "did you mean 'acme'" in err


@pytest.fixture
def optional(cli, graph_file, engines, site):
    """``optional(*settings)``: a run by an executor with options."""
    (site / "acme_emulator.py").write_text(EXECUTOR)
    points = "[cudnn_core.executors]\nacme = acme_emulator:optional\nplain = acme_emulator:emulate\n"
    write_dist(site, "acme-emulator", entry_points=points)
    cudnn_core.refresh()

    def run(*settings, executor="acme", options=()):
        named = [part for setting in settings for part in ("--executor-option", setting)]
        which = ("--executor", executor) if executor else ()
        with engines(isolated=False, one={"devices": ["cuda"], "sm": ["90a"], "aot": True}):
            return cli("run", graph_file(), "--device", "H200", *which, *named, *options)

    return run


def test_options_reach_the_executor_with_their_types(optional):
    code, _, err = optional("seed=-3", "scale=1e-2", "fast=true", "order=down", "label=a=b")
    assert code == 0, err
    assert "options: (-3, 0.01, True, 'down', 'a=b')" in err
    assert "options: (0, 1.0, False, 'up', '')" in optional()[2]
    code, out, _ = optional("seed=5", "fast=0", options=["--json"])
    assert json.loads(out)["executor_options"] == {"seed": 5, "fast": False}


@pytest.mark.parametrize(("setting", "problem"), [
    ("seed", "KEY=VALUE is needed"),
    ("sed=1", "executor acme has no option 'sed' (did you mean 'seed'?); it has: seed, scale, fast, order, label"),
    ("plan=1", "executor acme has no option 'plan'"),
    ("seed=1.5", "an integer is needed"),
    ("scale=big", "a number is needed"),
    ("fast=maybe", "true or false is needed"),
    ("order=sideways", "one of up, down is needed"),
])  # fmt: skip
def test_an_option_that_the_executor_cannot_take_is_a_usage_error(optional, setting, problem):
    code, out, err = optional(setting)
    assert (code, out) == (2, "")
    assert f"--executor-option {setting}: {problem}" in err


def test_options_without_an_executor_or_of_one_that_has_none(optional):
    code, _, err = optional("seed=1", executor=None)
    assert (code, "there is no --executor" in err) == (2, True)
    code, _, err = optional("seed=1", executor="plain")
    assert (code, "; it has none" in err) == (2, True)

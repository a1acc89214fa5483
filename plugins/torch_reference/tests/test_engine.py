"""The engine's contract: verdicts without torch, plans that bind, runtime sizes, the builder's graphs, plugin ops."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import Net, context, oracle, rand, reasons, run, single
from torch_reference._engine import Eager
from torch_reference._lower import LOWERED, lowering

import cudnn_core
from cudnn_core import CompiledPlan, Dim, Engine, ExecutionContext


def encoder_layer():
    net = Net()
    net.t("x", "float32", (1, 6, 16))
    net.t("w", "float32", (1, 16, 8))
    net.t("b", "float32", (1, 1, 8))
    net.t("c", "float32", (1, 6, 8), role="virtual")
    net.t("s", "bfloat16", (1, 6, 8), role="virtual")
    net.t("y", "float32", (1, 6, 8))
    net.op("matmul", {"A": "x", "B": "w"}, {"C": "c"}, {"padding": 0.0})
    net.op("add", {"in0": "c", "in1": "b"}, {"out": "s"})
    net.op("gelu", {"in0": "s"}, {"out": "y"})
    return net.frozen()


def test_check_support_imports_neither_torch_nor_numpy_and_opens_no_files():
    code = """
import sys, types, cudnn_core
from cudnn_core import ExecutionContext, FrozenGraph, FrozenNode, FrozenTensor, data_type
from torch_reference._engine import Eager
t = [FrozenTensor(index=i, uid=i, name="", dtype=data_type.FLOAT, dim=(2,), stride=(1,), role=r,
                  consumers=((0, "in0"),) if not i else (), producer=(0, "out") if i else None) for i, r in enumerate(("input", "output"))]
n = FrozenNode(index=0, op="abs", name="", compute_dtype=data_type.FLOAT, inputs={"in0": t[0]}, outputs={"out": t[1]}, attrs={})
g = FrozenGraph(name="", key="", tensors=tuple(t), nodes=(n,))
assert Eager().check_support(g, ExecutionContext(None, types.SimpleNamespace(type="cpu")))
print(*[m for m in ("torch", "numpy", "triton", "cuda") if m in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment())
    assert found.stdout.strip() == ""


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": ":".join(sys.path)}


def test_check_support_is_a_lookup_once_the_facts_are_there():
    graph, engine, ctx = encoder_layer(), Eager(), context()
    first = engine.check_support(graph, ctx)
    begin = time.perf_counter()
    for _ in range(1000):
        assert engine.check_support(graph, ctx) == first
    assert time.perf_counter() - begin < 0.02  # 20 us each
    assert first.workspace == 0
    assert first.configs[0].engine == "torch_reference:eager@1"


def test_every_op_of_the_table_has_a_lowering():
    table = pytest.importorskip("cudnn_core._ops._table")
    assert set(table.in_tree()) == set(LOWERED)
    for op in LOWERED:
        assert callable(lowering(op))


def test_plan_and_engine_follow_the_protocol():
    assert isinstance(Eager(), Engine)
    plan = Eager().build_plan(encoder_layer(), None, context())
    assert plan.workspace_size == 0
    assert all(hasattr(plan, name) for name in CompiledPlan.__annotations__)


@pytest.mark.parametrize("through", ["execute", "bind"])
def test_virtual_tensors_are_rounded_to_their_type(through):
    x, w, b = rand(6, 16), rand(16, 8, seed=1), rand(8, seed=2)
    y = run(encoder_layer(), {"x": x, "w": w, "b": b}, through=through)["y"][0]
    rounded = (x @ w + b).bfloat16().float()
    torch.testing.assert_close(y, torch.nn.functional.gelu(rounded), rtol=1e-5, atol=1e-5)


def test_the_oracle_can_leave_virtual_tensors_and_outputs_unrounded():
    values = {"x": rand(1, 6, 16), "w": rand(1, 16, 8, seed=1), "b": rand(1, 1, 8, seed=2)}
    wide = {name: value.double() for name, value in values.items()}
    exact = torch.nn.functional.gelu(wide["x"] @ wide["w"] + wide["b"])
    loose = oracle(encoder_layer(), values, round_virtual=False, round_outputs=False)["y"]
    torch.testing.assert_close(loose, exact, rtol=1e-12, atol=1e-13)
    assert (oracle(encoder_layer(), values)["y"] - exact).abs().max() > 1e-4


def test_precision_follows_compute_type_and_inputs():
    x = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    graph = single("identity", {"in0": ("float64", (1,))}, {"out": ("float64", (1,))})
    assert run(graph, {"in0": x})["out"] == x
    y = torch.tensor([1.0, 2.0**-30])
    total = single("reduction", {"input": ("float32", (2,))}, {"Y": ("float64", (1,))}, {"mode": "ADD"}, "float64")
    assert run(total, {"input": y})["Y"].item() == 1 + 2.0**-30
    assert oracle(total, {"input": y}, precision="float32")["Y"].item() == 1


def test_constants_of_the_graph_are_no_operands():
    net = Net()
    net.t("x", "float32", (3,))
    net.t("two", "float32", (1,), by_value=True, value=2.5)
    net.t("y", "float32", (3,))
    net.op("mul", {"in0": "x", "in1": "two"}, {"out": "y"})
    assert run(net.frozen(), {"x": torch.tensor([1.0, 2.0, 3.0])})["y"].tolist() == [2.5, 5.0, 7.5]


def test_runtime_sizes_are_read_from_the_operands():
    m = Dim("m", min=0, max=64)
    graph = single(
        "matmul", {"A": ("float32", (m, 4)), "B": ("float32", (4, 3))}, {"C": ("float32", (m, 3))}, {"padding": 0.0}
    )
    w = rand(4, 3)
    for size in (0, 1, 7):
        x = rand(size, 4, seed=size)
        out = run(graph, {"A": x if size else torch.empty(1), "B": w}, sizes={"m": size})["C"]
        torch.testing.assert_close(out, x @ w)
        torch.testing.assert_close(oracle(graph, {"A": x, "B": w})["C"], (x.double() @ w.double()).float())


def test_one_plan_runs_from_many_threads():
    graph = encoder_layer()
    w, b = rand(16, 8, seed=1), rand(8, seed=2)
    plan_inputs = [rand(6, 16, seed=i) for i in range(8)]
    results = [None] * 8

    def work(i):
        results[i] = run(graph, {"x": plan_inputs[i], "w": w, "b": b})["y"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(8):
        assert torch.equal(results[i], run(graph, {"x": plan_inputs[i], "w": w, "b": b})["y"])


def test_results_carry_no_gradients_and_need_none():
    w = rand(16, 8, seed=1).requires_grad_()
    y = run(encoder_layer(), {"x": rand(6, 16), "w": w, "b": rand(8)})["y"]
    assert not y.requires_grad


def test_declines_are_listed_all_at_once():
    net = Net()
    net.t("x", "int8x4", (2, 4))
    net.t("w", "float32", (2, 4), reordering="INT8x32")
    net.t("off", "int32", (3,))
    net.t("r", "float32", (2, 4), ragged="off")
    net.t("y", "float32", (2, 4))
    net.t("z", "float32", (2, 4))
    net.op("add", {"in0": "x", "in1": "w"}, {"out": "y"}, compute="fp8_e4m3")
    net.op("no_such_op", {"in0": "r"}, {"out": "z"})
    assert reasons(net.frozen()) == [
        ("dtype.unsupported", "x"),
        ("layout.order", "w.reordering"),
        ("layout.ragged", "r"),
        ("dtype.compute", "add"),
        ("op.unsupported", "no_such_op"),
    ]


def test_another_device_type_is_declined():
    ctx = ExecutionContext(None, SimpleNamespace(type="npu"))
    verdict = Eager().check_support(encoder_layer(), ctx)
    assert [r.code for r in verdict.reasons] == ["device.type"]


def halve(inputs, attrs):
    """The reference of the plugin op below."""
    return {"Y": inputs["X"] * attrs["factor"]}


def test_a_plugin_op_runs_through_the_reference_of_its_row(monkeypatch):
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "acme_reference", module)
    rows = {"acme_halve": "acme_reference:halve", "acme_bare": ""}
    monkeypatch.setattr(cudnn_core, "lookup_op", lambda name: SimpleNamespace(reference=rows[name]), raising=False)
    graph = single("acme_halve", {"X": ("bfloat16", (3,))}, {"Y": ("bfloat16", (3,))}, {"factor": 0.5})
    out = run(graph, {"X": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)})["Y"]
    assert out.tolist() == [0.5, 1.0, 1.5]
    bare = single("acme_bare", {"X": ("float32", (3,))}, {"Y": ("float32", (3,))})
    assert reasons(bare) == [("op.unsupported", "acme_bare")]


def test_graphs_of_the_builder_run():
    g = cudnn_core.Graph(io_data_type="float32", intermediate_data_type="float32", compute_data_type="float32")
    x, w, b = g.tensor([1, 6, 16], name="x"), g.tensor([1, 16, 8], name="w"), g.tensor([1, 1, 8], name="b")
    g.gelu(g.add(g.matmul(x, w), b), name="act").set_output(True).set_name("y")
    values = {"x": rand(6, 16), "w": rand(16, 8, seed=1), "b": rand(8, seed=2)}
    y = run(g.freeze(), values)["y"][0]
    torch.testing.assert_close(
        y, torch.nn.functional.gelu(values["x"] @ values["w"] + values["b"]), rtol=1e-5, atol=1e-5
    )


def test_inputs_of_the_oracle_may_be_codes_values_or_numbers():
    codes = torch.arange(0, 120, 17, dtype=torch.uint8)
    graph = single("identity", {"in0": ("fp8_e4m3", (8,))}, {"out": ("float32", (8,))})
    by_code = oracle(graph, {"in0": codes})["out"]
    assert torch.equal(by_code, oracle(graph, {"in0": codes.view(torch.float8_e4m3fn)})["out"])
    assert torch.equal(by_code, oracle(graph, {"in0": by_code.double()})["out"])
    packed = torch.tensor([0x21, 0x43], dtype=torch.uint8)
    graph = single("identity", {"in0": ("fp4_e2m1", (1, 4))}, {"out": ("float32", (1, 4))})
    assert oracle(graph, {"in0": packed})["out"].tolist() == [[0.5, 1.0, 1.5, 2.0]]
    graph = single("identity", {"in0": ("float32", (1,))}, {"out": ("float32", (1,))})
    assert oracle(graph, {"in0": 0.25})["out"].tolist() == [0.25]


def test_ragged_inputs_of_the_oracle_may_be_storage_or_dense():
    net = Net()
    net.t("off", "int32", (3, 1, 1, 1))
    net.t("len", "int32", (2, 1, 1, 1))
    for name in "qkv":
        net.t(name, "float32", (2, 1, 3, 2), (6, 2, 2, 1), ragged="off")
    net.t("O", "float32", (2, 1, 3, 2))
    attrs = {"generate_stats": False, "use_padding_mask": True, "diagonal_alignment": "TOP_LEFT"}
    net.op("sdpa", {"q": "q", "k": "k", "v": "v", "seq_len_q": "len", "seq_len_kv": "len"}, {"O": "O"}, attrs)
    flat = {name: rand(8, seed=i) for i, name in enumerate("qkv")}
    dense = {}
    for name, x in flat.items():
        dense[name] = torch.zeros(2, 1, 3, 2)
        dense[name][0, 0, :1], dense[name][1, 0] = x[:2].reshape(1, 2), x[2:].reshape(3, 2)
    shared = {"off": torch.tensor([0, 2, 8], dtype=torch.int32), "len": torch.tensor([1, 3], dtype=torch.int32)}
    a, b = (oracle(net.frozen(), {**shared, **given})["O"] for given in (flat, dense))
    assert torch.equal(a, b)
    assert (a[0, 0, 1:] == 0).all()

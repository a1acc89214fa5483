"""The coarse filter: manifests against graphs and devices, without plugin code."""

from __future__ import annotations

from types import SimpleNamespace

from cudnn_core._dtypes import data_type
from cudnn_core._graph._frozen import FrozenGraph, FrozenNode, FrozenTensor
from cudnn_core._manifest import filter_graph, parse
from tests.zoo._make import manifest

CPU = SimpleNamespace(type="cpu", compute_capability=(0, 0), arch="")
H200 = SimpleNamespace(type="cuda", compute_capability=(9, 0), arch="90a")
B300 = SimpleNamespace(type="cuda", compute_capability=(10, 3), arch="103a")


def tensor(index, dtype="bfloat16", *, dim=(1, 16, 16), role="input", by_value=False):
    return FrozenTensor(
        index=index,
        uid=index,
        name=f"t{index}",
        dtype=data_type(dtype),
        dim=dim,
        stride=(256, 16, 1),
        role=role,
        by_value=by_value,
    )


def node(index, op, inputs, outputs, attrs=None):
    return FrozenNode(
        index=index,
        op=op,
        name=op,
        compute_dtype=data_type.FLOAT,
        inputs=inputs,
        outputs=outputs,
        attrs=attrs or {},
    )


def matmul_bias_gelu(dtype="bfloat16", bias="float32", *, bias_by_value=False):
    a, b, c = tensor(0, dtype), tensor(1, dtype), tensor(2, dtype, role="virtual")
    d, e = tensor(3, bias, by_value=bias_by_value), tensor(4, dtype, role="virtual")
    out = tensor(5, dtype, role="output")
    nodes = (
        node(0, "matmul", {"A": a, "B": b}, {"C": c}),
        node(1, "add", {"in0": c, "in1": d}, {"out": e}),
        node(2, "gelu", {"in0": e}, {"out": out}),
    )
    return FrozenGraph(name="g", key="0" * 64, tensors=(a, b, c, d, e, out), nodes=nodes)


def engine(**fields):
    fields = {"ops": ["matmul", "pointwise"], "anchors": ["matmul"], "devices": ["cuda"], **fields}
    return parse(manifest("p", engine=fields)).engines[0]


def codes(spec, graph=None, device=H200):
    return [decline.code for decline in filter_graph(spec, graph or matmul_bias_gelu(), device)]


def test_a_fitting_engine_passes():
    assert codes(engine(sm=["90a"], dtypes=["bfloat16"])) == []


def test_ops_are_matched_by_name_group_or_star():
    assert codes(engine(ops=["matmul", "add", "gelu"])) == []
    assert codes(engine(ops=["*"])) == []
    declines = filter_graph(engine(ops=["matmul", "add"]), matmul_bias_gelu(), H200)
    assert [(item.code, item.subject, item.expected) for item in declines] == [
        ("op.unsupported", "gelu", ["matmul", "add"])
    ]


def test_a_graph_without_an_anchor_is_refused():
    (decline,) = filter_graph(engine(ops=["*"], anchors=["conv", "sdpa"]), matmul_bias_gelu(), H200)
    assert (decline.code, decline.expected, decline.actual) == (
        "op.anchor",
        ["conv", "sdpa"],
        ["matmul", "add", "gelu"],
    )


def test_an_anchor_may_be_a_group():
    assert codes(engine(anchors=["pointwise"])) == []


def test_dtypes_count_for_the_data_inputs_of_anchors_only():
    assert codes(engine(dtypes=["bfloat16"]), matmul_bias_gelu(bias="float32")) == []
    declines = filter_graph(engine(dtypes=["float16", "fp8_e4m3"]), matmul_bias_gelu(), H200)
    assert [(item.code, item.subject, item.actual) for item in declines] == [
        ("dtype.unsupported", "matmul.A", "bfloat16"),
        ("dtype.unsupported", "matmul.B", "bfloat16"),
    ]


def test_ports_that_are_not_data_do_not_count():
    token, weight, offsets = tensor(0), tensor(1), tensor(2, "int32")
    out = tensor(3, role="output")
    moe = node(0, "moe_grouped_matmul", {"token": token, "weight": weight, "first_token_offset": offsets}, {"Y": out})
    graph = FrozenGraph(name="g", key="1" * 64, tensors=(token, weight, offsets, out), nodes=(moe,))
    spec = engine(ops=["moe_grouped_matmul"], anchors=["moe_grouped_matmul"], dtypes=["bfloat16"])
    assert codes(spec, graph) == []


def test_host_values_do_not_count():
    spec = engine(anchors=["pointwise"], dtypes=["bfloat16"])
    assert codes(spec, matmul_bias_gelu(bias="float32", bias_by_value=True)) == []
    assert codes(spec, matmul_bias_gelu(bias="float32")) == ["dtype.unsupported"]


def test_device_type_and_architecture():
    assert codes(engine(sm=["90a"]), device=CPU) == ["device.type"]
    assert codes(engine(devices=["cuda", "cpu"], sm=["90a"]), device=CPU) == []
    assert codes(engine(sm=["100f"]), device=B300) == []
    assert codes(engine(sm=["100a"]), device=B300) == ["device.sm_variant"]
    assert codes(engine(sm=["100+"]), device=H200) == ["device.sm_too_low"]


def test_every_mismatch_is_reported_at_once():
    spec = engine(ops=["matmul"], dtypes=["float16"], sm=["100f"])
    assert codes(spec) == [
        "device.sm_variant",
        "op.unsupported",
        "op.unsupported",
        "dtype.unsupported",
        "dtype.unsupported",
    ]


def test_an_op_that_no_row_describes_is_matched_by_name():
    a, out = tensor(0), tensor(1, role="output")
    graph = FrozenGraph(
        name="g", key="2" * 64, tensors=(a, out), nodes=(node(0, "op_of_a_lost_plugin", {"X": a}, {"Y": out}),)
    )
    assert codes(engine(ops=["op_of_a_lost_plugin"], anchors=["op_of_a_lost_plugin"]), graph) == []
    assert codes(engine(ops=["matmul"]), graph) == ["op.unsupported", "op.anchor"]

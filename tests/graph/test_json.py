"""Graph JSON: round trips, and every malformed document is a GraphError that names the place."""

from __future__ import annotations

import copy
import json
import math

import pytest

from cudnn_core import Dim, Graph, GraphError

F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}


def mlp():
    g = Graph(name="mlp", **F32)
    x = g.tensor(dim=(1, Dim("m", max=128), 8), name="x", uid=40)
    w = g.tensor(dim=(1, 8, 16), stride=(128, 1, 8), name="w")
    g.relu(g.add(g.matmul(x, w), 0.5), upper_clip=6.0).set_output(True).set_name("y")
    return g


def test_round_trip_keeps_key_uids_names_and_sizes():
    g = mlp()
    again = Graph.from_json(g.to_json())
    assert again.key() == g.key()
    assert again.to_json() == g.to_json()
    assert {(o.uid, o.name, o.dim, o.stride) for o in again.freeze().operands} == {
        (o.uid, o.name, o.dim, o.stride) for o in g.freeze().operands
    }


def test_round_trip_of_every_in_tree_op_in_the_case_library():
    from cudnn_core.testing._library import library

    count = 0
    for case in library():
        g = case.build()
        again = Graph.from_json(g.to_json())
        assert again.key() == g.key(), case
        count += 1
    assert count > 20


def test_non_finite_floats_stand_as_strings():
    g = Graph(**F32)
    g.relu(g.tensor(dim=(2, 3)), upper_clip=math.inf).set_output(True)
    document = json.loads(g.to_json())
    assert document["nodes"][0]["attrs"]["upper_clip"] == "inf"
    assert Graph.from_json(g.to_json()).key() == g.key()


def test_floats_round_trip_in_their_shortest_form():
    g = Graph(**F32)
    g.relu(g.tensor(dim=(2, 3)), negative_slope=0.1).set_output(True)
    assert '"negative_slope":0.1' in g.to_json()


def edit(path, value):
    """A document with ``value`` at ``path``; DELETE removes the entry."""
    document = json.loads(mlp().to_json())
    target = document
    for step in path[:-1]:
        target = target[step]
    if value is DELETE:
        del target[path[-1]]
    else:
        target[path[-1]] = copy.deepcopy(value)
    return json.dumps(document)


DELETE = object()
BAD = [
    (("schema",), 2, "schema"),
    (("tensor",), [], "unknown field 'tensor'"),
    (("tensors",), {}, "graph.tensors"),
    (("tensors", 0, "uid"), "1", r"tensors\[0\].uid"),
    (("tensors", 0, "uid"), True, r"tensors\[0\].uid"),
    (("tensors", 0, "dims"), [1], "unknown field 'dims'"),
    (("tensors", 0, "dim"), "abc", "dim"),
    (("tensors", 0, "dim"), [1, -2, 8], "sizes >= 0"),
    (("tensors", 0, "dim"), [1, {"dim": "m"}, 8], "not a size"),
    (("tensors", 0, "dim"), [1, 2.5, 8], "not a size"),
    (("tensors", 0, "data_type"), "float23", "did you mean 'float32'"),
    (("tensors", 0, "role"), "inptu", "did you mean 'input'"),
    (("tensors", 0, "by_value"), 1, "by_value"),
    (("tensors", 0, "value"), 1.0, "only a by-value tensor"),
    (("tensors", 0, "reordering"), "F8", "tensor_reordering"),
    (("tensors", 0, "ragged_offset"), 999, "no tensor with uid 999"),
    (("nodes", 0, "op"), "matmull", "did you mean 'matmul'"),
    (("nodes", 0, "inputs", "C"), 1, "no input 'C'"),
    (("nodes", 0, "inputs", "A"), 999, "no tensor with uid 999"),
    (("nodes", 0, "inputs", "A"), [40], "takes one uid"),
    (("nodes", 0, "inputs", "A"), DELETE, "'A' is missing"),
    (("nodes", 0, "outputs"), {}, "output 'C' of matmul is missing"),
    (("nodes", 0, "attrs", "paddding"), 1.0, "did you mean 'padding'"),
    (("nodes", 0, "attrs", "padding"), "x", "takes float"),
    (("nodes", 0, "compute_data_type"), "float", "unknown data type"),
    (("nodes", 0), 5, "must be an object"),
]


@pytest.mark.parametrize(
    ("path", "value", "match"), BAD, ids=[".".join(map(str, p)) + f"-{i}" for i, (p, _, _) in enumerate(BAD)]
)
def test_a_malformed_document_names_the_place(path, value, match):
    with pytest.raises(GraphError, match=match):
        Graph.from_json(edit(path, value))


@pytest.mark.parametrize("text", ["", "[", "null", "[]", "1", '{"schema":1,"schema":1}', "[" * 100_000, b"\xff\xfe"])
def test_text_that_is_no_graph_is_a_graph_error(text):
    with pytest.raises(GraphError):
        Graph.from_json(text)


def test_a_produced_tensor_declared_as_input_is_refused():
    document = json.loads(mlp().to_json())
    for tensor in document["tensors"]:
        if tensor["role"] == "output":
            tensor["role"] = "input"
    with pytest.raises(GraphError, match="role 'input'"):
        Graph.from_json(json.dumps(document))


def test_an_invalid_graph_has_no_json():
    g = Graph(**F32)
    g.relu(g.tensor(dim=(2, 3)))
    with pytest.raises(GraphError, match="set_output"):
        g.to_json()


def test_the_default_of_a_runtime_scalar_is_kept():
    g = Graph(**F32)
    s = g.tensor_scalar(2.5, "RUNTIME_PARAM", name="s")
    g.mul(g.tensor(dim=(2, 3)), s).set_output(True)
    again = Graph.from_json(g.to_json())
    assert again.find_tensor("s").default == 2.5
    assert again.to_json() == g.to_json()
    (operand,) = [t for t in again.freeze().operand_tensors() if t.name == "s"]
    assert (operand.default, operand.value, operand.by_value) == (2.5, None, True)


def test_a_default_is_not_part_of_the_key():
    def key(number):
        g = Graph(**F32)
        g.mul(g.tensor(dim=(2, 3)), g.tensor_scalar(number, "RUNTIME_PARAM")).set_output(True)
        return g.key()

    assert key(1.0) == key(2.0)


def test_a_tensor_that_is_a_host_value_only_on_a_gpu_stays_one():
    torch = pytest.importorskip("torch")
    g = Graph(**F32)
    g.mul(g.tensor(dim=(2, 3)), g.tensor_like(torch.ones(1, 1), name="s")).set_output(True)
    again = Graph.from_json(g.to_json())
    for device in ("cpu", "cuda"):
        assert again.freeze(device).key == g.freeze(device).key
    assert again.freeze("cpu").key != again.freeze("cuda").key
    assert [t["by_value"] for t in json.loads(g.to_json())["tensors"] if t["name"] == "s"] == ["auto"]


BAD_SCALARS = [
    ({"by_value": "maybe"}, "by_value"),
    ({"by_value": False, "default": 1.0}, "only a by-value tensor"),
    ({"by_value": "auto", "value": 1.0}, "only a by-value tensor"),
    ({"value": 1.0, "default": 1.0}, "no default"),
    ({"default": "big"}, "no number"),
    ({"default": [1.0]}, "no number"),
]


@pytest.mark.parametrize(("fields", "match"), BAD_SCALARS, ids=[m for _, m in BAD_SCALARS])
def test_a_malformed_scalar_names_the_place(fields, match):
    g = Graph(**F32)
    g.mul(g.tensor(dim=(2, 3)), g.tensor_scalar(2.5, "RUNTIME_PARAM", name="s")).set_output(True)
    document = json.loads(g.to_json())
    (row,) = [t for t in document["tensors"] if t["name"] == "s"]
    del row["default"]
    row.update(fields)
    with pytest.raises(GraphError, match=match):
        Graph.from_json(json.dumps(document))


@pytest.mark.parametrize("text", [None, 5, object()])
def test_what_is_no_text_is_a_graph_error(text):
    with pytest.raises(GraphError):
        Graph.from_json(text)


def test_a_constant_that_becomes_an_operand_has_no_value_left():
    g = Graph(**F32)
    s = g.tensor_scalar(2.5, "COMPILE_TIME_CONST")
    g.mul(g.tensor(dim=(2, 3)), s).set_output(True)
    s.set_is_pass_by_value(False)
    assert Graph.from_json(g.to_json()).key() == g.key()
    assert len(g.freeze().operands) == 3

"""Rows of plugins: a malformed one is refused when it is made, and a function that fails names the op and the plugin."""

from __future__ import annotations

import math

import pytest

from cudnn_core import Dim, Graph, GraphError, GraphTypeError, ManifestError
from cudnn_core._graph._builders import call_builder
from cudnn_core._ops._attrs import canonical, decode, encode
from cudnn_core.op_schema import Attr, Op, Param, Port, Problem, TensorSpec
from cudnn_core.testing import temporary_plugin

F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}


def boom(*args):
    raise ZeroDivisionError("plugin bug")


def leave(*args):
    raise SystemExit(3)


def row(**changes):
    fields = {
        "inputs": (Port("x"),),
        "outputs": (Port("Y"),),
        "infer": lambda node: {"Y": TensorSpec(node.inputs["x"].dim)},
        "builders": {"acme_op": ((Param("x"),), None)},
    }
    return Op("acme_op", **{**fields, **changes})


def built(op):
    g = Graph(**F32)
    call_builder(g, "acme_op", op, (g.tensor(dim=(4,)),), {}).set_output(True)
    return g


MALFORMED = {
    "no output": {"outputs": ()},
    "ports no Ports": {"inputs": ("x",)},
    "one port twice": {"inputs": (Port("x"), Port("x"))},
    "input named like output": {"inputs": (Port("Y"),)},
    "alias of no port": {"alias": (("nope", "x"),)},
    "alias no pair": {"alias": (1,)},
    "alias no tuple": {"alias": 1},
    "update without an alias": {"attrs": (Attr("over", "bool", False),), "updates": {"over": ("Y", "x")}},
    "update without an attribute": {"alias": (("Y", "x"),), "updates": {"over": ("Y", "x")}},
    "operand of no port": {"operands": {"A": "nope"}},
    "builders no mapping": {"builders": 5},
    "builder no pair": {"builders": {"acme_op": 5}},
    "one parameter twice": {"builders": {"acme_op": ((Param("x"), Param("x")), None)}},
    "parameter for nothing": {"builders": {"acme_op": ((Param("x"), Param("z")), None)}},
    "prepare no function": {"builders": {"acme_op": ((Param("x"),), 5)}},
    "attribute of no type": {"attrs": (Attr("a", "zzz", None),)},
    "enum without choices": {"attrs": (Attr("a", "enum", None),)},
    "default of another type": {"attrs": (Attr("a", "ints", "abc"),)},
    "default no JSON": {"attrs": (Attr("a", "json", {"b": 1}),)},
    "default no finite JSON": {"attrs": (Attr("a", "json", math.inf),)},
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_row_is_refused_when_it_is_made(changes):
    with pytest.raises(ManifestError, match=r"op\.acme_op"):
        row(**changes)


FAILING = {
    "infer raises": {"infer": boom},
    "infer exits": {"infer": leave},
    "infer None": {"infer": lambda node: None},
    "infer no spec": {"infer": lambda node: {"Y": 5}},
    "infer another port": {"infer": lambda node: {"Z": TensorSpec((4,))}},
    "infer text": {"infer": lambda node: {"Y": TensorSpec(("a",))}},
    "infer float": {"infer": lambda node: {"Y": TensorSpec((4.0,))}},
    "infer negative": {"infer": lambda node: {"Y": TensorSpec((-4,))}},
    "infer negative stride": {"infer": lambda node: {"Y": TensorSpec((4,), (-1,))}},
    "infer dtype": {"infer": lambda node: {"Y": TensorSpec((4,), None, "zzz")}},
    "validate raises": {"validate": boom},
    "validate exits": {"validate": leave},
    "validate None": {"validate": lambda node: None},
    "validate no problem": {"validate": lambda node: [1]},
    "validate late": {"validate": lambda node: (boom() for _ in range(1))},
    "when raises": {"outputs": (Port("Y", when=boom),)},
    "prepare raises": {"builders": {"acme_op": ((Param("x"),), boom)}},
    "prepare no mapping": {"builders": {"acme_op": ((Param("x"),), lambda graph, bound: 5)}},
}


@pytest.mark.parametrize("changes", FAILING.values(), ids=FAILING)
def test_a_function_that_fails_is_a_graph_error_that_names_the_op_or_its_node(changes):
    with pytest.raises(GraphError, match="acme_op"):
        built(row(**changes)).validate()


@pytest.mark.parametrize("stage", ["dims", "in_place"])
@pytest.mark.parametrize("function", [boom, leave, lambda node: 5, lambda node: {"m": "x"}, lambda node: [(1, 2)]])
def test_what_a_graph_can_do_without_is_a_warning(stage, function, caplog):
    op = row(**{stage: function})
    answer = getattr(op, stage)(built(op).nodes[0])
    assert len(answer) == 0
    assert "acme_op" in caplog.text
    assert stage in caplog.text


def test_good_answers_pass():
    m = Dim("m")
    op = row(
        dims=lambda node: {"m": m},
        in_place=lambda node: [("Y", "x", 0, 0)],
        validate=lambda node: [Problem("x", "is wrong", 1, 2)],
    )
    node = built(op).nodes[0]
    assert op.dims(node) == {"m": m}
    assert op.in_place(node) == (("Y", "x", 0, 0),)
    assert [p.message for p in op.validate(node)] == ["is wrong"]


def test_the_error_names_the_plugin():
    manifest = {
        "plugin": "acme",
        "engine": [{"name": "e", "ops": ["acme_op"], "devices": ["cpu"]}],
        "op": [{"name": "acme_op"}],
    }
    with temporary_plugin(manifest, {"e": object, "acme_op": row(validate=boom)}, isolated=True):
        g = Graph(**F32)
        g.acme_op(g.tensor(dim=(4,))).set_output(True)
        with pytest.raises(GraphError, match="op 'acme_op' of plugin acme: validate failed: ZeroDivisionError"):
            g.validate()


def test_a_when_that_fails_leaves_the_graph_unchanged():
    g = Graph(**F32)
    x = g.tensor(dim=(4,))
    before = g.inspect()
    with pytest.raises(GraphError):
        call_builder(g, "acme_op", row(inputs=(Port("x"), Port("z")), outputs=(Port("Y", when=boom),),
                                       builders={"acme_op": ((Param("x"), Param("z")), None)}), (x, 1.0), {})  # fmt: skip
    assert g.inspect() == before


# --- attribute values
VALUES = {
    "float": [0.1, 2, math.inf, -math.inf],
    "floats": [(), (1, 0.5), (math.inf, -math.inf, 0.0)],
    "int": [0, -3, 2**62],
    "ints": [(), (1, -2)],
    "bool": [True, 0],
    "str": ["", "inf", "nan"],
    "dtype": ["bfloat16"],
    "enum": ["A", "b"],
    "json": [None, 1, 1.0, True, "inf", "nan", [], [1, [None, "x"]], slice(0, 4, None)],
}


@pytest.mark.parametrize("kind", VALUES)
def test_encoding_is_one_to_one_and_decoding_its_inverse(kind):
    attr = Attr("a", kind, None, ("A", "B") if kind == "enum" else ())
    values = [canonical(attr, value, "n") for value in VALUES[kind] if value is not None]
    coded = [encode({"a": value})["a"] for value in values]
    assert len({repr(item) for item in coded}) == len({repr(value) for value in values})
    for value, item in zip(values, coded, strict=True):
        assert repr(decode(attr, item, "n")) == repr(value)
    assert math.isnan(decode(Attr("a", "float", None), "nan", "n"))


@pytest.mark.parametrize(
    ("kind", "value"),
    [("json", math.inf), ("json", [math.nan]), ("json", {"a": 1}), ("json", 10**400), ("json", "\ud800"),
     ("float", 10**400), ("float", "1"), ("floats", [10**400]), ("floats", 5), ("int", 2**70), ("int", 1.5),
     ("ints", [True]), ("str", None), ("str", "\ud800"), ("bool", 2), ("bool", 1.0), ("dtype", "f"), ("enum", "C"),
     ("enum", 1)],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(kind, value):
    with pytest.raises(GraphTypeError, match=r"n\.a"):
        canonical(Attr("a", kind, None, ("A", "B") if kind == "enum" else ()), value, "n")

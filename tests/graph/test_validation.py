"""Construction and validation: by uid and identity, with errors that name the node, the port, expected and actual."""

from __future__ import annotations

import pytest

from cudnn_core import Dim, Graph, GraphError, GraphTypeError, HandleTypeError, data_type

F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}


@pytest.fixture
def g():
    return Graph(**F32)


def test_unknown_constructor_keyword_raises():
    with pytest.raises(TypeError, match="bogus"):
        Graph(bogus=1)


def test_unknown_builder_keyword_names_the_nearest(g):
    with pytest.raises(GraphTypeError, match="did you mean 'padding'"):
        g.matmul(g.tensor(dim=(1, 2, 3)), g.tensor(dim=(1, 3, 2)), pading=0.0)


def test_unknown_op_builder_is_an_attribute_error(g):
    with pytest.raises(AttributeError, match="no_such_op"):
        g.no_such_op(1)
    with pytest.raises(AttributeError, match="did you mean 'matmul'"):
        g.matmull(1)
    with pytest.raises(AttributeError, match="did you mean 'explain'"):
        g.explian()


@pytest.mark.parametrize("method", ["plan", "explain", "deselect_engines", "set_io_tuples", "build_plans"])
def test_a_wrong_call_names_the_public_class(g, method):
    with pytest.raises(TypeError, match=rf"^Graph\.{method}\(\) "):
        getattr(g, method)(devce="cpu")
    assert getattr(Graph, method).__qualname__ == f"Graph.{method}"


def test_missing_and_repeated_arguments(g):
    x = g.tensor(dim=(1, 2, 3))
    with pytest.raises(GraphTypeError, match="needs 'B'"):
        g.matmul(x)
    with pytest.raises(GraphTypeError, match="'A' twice"):
        g.matmul(x, x, A=x)
    with pytest.raises(GraphTypeError, match="positional"):
        g.matmul(x, x, None, 0.0, "name", 5)


def test_a_failed_builder_call_leaves_the_graph_unchanged(g):
    import numpy as np

    before = g.inspect()
    with pytest.raises(GraphError):
        g.add(np.zeros((2, 3), np.float32), object())
    assert g.inspect() == before


def test_a_tensor_of_another_graph_is_refused(g):
    foreign = Graph(**F32).tensor(dim=(2, 3), name="theirs")
    with pytest.raises(GraphError, match="'theirs' belongs to another graph"):
        g.relu(foreign)


def test_duplicate_names_are_legal_and_both_tensors_are_validated(g):
    a, b = g.tensor(dim=(2, 3), name="t"), g.tensor(dim=(2, 3), name="t")
    g.add(a, b).set_output(True)
    g.validate()
    assert len(g.get_inputs()) == 2
    b.set_dim((2, 4))
    with pytest.raises(GraphError):
        g.validate()


def test_two_user_uids_collide_and_an_automatic_one_gives_way(g):
    auto = g.tensor(dim=(1,), name="auto")
    mine = g.tensor(dim=(1,), name="mine", uid=auto.get_uid())
    assert mine.get_uid() != auto.get_uid()
    assert g.find_tensor(auto.get_uid()) is auto
    with pytest.raises(GraphError, match="belongs to tensor 'mine'"):
        g.tensor(dim=(1,), name="other", uid=mine.get_uid())
    g.tensor(dim=(1,), uid=77)
    with pytest.raises(GraphError, match="^a tensor can't have uid 77: it belongs to another tensor$"):
        g.tensor(dim=(1,), uid=77)


def test_dims_of_one_name_and_different_ranges_are_told_apart(g):
    a, b = g.tensor(dim=(Dim("m", max=8),), name="a"), g.tensor(dim=(Dim("m", max=16),), name="b")
    g.add(a, b).set_output(True)
    with pytest.raises(GraphError, match=r"max=16\) contradicts Dim\('m', min=1, max=8\) of tensor 'a'"):
        g.validate()
    a.set_dim((Dim("m", max=16),))
    g.validate()


def test_a_filter_larger_than_its_image_says_so(g):
    y = g.conv_fprop(g.tensor(dim=(1, 4, 3, 3)), g.tensor(dim=(4, 4, 8, 8)), padding=[0, 0])
    y.set_output(True)
    with pytest.raises(GraphError, match="larger than the padded image on spatial axis 0"):
        g.validate()


@pytest.mark.parametrize("uid", [-1, "3", 1.5, True])
def test_a_uid_is_a_non_negative_int(g, uid):
    with pytest.raises(GraphError, match="uid"):
        g.tensor(dim=(1,), uid=uid)


def test_a_cycle_is_found(g):
    x = g.tensor(dim=(2, 3), name="x")
    loop = g.tensor(dim=(2, 3), name="loop", is_virtual=True)
    y = g.add(x, loop)
    # No builder makes a cycle; graph JSON can.
    import json

    y.set_output(True)
    g2 = Graph(**F32)
    a, b = g2.tensor(dim=(2, 3), name="a"), g2.tensor(dim=(2, 3), name="b")
    g2.relu(g2.add(a, b)).set_output(True)
    document = json.loads(g2.to_json())
    node = {n["op"]: n for n in document["nodes"]}
    node["add"]["inputs"]["in1"] = node["relu"]["outputs"]["out"]
    with pytest.raises(GraphError, match="cycle"):
        Graph.from_json(json.dumps(document)).validate()


def test_a_tensor_has_one_producer(g):
    import json

    x = g.tensor(dim=(2, 3), name="x")
    g.relu(x).set_output(True)
    g.tanh(x).set_output(True)
    document = json.loads(g.to_json())
    document["nodes"][1]["outputs"] = document["nodes"][0]["outputs"]
    with pytest.raises(GraphError, match="already has a producer"):
        Graph.from_json(json.dumps(document))


def test_a_virtual_tensor_without_producer_is_refused(g):
    g.relu(g.tensor(dim=(2, 3), name="ghost", is_virtual=True)).set_output(True)
    with pytest.raises(GraphError, match="'ghost' is virtual"):
        g.validate()


def test_an_unused_result_is_refused(g):
    x = g.tensor(dim=(2, 3))
    g.relu(x).set_output(True)
    g.tanh(x, name="dead")
    with pytest.raises(GraphError, match="dead: nothing uses the result"):
        g.validate()


def test_an_empty_graph_is_refused(g):
    with pytest.raises(GraphError, match="no operations"):
        g.validate()


def test_a_tensor_without_dim_is_named(g):
    x = g.tensor(dim=(2, 3), name="x")
    g.reduction(x, mode="ADD", name="sum").set_output(True)
    with pytest.raises(GraphError, match="sum.Y.*dim is neither set nor inferred"):
        g.validate()


def test_a_missing_data_type_is_named():
    g = Graph(compute_data_type="float32")
    g.relu(g.tensor(dim=(2, 3), name="x"), name="r").set_output(True)
    with pytest.raises(GraphError, match="'x' has no data type"):
        g.validate()


def test_a_user_shape_that_contradicts_inference_names_expected_and_actual(g):
    c = g.matmul(g.tensor(dim=(1, 4, 8)), g.tensor(dim=(1, 8, 16)), name="mm").set_output(True)
    c.set_dim((1, 4, 17))
    with pytest.raises(GraphError, match=r"mm.C.*expected \(1, 4, 16\), got \(1, 4, 17\)"):
        g.validate()


def test_an_output_may_not_write_an_element_twice(g):
    g.relu(g.tensor(dim=(2, 3))).set_output(True).set_stride((0, 1))
    with pytest.raises(GraphError, match="stride 0"):
        g.validate()


def test_overlapping_output_strides_are_refused(g):
    g.relu(g.tensor(dim=(2, 3))).set_output(True).set_stride((1, 1))
    with pytest.raises(GraphError, match="overlap"):
        g.validate()


def test_negative_strides_are_refused(g):
    with pytest.raises(GraphError, match="stride"):
        g.tensor(dim=(2, 3), stride=(-3, 1), name="x")


def test_equal_dim_names_must_agree_on_their_range(g):
    g.add(g.tensor(dim=(Dim("m", max=4), 3)), g.tensor(dim=(Dim("m", max=8), 3))).set_output(True)
    with pytest.raises(GraphError):
        g.validate()


@pytest.mark.parametrize(
    "bad",
    [dict(name=""), dict(name=5), dict(name="m", min=-1), dict(name="m", min=5, max=4), dict(name="m", multiple_of=0),
     dict(name="m", max=1.5), dict(name="m", min=9, max=15, multiple_of=8)],
)  # fmt: skip
def test_a_bad_dim_is_refused(bad):
    with pytest.raises(GraphError):
        Dim(**bad)


def test_a_dim_hint_is_admissible_and_near_the_geometric_mean():
    assert Dim("m", min=1, max=65536).hint == 256
    for dim in (Dim("m", min=7, max=100, multiple_of=8), Dim("m", min=0, max=3), Dim("m", min=5, max=5)):
        assert dim.admits(dim.hint)
        assert dim.admits(dim.largest)


def test_setters_chain_and_getters_mirror(g):
    t = (
        g.tensor(dim=(1,)).set_name("n").set_dim((2, 4)).set_stride((4, 1)).set_data_type("bfloat16").set_uid(9)
        .set_reordering_type("F8_128x4").set_ragged_offset_multiplier(2).set_alignment_value(8)
    )  # fmt: skip
    assert (t.get_name(), t.get_dim(), t.get_stride(), t.get_uid()) == ("n", [2, 4], [4, 1], 9)
    assert t.get_data_type() is data_type.BFLOAT16
    assert t.get_reordering_type() == "F8_128x4"
    assert t.get_ragged_offset_multiplier() == 2
    with pytest.raises(GraphError):
        t.set_alignment_value(0)


def test_output_types_follow_io_and_intermediate():
    g = Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    mid = g.relu(g.tensor(dim=(2, 3)))
    out = g.tanh(mid).set_output(True)
    g.validate()
    assert mid.get_data_type() is data_type.FLOAT
    assert out.get_data_type() is data_type.BFLOAT16


def test_intermediate_and_compute_default_to_io():
    g = Graph(io_data_type="float64")
    assert (g.intermediate_data_type, g.compute_data_type) == ("float64", "float64")


def test_data_types_come_from_every_vocabulary():
    import numpy as np

    torch = pytest.importorskip("torch")
    from cudnn_core import as_dtype

    for value in ("bfloat16", data_type.BFLOAT16, torch.bfloat16):
        assert as_dtype(value) is data_type.BFLOAT16
    for value in (np.float32, np.dtype("float32"), torch.float32, "float32"):
        assert as_dtype(value) is data_type.FLOAT
    assert as_dtype(torch.bool) is as_dtype(np.dtype(bool)) is data_type.BOOLEAN
    assert as_dtype(torch.float8_e4m3fn) is data_type.FP8_E4M3
    with pytest.raises(GraphError, match="did you mean 'bfloat16'"):
        as_dtype("bfloat61")


def test_a_raw_int_handle_is_a_type_error():
    with pytest.raises(HandleTypeError, match="Handle"):
        Graph(handle=1234)


def test_numbers_become_constants_of_the_graph(g):
    g.add(g.tensor(dim=(2, 3)), 2).set_output(True)
    frozen = g.freeze()
    constant = next(t for t in frozen.tensors if t.is_constant)
    assert (constant.value, constant.dtype) == (2, "float32")
    assert len(frozen.operands) == 2


def test_one_framework_tensor_used_twice_is_one_graph_tensor(g):
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 3)
    g.add(x, x).set_output(True)
    assert len(g.get_inputs()) == 1


def test_setters_after_planning_raise():
    pytest.importorskip("torch")
    g = Graph(**F32)
    x = g.tensor(dim=(2, 3), name="x")
    y = g.relu(x).set_output(True)
    g.build()
    with pytest.raises(GraphError, match="after the graph was planned"):
        y.set_dim((2, 3))
    with pytest.raises(GraphError, match="planned already"):
        g.relu(x)


def test_a_failed_planning_leaves_the_graph_usable():
    pytest.importorskip("torch")
    g = Graph(**F32)
    y = g.relu(g.tensor(dim=(2, 3), name="x"))
    with pytest.raises(GraphError):
        g.build()
    y.set_output(True)
    g.build()
    assert g.get_execution_plan_count() >= 1


# --- runtime sizes
def output_of(g, dim, stride=None, out_stride=None):
    y = g.relu(g.tensor(dim=dim, stride=stride, name="x")).set_output(True)
    return y if out_stride is None else y.set_stride(out_stride)


def test_a_dim_that_no_operand_tells_is_refused(g):
    m = Dim("m", max=64)
    output_of(g, (3, 4), (m, 1), (4, 1))
    with pytest.raises(GraphError, match="nothing tells the size of m"):
        g.validate()


def test_a_product_of_several_dims_tells_none_of_them(g):
    m, n = Dim("m", max=64), Dim("n", max=64)
    output_of(g, (m * n, 4))
    with pytest.raises(GraphError, match="nothing tells the size of m"):
        g.validate()


def test_products_are_sizes(g):
    m, n = Dim("m", max=64), Dim("n", max=64)
    x = g.tensor(dim=(m, n * 2, 4))
    g.reshape(x, reshape_mode="LOGICAL", out_dims=(m * n, 8)).set_output(True)
    g.validate()


@pytest.mark.parametrize("factor", [-4, 1.5, True, "2", None])
def test_a_dim_is_multiplied_by_whole_numbers_only(factor):
    with pytest.raises((GraphError, TypeError)):
        Dim("m") * factor


def test_match_sizes_solves_and_checks_products():
    from cudnn_core import ExecutionError
    from cudnn_core._dims import match_sizes

    m, n = Dim("m", max=64), Dim("n", max=64)
    sizes = {}
    match_sizes((m * 2, m * m, m * n), (8, 16, 12), sizes, "x")  # m * n can't be checked yet
    assert sizes == {"m": 4}
    match_sizes((n,), (3,), sizes, "y")
    match_sizes((m * 2, m * m, m * n), (8, 16, 12), sizes, "x")
    for actual in ((9, 16, 12), (8, 15, 12), (8, 16, 13), (10, 25, 15)):
        with pytest.raises(ExecutionError, match="operand x"):
            match_sizes((m * 2, m * m, m * n), actual, dict(sizes), "x")


@pytest.mark.parametrize("stride", [(0, 1), (1, 1), (2, 1)])
def test_an_output_over_runtime_sizes_may_not_overlap(g, stride):
    output_of(g, (Dim("m", max=64), 4), None, stride)
    with pytest.raises(GraphError, match="overlap"):
        g.validate()


def test_an_empty_or_packed_output_over_runtime_sizes_is_fine(g):
    m = Dim("m", min=0, max=64)
    output_of(g, (m, 4), None, (4, 1))
    g.neg(g.tensor(dim=(0, 4))).set_output(True).set_stride((0, 1))
    g.validate()


# --- ragged offsets
def test_a_ragged_offset_is_an_integer_tensor_that_is_not_ragged(g):
    x = g.tensor(dim=(2, 3), name="x")
    g.relu(x).set_output(True)
    x.set_ragged_offset(x)
    with pytest.raises(GraphError, match="is ragged"):
        g.validate()
    x.set_ragged_offset(g.tensor(dim=(3, 1), name="o"))
    with pytest.raises(GraphError, match="int32 or int64"):
        g.validate()
    x.set_ragged_offset(g.tensor(dim=(3, 1), name="o", data_type="int32", is_virtual=True))
    with pytest.raises(GraphError, match="'o' is virtual"):
        g.validate()


def test_an_output_can_not_depend_on_itself_through_its_offsets(g):
    i32 = {"data_type": "int32"}
    y = g.relu(g.tensor(dim=(3, 1), **i32), name="first").set_output(True).set_data_type("int32")
    z = g.neg(y, name="second").set_output(True).set_data_type("int32")
    y.set_ragged_offset(z)
    with pytest.raises(GraphError, match="cycle"):
        g.validate()


# --- constants
def constant(io, compute, number, op="add"):
    g = Graph(io_data_type=io, compute_data_type=compute)
    getattr(g, op)(g.tensor(dim=(4,)), number).set_output(True)
    found = next(t for t in g.freeze().tensors if t.is_constant)
    return str(found.dtype), found.value


@pytest.mark.parametrize(
    ("io", "compute", "number", "expected"),
    [
        ("int64", "int64", 1, ("int64", 1)),
        ("int64", "int64", 2**53 + 1, ("int64", 2**53 + 1)),
        ("int32", "int64", 1, ("int64", 1)),
        ("int8", "int32", 300, ("int32", 300)),
        ("int32", "int32", 2.0, ("int32", 2)),
        ("float32", "float32", 2, ("float32", 2.0)),
        ("bfloat16", "float32", 2**80, ("float32", 2.0**80)),
        ("float32", "float32", 1e300, ("float64", 1e300)),
        ("float64", "float32", 0.1, ("float64", 0.1)),
        ("float16", "float64", 0.1, ("float64", 0.1)),
        ("float16", "float16", 0.5, ("float32", 0.5)),
        ("float32", "float32", True, ("boolean", True)),
    ],
)
def test_the_type_of_a_constant_holds_its_value(io, compute, number, expected):
    found = constant(io, compute, number)
    assert found == expected
    assert type(found[1]) is type(expected[1])


@pytest.mark.parametrize(
    ("io", "compute", "number"),
    [("float32", "int32", 1.5), ("int32", "int32", 2**40), ("int8", "int8", 300), ("int32", "int32", float("nan")),
     ("int64", "int64", 2**80), ("float32", "float32", 10**400), ("int32", "int32", float("inf"))],
)  # fmt: skip
def test_a_constant_that_the_arithmetic_can_not_hold_is_refused(io, compute, number):
    with pytest.raises(GraphError, match="hold"):
        constant(io, compute, number)


def test_a_scalar_must_fit_the_type_that_the_user_gives_it(g):
    for kind in ("COMPILE_TIME_CONST", "RUNTIME_PARAM"):
        s = g.tensor_scalar(2.7, kind)
        g.mul(g.tensor(dim=(2,)), s).set_output(True)
        s.set_data_type("int32")
        with pytest.raises(GraphError, match="int32 does not hold"):
            g.validate()
        s.set_data_type("float16")
    g.validate()


def test_numpy_scalars_are_numbers(g):
    np = pytest.importorskip("numpy")
    for number in (np.float32(2), np.int64(2), np.float64(2)):
        g.add(g.tensor(dim=(2, 3)), number).set_output(True)
    values = [t.value for t in g.freeze().tensors if t.is_constant]
    assert values == [2.0] * 3
    assert {type(v) for v in values} == {float}


# --- arguments
def test_arguments_of_the_wrong_type_are_typed_errors(g):
    torch = pytest.importorskip("torch")
    x = g.tensor(dim=(2, 3))
    for call in (
        lambda: Graph(name=5),
        lambda: g.relu(x, name=5),
        lambda: g.tensor(dim=(2,), name=5),
        lambda: g.tensor(dim=(2,), name="\ud800"),
        lambda: g.tensor(dim=5),
        lambda: g.tensor(dim=torch.tensor(1.0)),
        lambda: g.tensor(dim=(torch.tensor(1.5),)),
        lambda: g.tensor(dim=(2**80,)),
        lambda: g.tensor(dim=(10**5000,)),
        lambda: g.tensor(dim=(2,), alignment_value=None),
        lambda: g.tensor(dim=(2,), ragged_offset_multiplier="2"),
        lambda: x.set_alignment_value(None),
        lambda: x.set_ragged_offset_multiplier(1.5),
        lambda: x.set_name(5),
        lambda: g.reshape(x, out_dims=torch.tensor(1.0)),
        lambda: g.relu(x, negative_slope=10**400),
        lambda: g.tensor_scalar("2", "RUNTIME_PARAM"),
    ):
        before = g.inspect()
        with pytest.raises(GraphError):
            call()
        assert g.inspect() == before

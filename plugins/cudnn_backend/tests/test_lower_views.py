"""Views: the same elements at the same addresses, whatever the backend's axes are."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from backend_cases import Build, out
from cudnn_backend.lower import analyse
from cudnn_backend.lower import program as lowering_program
from cudnn_backend.lower.broadcasts import RIGHT
from cudnn_backend.lower.views import Frame, Layout, column, fold_input, fold_output, groups_of, packed, pad
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_core import Dim


def offsets(layout):
    """Element offsets as an array of the layout's shape."""
    grid = np.zeros(layout.dim, dtype=np.int64)
    for axis, (size, step) in enumerate(zip(layout.dim, layout.stride, strict=True)):
        grid += (np.arange(size) * step).reshape([-1 if at == axis else 1 for at in range(len(layout.dim))])
    return grid


def row_major(*dim):
    return Layout(dim, packed(dim, range(len(dim))))


@st.composite
def layouts(draw):
    """Two to five axes in some order of memory, with gaps."""
    dim = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    order = draw(st.permutations(range(len(dim))))
    stride, running = [0] * len(dim), 1
    for axis in reversed(order):
        stride[axis] = running
        running = running * dim[axis] + draw(st.sampled_from([0, 0, 0, 3]))
    return Layout(tuple(dim), tuple(stride))


@settings(max_examples=80, deadline=None)
@given(layouts(), st.booleans(), st.integers(1, 3))
def test_a_frame_walks_the_same_addresses(layout, sort, keep):
    """In the order of the groups' axes."""
    rank = len(layout.dim)
    groups = groups_of([(layout, False)], rank, sort=sort, keep=keep)
    frames = [Frame.row_major(groups, rank, 4), Frame.channels_last(groups, rank, 4)]
    for frame in [*frames, *([Frame.swapped(groups, rank)] if len(groups) == 3 else [])]:
        view = frame.view(layout)
        assert view is not None
        walked = np.transpose(offsets(view), frame.order).ravel()
        order = [axis for place in frame.order for axis in frame.axes[place]]
        rest = [axis for axis in range(rank) if axis not in order]
        assert all(layout.dim[axis] == 1 for axis in rest)
        assert (walked == np.transpose(offsets(layout), [*rest, *order]).ravel()).all()


@settings(max_examples=80, deadline=None)
@given(layouts(), st.data())
def test_what_broadcasts_still_broadcasts(layout, data):
    """A second tensor of the same sizes or 1: in the view it meets the same elements."""
    rank = len(layout.dim)
    dim = tuple(data.draw(st.sampled_from([1, size])) for size in layout.dim)
    other = Layout(dim, packed(dim, range(rank)))
    groups = groups_of([(layout, False), (other, False)], rank, sort=True)
    frame = Frame.row_major(groups, rank, 3)
    views = [frame.view(layout), frame.view(other)]
    assert None not in views
    full = np.broadcast_arrays(offsets(layout), offsets(other))
    seen = np.broadcast_arrays(*map(offsets, views))
    pairs = [sorted(zip(*(array.ravel().tolist() for array in arrays), strict=True)) for arrays in (full, seen)]
    assert pairs[0] == pairs[1]


def test_a_gap_is_not_merged():
    padded = Layout((4, 8, 16), (8 * 24, 24, 1))
    assert groups_of([(padded, False)], 3) == [(0, 1), (2,)]
    assert Frame.row_major([(0, 1, 2)], 3, 3).view(padded) is None


def test_axes_that_are_named_stay_alone():
    assert groups_of([(row_major(4, 8, 16), False)], 3, alone=(1,)) == [(0,), (1,), (2,)]


def test_virtual_tensors_have_no_memory_that_could_fail_to_merge():
    frame = Frame.row_major([(0, 1), (2,)], 3, 3)
    assert frame.view(Layout((4, 8, 16), (1, 999, 7)), virtual=True) == row_major(1, 32, 16)


def test_a_partial_broadcast_is_not_merged():
    seen = [(row_major(4, 8, 16), False), (row_major(1, 8, 16), False)]
    assert groups_of(seen, 3) == [(0,), (1, 2)]


def test_runtime_sizes_merge_by_their_names():
    m, n = Dim("m"), Dim("n")
    layout = Layout((m, n, 16), (n * 16, 16, 1))
    assert groups_of([(layout, False)], 3) == [(0, 1, 2)]
    assert Frame.row_major([(0, 1), (2,)], 3, 3).view(layout).dim == (1, m * n, 16)
    assert groups_of([(Layout((m, n, 16), (m * 16, 16, 1)), False)], 3) == [(0,), (1, 2)]


def test_padding_and_columns():
    assert pad(row_major(8, 16), 4).dim == (1, 1, 8, 16)
    assert column(row_major(8), 4) == Layout((8, 1, 1, 1), (1, 1, 1, 1))


def test_an_axis_is_found_where_it_lies():
    frame = Frame.channels_last([(0,), (1,), (3, 2)], 4, 4)
    assert frame.axis(1, 4, (2, 3, 4, 5)) == 2
    assert frame.axis(0, 3, (3, 4, 5)) == 2  # of a tensor without the first axis
    assert frame.axis(2, 4, (2, 3, 4, 5)) is None
    assert frame.axis(2, 4, (2, 3, 4, 1)) == 1


# --- folding


def node(op, given, out_dim, out_stride=None, **attrs):
    result = SimpleNamespace(dim=out_dim, stride=out_stride or packed(out_dim, range(len(out_dim))))
    source = SimpleNamespace(dim=given.dim, stride=given.stride)
    return SimpleNamespace(op=op, inputs={"input": source}, outputs={"Y": result}, attrs=attrs)


@settings(max_examples=80, deadline=None)
@given(layouts(), st.data())
def test_a_folded_transpose_reads_the_same_elements(layout, data):
    permutation = tuple(data.draw(st.permutations(range(len(layout.dim)))))
    turned = tuple(layout.dim[axis] for axis in permutation)
    folded = fold_input(node("transpose", layout, turned, permutation=permutation), layout)
    assert (offsets(folded) == np.transpose(offsets(layout), permutation)).all()
    back = fold_output(node("transpose", layout, turned, permutation=permutation), folded)
    assert back == layout


@settings(max_examples=80, deadline=None)
@given(layouts(), st.data())
def test_a_folded_logical_reshape_reads_the_same_elements(layout, data):
    """Or it is not folded, and then a copy is needed: numpy needs one too."""
    factors = [size for size in layout.dim for size in ([2, 2] if size == 4 else [size])]
    shape = data.draw(st.permutations(factors))
    cut = data.draw(st.integers(0, len(shape)))
    dim = tuple(shape[:cut]) + ((math.prod(shape[cut:]),) if cut < len(shape) else ())
    folded = fold_input(node("reshape", layout, dim, reshape_mode="LOGICAL"), layout)
    wanted = offsets(layout).reshape(dim)
    memory = np.zeros(int(offsets(layout).max()) + 1, dtype=np.int8)
    strided = np.lib.stride_tricks.as_strided(memory, layout.dim, layout.stride)
    copied = not np.shares_memory(memory, strided.reshape(dim))
    assert (folded is None) == copied
    if folded is not None:
        assert (offsets(folded) == wanted).all()


def test_a_dense_reshape_keeps_memory_order():
    source = Layout((4, 8), (1, 4))
    made = fold_input(node("reshape", source, (8, 4), (4, 1), reshape_mode="VIEW_ONLY"), source)
    assert made == Layout((8, 4), (4, 1))


def test_a_dense_reshape_of_memory_that_is_laid_out_otherwise_is_not_folded():
    source = node("reshape", row_major(4, 8), (8, 4), reshape_mode="VIEW_ONLY")
    assert fold_input(source, Layout((4, 8), (1, 4))) is None


def test_a_slice_folds_from_the_first_element_only():
    source = row_major(8, 16)
    first = node("slice", source, (4, 8), slices=((0, 8, 2), (0, 8, 1)))
    assert fold_input(first, source) == Layout((4, 8), (32, 1))
    assert fold_input(node("slice", source, (4, 16), slices=((4, 8, 1), (0, 16, 1))), source) is None


# --- whole graphs


def analysed(make):
    b = Build()
    make(b)
    return b.g.freeze("cuda")


def test_a_chain_of_views_is_one_layout():
    def make(b):
        b.graph()
        x = b.g.reshape(b.input((4, 64, 32)), reshape_mode="LOGICAL", out_dims=(256, 32))
        x = b.g.transpose(x, permutation=(1, 0))
        out(b.g.matmul(b.input((16, 32)), x))

    graph = analysed(make)
    program = graph.facts(analyse)
    assert [node.op for node in program.nodes] == ["matmul"]
    (right,) = [t for t in graph.operand_tensors() if t.dim == (4, 64, 32)]
    assert program.layouts[right.index] == Layout((1, 32, 256), (8192, 1, 32))


def test_an_output_takes_the_layout_of_what_it_is_a_view_of():
    def make(b):
        b.graph()
        c = b.g.matmul(b.input((16, 32)), b.input((32, 48))).set_data_type("bfloat16")
        out(b.g.transpose(c, permutation=(1, 0)), stride=(16, 1))

    graph = analysed(make)
    program = graph.facts(analyse)
    (result,) = [t for t in graph.operand_tensors() if t.role == "output"]
    assert [node.op for node in program.nodes] == ["matmul"]
    assert program.layouts[result.index] == Layout((1, 16, 48), (768, 1, 16))


def test_a_tensor_with_two_readers_is_not_folded():
    def make(b):
        b.graph()
        c = b.g.matmul(b.input((16, 32)), b.input((32, 48))).set_data_type("bfloat16")
        out(b.g.transpose(c, permutation=(1, 0)))
        out(b.g.relu(c))

    assert "transpose" in [node.op for node in analysed(make).facts(analyse).nodes]


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_a_copy_that_float32_would_round_is_left_to_the_backend(dtype):
    def make(b):
        b.graph(dtype, dtype)
        out(b.g.transpose(b.input((4, 8, 16)), permutation=(0, 2, 1)), dtype)

    assert [node.op for node in analysed(make).facts(analyse).nodes] == ["transpose"]


# --- broadcasts of pointwise graphs


def broadcasting(dim, operand, stride=None, reduced=None, operand_stride=None):
    def make(b):
        b.graph("float16")
        y = b.g.add(b.input(dim, stride=stride), b.input(operand, stride=operand_stride))
        out(y, "float16", stride=stride)
        if reduced:
            out(b.g.reduction(y, mode="ADD", out_dims=reduced), "float32")

    graph = analysed(make)
    program = graph.facts(analyse)
    tensors = [tensor for tensor in graph.operand_tensors() if tensor.role == "input"]
    return program, [program.layouts[tensor.index] for tensor in tensors] if not program.declines else []


# Gaps behind every axis, so that none merge.
PADDED = (2, 8, 512), (16 * 640, 640, 1)
IMAGES = (2, 8, 16, 32), (2 * 16 * 40 * 8, 1, 40 * 8, 8)


@pytest.mark.parametrize(
    ("dim", "operand", "view"),
    [
        ((2, 8, 512), (1, 1, 512), (1, 1, 512)),  # the two leading axes are one
        ((2, 8, 512), (2, 8, 1), (1, 16, 1)),
        ((2, 8, 512), (1, 8, 512), (1, 1, 4096)),
        ((2, 8, 512), (1, 1, 1), (1, 1, 1)),
        ((2, 8, 16, 32), (2, 1, 1, 1), (1, 2, 1)),
        ((1, 8, 16, 32), (1, 8, 1, 1), (1, 8, 1)),
    ],
)
def test_axes_are_merged_until_nothing_broadcasts_along_a_leading_one(dim, operand, view):
    program, layouts = broadcasting(dim, operand)
    assert program.declines == ()
    assert layouts[1].dim == view


@pytest.mark.parametrize(
    ("dim", "operand", "stride", "pattern"),
    [
        ((2, 8, 512), (1, 8, 1), None, "b=b"),
        (PADDED[0], (1, 1, 512), PADDED[1], "bb="),
        (PADDED[0], (2, 1, 1), PADDED[1], "=bb"),
    ],
)
def test_a_broadcast_that_nobody_has_compared_is_declined(dim, operand, stride, pattern):
    """cuDNN 9.19 builds a plan for each of them, and gives garbage on an H200."""
    program, _ = broadcasting(dim, operand, stride)
    (decline,) = program.declines
    assert (decline.code, decline.subject) == ("x.cudnn_backend.broadcast", "add.in1")
    assert str(decline.actual).startswith(pattern + " ")


def test_a_stride_of_0_is_a_broadcast():
    program, _ = broadcasting(PADDED[0], (2, 8, 512), PADDED[1], operand_stride=(0, 640, 1))
    assert str(program.declines[0].actual).startswith("0== ")


def test_broadcasts_that_were_compared_stay():
    for dim, stride, operand in ((*PADDED, (2, 8, 1)), (*IMAGES, (1, 8, 1, 1))):
        program, layouts = broadcasting(dim, operand, stride)
        assert program.declines == ()
        assert layouts == [Layout(dim, stride), Layout(operand, layouts[1].stride)]


@pytest.mark.parametrize(
    ("form", "pattern", "view"),
    [("row", "b=b", (1, 8, 1)), ("swapped", "=bb", (8, 1, 1)), ("last", "bb=1", (1, 1, 8, 1))],
)
def test_a_row_of_the_table_lets_its_view_through(form, pattern, view, monkeypatch):
    monkeypatch.setattr(lowering_program, "RIGHT", {form: frozenset({pattern})})
    program, layouts = broadcasting((2, 8, 512), (1, 8, 1))
    assert program.declines == ()
    assert layouts[1].dim == view
    assert sorted(offsets(layouts[0]).ravel()) == list(range(2 * 8 * 512))


def test_a_graph_with_a_reduction_has_rows_of_its_own():
    program, layouts = broadcasting((2, 64, 128), (1, 1, 128), reduced=(2, 64, 1))
    assert program.declines == ()
    assert layouts[1].dim == (1, 128, 1, 1)
    assert broadcasting((2, 64, 128), (1, 64, 1), reduced=(2, 64, 1))[0].declines


@pytest.mark.parametrize("product", [False, True])
def test_a_computed_operand_that_broadcasts_is_declined(product):
    """Garbage on an H200 in pointwise graphs; not compared behind a product."""

    def make(b):
        b.graph("float16")
        x = b.g.matmul(b.input((2, 8, 32)), b.input((2, 32, 512))) if product else b.input(PADDED[0], stride=PADDED[1])
        out(b.g.add(x, b.g.relu(b.input((2, 8, 1)))), "float16")

    (decline,) = analysed(make).facts(analyse).declines
    assert (decline.code, decline.subject) == ("x.cudnn_backend.broadcast", "add.in1")


def test_numbers_by_value_are_not_read_from_memory_that_broadcasts():
    def make(b):
        b.graph("float16")
        out(b.g.mul(b.input(PADDED[0], stride=PADDED[1]), b.host(0.5, 3)), "float16")

    assert analysed(make).facts(analyse).declines == ()


def test_products_have_engines_of_their_own():
    def make(b):
        b.graph("float16")
        c = b.g.matmul(b.input((2, 64, 32)), b.input((2, 32, 48)))
        out(b.g.add(c, b.input((1, 1, 48))), "float16")

    assert analysed(make).facts(analyse).declines == ()


def test_every_pattern_of_the_table_has_a_letter_for_each_axis():
    ranks = {"row": 3, "swapped": 3, "last": 4, "reduced": 4}
    for form, patterns in RIGHT.items():
        for pattern in patterns:
            assert len(pattern) == ranks[form]
            assert set(pattern) <= set("1=b0")


def test_attention_keeps_its_axes():
    def make(b):
        b.graph()
        made = b.g.sdpa(**{name: b.input((1, 2, 64, 64)) for name in ("q", "k", "v")})
        out(made[0] if isinstance(made, (list, tuple)) else made)

    program = analysed(make).facts(analyse)
    assert {layout.dim for layout in program.layouts.values()} == {(1, 2, 64, 64)}


@pytest.mark.parametrize(
    ("dtype", "value", "held"),
    [
        ("float16", 0.1, 0.0999755859375),
        ("bfloat16", 0.1, 0.10009765625),
        ("float32", 0.1, 0.1),
        ("float64", 0.5, 0.5),
        ("int32", 7, 7),
        ("int64", 7, 7),
        ("float32", math.inf, math.inf),
    ],
)
def test_a_constant_has_the_value_of_its_type(dtype, value, held):
    def make(b):
        b.graph("float32")
        out(b.g.mul(b.input((2, 32, 64)), constant(b.g, value, dtype)))

    program = analysed(make).facts(analyse)
    assert list(program.constants.values()) == [held]


def constant(g, value, dtype):
    from cudnn_core import scalar_type

    return g.tensor_scalar(value, scalar_type.COMPILE_TIME_CONST).set_data_type(dtype)


def test_every_frame_of_up_to_four_groups_is_a_permutation():
    for count in range(5):
        groups = [(axis,) for axis in range(count)]
        frame = Frame.channels_last(groups, count, 4)
        assert sorted(itertools.chain(*frame.axes)) == list(range(count))
        assert sorted(frame.order) == list(range(len(frame.axes)))

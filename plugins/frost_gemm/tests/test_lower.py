"""From graphs to programs: what is recognised, what is declined and with which words, and that no size is baked in."""

from __future__ import annotations

import json
import math
import time

import pytest
from frost_gemm.ir import Aux, Op, Ref, argument_words
from frost_gemm.lower import lower, transposed_bytes
from frost_gemm.ops import TABLE

import cudnn_core
from cudnn_core import Dim, lookup_op
from cudnn_core import data_type as dt

M, N, K = 64, 96, 128


def new(io="bfloat16", virtual="float32", compute="float32"):
    return cudnn_core.Graph(io_data_type=io, intermediate_data_type=virtual, compute_data_type=compute)


def product(g, m=M, n=N, k=K, a_stride=None, b_stride=None, a_dtype=None, b_dtype=None, batch=(1,), out="float32"):
    a = g.tensor((*batch, m, k), a_stride, data_type=a_dtype, name="a")
    b = g.tensor((*batch, k, n), b_stride, data_type=b_dtype, name="b")
    return g.matmul(a, b).set_data_type(out)


def done(tensor, dtype="bfloat16", stride=None, name="y"):
    tensor.set_output(True).set_data_type(dtype).set_name(name)
    return tensor if stride is None else tensor.set_stride(stride)


def lowered(g):
    found = lower(g.freeze())
    assert (found.program is None) == bool(found.declines)
    return found


def program(g):
    found = lowered(g)
    assert not found.declines, [str(decline) for decline in found.declines]
    return found.program


def declines(g):
    return {(decline.code, decline.subject) for decline in lowered(g).declines}


def plain(**options):
    g = new(options.pop("io", "bfloat16"), compute=options.pop("compute", "float32"))
    done(product(g, **options), options.get("out", "float32"))
    return g


# Operands of matmuls


def test_a_matmul_alone_is_one_product_and_one_store():
    p = program(plain())
    assert [(m.dtype, m.mma_dtype, m.major, m.batched, m.prologue) for m in (*p.a, *p.b)] == [
        ("bfloat16", "bfloat16", "k", False, ()),
        ("bfloat16", "bfloat16", "mn", False, ()),
    ]
    assert [(s.value, s.dtype, s.major, s.alignment) for s in p.stores] == [(Ref("acc", 0), "float32", "n", 16)]
    assert (p.ops, p.aux, p.reductions, p.accumulate, p.promote) == ((), (), (), "float32", False)


@pytest.mark.parametrize(
    ("dtypes", "accumulate"),
    [
        (("bfloat16", "bfloat16"), "float32"),
        (("float16", "float16"), "float32"),
        (("fp8_e4m3", "fp8_e4m3"), "float32"),
        (("fp8_e4m3", "fp8_e5m2"), "float32"),
        (("fp8_e5m2", "fp8_e4m3"), "float32"),
        (("int8", "int8"), "int32"),
    ],
)
def test_pairs_that_the_matrix_units_multiply(dtypes, accumulate):
    out = "int32" if accumulate == "int32" else "float32"
    g = plain(a_dtype=dtypes[0], b_dtype=dtypes[1], out=out, compute=accumulate)
    p = program(g)
    assert (p.a[0].mma_dtype, p.b[0].mma_dtype, p.accumulate) == (*dtypes, accumulate)
    assert p.promote == dtypes[0].startswith("fp8")


@pytest.mark.parametrize("dtypes", [("bfloat16", "float16"), ("fp8_e4m3", "bfloat16"), ("int8", "fp8_e4m3")])
def test_pairs_that_they_do_not_multiply(dtypes):
    assert declines(plain(a_dtype=dtypes[0], b_dtype=dtypes[1])) == {("dtype.mixed", "B")}


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "int32", "fp4_e2m1", "int4", "fp8_e8m0"])
def test_types_that_they_do_not_multiply(dtype):
    assert {("dtype.unsupported", "A"), ("dtype.unsupported", "B")} <= declines(plain(io=dtype))


def test_fp8_sums_are_promoted_unless_the_graph_asks_for_speed():
    assert program(plain(io="fp8_e4m3")).promote
    assert not program(plain(io="fp8_e4m3", compute=dt.FAST_FLOAT_FOR_FP8)).promote


@pytest.mark.parametrize("compute", ["float64", "int32", "int64", "int8"])
def test_products_of_floats_in_another_compute_type(compute):
    assert ("dtype.compute", "C") in declines(plain(compute=compute))


def test_padding_has_no_effect_and_is_accepted():
    g = new()
    a, b = g.tensor((1, M, K)), g.tensor((1, K, N))
    done(g.matmul(a, b, padding=3.0))
    assert program(g) == program(plain(out="bfloat16"))


MAJORS = [
    # m, n, k, A's strides, B's strides (K, N), majors
    (64, 96, 128, (128, 1), (1, 128), "k", "k"),
    (64, 96, 128, (1, 64), (96, 1), "mn", "mn"),
    (64, 128, 128, (128, 1), (128, 1), "k", "mn"),
    (64, 128, 128, (128, 1), (1, 128), "k", "k"),
    (64, 96, 128, (256, 1), (1, 512), "k", "k"),
    (1, 96, 128, (7, 1), (1, 128), "k", "k"),
    (1, 96, 128, (1, 8), (1, 128), "mn", "k"),
    (64, 1, 128, (128, 1), (1, 3), "k", "k"),
    (64, 96, 1, (8, 5), (5, 8), "k", "k"),
    (64, 96, 1, (1, 5), (5, 1), "mn", "mn"),
    (1, 1, 1, (3, 5), (7, 9), "k", "k"),
    (1, 1, 1, (1, 5), (7, 1), "k", "k"),
]


@pytest.mark.parametrize(("m", "n", "k", "a", "b", "a_major", "b_major"), MAJORS)
def test_the_declared_strides_tell_the_major(m, n, k, a, b, a_major, b_major):
    p = program(plain(m=m, n=n, k=k, a_stride=(10**6, *a), b_stride=(10**6, *b)))
    assert (p.a[0].major, p.b[0].major) == (a_major, b_major)


def test_operands_without_a_unit_stride_are_declined():
    g = plain(a_stride=(2 * M * K, 2 * K, 2), b_stride=(2 * K * N, 2, 2 * K))
    assert declines(g) == {("layout.order", "A"), ("layout.order", "B")}


@pytest.mark.parametrize(
    ("io", "k", "stride", "aligned"),
    [
        ("bfloat16", 128, 128, True),
        ("bfloat16", 100, 104, True),
        ("bfloat16", 100, 100, False),
        ("bfloat16", 99, 99, False),
        ("fp8_e4m3", 99, 112, True),
        ("fp8_e4m3", 104, 104, False),
        ("int8", 24, 24, False),
        ("int8", 32, 32, True),
    ],
)
def test_rows_start_at_multiples_of_16_bytes(io, k, stride, aligned):
    compute = "int32" if io == "int8" else "float32"
    g = plain(io=io, m=16, n=32, k=k, a_stride=(10**6, stride, 1), compute=compute, b_stride=(10**6, 1, stride))
    expected = set() if aligned else {("layout.alignment", "A.stride"), ("layout.alignment", "B.stride")}
    assert declines(g) == expected


def test_the_batch_stride_is_checked_too_and_the_decline_says_what_is_needed():
    g = plain(batch=(3,), a_stride=(M * K + 4, K, 1))
    (decline,) = lowered(g).declines
    assert (decline.code, decline.subject, decline.expected) == ("layout.alignment", "A.stride", {"multiple_of": 8})
    assert decline.actual == [M * K + 4, K, 1]


@pytest.mark.parametrize(("multiple", "aligned"), [(8, True), (16, True), (4, False), (1, False)])
def test_a_runtime_stride_counts_by_its_declared_multiple(multiple, aligned):
    k = Dim("k", multiple_of=multiple)
    g = new()
    done(g.matmul(g.tensor((1, M, k)), g.tensor((1, k, N), (k * N, 1, k))), "float32")
    assert declines(g) == (set() if aligned else {("layout.alignment", "A.stride"), ("layout.alignment", "B.stride")})


def test_operands_that_repeat_elements_are_declined():
    g = plain(a_stride=(0, 0, 1))
    assert ("layout.stride", "A.stride[1]") in declines(g)


def test_strides_past_the_reach_of_a_tensor_map_are_declined():
    g = plain(a_stride=(2**50, 2**39, 1))
    assert declines(g) == {("layout.stride", "A.stride")}
    assert not declines(plain(a_stride=(2**38, 2**38, 1)))


def test_eight_bit_operands_that_are_not_contiguous_along_k_are_named():
    found = lowered(plain(io="fp8_e4m3", a_stride=(M * K, 1, M), b_stride=(K * N, 1, K)))
    assert transposed_bytes(found) == ("A",)
    assert transposed_bytes(lowered(plain(io="fp8_e4m3"))) == ("B",)
    assert transposed_bytes(lowered(plain())) == ()
    assert transposed_bytes(lowered(plain(io="float32"))) == ()


# Batches


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((3,), (3,), (True, True)),
        ((1,), (3,), (False, True)),
        ((3,), (1,), (True, False)),
        ((3,), (), (True, False)),
        ((), (), (False, False)),
        ((1,), (1,), (False, False)),
        ((2, 3), (2, 3), (True, True)),
        ((2, 3), (1, 1), (True, False)),
        ((1, 3), (1, 3), (True, True)),
    ],
)
def test_batches_broadcast(a, b, expected):
    g = new()
    done(g.matmul(g.tensor((*a, M, K)), g.tensor((*b, K, N))), "float32")
    found = lowered(g)
    assert (found.program.a[0].batched, found.program.b[0].batched) == expected
    dims = [operand.dim for operand in g.freeze().operands]
    size = 1
    for axis in max(a, b, key=lambda shape: (len(shape), shape)):
        size *= axis
    assert found.binding.sizes(dims) == {"m": M, "n": N, "k": K, "l": size}


def test_batch_axes_of_one_stride_are_one_and_others_are_declined():
    g = plain(batch=(2, 3))
    found = lowered(g)
    assert found.binding.places[0].batch == 1
    spread = plain(batch=(2, 3), a_stride=(4 * M * K, M * K, K, 1))
    assert declines(spread) == {("layout.stride", "A")}
    partial = new()
    done(partial.matmul(partial.tensor((2, 1, M, K)), partial.tensor((2, 3, K, N))), "float32")
    assert declines(partial) == {("layout.stride", "A")}


def test_a_batch_stride_of_0_is_a_broadcast():
    p = program(plain(batch=(3,), b_stride=(0, N, 1)))
    assert (p.a[0].batched, p.b[0].batched) == (True, False)


# Several products


def gated(g, shape=(1, K, N)):
    x = g.tensor((1, M, K), name="x")
    w = [g.tensor(shape, (K * N, 1, K), name=name) for name in ("up", "gate")]
    up, gate = (g.matmul(x, tensor) for tensor in w)
    return g.mul(g.swish(gate), up)


def test_gate_and_up_share_their_a():
    g = new()
    done(gated(g))
    p = program(g)
    assert (len(p.a), len(p.b)) == (1, 2)
    assert {(gemm.a, gemm.b) for gemm in p.gemms} == {(0, 0), (0, 1)}
    assert [op.name for op in p.ops] == ["swish", "mul"]
    swish, product_ = p.ops
    assert {swish.args[0], *product_.args} == {Ref("acc", 0), Ref("acc", 1), Ref("val", 0)}
    names = lowered(g).subjects
    assert {names["a0"], names["b0"], names["b1"]} == {"matmul[0].A", "matmul[0].B", "matmul[1].B"}


def test_a_matrix_times_itself_has_two_roles():
    g = new()
    a = g.tensor((1, K, K), name="a")
    done(g.matmul(a, a))
    found = lowered(g)
    assert [(place.word, place.operand, place.rows, place.cols) for place in found.binding.places[:2]] == [
        ("a0", 0, 1, 2),
        ("b0", 0, 2, 1),
    ]
    assert (found.program.a[0].major, found.program.b[0].major) == ("k", "mn")


def test_equal_matmuls_are_computed_once():
    g = new()
    a, b = g.tensor((1, M, K)), g.tensor((1, K, N))
    done(g.add(g.matmul(a, b), g.matmul(a, b)))
    p = program(g)
    assert len(p.gemms) == 1
    assert p.ops[0].args == (Ref("acc", 0), Ref("acc", 0))


def test_products_of_different_shapes_or_types_are_two_kernels():
    g = new()
    x = g.tensor((1, M, K))
    done(g.matmul(x, g.tensor((1, K, N))), name="y")
    done(g.matmul(x, g.tensor((1, K, 2 * N))), name="z")
    assert {code for code, _ in declines(g)} == {"op.pattern"}
    g = new()
    done(g.add(g.matmul(g.tensor((1, M, K)), g.tensor((1, K, N))), product(g, a_dtype="float16", b_dtype="float16")))
    assert {code for code, _ in declines(g)} == {"dtype.mixed"}


def test_products_of_one_output_shape_and_different_k_are_two_kernels():
    g = new()
    done(g.add(product(g, k=K), product(g, k=2 * K)))
    assert {code for code, _ in declines(g)} == {"op.pattern"}


@pytest.mark.parametrize("order", [("float32", dt.FAST_FLOAT_FOR_FP8), (dt.FAST_FLOAT_FOR_FP8, "float32")])
def test_one_product_that_needs_promotion_promotes_all(order):
    g = new("fp8_e4m3")
    x, w = g.tensor((1, M, K)), [g.tensor((1, K, N), (K * N, 1, K)) for _ in order]
    parts = [g.matmul(x, b, compute_data_type=compute) for b, compute in zip(w, order, strict=True)]
    done(g.sub(*parts))
    assert program(g).promote


def test_a_host_value_is_no_matrix():
    g = new()
    alpha = g.tensor((1, 1, 1), is_pass_by_value=True, name="alpha")
    done(g.matmul(alpha, g.tensor((1, 1, N))))
    assert declines(g) == {("op.pattern", "A")}


def test_chained_matmuls_are_declined():
    g = new()
    hidden = g.relu(product(g)).set_data_type("bfloat16")
    done(g.matmul(hidden, g.tensor((1, N, N))))
    (decline,) = lowered(g).declines
    assert (decline.code, decline.subject, decline.actual) == ("op.pattern", "A", "matmul")


# Epilogue operands


@pytest.mark.parametrize(
    ("dim", "stride", "kind", "batched", "major"),
    [
        ((1, 1, 1), None, "scalar", False, ""),
        ((3, 1, 1), None, "scalar", True, ""),
        ((1, M, 1), None, "row", False, "m"),
        ((1, 1, N), None, "col", False, "n"),
        ((3, 1, N), None, "col", True, "n"),
        ((1, M, N), None, "full", False, "n"),
        ((3, M, N), None, "full", True, "n"),
        ((3, M, N), (M * N, 1, M), "full", True, "m"),
        ((3, M, N), (2 * M * N, 2 * N, 2), "full", True, ""),
        ((3, M, N), (0, 0, 1), "col", False, "n"),
        ((3, M, N), (0, 0, 0), "scalar", False, ""),
        ((1, 1, N), (2 * N, 2 * N, 2), "col", False, ""),
        ((N,), None, "col", False, "n"),
        ((M, 1), None, "row", False, "m"),
        ((1,), None, "scalar", False, ""),
    ],
)
def test_operands_of_the_epilogue_by_what_they_span(dim, stride, kind, batched, major):
    g = new()
    done(g.add(product(g, batch=(3,)), g.tensor(dim, stride, name="x")))
    (aux,) = program(g).aux
    assert (aux.kind, aux.batched, aux.major, aux.by_value) == (kind, batched, major, False)


@pytest.mark.parametrize(("stride", "aligned"), [(96, 16), (100, 8), (98, 4), (97, 2), (104, 16)])
def test_alignment_of_an_operand_follows_from_its_strides(stride, aligned):
    g = new()
    y = g.add(product(g), g.tensor((1, M, N), (M * stride, stride, 1)))
    done(y, stride=(M * stride, stride, 1))
    p = program(g)
    assert (p.aux[0].alignment, p.stores[0].alignment) == (aligned, aligned)


def test_scalars_are_bound_by_value_or_part_of_the_program():
    g = new()
    alpha = g.tensor((1, 1, 1), data_type="float32", is_pass_by_value=True, name="alpha")
    done(g.mul(g.mul(product(g), alpha), 2.0))
    p = program(g)
    assert p.aux == (Aux("float32", "scalar", by_value=True),)
    assert [op.name for op in p.ops] == ["mul", "constant", "mul"]
    assert p.ops[1] == Op("constant", (), "float32", "float32", (("value", 2.0),))
    assert p.ops[2].args == (Ref("val", 0), Ref("val", 1))


def test_alpha_and_beta():
    g = new()
    alpha, beta = (g.tensor((1, 1, 1), data_type="float32", name=name) for name in ("alpha", "beta"))
    c = g.tensor((1, M, N), name="c")
    done(g.add(g.mul(product(g), alpha), g.mul(c, beta)))
    p = program(g)
    assert sorted(aux.kind for aux in p.aux) == ["full", "scalar", "scalar"]
    assert [op.name for op in p.ops] == ["mul", "mul", "add"]


def test_an_operand_that_is_read_twice_is_one():
    g = new()
    x = g.tensor((1, 1, N))
    done(g.mul(g.add(product(g), x), x))
    assert len(program(g).aux) == 1


def test_a_matrix_can_be_an_epilogue_operand_as_well():
    g = new()
    a = g.tensor((1, M, N), name="a")
    done(g.add(g.matmul(a, g.tensor((1, N, N), (N * N, 1, N))), a))
    found = lowered(g)
    place = {p.word: p.operand for p in found.binding.places}
    assert place["a0"] == place["aux0"]


def test_operands_larger_than_the_product_are_declined():
    g = new()
    done(g.add(product(g), g.tensor((3, M, N))))
    assert ("op.pattern", "add.in1") in declines(g)


@pytest.mark.parametrize("dtype", ["float64", "int64", "fp8_e8m0", "fp4_e2m1", "int4"])
def test_types_that_the_epilogue_does_not_read_or_write(dtype):
    g = new()
    done(g.add(product(g), g.tensor((1, M, N), data_type=dtype)))
    assert declines(g) == {("dtype.unsupported", "add.in1")}
    g = new()
    done(g.relu(product(g)), dtype)
    assert declines(g) == {("dtype.unsupported", "relu.out")}


# Epilogue ops and outputs


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"constant", "gen_index"}))
def test_every_pointwise_op_is_an_epilogue(name):
    g = new()
    c = product(g)
    ports = [param.name for param in lookup_op(name).builders[name][0] if (param.to or "").startswith("in")]
    logical = name.startswith("logical_")
    first = g.cmp_gt(c, 0.0).set_data_type("boolean") if logical else c
    others = [g.tensor((1, 1, N), data_type="boolean" if logical else None) for _ in ports[1:]]
    if name == "binary_select":
        others[1] = g.cmp_gt(c, 0.0).set_data_type("boolean")
    mask = TABLE[name].result == "mask"
    done(getattr(g, name)(**dict(zip(ports, [first, *others], strict=True))), "boolean" if mask else "bfloat16")
    p = program(g)
    op = p.ops[-1]
    assert (op.name, len(op.args)) == (name, TABLE[name].arity)
    assert {key for key, _ in op.attrs} == set(TABLE[name].attrs)
    assert op.compute == ("int32" if logical else "float32")


def test_attributes_are_in_the_program():
    g = new()
    done(g.relu(product(g), upper_clip=6.0, negative_slope=0.1))
    attrs = dict(program(g).ops[0].attrs)
    assert attrs == {"lower_clip": None, "negative_slope": pytest.approx(0.1), "upper_clip": 6.0}


def test_taps_and_several_outputs_of_several_types_and_majors():
    g = new()
    c = product(g)
    done(c, "float32", name="c")
    h = g.gelu(c)
    done(h, "bfloat16", stride=(M * N, 1, M), name="h")
    done(g.mul(h, g.tensor((1, M, 1))), "fp8_e4m3", stride=(M * N, N, 1), name="q")
    p = program(g)
    assert {(s.dtype, s.major) for s in p.stores} == {("float32", "n"), ("bfloat16", "m"), ("fp8_e4m3", "n")}
    assert {s.value for s in p.stores} == {Ref("acc", 0), Ref("val", 0), Ref("val", 1)}


def test_virtual_tensors_keep_their_declared_types():
    g = new(virtual="float16")
    done(g.exp(g.relu(product(g, out="bfloat16"))), "float32")
    p = program(g)
    assert (p.gemms[0].dtype, [op.dtype for op in p.ops]) == ("bfloat16", ["float16", "float32"])


def test_an_identity_that_changes_nothing_is_dropped_and_a_conversion_is_not():
    g = new()
    c = product(g)
    done(g.identity(c), "float32", name="same")
    done(g.identity(c), "bfloat16", name="narrow")
    p = program(g)
    assert [op.dtype for op in p.ops] == ["bfloat16"]
    assert {(s.dtype, s.value) for s in p.stores} == {("float32", Ref("acc", 0)), ("bfloat16", Ref("val", 0))}


@pytest.mark.parametrize(
    ("m", "n", "stride", "major"),
    [
        (M, N, (N, 1), "n"),
        (M, N, (1, M), "m"),
        (M, N, (2 * N, 2), ""),
        (1, N, (5, 1), "n"),
        (M, 1, (1, 5), "m"),
        (M, 1, (8, 5), "n"),
        (1, N, (5, 8), "m"),
        (1, 1, (5, 7), "n"),
        (1, 1, (1, 7), "n"),
    ],
)
def test_major_of_an_output(m, n, stride, major):
    g = new()
    done(g.relu(product(g, m=m, n=n, b_stride=(N * K, 1, K))), stride=(10**6, *stride))
    assert program(g).stores[0].major == major


def test_what_only_gives_a_shape_is_not_computed():
    g = new()
    c = product(g)
    done(g.add(c, g.gen_index(g.exp(c), axis=1)))
    assert [op.name for op in program(g).ops] == ["gen_index", "add"]


@pytest.mark.parametrize(("axis", "place"), [(0, 0), (1, 1), (2, 2)])
def test_gen_index(axis, place):
    g = new()
    c = product(g, batch=(3,))
    done(g.add(c, g.gen_index(c, axis=axis)))
    index = program(g).ops[0]
    assert index == Op("gen_index", (), "int32", "int32", (("axis", place),))


def test_gen_index_of_another_shape():
    g = new()
    c = product(g, batch=(3,))
    done(g.add(c, g.gen_index(g.tensor((1, N)), axis=1)), name="columns")
    done(g.mul(c, g.gen_index(g.tensor((1, 1, N)), axis=1)), name="zeros")
    p = program(g)
    assert {(op.name, op.attrs) for op in p.ops if not op.args} == {
        ("gen_index", (("axis", 2),)),
        ("constant", (("value", 0),)),
    }
    assert p.aux == ()
    g = new()
    c = product(g, batch=(2, 3))
    done(g.add(c, g.gen_index(c, axis=1)))
    assert declines(g) == {("op.attribute", "gen_index.axis")}


@pytest.mark.parametrize(
    ("op", "arguments", "compute", "expected"),
    [
        ("max", 2, "float32", "int32"),
        ("identity", 1, "float32", "int32"),
        ("relu", 1, "float32", "int32"),
        ("add", 2, "int32", "int32"),
        ("add", 2, "float32", "int32"),
        ("mul", 2, "float32", "int32"),
        ("mul", 2, "int32", "int32"),
        ("add_square", 2, "float32", "int32"),
        ("div", 2, "float32", "float32"),
        ("div", 2, "int32", "int32"),
        ("exp", 1, "float32", "float32"),
        ("exp", 1, "int32", ""),
        ("add", 2, "float64", ""),
    ],
)
def test_integers_are_computed_where_nothing_is_lost(op, arguments, compute, expected):
    g = new("int8", "int32", "int32")
    c = product(g, out="int32")
    operands = [c, g.tensor((1, M, N), data_type="int32")][:arguments]
    done(getattr(g, op)(*operands, compute_data_type=compute), "int8")
    if expected:
        assert program(g).ops[0].compute == expected
    else:
        assert declines(g) == {("dtype.compute", op)}


@pytest.mark.parametrize("compute", ["float32", "int32"])
@pytest.mark.parametrize(
    ("op", "narrow", "other", "expected"),
    [
        ("add", "int32", "int32", "int32"),
        ("add", "int32", "int8", "int32"),
        ("mul", "int8", "int8", "int32"),  # 0 * -1 is 0, and in fp32 -0
        ("add", "int8", "uint8", "float32"),
        ("sub", "int8", 2**24 - 128, "float32"),
        ("sub", "int8", 2**24 - 127, "int32"),
        ("add_square", "int8", "uint8", "float32"),
        ("add_square", "boolean", 4095, "float32"),
        ("add_square", "boolean", 4096, "int32"),
    ],
)
def test_integers_that_become_floats_are_exact_by_the_quickest_way(op, narrow, other, expected, compute):
    g = new("int8", "int32", "int32")
    first = g.identity(product(g, out="int32"), compute_data_type="int32").set_data_type(narrow)
    operand = g.tensor((1, M, N), data_type=other) if isinstance(other, str) else other
    done(getattr(g, op)(first, operand, compute_data_type=compute), "float32")
    constant_is_float = compute == "float32" and not isinstance(other, str)
    assert program(g).ops[-1].compute == ("float32" if constant_is_float else expected)


@pytest.mark.parametrize("clip", ["lower_clip", "upper_clip"])
def test_a_clip_at_0_is_one(clip):
    g = new("int8", "int32", "int32")
    done(g.relu(product(g, out="int32"), compute_data_type="float32", **{clip: 0.0}), "int32")
    assert program(g).ops[0].compute == "float32"


@pytest.mark.parametrize("value", [1e39, -1e300, 2.0**128 - 2.0**103])
def test_numbers_that_float32_does_not_hold_are_declined(value):
    g = new()
    done(g.relu(product(g), negative_slope=value), name="slope")
    done(g.swish(product(g), swish_beta=value), name="beta")
    constant = g.tensor_scalar(value, cudnn_core.scalar_type.COMPILE_TIME_CONST).set_data_type("fp8_e5m2")
    done(g.add(product(g), constant), name="constant")
    subjects = ("relu.negative_slope", "swish.swish_beta", "add.in1")
    assert declines(g) == {("op.attribute", subject) for subject in subjects}


@pytest.mark.parametrize("value", [3.4028235e38, -(2.0**128 - 2.0**103) * (1 - 2.0**-53), math.inf, -math.inf])
def test_numbers_that_float32_holds_and_infinities_are_not(value):
    g = new()
    done(g.relu(product(g), negative_slope=value), name="slope")
    done(g.add(product(g), value if math.isinf(value) else 3e38), name="constant")
    assert value in [dict(op.attrs).get("negative_slope") for op in program(g).ops]


def test_the_canonical_program_is_strict_json_and_tells_every_number_apart():
    texts = set()
    values = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0)
    for value in values:
        g = new()
        done(g.add(product(g), value))
        text = program(g).canonical()
        json.loads(text, parse_constant=pytest.fail)
        texts.add(text)
        if not math.isfinite(value):
            assert f'["value",{{"float":"{value}"}}]' in text
    assert len(texts) == len(values)
    assert program(g).canonical() == program(g).canonical()


def test_integer_arithmetic_of_floats_is_declined():
    g = new()
    done(g.add(product(g), g.tensor((1, 1, N)), compute_data_type="int32"))
    assert declines(g) == {("dtype.compute", "add")}


# Reductions


@pytest.mark.parametrize(
    ("out", "axes"),
    [
        ((3, M, 1), "n"),
        ((3, 1, N), "m"),
        ((1, M, N), "l"),
        ((3, 1, 1), "mn"),
        ((1, M, 1), "ln"),
        ((1, 1, 1), "lmn"),
    ],
)
def test_reductions_by_the_axes_that_the_output_lacks(out, axes):
    g = new()
    y = g.relu(product(g, batch=(3,)))
    done(y)
    done(g.reduction(y, mode="AMAX", out_dims=out), "float32", name="r")
    found = lowered(g)
    (reduction,) = found.program.reductions
    assert (reduction.axes, reduction.mode, reduction.dtype, reduction.value) == (
        axes,
        "AMAX",
        "float32",
        Ref("val", 0),
    )
    place = found.binding.places[-1]
    assert (place.rows is None, place.cols is None, place.batch is None) == tuple(axis in axes for axis in "mnl")


@pytest.mark.parametrize("mode", ["ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "MUL_NO_ZEROS", "NORM2"])
def test_reduction_modes(mode):
    g = new()
    done(g.reduction(product(g), mode=mode, out_dims=(1, 1, 1)), "float32")
    assert declines(g) == ({("op.attribute", "reduction.mode")} if mode == "NORM2" else set())


def test_reductions_that_are_not_outputs_of_their_own():
    g = new()
    c = product(g)
    done(g.sub(c, g.reduction(c, mode="MAX", out_dims=(1, M, 1)).set_data_type("float32")))
    assert ("op.pattern", "reduction.Y") in declines(g)
    g = new()
    done(g.reduction(product(g), mode="ADD", out_dims=(1, M, 1)), "bfloat16")
    assert declines(g) == {("dtype.unsupported", "reduction.Y")}
    g = new()
    done(g.reduction(product(g), mode="ADD", out_dims=(1, M, N)), "float32")
    assert declines(g) == {("op.pattern", "reduction.Y")}
    g = new()
    offsets = g.tensor((4, 1, 1), data_type="int32")
    done(g.reduction(product(g), offsets, mode="ADD", out_dims=(4, 1, N)), "float32")
    assert ("op.pattern", "reduction.group_offset") in declines(g)


@pytest.mark.parametrize(
    ("mode", "dtype", "fits"),
    [("ADD", "int32", True), ("MAX", "int32", True), ("AVG", "float32", True), ("AVG", "int32", False)],
)
def test_reductions_of_integers(mode, dtype, fits):
    g = new("int8", "int32", "int32")
    c = product(g, out="int32")
    done(g.reduction(c, mode=mode, out_dims=(1, 1, N), compute_data_type="float32"), dtype)
    assert declines(g) == (set() if fits else {("dtype.unsupported", "reduction.Y")})


# Prologues


def prologue(build, stored="bfloat16", mma="bfloat16", side="b", dim=None):
    g = new()
    x = g.tensor(dim or (1, M, K), data_type=stored if side == "a" else None, name="a")
    w = g.tensor((1, K, N), (K * N, 1, K), data_type=stored if side == "b" else None, name="b")
    if side == "a":
        x = build(g, x).set_data_type(mma)
    else:
        w = build(g, w).set_data_type(mma)
    done(g.matmul(x, w))
    return g


@pytest.mark.parametrize("stored", ["int8", "uint8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("side", ["a", "b"])
def test_narrow_weights_are_converted(stored, side):
    p = program(prologue(lambda g, w: g.identity(w), stored, side=side))
    matrix = (p.a if side == "a" else p.b)[0]
    assert (matrix.dtype, matrix.mma_dtype) == (stored, "bfloat16")
    assert [(op.name, op.args, op.dtype) for op in matrix.prologue] == [("identity", (Ref("val", -1),), "bfloat16")]
    assert p.ops == ()


def test_dequantisation_by_a_scalar():
    def build(g, w):
        scale = g.tensor((1, 1, 1), data_type="float32", name="scale")
        return g.mul(scale, g.identity(w))

    p = program(prologue(build, "int8"))
    (matrix,) = p.b
    assert [(op.name, op.args, op.dtype) for op in matrix.prologue] == [
        ("identity", (Ref("val", -1),), "float32"),
        ("mul", (Ref("aux", 0), Ref("val", 0)), "bfloat16"),
    ]
    assert p.aux == (Aux("float32", "scalar", alignment=4),)


def test_a_chain_and_a_value_that_is_used_twice():
    p = program(prologue(lambda g, x: g.mul(x, g.sigmoid(g.add(x, 1.0))), side="a"))
    assert [op.name for op in p.a[0].prologue] == ["constant", "add", "sigmoid", "mul"]
    assert p.a[0].prologue[-1].args == (Ref("val", -1), Ref("val", 2))


def test_scalars_of_another_rank_do_not_hide_the_matrix():
    g = new()
    w = g.tensor((K, N), (1, K), data_type="int8", name="w")
    scaled = g.mul(w, g.tensor((1, 1, 1), data_type="float32")).set_data_type("bfloat16")
    done(g.matmul(g.tensor((1, M, K), name="x"), scaled))
    found = lowered(g)
    assert [op.name for op in found.program.b[0].prologue] == ["mul"]
    place = next(place for place in found.binding.places if place.word == "b0")
    assert (place.rows, place.cols, place.batch) == (1, 0, None)


def test_a_matrix_of_one_element_is_told_from_scalars_by_its_type():
    g = new()
    scale, w = g.tensor((1, 1, 1), data_type="float32", name="scale"), g.tensor((1, 1, 1), data_type="int8", name="w")
    done(g.matmul(g.tensor((1, M, 1)), g.mul(scale, w).set_data_type("bfloat16")))
    p = program(g)
    assert (p.b[0].dtype, p.aux[0].dtype) == ("int8", "float32")


def test_an_identity_to_the_same_type_is_no_prologue():
    assert program(prologue(lambda g, w: g.identity(w))).b[0].prologue == ()


def test_prologues_that_read_a_vector_or_no_input_are_declined():
    vector = prologue(lambda g, w: g.mul(w, g.tensor((1, K, 1))))
    assert declines(vector) == {("op.pattern", "mul.in1")}
    two = prologue(lambda g, w: g.add(w, g.tensor((1, K, N))))
    assert declines(two) == {("op.pattern", "B")}
    index = prologue(lambda g, w: g.add(w, g.gen_index(w, axis=1)))
    assert declines(index) == {("op.pattern", "B")}
    spread = prologue(lambda g, x: g.add(x, g.tensor((1, M, K))), side="a", dim=(1, M, 1))
    assert {code for code, _ in declines(spread)} == {"op.pattern"}


def test_a_prologue_in_a_type_that_is_not_multiplied_says_what_to_set():
    g = prologue(lambda g, w: g.relu(w), mma="float32")
    (decline,) = lowered(g).declines
    assert (decline.code, decline.subject, decline.actual) == ("dtype.unsupported", "B", "float32")
    assert "data type" in decline.hint


def test_a_prologue_does_not_read_a_wider_type():
    assert declines(prologue(lambda g, w: g.identity(w), "float32")) == {("dtype.unsupported", "B")}
    assert ("dtype.unsupported", "B") in declines(prologue(lambda g, w: g.identity(w), "bfloat16", "fp8_e4m3"))


def test_alignment_is_that_of_the_stored_type():
    g = new()
    w = g.tensor((1, 24, N), (24 * N, 1, 24), data_type="int8")
    done(g.matmul(g.tensor((1, M, 24)), g.identity(w).set_data_type("bfloat16")))
    assert declines(g) == {("layout.alignment", "B.stride")}


def test_per_tensor_and_per_row_and_column_scales_of_fp8():
    g = new("fp8_e4m3")
    c = product(g, b_stride=(K * N, 1, K))
    for shape in ((1, 1, 1), (1, M, 1), (1, 1, N)):
        c = g.mul(c, g.tensor(shape, data_type="float32"))
    done(c)
    assert [aux.kind for aux in program(g).aux] == ["scalar", "row", "col"]


# Whole graphs


def test_no_size_is_in_the_program():
    def build(m, n, k, batch):
        g = new()
        c = product(g, m, n, k, batch=(batch,))
        y = g.gelu(g.add(c, g.tensor((1, 1, n))))
        done(y)
        done(g.reduction(y, mode="AVG", out_dims=(batch, m, 1)), "float32", name="r")
        return program(g).canonical()

    texts = {build(64, 96, 128, 2), build(1000, 4096, 8192, 7), build(Dim("m"), 96, Dim("k", multiple_of=8), Dim("b"))}
    assert len(texts) == 1
    assert json.loads(texts.pop())["ops"][0]["name"] == "add"


def test_sizes_and_strides_are_read_from_the_operands():
    m, batch = Dim("m"), Dim("b")
    g = new()
    c = product(g, m=m, batch=(batch,), b_stride=(0, 1, K))
    done(g.add(c, g.tensor((1, m, 1), name="x")))
    frozen = g.freeze()
    found = lower(frozen)
    words = {place.word: place for place in found.binding.places}
    assert {word.split(".")[0] for word in argument_words(found.program) if "." in word} == set(words)
    assert found.binding.sizes([operand.dim for operand in frozen.at({"m": 5, "b": 3}).operands]) == {
        "m": 5,
        "n": N,
        "k": K,
        "l": 3,
    }
    names = {place.word: frozen.operands[place.operand].name for place in found.binding.places}
    assert names == {"a0": "a", "b0": "b", "aux0": "x", "store0": "y"}
    assert words["b0"][2:] == (2, 1, None)
    assert words["aux0"][2:] == (1, None, None)
    assert words["store0"][2:] == (1, 2, 0)


@pytest.mark.parametrize("sizes", [{"m": 0}, {"n": 0}, {"k": 0}, {"batch": (0,)}, {"m": Dim("m", min=0, max=9)}])
def test_empty_extents_are_declined(sizes):
    subject = next(iter(sizes)).upper() if "batch" not in sizes else "batch"
    assert ("shape.range", subject) in declines(plain(**sizes))


def test_extents_past_32_bits_are_declined():
    assert ("shape.range", "batch") in declines(plain(batch=(2**16, 2**16)))
    assert not declines(plain(m=2**31 - 1))


def test_graphs_without_a_matmul_and_unknown_ops():
    g = new()
    done(g.relu(g.tensor((1, M, N))))
    assert declines(g) == {("op.anchor", "graph")}
    g = new()
    done(g.reshape(product(g), out_dims=(1, M * N)), "float32")
    assert declines(g) == {("op.unsupported", "reshape")}


def test_ragged_and_reordered_tensors_are_declined():
    g = new()
    offsets = g.tensor((2, 1, 1), data_type="int32", name="offsets")
    a = g.tensor((1, M, K), name="a", ragged_offset=offsets)
    done(g.matmul(a, g.tensor((1, K, N))))
    assert declines(g) == {("layout.ragged", "matmul.A")}
    g = new()
    done(g.matmul(g.tensor((1, M, K), reordering_type="F16x16"), g.tensor((1, K, N))))
    assert declines(g) == {("layout.order", "matmul.A")}


def test_an_output_that_is_not_of_the_products_shape_is_declined():
    g = new()
    bias = g.exp(g.tensor((1, 1, N)))
    done(bias, "bfloat16", name="e")
    done(g.add(product(g), bias))
    assert declines(g) == {("op.pattern", "exp.out")}


def test_an_output_made_of_operands_alone_is_computed_beside():
    g = new()
    done(product(g), name="c")
    done(g.relu(g.tensor((1, M, N))), name="r")
    p = program(g)
    assert [op.args for op in p.ops] == [(Ref("aux", 0),)]
    assert len(p.stores) == 2


def test_operands_that_are_outputs_or_reduced_become_values():
    g = new()
    x = g.tensor((1, M, N), data_type="float32", name="x")
    done(product(g), name="c")
    done(g.identity(x), "float32", name="copy")
    done(g.reduction(x, mode="ADD", out_dims=(1, M, 1)), "float32", name="r")
    p = program(g)
    assert {op.name for op in p.ops} == {"identity"}
    assert {ref.kind for ref in (p.stores[0].value, p.stores[1].value, p.reductions[0].value)} == {"acc", "val"}
    assert p.reductions[0].value.kind == "val"


def test_all_reasons_are_given_at_once_and_without_names():
    def build(name):
        g = new("float32")
        y = g.add(product(g, batch=(0,)), g.tensor((1, M, N), data_type="int64", name=name))
        done(y, "float64", name=name + "y")
        return lowered(g).declines

    assert build("u") == build("v")
    assert {(d.code, d.subject) for d in build("u")} == {
        ("shape.range", "batch"),
        ("dtype.unsupported", "A"),
        ("dtype.unsupported", "B"),
        ("dtype.unsupported", "add.out"),
    }


def test_swapped_bindings_follow_swapped_programs():
    g = new()
    y = g.mul(gated(g), g.tensor((1, M, 1)))
    done(y)
    done(g.reduction(y, mode="ADD", out_dims=(1, 1, N)), "float32", name="r")
    found = lowered(g)
    swapped = found.binding.swapped()
    assert [place.word for place in swapped.places] == ["a0", "a1", "b0", "aux0", "store0", "reduction0"]
    assert [word for word in argument_words(found.program.swapped()) if word.endswith("address")] == [
        f"{place.word}.address" for place in swapped.places
    ]
    assert (swapped.shape["m"], swapped.shape["n"]) == (found.binding.shape["n"], found.binding.shape["m"])
    by_word = {place.word: place for place in swapped.places}
    assert (by_word["aux0"].rows, by_word["aux0"].cols) == (None, 1)
    assert (by_word["a1"].rows, by_word["a1"].cols) == (2, 1)
    assert swapped.swapped() == found.binding
    assert found.program.swapped().swapped() == found.program


def test_the_analysis_of_eight_nodes_takes_less_than_half_a_millisecond():
    g = new()
    y = g.add(gated(g), g.tensor((1, 1, N)))
    y = g.gelu(g.mul(y, 0.5))
    done(y)
    done(g.reduction(y, mode="AMAX", out_dims=(1, 1, 1)), "float32", name="r")
    graph = g.freeze()
    assert len(graph.nodes) == 8

    def seconds(function):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    assert min(seconds(lambda: lower(graph)) for _ in range(20)) < 500e-6
    graph.facts(lower)
    assert min(seconds(lambda: graph.facts(lower)) for _ in range(20)) < 5e-6

"""What the lowering asks of the binding, checked against the real extension: golden calls, and no parameter without effect.

A child process lowers every graph of ``lowering_variations`` onto a recording proxy (``recording``).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from backend_cases import BROADCAST, CASES, Build
from cudnn_backend import lower
from lowering_variations import VARIATIONS, plain_ops

import cudnn_core
from cudnn_core import DeviceInfo

GOLDEN = Path(__file__).parent / "golden_calls.txt"
H200 = DeviceInfo.preset("H200")
VERSION = 91900

# Core ops that no cuDNN operation stands for.
FOREIGN = {"gdn", "kda"}
# Move data, compute nothing.
NO_COMPUTE = {"reshape", "concatenate"}
# The core refuses every value but the default.
BARRED = {("block_scale_dequantize", "is_negative_scale")}
# Methods of backend_graph that add no operation, and the second names of operations.
NOT_OPERATIONS = {
    *("build", "build_operation_graph", "build_plan_at_index", "build_plans", "check_support", "create_execution_plan"),
    *("create_execution_plans", "deselect_behavior_notes", "deselect_engines", "deselect_numeric_notes"),
    *("deselect_workspace_greater_than", "deserialize", "get_behavior_notes", "get_behavior_notes_for_plan_at_index"),
    *("get_cuda_graph_retention", "get_engine_and_knobs_at_index", "get_engine_count", "get_execution_plan_count"),
    *(
        "get_knobs_for_engine",
        "get_plan_name_at_index",
        "get_workspace_size",
        "get_workspace_size_plan_at_index",
        "key",
    ),
    *("populate_cuda_graph", "query_tensor_attributes_of_uid", "select_behavior_notes", "select_numeric_notes"),
    *("serialize", "tensor_like", "tensor_scalar", "update_cuda_graph", "validate"),
    *("bias", "scale", "leaky_relu", "leaky_relu_backward"),
    *("scaled_dot_product_flash_attention", "scaled_dot_product_flash_attention_backward"),
}


@pytest.fixture(scope="session")
def recorded(fake):
    return json.loads(fake.run("import recording; recording.main('lowering_variations')"))


def declines(graph, device=H200, version=VERSION):
    return lower.unsupported(graph.freeze("cuda"), device, version)


def core_rows():
    from cudnn_core._ops._table import in_tree

    return in_tree()


# --- the table


def test_every_core_op_has_a_row():
    assert set(lower.OPS) == set(core_rows()) - FOREIGN


def test_every_operation_of_the_binding_is_lowered_or_listed_as_missing(recorded):
    operations = set(recorded["methods"]) - NOT_OPERATIONS
    assert operations - set(lower.OPS) == set(lower.MISSING)
    assert set(lower.OPS) <= operations


# --- golden calls


def golden():
    """Case name -> its lines."""
    found: dict[str, list[str]] = {}
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            found[line[3:]] = []
        elif line:
            found[next(reversed(found))].append(line)
    return found


def lines(recorded, name):
    """What the binding is told of a case, or why it is told nothing."""
    graph = recorded["graphs"][f"case {name}"]
    return graph["calls"] if "calls" in graph else [f"declined: {decline}" for decline in graph["declines"]]


@pytest.mark.skipif("UPDATE_GOLDEN" not in os.environ, reason="rewrites golden_calls.txt")
def test_rewrite_golden_calls(recorded):
    parts = []
    for case in CASES:
        parts.append(f"== {case.name}\n" + "\n".join(lines(recorded, case.name)) + "\n")
    GOLDEN.write_text("\n".join(parts), encoding="utf-8")


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_calls_are_as_recorded(recorded, name):
    """``UPDATE_GOLDEN=1`` rewrites the file: read the difference."""
    assert lines(recorded, name) == golden()[name]


def test_no_golden_calls_are_left_over():
    assert set(golden()) == {case.name for case in CASES}


@pytest.mark.parametrize("name", [case.name for case in CASES if case.declined != BROADCAST])
def test_operands_have_uids_in_canonical_order(recorded, name):
    """1 to n, each once; virtual tensors behind."""
    graph = recorded["graphs"][f"case {name}"]
    uids = [int(line.partition("uid=")[2].split(",")[0].split()[0]) for line in graph["calls"] if "uid=" in line]
    assert sorted(uids) == list(range(1, len(uids) + 1))
    outputs = [
        int(line.partition("uid=")[2].split()[0]) for line in graph["calls"] if "output=True" in line and "uid=" in line
    ]
    assert all(uid <= graph["operands"] for uid in outputs)


# --- no parameter is ignored


@pytest.mark.parametrize("key", VARIATIONS, ids="-".join)
def test_a_change_shows_in_the_calls_or_is_declined(recorded, key):
    base, changed = (recorded["graphs"][f"{kind} {'.'.join(key)}"] for kind in ("base", "changed"))
    assert "declines" not in base
    assert "refused" not in base
    assert base != changed


def required():
    """(op, name) of every attribute and optional port of the lowered ops."""
    for name in sorted(lower.OPS):
        row = core_rows()[name]
        yield from ((name, attr.name) for attr in row.attrs)
        yield from ((name, port.name) for port in row.inputs if port.optional)
        yield from ((name, port.name) for port in row.outputs if port.optional or port.when is not None)


def test_every_attribute_and_optional_port_is_varied():
    varied = {(op, what.split("-")[0]) for op, what in VARIATIONS}
    assert set(required()) - BARRED <= varied


def test_every_kind_of_operation_is_varied_in_its_compute_type():
    """Pointwise ops share one function; those that only move data have no compute type."""
    from cudnn_backend.lower.pointwise import ROWS

    kinds = set(lower.OPS) - set(ROWS) - NO_COMPUTE - {"conv_fprop", "sdpa"}
    assert kinds <= {what.split("-")[0] for op, what in VARIATIONS if op == "compute"}


@pytest.mark.parametrize("name", [name for name, _ in plain_ops()])
def test_every_pointwise_op_is_called_by_its_name(recorded, name):
    assert any(f" = {name}(" in line for line in recorded["graphs"][f"op {name}"]["calls"])


# --- declines


def build(function):
    b = Build()
    function(b)
    return b.g


def one(op, dim=(2, 32, 64), io="bfloat16", **options):
    def make(b):
        b.graph(io)
        getattr(b.g, op)(b.input(dim), **options).set_output(True)

    return make


def two_views(b):
    """An operand that is read as it is and transposed: it can't be declared twice."""
    b.graph()
    x = b.input((1, 64, 64))
    b.g.matmul(x, b.g.transpose(x, permutation=(0, 2, 1))).set_output(True)


def unmergeable(b):
    b.graph()
    a = b.input((2, 3, 16, 16), stride=(16 * 16, 2 * 16 * 16, 16, 1))
    b.g.matmul(a, b.input((2, 3, 16, 16))).set_output(True)


def partial_broadcast(b):
    b.graph()
    b.g.matmul(b.input((2, 3, 16, 16)), b.input((1, 3, 16, 16))).set_output(True)


def gapped(b):
    b.graph()
    b.g.relu(b.input((2, 32, 64), stride=(32 * 128, 128, 2))).set_output(True)


def vector_type(b):
    b.graph("bfloat16")
    b.g.identity(b.input((2, 32, 64), "int8x4")).set_output(True)


def wide_constant(b):
    b.graph("float64", "float64")
    b.g.mul(b.input((2, 32, 64)), 0.1).set_output(True)


def six_separate_axes(b):
    b.graph()
    b.g.add(b.input((2, 3, 2, 3, 2, 3)), b.input((2, 1, 2, 1, 2, 1))).set_output(True)


def compared(b):
    b.graph()
    b.g.cmp_gt(b.input((2, 32, 64)), b.input((2, 32, 64))).set_output(True).set_data_type("boolean")


def masks(b):
    b.graph("boolean")
    b.g.logical_and(b.input((2, 32, 64)), b.input((2, 32, 64))).set_output(True)


def compared_product(b):
    b.graph()
    product = b.g.matmul(b.input((1, 64, 32)), b.input((1, 32, 64)))
    b.g.cmp_gt(product, 0.5).set_output(True).set_data_type("boolean")


def average(b):
    b.graph()
    b.g.reduction(b.input((2, 32, 100)), mode="AVG", out_dims=(2, 32, 1)).set_output(True).set_data_type("float32")


def norm2(b):
    b.graph()
    b.g.reduction(b.input((2, 32, 64)), mode="NORM2", out_dims=(2, 32, 1)).set_output(True).set_data_type("float32")


def average_of_ints(b):
    b.graph("int8")
    b.g.reduction(b.input((2, 32, 64)), mode="AVG", out_dims=(2, 32, 1)).set_output(True).set_data_type("float32")


def device_epsilon(b):
    b.graph()
    made = b.g.rmsnorm(
        input=b.input((32, 64)), scale=b.input((1, 64)), bias=None, epsilon=b.input((1, 1), "float32"),
        norm_forward_phase="INFERENCE",
    )  # fmt: skip
    made[0].set_output(True)


def moe(experts, offsets, **options):
    def make(b):
        b.graph()
        b.g.moe_grouped_matmul(
            b.input((1, 64, 32)), b.input((experts, 32, 16)), b.input((offsets, 1, 1), "int32"), **options
        ).set_output(True)

    return make


def sdpa(io="bfloat16", compute="float32", scores=False):
    def make(b):
        b.graph(io, compute)
        operands = {name: b.input((1, 2, 64, 64)) for name in ("q", "k", "v")}
        more = {}
        if scores:
            more["score_max"] = b.g.tensor(dim=(1, 2, 64, 1), data_type="float32", is_virtual=True)
        made = b.g.sdpa(**operands, **more)
        (made[0] if isinstance(made, (list, tuple)) else made).set_output(True)
        if scores:
            b.g.neg(more["score_max"]).set_output(True).set_data_type("float32")

    return make


def dequantised_output(b):
    b.graph("fp8_e4m3")
    y = b.g.block_scale_dequantize(b.input((1, 64, 64)), b.input((1, 64, 2), "fp8_e8m0"), block_size=[32])
    y.set_output(True).set_data_type("bfloat16")


def grouped_quantise(b):
    b.graph()
    y, scale = b.g.block_scale_quantize(b.input((1, 128, 128)), group_offset=b.input((4,), "int32"), block_size=32)
    y.set_output(True).set_data_type("fp8_e4m3")
    scale.set_output(True).set_data_type("fp8_e8m0").set_reordering_type("F8_128x4")


def empty(b):
    b.graph()
    b.g.matmul(b.input((1, 0, 16)), b.input((1, 16, 16))).set_output(True)


def runtime_size(b):
    b.graph()
    b.g.relu(b.input((1, cudnn_core.Dim("m", max=64), 64))).set_output(True)


def shared_lengths(b):
    """The lengths of attention, read by a pointwise op too: they can't be a column there and a row here."""
    b.graph()
    lengths = b.input((2,), "int32")
    operands = {name: b.input((2, 2, 64, 64)) for name in ("q", "k", "v")}
    made = b.g.sdpa(**operands, use_padding_mask=True, seq_len_q=lengths, seq_len_kv=lengths)
    (made[0] if isinstance(made, (list, tuple)) else made).set_output(True)
    b.g.neg(lengths).set_output(True).set_data_type("int32")


def linear_attention(b):
    b.graph()
    q, k, v = (b.input((64, 2, 64)) for _ in range(3))
    decay, beta = (b.input((64, 2), "float32") for _ in range(2))
    made = b.g.gdn(q=q, k=k, v=v, g=decay, beta=beta)
    (made[0] if isinstance(made, (list, tuple)) else made).set_output(True)


def too_large(b):
    b.graph()
    b.g.relu(b.input((2**31, 2**32))).set_output(True)


def too_far(b):
    b.graph()
    b.g.relu(b.input((2, 64), stride=(2**63 - 1, 1))).set_output(True)


def attention_with(io="bfloat16", **ports):
    """Attention with lengths or a dropout, whose ports have these types."""

    def make(b):
        b.graph(io)
        q, k, v = (b.input((2, 2, 64, 64)) for _ in range(3))
        more = {}
        if "dropout_mask" in ports:
            more["dropout"] = b.input((2, 2, 64, 64), ports["dropout_mask"]), b.input((1, 1, 1, 1), "float32")
        if "attn_scale" in ports:
            more["attn_scale"] = b.input((1, 1, 1, 1), ports["attn_scale"])
        if "probability" in ports:
            more["dropout"] = (ports["probability"], *(b.input((1, 1, 1, 1), "int64") for _ in range(2)))
        made = b.g.sdpa(q=q, k=k, v=v, **more)
        (made[0] if isinstance(made, (list, tuple)) else made).set_output(True)

    return make


_FLOATS = "needs float16 | bfloat16 | float32"
_RANGE = "needs fewer than 2^63 elements, and in as much memory"
_PACKED = "needs booleans inside the graph, got boolean"

DECLINES = {
    "more elements than an int64": (
        too_large,
        *(f"shape.range relu.{port}: {_RANGE}, got {2**63}" for port in ("in0", "out")),
    ),
    "a stride beyond int64": (too_far, f"shape.range relu.in0: {_RANGE}, got {2**63 + 63}"),
    "a dropout mask of 4 bits": (
        attention_with(dropout_mask="int4"),
        f"dtype.unsupported sdpa.dropout_mask: {_FLOATS}, got int4",
    ),
    "a scale in float64": (
        attention_with(attn_scale="float64"),
        f"dtype.unsupported sdpa.attn_scale: {_FLOATS}, got float64",
    ),
    "a dropout of nothing": (
        attention_with(probability=0.0),
        "op.attribute sdpa.dropout_probability: needs more than 0, got 0.0",
    ),
    "a comparison as output": (compared, f"dtype.unsupported cmp_gt.out: {_PACKED}"),
    "a comparison of a product as output": (compared_product, f"dtype.unsupported cmp_gt.out: {_PACKED}"),
    "masks in memory": (
        masks,
        *(f"dtype.unsupported logical_and.{port}: {_PACKED}" for port in ("in0", "in1", "out")),
    ),
    "unmergeable batch": (
        unmergeable,
        "layout.stride matmul: needs batch axes that are one axis in the memory of every tensor, got [0] | [1]",
    ),
    "partial broadcast": (
        partial_broadcast,
        "layout.stride matmul: needs batch axes that are one axis in the memory of every tensor, got [0] | [1]",
    ),
    "no contiguous axis": (gapped, "layout.stride relu.in0: needs stride 1 on an axis, got 4096 | 128 | 2"),
    "vector type": (vector_type, "dtype.unsupported identity.in0: needs a type of one element, got int8x4"),
    "constant of float64": (
        wide_constant,
        "dtype.unsupported mul.in1: needs float32 | int32, got constant float64",
    ),
    "six axes apart": (six_separate_axes, "shape.rank graph: needs 5 axes or fewer, got 6"),
    "mean of 100": (
        average,
        "op.attribute reduction.mode: needs AVG of a power of two elements, or ADD and a scale, got 100",
    ),
    "root of squares": (
        norm2,
        "op.attribute reduction.mode: needs ADD | AMAX | AVG | MAX | MIN | MUL | NORM1, got NORM2",
    ),
    "mean of integers": (
        average_of_ints,
        "dtype.unsupported reduction.input: needs bfloat16 | float16 | float32, got int8",
    ),
    "epsilon on the device": (
        device_epsilon,
        "op.pattern rmsnorm.epsilon: needs a number, or a host value (set_is_pass_by_value), got a tensor in device memory",
    ),
    "boundaries of groups": (
        moe(4, 5),
        (
            "shape.range moe_grouped_matmul.first_token_offset: needs one start for each group (no end), a multiple of the "
            "experts, got 5"
        ),
    ),
    "one expert, boundaries": (
        moe(1, 2),
        (
            "shape.range moe_grouped_matmul.first_token_offset: needs one start for each group (no end), a multiple of the "
            "experts, got 2"
        ),
    ),
    "fp8 attention without scales": (
        sdpa("fp8_e4m3"),
        "dtype.unsupported sdpa.q: needs float16 | bfloat16 | float32, got fp8_e4m3",
    ),
    "attention in float16": (sdpa(compute="float16"), "dtype.compute sdpa: needs float32, got float16"),
    "scores inside the graph": (
        sdpa(scores=True),
        "op.pattern sdpa.score_max: needs an output, got a tensor inside the graph",
    ),
    "dequantised output": (
        dequantised_output,
        "op.pattern block_scale_dequantize.Y: needs a result that an operation of the graph reads, got an output",
    ),
    "groups of a quantisation": (
        grouped_quantise,
        "op.pattern block_scale_quantize.group_offset: needs no groups, got group_offset",
    ),
    "empty": (
        empty,
        (
            "shape.range matmul.A: needs 1 or more elements on every axis, got 1 | 0 | 16 (cuDNN: matmul with M = 0: SIGFPE in "
            "9.28, a plan in 9.19; attention without heads: SIGFPE in both; K = 0: a plan in 9.28)"
        ),
    ),
    "runtime size": (
        runtime_size,
        "shape.dynamic graph: needs one of conv_fprop, layernorm, matmul, rmsnorm, or fixed sizes, got m",
    ),
    "shared lengths": (
        shared_lengths,
        (
            "op.pattern sdpa.seq_len_q: needs an operand that is read as a column of rank 4 only, got sdpa.seq_len_q | "
            "sdpa.seq_len_kv | neg.in0"
        ),
    ),
}


@pytest.mark.parametrize("name", DECLINES)
def test_decline(name):
    make, *expected = DECLINES[name]
    assert [str(decline) for decline in declines(build(make))] == expected


def test_an_op_that_cudnn_does_not_have_is_declined():
    (decline,) = declines(build(linear_attention))
    assert (decline.code, decline.subject) == ("op.unsupported", "gdn")


def test_an_operand_that_is_read_in_two_layouts_keeps_its_transpose():
    program = build(two_views).freeze("cuda").facts(lower.analyse)
    assert [node.op for node in program.nodes] == ["transpose", "matmul"]


def test_lower_raises_what_was_declined():
    with pytest.raises(lower.LoweringError, match=r"op\.attribute") as caught:
        lower.lower(build(norm2).freeze("cuda"), None, None)
    assert caught.value.decline.code == "op.attribute"


def test_what_declines_does_so_without_the_binding():
    """No binding, no library, and the second answer from the graph's facts."""
    frozen = build(norm2).freeze("cuda")
    first = lower.unsupported(frozen, H200, 0)
    assert first
    assert frozen.facts(lower.analyse) is frozen.facts(lower.analyse)


# --- statistics that nobody reads


def test_statistics_that_nobody_reads_are_not_asked_for(recorded):
    calls = recorded["graphs"]["base layernorm.bias"]["calls"]
    assert any("INFERENCE" in line for line in calls)


# --- runtime sizes


def test_a_graph_with_runtime_sizes_is_lowered_at_the_sizes(fake):
    program = """
        import cudnn_core, recording
        from cudnn_backend import library, lower

        module = library.load().module
        m = cudnn_core.Dim("m", min=1, max=4096)
        g = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
        g.relu(g.matmul(g.tensor(dim=(2, m, 64)), g.tensor(dim=(1, 64, 32)))).set_output(True)
        frozen = g.freeze("cuda")
        assert lower.unsupported(frozen, recording.DEVICE, 91900) == ()
        for size in (7, 100):
            recorder = recording.Recorder(module.backend_graph(handle=1, sm_version=90))
            lower.lower(frozen, module, recorder, {"m": size})
            print(recorder.calls[0].split("data_type")[0])
    """
    assert fake.run(program).splitlines() == [
        "%1 = _make_tensor(dim=[2, 7, 64], stride=[448, 64, 1], ",
        "%1 = _make_tensor(dim=[2, 100, 64], stride=[6400, 64, 1], ",
    ]

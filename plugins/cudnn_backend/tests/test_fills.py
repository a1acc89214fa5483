"""Attention with lengths: what lies past them is filled on the stream before cuDNN runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from backend_cases import Build
from cudnn_backend import lower
from cudnn_backend.lower.fills import Fill, rows

MINUS_INFINITY = 0xFF800000
DIM = (2, 2, 64, 32)
START = "from programs import *\n"


def attention(
    *, stride: Any = None, stats: bool = False, lengths: bool = True, ragged: bool = False, scores: bool = False
) -> Any:
    b = Build()
    b.graph()
    q, k, v = (b.input(DIM) for _ in range(3))
    more: dict[str, Any] = {}
    if lengths:
        more = {"use_padding_mask": True}
        more |= {name: b.input((2, 1, 1, 1), "int32") for name in ("seq_len_q", "seq_len_kv")}
    if scores:
        names = ("score_max", "score_sum_exp")
        more |= {name: b.g.tensor(dim=(2, 2, 64, 1), data_type="float32").set_output(True) for name in names}
    made = b.g.sdpa(q=q, k=k, v=v, generate_stats=stats, **more)
    o, s = made if isinstance(made, (list, tuple)) else (made, None)
    o.set_output(True)
    if stride:
        o.set_stride(stride)
    if ragged:
        offsets = b.input((3, 1, 1, 1), "int32")
        o.set_stride((64 * 64, 32, 64, 1)).set_ragged_offset(offsets)
    if stats:
        s.set_output(True).set_data_type("float32")
    return b.g


def analysed(graph: Any) -> Any:
    return graph.freeze("cuda").facts(lower.analyse)


def fills(graph: Any) -> dict[str, Fill]:
    """Port -> its fill, without the slot, which is checked."""
    frozen, program = graph.freeze("cuda"), analysed(graph)
    assert not program.declines
    (node,) = frozen.nodes
    operands = frozen.operand_tensors()
    ports = {tensor.index: port for port, tensor in node.outputs.items()}
    return {ports[operands[fill.slot].index]: fill._replace(slot=-1) for fill in program.fills}


ZEROS = Fill(-1, 8, 0, 2 * 2 * 64 * 32 * 2, 1, 2 * 2 * 64 * 32 * 2)
ROWS = 2 * 2 * 64


def test_the_result_of_attention_with_lengths_is_filled():
    assert fills(attention()) == {"O": ZEROS}
    assert fills(attention(stride=(64 * 64, 32, 64, 1))) == {"O": ZEROS}  # heads within tokens


def test_statistics_are_filled_with_what_the_core_documents():
    expected = {"O": ZEROS, "Stats": Fill(-1, 32, MINUS_INFINITY, ROWS, 1, 4 * ROWS)}
    assert fills(attention(stats=True)) == expected
    scores = {
        "score_max": Fill(-1, 32, MINUS_INFINITY, ROWS, 1, 4 * ROWS),
        "score_sum_exp": Fill(-1, 8, 0, 4 * ROWS, 1, 4 * ROWS),
    }
    assert fills(attention(scores=True)) == {"O": ZEROS, **scores}


def test_rows_at_a_distance_are_filled_without_what_lies_between():
    graph = attention(stride=(2 * 64 * 40, 64 * 40, 40, 1))
    assert fills(graph) == {"O": Fill(-1, 8, 0, 64, 2 * 2 * 64, 80)}


def test_other_layouts_are_declined():
    (decline,) = analysed(attention(stride=(3 * 64 * 40, 64 * 40, 40, 1))).declines
    assert (decline.code, decline.subject) == ("layout.stride", "sdpa.O")


def test_without_lengths_and_past_ragged_rows_there_is_nothing_to_fill():
    assert fills(attention(lengths=False, stats=True)) == {}
    assert fills(attention(ragged=True)) == {}


def test_a_result_that_stays_inside_the_graph_is_declined():
    b = Build()
    b.graph()
    lengths = {name: b.input((2, 1, 1, 1), "int32") for name in ("seq_len_q", "seq_len_kv")}
    made = b.g.sdpa(q=b.input(DIM), k=b.input(DIM), v=b.input(DIM), use_padding_mask=True, **lengths)
    b.g.neg(made[0] if isinstance(made, (list, tuple)) else made).set_output(True)
    assert [(d.code, d.subject) for d in analysed(b.g).declines] == [("op.pattern", "sdpa.O")]


@pytest.mark.parametrize(
    ("dim", "stride", "expected"),
    [
        ((2, 3, 4), (12, 4, 1), (24, 1, 24)),
        ((2, 3, 4), (1, 8, 2), (24, 1, 24)),
        ((2, 3, 4), (24, 8, 1), (4, 6, 8)),
        ((2, 3, 4), (20, 4, 1), (12, 2, 20)),
        ((2, 1, 4), (4, 99, 1), (8, 1, 8)),
        ((1, 1), (7, 1), (1, 1, 1)),
        ((3, 2), (4, 2), (1, 6, 2)),
        ((2, 3, 4), (100, 8, 1), None),
        ((2, 4), (0, 1), None),
        ((2, 4), (3, 1), None),
    ],
)
def test_rows_of_a_layout(dim, stride, expected):
    assert rows(list(dim), list(stride)) == expected
    if expected is not None:
        width, height, pitch = expected
        covered = {row * pitch + column for row in range(height) for column in range(width)}
        indices = itertools.product(*map(range, dim))
        assert covered == {sum(i * step for i, step in zip(index, stride, strict=True)) for index in indices}


# --- run, with the fake driver

PROGRAM = (
    START
    + """
from cudnn_core import VariantPack
def attention(pitch=64, lengths=True):
    graph = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    q, k, v = (graph.tensor(dim=(2, 2, 64, 64), name=name) for name in "qkv")
    names = ("seq_len_q", "seq_len_kv") if lengths else ()
    more = {name: graph.tensor(dim=(2, 1, 1, 1), data_type="int32", name=name) for name in names}
    o, stats = graph.sdpa(q=q, k=k, v=v, generate_stats=True, use_padding_mask=lengths, **more)
    o.set_output(True).set_name("O").set_stride((2 * 64 * pitch, 64 * pitch, pitch, 1))
    stats.set_output(True).set_data_type("float32").set_name("Stats")
    return graph
def addresses(graph):
    return tuple(4096 * (1 + i) for i in range(len(layout(graph))))
def where(graph, name):
    return addresses(graph)[[operand.name for operand in layout(graph)].index(name)]
count, driver = Fake(), FakeDriver()
graph = attention()
"""
)


def test_a_bound_run_fills_before_it_executes_on_its_stream(fake):
    fake.run(
        PROGRAM
        + """
run = build(graph).bind(layout(graph))
run(addresses(graph), 4096, 77)
o, stats = where(graph, "O"), where(graph, "Stats")
zeros = {"pointer": o, "pitch": 0, "value": 0, "bits": 8, "width": 2 * 2 * 64 * 64 * 2, "height": 1, "stream": 77, "executions": 0}
low = {**zeros, "pointer": stats, "value": 0xff800000, "bits": 32, "width": 2 * 2 * 64}
assert driver.filled() == [zeros, low], driver.filled()
assert count.get("executions") == 1 and count.last()["stream"] == 77
run(addresses(graph), 4096, 78)
assert [(fill["stream"], fill["executions"]) for fill in driver.filled()] == [(77, 0), (77, 0), (78, 1), (78, 1)]
"""
    )


def test_rows_with_gaps_are_filled_row_by_row(fake):
    fake.run(
        PROGRAM
        + """
graph = attention(pitch=80)
build(graph).bind(layout(graph))(addresses(graph), 4096, 0)
fill = driver.filled()[0]
assert (fill["pitch"], fill["width"], fill["height"]) == (160, 128, 2 * 2 * 64), fill
"""
    )


def test_a_plan_that_was_saved_and_one_that_runs_through_a_handle_fill_too(fake):
    fake.run(
        PROGRAM
        + """
from cudnn_backend.engines import BackendGraph
plan = build(graph)
loaded = BackendGraph().load_plan(*plan.serialize(), graph.freeze("cuda"), CTX)
pack = VariantPack(layout(graph), addresses(graph))
with present_gpu():
    handle = cudnn_core.create_handle(0, 5)
    for at, (compiled, ctx) in enumerate((
        (loaded, ExecutionContext(None, DEVICE, 9, 4096)),
        (plan, ExecutionContext(handle, handle.device, 5, 4096)),
    )):
        compiled.execute(pack, ctx)
        assert [(fill["stream"], fill["executions"]) for fill in driver.filled()[-2:]] == [(ctx.stream, at)] * 2
        assert count.get("executions") == at + 1
"""
    )


def test_a_plan_that_fills_has_no_native_cuda_graph(fake):
    fake.run(
        PROGRAM
        + """
pack = VariantPack(layout(graph), addresses(graph))
plan, other = build(graph), build(attention(lengths=False))
assert "SUPPORTS_CUDA_GRAPH_NATIVE_API" not in plan.notes and "SUPPORTS_CUDA_GRAPH_NATIVE_API" in other.notes
with present_gpu():
    handle = cudnn_core.create_handle(0, 5)
    for method in (plan.populate_cuda_graph, plan.update_cuda_graph):
        try:
            method(handle, pack, 4096, 1)
        except cudnn_core.ExecutionError as error:
            assert "fills" in str(error) and "capture execute instead" in str(error), error
        else:
            raise AssertionError
assert driver.filled() == [] and count.get("populated") == 0
"""
    )


def test_what_the_driver_answers_names_the_operand_and_nothing_runs(fake):
    fake.run(
        PROGRAM
        + """
run = build(graph).bind(layout(graph))
driver.set("fill_status", 1)
try:
    run(addresses(graph), 4096, 0)
except cudnn_core.ExecutionError as error:
    assert error.operand == "O" and "CUDA_ERROR_INVALID_VALUE" in str(error), error
else:
    raise AssertionError
assert count.get("executions") == 0
"""
    )


def test_a_thread_without_a_context_gets_the_devices(fake):
    """As a thread's first call of the driver finds it; cuDNN's own first call would make it."""
    fake.run(
        PROGRAM
        + """
run = build(graph).bind(layout(graph))
driver.set("fill_status", 201)
driver.set("fill_fails_once", 1)
run(addresses(graph), 4096, 0)
assert len(driver.filled()) == 2 and count.get("executions") == 1
"""
    )


def test_without_cuda_bindings_such_a_plan_is_not_built(fake):
    fake.run(
        PROGRAM
        + """
import sys
import cuda.bindings
sys.modules["cuda.bindings.driver"] = None
vars(cuda.bindings).pop("driver", None)
build(attention(lengths=False))
try:
    build(graph)
except cudnn_core.BuildError as error:
    assert (error.decline.code, error.decline.subject) == ("dep.missing", "cuda-bindings"), error
else:
    raise AssertionError
"""
    )


def test_plans_without_lengths_fill_nothing(fake):
    fake.run(
        PROGRAM
        + """
graph = attention(lengths=False)
build(graph).bind(layout(graph))(addresses(graph), 4096, 0)
assert driver.filled() == [] and count.get("executions") == 1
"""
    )

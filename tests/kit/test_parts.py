"""Memory images, input data and fuzzed graphs of the kit."""

from __future__ import annotations

import ctypes
import json

import numpy as np
import pytest

from cudnn_core import Graph, device_info
from cudnn_core._dtypes import STORAGE_DTYPES
from cudnn_core._filter import filter_graph
from cudnn_core._manifest import parse
from cudnn_core._ops._table import in_tree
from cudnn_core.testing import Case
from cudnn_core.testing._cases import as_cases
from cudnn_core.testing._codec import decode
from cudnn_core.testing._fuzz import _made, fuzzed
from cudnn_core.testing._inputs import make_inputs
from cudnn_core.testing._library import library
from cudnn_core.testing._memory import GUARD, Block, Layout

CPU = device_info("cpu")


@pytest.mark.parametrize(
    ("dtype", "dim", "stride"),
    [
        ("float32", (3, 4), (4, 1)),
        ("float32", (3, 4), (7, 2)),
        ("bfloat16", (2, 3), (1, 5)),
        ("fp4_e2m1", (3, 6), (7, 1)),
        ("int4", (5,), (1,)),
        ("int64", (2, 0, 3), (3, 3, 1)),
        ("float64", (), ()),
    ],
)
def test_elements_are_read_where_they_were_written_and_nothing_else_changes(dtype, dim, stride):
    layout = Layout(dtype, dim, stride)
    image = np.full(layout.nbytes + 64, 0xA5, dtype=np.uint8)
    codes = np.random.default_rng(0).integers(0, 16, dim).astype(layout.read(image, 32).dtype)
    layout.write(image, 32, codes)
    assert np.array_equal(layout.read(image, 32), codes)
    assert (image[:32] == 0xA5).all()
    assert (image[32 + layout.nbytes :] == 0xA5).all()
    if dtype == "float32" and stride == (7, 2):
        assert (image[32:].view(np.uint32)[[1, 3, 5, 8]] == 0xA5A5A5A5).all()


@pytest.mark.parametrize("shift", [0, 2])
def test_a_block_sees_every_byte_beyond_its_payload(shift):
    block = Block(CPU, 10, shift=shift)
    assert block.address % 256 == shift
    block.store()
    assert block.stray(block.fetch()) == ""
    ctypes.memset(block.address + 9, 1, 1)
    assert block.stray(block.fetch()) == ""
    ctypes.memset(
        block.address + 10 + GUARD - 1, ctypes.c_ubyte.from_address(block.address + 10 + GUARD - 1).value ^ 1, 1
    )
    assert block.stray(block.fetch()) == f"byte {GUARD} past the 10 bytes"
    block.store()
    ctypes.memset(block.address - 1, ctypes.c_ubyte.from_address(block.address - 1).value ^ 1, 1)
    assert block.stray(block.fetch()) == "byte 1 before the 10 bytes"


def test_inputs_are_seeded_by_case_operand_and_seed():
    case = next(case for case in library() if case.name == "matmul-f32-17x33x9")
    graph = case.freeze()
    first, again, other = (make_inputs(case, graph, "random", seed) for seed in (0, 0, 1))
    assert all(np.array_equal(first[index], again[index]) for index in first)
    assert not any(np.array_equal(first[index], other[index]) for index in first)
    a, b = first.values()
    assert not np.array_equal(a.reshape(-1)[:200], b.reshape(-1)[:200])


def test_special_inputs_hold_nan_infinities_signed_zeros_and_subnormals():
    case = next(case for case in library() if case.name == "add-f32-broadcast")
    graph = case.freeze()
    values = np.concatenate(
        [decode(x, "float32").reshape(-1) for s in range(20) for x in make_inputs(case, graph, "special", s).values()]
    )
    assert np.isnan(values).any()
    assert np.isposinf(values).any()
    assert np.isneginf(values).any()
    assert ((values == 0) & np.signbit(values)).any()
    assert ((np.abs(values) > 0) & (np.abs(values) < 2.0**-126)).any()
    assert (np.abs(values) > 0.1).mean() > 0.5


def test_fuzzed_graphs_are_the_same_every_time_and_cover_ops_types_and_both_sides_of_a_manifest():
    cases = library()
    graphs = list(fuzzed(cases, 600))
    _made.clear()
    assert [graph.key for graph in fuzzed(cases, 600)] == [graph.key for graph in graphs]
    assert len(graphs) == 600
    assert len({graph.key for graph in graphs}) > 500
    assert {node.op for graph in graphs for node in graph.nodes} >= set(in_tree())
    assert {str(tensor.dtype) for graph in graphs for tensor in graph.tensors} >= set(STORAGE_DTYPES)
    manifest = {
        "schema": 1, "plugin": "p", "api": "1.0",
        "engine": [{"name": "e", "factory": "m:E", "ops": ["matmul", "pointwise"], "anchors": ["matmul"], "devices": ["cpu"],
                    "dtypes": ["float32", "bfloat16"]}],
    }  # fmt: skip
    verdicts = [bool(filter_graph(parse(manifest).engines[0], graph, CPU)) for graph in graphs]
    assert 10 < sum(not filtered for filtered in verdicts) < 500


def test_a_mutated_graph_is_still_one_that_validation_accepts():
    for graph in list(fuzzed(library(), 600))[-40:]:
        from cudnn_core._graph._json import dumps

        assert Graph.from_json(dumps(graph)).freeze().key == graph.key


def test_an_op_without_an_oracle_is_a_failure_that_says_so():
    import cudnn_core.testing._oracle as oracle
    from cudnn_core.testing._kit import KitFailure
    from cudnn_core.testing._rig import Rig

    case = next(case for case in library() if case.name == "gen_index-f32")

    def none(graph, inputs):
        return oracle._rule(type("Node", (), {"op": "acme_norm"})())

    plan = case.graph.plan(device="cpu")
    with pytest.raises(KitFailure, match=r"gen_index-f32 can't be judged: .*acme_norm.*torch-reference"):
        Rig(plan, case, {}, none).expected()


def test_cases_of_a_user_may_be_pairs_and_nothing_else():
    graph = Graph(io_data_type="float32")
    graph.relu(graph.tensor((2, 3), name="x")).set_output(True).set_name("y")
    pair, case = as_cases([("relu-mine", graph), Case("x", lambda: graph)], "m:f")
    assert pair.op == "relu"
    assert pair.graph is not graph
    assert json.loads(pair.graph.to_json()) == json.loads(graph.to_json())
    assert case.graph is graph
    with pytest.raises(TypeError, match="m:f gave 42"):
        as_cases([42], "m:f")

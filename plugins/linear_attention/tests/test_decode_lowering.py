"""What the decode engines take: problems of graphs, and every decline with its code and subject. Needs no compiler."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from la_cases import kernels, running
from la_cases.cases import CASES, named
from linear_attention.decode_engine import GdnDecode
from linear_attention.decode_lowering import lower_gdn_decode, lower_kda_decode
from linear_attention.decode_problem import argument_words
from linear_attention.graphs import build

import cudnn_core
from cudnn_core import BuildError, DeviceInfo, ExecutionContext, PlanConfig

DECODES = [case for case in CASES if case.decodes]
LOWER = {"gdn_decode": lower_gdn_decode, "kda_decode": lower_kda_decode}
both = pytest.mark.parametrize("op", ["gdn_decode", "kda_decode"])


def configuration(case, inputs=(), outputs=(), attrs=()):
    """Of a case, with changed layouts by port and attributes by name."""
    found = running.call(case)[0].configuration
    changed = {
        group: tuple(layout._replace(**dict(change).get(layout.port, {})) for layout in getattr(found, group))
        for group, change in (("inputs", inputs), ("outputs", outputs))
    }
    return found._replace(**changed, attrs=tuple({**dict(found.attrs), **dict(attrs)}.items()))


def lowered(case, **changes):
    return build(configuration(case, **changes))[0].freeze().facts(LOWER[case.op])


def reasons(case, **changes):
    return [(decline.code, decline.subject) for decline in lowered(case, **changes).declines]


@pytest.mark.parametrize("case", DECODES, ids=str)
def test_every_case_has_a_problem(case):
    found = lowered(case)
    assert found.declines == ()
    problem = found.problem
    assert (problem.heads_q, problem.heads_k, problem.heads_v) == case.heads
    assert (problem.key, problem.value) == case.size
    assert problem.most == case.options.get("tokens_per_sequence", 1)
    assert problem.per_token == bool(case.slots and isinstance(case.slots[0], tuple))
    assert set(found.binding.places) == {word.partition(".")[0] for word in argument_words(problem) if "." in word}


@both
def test_a_problem_has_no_sizes_of_the_batch(op):
    one, other = (lowered(replace(named(f"{op}-slots"), slots=tuple(range(n)), lengths=(1,) * n, pool=n)).problem
                  for n in (2, 5))  # fmt: skip
    assert one == other
    assert one.canonical() == other.canonical()


def test_forms_of_gates():
    assert lowered(named("gdn_decode-all-in-kernel")).problem.safe == "softplus"
    found = lowered(named("kda_decode-all-in-kernel")).problem
    assert (found.safe, found.lower_bound) == ("sigmoid", -5.0)
    assert lowered(named("kda_decode-lower-bound")).problem.lower_bound == -1.5
    found = lowered(named("kda_decode-softplus")).problem
    assert (found.safe, found.lower_bound) == ("softplus", 0.0)
    assert lowered(named("kda_decode-linear-gate")).problem.domain == "linear"
    assert lowered(named("gdn_decode-plain")).problem.scale == 64**-0.5


def test_layouts_of_states():
    assert lowered(named("gdn_decode-k-major")).problem.layout == "k_major"
    assert lowered(named("gdn_decode-padded-strides")).problem.dense
    apart = {"initial_state": {"stride": (2 * 64 * 72, 64 * 72, 72, 1)}}
    assert not lowered(named("gdn_decode-slots-read-only"), inputs=apart.items()).problem.dense


@pytest.mark.parametrize("case", [case for case in kernels.UNSUPPORTED if case.decodes], ids=str)
def test_head_dimensions_without_a_kernel(case):
    assert {decline.code for decline in lowered(case).declines} == {kernels.declined(case)}


STATE = (2 * 64 * 64, 64 * 64)
ROW = 2 * 64
DECLINES = [
    # inputs, outputs -> (code, subject)
    ({"g": {"dtype": "float64"}}, {}, ("dtype.unsupported", "g")),
    ({}, {"O": {"dtype": "float64"}}, ("dtype.unsupported", "O")),
    ({"q": {"stride": (2 * ROW, 2 * 64, 2)}}, {}, ("layout.stride", "q.stride[2]")),
    ({"v": {"stride": (2 * ROW, 2 * 64, 2)}}, {}, ("layout.stride", "v.stride[2]")),
    ({}, {"O": {"stride": (2 * ROW, 2 * 64, 2)}}, ("layout.stride", "O.stride[2]")),
    ({"k": {"stride": (ROW + 2, 64, 1)}}, {}, ("layout.alignment", "k.stride[0]")),
    ({"q": {"stride": (ROW + 10, 66, 1)}}, {}, ("layout.alignment", "q.stride[1]")),
    ({"initial_state": {"stride": (*STATE, 128, 2)}}, {}, ("layout.order", "initial_state")),
    ({"initial_state": {"stride": (*STATE, 1, 64)}}, {}, ("layout.order", "final_state")),
    ({"initial_state": {"stride": (2 * 64 * 66, 64 * 66, 66, 1)}}, {}, ("layout.alignment", "initial_state.stride[2]")),
    ({"initial_state": {"stride": (2**31, 64 * 64, 64, 1)}}, {}, ("layout.stride", "initial_state.stride[0]")),
]  # fmt: skip


@both
@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"), DECLINES, ids=[f"{code}-{port}" for *_, (code, port) in DECLINES]
)
def test_declines(op, inputs, outputs, reason):
    case = named(f"{op}-plain")
    found = lowered(case, inputs=inputs.items(), outputs=outputs.items())
    assert reason in [(decline.code, decline.subject) for decline in found.declines]
    (decline,) = [one for one in found.declines if (one.code, one.subject) == reason]
    assert decline.expected is not None
    assert decline.actual is not None
    assert found.problem is None


def test_channels_of_kda_gates_are_neighbours():
    change = {"g": {"stride": (4 * 64, 2 * 64, 2)}}
    assert reasons(named("kda_decode-plain"), inputs=change.items()) == [("layout.stride", "g.stride[2]")]


def test_boundaries_of_no_sequence():
    graph = cudnn_core.Graph(io_data_type="bfloat16", compute_data_type="float32")
    q, k, v = (graph.tensor(dim=(2, 2, 64), name=name) for name in "qkv")
    g, beta = (graph.tensor(dim=(2, 2), data_type="float32", name=name) for name in ("g", "beta"))
    bounds = graph.tensor(dim=(1,), data_type="int32", name="cu_seqlens")
    graph.gdn_decode(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=bounds)[0].set_output(True)
    found = graph.freeze().facts(lower_gdn_decode)
    assert [(decline.code, decline.subject) for decline in found.declines] == [("shape.range", "cu_seqlens.dim[0]")]


def static(tokens, heads=2, **attrs):
    """A graph of gdn_decode whose sizes are fixed; ``pool`` adds slots."""
    pool = attrs.pop("pool", 0)
    graph = cudnn_core.Graph(io_data_type="bfloat16", compute_data_type="float32")
    q, k, v = (graph.tensor(dim=(tokens, heads, 64), name=name) for name in "qkv")
    g, beta = (graph.tensor(dim=(tokens, heads), data_type="float32", name=name) for name in ("g", "beta"))
    if pool:
        attrs["initial_state"] = graph.tensor(dim=(pool, heads, 64, 64), data_type="float32", name="initial_state")
        attrs["state_indices"] = graph.tensor(dim=(tokens,), data_type="int32", name="state_indices")
    graph.gdn_decode(q=q, k=k, v=v, g=g, beta=beta, **attrs)[0].set_output(True)
    return graph.freeze()


@pytest.mark.parametrize(
    ("graph", "subject"),
    [
        (static(2**31, tokens_per_sequence=8), "q.dim[0]"),
        (static(4, pool=2**31), "initial_state.dim[0]"),
        (static(2**30), "grid"),
    ],
    ids=["tokens", "pool", "grid"],
)
def test_sizes_beyond_a_launch(graph, subject):
    found = graph.facts(lower_gdn_decode)
    assert [(decline.code, decline.subject) for decline in found.declines] == [("shape.range", subject)]
    assert found.declines[0].actual > found.declines[0].expected["max"]


def test_tiles_whose_grid_is_too_large_are_not_offered():
    graph = static(2**29)  # 2^30 CTAs of 64 rows, 2^31 of 32
    ctx = ExecutionContext(None, DeviceInfo.preset("H200"))
    support = GdnDecode().check_support(graph, ctx)
    assert [config.knobs for config in support.configs] == [{"tile_v": 64}]
    with pytest.raises(BuildError, match=r"tile_v is 32, .* one of \[64\]"):
        GdnDecode().build_plan(graph, PlanConfig("", {"tile_v": 32}), ctx)


def test_more_nodes_than_one():
    graph = cudnn_core.Graph(io_data_type="bfloat16", compute_data_type="float32")
    q, k, v = (graph.tensor(dim=(2, 2, 64), name=name) for name in "qkv")
    g, beta = (graph.tensor(dim=(2, 2), data_type="float32", name=name) for name in ("g", "beta"))
    graph.relu(graph.gdn_decode(q=q, k=k, v=v, g=g, beta=beta)[0]).set_output(True)
    found = graph.freeze().facts(lower_gdn_decode)
    assert [(decline.code, decline.subject) for decline in found.declines] == [("op.unsupported", "relu")]


@both
@pytest.mark.parametrize("device", ["A100", "H200", "B200"])
def test_engine_takes_the_op_on_every_architecture(op, device):
    graph = running.graph_of(named(f"{op}-plain"))[0]
    decision = graph.explain(device=DeviceInfo.preset(device))
    (engine,) = (one for one in decision.engines if one.id == f"linear_attention:{op}@1")
    assert engine.state == "selected", engine.reasons


def test_engine_is_not_for_the_cpu():
    graph = running.graph_of(named("gdn_decode-plain"))[0]
    (engine,) = (one for one in graph.explain(device="cpu").engines if one.id == "linear_attention:gdn_decode@1")
    assert "device.type" in {reason.code for reason in engine.reasons}


def test_asking_is_light():
    program = (
        "import sys\n"
        "import cudnn_core\n"
        "g = cudnn_core.Graph(io_data_type='bfloat16', compute_data_type='float32')\n"
        "q, k, v = (g.tensor(dim=(2, 2, 64), name=name) for name in 'qkv')\n"
        "gate, beta = (g.tensor(dim=(2, 2), data_type='float32', name=name) for name in ('g', 'beta'))\n"
        "g.gdn_decode(q=q, k=k, v=v, g=gate, beta=beta)[0].set_output(True)\n"
        "found = g.explain(device=cudnn_core.DeviceInfo.preset('H200'))\n"
        "print([one.state for one in found.engines if one.id.startswith('linear_attention:gdn_decode')])\n"
        "print([m for m in ('torch', 'numpy', 'cutlass') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["['selected']", "[]"]


def test_no_state_is_a_problem_too():
    case = replace(named("gdn_decode-no-initial-state"), name="none", options={"tokens_per_sequence": 1})
    problem = lowered(case).problem
    assert (problem.initial, problem.final, problem.state_dtype) == (False, False, "")

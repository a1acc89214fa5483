"""Engines share one graph: what one of them does to it reaches no other."""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_core import BuildError, CudnnCoreError, Decline, Declined, Dim, Graph, PlanConfig, Support, configure
from cudnn_core.testing import temporary_plugin

pytest.importorskip("torch")


def gelu(size):
    g = Graph(io_data_type="float32")
    g.gelu(g.tensor(dim=(size,), name="x")).set_output(True).set_name("y")
    return g


def other_op(graph):
    object.__setattr__(graph.nodes[0], "op", "relu")


def no_stride(graph):
    object.__delattr__(graph.tensors[0], "stride")


def other_tensors(graph):
    object.__setattr__(graph, "tensors", ())


def other_range(graph):
    object.__setattr__(graph.dims["m"], "max", 5)


MANIFEST = {
    "plugin": "evil",
    "engine": [{"name": "e", "ops": ["*"], "anchors": ["*"], "devices": ["cpu"], "efficiency": 1}],
}


def evil(stage, change, end):
    """An engine that changes the graph in ``stage``, which it leaves by an answer or an exception."""

    class Evil:
        def check_support(self, graph, ctx):
            if stage == "check_support":
                change(graph)
                if end == "raises":
                    raise ValueError("oops")
                return Declined((Decline("op.pattern", "x"),))
            return Support((PlanConfig("", {}),))

        def build_plan(self, graph, config, ctx):
            change(graph)
            raise BuildError("no") if end == "declines" else ValueError("oops")

    return Evil


@pytest.mark.parametrize("end", ["declines", "raises"])
@pytest.mark.parametrize("stage", ["check_support", "build_plan"])
@pytest.mark.parametrize(
    "change", [other_op, no_stride, other_tensors, other_range], ids=lambda change: change.__name__
)
def test_a_plugin_that_changes_the_graph_is_quarantined_and_changes_nothing(change, stage, end, caplog):
    size = Dim("m", max=4)
    with temporary_plugin(MANIFEST, {"e": evil(stage, change, end)}):
        plan = gelu(size).plan(device="cpu")
        (row,) = (row for row in gelu(size).explain(device="cpu").engines if row.id.startswith("evil:"))
    assert plan.engine.startswith("torch_reference:")
    assert row.state == "quarantined"
    assert row.reasons[0].code == "plugin.broken"
    assert "changed the graph" in str(row.reasons[0])
    x, y = np.array([-1, -0.5, 0.5, 1], np.float32), np.empty(4, np.float32)
    plan.execute({"x": x, "y": y})
    assert y[0] == pytest.approx(-0.15865525)
    assert size.max == 4


def test_a_strict_configuration_raises_for_it():
    with temporary_plugin(MANIFEST, {"e": evil("check_support", other_op, "declines")}), configure(strict=True):
        with pytest.raises(CudnnCoreError, match="changed the graph"):
            gelu(4).plan(device="cpu")

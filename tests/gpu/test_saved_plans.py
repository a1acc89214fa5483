"""On a real GPU: plan files for other GPUs. Its engine is one of the test's own, so no rule of ``test_live`` is in force."""

from __future__ import annotations

import pytest

import cudnn_core
from cudnn_core.testing import temporary_plugin

pytestmark = pytest.mark.gpu


def test_a_plan_saved_for_the_preset_of_this_gpu_is_told_apart_from_another(tmp_path):
    other = "A100" if cudnn_core.device_info(0).arch != "80" else "H200"
    graph = cudnn_core.Graph(io_data_type="float32", compute_data_type="float32")
    x, w = graph.tensor((1, 64, 32), name="x"), graph.tensor((1, 32, 16), name="w")
    graph.matmul(x, w).set_output(True).set_name("y")

    class Engine:
        def check_support(self, graph, ctx):
            return cudnn_core.Support((cudnn_core.PlanConfig("", {}),))

        def build_plan(self, graph, config, ctx):
            return type("P", (), {"workspace_size": 0, "execute": lambda self, pack, ctx: None})()

    table = {"plugin": "aot", "engine": [{"name": "e", "ops": ["*"], "anchors": ["*"], "aot": True}]}
    with temporary_plugin(table, {"e": Engine}, isolated=True):
        graph.plan(device=other).save(tmp_path / "p.plan")
        with pytest.raises(cudnn_core.BuildError, match="built for"):
            cudnn_core.Plan.load(tmp_path / "p.plan")

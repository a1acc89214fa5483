"""The hooks count what planning does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from acme_cpu import telemetry

import cudnn_core
from cudnn_core.testing import temporary_plugin


def test_selections_are_counted_and_written(graph: Any, run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ACME_CPU_TELEMETRY", str(tmp_path / "plans.jsonl"))
    before = telemetry.counts().get("acme_cpu:fused_matmul@1", 0)
    a, b, y = torch.randn(4, 8), torch.randn(8, 4), torch.empty(4, 4)
    tensors = graph.tensor_like(a), graph.tensor_like(b)
    result = graph.matmul(*tensors).set_output(True)
    run(graph, {tensors[0]: a, tensors[1]: b, result: y}, "fused_matmul")
    assert telemetry.counts()["acme_cpu:fused_matmul@1"] == before + 1
    (line,) = (tmp_path / "plans.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {"graph": graph.key(), "selected": "acme_cpu:fused_matmul@1"}


def test_the_doctor_learns_of_blas() -> None:
    (check,) = telemetry.cudnn_core_doctor({})
    assert check.ok == ("none" not in check.detail)
    assert check.detail


def test_failures_are_counted() -> None:
    class Broken:
        def check_support(self, graph: Any, ctx: Any) -> Any:
            raise RuntimeError("a bug")

        def build_plan(self, graph: Any, config: Any, ctx: Any) -> Any:
            raise RuntimeError("never reached")

    table = {"name": "broken", "ops": ["*"], "devices": ["cpu"]}
    with temporary_plugin({"plugin": "faulty", "engine": [table]}, {"broken": Broken}):
        graph = cudnn_core.Graph(io_data_type="float32")
        graph.relu(graph.tensor((4, 4))).set_output(True)
        graph.explain(device="cpu")
    assert telemetry.counts()["failed faulty:broken@1"] == 1

"""What the tests share. They run against the installed package: `pip install -e .[test]`, or a wheel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import cudnn_core


class Runner:
    """Plans a graph on the CPU, on an engine of this package, and runs it."""

    def __call__(
        self, graph: cudnn_core.Graph, operands: Mapping[Any, torch.Tensor], engine: str, **knobs: Any
    ) -> cudnn_core.Plan:
        settings: dict[str, Any] = {"knobs": {f"acme_cpu:{engine}": knobs}} if knobs else {}
        with cudnn_core.configure(**settings):
            plan = graph.plan(device="cpu")
        assert plan.engine.startswith(f"acme_cpu:{engine}@"), str(plan.decision)
        assert not knobs or knobs.items() <= plan.knobs.items()
        plan.execute(operands, self.workspace(plan))
        return plan

    @staticmethod
    def workspace(plan: cudnn_core.Plan) -> torch.Tensor:
        """An aligned buffer of exactly the plan's size."""
        buffer = torch.full((plan.workspace_size + 256,), 0x5A, dtype=torch.uint8)
        start = -buffer.data_ptr() % 256
        return buffer[start : start + plan.workspace_size]


@pytest.fixture
def run() -> Runner:
    return Runner()


@pytest.fixture
def graph() -> cudnn_core.Graph:
    return cudnn_core.Graph(io_data_type="float32", compute_data_type="float32", intermediate_data_type="float32")

"""One plan with a no-op engine, and the forms in which its operands come."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import cudnn_core
from benchmarks._planning import NoopEngine, NoopEngineWithWorkspace, noop_engines


class Ready(NamedTuple):
    """A plan of 8 operands; ``launch`` is its engine's own callable."""

    graph: Any
    plan: Any
    launch: Any
    tensors: dict[Any, Any]
    uids: dict[int, Any]
    addresses: dict[int, int]
    pack: Any


def ready(engine=NoopEngine, handle=None):
    buffers = [torch.zeros(1, 64, 64) for _ in range(7)]
    with noop_engines(factory=engine):
        graph = cudnn_core.Graph(io_data_type="float32", handle=handle)
        inputs = [graph.tensor_like(buffer, name=f"x{index}") for index, buffer in enumerate(buffers)]
        output = graph.concatenate(inputs=inputs, axis=1).set_output(True).set_name("y")
        graph.build()
    plan = graph.selected_plan
    tensors = {**dict(zip(inputs, buffers, strict=True)), output: torch.zeros(1, 448, 64)}
    uids = {tensor.uid: buffer for tensor, buffer in tensors.items()}
    addresses = {uid: buffer.data_ptr() for uid, buffer in uids.items()}
    return Ready(graph, plan, plan._compiled.launch, tensors, uids, addresses, plan.pack(tensors))


@pytest.fixture(scope="module")
def noop():
    return ready()


@pytest.fixture(scope="module")
def noop_with_workspace():
    return ready(NoopEngineWithWorkspace, cudnn_core.create_handle(device="cpu"))

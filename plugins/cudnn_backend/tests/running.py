"""Runs a case on an engine that is pinned: for the tests on a GPU, and on a CPU to check the cases themselves."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from backend_cases import empty

import cudnn_core

__all__ = ["BACKEND", "REFERENCE", "assert_close", "buffers", "pinned", "reference"]

BACKEND = "cudnn_backend:graph"
REFERENCE = "torch_reference:eager"


def pinned(graph: Any, engine: str, device: Any, **options: Any) -> Any:
    """The plan of this engine; NoEngineError with its reasons if it declines."""
    with cudnn_core.configure(rule=[{"use": engine}], strict=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the reference runs on a GPU is what is wanted
        plan = graph.plan(device=device, **options)
    assert plan.engine.startswith(engine), plan.decision
    return plan


def buffers(outputs: list[Any], device: Any) -> dict[Any, Any]:
    """Zeros for every output, in its own layout: what an engine leaves alone is equal then."""
    made = {tensor: empty(torch, tensor, device) for tensor in outputs}
    for memory in made.values():
        memory.view(torch.uint8 if memory.element_size() == 1 else memory.dtype).zero_()
    return made


def reference(graph: Any, inputs: dict[Any, Any], outputs: list[Any], device: Any) -> dict[Any, Any]:
    expected = buffers(outputs, getattr(device, "type", device))
    pinned(graph, REFERENCE, device).execute({**inputs, **expected})
    return expected


def assert_close(actual: dict[Any, Any], expected: dict[Any, Any], tolerance: float) -> None:
    """Within ``tolerance`` of the size of the values, element by element; 0: equal."""
    for tensor, want in expected.items():
        have, want = actual[tensor].float().double(), want.float().double()  # noqa: PLW2901
        finite = want[want.isfinite()]
        size = max(1.0, float(finite.abs().mean())) if finite.numel() else 1.0
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance * size, equal_nan=True)

"""A case of ``la_cases`` on an engine's plan in the emulator: no GPU, every operand and finding seen. Imports torch.

    check(case, outputs(case, engine))      with ``la_cases.running.check``

``engine`` is an object such as ``GdnSm90()``. The plan is what ``build_plan`` makes of the case's graph for a preset device, whose
runtime sizes are bounded by powers of two; its workspace is filled with NaN and holds what the call's sizes need.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import ptx_emulator
import torch
from la_cases.running import call
from linear_attention.graphs import build

import cudnn_core
from cudnn_core import DeviceInfo, ExecutionContext, PlanConfig, VariantPack

__all__ = ["Emulated", "outputs", "plan_of"]

_SPACE = 256  # alignment of a workspace


@functools.cache
def _cache_folder() -> str:
    return tempfile.mkdtemp(prefix="linear-attention-tests-")


def plan_of(configuration: Any, engine: Any, device: DeviceInfo) -> tuple[Any, Any, dict[str, int]]:
    """The compiled plan, the frozen graph, and uids by port."""
    graph, uids = build(configuration)
    frozen = graph.freeze()
    ctx = ExecutionContext(None, device)
    support = engine.check_support(frozen, ctx)
    assert support, support
    config = support.configs[0]
    name = f"linear_attention:{type(engine).__name__.lower()}@1"
    with cudnn_core.configure(cache_dir=_cache_folder()):
        plan = engine.build_plan(frozen, PlanConfig(name, dict(config.knobs)), ctx)
    assert support.workspace is None or plan.workspace_size <= support.workspace
    return plan, frozen, uids


class Emulated:
    """A plan with a case's operands; ``run`` may be called with several seeds, on fresh outputs each time."""

    def __init__(
        self, case: Any, engine: Any, device: DeviceInfo | None = None, tensors: dict[str, torch.Tensor] | None = None
    ) -> None:
        self.case, self.tensors = case, tensors
        configuration = call(case, tensors=tensors)[0].configuration
        self.plan, self.frozen, self.uids = plan_of(configuration, engine, device or DeviceInfo.preset("H200"))

    def run(self, **options: Any) -> dict[str, torch.Tensor]:
        """Outputs by port, states [.., V, K]. ``options`` are the emulator's."""
        _, made = call(self.case, tensors=self.tensors)
        tensors = {**made.inputs, **made.outputs}
        by_uid = {uid: tensors[port] for port, uid in self.uids.items()}
        held = [by_uid[operand.uid] for operand in self.frozen.operands]
        operands = tuple(
            operand._replace(dim=tuple(tensor.shape), stride=tuple(tensor.stride()), alignment=16)
            for operand, tensor in zip(self.frozen.operands, held, strict=True)
        )
        size = self.plan.workspace_size
        space = torch.full(((size + _SPACE) // 4,), torch.nan) if size else None
        start = 0 if space is None else -(-space.data_ptr() // _SPACE) * _SPACE
        pack = VariantPack(operands, tuple(tensor.data_ptr() for tensor in held))
        (artifact,) = self.plan.artifacts
        arguments = self.plan.host_arguments(artifact, pack, start)
        memory = {tensor.data_ptr(): _storage(tensor) for tensor in held}  # a state that is overwritten is there once
        fresh = [memory[tensor.data_ptr()] for tensor in made.made.values()]
        spaces = [] if space is None else [space]
        ptx_emulator.launch(
            artifact, *arguments, buffers=[*memory.values(), *spaces], outputs=[*fresh, *spaces],
            **{"check": "raise", **options},
        )  # fmt: skip
        return made.outputs


def outputs(
    case: Any, engine: Any, tensors: dict[str, torch.Tensor] | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Of one run."""
    return Emulated(case, engine, tensors=tensors).run(**options)


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor is a view of, gaps between rows too."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)

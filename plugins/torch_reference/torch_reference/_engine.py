"""The engine ``torch_reference:eager``: accepts every op that has a lowering, on CPU and CUDA. Named by the manifest.

``check_support`` imports no torch: the lowerings, torch and the plan are loaded by ``build_plan``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudnn_core import Decline, Declined, PlanConfig, Support

from ._support import declines

if TYPE_CHECKING:
    from cudnn_core import CompiledPlan, ExecutionContext, FrozenGraph

__all__ = ["Eager"]

_SUPPORT = Support((PlanConfig("torch_reference:eager@1", {}),), workspace=0)


class Eager:
    """Runs a graph node by node in PyTorch."""

    def check_support(self, graph: FrozenGraph, ctx: ExecutionContext) -> Support | Declined:
        reasons = graph.facts(declines)
        if ctx.device.type not in ("cpu", "cuda"):
            reasons += (Decline("device.type", "device", ["cpu", "cuda"], ctx.device.type),)
        return Declined(reasons) if reasons else _SUPPORT

    def build_plan(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> CompiledPlan:
        from ._plan import ReferencePlan

        return ReferencePlan(graph, ctx.device)

"""The engines gdn_sm90 and kda_sm90. Named by ``cudnn_plugin.toml``; imports no DSL before a plan is built.

A graph is supported if ``lowering`` makes a problem of it and the device is a Hopper GPU that the workspace fits on: the very functions
that ``build_plan`` uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cudnn_core import BuildError, Declined, PlanConfig, Support, checks

from .lowering import Binding, Lowered, lower_gdn, lower_kda
from .segments import workspace_bytes

if TYPE_CHECKING:
    from cudnn_core import CompiledPlan, DeviceInfo, ExecutionContext, FrozenGraph

    from .plan import PrefillPlan
    from .problem import Problem

__all__ = ["GdnSm90", "KdaSm90"]

NOTES = frozenset(("approximate_math", "cuda_graph", "deterministic", "ran_on_h200"))


class _Prefill:
    """What both share. ``lower`` is the function of ``graph.facts``."""

    lower: Callable[[FrozenGraph], Lowered]

    def check_support(self, graph: FrozenGraph, ctx: ExecutionContext) -> Support | Declined:
        verdicts: dict[Any, Support | Declined] = graph.facts(_Verdicts)
        key = (type(self), ctx.device)
        found = verdicts.get(key)
        if found is None:
            found = verdicts[key] = self._verdict(graph, ctx)
        return found

    def build_plan(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> CompiledPlan:
        """Compile for Hopper, present or not. Raises BuildError."""
        from .compile import compiled
        from .plan import PrefillPlan

        problem, binding = self._found(graph, ctx.device)
        kernel = compiled(problem, config.engine)
        sms, workspace = _sms(ctx.device), _workspace(graph, problem, binding, ctx.device)
        return _ready(PrefillPlan(problem, binding, kernel, sms, workspace), ctx.device)

    def load_plan(
        self, header: dict[str, Any], payloads: dict[str, bytes], graph: FrozenGraph, ctx: ExecutionContext
    ) -> CompiledPlan:
        from .plan import PrefillPlan, restored

        problem, binding = self._found(graph, ctx.device)
        kernel = restored(header, payloads, problem)
        sms, workspace = _sms(ctx.device), _workspace(graph, problem, binding, ctx.device)
        return _ready(PrefillPlan(problem, binding, kernel, sms, workspace), ctx.device)

    def _verdict(self, graph: FrozenGraph, ctx: ExecutionContext) -> Support | Declined:
        c = checks(graph, ctx)
        lowered: Lowered = graph.facts(type(self).lower)
        c.declines.extend(lowered.declines)
        on_gpu = c.device("cuda") and c.sm("90a")
        problem, binding = lowered.problem, lowered.binding
        if problem is None or binding is None or not on_gpu:
            return Declined(tuple(c.declines))
        workspace, memory = _workspace(graph, problem, binding, ctx.device), ctx.device.memory_bytes
        hint = "state the most tokens and sequences that a call has: Dim(max=...)"
        c.require(memory is None or workspace <= memory, "device.memory", "workspace", workspace, memory, hint)
        return c.result(Support((PlanConfig("", {}),), workspace=workspace, notes=NOTES))

    def _found(self, graph: FrozenGraph, device: DeviceInfo) -> tuple[Problem, Binding]:
        lowered: Lowered = graph.facts(type(self).lower)
        if lowered.problem is None or lowered.binding is None:
            raise BuildError("; ".join(map(str, lowered.declines)), decline=lowered.declines[0])
        if device.compute_capability != (9, 0):
            raise BuildError(f"there are no kernels for {device!r}")
        return lowered.problem, lowered.binding


class GdnSm90(_Prefill):
    """The chunked gated delta rule."""

    lower = staticmethod(lower_gdn)


class KdaSm90(_Prefill):
    """Chunked Kimi delta attention."""

    lower = staticmethod(lower_kda)


class _Verdicts(dict[Any, Any]):
    """Answers by engine and device, kept with the graph's other facts; made empty."""

    def __init__(self, graph: FrozenGraph) -> None:
        super().__init__()


def _sms(device: DeviceInfo) -> int:
    return device.sm_count or 1


def _workspace(graph: FrozenGraph, problem: Problem, binding: Binding, device: DeviceInfo) -> int:
    """Bytes that are enough for the largest sizes."""
    operands = graph.at(graph.largest_sizes()).operands if graph.dims else graph.operands
    dims: dict[str, Any] = {port: operands[place.operand].dim for port, place in binding.places.items()}
    tokens, sequences = dims["q"][0], dims["cu_seqlens"][0] - 1 if "cu_seqlens" in dims else 1
    return workspace_bytes(problem, tokens, sequences, _sms(device))


def _ready(plan: PrefillPlan, device: DeviceInfo) -> PrefillPlan:
    """For a device that is here, link the object now: the first run should not pay for it."""
    if not device.synthetic:
        plan.function()
    return plan

"""The engines gdn_decode and kda_decode. Named by ``cudnn_plugin.toml``; imports no DSL before a plan is built.

A graph is supported if ``decode_lowering`` makes a problem of it and the compiler has a target for the device: the very functions
that ``build_plan`` uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cudnn_core import BuildError, Declined, PlanConfig, Support, checks

from .decode_compile import TARGETS, target_of
from .decode_lowering import Binding, Lowered, lower_gdn_decode, lower_kda_decode
from .decode_problem import DecodeConfig, DecodeProblem, default_config

if TYPE_CHECKING:
    from cudnn_core import CompiledPlan, DeviceInfo, ExecutionContext, FrozenGraph

    from .decode_plan import DecodePlan

__all__ = ["GdnDecode", "KdaDecode"]

NOTES = frozenset(("deterministic", "cuda_graph"))  # of every plan


class _Decode:
    """What both share. ``lower`` is the function of ``graph.facts``."""

    lower: Callable[[FrozenGraph], Lowered]

    def check_support(self, graph: FrozenGraph, ctx: ExecutionContext) -> Support | Declined:
        verdicts = graph.facts(_Verdicts)
        key = (type(self), ctx.device)
        found = verdicts.get(key)
        if found is None:
            found = verdicts[key] = self._verdict(graph, ctx)
        return found

    def build_plan(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> CompiledPlan:
        """Compile for ``ctx.device``, present or not. Raises BuildError, also for knobs that can't be honoured exactly."""
        from .decode_compile import compiled
        from .decode_plan import DecodePlan

        problem, binding, target, offered = self._found(graph, ctx.device)
        rows = config.knobs["tile_v"]
        chosen = next((one for one in offered if one.rows == rows), None)
        if chosen is None:
            sizes = f"head dimension {problem.key} and this number of sequences"
            raise BuildError(f"tile_v is {rows}, and with {sizes} it is one of {[one.rows for one in offered]}")
        plan = DecodePlan(problem, binding, chosen, compiled(problem, chosen, target, config.engine))
        return _ready(plan, ctx.device)

    def load_plan(
        self, header: dict[str, Any], payloads: dict[str, bytes], graph: FrozenGraph, ctx: ExecutionContext
    ) -> CompiledPlan:
        from .decode_plan import restored

        problem, binding, target, _ = self._found(graph, ctx.device)
        return _ready(restored(header, payloads, problem, binding, target), ctx.device)

    def _verdict(self, graph: FrozenGraph, ctx: ExecutionContext) -> Support | Declined:
        c = checks(graph, ctx)
        lowered: Lowered = graph.facts(type(self).lower)
        c.declines.extend(lowered.declines)
        if c.device("cuda") and c.sm("80+") and target_of(ctx.device) is None:
            major, minor = ctx.device.compute_capability
            known = [target.removeprefix("sm_") for target in TARGETS.values()]
            c.require(False, "device.sm_variant", "device", known, f"{major}{minor}", "the DSL has no target for it")
        if lowered.problem is None or c.declines:
            return Declined(tuple(c.declines))
        first = default_config(lowered.problem, self._sequences(graph, lowered), ctx.device.sm_count)
        if first not in lowered.configs:
            first = lowered.configs[-1]
        others = [config for config in lowered.configs if config != first]
        plans = tuple(PlanConfig("", {"tile_v": config.rows}) for config in (first, *others))
        ran = "ran_on_h200" if ctx.device.compute_capability == (9, 0) else "emulated_only"
        return Support(plans, workspace=0, notes=NOTES | {ran})

    def _sequences(self, graph: FrozenGraph, lowered: Lowered) -> int:
        """How many there are, of runtime sizes the hint."""
        assert lowered.problem is not None
        assert lowered.binding is not None
        operands = graph.at(graph.hint_sizes()).operands if graph.dims else graph.operands
        places = lowered.binding.places
        varying = bool(lowered.problem.index_dtype)
        size: Any = operands[places["cu_seqlens" if varying else "q"].operand].dim[0]
        sequences: int = size - 1 if varying else size // lowered.problem.most
        return max(1, sequences)

    def _found(
        self, graph: FrozenGraph, device: DeviceInfo
    ) -> tuple[DecodeProblem, Binding, str, tuple[DecodeConfig, ...]]:
        lowered: Lowered = graph.facts(type(self).lower)
        target = target_of(device)
        if lowered.problem is None or lowered.binding is None:
            raise BuildError("; ".join(map(str, lowered.declines)), decline=lowered.declines[0])
        if target is None:
            raise BuildError(f"the DSL has no target for {device!r}")
        return lowered.problem, lowered.binding, target, lowered.configs


class GdnDecode(_Decode):
    """The gated delta rule, 1 to 8 tokens a sequence."""

    lower = staticmethod(lower_gdn_decode)


class KdaDecode(_Decode):
    """Kimi delta attention, 1 to 8 tokens a sequence."""

    lower = staticmethod(lower_kda_decode)


class _Verdicts(dict[Any, Any]):
    """Answers by engine and device, kept with the graph's other facts; made empty."""

    def __init__(self, graph: FrozenGraph) -> None:
        super().__init__()


def _ready(plan: DecodePlan, device: DeviceInfo) -> DecodePlan:
    """For a device that is here, link the object now: the first run should not pay for it."""
    if not device.synthetic:
        plan.function()
    return plan

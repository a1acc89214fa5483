"""The engines of the manifest. Named by ``cudnn_plugin.toml``; imports the core alone.

The kernels are not written yet: ``check_support`` always declines, and names what will still be true when they exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudnn_core import BuildError, Declined, checks

if TYPE_CHECKING:
    from cudnn_core import CompiledPlan, ExecutionContext, FrozenGraph, PlanConfig

__all__ = ["GdnDecode", "GdnSm90", "KdaDecode", "KdaSm90"]

HEAD_SIZES = (64, 128)  # the fp32 state of a head stays in the registers of one or two warpgroups


class _Planned:
    """An engine without kernels."""

    summary = ""

    def check_support(self, graph: FrozenGraph, ctx: ExecutionContext) -> Declined:
        c = checks(graph, ctx)
        c.require(False, "not_implemented", "engine", hint=f"{self.summary}: the kernels are not written yet")
        for node in graph.nodes:
            for port in ("q", "v"):
                size = node.inputs[port].dim[-1]
                c.require(size in HEAD_SIZES, "shape.range", f"{port}.dim[-1]", list(HEAD_SIZES), size)
        return Declined(tuple(c.declines))

    def build_plan(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> CompiledPlan:
        raise BuildError(f"{self.summary}: the kernels are not written yet")


class GdnSm90(_Planned):
    summary = "chunked gated delta rule for Hopper"


class KdaSm90(_Planned):
    summary = "chunked Kimi delta attention for Hopper"


class GdnDecode(_Planned):
    summary = "gated delta rule, decode"


class KdaDecode(_Planned):
    summary = "Kimi delta attention, decode"

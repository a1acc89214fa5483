"""The engine of the manifest. Named by ``cudnn_plugin.toml``; imports the core alone.

The lowering is not written yet, so that libcudnn is neither looked for nor loaded: every graph is declined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudnn_core import BuildError, Decline, Declined

if TYPE_CHECKING:
    from cudnn_core import CompiledPlan, ExecutionContext, FrozenGraph, PlanConfig

__all__ = ["BackendGraph"]

NOT_WRITTEN = "the lowering to the cuDNN backend is not written yet"


class BackendGraph:
    def check_support(self, graph: FrozenGraph, ctx: ExecutionContext) -> Declined:
        return Declined((Decline("not_implemented", "engine", hint=NOT_WRITTEN),))

    def build_plan(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> CompiledPlan:
        raise BuildError(NOT_WRITTEN)

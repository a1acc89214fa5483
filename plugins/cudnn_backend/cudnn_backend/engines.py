"""The engine of the manifest. Named by ``cudnn_plugin.toml``; loads neither libcudnn nor its binding before a plan is built.

``check_support`` answers from tables: what the lowering covers, what the backend's planner must not see, and whether there is
a libcudnn at all. Whether cuDNN has an engine for the graph is cuDNN's to say: a no is the BuildError of ``build_plan``, given once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cudnn_core import Estimate, PlanConfig, Support, checks

from . import library, lower
from .notes import notes

if TYPE_CHECKING:
    from cudnn_core import CompiledPlan, Declined, DeviceInfo, ExecutionContext, FrozenGraph

__all__ = ["BackendGraph"]

_OWN_CHOICE = (PlanConfig("", {}),)
# What no graph is faster than: on an H200 the matmuls of 1024^3 in bfloat16 and fp8 take 5.4 and 4.8 us, 3 us more than their
# work at the rate of the large ones (benchmarks/results/gemm_h200.json, which the efficiency is from, too).
_FLOOR_US = 6.0
# Of the device's peak, for graphs of several products: cuDNN 9.19 on an H200 takes 17.5 ms for the two products and the gate of
# SwiGLU, of which the roofline is 0.97 ms. Its engines for such graphs are not those that run one product.
_SEVERAL_PRODUCTS = 0.05


class BackendGraph:
    """cuDNN's graph API: its own choice of engine, or with a variant ``eng<N>`` the one that is named."""

    def check_support(self, graph: FrozenGraph, ctx: ExecutionContext) -> Support | Declined:
        verdicts: dict[Any, Support | Declined] = graph.facts(_Verdicts)
        missing, version = library.problem(), library.version()
        key = (ctx.device, missing is None, version)
        found = verdicts.get(key)
        if found is None:
            c = checks(graph, ctx)
            if c.device("cuda"):
                c.sm("70+")
            c.declines.extend(() if missing is None else (missing,))
            c.declines.extend(lower.unsupported(graph, ctx.device, version))
            found = verdicts[key] = c.result(Support(_OWN_CHOICE, notes=notes(graph, ctx.device)))
        return found

    def estimate(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> Estimate:
        """No time but a bound: the ranking takes the roofline over the efficiency where that is longer."""
        return Estimate(max(_FLOOR_US, _several_products_us(graph, ctx.device)))

    def build_plan(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> CompiledPlan:
        from .plan import build

        return build(graph, config, ctx)

    def load_plan(
        self, header: dict[str, Any], payloads: dict[str, bytes], graph: FrozenGraph, ctx: ExecutionContext
    ) -> CompiledPlan:
        from .plan import restored

        return restored(header, payloads, graph, ctx)

    def members(self, graph: FrozenGraph, ctx: ExecutionContext, limit: int = 8) -> tuple[PlanConfig, ...]:
        """The backend's engines for a graph of fixed sizes by its own heuristics, best first; for ``cudnn-core bench``.

        Asks cuDNN and builds nothing. Raises BuildError with its reason where it has none.
        """
        from .plan import operation_graph
        from .select import listing

        loaded = library.load()
        target = operation_graph(loaded, graph.at(graph.hint_sizes()), ctx.device)
        found = listing(loaded.module, target, limit)
        return tuple(PlanConfig("", {"engine_knobs": choice.settings}, choice.variant) for choice in found)


def _several_products_us(graph: FrozenGraph, device: DeviceInfo) -> float:
    """Microseconds of the products of a graph with two or more, 0 for other graphs. A type without a published rate counts 0."""
    products = [node for node in graph.nodes if node.op == "matmul"]
    if len(products) < 2:
        return 0.0
    seconds = 0.0
    for node in products:
        left, result = node.inputs["A"], node.outputs["C"]
        work = 2.0 * math.prod(size for size in (*result.dim, left.dim[-1]))
        rate = device.peak(left.dtype)
        seconds += work / rate if rate else 0.0
    return 1e6 * seconds / _SEVERAL_PRODUCTS


class _Verdicts(dict[Any, Any]):
    """Answers by device, kept with the graph's other facts; made empty."""

    def __init__(self, graph: FrozenGraph) -> None:
        super().__init__()

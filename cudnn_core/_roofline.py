"""The roofline: the least time that a graph can take on a device. The prior of the ranking.

Work per node comes from the op table. A rate that nobody publishes is None and drops out, so the bound gets looser, never
wrong. Imported by the planner, which hands the result to the ranking.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ._dims import evaluate
from ._dtypes import nbytes
from ._ops import _schema
from ._ops._table import lookup

if TYPE_CHECKING:
    from ._device import DeviceInfo
    from ._graph._frozen import FrozenGraph, FrozenNode, FrozenTensor

__all__ = ["Cost", "graph_cost", "roofline_us"]


class Cost(NamedTuple):
    """Work of a whole graph at fixed sizes.

    flops  floating-point operations that can run on tensor cores, by data type
    other  the remaining floating-point operations; no published rate bounds them
    bytes  moved between memory and chip if nothing virtual leaves the chip
    """

    flops: Mapping[str, float]
    other: float
    bytes: float


def graph_cost(graph: FrozenGraph) -> Cost:
    """The work of ``graph`` (at the hint sizes if it has runtime sizes).

    Operands count once each, virtual tensors not at all: a fused engine may keep them on chip. Where an op says that it moves
    more or fewer bytes than its tensors have (a gather from a cache, a second pass), the difference is added.
    """
    graph = graph.at(graph.hint_sizes())
    flops: dict[str, float] = {}
    other = 0.0
    moved = float(_size(graph.operand_tensors()))
    for node in graph.nodes:
        cost = _node_cost(node)
        if cost is None:
            continue
        moved += cost.bytes - _size([*_tensors(node.inputs), *_tensors(node.outputs)])
        if cost.tensor:
            dtype = str(cost.dtype)
            flops[dtype] = flops.get(dtype, 0.0) + cost.flops
        else:
            other += cost.flops
    return Cost(flops, other, max(moved, 0.0))


def roofline_us(cost: Cost, device: DeviceInfo) -> float | None:
    """Microseconds: the longer of moving the bytes and doing the tensor-core work; None if no rate of either is known."""
    bounds = []
    if device.memory_bandwidth:
        bounds.append(cost.bytes / device.memory_bandwidth)
    rates = [(work, device.peak(dtype)) for dtype, work in cost.flops.items()]
    if any(rate for _, rate in rates):
        bounds.append(sum(work / rate for work, rate in rates if rate))
    longest = max(bounds, default=0.0)
    return longest * 1e6 if longest > 0 else None


def _node_cost(node: FrozenNode) -> _schema.Cost | None:
    """What the op's row says, or None: no row, no ``cost``, or one that raises or answers nonsense (plugins have rows)."""
    try:
        function = lookup(node.op).cost
        if function is None:
            return None
        cost = function(node)
        if not (math.isfinite(cost.flops) and math.isfinite(cost.bytes) and min(cost.flops, cost.bytes) >= 0):
            raise ValueError(f"{cost!r} is not a cost")
        return cost
    except Exception as error:
        logging.getLogger("cudnn_core").warning("no cost for op %s: %s: %s", node.op, type(error).__name__, error)
        return None


def _size(tensors: Iterable[FrozenTensor]) -> int:
    """Bytes; by-value tensors cost no memory traffic. The sizes are ints, as ``graph_cost`` has fixed them."""
    return sum(
        nbytes(item.dtype, math.prod(evaluate(size, {}) for size in item.dim)) for item in tensors if not item.by_value
    )


def _tensors(ports: Mapping[str, Any]) -> list[FrozenTensor]:
    found: list[FrozenTensor] = []
    for value in ports.values():
        found.extend(value if isinstance(value, tuple) else (value,))
    return found

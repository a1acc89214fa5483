"""The coarse filter: a manifest's engine against a graph and a device, before any plugin code runs.

Reports every mismatch. Imported by the planner (and re-exported by ``_manifest`` for the interface's sake).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._declines import Decline
from ._errors import CudnnCoreError
from ._sm import sm_decline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._device import DeviceInfo
    from ._graph._frozen import FrozenGraph, FrozenTensor
    from ._manifest import EngineSpec

__all__ = ["filter_graph"]


def filter_graph(spec: EngineSpec, graph: FrozenGraph, device: DeviceInfo) -> list[Decline]:
    """Why the manifest rules the engine out for ``graph`` on ``device``: all reasons, empty if it does not.

    - every node is covered by ``ops``, by its name or its group
    - at least one node is an anchor
    - the data inputs of the anchor nodes have one of ``dtypes`` (host values aside)
    - the device's type and, for CUDA, its architecture
    """
    declines: list[Decline] = []
    if device.type not in spec.devices:
        declines.append(Decline("device.type", "device", expected=list(spec.devices), actual=device.type))
    elif device.type == "cuda":
        decline = sm_decline(spec.sm, device.compute_capability, device.arch)
        if decline is not None:
            declines.append(decline)
    ops = graph.facts(_ops)
    declines.extend(
        Decline("op.unsupported", op, expected=list(spec.ops), actual=op)
        for op, group in ops
        if not _covers(spec.ops, op, group)
    )
    anchors = {op for op, group in ops if _covers(spec.anchors, op, group)}
    if not anchors:
        present = [op for op, _ in ops]
        declines.append(Decline("op.anchor", "graph", expected=list(spec.anchors), actual=present))
    if spec.dtypes:
        declines.extend(
            Decline("dtype.unsupported", f"{op}.{port}", expected=list(spec.dtypes), actual=dtype)
            for op, port, dtype in graph.facts(_data_inputs)
            if op in anchors and dtype not in spec.dtypes
        )
    return declines


def _covers(names: Sequence[str], op: str, group: str) -> bool:
    return op in names or "*" in names or (group != "" and group in names)


def _ops(graph: FrozenGraph) -> tuple[tuple[str, str], ...]:
    """The distinct (op, group) pairs in node order."""
    return tuple(dict.fromkeys((node.op, _group(node.op)) for node in graph.nodes))


def _data_inputs(graph: FrozenGraph) -> tuple[tuple[str, str, str], ...]:
    """The distinct (op, port, dtype) of data inputs that are operands on the device, in node order."""
    found: dict[tuple[str, str, str], None] = {}
    for node in graph.nodes:
        not_data = _ports_without_data(node.op)
        for port, value in node.inputs.items():
            if port not in not_data:
                found.update(dict.fromkeys((node.op, port, str(tensor.dtype)) for tensor in _device_tensors(value)))
    return tuple(found)


def _device_tensors(value: FrozenTensor | tuple[FrozenTensor, ...]) -> Iterator[FrozenTensor]:
    for tensor in value if isinstance(value, tuple) else (value,):
        if not tensor.by_value:
            yield tensor


def _group(op: str) -> str:
    from ._ops._table import lookup

    try:
        return lookup(op).group
    except CudnnCoreError:  # the plugin that added the op has gone or is broken; its name can still be matched
        return ""


def _ports_without_data(op: str) -> frozenset[str]:
    from ._ops._table import lookup

    try:
        return frozenset(port.name for port in lookup(op).inputs if not port.data)
    except CudnnCoreError:
        return frozenset()

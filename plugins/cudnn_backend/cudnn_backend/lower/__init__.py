"""Graph -> the binding's ``backend_graph``. Imported by the engine and the plan.

``unsupported`` is for check_support: pure Python, no binding, cached with the graph. ``lower`` declares the graph. Both read one
analysis (``program``); what an operation's parameters become is a row of ``table``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..vetoes import vetoed
from .program import analyse
from .rows import Emitter, LoweringError
from .table import MISSING, OPS

if TYPE_CHECKING:
    from cudnn_core import Decline, DeviceInfo, FrozenGraph

__all__ = ["GRAPH_TYPES", "MISSING", "OPS", "LoweringError", "analyse", "lower", "unsupported"]

# Arguments of backend_graph, by name of a member of its data_type. Every tensor and operation of a graph has its own type; these
# are for the tensors that the binding makes inside attention and norms.
GRAPH_TYPES: Mapping[str, str] = {
    "io_data_type": "NOT_SET",
    "intermediate_data_type": "FLOAT",
    "compute_data_type": "FLOAT",
}


def unsupported(graph: FrozenGraph, device: DeviceInfo, version: int) -> tuple[Decline, ...]:
    """Why the graph is not worth asking the backend about: () if it may serve it.

    ``version`` is the backend's (91900 for 9.19.0), 0 if it is not known.
    """
    return graph.facts(analyse).declines + vetoed(graph, device, version)


def lower(graph: FrozenGraph, binding: Any, target: Any, sizes: Mapping[str, int] | None = None) -> None:
    """Declare ``graph`` on ``target``, a ``backend_graph`` of the module ``binding`` made with ``GRAPH_TYPES``.

    Operand i of ``graph.operands`` has uid 1 + i; uids above are virtual. ``sizes`` gives each Dim its value (as
    ``graph.sizes_from`` does); a graph with Dims needs it. Raises LoweringError with the decline of a graph that
    ``unsupported`` would have refused.
    """
    program = graph.at(sizes or {}).facts(analyse) if graph.dims else graph.facts(analyse)
    if program.declines:
        raise LoweringError(program.declines[0])
    emitter = Emitter(binding, target, program)
    for node in program.nodes:
        OPS[node.op].emit(emitter, node)

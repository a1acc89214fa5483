"""What the outputs should be, and how far off they may be. Imported by ``cudnn-core run``.

The oracle is the installed engine whose manifest says ``tier = "reference"``, whichever that is: its plan for the CPU, with
the arithmetic in fp64 where the graph allows it and every tensor rounded to its declared type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .._dtypes import is_float
from .._errors import BuildError, GraphError
from .._ops._table import lookup
from ..testing._codec import format_of
from ._arena import Arena
from ._inputs import values_of
from ._output import EnvironmentProblem

if TYPE_CHECKING:
    from .._graph._frozen import FrozenGraph, FrozenNode, FrozenTensor
    from .._graph._graph import Graph
    from .._plan import Plan

__all__ = ["Comparison", "Oracle", "compare", "oracle", "tolerance"]

_SUMS = ("matmul", "conv_fprop")
_MOVING = ("reshape", "transpose", "slice", "concatenate")
_WHOLE = frozenset(
    (
        *("abs", "neg", "ceil", "floor", "identity", "max", "min", "relu", "add", "sub", "mul", "add_square", "mod"),
        *("binary_select", "cmp_eq", "cmp_neq", "cmp_ge", "cmp_gt", "cmp_le", "cmp_lt"),
        *("logical_and", "logical_or", "logical_not", "gen_index", "matmul", "conv_fprop", "moe_grouped_matmul"),
    )
)

Array = Any  # a numpy array; numpy is imported when a verb needs it


class Oracle(NamedTuple):
    """The reference's outputs by uid. ``precision`` is that of its arithmetic: "float64", or "declared"."""

    engine: str
    precision: str
    outputs: Mapping[int, Array]


class Comparison(NamedTuple):
    """One output against the reference.

    max_abs    largest absolute difference; max_rel: that over the largest magnitude of the reference
    tolerance  what max_rel may be (max_abs, for integers)
    strays     elements that are NaN or infinite on one side only, or differ where nothing may
    """

    name: str
    uid: int
    dtype: str
    shape: tuple[Any, ...]
    max_abs: float
    max_rel: float
    tolerance: float
    strays: int
    ok: bool


def oracle(graph: Graph, sizes: Mapping[str, int], inputs: Mapping[int, Array]) -> Oracle:
    """Run the reference on ``inputs`` (uid -> storage). Raises EnvironmentProblem if no reference can run the graph."""
    try:
        plan = _reference_plan(_in_float64(graph), sizes)
        precision = "float64"
    except (GraphError, BuildError, EnvironmentProblem):
        plan = _reference_plan(graph, sizes)
        precision = "declared"
    arena = Arena(plan, plan.graph.at(sizes), inputs)
    arena.execute()
    return Oracle(plan.engine, precision, arena.outputs())


def _in_float64(graph: Graph) -> Graph:
    """The graph with fp64 arithmetic wherever it has floating-point arithmetic; products of integers stay as they are declared:
    their sums wrap, unless a type has 64 bits."""
    document = json.loads(graph.to_json())
    types = {row["uid"]: row["data_type"] for row in document["tensors"]}
    for node in document["nodes"]:
        held = [uid for ids in node["inputs"].values() for uid in (ids if isinstance(ids, list) else [ids])]
        if node["op"] in _SUMS and not any(is_float(types[uid]) for uid in held):
            continue
        if is_float(node["compute_data_type"]) or node["compute_data_type"] == "not_set":
            node["compute_data_type"] = "float64"
    made = type(graph).from_json(json.dumps(document))
    made.validate()
    return made


def _reference_plan(graph: Graph, sizes: Mapping[str, int]) -> Plan:
    """The plan of the reference-tier engine on the CPU. Rules and limits of the configuration are for other plans."""
    from .._building import build_config, finish
    from .._config import Config
    from .._device import device_info
    from .._planner import survey

    cpu = device_info("cpu")
    found = survey(graph.freeze("cpu"), cpu, None, sizes, config=Config())
    for entry in found.entries:
        if entry.engine is not None and entry.engine.spec is not None and entry.engine.spec.tier == "reference":
            assert found.request is not None
            compiled = build_config(found.request, entry.engine, entry.config)
            return finish(found.request.graph, compiled, entry.config, found.decision(), cpu, None, {}, ())
    from .._decision_text import PIP_LINE

    tiers = (
        {entry.id: entry.spec.tier for entry in found.request.registry.engines if entry.spec} if found.request else {}
    )
    declined = [row for row in found.rows if tiers.get(row.id) == "reference"]
    why = "; ".join(f"{row.id}: {', '.join(map(str, row.reasons))}" for row in declined)
    raise EnvironmentProblem(f"there is no reference to check against: {why or f'try `{PIP_LINE}`'}")


def compare(graph: FrozenGraph, outputs: Mapping[int, Array], expected: Mapping[int, Array]) -> list[Comparison]:
    """Every output of ``graph``, which has fixed sizes."""
    return [
        _compare(graph, tensor, outputs[tensor.uid], expected[tensor.uid])
        for tensor in graph.operand_tensors()
        if tensor.role != "input"
    ]


def _compare(graph: FrozenGraph, tensor: FrozenTensor, got: Array, want: Array) -> Comparison:
    import numpy as np

    dtype = str(tensor.dtype)
    a, b = values_of(got, dtype), values_of(want, dtype)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    strays = int(np.count_nonzero(~same & ~finite))
    off = np.abs(np.where(finite, a - b, 0.0))
    max_abs = float(off.max(initial=0.0))
    scale = float(np.abs(np.where(np.isfinite(b), b, 0.0)).max(initial=0.0))
    max_rel = max_abs / scale if scale else max_abs
    error = max_rel if is_float(dtype) else max_abs
    limit = tolerance(graph, tensor, scale)
    ok = strays == 0 and error <= limit
    return Comparison(tensor.name, tensor.uid, dtype, tensor.dim, max_abs, max_rel, limit, strays, ok)


def tolerance(graph: FrozenGraph, tensor: FrozenTensor, scale: float = 0.0) -> float:
    """How far an output may be off, relative to its largest magnitude ``scale`` (absolutely, for an integer).

    From the data types and the lengths of the sums alone: two roundings to the output's type and to that of every stored
    intermediate, and for each node 8 roundings of its arithmetic times the square root of the terms in a sum (rounding
    errors of random data add up like a random walk). Attention may also round its weights to its inputs' type. An integer
    may be one off if anything before it is not whole, and by the roundings of floating-point arithmetic on integers.
    """
    if tensor.dtype == "boolean":
        return 0.0
    if not is_float(tensor.dtype):
        whole = not any(is_float(item.dtype) for item in graph.tensors)
        computed = [node for node in graph.nodes if is_float(node.compute_dtype) and node.op not in _MOVING]
        rounded = sum(8.0 * _unit(node.compute_dtype) * _terms(node) ** 0.5 for node in computed)
        return float(scale * rounded) + (0.0 if whole and all(map(_stays_whole, computed)) else 1.0)
    total = 2.0 * _unit(tensor.dtype)
    total += sum(2.0 * _unit(item.dtype) for item in graph.tensors if item.role == "virtual")
    for node in graph.nodes:
        compute = node.compute_dtype if is_float(node.compute_dtype) else "float32"
        total += 8.0 * _unit(compute) * _terms(node) ** 0.5
        if lookup(node.op).group in ("sdpa", "linear_attention"):
            total += 4.0 * max(_unit(item.dtype) for item in _tensors(node.inputs))
    return total


def _stays_whole(node: FrozenNode) -> bool:
    """Whether integers give an integer, before any rounding."""
    if node.op == "reduction":
        return node.attrs["mode"] not in ("AVG", "NORM2")
    return node.op in _WHOLE


def _unit(dtype: str) -> float:
    """Half the distance from 1 to the next larger number: the relative error of one rounding. 0 for integers."""
    form = format_of(str(dtype))
    return 2.0 ** -(form.mantissa + 1) if form is not None else 0.0


def _terms(node: FrozenNode) -> float:
    """Terms in one sum of a node: half its operations for each element of its largest output, and 1 or more."""
    cost = lookup(node.op).cost
    elements = max((_count(item) for item in _tensors(node.outputs)), default=1)
    inputs = max((_count(item) for item in _tensors(node.inputs)), default=1)
    flops = cost(node).flops if cost is not None else 0.0
    return max(flops / (2.0 * max(elements, 1)), inputs / max(elements, 1), 1.0)


def _tensors(ports: Mapping[str, Any]) -> list[Any]:
    return [item for held in ports.values() for item in (held if isinstance(held, tuple) else (held,))]


def _count(tensor: Any) -> int:
    count = 1
    for size in tensor.dim:
        count *= size
    return count

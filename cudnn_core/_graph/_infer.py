"""Inference and validation of a graph under construction.

``infer_node`` fills what an op row derives (eagerly after each builder call, leniently); ``validate_graph`` runs it again
over the whole graph in topological order and checks everything. Imported by the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._dims import Dim, Extent, binds, dims_of, evaluate, overlap, packed_strides
from .._dtypes import data_type
from .._errors import GraphError
from ._constants import check_constant, check_constants, infer_constants

if TYPE_CHECKING:
    from .._ops._schema import Problem
    from ._graph import Graph
    from ._tensor import GraphNode, Tensor

__all__ = ["infer_node", "topological", "validate_graph"]


def infer_node(graph: Graph, node: GraphNode, *, strict: bool) -> None:
    """Fill the outputs of ``node``; lenient while inputs are still incomplete, strict during validation."""
    for tensor in node.input_tensors():
        _default_input(graph, tensor)
    infer_constants(node)
    ready = all(tensor.dim is not None for tensor in node.input_tensors())
    try:
        specs = node.row.infer(node) if ready else {}
    except GraphError as error:
        if strict:
            raise GraphError(str(error), node=node.label) from error.__cause__
        specs = {}
    for port, tensor in node.outputs.items():
        spec = specs.get(port)
        if spec is not None and spec.dim is not None:
            if strict and tensor._dim is not None and tuple(tensor._dim) != tuple(spec.dim):
                raise GraphError(
                    f"tensor {tensor.label} has the wrong shape",
                    node=node.label,
                    port=port,
                    expected=_shape(spec.dim),
                    actual=_shape(tensor._dim),
                )
            tensor._auto_dim = tuple(spec.dim)
        if spec is not None and spec.stride is not None and tensor._dim in (None, tuple(spec.dim or ())):
            tensor._auto_stride = tuple(spec.stride)
        elif tensor.dim is not None:
            tensor._auto_stride = packed_strides(tensor.dim)
        if spec is not None and spec.dtype is not None:
            tensor._auto_dtype = data_type(spec.dtype)
        else:
            tensor._auto_dtype = graph.intermediate_data_type if tensor.is_virtual else graph.io_data_type


def _default_input(graph: Graph, tensor: Tensor) -> None:
    if tensor.producer is None:
        if tensor.value is None:
            tensor._auto_dtype = graph.io_data_type
        if tensor.dim is not None:
            tensor._auto_stride = packed_strides(tensor.dim)


def validate_graph(graph: Graph) -> None:
    """Raise GraphError for the first thing that is wrong, naming the node and the port."""
    if not graph.nodes:
        raise GraphError("the graph has no operations")
    order = topological(graph.nodes)
    _check_ranges(graph)
    for tensor in graph._used_tensors():
        _default_input(graph, tensor)
    for node in order:
        if node.compute_dtype is data_type.NOT_SET:
            node._compute_dtype = graph.compute_data_type
        infer_node(graph, node, strict=True)
        for port, value in (*node.inputs.items(), *node.outputs.items()):
            for tensor in value if isinstance(value, tuple) else (value,):
                _check_tensor(tensor, node, port)
                _check_offset(tensor, node, port)
        if node.compute_dtype is data_type.NOT_SET:
            raise GraphError("no compute_data_type, neither of the op nor of the graph", node=node.label)
        check_constants(node)
        for problem in _problems(node):
            raise GraphError(
                problem.message,
                node=node.label,
                port=problem.port,
                expected=problem.expected,
                actual=problem.actual,
            )
    _check_told(graph)
    _check_reachable(order)


def _problems(node: GraphNode) -> list[Problem]:
    try:
        return list(node.row.validate(node))
    except GraphError as error:
        raise GraphError(str(error), node=node.label) from error.__cause__


def topological(nodes: tuple[GraphNode, ...]) -> list[GraphNode]:
    """Producers before consumers, else in the order of construction; GraphError names a node on a cycle."""
    state: dict[int, int] = {}
    order: list[GraphNode] = []
    for root in nodes:
        stack = [(root, iter(_producers(root)))]
        if state.get(id(root)):
            continue
        state[id(root)] = 1
        while stack:
            node, producers = stack[-1]
            for producer in producers:
                mark = state.get(id(producer), 0)
                if mark == 1:
                    raise GraphError("the graph has a cycle", node=producer.label)
                if mark == 0:
                    state[id(producer)] = 1
                    stack.append((producer, iter(_producers(producer))))
                    break
            else:
                state[id(node)] = 2
                order.append(node)
                stack.pop()
    return order


def _producers(node: GraphNode) -> list[GraphNode]:
    return [tensor.producer for tensor in node.sources() if tensor.producer is not None]


def _check_tensor(tensor: Tensor, node: GraphNode, port: str) -> None:
    try:
        tensor.validate()
    except GraphError as error:
        raise GraphError(str(error), node=node.label, port=port) from None
    if tensor.dtype is data_type.NOT_SET:
        raise GraphError(
            f"tensor {tensor.label} has no data type, and the graph no default", node=node.label, port=port
        )
    if tensor.dtype is data_type.FAST_FLOAT_FOR_FP8:
        raise GraphError(f"tensor {tensor.label}: {tensor.dtype} is no storage type", node=node.label, port=port)
    if tensor.producer is None and tensor.is_virtual:
        raise GraphError(f"tensor {tensor.label} is virtual, but no op produces it", node=node.label, port=port)
    if tensor.producer is not None and tensor.by_value:
        raise GraphError(f"tensor {tensor.label} is passed by value, but an op produces it", node=node.label, port=port)
    if tensor.by_value is True and any(size != 1 for size in tensor.dim or ()):
        raise GraphError(
            f"tensor {tensor.label} is passed by value and has more than one element", node=node.label, port=port
        )
    try:
        check_constant(tensor)
    except GraphError as error:
        raise GraphError(str(error), node=node.label, port=port) from None
    if tensor.producer is not None and not tensor.is_virtual:
        _check_output_layout(tensor, node, port)


def _check_offset(tensor: Tensor, node: GraphNode, port: str) -> None:
    """The offsets of a ragged tensor are whole numbers, in a tensor that is not ragged itself."""
    offset = tensor.ragged_offset
    if offset is None:
        return
    if offset.ragged_offset is not None:
        raise GraphError(
            f"tensor {offset.label}, the ragged_offset of {tensor.label}, is ragged", node=node.label, port=port
        )
    if offset.dtype not in (data_type.INT32, data_type.INT64):
        raise GraphError(
            f"ragged_offset {offset.label} has the wrong data type",
            node=node.label,
            port=port,
            expected="int32 or int64",
            actual=offset.dtype,
        )
    _check_tensor(offset, node, port)


def _check_output_layout(tensor: Tensor, node: GraphNode, port: str) -> None:
    """An output must not write an element twice: no overlap at the largest sizes (``execute`` checks the actual ones)."""
    assert tensor.dim is not None
    assert tensor.stride is not None
    sizes = {dim.name: dim.largest for dim in dims_of((*tensor.dim, *tensor.stride))}
    what = overlap(*([evaluate(value, sizes) for value in values] for values in (tensor.dim, tensor.stride)))
    if what:
        raise GraphError(f"output {tensor.label} has {what}: its elements would overlap", node=node.label, port=port)


def _check_ranges(graph: Graph) -> None:
    """Equal names mean equal ranges, in what the user set. Asked before any op compares sizes: it would name both alike."""
    seen: dict[str, tuple[Dim, Tensor]] = {}
    for tensor in graph._used_tensors():
        for dim in dims_of((*(tensor._dim or ()), *(tensor._stride or ()))):
            known, first = seen.setdefault(dim.name, (dim, tensor))
            if known != dim:
                raise GraphError(
                    f"tensor {tensor.label}: {dim!r} contradicts {known!r} of tensor {first.label}", node=tensor.label
                )


def _check_told(graph: Graph) -> None:
    """The operands' sizes tell every Dim."""
    users: dict[str, Tensor] = {}
    told: set[str] = set()
    for tensor in graph._used_tensors():
        for dim in dims_of((*(tensor.dim or ()), *(tensor.stride or ()))):
            users.setdefault(dim.name, tensor)
        if not tensor.is_virtual:
            told.update(one.name for value in tensor.dim or () if (one := binds(value)) is not None)
    for name, tensor in users.items():
        if name not in told:
            raise GraphError(
                f"tensor {tensor.label}: nothing tells the size of {name}; a Dim must be a size of an operand,"
                " alone or times a number",
                node=tensor.label,
            )


def _check_reachable(order: list[GraphNode]) -> None:
    alive: set[int] = set()
    for node in reversed(order):
        if id(node) not in alive and all(tensor.is_virtual for tensor in node.output_tensors()):
            raise GraphError("nothing uses the result: mark it with set_output(True) or remove the op", node=node.label)
        alive.update(id(producer) for producer in _producers(node))


def _shape(dim: tuple[Extent, ...]) -> str:
    return "(" + ", ".join(map(str, dim)) + ")"

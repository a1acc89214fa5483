"""Inference and validation of a graph under construction.

``infer_node`` fills what an op row derives (eagerly after each builder call, leniently); ``validate_graph`` runs it again
over the whole graph in topological order and checks everything. Imported by the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._dims import Extent, packed_strides
from .._dtypes import data_type
from .._errors import GraphError

if TYPE_CHECKING:
    from ._graph import Graph
    from ._tensor import GraphNode, Tensor

__all__ = ["infer_node", "topological", "validate_graph"]


def infer_node(graph: Graph, node: GraphNode, *, strict: bool) -> None:
    """Fill the outputs of ``node``; lenient while inputs are still incomplete, strict during validation."""
    for tensor in node.input_tensors():
        _default_input(graph, tensor)
    ready = all(tensor.dim is not None for tensor in node.input_tensors())
    try:
        specs = node.row.infer(node) if ready else {}
    except GraphError as error:
        if strict:
            raise GraphError(str(error), node=node.label) from None
        specs = {}
    except Exception as error:
        # A row is data from a plugin as well as ours: its mistake must name it.
        if strict:
            raise GraphError(f"inference of op {node.op!r} failed: {error!r}", node=node.label) from error
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
        tensor._auto_dtype = graph.io_data_type
        if tensor.dim is not None:
            tensor._auto_stride = packed_strides(tensor.dim)


def validate_graph(graph: Graph) -> None:
    """Raise GraphError for the first thing that is wrong, naming the node and the port."""
    if not graph.nodes:
        raise GraphError("the graph has no operations")
    order = topological(graph.nodes)
    for tensor in graph._used_tensors():
        _default_input(graph, tensor)
    for node in order:
        if node.compute_dtype is data_type.NOT_SET:
            node.compute_dtype = graph.compute_data_type
        infer_node(graph, node, strict=True)
        for port, value in (*node.inputs.items(), *node.outputs.items()):
            for tensor in value if isinstance(value, tuple) else (value,):
                _check_tensor(tensor, node, port)
        if node.compute_dtype is data_type.NOT_SET:
            raise GraphError("no compute_data_type, neither of the op nor of the graph", node=node.label)
        for problem in node.row.validate(node):
            raise GraphError(
                problem.message,
                node=node.label,
                port=problem.port,
                expected=problem.expected,
                actual=problem.actual,
            )
    _check_dims(graph)
    _check_reachable(order)


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
    found = []
    for tensor in node.input_tensors():
        if tensor.producer is not None:
            found.append(tensor.producer)
        if tensor.ragged_offset is not None and tensor.ragged_offset.producer is not None:
            found.append(tensor.ragged_offset.producer)
    return found


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
    if tensor.producer is not None and not tensor.is_virtual:
        _check_output_layout(tensor, node, port)


def _check_output_layout(tensor: Tensor, node: GraphNode, port: str) -> None:
    """An output must not write an element twice: no zero or overlapping stride over a size above one."""
    pairs = [
        (stride, size)
        for size, stride in zip(tensor.dim or (), tensor.stride or (), strict=True)
        if isinstance(size, int) and isinstance(stride, int) and size > 1
    ]
    reach = 0  # of the dimensions with smaller strides; a stride within it may meet an element again
    for stride, size in sorted(pairs):
        if stride <= reach:
            what = (
                "stride 0"
                if stride == 0
                else f"stride {stride} inside the {reach + 1} elements of its inner dimensions"
            )
            raise GraphError(
                f"output {tensor.label} has {what} over a size of {size}: its elements would overlap",
                node=node.label,
                port=port,
            )
        reach += stride * (size - 1)


def _check_dims(graph: Graph) -> None:
    seen: dict[str, Extent] = {}
    from .._dims import dims_of

    for tensor in graph._used_tensors():
        for dim in dims_of((*(tensor.dim or ()), *(tensor.stride or ()))):
            known = seen.setdefault(dim.name, dim)
            if known != dim:
                raise GraphError(f"tensor {tensor.label}: {dim!r} contradicts {known!r}", node=tensor.label)


def _check_reachable(order: list[GraphNode]) -> None:
    alive: set[int] = set()
    for node in reversed(order):
        if id(node) not in alive and all(tensor.is_virtual for tensor in node.output_tensors()):
            raise GraphError("nothing uses the result: mark it with set_output(True) or remove the op", node=node.label)
        alive.update(id(producer) for producer in _producers(node))


def _shape(dim: tuple[Extent, ...]) -> str:
    return "(" + ", ".join(map(str, dim)) + ")"

"""Graph -> FrozenGraph: canonical order and key.

Two graphs get one key exactly if they are the same up to names (of tensors, nodes and Dims), uids and the order of
construction. The order comes from ``_refine``'s colours; members that these leave tied are interchangeable, unless refinement
can't tell a non-isomorphic pair apart, and then two equal graphs may get different keys, never the reverse: the key is the
hash of the whole canonical form. Imported by the graph.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from .._dims import Dim, Extent, Product
from .._ops._attrs import encode, float_to_json
from ._constants import held
from ._frozen import FrozenGraph, FrozenNode, FrozenTensor
from ._infer import topological
from ._refine import Vertex, ports_of, refine

if TYPE_CHECKING:
    from ._graph import Graph
    from ._tensor import GraphNode, Tensor

__all__ = ["freeze"]


def freeze(graph: Graph, *, host_values: bool) -> FrozenGraph:
    """The frozen form of a validated ``graph``; ``host_values`` makes one-element CPU tensors by-value operands."""
    nodes = topological(graph.nodes)
    tensors = {id(tensor): tensor for node in nodes for tensor in (*node.sources(), *node.output_tensors())}
    labels = {key: _label(tensor, host_values) for key, tensor in tensors.items()}
    colours = refine(nodes, labels, tensors)
    return _build(graph, _order(nodes, colours), colours, host_values)


def _by_value(tensor: Tensor, host_values: bool) -> bool:
    return host_values if tensor.by_value == "auto" else bool(tensor.by_value)


def _role(tensor: Tensor) -> str:
    return "virtual" if tensor.is_virtual else "input" if tensor.producer is None else "output"


def _value(tensor: Tensor) -> float | int | bool | None:
    """The constant as its type holds it: 1 and 1.0 are one float32."""
    return None if tensor.value is None else held(tensor.value, tensor.dtype)


def _label(tensor: Tensor, host_values: bool) -> str:
    return repr(
        (
            tensor.dtype.value,
            [_anonymous(value) for value in tensor.dim or ()],
            [_anonymous(value) for value in tensor.stride or ()],
            _role(tensor),
            _by_value(tensor, host_values),
            float_to_json(_value(tensor)),
            tensor.reordering.value,
            tensor.ragged_offset_multiplier,
            tensor.alignment_value,
        )
    )


def _anonymous(value: Extent) -> object:
    """An extent without the Dims, which are vertices of their own."""
    return "dim" if isinstance(value, Dim) else ("dims", value.factor) if isinstance(value, Product) else value


def _order(nodes: list[GraphNode], colours: Mapping[Vertex, str]) -> list[GraphNode]:
    """Topological order, ready nodes by colour."""
    waiting = {id(node): 0 for node in nodes}
    followers: dict[int, list[GraphNode]] = {id(node): [] for node in nodes}
    for node in nodes:
        sources = {id(tensor.producer) for tensor in node.sources() if tensor.producer is not None}
        waiting[id(node)] = len(sources)
        for source in sources:
            followers[source].append(node)
    ready = [(colours[id(node)], index, node) for index, node in enumerate(nodes) if not waiting[id(node)]]
    heapq.heapify(ready)
    ordered: list[GraphNode] = []
    serial = len(nodes)
    while ready:
        _, _, node = heapq.heappop(ready)
        ordered.append(node)
        for follower in followers[id(node)]:
            waiting[id(follower)] -= 1
            if not waiting[id(follower)]:
                serial += 1
                heapq.heappush(ready, (colours[id(follower)], serial, follower))
    return ordered


def _build(graph: Graph, ordered: list[GraphNode], colours: Mapping[Vertex, str], host_values: bool) -> FrozenGraph:
    """Number tensors by first appearance, Dims by colour, hash the result."""
    index: dict[int, int] = {}
    sequence: list[Tensor] = []

    def visit(tensor: Tensor) -> None:
        if id(tensor) not in index:
            index[id(tensor)] = len(sequence)
            sequence.append(tensor)
            if tensor.ragged_offset is not None:
                visit(tensor.ragged_offset)

    for node in ordered:
        for _, tensor in (*ports_of(node.inputs), *ports_of(node.outputs)):
            visit(tensor)

    position = {id(node): i for i, node in enumerate(ordered)}
    consumers: dict[int, list[tuple[int, str]]] = {key: [] for key in index}
    producer: dict[int, tuple[int, str]] = {}
    for node in ordered:
        for port, tensor in ports_of(node.inputs):
            consumers[id(tensor)].append((position[id(node)], port))
        for port, tensor in ports_of(node.outputs):
            producer[id(tensor)] = (position[id(node)], port)

    frozen: dict[int, FrozenTensor] = {}

    def make(tensor: Tensor) -> FrozenTensor:
        key = id(tensor)
        if key not in frozen:
            assert tensor.dim is not None
            assert tensor.stride is not None
            frozen[key] = FrozenTensor(
                index=index[key],
                uid=tensor.uid,
                name=tensor.name,
                dtype=tensor.dtype,
                dim=tensor.dim,
                stride=tensor.stride,
                role=_role(tensor),
                by_value=_by_value(tensor, host_values),
                auto_by_value=tensor.by_value == "auto",
                value=_value(tensor),
                default=None if tensor.default is None else held(tensor.default, tensor.dtype),
                reordering=tensor.reordering.value,
                ragged_offset=None if tensor.ragged_offset is None else make(tensor.ragged_offset),
                ragged_offset_multiplier=tensor.ragged_offset_multiplier,
                alignment_value=tensor.alignment_value,
                producer=producer.get(key),
                consumers=tuple(consumers[key]),
            )
        return frozen[key]

    def ports(values: Mapping[str, Any], names: tuple[Any, ...]) -> dict[str, Any]:
        return {
            port.name: tuple(map(make, values[port.name]))
            if isinstance(values[port.name], tuple)
            else make(values[port.name])
            for port in names
            if port.name in values
        }

    tensors = tuple(make(tensor) for tensor in sequence)
    nodes = tuple(
        FrozenNode(
            index=i,
            op=node.op,
            name=node.name,
            compute_dtype=node.compute_dtype,
            inputs=ports(node.inputs, node.row.inputs),
            outputs=ports(node.outputs, node.row.outputs),
            attrs=node.attrs,
        )
        for i, node in enumerate(ordered)
    )
    return FrozenGraph(name=graph.name, key=_key(tensors, nodes, colours), tensors=tensors, nodes=nodes)


def _key(tensors: tuple[FrozenTensor, ...], nodes: tuple[FrozenNode, ...], colours: Mapping[Vertex, str]) -> str:
    names = [vertex for vertex in colours if isinstance(vertex, str)]
    number = {name: i for i, name in enumerate(sorted(names, key=colours.__getitem__))}

    def extent(value: Extent) -> object:
        if isinstance(value, int):
            return value
        parts = value.dims if isinstance(value, Product) else (value,)
        factor = value.factor if isinstance(value, Product) else 1
        return [factor, sorted([number[d.name], d.min, d.max, d.multiple_of] for d in parts)]

    def port(value: Any) -> object:
        return [item.index for item in value] if isinstance(value, tuple) else value.index

    form = {
        "schema": 1,
        "tensors": [
            [
                t.dtype.value,
                [extent(v) for v in t.dim],
                [extent(v) for v in t.stride],
                t.role,
                t.by_value,
                float_to_json(t.value),
                t.reordering,
                None if t.ragged_offset is None else t.ragged_offset.index,
                t.ragged_offset_multiplier,
                t.alignment_value,
            ]
            for t in tensors
        ],
        "nodes": [
            [
                n.op,
                n.compute_dtype.value,
                {name: port(value) for name, value in n.inputs.items()},
                {name: port(value) for name, value in n.outputs.items()},
                encode(n.attrs),
            ]
            for n in nodes
        ],
    }
    return sha256(json.dumps(form, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()

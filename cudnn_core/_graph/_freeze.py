"""Graph -> FrozenGraph: canonical order and key.

Two graphs get one key exactly if they are the same up to names, uids and the order of construction. The order comes from
colour refinement (Weisfeiler and Leman) over the port-labelled DAG: colours flow from producers to consumers and back until
they stop splitting; a remaining tie is broken by singling out one member. Tied members are interchangeable unless
refinement can't tell a non-isomorphic pair apart, and then two equal graphs may get different keys, never the reverse: the
key is the hash of the whole canonical form. Imported by the graph.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator, Mapping
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Any

from .._dims import Dim, Extent, Product
from .._dtypes import data_type
from .._errors import GraphError
from ._frozen import FrozenGraph, FrozenNode, FrozenTensor
from ._infer import topological

if TYPE_CHECKING:
    from ._graph import Graph
    from ._tensor import GraphNode, Tensor

__all__ = ["freeze", "json_float"]


def freeze(graph: Graph, *, host_values: bool) -> FrozenGraph:
    """The frozen form of a validated ``graph``; ``host_values`` makes one-element CPU tensors by-value operands."""
    nodes = topological(graph.nodes)
    tensors: dict[int, Tensor] = {}
    for node in nodes:
        for tensor in (*node.input_tensors(), *node.output_tensors()):
            tensors[id(tensor)] = tensor
            if tensor.ragged_offset is not None:
                tensors[id(tensor.ragged_offset)] = tensor.ragged_offset
    labels = {key: _label(tensor, host_values) for key, tensor in tensors.items()}
    colours = _refine(nodes, tensors, labels)
    ordered = _order(nodes, colours)
    return _build(graph, ordered, host_values)


def _by_value(tensor: Tensor, host_values: bool) -> bool:
    return host_values if tensor.by_value == "auto" else bool(tensor.by_value)


def _role(tensor: Tensor) -> str:
    return "virtual" if tensor.is_virtual else "input" if tensor.producer is None else "output"


def _label(tensor: Tensor, host_values: bool) -> str:
    return repr(
        (
            tensor.dtype.value,
            [_anonymous(value) for value in tensor.dim or ()],
            [_anonymous(value) for value in tensor.stride or ()],
            _role(tensor),
            _by_value(tensor, host_values),
            json_float(tensor.value),
            tensor.reordering.value,
            tensor.ragged_offset_multiplier,
            tensor.alignment_value,
        )
    )


def _anonymous(value: Extent) -> object:
    if isinstance(value, Dim):
        return ("dim", value.min, value.max, value.multiple_of)
    if isinstance(value, Product):
        return (value.factor, sorted((dim.min, dim.max, dim.multiple_of) for dim in value.dims))
    return value


def _digest(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=12).hexdigest()


def _ports(ports: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for port, value in ports.items():
        if isinstance(value, tuple):
            for position, item in enumerate(value):
                yield f"{port}[{position}]", item
        else:
            yield port, value


def _refine(nodes: list[GraphNode], tensors: dict[int, Tensor], labels: dict[int, str]) -> dict[int, str]:
    """A colour for every node and tensor (by id), all distinct."""
    base = {key: _digest(label) for key, label in labels.items()}
    for node in nodes:
        base[id(node)] = _digest((node.op, node.compute_dtype.value, attrs_json(node.attrs)))
    consumers: dict[int, list[tuple[GraphNode, str]]] = {key: [] for key in tensors}
    ragged: dict[int, list[int]] = {key: [] for key in tensors}
    for node in nodes:
        for port, tensor in _ports(node.inputs):
            consumers[id(tensor)].append((node, port))
    for key, tensor in tensors.items():
        if tensor.ragged_offset is not None:
            ragged[id(tensor.ragged_offset)].append(key)

    colours = dict(base)
    distinct = 0
    while True:
        for node in nodes:  # down: producers to consumers
            seen = [
                (port, colours[id(tensor)], _offset_colour(tensor, colours)) for port, tensor in _ports(node.inputs)
            ]
            colours[id(node)] = _digest((colours[id(node)], seen))
            for port, tensor in node.outputs.items():
                colours[id(tensor)] = _digest((colours[id(tensor)], port, colours[id(node)]))
        for node in reversed(nodes):  # up: consumers to producers
            for _, tensor in _ports(node.outputs):
                colours[id(tensor)] = _with_consumers(tensor, colours, consumers, ragged)
            outs = [(port, colours[id(tensor)]) for port, tensor in node.outputs.items()]
            colours[id(node)] = _digest((colours[id(node)], outs))
        for tensor in tensors.values():
            if tensor.producer is None:
                colours[id(tensor)] = _with_consumers(tensor, colours, consumers, ragged)
        count = len(set(colours.values()))
        if count == len(colours):
            return colours
        if count == distinct:  # stable with ties: single one out of the smallest tied colour
            groups: dict[str, list[int]] = {}
            for key, colour in colours.items():
                groups.setdefault(colour, []).append(key)
            tied = min(colour for colour, members in groups.items() if len(members) > 1)
            colours[groups[tied][0]] = _digest((tied, "first"))
            count = 0
        distinct = count


def _offset_colour(tensor: Tensor, colours: dict[int, str]) -> str:
    return "" if tensor.ragged_offset is None else colours[id(tensor.ragged_offset)]


def _with_consumers(
    tensor: Tensor,
    colours: dict[int, str],
    consumers: dict[int, list[tuple[GraphNode, str]]],
    ragged: dict[int, list[int]],
) -> str:
    uses = sorted((colours[id(node)], port) for node, port in consumers[id(tensor)])
    offsets = sorted(colours[key] for key in ragged[id(tensor)])
    return _digest((colours[id(tensor)], uses, offsets))


def _order(nodes: list[GraphNode], colours: dict[int, str]) -> list[GraphNode]:
    """Topological order, ready nodes by colour."""
    waiting = {id(node): 0 for node in nodes}
    followers: dict[int, list[GraphNode]] = {id(node): [] for node in nodes}
    for node in nodes:
        sources = set()
        for tensor in node.input_tensors():
            for used in (tensor, tensor.ragged_offset):
                if used is not None and used.producer is not None:
                    sources.add(id(used.producer))
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


def _build(graph: Graph, ordered: list[GraphNode], host_values: bool) -> FrozenGraph:
    """Number tensors by first appearance, name Dims by first appearance, hash the result."""
    index: dict[int, int] = {}
    sequence: list[Tensor] = []

    def visit(tensor: Tensor) -> None:
        if id(tensor) not in index:
            index[id(tensor)] = len(sequence)
            sequence.append(tensor)
            if tensor.ragged_offset is not None:
                visit(tensor.ragged_offset)

    for node in ordered:
        for _, tensor in (*_ports(node.inputs), *_ports(node.outputs)):
            visit(tensor)

    position = {id(node): i for i, node in enumerate(ordered)}
    consumers: dict[int, list[tuple[int, str]]] = {key: [] for key in index}
    producer: dict[int, tuple[int, str]] = {}
    for node in ordered:
        for port, tensor in _ports(node.inputs):
            consumers[id(tensor)].append((position[id(node)], port))
        for port, tensor in _ports(node.outputs):
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
                value=tensor.value,
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
    return FrozenGraph(name=graph.name, key=_key(tensors, nodes), tensors=tensors, nodes=nodes)


def _key(tensors: tuple[FrozenTensor, ...], nodes: tuple[FrozenNode, ...]) -> str:
    names: dict[str, int] = {}

    def extent(value: Extent) -> object:
        if isinstance(value, int):
            return value
        parts = value.dims if isinstance(value, Product) else (value,)
        factor = value.factor if isinstance(value, Product) else 1
        numbered = [[names.setdefault(d.name, len(names)), d.min, d.max, d.multiple_of] for d in parts]
        return [factor, sorted(numbered)]

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
                json_float(t.value),
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
                attrs_json(n.attrs),
            ]
            for n in nodes
        ],
    }
    return sha256(json.dumps(form, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def attrs_json(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as JSON values: tuples as lists, data types and enum members as strings, non-finite floats as strings."""
    return {name: _plain(value) for name, value in attrs.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, data_type):
        return value.value
    if isinstance(value, float):
        return json_float(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise GraphError(f"attribute value {value!r} can't be written to JSON")


def json_float(value: Any) -> Any:
    """A finite float as it is (JSON writes the shortest round trip), a non-finite one as "inf", "-inf" or "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value

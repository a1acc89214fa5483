"""A colour for every vertex of a graph under construction, by its structure alone.

The vertices are the nodes, the tensors and the Dims; the edges are ports, ragged offsets, and the places that a Dim has in
sizes and strides. Colour refinement (Weisfeiler and Leman): colours flow from producers to consumers and back until they stop
splitting; a remaining tie is broken by singling out one member. No step depends on names, uids or the order of construction:
within a sweep a vertex reads only colours that the same sweep has finished, or those from before it. Imported by the freezing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from .._dims import Dim, Extent, Product, dims_of
from .._ops._attrs import encode

if TYPE_CHECKING:
    from ._tensor import GraphNode, Tensor

__all__ = ["ports_of", "refine"]

Vertex = int | str  # the id of a node or a tensor; the name of a Dim


def refine(nodes: list[GraphNode], labels: Mapping[int, str], tensors: Mapping[int, Tensor]) -> dict[Vertex, str]:
    """Colours, all distinct; ``nodes`` in topological order, ``labels`` what each tensor (by id) is in itself."""
    return _Refinement(nodes, labels, tensors).run()


def ports_of(ports: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(port, tensor), with positions for variadic ports."""
    for port, value in ports.items():
        if isinstance(value, tuple):
            for position, item in enumerate(value):
                yield f"{port}[{position}]", item
        else:
            yield port, value


def _digest(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=12).hexdigest()


class _Refinement:
    def __init__(self, nodes: list[GraphNode], labels: Mapping[int, str], tensors: Mapping[int, Tensor]) -> None:
        self.nodes = nodes
        self.tensors = tensors
        self.colours: dict[Vertex, str] = {key: _digest(label) for key, label in labels.items()}
        self.consumers: dict[int, list[tuple[int, str]]] = {key: [] for key in tensors}
        self.ragged: dict[int, list[int]] = {key: [] for key in tensors}
        self.places: dict[str, list[tuple[int, str, int]]] = {}  # of a Dim: (tensor, "dim" or "stride", axis)
        for node in nodes:
            self.colours[id(node)] = _digest((node.op, node.compute_dtype.value, encode(node.attrs)))
            for port, tensor in ports_of(node.inputs):
                self.consumers[id(tensor)].append((id(node), port))
        for key, tensor in tensors.items():
            if tensor.ragged_offset is not None:
                self.ragged[id(tensor.ragged_offset)].append(key)
            for field, extents in (("dim", tensor.dim or ()), ("stride", tensor.stride or ())):
                for axis, extent in enumerate(extents):
                    for dim in dims_of((extent,)):
                        self.places.setdefault(dim.name, []).append((key, field, axis))
                        self.colours[dim.name] = _digest(("dim", dim.min, dim.max, dim.multiple_of))

    def run(self) -> dict[Vertex, str]:
        distinct = 0
        while True:
            self._down()
            self._up()
            if self.places:
                self._dims()
            count = len(set(self.colours.values()))
            if count == len(self.colours):
                return self.colours
            if count == distinct:  # stable with ties: single one out of the smallest tied colour
                groups = Counter(self.colours.values())
                tied = min(colour for colour, members in groups.items() if members > 1)
                first = next(key for key, colour in self.colours.items() if colour == tied)
                self.colours[first] = _digest((tied, "first"))
                count = 0
            distinct = count

    def _down(self) -> None:
        """Producers to consumers."""
        colours = self.colours
        for node in self.nodes:
            seen = [
                (port, colours[id(tensor)], self._offset(tensor, colours)) for port, tensor in ports_of(node.inputs)
            ]
            colours[id(node)] = _digest((colours[id(node)], seen))
            for port, tensor in node.outputs.items():
                colours[id(tensor)] = _digest((colours[id(tensor)], port, colours[id(node)]))

    def _up(self) -> None:
        """Consumers to producers."""
        colours, before = self.colours, dict(self.colours)
        for node in reversed(self.nodes):
            for tensor in node.outputs.values():
                colours[id(tensor)] = self._tensor(tensor, before)
            outs = [(port, colours[id(tensor)]) for port, tensor in node.outputs.items()]
            colours[id(node)] = _digest((colours[id(node)], outs))
        for tensor in self.tensors.values():
            if tensor.producer is None:
                colours[id(tensor)] = self._tensor(tensor, before)

    def _tensor(self, tensor: Tensor, before: Mapping[Vertex, str]) -> str:
        key = id(tensor)
        uses = sorted((self.colours[node], port) for node, port in self.consumers[key])
        users = sorted(before[other] for other in self.ragged[key])
        sizes = (
            [_extent(value, before) for value in (*(tensor.dim or ()), *(tensor.stride or ()))] if self.places else []
        )
        return _digest((self.colours[key], uses, users, self._offset(tensor, before), sizes))

    def _offset(self, tensor: Tensor, colours: Mapping[Vertex, str]) -> str:
        return "" if tensor.ragged_offset is None else colours[id(tensor.ragged_offset)]

    def _dims(self) -> None:
        for name, places in self.places.items():
            where = sorted((self.colours[key], field, axis) for key, field, axis in places)
            self.colours[name] = _digest((self.colours[name], where))


def _extent(value: Extent, colours: Mapping[Vertex, str]) -> object:
    if isinstance(value, Dim):
        return colours[value.name]
    if isinstance(value, Product):
        return (value.factor, sorted(colours[dim.name] for dim in value.dims))
    return value

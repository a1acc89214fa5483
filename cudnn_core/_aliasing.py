"""Which operands of a plan may share memory, and which are one. Imported by the building of plans and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._dtypes import nbytes
from ._ops._table import lookup

if TYPE_CHECKING:
    from ._graph._frozen import FrozenGraph, FrozenTensor

__all__ = ["plan_aliases", "updated_inputs"]


def plan_aliases(graph: FrozenGraph) -> dict[tuple[int, int], int]:
    """{(slot, other slot): bytes from the first's address to the other's}: an output and an input that may share memory
    like this, in both directions. The op allows it, and nothing but the op reads the input."""
    slots = {tensor.index: slot for slot, tensor in enumerate(graph.operand_tensors())}
    pairs: dict[tuple[int, int], int] = {}

    def allow(out: FrozenTensor | None, source: FrozenTensor | None, offset: int) -> None:
        if out is None or source is None or out.index not in slots or source.index not in slots:
            return
        if out.dtype == source.dtype and len(source.consumers) == 1:
            pairs[slots[out.index], slots[source.index]] = offset
            pairs[slots[source.index], slots[out.index]] = -offset

    for node in graph.nodes:
        op = lookup(node.op)
        for out_port, in_port in op.alias:
            out, source = node.outputs.get(out_port), node.inputs.get(in_port)
            if out is not None and source is not None and out.dim == source.dim and out.stride == source.stride:
                allow(out, source, 0)
        if op.in_place is not None and not graph.dims:
            for out_port, in_port, position, elements in op.in_place(node):
                source = node.inputs[in_port]
                source = source[position] if isinstance(source, tuple) else source
                allow(node.outputs[out_port], source, nbytes(source.dtype, elements))
    return pairs


def updated_inputs(graph: FrozenGraph) -> dict[int, FrozenTensor]:
    """uid of an output -> the input that it is, updated in place: what its op does not write keeps the input's values."""
    found: dict[int, FrozenTensor] = {}
    for node in graph.nodes:
        for attribute, (out_port, in_port) in lookup(node.op).updates.items():
            out, source = node.outputs.get(out_port), node.inputs.get(in_port)
            if node.attrs[attribute] and out is not None and source is not None and source.role == "input":
                found[out.uid] = source
    return found

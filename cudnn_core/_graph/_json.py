"""Graph JSON, schema 1: the portable form of a graph.

Written in canonical order with the user's uids and names; floats in their shortest round trip, non-finite ones as strings.
Reading rejects unknown fields, ops and references. Imported by the graph, the plan file and the command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from .._arguments import as_name
from .._dims import extent_from_json, extent_to_json
from .._dtypes import as_dtype, data_type
from .._enums import as_member, tensor_reordering
from .._errors import GraphError, nearest
from .._ops._attrs import decode, encode, float_from_json, float_to_json
from .._ops._table import lookup
from ._builders import make_node

if TYPE_CHECKING:
    from ._frozen import FrozenGraph, FrozenTensor
    from ._graph import Graph
    from ._tensor import Tensor

__all__ = ["dumps", "loads", "to_dict"]

G = TypeVar("G", bound="Graph")

_TOP = ("schema", "name", "io_data_type", "intermediate_data_type", "compute_data_type", "tensors", "nodes")
_TENSOR = ("uid", "name", "dim", "stride", "data_type", "role", "by_value", "value", "default", "reordering",
           "ragged_offset", "ragged_offset_multiplier", "alignment_value")  # fmt: skip
_NODE = ("op", "name", "compute_data_type", "inputs", "outputs", "attrs")


def to_dict(frozen: FrozenGraph, graph: Graph | None = None) -> dict[str, Any]:
    """The JSON document as Python data; ``graph`` supplies the three default types, which the tensors don't need."""
    unset = data_type.NOT_SET
    return {
        "schema": 1,
        "name": frozen.name,
        "io_data_type": (graph.io_data_type if graph else unset).value,
        "intermediate_data_type": (graph.intermediate_data_type if graph else unset).value,
        "compute_data_type": (graph.compute_data_type if graph else unset).value,
        "tensors": [_tensor_dict(tensor) for tensor in frozen.tensors],
        "nodes": [
            {
                "op": node.op,
                "name": node.name,
                "compute_data_type": node.compute_dtype.value,
                "inputs": {port: _uids(value) for port, value in node.inputs.items()},
                "outputs": {port: _uids(value) for port, value in node.outputs.items()},
                "attrs": encode(node.attrs),
            }
            for node in frozen.nodes
        ],
    }


def _tensor_dict(tensor: FrozenTensor) -> dict[str, Any]:
    result: dict[str, Any] = {
        "uid": tensor.uid,
        "name": tensor.name,
        "dim": [extent_to_json(value) for value in tensor.dim],
        "stride": [extent_to_json(value) for value in tensor.stride],
        "data_type": tensor.dtype.value,
        "role": tensor.role,
        "by_value": "auto" if tensor.auto_by_value else tensor.by_value,
        "value": float_to_json(tensor.value),
        "reordering": tensor.reordering,
        "ragged_offset": None if tensor.ragged_offset is None else tensor.ragged_offset.uid,
    }
    if tensor.default is not None:
        result["default"] = float_to_json(tensor.default)
    if tensor.ragged_offset_multiplier != 1:
        result["ragged_offset_multiplier"] = tensor.ragged_offset_multiplier
    if tensor.alignment_value != 1:
        result["alignment_value"] = tensor.alignment_value
    return result


def _uids(value: Any) -> Any:
    return [item.uid for item in value] if isinstance(value, tuple) else value.uid


def dumps(frozen: FrozenGraph, graph: Graph | None = None) -> str:
    return json.dumps(to_dict(frozen, graph), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def loads(cls: type[G], text: str | bytes) -> G:
    """A graph from JSON text; GraphError names the field that is wrong."""
    try:
        document = json.loads(text, object_pairs_hook=_no_duplicates)
    except (TypeError, ValueError, RecursionError) as error:
        raise GraphError(f"graph JSON can't be read: {error}") from None
    return from_dict(cls, document)


def from_dict(cls: type[G], document: Any) -> G:
    _fields(document, _TOP, "graph")
    if document.get("schema") != 1:
        raise GraphError("graph JSON has an unknown schema", expected=1, actual=document.get("schema"))
    graph = cls(
        name=_typed(document, "name", str, "graph", ""),
        io_data_type=document.get("io_data_type"),
        intermediate_data_type=document.get("intermediate_data_type"),
        compute_data_type=document.get("compute_data_type"),
    )
    tensors: dict[int, Tensor] = {}
    roles: dict[int, str] = {}
    rows = _typed(document, "tensors", list, "graph")
    for i, row in enumerate(rows):
        where = f"tensors[{i}]"
        _fields(row, _TENSOR, where)
        uid = _typed(row, "uid", int, where)
        if uid in tensors:
            raise GraphError(f"{where}: uid {uid} is used twice")
        tensors[uid] = _tensor_from(graph, row, where)
        roles[uid] = row.get("role", "input")
    for i, row in enumerate(rows):
        offset = row.get("ragged_offset")
        if offset is not None:
            tensors[row["uid"]].set_ragged_offset(_reference(tensors, offset, f"tensors[{i}].ragged_offset"))
    for i, row in enumerate(_typed(document, "nodes", list, "graph")):
        _node_from(graph, row, tensors, f"nodes[{i}]")
    for uid, role in roles.items():
        produced = tensors[uid].producer is not None
        if produced != (role != "input"):
            raise GraphError(f"tensor {uid} has role {role!r}, and {'an' if produced else 'no'} op produces it")
    return graph


def _tensor_from(graph: Graph, row: Mapping[str, Any], where: str) -> Tensor:
    role = row.get("role", "input")
    if role not in ("input", "output", "virtual"):
        raise GraphError(f"{where}: unknown role {role!r}{nearest(str(role), ('input', 'output', 'virtual'))}")
    stride = row.get("stride")
    by_value = row.get("by_value", False)
    if not isinstance(by_value, bool) and by_value != "auto":
        raise GraphError(f'{where}.by_value must be true, false or "auto", got {by_value!r}')
    tensor = graph.tensor(
        dim=[extent_from_json(value, f"{where}.dim") for value in _typed(row, "dim", list, where)],
        stride=None
        if stride is None
        else [extent_from_json(v, f"{where}.stride") for v in _list(stride, f"{where}.stride")],
        data_type=_typed(row, "data_type", str, where),
        is_virtual=role == "virtual",
        is_pass_by_value=by_value is True,
        name=_typed(row, "name", str, where, ""),
        uid=row["uid"],
        reordering_type=as_member(tensor_reordering, row.get("reordering", "NONE")),
        ragged_offset_multiplier=_typed(row, "ragged_offset_multiplier", int, where, 1),
        alignment_value=_typed(row, "alignment_value", int, where, 1),
    )
    tensor._by_value = by_value
    value, default = _number(row, "value", where), _number(row, "default", where)
    if (value is not None or default is not None) and by_value is not True:
        raise GraphError(f"{where}: only a by-value tensor has a value or a default")
    if value is not None and default is not None:
        raise GraphError(f"{where}: a constant has no default")
    tensor._value, tensor._default = value, default
    return tensor


def _number(row: Mapping[str, Any], field: str, where: str) -> float | bool | None:
    value = float_from_json(row.get(field))
    if value is not None and not isinstance(value, (bool, int, float)):
        raise GraphError(f"{where}.{field}: {value!r} is no number")
    return value


def _node_from(graph: Graph, row: Any, tensors: Mapping[int, Tensor], where: str) -> None:
    _fields(row, _NODE, where)
    op = lookup(_typed(row, "op", str, where))
    given_name = as_name(_typed(row, "name", str, where, ""), f"{where}.name")
    label = given_name or where
    values: dict[str, Any] = {}
    for kind, ports in (("inputs", op.inputs), ("outputs", op.outputs)):
        given = _typed(row, kind, dict, where)
        known = {port.name: port for port in ports}
        for port, value in given.items():
            if port not in known:
                raise GraphError(f"{where}: {op.name} has no {kind[:-1]} {port!r}{nearest(port, known)}")
            place = f"{where}.{kind}.{port}"
            if isinstance(value, list) != known[port].variadic:
                raise GraphError(f"{place} takes {'a list of uids' if known[port].variadic else 'one uid'}")
            values[port] = (
                [_reference(tensors, item, place) for item in value]
                if isinstance(value, list)
                else _reference(tensors, value, place)
            )
    attrs = _typed(row, "attrs", dict, where, {})
    known_attrs = {attr.name: attr for attr in op.attrs}
    for name, value in attrs.items():
        if name not in known_attrs:
            raise GraphError(f"{where}: {op.name} has no attribute {name!r}{nearest(name, known_attrs)}")
        values[name] = decode(known_attrs[name], value, label)
    compute = as_dtype(row.get("compute_data_type"))
    produced = {port for port in values if port in {p.name for p in op.outputs}}
    make_node(graph, op, label, given_name, compute, values)
    node = graph._nodes[-1]
    extra = [port for port in node.outputs if port not in produced]
    if extra:
        raise GraphError(f"{where}: output {extra[0]!r} of {op.name} is missing")


def _reference(tensors: Mapping[int, Tensor], uid: Any, where: str) -> Tensor:
    if isinstance(uid, bool) or not isinstance(uid, int) or uid not in tensors:
        raise GraphError(f"{where}: there is no tensor with uid {uid!r}")
    return tensors[uid]


def _fields(row: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(row, dict):
        raise GraphError(f"{where} must be an object, got {type(row).__name__}")
    for name in row:
        if name not in known:
            raise GraphError(f"{where}: unknown field {name!r}{nearest(name, known)}")


_MISSING: Any = object()


def _typed(row: Mapping[str, Any], name: str, kind: type, where: str, default: Any = _MISSING) -> Any:
    value = row.get(name, default)
    if value is _MISSING:
        raise GraphError(f"{where}: field {name!r} is missing")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise GraphError(f"{where}.{name} must be {kind.__name__}, got {value!r}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise GraphError(f"{where} must be a list, got {value!r}")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise GraphError("an object of the graph JSON repeats a field")
    return result

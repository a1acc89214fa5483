"""Tensor and node descriptors of a graph under construction.

Owned by one Graph; equality and hash are identity. Imported by the graph, its builders and its JSON form.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .._arguments import as_int, as_list, shown
from .._dims import Dim, Extent, Product
from .._dtypes import as_dtype, data_type
from .._enums import as_member, tensor_reordering
from .._errors import GraphError, GraphTypeError

if TYPE_CHECKING:
    from .._ops._schema import Op
    from ._graph import Graph

__all__ = ["GraphNode", "Tensor", "extents"]


def extents(values: object, where: str, *, strides: bool = False) -> tuple[Extent, ...]:
    """A sequence of sizes (or strides) as a tuple; GraphTypeError names ``where``."""
    items = as_list(values, where)
    return tuple(v if isinstance(v, (Dim, Product)) else _extent(v, where, strides) for v in items)


def _extent(value: object, where: str, strides: bool) -> int:
    try:
        return as_int(value, where, 0)
    except GraphTypeError:
        kind = "strides" if strides else "sizes"
        raise GraphTypeError(f"{where} must hold {kind} >= 0 (ints or Dims), got {shown(value)}") from None


def _reader(slot: str) -> Any:
    """A property without a setter: a change goes through a method, which drops what was derived from the old value."""
    return property(attrgetter(slot))


class Tensor:
    """A tensor of a graph. Setters return the tensor, so they chain.

    ``dim`` and ``stride`` are what the user set, else what inference found, else None; strides count elements.
    Op outputs are virtual until ``set_output(True)``.
    """

    __slots__ = (
        "__weakref__",
        "_alignment_value",
        "_auto_dim",
        "_auto_dtype",
        "_auto_stride",
        "_by_value",
        "_default",
        "_dim",
        "_dtype",
        "_is_virtual",
        "_name",
        "_owner",
        "_producer",
        "_ragged_offset",
        "_ragged_offset_multiplier",
        "_reordering",
        "_stride",
        "_uid",
        "_uid_assigned",
        "_value",
    )

    def __init__(self, owner: Graph, uid: int, name: str) -> None:
        self._owner = weakref.ref(owner)
        self._uid = uid
        self._name = name
        self._dim: tuple[Extent, ...] | None = None
        self._stride: tuple[Extent, ...] | None = None
        self._dtype = data_type.NOT_SET
        self._auto_dim: tuple[Extent, ...] | None = None
        self._auto_stride: tuple[Extent, ...] | None = None
        self._auto_dtype = data_type.NOT_SET
        self._uid_assigned = False
        self._is_virtual = False
        self._by_value: bool | str = False
        self._value: float | int | bool | None = None
        self._default: float | int | bool | None = None
        self._reordering = tensor_reordering.NONE
        self._ragged_offset: Tensor | None = None
        self._ragged_offset_multiplier = 1
        self._alignment_value = 1
        self._producer: GraphNode | None = None

    # True, False, or "auto": a one-element CPU tensor, which is a host value only where the plan runs on a GPU.
    by_value: bool | str = _reader("_by_value")
    # Of a constant of the graph: a by-value tensor that is no operand.
    value: float | int | bool | None = _reader("_value")
    # Of a by-value operand: what execute uses if the caller gives nothing.
    default: float | int | bool | None = _reader("_default")
    is_virtual: bool = _reader("_is_virtual")
    reordering: tensor_reordering = _reader("_reordering")
    ragged_offset: Tensor | None = _reader("_ragged_offset")
    ragged_offset_multiplier: int = _reader("_ragged_offset_multiplier")
    alignment_value: int = _reader("_alignment_value")
    producer: GraphNode | None = _reader("_producer")

    def __repr__(self) -> str:
        shape = "?" if self.dim is None else "x".join(map(str, self.dim))
        kind = "virtual " if self.is_virtual else ""
        return f"<{kind}tensor {self._name or self._uid}: {self.dtype} {shape}>"

    # --- what op rows read
    @property
    def uid(self) -> int:
        return self._uid

    @property
    def name(self) -> str:
        return self._name

    @property
    def dim(self) -> tuple[Extent, ...] | None:
        return self._dim if self._dim is not None else self._auto_dim

    @property
    def stride(self) -> tuple[Extent, ...] | None:
        return self._stride if self._stride is not None else self._auto_stride

    @property
    def dtype(self) -> data_type:
        return self._dtype if self._dtype is not data_type.NOT_SET else self._auto_dtype

    # --- the frontend's getters
    def get_name(self) -> str:
        return self._name

    def get_uid(self) -> int:
        return self._uid

    def get_dim(self) -> list[Extent]:
        return list(self.dim or ())

    def get_stride(self) -> list[Extent]:
        return list(self.stride or ())

    def get_data_type(self) -> data_type:
        return self.dtype

    def get_is_virtual(self) -> bool:
        return self.is_virtual

    def get_is_pass_by_value(self) -> bool:
        return bool(self.by_value)

    def get_reordering_type(self) -> tensor_reordering:
        return self.reordering

    def get_ragged_offset_multiplier(self) -> int:
        return self.ragged_offset_multiplier

    def get_ragged_offset(self) -> Tensor | None:
        return self.ragged_offset

    # --- the frontend's setters
    def set_name(self, name: str) -> Tensor:
        self._graph("set_name")._rename(self, name)
        return self

    def set_uid(self, uid: int) -> Tensor:
        self._graph("set_uid")._assign_uid(self, uid)
        return self

    def set_dim(self, dim: Iterable[Extent]) -> Tensor:
        graph = self._graph("set_dim")
        self._dim = extents(dim, f"{self.label}.dim")
        graph._changed()
        return self

    def set_stride(self, stride: Iterable[Extent]) -> Tensor:
        graph = self._graph("set_stride")
        self._stride = extents(stride, f"{self.label}.stride", strides=True)
        graph._changed()
        return self

    def set_data_type(self, dtype: object) -> Tensor:
        graph = self._graph("set_data_type")
        self._dtype = as_dtype(dtype)
        graph._changed()
        return self

    def set_is_virtual(self, value: bool) -> Tensor:
        graph = self._graph("set_is_virtual")
        self._is_virtual = bool(value)
        graph._changed()
        return self

    def set_output(self, value: bool) -> Tensor:
        """Make an op's result visible to the caller (True) or virtual (False)."""
        return self.set_is_virtual(not value)

    def set_is_pass_by_value(self, value: bool) -> Tensor:
        """Whether a host value stands for the tensor; without one it has no constant value and no default either."""
        graph = self._graph("set_is_pass_by_value")
        self._by_value = bool(value)
        if not value:
            self._value = self._default = None
        graph._changed()
        return self

    def set_reordering_type(self, reordering_type: object) -> Tensor:
        graph = self._graph("set_reordering_type")
        self._reordering = as_member(tensor_reordering, reordering_type)
        graph._changed()
        return self

    def set_ragged_offset(self, ragged_offset: Tensor | None) -> Tensor:
        graph = self._graph("set_ragged_offset")
        if ragged_offset is not None:
            graph._own(ragged_offset, f"{self.label}.ragged_offset")
        self._ragged_offset = ragged_offset
        graph._changed()
        return self

    def set_ragged_offset_multiplier(self, multiplier: int) -> Tensor:
        graph = self._graph("set_ragged_offset_multiplier")
        self._ragged_offset_multiplier = as_int(multiplier, f"{self.label}.ragged_offset_multiplier", 1)
        graph._changed()
        return self

    def set_alignment_value(self, value: int) -> Tensor:
        """Promise that every value of this integer tensor is a multiple of ``value``."""
        graph = self._graph("set_alignment_value")
        self._alignment_value = as_int(value, f"{self.label}.alignment_value", 1)
        graph._changed()
        return self

    def validate(self) -> None:
        """Raise GraphError if the tensor alone is inconsistent."""
        if self.dim is None:
            raise GraphError(f"tensor {self.label}: its dim is neither set nor inferred")
        if self.stride is not None and len(self.stride) != len(self.dim):
            raise GraphError(
                f"tensor {self.label}: dim and stride differ in rank", expected=len(self.dim), actual=len(self.stride)
            )
        if self.is_virtual and self.by_value:
            raise GraphError(f"tensor {self.label} can't be virtual and passed by value")

    @property
    def label(self) -> str:
        """The name, or the uid of a nameless tensor: for messages."""
        return repr(self._name) if self._name else f"uid {self._uid}"

    def _graph(self, setter: str) -> Graph:
        graph = self._owner()
        if graph is None:
            raise GraphError(f"tensor {self.label}: its graph no longer exists")
        if graph.is_planned:
            raise GraphError(f"tensor {self.label}: {setter} after the graph was planned; build a new graph")
        return graph


class GraphNode:
    """One operation under construction, read-only: what the op row's functions read."""

    __slots__ = ("_attrs", "_compute_dtype", "_inputs", "_name", "_outputs", "_row")

    def __init__(
        self,
        row: Op,
        name: str,
        compute_dtype: data_type,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        attrs: Mapping[str, Any],
    ) -> None:
        self._row = row
        self._name = name
        self._compute_dtype = compute_dtype
        self._inputs = MappingProxyType(inputs)
        self._outputs = MappingProxyType(outputs)
        self._attrs = MappingProxyType(attrs)

    row: Op = _reader("_row")
    name: str = _reader("_name")
    compute_dtype: data_type = _reader("_compute_dtype")
    inputs: Mapping[str, Any] = _reader("_inputs")
    outputs: Mapping[str, Any] = _reader("_outputs")
    attrs: Mapping[str, Any] = _reader("_attrs")

    @property
    def op(self) -> str:
        return self.row.name

    @property
    def label(self) -> str:
        return self.name or self.row.name

    def input_tensors(self) -> Iterable[Tensor]:
        for value in self.inputs.values():
            if isinstance(value, tuple):
                yield from value
            else:
                yield value

    def sources(self) -> Iterable[Tensor]:
        """What must exist before the op runs: its inputs, and the offsets of its ragged inputs and outputs."""
        for tensor in self.input_tensors():
            yield tensor
            if tensor.ragged_offset is not None:
                yield tensor.ragged_offset
        for tensor in self.output_tensors():
            if tensor.ragged_offset is not None:
                yield tensor.ragged_offset

    def output_tensors(self) -> Iterable[Tensor]:
        return self.outputs.values()

    def __repr__(self) -> str:
        return f"<node {self.label}>"

"""Tensor and node descriptors of a graph under construction.

Owned by one Graph; equality and hash are identity. Imported by the graph, its builders and its JSON form.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .._dims import Dim, Extent, Product
from .._dtypes import as_dtype, data_type
from .._enums import as_member, tensor_reordering
from .._errors import GraphError

if TYPE_CHECKING:
    from .._ops._schema import Op
    from ._graph import Graph

__all__ = ["GraphNode", "Tensor", "extents"]


def extents(values: object, where: str, *, strides: bool = False) -> tuple[Extent, ...]:
    """A sequence of sizes (or strides) as a tuple; GraphError names ``where``."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise GraphError(f"{where} must be a sequence of sizes, got {values!r}")
    result: list[Extent] = []
    for value in values:
        if isinstance(value, (Dim, Product)):
            result.append(value)
            continue
        try:
            number = value.__index__()
        except AttributeError:
            raise GraphError(f"{where} must hold ints or Dims, got {value!r}") from None
        if isinstance(value, bool) or number < 0:
            raise GraphError(f"{where} must hold {'strides' if strides else 'sizes'} >= 0, got {value!r}")
        result.append(number)
    return tuple(result)


class Tensor:
    """A tensor of a graph. Setters return the tensor, so they chain.

    ``dim`` and ``stride`` are what the user set, else what inference found, else None; strides count elements.
    Op outputs are virtual until ``set_output(True)``.
    """

    __slots__ = (
        "__weakref__",
        "_auto_dim",
        "_auto_dtype",
        "_auto_stride",
        "_dim",
        "_dtype",
        "_name",
        "_owner",
        "_stride",
        "_uid",
        "alignment_value",
        "by_value",
        "is_virtual",
        "producer",
        "ragged_offset",
        "ragged_offset_multiplier",
        "reordering",
        "uid_assigned",
        "value",
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
        self.uid_assigned = False
        self.is_virtual = False
        # True, False, or "auto": a one-element CPU tensor, which is a host value only where the plan runs on a GPU.
        self.by_value: bool | str = False
        self.value: float | int | bool | None = None
        self.reordering = tensor_reordering.NONE
        self.ragged_offset: Tensor | None = None
        self.ragged_offset_multiplier = 1
        self.alignment_value = 1
        self.producer: GraphNode | None = None

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
        self.is_virtual = bool(value)
        graph._changed()
        return self

    def set_output(self, value: bool) -> Tensor:
        """Make an op's result visible to the caller (True) or virtual (False)."""
        return self.set_is_virtual(not value)

    def set_is_pass_by_value(self, value: bool) -> Tensor:
        graph = self._graph("set_is_pass_by_value")
        self.by_value = bool(value)
        graph._changed()
        return self

    def set_reordering_type(self, reordering_type: object) -> Tensor:
        graph = self._graph("set_reordering_type")
        self.reordering = as_member(tensor_reordering, reordering_type)
        graph._changed()
        return self

    def set_ragged_offset(self, ragged_offset: Tensor | None) -> Tensor:
        graph = self._graph("set_ragged_offset")
        if ragged_offset is not None:
            graph._own(ragged_offset, f"{self.label}.ragged_offset")
        self.ragged_offset = ragged_offset
        graph._changed()
        return self

    def set_ragged_offset_multiplier(self, multiplier: int) -> Tensor:
        graph = self._graph("set_ragged_offset_multiplier")
        self.ragged_offset_multiplier = int(multiplier)
        graph._changed()
        return self

    def set_alignment_value(self, value: int) -> Tensor:
        """Promise that every value of this integer tensor is a multiple of ``value``."""
        graph = self._graph("set_alignment_value")
        if value < 1:
            raise GraphError(f"{self.label}: alignment_value must be >= 1, got {value}")
        self.alignment_value = int(value)
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
    """One operation under construction: what the op row's functions read."""

    __slots__ = ("attrs", "compute_dtype", "inputs", "name", "outputs", "row")

    def __init__(
        self,
        row: Op,
        name: str,
        compute_dtype: data_type,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        attrs: Mapping[str, Any],
    ) -> None:
        self.row = row
        self.name = name
        self.compute_dtype = compute_dtype
        self.inputs = inputs
        self.outputs = outputs
        self.attrs = attrs

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

    def output_tensors(self) -> Iterable[Tensor]:
        return self.outputs.values()

    def __repr__(self) -> str:
        return f"<node {self.label}>"

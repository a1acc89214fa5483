"""The immutable graph that engines see.

Made by ``_graph._freeze``; read by the manifest filter, the ranking and every engine. Tensors and nodes stand in
canonical order: a function of the graph's structure alone, not of names, uids or the order of builder calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from .._dims import Dim, Extent, Product, dims_of, evaluate, match_sizes
from .._dtypes import data_type
from .._engine import Operand
from ._seal import Seal

__all__ = ["FrozenGraph", "FrozenNode", "FrozenTensor"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class FrozenTensor:
    """One tensor.

    index      position in ``FrozenGraph.tensors``
    uid, name  the user's; not part of the key, so an engine must not depend on them
    dtype      a data_type, which equals its string
    dim        sizes; a Dim is a runtime size
    stride     in elements (fp4 and int4 too)
    role       "input" | "output" | "virtual"
    by_value   a one-element host value
    auto_by_value  a one-element CPU tensor: ``by_value`` where the plan's device is a GPU; a number may stand for it anywhere
    value      of a by-value tensor that is a constant of the graph (it is no operand then), else None
    default    of a by-value operand: what a caller's silence means, or None; not part of the key
    reordering "NONE", "INT8x32", "F16x16" or "F8_128x4"
    ragged_offset  the tensor of element offsets of a ragged tensor, or None; ``ragged_offset_multiplier`` scales it
    alignment_value  every value of this (integer) tensor is a multiple of it
    producer   (node index, port) or None; consumers likewise, all of them
    """

    index: int
    uid: int
    name: str
    dtype: data_type
    dim: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    role: str
    by_value: bool = False
    auto_by_value: bool = False
    value: float | int | bool | None = None
    default: float | int | bool | None = None
    reordering: str = "NONE"
    ragged_offset: FrozenTensor | None = None
    ragged_offset_multiplier: int = 1
    alignment_value: int = 1
    producer: tuple[int, str] | None = None
    consumers: tuple[tuple[int, str], ...] = ()

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.dim))
        return f"<{self.role} {self.name or self.uid}: {self.dtype} {shape}>"

    @property
    def rank(self) -> int:
        return len(self.dim)

    @property
    def is_constant(self) -> bool:
        """A by-value tensor whose value is part of the graph."""
        return self.by_value and self.value is not None


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class FrozenNode:
    """One operation: ``op``, ``compute_dtype``, ``inputs`` and ``outputs`` (port -> FrozenTensor, or a tuple of them for a
    variadic port; an absent optional port is an absent key) and ``attrs`` (complete)."""

    index: int
    op: str
    name: str
    compute_dtype: data_type
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    attrs: Mapping[str, Any]

    def __post_init__(self) -> None:
        for ports in ("inputs", "outputs", "attrs"):
            object.__setattr__(self, ports, MappingProxyType(dict(getattr(self, ports))))

    def __repr__(self) -> str:
        return f"<node {self.index} {self.op}>"


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class FrozenGraph:
    """An immutable graph in canonical order.

    key       64 hex digits; equal keys mean equal graphs up to names and uids, so that their plans can be shared
    tensors   every tensor; nodes  every node, producers before consumers
    operands  the non-virtual tensors that a caller binds, in canonical order
    dims      the runtime sizes by name
    """

    name: str
    key: str
    tensors: tuple[FrozenTensor, ...]
    nodes: tuple[FrozenNode, ...]
    operands: tuple[Operand, ...] = field(init=False)
    dims: Mapping[str, Dim] = field(init=False)
    _facts: dict[Callable[..., Any], Any] = field(init=False, default_factory=dict)
    _seal: Seal = field(init=False)

    def __post_init__(self) -> None:
        dims = {dim.name: dim for tensor in self.tensors for dim in dims_of(tensor.dim + tensor.stride)}
        object.__setattr__(self, "dims", MappingProxyType(dims))
        object.__setattr__(self, "operands", tuple(_operand(tensor) for tensor in operand_tensors(self.tensors)))
        sizes = {
            id(size): size for tensor in self.tensors for size in tensor.dim + tensor.stride if type(size) is not int
        }
        parts = (*dims.values(), *(size for size in sizes.values() if isinstance(size, Product)))
        object.__setattr__(self, "_seal", Seal(self, (*self.tensors, *self.nodes, *parts)))

    def mend(self) -> str:
        """Undo what an engine did to the graph, and say where: "" if nothing, as it must be."""
        changed = self._seal.mend(self)
        if changed:
            self._facts.clear()  # some may have been computed from what was changed
        return changed

    def __repr__(self) -> str:
        ops = ", ".join(node.op for node in self.nodes)
        return f"<FrozenGraph {self.key[:12]} [{ops}]>"

    def facts(self, fn: Callable[[FrozenGraph], T]) -> T:
        """``fn(self)``, computed once and shared by check_support, estimate and build_plan. ``fn`` must be pure."""
        try:
            return self._facts[fn]  # type: ignore[no-any-return]
        except KeyError:
            return self._facts.setdefault(fn, fn(self))  # type: ignore[no-any-return]

    def operand_tensors(self) -> tuple[FrozenTensor, ...]:
        """The tensors behind ``operands``, in the same order."""
        return operand_tensors(self.tensors)

    def at(self, sizes: Mapping[str, int]) -> FrozenGraph:
        """The same graph with every Dim replaced by its size (the key stays that of this graph)."""
        if not self.dims:
            return self
        done: dict[int, FrozenTensor] = {}

        def fix(tensor: FrozenTensor) -> FrozenTensor:
            if tensor.index not in done:
                done[tensor.index] = replace(
                    tensor,
                    dim=tuple(evaluate(value, sizes) for value in tensor.dim),
                    stride=tuple(evaluate(value, sizes) for value in tensor.stride),
                    ragged_offset=fix(tensor.ragged_offset) if tensor.ragged_offset is not None else None,
                )
            return done[tensor.index]

        def fix_ports(ports: Mapping[str, Any]) -> dict[str, Any]:
            return {
                port: tuple(fix(item) for item in value) if isinstance(value, tuple) else fix(value)
                for port, value in ports.items()
            }

        nodes = tuple(
            replace(node, inputs=fix_ports(node.inputs), outputs=fix_ports(node.outputs)) for node in self.nodes
        )
        return FrozenGraph(name=self.name, key=self.key, tensors=tuple(map(fix, self.tensors)), nodes=nodes)

    def sizes_from(self, shapes: Iterable[Sequence[Any] | None]) -> dict[str, int]:
        """The size of every Dim that the operands' actual ``shapes`` (in canonical order; None: unknown) tell.

        Raises ExecutionError for a shape that the operand can't have.
        """
        sizes: dict[str, int] = {}
        for tensor, shape in zip(self.operand_tensors(), shapes, strict=True):
            if shape is not None:
                match_sizes(tensor.dim, shape, sizes, tensor.name or f"uid {tensor.uid}")
        return sizes

    def hint_sizes(self, hint: Mapping[str, int] | None = None) -> dict[str, int]:
        """A size for every Dim: from ``hint``, else the Dim's own default."""
        return {name: (hint or {}).get(name, dim.hint) for name, dim in self.dims.items()}

    def largest_sizes(self) -> dict[str, int]:
        return {name: dim.largest for name, dim in self.dims.items()}


def operand_tensors(tensors: tuple[FrozenTensor, ...]) -> tuple[FrozenTensor, ...]:
    return tuple(tensor for tensor in tensors if tensor.role != "virtual" and not tensor.is_constant)


def _operand(tensor: FrozenTensor) -> Operand:
    return Operand(
        uid=tensor.uid,
        name=tensor.name,
        dtype=tensor.dtype,
        dim=tensor.dim,
        stride=tensor.stride,
        role=tensor.role,
        by_value=tensor.by_value,
    )

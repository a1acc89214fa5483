"""Shape algebra, checks and counts that the op rows share. Imported by the row modules only.

Inference is best effort and never raises: a conflict gets a plausible shape, and ``validate`` reports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._dims import Dim, Extent, Product, evaluate, packed_strides, product, same
from .._dtypes import nbytes
from ._schema import Node, Param, Problem, Tensor, TensorSpec

__all__ = [
    "FLOATS",
    "INDEX",
    "INTEGERS",
    "TAIL",
    "TAIL_OUT_DIMS",
    "Checks",
    "broadcast",
    "broadcast_shape",
    "broadcasts_to",
    "ceil_div",
    "certainly_multiple",
    "dim_of",
    "elements",
    "enum_name",
    "exact_div",
    "is_dense",
    "layout_axes",
    "like_strides",
    "node_bytes",
    "numel",
    "packed_like",
    "rank_of",
    "reordering_of",
    "round_up",
    "same_shape",
    "shape_text",
    "tensors_of",
]

FLOATS = ("float64", "float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int8", "uint8", "int4")
INDEX = ("int32", "int64")

TAIL = (Param("name", "", keyword_only=True), Param("compute_data_type", None, keyword_only=True))
TAIL_OUT_DIMS = (*TAIL, Param("out_dims", None, to="-", keyword_only=True))

Shape = Sequence[Extent]


# Shapes


def dim_of(node: Node, port: str) -> tuple[Extent, ...] | None:
    """The dim of an input, or None if the port is absent or its tensor has no dim yet."""
    tensor = node.inputs.get(port)
    return None if tensor is None or tensor.dim is None else tuple(tensor.dim)


def shape_text(dim: Shape | None) -> str:
    """``(8, m, 64)``: runtime sizes by their names."""
    if dim is None:
        return "unset"
    return "(" + ", ".join(map(str, dim)) + ("," if len(dim) == 1 else "") + ")"


def same_shape(a: Shape | None, b: Shape | None) -> bool:
    return a is not None and b is not None and len(a) == len(b) and all(map(same, a, b))


def broadcast(shapes: Iterable[Shape]) -> tuple[tuple[Extent, ...], bool]:
    """Numpy's broadcast of ``shapes`` and whether they agree; on a conflict the first size other than 1 stands."""
    shapes = [tuple(shape) for shape in shapes]
    rank = max(map(len, shapes), default=0)
    result: list[Extent] = []
    agree = True
    for axis in range(-rank, 0):
        sizes = [shape[axis] for shape in shapes if len(shape) >= -axis and not same(shape[axis], 1)]
        result.append(sizes[0] if sizes else 1)
        agree = agree and all(same(size, sizes[0]) for size in sizes)
    return tuple(result), agree


def broadcast_shape(tensors: Iterable[Tensor]) -> tuple[Extent, ...] | None:
    """The broadcast shape of tensors; None while one of them has no dim."""
    shapes = [tensor.dim for tensor in tensors]
    known = [shape for shape in shapes if shape is not None]
    return broadcast(known)[0] if len(known) == len(shapes) else None


def broadcasts_to(shape: Shape, target: Shape) -> bool:
    """Whether ``shape`` has the rank of ``target`` and each size is 1 or the target's."""
    return len(shape) == len(target) and all(same(a, 1) or same(a, b) for a, b in zip(shape, target, strict=True))


def certainly_multiple(value: Extent, of: int) -> bool:
    """Whether every admissible value of a size is a multiple of ``of``."""
    if isinstance(value, int):
        return value % of == 0
    if isinstance(value, Dim):
        return value.multiple_of % of == 0
    return (value.factor * math.prod(dim.multiple_of for dim in value.dims)) % of == 0


def exact_div(value: Extent, by: int) -> Extent | None:
    """``value / by`` where it is a size (an int, or a product whose factor ``by`` divides), else None."""
    if isinstance(value, int):
        return value // by if value % by == 0 else None
    if by == 1:
        return value
    if isinstance(value, Product) and value.factor % by == 0:
        return product((value.factor // by, *value.dims))
    return None


def ceil_div(value: Extent, by: int) -> Extent | None:
    """``ceil(value / by)``, or None where a runtime size makes it inexpressible."""
    return -(-value // by) if isinstance(value, int) else exact_div(value, by)


def round_up(value: Extent, to: int) -> Extent | None:
    if isinstance(value, int):
        return -(-value // to) * to
    return value if certainly_multiple(value, to) else None


def _typical(value: Extent) -> int:
    """A size to order strides by."""
    if isinstance(value, int):
        return value
    dims = (value,) if isinstance(value, Dim) else value.dims
    return evaluate(value, {dim.name: dim.largest for dim in dims})


def _axis_order(stride: Shape) -> list[int]:
    """Axes from slowest to fastest."""
    return sorted(range(len(stride)), key=lambda axis: -_typical(stride[axis]))


def _has_order(dim: Shape, stride: Shape, axis: int) -> bool:
    """Whether an axis has a place in memory: one of a single element or broadcast by stride 0 has none."""
    return not same(dim[axis], 1) and not same(stride[axis], 0)


def layout_axes(tensor: Tensor) -> int:
    """How many axes of a tensor have a place in memory; 0 while its layout is unknown."""
    if tensor.dim is None or tensor.stride is None or len(tensor.dim) != len(tensor.stride):
        return 0
    return sum(_has_order(tensor.dim, tensor.stride, axis) for axis in range(len(tensor.dim)))


def is_dense(dim: Shape, stride: Shape) -> bool:
    """Whether the tensor fills its memory without gaps or overlap, in any order of axes."""
    axes = [axis for axis in _axis_order(stride) if not same(dim[axis], 1)]
    packed = packed_strides([dim[axis] for axis in axes])
    return all(same(stride[axis], want) for axis, want in zip(axes, packed, strict=True))


def like_strides(tensor: Tensor | None, dim: Shape | None) -> tuple[Extent, ...] | None:
    """Packed strides for ``dim`` in the axis order of ``tensor`` (channels-last stays channels-last).

    None (row-major by default) where the tensor's strides are unset or of another rank.
    """
    if tensor is None or dim is None or tensor.stride is None or len(tensor.stride) != len(dim):
        return None
    return packed_like(tensor.dim or (), tensor.stride, dim)


def packed_like(like: Shape, stride: Shape, dim: Shape) -> tuple[Extent, ...]:
    """Packed strides for ``dim`` in the axis order of a tensor of sizes ``like``; axes without an order stay row-major."""
    if same_shape(like, dim) and is_dense(dim, stride):
        return tuple(stride)
    order = [axis for axis in _axis_order(stride) if _has_order(like, stride, axis)]
    for axis in range(len(dim)):
        if axis not in order:
            order.insert(next((i for i, other in enumerate(order) if other > axis), len(order)), axis)
    return packed_strides(dim, order)


def rank_of(value: object) -> int | None:
    """The rank of a graph tensor or a framework's array, or None if it isn't known."""
    dim = getattr(value, "dim", None)
    if isinstance(dim, tuple | list):
        return len(dim)
    shape = getattr(value, "shape", None)
    return None if shape is None else len(shape)


def reordering_of(tensor: Tensor | None) -> str:
    """``NONE`` or the member name of the tensor's reordering."""
    for field in ("reordering", "reordering_type"):
        value = getattr(tensor, field, None)
        if value is not None:
            return enum_name(value)
    return "NONE"


def enum_name(value: object) -> str:
    """The member name of an enum, or the string itself."""
    return value if type(value) is str else str(getattr(value, "name", value))


# Counts at fixed sizes


def tensors_of(ports: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(port, tensor) for every tensor of a node's inputs or outputs."""
    for port, value in ports.items():
        if isinstance(value, tuple | list):
            yield from ((port, tensor) for tensor in value)
        elif value is not None:
            yield port, value


def numel(tensor: Tensor) -> int:
    """Elements of a tensor whose sizes are ints."""
    assert tensor.dim is not None
    return math.prod(_typical(size) for size in tensor.dim)


def elements(tensor: Tensor) -> Extent:
    return product(tensor.dim or ())


def node_bytes(node: Node) -> int:
    """Bytes of every input and output, each counted once; by-value scalars are free."""
    return sum(
        nbytes(tensor.dtype, numel(tensor))
        for ports in (node.inputs, node.outputs)
        for _, tensor in tensors_of(ports)
        if not getattr(tensor, "by_value", False)
    )


# Validation


class Checks:
    """Collects the problems of one node. Each check returns whether it passed, so that dependent checks can be skipped."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.problems: list[Problem] = []

    def get(self, port: str) -> Any:
        """The tensor of an input or output port, or None."""
        found = self.node.inputs.get(port)
        return self.node.outputs.get(port) if found is None else found

    def require(self, condition: bool, port: str, message: str, expected: object = None, actual: object = None) -> bool:
        if not condition:
            self.problems.append(Problem(port, message, expected, actual))
        return condition

    def rank(self, port: str, *ranks: int) -> bool:
        """The port, if present, has one of the ranks."""
        tensor = self.get(port)
        if tensor is None:
            return True
        expected = " or ".join(map(str, ranks))
        return self.require(len(tensor.dim) in ranks, port, "wrong rank", f"rank {expected}", shape_text(tensor.dim))

    def ranks(self, rank: int, *ports: str) -> bool:
        """Each of the ports has the rank; every failure is reported."""
        passed = [self.rank(port, rank) for port in ports]
        return all(passed)

    def shape(self, port: str, expected: Shape | None) -> bool:
        """The port, if present, has exactly this shape (None: nothing is known)."""
        tensor = self.get(port)
        if tensor is None or expected is None:
            return True
        return self.require(
            same_shape(tensor.dim, expected), port, "wrong shape", shape_text(expected), shape_text(tensor.dim)
        )

    def broadcasts(self, port: str, target: Shape) -> bool:
        """The port, if present, broadcasts to ``target`` axis by axis."""
        tensor = self.get(port)
        if tensor is None:
            return True
        return self.require(
            broadcasts_to(tensor.dim, target),
            port,
            "does not broadcast",
            f"each axis 1 or as in {shape_text(target)}",
            shape_text(tensor.dim),
        )

    def dtype(self, port: str, *allowed: str) -> bool:
        """The port's tensors, if present, have one of the data types."""
        value = self.get(port)
        ok = True
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if tensor is not None:
                ok &= self.require(tensor.dtype in allowed, port, "wrong data type", " or ".join(allowed), tensor.dtype)
        return ok

    def scalar(self, port: str, *dtypes: str) -> bool:
        """The port, if present, has one element (and one of the data types)."""
        tensor = self.get(port)
        if tensor is None:
            return True
        single = self.require(
            all(same(size, 1) for size in tensor.dim), port, "must have one element", "1", shape_text(tensor.dim)
        )
        return (not dtypes or self.dtype(port, *dtypes)) and single

    def requires(self, port: str, *others: str, why: str = "") -> bool:
        """If the port is present, so are the others."""
        if self.get(port) is None:
            return True
        missing = [other for other in others if self.get(other) is None]
        return self.require(not missing, port, f"needs {', '.join(missing)}{why}", ", ".join(others), "absent")

    def inferred(self, specs: Mapping[str, TensorSpec]) -> None:
        """Every output has the shape that inference gives."""
        for port, spec in specs.items():
            self.shape(port, spec.dim)

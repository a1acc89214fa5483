"""Runtime sizes: ``Dim``, the products that packed strides of runtime sizes are, and their evaluation.

An extent (an entry of ``dim`` or ``stride``) is an ``int``, a ``Dim`` or a ``Product``; all of them are immutable. Imported
by the graph, the op rows (shape inference) and the plan (binding of sizes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ._errors import ExecutionError, GraphError

__all__ = [
    "Dim",
    "Extent",
    "Product",
    "binds",
    "dims_of",
    "evaluate",
    "extent_from_json",
    "extent_to_json",
    "match_sizes",
    "overlap",
    "packed_strides",
    "product",
    "same",
]


class _Immutable:
    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: {name} can't be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: {name} can't be deleted")


class Dim(_Immutable):
    """A size that is fixed when a plan runs, not when it is built.

    Equal names mean equal sizes within a graph. ``min``, ``max`` (inclusive) and ``multiple_of`` are part of the graph
    key; the value is not. Raises GraphError for an empty range.
    """

    __slots__ = ("max", "min", "multiple_of", "name")

    name: str
    min: int
    max: int
    multiple_of: int

    def __init__(self, name: str, min: int = 1, max: int = 2**31 - 1, multiple_of: int = 1) -> None:
        if not isinstance(name, str) or not name:
            raise GraphError(f"Dim needs a name, got {name!r}")
        for label, value in (("min", min), ("max", max), ("multiple_of", multiple_of)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise GraphError(f"Dim {name!r}: {label} must be an int, got {value!r}")
        if min < 0 or multiple_of < 1 or max < min:
            raise GraphError(
                f"Dim {name!r}: need 0 <= min <= max and multiple_of >= 1, got {min}, {max}, {multiple_of}"
            )
        if (max // multiple_of) * multiple_of < min:
            raise GraphError(f"Dim {name!r}: no multiple of {multiple_of} lies in [{min}, {max}]")
        for field, given in (("name", name), ("min", min), ("max", max), ("multiple_of", multiple_of)):
            object.__setattr__(self, field, given)

    @property
    def largest(self) -> int:
        """The largest admissible size: ``max`` rounded down to ``multiple_of``."""
        return self.max // self.multiple_of * self.multiple_of

    @property
    def hint(self) -> int:
        """The size that ranking assumes by default: the geometric mean of the range, made admissible."""
        low = max(1, self.min)
        mean = math.isqrt(low * max(1, self.max))
        return min(max(-(-mean // self.multiple_of) * self.multiple_of, self.smallest), self.largest)

    @property
    def smallest(self) -> int:
        return -(-self.min // self.multiple_of) * self.multiple_of

    def admits(self, value: int) -> bool:
        return self.min <= value <= self.max and value % self.multiple_of == 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Dim):
            return NotImplemented
        return self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __mul__(self, other: Extent) -> Extent:
        return product((self, other)) if _is_extent(other) else NotImplemented

    __rmul__ = __mul__

    def __repr__(self) -> str:
        parts = [repr(self.name), f"min={self.min}", f"max={self.max}"]
        if self.multiple_of != 1:
            parts.append(f"multiple_of={self.multiple_of}")
        return f"Dim({', '.join(parts)})"

    def __str__(self) -> str:
        return self.name

    def _fields(self) -> tuple[str, int, int, int]:
        return (self.name, self.min, self.max, self.multiple_of)

    def __reduce__(self) -> tuple[type[Dim], tuple[str, int, int, int]]:
        return (Dim, self._fields())


class Product(_Immutable):
    """``factor`` times the sizes of ``dims``; made by ``product``, which returns plain ints and Dims where it can."""

    __slots__ = ("dims", "factor")

    factor: int
    dims: tuple[Dim, ...]

    def __init__(self, factor: int, dims: tuple[Dim, ...]) -> None:
        object.__setattr__(self, "factor", factor)
        object.__setattr__(self, "dims", dims)

    def __reduce__(self) -> tuple[type[Product], tuple[int, tuple[Dim, ...]]]:
        return (Product, (self.factor, self.dims))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Product):
            return NotImplemented
        return self.factor == other.factor and self.dims == other.dims

    def __hash__(self) -> int:
        return hash((self.factor, self.dims))

    def __mul__(self, other: Extent) -> Extent:
        return product((self, other)) if _is_extent(other) else NotImplemented

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"Product({self.factor}, {self.dims!r})"

    def __str__(self) -> str:
        names = "*".join(dim.name for dim in self.dims)
        return names if self.factor == 1 else f"{self.factor}*{names}"


Extent = int | Dim | Product


def _is_extent(value: object) -> bool:
    return isinstance(value, (int, Dim, Product)) and not isinstance(value, bool)


def product(values: Iterable[Extent]) -> Extent:
    """The product of sizes, as an int, a Dim or a Product in canonical order (dims sorted by name).

    GraphError for a factor that is no int >= 0.
    """
    factor = 1
    dims: list[Dim] = []
    for value in values:
        if isinstance(value, Dim):
            dims.append(value)
        elif isinstance(value, Product):
            factor *= value.factor
            dims.extend(value.dims)
        elif _is_extent(value) and value >= 0:
            factor *= value
        else:
            raise GraphError(f"a size is an int >= 0 or a Dim, got {value!r}")
    if not dims or factor == 0:
        return factor
    if factor == 1 and len(dims) == 1:
        return dims[0]
    return Product(factor, tuple(sorted(dims, key=Dim._fields)))


def packed_strides(dim: Sequence[Extent], order: Sequence[int] | None = None) -> tuple[Extent, ...]:
    """Strides of a dense tensor; ``order`` lists the axes from slowest to fastest (default: row-major).

    Sizes of 0 and 1 keep the stride that the running product gives.
    """
    strides: list[Extent] = [1] * len(dim)
    running: Extent = 1
    for axis in reversed(range(len(dim)) if order is None else list(order)):
        strides[axis] = running
        size = dim[axis]
        if (
            type(size) is int and type(running) is int and size > 0
        ):  # as product says, and often asked while a plan runs
            running *= size
        elif size != 0:
            running = product((running, size))
    return tuple(strides)


def dims_of(values: Iterable[Extent]) -> Iterable[Dim]:
    """Every Dim that occurs in ``values``."""
    for value in values:
        if isinstance(value, Dim):
            yield value
        elif isinstance(value, Product):
            yield from value.dims


def evaluate(value: Extent, sizes: Mapping[str, int]) -> int:
    """``value`` with every Dim replaced by ``sizes[name]``; KeyError names a missing one."""
    if isinstance(value, int):
        return value
    if isinstance(value, Dim):
        return sizes[value.name]
    result = value.factor
    for dim in value.dims:
        result *= sizes[dim.name]
    return result


def same(a: Extent, b: Extent) -> bool:
    """Whether two sizes are certainly equal."""
    return a == b


def binds(value: Extent) -> Dim | None:
    """The Dim whose size a known value of the extent tells: that of a Dim, or of a product of one Dim alone."""
    dims = {*dims_of((value,))}
    return dims.pop() if len(dims) == 1 else None


def _solve(value: Extent, have: int) -> int | None:
    """The size of the one Dim of ``value`` at which it is ``have``, or None."""
    factor, power = (value.factor, len(value.dims)) if isinstance(value, Product) else (1, 1)
    root = have // factor if power == 1 else round((have // factor) ** (1 / power))
    return root if factor * root**power == have else None


def match_sizes(declared: Sequence[Extent], actual: Sequence[int], sizes: dict[str, int], operand: str) -> None:
    """Bind the Dims of ``declared`` to ``actual`` in ``sizes``; ExecutionError names the operand on a mismatch.

    A product of several Dims tells none of them: it is checked if all are known by now. So a caller that has matched every
    operand once checks everything by matching them again.
    """
    if len(declared) != len(actual):
        raise ExecutionError(
            f"operand {operand}: rank {len(actual)} where {len(declared)} is declared", operand=operand
        )
    for axis, (want, have) in enumerate(zip(declared, actual, strict=True)):
        dim = None if isinstance(want, int) else binds(want)
        if dim is not None:
            size = _solve(want, have)
            if size is None or not dim.admits(size):
                raise ExecutionError(f"operand {operand}: dim[{axis}] = {have} is outside {want!r}", operand=operand)
            known = sizes.setdefault(dim.name, size)
            if known != size:
                raise ExecutionError(
                    f"operand {operand}: dim[{axis}] = {have}, but {dim.name} is {known} elsewhere", operand=operand
                )
        elif all(item.name in sizes for item in dims_of((want,))) and evaluate(want, sizes) != have:
            raise ExecutionError(
                f"operand {operand}: shape {tuple(actual)} where {tuple(map(str, declared))} is declared",
                operand=operand,
            )


def overlap(dim: Sequence[int], stride: Sequence[int]) -> str:
    """What makes two elements of such a tensor share an address, in words; "" if none may.

    Conservative: axes must nest, each stride at or beyond the reach of the smaller ones.
    """
    reach = 0
    if 0 in dim:
        return ""
    for step, size in sorted((step, size) for size, step in zip(dim, stride, strict=True) if size > 1):
        if step <= reach:
            inner = f"stride {step} inside the {reach + 1} elements of its inner dimensions"
            return f"{inner if step else 'stride 0'} over a size of {size}"
        reach += step * (size - 1)
    return ""


def extent_to_json(value: Extent) -> object:
    """An int; ``{"dim": name, "min", "max", "multiple_of"}``; or ``{"factor": int, "dims": [...]}``."""
    if isinstance(value, int):
        return value
    if isinstance(value, Dim):
        return {"dim": value.name, "min": value.min, "max": value.max, "multiple_of": value.multiple_of}
    return {"factor": value.factor, "dims": [extent_to_json(dim) for dim in value.dims]}


def extent_from_json(value: object, where: str) -> Extent:
    """The inverse of ``extent_to_json``; GraphError names ``where``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, dict):
        if value.keys() == {"dim", "min", "max", "multiple_of"}:
            return Dim(value["dim"], min=value["min"], max=value["max"], multiple_of=value["multiple_of"])
        factor, dims = value.get("factor"), value.get("dims")
        if value.keys() == {"factor", "dims"} and type(factor) is int and factor > 0 and isinstance(dims, list):
            return product((factor, *(extent_from_json(item, where) for item in dims)))
    raise GraphError(f"{where}: {value!r} is not a size")

"""The epilogue of every GEMM kernel: accumulators in registers -> values of the program -> outputs.

A kernel drains its accumulators in chunks. In a chunk every thread holds V elements of each accumulator, at static offsets from a
position of its own:

    epilogue = Epilogue(program)                       # host object; what follows runs while a kernel is traced
    aux = epilogue.load(args, chunk)                   # optional: the reads of operands, ahead of the accumulators
    values = epilogue.evaluate(args, accs, chunk, aux)
    epilogue.store_vector(args, i, values, chunk)      # store i, from registers
    fragment = epilogue.converted(i, values)           # or: its elements for the kernel's own staging in shared memory
    epilogue.reduce(args, i, values, chunk, lanes)     # reduction i (``sinks``)

Operands are read where the chunk lies inside of the tensors; outside they are 0 and nothing is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Constexpr, Int32, cute

from ..ir import Aux, Op, Program, Ref, Store
from ..layout import BITS
from ..ops import TABLE
from . import sinks
from .access import BITS_TYPES, Access
from .args import ELEMENTS, Args
from .convert import INTEGERS, as_float, as_integer, narrow, rounded, widen
from .math import FloatMath, IntegerMath
from .vectors import assemble

__all__ = ["Chunk", "Epilogue", "Values"]

Vector = Any  # cute.TensorSSA of shape (V,)

# Ops whose result is one of their arguments, up to its sign: no rounding where the arguments have the result's type.
_EXACT = frozenset({"abs", "identity", "max", "min", "neg", "binary_select", "floor", "ceil"})


@dataclass(frozen=True)
class Chunk:
    """What one thread holds: element i lies at (row + offsets[i][0], col + offsets[i][1]) of batch ``batch``.

    row, col, batch  Int32, the position of offset (0, 0)
    offsets          static, distinct, none negative
    row_multiple     row (col) is known to be a multiple of it: allows vectors along that axis
    """

    row: Any
    col: Any
    batch: Any
    offsets: Constexpr
    row_multiple: Constexpr = 1
    col_multiple: Constexpr = 1

    @property
    def position(self) -> tuple[Any, Any, Any]:
        return self.row, self.col, self.batch

    def inside(self, args: Args) -> Boolean:
        """Whether every element lies inside of the output."""
        last_row = max(row for row, _ in self.offsets)
        last_col = max(col for _, col in self.offsets)
        return (self.row + last_row < args.m) & (self.col + last_col < args.n)


class Values(dict[Ref, Vector]):
    """The values of a chunk: Float32 vectors, Int32 where the declared type is an integer. ``narrow`` holds what rounding left in
    the declared type's storage form."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow: dict[Ref, Vector] = {}


class Epilogue:
    """Evaluates a program's pointwise ops and feeds its stores and reductions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.needed = _needed(program)
        self.deterministic = all(sinks.deterministic(reduction) for reduction in program.reductions)

    def load(self, args: Args, chunk: Chunk) -> dict[int, Vector]:
        """The aux operands that the program reads, one wide vector of (V,) each, by their index."""
        inside = chunk.inside(args)
        used = sorted(ref.index for ref in self.needed if ref.kind == "aux")
        return {index: self._aux(args, index, self.program.aux[index], chunk, inside) for index in used}

    def evaluate(
        self, args: Args, accs: Sequence[Vector], chunk: Chunk, aux: Mapping[int, Vector] | None = None
    ) -> Values:
        """Every value that the sinks need, rounded to its declared type. ``accs`` has a vector of V elements for each gemm."""
        size = len(chunk.offsets)
        values = Values()
        for index, vector in (self.load(args, chunk) if aux is None else aux).items():
            values[Ref("aux", index)] = vector
        for index, (gemm, acc) in enumerate(zip(self.program.gemms, accs, strict=True)):
            self._put(
                values, Ref("acc", index), acc.reshape((size,)), gemm.dtype, exact=gemm.dtype == self.program.accumulate
            )
        for index, op in enumerate(self.program.ops):
            if Ref("val", index) in self.needed:
                result = self._apply(op, [values[ref] for ref in op.args], chunk)
                self._put(values, Ref("val", index), result, op.dtype, exact=self._exact(op))
        return values

    def converted(self, index: int, values: Values) -> Vector:
        """The elements of store ``index`` in its storage type, rounded to it."""
        store = self.program.stores[index]
        small = values.narrow.get(store.value)
        same = self.dtype(store.value) == store.dtype
        return small if same and small is not None else narrow(values[store.value], store.dtype)

    def store_vector(self, args: Args, index: int, values: Values, chunk: Chunk) -> None:
        """Write store ``index`` from registers: inside the tensor in the widest vectors that its alignment and the offsets allow."""
        store = self.program.stores[index]
        bits = self.converted(index, values).bitcast(BITS_TYPES[BITS[store.dtype]])
        access = _access(store, chunk, chunk.offsets)
        access.store(args.store[index], bits, chunk.position, (args.m, args.n), chunk.inside(args))

    def reduce(self, args: Args, index: int, values: Values, chunk: Chunk, lanes: sinks.Lanes) -> None:
        """Add this chunk to reduction ``index``. ``lanes`` says which lanes of the warp hold other parts of the same rows and columns;
        all lanes of the warp call it, with chunks of equal offsets."""
        reduction = self.program.reductions[index]
        sinks.reduce(reduction, args, args.reduction[index], values[reduction.value], chunk, lanes)

    def seed(self, args: Args, stream: Any) -> None:
        """Launch what sets the reductions to their neutral elements. For host code, ahead of the kernel."""
        for reduction, tensor in zip(self.program.reductions, args.reduction or (), strict=True):
            sinks.seed(reduction, tensor, stream)

    def dtype(self, ref: Ref) -> str:
        """The declared data type of a value."""
        members: dict[str, Sequence[Any]] = {
            "acc": self.program.gemms,
            "val": self.program.ops,
            "aux": self.program.aux,
        }
        dtype: str = members[ref.kind][ref.index].dtype
        return dtype

    def _put(self, values: Values, ref: Ref, vector: Vector, dtype: str, exact: bool) -> None:
        small = None
        if not exact:
            vector, small = rounded(vector, dtype)
        elif dtype in INTEGERS:
            vector = as_integer(vector)
        else:
            vector = as_float(vector)
        values[ref] = vector
        if small is not None:
            values.narrow[ref] = small

    def _exact(self, op: Op) -> bool:
        """Whether rounding the result of ``op`` to its type changes nothing."""
        if TABLE[op.name].result == "mask":
            return True
        chosen = op.args[:2] if op.name == "binary_select" else op.args
        attrs = dict(op.attrs)
        scaled = (
            attrs.get("negative_slope") or attrs.get("lower_clip") is not None or attrs.get("upper_clip") is not None
        )
        choosing = op.name in _EXACT or (op.name == "relu" and not scaled)
        return choosing and all(self.dtype(ref) == op.dtype for ref in chosen)

    def _apply(self, op: Op, args: list[Vector], chunk: Chunk) -> Vector:
        row = TABLE[op.name]
        size = len(chunk.offsets)
        if op.compute == "int32":
            m: Any = IntegerMath(size, lambda axis: _index(chunk, axis), wide=op.dtype not in INTEGERS)
            args = [as_integer(arg) for arg in args]
        else:
            m = FloatMath(size)
            args = [as_float(arg) for arg in args]
        result = row.lower(m, *args, **_attrs(op, row.attrs))
        return m.select(result, m.const(1), m.const(0)) if row.result == "mask" else result

    def _aux(self, args: Args, index: int, aux: Aux, chunk: Chunk, inside: Boolean) -> Vector:
        """Aux ``index`` for every element of the chunk: read once for each distinct element, then spread."""
        operand = args.aux[index]
        if aux.by_value:
            distinct, places = [(0, 0)], [0] * len(chunk.offsets)
            bits = assemble([operand], type(operand))
        else:
            distinct, places = _distinct(aux.kind, chunk.offsets)
            access = _access(aux, chunk, tuple(distinct))
            bits = access.load(operand, chunk.position, (args.m, args.n), inside)
        vector = widen(bits.bitcast(ELEMENTS[aux.dtype]), aux.dtype)
        if len(distinct) == 1:
            return cute.full((len(places),), vector[0], vector.dtype)
        return (
            vector
            if places == list(range(len(distinct)))
            else assemble([vector[place] for place in places], vector.dtype)
        )


def _needed(program: Program) -> frozenset[Ref]:
    """The values that the sinks depend on."""
    pending = [store.value for store in program.stores] + [reduction.value for reduction in program.reductions]
    found: set[Ref] = set()
    while pending:
        ref = pending.pop()
        if ref not in found:
            found.add(ref)
            pending.extend(program.ops[ref.index].args if ref.kind == "val" else ())
    return frozenset(found)


def _attrs(op: Op, names: tuple[str, ...]) -> dict[str, Any]:
    given = dict(op.attrs)
    return {name: given.get(name) for name in names}


def _index(chunk: Chunk, axis: int) -> Vector:
    """The position of every element along axis 0 (batch), 1 (row) or 2 (column)."""
    if axis == 0:
        return cute.full((len(chunk.offsets),), chunk.batch, Int32)
    start = chunk.row if axis == 1 else chunk.col
    return assemble([start + offset[axis - 1] for offset in chunk.offsets], Int32)


def _distinct(kind: str, offsets: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[int]]:
    """The elements of an operand that a chunk needs, and for every element of the chunk which of them."""
    keep = {"scalar": (0, 0), "row": (1, 0), "col": (0, 1), "full": (1, 1)}[kind]
    wanted = [(row * keep[0], col * keep[1]) for row, col in offsets]
    distinct = list(dict.fromkeys(wanted))
    return distinct, [distinct.index(offset) for offset in wanted]


def _access(member: Aux | Store, chunk: Chunk, offsets: tuple[tuple[int, int], ...]) -> Access:
    kind = member.kind if isinstance(member, Aux) else "full"
    unit = {"m": 0, "n": 1, "": None}[member.major]
    multiple = 1
    if unit is not None:
        elements = max(1, member.alignment * 8 // BITS[member.dtype])
        multiple = math.gcd(elements, (chunk.row_multiple, chunk.col_multiple)[unit])
    checked = {"scalar": (False, False), "row": (True, False), "col": (False, True), "full": (True, True)}[kind]
    return Access(BITS[member.dtype], offsets, unit, multiple, checked)

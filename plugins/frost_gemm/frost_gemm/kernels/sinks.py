"""Reductions of an output: a partial result for each thread, lanes of a warp joined by shuffles, one atomic for each element.

``seed`` sets the outputs to the neutral element in a launch of its own, ahead of the kernel. Additions and products of floats depend on
the order of the atomics, so two runs may differ in the last bits (``deterministic``). A NaN makes the result NaN in every mode. Additions
and products of int32 wrap around, so their order does not matter; sizes saturate before they are added.
Imported by the epilogue.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import arith

from ..ir import Reduction
from ..ops import REDUCTIONS
from .convert import as_float, as_integer
from .vectors import inline

__all__ = ["DTYPES", "Lanes", "deterministic", "neutral", "reduce", "seed"]

DTYPES = {"float32": Float32, "int32": Int32}
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
SEED_THREADS = 256
_RELAXED: Any = {"sem": "relaxed", "scope": "gpu"}  # the kernel's end orders them for whoever reads the output
# Bits that win every comparison of the integers that floats are compared as: a NaN that no number replaces.
NAN_OF_MAX, NAN_OF_MIN = 0x7FFFFFFF, -1


class Lanes(NamedTuple):
    """How the lanes of a warp share a chunk, as powers of two that a lane's number is XORed with.

    row  to lanes that hold other columns of the same rows: (1, 2) for wgmma, () for tcgen05
    col  to lanes that hold other rows of the same columns: (4, 8, 16) for wgmma, (1, 2, 4, 8, 16) for tcgen05
    """

    row: tuple[int, ...]
    col: tuple[int, ...]


def deterministic(reduction: Reduction) -> bool:
    """Whether every run gives the same bits."""
    return reduction.dtype == "int32" or REDUCTIONS[reduction.mode].combine in ("min", "max")


def neutral(reduction: Reduction) -> float | int:
    """The value that the reduction starts from."""
    identity = REDUCTIONS[reduction.mode].identity
    if reduction.dtype != "int32":
        return identity
    return int(min(max(identity, INT32_MIN), INT32_MAX))


def reduce(
    reduction: Reduction, args: Any, tensor: cute.Tensor, values: cute.TensorSSA, chunk: Any, lanes: Lanes
) -> None:
    """Add a chunk's values to ``tensor``, [M, N, L] with stride 0 along reduced axes. Elements outside of M, N are skipped."""
    _Reduce(reduction, args, chunk).run(tensor, values, lanes)


class _Item(NamedTuple):
    """A partial result for the element at (row, col) from the chunk's position. Lanes with a bit of ``copies`` hold a copy."""

    value: Any
    row: Any
    col: Any
    copies: int = 0


class _Reduce:
    def __init__(self, reduction: Reduction, args: Any, chunk: Any) -> None:
        self.reduction, self.args, self.chunk = reduction, args, chunk
        self.mode = REDUCTIONS[reduction.mode]
        self.dtype = DTYPES[reduction.dtype]
        self.identity = self.dtype(neutral(reduction))

    def run(self, tensor: cute.Tensor, values: cute.TensorSSA, lanes: Lanes) -> None:
        items = self._in_thread(self._prepared(values))
        for distance in (*self._when("n", lanes.row), *self._when("m", lanes.col)):
            items = self._across(items, distance)
        lane = cute.arch.lane_idx()
        for item in items:
            self._add(tensor, item, (lane & item.copies) == 0)

    def _when(self, axis: str, distances: tuple[int, ...]) -> tuple[int, ...]:
        return distances if axis in self.reduction.axes else ()

    def _prepared(self, values: cute.TensorSSA) -> cute.TensorSSA:
        values = as_float(values) if self.dtype is Float32 else as_integer(values)
        if self.mode.prepare == "abs":
            if self.dtype is Float32:
                return cute.math.abs(values)
            # The size of the smallest int32 saturates: it has no int32.
            lowest = cute.full_like(values, -INT32_MAX)
            values = cute.where(values < lowest, lowest, values)
            return cute.where(values < cute.full_like(values, 0), -values, values)
        if self.mode.prepare == "nonzero":
            return cute.where(values == cute.full_like(values, 0), cute.full_like(values, 1), values)
        return values

    def _in_thread(self, values: cute.TensorSSA) -> list[_Item]:
        """One item for each element of the output that this thread has a part of."""
        chunk, args = self.chunk, self.args
        rows = {row: chunk.row + row < args.m for row, _ in chunk.offsets}
        cols = {col: chunk.col + col < args.n for _, col in chunk.offsets}
        parts: dict[tuple[int, int], Any] = {}
        for index, (row, col) in enumerate(chunk.offsets):
            value = self._select(rows[row] & cols[col], values[index], self.identity)
            key = (0 if "m" in self.reduction.axes else row, 0 if "n" in self.reduction.axes else col)
            parts[key] = self._combine(parts[key], value) if key in parts else value
        return [_Item(value, Int32(row), Int32(col)) for (row, col), value in parts.items()]

    def _across(self, items: list[_Item], distance: int) -> list[_Item]:
        """Join the items of two lanes: each keeps half of them, and gives the other half away. An odd one both keep."""
        upper = (cute.arch.lane_idx() & distance) != 0
        half = len(items) // 2
        joined = []
        for low, high in zip(items[:half], items[half : 2 * half], strict=True):
            kept = self._select(upper, high.value, low.value)
            given = self._select(upper, low.value, high.value)
            value = self._combine(kept, cute.arch.shuffle_sync_bfly(given, distance))
            row, col = self._select(upper, high.row, low.row), self._select(upper, high.col, low.col)
            joined.append(_Item(value, row, col, low.copies))
        for item in items[2 * half :]:
            value = self._combine(item.value, cute.arch.shuffle_sync_bfly(item.value, distance))
            joined.append(item._replace(value=value, copies=item.copies | distance))
        return joined

    def _combine(self, a: Any, b: Any) -> Any:
        if self.mode.combine == "add":
            return a + b
        if self.mode.combine == "mul":
            return a * b
        kind = "NaN.f32" if self.dtype is Float32 else "s32"
        return self.dtype(inline(f"{self.mode.combine}.{kind} $0, $1, $2;", self.dtype.mlir_type, [a, b]))

    def _select(self, condition: Boolean, a: Any, b: Any) -> Any:
        return type(a)(arith.select(Boolean(condition).ir_value(), a.ir_value(), b.ir_value()))

    def _add(self, tensor: cute.Tensor, item: _Item, mine: Boolean) -> None:
        value = item.value
        if self.mode.divide:
            value = value / self._count()
        row, col = self.chunk.row + item.row, self.chunk.col + item.col
        # Along a reduced axis a lane may lie outside and yet hold what others gave it.
        valid = mine if "m" in self.reduction.axes else mine & (row < self.args.m)
        valid = valid if "n" in self.reduction.axes else valid & (col < self.args.n)
        offset = Int64(0)
        for coordinate, stride in zip((row, col, self.chunk.batch), tensor.stride, strict=True):
            if not (isinstance(stride, int) and stride == 0):
                offset = offset + Int64(coordinate) * Int64(stride)
        combine = "largest" if self.dtype is Float32 and self.reduction.mode == "AMAX" else self.mode.combine
        _atomic(combine, self.dtype, tensor.iterator + offset, value, valid)

    def _count(self) -> Float32:
        """The values that one element of the output is made of."""
        count = Float32(1.0)
        for axis, extent in zip("mnl", (self.args.m, self.args.n, self.args.l), strict=True):
            count = count * Float32(extent) if axis in self.reduction.axes else count
        return count


@cute.jit
def _atomic(
    combine: cutlass.Constexpr, dtype: cutlass.Constexpr, pointer: cute.Pointer, value: cutlass.Numeric, valid: Boolean
) -> None:
    if valid:
        if cutlass.const_expr(combine == "add"):
            cute.arch.red(pointer, value, op="add", dtype=dtype, **_RELAXED)
        elif cutlass.const_expr(combine == "mul"):
            _multiply(dtype, pointer, value)
        elif cutlass.const_expr(combine == "largest"):
            # Without a sign, floats are in the order of their bits, and every NaN is above infinity.
            bits = Int32(arith.bitcast(Int32.mlir_type, value.ir_value())) & INT32_MAX
            cute.arch.red(cute.recast_ptr(pointer, dtype=Int32), bits, op="max", dtype=Int32, **_RELAXED)
        elif cutlass.const_expr(dtype is Int32):
            cute.arch.red(pointer, value, op=combine, dtype=Int32, **_RELAXED)
        else:
            _extreme(combine, pointer, value)


@cute.jit
def _extreme(combine: cutlass.Constexpr, pointer: cute.Pointer, value: Float32) -> None:
    """max or min of floats as integers: non-negative ones are in the order of signed, negative ones in the reverse order of
    unsigned integers."""
    place = cute.recast_ptr(pointer, dtype=Int32)
    bits = Int32(arith.bitcast(Int32.mlir_type, value.ir_value()))
    if value != value:
        bits = Int32(NAN_OF_MAX if combine == "max" else NAN_OF_MIN)
    if bits < 0:
        cute.arch.red(
            place, cutlass.Uint32(bits), op="min" if combine == "max" else "max", dtype=cutlass.Uint32, **_RELAXED
        )
    else:
        cute.arch.red(place, bits, op=combine, dtype=Int32, **_RELAXED)


@cute.jit
def _multiply(dtype: cutlass.Constexpr, pointer: cute.Pointer, value: cutlass.Numeric) -> None:
    """Compare and swap until nobody else has come in between."""
    place = cute.recast_ptr(pointer, dtype=Int32)
    one = dtype(1)
    seen = Int32(arith.bitcast(Int32.mlir_type, one.ir_value()))  # a guess; a plain read would race
    pending = Boolean(True)
    while pending:
        product = dtype(arith.bitcast(dtype.mlir_type, seen.ir_value())) * value
        found = cute.arch.atomic_cas(
            place, cmp=seen, val=Int32(arith.bitcast(Int32.mlir_type, product.ir_value())), **_RELAXED
        )
        pending = found != seen
        seen = found


def seed(reduction: Reduction, tensor: cute.Tensor, stream: Any) -> None:
    """Launch a kernel that writes the neutral element to every element of the output ``tensor``. For host code."""
    extents = tuple(1 if axis in reduction.axes else extent for axis, extent in zip("mnl", tensor.shape, strict=True))
    count = Int64(1)
    for extent in extents:
        count = count * Int64(extent)
    blocks = Int32((count + (SEED_THREADS - 1)) // SEED_THREADS)
    _Seed(reduction).kernel(tensor, extents, count).launch(
        grid=(blocks, 1, 1), block=(SEED_THREADS, 1, 1), stream=stream
    )


class _Seed:
    def __init__(self, reduction: Reduction) -> None:
        self.value = DTYPES[reduction.dtype](neutral(reduction))

    @cute.kernel
    def kernel(self, tensor: cute.Tensor, extents: tuple[Any, ...], count: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = Int64(block) * SEED_THREADS + Int64(thread)
        if index < count:
            rest = index // Int64(extents[1])
            row, col, batch = rest % Int64(extents[0]), index % Int64(extents[1]), rest // Int64(extents[0])
            offset = Int64(0)
            for axis, coordinate in enumerate((row, col, batch)):
                offset = offset + coordinate * Int64(tensor.stride[axis])
            cute.make_tensor(tensor.iterator + offset, cute.make_layout(1))[0] = self.value

"""A thread's elements of an [M, N, L] tensor in global memory: vector loads and stores inside, element by element at the edges.

Elements travel as integers of their width. Imported by the epilogue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Int64, cute

__all__ = ["BITS_TYPES", "Access"]

VECTOR_BITS = 128  # PTX ISA, ld and st: the widest vector of global memory on every architecture here
BITS_TYPES: dict[int, Any] = {8: cutlass.Uint8, 16: cutlass.Uint16, 32: cutlass.Int32}


class Access:
    """Elements at static offsets (row, column) from a position that is known at run time.

    bits      of an element
    offsets   one (row, column) for each element
    unit      the axis of unit stride, 0 or 1; None where neither is known to be
    multiple  elements that the position along ``unit``, the other strides and the address are multiples of
    checked   the axes along which elements may lie outside of the tensor
    """

    def __init__(
        self,
        bits: int,
        offsets: tuple[tuple[int, int], ...],
        unit: int | None = None,
        multiple: int = 1,
        checked: tuple[bool, bool] = (True, True),
    ) -> None:
        # Not a dataclass: the DSL would make run-time values of its fields.
        self.bits, self.offsets, self.unit, self.multiple, self.checked = bits, offsets, unit, multiple, checked

    def segments(self) -> list[tuple[int, ...]]:
        """The elements, by their indices, in vectors: neighbours along the unit axis, aligned to their whole size."""
        if self.unit is None:
            return [(i,) for i in range(len(self.offsets))]
        rest = {offset: i for i, offset in enumerate(self.offsets)}
        assert len(rest) == len(self.offsets), "elements are distinct"
        widest = math.gcd(self.multiple, VECTOR_BITS // self.bits)
        parts = []
        for offset in sorted(rest, key=lambda o: (o[1 - self.unit], o[self.unit])):
            if offset not in rest:
                continue
            along = offset[self.unit]
            width = widest
            while along % width or any(self._next(offset, step) not in rest for step in range(width)):
                width //= 2
            parts.append(tuple(rest.pop(self._next(offset, step)) for step in range(width)))
        return parts

    def _next(self, offset: tuple[int, int], steps: int) -> tuple[int, int]:
        return (offset[0] + steps, offset[1]) if self.unit == 0 else (offset[0], offset[1] + steps)

    @cute.jit
    def load(self, tensor: cute.Tensor, position: Any, extents: Any, inside: Boolean) -> cute.TensorSSA:
        """The elements as a vector of integers; those outside of ``extents`` (M, N) are 0 and are not read.

        ``position`` is (row, column, batch); ``inside`` says that every element lies inside.
        """
        values = cute.make_rmem_tensor(len(self.offsets), BITS_TYPES[self.bits])
        if inside:
            for segment in self.segments():
                part = self._vector(tensor, position, segment).load()
                for place, index in enumerate(segment):
                    values[index] = part[place]
        else:
            for index in cutlass.range_constexpr(len(self.offsets)):
                values[index] = BITS_TYPES[self.bits](0)
                if self._valid(index, position, extents):
                    values[index] = self._vector(tensor, position, (index,))[0]
        return values.load()

    @cute.jit
    def store(self, tensor: cute.Tensor, values: cute.TensorSSA, position: Any, extents: Any, inside: Boolean) -> None:
        """Write a vector of integers to the elements; those outside of ``extents`` are not written."""
        registers = cute.make_rmem_tensor(len(self.offsets), BITS_TYPES[self.bits])
        registers.store(values)
        if inside:
            for segment in self.segments():
                part = cute.make_rmem_tensor(len(segment), BITS_TYPES[self.bits])
                for place, index in enumerate(segment):
                    part[place] = registers[index]
                self._vector(tensor, position, segment).store(part.load())
        else:
            for index in cutlass.range_constexpr(len(self.offsets)):
                if self._valid(index, position, extents):
                    element = self._vector(tensor, position, (index,))
                    element[0] = registers[index]

    def _valid(self, index: int, position: Any, extents: Any) -> Boolean:
        valid = Boolean(True)
        for axis, offset in enumerate(self.offsets[index]):
            if self.checked[axis]:
                valid = valid & (position[axis] + offset < extents[axis])
        return valid

    def _vector(self, tensor: cute.Tensor, position: Any, segment: Sequence[int]) -> cute.Tensor:
        """The global memory of one segment, as integers."""
        offset = self.offsets[segment[0]]
        # What is dynamic comes first, so that the rest is an immediate of the instruction.
        dynamic, along = Int64(0), 0
        for axis, stride in enumerate(tensor.stride):
            if isinstance(stride, int) and stride == 0:
                continue
            coordinate = position[axis] if axis == 2 or axis == self.unit else position[axis] + offset[axis]
            dynamic = dynamic + Int64(coordinate) * (1 if axis == self.unit else Int64(stride))
            along = offset[axis] if axis == self.unit else along
        pointer = cute.recast_ptr(tensor.iterator, dtype=BITS_TYPES[self.bits])
        if self.unit is not None:
            dynamic = cute.assume(dynamic, divby=self.multiple)
        return cute.make_tensor(pointer + dynamic + along, cute.make_layout(len(segment)))

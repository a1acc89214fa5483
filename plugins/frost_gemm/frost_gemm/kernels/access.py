"""A thread's elements of an [M, N, L] tensor in global memory: vector loads and stores inside, predicated ones at the edges.

Elements travel as integers of their width. Imported by the epilogue.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

from .vectors import assemble, extract, inline

__all__ = ["BITS_TYPES", "Access"]

VECTOR_BITS = 128  # PTX ISA, ld and st: the widest vector of global memory on every architecture here
BITS_TYPES: dict[int, Any] = {8: cutlass.Uint8, 16: cutlass.Uint16, 32: cutlass.Int32}

# $0 is written after the last operand that could share its register has been read.
_LOAD = "{{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b{bits} $0, [$1+{bytes}]; }}"
_STORE = "{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b{bits} [$0+{bytes}], $1; }}"


class Access:
    """Elements at static offsets (row, column) from a position that is known at run time.

    bits      of an element
    offsets   one (row, column) for each element, distinct
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
        self.type = BITS_TYPES[bits]

    def segments(self) -> list[tuple[int, ...]]:
        """The elements, by their indices, in vectors: neighbours along the unit axis, aligned to their whole size."""
        unit = self.unit
        if unit is None:
            return [(i,) for i in range(len(self.offsets))]
        rest = {offset: i for i, offset in enumerate(self.offsets)}
        assert len(rest) == len(self.offsets), "elements are distinct"
        widest = math.gcd(self.multiple, VECTOR_BITS // self.bits)
        parts = []
        for offset in sorted(rest, key=lambda o: (o[1 - unit], o[unit])):
            if offset not in rest:
                continue
            width = widest
            while offset[unit] % width or any(self._next(offset, step) not in rest for step in range(width)):
                width //= 2
            parts.append(tuple(rest.pop(self._next(offset, step)) for step in range(width)))
        return parts

    @cute.jit
    def load(self, tensor: cute.Tensor, position: Any, extents: Any, inside: Boolean) -> cute.TensorSSA:
        """The elements as a vector of integers; those outside of ``extents`` (M, N) are 0 and are not read.

        ``position`` is (row, column, batch); ``inside`` says that every element lies inside.
        """
        lines = self._lines(tensor, position)
        values = cute.full((len(self.offsets),), 0, self.type)
        if cutlass.const_expr(not any(self.checked)) or inside:
            values = self._read(lines)
        else:
            values = self._read_valid(lines, self._valid(position, extents))
        return values

    @cute.jit
    def store(self, tensor: cute.Tensor, values: cute.TensorSSA, position: Any, extents: Any, inside: Boolean) -> None:
        """Write a vector of integers to the elements; those outside of ``extents`` are not written."""
        lines = self._lines(tensor, position)
        if inside:
            self._write(lines, values)
        else:
            self._write_valid(lines, values, self._valid(position, extents))

    def _next(self, offset: tuple[int, int], steps: int) -> tuple[int, int]:
        return (offset[0] + steps, offset[1]) if self.unit == 0 else (offset[0], offset[1] + steps)

    def _line(self, offset: tuple[int, int]) -> tuple[int, int]:
        """What elements of the same line along the unit axis have in common."""
        return 0 if self.unit == 0 else offset[0], 0 if self.unit == 1 else offset[1]

    def _lines(self, tensor: cute.Tensor, position: Any) -> dict[tuple[int, int], cute.Pointer]:
        """The address of every line at the position; the elements lie at static distances from it."""
        pointer = cute.recast_ptr(tensor.iterator, dtype=self.type)
        found = {}
        for offset in dict.fromkeys(self._line(offset) for offset in self.offsets):
            distance = Int64(0)
            for axis, stride in enumerate(tensor.stride):
                if isinstance(stride, int) and stride == 0:
                    continue
                coordinate = position[axis] + offset[axis] if axis < 2 and offset[axis] else position[axis]
                distance = distance + (Int64(coordinate) if axis == self.unit else Int64(coordinate) * Int64(stride))
            found[offset] = pointer + cute.assume(distance, divby=self.multiple)
        return found

    def _valid(self, position: Any, extents: Any) -> list[Int32]:
        """For each element 1 where it lies inside, else 0."""
        inside = {
            (axis, steps): position[axis] + steps < extents[axis]
            for axis in (0, 1)
            if self.checked[axis]
            for steps in dict.fromkeys(offset[axis] for offset in self.offsets)
        }
        valid = []
        for offset in self.offsets:
            both = Boolean(True)
            for axis in (0, 1):
                both = both & inside[axis, offset[axis]] if self.checked[axis] else both
            valid.append(Int32(both))
        return valid

    def _place(self, lines: dict[tuple[int, int], cute.Pointer], index: int) -> tuple[cute.Pointer, int]:
        """The line of an element and its distance in elements."""
        offset = self.offsets[index]
        return lines[self._line(offset)], 0 if self.unit is None else offset[self.unit]

    def _read(self, lines: dict[tuple[int, int], cute.Pointer]) -> cute.TensorSSA:
        values: list[Any] = [None] * len(self.offsets)
        for segment in self.segments():
            line, along = self._place(lines, segment[0])
            kind = ir.VectorType.get([len(segment)], self.type.mlir_type)
            part = llvm.load(kind, (line + along).to_llvm_ptr(), alignment=len(segment) * self.bits // 8)
            for place, index in enumerate(segment):
                values[index] = extract(part, place)
        return assemble(values, self.type)

    def _write(self, lines: dict[tuple[int, int], cute.Pointer], values: cute.TensorSSA) -> None:
        for segment in self.segments():
            line, along = self._place(lines, segment[0])
            part = assemble([extract(values, index) for index in segment], self.type)
            llvm.store(part.ir_value(), (line + along).to_llvm_ptr(), alignment=len(segment) * self.bits // 8)

    def _read_valid(self, lines: dict[tuple[int, int], cute.Pointer], valid: list[Int32]) -> cute.TensorSSA:
        values = []
        for index, condition in enumerate(valid):
            line, along = self._place(lines, index)
            text = _LOAD.format(bits=self.bits, bytes=along * self.bits // 8)
            loaded = Int32(inline(text, Int32.mlir_type, [line.toint(), condition], effects=True))
            values.append(loaded.to(self.type))
        return assemble(values, self.type)

    def _write_valid(
        self, lines: dict[tuple[int, int], cute.Pointer], values: cute.TensorSSA, valid: list[Int32]
    ) -> None:
        for index, condition in enumerate(valid):
            line, along = self._place(lines, index)
            text = _STORE.format(bits=self.bits, bytes=along * self.bits // 8)
            value = self.type(extract(values, index)).to(Int32)
            inline(text, None, [line.toint(), value, condition], effects=True)

"""Operands that are computed on the way to the matrix unit: elements of A or B in registers -> what the MMA multiplies.

A prologue is a chain of pointwise ops with scalars, so it is evaluated as the epilogue of a program whose only accumulator is the
operand itself. Past the end of K elements come as zeros, of which a chain such as exp makes something else: those are cleared.
Imported by the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Uint32, cute
from cutlass._mlir.dialects import arith

from ..ir import Gemm, Matrix, Program, Ref, Store
from ..layout import BITS
from ..ops import keeps_zero
from .args import Args
from .convert import BYTES, INTEGERS, floats_of_bytes, widen
from .epilogue import Chunk, Epilogue

__all__ = ["Prologue"]

ELEMENT = Ref("acc", 0)


def _in_integers(program: Program, matrix: Matrix) -> bool:
    """Whether a prologue computes anything that fp32 may not hold exactly: 8-bit integers and what selects among them are safe."""
    scalars = [program.aux[ref.index].dtype for op in matrix.prologue for ref in op.args if ref.kind == "aux"]
    return any(dtype in INTEGERS for dtype in (*scalars, *(op.dtype for op in matrix.prologue)))


class Prologue:
    """The ops of ``matrix``, on vectors of ``size`` elements. The scalars are aux operands of ``program``."""

    def __init__(self, program: Program, matrix: Matrix, size: int) -> None:
        self.from_bytes = matrix.dtype in BYTES and size % 4 == 0 and not _in_integers(program, matrix)
        kind = "int32" if matrix.dtype in INTEGERS and not self.from_bytes else "float32"
        ops = tuple(
            replace(op, args=tuple(ELEMENT if ref == Ref("val", -1) else ref for ref in op.args))
            for op in matrix.prologue
        )
        last = Ref("val", len(ops) - 1)
        self.dtype, self.size, self.bits = matrix.dtype, size, BITS[matrix.mma_dtype]
        self.keeps_zero = keeps_zero(matrix.prologue)
        self.epilogue = Epilogue(
            replace(
                program, gemms=(Gemm(dtype=kind),), ops=ops, stores=(Store(last, matrix.mma_dtype),), reductions=(), accumulate=kind
            )
        )  # fmt: skip

    def chunk(self, batch: Int32) -> Chunk:
        """Where scalars are read: they have no rows and columns."""
        return Chunk(Int32(0), Int32(0), batch, tuple((0, element) for element in range(self.size)))

    def load(self, args: Args, batch: Int32) -> dict[int, Any]:
        """The scalars of a batch, for ``apply``."""
        return self.epilogue.load(args, self.chunk(batch))

    def apply(self, args: Args, elements: cute.TensorSSA, batch: Int32, scalars: dict[int, Any]) -> cute.TensorSSA:
        """The operand's elements, (size,) of the type that is multiplied, from those in memory."""
        wide = floats_of_bytes(elements, self.dtype) if self.from_bytes else widen(elements, self.dtype)
        return self.epilogue.converted(0, self.epilogue.evaluate(args, [wide], self.chunk(batch), scalars))

    def clear_beyond(self, made: cute.Tensor, k: Int32, step: int, end: Int32) -> None:
        """Set the elements of ``made``, in registers, that lie past the end of K to 0, if the chain may have made something else.

        The first element is at ``k``, the others each ``step`` (0 or 1) further.
        """
        if not self.keeps_zero:
            self._clear(made, k, step, end)

    @cute.jit
    def _clear(self, made: cute.Tensor, k: Int32, step: cutlass.Constexpr, end: Int32) -> None:
        if k + step * (self.size - 1) >= end:
            words = cute.recast_tensor(made, Uint32)
            of_word = 32 // self.bits
            for word in cutlass.range_constexpr(self.size // of_word):
                mask = Uint32(0)
                for i in cutlass.range_constexpr(of_word):
                    inside = k + step * (word * of_word + i) < end
                    mask = mask | self._bits_if(inside, ((1 << self.bits) - 1) << (self.bits * i))
                words[word] = words[word] & mask

    def _bits_if(self, condition: Boolean, bits: int) -> Uint32:
        """``bits`` where the condition holds, else 0."""
        return Uint32(arith.select(Boolean(condition).ir_value(), Uint32(bits).ir_value(), Uint32(0).ir_value()))

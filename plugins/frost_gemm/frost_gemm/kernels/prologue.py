"""Operands that are computed on the way to the matrix unit: elements of A or B in registers -> what the MMA multiplies.

A prologue is a chain of pointwise ops with scalars, so it is evaluated as the epilogue of a program whose only accumulator is the
operand itself. Imported by the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutlass import Int32, cute

from ..ir import Gemm, Matrix, Program, Ref, Store
from .args import Args
from .convert import INTEGERS, widen
from .epilogue import Chunk, Epilogue

__all__ = ["Prologue"]

ELEMENT = Ref("acc", 0)


class Prologue:
    """The ops of ``matrix``, on vectors of ``size`` elements. The scalars are aux operands of ``program``."""

    def __init__(self, program: Program, matrix: Matrix, size: int) -> None:
        kind = "int32" if matrix.dtype in INTEGERS else "float32"
        ops = tuple(
            replace(op, args=tuple(ELEMENT if ref == Ref("val", -1) else ref for ref in op.args))
            for op in matrix.prologue
        )
        last = Ref("val", len(ops) - 1)
        self.dtype, self.size = matrix.dtype, size
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
        wide = widen(elements, self.dtype)
        return self.epilogue.converted(0, self.epilogue.evaluate(args, [wide], self.chunk(batch), scalars))

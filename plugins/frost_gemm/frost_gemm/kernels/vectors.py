"""Vectors of registers element by element: inline PTX on each element or on pairs, and assembly from scalars.

The vectors are the DSL's ``TensorSSA`` of shape (V,). Inline PTX is used where the DSL has no operation with the exact instruction.
Imported by ``math``, ``convert`` and ``access``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int64, Numeric, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, vector
from cutlass.cutlass_dsl import BaseDSL

__all__ = ["assemble", "each", "each_f32", "extract", "inline", "on_pairs", "size"]

# PTX register classes of the inline assembly's constraints.
_REGISTER = {"f32": "f", "i32": "r", "i16": "h", "i64": "l"}


def size(x: cute.TensorSSA) -> int:
    """Elements of a vector."""
    count: int = cute.size(x.shape)
    return count


def extract(x: cute.TensorSSA, index: int) -> ir.Value:
    """Element ``index`` of a vector, as a bare value of its element type."""
    return vector.extract(x, [], [index])


def assemble(values: Sequence[Any], dtype: Any) -> cute.TensorSSA:
    """The vector of these scalars, each of type ``dtype``."""
    bare = [value.ir_value() if isinstance(value, Numeric) else value for value in values]
    return cute.TensorSSA(
        vector.from_elements(ir.VectorType.get([len(bare)], dtype.mlir_type), bare), (len(bare),), dtype
    )


def each(instruction: str, dtype: Any, *operands: cute.TensorSSA) -> cute.TensorSSA:
    """``instruction`` (PTX, without operands) on every element; the result is a vector of ``dtype``."""
    count = size(operands[0])
    return assemble(
        [_instruction(instruction, dtype.mlir_type, [extract(x, i) for x in operands]) for i in range(count)], dtype
    )


def each_f32(instruction: str, *operands: cute.TensorSSA) -> cute.TensorSSA:
    """As ``each`` for ``instruction``.f32, two elements at a time where the architecture has ``instruction``.f32x2 (PTX ISA, fma)."""
    count = size(operands[0])
    if not _has_f32x2():
        return each(f"{instruction}.f32", Float32, *operands)
    pair, bits = ir.VectorType.get([2], Float32.mlir_type), Int64.mlir_type
    values: list[Any] = []
    for i in range(0, count - 1, 2):
        inputs = [llvm.bitcast(bits, vector.from_elements(pair, [extract(x, i), extract(x, i + 1)])) for x in operands]
        both = llvm.bitcast(pair, _instruction(f"{instruction}.f32x2", bits, inputs))
        values += [vector.extract(both, [], [0]), vector.extract(both, [], [1])]
    if count % 2:
        values.append(_instruction(f"{instruction}.f32", Float32.mlir_type, [extract(x, count - 1) for x in operands]))
    return assemble(values, Float32)


def _has_f32x2() -> bool:
    """Whether the target of this compilation is Blackwell or later."""
    major: int = BaseDSL._get_dsl().get_arch_enum().major
    return major >= 10


def on_pairs(instruction: str, pair: Any, dtype: Any, x: cute.TensorSSA) -> cute.TensorSSA:
    """``instruction`` on elements (1, 0), (3, 2), ...: each result, of type ``pair``, holds two elements of ``dtype``.

    The second operand of PTX's packed conversions goes to the lower half. An odd last element is paired with itself.
    """
    count = size(x)
    last = count - 1
    pairs = [
        _instruction(instruction, pair.mlir_type, [extract(x, min(i + 1, last)), extract(x, i)])
        for i in range(0, count, 2)
    ]
    packed = assemble(pairs, pair).bitcast(dtype)
    return packed if count % 2 == 0 else assemble([extract(packed, i) for i in range(count)], dtype)


def _instruction(name: str, result: ir.Type, operands: list[ir.Value]) -> ir.Value:
    places = ", ".join(f"${i}" for i in range(len(operands) + 1))
    return inline(f"{name} {places};", result, operands)


def inline(text: str, result: ir.Type | None, operands: Sequence[Any], effects: bool = False) -> Any:
    """Inline PTX. $0 is the result, where there is one; ``effects`` keeps it in place, for what touches memory."""
    bare = [operand.ir_value() if isinstance(operand, Numeric) else operand for operand in operands]
    inputs = [_REGISTER[str(operand.type)] for operand in bare]
    outputs = [] if result is None else [f"={_REGISTER[str(result)]}"]
    return llvm.inline_asm(
        result,
        bare,
        text,
        ",".join(outputs + inputs),
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )

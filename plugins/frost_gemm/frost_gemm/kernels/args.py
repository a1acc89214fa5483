"""The arguments of a kernel: from the block of int64 words (``ir.argument_words``) to tensors of device memory.

``unpack`` runs in the host function; its ``Args`` cross the boundary of the kernel. What a program fixes is static in the layouts: unit
strides, the 0 strides of broadcast axes, the divisibility of the others; extents are Int32 and strides Int64. ``boolean`` lies in memory as
uint8 0 or 1. Imported by the kernels, the epilogue and the sinks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from ..ir import Aux, Matrix, Program, Reduction, Store, argument_words
from ..layout import BITS

__all__ = ["ELEMENTS", "Args", "matrix", "output", "unpack"]

# How the elements of a data type are declared to the DSL.
ELEMENTS: dict[str, Any] = {
    "float32": cutlass.Float32,
    "int32": cutlass.Int32,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "fp8_e4m3": cutlass.Float8E4M3FN,
    "fp8_e5m2": cutlass.Float8E5M2,
    "int8": cutlass.Int8,
    "uint8": cutlass.Uint8,
    "boolean": cutlass.Uint8,
}

# A by-value element travels as its bits: host code need not know narrow floats.
_BITS_TYPES = {8: cutlass.Uint8, 16: cutlass.Uint16}


class Args(NamedTuple):
    """m, n, k, l: extents, Int32. workspace: a pointer to bytes, 16-byte aligned.

    a, b       tensors [M, K, L] and [N, K, L]; L is 1 for a matrix that is not batched
    aux        tensors [M, N, L] with stride 0 along broadcast axes; a by-value scalar is its value (float32, int32) or its bits
    store      tensors [M, N, L]
    reduction  tensors [M, N, L] with stride 0 along reduced axes
    A group without members is None.
    """

    m: Any
    n: Any
    k: Any
    l: Any  # noqa: E741 - the letter of the contract
    workspace: Any
    a: Any
    b: Any
    aux: Any
    store: Any
    reduction: Any

    def without_operands(self) -> Args:
        """For a kernel that reads A and B through TMA: their tensors would be parameters that nobody reads."""
        return self._replace(a=None, b=None)


def matrix(args: Args, group: str, index: int) -> cute.Tensor:
    """[rows, K, L] of operand ``index`` of group "a" or "b", in global memory."""
    return getattr(args, group)[index]


def output(args: Args, index: int) -> cute.Tensor:
    """[M, N, L] of store ``index``, in global memory."""
    return args.store[index]


def unpack(program: Program, words: Int64) -> Args:
    """The arguments in the block at host address ``words``. For host code."""
    names = argument_words(program)
    pointer = cute.make_ptr(Int64, words, cute.AddressSpace.generic, assumed_align=8)
    block = cute.make_tensor(pointer, cute.make_layout(len(names)))
    return _Unpacker(program, {name: block[index] for name, index in names.items()}).args()


class _Unpacker:
    def __init__(self, program: Program, words: dict[str, Int64]) -> None:
        self.program, self.words = program, words
        self.m, self.n, self.k, self.l = (Int32(words[name]) for name in "mnkl")

    def args(self) -> Args:
        program = self.program
        workspace = cute.make_ptr(cutlass.Uint8, self.words["workspace"], cute.AddressSpace.gmem, assumed_align=16)
        return Args(
            self.m,
            self.n,
            self.k,
            self.l,
            workspace,
            a=_group(self._matrix(f"a{i}", self.m, member) for i, member in enumerate(program.a)),
            b=_group(self._matrix(f"b{i}", self.n, member) for i, member in enumerate(program.b)),
            aux=_group(self._aux(f"aux{i}", member) for i, member in enumerate(program.aux)),
            store=_group(self._store(f"store{i}", member) for i, member in enumerate(program.stores)),
            reduction=_group(self._reduction(f"reduction{i}", member) for i, member in enumerate(program.reductions)),
        )

    def _matrix(self, name: str, rows: Int32, member: Matrix) -> cute.Tensor:
        unit = {"k": "col", "mn": "row"}[member.major]
        stride = self._strides(name, member.dtype, member.alignment, unit, "" if member.batched else "batch")
        return self._tensor(
            name, member.dtype, member.alignment, (rows, self.k, self.l if member.batched else 1), stride
        )

    def _aux(self, name: str, member: Aux) -> Any:
        if member.by_value:
            return self._element(name, member.dtype)
        broadcast = {"scalar": "row col", "row": "col", "col": "row", "full": ""}[member.kind]
        return self._mn_tensor(
            name, member.dtype, member.alignment, member.major, broadcast + (" batch" if not member.batched else "")
        )

    def _store(self, name: str, member: Store) -> cute.Tensor:
        return self._mn_tensor(name, member.dtype, member.alignment, member.major, "")

    def _reduction(self, name: str, member: Reduction) -> cute.Tensor:
        reduced = " ".join(
            word for axis, word in zip("mnl", ("row", "col", "batch"), strict=True) if axis in member.axes
        )
        return self._mn_tensor(name, member.dtype, 0, "", reduced)

    def _mn_tensor(self, name: str, dtype: str, alignment: int, major: str, broadcast: str) -> cute.Tensor:
        alignment = alignment if major else 0  # without a unit stride it is accessed element by element
        stride = self._strides(name, dtype, alignment, {"n": "col", "m": "row", "": ""}[major], broadcast)
        return self._tensor(name, dtype, alignment, (self.m, self.n, self.l), stride)

    def _strides(self, name: str, dtype: str, alignment: int, unit: str, broadcast: str) -> tuple[Any, ...]:
        divby = max(1, alignment * 8 // BITS[dtype])
        return tuple(
            self._stride(f"{name}.{word}", word == unit, word in broadcast.split(), divby)
            for word in ("row", "col", "batch")
        )

    def _stride(self, word: str, unit: bool, broadcast: bool, divby: int) -> Any:
        if broadcast:
            return 0
        return 1 if unit else cute.assume(self.words[word], divby=divby)

    def _tensor(
        self, name: str, dtype: str, alignment: int, shape: tuple[Any, ...], stride: tuple[Any, ...]
    ) -> cute.Tensor:
        element = ELEMENTS[dtype]
        align = max(alignment, BITS[dtype] // 8)
        pointer = cute.make_ptr(element, self.words[f"{name}.address"], cute.AddressSpace.gmem, assumed_align=align)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))

    def _element(self, name: str, dtype: str) -> Any:
        kind = _BITS_TYPES.get(BITS[dtype], ELEMENTS[dtype])
        pointer = cute.make_ptr(kind, self.words[f"{name}.address"], cute.AddressSpace.generic)
        return cute.make_tensor(pointer, cute.make_layout(1))[0]


def _group(members: Any) -> tuple[Any, ...] | None:
    """An empty tuple does not cross the boundary of a kernel; None does."""
    return tuple(members) or None

"""Instructions of one warp on bare registers: matrices of shared memory, mma.sync, conversions of pairs, approximate functions.

Addresses are Int32 shared-memory byte addresses. Fragments are lists of a lane's registers, with g = lane / 4 and t = lane % 4
(PTX ISA, "Matrix Fragments for mma.m16n8k16"). A *block* is 16 x 16, its fragment 8 values: value 4n + 2h + e is row g + 8h and
column 8n + 2t + e. Packed to 4 words it is the A operand of the next product, and what stmatrix stores. Imported by ``inverse``,
``prepare_gdn`` and the other stages that work on blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Numeric, Uint32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

__all__ = [
    "asm",
    "chosen",
    "exp2",
    "halves",
    "joined",
    "load_matrices",
    "load_words",
    "mma",
    "pack",
    "prefix_sum",
    "rsqrt",
    "shuffled",
    "split",
    "store_matrices",
    "store_words",
    "when",
]

_CLASS = {"f32": "f", "i32": "r", "i16": "h", "i64": "l"}
_NAMES = {"bfloat16": "bf16", "float16": "f16"}


def asm(text: str, results: Sequence[Any], operands: Sequence[Any], *, effects: bool = False) -> list[Any]:
    """Inline PTX: $0, $1, ... are the results, of these DSL types, and then the operands. ``effects``: it touches memory."""
    bare = [operand.ir_value() if isinstance(operand, Numeric) else operand for operand in operands]
    kinds = [result.mlir_type for result in results]
    constraints = [f"={_CLASS[str(kind)]}" for kind in kinds] + [_CLASS[str(operand.type)] for operand in bare]
    if len(kinds) > 1:
        kind = ir.Type.parse(f"!llvm.struct<({', '.join(str(kind) for kind in kinds)})>")
    else:
        kind = kinds[0] if kinds else None
    made = llvm.inline_asm(
        kind,
        bare,
        text,
        ",".join(constraints),
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(kinds) > 1:
        return [result(llvm.extractvalue(result.mlir_type, made, [i])) for i, result in enumerate(results)]
    return [results[0](made)] if kinds else []


def _list(first: int, count: int) -> str:
    return "{" + ", ".join(f"${i}" for i in range(first, first + count)) + "}"


def load_matrices(address: Int32, *, transposed: bool = False) -> list[Uint32]:
    """ldmatrix: four 8 x 8 matrices of 16-bit elements; lanes 8i to 8i+7 give the addresses of the rows of matrix i."""
    kind = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {_list(0, 4)}, [$4];"
    return asm(text, [Uint32] * 4, [address], effects=True)


def store_matrices(address: Int32, words: Sequence[Uint32], *, transposed: bool = False) -> None:
    """stmatrix: the counterpart of ``load_matrices``."""
    kind = ".trans" if transposed else ""
    text = f"stmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 [$0], {_list(1, 4)};"
    asm(text, [], [address, *words], effects=True)


def load_words(address: Int32, count: int, dtype: Any = Float32) -> list[Any]:
    """1, 2 or 4 words of 32 bits."""
    if count == 1:
        return asm("ld.shared.b32 $0, [$1];", [dtype], [address], effects=True)
    return asm(f"ld.shared.v{count}.b32 {_list(0, count)}, [${count}];", [dtype] * count, [address], effects=True)


def store_words(address: Int32, words: Sequence[Any]) -> None:
    """1, 2 or 4 words of 32 bits."""
    if len(words) == 1:
        asm("st.shared.b32 [$0], $1;", [], [address, *words], effects=True)
    else:
        asm(f"st.shared.v{len(words)}.b32 [$0], {_list(1, len(words))};", [], [address, *words], effects=True)


def mma(io: str, a: Sequence[Uint32], b: Sequence[Uint32], c: Sequence[Float32] | None = None) -> list[Float32]:
    """C + A B of 16 x 8 x 16, in fp32. ``io``: "bfloat16" or "float16"; ``c`` None is 0. With half of the words: 16 x 8 x 8."""
    c = c or [Float32(0.0)] * 4
    kind, ends = _NAMES[io], (4, 4 + len(a), 4 + len(a) + len(b))
    text = (
        f"mma.sync.aligned.m16n8k{8 * len(b)}.row.col.f32.{kind}.{kind}.f32 "
        f"{_list(0, 4)}, {_list(4, len(a))}, {_list(ends[1], len(b))}, {_list(ends[2], 4)};"
    )
    return asm(text, [Float32] * 4, [*a, *b, *c])


def pack(io: str, low: Float32, high: Float32) -> Uint32:
    """Two values rounded to ``io``, the first in the lower half."""
    return asm(f"cvt.rn.{_NAMES[io]}x2.f32 $0, $1, $2;", [Uint32], [high, low])[0]


def split(low: Float32, high: Float32) -> tuple[Uint32, Uint32]:
    """A pair as two of bf16, whose sum has 16 bits of it or more: what is dropped is below 2^-17 of a value."""
    first = pack("bfloat16", low, high)
    rest = pack("bfloat16", low - _float(first << 16), high - _float(first & Uint32(0xFFFF0000)))
    return first, rest


def joined(first: Uint32, rest: Uint32) -> tuple[Float32, Float32]:
    """The pair that ``split`` made two words of."""
    mask = Uint32(0xFFFF0000)
    return _float(first << 16) + _float(rest << 16), _float(first & mask) + _float(rest & mask)


def halves(word: Uint32) -> list[Float32]:
    """The two values of a word of float16."""
    return [
        asm(f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.f32.f16 $0, {half}; }}", [Float32], [word])[0]
        for half in "lh"
    ]


def _float(bits: Uint32) -> Float32:
    return Float32(llvm.bitcast(Float32.mlir_type, bits.ir_value()))


def chosen(condition: Boolean, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``: NaN in the other one does no harm."""
    return cutlass.select_(condition, a, b)


def when(condition: Any, body: Callable[[], None]) -> None:
    """``body`` under a branch. What it makes is not to be used behind it."""
    _Body(body).run(condition)


class _Body:
    def __init__(self, body: Callable[[], None]) -> None:
        self.body = body

    @cute.jit
    def run(self, condition: Any) -> None:
        if condition:
            self.body()


def shuffled(value: Any, lane: Any) -> Any:
    """The value of lane ``lane``."""
    return cute.arch.shuffle_sync(value, lane)


def exp2(x: Float32) -> Float32:
    """2^x; 0 below 2^-126. Relative error 2^-22 (PTX ISA, ex2)."""
    return asm("ex2.approx.ftz.f32 $0, $1;", [Float32], [x])[0]


def rsqrt(x: Float32) -> Float32:
    """1 / sqrt(x). Relative error 2^-22 (PTX ISA, rsqrt)."""
    return asm("rsqrt.approx.ftz.f32 $0, $1;", [Float32], [x])[0]


def prefix_sum(x: Float32) -> Float32:
    """The sum of the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        text = (
            f"{{ .reg .pred p; .reg .f32 y; shfl.sync.up.b32 y|p, $1, {distance}, 0, -1; mov.f32 $0, $1; "
            "@p add.f32 $0, $0, y; }"
        )
        x = asm(text, [Float32], [x], effects=True)[0]
    return x

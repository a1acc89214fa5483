"""Predicated vector loads and stores, from and to fp32 registers, at plain byte addresses, and copies to shared memory. Imported
by ``decode``.

Every access is one inline PTX instruction, under a predicate instead of a branch, so that many are in flight before the first is
used. What is not loaded is 0. Addresses are multiples of the access: elements * bytes, at most 16 bytes.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

from ..decode_problem import ACCESS, BYTES

__all__ = ["copy_to_shared", "load", "load_index", "load_shared", "store", "zero_in_shared"]

_TYPES = {"f": Float32, "r": Int32, "l": Int64}


def load(address: Int64, dtype: str, count: int, valid: Int32 | None = None) -> list[Float32]:
    """``count`` neighbours of data type ``dtype`` as fp32."""
    size = BYTES[dtype]
    most = ACCESS // size
    values: list[Float32] = []
    for start in range(0, count, most):
        at = address + Int64(start * size) if start else address
        part = min(most, count - start)
        values += _load_one(at, dtype, valid) if part == 1 and size == 2 else _load(at, dtype, part, valid)
    return values


def store(address: Int64, values: list[Float32], dtype: str, valid: Int32 | None = None) -> None:
    """Round fp32 values to ``dtype`` (to nearest even) and store them side by side."""
    size = BYTES[dtype]
    most = ACCESS // size
    for start in range(0, len(values), most):
        at = address + Int64(start * size) if start else address
        _store(at, values[start : start + most], dtype, valid)


def zero_in_shared(shared: Int32, address: Int64) -> None:
    """A word of zero, by a cp.async that reads nothing at ``address``."""
    _asm("cp.async.ca.shared.global [$0], [$1], 4, 0;", [], [shared, address])


def copy_to_shared(shared: Int32, address: Int64, valid: Int32 | None = None) -> None:
    """cp.async of 16 bytes, past L1; zeros where it is not valid."""
    if valid is None:
        _asm("cp.async.cg.shared.global [$0], [$1], 16;", [], [shared, address])
    else:
        _asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", [], [shared, address, valid * Int32(ACCESS)])


def load_shared(shared: Int32, dtype: str, size: int = ACCESS) -> list[Float32]:
    """``size`` bytes of shared memory, a multiple of 4, as fp32."""
    return [value for word in _words("shared", shared, size // 4, None) for value in _unpacked(word, dtype)]


def load_index(address: Int64, dtype: str) -> Int64:
    """An int32 or int64."""
    width = "s32" if dtype == "int32" else "s64"
    (value,) = _asm(f"ld.global.{width} $0, [$1];", [Int32 if dtype == "int32" else Int64], [address])
    return Int64(value)


def _load(address: Int64, dtype: str, count: int, valid: Int32 | None) -> list[Float32]:
    words = _words("global", address, count * BYTES[dtype] // 4, valid)
    return [value for word in words for value in _unpacked(word, dtype)]


def _words(space: str, address: Any, words: int, valid: Int32 | None) -> list[Int32]:
    places = [f"${i}" for i in range(words)]
    vector = f"{{{', '.join(places)}}}" if words > 1 else places[0]
    instruction = f"ld.{space}.{f'v{words}.' if words > 1 else ''}b32 {vector}, [${words}];"
    clear = " ".join(f"mov.b32 {place}, 0;" for place in places)
    return _asm(_under(instruction, valid, words + 1, clear), [Int32] * words, [address], valid)


def _load_one(address: Int64, dtype: str, valid: Int32 | None) -> list[Float32]:
    """A 16-bit element, twice in a word."""
    text = _under("ld.global.b16 h, [$1];", valid, 2, "mov.b16 h, 0;")
    (word,) = _asm(f"{{ .reg .b16 h; {text} mov.b32 $0, {{h, h}}; }}", [Int32], [address], valid)
    return _unpacked(word, dtype)[:1]


def _store(address: Int64, values: list[Float32], dtype: str, valid: Int32 | None) -> None:
    if len(values) == 1 and BYTES[dtype] == 2:
        text = _under("st.global.b16 [$0], h;", valid, 2)
        kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        _asm(f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, $1; {text} }}", [], [address, values[0]], valid)
        return
    words = [_packed(values[i : i + 2], dtype) for i in range(0, len(values), 2)] if BYTES[dtype] == 2 else values
    places = [f"${1 + i}" for i in range(len(words))]
    vector = f"{{{', '.join(places)}}}" if len(words) > 1 else places[0]
    instruction = f"st.global.{f'v{len(words)}.' if len(words) > 1 else ''}b32 [$0], {vector};"
    _asm(_under(instruction, valid, 1 + len(words)), [], [address, *words], valid)


def _under(instruction: str, valid: Int32 | None, place: int, clear: str = "") -> str:
    """``instruction`` where operand ``place`` is not 0, after ``clear``; alone without ``valid``."""
    if valid is None:
        return instruction
    return f"{{ .reg .pred p; setp.ne.b32 p, ${place}, 0; {clear} @p {instruction} }}"


def _unpacked(word: Int32, dtype: str) -> list[Float32]:
    """The fp32 values of a 32-bit word."""
    if dtype == "float32":
        return [Float32(llvm.bitcast(Float32.mlir_type, word.ir_value()))]
    if dtype == "bfloat16":
        halves = (word << Int32(16), word & Int32(-65536))
        return [Float32(llvm.bitcast(Float32.mlir_type, half.ir_value())) for half in halves]
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    return _asm(text, [Float32, Float32], [word], effects=False)


def _packed(pair: list[Float32], dtype: str) -> Int32:
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    (word,) = _asm(f"cvt.rn.{kind}.f32 $0, $2, $1;", [Int32], pair, effects=False)
    return word


def _asm(text: str, results: list[Any], operands: list[Any], valid: Int32 | None = None, effects: bool = True) -> list:
    """Inline PTX. Results are early-clobbered: a text may write one before it has read every operand."""
    given = [*operands, *([] if valid is None else [valid])]
    letters = {kind: letter for letter, kind in _TYPES.items()}
    inputs = [letters[type(operand)] for operand in given]
    outputs = [f"=&{letters[kind]}" for kind in results]
    kinds = [kind.mlir_type for kind in results]
    struct = kinds[0] if len(kinds) == 1 else llvm.StructType.get_literal(kinds) if kinds else None
    found = llvm.inline_asm(
        struct,
        [operand.ir_value() for operand in given],
        text,
        ",".join(outputs + inputs),
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(kinds) <= 1:
        return [kind(found) for kind in results]
    return [
        kind(llvm.extractvalue(kind.mlir_type, found, ir.DenseI64ArrayAttr.get([i]))) for i, kind in enumerate(results)
    ]

"""Operand tiles in shared memory and the instructions of a warpgroup on them: wgmma with A in registers, ldmatrix, stmatrix.

Values of a 64 x n tile in a thread's registers are those of the accumulator's fragment: value 4b + 2h + c is row lane / 4 + 8h of the
16 rows of its warp and column 8b + 2 (lane % 4) + c (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts"). ``packed``
makes the A fragment of the same tile of it, without an exchange: words 4s to 4s + 3 are those of K step s.

A ``multiply`` is asynchronous, and its sums are in flight until ``wait`` has counted it off: nothing may use them before ``landed``,
which ties them to the wait. All its instructions are one piece of assembly, so that no move comes between them, for which ptxas would
wait for the matrix unit. Imported by ``scan`` and by the prepare stages; ``assembly`` by whatever has instructions
of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

__all__ = [
    "K_STEP", "assembly", "fence_shared", "k_major", "kept", "landed", "load_matrices", "load_pair", "load_value", "mn_major", "multiply",
    "packed", "store_matrices", "unpacked", "wait",
]  # fmt: skip

K_STEP = 16  # of a wgmma of 16-bit operands
_SWIZZLE_128 = 1 << 62
_GROUP = 1024  # bytes of eight lines
_SHORT = {"bfloat16": "bf16", "float16": "f16"}


def assembly(
    text: str,
    results: Sequence[Any] = (),
    tied: Sequence[Any] = (),
    inputs: Sequence[Any] = (),
    *,
    early: bool = False,
    volatile: bool = True,
    memory: bool = False,
) -> list[Any]:
    """Inline PTX with $r0, $r1, .. for results and $i0, .. for inputs. The first results hold the values of ``tied`` on entry.

    ``early``: results are written before all inputs have been read. ``memory``: orders accesses to memory around it.
    """
    first = {"r": 0, "i": len(results) + len(tied)}
    text = re.sub(r"\$([ri])(\d+)", lambda found: f"${first[found[1]] + int(found[2])}", text)
    marks = [f"={'&' if early else ''}{_constraint(kind)}" for kind in results]
    marks += [str(i) for i in range(len(tied))] + [_constraint(type(value)) for value in inputs]
    marks += ["~{memory}"] if memory else []
    kinds = [kind.mlir_type for kind in results]
    found = llvm.inline_asm(
        None if not kinds else kinds[0] if len(kinds) == 1 else llvm.StructType.get_literal(kinds),
        [value.ir_value() for value in (*tied, *inputs)],
        text,
        ",".join(marks),
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(kinds) < 2:
        return [kind(found) for kind in results]
    places = (ir.DenseI64ArrayAttr.get([i]) for i in range(len(kinds)))
    return [kind(llvm.extractvalue(kind.mlir_type, found, place)) for kind, place in zip(results, places, strict=True)]


def _constraint(kind: Any) -> str:
    return "f" if kind is Float32 else {16: "h", 32: "r", 64: "l"}[kind.width]


def k_major(address: Int32) -> Int64:
    """The descriptor of a K-major tile: lines are its rows, 16-element K steps are 32 bytes apart in a panel."""
    return _descriptor(address, 16)


def mn_major(address: Int32, panel: int) -> Int64:
    """The descriptor of an MN-major tile: lines are along K, panels of 64 columns are ``panel`` bytes apart."""
    return _descriptor(address, panel)


def _descriptor(address: Int32, leading: int) -> Int64:
    # PTX ISA, "Matrix Descriptor Format": the address (18 bits: those above may be the rank in the cluster), leading and stride byte
    # offsets, all in units of 16 bytes.
    fixed = _SWIZZLE_128 | (_GROUP >> 4) << 32 | (leading >> 4) << 16
    return Int64((address & 0x3FFFF) >> 4) | Int64(fixed)


def multiply(
    io: str,
    columns: int,
    a: Sequence[Int32],
    b: Int64,
    offsets: Sequence[int],
    sums: Sequence[Float32] | None = None,
    *,
    transposed: bool = False,
    commit: bool = True,
) -> list[Float32]:
    """Issue A B (+ ``sums``) and return the sums, in flight: [64, ``columns``]. ``commit``: a group ends with it.

    ``a`` are the words of ``packed``, four for every K step. ``b`` is the descriptor of the first step; that of step s lies
    ``offsets[s]`` bytes further. ``transposed``: B is MN-major.
    """
    count = columns // 2
    assert len(a) == 4 * len(offsets)
    assert sums is None or len(sums) == count
    target = ", ".join(f"$r{i}" for i in range(count))
    lines = ["{", ".reg .pred p, q;", ".reg .b64 d;", "setp.ne.b32 p, 0, 0;", "setp.eq.b32 q, 0, 0;"]
    lines += ["wgmma.fence.sync.aligned;"]
    kind = _SHORT[io]
    for step, offset in enumerate(offsets):
        words = ", ".join(f"$i{4 * step + i}" for i in range(4))
        lines.append(f"add.s64 d, $i{len(a)}, {offset >> 4};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{target}}}, {{{words}}}, d, "
            f"{'p' if sums is None and step == 0 else 'q'}, 1, 1, {int(transposed)};"
        )
    lines += ["wgmma.commit_group.sync.aligned;"] * commit + ["}"]
    return assembly("\n".join(lines), [Float32] * count, sums or (), [*a, b], early=sums is None)


def wait(pending: int) -> None:
    """Until all but the last ``pending`` groups are done."""
    assembly(f"wgmma.wait_group.sync.aligned {pending};", memory=True)


def landed(values: Sequence[Any]) -> list[Any]:
    """``values`` after a wait: what uses them comes after it."""
    return assembly("", [type(value) for value in values], values)


def kept(values: Sequence[Any]) -> None:
    """Registers that the matrix unit reads are not given to others before this point."""
    assembly("", inputs=values)


def packed(io: str, values: Sequence[Float32]) -> list[Int32]:
    """Pairs of values rounded to 16 bits."""
    text = f"cvt.rn.{_SHORT[io]}x2.f32 $r0, $i1, $i0;"
    pairs = zip(values[::2], values[1::2], strict=True)
    return [assembly(text, [Int32], inputs=pair, volatile=False)[0] for pair in pairs]


def unpacked(io: str, word: Int32) -> list[Float32]:
    """The two values of a word."""
    texts = ["shl.b32 $r0, $i0, 16;", "and.b32 $r0, $i0, -65536;"]
    if io == "float16":
        texts = [f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $i0; cvt.f32.f16 $r0, {half}; }}" for half in "lh"]
    return [assembly(text, [Float32], inputs=[word], volatile=False)[0] for text in texts]


def load_matrices(address: Int32) -> list[Int32]:
    """ldmatrix of four 8 x 8 matrices, transposed: lanes 8m to 8m + 7 have the addresses of the lines of matrix m."""
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$r0, $r1, $r2, $r3}, [$i0];"
    return assembly(text, [Int32] * 4, inputs=[address], memory=True)


def store_matrices(address: Int32, words: Sequence[Int32]) -> None:
    """The inverse of ``load_matrices``."""
    text = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$i0], {$i1, $i2, $i3, $i4};"
    assembly(text, inputs=[address, *words], memory=True)


def load_pair(address: Int32) -> list[Float32]:
    """Two neighbouring float32 of shared memory."""
    return assembly("ld.shared.v2.f32 {$r0, $r1}, [$i0];", [Float32] * 2, inputs=[address], memory=True)


def load_value(address: Int32) -> Float32:
    """A float32 of shared memory."""
    return assembly("ld.shared.f32 $r0, [$i0];", [Float32], inputs=[address], memory=True)[0]


def fence_shared() -> None:
    """This thread's writes to shared memory come before what the async proxy does there next."""
    assembly("fence.proxy.async.shared::cta;", memory=True)

"""What KDA's prepare stage does with registers and shared memory: pairs of 16-bit values, rows of tiles, mma.sync.

A word is an Int32 of two io values, the lower one first. Tiles are those of ``records``. Imported by ``diagonal`` and by the modules
of KDA's prepare stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from .tiles import assembly, packed

__all__ = [
    "copies_done", "copies_end", "copy_async", "load_columns", "load_floats", "load_rows", "load_words", "multiplied", "multiply_add",
    "pack", "select", "send", "store_floats", "store_memory", "store_words",
]  # fmt: skip

_SHORT = {"bfloat16": "bf16", "float16": "f16"}


def pack(io: str, low: Float32, high: Float32) -> Int32:
    """Two values rounded to io."""
    found: Int32 = packed(io, [low, high])[0]
    return found


def multiplied(a: Int32, b: Int32) -> Int32:
    """The products of two words of float16."""
    found: Int32 = assembly("mul.rn.f16x2 $r0, $i0, $i1;", [Int32], inputs=[a, b], volatile=False)[0]
    return found


def select(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds; of its type."""
    return type(yes)(cutlass.select_(condition, yes, no))


def copy_async(target: Int32, source: Int64, present: Boolean) -> None:
    """16 bytes of global memory to shared memory, in the background; zeros, without a read, if not ``present``."""
    size = select(present, Int32(16), Int32(0))
    assembly("cp.async.cg.shared.global [$i0], [$i1], 16, $i2;", inputs=[target, source, size], memory=True)


def copies_end() -> None:
    """This thread's copies since the last call are a group."""
    assembly("cp.async.commit_group;", memory=True)


def copies_done(pending: int = 0) -> None:
    """Until this thread's copies lie in shared memory, but for those of the last ``pending`` groups."""
    assembly(f"cp.async.wait_group {pending};", memory=True)


def _load(kind: Any, suffix: str, address: Int32, count: int) -> list[Any]:
    target = ", ".join(f"$r{i}" for i in range(count))
    vector, target = (f".v{count}", f"{{{target}}}") if count > 1 else ("", target)
    return assembly(f"ld.shared{vector}.{suffix} {target}, [$i0];", [kind] * count, inputs=[address], memory=True)


def load_floats(address: Int32, count: int) -> list[Float32]:
    """1, 2 or 4 float32 of shared memory in one access."""
    return _load(Float32, "f32", address, count)


def load_words(address: Int32, count: int) -> list[Int32]:
    """1, 2 or 4 words of shared memory in one access."""
    return _load(Int32, "b32", address, count)


def _store(suffix: str, address: Int32, values: Sequence[Any]) -> None:
    source = ", ".join(f"$i{i + 1}" for i in range(len(values)))
    vector, source = (f".v{len(values)}", f"{{{source}}}") if len(values) > 1 else ("", source)
    assembly(f"st.shared{vector}.{suffix} [$i0], {source};", inputs=[address, *values], memory=True)


def store_floats(address: Int32, values: Sequence[Float32]) -> None:
    """1, 2 or 4 float32 to shared memory in one access."""
    _store("f32", address, values)


def store_words(address: Int32, words: Sequence[Int32]) -> None:
    """1, 2 or 4 words to shared memory in one access."""
    _store("b32", address, words)


def store_memory(address: Int64, words: Sequence[Int32]) -> None:
    """4 words to global memory."""
    assembly("st.global.v4.b32 [$i0], {$i1, $i2, $i3, $i4};", inputs=[address, *words], memory=True)


def send(smem: Int32, record: Int64, *spans: tuple[int, int]) -> None:
    """Spans of bytes of the record go to memory. By one thread."""
    for start, stop in spans:
        assembly(
            f"cp.async.bulk.global.shared::cta.bulk_group [$i0], [$i1], {stop - start};",
            inputs=[record + start, smem + start],
            memory=True,
        )
    cute.arch.cp_async_bulk_commit_group()


def _load_matrices(address: Int32) -> list[Int32]:
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$r0, $r1, $r2, $r3}, [$i0];"
    return assembly(text, [Int32] * 4, inputs=[address], memory=True)


def _step(address: Int32, step: int, panel: int) -> Int32:
    """``address`` of the first 16 channels of a line, moved to 16-channel step ``step``: pieces are XORed within a panel."""
    inner, outer = (step % 4) << 5, step // 4 * panel
    moved = address ^ Int32(inner) if inner else address
    return moved + Int32(outer) if outer else moved


def load_rows(address: Int32, step: int, panel: int) -> list[Int32]:
    """The A fragment (m16 k16) of 8 rows of one tile on 8 rows of another, channels 16 step and on.

    Lane l has the address of line l % 8 of tile (l / 8) % 2, piece l / 16, of step 0.
    """
    return _load_matrices(_step(address, step, panel))


def load_columns(address: Int32, step: int, panel: int) -> list[Int32]:
    """B fragments (k16 n8): of steps ``step`` and ``step`` + 1 (even), or of two blocks of columns, as lanes' addresses have it."""
    return _load_matrices(_step(address, step, panel))


def multiply_add(io: str, sums: Sequence[Float32], a: Sequence[Int32], b: Sequence[Int32]) -> list[Float32]:
    """mma.sync m16n8 of 16 channels (``a`` four words, ``b`` two) or of 8 (two and one)."""
    kind = _SHORT[io]
    places = [f"$i{i}" for i in range(len(a) + len(b))]
    text = (
        f"mma.sync.aligned.m16n8k{8 * len(b)}.row.col.f32.{kind}.{kind}.f32 {{$r0, $r1, $r2, $r3}}, "
        f"{{{', '.join(places[: len(a)])}}}, {{{', '.join(places[len(a) :])}}}, {{$r0, $r1, $r2, $r3}};"
    )
    return assembly(text, [Float32] * 4, list(sums), [*a, *b], volatile=False)

"""The scores of a chunk: products of its K and Q tiles over all channels, [64 tokens, 64 tokens], by wgmma of one warpgroup.

Tiles are those of ``tiles``: [64 tokens x K channels] in panels of 64 channels, 128-byte swizzle, at 1024-byte boundaries. Value
4b + 2h + e of a thread is row 16 warp + g + 8h and column 8b + 2t + e, with g = lane / 4 and t = lane % 4; values 8b to 8b + 7 are the
fragment of block b (``warp``). Imported by ``prepare_gdn`` and ``scores_gdn``;
``NORM_EPSILON`` also by ``prepare_kda``.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32

from ..layout import PANEL_BYTES
from ..problem import CHUNK
from . import warp as w
from .tiles import K_STEP, assembly, k_major

__all__ = ["NORM_EPSILON", "diagonal", "issue", "squares"]

NORM_EPSILON = 1e-6
"""What is added to a row's sum of squares, of which 1 / sqrt is its norm factor."""
_STEPS = 64 // K_STEP  # of a panel
_VALUES = CHUNK * CHUNK // 128  # of a thread
_NAMES = {"bfloat16": "bf16", "float16": "f16"}


def issue(io: str, key: int, rows: Int32, columns: Int32) -> list[Float32]:
    """Issue rows columns^T of two tiles as one group, and return the 32 sums, in flight (see ``tiles``: ``wait`` and ``landed``)."""
    target = ", ".join(f"$r{i}" for i in range(_VALUES))
    kind, same = _NAMES[io], rows is columns
    lines = ["{", ".reg .b64 a, b;", ".reg .b32 al, ah, bl, bh;", ".reg .pred no, yes;"]
    lines += ["setp.ne.b32 no, 0, 0;", "setp.eq.b32 yes, 0, 0;", "mov.b64 {al, ah}, $i0;"]
    lines += [] if same else ["mov.b64 {bl, bh}, $i1;"]
    lines.append("wgmma.fence.sync.aligned;")
    for step in range(key // K_STEP):
        at, last = ((i // _STEPS * PANEL_BYTES + i % _STEPS * 2 * K_STEP) >> 4 for i in (step, max(step - 1, 0)))
        # Offsets stay in the address field of a descriptor's lower half.
        lines += [f"add.s32 al, al, {at - last};", "mov.b64 a, {al, ah};"]
        lines += [] if same else [f"add.s32 bl, bl, {at - last};", "mov.b64 b, {bl, bh};"]
        # The first step does not accumulate: what the registers hold does not matter.
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{CHUNK}k16.f32.{kind}.{kind} {{{target}}}, a, {'a' if same else 'b'}, "
            f"{'yes' if step else 'no'}, 1, 1, 0, 0;"
        )
    lines += ["wgmma.commit_group.sync.aligned;", "}"]
    text, inputs = "\n".join(lines), [k_major(rows)] if same else [k_major(rows), k_major(columns)]
    return assembly(text, [Float32] * _VALUES, inputs=inputs, early=True)


def squares(io: str, key: int, tile: Int32, warp: Int32, lane: Int32) -> list[Float32]:
    """Sums of squares of rows g and g + 8 of the warp's 16 rows of a tile, in all four lanes of a quad.

    The diagonals of two mma.sync for every 8 channels: a fourth of the instructions of fp32 arithmetic. With 16 channels, pairs of operand
    registers would have to be moved together, by as many instructions. A NaN stays in its row.
    """
    row = 16 * warp + lane % 16
    first = tile + row * 128 + (((lane >> 4) ^ (row & 7)) << 4)
    sums: list[list[Float32] | None] = [None, None]
    for step in range(key // K_STEP):
        a = w.load_matrices((first ^ (step % _STEPS * 2 * K_STEP)) + step // _STEPS * PANEL_BYTES)
        for part in (a[:2], a[2:]):
            for half in range(2):
                sums[half] = w.mma(io, part, part[half : half + 1], sums[half])
    found = [s for s in sums if s is not None]
    return diagonal([found[half][2 * half : 2 * half + 2] for half in range(2)], lane)


def diagonal(pairs: Sequence[Sequence[Float32]], lane: Int32) -> list[Float32]:
    """From a lane's values of columns 2t and 2t + 1 of an 8 x 8 matrix to that of row and column g, in the four lanes of row g."""
    odd, source = (lane >> 2) & 1, (lane & 28) | (lane >> 3)
    return [w.shuffled(w.chosen(odd == 1, pair[1], pair[0]), source) for pair in pairs]

"""Tiles from bfloat16 to ``layout.MMA`` where they lie in shared memory. By a warpgroup. Imported by ``prefill``.

Values beyond 65,504 become infinite, those below 2^-24 vanish.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from ..layout import MMA
from . import tiles

__all__ = ["convert"]

_PIECE = 16  # bytes
_THREADS = 128


@cute.jit
def convert(place: Int32, size: cutlass.Constexpr, thread: Int32):  # noqa: ANN201  the DSL reads return annotations
    """``size`` bytes from ``place`` on, by 128 threads; a thread's writes are fenced for the async proxy."""
    for first in cutlass.range_constexpr(0, size, _PIECE * _THREADS):
        at = place + first + thread * _PIECE
        words = tiles.assembly("ld.shared.v4.b32 {$r0, $r1, $r2, $r3}, [$i0];", [Int32] * 4, inputs=[at], memory=True)
        halves = tiles.packed(MMA, [value for word in words for value in tiles.unpacked("bfloat16", word)])
        tiles.assembly("st.shared.v4.b32 [$i0], {$i1, $i2, $i3, $i4};", inputs=[at, *halves], memory=True)
    tiles.fence_shared()

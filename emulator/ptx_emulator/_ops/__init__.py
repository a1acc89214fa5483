"""Translators by opcode root. Each module of this package handles one family and exports `TABLE`."""

from __future__ import annotations

from .._translate import Translator
from . import atomics, calls, cp_async, launch_control, matrix, memory, scalar, sync, tcgen05, tensormap, warp, wgmma

__all__ = ["TRANSLATORS"]

TRANSLATORS: dict[str, Translator] = {
    **scalar.TABLE, **memory.TABLE, **atomics.TABLE, **calls.TABLE, **cp_async.TABLE, **sync.TABLE, **warp.TABLE, **matrix.TABLE, **launch_control.TABLE, **wgmma.TABLE,
    **tensormap.TABLE, **tcgen05.TABLE,
}  # fmt: skip

"""The updates of 8 tokens seen as one: what later tokens of a group take back is taken from its columns. Imported by ``prepare_kda``.

A token's update of the state is beta (v - what the state holds of its key), and with colliding keys each one takes back what the one before it
wrote: sums over tokens cancel, roundings of their terms do not. Inside a group they need not be formed. With B the group's block of M
and D = (I + B)^-1, its updates U are D S, where S are those that leave out what the group itself wrote: the columns D^T k take the
place of k in all products behind, and

    P U = (P D) S        M U = (M D) S        K-^T U = (D^T K-)^T S        S = (I + (M - B) D)^-1 beta Y

so that U is nowhere, and T and P of the records are those of S. A row of D^T k is at most as long as that of k, for |k| <= 1 and
beta <= 2. What it is for is the rounding of K-, which differs from token to token: what 64 updates of an equal key leave of it in
other channels stays there as long as the memory is. A model of all roundings, 4,096 equal keys with beta 0.999 and gates of -1e-3,
bf16: O is off by 2.5e-3 instead of 5.1e-3, the final state by 2.9e-3 instead of 7.3e-3. Keys of alternating signs gain as much,
random ones lose nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, cute

from .diagonal import GROUP, Tokens
from .kda_words import load_floats, store_floats
from .tiles import assembly

__all__ = ["fold"]

_LINE = 32  # bytes


def fold(tokens: Tokens, q: Sequence[Any], k: Sequence[Any], beta: Float32, scratch: Int32, lane: Int32) -> list[Any]:
    """``tokens.columns`` become D^T k; returns the lane's part of P D from that of P. By a warp.

    ``q``, ``k``, ``beta``: the lane's part of the group's scores, and of row lane / 4. ``scratch``: 8 lines of 32 bytes.
    """
    row, pair = lane // 4, lane % 4 * 2
    store_floats(scratch + row * _LINE + pair * 4, [-value * beta for value in k])
    cute.arch.sync_warp()
    found = list(q)
    for later in range(GROUP - 1, 0, -1):
        source = _of_quad(found[later % 2], later // 2)
        factors = load_floats(scratch + later * _LINE + pair * 4, 2)
        found = [x + source * y for x, y in zip(found, factors, strict=True)]
    for later in range(GROUP - 1, 0, -1):
        place = scratch + later * _LINE
        tokens.add(later, load_floats(place, 4) + (load_floats(place + 16, 4) if later > 4 else []))
    return found


def _of_quad(value: Float32, lane: int) -> Float32:
    """The value of a lane of this lane's four."""
    found: Float32 = assembly(f"shfl.sync.idx.b32 $r0, $i0, {lane}, 0x1c1f, -1;", [Float32], inputs=[value])[0]
    return found

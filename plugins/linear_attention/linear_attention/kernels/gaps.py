"""O of the tokens that belong to no sequence: zeros. Device code, called by the CTAs of a prefill.

Such tokens lie before the first boundary and behind the last one. The CTAs of the first and of the last sequence write them, each
for its head and its 64 channels of V.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from ..problem import SLAB
from .arguments import Args

__all__ = ["zero_gaps"]

_PIECE = 16  # bytes of a store


@cute.jit
def zero_gaps(  # noqa: ANN201  the DSL reads return annotations
    args: Args,
    sequence: Int32,
    head: Int32,
    slab: Int32,
    thread: Int32,
    threads: cutlass.Constexpr[int],
):
    """Called by ``threads`` threads of a CTA, ``thread`` counting them; without barriers, so they need not be converged."""
    if cutlass.const_expr(args.boundaries is not None):
        if sequence == 0:
            _zero(args, Int32(0), args.boundaries[0], head, slab, thread, threads)
        if sequence == args.sequences - 1:
            _zero(args, args.boundaries[args.sequences], args.tokens, head, slab, thread, threads)


@cute.jit
def _zero(  # noqa: ANN202
    args: Args, start: Int32, stop: Int32, head: Int32, slab: Int32,
    thread: Int32, threads: cutlass.Constexpr[int],
):  # fmt: skip
    pieces = SLAB * 2 // _PIECE
    base = args.o.iterator.toint() + 2 * (head * args.o.stride[1] + slab * SLAB)
    for index in range(thread, (stop - start) * pieces, threads):  # limits.MOST_TOKENS fit
        token, piece = start + index // pieces, index % pieces
        address = base + 2 * Int64(token) * args.o.stride[0] + piece * _PIECE
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=_PIECE)
        row = cute.make_tensor(pointer, cute.make_layout(4))
        zeros = cute.make_rmem_tensor((4,), Int32)
        zeros.fill(0)
        cute.autovec_copy(zeros, row)

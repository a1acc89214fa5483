"""The scores of GDN: P and d of a chunk from its Q and K tiles and the vectors of its record, by one warpgroup of the scan's CTA.

With G the sums of log decays (to base 2), nk the norm factors of k, and nq = 1/sqrt(q_i . q_i + 1e-6) (1 without l2norm):

    P_ij = scale nq_i nk_j exp2(G_i - G_j) (q_i . k_j)     j <= i, else 0          d_i = exp2(G_i) scale nq_i

P is 64 x 64 of ``layout.MMA``, i the line (``tiles``), d fp32 [64]. Rows of K that are no tokens are 0. Those of Q may hold anything, and so may then
rows of P and d, up to the diagonal.

    wgmma Q K^T in flight     squares of Q; the vectors
    Q K^T                     warp r: rows 16r to 16r + 15 of P and d; fence

Blocks of P above its diagonal are not written: ``clear`` has, once. No warp waits for another one. Imported by ``scorer``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cutlass import Float32, Int32, Uint32, cute

from ..layout import MMA, PANEL_BYTES
from ..problem import Problem
from ..records import VECTORS
from . import scores, tiles
from . import warp as w
from .decays import Decays, scaled
from .inverse import BLOCK, BLOCKS

__all__ = ["ScoresGdn", "clear"]


def clear(place: Int32, thread: Int32) -> None:
    """Zeros in all of P's place. By 128 threads."""
    for at in range(0, PANEL_BYTES, 16 * 128):
        w.store_words(place + at + 16 * thread, [Uint32(0)] * 4)
    tiles.fence_shared()


class ScoresGdn:
    """Of a problem with the variant gdn, whose ``io`` is the type of the Q and K tiles."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def run(
        self,
        k_addr: Int32,
        q_addr: Int32,
        vec_addr: Int32,
        p_addr: Int32,
        d_addr: Int32,
        thread: Int32,
        ready: Callable[[], None],
    ) -> None:
        """One chunk, by the 128 threads ``thread`` of a warpgroup.

        k_addr, q_addr     the tiles, complete
        vec_addr           the vectors, complete when ``ready`` has been called
        p_addr, d_addr     8192 and 256 bytes, which are written; a thread's own writes are fenced for the async proxy
        """
        p, lane = self.problem, thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        qk = scores.issue(p.io, p.key, q_addr, k_addr)
        scales = [Float32(p.scale)] * 2
        if p.l2norm:
            squares = scores.squares(p.io, p.key, q_addr, warp, lane)
            scales = [Float32(p.scale) * w.rsqrt(x + Float32(scores.NORM_EPSILON)) for x in squares]
        ready()
        at, row = vec_addr + VECTORS["sums"], 4 * (BLOCK * warp + (lane >> 2))
        rows = [w.load_words(at + row + 32 * half, 1)[0] for half in range(2)]
        decays = Decays(thread, warp, lane, rows, w.load_words(at + 8 * lane, 2))
        norms = None
        if p.l2norm:
            at = vec_addr + VECTORS["norms"]
            decays.behind = [x * y for x, y in zip(decays.behind, w.load_words(at + 8 * lane, 2), strict=True)]
            norms = [w.load_words(at + 4 * BLOCK * warp + 8 * (lane & 3) + 32 * n, 2) for n in range(2)]
        odd = (lane & 1) == 1
        d = w.chosen(odd, rows[1], rows[0]), w.chosen(odd, scales[1], scales[0])
        w.when((lane & 2) == 0, lambda: w.store_words(d_addr + row + 32 * (lane & 1), [w.exp2(d[0]) * d[1]]))
        tiles.wait(0)
        qk = tiles.landed(qk)
        line, piece = p_addr + (lane % 16 + BLOCK * warp) * 128, (lane >> 4) ^ (lane % 8)

        def store(column: Int32 | int, values: list[Float32]) -> None:
            words = [w.pack(MMA, *values[i : i + 2]) for i in range(0, 8, 2)]
            w.store_matrices(line + ((piece ^ (2 * column)) << 4), words)

        factors = [x * y for x, y in zip(scales, decays.rows, strict=True)]

        def before(m: int) -> None:
            store(m, scaled(qk[8 * m : 8 * m + 8], factors, decays.columns(m)))

        for m in range(BLOCKS - 1):
            w.when(warp > m, partial(before, m))
        values = decays.on_diagonal(decays.own(qk), scales)
        if norms:
            values = [x * norms[i // 4][i % 2] for i, x in enumerate(values)]
        lower = (lane >> 2) - (lane & 3) * 2  # i - j in the 8 x 8 matrices on the diagonal
        for i in (0, 1, 6, 7):
            values[i] = w.chosen(lower >= i % 2, values[i], Float32(0.0))
        store(warp, values)
        tiles.fence_shared()

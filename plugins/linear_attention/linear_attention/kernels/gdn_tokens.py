"""What GDN's prepare stage needs of a chunk's gates: one warp makes it, all read it in shared memory. Imported by ``prepare_gdn``.

Of every token, with G the inclusive sum of log decays to base 2, float32 [64] each:

    sums      G; of tokens behind the last one, that of the last one
    betas     beta, 0 behind the last one
    behind    exp2(G' - G) with G' of the first token of the next 16
    faded     exp2(G - G of 8 tokens before), 0 behind the last one; of no use in the first 8

A log decay counts as at least -128 (base 2), which is 0 in fp32: so G stays small, and the decays after a reset of the state keep their digits.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ..problem import CHUNK, Problem
from . import warp as w
from .arguments import Args
from .chunks import Chunk
from .gates import LOG2_E, Beta, Gate

__all__ = ["Tokens"]

_SMALLEST = -128.0  # of a log decay, to base 2
_BYTES = 4 * CHUNK  # of a value a token


class Tokens:
    """``start`` and ``stop``: bytes from the address that the methods get. ``heads``: how many a CTA makes one after the other; the next one's gates
    may be put when all warps have read what is in the places of this one, but for ``faded``."""

    def __init__(self, problem: Problem, start: int, heads: int) -> None:
        self.problem = problem
        self.gate, self.beta = Gate.of(problem), Beta.of(problem)
        self.sums, self.betas, self.behind, self.chunk, self.first_faded = (start + i * _BYTES for i in range(5))
        self.last = self.sums + _BYTES - 4
        self.stop = self.first_faded + min(heads, 2) * _BYTES

    def faded(self, number: Any) -> Any:
        """Of the CTA's head ``number``: two places take turns."""
        return self.first_faded + (number & 1) * _BYTES

    def announce(self, address: Int32, chunk: Chunk) -> None:
        w.store_words(address + self.chunk, [*chunk, Int32(0)])

    def announced(self, address: Int32) -> Chunk:
        return Chunk(*w.load_words(address + self.chunk, 4, Int32)[:3])

    def put(
        self, args: Args, head: Int32, first_token: Int32, valid: Int32, address: Int32, lane: Int32, number: Any = 0
    ) -> None:
        """Of a head that is the CTA's head ``number``, and a chunk of ``valid`` (1 to 64) tokens. By a warp. Tokens from ``valid`` on are not read."""
        first = 2 * lane
        places = [first_token + cutlass.min(first + i, valid - 1) for i in range(2)]
        g, beta = ([tensor[at, head] for at in places] for tensor in (args.g, args.beta))
        amplitude, bias = self.parameters(args, head)
        zero, steps, betas = Float32(0.0), [], []
        for i in range(2):
            inside = first + i < valid
            step = self.gate.log_decay(Float32(g[i]), amplitude, bias) * Float32(LOG2_E)
            step = w.asm("max.NaN.f32 $0, $1, $2;", [Float32], [step, Float32(_SMALLEST)])[0]
            steps.append(w.chosen(inside, step, zero))
            betas.append(w.chosen(inside, self.beta.value(Float32(beta[i])), zero))
        total = w.prefix_sum(steps[0] + steps[1])
        before = w.chosen(lane >= 1, cute.arch.shuffle_sync_up(total, 1), zero)
        sums = [before + steps[0], total]
        next_block = w.shuffled(sums[0], (lane | 7) + 1)
        behind = [w.exp2(next_block - x) for x in sums]
        faded = [w.exp2(x - cute.arch.shuffle_sync_up(x, 4)) for x in sums]
        faded = [w.chosen(first + i < valid, faded[i], zero) for i in range(2)]
        place = address + 8 * lane
        for at, pair in ((self.sums, sums), (self.betas, betas), (self.behind, behind), (self.faded(number), faded)):
            w.store_words(place + at, pair)

    def parameters(self, args: Args, head: Int32) -> tuple[Float32, Float32]:
        """Amplitude and bias of a head's gate."""
        amplitude, bias = Float32(1.0), Float32(0.0)
        if self.problem.a_log_dtype:
            amplitude = self.gate.amplitude(Float32(args.a_log[head]))
        if self.problem.bias_dtype:
            bias = Float32(args.dt_bias[head])
        return amplitude, bias

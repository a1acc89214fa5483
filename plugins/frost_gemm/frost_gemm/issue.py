"""The order in which the MMAs of one K step are issued, and which operands the matrix unit keeps between them.

A tile of several products, or of more rows than one instruction has, takes several instructions that read the same part of A or of B.
The collectors of the matrix unit keep an operand for the instructions that come next: the first one fills, the last one is the last use.
Pure arithmetic. Imported by ``kernels.tcgen05``.

References: PTX ISA, "tcgen05.mma", collector buffer usage. B is kept only by instructions with 128 rows a CTA, as all here are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

from .facts import ArchFacts
from .ir import Gemm

__all__ = ["Issue", "issues"]


class Issue(NamedTuple):
    """One MMA: of product ``gemm``, rows of block ``block``. What becomes of its operands in the collectors of A and B: "discard",
    "fill", "use" or "lastuse"."""

    gemm: int
    block: int
    a: str
    b: str


def issues(gemms: Sequence[Gemm], blocks: int, facts: ArchFacts) -> tuple[Issue, ...]:
    """One MMA for each product and block of rows, neighbours with a common operand where there are any.

    Where B can be kept the blocks of a product follow each other, and the next product begins with the block that the last one ended
    with; else the products of a block follow each other.
    """
    if facts.b_collector:
        turns = [range(blocks), range(blocks)[::-1]]
        order = [(g, block) for g in range(len(gemms)) for block in turns[g % 2]]
    else:
        order = [(g, block) for block in range(blocks) for g in range(len(gemms))]
    a = _kept([(gemms[g].a, block) for g, block in order], facts.a_collector)
    b = _kept([gemms[g].b for g, _ in order], facts.b_collector)
    return tuple(Issue(g, block, *kept) for (g, block), *kept in zip(order, a, b, strict=True))


def _kept(operands: Sequence[Hashable], collector: bool) -> list[str]:
    """What becomes of the operand of each instruction of a sequence."""
    if not collector:
        return ["discard"] * len(operands)
    words = {(False, False): "discard", (False, True): "fill", (True, True): "use", (True, False): "lastuse"}
    same = [False, *(x == y for x, y in pairwise(operands)), False]
    return [words[before, after] for before, after in pairwise(same)]

"""The order in which a persistent grid walks the tiles of a problem.

A tile here is what one cluster computes. Tiles are numbered; ``locate`` turns a number into coordinates. The walk goes down ``width``
columns of tiles at a time, so that the tiles in flight form a block about as high as it is wide, in elements: that block reads the
least of A and B, whatever the cache holds. Imported by the kernels.

8-bit operands do better with narrower blocks where M is long: on an H200, 8192 x 8192 x 8192 took 5 % and 8192 x 28672 x 4096 12 % less
time with 4 columns than with a square, while products of 4096 rows took up to 4 % more. 16-bit ones had no such preference.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from ..config import TileConfig
from ..facts import ArchFacts
from .args import Args

__all__ = ["NARROW", "Problem", "locate", "problem", "raster_width"]

NARROW = 4


class Problem(NamedTuple):
    """Counts of tiles, Int32: along M, along N, in all batches together; and the columns that are walked together."""

    tiles_m: Int32
    tiles_n: Int32
    tiles: Int32
    width: Int32


def raster_width(config: TileConfig, facts: ArchFacts, rows: int, cols: int) -> int:
    """Columns of ``rows`` x ``cols`` tiles that are walked together: the knob, or what makes the tiles in flight a square."""
    in_flight = max(1, facts.sm_count // config.cluster)
    return config.raster or max(1, round(math.sqrt(in_flight * rows / cols)))


def problem(args: Args, rows: int, cols: int, width: int, narrow_above: int = 0) -> Problem:
    """The tiles of ``rows`` x ``cols`` elements, walked ``width`` columns at a time; ``NARROW`` at most where there are more than
    ``narrow_above`` tiles along M, unless that is 0. For host code."""
    tiles_m, tiles_n = cute.ceil_div(args.m, rows), cute.ceil_div(args.n, cols)
    together = cutlass.min(tiles_n, width)
    if narrow_above and width > NARROW:
        together = cutlass.min(together, width - (width - NARROW) * Int32(tiles_m > narrow_above))
    return Problem(tiles_m, tiles_n, tiles_m * tiles_n * args.l, together)


@cute.jit
def locate(tiles: Problem, number: Int32) -> tuple[Int32, Int32, Int32]:
    """Coordinates (m, n, batch) of tile ``number``, in tiles."""
    in_batch = tiles.tiles_m * tiles.tiles_n
    batch = number // in_batch
    rest = number - batch * in_batch
    block = rest // (tiles.width * tiles.tiles_m)
    first = block * tiles.width
    width = cutlass.min(tiles.width, tiles.tiles_n - first)
    rest = rest - first * tiles.tiles_m
    m = rest // width
    return m, first + rest - m * width, batch

"""The walk of a persistent grid over its tiles: every tile once, blocks of columns at a time."""

import os
import tempfile
from types import SimpleNamespace

import pytest

os.environ.setdefault("CUTE_DSL_NO_CACHE", "1")
pytest.importorskip("cutlass")
pytest.importorskip("ptx_emulator")

import cutlass
import ptx_emulator
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor
from frost_gemm.config import TileConfig
from frost_gemm.facts import arch_facts
from frost_gemm.kernels.sched import NARROW, Problem, locate, problem, raster_width

from cudnn_core import DeviceInfo

TILE = (10, 7)  # elements


class Walk:
    """Writes (m, n, batch) of every number, and how many tiles there are."""

    def __init__(self, width, narrow_above):
        self.width, self.narrow_above = width, narrow_above

    @cute.jit
    def host(self, m: Int32, n: Int32, batches: Int32, out: cute.Tensor):
        tiles = problem(SimpleNamespace(m=m, n=n, l=batches), *TILE, self.width, self.narrow_above)
        self.kernel(tiles, out).launch(grid=(1, 1, 1), block=(256, 1, 1))

    @cute.kernel
    def kernel(self, tiles: Problem, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        if thread < tiles.tiles:
            place = locate(tiles, thread)
            for axis in cutlass.range_constexpr(3):
                out[thread, axis] = place[axis]


def walk(width, m, n, batches, narrow_above=0):
    """Every tile's place in the order of the walk, for an m x n problem in tiles with ragged last ones."""
    out = torch.full((256, 3), -1, dtype=torch.int32)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_100a --keep-ptx --dump-dir {folder}"
        fake = make_fake_compact_tensor(cutlass.Int32, (256, 3), stride_order=(1, 0), assumed_align=16)
        compiled = cute.compile(Walk(width, narrow_above).host, Int32(0), Int32(0), Int32(0), fake, options=options)
    given = from_dlpack(out, assumed_align=16)
    ptx_emulator.launch(compiled, m * TILE[0] - 3, n * TILE[1] - 1, batches, given, check="raise")
    count = m * n * batches
    assert (out[count:] == -1).all()
    return [tuple(place) for place in out[:count].tolist()]


@pytest.mark.parametrize(
    ("width", "m", "n", "batches"), [(1, 5, 3, 2), (2, 4, 5, 3), (3, 7, 3, 1), (8, 3, 5, 2), (4, 1, 9, 1)]
)
def test_every_tile_is_visited_once_in_blocks_of_columns(width, m, n, batches):
    assert walk(width, m, n, batches) == in_blocks(width, m, n, batches)


@pytest.mark.parametrize(("m", "width"), [(6, 6), (7, NARROW)])
def test_long_problems_are_walked_in_narrow_blocks_where_that_is_asked_for(m, width):
    assert walk(6, m, 13, 2, narrow_above=6) == in_blocks(width, m, 13, 2)


def in_blocks(width, m, n, batches):
    return [
        (row, column, batch)
        for batch in range(batches)
        for first in range(0, n, width)
        for row in range(m)
        for column in range(first, min(first + width, n))
    ]


@pytest.mark.parametrize(("rows", "cols", "cluster"), [(128, 128, 1), (256, 256, 2), (128, 256, 1), (256, 64, 4)])
def test_tiles_in_flight_form_a_square(rows, cols, cluster):
    facts = arch_facts(DeviceInfo.preset("B200"))
    config = TileConfig(rows, cols, cluster_m=cluster)
    width = raster_width(config, facts, rows, cols)
    in_flight = facts.sm_count / cluster
    height = in_flight / width
    assert 0.7 < height * rows / (width * cols) < 1.5
    assert raster_width(TileConfig(rows, cols, raster=3), facts, rows, cols) == 3

"""Who has what to do: chunks of the prepare kernels, in one launch or two, and work items of the scan's passes."""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import cuda.bindings.driver as cuda
from _blocks import Compiled
from cutlass import Int32, Int64, cute
from linear_attention.kernels.arguments import Args, unpack
from linear_attention.kernels.chunks import ALL, FIRST, LAST, find_chunk, most_chunks
from linear_attention.kernels.work import count_items, locate
from linear_attention.problem import Problem

CHUNK = 64
ROW = 4  # words of O that a CTA writes


def problem(heads=1, key=64, value=64):
    return Problem("gdn", "bfloat16", heads, heads, heads, key, value, index_dtype="int32")


class Chunks:
    """[most_chunks] rows of (first, valid, slot, 1)."""

    def __init__(self, part):
        self.part = part

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        args = unpack(problem(), words)
        self.kernel(args).launch(grid=(most_chunks(args, Int32(self.part)), 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, args: Args):
        number, _, _ = cute.arch.block_idx()
        write(args, number, (*find_chunk(args, Int32(self.part), number), Int32(1)))


class Items:
    """Rows of (sequence, head, slab, segment) of a pass that covers all segments but the last."""

    def __init__(self, heads, slabs, fewer):
        self.problem, self.slabs, self.fewer = problem(heads), slabs, fewer

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        args = unpack(self.problem, words)
        covered = args.segments - 1
        count = count_items(self.problem, args, self.slabs, covered, self.fewer)
        self.kernel(args, covered).launch(grid=(count, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, args: Args, covered: Int32):
        number, _, _ = cute.arch.block_idx()
        work = locate(self.problem, args, self.slabs, covered, self.fewer, number)
        write(args, number, (work.sequence, work.head, work.slab, work.segment))


@cute.jit
def write(args, number, row):
    if cute.arch.lane_idx() == 0:
        target = cute.make_tensor(cute.recast_ptr(args.o.iterator, dtype=Int32), cute.make_layout(4096))
        for i, value in enumerate(row):
            target[number * ROW + i] = value


@functools.cache
def compiled(kernel, *options):
    made = kernel(*options)
    return Compiled(made, problem(options[0] if kernel is Items else 1))


def rows(made, boundaries, tokens, segments):
    o = np.full(4096, -1, np.int32)
    made.run(
        {"tokens": tokens, "sequences": len(boundaries) - 1, "segments": segments},
        {"O": o, "boundaries": np.array(boundaries, np.int32)}, [o],
    )  # fmt: skip
    found = o.reshape(-1, ROW).tolist()
    return [row for row in found if row != [-1] * ROW]


def chunks_of(start, length, slot):
    return [
        (start + chunk * CHUNK, min(CHUNK, length - chunk * CHUNK), slot + chunk)
        for chunk in range(-(-length // CHUNK))
    ]


@pytest.mark.parametrize("segments", [2, 3, 5])
@pytest.mark.parametrize(
    ("start", "length", "behind"), [(0, 640, 0), (0, 641, 0), (70, 200, 500), (3, 60, 1), (5, 0, 64)]
)
def test_two_launches_have_all_chunks_of_a_sequence_once(segments, start, length, behind):
    """The first has those of all segments but the last."""
    tokens = start + length + behind
    first, last = (
        [
            tuple(row[:3])
            for row in rows(compiled(Chunks, part), [start, start + length], tokens, segments)
            if row[1] > 0
        ]
        for part in (FIRST, LAST)
    )
    wanted = chunks_of(start, length, start // CHUNK)
    cut = min((segments - 1) * -(-len(wanted) // segments), len(wanted))
    assert (first, last) == (wanted[:cut], wanted[cut:])


@pytest.mark.parametrize("segments", [1, 4])
def test_one_launch_has_all_chunks_of_all_sequences_once(segments):
    boundaries = [5, 200, 200, 264, 400]
    found = [tuple(row[:3]) for row in rows(compiled(Chunks, ALL), boundaries, 420, segments) if row[1] > 0]
    pairs = enumerate(pairwise(boundaries))
    assert found == [chunk for n, (a, b) in pairs for chunk in chunks_of(a, b - a, a // CHUNK + n)]


@pytest.mark.parametrize(("slabs", "fewer"), [(4, 2), (3, 1), (2, 0)])
@pytest.mark.parametrize("segments", [2, 4])
def test_items_are_every_slab_of_every_segment_but_the_last_slabs_of_the_first(slabs, fewer, segments):
    heads, boundaries = 3, [0, 100, 300]
    found = [tuple(row) for row in rows(compiled(Items, heads, slabs, fewer), boundaries, 300, segments)]
    wanted = {
        (n, head, slab, segment)
        for n in range(2) for head in range(heads) for segment in range(segments - 1)
        for slab in range(slabs - (fewer if segment == 0 else 0))
    }  # fmt: skip
    assert len(found) == len(wanted)
    assert set(found) == wanted
    if slabs % 2 == 0:  # a cluster's two items have slabs of one head
        assert all(
            a[:2] == b[:2] and a[3] == b[3] and a[2] + 1 == b[2] for a, b in zip(found[::2], found[1::2], strict=True)
        )

"""O of tokens in no sequence."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import functools

import cuda.bindings.driver as cuda
from _blocks import Compiled
from cutlass import Int64, cute
from linear_attention.kernels.arguments import Args, unpack
from linear_attention.kernels.gaps import zero_gaps
from linear_attention.limits import MOST_TOKENS
from linear_attention.problem import SLAB, Problem

PROBLEM = Problem("gdn", "bfloat16", 1, 1, 2, 64, 128, index_dtype="int32")
THREADS = 32


class Gaps:
    def __init__(self, problem):
        self.problem = problem

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        args = unpack(self.problem, words)
        self.kernel(args).launch(grid=(args.sequences, 2, 2), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, args: Args):
        n, head, slab = cute.arch.block_idx()
        zero_gaps(args, n, head, slab, cute.arch.thread_idx()[0], THREADS)


@functools.cache
def compiled():
    return Compiled(Gaps(PROBLEM), PROBLEM)


def test_the_step_past_the_last_piece_of_the_most_tokens_is_an_int32():
    pieces = MOST_TOKENS * (2 * SLAB // 16)
    most_threads = 1024
    assert pieces + most_threads < 2**31


@pytest.mark.parametrize(
    ("boundaries", "kept"),
    [
        ((0, 5, 9), set(range(9))),
        ((3, 5, 13), set(range(3, 13))),
        ((0, 13), set(range(13))),
        ((4, 4), set()),
        ((13, 13), set()),
        ((0, 2, 2), {0, 1}),
    ],
)
def test_rows_outside_are_zero_and_others_untouched(boundaries, kept):
    tokens = 13
    memory = np.full((tokens, 2, 192), 7, np.int16)  # a gap of 64 channels behind every row
    o = memory[:, :, :128]
    bounds = np.array(boundaries, np.int32)
    compiled().run({"tokens": tokens, "sequences": len(boundaries) - 1}, {"O": memory, "boundaries": bounds}, [])
    want = np.full((tokens, 2, 192), 7, np.int16)
    for token in set(range(tokens)) - kept:
        want[token, :, :128] = 0
    np.testing.assert_array_equal(memory, want)
    assert o.base is memory

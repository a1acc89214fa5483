"""The states that leave segments, from summaries."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import cuda.bindings.driver as cuda
from _blocks import Compiled
from cutlass import Int64, cute
from linear_attention.kernels.arguments import unpack
from linear_attention.kernels.combine import Combine
from linear_attention.problem import Problem


class Host:
    def __init__(self, problem):
        self.problem = problem

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        Combine(self.problem).launch(unpack(self.problem, words), stream)


@functools.cache
def compiled(key, value):
    problem = Problem("gdn", "bfloat16", 1, 1, 2, key, value)
    return Compiled(Host(problem), problem)


def run(key, value, segments, sequences=1, **options):
    """Random summaries, NaN where nobody has written; compared with the recurrence in float64."""
    heads = 2
    rng = np.random.default_rng(key + segments)
    shape = (sequences, heads, segments, value + key, key)
    summaries = np.full(shape, np.nan, np.float32)
    summaries[:, :, : segments - 1, :value] = rng.standard_normal(summaries[:, :, : segments - 1, :value].shape)
    maps = rng.standard_normal((sequences, heads, max(segments - 2, 0), key, key)) / np.sqrt(key)
    summaries[:, :, 1 : segments - 1, value:] = maps
    want = summaries.astype(np.float64)
    for s in range(1, segments - 1):
        want[:, :, s, :value] += want[:, :, s - 1, :value] @ want[:, :, s, value:]
    before = summaries.copy()
    compiled(key, value).run({"sequences": sequences, "segments": segments}, {"summaries": summaries}, [], **options)
    np.testing.assert_allclose(summaries[:, :, :-1, :value], want[:, :, :-1, :value], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(summaries[:, :, :, value:], before[:, :, :, value:])
    np.testing.assert_array_equal(summaries[:, :, -1], before[:, :, -1])


@pytest.mark.parametrize("segments", [2, 3, 4])
def test_states_follow_the_recurrence(segments):
    run(64, 64, segments)


@pytest.mark.L2
@pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("random", 1), ("random", 2)])
@pytest.mark.parametrize(("key", "value", "segments"), [(64, 128, 6), (128, 64, 3), (128, 128, 5)])
def test_every_size_and_schedule(key, value, segments, schedule, seed):
    run(key, value, segments, sequences=2 if key == 64 else 1, schedule=schedule, seed=seed)

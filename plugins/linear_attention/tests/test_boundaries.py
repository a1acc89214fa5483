"""What boundaries count as, in the emulator: the largest up to each, held to the tokens."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import cuda.bindings.driver as cuda
from _blocks import Compiled
from cutlass import Int64, cute
from la_cases import recurrence
from linear_attention.kernels.arguments import unpack
from linear_attention.kernels.boundaries import THREADS, Boundaries
from linear_attention.problem import Problem

TOKENS = 5000
GUARD = -77
TYPES = ["int32", "int64"]


class Alone:
    def __init__(self, problem):
        self.problem, self.boundaries = problem, Boundaries(problem)
        self.kernel_parts = {"boundaries": self.boundaries}

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        self.boundaries.launch(unpack(self.problem, words), stream)


@functools.cache
def compiled(index):
    problem = Problem("gdn", "bfloat16", 1, 1, 1, 64, 64, index_dtype=index)
    return Compiled(Alone(problem), problem)


def check(given, index, tokens=TOKENS, **options):
    given = np.array(given, index)
    memory = np.full(len(given) + 8, GUARD, np.int32)
    compiled(index).run(
        {"tokens": tokens, "sequences": len(given) - 1}, {"cu_seqlens": given, "boundaries": memory}, [memory],
        **{"strict": True, **options},
    )  # fmt: skip
    found = memory[: len(given)]
    np.testing.assert_array_equal(found, recurrence.boundaries(given, tokens))
    assert (memory[len(given) :] == GUARD).all()
    return found.tolist()


def anything(count, seed=0):
    """Boundaries that rise on the whole and fall often, some outside the tokens."""
    rng = np.random.default_rng(seed)
    found = np.linspace(-200, TOKENS + 200, count) + rng.normal(0, 300, count)
    found[rng.random(count) < 0.1] = -(2**31)
    return found.astype(np.int64)


@pytest.mark.parametrize("index", TYPES)
def test_the_largest_so_far_counts(index):
    assert check([0, 3, 2, 7, 7, 1, 9], index, tokens=8) == [0, 3, 3, 7, 7, 7, 8]
    assert check([-5, 4, -1, 3, 999], index, tokens=8) == [0, 4, 4, 4, 8]
    assert check([6, 2], index, tokens=8) == [6, 6]


def test_an_int64_that_is_no_int32_is_held_before_it_is_one():
    assert check([-(2**40), 2**32 + 1, 3, 2**62], "int64", tokens=8) == [0, 8, 8, 8]


@pytest.mark.parametrize("index", TYPES)
@pytest.mark.parametrize("count", [2, 3, 31, 32, 33, 34, 65, 1000, THREADS, THREADS + 1, 2 * THREADS + 5])
def test_every_number_of_boundaries(count, index):
    check(anything(count, seed=count), index, schedule="random", seed=count)


def test_rounds_see_what_earlier_ones_found():
    given = np.zeros(4 * THREADS, np.int64)
    given[7], given[2 * THREADS + 3] = 11, 12
    found = check(given, "int32")
    assert [found[at] for at in (6, 7, 2 * THREADS + 2, 2 * THREADS + 3, 4 * THREADS - 1)] == [0, 11, 11, 12, 12]


@pytest.mark.parametrize("count", [40, 3 * THREADS])
def test_boundaries_in_order_stay_as_they_are(count):
    given = np.sort(np.random.default_rng(1).integers(0, TOKENS + 1, count))
    assert check(given, "int64") == given.tolist()

"""GDN's inverse of unit lower triangular matrices in the emulator, against numpy in fp64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import cutlass
from _inverses import SIZE, Inverses, all_keys, check, exact, fragment, runner
from cutlass import cute
from linear_attention.kernels import inverse

BOUNDS = {
    "random": 2e-6,
    "equal": 4e-6,
    "nearly equal": 3e-5,
    "random, beta 2": 1e-5,
    "equal, beta 1.9": 2e-4,
    "nearly equal, beta 1.999": 1e-3,
    "long": 1e-4,
}


@cute.jit
def put(n, matrix, scratch, lane, warp):
    for row in cutlass.range_constexpr(4):
        if warp == row:
            for column in cutlass.range_constexpr(row + 1):
                values = [n[matrix, 16 * row + i, 16 * column + j] for i, j in fragment(lane)]
                put_block(scratch, row, column, values, lane)
    corner = [n[matrix, 16 * warp + i, 16 * warp + j] for i, j in fragment(lane)[2:4]]
    inverse.invert_diagonal(scratch, warp, corner, lane)


def put_block(scratch, row, column, values, lane):
    if column == row:
        inverse.put_diagonal(scratch, row, values, lane)
    elif column == row - 1:
        inverse.put_beside(scratch, row, values, lane)
    else:
        inverse.put_far(scratch, row, column, values, lane)


@pytest.fixture(scope="module")
def inverses(tmp_path_factory):
    return runner(Inverses(inverse, put), tmp_path_factory.mktemp("inverse"))


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_inverse_has_the_error_of_16_bit_products(inverses, schedule):
    n = all_keys()
    n[:, np.triu(np.ones((SIZE, SIZE), bool))] = np.nan  # not read, or not used
    check(inverses(n, schedule=schedule, seed=3), n, BOUNDS)


def test_ones_and_zeros_are_exact(inverses):
    ordinary = np.zeros((3, SIZE, SIZE))
    ordinary[1] = -1.0  # A is 1 on the diagonal and -1 below it
    ordinary[2, 40, 3] = ordinary[2, 17, 16] = 0.5
    found = np.nan_to_num(inverses(ordinary, schedule="random", seed=5))
    np.testing.assert_array_equal(found, [exact(matrix) for matrix in ordinary])


def test_range_is_that_of_fp32(inverses):
    n = np.zeros((1, SIZE, SIZE))
    n[0, 20, 1], n[0, 50, 20], n[0, 7, 2] = 1e6, -1e30, 3e5  # beyond fp16
    np.testing.assert_allclose(np.nan_to_num(inverses(n))[0], exact(n[0]), rtol=2e-5)

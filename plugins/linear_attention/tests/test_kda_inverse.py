"""KDA's inverse, of matrices with 8 x 8 identities on the diagonal, in the emulator, against numpy in fp64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

from _inverses import KEYS, SIZE, Inverses, all_keys, check, exact, runner
from cutlass import Int32, cute
from linear_attention.kernels import kda_inverse

GROUP = 8


@cute.jit
def put(n, matrix, scratch, lane, warp):
    if warp == 0:
        for group in range(SIZE // GROUP):
            for column in range(group):
                row, first = GROUP * group + lane // 4, GROUP * column + lane % 4 * 2
                pair = [n[matrix, row, first + e] for e in range(2)]
                kda_inverse.put_lower(scratch, Int32(group), Int32(column), pair)


@pytest.fixture(scope="module")
def inverses(tmp_path_factory):
    return runner(Inverses(kda_inverse, put), tmp_path_factory.mktemp("inverse"))


def outside(n):
    """Zeros in the 8 x 8 blocks on the diagonal."""
    return n * (1 - np.kron(np.eye(SIZE // GROUP, dtype=np.float32), np.ones((GROUP, GROUP), np.float32)))


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_inverse_has_the_error_of_16_bit_products(inverses, schedule):
    n = outside(all_keys())
    check(inverses(n, schedule=schedule, seed=3), n, dict.fromkeys(KEYS, 2e-5))


def test_ones_and_zeros_are_exact(inverses):
    ordinary = np.zeros((2, SIZE, SIZE))
    ordinary[1, 40, 3] = ordinary[1, 24, 16] = 0.5
    found = np.nan_to_num(inverses(ordinary))
    np.testing.assert_array_equal(found, [exact(matrix) for matrix in ordinary])


def test_range_is_that_of_fp32(inverses):
    n = np.zeros((1, SIZE, SIZE))
    n[0, 20, 1], n[0, 50, 20], n[0, 15, 2] = 1e6, -1e30, 3e5  # beyond fp16
    np.testing.assert_allclose(np.nan_to_num(inverses(n))[0], exact(n[0]), rtol=2e-5)

"""The inverse of unit lower triangular matrices in the emulator, against numpy in fp64."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import cuda.bindings.driver as cuda
import cutlass
import ptx_emulator
from cutlass import Float32, Int64, cute
from cutlass.cute import runtime
from cutlass.memory import SmemAllocator
from linear_attention.kernels import inverse
from linear_attention.kernels import warp as w

from cudnn_core import HostBlock

SIZE = 64
BARRIER = 3


class Inverses:
    """a[i] = (I - n[i])^-1 where the kernel writes: block (r, c) for r >= c. ``words``: addresses of n and a, number of matrices.

    ``halves``: all blocks below the diagonal are halves, as callers of ``unit_lower_inverse`` write them. ``grouped``: its."""

    def __init__(self, halves, grouped):
        self.halves, self.grouped = halves, grouped

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        block = cute.make_tensor(
            cute.make_ptr(Int64, words, cute.AddressSpace.generic, assumed_align=8), cute.make_layout(3)
        )
        layout = cute.make_layout((block[2], SIZE, SIZE), stride=(SIZE * SIZE, SIZE, 1))
        n, a = (
            cute.make_tensor(cute.make_ptr(Float32, block[i], cute.AddressSpace.gmem, assumed_align=16), layout)
            for i in range(2)
        )
        self.kernel(n, a).launch(grid=[block[2], 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, n: cute.Tensor, a: cute.Tensor):
        thread, matrix = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        scratch = SmemAllocator().allocate(inverse.SCRATCH_BYTES, 128).toint()
        lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
        self.put(n, matrix, scratch, lane, warp)

        def emit(r, c, values):
            for i, (j, k) in enumerate(fragment(lane)):
                a[matrix, 16 * r + k, 16 * c + j] = values[i]

        if cutlass.const_expr(self.halves):
            cute.arch.sync_threads()
            inverse.unit_lower_inverse(scratch, thread, BARRIER, emit, grouped=self.grouped)
        else:
            corner = [n[matrix, 16 * warp + i, 16 * warp + j] for i, j in fragment(lane)[2:4]]
            inverse.invert_diagonal(scratch, warp, corner, lane)
            cute.arch.barrier(barrier_id=BARRIER, number_of_threads=128)
            inverse.columns(scratch, warp, lane, emit)

    @cute.jit
    def put(self, n, matrix, scratch, lane, warp):
        for row in cutlass.range_constexpr(4):
            if warp == row:
                for column in cutlass.range_constexpr(row + 1):
                    values = [n[matrix, 16 * row + i, 16 * column + j] for i, j in fragment(lane)]
                    self.put_block(scratch, row, column, values, lane)

    def put_block(self, scratch, row, column, values, lane):
        if column == row and not self.halves:
            inverse.put_diagonal(scratch, row, values, lane)
        elif column == row:
            for i, (line, element) in enumerate(fragment(lane)[::2]):
                if i != 2:  # columns 8-15 of rows 0-7
                    pair = [cutlass.select_(element + e < line, values[2 * i + e], Float32(0.0)) for e in range(2)]
                    place = scratch + 1024 * (6 + row) + line * 64 + (element * 4 ^ ((line >> 1) & 1) * 32)
                    w.store_words(place, pair)
        elif self.halves:
            block = scratch + 1024 * inverse.block_number(row, column)
            for i, (line, _) in enumerate(fragment(lane)[::2]):
                place = block + line * 32 + (((i // 2) ^ ((line >> 2) & 1)) << 4) + lane % 4 * 4
                for half, word in enumerate(w.split(*values[2 * i : 2 * i + 2])):
                    w.store_words(place + 512 * half, [word])
        elif column == row - 1:
            inverse.put_beside(scratch, row, values, lane)
        else:
            inverse.put_far(scratch, row, column, values, lane)


def fragment(lane):
    """(row, column) of the values of a block."""
    return [(lane // 4 + 8 * h, 8 * n + 2 * (lane % 4) + e) for n in range(2) for h in range(2) for e in range(2)]


@functools.cache
def compiled(folder, halves, grouped):
    options = f"--gpu-arch sm_90a --keep-ptx --keep-cubin --enable-tvm-ffi --dump-dir {folder}"
    return cute.compile(Inverses(halves, grouped).host, Int64(0), runtime.make_fake_stream(), options=options)


@pytest.fixture(scope="module")
def inverses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inverse")

    def run(n, halves=False, grouped=False, **options):
        n = np.ascontiguousarray(n, np.float32)
        a = np.full_like(n, np.nan)
        block = HostBlock(np.array([n.ctypes.data, a.ctypes.data, len(n)], np.int64).tobytes(), (0, 8), ())
        ptx_emulator.launch(compiled(folder, halves, grouped), block, None, buffers=[n, a], check="raise", **options)
        return a

    return run


def keys(spread, beta, norm=1.0, seed=0, channels=128):
    """-beta K K^T of one direction plus ``spread`` of noise, at the norm. What it has above the diagonal is not part of the matrix."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((1, channels)) + spread * rng.standard_normal((SIZE, channels))
    k *= norm / np.linalg.norm(k, axis=1, keepdims=True)
    return (-beta * k @ k.T).astype(np.float32)


def exact(n):
    return np.tril(np.linalg.inv(np.eye(SIZE) - np.tril(n.astype(np.float64), -1)))


# (spread of the keys, beta, norm), error of A relative to its largest entry
CASES = {
    "random": ((30.0, 0.5, 1.0), 4e-6),
    "equal": ((0.0, 0.999, 1.0), 4e-5),
    "nearly equal": ((0.01, 0.999, 1.0), 1e-4),
    "random, beta 2": ((30.0, 2.0, 1.0), 2e-5),
    "equal, beta 1.9": ((0.0, 1.9, 1.0), 1e-3),
    "nearly equal, beta 1.999": ((0.01, 1.999, 1.0), 2e-3),
    "long": ((30.0, 0.999, 3.0), 1e-3),
}


@pytest.mark.parametrize("halves", [False, pytest.param(True, marks=pytest.mark.L2)])
def test_inverse_has_the_error_of_16_bit_products(inverses, halves):
    n = np.stack([keys(*keyed) for keyed, _ in CASES.values()])
    n[:, np.triu(np.ones((SIZE, SIZE), bool))] = np.nan  # not read, or not used
    found = inverses(n, halves)
    for (name, (_, bound)), a, matrix in zip(CASES.items(), found, n, strict=True):
        below = np.kron(np.tril(np.ones((4, 4))), np.ones((16, 16))).astype(bool)
        assert np.isnan(a[~below]).all()  # not emitted
        want = exact(np.nan_to_num(matrix))
        error = abs(a - want)[below].max() / abs(want).max()
        assert error < bound, name


def test_groups_of_8_that_are_identities(inverses):
    """What blocks of 8 x 8 zeros on the diagonal leave out of the substitution changes no bit."""
    n = np.stack([keys(*keyed) for keyed, _ in CASES.values()])
    n *= 1 - np.kron(np.eye(SIZE // 8, dtype=np.float32), np.ones((8, 8), np.float32))
    found = inverses(n, halves=True, grouped=True)
    for (name, (_, bound)), a, matrix in zip(CASES.items(), found, n, strict=True):
        want = exact(matrix)
        assert abs(np.nan_to_num(a) - want).max() / abs(want).max() < bound, name
    np.testing.assert_array_equal(found, inverses(n, halves=True))


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

"""KDA's inverse, of matrices with 8 x 8 identities on the diagonal, in the emulator, against numpy in fp64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import cuda.bindings.driver as cuda
import ptx_emulator
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import runtime
from cutlass.memory import SmemAllocator
from linear_attention.kernels import kda_inverse
from test_inverse import CASES, SIZE, exact, fragment, keys

from cudnn_core import HostBlock

GROUP = 8


class Inverses:
    """a[i] = (I - n[i])^-1 where the kernel writes: block (r, c) of 16 for r >= c. ``words``: addresses of n and a, number of matrices."""

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
        scratch = SmemAllocator().allocate(kda_inverse.SCRATCH_BYTES, 16).toint()
        lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
        if warp == 0:
            for group in range(SIZE // GROUP):
                for column in range(group):
                    row, first = GROUP * group + lane // 4, GROUP * column + lane % 4 * 2
                    pair = [n[matrix, row, first + e] for e in range(2)]
                    kda_inverse.put_lower(scratch, Int32(group), Int32(column), pair)
        cute.arch.sync_threads()

        def emit(r, c, values):
            for i, (j, k) in enumerate(fragment(lane)):
                a[matrix, 16 * r + k, 16 * c + j] = values[i]

        kda_inverse.columns(scratch, warp, lane, emit)


@pytest.fixture(scope="module")
def inverses(tmp_path_factory):
    options = (
        f"--gpu-arch sm_90a --keep-ptx --keep-cubin --enable-tvm-ffi --dump-dir {tmp_path_factory.mktemp('inverse')}"
    )
    made = cute.compile(Inverses().host, Int64(0), runtime.make_fake_stream(), options=options)

    def run(n, **options):
        n = np.ascontiguousarray(n, np.float32)
        a = np.full_like(n, np.nan)
        block = HostBlock(np.array([n.ctypes.data, a.ctypes.data, len(n)], np.int64).tobytes(), (0, 8), ())
        ptx_emulator.launch(made, block, None, buffers=[n, a], check="raise", **options)
        return a

    return run


def outside(n):
    """Zeros in the 8 x 8 blocks on the diagonal."""
    return n * (1 - np.kron(np.eye(SIZE // GROUP, dtype=np.float32), np.ones((GROUP, GROUP), np.float32)))


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_inverse_has_the_error_of_16_bit_products(inverses, schedule):
    n = outside(np.stack([keys(*keyed) for keyed, _ in CASES.values()]))
    found = inverses(n, schedule=schedule, seed=3)
    below = np.kron(np.tril(np.ones((4, 4))), np.ones((16, 16))).astype(bool)
    for (name, (_, bound)), a, matrix in zip(CASES.items(), found, n, strict=True):
        assert np.isnan(a[~below]).all()  # not emitted
        want = exact(matrix)
        assert abs(a - want)[below].max() / abs(want).max() < bound, name


def test_ones_and_zeros_are_exact(inverses):
    ordinary = np.zeros((2, SIZE, SIZE))
    ordinary[1, 40, 3] = ordinary[1, 24, 16] = 0.5
    found = np.nan_to_num(inverses(ordinary))
    np.testing.assert_array_equal(found, [exact(matrix) for matrix in ordinary])


def test_range_is_that_of_fp32(inverses):
    n = np.zeros((1, SIZE, SIZE))
    n[0, 20, 1], n[0, 50, 20], n[0, 15, 2] = 1e6, -1e30, 3e5  # beyond fp16
    np.testing.assert_allclose(np.nan_to_num(inverses(n))[0], exact(n[0]), rtol=2e-5)

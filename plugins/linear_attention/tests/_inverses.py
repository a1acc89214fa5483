"""Kernels that invert unit lower triangular matrices I - N, in the emulator, and the matrices that they are given."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import numpy as np
import ptx_emulator
from cutlass import Float32, Int64, cute
from cutlass.cute import runtime
from cutlass.memory import SmemAllocator

from cudnn_core import HostBlock

SIZE = 64
BELOW = np.kron(np.tril(np.ones((4, 4))), np.ones((16, 16))).astype(bool)  # blocks that are emitted

# Spread of the keys, beta, norm.
KEYS = {
    "random": (30.0, 0.5, 1.0),
    "equal": (0.0, 0.999, 1.0),
    "nearly equal": (0.01, 0.999, 1.0),
    "random, beta 2": (30.0, 2.0, 1.0),
    "equal, beta 1.9": (0.0, 1.9, 1.0),
    "nearly equal, beta 1.999": (0.01, 1.999, 1.0),
    "long": (30.0, 0.999, 3.0),
}


class Inverses:
    """a[i] = (I - n[i])^-1 where the kernel writes: block (r, c) for r >= c. ``words``: addresses of n and a, number of matrices.

    ``put(n, matrix, scratch, lane, warp)`` brings what ``columns`` of ``module`` reads to scratch memory, by all warps of a CTA.
    """

    def __init__(self, module, put):
        self.module, self.put = module, put

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
        scratch = SmemAllocator().allocate(self.module.SCRATCH_BYTES, 128).toint()
        lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
        self.put(n, matrix, scratch, lane, warp)
        cute.arch.sync_threads()

        def emit(r, c, values):
            for i, (j, k) in enumerate(fragment(lane)):
                a[matrix, 16 * r + k, 16 * c + j] = values[i]

        self.module.columns(scratch, warp, lane, emit)


def runner(inverses, folder):
    """What runs them: matrices N to A, NaN where nothing is written."""
    options = f"--gpu-arch sm_90a --keep-ptx --keep-cubin --enable-tvm-ffi --dump-dir {folder}"
    made = cute.compile(inverses.host, Int64(0), runtime.make_fake_stream(), options=options)

    def run(n, **options):
        n = np.ascontiguousarray(n, np.float32)
        a = np.full_like(n, np.nan)
        block = HostBlock(np.array([n.ctypes.data, a.ctypes.data, len(n)], np.int64).tobytes(), (0, 8), ())
        ptx_emulator.launch(made, block, None, buffers=[n, a], check="raise", **options)
        return a

    return run


def fragment(lane):
    """(row, column) of the values of a block."""
    return [(lane // 4 + 8 * h, 8 * n + 2 * (lane % 4) + e) for n in range(2) for h in range(2) for e in range(2)]


def keys(spread, beta, norm=1.0, seed=0, channels=128):
    """-beta K K^T of one direction plus ``spread`` of noise, at the norm. What it has above the diagonal is not part of the matrix."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((1, channels)) + spread * rng.standard_normal((SIZE, channels))
    k *= norm / np.linalg.norm(k, axis=1, keepdims=True)
    return (-beta * k @ k.T).astype(np.float32)


def all_keys():
    return np.stack([keys(*keyed) for keyed in KEYS.values()])


def exact(n):
    return np.tril(np.linalg.inv(np.eye(SIZE) - np.tril(n.astype(np.float64), -1)))


def check(found, n, bounds):
    """``bounds`` by name of ``KEYS``: of the error of A relative to its largest entry."""
    for name, a, matrix in zip(KEYS, found, n, strict=True):
        assert np.isnan(a[~BELOW]).all()  # not emitted
        want = exact(np.nan_to_num(matrix))
        assert abs(a - want)[BELOW].max() / abs(want).max() < bounds[name], name

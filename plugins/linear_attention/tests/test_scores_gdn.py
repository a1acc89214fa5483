"""The scores of GDN in the emulator: P and d of chunks against numpy in fp64."""

from __future__ import annotations

import functools
import tempfile

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import cuda.bindings.driver as cuda
import cutlass
import ptx_emulator
import torch
from _gdn import CHUNK, TILE, Chunk, check_chunk, expected, matrix, mixed, problem, spiked
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import runtime
from cutlass.memory import SmemAllocator
from linear_attention.kernels import tiles
from linear_attention.kernels import warp as w
from linear_attention.kernels.scores_gdn import ScoresGdn, clear
from linear_attention.records import VECTORS

from cudnn_core import HostBlock

LINE = 128
VECTOR_BYTES = 1024
OUT = TILE + 256  # of a chunk: P, d


class Harness:
    """Chunk i of a launch: K, Q [chunks, 64, key], vectors [chunks, VECTOR_BYTES] -> out [chunks, OUT bytes]. One CTA makes them all, in the
    same places for P."""

    def __init__(self, problem):
        self.problem, self.stage = problem, ScoresGdn(problem)
        self.tile = TILE * (problem.key // 64)

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        block = cute.make_tensor(
            cute.make_ptr(Int64, words, cute.AddressSpace.generic, assumed_align=8), cute.make_layout(5)
        )

        def tensor(index, columns):
            pointer = cute.make_ptr(Uint32, block[index], cute.AddressSpace.gmem, assumed_align=16)
            return cute.make_tensor(pointer, cute.make_layout((64 * 64, columns), stride=(columns, 1)))

        words = self.problem.key // 2
        tensors = tensor(0, words), tensor(1, words), tensor(2, VECTOR_BYTES // 4), tensor(3, OUT // 4)
        self.kernel(*tensors, Int32(block[4])).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, k: cute.Tensor, q: cute.Tensor, vectors: cute.Tensor, out: cute.Tensor, chunks: Int32):
        thread, words = cute.arch.thread_idx()[0], self.problem.key // 2
        smem = SmemAllocator().allocate(2 * self.tile + VECTOR_BYTES + TILE + 256, 1024).toint()
        vector = smem + 2 * self.tile
        p = vector + VECTOR_BYTES
        clear(p, thread)
        for chunk in cutlass.range(chunks, unroll=1):
            for at in cutlass.range(thread, CHUNK * words, 128):
                row, word = at // words, at % words
                byte = row * LINE + (word * 4) % LINE
                place = smem + word * 4 // LINE * TILE + (byte ^ ((byte >> 3) & 0x70))
                w.store_words(place, [k[chunk * CHUNK + row, word]])
                w.store_words(place + self.tile, [q[chunk * CHUNK + row, word]])
            for at in cutlass.range(thread, VECTOR_BYTES // 4, 128):
                w.store_words(vector + 4 * at, [vectors[chunk, at]])
            tiles.fence_shared()
            cute.arch.sync_threads()
            self.stage.run(smem, smem + self.tile, vector, p, p + TILE, thread, lambda: None)
            cute.arch.sync_threads()
            if thread == 0:  # by the async proxy, which is what reads P in the kernel
                text = f"cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], {OUT}; "
                text += "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
                w.asm(text, [], [out[chunk, None].iterator.toint(), p], effects=True)
            cute.arch.sync_threads()


@functools.cache
def compiled(problem):
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_90a --keep-ptx --keep-cubin --enable-tvm-ffi --dump-dir {folder}"
        return cute.compile(Harness(problem).host, Int64(0), runtime.make_fake_stream(), options=options)


def vectors(problem, chunk):
    """The record's, with NaN where they are not for the scores."""
    found, want = np.full(VECTOR_BYTES // 4, np.nan, np.float32), expected(problem, chunk)
    sums = -np.cumsum(np.minimum(want["-g"] / np.log(2), 128))
    for name, value in (("sums", np.pad(sums, (0, CHUNK - chunk.valid), mode="edge")), ("norms", want["norms"])):
        found[VECTORS[name] // 4 :][: len(value)] = value
    found[VECTORS["norms"] // 4 + chunk.valid :] = 0
    return found


def check(problem, chunks, **options):
    k, q = (torch.stack([chunk.held[i] for chunk in chunks]) for i in range(2))
    for i, chunk in enumerate(chunks):
        k[i, chunk.valid :] = 0
    held = np.stack([vectors(problem, chunk) for chunk in chunks])
    out = np.zeros((len(chunks), OUT), np.uint8)
    addresses = [k.data_ptr(), q.data_ptr(), held.ctypes.data, out.ctypes.data, len(chunks)]
    block = HostBlock(np.array(addresses, np.int64).tobytes(), tuple(range(0, 32, 8)), ())
    ptx_emulator.launch(compiled(problem), block, None, buffers=[k, q, held, out], check="raise", **options)
    for number, (chunk, made) in enumerate(zip(chunks, out, strict=True)):
        found = {"P": matrix(made[:TILE]), "d": made[TILE:].view(np.float32).astype(np.float64)}
        check_chunk(problem, chunk, found, number)


def test_gates_of_all_sizes_and_partial_chunks():
    p = problem()
    cases = [(64, -20.0), (1, 0.0), (17, -1e-3), (63, -1e4), (64, spiked), (64, mixed)]
    check(p, [Chunk(p, valid, g=g, seed=i) for i, (valid, g) in enumerate(cases)])


def test_norms_of_all_sizes():
    p = problem(128, l2norm=True)
    norms = 10 ** np.random.default_rng(9).uniform(-1, 3, (CHUNK, 1))
    chunks = [Chunk(p, valid, norm=norm, seed=i) for i, (valid, norm) in enumerate([(64, norms), (33, 1.0)])]
    chunks[0].held[0][5] = chunks[0].held[1][7] = 0  # rows of zeros have no direction
    chunks[0].k[5] = chunks[0].q[7] = 0
    check(p, chunks)


@pytest.mark.parametrize("schedule", ["random", "late"])
def test_order_of_warps_does_not_matter(schedule):
    p = problem(l2norm=True)
    check(p, [Chunk(p), Chunk(p, 17, g=-np.inf, seed=1), Chunk(p, seed=2)], schedule=schedule, seed=7)


@pytest.mark.L2
@pytest.mark.parametrize("io", ["bfloat16", "float16"])
@pytest.mark.parametrize("key", [64, 128])
@pytest.mark.parametrize("l2norm", [False, True])
def test_sizes_types_and_norms(io, key, l2norm):
    p = problem(key, io, l2norm=l2norm)
    cases = [(64, 30.0, mixed), (63, 0.01, -0.01), (1, 30.0, -1.0), (16, 0.1, -0.5), (17, 1.0, spiked), (48, 30.0, 0.0)]
    chunks = [
        Chunk(p, valid, spread=spread, g=g, norm=5.0 if l2norm else 1.0, seed=100 + i)
        for i, (valid, spread, g) in enumerate(cases)
    ]
    check(p, chunks, schedule="random", seed=3)

"""The prepare stage of GDN in the emulator: T and the vectors of chunks against numpy in fp64."""

from __future__ import annotations

import functools
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import cuda.bindings.driver as cuda
import cutlass
import ptx_emulator
import torch
from _gdn import A_LOG, BIAS, CHUNK, TILE, Chunk, check_chunk, decoded, expected, mixed, problem, spiked
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import runtime
from cutlass.memory import SmemAllocator
from linear_attention.kernels import tiles
from linear_attention.kernels import warp as w
from linear_attention.kernels.arguments import ELEMENTS
from linear_attention.kernels.prepare_gdn import PrepareGdn

from cudnn_core import HostBlock

LINE = 128
OUT = TILE + 1024  # of a chunk: T, vectors
CHUNKS = 3  # of a CTA, one after the other on the same scratch
HEADS, HEAD = 3, 1


class Harness:
    """Chunk i of a launch: K [chunks, 64, key], g, beta [chunks * 64, HEADS], valid [chunks] -> out [chunks, OUT bytes]."""

    def __init__(self, problem):
        self.problem, self.stage = problem, PrepareGdn(problem)
        self.panels = problem.key // 64

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        p = self.problem
        block = cute.make_tensor(
            cute.make_ptr(Int64, words, cute.AddressSpace.generic, assumed_align=8), cute.make_layout(8)
        )
        chunks = Int32(block[7])

        def tensor(index, dtype, *shape):
            pointer = cute.make_ptr(dtype, block[index], cute.AddressSpace.gmem, assumed_align=16)
            return cute.make_tensor(pointer, cute.make_layout(shape, stride=(*shape[1:], 1)))

        self.kernel(
            tensor(0, cutlass.Uint32, 3 * CHUNKS * 64, p.key // 2),
            tensor(1, ELEMENTS[p.gate_dtype], 3 * CHUNKS * 64, HEADS),
            tensor(2, ELEMENTS[p.beta_dtype], 3 * CHUNKS * 64, HEADS),
            tensor(3, Int32, 3 * CHUNKS),
            tensor(4, Float32, HEADS),
            tensor(5, Float32, HEADS),
            tensor(6, cutlass.Uint32, 3 * CHUNKS, OUT // 4),
        ).launch(grid=[chunks // CHUNKS, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, k: cute.Tensor, g: cute.Tensor, beta: cute.Tensor, valid: cute.Tensor,
               a_log: cute.Tensor, bias: cute.Tensor, out: cute.Tensor):  # fmt: skip
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        p, stage, tile = self.problem, self.stage, TILE * self.panels
        smem = SmemAllocator().allocate(CHUNKS * tile + stage.scratch_bytes, 1024).toint()
        scratch = smem + CHUNKS * tile
        words = p.key // 2
        for at in cutlass.range(thread, CHUNKS * 64 * words, 128):
            row, word = at // words, at % words
            chunk, line = row // 64, row % 64
            byte = line * LINE + (word * 4) % LINE
            place = smem + chunk * tile + word * 4 // LINE * TILE + (byte ^ ((byte >> 3) & 0x70))
            w.store_words(place, [k[cta * CHUNKS * 64 + row, word]])
        tiles.fence_shared()
        args = SimpleNamespace(g=g, beta=beta, a_log=a_log, dt_bias=bias)
        for chunk in cutlass.range(CHUNKS, unroll=1):
            number = cta * CHUNKS + chunk
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == chunk:
                self.stage.tokens.put(args, Int32(HEAD), number * 64, valid[number], scratch, thread & 31)
            cute.arch.sync_threads()
            record, inside = out[number, None].iterator.toint(), valid[number]
            self.stage.run(smem + chunk * tile, record, scratch, inside, thread, 2)
            cute.arch.sync_threads()
            self.stage.send(smem + chunk * tile, record, thread)


@functools.cache
def compiled(problem):
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_90a --keep-ptx --keep-cubin --enable-tvm-ffi --dump-dir {folder}"
        return cute.compile(Harness(problem).host, Int64(0), runtime.make_fake_stream(), options=options)


def prepared(problem, chunks, **options):
    """What the kernel makes of the chunks, by name."""
    count = -(-len(chunks) // CHUNKS) * CHUNKS
    padded = [*chunks, *[chunks[-1]] * (count - len(chunks))]
    k = torch.cat([chunk.held[0] for chunk in padded]).contiguous()
    g, beta = (torch.full((count * 64, HEADS), torch.nan, dtype=chunks[0].held[i].dtype) for i in (2, 3))
    for i, x in ((2, g), (3, beta)):
        x[:, HEAD] = torch.cat([chunk.held[i] for chunk in padded])
    valid = np.array([chunk.valid for chunk in padded], np.int32)
    a_log, bias = (np.full(HEADS, np.nan, np.float32) for _ in range(2))
    a_log[HEAD], bias[HEAD] = A_LOG, BIAS
    out = np.zeros((count, OUT), np.uint8)
    arrays = [k, g, beta, valid, a_log, bias, out]
    addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data for x in arrays]
    block = HostBlock(np.array([*addresses, count], np.int64).tobytes(), tuple(range(0, 56, 8)), ())
    ptx_emulator.launch(compiled(problem), block, None, buffers=arrays, check="raise", **options)
    return [decoded(record) for record in out[: len(chunks)]]


def check(problem, chunks, **options):
    for number, (chunk, found) in enumerate(zip(chunks, prepared(problem, chunks, **options), strict=True)):
        check_chunk(problem, chunk, found, number)


def test_gates_of_all_sizes_and_partial_chunks():
    p = problem()
    cases = [(64, -20.0), (1, 0.0), (17, -1e-3), (63, -1e4), (64, spiked), (64, mixed)]
    check(p, [Chunk(p, valid, g=g, seed=i) for i, (valid, g) in enumerate(cases)])


def test_correlated_keys():
    p = problem(128, "float16")
    spreads = [(0.0, 0.999), (0.001, 0.999), (0.01, 1.0), (0.1, 0.999), (1.0, 0.5), (30.0, 1.0)]
    check(p, [Chunk(p, spread=spread, beta=beta, g=-1e-3, seed=i) for i, (spread, beta) in enumerate(spreads)])


def test_l2norm_logits_and_head_parameters():
    p = problem(
        128, gate_dtype="bfloat16", beta_dtype="bfloat16", l2norm=True, beta_sigmoid=True, neg_eigval=True,
        safe="softplus", a_log_dtype="float32", bias_dtype="float32",
    )  # fmt: skip

    def normal(rng):
        return rng.standard_normal(CHUNK)

    norms = 10 ** np.random.default_rng(9).uniform(-1, 3, (CHUNK, 1))
    chunks = [Chunk(p, valid, norm=norm, g=normal, beta=np.linspace(-2, 2, CHUNK), seed=i)
              for i, (valid, norm) in enumerate([(64, norms), (33, 1.0), (63, 0.02)])]  # fmt: skip
    chunks[0].held[0][5] = chunks[0].held[1][7] = 0  # rows of zeros have no direction
    chunks[0].k[5] = chunks[0].q[7] = 0
    check(p, chunks)


def test_rounding_errors_of_t_cancel_along_rows():
    p = problem(128)
    chunks = [Chunk(p, spread=spread, beta=0.9, g=0.0, seed=i) for i, spread in enumerate((0.5, 1.0, 3.0))]
    for chunk, found in zip(chunks, prepared(p, chunks), strict=True):
        error = found["T"] - expected(p, chunk)["T"]
        # Of rows 8 apart, what is left is the last one's. Independent errors add up to sqrt(8) of one.
        assert np.std(error.reshape(8, 8, CHUNK).sum(0)) < 0.5 * 8**0.5 * np.std(error)


def test_keys_of_any_length_give_finite_matrices():
    p = problem(128, "float16")
    chunks = [Chunk(p, norm=norm, beta=0.01, seed=i) for i, norm in enumerate([3.0, 10.0])]
    chunks.append(Chunk(p, norm=100.0, beta=1e-4, seed=3))
    check(p, chunks)


@pytest.mark.parametrize("schedule", ["random", "late"])
def test_order_of_warps_does_not_matter(schedule):
    p = problem()
    check(
        p,
        [Chunk(p), Chunk(p, 17, g=-np.inf, seed=1), Chunk(p, spread=0.01, beta=0.999, seed=2)],
        schedule=schedule,
        seed=7,
    )


@pytest.mark.L2
@pytest.mark.parametrize("io", ["bfloat16", "float16"])
@pytest.mark.parametrize("key", [64, 128])
@pytest.mark.parametrize("l2norm", [False, True])
def test_sizes_types_and_norms(io, key, l2norm):
    p = problem(key, io, l2norm=l2norm, gate_dtype=io, beta_dtype=io)
    chunks = [
        Chunk(p, valid, spread=spread, g=g, norm=5.0 if l2norm else 1.0, seed=100 + i)
        for i, (valid, spread, g) in enumerate(
            [(64, 30.0, mixed), (63, 0.01, -0.01), (1, 30.0, -1.0), (16, 0.1, -0.5), (17, 1.0, spiked), (48, 30.0, 0.0)]
        )
    ]
    check(p, chunks, schedule="random", seed=3)


@pytest.mark.L2
def test_gates_in_the_linear_domain():
    p = problem(domain="linear", gate_dtype="float16")
    check(p, [Chunk(p, g=lambda rng: rng.uniform(0, 1, CHUNK)), Chunk(p, g=0.0), Chunk(p, 40, g=1.0)])

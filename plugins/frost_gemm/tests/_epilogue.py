"""Kernels that only drain: accumulators come from the A operands, fp32 or int32 matrices [M, N, L], and go through an epilogue.

``run`` compiles such a kernel for a program, executes it in the emulator and returns the outputs. Chunks lie as the tensor cores leave
them: "wgmma" (a thread has rows r and r + 8, and pairs of columns) or "tcgen05" (a thread has a row).
"""

import os
import tempfile

os.environ.setdefault("CUTE_DSL_NO_CACHE", "1")

import cuda.bindings.driver as cuda
import cutlass
import numpy as np
import ptx_emulator
from cutlass import Int64, cute
from cutlass.cute.runtime import make_fake_stream
from frost_gemm.ir import argument_words
from frost_gemm.kernels.args import ELEMENTS, Args, unpack
from frost_gemm.kernels.epilogue import Chunk, Epilogue
from frost_gemm.kernels.sinks import Lanes

from cudnn_core import HostBlock

ARCHS = {"wgmma": "sm_90a", "tcgen05": "sm_100a"}
LANES = {"wgmma": Lanes((1, 2), (4, 8, 16)), "tcgen05": Lanes((), (1, 2, 4, 8, 16))}
ROWS = {"wgmma": 64, "tcgen05": 128}  # of 128 threads


def offsets(pattern, width):
    """The elements of a thread in a chunk of ``width`` columns."""
    if pattern == "tcgen05":
        return tuple((0, col) for col in range(width))
    return tuple((row, 8 * j + pair) for j in range(width // 8) for row in (0, 8) for pair in (0, 1))


class Drain:
    """128 threads for every ROWS x width elements of a batch; one chunk each."""

    def __init__(self, program, pattern, width, sink="vector"):
        self.program, self.pattern, self.width, self.sink = program, pattern, width, sink
        self.epilogue = Epilogue(program)

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        args = unpack(self.program, words)
        self.epilogue.seed(args, stream)
        rows = ROWS[self.pattern]
        grid = ((args.m + rows - 1) // rows, (args.n + self.width - 1) // self.width, args.l)
        self.kernel(args).launch(grid=grid, block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, args: Args):
        thread, _, _ = cute.arch.thread_idx()
        tile_m, tile_n, batch = cute.arch.block_idx()
        lane, warp = thread % 32, thread // 32
        if cutlass.const_expr(self.pattern == "wgmma"):
            row, col, divisor = warp * 16 + lane // 4, 2 * (lane % 4), 2
        else:
            row, col, divisor = thread, 0, self.width
        chunk = Chunk(
            tile_m * ROWS[self.pattern] + row, tile_n * self.width + col, batch, offsets(self.pattern, self.width),
            col_multiple=divisor,
        )  # fmt: skip
        accs = [self.accumulators(args, args.a[gemm.a], chunk) for gemm in self.program.gemms]
        values = self.epilogue.evaluate(args, accs, chunk)
        for index in cutlass.range_constexpr(len(self.program.stores)):
            self.epilogue.store_vector(args, index, values, chunk)
        for index in cutlass.range_constexpr(len(self.program.reductions)):
            self.epilogue.reduce(args, index, values, chunk, LANES[self.pattern])

    @cute.jit
    def accumulators(self, args: Args, tensor: cute.Tensor, chunk: Chunk):
        """A matrix unit leaves 0 outside of the tensors."""
        values = cute.make_rmem_tensor(len(chunk.offsets), ELEMENTS[self.program.accumulate])
        for index, (row, col) in enumerate(chunk.offsets):
            values[index] = ELEMENTS[self.program.accumulate](0)
            if (chunk.row + row < args.m) & (chunk.col + col < args.n):
                values[index] = tensor[chunk.row + row, chunk.col + col, chunk.batch]
        return values.load()


def compile_host(host, arch):
    """The compiled host function ``host(words, stream)``, with its PTX."""
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # the compiler writes PTX under a name that another process may use too
        options = f"--gpu-arch {arch} --keep-ptx --enable-tvm-ffi --dump-dir {folder}"
        return cute.compile(host, Int64(0), make_fake_stream(), options=options)


def compiled(program, pattern, width=16):
    """The compiled drain of a program."""
    return compile_host(Drain(program, pattern, width).host, ARCHS[pattern])


def block(program, shape, operands):
    """The argument block: ``shape`` is (m, n, k, l); ``operands`` maps "a0", "aux1", ... to (array, strides in elements along rows,
    columns and batch) or to the bytes of a by-value element."""
    index = argument_words(program)
    words = np.zeros(len(index), np.int64)
    words[[index[name] for name in "mnkl"]] = shape
    addresses, values = [], []
    for name, operand in operands.items():
        place = index[f"{name}.address"]
        if isinstance(operand, bytes):
            values.append((8 * place, operand))
            continue
        array, strides = operand
        addresses.append(8 * place)
        words[place] = array.ctypes.data
        for word, stride in zip(("row", "col", "batch"), strides, strict=True):
            words[index[f"{name}.{word}"]] = stride
    return HostBlock(words.tobytes(), tuple(addresses), tuple(values))


def launch(function, program, shape, operands):
    """Run a compiled host function in the emulator; a finding is an error. Stores and reductions are written in place."""
    arrays = [operand[0] for operand in operands.values() if not isinstance(operand, bytes)]
    written = [operand[0] for name, operand in operands.items() if name.startswith("reduction")]
    return ptx_emulator.launch(
        function, block(program, shape, operands), None, buffers=arrays, outputs=written, check="raise"
    )


def strided(array, major="n"):
    """An [L, M, N] array as an operand: (the array in the order of ``major``, its strides along rows, columns and batch)."""
    _, rows, cols = array.shape
    if major == "m":
        return np.ascontiguousarray(array.transpose(0, 2, 1)), (1, rows, rows * cols)
    return np.ascontiguousarray(array), (cols, 1, rows * cols)

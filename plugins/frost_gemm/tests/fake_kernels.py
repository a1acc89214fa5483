"""Kernels of a few instructions, for tests of compilation, cache and launch: what they compute tells what they were given."""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int64
from frost_gemm.ir import argument_words


class Fake:
    """What a kernel class has; counts how often one is made, which is once a compilation."""

    made = 0

    def __init__(self, program, config, layout, facts):
        type(self).made += 1
        self.words = argument_words(program)
        self.threads = layout.threads
        self.scale = float(config.tile_m)


class SumOfSizes(Fake):
    """store0[i] = tile_m * (m + n + k + l) + i for the threads of one CTA."""

    @cute.kernel
    def kernel(self, out: cute.Tensor, total: Int64):
        thread, _, _ = cute.arch.thread_idx()
        out[thread] = total.to(Float32) * self.scale + Float32(thread)

    @cute.jit
    def host(self, words: Int64, stream: CUstream):
        block = cute.make_tensor(
            cute.make_ptr(Int64, words, cute.AddressSpace.generic, assumed_align=8), cute.make_layout(len(self.words))
        )
        total = block[self.words["m"]] + block[self.words["n"]] + block[self.words["k"]] + block[self.words["l"]]
        address = block[self.words["store0.address"]]
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
        out = cute.make_tensor(pointer, cute.make_layout(self.threads))
        self.kernel(out, total).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), stream=stream)


class OnlyForHopper(Fake):
    """Uses an instruction that sm_100 lacks."""

    @cute.kernel
    def kernel(self):
        cute.nvgpu.warpgroup.fence()

    @cute.jit
    def host(self, words: Int64, stream: CUstream):
        self.kernel().launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


class Broken(Fake):
    """Fails while it is traced."""

    @cute.jit
    def host(self, words: Int64, stream: CUstream):
        raise ValueError("no such tile")

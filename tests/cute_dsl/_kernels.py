"""Kernels of a few instructions. What they write tells which one ran and what it was given. The words: address of out, a, b."""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int64

THREADS = 32


def argument(words: Int64, place: int):
    pointer = cute.make_ptr(Int64, words, cute.AddressSpace.generic, assumed_align=8)
    return cute.make_tensor(pointer, cute.make_layout(3))[place]


def output(words: Int64):
    pointer = cute.make_ptr(Float32, argument(words, 0), cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(2 * THREADS))


class Sum:
    """out[i] = scale * (a + b) + i."""

    made = 0

    def __init__(self, scale=1):
        type(self).made += 1
        self.scale = float(scale)

    @cute.kernel
    def kernel(self, out: cute.Tensor, total: Int64):
        thread, _, _ = cute.arch.thread_idx()
        out[thread] = total.to(Float32) * self.scale + Float32(thread)

    @cute.jit
    def host(self, words: Int64, stream: CUstream):
        total = argument(words, 1) + argument(words, 2)
        self.kernel(output(words), total).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


class Fill:
    """out[i] = value."""

    def __init__(self, value):
        self.value = float(value)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        out[thread] = Float32(self.value)

    def launch(self, out, stream):
        self.kernel(out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


class Several:
    """A kernel of another object, then two methods, the main one last: out[i] = 2 * (3 + i)."""

    def __init__(self):
        self.fill = Fill(3)
        self.kernel_parts = {"fill": self.fill}

    @cute.kernel
    def add(self, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        out[thread] = out[thread] + Float32(thread)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        out[thread] = out[thread] * Float32(2)

    @cute.jit
    def host(self, words: Int64, stream: CUstream):
        out = output(words)
        self.fill.launch(out, stream)
        self.add(out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
        self.kernel(out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


class NoKernelMethod:
    """Its kernels have names of their own."""

    @cute.kernel
    def second(self, out: cute.Tensor):
        out[1] = Float32(2)

    @cute.kernel
    def first(self, out: cute.Tensor):
        out[0] = Float32(1)

    @cute.jit
    def host(self, words: Int64, stream: CUstream):
        out = output(words)
        self.first(out).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)
        self.second(out).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)


class OnlyForHopper:
    """An instruction that sm_100 lacks."""

    @cute.kernel
    def kernel(self):
        cute.nvgpu.warpgroup.fence()

    @cute.jit
    def host(self, words: Int64, stream: CUstream):
        self.kernel().launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


class ForeignKernel:
    """Launches a kernel of an object that it does not name as a part."""

    @cute.jit
    def host(self, words: Int64, stream: CUstream):
        Fill(1).launch(output(words), stream)


class Untraceable:
    @cute.jit
    def host(self, words: Int64, stream: CUstream):
        raise ValueError("no such tile")

"""Small CuTe DSL functions: loaded by tests with runpy where the DSL is installed."""

import functools
import os
import tempfile

os.environ.setdefault("CUTE_DSL_NO_CACHE", "1")

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream, make_ptr


@cute.kernel
def axpy_kernel(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, scale: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    width, _, _ = cute.arch.block_dim()
    i = block * width + thread
    if i < cute.size(x):
        out[i] = y[i] + x[i] * scale


@cute.jit
def axpy(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, scale: cutlass.Float32, stream: cuda.CUstream):
    blocks = (cute.size(x) + 255) // 256
    axpy_kernel(x, y, out, scale).launch(grid=[blocks, 1, 1], block=[256, 1, 1], stream=stream)


@cute.kernel
def fill_kernel(out: cute.Pointer, n: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    if thread < n:
        tensor = cute.make_tensor(out, cute.make_layout(n))
        tensor[thread] = cutlass.Float32(thread)


@cute.jit
def fill(out: cute.Pointer, n: cutlass.Int32, stream: cuda.CUstream):
    fill_kernel(out, n).launch(grid=[1, 1, 1], block=[96, 1, 1], stream=stream)


@cute.kernel
def flag_kernel(out: cute.Tensor, flag: cutlass.Boolean):
    thread, _, _ = cute.arch.thread_idx()
    if flag:
        out[thread] = cutlass.Float32(1)


@cute.jit
def flag(out: cute.Tensor, value: bool, stream: cuda.CUstream):
    flag_kernel(out, value).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


@cute.kernel
def ranks_kernel(out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if thread == 0:
        out[block] = cutlass.Int32(cute.arch.block_idx_in_cluster())


@cute.jit
def ranks(out: cute.Tensor, stream: cuda.CUstream):
    ranks_kernel(out).launch(grid=[8, 1, 1], block=[32, 1, 1], cluster=[4, 1, 1], smem=60000, stream=stream)


@cute.kernel
def scaled_kernel(x: cute.Tensor, y: cute.Tensor, scale: cutlass.Float32, negate: cutlass.Boolean):
    thread, _, _ = cute.arch.thread_idx()
    if thread < cute.size(y):
        value = x[thread] * scale
        if negate:
            value = -value
        y[thread] = value


@cute.jit
def scaled(
    tensors: tuple[cute.Tensor, cute.Tensor],
    scale: cutlass.Float32,
    negate: cutlass.Boolean,
    first: cute.Pointer,
    count: cutlass.Int64,
    stream: cuda.CUstream,
):
    y = cute.make_tensor(first, cute.make_layout(count))
    scaled_kernel(tensors[0], y, scale, negate).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)


@cute.jit
def in_block(base: cutlass.Int64, stream: cuda.CUstream):
    """Words: addresses of x and y, extent, host address of the fp32 scale."""
    words = cute.make_tensor(
        cute.make_ptr(cutlass.Int64, base, cute.AddressSpace.generic, assumed_align=8), cute.make_layout((4,))
    )
    value = cute.make_ptr(cutlass.Float32, words[3], cute.AddressSpace.generic, assumed_align=4)
    scale = cute.make_tensor(value, cute.make_layout((1,)))[0]
    x, y = (
        cute.make_tensor(
            cute.make_ptr(cutlass.Float32, words[i], cute.AddressSpace.gmem, assumed_align=4),
            cute.make_layout(words[2]),
        )
        for i in range(2)
    )
    scaled_kernel(x, y, scale, cutlass.Boolean(False)).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)


def _compile(function, *arguments, arch, options="--keep-ptx --keep-cubin"):
    before = os.environ.get("CUTE_DSL_ARCH")
    os.environ["CUTE_DSL_ARCH"] = arch
    try:
        with tempfile.TemporaryDirectory() as folder:
            return cute.compile(function, *arguments, options=f"--gpu-arch {arch} {options} --dump-dir {folder}")
    finally:
        if before is None:
            del os.environ["CUTE_DSL_ARCH"]
        else:
            os.environ["CUTE_DSL_ARCH"] = before


@functools.cache
def compile_axpy(arch, options="--keep-ptx --keep-cubin"):
    n = cute.sym_int()
    x, y, out = (make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16) for _ in range(3))
    return _compile(axpy, x, y, out, 1.0, make_fake_stream(), arch=arch, options=options)


def compile_fill(arch):
    null = make_ptr(cutlass.Float32, 0, cute.AddressSpace.gmem, assumed_align=4)
    return _compile(fill, null, 1, make_fake_stream(), arch=arch)


def compile_flag(arch):
    out = make_fake_compact_tensor(cutlass.Float32, (32,), assumed_align=16)
    return _compile(flag, out, True, make_fake_stream(), arch=arch)


def compile_ranks(arch):
    out = make_fake_compact_tensor(cutlass.Int32, (8,), assumed_align=16)
    return _compile(ranks, out, make_fake_stream(), arch=arch)


def compile_scaled(arch, options):
    n = cute.sym_int()
    x, y = (make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16) for _ in range(2))
    null = make_ptr(cutlass.Float32, 0, cute.AddressSpace.gmem, assumed_align=4)
    arguments = ((x, y), cutlass.Float32(0), cutlass.Boolean(False), null, cutlass.Int64(0), make_fake_stream())
    return _compile(scaled, *arguments, arch=arch, options=options)


@functools.cache
def compile_in_block(arch, options):
    return _compile(in_block, cutlass.Int64(0), make_fake_stream(), arch=arch, options=options)


def pointer(tensor):
    return make_ptr(cutlass.Float32, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=4)


def cute_tensors(tensors):
    return [from_dlpack(tensor, assumed_align=16).mark_layout_dynamic() for tensor in tensors]


def stream():
    return cuda.CUstream(0)

"""The epilogue that the tcgen05 kernels share: tensor memory to registers, shared memory, and global memory by TMA."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, tcgen05

SLICE = 32  # columns of one store: rows of 128 bytes of float32


def output_layout(columns):
    """128 x columns of float32 in slices of 32 columns, each with the 128-byte swizzle."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, cutlass.Float32)
    return cute.tile_to_shape(atom, (128, SLICE, columns // SLICE), (0, 1, 2))


def output_atom(c, layout):
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), c, cute.slice_(layout, (None, None, 0)), (128, SLICE)
    )


@cute.jit
def load_slice(sums: cute.Tensor, sc: cute.Tensor, thread: cutlass.Int32, index: cutlass.Int32):
    """Thread t of warps 0 to 3 copies row t of one slice of the accumulator to shared memory."""
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), cutlass.Float32)
    slices = cute.flat_divide(sums[((None, None), 0, 0)], (128, SLICE))
    fetch = tcgen05.make_tmem_copy(atom, slices[(None, None, 0, 0)]).get_slice(thread)
    values = cute.make_rmem_tensor(fetch.partition_D(sc[(None, None, 0)]).shape, cutlass.Float32)
    cute.copy(fetch, fetch.partition_S(slices)[(None, None, None, 0, index)], values)
    cute.arch.fence_view_async_tmem_load()
    cute.autovec_copy(cute.make_tensor(values.iterator, SLICE), sc[(thread, None, index)])


@cute.jit
def store_slice(store: cute.CopyAtom, sc: cute.Tensor, c: cute.Tensor, row: cutlass.Int32, index: cutlass.Int32):
    """One warp stores one slice to rows 128 row to 128 row + 127 of c."""
    out_s, out_g = cpasync.tma_partition(
        store, 0, cute.make_layout(1), cute.group_modes(sc, 0, 2),
        cute.group_modes(cute.local_tile(c, (128, SLICE), (row, None)), 0, 2),
    )  # fmt: skip
    cute.copy(store, out_s[(None, index)], out_g[(None, index)])

"""Kernel 2 of 6: C[64, 64] = A[64, 128] B[64, 128]^T on Hopper, float16 in, float32 out, one warpgroup and a loader.

Four k-tiles of 32 (64-byte swizzle) pass through two stages. Warp 4 loads both operands of a stage onto one mbarrier.
The warpgroup keeps one wgmma group in flight: a stage is handed back once the group after it has been committed and
the one that read it has completed. The accumulators go to global memory from registers.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import SmemAllocator

M, N, K = 64, 64, 128
TILE_K, STAGES = 32, 2
STAGE_BYTES = (M + N) * TILE_K * 2
MATH = 128  # threads of the warpgroup
THREADS = MATH + 32
TYPES = {"wgmma_gemm": ("Float16", "Float16", "Float32")}


@cute.kernel
def gemm_kernel(
    mma: cute.TiledMma, load_a: cute.CopyAtom, a: cute.Tensor, load_b: cute.CopyAtom, b: cute.Tensor, c: cute.Tensor,
    layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout,
):  # fmt: skip
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, STAGES)
    empty = smem.allocate_array(cutlass.Int64, STAGES)
    sa = smem.allocate_tensor(cutlass.Float16, layout_a.outer, 1024, layout_a.inner)
    sb = smem.allocate_tensor(cutlass.Float16, layout_b.outer, 1024, layout_b.inner)

    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, MATH)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    if warp == 4:
        whole = cute.make_layout(1)
        tiles_a = cute.group_modes(cute.local_tile(a, (M, TILE_K), (0, None)), 0, 2)
        tiles_b = cute.group_modes(cute.local_tile(b, (N, TILE_K), (0, None)), 0, 2)
        to_a, from_a = cpasync.tma_partition(load_a, 0, whole, cute.group_modes(sa, 0, 2), tiles_a)
        to_b, from_b = cpasync.tma_partition(load_b, 0, whole, cute.group_modes(sb, 0, 2), tiles_b)
        for tile in cutlass.range(K // TILE_K, unroll=1):
            stage = tile % STAGES
            cute.arch.mbarrier_wait(empty + stage, ((tile // STAGES) & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, STAGE_BYTES)
            cute.copy(load_a, from_a[(None, tile)], to_a[(None, stage)], tma_bar_ptr=full + stage)
            cute.copy(load_b, from_b[(None, tile)], to_b[(None, stage)], tma_bar_ptr=full + stage)
    else:
        part = mma.get_slice(thread)
        frag_a = mma.make_fragment_A(part.partition_A(sa))
        frag_b = mma.make_fragment_B(part.partition_B(sb))
        mine = part.partition_C(c)
        sums = cute.make_rmem_tensor(mine.shape, cutlass.Float32)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for tile in cutlass.range(K // TILE_K, unroll=1):
            stage = tile % STAGES
            cute.arch.mbarrier_wait(full + stage, (tile // STAGES) & 1)
            warpgroup.fence()
            for k in cutlass.range_constexpr(TILE_K // 16):
                at = (None, None, k, stage)
                cute.gemm(mma, sums, frag_a[at], frag_b[at], sums)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if tile > 0:
                cute.arch.mbarrier_arrive(empty + (stage ^ 1))
        warpgroup.wait_group(0)
        cute.autovec_copy(sums, mine)


@cute.jit
def wgmma_gemm(a_pointer: cute.Pointer, b_pointer: cute.Pointer, c_pointer: cute.Pointer):
    a = cute.make_tensor(a_pointer, cute.make_ordered_layout((M, K), (1, 0)))
    b = cute.make_tensor(b_pointer, cute.make_ordered_layout((N, K), (1, 0)))
    c = cute.make_tensor(c_pointer, cute.make_ordered_layout((M, N), (1, 0)))
    op = warpgroup.MmaF16BF16Op(
        cutlass.Float16,
        cutlass.Float32,
        (M, N, 16),
        warpgroup.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    mma = cute.make_tiled_mma(op)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, cutlass.Float16)
    layout_a = cute.tile_to_shape(atom, (M, TILE_K, STAGES), (0, 1, 2))
    layout_b = cute.tile_to_shape(atom, (N, TILE_K, STAGES), (0, 1, 2))
    load = cpasync.CopyBulkTensorTileG2SOp()
    load_a, map_a = cpasync.make_tiled_tma_atom(load, a, cute.slice_(layout_a, (None, None, 0)), (M, TILE_K))
    load_b, map_b = cpasync.make_tiled_tma_atom(load, b, cute.slice_(layout_b, (None, None, 0)), (N, TILE_K))
    gemm_kernel(mma, load_a, map_a, load_b, map_b, c, layout_a, layout_b).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

"""Kernels 3 and 4 of 6: C[128 g, 64] = A B^T on Blackwell by g = 1 or 2 CTAs, float16 in, float32 out, K = 128.

Warp 4 of every CTA loads its part of the operands, warp 5 of the leader issues the MMAs, warps 0 to 3 of every CTA
move the accumulator from tensor memory through shared memory to global memory. In a pair, all loads of a stage
complete on the leader's barrier, and the leader's commits arrive at both CTAs. With tiles of 32 (64-byte swizzle) a
ring of two stages is used, with tiles of 64 (128-byte swizzle) a single stage is used twice. A dependent launch: the loaders
wait for the launches before, and the stores are ordered after the loads.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import SmemAllocator
from cutlass.utils import blackwell_helpers as sm100
from parts import SLICE, load_slice, output_atom, output_layout, store_slice

N, K = 64, 128
THREADS = 192
LOADER, ISSUER = 4, 5
TYPES = {"tcgen05_gemm": ("Float16", "Float16", "Float32")}


@cute.kernel
def gemm_kernel(
    mma: cute.TiledMma, load_a: cute.CopyAtom, a: cute.Tensor, load_b: cute.CopyAtom, b: cute.Tensor,
    store: cute.CopyAtom, c: cute.Tensor, layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout,
    layout_c: cute.ComposedLayout, group: cutlass.Constexpr, tile_k: cutlass.Constexpr, stages: cutlass.Constexpr,
):  # fmt: skip
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    pair = cutlass.const_expr(group == 2)
    both = 3 if pair else None
    cta_group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
    rows = 128 * group
    tiles = K // tile_k

    smem = SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, stages)
    empty = smem.allocate_array(cutlass.Int64, stages)
    done = smem.allocate_array(cutlass.Int64, 1)
    where = smem.allocate_array(cutlass.Int32, 1)
    sa = smem.allocate_tensor(cutlass.Float16, layout_a.outer, 1024, layout_a.inner)
    sb = smem.allocate_tensor(cutlass.Float16, layout_b.outer, 1024, layout_b.inner)
    sc = smem.allocate_tensor(cutlass.Float32, layout_c.outer, 1024, layout_c.inner)

    if warp == 0:
        cute.arch.alloc_tmem(N, where, is_two_cta=pair)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=pair)
    if thread == 32 * LOADER:
        for stage in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, 1)
        cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if cutlass.const_expr(pair):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    columns = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, where)
    sums = cute.make_tensor(columns, mma.make_fragment_C(mma.partition_shape_C((rows, N))).layout)

    if warp == LOADER:
        part = mma.get_slice(rank)
        whole = cute.make_layout(1)
        tiles_a = part.partition_A(cute.local_tile(a, (rows, tile_k), (0, None)))
        tiles_b = part.partition_B(cute.local_tile(b, (N, tile_k), (0, None)))
        to_a, from_a = cpasync.tma_partition(
            load_a, 0, whole, cute.group_modes(sa, 0, 3), cute.group_modes(tiles_a, 0, 3)
        )
        to_b, from_b = cpasync.tma_partition(
            load_b, 0, whole, cute.group_modes(sb, 0, 3), cute.group_modes(tiles_b, 0, 3)
        )
        cute.arch.griddepcontrol_wait()
        for tile in cutlass.range(tiles, unroll=1):
            stage = tile % stages
            cute.arch.mbarrier_wait(empty + stage, ((tile // stages) & 1) ^ 1)
            if rank == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, (rows + N) * tile_k * 2)
            cute.copy(load_a, from_a[(None, tile)], to_a[(None, stage)], tma_bar_ptr=full + stage)
            cute.copy(load_b, from_b[(None, tile)], to_b[(None, stage)], tma_bar_ptr=full + stage)
    elif warp == ISSUER:
        if rank == 0:
            frag_a, frag_b = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for tile in cutlass.range(tiles, unroll=1):
                stage = tile % stages
                cute.arch.mbarrier_wait(full + stage, (tile // stages) & 1)
                for k in cutlass.range_constexpr(tile_k // 16):
                    at = (None, None, k, stage)
                    cute.gemm(mma, sums, frag_a[at], frag_b[at], sums)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    tcgen05.commit(empty + stage, both, cta_group)
            with cute.arch.elect_one():
                tcgen05.commit(done, both, cta_group)
    else:
        cute.arch.mbarrier_wait(done, 0)
        for index in cutlass.range_constexpr(N // SLICE):
            load_slice(sums, sc, thread, index)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=1, number_of_threads=128)
        if warp == 0:
            for index in cutlass.range_constexpr(N // SLICE):
                store_slice(store, sc, c, rank, index)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    cute.arch.sync_threads()
    if cutlass.const_expr(pair):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    if warp == 0:
        cute.arch.dealloc_tmem(columns, N, is_two_cta=pair)


@cute.jit
def tcgen05_gemm(
    a_pointer: cute.Pointer, b_pointer: cute.Pointer, c_pointer: cute.Pointer,
    group: cutlass.Constexpr, tile_k: cutlass.Constexpr,
):  # fmt: skip
    rows, stages = 128 * group, min(2, K // tile_k // 2)
    a = cute.make_tensor(a_pointer, cute.make_ordered_layout((rows, K), (1, 0)))
    b = cute.make_tensor(b_pointer, cute.make_ordered_layout((N, K), (1, 0)))
    c = cute.make_tensor(c_pointer, cute.make_ordered_layout((rows, N), (1, 0)))
    cta_group = tcgen05.CtaGroup.TWO if group == 2 else tcgen05.CtaGroup.ONE
    op = tcgen05.MmaF16BF16Op(
        cutlass.Float16, cutlass.Float32, (rows, N, 16), cta_group, tcgen05.OperandSource.SMEM,
        OperandMajorMode.K, OperandMajorMode.K,
    )  # fmt: skip
    mma = cute.make_tiled_mma(op)
    tiler = (rows, N, tile_k)
    layout_a = sm100.make_smem_layout_a(mma, tiler, cutlass.Float16, stages)
    layout_b = sm100.make_smem_layout_b(mma, tiler, cutlass.Float16, stages)
    load = cpasync.CopyBulkTensorTileG2SOp(cta_group)
    one = (None, None, None, 0)
    load_a, map_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, cute.slice_(layout_a, one), tiler, mma)
    load_b, map_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, cute.slice_(layout_b, one), tiler, mma)
    layout_c = output_layout(N)
    store, map_c = output_atom(c, layout_c)
    gemm_kernel(
        mma, load_a, map_a, load_b, map_b, store, map_c, layout_a, layout_b, layout_c, group, tile_k, stages
    ).launch(grid=[group, 1, 1], block=[THREADS, 1, 1], cluster=[group, 1, 1], use_pdl=True)

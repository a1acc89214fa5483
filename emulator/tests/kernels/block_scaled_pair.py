"""For benchmarks/emulator.py: C[256, 256] = (A * SFA) (B * SFB)^T by a pair of CTAs, e4m3 with ue8m0 scales, K = 512.

Two stages of k-tiles of 128. Everything comes by TMA, the scales as tensors of 16-bit elements, and completes on the
leader's barrier. Each CTA holds the scales of its rows of A and of all rows of B. Otherwise as in tcgen05_gemm.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import SmemAllocator, blockscaled_layout
from cutlass.utils import blackwell_helpers as sm100
from parts import SLICE, load_slice, output_atom, output_layout, store_slice

M, N, K = 256, 256, 512
TILE_K, STAGES, VECTOR = 128, 2, 32
TILER, TILER_B = (M, N, TILE_K), (128, N, TILE_K)  # TILER_B: how one CTA alone would read B
THREADS = 192
LOADER, ISSUER = 4, 5
COLUMNS = 512  # of tensor memory: the accumulator, then the scales of A and of B
CHUNK = 512  # bytes of the scales of 128 rows and a k-tile
STAGE_BYTES = (M + N) * TILE_K + (2 + 4) * CHUNK  # of both CTAs
TYPES = {"mxf8_pair": ("Float8E4M3FN", "Float8E4M3FN", "Float8E8M0FNU", "Float8E8M0FNU", "Float32")}


@cute.jit
def scales_to_tensor_memory(chunk: cute.Tensor, scales: cute.Tensor):
    compact, target = cute.filter_zeros(chunk), cute.filter_zeros(scales)
    op = tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.TWO)
    copy = tcgen05.make_s2t_copy(cute.make_copy_atom(op, scales.element_type), target)
    lane = copy.get_slice(0)
    source = tcgen05.get_s2t_smem_desc_tensor(copy, lane.partition_S(compact))
    cute.copy(copy, source, lane.partition_D(target))


@cute.kernel
def gemm_kernel(
    mma: cute.TiledMma, mma_b: cute.TiledMma, load_a: cute.CopyAtom, a: cute.Tensor, load_b: cute.CopyAtom,
    b: cute.Tensor, load_sfa: cute.CopyAtom, sfa: cute.Tensor, load_sfb: cute.CopyAtom, sfb: cute.Tensor,
    store: cute.CopyAtom, c: cute.Tensor, layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout,
    layout_sfa: cute.Layout, layout_sfb: cute.Layout, layout_c: cute.ComposedLayout,
):  # fmt: skip
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    smem = SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, STAGES)
    empty = smem.allocate_array(cutlass.Int64, STAGES)
    done = smem.allocate_array(cutlass.Int64, 1)
    where = smem.allocate_array(cutlass.Int32, 1)
    sa = smem.allocate_tensor(cutlass.Float8E4M3FN, layout_a.outer, 1024, layout_a.inner)
    sb = smem.allocate_tensor(cutlass.Float8E4M3FN, layout_b.outer, 1024, layout_b.inner)
    ssfa = smem.allocate_tensor(cutlass.Float8E8M0FNU, layout_sfa, 128)
    ssfb = smem.allocate_tensor(cutlass.Float8E8M0FNU, layout_sfb, 128)
    sc = smem.allocate_tensor(cutlass.Float32, layout_c.outer, 1024, layout_c.inner)

    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, where, is_two_cta=True)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
    if thread == 32 * LOADER:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, 1)
        cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    columns = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, where)
    sums = cute.make_tensor(columns, mma.make_fragment_C(mma.partition_shape_C((M, N))).layout)

    if warp == LOADER:
        part, part_b = mma.get_slice(rank), mma_b.get_slice(0)
        whole = cute.make_layout(1)
        tiles_a = part.partition_A(cute.local_tile(a, (M, TILE_K), (0, None)))
        tiles_b = part.partition_B(cute.local_tile(b, (N, TILE_K), (0, None)))
        tiles_sfa = part.partition_A(cute.local_tile(sfa, (M, TILE_K), (0, None)))
        tiles_sfb = part_b.partition_B(cute.local_tile(sfb, (N, TILE_K), (0, None)))
        to_a, from_a = cpasync.tma_partition(
            load_a, 0, whole, cute.group_modes(sa, 0, 3), cute.group_modes(tiles_a, 0, 3)
        )
        to_b, from_b = cpasync.tma_partition(
            load_b, 0, whole, cute.group_modes(sb, 0, 3), cute.group_modes(tiles_b, 0, 3)
        )
        to_sfa, from_sfa = cpasync.tma_partition(
            load_sfa, 0, whole, cute.group_modes(ssfa, 0, 3), cute.group_modes(tiles_sfa, 0, 3)
        )
        to_sfb, from_sfb = cpasync.tma_partition(
            load_sfb, 0, whole, cute.group_modes(ssfb, 0, 3), cute.group_modes(tiles_sfb, 0, 3)
        )
        from_sfa, to_sfa = cute.filter_zeros(from_sfa), cute.filter_zeros(to_sfa)
        from_sfb, to_sfb = cute.filter_zeros(from_sfb), cute.filter_zeros(to_sfb)
        for tile in cutlass.range(K // TILE_K, unroll=1):
            stage = tile % STAGES
            cute.arch.mbarrier_wait(empty + stage, ((tile // STAGES) & 1) ^ 1)
            if rank == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, STAGE_BYTES)
            cute.copy(load_a, from_a[(None, tile)], to_a[(None, stage)], tma_bar_ptr=full + stage)
            cute.copy(load_b, from_b[(None, tile)], to_b[(None, stage)], tma_bar_ptr=full + stage)
            cute.copy(load_sfa, from_sfa[(None, tile)], to_sfa[(None, stage)], tma_bar_ptr=full + stage)
            cute.copy(load_sfb, from_sfb[(None, tile)], to_sfb[(None, stage)], tma_bar_ptr=full + stage)
    elif warp == ISSUER:
        if rank == 0:
            frag_a, frag_b = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
            one = (None, None, None, 0)
            form_a = blockscaled_layout.make_tmem_layout_sfa(mma, TILER, VECTOR, cute.slice_(layout_sfa, one))
            form_b = blockscaled_layout.make_tmem_layout_sfb(mma, TILER, VECTOR, cute.slice_(layout_sfb, one))
            at_a = cute.recast_ptr(columns + N, dtype=cutlass.Float8E8M0FNU)
            at_b = cute.recast_ptr(columns + N + 4, dtype=cutlass.Float8E8M0FNU)
            tsfa, tsfb = cute.make_tensor(at_a, form_a), cute.make_tensor(at_b, form_b)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for tile in cutlass.range(K // TILE_K, unroll=1):
                stage = tile % STAGES
                cute.arch.mbarrier_wait(full + stage, (tile // STAGES) & 1)
                scales_to_tensor_memory(ssfa[(None, None, None, stage)], tsfa)
                scales_to_tensor_memory(ssfb[(None, None, None, stage)], tsfb)
                for k in cutlass.range_constexpr(TILE_K // 32):
                    mma.set(tcgen05.Field.SFA, tsfa[(None, None, k)].iterator)
                    mma.set(tcgen05.Field.SFB, tsfb[(None, None, k)].iterator)
                    cute.gemm(mma, sums, frag_a[(None, None, k, stage)], frag_b[(None, None, k, stage)], sums)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    tcgen05.commit(empty + stage, 3, tcgen05.CtaGroup.TWO)
            with cute.arch.elect_one():
                tcgen05.commit(done, 3, tcgen05.CtaGroup.TWO)
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
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if warp == 0:
        cute.arch.dealloc_tmem(columns, COLUMNS, is_two_cta=True)


@cute.jit
def mxf8_pair(
    a_pointer: cute.Pointer, b_pointer: cute.Pointer, sfa_pointer: cute.Pointer, sfb_pointer: cute.Pointer,
    c_pointer: cute.Pointer,
):  # fmt: skip
    a = cute.make_tensor(a_pointer, cute.make_ordered_layout((M, K), (1, 0)))
    b = cute.make_tensor(b_pointer, cute.make_ordered_layout((N, K), (1, 0)))
    c = cute.make_tensor(c_pointer, cute.make_ordered_layout((M, N), (1, 0)))
    sfa = cute.make_tensor(sfa_pointer, blockscaled_layout.tile_atom_to_shape_SF((M, K, 1), VECTOR))
    sfb = cute.make_tensor(sfb_pointer, blockscaled_layout.tile_atom_to_shape_SF((N, K, 1), VECTOR))
    sfa, sfb = sfa[(None, None, 0)], sfb[(None, None, 0)]
    formats = cutlass.Float8E4M3FN, cutlass.Float8E4M3FN
    major = OperandMajorMode.K, OperandMajorMode.K
    two, alone, shared = tcgen05.CtaGroup.TWO, tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM
    mma = cute.make_tiled_mma(tcgen05.MmaMXF8F6F4Op(*formats, (M, N, 32), two, shared, *major))
    mma_b = cute.make_tiled_mma(tcgen05.MmaMXF8F6F4Op(*formats, (128, N, 32), alone, shared, *major))
    layout_a = sm100.make_smem_layout_a(mma, TILER, cutlass.Float8E4M3FN, STAGES)
    layout_b = sm100.make_smem_layout_b(mma, TILER, cutlass.Float8E4M3FN, STAGES)
    layout_sfa = blockscaled_layout.make_smem_layout_sfa(mma, TILER, VECTOR, STAGES)
    layout_sfb = blockscaled_layout.make_smem_layout_sfb(mma, TILER, VECTOR, STAGES)
    load = cpasync.CopyBulkTensorTileG2SOp(two)
    one = (None, None, None, 0)
    load_a, map_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, cute.slice_(layout_a, one), TILER, mma)
    load_b, map_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, cute.slice_(layout_b, one), TILER, mma)
    load_sfa, map_sfa = cute.nvgpu.make_tiled_tma_atom_A(
        load, sfa, cute.slice_(layout_sfa, one), TILER, mma, internal_type=cutlass.Int16
    )
    load_sfb, map_sfb = cute.nvgpu.make_tiled_tma_atom_B(
        load, sfb, cute.slice_(layout_sfb, one), TILER_B, mma_b, internal_type=cutlass.Int16
    )
    layout_c = output_layout(N)
    store, map_c = output_atom(c, layout_c)
    gemm_kernel(
        mma, mma_b, load_a, map_a, load_b, map_b, load_sfa, map_sfa, load_sfb, map_sfb, store, map_c, layout_a,
        layout_b, layout_sfa, layout_sfb, layout_c,
    ).launch(grid=[2, 1, 1], block=[THREADS, 1, 1], cluster=[2, 1, 1])  # fmt: skip

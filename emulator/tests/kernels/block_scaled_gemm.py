"""Kernel 5 of 6: C[128, 128] = (A * SFA) (B * SFB)^T on Blackwell by one CTA, in two formats, K = 128.

mxf8: e4m3 with one ue8m0 scale per 32 elements. One k-tile of 128; its four MMAs read the four bytes of one
scale-factor column, chosen by the scale-factor ids of the instruction descriptor.
nvf4: e2m1 with one e4m3 scale per 16 elements. Two k-tiles of 64 in one stage; every MMA uses all four bytes of a
column, and the scales of the second tile replace those of the first in tensor memory.
Operands come by TMA, scales by plain bulk copies, and go from shared to tensor memory with tcgen05.cp.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import SmemAllocator, blockscaled_layout
from cutlass.utils import blackwell_helpers as sm100
from parts import SLICE, load_slice, output_atom, output_layout, store_slice

M, N, K = 128, 128, 128
THREADS = 192
LOADER, ISSUER = 4, 5
COLUMNS = 256  # of tensor memory: the accumulator, then the scales of A and of B
CHUNK = 512  # bytes of scales: 128 rows by 4 blocks
TYPES = {
    "mxf8_gemm": ("Float8E4M3FN", "Float8E4M3FN", "Float8E8M0FNU", "Float8E8M0FNU", "Float32"),
    "nvf4_gemm": ("Float4E2M1FN", "Float4E2M1FN", "Float8E4M3FN", "Float8E4M3FN", "Float32"),
}


@cute.jit
def scales_to_tensor_memory(chunk: cute.Tensor, scales: cute.Tensor):
    """Issue the tcgen05.cp that replicates one chunk of scales over the four lane quarters."""
    compact, target = cute.filter_zeros(chunk), cute.filter_zeros(scales)
    op = tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE)
    copy = tcgen05.make_s2t_copy(cute.make_copy_atom(op, scales.element_type), target)
    lane = copy.get_slice(0)
    source = tcgen05.get_s2t_smem_desc_tensor(copy, lane.partition_S(compact))
    cute.copy(copy, source, lane.partition_D(target))


@cute.kernel
def gemm_kernel(
    mma: cute.TiledMma, load_a: cute.CopyAtom, a: cute.Tensor, load_b: cute.CopyAtom, b: cute.Tensor,
    scales_a: cute.Tensor, scales_b: cute.Tensor, store: cute.CopyAtom, c: cute.Tensor,
    layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout, layout_sfa: cute.Layout, layout_sfb: cute.Layout,
    layout_c: cute.ComposedLayout, dtype: cutlass.Constexpr, tile_k: cutlass.Constexpr,
    step: cutlass.Constexpr, vector: cutlass.Constexpr,
):  # fmt: skip
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tiles = K // tile_k
    stage_bytes = (M + N) * tile_k * dtype.width // 8 + 2 * CHUNK

    smem = SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, 1)
    empty = smem.allocate_array(cutlass.Int64, 1)
    done = smem.allocate_array(cutlass.Int64, 1)
    where = smem.allocate_array(cutlass.Int32, 1)
    sa = smem.allocate_tensor(dtype, layout_a.outer, 1024, layout_a.inner)
    sb = smem.allocate_tensor(dtype, layout_b.outer, 1024, layout_b.inner)
    ssfa = smem.allocate_tensor(scales_a.element_type, layout_sfa, 128)
    ssfb = smem.allocate_tensor(scales_b.element_type, layout_sfb, 128)
    sc = smem.allocate_tensor(cutlass.Float32, layout_c.outer, 1024, layout_c.inner)

    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, where)
        cute.arch.relinquish_tmem_alloc_permit()
    if thread == 32 * LOADER:
        cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init(empty, 1)
        cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    columns = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, where)
    sums = cute.make_tensor(columns, mma.make_fragment_C(mma.partition_shape_C((M, N))).layout)

    if warp == LOADER:
        part = mma.get_slice(0)
        whole = cute.make_layout(1)
        tiles_a = part.partition_A(cute.local_tile(a, (M, tile_k), (0, None)))
        tiles_b = part.partition_B(cute.local_tile(b, (N, tile_k), (0, None)))
        to_a, from_a = cpasync.tma_partition(
            load_a, 0, whole, cute.group_modes(sa, 0, 3), cute.group_modes(tiles_a, 0, 3)
        )
        to_b, from_b = cpasync.tma_partition(
            load_b, 0, whole, cute.group_modes(sb, 0, 3), cute.group_modes(tiles_b, 0, 3)
        )
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), scales_a.element_type)
        flat_a = cute.make_tensor(ssfa.iterator, CHUNK)
        flat_b = cute.make_tensor(ssfb.iterator, CHUNK)
        for tile in cutlass.range(tiles, unroll=1):
            cute.arch.mbarrier_wait(empty, (tile & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes)
                cute.copy(bulk, scales_a[(None, tile)], flat_a, mbar_ptr=full)
                cute.copy(bulk, scales_b[(None, tile)], flat_b, mbar_ptr=full)
            cute.copy(load_a, from_a[(None, tile)], to_a[(None, 0)], tma_bar_ptr=full)
            cute.copy(load_b, from_b[(None, tile)], to_b[(None, 0)], tma_bar_ptr=full)
    elif warp == ISSUER:
        frag_a, frag_b = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        one = (None, None, None, 0)
        form_a = blockscaled_layout.make_tmem_layout_sfa(mma, (M, N, tile_k), vector, cute.slice_(layout_sfa, one))
        form_b = blockscaled_layout.make_tmem_layout_sfb(mma, (M, N, tile_k), vector, cute.slice_(layout_sfb, one))
        at_a = cute.recast_ptr(columns + N, dtype=scales_a.element_type)
        at_b = cute.recast_ptr(columns + N + 4, dtype=scales_b.element_type)
        tsfa, tsfb = cute.make_tensor(at_a, form_a), cute.make_tensor(at_b, form_b)
        mma.set(tcgen05.Field.ACCUMULATE, False)
        for tile in cutlass.range(tiles, unroll=1):
            cute.arch.mbarrier_wait(full, tile & 1)
            scales_to_tensor_memory(ssfa[one], tsfa)
            scales_to_tensor_memory(ssfb[one], tsfb)
            for k in cutlass.range_constexpr(tile_k // step):
                at = (None, None, k)
                mma.set(tcgen05.Field.SFA, tsfa[at].iterator)
                mma.set(tcgen05.Field.SFB, tsfb[at].iterator)
                cute.gemm(mma, sums, frag_a[(*at, 0)], frag_b[(*at, 0)], sums)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(empty)
        with cute.arch.elect_one():
            tcgen05.commit(done)
    else:
        cute.arch.mbarrier_wait(done, 0)
        for index in cutlass.range(N // SLICE, unroll=1):
            load_slice(sums, sc, thread, index)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            if warp == 0:
                store_slice(store, sc, c, 0, index)
                cute.arch.cp_async_bulk_commit_group()
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.dealloc_tmem(columns, COLUMNS)


@cute.jit
def launch(
    a_pointer: cute.Pointer, b_pointer: cute.Pointer, sfa_pointer: cute.Pointer, sfb_pointer: cute.Pointer,
    c_pointer: cute.Pointer, mma: cute.TiledMma, tile_k: cutlass.Constexpr, step: cutlass.Constexpr,
    vector: cutlass.Constexpr,
):  # fmt: skip
    a = cute.make_tensor(a_pointer, cute.make_ordered_layout((M, K), (1, 0)))
    b = cute.make_tensor(b_pointer, cute.make_ordered_layout((N, K), (1, 0)))
    c = cute.make_tensor(c_pointer, cute.make_ordered_layout((M, N), (1, 0)))
    chunks = cute.make_layout((CHUNK, K // (4 * vector)))
    scales_a, scales_b = cute.make_tensor(sfa_pointer, chunks), cute.make_tensor(sfb_pointer, chunks)
    tiler = (M, N, tile_k)
    layout_a = sm100.make_smem_layout_a(mma, tiler, a.element_type, 1)
    layout_b = sm100.make_smem_layout_b(mma, tiler, b.element_type, 1)
    layout_sfa = blockscaled_layout.make_smem_layout_sfa(mma, tiler, vector, 1)
    layout_sfb = blockscaled_layout.make_smem_layout_sfb(mma, tiler, vector, 1)
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    one = (None, None, None, 0)
    load_a, map_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, cute.slice_(layout_a, one), tiler, mma)
    load_b, map_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, cute.slice_(layout_b, one), tiler, mma)
    layout_c = output_layout(N)
    store, map_c = output_atom(c, layout_c)
    gemm_kernel(
        mma, load_a, map_a, load_b, map_b, scales_a, scales_b, store, map_c, layout_a, layout_b, layout_sfa,
        layout_sfb, layout_c, a.element_type, tile_k, step, vector,
    ).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])  # fmt: skip


@cute.jit
def mxf8_gemm(
    a: cute.Pointer, b: cute.Pointer, sfa: cute.Pointer, sfb: cute.Pointer, c: cute.Pointer,
):  # fmt: skip
    op = tcgen05.MmaMXF8F6F4Op(
        cutlass.Float8E4M3FN, cutlass.Float8E4M3FN, (M, N, 32), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM,
        OperandMajorMode.K, OperandMajorMode.K,
    )  # fmt: skip
    launch(a, b, sfa, sfb, c, cute.make_tiled_mma(op), 128, 32, 32)


@cute.jit
def nvf4_gemm(
    a: cute.Pointer, b: cute.Pointer, sfa: cute.Pointer, sfb: cute.Pointer, c: cute.Pointer,
):  # fmt: skip
    op = tcgen05.MmaMXF4NVF4Op(cutlass.Float8E4M3FN, (M, N, 64), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM)
    launch(a, b, sfa, sfb, c, cute.make_tiled_mma(op), 64, 64, 16)

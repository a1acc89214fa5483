"""Kernel 6 of 6: persistent C[384, 32] = A[384, 128] B[32, 128]^T on Blackwell with cluster launch control.

The grid has one CTA per 128 rows. A CTA that runs takes its own tile and then asks the hardware to cancel one that
has not started, until it is refused: warp 6 asks, everybody reads the answer and hands its slot back. Two stages of
operands (tiles of 64, 128-byte swizzle), two accumulators: while one is stored, the next is computed.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import SmemAllocator
from cutlass.utils import blackwell_helpers as sm100
from parts import load_slice, output_atom, output_layout, store_slice

TILES, M, N, K = 3, 128, 32, 128  # M and N of one tile
TILE_K, STAGES, SUMS = 64, 2, 2
STEPS = K // TILE_K
STAGE_BYTES = (M + N) * TILE_K * 2
LOADER, ISSUER, SCHEDULER = 4, 5, 6
THREADS = 224
COLUMNS = SUMS * N
TYPES = {"clc_gemm": ("Float16", "Float16", "Float32")}


@cute.jit
def next_tile(answer: cute.Pointer, answered: cute.Pointer, taken: cute.Pointer, turn: cutlass.Int32):
    """Wait for the answer of this turn; returns (tile, 1) or (undefined, 0) and hands the slot back."""
    cute.arch.mbarrier_wait(answered, turn & 1)
    tile, _, _, valid = cute.arch.clc_response(answer)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.mbarrier_arrive(taken)
    return tile, valid


@cute.kernel
def gemm_kernel(
    mma: cute.TiledMma, load_a: cute.CopyAtom, a: cute.Tensor, load_b: cute.CopyAtom, b: cute.Tensor,
    store: cute.CopyAtom, c: cute.Tensor, layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout,
    layout_c: cute.ComposedLayout,
):  # fmt: skip
    thread, _, _ = cute.arch.thread_idx()
    first, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

    smem = SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, STAGES)
    empty = smem.allocate_array(cutlass.Int64, STAGES)
    ready = smem.allocate_array(cutlass.Int64, SUMS)  # an accumulator is complete
    free = smem.allocate_array(cutlass.Int64, SUMS)  # an accumulator has been read
    answered = smem.allocate_array(cutlass.Int64, 1)
    taken = smem.allocate_array(cutlass.Int64, 1)
    answer = smem.allocate(16, 16)
    where = smem.allocate_array(cutlass.Int32, 1)
    sa = smem.allocate_tensor(cutlass.Float16, layout_a.outer, 1024, layout_a.inner)
    sb = smem.allocate_tensor(cutlass.Float16, layout_b.outer, 1024, layout_b.inner)
    sc = smem.allocate_tensor(cutlass.Float32, layout_c.outer, 1024, layout_c.inner)

    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, where)
        cute.arch.relinquish_tmem_alloc_permit()
    if thread == 32 * SCHEDULER:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, 1)
        for number in cutlass.range_constexpr(SUMS):
            cute.arch.mbarrier_init(ready + number, 1)
            cute.arch.mbarrier_init(free + number, 128)
        cute.arch.mbarrier_init(answered, 1)
        cute.arch.mbarrier_init(taken, THREADS)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    columns = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, where)
    layout = mma.make_fragment_C(mma.partition_shape_C((M, N))).layout

    tile, valid, turn = cutlass.Int32(first), cutlass.Int32(1), cutlass.Int32(0)
    if warp == SCHEDULER:
        while valid != 0:
            cute.arch.mbarrier_wait(taken, (turn & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(answered, 16)
                cute.arch.issue_clc_query(answered, answer, multicast=False)
            tile, valid = next_tile(answer, answered, taken, turn)
            turn = turn + 1
    elif warp == LOADER:
        part = mma.get_slice(0)
        whole = cute.make_layout(1)
        tiles_a = part.partition_A(cute.local_tile(a, (M, TILE_K), (None, None)))
        tiles_b = part.partition_B(cute.local_tile(b, (N, TILE_K), (0, None)))
        to_a, from_a = cpasync.tma_partition(
            load_a, 0, whole, cute.group_modes(sa, 0, 3), cute.group_modes(tiles_a, 0, 3)
        )
        to_b, from_b = cpasync.tma_partition(
            load_b, 0, whole, cute.group_modes(sb, 0, 3), cute.group_modes(tiles_b, 0, 3)
        )
        while valid != 0:
            for step in cutlass.range(STEPS, unroll=1):
                number = turn * STEPS + step
                stage = number % STAGES
                cute.arch.mbarrier_wait(empty + stage, ((number // STAGES) & 1) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, STAGE_BYTES)
                cute.copy(load_a, from_a[(None, tile, step)], to_a[(None, stage)], tma_bar_ptr=full + stage)
                cute.copy(load_b, from_b[(None, step)], to_b[(None, stage)], tma_bar_ptr=full + stage)
            tile, valid = next_tile(answer, answered, taken, turn)
            turn = turn + 1
    elif warp == ISSUER:
        frag_a, frag_b = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        while valid != 0:
            which = turn % SUMS
            cute.arch.mbarrier_wait(free + which, ((turn // SUMS) & 1) ^ 1)
            cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
            sums = cute.make_tensor(columns + which * N, layout)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for step in cutlass.range(STEPS, unroll=1):
                number = turn * STEPS + step
                stage = number % STAGES
                cute.arch.mbarrier_wait(full + stage, (number // STAGES) & 1)
                for k in cutlass.range_constexpr(TILE_K // 16):
                    at = (None, None, k, stage)
                    cute.gemm(mma, sums, frag_a[at], frag_b[at], sums)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    tcgen05.commit(empty + stage)
            with cute.arch.elect_one():
                tcgen05.commit(ready + which)
            tile, valid = next_tile(answer, answered, taken, turn)
            turn = turn + 1
    else:
        while valid != 0:
            # the next answer first: its slot is free again while this tile is stored
            coming, more = next_tile(answer, answered, taken, turn)
            which = turn % SUMS
            cute.arch.mbarrier_wait(ready + which, (turn // SUMS) & 1)
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            load_slice(cute.make_tensor(columns + which * N, layout), sc, thread, 0)
            cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")
            cute.arch.mbarrier_arrive(free + which)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            if warp == 0:
                store_slice(store, sc, c, tile, 0)
                cute.arch.cp_async_bulk_commit_group()
            tile, valid, turn = coming, more, turn + 1
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0)

    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.dealloc_tmem(columns, COLUMNS)


@cute.jit
def clc_gemm(a_pointer: cute.Pointer, b_pointer: cute.Pointer, c_pointer: cute.Pointer):
    a = cute.make_tensor(a_pointer, cute.make_ordered_layout((TILES * M, K), (1, 0)))
    b = cute.make_tensor(b_pointer, cute.make_ordered_layout((N, K), (1, 0)))
    c = cute.make_tensor(c_pointer, cute.make_ordered_layout((TILES * M, N), (1, 0)))
    op = tcgen05.MmaF16BF16Op(
        cutlass.Float16, cutlass.Float32, (M, N, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM,
        OperandMajorMode.K, OperandMajorMode.K,
    )  # fmt: skip
    mma = cute.make_tiled_mma(op)
    tiler = (M, N, TILE_K)
    layout_a = sm100.make_smem_layout_a(mma, tiler, cutlass.Float16, STAGES)
    layout_b = sm100.make_smem_layout_b(mma, tiler, cutlass.Float16, STAGES)
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    one = (None, None, None, 0)
    load_a, map_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, cute.slice_(layout_a, one), tiler, mma)
    load_b, map_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, cute.slice_(layout_b, one), tiler, mma)
    layout_c = output_layout(N)
    store, map_c = output_atom(c, layout_c)
    gemm_kernel(mma, load_a, map_a, load_b, map_b, store, map_c, layout_a, layout_b, layout_c).launch(
        grid=[TILES, 1, 1], block=[THREADS, 1, 1]
    )

"""Kernel 1 of 6: y = 2 x through shared memory, one CTA, a two-stage ring of mbarriers in, bulk groups out.

Warp 0 loads tiles with TMA (128-byte swizzle). Warps 1 and 2 wait for a tile, double it into a second buffer, publish
it to the async proxy, meet on named barrier 1, and one of their threads stores it with TMA.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import SmemAllocator

ROWS, COLUMNS = 16, 32  # of a tile of float32: rows of 128 bytes
TILES, STAGES = 4, 2
TILE_BYTES = ROWS * COLUMNS * 4
CONSUMERS = 64
THREADS = 32 + CONSUMERS


@cute.kernel
def copy_kernel(
    load: cute.CopyAtom, source: cute.Tensor, store: cute.CopyAtom, target: cute.Tensor, layout: cute.ComposedLayout
):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, STAGES)
    empty = smem.allocate_array(cutlass.Int64, STAGES)
    inbox = smem.allocate_tensor(cutlass.Float32, layout.outer, 1024, layout.inner)
    outbox = smem.allocate_tensor(cutlass.Float32, layout.outer, 1024, layout.inner)

    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, CONSUMERS)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    whole = cute.make_layout(1)
    in_s, in_g = cpasync.tma_partition(
        load, 0, whole, cute.group_modes(inbox, 0, 2),
        cute.group_modes(cute.local_tile(source, (ROWS, COLUMNS), (None, 0)), 0, 2),
    )  # fmt: skip
    out_s, out_g = cpasync.tma_partition(
        store, 0, whole, cute.group_modes(outbox, 0, 2),
        cute.group_modes(cute.local_tile(target, (ROWS, COLUMNS), (None, 0)), 0, 2),
    )  # fmt: skip

    if warp == 0:
        for tile in cutlass.range(TILES, unroll=1):
            stage = tile % STAGES
            cute.arch.mbarrier_wait(empty + stage, ((tile // STAGES) & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_BYTES)
            cute.copy(load, in_g[(None, tile)], in_s[(None, stage)], tma_bar_ptr=full + stage)
    else:
        worker = thread - 32
        row, first = worker // 4, (worker % 4) * (COLUMNS // 4)
        for tile in cutlass.range(TILES, unroll=1):
            stage = tile % STAGES
            cute.arch.mbarrier_wait(full + stage, (tile // STAGES) & 1)
            values = cute.make_rmem_tensor(COLUMNS // 4, cutlass.Float32)
            for i in cutlass.range_constexpr(COLUMNS // 4):
                values[i] = inbox[(row, first + i, stage)]
            cute.arch.mbarrier_arrive(empty + stage)
            # the store that last read this half of the outbox is two groups back
            if warp == 1:
                cute.arch.cp_async_bulk_wait_group(1, read=True)
            cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
            for i in cutlass.range_constexpr(COLUMNS // 4):
                outbox[(row, first + i, stage)] = values[i] * 2.0
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
            if warp == 1:
                cute.copy(store, out_s[(None, stage)], out_g[(None, tile)])
                cute.arch.cp_async_bulk_commit_group()
        if warp == 1:
            cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def tma_copy(source_pointer: cute.Pointer, target_pointer: cute.Pointer):
    shape = cute.make_ordered_layout((TILES * ROWS, COLUMNS), (1, 0))
    source, target = cute.make_tensor(source_pointer, shape), cute.make_tensor(target_pointer, shape)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, cutlass.Float32)
    layout = cute.tile_to_shape(atom, (ROWS, COLUMNS, STAGES), (0, 1, 2))
    one = cute.slice_(layout, (None, None, 0))
    load, source_map = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), source, one, (ROWS, COLUMNS))
    store, target_map = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), target, one, (ROWS, COLUMNS))
    copy_kernel(load, source_map, store, target_map, layout).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


TYPES = {"tma_copy": ("Float32", "Float32")}

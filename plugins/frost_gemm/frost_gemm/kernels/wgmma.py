# ruff: noqa: ANN201, SIM102  the DSL reads return annotations, and conditions of the trace stand apart
"""The GEMM kernel of sm_90a: wgmma from shared memory, a persistent grid, a warpgroup that loads and one to three that compute.

    warpgroup 0   warp 0 loads operand tiles by TMA: its share of those that the cluster shares
    warpgroups 1- consumers: wgmma -> registers -> epilogue program -> shared memory -> TMA, or registers -> memory

"cooperative": the consumers share the rows of a tile. "pingpong": two consumers take turns at whole tiles, so that one's epilogue
runs under the other's mainloop.

Barriers (mbarriers, the counts in brackets are arrivals of a phase):

    full[stages]      TMA bytes of a stage [1]
    empty[stages]     a stage has been read by every consumer that its writer's tiles went to [(cluster_m + cluster_n - 1) x their warps]
    turn[2]           pingpong: the other warpgroup has issued its mainloop [its warps]; a matter of speed alone
    partial[3]        split K: the sums of every CTA of the split lie in its shared memory [split_k], one for each warpgroup
    taken[3]          split K: every CTA of the split has read them [split_k]

Sums: a group of wgmmas stays in flight over each stage. Promoted sums of fp8 stay in the matrix unit for 128 bytes of K and are added
in float32. Operands with a prologue come as they lie in memory; the consumers make what is multiplied, in two slots by turns.

Split K: the CTAs of a cluster along z share the K blocks of a tile. Each leaves its sums in its own shared memory; then each adds
up, in the order of their ranks, and finishes every split_k-th subtile. A thread reads only what threads of its own number wrote.
Where no multicast comes in, the sums lie over the ring, and the loader holds the next tile back until they have been read.

Launch: dependent launches may begin as soon as every CTA has; none touches memory before griddepcontrol.wait. Two CTAs
of a small kernel share an SM where their rings are short.

References: PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "Distributed shared memory", "griddepcontrol".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from ..config import TileConfig
from ..facts import ArchFacts
from ..ir import Matrix, Program
from ..layout import (
    BARRIER_BYTES,
    BITS,
    RING_ALIGNMENT,
    WGMMA_MADE_SLOTS,
    WGMMA_REGISTERS,
    KernelLayout,
    align,
    staged_bytes,
    wgmma_promoted_columns,
    wgmma_resident,
    wgmma_warpgroups,
)
from .args import ELEMENTS, Args, matrix, output, unpack
from .epilogue import Chunk, Epilogue
from .prologue import Prologue
from .sched import NARROW, Problem, locate, problem, raster_width
from .sinks import Lanes
from .staging import Staging, load_shared, store_shared, swizzled

__all__ = ["WgmmaKernel"]

WARPGROUP = 128
WARPS = 4  # of a warpgroup
ROWS = 64  # of one wgmma
K_BYTES = 32  # of one wgmma
PROMOTED_K_BYTES = 128  # summed by the matrix unit between two additions in float32
LOADER_WARP = 0
EPILOGUE_BARRIER = 1  # hardware barriers 1, 2, 3: one for each consumer
LANES = Lanes(row=(1, 2), col=(4, 8, 16))  # four lanes share a row of the fragment, eight a column
SWIZZLES = {128: "SW128", 64: "SW64", 32: "SW32", 16: "INTER"}


class Ring(NamedTuple):
    """A position in the ring of stages: the slot, and the parity of the phase that makes it full."""

    slot: Int32
    phase: Int32


class WgmmaKernel:
    """``program`` under ``config``, with the sizes of ``layout``. ``host(words, stream)`` launches it: see ``ir.argument_words``."""

    def __init__(self, program: Program, config: TileConfig, layout: KernelLayout, facts: ArchFacts) -> None:
        self.program, self.config, self.layout, self.facts = program, config, layout, facts
        self.pingpong = config.schedule == "pingpong"
        self.consumers = wgmma_warpgroups(config)
        self.sharing = 1 if self.pingpong else self.consumers  # consumers of one tile
        self.blocks = config.tile_m // (ROWS * self.sharing)  # wgmmas that cover a consumer's rows
        self.columns = wgmma_promoted_columns(program, config)  # of one wgmma
        self.pieces = len(program.gemms) * self.blocks * (config.tile_n // self.columns)
        self.promotions = max(1, config.tile_k // PROMOTED_K_BYTES)  # of a stage
        self.bits = BITS[program.a[0].mma_dtype]
        self.tile_k = config.tile_k * 8 // self.bits  # in elements
        self.accumulator: Any = cutlass.Int32 if program.accumulate == "int32" else cutlass.Float32
        self.rows, self.cols = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n  # of a cluster
        self.subtiles = config.tile_n // layout.epi_n
        self.chunks = self.blocks * self.subtiles  # of a consumer
        self.values = ROWS * layout.epi_n // WARPGROUP  # of a chunk, each gemm
        self.staging = [
            Staging(store.dtype, store.major, ROWS, layout.epi_n) if mode == "tma" else None
            for store, mode in zip(program.stores, layout.store_modes, strict=True)
        ]
        self.operands = [("a", i) for i in range(len(program.a))] + [("b", i) for i in range(len(program.b))]
        self.fused = {
            operand: Prologue(program, self.member(*operand), 128 // self.bits)
            for operand in self.operands
            if self.member(*operand).prologue
        }
        self.resident = wgmma_resident(program, config, layout.shared_bytes)
        self.epilogue = Epilogue(program)
        self._carve()

    def member(self, group: str, index: int) -> Matrix:
        """Operand ``index`` of ``group``, "a" or "b"."""
        return getattr(self.program, group)[index]

    def made_bytes(self, operand: tuple[str, int]) -> int:
        """Of an operand's tile as the matrix unit reads it."""
        return self.layout.a_bytes if operand[0] == "a" else self.layout.b_bytes

    def tile_rows(self, group: str) -> int:
        return self.config.tile_m if group == "a" else self.config.tile_n

    def _carve(self) -> None:
        """Offsets in shared memory; they end at ``layout.shared_bytes``."""
        layout, stages = self.layout, self.layout.stages
        self.full, self.empty = 0, 8 * stages
        self.turn, self.partial, self.taken = 16 * stages, 16 * stages + 16, 16 * stages + 40
        at = BARRIER_BYTES
        self.rings, self.made = {}, {}
        for operand, raw in zip(self.operands, layout.raw_bytes, strict=True):
            self.rings[operand], at = at, at + align(stages * (raw or self.made_bytes(operand)), RING_ALIGNMENT)
        for operand in self.fused:
            self.made[operand] = at
            at += WGMMA_MADE_SLOTS * align(self.made_bytes(operand), RING_ALIGNMENT)
        self.slots, at = at, at + layout.staging_slots * layout.staging_bytes
        self.partials = BARRIER_BYTES if layout.partials_in_ring else at
        at += 0 if layout.partials_in_ring else layout.partial_bytes
        if at != layout.shared_bytes:
            raise AssertionError(f"shared memory ends at {at}, the layout says {layout.shared_bytes}")

    # ------------------------------------------------------------------------------------------------------------ host

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        """Launch: ``words`` is the host address of the argument block."""
        self.launch(unpack(self.program, words), stream)

    def launch(self, args: Args, stream: cuda.CUstream) -> None:
        """The launch of ``host``, from unpacked arguments.

        The grid is persistent: as many clusters as run at once. How many of more than two CTAs do depends on which SMs of a GPC
        are in use, and a grid with one too many takes twice the time: those get a cluster for each tile.
        """
        config, program, facts = self.config, self.program, self.facts
        width = raster_width(config, facts, self.rows, self.cols)
        long = facts.sm_count // config.cluster // NARROW if self.bits == 8 and not config.raster else 0
        tiles = problem(args, self.rows, self.cols, width, narrow_above=long)
        loads_a = tuple(self.load_atom(args, "a", i) for i in range(len(program.a)))
        loads_b = tuple(self.load_atom(args, "b", i) for i in range(len(program.b)))
        stores = tuple(self.store_atom(args, i) for i, staging in enumerate(self.staging) if staging) or None
        self.epilogue.seed(args, stream)
        clusters = tiles.tiles
        if config.cluster <= 2:
            clusters = cutlass.min(clusters, self.resident * facts.sm_count // config.cluster)
        self.kernel(loads_a, loads_b, stores, args.without_operands(), tiles).launch(
            grid=[config.cluster_m * clusters, config.cluster_n, config.split_k],
            block=[self.layout.threads, 1, 1],
            cluster=[config.cluster_m, config.cluster_n, config.split_k],
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=100 if self.resident > 1 else None,  # else the compiler asks the driver for it
            use_pdl=True,  # every access to memory comes after griddepcontrol.wait
            stream=stream,
        )

    def tiled_mma(self, gemm: int) -> cute.TiledMma:
        """wgmma of ``columns`` columns by the consumers that share a tile."""
        a, b = self.program.a[self.program.gemms[gemm].a], self.program.b[self.program.gemms[gemm].b]
        types = ELEMENTS[a.mma_dtype], ELEMENTS[b.mma_dtype]
        shape = (ROWS, self.columns, K_BYTES * 8 // self.bits)
        majors = tuple(OperandMajorMode.K if m.major == "k" else OperandMajorMode.MN for m in (a, b))
        where = warpgroup.OperandSource.SMEM
        if a.mma_dtype == "int8":
            op = warpgroup.MmaI8Op(*types, self.accumulator, shape, where, *majors)
        elif self.bits == 8:
            op = warpgroup.MmaF8Op(*types, self.accumulator, shape, where, *majors)
        else:
            op = warpgroup.MmaF16BF16Op(types[0], self.accumulator, shape, where, *majors)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (self.sharing, 1, 1))

    def stage_layout(self, group: str, index: int, stages: int = 0) -> cute.Layout | cute.ComposedLayout:
        """Shared memory of one operand as TMA writes it: (rows, K) of a stage or (rows, K, stages).

        As the matrix unit reads it, or where there is a prologue, line after line.
        """
        if (group, index) not in self.fused:
            return self.made_layout(group, index, stages)
        rows = self.tile_rows(group)
        stride = (self.tile_k, 1) if self.member(group, index).major == "k" else (1, rows)
        if stages:
            return cute.make_layout((rows, self.tile_k, stages), stride=(*stride, rows * self.tile_k))
        return cute.make_layout((rows, self.tile_k), stride=stride)

    def line_bytes(self, group: str, index: int) -> int:
        """The widest swizzle that an operand's unit-stride extent allows."""
        extent = self.tile_k if self.member(group, index).major == "k" else self.tile_rows(group)
        return next(width for width in SWIZZLES if extent * self.bits // 8 % width == 0)

    def made_layout(self, group: str, index: int, stages: int = 0) -> cute.ComposedLayout:
        """Shared memory of one operand as the matrix unit reads it: (rows, K) or (rows, K, stages)."""
        operand, rows = self.member(group, index), self.tile_rows(group)
        prefix, order = ("K", (0, 1)) if operand.major == "k" else ("MN", (1, 0))
        kind = warpgroup.SmemLayoutAtomKind[f"{prefix}_{SWIZZLES[self.line_bytes(group, index)]}"]
        atom = warpgroup.make_smem_layout_atom(kind, ELEMENTS[operand.mma_dtype])
        if stages:
            return cute.tile_to_shape(atom, (rows, self.tile_k, stages), (*order, 2))
        return cute.tile_to_shape(atom, (rows, self.tile_k), order)

    def load_atom(self, args: Args, group: str, index: int) -> tuple[Any, Any]:
        """The TMA atom and tensor that load operand ``index`` of ``group``: multicast where CTAs of the cluster share it."""
        sharers = self.sharers(group)
        kind = cpasync.CopyBulkTensorTileG2SMulticastOp if sharers > 1 else cpasync.CopyBulkTensorTileG2SOp
        rows = self.config.tile_m if group == "a" else self.config.tile_n
        atom, tensor = cpasync.make_tiled_tma_atom(
            kind(), matrix(args, group, index), self.stage_layout(group, index), (rows, self.tile_k), sharers
        )
        return atom, tensor

    def sharers(self, group: str) -> int:
        """CTAs of a cluster that read the same tile of A or B."""
        return self.config.cluster_n if group == "a" else self.config.cluster_m

    def store_atom(self, args: Args, index: int) -> tuple[Any, Any]:
        """The TMA atom and tensor that store output ``index``, one panel at a time."""
        staging = self.staging[index]
        assert staging is not None
        atom, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), output(args, index), staging.panel_layout(), staging.panel
        )
        return atom, tensor

    # ---------------------------------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, loads_a: tuple, loads_b: tuple, stores: tuple, args: Args, tiles: Problem):
        """The kernel: see the module's text."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(self.layout.shared_bytes, RING_ALIGNMENT)
        if warp == LOADER_WARP:
            self.prefetch_descriptors(loads_a, loads_b, stores)
        if warp == LOADER_WARP + 1:
            with cute.arch.elect_one():
                self.init_barriers(smem)
            cute.arch.mbarrier_init_fence()
        number = self.first_tile(warp)
        tile = locate(tiles, number)
        if cutlass.const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        # The next kernel may take its place on the SMs; it waits in turn for this one to end before it touches memory.
        cute.arch.griddepcontrol_launch_dependents()

        if warp < WARPS:
            if cutlass.const_expr(self.resident == 1):
                cute.arch.setmaxregister_decrease(WGMMA_REGISTERS[self.consumers][1])
            if warp == LOADER_WARP:
                self.load(smem, loads_a, loads_b, args, tiles, number, tile)
        else:
            if cutlass.const_expr(self.resident == 1):
                cute.arch.setmaxregister_increase(WGMMA_REGISTERS[self.consumers][0])
            self.consume(smem, stores, args, tiles, number, tile)

    def first_tile(self, warp: Int32) -> Int32:
        """The number of the first tile of a warp: the cluster's, and the one after it for the second of pingpong's consumers."""
        _, _, _, cluster = self.cluster_place()
        if not self.pingpong:
            return cluster
        return cluster + warp // (2 * WARPS) * self.cluster_count()

    def prefetch_descriptors(self, *groups: Any) -> None:
        """Of all TMA atoms."""
        for group in groups:
            for atom, _ in group or ():
                cpasync.prefetch_descriptor(atom)

    def init_barriers(self, smem: cute.Pointer) -> None:
        """By one thread."""
        config = self.config
        releases = (config.cluster_m + config.cluster_n - 1) * self.sharing * WARPS
        counts = {self.full: 1, self.empty: releases}
        for first, count in counts.items():
            for stage in range(self.layout.stages):
                cute.arch.mbarrier_init(barrier(smem, first, stage), count)
        if self.pingpong:
            for i in range(2):
                cute.arch.mbarrier_init(barrier(smem, self.turn, i), WARPS)
        if config.split_k > 1:
            for first in (self.partial, self.taken):
                for i in range(self.consumers):
                    cute.arch.mbarrier_init(barrier(smem, first, i), config.split_k)

    def cluster_place(self) -> tuple[Int32, Int32, Int32, Int32]:
        """This CTA's (m, n) in its cluster, its part of K, and the cluster's number in the grid."""
        x, y, part = cute.arch.block_idx()
        cluster = x // self.config.cluster_m
        return x - cluster * self.config.cluster_m, y, part, cluster

    def cluster_count(self) -> Int32:
        """Clusters of the grid."""
        x, _, _ = cute.arch.grid_dim()
        return x // self.config.cluster_m

    def k_blocks(self, args: Args, part: Int32) -> tuple[Int32, Int32]:
        """The first K block of this CTA and their number: consecutive ones, the first parts get the remainder."""
        blocks = cute.ceil_div(args.k, self.tile_k)
        split = self.config.split_k
        if split == 1:
            return Int32(0), blocks
        each = blocks // split
        rest = blocks - each * split
        return part * each + cutlass.min(part, rest), each + cutlass.select_(part < rest, Int32(1), Int32(0))

    def ring_tensor(self, smem: cute.Pointer, group: str, index: int) -> cute.Tensor:
        """The ring of operand ``index`` of ``group``, as TMA writes it."""
        layout, dtype = self.stage_layout(group, index, self.layout.stages), ELEMENTS[self.member(group, index).dtype]
        return self.tensor(smem + self.rings[group, index], layout, dtype)

    def made_tensor(self, smem: cute.Pointer, group: str, index: int) -> cute.Tensor:
        """What the matrix unit reads: the ring, or the slots of what a prologue makes."""
        if (group, index) not in self.fused:
            return self.ring_tensor(smem, group, index)
        layout = self.made_layout(group, index, WGMMA_MADE_SLOTS)
        return self.tensor(smem + self.made[group, index], layout, ELEMENTS[self.member(group, index).mma_dtype])

    @staticmethod
    def tensor(pointer: cute.Pointer, layout: cute.Layout | cute.ComposedLayout, dtype: Any) -> cute.Tensor:
        """A tensor in shared memory; the swizzle goes to its pointer."""
        if isinstance(layout, cute.ComposedLayout):
            return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype), layout.outer)
        return cute.make_tensor(cute.recast_ptr(pointer, dtype=dtype), layout)

    def advanced(self, ring: Ring, steps: Any = 1) -> Ring:
        """``ring`` moved on by ``steps`` stages."""
        stages = self.layout.stages
        slot = ring.slot + steps
        turns = slot // stages
        return Ring(slot - turns * stages, ring.phase ^ (turns & 1))

    # The loader.

    def load_partition(self, smem: cute.Pointer, group: str, index: int, load: tuple[Any, Any]) -> tuple[Any, Any]:
        """(shared, global) of one operand's tiles as its TMA atom copies them: (copy, stage), (copy, tile, K block, batch)."""
        x, y, _, _ = self.cluster_place()
        rows = self.config.tile_m if group == "a" else self.config.tile_n
        atom, tensor = load
        tiles = cute.local_tile(tensor, (rows, self.tile_k), (None, None, None))
        ring = self.ring_tensor(smem, group, index)
        share = y if group == "a" else x
        return cpasync.tma_partition(
            atom,
            share,
            cute.make_layout(self.sharers(group)),
            cute.group_modes(ring, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )

    def multicast_mask(self, group: str) -> Any:
        """Ranks of the CTAs that a tile of ``group`` goes to; None if it is this one alone."""
        if self.sharers(group) == 1:
            return None
        x, y, z, _ = self.cluster_place()
        cm, cn = self.config.cluster_m, self.config.cluster_n
        first, mask = (x, sum(1 << (i * cm) for i in range(cn))) if group == "a" else (y * cm, (1 << cm) - 1)
        return cutlass.Int16(Int32(mask) << (first + z * cm * cn))

    @cute.jit
    def load(
        self, smem: cute.Pointer, loads_a: tuple, loads_b: tuple, args: Args, tiles: Problem, number: Int32, tile: tuple
    ):
        """All loads of this CTA. Ends when every stage has been read, by this CTA's consumers and by those of the cluster that
        read what this CTA wrote or that arrive on its barriers."""
        x, y, part, _ = self.cluster_place()
        first_block, blocks = self.k_blocks(args, part)
        groups = {"a": (loads_a, self.program.a), "b": (loads_b, self.program.b)}
        plans = [
            (group, load[0], operand, *self.load_partition(smem, group, i, load))
            for group, (loads, operands) in groups.items()
            for i, (load, operand) in enumerate(zip(loads, operands, strict=True))
        ]
        masks = {group: self.multicast_mask(group) for group in groups}
        cute.arch.griddepcontrol_wait()
        ring, taken = Ring(Int32(0), Int32(0)), Int32(0)
        m, n, batch = tile
        while number < tiles.tiles:
            at = {"a": m * self.config.cluster_m + x, "b": n * self.config.cluster_n + y}
            for block in cutlass.range(first_block, first_block + blocks, unroll=1):
                full = barrier(smem, self.full, ring.slot)
                cute.arch.mbarrier_wait(barrier(smem, self.empty, ring.slot), ring.phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.layout.stage_bytes)
                for group, atom, operand, shared, source in plans:
                    cute.copy(
                        atom,
                        source[(None, at[group], block, batch if operand.batched else 0)],
                        shared[(None, ring.slot)],
                        tma_bar_ptr=full,
                        mcast_mask=masks[group],
                    )
                ring = self.advanced(ring)
            if cutlass.const_expr(self.layout.partials_in_ring):
                for worker in cutlass.range_constexpr(self.consumers):
                    cute.arch.mbarrier_wait(barrier(smem, self.taken, worker), taken)
                taken = taken ^ 1
            number += self.cluster_count()
            m, n, batch = locate(tiles, number)
        for _ in cutlass.range(self.layout.stages, unroll=1):
            cute.arch.mbarrier_wait(barrier(smem, self.empty, ring.slot), ring.phase ^ 1)
            ring = self.advanced(ring)

    # The consumers.

    @cute.jit
    def consume(self, smem: cute.Pointer, stores: tuple, args: Args, tiles: Problem, number: Int32, tile: tuple):
        """All tiles of one consumer warpgroup."""
        cute.arch.griddepcontrol_wait()
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        worker = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP - 1)
        x, y, part, _ = self.cluster_place()
        first_block, blocks = self.k_blocks(args, part)
        step = self.cluster_count()
        ring = Ring(Int32(0), Int32(0))
        if cutlass.const_expr(self.pingpong):
            step = step * 2
            ring = self.advanced(ring, worker * blocks)
        operands = [self.fragments(smem, gemm, worker) for gemm in range(len(self.program.gemms))]
        sums = [self.accumulators(gemm) for gemm in range(len(self.program.gemms))]
        target = self.release_target(thread)
        turn, shared, staged = Int32(0), Int32(0), Int32(0)
        m, n, batch = tile
        while number < tiles.tiles:
            if cutlass.const_expr(self.pingpong):
                cute.arch.mbarrier_wait(barrier(smem, self.turn, worker), turn ^ 1 ^ worker)
            row = (m * self.config.cluster_m + x) * self.config.tile_m
            col = (n * self.config.cluster_n + y) * self.config.tile_n
            if cutlass.const_expr(not self.pingpong):
                row += worker * ROWS
            origin = row, col, batch
            number += step
            m, n, batch = locate(tiles, number)  # of the next tile, while this one's first stage comes in
            if cutlass.const_expr(self.program.promote):
                ring = self.promoted_mainloop(smem, sums, operands, blocks, ring, target, worker)
            elif cutlass.const_expr(len(self.fused) > 0):
                ring = self.fused_mainloop(smem, sums, operands, first_block, blocks, ring, target, args, origin[2])
            else:
                ring = self.mainloop(smem, sums, operands, blocks, ring, target, worker)
            if cutlass.const_expr(self.pingpong):
                ring = self.advanced(ring, blocks)  # the other's tile
                turn = turn ^ 1
            if cutlass.const_expr(self.config.split_k > 1):
                self.exchange(smem, sums, thread, worker, part, shared ^ 1)
                for chunk in cutlass.range(part, self.chunks, self.config.split_k, unroll=1):
                    accs = [self.total(smem, gemm, chunk, thread, worker) for gemm in range(len(self.program.gemms))]
                    staged = self.finish(smem, stores, args, accs, self.place(origin, chunk), staged, thread, worker)
                if cutlass.const_expr(self.layout.partials_in_ring):  # TMA writes there next
                    cute.arch.fence_proxy("async.shared", space="cluster")
                self.arrive_everywhere(smem, self.taken, thread, worker)
                shared = shared ^ 1
            else:
                for chunk in cutlass.range_constexpr(self.chunks):
                    accs = [self.chunk_values(total, chunk) for total in sums]
                    staged = self.finish(smem, stores, args, accs, self.place(origin, chunk), staged, thread, worker)
        if cutlass.const_expr(self.layout.staging_slots > 0):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cutlass.const_expr(self.config.split_k > 1):  # the others read this CTA's memory
            cute.arch.mbarrier_wait(barrier(smem, self.taken, worker), shared ^ 1)

    def place(self, origin: tuple[Int32, Int32, Int32], chunk: Any) -> tuple[Int32, Int32, Int32]:
        """(row, column, batch) of a chunk of the consumer whose first element is at ``origin``."""
        row, col, batch = origin
        block = chunk // self.subtiles
        return row + block * (self.sharing * ROWS), col + (chunk - block * self.subtiles) * self.layout.epi_n, batch

    # Split K.

    def sums_address(self, smem: cute.Pointer, gemm: int, chunk: Any, thread: Int32, worker: Int32) -> Int32:
        """Shared memory of a thread's first four values of a chunk; the next four are WARPGROUP * 16 bytes further."""
        number = (worker * self.chunks + chunk) * len(self.program.gemms) + gemm
        return (smem + self.partials).toint() + number * (self.values * 4 * WARPGROUP) + thread * 16

    @cute.jit
    def exchange(self, smem: cute.Pointer, sums: list, thread: Int32, worker: Int32, part: Int32, free: Int32):
        """Leave this CTA's sums in its shared memory, and wait until all of the split have. ``free``: parity of the phase in which
        the tile before has been read."""
        cute.arch.mbarrier_wait(barrier(smem, self.taken, worker), free)
        if cutlass.const_expr(self.layout.partials_in_ring):  # all warps have read the ring
            self.meet()
        self.leave(smem, sums, thread, worker)
        self.arrive_everywhere(smem, self.partial, thread, worker)
        cute.arch.mbarrier_wait(barrier(smem, self.partial, worker), free ^ 1)
        cute.arch.fence_acq_rel_cluster()

    def leave(self, smem: cute.Pointer, sums: list[Any], thread: Int32, worker: Int32) -> None:
        """All sums of this thread into shared memory."""
        for gemm, total in enumerate(sums):
            for chunk in range(self.chunks):
                values = self.chunk_values(total, chunk)
                address = self.sums_address(smem, gemm, chunk, thread, worker)
                for i in range(self.values // 4):
                    store_shared(address + i * 16 * WARPGROUP, [values[4 * i + j] for j in range(4)], 32)

    @cute.jit
    def arrive_everywhere(self, smem: cute.Pointer, first: cutlass.Constexpr, thread: Int32, worker: Int32):
        """After all of this warpgroup: arrive on its barrier of the row ``first`` in every CTA of the split."""
        cute.arch.fence_acq_rel_cluster()
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + worker, number_of_threads=WARPGROUP)
        if thread < self.config.split_k:
            cute.arch.mbarrier_arrive(barrier(smem, first, worker), self.split_rank(thread), scope=MemScopeKind.CLUSTER)

    def split_rank(self, part: Any) -> Int32:
        """The rank of the CTA that has ``part`` of this CTA's K."""
        x, y, _, _ = self.cluster_place()
        return x + y * self.config.cluster_m + part * (self.config.cluster_m * self.config.cluster_n)

    def total(self, smem: cute.Pointer, gemm: int, chunk: Int32, thread: Int32, worker: Int32) -> cute.TensorSSA:
        """This thread's values of a chunk: the sums of all CTAs of the split, added in the order of their parts."""
        mine = self.sums_address(smem, gemm, chunk, thread, worker)
        values = cute.make_rmem_tensor(self.values, self.accumulator)
        for part in range(self.config.split_k):
            address = cute.arch.inline_ptx(
                "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
                write_only_types=[Int32],
                read_only_args=[mine, self.split_rank(part)],
            )
            for i in range(self.values // 4):
                four = cute.arch.inline_ptx(
                    "ld.shared::cluster.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                    write_only_types=[self.accumulator] * 4,
                    read_only_args=[address + i * 16 * WARPGROUP],
                )
                for j in range(4):
                    values[4 * i + j] = four[j] if part == 0 else values[4 * i + j] + four[j]
        return values.load()

    # The mainloop.

    def fragments(self, smem: cute.Pointer, gemm: int, worker: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Matrix descriptors of a gemm's operands: (1, block or part of the columns, K step, stage)."""
        mma, shape = self.tiled_mma(gemm), self.program.gemms[gemm]
        mine = mma.get_slice(Int32(0) if self.pingpong else worker * WARPGROUP)
        return (
            mma.make_fragment_A(mine.partition_A(self.made_tensor(smem, "a", shape.a))),
            mma.make_fragment_B(mine.partition_B(self.made_tensor(smem, "b", shape.b))),
        )

    def accumulators(self, gemm: int) -> cute.Tensor:
        """Registers of a gemm's sums: ((2 columns, 2 rows, 8 columns apart), block, part of the columns)."""
        shape = self.tiled_mma(gemm).partition_shape_C((self.config.tile_m, self.config.tile_n))
        return cute.make_rmem_tensor(shape, self.accumulator)

    def release_target(self, thread: Int32) -> tuple[Boolean, Any]:
        """Whether this thread reports that its warp has read a stage, and to which rank (None: its own CTA)."""
        cm, cn, lane = self.config.cluster_m, self.config.cluster_n, thread % 32
        if cm * cn == 1:
            return lane == 0, None
        x, y, z, _ = self.cluster_place()
        reports = (lane < cm * cn) & ((lane % cm == x) | (lane // cm == y))
        return reports, lane + z * cm * cn

    @cute.jit
    def release(self, smem: cute.Pointer, slot: Int32, target: tuple[Boolean, Any]):
        """This warp has read stage ``slot``."""
        reports, rank = target
        if reports:
            cute.arch.mbarrier_arrive(barrier(smem, self.empty, slot), rank)

    @cute.jit
    def mainloop(
        self, smem: cute.Pointer, sums: list, operands: list, blocks: Int32, ring: Ring, target: tuple, worker: Int32
    ):
        """The sums of one tile, over ``blocks`` stages from ``ring`` on. One group of wgmmas stays in flight."""
        previous = ring.slot
        if cutlass.const_expr(self.config.split_k > 1):  # there may be no block
            self.clear(sums)
        for block in cutlass.range(blocks, unroll=1):
            cute.arch.mbarrier_wait(barrier(smem, self.full, ring.slot), ring.phase)
            warpgroup.fence()
            for k in cutlass.range_constexpr(self.config.tile_k // K_BYTES):
                self.multiply(sums, operands, k, ring.slot, True if k or self.config.split_k > 1 else block > 0)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if block > 0:
                self.release(smem, previous, target)
            previous = ring.slot
            ring = self.advanced(ring)
        self.pass_turn(smem, worker)
        warpgroup.wait_group(0)
        if blocks > 0:
            self.release(smem, previous, target)
        return ring

    @cute.jit
    def promoted_mainloop(
        self, smem: cute.Pointer, sums: list, operands: list, blocks: Int32, ring: Ring, target: tuple, worker: Int32
    ):
        """As ``mainloop``; the products of one stage are summed by the matrix unit, the stages by additions in float32.

        A warpgroup adds while another one multiplies. wgmma adds fp8 products with fewer bits than float32 has.
        """
        self.clear(sums)
        partial = cute.make_rmem_tensor(
            self.tiled_mma(0).partition_shape_C((self.sharing * ROWS, self.columns)), self.accumulator
        )
        for _ in cutlass.range(blocks, unroll=1):
            cute.arch.mbarrier_wait(barrier(smem, self.full, ring.slot), ring.phase)
            for piece in cutlass.range_constexpr(self.pieces * self.promotions):
                warpgroup.fence()
                self.multiply_piece(partial, operands, piece, ring.slot)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if cutlass.const_expr(piece == self.pieces * self.promotions - 1):
                    self.release(smem, ring.slot, target)
                self.add_piece(sums, partial, piece)
            ring = self.advanced(ring)
        self.pass_turn(smem, worker)
        return ring

    @cute.jit
    def pass_turn(self, smem: cute.Pointer, worker: Int32):
        """Pingpong: the other warpgroup may begin its mainloop."""
        if cutlass.const_expr(self.pingpong):
            if cute.arch.thread_idx()[0] % 32 == 0:
                cute.arch.mbarrier_arrive(barrier(smem, self.turn, 1 - worker))

    def piece(self, number: int) -> tuple[int, int, int, int]:
        """(part of the stage's K, gemm, block of rows, part of the columns) of promoted sums."""
        rest, part = divmod(number, self.config.tile_n // self.columns)
        rest, block = divmod(rest, self.blocks)
        return *divmod(rest, len(self.program.gemms)), block, part

    def multiply_piece(self, partial: cute.Tensor, operands: list[Any], number: int, slot: Int32) -> None:
        """The products of one wgmma's rows and columns, over at most ``PROMOTED_K_BYTES`` of a stage."""
        along_k, gemm, block, part = self.piece(number)
        a, b = operands[gemm]
        steps = self.config.tile_k // K_BYTES // self.promotions
        for k in range(along_k * steps, (along_k + 1) * steps):
            mma = self.tiled_mma(gemm)
            mma.set(warpgroup.Field.ACCUMULATE, k > along_k * steps)
            rows, columns = (
                cute.append_ones(t, up_to_rank=2) for t in (a[(None, block, k, slot)], b[(None, part, k, slot)])
            )
            cute.gemm(mma, partial, rows, columns, partial)

    def add_piece(self, sums: list[Any], partial: cute.Tensor, number: int) -> None:
        _, gemm, block, part = self.piece(number)
        total = sums[gemm][(None, block, part)]
        total.store(total.load() + partial[(None, 0, 0)].load())

    def clear(self, sums: list[Any]) -> None:
        """All sums are 0."""
        for total in sums:
            total.fill(0)

    @cute.jit
    def fused_mainloop(
        self,
        smem: cute.Pointer,
        sums: list,
        operands: list,
        first_block: Int32,
        blocks: Int32,
        ring: Ring,
        target: tuple,
        args: Args,
        batch: Int32,
    ):
        """As ``mainloop``; the consumers apply the prologues to a stage while the matrix unit multiplies the one before."""
        scalars = {operand: prologue.load(args, batch) for operand, prologue in self.fused.items()}
        previous, made = ring.slot, Int32(0)
        if cutlass.const_expr(self.config.split_k > 1):
            self.clear(sums)
        for block in cutlass.range(blocks, unroll=1):
            cute.arch.mbarrier_wait(barrier(smem, self.full, ring.slot), ring.phase)
            self.make_operands(smem, ring.slot, made, scalars, args, batch, (first_block + block) * self.tile_k)
            cute.arch.fence_proxy("async.shared", space="cta")
            warpgroup.wait_group(0)
            # All have made their part of this slot, and read the other one.
            self.meet()
            if block > 0:
                self.release(smem, previous, target)
            warpgroup.fence()
            for k in cutlass.range_constexpr(self.config.tile_k // K_BYTES):
                self.multiply(sums, operands, k, ring.slot, True if k or self.config.split_k > 1 else block > 0, made)
            warpgroup.commit_group()
            previous, made = ring.slot, made ^ 1
            ring = self.advanced(ring)
        warpgroup.wait_group(0)
        if blocks > 0:
            self.release(smem, previous, target)
        self.meet()
        return ring

    def meet(self) -> None:
        """A barrier of all consumers of a tile."""
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + self.consumers, number_of_threads=WARPGROUP * self.sharing)

    def make_operands(
        self,
        smem: cute.Pointer,
        slot: Int32,
        made: Int32,
        scalars: dict[tuple[str, int], Any],
        args: Args,
        batch: Int32,
        k: Int32,
    ) -> None:
        """Apply the prologues to stage ``slot``, whose first column is ``k``, into slot ``made``: this thread's part."""
        thread, threads = cute.arch.thread_idx()[0] - WARPGROUP, WARPGROUP * self.sharing
        for operand, prologue in self.fused.items():
            vectors = self.tile_rows(operand[0]) * self.tile_k // prologue.size
            for first in range(0, vectors, threads):
                make = self.make_vector if first + threads <= vectors else self.make_last_vector
                make(smem, operand, slot, made, first + thread, scalars[operand], args, batch, k)

    @cute.jit
    def make_last_vector(
        self,
        smem: cute.Pointer,
        operand: cutlass.Constexpr,
        slot: Int32,
        made: Int32,
        vector: Int32,
        scalars: dict,
        args: Args,
        batch: Int32,
        k: Int32,
    ):
        """``make_vector``, if there is such a vector."""
        if vector < self.tile_rows(operand[0]) * self.tile_k // self.fused[operand].size:
            self.make_vector(smem, operand, slot, made, vector, scalars, args, batch, k)

    def make_vector(
        self,
        smem: cute.Pointer,
        operand: tuple[str, int],
        slot: Int32,
        made: Int32,
        vector: Int32,
        scalars: dict[int, Any],
        args: Args,
        batch: Int32,
        k: Int32,
    ) -> None:
        """Apply a prologue to 16 bytes of what the matrix unit reads."""
        prologue, member, rows = self.fused[operand], self.member(*operand), self.tile_rows(operand[0])
        size = prologue.size * BITS[member.dtype] // 8
        raw = (smem + self.rings[operand]).toint() + slot * self.layout.raw_bytes[self.operands.index(operand)]
        words = cute.make_rmem_tensor(size // 4, cutlass.Uint32)
        for i, word in enumerate(load_shared(raw + vector * size, size // 4)):
            words[i] = word
        elements = cute.recast_tensor(words, ELEMENTS[member.dtype]).load()
        values = cute.make_rmem_tensor(prologue.size, ELEMENTS[member.mma_dtype])
        values.store(prologue.apply(args, elements, batch, scalars))
        lines, extent = (rows, self.tile_k) if member.major == "k" else (self.tile_k, rows)
        line = vector // (extent // prologue.size)
        along = vector - line * (extent // prologue.size)
        first, step = (along * prologue.size, 1) if member.major == "k" else (line, 0)
        prologue.clear_beyond(values, k + first, step, args.k)
        place = (smem + self.made[operand]).toint() + made * self.made_bytes(operand)
        found = cute.recast_tensor(values, cutlass.Uint32)
        store_shared(
            place + swizzled(line, along * 16, lines, self.line_bytes(*operand)), [found[i] for i in range(4)], 32
        )

    def multiply(
        self, sums: list[Any], operands: list[Any], k: int, slot: Int32, accumulate: Any, made: Any = None
    ) -> None:
        """One K step of a stage, for every gemm; ``made`` is the slot of operands with a prologue."""
        for gemm, (total, (a, b)) in enumerate(zip(sums, operands, strict=True)):
            mma = self.tiled_mma(gemm)
            mma.set(warpgroup.Field.ACCUMULATE, accumulate)
            shape = self.program.gemms[gemm]
            slots = (made if operand in self.fused else slot for operand in (("a", shape.a), ("b", shape.b)))
            cute.gemm(mma, total, *(held[(None, None, k, at)] for held, at in zip((a, b), slots, strict=True)), total)

    def chunk_values(self, sums: cute.Tensor, chunk: int) -> cute.TensorSSA:
        """This thread's sums of one chunk, in the order of the fragment."""
        block, subtile = divmod(chunk, self.subtiles)
        values = cute.make_rmem_tensor(self.values, self.accumulator)
        for value in range(self.values):
            part, place = divmod(subtile * self.values + value, self.columns // 2)
            values[value] = sums[(place, block, part)]
        return values.load()

    @cute.jit
    def finish(
        self,
        smem: cute.Pointer,
        stores: tuple,
        args: Args,
        accs: list,
        place: tuple,
        staged: Int32,
        thread: Int32,
        worker: Int32,
    ):
        """The epilogue of one chunk whose first element is at ``place`` = (row, column, batch). ``staged`` counts staged chunks."""
        slot = staged % self.layout.staging_slots
        places = self.stage(smem, args, accs, place, worker * self.layout.staging_slots + slot, thread)
        if cutlass.const_expr(self.layout.staging_slots > 0):
            # The stores of the chunk before have read their slot: after the barrier, the next chunk may write there.
            if thread < 32:
                cute.arch.cp_async_bulk_wait_group(self.layout.staging_slots - 2, read=True)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + worker, number_of_threads=WARPGROUP)
            if thread < 32:
                self.store_staged(stores, places, place)
                cute.arch.cp_async_bulk_commit_group()
        return staged + 1

    def stage(
        self,
        smem: cute.Pointer,
        args: Args,
        accs: list[Any],
        place: tuple[Int32, Int32, Int32],
        slot: Int32,
        thread: Int32,
    ) -> list[cute.Pointer]:
        """The epilogue program on one chunk. Where each staged output lies; the others are stored."""
        row, col, batch = place
        chunk = Chunk(
            row + thread // 32 * (ROWS // WARPS) + thread % 32 // 4,
            col + thread % 4 * 2,
            batch,
            fragment_offsets(self.layout.epi_n),
            col_multiple=2,
        )
        values = self.epilogue.evaluate(args, accs, chunk)
        at, places = smem + self.slots + slot * (self.layout.staging_bytes // self.consumers), []
        for i, staging in enumerate(self.staging):
            if staging is None:
                self.epilogue.store_vector(args, i, values, chunk)
                continue
            fragment = cute.make_rmem_tensor(self.values, staging.element)
            fragment.store(self.epilogue.converted(i, values))
            staging.write(at, fragment, thread)
            places.append(at)
            at = at + staged_bytes(ROWS, self.layout.epi_n, staging.size)
        for i in range(len(self.program.reductions)):
            self.epilogue.reduce(args, i, values, chunk, LANES)
        return places

    def store_staged(
        self, stores: tuple[Any, ...], places: list[cute.Pointer], place: tuple[Int32, Int32, Int32]
    ) -> None:
        """TMA stores of the outputs staged at ``places``. By one warp."""
        staged = [staging for staging in self.staging if staging]
        for staging, base, (atom, tensor) in zip(staged, places, stores, strict=True):
            self.store_panels(staging, base, atom, tensor, *place)

    def store_panels(
        self, staging: Staging, base: cute.Pointer, atom: Any, tensor: Any, row: Int32, col: Int32, batch: Int32
    ) -> None:
        """TMA stores of one staged output. By one warp."""
        tiles = cute.group_modes(cute.local_tile(tensor, staging.panel, (None, None, None)), 0, 2)
        height, width = staging.panel
        for index in range(staging.panels):
            panel = cute.group_modes(staging.panel_tensor(base, index), 0, 2)
            source, target = cpasync.tma_partition(atom, 0, cute.make_layout(1), panel, tiles)
            down, right = staging.panel_origin(index)
            cute.copy(atom, source, target[(None, (row + down) // height, (col + right) // width, batch)])


def fragment_offsets(columns: int) -> tuple[tuple[int, int], ...]:
    """(row, column) of a thread's values from its first: PTX ISA, wgmma, the accumulator's fragment."""
    return tuple(
        (8 * half, 8 * block + pair) for block in range(columns // 8) for half in range(2) for pair in range(2)
    )


def barrier(smem: cute.Pointer, first: int, index: Any) -> cute.Pointer:
    """mbarrier ``index`` of the row that begins at byte ``first``."""
    return cute.recast_ptr(smem + first, dtype=Int64) + index

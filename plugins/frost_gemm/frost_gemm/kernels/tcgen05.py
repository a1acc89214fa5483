"""The GEMM kernel of sm_100a, sm_103a and sm_107a: tcgen05 MMAs into tensor memory, persistent by cluster launch control.

The warps of a CTA:

    warps 0-3  epilogue: tensor memory -> registers -> epilogue program -> shared memory -> TMA, or registers -> global memory
    warp 4     allocates tensor memory; in the leader CTA of every pair, issues the MMAs
    warp 5     loads operand tiles by TMA: its share of those that the cluster shares
    warp 6     asks for the next tile
    warps 7-10 only with mainloop prologues: operands as they lie in memory -> prologue -> operands of the MMA

Rings of mbarriers, "full" when there is something to read, "empty" when it has been read:

    operands      stages      5 -> 4    bytes of TMA                 / tcgen05.commit to every CTA that fills slots of the pair
    raw operands  stages      5 -> 7-10 bytes of TMA                 / (with the operands of the slot)
    made operands stages      7-10 -> 4 a lane of each warp          / (with the operands of the slot)
    accumulators  acc_stages  4 -> 0-3  tcgen05.commit to the pair   / a lane of every epilogue warp of the pair
    parts of sums 2           0-3 -> same warp of another CTA        a lane / a lane
    next tile     1           6 -> all  bytes of the response        / a lane of every warp of the cluster that reads it

The grid has one cluster for every ``cluster_m x cluster_n`` CTA tiles. A cluster that runs takes over launches that have not begun.

Launch: dependent launches may begin as soon as every CTA has. No warp touches global memory before griddepcontrol.wait, nor asks for
another tile: a CTA that began early would take the tiles of SMs that the launch before still holds.
References: PTX ISA, "tcgen05", "clusterlaunchcontrol", "cp.async.bulk.tensor", "griddepcontrol".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import SmemAllocator
from cutlass.utils import blackwell_helpers as sm100

from ..config import TileConfig
from ..facts import ArchFacts
from ..ir import Gemm, Matrix, Program
from ..issue import Issue, issues
from ..layout import BARRIER_BYTES, BITS, RING_ALIGNMENT, KernelLayout, align
from .args import ELEMENTS, Args, matrix, output, unpack
from .epilogue import Chunk, Epilogue
from .mma import mma_atom
from .prologue import Prologue
from .sched import Problem, locate, problem, raster_width
from .sinks import Lanes

__all__ = ["Tcgen05Kernel"]

EPILOGUE_WARPS, MMA_WARP, TMA_WARP, SCHEDULER_WARP, PROLOGUE_WARP, PROLOGUE_WARPS = 4, 4, 5, 6, 7, 4
VECTOR_BYTES = 16  # of operands in shared memory at a time
PART_SLOTS = 2
PIECE = 4  # elements of one store to another CTA
WARP_ROWS = 32  # tensor memory lanes that one warp reads (PTX ISA, tcgen05.ld)
TMEM_ROW = 1 << 16  # the lane is the upper half of a tensor memory address
LANES = Lanes(row=(), col=(1, 2, 4, 8, 16))  # a lane owns a row
RESPONSE_BYTES = 16  # PTX ISA, clusterlaunchcontrol.try_cancel
RESPONSE_OFFSET, TMEM_ADDRESS_OFFSET = 960, 976  # bytes from the start of shared memory; barriers come before

Many = tuple[Any, ...]  # atoms or tensors, or None: an empty tuple does not cross the boundary of a kernel


class Rings(NamedTuple):
    """Shared memory beside operands and staging: pointers to the barriers, the response and the tensor memory address."""

    full: cute.Pointer
    empty: cute.Pointer
    raw: cute.Pointer
    made: cute.Pointer
    sums_full: cute.Pointer
    sums_empty: cute.Pointer
    answered: cute.Pointer
    taken: cute.Pointer
    part_full: cute.Pointer
    part_empty: cute.Pointer
    response: cute.Pointer
    tmem_address: cute.Pointer


class Place(NamedTuple):
    """Where a CTA stands: its rank in the cluster, its rank in the pair; its pair's M, its N and its part of K in the cluster."""

    rank: Int32
    peer: Int32
    m: Int32
    n: Int32
    part: Int32


class Load(NamedTuple):
    """One operand's copies: ``atom`` from ``source`` (_, tile, step, batch) to ``to`` (_, stage), and the CTAs that get a share."""

    atom: cute.CopyAtom
    source: cute.Tensor
    to: cute.Tensor
    mask: Any
    is_a: bool
    batched: bool
    raw: bool


class Tcgen05Kernel:
    """``program`` under ``config``, sized by ``layout``. ``host(words, stream)`` launches it (``ir.argument_words``)."""

    def __init__(self, program: Program, config: TileConfig, layout: KernelLayout, facts: ArchFacts) -> None:
        self.program, self.config, self.layout, self.facts = program, config, layout, facts
        self.group = config.cta_group
        self.pairs = config.cluster_m // self.group  # along M in a cluster; a CTA alone counts as a pair
        self.tile_k = config.tile_k * 8 // BITS[program.a[0].mma_dtype]  # in elements
        self.tiler = (config.tile_m, config.tile_n, self.tile_k)
        self.mma_tiler = (layout.epi_m * self.group, config.tile_n)  # of one instruction
        self.issues = issues(program.gemms, layout.blocks, facts)
        self.cluster_tile = (config.tile_m * self.pairs, config.tile_n * config.cluster_n)
        self.sum_type: Any = cutlass.Int32 if program.accumulate == "int32" else cutlass.Float32
        self.staged = tuple(i for i, mode in enumerate(layout.store_modes) if mode == "tma")
        self.epilogue = Epilogue(program)
        self.members = (*(("a", i) for i in range(len(program.a))), *(("b", i) for i in range(len(program.b))))
        self.fused = tuple(
            i for i, size in enumerate(layout.raw_bytes) if size
        )  # operands with a prologue, by place in members
        sizes = [layout.a_bytes if group == "a" else layout.b_bytes for group, _ in self.members]
        self.plain_bytes = sum(
            size for i, size in enumerate(sizes) if i not in self.fused
        )  # of a stage, straight from memory
        self.vector = VECTOR_BYTES * 8 // BITS[program.a[0].mma_dtype]
        self.offsets = tuple((0, column) for column in range(layout.epi_n))
        self.arch = facts.target.removesuffix("a")  # as the DSL's functions for tensor memory name it
        self.cta_group = tcgen05.CtaGroup.TWO if self.group == 2 else tcgen05.CtaGroup.ONE

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream) -> None:
        """Launch the kernel; ``words`` is the host address of the argument block."""
        self.launch(unpack(self.program, words), stream)

    def launch(self, args: Args, stream: cuda.CUstream) -> None:
        """What ``host`` does with unpacked arguments."""
        config = self.config
        loads = [self.load_atom(place, args) for place in range(len(self.members))]
        stores = [self.store_atom(i, args) for i in self.staged]
        self.epilogue.seed(args, stream)
        tiles = problem(args, *self.cluster_tile, raster_width(config, self.facts, *self.cluster_tile))
        self.kernel(
            tuple(atom for atom, _ in loads),
            tuple(tensor for _, tensor in loads),
            tuple(atom for atom, _ in stores) or None,
            tuple(tensor for _, tensor in stores) or None,
            args.without_operands(),
            tiles,
        ).launch(
            grid=[tiles.tiles * config.cluster_m, config.cluster_n, config.split_k],
            block=[self.layout.threads, 1, 1],
            cluster=[config.cluster_m, config.cluster_n, config.split_k],
            min_blocks_per_mp=1,  # shared memory is for one CTA; without a word on it, ptxas spills to make room for a second one
            use_pdl=True,  # every access to memory comes after griddepcontrol.wait
            stream=stream,
        )

    def tiled_mma(self, gemm: Gemm, keep_a: str = "discard", keep_b: str = "discard") -> cute.TiledMma:
        """The MMA of one product and one block of rows, by the whole pair, and what it keeps (``issue.Issue``).

        A new object: what is set on it goes no further.
        """
        a, b = self.program.a[gemm.a], self.program.b[gemm.b]
        shape = self.mma_tiler
        majors = tuple(OperandMajorMode.K if m.major == "k" else OperandMajorMode.MN for m in (a, b))
        types = ELEMENTS[a.mma_dtype], ELEMENTS[b.mma_dtype]
        source = tcgen05.OperandSource.SMEM
        if a.mma_dtype == "int8":
            op = tcgen05.MmaI8Op(types[0], (*shape, 32), self.cta_group, source, *majors)
        elif BITS[a.mma_dtype] == 16:
            op = tcgen05.MmaF16BF16Op(types[0], self.sum_type, (*shape, 16), self.cta_group, source, *majors)
        elif self.facts.fp8_k_bytes == 64:
            op = tcgen05.SM107MmaFP8Op(*types, self.sum_type, (*shape, 64), self.cta_group, source, *majors)
        else:
            op = tcgen05.MmaF8F6F4Op(*types, self.sum_type, (*shape, 32), self.cta_group, source, *majors)
        return cute.make_tiled_mma(mma_atom(op, keep_a, keep_b))

    def reader(self, operand: int) -> cute.TiledMma:
        """The MMA of the first product that reads this operand. Operands are numbered: A's, then B's."""
        group, index = self.members[operand]
        return self.tiled_mma(next(gemm for gemm in self.program.gemms if getattr(gemm, group) == index))

    def member(self, operand: int) -> Matrix:
        """An operand's row of the program."""
        group, index = self.members[operand]
        found: Matrix = getattr(self.program, group)[index]
        return found

    def cluster_layout(self, mma: cute.TiledMma) -> cute.Layout:
        """Ranks of the cluster's CTAs by (rank in the pair, pair along M, N, 1)."""
        return cute.tiled_divide(
            cute.make_layout((self.config.cluster_m, self.config.cluster_n, 1)), (mma.thr_id.shape,)
        )

    def operand_layout(self, operand: int) -> cute.ComposedLayout:
        """An operand's ring in shared memory: (MMA, blocks of A or 1, MMA_K, stages)."""
        make = sm100.make_smem_layout_a if self.members[operand][0] == "a" else sm100.make_smem_layout_b
        return make(self.reader(operand), self.tiler, ELEMENTS[self.member(operand).mma_dtype], self.layout.stages)

    def raw_layout(self, operand: int) -> cute.ComposedLayout:
        """The ring of an operand as it lies in memory: (rows of this CTA, tile_k, stages)."""
        member = self.member(operand)
        major = OperandMajorMode.K if member.major == "k" else OperandMajorMode.MN
        return sm100.make_smem_layout(
            major, (self.rows(operand), self.tile_k), ELEMENTS[member.dtype], self.layout.stages
        )

    def rows(self, operand: int) -> int:
        """Rows of an operand in one CTA."""
        return (self.config.tile_m if self.members[operand][0] == "a" else self.config.tile_n) // self.group

    def sharers(self, operand: int) -> int:
        """CTAs of the cluster that read the same rows of an operand."""
        return self.config.cluster_n if self.members[operand][0] == "a" else self.pairs

    def load_atom(self, operand: int, args: Args) -> tuple[Any, Any]:
        """The TMA atom and tensor of an operand: multicast where CTAs of the cluster share its tiles."""
        group, index = self.members[operand]
        sharers = self.sharers(operand)
        kind = cpasync.CopyBulkTensorTileG2SMulticastOp if sharers > 1 else cpasync.CopyBulkTensorTileG2SOp
        tensor = matrix(args, group, index)
        if operand in self.fused:  # each CTA waits for its own
            stage = cute.slice_(self.raw_layout(operand), (None, None, 0))
            shape = (self.rows(operand), self.tile_k)
            atom, moved = cpasync.make_tiled_tma_atom(kind(tcgen05.CtaGroup.ONE), tensor, stage, shape, sharers)
            return atom, moved
        make = cute.nvgpu.make_tiled_tma_atom_A if group == "a" else cute.nvgpu.make_tiled_tma_atom_B
        mma = self.reader(operand)
        stage = cute.slice_(self.operand_layout(operand), (None, None, None, 0))
        atom, moved = make(kind(self.cta_group), tensor, stage, self.tiler, mma, self.cluster_layout(mma).shape)
        return atom, moved

    def staging_layout(self, index: int, blocks: int) -> cute.ComposedLayout:
        """Shared memory of ``blocks`` of 32 rows of a subtile of a store, swizzled over the bytes of a row."""
        dtype, columns = self.program.stores[index].dtype, self.layout.epi_n
        kind = tcgen05.SmemLayoutAtomKind
        kinds = {128: kind.K_SW128, 64: kind.K_SW64, 32: kind.K_SW32, 16: kind.K_INTER}
        atom = tcgen05.make_smem_layout_atom(kinds[columns * BITS[dtype] // 8], ELEMENTS[dtype])
        return cute.tile_to_shape(atom, (WARP_ROWS, columns, blocks), (0, 1, 2))

    def store_atom(self, index: int, args: Args) -> tuple[Any, Any]:
        """The TMA atom and tensor of a store: 32 rows of a subtile at a time."""
        block = cute.slice_(self.staging_layout(index, 1), (None, None, 0))
        shape = (WARP_ROWS, self.layout.epi_n)
        atom, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), output(args, index), block, shape)
        return atom, tensor

    @cute.kernel
    def kernel(self, load: Many, operand: Many, store: Many, result: Many, args: Args, tiles: Problem) -> None:
        """The kernel, as the module's text describes it. ``load``, ``operand``: A's, then B's."""
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        place = self.place()
        smem = SmemAllocator().allocate(self.layout.shared_bytes, RING_ALIGNMENT)
        rings = self.rings(smem)
        first = block // self.config.cluster_m

        if warp == TMA_WARP:
            self.prefetch_descriptors(load, store)
        if warp == MMA_WARP:
            with cute.arch.elect_one():
                self.init_barriers(rings)
            cute.arch.alloc_tmem(
                self.layout.tmem_columns, rings.tmem_address, is_two_cta=self.group == 2, arch=self.arch
            )
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.group == 2)
        self.sync()
        sums = cute.arch.retrieve_tmem_ptr(self.sum_type, 16, rings.tmem_address)
        # The next kernel may take its place on the SMs; it waits in turn for this one to end before it touches memory.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        if warp == SCHEDULER_WARP:
            self.schedule(rings, place)
        elif warp == TMA_WARP:
            self.load(load, operand, smem, rings, place, args.k, tiles, first)
        elif warp == MMA_WARP:
            if place.peer == 0:
                self.multiply(smem, sums, rings, place, args.k)
        elif warp >= PROLOGUE_WARP:
            if cutlass.const_expr(len(self.fused) > 0):
                self.transform(smem, rings, place, args, tiles, first)
        else:
            self.drain(store, result, smem, sums, rings, place, args, tiles, first)

        self.sync()
        if warp == MMA_WARP:
            cute.arch.dealloc_tmem(sums, self.layout.tmem_columns, is_two_cta=self.group == 2, arch=self.arch)

    def prefetch_descriptors(self, *groups: Any) -> None:
        """Of all TMA atoms: they are parameters of the kernel, which no other launch writes."""
        for atom in (atom for group in groups for atom in group or ()):
            cpasync.prefetch_descriptor(atom)

    def place(self) -> Place:
        """This CTA's place in its cluster."""
        x, y, z = (cute.arch.make_warp_uniform(axis) for axis in cute.arch.block_in_cluster_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return Place(rank, x % self.group, x // self.group, y, z)

    def rings(self, smem: cute.Pointer) -> Rings:
        """The addresses in the first ``BARRIER_BYTES`` of shared memory."""
        barrier = cute.recast_ptr(smem, dtype=Int64)
        counts = 4 * [self.layout.stages] + 2 * [self.layout.acc_stages] + [1, 1] + 2 * [PART_SLOTS * EPILOGUE_WARPS]
        assert sum(counts) * 8 <= RESPONSE_OFFSET
        places: list[Any] = [barrier + sum(counts[:i]) for i in range(len(counts))]
        places += [smem + RESPONSE_OFFSET, cute.recast_ptr(smem + TMEM_ADDRESS_OFFSET, dtype=Int32)]
        return Rings(*places)

    def operands(self, smem: cute.Pointer) -> tuple[list[cute.Tensor], dict[int, cute.Tensor]]:
        """The rings behind the barriers: of every operand as the MMA reads it, and of those with a prologue as they come."""
        offset = BARRIER_BYTES
        rings, raw = [], {}
        for operand, (group, _) in enumerate(self.members):
            size = self.layout.a_bytes if group == "a" else self.layout.b_bytes
            rings.append(self.ring(smem + offset, self.operand_layout(operand), self.member(operand).mma_dtype))
            offset += align(self.layout.stages * size, RING_ALIGNMENT)
        for operand in self.fused:
            raw[operand] = self.ring(smem + offset, self.raw_layout(operand), self.member(operand).dtype)
            offset += align(self.layout.stages * self.layout.raw_bytes[operand], RING_ALIGNMENT)
        staging = self.layout.staging_slots * self.layout.staging_bytes
        assert offset + staging + self.layout.partial_bytes == self.layout.shared_bytes
        return rings, raw

    def ring(self, start: cute.Pointer, layout: cute.ComposedLayout, dtype: str) -> cute.Tensor:
        """Shared memory of a swizzled layout."""
        return cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=ELEMENTS[dtype]), layout.outer)

    def staging(self, smem: cute.Pointer) -> list[cute.Tensor]:
        """For each staged store, behind the operands: (32, epi_n, slots x warps)."""
        blocks, members = self.layout.staging_slots * EPILOGUE_WARPS, []
        offset = (
            self.layout.shared_bytes - self.layout.partial_bytes - self.layout.staging_slots * self.layout.staging_bytes
        )
        for i in self.staged:
            layout, dtype = self.staging_layout(i, blocks), self.program.stores[i].dtype
            members.append(self.ring(smem + offset, layout, dtype))
            offset += cute.cosize(layout.outer) * BITS[dtype] // 8
        assert offset == self.layout.shared_bytes - self.layout.partial_bytes
        return members

    def init_barriers(self, rings: Rings) -> None:
        """For one thread. The counts are those of the module's text."""
        config, group = self.config, self.group
        readers = self.pairs + config.cluster_n - 1  # pairs that read what this CTA loads
        for stage in range(self.layout.stages):
            cute.arch.mbarrier_init(rings.full + stage, 1)
            cute.arch.mbarrier_init(rings.empty + stage, readers)
            cute.arch.mbarrier_init(rings.raw + stage, 1)
            cute.arch.mbarrier_init(rings.made + stage, PROLOGUE_WARPS * group)
        for stage in range(self.layout.acc_stages):
            cute.arch.mbarrier_init(rings.sums_full + stage, 1)
            cute.arch.mbarrier_init(rings.sums_empty + stage, EPILOGUE_WARPS * group)
        cute.arch.mbarrier_init(rings.answered, 1)
        everywhere = EPILOGUE_WARPS + 2 + (PROLOGUE_WARPS if self.fused else 0)
        cute.arch.mbarrier_init(rings.taken, config.cluster * everywhere + config.cluster // group)
        for place in range(PART_SLOTS * EPILOGUE_WARPS):
            cute.arch.mbarrier_init(rings.part_full + place, 1)
            cute.arch.mbarrier_init(rings.part_empty + place, 1)
        cute.arch.mbarrier_init_fence()

    def sync(self) -> None:
        """All threads of the cluster: nobody's memory is used before it is ready, or after its CTA has left."""
        if self.config.cluster == 1:
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def ranks(self, stride: int, count: int) -> int:
        """A mask of ``count`` CTAs, ``stride`` ranks apart."""
        return sum(1 << stride * i for i in range(count))

    def steps(self, k: Int32) -> Int32:
        """Stages of one tile in one part of K. The parts are equal: what the last ones have too many reads zeros beyond K."""
        return cute.ceil_div(k, self.tile_k * self.config.split_k)

    @cute.jit
    def advance(self, stage: Int32, phase: Int32, count: cutlass.Constexpr) -> tuple[Int32, Int32]:
        """The next slot of a ring of ``count``."""
        stage = stage + 1
        if stage == count:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase

    @cute.jit
    def next_tile(self, rings: Rings, turn: Int32) -> tuple[Int32, Int32]:
        """For one warp: waits for the answer of this turn, hands its slot back. (tile, 1), or (undefined, 0) after the last."""
        cute.arch.mbarrier_wait(rings.answered, turn & 1)
        block, _, _, valid = cute.arch.clc_response(rings.response)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(rings.taken, 0 if self.config.cluster > 1 else None)
        return block // self.config.cluster_m, valid

    @cute.jit
    def schedule(self, rings: Rings, place: Place) -> None:
        """Warp 6: the first CTA asks for the whole cluster. An answer that was no is the last one: asking again is undefined."""
        turn, valid = Int32(0), Int32(1)
        while valid != 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(rings.answered, RESPONSE_BYTES)
            if place.rank == 0:
                cute.arch.mbarrier_wait(rings.taken, (turn & 1) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.issue_clc_query(rings.answered, rings.response, multicast=self.config.cluster > 1)
            _, valid = self.next_tile(rings, turn)
            turn = turn + 1

    def partition(self, load: Many, operand: Many, smem: cute.Pointer, place: Place) -> list[Load]:
        """What warp 5 copies for each operand."""
        loads = []
        rings, raw = self.operands(smem)
        for i, atom in enumerate(load):
            is_a = self.members[i][0] == "a"
            mma = self.reader(i)
            part, ranks = mma.get_slice(place.peer), self.cluster_layout(mma)
            own, mask = (place.n, self.a_sharers(place)) if is_a else (place.m, self.b_sharers(place))
            sharers = cute.make_layout(cute.slice_(ranks, (0, 0, None, 0) if is_a else (0, None, 0, 0)).shape)
            if i in raw:
                tiles = cute.local_tile(operand[i], (self.rows(i), self.tile_k), (None, None, None))
                modes, to = 2, raw[i]
            else:
                whole = cute.local_tile(operand[i], (self.tiler[0 if is_a else 1], self.tile_k), (None, None, None))
                tiles = part.partition_A(whole) if is_a else part.partition_B(whole)
                modes, to = 3, rings[i]
            to, source = cpasync.tma_partition(
                atom, own, sharers, cute.group_modes(to, 0, modes), cute.group_modes(tiles, 0, modes)
            )
            loads.append(
                Load(atom, source, to, mask if self.sharers(i) > 1 else None, is_a, self.member(i).batched, i in raw)
            )
        return loads

    def a_sharers(self, place: Place) -> Any:
        """The mask of the CTAs that need the same rows of A."""
        mask = self.ranks(self.config.cluster_m, self.config.cluster_n)
        return cutlass.Int16(Int32(mask) << (place.rank - self.config.cluster_m * place.n))

    def b_sharers(self, place: Place) -> Any:
        """The mask of the CTAs that need the same columns of B."""
        return cutlass.Int16(Int32(self.ranks(self.group, self.pairs)) << (place.rank - self.group * place.m))

    @cute.jit
    def load(
        self,
        load: Many,
        operand: Many,
        smem: cute.Pointer,
        rings: Rings,
        place: Place,
        k: Int32,
        tiles: Problem,
        tile: Int32,
    ) -> None:
        """Warp 5: every stage of every tile."""
        loads = self.partition(load, operand, smem, place)
        steps = self.steps(k)
        stage, phase, turn, valid = Int32(0), Int32(0), Int32(0), Int32(1)
        while valid != 0:
            m, n, batch = locate(tiles, tile)
            m, n = m * self.pairs + place.m, n * self.config.cluster_n + place.n
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(rings.empty + stage, phase ^ 1)
                if place.peer == 0:
                    self.expect(rings.full + stage, self.group * self.plain_bytes)
                self.expect(rings.raw + stage, sum(self.layout.raw_bytes))
                for one in cutlass.range_constexpr(len(loads)):
                    self.copy(loads[one], m, n, place, place.part * steps + step, batch, stage, rings)
                stage, phase = self.advance(stage, phase, self.layout.stages)
            tile, valid = self.next_tile(rings, turn)
            turn = turn + 1
        # Commits of the last MMAs arrive in this CTA's memory: it may not leave before.
        for _ in cutlass.range(self.layout.stages, unroll=1):
            cute.arch.mbarrier_wait(rings.empty + stage, phase ^ 1)
            stage, phase = self.advance(stage, phase, self.layout.stages)

    def expect(self, barrier: cute.Pointer, size: int) -> None:
        """Arrive at ``barrier`` and let it wait for ``size`` bytes. A ring through which nothing comes is not used."""
        if size:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)

    def copy(
        self, one: Load, m: Int32, n: Int32, place: Place, step: Int32, batch: Int32, stage: Int32, rings: Rings
    ) -> None:
        """One operand's part of one stage."""
        tile = m if one.is_a else n
        if one.raw:  # tiles of a CTA, not of a pair
            tile = tile * self.group + place.peer
        source = one.source[(None, tile, step, batch if one.batched else 0)]
        barrier = (rings.raw if one.raw else rings.full) + stage
        masks = {} if one.mask is None else {"mcast_mask": one.mask}
        cute.copy(one.atom, source, one.to[(None, stage)], tma_bar_ptr=barrier, **masks)

    @cute.jit
    def transform(
        self, smem: cute.Pointer, rings: Rings, place: Place, args: Args, tiles: Problem, tile: Int32
    ) -> None:
        """Warps 7 to 10: the prologues. A slot whose raw operands have come is free: warp 5 waited for that."""
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - PROLOGUE_WARP * 32
        made, raw = self.operands(smem)
        prologues = [Prologue(self.program, self.member(i), self.vector) for i in self.fused]
        steps = self.steps(args.k)
        stage, phase, turn, valid = Int32(0), Int32(0), Int32(0), Int32(1)
        while valid != 0:
            _, _, batch = locate(tiles, tile)
            scalars = [prologue.load(args, batch) for prologue in prologues]
            for step in cutlass.range(steps, unroll=1):
                k = (place.part * steps + step) * self.tile_k
                cute.arch.mbarrier_wait(rings.raw + stage, phase)
                for i in cutlass.range_constexpr(len(prologues)):
                    operand = self.fused[i]
                    vectors = self.rows(operand) * self.tile_k // self.vector
                    for first in cutlass.range_constexpr(0, vectors, PROLOGUE_WARPS * 32):
                        if cutlass.const_expr(first + PROLOGUE_WARPS * 32 <= vectors) or first + thread < vectors:
                            slots = made[operand][(None, None, None, stage)], raw[operand][(None, None, stage)]
                            self.make(prologues[i], scalars[i], *slots, operand, first + thread, args, batch, k)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    leader = place.rank - place.peer if self.group == 2 else None
                    cute.arch.mbarrier_arrive(rings.made + stage, leader, scope=MemScopeKind.CLUSTER)
                stage, phase = self.advance(stage, phase, self.layout.stages)
            tile, valid = self.next_tile(rings, turn)
            turn = turn + 1

    def make(
        self, prologue: Prologue, scalars: Any, made: cute.Tensor, raw: cute.Tensor, operand: int, index: Int32, args: Args,
        batch: Int32, k: Int32,
    ) -> None:  # fmt: skip
        """Vector ``index`` of a stage of an operand that begins at column ``k``: along the axis of unit stride; neighbours are side by side on the other one."""
        rows = self.rows(operand)
        if self.member(operand).major == "k":
            shape, at = (1, self.vector), (index % rows, index // rows)
            first, step = at[1] * self.vector, 1
        else:
            shape, at = (self.vector, 1), (index // self.tile_k, index % self.tile_k)
            first, step = at[1], 0
        # ((rows, K of an MMA), 1, MMAs), as the MMA reads it, as (rows, K)
        shapes, strides = made.layout.shape, made.layout.stride
        flat = cute.make_layout(
            (shapes[0][0], (shapes[0][1], shapes[2])), stride=(strides[0][0], (strides[0][1], strides[2]))
        )
        line = cute.make_layout(self.vector)
        source, to = (
            cute.local_tile(held, shape, at).iterator for held in (raw, cute.make_tensor(made.iterator, flat))
        )
        elements = cute.make_rmem_tensor(self.vector, raw.element_type)
        cute.autovec_copy(cute.make_tensor(source, line), elements)
        values = prologue.apply(args, elements.load(), batch, scalars)
        result = cute.make_rmem_tensor(self.vector, values.dtype)
        result.store(values)
        prologue.clear_beyond(result, k + first, step, args.k)
        cute.autovec_copy(result, cute.make_tensor(to, line))

    def commit(self, barrier: cute.Pointer, mask: Any) -> None:
        """Arrive at ``barrier`` of the CTAs in ``mask`` when the MMAs so far are complete."""
        with cute.arch.elect_one():
            if self.config.cluster == 1:
                tcgen05.commit(barrier)
            else:
                tcgen05.commit(barrier, mask, self.cta_group)

    @cute.jit
    def multiply(self, smem: cute.Pointer, sums: cute.Pointer, rings: Rings, place: Place, k: Int32) -> None:
        """Warp 4 of a pair's leader."""
        config, gemms = self.config, self.program.gemms
        operands, _ = self.operands(smem)
        count_a = len(self.program.a)
        fragments_a = [self.reader(i).make_fragment_A(operands[i]) for i in range(count_a)]
        fragments_b = [self.reader(i).make_fragment_B(operands[i]) for i in range(count_a, len(operands))]
        both = self.ranks(1, self.group)
        # The slot's owners: every CTA of the two rows of A and of the column of B that meet in this pair.
        rows = Int32(self.ranks(config.cluster_m, config.cluster_n) * both) << (place.rank - config.cluster_m * place.n)
        column = Int32(self.ranks(1, config.cluster_m)) << (place.rank - self.group * place.m)
        owners, pair = cutlass.Int16(rows | column), cutlass.Int16(Int32(both) << place.rank)
        steps = self.steps(k)
        stage, phase, which, turned = Int32(0), Int32(0), Int32(0), Int32(0)
        turn, valid = Int32(0), Int32(1)
        while valid != 0:
            cute.arch.mbarrier_wait(rings.sums_empty + which, turned ^ 1)
            cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
            for step in cutlass.range(steps, unroll=1):
                if cutlass.const_expr(self.plain_bytes > 0):
                    cute.arch.mbarrier_wait(rings.full + stage, phase)
                if cutlass.const_expr(len(self.fused) > 0):
                    cute.arch.mbarrier_wait(rings.made + stage, phase)
                for k_block in cutlass.range_constexpr(cute.size(fragments_a[0], mode=[2])):
                    for i in cutlass.range_constexpr(len(self.issues)):
                        one = self.issues[i]
                        gemm = gemms[one.gemm]
                        mma = self.tiled_mma(gemm, one.a, one.b)
                        mma.set(tcgen05.Field.ACCUMULATE, True if k_block else step > 0)
                        a = fragments_a[gemm.a][(None, one.block, k_block, stage)]
                        b = fragments_b[gemm.b][(None, 0, k_block, stage)]
                        to = self.sums(mma, sums, which, one)
                        cute.gemm(mma, to, a, b, to)
                self.commit(rings.empty + stage, owners)
                stage, phase = self.advance(stage, phase, self.layout.stages)
            self.commit(rings.sums_full + which, pair)
            which, turned = self.advance(which, turned, self.layout.acc_stages)
            _, valid = self.next_tile(rings, turn)
            turn = turn + 1

    def sums(self, mma: cute.TiledMma, start: cute.Pointer, which: Int32, one: Issue) -> cute.Tensor:
        """An accumulator in tensor memory as ``mma`` writes it."""
        whole = mma.make_fragment_C(mma.partition_shape_C(self.mma_tiler)).layout
        column = self.column(which, one.gemm) + one.block * self.config.tile_n
        return cute.make_tensor(start + column, cute.slice_(whole, (None, 0, 0)))

    def column(self, which: Int32, gemm: int) -> Int32:
        """The first column of a product's accumulators; those of its blocks lie side by side."""
        return (which * len(self.program.gemms) + gemm) * self.layout.blocks * self.config.tile_n

    @cute.jit
    def drain(
        self, store: Many, result: Many, smem: cute.Pointer, sums: cute.Pointer, rings: Rings, place: Place, args: Args,
        tiles: Problem, tile: Int32,
    ) -> None:  # fmt: skip
        """Warps 0 to 3: a thread has one row of each block of the accumulator."""
        config, layout = self.config, self.layout
        thread, _, _ = cute.arch.thread_idx()
        staging = self.staging(smem)
        in_block = config.tile_n // layout.epi_n
        subtiles = layout.blocks * in_block
        which, turned, count, turn, valid = Int32(0), Int32(0), Int32(0), Int32(0), Int32(1)
        while valid != 0:
            coming, more = self.next_tile(rings, turn)  # before the work, so that the question after it is asked early
            m, n, batch = locate(tiles, tile)
            first = (m * self.pairs + place.m) * layout.blocks  # blocks of the pairs before
            column = (n * config.cluster_n + place.n) * config.tile_n
            for subtile in cutlass.range(subtiles, unroll=1):
                block = subtile // in_block if cutlass.const_expr(layout.blocks > 1) else 0
                row = ((first + block) * self.group + place.peer) * layout.epi_m + thread
                col = column + (subtile - block * in_block) * layout.epi_n
                chunk = Chunk(row, col, batch, self.offsets, col_multiple=layout.epi_n)
                aux = self.epilogue.load(args, chunk) if self.config.split_k == 1 else None  # ahead of the accumulator
                if subtile == 0:
                    cute.arch.mbarrier_wait(rings.sums_full + which, turned)
                    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
                accs = self.read(sums, which, subtile, thread)
                cute.arch.fence_view_async_tmem_load()
                if subtile == subtiles - 1:
                    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(
                            rings.sums_empty + which, place.rank - place.peer if self.group == 2 else None
                        )
                if cutlass.const_expr(config.split_k > 1):
                    self.join(accs, smem, rings, place, count)
                    if place.part == 0:
                        self.finish(store, result, staging, accs, args, chunk, aux, count & 1)
                else:
                    self.finish(store, result, staging, accs, args, chunk, aux, count & 1)
                count = count + 1
            which, turned = self.advance(which, turned, layout.acc_stages)
            tile, valid, turn = coming, more, turn + 1
        cute.arch.cp_async_bulk_wait_group(0)

    def read(self, sums: cute.Pointer, which: Int32, subtile: Int32, thread: Int32) -> list[Any]:
        """Starts the loads of one subtile: for each product the register tensor that gets this thread's row."""
        columns = self.layout.epi_n
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(columns)), self.sum_type)
        values = []
        for g in range(len(self.program.gemms)):
            start = sums + self.column(which, g) + subtile * columns
            source = cute.make_tensor(start, cute.make_layout((self.layout.epi_m, columns), stride=(TMEM_ROW, 1)))
            fetch = tcgen05.make_tmem_copy(atom, source).get_slice(thread)
            part = fetch.partition_S(source)
            to = cute.make_rmem_tensor(fetch.partition_D(cute.make_identity_tensor(source.shape)).shape, self.sum_type)
            cute.copy(fetch, part, to)
            values.append(cute.make_tensor(to.iterator, cute.make_layout(columns)))
        return values

    @cute.jit
    def join(self, accs: list[Any], smem: cute.Pointer, rings: Rings, place: Place, count: Int32) -> None:
        """Adds to ``accs`` what the CTA with the next part of K has summed, and gives the sum to the one with the part before.

        The sums go along a chain of CTAs, from the last part of K to the first, subtile by subtile: in a fixed order, and with
        two slots in each CTA, however many parts there are.
        """
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        slot, phase = count % PART_SLOTS, (count // PART_SLOTS) & 1
        here, step = slot * EPILOGUE_WARPS + warp, self.config.cluster_m * self.config.cluster_n
        pieces = self.layout.epi_n // PIECE
        base = cute.recast_ptr(smem + (self.layout.shared_bytes - self.layout.partial_bytes), dtype=self.sum_type)
        slots = cute.make_layout((PIECE, WARP_ROWS, pieces, len(accs), PART_SLOTS * EPILOGUE_WARPS))
        parts = cute.make_tensor(base, slots)
        if place.part < self.config.split_k - 1:
            cute.arch.mbarrier_wait(rings.part_full + here, phase)
            cute.arch.fence_acq_rel_cluster()
            for g in cutlass.range_constexpr(len(accs)):
                for piece in cutlass.range_constexpr(pieces):
                    given = parts[(None, lane, piece, g, here)].load()
                    for i in cutlass.range_constexpr(PIECE):
                        accs[g][piece * PIECE + i] = given[i] + accs[g][piece * PIECE + i]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.part_empty + here, place.rank + step, scope=MemScopeKind.CLUSTER)
        if place.part > 0:
            cute.arch.mbarrier_wait(rings.part_empty + here, phase ^ 1)
            cute.arch.fence_acq_rel_cluster()
            remote = cute.make_tensor(cute.arch.map_dsmem_ptr(base, place.rank - step), slots)
            for g in cutlass.range_constexpr(len(accs)):
                for piece in cutlass.range_constexpr(pieces):
                    mine = cute.make_tensor(accs[g].iterator + piece * PIECE, cute.make_layout(PIECE))
                    cute.autovec_copy(mine, remote[(None, lane, piece, g, here)])
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.part_full + here, place.rank - step, scope=MemScopeKind.CLUSTER)

    def finish(
        self, store: Any, result: Any, staging: list[cute.Tensor], accs: list[cute.Tensor], args: Args, chunk: Chunk, aux: Any,
        slot: Int32,
    ) -> None:  # fmt: skip
        """One subtile from registers to memory."""
        values = self.epilogue.evaluate(args, [acc.load() for acc in accs], chunk, aux)
        for i in range(len(self.program.reductions)):
            self.epilogue.reduce(args, i, values, chunk, LANES)
        for i, mode in enumerate(self.layout.store_modes):
            if mode == "vector":
                self.epilogue.store_vector(args, i, values, chunk)
        if not self.staged:
            return
        lane = cute.arch.lane_idx()
        block = slot * EPILOGUE_WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cute.arch.cp_async_bulk_wait_group(self.layout.staging_slots - 1, read=True)
        cute.arch.sync_warp()
        for member, i in enumerate(self.staged):
            made = self.epilogue.converted(i, values)
            row = cute.make_rmem_tensor(self.layout.epi_n, made.dtype)
            row.store(made)
            cute.autovec_copy(row, staging[member][(lane, None, block)])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        shape = (WARP_ROWS, self.layout.epi_n)
        for member in range(len(self.staged)):
            blocks = cute.local_tile(result[member], shape, (None, None, None))
            source, to = cpasync.tma_partition(
                store[member],
                0,
                cute.make_layout(1),
                cute.group_modes(staging[member], 0, 2),
                cute.group_modes(blocks, 0, 2),
            )
            at = (None, chunk.row // WARP_ROWS, chunk.col // self.layout.epi_n, chunk.batch)
            cute.copy(store[member], source[(None, block)], to[at])
        cute.arch.cp_async_bulk_commit_group()

"""The layout of one kernel: rings, stages, shared memory, tensor memory, drains. The only place that does this arithmetic.

``plan_layout(program, config, facts)`` gives a ``KernelLayout``, or raises ``LayoutError`` with the reason. Host checks and kernels read
it, and a kernel asserts while it is traced that what it allocates has ``shared_bytes``. Imports no DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import TileConfig
from .facts import ArchFacts
from .ir import Program

__all__ = ["BITS", "KernelLayout", "LayoutError", "check_program", "plan_layout"]

BITS = {
    "float32": 32, "int32": 32, "bfloat16": 16, "float16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "uint8": 8, "boolean": 8,
}  # fmt: skip

RING_ALIGNMENT = 1024  # bytes; a 128-byte swizzle repeats every 1024 (PTX ISA, shared memory matrix layout)
BARRIER_BYTES = 1024  # mbarriers and tensor memory addresses, in front of the rings
MAX_STAGES = (
    32  # memory-bound kernels need the bytes in flight: 160 KiB of 8-bit weights an SM at 64x16 would be 16 stages
)
# Of M, N and K: positions are int32, and a cluster's last tiles reach past the end, by less than 8 of 256 elements each.
LARGEST_EXTENT = 2**31 - 4096
# Blocks of 64 x 8 elements, the smallest tile, in all batches: tiles, and the CTAs of clusters of 8, are counted in int32.
LARGEST_BLOCKS = 2**28 - 1
TMA_ALIGNMENT = 16  # bytes; CUDA driver API, cuTensorMapEncodeTiled: globalAddress, globalStrides


class LayoutError(ValueError):
    """The configuration can't hold the program: ``code`` is a decline code, ``subject`` the culprit."""

    def __init__(self, code: str, subject: str, expected: object, actual: object) -> None:
        super().__init__(f"{subject}: {actual}, expected {expected}")
        self.code, self.subject, self.expected, self.actual = code, subject, expected, actual

    def swapped(self) -> LayoutError:
        """The same of the program before it was swapped: A and B change places."""
        turned = {"A": "B", "B": "A"}
        operand = self.subject[:1] in turned and self.subject[1:].isdigit()
        subject = turned[self.subject[0]] + self.subject[1:] if operand else self.subject
        return LayoutError(self.code, subject, self.expected, self.actual)


@dataclass(frozen=True)
class KernelLayout:
    """Sizes are bytes unless a name says otherwise.

    stages         depth of the operand ring
    a_bytes        of one A operand in one stage of one CTA; b_bytes likewise
    stage_bytes    of all operands in one stage
    threads        of a CTA
    epi_m, epi_n   the part of the tile that is drained at a time
    store_modes    for each store "tma" (through shared memory) or "vector" (from registers)
    staging_bytes  of one staging slot, all stores together; staging_slots of them
    partial_bytes  of the accumulators that split-K leaves in shared memory; partials_in_ring: they lie over the operand ring
    shared_bytes   everything
    acc_stages     accumulators in tensor memory; tmem_columns allocated
    blocks         MMAs side by side along M, each with epi_m rows of a CTA
    raw_bytes      of each operand, A's and then B's, in one stage as it lies in memory; 0 for one without a prologue
    """

    stages: int
    a_bytes: int
    b_bytes: int
    stage_bytes: int
    threads: int
    epi_m: int
    epi_n: int
    store_modes: tuple[str, ...]
    staging_bytes: int
    staging_slots: int
    partial_bytes: int
    shared_bytes: int
    acc_stages: int = 1
    partials_in_ring: bool = False
    tmem_columns: int = 0
    blocks: int = 1
    raw_bytes: tuple[int, ...] = ()


def plan_layout(program: Program, config: TileConfig, facts: ArchFacts, *, checked: bool = False) -> KernelLayout:
    """The layout of ``program`` under ``config`` on ``facts``. The program is as the kernel sees it: already swapped where
    ``config.swap_ab`` says so. ``checked``: it has been planned on ``facts`` before, under whatever configuration.

    Raises LayoutError.
    """
    if not checked:
        check_program(program, facts)
    plan = {"wgmma": _plan_wgmma, "tcgen05": _plan_tcgen05}[facts.mma]
    return plan(program, config, facts)


def check_program(program: Program, facts: ArchFacts) -> None:
    """What no configuration can help. Raises LayoutError."""
    if facts.mma == "wgmma":
        _check_wgmma_program(program)
    else:
        _check_tcgen05_program(program, facts)


# PTX ISA, wgmma: one instruction is 64 rows x N columns x 32 bytes of K, issued by the four warps of a warpgroup.
_WGMMA_ROWS = 64
_WGMMA_K_BYTES = 32
_WARPGROUP = 128
_WGMMA_TYPES = ({"bfloat16"}, {"float16"}, {"fp8_e4m3", "fp8_e5m2"}, {"int8"})
# Registers of a consumer's and the producer's thread, by consumer warpgroups: all together at most 65536, each a multiple of 8.
WGMMA_REGISTERS = {1: (232, 40), 2: (232, 40), 3: (160, 32)}
_WGMMA_SPARE_REGISTERS = 40  # of a consumer's thread, for everything but accumulators
_HALF_SM_BYTES = 113 * 1024  # of 228 KiB, of which the system takes 1 for each CTA
WGMMA_MADE_SLOTS = 2  # of operands with a prologue: one is multiplied while the other is made
_STAGING_SLOT_BYTES = 8192  # of one warpgroup


def _plan_wgmma(program: Program, config: TileConfig, facts: ArchFacts) -> KernelLayout:
    _check_wgmma_tile(program, config, facts)
    warpgroups = wgmma_warpgroups(config)
    wgmma_promoted_columns(program, config)  # raises where the registers do not hold it

    outputs = [(BITS[store.dtype] // 8, store.major) for store in program.stores]
    aligned = [
        store.alignment % TMA_ALIGNMENT == 0 < store.alignment and store.major in ("n", "m") for store in program.stores
    ]
    epi_n = _wgmma_epi_n(
        config.tile_n, [size for (size, _), ok in zip(outputs, aligned, strict=True) if ok], bool(program.ops)
    )
    modes = tuple(
        "tma" if ok and (major == "m" or epi_n * size >= TMA_ALIGNMENT) else "vector"
        for (size, major), ok in zip(outputs, aligned, strict=True)
    )
    staging = [
        staged_bytes(_WGMMA_ROWS, epi_n, size) for (size, _), mode in zip(outputs, modes, strict=True) if mode == "tma"
    ]
    staging_slots = 2 if staging else 0
    # Split K: the whole tile's sums, in float32 or int32.
    partial_bytes = config.tile_m * config.tile_n * 4 * len(program.gemms) if config.split_k > 1 else 0

    a_bytes, b_bytes = config.tile_m * config.tile_k, config.tile_n * config.tile_k
    operands = [(m, a_bytes) for m in program.a] + [(m, b_bytes) for m in program.b]
    raw_bytes = tuple(size * BITS[m.dtype] // BITS[m.mma_dtype] if m.prologue else 0 for m, size in operands)
    rings = [raw or size for raw, (_, size) in zip(raw_bytes, operands, strict=True)]
    made_bytes = sum(WGMMA_MADE_SLOTS * align(size, RING_ALIGNMENT) for m, size in operands if m.prologue)
    stage_bytes = sum(rings)
    fixed = BARRIER_BYTES + warpgroups * staging_slots * sum(staging) + made_bytes
    padding = sum(RING_ALIGNMENT for size in rings if size % RING_ALIGNMENT)
    most = min((facts.shared_bytes - fixed - padding) // stage_bytes, MAX_STAGES)
    # The sums lie over the ring, where room is bytes in flight, but not where another CTA's multicast writes into it.
    alone = config.cluster_m * config.cluster_n == 1
    in_ring = alone and 0 < partial_bytes <= (config.stages or most) * stage_bytes
    if not in_ring:
        fixed += partial_bytes
        most = min((facts.shared_bytes - fixed - padding) // stage_bytes, MAX_STAGES)
    stages = _depth(config, most, fixed + padding + 2 * stage_bytes, facts)
    return KernelLayout(
        stages=stages,
        a_bytes=a_bytes,
        b_bytes=b_bytes,
        stage_bytes=stage_bytes,
        threads=(1 + warpgroups) * _WARPGROUP,
        epi_m=_WGMMA_ROWS,
        epi_n=epi_n,
        store_modes=modes,
        staging_bytes=warpgroups * sum(staging),
        staging_slots=staging_slots,
        partial_bytes=partial_bytes,
        shared_bytes=fixed + sum(align(stages * size, RING_ALIGNMENT) for size in rings),
        partials_in_ring=in_ring,
        raw_bytes=raw_bytes,
    )


def wgmma_warpgroups(config: TileConfig) -> int:
    """Consumer warpgroups of a CTA."""
    return 2 if config.schedule == "pingpong" else {64: 1, 128: 2, 192: 3, 256: 2}[config.tile_m]


def wgmma_promoted_columns(program: Program, config: TileConfig) -> int:
    """Columns of one wgmma: the tile's, or a part of them where partial sums need registers of their own.

    Raises LayoutError where the registers of a consumer's thread do not hold the accumulators.
    """
    warpgroups = wgmma_warpgroups(config)
    room = WGMMA_REGISTERS[warpgroups][0] - _WGMMA_SPARE_REGISTERS
    rows = config.tile_m // (1 if config.schedule == "pingpong" else warpgroups)
    sums = rows * config.tile_n * len(program.gemms) // _WARPGROUP
    _require(sums <= room, "knob.domain", "knob:tile_n", f"{room} registers of accumulators", sums)
    if not program.promote:
        return config.tile_n
    for parts in (1, 2, 4):
        columns = config.tile_n // parts
        if config.tile_n % parts == 0 and columns % 8 == 0 and sums + columns // 2 <= room:
            return columns
    raise LayoutError("knob.domain", "knob:tile_n", f"{room} registers of accumulators and partial sums", sums)


def wgmma_resident(program: Program, config: TileConfig, shared_bytes: int) -> int:
    """CTAs of this kernel that fit on one SM: 2 of small tiles with short rings, so that one begins while another one ends.

    They have 128 registers for each of their 256 threads.
    """
    sums = config.tile_m * config.tile_n * len(program.gemms) // _WARPGROUP
    if program.promote:
        sums += wgmma_promoted_columns(program, config) // 2
    small = wgmma_warpgroups(config) == 1 and sums <= 64 and shared_bytes <= _HALF_SM_BYTES
    return 2 if small else 1


def _depth(config: TileConfig, most: int, least_bytes: int, facts: ArchFacts) -> int:
    """Stages of the ring: the knob, or ``most``. ``least_bytes`` is what a kernel with two stages takes."""
    fits = f"two stages and all else in {facts.shared_bytes} bytes of shared memory"
    _require(most >= 2, "device.smem", "knob:stages", fits, f"{least_bytes} bytes")
    stages = config.stages or most
    _require(2 <= stages <= most, "device.smem", "knob:stages", {"at least": 2, "at most": most}, stages)
    return stages


def staged_bytes(rows: int, cols: int, size: int) -> int:
    """Shared memory of one store's staged subtile: whole swizzle patterns."""
    return align(rows * cols * size, RING_ALIGNMENT)


def _wgmma_epi_n(tile_n: int, sizes: list[int], ops: bool) -> int:
    """Columns that are drained at a time: as many as a staging slot holds; few where the epilogue computes, for its registers."""
    widths = [n for n in ((32, 16, 8) if ops or not sizes else (64, 32, 16, 8)) if tile_n % n == 0]
    fitting = [n for n in widths if sum(staged_bytes(_WGMMA_ROWS, n, size) for size in sizes) <= _STAGING_SLOT_BYTES]
    return (fitting or widths[-1:])[0]


def _check_wgmma_program(program: Program) -> None:
    for group, members in (("A", program.a), ("B", program.b)):
        for i, matrix in enumerate(members):
            subject = f"{group}{i}"
            plain = bool(matrix.prologue) or matrix.dtype == matrix.mma_dtype
            _require(plain, "op.pattern", subject, "a prologue", f"{matrix.dtype} multiplied as {matrix.mma_dtype}")
            _require(
                matrix.alignment % TMA_ALIGNMENT == 0 < matrix.alignment,
                "layout.alignment",
                subject,
                TMA_ALIGNMENT,
                matrix.alignment,
            )
            # PTX ISA, wgmma: only 16-bit operands have a transposed form.
            k_major = matrix.major == "k" or BITS[matrix.mma_dtype] == 16
            _require(k_major, "layout.order", subject, "K has stride 1", f"{matrix.mma_dtype} {matrix.major}-major")
    kinds = sorted({m.mma_dtype for m in (*program.a, *program.b)})
    _require(any(kind.issuperset(kinds) for kind in _WGMMA_TYPES), "dtype.mixed", "A, B", "one kind of wgmma", kinds)
    accumulate = "int32" if kinds == ["int8"] else "float32"
    _require(program.accumulate == accumulate, "dtype.compute", "matmul", accumulate, program.accumulate)
    promotable = not program.promote or (BITS[kinds[0]] == 8 and accumulate == "float32")
    _require(promotable, "op.pattern", "promote", "fp8 operands", kinds)
    for group, members in (("A", program.a), ("B", program.b)):
        for i, matrix in enumerate(members):
            alone = (
                "a tensor in memory, or compute data type fast_float_for_fp8: sums are promoted from what memory holds"
            )
            _require(
                not (matrix.prologue and program.promote), "op.pattern", f"{group}{i}", alone, "ops before the matmul"
            )


def _check_wgmma_tile(program: Program, config: TileConfig, facts: ArchFacts) -> None:
    _require(config.cta_group == 1, "knob.domain", "knob:cta_group", 1, config.cta_group)
    _require(
        config.schedule in ("cooperative", "pingpong"),
        "knob.domain",
        "knob:schedule",
        ["cooperative", "pingpong"],
        config.schedule,
    )
    heights = [64, 128, 192] if config.schedule == "pingpong" else [64, 128, 192, 256]
    _require(config.tile_m in heights, "knob.domain", "knob:tile_m", heights, config.tile_m)
    _require(
        config.tile_n in range(8, 257, 8),
        "knob.domain",
        "knob:tile_n",
        {"multiple_of": 8, "at most": 256},
        config.tile_n,
    )
    # PTX ISA, wgmma: N of integer operands is 8, 24 or a multiple of 16.
    s8 = program.accumulate == "int32" and config.tile_n not in (8, 24) and config.tile_n % 16 != 0
    _require(not s8, "knob.domain", "knob:tile_n", "8, 24 or a multiple of 16", config.tile_n)
    _require(config.tile_k in (32, 64, 128, 256), "knob.domain", "knob:tile_k", [32, 64, 128, 256], config.tile_k)
    for name in ("cluster_m", "cluster_n"):
        value = getattr(config, name)
        _require(value > 0 and value & (value - 1) == 0, "knob.domain", f"knob:{name}", "a power of two", value)
    _require(config.split_k > 0, "knob.domain", "knob:split_k", "at least 1", config.split_k)
    _require(
        config.cluster <= facts.max_cluster, "knob.domain", "cluster", {"at most": facts.max_cluster}, config.cluster
    )
    # A CTA loads its share of a tile that the cluster shares: whole swizzle patterns of 8 rows, or of 8 columns of K.
    columns = config.tile_k * 8 // BITS[program.a[0].mma_dtype]
    for name, rows, sharers, matrices in (
        ("tile_m", config.tile_m, config.cluster_n, program.a),
        ("tile_n", config.tile_n, config.cluster_m, program.b),
    ):
        _require(rows % (8 * sharers) == 0, "knob.domain", f"knob:{name}", {"multiple_of": 8 * sharers}, rows)
        shared = columns % (8 * sharers) == 0 or all(m.major == "k" for m in matrices)
        _require(shared, "knob.domain", "knob:tile_k", {"multiple_of": 8 * sharers}, columns)
    # Larger clusters are launched one for each tile: there is nothing to take turns at.
    alternating = config.schedule == "pingpong" and config.cluster > 2
    _require(not alternating, "knob.domain", "knob:schedule", "cooperative in clusters of more than 2", config.schedule)
    for group, rows in (("A", config.tile_m), ("B", config.tile_n)):
        for i, matrix in enumerate(program.a if group == "A" else program.b):
            if matrix.prologue:
                _require(
                    config.schedule == "cooperative", "knob.domain", "knob:schedule", "cooperative", config.schedule
                )
                extent = rows if matrix.major == "mn" else config.tile_k * 8 // BITS[matrix.mma_dtype]
                line = extent * BITS[matrix.dtype] // 8  # of a TMA box without swizzle
                _require(line % TMA_ALIGNMENT == 0, "knob.domain", f"{group}{i}", {"multiple_of": TMA_ALIGNMENT}, line)
    _require(config.split_k == 1 or config.schedule == "cooperative", "knob.domain", "knob:split_k", 1, config.split_k)


# The data types that one tcgen05.mma kind multiplies (PTX ISA, tcgen05.mma: .kind::f16, .kind::f8f6f4, .kind::i8).
_TCGEN05_KINDS = ({"bfloat16"}, {"float16"}, {"fp8_e4m3", "fp8_e5m2"}, {"int8"})
_TCGEN05_ROWS = 128  # tensor memory lanes, so rows of the accumulator in one CTA
_TCGEN05_BLOCKS = (1, 2)  # MMAs along M; with two, and 256 columns each, the sums of one tile fill tensor memory
_TCGEN05_SHARED_COLUMNS = 512  # a power of two up to this; more are one exclusive allocation of all that there are
_DESCRIPTOR_REACH = 256 * 1024  # PTX ISA, tcgen05 matrix descriptor: 14 bits of the start address, in units of 16 bytes
_TCGEN05_STAGES = 16  # so many barriers fit in front of the rings
_RESERVED_BYTES = 1024  # the system's shared memory in front of the kernel's


def _plan_tcgen05(program: Program, config: TileConfig, facts: ArchFacts) -> KernelLayout:
    _check_tcgen05_tile(program, config, facts)
    epi_n = 32 if config.tile_n % 32 == 0 else 16
    blocks = config.tile_m // (_TCGEN05_ROWS * config.cta_group)
    columns, limit = blocks * len(program.gemms) * config.tile_n, facts.tmem_columns
    _require(columns <= limit, "knob.domain", "knob:tile_n", f"{limit} columns of tensor memory", columns)
    acc_stages = 2 if 2 * columns <= limit else 1
    allocated = max(32, 1 << (acc_stages * columns - 1).bit_length())

    modes = tuple(_tcgen05_store_mode(store.major, store.alignment) for store in program.stores)
    staged = [BITS[s.dtype] // 8 for s, mode in zip(program.stores, modes, strict=True) if mode == "tma"]
    staging_bytes, staging_slots = _TCGEN05_ROWS * epi_n * sum(staged), 2 if staged else 0
    partial_bytes = 0
    if config.split_k > 1:  # one subtile of sums from the CTA with the next part of K, twice
        partial_bytes = 2 * len(program.gemms) * _TCGEN05_ROWS * epi_n * 4

    a_bytes, b_bytes = blocks * _TCGEN05_ROWS * config.tile_k, config.tile_n // config.cta_group * config.tile_k
    operands = [(m, a_bytes) for m in program.a] + [(m, b_bytes) for m in program.b]
    raw_bytes = tuple(size * BITS[m.dtype] // BITS[m.mma_dtype] if m.prologue else 0 for m, size in operands)
    rings = [*(size for _, size in operands), *raw_bytes]
    stage_bytes = sum(rings)
    fixed = BARRIER_BYTES + staging_slots * staging_bytes + partial_bytes
    padding = sum(RING_ALIGNMENT for size in rings if size % RING_ALIGNMENT)
    room = min(facts.shared_bytes - fixed, _DESCRIPTOR_REACH - _RESERVED_BYTES - BARRIER_BYTES) - padding
    most = min(room // stage_bytes, _TCGEN05_STAGES)
    stages = _depth(config, most, fixed + padding + 2 * stage_bytes, facts)
    rings_bytes = sum(align(stages * size, RING_ALIGNMENT) for size in rings)
    return KernelLayout(
        stages=stages,
        a_bytes=a_bytes,
        b_bytes=b_bytes,
        stage_bytes=stage_bytes,
        threads=(11 if any(raw_bytes) else 7) * 32,
        epi_m=_TCGEN05_ROWS,
        epi_n=epi_n,
        store_modes=modes,
        staging_bytes=staging_bytes,
        staging_slots=staging_slots,
        partial_bytes=partial_bytes,
        shared_bytes=fixed + rings_bytes,
        acc_stages=acc_stages,
        tmem_columns=allocated if allocated <= _TCGEN05_SHARED_COLUMNS else facts.tmem_columns,
        blocks=blocks,
        raw_bytes=raw_bytes,
    )


def _tcgen05_store_mode(major: str, alignment: int) -> str:
    """A thread owns a row: rows of 16-byte pieces go through shared memory, columns are stored by the lanes side by side."""
    return "tma" if major == "n" and alignment % TMA_ALIGNMENT == 0 and alignment else "vector"


def _check_tcgen05_program(program: Program, facts: ArchFacts) -> None:
    for group, members in (("A", program.a), ("B", program.b)):
        for i, matrix in enumerate(members):
            subject = f"{group}{i}"
            same = matrix.dtype == matrix.mma_dtype
            _require(same or bool(matrix.prologue), "op.pattern", subject, "a prologue that converts", matrix.dtype)
            narrow = BITS[matrix.dtype] <= BITS[matrix.mma_dtype]
            _require(narrow, "dtype.unsupported", subject, f"no wider than {matrix.mma_dtype}", matrix.dtype)
            aligned = matrix.alignment % TMA_ALIGNMENT == 0 < matrix.alignment
            _require(aligned, "layout.alignment", subject, TMA_ALIGNMENT, matrix.alignment)
            int8 = matrix.mma_dtype == "int8"
            _require(
                not int8 or facts.int8, "dtype.unsupported", subject, f"no int8 on {facts.target}", matrix.mma_dtype
            )
    kinds = sorted({m.mma_dtype for m in (*program.a, *program.b)})
    _require(any(kind.issuperset(kinds) for kind in _TCGEN05_KINDS), "dtype.mixed", "A, B", "one kind of MMA", kinds)
    accumulate = "int32" if kinds == ["int8"] else "float32"
    _require(program.accumulate == accumulate, "dtype.compute", "matmul", accumulate, program.accumulate)


def _check_tcgen05_tile(program: Program, config: TileConfig, facts: ArchFacts) -> None:
    group = config.cta_group
    _require(facts.launch_control, "device.sm_variant", "device", "cluster launch control", facts.target)
    _require(group in (1, 2), "knob.domain", "knob:cta_group", [1, 2], group)
    heights = [_TCGEN05_ROWS * group * blocks for blocks in _TCGEN05_BLOCKS]
    _require(config.tile_m in heights, "knob.domain", "knob:tile_m", heights, config.tile_m)
    made = config.tile_m > heights[0] and any(m.prologue for m in program.a)
    _require(not made, "knob.domain", "knob:tile_m", f"{heights[0]} where A has ops before the matmul", config.tile_m)
    # PTX ISA, tcgen05.mma: N is a multiple of 16 for M = 128 (of 32 for a pair whose 8-bit B is transposed, since each holds half).
    narrow = any(m.major == "mn" and 8 in (BITS[m.dtype], BITS[m.mma_dtype]) for m in program.b)
    step = 32 if narrow and group == 2 else 16
    _require(
        step <= config.tile_n <= 256 and config.tile_n % step == 0,
        "knob.domain", "knob:tile_n", {"multiple_of": step, "at most": 256}, config.tile_n,
    )  # fmt: skip
    # The DSL has no layout of other halves: it ends the process (4.8.1).
    halved = group == 1 or config.tile_n == 16 or config.tile_n % 32 == 0
    _require(halved, "knob.domain", "knob:tile_n", "16 or a multiple of 32 in a pair", config.tile_n)
    _require(config.tile_k in (64, 128, 256), "knob.domain", "knob:tile_k", [64, 128, 256], config.tile_k)
    for name in ("cluster_m", "cluster_n", "split_k"):
        value = getattr(config, name)
        _require(value > 0 and value & (value - 1) == 0, "knob.domain", f"knob:{name}", "a power of two", value)
    _require(config.cluster_m % group == 0, "knob.domain", "knob:cluster_m", {"multiple_of": group}, config.cluster_m)
    # A CTA loads its share of a tile that others need too: whole swizzle patterns of 8 rows.
    shares = (
        ("tile_m", config.tile_m // group, config.cluster_n),
        ("tile_n", config.tile_n // group, config.cluster_m // group),
    )
    for name, rows, sharers in shares:
        _require(rows % (8 * sharers) == 0, "knob.domain", f"knob:{name}", {"multiple_of": 8 * sharers}, rows)
    _require(
        config.cluster <= facts.max_cluster, "knob.domain", "cluster", {"at most": facts.max_cluster}, config.cluster
    )


def align(value: int, step: int) -> int:
    """``value`` rounded up to a multiple of ``step``."""
    return -(-value // step) * step


def _require(holds: bool, code: str, subject: str, expected: object, actual: object) -> None:
    if not holds:
        raise LayoutError(code, subject, expected, actual)

"""Hardware facts that the kernels are planned with: one row for each architecture, completed by the device at hand.

An architecture without a row is an error, never another one's facts. Sources: CUDA C++ Programming Guide, "Compute Capabilities"; PTX ISA,
tcgen05 and wgmma; the DSL's shared memory table for sm_107.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudnn_core import DeviceInfo

__all__ = ["ArchFacts", "arch_facts"]

KIB = 1024


@dataclass(frozen=True)
class ArchFacts:
    """What a kernel may use.

    target        the compiler's name of the architecture, such as "sm_90a"
    mma           "wgmma" or "tcgen05"
    shared_bytes  shared memory of one CTA
    sm_count      SMs that a persistent grid fills
    tmem_columns  of tensor memory, 0 without it
    fp8_k_bytes   K extent of one fp8 MMA in bytes (64 on sm_107)
    fp8_sum_bits  that an fp8 MMA keeps of a sum behind its leading one, 0: as many as float32
    a_collector   the MMA can keep A for the next instruction; b_collector: and B
    launch_control  clusters can take over the next tile's launch (cluster launch control)
    int8          the matrix unit multiplies int8
    max_cluster   CTAs of a cluster: of the architecture's, those that the SMs hold
    """

    target: str
    mma: str
    shared_bytes: int
    sm_count: int
    tmem_columns: int = 0
    fp8_k_bytes: int = 32
    fp8_sum_bits: int = 0
    a_collector: bool = False
    b_collector: bool = False
    launch_control: bool = False
    int8: bool = True
    max_cluster: int = 8


@dataclass(frozen=True)
class _Row:
    mma: str
    shared_bytes: int
    tmem_columns: int = 0
    fp8_k_bytes: int = 32
    fp8_sum_bits: int = 0
    a_collector: bool = False
    b_collector: bool = False
    launch_control: bool = False
    int8: bool = True
    max_cluster: int = 8


# sm: the row. int8: PTX ISA, tcgen05.mma .kind::i8 is for sm_100a and sm_110a alone. fp8_sum_bits: measured on an H200; wgmma aligns
# its 32 products and the accumulator to the largest exponent among them.
_ROWS = {
    90: _Row("wgmma", 227 * KIB, fp8_sum_bits=13),
    100: _Row("tcgen05", 227 * KIB, 512, a_collector=True, launch_control=True, max_cluster=16),
    103: _Row("tcgen05", 227 * KIB, 512, a_collector=True, launch_control=True, int8=False, max_cluster=16),
    107: _Row(
        "tcgen05",
        227 * KIB,
        576,
        fp8_k_bytes=64,
        a_collector=True,
        b_collector=True,
        launch_control=True,
        int8=False,
        max_cluster=16,
    ),
}


def arch_facts(device: DeviceInfo) -> ArchFacts | None:
    """The facts of a device, or None for an architecture without kernels.

    Shared memory is what the device reports: the opt-in size, and the oversized one only on a part that reports it.
    """
    row = _ROWS.get(device.sm_version)
    if row is None:
        return None
    shared = max(
        device.shared_memory_per_block_optin or row.shared_bytes, device.oversized_shared_memory_per_block or 0
    )
    sms = device.sm_count or 1
    return ArchFacts(
        target=f"sm_{device.sm_version}a",
        mma=row.mma,
        shared_bytes=shared,
        sm_count=sms,
        tmem_columns=row.tmem_columns,
        fp8_k_bytes=row.fp8_k_bytes,
        fp8_sum_bits=row.fp8_sum_bits,
        a_collector=row.a_collector,
        b_collector=row.b_collector,
        launch_control=row.launch_control,
        int8=row.int8,
        max_cluster=min(row.max_cluster, sms),
    )

"""Published facts of GPUs, for planning without one and for the peak rates that no driver reports.

Data only; every field names its source, and what the vendor has not published is None. Imported by ``_device``.

Peaks are dense (no sparsity), with float32 accumulation, in operations a second. ``float32`` and ``float64`` are the
rates of those types themselves (TF32 is not a data type of the vocabulary). Memory is the marketed size in units of 10^9
bytes, a lower bound of what the driver reports. Shared memory per block is the opt-in maximum of the capability.

Sources:
  [PG]     CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", maximum shared memory per block
  [A100]   NVIDIA A100 Tensor Core GPU Architecture whitepaper, table 4
  [A100D]  NVIDIA A100 datasheet, 80 GB SXM
  [H100]   NVIDIA H100 Tensor Core GPU Architecture whitepaper, tables 2 and 3, SXM5
  [H200D]  NVIDIA H200 datasheet, SXM
  [H200]   read from the device: `NVIDIA H200`, driver 580.159
  [L40SD]  NVIDIA L40S datasheet
  [BTG]    NVIDIA Blackwell Tuning Guide (B200: L2 126 MB, 227 KB of shared memory a block)
  [BD]     NVIDIA Blackwell datasheet, per GPU, dense: HGX B200, GB200 NVL72
  [BUD]    NVIDIA HGX B300 and GB300 NVL72 specification tables, divided by the number of GPUs, dense
  [BUB]    NVIDIA developer blog, "Inside NVIDIA Blackwell Ultra" (2025)
  [FE]     nvidia-cudnn-frontend 1.32.0, device counts that its tuning notes record (B200, B300, GB200, cc 10.7)
  [DSL]    nvidia-cutlass-dsl 4.8.1 and cudnn-frontend 1.32.0: 334848 bytes for sm_107 (oversized, CUDA 13.4 and later)
  [RX]     NVIDIA RTX Blackwell GPU Architecture whitepaper, GeForce RTX 5090
  [RP]     NVIDIA RTX PRO 6000 Blackwell Workstation Edition datasheet
  [RU]     NVIDIA Rubin announcement (CES 2026), preliminary
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["PRESETS", "REPRESENTATIVE", "SHARED_MEMORY_OPTIN", "Preset"]

KIB = 1024
MIB = 1024 * KIB
GB = 10**9
TERA = 1e12

# Bytes of shared memory that one block can opt in to, by compute capability. [PG]; 10.7: the standard carveout, [DSL]
SHARED_MEMORY_OPTIN: Mapping[tuple[int, int], int] = {
    (7, 0): 96 * KIB,
    (7, 5): 64 * KIB,
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 7): 163 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (10, 1): 227 * KIB,
    (10, 3): 227 * KIB,
    (10, 7): 227 * KIB,
    (11, 0): 227 * KIB,
    (12, 0): 99 * KIB,
    (12, 1): 99 * KIB,
}


class Preset(NamedTuple):
    """One GPU. ``device_name`` is what its driver reports; ``peak_flops`` has a key for every published rate."""

    device_name: str
    compute_capability: tuple[int, int]
    sm_count: int
    l2_cache_bytes: int | None
    memory_bytes: int | None
    memory_bandwidth: float | None
    peak_flops: Mapping[str, float]
    oversized_shared_memory_per_block: int = 0


_HOPPER = {  # [H100] table 2, H100 SXM5; the H200 datasheet gives the same rates, rounded
    "float64": 66.9 * TERA,
    "float32": 66.9 * TERA,
    "float16": 989.4 * TERA,
    "bfloat16": 989.4 * TERA,
    "fp8_e4m3": 1978.9 * TERA,
    "fp8_e5m2": 1978.9 * TERA,
    "int8": 1978.9 * TERA,
}

PRESETS: Mapping[str, Preset] = {
    "A100": Preset(
        device_name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),  # [A100]
        sm_count=108,  # [A100]
        l2_cache_bytes=40 * MIB,  # [A100]
        memory_bytes=80 * GB,  # [A100D]
        memory_bandwidth=2.039 * TERA,  # [A100D]
        peak_flops={  # [A100]
            "float64": 19.5 * TERA,
            "float32": 19.5 * TERA,
            "float16": 312 * TERA,
            "bfloat16": 312 * TERA,
            "int8": 624 * TERA,
            "int4": 1248 * TERA,
        },
    ),
    "L40S": Preset(
        device_name="NVIDIA L40S",
        compute_capability=(8, 9),  # [PG]
        sm_count=142,  # [L40SD]: 18176 CUDA cores, 128 an SM
        l2_cache_bytes=None,  # not in the datasheet
        memory_bytes=48 * GB,  # [L40SD]
        memory_bandwidth=0.864 * TERA,  # [L40SD]
        peak_flops={  # [L40SD]
            "float32": 91.6 * TERA,
            "float16": 362.05 * TERA,
            "bfloat16": 362.05 * TERA,
            "fp8_e4m3": 733 * TERA,
            "fp8_e5m2": 733 * TERA,
            "int8": 733 * TERA,
        },
    ),
    "H100": Preset(
        device_name="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),  # [H100]
        sm_count=132,  # [H100]
        l2_cache_bytes=50 * MIB,  # [H100]
        memory_bytes=80 * GB,  # [H100]
        memory_bandwidth=3.35 * TERA,  # [H100] table 3
        peak_flops=_HOPPER,
    ),
    "H200": Preset(
        device_name="NVIDIA H200",
        compute_capability=(9, 0),  # [H200]
        sm_count=132,  # [H200]
        l2_cache_bytes=60 * MIB,  # [H200]
        memory_bytes=141 * GB,  # [H200D]
        memory_bandwidth=4.8 * TERA,  # [H200D]
        peak_flops=_HOPPER,
    ),
    "B200": Preset(
        device_name="NVIDIA B200",
        compute_capability=(10, 0),  # [BTG]
        sm_count=148,  # [FE]
        l2_cache_bytes=126 * MIB,  # [BTG]
        memory_bytes=180 * GB,  # [BD] HGX B200
        memory_bandwidth=7.7 * TERA,  # [BD] HGX B200
        peak_flops={  # [BD] HGX B200, 1000 W
            "float64": 37 * TERA,
            "float32": 75 * TERA,
            "float16": 2250 * TERA,
            "bfloat16": 2250 * TERA,
            "fp8_e4m3": 4500 * TERA,
            "fp8_e5m2": 4500 * TERA,
            "int8": 4500 * TERA,
            "fp4_e2m1": 9000 * TERA,
        },
    ),
    "GB200": Preset(
        device_name="NVIDIA GB200",
        compute_capability=(10, 0),  # [FE]
        sm_count=152,  # [FE]
        l2_cache_bytes=None,  # [BTG] gives the B200's only
        memory_bytes=186 * GB,  # [BD] GB200 NVL72: 13.4 TB of 72
        memory_bandwidth=8.0 * TERA,  # [BD] GB200 NVL72: 576 TB/s of 72
        peak_flops={  # [BD] GB200 NVL72, of 72
            "float64": 40 * TERA,
            "float32": 80 * TERA,
            "float16": 2500 * TERA,
            "bfloat16": 2500 * TERA,
            "fp8_e4m3": 5000 * TERA,
            "fp8_e5m2": 5000 * TERA,
            "int8": 5000 * TERA,
            "fp4_e2m1": 10000 * TERA,
        },
    ),
    "B300": Preset(
        device_name="NVIDIA B300 SXM6 AC",
        compute_capability=(10, 3),  # [FE]
        sm_count=148,  # [FE]; the 160 of [BUB] are the full chip's
        l2_cache_bytes=None,  # unpublished
        memory_bytes=288 * GB,  # [BUB]
        memory_bandwidth=8.0 * TERA,  # [BUB]
        peak_flops={  # [BUD] HGX B300, of 8: 36 and 72 PFLOPS with sparsity, 108 PFLOPS of FP4 without
            "float64": 1.25 * TERA,
            "float32": 75 * TERA,
            "float16": 2250 * TERA,
            "bfloat16": 2250 * TERA,
            "fp8_e4m3": 4500 * TERA,
            "fp8_e5m2": 4500 * TERA,
            "fp4_e2m1": 13500 * TERA,
        },
    ),
    "GB300": Preset(
        device_name="NVIDIA GB300",
        compute_capability=(10, 3),  # [FE]
        sm_count=152,  # unpublished: taken from the GB200 [FE], the same package and power class
        l2_cache_bytes=None,  # unpublished
        memory_bytes=288 * GB,  # [BUB]
        memory_bandwidth=8.0 * TERA,  # [BUB]
        peak_flops={  # [BUD] GB300 NVL72, of 72: 360 and 720 PFLOPS with sparsity; FP4 dense [BUB]
            "float16": 2500 * TERA,
            "bfloat16": 2500 * TERA,
            "fp8_e4m3": 5000 * TERA,
            "fp8_e5m2": 5000 * TERA,
            "fp4_e2m1": 15000 * TERA,
        },
    ),
    "R200": Preset(
        device_name="NVIDIA R200",  # provisional: no driver has published it
        compute_capability=(10, 7),  # [DSL]
        sm_count=216,  # [FE], what the part at hand reported; 224 were announced for the full chip
        l2_cache_bytes=None,  # unpublished
        memory_bytes=288 * GB,  # [RU]
        memory_bandwidth=22.0 * TERA,  # [RU]
        peak_flops={},  # dense rates per data type are unpublished
        oversized_shared_memory_per_block=327 * KIB,  # [DSL]; what a driver of 13.4 or later reports
    ),
    "RTX5090": Preset(
        device_name="NVIDIA GeForce RTX 5090",
        compute_capability=(12, 0),  # [RX]
        sm_count=170,  # [RX]
        l2_cache_bytes=96 * MIB,  # [RX]
        memory_bytes=32 * GB,  # [RX]
        memory_bandwidth=1.792 * TERA,  # [RX]
        peak_flops={  # [RX], float32 accumulation
            "float32": 104.8 * TERA,
            "float16": 209.5 * TERA,
            "bfloat16": 209.5 * TERA,
            "fp8_e4m3": 419 * TERA,
            "fp8_e5m2": 419 * TERA,
            "int8": 838 * TERA,
            "fp4_e2m1": 1676 * TERA,
        },
    ),
    "RTX_PRO_6000": Preset(
        device_name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        compute_capability=(12, 0),  # [PG]
        sm_count=188,  # [RP]: 24064 CUDA cores, 128 an SM
        l2_cache_bytes=128 * MIB,  # [RX]: the full GB202's 131072 KB
        memory_bytes=96 * GB,  # [RP]
        memory_bandwidth=1.792 * TERA,  # [RP]
        peak_flops={  # [RP]: 4000 "AI TOPS" are FP4 with sparsity; the other rates are not in the datasheet
            "float32": 125 * TERA,
            "fp4_e2m1": 2000 * TERA,
        },
    ),
}

# The preset that stands for a bare `sm_version` when no device of that version is at hand.
REPRESENTATIVE: Mapping[tuple[int, int], str] = {
    (8, 0): "A100",
    (8, 9): "L40S",
    (9, 0): "H100",
    (10, 0): "B200",
    (10, 3): "B300",
    (10, 7): "R200",
    (12, 0): "RTX5090",
}

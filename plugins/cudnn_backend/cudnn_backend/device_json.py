"""A DeviceInfo as the device description that cuDNN plans for. Imported by ``plan``.

cuDNN wants more facts than a DeviceInfo has. For a GPU that is here they are read from it; for one that is only described they
follow from the compute capability, and clocks, bus width and PCI address are neutral values, which only heuristics read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudnn_core import DeviceInfo

    from .library import Library

__all__ = ["described", "device_properties"]

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": threads and blocks resident on an SM.
_RESIDENT = {
    (7, 0): (2048, 32),
    (7, 5): (1024, 16),
    (8, 0): (2048, 32),
    (8, 6): (1536, 16),
    (8, 7): (1536, 16),
    (8, 9): (1536, 24),
    (9, 0): (2048, 32),
    (11, 0): (1536, 24),
    (12, 0): (1536, 24),
    (12, 1): (1536, 24),
}
_BUS_BITS = 6144
_CLOCK_KHZ = 1_980_000
_MEMORY_CLOCK_KHZ = 3_200_000


def described(device: DeviceInfo) -> dict[str, Any]:
    """The union of the fields that the cuDNN versions from 9.13 on ask for; they take fields that they don't know."""
    major, minor = device.compute_capability
    threads, blocks = _RESIDENT.get((major, minor), (2048, 32))
    bandwidth = device.memory_bandwidth
    # bytes a second = 2 transfers a clock * bits / 8
    memory_clock = _MEMORY_CLOCK_KHZ if bandwidth is None else round(bandwidth * 8 / (2 * _BUS_BITS) / 1000)
    return {
        "deviceName": device.device_name or f"sm_{device.sm_version}",
        "cudaDeviceId": device.ordinal or 0,
        "deviceVer": 100 * major + 10 * minor,
        "driverVer": 13000,
        "multiProcessorCount": device.sm_count,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "l2CacheSize": device.l2_cache_bytes or 50 << 20,
        "maxBlockSize": [1024, 1024, 64],
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "maxCtasPerSM": blocks,
        "maxRegistersPerSM": 65536,
        "maxSharedMemoryPerBlock": 48 << 10,
        "maxSharedMemoryPerBlockOptin": device.shared_memory_per_block_optin,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": threads,
        "memClockRateKHz": memory_clock,
        "memoryBusWidth": _BUS_BITS,
        "oversizedSharedMemoryPerBlock": device.oversized_shared_memory_per_block,
        "regsPerBlock": 65536,
        "reservedSharedMemoryPerBlock": 1024 if major >= 8 else 0,
        "smClockRateKHz": _CLOCK_KHZ,
        "supportCoopLaunch": 1,
        "totalGlobalMem": device.memory_bytes or 80 * 10**9,
        "warpSize": 32,
    }


_made: dict[tuple[Any, ...], Any] = {}


def device_properties(library: Library, device: DeviceInfo) -> Any:
    """The binding's description of ``device``: made once per device, immutable. Raises what the binding raises."""
    key = (id(library.module), device.key(), device.ordinal, device.synthetic, device.device_name)
    found = _made.get(key)
    if found is None:
        if len(_made) >= 64:
            _made.clear()
        found = _made[key] = _make(library, device)
    return found


def _make(library: Library, device: DeviceInfo) -> Any:
    create = library.module.create_device_properties
    if device.synthetic or device.ordinal is None:
        return create(json.dumps(described(device)))
    live = create(device.ordinal)
    facts = json.loads(live.serialize())
    if facts.get("multiProcessorCount") == device.sm_count:
        return live
    return create(
        json.dumps({**facts, "multiProcessorCount": device.sm_count})
    )  # the caller plans for a part of the SMs

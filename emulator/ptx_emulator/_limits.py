"""Device limits and the CUDA device attributes that host code asks for, from what a caller names.

Contract: `device_limits` takes None, `Limits`, a mapping, an arch name ("sm_100a", "90a") or a DeviceInfo-like object
(`cudnn_core.DeviceInfo`) and returns `Limits` for a PTX target; `device_attributes` the pairs (cudaDeviceAttr, value)
that the host runtime answers with. Imported by `_launch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._findings import EmulationError, Limits

__all__ = ["capability", "device_attributes", "device_limits"]

_SM_COUNT = 148


def capability(target: str) -> tuple[int, int]:
    """(10, 0) of "sm_100a"."""
    digits = "".join(c for c in target.removeprefix("sm_") if c.isdigit())
    if len(digits) < 2:
        raise EmulationError(f"not an architecture: {target!r}")
    return int(digits[:-1]), int(digits[-1])


def device_limits(target: str, given: Any) -> Limits:
    """The limits of `target`, or those that `given` has."""
    if given is None or isinstance(given, Mapping):
        return Limits.of(target, given)
    if isinstance(given, Limits):
        return given
    if isinstance(given, str):
        if capability(given) != capability(target):
            raise EmulationError(f"the kernel is compiled for {target}, the device is {given}")
        return Limits.of(given)
    optin = getattr(given, "shared_memory_per_block_optin", None)
    found = getattr(given, "compute_capability", None)
    if not isinstance(optin, int) or found is None:
        raise EmulationError(
            f"limits must be Limits, a mapping, an arch name or a DeviceInfo, not {type(given).__name__}"
        )
    major, minor = found
    if major != capability(target)[0]:
        raise EmulationError(f"the kernel is compiled for {target}, the device is {major}.{minor}")
    oversized = getattr(given, "oversized_shared_memory_per_block", 0) or 0
    return Limits.of(target, {"shared_per_block": max(optin, oversized)})


def device_attributes(target: str, limits: Limits, given: Any) -> list[tuple[int, int]]:
    """cudaDeviceAttr values: CUDA Runtime API, "Data types used by CUDA Runtime"."""
    major, minor = capability(target)
    return [
        (1, limits.threads_per_block),  # MaxThreadsPerBlock
        (2, 1024), (3, 1024), (4, 64),  # MaxBlockDim
        (5, limits.grid_x), (6, limits.grid_yz), (7, limits.grid_yz),  # MaxGridDim
        (8, limits.static_shared),  # MaxSharedMemoryPerBlock
        (10, 32),  # WarpSize
        (12, limits.registers_per_block),
        (16, int(getattr(given, "sm_count", 0) or _SM_COUNT)),  # MultiProcessorCount
        (39, 2048),  # MaxThreadsPerMultiProcessor
        (75, major), (76, minor),  # ComputeCapability
        (81, limits.shared_per_block + 1024),  # MaxSharedMemoryPerMultiprocessor
        (82, 65536),  # MaxRegistersPerMultiprocessor
        (95, 1),  # CooperativeLaunch
        (97, limits.shared_per_block),  # MaxSharedMemoryPerBlockOptin
        (106, 32),  # MaxBlocksPerMultiprocessor
        (111, 1024),  # ReservedSharedMemoryPerBlock
        (120, 1),  # ClusterLaunch
    ]  # fmt: skip

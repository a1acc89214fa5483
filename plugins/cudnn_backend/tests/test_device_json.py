"""The description that cuDNN plans for."""

from __future__ import annotations

import json

import pytest
from cudnn_backend.device_json import described

from cudnn_core import DeviceInfo

# What cuDNN 9.19 and 9.28 together ask for: a missing key is refused, one more is not.
KEYS = {
    "deviceName",
    "cudaDeviceId",
    "deviceVer",
    "driverVer",
    "multiProcessorCount",
    "pciDeviceId",
    "isTccDriver",
    "l2CacheSize",
    "maxBlockSize",
    "maxGridSize",
    "maxCtasPerSM",
    "maxRegistersPerSM",
    "maxSharedMemoryPerBlock",
    "maxSharedMemoryPerBlockOptin",
    "maxThreadsPerBlock",
    "maxThreadsPerSM",
    "memClockRateKHz",
    "memoryBusWidth",
    "oversizedSharedMemoryPerBlock",
    "regsPerBlock",
    "reservedSharedMemoryPerBlock",
    "smClockRateKHz",
    "supportCoopLaunch",
    "totalGlobalMem",
    "warpSize",
}


@pytest.mark.parametrize("name", ["A100", "L40S", "H100", "H200", "B200", "B300", "R200"])
def test_every_field_that_some_version_needs_is_there(name):
    device = DeviceInfo.preset(name)
    facts = json.loads(json.dumps(described(device)))
    assert facts.keys() == KEYS
    assert facts["deviceVer"] == 10 * device.sm_version
    assert facts["multiProcessorCount"] == device.sm_count
    assert facts["maxSharedMemoryPerBlockOptin"] == device.shared_memory_per_block_optin
    assert all(value is not None for value in facts.values())
    assert all(
        isinstance(value, int)
        for key, value in facts.items()
        if key not in ("deviceName", "maxBlockSize", "maxGridSize")
    )


def test_the_memory_clock_gives_the_published_bandwidth():
    device = DeviceInfo.preset("H200")
    facts = described(device)
    bandwidth = 2 * facts["memClockRateKHz"] * 1000 * facts["memoryBusWidth"] / 8
    assert bandwidth == pytest.approx(device.memory_bandwidth, rel=1e-3)


def test_a_device_of_which_only_the_capability_is_known():
    device = DeviceInfo.from_json('{"deviceVer": 1000, "multiProcessorCount": 20}')
    facts = described(device)
    assert (facts["deviceVer"], facts["multiProcessorCount"], facts["deviceName"]) == (1000, 20, "sm_100")
    assert facts["l2CacheSize"] > 0
    assert facts["totalGlobalMem"] > 0


def test_a_present_gpu_describes_itself_and_a_part_of_its_sms_is_taken_over(fake):
    fake.run(
        """
from programs import *
from cudnn_backend import library
from cudnn_backend.device_json import device_properties
import json
with present_gpu():
    device = cudnn_core.device_info(0)
    loaded = library.load()
    live = json.loads(device_properties(loaded, device).serialize())
    assert live == {"deviceVer": 900, "multiProcessorCount": 132, "live": 1}, live
    part = json.loads(device_properties(loaded, device.with_sm_count(64)).serialize())
    assert part == {**live, "multiProcessorCount": 64}, part
    assert device_properties(loaded, device) is device_properties(loaded, device)
described = json.loads(device_properties(loaded, DEVICE).serialize())
assert described["deviceName"] == "NVIDIA H200" and "live" not in described
"""
    )

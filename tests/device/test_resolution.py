"""Which device a plan is for, the build scope, and planning that never calls the driver."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cudnn_core import _driver
from cudnn_core._context import (
    build_device,
    build_target,
    create_device_properties,
    resolve_device,
)
from cudnn_core._device import DeviceInfo, device_info
from cudnn_core._errors import ConfigError, DriverError, HandleError, HandleTypeError
from cudnn_core._handle import create_handle, destroy_handle

B200 = DeviceInfo.preset("B200")
H200 = DeviceInfo.preset("H200")


def test_each_source_of_the_device_beats_the_next(two_gpus):
    gpu0, gpu1 = device_info(0), device_info(1)
    two_gpus.current = 1
    assert resolve_device() is gpu1  # the current CUDA device
    with build_device(B200):
        assert resolve_device() is B200
        with create_handle(0) as handle:
            assert resolve_device(handle=handle) is gpu0
            assert resolve_device(handle=handle, device_property=H200.serialize()).key() == H200.key()
            assert resolve_device(handle=handle, sm_version=103).arch == "103a"
            assert resolve_device(device=gpu1, handle=handle, device_property=H200) is gpu1
            assert resolve_device(device="cpu", handle=handle, device_property=H200) is device_info("cpu")


def test_without_a_gpu_the_device_is_the_cpu(no_gpu):
    assert resolve_device() is device_info("cpu")


def test_a_driver_error_raises_and_never_becomes_the_cpu(fake_driver, h200):
    with _driver.use_driver(fake_driver(h200, errors={"current_device": 719})), pytest.raises(DriverError):
        resolve_device()


@pytest.mark.usefixtures("poisoned")
def test_planning_for_a_described_device_never_calls_the_driver():
    text = B200.to_json()
    assert resolve_device(device="B200") == B200
    assert resolve_device(device=text) == B200
    assert resolve_device(device=DeviceInfo.from_json(text), sm_count=64).sm_count == 64
    assert resolve_device(device_property=create_device_properties(B200.serialize()), sm_version=100).sm_count == 148
    with build_device("B200"):
        assert resolve_device() == build_target() == B200
        assert resolve_device(sm_version=90).arch == "90a"
    assert resolve_device(device="cpu").type == "cpu"
    assert create_handle("cpu").device.type == "cpu"
    with pytest.raises(AssertionError, match="must not be asked"):  # the poison works
        resolve_device()
    with pytest.raises(AssertionError, match="must not be asked"):
        resolve_device(device=0)


def test_sm_version_keeps_the_device_at_hand_if_it_has_that_version(two_gpus):
    assert resolve_device(sm_version=90) is device_info(0)
    with create_handle(1) as handle:
        assert resolve_device(handle=handle, sm_version=107) is device_info(1)
        assert resolve_device(handle=handle, sm_version=90).synthetic


def test_sm_count_refines_whichever_device_it_is(two_gpus):
    assert resolve_device(sm_count=100).key() == device_info(0).with_sm_count(100).key()
    assert device_info(0).sm_count == 132
    assert resolve_device(device=B200, sm_count=100).sm_count == 100
    assert resolve_device(sm_version=103, sm_count=100).key()[1:3] == ((10, 3), 100)
    with pytest.raises(ConfigError, match="sm_count"):
        resolve_device(device=B200, sm_count=0)


def test_a_contradictory_or_unknown_sm_version_is_an_error(two_gpus):
    with pytest.raises(ConfigError, match="sm_version=90 contradicts"):
        resolve_device(device=B200, sm_version=90)
    with pytest.raises(ConfigError, match="sm_version=140: no preset has it"):
        resolve_device(sm_version=140)
    with pytest.raises(ConfigError, match="sm_version"):
        resolve_device(sm_version="90")


def test_a_handle_must_be_one_and_open(two_gpus):
    with pytest.raises(HandleTypeError):
        resolve_device(handle=0xC010)
    handle = create_handle()
    destroy_handle(handle)
    with pytest.raises(HandleError, match="was destroyed"):
        resolve_device(device=B200, handle=handle)


def test_the_frontends_own_device_properties_object_is_accepted(two_gpus):
    class Properties:
        def serialize(self):
            return list(b'{"deviceVer": 1000, "multiProcessorCount": 148}')

    assert resolve_device(device_property=Properties()).key() == B200.key()
    assert create_device_properties(1) is device_info(1)


# build_device ------------------------------------------------------------------------------------------------------


def test_the_build_scope_takes_a_device_or_an_ordinal_and_nests(two_gpus):
    assert build_target() is device_info(0)
    with build_device(1) as target:
        assert target is build_target() is device_info(1)
        with build_device(B200):
            assert build_target() is B200
        assert build_target() is device_info(1)
    assert build_target() is device_info(0)


def test_none_is_no_override(two_gpus):
    with build_device(None) as target:
        assert target is None
        assert build_target() is device_info(0)
    with build_device(B200), build_device(None):
        assert build_target() is B200


def test_the_build_scope_ends_with_an_exception(two_gpus):
    with pytest.raises(ZeroDivisionError), build_device(B200):
        raise ZeroDivisionError
    assert build_target() is device_info(0)


def test_the_build_scope_is_of_one_thread(two_gpus):
    seen = []
    with build_device(B200):
        thread = threading.Thread(target=lambda: seen.append(build_target()))
        thread.start()
        thread.join()
    assert seen == [device_info(0)]


def test_the_build_scope_is_of_one_task(two_gpus):
    async def build(device, first, second):
        with build_device(device):
            first.set()
            await second.wait()
            return build_target()

    async def both():
        a, b = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(build(B200, a, b), build(H200, b, a))

    assert asyncio.run(both()) == [B200, H200]

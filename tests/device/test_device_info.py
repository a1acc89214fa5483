"""DeviceInfo of a live device: each fact once, one instance per ordinal, absent optional facts, real errors."""

from __future__ import annotations

import copy
import os
import pickle
import threading

import pytest

from cudnn_core import _driver
from cudnn_core._device import DeviceInfo, as_device, current_device, device_info
from cudnn_core._errors import ConfigError, DriverError

OVERSIZED = "MAX_OVERSIZED_SHARED_MEMORY_PER_BLOCK"


def test_every_fact_of_a_gpu_comes_from_the_driver(two_gpus):
    info = device_info(0)
    assert (info.type, info.ordinal, info.synthetic) == ("cuda", 0, False)
    assert info.compute_capability == (9, 0)
    assert info.sm_version == 90
    assert info.arch == "90a"
    assert info.sm_count == 132
    assert info.shared_memory_per_block_optin == 232448
    assert info.oversized_shared_memory_per_block == 0
    assert info.l2_cache_bytes == 62914560
    assert info.device_name == "NVIDIA H200"
    assert info.memory_bytes == 150_754_820_096
    assert info.key() == ("cuda", (9, 0), 132, 232448, 0)


def test_two_gpus_are_told_apart(two_gpus):
    first, second = device_info(0), device_info(1)
    assert (first.arch, second.arch) == ("90a", "107a")
    assert (first.ordinal, second.ordinal) == (0, 1)
    assert second.oversized_shared_memory_per_block == 334848
    assert first != second


def test_two_equal_gpus_differ_by_ordinal_and_share_a_key(fake_driver, h200):
    with _driver.use_driver(fake_driver(h200, dict(h200))):
        assert device_info(0) != device_info(1)
        assert device_info(0).key() == device_info(1).key()


def test_one_instance_per_ordinal_and_each_fact_asked_once(two_gpus):
    assert device_info(1) is device_info(1)
    assert DeviceInfo(1) is device_info(1)
    asked = [call for call in two_gpus.calls if call[0] in {"attribute", "name", "total_memory"}]
    assert len(asked) == len(set(asked)) > 0


def test_one_instance_even_if_many_threads_ask_at_once(two_gpus):
    start, found = threading.Barrier(8), []

    def ask():
        start.wait()
        found.append(device_info(0))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert two_gpus.calls.count(("name", 0)) == 1


def test_a_live_device_takes_the_published_peaks_of_exactly_its_part(two_gpus, fake_driver, h200):
    assert device_info(0).peak("bfloat16") == 989.4e12
    assert device_info(0).memory_bandwidth == 4.8e12
    assert device_info(1).peak("bfloat16") is None  # a name without a preset
    with _driver.use_driver(fake_driver({**h200, "MULTIPROCESSOR_COUNT": 66})):  # a slice of the part
        assert device_info(0).peak("bfloat16") is None
        assert device_info(0).memory_bandwidth is None


def test_oversized_shared_memory_is_0_with_a_driver_older_than_13_4(fake_driver, rubin):
    driver = fake_driver(rubin, version=13030)
    with _driver.use_driver(driver):
        assert device_info(0).oversized_shared_memory_per_block == 0
    assert ("attribute", OVERSIZED, 0) not in driver.calls  # such a driver would answer with an error


def test_oversized_shared_memory_is_0_with_a_binding_that_lacks_the_attribute(fake_driver, rubin):
    with _driver.use_driver(fake_driver(rubin, missing=[OVERSIZED])):
        assert device_info(0).oversized_shared_memory_per_block == 0


def test_oversized_shared_memory_is_0_on_a_part_without_it(fake_driver, h200, rubin):
    with _driver.use_driver(fake_driver(h200)):  # the driver answers 0
        assert device_info(0).oversized_shared_memory_per_block == 0
    with _driver.use_driver(fake_driver(rubin, errors={OVERSIZED: 801})):  # or CUDA_ERROR_NOT_SUPPORTED
        assert device_info(0).oversized_shared_memory_per_block == 0


def test_oversized_shared_memory_is_read_where_all_three_have_it(fake_driver, rubin):
    with _driver.use_driver(fake_driver(rubin, version=13040)):
        assert device_info(0).oversized_shared_memory_per_block == 334848


@pytest.mark.parametrize("query", [OVERSIZED, "MULTIPROCESSOR_COUNT", "name", "total_memory", "driver_version"])
def test_a_real_driver_error_raises(fake_driver, rubin, query):
    driver = fake_driver(rubin, errors={query: 999})
    with _driver.use_driver(driver):
        with pytest.raises(DriverError) as caught:
            device_info(0)
        assert caught.value.code == 999
        driver.errors.clear()
        assert device_info(0).sm_count == 216  # the failure was not remembered as a fact


def test_a_required_attribute_that_the_binding_lacks_is_an_error(fake_driver, h200):
    with (
        _driver.use_driver(fake_driver(h200, missing=["MULTIPROCESSOR_COUNT"])),
        pytest.raises(_driver.AttributeMissing),
    ):
        device_info(0)


def test_an_ordinal_that_is_not_there_is_named(two_gpus):
    with pytest.raises(DriverError, match="no CUDA device 2: 2 visible"):
        device_info(2)
    with pytest.raises(DriverError, match="no CUDA device -1"):
        device_info(-1)


def test_asking_for_a_gpu_without_a_driver_says_why(no_gpu):
    with pytest.raises(DriverError, match=r"no CUDA device 0.*dep\.driver"):
        device_info(0)


@pytest.mark.parametrize("value", [True, 1.0, None, object()])
def test_something_that_is_no_device_is_refused(two_gpus, value):
    with pytest.raises(ConfigError, match="is not a device"):
        device_info(value)


def test_the_cpu_is_a_device_without_a_driver(poisoned):
    cpu = device_info("cpu")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert (cpu.type, cpu.ordinal, cpu.compute_capability, cpu.sm_version, cpu.arch) == ("cpu", 0, (0, 0), 0, "")
    assert cpu.sm_count == usable
    assert cpu.peak("float32") is None
    assert not cpu.synthetic
    assert device_info("cpu") is cpu


def test_importing_the_device_modules_loads_no_cuda_binding(python):
    loaded = python(
        "import cudnn_core._device, cudnn_core._handle, cudnn_core._context, cudnn_core._env, sys\n"
        "from cudnn_core._device import device_info, DeviceInfo\n"
        "device_info('cpu'); DeviceInfo.preset('B200')\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in {'cuda', 'torch', 'numpy', 'pluggy', 'tomli'}))"
    )
    assert loaded == "[]"


def test_a_device_is_immutable(two_gpus):
    with pytest.raises(AttributeError):
        device_info(0).sm_count = 1
    with pytest.raises(AttributeError):
        del device_info(0).sm_count
    with pytest.raises(AttributeError):
        device_info(0).extra = 1
    with pytest.raises(TypeError):
        device_info(0).peak_flops["float32"] = 1.0
    assert device_info(0).sm_count == 132


def test_a_user_sm_count_makes_a_new_device_and_leaves_the_cached_one(two_gpus):
    fewer = device_info(0).with_sm_count(64)
    assert (fewer.sm_count, fewer.ordinal, fewer.device_name) == (64, 0, "NVIDIA H200")
    assert fewer.key() != device_info(0).key()
    assert device_info(0).sm_count == 132
    assert device_info(0).with_sm_count(132) is device_info(0)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="sm_count"):
            device_info(0).with_sm_count(bad)


def test_a_device_is_a_value(two_gpus):
    info = device_info(0)
    assert copy.copy(info) is info
    assert copy.deepcopy(info) is info
    other = pickle.loads(pickle.dumps(info))
    assert other == info
    assert hash(other) == hash(info)
    assert info != "cuda:0"


def test_a_live_device_never_asks_the_driver_again(two_gpus):
    info = device_info(0)
    with _driver.use_driver(_driver.PoisonedDriver()):
        assert info.with_sm_count(7).to_json()
        assert (info.arch, info.peak("bfloat16"), info.key()[2]) == ("90a", 989.4e12, 132)


def test_the_current_device_is_the_live_one(two_gpus):
    assert current_device() is device_info(0)  # no context on this thread yet
    two_gpus.current = 1
    assert current_device() is device_info(1)


def test_device_spellings(two_gpus):
    class TorchDevice:
        def __init__(self, type, index=None):
            self.type, self.index = type, index

    two_gpus.current = 1
    assert as_device("cpu") is as_device(TorchDevice("cpu")) is device_info("cpu")
    assert as_device("cuda:0") is as_device(0) is as_device(TorchDevice("cuda", 0)) is device_info(0)
    assert as_device("cuda") is as_device(TorchDevice("cuda")) is device_info(1)
    assert as_device("H200").synthetic
    assert as_device(as_device("H200").to_json()) == as_device("H200")
    assert as_device(as_device("H200").to_dict()) == as_device("H200")
    with pytest.raises(ConfigError, match="unknown device 'cuda:x'"):
        as_device("cuda:x")


def test_cuda_without_a_gpu_raises_and_never_becomes_the_cpu(no_gpu):
    with pytest.raises(DriverError):
        as_device("cuda")

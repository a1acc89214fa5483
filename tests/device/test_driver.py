"""The layer over cuda-bindings: what counts as absent, what as an error, and the swap for tests."""

from __future__ import annotations

import sys
import threading
import types

import pytest

from cudnn_core import _driver
from cudnn_core._device import device_info
from cudnn_core._errors import DriverError


class Binding(types.ModuleType):
    """``cuda.bindings.driver`` as far as the core uses it; ``codes`` makes a function answer with that CUresult."""

    class CUresult:
        def __init__(self, code):
            if code not in (3, 999):
                raise ValueError(code)
            self.name = {3: "CUDA_ERROR_NOT_INITIALIZED", 999: "CUDA_ERROR_UNKNOWN"}[code]

    class CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16

    def __init__(self, **codes):
        super().__init__("cuda.bindings.driver")
        self.codes = codes
        self.current = 1
        self.retained = []
        self.failure = None

    def _answer(self, function, *values):
        code = self.codes.get(function, 0)
        return (code, *(None if code else value for value in values))

    def cuInit(self, flags):
        if self.failure:
            raise self.failure
        return self._answer("cuInit")

    def cuDeviceGetCount(self):
        return self._answer("cuDeviceGetCount", 2)

    def cuDeviceGetAttribute(self, attribute, ordinal):
        return self._answer("cuDeviceGetAttribute", 100 * ordinal + attribute)

    def cuDeviceGetName(self, size, ordinal):
        return self._answer("cuDeviceGetName", b"NVIDIA H200\0\0\0\0")

    def cuDeviceTotalMem(self, ordinal):
        return self._answer("cuDeviceTotalMem", 1 << 37)

    def cuCtxGetDevice(self):
        return self._answer("cuCtxGetDevice", self.current)

    def cuDevicePrimaryCtxRetain(self, ordinal):
        self.retained.append(ordinal)
        return self._answer("cuDevicePrimaryCtxRetain", f"context {ordinal}")

    def cuCtxSetCurrent(self, context):
        self.current = int(context.split()[1])
        return self._answer("cuCtxSetCurrent")

    def cuDriverGetVersion(self):
        return self._answer("cuDriverGetVersion", 13020)


@pytest.fixture
def install(monkeypatch):
    """Puts a module in the place of ``cuda.bindings.driver`` and forgets the driver that was loaded."""

    def put(binding, runtime=None):
        package = types.ModuleType("cuda.bindings")
        package.__path__ = []
        package.driver, package.runtime = binding, runtime
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", package)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", binding)
        monkeypatch.setattr(_driver, "_state", _driver._State())
        return binding

    return put


def test_the_driver_answers_through_the_binding(install):
    install(Binding(), types.SimpleNamespace(cudaRuntimeGetVersion=lambda: (0, 13050)))
    driver = _driver.driver()
    assert _driver.why_absent() is None
    assert driver.device_count() == 2
    assert driver.attribute("MULTIPROCESSOR_COUNT", 1) == 116
    assert driver.name(0) == "NVIDIA H200"
    assert driver.total_memory(0) == 1 << 37
    assert driver.current_device() == 1
    assert (driver.driver_version(), driver.runtime_version()) == (13020, 13050)


def test_a_binding_without_an_attribute_says_so(install):
    install(Binding())
    with pytest.raises(_driver.AttributeMissing, match="MAX_OVERSIZED"):
        _driver.driver().attribute("MAX_OVERSIZED_SHARED_MEMORY_PER_BLOCK", 0)


def test_a_thread_without_a_context_has_no_current_device(install):
    install(Binding(cuCtxGetDevice=201))
    assert _driver.driver().current_device() is None


def test_a_primary_context_is_retained_once_and_made_current(install):
    binding = install(Binding())
    for ordinal in (0, 0, 1, 0):
        _driver.driver().make_current(ordinal)
        assert _driver.driver().current_device() == ordinal
    assert binding.retained == [0, 1]


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("cuDeviceGetAttribute", lambda driver: driver.attribute("MULTIPROCESSOR_COUNT", 0)),
        ("cuDeviceGetName", lambda driver: driver.name(0)),
        ("cuDeviceTotalMem", lambda driver: driver.total_memory(0)),
        ("cuCtxGetDevice", lambda driver: driver.current_device()),
        ("cuDriverGetVersion", lambda driver: driver.driver_version()),
        ("cuDevicePrimaryCtxRetain", lambda driver: driver.make_current(0)),
    ],
)
def test_an_error_of_the_driver_raises_with_its_name_and_code(install, function, call):
    install(Binding(**{function: 999}))
    with pytest.raises(DriverError, match=f"{function}: the CUDA driver answered CUDA_ERROR_UNKNOWN") as caught:
        call(_driver.driver())
    assert caught.value.code == 999


def test_an_error_code_that_the_binding_does_not_know_is_still_named(install):
    install(Binding(cuDriverGetVersion=12345))
    with pytest.raises(DriverError, match="CUresult 12345"):
        _driver.driver().driver_version()


def test_an_error_of_the_runtime_raises(install):
    install(Binding(), types.SimpleNamespace(cudaRuntimeGetVersion=lambda: (35, 0)))
    with pytest.raises(DriverError, match="error 35"):
        _driver.driver().runtime_version()


@pytest.mark.parametrize(("result", "code"), [(100, "device.absent"), (34, "dep.driver")])
def test_no_device_and_a_stub_library_mean_absent(install, result, code):
    install(Binding(cuInit=result))
    assert _driver.driver() is None
    assert _driver.why_absent().code == code


def test_no_visible_device_means_absent(install, monkeypatch):
    monkeypatch.setattr(install(Binding()), "cuDeviceGetCount", lambda: (0, 0))
    assert _driver.driver() is None
    assert _driver.why_absent().code == "device.absent"


def test_a_missing_libcuda_means_absent(install):
    install(Binding()).failure = RuntimeError("libcuda.so.1 not found")
    assert _driver.driver() is None
    assert _driver.why_absent().code == "dep.driver"
    assert "libcuda.so.1 not found" in str(_driver.why_absent())
    with pytest.raises(DriverError, match="libcuda"):
        device_info(0)


def test_a_driver_that_fails_to_initialise_raises_every_time(install):
    binding = install(Binding(cuInit=3))
    for _ in range(2):
        with pytest.raises(DriverError, match="cuInit: the CUDA driver answered CUDA_ERROR_NOT_INITIALIZED"):
            _driver.driver()
    binding.codes.clear()
    assert _driver.driver().device_count() == 2


def test_a_missing_binding_means_absent_and_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(_driver, "_state", _driver._State())
    assert _driver.driver() is None
    assert _driver.why_absent().code == "dep.missing"
    assert "cudnn-core[cuda]" in _driver.why_absent().hint


def test_a_binding_that_fails_to_import_means_absent_and_says_how(install, monkeypatch):
    install(Binding())
    broken = types.ModuleType("cuda.bindings")  # neither a package nor with a `driver`
    monkeypatch.setitem(sys.modules, "cuda.bindings", broken)
    monkeypatch.delitem(sys.modules, "cuda.bindings.driver")
    assert _driver.driver() is None
    assert _driver.why_absent().code == "dep.import_failed"


def test_swapping_the_driver_forgets_its_facts_and_restores_them(fake_driver, h200, rubin):
    with _driver.use_driver(fake_driver(h200)):
        first = device_info(0)
        with _driver.use_driver(fake_driver(rubin)):
            assert device_info(0).arch == "107a"
        assert device_info(0) is first


def test_the_swap_holds_for_every_thread(fake_driver, rubin):
    seen = []
    with _driver.use_driver(fake_driver(rubin)):
        thread = threading.Thread(target=lambda: seen.append(device_info(0).arch))
        thread.start()
        thread.join()
    assert seen == ["107a"]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "call", ["device_count", "attribute", "name", "total_memory", "current_device", "driver_version"]
)
def test_a_poisoned_driver_fails_whatever_is_asked(call):
    with pytest.raises(AssertionError, match=call):
        getattr(_driver.driver(), call)()
    with pytest.raises(AssertionError):
        device_info(0)

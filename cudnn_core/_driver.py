"""The CUDA driver: the only module that calls it, through cuda-bindings (extra ``[cuda]``), and only when asked.

``driver()`` is None where there is nothing to ask (no binding, no libcuda, no device) and ``why_absent()`` says which. An
error that a present driver reports raises DriverError. ``use_driver`` swaps the driver together with everything that was
read from it: tests pass a fake, the conformance kit a ``PoisonedDriver``. Imported by ``_device``, ``_env`` and ``_context``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from ._declines import Decline
from ._errors import CudnnCoreError, DriverError

__all__ = [
    "AttributeMissing",
    "Driver",
    "PoisonedDriver",
    "cache",
    "driver",
    "lock",
    "use_driver",
    "why_absent",
]

# CUresult values that mean "there is no GPU to talk to" rather than "something is wrong".
_STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY: libcuda.so of the toolkit, no driver behind it
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: no context is current on the calling thread


class AttributeMissing(CudnnCoreError):  # noqa: N818  # a fact about the binding, rarely an error
    """The installed cuda-bindings has no device attribute of that name."""


class Driver(Protocol):
    """What the core asks of the CUDA driver. Every method raises DriverError if the driver reports an error."""

    def device_count(self) -> int: ...

    def attribute(self, name: str, ordinal: int) -> int:
        """A ``CU_DEVICE_ATTRIBUTE_<name>``; AttributeMissing if the binding does not know it."""
        ...

    def name(self, ordinal: int) -> str: ...

    def total_memory(self, ordinal: int) -> int: ...

    def current_device(self) -> int | None:
        """The live current device of the calling thread; None if no context is current on it."""
        ...

    def make_current(self, ordinal: int) -> None:
        """Make the device's primary context current on the calling thread."""
        ...

    def driver_version(self) -> int:
        """Like 13040 for CUDA 13.4."""
        ...

    def runtime_version(self) -> int: ...


class PoisonedDriver:
    """Stands in for a driver that must not be called: every use raises AssertionError."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the CUDA driver must not be asked here, and it was: {name}()")


class _State:
    """One driver and what was read from it. ``facts`` is the cache of ``_device`` and ``_env``."""

    __slots__ = ("absent", "driver", "facts", "resolved")

    def __init__(self, driver: Driver | PoisonedDriver | None = None, absent: Decline | None = None) -> None:
        self.driver = driver
        self.absent = absent
        self.facts: dict[Any, Any] = {}
        self.resolved = driver is not None or absent is not None


_state = _State()
lock = threading.RLock()  # guards the state and the facts


def driver() -> Driver | None:
    """The CUDA driver, or None where there is none. The first call loads it."""
    state = _state
    if not state.resolved:
        with lock:
            if not state.resolved:
                state.driver, state.absent = _load()
                state.resolved = True
    return state.driver


def why_absent() -> Decline | None:
    """Why ``driver()`` is None: dep.missing, dep.import_failed, dep.driver or device.absent. None if it is there."""
    driver()
    return _state.absent


def cache() -> dict[Any, Any]:
    """Facts read from the present driver; forgotten when another one is swapped in."""
    return _state.facts


@contextlib.contextmanager
def use_driver(fake: Driver | PoisonedDriver | None) -> Iterator[None]:
    """Swap the driver, for every thread, and start with no cached facts. None stands for a machine without a driver."""
    global _state
    absent = None if fake is not None else Decline("dep.driver", "libcuda", hint="use_driver(None) is in force")
    with lock:
        before, _state = _state, _State(fake, absent)
    try:
        yield
    finally:
        with lock:
            _state = before


def _after_fork_in_child() -> None:
    global lock
    lock = threading.RLock()  # another thread of the parent may hold the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _load() -> tuple[Driver | None, Decline | None]:
    try:
        from cuda.bindings import driver as binding
    except ModuleNotFoundError as error:
        if error.name not in {"cuda", "cuda.bindings", "cuda.bindings.driver"}:
            return None, Decline("dep.import_failed", "cuda-bindings", actual=str(error))
        return None, Decline("dep.missing", "cuda-bindings", hint='pip install "cudnn-core[cuda]"')
    except ImportError as error:
        return None, Decline("dep.import_failed", "cuda-bindings", actual=str(error))
    try:
        code = int(binding.cuInit(0)[0])
    except RuntimeError as error:  # how cuda-bindings reports that it found no libcuda
        return None, Decline("dep.driver", "libcuda", actual=str(error), hint="install the NVIDIA driver")
    if code == _STUB_LIBRARY:
        return None, Decline(
            "dep.driver", "libcuda", actual="the toolkit's stub library", hint="install the NVIDIA driver"
        )
    if code == _NO_DEVICE:
        return None, Decline("device.absent", "cuda", actual="no visible device", hint="check CUDA_VISIBLE_DEVICES")
    found = CudaDriver(binding)
    if code:
        raise found.error("cuInit", code)
    if found.device_count() == 0:
        return None, Decline("device.absent", "cuda", actual="no visible device", hint="check CUDA_VISIBLE_DEVICES")
    return found, None


class CudaDriver:
    """The Driver over ``cuda.bindings.driver``, whose functions return ``(CUresult, *values)``."""

    def __init__(self, binding: Any) -> None:
        self._binding = binding
        self._primary: dict[int, Any] = {}

    def error(self, call: str, code: int) -> DriverError:
        try:
            name = self._binding.CUresult(code).name
        except ValueError:
            name = f"CUresult {code}"
        return DriverError(f"{call}: the CUDA driver answered {name}", code=code)

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def attribute(self, name: str, ordinal: int) -> int:
        member = getattr(self._binding.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if member is None:
            raise AttributeMissing(f"the installed cuda-bindings has no CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", member, ordinal))

    def name(self, ordinal: int) -> str:
        raw: bytes = self._call("cuDeviceGetName", 256, ordinal)
        return raw.split(b"\0", 1)[0].decode("utf-8", "replace").strip()

    def total_memory(self, ordinal: int) -> int:
        return int(self._call("cuDeviceTotalMem", ordinal))

    def current_device(self) -> int | None:
        code, device = self._binding.cuCtxGetDevice()
        if int(code) == _INVALID_CONTEXT:
            return None
        if int(code):
            raise self.error("cuCtxGetDevice", int(code))
        return int(device)

    def make_current(self, ordinal: int) -> None:
        with lock:
            if ordinal not in self._primary:  # retained for good: a release could end the process's last context
                self._primary[ordinal] = self._call("cuDevicePrimaryCtxRetain", ordinal)
        self._call("cuCtxSetCurrent", self._primary[ordinal])

    def driver_version(self) -> int:
        return int(self._call("cuDriverGetVersion"))

    def runtime_version(self) -> int:
        from cuda.bindings import runtime

        code, version = runtime.cudaRuntimeGetVersion()
        if int(code):
            raise DriverError(f"cudaRuntimeGetVersion: the CUDA runtime answered error {int(code)}", code=int(code))
        return int(version)

    def _call(self, function: str, *arguments: Any) -> Any:
        code, *values = getattr(self._binding, function)(*arguments)
        if int(code):
            raise self.error(function, int(code))
        return values[0] if values else None

"""A CUDA driver and a cuDNN backend that are not there, and that write down what they are asked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cudnn_core
from cudnn_core import _driver
from cudnn_core._errors import DriverError

H200 = {
    "name": "NVIDIA H200",
    "memory": 150_754_820_096,
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "MAX_OVERSIZED_SHARED_MEMORY_PER_BLOCK": 0,
    "L2_CACHE_SIZE": 62914560,
}
RUBIN = {
    "name": "NVIDIA Rubin",
    "memory": 300_000_000_000,
    "COMPUTE_CAPABILITY_MAJOR": 10,
    "COMPUTE_CAPABILITY_MINOR": 7,
    "MULTIPROCESSOR_COUNT": 216,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "MAX_OVERSIZED_SHARED_MEMORY_PER_BLOCK": 334848,
    "L2_CACHE_SIZE": 100,
}


class FakeDriver:
    """``missing``: attributes that the binding lacks. ``errors``: query -> CUresult. ``current``: live current ordinal."""

    def __init__(self, *gpus, version=13040, current=None, missing=(), errors=None):
        self.gpus = list(gpus)
        self.version = version
        self.current = current
        self.missing = set(missing)
        self.errors = errors or {}
        self.calls = []

    def _asked(self, *call):
        self.calls.append(call)
        for part in call:
            if part in self.errors:
                raise DriverError(f"{part}: fake error", code=self.errors[part])

    def device_count(self):
        self._asked("device_count")
        time.sleep(0.01)  # long enough for another thread to come in between
        return len(self.gpus)

    def attribute(self, name, ordinal):
        if name in self.missing:
            raise _driver.AttributeMissing(name)
        self._asked("attribute", name, ordinal)
        return self.gpus[ordinal][name]

    def name(self, ordinal):
        self._asked("name", ordinal)
        return self.gpus[ordinal]["name"]

    def total_memory(self, ordinal):
        self._asked("total_memory", ordinal)
        return self.gpus[ordinal]["memory"]

    def current_device(self):
        self._asked("current_device")
        return self.current

    def make_current(self, ordinal):
        self._asked("make_current", ordinal)
        self.current = ordinal

    def driver_version(self):
        self._asked("driver_version")
        return self.version

    def runtime_version(self):
        self._asked("runtime_version")
        return 13050


class FakeBackend:
    """cuDNN's side: hands out raw handles and logs ("set_stream", raw, stream) and ("destroy", raw)."""

    def __init__(self):
        self.calls = []
        self.streams = {}
        self.last = 0xC000

    def create(self):
        self.last += 16
        self.streams[self.last] = 0
        self.calls.append(("create", self.last))
        return self.last

    def set_stream(self, raw, stream):
        self.calls.append(("set_stream", raw, stream))
        self.streams[raw] = stream

    def get_stream(self, raw):
        self.calls.append(("get_stream", raw))
        return self.streams[raw]

    def destroy(self, raw):
        self.calls.append(("destroy", raw))
        del self.streams[raw]

    def attach(self, handle):
        raw = self.create()
        handle.attach_backend(raw, set_stream=self.set_stream, destroy=self.destroy, version=92700)
        return raw

    def thread_backend(self, handle):
        return handle.thread_backend(self.create, set_stream=self.set_stream, destroy=self.destroy)

    backend_version = staticmethod(lambda: 92700)
    backend_version_string = staticmethod(lambda: "9.27.0")
    get_last_error_string = staticmethod(lambda: "a fake error")


@pytest.fixture
def fake_driver():
    """Makes FakeDrivers."""
    return FakeDriver


@pytest.fixture
def h200():
    return dict(H200)


@pytest.fixture
def rubin():
    return dict(RUBIN)


@pytest.fixture
def two_gpus(h200, rubin):
    """The driver of a machine with an H200 as cuda:0 and a Rubin as cuda:1."""
    with _driver.use_driver(FakeDriver(h200, rubin)):
        yield _driver.driver()


@pytest.fixture
def no_gpu():
    with _driver.use_driver(None):
        yield


@pytest.fixture
def poisoned():
    with _driver.use_driver(_driver.PoisonedDriver()):
        yield


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def python():
    """Runs code in a fresh interpreter and returns what it printed."""

    def run(code):
        env = {**os.environ, "PYTHONPATH": str(Path(cudnn_core.__file__).parents[1])}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run

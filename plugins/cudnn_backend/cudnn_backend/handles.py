"""Raw cuDNN handles: those of a Handle, and for calls without one, one for each thread and device. Imported by ``plan``.

A raw handle belongs to one device and is used by one thread at a time. Its stream is set only when it changes: a set costs 2 us.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cudnn_core import ExecutionError

from . import errors

if TYPE_CHECKING:
    from cudnn_core import Handle

    from .library import Library

__all__ = ["Held", "PerThread", "current", "of_handle", "per_thread"]


class Held:
    """A raw handle of one thread, destroyed when the thread ends."""

    __slots__ = ("_destroy", "_pid", "_set_stream", "raw", "stream")

    def __init__(self, library: Library, ordinal: int) -> None:
        self._pid = 0
        self.raw = create(library, ordinal)
        self._pid = os.getpid()
        self.stream = 0  # where cuDNN starts
        self._set_stream: Callable[[int, int], object] = library.module._raw_set_stream
        self._destroy: Callable[[int], object] = library.module._raw_destroy_handle

    def move(self, stream: int) -> None:
        """Set the stream. Raises ExecutionError, and then the handle is where it was."""
        try:
            self._set_stream(self.raw, stream)
        except Exception as error:
            errors.remember(str(error))
            raise ExecutionError(f"cuDNN can't use the stream {stream:#x}: {errors.reason(error)}") from error
        self.stream = stream

    def __del__(self) -> None:
        # Not at exit, when the driver may be gone, and not in a forked child, whose parent owns it.
        if self._pid and not sys.is_finalizing() and self._pid == os.getpid():
            with contextlib.suppress(Exception):
                self._destroy(self.raw)


class PerThread(threading.local):
    """``held`` is the calling thread's handle once ``open`` has been called on the thread."""

    held: Held

    def __init__(self, library: Library, ordinal: int) -> None:
        self._of = (library, ordinal)

    def ready(self) -> None:
        """See to it that the thread has its handle: making one allocates, which a capturing stream does not allow."""
        if not hasattr(self, "held"):
            self.open()

    def open(self) -> Held:
        self.held = Held(*self._of)
        return self.held


_lock = threading.Lock()
_per_thread: dict[tuple[int, int], PerThread] = {}


def per_thread(library: Library, ordinal: int) -> PerThread:
    """The handles of all threads for one device; shared by every plan."""
    key = (id(library.module), ordinal)
    with _lock:
        return _per_thread.setdefault(key, PerThread(library, ordinal))


def of_handle(library: Library, handle: Handle) -> int:
    """The calling thread's raw handle of ``handle``, on its stream: attached by the first call, a child on other threads."""
    module, ordinal = library.module, handle.device.ordinal or 0
    set_stream, destroy = module._raw_set_stream, module._raw_destroy_handle
    with handle.lock:
        if handle.backend_handle is None:
            raw = create(library, ordinal)
            try:
                handle.attach_backend(raw, set_stream=set_stream, destroy=destroy, version=library.version)
            except BaseException:
                destroy(raw)
                raise
        return handle.thread_backend(lambda: create(library, ordinal), set_stream=set_stream, destroy=destroy)


def create(library: Library, ordinal: int) -> int:
    """A new raw handle on the device. Raises ExecutionError with cuDNN's text."""
    try:
        with current(ordinal):  # cuDNN takes the current device
            return int(library.module.create_handle())
    except RuntimeError as error:
        errors.remember(str(error))
        raise ExecutionError(f"cuDNN makes no handle on cuda:{ordinal}: {errors.reason(error)}") from error


@contextlib.contextmanager
def current(ordinal: int) -> Iterator[None]:
    """The device's primary context is current inside; what was current before is afterwards."""
    try:
        from cuda.bindings import driver
    except ImportError:
        yield  # nothing to switch with; the caller's device is the plan's unless a thread changed it
        return
    try:
        code, device = driver.cuCtxGetDevice()
    except RuntimeError:  # no libcuda for cuda-bindings
        yield
        return
    if int(code) == 0 and int(device) == ordinal:
        yield
        return
    code, context = driver.cuDevicePrimaryCtxRetain(ordinal)  # kept: a release could end the process's last context
    if int(code):
        raise RuntimeError(f"cuDevicePrimaryCtxRetain({ordinal}) answered {code!r}")
    driver.cuCtxPushCurrent(context)
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()

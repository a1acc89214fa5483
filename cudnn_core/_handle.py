"""Handles: a device, a stream, and the backend handle that a backend plugin may attach.

Python engines need no backend, so a handle is cheap and ``backend_handle`` stays None until a plugin attaches one. A raw
``cudnnHandle_t`` is never taken for a handle: wrap it, ``Handle(backend_handle, ordinal, stream)``. Imported by the
context, the graph and the plan; backend plugins use ``attach_backend`` and ``thread_backend``.
"""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from . import _driver
from ._device import DeviceInfo, as_device, current_device, device_info
from ._errors import HandleError, HandleTypeError

__all__ = [
    "Handle",
    "as_stream",
    "create_handle",
    "destroy_handle",
    "get_stream",
    "handle",
    "require_handle",
    "set_stream",
    "to_backend_handle",
]

_WRAP = "wrap a raw backend handle: cudnn_core.Handle(backend_handle, ordinal, stream)"

SetStream = Callable[[int, int], object]
Destroy = Callable[[int], object]


class Handle:
    """A device and a stream to run on. ``create_handle`` makes one; the constructor wraps a foreign backend handle.

    A wrapped handle is never destroyed by cudnn-core. ``ordinal`` defaults to the current CUDA device and ``stream`` to
    the one that the backend reports; either query raises if it fails. Equality and hash are the object's own. A context
    manager destroys it at the end. Any use after that raises HandleError.
    """

    __slots__ = (
        "__weakref__",
        "_attached_by",
        "_backend",
        "_backend_version",
        "_device",
        "_finalizer",
        "_lock",
        "_native",
        "_push",
        "_stream",
        "_why_closed",
    )

    _attached_by: int
    _backend: int | None
    _backend_version: int
    _device: DeviceInfo | None
    _finalizer: Any
    _push: SetStream | None
    _stream: int | None

    def __init__(self, backend_handle: int | None, ordinal: int | None = None, stream: Any = None) -> None:
        raw = None if backend_handle is None else _raw(backend_handle)
        self._open(_wrapped_device() if raw is not None and ordinal is None else _own_device(ordinal), None)
        self._backend = raw
        if raw is not None:
            self._attached_by = threading.get_ident()
            self._push = _push_through_provider
        if stream is not None:
            self._stream = as_stream(stream)
        else:
            self._stream = 0 if raw is None else _stream_from_provider(raw)

    def _open(self, device: DeviceInfo, stream: int | None) -> None:
        self._device = device
        self._stream = stream
        self._backend = None
        self._backend_version = 0
        self._push = None
        self._attached_by = 0
        self._native = _Native()
        self._finalizer = None
        self._why_closed = ""
        self._lock = threading.RLock()
        _live.add(self)

    @property
    def device(self) -> DeviceInfo:
        device = self._device
        if device is None:
            raise self._closed()
        return device

    @property
    def stream(self) -> int:
        """The stream's address; 0 is the legacy default stream. Makes no call."""
        stream = self._stream
        if stream is None:
            raise self._closed()
        return stream

    @property
    def backend_handle(self) -> int | None:
        """The raw ``cudnnHandle_t`` if one is wrapped or attached, else None. Never creates one."""
        if self._device is None:
            raise self._closed()
        return self._backend

    @property
    def backend_version(self) -> int:
        """The version that the backend plugin gave when it attached, else 0."""
        return self._backend_version

    @property
    def lock(self) -> threading.RLock:
        """Held while a backend is attached; a plugin holds it over "is there one? create and attach"."""
        return self._lock

    @property
    def closed(self) -> bool:
        return self._device is None

    def set_stream(self, stream: Any) -> None:
        """Run on ``stream`` from now on. The backend is told only if it changes."""
        address = as_stream(stream)
        if address == self._stream:
            return
        with self._lock:
            before = self.stream
            if address != before and self._backend is not None and self._push is not None:
                _call("set_stream", self._push, self._backend, address)
            self._stream = address

    def attach_backend(self, raw: int, *, set_stream: SetStream, destroy: Destroy, version: int) -> None:
        """Give this handle its backend: once, under the lock, moved to the stream that is already set.

        ``set_stream(raw, stream)`` is called on every change from now on, ``destroy(raw)`` when the handle is destroyed or
        collected. If this raises, nothing is attached and ``raw`` is still the caller's.
        """
        raw = _raw(raw)
        with self._lock:
            if self.backend_handle is not None:
                raise HandleError(f"{self!r} has a backend already")
            _call("set_stream", set_stream, raw, self.stream)
            self._native.adopt(raw, destroy)
            self._backend = raw
            self._backend_version = version
            self._push = set_stream
            self._attached_by = threading.get_ident()
            self._watch()

    def thread_backend(self, create: Callable[[], int], *, set_stream: SetStream, destroy: Destroy) -> int:
        """The raw backend handle for the calling thread, on this handle's stream; for backend plugins.

        The thread that attached the backend gets that one. Any other gets a child of its own, made by ``create`` on its
        first call and destroyed with the handle. (A child outlives its thread: a later thread of the same ident inherits it.)
        """
        ident = threading.get_ident()
        with self._lock:
            if self.backend_handle is None:
                raise HandleError(f"{self!r} has no backend: attach_backend comes first")
            if ident == self._attached_by:
                return self._backend  # type: ignore[return-value]  # not None: checked above
            child = self._native.children.get(ident)
            if child is None:
                raw = _raw(create())
                self._native.adopt(raw, destroy)
                child = self._native.children[ident] = [raw, None]
                self._watch()
            if child[1] != self._stream:
                _call("set_stream", set_stream, child[0], self.stream)
                child[1] = self._stream
            return child[0]  # type: ignore[no-any-return]

    def destroy(self) -> None:
        """Destroy what was attached and clear the handle. A second call does nothing."""
        with self._lock:
            if self._device is None:
                return
            self._clear("was destroyed")
            self._native.release()

    def __enter__(self) -> Handle:  # noqa: PYI034  # Self is not in the standard library of 3.10
        if self._device is None:
            raise self._closed()
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy()

    def __reduce__(self) -> NoReturn:
        raise HandleTypeError("a Handle can be neither copied nor pickled: create one per process")

    def __repr__(self) -> str:
        device = self._device
        if device is None:
            return f"<Handle that {self._why_closed}>"
        where = device.type if device.type == "cpu" else f"cuda:{device.ordinal}"
        backend = "" if self._backend is None else f" backend={self._backend:#x}"
        return f"<Handle {where} stream={self._stream:#x}{backend}>"

    def _watch(self) -> None:
        """Have the backend released if the handle is collected without destroy_handle; at exit the process does it."""
        if self._finalizer is None:
            self._finalizer = weakref.finalize(self, self._native.release)
            self._finalizer.atexit = False

    def _clear(self, why: str) -> None:
        self._why_closed = why
        self._device = self._stream = self._backend = self._push = None

    def _closed(self) -> HandleError:
        return HandleError(f"this Handle {self._why_closed}; create another one with create_handle()")


handle = Handle  # the frontend's type name


class _Native:
    """Backend handles that a Handle owns. Apart from it, so that a finalizer can hold them."""

    __slots__ = ("children", "owned")

    def __init__(self) -> None:
        self.owned: list[tuple[int, Destroy]] = []
        self.children: dict[int, list[Any]] = {}  # thread ident -> [raw, the stream it was last given]

    def adopt(self, raw: int, destroy: Destroy) -> None:
        self.owned.append((raw, destroy))

    def release(self) -> None:
        """Destroy the children, then the first one; every one is tried, and the first failure raised at the end."""
        owned, self.owned = self.owned, []
        self.children = {}
        failures = [failure for raw, destroy in reversed(owned) if (failure := _failure(destroy, raw))]
        if failures:
            raise failures[0]


def create_handle(device: Any = None, stream: Any = None) -> Handle:
    """A handle on ``device`` (an ordinal, "cpu", "cuda:1", a live DeviceInfo) and ``stream``.

    By default the current CUDA device, or the CPU where there is no GPU, and stream 0, where a backend starts (not a
    framework's current stream). A driver error raises DriverError.
    """
    made: Handle = object.__new__(Handle)
    made._open(_own_device(device), 0 if stream is None else as_stream(stream))
    return made


def destroy_handle(handle: Handle) -> None:
    """Destroy the backend that was attached, if any, and clear the handle. A second call does nothing."""
    _only_handle(handle).destroy()


def set_stream(handle: Handle, stream: Any) -> None:
    """Run on ``stream``: an address, a CUstream, or an object with ``cuda_stream``, ``__cuda_stream__`` or ``ptr``."""
    _only_handle(handle).set_stream(stream)


def get_stream(handle: Handle) -> int:
    """The address of the handle's stream. Makes no call."""
    return _only_handle(handle).stream


def to_backend_handle(handle: Handle | None) -> int | None:
    """The raw backend handle, or None if the handle has none (or is None). Never creates one."""
    return None if handle is None else _only_handle(handle).backend_handle


def require_handle(value: Any) -> Handle:
    """``value`` if it is a usable Handle; HandleTypeError for anything else, HandleError for a destroyed one."""
    found = _only_handle(value)
    if found._device is None:
        raise found._closed()
    return found


def as_stream(stream: Any) -> int:
    """The address of ``stream``: an int, what its ``cuda_stream``, ``__cuda_stream__`` or ``ptr`` says, or a CUstream's value."""
    address: Any = stream
    if type(stream) is int:
        pass
    elif hasattr(stream, "cuda_stream"):  # torch
        address = stream.cuda_stream
    elif hasattr(stream, "__cuda_stream__"):  # the CUDA Python protocol: (version, address)
        pair = stream.__cuda_stream__
        address = (pair() if callable(pair) else pair)[1]
    elif hasattr(stream, "ptr"):  # CuPy
        address = stream.ptr
    elif hasattr(stream, "getPtr"):  # a handle type of cuda-bindings; runtime.cudaStream_t is a CUstream too
        address = int(stream) if any(kind.__name__ == "CUstream" for kind in type(stream).__mro__) else None
    try:
        if isinstance(address, bool):
            raise TypeError
        number = operator.index(address)
    except TypeError:
        raise HandleTypeError(f"{stream!r} is not a stream: pass its address or the stream object") from None
    if not 0 <= number < 1 << 64:
        raise HandleError(f"{number} is not a stream's address")
    return number


# --------------------------------------------------------------------------------------------------------------------


def _only_handle(value: Any) -> Handle:
    if isinstance(value, Handle):
        return value
    raise HandleTypeError(f"expected a cudnn_core.Handle from create_handle(), got {type(value).__name__}; {_WRAP}")


def _own_device(device: Any) -> DeviceInfo:
    """A device of this machine, which a handle needs."""
    if device is None:
        return current_device()
    info = as_device(device)
    if info.ordinal is None:
        raise HandleError(f"a handle needs a device of this machine, and {info!r} is only a description")
    return info


def _wrapped_device() -> DeviceInfo:
    """The device of a supplied backend handle whose ordinal was not given: what is current here, or an error."""
    driver = _driver.driver()
    ordinal = None if driver is None else driver.current_device()
    if ordinal is None:
        why = _driver.why_absent() or "no CUDA context is current on this thread"
        raise HandleError(f"can't tell the device of a wrapped backend handle: {why}; pass its ordinal")
    return device_info(ordinal)


def _raw(value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        raw = operator.index(value)
    except TypeError:
        raise HandleTypeError(f"a backend handle is the address of a cudnnHandle_t, got {value!r}") from None
    if raw <= 0:
        raise HandleError(f"{raw} is not the address of a cudnnHandle_t")
    return raw


def _call(what: str, function: Callable[..., object], *arguments: int) -> None:
    try:
        function(*arguments)
    except Exception as error:
        raise HandleError(f"the backend's {what} failed: {error}") from error


def _failure(destroy: Destroy, raw: int) -> HandleError | None:
    try:
        _call("destroy", destroy, raw)
    except HandleError as error:
        return error
    return None


def _push_through_provider(raw: int, stream: int) -> None:
    from ._env import require_backend

    require_backend("moving a wrapped handle to another stream").set_stream(raw, stream)


def _stream_from_provider(raw: int) -> int:
    from ._env import require_backend

    api = require_backend("asking a wrapped handle for its stream (or pass stream=)")
    try:
        return as_stream(api.get_stream(raw))
    except HandleError:
        raise
    except Exception as error:
        raise HandleError(f"the backend's get_stream failed: {error}") from error


# A child process can use neither its parent's CUDA contexts nor its handles. Marking them costs the hot path nothing.
_live: weakref.WeakSet[Handle] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for found in list(_live):
        found._lock = threading.RLock()  # another thread of the parent may hold the old one
        if found._device is not None and (found._device.type == "cuda" or found._backend is not None):
            found._clear("was created before this process was forked")
            if found._finalizer is not None:
                found._finalizer.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

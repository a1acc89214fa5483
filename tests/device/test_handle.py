"""Handles: device and stream, wrapped and attached backends, destruction. Fake driver, fake backend."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref

import pytest

from cudnn_core import _driver, _env
from cudnn_core._device import DeviceInfo, device_info
from cudnn_core._errors import DriverError, HandleError, HandleTypeError
from cudnn_core._handle import (
    Handle,
    as_stream,
    create_handle,
    destroy_handle,
    get_stream,
    handle,
    require_handle,
    set_stream,
    to_backend_handle,
)

WRAP = r"Handle\(backend_handle, ordinal, stream\)"


def in_thread(function):
    """``function()`` on a thread of its own."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


# Creation ----------------------------------------------------------------------------------------------------------


def test_a_new_handle_is_on_the_current_device_and_stream_0_without_a_backend(two_gpus):
    two_gpus.current = 1
    made = create_handle()
    assert made.device is device_info(1)
    assert get_stream(made) == made.stream == 0  # not a framework's current stream
    assert to_backend_handle(made) is None
    assert made.backend_version == 0


def test_a_handle_takes_a_device_and_a_stream(two_gpus):
    assert create_handle(1).device is device_info(1)
    assert create_handle("cuda:1", stream=0x70).stream == 0x70
    assert create_handle(device_info(0)).device is device_info(0)
    assert create_handle("cpu").device is device_info("cpu")


def test_without_a_gpu_a_handle_is_a_cpu_handle(no_gpu):
    made = create_handle()
    assert made.device is device_info("cpu")
    assert made.stream == 0


def test_a_handle_stays_on_its_device_when_another_becomes_current(two_gpus):
    made = create_handle(0)
    two_gpus.current = 1
    assert made.device is device_info(0)


def test_a_driver_error_while_creating_a_handle_raises(fake_driver, h200):
    with _driver.use_driver(fake_driver(h200, errors={"current_device": 999})), pytest.raises(DriverError):
        create_handle()


def test_a_handle_on_a_gpu_that_is_not_there_raises(no_gpu, two_gpus):
    with pytest.raises(DriverError, match="no CUDA device 2"):
        create_handle(2)
    with pytest.raises(HandleError, match="only a description"):
        create_handle(DeviceInfo.preset("B200"))


def test_the_frontends_signatures_are_kept():
    assert list(inspect.signature(Handle).parameters) == ["backend_handle", "ordinal", "stream"]
    assert list(inspect.signature(DeviceInfo).parameters) == ["ordinal"]
    assert list(inspect.signature(set_stream).parameters) == ["handle", "stream"]
    assert list(inspect.signature(get_stream).parameters) == ["handle"]
    assert list(inspect.signature(destroy_handle).parameters) == ["handle"]
    assert all(p.default is None for p in inspect.signature(create_handle).parameters.values())
    assert handle is Handle


# Identity ----------------------------------------------------------------------------------------------------------


def test_handles_work_as_dict_keys_in_conditions_and_in_comparisons(two_gpus):
    first, second = create_handle(), create_handle()
    assert {first: 1, second: 2}[first] == 1
    assert first
    assert (first == "auto") is False
    assert first != second
    assert first in [first]
    destroy_handle(first)
    assert first  # still: truth says nothing about being open
    assert {first: 1}[first] == 1


def test_a_handle_is_no_number(two_gpus):
    made = Handle(0xC010, 0, 0)
    for convert in (int, float, hex, bin):
        with pytest.raises(TypeError):
            convert(made)
    for name in ("__eq__", "__hash__", "__bool__"):
        assert name not in vars(Handle)


def test_a_handle_can_be_neither_copied_nor_pickled(two_gpus):
    made = create_handle()
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(HandleTypeError, match="copied nor pickled"):
            attempt(made)


@pytest.mark.parametrize("raw", [0xC010, 0, "0xc010", None, object()])
@pytest.mark.parametrize(
    "call", [get_stream, destroy_handle, require_handle, to_backend_handle, lambda value: set_stream(value, 0)]
)
def test_a_raw_handle_is_a_type_error_that_says_how_to_wrap_it(call, raw):
    if raw is None and call is to_backend_handle:
        assert to_backend_handle(None) is None
        return
    with pytest.raises(HandleTypeError, match=WRAP) as caught:
        call(raw)
    assert isinstance(caught.value, TypeError)
    assert type(raw).__name__ in str(caught.value)


# Streams -----------------------------------------------------------------------------------------------------------


class TorchStream:
    cuda_stream = 0x11


class ProtocolStream:
    def __cuda_stream__(self):
        return (0, 0x22)


class OldProtocolStream:
    __cuda_stream__ = (0, 0x33)


class CupyStream:
    ptr = 0x44


class Integral:
    def __index__(self):
        return 0x55


class CUstream:
    """As cuda-bindings has it before 13: a number, but no index."""

    def __int__(self):
        return 0x66

    def getPtr(self):
        return id(self)  # where the number is, not the number


class cudaStream_t(CUstream):
    pass


class CUevent:
    """As cuda-bindings 13 has it: a number and an index, but no stream."""

    def __index__(self):
        return 0x66

    def getPtr(self):
        return id(self)


@pytest.mark.parametrize(
    ("stream", "address"),
    [
        (7, 7),
        (0, 0),
        (TorchStream(), 0x11),
        (ProtocolStream(), 0x22),
        (OldProtocolStream(), 0x33),
        (CupyStream(), 0x44),
        (Integral(), 0x55),
        (CUstream(), 0x66),
        (cudaStream_t(), 0x66),
    ],
)
def test_stream_objects_are_accepted(no_gpu, stream, address):
    made = create_handle()
    set_stream(made, stream)
    assert get_stream(made) == address
    assert create_handle(stream=stream).stream == address


@pytest.mark.parametrize("stream", [None, True, 1.5, "0", object(), CUevent()])
def test_something_that_is_no_stream_is_refused_and_changes_nothing(no_gpu, stream):
    made = create_handle(stream=9)
    with pytest.raises(HandleTypeError, match="is not a stream"):
        set_stream(made, stream)
    assert get_stream(made) == 9
    for number in (-1, 1 << 64):
        with pytest.raises(HandleError, match=f"{number} is not a stream"):
            set_stream(made, number)


def test_the_streams_of_the_installed_cuda_bindings_are_accepted_and_its_events_not():
    driver = pytest.importorskip("cuda.bindings.driver")
    runtime = pytest.importorskip("cuda.bindings.runtime")
    assert as_stream(driver.CUstream(0x77)) == 0x77
    assert as_stream(runtime.cudaStream_t(0x78)) == 0x78
    with pytest.raises(HandleTypeError, match="is not a stream"):
        as_stream(driver.CUevent(0x79))


def test_set_stream_reaches_the_backend_only_on_change(two_gpus, backend):
    made = create_handle(0)
    raw = backend.attach(made)
    backend.calls.clear()
    for stream in (7, 7, 7, 8, 8, 0):
        set_stream(made, stream)
    assert backend.calls == [("set_stream", raw, 7), ("set_stream", raw, 8), ("set_stream", raw, 0)]


def test_get_stream_makes_no_call(two_gpus, backend):
    made = create_handle(0, stream=7)
    backend.attach(made)
    backend.calls.clear()
    with _driver.use_driver(_driver.PoisonedDriver()):
        assert get_stream(made) == 7
        assert made.device.ordinal == 0
    assert backend.calls == []


def test_a_stream_that_the_backend_refuses_is_not_taken(two_gpus, backend):
    made = create_handle(0)
    refused = []

    def refuse(raw, stream):
        if stream == 7:
            refused.append(stream)
            raise RuntimeError("CUDNN_STATUS_BAD_PARAM")

    made.attach_backend(0xC010, set_stream=refuse, destroy=lambda raw: None, version=1)
    with pytest.raises(HandleError, match=r"set_stream failed.*BAD_PARAM"):
        set_stream(made, 7)
    assert get_stream(made) == 0
    with pytest.raises(HandleError):  # not skipped as unchanged
        set_stream(made, 7)
    assert refused == [7, 7]


# An attached backend -----------------------------------------------------------------------------------------------


def test_attaching_moves_the_backend_to_the_stream_that_is_set(two_gpus, backend):
    made = create_handle(0, stream=5)
    set_stream(made, 7)
    assert backend.calls == []  # python engines never need a backend
    raw = backend.attach(made)
    assert backend.streams[raw] == 7
    assert to_backend_handle(made) == made.backend_handle == raw
    assert made.backend_version == 92700


def test_a_backend_is_attached_once(two_gpus, backend):
    made = create_handle(0)
    raw = backend.attach(made)
    with pytest.raises(HandleError, match="has a backend already"):
        made.attach_backend(0xD000, set_stream=backend.set_stream, destroy=backend.destroy, version=1)
    with pytest.raises(HandleError, match="has a backend already"):
        Handle(0xC010, 0, 0).attach_backend(1, set_stream=backend.set_stream, destroy=backend.destroy, version=1)
    assert to_backend_handle(made) == raw
    destroy_handle(made)
    assert [call for call in backend.calls if call[0] == "destroy"] == [("destroy", raw)]


def test_attaching_holds_the_handles_lock(two_gpus, backend):
    made = create_handle(0)
    waited = []

    def set_stream_while_others_wait(raw, stream):
        thread = threading.Thread(target=lambda: (made.lock.acquire(), waited.append("after"), made.lock.release()))
        thread.start()
        thread.join(0.05)
        waited.append("during")
        waited.append(thread)

    made.attach_backend(1, set_stream=set_stream_while_others_wait, destroy=lambda raw: None, version=1)
    waited[1].join()
    assert [waited[0], waited[2]] == ["during", "after"]


def test_threads_that_create_under_the_lock_attach_one_backend(two_gpus, backend):
    made = create_handle(0)
    start = threading.Barrier(8)

    def first_use():
        start.wait()
        with made.lock:
            if made.backend_handle is None:
                backend.attach(made)

    threads = [threading.Thread(target=first_use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [call[0] for call in backend.calls].count("create") == 1


def test_a_backend_that_fails_to_attach_leaves_the_handle_as_it_was(two_gpus, backend):
    made = create_handle(0, stream=7)

    def fail(raw, stream):
        raise RuntimeError("no")

    with pytest.raises(HandleError, match="set_stream failed"):
        made.attach_backend(0xD000, set_stream=fail, destroy=backend.destroy, version=1)
    assert to_backend_handle(made) is None
    backend.attach(made)
    destroy_handle(made)
    assert ("destroy", 0xD000) not in backend.calls  # it stayed the caller's


@pytest.mark.parametrize("raw", [0, -1, None, True, "c", 1.0])
def test_an_address_that_is_none_is_refused(two_gpus, backend, raw):
    with pytest.raises(HandleError):
        create_handle(0).attach_backend(raw, set_stream=backend.set_stream, destroy=backend.destroy, version=1)
    if raw is not None:
        with pytest.raises(HandleError):
            Handle(raw, 0, 0)


def test_to_backend_handle_never_creates_one(two_gpus, backend, monkeypatch):
    monkeypatch.setattr(_env, "backend", lambda: pytest.fail("asked for the backend"))
    assert to_backend_handle(create_handle(0)) is None
    assert to_backend_handle(Handle(0xC010, 1, 7)) == 0xC010


# Threads -----------------------------------------------------------------------------------------------------------


def test_each_further_thread_gets_a_child_of_its_own_destroyed_with_the_handle(two_gpus, backend):
    made = create_handle(0)
    raw = backend.attach(made)
    assert backend.thread_backend(made) == raw
    start = threading.Barrier(3)
    children = []

    def use():
        start.wait()  # all alive at once, so that no ident is reused
        mine = backend.thread_backend(made)
        assert backend.thread_backend(made) == mine
        children.append(mine)
        start.wait()

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({raw, *children}) == 4
    assert set(backend.streams) == {raw, *children}
    destroy_handle(made)
    assert backend.streams == {}
    assert backend.calls[-1] == ("destroy", raw)  # the children go first
    assert [call[0] for call in backend.calls].count("destroy") == 4


def test_a_child_follows_the_handles_stream_and_is_told_only_on_change(two_gpus, backend):
    made = create_handle(0)
    backend.attach(made)

    def use():
        child = backend.thread_backend(made)
        assert backend.streams[child] == 0
        set_stream(made, 7)
        backend.calls.clear()
        assert backend.thread_backend(made) == backend.thread_backend(made) == child
        return child, list(backend.calls)

    child, calls = in_thread(use)
    assert calls == [("set_stream", child, 7)]


def test_children_of_two_handles_are_apart(two_gpus, backend):
    first, second = create_handle(0), create_handle(1)
    backend.attach(first)
    backend.attach(second)
    children = in_thread(lambda: (backend.thread_backend(first), backend.thread_backend(second)))
    destroy_handle(first)
    assert children[0] not in backend.streams
    assert children[1] in backend.streams
    destroy_handle(second)


def test_a_thread_needs_an_attached_backend_first(two_gpus, backend):
    with pytest.raises(HandleError, match="attach_backend comes first"):
        backend.thread_backend(create_handle(0))


# Wrapped backends --------------------------------------------------------------------------------------------------


def test_a_wrapped_handle_is_never_destroyed_by_us_and_its_children_are(two_gpus, backend):
    raw = backend.create()
    made = Handle(raw, 1, 7)
    assert (made.backend_handle, made.device, made.stream) == (raw, device_info(1), 7)
    child = in_thread(lambda: backend.thread_backend(made))
    destroy_handle(made)
    assert ("destroy", raw) not in backend.calls
    assert ("destroy", child) in backend.calls


def test_a_wrapped_handle_takes_its_device_from_the_driver_and_its_stream_from_the_backend(
    two_gpus, backend, monkeypatch
):
    monkeypatch.setattr(_env, "backend", lambda: backend)
    two_gpus.current = 1
    raw = backend.create()
    backend.set_stream(raw, 9)
    made = Handle(raw)
    assert (made.device, made.stream) == (device_info(1), 9)
    set_stream(made, 10)
    assert backend.streams[raw] == 10


def test_a_failed_query_on_a_supplied_handle_raises_and_never_falls_back(fake_driver, h200, backend, monkeypatch):
    with _driver.use_driver(fake_driver(h200, errors={"current_device": 201})), pytest.raises(DriverError):
        Handle(0xC010, stream=0)
    with _driver.use_driver(fake_driver(h200)), pytest.raises(HandleError, match=r"no CUDA context.*pass its ordinal"):
        Handle(0xC010, stream=0)
    with _driver.use_driver(None), pytest.raises(HandleError, match="pass its ordinal"):
        Handle(0xC010, stream=0)
    monkeypatch.setattr(_env, "backend", lambda: backend)
    with _driver.use_driver(fake_driver(h200)), pytest.raises(HandleError, match="get_stream failed"):
        Handle(0xBAD, 0)  # the backend knows no such handle


def test_a_wrapped_handle_without_a_backend_plugin_names_the_package(two_gpus, monkeypatch):
    monkeypatch.setattr(_env, "backend", lambda: None)
    with pytest.raises(HandleError, match=r"pip install \"cudnn-core\[backend\]\""):
        Handle(0xC010, 0)
    made = Handle(0xC010, 0, 7)
    with pytest.raises(HandleError, match=r"cudnn-core\[backend\]"):
        set_stream(made, 8)
    assert get_stream(made) == 7


def test_a_handle_without_a_backend_can_be_constructed_for_a_device(two_gpus):
    made = Handle(None, 1)
    assert (made.backend_handle, made.device, made.stream) == (None, device_info(1), 0)


# Destruction -------------------------------------------------------------------------------------------------------


def test_destroying_twice_is_a_no_op(two_gpus, backend):
    made = create_handle(0)
    raw = backend.attach(made)
    destroy_handle(made)
    destroy_handle(made)
    made.destroy()
    assert backend.calls.count(("destroy", raw)) == 1


def test_use_after_destroy_is_a_clear_error(two_gpus, backend):
    made = create_handle(0, stream=7)
    backend.attach(made)
    destroy_handle(made)
    uses = [
        lambda: get_stream(made),
        lambda: set_stream(made, 7),
        lambda: set_stream(made, 0),
        lambda: to_backend_handle(made),
        lambda: require_handle(made),
        lambda: made.device,
        made.__enter__,
        lambda: backend.attach(made),
        lambda: backend.thread_backend(made),
    ]
    for use in uses:
        with pytest.raises(HandleError, match="this Handle was destroyed") as caught:
            use()
        assert not isinstance(caught.value, TypeError)
    assert made.closed
    assert repr(made) == "<Handle that was destroyed>"


def test_a_handle_is_a_context_manager(two_gpus, backend):
    with create_handle(1) as made:
        raw = backend.attach(made)
        assert made.device.ordinal == 1
    assert made.closed
    assert ("destroy", raw) in backend.calls
    with pytest.raises(ZeroDivisionError), create_handle(0) as other:
        raise ZeroDivisionError
    assert other.closed


def test_a_failing_destroy_still_clears_the_handle_and_frees_the_rest(two_gpus, backend):
    made = create_handle(0)
    raw = backend.attach(made)

    def fail(raw):
        raise RuntimeError("lost")

    in_thread(lambda: made.thread_backend(backend.create, set_stream=backend.set_stream, destroy=fail))
    with pytest.raises(HandleError, match="destroy failed: lost"):
        destroy_handle(made)
    assert ("destroy", raw) in backend.calls
    assert made.closed
    destroy_handle(made)


def test_a_dropped_handle_frees_its_backend(two_gpus, backend):
    made = create_handle(0)
    raw = backend.attach(made)
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    assert ("destroy", raw) in backend.calls


def test_a_backend_is_left_to_the_process_at_exit(python):
    """Destroying a backend while CUDA is being torn down can crash."""
    code = """
from cudnn_core._handle import create_handle
kept = create_handle("cpu")
kept.attach_backend(5, set_stream=lambda raw, stream: None, destroy=lambda raw: print("destroyed"), version=1)
"""
    assert python(code) == ""


def test_reprs_name_device_stream_and_backend(two_gpus):
    assert repr(create_handle(1, stream=16)) == "<Handle cuda:1 stream=0x10>"
    assert repr(Handle(0xC010, 0, 0)) == "<Handle cuda:0 stream=0x0 backend=0xc010>"
    assert repr(create_handle("cpu")) == "<Handle cpu stream=0x0>"


# Fork --------------------------------------------------------------------------------------------------------------

FORK = """
import gc, os, signal, threading, warnings
warnings.simplefilter("ignore")
from cudnn_core import _driver
from cudnn_core._errors import HandleError
from cudnn_core._handle import Handle, create_handle, destroy_handle, get_stream

class Driver:
    def device_count(self): return 1
    def current_device(self): return 0
    def driver_version(self): return 13000
    def attribute(self, name, ordinal): return 9
    def name(self, ordinal): return "fake"
    def total_memory(self, ordinal): return 1

destroyed = []
with _driver.use_driver(Driver()):
    gpu, cpu = create_handle(), create_handle("cpu")
    gpu.attach_backend(5, set_stream=lambda raw, stream: None, destroy=destroyed.append, version=1)
    def hold():
        with gpu.lock, _driver.lock:
            held.set()
            release.wait()
    held, release = threading.Event(), threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    read, write = os.pipe()
    if os.fork() == 0:
        signal.alarm(20)  # a deadlock must not outlive the test
        out = []
        try:
            get_stream(gpu)
        except HandleError as error:
            out.append(str(error))
        out.append(get_stream(cpu))
        out.append(gpu.lock.acquire(timeout=1) and _driver.lock.acquire(timeout=1))
        destroy_handle(gpu)
        del gpu
        gc.collect()
        out.append(destroyed)
        out.append(create_handle().device.type)
        os.write(write, repr(out).encode())
        os._exit(0)
    release.set()
    os.wait()
    print(os.read(read, 10000).decode())
    assert get_stream(gpu) == 0  # the parent's goes on
"""


def test_a_forked_child_is_told_not_to_use_its_parents_gpu_handle(python):
    message, cpu_stream, lock_free, destroyed, device_of_a_new_one = eval(python(FORK))
    assert "was created before this process was forked" in message
    assert (cpu_stream, lock_free, destroyed, device_of_a_new_one) == (0, True, [], "cuda")

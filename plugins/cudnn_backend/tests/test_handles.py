"""Raw handles: one for each thread, or those of a Handle; made late, moved only on change, destroyed once."""

from __future__ import annotations

START = "from programs import *\n"


def test_the_stream_is_set_only_when_it_changes(fake):
    fake.run(
        START
        + """
graph, count = matmul(), Fake()
run = build(graph).bind(layout(graph))
sets = []
for stream in (0, 7, 7, 8, 8, 7):
    run((256, 512, 768), 4096, stream)
    sets.append((count.get("set_streams"), count.last()["stream"]))
assert sets == [(0, 0), (1, 7), (1, 7), (2, 8), (2, 8), (3, 7)], sets
assert count.get("handles") == 1
"""
    )


def test_plans_share_the_handle_of_a_thread_and_it_goes_with_the_thread(fake):
    fake.run(
        START
        + """
import threading
graph, count = matmul(), Fake()
runs = [build(graph).bind(layout(graph)), build(matmul(128)).bind(layout(matmul(128)))]
work = lambda: [run((256, 512, 768), 4096, 0) for run in runs for _ in range(3)]
work()
assert count.get("handles") == 1
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
del threads, thread
assert (count.get("handles"), count.get("destroyed")) == (3, 2), (count.get("handles"), count.get("destroyed"))
"""
    )


def test_execute_uses_the_handles_own_raw_handle(fake):
    fake.run(
        START
        + """
import threading
from cudnn_core import VariantPack, to_backend_handle
count, graph = Fake(), matmul()
plan = build(graph)
pack = VariantPack(layout(graph), (256, 512, 768))
with present_gpu():
    handle = cudnn_core.create_handle(0, 5)
    go = lambda: plan.execute(pack, ExecutionContext(handle, handle.device, handle.stream, 4096))
    go()
    raw = to_backend_handle(handle)
    assert raw and handle.backend_version == 91900
    assert count.last() == {"pointers": {1: 256, 2: 512, 3: 768}, "workspace": 4096, "stream": 5, "engine": 0}
    assert count.get("last_handle") == raw
    handle.set_stream(6)
    go()
    assert (count.last()["stream"], count.get("last_handle"), count.get("set_streams")) == (6, raw, 2)
    children = []
    def elsewhere():
        go()
        go()
        children.append(count.get("last_handle"))
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert children[0] != raw and count.get("handles") == 2
    assert count.last()["stream"] == 6
    handle.destroy()
    assert count.get("destroyed") == 2
"""
    )


def test_a_handle_that_cudnn_does_not_make_is_an_execution_error(fake):
    fake.run(
        START
        + """
import threading
graph, count = matmul(), Fake()
plan = build(graph)
count.set("create_status", 1001)
def refused(call):
    try:
        call()
    except cudnn_core.ExecutionError as error:
        assert "no handle on cuda:0" in str(error), error
    else:
        raise AssertionError
refused(lambda: plan.bind(layout(graph)))
count.set("create_status", 0)
run = plan.bind(layout(graph))
count.set("create_status", 1001)
run((256, 512, 768), 4096, 0)  # this thread has its own by now
seen = []
thread = threading.Thread(target=lambda: (refused(lambda: run((256, 512, 768), 4096, 0)), seen.append(1)))
thread.start()
thread.join()
assert seen and count.get("executions") == 1
"""
    )


def test_binding_makes_the_handle_so_that_a_run_can_be_captured(fake):
    fake.run(
        START
        + """
graph, count = matmul(), Fake()
run = build(graph).bind(layout(graph))
assert count.get("handles") == 1
run((256, 512, 768), 4096, 0)
assert count.get("handles") == 1
"""
    )


def test_a_wrapped_handle_is_used_as_it_is_and_never_destroyed(fake):
    fake.run(
        START
        + """
import threading
from cudnn_core import Handle, VariantPack
from cudnn_backend import library
count, graph = Fake(), matmul()
plan = build(graph)
raw = library.load().module.create_handle()
pack = VariantPack(layout(graph), (256, 512, 768))
with present_gpu():
    library.load().module._raw_set_stream(raw, 9)
    handle = Handle(raw, 0)
    assert handle.stream == 9  # asked of cuDNN
    go = lambda: plan.execute(pack, ExecutionContext(handle, handle.device, handle.stream, 4096))
    go()
    assert (count.get("last_handle"), count.last()["stream"]) == (raw, 9)
    handle.set_stream(10)
    go()
    assert (count.get("last_handle"), count.last()["stream"]) == (raw, 10)
    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    assert count.get("last_handle") != raw and count.last()["stream"] == 10
    handle.destroy()
    assert (count.get("handles"), count.get("destroyed")) == (2, 1)  # the child's
"""
    )


def test_a_stream_of_the_call_that_is_not_the_handles_leaves_the_handle_alone(fake):
    fake.run(
        START
        + """
from cudnn_core import VariantPack, to_backend_handle
count, graph = Fake(), matmul()
plan = build(graph)
with present_gpu():
    handle = cudnn_core.create_handle(0, 5)
    plan.execute(VariantPack(layout(graph), (256, 512, 768)), ExecutionContext(handle, handle.device, 8, 4096))
    assert count.last()["stream"] == 8 and to_backend_handle(handle) is None
"""
    )


def test_a_handle_is_made_on_the_plans_device_and_the_callers_context_comes_back(fake):
    """cuDNN takes the device that is current; a fresh thread has the first one."""
    fake.run(
        START
        + """
import sys, types
calls = []
driver = types.ModuleType("cuda.bindings.driver")
driver.cuCtxGetDevice = lambda: (0, 0)
driver.cuDevicePrimaryCtxRetain = lambda ordinal: (0, f"context {ordinal}")
driver.cuCtxPushCurrent = lambda context: calls.append(("push", context))
driver.cuCtxPopCurrent = lambda: calls.append(("pop",))
import cuda.bindings
sys.modules["cuda.bindings.driver"] = cuda.bindings.driver = driver
from cudnn_backend import handles, library
loaded = library.load()
def create():
    calls.append(("create",))
    return 1
handles.create(types.SimpleNamespace(module=types.SimpleNamespace(create_handle=create)), 0)
assert calls == [("create",)]
calls.clear()
handles.create(types.SimpleNamespace(module=types.SimpleNamespace(create_handle=create)), 1)
assert calls == [("push", "context 1"), ("create",), ("pop",)], calls
"""
    )


def test_a_forked_child_does_not_destroy_its_parents_handles(fake):
    fake.run(
        START
        + """
import os
from cudnn_backend import handles, library
count, graph = Fake(), matmul()
build(graph).bind(layout(graph))((256, 512, 768), 4096, 0)
mine = handles.per_thread(library.load(), 0)
child = os.fork()
if child == 0:
    del mine.held
    os._exit(count.get("destroyed"))
assert os.waitpid(child, 0)[1] == 0
del mine.held
assert count.get("destroyed") == 1
"""
    )

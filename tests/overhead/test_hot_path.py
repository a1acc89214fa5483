"""Execution knows nothing of registries: which code runs, and what it allocates."""

from __future__ import annotations

import dis
import gc
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch

import cudnn_core

PACKAGE = Path(cudnn_core.__file__).resolve().parent
# All that steady-state execution may run of the core.
HOT = {"_plan.py", "_pack.py", "_graph/_classic.py", "_handle.py"}


def codes_run(call):
    """Every Python code object that ``call`` runs, and every C function that it calls by name."""
    codes, builtins = {}, []

    def hook(frame, event, argument):
        if event == "call":
            codes[frame.f_code] = None
        elif event == "c_call":
            builtins.append(argument.__name__)

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    codes.pop(call.__code__, None)
    return list(codes), [name for name in builtins if name != "setprofile"]


def files(codes):
    return {str(Path(code.co_filename).resolve()) for code in codes}


def calls(ready):
    """Every form in which a steady-state execution may come."""
    plan, graph = ready.plan, ready.graph
    space = torch.zeros(plan.workspace_size or 1, dtype=torch.uint8)
    names = tuple(ready.uids)
    ordered = tuple(ready.uids.values())
    run = plan.bind(ready.pack)
    pointers = ready.pack.pointers
    return {
        "bound run": lambda: run(pointers, 0, 0),
        "pack": lambda: plan.execute(ready.pack, space),
        "addresses": lambda: plan.execute(ready.addresses, space),
        "torch by tensor": lambda: graph.execute(ready.tensors, space),
        "torch by uid": lambda: graph.execute(ready.uids, space),
        "in order": lambda: graph.execute(ordered, space, tensor_uids=names),
    }


FORMS = ["bound run", "pack", "addresses", "torch by tensor", "torch by uid", "in order"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["noop", "noop_with_workspace"])
def test_execution_runs_the_plan_and_nothing_else_of_the_core(request, kind, form):
    call = calls(request.getfixturevalue(kind))[form]
    call()
    codes, _ = codes_run(call)
    allowed = {str(PACKAGE / name) for name in HOT}
    launch = request.getfixturevalue(kind).launch.__code__
    assert launch in codes, "the engine was not called"
    assert files(code for code in codes if code is not launch) <= allowed
    if form == "bound run":
        assert codes == [launch]


@pytest.mark.parametrize("form", FORMS)
def test_execution_takes_no_lock_imports_nothing_and_reads_no_environment(noop_with_workspace, form, monkeypatch):
    call = calls(noop_with_workspace)[form]
    call()
    codes, builtins = codes_run(call)
    for code in codes:
        names = {instruction.opname for instruction in dis.get_instructions(code)}
        assert not names & {"BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL"} or _without_with(code), code
        if code.co_name in ("execute", "read"):
            assert "IMPORT_NAME" not in names, code
        assert not {"environ", "getenv"} & set(code.co_names), code
    assert not {"acquire", "release", "getenv", "__import__", "open"} & set(builtins)


def _without_with(code):
    """LOAD_SPECIAL (3.14) also serves other statements than ``with``; ``__enter__`` is the one that matters."""
    return not any("__enter__" in str(instruction.argrepr) for instruction in dis.get_instructions(code))


def test_the_profiler_would_notice_the_registry_and_a_lock(noop):
    lock = threading.Lock()

    def call():
        cudnn_core.registry()
        lock.acquire()
        lock.release()

    call()
    codes, builtins = codes_run(call)
    assert str(PACKAGE / "_registry.py") in files(codes)
    assert {"acquire", "release"} <= set(builtins)


def test_binding_an_engine_that_binds_gives_its_own_callable(noop):
    assert noop.plan.bind(noop.pack) is noop.launch


def test_a_plan_binds_once_and_not_per_call(noop, monkeypatch):
    bound = []
    monkeypatch.setattr(noop.plan, "_bind", lambda layout: bound.append(layout) or noop.launch)
    for _ in range(3):
        noop.plan.execute(noop.addresses)
        noop.plan.execute(noop.tensors)
    assert len(bound) <= 1


@pytest.mark.parametrize("form", ["bound run", "pack"])
def test_steady_state_allocates_nothing(noop, form):
    call = calls(noop)[form]
    turns = range(1000)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in turns:
            call()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in turns:
            call()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert after - before == 0
    assert peak - before <= 64  # the tracer's own
    assert allocating(lambda: [0] * 100) > 64


@pytest.mark.parametrize("form", FORMS)
def test_execution_leaves_nothing_behind(noop_with_workspace, form):
    call = calls(noop_with_workspace)[form]
    for _ in range(50):
        call()
    assert allocating(call, kept=True) == 0


def allocating(call, *, kept=False):
    """Bytes that 100 calls allocate at their peak, or leave behind."""
    tracemalloc.start()
    try:
        call()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(100):
            call()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before if kept else peak - before


def test_addresses_that_never_repeat_do_not_pile_up(noop):
    step = 1 << 20
    for turn in range(600):
        noop.plan.execute({uid: (index + 1 + 8 * turn) * step for index, uid in enumerate(noop.addresses)})
    assert len(noop.plan._layout._seen[3]) <= 256

"""Execution knows nothing of registries: which code runs, and what it allocates."""

from __future__ import annotations

import dis
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch

import cudnn_core

PACKAGE = Path(cudnn_core.__file__).resolve().parent
WITH = {"SETUP_WITH", "BEFORE_WITH"}  # Python 3.10, and 3.11 to 3.13; 3.14 loads __enter__ by name
NAMES = {"__enter__", "acquire", "environ", "getenv", "open"}
# All that steady-state execution may run of the core.
HOT = {"_plan.py", "_pack.py", "_handle.py", "_graph/_classic.py", "_graph/_calls.py"}


def codes_run(call):
    """Every Python code object that ``call`` runs, but for its own."""
    codes = {}
    sys.setprofile(lambda frame, event, argument: codes.setdefault(frame.f_code) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    codes.pop(call.__code__, None)
    return list(codes)


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


def steady(ready, form):
    """The call in its steady state: layouts are known after the first call, addresses after the second."""
    call = calls(ready)[form]
    for _ in range(3):
        call()
    return call


FORMS = ["bound run", "pack", "addresses", "torch by tensor", "torch by uid", "in order"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["noop", "noop_with_workspace"])
def test_execution_runs_the_plan_and_nothing_else_of_the_core(request, kind, form):
    call = steady(request.getfixturevalue(kind), form)
    codes = codes_run(call)
    allowed = {str(PACKAGE / name) for name in HOT}
    launch = request.getfixturevalue(kind).launch.__code__
    assert launch in codes, "the engine was not called"
    assert files(code for code in codes if code is not launch) <= allowed
    if form == "bound run":
        assert codes == [launch]


@pytest.mark.parametrize("form", FORMS)
def test_execution_takes_no_lock_imports_nothing_and_reads_no_environment(noop_with_workspace, form):
    call = steady(noop_with_workspace, form)
    assert forbidden(call) == []


def forbidden(call):
    """The instructions that ``call`` executes and a steady state may not: locks, imports, environment."""
    return [
        (code.co_name, instruction.opname, instruction.argval)
        for code, instruction in instructions_run(call)
        if instruction.opname in WITH or instruction.opname == "IMPORT_NAME" or instruction.argval in NAMES
    ]


def instructions_run(call):
    """(code, instruction) of everything that ``call`` executes in Python."""
    known, executed = {}, []

    def trace(frame, event, argument):
        frame.f_trace_opcodes = True
        if event == "opcode":
            code = frame.f_code
            if code not in known:
                known[code] = {instruction.offset: instruction for instruction in dis.get_instructions(code)}
            executed.append((code, known[code][frame.f_lasti]))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return executed


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("with lock: pass", "WITH"),
        ("lock.acquire(); lock.release()", "acquire"),
        ("import json", "json"),
        ("import os; os.environ.get('HOME')", "environ"),
    ],
)
def test_a_forbidden_instruction_is_noticed_and_one_that_does_not_run_is_not(line, what):
    scope = {"lock": threading.Lock()}
    exec(f"def call(run=True):\n    if run:\n        {line}", scope)
    found = forbidden(scope["call"])
    assert any(what in f"{opname} {argument}" for _, opname, argument in found) or sys.version_info >= (3, 14), found
    assert forbidden(lambda: scope["call"](False)) == []


def test_the_profiler_would_notice_the_registry():
    def ask():
        cudnn_core.registry()

    assert str(PACKAGE / "_registry.py") in files(codes_run(ask))


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
    measurement = allocating(lambda: None)
    assert allocating(call) == measurement
    assert allocating(lambda: call() or bytes(200)) > measurement


@pytest.mark.parametrize("form", FORMS)
def test_execution_leaves_nothing_behind(noop_with_workspace, form):
    call = calls(noop_with_workspace)[form]
    assert allocating(call, kept=True) < 100  # of 100 calls; the measurement itself keeps a number


def allocating(call, *, kept=False):
    """Bytes that 100 calls allocate at their peak, or leave behind: the least of three runs, as other threads of the process are counted, too."""
    return min(_allocating(call, kept) for _ in range(3))


def _allocating(call, kept):
    tracemalloc.start()
    try:
        for _ in range(100):  # the interpreter's free lists count as allocated once they are full
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

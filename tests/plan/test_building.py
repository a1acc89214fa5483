"""Compiled plans are shared and built once, and nobody waits for itself: engines and hooks that plan, threads, forks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

import cudnn_core
from cudnn_core import Graph, PlanConfig, Support, configure
from cudnn_core.testing import temporary_plugin

F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}
PACK = {"x": 1 << 20, "y": 1 << 21}


class Plan:
    workspace_size = 0

    def execute(self, pack, ctx):
        pass


class Engine:
    def check_support(self, graph, ctx):
        return Support((PlanConfig("", {}),))

    def build_plan(self, graph, config, ctx):
        return Plan()


def relu(*dim):
    g = Graph(**F32)
    g.relu(g.tensor(dim=dim, name="x")).set_output(True).set_name("y")
    return g


def plugin(*classes, **more):
    """Engines a, b, ... of these classes, the first preferred."""
    names = "abc"[: len(classes)]
    rows = [
        {"name": name, "ops": ["*"], "anchors": ["*"], "devices": ["cpu"], "efficiency": 0.7 - 0.2 * index}
        for index, name in enumerate(names)
    ]
    return temporary_plugin(
        {"plugin": "p", "engine": rows}, dict(zip(names, classes, strict=True)), isolated=True, **more
    )


def in_time(*calls, limit=20):
    """Their results, from one thread each; fails if one hangs."""
    results = [None] * len(calls)

    def run(index):
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


@pytest.mark.parametrize("steps_aside", [True, False])
def test_an_engine_may_plan_its_own_graph_while_it_builds(steps_aside):
    graph = relu(2, 3)
    inner = []

    class Tuner(Engine):
        def build_plan(self, graph_, config, ctx):
            with configure(disable=["p:a"] if steps_aside else []):
                inner.append(graph.plan(device="cpu").engine)
            return Plan()

    with plugin(Tuner, Engine):
        (plan,) = in_time(lambda: graph.plan(device="cpu"))
    assert (plan.engine, inner) == ("p:a@1", ["p:b@1"])


def test_a_hook_may_plan_the_graph_whose_engine_failed(caplog):
    graph = relu(2, 4)
    inner = []

    class Broken(Engine):
        def build_plan(self, graph, config, ctx):
            raise ValueError("crash")

    class Hooks:
        def cudnn_core_engine_failed(self, failure):
            inner.append(graph.plan(device="cpu").engine)

    with plugin(Broken, Engine, hooks=[Hooks()]):
        (plan,) = in_time(lambda: graph.plan(device="cpu"))
    assert (plan.engine, inner) == ("p:b@1", ["p:b@1"])


def test_a_hook_that_plans_is_not_called_for_its_own_plans():
    seen = []

    class Hooks:
        def cudnn_core_plan_selected(self, decision):
            seen.append(decision)
            relu(3, 3).plan(device="cpu")

    with plugin(Engine, hooks=[Hooks()]):
        relu(2, 5).plan(device="cpu")
    assert len(seen) == 1


def test_two_threads_may_plan_each_others_graphs():
    graphs = [relu(2, 6), relu(2, 7)]
    both_build = threading.Barrier(2)
    nested = threading.local()

    class Crossing(Engine):
        def build_plan(self, graph, config, ctx):
            if not getattr(nested, "yes", False):
                nested.yes = True
                both_build.wait(10)
                graphs[graph.key == graphs[0].key()].plan(device="cpu")
            return Plan()

    with plugin(Crossing):
        plans = in_time(*(lambda g=graph: g.plan(device="cpu") for graph in graphs))
    assert [plan.engine for plan in plans] == ["p:a@1"] * 2


def test_many_threads_compile_once():
    built = []

    class Slow(Engine):
        def build_plan(self, graph, config, ctx):
            built.append(config)
            time.sleep(0.05)
            return Plan()

    with plugin(Slow):
        plans = in_time(*[lambda: relu(2, 8).plan(device="cpu")] * 6)
        assert len({id(plan._compiled) for plan in plans}) == len(built) == 1


def test_a_failure_is_everyones_who_waits_and_an_interrupt_only_its_own(caplog):
    entered = threading.Event()
    attempts = []

    class Interrupted(Engine):
        def build_plan(self, graph, config, ctx):
            attempts.append(threading.current_thread())
            if len(attempts) == 1:
                entered.set()
                time.sleep(0.1)
                raise KeyboardInterrupt
            return Plan()

    def first():
        try:
            relu(2, 9).plan(device="cpu")
        except KeyboardInterrupt:
            return "interrupted"

    def second():
        entered.wait(10)
        return relu(2, 9).plan(device="cpu").engine

    with plugin(Interrupted):
        assert in_time(first, second) == ["interrupted", "p:a@1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("where", ["build", "import"])
def test_a_child_forked_during_a_build_can_plan(where):
    entered, leave = threading.Event(), threading.Event()

    class Slow(Engine):
        def pause(self, stage):
            if where == stage and threading.current_thread() is not threading.main_thread():
                entered.set()
                leave.wait(10)

        def __init__(self):
            self.pause("import")

        def build_plan(self, graph, config, ctx):
            self.pause("build")
            return Plan()

    with plugin(Slow):
        thread = threading.Thread(target=lambda: relu(2, 10).plan(device="cpu"))
        thread.start()
        entered.wait(10)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            try:
                os._exit(0 if relu(2, 10).plan(device="cpu").engine == "p:a@1" else 1)
            finally:
                os._exit(2)
        leave.set()
        thread.join()
        assert os.waitpid(child, 0)[1] == 0


def test_a_shared_plan_belongs_to_no_handle():
    seen = []

    class Looking(Engine):
        def build_plan(self, graph, config, ctx):
            seen.append(ctx.handle)
            return Plan()

    with plugin(Looking):
        handles = [cudnn_core.create_handle(device="cpu") for _ in range(2)]
        plans = [relu(2, 11).plan(handle=handle) for handle in handles]
        cudnn_core.destroy_handle(handles[0])
        plans[1].execute(PACK)
    assert seen == [None]


def test_engines_that_no_dict_can_hold_are_shared_by_identity():
    class Unhashable(Engine):
        __hash__ = None

        def __eq__(self, other):
            return True

    with plugin(Unhashable):
        assert relu(2, 12).plan(device="cpu")._compiled is relu(2, 12).plan(device="cpu")._compiled


def test_threads_may_execute_a_graph_that_nobody_has_built():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with plugin(Engine):
            for size in range(20):
                graph = relu(3, size + 1)
                assert in_time(*[lambda g=graph: g.execute(PACK)] * 4) == [None] * 4
                assert graph.is_planned
    finally:
        sys.setswitchinterval(interval)

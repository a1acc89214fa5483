"""Execution cases of host_overhead.py, against the frontend's own execute with a no-op engine on both sides.

Both get the same buffers: 8 bfloat16 operands, and a workspace that the plan needs. Both graphs have a handle, as those of
programs do; the rows without one are there because it costs the frontend more than us. Neither asks a driver: the plan is
for the CPU, and ``_frontend_peer`` takes the frontend's check of the current CUDA context out. ``error`` counts the
addresses that reached the engine and are not those of the operands.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cudnn_core
from benchmarks import _frontend_peer as frontend
from benchmarks._harness import Report, Row
from benchmarks._planning import NoopEngineWithWorkspace, noop_engines

__all__ = ["binding", "execution", "plugins"]

_OPERANDS = 8


class Unbindable:
    """An engine whose plan has no ``bind``: the core wraps its ``execute``."""

    def check_support(self, graph: Any, ctx: Any) -> cudnn_core.Support:
        return cudnn_core.Support((cudnn_core.PlanConfig("", {}),), workspace=0)

    def build_plan(self, graph: Any, config: Any, ctx: Any) -> Any:
        return UnbindablePlan()


class UnbindablePlan:
    workspace_size = 0

    def execute(self, pack: Any, ctx: Any) -> None:
        pass


def execution(report: Report) -> None:
    """The same operands through the frontend's execute and ours."""
    try:
        cases = _Cases(with_handle=True)
        bare = _Cases(with_handle=False)
    except RuntimeError as error:
        report.section("Execute")
        report.note(str(error))
        return
    report.section(f"Execute of {_OPERANDS} operands, no-op engine, a workspace, a handle")
    took = report.medians({**cases.ours, **cases.peers})
    for case, peer, budget in (
        ("prepared pack", "torch in order", 0.25),
        ("bare addresses", "bare addresses", 0.5),
        ("bare addresses", "torch in order", 0.5),
        ("torch by tensor", "torch by tensor", 1.0),
        ("torch by uid", "torch by uid", 1.0),
        ("torch by tensor, Plan.execute", "torch by tensor", 1.0),
        ("torch by tensor, two sets in turn", "torch by tensor, two sets in turn", 1.0),
        ("torch in order", "torch in order", None),
    ):
        report.add(cases.row(took, case, peer, budget))
    report.section("The same without a handle")
    took = report.medians({**bare.ours, **bare.peers})
    for case in ("bare addresses", "torch by tensor", "torch by uid", "torch in order"):
        report.add(bare.row(took, case, case, None))


class _Cases:
    """The calls to time, by case: ``ours``, and ``peers`` under the name "frontend, CASE"; their answers are checked."""

    def __init__(self, *, with_handle: bool) -> None:
        import torch

        peer, uids = frontend.make_noop_graph(_OPERANDS, with_handle=with_handle)
        shapes = [tuple(peer.find_tensor(uid).get_dim()) for uid in uids]
        buffers, others = ([torch.empty(shape, dtype=torch.bfloat16) for shape in shapes] for _ in range(2))
        handle = cudnn_core.create_handle(device="cpu") if with_handle else None
        with noop_engines(factory=NoopEngineWithWorkspace):
            graph, tensors = _concatenation(buffers, handle)
            graph.build()
        plan = graph.selected_plan
        space = torch.empty(plan.workspace_size + 255, dtype=torch.uint8)
        space = space[-space.data_ptr() % 256 :][: plan.workspace_size]
        at = space.data_ptr()

        by_tensor, second = dict(zip(tensors, buffers, strict=True)), dict(zip(tensors, others, strict=True))
        by_uid = {tensor.uid: buffer for tensor, buffer in by_tensor.items()}
        addresses = {uid: buffer.data_ptr() for uid, buffer in by_uid.items()}
        names = tuple(by_uid)
        theirs = dict(zip(uids, buffers, strict=True))
        their_tensors = [peer.find_tensor(uid) for uid in uids]
        their_call = partial(frontend.execute_callable, peer)
        first_call = their_call(dict(zip(their_tensors, buffers, strict=True)), space)
        peers: dict[str, Callable[[], Any]] = {
            "torch by tensor, two sets in turn": _in_turn(
                their_call(dict(zip(their_tensors, others, strict=True)), space), first_call
            ),
            "torch by tensor": first_call,
            "torch by uid": their_call(theirs, space),
            "torch in order": their_call(theirs, space, ordered=True),
            "bare addresses": their_call({uid: buffer.data_ptr() for uid, buffer in theirs.items()}, at),
        }
        self.ours: dict[str, Callable[[], Any]] = {
            "prepared pack": partial(plan.execute, plan.pack(by_tensor), space),
            "bare addresses": partial(graph.execute, addresses, at),
            "torch by tensor": partial(graph.execute, by_tensor, space),
            "torch by uid": partial(graph.execute, by_uid, space),
            "torch in order": partial(graph.execute, tuple(buffers), space, tensor_uids=names),
            "torch by tensor, Plan.execute": partial(plan.execute, by_tensor, space),
            "torch by tensor, two sets in turn": _in_turn(
                partial(graph.execute, second, space), partial(graph.execute, by_tensor, space)
            ),
        }
        self.errors = {name: _wrong(graph, call, addresses) for name, call in self.ours.items()}
        expected = {uid: buffer.data_ptr() for uid, buffer in theirs.items()}
        for name, call in peers.items():
            call()
            if frontend.seen_pointers(peer) != expected:
                raise RuntimeError(f"{name}: the frontend's plan saw other addresses than the operands'")
        self.peers = {f"frontend, {name}": call for name, call in peers.items()}

    def row(self, took: dict[str, float], case: str, peer: str, budget: float | None) -> Row:
        peer_name = f"frontend, {peer}"
        ours, theirs = took[case] / 1e3, took[peer_name] / 1e3
        return Row(case, "us", ours, theirs, peer_name, self.errors[case], budget, "ratio")


def _in_turn(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], Any]:
    """A callable that does the one, and the next time the other: it begins with ``second``."""
    calls = itertools.cycle((second, first))

    def call() -> None:
        next(calls)()

    return call


def _wrong(graph: cudnn_core.Graph, call: Callable[[], Any], addresses: dict[int, int]) -> float:
    """How many addresses the engine got wrong."""
    plan = graph.selected_plan
    compiled = plan._compiled
    compiled.seen[0] = ()
    call()
    expected = [addresses[operand.uid] for operand in plan.operands]
    seen = list(compiled.seen[0])
    return float(sum(a != b for a, b in zip(seen, expected, strict=False)) + abs(len(seen) - len(expected)))


def binding(report: Report) -> None:
    """``run`` of ``Plan.bind`` against the engine's own callable."""
    report.section("The bound plan, nothing checked")
    with noop_engines():
        plan, addresses = _plan_of_addresses()
    pack = plan.pack(addresses)
    run = plan.bind(pack)
    launch = plan._compiled.launch
    pointers = pack.pointers
    took = report.medians(
        {
            "ours": lambda: run(pointers, 0, 0),
            "peer": lambda: launch(pointers, 0, 0),
            "execute": lambda: plan.execute(pack),
        }
    )
    report.add(
        Row("bound run", "ns", took["ours"], took["peer"], "the engine's launcher", budget=150, gate="difference")
    )
    report.add(Row("Plan.execute of a pack", "ns", took["execute"], took["peer"], "the engine's launcher"))

    with noop_engines(factory=Unbindable):
        plan, addresses = _plan_of_addresses()
    pack = plan.pack(addresses)
    run = plan.bind(pack)
    ctx = cudnn_core.ExecutionContext(None, plan.device)
    execute = plan._compiled.execute
    took = report.medians({"ours": lambda: run(pack.pointers, 0, 0), "peer": lambda: execute(pack, ctx)})
    report.add(Row("bound run of an engine without bind", "ns", took["ours"], took["peer"], "the engine's execute"))


def plugins(report: Report) -> None:
    """Execution must not know how many plugins are installed."""
    from cudnn_core._registry import installed_on
    from tests.zoo._make import write_many

    report.section("Execute with other plugins installed")
    plans: dict[int, Any] = {}
    with ExitStack() as stack:
        for count in (0, 10, 100):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            write_many(Path(folder), count, 0)
            stack.enter_context(_on_path(folder))
            with installed_on([folder]) as registry, noop_engines(isolated=False):
                assert len(registry.plugins) == count, registry.plugins
                plan, addresses = _plan_of_addresses()
                assert len(plan.decision.engines) == 3 * count + 1, plan.decision
                plans[count] = (plan, plan.pack(addresses), addresses)
        # The registry that knows 100 plugins stays in force while all three plans run.
        with installed_on([folder]):
            calls = {}
            for count, (plan, pack, addresses) in plans.items():
                calls[f"pack {count}"] = partial(plan.execute, pack)
                calls[f"addresses {count}"] = partial(plan.execute, addresses)
            took = report.medians(calls, rounds=5)
    for form in ("pack", "addresses"):
        for count in (10, 100):
            peer_name = f"the same with 0 plugins ({form})"
            case = f"execute, {form}, {count} plugins"
            row = Row(case, "us", took[f"{form} {count}"] / 1e3, took[f"{form} 0"] / 1e3, peer_name)
            report.add(row._replace(budget=1.05, gate="ratio"))


@contextmanager
def _on_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)  # its packages have the names of those before
    try:
        yield
    finally:
        sys.path.remove(folder)


def _concatenation(buffers: list[Any], handle: Any) -> tuple[cudnn_core.Graph, list[Any]]:
    """The peer's graph: one concatenation; its tensors in the order of ``buffers``, the output last."""
    graph = cudnn_core.Graph(io_data_type="bfloat16", handle=handle)
    inputs = [graph.tensor_like(buffer, name=f"x{index}") for index, buffer in enumerate(buffers[:-1])]
    output = graph.concatenate(inputs=inputs, axis=1).set_output(True).set_data_type("bfloat16")
    return graph, [*inputs, output]


def _plan_of_addresses() -> tuple[Any, dict[int, int]]:
    """A plan of the peer's graph, and made-up addresses for it: the engine doesn't look at them."""
    graph = cudnn_core.Graph(io_data_type="bfloat16")
    inputs = [graph.tensor(dim=(1, 64, 64), name=f"x{index}") for index in range(_OPERANDS - 1)]
    output = graph.concatenate(inputs=inputs, axis=1).set_output(True).set_data_type("bfloat16")
    plan = graph.plan(device="cpu")
    return plan, {tensor.uid: (index + 1) << 20 for index, tensor in enumerate([*inputs, output])}

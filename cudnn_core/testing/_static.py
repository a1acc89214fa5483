"""Checks that run nothing: the manifest, the import budget, check_support, and the fuzzed filter. See ``_plugin`` for ids."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .._context import build_device
from .._declines import Decline, check_code
from .._driver import use_driver
from .._engine import Declined, ExecutionContext, Support
from .._errors import CudnnCoreError
from .._filter import filter_graph
from .._protocol import ProtocolError, as_verdict
from ._kit import Kit, KitFailure, failure_text, place, short_graph

if TYPE_CHECKING:
    from .._device import DeviceInfo
    from .._graph._frozen import FrozenGraph
    from .._registry import EngineEntry

__all__ = ["RecordingDriver", "check_filter", "check_import", "check_manifest", "check_support", "graph_state"]

# Budgets of ARCHITECTURE section 14 in microseconds, and how far a busy machine may exceed them before the kit fails.
WARM_US, FIRST_US, TOLERANCE = 20.0, 500.0, 10.0

Note = Callable[[str], None]


class RecordingDriver:
    """A poisoned driver that remembers what it was asked, for engines that swallow the exception."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.calls.append(name)
        raise AssertionError(f"the CUDA driver must not be asked here, and it was: {name}()")


# --- manifest
def check_manifest(kit: Kit, entry: EngineEntry, note: Note) -> None:
    """The distribution, the manifest's tables, the factories, the knobs' domains and the plugin's own ops."""
    assert entry.spec is not None
    problems = [*_distribution(entry), *_knobs(entry)]
    try:
        kit.engine(entry)
    except KitFailure as error:
        problems.append(str(error))
    for plugin in kit.registry.plugins:
        if plugin.plugin == entry.plugin and plugin.manifest is not None:
            problems += _own_ops(kit, plugin.manifest.ops)
    if problems:
        raise KitFailure(f"manifest of {entry.id} ({entry.dist} {entry.version}):\n  " + "\n  ".join(problems))


def _distribution(entry: EngineEntry) -> Iterable[str]:
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.requirements import InvalidRequirement, Requirement

    try:
        found = distribution(entry.dist)
    except PackageNotFoundError:
        yield f"the distribution {entry.dist} has no readable metadata"
        return
    points = [point for point in found.entry_points if point.group == "cudnn_core.engines"]
    if entry.plugin not in [point.name for point in points]:
        yield f"no entry point {entry.plugin!r} in group cudnn_core.engines (there are: {[p.name for p in points]})"
    needs = []
    for text in found.requires or ():
        try:
            needs.append(Requirement(text))
        except InvalidRequirement:  # noqa: PERF203  each is reported
            yield f"Requires-Dist {text!r} can't be read"
    ours = [need for need in needs if need.name.lower().replace("_", "-") == "cudnn-core"]
    if not ours:
        yield "the distribution does not require cudnn-core (write: cudnn-core>=X,<next major)"
    operators = {item.operator for need in ours for item in need.specifier}
    if ours and not operators & {"<", "<=", "~=", "=="}:
        yield "the distribution requires cudnn-core without an upper bound (write: cudnn-core>=X,<next major)"
    if ours and not operators & {">", ">=", "~=", "=="}:
        yield "the distribution requires cudnn-core without a lower bound (write: cudnn-core>=X,<next major)"


def _knobs(entry: EngineEntry) -> Iterable[str]:
    assert entry.spec is not None
    for name, knob in entry.spec.knobs.items():
        if len(set(knob.choices)) < len(knob.choices):
            yield f"knob {name}: a choice occurs twice"
        if knob.min is not None and knob.max is not None:
            step = knob.multiple_of or 1
            if -(-knob.min // step) * step > knob.max:
                yield f"knob {name}: nothing lies in its domain"
        if knob.decline(knob.default) is not None:
            yield f"knob {name}: the default {knob.default!r} is outside the domain"


def _own_ops(kit: Kit, names: Iterable[str]) -> Iterable[str]:
    for name in names:
        try:
            kit.registry.op_row(name)
        except CudnnCoreError as error:  # noqa: PERF203  each is reported
            yield f"op {name}: {error}"


# --- import budget
def check_import(kit: Kit, entry: EngineEntry, note: Note) -> None:
    """Importing the factory, constructing the engine and check_support load nothing heavy and start no thread."""
    probe = kit.probe(entry)
    if probe.fatal:
        raise KitFailure(f"engine {entry.id} can't be used: {probe.fatal}")
    note(f"import {probe.seconds * 1e3:.1f} ms")
    if probe.problems:
        raise KitFailure(f"engine {entry.id}:\n  " + "\n  ".join(probe.problems))


# --- check_support
def check_support(kit: Kit, entry: EngineEntry, note: Note) -> None:
    """Pure, quick, off the driver and well-formed, for every case on the CPU and on one device of each architecture."""
    assert entry.spec is not None
    engine = kit.engine(entry)
    warm: list[float] = []
    first: list[float] = []
    accepted = asked = 0
    for device in kit.described():
        ctx = ExecutionContext(None, device)
        for case in kit.cases_for(entry, device):
            graph = case.freeze(device.type)
            asked += 1
            before = graph_state(graph)
            poisoned = RecordingDriver()

            def fail(message: str, case: Any = case, device: DeviceInfo = device) -> None:
                raise KitFailure(failure_text(entry.id, device, case, message))

            with use_driver(poisoned), build_device(device):
                try:
                    verdict = engine.check_support(graph, ctx)
                    again = engine.check_support(graph, ctx)
                except Exception as error:
                    if poisoned.calls:
                        fail(f"check_support asks the CUDA driver: {poisoned.calls[0]}() (use ctx.device)")
                    fail(f"check_support raised {type(error).__name__}: {error} (a decline is a return value)")
            if poisoned.calls:
                fail(f"check_support asks the CUDA driver: {poisoned.calls[0]}() (use ctx.device)")
            if graph_state(graph) != before:
                fail("check_support changes the graph")
            problem = verdict_problem(verdict, entry)
            if problem:
                fail(f"check_support returned {problem}")
            if verdict != again:
                fail(f"check_support is not pure: it returned {verdict}, then {again}")
            accepted += bool(verdict)
            fresh = case.build().freeze(device.type)
            first.append(_time(engine, fresh, ctx, 1))
            warm.append(_time(engine, fresh, ctx, 5))
    if not asked:
        note("no case of the library passes the manifest")
        return
    warm_us, first_us = statistics.median(warm), statistics.median(first)
    note(f"check_support accepts {accepted} of {asked}, {warm_us:.1f} us warm, {first_us:.0f} us first")
    for label, found, budget in (("with warm facts", warm_us, WARM_US), ("on a new graph", first_us, FIRST_US)):
        if found > budget * TOLERANCE:
            raise KitFailure(
                f"engine {entry.id}: check_support {label} takes {found:.0f} us in the median; the budget is {budget:.0f} us"
                " (compute facts of the graph once, with graph.facts)"
            )


def _time(engine: Any, graph: FrozenGraph, ctx: ExecutionContext, repeat: int) -> float:
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        engine.check_support(graph, ctx)
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def graph_state(graph: FrozenGraph) -> str:
    """All of a graph that an engine could change, as text."""
    from .._graph._json import to_dict

    operands = [tuple(map(str, operand)) for operand in graph.operands]
    return json.dumps([to_dict(graph), operands, graph.key])


def verdict_problem(verdict: Any, entry: EngineEntry) -> str:
    """What the protocol forbids in a verdict, or ""."""
    assert entry.spec is not None
    if isinstance(verdict, Declined):
        if not isinstance(verdict.reasons, tuple) or not verdict.reasons:
            return "Declined without a reason"
        for reason in verdict.reasons:
            problem = decline_problem(reason, entry.plugin)
            if problem:
                return problem
        return ""
    try:
        as_verdict(verdict, entry.spec)
    except ProtocolError as error:
        return str(error)
    assert isinstance(verdict, Support)
    for config in verdict.configs:
        declines = entry.spec.knob_declines(config.knobs)
        if declines:
            return "a config that the manifest's knobs do not admit: " + "; ".join(map(str, declines))
    return ""


def decline_problem(reason: Any, plugin: str) -> str:
    if not isinstance(reason, Decline):
        return f"{reason!r} as a reason, which is no Decline"
    try:
        check_code(reason.code)
    except (CudnnCoreError, TypeError) as error:
        return f"a decline with an {error}"
    if reason.code.startswith("x.") and reason.code.split(".")[1] != plugin:
        return f"decline code {reason.code!r}, which belongs to another plugin (write x.{plugin}...)"
    try:
        json.dumps(reason.to_dict(), allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"decline {reason.code} with a field that is not JSON-able: {error}"
    if not all(isinstance(text, str) for text in (reason.subject, reason.hint, reason.origin)):
        return f"decline {reason.code} with a subject, hint or origin that is no string"
    return ""


# --- the filter against check_support
def check_filter(kit: Kit, entry: EngineEntry, note: Note) -> None:
    """The manifest never filters out a graph that check_support accepts."""
    from . import _fuzz

    assert entry.spec is not None
    engine = kit.engine(entry)
    filtered = passed = raised = 0
    for graph in _fuzz.fuzzed(kit.cases(), 3000 if kit.full else 400):
        before = graph_state(graph)
        for device in kit.described():
            declines = filter_graph(entry.spec, graph, device)
            passed += not declines
            filtered += bool(declines)
            with use_driver(RecordingDriver()), build_device(device):
                try:
                    verdict = engine.check_support(graph, ExecutionContext(None, device))
                except Exception as error:
                    raised += 1
                    if declines:  # the core never asks about these
                        continue
                    raise KitFailure(
                        f"engine {entry.id} on {place(device)}: check_support raised {type(error).__name__}: {error}\n"
                        f"  graph {short_graph(graph)}"
                    ) from error
            if declines and verdict:
                reasons = "; ".join(map(str, declines))
                raise KitFailure(
                    f"engine {entry.id} on {device.device_name}: the manifest rules out a graph that check_support accepts\n"
                    f"  the manifest says {reasons}\n  graph {short_graph(graph)}"
                )
            if isinstance(verdict, Declined) and not declines:
                problem = verdict_problem(verdict, entry)
                if problem:
                    raise KitFailure(
                        f"engine {entry.id}: check_support returned {problem}\n  graph {short_graph(graph)}"
                    )
        if graph_state(graph) != before:
            _fuzz.forget()
            raise KitFailure(f"engine {entry.id}: check_support changes the graph\n  graph {short_graph(graph)}")
    note(f"fuzzed {passed + filtered} (graph, device) pairs, {filtered} filtered")

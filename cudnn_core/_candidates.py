"""Which engines can run a graph on a device, and why the others can't: everything of planning before ranking.

manifest and configuration (no plugin code runs) -> check_support -> knobs, notes, workspace. A plugin that raises, returns
garbage or mutates costs only itself. Imported by the planner.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from ._context import build_device
from ._decision import EngineDecision
from ._declines import Decline
from ._engine import Declined, Estimate, ExecutionContext, PlanConfig, Support
from ._errors import CudnnCoreError
from ._filter import filter_graph
from ._knobs import KnobError
from ._ops._table import lookup
from ._ranking import Candidate

if TYPE_CHECKING:
    from ._config import Config
    from ._config._rules import Rule
    from ._device import DeviceInfo
    from ._graph._frozen import FrozenGraph
    from ._handle import Handle
    from ._registry import EngineEntry, Registry

__all__ = ["Filters", "Request", "collect", "engine_entry_matches", "matching_rules", "notes_of"]

_log = logging.getLogger("cudnn_core")


class Filters(NamedTuple):
    """What a call, not the configuration, excludes: the frontend's select and deselect methods."""

    deselect: tuple[str, ...] = ()
    require_notes: tuple[str, ...] = ()
    bar_notes: tuple[str, ...] = ()
    max_workspace: int | None = None

    def declines(self, entry: Any) -> list[Decline]:
        """Why ``entry`` (a ranked plan: ``short_id``, ``id``, ``notes``, ``workspace``) is excluded."""
        found = [
            Decline("config.disabled", entry.short_id, origin=f"deselect_engines({pattern!r})")
            for pattern in self.deselect
            if engine_entry_matches(pattern, entry)
        ]
        found += note_declines(entry.notes, self.require_notes, self.bar_notes, "select notes")
        if self.max_workspace is not None and entry.workspace is not None and entry.workspace > self.max_workspace:
            found.append(Decline("resource.workspace", "workspace", {"max": self.max_workspace}, entry.workspace))
        return found


class Request(NamedTuple):
    """One planning question."""

    graph: FrozenGraph
    device: DeviceInfo
    handle: Handle | None
    sizes: Mapping[str, int]
    filters: Filters
    need_build: bool
    registry: Registry
    config: Config
    rules: tuple[Rule, ...]

    @property
    def ctx(self) -> ExecutionContext:
        return ExecutionContext(self.handle, self.device)


def collect(request: Request) -> tuple[list[Candidate], list[EngineDecision]]:
    """(candidates, rows of everything else): one row or one candidate for every known engine."""
    candidates: list[Candidate] = []
    rows: list[EngineDecision] = []
    with build_device(request.device):
        for entry in request.registry.engines:
            found = examine(request, entry)
            if isinstance(found, Candidate):
                candidates.append(found)
            else:
                rows.append(found)
    return candidates, rows


def examine(request: Request, entry: EngineEntry) -> Candidate | EngineDecision:
    """The engine as a candidate, or the row that says why it is none."""

    def row(state: str, reasons: Iterable[Decline], **facts: Any) -> EngineDecision:
        return EngineDecision(entry.id, entry.dist, entry.version, state, reasons=tuple(reasons), **facts)

    spec = entry.spec
    if spec is None or entry.state == "quarantined":
        return row(entry.state, entry.reasons)
    disabled = [
        *(entry.reasons if entry.state == "disabled" else ()),
        *(_avoided(rule, spec.short_id) for rule in request.rules if rule.avoids(spec.short_id)),
        *(
            Decline("config.disabled", spec.short_id, origin=f"deselect_engines({pattern!r})")
            for pattern in request.filters.deselect
            if engine_entry_matches(pattern, spec)
        ),
        *([] if spec.variants else _pinned_elsewhere(request, spec.short_id)),  # variants are looked at by name below
    ]
    filtered = filter_graph(spec, request.graph, request.device)
    if disabled:  # with what else speaks against the engine, so that one that only the configuration stops stands out
        return row("disabled", [*disabled, *filtered])
    filtered += entry.reasons  # unmet requirements
    if filtered:
        return row("filtered", filtered)
    if request.need_build and request.device.synthetic and not spec.aot:
        hint = "plan on the device itself, or for an engine with aot = true"
        return row("declined", [Decline("device.absent", "device", actual=request.device.device_name, hint=hint)])
    try:
        verdict = entry.instance().check_support(request.graph, request.ctx)
    except Exception as error:
        return row("quarantined", [quarantine(request, entry, "check_support", error)])
    if isinstance(verdict, Declined) and verdict.reasons and all(isinstance(r, Decline) for r in verdict.reasons):
        return row("declined", verdict.reasons)
    problem = _support_problem(verdict, spec)
    if problem:
        broken = CudnnCoreError(f"check_support returned {problem}")
        return row("quarantined", [quarantine(request, entry, "check_support", broken)])
    assert isinstance(verdict, Support)
    try:
        configs, barred = _configs(request, entry, verdict)
    except KnobError as error:
        return row("declined", error.declines)
    if not configs:
        return row("disabled", barred)
    notes = notes_of(spec, verdict)
    limit = request.config.max_workspace
    if request.filters.max_workspace is not None:
        limit = min(request.filters.max_workspace, limit) if limit is not None else request.filters.max_workspace
    declines = note_declines(notes, request.config.require, (), "engines.require")
    declines += note_declines(notes, request.filters.require_notes, request.filters.bar_notes, "select notes")
    if limit is not None and verdict.workspace is not None and verdict.workspace > limit:
        declines.append(Decline("resource.workspace", "workspace", {"max": limit}, verdict.workspace))
    if declines:
        return row("declined", declines, config=configs[0], workspace=verdict.workspace)
    return Candidate(entry, verdict, configs[0], _estimate(request, entry, configs[0]), configs)


def quarantine(request: Request, entry: EngineEntry, where: str, error: Exception) -> Decline:
    """Record that the engine's code broke; strict configuration raises instead."""
    decline = getattr(error, "decline", None)
    if not isinstance(decline, Decline):
        place = traceback.extract_tb(error.__traceback__)
        origin = f"{place[-1].filename}:{place[-1].lineno}" if place else ""
        decline = Decline("plugin.broken", f"{where}()", actual=f"{type(error).__name__}: {error}", origin=origin)
    if request.config.strict:
        raise CudnnCoreError(f"engine {entry.id}: {decline}") from error
    request.registry.quarantine(entry, decline, "".join(traceback.format_exception(error)))
    failed(request, entry, where, decline)
    _log.warning("engine %s is quarantined: %s", entry.id, decline, exc_info=error)
    return decline


def failed(request: Request, entry: EngineEntry, stage: str, decline: Decline) -> None:
    """Tell the hooks that an engine raised or could not build."""
    from ._hooks import EngineFailure, call_isolated

    call_isolated("cudnn_core_engine_failed", request.registry, failure=EngineFailure(entry.id, stage, decline))


def matching_rules(
    config: Config, graph: FrozenGraph, device: DeviceInfo, dists: Mapping[str, str]
) -> tuple[Rule, ...]:
    """The configuration's rules that apply to the graph, in their order.

    A rule that names an op looks at the first such node; one that names none looks at the first node that is not pointwise.
    ``graph`` has fixed sizes.
    """
    if not config.rules:
        return ()
    from ._config._rules import RuleSubject

    subjects: dict[str, RuleSubject] = {}
    primary: RuleSubject | None = None
    for node in graph.nodes:
        if node.op in subjects:
            continue
        op = lookup(node.op)
        ports = {**node.inputs, **node.outputs}
        dtypes = {
            name: ports[port].dtype.value
            for name, port in op.operands.items()
            if port in ports and not isinstance(ports[port], tuple)
        }
        dims = {name: size for name, size in op.dims(node).items() if isinstance(size, int)}
        subjects[node.op] = RuleSubject(node.op, dims, dtypes, device, dists)
        if primary is None and op.group != "pointwise":
            primary = subjects[node.op]
    primary = primary or next(iter(subjects.values()))
    return tuple(
        rule
        for rule in config.rules
        if any(rule.matches(subject) for subject in (subjects.values() if rule.match.op else (primary,)))
    )


def pin_rule(request: Request) -> Rule | None:
    """The first matching rule that pins an engine."""
    return next((rule for rule in request.rules if rule.use), None)


def is_strict(request: Request, rule: Rule) -> bool:
    return request.config.strict if rule.strict is None else rule.strict


def _pinned_elsewhere(request: Request, short_id: str) -> list[Decline]:
    rule = pin_rule(request)
    if rule is None or not is_strict(request, rule) or rule.pins(short_id):
        return []
    return [Decline("config.pinned_elsewhere", short_id, expected=rule.use, hint=rule.reason, origin=rule.origin)]


def _avoided(rule: Rule, short_id: str) -> Decline:
    return Decline("config.avoided", short_id, hint=rule.reason, origin=rule.origin)


def engine_entry_matches(pattern: str, entry: Any) -> bool:
    """Exact id, id with revision, or glob; never a substring."""
    return fnmatchcase(entry.short_id, pattern) or fnmatchcase(entry.id, pattern)


def notes_of(spec: Any, support: Support) -> frozenset[str]:
    return frozenset(spec.notes if support.notes is None else support.notes)


def note_declines(notes: Iterable[str], require: Iterable[str], bar: Iterable[str], origin: str) -> list[Decline]:
    """Notes compare without regard to case: the frontend shouts, manifests whisper."""
    have = {note.lower() for note in notes}
    found = [
        Decline("policy.note_missing", note, expected=note, origin=origin)
        for note in require
        if note.lower() not in have
    ]
    found += [Decline("policy.note_barred", note, actual=note, origin=origin) for note in bar if note.lower() in have]
    return found


def _support_problem(verdict: Any, spec: Any) -> str:
    """What the protocol forbids in a verdict, or ""."""
    if isinstance(verdict, Declined):
        return "Declined without a Decline in it"
    if not isinstance(verdict, Support):
        return f"{verdict!r}, which is neither Support nor Declined"
    if not isinstance(verdict.configs, tuple) or not 1 <= len(verdict.configs) <= 8:
        return "Support without 1 to 8 configs"
    for config in verdict.configs:
        if not isinstance(config, PlanConfig) or not isinstance(config.knobs, Mapping):
            return f"a config that is none: {config!r}"
        if config.engine not in ("", spec.id, spec.short_id, spec.name):
            return f"a config of another engine: {config.engine!r}"
        if config.variant and not spec.has_variant(config.variant):
            return f"variant {config.variant!r}, which the manifest does not declare"
    if verdict.workspace is not None and (not isinstance(verdict.workspace, int) or verdict.workspace < 0):
        return f"workspace {verdict.workspace!r}"
    return ""


def _configs(
    request: Request, entry: EngineEntry, support: Support
) -> tuple[tuple[PlanConfig, ...], tuple[Decline, ...]]:
    """(the engine's configs with complete knobs, why variants were left out); configured knobs win over the engine's."""
    spec = entry.spec
    assert spec is not None
    rule = pin_rule(request)
    made: list[PlanConfig] = []
    barred: list[Decline] = []
    for config in support.configs:
        member = f"{spec.short_id}/{config.variant}" if config.variant else spec.short_id
        if config.variant:
            reasons = [
                *request.config.engine_declines(member, spec.maturity),
                *(_avoided(avoiding, member) for avoiding in request.rules if avoiding.avoids(member)),
                *_pinned_elsewhere(request, member),
            ]
            if reasons:
                barred += [reason for reason in reasons if reason not in barred]
                continue
        forced = {name: value for name, (value, _) in request.config.knobs_for(member).items()}
        if rule is not None and rule.pins(member):
            forced.update(rule.knobs)
        full = PlanConfig(spec.id, spec.complete_knobs({**config.knobs, **forced}), config.variant)
        if full not in made:
            made.append(full)
    if rule is not None:  # a pinned variant competes for its engine
        made.sort(key=lambda config: not (config.variant and rule.pins(f"{spec.short_id}/{config.variant}")))
    return tuple(made), tuple(barred)


def _estimate(request: Request, entry: EngineEntry, config: PlanConfig) -> Estimate | None:
    engine = entry.instance()
    estimate = getattr(engine, "estimate", None)
    if estimate is None:
        return None
    try:
        answer = estimate(request.graph.at(request.sizes), config, request.ctx)
    except Exception as error:
        if request.config.strict:
            raise CudnnCoreError(f"engine {entry.id}: estimate() raised {error!r}") from error
        _log.warning("engine %s: estimate() raised, its prior is used", entry.id, exc_info=error)
        return None
    return answer if isinstance(answer, Estimate) else None

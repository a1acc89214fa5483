"""Which engines can run a graph on a device, and why the others can't: everything of planning before ranking.

manifest and configuration (no plugin code runs) -> check_support -> knobs, notes, workspace -> estimate. An engine that raises
or returns garbage costs only itself (``_guard``). Imported by the planner, plan files and the conformance kit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from ._decision import EngineDecision
from ._declines import Decline
from ._engine import Declined, Engine, Estimate, ExecutionContext, PlanConfig, Support
from ._filter import filter_graph
from ._guard import guarded
from ._knobs import KnobError
from ._ops._table import lookup
from ._protocol import as_estimate, as_verdict
from ._ranking import Candidate
from ._records import EngineBroken

if TYPE_CHECKING:
    from ._config import Config
    from ._config._rules import Rule
    from ._device import DeviceInfo
    from ._graph._frozen import FrozenGraph
    from ._handle import Handle
    from ._manifest import EngineSpec
    from ._registry import EngineEntry, Registry

__all__ = [
    "Filters",
    "Request",
    "collect",
    "examine",
    "is_strict",
    "matching_rules",
    "member_name",
    "names_engine",
    "not_buildable",
    "notes_of",
    "pin_rule",
    "variant_declines",
    "with_knobs",
]


class Filters(NamedTuple):
    """What keeps engines that could run a graph from running it: the frontend's select and deselect methods, or the
    configuration's required notes and workspace limit. Applied before ranking, to a list of plans, and to a built plan."""

    deselect: tuple[str, ...] = ()
    require_notes: tuple[str, ...] = ()
    bar_notes: tuple[str, ...] = ()
    max_workspace: int | None = None
    origin: str = "select notes"
    workspace_origin: str = "deselect_workspace_greater_than()"

    def excludes(self, engine: Any) -> list[Decline]:
        """Why ``engine`` (anything with ``id`` and ``short_id``) is excluded by name: exactly, with revision, or by glob; never
        by substring."""
        return [
            Decline("config.disabled", engine.short_id, origin=f"deselect_engines({pattern!r})")
            for pattern in self.deselect
            if names_engine(pattern, engine)
        ]

    def declines(self, notes: Iterable[str], workspace: int | None) -> list[Decline]:
        """What is wrong with a plan of these notes that needs ``workspace`` bytes (None: not known yet).

        Notes compare without regard to case: the frontend shouts, manifests whisper.
        """
        have = {note.lower() for note in notes}
        found = [
            Decline("policy.note_missing", note, expected=note, origin=self.origin)
            for note in self.require_notes
            if note.lower() not in have
        ]
        found += [
            Decline("policy.note_barred", note, actual=note, origin=self.origin)
            for note in self.bar_notes
            if note.lower() in have
        ]
        if self.max_workspace is not None and workspace is not None and workspace > self.max_workspace:
            limit = {"max": self.max_workspace}
            found.append(Decline("resource.workspace", "workspace", limit, workspace, origin=self.workspace_origin))
        return found


def names_engine(pattern: str, engine: Any) -> bool:
    """Whether a name or glob of a deselect call covers ``engine`` (anything with ``id`` and ``short_id``)."""
    return fnmatchcase(engine.short_id, pattern) or fnmatchcase(engine.id, pattern)


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

    @property
    def building(self) -> ExecutionContext:
        """What build_plan and load_plan are given: no handle, since a compiled plan serves every handle of its device."""
        return ExecutionContext(None, self.device)

    def excludes(self, engine: Any) -> list[Decline]:
        return self.filters.excludes(engine)

    def declines(self, notes: Iterable[str], workspace: int | None) -> list[Decline]:
        """``Filters.declines`` of the configuration and of the call."""
        config, notes = self.config, frozenset(notes)
        limit = Filters(max_workspace=config.max_workspace, workspace_origin=config.origin("engines.max_workspace"))
        required = [
            Filters(require_notes=(note,), origin=config.origin("engines.require", note)) for note in config.require
        ]
        return [reason for filters in (*required, limit, self.filters) for reason in filters.declines(notes, workspace)]


def collect(request: Request) -> tuple[list[Candidate], list[EngineDecision]]:
    """(candidates, rows of everything else): one row or one candidate for every known engine."""
    candidates: list[Candidate] = []
    rows: list[EngineDecision] = []
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
        *request.excludes(spec),
        *([] if spec.variants else _pinned_elsewhere(request, spec.short_id)),  # variants are looked at by name below
    ]
    filtered = filter_graph(spec, request.graph, request.device)
    if disabled:  # with what else speaks against the engine, so that one that only the configuration stops stands out
        return row("disabled", [*disabled, *filtered])
    filtered += entry.reasons  # unmet requirements
    if filtered:
        return row("filtered", filtered)
    absent = not_buildable(request, spec)
    if request.need_build and absent:
        return row("declined", absent)
    try:
        engine = guarded(request, entry, "import", entry.instance)
        verdict = guarded(
            request, entry, "check_support", lambda: as_verdict(engine.check_support(request.graph, request.ctx), spec)
        )
        if isinstance(verdict, Declined):
            return row("declined", verdict.reasons)
        configs, barred = _configs(request, spec, verdict)
        if not configs:
            return row("disabled", barred)
        notes = notes_of(spec, verdict)
        declines = request.declines(notes, verdict.workspace)
        if declines:
            return row("declined", declines, config=configs[0], workspace=verdict.workspace, notes=tuple(notes))
        estimate = guarded(request, entry, "estimate", lambda: _estimate(request, engine, configs[0]))
        return Candidate(entry, verdict, configs[0], estimate, configs)
    except EngineBroken as broken:
        return row("quarantined", [broken.decline])
    except KnobError as error:
        return row("declined", error.declines)


def not_buildable(request: Request, spec: EngineSpec) -> list[Decline]:
    """Why the engine, able to run the graph or not, can't build a plan in this process: its device is only described."""
    if spec.aot or not request.device.synthetic:
        return []
    hint = "it builds on the device only: aot = false"
    return [Decline("device.absent", "device", actual=request.device.device_name, hint=hint)]


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


def _pinned_variant(request: Request, spec: EngineSpec) -> str:
    """The member of the engine that the pin names, listed by the engine or not; "" for none, and for a glob of members."""
    rule = pin_rule(request)
    variant = rule.use.partition("/")[2] if rule is not None else ""
    if not variant or rule is None or not spec.variants:
        return ""
    from ._config._grammar import is_exact

    named = is_exact(variant) and spec.has_variant(variant) and rule.pins(member_name(spec, variant))
    return variant if named else ""


def _avoided(rule: Rule, short_id: str) -> Decline:
    return Decline("config.avoided", short_id, hint=rule.reason, origin=rule.origin)


def notes_of(spec: Any, support: Support) -> frozenset[str]:
    return frozenset(spec.notes if support.notes is None else support.notes)


def member_name(spec: Any, variant: str) -> str:
    """``plugin:engine[/variant]``, as configuration names it."""
    return f"{spec.short_id}/{variant}" if variant else str(spec.short_id)


def variant_declines(request: Request, spec: EngineSpec, variant: str) -> list[Decline]:
    """Why the configuration keeps a member of a family of engines out."""
    member = member_name(spec, variant)
    return [
        *request.config.engine_declines(member, spec.maturity),
        *(_avoided(rule, member) for rule in request.rules if rule.avoids(member)),
        *_pinned_elsewhere(request, member),
    ]


def _configs(
    request: Request, spec: EngineSpec, support: Support
) -> tuple[tuple[PlanConfig, ...], tuple[Decline, ...]]:
    """(the engine's configs with complete knobs, why others were left out); configured knobs win over the engine's.

    A pinned variant competes for its engine, also one that the engine did not list: whether it exists is for build_plan to say.
    """
    rule = pin_rule(request)
    offered = support.configs
    wanted = _pinned_variant(request, spec)
    if wanted and all(config.variant != wanted for config in offered):
        offered = (PlanConfig(spec.id, {}, wanted), *offered)
    made: list[PlanConfig] = []
    barred: list[Decline] = []
    for config in offered:
        if config.variant:
            reasons = variant_declines(request, spec, config.variant)
        else:
            reasons = _pinned_elsewhere(request, spec.short_id)
        if reasons:
            barred += [reason for reason in reasons if reason not in barred]
            continue
        full = with_knobs(request, spec, config)
        if full not in made:
            made.append(full)
    if rule is not None:
        made.sort(key=lambda config: not (config.variant and rule.pins(member_name(spec, config.variant))))
    return tuple(made), tuple(barred)


def with_knobs(request: Request, spec: EngineSpec, config: PlanConfig) -> PlanConfig:
    """``config`` with the configured knobs over its own, complete. Raises KnobError."""
    member, rule = member_name(spec, config.variant), pin_rule(request)
    forced = {name: value for name, (value, _) in request.config.knobs_for(member).items()}
    if rule is not None and rule.pins(member):
        forced.update(rule.knobs)
    return PlanConfig(spec.id, spec.complete_knobs({**config.knobs, **forced}), config.variant)


def _estimate(request: Request, engine: Engine, config: PlanConfig) -> Estimate | None:
    estimate = getattr(engine, "estimate", None)
    return None if estimate is None else as_estimate(estimate(request.graph.at(request.sizes), config, request.ctx))

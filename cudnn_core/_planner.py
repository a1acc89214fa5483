"""Planning: candidates -> ranking -> Decision -> a built plan.

``survey`` asks and ranks, and builds nothing. ``build_in_order`` builds the first plan of a list that builds; what fails on the
way is recorded in the Decision. Imported by the graph, the plan file and the command line.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ._arguments import as_int, as_mapping
from ._building import build_config, finish
from ._candidates import (
    Filters,
    Request,
    collect,
    is_strict,
    matching_rules,
    member_name,
    not_buildable,
    notes_of,
    pin_rule,
    variant_declines,
    with_knobs,
)
from ._decision import Decision, EngineDecision, nearest_decline, nearest_miss
from ._declines import Decline
from ._engine import PlanConfig
from ._errors import BuildError, ExecutionError, GraphError, NoEngineError
from ._ops._table import lookup
from ._pins import passed_over, refusal
from ._ranking import Candidate, Ranked, member_id, rank

if TYPE_CHECKING:
    from ._config import Config
    from ._device import DeviceInfo
    from ._graph._frozen import FrozenGraph
    from ._graph._tensor import Tensor
    from ._handle import Handle
    from ._plan import Plan
    from ._registry import EngineEntry, Registry

__all__ = ["Entry", "Filters", "Survey", "build_entry", "build_in_order", "survey"]

_log = logging.getLogger("cudnn_core")
_NO_FILTERS = Filters()
# Values of the configuration that change where messages and files go, and no decision.
_NOT_DECIDING = ("log", "cache_dir")
PINNED = -1  # the place of a pinned engine: before every order rule


class Entry(NamedTuple):
    """One plan that may be built: an engine with one knob setting. ``workspace`` is the plan's own once it is built."""

    engine: EngineEntry | None
    config: PlanConfig
    notes: frozenset[str]
    workspace: int | None
    id: str
    short_id: str


class Survey:
    """What planning found out: the ranked entries and one row for every engine. Building adds failures to it.

    filters   what the caller excludes, now: it may change after the survey
    failures  engine id -> why plans of it did not build
    """

    def __init__(self, request: Request | None, ranked: list[Ranked], rows: list[EngineDecision]) -> None:
        self.request = request
        self.ranked = ranked
        self.rows = rows
        self.filters = request.filters if request is not None else _NO_FILTERS
        self.failures: dict[str, list[Decline]] = {}
        self.selected = ranked[0].candidate.config if ranked else None
        self.entries: list[Entry] = [entry for item in ranked for entry in _entries(item)]
        self._loaded: Plan | None = None

    @classmethod
    def loaded(cls, plan: Plan) -> Survey:
        """The survey of a plan that came from a file."""
        made = cls(None, [], [])
        made._loaded = plan
        engine = plan.engine
        made.entries = [
            Entry(None, plan.config, frozenset(), plan.engine_workspace_size, engine, engine.partition("@")[0])
        ]
        return made

    def name(self, index: int) -> str:
        config = self.entries[index].config
        knobs = ", ".join(f"{key}={value}" for key, value in sorted(config.knobs.items()))
        return f"{member_id(config)}[{knobs}]" if knobs else member_id(config)

    def allowed(self) -> list[int]:
        """The entries that ``filters`` leave, best first."""
        return [index for index, entry in enumerate(self.entries) if not self._declines(entry)]

    def require_engine(self) -> None:
        """NoEngineError if nothing can run the graph, or a strict pin can't be honoured."""
        if not self.entries:
            decision = self.decision()
            pinned = refusal(self.request, decision.engines) if self.request is not None else ""
            raise NoEngineError(pinned + nearest_miss(decision), decision)

    def pin(self, engine_id: str, knobs: Mapping[str, Any] | None) -> int:
        """The index of the entry of ``plugin:engine[@revision][/variant]`` with ``knobs``, added if it is not in the list.

        Raises EngineLookupError for a name that is none, NoEngineError for an engine that can't run the graph or does not
        admit the variant or the knobs here.
        """
        request = self.request
        if request is None:
            raise GraphError("the graph was loaded with its plan: another one can't be added")
        engine = request.registry.get(engine_id)
        spec = engine.spec
        assert spec is not None
        found = next((item.candidate for item in self.ranked if item.candidate.entry.id == engine.id), None)
        if found is None:
            reasons = next((row.reasons for row in self.rows if row.id == engine.id), engine.reasons)
        else:
            variant = engine_id.partition("/")[2]
            barred = variant_declines(request, spec, variant) if variant else []
            reasons = (*barred, *spec.knob_declines(knobs or {}))
        if found is None or reasons:
            text = "; ".join(map(str, reasons))
            raise NoEngineError(f"{engine_id} can't run the graph like this: {text}", self.decision())
        if knobs is not None:
            own = any(not config.variant for config in found.configs)
            variant = variant or ("" if own else found.config.variant)
            return self.place(found, PlanConfig(spec.id, spec.complete_knobs(knobs), variant))
        listed = (found.config, *found.configs)
        config = next((config for config in listed if not variant or config.variant == variant), None)
        return self.place(found, config or with_knobs(request, spec, PlanConfig(spec.id, {}, variant)))

    def place(self, candidate: Candidate, config: PlanConfig) -> int:
        """The index of the entry of an engine that can run the graph with ``config``, added if it is not in the list."""
        for index, entry in enumerate(self.entries):
            if entry.config == config:
                return index
        self.entries.append(_entry(candidate, config))
        return len(self.entries) - 1

    def check_built(self, index: int, plan: Plan) -> None:
        """BuildError for what only the built plan of an entry could show: a workspace beyond a limit, a member of its family
        that the configuration keeps out."""
        request, entry = self.request, self.entries[index]
        assert request is not None
        assert entry.engine is not None
        assert entry.engine.spec is not None
        chosen = plan.variant if not entry.config.variant else ""
        found = variant_declines(request, entry.engine.spec, chosen) if chosen else []
        found += request._replace(filters=self.filters).declines(entry.notes, plan.engine_workspace_size)
        if found:
            raise BuildError(f"{self.name(index)}: {'; '.join(map(str, found))}", decline=found[0])

    def decision(self) -> Decision:
        """The record as it stands now."""
        if self._loaded is not None:
            return self._loaded.decision
        request = self.request
        assert request is not None
        rows = list(self.rows)
        chosen = self.selected
        won = next(
            (i for i, r in enumerate(self.ranked) if chosen is not None and r.candidate.config.engine == chosen.engine),
            None,
        )
        for place, item in enumerate(self.ranked):
            row = self._row(place, won)
            notes = not_buildable(request, item.candidate.entry.spec)
            if place == won and not any(item.order_index == -1 for item in self.ranked):
                notes += passed_over(request, row.id)
            rows.append(row._replace(reasons=(*row.reasons, *notes)))
        config = [(v.key, v.value, v.origin) for v in request.config.values if v.key not in _NOT_DECIDING]
        config += [(f"hint.{name}", size, "hint") for name, size in request.sizes.items()]
        return Decision(
            request.graph.key, request.device.to_dict(), rows, config, summary=summary(request.graph, request.sizes)
        )

    def _row(self, place: int, won: int | None) -> EngineDecision:
        """The row of the engine that was ranked at ``place``; the one at ``won`` is selected."""
        item = self.ranked[place]
        entry, support, config = item.candidate.entry, item.candidate.support, item.candidate.config
        failures = tuple(self.failures.get(entry.id, ()))
        assert entry.spec is not None
        row = EngineDecision(
            item.id, entry.dist, entry.version, "eligible", place + 1, item.us, item.basis, config, support.workspace,
            notes=tuple(notes_of(entry.spec, support)),
        )  # fmt: skip
        if place == won:
            chosen = self.selected
            assert chosen is not None
            if chosen != config:  # another config of the engine, for which there is no time
                row = row._replace(id=member_id(chosen), config=chosen, us=None, basis=None)
            return row._replace(state="selected", reasons=failures)
        if failures:
            return row._replace(state="build_failed", reasons=failures)
        barred = self._declines(_entry(item.candidate, config))
        if barred:
            by_name = any(reason.code == "config.disabled" for reason in barred)
            return row._replace(state="disabled" if by_name else "declined", reasons=tuple(barred))
        if won is None:
            return row._replace(state="build_failed", reasons=(Decline("build.failed", entry.id),))
        winner = self.ranked[won]
        if place < won:
            reason = Decline(
                "config.pinned_elsewhere", entry.short_id, expected=winner.id, hint="the call names the plan"
            )
        else:
            assert self.request is not None
            reason = _slower(item, winner, self.request)
        return row._replace(state="outranked", reasons=(reason,))

    def _declines(self, entry: Entry) -> list[Decline]:
        return [*self.filters.excludes(entry), *self.filters.declines(entry.notes, entry.workspace)]


def _slower(item: Ranked, winner: Ranked, request: Request) -> Decline:
    """Which term of the ranking put ``item`` behind ``winner``."""
    if item.order_index != winner.order_index:
        rule = pin_rule(request) if winner.order_index == PINNED else None
        origin = rule.origin if rule is not None else request.config.origin("engines.order")
        hint = "a rule pins it" if rule is not None else "engines.order prefers it"
        return Decline("rank.slower", "order", expected=winner.id, hint=hint, origin=origin)
    mine, best = item.candidate.entry.spec, winner.candidate.entry.spec
    if mine.tier != best.tier:
        return Decline("rank.slower", "tier", expected=best.tier, actual=mine.tier)
    if item.bucket != winner.bucket and item.us is not None and winner.us is not None:
        return Decline("rank.slower", "time", expected=f"{winner.us:.4g} us", actual=f"{item.us:.4g} us")
    if item.efficiency != winner.efficiency:
        return Decline("rank.slower", "efficiency", expected=winner.efficiency, actual=item.efficiency)
    if mine.maturity != best.maturity:
        return Decline("rank.slower", "maturity", expected=best.maturity, actual=mine.maturity)
    return Decline("rank.slower", "id", expected=winner.id, actual=item.id, hint="equal in every other term")


def _entry(candidate: Candidate, config: PlanConfig) -> Entry:
    engine, support = candidate.entry, candidate.support
    return Entry(engine, config, notes_of(engine.spec, support), support.workspace, engine.id, engine.spec.short_id)


def _entries(item: Ranked) -> Iterable[Entry]:
    candidate = item.candidate
    for config in (candidate.config, *(config for config in candidate.configs if config != candidate.config)):
        yield _entry(candidate, config)


def survey(
    graph: FrozenGraph,
    device: DeviceInfo,
    handle: Handle | None = None,
    hint: Mapping[str, int] | None = None,
    filters: Filters = _NO_FILTERS,
    *,
    need_build: bool = False,
    registry: Registry | None = None,
    config: Config | None = None,
) -> Survey:
    """Ask every engine, rank those that can run ``graph`` on ``device``; nothing is built.

    ``need_build`` drops engines that can't build for a device that is only described. ``hint`` is checked against the Dims.
    """
    if registry is None:
        from ._registry import current as current_registry

        registry = current_registry()
    if config is None:
        from ._config import current as current_config

        config = current_config()
    sizes = _sizes(graph, hint)
    fixed = graph.at(sizes)
    rules = matching_rules(config, fixed, device, registry.dists)
    request = Request(graph, device, handle, sizes, filters, need_build, registry, config, rules)
    candidates, rows = collect(request)
    ranked = _rank(request, fixed, candidates)
    return Survey(request, ranked, rows)


def _sizes(graph: FrozenGraph, hint: Mapping[str, int] | None) -> dict[str, int]:
    given = {}
    for name, value in as_mapping(hint or {}, "hint").items():
        dim = graph.dims.get(name)
        if dim is None:
            raise ExecutionError(f"hint: the graph has no Dim {name!r} (it has: {', '.join(graph.dims) or 'none'})")
        given[name] = as_int(value, f"hint[{name!r}]")
        if not dim.admits(given[name]):
            raise ExecutionError(f"hint: {value!r} is outside {dim!r}")
    return graph.hint_sizes(given)


def _rank(request: Request, fixed: FrozenGraph, candidates: list[Candidate]) -> list[Ranked]:
    if not candidates:
        return []
    from ._roofline import graph_cost, roofline_us

    roofline = roofline_us(fixed.facts(graph_cost), request.device)
    record = tuning_record(request.graph.key, request.device)
    usable = None
    if record is not None:
        from ._members import measured_config

        usable = partial(measured_config, request)
    ranked = rank(
        candidates,
        request.config,
        request.device,
        roofline=roofline,
        record=record,
        sizes=dict(request.sizes),
        usable=usable,
    )
    rule = pin_rule(request)
    if rule is not None:
        pinned = [item for item in ranked if rule.pins(_member(item))]
        ranked = [*(item._replace(order_index=PINNED) for item in pinned), *(i for i in ranked if i not in pinned)]
        if not any(item.order_index == PINNED for item in ranked) and not is_strict(request, rule):
            _log.warning("the rule at %s pins %s, which can't run the graph: ranking goes on", rule.origin, rule.use)
    return ranked


def _member(item: Ranked) -> str:
    return member_name(item.candidate.entry.spec, item.candidate.config.variant)


def tuning_record(graph_key: str, device: DeviceInfo) -> Any:
    """The tuning record of a graph on a device in this environment, or None. A device that is only described has none: records
    belong to a driver, and it must not be asked."""
    if device.synthetic:
        return None
    from ._env import environment_key
    from ._tuning import device_facts, load

    return load(graph_key, device_facts(device), environment_key())


def summary(graph: FrozenGraph, sizes: Mapping[str, int]) -> str:
    """One line: the ops, then the data type and the named sizes of the first op that is not pointwise."""
    fixed = graph.at(sizes)
    anchor = next((node for node in fixed.nodes if lookup(node.op).group != "pointwise"), fixed.nodes[0])
    tensor = next(iter(anchor.inputs.values()), None) or next(iter(anchor.outputs.values()))
    tensor = tensor[0] if isinstance(tensor, tuple) else tensor
    dims = " ".join(f"{name}={size}" for name, size in lookup(anchor.op).dims(anchor).items())
    chain = " + ".join(node.op for node in graph.nodes)
    return f"{chain} {tensor.dtype} {dims}".rstrip()


# --- building
def build_in_order(
    found: Survey, order: Iterable[int], build: Callable[[int], Plan], *, every: bool = False
) -> list[tuple[int, Plan]]:
    """The first of the entries in ``order`` that builds, or ``every`` one that does, with its index.

    Raises NoEngineError if none builds. The Decision has what failed.
    """
    plans: list[tuple[int, Plan]] = []
    failure: BuildError | None = None
    for index in order:
        try:
            plans.append((index, build(index)))
        except BuildError as error:  # noqa: PERF203  one of a few, and each compiles
            failure = error
            _log.warning("%s could not be built: %s", found.name(index), error)
        else:
            if not every:
                break
    found.selected = plans[0][1].config if plans else None
    if not plans:
        reasons = "; ".join(
            f"{engine}: {decline}" for engine, declines in found.failures.items() for decline in declines
        )
        raise NoEngineError(f"no engine could build a plan: {reasons}", found.decision()) from failure
    return plans


def build_entry(found: Survey, index: int, bindings: Mapping[int, object], keys: Iterable[Tensor]) -> Plan:
    """The plan of one entry. BuildError, recorded as the engine's failure, if it does not build or breaks a limit."""
    request, entry = found.request, found.entries[index]
    if request is None or entry.engine is None:
        raise GraphError("the graph was loaded with its plan: it has no other")
    before = found.selected
    try:
        compiled = build_config(request, entry.engine, entry.config)
        found.selected = entry.config
        decision = found.decision()
        plan = finish(request.graph, compiled, entry.config, decision, request.device, request.handle, bindings, keys)
        found.check_built(index, plan)
    except BuildError as error:
        found.selected = before
        decline = error.decline or Decline("build.failed", entry.id, actual=str(error))
        known = found.failures.setdefault(entry.id, [])
        if decline not in known:
            known.append(decline)
        raise
    found.entries[index] = entry._replace(workspace=plan.engine_workspace_size)
    _announce(request, entry, plan)
    return plan


_warned: set[str] = set()


def _announce(request: Request, entry: Entry, plan: Plan) -> None:
    from ._hooks import call_isolated

    decision, member = plan.decision, member_id(plan.config._replace(variant=plan.variant))
    _log.info("graph %s on %s: %s", request.graph.key[:12], request.device.device_name, member)
    assert entry.engine is not None
    assert entry.engine.spec is not None
    if entry.engine.spec.tier == "reference" and request.device.type == "cuda" and entry.id not in _warned:
        _warned.add(entry.id)
        warnings.warn(
            f"the reference engine {entry.id} runs this graph on {request.device.device_name}; nearest other engine:"
            f" {nearest_decline(decision)}",
            RuntimeWarning,
            stacklevel=6,
        )
    call_isolated("cudnn_core_plan_selected", request.registry, decision=decision)

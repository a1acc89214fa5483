"""Planning: candidates -> ranking -> Decision -> a built plan.

``survey`` asks and ranks, and builds nothing; ``build_best`` builds the winner and falls through to the next on a failure,
which the Decision records. One lock per graph key, so that two threads never compile the same plan twice; graphs with one key
share their compiled plans. Imported by the graph, the plan file and the command line.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from ._candidates import (
    Filters,
    Request,
    collect,
    examine,
    failed,
    is_strict,
    matching_rules,
    notes_of,
    pin_rule,
    quarantine,
)
from ._context import build_device
from ._decision import Decision, EngineDecision, nearest_decline, nearest_miss
from ._declines import Decline
from ._dtypes import nbytes
from ._engine import CompiledPlan, ExecutionContext, PlanConfig
from ._errors import BuildError, ExecutionError, NoEngineError
from ._ops._table import lookup
from ._plan import Plan, check_compiled
from ._ranking import Candidate, Ranked, rank

if TYPE_CHECKING:
    from ._config import Config
    from ._device import DeviceInfo
    from ._graph._frozen import FrozenGraph, FrozenTensor
    from ._graph._tensor import Tensor
    from ._handle import Handle
    from ._registry import EngineEntry, Registry

__all__ = ["Entry", "Filters", "Survey", "build_best", "build_config", "build_entry", "plan_aliases", "survey"]

_log = logging.getLogger("cudnn_core")
_SHARED_LIMIT = 256
_NO_FILTERS = Filters()


class Entry(NamedTuple):
    """One plan that may be built: an engine with one knob setting."""

    engine: EngineEntry | None
    config: PlanConfig
    notes: frozenset[str]
    workspace: int | None
    us: float | None
    basis: str | None
    id: str
    short_id: str


class Survey:
    """What planning found out: the ranked entries and one row for every engine. Building adds failures to it."""

    def __init__(self, request: Request | None, ranked: list[Ranked], rows: list[EngineDecision]) -> None:
        self.request = request
        self.ranked = ranked
        self.rows = rows
        self.failures: dict[str, Decline] = {}
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
            Entry(None, plan.config, frozenset(), plan.workspace_size, None, None, engine, engine.partition("@")[0])
        ]
        return made

    def name(self, index: int) -> str:
        config = self.entries[index].config
        knobs = ", ".join(f"{key}={value}" for key, value in sorted(config.knobs.items()))
        engine = f"{config.engine}/{config.variant}" if config.variant else config.engine
        return f"{engine}[{knobs}]" if knobs else engine

    def require_engine(self) -> None:
        """NoEngineError if nothing can run the graph, or a strict pin can't be honoured."""
        if not self.entries:
            decision = self.decision()
            raise NoEngineError(nearest_miss(decision), decision)

    def append(self, engine_id: str, knobs: Mapping[str, Any] | None) -> int:
        """Add a pinned engine and knobs as a further entry, after checking that it can run the graph."""
        assert self.request is not None, "a loaded plan is not re-planned"
        name, _, variant = engine_id.partition("/")
        engine = self.request.registry.get(name)
        assert engine.spec is not None
        found = examine(self.request, engine)
        if not isinstance(found, Candidate):
            decision = self.decision()
            raise NoEngineError(f"{engine_id} can't run the graph: " + "; ".join(map(str, found.reasons)), decision)
        declines = engine.spec.knob_declines(knobs or {})
        if declines:
            raise NoEngineError(f"{engine_id}: " + "; ".join(map(str, declines)), self.decision())
        base = dict(found.config.knobs) if knobs is None else {}
        config = PlanConfig(
            engine.spec.id, engine.spec.complete_knobs({**base, **(knobs or {})}), variant or found.config.variant
        )
        for index, entry in enumerate(self.entries):
            if entry.config == config:
                return index
        notes = notes_of(engine.spec, found.support)
        self.entries.append(
            Entry(engine, config, notes, found.support.workspace, None, None, engine.id, engine.spec.short_id)
        )
        return len(self.entries) - 1

    def decision(self) -> Decision:
        """The record as it stands now."""
        if self._loaded is not None:
            return self._loaded.decision
        request = self.request
        assert request is not None
        rows = list(self.rows)
        chosen = self.selected
        winner = next(
            (r for r in self.ranked if chosen is not None and r.candidate.config.engine == chosen.engine), None
        )
        for place, item in enumerate(self.ranked, start=1):
            rows.append(self._row(place, item, winner, chosen))
        config = [(value.key, value.value, value.origin) for value in request.config.values]
        config += [(f"hint.{name}", size, "hint") for name, size in request.sizes.items()]
        return Decision(
            request.graph.key, request.device.to_dict(), rows, config, summary=summary(request.graph, request.sizes)
        )

    def _row(self, place: int, item: Ranked, winner: Ranked | None, chosen: PlanConfig | None) -> EngineDecision:
        entry = item.candidate.entry
        config = item.candidate.config
        base = EngineDecision(
            item.id,
            entry.dist,
            entry.version,
            "eligible",
            place,
            item.us,
            item.basis,
            config,
            item.candidate.support.workspace,
        )
        if item is winner:
            assert chosen is not None
            return base._replace(state="selected", config=chosen)
        failure = self.failures.get(entry.id)
        if failure is not None:
            return base._replace(state="build_failed", reasons=(failure,))
        if winner is None:
            return base._replace(state="build_failed", reasons=(Decline("build.failed", entry.id),))
        return base._replace(state="outranked", reasons=(_slower(item, winner),))


def _slower(item: Ranked, winner: Ranked) -> Decline:
    """Which term of the ranking put ``item`` behind ``winner``."""
    if item.order_index != winner.order_index:
        return Decline("rank.slower", "order", expected=winner.id, hint="an order or pin rule prefers it")
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


def _entries(item: Ranked) -> Iterable[Entry]:
    candidate = item.candidate
    spec = candidate.entry.spec
    configs = [candidate.config, *(config for config in candidate.configs if config != candidate.config)]
    for config in configs:
        yield Entry(
            candidate.entry,
            config,
            notes_of(spec, candidate.support),
            candidate.support.workspace,
            item.us if config == candidate.config else None,
            item.basis,
            candidate.entry.id,
            spec.short_id,
        )


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
    for name, value in (hint or {}).items():
        dim = graph.dims.get(name)
        if dim is None:
            raise ExecutionError(f"hint: the graph has no Dim {name!r} (it has: {', '.join(graph.dims) or 'none'})")
        if not isinstance(value, int) or not dim.admits(value):
            raise ExecutionError(f"hint: {value!r} is outside {dim!r}")
    return graph.hint_sizes(hint)


def _rank(request: Request, fixed: FrozenGraph, candidates: list[Candidate]) -> list[Ranked]:
    if not candidates:
        return []
    from ._roofline import graph_cost, roofline_us

    roofline = roofline_us(fixed.facts(graph_cost), request.device)
    record = tuning_record(request.graph.key, request.device) if len(candidates) > 1 else None
    ranked = rank(
        candidates, request.config, request.device, roofline=roofline, record=record, sizes=dict(request.sizes)
    )
    rule = pin_rule(request)
    if rule is not None:
        pinned = [item for item in ranked if rule.pins(_member(item))]
        ranked = [*(item._replace(order_index=-1) for item in pinned), *(i for i in ranked if i not in pinned)]
        if not any(item.order_index == -1 for item in ranked) and not is_strict(request, rule):
            _log.info("rule %s pins %s, which can't run the graph: ranking goes on", rule.origin, rule.use)
    return ranked


def _member(item: Ranked) -> str:
    """``plugin:engine[/variant]``, as configuration names it."""
    short_id, variant = item.candidate.entry.spec.short_id, item.candidate.config.variant
    return f"{short_id}/{variant}" if variant else short_id


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
def build_best(found: Survey, bindings: Mapping[int, object], keys: Iterable[Tensor]) -> Plan:
    """The first ranked engine whose plan builds."""
    found.require_engine()
    keys = list(keys)
    for item in found.ranked:
        entry = next(iter(_entries(item)))
        try:
            return _plan(found, entry, bindings, keys)
        except BuildError as error:
            _log.warning("engine %s could not build its plan: %s", entry.id, error)
    found.selected = None
    decision = found.decision()
    reasons = "; ".join(f"{engine}: {decline}" for engine, decline in found.failures.items())
    raise NoEngineError(f"no engine could build a plan: {reasons}", decision)


def build_entry(found: Survey, index: int, bindings: Mapping[int, object], keys: Iterable[Tensor]) -> Plan:
    """The plan of one entry; BuildError if it does not build."""
    return _plan(found, found.entries[index], bindings, list(keys))


def _plan(found: Survey, entry: Entry, bindings: Mapping[int, object], keys: list[Tensor]) -> Plan:
    request = found.request
    assert request is not None
    assert entry.engine is not None
    try:
        compiled = build_config(request, entry.engine, entry.config)
        limit = request.config.max_workspace
        if limit is not None and compiled.workspace_size > limit:
            raise BuildError(f"needs {compiled.workspace_size} bytes of workspace, the limit is {limit}")
    except BuildError as error:
        code = "resource.workspace" if "bytes of workspace" in str(error) else "build.failed"
        found.failures[entry.id] = Decline(code, entry.id, actual=str(error))
        if entry.engine.state != "quarantined":
            failed(request, entry.engine, "build_plan", found.failures[entry.id])
        raise
    found.selected = entry.config
    decision = found.decision()
    _announce(request, entry, decision)
    return finish(request.graph, compiled, entry.config, decision, request.device, request.handle, bindings, keys)


def finish(
    graph: FrozenGraph,
    compiled: CompiledPlan,
    config: PlanConfig,
    decision: Decision,
    device: DeviceInfo,
    handle: Handle | None,
    bindings: Mapping[int, object],
    keys: Iterable[Tensor],
) -> Plan:
    """A Plan whose operands can be named by the graph's descriptors."""
    ignored: dict[object, str] = {}
    operands = {operand.uid for operand in graph.operands}
    used = {tensor.uid for tensor in graph.tensors}
    keys = list(keys)
    for tensor in keys:
        if tensor.uid in operands:
            continue
        why = (
            "unused" if tensor.uid not in used else "is a constant" if tensor.by_value else "is virtual, not an operand"
        )
        for key in (tensor, tensor.uid, tensor.name):
            if key != "":
                ignored[key] = why
    plan = Plan(graph, compiled, config, decision, device, handle, bindings, plan_aliases(graph), ignored)
    for tensor in keys:
        plan._layout.add_key(tensor, tensor.uid)
    return plan


_locks: WeakValueDictionary[Any, Any] = WeakValueDictionary()
_locks_guard = threading.Lock()
_shared: OrderedDict[Any, CompiledPlan] = OrderedDict()


class _Lock:
    """A lock that a weak dictionary can hold."""

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()


def build_config(request: Request, engine: EngineEntry, config: PlanConfig) -> CompiledPlan:
    """The compiled plan of an engine with knobs, built at most once per graph key, device and engine object."""
    from ._canonical import dumps, plain

    key = (
        request.graph.key,
        config.engine,
        config.variant,
        dumps(plain(config.knobs)),
        request.device.key(),
        request.device.ordinal,
        request.device.synthetic,
        engine.instance(),
    )
    with _locks_guard:
        guard = _locks.get(request.graph.key)
        if guard is None:
            guard = _locks[request.graph.key] = _Lock()
    with guard.lock:
        compiled = _shared.get(key)
        if compiled is not None:
            return compiled
        try:
            with build_device(request.device):
                compiled = engine.instance().build_plan(
                    request.graph, config, ExecutionContext(request.handle, request.device)
                )
            check_compiled(compiled, config.engine)
        except BuildError:
            raise
        except Exception as error:
            decline = quarantine(request, engine, "build_plan", error)
            raise BuildError(str(decline)) from error
        with _locks_guard:
            _shared[key] = compiled
            while len(_shared) > _SHARED_LIMIT:
                _shared.popitem(last=False)
        return compiled


_warned: set[str] = set()


def _announce(request: Request, entry: Entry, decision: Decision) -> None:
    from ._hooks import call_isolated

    _log.info("graph %s on %s: %s", request.graph.key[:12], request.device.device_name, entry.id)
    assert entry.engine is not None
    assert entry.engine.spec is not None
    if entry.engine.spec.tier == "reference" and request.device.type == "cuda" and entry.id not in _warned:
        _warned.add(entry.id)
        warnings.warn(
            f"the reference engine {entry.id} runs this graph on {request.device.device_name}; nearest other engine:"
            f" {nearest_decline(decision)}",
            RuntimeWarning,
            stacklevel=4,
        )
    call_isolated("cudnn_core_plan_selected", request.registry, decision=decision)


def plan_aliases(graph: FrozenGraph) -> dict[tuple[int, int], int]:
    """{(slot, other slot): bytes from the first's address to the other's}: an output and an input that may share memory
    like this, in both directions. The op allows it, and nothing but the op reads the input."""
    slots = {tensor.index: slot for slot, tensor in enumerate(graph.operand_tensors())}
    pairs: dict[tuple[int, int], int] = {}

    def allow(out: FrozenTensor | None, source: FrozenTensor | None, offset: int) -> None:
        if out is None or source is None or out.index not in slots or source.index not in slots:
            return
        if out.dtype == source.dtype and len(source.consumers) == 1:
            pairs[slots[out.index], slots[source.index]] = offset
            pairs[slots[source.index], slots[out.index]] = -offset

    for node in graph.nodes:
        op = lookup(node.op)
        for out_port, in_port in op.alias:
            out, source = node.outputs.get(out_port), node.inputs.get(in_port)
            if out is not None and source is not None and out.dim == source.dim and out.stride == source.stride:
                allow(out, source, 0)
        if op.in_place is not None and not graph.dims:
            for out_port, in_port, position, elements in op.in_place(node):
                source = node.inputs[in_port]
                source = source[position] if isinstance(source, tuple) else source
                allow(node.outputs[out_port], source, nbytes(source.dtype, elements))
    return pairs

"""From an engine and its knobs to a plan: compiled once, shared, and given the names of the caller's graph.

Graphs with one key share their compiled plans. Whoever asks first builds; who asks meanwhile waits, unless that would be for
itself (an engine that plans its own graph while it builds gets a BuildError, and with it the next engine) or in a circle with
another thread (then both build). No lock is held while plugin code runs, and hooks are told when nobody waits any more.
Imported by the planner, plan files, the benchmark, the command line and the conformance kit.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ._aliasing import plan_aliases
from ._canonical import dumps, plain
from ._declines import Decline
from ._engine import CompiledPlan, PlanConfig
from ._errors import BuildError
from ._guard import attempt, notify, report
from ._hooks import message_of
from ._locks import ForkLock
from ._plan import Plan
from ._protocol import as_compiled, as_variant
from ._ranking import member_id
from ._records import EngineBroken

if TYPE_CHECKING:
    from ._candidates import Request
    from ._decision import Decision
    from ._device import DeviceInfo
    from ._graph._frozen import FrozenGraph
    from ._graph._tensor import Tensor
    from ._handle import Handle
    from ._registry import EngineEntry

__all__ = ["build_config", "compiled_by", "finish"]

_SHARED_LIMIT = 256


class _Build:
    """A compilation under way in the thread ``owner``."""

    __slots__ = ("done", "error", "owner", "plan")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.done = threading.Event()
        self.plan: CompiledPlan | None = None
        self.error: Exception | None = None


class _Identity:
    """An object as a key: by identity, whatever its class thinks of equality. Keeps it alive, so that its id is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


# The builds that this context is inside of: a helper thread that runs in a copy of it counts as the same.
_inside: ContextVar[tuple[Hashable, ...]] = ContextVar("cudnn_core.building", default=())


class _Shared:
    """Compiled plans by key, each built once."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._plans: OrderedDict[Hashable, CompiledPlan] = OrderedDict()
        self._running: dict[Hashable, _Build] = {}
        self._waits: dict[int, _Build] = {}  # thread -> what it waits for

    def get(self, key: Hashable, what: str, build: Callable[[], CompiledPlan]) -> CompiledPlan:
        if key in _inside.get():
            raise BuildError(f"engine {what} asked for its own plan while it was building it")
        me = threading.get_ident()
        while True:
            with self._lock:
                plan = self._plans.get(key)
                if plan is not None:
                    self._plans.move_to_end(key)
                    return plan
                other = self._running.get(key)
                if other is None or self._in_a_circle(other, me):
                    mine = _Build(me)
                    self._running.setdefault(key, mine)
                    break
                self._waits[me] = other
            try:
                other.done.wait()
            finally:
                self._waits.pop(me, None)
            if other.error is not None:
                raise other.error
        token = _inside.set((*_inside.get(), key))
        try:
            mine.plan = build()
        except Exception as error:
            mine.error = error
            raise
        finally:  # with neither plan nor error (KeyboardInterrupt) whoever waits takes over
            _inside.reset(token)
            with self._lock:
                if mine.plan is not None:
                    self._plans[key] = mine.plan
                    if len(self._plans) > _SHARED_LIMIT:
                        self._plans.popitem(last=False)
                if self._running.get(key) is mine:
                    del self._running[key]
            mine.done.set()
        return mine.plan

    def _in_a_circle(self, build: _Build, me: int) -> bool:
        """Whether the owner of ``build`` waits, directly or not, for this thread."""
        seen: set[int] = set()
        while build.owner != me and build.owner not in seen and build.owner in self._waits:
            seen.add(build.owner)
            build = self._waits[build.owner]
        return build.owner == me

    def forget_builds(self) -> None:
        self._running = {}
        self._waits = {}


_shared = _Shared()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_shared.forget_builds)  # their threads exist in the parent only


def build_config(request: Request, engine: EngineEntry, config: PlanConfig) -> CompiledPlan:
    """The compiled plan of an engine with knobs, built at most once per graph key, device and engine object.

    Raises BuildError, with the reason as its ``decline``, whether the engine says that it can't or is broken.
    """
    device = request.device

    def build() -> CompiledPlan:
        return compiled_by(
            request, engine, config, "build_plan", lambda: instance.build_plan(request.graph, config, request.building)
        )

    try:
        instance = attempt(request, engine, "import", engine.instance)
        knobs = dumps(plain(config.knobs))
        key = (request.graph.key, config.engine, config.variant, knobs, device.key(), device.ordinal, device.synthetic)
        return _shared.get((*key, _Identity(instance)), config.engine, build)
    except EngineBroken as broken:
        report(request, engine, broken)
        raise BuildError(str(broken.decline), decline=broken.decline) from broken
    except BuildError as error:
        text = message_of(error)
        decline = (
            error.decline
            if isinstance(error.decline, Decline)
            else Decline("build.failed", member_id(config), actual=text)
        )
        notify(request, engine, "build_plan", decline, "".join(traceback.format_exception(error)))
        raise BuildError(text, decline=decline) from error


def compiled_by(
    request: Request, engine: EngineEntry, config: PlanConfig, stage: str, call: Callable[[], CompiledPlan]
) -> CompiledPlan:
    """What ``call``, an engine's ``build_plan`` or ``load_plan``, makes of ``config``. Raises EngineBroken or BuildError."""
    spec = engine.spec
    assert spec is not None

    def checked() -> CompiledPlan:
        return as_variant(as_compiled(call(), engine.id), spec, config.variant)

    return attempt(request, engine, stage, checked, passing=(BuildError,))


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

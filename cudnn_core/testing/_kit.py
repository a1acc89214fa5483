"""What the kit's checks share: options, the registry under a clean configuration, devices, verdicts, plans, failure texts.

The user's configuration does not count while a check runs: every installed engine takes part, experimental ones too. An engine
is first imported in a child process with a time limit, so that one that hangs or exits costs its own checks only. Imported by
the pytest plugin.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from .._candidates import Filters, Request, examine
from .._config import _state
from .._config._layer import flat_settings, parse_layer
from .._config._source import Source
from .._context import build_device
from .._declines import Decline
from .._device import DeviceInfo, as_device, device_info
from .._driver import driver
from .._engine import Declined, ExecutionContext, PlanConfig
from .._errors import BuildError, CudnnCoreError
from .._filter import filter_graph
from .._ranking import Candidate, rank
from .._registry import current
from ._cases import Case, as_cases

if TYPE_CHECKING:
    from .._engine import Engine
    from .._graph._frozen import FrozenGraph
    from .._plan import Plan
    from .._registry import EngineEntry, Registry

__all__ = ["PRESETS", "Kit", "KitFailure", "Options", "build_decline", "short_graph"]

# One part of each architecture that a manifest may name, and the CPU.
PRESETS = ("A100", "L40S", "H200", "B200", "B300", "RTX5090")


class KitFailure(AssertionError):  # noqa: N818  pytest speaks of failures
    """A check failed; the text is the whole report."""


class Options(NamedTuple):
    """The kit's command line. ``devices`` empty: whatever is present of the types in the manifest."""

    plugins: tuple[str, ...]
    devices: tuple[str, ...] = ()
    level: str = "quick"
    cases: tuple[str, ...] = ()
    oracle: str = "auto"
    timeout: float = 60.0
    calibration: str = ""


class Kit:
    """One run of the kit."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.full = options.level == "full"
        self._cases: list[Case] | None = None
        self._own: dict[tuple[str, str], Case] = {}
        self._probes: dict[str, Any] = {}
        self._clean: Any = None

    # --- environment
    @contextmanager
    def environment(self) -> Iterator[None]:
        """Inside, the configuration in force is the built-in one, with every engine enabled."""
        if self._clean is None:
            source = Source("api", "the conformance kit")
            self._clean = _state._Snapshot((parse_layer(source, flat_settings(source, {"enable": ["*:*"]})),))
            self._clean._base = []
        before, _state._snapshot = _state._snapshot, self._clean
        try:
            yield
        finally:
            _state._snapshot = before

    @property
    def registry(self) -> Registry:
        return current(enforce=False)

    def cases(self) -> list[Case]:
        """The library at the chosen level, and the cases that the user names."""
        if self._cases is None:
            from ._library import library

            found = library()
            for text in self.options.cases:
                found += _user_cases(text, {case.name for case in found})
            self._cases = [case for case in found if self.full or not case.full]
        return self._cases

    def cases_for(self, entry: EngineEntry, device: DeviceInfo) -> list[Case]:
        """The cases that pass the engine's manifest on ``device``, with graphs that only this engine sees."""
        assert entry.spec is not None
        found = []
        for case in self.cases():
            if not filter_graph(entry.spec, case.freeze(device.type), device):
                key = (entry.short_id, case.name)
                found.append(self._own.get(key) or self._own.setdefault(key, case.copy()))
        return found

    def devices(self, types: Iterable[str]) -> list[DeviceInfo]:
        """The present devices to run on, of these types."""
        if self.options.devices:
            named = [as_device(text) for text in self.options.devices]
            described = [device.device_name for device in named if device.synthetic]
            if described:
                raise KitFailure(f"--cudnn-device: {', '.join(described)} is only described, and nothing can run on it")
            return [device for device in named if device.type in types]
        return [device for device in _present() if device.type in types]

    def described(self) -> list[DeviceInfo]:
        """Devices to ask about: the CPU and one preset for each architecture."""
        return [device_info("cpu"), *map(DeviceInfo.preset, PRESETS)]

    # --- engines
    def entries(self, plugin: str) -> list[EngineEntry]:
        return [entry for entry in self.registry.engines if entry.plugin == plugin and entry.spec is not None]

    def probe(self, entry: EngineEntry) -> Any:
        """What importing and asking the engine did in a child process; run once."""
        if entry.short_id not in self._probes:
            from ._probe import run_probe

            self._probes[entry.short_id] = run_probe(entry, self._probe_graphs(entry), self.options.timeout)
        return self._probes[entry.short_id]

    def _probe_graphs(self, entry: EngineEntry) -> list[str]:
        assert entry.spec is not None
        devices = self.described()
        found: list[str] = []
        for case in self.cases():
            frozen = case.freeze()
            if any(not filter_graph(entry.spec, frozen, device) for device in devices):
                found.append(case.graph.to_json())
        return found[:: max(1, len(found) // 24)]

    def engine(self, entry: EngineEntry) -> Engine:
        """The engine object, once the probe has shown that it can be had."""
        probe = self.probe(entry)
        if probe.fatal:
            raise KitFailure(f"engine {entry.id} can't be used: {probe.fatal}")
        try:
            return entry.instance()
        except CudnnCoreError as error:
            raise KitFailure(f"engine {entry.id} can't be used: {error}") from error

    def request(self, entry: EngineEntry, graph: FrozenGraph, device: DeviceInfo) -> Request:
        from .._config import current as config

        self.engine(entry)
        return Request(graph, device, None, graph.hint_sizes(), Filters(), False, self.registry, config(), ())

    def candidate(self, entry: EngineEntry, case: Case, device: DeviceInfo) -> Candidate | Declined:
        """What the core makes of the engine's verdict. KitFailure if the engine broke the protocol."""
        graph = case.freeze(device.type)
        with build_device(device):
            found = examine(self.request(entry, graph, device), entry)
        if isinstance(found, Candidate):
            return found
        if found.state == "quarantined":
            reasons = "; ".join(map(str, found.reasons))
            raise KitFailure(failure_text(entry.id, device, case, f"the engine was quarantined: {reasons}"))
        return Declined(found.reasons)

    def plan(self, entry: EngineEntry, case: Case, device: DeviceInfo, config: PlanConfig | None = None) -> Plan:
        """The plan of an accepted case. KitFailure if it does not build (BuildError stays, for a ``config`` given)."""
        from .._building import build_config, finish
        from .._planner import Survey

        graph = case.freeze(device.type)
        found = self.candidate(entry, case, device)
        if not isinstance(found, Candidate):
            raise KitFailure(failure_text(entry.id, device, case, f"declined now: {found.reasons}"))
        request = self.request(entry, graph, device)
        try:
            compiled = build_config(request, entry, config or found.config)
        except BuildError as error:
            if config is not None:
                raise
            raise KitFailure(
                failure_text(entry.id, device, case, f"check_support accepts the graph, build_plan fails: {error}")
            ) from error
        used = config or found.config
        survey = Survey(request, rank([found], request.config, device), [])
        survey.selected = used
        return finish(graph, compiled, used, survey.decision(), device, None, {}, case.graph.tensors)

    def context(self, device: DeviceInfo) -> ExecutionContext:
        return ExecutionContext(None, device)


def _user_cases(text: str, taken: set[str]) -> list[Case]:
    """What ``--cudnn-cases text`` names, each built once to see that it can be."""
    module, _, name = text.partition(":")
    try:
        cases = as_cases(getattr(importlib.import_module(module), name)(), text)
        for case in cases:
            case.freeze()
            if case.name in taken:
                raise ValueError(f"there is a case {case.name!r} already")
            taken.add(case.name)
    except Exception as error:
        raise KitFailure(f"--cudnn-cases {text}: {type(error).__name__}: {error}") from error
    return cases


def _present() -> list[DeviceInfo]:
    found = [device_info("cpu")]
    if driver() is not None:
        found.append(device_info(0))
    return found


def build_decline(error: BuildError) -> Decline | None:
    """The reason that the engine itself gave for not building, and none of the core's: of anything else None."""
    cause = error.__cause__
    found = cause.decline if isinstance(cause, BuildError) else None
    return found if isinstance(found, Decline) else None


def place(device: DeviceInfo) -> str:
    """``cpu`` or ``cuda:0``, for ids."""
    return device.type if device.type == "cpu" or device.ordinal is None else f"{device.type}:{device.ordinal}"


def failure_text(engine: str, device: DeviceInfo, case: Case, message: str) -> str:
    """Engine, device, case, what happened, and the graph."""
    head = f"engine {engine} on {device.device_name or device.type}, case {case.name}"
    return f"{head}\n  {message}\n  graph {short_graph(case.freeze(device.type))}"


def short_graph(graph: FrozenGraph, limit: int = 1200) -> str:
    """The graph as JSON without what is usual."""
    from .._graph._json import to_dict

    document = to_dict(graph)
    tensors = []
    for row in document["tensors"]:
        usual: Mapping[str, Any] = {"by_value": False, "value": None, "reordering": "NONE", "ragged_offset": None}
        tensors.append({key: value for key, value in row.items() if key not in usual or usual[key] != value})
    nodes = [
        {key: row[key] for key in ("op", "inputs", "outputs", "attrs", "compute_data_type")}
        for row in document["nodes"]
    ]
    text = json.dumps({"tensors": tensors, "nodes": nodes}, separators=(",", ":"))
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def child_environment() -> dict[str, str]:
    """This process's environment with its module path, for child processes that must find the same plugins."""
    import sys

    path = [os.path.abspath(entry) for entry in sys.path if entry and os.path.exists(entry)]  # noqa: PTH100, PTH110
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

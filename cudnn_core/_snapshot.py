"""One snapshot of the registry, and its entries. Made and published by ``_registry``, which is what others import."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ._declines import Decline
from ._discovery import Discovery, Point
from ._errors import CudnnCoreError, nearest
from ._hooks import HookResult
from ._manifest import EngineSpec, Manifest
from ._records import EngineBroken, PluginRecord, failure, import_object
from ._versions import normalise, requirement_decline

if TYPE_CHECKING:
    from ._config import Config
    from ._engine import Engine

__all__ = ["EngineEntry", "EngineLookupError", "PluginEntry", "Registry"]

_ENGINE_ID = re.compile(r"([a-z][a-z0-9_]*):([a-z][a-z0-9_]*)(?:@([0-9]+))?(?:/(.+))?\Z")
_epochs = itertools.count(1)


class Catalogue(Protocol):
    """What a snapshot is made of: the plugins, whatever the configuration, and the scan that found them."""

    @property
    def records(self) -> tuple[PluginRecord, ...]: ...

    @property
    def discovery(self) -> Discovery: ...

    def dists(self) -> Mapping[str, str]: ...


class EngineLookupError(CudnnCoreError):
    """No usable engine has the name.

    ``kind`` is "unknown" (malformed, or the plugin has no such engine), "not_installed" (there is no such plugin) or
    "unavailable" (it is there, and quarantined or disabled: ``reasons``).
    """

    def __init__(self, message: str, kind: str, reasons: Sequence[Decline] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.reasons = tuple(reasons)


class PluginEntry(NamedTuple):
    """One installed plugin. ``state`` is "quarantined", "disabled" or "eligible"."""

    plugin: str
    dist: str
    version: str
    origin: str
    state: str
    reasons: tuple[Decline, ...]
    manifest: Manifest | None


class EngineEntry:
    """One engine of a snapshot; ``str()`` is its id. A quarantined plugin has a single entry, called like the plugin.

    spec     the manifest's table, or None for a quarantined plugin
    plugin   the plugin's id; dist, version, origin say where it comes from
    state    "quarantined", "disabled", "filtered" (a requirement is not met) or "eligible"
    reasons  why it is not eligible: all that is known before a graph is looked at
    """

    __slots__ = (
        "_declines",
        "_dists",
        "_record",
        "_requirements",
        "_state",
        "dist",
        "id",
        "origin",
        "plugin",
        "spec",
        "version",
    )

    def __init__(
        self,
        record: PluginRecord,
        spec: EngineSpec | None,
        state: str,
        declines: Sequence[Decline],
        dists: Callable[[], Mapping[str, str]],
    ) -> None:
        found = record.found
        self.plugin = found.plugin
        self.dist = found.dist
        self.version = found.version
        self.origin = found.origin
        self.spec = spec
        self.id = spec.id if spec is not None else found.plugin
        self._record = record
        self._state = state
        self._declines = tuple(declines)
        self._dists = dists
        self._requirements: tuple[Decline, ...] | None = None

    def __str__(self) -> str:
        return self.id

    def __repr__(self) -> str:
        return f"<engine {self.id} ({self.dist} {self.version}): {self.state}>"

    @property
    def short_id(self) -> str:
        """``plugin:engine``, as configuration files name it."""
        return self.spec.short_id if self.spec is not None else self.plugin

    @property
    def package_dir(self) -> str | None:
        """The directory of the plugin's package, where its calibration files are; None if it is not in a directory."""
        found = self._record.found
        return os.path.dirname(found.manifest_path) if found.manifest_path and found.manifest is None else None  # noqa: PTH120

    @property
    def state(self) -> str:
        if self._state == "quarantined" or self.failure is not None:
            return "quarantined"
        if self._state == "disabled":
            return "disabled"
        return "filtered" if self._requirement_declines() else "eligible"

    @property
    def reasons(self) -> tuple[Decline, ...]:
        failed = self.failure
        return (*((failed.decline,) if failed else ()), *self._declines, *self._requirement_declines())

    @property
    def failure(self) -> EngineBroken | None:
        """What the engine's code raised, if it did, with the traceback."""
        return self._record.cell(f"engine:{self.spec.name}").failure if self.spec is not None else None

    def instance(self) -> Engine:
        """The engine object: imported and constructed once for all snapshots until ``refresh``.

        Raises EngineBroken if the plugin's code fails, again and with the same reason at every later call.
        """
        if self.spec is None:
            raise EngineBroken(self.id, self._declines[0])
        return self._record.engine(self.spec)  # type: ignore[no-any-return]

    def environment(self) -> dict[str, str]:
        """The distributions that the engine's speed depends on, with their versions: its own, and those that its manifest
        requires."""
        installed = self._dists()
        required = (normalise(item.dist) for item in (self.spec.requires if self.spec else ()))
        return {normalise(self.dist): self.version, **{dist: installed.get(dist, "") for dist in sorted(required)}}

    def _requirement_declines(self) -> tuple[Decline, ...]:
        if self._requirements is None:
            found = [requirement_decline(item, self._dists()) for item in (self.spec.requires if self.spec else ())]
            self._requirements = tuple(decline for decline in found if decline is not None)
        return self._requirements


class Registry:
    """One snapshot.

    engines       every known engine, in discovery order
    plugins       every installed plugin
    op_factories  op name -> factory, of the ops that usable plugins add
    op_declines   op name -> why a plugin's op is left out
    config        the configuration that it was made under
    epoch         a number that no other snapshot of this process has
    """

    def __init__(self, catalogue: Catalogue, config: Config) -> None:
        self.config = config
        self.epoch = next(_epochs)
        self._catalogue = catalogue
        usable: list[PluginRecord] = []
        engines: list[EngineEntry] = []
        plugins: list[PluginEntry] = []
        for record in catalogue.records:
            state, declines = _plugin_state(record, catalogue.records, config)
            computed: tuple[EngineSpec, ...] = ()
            if state == "eligible":
                computed = record.computed()
                if record.hook_declines():
                    state, declines = "quarantined", record.hook_declines()
            if state == "eligible":
                usable.append(record)
            found = record.found
            plugins.append(
                PluginEntry(
                    found.plugin, found.dist, found.version, found.origin, state, tuple(declines), record.manifest
                )
            )
            if state == "quarantined" or record.manifest is None:
                engines.append(EngineEntry(record, None, state, declines, catalogue.dists))
                continue
            for spec in (*record.manifest.engines, *computed):
                reasons = config.engine_declines(spec.short_id, spec.maturity) or declines
                engines.append(
                    EngineEntry(record, spec, "disabled" if reasons else "eligible", reasons, catalogue.dists)
                )
        self.engines = tuple(engines)
        self.plugins = tuple(plugins)
        self._usable = tuple(usable)
        self._by_short_id = {entry.short_id: entry for entry in engines if entry.spec is not None}
        owners, self.op_declines = _ops(usable)
        self._op_owners = owners
        self.op_factories: Mapping[str, str] = MappingProxyType(
            {name: record.manifest.ops[name] for name, record in owners.items() if record.manifest}
        )

    def __repr__(self) -> str:
        return f"<Registry {self.epoch}: {', '.join(map(str, self.engines)) or 'no engines'}>"

    @property
    def discovery(self) -> Discovery:
        """The scan behind the snapshot: broken, shadowed and ignored distributions too."""
        return self._catalogue.discovery

    @property
    def dists(self) -> Mapping[str, str]:
        """Normalised name -> version of every installed distribution."""
        return self._catalogue.dists()

    @property
    def reports(self) -> tuple[Decline, ...]:
        """What hooks and ops of plugins did wrong without being quarantined for it."""
        return (*self.op_declines.values(), *(item for record in self._catalogue.records for item in record.reports))

    def find(self, name: str) -> EngineEntry:
        """The engine called ``plugin:engine[@revision][/variant]``, whatever its state.

        Raises EngineLookupError, kind "unknown" or "not_installed".
        """
        match = _ENGINE_ID.match(name)
        if match is None:
            raise EngineLookupError(
                f"{name!r} is not an engine id (plugin:engine){nearest(name, self._by_short_id)}", "unknown"
            )
        plugin, engine, revision, variant = match.groups()
        entry = self._by_short_id.get(f"{plugin}:{engine}")
        if entry is None or entry.spec is None:
            blocked = [item for item in self.engines if item.plugin == plugin and item.spec is None]
            if blocked:
                return blocked[0]
            if all(item.plugin != plugin for item in self.plugins):
                hint = nearest(plugin, [item.plugin for item in self.plugins])
                raise EngineLookupError(f"{name}: plugin {plugin!r} is not installed{hint}", "not_installed")
            hint = nearest(f"{plugin}:{engine}", self._by_short_id)
            raise EngineLookupError(f"{name}: plugin {plugin!r} has no engine {engine!r}{hint}", "unknown")
        if revision is not None and int(revision) != entry.spec.revision:
            raise EngineLookupError(f"{name}: revision {entry.spec.revision} is installed", "unknown")
        if not entry.spec.has_variant(variant or ""):
            raise EngineLookupError(f"{name}: no variant {variant!r} (pattern {entry.spec.variants!r})", "unknown")
        return entry

    def get(self, name: str) -> EngineEntry:
        """Like ``find``, for an engine that can be used: EngineLookupError of kind "unavailable" carries the reasons."""
        entry = self.find(name)
        if entry.state != "eligible":
            reasons = "; ".join(map(str, entry.reasons))
            raise EngineLookupError(f"{name} is {entry.state}: {reasons}", "unavailable", entry.reasons)
        return entry

    def quarantine(self, entry: EngineEntry, broken: EngineBroken) -> bool:
        """Take ``entry`` out until ``refresh``: its code raised or broke the protocol. The first reason stays; True for it."""
        if entry.spec is None:
            return False
        cell = entry._record.cell(f"engine:{entry.spec.name}")
        cell.failure = cell.failure or broken
        first, cell.reported = not cell.reported, True
        return first

    def op_row(self, name: str) -> Any:
        """The row of a plugin's op. Raises EngineBroken if its code fails, EngineLookupError if no plugin has it."""
        record = self._op_owners.get(name)
        if record is None:
            declined = self.op_declines.get(name)
            if declined is not None:
                raise EngineLookupError(f"op {name}: {declined}", "unavailable", [declined])
            raise EngineLookupError(f"no plugin has an op {name!r}{nearest(name, self.op_factories)}", "unknown")
        return record.op_row(name)

    def provider(self, name: str) -> Any:
        """The module that a plugin ``provides`` as ``name``; None if there is none, or it fails, or there are two."""
        module, _ = self._provider(name)
        return module

    def provider_declines(self, name: str) -> tuple[Decline, ...]:
        """Why ``provider(name)`` is None although a plugin claims it."""
        return self._provider(name)[1]

    def executors(self) -> dict[str, Point]:
        """Other ways to run artifacts, by name: entry points of ``cudnn_core.executors``. A name claimed twice is left out."""
        points = self.discovery.executors
        names = [point.name for point in points]
        return {point.name: point for point in points if names.count(point.name) == 1}

    def executor(self, name: str) -> Any:
        """What the executor entry point ``name`` names. Raises EngineLookupError or EngineBroken."""
        point = self.executors().get(name)
        if point is None:
            claims = [f"{item.dist} {item.version}" for item in self.discovery.executors if item.name == name]
            if claims:
                declined = Decline("plugin.conflict", f"executor {name}", "one distribution", claims)
                raise EngineLookupError(f"executor {name}: {declined}", "unavailable", [declined])
            raise EngineLookupError(
                f"no executor {name!r} is installed{nearest(name, self.executors())}", "not_installed"
            )
        try:
            return import_object(point.value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as for engines
            raise failure(error, f"executor {name}", point.value, point.origin) from error

    def call_hooks(self, name: str, **arguments: Any) -> list[HookResult]:
        """Hook ``name`` of every usable plugin; see ``_hooks.call_isolated``."""
        return [result for record in self._usable for result in record.call_hooks(name, **arguments)]

    def _provider(self, name: str) -> tuple[Any, tuple[Decline, ...]]:
        claims = [record for record in self._usable if record.manifest and name in record.manifest.provides]
        if len(claims) > 1:
            return None, (Decline("plugin.conflict", f"provides.{name}", "one plugin", _names(claims)),)
        for record in claims:
            assert record.manifest is not None
            try:
                return record.module(record.manifest.provides[name]), ()
            except EngineBroken as error:
                return None, (error.decline,)
        return None, ()


def _plugin_state(
    record: PluginRecord, records: Sequence[PluginRecord], config: Config
) -> tuple[str, tuple[Decline, ...]]:
    """The state that a plugin has before its code runs, and the reasons."""
    plugin = record.found.plugin
    rivals = [other for other in records if other.found.plugin == plugin]
    quarantine = [record.problem] if record.problem is not None else []
    if len(rivals) > 1:
        chosen = config.resolve.get(plugin)
        if chosen is None or normalise(chosen) != normalise(record.found.dist):
            hint = f'uninstall one, or name the distribution that you trust: [plugins.resolve] {plugin} = "..."'
            if chosen is not None:
                hint = f"the configuration resolves {plugin} to {chosen}"
            quarantine.append(Decline("plugin.conflict", plugin, "one distribution", _names(rivals), hint))
        elif sum(normalise(other.found.dist) == normalise(chosen) for other in rivals) > 1:
            quarantine.append(Decline("plugin.conflict", plugin, "one entry point", _names(rivals)))
    if quarantine:
        return "quarantined", tuple(quarantine)
    disabled = tuple(config.plugin_declines(plugin))
    return ("disabled", disabled) if disabled else ("eligible", ())


def _ops(records: Sequence[PluginRecord]) -> tuple[dict[str, PluginRecord], Mapping[str, Decline]]:
    """Who owns which op, and the ops that have no owner because two plugins, or the core, claim them."""
    claims: dict[str, list[PluginRecord]] = {}
    for record in records:
        for name in record.manifest.ops if record.manifest else ():
            claims.setdefault(name, []).append(record)
    if not claims:
        return {}, {}
    from ._ops._table import in_tree

    core = in_tree()
    owners: dict[str, PluginRecord] = {}
    declines: dict[str, Decline] = {}
    for name, claimants in claims.items():
        if name in core:
            declines[name] = Decline("plugin.conflict", f"op {name}", "a new name", ["cudnn-core", *_names(claimants)])
        elif len(claimants) > 1:
            declines[name] = Decline("plugin.conflict", f"op {name}", "one plugin", _names(claimants))
        else:
            owners[name] = claimants[0]
    return owners, declines


def _names(records: Sequence[PluginRecord]) -> list[str]:
    return [f"{item.found.dist} {item.found.version} ({item.found.origin})" for item in records]

"""The registry: an immutable snapshot of every known engine under one configuration.

``current()`` returns the snapshot for the current configuration and builds it at first use (never at import). A snapshot is
published by one store and readers take no lock. What is installed is scanned once, until ``refresh()``; snapshots for
different configurations share it, and with it the engines that have been imported and what is known to be broken.
Imported by the planner, the op table, the CLI and the environment facts; plan execution never gets here.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ._discovery import Discovery, scan
from ._locks import ForkLock
from ._records import EngineBroken, PluginRecord, record_of
from ._snapshot import EngineEntry, EngineLookupError, PluginEntry, Registry

if TYPE_CHECKING:
    from ._config import Config

__all__ = [
    "EngineBroken",
    "EngineEntry",
    "EngineLookupError",
    "PluginEntry",
    "Registry",
    "current",
    "in_process",
    "installed_on",
    "refresh",
    "registry",
]

_MAX_VIEWS = 8


class _Installed:
    """What one scan of ``sys.path`` found; scanned and parsed at first use."""

    def __init__(self, path: Sequence[str] | None = None) -> None:
        self._path = path
        self._lock = ForkLock()
        self._found: tuple[Discovery, tuple[PluginRecord, ...]] | None = None

    @property
    def discovery(self) -> Discovery:
        return self._scanned()[0]

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        return self._scanned()[1]

    def _scanned(self) -> tuple[Discovery, tuple[PluginRecord, ...]]:
        if self._found is None:
            with self._lock:  # data only: nothing of a plugin is imported under it
                if self._found is None:
                    discovery = scan(self._path)
                    self._found = (discovery, tuple(map(record_of, discovery.plugins)))
        return self._found


class _Catalogue:
    """The installed plugins and those of this process; an isolated one of the latter hides all before it."""

    def __init__(self, installed: _Installed, temporary: tuple[tuple[PluginRecord, bool], ...] = ()) -> None:
        self.installed = installed
        self.temporary = temporary
        start = max((index for index, (_, isolated) in enumerate(temporary) if isolated), default=None)
        own = tuple(record for record, _ in temporary[start or 0 :])
        self.records = own if start is not None else (*installed.records, *own)

    @property
    def discovery(self) -> Discovery:
        return self.installed.discovery

    def dists(self) -> Mapping[str, str]:
        return self.installed.discovery.dists


class _State(NamedTuple):
    catalogue: _Catalogue
    views: dict[int, Registry]  # by id of the config, which the view keeps alive; replaced, never changed


_swap = threading.Lock()
_state: _State | None = None
_building = threading.local()


def current(*, enforce: bool = True) -> Registry:
    """The snapshot for the current configuration.

    Warns about engines that the configuration names and nobody has; raises ConfigError for them under ``strict``.
    ``enforce=False`` leaves that to the caller (``config check`` and ``doctor`` list findings instead).
    """
    config = _current_config()
    while True:
        state = _state
        if state is None:
            state = _publish(None, _Catalogue(_Installed()))
        view = state.views.get(id(config))
        if view is not None and view.config is config:
            return view
        nested = getattr(_building, "depth", 0)
        _building.depth = nested + 1
        try:
            view = Registry(state.catalogue, config)
        finally:
            _building.depth = nested
        if nested or not enforce:  # a hook that asks for the registry sees a provisional snapshot
            return view
        _enforce(config, view)
        if _add_view(state.catalogue, view):
            return view


registry = current


def refresh() -> Registry:
    """Look again at what is installed, and forget what was imported and what was broken."""
    import importlib

    importlib.invalidate_caches()
    state = _state
    _publish(state, _Catalogue(_Installed(), state.catalogue.temporary if state else ()))
    return current()


@contextmanager
def in_process(record: PluginRecord, *, isolated: bool = False) -> Iterator[Registry]:
    """Add ``record`` for the duration of the block, in every thread; ``isolated`` hides all other plugins."""
    item = (record, isolated)
    _change_temporaries(lambda items: (*items, item))
    try:
        yield current()
    finally:
        _change_temporaries(lambda items: tuple(other for other in items if other is not item))


@contextmanager
def installed_on(path: Sequence[str]) -> Iterator[Registry]:
    """See only what is installed on ``path`` for the duration of the block (tests, benchmarks, the doctor)."""
    global _state
    before = _state
    with _swap:
        _state = _State(_Catalogue(_Installed(path)), {})
    try:
        yield current()
    finally:
        with _swap:
            _state = before


def _change_temporaries(change: Callable[[Any], tuple[tuple[PluginRecord, bool], ...]]) -> None:
    global _state
    with _swap:
        before = _state.catalogue if _state is not None else None
        installed = before.installed if before is not None else _Installed()
        _state = _State(_Catalogue(installed, change(before.temporary if before is not None else ())), {})


def _publish(expected: _State | None, catalogue: _Catalogue) -> _State:
    """Make ``catalogue`` the current one unless another thread has replaced ``expected`` meanwhile."""
    global _state
    with _swap:
        if _state is expected or _state is None:
            _state = _State(catalogue, {})
        return _state


def _add_view(catalogue: _Catalogue, view: Registry) -> bool:
    """Remember ``view``; False if the catalogue has been replaced meanwhile."""
    global _state
    with _swap:
        state = _state
        if state is None or state.catalogue is not catalogue:
            return False
        kept = dict(itertools.islice(reversed(state.views.items()), _MAX_VIEWS - 1))
        _state = state._replace(views={**dict(reversed(kept.items())), id(view.config): view})
        return True


def _enforce(config: Config, view: Registry) -> None:
    """Warn, once a snapshot, about engines that the configuration names and nobody has; ConfigError under ``strict``."""
    from ._config import enforce

    enforce(config, view)


def _current_config() -> Config:
    from . import _config

    return _config.current()

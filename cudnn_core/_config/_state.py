"""The configuration in force: files and variables read once per snapshot, ``configure()`` on top.

``current()`` is what planning asks; nothing is read before its first call. Imported by the registry, the planner, the
caches and the command line, and re-exported as ``cudnn_core.configure``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from itertools import count
from typing import Any

from ._layer import Layer, flat_settings, parse_layer
from ._model import Config, merge
from ._source import Source
from ._sources import read_layers

__all__ = ["Configured", "configure", "current", "epoch", "load", "reload"]


class _Resolved:
    """A merged Config, and the number that tells it from every other."""

    __slots__ = ("config", "epoch")

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.config = merge(layers)
        self.epoch = next(_epochs)


class _Snapshot:
    """The process's configuration: ``configure()`` layers over files and variables, which are read on first use."""

    __slots__ = ("_base", "_lock", "_resolved", "calls")

    def __init__(self, calls: tuple[Layer, ...] = ()) -> None:
        self.calls = calls
        self._lock = threading.Lock()
        self._base: list[Layer] | None = None
        self._resolved: _Resolved | None = None

    def layers(self) -> list[Layer]:
        with self._lock:
            if self._base is None:
                self._base = read_layers(os.environ, None)
            return [*self._base, *self.calls]

    def resolve(self) -> _Resolved:
        global _settled
        resolved = self._resolved
        if resolved is None:
            _settled = self
            layers = self.layers()
            with self._lock:
                if self._resolved is None:
                    self._resolved = _Resolved(layers)
                    _apply_log(self._resolved.config.log)
                resolved = self._resolved
        return resolved


class _Overlay:
    """The ``with`` blocks that one context is in, innermost last, and their merge over a snapshot."""

    __slots__ = ("_over", "blocks")

    def __init__(self, blocks: tuple[Configured, ...]) -> None:
        self.blocks = blocks
        self._over: tuple[_Snapshot, _Resolved] | None = None

    def resolve(self, snapshot: _Snapshot) -> _Resolved:
        over = self._over
        if over is None or over[0] is not snapshot:
            layers = [*snapshot.layers(), *(block.layer for block in self.blocks)]
            self._over = over = (snapshot, _Resolved(layers))
        return over[1]


_epochs = count(1)
_lock = threading.Lock()
_snapshot = _Snapshot()
_settled: _Snapshot | None = None  # the snapshot that last answered current()
_overlay: ContextVar[_Overlay | None] = ContextVar("cudnn_core_config", default=None)


class Configured:
    """What ``configure`` returns: nothing to do with it, or enter it as a ``with`` block."""

    __slots__ = ("_installed", "_previous", "layer")

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self._installed: _Snapshot | None = None
        self._previous: _Snapshot | None = None

    def __enter__(self) -> Config:
        """Take the settings back from the process and give them to this context only."""
        self._withdraw()
        overlay = _overlay.get()
        _overlay.set(_Overlay((*(overlay.blocks if overlay else ()), self)))
        try:
            return current()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        overlay = _overlay.get()
        blocks = list(overlay.blocks) if overlay else []
        for index in reversed(range(len(blocks))):
            if blocks[index] is self:
                del blocks[index]
                break
        _overlay.set(_Overlay(tuple(blocks)) if blocks else None)

    def _install(self, *, forget: bool) -> None:
        global _snapshot, _settled
        with _lock:
            self._previous = _snapshot
            self._installed = _snapshot = _Snapshot(() if forget else (*_snapshot.calls, self.layer))
            if forget:
                _settled = None

    def _withdraw(self) -> None:
        """Undo ``_install``; the snapshot that was in force comes back as it was, with what others derived from it."""
        global _snapshot
        with _lock:
            rest = tuple(layer for layer in _snapshot.calls if layer is not self.layer)
            if _snapshot is self._installed and self._previous is not None:
                _snapshot = self._previous
            elif len(rest) < len(_snapshot.calls):
                # Another thread has called configure() since. Its call stays, if it is not about to withdraw too.
                settled = _settled is not None and list(map(id, _settled.calls)) == list(map(id, rest))
                _snapshot = _settled if settled and _settled is not None else _Snapshot(rest)
            self._installed = self._previous = None


def configure(**settings: Any) -> Configured:
    """Set configuration from code, above every file and variable.

    Called plainly it holds for the process, on top of earlier calls, and files and variables are read anew; without
    settings it forgets the earlier calls. As a ``with`` block it holds for that block's thread or task only::

        cudnn_core.configure(strict=True)
        with cudnn_core.configure(disable=["frost_gemm:*"]):
            ...

    The keys are those of a file: ``strict``, ``log``, ``plugins``, ``engines``, ``rule``, ``engine``, and ``cache_dir``.
    A key of ``plugins`` or ``engines`` may stand alone (``disable=``), and ``knobs={engine: {knob: value}}`` is short for
    ``engine``. Raises ConfigError as a file does; built plans stay as they are.
    """
    source = Source("api", "configure()")
    layer = parse_layer(source, flat_settings(source, settings))
    configured = Configured(layer)
    configured._install(forget=not settings)
    return configured


def current() -> Config:
    """The configuration in force here: this context's ``with`` blocks over the process's snapshot."""
    return _effective().config


def epoch() -> int:
    """A number that is equal for equal ``current()``; whoever caches something made from it compares this."""
    return _effective().epoch


def reload() -> None:
    """Read files and variables anew when they are next needed; ``configure()`` calls stay."""
    global _snapshot, _settled
    with _lock:
        _snapshot, _settled = _Snapshot(_snapshot.calls), None


def load(
    environ: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    overlay: Mapping[str, Any] | None = None,
) -> Config:
    """Read every layer and merge it, without touching the configuration in force. ``overlay``: ``configure()`` keywords."""
    layers = read_layers(os.environ if environ is None else environ, cwd)
    if overlay:
        source = Source("api", "configure()")
        layers.append(parse_layer(source, flat_settings(source, overlay)))
    return merge(layers)


def _effective() -> _Resolved:
    snapshot, overlay = _snapshot, _overlay.get()
    return overlay.resolve(snapshot) if overlay is not None else snapshot.resolve()


def _apply_log(level: str | None) -> None:
    if level is not None:
        from ._log import apply

        apply(level)

"""The configuration in force: files and variables read once per snapshot, ``configure()`` on top.

``current()`` is what planning asks; nothing is read before it is asked, or before a ``configure()`` call that ``strict`` may
make an error. Imported by the registry, the planner, the caches and the command line, and re-exported as
``cudnn_core.configure``.

Whether a call is plain or a ``with`` block shows only after it has returned, so it changes nothing by itself: it is
*pending*. Entered, it becomes a ContextVar overlay and was never anything else. Otherwise it is plain, and holds for the
process from the moment that its object is collected (at once, if nobody keeps it) or that its thread asks for
``current()``, whichever is first.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from itertools import count
from typing import Any

from .._locks import ForkLock
from ._check import enforce, names_engines
from ._layer import Layer, flat_settings, parse_layer
from ._model import Config, merge
from ._source import Source
from ._sources import read_layers

__all__ = ["Configured", "configure", "current", "epoch", "load", "reload"]


class _Call:
    """One ``configure()`` call. ``number`` is its place among all; ``forget`` makes it the first that counts."""

    __slots__ = ("forget", "layer", "number", "pending")

    def __init__(self, layer: Layer, *, forget: bool) -> None:
        self.layer = layer
        self.forget = forget
        self.number = next(_numbers)
        self.pending = True


class _Resolved:
    """A merged Config, and the number that tells it from every other."""

    __slots__ = ("config", "epoch")

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.config = merge(layers)
        self.epoch = next(_epochs)


class _Snapshot:
    """The process's configuration: ``fixed`` layers and plain calls over files and variables, which are read on first use."""

    __slots__ = ("_base", "_resolved", "calls", "fixed", "lock")

    def __init__(self, fixed: tuple[Layer, ...] = (), calls: tuple[_Call, ...] = ()) -> None:
        self.fixed = fixed
        self.calls = calls
        self.lock = ForkLock()
        self._base: list[Layer] | None = None
        self._resolved: _Resolved | None = None

    def layers(self) -> list[Layer]:
        with self.lock:
            if self._base is None:
                self._base = read_layers(os.environ, None)
            return [*self._base, *self.fixed, *(call.layer for call in self.calls)]

    def resolve(self) -> _Resolved:
        resolved = self._resolved
        if resolved is None:
            layers = self.layers()
            with self.lock:
                if self._resolved is None:
                    self._resolved = _Resolved(layers)
                    _apply_log(self._resolved.config.log)
                resolved = self._resolved
        return resolved


class _Overlay:
    """The ``with`` blocks that one context is in, innermost last, and their merge over a snapshot."""

    __slots__ = ("_over", "blocks")

    def __init__(self, blocks: tuple[_Call, ...]) -> None:
        self.blocks = blocks
        self._over: tuple[_Snapshot, _Resolved] | None = None

    def resolve(self, snapshot: _Snapshot) -> _Resolved:
        over = self._over
        if over is None or over[0] is not snapshot:
            layers = [*snapshot.layers(), *(block.layer for block in self.blocks)]
            self._over = over = (snapshot, _Resolved(layers))
        return over[1]


class _Held(threading.local):
    """The calls of this thread that are pending, or were when it last looked."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


_epochs = count(1)
_numbers = count(1)
_lock = ForkLock()  # over changes of _snapshot and of a call's ``pending``
_snapshot = _Snapshot()
_held = _Held()
_dropped: deque[_Call] = (
    deque()
)  # their objects are gone. The collector adds to it, wherever it runs: it must take no lock
_overlay: ContextVar[_Overlay | None] = ContextVar("cudnn_core_config", default=None)


class Configured:
    """What ``configure`` returns: nothing to do with it, or enter it as a ``with`` block."""

    __slots__ = ("_call",)

    def __init__(self, call: _Call) -> None:
        self._call = call

    def __enter__(self) -> Config:
        """Give the settings to this context, and to nothing else if they have not been taken for a plain call."""
        _settle(claimed=self._call)
        _overlay.set(_Overlay((*_blocks(), self._call)))
        try:
            return _effective().config
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        blocks = list(_blocks())
        for index in reversed(range(len(blocks))):
            if blocks[index] is self._call:
                del blocks[index]
                break
        _overlay.set(_Overlay(tuple(blocks)) if blocks else None)

    def __del__(self, drop: Callable[[_Call], None] = _dropped.append) -> None:
        if self._call.pending:
            drop(self._call)


def configure(**settings: Any) -> Configured:
    """Set configuration from code, above every file and variable.

    Called plainly it holds for the process, on top of earlier calls, and files and variables are read anew; without
    settings it forgets the earlier calls. As a ``with`` block it holds for that block's thread or task only, and no other
    thread ever sees it::

        cudnn_core.configure(strict=True)
        with cudnn_core.configure(disable=["frost_gemm:*"]):
            ...

    If what a plain call returns is kept, other threads see the settings only once the calling thread has planned (or
    asked for the configuration in any other way), or the object is gone.

    The keys are those of a file: ``strict``, ``log``, ``plugins``, ``engines``, ``rule``, ``engine``, and ``cache_dir``.
    A key of ``plugins`` or ``engines`` may stand alone (``disable=``), and ``knobs={engine: {knob: value}}`` is short for
    ``engine``. Raises ConfigError as a file does, also for an engine name that nobody has if ``strict`` is in force with
    this call, and then changes nothing; built plans stay as they are.
    """
    source = Source("api", "configure()")
    call = _Call(parse_layer(source, flat_settings(source, settings)), forget=not settings)
    _check_names(call)
    _held.calls.append(call)
    return Configured(call)


def current() -> Config:
    """The configuration in force here: this context's ``with`` blocks over the process's snapshot."""
    return _asked().config


def epoch() -> int:
    """A number that is equal for equal ``current()``; whoever caches something made from it compares this."""
    return _asked().epoch


def reload() -> None:
    """Read files and variables anew when they are next needed; ``configure()`` calls stay."""
    global _snapshot
    with _lock:
        _snapshot = _Snapshot(_snapshot.fixed, _snapshot.calls)


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


def _asked() -> _Resolved:
    if _held.calls or _dropped:
        held, _held.calls = _held.calls, []
        _settle(held)
    return _effective()


def _effective() -> _Resolved:
    snapshot, overlay = _snapshot, _overlay.get()
    return overlay.resolve(snapshot) if overlay is not None else snapshot.resolve()


def _blocks() -> tuple[_Call, ...]:
    overlay = _overlay.get()
    return overlay.blocks if overlay is not None else ()


def _settle(plain: Sequence[_Call] = (), *, claimed: _Call | None = None) -> None:
    """Take the ``plain`` calls, and those that were dropped, into the process's snapshot; ``claimed`` is a block."""
    global _snapshot
    with _lock:
        if claimed is not None:
            claimed.pending = False
        dropped = [_dropped[index] for index in range(len(_dropped))]
        fresh = [call for call in dict.fromkeys((*plain, *dropped)) if call.pending]
        if fresh:
            known = sorted((*_snapshot.calls, *fresh), key=lambda call: call.number)
            first = max((call.number for call in known if call.forget), default=0)
            fixed = () if any(call.forget for call in fresh) else _snapshot.fixed
            _snapshot = _Snapshot(fixed, tuple(call for call in known if call.number >= first))
            for call in fresh:
                call.pending = False
        for _ in dropped:  # only now, so that whoever finds none left finds them in the snapshot
            _dropped.popleft()
    _held.calls = [call for call in _held.calls if call.pending]


def _check_names(call: _Call) -> None:
    """ConfigError if the call, tried in this context alone, makes an engine name that nobody has an error."""
    alone = merge([call.layer])
    if not alone.strict and not names_engines(alone):
        return
    _settle()
    held, _held.calls = _held.calls, []
    token = _overlay.set(_Overlay((*held, *_blocks(), call)))
    try:
        config = _effective().config
        if config.strict:
            from .._registry import current as registry

            enforce(config, registry(enforce=False))
    finally:
        _overlay.reset(token)
        _held.calls = [*held, *_held.calls]


def _apply_log(level: str | None) -> None:
    if level is not None:
        from ._log import apply

        apply(level)

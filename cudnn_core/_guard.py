"""The one way into an engine's code while planning: whatever it raises costs the engine and nobody else.

``guarded`` runs a call in the ``build_device`` scope of the request; a failure quarantines the engine, is logged and told to
the hooks, and reaches the caller as EngineBroken. ``attempt`` is the same without the consequences, for a caller that holds
something others wait for. ``strict`` configurations raise instead. Imported by the candidates and the building of plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ._context import build_device
from ._declines import Decline
from ._errors import CudnnCoreError
from ._protocol import ProtocolError
from ._records import EngineBroken, failure

if TYPE_CHECKING:
    from ._candidates import Request
    from ._registry import EngineEntry

__all__ = ["attempt", "guarded", "notify", "report"]

_log = logging.getLogger("cudnn_core")
T = TypeVar("T")


def attempt(
    request: Request,
    entry: EngineEntry,
    stage: str,
    call: Callable[[], T],
    passing: tuple[type[BaseException], ...] = (),
) -> T:
    """``call()``. Raises EngineBroken for what it raises, SystemExit and the like included, and if it changed the graph, which is
    put right; ``passing`` and KeyboardInterrupt go through."""
    changed = ""
    try:
        try:
            with build_device(request.device):
                answer = call()
        finally:
            changed = request.graph.mend()
        if changed:
            raise ProtocolError(f"after it had changed the graph, which other engines share: {changed}")
        return answer
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, passing) and not changed:
            raise
        if stage == "import" and isinstance(error, EngineBroken):
            raise
        assert entry.spec is not None
        broken = failure(error, f"{stage}()", entry.spec.factory, entry.origin)
        decline = broken.decline
        if isinstance(error, ProtocolError):
            decline = Decline("plugin.broken", f"{stage}()", actual=f"{stage} returned {error}")
        elif changed:
            text = f"{decline.actual}, after it had changed the graph: {changed}"
            decline = Decline("plugin.broken", f"{stage}()", actual=text, origin=decline.origin)
        raise EngineBroken(entry.short_id, decline, broken.traceback, stage) from error


def guarded(
    request: Request,
    entry: EngineEntry,
    stage: str,
    call: Callable[[], T],
    passing: tuple[type[BaseException], ...] = (),
) -> T:
    """``attempt``, and ``report`` of what it raises."""
    try:
        return attempt(request, entry, stage, call, passing)
    except EngineBroken as broken:
        report(request, entry, broken)
        raise


def report(request: Request, entry: EngineEntry, broken: EngineBroken) -> None:
    """Quarantine ``entry``, once; a strict configuration raises CudnnCoreError."""
    if request.config.strict:
        raise CudnnCoreError(f"engine {entry.id}: {broken.decline}") from broken
    if request.registry.quarantine(entry, broken):
        _log.warning("engine %s is quarantined: %s\n%s", entry.id, broken.decline, broken.traceback)
        notify(request, entry, broken.stage, broken.decline, broken.traceback)


def notify(request: Request, entry: EngineEntry, stage: str, decline: Decline, traceback: str) -> None:
    """Tell the hooks that an engine raised or could not build."""
    from ._hooks import EngineFailure, call_isolated

    failed = EngineFailure(entry.id, stage, decline, traceback)
    call_isolated("cudnn_core_engine_failed", request.registry, failure=failed)

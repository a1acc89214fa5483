"""Which of the backend's engines a plan is of: by heuristics, or as a config names it. Imported by ``plan``.

The variant ``eng7`` is the backend's engine 7. Its knobs are text like ``KERNEL_CFG=21,SPLIT_K_SLC=8``, by the binding's names:
what heuristics chose is written so, and replayed from it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn_core import BuildError, Decline

from .errors import decline, of_binding, remember

if TYPE_CHECKING:
    from cudnn_core import PlanConfig

__all__ = ["Choice", "built", "listing"]

_SETTING = re.compile(r"([A-Z][A-Z0-9_]*)=(-?[0-9]+)")
FALLBACK = "FALLBACK"


class Choice(NamedTuple):
    """An engine of the backend. ``settings`` are its knobs as text, None if the binding has no name for one of them."""

    variant: str
    settings: str | None


def built(module: Any, target: Any, config: PlanConfig, room: int | None = None) -> Choice:
    """Build the one plan of ``target``, an operation graph, that ``config`` asks for.

    Without a variant: the first in the order of the heuristics that builds and needs at most ``room`` bytes of workspace (None: any
    number); those of FALLBACK come last. Raises BuildError.
    """
    mode, settings = str(config.knobs["heuristics"]), str(config.knobs["engine_knobs"])
    engine = int(config.variant[3:]) if config.variant else None
    if settings:
        if engine is None:
            wrong = Decline(
                "knob.domain", "knob:engine_knobs", '""', settings, "they are those of a variant: graph/eng<N>"
            )
            raise BuildError(str(wrong), decline=wrong)
        place = _append(module, target, engine, _parsed(module, settings))
        return _build_first(target, [place], room, None)._replace(settings=settings)
    failure: BuildError | None = None
    for heuristic in dict.fromkeys((mode, FALLBACK)):
        before = _count(target)
        try:
            _ask(module, target, heuristic)
            places = [
                place for place in range(before, _count(target)) if engine is None or _engine(target, place) == engine
            ]
            if places:
                return _build_first(target, places, room, failure)
        except BuildError as error:
            failure = failure or error
    if engine is not None:
        return _build_first(target, [_append(module, target, engine, {})], room, None)._replace(settings="")
    if failure is None:
        none = Decline("x.cudnn_backend.unsupported", "graph", actual="cuDNN has no engine for the graph")
        failure = BuildError(str(none.actual), decline=none)
    raise failure


def listing(module: Any, target: Any, limit: int) -> list[Choice]:
    """The engines and knobs that heuristics A, then FALLBACK, propose for ``target``, best first; those that can be replayed."""
    failure: BuildError | None = None
    for heuristic in ("A", FALLBACK):
        try:
            _ask(module, target, heuristic)
        except BuildError as error:  # noqa: PERF203  two of them
            failure = failure or error
    count = _count(target)
    if not count and failure is not None:
        raise failure
    found = dict.fromkeys(_choice(target, place) for place in range(count))
    # No settings mean the heuristics' own, so that an engine's plain defaults can be asked for only where it has no other.
    chosen = {choice.variant for choice in found if choice.settings}
    return [choice for choice in found if choice.settings or (choice.settings == "" and choice.variant not in chosen)][
        :limit
    ]


def _ask(module: Any, target: Any, heuristic: str) -> None:
    try:
        target.create_execution_plans([getattr(module.heur_mode, heuristic)])
    except Exception as error:
        raise _failed(error) from error


def _append(module: Any, target: Any, engine: int, knobs: dict[Any, int]) -> int:
    """Add exactly this plan; returns its place."""
    place = _count(target)
    try:
        target.create_execution_plan(engine, knobs)
    except Exception as error:
        failed = _failed(error)
        assert failed.decline is not None
        raise BuildError(f"eng{engine}: {failed}", decline=failed.decline._replace(subject=f"eng{engine}")) from error
    return place


def _build_first(target: Any, places: list[int], room: int | None, failure: BuildError | None) -> Choice:
    for place in places:
        try:
            target.build_plan_at_index(place)
            size = int(target.get_workspace_size_plan_at_index(place))
        except Exception as error:
            failure = failure or _failed(error)
            continue
        if room is None or size <= room:
            return _choice(target, place)
        much = Decline("resource.workspace", "workspace", {"max": room}, size)
        failure = failure or BuildError(str(much), decline=much)
    assert failure is not None
    raise failure


def _failed(error: Exception) -> BuildError:
    if not of_binding(error):
        raise error
    remember(str(error))
    found = decline(error)
    return BuildError(str(found.actual), decline=found)


def _count(target: Any) -> int:
    return int(target.get_execution_plan_count())


def _engine(target: Any, place: int) -> int:
    return int(target.get_engine_and_knobs_at_index(place)[0])


def _choice(target: Any, place: int) -> Choice:
    engine, knobs = target.get_engine_and_knobs_at_index(place)
    named = {knob.name: value for knob, value in knobs.items()}
    unnamed = "NOT_SET" in named
    settings = ",".join(f"{name}={value}" for name, value in sorted(named.items()))
    return Choice(f"eng{engine}", None if unnamed else settings)


def _parsed(module: Any, settings: str) -> dict[Any, int]:
    knobs: dict[Any, int] = {}
    for part in settings.split(","):
        found = _SETTING.fullmatch(part.strip())
        kind = getattr(module.knob_type, found[1], None) if found is not None else None
        if found is None or kind is None or kind in knobs:
            wrong = Decline("knob.domain", "knob:engine_knobs", "NAME=INT,... of cuDNN's knob types", settings)
            raise BuildError(str(wrong), decline=wrong)
        knobs[kind] = int(found[2])
    return knobs

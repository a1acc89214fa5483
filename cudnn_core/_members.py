"""Members of an engine that ``check_support`` did not list, because that takes the library: ``plugin:engine/eng7``.

They are asked for by whoever times engines, and only then; what was measured may run from then on. Imported by the benchmark,
and by the planner where there is a tuning record.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from ._candidates import member_name, pin_rule, variant_declines, with_knobs
from ._canonical import plain
from ._declines import Decline
from ._errors import BuildError
from ._guard import attempt
from ._hooks import message_of
from ._knobs import KnobError
from ._protocol import as_members
from ._ranking import offered
from ._records import EngineBroken

if TYPE_CHECKING:
    from ._candidates import Request
    from ._engine import PlanConfig
    from ._ranking import Candidate

__all__ = ["LIMIT", "Members", "ask", "measured_config"]

LIMIT = 8


class Members(NamedTuple):
    """``configs`` of an engine, best first, knobs complete; ``reasons`` why there are none, or not all of them."""

    configs: tuple[PlanConfig, ...] = ()
    reasons: tuple[Decline, ...] = ()


def ask(request: Request, candidate: Candidate, limit: int = LIMIT) -> Members:
    """At most ``limit`` members of the candidate's engine that may run under the configuration and that it does not offer anyway.

    What the engine raises, or answers in breach of the protocol, is a reason: it costs the members and not the engine.
    """
    entry, spec = candidate.entry, candidate.entry.spec
    method = getattr(entry.instance(), "members", None) if spec.variants and limit > 0 else None
    if method is None:
        return Members()
    graph = request.graph.at(request.sizes)
    try:
        answer = attempt(
            request,
            entry,
            "members",
            lambda: as_members(method(graph, request.building, limit), spec, limit),
            passing=(BuildError,),
        )
    except BuildError as error:
        reason = error.decline if isinstance(error.decline, Decline) else None
        return Members(reasons=(reason or Decline("build.failed", "members()", actual=message_of(error)),))
    except EngineBroken as broken:
        logging.getLogger("cudnn_core").warning("members of %s: %s\n%s", entry.id, broken.decline, broken.traceback)
        return Members(reasons=(broken.decline,))
    configs: list[PlanConfig] = []
    reasons: list[Decline] = []
    for config in answer:
        try:
            barred = variant_declines(request, spec, config.variant)
            full = with_knobs(request, spec, config)
        except KnobError as error:
            barred = list(error.declines)
        if barred:
            reasons += [reason for reason in barred if reason not in reasons]
        elif full not in configs and offered(candidate, full) is None:
            configs.append(full)
    return Members(tuple(configs), tuple(reasons))


def measured_config(request: Request, candidate: Candidate, config: PlanConfig) -> PlanConfig | None:
    """The config that runs where a tuning record names ``config``, or None if it may not run here exactly like that.

    It is one that the engine offers, or a member that the manifest declares and the configuration admits. Where a member is
    pinned, it is one of the configs of the pin: a measurement changes neither the member nor its knobs.
    """
    rule, spec = pin_rule(request), candidate.entry.spec
    found = offered(candidate, config)
    if rule is not None and "/" in rule.use and rule.pins(member_name(spec, candidate.config.variant)):
        return found if rule.pins(member_name(spec, config.variant)) else None
    if found is not None or not config.variant:
        return found
    if not spec.has_variant(config.variant) or variant_declines(request, spec, config.variant):
        return None
    try:
        full = with_knobs(request, spec, config)
    except KnobError:
        return None
    return full if plain(full.knobs) == plain(config.knobs) else None

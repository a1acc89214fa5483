"""A pin rule whose engine can't run the graph: which one that is, and how it is said. Imported by the planner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ._candidates import is_strict, pin_rule
from ._declines import Decline

if TYPE_CHECKING:
    from ._candidates import Request
    from ._config._rules import Rule
    from ._decision import EngineDecision

__all__ = ["passed_over", "refusal"]


def refusal(request: Request, rows: Iterable[EngineDecision]) -> str:
    """The first line of the error where nothing can run the graph: why the engine of a strict pin can't; "" without one."""
    rule = pin_rule(request)
    if rule is None or not is_strict(request, rule):
        return ""
    reasons = [reason for row in rows if _pins(rule, row.id) for reason in row.reasons]
    text = "; ".join(map(str, reasons)) or "it is not installed"
    return f"{rule.origin}: the pinned engine {rule.use} can't run the graph: {text}\n"


def passed_over(request: Request, winner: str) -> list[Decline]:
    """What is to be noted of the engine that won where the rule, which is not strict, pins another one."""
    rule = pin_rule(request)
    if rule is None or _pins(rule, winner):
        return []
    hint = "it can't run the graph, and the rule is not strict"
    return [Decline("config.pinned_elsewhere", winner, expected=rule.use, hint=hint, origin=rule.origin)]


def _pins(rule: Rule, engine_id: str) -> bool:
    """Whether ``rule`` pins ``plugin:engine@revision[/variant]``, or one of its variants."""
    engine, _, rest = engine_id.partition("@")
    variant = rest.partition("/")[2]
    return rule.pins(f"{engine}/{variant}" if variant else engine) or rule.use.partition("/")[0] == engine

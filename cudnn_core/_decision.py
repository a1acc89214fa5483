"""The decision record: every known engine, its state, its reasons and its rank for one graph on one device.

Written on success too, compared across ranks by its digest, saved, replayed, printed by ``explain`` (``_decision_text``).
Made by the planner; read by the command line, hooks and error messages. Nothing here runs an engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ._canonical import (
    ANY,
    COUNT,
    LIST,
    OBJECT,
    STR,
    TEXT,
    Field,
    FormatError,
    dumps,
    loads,
    one_of,
    optional,
    plain,
    take,
)
from ._canonical import digest as digest_of
from ._declines import Decline, check_code
from ._engine import PlanConfig
from ._errors import CudnnCoreError

__all__ = [
    "HEX",
    "STATES",
    "ConfigSource",
    "Decision",
    "DecisionError",
    "Difference",
    "EngineDecision",
    "nearest_decline",
    "nearest_miss",
    "plain_decline",
    "same_device",
]

#: The closed set of engine states, in the order in which planning reaches them.
STATES = ("quarantined", "disabled", "filtered", "declined", "eligible", "selected", "outranked", "build_failed")

_SCHEMA = 1
_BASES = ("measured", "model", "prior")


class DecisionError(CudnnCoreError):
    """A saved decision is not one: malformed, tampered with, of another version, graph or device."""


class EngineDecision(NamedTuple):
    """What became of one engine.

    id         "plugin:engine@revision[/variant]"; dist and version: the distribution that it comes from
    state      one of STATES
    rank       1 is the best; None if it was not ranked
    us, basis  the time in microseconds that ranked it, and "measured", "model" or "prior"
    config     engine, complete knobs and variant, or None
    workspace  bytes, or None if only build_plan knows
    reasons    why it was not selected: one Decline or more, for every other state than "selected"
    notes      behaviour notes of its plans of this graph, in order; None if the engine did not say that it can run it
    """

    id: str
    dist: str = ""
    version: str = ""
    state: str = "eligible"
    rank: int | None = None
    us: float | None = None
    basis: str | None = None
    config: PlanConfig | None = None
    workspace: int | None = None
    reasons: tuple[Decline, ...] = ()
    notes: tuple[str, ...] | None = None


class ConfigSource(NamedTuple):
    """A configured value and the place that set it: ``file:line``, ``env:NAME`` or ``configure()``."""

    key: str
    value: object
    origin: str


class Difference(NamedTuple):
    """One thing that a replay finds changed: the engine ("" for the whole decision), the field, then and now."""

    engine: str
    field: str
    saved: object
    now: object

    def __str__(self) -> str:
        place = f"{self.engine} {self.field}".strip()
        return f"{place}: {self.saved} then, {self.now} now"


class Decision:
    """A decision record, immutable throughout. Equal records have equal digests; it can be copied and pickled.

    Facts that plugins supply are made JSON-able and unknown decline codes become ``plugin.broken``; what the core itself
    gets wrong (two winners, a decline without a reason) raises DecisionError. ``summary`` heads the printed table and is not
    part of the record: a saved decision does not hold its graph.
    """

    __slots__ = ("_digest", "config", "device", "engines", "graph_key", "selected", "summary")

    graph_key: str
    device: dict[str, Any]
    engines: tuple[EngineDecision, ...]
    config: tuple[ConfigSource, ...]
    selected: str | None
    summary: str
    _digest: str

    def __init__(
        self,
        graph_key: str,
        device: Mapping[str, Any],
        engines: Iterable[EngineDecision],
        config: Iterable[ConfigSource | tuple[str, object, str]] = (),
        *,
        summary: str = "",
    ) -> None:
        ordered = tuple(sorted(map(_normal, engines), key=_order))
        winners = [engine.id for engine in ordered if engine.state == "selected"]
        fields = {
            "graph_key": graph_key,
            "device": _fixed(plain(device)),
            "engines": ordered,
            "config": tuple(ConfigSource(key, _fixed(plain(value)), origin) for key, value, origin in config),
            "selected": winners[0] if winners else None,
            "summary": summary,
            "_digest": "",
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        try:
            _check(self.to_dict(), signed=False)
        except FormatError as error:
            raise DecisionError(str(error)) from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Decision is immutable ({name})")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.to_json(), self.summary)

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Decision) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Decision {self.graph_key[:12]}: {self.selected or 'no engine'} of {len(self.engines)}>"

    def __str__(self) -> str:
        return self.table()

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON without the digest itself."""
        if not self._digest:
            object.__setattr__(self, "_digest", digest_of(self.to_dict()))
        return self._digest

    @property
    def winner(self) -> EngineDecision | None:
        """The selected engine's row."""
        return next((engine for engine in self.engines if engine.state == "selected"), None)

    def table(self, verbose: bool = False) -> str:
        """An aligned table: a header line, then one line an engine, the selected one marked ``*``.

        ``verbose`` prints every reason and every distribution instead of the first reason and ``+N more``, and the notes of
        every engine that can run the graph instead of the selected one's.
        """
        from ._decision_text import table

        return table(self, verbose)

    def to_dict(self) -> dict[str, Any]:
        """The record without its digest."""
        return {
            "schema": _SCHEMA,
            "graph_key": self.graph_key,
            "device": self.device,
            "selected": self.selected,
            "engines": [_engine_json(engine) for engine in self.engines],
            "config": [source._asdict() for source in self.config],
        }

    def to_json(self) -> str:
        return dumps({**self.to_dict(), "digest": self.digest})

    @classmethod
    def from_json(cls, text: str | bytes, *, summary: str = "") -> Decision:
        """A saved decision. Raises DecisionError for anything that ``to_json`` would not have written."""
        try:
            top = loads(text)
            _check(top, signed=True)
        except FormatError as error:
            raise DecisionError(f"not a decision record: {error}") from None
        decision = cls(
            top["graph_key"],
            top["device"],
            [_engine_from(row) for row in top["engines"]],
            [ConfigSource(**row) for row in top["config"]],
            summary=summary,
        )
        if decision.digest != top["digest"]:
            raise DecisionError("not a decision record: decision.engines: not in the order of ranks, states and ids")
        return decision

    def replay(self, now: Decision) -> tuple[Difference, ...]:
        """What has changed since this decision was saved; ``now`` is a fresh one for the same graph and device.

        Raises DecisionError if ``now`` is of another graph or device (``same_device``).
        """
        if self.graph_key != now.graph_key:
            raise DecisionError(
                f"the saved decision is of another graph: {self.graph_key[:12]}..., not {now.graph_key[:12]}..."
            )
        if not same_device(self.device, now.device):
            from ._decision_text import apart

            raise DecisionError(f"the saved decision is of another device: {apart(self.device, now.device)}")
        found = [] if self.selected == now.selected else [Difference("", "selected", self.selected, now.selected)]
        before, after = _by_place(self), _by_place(now)
        for place in sorted(before.keys() | after.keys()):
            a, b = before.get(place), after.get(place)
            if a is None or b is None:
                found.append(Difference(place[0], "state", a and a.state, b and b.state))
                continue
            found += [
                Difference(place[0], name, x, y)
                for name, x, y in zip(EngineDecision._fields, _row(a), _row(b), strict=True)
                if x != y
            ]
        if self.config != now.config:
            found.append(Difference("", "config", _sources(self), _sources(now)))
        return tuple(found)


def same_device(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether decisions for the devices can be compared: two CPUs of one name, or two equal GPUs.

    How many cores or how much memory a host offers changes no engine's answer, only the times.
    """
    if a.get("type") == b.get("type") == "cpu":
        return bool(a.get("device_name") == b.get("device_name"))
    return dict(a) == dict(b)


def nearest_miss(decision: Decision, verbose: bool = False) -> str:
    """The text of a NoEngineError: the engine that came nearest and what it lacks, then the reasons, grouped; ``verbose``: all."""
    from ._decision_text import nearest_miss as text

    return text(decision, verbose)


def nearest_decline(decision: Decision) -> str:
    """The nearest miss alone, on one line: ``plugin:engine@1 (declined): shape.multiple_of K: needs ...``."""
    from ._decision_text import nearest_decline as text

    return text(decision)


def _normal(engine: EngineDecision) -> EngineDecision:
    config = engine.config
    if config is not None:
        config = PlanConfig(config.engine, _fixed(plain(config.knobs)), config.variant)
    us = float(engine.us) if engine.us is not None else None
    reasons = (
        reason._replace(expected=_fixed(reason.expected), actual=_fixed(reason.actual))
        for reason in map(plain_decline, engine.reasons)
    )
    notes = None if engine.notes is None else tuple(sorted(map(str, engine.notes)))
    return engine._replace(us=us, config=config, reasons=tuple(reasons), notes=notes)


class _Fixed(dict[str, Any]):
    """A JSON object that can't be changed."""

    def _refuse(self, *args: object, **kwargs: object) -> Any:
        raise TypeError("a Decision is immutable")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return _fixed, (dict(self),)


def _fixed(value: Any) -> Any:
    """JSON-able ``value`` with tuples for lists and unchangeable dicts."""
    if isinstance(value, dict):
        return _Fixed({key: _fixed(item) for key, item in value.items()})
    return tuple(map(_fixed, value)) if isinstance(value, list) else value


def _restored(text: str, summary: str) -> Decision:
    return Decision.from_json(text, summary=summary)


def plain_decline(reason: Any) -> Decline:
    """A plugin's reason as a Decline that can be saved; one that the protocol forbids says so itself."""
    try:
        code, subject, expected, actual, hint, origin = reason
        check_code(code)
    except (CudnnCoreError, TypeError, ValueError):
        return Decline("plugin.broken", "reasons", "a Decline with a known code", str(plain(reason)))
    return Decline(code, str(subject), plain(expected), plain(actual), str(hint), str(origin))


def _order(engine: EngineDecision) -> tuple[Any, ...]:
    state = STATES.index(engine.state) if engine.state in STATES else len(STATES)
    return (engine.rank is None, engine.rank or 0, -state, engine.id, engine.dist, engine.version)


def _engine_json(engine: EngineDecision) -> dict[str, Any]:
    return {
        **engine._asdict(),
        "config": engine.config and engine.config._asdict(),
        "reasons": [reason.to_dict() for reason in engine.reasons],
        "notes": None if engine.notes is None else list(engine.notes),
    }


def _engine_from(row: dict[str, Any]) -> EngineDecision:
    return EngineDecision(
        **{
            **row,
            "config": row["config"] and PlanConfig(**row["config"]),
            "reasons": tuple(Decline(**reason) for reason in row["reasons"]),
            "notes": None if row["notes"] is None else tuple(row["notes"]),
        }
    )


def _row(engine: EngineDecision) -> tuple[object, ...]:
    config = engine.config and dict(engine.config._asdict())
    return tuple(engine._replace(config=config, reasons=tuple(map(str, engine.reasons))))  # type: ignore[arg-type]


def _by_place(decision: Decision) -> dict[tuple[str, str], EngineDecision]:
    return {(engine.id, engine.dist): engine for engine in decision.engines}


def _sources(decision: Decision) -> list[str]:
    return [f"{key} = {value} [{origin}]" for key, value, origin in decision.config]


HEX = Field("64 hex digits", lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None)
_RANK = Field("an integer >= 1", lambda value: type(value) is int and value >= 1)
_US = Field("a float > 0", lambda value: type(value) is float and 0 < value < math.inf)
_RECORD = {
    "schema": COUNT,
    "graph_key": TEXT,
    "device": OBJECT,
    "selected": optional(TEXT),
    "engines": LIST,
    "config": LIST,
}
_ENGINE = {
    "id": TEXT,
    "dist": STR,
    "version": STR,
    "state": one_of(*STATES),
    "rank": optional(_RANK),
    "us": optional(_US),
    "basis": optional(one_of(*_BASES)),
    "config": optional(OBJECT),
    "workspace": optional(COUNT),
    "reasons": LIST,
    "notes": optional(LIST),
}
_CONFIG = {"engine": TEXT, "knobs": OBJECT, "variant": STR}
_REASON = {"code": TEXT, "subject": STR, "expected": ANY, "actual": ANY, "hint": STR, "origin": STR}
_SOURCE = {"key": TEXT, "value": ANY, "origin": STR}


def _check(record: Any, *, signed: bool) -> None:
    """Raises FormatError unless ``record`` is a decision's dict, with a true digest if ``signed``."""
    top = take(record, {**_RECORD, "digest": HEX} if signed else _RECORD, "decision")
    if top["schema"] != _SCHEMA:
        raise FormatError(f"decision.schema: {top['schema']}, and this version reads {_SCHEMA}")
    if signed and digest_of({key: value for key, value in top.items() if key != "digest"}) != top["digest"]:
        raise FormatError("decision.digest: does not match the content")
    for index, row in enumerate(top["engines"]):
        _check_engine(row, f"engines[{index}]")
    for index, row in enumerate(top["config"]):
        take(row, _SOURCE, f"config[{index}]")
    winners = [row["id"] for row in top["engines"] if row["state"] == "selected"]
    if winners != ([] if top["selected"] is None else [top["selected"]]):
        raise FormatError(f"decision.selected: {top['selected']!r}, but the engines selected are {winners}")
    ranks = [row["rank"] for row in top["engines"] if row["rank"] is not None]
    if len(set(ranks)) != len(ranks):
        raise FormatError("decision.engines: two engines have the same rank")


def _check_engine(row: object, where: str) -> None:
    engine = take(row, _ENGINE, where)
    for note in engine["notes"] or ():
        if not isinstance(note, str):
            raise FormatError(f"{where}.notes: {note!r} is no string")
    if engine["config"] is not None:
        take(engine["config"], _CONFIG, f"{where}.config")
    if engine["us"] is not None and engine["basis"] is None:
        raise FormatError(f"{where}.basis: a time without a basis")
    for index, reason in enumerate(engine["reasons"]):
        code = take(reason, _REASON, f"{where}.reasons[{index}]")["code"]
        try:
            check_code(code)
        except CudnnCoreError as error:
            raise FormatError(f"{where}.reasons[{index}].code: {error}") from None
    if engine["state"] != "selected" and not engine["reasons"]:
        raise FormatError(f"{where}.reasons: {engine['id']!r} is {engine['state']} without a reason")

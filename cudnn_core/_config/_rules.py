"""Rules: what a ``[[rule]]`` says, how it is validated, and which graphs it matches.

Imported by the layer validator, by ``Config`` and by the configuration check; the planner reads ``Rule`` objects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .._dtypes import STORAGE_DTYPES
from .._errors import CudnnCoreError, ManifestError, nearest
from .._sm import SmPattern, parse_sm
from .._versions import check_specifier, normalise, satisfies
from ._grammar import Span, check_engine, engine_matches, is_exact, parse_extent
from ._locate import Path
from ._source import Source

if TYPE_CHECKING:
    from .._device import DeviceInfo

__all__ = ["Match", "Rule", "RuleSubject", "parse_knobs", "parse_rule"]

_RULE_KEYS = ("name", "match", "use", "knobs", "avoid", "reason", "versions", "strict")
_FIXED = ("op", "sm", "device", "dtype")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OP = re.compile(r"(?:[a-z0-9_*?]|\[!?[a-z0-9_-]+\])+")
_DIST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


class RuleSubject(NamedTuple):
    """What rules are matched against: the first anchor in canonical order, the device, the installed distributions."""

    op: str
    dims: Mapping[str, int]
    dtypes: Mapping[str, str]
    device: DeviceInfo
    dists: Mapping[str, str]


class Match(NamedTuple):
    """The conditions of a rule; an absent one (None or an absent name) holds for everything."""

    op: tuple[str, ...] | None = None
    sm: tuple[SmPattern, ...] | None = None
    device: tuple[str, ...] | None = None
    dtype: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    dims: Mapping[str, tuple[Span, ...]] = MappingProxyType({})

    def matches(self, subject: RuleSubject) -> bool:
        device = subject.device
        if self.op is not None and not any(fnmatchcase(subject.op, op) for op in self.op):
            return False
        if self.sm is not None and not any(pattern.matches(device.compute_capability) for pattern in self.sm):
            return False
        if self.device is not None and not any(
            fnmatchcase(name, pattern) for pattern in self.device for name in (device.device_name, device.type)
        ):
            return False
        if any(subject.dtypes.get(operand) not in dtypes for operand, dtypes in self.dtype.items()):
            return False
        return all(
            (size := subject.dims.get(name)) is not None and any(span.admits(size) for span in spans)
            for name, spans in self.dims.items()
        )

    def to_dict(self) -> dict[str, object]:
        fields: dict[str, object] = {}
        if self.op is not None:
            fields["op"] = _one_or_list(self.op)
        if self.sm is not None:
            fields["sm"] = _one_or_list(tuple(pattern.text for pattern in self.sm))
        if self.device is not None:
            fields["device"] = _one_or_list(self.device)
        if self.dtype:
            fields["dtype"] = {operand: _one_or_list(dtypes) for operand, dtypes in self.dtype.items()}
        for name, spans in self.dims.items():
            fields[name] = _one_or_list(tuple(span.low if span.low == span.high else str(span) for span in spans))
        return fields


class Rule(NamedTuple):
    """One rule.

    use       engine id or glob that the graph is pinned to, or ""; knobs are for it
    avoid     engine globs that are disabled for the graph
    versions  normalised distribution name -> version specifier; all must hold, an absent distribution fails
    strict    whether a declining pin raises; None leaves it to the configuration's ``strict``
    origin    ``file:line`` of the rule
    """

    name: str
    match: Match
    use: str
    knobs: Mapping[str, Any]
    avoid: tuple[str, ...]
    reason: str
    versions: Mapping[str, str]
    strict: bool | None
    origin: str

    def matches(self, subject: RuleSubject) -> bool:
        """Whether the rule applies to the subject."""
        return self.match.matches(subject) and all(
            dist in subject.dists and satisfies(subject.dists[dist], wanted) for dist, wanted in self.versions.items()
        )

    def pins(self, engine: str) -> bool:
        """Whether ``use`` covers the engine."""
        return bool(self.use) and engine_matches(self.use, engine)

    def avoids(self, engine: str) -> bool:
        """Whether ``avoid`` covers the engine."""
        return any(engine_matches(pattern, engine) for pattern in self.avoid)

    def to_dict(self) -> dict[str, object]:
        """The rule as JSON-able data, without its origin and without what it leaves open."""
        fields = {
            "name": self.name,
            "match": self.match.to_dict(),
            "use": self.use,
            "knobs": dict(self.knobs),
            "avoid": list(self.avoid),
            "reason": self.reason,
            "versions": dict(self.versions),
            "strict": self.strict,
        }
        return {key: value for key, value in fields.items() if value not in ("", {}, [], None)}


def parse_rule(source: Source, path: Path, raw: object) -> Rule:
    """Validate one rule table; ConfigError names the key."""
    table = source.table(path, raw)
    for key in table:
        if key not in _RULE_KEYS:
            hint = f" ({key!r} belongs into match = {{ ... }})" if key in _FIXED else ""
            raise source.unknown((*path, key), _RULE_KEYS, hint)
    use = source.string((*path, "use"), table.get("use", ""))
    if "use" in table:
        source.parsed((*path, "use"), check_engine, use)
    avoid = source.strings((*path, "avoid"), table.get("avoid", []), check_engine)
    if not use and not avoid:
        raise source.error(path, "the rule does nothing: give it use or avoid")
    knobs = parse_knobs(source, (*path, "knobs"), table.get("knobs", {}))
    if knobs and not (use and is_exact(use)):
        raise source.error((*path, "knobs"), "knobs need use = with the exact name of their engine")
    for pattern in avoid:
        if use and (pattern == use or (is_exact(use) and engine_matches(pattern, use))):
            raise source.error((*path, "avoid"), f"contradicts use = {use!r}: {pattern!r} avoids it", pattern)
    strict = source.boolean((*path, "strict"), table["strict"]) if "strict" in table else None
    if strict is False and source.kind == "project":
        raise source.error((*path, "strict"), "a project file may only restrict: strict may only be true")
    return Rule(
        name=source.string((*path, "name"), table.get("name", "")),
        match=_parse_match(source, (*path, "match"), table.get("match", {})),
        use=use,
        knobs=MappingProxyType(knobs),
        avoid=tuple(avoid),
        reason=source.string((*path, "reason"), table.get("reason", "")),
        versions=MappingProxyType(_parse_versions(source, (*path, "versions"), table.get("versions", {}))),
        strict=strict,
        origin=source.origin(path),
    )


def parse_knobs(source: Source, path: Path, raw: object) -> dict[str, Any]:
    """Validate the form of a knob table; names and domains belong to the engine's manifest."""
    knobs = dict(source.table(path, raw))
    for name, value in knobs.items():
        if not _NAME.fullmatch(name):
            raise source.error((*path, name), f"{name!r} is not a knob's name")
        if not isinstance(value, (bool, int, float, str)) or (isinstance(value, float) and not math.isfinite(value)):
            raise source.error((*path, name), f"a knob is an int, a finite float, a string or a boolean, got {value!r}")
    return knobs


def _parse_match(source: Source, path: Path, raw: object) -> Match:
    table = source.table(path, raw)
    fields: dict[str, Any] = {}
    dims: dict[str, tuple[Span, ...]] = {}
    readers: dict[str, Callable[[Any], Any]] = {"op": _op, "sm": _sm, "device": _device}
    for key, value in table.items():
        here = (*path, key)
        if key == "dtype":
            operands = source.table(here, value)
            fields["dtype"] = MappingProxyType(
                {name: _parse_dtypes(source, (*here, name), dtypes) for name, dtypes in operands.items()}
            )
        elif key in readers:
            items = value if isinstance(value, (list, tuple)) else [value]
            if not items:
                raise source.error(here, "an empty list matches nothing; leave the key out to match everything")
            fields[key] = tuple(source.parsed(here, readers[key], item) for item in items)
        elif not _NAME.fullmatch(key):
            raise source.unknown(here, _FIXED)
        else:
            try:
                dims[key] = parse_extent(value)
            except ValueError as error:
                guess = nearest(key, _FIXED) if len(key) > 2 else ""  # "m" is a dim, not a slip of "sm"
                raise source.error(here, f"{error}{guess}") from None
    return Match(dims=MappingProxyType(dims), **fields)


def _op(value: object) -> str:
    if not isinstance(value, str) or not _OP.fullmatch(value):
        raise ValueError(f"{value!r} is not an op's name or a glob of names like 'matmul' or 'moe_*'")
    return value


def _sm(value: object) -> SmPattern:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    try:
        return parse_sm(text if isinstance(text, str) else "")
    except ManifestError:
        raise ValueError(
            f"{value!r} is not an architecture: write '90' or '90a' (exact), '100f' (family) or '80+'"
        ) from None


def _device(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a device's name or a glob of names like 'NVIDIA H200' or 'NVIDIA H*'")
    return value


def _parse_dtypes(source: Source, path: Path, raw: object) -> tuple[str, ...]:
    items = raw if isinstance(raw, (list, tuple)) else [raw]
    if not items:
        raise source.error(path, "an empty list matches nothing; leave the operand out to match every data type")
    names = []
    for item in items:
        name = source.string(path, item)
        if name not in STORAGE_DTYPES:
            raise source.error(path, f"{name!r} is not a data type{nearest(name, STORAGE_DTYPES)}")
        names.append(name)
    return tuple(names)


def _parse_versions(source: Source, path: Path, raw: object) -> dict[str, str]:
    versions: dict[str, str] = {}
    for dist, wanted in source.table(path, raw).items():
        here = (*path, dist)
        if not _DIST.fullmatch(dist):
            raise source.error(here, f"{dist!r} is not a distribution's name")
        source.string(here, wanted)
        try:
            check_specifier(wanted)
        except CudnnCoreError as error:
            raise source.error(here, str(error)) from None
        if versions.setdefault(normalise(dist), wanted) != wanted:
            raise source.error(here, f"{dist!r} is given twice with different versions")
    return versions


def _one_or_list(values: tuple[Any, ...]) -> object:
    return values[0] if len(values) == 1 else list(values)

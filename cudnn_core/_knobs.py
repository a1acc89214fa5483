"""Knobs: typed, named tuning parameters that change performance only. Imported by the manifest.

A knob's domain is either ``choices`` or ``min``/``max``/``multiple_of``; a bool's is both values. Its default is the one
given, else the first choice, else ``min``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ._declines import Decline
from ._errors import CudnnCoreError, nearest

__all__ = ["KnobError", "KnobSpec", "complete_knobs", "knob_declines"]

TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


class KnobSpec(NamedTuple):
    """One knob of a manifest."""

    name: str
    type: str
    default: Any
    choices: tuple[Any, ...] = ()
    min: float | None = None
    max: float | None = None
    multiple_of: int | None = None

    def decline(self, value: object) -> Decline | None:
        """None if ``value`` is admissible, else ``knob.type`` or ``knob.domain``."""
        subject = f"knob:{self.name}"
        if not self._has_type(value):
            return Decline("knob.type", subject, expected=self.type, actual=f"{value!r} ({type(value).__name__})")
        if self.choices:
            if value in self.choices:
                return None
            return Decline("knob.domain", subject, expected=list(self.choices), actual=value)
        number: Any = value
        inside = (self.min is None or number >= self.min) and (self.max is None or number <= self.max)
        if inside and (self.multiple_of is None or number % self.multiple_of == 0):
            return None
        limits = {"min": self.min, "max": self.max, "multiple_of": self.multiple_of}
        return Decline("knob.domain", subject, {k: v for k, v in limits.items() if v is not None}, actual=value)

    def _has_type(self, value: object) -> bool:
        if isinstance(value, bool):
            return self.type == "bool"
        if self.type == "float":
            # An int that no float holds is none.
            return (
                isinstance(value, (int, float)) and value == value and (type(value) is float or abs(value) < 1 << 1000)
            )
        return isinstance(value, TYPES[self.type])


class KnobError(CudnnCoreError):
    """Knob values that an engine does not take; ``declines`` has all of them."""

    def __init__(self, engine: str, declines: list[Decline]) -> None:
        super().__init__(f"{engine}: " + "; ".join(map(str, declines)))
        self.declines = tuple(declines)


def knob_declines(specs: Mapping[str, KnobSpec], given: Mapping[str, Any]) -> list[Decline]:
    """Everything that is wrong with ``given``: unknown names, wrong types, values outside the domain."""
    found: list[Decline] = []
    for name, value in given.items():
        spec = specs.get(name)
        if spec is None:
            hint = nearest(name, specs).strip(" ()")
            found.append(Decline("knob.unknown", f"knob:{name}", expected=list(specs), hint=hint))
        else:
            decline = spec.decline(value)
            if decline is not None:
                found.append(decline)
    return found


def complete_knobs(engine: str, specs: Mapping[str, KnobSpec], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every knob in manifest order: ``given`` over the defaults. Raises KnobError with all that is wrong."""
    declines = knob_declines(specs, given)
    if declines:
        raise KnobError(engine, declines)
    return {
        name: float(given[name]) if spec.type == "float" and name in given else given.get(name, spec.default)
        for name, spec in specs.items()
    }

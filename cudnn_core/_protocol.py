"""What engines answer, checked against the protocol and made plain; nothing of an answer is used unchecked.

Each function returns the answer in the form that the core relies on, or raises ProtocolError (BuildError for a compiled
plan) whose text completes "check_support returned ...". Called inside the guard, since even a look at an answer may run
plugin code. Imported by the candidates, the building of plans and the conformance kit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from ._canonical import plain
from ._decision import plain_decline
from ._declines import Decline
from ._engine import Artifact, CompiledPlan, Declined, Estimate, PlanConfig, Support
from ._errors import BuildError, CudnnCoreError
from ._hooks import short_repr

if TYPE_CHECKING:
    from ._manifest import EngineSpec

__all__ = ["ProtocolError", "as_compiled", "as_estimate", "as_members", "as_variant", "as_verdict"]

_OPTIONAL_METHODS = ("bind", "host_arguments", "serialize")


class ProtocolError(CudnnCoreError):
    """An engine returned something that the protocol forbids."""


def as_verdict(verdict: Any, spec: EngineSpec) -> Support | Declined:
    """The answer of ``check_support``."""
    if isinstance(verdict, Declined):
        reasons = verdict.reasons
        if not isinstance(reasons, (tuple, list)) or not reasons or not all(isinstance(r, Decline) for r in reasons):
            raise ProtocolError("Declined without a Decline in it")
        return Declined(tuple(map(plain_decline, reasons)))
    if not isinstance(verdict, Support):
        raise ProtocolError(f"{short_repr(verdict)}, which is neither Support nor Declined")
    if not isinstance(verdict.configs, tuple) or not 1 <= len(verdict.configs) <= 8:
        raise ProtocolError("Support without 1 to 8 configs")
    configs = tuple(_config(config, spec) for config in verdict.configs)
    workspace = verdict.workspace
    if workspace is not None and not _is_size(workspace):
        raise ProtocolError(f"workspace {short_repr(workspace)}")
    notes = verdict.notes
    if notes is not None:
        if not isinstance(notes, (frozenset, set)) or not all(isinstance(note, str) for note in notes):
            raise ProtocolError(f"notes {short_repr(notes)}, which is no set of strings")
        notes = frozenset(notes)
    return Support(configs, workspace, notes)


def as_members(answer: Any, spec: EngineSpec, limit: int) -> tuple[PlanConfig, ...]:
    """The answer of ``members``: at most ``limit`` configs, each of a variant."""
    if not isinstance(answer, tuple):
        raise ProtocolError(f"{short_repr(answer)}, which is no tuple of configs")
    if len(answer) > limit:
        raise ProtocolError(f"{len(answer)} configs, where at most {limit} were asked for")
    members = tuple(_config(config, spec) for config in answer)
    if not all(config.variant for config in members):
        raise ProtocolError("a config without a variant, which is no member")
    return members


def as_variant(compiled: CompiledPlan, spec: EngineSpec, asked: str) -> CompiledPlan:
    """``compiled``, whose ``variant``, if it has one, is a member of the engine, and the one that was ``asked`` for."""
    told = getattr(compiled, "variant", "")
    if not isinstance(told, str) or not spec.has_variant(told):
        raise BuildError(
            f"engine {spec.id} returned a plan with variant {short_repr(told)}, which the manifest does not declare"
        )
    if told and asked and told != asked:
        raise BuildError(f"engine {spec.id} returned a plan of {told}, asked for {asked}")
    return compiled


def as_estimate(answer: Any) -> Estimate | None:
    """The answer of ``estimate``."""
    if answer is None:
        return None
    if not isinstance(answer, Estimate):
        raise ProtocolError(f"{short_repr(answer)}, which is neither Estimate nor None")
    us = answer.us
    try:
        time = float(us) if isinstance(us, Real) and not isinstance(us, bool) else math.nan
    except OverflowError:
        time = math.inf
    if not 0 < time < math.inf:
        raise ProtocolError(f"us {short_repr(us)}, which is no time")
    if answer.basis not in ("model", "prior"):
        raise ProtocolError(f"basis {short_repr(answer.basis)}")
    if not isinstance(answer.calibration, str) or "\0" in answer.calibration:
        raise ProtocolError(f"calibration {short_repr(answer.calibration)}, which is no file name")
    return Estimate(time, answer.basis, answer.calibration)


def as_compiled(compiled: Any, engine: str) -> CompiledPlan:
    """The answer of ``build_plan`` or ``load_plan``."""
    if not callable(getattr(compiled, "execute", None)):
        raise BuildError(f"engine {engine} returned {short_repr(compiled)}, which is no plan: it has no execute")
    size = getattr(compiled, "workspace_size", None)
    if not _is_size(size):
        raise BuildError(f"engine {engine} returned a plan with workspace_size {short_repr(size)}")
    for name in _OPTIONAL_METHODS:
        method = getattr(compiled, name, None)
        if method is not None and not callable(method):
            raise BuildError(f"engine {engine} returned a plan with a {name} that is no method: {short_repr(method)}")
    artifacts = getattr(compiled, "artifacts", None) or ()
    if not isinstance(artifacts, (tuple, list)) or not all(isinstance(item, Artifact) for item in artifacts):
        raise BuildError(f"engine {engine} returned a plan with artifacts {short_repr(artifacts)}")
    return compiled  # type: ignore[no-any-return]


def _config(config: Any, spec: EngineSpec) -> PlanConfig:
    if not isinstance(config, PlanConfig) or not isinstance(config.knobs, Mapping):
        raise ProtocolError(f"a config that is none: {short_repr(config)}")
    if config.engine not in ("", spec.id, spec.short_id, spec.name):
        raise ProtocolError(f"a config of another engine: {short_repr(config.engine)}")
    if not isinstance(config.variant, str) or not spec.has_variant(config.variant):
        raise ProtocolError(f"variant {short_repr(config.variant)}, which the manifest does not declare")
    knobs = dict(config.knobs)
    if not all(isinstance(name, str) for name in knobs):
        raise ProtocolError(f"a config with a knob whose name is no string: {short_repr(knobs)}")
    return PlanConfig(spec.id, {name: plain(value) for name, value in knobs.items()}, config.variant)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

"""What the package's kernels take: the engine of every op, and the cases that it declines. Imports the core and the cases.

A case that is not declined must run on the engine; a case that is must name the reason. Nothing is left out between the two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import cudnn_core

from .cases import CASES, Case, named
from .running import graph_of

__all__ = ["ENGINES", "PAIRS", "UNSUPPORTED", "codes", "declined", "taken"]

ENGINES = {
    "gdn": "linear_attention:gdn_sm90",
    "kda": "linear_attention:kda_sm90",
    "gdn_decode": "linear_attention:gdn_decode",
    "kda_decode": "linear_attention:kda_decode",
}
PAIRS = {
    op: (ENGINES[op], ENGINES[f"{op}_decode"]) for op in ("gdn", "kda")
}  # of prefill and decode, for ``properties``


def declined(case: Case) -> str:
    """The code with which the op's engine declines the case, "" where it takes it."""
    if case.io == torch.float32 and not case.decodes:
        return "dtype.unsupported"
    if case.options.get("checkpoint_every_n_tokens"):
        return "op.attribute"
    if not {*case.size} <= {64, 128}:
        return "shape.range"
    return ""


def taken(op: str) -> list[Case]:
    """The cases of an op that its engine runs."""
    return [case for case in CASES if case.op == op and not declined(case)]


def _unsupported() -> list[Case]:
    found = [case for case in CASES if declined(case)]
    for op in ("gdn", "kda"):
        base = named(f"{op}-plain")
        kept = {**base.options, "checkpoint_every_n_tokens": 64}
        found.append(replace(base, name=f"{op}-checkpoints", options=kept))
        found.append(replace(base, name=f"{op}-d32", size=(32, 32)))
        found.append(replace(base, name=f"{op}-k64-v96", size=(64, 96)))
        decode = named(f"{op}_decode-plain")
        found.append(replace(decode, name=f"{op}_decode-d96", size=(96, 96)))
        found.append(replace(decode, name=f"{op}_decode-k32-v64", size=(32, 64)))
    return found


UNSUPPORTED = _unsupported()
"""Cases that an engine declines: those of ``CASES``, and more."""


def codes(case: Case, device: Any = None) -> set[str]:
    """The codes with which the engine declines the case's graph on a device (None: the first GPU); none if it takes it."""
    where = cudnn_core.device_info(0) if device is None else device
    decision = graph_of(case)[0].explain(device=where)
    (engine,) = (one for one in decision.engines if one.id.partition("@")[0] == ENGINES[case.op])
    return {reason.code for reason in engine.reasons if engine.state == "declined"}

"""Errors and times of one case of the linear-attention benchmark. Used by linear_attention.py; needs torch and a GPU.

``outcomes`` is what a process of its own runs: it names each step that may hang (a peer's compilation, its first launch) before it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ._gpu_timing import eager_times, gpu_times
from ._la_cases import Decode, Measured
from ._la_ours import Ours
from ._la_peers import peers, reason_of
from ._la_reference import error, head_sample, sampled

__all__ = ["EMPTY", "Judge", "Outcome", "label", "measure", "outcomes"]

EMPTY = "empty kernel"
_OURS = ("ours", "front door", EMPTY)  # nobody stops these: without them there is nothing to compare


class Outcome(NamedTuple):
    """What was measured, or None where our engine declines or can't be captured, and what there is to say about it."""

    measured: Measured | None
    notes: list[str]


def label(case: Any, gates: str) -> str:
    return case.name if isinstance(case, Decode) else f"{case.name}, {gates} gates"


def outcomes(
    todo: list[tuple[Any, str]], skip: frozenset[str], rounds: int, step: Callable[[str], None]
) -> Iterator[Outcome]:
    """Of each case with its kind of gates."""
    for case, gates in todo:
        yield measure(case, gates, skip, rounds, step)
        torch.cuda.empty_cache()


def measure(
    case: Any, gates: str, skip: frozenset[str], rounds: int, step: Callable[[str], None] = lambda name: None
) -> Outcome:
    """Errors and times of ours and of every peer. ``step`` hears which peer is at work, "" where none is."""
    import cudnn_core

    def peer(name: str) -> None:
        step("" if name in _OURS else name)

    step("")
    x = case.operands(gates)
    title = label(case, gates)
    notes: list[str] = []
    try:
        ours = Ours(case, x)
    except cudnn_core.NoEngineError as declined:
        return Outcome(None, [f"{title}: ours declined: {str(declined).splitlines()[0]}"])
    judge = Judge(case, x)
    measured = Measured({}, {}, {"ours": judge.ours(ours)})
    found, missing = peers(case, x, skip, step)
    for name, call in list(found.items()):
        step(name)
        try:
            measured.errors[name] = judge.peer(call)
        except Exception as raised:  # as in ``peers``: a note of the table
            missing[name] = reason_of(raised)
            del found[name]
    step("")
    calls: dict[str, Callable[[int], object]] = {"ours": ours, **found}
    if isinstance(case, Decode) and case.batch == 1:
        calls[EMPTY] = lambda i: torch.cuda._sleep(0)
    failed: dict[str, str] = {}
    measured.graph |= gpu_times(calls, rounds=rounds, failed=failed, step=peer)
    step("")
    missing |= {name: f"as a graph: {reason}" for name, reason in failed.items()}
    notes += [f"{title}: without {name}: {reason}" for name, reason in missing.items()]
    if "ours" in failed:
        return Outcome(None, [f"{title}: ours can't be captured: {failed['ours']}", *notes])
    measured.eager |= eager_times({**calls, "front door": ours.front_door()}, rounds=rounds, step=peer)
    step("")
    if isinstance(case, Decode) and case.batch == 1:
        measured.host |= ours.host_times()
    errors = ", ".join(f"{name} {value:.1e}" for name, value in measured.errors.items())
    return Outcome(measured, [*notes, f"{title}: {ours.plan.engine}, errors {errors}"])


class Judge:
    """Errors of a case's callables against the recurrence on ``head_sample``'s heads."""

    def __init__(self, case: Any, x: Mapping[str, torch.Tensor]) -> None:
        self._case, self._x, self._heads = case, x, list(head_sample(case))
        self._slots = x["slots"][0].long() if isinstance(case, Decode) else None
        self._states = None if self._slots is None else x["initial_state"][self._slots].clone()
        self._want = sampled(case, dict(x), self._slots)

    def ours(self, ours: Ours) -> float:
        """Of O and of the final state, NaN where nothing was written."""
        for tensor in ours.outputs.values():
            tensor.fill_(torch.nan)
        self._restore()
        ours(0)
        o = self._error(ours.outputs["O"])
        state = ours.outputs.get("final_state")
        if state is None:
            state = self._x["initial_state"][self._slots]
        return max(o, error(state[:, self._heads].unsqueeze(1), self._want["final_state"].unsqueeze(1)))

    def peer(self, call: Callable[[int], tuple[Any, Any]]) -> float:
        """Of o; a peer's states have other layouts."""
        self._restore()
        return self._error(call(0)[0])

    def _error(self, o: torch.Tensor) -> float:
        return error(o[:, self._heads].reshape(self._want["O"].shape), self._want["O"])

    def _restore(self) -> None:
        if self._slots is not None:
            self._x["initial_state"][self._slots] = self._states

"""What the values of index and gate operands must be. Imported by the torch ops.

Reading them on a GPU waits for it, so that there it happens on request only; the ops' masks hold in any case, and are said
in their docs.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from .errors import InputError

__all__ = ["check_contents"]

Tensors = dict[str, Tensor]


def check_contents(tensors: Tensors, gates: str, check: bool | None, most: int | None = None) -> None:
    """Raise InputError for values that have no meaning. By port, of one device.

    gates  "log": g <= 0; "linear": g in [0, 1]; "": g holds logits, which may be anything
    check  None: if the tensors are on the CPU
    most   tokens of a sequence, at most; None: any number
    """
    if check is None:
        check = tensors["q"].device.type == "cpu"
    if not check:
        return
    tokens = tensors["q"].shape[0]
    if "cu_seqlens" in tensors:
        _check_boundaries(tensors["cu_seqlens"], tokens, most)
    if "state_indices" in tensors:
        _check_slots(tensors["state_indices"], tensors["initial_state"].shape[0])
    if "num_accepted_tokens" in tensors:
        _check_accepted(tensors["num_accepted_tokens"], tensors["state_indices"].shape[1])
    if gates:
        _check_gates(tensors["g"], gates)


def _check_boundaries(cu_seqlens: Tensor, tokens: int, most: int | None) -> None:
    bounds = cu_seqlens.tolist()
    if bounds and bounds[0] != 0:
        raise InputError(f"must start at 0, starts at {bounds[0]}", argument="cu_seqlens")
    for position, (start, stop) in enumerate(itertools.pairwise(bounds), 1):
        if stop < start:
            raise InputError(f"decreases from {start} to {stop} at position {position}", argument="cu_seqlens")
    if bounds and bounds[-1] > tokens:
        raise InputError(f"ends at {bounds[-1]}, past the {tokens} tokens", argument="cu_seqlens")
    for sequence, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if most is not None and stop - start > most:
            raise InputError(f"sequence {sequence} has {stop - start} tokens, of at most {most}", argument="cu_seqlens")


def _check_slots(state_indices: Tensor, rows: int) -> None:
    slots = state_indices.tolist()
    owners: dict[int, int] = {}
    for sequence, held in enumerate(slots):
        for slot in held if isinstance(held, list) else (held,):
            if slot >= rows:
                raise InputError(f"sequence {sequence} names row {slot} of a pool of {rows}", argument="state_indices")
            if slot < 0:
                continue
            if slot in owners:
                both = f"sequences {owners[slot]} and {sequence} share"
                once = f"sequence {sequence} names twice"
                raise InputError(f"{once if owners[slot] == sequence else both} row {slot}", argument="state_indices")
            owners[slot] = sequence


def _check_accepted(num_accepted_tokens: Tensor, most: int) -> None:
    for sequence, count in enumerate(num_accepted_tokens.tolist()):
        if not 0 <= count <= most:
            raise InputError(
                f"sequence {sequence} has {count}, of at most {most} tokens", argument="num_accepted_tokens"
            )


def _check_gates(g: Tensor, gates: str) -> None:
    low, high = (None, 0.0) if gates == "log" else (0.0, 1.0)
    if g.numel() and (bool((g > high).any()) or (low is not None and bool((g < low).any()))):
        kind = "logarithms of decays: at most 0" if gates == "log" else "decays: from 0 to 1"
        raise InputError(f"gates are {kind}, and some are not", argument="g")

"""The block of int64 words that the host function of a prefill reads. Imported by ``plan``, which fills it, and by
``kernels.arguments``, which unpacks it; imports neither the core nor a DSL.

Strides count elements, of a tensor's axes of more than one element; an axis of one element has stride 0.
"""

from __future__ import annotations

from .problem import Problem

__all__ = ["ADDRESSES", "SCALARS", "argument_words", "tensor_words"]

SCALARS = ("tokens", "sequences", "pool", "segments", "sms", "workspace", "boundaries", "summaries")
"""T; N; rows of the states' leading axis (a pool's, or N; 0 without states); segments of a sequence (1: a single pass); SMs of
the GPU; addresses."""
ADDRESSES = ("workspace", "boundaries", "summaries")
"""The scalars that are addresses, all of them in the workspace: its areas (``segments``). It starts with the records."""

_STATE = ("address", "token", "head", "row", "col")


def tensor_words(problem: Problem) -> dict[str, tuple[str, ...]]:
    """The words of every tensor that the problem has, by port, in order.

    address     of the first element, in device memory
    token       stride of the leading axis: tokens, or rows of states
    head        stride of the heads
    row, col    of a state: strides along V and along K, one of which is 1
    Channels (the last axis of q, k, v, O, of kda's g and dt_bias) and the elements of cu_seqlens and state_indices have stride 1.
    """
    ports: dict[str, tuple[str, ...]] = dict.fromkeys(("q", "k", "v", "g", "beta", "O"), ("address", "token", "head"))
    if problem.index_dtype:
        ports["cu_seqlens"] = ("address",)
    if problem.initial:
        ports["initial_state"] = _STATE
    if problem.final:
        ports["final_state"] = _STATE
    if problem.slot_dtype:
        ports["state_indices"] = ("address",)
    if problem.a_log_dtype:
        ports["a_log"] = ("address", "head")
    if problem.bias_dtype:
        ports["dt_bias"] = ("address", "head")
    return ports


def argument_words(problem: Problem) -> dict[str, int]:
    """The index of every word: "tokens", ..., then "q.address", "q.token", "q.head", "k.address", ..."""
    words = [*SCALARS, *(f"{port}.{word}" for port, names in tensor_words(problem).items() for word in names)]
    return {word: index for index, word in enumerate(words)}

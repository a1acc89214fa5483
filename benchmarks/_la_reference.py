"""The delta rule token by token in torch fp64, for some heads of a benchmark's case, and the error of a result against it.

On CUDA blocks of steps are replayed from a graph: 32,768 steps take less than a second. Used by linear_attention.py; needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["error", "head_sample", "recurrence", "sampled"]

_BLOCK = 128  # steps of a graph


def head_sample(case: Any) -> tuple[int, ...]:
    """The first and the last head of the output."""
    return (0, case.values - 1) if case.values > 1 else (0,)


def sampled(case: Any, x: dict[str, torch.Tensor], slots: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """O [N, L, h, V] and the final state [N, h, V, K] of ``head_sample``'s heads in fp64, of N sequences of L tokens."""
    heads = list(head_sample(case))
    grouped = [head * case.heads // case.values for head in heads]
    sequences = len(slots) if slots is not None else len(x["cu_seqlens"]) - 1

    def rows(port: str, wanted: list[int]) -> torch.Tensor:
        picked = x[port][:, wanted].double()
        return picked.reshape(sequences, -1, *picked.shape[1:])

    q, k = rows("q", grouped) * case.size**-0.5, rows("k", grouped)
    v, g, beta = (rows(port, heads) for port in ("v", "g", "beta"))
    alpha = g.exp() if g.ndim == 4 else g.exp().unsqueeze(-1).expand_as(k)
    state = v.new_zeros((sequences, len(heads), case.size, case.size))
    if slots is not None:
        state.copy_(x["initial_state"][slots.long()][:, heads])
    return dict(zip(("O", "final_state"), recurrence(q, k, v, alpha, beta, state), strict=True))


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, state). q scaled, k, alpha [N, L, h, K]; v, o [N, L, h, V]; beta [N, L, h]; state [N, h, V, K], which changes."""
    length, o = q.shape[1], torch.empty_like(v)
    whole = length - length % _BLOCK if q.is_cuda else 0
    if whole:
        held = [t[:, :_BLOCK].clone() for t in (q, k, v, alpha, beta)]
        made = torch.empty_like(held[2])
        replay = _graph(lambda: _steps(*held, state, made), state)
        for start in range(0, whole, _BLOCK):
            for fixed, t in zip(held, (q, k, v, alpha, beta), strict=True):
                fixed.copy_(t[:, start : start + _BLOCK])
            replay()
            o[:, start : start + _BLOCK] = made
    if whole < length:
        _steps(*(t[:, whole:] for t in (q, k, v, alpha, beta)), state, o[:, whole:])
    return o, state


def _steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    o: torch.Tensor,
) -> None:
    for t in range(q.shape[1]):
        state.mul_(alpha[:, t].unsqueeze(-2))
        update = (v[:, t] - (state * k[:, t].unsqueeze(-2)).sum(-1)).mul_(beta[:, t].unsqueeze(-1))
        state.addcmul_(update.unsqueeze(-1), k[:, t].unsqueeze(-2))
        torch.sum(state * q[:, t].unsqueeze(-2), -1, out=o[:, t])


def _graph(call: Callable[[], None], state: torch.Tensor) -> Callable[[], object]:
    kept = state.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    state.copy_(kept)
    return graph.replay


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    """Relative RMS error, of all of it or of the last 64 tokens (axis 1), whichever is larger."""
    found = found.double()
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    worst = 0.0
    for a, b in ((found, want), (found[:, -64:], want[:, -64:])):
        worst = max(worst, float((a - b).square().mean().sqrt() / b.square().mean().sqrt()))
    return worst

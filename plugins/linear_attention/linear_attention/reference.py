"""The ops that this plugin adds, in PyTorch, token by token: what ``torch_reference`` runs and engines are judged by.

Named by the rows; imports torch, and nothing of the engines. The math is in the rows' docs. The state of a sequence is kept
in the precision of the computation from its first token to its last, whatever the type of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["gdn_decode", "kda_decode"]


_EPSILON = 1e-6
_SMALLEST = 1e-10  # of a gate in the linear domain
_BOUND = -5.0


def gdn_decode(inputs: Mapping[str, Tensor], attrs: Mapping[str, Any]) -> dict[str, Tensor]:
    """O and, if asked for, final_state. Port -> tensor in the precision to compute in."""
    return _decode(inputs, attrs, inputs["g"].unsqueeze(-1))


def kda_decode(inputs: Mapping[str, Tensor], attrs: Mapping[str, Any]) -> dict[str, Tensor]:
    """As ``gdn_decode``, with a gate for every key channel."""
    return _decode(inputs, attrs, inputs["g"])


def _decode(inputs: Mapping[str, Tensor], attrs: Mapping[str, Any], g: Tensor) -> dict[str, Tensor]:
    q, k, v = (inputs[port] for port in "qkv")
    heads, most = max(q.shape[1], v.shape[1]), attrs["tokens_per_sequence"]
    if attrs["use_qk_l2norm"]:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if attrs["scale"] is None else attrs["scale"])
    q, k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k, v))
    alpha = _decay(inputs, attrs, g)
    beta = inputs["beta"]
    if attrs["use_beta_sigmoid"]:
        beta = torch.sigmoid(beta) * (2.0 if attrs["allow_neg_eigval"] else 1.0)

    slots = inputs.get("state_indices")
    pool = inputs.get("initial_state")
    first, length = _spans(inputs, len(q), most)
    source = _starting_rows(inputs, len(first), most, q.device)
    rows = len(first) if pool is None else len(pool)
    live = (source >= 0) & (source < rows)
    state = q.new_zeros((len(first), heads, v.shape[-1], k.shape[-1]))
    if pool is not None:
        state[live] = pool[source[live]]
    final = state.clone() if pool is None else pool.clone()
    o = q.new_zeros((len(q), heads, v.shape[-1]))
    for step in range(most):
        running = (live & (step < length)).nonzero().flatten()
        if not len(running):
            break
        at = first[running] + step
        key, decayed = k[at].unsqueeze(-2), state[running] * alpha[at].unsqueeze(-2)
        update = beta[at].unsqueeze(-1) * (v[at] - (decayed * key).sum(-1))
        state[running] = decayed + update.unsqueeze(-1) * key
        o[at] = (state[running] * q[at].unsqueeze(-2)).sum(-1)
        if slots is not None and slots.ndim == 2:
            target = slots[running, step].to(torch.int64)
            kept = (target >= 0) & (target < rows)
            final[target[kept]] = state[running[kept]]
    if slots is None or slots.ndim == 1:
        final[source[live]] = state[live]
    return {"O": o, "final_state": final} if attrs["output_final_state"] else {"O": o}


def _spans(inputs: Mapping[str, Tensor], tokens: int, most: int) -> tuple[Tensor, Tensor]:
    """The first token of every sequence and how many there are: boundaries are held to the tokens, then to the first and the last one."""
    if "cu_seqlens" not in inputs:
        first = torch.arange(0, tokens, most, device=inputs["q"].device)
        return first, torch.full_like(first, most)
    bounds = inputs["cu_seqlens"].to(torch.int64).clamp(0, tokens)
    bounds = bounds.clamp(bounds[0], bounds[[0, -1]].amax())
    return bounds[:-1], (bounds[1:] - bounds[:-1]).clamp(min=0)


def _starting_rows(inputs: Mapping[str, Tensor], sequences: int, most: int, device: torch.device) -> Tensor:
    slots = inputs.get("state_indices")
    if slots is None:
        return torch.arange(sequences, device=device)
    slots = slots.to(torch.int64)
    if slots.ndim == 1:
        return slots
    accepted = inputs.get("num_accepted_tokens")
    column = torch.zeros_like(slots[:, 0]) if accepted is None else (accepted.to(torch.int64) - 1).clamp(0, most - 1)
    return slots.gather(1, column.unsqueeze(1)).squeeze(1)


def _decay(inputs: Mapping[str, Tensor], attrs: Mapping[str, Any], g: Tensor) -> Tensor:
    """alpha [T, HO, 1 or K]."""
    if attrs["gate_domain"] == "linear":
        return g.clamp(_SMALLEST, 1.0)
    if attrs["safe_gate"]:
        heads = g.shape[1]
        amplitude: Any = torch.exp(inputs["a_log"]).reshape(heads, 1) if "a_log" in inputs else 1.0
        if "dt_bias" in inputs:
            g = g + inputs["dt_bias"].reshape(heads, -1)
        if attrs.get("gate_activation", "softplus") == "softplus":
            g = -amplitude * torch.logaddexp(g, torch.zeros_like(g))
        else:
            bound = attrs["gate_lower_bound"]
            g = (_BOUND if bound is None else bound) * torch.sigmoid(amplitude * g)
    return torch.exp(g.clamp(max=0.0))

"""gdn and kda: the gated delta rule, token by token.

Per v-head, state S [K, V], decay a = exp(min(g, 0)) (a scalar for gdn, [K] for kda), in this order:
    S' = a * S;   u = beta * (v - S'^T k);   S = S' + k u^T;   o = scale * S^T q
States lie V-major in memory: [N, HO, V, K]. Heads: HO = max(H, HV); head h of O reads q and k head h // (HO / heads).
Sequences are packed along the token axis and delimited by ``cu_seqlens`` (without it: one sequence); tokens of none give
O = 0. Checkpoints are the states before tokens 0, n, 2n, ... of each sequence, packed over the sequences; rows beyond are
zero. With ``state_indices`` the states are rows of a pool; a sequence with a row outside starts from zero and its state
is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from .._rounding import round_value
from ._math import Math

__all__ = ["gated_delta"]

Tensor = Any


def gated_delta(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    attrs = node.attrs
    value = {port: math.as_float(inputs[port]) for port in ("q", "k", "v", "g", "beta")}
    bounds = _sequences(inputs)
    q, k, v = value["q"], value["k"], value["v"]
    heads = max(q.shape[1], v.shape[1])
    if attrs.get("use_qk_l2norm"):
        q, k = (_l2norm(x, node.inputs[port].dtype, math) for x, port in ((q, "q"), (k, "k")))
    scale = attrs.get("scale")
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    q, k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k, v))
    alpha = _decay(node, value["g"], inputs, math)
    beta = value["beta"]
    if attrs.get("use_beta_sigmoid"):
        beta = torch.sigmoid(beta) * (2.0 if attrs.get("allow_neg_eigval") else 1.0)

    pool, slots = _initial(inputs, len(bounds), (heads, v.shape[2], k.shape[2]), math)
    every = attrs.get("checkpoint_every_n_tokens") or 0
    o, last, checkpoints = _scan(q, k, v, alpha, beta, _pick(pool, slots), bounds, every)

    results = {"O": o}
    if "final_state" in node.outputs:
        results["final_state"] = _final(pool, slots, last) if "state_indices" in inputs else last
    if "state_checkpoints" in node.outputs:
        results["state_checkpoints"] = _pack(checkpoints, node.outputs["state_checkpoints"].dim, math)
    return results


def _sequences(inputs: Mapping[str, Any]) -> list[tuple[int, int]]:
    """First and last token of each; a boundary counts as the largest up to it, held to the tokens."""
    tokens = inputs["q"].shape[0]
    cu = inputs["cu_seqlens"].clamp(0, tokens).tolist() if "cu_seqlens" in inputs else [0, tokens]
    return list(itertools.pairwise(itertools.accumulate(cu, max)))


def _l2norm(x: Tensor, dtype: str, math: Math) -> Tensor:
    normed = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    # The contract rounds the normalised rows to the io type.
    return round_value(normed, dtype).to(math.dtype) if math.rounding else normed


def _decay(node: Any, g: Tensor, inputs: Mapping[str, Any], math: Math) -> Tensor:
    """alpha, as [T, HO, 1] or [T, HO, K]."""
    attrs = node.attrs
    if node.op == "gdn":
        g = g.unsqueeze(-1)
    if (attrs.get("gate_domain") or "log") == "linear":
        return g.clamp(1e-10, 1.0)
    if attrs.get("safe_gate"):
        heads = g.shape[1]
        amplitude = torch.exp(math.as_float(inputs["a_log"])).reshape(heads, 1) if "a_log" in inputs else 1.0
        if "dt_bias" in inputs:
            g = g + math.as_float(inputs["dt_bias"]).reshape(heads, -1)
        if node.op == "gdn":
            g = -amplitude * torch.logaddexp(g, torch.zeros_like(g))
        else:
            bound = attrs.get("gate_lower_bound")
            g = (-5.0 if bound is None else bound) * torch.sigmoid(amplitude * g)
    return torch.exp(g.clamp(max=0.0))


def _initial(
    inputs: Mapping[str, Any], sequences: int, state: tuple[int, int, int], math: Math
) -> tuple[Tensor, list[int]]:
    """The states to start from and each sequence's row in them, -1 for none."""
    if "initial_state" not in inputs:
        return math.zeros(sequences, *state), list(range(sequences))
    pool = math.as_float(inputs["initial_state"])
    if "state_indices" not in inputs:
        return pool, list(range(sequences))
    slots = inputs["state_indices"].reshape(-1).tolist()
    return pool, [slot if 0 <= slot < pool.shape[0] else -1 for slot in slots]


def _pick(pool: Tensor, slots: list[int]) -> Tensor:
    states = pool.new_zeros((len(slots), *pool.shape[1:]))
    for sequence, slot in enumerate(slots):
        if slot >= 0:
            states[sequence] = pool[slot]
    return states


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    states: Tensor,
    bounds: list[tuple[int, int]],
    every: int,
) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """Every sequence in step, longest first, so that those still running are a prefix. ``states`` is [N, HO, V, K]."""
    lengths = [stop - start for start, stop in bounds]
    order = sorted(range(len(bounds)), key=lambda sequence: -lengths[sequence])
    first = torch.tensor([bounds[sequence][0] for sequence in order], dtype=torch.int64, device=q.device)
    rank = torch.tensor(order, dtype=torch.int64, device=q.device)
    state = states[rank] if order else states
    o = q.new_zeros((q.shape[0], v.shape[1], v.shape[2]))
    checkpoints: list[list[Tensor]] = [[] for _ in bounds]
    running = len(order)
    for step in range(max(lengths, default=0)):
        while lengths[order[running - 1]] <= step:
            running -= 1
        if every and step % every == 0:
            for place in range(running):
                checkpoints[order[place]].append(state[place].clone())
        at = first[:running] + step
        key, active = k[at].unsqueeze(-2), state[:running] * alpha[at].unsqueeze(-2)
        update = beta[at].unsqueeze(-1) * (v[at] - (active * key).sum(-1))
        active = active + update.unsqueeze(-1) * key
        o[at] = (active * q[at].unsqueeze(-2)).sum(-1)
        state = torch.cat((active, state[running:]))
    last = torch.empty_like(states)
    if order:
        last[rank] = state
    return o, last, checkpoints


def _final(pool: Tensor, slots: list[int], last: Tensor) -> Tensor:
    """The pool with the sequences' rows replaced."""
    final = pool.clone()
    for sequence, slot in enumerate(slots):
        if slot >= 0:
            final[slot] = last[sequence]
    return final


def _pack(checkpoints: list[list[Tensor]], dim: tuple[int, ...], math: Math) -> Tensor:
    packed = math.zeros(*dim)
    rows = [state for sequence in checkpoints for state in sequence]
    if rows:
        packed[: len(rows)] = torch.stack(rows)
    return packed

"""The recurrence in torch fp64 on the operands' device, for sizes at which numpy takes minutes. Imports torch and ``recurrence``.

Operands are prepared by ``recurrence`` (gates, norms, groups of heads); here is the loop over tokens alone, for all heads and
sequences at once. Tested against numpy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import recurrence

__all__ = ["expected", "prefill"]


def expected(case: Any, device: str = "cpu", tensors: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """The outputs of a prefill case in numpy, states [.., V, K], from the values that the operands hold."""
    x = dict(tensors or case.tensors())
    if case.layout == "k_major" and "initial_state" in x:
        x["initial_state"] = x["initial_state"].transpose(-1, -2)
    found = prefill(case.op, x, device=device, **case.options)
    return {port: value.cpu().numpy() for port, value in found.items()}


def prefill(op: str, x: dict[str, torch.Tensor], device: str = "cpu", **options: Any) -> dict[str, torch.Tensor]:
    """{"O" [T, HO, V], "final_state" [N, HO, V, K] or the whole pool} in fp64. A decode of one token a sequence too, with
    ``cu_seqlens``."""
    arrays = {
        port: (value.double() if value.dtype.is_floating_point else value).cpu().numpy() for port, value in x.items()
    }
    # Neither the states nor the copies of heads go through numpy.
    small = {port: value for port, value in arrays.items() if port != "initial_state"}
    q, k, v, alpha, beta = (torch.tensor(value, device=device) for value in recurrence._prepared(op, small, options))
    tokens, heads, value = v.shape
    bounds = recurrence.boundaries(arrays["cu_seqlens"], tokens) if "cu_seqlens" in arrays else np.array([0, tokens])
    lengths = np.diff(bounds)
    order = np.argsort(-lengths, kind="stable")
    initial = x.get("initial_state")
    state = torch.zeros((len(order), heads, value, q.shape[2]), dtype=torch.float64, device=device)
    slots = arrays.get("state_indices", np.arange(len(lengths)))
    inside = np.zeros(len(lengths), dtype=bool)
    if initial is not None:
        inside = (slots >= 0) & (slots < len(initial))
        for place, n in enumerate(order):
            if inside[n]:
                state[place] = initial[int(slots[n])].to(device).double()
    o = torch.zeros_like(v)
    starts = torch.from_numpy(bounds[:-1][order].astype(np.int64)).to(device)
    alive = [int((lengths > t).sum()) for t in range(int(lengths.max(initial=0)))]
    for t, count in enumerate(alive):  # the sequences that are not over are the first
        if count == 1:
            first = int(bounds[order[0]]) + t
            rows: Any = slice(first, first + 1)
        else:
            rows = starts[:count] + t
        now = state[:count]
        now.mul_(alpha[rows].unsqueeze(-2))
        key = k[rows].unsqueeze(-1)
        update = (v[rows].unsqueeze(-1) - now @ key).mul_(beta[rows][..., None, None])
        now.add_(update @ key.transpose(-1, -2))
        o[rows] = (now @ q[rows].unsqueeze(-1)).squeeze(-1)
    back = torch.from_numpy(np.argsort(order)).to(device)
    if "state_indices" not in x:
        return {"O": o, "final_state": state[back]}
    final = initial.to(device).double()
    for n, place in enumerate(back.tolist()):
        if inside[n]:
            final[int(slots[n])] = state[place]
    return {"O": o, "final_state": final}

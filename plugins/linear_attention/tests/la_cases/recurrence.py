"""The delta rule from its definition: one sequence, one token at a time, in numpy fp64. Imports numpy alone.

Arrays by port, as the ops have them, with states [.., V, K]. ``options`` are the attributes; absent ones have their defaults.
Written apart from the references in PyTorch, which are tested against it.
"""

from __future__ import annotations

import itertools

import numpy as np

__all__ = ["boundaries", "decode", "decode_boundaries", "prefill"]


def prefill(op, x, **options):
    """{"O", "final_state", "state_checkpoints"} of op gdn or kda; final_state is the whole pool where there is one."""
    q, k, v, alpha, beta = _prepared(op, x, options)
    tokens, heads = v.shape[:2]
    bounds = boundaries(x["cu_seqlens"], tokens) if "cu_seqlens" in x else [0, tokens]
    pool, slots = x.get("initial_state"), x.get("state_indices")
    every, rows = options.get("checkpoint_every_n_tokens", 0), []
    o = np.zeros(v.shape)
    sequences = len(bounds) - 1
    final = np.zeros((sequences, heads, v.shape[2], q.shape[2])) if slots is None else np.array(pool, dtype=np.float64)
    for n in range(sequences):
        slot = n if slots is None else int(slots[n])
        inside = pool is not None and 0 <= slot < len(pool)
        state = np.array(pool[slot], dtype=np.float64) if inside else np.zeros(final.shape[1:])
        for count, t in enumerate(range(int(bounds[n]), int(bounds[n + 1]))):
            if every and count % every == 0:
                rows.append(state.copy())
            state, o[t] = _step(state, q[t], k[t], v[t], alpha[t], beta[t])
        if slots is None or inside:
            final[slot] = state
    return {"O": o, "final_state": final, "state_checkpoints": rows}


def boundaries(given, tokens):
    """What a prefill's cu_seqlens count as: each the largest up to it, held to the tokens."""
    return np.maximum.accumulate(np.clip(given, 0, tokens))


def decode_boundaries(given, tokens):
    """What a decode's count as: each held to the tokens, then to the first and the last of them; the last is not before the first."""
    held = np.clip(given, 0, tokens)
    return np.clip(held, held[0], max(held[0], held[-1]))


def decode(op, x, **options):
    """{"O", "final_state"} of op gdn_decode or kda_decode, the options with ``tokens_per_sequence``."""
    q, k, v, alpha, beta = _prepared(op, x, options)
    tokens, heads = v.shape[:2]
    most = options.get("tokens_per_sequence", 1)
    if "cu_seqlens" in x:
        bounds = decode_boundaries(x["cu_seqlens"], tokens)
        spans = [(int(a), min(int(b), int(a) + most)) for a, b in itertools.pairwise(bounds)]
    else:
        spans = [(start, start + most) for start in range(0, tokens, most)]
    pool, slots = x.get("initial_state"), x.get("state_indices")
    zeros = np.zeros((len(spans), heads, v.shape[2], q.shape[2]))
    final = zeros if pool is None else np.array(pool, dtype=np.float64)
    o = np.zeros(v.shape)
    for n, (start, stop) in enumerate(spans):
        targets = None
        if slots is None:
            slot = n
        elif slots.ndim == 1:
            slot = int(slots[n])
        else:
            accepted = int(x["num_accepted_tokens"][n]) if "num_accepted_tokens" in x else 1
            targets = slots[n]
            slot = int(targets[min(max(accepted, 1), most) - 1])
        if not 0 <= slot < len(final):
            continue
        state = np.zeros(final.shape[1:]) if pool is None else np.array(pool[slot], dtype=np.float64)
        for step, t in enumerate(range(start, stop)):
            state, o[t] = _step(state, q[t], k[t], v[t], alpha[t], beta[t])
            if targets is not None and 0 <= targets[step] < len(final):
                final[targets[step]] = state
        if targets is None:
            final[slot] = state
    return {"O": o, "final_state": final}


def _step(state, q, k, v, alpha, beta):
    """State [HO, V, K] after one token, and its output [HO, V]."""
    state = state * alpha[:, None, :]
    update = beta[:, None] * (v - np.einsum("hvk,hk->hv", state, k))
    state = state + update[:, :, None] * k[:, None, :]
    return state, np.einsum("hvk,hk->hv", state, q)


def _prepared(op, x, options):
    """q (scaled), k and v of every output head, decays [T, HO, K] and update weights [T, HO]."""
    q, k, v, g, beta = (np.asarray(x[port], dtype=np.float64) for port in ("q", "k", "v", "g", "beta"))
    if options.get("use_qk_l2norm"):
        q, k = (rows / np.sqrt((rows**2).sum(-1, keepdims=True) + 1e-6) for rows in (q, k))
    scale = options.get("scale")
    q = q * (1 / np.sqrt(q.shape[2]) if scale is None else scale)
    heads = max(q.shape[1], v.shape[1])
    q, k, v = (rows[:, [head * rows.shape[1] // heads for head in range(heads)]] for rows in (q, k, v))
    if options.get("use_beta_sigmoid"):
        beta = (2 if options.get("allow_neg_eigval") else 1) / (1 + np.exp(-beta))
    alpha = _decays(op, x, g, options)
    return q, k, v, np.broadcast_to(alpha.reshape(*alpha.shape[:2], -1), (*alpha.shape[:2], q.shape[2])), beta


def _decays(op, x, g, options):
    if options.get("gate_domain", "log") == "linear":
        return np.clip(g, 1e-10, 1)
    if not options.get("safe_gate"):
        return np.exp(np.minimum(g, 0))
    channels = g.ndim - 2
    amplitude = np.exp(np.asarray(x["a_log"], dtype=np.float64)) if "a_log" in x else np.ones(g.shape[1])
    logits = g + np.asarray(x["dt_bias"], dtype=np.float64) if "dt_bias" in x else g
    amplitude = amplitude.reshape(-1, *(1,) * channels)
    if op.startswith("gdn") or options.get("gate_activation") == "softplus":
        return np.exp(-amplitude * np.logaddexp(logits, 0))
    bound = options.get("gate_lower_bound")
    return np.exp((-5.0 if bound is None else bound) / (1 + np.exp(-amplitude * logits)))

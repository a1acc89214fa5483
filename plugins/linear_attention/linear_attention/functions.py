"""The front doors: GDN and KDA on packed tokens, and their decode steps, with the cuDNN frontend's parameter names.

Each call runs the best engine's plan of a ``gdn``, ``kda``, ``gdn_decode`` or ``kda_decode`` graph; the math is in those ops'
docs. One plan serves any number of tokens and sequences up to a power of two of either. All raise InputError, or the core's
GraphError, ExecutionError or NoEngineError, naming the culprit, before anything is written; and GradientError where autograd
would record the call.

Shapes: q [T, H, K], k [T, H or HV, K], v [T, HV, V]; g [T, HO] of gated_delta_net and [T, HO, K] of kimi_delta_attention, beta [T, HO]; o
[T, HO, V], with HO = max(H, HV). States are [N, HO, V, K], or [N, HO, K, V] with ``state_layout="k_major"``.
Strides are honoured as long as the channels of a row are adjacent; other inputs are copied.

Masks, whatever ``check`` says: a boundary of a prefill counts as the largest up to it, held to the tokens, so that one that
decreases makes an empty sequence and a token belongs to at most one; each sequence of a decode has its two boundaries, held to
the tokens, then to the first and the last one, and is empty where the second is not the larger, so that a token may belong to
several where boundaries decrease: each computes it, and each element of its o is that of one of them, undefined which; tokens of
a decode past ``tokens_per_sequence`` and tokens of no sequence have o = 0; a prefill whose slot is outside the pool starts from
zero and keeps no state, a decode is skipped with o = 0; a positive gate counts as 0. ``check`` None makes all of them errors on
the CPU, but a last boundary before T and negative slots, which are no mistakes; True does so on a GPU too, and waits for it.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from . import torch_ops  # noqa: F401  registers the ops
from .errors import InputError

__all__ = [
    "gated_delta_net",
    "gated_delta_net_decode",
    "kimi_delta_attention",
    "kimi_delta_attention_decode",
]


def gated_delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    batch_invariant: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    gate_domain: str = "log",
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    checkpoint_dtype: torch.dtype | None = None,
    plan_name: str | None = None,
    overwrite_initial_state: bool = False,
    state_indices: Tensor | None = None,
    *,
    state_layout: str = "v_major",
    check: bool | None = None,
) -> tuple[Tensor, ...]:
    """(o, final_state[, state_checkpoints]) of the gated delta rule over packed sequences.

    final_state has no elements unless ``output_final_state``; with ``overwrite_initial_state`` it is ``initial_state``, written.
    The checkpoints are returned if their cadence is positive, in ``checkpoint_dtype`` (q's by default). ``safe_gate`` takes g for
    logits of the softplus form. ``state_indices`` [N] makes ``initial_state`` a pool. ``plan_name`` admits only engines whose
    name begins so.
    """
    attrs = {
        "scale": scale, "use_qk_l2norm": use_qk_l2norm_in_kernel, "use_beta_sigmoid": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "safe_gate": safe_gate, "gate_domain": gate_domain,
        "checkpoint_every_n_tokens": checkpoint_every_n_tokens, "checkpoint_dtype": checkpoint_dtype,
        "batch_invariant": batch_invariant, "state_layout": state_layout, "plan_name": plan_name, "check": check,
    }  # fmt: skip
    tensors = (q, k, v, g, beta, cu_seqlens, initial_state, a_log, dt_bias, state_indices)
    return _prefill("gated_delta_net", tensors, output_final_state, overwrite_initial_state, attrs)


def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    batch_invariant: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    gate_domain: str = "log",
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    checkpoint_dtype: torch.dtype | None = None,
    plan_name: str | None = None,
    overwrite_initial_state: bool = False,
    state_indices: Tensor | None = None,
    gate_lower_bound: float | None = None,
    *,
    gate_activation: str = "sigmoid",
    state_layout: str = "v_major",
    check: bool | None = None,
) -> tuple[Tensor, ...]:
    """As ``gated_delta_net``, with a gate for every key channel.

    ``safe_gate`` takes g for logits: ``gate_activation`` "sigmoid" is the form with ``gate_lower_bound`` (-5 by default),
    "softplus" the unbounded one. A model is trained with one of them; they can't be exchanged. dt_bias is [HO, K].
    """
    attrs = {
        "scale": scale, "use_qk_l2norm": use_qk_l2norm_in_kernel, "use_beta_sigmoid": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "safe_gate": safe_gate, "gate_domain": gate_domain, "gate_lower_bound": gate_lower_bound,
        "gate_activation": gate_activation, "checkpoint_every_n_tokens": checkpoint_every_n_tokens,
        "checkpoint_dtype": checkpoint_dtype, "batch_invariant": batch_invariant, "state_layout": state_layout, "plan_name": plan_name,
        "check": check,
    }  # fmt: skip
    tensors = (q, k, v, g, beta, cu_seqlens, initial_state, a_log, dt_bias, state_indices)
    return _prefill("kimi_delta_attention", tensors, output_final_state, overwrite_initial_state, attrs)


def gated_delta_net_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    gate_domain: str = "log",
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    plan_name: str | None = None,
    overwrite_initial_state: bool = False,
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    *,
    tokens_per_sequence: int = 0,
    state_layout: str = "v_major",
    check: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, final_state) of 1 to 8 tokens for each of N sequences; final_state as ``gated_delta_net`` returns it.

    Without ``cu_seqlens`` every sequence has ``tokens_per_sequence`` of the T tokens (0: T / N). ``state_indices`` [N] is
    each sequence's row of the pool ``initial_state``; a negative one skips it. For speculative decoding ``state_indices`` is
    [N, tokens_per_sequence], the row that keeps the state after each token, and ``num_accepted_tokens`` [N] says how many
    tokens of the last call stand: the sequence starts from the row of the last of them, with 0 as with 1 from the first row.
    """
    attrs = {
        "scale": scale, "use_qk_l2norm": use_qk_l2norm_in_kernel, "use_beta_sigmoid": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "safe_gate": safe_gate, "gate_domain": gate_domain,
        "tokens_per_sequence": tokens_per_sequence, "state_layout": state_layout, "plan_name": plan_name, "check": check,
    }  # fmt: skip
    tensors = (q, k, v, g, beta, cu_seqlens, initial_state, a_log, dt_bias, state_indices, num_accepted_tokens)
    return _decode("gated_delta_net_decode", tensors, output_final_state, overwrite_initial_state, attrs)


def kimi_delta_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    gate_domain: str = "log",
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    plan_name: str | None = None,
    overwrite_initial_state: bool = False,
    state_indices: Tensor | None = None,
    gate_lower_bound: float | None = None,
    num_accepted_tokens: Tensor | None = None,
    *,
    gate_activation: str = "sigmoid",
    tokens_per_sequence: int = 0,
    state_layout: str = "v_major",
    check: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``gated_delta_net_decode``, with the gates of ``kimi_delta_attention``."""
    attrs = {
        "scale": scale, "use_qk_l2norm": use_qk_l2norm_in_kernel, "use_beta_sigmoid": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "safe_gate": safe_gate, "gate_domain": gate_domain, "gate_lower_bound": gate_lower_bound,
        "gate_activation": gate_activation, "tokens_per_sequence": tokens_per_sequence, "state_layout": state_layout,
        "plan_name": plan_name, "check": check,
    }  # fmt: skip
    tensors = (q, k, v, g, beta, cu_seqlens, initial_state, a_log, dt_bias, state_indices, num_accepted_tokens)
    return _decode("kimi_delta_attention_decode", tensors, output_final_state, overwrite_initial_state, attrs)


def _prefill(
    name: str, tensors: tuple[Tensor | None, ...], final: bool, overwrite: bool, attrs: dict[str, Any]
) -> tuple[Tensor, ...]:
    found = _call(name, tensors, final, overwrite, attrs)
    return found if attrs["checkpoint_every_n_tokens"] > 0 else found[:2]


def _decode(
    name: str, tensors: tuple[Tensor | None, ...], final: bool, overwrite: bool, attrs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    o, state = _call(name, tensors, final, overwrite, attrs)
    return o, state


def _call(
    name: str, tensors: tuple[Tensor | None, ...], final: bool, overwrite: bool, attrs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """(o, final_state, ...) of the op, or of its overwriting form."""
    ops, initial = torch.ops.linear_attention, tensors[6]
    if overwrite and (initial is None or not final):
        missing = "initial_state" if initial is None else "output_final_state"
        raise InputError(f"needs {missing}", argument="overwrite_initial_state")
    try:
        if not overwrite:
            return tuple(getattr(ops, name)(*tensors, output_final_state=final, **attrs))
        found = getattr(ops, f"{name}_overwrite_state")(*tensors, **attrs)
    except RuntimeError as error:
        refused = _REFUSED.match(str(error))
        if refused is None:
            raise
        wanted, argument, given = refused.groups()
        raise InputError(f"has type {given}, needs {wanted}", argument=argument) from None
    o, *rest = found if isinstance(found, (tuple, list)) else (found,)
    return (o, initial, *rest)


# What torch says of a value that a schema does not take: checks of our own would cost every call.
_REFUSED = re.compile(
    r"linear_attention::\w+\(\) Expected a value of type '(.+?)' for argument '(\w+)' but instead found type '(.+?)'"
)

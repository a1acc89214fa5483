"""flash-linear-attention's functions on this package's engines, so that a model's inference switches by an import.

``chunk_gated_delta_rule``, ``chunk_kda``, ``fused_recurrent_gated_delta_rule`` and ``fused_recurrent_kda`` take fla 0.6's
arguments: q and k [B, T, H, K], v [B, T, HV, V], gates [B, T, HV] or [B, T, HV, K], beta [B, T, HV]; with ``cu_seqlens``
B is 1 and N its sequences, else N is B. They return (o [B, T, HV, V], final_state [N, HV, K, V] in float32, or None).
States are [.., V, K] with ``state_v_first``. The chunked functions may be given any head grouping that the ops take.

What only serves training or fla's own kernels (``chunk_size``, ``chunk_indices``, ``cu_seqlens_cpu``,
``disable_recompute``) is accepted and has no effect; what changes results and is not here (``cp_context``, ``gv``,
``return_intermediate_states``) raises InputError; an unknown keyword is a TypeError.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from .errors import InputError
from .functions import (
    gated_delta_net,
    gated_delta_net_decode,
    kimi_delta_attention,
    kimi_delta_attention_decode,
)
from .ops import MOST_TOKENS

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
]

_NO_EFFECT = ("chunk_size",)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule. Keywords beyond the named: use_gate_in_kernel, A_log and dt_bias [HV] (g is then logits of the
    softplus form)."""
    _absent(cp_context=cp_context)
    _tokens(q=q, k=k, v=v)
    gate = _softplus_gate(_keywords(kwargs, state_v_first, "use_gate_in_kernel", "A_log", "dt_bias"))
    options = {
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, **gate,
    }  # fmt: skip
    states = (initial_state, output_final_state, kwargs.get("transpose_state_layout", state_v_first))
    return _batched((gated_delta_net, None), (q, k, v, g, beta), states, cu_seqlens, options)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule; up to 8 tokens run as a decode step. With ``gk`` [B, T, HV, K], alone or beside ``g``, every
    channel has its gate. Absent gates are 0 and an absent beta is 1."""
    _absent(gv=gv)
    _tokens(q=q, k=k, v=v)
    _keywords(kwargs, state_v_first)
    heads = max(q.shape[2], v.shape[2])
    if use_gate_in_kernel and (g is None or gk is not None):
        raise InputError("takes g for logits, without gk", argument="use_gate_in_kernel")
    gate = _softplus_gate({"use_gate_in_kernel": use_gate_in_kernel, "A_log": A_log, "dt_bias": dt_bias})
    if beta is None:
        beta = q.new_ones((*q.shape[:2], heads), dtype=torch.float32)
    if gk is not None:
        _gate("gk", gk, q, (*q.shape[:2], heads, q.shape[3]))
        if g is not None:
            _gate("g", g, q, (*q.shape[:2], heads))
        gates, functions = gk if g is None else gk + g.unsqueeze(-1), _KDA
    else:
        gates, functions = q.new_zeros((*q.shape[:2], heads), dtype=torch.float32) if g is None else g, _GDN
    options = {
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, **gate,
    }  # fmt: skip
    states = (initial_state, output_final_state, kwargs.get("transpose_state_layout", state_v_first))
    return _batched(functions, (q, k, v, gates, beta), states, cu_seqlens, options)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention. Keywords beyond the named: A_log [HV] and dt_bias [HV * K]. With ``use_gate_in_kernel`` g is
    logits, of the sigmoid form if there is a ``lower_bound``, of the softplus form if not; ``safe_gate`` alone says how fla
    computes, and has no effect."""
    _absent(cp_context=cp_context, return_intermediate_states=return_intermediate_states or None)
    _tokens(q=q, k=k, v=v)
    named = _keywords(kwargs, state_v_first, "A_log", "dt_bias")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise InputError("must be given with safe_gate and use_gate_in_kernel", argument="lower_bound")
    gate = _kda_gate(use_gate_in_kernel, lower_bound, named.get("A_log"), named.get("dt_bias"), q, v)
    options = {
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, **gate,
    }  # fmt: skip
    states = (initial_state, output_final_state, kwargs.get("transpose_state_layout", state_v_first))
    return _batched((kimi_delta_attention, None), (q, k, v, g, beta), states, cu_seqlens, options)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention; up to 8 tokens run as a decode step. The gate as in ``chunk_kda``."""
    _tokens(q=q, k=k, v=v)
    _keywords(kwargs, state_v_first)
    gate = _kda_gate(use_gate_in_kernel, lower_bound, A_log, dt_bias, q, v)
    options = {
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, **gate,
    }  # fmt: skip
    states = (initial_state, output_final_state, kwargs.get("transpose_state_layout", state_v_first))
    return _batched(_KDA, (q, k, v, g, beta), states, cu_seqlens, options)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
_GDN: tuple[Any, Any] = (gated_delta_net, gated_delta_net_decode)
_KDA: tuple[Any, Any] = (kimi_delta_attention, kimi_delta_attention_decode)


# --- arguments
def _absent(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise InputError("is not supported", argument=name)


def _tokens(**given: Tensor | None) -> None:
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise _no_tensor(name, tensor)
        if tensor.ndim != 4:
            raise InputError(f"has {tensor.ndim} dimensions, needs 4: [B, T, H, K or V]", argument=name)


def _no_tensor(name: str, value: Any) -> InputError:
    return InputError(
        "is missing" if value is None else f"has type {type(value).__name__}, needs a tensor", argument=name
    )


def _keywords(kwargs: dict[str, Any], state_v_first: bool, *known: str) -> dict[str, Any]:
    for name in kwargs:
        if name not in (*known, *_NO_EFFECT, "transpose_state_layout"):
            raise TypeError(f"got an unexpected keyword argument {name!r}")
    if "transpose_state_layout" in kwargs and state_v_first:
        raise InputError("is the old name of state_v_first: give one of them", argument="transpose_state_layout")
    return kwargs


def _floating(name: str, tensor: Tensor) -> None:
    """Of what is widened or added here, where a type that the ops would refuse is lost."""
    if not tensor.is_floating_point():
        raise InputError(f"has type {str(tensor.dtype).removeprefix('torch.')}, needs a floating one", argument=name)


def _gate(name: str, gate: Tensor, q: Tensor, shape: tuple[int, ...]) -> None:
    """What must hold of gates that are added: a sum would broadcast them, and has no name."""
    if not isinstance(gate, Tensor):
        raise _no_tensor(name, gate)
    if tuple(gate.shape) != shape:
        raise InputError(f"is of {tuple(gate.shape)}, needs {shape}", argument=name)
    if gate.device != q.device:
        raise InputError(f"is on {gate.device}, q is on {q.device}", argument=name)
    _floating(name, gate)


def _softplus_gate(named: dict[str, Any]) -> dict[str, Any]:
    """The gate options of gated_delta_net. fla ignores A_log and dt_bias without use_gate_in_kernel."""
    if not named.get("use_gate_in_kernel"):
        return {}
    if named.get("A_log") is None:
        raise InputError("must be given with use_gate_in_kernel", argument="A_log")
    return {"safe_gate": True, "a_log": named["A_log"], "dt_bias": named.get("dt_bias")}


def _kda_gate(
    in_kernel: bool, lower_bound: float | None, a_log: Tensor | None, dt_bias: Tensor | None, q: Tensor, v: Tensor
) -> dict[str, Any]:
    if not in_kernel:
        return {}
    if dt_bias is not None:
        if not isinstance(dt_bias, Tensor):
            raise _no_tensor("dt_bias", dt_bias)
        heads, channels = max(q.shape[2], v.shape[2]), q.shape[3]
        if dt_bias.numel() != heads * channels:
            raise InputError(f"has {dt_bias.numel()} elements, needs {heads} x {channels}", argument="dt_bias")
        dt_bias = dt_bias.reshape(heads, channels)
    if lower_bound is not None:
        return {"safe_gate": True, "gate_lower_bound": lower_bound, "a_log": a_log, "dt_bias": dt_bias}
    if a_log is None:
        raise InputError("must be given with use_gate_in_kernel where there is no lower_bound", argument="A_log")
    return {"safe_gate": True, "gate_activation": "softplus", "a_log": a_log, "dt_bias": dt_bias}


def _batched(
    functions: tuple[Any, Any],
    tensors: tuple[Tensor, ...],
    states: tuple[Tensor | None, bool, bool],
    cu_seqlens: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Run on packed tokens. ``functions`` are those of a prefill and of a decode step, None to prefill always."""
    prefill, decode = functions
    q, k, v, g, beta = tensors
    batch, length = q.shape[:2]
    for name, tensor in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        if not isinstance(tensor, Tensor):
            raise _no_tensor(name, tensor)
        if tuple(tensor.shape[:2]) != (batch, length):
            raise InputError(f"is of {tuple(tensor.shape[:2])} tokens, q of {(batch, length)}", argument=name)
    initial, final, v_first = states
    for name, tensor, rank in (("cu_seqlens", cu_seqlens, 1), ("initial_state", initial, 4)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise _no_tensor(name, tensor)
        if tensor.ndim != rank:
            raise InputError(f"has {tensor.ndim} dimensions, needs {rank}", argument=name)
    if cu_seqlens is not None and batch != 1:
        raise InputError(f"goes with a batch of 1, not of {batch}: flatten the sequences", argument="cu_seqlens")
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial is not None and initial.shape[0] != sequences:
        raise InputError(f"has {initial.shape[0]} states for {sequences} sequences", argument="initial_state")
    if initial is not None and initial.dtype != torch.float32:
        _floating("initial_state", initial)
        initial = initial.float()  # final_state is float32, and of initial_state's type
    if beta.dtype not in (torch.float32, q.dtype):
        _floating("beta", beta)
        beta = beta.float()
    packed = [tensor.flatten(0, 1) for tensor in (q, k, v, g, beta)]
    step = (
        decode is not None and batch * length > 0 and (length if cu_seqlens is None else batch * length) <= MOST_TOKENS
    )
    if step:
        options = {**options, "tokens_per_sequence": length}
    elif cu_seqlens is None:
        cu_seqlens = _equal_lengths(batch, length, q)
    layout = "v_major" if v_first else "k_major"
    found = (decode if step else prefill)(
        *packed, cu_seqlens, initial_state=initial, output_final_state=final, state_layout=layout, **options
    )
    return found[0].unflatten(0, (batch, length)), found[1] if final else None


_boundaries: OrderedDict[tuple[int, int, torch.device], Tensor] = OrderedDict()
_PLAIN = (Tensor, torch.nn.Parameter)


def _equal_lengths(batch: int, length: int, q: Tensor) -> Tensor:
    """cu_seqlens of ``batch`` sequences of ``length``: kept, since making it is a kernel launch for every layer.

    Of plain tensors only, for plain tensors only: a fake mode refuses real ones, and what it makes is of no use after it.
    """
    if torch.compiler.is_compiling() or type(q) not in _PLAIN:
        return torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
    key = (batch, length, q.device)
    found = _boundaries.get(key)
    if found is None:
        found = (torch.arange(batch + 1, dtype=torch.int32) * length).to(q.device)
        if type(found) in _PLAIN and not _wrapped(found):
            _boundaries[key] = found
            if len(_boundaries) > 64:
                _boundaries.popitem(last=False)
    return found


def _wrapped(tensor: Tensor) -> bool:
    """Whether a functional transform made the tensor, in which case its type does not tell."""
    return bool(torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor))

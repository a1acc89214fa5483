"""The peers of the linear-attention benchmark: flash-linear-attention's Triton kernels, the cuDNN frontend's KDA engines, FlashQLA (GDN)
and FlashKDA (KDA), the last two where somebody built them.

``peers(case, x)`` gives a callable for each peer that is installed and runs the case: it takes the number of the repetition and
returns (o, final_state), o as [T, HV, V]. A peer that is missing or fails is left out with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._la_cases import Decode

__all__ = ["FAMILIES", "peers", "reason_of"]

Call = Callable[[int], tuple[Any, Any]]
Tensors = dict[str, torch.Tensor]


def peers(
    case: Any, x: Tensors, skip: frozenset[str] = frozenset(), step: Callable[[str], None] = lambda name: None
) -> tuple[dict[str, Call], dict[str, str]]:
    """The callables by name, warm, and for each peer that is left out why.

    ``skip`` has names of families or of callables; ``step`` hears which one is imported, or runs for the first time.
    """
    found: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for family, make in _MAKERS.items():
        if family in skip:
            continue
        step(family)
        try:
            calls = [one for one in make(case, x) if one[0] not in skip]
        except Exception as error:  # a peer's failure is a note of the table, whatever it is
            missing[family] = reason_of(error)
            continue
        for name, call in calls:
            step(name)
            try:
                for i in range(2):  # the first compiles and tunes
                    call(i)
                if x["q"].is_cuda:
                    torch.cuda.synchronize()
                found[name] = call
            except Exception as error:
                missing[name] = reason_of(error)
                if x["q"].is_cuda:
                    torch.cuda.synchronize()  # raises after an error of the GPU, which leaves nothing to work with
    return found, missing


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]


def _batched(case: Any, x: Tensors) -> list[torch.Tensor]:
    """q, k, v, g and beta as [B, T, H, ..]."""
    sequences = case.batch if isinstance(case, Decode) else case.sequences
    return [x[port].reshape(sequences, -1, *x[port].shape[1:]) for port in ("q", "k", "v", "g", "beta")]


def _fla(case: Any, x: Tensors) -> Iterator[tuple[str, Call]]:
    # Where these are installed, fla calls them in place of its own kernels; here each is a peer by itself.
    os.environ |= {"FLA_FLASH_QLA": "0", "FLA_FLASH_KDA": "0", "FLA_TILELANG": "0"}
    if isinstance(case, Decode):
        yield from _fla_decode(case, x)
        return
    if case.op == "gdn":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as chunk
    else:
        from fla.ops.kda import chunk_kda as chunk
    arguments = _batched(case, x)

    def call(i: int) -> tuple[Any, Any]:
        with torch.no_grad():
            o, state = chunk(*arguments, output_final_state=True)
        return o.flatten(0, 1), state

    yield "fla chunk", call


def _fla_decode(case: Decode, x: Tensors) -> Iterator[tuple[str, Call]]:
    """A fresh final state in float32, which is all that fla's functions return; a layer copies it. Its KDA kernel also takes a pool."""
    if case.op == "gdn":
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as recurrent
    else:
        from fla.ops.kda import fused_recurrent_kda as recurrent
    q, k, v, g, beta = _batched(case, x)
    states = x["initial_state"].reshape(case.sets, case.batch, *x["initial_state"].shape[1:])

    def call(i: int) -> tuple[Any, Any]:
        options = {"initial_state": states[i % case.sets], "output_final_state": True, "state_v_first": True}
        with torch.no_grad():
            o, state = recurrent(q, k, v, g=g, beta=beta, **options)
        return o.flatten(0, 1), state

    yield "fla recurrent", call
    if case.op == "kda":
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        pool, slots = x["initial_state"], x["slots"]

        def in_place(i: int) -> tuple[Any, Any]:
            o, _ = fused_recurrent_kda_fwd(
                q, k, v, g, beta, initial_state=pool, inplace_final_state=True, state_v_first=True,
                ssm_state_indices=slots[i % case.sets],
            )  # fmt: skip
            return o.flatten(0, 1), None

        yield "fla recurrent in place", in_place


def _cudnn(case: Any, x: Tensors) -> Iterator[tuple[str, Call]]:
    """The engines for Hopper, by plan name: the default one, whose time depends on the gates, and the exact one, which is compiled anew
    for each number of tokens, heads and sequences, and in each process."""
    if isinstance(case, Decode) or case.op != "kda":
        return
    from cudnn.linear_attention import kimi_delta_attention

    arguments = [x[port] for port in ("q", "k", "v", "g", "beta", "cu_seqlens")]
    for plan in ("kda_hopper", "kda_hopper_cuda"):

        def call(i: int, plan: str = plan) -> tuple[Any, Any]:
            with torch.no_grad():
                return tuple(kimi_delta_attention(*arguments, output_final_state=True, plan_name=plan)[:2])  # type: ignore[return-value]

        yield f"cudnn {plan}", call


def _flashqla(case: Any, x: Tensors) -> Iterator[tuple[str, Call]]:
    """Fused kernels in TileLang. Few heads are cut into segments, where decay below e^-10 counts as none."""
    if isinstance(case, Decode) or case.op != "gdn":
        return
    from flash_qla import chunk_gated_delta_rule

    arguments = _batched(case, x)

    def call(i: int) -> tuple[Any, Any]:
        with torch.no_grad():  # what it caches otherwise is for a backward
            o, state = chunk_gated_delta_rule(*arguments, output_final_state=True, enable_fwd_cp_cache=False)
        return o.flatten(0, 1), state

    yield "flashqla", call


def _flashkda(case: Any, x: Tensors) -> Iterator[tuple[str, Call]]:
    """CUTLASS kernels that take gates and beta before their activation, in bf16: g = bound * sigmoid(..), the bound -5 or above. It is as
    near as the gates allow, since their sigmoid is an approximation with an absolute error."""
    if isinstance(case, Decode) or case.op != "kda":
        return
    from flash_kda import fwd

    q, k, v, g, beta = _batched(case, x)
    bound = max(-5.0, 1.001 * g.min().item())
    logits = (g / bound).clamp(1e-6, 1 - 1e-6).logit().bfloat16()
    beta = beta.logit().bfloat16()
    amplitude, bias = g.new_zeros(case.heads), g.new_zeros(case.heads, case.size)
    o = torch.empty_like(v)
    state = g.new_empty(case.sequences, case.heads, case.size, case.size)

    def call(i: int) -> tuple[Any, Any]:
        fwd(q, k, v, logits, beta, case.size**-0.5, o, amplitude, bias, bound, final_state=state)
        return o.flatten(0, 1), state

    yield "flashkda", call


_MAKERS: dict[str, Callable[[Any, Tensors], Iterator[tuple[str, Call]]]] = {
    "fla": _fla, "cudnn": _cudnn, "flashqla": _flashqla, "flashkda": _flashkda,
}  # fmt: skip
FAMILIES = tuple(_MAKERS)

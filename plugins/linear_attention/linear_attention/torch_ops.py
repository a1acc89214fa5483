"""The torch custom ops: ``torch.ops.linear_attention.*``. Importing this module registers them. Imported by ``functions``.

For gated_delta_net and kimi_delta_attention, and for either with ``_decode``, there are two ops: a pure one, which returns
(o, final_state[, state_checkpoints]), and one with ``_overwrite_state``, which writes the final states into
``initial_state`` and returns the rest. What does not exist is a tensor without elements. All have fake kernels, so that
programs that use them compile and export. States and checkpoints are [.., V, K] with ``state_layout`` "v_major" and
[.., K, V] with "k_major".
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

import cudnn_core

from .contents import check_contents
from .errors import GradientError, InputError
from .graphs import Configuration, Layout, build, room
from .ops import MOST_TOKENS
from .plans import PlanEntry, plan_for, run

__all__ = ["STATE_LAYOUTS", "Call", "Recipe", "operands", "recipe"]

STATE_LAYOUTS = ("v_major", "k_major")
_LEAST_TOKENS = 16384
_LEAST_SEQUENCES = 256
_STATES = ("initial_state", "final_state", "state_checkpoints")
_OPTIONAL = ("cu_seqlens", "initial_state", "a_log", "dt_bias", "state_indices", "num_accepted_tokens")
_CALL_ONLY = ("state_layout", "plan_name", "check", "checkpoint_dtype")

Arguments = dict[str, Any]


# --- shapes, of real and fake tensors alike
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TYPES = (*_FLOATS, torch.int32, torch.int64)


def _check_structure(op: str, x: Arguments) -> None:
    """What must hold before a graph can be made of the tensors; its rules are the op row's."""
    for port in ("q", "k", "v", "g", "beta"):
        if x[port] is None:  # torch's schemas let it pass
            raise InputError("is missing", argument=port)
    ranks: dict[str, tuple[int, ...]] = {
        "q": (3,),
        "k": (3,),
        "v": (3,),
        "g": (2,) if op.startswith("gdn") else (3,),
        "beta": (2,),
    }
    ranks |= {
        "cu_seqlens": (1,),
        "initial_state": (4,),
        "a_log": (1,),
        "dt_bias": (1,) if op.startswith("gdn") else (2,),
    }
    ranks |= {"state_indices": (1, 2) if op.endswith("_decode") else (1,), "num_accepted_tokens": (1,)}
    device = x["q"].device
    for port, allowed in ranks.items():
        tensor = x.get(port)
        if tensor is None:
            continue
        if tensor.ndim not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise InputError(f"has {tensor.ndim} dimensions, needs {wanted}", argument=port)
        if tensor.device != device:
            raise InputError(f"is on {tensor.device}, q is on {device}", argument=port)
        if tensor.dtype not in _TYPES:  # which of these a port takes is in the op's row
            raise InputError(f"has type {_dtype_name(tensor.dtype)}", argument=port)
    for port in ("q", "k", "v"):
        if 0 in x[port].shape[1:]:
            raise InputError(f"has heads or channels of size 0: {tuple(x[port].shape)}", argument=port)
    if x["state_layout"] not in STATE_LAYOUTS:
        raise InputError(f"is {x['state_layout']!r}, needs one of {STATE_LAYOUTS}", argument="state_layout")
    if x.get("tokens_per_sequence", 0) < 0:
        raise InputError(
            f"is {x['tokens_per_sequence']}, needs 1 to {MOST_TOKENS}, or 0", argument="tokens_per_sequence"
        )
    _check_gate_form(x)
    for port in ("k", "v", "g", "beta"):
        if x[port].shape[0] != x["q"].shape[0]:
            raise InputError(f"has {x[port].shape[0]} tokens, q has {x['q'].shape[0]}", argument=port)
    if x["cu_seqlens"] is not None and x["cu_seqlens"].shape[0] < 1:
        raise InputError("has no first boundary", argument="cu_seqlens")
    if x.get("num_accepted_tokens") is not None and (x["state_indices"] is None or x["state_indices"].ndim != 2):
        raise InputError("needs state_indices [N, tokens_per_sequence]", argument="num_accepted_tokens")
    if x["state_indices"] is not None and x["initial_state"] is None:
        raise InputError("needs initial_state: it selects its rows", argument="state_indices")
    sequences = _sequences(op, x)
    for port in (
        "state_indices",
        "num_accepted_tokens",
        *(() if x["state_indices"] is not None else ("initial_state",)),
    ):
        if x.get(port) is not None and x[port].shape[0] != sequences:
            raise InputError(f"has {x[port].shape[0]} rows for {sequences} sequences", argument=port)
    if op.endswith("_decode") and x["cu_seqlens"] is None and x["q"].shape[0] != sequences * _most(op, x):
        raise InputError(
            f"has {x['q'].shape[0]} tokens, {sequences} sequences of {_most(op, x)} have others", argument="q"
        )


def _check_gate_form(x: Arguments) -> None:
    """The softplus form of a KDA gate is not always an attribute of a row, so that its rules are here."""
    activation = x.get("gate_activation", "sigmoid")
    if activation not in ("sigmoid", "softplus"):
        raise InputError(f"is {activation!r}, needs sigmoid or softplus", argument="gate_activation")
    if activation == "softplus":
        if not x["safe_gate"]:
            raise InputError("softplus needs safe_gate", argument="gate_activation")
        if x["gate_lower_bound"] is not None:
            raise InputError("is of the sigmoid form, gate_activation is softplus", argument="gate_lower_bound")
        if x["gate_domain"] != "log":
            raise InputError("safe_gate takes logits, not gates", argument="gate_domain")
        heads, channels = max(x["q"].shape[1], x["v"].shape[1]), x["q"].shape[2]
        tokens = x["g"].shape[0]
        for port, sizes in (("g", (tokens, heads, channels)), ("a_log", (heads,)), ("dt_bias", (heads, channels))):
            if x[port] is None:
                continue
            if tuple(x[port].shape) != sizes:  # pointwise nodes would spread it
                raise InputError(f"has sizes {tuple(x[port].shape)}, needs {sizes}", argument=port)
            if x[port].dtype not in _FLOATS:  # pointwise nodes take integers
                raise InputError(f"has type {_dtype_name(x[port].dtype)}, needs a floating one", argument=port)


def _most(op: str, x: Arguments) -> int:
    """tokens_per_sequence of a decode; 0 says: as the tokens are, or the most that there may be where cu_seqlens tells."""
    if x["tokens_per_sequence"]:
        return int(x["tokens_per_sequence"])
    if x["state_indices"] is not None and x["state_indices"].ndim == 2:
        return int(x["state_indices"].shape[1])
    if x["cu_seqlens"] is not None:
        return MOST_TOKENS
    tokens, sequences = x["q"].shape[0], _named_sequences(x)
    if sequences is None:
        return 1
    return max(int(tokens // sequences), 1) if sequences else 1


def _named_sequences(x: Arguments) -> Any:
    """N as a tensor tells it, or None."""
    if x["cu_seqlens"] is not None:
        return x["cu_seqlens"].shape[0] - 1
    if x["state_indices"] is not None:
        return x["state_indices"].shape[0]
    return None if x["initial_state"] is None else x["initial_state"].shape[0]


def _sequences(op: str, x: Arguments) -> Any:
    if not op.endswith("_decode"):
        return 1 if x["cu_seqlens"] is None else x["cu_seqlens"].shape[0] - 1
    named = _named_sequences(x)
    return x["q"].shape[0] // _most(op, x) if named is None else named


def _made(op: str, x: Arguments) -> dict[str, Tensor]:
    """Fresh outputs by port, as the caller sees them; absent ones are absent."""
    q, v, initial = x["q"], x["v"], x["initial_state"]
    heads, sequences = max(q.shape[1], v.shape[1]), _sequences(op, x)
    state = (heads, v.shape[2], q.shape[2])
    state = state if x["state_layout"] == "v_major" else (state[0], state[2], state[1])
    made = {"O": q.new_empty((q.shape[0], heads, v.shape[2]))}
    if x["output_final_state"] and not x["overwrite_initial_state"]:
        rows = sequences if x["state_indices"] is None else initial.shape[0]
        dtype = torch.float32 if initial is None else initial.dtype
        made["final_state"] = q.new_empty((rows, *state), dtype=dtype)
    every = x.get("checkpoint_every_n_tokens", 0)
    if every > 0:
        rows = max(q.shape[0] // every + sequences, 1)
        made["state_checkpoints"] = q.new_empty((rows, *state), dtype=x["checkpoint_dtype"] or q.dtype)
    return made


# --- running
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides, with those of axes of one element as in a packed tensor: they are of no account."""
    strides = list(tensor.stride())
    for axis in range(tensor.ndim - 1, -1, -1):
        if tensor.shape[axis] == 1:
            strides[axis] = 1 if axis == tensor.ndim - 1 else tensor.shape[axis + 1] * strides[axis + 1]
    return tuple(strides)


def _readable(port: str, tensor: Tensor) -> bool:
    """Whether engines may be given the tensor: no elements share memory, the channels of a row (of a state: either way) are
    adjacent."""
    strides = _plain_strides(tensor)
    return not strides or (0 not in strides and (strides[-1] == 1 or (port in _STATES and strides[-2] == 1)))


def _layout(port: str, tensor: Tensor) -> Layout:
    inner = tensor.shape if port in ("a_log", "dt_bias") else tensor.shape[1:]
    return Layout(port, _dtype_name(tensor.dtype), tuple(inner), _plain_strides(tensor))


class Recipe(NamedTuple):
    """What calls whose tensors have the same types, sizes and strides, and whose options are the same, have in common.

    configuration  None where there is no token or no sequence, and nothing to run
    hint           numbers of tokens and sequences
    made           (port, sizes, type) of the fresh outputs, as the caller sees them
    copied         inputs that are read from a packed copy; ``lifted``: gate parameters that get a leading axis
    transposed     states lie [.., K, V]; ``overwrites``: the final state is ``initial_state``
    """

    configuration: Configuration | None
    hint: dict[str, int]
    made: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    copied: frozenset[str]
    lifted: frozenset[str]
    transposed: bool
    overwrites: bool


class Call(NamedTuple):
    """One call: operands by port with states [.., V, K], and the fresh outputs as the caller sees them."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    made: dict[str, Tensor]


def recipe(op: str, x: Arguments) -> Recipe:
    """Check the structure of the arguments of an op of the schemas below, and describe its graph."""
    _check_structure(op, x)
    made = tuple((port, tuple(tensor.shape), tensor.dtype) for port, tensor in _made(op, x).items())
    hint = {"tokens": x["q"].shape[0], "sequences": _sequences(op, x)}
    softplus = op == "kda" and x["gate_activation"] == "softplus"  # pointwise nodes take operands of one rank
    lifted = frozenset(port for port in ("a_log", "dt_bias") if softplus and x[port] is not None)
    found = Recipe(None, hint, made, frozenset(), lifted, x["state_layout"] == "k_major", x["overwrite_initial_state"])
    inputs, outputs, _ = operands(found, x)
    written = {"initial_state"} if found.overwrites else set()
    copied = frozenset(port for port, tensor in inputs.items() if port not in written and not _readable(port, tensor))
    found = found._replace(copied=copied)
    inputs = operands(found, x).inputs
    attrs = {name: value for name, value in x.items() if name not in (*inputs, *_CALL_ONLY, *_OPTIONAL)}
    if op.endswith("_decode"):
        attrs["tokens_per_sequence"] = _most(op, x)
    configuration = Configuration(
        op,
        tuple(_layout(port, tensor) for port, tensor in inputs.items()),
        tuple(_layout(port, tensor) for port, tensor in outputs.items()),
        tuple(attrs.items()),
        room(hint["tokens"], _LEAST_TOKENS),
        room(hint["sequences"], _LEAST_SEQUENCES),
    )
    if 0 in hint.values():
        build(configuration)[0].freeze()  # the row's rules hold without a token, too
        return found
    return found._replace(configuration=configuration)


def operands(found: Recipe, x: Arguments) -> Call:
    """The operands of a call, its outputs allocated."""
    q = x["q"]
    made = {port: q.new_empty(sizes, dtype=dtype) for port, sizes, dtype in found.made}
    inputs = {port: value for port, value in x.items() if isinstance(value, Tensor)}
    outputs = {**made, "final_state": x["initial_state"]} if found.overwrites else dict(made)
    if found.transposed:
        for held in (inputs, outputs):
            for port in _STATES:
                if port in held:
                    held[port] = held[port].transpose(-1, -2)
    for port in found.lifted:
        inputs[port] = inputs[port].reshape(1, inputs[port].shape[0], -1)
    for port in found.copied:
        inputs[port] = inputs[port].contiguous()
    return Call(inputs, outputs, made)


_recipes: dict[Any, tuple[Recipe, PlanEntry | None]] = {}
_MOST_RECIPES = 4096


def _run(op: str, x: Arguments) -> dict[str, Tensor]:
    """Check, plan, run; the fresh outputs by port."""
    signature = tuple(
        (value.dtype, value.shape, value.stride(), value.device) if isinstance(value, Tensor) else value
        for value in x.values()
    )
    key = (op, tuple(x), signature, cudnn_core.registry())
    known = _recipes.get(key)
    if known is None:
        made = recipe(op, x)
        entry = None
        if made.configuration is not None:
            entry = plan_for(made.configuration, x["q"].device, x["plan_name"] or "", made.hint)
        if len(_recipes) >= _MOST_RECIPES:
            _recipes.clear()
        _recipes[key] = known = (made, entry)
    found, entry = known
    call = operands(found, x)
    most = _most(op, x) if op.endswith("_decode") else None
    check_contents(call.inputs, "" if x["safe_gate"] else x["gate_domain"], x["check"], most)
    if entry is None:
        return _nothing(call.made, x)
    run(entry, {**call.inputs, **call.outputs})
    return call.made


def _nothing(made: dict[str, Tensor], x: Arguments) -> dict[str, Tensor]:
    """The outputs without a token or without a sequence."""
    for port, tensor in made.items():
        if port == "final_state" and x["initial_state"] is not None:
            tensor.copy_(x["initial_state"])
        else:
            tensor.zero_()
    return made


# --- registration
_SEQUENCE_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? cu_seqlens"
_REST = "Tensor? a_log, Tensor? dt_bias, Tensor? state_indices"
_FLAGS = "bool use_qk_l2norm, bool use_beta_sigmoid, bool allow_neg_eigval, bool safe_gate, str gate_domain"
_KDA = ", float? gate_lower_bound, str gate_activation"
_PREFILL = ", int checkpoint_every_n_tokens, ScalarType? checkpoint_dtype, bool batch_invariant"
_DECODE = ", int tokens_per_sequence"
_CALL = ", str state_layout, str? plan_name, bool? check"


def _names(schema: str) -> list[str]:
    return [part.split()[-1] for part in schema[1 : schema.index(") ->")].split(", ") if part != "*"]


def _register(name: str, op: str) -> None:
    decode, kda = op.endswith("_decode"), op.startswith("kda")
    for overwrite in (False, True):
        state = "Tensor(a!) initial_state" if overwrite else "Tensor? initial_state"
        accepted = ", Tensor? num_accepted_tokens" if decode else ""
        final = "" if overwrite else ", bool output_final_state"
        options = f"{_FLAGS}{_KDA if kda else ''}{_DECODE if decode else _PREFILL}{_CALL}"
        results = ["O", *([] if overwrite else ["final_state"]), *([] if decode else ["state_checkpoints"])]
        returns = "(" + ", ".join("Tensor" for _ in results) + ")" if len(results) > 1 else "Tensor"
        schema = f"({_SEQUENCE_TENSORS}, {state}, {_REST}{accepted}, *, float? scale{final}, {options}) -> {returns}"
        _define(f"linear_attention::{name}{'_overwrite_state' if overwrite else ''}", op, schema, overwrite, results)


def _define(qualified: str, op: str, schema: str, overwrite: bool, results: list[str]) -> None:
    names = _names(schema)

    def arguments(args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
        x = {**dict(zip(names, args, strict=False)), **kwargs, "overwrite_initial_state": overwrite}
        return {"output_final_state": True, **x} if overwrite else x

    def answer(made: dict[str, Tensor], x: Arguments) -> Any:
        found = tuple(made[port] if port in made else x["q"].new_empty((0,)) for port in results)
        return found if len(found) > 1 else found[0]

    def implementation(*args: Any, **kwargs: Any) -> Any:
        x = arguments(args, kwargs)
        return answer(_run(op, x), x)

    def fake(*args: Any, **kwargs: Any) -> Any:
        x = arguments(args, kwargs)
        _check_structure(op, x)
        return answer(_made(op, x), x)

    name = qualified.partition("::")[2]
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    _library.impl(name, functools.partial(_inference_only, name), "Autograd")
    torch.library.register_fake(qualified, fake, lib=_library)


def _inference_only(name: str, *args: Any, **kwargs: Any) -> Any:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)) or any(map(_has_tangent, tensors)):
        raise GradientError(
            f"linear_attention.{name.removesuffix('_overwrite_state')} has no derivatives yet: call it under torch.no_grad() or"
            " torch.inference_mode()"
        )
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.linear_attention, name)(*args, **kwargs)


def _has_tangent(x: Tensor) -> bool:
    """Whether forward-mode differentiation goes through ``x``."""
    return forward_ad.unpack_dual(x).tangent is not None


# Not torch.library.custom_op: its first call imports the compiler, which takes seconds.
_library = torch.library.Library("linear_attention", "FRAGMENT")
for _name, _op in (("gated_delta_net", "gdn"), ("kimi_delta_attention", "kda")):
    _register(_name, _op)
    _register(f"{_name}_decode", f"{_op}_decode")

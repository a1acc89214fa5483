"""The cases: inputs by seed, options, and the tolerance of an engine's results. Imports torch and the plugin's front doors.

``invariants`` are rows of ``table.TABLE``. A case is small enough for PyTorch on a CPU unless it is ``slow`` (seconds there) or
``large`` (for a GPU alone).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

__all__ = ["CASES", "Case", "channel_moving", "named"]

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 1e-5}
PAIR = ("gdn", "kda")


@dataclass(frozen=True)
class Case:
    """One call.

    op           gdn, kda, gdn_decode or kda_decode
    lengths      tokens of each sequence; ``tail`` more belong to none, and are NaN
    heads        of q, k and v; ``size``: head dimensions of k and v
    io, state    torch types of q, k, v, beta and o, and of states; ``gate``: of g
    options      attributes by the op row's names
    initial      whether there is an initial state; ``slots``: rows of a pool of ``pool`` states, a list of them for every
                 sequence where each token has one; ``accepted``: num_accepted_tokens
    a_log, bias  whether the gate has these parameters
    index        torch type of cu_seqlens; None: no cu_seqlens (one sequence, or a decode of equal ones)
    bounds       cu_seqlens that count as the sums of ``lengths``; absent: these themselves
    layout       of states: v_major or k_major
    padded       q, k, v, g, beta and states have rows further apart than their sizes say, NaN between
    change       function that edits the inputs by port before they are rounded
    """

    name: str
    op: str
    lengths: tuple[int, ...]
    heads: tuple[int, int, int] = (2, 2, 2)
    size: tuple[int, int] = (64, 64)
    io: torch.dtype = torch.bfloat16
    state: torch.dtype = torch.float32
    gate: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    initial: bool = False
    slots: tuple[Any, ...] | None = None
    pool: int = 0
    accepted: tuple[int, ...] | None = None
    a_log: bool = False
    bias: bool = False
    index: torch.dtype | None = torch.int32
    bounds: tuple[int, ...] | None = None
    tail: int = 0
    layout: str = "v_major"
    padded: bool = False
    change: Callable[[dict[str, torch.Tensor]], None] | None = None
    tolerance: float = 0.0
    invariants: tuple[int, ...] = ()
    slow: bool = False
    large: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def allowed(self) -> float:
        """Largest relative RMS error of an output."""
        return self.tolerance or TOLERANCE[self.io]

    @property
    def decodes(self) -> bool:
        return self.op.endswith("_decode")

    def tensors(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """The inputs by port, states as the caller passes them, made anew from the case's name."""
        make = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        x = self._values(make)
        if self.change is not None:
            self.change(x)
        if self.tail:
            for port in ("q", "k", "v", "g", "beta"):
                x[port] = torch.cat((x[port], torch.full((self.tail, *x[port].shape[1:]), torch.nan)))
        types = {"g": self.gate, "beta": self.beta_type, "initial_state": self.state, "a_log": torch.float32}
        types["dt_bias"] = torch.float32
        stored = {port: value.to(types.get(port, self.io)) for port, value in x.items()}
        if self.layout == "k_major" and "initial_state" in stored:
            stored["initial_state"] = stored["initial_state"].transpose(-1, -2).contiguous()
        if self.padded:
            ports = ("q", "k", "v", "g", "beta", "initial_state")
            stored |= {port: spread(stored[port]) for port in ports if port in stored}
        stored |= self._indices()
        return {port: value.to(device) if not self.padded else _moved(value, device) for port, value in stored.items()}

    @property
    def beta_type(self) -> torch.dtype:
        return torch.float32 if self.options.get("use_beta_sigmoid") or self.decodes else self.io

    def _values(self, make: torch.Generator) -> dict[str, torch.Tensor]:
        def normal(*dim: int) -> torch.Tensor:
            return torch.randn(dim, generator=make)

        tokens, (h, hk, hv), (key, value) = sum(self.lengths), self.heads, self.size
        heads = max(h, hv)
        channels = (key,) if self.op.startswith("kda") else ()
        q, k = normal(tokens, h, key), normal(tokens, hk, key)
        if not self.options.get("use_qk_l2norm"):
            q, k = (torch.nn.functional.normalize(rows, dim=-1) for rows in (q, k))
        g, beta = normal(tokens, heads, *channels), normal(tokens, heads)
        if not self.options.get("use_beta_sigmoid"):
            beta = beta.sigmoid()
        if not self.options.get("safe_gate"):
            g = torch.nn.functional.logsigmoid(g + 1)
            if self.options.get("gate_domain") == "linear":
                g = g.exp()
        x = {"q": q, "k": k, "v": normal(tokens, hv, value), "g": g, "beta": beta}
        if self.initial or self.slots is not None:
            x["initial_state"] = normal(self.pool or len(self.lengths), heads, value, key) / 4
        if self.a_log:
            x["a_log"] = normal(heads) / 2
        if self.bias:
            x["dt_bias"] = normal(heads, *channels) / 2
        return x

    def _indices(self) -> dict[str, torch.Tensor]:
        found = {}
        if self.index is not None:
            sums = torch.tensor([0, *self.lengths]).cumsum(0)
            found["cu_seqlens"] = (sums if self.bounds is None else torch.tensor(self.bounds)).to(self.index)
        if self.slots is not None:
            found["state_indices"] = torch.tensor(self.slots, dtype=torch.int32)
        if self.accepted is not None:
            found["num_accepted_tokens"] = torch.tensor(self.accepted, dtype=torch.int32)
        return found


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a gap of NaN after every leading row."""
    inner = tensor[0].numel() if len(tensor) else 1
    gap = 64
    storage = torch.full((len(tensor) * (inner + gap),), torch.nan, dtype=tensor.dtype)
    strides = (inner + gap, *tensor.stride()[1:])
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """On a device, gaps included."""
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0).to(device)
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


# --- edits
def _steep(x: dict[str, torch.Tensor]) -> None:
    x["g"].fill_(-20.0)
    x["g"][::7] = -torch.inf
    x["g"][3::5] = -1e-3


def _ungated(x: dict[str, torch.Tensor]) -> None:
    x["g"].zero_()


def _identical_keys(x: dict[str, torch.Tensor]) -> None:
    x["k"][:] = torch.nn.functional.normalize(x["k"][:1], dim=-1)
    x["beta"].fill_(0.999)
    x["g"].fill_(-1e-3)


def _near_keys(x: dict[str, torch.Tensor]) -> None:
    near = x["k"][:1] + 1e-2 * x["k"]
    x["k"][:] = torch.nn.functional.normalize(near, dim=-1)
    x["beta"].fill_(0.999)
    x["g"].fill_(-1e-4)


def _long_memory(x: dict[str, torch.Tensor]) -> None:
    x["g"].fill_(-1e-3)


def _spike(x: dict[str, torch.Tensor]) -> None:
    """One steep gate among weak ones in a chunk."""
    x["g"].fill_(-1e-3)
    x["g"][5::64] = -90.0


def _positive_gates(x: dict[str, torch.Tensor]) -> None:
    x["g"][::3] = 0.5


def _decays_out_of_range(x: dict[str, torch.Tensor]) -> None:
    x["g"][::4], x["g"][1::4], x["g"][2::4] = 1.5, 0.0, -0.5


def _large_state(x: dict[str, torch.Tensor]) -> None:
    x["initial_state"] *= 4000.0
    x["g"].fill_(-1e-2)


def channel_moving(x: dict[str, torch.Tensor]) -> None:
    """Gates and keys that move state between two halves of the channels, so that a bound which sums a channel's gates over
    time says that the state is gone while much of it is alive. In chunks of 16: gates are -0.01; in even chunks -5 on half A
    for tokens 0 to 7 and on half B for tokens 8 to 15, in odd chunks the halves swap. A key of weight 0.3 writes into the
    half that stays, and one across both halves moves the state over at token 7."""
    tokens, key = x["q"].shape[0], x["q"].shape[2]
    half = key // 2
    x["g"].fill_(-0.01)
    x["beta"].zero_()
    for start in range(0, tokens, 16):
        first, second = (
            (slice(0, half), slice(half, key)) if start // 16 % 2 == 0 else (slice(half, key), slice(0, half))
        )
        x["g"][start : start + 8, :, first] = -5.0
        x["g"][start + 8 : start + 16, :, second] = -5.0
        x["k"][start : start + 16] = 0
        x["k"][start, :, second.start] = 1.0
        x["beta"][start] = 0.3
        if start + 7 < tokens:
            x["k"][start + 7, :, first.start] = x["k"][start + 7, :, second.start] = 2**-0.5
            x["beta"][start + 7] = 0.999


# --- the list
def _prefills(op: str) -> list[Case]:
    base = Case(f"{op}-plain", op, (70, 129, 16), initial=True, options={"output_final_state": True})

    def case(name: str, **fields: Any) -> Case:
        options = {**base.options, **fields.pop("options", {})}
        return replace(base, name=f"{op}-{name}", options=options, **fields)

    found = [
        base,
        case("fp16", io=torch.float16),
        case("fp32", io=torch.float32),
        case("d128", size=(128, 128)),
        case("k64-v128", size=(64, 128)),
        case("one-sequence", lengths=(100,), index=None),
        case("int64-boundaries", index=torch.int64),
        case("no-initial-state", initial=False),
        case("bf16-state", state=torch.bfloat16),
        case("k-major", layout="k_major"),
        case("k-major-rectangular", size=(64, 128), layout="k_major"),
        case("grouped-values", heads=(2, 2, 4)),
        case("grouped-values-own-keys", heads=(2, 4, 4)),
        case("grouped-queries", heads=(4, 2, 2)),
        case("grouped-queries-own-keys", heads=(4, 4, 2)),
        case("slots", slots=(3, 0, 4), pool=6, options={"overwrite_initial_state": True}),
        case("slots-k-major-bf16", slots=(3, 0, 4), pool=6, layout="k_major", state=torch.bfloat16,
             options={"overwrite_initial_state": True}),
        case("slots-outside", slots=(3, -1, 99), pool=6, options={"overwrite_initial_state": True}, invariants=(19, 27)),
        case("slots-read-only", slots=(3, 0, 4), pool=6, options={"output_final_state": False}),
        case("l2norm", options={"use_qk_l2norm": True}, size=(128, 128)),
        case("scale", options={"scale": 0.5}),
        case("beta-sigmoid", options={"use_beta_sigmoid": True}),
        case("beta-doubled", options={"use_beta_sigmoid": True, "allow_neg_eigval": True}),
        case("linear-gate", options={"gate_domain": "linear"}),
        case("linear-gate-out-of-range", options={"gate_domain": "linear"}, change=_decays_out_of_range),
        case("gate-in-kernel", options={"safe_gate": True}, a_log=True, bias=True, invariants=(6,)),
        case("gate-without-parameters", options={"safe_gate": True}, invariants=(6,)),
        case("bf16-gate", gate=torch.bfloat16),
        case("all-in-kernel", size=(128, 128), heads=(2, 2, 4), a_log=True, bias=True, options={
            "use_qk_l2norm": True, "use_beta_sigmoid": True, "safe_gate": True}),
        case("batch-invariant", options={"batch_invariant": True}, invariants=(25,)),
        case("steep-gates", change=_steep, invariants=(1, 5, 8)),
        case("spike", change=_spike, invariants=(5,)),
        case("no-decay", change=_ungated, invariants=(2,)),
        case("positive-gates-count-as-0", change=_positive_gates, invariants=(5,)),
        case("identical-keys", change=_identical_keys, lengths=(200,), invariants=(3, 4)),
        case("identical-keys-to-the-end-of-a-chunk", change=_identical_keys, lengths=(128,), initial=False, invariants=(3, 4)),
        case("near-collinear-keys", change=_near_keys, lengths=(200,), invariants=(3, 4)),
        case("zero-length-and-one-token", lengths=(0, 1, 33, 0, 1, 64, 1), invariants=(13, 14, 15)),
        case("one-long-many-short", lengths=(300, *([6] * 40)), initial=False, invariants=(12, 13)),
        case("decreasing-boundaries", lengths=(70, 0, 0, 59, 0, 16), bounds=(-3, 70, 20, -9, 129, 70, 999), invariants=(27,)),
        case("decreasing-boundaries-int64", lengths=(6, 0, 0, 130, 0), bounds=(-(2**40), 6, 3, 2, 2**33, 1),
             index=torch.int64, slots=(3, 0, 4, 1, -1), pool=6, options={"overwrite_initial_state": True}, invariants=(27,)),
        case("boundaries-inside-tiles", lengths=(5, 59, 64, 1, 63, 3), change=_steep, invariants=(8,)),
        case("poisoned-padding", tail=9, invariants=(9,)),
        case("padded-strides", padded=True, heads=(2, 2, 4), invariants=(9, 18)),
        case("large-state-fp16", io=torch.float16, change=_large_state, invariants=(22,)),
        case("long-memory", lengths=(2048,), change=_long_memory, heads=(1, 1, 1), invariants=(21,)),
        case("long-memory-16k", lengths=(16384,), change=_long_memory, heads=(1, 1, 1), invariants=(21,), slow=True),
        case("many-sequences", lengths=(1,) * 2048, heads=(32, 32, 32), initial=False,
             options={"output_final_state": False}, invariants=(24,), large=True),
    ]  # fmt: skip
    if op == "kda":
        found += [
            case("lower-bound", options={"safe_gate": True, "gate_lower_bound": -1.5}, a_log=True, bias=True, invariants=(6,)),
            case("softplus", options={"safe_gate": True, "gate_activation": "softplus"}, a_log=True, bias=True,
                 invariants=(5, 6)),
            case("channel-moving", lengths=(256,), size=(128, 128), initial=False, change=channel_moving, invariants=(5,)),
        ]  # fmt: skip
    return found


def _decodes(op: str) -> list[Case]:
    name = f"{op}_decode"
    options = {"output_final_state": True, "tokens_per_sequence": 1}
    base = Case(f"{name}-plain", name, (1,) * 5, initial=True, index=None, options=options)
    in_place = {"overwrite_initial_state": True}

    def case(label: str, **fields: Any) -> Case:
        return replace(base, name=f"{name}-{label}", options={**options, **fields.pop("options", {})}, **fields)

    steps = ((0, 1, 2), (5, 4, 3), (-1, 6, 7), (8, -1, 9), (10, 11, 12))
    speculative = {"tokens_per_sequence": 3, **in_place}
    found = [
        base,
        case("fp16", io=torch.float16),
        case("d128", size=(128, 128)),
        case("k64-v128", size=(64, 128)),
        case("bf16-state", state=torch.bfloat16),
        case("k-major", layout="k_major", size=(64, 128)),
        case("grouped-values", heads=(2, 2, 4)),
        case("grouped-queries", heads=(4, 2, 2)),
        case("no-initial-state", initial=False),
        case("8-tokens", lengths=(8,) * 3, options={"tokens_per_sequence": 8}),
        case("varlen", lengths=(3, 1, 0, 8, 2), index=torch.int32, options={"tokens_per_sequence": 8}, invariants=(13,)),
        case("varlen-past-the-limit", lengths=(5, 1), index=torch.int64, options={"tokens_per_sequence": 4}),
        case("slots", slots=(3, 0, 6, 2, 1), pool=7, options=in_place, invariants=(19,)),
        case("slots-skipped", slots=(3, -1, 6, 2, -1), pool=7, options=in_place, invariants=(19,)),
        case("slots-outside", slots=(3, 7, 6, 2**30, 1), pool=7, options=in_place, invariants=(19, 27)),
        case("slots-read-only", slots=(3, 0, 6, 2, 1), pool=7, options={"output_final_state": False}),
        case("speculative", lengths=(3,) * 5, slots=steps, pool=14, accepted=(0, 1, 2, 3, 2), options=speculative,
             invariants=(23,)),
        case("speculative-counts-out-of-range", lengths=(3,) * 5, slots=steps, pool=14, accepted=(-4, 4, 99, 0, 3),
             options=speculative, invariants=(23, 27)),
        case("speculative-varlen", lengths=(3, 0, 2, 1, 3), index=torch.int32, slots=steps, pool=14,
             accepted=(1, 2, 3, 1, 0), options=speculative, invariants=(23,)),
        case("slot-for-every-token", lengths=(3,) * 5, slots=steps, pool=14, options=speculative, invariants=(23,)),
        case("all-in-kernel", a_log=True, bias=True, heads=(2, 2, 4), size=(128, 128), options={
            "use_qk_l2norm": True, "use_beta_sigmoid": True, "safe_gate": True}),
        case("beta-doubled", options={"use_beta_sigmoid": True, "allow_neg_eigval": True}),
        case("linear-gate", options={"gate_domain": "linear"}),
        case("linear-gate-out-of-range", options={"gate_domain": "linear"}, change=_decays_out_of_range),
        case("steep-gates", lengths=(8,) * 2, options={"tokens_per_sequence": 8}, change=_steep, invariants=(1, 5)),
        case("positive-gates-count-as-0", change=_positive_gates),
        case("padded-strides", padded=True, invariants=(9, 18)),
        case("poisoned-padding", lengths=(2, 1), index=torch.int32, tail=3, options={"tokens_per_sequence": 2},
             invariants=(9,)),
        case("many-sequences", lengths=(1,) * 2048, heads=(32, 32, 32), initial=False, invariants=(24,), large=True,
             options={"output_final_state": False}),
    ]  # fmt: skip
    if op == "kda":
        gate = {"safe_gate": True, "gate_activation": "softplus"}
        found += [
            case(
                "lower-bound",
                options={"safe_gate": True, "gate_lower_bound": -1.5},
                a_log=True,
                bias=True,
                invariants=(6,),
            ),
            case("softplus", options=gate, a_log=True, bias=True, invariants=(5, 6)),
        ]
    return found


CASES = tuple(case for op in PAIR for case in (*_prefills(op), *_decodes(op)))


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)

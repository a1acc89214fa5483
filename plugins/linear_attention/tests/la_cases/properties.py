"""Invariants over several calls of the front doors, for any engine and device. Imports torch and the front doors.

Each function takes ``op`` (gdn or kda), a device and an engine's name as ``running.pinned`` does, runs, and asserts. Sizes are
parameters: small ones for PyTorch on a CPU, the full ones for kernels. ``engine`` may be a pair, for prefill and decode.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import linear_attention as la
import torch
from linear_attention import plans

from . import recurrence
from .running import error, pinned

__all__ = [
    "DECREASING",
    "alone_as_in_a_batch",
    "causal",
    "decoded_alone",
    "decreasing_boundaries",
    "decreasing_boundaries_of_a_decode",
    "far_offsets",
    "one_plan_for_all_sizes",
    "other_slots_untouched",
    "prefill_then_decode",
    "replays",
    "slots_are_reused",
    "speculation_follows_plain_decoding",
    "ungated_is_the_delta_rule",
]

PREFILL = {"gdn": la.gated_delta_net, "kda": la.kimi_delta_attention}
DECODE = {"gdn": la.gated_delta_net_decode, "kda": la.kimi_delta_attention_decode}
Inputs = dict[str, torch.Tensor]
MOST = 8  # tokens of a sequence that a decode computes
DECREASING = (  # tokens, boundaries of a decode: past the last one, before the first one, twice in the middle, and all of these
    (8, (0, 6, 3)),
    (8, (5, 0, 3)),
    (8, (0, 4, 2, 6)),
    (30, (3, 99, -2, 7, 7, 1, 16, 5, 20)),
)


def inputs(op: str, tokens: int, device: str, seed: int = 0, heads: tuple[int, int] = (2, 4), size: int = 64) -> Inputs:
    """q, k, v, g and beta of ``tokens`` tokens: unit keys, gates about -0.3, bf16 but for g and beta."""
    make = torch.Generator().manual_seed(seed)

    def normal(*dim: int) -> torch.Tensor:
        return torch.randn(dim, generator=make)

    channels = (size,) if op == "kda" else ()
    unit = torch.nn.functional.normalize
    x = {
        "q": unit(normal(tokens, heads[0], size), dim=-1).bfloat16(),
        "k": unit(normal(tokens, heads[0], size), dim=-1).bfloat16(),
        "v": normal(tokens, heads[1], size).bfloat16(),
        "g": torch.nn.functional.logsigmoid(normal(tokens, heads[1], *channels) + 1),
        "beta": normal(tokens, heads[1]).sigmoid(),
    }
    return {port: value.to(device) for port, value in x.items()}


def part(x: Inputs, start: int, stop: int | None = None) -> Inputs:
    return {port: value[start:stop] for port, value in x.items()}


def boundaries(lengths: Any, device: str) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def wild_boundaries(tokens: int, sequences: int, seed: int) -> torch.Tensor:
    """int64 boundaries that rise on the whole, fall often, and lie outside the tokens at times."""
    make = torch.Generator().manual_seed(seed)
    rising = torch.linspace(-0.05, 1.05, sequences + 1) + torch.randn(sequences + 1, generator=make) / sequences**0.5
    return (tokens * rising).long()


class _engines:
    """Pins of a prefill engine and a decode engine."""

    def __init__(self, op: str, engine: Any) -> None:
        pair = engine if isinstance(engine, tuple) else (engine, "")
        self.pins = ((op, pair[0]), (f"{op}_decode", pair[1]))

    def __enter__(self) -> None:
        self.stack = ExitStack()
        for op, engine in self.pins:
            self.stack.enter_context(pinned(op, engine))

    def __exit__(self, *exc: object) -> None:
        self.stack.close()


def causal(
    op: str, device: str = "cpu", engine: Any = "", tokens: int = 80, cuts: Any = (1, 15, 16, 40, 63, 64)
) -> None:
    """Tokens from ``cut`` on may be anything: outputs before are the same to the last bit. What is not finite, gates of NaN from the
    next chunk on, reaches no token of an earlier chunk: a product of matrices with a row of NaN has no clean row."""
    with _engines(op, engine):
        x = inputs(op, tokens, device)
        first = PREFILL[op](**x)[0]
        for cut in cuts:
            other = inputs(op, tokens, device, seed=cut)
            changed = {port: torch.cat((x[port][:cut], other[port][cut:])) for port in x}
            changed["g"][cut:] *= 30.0
            changed["g"][(cut // 64 + 1) * 64 :] = torch.nan
            again = PREFILL[op](**changed, check=False)[0]
            assert torch.equal(again[:cut], first[:cut]), (op, cut)


def alone_as_in_a_batch(op: str, device: str = "cpu", engine: Any = "", lengths: Any = (5, 64, 0, 70, 1)) -> None:
    """With ``batch_invariant`` a sequence's outputs and state do not depend on its neighbours, to the last bit."""
    with _engines(op, engine):
        x = inputs(op, sum(lengths), device)
        bounds = boundaries(lengths, device)
        options = {"output_final_state": True, "batch_invariant": True}
        o, final = PREFILL[op](**x, cu_seqlens=bounds, **options)
        start = 0
        for n, length in enumerate(lengths):
            if length:
                alone, state = PREFILL[op](**part(x, start, start + length), **options)
                assert torch.equal(alone, o[start : start + length]), (op, n)
                assert torch.equal(state[0], final[n]), (op, n)
            start += length


def decreasing_boundaries(
    op: str, device: str = "cpu", engine: Any = "", sizes: Any = ((90, 40), (50, 6), (70, 4))
) -> None:
    """Boundary n counts as the largest of boundaries 0 to n, each held to the tokens: the same outputs and states to the last bit, and
    zeros outside, whatever these tokens hold. ``sizes``: tokens and sequences."""
    with _engines(op, engine):
        for seed, (tokens, sequences) in enumerate(sizes):
            given = wild_boundaries(tokens, sequences, seed)
            assert (given.diff() < 0).any(), sequences
            counted = given.clamp(0, tokens).cummax(0).values
            first, last = int(counted[0]), int(counted[-1])
            x = inputs(op, tokens, device, seed)
            for value in x.values():
                value[:first], value[last:] = torch.nan, torch.nan
            options = {"output_final_state": True, "check": False}
            want = PREFILL[op](**x, cu_seqlens=counted.to(device), **options)
            for kind in (torch.int32, torch.int64):
                found = PREFILL[op](**x, cu_seqlens=given.to(device, kind), **options)
                assert all(torch.equal(have, good) for have, good in zip(found, want, strict=True)), (
                    op,
                    sequences,
                    kind,
                )
            assert want[0].isfinite().all(), (op, sequences)
            assert not want[0][:first].any(), (op, sequences)
            assert not want[0][last:].any(), (op, sequences)


def decreasing_boundaries_of_a_decode(
    op: str, device: str = "cpu", engine: Any = "", given: Any = DECREASING, size: int = 64
) -> None:
    """``decoded_alone`` holds for boundaries of any order, int32 and int64. ``given``: tokens and boundaries."""
    with _engines(op, engine):
        for tokens, bounds in given:
            x = decode_inputs(op, tokens, bounds, device, size=size)
            for kind in (torch.int32, torch.int64):
                options = {"cu_seqlens": torch.tensor(bounds, device=device, dtype=kind), "tokens_per_sequence": MOST}
                o, final = DECODE[op](**x, **options, output_final_state=True, check=False)
                decoded_alone(op, x, bounds, o, final)


def decode_inputs(
    op: str, tokens: int, bounds: Any, device: str = "cpu", heads: tuple[int, int] = (2, 4), size: int = 64
) -> Inputs:
    """Operands of a decode with states; tokens of no sequence are NaN."""
    x = inputs(op, tokens, device, len(bounds), heads, size)
    owned = [t for a, b in _spans(tokens, bounds) for t in range(a, b)]
    for value in x.values():
        value[: min(owned, default=tokens)], value[max(owned, default=0) + 1 :] = torch.nan, torch.nan
    make = torch.Generator().manual_seed(len(bounds))
    states = torch.randn((len(bounds) - 1, heads[1], size, size), generator=make)
    return {**x, "initial_state": states.to(device)}


def decoded_alone(op: str, x: Inputs, bounds: Any, o: torch.Tensor, final: torch.Tensor) -> None:
    """Each boundary of a sequence is held to the first and the last one: its state is what these tokens make of it alone. An element of
    o is that of a sequence that has the token, and exactly 0 where none has it."""
    arrays = {port: value.double().cpu().numpy() for port, value in x.items()}
    have = o.double().cpu()
    nearest, away = torch.zeros_like(have), torch.full_like(have, torch.inf)
    states = torch.from_numpy(arrays.pop("initial_state"))
    for n, (start, end) in enumerate(_spans(len(o), bounds)):
        count = min(end - start, MOST)
        values = torch.zeros_like(have[start:end])
        if count > 0:
            alone = {port: value[start : start + count] for port, value in arrays.items()}
            found = recurrence.decode(
                op, {**alone, "initial_state": states[n : n + 1].numpy()}, tokens_per_sequence=count
            )
            values[:count], states[n] = torch.from_numpy(found["O"]), torch.from_numpy(found["final_state"][0])
        near = (have[start:end] - values).abs() < away[start:end]
        nearest[start:end] = torch.where(near, values, nearest[start:end])
        away[start:end] = (have[start:end] - nearest[start:end]).abs()
    nobody = away.isinf()
    assert not have[nobody].any(), (op, bounds)
    assert error(o, nearest) <= 5e-3, (op, bounds)
    assert error(final, states) <= 1e-5, (op, bounds)


def _spans(tokens: int, bounds: Any) -> list[tuple[int, int]]:
    """Of the sequences of a decode: tokens [start, end), start where there is none."""
    held = [min(max(bound, 0), tokens) for bound in bounds]
    first, last = held[0], max(held[0], held[-1])
    inside = [min(max(bound, first), last) for bound in held]
    return [(start, max(start, end)) for start, end in itertools.pairwise(inside)]


def prefill_then_decode(
    op: str, device: str = "cpu", engine: Any = "", prompt: int = 37, steps: int = 40, tolerance: float = 5e-3
) -> None:
    """A prompt and single steps are the same as one prefill of it all, in outputs and state; the pool's type is float32."""
    with _engines(op, engine):
        total = prompt + steps
        x = inputs(op, total, device)
        want, state = PREFILL[op](**x, output_final_state=True)
        pool = torch.zeros((3, *state.shape[1:]), device=device)
        slot = torch.tensor([1], dtype=torch.int32, device=device)
        options = {
            "initial_state": pool,
            "state_indices": slot,
            "output_final_state": True,
            "overwrite_initial_state": True,
        }
        found = [PREFILL[op](**part(x, 0, prompt), cu_seqlens=boundaries((prompt,), device), **options)[0]]
        found += [DECODE[op](**part(x, t, t + 1), **options)[0] for t in range(prompt, total)]
        o = torch.cat(found)
        assert error(o[prompt:], want[prompt:].double().cpu()) <= tolerance
        assert error(o[-8:], want[-8:].double().cpu()) <= 2 * tolerance
        assert error(pool[1], state[0].double().cpu()) <= tolerance
        assert not pool[0].any()
        assert not pool[2].any()


def replays(op: str, device: str = "cpu", engine: Any = "", long: int = 200, short: int = 40, times: int = 3) -> None:
    """One long sequence and many of six tokens, again and again with the lengths in another order: on CUDA one captured graph,
    replayed, whose cu_seqlens change in place. Outputs of a sequence are the same to the last bit each time."""
    with _engines(op, engine):
        lengths = [long, *([6] * short)]
        tokens = sum(lengths)
        x, bounds = inputs(op, tokens, device), boundaries(lengths, device)
        pieces = [part(x, a, b) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
        static = {port: value.clone() for port, value in x.items()}
        run = _captured(op, static, bounds, device)
        want: dict[int, torch.Tensor] = {}
        for turn in range(times):
            order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(turn)).tolist()
            for port, held in static.items():
                held.copy_(torch.cat([pieces[n][port] for n in order]))
            bounds.copy_(boundaries([lengths[n] for n in order], device))
            o = run()
            for n, rows in zip(order, o.split([lengths[n] for n in order]), strict=True):
                assert torch.equal(want.setdefault(n, rows.clone()), rows), (op, turn, n)


def _captured(op: str, x: Inputs, bounds: torch.Tensor, device: str) -> Any:
    if not device.startswith("cuda"):
        return lambda: PREFILL[op](**x, cu_seqlens=bounds, batch_invariant=True)[0]
    PREFILL[op](**x, cu_seqlens=bounds, batch_invariant=True)  # plans and compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = PREFILL[op](**x, cu_seqlens=bounds, batch_invariant=True)[0]

    def run() -> torch.Tensor:
        graph.replay()
        return o

    return run


def one_plan_for_all_sizes(
    op: str, device: str = "cpu", engine: Any = "", sizes: Any = ((9, 1), (40, 3), (1, 1), (33, 7))
) -> None:
    """Numbers of tokens and sequences change; the plans of a prefill and of a decode are made once."""
    with _engines(op, engine):
        made = []
        for tokens, sequences in sizes:
            x = inputs(op, tokens, device)
            lengths = [tokens // sequences] * (sequences - 1)
            bounds = boundaries([*lengths, tokens - sum(lengths)], device)
            _, state = PREFILL[op](**x, cu_seqlens=bounds, output_final_state=True)
            first = part(x, 0, sequences)
            DECODE[op](**first, initial_state=state, output_final_state=True)
            made.append(plans.plan_count())
        assert made[0] == made[-1], made


def slots_are_reused(op: str, device: str = "cpu", engine: Any = "") -> None:
    """A slot of a finished request serves a new one if the caller zeroes it; if not, the new one inherits the old state."""
    with _engines(op, engine):
        x, y = inputs(op, 20, device, seed=1), inputs(op, 20, device, seed=2)
        pool = torch.zeros((2, 4, 64, 64), device=device)
        slot, bounds = torch.tensor([1], dtype=torch.int32, device=device), boundaries((20,), device)
        options = {
            "initial_state": pool,
            "state_indices": slot,
            "output_final_state": True,
            "overwrite_initial_state": True,
        }
        fresh = PREFILL[op](**y, cu_seqlens=bounds)[0]
        PREFILL[op](**x, cu_seqlens=bounds, **options)
        inherited = PREFILL[op](**y, cu_seqlens=bounds, **options)[0]
        assert not torch.equal(inherited, fresh)
        pool[1] = 0
        assert torch.equal(PREFILL[op](**y, cu_seqlens=bounds, **options)[0], fresh)


def other_slots_untouched(op: str, device: str = "cpu", engine: Any = "") -> None:
    """A prefill and a decode write the rows that they are told to, and no other byte of the pool, NaN included."""
    with _engines(op, engine):
        x = inputs(op, 6, device)
        pool = torch.randn(8, 4, 64, 64, generator=torch.Generator().manual_seed(5)).to(device)
        pool[0], pool[7] = torch.nan, torch.nan
        before = pool.clone()
        slots = torch.tensor([3, -1, 5], dtype=torch.int32, device=device)
        options = {
            "initial_state": pool,
            "state_indices": slots,
            "output_final_state": True,
            "overwrite_initial_state": True,
        }
        PREFILL[op](**x, cu_seqlens=boundaries((2, 2, 2), device), **options)
        _only(pool, before, (3, 5))
        before = pool.clone()
        o, _ = DECODE[op](**part(x, 0, 3), **options)
        _only(pool, before, (3, 5))
        assert not o[1].any()


def _only(pool: torch.Tensor, before: torch.Tensor, written: tuple[int, ...]) -> None:
    for row in range(len(pool)):
        same = torch.equal(pool[row].view(torch.int32), before[row].view(torch.int32))
        assert same == (row not in written), row


def speculation_follows_plain_decoding(op: str, device: str = "cpu", engine: Any = "", rounds: int = 6) -> None:
    """Rounds of three tokens of which 0 to 3 are accepted, against the accepted tokens decoded one by one. With none
    accepted the next round starts from the slot of the first column, which a caller then keeps as it was."""
    with _engines(op, engine):
        most, width = 3, 4
        pool = torch.zeros((1 + most, width, 64, 64), device=device)
        plain = torch.zeros((1, width, 64, 64), device=device)
        slots = torch.tensor([[1, 2, 3]], dtype=torch.int32, device=device)
        accepted = torch.tensor([0], dtype=torch.int32, device=device)
        written = {"output_final_state": True, "overwrite_initial_state": True}
        for turn in range(rounds):
            draft = inputs(op, most, device, seed=100 + turn)
            o, _ = DECODE[op](**draft, initial_state=pool, state_indices=slots, num_accepted_tokens=accepted, **written)
            count = (2, 3, 1, 3, 1, 2)[turn % 6]
            for step in range(count):
                want, _ = DECODE[op](**part(draft, step, step + 1), initial_state=plain, **written)
                assert error(o[step : step + 1], want.double().cpu()) <= 5e-3, (op, turn, step)
            assert error(pool[slots[0, count - 1]], plain[0].double().cpu()) <= 1e-5, (op, turn)
            accepted.fill_(count)


def ungated_is_the_delta_rule(op: str, device: str = "cpu", engine: Any = "") -> None:
    """g = 0, and the linear gate 1, are the rule without gates: u = beta (v - S^T k), S = S + k u^T."""
    with _engines(op, engine):
        x = inputs(op, 70, device, heads=(2, 2))
        zero = {**x, "g": torch.zeros_like(x["g"])}
        one = {**x, "g": torch.ones_like(x["g"])}
        logs = PREFILL[op](**zero)[0]
        q, k, v, beta = (x[port].double().cpu() for port in ("q", "k", "v", "beta"))
        state, want = torch.zeros(2, 64, 64, dtype=torch.float64), torch.zeros_like(v)
        for t in range(70):
            update = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state += torch.einsum("hv,hk->hvk", update, k[t])
            want[t] = torch.einsum("hvk,hk->hv", state, q[t]) / 8
        assert error(logs, want) <= 5e-3
        assert error(PREFILL[op](**one, gate_domain="linear")[0], want) <= 5e-3


def far_offsets(op: str, device: str = "cuda", engine: Any = "", elements: int = 2**31) -> None:
    """A sequence whose operands lie more than ``elements`` elements from their starts gives what it gives alone. Takes some
    30 GB with the default."""
    heads, size = 64, 128
    before, tail = -(-elements // (heads * size)), 100
    with _engines(op, engine):
        last = inputs(op, tail, device, heads=(heads, heads), size=size)
        x = {port: torch.cat((value.new_zeros((before, *value.shape[1:])), value)) for port, value in last.items()}
        options = {"output_final_state": True, "batch_invariant": True, "check": False}
        o, final = PREFILL[op](**x, cu_seqlens=boundaries((before, tail), device), **options)
        alone, state = PREFILL[op](**last, cu_seqlens=boundaries((tail,), device), **options)
        assert torch.equal(o[before:], alone)
        assert torch.equal(final[1], state[0])
        assert not o[:before].any()

"""Cases at the sizes of models, and long runs: for kernels on a GPU. Imports torch, the front doors and the cases.

``LARGE`` are cases whose expectation is ``on_device``'s. The functions are invariants as in ``properties``, with sizes as
parameters, so that they run small on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from linear_attention import plans

import cudnn_core

from . import on_device
from .cases import Case, channel_moving
from .properties import DECODE, PREFILL, Inputs, _engines, boundaries, inputs, part
from .running import error

__all__ = [
    "LARGE",
    "decode_replays",
    "decoded_tokens_follow_the_recurrence",
    "far_slots",
    "nothing_is_compiled_again",
    "one_sequence_after_another",
    "replays_with_other_lengths",
    "same_bits_again",
]


# --- gates and keys
def _gates(value: float) -> Any:
    def change(x: Inputs) -> None:
        x["g"].fill_(value)

    return change


def _weak(x: Inputs) -> None:
    x["g"] /= 16


def _spread(x: Inputs) -> None:
    """Every head forgets ten times slower than the one before, from one token to 10,000."""
    heads = x["g"].shape[1]
    rate = torch.logspace(0, -4, heads).reshape(1, heads, *[1] * (x["g"].ndim - 2))
    x["g"].copy_(-rate.expand_as(x["g"]))


def _identical_keys(x: Inputs) -> None:
    x["k"][:] = x["k"][:1]
    x["beta"].fill_(0.999)
    x["g"].fill_(-1e-3)


def _large(op: str) -> list[Case]:
    base = Case(f"{op}-large", op, (4096,), heads=(4, 4, 8), size=(128, 128), initial=True, large=True,
                options={"output_final_state": True})  # fmt: skip

    def case(name: str, **fields: Any) -> Case:
        options = {**base.options, **fields.pop("options", {})}
        return replace(base, name=f"{op}-large-{name}", options=options, **fields)

    few = {"heads": (2, 2, 8), "lengths": (16384,)}
    found = [
        case("model", heads=(16, 16, 32), lengths=(2048,), a_log=True, bias=True, options={
            "use_qk_l2norm": True, "use_beta_sigmoid": True, "safe_gate": True}),
        case("fp16", io=torch.float16, change=_weak),
        case("bf16-state-k-major", state=torch.bfloat16, layout="k_major", change=_weak),
        case("ragged", lengths=(2000, 1, 0, 63, 64, 65, 1903), change=_weak),
        case("far-from-the-end", lengths=(300, 500), tail=1000, invariants=(9,)),
        # Few heads: a sequence is cut into segments, and what crosses a cut matters while memory is long.
        case("few-heads", **few),
        case("few-heads-weak", change=_weak, **few),
        case("few-heads-long-memory", change=_gates(-1e-3), invariants=(21,), **few),
        case("few-heads-steep", change=_gates(-20.0), invariants=(1, 5), **few),
        case("few-heads-no-decay", change=_gates(0.0), tolerance=1e-2, **few),
        case("few-heads-spread", change=_spread, **few),
        case("few-heads-ragged", change=_weak, heads=(2, 2, 8), lengths=(9000, 0, 1, 3000, 64, 4319)),
        case("few-heads-k64", change=_weak, size=(64, 128), **few),
        case("few-heads-v64", change=_weak, size=(128, 64), **few),
        case("few-heads-batch-invariant", change=_gates(-1e-3), options={"batch_invariant": True}, invariants=(25,), **few),
        case("few-heads-no-states", change=_weak, initial=False, options={"output_final_state": False}, **few),
        case("few-heads-slots", change=_weak, heads=(2, 2, 8), lengths=(5000, 7000), slots=(3, 1), pool=5,
             options={"overwrite_initial_state": True}),
        case("two-heads", heads=(1, 1, 2), change=_gates(-1e-3), lengths=(8192, 4096)),
        case("identical-keys", heads=(1, 1, 2), change=_identical_keys, invariants=(3, 4)),
        case("one-long-many-short", lengths=(6000, *([6] * 40)), change=_weak, invariants=(12, 13)),
    ]  # fmt: skip
    if op == "kda":
        moving = {"heads": (2, 2, 2), "initial": False, "change": channel_moving, "invariants": (5,)}
        found += [case("channel-moving", **moving), case("channel-moving-long", lengths=(16384,), **moving)]
    return found


LARGE = [case for op in ("gdn", "kda") for case in _large(op)]


# --- long runs
def _in_place(pool: torch.Tensor, slots: torch.Tensor) -> dict[str, Any]:
    return {
        "initial_state": pool, "state_indices": slots, "output_final_state": True, "overwrite_initial_state": True,
        "check": False,
    }  # fmt: skip


def _captured(call: Any, device: str) -> Any:
    """Runs the call: on CUDA by replaying one graph of it."""
    if not device.startswith("cuda"):
        return call
    call()  # plans, and compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def run() -> Any:
        graph.replay()
        return result

    return run


def _cut(tokens: int, sequences: int, make: torch.Generator) -> list[int]:
    """Random lengths of at most ``tokens`` in all: one long, most short, some of no token and of one."""
    lengths = torch.randint(0, 9, (sequences,), generator=make)
    lengths[torch.randint(0, sequences, (1,), generator=make)] = 0
    lengths[torch.randint(0, sequences, (1,), generator=make)] = 1
    left = tokens - int(lengths.sum())
    long = int(torch.randint(0, left + 1, (1,), generator=make))
    lengths[torch.randint(0, sequences, (1,), generator=make)] += long
    return lengths.tolist()


def replays_with_other_lengths(
    op: str, device: str = "cpu", engine: Any = "", tokens: int = 400, sequences: int = 41, times: int = 4
) -> None:
    """One graph of a prefill over a pool, whose lengths, slots and operands change in place between replays. Each replay gives
    what the call gives outside of a graph, to the last bit; the first gives the recurrence's."""
    with _engines(op, engine):
        make = torch.Generator().manual_seed(7)
        x, other = inputs(op, tokens, device, seed=1), inputs(op, tokens, device, seed=2)
        start = (torch.randn((sequences + 3, 4, 64, 64), generator=make) / 4).to(device)
        pool, again = start.clone(), start.clone()
        slots, bounds = torch.zeros(sequences, dtype=torch.int32, device=device), boundaries([0] * sequences, device)
        run = _captured(lambda: PREFILL[op](**x, cu_seqlens=bounds, **_in_place(pool, slots))[0], device)
        for turn in range(times):
            order = torch.randperm(sequences + 3, generator=make)[:sequences].to(torch.int32)
            order[turn % sequences] = -1
            bounds.copy_(boundaries(_cut(tokens, sequences, make), device))
            slots.copy_(order)
            for port, value in x.items():
                mine = value.clone()
                value.copy_(other[port])
                other[port] = mine
            pool.copy_(start)
            o = run()
            again.copy_(start)
            want = PREFILL[op](**x, cu_seqlens=bounds, **_in_place(again, slots))[0]
            assert torch.equal(o, want), (op, turn)
            assert torch.equal(pool, again), (op, turn)
            if turn == 0:
                exact = {**x, "cu_seqlens": bounds, "state_indices": slots, "initial_state": start}
                true = on_device.prefill(op, exact, device=device)
                assert error(o, true["O"].cpu()) <= 5e-3
                assert error(pool, true["final_state"].cpu()) <= 5e-3


def decode_replays(
    op: str, device: str = "cpu", engine: Any = "", batch: int = 5, heads: Any = (2, 4), size: int = 64, times: int = 4
) -> None:
    """One graph of a decode step, whose slots and operands change in place, some slots being negative."""
    with _engines(op, engine):
        make = torch.Generator().manual_seed(8)
        x = inputs(op, batch, device, heads=heads, size=size)
        start = (torch.randn((batch + 3, heads[1], size, size), generator=make) / 4).to(device)
        pool = start.clone()
        slots = torch.zeros(batch, dtype=torch.int32, device=device)
        run = _captured(lambda: DECODE[op](**x, **_in_place(pool, slots))[0], device)
        for turn in range(times):
            order = torch.randperm(batch + 3, generator=make)[:batch].to(torch.int32)
            order[turn % batch] = -1
            slots.copy_(order)
            x["v"].neg_()
            pool.copy_(start)
            o = run().clone()
            again = start.clone()
            assert torch.equal(o, DECODE[op](**x, **_in_place(again, slots))[0]), (op, turn)
            assert torch.equal(pool, again), (op, turn)
            if turn == 0:
                exact = {**x, "cu_seqlens": boundaries([1] * batch, device)}
                exact |= {"state_indices": slots, "initial_state": start}
                true = on_device.prefill(op, exact, device=device)
                true["O"][0] = 0  # a decode skips what has no slot
                assert error(o, true["O"].cpu()) <= 5e-3
                assert error(pool, true["final_state"].cpu()) <= 1e-5


def decoded_tokens_follow_the_recurrence(
    op: str, device: str = "cpu", engine: Any = "", steps: int = 40, size: int = 64, gate: float = -1e-3
) -> None:
    """A float32 state that forgets slowly is as exact after thousands of steps as after one."""
    with _engines(op, engine):
        x = inputs(op, steps, device, heads=(1, 2), size=size)
        x["g"].fill_(gate)
        pool = torch.zeros((1, 2, size, size), device=device)
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        found = torch.cat([DECODE[op](**part(x, t, t + 1), **_in_place(pool, slots))[0] for t in range(steps)])
        true = on_device.prefill(op, x, device=device)
        last = max(steps // 8, 1)
        assert error(found, true["O"].cpu()) <= 4e-3  # the output's rounding
        assert error(found[-last:], true["O"][-last:].cpu()) <= 4e-3
        assert error(pool, true["final_state"].cpu()) <= 1e-4


def same_bits_again(
    op: str,
    device: str = "cpu",
    engine: Any = "",
    tokens: int = 130,
    heads: Any = (1, 2),
    size: int = 64,
    times: int = 3,
) -> None:
    """The same call gives the same bits, with few heads, whose sequences are cut into segments, too."""
    with _engines(op, engine):
        x = inputs(op, tokens, device, heads=heads, size=size)
        o, state = PREFILL[op](**x, output_final_state=True)
        for _ in range(times):
            again, final = PREFILL[op](**x, output_final_state=True)
            assert torch.equal(o, again)
            assert torch.equal(state, final)


def one_sequence_after_another(
    op: str,
    device: str = "cpu",
    engine: Any = "",
    tokens: int = 200,
    heads: Any = (1, 2),
    size: int = 64,
    times: int = 2,
) -> None:
    """Calls of one sequence each, of other lengths and operands, right behind each other in one graph that is replayed: what a call's launches
    leave in a workspace that all have, or still read, is nothing to the next call. The same bits as alone; the first one's are the recurrence's."""
    with _engines(op, engine):
        x = [inputs(op, tokens, device, seed=seed, heads=heads, size=size) for seed in (1, 2)]
        spans = [(0, tokens), (3, tokens), (0, tokens // 2), (tokens - 65, tokens), (5, 5), (0, tokens - 1)]
        bounds = [torch.tensor(span, dtype=torch.int32, device=device) for span in spans]

        def call(number: int) -> tuple[torch.Tensor, torch.Tensor]:
            found: tuple[torch.Tensor, torch.Tensor] = PREFILL[op](
                **x[number % 2], cu_seqlens=bounds[number], output_final_state=True, check=False
            )
            if device.startswith("cuda") and not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()
            return found

        want = [call(number) for number in range(len(spans))]
        true = on_device.prefill(op, {**x[0], "cu_seqlens": bounds[0]}, device=device)
        assert error(want[0][0], true["O"].cpu()) <= 5e-3
        assert error(want[0][1], true["final_state"].cpu()) <= 5e-3
        run = _captured(lambda: [call(number) for number in range(len(spans))], device)
        for turn in range(times):
            for number, (found, good) in enumerate(zip(run(), want, strict=True)):
                assert torch.equal(found[0], good[0]), (op, turn, number)
                assert torch.equal(found[1], good[1]), (op, turn, number)


def nothing_is_compiled_again(
    op: str,
    device: str = "cpu",
    engine: Any = "",
    sizes: Any = ((9, 1), (300, 7), (17000, 3), (40000, 300)),
    heads: Any = (3, 6),
) -> set[str]:
    """Numbers of tokens, of sequences and of rows of a pool change, beyond what one plan serves: there are more plans, and no
    other kernel is looked up in the compile cache. Returns the keys of those that were. No other test has these heads, so that
    no plan of it hides the first look."""
    found: set[str] = set()
    ask = cudnn_core.CompileCache.get

    def counted(self: Any, key: Any, build: Any) -> Any:
        found.add(repr(key))
        return ask(self, key, build)

    cudnn_core.CompileCache.get = counted  # type: ignore[method-assign]
    try:
        with _engines(op, engine):
            for turn, (tokens, sequences) in enumerate(sizes):
                x = inputs(op, tokens, device, heads=heads)
                lengths = [tokens // sequences] * (sequences - 1)
                bounds = boundaries([*lengths, tokens - sum(lengths)], device)
                pool = torch.zeros((sequences + turn, heads[1], 64, 64), device=device)
                slots = torch.arange(sequences, dtype=torch.int32, device=device)
                PREFILL[op](**x, cu_seqlens=bounds, **_in_place(pool, slots))
                DECODE[op](**part(x, 0, sequences), **_in_place(pool, slots))
                if turn == 0:
                    first, known = set(found), plans.plan_count()
                assert found == first, found - first
            assert plans.plan_count() > known or len(sizes) == 1
    finally:
        cudnn_core.CompileCache.get = ask  # type: ignore[method-assign]
    return found


def far_slots(op: str, device: str = "cuda", engine: Any = "", elements: int = 2**31) -> None:
    """Rows of a pool beyond 2^31 elements, of a prefill and of a decode; the rows beside them keep what they hold. Takes some
    10 GB with the default."""
    heads, size = 32, 128
    rows = -(-elements // (heads * size * size)) + 3
    with _engines(op, engine):
        x = inputs(op, 6, device, heads=(heads, heads), size=size)
        pool = torch.empty((rows, heads, size, size), device=device)
        pool[-3:] = 1 / 64
        small = pool[-3:].clone()
        far = torch.tensor([rows - 1, rows - 3], dtype=torch.int32, device=device)
        near = torch.tensor([2, 0], dtype=torch.int32, device=device)
        bounds = boundaries((4, 2), device)
        for call, tokens, extra in ((PREFILL[op], 6, {"cu_seqlens": bounds}), (DECODE[op], 2, {})):
            step = part(x, 0, tokens)
            o = call(**step, **extra, **_in_place(pool, far))[0]
            assert torch.equal(o, call(**step, **extra, **_in_place(small, near))[0]), op
            assert torch.equal(pool[-3:], small), op
            assert not torch.equal(small[0], small[1])
            assert (small[1] == 1 / 64).all()

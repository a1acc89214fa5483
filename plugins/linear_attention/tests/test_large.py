"""The cases and invariants of the GPU tests, small and on the CPU: that they hold for the reference, and that they can fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import linear_attention as la
from la_cases import kernels, large, on_device, properties
from la_cases.cases import CASES, named
from la_cases.running import check, expected, graph_of, outputs
from linear_attention import decode_lowering, lowering

both = pytest.mark.parametrize("op", ["gdn", "kda"])
COMPARED = [
    "plain", "all-in-kernel", "grouped-queries", "k-major-rectangular", "linear-gate", "one-sequence", "slots",
    "slots-outside", "zero-length-and-one-token", "poisoned-padding", "padded-strides",
]  # fmt: skip


@both
@pytest.mark.parametrize("name", COMPARED)
def test_the_recurrence_on_a_device_is_the_recurrence(op, name):
    case = named(f"{op}-{name}")
    found, want = on_device.expected(case), expected(case)
    for port in found:
        np.testing.assert_allclose(found[port], want[port], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", large.LARGE, ids=str)
def test_large_cases_in_small(case):
    """The head dimensions, options and edits as they are, lengths a hundredth."""
    lengths = tuple(min(n, 6) if n < 100 else n // 100 for n in case.lengths)
    small = replace(case, lengths=lengths, heads=tuple(min(h, 4) for h in case.heads), tail=min(case.tail, 5))
    if case.heads[2] > 4 * case.heads[0]:
        small = replace(small, heads=(2, 2, 4))
    check(small, outputs(small, engine="torch_reference:eager"), on_device.expected(small))


def test_every_case_is_taken_or_declined():
    taken = {case.name for op in kernels.ENGINES for case in kernels.taken(op)}
    declined = {case.name for case in kernels.UNSUPPORTED}
    assert not taken & declined
    assert taken | declined >= {case.name for case in CASES}
    assert all(kernels.declined(case) for case in kernels.UNSUPPORTED)
    names = [case.name for case in (*CASES, *large.LARGE)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("op", kernels.ENGINES)
def test_the_lowerings_take_and_decline_the_same(op):
    lower = getattr(decode_lowering if op.endswith("_decode") else lowering, f"lower_{op}")
    for case in (*CASES, *large.LARGE, *kernels.UNSUPPORTED):
        if case.op == op:
            most = 8 if case.decodes else 2
            short = replace(case, lengths=tuple(min(n, most) for n in case.lengths[:64]), change=None)
            lowered = lower(graph_of(short)[0].freeze("cuda"))
            assert {decline.code for decline in lowered.declines} == {kernels.declined(case)} - {""}, case.name


@both
@pytest.mark.parametrize(
    "name",
    [
        "decode_replays",
        "decoded_tokens_follow_the_recurrence",
        "one_sequence_after_another",
        "replays_with_other_lengths",
        "same_bits_again",
    ],
)
def test_invariant_in_small(op, name):
    getattr(large, name)(op)


@both
def test_more_sizes_need_more_plans_and_no_kernel(op):
    assert large.nothing_is_compiled_again(op, sizes=((9, 1), (40, 7), (300, 300)), heads=(1, 1)) == set()


@both
def test_far_slots_in_small(op):
    large.far_slots(op, device="cpu", elements=32 * 128 * 128 * 2)


@both
def test_an_engine_that_looks_up_a_kernel_for_every_size_is_found(op, monkeypatch, tmp_path):
    import cudnn_core

    prefill = properties.PREFILL[op]

    def specialised(q, *args, **kwargs):
        key = cudnn_core.CacheKey({"tokens": q.shape[0]}, "linear_attention:gdn_sm90@1", "90a", {})
        cudnn_core.CompileCache("linear_attention", root=tmp_path).get(key, lambda: {"kernel": b"1"})
        return prefill(q, *args, **kwargs)

    monkeypatch.setitem(properties.PREFILL, op, specialised)
    with pytest.raises(AssertionError, match="tokens"):
        large.nothing_is_compiled_again(op, sizes=((9, 1), (16, 2)), heads=(1, 1))


@both
def test_a_replay_with_the_lengths_of_the_capture_is_found(op, monkeypatch):
    """A graph that holds the first boundaries, as one whose launch depends on them does."""
    kept = []

    def stale(call, device):
        kept.append(call())
        return lambda: kept[0]

    monkeypatch.setattr(large, "_captured", stale)
    with pytest.raises(AssertionError):
        large.replays_with_other_lengths(op)


def test_front_doors_are_those_of_the_package():
    assert properties.PREFILL["gdn"] is la.gated_delta_net

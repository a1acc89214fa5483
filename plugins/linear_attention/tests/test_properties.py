"""Invariants over several calls, on the CPU in small; the GPU tests of the kernels call the same functions in full."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from la_cases import properties

both = pytest.mark.parametrize("op", ["gdn", "kda"])


@both
@pytest.mark.parametrize(
    "name",
    [
        "alone_as_in_a_batch",
        "causal",
        "decreasing_boundaries",
        "decreasing_boundaries_of_a_decode",
        "one_plan_for_all_sizes",
        "other_slots_untouched",
        "prefill_then_decode",
        "replays",
        "slots_are_reused",
        "speculation_follows_plain_decoding",
        "ungated_is_the_delta_rule",
    ],
)
def test_property(op, name):
    getattr(properties, name)(op)


@both
@pytest.mark.L2
def test_4096_decoded_tokens_follow_a_prefill(op):
    properties.prefill_then_decode(op, prompt=64, steps=4096)


@both
def test_far_offsets_in_small(op):
    properties.far_offsets(op, device="cpu", elements=64 * 128 * 3)

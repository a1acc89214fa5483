"""How sequences are cut, and the workspace. No DSL."""

from __future__ import annotations

import pytest
from linear_attention.problem import Problem
from linear_attention.records import record_bytes, records_bytes
from linear_attention.segments import (
    MOST_SEGMENTS,
    choose_segments,
    most_segments,
    summary_bytes,
    workspace_bytes,
    workspace_offsets,
)

SMS = 132


def problem(heads=16, variant="gdn", key=128, value=128, **fields):
    return Problem(variant, "bfloat16", heads, heads, heads, key, value, **fields)


@pytest.mark.parametrize(("heads", "sequences"), [(64, 1), (16, 8), (34, 1), (1, 66)])
def test_work_for_half_of_the_sms_is_not_cut(heads, sequences):
    assert choose_segments(problem(heads), 32768 * sequences, sequences, SMS) == 1


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_few_heads_are_cut_where_sequences_are_long(heads):
    segments = choose_segments(problem(heads), 32768, 1, SMS)
    assert 2 < segments <= min(SMS // (2 * heads), MOST_SEGMENTS)


@pytest.mark.parametrize(("heads", "segments"), [(16, 2), (32, 1)])
def test_memory_bounds_how_far_kda_is_cut(heads, segments):
    """Its records are read again in every pass: more CTAs than half the SMs have no more throughput."""
    assert choose_segments(problem(heads, "kda"), 32768, 1, SMS) == segments
    assert 2 < choose_segments(problem(4, "kda"), 32768, 1, SMS) <= choose_segments(problem(4), 32768, 1, SMS)


def test_16_heads_have_a_pass_in_one_wave():
    """4 segments would need 160 CTAs in the first pass."""
    assert choose_segments(problem(16), 32768, 1, SMS) == 3


@pytest.mark.parametrize(("heads", "sequences"), [(32, 1), (33, 1), (16, 2), (8, 4)])
def test_long_sequences_for_half_of_the_sms_have_two_segments(heads, sequences):
    """The first pass has the CTAs of one segment, and no map."""
    assert choose_segments(problem(heads), 32768 * sequences, sequences, SMS) == 2
    assert choose_segments(problem(heads), 2048 * sequences, sequences, SMS) == 1


@pytest.mark.parametrize("tokens", [1, 64, 100, 512])
def test_short_sequences_are_not_cut(tokens):
    assert choose_segments(problem(2), tokens, 1, SMS) == 1


def test_batch_invariance_forbids_segments():
    assert choose_segments(problem(1, batch_invariant=True), 32768, 1, SMS) == 1
    p = problem(1, batch_invariant=True)
    assert workspace_bytes(p, 32768, 4, SMS) == records_bytes(p, 1, 32768, 4)


def test_more_heads_and_sequences_never_have_more_segments():
    counts = [[most_segments(problem(heads), n, SMS) for n in range(1, 200)] for heads in (1, 2, 4, 8, 16, 32, 64)]
    assert all(row == sorted(row, reverse=True) for row in counts)
    assert all(list(column) == sorted(column, reverse=True) for column in zip(*counts, strict=True))


def test_segments_are_not_more_than_chunks():
    for tokens in range(1, 4000, 61):
        assert 1 <= choose_segments(problem(1, key=64, value=64), tokens, 1, SMS) <= -(-tokens // 64)


@pytest.mark.parametrize("variant", ["gdn", "kda"])
@pytest.mark.parametrize("index", ["", "int64"])
@pytest.mark.parametrize("heads", [1, 3, 16, 64])
def test_workspace_is_enough_for_every_smaller_call(variant, heads, index):
    p = problem(heads, variant, index_dtype=index)
    bound = workspace_bytes(p, 20000, 40, SMS)
    for sequences in (1, 2, 3, 7, 33, 40):
        for tokens in (1, 63, 64, 6400, 20000):
            segments = choose_segments(p, tokens, sequences, SMS)
            summaries = workspace_offsets(p, tokens, sequences)["summaries"]
            assert summaries + summary_bytes(p, sequences, segments) <= bound


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_records_come_first(variant):
    p = problem(4, variant)
    records = 13 * 4 * record_bytes(p)
    assert workspace_offsets(p, 640, 3) == {"workspace": 0, "boundaries": records, "summaries": records}


@pytest.mark.parametrize(("sequences", "size"), [(1, 256), (63, 256), (64, 512)])
def test_boundaries_lie_between_records_and_summaries(sequences, size):
    """4 bytes each, whatever the type of cu_seqlens."""
    p = problem(4, index_dtype="int64", batch_invariant=True)
    records = (10 + sequences) * 4 * record_bytes(p)
    found = workspace_offsets(p, 640, sequences)
    assert found == {"workspace": 0, "boundaries": records, "summaries": records + size}
    assert workspace_bytes(p, 640, sequences, SMS) == records + size

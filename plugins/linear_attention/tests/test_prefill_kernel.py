"""The scan of the prefill on GDN's K and Q and records, in the emulator, against the recurrence in fp64."""

from __future__ import annotations

import functools

import _kernels
import numpy as np
import pytest
from linear_attention.problem import Problem


def problem(io="bfloat16", key=64, value=64, heads=(1, 1, 1), **options):
    return Problem(
        "gdn", io, *heads, key, value,
        **{"index_dtype": "int32", "scale": key**-0.5, "final": True, "state_dtype": "float32", **options},
    )  # fmt: skip


@pytest.mark.parametrize("valid", [1, 17, 64])
def test_one_chunk(valid):
    case = _kernels.Case(problem(), [valid])
    _kernels.run(case)
    _kernels.check(case, 3e-3 if valid > 1 else 6e-3)  # one token: the roundings of its T and P don't average out


@pytest.mark.L2
@pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("eager", 1), ("random", 2)])
def test_sequences_between_tokens_of_none(schedule, seed):
    case = _kernels.Case(problem(initial=True), [70, 0, 128, 5], before=3, after=9, seed=seed)
    _kernels.run(case, schedule=schedule, seed=seed)
    _kernels.check(case)
    assert (case.arrays["O"][:3] == 0).all()
    assert (case.arrays["O"][-9:] == 0).all()


@pytest.mark.L2
def test_more_chunks_than_places_in_a_ring():
    case = _kernels.Case(problem(), [64 * 6 + 1], decay=0.005)
    _kernels.run(case)
    _kernels.check(case)


@pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("random", 1), ("random", 2)])
def test_a_cta_has_several_sequences(schedule, seed):
    case = _kernels.Case(problem(initial=True), [65, 0, 7, 128, 64, 1], after=4, seed=seed)
    _kernels.run(case, ctas=1, schedule=schedule, seed=seed)
    _kernels.check(case)
    assert (case.arrays["O"][-4:] == 0).all()


@pytest.mark.L2
@pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("eager", 3), ("random", 1), ("random", 2)])
def test_two_ctas_share_what_they_load(schedule, seed):
    case = _kernels.Case(problem(value=128, initial=True), [65, 0, 7, 64 * 5, 64, 1], after=4, seed=seed)
    _kernels.run(case, ctas=3, schedule=schedule, seed=seed)
    _kernels.check(case)


def test_of_two_ctas_each_makes_half_of_the_scores():
    case = _kernels.Case(problem(value=128), [64 * 3 + 5, 70], seed=1)
    report = _kernels.run(case)
    _kernels.check(case)
    chunks = 4 + 2
    assert report.counts["bytes.bulk.shared_shared"] == chunks * (
        64 * 64 * 2 + 64 * 4
    )  # P and d go to the other one, once


@pytest.mark.L2
@pytest.mark.parametrize("io", ["bfloat16", "float16"])
@pytest.mark.parametrize(("key", "value"), [(64, 128), (128, 64), (128, 128)])
def test_head_dimensions(key, value, io):
    case = _kernels.Case(problem(io, key, value, initial=True, l2norm=True), [129, 64], decay=0.02)
    _kernels.run(case)
    _kernels.check(case, 3e-3 if io == "bfloat16" else 1e-3)


def test_the_last_update_of_identical_keys_is_exact():
    """The errors of a chunk's updates add up, and no later token corrects those of the last chunk."""
    case = _kernels.Case(problem(), [128], change=_kernels.identical_keys)
    _kernels.run(case)
    _kernels.check(case)


@pytest.mark.L2
def test_the_last_update_of_a_segment_is_exact():
    """Tokens of the next segment have another key."""
    case = _kernels.Case(problem(), [256], change=functools.partial(_kernels.identical_keys, run=128))
    _kernels.run_segments(case, 2)
    _kernels.check(case)


@pytest.mark.L2
@pytest.mark.parametrize("key", [64, 128])
@pytest.mark.parametrize("summary", [False, True])
def test_products_stay_asynchronous(key, summary):
    safe = {"safe": "softplus", "a_log_dtype": "float32", "bias_dtype": "float32", "beta_sigmoid": True, "l2norm": True}
    said, found = _kernels.waits(_kernels.compiled(problem(key=key, initial=True, **safe), summary).artifact)
    assert said == found


@pytest.mark.L2
@pytest.mark.parametrize("heads", [(1, 1, 2), (2, 1, 1), (2, 2, 2)])
def test_groups_of_heads(heads):
    case = _kernels.Case(problem(heads=heads, l2norm=True), [40])
    _kernels.run(case)
    _kernels.check(case)


@pytest.mark.L2
def test_segments():
    case = _kernels.Case(problem(initial=True, overwrite=True), [64 * 5 + 3, 10, 0], decay=0.01)
    _kernels.run_segments(case, 3)
    _kernels.check(case)


def test_what_follows_a_tail_is_of_no_effect():
    whole = _kernels.Case(problem(), [50, 14])
    alone = _kernels.Case(problem(), [50], after=14)
    for name in ("q", "k", "v", "g", "beta"):
        alone.arrays[name][:50] = whole.arrays[name][:50]
    for case in (whole, alone):
        _kernels.run(case)
    assert np.array_equal(whole.arrays["O"][:50], alone.arrays["O"][:50])

"""The scan of the prefill on operand tiles from the workspace, in the emulator, against the recurrence in fp64."""

from __future__ import annotations

import _kernels
import numpy as np
import pytest
from linear_attention.problem import Problem


def problem(io="bfloat16", key=64, value=64, heads=(1, 1, 1), **options):
    return Problem(
        "kda", io, *heads, key, value,
        **{"index_dtype": "int32", "scale": key**-0.5, "final": True, "state_dtype": "float32", **options},
    )  # fmt: skip


@pytest.mark.parametrize("valid", [1, 17, 64])
def test_one_chunk(valid):
    case = _kernels.Case(problem(), [valid])
    _kernels.run(case)
    _kernels.check(case)


@pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("eager", 1), ("random", 2)])
def test_sequences_between_tokens_of_none(schedule, seed):
    case = _kernels.Case(problem(initial=True), [70, 0, 128, 5], before=3, after=9, seed=seed)
    _kernels.run(case, schedule=schedule, seed=seed)
    _kernels.check(case)
    assert (case.arrays["O"][:3] == 0).all()
    assert (case.arrays["O"][-9:] == 0).all()


def test_more_chunks_than_places_in_a_ring():
    case = _kernels.Case(problem(), [64 * 6 + 1], decay=0.005)
    _kernels.run(case)
    _kernels.check(case)


def test_an_empty_sequence_keeps_its_state():
    case = _kernels.Case(problem(initial=True), [0])
    _kernels.run(case)
    assert np.array_equal(case.arrays["final_state"], case.arrays["initial_state"])


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


@pytest.mark.L2
@pytest.mark.parametrize("io", ["bfloat16", "float16"])
@pytest.mark.parametrize(("key", "value"), [(64, 128), (128, 64), (128, 128)])
def test_head_dimensions(key, value, io):
    case = _kernels.Case(problem(io, key, value, initial=True), [129, 64], decay=0.02)
    _kernels.run(case)
    _kernels.check(case, 3e-3 if io == "bfloat16" else 1e-3)


@pytest.mark.parametrize("summary", [False, True])
def test_products_stay_asynchronous(summary):
    said, found = _kernels.waits(_kernels.compiled(problem(key=128, initial=True), summary).artifact)
    assert said == found == (4 if summary else 6)


@pytest.mark.L2
@pytest.mark.parametrize("heads", [(1, 1, 3), (2, 2, 1)])
def test_groups_of_heads(heads):
    case = _kernels.Case(problem(heads=heads), [40])
    _kernels.run(case)
    _kernels.check(case)


@pytest.mark.L2
@pytest.mark.parametrize("layout", ["v_major", "k_major"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_by_slots_in_place(layout, dtype):
    made = problem(
        initial=True, state_dtype=dtype, state_layout=layout, slot_dtype="int32", overwrite=True, heads=(2, 2, 2)
    )
    case = _kernels.Case(made, [3, 0, 66, 64, 10], pool=5, slots=[4, 2, -1, 0, 5])
    before = _kernels.values(case.arrays["initial_state"], dtype)
    _kernels.run(case)
    _kernels.check(case)
    after = _kernels.values(case.arrays["final_state"], dtype)
    assert np.array_equal(after[[1, 2, 3]], before[[1, 2, 3]])


def test_without_boundaries_and_states():
    case = _kernels.Case(problem(index_dtype="", final=False, state_dtype=""), [100])
    _kernels.run(case)
    _kernels.check(case)


SEGMENTS = [(3, [64 * 5 + 3, 10, 0]), (2, [128])]


@pytest.mark.L2
@pytest.mark.parametrize(("segments", "lengths"), SEGMENTS)
def test_segments(segments, lengths):
    case = _kernels.Case(problem(initial=True, overwrite=True), lengths, decay=0.01)
    _kernels.run_segments(case, segments)
    _kernels.check(case)


def test_segments_without_an_initial_state():
    case = _kernels.Case(problem(value=128), [64 * 3], decay=0.01, after=2)
    _kernels.run_segments(case, 3)
    _kernels.check(case)
    assert (case.arrays["O"][-2:] == 0).all()

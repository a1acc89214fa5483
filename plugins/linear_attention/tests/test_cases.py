"""Every case on the CPU: what ``torch_reference`` makes of the four ops is what the recurrence says."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from la_cases import recurrence
from la_cases.cases import CASES
from la_cases.running import check, outputs


def marked(case):
    return pytest.param(case, id=case.name, marks=[pytest.mark.L2] if case.slow else [])


@pytest.mark.parametrize("case", [marked(case) for case in CASES if not case.large])
def test_reference_follows_the_recurrence(case):
    check(case, outputs(case, engine="torch_reference:eager"))


@pytest.mark.parametrize("case", [case for case in CASES if case.bounds], ids=str)
def test_boundaries_of_a_case_count_as_its_lengths_say(case):
    counted = recurrence.boundaries(case.tensors()["cu_seqlens"].numpy(), sum(case.lengths))
    assert np.diff(counted).tolist() == list(case.lengths)
    assert counted[0] == 0


@pytest.mark.parametrize(
    ("given", "counted"),
    [((0, 6, 3), [0, 3, 3]), ((5, 0, 3), [5, 5, 5]), ((0, 4, 2, 6), [0, 4, 2, 6]), ((-1, 99, 7), [0, 7, 7])],
)
def test_what_boundaries_of_a_decode_count_as(given, counted):
    assert recurrence.decode_boundaries(np.array(given), 8).tolist() == counted


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))

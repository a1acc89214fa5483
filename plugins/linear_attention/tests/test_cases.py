"""Every case on the CPU: what ``torch_reference`` makes of the four ops is what the recurrence says."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from la_cases.cases import CASES
from la_cases.running import check, outputs


def marked(case):
    return pytest.param(case, id=case.name, marks=[pytest.mark.L2] if case.slow else [])


@pytest.mark.parametrize("case", [marked(case) for case in CASES if not case.large])
def test_reference_follows_the_recurrence(case):
    check(case, outputs(case, engine="torch_reference:eager"))


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))

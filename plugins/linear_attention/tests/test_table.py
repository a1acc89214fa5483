"""Every public failure in the table has a test that is run, for GDN and KDA alike."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from la_cases import properties
from la_cases.cases import CASES
from la_cases.table import TABLE

HERE = Path(__file__).parent


@pytest.mark.parametrize("row", TABLE)
def test_row_has_its_tests(row):
    _, _, tests = TABLE[row]
    assert tests
    for test in tests:
        if test == "cases":
            ops = {case.op.partition("_")[0] for case in CASES if row in case.invariants}
            assert ops == {"gdn", "kda"}
        elif test not in ("backward", "kernel"):
            run = (
                f'"{test}"' in (HERE / "test_properties.py").read_text()
                or f".{test}(" in (HERE / "test_properties.py").read_text()
            )
            assert (hasattr(properties, test) and run) or (HERE / f"{test}.py").exists(), test


def test_cases_name_rows_of_the_table():
    named = {row for case in CASES for row in case.invariants}
    assert named == {row for row, (_, _, tests) in TABLE.items() if "cases" in tests}


def test_table_has_all_27_rows():
    assert list(TABLE) == list(range(1, 28))

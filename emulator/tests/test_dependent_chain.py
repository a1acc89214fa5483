"""Chains of programmatic launches: which of them may run at the same time, and what they may touch then."""

import re
import runpy
from pathlib import Path

import pytest

_CHAIN = runpy.run_path(str(Path(__file__).with_name("_chain.py")))
run, PREPARE, SUMMARY, BESIDE, SCAN = (_CHAIN[name] for name in ("run", "PREPARE", "SUMMARY", "BESIDE", "SCAN"))
pytestmark = _CHAIN["needs_compiler"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PTX_EMULATOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "emulator_cache"))


def conflicts(*kernels, programmatic=None):
    """Findings as "own use, area: use by the other launch, its number" (no number: the surroundings)."""
    found = set()
    for finding in run(kernels, programmatic).findings:
        assert finding.kind == "dependent_launch"
        match = re.match(r"(read|write) of buffer \S+ \+(0x\w+) .*: (launch (\d) \(step(\d)\)|a launch before) may still (\w+) it(, since .*)?$",
                         finding.message)  # fmt: skip
        assert match, finding.message
        assert match[4] is None or int(match[4]) == int(match[5]) + 1
        found.add(f"{match[1]} {'ABCDEFGH'[int(match[2], 16) // 512]}: {match[6]} {match[4] or ''}".strip())
    return found


def test_a_launch_that_runs_beside_another_and_ends_after_it_is_clean():
    assert not conflicts(PREPARE, SUMMARY, BESIDE, SCAN)
    assert not conflicts(PREPARE, SUMMARY, BESIDE, SCAN, programmatic=[False, True, True, True])
    assert not conflicts(*[PREPARE, SUMMARY, BESIDE, SCAN] * 2)


@pytest.mark.parametrize(
    ("kernels", "found"),
    [
        # 2 lets 3 begin before 1 is over; and if 1 begins 2 early, before the surroundings are
        ((PREPARE, "trigger, wait, read A, write B", BESIDE, SCAN), {"read D: write 1"}),
        (("trigger, wait, write A, write D", "trigger, wait, read A, write B", BESIDE, SCAN), {"read D: write 1", "write C: use"}),
        (("trigger, wait, write A, write D", SUMMARY, BESIDE, SCAN), set()),
        ((PREPARE, SUMMARY, "write B, CTA1 thread wait", SCAN), {"write B: write 2"}),
        ((PREPARE, SUMMARY, "write A, CTA1 thread wait", SCAN), {"write A: read 2"}),
        ((PREPARE, SUMMARY, "read B, CTA1 thread wait", SCAN), {"read B: write 2"}),
        ((PREPARE, SUMMARY, "read A, CTA1 thread wait", SCAN), set()),  # both read
        ((PREPARE, SUMMARY, "write C, wait, write B", SCAN), set()),
        # 3 may be complete before 2 is
        ((PREPARE, SUMMARY, "read D, write C", SCAN), {"read B: write 2"}),
        ((PREPARE, SUMMARY, "read D, write C", "wait, write A"), {"write A: read 2"}),
        ((PREPARE, SUMMARY, "read D, write C", "wait, read A, write C"), set()),
        # 4 begins beside 3, and 3 has not waited for 2 yet
        ((PREPARE, SUMMARY, BESIDE, "write E"), set()),
        ((PREPARE, SUMMARY, BESIDE, "read B"), {"read B: write 2"}),
        ((PREPARE, SUMMARY, BESIDE, "read C"), {"read C: write 3"}),
        ((PREPARE, SUMMARY, "CTA0 wait, CTA0 read B, write C", "wait, read B"), set()),
    ],
)  # fmt: skip
def test_what_may_still_run_must_not_use_the_same_bytes(kernels, found):
    assert conflicts(*kernels) == found


def test_launches_that_begin_early_and_wait_before_they_work_are_clean():
    work = "trigger, wait, read A, write A"
    assert not conflicts(work, work, work)
    late = "wait, read A, write A, trigger"
    assert not conflicts(late, late, late)


def test_a_launch_before_its_wait_runs_beside_all_that_began_early():
    early = "trigger, wait, write A"
    assert conflicts(early, early, "write E") == {"write E: use"}
    known = {"programmatic": [False, True, True]}  # what comes before is over
    assert conflicts(early, early, "write E", **known) == set()
    assert conflicts("trigger, write B", early, "write B", **known) == {"write B: write 1"}
    assert conflicts("trigger, write B", "wait, trigger, write A", "write B", **known) == set()


def test_a_launch_that_is_not_programmatic_begins_when_all_before_are_over():
    kernels = ("wait, write B", "trigger, write A", "write A, read B, write E")
    assert conflicts(*kernels) == {"write A: write 2", "read B: write 1"}
    assert conflicts(*kernels, programmatic=[True, True, False]) == set()


def test_a_cta_that_ends_without_a_trigger_triggers_at_its_end():
    assert conflicts("wait, write A", "wait, read A", "write E") == set()
    assert conflicts("trigger, wait, write A", "CTA0 exit, wait, trigger, read A", "write E") == {"write E: use"}


def test_a_trigger_counts_as_after_the_wait_where_synchronisation_orders_it_so():
    known = {"programmatic": [False, True, True]}
    assert conflicts("write A", "warp0 wait, warp1 trigger, sync", "write A", **known) == {"write A: write 1"}
    assert conflicts("write A", "warp0 wait, sync, warp1 trigger", "write A", **known) == set()
    assert conflicts("write A", "warp0 wait", "write A", **known) == set()  # the CTA's end is after its wait


def test_one_cta_that_triggers_before_its_wait_is_enough():
    known = {"programmatic": [False, True, True]}
    assert conflicts("write A", "CTA0 wait, trigger, wait, write B", "write A", **known) == {"write A: write 1"}
    assert conflicts("write A", "wait, trigger, write B", "write A", **known) == set()


def pairs(*kernels):
    """Conflicts of the second launch of each pair with the first, by the number of the pair; nothing else overlaps."""
    found = conflicts(*[kernel for pair in kernels for kernel in pair], programmatic=[False, True] * len(kernels))
    assert all(int(text[-1]) % 2 for text in found)
    return {int(text[-1]) // 2: text[:-2] for text in found}


@pytest.mark.parametrize("write", ["write A", "store A", "write A.lo"])
@pytest.mark.parametrize("read", ["read A", "load A"])
def test_every_kind_of_access_is_held_against_another(read, write):
    elsewhere = write.replace("A", "B")
    found = pairs((read, write), (write, read), (write, write), (read, read), (read, elsewhere))
    assert found == {0: "write A: read", 1: "read A: write", 2: "write A: write"}


def test_halves_of_a_word_are_told_apart():
    assert pairs(("write A.lo", "write A.hi"), ("write A.hi", "write A.hi")) == {1: "write A: write"}

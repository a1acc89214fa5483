"""Mutation score: bugs made in the PTX of the recorded kernels (see _mutations.py) that the emulator reports.

A mutant is caught by a finding, or by a wrong or missing number in the output. An exception is no catch: neither
`EmulationError` nor a crash says what is wrong with the kernel. `pytest -s` prints the score by class.
"""

import runpy
from collections import Counter
from pathlib import Path

import pytest
from ptx_emulator import EmulationError

HERE = Path(__file__).parent
_RECORDED = runpy.run_path(str(HERE / "_recorded.py"))
_MUTATIONS = runpy.run_path(str(HERE / "_mutations.py"))
recording, run = _RECORDED["recording"], _RECORDED["run"]
KERNELS, HARMLESS, mutants_of = (_MUTATIONS[name] for name in ("KERNELS", "HARMLESS", "mutants_of"))

SCHEDULES = (("late", 0), ("late", 1), ("late", 2), ("eager", 0), ("random", 2))
CLASSES = {
    "fence", "wait", "phase parity", "transaction count", "arrive", "commit", "store wait", "barrier", "descriptor",
    "swizzle", "instruction descriptor", "scale offset", "accumulate", "tensor memory", "transfer", "launch control",
}  # fmt: skip


def verdict(mutant):
    """("finding" | "numbers" | "missed" | "failed", detail)."""
    for schedule, seed in SCHEDULES:
        try:
            outcome = run(mutant.kernel, seed, mutant.ptx, mutant.parameters, schedule=schedule)
        except (EmulationError, ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError) as problem:
            return "failed", f"{type(problem).__name__}: {problem}"
        if outcome.report.findings:
            return "finding", str(outcome.report.findings[0])
        if outcome.error != 0.0:
            return "numbers", f"largest error {outcome.error}"
    return "missed", ""


@pytest.fixture(scope="module")
def results():
    made = [mutant for kernel in KERNELS for mutant in mutants_of(kernel, recording(kernel))]
    return [(mutant, *verdict(mutant)) for mutant in made]


def _table(results):
    rows = {}
    for mutant, how, _ in results:
        rows.setdefault(mutant.group, Counter())[how] += 1
    rows["all"] = sum(rows.values(), Counter())
    lines = [f"{'class':24}{'mutants':>8}{'finding':>8}{'numbers':>8}{'missed':>8}{'failed':>8}{'caught':>8}"]
    for group, counts in rows.items():
        total, caught = sum(counts.values()), counts["finding"] + counts["numbers"]
        cells = "".join(f"{counts[how]:>8}" for how in ("finding", "numbers", "missed", "failed"))
        lines.append(f"{group:24}{total:>8}{cells}{100 * caught / total:>7.1f}%")
    lines += [
        f"{how}: {mutant.name}: {mutant.statement[:90]} {detail}"
        for mutant, how, detail in results
        if how in ("missed", "failed")
    ]
    return "\n".join(lines)


def test_mutation_score_is_at_least_95_percent(results):
    table = _table(results)
    print("\n" + table)
    caught = sum(how in ("finding", "numbers") for _, how, _ in results)
    assert len(results) >= 30
    assert caught >= 0.95 * len(results), table


def test_every_class_has_mutants_and_most_are_caught(results):
    found = {group: [how for mutant, how, _ in results if mutant.group == group] for group in CLASSES}
    assert {mutant.group for mutant, _, _ in results} == CLASSES
    weak = {
        group: Counter(hows)
        for group, hows in found.items()
        if sum(h in ("finding", "numbers") for h in hows) < 0.7 * len(hows)
    }
    assert not weak


def test_most_mutants_are_explained_by_a_finding(results):
    """Wrong numbers alone say nothing about the cause: only wrong addresses and formats may end there."""
    silent = {mutant.group for mutant, how, _ in results if how == "numbers"}
    assert silent <= {
        "descriptor",
        "swizzle",
        "instruction descriptor",
        "scale offset",
        "accumulate",
        "transfer",
        "launch control",
    }


def test_harmless_mutants_would_exist(results):
    """Every entry of HARMLESS names a site; an entry without one is out of date."""
    tables = _MUTATIONS["mutants_of"].__globals__
    saved = dict(HARMLESS)
    HARMLESS.clear()
    try:
        counts = Counter(
            (m.kernel, m.label) for kernel in KERNELS for m in tables["mutants_of"](kernel, recording(kernel))
        )
    finally:
        HARMLESS.update(saved)
    assert all(number < counts[kernel, label] for kernel, label, number in HARMLESS)


def test_mutants_are_distinct_and_differ_from_the_kernel():
    for kernel in KERNELS:
        recorded = recording(kernel)
        made = mutants_of(kernel, recorded)
        assert all(m.ptx != recorded["ptx"] for m in made)
        assert len({(m.ptx, repr(m.parameters)) for m in made}) == len(made)

"""Mutation score: bugs made in the PTX of the recorded kernels (see _mutations.py) that the emulator reports.

A mutant is caught by a finding, or by a wrong or missing number in the output. An exception is no catch: neither
`EmulationError` nor a crash says what is wrong with the kernel. The kernels obey the strict rules, so they are run with
them. A sample is judged here class by class, all mutants in L2; `pytest -s` prints the score.
"""

import runpy
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from ptx_emulator import EmulationError

HERE = Path(__file__).parent
_RECORDED = runpy.run_path(str(HERE / "_recorded.py"))
_MUTATIONS = runpy.run_path(str(HERE / "_mutations.py"))
_CHAIN = runpy.run_path(str(HERE / "_chain.py"))
HARMLESS, mutants_of, sample = (_MUTATIONS[name] for name in ("HARMLESS", "mutants_of", "sample"))
LAUNCHED = "dependent_chain"  # through a host function
KERNELS = tuple(kernel for kernel in _MUTATIONS["KERNELS"] if kernel != LAUNCHED or _CHAIN["HOSTS"]["has_compiler"])

SCHEDULES = (("late", 0), ("late", 1), ("late", 2), ("eager", 0), ("random", 2))
CLASSES = {
    "fence", "wait", "phase parity", "transaction count", "arrive", "commit", "store wait", "barrier", "descriptor",
    "dependent launch", "swizzle", "instruction descriptor", "scale offset", "accumulate", "tensor memory", "transfer", "launch control",
}  # fmt: skip


SILENT = {"descriptor", "swizzle", "instruction descriptor", "scale offset", "accumulate", "transfer", "launch control"}
FLOOR = 1.0  # of every class: a mutant that does no harm belongs in HARMLESS


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PTX_EMULATOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "emulator_cache"))


def recording(kernel):
    if kernel == LAUNCHED:
        return {"ptx": _CHAIN["source"](_CHAIN["CHAIN"]), "parameters": []}
    return _RECORDED["recording"](kernel)


def run(kernel, seed=0, ptx=None, parameters=None, **options):
    if kernel == LAUNCHED:
        return _RECORDED["Outcome"](_CHAIN["run"](_CHAIN["CHAIN"], ptx=ptx, seed=seed, **options), 0.0)
    return _RECORDED["run"](kernel, seed, ptx, parameters, **options)


@cache
def everything():
    return [mutant for kernel in KERNELS for mutant in mutants_of(kernel, recording(kernel))]


def verdict(mutant):
    """("finding" | "numbers" | "missed" | "failed", detail)."""
    for schedule, seed in SCHEDULES:
        try:
            outcome = run(mutant.kernel, seed, mutant.ptx, mutant.parameters, schedule=schedule, strict=True)
        except (EmulationError, ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError) as problem:
            return "failed", f"{type(problem).__name__}: {problem}"
        if outcome.report.findings:
            return "finding", str(outcome.report.findings[0])
        if outcome.error != 0.0:
            return "numbers", f"largest error {outcome.error}"
    return "missed", ""


def judge(mutants):
    """Print the score and ask for the floor of each class; wrong numbers alone, which say nothing about the cause, may
    only be the answer to wrong addresses and formats."""
    rows, lines = {}, []
    for mutant in mutants:
        how, detail = verdict(mutant)
        rows.setdefault(mutant.group, Counter())[how] += 1
        if how in ("missed", "failed"):
            lines.append(f"{how}: {mutant.name}: {mutant.statement[:90]} {detail}")
    table = [f"{'class':24}{'mutants':>8}{'finding':>8}{'numbers':>8}{'missed':>8}{'failed':>8}{'caught':>8}"]
    scores = {}
    for group, counts in [*rows.items(), ("all", sum(rows.values(), Counter()))]:
        scores[group] = (counts["finding"] + counts["numbers"]) / counts.total()
        cells = "".join(f"{counts[how]:>8}" for how in ("finding", "numbers", "missed", "failed"))
        table.append(f"{group:24}{counts.total():>8}{cells}{100 * scores[group]:>7.1f}%")
    report = "\n".join([*table, *lines])
    print("\n" + report)
    assert all(score >= FLOOR for score in scores.values()), report
    assert {group for group, counts in rows.items() if counts["numbers"]} <= SILENT, report


@pytest.mark.parametrize("group", sorted(CLASSES))
def test_sampled_mutants_of_a_class_are_caught(group):
    judge([mutant for mutant in sample(everything()) if mutant.group == group])


@pytest.mark.L2
def test_all_mutants_are_caught():
    assert len(everything()) >= 500
    judge(everything())


def test_the_sample_has_every_family_and_enough_mutants():
    mutants, taken = everything(), sample(everything())
    assert {(m.kernel, m.label) for m in taken} == {(m.kernel, m.label) for m in mutants}
    assert {m.group for m in taken} == CLASSES
    assert 30 <= len({m.name for m in taken}) == len(taken) < len(mutants)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernels_that_are_mutated_are_clean_in_a_strict_run(kernel):
    outcome = run(kernel, 1, strict=True)
    assert not outcome.report.findings
    assert outcome.error == 0.0


def test_harmless_mutants_would_exist():
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

"""Engines that say no only when a plan is built: declined with the note declines_at_build, a failure without it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from cudnn_core import BuildError, Decline, PlanConfig, Support, device_info
from cudnn_core.testing import temporary_plugin
from cudnn_core.testing._kit import Kit, KitFailure, Options
from cudnn_core.testing._library import library
from cudnn_core.testing._running import Job
from tests.zoo._animals import engine, write_beast
from tests.zoo.test_kit import run_kit

NOTE = "declines_at_build"
# Without a plan for any graph whose K the body's condition names.
BODY = """
    def build_plan(self, graph, config, ctx):
        k = graph.nodes[0].inputs["A"].dim[-1]
        if {condition}:
            {raises}
        return Plan(graph)
"""
WITH_REASON = 'raise BuildError("the library has no kernel", decline=Decline("build.failed", "K", actual=f"no kernel for K {k % 2}"))'
PHASES = ("numerics", "contract", "knobs", "threads", "serialization", "overhead")


def kit(tmp_path, condition, *arguments, notes=(NOTE,), raises=WITH_REASON, name="late"):
    """(failure or "" by test name, exit status, output) of the checks that run plans."""
    site = tmp_path / "site-packages"
    site.mkdir()
    write_beast(site, name, engine(BODY.format(condition=condition, raises=raises)), engine={"notes": list(notes)})
    selected = arguments or ("-k", " or ".join(PHASES))
    return run_kit(site, "-rs", "--cudnn-plugin", name, *selected, folder=tmp_path)


def failed(found):
    return {name for name, text in found.items() if text}


@pytest.mark.L2
def test_with_the_note_a_reason_at_build_is_a_decline(tmp_path):
    found, status, output = kit(tmp_path, "k % 2")
    assert not failed(found), output
    assert status == 0, output
    assert "declined when built: " in output
    for phase in PHASES:
        assert re.search(
            rf"late:main::{phase}: \d+ cases declined when built: \d+ x .*no kernel for K 1$", output, re.M
        )
    assert "no kernel for K 0" not in output
    assert "nothing ran" not in output


@pytest.mark.L2
def test_the_cases_that_are_left_are_checked(tmp_path):
    """The first case of the op is declined and the next one runs: each check has a graph, and finds what is wrong there."""
    body = BODY.format(condition="k % 2", raises=WITH_REASON).replace("return Plan", "return Wrong")
    extra = "class Wrong(Plan):\n    def run(self, a, b, c, workspace):\n        c[...] = 0\n\n"
    site = tmp_path / "site-packages"
    site.mkdir()
    write_beast(site, "late", engine(body, extra), engine={"notes": [NOTE]})
    found, status, output = run_kit(site, "--cudnn-plugin", "late", "-k", " or ".join(PHASES), folder=tmp_path)
    assert status == 1
    for phase in ("contract", "knobs", "threads", "serialization"):
        assert any(f"late:main::{phase}" in name for name in failed(found)), (phase, output)


@pytest.mark.L2
def test_without_the_note_it_is_a_failure_in_every_check(tmp_path):
    found, status, output = kit(tmp_path, "True", notes=())
    assert status == 1
    for phase in PHASES:
        assert any(f"late:main::{phase}" in name for name in failed(found)), (phase, output)
    assert "check_support accepts the graph, build_plan fails" in output
    assert "declined when built" not in output


@pytest.mark.L2
@pytest.mark.parametrize("raises", ['raise BuildError("no reason")', 'raise RuntimeError("broken")'])
def test_with_the_note_an_error_without_a_reason_is_a_failure(tmp_path, raises):
    found, status, output = kit(tmp_path, "True", "-k", "17x33x9 or threads", raises=raises)
    assert status == 1
    assert len(failed(found)) == len(found) >= 2, output


@pytest.mark.L2
def test_a_check_that_ran_on_no_graph_fails_the_run(tmp_path):
    found, status, output = kit(tmp_path, "True")
    assert not failed(found), output
    assert status == 1, output
    for phase in PHASES:
        assert f"late:main::{phase}: nothing ran" in output


@pytest.mark.L2
def test_the_count_and_the_exit_status_hold_in_parallel(tmp_path):
    pytest.importorskip("xdist")
    found, status, output = kit(tmp_path, "True", "-n", "2", "-k", "numerics or overhead")
    assert not failed(found), output
    assert status == 1, output
    assert "late:main::numerics: nothing ran" in output


@pytest.mark.L2
def test_an_offered_config_may_be_declined_and_the_first_may_not_be_the_only_one(tmp_path):
    """check_knobs: the second config is refused with a reason."""
    body = """
    def check_support(self, graph, ctx):
        verdict = super().check_support(graph, ctx)
        return verdict if isinstance(verdict, Declined) else Support((PlanConfig("", {"tile": 1}), PlanConfig("", {"tile": 2})), 256)

    def build_plan(self, graph, config, ctx):
        if config.knobs["tile"] == 2:
            raise BuildError("too large", decline=Decline("build.failed", "tile", actual="tile 2 is too large"))
        return Plan(graph)
"""
    site = tmp_path / "site-packages"
    site.mkdir()
    knobs = {"tile": {"type": "int", "choices": [1, 2]}}
    for name, notes in (("noted", [NOTE]), ("silent", [])):
        write_beast(site, name, engine(body), engine={"notes": notes, "knobs": knobs})
    found, _, output = run_kit(
        site, "--cudnn-plugin", "noted", "--cudnn-plugin", "silent", "-k", "knobs", folder=tmp_path
    )
    assert {name.partition(":")[0] for name in failed(found)} == {"silent"}, output
    assert "1 configs built, 1 refused" in output


# --- one case, in this process
MATMUL = next(case for case in library() if case.name == "matmul-f32-17x33x9")
REASON = Decline("build.failed", "K", actual="no kernel")


@pytest.mark.parametrize(
    ("notes", "error", "refused"),
    [
        ({NOTE}, BuildError("no", decline=REASON), True),
        ({NOTE.upper()}, BuildError("no", decline=REASON), True),
        (set(), BuildError("no", decline=REASON), False),
        ({NOTE}, BuildError("no"), False),
        ({NOTE}, RuntimeError("no"), False),
    ],
)
def test_a_case_is_refused_with_the_note_and_the_engines_own_reason(notes, error, refused):
    class Engine:
        def check_support(self, graph, ctx):
            return Support((PlanConfig("", {}),), 0, notes=frozenset(notes))

        def build_plan(self, graph, config, ctx):
            raise error

    table = {"plugin": "late", "engine": [{"name": "e", "ops": ["matmul"], "devices": ["cpu"]}]}
    with temporary_plugin(table, {"e": Engine}, isolated=True):
        kit = Kit(Options(("late",)))
        kit._probes["late:e"] = SimpleNamespace(fatal="")
        with kit.environment():
            job = Job(kit, kit.entries("late")[0], device_info("cpu"), MATMUL.copy())
            assert job.declined() == ""
            assert ("no kernel" in job.refused()) == refused
            if not refused:
                with pytest.raises(KitFailure, match="check_support accepts the graph, build_plan fails|plugin.broken"):
                    job.plan()

"""A broken plugin costs only itself: the graph is planned and run by the sound engine beside it, and the decision says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cudnn_core
from cudnn_core import _registry
from tests.zoo._animals import BEASTS, write_beast, write_ghosts, write_sound

# Beasts that the planner can't tell from sound ones; the kit can. An operator disables them.
UNDETECTED = [beast for beast in BEASTS if beast.state == "selected"]
DETECTED = [beast for beast in BEASTS if beast.state != "selected"]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site directory with the sound plugin; what the test imports from it is forgotten afterwards."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("CUDNN_CORE_CACHE_DIR", str(tmp_path / "cache"))
    before = set(sys.modules)
    write_sound(folder)
    yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def installed(site):
    """``installed()`` is the registry of what ``site`` holds, for the rest of the test."""
    entered = []

    def make():
        context = _registry.installed_on([str(site)])
        entered.append(context)
        return context.__enter__()

    yield make
    for context in reversed(entered):
        context.__exit__(None, None, None)


def matmul():
    graph = cudnn_core.Graph(io_data_type="float32", intermediate_data_type="float32", compute_data_type="float32")
    c = graph.matmul(graph.tensor((1, 4, 8), name="a"), graph.tensor((1, 8, 5), name="b"))
    c.set_output(True).set_name("c")
    return graph


def run_and_check(plan):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(dim).astype(np.float32) for dim in ((1, 4, 8), (1, 8, 5)))
    c = np.full((1, 4, 5), np.nan, dtype=np.float32)
    plan.execute({"a": a, "b": b, "c": c}, np.empty(plan.workspace_size, dtype=np.uint8))
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


def row_of(decision, plugin):
    return next(row for row in decision.engines if row.id.partition(":")[0] == plugin)


@pytest.mark.parametrize("beast", DETECTED, ids=lambda beast: beast.name)
def test_the_sound_engine_runs_the_graph_and_the_decision_says_what_is_wrong_with_the_other(site, installed, beast):
    beast.write(site)
    installed()
    plan = matmul().plan(device="cpu")
    assert plan.engine == "sound:main@1"
    run_and_check(plan)
    row = row_of(plan.decision, beast.name)
    assert row.state == beast.state
    assert beast.code in [reason.code for reason in row.reasons]
    assert row.dist.startswith(("acme-", "twin-"))


@pytest.mark.parametrize("beast", DETECTED, ids=lambda beast: beast.name)
def test_the_decision_about_it_can_be_written_and_printed(site, installed, beast):
    beast.write(site)
    installed()
    decision = matmul().plan(device="cpu").decision
    document = json.loads(decision.to_json())
    assert document["selected"] == "sound:main@1"
    assert beast.name in str(decision)


@pytest.mark.parametrize("beast", DETECTED, ids=lambda beast: beast.name)
def test_planning_again_gives_the_same_answer(site, installed, beast):
    beast.write(site)
    installed()
    first, second = (matmul().plan(device="cpu").decision for _ in range(2))
    assert row_of(second, beast.name).state in (row_of(first, beast.name).state, "quarantined")
    assert second.selected == first.selected


@pytest.mark.parametrize("beast", UNDETECTED, ids=lambda beast: beast.name)
def test_what_only_the_kit_can_find_is_selected_until_it_is_disabled(site, installed, beast):
    beast.write(site)
    installed()
    decision = matmul().explain(device="cpu")
    assert row_of(decision, beast.name).state == "selected"
    assert row_of(decision, "sound").state == "outranked"
    with cudnn_core.configure(disable=[f"{beast.name}:*"]):
        plan = matmul().plan(device="cpu")
        assert row_of(plan.decision, beast.name).state == "disabled"
        run_and_check(plan)


def test_the_whole_zoo_at_once(site, installed):
    for beast in DETECTED:
        beast.write(site)
    write_ghosts(site)
    installed()
    plan = matmul().plan(device="cpu")
    assert plan.engine == "sound:main@1"
    run_and_check(plan)
    states = {row.id.partition(":")[0]: row.state for row in plan.decision.engines}
    assert states == {
        "sound": "selected",
        "ghost": "quarantined",
        **{beast.name: beast.state for beast in DETECTED},
    }


def test_broken_metadata_beside_it_is_skipped_and_reported(site, installed):
    write_ghosts(site)
    registry = installed()
    run_and_check(matmul().plan(device="cpu"))
    paths = {Path(broken.path).name for broken in registry.discovery.broken}
    assert any("undecodable" in path for path in paths), registry.discovery.broken


def test_an_engine_that_hangs_at_import_does_not_disturb_graphs_that_its_manifest_rules_out(site, installed):
    write_beast(site, "hangs", "import time\n\ntime.sleep(600)\n", engine={"ops": ["conv_fprop"]})
    installed()
    plan = matmul().plan(device="cpu")
    run_and_check(plan)
    assert row_of(plan.decision, "hangs").state == "filtered"


def test_the_doctor_finds_the_engine_that_hangs(site):
    write_beast(site, "hangs", "import time\n\ntime.sleep(600)\n")
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "cudnn_core", "doctor", "--time-limit", "2"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=site,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "hangs (acme-hangs 1.0) hangs" in done.stdout
    assert "sound (acme-sound 1.0) hangs" not in done.stdout


def test_under_strict_a_broken_engine_raises_and_is_named(site, installed):
    next(beast for beast in BEASTS if beast.name == "raises_in_check").write(site)
    installed()
    with (
        cudnn_core.configure(strict=True),
        pytest.raises(cudnn_core.CudnnCoreError, match=r"raises_in_check:main@1.*KeyError"),
    ):
        matmul().plan(device="cpu")


def test_with_nothing_sound_left_the_error_names_every_reason(site, installed):
    for name in ("raises_in_check", "knob_out_of_domain", "too_new"):
        next(beast for beast in BEASTS if beast.name == name).write(site)
    installed()
    with cudnn_core.configure(disable=["sound:*"]), pytest.raises(cudnn_core.NoEngineError) as caught:
        matmul().plan(device="cpu")
    text = str(caught.value)
    assert all(word in text for word in ("knob.domain", "plugin.broken", "api.too_new", "config.disabled")), text


def test_the_zoo_is_large_enough():
    assert len({beast.name for beast in BEASTS}) >= 16

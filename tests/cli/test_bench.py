"""``cudnn-core bench``: what is timed, what is recorded, and that a record ranks later plans for as long as it may."""

from __future__ import annotations

import pytest

import cudnn_core
from cudnn_core import PlanConfig, _bench
from cudnn_core._registry import EngineEntry
from cudnn_core._tuning import device_facts, load

from .conftest import AddEngine, AddPlan

FAST = ("--repeats", "3", "--warmup", "1")
# By its manifest the slow engine is the better one.
SLOW = {"delay": 0.003, "efficiency": 0.8}
QUICK = {"efficiency": 0.1}


def explained(file):
    """(selected engine, basis) of the graph in ``file`` on the CPU."""
    decision = cudnn_core.Graph.from_json(file.read_text()).explain(device="cpu")
    return decision.selected, decision.winner.basis


def record(file):
    from cudnn_core._env import environment_key

    frozen = cudnn_core.Graph.from_json(file.read_text()).freeze()
    return load(frozen.key, device_facts(cudnn_core.device_info("cpu")), environment_key())


def test_a_record_flips_a_later_ranking_until_a_further_engine_is_installed(cli, graph_file, engines):
    file = graph_file()
    with engines(slow=SLOW, quick=QUICK):
        assert explained(file) == ("slow:add@1", "prior")
        code, out, _ = cli("bench", file, *FAST)
        assert code == 0
        assert out.splitlines()[2].startswith("quick:add@1")
        assert "recorded: later plans" in out
        assert explained(file) == ("quick:add@1", "measured")
        assert cudnn_core.Graph.from_json(file.read_text()).plan(device="cpu").engine == "quick:add@1"
    with engines(slow=SLOW, quick=QUICK, third={"efficiency": 0.05}):
        assert explained(file) == ("slow:add@1", "prior")
        cli("bench", file, *FAST)
        assert explained(file)[1] == "measured"


def test_a_new_revision_of_an_engine_invalidates_the_record(cli, graph_file, engines):
    file = graph_file()
    with engines(slow=SLOW, quick=QUICK):
        cli("bench", file, *FAST)
    with engines(slow=SLOW, quick={**QUICK, "revision": 2}):
        assert explained(file) == ("slow:add@1", "prior")


def test_an_upgrade_of_what_an_engine_is_made_of_invalidates_the_record(cli, graph_file, engines, monkeypatch):
    file = graph_file()
    with engines(slow=SLOW, quick=QUICK):
        cli("bench", file, *FAST)
        assert explained(file) == ("quick:add@1", "measured")
        assert all(sample.dists for sample in record(file).samples)
        now = EngineEntry.environment
        monkeypatch.setattr(EngineEntry, "environment", lambda self: {**now(self), "torch": "99.0"})
        assert explained(file) == ("slow:add@1", "prior")
        cli("bench", file, *FAST)
        assert explained(file) == ("quick:add@1", "measured")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ('[engines]\ndisable = ["slow:*"]\n', "config.disabled"),
        ('[plugins]\ndeny = ["slow"]\n', "config.not_allowed"),
        ('[engines]\nrequire = ["deterministic"]\n', "policy.note_missing"),
        ('[[rule]]\nmatch = { op = "add" }\navoid = ["slow:add"]\n', "config.avoided"),
        ('[[rule]]\nmatch = { op = "add" }\nuse = "slow:add"\n', "pinned"),
        ('[engine."quick:add".knobs]\ntile = 2\n', "knob tile"),
    ],
)
def test_a_filtered_or_pinned_run_writes_nothing(cli, cli_json, graph_file, engines, configure, settings, why):
    file = graph_file()
    knobs = {"tile": {"type": "int", "choices": [1, 2]}}
    with engines(slow=SLOW, quick={**QUICK, "notes": ["deterministic"], "knobs": knobs}):
        configure(settings)
        code, document = cli_json("bench", file, *FAST)
        _, out, _ = cli("bench", file, *FAST)
    assert code == 0
    assert document["recorded"] is False
    assert why in document["not_recorded_because"]
    assert f"not recorded: {document['not_recorded_because']}" in out
    assert record(file) is None


def test_an_engine_that_could_not_compete_anyway_does_not_count_as_left_out(cli_json, graph_file, engines, configure):
    file = graph_file()
    with engines(quick=QUICK, gpu={"devices": ["cuda"]}, trial={"maturity": "experimental"}):
        configure('[engines]\ndisable = ["gpu:*"]\n')
        assert cli_json("bench", file, *FAST)[1]["recorded"] is True
    assert [sample.engine for sample in record(file).samples] == ["quick:add@1"]


def test_bench_of_some_engines_writes_nothing(cli, cli_json, graph_file, engines):
    file = graph_file()
    with engines(slow=SLOW, quick=QUICK):
        code, document = cli_json("bench", file, *FAST, "--engine", "quick:*")
        assert [timing["engine"] for timing in document["timings"]] == ["quick:add@1"]
        assert (code, document["recorded"]) == (0, False)
        assert cli_json("bench", file, *FAST, "--no-record")[1]["recorded"] is False
        assert cli("bench", file, "--engine", "none:*")[0] == 2
    assert record(file) is None


def test_an_engine_that_fails_is_named_and_nothing_is_recorded(cli_json, graph_file, engines):
    class Broken:
        def check_support(self, graph, ctx):
            return cudnn_core.Support((PlanConfig("", {}),), workspace=0)

        def build_plan(self, graph, config, ctx):
            raise cudnn_core.BuildError("no compiler")

    file = graph_file()
    with engines(quick=QUICK, broken={"base": Broken}):
        code, document = cli_json("bench", file, *FAST)
    assert code == 1
    assert "no compiler" in next(row["failure"] for row in document["timings"] if row["engine"] == "broken:add@1")
    assert "broken:add@1" in document["not_recorded_because"]
    assert record(file) is None


def test_every_config_is_timed_and_the_best_is_stored_and_used(cli_json, graph_file, engines):
    file = graph_file()
    knobs = {"slow": {"type": "int", "choices": [1, 2, 0]}}
    three = {"configs": ({"slow": 2}, {"slow": 1}, {"slow": 0}), "knobs": knobs, "delay": 0.002}
    with engines(one=three, two=SLOW):
        _, document = cli_json("bench", file, *FAST)
        assert [row["config"]["knobs"] for row in document["timings"]].count({}) == 1
        assert len(document["timings"]) == 4
        assert {sample.engine: dict(sample.config.knobs) for sample in record(file).samples}["one:add@1"] == {"slow": 0}
        assert cudnn_core.Graph.from_json(file.read_text()).plan(device="cpu").knobs == {"slow": 0}


def test_a_record_is_for_the_runtime_sizes_that_were_measured(cli, graph_file, engines):
    n = cudnn_core.Dim("n", 1, 64)
    file = graph_file(lambda g: g.add(g.tensor((n,)), g.tensor((n,))).set_output(True))
    with engines(slow=SLOW, quick=QUICK):
        cli("bench", file, *FAST, "--size", "n=16")
        graph = cudnn_core.Graph.from_json(file.read_text())
        assert graph.explain(device="cpu", hint={"n": 16}).winner.basis == "measured"
        assert graph.explain(device="cpu", hint={"n": 17}).winner.basis == "prior"


def test_no_engine_and_no_device(cli, graph_file, engines):
    with engines(one={"dtypes": ["float64"]}):
        assert cli("bench", graph_file())[0] == 1
        assert cli("bench", graph_file(), "--device", "H200")[0] == 3


# --- members of an engine, which it names on request
class Family(AddEngine):
    """Its own choice takes 2 ms a unit of its knob, member N that divided by N + 1; eng9 does not build."""

    answer: object = ()
    asked = 0
    told = ""

    def members(self, graph, ctx, limit=8):
        type(self).asked += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return tuple(PlanConfig("", {}, variant) for variant in self.answer)[:limit]

    def build_plan(self, graph, config, ctx):
        if config.variant == "eng9":
            raise cudnn_core.BuildError("eng9 is not for this graph")
        plan = AddPlan(graph, 0.002 * config.knobs["slow"] / (1 + int(config.variant[3:] or 0)), 0.0)
        plan.variant = config.variant or self.told
        return plan


def family(*answer, **fields):
    """The fields of an engine whose members are ``answer``, or that raises it."""
    knobs = {"slow": {"type": "int", "choices": [1, 2]}}
    given = answer[0] if answer and isinstance(answer[0], BaseException) else answer
    base = type("F", (Family,), {"answer": given, **fields})
    return {"base": base, "variants": "eng[0-9]+", "efficiency": 0.1, "knobs": knobs}


def timed(document):
    return {row["id"]: row["failure"] for row in document["timings"]}


def test_members_are_timed_and_the_best_is_used_until_a_further_engine_is_installed(cli, cli_json, graph_file, engines):
    file = graph_file()
    fields = family("eng1", "eng7")
    with engines(slow=SLOW, fam=fields):
        code, document = cli_json("bench", file, *FAST)
        assert (code, document["recorded"], document["members_left_out"]) == (0, True, {})
        assert timed(document) == dict.fromkeys(["slow:add@1", "fam:add@1", "fam:add@1/eng1", "fam:add@1/eng7"])
        assert cli("bench", file, *FAST)[1].splitlines()[2].startswith("fam:add@1/eng7[slow=1]")
        asked = fields["base"].asked
        assert explained(file) == ("fam:add@1/eng7", "measured")
        assert cudnn_core.Graph.from_json(file.read_text()).plan(device="cpu").variant == "eng7"
        assert fields["base"].asked == asked  # on request only
        with cudnn_core.configure(disable=["fam:add/eng7"]):
            assert explained(file) == ("slow:add@1", "prior")
        with cudnn_core.configure(disable=["fam:add/eng1"]):
            assert explained(file) == ("fam:add@1/eng7", "measured")
    with engines(slow=SLOW, fam=family(), third={"efficiency": 0.05}):
        assert explained(file) == ("slow:add@1", "prior")
    with engines(slow=SLOW, fam={**family(), "revision": 2}):
        assert explained(file) == ("slow:add@1", "prior")


def test_a_member_that_does_not_build_is_shown_and_keeps_no_record_from_being_written(
    cli, cli_json, graph_file, engines
):
    file = graph_file()
    with engines(fam=family("eng9", "eng1")):
        code, document = cli_json("bench", file, *FAST)
        assert (code, document["recorded"]) == (0, True)
        assert timed(document)["fam:add@1/eng9"] == "eng9 is not for this graph"
        assert "failed: eng9 is not for this graph" in cli("bench", file, *FAST)[1]
        assert explained(file) == ("fam:add@1/eng1", "measured")


def test_a_member_of_the_record_that_no_longer_builds_gives_way_to_what_does(cli_json, graph_file, engines):
    file = graph_file()
    with engines(fam=family("eng1")):
        assert cli_json("bench", file, *FAST)[1]["recorded"]

    def build_plan(self, graph, config, ctx):
        if config.variant:
            raise cudnn_core.BuildError("no longer")
        return AddPlan(graph, 0.0, 0.0)

    with engines(fam=family(build_plan=build_plan)):
        assert explained(file)[0] == "fam:add@1/eng1"
        code, document = cli_json("bench", file, *FAST)
        assert (code, document["recorded"]) == (0, True)
        assert timed(document) == {"fam:add@1/eng1": "no longer", "fam:add@1": None}
        assert explained(file) == ("fam:add@1", "measured")


@pytest.mark.parametrize(
    ("answer", "why"), [(cudnn_core.BuildError("no heuristics"), "no heuristics"), (ValueError("boom"), "boom")]
)
def test_an_engine_whose_members_can_not_be_had_is_timed_without_them(cli, cli_json, graph_file, engines, answer, why):
    file = graph_file()
    with engines(fam=family(answer)):
        code, document = cli_json("bench", file, *FAST)
        assert (code, document["recorded"], list(timed(document))) == (0, True, ["fam:add@1"])
        assert why in document["members_left_out"]["fam:add@1"][0]
        assert "members of fam:add@1 left out: " in cli("bench", file, *FAST)[1]
        assert explained(file) == ("fam:add@1", "measured")


def test_how_many_and_which_members_are_timed(cli_json, graph_file, engines):
    file = graph_file()
    fields = family("eng1", "eng2", "eng7")
    with engines(quick=QUICK, fam=fields):
        assert set(timed(cli_json("bench", file, *FAST, "--members", "1")[1])) == {
            "quick:add@1",
            "fam:add@1",
            "fam:add@1/eng1",
        }
        assert len(timed(cli_json("bench", file, *FAST, "--engine", "fam:add")[1])) == 4
        assert list(timed(cli_json("bench", file, *FAST, "--engine", "fam:add/eng[27]")[1])) == [
            "fam:add@1/eng2",
            "fam:add@1/eng7",
        ]
        asked = fields["base"].asked
        # The member that the record of the first run names is timed again in any case.
        assert set(timed(cli_json("bench", file, *FAST, "--members", "0")[1])) == {
            "quick:add@1",
            "fam:add@1",
            "fam:add@1/eng1",
        }
        assert list(timed(cli_json("bench", file, *FAST, "--engine", "quick:*")[1])) == ["quick:add@1"]
        assert fields["base"].asked == asked


def test_knobs_of_a_member_pin_the_run(cli_json, graph_file, engines):
    file = graph_file()
    with engines(fam=family("eng1")), cudnn_core.configure(knobs={"fam:add/eng1": {"slow": 2}}):
        document = cli_json("bench", file, *FAST)[1]
    assert "knob slow of fam:add@1/eng1 at configure()" in document["not_recorded_because"]


def test_bench_refuses_what_a_plan_would_refuse_once_built(cli_json, graph_file, engines):
    file = graph_file()
    with engines(quick=QUICK, fam=family(told="eng3")), cudnn_core.configure(disable=["fam:add/eng3"]):
        code, document = cli_json("bench", file, *FAST)
    assert (code, document["recorded"]) == (1, False)
    assert "config.disabled fam:add/eng3" in timed(document)["fam:add@1"]


# --- the sweep itself, by a clock that reads what a run says
class Clock:
    """A run adds its seconds to ``now``; drift makes every later run slower."""

    def __init__(self):
        self.log = []

    def __call__(self, run, count):
        return sum(run() for _ in range(count))


def competitor(name, seconds, log=None, fail_at=None):
    calls = iter(range(10**9))

    def prepare():
        def run():
            if log is not None:
                log.append(name)
            if fail_at is not None and next(calls) == fail_at:
                raise RuntimeError(f"{name} broke")
            return seconds

        return run

    return _bench.Competitor(name, PlanConfig(f"p:{name}@1", {}), prepare)


def test_the_median_is_a_run_and_short_runs_are_batched():
    done = _bench.sweep([competitor("a", 2e-6), competitor("b", 0.01)], Clock(), repeats=5)
    assert done.complete
    assert [timing.us for timing in done.timings] == [pytest.approx(2.0), pytest.approx(1e4)]
    assert [timing.runs for timing in done.timings] == [500, 1]
    assert [len(timing.samples_us) for timing in done.timings] == [5, 5]


def test_a_sweep_is_complete_without_an_optional_competitor_that_fails_but_not_without_its_timings():
    optional = competitor("b", 1.0, fail_at=4)._replace(optional=True)
    done = _bench.sweep([competitor("a", 1.0), optional], Clock(), repeats=4, warmup=1)
    assert [timing.failure for timing in done.timings] == ["", "RuntimeError: b broke"]
    assert done.complete
    short = done.timings[0]._replace(id="c", samples_us=(1.0,), optional=True)
    assert "c: 1 of 4" in _bench._shortfall((*done.timings, short), 4)


def test_competitors_take_turns():
    log = []
    _bench.sweep([competitor("a", 1.0, log), competitor("b", 1.0, log)], Clock(), repeats=3, warmup=1)
    assert log[-6:] == ["a", "b"] * 3


def test_one_that_breaks_late_does_not_stop_the_others():
    done = _bench.sweep([competitor("a", 1.0, fail_at=4), competitor("b", 1.0)], Clock(), repeats=4, warmup=1)
    assert [timing.failure for timing in done.timings] == ["RuntimeError: a broke", ""]
    assert not done.complete
    assert len(done.timings[1].samples_us) == 4


def test_the_time_limit_leaves_each_at_least_one_timing(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(_bench.time, "perf_counter", lambda: float(next(now)))
    for limit, most in ((6.0, 3), (0.5, 1)):
        done = _bench.sweep([competitor("a", 1.0), competitor("b", 1.0)], Clock(), repeats=50, time_limit=limit)
        assert [1 <= len(timing.samples_us) <= most for timing in done.timings] == [True, True]
        assert not done.complete
        assert "of 50 timings within the time limit" in done.incomplete


def test_imports_and_builds_do_not_count_against_the_time_limit(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_bench.time, "perf_counter", lambda: now[0])

    def prepare():
        now[0] += 1000.0
        return lambda: 1e-3

    done = _bench.sweep([_bench.Competitor("a", PlanConfig("p:a@1", {}), prepare)], Clock(), repeats=3, time_limit=1.0)
    assert done.complete


def test_a_sweep_that_its_time_limit_cuts_is_not_recorded(cli, graph_file, engines):
    file = graph_file()
    with engines(slow=SLOW, quick=QUICK):
        code, out, _ = cli("bench", file, "--repeats", "5", "--warmup", "1", "--time-limit", "0")
    assert code == 0
    assert "not recorded: the sweep is incomplete (" in out
    assert "1 of 5 timings within the time limit" in out
    assert "0.0%" not in out
    assert record(file) is None


def test_the_record_of_a_single_engine_ranks_later_plans_too(cli, graph_file, engines):
    file = graph_file()
    with engines(quick=QUICK):
        assert explained(file) == ("quick:add@1", "prior")
        assert "recorded: later plans" in cli("bench", file, *FAST)[1]
        assert explained(file) == ("quick:add@1", "measured")


def test_spread_is_half_the_quartile_distance_over_the_median():
    timing = _bench.Timing("a", PlanConfig("p:a@1", {}), (8.0, 9.0, 10.0, 11.0, 12.0))
    assert timing.spread == pytest.approx(0.1)

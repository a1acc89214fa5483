"""Members of an engine that ``check_support`` does not list: pinned by name, denied, measured, and told by the built plan."""

from __future__ import annotations

import json

import pytest

import cudnn_core
from cudnn_core import BuildError, Estimate, Graph, NoEngineError, PlanConfig, Support, configure
from cudnn_core._engine import ExecutionContext
from cudnn_core._members import ask, measured_config
from cudnn_core._planner import survey
from cudnn_core._tuning import Sample, TuningRecord
from cudnn_core.testing import temporary_plugin

F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}
KNOBS = {"cfg": {"type": "str", "default": ""}, "mode": {"type": "str", "choices": ["A", "B"]}}
TABLE = {
    "plugin": "lib",
    "engine": [
        {"name": "graph", "ops": ["*"], "devices": ["cpu"], "variants": "eng[0-9]+", "knobs": KNOBS, "aot": True},
        {"name": "slow", "ops": ["*"], "devices": ["cpu"], "tier": "reference"},
    ],
}
PIN = {"match": {"op": "relu"}, "use": "lib:graph/eng7"}


class Compiled:
    workspace_size = 0

    def __init__(self, variant=""):
        self.variant = variant

    def execute(self, pack, ctx):
        pass


class Plain:
    def check_support(self, graph, ctx):
        return Support((PlanConfig("", {}),))

    def build_plan(self, graph, config, ctx):
        return type("P", (Compiled,), {})()


class Family(Plain):
    """Offers its own choice, ``picks``; members in ``broken`` don't build. ``built`` is what build_plan was given."""

    picks = "eng3"
    broken = ()
    listed: tuple = ()
    answer: object = ()

    def __init__(self):
        type(self).built = []
        type(self).asked = []

    def check_support(self, graph, ctx):
        return Support((PlanConfig("", {}), *self.listed))

    def build_plan(self, graph, config, ctx):
        self.built.append(config)
        if config.variant in self.broken:
            raise BuildError(f"{config.variant} is not for this graph")
        return Compiled(config.variant or self.picks)

    def members(self, graph, ctx, limit=8):
        self.asked.append((graph, ctx, limit))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def graph():
    g = Graph(**F32)
    g.relu(g.tensor(dim=(4, 4), name="x")).set_output(True).set_name("y")
    return g


@pytest.fixture
def family():
    """``with family(field=...) as engine``: the engine's class."""
    from contextlib import contextmanager

    @contextmanager
    def install(**fields):
        kind = type("F", (Family,), fields)
        with temporary_plugin(TABLE, {"graph": kind, "slow": Plain}, isolated=True):
            yield kind

    return install


def member(variant, cfg="", mode="A"):
    return PlanConfig("lib:graph@1", {"cfg": cfg, "mode": mode}, variant)


def entries(graph):
    return [entry.config for entry in found(graph).entries if entry.short_id == "lib:graph"]


def found(graph):
    return survey(graph.freeze("cpu"), cudnn_core.device_info("cpu"))


def row(decision, short_id):
    return next(row for row in decision.engines if row.id.startswith(short_id))


# --- pins
def test_a_pin_on_a_member_that_is_not_listed_yields_exactly_that_config(graph, family):
    rule = {**PIN, "knobs": {"cfg": "KERNEL_CFG=21"}}
    with family() as engine, configure(rule=[rule], knobs={"lib:graph/eng7": {"mode": "B"}}):
        assert graph.explain(device="cpu").selected == "lib:graph@1/eng7"
        assert entries(graph) == [member("eng7", "KERNEL_CFG=21", "B"), member("")]
        plan = graph.plan(device="cpu")
        assert plan.config == member("eng7", "KERNEL_CFG=21", "B")
        assert (plan.variant, plan.decision.selected) == ("eng7", "lib:graph@1/eng7")
        assert engine.built == [plan.config]


def test_a_pinned_member_that_is_listed_is_not_listed_twice(graph, family):
    with family(listed=(PlanConfig("", {"cfg": "X=1"}, "eng7"),)), configure(rule=[PIN]):
        assert entries(graph) == [member("eng7", "X=1"), member("")]


def test_a_strict_pin_on_a_member_that_does_not_build_is_an_error_with_its_reason(graph, family):
    with family(broken=("eng7",)) as engine, configure(rule=[{**PIN, "strict": True}]):
        assert entries(graph) == [member("eng7")]
        with pytest.raises(NoEngineError, match="eng7 is not for this graph") as caught:
            graph.plan(device="cpu")
        graph.create_execution_plans()
        with pytest.raises(NoEngineError, match="eng7 is not for this graph"):
            graph.build_plans()
        assert {config.variant for config in engine.built} == {"eng7"}
    decision = caught.value.decision
    assert (decision.selected, row(decision, "lib:graph").state) == (None, "build_failed")
    assert row(decision, "lib:graph").reasons[0].subject == "lib:graph@1/eng7"


def test_after_a_pin_that_is_not_strict_the_other_configs_follow_and_the_reason_is_kept(graph, family):
    with family(broken=("eng7",)) as engine, configure(rule=[PIN]):
        plan = graph.plan(device="cpu")
        assert [config.variant for config in engine.built] == ["eng7", ""]
    assert plan.config == member("")
    assert "eng7 is not for this graph" in str(row(plan.decision, "lib:graph").reasons[0])


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"disable": ["lib:graph/eng7"]}, "config.disabled"), ({"disable": ["lib:graph/eng*"]}, "config.disabled"), (None, "config.avoided")],
)  # fmt: skip
@pytest.mark.parametrize("strict", [False, True])
def test_a_pin_does_not_undo_what_keeps_its_member_out(graph, family, settings, code, strict, caplog):
    avoid = {"match": {"op": "relu"}, "avoid": ["lib:graph/eng7"]}
    with family(), configure(**(settings or {"rule": [avoid]})), configure(rule=[{**PIN, "strict": strict}]):
        if strict:
            with pytest.raises(NoEngineError, match=code) as caught:
                graph.plan(device="cpu")
            codes = [reason.code for reason in row(caught.value.decision, "lib:graph").reasons]
            assert codes == [code, "config.pinned_elsewhere"]
        else:
            assert entries(graph) == [member("")]
            assert "pins lib:graph/eng7" in caplog.text


@pytest.mark.parametrize("use", ["lib:graph/eng*", "lib:slow", "lib:graph/foo"])
def test_a_strict_pin_of_something_else_leaves_the_own_choice_out(graph, family, use):
    with family(), pytest.warns(cudnn_core.ConfigWarning) if use.endswith("foo") else configure():
        with configure(rule=[{**PIN, "use": use, "strict": True}]):
            assert entries(graph) == []


def test_a_member_that_the_manifest_does_not_have_is_not_made_up(graph, family):
    with family(), pytest.warns(cudnn_core.ConfigWarning), configure(rule=[{**PIN, "use": "lib:graph/foo"}]):
        assert entries(graph) == [member("")]


def test_a_pin_by_an_engine_glob_reaches_the_member_too(graph, family):
    with family(), configure(rule=[{**PIN, "use": "lib:*/eng7"}]):
        assert entries(graph) == [member("eng7"), member("")]


def test_a_knob_of_a_pinned_member_that_the_engine_does_not_have_is_a_decline(graph, family):
    with family(), pytest.warns(cudnn_core.ConfigWarning), configure(rule=[{**PIN, "knobs": {"cgf": "x"}}]):
        decision = graph.explain(device="cpu")
    assert (row(decision, "lib:graph").state, row(decision, "lib:graph").reasons[0].code) == (
        "declined",
        "knob.unknown",
    )


def test_estimate_is_asked_about_the_pinned_member(graph, family):
    seen = []

    def estimate(self, graph, config, ctx):
        seen.append(config.variant)
        return Estimate(1.0)

    with family(estimate=estimate), configure(rule=[PIN]):
        graph.explain(device="cpu")
    assert seen == ["eng7"]


def test_a_call_that_names_a_member_gets_the_manifests_knobs_and_not_another_members(graph, family):
    listed = (PlanConfig("", {"cfg": "X=1"}, "eng1"),)
    with (
        family(listed=listed),
        configure(rule=[{**PIN, "use": "lib:graph/eng1"}], knobs={"lib:graph/eng7": {"mode": "B"}}),
    ):
        for name, knobs, config in (
            ("lib:graph/eng7", None, member("eng7", mode="B")),
            ("lib:graph/eng1", None, member("eng1", "X=1")),
            ("lib:graph", None, member("eng1", "X=1")),
            ("lib:graph", {"mode": "B"}, member("", mode="B")),  # what a saved pair of the own choice says
            ("lib:graph@1/eng7", {"cfg": "Y=2"}, member("eng7", "Y=2")),
        ):
            made = found(graph)
            assert made.entries[made.pin(name, knobs)].config == config


# --- the member that an own choice turns out to be
def test_a_plan_tells_the_member_that_its_engine_chose(graph, family, caplog):
    with family(), caplog.at_level("INFO", logger="cudnn_core"):
        plan = graph.plan(device="cpu")
    assert (plan.variant, plan.config.variant, plan.decision.selected) == ("eng3", "", "lib:graph@1")
    assert "lib:graph@1/eng3" in repr(plan)
    assert "lib:graph@1/eng3" in caplog.text


@pytest.mark.parametrize(("picks", "variant"), [("", ""), ("eng3", "eng3")])
def test_its_plan_file_asks_for_the_same_choice_again(graph, family, tmp_path, picks, variant):
    with family(picks=picks) as engine:
        graph.plan(device="cpu").save(tmp_path / "a.plan")
        loaded = cudnn_core.Plan.load(tmp_path / "a.plan")
        assert (loaded.variant, loaded.config, engine.built[-1]) == (variant, member(""), member(""))


@pytest.mark.parametrize("settings", [{"disable": ["lib:graph/eng3"]}, {"rule": [{"avoid": ["lib:graph/eng3"]}]}])
def test_an_own_choice_that_turns_out_to_be_kept_out_is_refused(graph, family, settings):
    with family(listed=(PlanConfig("", {}, "eng1"),)), configure(**settings):
        plan = graph.plan(device="cpu")
    assert plan.variant == "eng1"
    assert row(plan.decision, "lib:graph").reasons[0].subject.startswith("lib:graph")
    assert row(plan.decision, "lib:graph").reasons[0].code in ("config.disabled", "config.avoided")
    with family(), configure(**settings):
        plan = graph.plan(device="cpu")
    assert (plan.engine, row(plan.decision, "lib:graph").state) == ("lib:slow@1", "build_failed")


@pytest.mark.parametrize("pin", [None, "lib:graph/eng7"])
def test_a_saved_plan_of_a_member_that_is_disabled_now_is_refused(graph, family, tmp_path, pin):
    with family(picks="eng7"):
        with configure(rule=[PIN] if pin else []):
            graph.plan(device="cpu").save(tmp_path / "a.plan")
        with configure(disable=["lib:graph/eng7"]), pytest.raises(BuildError, match=r"eng7.*config\.disabled"):
            cudnn_core.Plan.load(tmp_path / "a.plan")


@pytest.mark.parametrize(
    ("told", "match"), [("foo", "does not declare"), (7, "does not declare"), ("eng3", "asked for eng7")]
)
def test_a_plan_of_another_member_than_was_asked_for_is_a_build_failure(graph, family, told, match):
    def build_plan(self, graph, config, ctx):
        return Compiled(told)

    with family(build_plan=build_plan), configure(rule=[{**PIN, "strict": True}]):
        with pytest.raises(NoEngineError, match=match):
            graph.plan(device="cpu")


# --- members on request
def asked(graph, limit=8):
    made = found(graph)
    item = next(item for item in made.ranked if item.id.startswith("lib:graph"))
    return ask(made.request, item.candidate, limit)


def test_members_are_asked_for_at_the_hints_sizes_and_only_on_request(family):
    g = Graph(**F32)
    g.relu(g.tensor(dim=(cudnn_core.Dim("m", 1, 64), 4))).set_output(True)
    answer = (PlanConfig("", {"cfg": "X=1"}, "eng1"), PlanConfig("lib:graph", {}, "eng2"))
    with family(answer=answer) as engine:
        g.plan(device="cpu")
        assert engine.asked == []
        assert asked(g, limit=5).configs == (member("eng1", "X=1"), member("eng2"))
        ((frozen, ctx, limit),) = engine.asked
        assert asked(g, limit=0).configs == ()
        assert len(engine.asked) == 1
    assert (frozen.operands[0].dim, ctx, limit) == ((8, 4), ExecutionContext(None, cudnn_core.device_info("cpu")), 5)


def test_members_follow_the_configuration_and_repeat_nothing(graph, family):
    answer = tuple(PlanConfig("", {}, name) for name in ("eng1", "eng2", "eng2", "eng3", "eng4"))
    with family(answer=answer, listed=(PlanConfig("", {}, "eng4"),)):
        with configure(disable=["lib:graph/eng1"], knobs={"lib:graph/eng3": {"mode": "B"}}):
            configs, reasons = asked(graph)
    assert configs == (member("eng2"), member("eng3", mode="B"))
    assert [(reason.code, reason.subject) for reason in reasons] == [("config.disabled", "lib:graph/eng1")]


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        (BuildError("no engine for it"), "build.failed", "no engine for it"),
        (ValueError("boom"), "plugin.broken", "boom"),
        (SystemExit(3), "plugin.broken", "SystemExit"),
        ([PlanConfig("", {}, "eng1")], "plugin.broken", "no tuple"),
        ((PlanConfig("", {}),), "plugin.broken", "no member"),
        ((PlanConfig("", {}, "foo"),), "plugin.broken", "does not declare"),
        ((PlanConfig("other:e", {}, "eng1"),), "plugin.broken", "another engine"),
        (tuple(PlanConfig("", {}, f"eng{i}") for i in range(9)), "plugin.broken", "at most 8"),
    ],
)
def test_what_goes_wrong_costs_the_members_and_not_the_engine(graph, family, answer, code, text, caplog):
    with family(answer=answer):
        configs, (reason,) = asked(graph)
        assert (configs, reason.code) == ((), code)
        assert text in str(reason)
        assert cudnn_core.registry().find("lib:graph").state == "eligible"
        assert graph.plan(device="cpu").engine == "lib:graph@1"


def test_a_member_with_knobs_that_the_manifest_does_not_have_is_left_out_alone(graph, family):
    with family(answer=(PlanConfig("", {"cgf": "x"}, "eng1"), PlanConfig("", {}, "eng2"))):
        configs, (reason,) = asked(graph)
    assert (configs, reason.code) == ((member("eng2"),), "knob.unknown")


# --- measured members
def usable(graph, config, **settings):
    with configure(**settings):
        made = found(graph)
        item = next(item for item in made.ranked if item.id.startswith("lib:graph"))
        return measured_config(made.request, item.candidate, config)


def test_a_measured_member_may_run_as_it_was_measured_and_where_it_is_admitted(graph, family):
    seven = member("eng7", "X=1")
    with family():
        assert usable(graph, seven) == seven
        assert usable(graph, member("")) == member("")
        assert usable(graph, member("", mode="B")) is None  # not a config that is offered
        assert usable(graph, member("foo")) is None
        assert (
            usable(graph, PlanConfig("lib:graph@1", {"cfg": "X=1"}, "eng7")) is None
        )  # of a manifest with other knobs
        assert usable(graph, PlanConfig("lib:graph@1", {"cfg": "X=1", "mode": "C"}, "eng7")) is None
        assert usable(graph, seven, disable=["lib:graph/eng7"]) is None
        assert usable(graph, seven, rule=[{"avoid": ["lib:graph/eng7"]}]) is None
        assert usable(graph, seven, disable=["lib:graph/eng3"]) == seven
        assert usable(graph, seven, knobs={"lib:graph": {"cfg": "Y=2"}}) is None
        assert usable(graph, seven, knobs={"lib:graph": {"cfg": "X=1"}}) == seven


def test_a_measurement_does_not_undo_a_pin(graph, family, monkeypatch):
    from cudnn_core import _planner

    with family(), configure(disable=["lib:slow"]):
        dists = found(graph).ranked[0].candidate.entry.environment()
        best = Sample("lib:graph@1", member("eng3", "X=1"), 5.0, 3, 0.0, dists=dists)
        record = TuningRecord(graph.key(), {}, {}, (best,))
        monkeypatch.setattr(_planner, "tuning_record", lambda key, device: record)
        winner = graph.explain(device="cpu").winner
        assert (winner.id, winner.basis, winner.us) == ("lib:graph@1/eng3", "measured", 5.0)
        assert entries(graph) == [member("eng3", "X=1"), member("")]
        with configure(rule=[PIN]):
            winner = graph.explain(device="cpu").winner
            assert (winner.id, winner.basis) == ("lib:graph@1/eng7", "prior")
        with configure(rule=[{**PIN, "use": "lib:graph/eng3"}]):
            assert graph.explain(device="cpu").winner.basis == "prior"  # of other knobs than the pin's
        with configure(rule=[{**PIN, "use": "lib:graph"}]):
            assert graph.explain(device="cpu").selected == "lib:graph@1/eng3"


def test_a_saved_decision_names_a_measured_member(graph, family, monkeypatch, tmp_path):
    from cudnn_core import _planner

    with family(), configure(disable=["lib:slow"]):
        dists = found(graph).ranked[0].candidate.entry.environment()
        best = Sample("lib:graph@1", member("eng7", "X=1"), 5.0, 3, 0.0, dists=dists)
        monkeypatch.setattr(_planner, "tuning_record", lambda *_: TuningRecord(graph.key(), {}, {}, (best,)))
        plan = graph.plan(device="cpu")
        plan.save(tmp_path / "a.plan")
        assert json.loads(plan.decision.to_json())["selected"] == "lib:graph@1/eng7"
        assert cudnn_core.Plan.load(tmp_path / "a.plan").config == member("eng7", "X=1")

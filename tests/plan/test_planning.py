"""Planning: who takes part, who wins and why; configuration, pins, notes, knobs and failures."""

from __future__ import annotations

import logging
import sys

import pytest

import cudnn_core
from cudnn_core import (
    BuildError,
    Decline,
    Declined,
    DeviceInfo,
    Dim,
    Estimate,
    ExecutionError,
    Graph,
    GraphError,
    NoEngineError,
    PlanConfig,
    Support,
    configure,
)
from cudnn_core.testing import temporary_plugin

F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}


class Plan:
    def __init__(self, workspace=0):
        self.workspace_size = workspace

    def execute(self, pack, ctx):
        pass


class Engine:
    """Accepts everything; class attributes say how."""

    knobs: dict = {}
    workspace: int | None = 0
    notes = None
    fails = None
    variants = ("",)

    def check_support(self, graph, ctx):
        configs = tuple(PlanConfig("", self.knobs, variant) for variant in self.variants)
        return Support(configs, self.workspace, self.notes)

    def build_plan(self, graph, config, ctx):
        if self.fails:
            raise self.fails
        self.built = config
        type(self).last = config
        return Plan(self.workspace or 0)


def engine(**fields):
    return type("E", (Engine,), fields)


def manifest(*engines, plugin="two"):
    base = {"ops": ["*"], "anchors": ["*"], "devices": ["cpu", "cuda"]}
    return {"plugin": plugin, "engine": [{**base, **fields} for fields in engines]}


@pytest.fixture
def graph():
    g = Graph(**F32)
    g.relu(g.tensor(dim=(4, 4), name="x")).set_output(True).set_name("y")
    return g


@pytest.fixture
def two():
    """two:fast (efficiency 0.7) and two:slow (0.3)."""
    fast, slow = engine(), engine()
    knobs = {"tile": {"type": "int", "choices": [64, 128]}}
    table = manifest(
        {"name": "fast", "efficiency": 0.7, "knobs": knobs, "aot": True}, {"name": "slow", "efficiency": 0.3}
    )
    with temporary_plugin(table, {"fast": fast, "slow": slow}, isolated=True):
        yield fast, slow


def states(decision):
    return {row.id.partition("@")[0]: row.state for row in decision.engines}


def reasons(decision, short_id):
    row = next(row for row in decision.engines if row.id.startswith(short_id))
    return [reason.code for reason in row.reasons]


def test_evidence_decides_and_every_engine_has_a_state(graph, two):
    decision = graph.explain(device="cpu")
    assert decision.selected == "two:fast@1"
    assert states(decision) == {"two:fast": "selected", "two:slow": "outranked"}
    assert reasons(decision, "two:slow") == ["rank.slower"]
    assert decision.graph_key == graph.key()


def test_explain_builds_nothing_and_plan_builds_only_the_winner(graph):
    built = []

    class Noting(Engine):
        def build_plan(self, graph, config, ctx):
            built.append(config.engine)
            return Plan()

    table = manifest({"name": "a", "efficiency": 0.7}, {"name": "b", "efficiency": 0.3})
    with temporary_plugin(table, {"a": Noting, "b": Noting}, isolated=True):
        graph.explain(device="cpu")
        assert built == []
        graph.plan(device="cpu")
        assert built == ["two:a@1"]


def test_the_decision_is_logged_at_info(graph, two, caplog):
    with caplog.at_level(logging.INFO, logger="cudnn_core"):
        graph.plan(device="cpu")
    assert "two:fast@1" in caplog.text


def test_disabled_by_configuration_with_its_origin(graph, two):
    with configure(disable=["two:fast"]):
        decision = graph.plan(device="cpu").decision
    assert decision.selected == "two:slow@1"
    row = next(row for row in decision.engines if row.id == "two:fast@1")
    assert (row.state, row.reasons[0].code) == ("disabled", "config.disabled")
    assert "configure" in row.reasons[0].origin


def test_order_prefers_and_pins_prefer_more(graph, two):
    with configure(order=["two:slow"]):
        assert graph.explain(device="cpu").selected == "two:slow@1"
    with configure(order=["two:fast"], rule=[{"match": {"op": "relu"}, "use": "two:slow"}]):
        assert graph.explain(device="cpu").selected == "two:slow@1"
    with configure(rule=[{"match": {"op": "matmul"}, "use": "two:slow"}]):
        assert graph.explain(device="cpu").selected == "two:fast@1"


def test_a_rule_avoids_with_its_reason(graph, two):
    with configure(rule=[{"match": {"op": "relu"}, "avoid": ["two:fast"], "reason": "ticket 7"}]):
        decision = graph.explain(device="cpu")
    row = next(row for row in decision.engines if row.id == "two:fast@1")
    assert (row.state, row.reasons[0].code, row.reasons[0].hint) == ("disabled", "config.avoided", "ticket 7")


def test_a_strict_pin_that_declines_raises_and_a_soft_one_falls_back(graph):
    class Declining(Engine):
        def check_support(self, graph, ctx):
            return Declined((Decline("shape.range", "x"),))

    table = manifest({"name": "a"}, {"name": "b"})
    rule = {"match": {"op": "relu"}, "use": "two:a"}
    with temporary_plugin(table, {"a": Declining, "b": Engine}, isolated=True):
        with configure(rule=[rule]):
            assert graph.plan(device="cpu").engine == "two:b@1"
        with configure(rule=[rule], strict=True), pytest.raises(NoEngineError, match=r"shape\.range") as caught:
            graph.plan(device="cpu")
    assert states(caught.value.decision) == {"two:a": "declined", "two:b": "disabled"}
    assert reasons(caught.value.decision, "two:b") == ["config.pinned_elsewhere"]


def test_rules_match_named_sizes_and_types():
    g = Graph(**F32)
    a, b = g.tensor(dim=(1, 32, 64)), g.tensor(dim=(1, 64, 16))
    g.matmul(a, b).set_output(True)
    table = manifest({"name": "a", "efficiency": 0.7}, {"name": "b", "efficiency": 0.3})

    def chosen(**match):
        with configure(rule=[{"match": {"op": "matmul", **match}, "use": "two:b"}]):
            return g.explain(device="cpu").selected

    with temporary_plugin(table, {"a": Engine, "b": Engine}, isolated=True):
        assert chosen(m="..32", k=64, dtype={"A": "float32"}) == "two:b@1"
        assert chosen(m="..31") == "two:a@1"
        assert chosen(dtype={"A": "bfloat16"}) == "two:a@1"


def test_required_notes_and_the_workspace_limit_decline(graph):
    table = manifest(
        {"name": "a", "notes": ["deterministic"]}, {"name": "b"}, {"name": "c", "notes": ["deterministic"]}
    )
    with temporary_plugin(table, {"a": engine(workspace=4096), "b": Engine, "c": Engine}, isolated=True):
        with configure(require=["deterministic"], max_workspace="1 KiB"):
            decision = graph.plan(device="cpu").decision
    assert decision.selected == "two:c@1"
    assert states(decision) == {"two:a": "declined", "two:b": "declined", "two:c": "selected"}
    assert reasons(decision, "two:a") == ["resource.workspace"]
    assert reasons(decision, "two:b") == ["policy.note_missing"]


def test_a_workspace_limit_that_only_the_built_plan_breaks(graph):
    class Late(Engine):
        def check_support(self, graph, ctx):
            return Support((PlanConfig("", {}),), None)

        def build_plan(self, graph, config, ctx):
            return Plan(10_000)

    table = manifest({"name": "a", "efficiency": 0.8}, {"name": "b", "efficiency": 0.1})
    with temporary_plugin(table, {"a": Late, "b": Engine}, isolated=True), configure(max_workspace=1000):
        plan = graph.plan(device="cpu")
    assert plan.engine == "two:b@1"
    assert states(plan.decision)["two:a"] == "build_failed"
    assert reasons(plan.decision, "two:a") == ["resource.workspace"]


def test_knobs_are_completed_and_configured_ones_win(graph, two):
    fast, _ = two
    assert graph.plan(device="cpu").knobs == {"tile": 64}
    with configure(knobs={"two:fast": {"tile": 128}}):
        plan = graph.plan(device="cpu")
    assert plan.knobs == {"tile": 128}
    assert fast.last.knobs == {"tile": 128}
    assert fast.last.engine == "two:fast@1"


def test_a_rules_knobs_are_for_its_engine(graph, two):
    with configure(rule=[{"match": {"op": "relu"}, "use": "two:fast", "knobs": {"tile": 128}}]):
        assert graph.plan(device="cpu").knobs == {"tile": 128}


def test_a_build_failure_is_recorded_and_the_next_engine_serves(graph):
    table = manifest({"name": "a", "efficiency": 0.8}, {"name": "b", "efficiency": 0.1})
    failing = engine(fails=BuildError("nvcc said no"))
    with temporary_plugin(table, {"a": failing, "b": Engine}, isolated=True):
        plan = graph.plan(device="cpu")
        assert plan.engine == "two:b@1"
        row = next(row for row in plan.decision.engines if row.id == "two:a@1")
        assert (row.state, row.reasons[0].code) == ("build_failed", "build.failed")
        assert "nvcc said no" in str(row.reasons[0])
        assert cudnn_core.registry().find("two:a").state == "eligible"  # a failure is no bug


@pytest.mark.parametrize("where", ["check_support", "build_plan", "constructor"])
def test_an_exception_quarantines_the_engine_and_costs_only_itself(graph, where, caplog):
    class Broken(Engine):
        def __init__(self):
            if where == "constructor":
                raise RuntimeError("boom")

        def check_support(self, graph, ctx):
            if where == "check_support":
                raise RuntimeError("boom")
            return super().check_support(graph, ctx)

        def build_plan(self, graph, config, ctx):
            raise RuntimeError("boom")

    table = manifest({"name": "a", "efficiency": 0.8}, {"name": "b", "efficiency": 0.1})
    with temporary_plugin(table, {"a": Broken, "b": Engine}, isolated=True):
        plan = graph.plan(device="cpu")
        assert plan.engine == "two:b@1"
        entry = cudnn_core.registry().find("two:a")
        assert entry.state == "quarantined"
        assert entry.reasons[0].code == "plugin.broken"
        assert "boom" in entry.failure.traceback
        assert states(graph.explain(device="cpu"))["two:a"] == "quarantined"
        with configure(strict=True), pytest.raises(cudnn_core.CudnnCoreError):
            graph2 = Graph(**F32)
            graph2.tanh(graph2.tensor(dim=(4, 4))).set_output(True)
            table2 = manifest({"name": "c"}, plugin="three")
            with temporary_plugin(table2, {"c": Broken}, isolated=True):
                graph2.plan(device="cpu")


GARBAGE = [None, True, [], "yes", Declined(()), Declined(("no",)), Support(()), Support((PlanConfig("", {}),) * 9),
           Support((PlanConfig("other:engine@1", {}),)), Support((PlanConfig("", None),)), Support(("x",)),
           Support((PlanConfig("", {}, "v9"),)), Support((PlanConfig("", {}),), -5)]  # fmt: skip


@pytest.mark.parametrize("verdict", GARBAGE, ids=map(repr, GARBAGE))
def test_a_garbage_verdict_quarantines(graph, verdict, caplog):
    class Garbage(Engine):
        def check_support(self, graph, ctx):
            return verdict

    table = manifest({"name": "a"}, {"name": "b"})
    with temporary_plugin(table, {"a": Garbage, "b": Engine}, isolated=True):
        decision = graph.plan(device="cpu").decision
    assert (decision.selected, states(decision)["two:a"]) == ("two:b@1", "quarantined")
    assert reasons(decision, "two:a") == ["plugin.broken"]


@pytest.mark.parametrize("garbage", [None, object(), type("P", (), {"workspace_size": -1, "execute": print})(),
                                     type("P", (), {"workspace_size": "1", "execute": print})()])  # fmt: skip
def test_a_garbage_plan_is_a_build_failure(graph, garbage):
    class Garbage(Engine):
        def build_plan(self, graph, config, ctx):
            return garbage

    table = manifest({"name": "a", "efficiency": 0.8}, {"name": "b", "efficiency": 0.1})
    with temporary_plugin(table, {"a": Garbage, "b": Engine}, isolated=True):
        plan = graph.plan(device="cpu")
    assert (plan.engine, states(plan.decision)["two:a"]) == ("two:b@1", "build_failed")


def test_an_engine_that_mutates_the_graph_is_quarantined(graph, caplog):
    class Mutating(Engine):
        def check_support(self, graph, ctx):
            graph.nodes[0].attrs["negative_slope"] = 1.0

    table = manifest({"name": "a"}, {"name": "b"})
    with temporary_plugin(table, {"a": Mutating, "b": Engine}, isolated=True):
        key = graph.key()
        assert graph.plan(device="cpu").engine == "two:b@1"
        assert graph.key() == key


def test_an_estimate_that_raises_quarantines(graph, caplog):
    class Odd(Engine):
        def estimate(self, graph, config, ctx):
            raise ValueError("no idea")

    with temporary_plugin(manifest({"name": "a"}, {"name": "b"}), {"a": Odd, "b": Engine}, isolated=True):
        decision = graph.plan(device="cpu").decision
    assert (decision.selected, states(decision)["two:a"]) == ("two:b@1", "quarantined")
    assert reasons(decision, "two:a") == ["plugin.broken"]


class Unprintable(Exception):
    def __str__(self):
        raise ZeroDivisionError


SOUND = Support((PlanConfig("", {}),), 0)
MISBEHAVIOUR = {
    "check_support exits": {"check_support": lambda self, g, c: sys.exit(3)},
    "an exception without text": {"check_support": lambda self, g, c: raise_(Unprintable())},
    "a cancelled task": {"check_support": lambda self, g, c: raise_(GeneratorExit())},
    "notes are a number": {"check_support": lambda self, g, c: SOUND._replace(notes=5)},
    "notes are a string": {"check_support": lambda self, g, c: SOUND._replace(notes="deterministic")},
    "a note is a number": {"check_support": lambda self, g, c: SOUND._replace(notes=frozenset({1}))},
    "a knob's name is a number": {"check_support": lambda self, g, c: Support((PlanConfig("", {1: 2}),))},
    "a variant is None": {"check_support": lambda self, g, c: Support((PlanConfig("", {}, None),))},
    "workspace is True": {"check_support": lambda self, g, c: SOUND._replace(workspace=True)},
    "reasons are a number": {"check_support": lambda self, g, c: Declined(5)},
    "reasons are exhausted": {"check_support": lambda self, g, c: Declined(r for r in ())},
    "estimate exits": {"estimate": lambda self, g, c, x: sys.exit(3)},
    "estimate is no method": {"estimate": 5},
    "estimate is no estimate": {"estimate": lambda self, g, c, x: 5},
    "a time is a string": {"estimate": lambda self, g, c, x: Estimate("1")},
    "a time is nan": {"estimate": lambda self, g, c, x: Estimate(float("nan"))},
    "a time is beyond floats": {"estimate": lambda self, g, c, x: Estimate(10**400)},
    "a basis is made up": {"estimate": lambda self, g, c, x: Estimate(1.0, "measured")},
    "a calibration is a number": {"estimate": lambda self, g, c, x: Estimate(1.0, "model", 5)},
    "build_plan exits": {"build_plan": lambda self, g, c, x: sys.exit(3)},
    "build_plan can't say why": {"build_plan": lambda self, g, c, x: raise_(BuildError(Unprintable()))},
    "bind raises when looked at": {"build_plan": lambda self, g, c, x: plan_with(bind=property(lambda plan: 1 / 0))},
    "bind is no method": {"build_plan": lambda self, g, c, x: plan_with(bind=5)},
    "serialize is no method": {"build_plan": lambda self, g, c, x: plan_with(serialize=5)},
    "artifacts are a number": {"build_plan": lambda self, g, c, x: plan_with(artifacts=5)},
}


def raise_(error):
    raise error


def plan_with(**fields):
    return type("P", (Plan,), fields)()


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_whatever_an_engine_answers_costs_only_itself(graph, name, caplog):
    table = manifest({"name": "a", "efficiency": 0.8}, {"name": "b", "efficiency": 0.1})
    with temporary_plugin(table, {"a": engine(**MISBEHAVIOUR[name]), "b": Engine}, isolated=True):
        plan = graph.plan(device="cpu")
    assert plan.engine == "two:b@1"
    assert states(plan.decision)["two:a"] in ("quarantined", "build_failed")
    assert set(reasons(plan.decision, "two:a")) <= {"plugin.broken", "build.failed"}
    assert cudnn_core.Decision.from_json(plan.decision.to_json()) == plan.decision


@pytest.mark.parametrize(
    "bind", [lambda self, layout: 1 / 0, lambda self, layout: None, lambda self, layout: sys.exit(3)]
)
def test_a_bind_that_fails_is_an_execution_error(graph, bind):
    bad = engine(build_plan=lambda self, g, c, x: plan_with(bind=bind))
    with temporary_plugin(manifest({"name": "a"}), {"a": bad}, isolated=True):
        plan = graph.plan(device="cpu")
        with pytest.raises(ExecutionError, match="two:a@1"):
            plan.execute({"x": 1 << 20, "y": 1 << 21})


def test_failures_are_told_to_the_hooks_once_with_stage_and_traceback(graph, caplog):
    told = []

    class Hooks:
        def cudnn_core_engine_failed(self, failure):
            told.append((failure.engine, failure.stage, failure.decline.code, "boom" in failure.traceback))

    def boom(self, *args):
        raise RuntimeError("boom")

    stages = {
        "import": "__init__",
        "check_support": "check_support",
        "estimate": "estimate",
        "build_plan": "build_plan",
    }
    for stage, method in stages.items():
        told.clear()
        factories = {"a": engine(**{method: boom}), "b": Engine}
        table = manifest({"name": "a", "efficiency": 0.8}, {"name": "b", "efficiency": 0.1})
        with temporary_plugin(table, factories, hooks=[Hooks()], isolated=True):
            for _ in range(2):
                assert graph.plan(device="cpu").engine == "two:b@1"
        assert told == [("two:a@1", stage, "plugin.broken", True)]
    told.clear()
    with temporary_plugin(
        manifest({"name": "a"}), {"a": engine(fails=BuildError("boom"))}, hooks=[Hooks()], isolated=True
    ):
        with pytest.raises(NoEngineError):
            graph.plan(device="cpu")
    assert told == [("two:a@1", "build_plan", "build.failed", True)]


def test_an_absent_device_is_explained_as_present_and_planned_by_aot_engines_only(graph, two):
    b200 = DeviceInfo.preset("B200")
    assert states(graph.explain(device=b200)) == {"two:fast": "selected", "two:slow": "outranked"}
    decision = graph.plan(device=b200).decision
    assert states(decision) == {"two:fast": "selected", "two:slow": "declined"}
    assert reasons(decision, "two:slow") == ["device.absent"]


def test_planning_for_a_described_device_never_asks_the_driver(graph, two):
    from cudnn_core._driver import PoisonedDriver, use_driver

    with use_driver(PoisonedDriver()):
        info = DeviceInfo.from_json(DeviceInfo.preset("H200").to_json())
        graph.explain(device=info)
        assert graph.plan(device="H200").device.synthetic


def test_the_build_scope_follows_the_plans_device(graph):
    from cudnn_core._context import build_target

    seen = []

    class Looking(Engine):
        def check_support(self, graph, ctx):
            seen.append(build_target().device_name)
            return super().check_support(graph, ctx)

        def build_plan(self, graph, config, ctx):
            seen.append(build_target().device_name)
            return Plan()

    with temporary_plugin(manifest({"name": "a", "aot": True}), {"a": Looking}, isolated=True):
        graph.plan(device="B200")
    assert seen == ["NVIDIA B200"] * 2


def test_hints_are_recorded_checked_and_used():
    g = Graph(**F32)
    g.relu(g.tensor(dim=(Dim("m", max=4096), 8), name="x")).set_output(True)
    seen = []

    class Sizing(Engine):
        def estimate(self, graph, config, ctx):
            seen.append(graph.tensors[0].dim)

    with temporary_plugin(manifest({"name": "a"}), {"a": Sizing}, isolated=True):
        decision = g.explain(device="cpu", hint={"m": 100})
        assert ("hint.m", 100) in [(source.key, source.value) for source in decision.config]
        g.explain(device="cpu")
        with pytest.raises(ExecutionError, match="no Dim 'n'"):
            g.explain(device="cpu", hint={"n": 5})
        with pytest.raises(ExecutionError, match="outside"):
            g.explain(device="cpu", hint={"m": 5000})
    assert seen == [(100, 8), (64, 8)]


def test_variants_are_ranked_disabled_and_pinned_by_name(graph):
    table = manifest({"name": "graph", "variants": "eng[0-9]+"})
    family = engine(variants=("eng3", "eng7"))
    with temporary_plugin(table, {"graph": family}, isolated=True):
        assert graph.explain(device="cpu").selected == "two:graph@1/eng3"
        with configure(disable=["two:graph/eng3"]):
            plan = graph.plan(device="cpu")
            assert (plan.variant, plan.decision.selected) == ("eng7", "two:graph@1/eng7")
        with configure(rule=[{"match": {"op": "relu"}, "use": "two:graph/eng7"}]):
            assert graph.plan(device="cpu").variant == "eng7"
        with configure(disable=["two:graph/eng3", "two:graph/eng7"]):
            decision = graph.explain(device="cpu")
        assert (decision.selected, states(decision)["two:graph"]) == (None, "disabled")


def test_the_order_is_total_and_repeatable(graph, two):
    digests = {graph.explain(device="cpu").digest for _ in range(3)}
    twin = Graph(**F32)
    twin.relu(twin.tensor(dim=(4, 4), name="other", uid=77)).set_output(True)
    digests.add(twin.explain(device="cpu").digest)
    assert len(digests) == 1


def test_where_messages_and_files_go_is_no_part_of_a_decision(graph, two, tmp_path, caplog):
    digest = graph.explain(device="cpu").digest
    with configure(log="info", cache_dir=tmp_path):
        assert graph.explain(device="cpu").digest == digest
    with configure(order=["two:fast"]):
        assert graph.explain(device="cpu").digest != digest  # what decides is recorded, even where it changes nothing


def test_a_reference_plan_on_a_gpu_warns_once_with_the_nearest_decline(graph):
    class NotToday(Engine):
        def check_support(self, graph, ctx):
            return Declined((Decline("dtype.unsupported", "x", ["bfloat16"], "float32"),))

    table = manifest({"name": "ref", "tier": "reference", "aot": True}, {"name": "gpu", "aot": True}, plugin="warned")
    with temporary_plugin(table, {"ref": Engine, "gpu": NotToday}, isolated=True):
        with pytest.warns(RuntimeWarning, match=r"warned:ref.*dtype\.unsupported"):
            graph.plan(device="B200")
        twin = Graph(**F32)
        twin.tanh(twin.tensor(dim=(4, 4))).set_output(True)
        twin.plan(device="B200")  # warnings are errors: a second one would raise


# --- the classic list of plans
def test_the_plan_list_holds_every_engine_and_config_best_first(graph):
    class Two(Engine):
        def check_support(self, graph, ctx):
            return Support((PlanConfig("", {"tile": 128}), PlanConfig("", {"tile": 64})))

    knobs = {"tile": {"type": "int", "choices": [64, 128]}}
    table = manifest({"name": "a", "efficiency": 0.7, "knobs": knobs}, {"name": "b", "efficiency": 0.3})
    with temporary_plugin(table, {"a": Two, "b": Engine}, isolated=True):
        graph.create_execution_plans()
        names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
        assert names == ["two:a@1[tile=128]", "two:a@1[tile=64]", "two:b@1"]
        graph.select_plan(1).build_plans()
        assert graph.selected_plan.knobs == {"tile": 64}


def test_deselect_takes_exact_names_and_globs_never_substrings(graph, two):
    graph.create_execution_plans()
    with pytest.warns(cudnn_core.ConfigWarning) as caught:
        graph.deselect_engines(["fast", "two:fas", "nobody:*"])
    assert [str(warning.message).partition(";")[0] for warning in caught] == [
        "deselect_engines: 'fast' covers no installed engine (did you mean 'two:fast'?)",
        "deselect_engines: 'two:fas' covers no installed engine (did you mean 'two:fast'?)",
        "deselect_engines: 'nobody:*' covers no installed engine",
    ]
    assert {warning.filename for warning in caught} == {__file__}
    graph.build_plans()
    assert graph.selected_plan.engine == "two:fast@1"


def test_deselecting_what_nobody_has_is_an_error_in_a_strict_configuration(graph, two):
    with configure(strict=True):
        graph.deselect_engines(["two:slow@1"])
        with pytest.raises(GraphError, match="eng0"):
            graph.deselect_engines(["eng0"])


def test_a_pin_that_can_not_be_honoured_is_told(graph, caplog):
    class Refuses(Engine):
        def check_support(self, graph, ctx):
            return Declined((Decline("shape.range", "x"),))

    with temporary_plugin(manifest({"name": "a"}, {"name": "b"}), {"a": Refuses, "b": engine()}, isolated=True):
        with configure(rule=[{"match": {"op": "relu"}, "use": "two:a"}]):
            decision = graph.explain(device="cpu")
            (note,) = next(row.reasons for row in decision.engines if row.state == "selected")
            assert (note.code, note.expected, note.origin) == ("config.pinned_elsewhere", "two:a", "configure()")
            assert "two:a" in str(decision).partition("two:b")[2]
            assert [record.levelname for record in caplog.records if "pins two:a" in record.message] == ["WARNING"]
        with configure(rule=[{"match": {"op": "relu"}, "use": "two:a", "strict": True}]):
            with pytest.raises(NoEngineError) as caught:
                graph.plan(device="cpu")
        first = str(caught.value).splitlines()[0]
        assert first == "configure(): the pinned engine two:a can't run the graph: shape.range x"


def test_explain_says_which_engines_do_not_build_for_a_device_that_is_only_described(graph, two):
    decision = graph.explain(device="B200")
    assert decision.selected == "two:fast@1"  # aot
    assert reasons(decision, "two:fast") == []
    assert reasons(decision, "two:slow") == ["rank.slower", "device.absent"]
    graph.deselect_engines(["two:fast"])
    decision = graph.explain(device="B200")
    assert decision.selected == "two:slow@1"
    assert reasons(decision, "two:slow") == ["device.absent"]
    assert "aot = false" in str(decision)
    with pytest.raises(NoEngineError, match="aot = false"):
        graph.plan(device="B200")


@pytest.mark.parametrize("settings", [{"engine": {"two:fast": {"knobs": {"tiel": 64}}}},
                                      {"rule": [{"match": {"op": "relu"}, "use": "two:fast", "knobs": {"tiel": 64}}]}])  # fmt: skip
def test_a_knob_that_the_engine_does_not_have_is_warned_of(graph, two, settings):
    with pytest.warns(cudnn_core.ConfigWarning, match="tiel.*tile"), configure(**settings):
        graph.explain(device="cpu")
    with pytest.raises(cudnn_core.ConfigError, match="tiel"), configure(**settings, strict=True):
        pass


def test_deselecting_everything_says_so(graph, two):
    graph.create_execution_plans()
    graph.deselect_engines(["two:*"])
    with pytest.raises(NoEngineError, match="deselected"):
        graph.check_support()


def test_a_replayed_choice_is_rechecked_and_honoured_exactly(graph, two):
    graph.create_execution_plan("two:fast@1", {"tile": 128})
    graph.build_plans()
    assert (graph.selected_plan.engine, graph.selected_plan.knobs) == ("two:fast@1", {"tile": 128})
    name, knobs = graph.get_engine_and_knobs_at_index(graph.get_execution_plan_count() - 1)
    assert (name, knobs) == ("two:fast@1", {"tile": 128})


@pytest.mark.parametrize(
    ("engine_id", "knobs", "match"),
    [("two:fast@1", {"tile": 96}, "knob.domain"), ("two:fast@1", {"tiel": 64}, "knob.unknown"),
     ("two:fast@1", {"tile": "64"}, "knob.type"), ("two:fats", {}, "did you mean"), ("two:fast@2", {}, "revision 1"),
     ("elsewhere:x", {}, "not installed")],
)  # fmt: skip
def test_a_replay_that_can_not_be_honoured_is_an_error(graph, two, engine_id, knobs, match):
    with pytest.raises(cudnn_core.CudnnCoreError, match=match):
        graph.create_execution_plan(engine_id, knobs)
    graph.build()  # the graph stays usable


def test_execution_never_compiles(graph, two):
    graph.build()
    other = next(i for i in range(graph.get_execution_plan_count()) if i != 0)
    with pytest.raises(ExecutionError, match="not built"):
        graph.execute_plan_at_index({"x": 1 << 20, "y": 1 << 21}, index=other)
    graph.build_plan_at_index(other)
    graph.execute_plan_at_index({"x": 1 << 20, "y": 1 << 21}, index=other)


KNOBS = {"tile": {"type": "int", "choices": [64, 128]}}
TWO_CONFIGS = Support((PlanConfig("", {"tile": 64}), PlanConfig("", {"tile": 128})))


@pytest.mark.parametrize("way", ["plan", "classic"])
@pytest.mark.parametrize(
    ("fails", "used"), [(BuildError("not at 64"), ("two:a@1", 128)), (ValueError("crash"), ("two:b@1", 0))]
)
def test_a_failing_config_gives_way_to_the_next_and_a_broken_engine_to_the_next_engine(graph, way, fails, used, caplog):
    class Picky(Engine):
        def check_support(self, graph, ctx):
            return TWO_CONFIGS

        def build_plan(self, graph, config, ctx):
            if config.knobs["tile"] == 64:
                raise fails
            return Plan()

    table = manifest({"name": "a", "efficiency": 0.8, "knobs": KNOBS}, {"name": "b", "efficiency": 0.1})
    with temporary_plugin(table, {"a": Picky, "b": Engine}, isolated=True):
        if way == "plan":
            plan = graph.plan(device="cpu")
        else:
            graph.build()
            plan = graph.selected_plan
    assert (plan.engine, plan.knobs.get("tile", 0)) == used
    assert plan.decision.selected == plan.engine
    assert reasons(plan.decision, "two:a") == ["build.failed" if used[1] else "plugin.broken"]


def test_an_engine_that_breaks_between_survey_and_build_gives_way(graph, caplog):
    class Late(Engine):
        def build_plan(self, graph, config, ctx):
            raise ValueError("crash")

    table = manifest({"name": "a", "efficiency": 0.8}, {"name": "b", "efficiency": 0.1})
    with temporary_plugin(table, {"a": Late, "b": Engine}, isolated=True):
        graph.create_execution_plans()
        twin = Graph(**F32)
        twin.tanh(twin.tensor(dim=(2, 2))).set_output(True)
        twin.plan(device="cpu")
        graph.build_plans()
        assert graph.selected_plan.engine == "two:b@1"


@pytest.mark.parametrize("support", [None, 16, 4096], ids=["unknown", "a lie", "true"])
def test_a_call_s_workspace_limit_holds_for_every_plan(graph, support):
    greedy = engine(
        check_support=lambda self, g, c: Support((PlanConfig("", {}),), support),
        build_plan=lambda self, g, c, x: Plan(4096),
    )
    table = manifest({"name": "a", "efficiency": 0.8}, {"name": "b", "efficiency": 0.1})
    with temporary_plugin(table, {"a": greedy, "b": Engine}, isolated=True):
        graph.deselect_workspace_greater_than(1024)
        plan = graph.plan(device="cpu")
        assert (plan.engine, reasons(plan.decision, "two:a")) == ("two:b@1", ["resource.workspace"])
        graph.build()
        assert graph.selected_plan.engine == "two:b@1"


def test_a_build_error_that_mentions_workspace_is_a_build_failure(graph):
    failing = engine(fails=BuildError("ptxas: 3 bytes of workspace directive unknown"))
    table = manifest({"name": "a", "efficiency": 0.8}, {"name": "b", "efficiency": 0.1})
    with temporary_plugin(table, {"a": failing, "b": Engine}, isolated=True):
        assert reasons(graph.plan(device="cpu").decision, "two:a") == ["build.failed"]


def test_a_pinned_plans_record_says_that_the_others_were_not_asked(graph, two):
    graph.create_execution_plan("two:slow")
    graph.build_plans()
    decision = graph.selected_plan.decision
    assert (decision.selected, reasons(decision, "two:fast")) == ("two:slow@1", ["config.pinned_elsewhere"])


def test_a_pinned_plan_that_is_deselected_is_refused(graph, two):
    graph.create_execution_plans()
    graph.select_plan(0)
    graph.deselect_engines(["two:fast"])
    with pytest.raises(NoEngineError, match="deselected"):
        graph.build_plans()


def test_a_variant_that_an_engine_does_not_have_or_may_not_use_is_refused(graph, two):
    with pytest.raises(cudnn_core.EngineLookupError, match="no variant 'eng7'"):
        graph.create_execution_plan("two:fast@1/eng7")
    table = manifest({"name": "graph", "variants": "eng[0-9]+"})
    with temporary_plugin(table, {"graph": engine(variants=("eng3",))}, isolated=True):
        with configure(disable=["two:graph/eng7"]), pytest.raises(NoEngineError, match=r"config\.disabled"):
            graph.create_execution_plan("two:graph/eng7")
        graph.create_execution_plan("two:graph/eng7").build_plans()
        assert graph.selected_plan.decision.selected == "two:graph@1/eng7"


BAD_ARGUMENTS = {
    "hint": lambda g: g.plan(device="cpu", hint=[1]),
    "hint value": lambda g: g.explain(device="cpu", hint={"m": "64"}),
    "heuristics": lambda g: g.create_execution_plans(5),
    "engine id": lambda g: g.create_execution_plan(5),
    "knobs": lambda g: g.create_execution_plan("two:fast", [1]),
    "engines": lambda g: g.deselect_engines([5]),
    "engines as text": lambda g: g.deselect_engines("two:fast"),
    "no engines": lambda g: g.deselect_engines(5),
    "workspace": lambda g: g.deselect_workspace_greater_than("a"),
    "notes": lambda g: g.select_behavior_notes(5),
    "a note": lambda g: g.deselect_numeric_notes([5]),
    "save": lambda g: g.plan(device="cpu").save(None),
    "load": lambda g: cudnn_core.Plan.load(None),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_an_argument_of_the_wrong_type_is_a_typed_error(two, name):
    g = Graph(**F32)
    g.relu(g.tensor(dim=(Dim("m", max=64), 4))).set_output(True)
    with pytest.raises(cudnn_core.GraphError):
        BAD_ARGUMENTS[name](g)
    g.build()


def static(**flags):
    g = Graph(**F32, **flags)
    g.relu(g.tensor(dim=(4, 6), name="x", uid=7)).set_output(True).set_name("y")
    g.build()
    return g


def test_static_plans_take_the_frontends_flags_and_overrides_that_say_what_is_declared(two):
    g = static(is_dynamic_shape_enabled=True, is_override_shape_enabled=True)
    pack = {"x": 1 << 20, "y": 1 << 21}
    g.execute(pack)
    g.execute(pack, override_uids=[7], override_shapes=[[4, 6]], override_strides=[[6, 1]])
    g.execute(pack, override_uids=[7], override_shapes=[(4, 6)])
    assert g.get_workspace_size(None, [7], [[4, 6]], [[6, 1]]) == 0
    for shape, stride in (([2, 6], [6, 1]), ([4, 6], [1, 4])):
        with pytest.raises(ExecutionError, match=r"x.*declare .*Dim"):
            g.execute(pack, override_uids=[7], override_shapes=[shape], override_strides=[stride])
        with pytest.raises(ExecutionError, match="declare"):
            g.get_workspace_size(None, [7], [shape], [stride])


def test_overrides_give_runtime_sizes_and_strides_that_follow(two):
    g = Graph(**F32)
    g.relu(g.tensor(dim=(Dim("m", max=64), 6), name="x", uid=7)).set_output(True).set_name("y")
    g.build()
    pack = {"x": 1 << 20, "y": 1 << 21}
    g.execute(pack, override_uids=[7], override_shapes=[[5, 6]], override_strides=[[6, 1]])
    with pytest.raises(ExecutionError, match="strides"):
        g.execute(pack, override_uids=[7], override_shapes=[[5, 6]], override_strides=[[1, 5]])


@pytest.mark.parametrize(
    "overrides",
    [{"override_uids": 7}, {"override_uids": ["x"], "override_shapes": [[4, 6]]},
     {"override_uids": [9], "override_shapes": [[4, 6]]}, {"override_uids": [7], "override_shapes": [5]},
     {"override_uids": [7], "override_shapes": [["a", 6]]}, {"override_uids": [7]}, {"override_strides": 5},
     {"override_uids": [7], "override_shapes": [[4, 6]], "override_strides": [[6, 1], None]},
     {"tensor_uids": [[1]]}, {"tensor_uids": 5}],
)  # fmt: skip
def test_garbage_in_overrides_is_a_typed_error(two, overrides):
    operands = (1 << 20,) if "tensor_uids" in overrides else {"x": 1 << 20, "y": 1 << 21}
    with pytest.raises((ExecutionError, cudnn_core.GraphError)):
        static().execute(operands, **overrides)


def test_uids_may_come_from_a_generator(two):
    g = static()
    y = g.find_tensor("y").get_uid()
    g.execute([1 << 20, 1 << 21], tensor_uids=(uid for uid in (7, y)))

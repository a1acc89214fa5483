"""Planning: who takes part, who wins and why; configuration, pins, notes, knobs and failures."""

from __future__ import annotations

import logging

import pytest

import cudnn_core
from cudnn_core import (
    BuildError,
    Decline,
    Declined,
    DeviceInfo,
    Dim,
    ExecutionError,
    Graph,
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


def test_a_misbehaving_estimate_costs_only_the_estimate(graph, caplog):
    class Odd(Engine):
        def estimate(self, graph, config, ctx):
            raise ValueError("no idea")

    with temporary_plugin(manifest({"name": "a"}), {"a": Odd}, isolated=True):
        assert graph.plan(device="cpu").engine == "two:a@1"


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
    graph.deselect_engines(["fast", "two:fas"])
    graph.build_plans()
    assert graph.selected_plan.engine == "two:fast@1"


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
        graph.execute_plan_at_index({"x": 256, "y": 4096}, index=other)
    graph.build_plan_at_index(other)
    graph.execute_plan_at_index({"x": 256, "y": 4096}, index=other)

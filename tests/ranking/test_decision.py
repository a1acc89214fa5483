"""The decision record: its JSON, what a saved one must satisfy, its table, the nearest miss, replay."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_core._decision import STATES, Decision, DecisionError, EngineDecision, nearest_decline, nearest_miss
from cudnn_core._declines import CATALOGUE, Decline
from cudnn_core._device import DeviceInfo
from cudnn_core._engine import PlanConfig
from cudnn_core._errors import CudnnCoreError

KEY = "ab" * 32
H200 = DeviceInfo.preset("H200").to_dict()
SLOWER = Decline("rank.slower", "", None, "frost_gemm:sm90_wgmma@3")


def engines():
    return [
        EngineDecision(
            "acme_gemm", "acme-gemm", "0.2", "quarantined", reasons=(Decline("api.too_new", "", "at most 1.4", "1.9"),)
        ),
        EngineDecision(
            "frost_gemm:sm100_umma@1", "cudnn-core-frost-gemm", "0.1.0", "filtered",
            reasons=(
                Decline("device.sm_variant", "device", ("100f",), "90a"),
                Decline("shape.multiple_of", "K", {"multiple_of": 8}, 1027),
                Decline("dtype.unsupported", "A", ["float16"], "bfloat16"),
            ),
        ),
        EngineDecision(
            "cudnn_backend:eng@1/eng7", "cudnn-core-backend", "0.1.0", "outranked", 2, 13.14, "measured",
            PlanConfig("cudnn_backend:eng@1", {}, "eng7"), None, (SLOWER,),
        ),
        EngineDecision(
            "frost_gemm:sm90_wgmma@3", "cudnn-core-frost-gemm", "0.1.0", "selected", 1, 11.8, "measured",
            PlanConfig("frost_gemm:sm90_wgmma@3", {"tile_m": 64}), 4096,
        ),
    ]  # fmt: skip


CONFIG = [("engines.disable", ["x:*"], "/etc/cudnn_core/config.toml:3"), ("strict", True, "env:CUDNN_CORE_STRICT")]


def decision(rows=None, **more):
    return Decision(KEY, H200, engines() if rows is None else rows, CONFIG, **more)


def declined(name, *reasons, state="declined"):
    return EngineDecision(name, state=state, reasons=tuple(reasons))


def signed(change):
    """A decision's JSON after ``change(dict)``, with the digest that belongs to it."""
    record = json.loads(decision().to_json())
    change(record)
    record.pop("digest", None)
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return json.dumps({**record, "digest": hashlib.sha256(text.encode()).hexdigest()})


# --- JSON


def test_the_json_has_exactly_the_fields_of_the_contract():
    record = json.loads(decision().to_json())
    assert set(record) == {"schema", "graph_key", "device", "selected", "engines", "config", "digest"}
    assert record["schema"] == 1
    assert record["selected"] == "frost_gemm:sm90_wgmma@3"
    fields = {"id", "dist", "version", "state", "rank", "us", "basis", "config", "workspace", "reasons", "notes"}
    assert all(set(row) == fields for row in record["engines"])
    assert set(record["engines"][-1]["reasons"][0]) == {"code", "subject", "expected", "actual", "hint", "origin"}
    assert record["config"][0] == dict(zip(("key", "value", "origin"), CONFIG[0], strict=True))


def test_the_digest_is_sha256_of_the_canonical_json_without_it():
    record = json.loads(decision().to_json())
    claimed = record.pop("digest")
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    assert claimed == hashlib.sha256(text.encode()).hexdigest() == decision().digest


def test_a_record_survives_the_round_trip():
    again = Decision.from_json(decision().to_json())
    assert again == decision()
    assert again.engines == decision().engines
    assert again.config == decision().config
    assert again.to_json() == decision().to_json()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_DECLINES = st.builds(
    Decline, st.sampled_from(sorted(CATALOGUE)) | st.just("x.acme.odd"), st.text(), _JSON, _JSON, st.text(), st.text()
)
_ROWS = st.builds(
    EngineDecision,
    st.text(min_size=1),
    st.text(),
    st.text(),
    st.sampled_from([state for state in STATES if state != "selected"]),
    st.none(),
    st.none() | st.floats(1e-6, 1e9),
    st.sampled_from(["measured", "model", "prior"]),
    st.none() | st.builds(PlanConfig, st.text(min_size=1), st.dictionaries(st.text(), _JSON, max_size=2), st.text()),
    st.none() | st.integers(0),
    st.lists(_DECLINES, min_size=1, max_size=3).map(tuple),
    st.none() | st.lists(st.text(), max_size=3).map(tuple),
)


@given(st.lists(_ROWS, max_size=4), st.data())
def test_any_record_round_trips_and_does_not_depend_on_the_input_order(rows, data):
    first = Decision(KEY, H200, rows)
    assert Decision.from_json(first.to_json()) == first
    if len({row[:3] for row in rows}) == len(rows):
        assert Decision(KEY, H200, data.draw(st.permutations(rows))).digest == first.digest
    str(first)
    nearest_miss(first)
    assert all(line.isprintable() for line in first.table(verbose=True).split("\n"))


def test_facts_that_json_cannot_say_are_kept_as_text():
    odd = Decline("dtype.unsupported", "A", {float("inf"), 1.0}, object)
    (row,) = Decision(KEY, H200, [declined("p:e@1", odd)]).engines
    assert row.reasons[0].expected == ("inf", 1.0)
    assert row.reasons[0].actual == str(object)


def test_notes_are_in_the_record_the_table_and_a_replay():
    def made(*notes):
        *others, winner = engines()
        rows = [others[2]._replace(notes=("cuda_graph",)), winner._replace(notes=notes)]
        return Decision(KEY, H200, [*others[:2], *rows])

    now = made("ran_on_h200", "approximate_math")
    rows = {row["id"]: row["notes"] for row in json.loads(now.to_json())["engines"]}
    assert rows["frost_gemm:sm90_wgmma@3"] == ["approximate_math", "ran_on_h200"]
    assert rows["frost_gemm:sm100_umma@1"] is None
    assert now == made("approximate_math", "ran_on_h200")
    (line,) = [line for line in now.table().splitlines() if "notes: " in line]
    assert line.startswith("* frost_gemm:sm90_wgmma@3")
    assert line.endswith("notes: approximate_math, ran_on_h200")
    verbose = now.table(verbose=True)
    assert "\n      notes: approximate_math, ran_on_h200\n" in verbose
    assert "\n      notes: cuda_graph\n" in verbose
    (difference,) = made("emulated_only").replay(now)
    assert difference[:2] == ("frost_gemm:sm90_wgmma@3", "notes")


def test_no_part_of_a_record_can_be_changed_and_it_can_be_copied():
    odd = Decline("dtype.unsupported", "A", {"max": [1]}, None)
    row = declined("p:e@1", odd)._replace(config=PlanConfig("p:e@1", {"tile": 64}, ""))
    made = Decision(KEY, H200, [row], [("rule[0]", {"match": {"op": "relu"}}, "f:1")])
    for part in (
        made.device,
        made.engines[0].config.knobs,
        made.engines[0].reasons[0].expected,
        made.config[0].value["match"],
    ):
        with pytest.raises(TypeError, match="immutable"):
            part["new"] = 1
        with pytest.raises(TypeError, match="immutable"):
            part.update(new=1)
    for twin in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (twin, twin.to_json()) == (made, made.to_json())


@pytest.mark.parametrize("garbage", ["no", ("bogus.code", "", None, None, "", ""), None, Decline("made.up")])
def test_a_reason_that_the_protocol_forbids_costs_only_its_engine(garbage):
    made = Decision(KEY, H200, [*engines(), declined("bad:e@1", garbage)])
    (bad,) = [row for row in made.engines if row.id == "bad:e@1"]
    assert bad.reasons[0].code == "plugin.broken"
    assert Decision.from_json(made.to_json()).selected == "frost_gemm:sm90_wgmma@3"


def test_a_decision_is_immutable():
    with pytest.raises(AttributeError, match="immutable"):
        decision().selected = None
    assert hash(decision()) == hash(Decision.from_json(decision().to_json()))


def test_no_selected_engine_is_a_decision_too():
    made = Decision(KEY, H200, [declined("p:e@1", SLOWER)])
    assert made.selected is None
    assert json.loads(made.to_json())["selected"] is None


@pytest.mark.parametrize("state", [state for state in STATES if state != "selected"])
def test_every_state_but_selected_carries_reasons(state):
    with pytest.raises(DecisionError, match=f"'p:e@1' is {state} without a reason"):
        Decision(KEY, H200, [EngineDecision("p:e@1", state=state)])


def test_two_winners_are_an_error():
    with pytest.raises(DecisionError, match="selected"):
        Decision(KEY, H200, [EngineDecision("p:e@1", state="selected"), EngineDecision("p:f@1", state="selected")])


# --- foreign and tampered files


def _engine(**changes):
    return lambda record: record["engines"][0].update(changes)


def _reason(**changes):
    return lambda record: record["engines"][-1]["reasons"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda record: record.update(schema=2), "decision.schema: 2"),
        (lambda record: record.update(schema=True), "decision.schema"),
        (lambda record: record.update(graph_key=""), "decision.graph_key"),
        (lambda record: record.update(device=[]), "decision.device"),
        (lambda record: record.update(selected="other:e@1"), "decision.selected"),
        (lambda record: record.update(selected=None), "decision.selected"),
        (lambda record: record.update(engine=[]), "unknown field 'engine' .did you mean 'engines'"),
        (lambda record: record.pop("config"), "field 'config' is missing"),
        (lambda record: record["config"][0].update(line=3), r"config\[0\]: unknown field 'line'"),
        (lambda record: record["config"].append("x"), r"config\[2\]: expected an object"),
        (_engine(state="chosen"), r"engines\[0\].state: expected one of quarantined"),
        (_engine(rank=0), r"engines\[0\].rank"),
        (_engine(rank=True), r"engines\[0\].rank"),
        (_engine(us="1"), r"engines\[0\].us"),
        (_engine(us=-1.0), r"engines\[0\].us"),
        (_engine(basis="guess"), r"engines\[0\].basis"),
        (_engine(basis=None), r"engines\[0\].basis: a time without a basis"),
        (_engine(workspace=-1), r"engines\[0\].workspace"),
        (_engine(config={"engine": "e", "knobs": {}}), r"engines\[0\].config: the field 'variant' is missing"),
        (_engine(id=None), r"engines\[0\].id"),
        (_engine(rank=2), "same rank"),
        (lambda record: record["engines"][1].update(reasons=[]), "without a reason"),
        (lambda record: record["engines"].reverse(), "order"),
        (_reason(code="dtype.unsuported"), "did you mean 'dtype.unsupported'"),
        (_reason(code=7), r"reasons\[0\].code"),
        (_reason(subject=None), r"reasons\[0\].subject"),
        (_reason(because="x"), "unknown field 'because'"),
    ],
)
def test_a_saved_decision_is_validated_field_by_field(change, names):
    with pytest.raises(DecisionError, match=names):
        Decision.from_json(signed(change))


def test_an_unchanged_record_passes_the_helper_of_these_tests():
    assert Decision.from_json(signed(lambda record: None)) == decision()


@pytest.mark.parametrize("at", range(40, 2000, 97))
def test_any_changed_byte_is_noticed(at):
    text = decision().to_json()
    at %= len(text)
    changed = text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]
    with pytest.raises(DecisionError):
        Decision.from_json(changed)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", b"\xff\xfe", '{"schema":1', '{"schema":1,"schema":1}', "[" * 100_000, '{"us":NaN}', '{"us":1e999}',
        "9" * 10_000,
    ],
    ids=range(10),
)  # fmt: skip
def test_what_is_no_json_record_raises_the_typed_error(text):
    with pytest.raises(DecisionError, match="not a decision record"):
        Decision.from_json(text)
    assert issubclass(DecisionError, CudnnCoreError)


def test_a_huge_file_is_refused_before_it_is_parsed():
    with pytest.raises(DecisionError, match="larger than"):
        Decision.from_json(" " * (17 << 20))


# --- table

HEADER = "matmul bfloat16 m=64 n=4096 k=4096"


def test_the_table_reads_like_this():
    assert str(decision(summary=HEADER)).splitlines() == [
        "matmul bfloat16 m=64 n=4096 k=4096 | NVIDIA H200 sm_90a | config 1 file, 1 env",
        "* frost_gemm:sm90_wgmma@3   11.8 us  measured  selected",
        "  cudnn_backend:eng@1/eng7  13.1 us  measured  outranked    rank.slower: frost_gemm:sm90_wgmma@3",
        "  frost_gemm:sm100_umma@1         -            filtered     device.sm_variant device: needs 100f, got 90a +2 more",
        "  acme_gemm                       -            quarantined  api.too_new: needs at most 1.4, got 1.9  (dist acme-gemm 0.2)",
    ]


def test_a_verbose_table_unfolds_every_reason_and_names_the_distributions():
    lines = decision().table(verbose=True).splitlines()
    assert "      shape.multiple_of K: needs multiple_of 8, got 1027" in lines
    assert "      dtype.unsupported A: needs float16, got bfloat16" in lines
    assert lines[1].endswith("selected     (dist cudnn-core-frost-gemm 0.1.0)")
    assert "more" not in decision().table(verbose=True)


def test_a_saved_decision_is_headed_by_its_graph_key():
    assert str(Decision.from_json(decision().to_json())).startswith(f"graph {KEY[:12]} | NVIDIA H200 sm_90a | ")


def test_control_and_direction_characters_are_escaped():
    evil = declined("p\x1b[2J:e\n@1", Decline("shape.range", "K\r", "\u202e", "a\tb", origin="/tmp/\x00x:1"))
    table = Decision(KEY, {"type": "cuda", "device_name": "N\x07"}, [evil], summary="a\nb").table()
    assert table.isprintable() or all(line.isprintable() for line in table.split("\n"))
    assert len(table.split("\n")) == 2
    assert "p\\x1b[2J:e\\n@1" in table
    assert "\\u202e" in table
    assert "a\\nb | N\\x07" in table


def test_a_device_that_no_one_knows_is_named_as_it_is():
    assert "| Odd |" in str(Decision(KEY, {"device_name": "Odd", "compute_capability": "x"}, []))


def test_a_long_reason_is_cut_in_the_table_and_whole_when_verbose():
    made = Decision(KEY, H200, [declined("p:e@1", Decline("plugin.broken", "", None, "x" * 500))])
    assert "x" * 200 not in str(made)
    assert "x" * 500 in made.table(verbose=True)


def test_the_header_counts_files_variables_and_calls():
    config = [
        ("a", 1, "/etc/c.toml:1"), ("b", 1, "/etc/c.toml:9"), ("c", 1, "/home/d.toml"), ("d", 1, "env:CUDNN_CORE_STRICT"),
        ("e", 1, "configure()"), ("f", 1, "built-in"),
    ]  # fmt: skip
    assert str(Decision(KEY, H200, [], config)).splitlines()[0].endswith("config 2 files, 1 env, 1 call")
    assert str(Decision(KEY, H200, [])).splitlines()[0].endswith("config built-in")


# --- nearest miss

K8 = Decline("shape.multiple_of", "K", {"multiple_of": 8}, 1027)
SM = Decline("device.sm_too_low", "device", "100", "90a")
TYPE = Decline("device.type", "device", ["cuda"], "cpu")


def test_the_error_text_leads_with_the_engine_that_lacks_least():
    made = decision([declined("a:far@1", K8, SM, TYPE), declined("b:near@1", K8)], summary=HEADER)
    assert nearest_miss(made).splitlines()[0] == (
        "no engine can run matmul bfloat16 m=64 n=4096 k=4096 on NVIDIA H200 sm_90a; the nearest miss is b:near@1 (declined): "
        "shape.multiple_of K: needs multiple_of 8, got 1027"
    )


def test_equal_reasons_of_several_engines_are_one_line():
    made = decision([declined(f"{name}:e@1", K8) for name in "abcde"] + [declined("z:e@1", SM, K8)])
    assert nearest_miss(made).splitlines()[1:] == [
        "  6 engines: shape.multiple_of K: needs multiple_of 8, got 1027  (a:e@1, b:e@1, c:e@1 +3 more)",
        "  1 engine: device.sm_too_low device: needs 100, got 90a  (z:e@1)",
    ]


def test_an_engine_for_other_operations_is_never_the_nearest_miss():
    other = declined("a:conv@1", Decline("op.anchor", "", ["conv_fprop"]), state="filtered")
    assert "nearest miss is b:gemm@1" in nearest_miss(decision([other, declined("b:gemm@1", K8, SM)]))


def test_with_no_engine_installed_the_text_is_the_pip_line():
    assert nearest_miss(decision([])).endswith("no engine is installed; try `pip install cudnn-core[cpu]`")
    assert "pip install cudnn-core[cpu]" in str(decision([]))


def test_a_long_list_of_reasons_is_cut_with_a_count():
    rows = [declined(f"p:e{i}@1", Decline("shape.range", "K", i, 0)) for i in range(12)]
    assert (
        nearest_miss(decision(rows)).splitlines()[-1]
        == "  +4 more reasons; `cudnn-core explain --verbose` prints them all"
    )
    assert len(nearest_miss(decision(rows), verbose=True).splitlines()) == 13


def test_the_folded_table_cuts_a_reason_and_never_its_origin():
    origin = f"/srv/{'a' * 200}/site.toml:5"
    long = Decline("config.avoided", "a:e", ["x" * 40] * 9, origin=origin)
    line = decision([declined("a:e@1", long, K8)]).table().splitlines()[1]
    assert line.endswith(f"... [{origin}] +1 more")
    short = decision([declined("a:e@1", long._replace(expected=None), K8)]).table()
    assert f"config.avoided a:e [{origin}] +1 more" in short  # how long a path is changes nothing else


def test_the_nearest_decline_is_one_line_about_engines_that_cannot_run_the_graph():
    rows = [EngineDecision("a:ref@1", state="selected"), declined("c:ref@1", SLOWER, state="outranked")]
    assert "pip install" in nearest_decline(decision(rows))
    rows.append(declined("b:near@1", K8))
    assert nearest_decline(decision(rows)) == "b:near@1 (declined): shape.multiple_of K: needs multiple_of 8, got 1027"


# --- replay


def test_a_replay_of_an_unchanged_decision_finds_nothing():
    assert Decision.from_json(decision().to_json()).replay(decision()) == ()


def test_a_replay_names_what_changed():
    rows = engines()
    rows[2] = rows[2]._replace(state="selected", rank=1, reasons=())
    rows[3] = rows[3]._replace(
        state="disabled", rank=None, reasons=(Decline("config.disabled", "frost_gemm:sm90_wgmma"),)
    )
    rows.append(declined("new:e@1", K8))
    found = {(item.engine, item.field): (item.saved, item.now) for item in decision().replay(decision(rows))}
    assert found[("", "selected")] == ("frost_gemm:sm90_wgmma@3", "cudnn_backend:eng@1/eng7")
    assert found[("frost_gemm:sm90_wgmma@3", "state")] == ("selected", "disabled")
    assert found[("new:e@1", "state")] == (None, "declined")
    assert ("frost_gemm:sm100_umma@1", "state") not in found


def test_a_replay_against_another_graph_or_device_is_refused():
    with pytest.raises(DecisionError, match="another graph"):
        decision().replay(Decision("cd" * 32, H200, engines(), CONFIG))
    with pytest.raises(DecisionError, match="another device"):
        decision().replay(Decision(KEY, {"type": "cpu"}, engines(), CONFIG))


def test_a_decision_of_another_cpu_of_the_same_name_can_be_compared():
    def on(**facts):
        return Decision(KEY, {**DeviceInfo.preset("H200").to_dict(), "type": "cpu", "device_name": "Epyc", **facts}, ())

    assert on(sm_count=64).replay(on(sm_count=8)) == ()
    with pytest.raises(DecisionError) as caught:
        on().replay(on(device_name="Xeon"))
    assert str(caught.value).startswith("the saved decision is of another device: Epyc")
    assert "Xeon" in str(caught.value)
    assert len(str(caught.value)) < 120


def test_two_gpus_of_one_name_are_told_apart_by_what_differs():
    other = {**H200, "sm_count": 100}
    with pytest.raises(DecisionError, match=r"NVIDIA H200.* with sm_count 132, not sm_count 100$"):
        decision().replay(Decision(KEY, other, engines(), CONFIG))


def test_a_replay_sees_a_changed_configuration():
    (found,) = decision().replay(Decision(KEY, H200, engines(), CONFIG[:1]))
    assert (found.engine, found.field) == ("", "config")

"""``cudnn-core explain``: the table, devices, saved and replayed decisions, files that can't be used."""

from __future__ import annotations

import io
import json

import pytest

import cudnn_core
from cudnn_core import Decision, Dim

from .conftest import AddEngine


def test_explain_prints_every_engine(cli, graph_file, engines):
    with engines(one={}, two={"devices": ["cuda"]}):
        code, out, _ = cli("explain", graph_file())
    assert code == 0
    lines = out.splitlines()
    assert lines[1].startswith("* one:add@1")
    assert "device.type" in lines[2]


def test_the_json_is_the_decision_record(cli, graph_file, engines):
    file = graph_file()
    with engines(one={}):
        _, out, _ = cli("explain", file, "--json")
        expected = cudnn_core.Graph.from_json(file.read_text()).explain()
    assert Decision.from_json(out) == expected


def test_notes_of_the_graphs_plans_are_shown_and_else_the_manifests(cli, cli_json, graph_file, engines):
    class Noting(AddEngine):
        def check_support(self, graph, ctx):
            return super().check_support(graph, ctx)._replace(notes=frozenset({"approximate_math", "emulated_only"}))

    with engines(one={"base": Noting, "notes": ["deterministic"]}, two={"notes": ["cuda_graph"], "efficiency": 0.1}):
        _, out, _ = cli("explain", graph_file())
        _, document = cli_json("explain", graph_file())
    assert out.splitlines()[1].endswith("notes: approximate_math, emulated_only")
    notes = {row["id"]: row["notes"] for row in document["engines"]}
    assert notes == {"one:add@1": ["approximate_math", "emulated_only"], "two:add@1": ["cuda_graph"]}


def test_no_engine_is_a_finding_with_the_nearest_miss(cli, graph_file, engines):
    with engines(one={"dtypes": ["float64"]}):
        code, out, _ = cli("explain", graph_file())
    assert code == 1
    assert "the nearest miss is one:add@1" in out
    assert "dtype.unsupported" in out


@pytest.mark.parametrize("device", ["H200", "h200.json"])
def test_a_described_device_counts_as_present(cli_json, graph_file, engines, machine, device):
    (machine / "work" / "h200.json").write_text(cudnn_core.DeviceInfo.preset("H200").to_json())
    with engines(one={"devices": ["cuda"], "sm": ["90a"]}):
        code, document = cli_json("explain", graph_file(), "--device", device)
    assert code == 0
    assert document["selected"] == "one:add@1"
    assert document["device"]["compute_capability"] == [9, 0]


@pytest.mark.parametrize(("device", "code"), [("H2000", 2), ("nowhere/h200.json", 2), ("bad.json", 2), ("7", 3)])
def test_a_device_that_can_not_be_had(cli, graph_file, machine, device, code):
    (machine / "work" / "bad.json").write_text('{"type": "cuda"}')
    with cudnn_core._driver.use_driver(None):
        status, out, err = cli("explain", graph_file(), "--device", device)
    assert (status, out) == (code, "")
    assert device in err or "CUDA device 7" in err


def test_a_replay_is_the_same_until_something_changes(cli, cli_json, graph_file, engines, configure):
    file = graph_file()
    with engines(one={}, two={}):
        assert cli("explain", file, "--save", "decision.json")[0] == 0
        code, out, _ = cli("explain", file, "--replay", "decision.json")
        assert code == 0
        assert "the same as the saved decision" in out
        configure('[engines]\ndisable = ["one:add"]\n')
        code, out, _ = cli("explain", file, "--replay", "decision.json")
        _, document = cli_json("explain", file, "--replay", "decision.json")
    assert code == 1
    assert "differs: selected: one:add@1 then, two:add@1 now" in out
    assert document["same"] is False
    assert {"engine": "", "field": "selected", "saved": "one:add@1", "now": "two:add@1"} in document["differences"]


def test_a_replay_is_for_the_saved_device(cli, graph_file, engines):
    file = graph_file()
    with engines(one={"devices": ["cuda"], "sm": ["100f"]}):
        assert cli("explain", file, "--device", "B200", "--save", "decision.json")[0] == 0
        assert cli("explain", file, "--replay", "decision.json")[0] == 0
        code, _, err = cli("explain", file, "--replay", "decision.json", "--device", "H200")
    assert code == 2
    assert "another device" in err


def test_a_decline_by_the_configuration_says_where_it_was_set(cli_json, graph_file, engines, configure):
    class Needy:
        def check_support(self, graph, ctx):
            return cudnn_core.Support((cudnn_core.PlanConfig("", {}),), workspace=100)

        def build_plan(self, graph, config, ctx):
            raise NotImplementedError

    def reasons(settings):
        with engines(one={}, two={}, needy={"base": Needy}):
            configure(settings)
            rows = cli_json("explain", graph_file())[1]["engines"]
        return {row["id"].partition(":")[0]: row["reasons"] for row in rows}

    (found,) = reasons("[engines]\nmax_workspace = 10\n")["needy"]
    assert (found["code"], found["origin"][-13:]) == ("resource.workspace", "config.toml:3")
    found = reasons('[engines]\nrequire = ["deterministic"]\n')["one"][0]
    assert (found["code"], found["origin"][-13:]) == ("policy.note_missing", "config.toml:3")
    (found,) = reasons('[engines]\norder = ["two:*"]\n')["one"]
    assert (found["code"], found["subject"], found["origin"][-13:]) == ("rank.slower", "order", "config.toml:3")
    (found,) = reasons('[[rule]]\nmatch = { op = "add" }\nuse = "two:add"\n')["one"]
    assert (found["hint"], found["origin"][-13:]) == ("a rule pins it", "config.toml:2")


@pytest.mark.parametrize("damage", ["truncate", "tamper", "foreign"])
def test_a_damaged_decision_is_a_usage_error(cli, graph_file, engines, machine, damage):
    file, saved = graph_file(), machine / "work" / "decision.json"
    with engines(one={}):
        cli("explain", file, "--save", saved)
        text = saved.read_text()
        changed = {"truncate": text[:-40], "tamper": text.replace("one:add@1", "two:add@1"), "foreign": "{}"}[damage]
        saved.write_text(changed)
        code, out, err = cli("explain", file, "--replay", saved)
    assert (code, out) == (2, "")
    assert "decision" in err


def test_a_graph_of_another_shape_is_no_replay(cli, graph_file, engines):
    with engines(one={}):
        cli("explain", graph_file(), "--save", "decision.json")
        other = graph_file(lambda g: g.add(g.tensor((2, 2)), g.tensor((2, 2))).set_output(True), name="other.json")
        code, _, err = cli("explain", other, "--replay", "decision.json")
    assert code == 2
    assert "another graph" in err


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"schema": 1, "bogus": 2}', '{"schema": 1, "tensors": [], "nodes": []}']
)
def test_a_malformed_graph_is_named(cli, machine, text):
    (machine / "work" / "bad.json").write_text(text)
    code, out, err = cli("explain", "bad.json")
    assert (code, out) == (2, "")
    assert err.startswith("cudnn-core: error: graph bad.json: ")


def test_a_file_that_is_no_text(cli, machine):
    (machine / "work" / "bad.json").write_bytes(b"\xff\xfe")
    code, _, err = cli("explain", "bad.json")
    assert code == 2
    assert "not UTF-8" in err


def test_a_graph_comes_from_standard_input(cli, graph_file, engines, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(graph_file().read_text()))
    with engines(one={}):
        assert cli("explain", "-")[0] == 0


def test_runtime_sizes_are_given_by_name(cli, cli_json, graph_file, engines):
    file = graph_file(lambda g: g.add(g.tensor((Dim("n", 1, 64),)), g.tensor((Dim("n", 1, 64),))).set_output(True))
    with engines(one={}):
        _, document = cli_json("explain", file, "--size", "n=5")
        assert {"key": "hint.n", "value": 5} in [{k: row[k] for k in ("key", "value")} for row in document["config"]]
        for wrong in ("n=65", "m=5", "n", "n=x"):
            code, _, err = cli("explain", file, "--size", wrong)
            assert code == 2, wrong
            assert "--size" in err


def test_names_can_not_forge_lines(cli, graph_file, machine):
    document = json.loads(graph_file().read_text())
    document["name"] = "a\nb"
    for tensor in document["tensors"]:
        tensor["data_type"] = "float99\n\x1b[31m"
    (machine / "work" / "evil.json").write_text(json.dumps(document))
    code, _, err = cli("explain", "evil.json")
    assert code == 2
    assert "\x1b" not in err

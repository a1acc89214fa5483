"""The benchmark's cases, its judge and its table, on the CPU with the reference engine in our place."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("benchmarks._la_cases")

import torch

import cudnn_core
from benchmarks import _la_measure as measuring
from benchmarks import _la_peers, _watched
from benchmarks import linear_attention as benchmark
from benchmarks._la_cases import CASES, Decode, Forward, Measured, chosen
from benchmarks._la_ours import Ours, engine_of
from benchmarks._la_reference import error, sampled
from benchmarks._results import OtherRunError, ResultFile

REFERENCE = "torch_reference:eager"
SMALL = [
    Forward("gdn", 2, 70, 2, 4, size=64),
    Forward("kda", 1, 70, 2, 4, size=64),
    Decode("gdn", 3, "fp32", heads=2, size=64),
    Decode("kda", 3, "bf16", heads=2, size=64),
]


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setattr(Decode, "sets", property(lambda case: 3))


@pytest.mark.parametrize(
    ("case", "milliseconds"),
    [
        (Forward("gdn", 1, 8192, 16, 16), 0.032),
        (Forward("gdn", 1, 32768, 32, 32), 0.252),
        (Forward("gdn", 1, 32768, 16, 64), 0.442),
        (Forward("kda", 1, 32768, 32, 32), 0.376),
        (Forward("kda", 1, 32768, 64, 64), 0.751),
        (Decode("gdn", 64, "fp32"), 0.063),
        (Decode("kda", 256, "fp32"), 0.251),
        (Decode("kda", 256, "bf16"), 0.126),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_floors(case, milliseconds):
    assert case.floor_us / 1e3 == pytest.approx(milliseconds, rel=0.02)


def test_states_in_rotation_exceed_the_cache(monkeypatch):
    monkeypatch.undo()
    for case in CASES:
        if isinstance(case, Decode):
            assert case.sets * case.state_bytes >= 120 << 20, case.name
            assert case.sets >= 2


def test_cases_are_found_by_name():
    assert len({case.name for case in CASES}) == len(CASES) == 19
    assert [case.name for case in chosen(["gdn forward"], quick=False)] == [case.name for case in CASES[:5]]
    assert {case.name for case in chosen(["batch 64 bf16"], quick=True)} == {
        f"{op} decode batch 64 bf16" for op in ("gdn", "kda")
    }
    assert {case.op for case in chosen([], quick=True)} == {"gdn", "kda"}
    assert len(chosen([], quick=True)) == 4
    assert engine_of(CASES[0]) == "linear_attention:gdn_sm90"
    assert engine_of(CASES[-1]) == "linear_attention:kda_decode"


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_judge_accepts_what_is_right_and_nothing_else(case):
    x = case.operands("strong", "cpu")
    ours, judge = Ours(case, x, REFERENCE), measuring.Judge(case, x)
    for i in range(case.sets if isinstance(case, Decode) else 1):
        ours(i)
    assert judge.ours(ours) < 4e-3
    assert judge.ours(ours) < 4e-3  # states of a pool are put back
    x["v"].mul_(1.25)
    assert judge.ours(ours) > 2e-2
    x["v"].div_(1.25)
    ours._runs[0] = (lambda *launch: None, ours._runs[0][1])
    assert judge.ours(ours) == float("inf") or isinstance(case, Decode)
    assert judge.ours(ours) > 0.1


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_front_door_does_the_same(case):
    x = case.operands("weak", "cpu")
    ours = Ours(case, x, REFERENCE)
    o = measuring.Judge(case, x).peer(ours.front_door())
    assert o < 4e-3


def test_an_engine_that_declines_is_said(monkeypatch):
    monkeypatch.setattr(Forward, "operands", lambda case, gates: {})

    def declines(case, x):
        raise cudnn_core.NoEngineError("no engine")

    monkeypatch.setattr(measuring, "Ours", declines)
    found = measuring.measure(SMALL[0], "weak", frozenset(), 1)
    assert found.measured is None
    assert found.notes == [f"{SMALL[0].name}, weak gates: ours declined: no engine"]


def test_blocks_of_the_recurrence_are_joined():
    """Two halves, the second from the state of the first, are the whole."""
    case = Forward("kda", 1, 30, 1, 1, size=64)
    x = case.operands("weak", "cpu")
    whole = sampled(case, x)
    from benchmarks._la_reference import recurrence

    q, k, v, alpha, beta = (torch.randn(1, 30, 2, 8, dtype=torch.float64) for _ in range(5))
    alpha, beta = alpha.sigmoid(), beta[..., 0].sigmoid()
    o, state = recurrence(q, k, v, alpha, beta, torch.zeros(1, 2, 8, 8, dtype=torch.float64))
    first, half = recurrence(*(t[:, :11] for t in (q, k, v, alpha, beta)), torch.zeros_like(state))
    second, end = recurrence(*(t[:, 11:] for t in (q, k, v, alpha, beta)), half)
    assert torch.allclose(torch.cat((first, second), 1), o)
    assert torch.allclose(end, state)
    assert whole["O"].shape == (1, 30, 1, 64)


def test_errors_of_the_last_tokens_count_by_themselves():
    want = torch.ones(1, 1000, 2, dtype=torch.float64)
    found = want.clone()
    found[:, -64:] += 0.1
    assert error(found, want) == pytest.approx(0.1)
    assert error(torch.full_like(want, torch.nan), want) == float("inf")


def test_peers_that_are_absent_are_named_with_the_reason(monkeypatch):
    def broken(case, x):
        yield "a", lambda i: (None, None)
        yield "b", lambda i: 1 / 0

    def absent(case, x):
        raise ImportError("no module named fla\nmore")
        yield

    monkeypatch.setattr(_la_peers, "_MAKERS", {"one": broken, "two": absent, "three": absent})
    found, missing = _la_peers.peers(SMALL[0], SMALL[0].operands("weak", "cpu"), frozenset({"three"}))
    assert list(found) == ["a"]
    assert missing == {"b": "ZeroDivisionError: division by zero", "two": "ImportError: no module named fla"}


def _measured(ours, peer, wrong):
    return Measured(
        {"ours": ours, "peer": peer, "wrong": wrong, "empty kernel": 2.0},
        {"ours": ours + 10, "peer": peer + 40, "wrong": wrong + 1, "front door": ours + 50, "empty kernel": 2.0},
        {"ours": 3e-3, "peer": 4e-3, "wrong": 0.3},
    )


def test_rows_compare_with_the_best_peer_that_is_right():
    case = replace(SMALL[0], most_us=105)
    found = benchmark.rows(case, {"strong": _measured(100, 200, 50), "weak": _measured(110, 210, 400)})
    by_name = {(row.case, row.peer_name): row for row in found}
    name = SMALL[0].name
    head = by_name[f"{name}, strong gates", "peer"]
    assert (head.ours, head.peer, head.ok) == (100, 200, True)
    assert by_name[f"{name}, weak gates", "peer"].ok is False
    one = replace(_measured(100, 200, 50), host={"run": 7.0, "driver": 5.0})
    (host,) = (row for row in benchmark.rows(SMALL[2], {"weak": one}) if row.peer_name == "cuLaunchKernelEx")
    assert (host.ours, host.peer, host.ok) == (7.0, 5.0, True)
    assert f"  {name}, strong gates" in {row.case for row in found if row.peer_name == "wrong (wrong)"}
    assert by_name[f"{name}, strong gates, eager", "peer"].peer == 240
    assert by_name[f"  {name}, strong gates, eager", "front door"].peer == 150
    assert by_name[f"  {name}, strong gates", "empty kernel"].peer == 2.0
    assert by_name[f"  {name}, strong gates", "floor"].peer == pytest.approx(SMALL[0].floor_us)
    spread = by_name[f"{name}: slowest / fastest gates", ""]
    assert (spread.ours, spread.ok) == (pytest.approx(1.1), False)
    assert by_name[f"  {name}: slowest / fastest gates", "wrong"].peer == pytest.approx(8.0)


def test_a_wrong_result_has_no_time():
    wrong = replace(_measured(1, 2, 3), errors={"ours": 0.2, "peer": 0.0})
    (row,) = benchmark.rows(SMALL[2], {"weak": wrong})
    assert (row.ours, row.error, row.ok) == (0.0, 0.2, False)
    assert "wrong result" in row.case


def test_a_decode_reports_its_traffic():
    case = Decode("gdn", 64, "fp32")
    found = benchmark.rows(case, {"weak": _measured(70.0, 99.0, 99.0)})
    (traffic,) = (row for row in found if row.unit == "TB/s")
    assert traffic.ours == pytest.approx(case.bytes / 70e6)
    assert not any("slowest" in row.case for row in found)


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["linear_attention.py"])
    assert benchmark.main() == 3


@pytest.fixture
def without_clocks(monkeypatch):
    """Every step but the clocks: on the CPU, with a peer that is right, one that is wrong and one that can't be captured."""

    def clock(calls, *, rounds, step, failed=None):
        for name, call in calls.items():
            step(name)
            if name != "empty kernel":
                call(1)
        if failed is not None:
            failed["late"] = "not permitted"
        return {name: 7.0 + number for number, name in enumerate(calls) if failed is None or name != "late"}

    def fake_peers(case, x, skip, step):
        o = Ours(case, x, REFERENCE)

        def right(i):
            o(0)
            return o.outputs["O"], None

        def breaks(i):
            raise OSError("gone")

        calls = {"right": right, "wrong": lambda i: (torch.zeros_like(x["v"]), None), "late": right, "breaks": breaks}
        return {name: call for name, call in calls.items() if name not in skip}, {"absent": "why"}

    def on_cpu(kind):
        made = kind.operands
        return lambda case, gates: made(case, gates, "cpu")

    cases = [replace(case, size=64) for case in (*SMALL, Decode("gdn", 1, "fp32", heads=2))]
    monkeypatch.setattr(benchmark, "chosen", lambda only, quick: [c for c in cases if not only or c.name in only])
    monkeypatch.setattr(benchmark, "CASES", cases)
    monkeypatch.setattr(measuring, "Ours", lambda case, x: Ours(case, x, REFERENCE))
    monkeypatch.setattr(measuring, "peers", fake_peers)
    monkeypatch.setattr(measuring, "gpu_times", clock)
    monkeypatch.setattr(measuring, "eager_times", clock)
    monkeypatch.setattr(Ours, "host_times", lambda ours: {"run": 6.0, "driver": 5.0})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for kind in (Forward, Decode):
        monkeypatch.setattr(kind, "operands", on_cpu(kind))

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["linear_attention.py", "--peer-seconds", "0", *map(str, arguments)])
        return benchmark.main()

    return run


def test_a_whole_run(without_clocks, capsys):
    assert without_clocks("--json") == 0
    out = capsys.readouterr()
    rows = [json.loads(line) for line in out.out.splitlines()]
    heads = [
        row
        for row in rows
        if not row["case"].startswith(" ") and row["unit"] == "us" and not row["case"].endswith(("eager", "host"))
    ]
    assert len(heads) == 2 * 2 + 3
    assert all(row["peer_name"] == "right" for row in heads)
    assert {row["peer_name"] for row in rows} >= {
        "floor",
        "front door",
        "wrong (wrong)",
        "empty kernel",
        "device copy",
        "cuLaunchKernelEx",
    }
    assert len({row["state"] for row in rows}) == 1
    assert "without absent: why" in out.err
    assert "without breaks: OSError: gone" in out.err
    assert "without late: as a graph: not permitted" in out.err


def test_the_file_has_what_was_measured_before_the_run_ended(without_clocks, tmp_path, monkeypatch):
    real = measuring.measure

    def ends(case, gates, *rest):
        if case.op == "kda":
            raise KeyboardInterrupt
        return real(case, gates, *rest)

    monkeypatch.setattr(measuring, "measure", ends)
    with pytest.raises(KeyboardInterrupt):
        without_clocks("--json", tmp_path / "r.json")
    titles = [record["case"] for record in _records(tmp_path / "r.json")]
    assert f"{SMALL[0].name}, weak gates" in titles
    assert f"{SMALL[0].name}: slowest / fastest gates" in titles
    assert not any("kda" in title for title in titles)


def test_runs_fill_up_a_file(without_clocks, tmp_path, monkeypatch, capsys):
    file = tmp_path / "r.json"
    assert without_clocks("--json", file, "--only", SMALL[1].name, SMALL[2].name) == 0
    before = _records(file)
    assert without_clocks("--json", file, "--append", "--only", SMALL[0].name) == 0
    after = _records(file)
    assert [record for record in after if SMALL[0].name not in record["case"]] == before
    assert SMALL[0].name in after[0]["case"], "cases keep their order"
    assert without_clocks("--json", file, "--append", "--only", SMALL[1].name, "--skip-peer", "wrong") == 0
    again = _records(file)
    assert len(again) < len(after)
    assert not any(r["peer_name"] == "wrong (wrong)" for r in again if SMALL[1].name in r["case"])
    monkeypatch.setattr(benchmark, "_state", lambda: "another")
    assert without_clocks("--json", file, "--append") == 2
    assert "results with state" in capsys.readouterr().err
    assert _records(file) == again
    with pytest.raises(SystemExit):
        without_clocks("--append")


def test_a_case_is_no_other_case_with_a_longer_name(tmp_path):
    names = ["gdn decode batch 1", "gdn decode batch 16"]
    file = tmp_path / "r.json"
    rows = [{"case": f"  {name}: x", "machine": "a"} for name in names]
    ResultFile(file, names, {"machine": "a"}, append=False).write(rows)
    ResultFile(file, names, {"machine": "a"}, append=True).write([{"case": "gdn decode batch 1, y", "machine": "a"}])
    assert [record["case"] for record in _records(file)] == ["gdn decode batch 1, y", rows[1]["case"]]
    with pytest.raises(OtherRunError, match="machine 'a', this run has 'b'"):
        ResultFile(file, names, {"machine": "b"}, append=True)


def test_versions_agree_where_both_runs_have_them(tmp_path):
    file = tmp_path / "r.json"
    ResultFile(file, [], {}, append=False).write([{"case": "x", "versions": {"torch": "2", "peer": "1"}}])
    ResultFile(file, [], {"versions": {"torch": "2", "other": "3"}}, append=True)
    with pytest.raises(OtherRunError, match="versions"):
        ResultFile(file, [], {"versions": {"torch": "3"}}, append=True)


def _records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def hangs(count, say):
    """For a process of its own, so a function of this module: work with two steps of which the second hangs."""
    import time

    say("")
    yield "first"
    say("quick")
    yield "second"
    say("slow")
    time.sleep(count)
    yield "never"


def dies(status, say):
    import os

    say("compile")
    yield status
    os._exit(status)


def breaks(text, say):
    yield from ()
    raise ValueError(text)


def test_work_that_hangs_is_stopped():
    found = list(_watched.watched(hangs, (600,), 1.0))
    assert found == ["first", "second", _watched.Stopped("slow", "took longer than 1 s")]
    assert list(_watched.watched(hangs, (0,), 60.0)) == ["first", "second", "never"]
    assert list(_watched.watched(hangs, (0,), 0)) == ["first", "second", "never"]


def test_work_that_dies_or_raises_is_said():
    found = list(_watched.watched(dies, (3,), 60.0))
    assert found == [3, _watched.Stopped("compile", "its process ended with status 3")]
    assert list(_watched.watched(breaks, ("why",), 60.0)) == [_watched.Stopped("", "ValueError: why")]
    with pytest.raises(ValueError, match="why"):
        list(_watched.watched(breaks, ("why",), 0))


def test_a_peer_that_is_late_is_left_out_from_there_on(monkeypatch, capsys):
    """The process is stopped, and another one measures what is left without that peer."""
    asked = []

    def watched(work, arguments, seconds):
        todo, skip, _ = arguments
        asked.append((len(todo), sorted(skip)))
        for number in range(len(todo)):
            if len(todo) - number == 3 and "two" not in skip:
                yield _watched.Stopped("two", f"took longer than {seconds:g} s")
                return
            if len(todo) - number == 1 and len(todo) > 1:
                yield _watched.Stopped("timed rounds", "its process ended with status -11")
                return
            yield measuring.Outcome(_measured(100, 200, 50), ["note"])

    monkeypatch.setattr(benchmark, "watched", watched)
    monkeypatch.setattr(benchmark, "chosen", lambda only, quick: SMALL[:2])
    monkeypatch.setattr("sys.argv", ["linear_attention.py", "--skip-peer", "one", "--peer-seconds", "5"])
    found = list(benchmark._outcomes(benchmark._arguments()))
    assert asked == [(4, ["one"]), (3, ["one", "two"])]
    assert [(case.name, gates) for case, gates, _ in found] == [
        (c.name, g) for c in SMALL[:2] for g in ("strong", "weak")
    ]
    title = f"{SMALL[0].name}, weak gates"
    assert found[1][2].notes == [f"{title}: from here on without two: took longer than 5 s", "note"]
    assert found[3][2].measured is None
    assert "stopped in timed rounds: its process ended with status -11" in found[3][2].notes[0]


def test_steps_of_peers_are_named_before_they_run(monkeypatch):
    said = []

    def make(case, x):
        said.append("made")
        yield "a", lambda i: said.append("ran a")
        yield "b", lambda i: said.append("ran b")

    monkeypatch.setattr(_la_peers, "_MAKERS", {"one": make})
    found, _ = _la_peers.peers(SMALL[0], SMALL[0].operands("weak", "cpu"), frozenset({"b"}), said.append)
    assert list(found) == ["a"]
    assert said == ["one", "made", "a", "ran a", "ran a"]


@pytest.mark.parametrize("gates", ["strong", "weak"])
def test_flashkda_gets_gates_and_beta_before_their_activation(monkeypatch, gates):
    got = {}

    def fwd(q, k, v, g, beta, scale, out, a_log, dt_bias, lower_bound, *, final_state):
        assert -5 <= lower_bound < x["g"].min() or lower_bound == -5
        got.update(g=lower_bound * (a_log.exp()[:, None] * g + dt_bias).sigmoid(), beta=beta.sigmoid(), scale=scale)
        assert g.dtype == beta.dtype == torch.bfloat16
        assert final_state.shape == (1, 2, 64, 64)
        out.copy_(v)

    monkeypatch.setitem(sys.modules, "flash_kda", SimpleNamespace(fwd=fwd))
    case = Forward("kda", 1, 70, 2, 2, size=64)
    x = case.operands(gates, "cpu")
    found, missing = _la_peers.peers(case, x, frozenset({"fla", "cudnn"}))
    assert (list(found), missing) == (["flashkda"], {})
    assert torch.equal(found["flashkda"](0)[0], x["v"])
    assert torch.allclose(got["g"][0], x["g"].clamp(min=-5), rtol=0.03, atol=1e-4)
    assert torch.allclose(got["beta"][0].float(), x["beta"], rtol=0.02)
    assert got["scale"] == 64**-0.5
    assert _la_peers.peers(SMALL[0], SMALL[0].operands("weak", "cpu"), frozenset({"fla", "flashqla"})) == ({}, {})


def test_flashqla_is_a_peer_of_gdn_and_not_what_fla_calls(monkeypatch):
    def chunk(q, k, v, g, beta, *, output_final_state, **options):
        assert output_final_state
        assert q.shape == (2, 70, 2, 64)
        return v, None

    modules = {
        "flash_qla": SimpleNamespace(chunk_gated_delta_rule=chunk),
        "fla.ops.gated_delta_rule": SimpleNamespace(chunk_gated_delta_rule=chunk),
    }
    for name, module in {"fla": SimpleNamespace(), "fla.ops": SimpleNamespace(), **modules}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    case = SMALL[0]
    x = case.operands("weak", "cpu")
    found, missing = _la_peers.peers(case, x)
    assert (list(found), missing) == (["fla chunk", "flashqla"], {})
    assert os.environ["FLA_FLASH_QLA"] == "0"
    assert torch.equal(found["flashqla"](0)[0], x["v"])

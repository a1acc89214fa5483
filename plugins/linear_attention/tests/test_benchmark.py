"""The benchmark's cases, its judge and its table, on the CPU with the reference engine in our place."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("benchmarks._la_cases")

import torch

import cudnn_core
from benchmarks import _la_peers
from benchmarks import linear_attention as benchmark
from benchmarks._la_cases import CASES, Decode, Forward, Measured, chosen
from benchmarks._la_ours import Ours, engine_of
from benchmarks._la_reference import error, sampled

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
    ours, judge = Ours(case, x, REFERENCE), benchmark.Judge(case, x)
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
    o = benchmark.Judge(case, x).peer(ours.front_door())
    assert o < 4e-3


def test_an_engine_that_declines_is_said(capsys, monkeypatch):
    monkeypatch.setattr(Forward, "operands", lambda case, gates: {})

    def declines(case, x):
        raise cudnn_core.NoEngineError("no engine")

    monkeypatch.setattr(benchmark, "Ours", declines)
    assert benchmark.measure(benchmark.Report(table=True), SMALL[0], "weak", frozenset(), 1) is None
    assert "ours declined: no engine" in capsys.readouterr().out


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


def test_a_whole_run(monkeypatch, capsys):
    """Every step but the clocks: on the CPU, with a peer that is right, one that is wrong and one that can't be captured."""

    def clock(calls, *, rounds, failed=None):
        for name, call in calls.items():
            if name != "empty kernel":
                call(1)
        if failed is not None:
            failed["late"] = "not permitted"
        return {name: 7.0 + number for number, name in enumerate(calls) if failed is None or name != "late"}

    def fake_peers(case, x, skip):
        o = Ours(case, x, REFERENCE)

        def right(i):
            o(0)
            return o.outputs["O"], None

        return {"right": right, "wrong": lambda i: (torch.zeros_like(x["v"]), None), "late": right}, {"gone": "why"}

    def on_cpu(kind):
        made = kind.operands
        return lambda case, gates: made(case, gates, "cpu")

    cases = [replace(case, size=64) for case in (*SMALL, Decode("gdn", 1, "fp32", heads=2))]
    monkeypatch.setattr(benchmark, "chosen", lambda only, quick: cases)
    monkeypatch.setattr(benchmark, "Ours", lambda case, x: Ours(case, x, REFERENCE))
    monkeypatch.setattr(benchmark, "peers", fake_peers)
    monkeypatch.setattr(benchmark, "gpu_times", clock)
    monkeypatch.setattr(benchmark, "eager_times", clock)
    monkeypatch.setattr(Ours, "host_times", lambda ours: {"run": 6.0, "driver": 5.0})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for kind in (Forward, Decode):
        monkeypatch.setattr(kind, "operands", on_cpu(kind))
    monkeypatch.setattr("sys.argv", ["linear_attention.py", "--json"])
    assert benchmark.main() == 0
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
    assert "without gone: why" in out.err
    assert "without late: as a graph: not permitted" in out.err

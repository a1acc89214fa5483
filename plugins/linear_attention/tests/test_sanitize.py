"""The sanitizer script: which cases it runs, under what command, and what it says without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import sanitize
import torch
from la_cases import kernels
from linear_attention.problem import Problem
from linear_attention.segments import choose_segments


def test_every_engine_has_cases_that_it_takes():
    found = sanitize.cases()
    assert {case.op for case in found} == set(kernels.ENGINES)
    assert not any(kernels.declined(case) for case in found)
    assert max(sum(case.lengths) for case in found) < 5000
    assert len({case.name for case in found}) == len(found)


@pytest.mark.parametrize("whole", [False, True])
def test_prefills_of_one_sequence_and_of_two_are_cut_into_more_than_two_segments(whole):
    """So that every kernel runs: the first pass, what composes segments, and both launches of the prepare kernel."""
    cut = [case for case in sanitize.cases() if "segments" in case.name]
    assert [(case.op, len(case.lengths)) for case in cut] == [("gdn", 1), ("gdn", 2), ("kda", 1), ("kda", 2)]
    for case in map(sanitize.whole, cut) if whole else cut:
        problem = Problem(case.op, "bfloat16", *case.heads, 128, 128, index_dtype="int32")
        for sms in (78, 114, 132):
            assert choose_segments(problem, sum(case.lengths), len(case.lengths), sms) > 2, (case, sms)


def test_the_command_of_a_tool():
    found = sanitize.command("/bin/cs", "racecheck", ["gdn-d128"])
    assert found[:3] == ["/bin/cs", "--tool", "racecheck"]
    assert found[-4:] == [str(Path(sanitize.__file__).resolve()), "--run", "gdn-d128", "--whole"]
    program = [sys.executable, str(Path(sanitize.__file__).resolve()), "--run", "a", "b"]
    assert sanitize.command("/bin/cs", "", ["a", "b"]) == program
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in sanitize.environment("memcheck")


MEMCHECK, RACECHECK = (
    "========= ERROR SUMMARY: {} errors",
    "========= RACECHECK SUMMARY: {} hazards displayed (0 errors, {} warnings)",
)


@pytest.fixture
def ran(monkeypatch):
    """Processes that end well, but for what a test writes into ``ran.says``: by tool and case, exit status and output."""

    ran = SimpleNamespace(commands=[], says={})

    def fake(command, **options):
        tool = command[2] if "--tool" in command else ""
        names = [word for word in command[command.index("--run") + 1 :] if word != "--whole"]
        ran.commands.append((tool, names))
        code, text = 0, "".join(f"{name}: right, 0.1 s\n" for name in names)
        text += {"": "", "memcheck": MEMCHECK.format(0), "racecheck": RACECHECK.format(0, 0)}[tool]
        for name in names:
            code, text = ran.says.get((tool, name), (code, text))
        if code is None:
            raise subprocess.TimeoutExpired(command, 1, output=text.encode())
        return subprocess.CompletedProcess(command, code, text)

    monkeypatch.setattr(sanitize.subprocess, "run", fake)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: "/bin/cs")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return ran


def test_every_case_runs_alone_under_every_tool_after_all_ran_without(ran, capsys):
    assert sanitize.main(["--jobs", "3"]) == 0
    names = sorted(case.name for case in sanitize.cases())
    assert sorted(name for tool, shares in ran.commands[:3] for name in shares) == names
    assert all(not tool for tool, _ in ran.commands[:3])
    for tool in sanitize.TOOLS:
        assert sorted(of[0] for name, of in ran.commands if name == tool) == names
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["memcheck", "gdn-segments", "0", "findings", "right", "ended,"] in [line[:6] for line in lines]
    assert f"racecheck: {len(names)} cases, 0 not clean" in out


@pytest.mark.parametrize(
    ("tool", "code", "text", "said"),
    [
        ("memcheck", 9, f"gdn-d128: right\n{MEMCHECK.format(3)}", "3 findings"),
        ("racecheck", 0, f"gdn-d128: right\n{RACECHECK.format(2, 2)}", "2 findings"),
        ("memcheck", 0, "gdn-d128: right\n========= Error: No attachable process found", "no summary"),
        ("memcheck", 1, f"gdn-d128: WRONG: x\n{MEMCHECK.format(0)}", "WRONG"),
        ("racecheck", None, "gdn-d128", "longer than"),
        ("racecheck", 0, RACECHECK.format(0, 0), "no result"),
    ],
)
def test_what_is_not_clean_is_the_exit_status(ran, capsys, tool, code, text, said):
    ran.says[tool, "gdn-d128"] = code, text
    assert sanitize.main(["--only", "gdn-d128", "kda-d128"]) == 1
    out = capsys.readouterr().out
    assert said in next(line for line in out.splitlines() if line.startswith(tool) and "gdn-d128" in line)
    assert f"{tool}: 2 cases, 1 not clean" in out


RACE = "========= Error: Race reported between Write access at gdn_prefill_sm90_bf16_{}+0x15d0\n=========     and Read access at"


@pytest.mark.parametrize(
    ("name", "places", "code", "clean"),
    [
        ("gdn-d128", ["scan_3"], 9, True),
        ("gdn-segments", ["scan_3", "scan_2", "scan_3"], 9, True),
        ("gdn-segments", ["scan_3", "prepare_1"], 9, False),
        ("gdn-d128", ["scan_3", "scan_3"], 9, False),
        ("gdn-d128", ["prepare_0"], 9, False),
        ("gdn-d128", ["scan_3"], 1, False),
        ("kda-d128", ["scan_3"], 9, False),
    ],
)
def test_known_findings_of_the_scan_are_clean_and_no_others(ran, capsys, name, places, code, clean):
    report = "\n".join([f"{name}: right", *(RACE.format(place) for place in places), RACECHECK.format(len(places), 0)])
    ran.says["racecheck", name] = code, report
    assert sanitize.main(["--only", name]) == (0 if clean else 1)
    assert (f"{len(places)} known" in capsys.readouterr().out) == clean


def test_a_known_finding_under_memcheck_is_a_finding(ran):
    ran.says["memcheck", "gdn-d128"] = 9, f"gdn-d128: right\n{MEMCHECK.format(1)}"
    assert sanitize.main(["--only", "gdn-d128"]) == 1


@pytest.mark.parametrize("says", [(1, "gdn-d128: WRONG: x"), (-11, ""), (3, "gdn-d128: right")])
def test_nothing_runs_under_a_tool_where_results_are_wrong_without(ran, capsys, says):
    ran.says["", "gdn-d128"] = says
    assert sanitize.main(["--only", "gdn-d128"]) == 1
    assert len(ran.commands) == 1
    assert "without a tool: 1 cases, 1 wrong" in capsys.readouterr().out


def test_no_case_is_no_success(ran, capsys):
    assert sanitize.main(["--only", "nothing"]) == 1
    assert not ran.commands


def test_without_a_gpu_or_the_tool_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    assert sanitize.main([]) == 3
    assert "no compute-sanitizer" in capsys.readouterr().err


def test_whole_chunks_for_racecheck():
    found = [sanitize.whole(case) for case in sanitize.cases()]
    assert all(length % 64 == 0 for case in found if not case.decodes for length in case.lengths)
    assert [case.lengths for case in found if case.decodes] == [c.lengths for c in sanitize.cases() if c.decodes]


def test_names_are_listed(capsys):
    assert sanitize.main(["--list", "--only", "kda-"]) == 0
    assert "kda-segments" in capsys.readouterr().out.split()

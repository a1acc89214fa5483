"""The sanitizer script: which cases it runs, under what command, and what it says without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import sanitize
import torch
from la_cases import kernels


def test_every_engine_has_cases_that_it_takes():
    found = sanitize.cases()
    assert {case.op for case in found} == set(kernels.ENGINES)
    assert not any(kernels.declined(case) for case in found)
    assert max(sum(case.lengths) for case in found) < 2500
    assert len({case.name for case in found}) == len(found)


def test_the_command_of_a_tool():
    found = sanitize.command("/bin/cs", "racecheck", ["gdn"])
    assert found[:3] == ["/bin/cs", "--tool", "racecheck"]
    assert found[-5:] == [str(Path(sanitize.__file__).resolve()), "--run", "--only", "gdn", "--whole"]
    assert sanitize.command("/bin/cs", "", []) == [sys.executable, str(Path(sanitize.__file__).resolve()), "--run"]
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in sanitize.environment("memcheck")


@pytest.mark.parametrize(
    ("codes", "status", "said"),
    [
        ([0, 0, 0], 0, ["without a tool: clean", "memcheck: clean", "racecheck: clean"]),
        ([0, 9, 0], 1, ["memcheck: FINDINGS", "racecheck: clean"]),
        ([1], 1, ["without a tool: FAILED with 1"]),
    ],
)
def test_findings_are_the_exit_status(codes, status, said, monkeypatch, capsys):
    ran = []

    def fake(command, **options):
        ran.append(command)
        return subprocess.CompletedProcess(command, codes[len(ran) - 1])

    monkeypatch.setattr(sanitize.subprocess, "run", fake)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: "/bin/cs")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sanitize.main([]) == status
    assert len(ran) == len(codes)
    out = capsys.readouterr().out
    assert all(text in out for text in said)


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

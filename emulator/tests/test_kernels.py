"""The six kernels of tests/kernels, recorded: exact against numpy and free of findings, whatever the schedule."""

import json
import lzma
import runpy
from pathlib import Path

import pytest

_RECORDED = runpy.run_path(str(Path(__file__).with_name("_recorded.py")))
CASES, DATA, recording, run = (_RECORDED[name] for name in ("CASES", "DATA", "recording", "run"))


def check(key, seed, **options):
    outcome = run(key, seed, **options)
    assert not outcome.report.findings, "\n".join(map(str, outcome.report.findings))
    assert outcome.error == 0.0
    return outcome


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("key", CASES)
def test_recorded_kernel_is_exact_and_clean(key, seed):
    check(key, seed)


@pytest.mark.L2
@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
@pytest.mark.parametrize("key", CASES)
def test_recorded_kernel_is_clean_in_every_schedule(key, schedule):
    for seed in range(20):
        check(key, seed, schedule=schedule)


@pytest.mark.parametrize("key", ["tma_copy.sm_90a", "tcgen05_gemm_pair.sm_100a", "clc_gemm.sm_100a"])
def test_same_seed_replays_the_same_run(key):
    first, second = (run(key, 5, schedule="random").report for _ in range(2))
    assert first == second


@pytest.mark.parametrize("key", CASES)
def test_recordings_fit_their_kernel(key):
    recorded = recording(key)
    assert f".target {CASES[key].arch}" in recorded["ptx"]
    assert f'"{CASES[key].module}.py"' in recorded["ptx"], "line information"
    assert "/" not in "".join(line for line in recorded["ptx"].splitlines() if line.lstrip().startswith(".file"))


def test_recordings_are_small():
    files = list(DATA.glob("*.xz"))
    assert {f.name.removesuffix(".json.xz") for f in files} == set(CASES)
    assert sum(f.stat().st_size for f in files) < 40_000


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("tma_copy.sm_90a", {"cp", "mbarrier", "fence", "elect"}),
        ("wgmma_gemm.sm_90a", {"wgmma.mma_async", "wgmma.commit_group", "wgmma.wait_group"}),
        (
            "tcgen05_gemm.sm_100a",
            {"tcgen05.mma.cta_group::1", "tcgen05.ld", "tcgen05.commit.cta_group::1", "griddepcontrol.wait"},
        ),
        ("tcgen05_gemm_pair.sm_100a", {"tcgen05.mma.cta_group::2", "multicast::cluster", "barrier.cluster"}),
        ("mxf8_gemm.sm_100a", {"kind::mxf8f6f4.block_scale", "tcgen05.cp", "cp.async.bulk.shared::cluster"}),
        ("nvf4_gemm.sm_100a", {"kind::mxf4nvf4.block_scale", "tcgen05.cp"}),
        ("clc_gemm.sm_100a", {"clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel"}),
    ],
)
def test_kernels_use_what_they_are_for(key, expected):
    text = recording(key)["ptx"]
    assert not [name for name in expected if name not in text]


def test_edits_of_another_recording_than_the_one_at_hand_are_refused(tmp_path, monkeypatch):
    scope = recording.__wrapped__.__globals__
    (name,) = {f.name for f in DATA.glob("clc_gemm.sm_103a*")}
    (tmp_path / name).write_bytes((DATA / name).read_bytes())
    base = {**recording("clc_gemm.sm_100a"), "ptx": "other"}
    (tmp_path / "clc_gemm.sm_100a.json.xz").write_bytes(lzma.compress(json.dumps(base).encode()))
    monkeypatch.setitem(scope, "DATA", tmp_path)
    recording.cache_clear()
    with pytest.raises(ValueError, match=r"clc_gemm\.sm_100a was recorded anew: record clc_gemm\.sm_103a too"):
        recording("clc_gemm.sm_103a")
    recording.cache_clear()

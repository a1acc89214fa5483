"""The prefill engines from a graph to numbers, in the emulator: cases against the recurrence, no finding of the emulator.

Each case compiles a kernel, which takes seconds: all of it belongs to the slow sweep.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("ptx_emulator")

import torch
from emulated import Emulated, outputs
from la_cases.cases import CASES, named
from la_cases.running import check, graph_of
from linear_attention.prefill_engine import GdnSm90, KdaSm90

import cudnn_core
from cudnn_core._cli import main

pytestmark = pytest.mark.L2

ENGINES = {"gdn": GdnSm90, "kda": KdaSm90}
BOTH = pytest.mark.parametrize("op", ["gdn", "kda"])
SMALL = [
    case for case in CASES if not case.decodes and case.io.itemsize == 2 and not case.large and sum(case.lengths) <= 600
]
SCHEDULES = [("late", 0), ("random", 1), ("random", 2)]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cases(case):
    check(case, outputs(case, ENGINES[case.op]()))


@BOTH
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_every_schedule(op, schedule, seed):
    case = replace(named(f"{op}-slots"), lengths=(130, 3, 64), heads=(1, 1, 1))
    check(case, outputs(case, ENGINES[op](), schedule=schedule, seed=seed))


# --- segments
def remembering(name, **fields):
    """A case whose state outlives its chunks: with the usual gates, what a segment starts from would not show."""
    op = name.partition("-")[0]
    return replace(named(name), heads=(1, 1, 1), change=named(f"{op}-long-memory").change, **fields)


@pytest.fixture
def cut(monkeypatch):
    """Sequences have as many segments as said, whatever their sizes."""

    def into(segments):
        monkeypatch.setattr("linear_attention.launch.choose_segments", lambda *sizes: segments)

    return into


@BOTH
@pytest.mark.parametrize("segments", [2, 3, 4])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[:2])
def test_segments(op, segments, schedule, seed, cut):
    """Lengths with empty segments, a partial chunk at the end of one, and no chunk at all."""
    cut(segments)
    case = remembering(f"{op}-plain", lengths=(250, 70, 0))
    check(case, outputs(case, ENGINES[op](), schedule=schedule, seed=seed))


@BOTH
@pytest.mark.parametrize("name", ["slots", "slots-k-major-bf16", "slots-outside", "no-initial-state", "k64-v128"])
def test_segments_of_other_states(op, name, cut):
    cut(3)
    case = remembering(f"{op}-{name}", lengths=(250, 70, 0) if "slots" in name else (250,))
    check(case, outputs(case, ENGINES[op]()))


@BOTH
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[:2])
def test_segments_where_boundaries_decrease(op, schedule, seed, cut):
    """Records of sequences that would overlap, and the last tokens in none."""
    cut(3)
    bounds = (-7, 250, 31, 190, 320, 64, 0)
    case = remembering(f"{op}-plain", lengths=(250, 0, 0, 70, 0, 0), bounds=bounds, tail=9)
    check(case, outputs(case, ENGINES[op](), schedule=schedule, seed=seed))


@BOTH
@pytest.mark.parametrize("segments", [2, 3])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("length", [330, 64])
def test_segments_of_one_sequence(op, segments, schedule, seed, length, cut):
    """The records of the last segment, which may have no chunk, are prepared beside the summary."""
    cut(segments)
    case = remembering(f"{op}-plain", lengths=(length,), tail=70)
    check(case, outputs(case, ENGINES[op](), schedule=schedule, seed=seed))


@BOTH
def test_segments_add_rounding_alone(op, cut):
    case = remembering(f"{op}-d128", lengths=(320,))
    whole = outputs(case, ENGINES[op]())
    cut(5)
    parts = outputs(case, ENGINES[op]())
    assert not torch.equal(parts["final_state"], whole["final_state"])
    torch.testing.assert_close(parts["final_state"], whole["final_state"], rtol=2e-2, atol=2e-2)


# --- invariants
@BOTH
def test_a_sequence_alone_has_the_results_of_the_batch(op):
    options = {"output_final_state": True, "batch_invariant": True}
    case = replace(named(f"{op}-batch-invariant"), lengths=(5, 70, 0), heads=(1, 1, 1), options=options, initial=False)
    tensors = case.tensors()
    batch = outputs(case, ENGINES[op](), tensors=tensors)
    start = 0
    for n, length in enumerate(case.lengths[:2]):
        rows = {port: value[start : start + length] for port, value in tensors.items() if port != "cu_seqlens"}
        rows["cu_seqlens"] = torch.tensor([0, length], dtype=torch.int32)
        alone = outputs(replace(case, lengths=(length,)), ENGINES[op](), tensors=rows)
        assert torch.equal(alone["O"], batch["O"][start : start + length])
        assert torch.equal(alone["final_state"][0], batch["final_state"][n])
        start += length


@BOTH
def test_later_tokens_change_nothing_before_them(op):
    """Steep gates from a token on, NaN from the next chunk on."""
    case = replace(named(f"{op}-plain"), lengths=(100,), heads=(1, 1, 1))
    first = outputs(case, ENGINES[op]())
    for at in (1, 37, 64, 99):
        tensors = case.tensors()
        for port in ("q", "k", "v", "beta"):
            tensors[port][at:] = tensors[port].flip(0)[at:]
        tensors["g"][at:] *= 30.0
        tensors["g"][(at // 64 + 1) * 64 :] = torch.nan
        again = outputs(case, ENGINES[op](), tensors=tensors)
        assert torch.equal(again["O"][:at], first["O"][:at]), at


@BOTH
def test_runs_are_equal_to_the_last_bit(op):
    emulated = Emulated(replace(named(f"{op}-l2norm"), lengths=(70,), heads=(1, 1, 1)), ENGINES[op]())
    first, second = emulated.run(), emulated.run(schedule="random", seed=7)
    assert all(torch.equal(first[port], second[port]) for port in first)


@BOTH
def test_every_kernel_waits_for_the_launches_before_it(op):
    """So that the one behind it may rely on all of them, and a workspace is free for the next call."""
    (artifact,) = Emulated(named(f"{op}-plain"), ENGINES[op]()).plan.artifacts
    kernels = re.split(r"^\.visible \.entry ", artifact.ptx, flags=re.MULTILINE)[1:]
    assert len(kernels) == 5
    for text in kernels:
        before, found, _ = text.partition("griddepcontrol.wait;")
        assert found, text[:100]
        assert before.rstrip(" \t").endswith("\n")  # no predicate
        assert not re.search(r"\b(ret|exit);", before)


# --- the command
@BOTH
@pytest.mark.parametrize("name", ["plain", "slots"])
def test_command_runs_a_graph(op, name, tmp_path, capsys):
    """``cudnn-core run`` on the emulator with its own random inputs, checked by the reference; a pool is updated in place."""
    case = replace(named(f"{op}-{name}"), heads=(1, 1, 1))
    path = tmp_path / "graph.json"
    path.write_text(graph_of(case)[0].to_json())
    sizes = {"tokens": 70, "sequences": 2, "boundaries": 3, "slots": 5 if name == "slots" else 2}
    known = graph_of(case)[0].freeze().dims
    words = ["run", str(path), "--executor", "emulator", "--device", "H200", "--json"]
    words += [word for size, value in sizes.items() if size in known for word in ("--size", f"{size}={value}")]
    rule = {"match": {"op": op}, "use": f"linear_attention:{op}_sm90"}
    with cudnn_core.configure(strict=True, rule=[rule], cache_dir=str(tmp_path)):
        status = main(words)
    report = json.loads(capsys.readouterr().out)
    assert (status, report["ok"]) == (0, True), report
    assert report["engine"] == f"linear_attention:{op}_sm90@1"
    assert report["sizes"] == {size: value for size, value in sizes.items() if size in known}

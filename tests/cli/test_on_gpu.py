"""``cudnn-core run`` and ``bench`` on a CUDA device: operands through torch, times by CUDA events."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


def test_run_on_a_gpu_agrees_with_the_reference(cli_json, graph_file):
    code, document = cli_json("run", graph_file(), "--device", "cuda")
    assert code == 0, document
    assert document["device"]["type"] == "cuda"


def test_bench_on_a_gpu_times_by_events_and_records(cli_json, graph_file):
    code, document = cli_json("bench", graph_file(), "--device", "cuda", "--repeats", "5")
    assert code == 0, document
    assert document["recorded"] is True
    assert all(0 < timing["us"] < 1e5 for timing in document["timings"])

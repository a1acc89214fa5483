"""Hooks: counts which engines planning selects and which ones fail, and tells the doctor about BLAS. Named by the manifest.

``counts()`` returns a copy of the counters of this process. With ``ACME_CPU_TELEMETRY=FILE`` each selection is also appended to
FILE as one JSON line. Hooks run while a graph is planned, never while a plan runs.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudnn_core import Check, Decision, EngineFailure

__all__ = ["counts", "cudnn_core_doctor", "cudnn_core_engine_failed", "cudnn_core_plan_selected"]

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def counts() -> dict[str, int]:
    """Engine id -> plans; ``"failed ENGINE"`` -> failures."""
    with _lock:
        return dict(_counts)


def cudnn_core_plan_selected(decision: Decision) -> None:
    winner = decision.selected or ""
    line = json.dumps({"graph": decision.graph_key, "selected": winner}) + "\n"
    path = os.environ.get("ACME_CPU_TELEMETRY")
    with _lock:
        _counts[winner] += 1
        if path:
            with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123
                file.write(line)


def cudnn_core_engine_failed(failure: EngineFailure) -> None:
    with _lock:
        _counts[f"failed {failure.engine}"] += 1


def cudnn_core_doctor(env: Mapping[str, str]) -> list[Check]:
    """Whether numpy multiplies with an optimised BLAS; without one, `fused_matmul` is correct and slow."""
    import numpy as np

    from cudnn_core import Check

    blas = np.show_config(mode="dicts")["Build Dependencies"].get("blas", {})
    name = str(blas.get("name") or "none")
    return [Check("numpy's BLAS", name not in ("none", "auto"), f"{name} {blas.get('version', '')}".rstrip())]

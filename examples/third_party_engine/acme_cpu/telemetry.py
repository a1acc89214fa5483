"""Hooks: counts which engines planning selects and which ones fail. Named by the manifest's ``hooks``.

``counts()`` returns a copy of the counters of this process. With ``ACME_CPU_TELEMETRY=FILE`` each selection is also appended to
FILE as one JSON line. Hooks run while a graph is planned, never while a plan runs.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudnn_core import Decision

__all__ = ["counts", "cudnn_core_engine_failed", "cudnn_core_plan_selected"]

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


def cudnn_core_engine_failed(failure: Any) -> None:
    with _lock:
        _counts[f"failed {failure.engine}"] += 1

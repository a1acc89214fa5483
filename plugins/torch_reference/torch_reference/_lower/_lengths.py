"""Actual sequence lengths of an sdpa node. Imported by its lowering and by the evaluator, which bounds ragged rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["length_ports", "sequence_lengths"]


def length_ports(side: str) -> tuple[str, str]:
    """The inputs that may hold the lengths of side "q" or "kv": as they are, or as running sums."""
    return f"seq_len_{side}", f"cu_seq_len_{side}"


def sequence_lengths(inputs: Mapping[str, Any], side: str, batch: int) -> Any | None:
    """[B] lengths from the present inputs, or None."""
    plain, running = length_ports(side)
    if plain in inputs:
        return inputs[plain].reshape(batch)
    return inputs[running].reshape(batch + 1).diff() if running in inputs else None

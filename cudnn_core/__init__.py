"""Plugin-based engine registry for deep-learning graphs on NVIDIA GPUs."""

from __future__ import annotations

__version__ = "0.1.0"

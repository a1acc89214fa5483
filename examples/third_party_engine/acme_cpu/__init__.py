"""Fused CPU engines for cudnn-core, in numpy. The package is used through cudnn_core; it has no functions of its own."""

from __future__ import annotations

__version__ = "0.1.0"

"""GEMM engines for cudnn-core: one parametric kernel per MMA generation. The manifest is ``cudnn_plugin.toml``."""

from __future__ import annotations

__version__ = "0.1.0"

"""Gated delta rule (GDN) and Kimi delta attention (KDA) engines for cudnn-core. The manifest is ``cudnn_plugin.toml``."""

from __future__ import annotations

__version__ = "0.1.0"

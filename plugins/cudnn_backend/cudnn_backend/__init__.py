"""The classic cuDNN backend as a cudnn-core plugin. The manifest is ``cudnn_plugin.toml``."""

from __future__ import annotations

__version__ = "0.1.0"

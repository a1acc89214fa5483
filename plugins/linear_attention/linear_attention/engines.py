"""The engines of the manifest, from their modules. Named by ``cudnn_plugin.toml``; imports the core alone."""

from __future__ import annotations

from .decode_engine import GdnDecode, KdaDecode
from .prefill_engine import GdnSm90, KdaSm90

__all__ = ["GdnDecode", "GdnSm90", "KdaDecode", "KdaSm90"]

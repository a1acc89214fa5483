"""Gated delta rule (GDN) and Kimi delta attention (KDA) for cudnn-core. The manifest is ``cudnn_plugin.toml``.

``gated_delta_net``, ``kimi_delta_attention`` and the ``_decode`` form of either run the best engine on torch tensors;
``linear_attention.fla`` has flash-linear-attention's functions. torch is imported when one of them is first used: engines
and op rows do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .errors import GradientError, InputError
    from .functions import (
        gated_delta_net,
        gated_delta_net_decode,
        kimi_delta_attention,
        kimi_delta_attention_decode,
    )

__version__ = "0.1.0"

__all__ = [
    "GradientError",
    "InputError",
    "gated_delta_net",
    "gated_delta_net_decode",
    "kimi_delta_attention",
    "kimi_delta_attention_decode",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = ".errors" if name.endswith("Error") else ".functions"
    found: object = getattr(importlib.import_module(module, __name__), name)
    globals()[name] = found
    return found

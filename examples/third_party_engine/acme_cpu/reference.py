"""PyTorch reference of ``acme_rmsnorm_gated``: what other engines, tests and the conformance kit compare with.

Imported by an engine that runs references (cudnn-core-torch-reference), never by this package's engines. Float inputs arrive
in the precision to compute in, so that there are no casts here; results are rounded to the declared types by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["rmsnorm_gated"]


def rmsnorm_gated(inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    x, gate = inputs["input"], inputs["gate"]
    inv_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + attrs["epsilon"])
    return {"Y": x * inv_rms * inputs["scale"] * gate * torch.sigmoid(gate), "inv_rms": inv_rms}

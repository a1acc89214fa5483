"""moe_grouped_matmul: rows of a group times the weight of the group's expert.

``first_token_offset`` holds G starts, or G starts and the end; G is a multiple of the experts E, and group g uses expert
g % E. GATHER reads token row ``token_index[r]`` for routed row r; SCATTER writes routed row r to row
``token_index[r] * top_k + token_ks[r]``; COMBINE adds it, times ``top_k_scores[token, slot]``, to row ``token_index[r]``.
Rows of no group, and indices outside their range, give zero rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ._groups import offset_groups
from ._math import Math, is_integer, matmul
from ._reduction import group_bounds

__all__ = ["moe_grouped_matmul"]

Tensor = Any


def moe_grouped_matmul(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    token, weight = inputs["token"][0], inputs["weight"]
    if not is_integer(token, weight):
        token, weight = math.as_float(token), math.as_float(weight)
    mode, top_k = node.attrs["mode"], node.attrs.get("top_k") or 1
    rows_out = node.outputs["Y"].dim[1]
    if mode == "GATHER":
        token = _pick(token, inputs["token_index"].reshape(-1))

    experts = weight.shape[0]
    offsets = inputs["first_token_offset"].reshape(-1)
    routed = token.new_zeros((token.shape[0], weight.shape[2]))
    for group, (start, stop) in enumerate(
        group_bounds(offsets, token.shape[0], offset_groups(offsets.numel(), experts))
    ):
        routed[start:stop] = matmul(token[start:stop], weight[group % experts]).to(routed.dtype)

    if mode in ("NONE", "GATHER"):
        return {"Y": routed[None]}
    index, slot = inputs["token_index"].reshape(-1), inputs["token_ks"].reshape(-1)
    tokens = rows_out if mode == "COMBINE" else rows_out // top_k
    valid = (index >= 0) & (index < tokens) & (slot >= 0) & (slot < top_k)
    # A token's slots are written by distinct rows, so placing rows is deterministic, and so is the sum over slots.
    placed = routed.new_zeros((tokens * top_k, routed.shape[1]))
    placed[(index * top_k + slot)[valid]] = routed[valid]
    if mode == "SCATTER":
        return {"Y": placed[None]}
    scores = math.as_float(inputs["top_k_scores"]).reshape(tokens, top_k, 1)
    return {"Y": (placed.reshape(tokens, top_k, -1) * scores).sum(1)[None]}


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    valid = (index >= 0) & (index < rows.shape[0])
    if rows.shape[0] == 0:
        return rows.new_zeros((index.shape[0], rows.shape[1]))
    return torch.where(valid[:, None], rows[torch.where(valid, index, 0)], torch.zeros_like(rows[:1]))

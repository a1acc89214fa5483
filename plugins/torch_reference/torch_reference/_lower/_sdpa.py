"""sdpa forward: softmax(scale * q k^T + bias + alibi, masked) v, with the statistics that training needs.

Layouts: q [B, Hq, Sq, D], k [B, Hk, Skv, D], v [B, Hv, Skv, Dv] (heads of k and v divide Hq), O [B, Hq, Sq, Dv].
Masks, for query row i and key column j of batch entry b, with shift = skv - sq (the actual lengths) for BOTTOM_RIGHT and
0 for TOP_LEFT:  kept iff  j < seq_len_kv[b],  i < seq_len_q[b],  j <= i + shift + right_bound,  j > i + shift - left_bound
and bit (j // 128) % 8 of block_mask[b, h, i // 128, j // 1024]. A row without any kept column gives O = 0, Stats =
score_max = -inf and score_sum_exp = 0, with a sink too. ALiBi adds slope[h] * (j - i). The sink is a further logit of each row without a value. Dropout multiplies the
probabilities by the mask and the scale. Stats = max + log(sum(exp(score - max))).
"""

from __future__ import annotations

import math as scalar_math
from collections.abc import Mapping
from typing import Any

import torch

from ._lengths import sequence_lengths
from ._math import Math, matmul

__all__ = ["alibi_slopes", "sdpa"]

Tensor = Any
_BLOCK = 1 << 24  # scores held at once


def sdpa(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    attrs = node.attrs
    q = math.as_float(inputs["q"])
    k, v = (_unpaged(math.as_float(inputs[port]), inputs.get(f"paged_attention_{port}_table")) for port in ("k", "v"))
    batch, heads, rows, _ = q.shape
    columns = min(k.shape[2], v.shape[2])
    if attrs.get("paged_attention_max_seq_len_kv"):
        columns = min(columns, attrs["paged_attention_max_seq_len_kv"])
    lengths_q = sequence_lengths(inputs, "q", batch)
    lengths_kv = sequence_lengths(inputs, "kv", batch)
    k, v = (_cleared(x[:, :, :columns], lengths_kv) for x in (k, v))
    scores = _Scores(node, inputs, math, (heads, rows, columns), lengths_q, lengths_kv)

    results: dict[str, list[list[Tensor]]] = {"O": [], "Stats": [], "score_max": [], "score_sum_exp": []}
    entries = max(1, _BLOCK // max(1, heads * rows * columns))
    step = max(1, min(rows, _BLOCK // max(1, heads * columns))) if entries == 1 else max(1, rows)
    for start in range(0, batch, entries):
        b = slice(start, min(start + entries, batch))
        pieces = [_rows(q, k, v, scores, b, slice(row, min(row + step, rows))) for row in range(0, max(rows, 1), step)]
        for port, found in zip(results, zip(*pieces, strict=True), strict=True):
            results[port].append(torch.cat(found, dim=2))
    joined = {port: torch.cat(parts) for port, parts in results.items() if parts}
    if not joined:
        joined = {port: math.zeros(0, heads, rows, v.shape[3] if port == "O" else 1) for port in results}
    if attrs.get("stats_use_log2"):
        joined["Stats"] = joined["Stats"] * scalar_math.log2(scalar_math.e)
    return {port: found for port, found in joined.items() if port in node.outputs}


def alibi_slopes(heads: int) -> list[float]:
    """2**(-8 i / n) for i = 1..n, n the largest power of two in ``heads``; then every other slope of 2n heads."""
    n = 1 << (heads.bit_length() - 1)
    powers = [float(i) for i in range(1, n + 1)] + [i + 0.5 for i in range(heads - n)]
    return [2.0 ** (-8.0 * power / n) for power in powers]


class _Scores:
    """Scores of a block of batch entries and rows, masked."""

    def __init__(
        self,
        node: Any,
        inputs: Mapping[str, Any],
        math: Math,
        shape: tuple[int, int, int],
        lengths_q: Tensor | None,
        lengths_kv: Tensor | None,
    ) -> None:
        self.attrs = node.attrs
        self.heads, self.rows, self.columns = shape
        self.math = math
        self.lengths_q, self.lengths_kv = lengths_q, lengths_kv
        scale = node.attrs.get("scale")
        self.scale = math.as_float(inputs["attn_scale"]).reshape(()) if "attn_scale" in inputs else scale
        self.bias = math.as_float(inputs["bias"]) if "bias" in inputs else None
        self.sink = math.as_float(inputs["sink_token"]) if "sink_token" in inputs else None
        self.block_mask = inputs.get("block_mask")
        self.dropout = math.as_float(inputs["dropout_mask"]) if "dropout_mask" in inputs else None
        if self.dropout is not None and "dropout_scale" in inputs:
            self.dropout = self.dropout * math.as_float(inputs["dropout_scale"]).reshape(())
        self.slopes = None
        if node.attrs.get("use_alibi_mask"):
            slopes = alibi_slopes(self.heads)
            self.slopes = torch.tensor(slopes, dtype=math.dtype, device=math.device).reshape(1, self.heads, 1, 1)

    def __call__(self, q: Tensor, k: Tensor, b: slice, r: slice) -> Tensor:
        score = matmul(q, _heads(k, self.heads).transpose(-1, -2)).to(self.math.dtype)
        if self.scale is not None:
            score = score * self.scale
        if self.bias is not None:
            score = score + part(self.bias, b, r)[..., : self.columns]
        i = torch.arange(self.rows, device=score.device)[r].reshape(1, 1, -1, 1)
        j = torch.arange(self.columns, device=score.device).reshape(1, 1, 1, -1)
        if self.slopes is not None:
            score = score + self.slopes * (j - i)
        kept = self._kept(i, j, b)
        return score if kept is None else score.masked_fill(~kept, float("-inf"))

    def _kept(self, i: Tensor, j: Tensor, b: slice) -> Tensor | None:
        length_q = None if self.lengths_q is None else self.lengths_q[b].reshape(-1, 1, 1, 1)
        length_kv = None if self.lengths_kv is None else self.lengths_kv[b].reshape(-1, 1, 1, 1)
        shift: Any = 0
        if self.attrs.get("diagonal_alignment") == "BOTTOM_RIGHT":
            shift = (self.columns if length_kv is None else length_kv) - (self.rows if length_q is None else length_q)
        conditions = []
        if length_q is not None:
            conditions.append(i < length_q)
        if length_kv is not None:
            conditions.append(j < length_kv)
        if self.attrs.get("right_bound") is not None:
            conditions.append(j <= i + shift + self.attrs["right_bound"])
        if self.attrs.get("left_bound") is not None:
            conditions.append(j > i + shift - self.attrs["left_bound"])
        if self.block_mask is not None:
            blocks = part(self.block_mask, b, slice(None))[:, :, i.reshape(-1) // 128][..., j.reshape(-1) // 1024]
            conditions.append((blocks >> (j // 128 % 8)) & 1 != 0)
        kept = None
        for condition in conditions:
            kept = condition if kept is None else kept & condition
        return kept


def _rows(q: Tensor, k: Tensor, v: Tensor, scores: _Scores, b: slice, r: slice) -> tuple[Tensor, ...]:
    """O, Stats, score_max and score_sum_exp of some rows."""
    score = scores(q[b, :, r], k[b], b, r)
    shape = (*score.shape[:3], 1)
    top = score.amax(-1, keepdim=True) if score.shape[-1] else score.new_full(shape, float("-inf"))
    empty = top == float("-inf")
    if scores.sink is not None:
        top = torch.where(empty, top, torch.maximum(top, scores.sink))
    shift = torch.where(empty, torch.zeros_like(top), top)
    weight = torch.exp(score - shift)
    total = weight.sum(-1, keepdim=True)
    if scores.sink is not None:
        total = torch.where(empty, total, total + torch.exp(scores.sink - shift))
    weight = torch.where(empty, torch.zeros_like(weight), weight / total)
    if scores.dropout is not None:
        weight = weight * part(scores.dropout, b, r)[..., : scores.columns]
    o = matmul(weight, _heads(v[b], scores.heads)).to(score.dtype)
    return o, top + torch.log(total), top, total


def part(x: Tensor, b: slice, r: slice) -> Tensor:
    """Some batch entries and rows of a tensor that may broadcast along both."""
    x = x if x.shape[0] == 1 else x[b]
    return x if x.shape[2] == 1 else x[:, :, r]


def _heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _cleared(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Rows beyond the length set to zero: what lies there may be NaN and must not reach a product."""
    if lengths is None:
        return x
    row = torch.arange(x.shape[2], device=x.device).reshape(1, 1, -1, 1)
    return torch.where(row < lengths.reshape(-1, 1, 1, 1), x, torch.zeros_like(x))


def _unpaged(container: Tensor, table: Tensor | None) -> Tensor:
    """[blocks, H, block, D] pages and a [B, 1, pages, 1] table as [B, H, pages * block, D]; invalid pages are zero."""
    if table is None:
        return container
    pages = table.reshape(table.shape[0], table.shape[2])
    valid = (pages >= 0) & (pages < container.shape[0])
    found = container[torch.where(valid, pages, 0)]
    found = torch.where(valid.reshape(*valid.shape, 1, 1, 1), found, torch.zeros_like(found))
    return found.transpose(1, 2).flatten(2, 3)

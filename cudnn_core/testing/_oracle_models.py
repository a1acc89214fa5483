"""Oracle rules of attention, convolution, block scaling, grouped matmul and the delta rule. See ``_oracle``.

Rows that several ops of a family share are written from the documentation of the op rows, not from any plugin.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ._codec import FORMATS, decode, encode, half_spacing
from ._oracle import RULES, Context, Val, largest_product, product_error, sigmoid

__all__: list[str] = []

Array = Any  # of numpy


def _roundoff(dtype: str) -> float:
    return 2.0 ** -(FORMATS[dtype].mantissa + 1) if dtype in FORMATS else 0.0


def _unsupported(node: Any, *ports: str) -> None:
    present = [port for port in ports if port in node.inputs or node.attrs.get(port)]
    if present:
        raise KeyError(f"the kit's own oracle has no {node.op} with {', '.join(present)}")


# --- sdpa
def _sdpa(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    _unsupported(node, "dropout_mask", "dropout_probability", "paged_attention_k_table", "block_mask")
    q, k, v = (_by_head(ports[port], ports["q"].v.shape[1]) for port in ("q", "k", "v"))
    scale = float(ports["attn_scale"].v.reshape(-1)[0]) if "attn_scale" in ports else node.attrs["scale"]
    scale = 1.0 if scale is None else scale
    v = c.factor(v, node.inputs["v"])
    keys = c.factor(Val(np.swapaxes(k.v, -1, -2), np.swapaxes(k.e, -1, -2)), node.inputs["k"])
    largest = largest_product if c.reduces(node.inputs["q"], node.inputs["k"]) else None
    dot = product_error(c.factor(q, node.inputs["q"]), keys, np.matmul, q.v.shape[-1], c.u, largest=largest)
    score, error = scale * dot.v, abs(scale) * dot.e + 4 * c.u * np.abs(scale * dot.v)
    rows, columns = np.arange(score.shape[2]).reshape(-1, 1), np.arange(score.shape[3]).reshape(1, -1)
    if "bias" in ports:
        bias = ports["bias"]
        score, error = score + bias.v, error + bias.e + 4 * c.u * (np.abs(score) + np.abs(bias.v))
    if node.attrs["use_alibi_mask"]:
        slope = np.array(_alibi(score.shape[1])).reshape(1, -1, 1, 1)
        score, error = (
            score + slope * (columns - rows),
            error + 4 * c.u * (np.abs(score) + slope * np.abs(columns - rows)),
        )
    kept = _kept(node, ports, score.shape)
    score, error = np.where(kept, score, -np.inf), np.where(kept, error, 0.0)

    top = score.max(-1, keepdims=True, initial=-np.inf)
    sink = ports["sink_token"].v if "sink_token" in ports else np.full((1, 1, 1, 1), -np.inf)
    top = np.maximum(top, sink)
    shift = np.where(np.isinf(top), 0.0, top)
    weight = np.exp(score - shift)
    total = weight.sum(-1, keepdims=True) + np.exp(sink - shift)
    p = np.where(total > 0, weight / np.where(total > 0, total, 1.0), 0.0)

    worst = error.max(-1, keepdims=True, initial=0.0)
    sums = (score.shape[3] + 8) * 2 * c.u
    distance = np.where(kept, np.abs(score - shift), 0.0)
    low = max(_roundoff(str(node.inputs["v"].dtype)), c.u)
    relative = np.expm1(error + worst + sums + 2 * c.u * distance) + low
    probability = Val(p, p * relative + c.tiny)
    largest = largest_product if c.reduces(node.inputs["v"]) else None  # probabilities may have its type
    probability = c.factor(probability, node.inputs["v"])
    o = product_error(probability, v, np.matmul, score.shape[3], c.u, largest=largest)
    stats = np.where(total > 0, shift + np.log(np.where(total > 0, total, 1.0)), -np.inf)
    stats_error = worst + sums + 4 * c.u * np.where(np.isinf(stats), 0.0, np.abs(stats) + np.abs(shift))
    if node.attrs["stats_use_log2"]:
        stats, stats_error = stats * math.log2(math.e), stats_error * math.log2(math.e)
    return {
        "O": o,
        "Stats": Val(stats, stats_error),
        "score_max": Val(top, worst + 4 * c.u * np.abs(shift)),
        "score_sum_exp": Val(total, total * np.expm1(2 * worst + sums)),
    }


def _by_head(x: Val, heads: int) -> Val:
    times = heads // x.v.shape[1]
    return x if times == 1 else Val(np.repeat(x.v, times, axis=1), np.repeat(x.e, times, axis=1))


def _alibi(heads: int) -> list[float]:
    """The slopes of the ALiBi paper: 2**(-8 i / n) for the power of two n, and between them for other counts."""
    n = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    return slopes + [2.0 ** (-8.0 * (2 * i + 1) / (2 * n)) for i in range(heads - n)]


def _kept(node: Any, ports: Mapping[str, Any], shape: Sequence[int]) -> Array:
    batch, _, queries, keys = shape
    attrs = node.attrs
    lengths = {"q": np.full(batch, queries), "kv": np.full(batch, keys)}
    for side in lengths:
        if f"seq_len_{side}" in ports:
            lengths[side] = ports[f"seq_len_{side}"].v.reshape(batch).astype(np.int64)
        elif f"cu_seq_len_{side}" in ports:
            lengths[side] = np.diff(ports[f"cu_seq_len_{side}"].v.reshape(-1)).astype(np.int64)
    length_q, length_kv = (lengths[side].reshape(-1, 1, 1, 1) for side in ("q", "kv"))
    i, j = np.arange(queries).reshape(1, 1, -1, 1), np.arange(keys).reshape(1, 1, 1, -1)
    kept = (i < length_q) & (j < length_kv)
    shift = length_kv - length_q if attrs["diagonal_alignment"] == "BOTTOM_RIGHT" else 0
    if attrs["right_bound"] is not None:
        kept = kept & (j <= i + shift + attrs["right_bound"])
    if attrs["left_bound"] is not None:
        kept = kept & (j > i + shift - attrs["left_bound"])
    return np.broadcast_to(kept, shape)


RULES["sdpa"] = _sdpa


# --- convolution
def _conv(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    attrs, out = node.attrs, node.outputs["Y"].dim
    flip = attrs["convolution_mode"] == "CONVOLUTION"

    def pieces(image: Array, weight: Array) -> Iterator[list[tuple[Array, Array]]]:
        """By tap: what it reads of the image [N, C, ...] and its weights [K, C], by group."""
        taps = weight.shape[2:]
        pads = [(0, 0), (0, 0), *zip(attrs["pre_padding"], attrs["post_padding"], strict=True)]
        image = np.pad(image, pads)
        groups = image.shape[1] // weight.shape[1]
        for tap in itertools.product(*map(range, taps)):
            at = tuple(n - 1 - t for n, t in zip(taps, tap, strict=True)) if flip else tap
            window = tuple(
                slice(t * d, t * d + (size - 1) * s + 1, s)
                for t, d, s, size in zip(tap, attrs["dilation"], attrs["stride"], out[2:], strict=True)
            )
            every = (slice(None), slice(None))
            piece, filters = image[every + window], weight[every + at]
            yield list(zip(np.split(piece, groups, axis=1), np.split(filters, groups, axis=0), strict=True))

    def convolve(image: Array, weight: Array) -> Array:
        result = np.zeros(out)
        for parts in pieces(image, weight):
            result += np.concatenate([np.einsum("nc...,kc->nk...", x, w) for x, w in parts], axis=1)
        return result

    def largest(image: Array, weight: Array) -> Array:
        seen = np.zeros(out)
        for parts in pieces(image, weight):
            tops = [np.repeat(x.max(1, keepdims=True, initial=0.0), len(w), axis=1) for x, w in parts]
            seen = np.maximum(seen, np.concatenate(tops, axis=1))
        filters = weight.reshape(len(weight), -1).max(1, initial=0.0)
        return seen * filters.reshape(-1, *(1 for _ in out[2:]))

    terms = int(np.prod(node.inputs["weight"].dim[1:]))
    reduced = c.reduces(node.inputs["image"], node.inputs["weight"])
    image, weight = (c.factor(ports[port], node.inputs[port]) for port in ("image", "weight"))
    result = product_error(image, weight, convolve, terms, c.u, largest=largest if reduced else None)
    return {"Y": result}


RULES["conv_fprop"] = _conv


# --- block scaling
def _dequantize(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    x, scale = ports["input"], ports["descale"]
    sizes = list(node.attrs["block_size"])
    if len(sizes) == 1:
        shorter = [axis for axis, size in enumerate(x.v.shape) if scale.v.shape[axis] < size]
        blocks = {shorter[-1] if shorter else x.v.ndim - 1: sizes[0]}
    else:
        blocks = dict(zip(range(x.v.ndim - len(sizes), x.v.ndim), sizes, strict=True))
    spread = scale.v
    for axis, block in blocks.items():
        spread = np.repeat(spread, block, axis=axis).take(np.arange(x.v.shape[axis]), axis=axis)
    y = x.v * spread
    return {"Y": Val(y, x.e * np.abs(spread) + 2 * c.u * np.abs(y))}


def _quantize(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    _unsupported(node, "group_offset")
    x, block = ports["input"], node.attrs["block_size"]
    axis = x.v.ndim - 1 if node.attrs["axis"] is None else node.attrs["axis"]
    y_type, scale_type = str(node.outputs["Y"].dtype), str(node.outputs["scale"].dtype)
    edges = np.arange(0, x.v.shape[axis], block)
    amax = np.maximum.reduceat(np.abs(x.v), edges, axis=axis)
    scale = _rounded_up(amax / FORMATS[y_type].largest, scale_type)
    spread = np.repeat(scale, block, axis=axis).take(np.arange(x.v.shape[axis]), axis=axis)
    y = np.where(spread == 0, 0.0, x.v / np.where(spread == 0, 1.0, spread))
    wide = c.u if scale_type == "float32" else 0.0  # two roundings of the scale itself
    return {"Y": Val(y, (4 * c.u + 2 * wide) * np.abs(y)), "scale": Val(scale, 2 * wide * np.abs(scale))}


def _rounded_up(scale: Array, dtype: str) -> Array:
    """Upwards to e8m0 and e5m3, to nearest otherwise."""
    if dtype not in ("fp8_e8m0", "fp8_e5m3"):
        return decode(encode(scale, dtype), dtype)
    if dtype == "fp8_e8m0":
        return np.asarray(2.0 ** np.clip(np.ceil(np.log2(np.maximum(scale, 2.0**-127))), -127, 127))
    stored = decode(encode(scale, dtype), dtype)
    return np.where(stored < scale, decode(encode(stored + 2 * half_spacing(dtype, stored), dtype), dtype), stored)


RULES.update(block_scale_dequantize=_dequantize, block_scale_quantize=_quantize)


# --- grouped matmul
def _moe(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    mode, top_k = node.attrs["mode"], node.attrs["top_k"]
    token, weight = ports["token"], ports["weight"]
    experts, terms, _ = weight.v.shape
    offsets = [int(x) for x in ports["first_token_offset"].v.reshape(-1)]
    starts = offsets if len(offsets) % experts == 0 and (experts > 1 or len(offsets) == 1) else offsets[:-1]
    index = ports["token_index"].v.reshape(-1).astype(np.int64) if "token_index" in ports else None
    source = token.v[0]
    if mode == "GATHER":
        assert index is not None
        source = source[index]
    ends = [*starts[1:], len(source) if starts is offsets else offsets[-1]]

    def routed(multiply: Any) -> Any:
        def apply(rows: Array, weights: Array) -> Array:
            result = np.zeros((len(rows), weights.shape[2]))
            for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
                result[start:end] = multiply(rows[start:end], weights[group % experts])
            return result

        return apply

    largest = routed(largest_product) if c.reduces(node.inputs["token"], node.inputs["weight"]) else None
    tokens = c.factor(Val(source, np.zeros_like(source)), node.inputs["token"])
    weight = c.factor(weight, node.inputs["weight"])
    value = product_error(tokens, weight, routed(np.matmul), terms, c.u, largest=largest)
    if mode in ("NONE", "GATHER"):
        return {"Y": Val(value.v[None], value.e[None])}
    assert index is not None
    slots = index * top_k + ports["token_ks"].v.reshape(-1).astype(np.int64)
    placed = Val(np.zeros_like(value.v), np.zeros_like(value.e))
    placed.v[slots], placed.e[slots] = value.v, value.e
    if mode == "SCATTER":
        return {"Y": Val(placed.v[None], placed.e[None])}
    scores = ports["top_k_scores"].v.reshape(-1, 1)
    shape = (-1, top_k, value.v.shape[1])
    size = (np.abs(placed.v) * np.abs(scores)).reshape(shape).sum(1)
    error = (placed.e * np.abs(scores)).reshape(shape).sum(1) + (top_k + 2) * 2 * c.u * size
    error = error + half_spacing(
        str(node.inputs["token"].dtype), size
    )  # results may be stored before they are combined
    return {"Y": Val((placed.v * scores).reshape(shape).sum(1)[None], error[None])}


RULES["moe_grouped_matmul"] = _moe


# --- delta rule
def _delta(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    _unsupported(node, "state_indices", "a_log", "dt_bias", "safe_gate", "checkpoint_every_n_tokens")
    attrs = node.attrs
    q, k, v, g, beta = (ports[port].v for port in ("q", "k", "v", "g", "beta"))
    heads, width = max(q.shape[1], v.shape[1]), q.shape[2]
    if attrs["use_qk_l2norm"]:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q = q * (width**-0.5 if attrs["scale"] is None else attrs["scale"])
    q, k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (q, k, v))
    decay = np.clip(g, 1e-10, 1.0) if attrs["gate_domain"] == "linear" else np.exp(np.minimum(g, 0.0))
    decay = decay.reshape(len(q), heads, -1)
    if attrs["use_beta_sigmoid"]:
        beta = sigmoid(beta) * (2.0 if attrs["allow_neg_eigval"] else 1.0)
    bounds = [0, len(q)]
    if "cu_seqlens" in ports:
        bounds = [int(x) for x in ports["cu_seqlens"].v.reshape(-1)]
    sequences = len(bounds) - 1
    state = np.zeros((sequences, heads, v.shape[2], width))
    if "initial_state" in ports:
        state = ports["initial_state"].v.copy()
    arrays = (q, k, v, decay, beta)
    o, last = _recurrence(arrays, state, bounds, 0.0, None)
    # Roundings of one operand or state, in q's type (chunked forms pass through it) or in a sum of K products.
    step = 2 * max(_roundoff(str(node.inputs["q"].dtype)), c.u * math.sqrt(width) * 2)
    changes = []
    for trial in range(_TRIALS):
        other = _recurrence(arrays, state, bounds, step, np.random.default_rng(trial))
        changes.append([(moved - kept) ** 2 for moved, kept in zip(other, (o, last), strict=True)])
    spread = [np.mean(squares, axis=0) for squares in zip(*changes, strict=True)]
    bound_o = 6 * np.sqrt(spread[0].mean(-1, keepdims=True)) + 0 * o
    bound_state = 6 * np.sqrt(spread[1].mean((-2, -1), keepdims=True)) + 0 * last
    return {"O": Val(o, bound_o), "final_state": Val(last, bound_state)}


_TRIALS = 4


def _recurrence(
    arrays: Sequence[Array], initial: Array, bounds: Sequence[int], step: float, rng: Any
) -> tuple[Array, Array]:
    """Outputs and final states, token by token: q and k [T, H, K], v [T, H, V], decay [T, H, 1 or K], beta [T, H].

    With ``rng`` every operand, and the state at every token, is perturbed by up to ``step`` of its size.
    """

    def rounded(x: Array) -> Array:
        return x if rng is None else x * (1 + step * rng.uniform(-1, 1, x.shape))

    q, k, v, decay, beta = map(rounded, arrays)
    state, o = initial.copy(), np.zeros(v.shape)
    for n in range(len(bounds) - 1):
        for t in range(bounds[n], bounds[n + 1]):
            kept = rounded(state[n] * decay[t][:, None, :])
            update = rounded(beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", kept, k[t])))
            state[n] = kept + update[:, :, None] * k[t][:, None, :]
            o[t] = np.einsum("hvk,hk->hv", state[n], q[t])
    return o, state


RULES["gdn"] = RULES["kda"] = _delta

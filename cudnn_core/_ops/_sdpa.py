"""The row of ``sdpa`` (group ``sdpa``): ports, inference, cost and the builder. ``_sdpa_checks`` validates it.

Imported by the op table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._dims import Extent, product
from .._errors import GraphError
from ._common import TAIL_OUT_DIMS, dim_of, enum_name, node_bytes
from ._schema import Attr, Cost, Node, Op, Param, Port, TensorSpec
from ._sdpa_checks import seq_kv, validate

__all__ = ["ROWS"]

_OPTIONAL_INPUTS = (
    Port("attn_scale", optional=True, data=False),
    Port("bias", optional=True),
    Port("block_mask", optional=True, data=False),
    Port("seq_len_q", optional=True, data=False),
    Port("seq_len_kv", optional=True, data=False),
    Port("cu_seq_len_q", optional=True, data=False),
    Port("cu_seq_len_kv", optional=True, data=False),
    Port("seed", optional=True, data=False),
    Port("offset", optional=True, data=False),
    Port("dropout_mask", optional=True),
    Port("dropout_scale", optional=True, data=False),
    Port("paged_attention_k_table", optional=True, data=False),
    Port("paged_attention_v_table", optional=True, data=False),
    Port("sink_token", optional=True),
)


def _infer(node: Node) -> Mapping[str, TensorSpec]:
    q, v, keys = dim_of(node, "q"), dim_of(node, "v"), seq_kv(node)
    if q is None or v is None or len(q) != 4 or len(v) != 4:
        return {"O": TensorSpec(q)}
    rows = (*q[:3], 1)
    specs = {"O": TensorSpec((*q[:3], v[3]))}
    if node.attrs["generate_stats"]:
        specs["Stats"] = TensorSpec(rows, dtype="float32")
    for port in ("score_max", "score_sum_exp"):
        if port in node.outputs:
            specs[port] = TensorSpec(rows, dtype="float32")
    if "rng_dump" in node.outputs:
        specs["rng_dump"] = TensorSpec(None if keys is None else (*q[:3], keys))
    return specs


def _dims(node: Node) -> Mapping[str, Extent]:
    q, k, v, keys = node.inputs["q"].dim, node.inputs["k"].dim, node.inputs["v"].dim, seq_kv(node)
    named = {
        "batch": q[0],
        "heads_q": q[1],
        "heads_kv": k[1],
        "seq_q": q[2],
        "head_dim": q[3],
        "head_dim_v": v[3],
    }
    if keys is not None:
        named["seq_kv"] = keys
    return named


def _at_or_before(queries: int, keys: int, shift: int) -> int:
    """Pairs (i, j) of ``queries`` x ``keys`` with j <= i + shift."""
    first = min(max(-(shift + 1), 0), queries)
    full = min(max(keys - (shift + 1), first), queries)
    partial = full - first
    return partial * (first + full - 1) // 2 + partial * (shift + 1) + (queries - full) * keys


def visible_pairs(queries: int, keys: int, attrs: Mapping[str, Any]) -> int:
    """(query, key) pairs inside the diagonal band; lengths of padded sequences are not known here."""
    left, right = attrs["left_bound"], attrs["right_bound"]
    shift = keys - queries if attrs["diagonal_alignment"] == "BOTTOM_RIGHT" else 0
    upper = queries * keys if right is None else _at_or_before(queries, keys, shift + right)
    lower = 0 if left is None else _at_or_before(queries, keys, shift - left)
    return max(upper - lower, 0)


def _cost(node: Node) -> Cost:
    q, v = node.inputs["q"], node.inputs["v"]
    keys = seq_kv(node)
    assert isinstance(keys, int)
    pairs = visible_pairs(q.dim[2], keys, node.attrs)
    flops = 2.0 * q.dim[0] * q.dim[1] * pairs * (q.dim[3] + v.dim[3])
    unused = 0
    for port, table in (("k", "paged_attention_k_table"), ("v", "paged_attention_v_table")):
        if table in node.inputs:
            unused += _bytes_outside(node.inputs[port], node.inputs[table].dim)
    return Cost(flops, node_bytes(node) - unused, tensor=True, dtype=q.dtype)


def _bytes_outside(pool: Any, table: tuple[int, ...]) -> int:
    """Bytes of a page pool that the page table can't refer to."""
    from .._dtypes import nbytes

    pages = max(pool.dim[0] - table[0] * table[2], 0)
    page = product(pool.dim[1:])
    assert isinstance(page, int)
    return nbytes(pool.dtype, pages * page)


# The frontend's builder

# Parameters that change the result in a way that the row does not describe: only the default is accepted.
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "score_mod": (None, "a Python callback can't be part of a graph; write the modifier as bias or a mask"),
    "softmax_precision": (None, "the softmax runs in the compute data type"),
    "attn_scale_prefolded": (False, "fold the scale into q and pass attn_scale=1.0"),
    "kv_mask": (None, "pass the mask as bias"),
}

_PASSED = (
    "q",
    "k",
    "v",
    "block_mask",
    "seq_len_q",
    "seq_len_kv",
    "cu_seq_len_q",
    "cu_seq_len_kv",
    "paged_attention_k_table",
    "paged_attention_v_table",
    "sink_token",
    "bias",
    "rng_dump",
    "score_max",
    "score_sum_exp",
    "use_alibi_mask",
    "use_padding_mask",
    "paged_attention_max_seq_len_kv",
    "max_total_seq_len_q",
    "max_total_seq_len_kv",
    "implementation",
    "unfuse_fma",
    "stats_use_log2",
)


def _prepare(graph: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Rewrites the masks to bounds, the scale and dropout to attributes or ports, is_inference to generate_stats."""
    given = arguments.get
    for name, (default, instead) in _UNSUPPORTED.items():
        value = given(name, default)
        if value is not default and value is not None:
            raise GraphError(f"is not supported: {instead}", port=name, expected=default, actual=value)
    result = {name: given(name) for name in _PASSED if given(name) is not None}
    result["generate_stats"] = _generate_stats(given("is_inference"), given("generate_stats"))
    scale = given("attn_scale")
    if scale is not None:
        result["scale" if isinstance(scale, float | int) else "attn_scale"] = scale
    result.update(_bounds(arguments))
    if given("dropout") is not None:
        result.update(_dropout(given("dropout")))
    return result


def _generate_stats(is_inference: bool | None, generate_stats: bool | None) -> bool:
    if is_inference is None:
        return bool(generate_stats)
    if generate_stats is not None and generate_stats == is_inference:
        raise GraphError(
            "contradicts is_inference", port="generate_stats", expected=not is_inference, actual=generate_stats
        )
    return not is_inference


def _bounds(arguments: Mapping[str, Any]) -> dict[str, Any]:
    given = arguments.get
    alignment = enum_name(given("diagonal_alignment") or "TOP_LEFT")
    left, right = given("diagonal_band_left_bound"), given("diagonal_band_right_bound")
    top, bottom = given("use_causal_mask"), given("use_causal_mask_bottom_right")
    if top and bottom:
        raise GraphError("excludes use_causal_mask", port="use_causal_mask_bottom_right", expected=False, actual=True)
    if top or bottom:
        name = "use_causal_mask" if top else "use_causal_mask_bottom_right"
        if right not in (None, 0):
            raise GraphError(f"contradicts {name}", port="diagonal_band_right_bound", expected=0, actual=right)
        if top and alignment == "BOTTOM_RIGHT":
            raise GraphError(f"contradicts {name}", port="diagonal_alignment", expected="TOP_LEFT", actual=alignment)
        right = 0
        alignment = "TOP_LEFT" if top else "BOTTOM_RIGHT"
    window = given("sliding_window_length")
    if window is not None:
        if left not in (None, window):
            raise GraphError(
                "contradicts diagonal_band_left_bound", port="sliding_window_length", expected=left, actual=window
            )
        left = window
    return {"diagonal_alignment": alignment, "left_bound": left, "right_bound": right}


def _dropout(dropout: Any) -> dict[str, Any]:
    """(probability, seed, offset) or (mask, scale)."""
    if not isinstance(dropout, tuple | list) or len(dropout) not in (2, 3):
        raise GraphError(
            "is not a tuple", port="dropout", expected="(p, seed, offset) or (mask, scale)", actual=dropout
        )
    if len(dropout) == 3:
        probability, seed, offset = dropout
        if not isinstance(probability, float | int):
            raise GraphError("is not a probability", port="dropout", expected="a number", actual=probability)
        return {"dropout_probability": float(probability), "seed": seed, "offset": offset}
    mask, scale = dropout
    return {"dropout_mask": mask, "dropout_scale": scale}


def _keyword(name: str, default: Any = None, to: str = "") -> Param:
    return Param(name, default, to=to, keyword_only=True)


_PARAMS = (
    Param("q"),
    Param("k"),
    Param("v"),
    _keyword("is_inference", to="-"),
    _keyword("attn_scale", to="-"),
    _keyword("bias"),
    _keyword("block_mask"),
    _keyword("use_alibi_mask", False),
    _keyword("use_padding_mask", False),
    _keyword("seq_len_q"),
    _keyword("seq_len_kv"),
    _keyword("use_causal_mask", False, "-"),
    _keyword("use_causal_mask_bottom_right", False, "-"),
    _keyword("sliding_window_length", to="-"),
    _keyword("diagonal_alignment", "TOP_LEFT"),
    _keyword("diagonal_band_left_bound", to="-"),
    _keyword("diagonal_band_right_bound", to="-"),
    _keyword("dropout", to="-"),
    _keyword("rng_dump"),
    _keyword("paged_attention_k_table"),
    _keyword("paged_attention_v_table"),
    _keyword("paged_attention_max_seq_len_kv"),
    _keyword("max_total_seq_len_q"),
    _keyword("max_total_seq_len_kv"),
    _keyword("score_mod", to="-"),
    _keyword("generate_stats"),
    _keyword("implementation", "AUTO"),
    _keyword("score_max"),
    _keyword("score_sum_exp"),
    _keyword("sink_token"),
    _keyword("unfuse_fma", False),
    _keyword("cu_seq_len_q"),
    _keyword("cu_seq_len_kv"),
    _keyword("stats_use_log2", False),
    _keyword("softmax_precision", to="-"),
    _keyword("attn_scale_prefolded", False, "-"),
    _keyword("kv_mask", to="-"),
    *TAIL_OUT_DIMS,
)

ROWS: tuple[Op, ...] = (
    Op(
        "sdpa",
        group="sdpa",
        inputs=(Port("q"), Port("k"), Port("v"), *_OPTIONAL_INPUTS),
        outputs=(
            Port("O"),
            Port("Stats", data=False, when=lambda attrs: bool(attrs["generate_stats"])),
            Port("score_max", optional=True, data=False),
            Port("score_sum_exp", optional=True, data=False),
            Port("rng_dump", optional=True, data=False),
        ),
        attrs=(
            Attr("generate_stats", "bool", False),
            Attr("scale", "float", None),
            Attr("use_alibi_mask", "bool", False),
            Attr("use_padding_mask", "bool", False),
            Attr("diagonal_alignment", "enum", "TOP_LEFT", ("TOP_LEFT", "BOTTOM_RIGHT")),
            Attr("left_bound", "int", None),
            Attr("right_bound", "int", None),
            Attr("dropout_probability", "float", None),
            Attr("paged_attention_max_seq_len_kv", "int", None),
            Attr("max_total_seq_len_q", "int", None),
            Attr("max_total_seq_len_kv", "int", None),
            Attr("implementation", "enum", "AUTO", ("AUTO", "COMPOSITE", "UNIFIED")),
            Attr("unfuse_fma", "bool", False),
            Attr("stats_use_log2", "bool", False),
        ),
        infer=_infer,
        validate=validate,
        dims=_dims,
        operands={"q": "q", "k": "k", "v": "v", "O": "O"},
        cost=_cost,
        builders={"sdpa": (_PARAMS, _prepare)},
        doc="O = softmax(scale * q @ k^T + bias, masked) @ v. q [B, Hq, Sq, D], k [B, Hk, Skv, D], v [B, Hv, Skv, Dv] "
        "-> O [B, Hq, Sq, Dv], Stats (natural log, with stats_use_log2 the binary one, of the sum of "
        "exponentials, float32) [B, Hq, Sq, 1]. Hk and Hv divide "
        "Hq: query head h reads key head h // (Hq / Hk). scale is 1 by default. Query i sees key j iff "
        "j <= i + right_bound and j > i - left_bound; under BOTTOM_RIGHT i counts from (keys - queries), of the "
        "sequence's own lengths with use_padding_mask. Lengths are seq_len_q, seq_len_kv [B, 1, 1, 1] or [B], or "
        "cu_seq_len_q, cu_seq_len_kv [B + 1, 1, 1, 1] or [B + 1], their running sums. A row that sees no key, or lies past "
        "the length, gives O = 0 and Stats = -inf. bias and dropout_mask broadcast to [B, Hq, Sq, Skv]; sink_token [1, Hq, 1, 1] is one more logit without "
        "a value. ALiBi adds slope_h * (j - i). block_mask uint8 [B, Hq, ceil(Sq/128), ceil(Skv/1024)]: bit t of byte n "
        "keeps the keys of tile 8 n + t, 128 wide. Page tables [B, 1, pages, 1] hold page numbers into k and v, which are "
        "then [pool, H, page size, D].",
    ),
)

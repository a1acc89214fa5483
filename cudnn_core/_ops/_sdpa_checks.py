"""Validation of ``sdpa`` nodes. Imported by ``_sdpa`` only."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .._dims import Extent, product, same
from ._common import FLOATS, INDEX, INTEGERS, Checks, ceil_div, dim_of, elements, shape_text
from ._schema import Node, Problem

__all__ = ["seq_kv", "validate"]

_TABLES = (("k", "paged_attention_k_table"), ("v", "paged_attention_v_table"))
_FP8 = ("fp8_e4m3", "fp8_e5m2")


def seq_kv(node: Node) -> Extent | None:
    """The (largest) number of keys: k's or v's own, or for paged caches the declared or the tables' maximum."""
    for port, table in _TABLES:
        if table not in node.inputs:
            dim = dim_of(node, port)
            return None if dim is None or len(dim) != 4 else dim[2]
    declared = node.attrs["paged_attention_max_seq_len_kv"]
    if declared is not None:
        return int(declared)
    pool, pages = dim_of(node, "k"), dim_of(node, "paged_attention_k_table")
    if pool is None or pages is None or len(pool) != 4 or len(pages) != 4:
        return None
    return product((pages[2], pool[2]))


def validate(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    if not check.ranks(4, "q", "k", "v") or not check.ranks(4, "O"):
        return check.problems
    _operands(check)
    _masks(check)
    _lengths(check)
    _paging(check)
    _dropout(check)
    _outputs(check)
    return check.problems


def _operands(check: Checks) -> None:
    node = check.node
    q, k, v = (node.inputs[port] for port in ("q", "k", "v"))
    check.dtype("q", *FLOATS, *_FP8)
    for port, tensor in (("k", k), ("v", v)):
        check.require(tensor.dtype == q.dtype, port, "data type differs from q", q.dtype, tensor.dtype)
    paged = {port for port, table in _TABLES if table in node.inputs}
    for port, tensor in (("k", k), ("v", v)):
        heads, grouped = q.dim[1], tensor.dim[1]
        divides = (
            heads % grouped == 0
            if isinstance(heads, int) and isinstance(grouped, int) and grouped
            else same(heads, grouped)
        )
        check.require(divides, port, "number of heads does not divide q's", f"a divisor of {heads}", grouped)
        if port not in paged:
            check.require(same(tensor.dim[0], q.dim[0]), port, "batch differs from q", q.dim[0], tensor.dim[0])
    check.require(same(q.dim[3], k.dim[3]), "k", "head dimension differs from q", q.dim[3], k.dim[3])
    if not paged:
        check.require(same(k.dim[2], v.dim[2]), "v", "sequence length differs from k", k.dim[2], v.dim[2])
    scale = node.attrs["scale"]
    check.scalar("attn_scale", *FLOATS)
    if scale is not None:
        check.require(check.get("attn_scale") is None, "attn_scale", "is given both as a tensor and as a number")
        check.require(math.isfinite(scale), "scale", "is not finite", "a finite number", scale)
    for name in ("max_total_seq_len_q", "max_total_seq_len_kv"):
        value = node.attrs[name]
        check.require(value is None or value > 0, name, "is not positive", "> 0", value)


def _masks(check: Checks) -> None:
    node = check.node
    q, keys, attrs = node.inputs["q"].dim, seq_kv(node), node.attrs
    left, right, padded = attrs["left_bound"], attrs["right_bound"], attrs["use_padding_mask"]
    check.require(left is None or left >= 1, "left_bound", "is not positive", ">= 1", left)
    check.require(right is None or right >= 0, "right_bound", "is negative", ">= 0", right)
    more_queries = isinstance(q[2], int) and isinstance(keys, int) and q[2] > keys and not padded
    # With more queries than keys some rows would see no key at all, and their softmax is undefined.
    check.require(
        not (more_queries and left is not None), "left_bound", "needs as many keys as queries", f"Sq <= {keys}", q[2]
    )
    check.require(
        not (more_queries and right is not None and attrs["diagonal_alignment"] == "BOTTOM_RIGHT"),
        "diagonal_alignment",
        "BOTTOM_RIGHT with a right bound needs as many keys as queries",
        f"Sq <= {keys}",
        q[2],
    )
    check.require(not attrs["use_alibi_mask"] or right == 0, "use_alibi_mask", "needs a causal mask", 0, right)
    if check.rank("bias", 4) and keys is not None:
        check.broadcasts("bias", (*q[:3], keys))
        check.dtype("bias", *FLOATS)
    mask = check.get("block_mask")
    if mask is not None:
        check.dtype("block_mask", "uint8")
        tiles = ceil_div(q[2], 128), None if keys is None else ceil_div(keys, 1024)
        if None not in tiles:
            check.shape("block_mask", (*q[:2], *tiles))  # type: ignore[arg-type]
    check.shape("sink_token", (1, q[1], 1, 1))
    check.dtype("sink_token", "float32")


def _lengths(check: Checks) -> None:
    node = check.node
    batch, padded = node.inputs["q"].dim[0], node.attrs["use_padding_mask"]
    for side in ("q", "kv"):
        port, running = f"seq_len_{side}", f"cu_seq_len_{side}"
        given = [name for name in (port, running) if name in node.inputs]
        check.require(len(given) < 2, running, f"excludes {port}", "absent", "a tensor")
        check.require(
            not padded or bool(given), port, f"use_padding_mask needs it (or {running})", "a tensor", "absent"
        )
        check.require(padded or not given, given[0] if given else port, "needs use_padding_mask", True, padded)
        for name in given:
            check.dtype(name, *INDEX)
            count = batch if name == port else batch + 1 if isinstance(batch, int) else node.inputs[name].dim[0]
            if len(node.inputs[name].dim) == 1:
                check.shape(name, (count,))
            else:
                check.shape(name, (count, 1, 1, 1))
    for port in ("q", "k", "v", "O", "Stats"):
        offsets = getattr(check.get(port), "ragged_offset", None)
        if offsets is None:
            continue
        check.require(padded, port, "a ragged tensor needs use_padding_mask", True, padded)
        check.require(
            offsets.dtype in INDEX, port, "wrong data type of ragged_offset", " or ".join(INDEX), offsets.dtype
        )
        if isinstance(batch, int) and offsets.dim is not None:
            count = elements(offsets)
            check.require(same(count, batch + 1), port, "wrong size of ragged_offset", batch + 1, count)


def _paging(check: Checks) -> None:
    node = check.node
    q, longest = node.inputs["q"].dim, node.attrs["paged_attention_max_seq_len_kv"]
    paged = [(port, table) for port, table in _TABLES if table in node.inputs]
    if not paged:
        check.require(longest is None, "paged_attention_max_seq_len_kv", "is only for paged caches", "None", longest)
        return
    check.require(longest is None or longest > 0, "paged_attention_max_seq_len_kv", "is not positive", "> 0", longest)
    check.require(node.attrs["use_padding_mask"], "use_padding_mask", "paged caches need sequence lengths", True, False)
    for port, table in paged:
        dim, page = node.inputs[table].dim, node.inputs[port].dim[2]
        check.dtype(table, *INDEX)
        shaped = len(dim) == 4 and same(dim[0], q[0]) and same(dim[1], 1) and same(dim[3], 1)
        check.require(shaped, table, "wrong shape", f"({q[0]}, 1, pages, 1)", shape_text(dim))
        if shaped and isinstance(longest, int) and isinstance(dim[2], int) and isinstance(page, int):
            check.require(
                dim[2] * page >= longest,
                table,
                "too few pages for paged_attention_max_seq_len_kv",
                f">= {-(-longest // page)}" if page else "pages that hold a key",
                dim[2],
            )


def _dropout(check: Checks) -> None:
    node = check.node
    probability, q, keys = node.attrs["dropout_probability"], node.inputs["q"].dim, seq_kv(node)
    for port in ("seed", "offset"):
        check.require(
            (probability is None) == (port not in node.inputs),
            port,
            "comes with dropout_probability and only with it",
            "absent" if probability is None else "a tensor",
            "absent" if probability is not None else "a tensor",
        )
        check.scalar(port, *INDEX)
    if probability is not None:
        check.require(0.0 <= probability < 1.0, "dropout_probability", "is not a probability", "[0, 1)", probability)
        check.require(
            "dropout_mask" not in node.inputs, "dropout_mask", "excludes dropout_probability", "absent", "a tensor"
        )
    check.requires("dropout_mask", "dropout_scale")
    check.requires("dropout_scale", "dropout_mask")
    check.scalar("dropout_scale", *FLOATS)
    if check.rank("dropout_mask", 4) and keys is not None:
        check.broadcasts("dropout_mask", (*q[:3], keys))
        check.dtype("dropout_mask", "boolean", *INTEGERS, *FLOATS)
    check.require(
        "rng_dump" not in node.outputs or probability is not None,
        "rng_dump",
        "needs dropout_probability",
        "a probability",
        None,
    )


def _outputs(check: Checks) -> None:
    node = check.node
    q, v, keys = node.inputs["q"].dim, node.inputs["v"].dim, seq_kv(node)
    check.shape("O", (*q[:3], v[3]))
    for port in ("Stats", "score_max", "score_sum_exp"):
        check.shape(port, (*q[:3], 1))
        check.dtype(port, "float32")
    if keys is not None:
        check.shape("rng_dump", (*q[:3], keys))

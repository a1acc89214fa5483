"""sdpa against a loop over rows in numpy fp64, and against torch's own attention where it has the feature."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Net, rand, reasons, run, single
from torch_reference._lower._sdpa import alibi_slopes

D = torch.float64
B, H, S, T, E = 2, 4, 5, 7, 8
ATTRS = {
    "generate_stats": True, "scale": None, "use_alibi_mask": False, "use_padding_mask": False,
    "diagonal_alignment": "TOP_LEFT", "left_bound": None, "right_bound": None, "dropout_probability": None,
    "paged_attention_max_seq_len_kv": None, "implementation": "AUTO",
}  # fmt: skip


def build(extra=None, outputs=("O", "Stats"), dims=None, dtype="float64", **attrs):
    """A graph of one sdpa node and the names of its inputs. ``extra``: port -> (dtype, dim)."""
    b, h, hk, hv, s, t, e, ev = {
        **dict(zip(["b", "h", "hk", "hv", "s", "t", "e", "ev"], (B, H, H, H, S, T, E, E), strict=False)),
        **(dims or {}),
    }.values()
    inputs = {"q": (dtype, (b, h, s, e)), "k": (dtype, (b, hk, t, e)), "v": (dtype, (b, hv, t, ev)), **(extra or {})}
    shape = {"O": (b, h, s, ev)}
    declared = {port: (dtype if port == "O" else "float64", shape.get(port, (b, h, s, 1))) for port in outputs}
    return single("sdpa", inputs, declared, {**ATTRS, **attrs}, "float64")


def loop(q, k, v, score=lambda b, h, i, j: 0.0, scale=1.0, keep=lambda b, h, i, j: True, sink=None, drop=None):
    """O, Stats, max, sum by the definition, one row at a time."""
    q, k, v = (x.double().numpy() for x in (q, k, v))
    b_, h_, s, _ = q.shape
    o = np.zeros((b_, h_, s, v.shape[3]))
    stats, top, total = (np.zeros((b_, h_, s, 1)) for _ in range(3))
    for b, h, i in itertools.product(range(b_), range(h_), range(s)):
        kh, vh = h * k.shape[1] // h_, h * v.shape[1] // h_
        kept = [j for j in range(k.shape[2]) if keep(b, h, i, j)]
        logits = {j: float(q[b, h, i] @ k[b, kh, j]) * scale + score(b, h, i, j) for j in kept}
        every = [*logits.values(), *([] if sink is None else [float(sink[h])])]
        m = max(every, default=-math.inf)
        z = math.fsum(math.exp(x - m) for x in every)
        for j, x in logits.items():
            p = math.exp(x - m) / z
            o[b, h, i] += p * (1 if drop is None else float(drop[b, h, i, j])) * v[b, vh, j]
        top[b, h, i], total[b, h, i] = m, z
        stats[b, h, i] = m + (math.log(z) if z else -math.inf)
    return {"O": o, "Stats": stats, "score_max": top, "score_sum_exp": total}


def qkv(dims=None):
    b, h, hk, hv, s, t, e, ev = {
        **dict(zip(["b", "h", "hk", "hv", "s", "t", "e", "ev"], (B, H, H, H, S, T, E, E), strict=False)),
        **(dims or {}),
    }.values()
    return rand(b, h, s, e, dtype=D), rand(b, hk, t, e, seed=1, dtype=D), rand(b, hv, t, ev, seed=2, dtype=D)


def check(found, expected, ports=("O", "Stats")):
    for port in ports:
        np.testing.assert_allclose(found[port].double().numpy(), expected[port], rtol=1e-12, atol=1e-12, err_msg=port)


def test_without_a_scale_scores_are_not_scaled():
    q, k, v = qkv()
    ports = ("O", "Stats", "score_max", "score_sum_exp")
    check(run(build(outputs=ports), {"q": q, "k": k, "v": v}), loop(q, k, v), ports)


def test_matches_torch_with_a_scale_and_a_causal_mask():
    q, k, v = qkv({"t": S})
    found = run(build(dims={"t": S}, scale=0.25, right_bound=0), {"q": q, "k": k, "v": v})
    torch.testing.assert_close(found["O"], F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25))


def test_scale_as_a_tensor():
    q, k, v = qkv()
    found = run(
        build({"attn_scale": ("float32", (1, 1, 1, 1))}), {"q": q, "k": k, "v": v, "attn_scale": torch.tensor([0.5])}
    )
    check(found, loop(q, k, v, scale=0.5))


@pytest.mark.parametrize(("hk", "hv"), [(2, 2), (1, 1), (2, 4), (4, 1)])
def test_grouped_heads_and_unequal_head_dims(hk, hv):
    dims = {"hk": hk, "hv": hv, "ev": 3}
    q, k, v = qkv(dims)
    check(run(build(dims=dims), {"q": q, "k": k, "v": v}), loop(q, k, v))


@pytest.mark.parametrize("dim", [(B, H, S, T), (1, H, S, T), (B, 1, S, T), (1, 1, 1, T)])
def test_bias_broadcasts(dim):
    q, k, v = qkv()
    bias = rand(*dim, seed=5, dtype=D)
    found = run(build({"bias": ("float64", dim)}), {"q": q, "k": k, "v": v, "bias": bias})
    full = bias.expand(B, H, S, T).numpy()
    check(found, loop(q, k, v, score=lambda b, h, i, j: full[b, h, i, j]))


@pytest.mark.parametrize("alignment", ["TOP_LEFT", "BOTTOM_RIGHT"])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (2, None), (2, 1), (1, 0), (None, 2)])
@pytest.mark.parametrize("lengths", [None, ([3, 5], [7, 4]), ([5, 0], [0, 6])])
def test_bands_in_both_alignments_with_and_without_lengths(alignment, left, right, lengths):
    q, k, v = qkv()
    values, extra = {"q": q, "k": k, "v": v}, {}
    sq, st = lengths or ([S] * B, [T] * B)
    if lengths:
        extra = {"seq_len_q": ("int32", (B, 1, 1, 1)), "seq_len_kv": ("int32", (B, 1, 1, 1))}
        values |= {"seq_len_q": torch.tensor(sq, dtype=torch.int32), "seq_len_kv": torch.tensor(st, dtype=torch.int32)}

    def keep(b, h, i, j):
        shift = st[b] - sq[b] if alignment == "BOTTOM_RIGHT" else 0
        band = (right is None or j <= i + shift + right) and (left is None or j > i + shift - left)
        return band and i < sq[b] and j < st[b]

    graph = build(
        extra, use_padding_mask=bool(lengths), diagonal_alignment=alignment, left_bound=left, right_bound=right
    )
    check(run(graph, values), loop(q, k, v, keep=keep))


def test_padding_never_lets_what_lies_beyond_the_length_into_a_product():
    q, k, v = qkv()
    k[0, :, 3:], v[0, :, 3:], q[0, :, 2:] = math.nan, math.inf, math.nan
    extra = {"seq_len_q": ("int32", (B, 1, 1, 1)), "seq_len_kv": ("int32", (B, 1, 1, 1))}
    values = {
        "q": q,
        "k": k,
        "v": v,
        "seq_len_q": torch.tensor([2, S], dtype=torch.int32),
        "seq_len_kv": torch.tensor([3, T], dtype=torch.int32),
    }
    found = run(build(extra, use_padding_mask=True), values)
    assert found["O"].isfinite().all()
    assert (found["O"][0, :, 2:] == 0).all()
    assert (found["Stats"][0, :, 2:] == -math.inf).all()


def test_alibi_adds_slope_times_distance():
    dims = {"h": 6, "hk": 6, "hv": 6}
    q, k, v = qkv(dims)
    slopes = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]  # Press et al. 2021, for 4 heads and then every other of 8
    assert alibi_slopes(6) == slopes
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    found = run(build(dims=dims, use_alibi_mask=True, right_bound=0), {"q": q, "k": k, "v": v})
    check(found, loop(q, k, v, score=lambda b, h, i, j: slopes[h] * (j - i), keep=lambda b, h, i, j: j <= i))


def test_a_sink_joins_the_denominator():
    q, k, v = qkv()
    sink = torch.tensor([0.5, -2.0, 3.0, 40.0])
    ports = ("O", "Stats", "score_max", "score_sum_exp")
    found = run(build({"sink_token": ("float32", (1, H, 1, 1))}, ports), {"q": q, "k": k, "v": v, "sink_token": sink})
    check(found, loop(q, k, v, sink=sink), ports)


def test_a_row_without_keys_is_empty_even_with_a_sink():
    q, k, v = qkv()
    ports = ("O", "Stats", "score_max", "score_sum_exp")
    extra = {
        "sink_token": ("float32", (1, H, 1, 1)),
        "cu_seq_len_q": ("int32", (B + 1,)),
        "cu_seq_len_kv": ("int64", (B + 1,)),
    }
    values = {"q": q, "k": k, "v": v, "sink_token": torch.ones(H), "cu_seq_len_q": torch.tensor([0, 2, 7], dtype=torch.int32),
              "cu_seq_len_kv": torch.tensor([0, 7, 7])}  # fmt: skip
    found = run(build(extra, ports, use_padding_mask=True), values)
    for rows in ((0, slice(2, None)), (1, slice(None))):
        assert (found["O"][rows[0], :, rows[1]] == 0).all()
        assert (found["Stats"][rows[0], :, rows[1]] == -math.inf).all()
        assert (found["score_sum_exp"][rows[0], :, rows[1]] == 0).all()
    expected = loop(q[:1, :, :2], k[:1], v[:1], sink=torch.ones(H))
    np.testing.assert_allclose(found["O"][:1, :, :2].numpy(), expected["O"], rtol=1e-12, atol=1e-12)


def test_binary_statistics():
    q, k, v = qkv()
    found = run(build(stats_use_log2=True), {"q": q, "k": k, "v": v})
    np.testing.assert_allclose(found["Stats"].numpy(), loop(q, k, v)["Stats"] * math.log2(math.e), rtol=1e-12)


def test_dropout_mask_and_scale_multiply_the_probabilities():
    q, k, v = qkv()
    mask = (rand(B, 1, S, T, seed=7) > 0).float()
    extra = {"dropout_mask": ("float32", (B, 1, S, T)), "dropout_scale": ("float32", (1, 1, 1, 1))}
    found = run(build(extra), {"q": q, "k": k, "v": v, "dropout_mask": mask, "dropout_scale": torch.tensor([2.0])})
    check(found, loop(q, k, v, drop=2 * mask.expand(B, H, S, T).numpy()))


def test_random_dropout_is_declined_by_name():
    extra = {"seed": ("int64", (1, 1, 1, 1)), "offset": ("int64", (1, 1, 1, 1))}
    assert reasons(build(extra, dropout_probability=0.1)) == [("op.attribute", "sdpa.dropout_probability")]
    assert reasons(build(extra, dropout_probability=0.0)) == []


def test_block_mask_drops_tiles_of_128_by_128():
    dims = {"b": 1, "h": 2, "hk": 2, "hv": 2, "s": 130, "t": 1100, "e": 2, "ev": 2}
    q, k, v = qkv(dims)
    bits = torch.tensor([[[[0b00000101, 0b1], [0b0, 0b0]], [[0xFF, 0xFF], [0b10, 0b0]]]], dtype=torch.uint8)
    found = run(build({"block_mask": ("uint8", (1, 2, 2, 2))}, dims=dims), {"q": q, "k": k, "v": v, "block_mask": bits})
    kept = lambda b, h, i, j: bool(int(bits[b, h, i // 128, j // 128 // 8]) >> (j // 128 % 8) & 1)  # noqa: E731
    rows = [0, 127, 128, 129]
    expected = loop(q[:, :, rows], k, v, keep=lambda b, h, i, j: kept(b, h, rows[i], j))
    np.testing.assert_allclose(found["O"][:, :, rows].numpy(), expected["O"], rtol=1e-12, atol=1e-12)
    assert (found["O"][0, 0, 128:] == 0).all()


@pytest.mark.parametrize("page", [1, 2, 4])
def test_paged_keys_and_values(page):
    q, k, v = qkv()
    pages = -(-T // page)
    order = torch.randperm(B * pages, generator=torch.Generator().manual_seed(3)).reshape(B, pages)
    pools = {}
    for name, x in (("k", k), ("v", v)):
        pool = torch.full((B * pages, H, page, E), math.nan, dtype=D)
        padded = F.pad(x, (0, 0, 0, pages * page - T))
        for b, p in itertools.product(range(B), range(pages)):
            pool[order[b, p]] = padded[b, :, p * page : (p + 1) * page]
        pools[name] = pool
    pool_dim, table = ("float64", (B * pages, H, page, E)), ("int32", (B, 1, pages, 1))
    lengths = [7, 3]
    graph = single(
        "sdpa",
        {
            "q": ("float64", (B, H, S, E)), "k": pool_dim, "v": pool_dim, "paged_attention_k_table": table,
            "paged_attention_v_table": table, "seq_len_q": ("int32", (B, 1, 1, 1)), "seq_len_kv": ("int32", (B, 1, 1, 1)),
        },
        {"O": ("float64", (B, H, S, E)), "Stats": ("float64", (B, H, S, 1))},
        {**ATTRS, "use_padding_mask": True, "paged_attention_max_seq_len_kv": T},
        "float64",
    )  # fmt: skip
    tables = order.to(torch.int32).clone()
    found = run(graph, {
        "q": q, **pools, "paged_attention_k_table": tables, "paged_attention_v_table": tables,
        "seq_len_q": torch.tensor([S, S], dtype=torch.int32), "seq_len_kv": torch.tensor(lengths, dtype=torch.int32),
    })  # fmt: skip
    check(found, loop(q, k, v, keep=lambda b, h, i, j: j < lengths[b]))


@pytest.mark.parametrize("multiplier", [1, H * E])
def test_ragged_operands_are_read_and_written_by_their_offsets(multiplier):
    """THD memory with a gap between the sequences: the gap is neither read nor written."""
    lengths, capacity = [3, 5], 11
    starts = [0, 4, 9]
    net = Net()
    net.t("offsets", "int32", (B + 1, 1, 1, 1))
    net.t("stat_offsets", "int64", (B + 1, 1, 1, 1))
    thd = (H * E * S, E, H * E, 1)
    for name in ("q", "k", "v"):
        net.t(name, "float64", (B, H, S, E), thd, ragged="offsets", ragged_offset_multiplier=multiplier)
    for name in ("seq_len_q", "seq_len_kv"):
        net.t(name, "int32", (B, 1, 1, 1))
    net.t("O", "float64", (B, H, S, E), thd, ragged="offsets", ragged_offset_multiplier=multiplier)
    net.t("Stats", "float32", (B, H, S, 1), (H * S, 1, H, 1), ragged="stat_offsets")
    ports = ("q", "k", "v", "seq_len_q", "seq_len_kv")
    net.op(
        "sdpa",
        {p: p for p in ports},
        {"O": "O", "Stats": "Stats"},
        {**ATTRS, "use_padding_mask": True, "right_bound": 0},
    )
    graph = net.frozen()
    flat = {name: rand(capacity, H, E, seed=i, dtype=D) for i, name in enumerate("qkv")}
    for x in flat.values():
        x[3], x[9:] = math.nan, math.nan
    out, stats = torch.full((capacity, H, E), 7.0, dtype=D), torch.full((capacity, H), 7.0)
    unit = H * E // multiplier
    run(graph, {
        **flat, "O": out, "Stats": stats, "offsets": torch.tensor([s * unit for s in starts], dtype=torch.int32),
        "stat_offsets": torch.tensor([s * H for s in starts]),
        "seq_len_q": torch.tensor(lengths, dtype=torch.int32), "seq_len_kv": torch.tensor(lengths, dtype=torch.int32),
    })  # fmt: skip
    for start, length in zip(starts, lengths, strict=False):
        rows = slice(start, start + length)
        q, k, v = (flat[name][rows].transpose(0, 1)[None] for name in "qkv")
        expected = loop(q, k, v, keep=lambda b, h, i, j: j <= i)
        np.testing.assert_allclose(out[rows].transpose(0, 1)[None].numpy(), expected["O"], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(stats[rows].T[None, :, :, None].numpy(), expected["Stats"], rtol=1e-6)
    assert (out[3] == 7).all() and (out[9:] == 7).all()  # noqa: PT018
    assert (stats[3] == 7).all() and (stats[9:] == 7).all()  # noqa: PT018


def test_blocks_of_rows_give_the_same_result(monkeypatch):
    import torch_reference._lower._sdpa as module

    q, k, v = qkv()
    whole = run(build(right_bound=0), {"q": q, "k": k, "v": v})
    monkeypatch.setattr(module, "_BLOCK", 2 * H * T)
    parts = run(build(right_bound=0), {"q": q, "k": k, "v": v})
    torch.testing.assert_close(parts["O"], whole["O"], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(parts["Stats"], whole["Stats"], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dims", [{"t": 0}, {"s": 0}, {"b": 0}])
def test_empty_sizes(dims):
    q, k, v = qkv(dims)
    found = run(build(dims=dims), {"q": q, "k": k, "v": v})
    assert found["O"].numel() == 0 or (found["O"] == 0).all()


def test_nan_in_a_query_stays_in_its_row():
    q, k, v = qkv()
    q[0, 1, 2, 3] = math.nan
    out = run(build(), {"q": q, "k": k, "v": v})["O"]
    bad = out.isnan().any(-1)
    assert bad[0, 1, 2]
    assert bad.sum() == 1


def test_unknown_attributes_are_declined():
    graph = build(attn_scale_prefolded=True, something_new=3)
    assert reasons(graph) == [("op.attribute", "sdpa.attn_scale_prefolded"), ("op.attribute", "sdpa.something_new")]

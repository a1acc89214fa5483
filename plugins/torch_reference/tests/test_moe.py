"""moe_grouped_matmul against loops over routed rows."""

from __future__ import annotations

import pytest
import torch
from helpers import rand, reasons, run, single

D = torch.float64
E, T, K, N = 3, 7, 4, 5
OFFSETS = [0, 2, 2, 7]  # the second expert gets nothing


def graph(mode, rows_in, rows_out, offsets=4, top_k=None, extra=None, experts=E):
    inputs = {
        "token": ("float64", (1, rows_in, K)),
        "weight": ("float64", (experts, K, N), (K * N, 1, K)),
        "first_token_offset": ("int32", (offsets, 1, 1)),
        **(extra or {}),
    }
    return single(
        "moe_grouped_matmul", inputs, {"Y": ("float64", (1, rows_out, N))}, {"mode": mode, "top_k": top_k}, "float64"
    )


def weights(experts=E):
    w = rand(experts, N, K, seed=1, dtype=D)  # K-major memory
    return w, w.transpose(1, 2)


def expert_of(row, offsets=OFFSETS, experts=E):
    return next(g for g in range(len(offsets) - 1) if offsets[g] <= row < offsets[g + 1]) % experts


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_none():
    x, (memory, w) = rand(T, K, dtype=D), weights()
    out = run(graph("NONE", T, T), {"token": x, "weight": memory, "first_token_offset": i32(*OFFSETS)})["Y"][0]
    for r in range(T):
        torch.testing.assert_close(out[r], x[r] @ w[expert_of(r)])


def test_starts_without_an_end_reach_to_the_last_row():
    x, (memory, w) = rand(T, K, dtype=D), weights()
    out = run(graph("NONE", T, T, offsets=3), {"token": x, "weight": memory, "first_token_offset": i32(0, 2, 2)})["Y"][
        0
    ]
    torch.testing.assert_close(out[6], x[6] @ w[2])


def test_several_batches_of_groups_reuse_the_experts():
    offsets, x, (memory, w) = [0, 1, 2, 3, 4, 5, 7], rand(T, K, dtype=D), weights()
    out = run(graph("NONE", T, T, offsets=7), {"token": x, "weight": memory, "first_token_offset": i32(*offsets)})["Y"][
        0
    ]
    for r in range(T):
        torch.testing.assert_close(out[r], x[r] @ w[expert_of(r, offsets)])


def test_rows_of_no_group_are_zero():
    x, (memory, _) = rand(T, K, dtype=D), weights()
    out = run(graph("NONE", T, T), {"token": x, "weight": memory, "first_token_offset": i32(0, 2, 2, 4)})["Y"][0]
    assert (out[4:] == 0).all()
    assert (out[:4] != 0).all()


def test_gather():
    x, (memory, w) = rand(4, K, dtype=D), weights()
    index = [3, 0, 1, 1, 2, 9, -1]
    values = {"token": x, "weight": memory, "first_token_offset": i32(*OFFSETS), "token_index": i32(*index)}
    out = run(graph("GATHER", 4, T, extra={"token_index": ("int32", (1, T, 1))}), values)["Y"][0]
    for r, i in enumerate(index):
        torch.testing.assert_close(out[r], x[i] @ w[expert_of(r)] if 0 <= i < 4 else torch.zeros(N, dtype=D))


ROUTED = {"token_index": ("int32", (1, 6, 1)), "token_ks": ("int32", (1, 6, 1))}
INDEX, SLOT = [2, 0, 1, 0, 2, 1], [0, 1, 0, 0, 1, 1]


def test_scatter():
    offsets, x, (memory, w) = [0, 2, 3, 6], rand(6, K, dtype=D), weights()
    values = {
        "token": x,
        "weight": memory,
        "first_token_offset": i32(*offsets),
        "token_index": i32(*INDEX),
        "token_ks": i32(*SLOT),
    }
    out = run(graph("SCATTER", 6, 6, top_k=2, extra=ROUTED), values)["Y"][0]
    for r in range(6):
        torch.testing.assert_close(out[INDEX[r] * 2 + SLOT[r]], x[r] @ w[expert_of(r, offsets)])


def test_scatter_drops_rows_that_point_outside():
    x, (memory, _) = rand(6, K, dtype=D), weights()
    values = {
        "token": x,
        "weight": memory,
        "first_token_offset": i32(0, 2, 3, 6),
        "token_index": i32(5, 0, -1, 0, 2, 1),
        "token_ks": i32(0, 1, 0, 0, 7, 1),
    }
    out = run(graph("SCATTER", 6, 6, top_k=2, extra=ROUTED), values)["Y"][0]
    assert [bool(row.any()) for row in out] == [True, True, False, True, False, False]


def test_combine_sums_the_weighted_rows_of_a_token():
    offsets, x, (memory, w), scores = [0, 2, 3, 6], rand(6, K, dtype=D), weights(), rand(3, 2, seed=8)
    extra = {**ROUTED, "top_k_scores": ("float32", (1, 3, 2))}
    values = {
        "token": x,
        "weight": memory,
        "first_token_offset": i32(*offsets),
        "token_index": i32(*INDEX),
        "token_ks": i32(*SLOT),
        "top_k_scores": scores,
    }
    out = run(graph("COMBINE", 6, 3, top_k=2, extra=extra), values)["Y"][0]
    expected = torch.zeros(3, N, dtype=D)
    for r in range(6):
        expected[INDEX[r]] += scores[INDEX[r], SLOT[r]].double() * (x[r] @ w[expert_of(r, offsets)])
    torch.testing.assert_close(out, expected)


def test_a_single_expert_takes_boundaries():
    x, (memory, w) = rand(T, K, dtype=D), weights(1)
    out = run(
        graph("NONE", T, T, offsets=2, experts=1), {"token": x, "weight": memory, "first_token_offset": i32(1, 5)}
    )["Y"][0]
    torch.testing.assert_close(out[1:5], x[1:5] @ w[0])
    assert (out[:1] == 0).all()


@pytest.mark.parametrize("offsets", [2, 5])
def test_offsets_that_fit_no_number_of_groups_are_declined(offsets):
    assert reasons(graph("NONE", T, T, offsets=offsets)) == [("shape.multiple_of", "first_token_offset")]

"""The sizes and operands that configuration rules can name."""

import pytest

from cudnn_core._ops._table import in_tree

from ._fakes import call, index, scalar, tensor

NODES = {
    "matmul": (
        lambda: call("matmul", tensor(5, 1, 2, 3), tensor(1, 6, 3, 4)),
        {"m": 2, "n": 4, "k": 3, "batch": 30},
    ),
    "pointwise": (lambda: call("add", tensor(2, 3), tensor(1, 3)), {"elements": 6}),
    "reduction": (
        lambda: call("reduction", tensor(4, 5, 6), mode="ADD", out_dims=(4, 1, 6)),
        {"rows": 24, "cols": 5},
    ),
    "grouped reduction": (
        lambda: call("reduction", tensor(1, 40, 6), index(4), "ADD", out_dims=(3, 1, 6)),
        {"rows": 18, "cols": 40},
    ),
    "slice": (lambda: call("slice", tensor(4, 6), [slice(0, 2)]), {"elements": 12}),
    "layernorm": (
        lambda: call("layernorm", tensor(2, 5, 8), tensor(1, 1, 8), None, scalar(), "INFERENCE"),
        {"rows": 10, "cols": 8},
    ),
    "rmsnorm": (
        lambda: call("rmsnorm", tensor(10, 8, 1, 1), tensor(1, 8, 1, 1), None, scalar(), "INFERENCE"),
        {"rows": 10, "cols": 8},
    ),
    "sdpa": (
        lambda: call("sdpa", tensor(2, 8, 6, 16), tensor(2, 4, 10, 16), tensor(2, 4, 10, 32)),
        {"batch": 2, "heads_q": 8, "heads_kv": 4, "seq_q": 6, "seq_kv": 10, "head_dim": 16, "head_dim_v": 32},
    ),
    "conv": (
        lambda: call("conv_fprop", tensor(2, 4, 9, 8), tensor(6, 4, 3, 2)),
        {"n": 2, "c": 4, "k": 6, "h": 9, "w": 8, "r": 3, "s": 2, "p": 7, "q": 7},
    ),
    "conv1d": (
        lambda: call("conv_fprop", tensor(2, 4, 9), tensor(6, 4, 3)),
        {"n": 2, "c": 4, "k": 6, "w": 9, "s": 3, "q": 7},
    ),
    "conv3d": (
        lambda: call("conv_fprop", tensor(2, 4, 5, 9, 8), tensor(6, 4, 1, 3, 2)),
        {"n": 2, "c": 4, "k": 6, "d": 5, "h": 9, "w": 8, "t": 1, "r": 3, "s": 2, "o": 5, "p": 7, "q": 7},
    ),
    "dequantize": (
        lambda: call("block_scale_dequantize", tensor(4, 8, 64, dtype="fp8_e4m3"), tensor(4, 8, 2), [1, 32]),
        {"rows": 32, "cols": 64},
    ),
    "moe": (
        lambda: call("moe_grouped_matmul", tensor(1, 12, 16), tensor(4, 16, 24), index(5, 1, 1)),
        {"m": 12, "n": 24, "k": 16, "experts": 4},
    ),
    "gathered moe": (
        lambda: call(
            "moe_grouped_matmul", tensor(1, 12, 16), tensor(4, 16, 24), index(5, 1, 1), index(1, 30, 1), mode="GATHER"
        ),
        {"m": 30, "n": 24, "k": 16, "experts": 4},
    ),
    "gdn": (
        lambda: call("gdn", *[tensor(9, 2, 4)] * 2, tensor(9, 6, 8), tensor(9, 6), tensor(9, 6), index(4)),
        {
            "total_tokens": 9,
            "heads_k": 2,
            "heads_q": 2,
            "heads_v": 6,
            "head_dim_k": 4,
            "head_dim_v": 8,
            "sequences": 3,
        },
    ),
}


@pytest.mark.parametrize("case", NODES)
def test_sizes_by_name(case):
    make, expected = NODES[case]
    node = make()
    assert dict(node.row.dims(node)) == expected


OPERANDS = {
    "matmul": {"A": "A", "B": "B", "C": "C"},
    "moe_grouped_matmul": {"A": "token", "B": "weight", "C": "Y"},
    "conv_fprop": {"image": "image", "weight": "weight", "Y": "Y"},
    "sdpa": {"q": "q", "k": "k", "v": "v", "O": "O"},
    "layernorm": {"A": "input", "C": "Y", "scale": "scale"},
    "add": {"in0": "in0", "in1": "in1", "out": "out"},
}


@pytest.mark.parametrize("op", OPERANDS)
def test_operands_by_name(op):
    assert in_tree()[op].operands == OPERANDS[op]


def test_only_listed_outputs_may_lie_in_an_input():
    aliases = {name: set(row.alias) for name, row in in_tree().items()}
    assert aliases["add"] == {("out", "in0"), ("out", "in1")}
    assert [name for name, row in in_tree().items() if row.in_place] == ["concatenate"]
    assert aliases["gdn"] == aliases["kda"] == {("final_state", "initial_state")}
    assert not any(
        aliases[name] for name in ("matmul", "sdpa", "layernorm", "reduction", "reshape", "transpose", "slice")
    )


def test_indices_and_statistics_are_not_data():
    def aside(name):
        row = in_tree()[name]
        return {port.name for port in (*row.inputs, *row.outputs) if not port.data}

    assert {"seq_len_q", "seed", "paged_attention_k_table", "Stats"} <= aside("sdpa")
    assert aside("gdn") == {"cu_seqlens", "state_indices"}
    assert aside("moe_grouped_matmul") == {"first_token_offset", "token_index", "token_ks"}
    assert aside("layernorm") == {"epsilon", "mean", "inv_variance"}
    assert aside("reduction") == {"group_offset"}

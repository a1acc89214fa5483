"""Work and traffic of each op, against numbers counted by hand."""

import pytest

from cudnn_core._ops._sdpa import visible_pairs

from ._fakes import call, cost_of, index, scalar, tensor


def test_matmul():
    node = call(
        "matmul",
        tensor(3, 2, 4, dtype="bfloat16"),
        tensor(1, 4, 5, dtype="bfloat16"),
        _out={"C": {"dtype": "float32"}},
    )
    # 3 * 2 * 5 outputs of 4 products and 4 sums; 24 + 20 elements of two bytes, 30 of four.
    assert cost_of(node) == (3 * 2 * 5 * 4 * 2, (24 + 20) * 2 + 30 * 4, True, "bfloat16")


def test_pointwise_counts_a_broadcast_operand_once():
    assert cost_of(call("add", tensor(6, 4), tensor(1, 4))) == (24, (24 + 4 + 24) * 4, False, "float32")
    mask = call("cmp_gt", tensor(6, 4), tensor(6, 4))
    assert cost_of(mask).bytes == 2 * 24 * 4 + 24


def test_by_value_scalars_cost_no_traffic():
    assert cost_of(call("add", tensor(6, 4), tensor(1, 1, by_value=True))).bytes == 2 * 24 * 4


def test_four_bit_elements_are_half_a_byte():
    node = call("block_scale_dequantize", tensor(8, 64, dtype="fp4_e2m1"), tensor(8, 4, dtype="fp8_e4m3"), [1, 16])
    assert cost_of(node) == (512, 256 + 32 + 512 * 4, False, "float32")


def test_quantize():
    out = {"Y": {"dtype": "fp8_e4m3"}, "scale": {"dtype": "fp8_e8m0"}}
    node = call("block_scale_quantize", tensor(8, 64), block_size=32, _out=out)
    assert cost_of(node) == (2 * 512, 512 * 4 + 512 + 16, False, "float32")


def test_reduction():
    node = call("reduction", tensor(4, 6), mode="ADD", out_dims=(4, 1))
    assert cost_of(node) == (24, (24 + 4) * 4, False, "float32")


def test_data_movement():
    assert cost_of(call("transpose", tensor(4, 6), (1, 0))) == (0, 2 * 24 * 4, False, "float32")
    node = call("concatenate", axis=0, inputs=[tensor(2, 3), tensor(4, 3)])
    assert cost_of(node) == (0, (6 + 12 + 18) * 4, False, "float32")


@pytest.mark.parametrize(
    ("op", "bias", "each"), [("layernorm", True, 7), ("layernorm", False, 6), ("rmsnorm", True, 5)]
)
def test_norms(op, bias, each):
    node = call(op, tensor(5, 8), tensor(1, 8), tensor(1, 8) if bias else None, scalar(), "INFERENCE")
    assert cost_of(node).flops == each * 40
    assert cost_of(node).bytes == (40 + 8 + 8 * bias + 1 + 40) * 4


def test_convolution():
    image, weight = tensor(2, 4, 9, 8, dtype="float16"), tensor(6, 2, 3, 3, dtype="float16")
    node = call("conv_fprop", image, weight, stride=[2, 1], _out={"Y": {"dtype": "float16"}})
    # Two groups: each of the 2 x 6 x 4 x 6 outputs sums 2 x 3 x 3 products.
    assert cost_of(node) == (2 * (2 * 6 * 4 * 6) * 18, 2 * (576 + 108 + 288), True, "float16")


def test_moe():
    token, weight = tensor(1, 12, 16, dtype="bfloat16"), tensor(4, 16, 24, dtype="bfloat16")
    node = call("moe_grouped_matmul", token, weight, index(5, 1, 1), index(1, 30, 1), mode="GATHER")
    assert cost_of(node).flops == 2 * 30 * 24 * 16
    assert cost_of(node).bytes == 2 * (12 * 16 + 4 * 16 * 24) + 4 * (5 + 30) + 4 * 30 * 24


def attention(**kwargs):
    q, kv = tensor(2, 8, 6, 16, dtype="float16"), tensor(2, 4, 10, 16, dtype="float16")
    return call("sdpa", q, kv, kv, _out={"O": {"dtype": "float16"}}, **kwargs)


def test_attention():
    # Two products of depth 16 for each of the 2 x 8 x 6 x 10 scores.
    assert cost_of(attention()) == (2 * 2 * (2 * 8 * 6 * 10) * 16, 2 * (2 * 1536 + 2 * 1280), True, "float16")
    causal = cost_of(attention(use_causal_mask=True)).flops
    assert causal == 2 * 2 * (2 * 8) * (1 + 2 + 3 + 4 + 5 + 6) * 16


def test_paged_attention_reads_the_pages_of_its_tables():
    def paged(pool):
        lengths = {"use_padding_mask": True, "seq_len_q": index(2, 1, 1, 1), "seq_len_kv": index(2, 1, 1, 1)}
        tables = {f"paged_attention_{port}_table": index(2, 1, 3, 1) for port in "kv"}
        pages = tensor(pool, 4, 8, 16, dtype="float16")
        return cost_of(call("sdpa", tensor(2, 8, 6, 16, dtype="float16"), pages, pages, **lengths, **tables))

    assert paged(1000) == paged(6)
    assert paged(1000).flops == 2 * 2 * (2 * 8 * 6 * 24) * 16


@pytest.mark.parametrize("queries", [1, 3, 7])
@pytest.mark.parametrize("keys", [1, 4, 9])
@pytest.mark.parametrize("left", [None, 1, 3, 20])
@pytest.mark.parametrize("right", [None, 0, 2, 20])
@pytest.mark.parametrize("alignment", ["TOP_LEFT", "BOTTOM_RIGHT"])
def test_visible_pairs_of_a_band(queries, keys, left, right, alignment):
    shift = keys - queries if alignment == "BOTTOM_RIGHT" else 0
    counted = sum(
        (right is None or j <= i + shift + right) and (left is None or j > i + shift - left)
        for i in range(queries)
        for j in range(keys)
    )
    attrs = {"left_bound": left, "right_bound": right, "diagonal_alignment": alignment}
    assert visible_pairs(queries, keys, attrs) == counted


@pytest.mark.parametrize(("op", "gate"), [("gdn", (40, 4)), ("kda", (40, 4, 16))])
def test_linear_attention(op, gate):
    q, v = tensor(40, 2, 16, dtype="bfloat16"), tensor(40, 4, 32, dtype="bfloat16")
    node = call(op, q, q, v, tensor(*gate), tensor(40, 4), index(4), _out={"O": {"dtype": "bfloat16"}})
    elements = 2 * (2 * 40 * 2 * 16 + 2 * 40 * 4 * 32) + 4 * (40 * 4 * (16 if op == "kda" else 1) + 40 * 4 + 4)
    assert cost_of(node) == (7 * 40 * 4 * 16 * 32, elements, True, "bfloat16")

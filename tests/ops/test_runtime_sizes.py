"""Inference and validation with sizes that are known only when a plan runs."""

from cudnn_core._dims import Dim, product

from ._fakes import call, dim_of, index, only_problem, ports_with_problems, problems, scalar, tensor

M, N = Dim("m", max=4096), Dim("n", max=4096)
EVEN = Dim("even", max=4096, multiple_of=64)


def valid(node, expected, port=None):
    assert problems(node) == []
    assert dim_of(node, port) == expected
    return node


def test_matmul():
    node = valid(call("matmul", tensor(M, 64), tensor(64, 32)), (M, 32))
    assert node.row.dims(node) == {"m": M, "n": 32, "k": 64, "batch": 1}
    valid(call("matmul", tensor(M, N), tensor(N, M)), (M, M))
    valid(call("matmul", tensor(1, 8, 4), tensor(M, 4, N)), (M, 8, N))


def test_sizes_that_may_differ_are_findings():
    found = only_problem(call("matmul", tensor(8, M), tensor(N, 4)))
    assert (found.port, str(found.expected), str(found.actual)) == ("B", "m", "n")
    assert ports_with_problems(call("matmul", tensor(8, M), tensor(64, 4))) == ["B"]
    assert only_problem(call("add", tensor(M, 4), tensor(N, 4))).actual == "(n, 4)"
    assert ports_with_problems(call("add", tensor(M, 4), tensor(8, 4))) == ["in1"]


def test_pointwise():
    node = valid(call("add", tensor(M, 1, 4), tensor(N, 1)), (M, N, 4))
    assert node.row.dims(node) == {"elements": product((M, N, 4))}


def test_pointwise_keeps_the_memory_format():
    stride = (product((64, M)), 1, 64)
    assert call("relu", tensor(2, 64, M, stride=stride)).outputs["out"].stride == stride


def test_reduction():
    valid(call("reduction", tensor(M, 64), mode="ADD", out_dims=(M, 1)), (M, 1))
    assert ports_with_problems(call("reduction", tensor(M, 64), mode="ADD", out_dims=(N, 1))) == ["Y"]


def test_reshape():
    valid(call("reshape", tensor(M, 64), out_dims=(M, 8, 8)), (M, 8, 8))
    valid(call("reshape", tensor(M, N, 4), out_dims=(product((M, N)), 4)), (product((M, N)), 4))
    assert ports_with_problems(call("reshape", tensor(M, 64), out_dims=(64, 64))) == ["Y"]


def test_slice():
    valid(call("slice", tensor(M, 64), [slice(None), slice(0, 8)]), (M, 8))
    valid(call("slice", tensor(M, 64), [slice(0, 1), slice(None)]), (1, 64))
    assert ports_with_problems(call("slice", tensor(M, 64), [slice(0, 2)])) == ["slices"]


def test_concatenate():
    valid(call("concatenate", axis=1, inputs=[tensor(M, 3), tensor(M, 4)]), (M, 7))
    node = call("concatenate", axis=0, inputs=[tensor(M, 3), tensor(N, 3)], out_dims=(Dim("sum"), 3))
    assert problems(node) == []  # the sum of two runtime sizes is the caller's to declare


def test_norm():
    node = call("layernorm", tensor(M, 64), tensor(1, 64), None, scalar(), "TRAINING")
    valid(node, (M, 64))
    assert dim_of(node, "mean") == (M, 1)
    assert node.row.dims(node) == {"rows": M, "cols": 64}


def test_convolution():
    valid(call("conv_fprop", tensor(N, 4, 9, 8), tensor(6, 4, 3, 3)), (N, 6, 7, 6))
    valid(call("conv_fprop", tensor(1, 4, M), tensor(6, 4, 3), padding=[1]), (1, 6, M))
    assert dim_of(call("conv_fprop", tensor(1, 4, M), tensor(6, 4, 3))) is None
    assert problems(call("conv_fprop", tensor(1, 4, M), tensor(6, 4, 3), out_dims=(1, 6, N))) == []
    assert ports_with_problems(call("conv_fprop", tensor(1, 4, M), tensor(6, 4, 3), out_dims=(1, 5, N))) == ["Y"]
    valid(call("conv_fprop", tensor(1, M, 9), tensor(6, M, 3)), (1, 6, 7))
    assert ports_with_problems(call("conv_fprop", tensor(1, M, 9), tensor(6, N, 3))) == ["weight"]


def test_block_scaling():
    valid(call("block_scale_dequantize", tensor(M, 64, dtype="fp8_e4m3"), tensor(M, 2), [1, 32]), (M, 64))
    out = {"Y": {"dtype": "fp8_e4m3"}, "scale": {"dtype": "fp8_e8m0"}}
    node = call("block_scale_quantize", tensor(M, 64), block_size=32, _out=out)
    valid(node, (M, 2), "scale")


def test_moe():
    valid(call("moe_grouped_matmul", tensor(1, M, 16), tensor(4, 16, 24), index(5, 1, 1)), (1, M, 24))
    routed = {"token_index": index(1, N, 1), "mode": "GATHER"}
    valid(call("moe_grouped_matmul", tensor(1, M, 16), tensor(4, 16, 24), index(5, 1, 1), **routed), (1, N, 24))


def test_attention():
    q, kv = tensor(N, 8, M, 64), tensor(N, 2, EVEN, 64)
    node = valid(call("sdpa", q, kv, kv, use_causal_mask=True), (N, 8, M, 64))
    assert node.row.dims(node)["seq_kv"] == EVEN
    assert ports_with_problems(call("sdpa", q, kv, tensor(N, 2, M, 64))) == ["v"]
    lengths = {"use_padding_mask": True, "seq_len_q": index(N, 1, 1, 1), "seq_len_kv": index(N, 1, 1, 1)}
    valid(call("sdpa", q, kv, kv, **lengths), (N, 8, M, 64))


def test_linear_attention():
    q, gate = tensor(M, 2, 64), tensor(M, 2)
    node = call("gdn", q, q, q, gate, gate, index(Dim("bounds")), tensor(N, 2, 64, 64), output_final_state=True)
    valid(node, (M, 2, 64))
    assert dim_of(node, "final_state") == (N, 2, 64, 64)
    assert node.row.dims(node)["sequences"] == N
    assert ports_with_problems(call("gdn", q, q, q, tensor(N, 2), gate, index(4))) == ["g"]
    heads, gate = tensor(9, M, 64), tensor(9, M)
    valid(call("gdn", heads, heads, heads, gate, gate, index(4)), (9, M, 64))
    assert ports_with_problems(call("gdn", heads, heads, tensor(9, N, 64), gate, gate, index(4))) == ["v"]

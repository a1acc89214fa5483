"""Shapes, strides and data types of outputs against PyTorch's own, on its meta device."""

import pytest
import torch
from torch.nn import functional

from cudnn_core._ops._table import in_tree

from ._fakes import call, dim_of, index, problems, scalar, tensor


def meta(*dim, like=None):
    return torch.empty(dim if like is None else like.dim, device="meta")


def agree(node, expected, port=None):
    assert problems(node) == []
    assert dim_of(node, port) == tuple(expected.shape)


@pytest.mark.parametrize(
    ("a", "b"),
    [((2, 3), (3, 4)), ((5, 2, 3), (5, 3, 4)), ((5, 1, 2, 3), (1, 6, 3, 4)), ((2, 3), (7, 3, 1)), ((0, 3), (3, 2))],
)
def test_matmul(a, b):
    agree(call("matmul", tensor(*a), tensor(*b)), meta(*a) @ meta(*b))


UNARY = {
    "elu": functional.elu,
    "gelu": functional.gelu,
    "gelu_approx_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "identity": torch.clone,
    "softplus": functional.softplus,
    "swish": functional.silu,
    "relu": functional.relu,
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.1),
    "logical_not": torch.logical_not,
}
BINARY = {
    "bias": torch.add,
    "scale": torch.mul,
    "add_square": lambda a, b: a + b * b,
    "max": torch.maximum,
    "min": torch.minimum,
    "mod": torch.fmod,
    "cmp_eq": torch.eq,
    "cmp_neq": torch.ne,
    **{f"cmp_{name}": getattr(torch, name) for name in ("ge", "gt", "le", "lt")},
}
EXTRA = {"leaky_relu": (0.1,), "leaky_relu_backward": (0.1,), "gen_index": (0,)}
POINTWISE = [(name, row) for row in in_tree().values() if row.group == "pointwise" for name in row.builders]


@pytest.mark.parametrize(("method", "row"), POINTWISE, ids=[method for method, _ in POINTWISE])
def test_pointwise(method, row):
    dtype = "boolean" if method.startswith("logical_") else "float32"
    extra = EXTRA.get(method, ())
    if len(row.inputs) == 1:
        expected = UNARY.get(method, getattr(torch, method, torch.clone))(meta(3, 1, 4))
        node = call(method, tensor(3, 1, 4, dtype=dtype), *extra)
    elif len(row.inputs) == 2:
        function = BINARY.get(method, getattr(torch, method, torch.add))
        expected = function(meta(3, 1, 4), meta(5, 4))
        node = call(method, tensor(3, 1, 4, dtype=dtype), tensor(5, 4, dtype=dtype), *extra)
    else:
        expected = torch.where(meta(1).bool(), meta(3, 1, 4), meta(5, 4))
        node = call(method, tensor(3, 1, 4), tensor(5, 4), tensor(1, dtype="boolean"))
    agree(node, expected)
    if method.startswith(("cmp_", "logical_")):
        assert (node.outputs["out"].dtype == "boolean") == (expected.dtype == torch.bool)


def test_pointwise_keeps_the_memory_format():
    x = torch.empty(2, 8, 4, 6, device="meta").to(memory_format=torch.channels_last)
    bias = torch.empty(1, 8, 1, 1, device="meta")
    node = call("add", tensor(1, 8, 1, 1), tensor(2, 8, 4, 6, stride=x.stride()))
    assert node.outputs["out"].stride == (bias + x).stride() == x.stride()


def test_pointwise_output_of_a_padded_input_is_dense():
    padded = tensor(4, 6, stride=(8, 1))
    assert call("relu", padded).outputs["out"].stride == (6, 1)


def test_gen_index_is_int32():
    assert call("gen_index", tensor(2, 3), 1).outputs["out"].dtype == "int32"


@pytest.mark.parametrize("axes", [(1,), (0, 2), (0, 1, 2)])
def test_reduction(axes):
    expected = meta(4, 5, 6).sum(axes, keepdim=True)
    agree(call("reduction", tensor(4, 5, 6), mode="ADD", out_dims=tuple(expected.shape)), expected)


def test_reduction_keeps_the_memory_format():
    x = torch.empty(2, 8, 4, 6, device="meta").to(memory_format=torch.channels_last)
    node = call("reduction", tensor(2, 8, 4, 6, stride=x.stride()), mode="MAX", out_dims=(1, 8, 4, 6))
    assert node.outputs["Y"].stride[1] == 1


@pytest.mark.parametrize("permutation", [(0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_transpose(permutation):
    expected = meta(2, 3, 4).permute(permutation)
    node = call("transpose", tensor(2, 3, 4, dtype="float16"), permutation)
    agree(node, expected)
    assert node.outputs["Y"].stride == expected.stride()
    assert node.outputs["Y"].dtype == "float16"


@pytest.mark.parametrize("mode", ["VIEW_ONLY", "LOGICAL"])
def test_reshape(mode):
    agree(call("reshape", tensor(4, 6), mode, out_dims=(2, 12)), meta(4, 6).reshape(2, 12))


@pytest.mark.parametrize(
    "slices",
    [
        [slice(1, 3), slice(None), slice(0, 9, 2)],
        [slice(-3, None), slice(None, -1)],
        [slice(None)] * 3,
        [],
        [slice(0, 5, 3), slice(2, 2), slice(1, 10, 4)],
    ],
)
def test_slice(slices):
    agree(call("slice", tensor(5, 7, 10), slices), meta(5, 7, 10)[tuple(slices)])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concatenate(axis):
    shapes = [tuple(size + (n if at == axis else 0) for at, size in enumerate((2, 3, 4))) for n in range(3)]
    node = call("concatenate", axis=axis, inputs=[tensor(*shape, dtype="bfloat16") for shape in shapes])
    agree(node, torch.cat([meta(*shape) for shape in shapes], axis))
    assert node.outputs["Y"].dtype == "bfloat16"


@pytest.mark.parametrize("phase", ["INFERENCE", "TRAINING"])
def test_layernorm(phase):
    x = meta(2, 5, 8)
    expected = torch.native_layer_norm(x, [8], meta(8), meta(8), 1e-5)
    node = call("layernorm", tensor(2, 5, 8), tensor(1, 1, 8), tensor(1, 1, 8), scalar(), phase)
    agree(node, expected[0])
    assert set(node.outputs) == ({"Y", "mean", "inv_variance"} if phase == "TRAINING" else {"Y"})
    if phase == "TRAINING":
        agree(node, expected[1], "mean")
        agree(node, expected[2], "inv_variance")


def test_rmsnorm_over_two_axes_keeps_the_format():
    x = torch.empty(2, 8, 4, 6, device="meta").to(memory_format=torch.channels_last)
    node = call("rmsnorm", tensor(2, 8, 4, 6, stride=x.stride()), tensor(1, 8, 1, 6), None, scalar(), "TRAINING")
    assert problems(node) == []
    assert node.outputs["Y"].stride == x.stride()
    assert dim_of(node, "inv_variance") == tuple(x.mean((1, 3), keepdim=True).shape)


@pytest.mark.parametrize(("heads", "groups", "head_dim_v"), [(4, 4, 16), (8, 2, 16), (6, 1, 32)])
def test_sdpa(heads, groups, head_dim_v):
    q, k, v = (2, heads, 7, 16), (2, groups, 9, 16), (2, groups, 9, head_dim_v)
    expected = functional.scaled_dot_product_attention(meta(*q), meta(*k), meta(*v), enable_gqa=True)
    node = call("sdpa", *(tensor(*dim, dtype="float16") for dim in (q, k, v)), generate_stats=True)
    agree(node, expected)
    assert dim_of(node, "Stats") == tuple(expected.amax(-1, keepdim=True).shape)
    assert node.outputs["Stats"].dtype == "float32"


CONVOLUTIONS = [
    ((2, 4, 9), (6, 4, 3), {"padding": [1], "stride": [2], "dilation": [1]}),
    ((2, 4, 9, 8), (6, 4, 3, 2), {"padding": [1, 2], "stride": [2, 1], "dilation": [1, 3]}),
    ((2, 4, 9, 8), (6, 2, 3, 3), {}),
    ((1, 3, 5, 9, 8), (6, 3, 2, 3, 1), {"padding": [0, 1, 0], "stride": [1, 2, 3], "dilation": [2, 1, 1]}),
]


@pytest.mark.parametrize(("image", "weight", "geometry"), CONVOLUTIONS)
def test_conv_fprop(image, weight, geometry):
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[len(image) - 3]
    expected = function(meta(*image), meta(*weight), groups=image[1] // weight[1], **geometry)
    node = call("conv_fprop", tensor(*image), tensor(*weight), **geometry)
    agree(node, expected)
    assert node.outputs["Y"].stride[1] == 1  # channels last, as the frontend has it


def test_conv_fprop_with_uneven_padding():
    expected = functional.conv2d(functional.pad(meta(2, 4, 9, 8), (1, 3, 0, 2)), meta(6, 4, 3, 3), stride=(2, 2))
    node = call(
        "conv_fprop", tensor(2, 4, 9, 8), tensor(6, 4, 3, 3), pre_padding=[0, 1], post_padding=[2, 3], stride=[2, 2]
    )
    agree(node, expected)


@pytest.mark.parametrize(
    ("size", "scale", "blocks"),
    [
        ([1, 32], (4, 8, 2), (1, 1, 32)),
        ([32, 1], (4, 1, 64), (1, 32, 1)),
        ([2, 4, 64], (2, 2, 1), (2, 4, 64)),
        ([16], (4, 8, 4), (1, 1, 16)),
        (8, (4, 1, 64), (1, 8, 1)),
        ([24], (4, 8, 3), (1, 1, 24)),
    ],
)
def test_block_scale_dequantize(size, scale, blocks):
    node = call("block_scale_dequantize", tensor(4, 8, 64, dtype="fp8_e4m3"), tensor(*scale, dtype="fp8_e8m0"), size)
    agree(node, meta(4, 8, 64))
    # Each scale repeated over its block covers the input, and with one block less it would not.
    spread = meta(*scale)
    for axis, block in enumerate(blocks):
        spread = spread.repeat_interleave(block, dim=axis)
    for have, want, block in zip(spread.shape, (4, 8, 64), blocks, strict=True):
        assert have - block < want <= have


@pytest.mark.parametrize(("axis", "transpose"), [(None, False), (1, False), (1, True), (2, True)])
def test_block_scale_quantize(axis, transpose):
    out = {"Y": {"dtype": "fp8_e4m3"}, "scale": {"dtype": "fp8_e8m0"}}
    node = call("block_scale_quantize", tensor(2, 64, 96), block_size=32, axis=axis, transpose=transpose, _out=out)
    at = 2 if axis is None else axis
    agree(node, meta(2, 64, 96))
    agree(node, meta(2, 64, 96).unflatten(at, (-1, 32)).amax(at + 1), "scale")
    assert (node.outputs["Y"].stride[1] == 1) == (transpose and axis == 1)
    assert (node.outputs["scale"].stride[1] == 1) == (transpose and axis == 1)


def test_block_scale_quantize_accepts_scales_padded_to_tiles():
    out = {"Y": {"dtype": "fp4_e2m1"}, "scale": {"dtype": "fp8_e4m3", "dim": (1, 128, 4), "reordering": "F8_128x4"}}
    node = call("block_scale_quantize", tensor(1, 100, 32), block_size=16, _out=out)
    assert problems(node) == []
    assert dim_of(node, "scale") == (1, 128, 4)


def test_moe_grouped_matmul_modes():
    token, weight, offsets = tensor(1, 12, 16), tensor(4, 16, 24), index(5, 1, 1)
    rows, slots = index(1, 12, 1), index(1, 12, 1)
    dense = meta(1, 12, 16) @ meta(16, 24)
    agree(call("moe_grouped_matmul", token, weight, offsets), dense)
    gathered = meta(1, 12, 16).index_select(1, torch.empty(30, dtype=torch.long, device="meta")) @ meta(16, 24)
    agree(call("moe_grouped_matmul", token, weight, offsets, index(1, 30, 1), mode="GATHER"), gathered)
    agree(call("moe_grouped_matmul", token, weight, offsets, rows, slots, mode="SCATTER", top_k=2), dense)
    combined = (dense.reshape(1, 6, 2, 24) * meta(1, 6, 2, 1)).sum(2)
    scores = tensor(1, 6, 2)
    node = call("moe_grouped_matmul", token, weight, offsets, rows, slots, "COMBINE", 2, top_k_scores=scores)
    agree(node, combined)


@pytest.mark.parametrize(("op", "heads", "values"), [("gdn", 2, 4), ("kda", 4, 4), ("gdn", 6, 2)])
def test_linear_attention(op, heads, values):
    tokens, k, v, both = 10, 8, 16, max(heads, values)
    q = tensor(tokens, heads, k, dtype="bfloat16")
    gate = tensor(tokens, both, k) if op == "kda" else tensor(tokens, both)
    value = tensor(tokens, values, v, dtype="bfloat16")
    initial = tensor(3, both, v, k)
    node = call(
        op,
        q,
        q,
        value,
        gate,
        tensor(tokens, both),
        index(4),
        initial,
        output_final_state=True,
        checkpoint_every_n_tokens=4,
    )
    grouped = [meta(like=x).repeat_interleave(both // x.dim[1], 1) for x in (q, value)]
    update = torch.einsum("thv,thk->thvk", grouped[1], grouped[0])
    agree(node, torch.einsum("thvk,thk->thv", update, grouped[0]))
    agree(node, meta(3, *update.shape[1:]), "final_state")
    agree(node, meta(10 // 4 + 3, *update.shape[1:]), "state_checkpoints")


@pytest.mark.parametrize("lengths", [[0], [1], [7, 1, 8], [4, 4, 4], [0, 0, 9], [5] * 6])
def test_linear_attention_has_room_for_the_checkpoints_of_any_lengths(lengths):
    tokens = sum(lengths)
    q, gate = tensor(tokens, 1, 4), tensor(tokens, 1)
    node = call("gdn", q, q, q, gate, gate, index(len(lengths) + 1), checkpoint_every_n_tokens=4)
    assert dim_of(node, "state_checkpoints")[0] >= sum(-(-length // 4) for length in lengths)


def test_final_state_of_a_pool_has_the_pools_rows_and_type():
    q, gate = tensor(10, 1, 4), tensor(10, 1)
    pool = tensor(9, 1, 4, 4, dtype="bfloat16")
    node = call(
        "gdn",
        q,
        q,
        q,
        gate,
        gate,
        index(3),
        pool,
        None,
        None,
        index(2),
        output_final_state=True,
        overwrite_initial_state=True,
    )
    assert problems(node) == []
    assert dim_of(node, "final_state") == (9, 1, 4, 4)
    assert node.outputs["final_state"].dtype == "bfloat16"


# --- layout of outputs where inputs are broadcast by stride 0
def layout(op, *tensors, **attrs):
    from cudnn_core import Graph

    g = Graph(io_data_type="float32")
    made = [g.tensor(dim=dim, stride=stride) for dim, stride in tensors]
    y = getattr(g, op)(*made, **attrs)
    y.set_output(True)
    g.validate()
    return y.stride


NHWC = ((2, 3, 4, 5), (60, 1, 15, 3))


def test_axes_broadcast_by_stride_0_do_not_vote_on_the_layout():
    assert layout("relu", ((4, 8), (0, 1))) == (8, 1)
    assert layout("add", ((4, 8), (0, 1)), ((4, 8), (8, 1))) == (8, 1)
    assert layout("relu", ((4, 8), (0, 0))) == (8, 1)
    assert layout("relu", ((2, 3, 4, 5), (0, 1, 15, 3))) == (60, 1, 15, 3)  # a broadcast batch of channels-last images


def test_the_input_that_says_most_of_the_layout_gives_it():
    assert layout("add", ((2, 3, 4, 5), (0, 1, 0, 0)), NHWC) == NHWC[1]
    assert layout("add", NHWC, ((2, 3, 4, 5), (60, 20, 5, 1))) == NHWC[1]


def test_axes_of_size_1_do_not_vote_on_the_layout():
    assert layout("relu", ((4, 1, 8), (16, 0, 1))) == (8, 8, 1)


def test_a_transposed_broadcast_input_gets_memory_of_its_own():
    assert layout("transpose", ((4, 8), (0, 1)), permutation=(1, 0)) == (4, 1)
    assert layout("transpose", ((4, 8), (16, 1)), permutation=(1, 0)) == (1, 16)

"""What builders make of arguments that are not ports or attributes as they stand."""

import enum

import pytest

from cudnn_core._errors import GraphError

from ._fakes import call, scalar, tensor

Q, KV = tensor(2, 4, 8, 16), tensor(2, 2, 8, 16)


def sdpa(**kwargs):
    return call("sdpa", Q, KV, KV, **kwargs)


class Alignment(enum.Enum):
    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


BOUNDS = [
    ({}, ("TOP_LEFT", None, None)),
    ({"use_causal_mask": True}, ("TOP_LEFT", None, 0)),
    ({"use_causal_mask_bottom_right": True}, ("BOTTOM_RIGHT", None, 0)),
    ({"sliding_window_length": 5}, ("TOP_LEFT", 5, None)),
    ({"sliding_window_length": 5, "use_causal_mask": True}, ("TOP_LEFT", 5, 0)),
    ({"diagonal_band_left_bound": 3, "diagonal_band_right_bound": 2}, ("TOP_LEFT", 3, 2)),
    ({"diagonal_alignment": Alignment.BOTTOM_RIGHT, "diagonal_band_right_bound": 0}, ("BOTTOM_RIGHT", None, 0)),
    ({"diagonal_alignment": Alignment.BOTTOM_RIGHT, "use_causal_mask_bottom_right": True}, ("BOTTOM_RIGHT", None, 0)),
]


@pytest.mark.parametrize(("arguments", "expected"), BOUNDS)
def test_masks_become_bounds(arguments, expected):
    attrs = sdpa(**arguments).attrs
    assert (attrs["diagonal_alignment"], attrs["left_bound"], attrs["right_bound"]) == expected


@pytest.mark.parametrize(
    ("arguments", "port"),
    [
        ({"use_causal_mask": True, "use_causal_mask_bottom_right": True}, "use_causal_mask_bottom_right"),
        ({"use_causal_mask": True, "diagonal_band_right_bound": 2}, "diagonal_band_right_bound"),
        ({"use_causal_mask": True, "diagonal_alignment": Alignment.BOTTOM_RIGHT}, "diagonal_alignment"),
        ({"sliding_window_length": 4, "diagonal_band_left_bound": 5}, "sliding_window_length"),
        ({"is_inference": True, "generate_stats": True}, "generate_stats"),
        ({"score_mod": len}, "score_mod"),
        ({"kv_mask": tensor(1, 1, 1, 8)}, "kv_mask"),
        ({"softmax_precision": "HALF"}, "softmax_precision"),
        ({"attn_scale_prefolded": True}, "attn_scale_prefolded"),
        ({"dropout": 0.1}, "dropout"),
        ({"dropout": (0.1,)}, "dropout"),
        ({"dropout": (tensor(1), scalar(), scalar())}, "dropout"),
    ],
)
def test_contradictory_or_unsupported_attention_arguments(arguments, port):
    with pytest.raises(GraphError) as caught:
        sdpa(**arguments)
    assert caught.value.port == port


@pytest.mark.parametrize(
    ("arguments", "stats"),
    [
        ({}, False),
        ({"is_inference": True}, False),
        ({"is_inference": False}, True),
        ({"generate_stats": True}, True),
        ({"generate_stats": False}, False),
        ({"generate_stats": True, "is_inference": False}, True),
    ],
)
def test_is_inference_and_generate_stats(arguments, stats):
    node = sdpa(**arguments)
    assert node.attrs["generate_stats"] is stats
    assert ("Stats" in node.outputs) is stats


def test_attention_scale_is_an_attribute_or_a_port():
    assert sdpa(attn_scale=0.25).attrs["scale"] == 0.25
    node = sdpa(attn_scale=scalar())
    assert node.attrs["scale"] is None
    assert node.inputs["attn_scale"].dim == (1, 1, 1, 1)


def test_dropout_tuples():
    seed, offset, mask = scalar("int64"), scalar("int64"), tensor(1, 1, 8, 8)
    node = sdpa(dropout=(0.5, seed, offset))
    assert node.attrs["dropout_probability"] == 0.5
    assert (node.inputs["seed"], node.inputs["offset"]) == (seed, offset)
    node = sdpa(dropout=(mask, scalar()))
    assert node.attrs["dropout_probability"] is None
    assert node.inputs["dropout_mask"] is mask


def test_output_descriptors_that_the_caller_declares():
    largest = tensor(2, 4, 8, 1)
    assert sdpa(score_max=largest).outputs["score_max"] is largest
    assert "score_max" not in sdpa().outputs


def test_leaky_relu_is_relu_with_a_slope():
    node = call("leaky_relu", tensor(4), 0.1)
    assert node.op == "relu"
    assert node.attrs == {"negative_slope": 0.1, "lower_clip": None, "upper_clip": None}
    assert call("leaky_relu_backward", tensor(4), tensor(4), 0.1).op == "relu_backward"


def test_synonyms_of_add_and_mul():
    assert call("bias", input=tensor(4), bias=tensor(1)).op == "add"
    assert call("scale", input=tensor(4), scale=tensor(1)).op == "mul"


def test_loss_comes_first_in_a_backward_op():
    loss, forward = tensor(4), tensor(4)
    node = call("gelu_backward", loss=loss, input=forward)
    assert (node.inputs["in0"], node.inputs["in1"]) == (loss, forward)


def test_slices_are_resolved_against_the_input():
    node = call("slice", tensor(4, 6, 8), [slice(-3, None), slice(None, -1, 2)])
    assert node.attrs["slices"] == [[1, 4, 1], [0, 5, 2], [0, 8, 1]]
    assert call("slice", tensor(4), [(1, 3)]).attrs["slices"] == [[1, 3, 1]]
    with pytest.raises(GraphError, match="not a slice"):
        call("slice", tensor(4), [2])


def test_slices_of_an_input_without_a_shape():
    assert call("slice", tensor(None), [slice(1, None)]).attrs["slices"] == [[1, None, 1]]
    with pytest.raises(GraphError, match="negative bound"):
        call("slice", tensor(None), [slice(-1, None)])


def test_padding_is_both_paddings():
    attrs = call("conv_fprop", tensor(1, 3, 8, 8), tensor(2, 3, 3, 3), padding=[1, 2]).attrs
    assert (attrs["pre_padding"], attrs["post_padding"]) == ((1, 2), (1, 2))
    assert (attrs["stride"], attrs["dilation"]) == ((1, 1), (1, 1))
    assert attrs["convolution_mode"] == "CROSS_CORRELATION"
    with pytest.raises(GraphError, match="excludes padding"):
        call("conv_fprop", tensor(1, 3, 8, 8), tensor(2, 3, 3, 3), padding=[1, 1], pre_padding=[0, 0])


def test_convolution_geometry_of_an_image_without_a_shape():
    attrs = call("conv_fprop", tensor(None), tensor(2, 3, 3, 3)).attrs
    assert attrs["stride"] == (1, 1)


def test_a_single_block_size():
    x = tensor(8, 64, dtype="fp8_e4m3")
    assert call("block_scale_dequantize", x, tensor(8, 2), 32).attrs["block_size"] == (32,)
    assert call("block_scale_quantize", tensor(8, 64), block_size=[32]).attrs["block_size"] == 32

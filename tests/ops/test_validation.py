"""Each rule of each op's validation has a node that breaks it, and only it: the finding names the port."""

import pytest

from ._fakes import call, index, only_problem, problems, scalar, tensor


def mm(a=(2, 3), b=(3, 4), out=None, **kwargs):
    return call("matmul", tensor(*a), tensor(*b), _out=out, **kwargs)


def conv(image=(2, 4, 9, 8), weight=(6, 4, 3, 3), dtype="float32", out=None, **geometry):
    return call("conv_fprop", tensor(*image), tensor(*weight, dtype=dtype), _out=out, **geometry)


def norm(x=(2, 5, 8), scale=(1, 1, 8), bias=None, epsilon=None, op="layernorm", dtype="float32", out=None):
    return call(
        op,
        tensor(*x, dtype=dtype),
        tensor(*scale),
        None if bias is None else tensor(*bias),
        epsilon or scalar(),
        "TRAINING",
        _out=out,
    )


def moe(token=(1, 12, 16), weight=(4, 16, 24), offsets=None, dtype="float32", out=None, **routing):
    offsets = index(5, 1, 1) if offsets is None else offsets
    return call("moe_grouped_matmul", tensor(*token), tensor(*weight, dtype=dtype), offsets, _out=out, **routing)


def dequantize(scale=(4, 8, 2), size=(1, 32), dtype="fp8_e4m3", scale_dtype="fp8_e8m0", out=None, negative=None):
    scale = tensor(*scale, dtype=scale_dtype)
    return call("block_scale_dequantize", tensor(4, 8, 64, dtype=dtype), scale, size, negative, _out=out)


def quantize(x=(4, 8, 64), size=32, y="fp8_e4m3", scale="fp8_e8m0", groups=None, axis=None, dtype="float32", **fields):
    out = {"Y": {"dtype": y}, "scale": {"dtype": scale, **fields}}
    return call("block_scale_quantize", tensor(*x, dtype=dtype), groups, size, axis, _out=out)


ROUTED = {"token_index": index(1, 12, 1), "token_ks": index(1, 12, 1)}
SCATTER = {**ROUTED, "mode": "SCATTER", "top_k": 2}
COMBINE = {**ROUTED, "mode": "COMBINE", "top_k": 2, "top_k_scores": tensor(1, 6, 2)}

CASES = {
    # matmul
    "matmul K": (lambda: mm((2, 3), (4, 5)), "B", "rows differ"),
    "matmul batch": (lambda: mm((2, 2, 3), (4, 3, 5)), "B", "batch sizes"),
    "matmul rank of A": (lambda: mm((3,), (3, 4)), "A", "rows and columns"),
    "matmul rank of B": (lambda: mm((2, 3), (3,)), "B", "rows and columns"),
    "matmul boolean": (lambda: call("matmul", tensor(2, 3), tensor(3, 4, dtype="boolean")), "B", "data type"),
    "matmul C": (lambda: mm(out={"C": {"dim": (2, 5)}}), "C", "wrong shape"),
    # pointwise
    "pointwise broadcast": (lambda: call("add", tensor(2, 3), tensor(2, 4)), "in1", "does not broadcast"),
    "pointwise broadcast of the third": (
        lambda: call("binary_select", tensor(1, 3), tensor(2, 3), tensor(2, 4, dtype="boolean")),
        "in2",
        "does not broadcast",
    ),
    "pointwise out": (lambda: call("exp", tensor(2, 3), _out={"out": {"dim": (3, 2)}}), "out", "wrong shape"),
    "binary_select mask": (lambda: call("binary_select", tensor(2), tensor(2), tensor(2)), "in2", "data type"),
    "logical on floats": (
        lambda: call("logical_and", tensor(2, dtype="boolean"), tensor(2)),
        "in1",
        "data type",
    ),
    "gen_index axis": (lambda: call("gen_index", tensor(2, 3), 2), "axis", "not an axis"),
    "gen_index negative axis": (lambda: call("gen_index", tensor(2, 3), -1), "axis", "not an axis"),
    "relu slope": (lambda: call("relu", tensor(2), float("nan")), "negative_slope", "not a number"),
    "relu clips": (lambda: call("relu", tensor(2), None, 2.0, 1.0), "upper_clip", "below lower_clip"),
    "relu lower clip": (lambda: call("relu", tensor(2), None, -1.0), "lower_clip", "negative"),
    "relu clip and slope": (lambda: call("relu", tensor(2), 0.5, 1.0), "lower_clip", "excludes"),
    "swish beta": (lambda: call("swish", tensor(2), float("nan")), "swish_beta", "not a number"),
    # reduction
    "reduction axis": (lambda: call("reduction", tensor(4, 6), mode="ADD", out_dims=(4, 3)), "Y", "reduced"),
    "reduction rank": (lambda: call("reduction", tensor(4, 6), mode="ADD", out_dims=(4,)), "Y", "reduced"),
    "reduction groups need rank 3": (
        lambda: call("reduction", tensor(4, 6), index(3), "ADD", out_dims=(2, 1, 6)),
        "input",
        "wrong rank",
    ),
    "reduction groups need one batch": (
        lambda: call("reduction", tensor(2, 4, 6), index(3), "ADD", out_dims=(2, 1, 6)),
        "input",
        "one batch",
    ),
    "reduction groups need one row each": (
        lambda: call("reduction", tensor(1, 4, 6), index(3), "ADD", out_dims=(2, 4, 6)),
        "Y",
        "one row per group",
    ),
    "reduction group count": (
        lambda: call("reduction", tensor(1, 4, 6), index(5), "ADD", out_dims=(2, 1, 6)),
        "group_offset",
        "wrong size",
    ),
    "reduction group type": (
        lambda: call("reduction", tensor(1, 4, 6), tensor(3), "ADD", out_dims=(2, 1, 6)),
        "group_offset",
        "data type",
    ),
    # structural
    "reshape elements": (lambda: call("reshape", tensor(4, 6), out_dims=(5, 5)), "Y", "number of elements"),
    "reshape of a padded view": (
        lambda: call("reshape", tensor(4, 6, stride=(8, 1)), out_dims=(24,)),
        "input",
        "dense",
    ),
    "reshape converts": (
        lambda: call("reshape", tensor(4, 6), out_dims=(24,), _out={"Y": {"dtype": "float16"}}),
        "Y",
        "does not convert",
    ),
    "transpose repeats": (lambda: call("transpose", tensor(2, 3), (0, 0)), "permutation", "not a permutation"),
    "transpose length": (lambda: call("transpose", tensor(2, 3), (0,)), "permutation", "not a permutation"),
    "transpose range": (lambda: call("transpose", tensor(2, 3), (1, 2)), "permutation", "not a permutation"),
    "transpose out": (
        lambda: call("transpose", tensor(2, 3), (1, 0), _out={"Y": {"dim": (2, 3)}}),
        "Y",
        "wrong shape",
    ),
    "transpose converts": (
        lambda: call("transpose", tensor(2, 3), (1, 0), _out={"Y": {"dtype": "float16"}}),
        "Y",
        "does not convert",
    ),
    "slice stop": (lambda: call("slice", tensor(4, 6), [slice(0, 5)]), "slices", "axis 0: out of bounds"),
    "slice start": (lambda: call("slice", tensor(4, 6), [slice(None), slice(-7, 3)]), "slices", "axis 1"),
    "slice order": (lambda: call("slice", tensor(4, 6), [slice(3, 1)]), "slices", "out of bounds"),
    "slice step": (lambda: call("slice", tensor(4, 6), [slice(0, 4, -1)]), "slices", "step is not positive"),
    "slice count": (lambda: call("slice", tensor(4, 6), [slice(0, 1)] * 3), "slices", "one slice an axis"),
    "slice out": (
        lambda: call("slice", tensor(4, 6), [slice(0, 2)], _out={"Y": {"dim": (4, 6)}}),
        "Y",
        "wrong shape",
    ),
    "slice converts": (
        lambda: call("slice", tensor(4, 6), [slice(0, 2)], _out={"Y": {"dtype": "float16"}}),
        "Y",
        "does not convert",
    ),
    "concatenate axis": (lambda: call("concatenate", axis=2, inputs=[tensor(2, 3)]), "axis", "not an axis"),
    "concatenate negative axis": (lambda: call("concatenate", axis=-1, inputs=[tensor(2, 3)]), "axis", "not an axis"),
    "concatenate other axis": (
        lambda: call("concatenate", axis=0, inputs=[tensor(2, 3), tensor(2, 4)]),
        "inputs",
        "input 1 differs",
    ),
    "concatenate rank": (
        lambda: call("concatenate", axis=0, inputs=[tensor(2, 3), tensor(2)]),
        "inputs",
        "input 1 differs",
    ),
    "concatenate types": (
        lambda: call("concatenate", axis=0, inputs=[tensor(2, 3), tensor(2, 3, dtype="float16")]),
        "Y",
        "does not convert",
    ),
    "concatenate of nothing": (lambda: call("concatenate", axis=0, inputs=[], out_dims=(1,)), "inputs", "is empty"),
    "concatenate in place": (
        lambda: call("concatenate", axis=0, in_place_index=2, inputs=[tensor(2, 3), tensor(2, 3)]),
        "in_place_index",
        "names no input",
    ),
    "concatenate out": (
        lambda: call("concatenate", axis=0, inputs=[tensor(2, 3)] * 2, _out={"Y": {"dim": (5, 3)}}),
        "Y",
        "wrong shape",
    ),
    # norms
    "norm scale shape": (lambda: norm(scale=(1, 1, 7)), "scale", "does not fit"),
    "norm scale rank": (lambda: norm(scale=(8,)), "scale", "does not fit"),
    "norm without an axis": (lambda: norm(scale=(1, 1, 1)), "scale", "no axis"),
    "norm bias": (lambda: norm(bias=(1, 5, 1)), "bias", "wrong shape"),
    "norm epsilon": (lambda: norm(epsilon=tensor(8)), "epsilon", "one element"),
    "norm epsilon type": (lambda: norm(epsilon=scalar("int32")), "epsilon", "data type"),
    "norm input type": (lambda: norm(dtype="int32"), "input", "data type"),
    "norm Y": (lambda: norm(out={"Y": {"dim": (2, 5, 7)}}), "Y", "wrong shape"),
    "norm mean": (lambda: norm(out={"mean": {"dim": (2, 1, 1)}}), "mean", "wrong shape"),
    "norm mean type": (lambda: norm(out={"mean": {"dtype": "int32"}}), "mean", "data type"),
    "rmsnorm inv_variance": (
        lambda: norm(op="rmsnorm", out={"inv_variance": {"dim": (2, 5, 8)}}),
        "inv_variance",
        "wrong shape",
    ),
    # conv
    "conv rank": (lambda: conv((2, 4), (6, 4)), "image", "wrong rank"),
    "conv weight rank": (lambda: conv(weight=(6, 4, 3)), "weight", "wrong rank"),
    "conv types": (lambda: conv(dtype="float16"), "weight", "data type"),
    "conv padding count": (lambda: conv(post_padding=[1]), "post_padding", "one number a spatial axis"),
    "conv negative padding": (lambda: conv(pre_padding=[0, -1]), "pre_padding", "too small"),
    "conv stride": (lambda: conv(stride=[1, 0]), "stride", "too small"),
    "conv dilation": (lambda: conv(dilation=[0, 1]), "dilation", "too small"),
    "conv channels": (lambda: conv(weight=(6, 3, 3, 3)), "weight", "do not divide the image's"),
    "conv groups": (lambda: conv(weight=(5, 2, 3, 3)), "weight", "groups"),
    "conv filter larger than the image": (lambda: conv(weight=(6, 4, 10, 3)), "weight", "spatial axis 0"),
    "conv Y": (lambda: conv(out={"Y": {"dim": (2, 6, 7, 7)}}), "Y", "wrong shape"),
    # block scaling
    "dequantize scale shape": (lambda: dequantize(scale=(4, 8, 3)), "descale", "one scale a block"),
    "dequantize scale rank": (lambda: dequantize(scale=(8, 2)), "descale", "one scale a block"),
    "dequantize block count": (lambda: dequantize(size=(1, 1, 1, 32)), "block_size", "last axes"),
    "dequantize block size": (lambda: dequantize(size=(0, 32)), "block_size", "positive"),
    "dequantize negative scale": (lambda: dequantize(negative=True), "is_negative_scale", "not supported"),
    "dequantize input type": (lambda: dequantize(dtype="float32"), "input", "data type"),
    "dequantize scale type": (lambda: dequantize(scale_dtype="int32"), "descale", "data type"),
    "dequantize Y type": (lambda: dequantize(out={"Y": {"dtype": "fp8_e4m3"}}), "Y", "data type"),
    "dequantize Y": (lambda: dequantize(out={"Y": {"dim": (4, 64, 8)}}), "Y", "wrong shape"),
    "dequantize padded without reordering": (lambda: dequantize(scale=(4, 128, 4)), "descale", "one scale a block"),
    "quantize input type": (lambda: quantize(dtype="int32"), "input", "data type"),
    "quantize Y type": (lambda: quantize(y="float32"), "Y", "data type"),
    "quantize scale type": (lambda: quantize(scale="int8"), "scale", "data type"),
    "quantize block": (lambda: quantize(size=0), "block_size", "not positive"),
    "quantize axis": (lambda: quantize(axis=3), "axis", "not an axis"),
    "quantize scale shape": (lambda: quantize(dim=(4, 8, 3)), "scale", "wrong shape"),
    "quantize groups need tiles": (lambda: quantize((1, 8, 64), groups=index(3)), "group_offset", "F8_128x4"),
    "quantize group axis": (
        lambda: quantize((1, 64, 8), groups=index(3), axis=1, reordering="F8_128x4"),
        "group_offset",
        "last axis",
    ),
    "quantize group type": (
        lambda: quantize((1, 8, 64), groups=tensor(3), reordering="F8_128x4"),
        "group_offset",
        "data type",
    ),
    "quantize grouped Y": (
        lambda: call(
            "block_scale_quantize",
            tensor(1, 8, 64),
            index(3),
            32,
            _out={
                "Y": {"dtype": "fp8_e4m3", "dim": (1, 8, 32)},
                "scale": {"dtype": "fp8_e8m0", "reordering": "F8_128x4"},
            },
        ),
        "Y",
        "wrong shape",
    ),
    # moe
    "moe token rank": (lambda: moe(token=(12, 16)), "token", "wrong rank"),
    "moe token batch": (lambda: moe(token=(2, 12, 16)), "token", "wrong shape"),
    "moe K": (lambda: moe(weight=(4, 15, 24)), "weight", "K differs"),
    "moe types": (lambda: moe(dtype="float16"), "weight", "data type"),
    "moe offsets": (lambda: moe(offsets=index(7, 1, 1)), "first_token_offset", "number of offsets"),
    "moe one expert": (lambda: moe(weight=(1, 16, 24), offsets=index(0, 1, 1)), "first_token_offset", "number of"),
    "moe offset shape": (lambda: moe(offsets=index(1, 5, 1)), "first_token_offset", "column"),
    "moe offset type": (lambda: moe(offsets=tensor(5, 1, 1)), "first_token_offset", "data type"),
    "moe gather needs an index": (lambda: moe(mode="GATHER"), "token_index", "mode GATHER needs it"),
    "moe scatter needs slots": (
        lambda: moe(mode="SCATTER", token_index=index(1, 12, 1), top_k=2),
        "token_ks",
        "mode SCATTER needs it",
    ),
    "moe combine needs scores": (lambda: moe(**{**COMBINE, "top_k_scores": None}), "top_k_scores", "COMBINE needs it"),
    "moe scores without combine": (lambda: moe(top_k_scores=tensor(1, 6, 2)), "top_k_scores", "does not use it"),
    "moe index shape": (
        lambda: moe(mode="GATHER", token_index=index(1, 12, 2)),
        "token_index",
        "wrong shape",
    ),
    "moe index type": (lambda: moe(mode="GATHER", token_index=tensor(1, 12, 1)), "token_index", "data type"),
    "moe scatter index": (lambda: moe(**{**SCATTER, "token_index": index(1, 6, 1)}), "token_index", "wrong shape"),
    "moe scatter slots": (lambda: moe(**{**SCATTER, "token_ks": index(1, 6, 1)}), "token_ks", "wrong shape"),
    "moe scatter without top_k": (lambda: moe(**{**SCATTER, "top_k": None}), "top_k", "experts of a token"),
    "moe scatter top_k": (lambda: moe(**{**SCATTER, "top_k": 5}), "top_k", "experts of a token"),
    "moe scatter rows": (
        lambda: moe((1, 9, 16), **{**SCATTER, "token_index": index(1, 9, 1), "token_ks": index(1, 9, 1)}),
        "token",
        "not top_k",
    ),
    "moe combine rows": (lambda: moe(**{**COMBINE, "top_k_scores": tensor(1, 5, 2)}), "token", "not top_k"),
    "moe combine scores": (lambda: moe(**{**COMBINE, "top_k_scores": tensor(1, 6, 3)}), "top_k_scores", "wrong shape"),
    "moe combine score type": (lambda: moe(**{**COMBINE, "top_k_scores": index(1, 6, 2)}), "top_k_scores", "data type"),
    "moe Y": (lambda: moe(out={"Y": {"dim": (1, 12, 16)}}), "Y", "wrong shape"),
}


@pytest.mark.parametrize("case", CASES)
def test_rule(case):
    make, port, text = CASES[case]
    found = only_problem(make())
    assert found.port == port
    assert text in found.message


def test_valid_nodes_have_no_findings():
    for node in (
        mm(),
        conv(padding=[1, 1]),
        norm(bias=(1, 1, 8)),
        norm(op="rmsnorm"),
        moe(),
        moe(offsets=index(4, 1, 1, dtype="int64")),
        moe(offsets=index(13, 1, 1)),
        moe(**SCATTER),
        moe(**COMBINE),
        dequantize(),
        dequantize(scale=(4, 1, 2), size=(8, 32)),
        quantize(),
        quantize((1, 8, 64), groups=index(3), reordering="F8_128x4"),
    ):
        assert problems(node) == []


def test_findings_state_what_was_expected_and_what_was_there():
    found = only_problem(mm((2, 3), (4, 5)))
    assert (found.expected, found.actual) == (3, 4)
    found = only_problem(norm(scale=(1, 1, 7)))
    assert found.expected == "each axis 1 or as in (2, 5, 8)"
    assert found.actual == "(1, 1, 7)"

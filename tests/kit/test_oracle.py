"""The kit's oracle and its bounds: right by loops and by torch_reference, wide enough for fp32, too narrow for shortcuts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from cudnn_core._ops._table import in_tree
from cudnn_core.testing import _codec
from cudnn_core.testing._cases import Case
from cudnn_core.testing._compare import mismatch
from cudnn_core.testing._inputs import has_specials, make_inputs
from cudnn_core.testing._library import library, new_graph
from cudnn_core.testing._oracle import POINTWISE, RULES, Val, evaluate

CASES = {case.name: case for case in library()}


def frozen(case, sizes=None):
    return case.freeze().at(case.sizes[0] if sizes is None else sizes)


def outputs(graph):
    return [tensor for tensor in graph.operand_tensors() if tensor.role == "output"]


def test_every_op_of_the_table_has_a_case_and_a_rule():
    covered = {node.op for case in CASES.values() for node in case.freeze().nodes}
    assert covered >= set(in_tree())
    evaluate(
        frozen(CASES["gdn-f32-plain"]), make_inputs(CASES["gdn-f32-plain"], frozen(CASES["gdn-f32-plain"]), "random")
    )
    assert set(RULES) | set(POINTWISE) >= set(in_tree())


def test_every_case_has_a_name_of_its_own_and_says_its_op_first():
    assert len(CASES) >= 200
    for name, case in CASES.items():
        first = name.partition("-")[0]
        assert first in [node.op for node in case.freeze().nodes]


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_torch_reference(name):
    import torch
    from torch_reference import evaluate as reference

    case = CASES[name]
    for sizes, variant in itertools.product(case.sizes, ("random", "special")):
        graph = frozen(case, sizes)
        if variant == "special" and not has_specials(case, graph):
            continue
        inputs = make_inputs(case, graph, variant)
        feed = {}
        for tensor in graph.operand_tensors():
            if tensor.role == "input":
                values = _codec.decode(inputs[tensor.index], tensor.dtype)
                feed[tensor.uid] = torch.tensor(values if _codec.format_of(tensor.dtype) else values.astype(np.int64))
        theirs = reference(graph, feed, round_virtual=False, round_outputs=False)
        ours = evaluate(graph, inputs)
        for tensor in outputs(graph):
            np.testing.assert_allclose(
                ours[tensor.index].v,
                theirs[tensor.uid].double().numpy(),
                rtol=1e-9,
                atol=1e-11,
                err_msg=f"{name} {variant}",
            )
            assert not np.isnan(ours[tensor.index].e).any()


def by_loop(op, x):
    return {
        "gelu": lambda: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
        "sigmoid": lambda: 1 / (1 + math.exp(-x)),
        "softplus": lambda: math.log1p(math.exp(x)),
        "elu": lambda: x if x > 0 else math.expm1(x),
        "tanh": lambda: math.tanh(x),
        "rsqrt": lambda: 1 / math.sqrt(x),
        "gelu_approx_tanh": lambda: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "swish": lambda: x / (1 + math.exp(-x)),
    }[op]()


@pytest.mark.parametrize("op", ["gelu", "sigmoid", "softplus", "elu", "tanh", "rsqrt", "gelu_approx_tanh", "swish"])
def test_pointwise_functions_are_those_of_the_math_module(op):
    case = CASES[f"{op}-f32"]
    graph = frozen(case)
    inputs = make_inputs(case, graph, "random")
    x = next(_codec.decode(codes, "float32") for codes in inputs.values()).reshape(-1)
    y = evaluate(graph, inputs)[outputs(graph)[0].index].v.reshape(-1)
    for value, found in zip(x, y, strict=True):
        assert found == pytest.approx(by_loop(op, value), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("op", ["gelu", "gelu_approx_tanh", "tanh", "sigmoid", "softplus", "elu", "swish"])
def test_backward_forms_are_the_derivatives(op):
    backward = CASES[f"{op}_backward-f32"]
    inputs = make_inputs(backward, frozen(backward), "random")
    loss, x = (_codec.decode(codes, "float32") for codes in inputs.values())
    found = evaluate(frozen(backward), inputs)[outputs(frozen(backward))[0].index].v
    function = (lambda x: x / (1 + np.exp(-x))) if op == "swish" else POINTWISE[op].function
    step = 1e-6
    slope = (function(x + step) - function(x - step)) / (2 * step)
    np.testing.assert_allclose(found, loss * slope, rtol=1e-5, atol=1e-6)


# --- the bounds
def matmul(k, out="float32", io="float32"):
    def build():
        graph = new_graph(io)
        c = graph.matmul(graph.tensor((1, 8, k), name="a"), graph.tensor((1, k, 8), name="b"))
        c.set_output(True).set_name("c").set_data_type(out)
        return graph

    return Case(f"matmul-{io}-{k}", build)


def judged(case, compute):
    """What the kit says of ``compute(decoded inputs...)``, encoded as the output's type."""
    graph = frozen(case)
    inputs = make_inputs(case, graph, "random")
    values = [
        _codec.decode(codes, t.dtype)
        for t in graph.operand_tensors()
        if t.role == "input"
        for codes in [inputs[t.index]]
    ]
    out = outputs(graph)[0]
    return mismatch(_codec.encode(compute(*values), out.dtype), out.dtype, evaluate(graph, inputs)[out.index])


def rounded(x, dtype="bfloat16"):
    return _codec.decode(_codec.encode(x, dtype), dtype)


@pytest.mark.parametrize("k", [1, 16, 256, 2048])
def test_a_product_in_fp32_passes_in_any_order(k):
    def backwards(a, b):
        total = np.zeros((1, 8, 8), dtype=np.float32)
        for i in reversed(range(k)):
            total += a[:, :, i : i + 1].astype(np.float32) * b[:, i : i + 1, :].astype(np.float32)
        return total

    assert judged(matmul(k), backwards) == ""
    assert judged(matmul(k), lambda a, b: a.astype(np.float32) @ b.astype(np.float32)) == ""


def test_operands_rounded_to_tf32_fail():
    def tf32(x):
        return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)

    assert "expected" in judged(matmul(256), lambda a, b: tf32(a) @ tf32(b))


def test_accumulation_in_bf16_fails():
    def narrow(a, b):
        total = np.zeros((1, 8, 8))
        for i in range(a.shape[2]):
            total = rounded(total + a[:, :, i : i + 1] * b[:, i : i + 1, :])
        return total

    assert "expected" in judged(matmul(256, io="bfloat16"), narrow)
    assert "expected" in judged(matmul(256, "bfloat16", io="bfloat16"), narrow)


def test_one_rounding_of_the_output_passes_and_two_spacings_fail():
    case = matmul(64, "bfloat16", io="bfloat16")
    assert judged(case, lambda a, b: a @ b) == ""
    assert "expected" in judged(case, lambda a, b: (a @ b) * (1 + 2.0**-6))


def test_an_intermediate_may_be_rounded_to_its_declared_type_or_not():
    def build():
        from cudnn_core import Graph

        graph = Graph(io_data_type="bfloat16", intermediate_data_type="bfloat16", compute_data_type="float32")
        x, y = (graph.tensor((64, 64), name=name) for name in "xy")
        graph.mul(graph.add(x, y), y).set_output(True).set_name("z")
        return graph

    case = Case("add-mul", build)
    assert judged(case, lambda x, y: (x + y) * y) == ""
    assert judged(case, lambda x, y: rounded(x + y) * y) == ""
    assert "expected" in judged(case, lambda x, y: rounded(rounded(x + y) * (1 + 2.0**-6)) * y)


def test_a_softmax_with_bf16_probabilities_passes_and_with_fp8_ones_fails():
    case = CASES["sdpa-bf16-plain"]

    def attention(step):
        def compute(*values):
            q, k, v = values
            score = 0.25 * q @ np.swapaxes(k, -1, -2)
            p = np.exp(score - score.max(-1, keepdims=True))
            return step(p / p.sum(-1, keepdims=True)) @ v

        return compute

    assert judged(case, attention(lambda p: p)) == ""
    assert judged(case, attention(rounded)) == ""
    assert "expected" in judged(case, attention(lambda p: rounded(p, "fp8_e4m3")))


def test_a_one_pass_variance_in_fp32_passes_and_a_missing_epsilon_fails():
    case = CASES["layernorm-f32-small-6x48"]
    graph = frozen(case)

    def norm(epsilon):
        def compute(*values):
            named = dict(zip([t.name for t in graph.operand_tensors() if t.role == "input"], values, strict=True))
            x = named["x"].astype(np.float32)
            mean = x.mean(-1, keepdims=True, dtype=np.float32)
            variance = (x * x).mean(-1, keepdims=True, dtype=np.float32) - mean * mean
            return (x - mean) / np.sqrt(variance + np.float32(epsilon)) * named["scale"].astype(np.float32)

        return compute

    assert judged(case, norm(1e-5)) == ""
    assert "expected" in judged(case, norm(0.0))


# --- comparison by kind
def val(*values, e=0.0):
    exact = np.array(values, dtype=np.float64)
    return Val(exact, np.full_like(exact, e))


def judge(got, dtype, expected, **options):
    return mismatch(_codec.encode(np.array(got, dtype=np.float64), dtype), dtype, expected, **options)


def test_nan_must_be_nan_and_infinity_that_infinity():
    nan, inf = float("nan"), float("inf")
    assert judge([nan, inf, -inf], "float32", val(nan, inf, -inf)) == ""
    for got, exact in ((0.0, nan), (nan, 0.0), (inf, -inf), (1e30, inf), (inf, 1.0), (nan, inf)):
        assert judge([got], "float32", val(exact)), (got, exact)


def test_what_may_round_beyond_the_largest_value_may_overflow():
    assert judge([float("inf")], "float16", val(65520.0)) == ""
    assert judge([65504.0], "float16", val(65504.0)) == ""
    assert judge([float("inf")], "float16", val(60000.0))
    assert judge([448.0], "fp8_e4m3", val(1e6)) == ""
    assert judge([240.0], "fp8_e4m3", val(1e6))


def test_integers_round_to_nearest_and_saturate():
    assert judge([3, -3, 127], "int8", val(2.6, -3.0, 1000.0)) == ""
    assert judge([2], "int8", val(2.6))
    assert judge([4], "int8", val(3.0))
    assert judge([-128], "int8", val(1000.0))


def test_moved_elements_keep_the_sign_of_zero():
    assert judge([-0.0], "float32", val(-0.0), bitwise=True) == ""
    assert judge([0.0], "float32", val(-0.0), bitwise=True)
    assert judge([0.0], "float32", val(-0.0)) == ""


def test_a_mismatch_names_the_worst_element():
    text = judge([1.0, 2.5, 3.1], "float32", val(1.0, 2.0, 3.0, e=0.01))
    assert text.startswith("[1]: expected 2 within 0.01, got 2.5 (2 of 3 elements are wrong)")

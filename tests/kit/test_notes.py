"""Bounds that follow from the notes down_convert_inputs, approximate_math and nan_not_propagated: with and without them."""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_core import Graph, numerical_note
from cudnn_core.testing import _codec
from cudnn_core.testing._cases import Case
from cudnn_core.testing._compare import mismatch
from cudnn_core.testing._inputs import make_inputs
from cudnn_core.testing._library import library
from cudnn_core.testing._oracle import evaluate

CONVERTS, APPROXIMATE, NO_NAN = "down_convert_inputs", "approximate_math", "nan_not_propagated"
CASES = {case.name: case for case in library()}


def problem(case, compute, notes=(), variant="random"):
    """What the kit says of ``compute(inputs by name, the exact output)``, an output of the case's type."""
    graph = case.freeze().at(case.sizes[0])
    codes = make_inputs(case, graph, variant)
    tensors = graph.operand_tensors()
    values = {t.name: _codec.decode(codes[t.index], t.dtype) for t in tensors if t.role == "input"}
    out = next(t for t in tensors if t.role == "output")
    exact = evaluate(graph, codes)[out.index]
    with np.errstate(all="ignore"):
        got = _codec.encode(compute(values, exact.v), out.dtype)
    return mismatch(got, out.dtype, evaluate(graph, codes, notes)[out.index])


def float32(build):
    """``build`` in a graph of float32, its result the output y."""

    def made():
        graph = Graph(io_data_type="float32", compute_data_type="float32", intermediate_data_type="float32")
        build(graph).set_output(True).set_name("y")
        return graph

    return made


# --- down_convert_inputs
def tf32(x):
    """float32 values rounded to 10 bits behind the leading one, to the nearest."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x).astype(np.float64)


def bf16(x):
    return _codec.decode(_codec.encode(x, "bfloat16"), "bfloat16")


def product(round_operands):
    return lambda x, exact: round_operands(x["a"]) @ round_operands(x["b"])


MATMULS = ["matmul-f32-17x33x9", "matmul-f32-column-major-8x8x8", "matmul-f32-128x256x64"]


@pytest.mark.parametrize("name", MATMULS)
@pytest.mark.parametrize("note", [CONVERTS, str(numerical_note.DOWN_CONVERT_INPUTS)])
def test_products_in_tf32_pass_with_the_note_and_fail_without(name, note):
    assert problem(CASES[name], product(tf32), [note]) == ""
    assert "expected" in problem(CASES[name], product(tf32), [APPROXIMATE, "tensor_core"])


@pytest.mark.parametrize("name", MATMULS[:1])
def test_products_of_narrower_operands_and_dropped_terms_fail_with_the_note(name):
    assert "expected" in problem(CASES[name], product(bf16), [CONVERTS])
    dropped = lambda x, exact: x["a"][..., 1:] @ x["b"][..., 1:, :]  # noqa: E731
    assert "expected" in problem(CASES[name], dropped, [CONVERTS])


def test_the_allowance_of_a_product_and_none_for_other_types():
    def bounds(dtype):
        case = CASES[f"matmul-{dtype}-17x33x9"]
        graph = case.freeze()
        codes = make_inputs(case, graph, "random")
        tensors = graph.operand_tensors()
        a, b = (np.abs(_codec.decode(codes[t.index], t.dtype)) for t in tensors if t.role == "input")
        out = next(t for t in tensors if t.role == "output")
        return a @ b, evaluate(graph, codes, [CONVERTS])[out.index].e - evaluate(graph, codes)[out.index].e

    size, extra = bounds("f32")
    np.testing.assert_allclose(extra, size * (2 * 2**-11 + 2**-22), rtol=1e-9)
    assert not bounds("bf16")[1].any()


def test_infinities_times_what_tf32_has_no_number_for_are_not_judged():
    """The smallest float32 is 0 in TF32: an infinity or NaN, and 0 for the columns beside it."""
    case = Case(
        "matmul-edge",
        float32(lambda g: g.matmul(g.tensor((1, 1, 2), name="a"), g.tensor((1, 2, 2), name="b"))),
        values={"a": [2.0**-149, 0.0], "b": [np.inf, 1.0, 1.0, 1.0]},
    )
    converted = lambda x, exact: np.array([[[np.nan, 0.0]]])  # noqa: E731
    assert problem(case, converted, [CONVERTS]) == ""
    assert "[0, 0, 0]: expected inf" in problem(case, converted)
    wrong = lambda x, exact: np.array([[[np.nan, 1.0]]])  # noqa: E731
    assert "[0, 0, 1]" in problem(case, wrong, [CONVERTS])


@pytest.mark.parametrize("name", MATMULS[:1])
def test_special_values_of_products_are_judged_with_the_note(name):
    assert problem(CASES[name], product(lambda x: x), [CONVERTS], "special") == ""
    zeroed = lambda x, exact: np.where(np.isnan(exact), 0.0, exact)  # noqa: E731
    assert "expected nan" in problem(CASES[name], zeroed, [CONVERTS], "special")


def test_convolutions_and_grouped_products_in_tf32():
    conv = Case(
        "conv",
        float32(
            lambda g: g.conv_fprop(
                g.tensor((2, 6, 5, 5), name="a"),
                g.tensor((4, 6, 1, 1), name="b"),
                padding=[0, 0],
                stride=[1, 1],
                dilation=[1, 1],
            )
        ),
    )
    moe = Case(
        "moe",
        float32(
            lambda g: g.moe_grouped_matmul(
                g.tensor((1, 6, 40), name="a"),
                g.tensor((2, 40, 4), name="b"),
                g.tensor((2, 1, 1), data_type="int32", name="o"),
            )
        ),
        values={"o": [0, 2]},
    )

    def convolved(x, exact):
        return np.einsum("nchw,kc->nkhw", tf32(x["a"]), tf32(x["b"])[:, :, 0, 0])

    def grouped(x, exact):
        a, b = tf32(x["a"])[0], tf32(x["b"])
        return np.concatenate([a[:2] @ b[0], a[2:] @ b[1]])[None]

    for case, compute in ((conv, convolved), (moe, grouped)):
        assert problem(case, compute, [CONVERTS]) == ""
        assert "expected" in problem(case, compute)


def test_attention_in_tf32():
    case = Case(
        "sdpa",
        float32(
            lambda g: g.sdpa(*(g.tensor((1, 2, 24, 32), name=n) for n in "qkv"), attn_scale=0.2, generate_stats=False)[
                0
            ]
        ),
    )

    def attention(rounded):
        def compute(x, exact):
            score = 0.2 * rounded(x["q"]) @ np.swapaxes(rounded(x["k"]), -1, -2)
            p = np.exp(score - score.max(-1, keepdims=True))
            return rounded(p) @ rounded(x["v"]) / p.sum(-1, keepdims=True)

        return compute

    assert problem(case, attention(tf32), [CONVERTS]) == ""
    assert "expected" in problem(case, attention(tf32))
    assert "expected" in problem(case, attention(lambda x: x * 1.01), [CONVERTS])


# --- approximate_math
def tanh_approx(x):
    """tanh with a relative error of up to 2**-11, as the PTX ISA states it of tanh.approx.f32."""
    signs = np.where(np.arange(np.size(x)).reshape(np.shape(x)) % 2, 1, -1)
    return np.tanh(x) * (1 + signs * 2.0**-11)


def inner(x):
    return np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)


def gelu_backward(g, x):
    t = tanh_approx(inner(x))
    return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x * x))


TANH = {
    "tanh": tanh_approx,
    "tanh_backward": lambda g, x: g * (1 - tanh_approx(x) ** 2),
    "gelu_approx_tanh": lambda x: 0.5 * x * (1 + tanh_approx(inner(x))),
    "gelu_approx_tanh_backward": gelu_backward,
}
OTHERS = ["exp", "log", "sin", "cos", "tan", "erf", "sigmoid", "softplus", "elu", "swish", "gelu"]
OTHERS += [f"{name}_backward" for name in ("sigmoid", "softplus", "elu", "swish", "gelu")]


@pytest.mark.parametrize("op", TANH)
def test_formulas_of_approximate_tanh_pass_with_the_note_and_fail_without(op):
    case = CASES[f"{op}-f32"]
    compute = lambda x, exact: TANH[op](*x.values())  # noqa: E731
    assert problem(case, compute, [APPROXIMATE]) == ""
    assert "expected" in problem(case, compute, [CONVERTS])


@pytest.mark.parametrize("op", OTHERS)
def test_other_functions_have_twenty_bits_with_the_note(op):
    case = CASES[f"{op}-f32"]
    off = lambda x, exact: exact * (1 + 2.0**-20)  # noqa: E731
    assert problem(case, off, [APPROXIMATE]) == ""
    more = lambda x, exact: exact * (1 + 2.0**-12)  # noqa: E731
    assert "expected" in problem(case, more, [APPROXIMATE])
    if op in ("exp", "sigmoid"):  # whose strict bounds are relative
        assert "expected" in problem(case, off)


@pytest.mark.parametrize("op", [*TANH, *OTHERS])
def test_an_error_of_a_hundredth_fails_with_the_note(op):
    off = lambda x, exact: exact * 1.01  # noqa: E731
    assert "expected" in problem(CASES[f"{op}-f32"], off, [APPROXIMATE])


@pytest.mark.parametrize(("op", "error"), [("sin", 3.1e-7), ("tan", 2.8e-7), ("cos", 3.1e-7)])
def test_absolute_errors_as_an_h200_has_them_near_zero(op, error):
    case = Case(
        f"{op}-near",
        float32(lambda g: getattr(g, op)(g.tensor((4,), name="x"))),
        values={"x": [-0.0677, 0.064, 1.5, 0.0]},
    )
    off = lambda x, exact: exact + error  # noqa: E731
    assert problem(case, off, [APPROXIMATE]) == ""
    assert problem(case, lambda x, exact: exact + 1e-5, [APPROXIMATE]) != ""


def test_errors_as_an_h200_has_them_in_tanh_backward():
    case = CASES["tanh_backward-f32"]

    def off(x, exact):
        g, u = x.values()
        return exact + 2 * g * np.tanh(u) ** 2 * 2.0**-11

    assert problem(case, off, [APPROXIMATE]) == ""
    assert "expected" in problem(case, off)


@pytest.mark.parametrize("op", ["sqrt", "rsqrt", "reciprocal", "mul"])
def test_the_note_changes_no_other_function(op):
    case = CASES[f"{op}-f32"]
    assert "expected" in problem(case, lambda x, exact: exact * (1 + 2.0**-20), [APPROXIMATE])


def test_arithmetic_in_fp64_is_not_approximate():
    def build():
        graph = Graph(io_data_type="float64", compute_data_type="float64")
        graph.tanh(graph.tensor((4,), name="x")).set_output(True).set_name("y")
        return graph

    case = Case("tanh-f64", build)
    assert "expected" in problem(case, lambda x, exact: exact * (1 + 2.0**-20), [APPROXIMATE])


# --- nan_not_propagated
def ignoring(op):
    """The op as hardware that ignores NaN has it."""
    if op in ("max", "min"):
        pick = np.fmax if op == "max" else np.fmin
        return lambda x, exact: pick(*x.values())
    if op == "relu_backward":
        return lambda x, exact: np.where(x[list(x)[1]] > 0, x[next(iter(x))], 0.0)
    pick, start = {"max": (np.fmax, -np.inf), "min": (np.fmin, np.inf), "amax": (np.fmax, 0.0)}[op.partition("-")[2]]
    size = np.abs if op == "reduction-amax" else np.asarray
    return lambda x, exact: pick.reduce(size(x["x"]), axis=-1, keepdims=True, initial=start)


IGNORING = {"max": "max-f32", "min": "min-f32", "relu_backward": "relu_backward-f32"} | {
    f"reduction-{mode}": f"reduction-{mode}-f32-3x4x25-to-3x4x1" for mode in ("max", "min", "amax")
}


@pytest.mark.parametrize("op", IGNORING)
def test_a_nan_may_be_ignored_with_the_note_and_not_without(op):
    case = CASES[IGNORING[op]]
    assert problem(case, ignoring(op), [NO_NAN], "special") == ""
    assert "expected nan" in problem(case, ignoring(op), [CONVERTS], "special")


@pytest.mark.parametrize("op", IGNORING)
def test_infinities_and_numbers_are_judged_with_the_note(op):
    case = CASES[IGNORING[op]]
    assert problem(case, lambda x, exact: exact, [NO_NAN], "special") == ""
    finite = lambda x, exact: np.clip(exact, -1e30, 1e30)  # noqa: E731
    if op == "relu_backward" or op in ("max", "min"):
        assert "inf" in problem(case, finite, [NO_NAN], "special")
    assert "expected" in problem(case, lambda x, exact: exact + 0.01, [NO_NAN], "random")


@pytest.mark.parametrize("name", ["abs-f32", "add-f32", "relu-f32", "reduction-add-f32-3x4x25-to-3x4x1"])
def test_a_nan_is_kept_by_every_other_op(name):
    zeroed = lambda x, exact: np.where(np.isnan(exact), 0.0, exact)  # noqa: E731
    assert "expected nan" in problem(CASES[name], zeroed, [NO_NAN], "special")


@pytest.mark.parametrize("follow", ["tanh", "abs", "neg", "square", "sum", "norm2", "product", "bf16"])
def test_what_an_ignored_nan_reaches_is_not_judged(follow):
    """And what it does not reach is: y of the second row of two."""

    def build(g):
        z = g.max(g.tensor((1, 2, 2), name="x"), g.tensor((1, 2, 2), name="w"))
        if follow == "bf16":
            return g.abs(z.set_data_type("bfloat16"))
        if follow == "square":
            return g.mul(z, z)
        if follow == "product":
            return g.matmul(z, g.tensor((1, 2, 1), name="v"))
        if follow in ("sum", "norm2"):
            mode = {"sum": "ADD", "norm2": "NORM2"}[follow]
            return g.reduction(z, mode=mode).set_dim((1, 2, 1)).set_stride((2, 1, 1))
        return getattr(g, follow)(z)

    values = {"x": [np.nan, np.nan, 1.0, 2.0], "w": [0.5, np.inf, 0.25, 0.5], "v": [0.0, 1.0]}
    case = Case(f"max-{follow}", float32(build), values=values)
    for put in (np.nan, 0.5, np.inf):
        top = lambda x, exact, put=put: np.where([[[True], [False]]], put, exact)  # noqa: E731
        assert problem(case, top, [NO_NAN]) == ""
        assert np.isnan(put) or "expected nan" in problem(case, top)
    low = lambda x, exact: np.where([[[False], [True]]], np.nan, exact)  # noqa: E731
    assert ", 1, " in problem(case, low, [NO_NAN])

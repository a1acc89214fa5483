"""Vetoes are data: each row hits what it describes and nothing beside it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from backend_cases import CASES, Build, out
from cudnn_backend import vetoes
from lowering_variations import VARIATIONS

from cudnn_core import DeviceInfo, Dim

H200 = DeviceInfo.preset("H200")
ROW = {"op": ["*"], "when": {"extent": 0}, "versions": "", "effect": "dies", "code": "shape.range", "expected": "more"}


def node(op, attrs=None, **inputs):
    tensors = {port: SimpleNamespace(dim=dim) for port, dim in inputs.items()}
    return SimpleNamespace(op=op, attrs=attrs or {}, inputs=tensors, outputs={})


def device(capability):
    return SimpleNamespace(compute_capability=capability)


def row(op):
    (found,) = [veto for veto in vetoes.load() if op in veto.ops]
    return found


def test_the_rows_are():
    assert [sorted(veto.ops) for veto in vetoes.load()] == [
        ["*"],
        ["conv_dgrad", "conv_fprop", "conv_wgrad"],
        ["sdpa_mxfp8"],
        ["moe_grouped_matmul"],
        ["moe_grouped_matmul"],
    ]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_ordinary_graphs_are_not_vetoed(case):
    found = vetoes.vetoed(case.graph().freeze("cuda"), H200, 0)
    assert bool(found) == (case.name == "moe-gather")


@pytest.mark.parametrize(("a", "b"), [((1, 0, 16), (1, 16, 8)), ((1, 8, 0), (1, 0, 8)), ((0, 8, 16), (0, 16, 8))])
def test_an_axis_without_elements_is_vetoed(a, b):
    build = Build()
    build.graph()
    out(build.g.matmul(build.input(a), build.input(b)))
    (decline,) = vetoes.vetoed(build.g.freeze("cuda"), H200, 91900)
    assert (decline.code, decline.subject) == ("shape.range", "matmul.A")
    assert "SIGFPE" in decline.hint


def test_a_runtime_size_that_may_be_0_is_vetoed():
    for least, count in ((0, 1), (1, 0)):
        build = Build()
        build.graph()
        out(build.g.matmul(build.input((1, Dim("m", min=least), 16)), build.input((1, 16, 8))))
        assert len(vetoes.vetoed(build.g.freeze("cuda"), H200, 0)) == count


@pytest.mark.parametrize("op", ["conv_fprop", "conv_dgrad", "conv_wgrad"])
def test_a_convolution_that_does_not_move_is_vetoed(op):
    """The core refuses it in graphs of its own; this is for the day when it does not."""
    found = row(op)
    assert found.hit(node(op, {"stride": (1, 0)})) == (f"{op}.stride", [1, 0])
    assert found.hit(node(op, {"stride": (1, 2)})) is None
    assert found.hit(node("matmul", {"stride": (0,)})) is None


def test_one_query_of_mxfp8_attention_is_vetoed_on_107():
    found = row("sdpa_mxfp8")
    one, two = node("sdpa_mxfp8", q=(1, 8, 1, 128)), node("sdpa_mxfp8", q=(1, 8, 2, 128))
    assert found.hit(one) == ("sdpa_mxfp8.q[2]", "1")
    assert found.hit(two) is None
    assert found.hit(node("sdpa_mxfp8", q=(1, 8, 1, 128), sink_token=(1, 8, 1, 1))) is None
    assert found.hit(node("sdpa_mxfp8", q=(1, 8, 1, 128), paged_attention_k_table=(1, 1, 4, 1))) is None
    assert found.applies(device((10, 7)), 92600)
    assert found.applies(device((10, 7)), 92801)  # no version is known to be cured
    assert not found.applies(device((10, 7)), 92500)
    assert not found.applies(device((10, 0)), 92600)


@pytest.mark.parametrize("preset", ["H200", "B200"])
@pytest.mark.parametrize(
    ("mode", "effect"), [("GATHER", "illegal memory access"), ("SCATTER", "not tried"), ("COMBINE", "not tried")]
)
def test_grouped_products_that_move_tokens_are_vetoed_everywhere(mode, effect, preset):
    build = Build()
    VARIATIONS["moe_grouped_matmul", f"mode-{mode}"][1](build)
    (decline,) = vetoes.vetoed(build.g.freeze("cuda"), DeviceInfo.preset(preset), 92801)
    assert (decline.code, decline.subject, decline.actual) == ("op.attribute", "moe_grouped_matmul.mode", mode)
    assert effect in decline.hint


def test_an_attribute_is_one_of_the_values_or_is_not_there():
    found = vetoes.parse({**ROW, "when": {"is": {"mode": ["A", "B"]}}})
    assert found.hit(node("matmul", {"mode": "B"})) == ("matmul.mode", "B")
    assert found.hit(node("matmul", {"mode": "C"})) is None
    assert found.hit(node("matmul")) is None


def test_an_unknown_version_might_be_one_that_crashes():
    assert row("sdpa_mxfp8").applies(device((10, 7)), 0)


@pytest.mark.parametrize(
    ("text", "version", "holds"),
    [
        (">=9.26", 92600, True), (">=9.26", 92599, False), ("<9.28.1", 92800, True), ("<9.28.1", 92801, False),
        ("==9.14.0", 91400, True), ("==9.14.0", 91401, False), (">=9.10, <9.12", 91100, True),
        (">=9.10, <9.12", 91200, False), (">9.10", 91000, False), ("<=9.10", 91000, True),
    ],
)  # fmt: skip
def test_versions_are_compared(text, version, holds):
    assert vetoes.parse({**ROW, "versions": text}).applies(H200, version) == holds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reason": "x"}, "unknown field reason"),
        ({"when": {"size_of": 0}}, "unknown condition 'size_of'"),
        ({"versions": "9.26"}, "no comparison of versions"),
    ],
)
def test_a_row_that_says_something_unknown_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        vetoes.parse({**ROW, **change})


def test_every_row_has_a_code_of_the_catalogue_and_an_effect():
    from cudnn_core._declines import check_code

    for veto in vetoes.load():
        check_code(veto.code)
        assert veto.effect
        assert veto.finds

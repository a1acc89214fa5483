"""Bounds of sums of products of 8-bit floats, with and without the note reduced_precision_reduction."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cudnn_core import Graph, PlanConfig, Support, device_info, numerical_note
from cudnn_core.testing import _codec
from cudnn_core.testing._cases import Case
from cudnn_core.testing._compare import mismatch
from cudnn_core.testing._inputs import make_inputs
from cudnn_core.testing._library import library
from cudnn_core.testing._oracle import evaluate
from cudnn_core.testing._running import Job
from tests.kit import _hopper
from tests.kit._hopper import hopper_matmul
from tests.zoo._animals import write_beast
from tests.zoo.test_kit import run_kit

NOTE = "reduced_precision_reduction"
E4M3, E5M2 = "fp8_e4m3", "fp8_e5m2"
CASES = {case.name: case for case in library()}


def matmul(k, a=E4M3, b=E4M3, out="float32", batches=((1,), (1,)), size=32):
    def build():
        graph = Graph(io_data_type=a, intermediate_data_type="float32", compute_data_type="float32")
        left = graph.tensor((*batches[0], size, k), name="a")
        right = graph.tensor((*batches[1], k, size), data_type=b, name="b")
        graph.matmul(left, right).set_output(True).set_name("c").set_data_type(out)
        return graph

    return Case(f"matmul-{a}-{b}-{k}", build)


def operands(case):
    """(graph, codes by index, inputs by name, the output)."""
    graph = case.freeze().at(case.sizes[0])
    codes = make_inputs(case, graph, "random")
    tensors = graph.operand_tensors()
    values = {t.name: _codec.decode(codes[t.index], t.dtype) for t in tensors if t.role == "input"}
    return graph, codes, values, next(t for t in tensors if t.role == "output")


def judged(case, compute, notes=(NOTE,)):
    """What the kit says of ``compute(a, b)``."""
    graph, codes, values, out = operands(case)
    got = _codec.encode(compute(values["a"], values["b"]), out.dtype)
    return mismatch(got, out.dtype, evaluate(graph, codes, notes)[out.index])


def allowance(case):
    """(values of the inputs by name, the output's exact values, what the note adds to its bound)."""
    graph, codes, values, out = operands(case)
    plain, noted = (evaluate(graph, codes, notes)[out.index] for notes in ((), (NOTE,)))
    assert np.array_equal(plain.v, noted.v)
    return values, plain.v, noted.e - plain.e


PRODUCTS = {
    "e4m3": matmul(128),
    "e5m2": matmul(128, E5M2, E5M2),
    "mixed": matmul(128, E4M3, E5M2),
    "odd": matmul(208, batches=((2, 1), (1, 3))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_sums_as_hopper_adds_them_pass_with_the_note_and_fail_without(name):
    assert judged(PRODUCTS[name], hopper_matmul) == ""
    assert "expected" in judged(PRODUCTS[name], hopper_matmul, notes=("tensor_core", "deterministic"))


@pytest.mark.parametrize("promote", [32, 128, 2048])
def test_long_sums_pass_with_the_note_however_often_they_are_promoted(promote):
    assert judged(matmul(2048, size=16), lambda a, b: hopper_matmul(a, b, promote)) == ""


@pytest.mark.parametrize("name", ["matmul-e4m3-to-bf16-128x128x128", "matmul-e5m2-to-bf16-128x128x128"])
def test_the_library_has_cases_that_tell(name):
    assert judged(CASES[name], hopper_matmul) == ""
    assert "expected" in judged(CASES[name], hopper_matmul, notes=())


@pytest.mark.parametrize(("k", "dropped"), [(128, 32), (512, 128)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_dropped_terms_fail_with_the_note(dtype, k, dropped):
    case = matmul(k, dtype, dtype)
    for first in range(0, k, dropped):
        kept = np.r_[0:first, first + dropped : k]
        assert "expected" in judged(case, lambda a, b, kept=kept: a[..., kept] @ b[..., kept, :])


def test_the_note_counts_in_any_case_and_under_the_frontends_name():
    assert judged(PRODUCTS["e4m3"], hopper_matmul, notes=[str(numerical_note.REDUCED_PRECISION_REDUCTION)]) == ""


@pytest.mark.parametrize("io", ["bfloat16", "float16", "float32"])
def test_the_note_changes_no_other_products(io):
    _, _, extra = allowance(matmul(64, io, io))
    assert not extra.any()


@pytest.mark.parametrize("k", [1, 32, 33, 128])
def test_the_allowance_of_a_product_broadcast_or_not(k):
    values, exact, extra = allowance(matmul(k, batches=((2, 1), (1, 3)), size=4))
    a, b = np.abs(values["a"]), np.abs(values["b"])
    for i, j, m, n in np.ndindex(2, 3, 4, 4):
        largest = a[i, 0, m].max() * b[0, j, :, n].max()
        expected = math.ceil(k / 32) * 33 * 2**-13 * (largest + abs(exact[i, j, m, n]))
        assert extra[i, j, m, n] == pytest.approx(expected, rel=1e-9)


def test_the_allowance_of_a_convolution():
    def build():
        graph = Graph(io_data_type=E4M3, compute_data_type="float32", intermediate_data_type="float32")
        image, weight = graph.tensor((2, 6, 5, 5), name="x"), graph.tensor((4, 3, 3, 3), name="w")
        y = graph.conv_fprop(image, weight, padding=[1, 1], stride=[2, 1], dilation=[1, 1])
        y.set_output(True).set_name("y").set_data_type("float32")
        return graph

    values, exact, extra = allowance(Case("conv_fprop-e4m3", build))
    image = np.pad(np.abs(values["x"]), [(0, 0), (0, 0), (1, 1), (1, 1)])
    for n, k, i, j in np.ndindex(exact.shape):
        group = slice(3 * (k // 2), 3 * (k // 2) + 3)
        largest = image[n, group, 2 * i : 2 * i + 3, j : j + 3].max() * np.abs(values["w"][k]).max()
        expected = 33 * 2**-13 * (largest + abs(exact[n, k, i, j]))
        assert extra[n, k, i, j] == pytest.approx(expected, rel=1e-9)


def test_the_allowance_of_grouped_products():
    def build():
        graph = Graph(io_data_type=E4M3, compute_data_type="float32", intermediate_data_type="float32")
        token, weight = graph.tensor((1, 6, 40), name="t"), graph.tensor((2, 40, 4), name="w")
        offsets = graph.tensor((2, 1, 1), data_type="int32", name="offsets")
        y = graph.moe_grouped_matmul(token, weight, offsets)
        y.set_output(True).set_name("y").set_data_type("float32")
        return graph

    values, exact, extra = allowance(Case("moe_grouped_matmul-e4m3", build, values={"offsets": [0, 2]}))
    for row, n in itertools.product(range(6), range(4)):
        largest = np.abs(values["t"][0, row]).max() * np.abs(values["w"][int(row >= 2), :, n]).max()
        expected = 2 * 33 * 2**-13 * (largest + abs(exact[0, row, n]))
        assert extra[0, row, n] == pytest.approx(expected, rel=1e-9)


def attention(**values):
    """(inputs by name, what the note adds to the bounds of the outputs by name)."""

    def build():
        graph = Graph(io_data_type=E4M3, compute_data_type="float32", intermediate_data_type="float32")
        o, stats = graph.sdpa(
            *(graph.tensor((1, 2, 48, 64), name=name) for name in "qkv"), attn_scale=0.125, generate_stats=True
        )
        o.set_output(True).set_name("o").set_data_type("float32")
        stats.set_output(True).set_name("stats").set_data_type("float32")
        return graph

    graph, codes, inputs, _ = operands(Case("sdpa-e4m3", build, values=values))
    plain, noted = (evaluate(graph, codes, notes) for notes in ((), (NOTE,)))
    return inputs, {t.name: noted[t.index].e - plain[t.index].e for t in graph.operand_tensors() if t.role == "output"}


def test_the_allowance_of_attention_scores():
    """The worst of a row, in the logarithm of their sum; and from there in the output."""
    values, extra = attention()
    q, k = values["q"], values["k"]
    largest = np.abs(q).max(-1)[..., :, None] * np.abs(k).max(-1)[..., None, :]
    expected = 2 * 33 * 2**-13 * 0.125 * (largest + np.abs(q @ np.swapaxes(k, -1, -2))).max(-1, keepdims=True)
    np.testing.assert_allclose(extra["stats"], expected, rtol=2e-3)  # the worst of the sum, not the sum of the worst
    assert (extra["o"] > 0).all()


def test_the_allowance_of_weighted_attention_values():
    """Scores of 0 have none of their own, and every probability is 1/48."""
    values, extra = attention(q=np.zeros((1, 2, 48, 64)))
    v = values["v"]
    largest = np.abs(v).max(-2, keepdims=True) / 48
    expected = 2 * 33 * 2**-13 * (largest + np.abs(v.mean(-2, keepdims=True)))
    assert not extra["stats"].any()
    assert (extra["o"] >= expected).all()
    assert (extra["o"] <= 1.1 * expected).all()  # probabilities have errors of their own


# --- through the kit
@pytest.mark.parametrize(
    ("listed", "stated", "passes"),
    [((), None, False), ((NOTE,), None, True), ((), {NOTE.upper()}, True), ((NOTE,), set(), False)],
)
@pytest.mark.parametrize("oracle", ["kit", "torch_reference"])
def test_bounds_follow_the_notes_of_the_graph_or_else_of_the_manifest(oracle, listed, stated, passes):
    case = matmul(128)
    support = Support((PlanConfig("", {}),), notes=None if stated is None else frozenset(stated))
    kit = SimpleNamespace(candidate=lambda *_: SimpleNamespace(support=support), options=SimpleNamespace(oracle=oracle))
    entry = SimpleNamespace(plugin="acme", spec=SimpleNamespace(notes=frozenset(listed)))
    rig = Job(kit, entry, device_info("cpu"), case).rig(case.graph.plan(device="cpu"))
    _, codes, values, out = operands(case)
    got = _codec.encode(hopper_matmul(values["a"], values["b"]), out.dtype)
    assert (mismatch(got, out.dtype, rig.oracle(rig.graph, codes)[out.index]) == "") == passes


ENGINE = """
import ctypes

from cudnn_core import PlanConfig, Support, checks


class Plan:
    workspace_size = 0

    def __init__(self, graph):
        node = graph.nodes[0]
        slots = [tensor.index for tensor in graph.operand_tensors()]
        self.slots = [slots.index(t.index) for t in (node.inputs["A"], node.inputs["B"], node.outputs["C"])]
        self.dtype = str(node.inputs["A"].dtype)

    def execute(self, pack, ctx):
        import numpy as np
        from cudnn_core.testing._codec import decode, encode

        from .hopper import hopper_matmul

        def view(slot, kind):
            operand, size = pack.operands[slot], np.dtype(kind).itemsize
            extent = 1 + sum((n - 1) * s for n, s in zip(operand.dim, operand.stride))
            memory = (ctypes.c_char * (extent * size)).from_address(pack.pointers[slot])
            return np.ndarray(operand.dim, kind, memory, strides=[size * s for s in operand.stride])

        a, b = (decode(view(slot, "u1"), self.dtype) for slot in self.slots[:2])
        view(self.slots[2], "u2")[...] = encode(hopper_matmul(a, b), "bfloat16")


class Engine:
    notes = None

    def check_support(self, graph, ctx):
        c = checks(graph, ctx)
        c.ops("matmul")
        return c.result(Support((PlanConfig("", {}),), workspace=0, notes=self.notes))

    def build_plan(self, graph, config, ctx):
        return Plan(graph)
"""


@pytest.mark.L2
def test_the_kit_judges_an_engine_by_its_notes(tmp_path):
    site = tmp_path / "site-packages"
    site.mkdir()
    arguments = ["-k", "numerics and to-bf16-128x128x128"]
    for name, notes in (("silent", None), ("honest", {NOTE})):
        code = {
            "__init__.py": ENGINE.replace("notes = None", f"notes = {notes!r}"),
            "hopper.py": Path(_hopper.__file__).read_text(),
        }
        write_beast(site, name, code, engine={"dtypes": [E4M3, E5M2]})
        arguments += ["--cudnn-plugin", name]
    found, _, output = run_kit(site, *arguments, folder=tmp_path)
    assert len(found) == 4, output
    for name, failure in found.items():
        assert (failure == "") == name.startswith("honest:"), output
        assert not failure or "output c[0, " in failure

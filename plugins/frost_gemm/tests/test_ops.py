"""The op table: formulas against their references, references against torch_reference through a graph, flags against both."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from frost_gemm.ir import Op, Ref
from frost_gemm.ops import COMPARING, EXACT, GROWING, REDUCTIONS, TABLE, keeps_zero, zero_preserving

import cudnn_core
from cudnn_core import lookup_op

torch = pytest.importorskip("torch")

_spec = importlib.util.spec_from_file_location("frost_gemm_test_facade", Path(__file__).with_name("facade.py"))
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
NumpyFacade = _module.NumpyFacade

SOURCES = {"gen_index", "constant"}
POINTWISE = sorted(set(TABLE) - SOURCES)

CLIPS = [
    {"negative_slope": 0.0, "lower_clip": None, "upper_clip": None},
    {"negative_slope": 0.25, "lower_clip": None, "upper_clip": None},
    {"negative_slope": 0.0, "lower_clip": None, "upper_clip": 6.0},
    {"negative_slope": 0.25, "lower_clip": None, "upper_clip": 1.5},
    {"negative_slope": 0.0, "lower_clip": 0.5, "upper_clip": 2.0},
]
BETAS = [{"swish_beta": 1.0}, {"swish_beta": 1.75}, {"swish_beta": -0.5}]


def attrs_of(name):
    attrs = TABLE[name].attrs
    return CLIPS if "upper_clip" in attrs else BETAS if attrs else [{}]


CASES = [(name, attrs) for name in POINTWISE for attrs in attrs_of(name)]
IDS = [f"{name}-{'-'.join(map(str, attrs.values()))}" for name, attrs in CASES]
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-30,
    -1e-30,
    1e-42,
    3e38,
    -3e38,
    1e20,
    -1e20,
    88.0,
    -88.0,
    105.0,
    -105.0,
    17.0,
    -17.0,
    30.0,
    -31.0,
]
UNUSUAL = [np.nan, np.inf, -np.inf]


def floats(arity, seed=0, special=True):
    rng = np.random.default_rng(seed)
    columns = [np.concatenate([rng.standard_normal(300) * scale for scale in (0.01, 1.0, 6.0)]) for _ in range(arity)]
    if special:
        grid = np.array(list(itertools.product(SPECIAL + UNUSUAL, repeat=arity))).T
        columns = [np.concatenate([column, extra]) for column, extra in zip(columns, grid, strict=True)]
    return [column.astype(np.float32) for column in columns]


def integers(arity, seed=0, extreme=True):
    rng = np.random.default_rng(seed)
    columns = [rng.integers(-50, 50, 400) for _ in range(arity)]
    if extreme:
        edges = [-(2**31), -(2**31) + 1, -1, 0, 1, 2**31 - 1, 2**24 + 1]
        grid = np.array(list(itertools.product(edges, repeat=arity))).T
        columns = [np.concatenate([column, extra]) for column, extra in zip(columns, grid, strict=True)]
    return [column.astype(np.int32) for column in columns]


def reference(name, args, attrs):
    with np.errstate(all="ignore"):
        wide = [arg.astype(np.int64 if arg.dtype.kind in "iu" else np.float64) for arg in args]
        return TABLE[name].reference(*wide, **attrs)


def lowered(name, args, attrs, integer=False, wide=False):
    row = TABLE[name]
    result = row.lower(NumpyFacade(integer, wide=wide), *args, **attrs)
    assert (row.result == "mask") == (result.dtype == bool)
    return result


def test_table_has_the_ops_of_the_core_with_their_ports_and_attributes():
    ours = {name: (row.arity, set(row.attrs)) for name, row in TABLE.items() if name not in SOURCES}
    from cudnn_core._ops._pointwise import ROWS

    theirs = {row.name: (len(row.inputs), {attr.name for attr in row.attrs}) for row in ROWS}
    index = theirs.pop("gen_index")
    assert ours == theirs
    assert index[1] == set(TABLE["gen_index"].attrs)


@pytest.mark.parametrize(("name", "attrs"), CASES, ids=IDS)
def test_formula_in_fp32_agrees_with_the_definition(name, attrs):
    args = floats(TABLE[name].arity)
    got = lowered(name, args, attrs).astype(np.float64)
    with np.errstate(over="ignore"):
        want = (
            reference(name, args, attrs).astype(np.float32).astype(np.float64)
        )  # overflow to infinity, as fp32 has it
    unclear = np.zeros(got.shape, bool)
    if name in ("add_square", "pow", "mul", "swish_backward", "gelu_backward"):
        # A product of the definition overflows fp32 where the result would not, or the reverse.
        unclear = np.max(np.abs(np.nan_to_num(np.stack(args).astype(np.float64))), axis=0) > 1e18
    if name.endswith("_backward"):
        unclear |= np.isinf(args[0]) & (np.abs(args[1]) > 15)  # infinity times a factor that only fp64 tells from 0
    np.testing.assert_array_equal(np.isnan(got)[~unclear], np.isnan(want)[~unclear])
    with np.errstate(invalid="ignore"):
        close = (got == want) | (np.abs(got - want) <= 4e-6 * np.abs(want) + bound(name, args))
    wrong = ~(close | (np.isnan(got) & np.isnan(want)) | unclear)
    assert not wrong.any(), [(float(a[wrong][0]) if a.ndim else a) for a in (*args, got, want)]


def bound(name, args):
    """Absolute error from rounding inside the formula: its largest intermediate terms, in units of 2**-24."""
    with np.errstate(all="ignore"):
        sizes = [np.abs(np.nan_to_num(arg.astype(np.float64), posinf=0.0, neginf=0.0)) for arg in args]
    unit = 2.0**-23
    if name in ("gelu", "gelu_approx_tanh"):
        return unit * np.minimum(sizes[0], 10.0) + 1e-38
    if name.endswith("_backward"):
        return 4 * unit * sizes[0] + 1e-38  # loss times a factor of order 1
    if name in ("add", "sub", "add_square"):
        return unit * (sizes[0] + sizes[1] ** (2 if name == "add_square" else 1))
    return 2e-38 if name in ("sigmoid", "swish", "exp", "softplus") else 0.0


@pytest.mark.parametrize("name", ["softplus", "elu", "tanh_backward", "sigmoid", "sigmoid_backward"])
def test_small_results_keep_their_relative_precision(name):
    x = -np.geomspace(1e-6, 60.0, 200).astype(np.float32)
    args = [np.ones_like(x), x] if TABLE[name].arity == 2 else [x]
    np.testing.assert_allclose(lowered(name, args, {}), reference(name, args, {}), rtol=1e-6, atol=1.2e-38)


@pytest.mark.parametrize("name", sorted(n for n in POINTWISE if TABLE[n].integer))
def test_formula_in_int32_is_exact(name):
    row = TABLE[name]
    attrs = CLIPS[0] if name == "relu" else {}
    args = integers(row.arity)
    want = np.clip(reference(name, args, attrs).astype(np.int64), -(2**31), 2**31 - 1)
    np.testing.assert_array_equal(lowered(name, args, attrs, integer=True).astype(np.int64), want)


@pytest.mark.parametrize("name", sorted(GROWING))
def test_formula_of_integers_that_become_floats_is_exact_beyond_int32(name):
    args = integers(2)
    got = lowered(name, args, {}, integer=True, wide=True)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, reference(name, args, {}))


def test_sources():
    facade = NumpyFacade(integer=True, shape=(2, 3, 4))
    for axis in range(3):
        index = TABLE["gen_index"].lower(facade, axis=axis)
        np.testing.assert_array_equal(index, TABLE["gen_index"].reference((2, 3, 4), axis=axis))
        assert index[1, 2, 3] == (1, 2, 3)[axis]
    assert TABLE["constant"].lower(NumpyFacade(), value=0.1) == np.float32(0.1)
    assert TABLE["constant"].reference((2,), value=3).tolist() == [3, 3]


def through_graph(name, args, attrs, dtypes, out_dtype):
    """The op as a graph of one node, evaluated by torch_reference in fp64."""
    from torch_reference import evaluate

    graph = cudnn_core.Graph(io_data_type="float32", intermediate_data_type="float32", compute_data_type="float32")
    tensors = [graph.tensor((1, 1, arg.size), data_type=dtype) for arg, dtype in zip(args, dtypes, strict=True)]
    ports = [param.name for param in lookup_op(name).builders[name][0] if (param.to or "").startswith("in")]
    out = getattr(graph, name)(**dict(zip(ports, tensors, strict=True)), **attrs)
    out.set_output(True).set_data_type(out_dtype)
    frozen = graph.freeze()
    feeds = {t.uid: torch.from_numpy(arg.reshape(1, 1, -1).copy()) for t, arg in zip(tensors, args, strict=True)}
    return evaluate(frozen, feeds, round_outputs=False)[out.uid].numpy().reshape(-1)


@pytest.mark.parametrize(("name", "attrs"), [c for c in CASES if not c[0].startswith("logical_")])
def test_reference_agrees_with_torch_reference_on_floats(name, attrs):
    args = floats(TABLE[name].arity, seed=1)
    dtypes = ["float32"] * len(args)
    if name == "binary_select":
        args[2], dtypes[2] = (np.nan_to_num(args[2]) > 0.2).astype(np.int32), "int32"
    out_dtype = "boolean" if name in COMPARING else "float32"
    got = through_graph(name, args, attrs, dtypes, out_dtype).astype(np.float64)
    np.testing.assert_allclose(reference(name, args, attrs).astype(np.float64), got, rtol=1e-9, atol=1e-200)


@pytest.mark.parametrize("name", sorted(EXACT - SOURCES))
def test_reference_agrees_with_torch_reference_on_integers(name):
    """Whose results are exact though the graph declares float32."""
    attrs = CLIPS[0] if name == "relu" else {}
    args = integers(TABLE[name].arity, seed=1)
    out_dtype = "boolean" if name in COMPARING else "int32"
    got = through_graph(name, args, attrs, ["int32"] * len(args), out_dtype)
    np.testing.assert_array_equal(reference(name, args, attrs).astype(np.int64), got.astype(np.int64))


@pytest.mark.parametrize(("name", "attrs"), CASES, ids=IDS)
def test_zero_preserving_is_what_the_op_does_at_zero(name, attrs):
    row = TABLE[name]
    if row.arity > 1:
        assert not zero_preserving(name, attrs)  # 0 * infinity and 0 / 0 are NaN
        return
    zero = [np.zeros(1, np.float32)]
    keeps = bool(reference(name, zero, attrs)[0] == 0)
    assert zero_preserving(name, attrs) == keeps
    assert bool(lowered(name, zero, attrs)[0] == 0) == keeps


def test_an_unknown_op_is_not_zero_preserving():
    assert not zero_preserving("acme_norm", {})


ELEMENT = Ref("val", -1)
HALF = Op("constant", (), "float32", attrs=(("value", 0.5),))
INFINITE = Op("constant", (), "float32", attrs=(("value", math.inf),))


def chain(*names):
    return tuple(Op(name, (Ref("val", i - 1),), "float32") for i, name in enumerate(names))


@pytest.mark.parametrize(
    ("prologue", "keeps"),
    [
        ((), True),
        (chain("identity", "abs", "tanh"), True),
        (chain("identity", "exp"), False),
        (chain("exp", "log"), False),
        (chain("sigmoid", "abs"), False),
        ((HALF, Op("mul", (ELEMENT, Ref("val", 0)), "bfloat16")), True),
        ((HALF, Op("mul", (Ref("val", 0), ELEMENT), "bfloat16")), True),
        ((HALF, Op("add", (ELEMENT, Ref("val", 0)), "bfloat16")), False),
        ((INFINITE, Op("mul", (ELEMENT, Ref("val", 0)), "bfloat16")), False),
        ((Op("mul", (ELEMENT, Ref("aux", 0)), "bfloat16"),), False),  # the scalar may be infinite
        ((Op("sigmoid", (ELEMENT,), "float32"), Op("mul", (ELEMENT, Ref("val", 0)), "bfloat16")), False),
        ((Op("relu", (ELEMENT,), "float32"), Op("mul", (ELEMENT, Ref("val", 0)), "bfloat16")), True),
        ((HALF, Op("mul", (Ref("val", 0), Ref("val", 0)), "bfloat16")), False),
        ((Op("acme_norm", (ELEMENT,), "bfloat16"),), False),
    ],
)
def test_prologues_that_keep_the_zeros_past_the_end_of_k(prologue, keeps):
    assert keeps_zero(prologue) == keeps


def test_every_function_of_the_facade_is_needed_and_documented():
    import frost_gemm.formulas as formulas

    used = set()
    for name, attrs in CASES:
        row = TABLE[name]
        for integer in (False, True) if row.integer else (False,):
            facade = NumpyFacade(integer)
            row.lower(facade, *(integers if integer else floats)(row.arity), **attrs)
            used |= facade.used
    documented = formulas.__doc__.replace("(", " ").replace(",", " ").split()
    assert used - set(documented) == set()


def test_reduction_modes_are_those_of_the_core_but_norm2():
    (mode,) = [attr for attr in lookup_op("reduction").attrs if attr.name == "mode"]
    assert set(REDUCTIONS) == set(mode.choices) - {"NORM2"}

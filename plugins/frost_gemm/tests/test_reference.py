"""The numpy executor: its rounding, its orientation, and, over random graphs, agreement with torch_reference by way of ``lower``."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from frost_gemm.ir import Aux, Gemm, Matrix, Op, Program, Reduction, Ref, Store
from frost_gemm.lower import lower
from frost_gemm.ops import TABLE
from frost_gemm.reference import evaluate, execute, rounded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cudnn_core
from cudnn_core import lookup_op

torch = pytest.importorskip("torch")
torch_reference = pytest.importorskip("torch_reference")

NUMPY = {
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "float16": np.float16,
}
ACC, BF16 = Ref("acc", 0), Matrix("bfloat16")


def integers(shape, seed=0, low=-4, high=5):
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.float64)


# Rounding


@pytest.mark.parametrize("dtype", sorted(NUMPY))
def test_every_value_of_a_narrow_float_is_kept_and_midpoints_go_to_even(dtype):
    codes = np.arange(256, dtype=np.uint8) if dtype.startswith("fp8") else np.arange(65536, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        values = np.unique(codes.view(NUMPY[dtype]).astype(np.float64))
    values = values[np.isfinite(values)]
    np.testing.assert_array_equal(rounded(values, dtype), values)
    middles = (values[1:] + values[:-1]) / 2
    want = middles.astype(np.float32).astype(NUMPY[dtype]).astype(np.float64)  # exact in fp32
    np.testing.assert_array_equal(rounded(middles, dtype), want)
    for side in (-1e-9, 1e-9):
        nudged = middles * (1 + side)
        nearest = np.where((nudged > middles), values[1:], values[:-1])
        np.testing.assert_array_equal(rounded(nudged, dtype)[middles != 0], nearest[middles != 0])


def test_one_rounding_from_fp64_not_two():
    value = np.array([1 + 2.0**-8 + 2.0**-40])  # fp32 rounds the last part away; what is left is a midpoint of bf16
    assert rounded(value, "bfloat16") == 1 + 2.0**-7


def test_one_rounding_from_int64_not_two():
    """fp64 would round to the midpoint of two neighbours, and then to the even one."""
    for sign in (-1, 1):
        for dtype, unit in (("float32", 2**38), ("bfloat16", 2**54)):
            value = sign * (2**61 + unit // 2 + 1)
            assert rounded(np.array([value, value - sign]), dtype).tolist() == [sign * (2**61 + unit), sign * 2**61]
    assert rounded(np.array([2**62, -(2**62), 2**53 - 1, 0]), "float32").tolist() == [2.0**62, -(2.0**62), 2.0**53, 0.0]


@pytest.mark.parametrize(
    ("dtype", "largest", "beyond"),
    [
        ("float16", 65504, np.inf),
        ("bfloat16", 3.3895313892515355e38, np.inf),
        ("fp8_e4m3", 448, 448),
        ("fp8_e5m2", 57344, 57344),
        ("int8", 127, 127),
        ("uint8", 255, 255),
        ("int32", 2**31 - 1, 2**31 - 1),
    ],
)
def test_overflow_and_special_values(dtype, largest, beyond):
    got = rounded(np.array([largest, 1e300, np.inf]), dtype)
    assert got.tolist() == [largest, beyond, beyond]
    nan = rounded(np.array([np.nan]), dtype)[0]
    assert nan == 0 if "int" in dtype else np.isnan(nan)
    negative = rounded(np.array([-np.inf]), dtype)[0]
    assert negative == (0 if dtype == "uint8" else -beyond - 1 if "int" in dtype else -beyond)


def test_rounding_is_that_of_torch_reference():
    from torch_reference._rounding import round_value

    rng = np.random.default_rng(0)
    values = np.concatenate([rng.standard_normal(500) * 10.0**power for power in range(-45, 40, 5)])
    values = np.concatenate([values, [0.0, -0.0, np.inf, -np.inf, np.nan, 0.5, 1.5, -2.5, 2.0**31]])
    for dtype in ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int32", "int8", "uint8", "boolean"):
        want = round_value(torch.from_numpy(values), dtype).to(torch.float64).numpy()
        np.testing.assert_array_equal(rounded(values, dtype).astype(np.float64), want)


# Programs


def test_a_product_and_an_epilogue_by_hand():
    a, b = integers((2, 3, 4)), integers((1, 5, 4), seed=1)
    row, col = integers((1, 3, 1), seed=2), integers((1, 1, 5), seed=3)
    program = Program(
        (BF16,),
        (Matrix("bfloat16", batched=False),),
        (Gemm(),),
        (Store(Ref("val", 1), "int8"), Store(ACC, "float32")),
        (Reduction(Ref("val", 1), "AVG", "ln"), Reduction(ACC, "AMAX", "lmn")),
        (Aux("float32", "row"), Aux("float32", "col")),
        (Op("add", (ACC, Ref("aux", 0)), "float32"), Op("mul", (Ref("val", 0), Ref("aux", 1)), "int8")),
    )
    (narrow, wide), (mean, largest) = execute(program, [a], [b], [row, col])
    c = np.einsum("lmk,nk->lmn", a, b[0])
    np.testing.assert_array_equal(wide, c)
    want = np.clip((c + row) * col, -128, 127)
    np.testing.assert_array_equal(narrow, want)
    np.testing.assert_array_equal(mean, rounded(want.mean((0, 2), keepdims=True), "float32"))
    assert largest.shape == (1, 1, 1)
    assert largest[0, 0, 0] == np.abs(c).max()


def test_the_accumulator_rounds_to_the_type_of_the_matmul_before_the_epilogue():
    a, b = np.array([[[256.0, 1.0]]]), np.array([[[1.0, 1.0]]])
    for dtype, want in (("float32", 1.0), ("bfloat16", 0.0)):
        ops = (Op("constant", (), "float32", attrs=(("value", 256.0),)), Op("sub", (ACC, Ref("val", 0)), "float32"))
        program = Program((BF16,), (BF16,), (Gemm(dtype=dtype),), (Store(Ref("val", 1), "float32"),), ops=ops)
        assert execute(program, [a], [b]).stores[0] == want


def test_int8_products_are_exact_where_fp32_is_not():
    k = 5001
    a, b = np.full((1, 1, k), 127, np.int64), np.full((1, 1, k), 127, np.int64)
    program = Program(
        (Matrix("int8"),), (Matrix("int8"),), (Gemm(dtype="int32"),), (Store(ACC, "int32"),), accumulate="int32"
    )
    exact = 127 * 127 * k
    assert int(np.float32(exact)) != exact
    assert execute(program, [a], [b]).stores[0] == exact


INT8 = ((Matrix("int8"),), (Matrix("int8"),))


@pytest.mark.parametrize(("dtype", "want"), [("int32", -(2**31)), ("int8", -128), ("float32", -(2.0**31))])
def test_int8_products_are_summed_modulo_two_to_the_32_before_they_are_rounded(dtype, want):
    """As the matrix unit does without ``.satfinite`` (PTX ISA, mma)."""
    a = np.full((1, 1, 2**17), -128, np.int64)
    program = Program(*INT8, (Gemm(dtype=dtype),), (Store(ACC, dtype),), accumulate="int32")
    assert execute(program, [a], [a]).stores[0] == want


@pytest.mark.parametrize(
    ("mode", "values", "want"),
    [
        ("ADD", (2**31 - 1, 2), -(2**31) + 1),
        ("NORM1", (-(2**31), 0), 2**31 - 1),  # the size of one element saturates
        ("NORM1", (-(2**31), 1), -(2**31)),
        ("MUL", (2**16 + 1, 2**16), 2**16),
        ("MUL_NO_ZEROS", (2**31 - 1, 2), -2),
        ("AMAX", (-(2**31), 2), 2**31 - 1),
    ],
)
def test_sums_and_products_of_int32_are_modulo_two_to_the_32(mode, values, want):
    reduction = (Reduction(Ref("val", 0), mode, "n", "int32"),)
    ops = (Op("max", (Ref("aux", 0), Ref("aux", 0)), "int32", "int32"),)
    program = Program(*INT8, (Gemm(dtype="int32"),), (), reduction, (Aux("int32", "full"),), ops, accumulate="int32")
    zero = [np.zeros((1, rows, 1), np.int64) for rows in (1, 2)]
    assert execute(program, zero[:1], zero[1:], [np.array([[values]])]).reductions[0] == want


def test_a_prologue_is_rounded_to_what_the_matrix_unit_multiplies():
    element = Ref("val", -1)
    matrix = Matrix("int8", mma_dtype="bfloat16", prologue=(Op("mul", (element, Ref("aux", 0)), "bfloat16"),))
    program = Program((matrix,), (BF16,), (Gemm(),), (Store(ACC, "float32"),), aux=(Aux("float32", "scalar"),))
    a, b, scale = np.array([[[127]]]), np.array([[[1.0]]]), np.array([[[1.01]]])
    got = execute(program, [a], [b], [scale]).stores[0]
    assert got == rounded(np.array(127 * 1.01), "bfloat16")
    assert got != 127 * 1.01


def test_nan_reaches_the_outputs_that_depend_on_it_and_no_others():
    a, b = integers((1, 4, 8)), integers((1, 6, 8), seed=1)
    a[0, 2, 3] = np.nan
    program = Program(
        (BF16,), (BF16,), (Gemm(),), (Store(Ref("val", 0), "bfloat16"),), (Reduction(Ref("val", 0), "MAX", "n"),),
        ops=(Op("relu", (ACC,), "bfloat16", attrs=(("lower_clip", None), ("negative_slope", 0.0), ("upper_clip", 6.0))),),
    )  # fmt: skip
    (store,), (largest,) = execute(program, [a], [b])
    np.testing.assert_array_equal(np.isnan(store), np.broadcast_to((np.arange(4) == 2)[None, :, None], store.shape))
    np.testing.assert_array_equal(np.isnan(largest[0, :, 0]), np.arange(4) == 2)


# Random graphs, against torch_reference

FLOAT_OPS = sorted(n for n, row in TABLE.items() if row.arity and not n.startswith("logical_") and n != "binary_select")
VIRTUAL = ("float32", "bfloat16", "float16")
STORED = ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8", "int32", "boolean")
MODES = ("ADD", "MIN", "MAX", "AMAX", "AVG", "NORM1", "MUL", "MUL_NO_ZEROS")


class Draw:
    """One random graph and the data for it."""

    def __init__(self, data):
        self.draw = data.draw
        self.feeds = {}
        self.rng = np.random.default_rng(self.draw(st.integers(0, 2**16), "seed"))
        self.integer = self.draw(st.booleans(), "integer") and self.draw(st.booleans(), "integer again")
        self.io = (
            "int8" if self.integer else self.draw(st.sampled_from(["bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"]))
        )
        virtual = "int32" if self.integer else "float32"
        self.graph = cudnn_core.Graph(
            io_data_type=self.io,
            intermediate_data_type=virtual,
            compute_data_type="int32" if self.integer else "float32",
        )
        self.batch = self.draw(st.sampled_from([(), (1,), (3,), (2, 3)]), "batch")
        self.m, self.n, self.k = (self.draw(st.sampled_from([1, 2, 5, 16]), name) for name in "mnk")
        self.masks, self.values, self.aux, self.outputs = [], [], [], []

    def build(self):
        shared = self.matrix(self.batch, "a")
        for _ in range(self.draw(st.integers(1, 2), "products")):
            c = self.graph.matmul(shared, self.matrix(self.draw(st.sampled_from([self.batch, ()])), "b"))
            self.values.append(c.set_data_type(self.declared()))
        for _ in range(self.draw(st.integers(0, 6), "ops")):
            self.op()
        for value in self.values + self.masks:
            if value not in self.used or self.draw(st.integers(0, 3), "tap") == 0:
                self.store(value)
        for value in [v for v in self.values if self.draw(st.integers(0, 3), "reduce") == 0][:2]:
            self.reduce(value)
        return self.graph

    used: set = frozenset()

    def declared(self):
        if self.integer:
            return self.draw(st.sampled_from(["int32", "float32"]), "declared")
        return self.draw(st.sampled_from(VIRTUAL), "declared")

    def matrix(self, batch, side):
        """An operand in either major, with aligned rows; maybe behind a prologue."""
        rows, cols = (self.m, self.k) if side == "a" else (self.k, self.n)
        narrow = not self.integer and not self.io.startswith("fp8") and self.draw(st.booleans(), "prologue")
        stored = self.draw(st.sampled_from(["int8", "fp8_e4m3", self.io]), "stored") if narrow else self.io
        swap = self.draw(st.booleans(), "major")
        pitch = 16 * (-(-max(rows, cols) // 16))
        inner = (1, pitch) if swap else (pitch, 1)
        strides = [*inner]
        running = pitch * (cols if swap else rows)
        for size in reversed(batch):
            strides.insert(0, running)
            running *= size
        x = self.tensor((*batch, rows, cols), stored, strides)
        if not narrow:
            return x
        steps = self.draw(st.integers(0, 2), "prologue ops")
        for _ in range(steps):
            name = self.draw(st.sampled_from(["relu", "abs", "neg", "sigmoid", "mul", "add"]), "prologue op")
            scalar = [self.scalar()] if name == "mul" else [0.3] if name == "add" else []
            slope = {"negative_slope": 0.5} if name == "relu" else {}
            x = getattr(self.graph, name)(x, *scalar, **slope, compute_data_type="float32").set_data_type("float32")
        return self.graph.identity(x, compute_data_type="float32").set_data_type(self.io)

    def tensor(self, dim, dtype, strides=None, value=None):
        t = self.graph.tensor(dim, strides, data_type=dtype)
        # No zeros: torch's product of one term keeps the sign of a zero, a sum that starts from 0 does not.
        wide = self.rng.choice([-4, -3, -2, -1, 1, 2, 3, 4], dim) / (1 if dtype in ("int8", "int32") else 2)
        if dtype == "boolean":
            wide = (wide > 0).astype(np.float64)
        self.feeds[t] = wide if value is None else np.full(dim, value)
        return t

    def scalar(self):
        kind = self.draw(st.sampled_from(["memory", "value", "constant"]), "scalar")
        if kind == "constant":
            return 0.75 if not self.integer else 3
        shape = (1,) * (len(self.batch) + 2)
        t = self.tensor(shape, "int32" if self.integer else "float32")
        return t.set_is_pass_by_value(True) if kind == "value" else t

    def operand(self):
        if self.aux and self.draw(st.booleans(), "reuse"):
            return self.draw(st.sampled_from(self.aux), "aux")
        shape = [size if self.draw(st.booleans(), "span") else 1 for size in (self.m, self.n)]
        batch = self.batch if self.draw(st.booleans(), "batched") else (1,) * len(self.batch)
        t = self.tensor(
            (*batch, *shape), "int32" if self.integer else self.draw(st.sampled_from(["bfloat16", "float32"]))
        )
        self.aux.append(t)
        return t

    def op(self):
        choices = ["plain"] * 6 + ["index"] + ["select", "logical"] * bool(self.masks)
        kind = self.draw(st.sampled_from(choices), "kind")
        first = self.draw(st.sampled_from(self.values), "first")
        out = self.declared()
        attrs = {}
        if kind == "plain":
            name = self.draw(st.sampled_from(FLOAT_OPS), "op")
            args = [first]
            if TABLE[name].arity == 2:
                source = self.draw(st.sampled_from(["value", "operand", "scalar"]), "second")
                other = {
                    "value": lambda: self.draw(st.sampled_from(self.values)),
                    "operand": self.operand,
                    "scalar": self.scalar,
                }
                args.append(other[source]())
                if self.draw(st.booleans(), "swap"):
                    args.reverse()
            if "upper_clip" in TABLE[name].attrs:
                attrs = self.draw(st.sampled_from([{}, {"upper_clip": 2.0}, {"negative_slope": 0.5}]), "clips")
            if "swish_beta" in TABLE[name].attrs:
                attrs = {"swish_beta": self.draw(st.sampled_from([1.0, 0.5]), "beta")}
        elif kind == "index":
            axis = len(self.batch) + self.draw(st.integers(0, 1), "axis")
            index = self.graph.gen_index(first, axis=axis)
            self.use(first)
            name, args = "add", [first, index]
        elif kind == "select":
            name, args = (
                "binary_select",
                [first, self.draw(st.sampled_from(self.values)), self.draw(st.sampled_from(self.masks))],
            )
        else:
            name = self.draw(st.sampled_from(["logical_and", "logical_or", "logical_not"]), "logical")
            args = [self.draw(st.sampled_from(self.masks)) for _ in range(TABLE[name].arity)]
        ports = [param.name for param in lookup_op(name).builders[name][0] if (param.to or "").startswith("in")]
        result = getattr(self.graph, name)(
            **dict(zip(ports, args, strict=True)),
            **attrs,
            compute_data_type=self.compute(name, args) if not attrs else "float32",
        )
        for arg in args:
            self.use(arg)
        if TABLE[name].result == "mask":
            self.masks.append(result.set_data_type("boolean"))
        else:
            self.values.append(result.set_data_type(out))

    def compute(self, name, args):
        """float32, or where integers allow it int32."""
        if not TABLE[name].integer or any(not hasattr(arg, "get_data_type") for arg in args):
            return "float32"
        whole = all(arg.get_data_type() in ("int32", "int8", "uint8", "boolean") for arg in args)
        return "int32" if whole and self.draw(st.booleans(), "exact") else "float32"

    def use(self, tensor):
        self.used = {*self.used, tensor}

    def store(self, value):
        value.set_output(True)
        if self.draw(st.booleans(), "transposed"):
            dim = (*self.batch, self.m, self.n)
            strides = [1] * len(dim)
            running = 1
            for axis in (len(dim) - 2, len(dim) - 1, *reversed(range(len(dim) - 2))):
                strides[axis] = running
                running *= dim[axis]
            value.set_stride(strides)
        if value not in self.masks and value.get_data_type() == "float32" and self.draw(st.booleans(), "convert"):
            value.set_data_type(self.draw(st.sampled_from(STORED), "stored type"))
        self.outputs.append(value)

    def reduce(self, value):
        if value.get_data_type() not in (*VIRTUAL, "int32"):
            return
        keep = self.draw(st.sampled_from([(0, 0), (1, 0), (0, 1)]), "keep")
        batch = self.batch if self.draw(st.booleans(), "keep batch") else (1,) * len(self.batch)
        dim = (*batch, *(size if kept else 1 for size, kept in zip((self.m, self.n), keep, strict=True)))
        r = self.graph.reduction(
            value, mode=self.draw(st.sampled_from(MODES), "mode"), out_dims=dim, compute_data_type="float32"
        )
        self.outputs.append(r.set_output(True).set_data_type("float32"))


def agrees(draw, swap=False):
    graph = draw.build()
    frozen = graph.freeze()
    found = lower(frozen)
    assert not found.declines, [str(decline) for decline in found.declines]
    by_uid = {tensor.uid: value for tensor, value in draw.feeds.items()}
    want = torch_reference.evaluate(frozen, {uid: torch.from_numpy(value) for uid, value in by_uid.items()})
    operands = []
    for operand in frozen.operands:
        value = by_uid.get(operand.uid, np.empty(operand.dim))
        integer = operand.dtype in ("int8", "int32", "boolean")
        operands.append(value.astype(np.int64) if integer and operand.role == "input" else value)
    program, binding = found.program, found.binding
    got = evaluate(program, binding, operands)
    assert {frozen.operands[slot].uid for slot in got} == set(want)
    for slot, value in got.items():
        expected = want[frozen.operands[slot].uid].to(torch.float64).numpy()
        np.testing.assert_allclose(
            value.astype(np.float64), expected, rtol=1e-6, atol=1e-12, err_msg=frozen.operands[slot].name
        )
    if swap:
        turned = evaluate(program.swapped(), binding.swapped(), operands)
        assert turned.keys() == got.keys()
        for slot, value in got.items():
            np.testing.assert_allclose(turned[slot].astype(np.float64), value.astype(np.float64), rtol=1e-6, atol=1e-12)
    return found


SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


@settings(max_examples=100, **SETTINGS)
@given(st.data())
def test_random_graphs_agree_with_torch_reference_and_with_their_transposes(data):
    agrees(Draw(data), swap=True)


@pytest.mark.L2
@settings(max_examples=2000, **SETTINGS)
@given(st.data())
def test_many_random_graphs_agree_with_torch_reference(data):
    agrees(Draw(data), swap=True)


def test_stride_0_batch_and_vector_operands_read_their_first_element():
    graph = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    a, b = graph.tensor((2, 3, 8)), graph.tensor((2, 8, 16), (0, 16, 1))
    bias = graph.tensor((2, 3, 16), (0, 0, 1))
    graph.add(graph.matmul(a, b), bias).set_output(True).set_data_type("float32")
    frozen = graph.freeze()
    found = lower(frozen)
    values = {a.uid: integers((2, 3, 8)), b.uid: np.repeat(integers((1, 8, 16), 1), 2, 0)}
    values[bias.uid] = np.broadcast_to(integers((1, 1, 16), 2), (2, 3, 16))
    operands = [values.get(operand.uid, np.empty(operand.dim)) for operand in frozen.operands]
    (got,) = evaluate(found.program, found.binding, operands).values()
    np.testing.assert_array_equal(got, values[a.uid] @ values[b.uid] + values[bias.uid])


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 6), (4, 1), (4, 6)])
def test_a_swapped_program_is_the_transposed_problem(rows, cols):
    a, b = integers((2, rows, 8)), integers((2, cols, 8), seed=1)
    aux = [integers((1, rows, 1), 2), integers((2, 1, cols), 3), integers((2, rows, cols), 4)]
    refs = [Ref("aux", i) for i in range(3)]
    ops = (
        Op("add", (ACC, refs[0]), "float32"),
        Op("mul", (Ref("val", 0), refs[1]), "float32"),
        Op("gen_index", (), "int32", "int32", (("axis", 1),)),
        Op("add", (Ref("val", 1), Ref("val", 2)), "float32"),
        Op("sub", (Ref("val", 3), refs[2]), "bfloat16"),
    )
    kinds = (Aux("float32", "row"), Aux("float32", "col", True), Aux("float32", "full", True, "n"))
    value = Ref("val", 4)
    reductions = (Reduction(value, "ADD", "m"), Reduction(value, "MAX", "ln"))
    program = Program((BF16,), (BF16,), (Gemm(),), (Store(value, "bfloat16"),), reductions, kinds, ops)
    straight = execute(program, [a], [b], aux)
    turned = execute(program.swapped(), [b], [a], [np.swapaxes(x, 1, 2) for x in aux])
    for got, want in zip((*turned.stores, *turned.reductions), (*straight.stores, *straight.reductions), strict=True):
        np.testing.assert_array_equal(np.swapaxes(got, 1, 2), want)

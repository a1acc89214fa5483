"""The epilogue on chunks as both tensor cores leave them, compiled and executed in the emulator, against numpy and the core's rounding."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import torch
from _epilogue import Drain, compiled, launch, strided
from frost_gemm.ir import Aux, Gemm, Matrix, Op, Program, Ref, Store
from frost_gemm.kernels.epilogue import Epilogue
from frost_gemm.ops import TABLE
from frost_gemm.reference import execute
from torch_reference import _rounding

PATTERNS = pytest.mark.parametrize("pattern", ["wgmma", "tcgen05"])
SPECIAL = [
    0.0,
    -0.0,
    np.nan,
    np.inf,
    -np.inf,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    127.5,
    -128.5,
    255.5,
    3e-8,
    448.0,
    464.0,
]
SPECIAL += [465.0, 480.0, 57344.0, 61440.0, 61441.0, 65504.0, 65520.0, 1e30, -1e30, 3e9, -3e9, 2.0**-9, 2.0**-10, 1e-40]
ONE = (Gemm(),)
UNUSED_B = (np.zeros(4, np.float32), (1, 1, 0))


def acc(i=0):
    return Ref("acc", i)


def val(i):
    return Ref("val", i)


def aux(i):
    return Ref("aux", i)


def program(ops=(), stores=(), aux=(), gemms=ONE, accumulate="float32", **more):
    a = tuple(Matrix(accumulate, "k", alignment=4) for _ in gemms)
    gemms = tuple(Gemm(i, 0, gemm.dtype) for i, gemm in enumerate(gemms))
    return Program(
        a, (Matrix(accumulate),), gemms, tuple(stores), aux=tuple(aux), ops=tuple(ops), accumulate=accumulate, **more
    )


def rounded(value, dtype):
    """``value`` (an array of fp64 or int64) rounded to ``dtype`` by the reference plugin, in fp64 or int64."""
    result = _rounding.round_value(torch.from_numpy(np.array(value)), dtype)
    return result.to(torch.int64 if not result.dtype.is_floating_point else torch.float64).numpy()


def stored(value, dtype):
    """The bytes of rounded values in memory."""
    return _rounding.encode(torch.from_numpy(np.array(value)), dtype).contiguous()


def same(got, want, dtype):
    """Equal in every bit but those of NaNs. ``got`` are bits as ``out`` makes them, ``want`` are values."""
    want = stored(want, dtype)
    got = torch.from_numpy(np.ascontiguousarray(got)).view(want.dtype)
    values = [_rounding.decode(x, dtype).to(torch.float64) for x in (got, want)]
    nan = [value.isnan() for value in values]
    equal = got.view(torch.uint8).reshape(*got.shape, -1) == want.view(torch.uint8).reshape(*want.shape, -1)
    np.testing.assert_array_equal(nan[0].numpy(), nan[1].numpy())
    assert bool((equal.all(-1) | nan[0]).all()), (dtype, values[0][~equal.all(-1)][:8], values[1][~equal.all(-1)][:8])


def out(shape, dtype):
    width = {"float32": np.int32, "int32": np.int32, "bfloat16": np.int16, "float16": np.int16}
    return np.full(shape, -3, width.get(dtype, np.int8))


def run(pattern, made, accs, aux=(), width=16, **overrides):
    """Run a program on accumulators [L, M, N]; aux are (array, strides) or bytes. The stores' bits, [L, M, N] each."""
    batch, rows, cols = accs[0].shape
    stores = [out((batch, rows, cols) if s.major != "m" else (batch, cols, rows), s.dtype) for s in made.stores]
    operands = {f"a{i}": strided(a) for i, a in enumerate(accs)} | {"b0": UNUSED_B}
    operands |= {f"aux{i}": operand for i, operand in enumerate(aux)}
    for i, (store, array) in enumerate(zip(made.stores, stores, strict=True)):
        strides = (1, rows, rows * cols) if store.major == "m" else (cols, 1, rows * cols)
        operands[f"store{i}"] = (array, strides)
    launch(compiled(made, pattern, width), made, (rows, cols, cols, batch), operands | overrides)
    return [a.transpose(0, 2, 1) if s.major == "m" else a for s, a in zip(made.stores, stores, strict=True)]


def numbers(shape, seed=0, scale=4.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


# --- ops
UNARY = [name for name, row in TABLE.items() if row.arity == 1]
BINARY = [name for name, row in TABLE.items() if row.arity == 2]
ATTRS = {
    "relu": {"negative_slope": 0.25, "lower_clip": None, "upper_clip": 3.0},
    "relu_backward": {"negative_slope": 0.25, "lower_clip": None, "upper_clip": 3.0},
    "swish": {"swish_beta": 1.5},
    "swish_backward": {"swish_beta": 1.5},
}
SUMS = (
    "elu_backward",
    "gelu_backward",
    "gelu_approx_tanh_backward",
    "swish_backward",
    "add",
    "sub",
    "add_square",
    "gelu_approx_tanh",
)


def tolerance(name, args):
    """(relative, absolute) error: results of sums have the rounding of their terms."""
    largest = np.max([np.abs(np.where(np.isfinite(arg), arg, 0)) for arg in args], axis=0)
    if name in ("sin", "cos", "tan"):
        return 1e-6, 2e-7
    if name == "gelu":
        return 2e-6, 1e-13
    if name in ("sigmoid", "swish"):
        return 6e-6, 1e-37  # grows with -x
    return (4e-6 if name == "pow" else 1e-6), (4e-7 * np.maximum(1, largest) ** 2 if name in SUMS else 1e-37)


@PATTERNS
@pytest.mark.parametrize("part", ["unary", "binary"])
def test_every_op_of_the_table_agrees_with_its_definition(pattern, part):
    names = UNARY if part == "unary" else [*BINARY, "binary_select"]
    ops = []
    for name in names:
        row = TABLE[name]
        args = (acc(0), acc(1), acc(0))[: row.arity]
        ops.append(
            Op(
                name,
                args,
                "float32" if row.result == "value" else "boolean",
                "float32",
                tuple(sorted(ATTRS.get(name, {}).items())),
            )
        )
    stores = [Store(val(i), op.dtype, "n", 4 if op.dtype == "float32" else 1) for i, op in enumerate(ops)]
    x, y = numbers((1, 40, 9), 1), numbers((1, 40, 9), 2, 2.0)
    x.flat[: len(SPECIAL)] = SPECIAL
    y.flat[: 2 * len(SPECIAL) : 2] = SPECIAL
    results = run(pattern, program(ops, stores, gemms=(Gemm(), Gemm())), [x, y], width=8 if pattern == "wgmma" else 4)
    for op, got in zip(ops, results, strict=True):
        args = [x.astype(np.float64), y.astype(np.float64), x.astype(np.float64)][: len(op.args)]
        with np.errstate(all="ignore"):
            want = TABLE[op.name].reference(*args, **dict(op.attrs))
        if op.dtype == "boolean":
            np.testing.assert_array_equal(got, np.asarray(want, np.int8), op.name)
            continue
        agree(op.name, got.view(np.float32), want, args)


def agree(name, got, want, args):
    with np.errstate(all="ignore"):
        want = want.astype(np.float32).astype(np.float64)
        relative, absolute = tolerance(name, args)
        # fp32's range ends inside of what fp64 computes, and of intermediate results of a formula.
        unclear = np.max(np.abs(np.stack(args)), axis=0) > (1e12 if name in (*SUMS, "pow", "mul") else np.inf)
        unclear |= (np.abs(want) < 2.0**-126) & (np.abs(got) < 2.0**-125)
        if name.endswith("_backward"):
            # Infinity, or much, times a factor that only fp64 tells from 0.
            unclear |= (np.abs(args[0]) > 1e12) & (np.abs(args[1]) > 20)
        wrong = ~(
            (got == want)
            | (np.abs(got - want) <= relative * np.abs(want) + absolute)
            | (np.isnan(got) & np.isnan(want))
            | unclear
        )
    assert not wrong.any(), (name, [arg[wrong][:4] for arg in args], got[wrong][:4], want[wrong][:4])


@PATTERNS
def test_int32_ops_are_exact(pattern):
    names = [n for n, row in TABLE.items() if row.integer and row.arity in (1, 2)]
    plain = {"relu": tuple((name, None) for name in ("lower_clip", "negative_slope", "upper_clip"))}
    ops = [Op(n, (acc(0), acc(1))[: TABLE[n].arity], "int32", "int32", plain.get(n, ())) for n in names]
    ops.append(Op("binary_select", (acc(0), acc(1), acc(1)), "int32", "int32"))
    stores = [Store(val(i), "int32", "n", 4) for i in range(len(ops))]
    rng = np.random.default_rng(3)
    x, y = rng.integers(-40000, 40000, (2, 1, 16, 12)).astype(np.int32)
    y.flat[:8] = 0, 1, -1, 2**31 - 1, -(2**31), 0, -1, 7
    x.flat[:8] = 5, -(2**31), -(2**31), 2, 3, -(2**31), 2**31 - 1, -7
    gemms = (Gemm(dtype="int32"), Gemm(dtype="int32"))
    results = run(pattern, program(ops, stores, gemms=gemms, accumulate="int32"), [x, y], width=8)
    for op, got in zip(ops, results, strict=True):
        args = [x.astype(np.int64), y.astype(np.int64), y.astype(np.int64)][: len(op.args)]
        wide = np.asarray(TABLE[op.name].reference(*args, **dict(op.attrs))).astype(np.int64)
        wraps = op.name in ("add", "sub", "mul", "add_square")  # a result beyond int32 has no defined value there
        inside = (np.abs(wide) < 2**31) | (not wraps)
        np.testing.assert_array_equal(got[inside], np.clip(wide, -(2**31), 2**31 - 1)[inside], op.name)


@PATTERNS
def test_generated_positions_and_constants(pattern):
    ops = [Op("gen_index", (), "int32", "int32", (("axis", axis),)) for axis in range(3)]
    ops += [Op("constant", (), "bfloat16", "float32", (("value", 0.1),)), Op("add", (val(1), val(3)), "float32")]
    made = program(ops, [Store(val(i), op.dtype, "n", 2) for i, op in enumerate(ops)])
    shape = (2, 70, 20)
    results = run(pattern, made, [numbers(shape)])
    for axis in range(3):
        np.testing.assert_array_equal(results[axis], np.broadcast_to(np.indices(shape)[axis], shape))
    tenth = rounded(np.float64(0.1), "bfloat16")
    same(results[3], np.full(shape, tenth), "bfloat16")
    same(results[4], (np.indices(shape)[1] + tenth).astype(np.float32), "float32")


# --- data types
FLOATS = ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")
DTYPES = (*FLOATS, "int32", "int8", "uint8", "boolean")


@PATTERNS
def test_stores_round_as_the_core_does_in_every_type_and_major(pattern):
    """Vectors in rows, vectors in columns, neither; aligned or not."""
    layouts = [("n", 16), ("m", 16), ("", 0), ("n", 0)]
    stores = [Store(acc(), dtype, *layouts[(i + j) % 4]) for i, dtype in enumerate(DTYPES) for j in range(2)]
    x = numbers((2, 80, 48), 5, 100.0)
    x.flat[: len(SPECIAL)] = SPECIAL
    for store, got in zip(stores, run(pattern, program(stores=stores), [x]), strict=True):
        same(got, rounded(x.astype(np.float64), store.dtype), store.dtype)


@PATTERNS
def test_ragged_outputs_are_written_up_to_their_edges_alone(pattern):
    """The emulator reports what lies outside of an array; what lies between rows keeps its contents."""
    stores = [Store(acc(), dtype, major, 16) for dtype in ("bfloat16", "fp8_e4m3") for major in "nm"]
    made = program(stores=stores)
    x = numbers((2, 77, 37), 6)
    pitch = 96
    arrays, operands = [], {}
    for i, store in enumerate(stores):
        lines = 77 if store.major == "n" else 37
        arrays.append(out((2, lines, pitch), store.dtype))
        stride = (pitch, 1) if store.major == "n" else (1, pitch)
        operands[f"store{i}"] = (arrays[-1], (*stride, lines * pitch))
    run(pattern, made, [x], **operands)
    for store, array in zip(stores, arrays, strict=True):
        used = 37 if store.major == "n" else 77
        assert (array[..., used:] == -3).all()
        got = np.ascontiguousarray(array[..., :used] if store.major == "n" else array[..., :used].transpose(0, 2, 1))
        same(got, rounded(x.astype(np.float64), store.dtype), store.dtype)


@PATTERNS
def test_every_value_is_rounded_to_its_declared_type(pattern):
    """The accumulator to the matmul's type, virtual tensors to theirs; a chain shows each of them."""
    chain = ("bfloat16", "float16", "fp8_e5m2", "fp8_e4m3", "int8")
    ops = [Op("mul", (acc(), acc()), chain[0])]
    for i, dtype in enumerate(chain[1:]):
        ops.append(Op("mul", (val(i), acc(1)), dtype))
    ops.append(Op("relu", (val(2),), "fp8_e5m2"))
    ops.append(Op("max", (val(0), acc(1)), "float16"))
    stores = [Store(val(i), "float32") for i in range(len(ops))]
    x, y = numbers((1, 64, 32), 7), numbers((1, 64, 32), 8)
    results = run(pattern, program(ops, stores, gemms=(Gemm(dtype="float16"), Gemm(dtype="bfloat16"))), [x, y])
    a, b = rounded(x.astype(np.float64), "float16"), rounded(y.astype(np.float64), "bfloat16")
    values = [rounded((a * a).astype(np.float32).astype(np.float64), chain[0])]
    for dtype in chain[1:]:
        product = values[-1].astype(np.float64) * b
        values.append(rounded(product.astype(np.float32).astype(np.float64), dtype))
    values.append(np.maximum(values[2], 0))
    values.append(rounded(np.maximum(values[0].astype(np.float64), b), "float16"))
    for got, want in zip(results, values, strict=True):
        np.testing.assert_array_equal(got.view(np.float32), want)


@PATTERNS
def test_int32_accumulators_reach_every_type(pattern):
    """Including int32 -> fp32 -> fp8, which the compiler folds into a conversion that does not exist."""
    ops = [
        Op("identity", (acc(),), "float32"),
        Op("identity", (acc(),), "int8", "int32"),
        Op("identity", (val(1),), "fp8_e4m3"),
    ]
    stores = [Store(acc(), dtype, "n", 4) for dtype in DTYPES] + [Store(val(i), "fp8_e4m3", "n", 4) for i in range(3)]
    x = np.random.default_rng(9).integers(-300, 300, (1, 64, 32)).astype(np.int32)
    made = program(ops, stores, gemms=(Gemm(dtype="int32"),), accumulate="int32")
    results = run(pattern, made, [x])
    for store, got in zip(stores[: len(DTYPES)], results, strict=False):
        same(got, rounded(x.astype(np.int64), store.dtype), store.dtype)
    small = np.clip(x.astype(np.float64), -128, 127)
    for got, want in zip(results[len(DTYPES) :], (x.astype(np.float64), small, small), strict=True):
        same(got, rounded(want, "fp8_e4m3"), "fp8_e4m3")


# --- aux operands
@PATTERNS
def test_aux_operands_of_every_kind_are_read_within_their_bounds(pattern):
    """Their arrays end where the last element does: a read beyond is a finding of the emulator."""
    batch, rows, cols = shape = (2, 75, 43)
    rng = np.random.default_rng(10)
    kinds = []
    for dtype in ("bfloat16", "float32"):
        width = 2 if dtype == "bfloat16" else 4
        kinds += [
            (Aux(dtype, "scalar", alignment=width), (1, 1, 1)),
            (Aux(dtype, "scalar", True, alignment=width), (batch, 1, 1)),
            (Aux(dtype, "row", False, "m", alignment=16), (1, rows, 1)),
            (Aux(dtype, "row", True, "", alignment=width), (batch, rows, 1)),
            (Aux(dtype, "col", False, "n", alignment=16), (1, 1, cols)),
            (Aux(dtype, "col", True, "n", alignment=width), (batch, 1, cols)),
            (Aux(dtype, "full", True, "n", alignment=width), shape),
            (Aux(dtype, "full", False, "m", alignment=width), (1, rows, cols)),
            (Aux(dtype, "full", True, "", alignment=width), shape),
        ]
    operands, values = [], []
    for member, extents in kinds:
        value = torch.from_numpy(rng.standard_normal(extents)).to(getattr(torch, member.dtype))
        values.append(np.broadcast_to(value.double().numpy(), shape))
        order = value.transpose(1, 2).contiguous() if member.major == "m" else value
        storage = order.view(torch.int16 if member.dtype == "bfloat16" else torch.int32).numpy()
        b, m, n = extents
        unit = (1, m, m * n) if member.major == "m" else (n, 1, m * n)
        operands.append((storage, tuple(s if e != 1 else 0 for s, e in zip(unit, (m, n, b), strict=True))))
    ops = [Op("identity", (aux(i),), "float32") for i in range(len(kinds))]
    made = program(ops, [Store(val(i), "float32", "n", 4) for i in range(len(ops))], [member for member, _ in kinds])
    for (member, _), got, want in zip(kinds, run(pattern, made, [numbers(shape)], operands), values, strict=True):
        np.testing.assert_array_equal(got.view(np.float32), want, str(member))


@PATTERNS
def test_full_operands_of_every_type_are_read_in_vectors(pattern):
    """Of aligned tensors whose rows (or columns) are 64 elements apart, inside and at the edges."""
    batch, rows, cols, pitch = 2, 60, 40, 64
    rng = np.random.default_rng(11)
    members, operands, values = [], [], []
    for i, dtype in enumerate(DTYPES):
        major = "nm"[i % 2]
        lines, length = (rows, cols) if major == "n" else (cols, rows)
        width = 2 if dtype.endswith("float16") else 4 if dtype.endswith("32") else 1
        raw = rng.integers(0, 256, (batch, lines, pitch * width)).astype(np.uint8)
        storage = torch.from_numpy(raw).view(_rounding.NATIVE.get(dtype, torch.uint8))
        value = _rounding.decode(storage, dtype)[:, :, :length].double().numpy()
        values.append((value if major == "n" else value.transpose(0, 2, 1)).astype(np.float32))
        members.append(Aux(dtype, "full", True, major, alignment=16))
        operands.append((raw, (*((pitch, 1) if major == "n" else (1, pitch)), pitch * lines)))
    ops = [Op("identity", (aux(i),), "float32") for i in range(len(DTYPES))]
    made = program(ops, [Store(val(i), "float32", "n", 4) for i in range(len(DTYPES))], members)
    results = run(pattern, made, [numbers((batch, rows, cols))], operands)
    for dtype, got, want in zip(DTYPES, results, values, strict=True):
        np.testing.assert_array_equal(got.view(np.float32), want, dtype)
    if (
        pattern == "tcgen05"
    ):  # 16 columns: 4 vectors of float32, 2 of float16, 1 of fp8_e5m2, int8 and boolean; the others lie in columns
        assert compiled(made, pattern).__ptx__.count("ld.global.v4.b32") == 9


@PATTERNS
def test_by_value_scalars_of_every_type(pattern):
    given = {
        "float32": 1.25,
        "bfloat16": -3.0,
        "float16": 0.125,
        "fp8_e4m3": 448.0,
        "fp8_e5m2": -0.5,
        "int32": -70000,
        "int8": -5,
    }
    given |= {"uint8": 200, "boolean": 1}
    members = [Aux(dtype, "scalar", by_value=True) for dtype in given]
    operands = [
        stored(np.asarray([value]), dtype).view(torch.uint8).numpy().tobytes() for dtype, value in given.items()
    ]
    ops = [Op("mul", (acc(), aux(i)), "float32") for i in range(len(members))]
    made = program(ops, [Store(val(i), "float32", "n", 4) for i in range(len(ops))], members)
    x = np.random.default_rng(12).integers(-8, 8, (1, 20, 16)).astype(np.float32)
    for value, got in zip(given.values(), run(pattern, made, [x], operands), strict=True):
        np.testing.assert_array_equal(got.view(np.float32), x * np.float32(value))


# --- programs
EXACT = (
    "add",
    "sub",
    "mul",
    "max",
    "min",
    "abs",
    "neg",
    "relu",
    "identity",
    "add_square",
    "cmp_gt",
    "cmp_neq",
    "binary_select",
)
KINDS = ("scalar", "row", "col", "full")


def random_program(rng):
    """A graph of ops that are exact on small integers, over accumulators, operands and each other, with several outputs."""
    members, ops = [], []
    for _ in range(rng.integers(1, 4)):
        kind, dtype = rng.choice(KINDS), rng.choice(("float32", "bfloat16", "fp8_e4m3", "int8", "int32"))
        major = "" if kind == "scalar" else {"row": "m", "col": "n"}.get(kind, rng.choice(["n", "m"]))
        width = {"float32": 4, "int32": 4, "bfloat16": 2}.get(dtype, 1)
        members.append(Aux(str(dtype), str(kind), bool(rng.integers(2)), str(major), alignment=width))
    refs = [acc(0), acc(1), *(aux(i) for i in range(len(members)))]
    for i in range(rng.integers(3, 9)):
        name = str(rng.choice(EXACT))
        args = tuple(refs[j] for j in rng.integers(0, len(refs), TABLE[name].arity))
        dtype = (
            "boolean"
            if name.startswith("cmp")
            else str(rng.choice(("float32", "bfloat16", "float16", "fp8_e5m2", "int32", "int8")))
        )
        attrs = (("lower_clip", None), ("negative_slope", None), ("upper_clip", None)) if name == "relu" else ()
        ops.append(Op(name, args, dtype, "float32", attrs))
        refs.append(val(i))
    chosen = [refs[j] for j in rng.integers(0, len(refs), 3)] + [refs[-1]]
    stores = [Store(ref, str(rng.choice(DTYPES)), str(rng.choice(["n", "m", ""])), 4) for ref in chosen]
    return program(ops, stores, members, gemms=(Gemm(dtype=str(rng.choice(FLOATS))), Gemm(dtype="bfloat16")))


def runs_as_the_executor_says(pattern, seed):
    rng = np.random.default_rng(seed)
    made = random_program(rng)
    batch, rows, cols = shape = (2, 67, 36)
    accs = [rng.integers(-4, 5, shape).astype(np.float32) for _ in range(2)]
    operands, values = [], []
    for member in made.aux:
        keep = {"scalar": (0, 0), "row": (1, 0), "col": (0, 1), "full": (1, 1)}[member.kind]
        extents = (batch if member.batched else 1, rows if keep[0] else 1, cols if keep[1] else 1)
        values.append(rng.integers(-3, 4, extents))
        order = values[-1].transpose(0, 2, 1) if member.major == "m" else values[-1]
        b, m, n = extents
        unit = (1, m, m * n) if member.major == "m" else (n, 1, m * n)
        strides = tuple(stride if extent != 1 else 0 for stride, extent in zip(unit, (m, n, b), strict=True))
        bits = stored(order if member.dtype.startswith("int") else order.astype(np.float64), member.dtype)
        operands.append((bits.view(torch.uint8).numpy(), strides))
    results = run(pattern, made, accs, operands)
    identity = np.eye(cols)[None]
    values = [
        value if member.dtype.startswith("int") else value.astype(np.float64)
        for member, value in zip(made.aux, values, strict=True)
    ]
    want = execute(made, [a.astype(np.float64) for a in accs], [identity], values)
    for store, got, value in zip(made.stores, results, want.stores, strict=True):
        same(got, rounded(value, store.dtype), store.dtype)


@PATTERNS
@pytest.mark.parametrize("seed", range(2))
def test_random_programs_agree_with_the_executor(pattern, seed):
    runs_as_the_executor_says(pattern, seed)


@pytest.mark.L2
@PATTERNS
@pytest.mark.parametrize("seed", range(2, 40))
def test_many_random_programs_agree_with_the_executor(pattern, seed):
    runs_as_the_executor_says(pattern, seed)


# --- code
def test_the_code_of_bias_and_gelu_is_lean():
    """Packed conversions, the bias read once for each chunk in vectors, one ex2 for an element, pairs of fp32 where Blackwell has them."""
    ops = [Op("add", (acc(), aux(0)), "float32"), Op("gelu", (val(0),), "bfloat16")]
    bias = Aux("bfloat16", "col", False, "n", alignment=16)
    made = program(ops, [Store(val(1), "bfloat16")], [bias])
    wgmma, tcgen05 = (compiled(made, pattern, width).__ptx__ for pattern, width in (("wgmma", 32), ("tcgen05", 16)))
    for text in (wgmma, tcgen05):  # 16 elements in a thread
        assert (text.count("cvt.rn.bf16x2.f32"), text.count("cvt.rn.bf16.f32"), text.count("ex2.approx")) == (8, 0, 16)
    # wgmma: 4 pairs of neighbours in each of two rows; the accumulators of the test are read by 16 loads.
    assert (wgmma.count("\tst.global.b32"), wgmma.count("\tld.global.b32")) == (8, 16 + 4)
    assert (wgmma.count("mul.rn.f32"), wgmma.count("fma.rn.f32")) == (16, 16 * 12)
    assert (tcgen05.count("\tst.global.v4.b32"), tcgen05.count("\tld.global.v4.b32")) == (2, 2)
    assert (tcgen05.count("mul.rn.f32x2"), tcgen05.count("fma.rn.f32x2")) == (8, 8 * 12)


def test_addresses_are_computed_in_64_bits():
    """Products of coordinates and strides, that is; tensors of more than 2**31 elements are allowed."""
    members = [Aux("bfloat16", "full", True, major, alignment=2) for major in ("n", "m", "")]
    stores = [Store(acc(), "bfloat16", major) for major in ("n", "m", "")]
    ops = [Op("identity", (aux(i),), "bfloat16") for i in range(3)]
    made = program(ops, stores + [Store(val(i), "bfloat16", "") for i in range(3)], members)
    for pattern in ("wgmma", "tcgen05"):
        text = compiled(made, pattern).__ptx__
        assert re.search(r"m(ul|ad)\.lo\.s64", text)
        assert not re.search(r"m(ul|ad)\.lo\.[su]32", text)


def test_identity_roundings_leave_no_conversion():
    """relu of a bf16 value is one; the accumulator in fp32 and its fp32 store need none."""
    ops = [Op("relu", (acc(),), "bfloat16")]
    text = compiled(program(ops, [Store(val(0), "bfloat16")], gemms=(Gemm(dtype="bfloat16"),)), "wgmma", 16).__ptx__
    assert text.count("cvt.rn.bf16x2.f32") == 8  # the accumulator's four pairs, and the store's
    assert "cvt.rn" not in compiled(program(stores=[Store(acc(), "float32")]), "wgmma", 16).__ptx__


def test_values_that_no_sink_needs_are_not_computed():
    ops = [Op("tanh", (acc(),), "float32"), Op("add", (acc(), aux(0)), "float32"), Op("neg", (acc(),), "float32")]
    made = program(ops, [Store(val(2), "float32")], [Aux("float32", "full", True, "n", alignment=16)])
    assert Epilogue(made).needed == {val(2), acc()}
    assert "ex2" not in compiled(made, "wgmma", 16).__ptx__


def test_an_epilogue_without_reductions_is_deterministic():
    assert Drain(program(stores=[Store(acc(), "float32")]), "wgmma", 16).epilogue.deterministic

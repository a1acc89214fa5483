"""The errors of the kernels' arithmetic that ``kernels/math`` states, over the whole range of fp32.

The emulator rounds the results of ``.approx`` instructions correctly, so what is measured is the error of the formulas; a GPU adds
that of the instructions (PTX ISA: 2 ulp for ex2, 1 for rcp and sqrt).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

from _epilogue import compiled, launch, strided
from frost_gemm.ir import Aux, Gemm, Matrix, Op, Program, Ref, Store
from frost_gemm.ops import GROWING, TABLE
from frost_gemm.reference import execute

UNIT = 2.0**-24  # half an ulp of 1
# (op, relative error in units, from where to where in x)
BOUNDS = (
    ("exp", 2, -87.0, 88.7),
    ("log", 2, 1.2e-38, np.inf),
    ("erf", 2, -np.inf, np.inf),
    ("gelu", 40, -5.0, np.inf),
    ("gelu_approx_tanh", 64, -5.0, np.inf),
    ("sigmoid", 4, 0.0, np.inf),
    ("sigmoid", 20, -16.0, 0.0),
    ("sigmoid", 92, -87.0, 0.0),
    ("tanh", 4, -np.inf, np.inf),
    ("softplus", 4, -87.0, np.inf),
    ("elu", 5, -np.inf, np.inf),
    ("swish", 92, -85.0, np.inf),
    ("sqrt", 1, 0.0, np.inf),
    ("rsqrt", 1, 1.2e-38, np.inf),
    ("reciprocal", 1, -1e37, 1e37),
)
TINY = 2.0**-126


def points(count):
    """Evenly in x, evenly in the exponent, around 1, and at the joints of the polynomials."""
    with np.errstate(over="ignore"):
        sizes = np.geomspace(1e-37, 1e37, count)
        x = np.concatenate([np.linspace(-100, 100, count), np.linspace(-6, 6, count), sizes, -sizes])
    around = [np.nextafter(np.float32(v), np.float32(s * 9)) * k for v in (1, 4) for s in (-1, 1) for k in (-1, 1)]
    near = 1 + np.linspace(-1e-3, 1e-3, count)
    return np.concatenate([x, near, around, [1, -1, 4, -4]]).astype(np.float32)


def evaluated(pattern, x):
    """Every op of BOUNDS at x, with x filled up to rows of 16."""
    names = tuple(dict.fromkeys(bound[0] for bound in BOUNDS))
    ops = tuple(Op(name, (Ref("acc", 0),), "float32", attrs=attrs(name)) for name in names)
    stores = tuple(Store(Ref("val", i), "float32", "n", 16) for i in range(len(ops)))
    made = Program((Matrix("float32"),), (Matrix("float32"),), (Gemm(),), stores, ops=ops)
    grid = np.resize(x, (1, -(-len(x) // 16), 16))
    out = [np.zeros_like(grid) for _ in ops]
    operands = {"a0": strided(grid), "b0": (np.zeros(4, np.float32), (1, 1, 0))}
    operands |= {f"store{i}": strided(array) for i, array in enumerate(out)}
    launch(compiled(made, pattern), made, (grid.shape[1], 16, 16, 1), operands)
    return {name: array.reshape(-1)[: len(x)] for name, array in zip(names, out, strict=True)}


def attrs(name):
    return (("swish_beta", 1.0),) if name == "swish" else ()


def check(pattern, count):
    x = points(count)
    results = evaluated(pattern, x)
    for name, units, low, high in BOUNDS:
        got = results[name]
        with np.errstate(all="ignore"):
            want = TABLE[name].reference(x.astype(np.float64), **dict(attrs(name)))
            inside = (x >= low) & (x <= high) & (np.abs(want) > 2 * TINY) & (np.abs(want) < 3e38)
            error = np.abs(got - want) / np.abs(want) / UNIT
        worst = np.argmax(np.where(inside, error, 0))
        assert inside.sum() > len(x) // 20
        assert error[worst] <= units, (name, x[worst], error[worst])


@pytest.mark.parametrize("pattern", ["wgmma", "tcgen05"])
def test_stated_errors_hold(pattern):
    check(pattern, 400)


@pytest.mark.L2
@pytest.mark.parametrize("pattern", ["wgmma", "tcgen05"])
def test_stated_errors_hold_on_a_dense_sweep(pattern):
    check(pattern, 10000)


INTEGER_OPS = (*sorted(GROWING), "neg", "abs", "div", "identity")


@pytest.mark.parametrize("pattern", ["wgmma", "tcgen05"])
def test_ops_of_int32_are_exact_and_rounded_once_to_their_type(pattern):
    """Every pair of edges, of small integers and of one that rounds twice by way of fp32; sums and products that are declared as
    integers saturate, those that become floats don't."""
    edges = [-(2**31), -(2**31) + 1, -(2**16), -3, -1, 0, 1, 2**15, 2**16 - 1, 2**24 + 1, 2**24 + 2**16 + 1, 2**31 - 1]
    size = len(edges)
    pairs = zip(*itertools.product(edges, edges), strict=True)
    a, b = (np.array(side, np.int32).reshape(1, size, size) for side in pairs)
    kinds = {"int32": np.int32, "float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
    sides = (Ref("acc", 0), Ref("aux", 0))
    ops = tuple(Op(name, sides[: TABLE[name].arity], dtype, "int32") for name in INTEGER_OPS for dtype in kinds)
    stores = tuple(Store(Ref("val", i), op.dtype, "n", 2) for i, op in enumerate(ops))
    matrices = (Matrix("int32"),)
    made = Program(matrices, matrices, (Gemm(dtype="int32"),), stores, (), (Aux("int32", "full"),), ops, "int32")
    out = [np.zeros(a.shape, kinds[op.dtype]) for op in ops]
    operands = {"a0": strided(a), "b0": (np.zeros(4, np.int32), (1, 1, 0)), "aux0": strided(b)}
    operands |= {f"store{i}": strided(array) for i, array in enumerate(out)}
    launch(compiled(made, pattern, 8 if pattern == "wgmma" else 4), made, (size, size, 16, 1), operands)
    want = execute(made, [a.astype(np.int64)], [np.eye(size, dtype=np.int64)[None]], [b.astype(np.int64)])
    for op, got, value in zip(ops, out, want.stores, strict=True):
        numbers = (got.astype(np.uint32) << 16).view(np.float32) if op.dtype == "bfloat16" else got
        np.testing.assert_array_equal(numbers, value, f"{op.name} {op.dtype}")

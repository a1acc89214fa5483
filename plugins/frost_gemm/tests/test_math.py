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
from frost_gemm.ops import TABLE

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


@pytest.mark.parametrize("pattern", ["wgmma", "tcgen05"])
def test_ops_of_int32_saturate(pattern):
    """Every pair of edges and of small integers."""
    edges = [-(2**31), -(2**31) + 1, -(2**16), -3, -1, 0, 1, 2**15, 2**16 - 1, 2**24 + 1, 2**31 - 1]
    a, b = (np.array(side, np.int32).reshape(1, 11, 11) for side in zip(*itertools.product(edges, edges), strict=True))
    names = ("add", "sub", "mul", "add_square")
    ops = tuple(Op(name, (Ref("acc", 0), Ref("aux", 0)), "int32", "int32") for name in names)
    stores = tuple(Store(Ref("val", i), "int32", "n", 4) for i in range(len(ops)))
    matrices = (Matrix("int32"),)
    made = Program(matrices, matrices, (Gemm(dtype="int32"),), stores, (), (Aux("int32", "full"),), ops, "int32")
    out = [np.zeros_like(a) for _ in ops]
    operands = {"a0": strided(a), "b0": (np.zeros(4, np.int32), (1, 1, 0)), "aux0": strided(b)}
    operands |= {f"store{i}": strided(array) for i, array in enumerate(out)}
    launch(compiled(made, pattern), made, (11, 11, 16, 1), operands)
    for name, got in zip(names, out, strict=True):
        want = TABLE[name].reference(a.astype(np.int64), b.astype(np.int64))
        np.testing.assert_array_equal(got, np.clip(want, -(2**31), 2**31 - 1), name)

import math
import random
import runpy
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator._arith import operation
from ptx_emulator._findings import UnsupportedError
from ptx_emulator._floats import decode

_RECORD = runpy.run_path(str(Path(__file__).with_name("_h200.py")))
opcodes, recorded = _RECORD["opcodes"], _RECORD["recorded"]
APPROXIMATE = [o for o in opcodes() if ".approx" in o or ".full" in o]
EXACT = [o for o in opcodes() if not o.startswith("cvt") and o not in APPROXIMATE]
# ISA bounds of the approximations: relative error, absolute error; sin and cos only in [-2 pi, 2 pi]
BOUNDS = {
    "ex2": (2.0**-22, 2.0**-125),
    "lg2": (0.0, 2.0**-15),
    "rcp": (2.0**-19, 2.0**-125),
    "rsqrt": (2.0**-22, 0.0),
    "sqrt": (2.0**-22, 2.0**-125),
    "sin": (0.0, 2.0**-20),
    "cos": (0.0, 2.0**-20),
    "tanh": (2.0**-10, 0.0),
    "div": (2.0**-22, 2.0**-125),
}
HALF = {"f16": (2.0**-9, 2.0**-23), "bf16": (2.0**-6.9, 0.0)}


def _run(op, sources):
    name, _, table = op.partition("/")
    arguments = [*sources, np.uint32(int(table, 16))] if table else sources
    return operation(name)(arguments)


@pytest.mark.parametrize("op", EXACT)
def test_operation_equals_the_h200_bit_for_bit(op):
    sources, expected = recorded(op)
    result = _run(op, sources)
    assert result.dtype == expected.dtype
    keep = np.ones(len(expected), bool)
    if op == "fns.b32":  # a base past 31 is undefined
        keep = sources[1] < 32
    if op.endswith("f64") and expected.dtype == np.uint64:  # which operand's NaN survives is not specified
        both = np.isnan(result.view(np.float64)) & np.isnan(expected.view(np.float64))
        keep = ~both
    np.testing.assert_array_equal(result[keep], expected[keep])


@pytest.mark.parametrize("op", ["min.f16", "max.f16", "min.bf16", "min.f32", "max.f64"])
def test_a_number_wins_over_a_signaling_nan_in_every_lane(op):
    kind = op.partition(".")[2]
    one, signaling = {
        "f16": (0x3C00, 0x7C01), "bf16": (0x3F80, 0x7F81), "f32": (0x3F800000, 0x7F800001),
        "f64": (0x3FF0000000000000, 0x7FF0000000000001),
    }[kind]  # fmt: skip
    dtype = {"f32": np.uint32, "f64": np.uint64}.get(kind, np.uint16)
    for lanes in (1, 3, 8, 33):
        number, nan = np.full(lanes, one, dtype), np.full(lanes, signaling, dtype)
        np.testing.assert_array_equal(operation(op)([number, nan]), number)
        np.testing.assert_array_equal(operation(op)([nan, number]), number)


@pytest.mark.parametrize("op", APPROXIMATE)
def test_approximation_is_within_the_isa_bound_of_the_h200(op):
    sources, expected = recorded(op)
    kind = op.rpartition(".")[2]
    result = _run(op, sources)
    relative, absolute = BOUNDS[op.split(".")[0]]
    if kind.endswith("x2"):
        result, expected = result.view(np.uint16), expected.view(np.uint16)
        kind = kind[:-2]
    if kind in HALF:
        relative, absolute = HALF[kind]
    got, want = decode(result, kind).astype(float), decode(expected, kind).astype(float)
    if op.startswith(("sin", "cos")):
        x = np.abs(decode(sources[0], "f32"))
        keep = (x < 2 * np.pi) | ~np.isfinite(x)
        got, want = got[keep], want[keep]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = np.isfinite(got) & np.isfinite(want)
    np.testing.assert_array_equal(got[~finite & ~np.isnan(got)], want[~finite & ~np.isnan(got)])
    got, want = got[finite], want[finite]
    assert np.all(np.abs(got - want) <= np.abs(want) * relative + absolute)


def _round_fraction(value, mode):
    """Exact rational to f32 with Python integers only; finite and normal-or-subnormal results."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = max(math.floor(math.log2(magnitude.numerator) - math.log2(magnitude.denominator)) - 24, -149)
    while exponent < 200 and magnitude / Fraction(2) ** exponent >= 1 << 24:
        exponent += 1
    scaled = magnitude / Fraction(2) ** exponent
    low = scaled.numerator // scaled.denominator
    rest = scaled - low
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1),
        "rz": False,
        "rm": value < 0 and rest > 0,
        "rp": value > 0 and rest > 0,
    }[mode]
    return math.copysign(float(low + up) * 2.0**exponent, value)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fma_f32_rounds_the_exact_sum_once(mode):
    rng = random.Random(5)
    a, b, c = [], [], []
    for _ in range(3000):
        x, y = (np.float32(rng.uniform(-2, 2) * 2.0 ** rng.randrange(-40, 40)) for _ in range(2))
        product = float(x) * float(y)
        near = np.float32(product * rng.choice([-1, 1]) * 2.0 ** rng.choice([0, 0, -24, 24, -25, 30, -60, 1]))
        a.append(x), b.append(y), c.append(near)
    # cases whose float64 sum is a tie of f32 that the lost part breaks
    a += [np.float32(1 + 2.0**-23)] * 2
    b += [np.float32(1 + 2.0**-1)] * 2
    c += [np.float32(2.0**-80), np.float32(-(2.0**-80))]
    sources = [np.array(v, np.float32) for v in (a, b, c)]
    got = operation(f"fma.{mode}.f32")([s.view(np.uint32) for s in sources]).view(np.float32)
    for i in range(len(a)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if abs(exact) < Fraction(2) ** 127:
            assert float(got[i]) == _round_fraction(exact, mode), (a[i], b[i], c[i])


def test_f32x2_works_on_both_halves():
    a = np.array([[1.5, -2.0]], np.float32).view(np.uint64)[0]
    b = np.array([[2.0, 4.0]], np.float32).view(np.uint64)[0]
    c = np.array([[0.25, 1.0]], np.float32).view(np.uint64)[0]
    assert operation("fma.rn.f32x2")([a, b, c]).view(np.float32).tolist() == [3.25, -7.0]
    assert operation("add.rn.f32x2")([a, b]).view(np.float32).tolist() == [3.5, 2.0]
    assert operation("mul.f32x2")([a, b]).view(np.float32).tolist() == [3.0, -8.0]


@pytest.mark.parametrize("narrow", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_mixed_precision_sums_round_once_to_f32(narrow, mode):
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 0x7800, (2, 400)).astype(np.uint16) | rng.integers(0, 2, (2, 400)).astype(np.uint16) << 15
    a, b = decode(codes, narrow).astype(np.float64)
    c = (rng.standard_normal(400) * 10.0 ** rng.integers(-6, 6, 400)).astype(np.float32)
    exact = {
        "add": [Fraction(x) + Fraction(float(z)) for x, z in zip(a, c, strict=True)],
        "sub": [Fraction(x) - Fraction(float(z)) for x, z in zip(a, c, strict=True)],
        "fma": [Fraction(x) * Fraction(y) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)],
    }
    for root, values in exact.items():
        sources = [*(codes[: 2 if root == "fma" else 1]), c.view(np.uint32)]
        got = operation(f"{root}.{mode}.f32.{narrow}")(sources)
        assert got.dtype == np.uint32
        for i, value in enumerate(values):
            if abs(value) < Fraction(2) ** 127:
                assert float(got.view(np.float32)[i]) == _round_fraction(value, mode), (root, i)


@pytest.mark.parametrize("narrow", ["f16", "bf16"])
@pytest.mark.parametrize("root", ["add", "sub", "fma"])
def test_mixed_precision_pairs_are_two_mixed_precision_sums(narrow, root):
    rng = np.random.default_rng(6)
    codes = rng.integers(0, 0x7800, (2, 2)).astype(np.uint16) | rng.integers(0, 2, (2, 2)).astype(np.uint16) << 15
    last = rng.standard_normal(2).astype(np.float32).view(np.uint32)
    count = 2 if root == "fma" else 1
    got = operation(f"{root}.rn.f32x2.{narrow}x2.f32x2")([*codes[:count].view(np.uint32), last.view(np.uint64)])
    for half in range(2):
        alone = operation(f"{root}.rn.f32.{narrow}")([*codes[:count, half : half + 1], last[half : half + 1]])
        assert got.view(np.uint32)[half] == alone[0]
    with pytest.raises(UnsupportedError):
        operation(f"{root}.rn.f32x2.f32x2.{narrow}x2.f32x2")


def test_three_input_minimum_and_maximum():
    x, y, z = (np.array(v, np.float32).view(np.uint32) for v in ([1, np.nan], [5, 2], [-3, 7]))
    assert operation("max.f32")([x, y, z]).view(np.float32).tolist() == [5, 7]
    assert np.isnan(operation("min.NaN.f32")([x, y, z]).view(np.float32)[1])


def test_carries_chain_to_wide_integers():
    rng = random.Random(9)
    a, b = ([rng.getrandbits(96) | (rng.random() < 0.3 and 0xFFFFFFFFFFFF) for _ in range(500)] for _ in range(2))
    words = [[np.array([v >> 32 * i & 0xFFFFFFFF for v in x], np.uint32) for i in range(3)] for x in (a, b)]
    for name, function in (("add", lambda x, y: x + y), ("sub", lambda x, y: x - y)):
        low, carry = operation(f"{name}.cc.u32")([words[0][0], words[1][0]])
        mid, carry = operation(f"{name}c.cc.u32")([words[0][1], words[1][1], carry])
        high = operation(f"{name}c.u32")([words[0][2], words[1][2], carry])
        got = [int(h) << 64 | int(m) << 32 | int(x) for h, m, x in zip(high, mid, low, strict=True)]
        assert got == [function(x, y) % 2**96 for x, y in zip(a, b, strict=True)]


def test_multiply_add_with_carry():
    x = np.array([0xFFFFFFFF], np.uint32)
    low, carry = operation("mad.lo.cc.u32")([x, x, x])
    assert (int(low[0]), bool(carry[0])) == (0, True)  # 1 + 0xffffffff
    low, carry = operation("mad.lo.cc.u32")([x, np.array([1], np.uint32), x])
    assert (int(low[0]), bool(carry[0])) == (0xFFFFFFFE, True)
    assert operation("madc.hi.u32")([x, x, x, carry]).tolist() == [(0xFFFFFFFE + 0xFFFFFFFF + 1) & 0xFFFFFFFF]


def test_predicate_forms():
    a, b = np.array([1, 5], np.uint32), np.array([2, 5], np.uint32)
    p, q = operation("setp.lt.u32", pair=True)([a, b])
    assert (p.tolist(), q.tolist()) == ([True, False], [False, True])
    assert operation("setp.lt.and.u32")([a, b, np.array([False, True])]).tolist() == [False, False]
    p, q = operation("setp.ge.or.s32", pair=True)([a, b, np.array([True, False])])
    assert (p.tolist(), q.tolist()) == ([True, True], [True, False])
    assert operation("and.pred")([np.array([True, True]), np.array([False, True])]).tolist() == [False, True]
    assert operation("not.pred")([np.array([True, False])]).tolist() == [False, True]
    assert operation("selp.b32")([a, b, np.array([True, False])]).tolist() == [1, 5]
    low, high = operation("setp.eq.f16x2")([np.array([0x3C003C00], np.uint32), np.array([0x3C000000], np.uint32)])
    assert (low.tolist(), high.tolist()) == ([False], [True])


def test_scalars_broadcast_with_lanes():
    lanes = np.arange(32, dtype=np.uint32)
    assert operation("add.s32")([lanes, np.uint32(5)]).tolist() == [i + 5 for i in range(32)]
    assert operation("shl.b32")([lanes, np.uint32(3)]).tolist() == [i << 3 for i in range(32)]
    assert operation("setp.lt.s32")([lanes, np.uint32(4)]).sum() == 4


@pytest.mark.parametrize(
    "op",
    [
        "add.b7",
        "foo.u32",
        "sqrt.f32",
        "setp.zz.u32",
        "cvt.u32.u8",
        "add",
        "mul.s32",
        "min.f32.f16",
        "add.f16.f32",
        "fma.rn.oob.f16",
    ],
)
def test_unknown_forms_are_refused(op):
    with pytest.raises(UnsupportedError):
        operation(op)

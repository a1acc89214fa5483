"""Codes, rounding and saturation of every type, exhaustively, against torch, numpy, ml_dtypes and the published tables."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch_reference._rounding import decode, encode, largest, round_up, round_value

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP MX 1.0, table 5
SMALL = ["fp8_e4m3", "fp8_e5m2", "fp8_e5m3", "fp4_e2m1"]
INF, NAN = float("inf"), float("nan")


def codes(dtype):
    return torch.arange(16 if dtype == "fp4_e2m1" else 256, dtype=torch.uint8)


def grid(dtype):
    """Finite values of a type in order, once each, with the lowest bit of their code."""
    values = decode(codes(dtype), dtype).double()
    found = {}
    for code, value in zip(codes(dtype).tolist(), values.tolist(), strict=True):
        if math.isfinite(value):
            found.setdefault(value, code & 1)
    return sorted(found.items())


@pytest.mark.parametrize(
    ("dtype", "native"),
    [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2), ("fp8_e8m0", torch.float8_e8m0fnu)],
)
def test_all_codes_decode_as_torch_does(dtype, native):
    ours, theirs = decode(codes(dtype), dtype), codes(dtype).view(native).float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    assert torch.equal(torch.signbit(ours[~ours.isnan()]), torch.signbit(theirs[~ours.isnan()]))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("fp8_e8m0", "float8_e8m0fnu"),
        ("fp4_e2m1", "float4_e2m1fn"),
    ],
)
def test_all_codes_decode_as_ml_dtypes_does(dtype, name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    theirs = codes(dtype).numpy().view(getattr(ml_dtypes, name)).astype(np.float32)
    np.testing.assert_array_equal(decode(codes(dtype), dtype).numpy(), theirs)


def test_fp4_codes_are_the_published_table():
    assert decode(codes("fp4_e2m1"), "fp4_e2m1").tolist() == FP4 + [-value for value in FP4]


def test_e5m3_is_unsigned_with_bias_15_and_one_nan():
    values = decode(codes("fp8_e5m3"), "fp8_e5m3")
    assert values[0] == 0
    assert values[1] == 2.0**-17
    assert values[0x78] == 1.0
    assert values[0x79] == 1.125
    assert values[0xFE] == 114688.0
    assert values[0xFF].isnan()
    assert (values[1:255] > values[:254]).all()


@pytest.mark.parametrize("dtype", [*SMALL, "fp8_e8m0", "int4"])
def test_encode_inverts_decode_for_every_code(dtype):
    all_codes = codes("fp4_e2m1" if dtype == "int4" else dtype)
    values = decode(all_codes, dtype)
    back = encode(values, dtype)
    finite = values.isfinite() if values.is_floating_point() else torch.ones(16, dtype=torch.bool)
    assert torch.equal(back[finite], all_codes[finite])
    if values.is_floating_point():
        assert decode(back, dtype)[values.isnan()].isnan().all()


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", SMALL)
def test_every_midpoint_goes_to_the_even_neighbour_and_its_sides_to_the_nearer(dtype, wide):
    points = grid(dtype)
    inputs, expected = [], []
    for (low, low_odd), (high, _) in itertools.pairwise(points):
        middle = (low + high) / 2
        step = np.float32 if wide == torch.float32 else np.float64
        inputs += [
            low,
            float(np.nextafter(step(middle), step(-INF))),
            middle,
            float(np.nextafter(step(middle), step(INF))),
        ]
        expected += [low, low, high if low_odd else low, high]
    assert round_value(torch.tensor(inputs, dtype=wide), dtype).tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("fp8_e4m3", 449.0, 448.0),
        ("fp8_e4m3", -1e30, -448.0),
        ("fp8_e4m3", INF, 448.0),
        ("fp8_e5m2", 1e9, 57344.0),
        ("fp8_e5m2", -INF, -57344.0),
        ("fp8_e5m3", 2e5, 114688.0),
        ("fp8_e5m3", -3.0, 0.0),
        ("fp4_e2m1", 100.0, 6.0),
        ("fp4_e2m1", -INF, -6.0),
        ("fp4_e2m1", NAN, 6.0),
        ("fp8_e8m0", 1.999, 1.0),
        ("fp8_e8m0", 0.0, 2.0**-127),
        ("fp8_e8m0", INF, 2.0**127),
        ("float16", 65519.9, 65504.0),
        ("float16", 65520.0, INF),
        ("float16", -1e300, -INF),
        ("bfloat16", 3.4e38, INF),
        ("bfloat16", 1e300, INF),
        ("int8", 127.6, 127),
        ("int8", -1e9, -128),
        ("int8", 2.5, 2),
        ("int8", NAN, 0),
        ("uint8", -3.0, 0),
        ("int4", 9.0, 7),
        ("int32", 1e30, 2**31 - 1),
        ("int64", 1e30, 2**63 - 1),
        ("int64", -1e30, -(2**63)),
        ("boolean", 0.25, True),
        ("boolean", NAN, True),
        ("boolean", -0.0, False),
    ],
)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_out_of_range_values_saturate_or_overflow_as_documented(dtype, value, expected, wide):
    assert round_value(torch.tensor([value], dtype=wide), dtype).item() == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "fp8_e5m3", "fp8_e8m0", "float32"])
def test_nan_stays_nan(dtype):
    rounded = round_value(torch.tensor([NAN], dtype=torch.float64), dtype)
    assert rounded.isnan().all()
    assert decode(encode(rounded, dtype), dtype).isnan().all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "float32"])
def test_negative_zero_and_vanishing_negatives_keep_their_sign(dtype):
    rounded = round_value(torch.tensor([-0.0, -1e-300], dtype=torch.float64), dtype)
    assert rounded.tolist() == [0.0, 0.0]
    assert torch.signbit(rounded).all()
    assert torch.signbit(decode(encode(rounded, dtype), dtype)).all()


def test_fp64_to_fp16_rounds_once():
    rng = np.random.default_rng(0)
    halves = np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float64)
    ties = (halves[:-1] + halves[1:]) / 2
    near = np.concatenate([ties, np.nextafter(ties, np.inf), np.nextafter(ties, 0), rng.normal(size=4096) * 1e3])
    ours = round_value(torch.from_numpy(near), "float16").double().numpy()
    np.testing.assert_array_equal(ours, near.astype(np.float16).astype(np.float64))


def test_fp64_to_bf16_rounds_once():
    bits = np.arange(0x7F7F, dtype=np.uint32) << 16
    values = bits.view(np.float32).astype(np.float64)
    ties = (values[:-1] + values[1:]) / 2
    odd = (bits[:-1] >> 16) & 1 == 1
    for near, expected in (
        (ties, np.where(odd, values[1:], values[:-1])),
        (np.nextafter(ties, np.inf), values[1:]),  # through fp32 this would round to even, twice
        (np.nextafter(ties, 0), values[:-1]),
    ):
        np.testing.assert_array_equal(round_value(torch.from_numpy(near), "bfloat16").double().numpy(), expected)


def test_subnormals_of_fp16_and_bf16_survive():
    assert round_value(torch.tensor([2.0**-24, 2.0**-25, 1.5 * 2.0**-24], dtype=torch.float64), "float16").tolist() == [
        2.0**-24,
        0.0,
        2.0**-23,
    ]
    assert round_value(torch.tensor([2.0**-133], dtype=torch.float64), "bfloat16").tolist() == [2.0**-133]


@pytest.mark.parametrize("dtype", ["fp8_e5m3", "fp8_e8m0"])
def test_scales_round_up_to_the_next_code(dtype):
    points = [value for value, _ in grid(dtype)]
    inputs, expected = [], []
    for low, high in itertools.pairwise(points):
        inputs += [low, float(np.nextafter(low, INF)), (low + high) / 2]
        expected += [low, high, high]
    inputs.append(1e300)
    expected.append(largest(dtype))
    assert round_up(torch.tensor(inputs, dtype=torch.float64), dtype).tolist() == expected


def test_integers_are_exact_beyond_fp32():
    assert round_value(torch.tensor([2**24 + 1, -(2**53) - 1]), "int64").tolist() == [2**24 + 1, -(2**53) - 1]
    assert round_value(torch.tensor([2**40]), "int32").tolist() == [2**31 - 1]

"""The kit's element types against ml_dtypes and the formats' published tables."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cudnn_core._dtypes import STORAGE_DTYPES
from cudnn_core.testing._codec import FORMATS, code_dtype, decode, encode, half_spacing, specials

FOREIGN = {
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "float16": np.float16,
}
SCALARS = [dtype for dtype in STORAGE_DTYPES if "x" not in dtype]


def spread(count=20000):
    random = np.random.default_rng(0)
    return random.standard_normal(count) * 10.0 ** random.integers(-9, 6, count)


@pytest.mark.parametrize("dtype", FOREIGN)
def test_rounding_is_that_of_ml_dtypes(dtype):
    values = np.concatenate([spread(), [0.0, -0.0]])
    values = values[np.abs(values) <= FORMATS[dtype].largest]
    ours, theirs = decode(encode(values, dtype), dtype), values.astype(FOREIGN[dtype]).astype(np.float64)
    assert np.array_equal(ours, theirs)
    assert np.array_equal(np.signbit(ours), np.signbit(theirs))


@pytest.mark.parametrize("dtype", SCALARS)
def test_every_code_survives_decode_and_encode(dtype):
    width = 4 if dtype in ("fp4_e2m1", "int4") else 8 * code_dtype(dtype).itemsize
    count = min(1 << width, 1 << 16)
    codes = np.arange(count).astype(code_dtype(dtype)) if dtype != "boolean" else np.array([0, 1], dtype=np.uint8)
    values = decode(codes, dtype)
    usable = np.isfinite(values)
    again = encode(values, dtype)
    assert np.array_equal(decode(again, dtype)[usable], values[usable])
    if dtype != "fp8_e8m0":
        assert np.array_equal(again[usable], codes[usable])


def test_unsigned_and_scale_formats_decode_as_published():
    assert decode(np.array([0, 1, 127, 128, 254], dtype=np.uint8), "fp8_e8m0").tolist() == [
        2.0**-127,
        2.0**-126,
        1.0,
        2.0,
        2.0**127,
    ]
    assert np.isnan(decode(np.array([255], dtype=np.uint8), "fp8_e8m0"))
    assert decode(np.array([0, 1, 0x78, 0xFE], dtype=np.uint8), "fp8_e5m3").tolist() == [0.0, 2.0**-17, 1.0, 114688.0]
    assert np.isnan(decode(np.array([0xFF], dtype=np.uint8), "fp8_e5m3"))


@pytest.mark.parametrize("dtype", [d for d in FORMATS if d != "fp8_e8m0"])
def test_half_the_spacing_bounds_one_rounding_and_is_reached(dtype):
    values = np.abs(spread())
    values = values[values <= FORMATS[dtype].largest]
    error = np.abs(decode(encode(values, dtype), dtype) - values)
    bound = half_spacing(dtype, values)
    assert (error <= bound).all()
    if dtype != "float64":
        assert (error > 0.9 * bound).any()


@pytest.mark.parametrize("dtype", [d for d in FORMATS if d != "fp8_e8m0"])
def test_special_values_are_values_of_the_type(dtype):
    values = np.array(specials(dtype))
    stored = decode(encode(values, dtype), dtype)
    assert np.array_equal(stored, values, equal_nan=True)
    assert np.array_equal(np.signbit(stored), np.signbit(values))

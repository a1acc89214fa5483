import ml_dtypes
import numpy as np
import pytest
from ptx_emulator._floats import FORMATS, decode, encode, flush, round_to_odd, table, two_sum

TYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
}


def _numbers(seed=0, count=40000):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    near = (rng.uniform(-1, 1, count) * 2.0 ** rng.integers(-30, 20, count)).astype(np.float32)
    return np.concatenate([bits[np.isfinite(bits)], near])


@pytest.mark.parametrize("name", TYPES)
def test_every_code_decodes_as_ml_dtypes_does(name):
    bits = FORMATS[name].bits
    codes = np.arange(1 << bits).astype(np.uint16 if bits == 16 else np.uint8)
    expected = codes.view(TYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(table(name), expected)
    np.testing.assert_array_equal(np.signbit(table(name)), np.signbit(expected))
    np.testing.assert_array_equal(decode(codes, name), expected)


@pytest.mark.parametrize("name", [n for n in TYPES if n != "ue8m0"])
def test_encoding_to_nearest_even_agrees_with_ml_dtypes(name):
    numbers = _numbers()
    bits = FORMATS[name].bits
    with np.errstate(all="ignore"):
        expected = numbers.astype(TYPES[name]).view(np.uint16 if bits == 16 else np.uint8) & np.uint16((1 << bits) - 1)
    codes = encode(numbers, name)
    if name == "e4m3":  # the sign of a NaN from overflow is free
        nan = expected & 0x7F == 0x7F
        assert np.all(codes[nan] & 0x7F == 0x7F)
        codes, expected = codes[~nan], expected[~nan]
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("name", ["f16", "bf16", "e5m2", "e4m3", "e3m2", "e2m3", "e2m1", "ue5m3"])
@pytest.mark.parametrize("mode", ["rz", "rm", "rp", "rn", "rna"])
def test_rounding_modes_pick_the_neighbour_that_the_mode_names(name, mode):
    form = FORMATS[name]
    grid = table(name)[: form.maximum + 1].astype(np.float64)
    rng = np.random.default_rng(1)
    x = np.abs(_numbers(2, 4000).astype(np.float64))
    x = np.concatenate([x[x < grid[-1]], (grid[1:] + grid[:-1]) / 2, rng.uniform(0, grid[-1], 500)])
    if form.signed:
        x = np.concatenate([x, -x])
    index = np.searchsorted(grid, np.abs(x), side="right") - 1
    low, high = grid[index], grid[np.minimum(index + 1, len(grid) - 1)]
    exact = low == np.abs(x)
    away = {
        "rz": np.zeros(len(x), bool),
        "rm": x < 0,
        "rp": x > 0,
        "rn": (np.abs(x) - low > high - np.abs(x)) | ((np.abs(x) - low == high - np.abs(x)) & (index % 2 == 1)),
        "rna": np.abs(x) - low >= high - np.abs(x),
    }[mode]
    expected = np.copysign(np.where(exact | ~away, low, high), x)
    np.testing.assert_array_equal(table(name)[encode(x, name, mode)], expected)


def test_overflow_and_specials_follow_saturation():
    inf, nan = np.inf, np.nan
    x = np.array([1e9, -1e9, inf, -inf, nan])
    assert encode(x, "f16").tolist() == [0x7C00, 0xFC00, 0x7C00, 0xFC00, 0x7FFF]
    assert encode(x, "f16", "rz").tolist() == [0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7FFF]
    assert encode(x, "f16", saturate="finite").tolist() == [0x7BFF, 0xFBFF, 0x7BFF, 0xFBFF, 0x7FFF]
    assert encode(x, "e4m3", saturate="finite").tolist() == [0x7E, 0xFE, 0x7E, 0xFE, 0x7F]
    assert encode(x, "e5m2", saturate="finite").tolist() == [0x7B, 0xFB, 0x7B, 0xFB, 0x7F]
    assert encode(x, "e2m1", saturate="finite").tolist() == [7, 15, 7, 15, 7]
    assert encode(x, "e2m3", saturate="finite").tolist() == [0x1F, 0x3F, 0x1F, 0x3F, 0x1F]
    assert encode(x, "ue8m0", "rp", "finite").tolist() == [127 + 30, 127 + 30, 0xFE, 0xFE, 0xFF]
    assert encode([-1.0, -0.0, 2.0], "e4m3", relu=True).tolist() == [0, 0, 0x40]


def test_ue8m0_rounds_the_exponent_only():
    x = np.array([1.0, 1.0000001, 1.9999999, 2.0, 0.0, 2.0**-127, 2.0**-140, 3.4e38])
    assert encode(x, "ue8m0", "rz").tolist() == [127, 127, 127, 128, 0, 0, 0, 254]
    assert encode(x, "ue8m0", "rp", "finite").tolist() == [127, 128, 128, 128, 0, 0, 0, 254]


def test_stochastic_rounding_goes_up_with_the_share_of_random_numbers_that_carry():
    x = np.full(1 << 16, 1.0 + 0.3 / 8)  # 0.3 of the way between neighbours of e4m3
    codes = encode(x, "e4m3", "rs", "finite", random=np.arange(1 << 16))
    assert set(codes.tolist()) == {0x38, 0x39}
    assert abs(np.mean(codes == 0x39) - 0.3) < 1e-4


def test_flush_keeps_signs_and_normals():
    x = np.array([1e-40, -1e-40, 2.0**-126, -1.0, np.inf, np.nan], np.float32)
    assert flush(x)[:5].tolist() == [0.0, -0.0, 2.0**-126, -1.0, np.inf]
    assert np.signbit(flush(x)[1])


def test_round_to_odd_makes_the_second_rounding_exact():
    rng = np.random.default_rng(3)
    a = rng.uniform(-1, 1, 20000) * 2.0 ** rng.integers(-60, 60, 20000)
    b = rng.uniform(-1, 1, 20000) * 2.0 ** rng.integers(-60, 60, 20000)
    s, error = two_sum(a, b)
    odd = round_to_odd(s, error)
    assert np.all((odd == s) | (odd.view(np.int64) & 1 == 1))
    assert np.all(np.abs(odd - s) <= np.abs(np.spacing(s)))

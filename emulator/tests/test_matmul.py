from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from ptx_emulator._floats import decode, encode, table
from ptx_emulator._matmul import accumulate, accumulation_bound, decode_elements, expand_scales


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("f16", np.float16),
        ("bf16", ml_dtypes.bfloat16),
        ("e4m3", ml_dtypes.float8_e4m3fn),
        ("e5m2", ml_dtypes.float8_e5m2),
        ("s8", np.int8),
        ("u8", np.uint8),
    ],
)
def test_operand_bytes_decode_as_their_type(name, dtype):
    data = np.random.default_rng(0).integers(0, 256, (16, 64), dtype=np.uint8)
    np.testing.assert_array_equal(decode_elements(data, name), data.view(dtype).astype(np.float32))


def test_tf32_operands_lose_their_low_bits():
    data = np.array([[1.0 + 2.0**-10 + 2.0**-12, -3.1415927]], np.float32)
    got = decode_elements(data.view(np.uint8), "tf32")
    assert got[0, 0] == 1.0 + 2.0**-10
    assert got.view(np.uint32)[0, 1] & 0x1FFF == 0


def test_packed_and_padded_four_bit_elements():
    codes = np.random.default_rng(1).integers(0, 16, (8, 64), dtype=np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    np.testing.assert_array_equal(decode_elements(packed, "e2m1"), table("e2m1")[codes])
    padded = np.full((8, 4, 16), 0xEE, np.uint8)
    padded[:, :, :8] = packed.reshape(8, 4, 8)
    np.testing.assert_array_equal(decode_elements(padded.reshape(8, 64), "e2m1", 8), table("e2m1")[codes])


@pytest.mark.parametrize("name", ["e2m3", "e3m2"])
def test_padded_six_bit_elements(name):
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 64, (4, 32), dtype=np.uint8)
    rows = []
    for row in codes.tolist():
        line = b""
        for group in (row[:16], row[16:]):
            line += sum(c << 6 * i for i, c in enumerate(group)).to_bytes(12, "little") + b"\xee" * 4
        rows.append(np.frombuffer(line, np.uint8))
    np.testing.assert_array_equal(decode_elements(np.stack(rows), name, 8), table(name)[codes])
    with pytest.raises(ValueError, match="padded"):
        decode_elements(np.zeros((1, 12), np.uint8), name)


@pytest.mark.parametrize("name", ["f16", "e4m3", "e5m2"])
def test_float_accumulation_is_the_exact_sum_rounded_once(name):
    rng = np.random.default_rng(3)
    a, b = (decode(encode(rng.standard_normal((5, 16)), name, saturate="finite"), name) for _ in range(2))
    c = rng.standard_normal((5, 5)).astype(np.float32)
    got = accumulate(a, b, c)
    assert got.dtype == np.float32
    for i in range(5):
        for j in range(5):
            exact = sum(
                (Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[i], b[j], strict=True)),
                Fraction(float(c[i, j])),
            )
            assert got[i, j] == np.float32(float(exact))
            assert abs(float(got[i, j]) - float(exact)) <= accumulation_bound(a, b, c)[i, j]


def test_half_accumulator_holds_half_numbers():
    a = np.full((2, 16), 1.0 + 2.0**-10, np.float32)
    got = accumulate(a, a, None, "f16")
    np.testing.assert_array_equal(got, got.astype(np.float16).astype(np.float32))


def test_integer_accumulation_wraps_or_saturates():
    a, b = np.full((1, 32), -128, np.int32), np.full((1, 32), 255, np.int32)
    c = np.array([[-(1 << 31) + 5]], np.int32)
    exact = -128 * 255 * 32 + int(c[0, 0])
    assert accumulate(a, b, c, "s32").tolist() == [[(exact + (1 << 31)) % (1 << 32) - (1 << 31)]]
    assert accumulate(a, b, c, "s32", saturate=True).tolist() == [[-(1 << 31)]]


@pytest.mark.parametrize(("scale", "vector"), [("ue8m0", 32), ("ue4m3", 16)])
def test_block_scales_multiply_their_block(scale, vector):
    rng = np.random.default_rng(4)
    a, b = (table("e2m1")[rng.integers(0, 16, (3, 64))] for _ in range(2))
    codes = [
        rng.integers(120, 134, (3, 64 // vector), dtype=np.uint8)
        if scale == "ue8m0"
        else rng.integers(0, 127, (3, 64 // vector), dtype=np.uint8)
        for _ in range(2)
    ]
    factors = [expand_scales(c, scale, vector) for c in codes]
    assert factors[0].shape == (3, 64)
    got = accumulate(a, b, None, "f32", *factors)
    reference = {"ue8m0": lambda c: Fraction(2) ** (c - 127), "ue4m3": lambda c: Fraction(float(table("e4m3")[c]))}[
        scale
    ]
    for i in range(3):
        for j in range(3):
            exact = Fraction(0)
            for k in range(64):
                block = k // vector
                exact += (
                    Fraction(float(a[i, k]))
                    * Fraction(float(b[j, k]))
                    * reference(int(codes[0][i, block]))
                    * reference(int(codes[1][j, block]))
                )
            assert got[i, j] == np.float32(float(exact))


def test_a_negative_bit_of_ue4m3_is_ignored_and_nan_scales_spread():
    assert expand_scales(np.array([[0xB8]], np.uint8), "ue4m3", 16)[0, 0] == 1.0
    assert np.isnan(expand_scales(np.array([[0xFF]], np.uint8), "ue8m0", 32)).all()

import runpy
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from ptx_emulator._convert import convert
from ptx_emulator._findings import UnsupportedError
from ptx_emulator._floats import encode, table

_RECORD = runpy.run_path(str(Path(__file__).with_name("_h200.py")))
opcodes, recorded = _RECORD["opcodes"], _RECORD["recorded"]
# a NaN under rna.satfinite leaves the H200's emulation sequence as garbage; the ISA promises a NaN
NAN_IS_FREE = {"cvt.rna.satfinite.tf32.f32"}


def _f32(*values):
    return np.array(values, np.float32).view(np.uint32)


@pytest.mark.parametrize("op", [o for o in opcodes() if o.startswith("cvt")])
def test_conversion_equals_the_h200_bit_for_bit(op):
    sources, expected = recorded(op)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = convert(op)(sources).astype(expected.dtype)
    keep = ~np.isnan(sources[0].view(np.float32)) if op in NAN_IS_FREE else slice(None)
    np.testing.assert_array_equal(result[keep], expected[keep])


@pytest.mark.parametrize("op", [o for o in opcodes() if o.startswith("cvt")])
def test_result_has_the_shape_of_the_sources(op):
    sources, _ = recorded(op)
    shaped = [s.reshape(4, 8) for s in sources]
    np.testing.assert_array_equal(convert(op)(shaped), convert(op)(sources).reshape(4, 8))


@pytest.mark.parametrize(
    ("base", "dtype", "width"),
    [
        ("e2m1", ml_dtypes.float4_e2m1fn, 4),
        ("e2m3", ml_dtypes.float6_e2m3fn, 8),
        ("e3m2", ml_dtypes.float6_e3m2fn, 8),
        ("e4m3", ml_dtypes.float8_e4m3fn, 8),
        ("e5m2", ml_dtypes.float8_e5m2, 8),
    ],
)
def test_packed_narrow_floats_agree_with_ml_dtypes(base, dtype, width):
    rng = np.random.default_rng(0)
    limit = float(ml_dtypes.finfo(dtype).max)
    a, b = (rng.uniform(-limit, limit, 4096).astype(np.float32) for _ in range(2))
    codes = [v.astype(dtype).view(np.uint8).astype(np.uint32) for v in (a, b)]
    packed = convert(f"cvt.rn.satfinite.{base}x2.f32")([a.view(np.uint32), b.view(np.uint32)])
    np.testing.assert_array_equal(packed, codes[0] << width | codes[1])
    back = convert(f"cvt.rn.f16x2.{base}x2")([packed])
    halves = np.stack([back >> 16, back & 0xFFFF], -1).astype(np.uint16).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(halves, np.stack([table(base)[codes[0]], table(base)[codes[1]]], -1))


def test_narrow_floats_from_packed_halves():
    pair = np.array(
        [np.float16(3.0).view(np.uint16).astype(np.uint32) << 16 | np.float16(-0.5).view(np.uint16)], np.uint32
    )
    assert convert("cvt.rn.satfinite.e2m1x2.f16x2")([pair]).tolist() == [0x5 << 4 | 0x9]
    bf16 = np.array([0x40400000 | 0xBF00], np.uint32)
    assert convert("cvt.rn.satfinite.e2m1x2.bf16x2")([bf16]).tolist() == [0x5 << 4 | 0x9]


def test_narrow_floats_saturate_and_have_no_nan():
    a = _f32(np.nan, np.inf, -np.inf, -1.0)
    zero = _f32(0, 0, 0, 0)
    assert (convert("cvt.rn.satfinite.e2m1x2.f32")([a, zero]) >> 4).tolist() == [7, 7, 15, 10]
    assert (convert("cvt.rn.satfinite.relu.e2m1x2.f32")([a, zero]) >> 4).tolist() == [7, 7, 0, 0]


def test_scale_factor_conversions():
    x = _f32(1.0, 1.5, np.nan, 1e38)
    assert (convert("cvt.rp.satfinite.ue8m0x2.f32")([x, x]) & 0xFF).tolist() == [127, 128, 255, 254]
    assert (convert("cvt.rz.ue8m0x2.f32")([x, x]) >> 8).tolist() == [127, 127, 255, 253]
    codes = np.array([0x7F80, 0xFF00, 0x01FE], np.uint16)
    assert convert("cvt.rn.bf16x2.ue8m0x2")([codes]).tolist() == [0x3F804000, 0x7FFF0040, 0x00807F00]


def test_four_element_stochastic_conversion_packs_the_first_operand_highest():
    a = [_f32(v) for v in (1.0, 2.0, 3.0, 4.0)]
    rbits = np.array([0], np.uint32)
    assert convert("cvt.rs.satfinite.e2m1x4.f32")([*a, rbits]).tolist() == [0x2456]
    assert convert("cvt.rs.satfinite.e4m3x4.f32")([*a, rbits]).tolist() == [0x38404448]
    midway = [_f32(v) for v in (1.25, 1.25, 1.25, 1.25)]  # e2m1 neighbours 1 and 1.5: rounds up with the top random bit
    ones = np.array([0xFFFFFFFF], np.uint32)
    assert convert("cvt.rs.satfinite.e2m1x4.f32")([*midway, ones]).tolist() == [0x3333]


def test_stochastic_pairs_use_their_half_of_rbits():
    x = np.float32(1.0 + 2.0**-8)  # halfway between two bf16 numbers
    a = b = np.full(2, x, np.float32).view(np.uint32)
    rbits = np.array([0x80000000, 0x00008000], np.uint32)
    assert convert("cvt.rs.bf16x2.f32")([a, b, rbits]).tolist() == [0x3F813F80, 0x3F803F81]


def test_wide_integers_round_once():
    values = np.array([(1 << 63) - 1, (1 << 60) + (1 << 36) + 1, (1 << 54) + (1 << 30), -(1 << 62) - 1], np.int64)
    for mode, round_mode in (("rn", "rn"), ("rz", "rz"), ("rm", "rm"), ("rp", "rp")):
        got = convert(f"cvt.{mode}.f32.s64")([values.view(np.uint64)])
        for value, code in zip(values.tolist(), got.tolist(), strict=True):
            high = float(value >> 32) * 2.0**32  # reference: round the exact integer with Python integers
            del high
            shift = max(abs(value).bit_length() - 40, 0)
            kept = abs(value) >> shift
            sticky = int(kept << shift != abs(value))
            exact = np.copysign(float(kept * 2 + sticky) * 2.0 ** (shift - 1), value)
            assert code == int(encode([exact], "f32", round_mode)[0])


@pytest.mark.parametrize(
    "op",
    [
        "cvt.f16.f32",
        "cvt.rn.f64.f32",
        "cvt.rni.f16.f32",
        "cvt.s32.f32",
        "cvt.rn.e4m3x2.f32",
        "cvt.rn.foo.f32",
        "mov.u32",
        "cvt.rn.satfinite.ue8m0x2.f32",
    ],
)
def test_forms_outside_the_isa_are_refused(op):
    with pytest.raises(UnsupportedError):
        convert(op)

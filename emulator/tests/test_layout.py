import itertools
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator._layout import (
    SWIZZLES,
    InstructionDescriptor,
    MatrixDescriptor,
    TensorMap,
    decode_instruction,
    decode_tcgen05,
    decode_tensor_map,
    decode_wgmma,
    encode_instruction,
    encode_tcgen05,
    encode_tensor_map,
    encode_wgmma,
    gather_operand,
    instruction_problems,
    matrix_problems,
    operand_addresses,
    swizzle,
    swizzle_span,
    tensor_map_problems,
)

MODES = ["none", "32B", "64B", "128B"]
DRIVER_TYPES = ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz"]
MAPS = json.loads(lzma.decompress((Path(__file__).parent / "data" / "h200_tensor_maps.json.xz").read_bytes()))


@pytest.mark.parametrize("mode", SWIZZLES)
@pytest.mark.parametrize("base", range(8))
def test_swizzle_is_an_involution_within_its_span(mode, base):
    addresses = np.arange(8192)
    image = swizzle(addresses, mode, base)
    assert sorted(image.tolist()) == addresses.tolist()
    np.testing.assert_array_equal(swizzle(image, mode, base), addresses)
    span = swizzle_span(mode)
    np.testing.assert_array_equal(image // span, addresses // span)


def test_swizzle_128_exchanges_16_byte_pieces_as_the_isa_shows():
    # row r of the 8x8 pattern of 16-byte pieces holds piece c at column c xor r
    for row, column in itertools.product(range(8), range(8)):
        assert swizzle(128 * row + 16 * column, "128B") == 128 * row + 16 * (column ^ row)
        assert swizzle(128 * row + 16 * column, "128B_32B") == 128 * row + 16 * (column ^ 2 * (row % 4))
        if column < 4:
            assert swizzle(64 * row + 16 * column, "64B") == 64 * row + 16 * (column ^ row // 2)
        if column < 2:
            assert swizzle(32 * row + 16 * column, "32B") == 32 * row + 16 * (column ^ row // 4)


def _descriptor(mode, major, rows, kbytes, bits, start=2048):
    """Leading and stride offsets of a compact tile of swizzle atoms."""
    span = swizzle_span(mode)
    if major == "K":
        if mode == "none":
            return MatrixDescriptor(start, 8 * 16 * (rows // 8), 128, mode)
        return MatrixDescriptor(start, 16, 8 * span, mode)
    k = kbytes * 8 // bits
    group = 4 if mode == "128B_32B" else 8
    if mode == "none":
        return MatrixDescriptor(start, 128, 128 * (k // 8), mode)
    return MatrixDescriptor(start, span * k, span * group, mode)


CASES = [
    (mode, major, bits)
    for mode, major, bits in itertools.product([*MODES, "128B_32B"], ["K", "MN"], [8, 16, 32])
    if major == "K" or (bits == 32) == (mode == "128B_32B")
]


@pytest.mark.parametrize(("mode", "major", "bits"), CASES)
def test_operand_addresses_are_a_bijection_onto_the_bytes_of_the_tile(mode, major, bits):
    rows, kbytes = 128, 32 if major == "K" else 16 * bits // 8
    if major == "K" and mode != "none":
        kbytes = min(swizzle_span(mode), 128)
    addresses = operand_addresses(_descriptor(mode, major, rows, kbytes, bits), rows, kbytes, major, bits)
    assert addresses.shape == (rows, kbytes)
    assert sorted(addresses.ravel().tolist()) == list(range(2048, 2048 + rows * kbytes))


@pytest.mark.parametrize(("mode", "major", "bits"), CASES)
def test_gather_reads_the_bytes_at_the_addresses(mode, major, bits):
    memory = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
    rows, kbytes = 64, 32 if mode in ("none", "32B") or major == "K" else 64
    desc = _descriptor(mode, major, rows, kbytes, bits)
    expected = memory[operand_addresses(desc, rows, kbytes, major, bits)]
    np.testing.assert_array_equal(gather_operand(memory, desc, rows, kbytes, major, bits), expected)


def test_k_steps_inside_a_swizzle_row_read_the_next_columns():
    whole = operand_addresses(MatrixDescriptor(4096, 16, 1024, "128B"), 64, 128)
    for step in range(4):
        part = operand_addresses(MatrixDescriptor(4096 + 32 * step, 16, 1024, "128B"), 64, 32)
        np.testing.assert_array_equal(part, whole[:, 32 * step : 32 * step + 32])


def test_k_major_rows_that_leave_their_span_go_on_at_the_leading_offset():
    # 48-byte K steps of sm_103 over 128-byte rows, slabs 8 KiB apart: steps 0..7 cover 384 bytes
    slabs = [operand_addresses(MatrixDescriptor(8192 * i, 16, 1024, "128B"), 64, 128) for i in range(3)]
    whole = np.concatenate(slabs, axis=1)
    for step in range(8):
        slab, column = divmod(48 * step, 128)
        for absolute in (False, True):
            leading = 8192 * (slab + 1) if absolute else 8192
            desc = MatrixDescriptor(8192 * slab + column, leading, 1024, "128B", leading_absolute=absolute)
            if slab == 2 and column > 80:
                continue
            np.testing.assert_array_equal(operand_addresses(desc, 64, 48), whole[:, 48 * step : 48 * step + 48])


def test_base_offset_moves_the_pattern():
    # a pattern that starts 256 bytes past a 1024-byte boundary has base offset 2
    moved = operand_addresses(MatrixDescriptor(256, 16, 1024, "128B", base_offset=2), 8, 128)
    np.testing.assert_array_equal(moved - 256, operand_addresses(MatrixDescriptor(0, 16, 1024, "128B"), 8, 128))


def _sample_cute(found):
    """Called inside a jit function, where CuTe's layout algebra runs: samples every canonical layout."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.nvgpu import tcgen05

    names = {"none": "INTER", "32B": "SW32", "64B": "SW64", "128B": "SW128", "128B_32B": "SW128_32B"}
    types = {8: cutlass.Int8, 16: cutlass.Float16, 32: cutlass.Float32}
    for mode, major, bits in CASES:
        if (mode, major) == ("128B_32B", "K"):
            continue
        atom = tcgen05.make_smem_layout_atom(getattr(tcgen05.SmemLayoutAtomKind, f"{major}_{names[mode]}"), types[bits])
        k = max(swizzle_span(mode) * 8 // bits, 256 // bits) if major == "K" else 2 * (4 if bits == 32 else 8)
        layout = cute.tile_to_shape(atom, (256, k), (0, 1))
        rng = np.random.default_rng(1)
        points = [
            (0, 0),
            (8, 0),
            (0, 8),
            (0, 128 // bits),
            (128 // bits, 0),
            (0, 4),
            (swizzle_span(mode) * 8 // bits, 0),
        ]
        points += [(int(r), int(c)) for r, c in zip(rng.integers(0, 256, 60), rng.integers(0, k, 60), strict=True)]
        found[mode, major, bits] = (str(layout), k, {p: int(layout(p)) for p in points if p[1] < k})


@pytest.fixture(scope="module")
def cute_layouts():
    """CuTe's own canonical layouts: name -> (text with the swizzle, k, element index of sampled coordinates)."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")  # there is no device to ask
    cute = pytest.importorskip("cutlass.cute")
    found = {}

    @cute.jit
    def build():
        _sample_cute(found)

    build()
    return found


@pytest.mark.parametrize(("mode", "major", "bits"), [c for c in CASES if not (c[1] == "K" and c[0] == "128B_32B")])
def test_addresses_are_those_of_cutes_canonical_layouts(cute_layouts, mode, major, bits):
    text, k, sampled = cute_layouts[mode, major, bits]
    size = bits // 8
    bit_count, base, shift = (int(v) for v in text[text.index("<") + 1 : text.index(">")].split(","))
    mask = ((1 << bit_count) - 1) << base
    # evaluating the composed layout applies the swizzle to element numbers; it belongs to byte addresses
    index = {point: value ^ (value >> shift & mask) for point, value in sampled.items()}

    def address(point, start):
        linear = start + index[point] * size
        return linear ^ (linear >> shift & mask)

    unit, span = 128 // bits, swizzle_span(mode) * 8 // bits
    if major == "K":
        leading = index.get((0, unit), 0) if mode == "none" else 0
        stride = index[8, 0]
    elif mode == "none":
        leading, stride = index[0, 8], index[unit, 0]
    else:
        leading, stride = index[span, 0], index[0, 4 if bits == 32 else 8]
    desc = MatrixDescriptor(4096, leading * size, stride * size, mode)
    got = operand_addresses(desc, 256, k * size, major, bits)
    for row, column in index:
        assert got[row, column * size] == address((row, column), 4096), (row, column)
    assert not matrix_problems(desc, 256, k * size, major, bits)


@pytest.mark.parametrize("mode", MODES)
def test_descriptors_round_trip(mode):
    rng = np.random.default_rng(2)
    for _ in range(200):
        fields = [int(v) * 16 for v in rng.integers(0, 1 << 14, 3)]
        base = int(rng.integers(0, 8))
        desc = MatrixDescriptor(*fields, mode, base)
        assert decode_tcgen05(encode_tcgen05(desc)) == desc
        assert decode_wgmma(encode_wgmma(desc)) == desc._replace(version=0)
    wide = MatrixDescriptor((1 << 15) * 16 - 16, 16, 1024, mode, leading_absolute=True, k_segment=1)
    assert decode_tcgen05(encode_tcgen05(wide, "sm_107a"), "sm_107a") == wide
    assert decode_tcgen05(encode_tcgen05(wide, "sm_100a")).start < 1 << 18


def test_descriptor_fields_sit_where_the_isa_puts_them():
    # version 1, 128-byte swizzle, SBO 1024, LBO 16, start 0x8400: the constant of CUTLASS' K-major SW128 kernels
    assert decode_tcgen05(0x4000404000010840) == MatrixDescriptor(0x8400, 16, 1024, "128B")
    assert decode_wgmma(0x4000004000010840) == MatrixDescriptor(0x8400, 16, 1024, "128B", version=0)
    assert decode_tcgen05(3 << 61).swizzle == "invalid3"


def test_illegal_operands_are_named():
    good = MatrixDescriptor(1024, 16, 1024, "128B")
    assert matrix_problems(good, 128, 32) == []
    assert matrix_problems(good._replace(start=1024 + 96), 128, 32) == []
    assert "0x40000" in matrix_problems(good._replace(start=(1 << 18) - 1024), 128, 32)[0]
    assert "0b001" in matrix_problems(good._replace(version=0), 128, 32)[0]
    assert "not defined" in matrix_problems(decode_tcgen05(5 << 61), 128, 32)[0]
    assert "32B atoms" in matrix_problems(good, 128, 64, "MN", 32)[0]
    assert "do not exist" in matrix_problems(good, 128, 32, "MN", 4)[0]
    assert "wgmma" in matrix_problems(good, 64, 32, "MN", 8, "wgmma")[0]


# value, kind, architecture, expected fields: descriptors that CuTe DSL kernels were compiled to
COMPILED = [
    (0x08200010, "f16", "sm_100a", {"m": 128, "n": 128, "k": 16, "a_format": "f16", "accumulator": "f32"}),
    (0x28200010, "f8f6f4", "sm_107a", {"m": 128, "n": 128, "k": 64, "a_format": "e4m3", "b_format": "e4m3"}),
    (0x08200010, "f8f6f4", "sm_107a", {"m": 128, "n": 128, "k": 32}),
]


@pytest.mark.parametrize(("value", "kind", "arch", "expected"), COMPILED)
def test_instruction_descriptors_of_compiled_kernels(value, kind, arch, expected):
    desc = decode_instruction(value, kind, arch)
    assert {k: getattr(desc, k) for k in expected} == expected
    assert encode_instruction(desc, arch) == value
    assert instruction_problems(desc) == []


def _descriptors():
    base = {"a_major": "K", "b_major": "MN", "a_negate": True}
    for m, n in ((64, 8), (128, 256), (256, 192)):
        yield InstructionDescriptor("f16", m, n, 16, "bf16", "f16", "f32", **base)
        yield InstructionDescriptor("tf32", m, n, 8, "tf32", "tf32", "f32", max_shift=2)
        yield InstructionDescriptor("i8", m, n, 32, "s8", "u8", "s32", saturate=True)
        yield InstructionDescriptor("f8f6f4", m, n, 64, "e2m3", "e2m1", "f16", sparse=True, sparsity_id=2)
    for scale, k in (("ue8m0", 64), ("ue4m3", 96)):
        yield InstructionDescriptor("mxf4nvf4", 128, 64, k, "e2m1", "e2m1", "f32", scale_format=scale, a_scale_id=2)
    yield InstructionDescriptor("mxf8f6f4", 256, 64, 32, "e5m2", "e3m2", "f32", scale_format="ue8m0", b_scale_id=3)
    yield InstructionDescriptor("mxf4", 256, 64, 64, "e2m1", "e2m1", "f32", scale_format="ue8m0")


@pytest.mark.parametrize("desc", list(_descriptors()), ids=lambda d: f"{d.kind}-{d.m}-{d.k}")
def test_instruction_descriptors_round_trip(desc):
    arch = "sm_103a" if desc.k == 96 else "sm_100a"
    assert decode_instruction(encode_instruction(desc, arch), desc.kind, arch) == desc


def test_sm_107_descriptors_round_trip():
    for desc in (
        InstructionDescriptor("mxf4nvf4", 128, 64, 128, "e2m1", "e2m1", "f32", scale_format="ue5m3"),
        InstructionDescriptor("mxf8f6f4", 128, 64, 64, "e4m3", "e4m3", "f32", scale_format="ue8m0", scale_layout=1),
        InstructionDescriptor("f8f6f4", 128, 64, 64, "e4m3", "e5m2", "f32"),
    ):
        assert decode_instruction(encode_instruction(desc, "sm_107a"), desc.kind, "sm_107a") == desc


def test_illegal_instructions_are_named():
    desc = InstructionDescriptor("f16", 128, 128, 16, "f16", "f16", "f32")
    assert instruction_problems(desc) == []
    assert instruction_problems(desc._replace(m=64, n=8)) == []
    assert instruction_problems(desc._replace(n=8)) == []
    assert "M=128 N=12" in instruction_problems(desc._replace(n=12))[0]
    assert "N=24" in instruction_problems(desc._replace(m=256, n=24), cta_group=2)[0]
    assert "M=256" in instruction_problems(desc._replace(m=256))[0]
    assert instruction_problems(desc._replace(m=256), cta_group=2) == []
    assert "bf16" in instruction_problems(desc._replace(a_format="bf16", accumulator="f16"))[0]
    assert "format code 7" in instruction_problems(decode_instruction(7 << 7 | 1 << 4 | 8 << 24 | 16 << 17, "f16"))[0]
    fp4 = InstructionDescriptor("mxf4", 128, 64, 64, "e2m1", "e2m1", "f32", a_major="MN", scale_format="ue8m0")
    assert "MN-major" in instruction_problems(fp4)[0]
    integer = InstructionDescriptor("i8", 128, 64, 32, "s8", "s8", "f32", a_negate=True)
    assert len(instruction_problems(integer)) == 2


def test_what_only_newer_targets_define_is_named():
    ultra = InstructionDescriptor("mxf4nvf4", 128, 64, 96, "e2m1", "e2m1", "f32", scale_format="ue4m3", a_scale_id=2)
    assert instruction_problems(ultra, vector=16) == []
    assert "id 2" in instruction_problems(ultra._replace(k=64), vector=16)[0]
    assert "id 1" in instruction_problems(ultra._replace(a_scale_id=1), vector=16)[0]
    assert "M=256" in instruction_problems(ultra, cta_group=2, vector=16)[0]
    old = decode_instruction(encode_instruction(ultra, "sm_103a"), "mxf4nvf4", "sm_100a")
    assert "undefined K" in instruction_problems(old)[0]
    far = MatrixDescriptor(1024 + 96, 1 << 15, 1024, "128B", leading_absolute=True)
    assert matrix_problems(far, 128, 48, "K", 4) == []
    for change in ({"swizzle": "64B"}, {"base_offset": 1}):
        assert "absolute" in matrix_problems(far._replace(**change), 128, 48, "K", 4)[0]
    assert "absolute" in matrix_problems(far, 128, 32, "MN", 16)[0]


def _tiled(m):
    return TensorMap(
        m["address"],
        DRIVER_TYPES[m["dtype"]],
        tuple(m["dims"]),
        tuple(m["strides"]),
        tuple(m["box"]),
        tuple(m["element_strides"]),
        m["interleave"],
        MODES[m["swizzle"]],
        m["l2"],
        bool(m["oob"]),
    )


def test_tensor_maps_are_those_of_the_driver():
    for m in MAPS["tiled"]:
        data, tensor_map = bytes.fromhex(m["hex"]), _tiled(m)
        assert decode_tensor_map(data) == tensor_map
        assert encode_tensor_map(tensor_map)[:64] == data
        assert len(encode_tensor_map(tensor_map)) == 128
        assert tensor_map_problems(tensor_map) == []


def test_im2col_tensor_maps_are_those_of_the_driver():
    for m in MAPS["im2col"]:
        expected = TensorMap(
            m["address"],
            DRIVER_TYPES[m["dtype"]],
            tuple(m["dims"]),
            tuple(m["strides"]),
            (m["channels"],),
            tuple(m["element_strides"]),
            0,
            MODES[m["swizzle"]],
            m["l2"],
            bool(m["oob"]),
            tuple(m["lower"]),
            tuple(m["upper"]),
            m["pixels"],
        )
        data = bytes.fromhex(m["hex"])
        assert decode_tensor_map(data) == expected
        assert encode_tensor_map(expected)[:64] == data
        assert decode_tensor_map(data).im2col


@pytest.mark.parametrize("kind", ["u4", "u4_padded", "u6_padded", "tf32", "bf16"])
def test_tensor_maps_round_trip(kind):
    m = TensorMap(1 << 40, kind, (1024, 64), (4096,), (64, 32), (1, 1), swizzle="128B_32B", nan_fill=True)
    assert decode_tensor_map(encode_tensor_map(m)) == m


def test_tensor_maps_of_compiled_sm_100_host_code():
    """tf32 MN-major and packed fp4 operands, as the host function of a public GEMM example packs them (address cleared)."""
    tf32 = "0000000000000000a2632d004000000000200000000000000000000000000000ff0000007f0000000000000000000000000000000000001f1f"
    fp4 = "0000000000000000a26504000800000000080000000000000000000000000000ff000000ff000000000000000000000000000000000000ff7f"
    assert decode_tensor_map(bytes.fromhex(tf32 + "00" * 7)) == TensorMap(
        0, "tf32", (256, 128, 1), (1024, 131072), (32, 32, 1), (1, 1, 1), swizzle="128B_32B", l2=2
    )
    assert decode_tensor_map(bytes.fromhex(fp4 + "00" * 7)) == TensorMap(
        0, "u4", (256, 256, 1), (128, 32768), (256, 128, 1), (1, 1, 1), swizzle="128B", l2=2
    )


def test_illegal_tensor_maps_are_named():
    m = TensorMap(1 << 40, "f16", (1024, 64), (2048,), (64, 32), (1, 1), swizzle="128B")
    assert tensor_map_problems(m) == []
    assert "swizzle span" in tensor_map_problems(m._replace(box=(128, 32)))[0]
    assert "multiple of 16" in tensor_map_problems(m._replace(address=8))[0]
    assert "stride" in tensor_map_problems(m._replace(strides=(2056,)))[0]
    assert "box extent 512" in tensor_map_problems(m._replace(box=(64, 512)))[0]
    assert "16 bytes" in tensor_map_problems(m._replace(box=(4, 32)))[0]
    with pytest.raises(ValueError, match="type code"):
        decode_tensor_map(b"\xff" * 128)


def _build_cute_descriptors(found):
    """Called inside a jit function: (expected fields, value, architecture) of CuTe DSL's own descriptor builders."""
    import cutlass
    from cutlass.experimental.primitives import descriptors as d

    types = {
        "f16": cutlass.Float16,
        "bf16": cutlass.BFloat16,
        "tf32": cutlass.Float32,
        "s8": cutlass.Int8,
        "u8": cutlass.Uint8,
        "e4m3": cutlass.Float8E4M3FN,
        "e5m2": cutlass.Float8E5M2,
        "e2m3": cutlass.Float6E2M3FN,
        "e3m2": cutlass.Float6E3M2FN,
        "e2m1": cutlass.Float4E2M1FN,
    }
    accumulators = {"f16": cutlass.Float16, "f32": cutlass.Float32, "s32": cutlass.Int32}
    plain = [("f16", "f16", "f16", "f32"), ("f16", "bf16", "bf16", "f32"), ("f16", "f16", "f16", "f16")]
    plain += [("tf32", "tf32", "tf32", "f32"), ("i8", "s8", "s8", "s32"), ("i8", "u8", "u8", "s32")]
    plain += [("f8f6f4", a, b, "f32") for a, b in (("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2"))]
    for i, (kind, a, b, c) in enumerate(plain):
        fields = {"m": (64, 128, 256)[i % 3], "n": 8 * (i + 1), "a_negate": bool(i & 1), "b_negate": bool(i & 2)}
        major = {"a_major": i >> 1 & 1, "b_major": i & 1}
        built = d.Tcgen05InstrDesc.build(
            a_dtype=types[a],
            b_dtype=types[b],
            c_dtype=accumulators[c],
            n_dim=fields["n"],
            m_dim=fields["m"],
            a_negate=int(fields["a_negate"]),
            b_negate=int(fields["b_negate"]),
            **major,
        )
        names = {key: "MN" if value else "K" for key, value in major.items()}
        found.append(
            ({"kind": kind, "a_format": a, "b_format": b, "accumulator": c, **fields, **names}, built.value, "sm_100a")
        )
    for i, (a, b) in enumerate((("e4m3", "e5m2"), ("e2m1", "e3m2"), ("e2m3", "e4m3"))):
        built = d.Tcgen05MxInstrDesc.build(
            a_dtype=types[a], b_dtype=types[b], scale_format=1, n_dim=64, m_dim=256, a_sf_id=i, b_sf_id=3 - i, k_dim=1
        )
        fields = {"kind": "mxf8f6f4", "a_format": a, "b_format": b, "m": 256, "n": 64, "scale_format": "ue8m0"}
        found.append(({**fields, "a_scale_id": i, "b_scale_id": 3 - i, "k": 64}, built.value, "sm_107a"))
        found.append(({**fields, "k": 32}, built.value & 0x7FFFFFFF, "sm_100a"))
    for k_dim, k in ((0, 64), (1, 96), (2, 128)):
        built = d.Tcgen05MxOmmaInstrDesc.build(n_dim=128, m_dim=128, k_dim=k_dim, scale_format=2 * (k_dim == 2))
        fields = {"kind": "mxf4nvf4", "a_format": "e2m1", "b_format": "e2m1", "m": 128, "n": 128, "k": k}
        scale = "ue5m3" if k_dim == 2 else "ue4m3"
        found.append(({**fields, "scale_format": scale}, built.value, "sm_107a"))


@pytest.fixture(scope="module")
def cute_descriptors():
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")
    cute = pytest.importorskip("cutlass.cute")
    found = []

    @cute.jit
    def build():
        _build_cute_descriptors(found)

    build()
    return found


def test_instruction_descriptors_decode_as_cute_dsl_builds_them(cute_descriptors):
    assert len(cute_descriptors) == 18
    for fields, value, arch in cute_descriptors:
        desc = decode_instruction(value & 0xFFFFFFFF, fields["kind"], arch)
        assert {name: getattr(desc, name) for name in fields} == fields
        encoded = encode_instruction(desc, arch)
        assert encoded == value & 0xFFFFFFFF & ~(1 << 12 if fields["kind"] == "mxf4nvf4" else 0)  # sparsity version

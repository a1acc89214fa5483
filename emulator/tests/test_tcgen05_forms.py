"""Forms of tcgen05.mma that no recorded kernel uses, in hand-written kernels against numpy."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator._floats import table
from ptx_emulator._fragments import zero_column_mask
from ptx_emulator._layout import InstructionDescriptor, encode_instruction

T = runpy.run_path(str(Path(__file__).with_name("_tensor_core.py")))
run, descriptor, kinds = T["run"], T["descriptor"], T["S"]["kinds"]
M, N = 128, 32
PAIR = ".param .u64 in, .param .u64 out"
BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}
RANGES = {"e4m3": (0, 0x50), "e5m2": (0x30, 0x48), "e2m3": (0, 0x20), "e3m2": (0, 0x20), "e2m1": (0, 8)}


def random_codes(rng, shape, name):
    """Codes of small finite numbers, so that sums are exact in float32."""
    low, high = RANGES[name]
    sign = 1 << (BITS[name] - 1)
    return (rng.integers(low, high, shape) | sign * rng.integers(0, 2, shape)).astype(np.uint8)


def padded(codes, name):
    """Sixteen codes at the start of every 16 bytes, low bits first; the rest is filled with ones."""
    rows, bits = len(codes), BITS[name]
    out = np.full((rows, codes.shape[1] // 16, 16), 0xFF, np.uint8)
    for row in range(rows):
        for group in range(codes.shape[1] // 16):
            number = sum(int(c) << bits * i for i, c in enumerate(codes[row, 16 * group : 16 * group + 16]))
            out[row, group, : 2 * bits] = np.frombuffer(number.to_bytes(2 * bits, "little"), np.uint8)
    return out.reshape(rows, -1)


def cores(rows):
    """No swizzle: 8 rows by 16 bytes contiguous, then along K, then along the rows. Strides: 128 and 8 * bytes of a row."""
    return rows.reshape(len(rows) // 8, 8, -1, 16).transpose(0, 2, 1, 3).reshape(-1)


def mma(kind, a, b, idesc, enable=0, words="", tail="", scales=""):
    a_operand = a if a.startswith("[") else "%rd20"
    load = "" if a.startswith("[") else f"mov.b64 %rd20, {a};"
    return f"""{load} mov.b64 %rd21, {b}; mov.b32 %r30, {encode_instruction(idesc)}; mov.pred %p6, {enable};
 tcgen05.mma{words}.cta_group::1.kind::{kind} [%r21], {a_operand}, %rd21, %r30, {scales}%p6{tail};"""


def unpacked(codes, name):
    """One code a byte, as f8f6f4 reads it from tensor memory: 4 bits from bit 2, 6 bits from bit 1."""
    return (codes << {"e2m1": 2, "e2m3": 1, "e3m2": 1}.get(name, 0)).astype(np.uint8)


NARROW = [("e2m3", "e3m2"), ("e3m2", "e2m1"), ("e2m1", "e4m3"), ("e5m2", "e2m3"), ("e2m1", "e2m1")]


@pytest.mark.parametrize(("a_name", "b_name"), NARROW)
@pytest.mark.parametrize("in_tensor", [False, True])
def test_four_and_six_bit_operands_of_f8f6f4(a_name, b_name, in_tensor):
    rng = np.random.default_rng(1)
    a, b = random_codes(rng, (M, 32), a_name), random_codes(rng, (N, 32), b_name)
    tensor = np.zeros((128, 64), np.uint32)
    tensor[:, N : N + 8] = unpacked(a, a_name).view(np.uint32)
    image = np.concatenate((cores(padded(a, a_name)), cores(padded(b, b_name))))
    idesc = InstructionDescriptor("f8f6f4", M, N, 32, a_name, b_name, "f32")
    left = "[%r31]" if in_tensor else str(descriptor(0, 128, 256))
    text = f"add.u32 %r31, %r21, {N};" + mma("f8f6f4", left, descriptor(M * 32, 128, 256), idesc)
    out, report = run(text, image, tensor)
    assert not report.findings
    np.testing.assert_array_equal(out[:, :N].view(np.float32), table(a_name)[a] @ table(b_name)[b].T)


def test_six_bit_operands_with_block_scales_and_a_swizzle():
    rng = np.random.default_rng(2)
    a, b = random_codes(rng, (M, 128), "e3m2"), random_codes(rng, (N, 128), "e2m3")
    sa, sb = rng.integers(125, 130, (M, 4)), rng.integers(125, 130, (N, 4))
    ultra = runpy.run_path(str(Path(__file__).with_name("test_ultra.py")))
    image = np.concatenate([ultra["swizzled"](padded(c, n)).reshape(-1) for c, n in ((a, "e3m2"), (b, "e2m3"))])
    tensor = np.zeros((128, 64), np.uint32)
    tensor[:, N : N + 4], tensor[:, N + 4 : N + 8] = T["scale_image"](sa), T["scale_image"](sb)
    text = f"add.u32 %r31, %r21, {N}; add.u32 %r32, %r21, {N + 4};"
    for step in range(4):
        idesc = InstructionDescriptor(
            "mxf8f6f4", M, N, 32, "e3m2", "e2m3", "f32", scale_format="ue8m0", a_scale_id=step, b_scale_id=step
        )
        operands = [descriptor(start + 32 * step, 16, 1024, "128B") for start in (0, M * 128)]
        text += mma(
            "mxf8f6f4.block_scale.scale_vec::1X",
            str(operands[0]),
            operands[1],
            idesc,
            int(step > 0),
            scales="[%r31], [%r32], ",
        )
    out, report = run(text, image, tensor)
    assert not report.findings
    left, right = (table(n)[c] * np.repeat(np.exp2(s - 127.0), 32, 1) for c, n, s in ((a, "e3m2", sa), (b, "e2m3", sb)))
    np.testing.assert_array_equal(out[:, :N].view(np.float32), left @ right.T)


def test_packed_fp4_a_in_tensor_memory():
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 16, (M, 64)).astype(np.uint8), rng.integers(0, 16, (N, 64)).astype(np.uint8)
    tensor = np.zeros((128, 64), np.uint32)
    tensor[:, N : N + 8] = T["packed"](a).view(np.uint32)
    tensor[:, N + 8 : N + 16] = 0x80808080  # a factor of two each
    idesc = InstructionDescriptor("mxf4", M, N, 64, "e2m1", "e2m1", "f32", scale_format="ue8m0", a_scale_id=2)
    text = f"add.u32 %r31, %r21, {N}; add.u32 %r32, %r21, {N + 8}; add.u32 %r33, %r21, {N + 12};" + mma(
        "mxf4.block_scale.block32", "[%r31]", descriptor(0, 128, 256), idesc, scales="[%r32], [%r33], "
    )
    out, report = run(text, cores(T["packed"](b)), tensor, "sm_103a")
    assert not report.findings
    np.testing.assert_array_equal(out[:, :N].view(np.float32), 4 * (T["E2M1"][a] @ T["E2M1"][b].T))


def halves(rng, rows):
    return rng.integers(-4, 5, (rows, 16)).astype(np.float16)


def image_of(*matrices):
    return np.concatenate([cores(m.view(np.uint8)) for m in matrices])


def ws_places(m, n):
    """(lane, column) of D [m, n]: layouts D, E and G of the ISA - the columns in parts, each in lanes of its own."""
    parts = 128 // m
    row, column = np.arange(m)[:, None], np.arange(n)[None, :]
    return row + m * (column // (n // parts)), column % (n // parts) + 0 * row


@pytest.mark.parametrize(("m", "n"), [(32, 64), (32, 256), (64, 128), (128, 64)])
@pytest.mark.parametrize("in_tensor", [False, True])
def test_weight_stationary_accumulators_lie_side_by_side(m, n, in_tensor):
    rng = np.random.default_rng(4)
    a, b = halves(rng, m), halves(rng, n)
    columns = 256 if n == 256 else 128
    tensor = rng.integers(-8, 9, (128, columns)).astype(np.float32).view(np.uint32)
    tensor[:, columns - 8 :] = np.tile(a, (128 // m, 1)).view(np.uint32)
    before = tensor.copy()
    idesc = InstructionDescriptor("f16", m, n, 16, "f16", "f16", "f32")
    left = "[%r31]" if in_tensor else str(descriptor(0, 128, 256))
    text = f"add.u32 %r31, %r21, {columns - 8};" + mma("f16", left, descriptor(m * 32, 128, 256), idesc, 1, ".ws")
    out, report = run(text, image_of(a, b), tensor)
    assert not report.findings
    lane, column = ws_places(m, n)
    expected = before.view(np.float32).copy()
    expected[lane, column] += a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_array_equal(out.view(np.float32), expected)


def test_a_shape_that_ws_does_not_have_is_found():
    idesc = InstructionDescriptor("f16", 64, 32, 16, "f16", "f16", "f32")
    text = mma("f16", str(descriptor(0, 128, 256)), descriptor(64 * 32, 128, 256), idesc, 0, ".ws")
    rng = np.random.default_rng(4)
    report = run(text, image_of(halves(rng, 64), halves(rng, 32)), np.zeros((128, 32), np.uint32))[1]
    assert kinds(report) == {"descriptor"}


def zero_mask(start=(0, 0, 0, 0), first=(0, 0, 0, 0), skip=2, use=3, shift=0, on=1):
    value = sum(s << 8 * i | f << 32 + i for i, (s, f) in enumerate(zip(start, first, strict=True)))
    return value | on << 39 | skip << 40 | use << 48 | shift << 56


# the examples of the ISA: bit 0 is the rightmost character
@pytest.mark.parametrize(
    ("m", "fields", "parts"),
    [
        (128, {}, ["11100001110000"]),
        (64, {"first": (1, 0, 0, 0)}, ["11100001110000111", "00001110000"]),
        (32, {"start": (0, 1, 2, 1), "first": (1, 1, 0, 0), "shift": 2}, ["00001110000111", "0000111000011", "111000011100", "1110000111000"]),
        (128, {"on": 0}, ["000000000000000"]),
    ],
)  # fmt: skip
def test_zero_column_masks_are_those_of_the_isa(m, fields, parts):
    mask, shift = zero_column_mask(zero_mask(**fields), m, 128)
    assert shift == fields.get("shift", 0)
    size = 128 // {128: 1, 64: 2, 32: 4}[m]
    for number, part in enumerate(parts):
        bits = mask[number * size : number * size + len(part)]
        assert "".join("01"[int(b)] for b in bits[::-1]) == part


def test_zero_columns_and_a_column_shift():
    rng = np.random.default_rng(5)
    a, b = halves(rng, M), halves(rng, 72)
    idesc = InstructionDescriptor("f16", M, 64, 16, "f16", "f16", "f32", max_shift=1)
    text = f"mov.b64 %rd22, {zero_mask(shift=8)};" + mma(
        "f16", str(descriptor(0, 128, 256)), descriptor(M * 32, 128, 256), idesc, 0, ".ws", ", %rd22"
    )
    out, report = run(text, image_of(a, b), np.zeros((128, 64), np.uint32))
    assert not report.findings
    zero = np.arange(64) % 7 >= 4
    np.testing.assert_array_equal(out.view(np.float32), a.astype(np.float32) @ np.where(zero[:, None], 0, b[8:]).T)
    unset = text.replace(str(encode_instruction(idesc)), str(encode_instruction(idesc._replace(max_shift=0))))
    assert kinds(run(unset, image_of(a, b), np.zeros((128, 64), np.uint32))[1]) == {"descriptor"}


def test_the_accumulator_is_scaled_down():
    rng = np.random.default_rng(6)
    a, b = halves(rng, M), halves(rng, N)
    tensor = rng.integers(-64, 65, (128, N)).astype(np.float32)
    idesc = InstructionDescriptor("f16", M, N, 16, "f16", "f16", "f32")
    text = mma("f16", str(descriptor(0, 128, 256)), descriptor(M * 32, 128, 256), idesc, 1, tail=", 3")
    out, report = run(text, image_of(a, b), tensor.view(np.uint32))
    assert not report.findings
    np.testing.assert_array_equal(out.view(np.float32), a.astype(np.float32) @ b.astype(np.float32).T + tensor / 8)


@pytest.mark.parametrize(("name", "source"), [("e3m2", "b6x16_p32"), ("e2m1", "b4x16_p64")])
def test_a_copy_decompresses_for_the_multiplication_after_it(name, source):
    rng = np.random.default_rng(7)
    a, b = random_codes(rng, (M, 32), name), random_codes(rng, (N, 32), "e4m3")
    image = np.concatenate((cores(padded(a, name)), cores(b)))
    idesc = InstructionDescriptor("f8f6f4", M, N, 32, name, "e4m3", "f32")
    text = f"""mov.b64 %rd22, {descriptor(0, 128, 256)}; add.u32 %r31, %r21, {N};
 tcgen05.cp.cta_group::1.128x256b.b8x16.{source} [%r31], %rd22;""" + mma(
        "f8f6f4", "[%r31]", descriptor(M * 32, 128, 256), idesc
    )
    out, report = run(text, image, np.zeros((128, 64), np.uint32))
    assert not report.findings
    np.testing.assert_array_equal(out[:, N : N + 8], unpacked(a, name).view(np.uint32))
    np.testing.assert_array_equal(out[:, :N].view(np.float32), table(name)[a] @ table("e4m3")[b].T)


@pytest.mark.parametrize("lane", [0, 31])
def test_four_rows_are_copied_to_one_lane_of_every_quarter(lane):
    rng = np.random.default_rng(8)
    rows = rng.integers(0, 256, (8, 32)).astype(np.uint8)  # the matrix is the first four
    text = f"mov.b64 %rd22, {descriptor(0, 128, 256)}; add.u32 %r31, %r21, {(lane << 16) + 8}; tcgen05.cp.cta_group::1.4x256b [%r31], %rd22;"
    tensor = rng.integers(0, 1 << 32, (128, 32), dtype=np.uint32)
    out, report = run(text, cores(rows), tensor)
    assert not report.findings
    expected = tensor.copy()
    expected[lane::32, 8:16] = rows[:4].view(np.uint32)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("form", "kind"), [("min.u32", np.uint32), ("max.s32", np.int32), ("max.abs.f32", np.float32), ("min.f32", np.float32),
                                            ("max.NaN.f32", np.float32)])  # fmt: skip
@pytest.mark.parametrize("strict", [False, True])
def test_a_load_reduces_over_the_columns_of_a_lane(form, kind, strict):
    rng = np.random.default_rng(9)
    values = (
        rng.standard_normal((32, 4)).astype(np.float32)
        if kind is np.float32
        else rng.integers(0, 1 << 32, (32, 4), dtype=np.uint32)
    )
    values = values.view(np.uint32)
    if kind is np.float32:
        values[3, 1] = 0x7FC00000
    out = np.zeros((32, 5), np.uint32)
    body = f"""ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.b32 %r2, smem; mov.u32 %r1, %tid.x;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32; ld.shared.b32 %r3, [%r2]; mul.wide.u32 %rd3, %r1, 16; add.s64 %rd1, %rd1, %rd3;
 mul.wide.u32 %rd3, %r1, 20; add.s64 %rd2, %rd2, %rd3; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd1];
 tcgen05.st.sync.aligned.32x32b.x4.b32 [%r3], {{%r4, %r5, %r6, %r7}}; tcgen05.wait::st.sync.aligned;
 tcgen05.ld.red.sync.aligned.32x32b.x4.{form} {{%r10, %r11, %r12, %r13}}, %r14, [%r3]; tcgen05.wait::ld.sync.aligned;
 st.global.b32 [%rd2], %r10; st.global.b32 [%rd2+4], %r11; st.global.b32 [%rd2+8], %r12; st.global.b32 [%rd2+12], %r13; st.global.b32 [%rd2+16], %r14;
 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;"""
    report = T["S"]["launch"](body, [values, out], PAIR, shared=16, target="sm_103a", strict=strict)
    assert not report.findings
    np.testing.assert_array_equal(out[:, :4], values)
    typed = values.view(kind)
    if form == "max.abs.f32":
        expected = np.nanmax(np.abs(typed), axis=1)
    elif form == "max.NaN.f32":
        expected = typed.max(axis=1)
    else:
        expected = (np.nanmin if form.startswith("min") else np.nanmax)(typed, axis=1)
    np.testing.assert_array_equal(out[:, 4].view(kind), expected)
    assert form != "max.NaN.f32" or out[3, 4] == 0x7FFFFFFF
    hasty = body.replace(
        "tcgen05.wait::ld.sync.aligned;", "st.global.b32 [%rd2+16], %r14; tcgen05.wait::ld.sync.aligned;"
    )
    if strict:
        assert kinds(T["S"]["launch"](hasty, [values, out], PAIR, shared=16, target="sm_103a", strict=True)) == {
            "uncommitted"
        }


def sparse_rows(rng, rows, k, chunk):
    """(nibbles [rows, chunks], dense positions of the stored elements): two of four, two pairs of eight, or one of two."""
    if chunk == 2:
        nibbles = rng.choice([0b0100, 0b1110], (rows, k // 2))
        return nibbles, 2 * np.arange(k // 2)[None, :] + (nibbles == 0b1110)
    nibbles = rng.choice([0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110], (rows, k // chunk))
    where = np.stack((nibbles & 3, nibbles >> 2), axis=-1)
    if chunk == 8:
        where = (2 * where[..., None] + np.arange(2)).reshape(rows, k // 8, 4)
    return nibbles, (where + chunk * np.arange(k // chunk)[None, :, None]).reshape(rows, -1)


def metadata_image(nibbles, narrow):
    """Columns of tensor memory. Narrow types: lane r has the chunks of row r, eight a word. Others: of 16 lanes eight have the
    first half of K and eight the second, of row r in the low and of row r + 8 in the high half of the word."""
    words = np.zeros((128, 2 if narrow else 1), np.uint32)
    for row, chunks in enumerate(nibbles.tolist()):
        for index, code in enumerate(chunks):
            if narrow:
                words[row, index // 8] |= np.uint32(code << 4 * (index % 8))
            else:
                lane = row // 16 * 16 + row % 8 + 8 * (index // 4)
                words[lane, 0] |= np.uint32(code << 4 * (index % 4) + 16 * (row // 8 % 2))
    return words


def operand(rng, rows, k, name):
    """(bytes in shared memory, bytes in tensor memory, values) of a random matrix."""
    if name in BITS:
        codes = random_codes(rng, (rows, k), name)
        return (codes if BITS[name] == 8 else padded(codes, name)), unpacked(codes, name), table(name)[codes]
    values = rng.integers(-4, 5, (rows, k))
    if name in ("s8", "u8"):
        values = values if name == "s8" else values + 4
        raw = values.astype(np.int8 if name == "s8" else np.uint8).view(np.uint8)
    elif name == "bf16":
        raw = np.ascontiguousarray((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    else:
        raw = values.astype(np.float16 if name == "f16" else np.float32).view(np.uint8)
    return raw, raw, values.astype(np.float32)


SPARSE = [
    ("f16", "f16", 32, 4),
    ("f16", "bf16", 32, 4),
    ("tf32", "tf32", 16, 2),
    ("i8", "s8", 64, 4),
    ("f8f6f4", "e4m3", 64, 4),
    ("f8f6f4", "e3m2", 64, 4),
]


@pytest.mark.parametrize(("kind", "name", "k", "chunk"), SPARSE, ids=[f"{c[0]}-{c[1]}" for c in SPARSE])
@pytest.mark.parametrize("in_tensor", [False, True])
def test_sparse_a(kind, name, k, chunk, in_tensor):
    rng = np.random.default_rng(10)
    (a, held, left), (b, _, right) = operand(rng, M, k // 2, name), operand(rng, N, k, name)
    nibbles, where = sparse_rows(rng, M, k, chunk)
    dense = np.zeros((M, k), np.float32)
    np.put_along_axis(dense, where, left, axis=1)
    wide, narrow = kind in ("f16", "tf32"), kind not in ("f16", "tf32")
    whole = kind == "i8"
    for selector in range(2 if wide else 1):
        tensor = np.zeros((128, 64), np.uint32)
        tensor[:, N : N + held.shape[1] // 4] = held.view(np.uint32)
        meta = N + 16
        image = metadata_image(nibbles, narrow)
        tensor[:, meta + selector : meta + selector + image.shape[1]] = image
        idesc = InstructionDescriptor(
            kind, M, N, k, name, name, "s32" if whole else "f32", sparse=True, sparsity_id=selector
        )
        place = "[%r31]" if in_tensor else str(descriptor(0, 128, 8 * a.shape[1]))
        setup = f"add.u32 %r31, %r21, {N}; add.u32 %r32, %r21, {meta};"
        text = setup + mma(kind, place, descriptor(a.size, 128, 8 * b.shape[1]), idesc, words=".sp").replace(
            "%rd21, %r30", "%rd21, [%r32], %r30"
        )
        out, report = run(text, np.concatenate((cores(a), cores(b))), tensor)
        assert not report.findings
        np.testing.assert_array_equal(
            out[:, :N].view(np.int32 if whole else np.float32), (dense.astype(np.float64) @ right.T).astype(np.float32)
        )


@pytest.mark.parametrize(
    ("kind", "vec", "vector", "name"),
    [("mxf4", "block32", 64, "e2m1"), ("mxf4nvf4", "block16", 32, "e2m1"), ("mxf8f6f4", "block32", 64, "e5m2")],
)
def test_sparse_a_with_block_scales(kind, vec, vector, name):
    rng, k = np.random.default_rng(11), 64 if kind == "mxf8f6f4" else 128
    packed = kind != "mxf8f6f4"
    codes_a, codes_b = (random_codes(rng, (rows, depth), name) for rows, depth in ((M, k // 2), (N, k)))
    left, right = table(name)[codes_a], table(name)[codes_b]
    a, b = (T["packed"](c) if packed else c for c in (codes_a, codes_b))
    nibbles, where = sparse_rows(rng, M, k, 8 if packed else 4)
    dense = np.zeros((M, k))
    np.put_along_axis(dense, where, left.astype(np.float64), axis=1)
    sa, sb = rng.integers(126, 129, (M, k // vector)), rng.integers(126, 129, (N, k // vector))
    tensor = np.zeros((128, 64), np.uint32)
    tensor[:, N : N + 4], tensor[:, N + 4 : N + 8] = T["scale_image"](sa), T["scale_image"](sb)
    tensor[:, N + 8 : N + 10] = metadata_image(nibbles, True)
    idesc = InstructionDescriptor(kind, M, N, k, name, name, "f32", sparse=True, scale_format="ue8m0")
    text = f"add.u32 %r31, %r21, {N}; add.u32 %r32, %r21, {N + 4}; add.u32 %r33, %r21, {N + 8};" + mma(
        f"{kind}.block_scale.{vec}",
        str(descriptor(0, 128, 8 * a.shape[1])),
        descriptor(a.size, 128, 8 * b.shape[1]),
        idesc,
        words=".sp",
        scales="[%r31], [%r32], ",
    ).replace("%rd21, %r30", "%rd21, [%r33], %r30")
    out, report = run(text, np.concatenate((cores(a), cores(b))), tensor, "sm_103a")
    assert not report.findings
    factors = [np.repeat(np.exp2(s - 127.0), vector, 1) for s in (sa, sb)]
    np.testing.assert_array_equal(
        out[:, :N].view(np.float32), ((dense * factors[0]) @ (right * factors[1]).T).astype(np.float32)
    )


def test_sparsity_that_contradicts_the_descriptor_is_found():
    rng = np.random.default_rng(12)
    image = image_of(halves(rng, M), np.concatenate([halves(rng, N)] * 2, axis=1))
    idesc = InstructionDescriptor("f16", M, N, 32, "f16", "f16", "f32", sparse=True)
    text = "add.u32 %r32, %r21, 48;" + mma(
        "f16", str(descriptor(0, 128, 256)), descriptor(M * 32, 128, 512), idesc, words=".sp"
    )
    text = text.replace("%rd21, %r30", "%rd21, [%r32], %r30")
    tensor = np.zeros((128, 64), np.uint32)
    assert kinds(run(text, image, tensor)[1]) == {"descriptor"}  # metadata of zeros name an element twice
    tensor[:, 48] = 0x44444444
    assert not kinds(run(text, image, tensor)[1])
    for change in ({"sparse": False}, {"sparsity_id": 2}):
        wrong = text.replace(str(encode_instruction(idesc)), str(encode_instruction(idesc._replace(**change))))
        assert kinds(run(wrong, image, tensor)[1]) == {"descriptor"}


def shifted(rows):
    """Row r takes row r + 1 within every 32 rows, the last stays."""
    out = rows.copy()
    for quarter in range(0, len(rows), 32):
        out[quarter : quarter + 31] = rows[quarter + 1 : quarter + 32]
    return out


def test_ashift_moves_a_after_the_product():
    rng = np.random.default_rng(13)
    a, b = halves(rng, M), halves(rng, N)
    tensor = np.zeros((128, 64), np.uint32)
    tensor[:, N : N + 8] = a.view(np.uint32)
    idesc = InstructionDescriptor("f16", M, N, 16, "f16", "f16", "f32")
    text = f"add.u32 %r31, %r21, {N};" + mma("f16.ashift", "[%r31]", descriptor(0, 128, 256), idesc)
    out, report = run(text, image_of(b), tensor)
    assert not report.findings
    np.testing.assert_array_equal(out[:, :N].view(np.float32), a.astype(np.float32) @ b.astype(np.float32).T)
    np.testing.assert_array_equal(out[:, N : N + 8], shifted(tensor[:, N : N + 8]))


def test_a_shift_moves_32_bytes_of_32_lanes():
    tensor = np.random.default_rng(14).integers(0, 1 << 32, (128, 32), dtype=np.uint32)
    out, report = run(
        f"add.u32 %r31, %r21, {(64 << 16) + 8}; tcgen05.shift.cta_group::1.down [%r31];", np.zeros(16, np.uint8), tensor
    )
    assert not report.findings
    expected = tensor.copy()
    expected[64:96, 8:16] = shifted(tensor[64:96, 8:16])
    np.testing.assert_array_equal(out, expected)
    crooked = f"add.u32 %r31, %r21, {16 << 16}; tcgen05.shift.cta_group::1.down [%r31];"
    assert kinds(run(crooked, np.zeros(16, np.uint8), tensor)[1]) == {"descriptor"}

"""Forms of mma.sync beyond dense 8- to 32-bit ones: f64, narrow and block-scaled kinds, sparse A."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator._floats import table
from ptx_emulator._fragments import mma_fragment

S = runpy.run_path(str(Path(__file__).with_name("_snippets.py")))
launch, kinds = S["launch"], S["kinds"]
LANE = np.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4


def run(instruction, d, images, target="sm_90a", scales="", **options):
    """Every lane loads its registers of the images [32, count] (32- or 64-bit words) in order and executes `instruction`,
    whose {0}, {1}, ... are the register lists; the first is the result, stored to `d`."""
    words = ["out", *(f"in{i}" for i in range(len(images)))]
    body, lists, number = "mov.u32 %r1, %tid.x;", [], {4: 2, 8: 8}
    for name, image in zip(words, [d, *images], strict=True):
        size, count = image.itemsize, image.shape[1]
        register = "%r" if size == 4 else "%rd"
        names = [f"{register}{number[size] + i}" for i in range(count)]
        number[size] += count
        lists.append("{" + ", ".join(names) + "}" if count > 1 or name in ("out", "in0", "in1", "in2") else names[0])
        if name != "out":
            body += f" ld.param.u64 %rd1, [{name}]; mul.wide.u32 %rd2, %r1, {size * count}; add.s64 %rd1, %rd1, %rd2;"
            body += "".join(f" ld.global.b{8 * size} {r}, [%rd1+{size * i}];" for i, r in enumerate(names))
    body += "\n" + instruction.format(*lists) + "\n"
    body += f"ld.param.u64 %rd1, [out]; mul.wide.u32 %rd2, %r1, {d.itemsize * d.shape[1]}; add.s64 %rd1, %rd1, %rd2;"
    names = lists[0].strip("{}").split(", ")
    body += "".join(f" st.global.b{8 * d.itemsize} [%rd1+{d.itemsize * i}], {r};" for i, r in enumerate(names))
    return launch(
        body, [d, *images], ", ".join(f".param .u64 {w}" for w in words), target=target, outputs=[d], **options
    )


def held(matrix, place, words=np.uint32):
    """Registers [32, count] of a matrix whose element of a lane are at `place`."""
    return np.ascontiguousarray(matrix[place]).view(words).reshape(32, -1)


def put(registers, place, shape, dtype):
    out = np.zeros(shape, dtype)
    out[place] = registers.view(dtype)
    return out


# rows and columns of the f64 fragments as the ISA gives them
def f64_places(m, k):
    index = np.arange(m * k // 32)[None, :]
    a = GROUP[:, None] + 8 * (index % 2), THREAD[:, None] + np.where(index % 2 == 0, 2 * index, 2 * index - 2)
    if m == 8:
        a = GROUP[:, None], THREAD[:, None]
    b = THREAD[:, None] + 4 * np.arange(k // 4)[None, :], GROUP[:, None] + 0 * np.arange(k // 4)[None, :]
    c = np.arange(m * 8 // 32)[None, :]
    return a, b, (GROUP[:, None] + 8 * (c // 2), 2 * THREAD[:, None] + c % 2)


@pytest.mark.parametrize(("m", "k"), [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_double_precision(m, k):
    rng = np.random.default_rng(k)
    a, b, c = rng.integers(-9, 9, (m, k)) / 4, rng.integers(-9, 9, (k, 8)) / 4, rng.integers(-9, 9, (m, 8)) / 2
    at_a, at_b, at_c = f64_places(m, k)
    d = np.zeros((32, m // 4), np.uint64)
    images = [held(x, at, np.uint64) for x, at in ((a, at_a), (b, at_b), (c, at_c))]
    report = run(f"mma.sync.aligned.m{m}n8k{k}.row.col.f64.f64.f64.f64 {{0}}, {{1}}, {{2}}, {{3}};", d, images)
    assert not report.findings
    np.testing.assert_array_equal(put(d, at_c, (m, 8), np.float64), a @ b + c)


BITS = {"e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4}


def narrow(rng, shape, name):
    """(codes in bytes as f8f6f4 wants them, values): e2m1 sits in bits 2 to 5; the unused bits are set."""
    low, high = {"e4m3": (0, 0x50), "e5m2": (0x30, 0x48)}.get(name, (0, 1 << (BITS[name] - 1)))
    codes = (rng.integers(low, high, shape) | rng.integers(0, 2, shape) << (BITS[name] - 1)).astype(np.uint8)
    filler = {8: 0, 6: 0xC0, 4: 0xC3}[BITS[name]]
    return (codes << (2 if name == "e2m1" else 0) | filler).astype(np.uint8), table(name)[codes]


PAIRS = [("e3m2", "e2m3"), ("e2m1", "e4m3"), ("e5m2", "e2m1"), ("e2m3", "e3m2")]


@pytest.mark.parametrize(("a_name", "b_name"), PAIRS)
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_narrow_kinds(a_name, b_name, kind):
    rng = np.random.default_rng(1)
    (a, left), (b, right) = narrow(rng, (16, 32), a_name), narrow(rng, (32, 8), b_name)
    c = rng.integers(-8, 8, (16, 8)).astype(np.float32 if kind == "f32" else np.float16)
    at_a, at_b, at_c = (mma_fragment("m16n8k32", o, 8) for o in "abc")
    d = np.zeros((32, 4 if kind == "f32" else 2), np.uint32)
    text = f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.{kind}.{a_name}.{b_name}.{kind} {{0}}, {{1}}, {{2}}, {{3}};"
    report = run(text, d, [held(a, at_a), held(b, at_b), held(c, at_c)], "sm_120a")
    assert not report.findings
    expected = (left @ right + c).astype(c.dtype)
    np.testing.assert_array_equal(put(d, at_c, (16, 8), c.dtype), expected)


# kind, scale vector, types, scale type, elements per scale
SCALED = [
    ("mxf8f6f4", "scale_vec::1X", "e4m3", "e2m1", "ue8m0", 32),
    ("mxf4", "scale_vec::2X", "e2m1", "e2m1", "ue8m0", 32),
    ("mxf4nvf4", "scale_vec::4X", "e2m1", "e2m1", "ue4m3", 16),
    ("mxf4nvf4", "scale_vec::2X", "e2m1", "e2m1", "ue8m0", 32),
]


@pytest.mark.parametrize(("kind", "vec", "a_name", "b_name", "stype", "vector"), SCALED)
@pytest.mark.parametrize(
    ("byte_a", "thread_a", "byte_b", "thread_b"), [(0, 0, 0, 0), (2, 1, 0, 3), (0, 1, 2, 2), (3, 0, 1, 1)]
)
def test_block_scaled_kinds(kind, vec, a_name, b_name, stype, vector, byte_a, thread_a, byte_b, thread_b):
    k = 32 if kind == "mxf8f6f4" else 64
    count = k // vector
    byte_a, byte_b = byte_a // count * count % 4, byte_b // count * count % 4
    rng = np.random.default_rng(2)
    if k == 32:
        (a, left), (b, right) = narrow(rng, (16, k), a_name), narrow(rng, (k, 8), b_name)
        a_words, b_words = (held(x, mma_fragment("m16n8k32", o, 8)) for x, o in ((a, "a"), (b, "b")))
    else:
        a, b = rng.integers(0, 16, (16, k)), rng.integers(0, 16, (k, 8))
        left, right = table("e2m1")[a], table("e2m1")[b]
        nibbles = [x[mma_fragment("m16n8k64", o, 4)] for x, o in ((a, "a"), (b, "b"))]
        a_words, b_words = (
            np.ascontiguousarray(v[:, 0::2] | v[:, 1::2] << 4).astype(np.uint8).view(np.uint32) for v in nibbles
        )
    low, high, shift = (125, 130, 0) if stype == "ue8m0" else (5, 10, 3)
    scale_a, scale_b = (rng.integers(low, high, (rows, count)) for rows in (16, 8))
    words_a, words_b = (rng.integers(0, 256, (32, 4)).astype(np.uint8) for _ in range(2))
    for lane in range(32):
        for i in range(count):
            if lane % 4 // 2 == thread_a:
                words_a[lane, byte_a + i] = scale_a[lane // 4 + 8 * (lane % 2), i] << shift
            if lane % 4 == thread_b:
                words_b[lane, byte_b + i] = scale_b[lane // 4, i] << shift
    c = rng.integers(-8, 8, (16, 8)).astype(np.float32)
    at_c = mma_fragment(f"m16n8k{k}", "c", 32)
    d = np.zeros((32, 4), np.uint32)
    text = (
        f"mov.b16 %rs1, {byte_a}; mov.b16 %rs2, {thread_a}; mov.b16 %rs3, {byte_b}; mov.b16 %rs4, {thread_b};"
        f" mma.sync.aligned.m16n8k{k}.row.col.kind::{kind}.block_scale.{vec}.f32.{a_name}.{b_name}.f32.{stype}"
        " {0}, {1}, {2}, {3}, {4}, {{%rs1, %rs2}}, {5}, {{%rs3, %rs4}};"
    )
    images = [a_words, b_words, held(c, at_c), words_a.view(np.uint32), words_b.view(np.uint32)]
    report = run(text, d, images, "sm_120a")
    assert not report.findings
    factors = [np.exp2(s - (127.0 if stype == "ue8m0" else 7.0)) for s in (scale_a, scale_b)]
    expected = (left * np.repeat(factors[0], vector, 1)) @ (right * np.repeat(factors[1], vector, 1).T) + c
    np.testing.assert_array_equal(put(d, at_c, (16, 8), np.float32), expected.astype(np.float32))


SPARSE = [  # type, shape, bits
    ("f16", "m16n8k16", 16), ("f16", "m16n8k32", 16), ("bf16", "m16n8k16", 16), ("bf16", "m16n8k32", 16), ("tf32", "m16n8k8", 32), ("tf32", "m16n8k16", 32),
    ("s8", "m16n8k32", 8), ("u8", "m16n8k64", 8), ("e4m3", "m16n8k64", 8), ("e5m2", "m16n8k64", 8),
]  # fmt: skip


def sparse(rng, rows, k, bits):
    """(codes [rows, chunks], dense positions of the stored elements [rows, k / 2]): pairs in ascending order."""
    pairs = np.array([0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110]) if bits != 32 else np.array([0b0100, 0b1110])
    chunk = 2 if bits == 32 else 4
    codes = rng.choice(pairs, (rows, k // chunk))
    if bits == 32:
        return codes, 2 * np.arange(k // 2)[None, :] + (codes == 0b1110)
    where = np.stack((codes & 3, codes >> 2), axis=-1) + 4 * np.arange(k // 4)[None, :, None]
    return codes, where.reshape(rows, -1)


def meta_words(rng, codes, selector, bits):
    """Metadata registers [32, 1], as an H200 reads them. Of the lanes of a quad that take part, each holds four chunks of row
    g in its low half and of row g + 8 in its high half; for 8-bit types eight chunks of row g in even and g + 8 in odd lanes."""
    lanes = codes.shape[1] // 4
    words = rng.integers(0, 1 << 32, 32, dtype=np.uint32)  # the others' are ignored
    for group in range(8):
        for lane in range(lanes):
            if bits == 8:
                held_codes = codes[group + 8 * (lane % 2), 8 * (lane // 2) : 8 * (lane // 2) + 8]
            else:
                held_codes = codes[[group, group + 8], 4 * lane : 4 * lane + 4].ravel()
            words[4 * group + selector * lanes + lane] = sum(int(c) << 4 * i for i, c in enumerate(held_codes))
    return words.reshape(32, 1)


def small(rng, shape, name):
    """(bytes of the type, values as float64)."""
    if name in ("s8", "u8"):
        values = rng.integers(0 if name == "u8" else -99, 99, shape)
        return values.astype(np.int8 if name == "s8" else np.uint8), values.astype(np.float64)
    values = rng.integers(-7, 8, shape).astype(np.float32)
    if name in ("e4m3", "e5m2"):
        codes = np.array([int(np.flatnonzero(table(name) == v)[0]) for v in values.ravel()], np.uint8).reshape(shape)
        return codes, values.astype(np.float64)
    if name == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16), values.astype(np.float64)
    return values.astype(np.float16) if name == "f16" else values, values.astype(np.float64)


@pytest.mark.parametrize(("name", "shape", "bits"), SPARSE, ids=[f"{n}-{s}" for n, s, _ in SPARSE])
def test_sparse_a(name, shape, bits):
    k = int(shape.partition("k")[2])
    rng = np.random.default_rng(3)
    for selector in range(16 // (k // (2 if bits == 32 else 4))):
        (a, left), (b, right) = small(rng, (16, k // 2), name), small(rng, (k, 8), name)
        codes, where = sparse(rng, 16, k, bits)
        dense = np.zeros((16, k))
        np.put_along_axis(dense, where, left, axis=1)
        whole = name in ("s8", "u8")
        c = rng.integers(-8, 8, (16, 8)).astype(np.int32 if whole else np.float32)
        at_a, at_b, at_c = (
            mma_fragment(f"m16n8k{k // 2}", "a", bits),
            mma_fragment(shape, "b", bits),
            mma_fragment(shape, "c", 32),
        )
        d = np.zeros((32, 4), np.uint32)
        result = "s32" if whole else "f32"
        text = f"mma.sp::ordered_metadata.sync.aligned.{shape}.row.col.{result}.{name}.{name}.{result} {{0}}, {{1}}, {{2}}, {{3}}, {{4}}, {selector};"
        report = run(text, d, [held(a, at_a), held(b, at_b), held(c, at_c), meta_words(rng, codes, selector, bits)])
        assert not report.findings
        np.testing.assert_array_equal(put(d, at_c, (16, 8), c.dtype), dense @ right + c)


def test_metadata_that_name_an_element_twice_are_found():
    images = [np.zeros((32, count), np.uint32) for count in (2, 2, 4, 1)]
    text = "mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {0}, {1}, {2}, {3}, {4}, 0;"
    assert kinds(run(text, np.zeros((32, 4), np.uint32), images)) == {"descriptor"}


# a warpgroup copies A and B (core matrices of 8 rows by 16 bytes, along K first) to shared memory and multiplies
WGMMA = """
 ld.param.u64 %rd1, [image]; ld.param.u64 %rd2, [meta]; ld.param.u64 %rd3, [d]; ld.param.u64 %rd9, [a]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem;
 mul.lo.u32 %r3, %r1, 16;
FILL: setp.ge.u32 %p1, %r3, {size}; @%p1 bra FILLED; cvt.u64.u32 %rd4, %r3; add.s64 %rd5, %rd1, %rd4; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd5];
 add.u32 %r8, %r2, %r3; st.shared.v4.b32 [%r8], {{%r4, %r5, %r6, %r7}}; add.u32 %r3, %r3, 2048; bra FILL;
FILLED: fence.proxy.async.shared::cta; bar.sync 0; mul.wide.u32 %rd4, %r1, 4; add.s64 %rd5, %rd2, %rd4; ld.global.b32 %r20, [%rd5];
 mul.wide.u32 %rd4, %r1, 16; add.s64 %rd9, %rd9, %rd4; ld.global.v4.b32 {{%r24, %r25, %r26, %r27}}, [%rd9];
 bfe.u32 %r10, %r2, 4, 14; cvt.u64.u32 %rd6, %r10; or.b64 %rd6, %rd6, {high_a}; add.u32 %r11, %r2, {b_start}; bfe.u32 %r11, %r11, 4, 14; cvt.u64.u32 %rd7, %r11;
 or.b64 %rd7, %rd7, {high_b}; mov.pred %p3, 0; wgmma.fence.sync.aligned;
 wgmma.mma_async.sp.sync.aligned.m64n8k{k}.{result}.{name}.{name} {{{accumulators}}}, {a}, %rd7, %r20, {selector}, %p3{flags};
 wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; add.s64 %rd8, %rd3, %rd4; st.global.v4.{stype} [%rd8], {{{accumulators}}};
"""


def core_matrices(raw):
    return raw.reshape(len(raw) // 8, 8, -1, 16).transpose(0, 2, 1, 3).reshape(-1)


@pytest.mark.parametrize("name", ["f16", "bf16", "tf32", "s8", "u8", "e4m3", "e5m2"])
@pytest.mark.parametrize("in_registers", [False, True])
def test_sparse_wgmma(name, in_registers):
    bits = {"f16": 16, "bf16": 16, "tf32": 32}.get(name, 8)
    k, rng = 64 * 8 // bits, np.random.default_rng(7)
    (a, left), (b, right) = small(rng, (64, k // 2), name), small(rng, (8, k), name)
    raw_a, raw_b = np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8)
    image = np.concatenate((core_matrices(raw_a), core_matrices(raw_b)))
    whole = name in ("s8", "u8")
    for selector in range(16 // (k // (2 if bits == 32 else 4))):
        codes, where = sparse(rng, 64, k, bits)
        dense = np.zeros((64, k))
        np.put_along_axis(dense, where, left, axis=1)
        meta = np.concatenate([meta_words(rng, codes[16 * w : 16 * w + 16], selector, bits) for w in range(4)])
        registers = np.concatenate(
            [held(a[16 * w : 16 * w + 16], mma_fragment(f"m16n8k{k // 2}", "a", bits)) for w in range(4)]
        )
        d = np.zeros((128, 4), np.int32 if whole else np.float32)
        high = [128 >> 4 << 16 | 8 * row >> 4 << 32 for row in (raw_a.shape[1], raw_b.shape[1])]
        flags = "" if whole else ", 1, 1" + ("" if bits != 16 else ", 0" if in_registers else ", 0, 0")
        body = WGMMA.format(size=image.size, b_start=raw_a.size, high_a=high[0], high_b=high[1], k=k, result="s32" if whole else "f32",
                            name=name, selector=selector, flags=flags, stype="b32" if whole else "f32",
                            a="{%r24, %r25, %r26, %r27}" if in_registers else "%rd6",
                            accumulators=", ".join(f"%{'r' if whole else 'f'}{i}" for i in range(30, 34)))  # fmt: skip
        report = launch(body, [image, meta, d, registers], ".param .u64 image, .param .u64 meta, .param .u64 d, .param .u64 a",
                        block=128, target="sm_90a", shared=image.size, outputs=[d])  # fmt: skip
        assert not report.findings
        rows, columns = mma_fragment("m16n8k16", "c", 32)
        got = np.zeros((64, 8), d.dtype)
        for warp in range(4):
            got[16 * warp + rows, columns] = d[32 * warp : 32 * warp + 32]
        np.testing.assert_array_equal(got, dense @ right.T)


@pytest.mark.parametrize(("source", "bits"), [("b6x16_p32", 6), ("b4x16_p64", 4)])
@pytest.mark.parametrize(("shape", "num"), [("m8n16", 1), ("m8n16", 2), ("m8n16", 4), ("m16n16", 1), ("m16n16", 2)])
def test_narrow_matrix_loads(source, bits, shape, num):
    """Rows of 16 padded elements become one element a byte, low bits first."""
    rows, trans = 8 * num if shape == "m8n16" else 16 * num, shape == "m16n16"
    codes = np.random.default_rng(5).integers(0, 1 << bits, (32, 16))
    image = np.full((32, 16), 0xFF, np.uint8)
    for row in range(32):
        number = sum(int(c) << bits * i for i, c in enumerate(codes[row]))
        image[row, : 2 * bits] = np.frombuffer(number.to_bytes(2 * bits, "little"), np.uint8)
    registers = num * (2 if trans else 1)
    out = np.zeros((32, registers), np.uint32)
    names = ", ".join(f"%r{10 + i}" for i in range(registers))
    body = f"""ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; mul.lo.u32 %r3, %r1, 16; cvt.u64.u32 %rd3, %r3; add.s64 %rd1, %rd1, %rd3;
 add.u32 %r2, %r2, %r3; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd1]; st.shared.v4.b32 [%r2], {{%r4, %r5, %r6, %r7}}; bar.warp.sync -1;
 ldmatrix.sync.aligned.{shape}.x{num}{".trans" if trans else ""}.shared.b8x16.{source} {{{names}}}, [%r2]; mul.wide.u32 %rd3, %r1, {4 * registers}; add.s64 %rd2, %rd2, %rd3;"""
    body += "".join(f" st.global.b32 [%rd2+{4 * i}], %r{10 + i};" for i in range(registers))
    report = launch(body, [image, out], ".param .u64 in, .param .u64 out", shared=512, target="sm_120a")
    assert not report.findings
    got = out.view(np.uint8).reshape(32, registers, 4)
    if not trans:
        for register in range(num):
            np.testing.assert_array_equal(got[:, register].reshape(8, 16), codes[8 * register : 8 * register + 8])
    else:
        assert sorted(got.ravel().tolist()) == sorted(codes[:rows].ravel().tolist())
        plain = run_plain_load(codes.astype(np.uint8), num)
        np.testing.assert_array_equal(got, plain)


def run_plain_load(rows, num):
    """What ldmatrix .m16n16.trans.b8 gives for the same elements, one a byte."""
    out = np.zeros((32, 2 * num), np.uint32)
    names = ", ".join(f"%r{10 + i}" for i in range(2 * num))
    body = f"""ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; mul.lo.u32 %r3, %r1, 16; cvt.u64.u32 %rd3, %r3; add.s64 %rd1, %rd1, %rd3;
 add.u32 %r2, %r2, %r3; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd1]; st.shared.v4.b32 [%r2], {{%r4, %r5, %r6, %r7}}; bar.warp.sync -1;
 ldmatrix.sync.aligned.m16n16.x{num}.trans.shared.b8 {{{names}}}, [%r2]; mul.wide.u32 %rd3, %r1, {8 * num}; add.s64 %rd2, %rd2, %rd3;"""
    body += "".join(f" st.global.b32 [%rd2+{4 * i}], %r{10 + i};" for i in range(2 * num))
    launch(body, [rows, out], ".param .u64 in, .param .u64 out", shared=512, target="sm_120a")
    return out.view(np.uint8).reshape(32, 2 * num, 4)

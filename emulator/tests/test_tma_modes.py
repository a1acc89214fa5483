"""TMA beyond plain tiles: im2col, gather4 and scatter4, padded narrow types, multicast of plain bulk copies."""

import itertools
import runpy
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator._layout import TensorMap, encode_tensor_map, swizzle

S = runpy.run_path(str(Path(__file__).with_name("_snippets.py")))
P = runpy.run_path(str(Path(__file__).with_name("test_tma.py")))
launch, kinds, wait, aligned = S["launch"], S["kinds"], S["wait"], P["aligned"]
PARAMS = ".param .align 64 .b8 map[128], .param .u64 out"

# thread 0 loads to smem + 1024 and, after the wait, one warp copies `size` bytes of it to `out`
LOAD = """
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; add.u32 %r3, %r2, 1024; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
READY: bar.sync 0; @%p1 bra WAIT;
 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r2], {expect};
 mov.b64 %rd3, map; cvta.param.u64 %rd3, %rd3;
 {instruction}
WAIT: {wait}
 mul.lo.u32 %r4, %r1, 4; add.u32 %r3, %r3, %r4; cvt.u64.u32 %rd4, %r4; add.s64 %rd1, %rd1, %rd4;
COPY: ld.shared.b32 %r5, [%r3]; st.global.b32 [%rd1], %r5; add.u32 %r3, %r3, 128; add.s64 %rd1, %rd1, 128; add.u32 %r4, %r4, 128;
 setp.lt.u32 %p2, %r4, {size}; @%p2 bra COPY;
"""


def load(array, tensor_map, instruction, size, expect=None, **options):
    """`size` bytes of shared memory after the instruction, and the report; a multiple of 128."""
    out = np.zeros(size, np.uint8)
    body = LOAD.format(
        instruction=instruction, expect=size if expect is None else expect, size=size, wait=wait("%r2", 0, "W")
    )
    report = launch(
        body,
        [encode_tensor_map(tensor_map), out],
        PARAMS,
        shared=1024 + size,
        buffers=[array],
        outputs=[out],
        **options,
    )
    return out, report


def spread(rows, mode="none"):
    """Bytes of rows as shared memory holds them in a swizzle."""
    out = np.zeros(rows.nbytes, np.uint8)
    out[swizzle(np.arange(out.size), mode)] = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
    return out


def image_map(array, channels, pixels, lower, upper, strides, **fields):
    """im2col map of a channels-last array [n, (d,) (h,) w, c]; corners and strides in the order w, h, d."""
    names = {2: "f16", 4: "f32", 1: "u8"}
    return TensorMap(array.__array_interface__["data"][0], names[array.itemsize], array.shape[::-1], array.strides[-2::-1],
                     (channels,), (1, *strides, 1), lower=lower, upper=upper, pixels=pixels, **fields)  # fmt: skip


def columns(array, channels, pixels, lower, upper, strides, start, offsets):
    """What the ISA's im2col describes, pixel by pixel: [pixels, channels]."""
    sizes = array.shape[-2:0:-1]
    out = np.zeros((pixels, channels), array.dtype)
    ranges = [range(lo, size + up) for lo, size, up in zip(lower, sizes, upper, strict=True)]
    grids = [[v for v in r if (v - lo) % s == 0] for r, lo, s in zip(ranges, lower, strides, strict=True)]
    base = list(start[1:])
    walk = [(n, *outer) for n in range(base[-1], base[-1] + pixels) for outer in itertools.product(*grids[::-1])]
    first = walk.index(tuple(base[::-1]))
    for number, place in enumerate(walk[first : first + pixels]):
        spots = [v + o for v, o in zip(place[:0:-1], offsets, strict=True)]
        if place[0] >= len(array) or any(not 0 <= v < size for v, size in zip(spots, sizes, strict=True)):
            continue
        pixel = array[(place[0], *spots[::-1])]
        stop = min(channels, max(len(pixel) - start[0], 0))
        out[number, :stop] = pixel[start[0] : start[0] + stop]
    return out


IMAGES = [  # shape n d h w c, channels, pixels, lower and upper corners, strides, start c w h d n, offsets; in the order w, h, d
    ((2, 9, 32), 16, 24, (-1,), (-1,), (1,), (16, 3, 0), (2,), "none"),
    ((3, 7, 9, 32), 32, 64, (-1, -1), (-1, -1), (1, 1), (0, 4, 2, 0), (0, 0), "64B"),
    ((2, 7, 9, 64), 64, 40, (0, 0), (-2, -2), (1, 1), (0, 6, 4, 1), (2, 2), "128B"),
    ((2, 14, 8, 16), 16, 32, (-1, -1), (-1, -1), (2, 2), (0, 5, 5, 0), (1, 1), "32B"),
    ((2, 6, 8, 16), 16, 32, (-2, 0), (1, -3), (1, 1), (8, -2, 1, 0), (1, 2), "none"),
    ((2, 6, 8, 16), 16, 32, (-1, -1), (0, 0), (3, 2), (0, 2, 1, 0), (1, 0), "none"),
    ((2, 4, 5, 6, 32), 32, 128, (-1, -1, -1), (-1, -1, -1), (1, 1, 1), (0, 2, -1, 1, 0), (2, 1, 0), "64B"),
    ((2, 4, 5, 6, 32), 32, 64, (-1, 0, 0), (0, -1, -2), (2, 1, 2), (0, 1, 2, 0, 1), (0, 1, 2), "none"),
]


@pytest.mark.parametrize("case", IMAGES, ids=lambda c: "x".join(map(str, c[0])))
def test_im2col_loads_the_pixels_under_a_filter_tap(case):
    shape, channels, pixels, lower, upper, strides, start, offsets, mode = case
    array = aligned(shape, np.float16, 1 + np.arange(np.prod(shape)).reshape(shape) % 2000)
    tensor_map = image_map(array, channels, pixels, lower, upper, strides, swizzle=mode)
    setup = moves(start) + " ".join(f"mov.b16 %rs{i}, {v};" for i, v in enumerate(offsets))
    at, taps = ", ".join(f"%r{20 + i}" for i in range(len(start))), ", ".join(f"%rs{i}" for i in range(len(offsets)))
    instruction = (
        f"{setup} cp.async.bulk.tensor.{len(shape)}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r3], [%rd3, {{{at}}}], "
        f"[%r2], {{{taps}}};"
    )
    out, report = load(array, tensor_map, instruction, 2 * channels * pixels, target="sm_90a")
    assert not report.findings
    expected = columns(array, channels, pixels, lower, upper, strides, start, offsets)
    assert np.count_nonzero(expected)
    np.testing.assert_array_equal(out, spread(expected, mode))


IM2COL = "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r3], [%rd3, {%r20, %r21, %r22}], [%r2], {%rs0};"


def im2col(instruction=IM2COL, w=0, n=0, tap=0, **fields):
    array = aligned((2, 9, 32), np.float16, 1)
    tensor_map = image_map(array, 16, 8, (0,), (0,), (1,))._replace(**fields)
    setup = moves((0, w, n)) + f"mov.b16 %rs0, {tap};"
    return kinds(load(array, tensor_map, setup + instruction, 256)[1])


def test_im2col_misuse_is_found():
    assert not im2col()
    assert not im2col(w=3, n=1, tap=4)  # the last pixels are past the last image: zeros
    assert "descriptor" in im2col(w=9)  # outside the bounding box
    assert "descriptor" in im2col(instruction=IM2COL.replace("im2col", "tile").replace(", {%rs0}", ""))
    assert "descriptor" in im2col(pixels=0, lower=(), upper=(), box=(16, 8, 1))  # a tiled map


STORE = """
 mov.u32 %r1, %tid.x; mov.b32 %r2, smem; ld.param.u64 %rd1, [in]; mul.lo.u32 %r3, %r1, 4;
FILL: setp.ge.u32 %p2, %r3, {size}; @%p2 bra FILLED; cvt.u64.u32 %rd4, %r3; add.s64 %rd5, %rd1, %rd4; ld.global.b32 %r5, [%rd5];
 add.u32 %r6, %r2, %r3; st.shared.b32 [%r6], %r5; add.u32 %r3, %r3, 128; bra FILL;
FILLED: fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 ret;
 mov.b64 %rd3, map; cvta.param.u64 %rd3, %rd3;
 {instruction}
 cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
"""


def store(array, tensor_map, instruction, values, **options):
    """Store `values` (the image of shared memory) with the instruction; the report. `array` is changed."""
    body = STORE.format(instruction=instruction, size=values.size)
    return launch(body, [encode_tensor_map(tensor_map), values], ".param .align 64 .b8 map[128], .param .u64 in",
                  shared=values.size, buffers=[array], **options)  # fmt: skip


@pytest.mark.parametrize("reduce", [False, True])
def test_im2col_stores_a_column_of_pixels(reduce):
    array = aligned((2, 5, 6, 16), np.float32, np.arange(960).reshape(2, 5, 6, 16))
    tensor_map = image_map(array, 16, 20, (0, 0), (-1, -2), (1, 1))
    values = np.random.default_rng(1).integers(0, 99, (20, 16)).astype(np.float32)
    before, start = array.copy(), (0, 2, 1, 0)
    name = (
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add"
        if reduce
        else "cp.async.bulk.tensor.4d.global.shared::cta"
    )
    instruction = f"{moves(start)} {name}.im2col_no_offs.bulk_group [%rd3, {{%r20, %r21, %r22, %r23}}], [%r2];"
    report = store(array, tensor_map, instruction, spread(values), target="sm_90a")
    assert not report.findings
    index = np.arange(array.size, dtype=np.float32).reshape(array.shape)
    touched = columns(index, 16, 20, (0, 0), (-1, -2), (1, 1), start, (0, 0)).astype(int)
    expected = before.reshape(-1)
    expected[touched] = values + (expected[touched] if reduce else 0)
    np.testing.assert_array_equal(array.reshape(-1), expected)


def test_a_store_outside_the_image_is_found():
    array = aligned((2, 5, 6, 16), np.float32, 1)
    values = spread(np.ones((4, 16), np.float32))
    instruction = "{} cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%rd3, {{%r20, %r21, %r22, %r23}}], [%r2];"
    for corner, start in (((-1, 0), (0, 1, 0, 0)), ((0, 0), (0, -1, 0, 0))):
        tensor_map = image_map(array, 16, 4, corner, (0, 0), (1, 1))
        assert kinds(store(array, tensor_map, instruction.format(moves(start)), values)) == {"descriptor"}


def moves(values):
    return " ".join(f"mov.b32 %r{20 + i}, {v};" for i, v in enumerate(values))


GATHER = "cp.async.bulk.tensor.2d.{space}.global.tile::gather4.mbarrier::complete_tx::bytes{more} [%r3], [%rd3, {{%r20, %r21, %r22, %r23, %r24}}], [%r2]{mask};"
ROWS = (5, -1, 19, 20)  # one row below, one above the tensor


def row_map(array, width, mode="none", **fields):
    return TensorMap(
        array.__array_interface__["data"][0],
        "f16",
        array.shape[::-1],
        array.strides[:1],
        (width, 1),
        (1, 1),
        swizzle=mode,
    )._replace(**fields)


@pytest.mark.parametrize(("column", "mode"), [(0, "none"), (32, "128B"), (40, "64B")])
def test_gather4_loads_four_rows(column, mode):
    array = aligned((20, 64), np.float16, 1 + np.arange(1280).reshape(20, 64))
    width = 32 if mode == "64B" else 64
    instruction = moves((column, *ROWS)) + GATHER.format(space="shared::cta", more="", mask="")
    out, report = load(array, row_map(array, width, mode), instruction, 4 * width * 2)
    assert not report.findings
    expected = np.zeros((4, width), np.float16)
    inside = min(64 - column, width)
    expected[0, :inside], expected[2, :inside] = array[5, column : column + inside], array[19, column : column + inside]
    np.testing.assert_array_equal(out, spread(expected, mode))


def test_gather4_reaches_every_cta_of_a_multicast():
    array, out = aligned((20, 64), np.float16, 1 + np.arange(1280).reshape(20, 64)), np.zeros((2, 4, 64), np.float16)
    instruction = (
        moves((0, *ROWS))
        + "mov.b16 %rs1, 3;"
        + GATHER.format(space="shared::cluster", more=".multicast::cluster", mask=", %rs1")
    )
    body = LOAD.format(
        instruction=f"setp.ne.u32 %p3, %r9, 0; @%p3 bra WAIT; {instruction}",
        expect=512,
        size=512,
        wait=wait("%r2", 0, "W"),
    )
    body = body.replace(
        "ld.param.u64 %rd1, [out];",
        "ld.param.u64 %rd1, [out]; mov.u32 %r9, %cluster_ctarank; mul.wide.u32 %rd9, %r9, 512; add.s64 %rd1, %rd1, %rd9;",
    )
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    body = body.replace("bar.sync 0;", meet, 1) + meet
    report = launch(
        body, [encode_tensor_map(row_map(array, 64)), out], PARAMS, grid=2, cluster=2, shared=1536, buffers=[array]
    )
    assert not report.findings
    for rank in range(2):
        np.testing.assert_array_equal(out[rank, [0, 2]], array[[5, 19]])
        assert not out[rank, [1, 3]].any()


def test_scatter4_stores_the_rows_that_exist():
    array, values = aligned((20, 64), np.float16, -1), np.arange(128).reshape(4, 32).astype(np.float16)
    instruction = (
        moves((16, 3, 25, 0, 19))
        + "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%rd3, {%r20, %r21, %r22, %r23, %r24}], [%r2];"
    )
    report = store(array, row_map(array, 32), instruction, spread(values))
    assert not report.findings
    expected = np.full((20, 64), -1, np.float16)
    expected[[3, 0, 19], 16:48] = values[[0, 2, 3]]
    np.testing.assert_array_equal(array, expected)


def test_a_gather_with_a_box_of_several_rows_is_found():
    array = aligned((20, 64), np.float16, 1)
    instruction = moves((0, 0, 1, 2, 3)) + GATHER.format(space="shared::cta", more="", mask="")
    report = load(array, row_map(array, 64, box=(64, 4)), instruction, 512)[1]
    assert kinds(report) == {"descriptor"}


def narrow(rng, rows, count, bits):
    """(codes [rows, count], packed rows as uint8)."""
    codes = rng.integers(0, 1 << bits, (rows, count)).astype(np.uint8)
    packed = [sum(int(c) << bits * i for i, c in enumerate(row)).to_bytes(count * bits // 8, "little") for row in codes]
    return codes, np.array([np.frombuffer(p, np.uint8) for p in packed])


def narrow_map(array, bits, count, mode="none", **fields):
    name = {4: "u4_padded", 6: "u6_padded"}[bits]
    return TensorMap(
        array.__array_interface__["data"][0],
        name,
        (count, len(array)),
        (array.strides[0],),
        (128, 8),
        (1, 1),
        swizzle=mode,
    )._replace(**fields)


TILE = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd3, {%r20, %r21}], [%r2];"
)


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("mode", ["none", "128B"])
def test_narrow_types_are_padded_on_the_way_and_counted_packed(bits, mode):
    codes, packed = narrow(np.random.default_rng(bits), 20, 256, bits)
    array = aligned(packed.shape, np.uint8, packed)
    instruction = moves((128, 16)) + TILE  # the second half of rows 16 to 19, and four rows past the end
    out, report = load(array, narrow_map(array, bits, 256, mode), instruction, 8 * 128, expect=8 * 128 * bits // 8)
    assert not report.findings
    assert report.counts["bytes.tma.load"] == 128 * bits
    image = np.zeros_like(out)
    image[:] = out[swizzle(np.arange(out.size), mode)]  # back to plain rows
    groups = image.reshape(8, 8, 16)
    for row, group in itertools.product(range(8), range(8)):
        number = int.from_bytes(groups[row, group, : 2 * bits].tobytes(), "little")
        got = [number >> bits * i & (1 << bits) - 1 for i in range(16)]
        at = 128 + 16 * group
        assert got == (codes[16 + row, at : at + 16].tolist() if row < 4 else [0] * 16)


def test_six_bit_elements_are_packed_by_a_store():
    codes, packed = narrow(np.random.default_rng(3), 8, 128, 6)
    array = aligned(packed.shape, np.uint8, 0xFF)
    dirty = codes | 0x80  # the two high bits of a byte are padding
    instruction = (
        moves((0, 0)) + "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd3, {%r20, %r21}], [%r2];"
    )
    report = store(array, narrow_map(array, 6, 128), instruction, spread(dirty))
    assert not report.findings
    np.testing.assert_array_equal(array, packed)


@pytest.mark.parametrize(
    ("bits", "x", "fields"),
    [(6, 64, {}), (4, 0, {"box": (64, 8)}), (6, 0, {"swizzle": "64B"}), (4, 0, {"dims": (192, 20)}), (6, 0, {"nan_fill": True})],
)  # fmt: skip
def test_what_padded_types_cannot_do_is_found(bits, x, fields):
    array = aligned((20, 32 * bits), np.uint8, 1)
    tensor_map = narrow_map(array, bits, 256)._replace(**fields)
    size = 8 * tensor_map.box[0]
    assert "descriptor" in kinds(load(array, tensor_map, moves((x, 0)) + TILE, size, expect=size * bits // 8)[1])


def test_padded_types_do_not_reduce_and_four_bits_do_not_store():
    array, values = aligned((8, 96), np.uint8, 1), np.ones(1024, np.uint8)
    reduction = (
        moves((0, 0))
        + "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd3, {%r20, %r21}], [%r2];"
    )
    assert kinds(store(array, narrow_map(array, 6, 128), reduction, values)) == {"descriptor"}
    plain = moves((0, 0)) + "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd3, {%r20, %r21}], [%r2];"
    assert kinds(store(aligned((8, 64), np.uint8, 1), narrow_map(array, 4, 128), plain, values)) == {"descriptor"}


def test_a_plain_bulk_copy_reaches_every_cta_of_a_multicast():
    array, out = aligned(64, np.uint32, np.arange(64)), np.zeros((4, 64), np.uint32)
    body = f"""
 ld.param.u64 %rd1, [in]; ld.param.u64 %rd3, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; mov.u32 %r9, %cluster_ctarank; setp.ne.u32 %p1, %r1, 0;
 mov.b64 %rd6, 0; @%p1 bra READY; mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
 st.shared.b64 [%r2+128], %rd6;
READY: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; @%p1 bra WAIT; setp.eq.u32 %p3, %r9, 2; @%p3 bra WAIT;
 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r2], 256; setp.ne.u32 %p3, %r9, 1; @%p3 bra WAIT; mov.b16 %rs1, 11;
 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r2+128], [%rd1], 256, [%r2], %rs1;
WAIT: setp.eq.u32 %p3, %r9, 2; @%p3 bra DONE; {wait("%r2", 0, "W")}
 mul.wide.u32 %rd4, %r9, 256; add.s64 %rd3, %rd3, %rd4; mul.wide.u32 %rd4, %r1, 8; add.s64 %rd3, %rd3, %rd4; mad.lo.u32 %r3, %r1, 8, %r2;
 ld.shared.b64 %rd5, [%r3+128]; st.global.b64 [%rd3], %rd5;
DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
    for seed in range(3):
        out[:] = 0
        report = launch(
            body,
            [array, out],
            ".param .u64 in, .param .u64 out",
            grid=4,
            cluster=4,
            shared=512,
            seed=seed,
            target="sm_90a",
        )
        assert not report.findings
        assert (out[[0, 1, 3]] == array).all()  # the mask leaves out rank 2
        assert not out[2].any()


def test_a_copy_with_a_cache_policy_is_a_copy():
    array, out = aligned(64, np.uint32, np.arange(64)), aligned(64, np.uint32)
    body = f"""
 ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; setp.ne.u32 %p1, %r1, 0; @%p1 ret;
 createpolicy.fractional.L2::evict_last.b64 %rd4, 1.0; mbarrier.init.shared.b64 [%r2], 1; fence.proxy.async.shared::cta;
 mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r2], 256;
 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r2+128], [%rd1], 256, [%r2], %rd4;
 {wait("%r2", 0, "W")}
 cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%rd2], [%r2+128], 256, %rd4; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
"""
    report = launch(body, [array, out], ".param .u64 in, .param .u64 out", shared=512, target="sm_90a")
    assert not report.findings
    assert (out == array).all()


def test_a_byte_mask_lets_bytes_through():
    values, out = aligned(64, np.uint8, 1 + np.arange(64)), aligned(64, np.uint8)
    body = """
 ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; mul.lo.u32 %r3, %r1, 2; cvt.u64.u32 %rd3, %r3;
 add.s64 %rd4, %rd1, %rd3; ld.global.b16 %rs1, [%rd4]; add.u32 %r3, %r2, %r3; st.shared.b16 [%r3], %rs1; fence.proxy.async.shared::cta; bar.sync 0;
 setp.ne.u32 %p1, %r1, 0; @%p1 ret; mov.b16 %rs2, 0x8105;
 cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd2], [%r2], 64, %rs2; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
"""
    report = launch(body, [values, out], ".param .u64 in, .param .u64 out", shared=64)
    assert not report.findings
    keep = np.isin(np.arange(64) % 16, (0, 2, 8, 15))
    assert (out == np.where(keep, values, 0)).all()


REDUCTIONS = [
    ("add.u32", np.uint32), ("min.s32", np.int32), ("max.u32", np.uint32), ("inc.u32", np.uint32), ("dec.u32", np.uint32),
    ("and.b32", np.uint32), ("or.b32", np.uint32), ("xor.b64", np.uint64), ("add.u64", np.uint64), ("min.s64", np.int64),
    ("max.u64", np.uint64), ("add.f32", np.float32), ("add.f64", np.float64), ("add.noftz.f16", np.float16), ("min.f16", np.float16),
    ("add.noftz.bf16", "bf16"), ("max.bf16", "bf16"),
]  # fmt: skip


def reduced(name, old, new):
    """What the reduction leaves; bfloat16 as float32."""
    if name == "inc":
        return np.where(old >= new, 0, old + 1)
    if name == "dec":
        return np.where((old == 0) | (old > new), new, old - 1)
    table = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    return table[name](old, new)


@pytest.mark.parametrize(("operation", "dtype"), REDUCTIONS, ids=[r[0] for r in REDUCTIONS])
def test_bulk_reductions_to_global_memory(operation, dtype):
    rng, name = np.random.default_rng(4), operation.split(".")[0]
    if dtype == "bf16":  # values that bfloat16 and their sums hold exactly
        old, new = ((rng.integers(-64, 64, 64) / 2).astype(np.float32) for _ in range(2))
        stored, values = (aligned(64, np.uint16, (v.view(np.uint32) >> 16)) for v in (old, new))
    else:
        low = 0 if np.dtype(dtype).kind == "u" else -50
        old, new = (rng.integers(low, 50, 64).astype(dtype) for _ in range(2))
        stored, values = (aligned(64, dtype, v) for v in (old, new))
        if dtype is np.float32:  # an H200 keeps subnormals
            stored[:2] = old[:2] = 1e-40
    size = values.nbytes
    body = f"""
 ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; mul.lo.u32 %r3, %r1, {size // 32}; cvt.u64.u32 %rd3, %r3;
 add.s64 %rd4, %rd1, %rd3; add.u32 %r3, %r2, %r3; mov.b32 %r4, 0;
L: ld.global.b32 %r5, [%rd4]; st.shared.b32 [%r3], %r5; add.s64 %rd4, %rd4, 4; add.u32 %r3, %r3, 4; add.u32 %r4, %r4, 4; setp.lt.u32 %p2, %r4, {size // 32}; @%p2 bra L;
 fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 ret;
 cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation} [%rd2], [%r2], {size}; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
"""
    report = launch(body, [values, stored], ".param .u64 in, .param .u64 out", shared=512, target="sm_90a")
    assert not report.findings
    got = (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else stored
    np.testing.assert_array_equal(got, reduced(name, old, new))


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [("add.u32", np.uint32), ("min.s32", np.int32), ("xor.b32", np.uint32), ("add.u64", np.uint64)],
)
def test_bulk_reductions_to_another_cta(operation, dtype):
    rng, name = np.random.default_rng(5), operation.split(".")[0]
    width = np.dtype(dtype).itemsize
    values = aligned((2, 128 // width), dtype, rng.integers(0, 99, (2, 128 // width)))
    out = np.zeros(128 // width, dtype)
    body = f"""
 ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; mov.u32 %r9, %cluster_ctarank; setp.ne.u32 %p1, %r1, 0;
 mul.wide.u32 %rd3, %r9, 128; add.s64 %rd1, %rd1, %rd3; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; ld.global.b32 %r5, [%rd4]; mad.lo.u32 %r3, %r1, 4, %r2;
 st.shared.b32 [%r3+128], %r5; fence.proxy.async.shared::cta; @%p1 bra READY; mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
 mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r2], 128;
READY: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; setp.eq.u32 %p2, %r9, 0; @%p2 bra RECEIVE; @%p1 bra DONE;
 mov.b32 %r10, 0; mapa.shared::cluster.u32 %r11, %r2, %r10;
 cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{operation} [%r11+128], [%r2+128], 128, [%r11]; bra DONE;
RECEIVE: {wait("%r2", 0, "W")} add.s64 %rd2, %rd2, %rd3; ld.shared.b32 %r5, [%r3+128]; st.global.b32 [%rd2], %r5;
DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
    body = body.replace("@%p1 bra DONE;", "@%p1 bra OTHER;", 1).replace("RECEIVE:", "OTHER: bra DONE;\nRECEIVE:")
    body = body.replace(
        "mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r2], 128;",
        "setp.ne.u32 %p3, %r9, 0; @%p3 bra READY; mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r2], 128;",
    )
    report = launch(
        body, [values, out], ".param .u64 in, .param .u64 out", grid=2, cluster=2, shared=512, target="sm_90a"
    )
    assert not report.findings
    np.testing.assert_array_equal(out, reduced(name, values[0], values[1]))

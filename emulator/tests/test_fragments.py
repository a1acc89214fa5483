import numpy as np
import pytest
from ptx_emulator._fragments import (
    accumulator_map,
    copy_lanes,
    ldmatrix_map,
    mma_fragment,
    scale_map,
    stmatrix_map,
    tmem_map,
    tmem_operand_lanes,
    wgmma_a,
    wgmma_accumulator,
)


def _index(shape, stride, value):
    """CuTe: index of a layout at a linear coordinate, first mode fastest."""
    total = 0
    for extent, step in zip(shape, stride, strict=True):
        total += value % extent * step
        value //= extent
    return total


def _layout(threads, values):
    """Array [threads, values] of a thread-value layout given as two (shape, stride) pairs."""
    (ts, td), (vs, vd) = threads, values
    return np.array(
        [[_index(ts, td, t) + _index(vs, vd, v) for v in range(int(np.prod(vs)))] for t in range(int(np.prod(ts)))]
    )


# thread-value layouts of CUTLASS' MMA traits; the index counts the rows of A (m), B (n) and C (m) fastest
MMA = [
    ("m16n8k16", "a", 16, ((4, 8), (32, 1)), ((2, 2, 2), (16, 8, 128))),
    ("m16n8k16", "b", 16, ((4, 8), (16, 1)), ((2, 2), (8, 64))),
    ("m16n8k16", "c", 32, ((4, 8), (32, 1)), ((2, 2), (16, 8))),
    ("m16n8k8", "a", 16, ((4, 8), (32, 1)), ((2, 2), (16, 8))),
    ("m16n8k8", "b", 16, ((4, 8), (16, 1)), ((2,), (8,))),
    ("m16n8k8", "a", 32, ((4, 8), (16, 1)), ((2, 2), (8, 64))),
    ("m16n8k8", "b", 32, ((4, 8), (8, 1)), ((2,), (32,))),
    ("m16n8k4", "a", 32, ((4, 8), (16, 1)), ((2,), (8,))),
    ("m16n8k32", "a", 8, ((4, 8), (64, 1)), ((4, 2, 2), (16, 8, 256))),
    ("m16n8k32", "b", 8, ((4, 8), (32, 1)), ((4, 2), (8, 128))),
    ("m16n8k16", "a", 8, ((4, 8), (64, 1)), ((4, 2), (16, 8))),
    ("m16n8k64", "a", 4, ((4, 8), (128, 1)), ((8, 2, 2), (16, 8, 512))),
    ("m16n8k64", "b", 4, ((4, 8), (64, 1)), ((8, 2), (8, 256))),
]


@pytest.mark.parametrize(("shape", "operand", "bits", "threads", "values"), MMA)
def test_mma_fragments_are_cutlass_layouts(shape, operand, bits, threads, values):
    rows, columns = mma_fragment(shape, operand, bits)
    index = rows + 16 * columns if operand != "b" else columns + 8 * rows
    np.testing.assert_array_equal(index, _layout(threads, values))


@pytest.mark.parametrize("n", [8, 64, 128, 256])
def test_wgmma_accumulator_is_cutlass_layout(n):
    rows, columns = wgmma_accumulator(n)
    expected = _layout(((4, 8, 4), (128, 1, 16)), ((2, 2, n // 8), (64, 8, 512)))
    np.testing.assert_array_equal(rows + 64 * columns, expected)


@pytest.mark.parametrize(
    ("k", "bits", "values"), [(16, 16, ((2, 2, 2), (64, 8, 512))), (32, 8, ((4, 2, 2), (64, 8, 1024)))]
)
def test_wgmma_a_is_cutlass_layout(k, bits, values):
    rows, columns = wgmma_a(k, bits)
    step = 2 * 64 if bits == 16 else 4 * 64
    np.testing.assert_array_equal(rows + 64 * columns, _layout(((4, 8, 4), (step, 1, 16)), values))


def test_m8n8k4_f64_covers_its_matrices():
    for operand, shape in (("a", (8, 4)), ("b", (4, 8)), ("c", (8, 8))):
        rows, columns = mma_fragment("m8n8k4", operand, 64)
        assert sorted((rows * shape[1] + columns).ravel().tolist()) == list(range(shape[0] * shape[1]))


@pytest.mark.parametrize("num", [1, 2, 4])
def test_ldmatrix_feeds_mma_operands(num):
    """x4 without trans gives the A fragment of a 16 x 16 tile whose quadrants are the four matrices."""
    source, offset = ldmatrix_map("m8n8", num, False, 16)
    assert source.shape == (32, num, 2)
    if num == 4:
        rows, columns = mma_fragment("m16n8k16", "a", 16)
        tile_row = source % 8 + 8 * (source // 8 % 2)
        tile_column = offset // 2 + 8 * (source // 16)
        np.testing.assert_array_equal(tile_row.reshape(32, 8), rows)
        np.testing.assert_array_equal(tile_column.reshape(32, 8), columns)
    trans_source, trans_offset = ldmatrix_map("m8n8", num, True, 16)
    np.testing.assert_array_equal(trans_source % 8, offset // 2)
    np.testing.assert_array_equal(trans_offset // 2, source % 8)


@pytest.mark.parametrize("num", [1, 2])
def test_ldmatrix_b8_gives_the_b_operands_of_two_8_bit_mma_a_matrix(num):
    source, offset = ldmatrix_map("m16n16", num, True, 8)
    rows, columns = mma_fragment("m16n8k16", "b", 8)
    assert source.shape == (32, 2 * num, 4)
    for register in range(2 * num):
        np.testing.assert_array_equal(source[:, register], rows + 16 * (register // 2))
        np.testing.assert_array_equal(offset[:, register], columns + 8 * (register % 2))


def test_stmatrix_b8_stores_the_transposed_accumulator_tile():
    lane, offset = stmatrix_map("m16n8", 1, True, 8)
    rows, columns = mma_fragment("m16n8k16", "c", 32)
    order = [0, 1, 2, 3]  # c0 c1 c2 c3 of the fragment in a register's bytes
    np.testing.assert_array_equal(offset.reshape(32, 4), rows[:, order])
    np.testing.assert_array_equal(lane.reshape(32, 4), columns[:, order])


@pytest.mark.parametrize(
    ("function", "shape", "num", "trans", "bits", "rows"),
    [
        (ldmatrix_map, "m8n8", 4, True, 16, 32),
        (ldmatrix_map, "m16n16", 2, True, 8, 32),
        (stmatrix_map, "m16n8", 4, True, 8, 32),
        (stmatrix_map, "m8n8", 2, False, 16, 16),
    ],
)
def test_matrix_moves_touch_every_element_once(function, shape, num, trans, bits, rows):
    lane, offset = function(shape, num, trans, bits)
    step = bits // 8
    assert sorted((lane * 16 + offset).ravel().tolist()) == list(range(0, rows * 16, step))


def test_unknown_matrix_moves_are_refused():
    with pytest.raises(ValueError, match="ldmatrix"):
        ldmatrix_map("m8n16", 1, False, 8)
    with pytest.raises(ValueError, match="stmatrix"):
        stmatrix_map("m16n8", 1, False, 8)
    with pytest.raises(ValueError, match="tcgen05"):
        tmem_map("8x8b", 1)


# CUTLASS' tcgen05.ld traits: bit index in [lanes, columns * 32 bits] of (thread, value bit 0 of each register)
TMEM = [
    ("32x32b", 4, ((32,), (128,)), ((4,), (32,)), 128),
    ("16x64b", 1, ((2, 2, 8), (512, 32, 64)), ((1,), (0,)), 64),
    ("16x64b", 2, ((2, 2, 8), (1024, 32, 128)), ((2,), (64,)), 128),
    ("16x128b", 2, ((4, 8), (32, 256)), ((2, 2), (2048, 128)), 256),
    ("16x256b", 2, ((4, 8), (64, 512)), ((2, 2, 2), (32, 4096, 256)), 512),
]


@pytest.mark.parametrize(("shape", "num", "threads", "values", "width"), TMEM)
def test_tensor_memory_loads_are_cutlass_layouts(shape, num, threads, values, width):
    lane, column = tmem_map(shape, num)
    np.testing.assert_array_equal(lane * width + 32 * column, _layout(threads, values))


def test_split_load_takes_its_upper_lanes_from_the_offset():
    lane, column = tmem_map("16x32bx2", 2, split=64)
    assert lane[:, 0].tolist() == [*range(16), *range(16)]
    assert column[0].tolist() == [0, 1]
    assert column[16].tolist() == [64, 65]


@pytest.mark.parametrize(
    ("shape", "num", "lanes", "columns"),
    [("32x32b", 128, 32, 128), ("16x64b", 128, 16, 256), ("16x128b", 64, 16, 256), ("16x256b", 32, 16, 256)],
)
def test_tensor_memory_loads_cover_their_shape_once(shape, num, lanes, columns):
    lane, column = tmem_map(shape, num)
    assert sorted((lane * columns + column).ravel().tolist()) == list(range(lanes * columns))


ACCUMULATORS = [
    (128, 64, 1, False, False, 128),
    (256, 64, 2, False, False, 128),
    (64, 64, 1, False, False, 64),
    (128, 64, 2, False, False, 128),
    (128, 64, 2, False, True, 64),
    (64, 64, 1, True, False, 128),
    (32, 64, 1, True, False, 128),
]


@pytest.mark.parametrize(("m", "n", "group", "ws", "sparse", "lanes"), ACCUMULATORS)
def test_accumulator_elements_have_places_of_their_own(m, n, group, ws, sparse, lanes):
    cta, lane, column = accumulator_map(m, n, group, ws, sparse)
    places = (cta * 128 + lane) * 512 + column
    assert len(np.unique(places)) == m * n
    assert len(np.unique(lane)) == lanes
    assert column.max() + 1 == m * n // (group * lanes)
    assert set(np.unique(cta)) == set(range(group))


def test_accumulator_layouts_at_known_points():
    assert [int(v[0]) for v in accumulator_map(64, 8)[1][[0, 15, 16, 63]][:, None, 0]] == [0, 15, 32, 111]
    cta, lane, column = (a[70, 40] for a in accumulator_map(128, 64, 2))
    assert (cta, lane, column) == (1, 6 + 64, 8)
    assert tuple(int(a[200, 3]) for a in accumulator_map(256, 64, 2)) == (1, 72, 3)
    assert tmem_operand_lanes(64).tolist()[15:18] == [15, 32, 33]
    assert tmem_operand_lanes(256, 2).tolist() == list(range(128))


def test_copies_to_tensor_memory_multicast_over_lane_groups():
    assert copy_lanes("32x128b", "warpx4")[3].tolist() == [3, 35, 67, 99]
    assert copy_lanes("64x128b", "warpx2::02_13")[40].tolist() == [40, 104]
    assert copy_lanes("64x128b", "warpx2::01_23")[40].tolist() == [72, 104]
    for key in (("32x128b", "warpx4"), ("64x128b", "warpx2::02_13"), ("64x128b", "warpx2::01_23"), ("128x256b", "")):
        assert sorted(copy_lanes(*key).ravel().tolist()) == list(range(128))
    assert copy_lanes("4x256b").tolist() == [[0], [32], [64], [96]]
    with pytest.raises(ValueError, match="64x128b"):
        copy_lanes("64x128b")


def test_scale_factors_sit_where_a_32x16_byte_tile_puts_them():
    """The 512-byte scale tile: row r, factor f at byte (r % 32) * 16 + (r // 32) * 4 + f, copied by 32x128b.warpx4."""
    lane, column, byte = scale_map(128, 4)
    row, factor = np.arange(128)[:, None], np.arange(4)[None, :]
    np.testing.assert_array_equal(lane * 16 + column * 4 + byte, row % 32 * 16 + row // 32 * 4 + factor)
    lane, column, byte = scale_map(256, 1, scale_id=3)
    assert (lane[200, 0], column[200, 0], byte[200, 0]) == (8, 6, 3)
    lane, column, byte = scale_map(128, 6, scale_id=2)  # K = 96: bytes 2, 3, then the next tile's 0 to 3
    assert byte[40].tolist() == [2, 3, 0, 1, 2, 3]
    assert column[40].tolist() == [1, 1, 5, 5, 5, 5]

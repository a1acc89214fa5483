"""Block scaling against loops, in every format, and with scales in 128x4 tiles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import Net, oracle, rand, reasons, run, single
from torch_reference._memory import Layout, load, store
from torch_reference._rounding import decode, round_value

CPU = torch.device("cpu")


def test_dequantize_row_blocks():
    x, s = rand(2, 3, 8), rand(2, 3, 2, seed=1)
    inputs = {"input": ("float32", (2, 3, 8)), "descale": ("float32", (2, 3, 2))}
    graph = single(
        "block_scale_dequantize",
        inputs,
        {"Y": ("float32", (2, 3, 8))},
        {"block_size": [1, 4], "is_negative_scale": False},
    )
    out = run(graph, {"input": x, "descale": s})["Y"]
    assert all(out[b, i, j] == x[b, i, j] * s[b, i, j // 4] for b in range(2) for i in range(3) for j in range(8))


@pytest.mark.parametrize("block", [[4], [4, 1], [1, 4, 1]])
def test_dequantize_column_blocks(block):
    x, s = rand(2, 8, 3), rand(2, 2, 3, seed=1)
    inputs = {"input": ("float32", (2, 8, 3)), "descale": ("float32", (2, 2, 3))}
    graph = single("block_scale_dequantize", inputs, {"Y": ("float32", (2, 8, 3))}, {"block_size": block})
    out = run(graph, {"input": x, "descale": s})["Y"]
    torch.testing.assert_close(out, x * s.repeat_interleave(4, 1), rtol=0, atol=0)


def test_dequantize_column_blocks_whose_scales_are_declared_as_they_lie_in_tiles():
    x = rand(1, 128, 128)
    codes = torch.randint(100, 140, (128, 4), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    memory = torch.zeros(512, dtype=torch.uint8)
    store(memory.data_ptr(), Layout("fp8_e8m0", (128, 4), (4, 1), "F8_128x4"), decode(codes, "fp8_e8m0"), CPU)
    net = Net()
    net.t("x", "float32", (1, 128, 128))
    net.t("s", "fp8_e8m0", (1, 128, 4), reordering="F8_128x4")
    net.t("y", "float32", (1, 128, 128))
    net.op("block_scale_dequantize", {"input": "x", "descale": "s"}, {"Y": "y"}, {"block_size": [32, 1]})
    out = run(net.frozen(), {"x": x, "s": memory})["y"][0]
    assert torch.equal(out, x[0] * decode(codes, "fp8_e8m0").T.repeat_interleave(32, 0))


def test_nvfp4_matmul_with_tiled_scales():
    """fp4 operands, e4m3 scales of 16 elements in 128x4 tiles, on both sides of a matmul."""
    m, n, k = 128, 128, 64
    net = Net()
    net.t("a", "fp4_e2m1", (1, m, k))
    net.t("b", "fp4_e2m1", (1, k, n), (k * n, 1, k))
    net.t("sa", "fp8_e4m3", (1, m, k // 16), reordering="F8_128x4")
    net.t("sb", "fp8_e4m3", (1, k // 16, n), (n * k // 16, 1, k // 16), reordering="F8_128x4")
    net.t("da", "float32", (1, m, k), role="virtual")
    net.t("db", "float32", (1, k, n), role="virtual")
    net.t("c", "float32", (1, m, n))
    net.op("block_scale_dequantize", {"input": "a", "descale": "sa"}, {"Y": "da"}, {"block_size": [1, 16]})
    net.op("block_scale_dequantize", {"input": "b", "descale": "sb"}, {"Y": "db"}, {"block_size": [16, 1]})
    net.op("matmul", {"A": "da", "B": "db"}, {"C": "c"}, {"padding": 0.0})
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randint(0, 16, (r, k), generator=generator, dtype=torch.uint8) for r in (m, n))
    sa, sb = (torch.randint(0x20, 0x50, (r, k // 16), generator=generator, dtype=torch.uint8) for r in (m, n))

    def pack(codes):
        return codes[:, ::2] | codes[:, 1::2] << 4

    def tile(codes):
        memory = torch.zeros(codes.numel(), dtype=torch.uint8)
        for r in range(codes.shape[0]):
            for c in range(codes.shape[1]):
                memory[(c // 4) * 512 + (r % 32) * 16 + (r // 32) * 4 + c % 4] = codes[r, c]
        return memory

    full = [
        decode(x, "fp4_e2m1").double() * decode(s, "fp8_e4m3").double().repeat_interleave(16, 1)
        for x, s in ((a, sa), (b, sb))
    ]
    out = run(net.frozen(), {"a": pack(a).contiguous(), "b": pack(b).contiguous(), "sa": tile(sa), "sb": tile(sb)})["c"]
    torch.testing.assert_close(out[0].double(), full[0] @ full[1].T, rtol=1e-6, atol=1e-3)


FORMATS = [
    ("fp8_e4m3", "fp8_e8m0", 32), ("fp8_e5m2", "fp8_e8m0", 32), ("fp4_e2m1", "fp8_e4m3", 16),
    ("fp4_e2m1", "fp8_e8m0", 32), ("fp4_e2m1", "fp8_e5m3", 16), ("int8", "float32", 8),
]  # fmt: skip
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp4_e2m1": 6.0, "int8": 127.0}


@pytest.mark.parametrize(("y", "scale", "block"), FORMATS)
@pytest.mark.parametrize("axis", [None, 1])
def test_quantize_takes_the_smallest_scale_that_fits_and_divides_by_the_stored_one(y, scale, block, axis):
    dim = (1, 64, 64)
    x = rand(*dim, dtype=torch.float32) * torch.logspace(-3, 3, 64).reshape(1, 64, 1)
    x[0, :, 5], x[0, 3] = 0.0, 0.0
    at = 2 if axis is None else axis
    scale_dim = tuple(n // block if i == at else n for i, n in enumerate(dim))
    graph = single("block_scale_quantize", {"input": ("float32", dim)}, {"Y": (y, dim), "scale": (scale, scale_dim)},
                   {"block_size": block, "axis": axis, "transpose": False})  # fmt: skip
    out = run(graph, {"input": x})
    ys = load(out["Y"].data_ptr(), Layout(y, dim, (4096, 64, 1)), CPU).double().numpy()
    scales = load(out["scale"].data_ptr(), Layout(scale, scale_dim, out["scale"].stride()), CPU).double().numpy()
    blocks = np.moveaxis(x.double().numpy(), at, -1).reshape(1, 64, -1, block)
    want = np.abs(blocks).max(-1) / LARGEST[y]
    got = np.moveaxis(scales, at, -1)
    if scale == "fp8_e8m0":
        positive = want > 0
        assert (got[positive] == 2.0 ** np.ceil(np.log2(want[positive]))).all()
        assert (got[~positive] == 2.0**-127).all()
    elif scale == "fp8_e5m3":
        assert (got >= want).all()
        normal = want >= 2.0**-14
        assert (got[normal] <= want[normal] * 1.125).all()
    else:
        nearest = round_value(torch.from_numpy(want), scale).double().numpy()
        np.testing.assert_array_equal(got, nearest)
    with np.errstate(invalid="ignore", divide="ignore"):
        data = np.where(got[..., None] > 0, blocks / got[..., None], 0.0)
    expected = round_value(torch.from_numpy(data), y).double().numpy()
    found = np.moveaxis(ys, at, -1).reshape(blocks.shape)
    # Divided in fp32, an element can cross a rounding boundary by an ulp of the quotient.
    close = np.isclose(found, expected, rtol=0, atol=0)
    assert close.mean() > 0.999


def test_quantize_then_dequantize_is_the_identity_on_representable_blocks():
    x = torch.tensor([6.0, -3.0, 0.5, 1.0, 12.0, -4.0, 2.0, 1.0])
    net = Net()
    net.t("x", "float32", (1, 8))
    net.t("y", "fp4_e2m1", (1, 8), role="virtual")
    net.t("s", "fp8_e8m0", (1, 2), role="virtual")
    net.t("z", "float32", (1, 8))
    net.op(
        "block_scale_quantize",
        {"input": "x"},
        {"Y": "y", "scale": "s"},
        {"block_size": 4, "axis": None, "transpose": False},
    )
    net.op("block_scale_dequantize", {"input": "y", "descale": "s"}, {"Y": "z"}, {"block_size": [1, 4]})
    assert run(net.frozen(), {"x": x})["z"][0].tolist() == x.tolist()


def test_quantize_writes_padded_tiles_and_zero_padding():
    dim, padded = (1, 100, 64), (1, 128, 4)
    x = rand(*dim)
    net = Net()
    net.t("x", "float32", dim)
    net.t("y", "fp8_e4m3", dim)
    net.t("s", "fp8_e8m0", padded, reordering="F8_128x4")
    net.op(
        "block_scale_quantize",
        {"input": "x"},
        {"Y": "y", "scale": "s"},
        {"block_size": 32, "axis": None, "transpose": False},
    )
    out = run(net.frozen(), {"x": x})
    tiled = load(out["s"].data_ptr(), Layout("fp8_e8m0", padded, (512, 4, 1), "F8_128x4"), CPU)[0]
    amax = x[0].abs().reshape(100, 2, 32).amax(-1).double() / 448
    assert torch.equal(tiled[:100, :2].double(), 2.0 ** torch.ceil(torch.log2(amax)))
    assert (tiled[100:] == 2.0**-127).all()


def test_column_quantize_into_transposed_tiles():
    dim, scale_dim = (1, 128, 128), (1, 128, 4)  # scales of column blocks, declared [N, M / block]
    x = rand(*dim)
    net = Net()
    net.t("x", "float32", dim)
    net.t("y", "fp8_e4m3", dim)
    net.t("s", "fp8_e8m0", scale_dim, reordering="F8_128x4")
    net.op(
        "block_scale_quantize",
        {"input": "x"},
        {"Y": "y", "scale": "s"},
        {"block_size": 32, "axis": 1, "transpose": True},
    )
    out = run(net.frozen(), {"x": x})
    tiled = load(out["s"].data_ptr(), Layout("fp8_e8m0", scale_dim, (512, 4, 1), "F8_128x4"), CPU)[0]
    amax = x[0].abs().reshape(4, 32, 128).amax(1).T.double() / 448
    assert torch.equal(tiled.double(), 2.0 ** torch.ceil(torch.log2(amax)))


def test_nan_and_infinite_blocks():
    x = torch.ones(1, 64)
    x[0, 3], x[0, 40] = math.nan, math.inf
    graph = single("block_scale_quantize", {"input": ("float32", (1, 64))}, {"Y": ("fp8_e4m3", (1, 64)), "scale": ("fp8_e8m0", (1, 2))},
                   {"block_size": 32, "axis": None, "transpose": False})  # fmt: skip
    found = oracle(graph, {"input": x})
    assert found["scale"][0, 0].isnan()
    assert found["scale"][0, 1] == 2.0**127
    assert found["Y"][0, 40] == 448.0


def test_what_is_not_implemented_is_declined_by_attribute():
    inputs = {"input": ("float32", (1, 8)), "descale": ("float32", (1, 2))}
    graph = single(
        "block_scale_dequantize", inputs, {"Y": ("float32", (1, 8))}, {"block_size": [4], "is_negative_scale": True}
    )
    assert reasons(graph) == [("op.attribute", "block_scale_dequantize.is_negative_scale")]
    inputs = {"input": ("float32", (1, 8)), "group_offset": ("int32", (2, 1, 1))}
    graph = single("block_scale_quantize", inputs, {"Y": ("fp8_e4m3", (1, 8)), "scale": ("fp8_e8m0", (1, 2))},
                   {"block_size": 4, "axis": None, "transpose": False})  # fmt: skip
    assert reasons(graph) == [("op.attribute", "block_scale_quantize.group_offset")]
    net = Net()
    net.t("x", "float32", (1, 8))
    net.t("s", "fp8_e8m0", (1, 100, 3), reordering="F8_128x4")
    net.t("y", "float32", (1, 8))
    net.op("block_scale_dequantize", {"input": "x", "descale": "s"}, {"Y": "y"}, {"block_size": [4]})
    assert reasons(net.frozen()) == [("shape.multiple_of", "s.dim[1]"), ("shape.multiple_of", "s.dim[2]")]


def test_store_of_a_tile_leaves_other_batches_alone():
    memory = torch.full((1024,), 9, dtype=torch.uint8)
    store(memory[512:].data_ptr(), Layout("fp8_e8m0", (128, 4), (4, 1), "F8_128x4"), torch.ones(128, 4), CPU)
    assert (memory[:512] == 9).all()
    assert (memory[512:] == 127).all()


def test_a_block_just_above_a_power_of_two_times_the_largest_value_gets_the_next_scale():
    above = torch.nextafter(torch.tensor(448.0), torch.tensor(1000.0))
    graph = single("block_scale_quantize", {"input": ("float32", (1, 32))}, {"Y": ("fp8_e4m3", (1, 32)), "scale": ("fp8_e8m0", (1, 1))},
                   {"block_size": 32, "axis": None, "transpose": False})  # fmt: skip
    for precision in ("float32", "float64"):
        assert oracle(graph, {"input": above.expand(1, 32)}, precision=precision)["scale"].item() == 2.0
        assert oracle(graph, {"input": torch.full((1, 32), 448.0)}, precision=precision)["scale"].item() == 1.0

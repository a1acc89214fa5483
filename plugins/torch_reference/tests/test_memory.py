"""Operands at raw addresses: offsets, odd strides, packing, tiles, empty sizes, and nothing written beside the elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import Net, rand, run, single
from torch_reference._memory import Layout, load, store
from torch_reference._rounding import decode

CPU = torch.device("cpu")


def test_identity_reads_and_writes_any_strides_and_touches_nothing_between():
    source = rand(64, dtype=torch.float32)
    graph = single("identity", {"in0": ("float32", (3, 4), (17, 2))}, {"out": ("float32", (3, 4), (1, 5))})
    target = torch.full((64,), 7.0)
    run(graph, {"in0": source[5:], "out": target[3:]})
    expected = torch.full((64,), 7.0)
    for i in range(3):
        for j in range(4):
            expected[3 + i + 5 * j] = source[5 + 17 * i + 2 * j]
    assert torch.equal(target, expected)


def test_zero_stride_inputs_broadcast():
    graph = single("identity", {"in0": ("float32", (3, 2), (0, 1))}, {"out": ("float32", (3, 2))})
    assert run(graph, {"in0": torch.tensor([1.0, 2.0])})["out"].tolist() == [[1.0, 2.0]] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8_e4m3", "fp4_e2m1", "int4", "int64", "boolean"])
def test_empty_tensors_touch_no_memory(dtype):
    layout = Layout(dtype, (2, 0, 3), (0, 3, 1))
    value = load(1, layout, CPU)
    assert tuple(value.shape) == (2, 0, 3)
    store(1, layout, value, CPU)


def test_an_unaligned_address_is_read():
    raw = torch.zeros(33, dtype=torch.uint8)
    raw[1:].copy_(torch.arange(8, dtype=torch.float32).view(torch.uint8))
    assert load(raw.data_ptr() + 1, Layout("float32", (8,), (1,)), CPU).tolist() == list(range(8))


@pytest.mark.parametrize("stride", [(4, 1), (1, 3), (5, 1), (7, 2)])
@pytest.mark.parametrize("dtype", ["fp4_e2m1", "int4"])
def test_four_bit_elements_lie_two_a_byte_by_element_offset(dtype, stride):
    dim = (3, 4)
    codes = torch.randint(0, 16, dim, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    layout = Layout(dtype, dim, stride)
    memory = torch.full((layout.nbytes,), 0x5A, dtype=torch.uint8)
    store(memory.data_ptr(), layout, decode(codes, dtype), CPU)
    nibbles = [byte >> shift & 15 for byte in memory.tolist() for shift in (0, 4)]
    expected = [0xA, 0x5] * layout.nbytes
    for i in range(3):
        for j in range(4):
            expected[i * stride[0] + j * stride[1]] = int(codes[i, j])
    canonical = [0 if dtype == "fp4_e2m1" and n == 0 else n for n in expected]
    assert nibbles == canonical
    assert torch.equal(load(memory.data_ptr(), layout, CPU), decode(codes, dtype))


@pytest.mark.parametrize("stride", [(1536, 4, 1), (1536, 1, 256)])
def test_f8_128x4_tiles_follow_the_published_formula(stride):
    # rows x columns per batch: (256, 4) column-fastest, or rows-as-columns with 256-row... the unit-stride axis is columns
    dim = (2, 256, 4) if stride[1] == 4 else (2, 4, 256)
    if stride[1] == 4:
        rows, columns, at = 256, 4, lambda b, r, c: (b, r, c)
    else:
        stride = (1024, 1, 4)
        rows, columns, at = 256, 4, lambda b, r, c: (b, c, r)
    plane = stride[0]
    codes = torch.randint(0, 255, dim, generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    memory = torch.zeros(Layout("fp8_e8m0", dim, stride).nbytes, dtype=torch.uint8)
    layout = Layout("fp8_e8m0", dim, stride, "F8_128x4")
    store(memory.data_ptr(), layout, decode(codes, "fp8_e8m0"), CPU)
    for b in range(2):
        for r in range(0, rows, 7):
            for c in range(columns):
                byte = (r // 128) * (columns // 4) * 512 + (c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
                assert memory[b * plane + byte] == codes[at(b, r, c)]
    assert torch.equal(load(memory.data_ptr(), layout, CPU), decode(codes, "fp8_e8m0"))


def test_f8_128x4_with_several_column_tiles():
    dim, stride = (128, 8), (8, 1)
    codes = torch.arange(1024).remainder(251).to(torch.uint8).reshape(dim)
    memory = torch.zeros(1024, dtype=torch.uint8)
    store(memory.data_ptr(), Layout("fp8_e4m3", dim, stride, "F8_128x4"), decode(codes, "fp8_e4m3"), CPU)
    r, c = np.meshgrid(np.arange(128), np.arange(8), indexing="ij")
    byte = (c // 4) * 512 + (r % 32) * 16 + (r // 32) * 4 + c % 4
    seen = decode(memory[torch.from_numpy(byte)], "fp8_e4m3")
    assert torch.equal(seen.nan_to_num(1), decode(codes, "fp8_e4m3").nan_to_num(1))


def test_inputs_are_read_before_outputs_are_written():
    """out0 lies on the input that out1 is a view of."""
    net = Net()
    net.t("x", "float32", (4,))
    net.t("y", "float32", (4,))
    net.t("z", "float32", (2, 2))
    net.op("neg", {"in0": "x"}, {"out": "y"})
    net.op("reshape", {"input": "x"}, {"Y": "z"}, {"reshape_mode": "LOGICAL"})
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    out = run(net.frozen(), {"x": x, "y": x})
    assert x.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert out["z"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_inputs_stay_untouched():
    x, w = rand(4, 8), rand(8, 4, seed=1)
    before = x.clone(), w.clone()
    run(
        single("matmul", {"A": ("float32", (4, 8)), "B": ("float32", (8, 4))}, {"C": ("float32", (4, 4))}),
        {"A": x, "B": w},
    )
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])

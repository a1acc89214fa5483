"""What only a GPU shows; the other modules run there too with REFERENCE_TEST_DEVICE=cuda."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import rand, single
from torch_reference._engine import Eager

from cudnn_core import ExecutionContext, Operand, VariantPack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _operands(graph):
    return tuple(Operand(t.uid, t.name, t.dtype, t.dim, t.stride, t.role, t.by_value) for t in graph.operand_tensors())


def test_work_is_ordered_on_the_given_stream():
    size = 4096
    graph = single(
        "matmul", {"A": ("float32", (size, size)), "B": ("float32", (size, size))}, {"C": ("float32", (size, size))}
    )
    ctx = ExecutionContext(None, SimpleNamespace(type="cuda", ordinal=0))
    plan = Eager().build_plan(graph, None, ctx)
    stream = torch.cuda.Stream()
    a, c = torch.zeros(size, size, device="cuda"), torch.empty(size, size, device="cuda")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # the operand is filled long after the launch
        a.fill_(1.0)
        plan.execute(
            VariantPack(_operands(graph), tuple(t.data_ptr() for t in (a, a, c))),
            ctx._replace(stream=stream.cuda_stream),
        )
        total = c.sum()
    stream.synchronize()
    assert total.item() == size**3


def test_int64_products_are_exact():
    a = torch.randint(-(2**31), 2**31, (3, 5), dtype=torch.int64)
    b = torch.randint(-(2**31), 2**31, (5, 4), dtype=torch.int64)
    graph = single("matmul", {"A": ("int64", (3, 5)), "B": ("int64", (5, 4))}, {"C": ("int64", (3, 4))}, {}, "int64")
    ctx = ExecutionContext(None, SimpleNamespace(type="cuda", ordinal=0))
    x, y, c = a.cuda(), b.cuda(), torch.zeros(3, 4, dtype=torch.int64, device="cuda")
    Eager().build_plan(graph, None, ctx).execute(
        VariantPack(_operands(graph), (x.data_ptr(), y.data_ptr(), c.data_ptr())), ctx
    )
    assert torch.equal(c.cpu(), a @ b)


def test_tf32_of_the_process_is_not_followed():
    x = rand(256, 256)
    graph = single(
        "matmul", {"A": ("float32", (256, 256)), "B": ("float32", (256, 256))}, {"C": ("float32", (256, 256))}
    )
    ctx = ExecutionContext(None, SimpleNamespace(type="cuda", ordinal=0))
    before = torch.get_float32_matmul_precision()
    a, c = x.cuda(), torch.empty(256, 256, device="cuda")
    try:
        torch.set_float32_matmul_precision("high")
        Eager().build_plan(graph, None, ctx).execute(
            VariantPack(_operands(graph), (a.data_ptr(), a.data_ptr(), c.data_ptr())), ctx
        )
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(c.cpu().double(), x.double() @ x.double(), rtol=1e-5, atol=1e-5)

"""``checks`` and ``Carver``, as a plugin uses them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cudnn_core._checks import Carver, checks
from cudnn_core._dims import Dim, product
from cudnn_core._engine import Declined, ExecutionContext, PlanConfig, Support
from cudnn_core._errors import CudnnCoreError, ExecutionError

DEVICE = SimpleNamespace(type="cuda", compute_capability=(9, 0), arch="90a", shared_memory_per_block_optin=232448)
A = SimpleNamespace(dtype="bfloat16", dim=(4, 64, 32), stride=(2048, 32, 1))
ADD = SimpleNamespace(op="add", attrs={})
MATMUL = SimpleNamespace(op="matmul", attrs={"padding": 0.0})
GRAPH = SimpleNamespace(nodes=(MATMUL, ADD), dims={})
SUPPORT = Support((PlanConfig("p:e@1", {}),))

# call -> (code, subject, expected, actual) of the decline that it must give
FAILING = [
    (lambda c: c.device("cpu"), ("device.type", "device", ["cpu"], "cuda")),
    (lambda c: c.sm("100f"), ("device.sm_variant", "device", ["100f"], "90a")),
    (lambda c: c.smem(300_000), ("device.smem", "device", 300_000, 232448)),
    (lambda c: c.ops("matmul"), ("op.unsupported", "add", ["matmul"], "add")),
    (lambda c: c.op(ADD, "relu", "gelu"), ("op.unsupported", "add", ["relu", "gelu"], "add")),
    (lambda c: c.attr(MATMUL, "padding", 1.0), ("op.attribute", "matmul.padding", [1.0], 0.0)),
    (lambda c: c.dtype("A", A, "float16"), ("dtype.unsupported", "A", ["float16"], "bfloat16")),
    (lambda c: c.rank("A", A, 2, 4), ("shape.rank", "A", [2, 4], 3)),
    (lambda c: c.multiple_of("k", 33, 8), ("shape.multiple_of", "k", {"multiple_of": 8}, 33)),
    (lambda c: c.multiple_of("k", Dim("k"), 8), ("shape.multiple_of", "k", {"multiple_of": 8}, "k")),
    (lambda c: c.between("m", 0, 1, 64), ("shape.range", "m", {"min": 1, "max": 64}, 0)),
    (lambda c: c.between("m", Dim("m", max=65), 1, 64), ("shape.range", "m", {"min": 1, "max": 64}, "m")),
    (lambda c: c.no_dynamic("k", 8, Dim("k")), ("shape.dynamic", "k", "fixed sizes", ["k"])),
    (lambda c: c.contiguous("A", A, order=(0, 2, 1)), ("layout.stride", "A", [2048, 1, 64], [2048, 32, 1])),
    (lambda c: c.require(False, "x.acme.odd", "A", 1, 2), ("x.acme.odd", "A", 1, 2)),
]
HOLDING = [
    lambda c: c.device("cpu", "cuda"),
    lambda c: c.sm("90a", "100f"),
    lambda c: c.smem(232448),
    lambda c: c.ops("matmul", "add"),
    lambda c: c.op(ADD, "add"),
    lambda c: c.attr(MATMUL, "padding", 0.0),
    lambda c: c.dtype("A", A, "float16", "bfloat16"),
    lambda c: c.rank("A", A, 3),
    lambda c: c.multiple_of("k", 32, 8),
    lambda c: c.multiple_of("k", 0, 8),
    lambda c: c.multiple_of("k", Dim("k", multiple_of=16), 8),
    lambda c: c.multiple_of("mk", product((4, Dim("m"), Dim("k", multiple_of=2))), 8),
    lambda c: c.between("m", Dim("m", max=64), 1, 64),
    lambda c: c.no_dynamic(),
    lambda c: c.contiguous("A", A),
    lambda c: c.contiguous("A", SimpleNamespace(dim=(1, 4), stride=(99, 1))),
    lambda c: c.require(1, "no such code needs checking on the good path"),
]


@pytest.fixture
def c():
    return checks(GRAPH, ExecutionContext(None, DEVICE))


@pytest.mark.parametrize(("call", "expected"), FAILING)
def test_a_failing_check_adds_one_uniform_decline(c, call, expected):
    assert call(c) is False
    assert not c
    result = c.result(SUPPORT)
    assert isinstance(result, Declined)
    (decline,) = result.reasons
    assert (decline.code, decline.subject, decline.expected, decline.actual) == expected


@pytest.mark.parametrize("call", HOLDING)
def test_a_holding_check_is_silent(c, call):
    assert call(c) is True
    assert c
    assert c.result(SUPPORT) is SUPPORT


def test_all_declines_are_collected(c):
    c.device("cpu")
    c.dtype("A", A, "float16")
    c.multiple_of("k", 33, 8)
    assert [item.code for item in c.result(SUPPORT).reasons] == [
        "device.type",
        "dtype.unsupported",
        "shape.multiple_of",
    ]


def test_a_runtime_size_anywhere_in_the_graph_is_found():
    c = checks(SimpleNamespace(nodes=(), dims={"m": Dim("m")}), ExecutionContext(None, DEVICE))
    assert c.no_dynamic() is False
    assert c.declines[0].actual == ["m"]


def test_a_code_outside_the_catalogue_is_a_bug_of_the_plugin(c):
    with pytest.raises(CudnnCoreError, match=r"dtype\.unsupported"):
        c.require(False, "dtype.unsuported")


def test_a_workspace_is_cut_into_aligned_buffers():
    carver = Carver(0x1000, 1024)
    assert carver.take(10) == 0x1000
    assert carver.take(10) == 0x1100
    assert carver.take(4, align=16) == 0x1110
    assert carver.used == 0x114


def test_a_workspace_that_is_too_small_is_an_execution_error():
    carver = Carver(0x1000, 300)
    carver.take(256)
    with pytest.raises(ExecutionError, match="workspace: 356 bytes are needed, 300 were given") as refused:
        carver.take(100)
    assert refused.value.operand == "workspace"
    assert carver.take(44) == 0x1100


def test_a_carver_without_size_measures():
    measure = Carver(0)
    for nbytes in (10, 300, 1):
        measure.take(nbytes)
    assert measure.used == 256 + 512 + 1
    carver = Carver(0x1000, measure.used)
    for nbytes in (10, 300, 1):
        carver.take(nbytes)


@pytest.mark.parametrize(("nbytes", "align"), [(-1, 256), (1, 0), (1, 48)])
def test_nonsense_is_refused(nbytes, align):
    with pytest.raises(ValueError, match="power of two"):
        Carver(0).take(nbytes, align)

"""The roofline bound: hand-computed microseconds, what drops out, and ops that cannot be trusted."""

from __future__ import annotations

import pytest

import cudnn_core._roofline as roofline
from cudnn_core._device import DeviceInfo, device_info
from cudnn_core._dims import Dim
from cudnn_core._ops._schema import Cost as NodeCost
from cudnn_core._ops._schema import Op, Port
from cudnn_core._roofline import Cost, graph_cost, roofline_us


def op(name, cost):
    return Op(name, inputs=(), outputs=(Port("out"),), infer=lambda node: {}, cost=cost)


@pytest.fixture
def rows(monkeypatch):
    """The op table, replaced by costs per op name."""
    table = {}
    monkeypatch.setattr(roofline, "lookup", lambda name: op(name, table.get(name)))
    return table


def test_matmul_work_is_two_mnk_and_each_operand_once(fake):
    cost = graph_cost(fake.matmul(64, 128, 256))
    assert dict(cost.flops) == {"bfloat16": 2 * 64 * 128 * 256}
    assert cost.bytes == 2 * (64 * 256 + 256 * 128 + 64 * 128)


def test_virtual_tensors_cost_no_bytes(fake):
    assert graph_cost(fake.matmul(64, 128, 256, relu=True)).bytes == graph_cost(fake.matmul(64, 128, 256)).bytes


def test_runtime_sizes_count_at_their_hint(fake):
    dim = Dim("m", min=16, max=256)
    assert graph_cost(fake.matmul(dim, 128, 256)) == graph_cost(fake.matmul(64, 128, 256))


def test_by_value_tensors_cost_no_bytes(fake, rows):
    graph = fake.graph([fake.tensor(0, (1024,)), fake.tensor(1, (1,), by_value=True)], [])
    assert graph_cost(graph).bytes == 2048


def test_an_op_that_touches_a_part_of_its_tensors_says_so(fake, rows):
    table, out = fake.tensor(0, (1000, 64)), fake.tensor(1, (8, 64), role="output")
    node = fake.node(0, "gather", {"table": table}, {"out": out})
    rows["gather"] = lambda node: NodeCost(0.0, 2 * 2 * 8 * 64)
    assert graph_cost(fake.graph([table, out], [node])).bytes == 2 * 2 * 8 * 64


@pytest.mark.parametrize(
    "answer",
    [lambda node: 1 / 0, lambda node: NodeCost(float("nan"), 1.0), lambda node: NodeCost(-1.0, 1.0), lambda node: "x"],
)
def test_a_broken_cost_row_costs_its_flops_only(fake, rows, caplog, answer):
    rows["matmul"] = answer
    cost = graph_cost(fake.matmul(64, 128, 256))
    assert not cost.flops
    assert cost.bytes == 2 * (64 * 256 + 256 * 128 + 64 * 128)
    assert "no cost for op matmul" in caplog.text


def test_the_longer_of_memory_and_compute_bounds(fake):
    device = fake.device(bandwidth=1e12, peaks={"bfloat16": 1e15})
    assert roofline_us(Cost({"bfloat16": 5e9}, 0.0, 1e6), device) == pytest.approx(5.0)
    assert roofline_us(Cost({"bfloat16": 5e8}, 0.0, 1e6), device) == pytest.approx(1.0)


def test_work_of_several_data_types_adds_up(fake):
    device = fake.device(bandwidth=1e12, peaks={"bfloat16": 1e15, "fp8_e4m3": 2e15})
    assert roofline_us(Cost({"bfloat16": 1e9, "fp8_e4m3": 1e9}, 0.0, 0.0), device) == pytest.approx(1.5)


def test_an_unpublished_peak_drops_out_and_leaves_the_bytes(fake):
    device = fake.device(bandwidth=1e12, peaks={"bfloat16": None})
    assert roofline_us(Cost({"bfloat16": 1e12}, 0.0, 1e6), device) == pytest.approx(1.0)


def test_an_unpublished_bandwidth_drops_out_and_leaves_the_flops(fake):
    assert roofline_us(Cost({"bfloat16": 5e9}, 0.0, 1e9), fake.device(bandwidth=None)) == pytest.approx(5.0)


def test_no_published_rate_at_all_is_no_roofline(fake):
    assert roofline_us(Cost({"bfloat16": 5e9}, 0.0, 1e9), fake.device(bandwidth=None, peaks={})) is None


def test_flops_that_no_tensor_core_does_have_no_published_rate(fake):
    device = fake.device(bandwidth=1e12, peaks={"float32": 1e12})
    assert roofline_us(Cost({}, 1e12, 1e6), device) == pytest.approx(1.0)


def test_a_square_matmul_on_an_h200_takes_what_its_data_sheet_says(fake):
    device = DeviceInfo.preset("H200")
    assert roofline_us(graph_cost(fake.matmul(8192, 8192, 8192)), device) == pytest.approx(
        2 * 8192**3 / 989e12 * 1e6, rel=0.01
    )
    assert roofline_us(graph_cost(fake.matmul(1, 8192, 8192)), device) == pytest.approx(
        2 * 8192**2 / 4.8e12 * 1e6, rel=0.01
    )


def test_a_cpu_has_no_roofline(fake):
    assert roofline_us(graph_cost(fake.matmul(64, 64, 64)), device_info("cpu")) is None

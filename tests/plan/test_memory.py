"""Where operands and the workspace may lie: what can't be seen to be apart is refused, and nothing else."""

from __future__ import annotations

import ctypes
import itertools
import math

import numpy as np
import pytest

import cudnn_core
from cudnn_core import Dim, ExecutionError, Graph
from cudnn_core._bounds import _Block, _disjoint
from cudnn_core.testing import temporary_plugin

torch = pytest.importorskip("torch")
F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}


# --- columns of one buffer
def test_columns_of_one_buffer_are_apart():
    g = Graph(**F32)
    x = g.tensor(dim=(4, 8), stride=(24, 1), name="x")
    g.relu(x).set_output(True).set_stride((24, 1)).set_name("y")
    g.neg(x).set_output(True).set_stride((24, 1)).set_name("z")
    plan, buffer = g.plan(device="cpu"), torch.zeros(4, 24)
    buffer[:, :8] = 1
    plan.execute({"x": buffer[:, :8], "y": buffer[:, 8:16], "z": buffer[:, 16:]})
    assert buffer[2].tolist() == [1] * 16 + [-1] * 8
    for bad in (buffer[:, 9:17], buffer[:, 7:15]):
        with pytest.raises(ExecutionError, match="overlaps operand"):
            plan.execute({"x": buffer[:, :8], "y": bad, "z": buffer[:, 16:]})


def test_the_heads_of_a_packed_projection_are_apart():
    b, h, s, d = 2, 3, 4, 8
    stride = (3 * s * h * d, d, 3 * h * d, 1)
    g = Graph(**F32)
    q, k = (g.tensor(dim=(b, h, s, d), stride=stride, name=name) for name in "qk")
    g.add(q, k).set_output(True).set_stride(stride).set_name("v")
    buffer = torch.randn(b, s, 3, h, d)
    parts = [buffer[:, :, i].transpose(1, 2) for i in range(3)]
    g.plan(device="cpu").execute(dict(zip("qkv", parts, strict=True)))
    assert torch.equal(parts[2], parts[0] + parts[1])


def test_apart_is_never_said_of_blocks_that_share_a_byte():
    layouts = [(dim, stride) for dim in ((2, 3), (3, 2)) for stride in itertools.product((0, 1, 2, 3, 6, 7), repeat=2)]
    said = 0
    for width in (4, 8, 16):
        for (dim, stride), (other_dim, other_stride) in itertools.product(layouts, layouts[::3]):
            for shift in (0, 1, 2, 3, 5, 8):
                blocks = [
                    _Block(address, 0, width, sizes, tuple(step * width for step in steps))
                    for address, sizes, steps in ((64, dim, stride), (64 + shift, other_dim, other_stride))
                ]
                if _disjoint(*blocks):
                    said += 1
                    assert not (touched(blocks[0]) & touched(blocks[1])), blocks
    assert said > 100


def touched(block):
    """The bytes, one by one."""
    result = set()
    for index in itertools.product(*map(range, block.dim)):
        start = block.address * 8 + sum(i * step for i, step in zip(index, block.stride, strict=True))
        result |= set(range(start // 8, -(-(start + block.element) // 8)))
    return result


# --- runtime sizes
def strided():
    m = Dim("m", min=1, max=64)
    g = Graph(**F32)
    a, b = g.tensor(dim=(3, 4), stride=(m, 1), name="a"), g.tensor(dim=(m, 1), name="b")
    g.relu(a).set_output(True).set_stride((4, 1)).set_name("y")
    g.relu(b).set_output(True).set_name("z")
    return g.plan(device="cpu")


@pytest.mark.parametrize("order", list(itertools.permutations("abyz")))
def test_a_stride_is_checked_whichever_operand_tells_its_size(order):
    plan = strided()
    buffers = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.ones(50, 1),
        "y": torch.zeros(3, 4),
        "z": torch.zeros(50, 1),
    }
    with pytest.raises(ExecutionError, match=r"operand a has strides \(4, 1\), needs \(50, 1\)"):
        plan.execute({name: buffers[name] for name in order})
    buffers |= {"a": torch.arange(150.0).reshape(3, 50)[:, :4]}
    plan.execute({name: buffers[name] for name in order})
    assert torch.equal(buffers["y"], buffers["a"])


def test_products_of_sizes_are_bound_and_checked():
    m, n = Dim("m", max=64), Dim("n", max=64)
    g = Graph(**F32)
    x = g.tensor(dim=(m, n), name="x")
    g.reshape(x, reshape_mode="LOGICAL", out_dims=(m * n,)).set_output(True).set_name("y")
    plan, out = g.plan(device="cpu"), torch.zeros(32)
    for keys in ("xy", "yx"):
        values = {"x": torch.arange(32.0).reshape(8, 4), "y": out}
        plan.execute({key: values[key] for key in keys})
        assert torch.equal(out, torch.arange(32.0))
        with pytest.raises(ExecutionError, match=r"operand y"):
            plan.execute({key: {**values, "y": torch.zeros(31)}[key] for key in keys})


# --- ragged operands
def ragged():
    b, h, s, d = 2, 2, 8, 16
    lens = [5, 3]
    total = sum(lens)
    q, k, v = (torch.randn(total, h, d) for _ in range(3))
    offsets = torch.tensor([0, 5 * h * d, 8 * h * d], dtype=torch.int32).reshape(3, 1, 1, 1)
    lengths = torch.tensor(lens, dtype=torch.int32).reshape(b, 1, 1, 1)
    g = Graph(**F32)
    stride = (s * h * d, d, h * d, 1)
    r = g.tensor_like(offsets, name="r")
    tensors = [g.tensor(dim=(b, h, s, d), stride=stride, ragged_offset=r, name=name) for name in "qkv"]
    length = g.tensor_like(lengths, name="l")
    o, _ = g.sdpa(
        q=tensors[0], k=tensors[1], v=tensors[2], attn_scale=1 / math.sqrt(d), use_padding_mask=True, seq_len_q=length,
        seq_len_kv=length,
    )  # fmt: skip
    o.set_output(True).set_dim((b, h, s, d)).set_stride(stride).set_ragged_offset(r).set_name("o")
    want = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(*(t[rows].transpose(0, 1) for t in (q, k, v))).transpose(
                0, 1
            )
            for rows in (slice(0, 5), slice(5, 8))
        ]
    )
    return g.plan(device="cpu"), {"q": q, "k": k, "v": v, "r": offsets, "l": lengths}, want


def test_ragged_operands_come_packed():
    plan, buffers, want = ragged()
    for _ in range(2):
        out = torch.zeros(8, 2, 16)
        plan.execute({**buffers, "o": out})
        torch.testing.assert_close(out, want)
    with pytest.raises(ExecutionError, match="operand q has data type float64"):
        plan.execute({**buffers, "q": buffers["q"].double(), "o": out})
    with pytest.raises(ExecutionError, match="operand q has a null address"):
        plan.execute({**buffers, "q": 0, "o": out})


@pytest.mark.parametrize("order", ["qkvo", "okvq"])
def test_ragged_operands_may_be_neighbours(order):
    plan, buffers, want = ragged()
    arena = torch.zeros(4, 8, 2, 16)
    place = {name: arena[i] for i, name in enumerate(order)}
    for name in "qkv":
        place[name].copy_(buffers[name])
    plan.execute({"r": buffers["r"], "l": buffers["l"], **{name: t.data_ptr() for name, t in place.items()}})
    torch.testing.assert_close(place["o"], want)


# --- the workspace
class Scribbler:
    """An engine that fills its workspace."""

    def check_support(self, graph, ctx):
        return cudnn_core.Support((cudnn_core.PlanConfig("", {}),), workspace=1024)

    def build_plan(self, graph, config, ctx):
        return _Plan()


class _Plan:
    workspace_size = 1024

    def execute(self, pack, ctx):
        ctypes.memset(ctx.workspace, 0xFF, 1024)


@pytest.fixture
def scribbler():
    manifest = {"plugin": "s", "engine": [{"name": "e", "ops": ["*"], "anchors": ["*"], "devices": ["cpu"]}]}
    with temporary_plugin(manifest, {"e": Scribbler}, isolated=True):
        g = Graph(**F32)
        g.relu(g.tensor(dim=(4, 8), name="x")).set_output(True).set_name("y")
        yield g.plan(device="cpu")


def test_what_limits_see_is_what_the_engine_needs(scribbler):
    assert (scribbler.engine_workspace_size, scribbler.workspace_size) == (1024, 1024 + 255)


def bad_workspaces():
    frozen = np.zeros(4096, np.uint8)
    frozen.setflags(write=False)
    return {
        "gaps": (torch.zeros(4096, dtype=torch.uint8)[::2], "not contiguous"),
        "numpy gaps": (np.zeros(8192, np.uint8)[::4], "not contiguous"),
        "backwards": (np.zeros(4096, np.uint8)[::-1], "not contiguous"),
        "read-only": (frozen, "read-only"),
        "bool": (True, "takes a tensor"),
        "small int": (4, "can't lie at 0x4"),
        "float": (4096.0, "takes a tensor"),
        "sparse": (torch.zeros(4096).to_sparse(), "workspace"),
        "string": ("a", "takes a tensor"),
        "scalar": (np.float32(1), "read-only"),
    }


@pytest.mark.parametrize("kind", bad_workspaces())
def test_a_workspace_that_can_not_be_one_is_refused(scribbler, kind):
    workspace, match = bad_workspaces()[kind]
    operands = {"x": torch.ones(4, 8), "y": torch.zeros(4, 8)}
    for given in (operands, scribbler.pack(operands)):
        with pytest.raises(ExecutionError, match=match) as caught:
            scribbler.execute(given, workspace)
        assert caught.value.operand == "workspace"


def test_the_workspace_overlaps_no_operand(scribbler):
    memory = torch.zeros(8192, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 256 :]
    inside = memory[512:640].view(torch.float32).view(4, 8)
    outside = torch.zeros(4, 8)
    for operands in ({"x": inside, "y": outside}, {"x": outside, "y": inside}):
        for given in (operands, scribbler.pack(operands), {k: v.data_ptr() for k, v in operands.items()}):
            scribbler.execute(given, memory[1024:])  # one that is apart was seen before
            for workspace in (memory, memory.data_ptr(), np.int64(memory.data_ptr())):
                with pytest.raises(ExecutionError, match=r"the workspace overlaps operand [xy]") as caught:
                    scribbler.execute(given, workspace)
                assert caught.value.operand == "workspace"
    assert memory[:1024].sum() == 0
    scribbler.execute({"x": outside, "y": outside.clone()}, memory)
    assert (memory[:1024] == 255).all()


def test_an_ambiguous_name_says_so():
    g = Graph(**F32)
    x = g.tensor(dim=(4, 8), name="t")
    y = g.relu(x).set_output(True).set_name("t")
    plan = g.plan(device="cpu")
    with pytest.raises(ExecutionError, match="operand 't': 2 operands have this name; name them by tensor or uid"):
        plan.execute({"t": torch.ones(4, 8), y: torch.ones(4, 8)})
    out = torch.zeros(4, 8)
    plan.execute({x: torch.ones(4, 8), y: out})
    assert (out == 1).all()


def test_two_keys_for_one_operand_are_refused_on_the_fast_road():
    g = Graph(**F32)
    x = g.tensor(dim=(4,), name="x")
    y = g.relu(x).set_output(True).set_name("y")
    plan, one, out = g.plan(device="cpu"), torch.ones(4), torch.zeros(4)
    plan.execute({x: one, y: out})
    plan.execute({"x": one, "y": out})
    for given in ({x: one, "x": one, y: out}, {x: one, "x": one}, {x: one, "x": one, y: out, "y": out}):
        with pytest.raises(ExecutionError, match=r"operand [xy] is given twice"):
            plan.execute(given)
        with pytest.raises(ExecutionError, match=r"operand [xy] is given twice"):
            plan.execute({key: value.data_ptr() for key, value in given.items()})


def test_a_refused_call_teaches_the_fast_road_nothing():
    g = Graph(**F32)
    g.relu(g.tensor(dim=(2, 3), name="x")).set_output(True).set_name("y")
    plan = g.plan(device="cpu")
    for _ in range(3):
        with pytest.raises(ExecutionError, match="operand x has shape"):
            plan.execute({"x": torch.zeros(3, 2), "y": torch.zeros(2, 3)})


@pytest.mark.parametrize("overrides", [[1], {1: None}, {1: (2.5, 3)}, {1: "ab"}, {99: (2, 3)}])
def test_overrides_that_are_no_shapes(overrides):
    g = Graph(**F32)
    g.relu(g.tensor(dim=(Dim("m"), 3), name="x", uid=1)).set_output(True).set_name("y")
    with pytest.raises(ExecutionError, match="override_shapes"):
        g.plan(device="cpu").execute({"x": torch.zeros(2, 3), "y": torch.zeros(2, 3)}, override_shapes=overrides)

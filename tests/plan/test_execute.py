"""Execution: what operands may be, and every wrong one is a typed error that names it, before anything is written."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

import cudnn_core
from cudnn_core import Dim, ExecutionError, Graph, HandleError, HandleTypeError, NoEngineError, Plan, pack
from cudnn_core.testing import temporary_plugin

torch = pytest.importorskip("torch")
F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}


class Recorder:
    """An engine that accepts everything, notes what its plan is called with and writes 7 into the first output byte."""

    workspace = 0
    calls: list = []

    def check_support(self, graph, ctx):
        return cudnn_core.Support((cudnn_core.PlanConfig("", {}),))

    def build_plan(self, graph, config, ctx):
        return _Plan(type(self).workspace)


class _Plan:
    def __init__(self, workspace):
        self.workspace_size = workspace

    def execute(self, pack, ctx):
        Recorder.calls.append((pack, ctx))


MANIFEST = {
    "plugin": "recorder",
    "engine": [{"name": "all", "ops": ["*"], "anchors": ["*"], "devices": ["cpu", "cuda"], "aot": True}],
}


@pytest.fixture
def recorder():
    Recorder.calls = []
    Recorder.workspace = 0
    with temporary_plugin(MANIFEST, {"all": Recorder}, isolated=True):
        yield Recorder


@pytest.fixture
def add():
    """(graph, a, b, y, plan on the reference engine) of y = a + b."""
    g = Graph(**F32)
    a, b = g.tensor(dim=(2, 3), name="a"), g.tensor(dim=(2, 3), name="b")
    y = g.sub(a, b).set_output(True).set_name("y")
    return g, a, b, y, g.plan(device="cpu")


A, B = torch.arange(6.0).reshape(2, 3), torch.full((2, 3), 2.0)
WANT = A - B


def test_operands_are_named_by_tensor_uid_or_name(add):
    _, a, b, y, plan = add
    for keys in ((a, b, y), (a.uid, b.uid, y.uid), ("a", "b", "y"), (a, "b", y.uid)):
        out = torch.full((2, 3), float("nan"))
        plan.execute(dict(zip(keys, (A, B, out), strict=True)))
        assert torch.equal(out, WANT)


class DLPackOnly:
    """A producer with nothing but the DLPack protocol."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **kwargs):
        return self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("kind", ["torch", "numpy", "dlpack", "address", "mixed"])
def test_every_kind_of_buffer_is_accepted(add, kind):
    plan = add[-1]
    out = torch.full((2, 3), float("nan"))
    make = {
        "torch": [lambda t: t] * 3,
        "numpy": [lambda t: t.numpy()] * 3,
        "dlpack": [DLPackOnly] * 3,
        "address": [lambda t: t.data_ptr()] * 3,
        "mixed": [lambda t: t.numpy(), DLPackOnly, lambda t: t.data_ptr()],
    }[kind]
    for _ in range(3):  # the second call takes the fast road where there is one
        out.fill_(float("nan"))
        plan.execute({name: f(t) for name, f, t in zip("aby", make, (A, B, out), strict=True)})
        assert torch.equal(out, WANT)


def wrong(name):
    out = torch.full((2, 3), 5.0)
    good = {"a": A, "b": B, "y": out}
    bad = {
        "missing": ({"b": B, "y": out}, "operand a is missing"),
        "none": ({**good, "a": None}, "operand a is missing"),
        "extra": ({**good, "z": A}, "no operand 'z'"),
        "extra uid": ({**good, 999: A}, "no operand 999"),
        "twice": ({**good, 1: A}, "operand a is given twice"),
        "dtype": ({**good, "a": A.double()}, "operand a has data type float64, needs float32"),
        "int dtype": ({**good, "b": B.int()}, "operand b has data type int32"),
        "shape": ({**good, "a": torch.zeros(3, 2)}, r"operand a has shape \(3, 2\), needs \(2, 3\)"),
        "rank": ({**good, "a": torch.zeros(6)}, "operand a has shape"),
        "stride": ({**good, "a": torch.zeros(3, 2).t()}, r"operand a has strides \(1, 2\), needs \(3, 1\)"),
        "output stride": ({**good, "y": torch.zeros(3, 2).t()}, "operand y has strides"),
        "misaligned": ({**good, "a": A.data_ptr() + 1}, "operand a is at .* not aligned to 4"),
        "null": ({**good, "a": 0}, "operand a has a null address"),
        "negative": ({**good, "a": -16}, "operand a has an impossible address, -0x10"),
        "first page": ({**good, "a": 256}, "operand a has an impossible address, 0x100"),
        "beyond 64 bits": ({**good, "a": 2**64}, "operand a has an impossible address"),
        "alias": ({"a": A, "b": B, "y": A.data_ptr() + 4}, "operand y overlaps operand a"),
        "not a tensor": ({**good, "a": "buffer"}, "operand a takes a tensor"),
        "a number": ({**good, "a": 1.5}, "operand a takes a tensor"),
        "bool": ({**good, "a": True}, "operand a takes a tensor"),
        "read-only output": ({**good, "y": np.zeros((2, 3), np.float32).view(ReadOnly)}, "read-only"),
    }
    return out, *bad[name]


class ReadOnly(np.ndarray):
    def __array_finalize__(self, other):
        self.flags.writeable = False


NAMES = ["missing", "none", "extra", "extra uid", "twice", "dtype", "int dtype", "shape", "rank", "stride", "output stride",
         "misaligned", "null", "negative", "first page", "beyond 64 bits", "alias", "not a tensor", "a number", "bool", "read-only output"]  # fmt: skip


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_operand_is_named_and_nothing_is_written(add, name, warm):
    plan = add[-1]
    if warm:
        plan.execute({"a": A, "b": B, "y": torch.empty(2, 3)})
    out, operands, match = wrong(name)
    with pytest.raises(ExecutionError, match=match):
        plan.execute(operands)
    with pytest.raises(ExecutionError, match=match):
        plan.pack(operands)
    assert torch.equal(out, torch.full((2, 3), 5.0))


@pytest.mark.parametrize("operands", [None, 5, [A, B], "ab"])
def test_operands_that_are_no_mapping(add, operands):
    with pytest.raises(ExecutionError, match="must be a mapping"):
        add[-1].execute(operands)


def test_a_virtual_tensor_and_a_constant_are_no_operands():
    g = Graph(**F32)
    x = g.tensor(dim=(2, 3), name="x")
    mid = g.relu(x).set_name("mid")
    y = g.mul(mid, 2.0).set_output(True)
    constant = next(t for t in g.tensors if t.value is not None)
    plan = g.plan(device="cpu")
    good = {x: A, y: torch.empty(2, 3)}
    with pytest.raises(ExecutionError, match="operand mid: is virtual"):
        plan.execute({**good, mid: A})
    with pytest.raises(ExecutionError, match="is a constant"):
        plan.execute({**good, constant: 2.0})


def test_a_tensor_of_another_graph_says_so(add):
    plan = add[-1]
    other = Graph(**F32)
    a = other.tensor(dim=(2, 3), name="a")
    with pytest.raises(ExecutionError, match="operand a: the tensor belongs to another graph"):
        plan.execute({a: A, "b": B, "y": torch.empty(2, 3)})


def test_an_unused_tensor_and_a_none_key_are_ignored_as_in_the_frontend():
    g = Graph(**F32)
    x, spare = g.tensor(dim=(2, 3), name="x"), g.tensor(dim=(2, 3), name="spare")
    y = g.relu(x).set_output(True)
    out = torch.empty(2, 3)
    g.plan(device="cpu").execute({x: A, spare: B, None: None, y: out})
    assert torch.equal(out, A)


def test_pointwise_may_run_in_place_and_only_exactly():
    g = Graph(**F32)
    x = g.tensor(dim=(6,), name="x")
    y = g.add(x, 1.0).set_output(True).set_name("y")
    plan = g.plan(device="cpu")
    data = torch.arange(8.0)
    plan.execute({x: data[:6], y: data[:6]})
    assert data.tolist() == [1, 2, 3, 4, 5, 6, 6, 7]
    with pytest.raises(ExecutionError, match="y overlaps operand x, which may only lie 0 bytes"):
        plan.execute({x: data[:6], y: data[1:7]})


def test_in_place_is_refused_where_another_op_reads_the_input():
    g = Graph(**F32)
    x = g.tensor(dim=(6,), name="x")
    g.add(x, 1.0).set_output(True).set_name("y")
    g.mul(x, 2.0).set_output(True).set_name("z")
    plan = g.plan(device="cpu")
    data = torch.zeros(6)
    with pytest.raises(ExecutionError, match="y overlaps operand x"):
        plan.execute({"x": data, "y": data, "z": torch.zeros(6)})


def test_concatenate_in_place_takes_the_window_of_the_output():
    g = Graph(**F32)
    a, b = g.tensor(dim=(2, 3), name="a"), g.tensor(dim=(1, 3), name="b")
    y = g.concatenate(inputs=[a, b], axis=0, in_place_index=1).set_output(True).set_name("y")
    plan = g.plan(device="cpu")
    out = torch.zeros(3, 3)
    out[2] = 7
    plan.execute({a: A, b: out[2:], y: out})
    assert torch.equal(out, torch.cat([A, torch.full((1, 3), 7.0)]))
    with pytest.raises(ExecutionError, match="y overlaps operand a"):
        plan.execute({a: out[:2], b: out[2:], y: out})


def test_two_outputs_may_not_overlap():
    g = Graph(**F32)
    x = g.tensor(dim=(6,), name="x")
    g.add(x, 1.0).set_output(True).set_name("y")
    g.mul(x, 2.0).set_output(True).set_name("z")
    out = torch.zeros(6)
    with pytest.raises(ExecutionError, match="overlaps operand"):
        g.plan(device="cpu").execute({"x": torch.zeros(6), "y": out, "z": out})


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.int64(3), np.ones(1, "f4") * 3, torch.tensor([3.0]), True])
def test_a_by_value_operand_takes_numbers_and_one_element_tensors(value):
    g = Graph(**F32)
    x = g.tensor(dim=(2, 3), name="x")
    s = g.tensor(dim=(1, 1), is_pass_by_value=True, name="s")
    y = g.mul(x, s).set_output(True)
    out = torch.empty(2, 3)
    g.plan(device="cpu").execute({x: A, s: value, y: out})
    assert torch.equal(out, A * (1.0 if value is True else 3.0))


@pytest.mark.parametrize(("dtype", "value"), [("int8", 300), ("int32", 2**40), ("fp8_e4m3", 1.0)])
def test_a_number_that_does_not_fit_is_named(dtype, value):
    g = Graph(io_data_type=dtype, compute_data_type="float32")
    x = g.tensor(dim=(2, 2), name="x")
    s = g.tensor(dim=(1, 1), is_pass_by_value=True, name="s")
    y = g.mul(x, s).set_output(True)
    plan = g.plan(device="cpu")
    with pytest.raises(ExecutionError, match="operand s"):
        plan.execute({x: x_buffer(dtype), s: value, y: x_buffer(dtype)})


def x_buffer(dtype):
    return torch.zeros(2, 2, dtype={"int8": torch.int8, "int32": torch.int32}.get(dtype, torch.float8_e4m3fn))


def test_a_scalar_with_a_default_may_be_replaced():
    g = Graph(**F32)
    x = g.tensor(dim=(2, 3), name="x")
    s = g.tensor_scalar(2.0, "RUNTIME_PARAM", name="s")
    y = g.mul(x, s).set_output(True)
    plan, out = g.plan(device="cpu"), torch.empty(2, 3)
    plan.execute({x: A, y: out})
    assert torch.equal(out, A * 2)
    plan.execute({x: A, s: 5.0, y: out})
    assert torch.equal(out, A * 5)


def test_a_compile_time_constant_is_part_of_the_graph():
    def graph(value):
        g = Graph(**F32)
        g.mul(g.tensor(dim=(2, 3)), g.tensor_scalar(value, "COMPILE_TIME_CONST")).set_output(True)
        return g

    assert graph(2.0).key() != graph(3.0).key()
    assert len(graph(2.0).freeze().operands) == 2


def test_builder_inputs_stay_bound_and_may_be_replaced():
    g = Graph(**F32)
    y = g.sub(A, B).set_output(True)
    plan, out = g.plan(device="cpu"), torch.empty(2, 3)
    plan.execute({y: out})
    assert torch.equal(out, WANT)
    a = next(t for t in g.get_inputs() if t.name.endswith("in0"))
    plan.execute({y: out, a: A * 10})
    assert torch.equal(out, A * 10 - B)


@pytest.mark.parametrize("m", [1, 5, 64])
def test_runtime_sizes_come_from_the_operands(m):
    g = Graph(**F32)
    x = g.tensor(dim=(1, Dim("m", max=64), 8), name="x")
    w = g.tensor(dim=(1, 8, 4), name="w")
    y = g.matmul(x, w).set_output(True).set_name("y")
    plan = g.plan(device="cpu")
    xs, ws, out = torch.randn(1, m, 8), torch.randn(1, 8, 4), torch.empty(1, m, 4)
    plan.execute({x: xs, w: ws, y: out})
    torch.testing.assert_close(out, xs @ ws)
    plan.execute({x: xs.data_ptr(), w: ws.data_ptr(), y: out.data_ptr()}, override_shapes={x.uid: (1, m, 8)})
    torch.testing.assert_close(out, xs @ ws)


def test_runtime_sizes_out_of_range_or_in_conflict_are_errors():
    g = Graph(**F32)
    m = Dim("m", min=2, max=8, multiple_of=2)
    x = g.tensor(dim=(m, 3), name="x")
    y = g.relu(x).set_output(True).set_name("y")
    plan = g.plan(device="cpu")
    for size in (10, 3, 0):
        with pytest.raises(ExecutionError, match=rf"operand x: dim\[0\] = {size} is outside"):
            plan.execute({x: torch.zeros(size, 3), y: torch.zeros(size, 3)})
    with pytest.raises(ExecutionError, match="but m is 4 elsewhere"):
        plan.execute({x: torch.zeros(4, 3), y: torch.zeros(6, 3)})
    with pytest.raises(ExecutionError, match="the size of m is unknown"):
        plan.execute({x: 256, y: 512})


def test_the_workspace_is_checked(recorder):
    recorder.workspace = 1000
    g = Graph(**F32)
    g.relu(g.tensor(dim=(4,), name="x")).set_output(True).set_name("y")
    plan = g.plan(device="cpu")
    operands = {"x": torch.zeros(4), "y": torch.zeros(4)}
    raw = ctypes.create_string_buffer(4096)
    base = -(-ctypes.addressof(raw) // 256) * 256
    room = np.frombuffer((ctypes.c_char * 2048).from_address(base), np.uint8)
    for workspace, match in (
        (None, "needs a workspace of 1255 bytes"),
        (room[:999], "has 999 bytes, the plan needs 1000$"),
        (room[3:1255], "has 1252 bytes, the plan needs 1000 at an address aligned to 256, 1253 at 0x"),
        (0, "can't lie at 0x0"),
        (-256, "can't lie at"),
        (512, "can't lie at 0x200"),
        (2**64, "can't lie at"),
        (True, "workspace takes a tensor"),
        ("w", "workspace takes a tensor"),
    ):
        with pytest.raises(ExecutionError, match=match) as caught:
            plan.execute(operands, workspace)
        assert caught.value.operand == "workspace"
    assert recorder.calls == []
    assert plan.workspace_size == 1255  # room to align: no host allocator gives 256 bytes
    plan.execute(operands, room[:1000])  # aligned as it is: what the engine needs is enough
    plan.execute(operands, torch.from_numpy(room[:1000]))
    plan.execute(operands, room[3:1256])
    plan.execute(operands, base)
    assert [ctx.workspace for _, ctx in recorder.calls] == [base, base, base + 256, base]
    with pytest.raises(ExecutionError, match="needs 1000 at an address"):  # of the layout that was accepted last
        plan.execute(operands, room[7:1255])
    with pytest.raises(ExecutionError, match="needs 1000 at an address"):
        plan.execute(operands, torch.from_numpy(room[3:1255]))


def test_the_engine_sees_operands_in_canonical_order_with_actual_sizes(recorder):
    g = Graph(**F32)
    x = g.tensor(dim=(Dim("m", max=9), 3), name="x", uid=50)
    g.relu(x).set_output(True).set_name("y").set_uid(2)
    plan = g.plan(device="cpu")
    xs, out = torch.zeros(7, 3), torch.zeros(7, 3)
    plan.execute({"y": out, "x": xs})
    made, ctx = recorder.calls[0]
    assert [(o.name, o.dim, o.role) for o in made.operands] == [("x", (7, 3), "input"), ("y", (7, 3), "output")]
    assert made.pointers == (xs.data_ptr(), out.data_ptr())
    assert (ctx.device.type, ctx.stream, ctx.workspace) == ("cpu", 0, 0)


def test_pack_is_checked_once_and_reusable(add):
    plan = add[-1]
    out = torch.empty(2, 3)
    made = pack(plan, {"a": A, "b": B, "y": out})
    for _ in range(3):
        out.zero_()
        plan.execute(made)
        assert torch.equal(out, WANT)


def test_a_pack_keeps_its_buffers_alive(add):
    import gc
    import weakref

    plan = add[-1]
    temporary = A.clone()
    alive = weakref.ref(temporary)
    made = plan.pack({"a": temporary, "b": B, "y": torch.empty(2, 3)})
    del temporary
    gc.collect()
    assert alive() is not None
    del made
    gc.collect()
    assert alive() is None


def test_a_pack_of_another_plan_is_refused(add):
    other = Graph(**F32)
    other.relu(other.tensor(dim=(2, 3), name="a")).set_output(True).set_name("y")
    made = other.plan(device="cpu").pack({"a": A, "y": torch.empty(2, 3)})
    with pytest.raises(ExecutionError, match="another plan"):
        add[-1].execute(made)
    with pytest.raises(ExecutionError, match="for this plan"):
        add[-1].bind(made)
    with pytest.raises(ExecutionError, match="takes a Plan"):
        pack(5, {})


def test_bind_hands_out_the_engines_own_callable():
    def launcher(pointers, workspace, stream):
        launcher.seen = (tuple(pointers), workspace, stream)

    class Bound(_Plan):
        def bind(self, layout):
            launcher.layout = layout
            return launcher

    class Engine(Recorder):
        def build_plan(self, graph, config, ctx):
            return Bound(0)

    with temporary_plugin(MANIFEST, {"all": Engine}, isolated=True):
        g = Graph(**F32)
        g.relu(g.tensor(dim=(4,), name="x")).set_output(True).set_name("y")
        plan = g.plan(device="cpu")
        xs, out = torch.zeros(4), torch.zeros(4)
        made = plan.pack({"x": xs, "y": out})
        assert plan.bind(made) is launcher
        plan.execute({"x": xs, "y": out})
        assert launcher.seen == ((xs.data_ptr(), out.data_ptr()), 0, 0)
        assert [o.alignment >= 16 for o in launcher.layout] == [True, True]


def test_the_handles_stream_reaches_the_engine(recorder):
    g = Graph(**F32)
    g.relu(g.tensor(dim=(4,), name="x")).set_output(True).set_name("y")
    handle = cudnn_core.create_handle(device="cpu", stream=77)
    plan = g.plan(handle)
    plan.execute({"x": torch.zeros(4), "y": torch.zeros(4)})
    plan.execute({"x": torch.zeros(4), "y": torch.zeros(4)}, None, cudnn_core.create_handle(device="cpu", stream=78))
    assert [ctx.stream for _, ctx in recorder.calls] == [77, 78]


def test_a_destroyed_or_raw_handle_is_refused(add):
    plan = add[-1]
    operands = {"a": A, "b": B, "y": torch.empty(2, 3)}
    handle = cudnn_core.create_handle(device="cpu")
    plan.execute(operands, handle=handle)
    cudnn_core.destroy_handle(handle)
    with pytest.raises(HandleError, match="destroyed"):
        plan.execute(operands, handle=handle)
    with pytest.raises(HandleTypeError):
        plan.execute(operands, handle=12345)


def test_a_plan_for_an_absent_device_does_not_run(recorder):
    g = Graph(**F32)
    g.relu(g.tensor(dim=(4,), name="x")).set_output(True).set_name("y")
    plan = g.plan(device="B200")
    with pytest.raises(ExecutionError, match="not here"):
        plan.pack({"x": 256, "y": 512})


def test_one_plan_runs_from_eight_threads(add):
    plan, failures = add[-1], []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            a, b, out = (
                torch.randn(2, 3, generator=generator),
                torch.randn(2, 3, generator=generator),
                torch.empty(2, 3),
            )
            plan.execute({"a": a, "b": b, "y": out})
            if not torch.equal(out, a - b):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert failures == []


def test_no_engine_error_carries_the_decision_and_the_nearest_miss():
    class Picky(Recorder):
        def check_support(self, graph, ctx):
            return cudnn_core.Declined((cudnn_core.Decline("shape.multiple_of", "x.dim[0]", {"multiple_of": 8}, 4),))

    with temporary_plugin(MANIFEST, {"all": Picky}, isolated=True):
        g = Graph(**F32)
        g.relu(g.tensor(dim=(4,), name="x")).set_output(True)
        with pytest.raises(NoEngineError, match="multiple_of") as caught:
            g.plan(device="cpu")
        assert caught.value.decision.engines[0].state == "declined"
        assert isinstance(caught.value, cudnn_core.cudnnGraphNotSupportedError)


def test_without_any_engine_the_error_prints_the_pip_line():
    with temporary_plugin({"plugin": "empty"}, {}, isolated=True):
        g = Graph(**F32)
        g.relu(g.tensor(dim=(4,), name="x")).set_output(True)
        with pytest.raises(NoEngineError, match="pip install"):
            g.plan(device="cpu")


def test_plans_of_equal_graphs_share_the_compiled_plan_and_keep_their_own_names():
    built = []

    class Counting(Recorder):
        def build_plan(self, graph, config, ctx):
            built.append(graph.key)
            return _Plan(0)

    def graph(name):
        g = Graph(**F32)
        g.relu(g.tensor(dim=(4,), name=name)).set_output(True).set_name("y")
        return g

    with temporary_plugin(MANIFEST, {"all": Counting}, isolated=True):
        one, two = graph("first").plan(device="cpu"), graph("second").plan(device="cpu")
    assert len(built) == 1
    assert [o.name for o in one.operands] == ["first", "y"]
    assert [o.name for o in two.operands] == ["second", "y"]


def test_two_threads_build_one_plan_once():
    import time

    built = []

    class Slow(Recorder):
        def build_plan(self, graph, config, ctx):
            built.append(1)
            time.sleep(0.05)
            return _Plan(0)

    with temporary_plugin(MANIFEST, {"all": Slow}, isolated=True):
        graphs = []
        for _ in range(4):
            g = Graph(**F32)
            g.relu(g.tensor(dim=(4,), name="x")).set_output(True)
            graphs.append(g)
        threads = [threading.Thread(target=g.plan, kwargs={"device": "cpu"}) for g in graphs]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert built == [1]


def test_plan_is_a_public_name():
    assert isinstance(Plan, type)


# --- the launch guard, with a driver of two GPUs
class TwoGpus:
    """A driver with two equal GPUs whose current one the test chooses."""

    current: int | None = 0

    def __init__(self):
        self.made_current = []

    def device_count(self):
        return 2

    def attribute(self, name, ordinal):
        return {"COMPUTE_CAPABILITY_MAJOR": 9, "MULTIPROCESSOR_COUNT": 132}.get(name, 0)

    def name(self, ordinal):
        return "NVIDIA H200"

    def total_memory(self, ordinal):
        return 141 << 30

    def current_device(self):
        return self.current

    def make_current(self, ordinal):
        self.made_current.append(ordinal)

    def driver_version(self):
        return 13000

    def runtime_version(self):
        return 13000


@pytest.fixture
def gpus(recorder):
    from cudnn_core._driver import use_driver

    fake = TwoGpus()
    with use_driver(fake):
        g = Graph(**F32)
        g.relu(g.tensor(dim=(4,), name="x")).set_output(True).set_name("y")
        yield fake, g.plan(device=0), {"x": 256, "y": 4096}, recorder.calls


def test_a_plan_launches_only_while_its_gpu_is_current(gpus):
    fake, plan, operands, calls = gpus
    made = plan.pack(operands)
    plan.execute(operands)
    plan.execute(made)
    plan.bind(made)
    assert len(calls) == 2
    fake.current = 1
    for launch in (lambda: plan.execute(operands), lambda: plan.execute(made), lambda: plan.bind(made)):
        with pytest.raises(ExecutionError, match="for cuda:0, but cuda:1 is current"):
            launch()
    assert len(calls) == 2


def test_a_workspace_on_a_gpu_must_be_aligned(gpus, recorder):
    recorder.workspace = 1000
    g = Graph(**F32)
    g.tanh(g.tensor(dim=(4,), name="x")).set_output(True).set_name("y")
    plan = g.plan(device=0)
    assert plan.workspace_size == 1000
    for address, match in ((257, "not aligned to 256"), (128, "not aligned to 256"), (0, "can't lie at 0x0")):
        with pytest.raises(ExecutionError, match=match):
            plan.execute({"x": 256, "y": 4096}, address)
    plan.execute({"x": 256, "y": 4096}, 512)
    assert recorder.calls[-1][1].workspace == 512


def test_a_thread_without_a_context_gets_the_plans_device(gpus):
    fake, plan, operands, calls = gpus
    fake.current = None
    plan.execute(operands)
    assert (fake.made_current, len(calls)) == ([0], 1)


def test_a_handle_of_another_gpu_is_refused(gpus):
    _, plan, operands, calls = gpus
    with pytest.raises(HandleError, match="cuda:1, the plan for cuda:0"):
        plan.execute(operands, handle=cudnn_core.create_handle(device=1))
    assert calls == []


def test_an_operand_that_an_engine_can_not_bind_is_named_by_the_error():
    class Refusing(_Plan):
        def bind(self, layout):
            raise ExecutionError("operand y: too far", operand="y")

    class Engine(Recorder):
        def build_plan(self, graph, config, ctx):
            return Refusing(0)

    g = Graph(**F32)
    a = g.tensor(dim=(2, 3), name="a")
    y = g.relu(a).set_output(True).set_name("y")
    with temporary_plugin(MANIFEST, {"all": Engine}, isolated=True):
        plan = g.plan(device="cpu")
        with pytest.raises(ExecutionError, match="could not bind its plan: .*too far") as raised:
            plan.execute({a: torch.zeros(2, 3), y: torch.zeros(2, 3)})
    assert raised.value.operand == "y"

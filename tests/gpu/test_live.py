"""On a real GPU: the driver's facts, plans and execution on a CUDA device, streams, threads, the launch guard."""

from __future__ import annotations

import threading

import pytest

import cudnn_core
from cudnn_core import DeviceInfo, ExecutionError, Graph, Plan

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}


@pytest.fixture(autouse=True)
def reference():
    """Plans are those of the reference engine, whatever else is installed; it warns once that it runs on a GPU."""
    import warnings

    with warnings.catch_warnings(), cudnn_core.configure(rule=[{"match": {}, "use": "torch_reference:eager"}]):
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def linear(device="cuda:0"):
    g = Graph(**F32)
    x, w = g.tensor(dim=(1, 64, 32), name="x"), g.tensor(dim=(1, 32, 16), name="w")
    g.relu(g.matmul(x, w)).set_output(True).set_name("y")
    return g


def operands():
    x, w = torch.randn(1, 64, 32, device="cuda"), torch.randn(1, 32, 16, device="cuda")
    return {"x": x, "w": w, "y": torch.full((1, 64, 16), float("nan"), device="cuda")}


def check(values):
    want = (values["x"].double() @ values["w"].double()).relu()
    torch.testing.assert_close(values["y"].double(), want, rtol=1e-4, atol=1e-4)


def test_device_facts_agree_with_torch():
    info = cudnn_core.device_info(0)
    props = torch.cuda.get_device_properties(0)
    assert info.compute_capability == (props.major, props.minor)
    assert info.sm_count == props.multi_processor_count
    assert info.device_name == props.name
    assert info.memory_bytes == props.total_memory
    assert info.l2_cache_bytes == props.L2_cache_size
    assert info.shared_memory_per_block_optin == props.shared_memory_per_block_optin
    assert cudnn_core.device_info(0) is info
    assert cudnn_core.driver_version() >= 12000


def test_the_preset_of_this_gpu_matches_the_driver():
    info = cudnn_core.device_info(0)
    try:
        preset = DeviceInfo.preset(info.device_name)
    except cudnn_core.CudnnCoreError:
        pytest.skip(f"no preset for {info.device_name}")
    for fact in ("compute_capability", "sm_count", "shared_memory_per_block_optin", "l2_cache_bytes", "arch"):
        assert getattr(preset, fact) == getattr(info, fact), fact
    assert preset.key() == info.key()
    # Data sheets count in units that lie between GB and GiB.
    assert preset.memory_bytes == pytest.approx(info.memory_bytes, rel=0.08)


def test_a_plan_on_the_gpu_runs_on_every_kind_of_operand():
    plan = linear().plan()
    assert (plan.device.type, plan.device.ordinal) == ("cuda", 0)
    values = operands()
    for _ in range(2):
        values["y"].fill_(float("nan"))
        plan.execute(values)
        check(values)
    values["y"].fill_(float("nan"))
    plan.execute({name: t.data_ptr() for name, t in values.items()})
    torch.cuda.synchronize()
    check(values)
    made = plan.pack(values)
    values["y"].fill_(float("nan"))
    torch.cuda.synchronize()
    plan.bind(made)(made.pointers, 0, 0)
    torch.cuda.synchronize()
    check(values)


def test_a_cpu_operand_of_a_gpu_plan_is_refused():
    plan, values = linear().plan(), operands()
    for warm in (False, True):
        if warm:
            plan.execute(values)
        with pytest.raises(ExecutionError, match=r"operand x is on cpu, the plan needs cuda:0"):
            plan.execute({**values, "x": values["x"].cpu()})


def test_a_gpu_operand_of_a_cpu_plan_is_refused():
    plan, values = linear().plan(device="cpu"), operands()
    with pytest.raises(ExecutionError, match=r"operand x is on cuda:0, the plan needs cpu"):
        plan.execute(values)


def test_a_one_element_cpu_tensor_is_a_host_value_on_the_gpu():
    g = Graph(**F32)
    x = g.tensor(dim=(4, 8), name="x")
    s = g.tensor_like(torch.ones(1, 1), name="s")
    y = g.mul(x, s).set_output(True).set_name("y")
    plan = g.plan()
    assert next(o for o in plan.operands if o.name == "s").by_value
    data, out = torch.randn(4, 8, device="cuda"), torch.empty(4, 8, device="cuda")
    plan.execute({x: data, s: torch.full((1, 1), 3.0), y: out})
    torch.testing.assert_close(out, data * 3)
    plan.execute({x: data, s: 5.0, y: out})
    torch.testing.assert_close(out, data * 5)


def test_work_goes_to_the_handles_stream():
    """The handle's stream is busy for a while: the result is not there yet when execute returns."""
    stream = torch.cuda.Stream()
    handle = cudnn_core.create_handle()
    cudnn_core.set_stream(handle, stream.cuda_stream)
    plan, values = linear().plan(handle), operands()
    plan.execute(values, handle=handle)
    torch.cuda.synchronize()
    values["y"].fill_(-1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
    plan.execute(values, handle=handle)
    assert not stream.query()
    torch.cuda.synchronize()
    check(values)


def test_a_fresh_thread_without_a_current_context_can_execute():
    plan, values, failures = linear().plan(), operands(), []
    plan.execute(values)

    def work():
        try:
            values["y"].fill_(float("nan"))
            plan.execute(values)
            torch.cuda.synchronize()
            check(values)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert failures == []


def test_a_plan_for_another_gpu_refuses_to_launch():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    plan, values = linear().plan(device=0), operands()
    torch.cuda.set_device(1)
    try:
        with pytest.raises(ExecutionError, match="cuda:1 is current"):
            plan.execute(values)
    finally:
        torch.cuda.set_device(0)


def test_a_saved_plan_loads_on_the_same_kind_of_gpu(tmp_path):
    linear().plan().save(tmp_path / "p.plan")
    plan, values = Plan.load(tmp_path / "p.plan"), operands()
    plan.execute(values)
    check(values)


def test_the_classic_sequence_runs_on_the_gpu():
    handle = cudnn_core.create_handle()
    g = cudnn_core.pygraph(
        io_data_type=cudnn_core.data_type.HALF, compute_data_type=cudnn_core.data_type.FLOAT, handle=handle
    )
    x = torch.randn(2, 8, 16, device="cuda", dtype=torch.float16)
    w = torch.randn(2, 16, 8, device="cuda", dtype=torch.float16)
    X, W = g.tensor_like(x), g.tensor_like(w)
    Y = g.matmul(X, W).set_output(True)
    g.build([cudnn_core.heur_mode.A])
    y = torch.empty(2, 8, 8, device="cuda", dtype=torch.float16)
    workspace = torch.empty(g.get_workspace_size(), device="cuda", dtype=torch.uint8)
    g.execute({X: x, W: w, Y: y}, workspace, handle=handle)
    torch.cuda.synchronize()
    torch.testing.assert_close(y.double(), x.double() @ w.double(), rtol=2e-3, atol=2e-3)


def test_wrapper_allocates_outputs_on_the_gpu():
    x = torch.randn(4, 8, device="cuda")
    with cudnn_core.Graph(io_data_type="float32", inputs=["r::input"], outputs=["out"]) as g:
        g.relu(input=x, name="r").set_output(True).set_name("out")
    out = g(x, handle=cudnn_core.create_handle())
    torch.testing.assert_close(out, x.relu())
    assert out.is_cuda

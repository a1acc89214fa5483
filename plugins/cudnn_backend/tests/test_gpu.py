"""On a GPU: every family against the reference, and what a plan of cuDNN promises.

Run by ``make gpu-test``. The cases are ``backend_cases``; the reference runs on the same device.
"""

from __future__ import annotations

import ctypes
import re
import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cudnn_backend")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

from backend_cases import CASES, out  # noqa: E402
from running import BACKEND, assert_close, buffers, pinned, reference  # noqa: E402

import cudnn_core  # noqa: E402
from cudnn_core import Dim, NoEngineError, Plan  # noqa: E402

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def device():
    from cudnn_backend import library

    problem = library.problem()
    if problem is not None:
        pytest.skip(str(problem))
    return cudnn_core.device_info(0)


def space(plan):
    return torch.empty(max(1, plan.workspace_size), dtype=torch.uint8, device="cuda")


def run(plan, inputs, outputs, handle=None):
    actual = buffers(outputs, "cuda")
    plan.execute({**inputs, **actual}, space(plan), handle)
    torch.cuda.synchronize()
    return actual


def prepared(name, device):
    """(plan, inputs, outputs, expected, tolerance)."""
    case = BY_NAME[name]
    graph, inputs, outputs = case.build("cuda")
    plan = pinned(graph, BACKEND, device)
    return plan, inputs, outputs, reference(graph, inputs, outputs, device), case.tolerance


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case_against_the_reference(case, device):
    capability = device.sm_version
    if capability < case.sm:
        pytest.skip(f"needs sm_{case.sm}")
    graph, inputs, outputs = case.build("cuda")
    if case.declined:
        with pytest.raises(NoEngineError, match=re.escape(case.declined)):
            pinned(graph, BACKEND, device)
        return
    if case.hopper == "none" and capability < 100:
        with pytest.raises(NoEngineError, match=r"cuDNN|CUDNN|cudnn_backend"):
            pinned(graph, BACKEND, device)
        return
    actual = run(pinned(graph, BACKEND, device), inputs, outputs)
    assert_close(actual, reference(graph, inputs, outputs, device), case.tolerance)


def test_inputs_are_left_alone(device):
    plan, inputs, outputs, _, _ = prepared("matmul-scale-relu-amax", device)
    before = {tensor: values.clone() for tensor, values in inputs.items()}
    run(plan, inputs, outputs)
    for tensor, values in inputs.items():
        assert torch.equal(values, before[tensor])


# --- engines


@pytest.mark.parametrize("name", ["matmul-bias-gelu", "conv-bias-relu", "sdpa-causal", "layernorm", "pointwise-gelu"])
def test_every_engine_of_the_heuristics_gives_the_same_numbers(name, device):
    from cudnn_backend.engines import BackendGraph

    from cudnn_core import BuildError, ExecutionContext

    _, inputs, outputs, expected, tolerance = prepared(name, device)
    graph = BY_NAME[name].graph()
    ctx = ExecutionContext(None, device)
    members = BackendGraph().members(graph.freeze("cuda"), ctx)
    assert members
    ran = 0
    for config in members:
        with cudnn_core.configure(
            rule=[{"use": f"{BACKEND}/{config.variant}", "knobs": dict(config.knobs)}], strict=True
        ):
            try:
                plan = graph.plan(device=device)
            except (BuildError, NoEngineError):
                continue  # an engine may fail to compile: the next one is asked
        actual = {tensor: buffers([tensor], "cuda")[tensor] for tensor in outputs}
        named = {tensor.get_name(): values for tensor, values in {**inputs, **actual}.items()}
        plan.execute(named, space(plan))
        assert_close(actual, expected, tolerance)
        ran += 1
    assert ran


# --- streams, handles, threads


def test_execute_works_on_the_stream_of_its_handle(device):
    plan, inputs, outputs, expected, tolerance = prepared("matmul-bias-gelu", device)
    stream = torch.cuda.Stream()
    with cudnn_core.create_handle(0, stream.cuda_stream) as handle:
        actual, memory = buffers(outputs, "cuda"), space(plan)
        torch.cuda.synchronize()
        plan.execute({**inputs, **actual}, memory, handle)
        stream.synchronize()
        assert_close(actual, expected, tolerance)
        handle.set_stream(0)
        assert_close(run(plan, inputs, outputs, handle), expected, tolerance)


@pytest.mark.parametrize("name", ["matmul-bias-gelu", "sdpa-causal", "layernorm"])
def test_a_plan_runs_from_many_threads_and_streams(name, device):
    plan, inputs, outputs, expected, tolerance = prepared(name, device)
    failures = []

    def work():
        try:
            stream = torch.cuda.Stream()
            actual, memory = buffers(outputs, "cuda"), space(plan)
            torch.cuda.synchronize()
            pack = plan.pack({**inputs, **actual})
            bound = plan.bind(pack)
            for _ in range(20):
                bound(pack.pointers, memory.data_ptr(), stream.cuda_stream)
            stream.synchronize()
            assert_close(actual, expected, tolerance)
        except BaseException as error:  # shown by the test
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_one_handle_serves_several_threads(device):
    plan, inputs, outputs, expected, tolerance = prepared("matmul-bias-gelu", device)
    failures = []
    with cudnn_core.create_handle(0) as handle:

        def work():
            try:
                assert_close(run(plan, inputs, outputs, handle), expected, tolerance)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures


# --- CUDA graphs


@pytest.mark.parametrize(
    "name", ["matmul-bias-gelu", "conv-bias-relu", "sdpa-causal", "layernorm", "reduction-rows-ADD", "moe"]
)
def test_capture_and_replay(name, device):
    """A replay reads the inputs as they are then; the plan may be gone by then."""
    plan, inputs, outputs, expected, tolerance = prepared(name, device)
    actual, memory = buffers(outputs, "cuda"), space(plan)
    pack = plan.pack({**inputs, **actual})
    bound = plan.bind(pack)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        bound(pack.pointers, memory.data_ptr(), side.cuda_stream)
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, stream=side):
        bound(pack.pointers, memory.data_ptr(), torch.cuda.current_stream().cuda_stream)
    del plan, bound
    for values in actual.values():
        values.zero_()
    recorded.replay()
    torch.cuda.synchronize()
    assert_close(actual, expected, tolerance)


class Cudart:
    """The calls of the CUDA runtime that make and run a graph; each raises for an error."""

    def __init__(self):
        for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
            try:
                self.library = ctypes.CDLL(name)
                return
            except OSError:
                continue
        pytest.skip("no libcudart to make a CUDA graph with")

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*args):
            code = function(*args)
            assert code == 0, f"{name}: error {code}"

        return call


@pytest.mark.parametrize("name", ["matmul-bias-gelu", "matmul-scale-relu-amax", "pointwise-gelu"])
def test_native_cuda_graph(name, device):
    """Populated, instantiated, launched; then updated to other memory and launched again."""
    case = BY_NAME[name]
    graph, inputs, outputs = case.build("cuda")
    expected = reference(graph, inputs, outputs, device)
    with cudnn_core.configure(rule=[{"use": BACKEND}], strict=True):
        graph.build()
    cudart, memory = Cudart(), space(graph.selected_plan)
    recorded, executable = ctypes.c_void_p(), ctypes.c_void_p()
    cudart.cudaGraphCreate(ctypes.byref(recorded), 0)
    with cudnn_core.create_handle(0) as handle:
        for step in (graph.populate_cuda_graph, graph.update_cuda_graph):
            actual = buffers(outputs, "cuda")
            step(handle, {**inputs, **actual}, memory, recorded.value)
            cudart.cudaGraphInstantiate(ctypes.byref(executable), recorded, ctypes.c_ulonglong(0))
            torch.cuda.synchronize()
            cudart.cudaGraphLaunch(executable, ctypes.c_void_p(0))
            torch.cuda.synchronize()
            assert_close(actual, expected, case.tolerance)
            cudart.cudaGraphExecDestroy(executable)
    cudart.cudaGraphDestroy(recorded)


# --- files, absent devices


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", ["matmul-bias-gelu", "conv-bias-relu", "sdpa-padding", "layernorm", "moe"])
def test_save_and_load(name, trust, device, tmp_path):
    plan, inputs, outputs, expected, tolerance = prepared(name, device)
    plan.save(tmp_path / "plan")
    loaded = Plan.load(tmp_path / "plan", trust=trust)
    assert (loaded.engine, loaded.workspace_size) == (plan.engine, plan.workspace_size)
    actual = buffers(outputs, "cuda")
    loaded.execute({tensor.get_name(): values for tensor, values in {**inputs, **actual}.items()}, space(loaded))
    assert_close(actual, expected, tolerance)


@pytest.mark.parametrize("name", ["matmul-bias-gelu", "sdpa-causal", "conv-bias-relu", "layernorm"])
def test_a_plan_that_was_built_for_a_description_runs_here(name, device, tmp_path):
    """Ahead of time: from JSON, without the GPU; then saved, and loaded where the GPU is."""
    case = BY_NAME[name]
    graph, inputs, outputs = case.build("cuda")
    described = cudnn_core.DeviceInfo.from_json(device.to_json())
    plan = pinned(graph, BACKEND, described)
    plan.save(tmp_path / "plan")
    loaded = Plan.load(tmp_path / "plan", trust=True)
    actual = buffers(outputs, "cuda")
    loaded.execute({tensor.get_name(): values for tensor, values in {**inputs, **actual}.items()}, space(loaded))
    assert_close(actual, reference(graph, inputs, outputs, device), case.tolerance)


# --- runtime sizes


@pytest.mark.parametrize("batch", [1, 3])
def test_runtime_rows(batch, device):
    m = Dim("m", min=1, max=512)
    graph = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    a, b = graph.tensor(dim=(batch, m, 64), name="a"), graph.tensor(dim=(batch, 64, 96), name="b")
    out(graph.relu(graph.matmul(a, b)), "bfloat16").set_name("c")
    plan = pinned(graph, BACKEND, device)
    right = torch.randn(batch, 64, 96, device="cuda").bfloat16()
    memory = space(plan)
    for rows in (1, 7, 64, 300, 512, 7):
        left = torch.randn(batch, rows, 64, device="cuda").bfloat16()
        result = torch.zeros(batch, rows, 96, device="cuda").bfloat16()
        plan.execute({"a": left, "b": right, "c": result}, memory)
        torch.testing.assert_close(result.float(), (left.float() @ right.float()).relu(), rtol=2e-2, atol=2e-2)


def test_runtime_rows_of_a_norm(device):
    rows = Dim("rows", min=1, max=512)
    graph = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    x = graph.tensor(dim=(rows, 256), name="x")
    scale = graph.tensor(dim=(1, 256), name="scale", data_type="float32")
    y, _ = graph.rmsnorm(input=x, scale=scale, bias=None, epsilon=1e-5, norm_forward_phase="INFERENCE")
    out(y, "bfloat16").set_name("y")
    plan = pinned(graph, BACKEND, device)
    weight, memory = torch.rand(1, 256, device="cuda"), space(plan)
    for count in (1, 33, 512):
        values = torch.randn(count, 256, device="cuda").bfloat16()
        result = torch.zeros_like(values)
        plan.execute({"x": values, "scale": weight, "y": result}, memory)
        wide = values.float()
        expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
        torch.testing.assert_close(result.float(), expected, rtol=2e-2, atol=2e-2)


# --- attention that only a GPU can tell


def test_dropout_keeps_about_what_it_says_and_repeats_with_its_seed(device):
    """The random numbers are cuDNN's own: they have no reference, but they repeat, and the dump shows them."""
    graph = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    shape = (2, 4, 128, 64)
    q, k, v = (graph.tensor(dim=shape, name=name) for name in "qkv")
    seed, offset = (graph.tensor(dim=(1, 1, 1, 1), name=name, data_type="int64") for name in ("seed", "offset"))
    made = graph.sdpa(q=q, k=k, v=v, attn_scale=0.125, dropout=(0.25, seed, offset))
    out(made[0] if isinstance(made, (list, tuple)) else made, "bfloat16").set_name("o")
    plan = pinned(graph, BACKEND, device)
    ones = torch.ones(shape, device="cuda").bfloat16()
    memory = space(plan)

    def result(number):
        found = torch.zeros_like(ones)
        state = {
            name: torch.full((1, 1, 1, 1), value, device="cuda") for name, value in (("seed", number), ("offset", 0))
        }
        plan.execute({"q": ones, "k": ones, "v": ones, "o": found, **state}, memory)
        torch.cuda.synchronize()
        return found.float()

    first, again, other = result(7), result(7), result(8)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # uniform weights 1/128, kept with 3/4 and scaled by 4/3: the mean stays 1
    assert abs(float(first.mean()) - 1) < 0.02
    assert float(first.std()) > 0.01

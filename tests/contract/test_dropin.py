"""Programs written for the cuDNN frontend's Python graph API run on CPU tensors with only the import changed."""

from __future__ import annotations

import inspect
import json
import lzma
from pathlib import Path

import pytest

import cudnn_core as cudnn  # the one changed line

torch = pytest.importorskip("torch")
API = json.loads(lzma.decompress((Path(__file__).parents[1] / "data" / "frontend_api.json.xz").read_bytes()))


def test_matmul_bias_gelu_in_the_classic_sequence():
    torch.manual_seed(0)
    x = torch.randn(4, 16, 32, dtype=torch.float16)
    w = torch.randn(4, 32, 64, dtype=torch.float16)
    b = torch.randn(1, 1, 64, dtype=torch.float16)

    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        handle=handle,
        name="mlp",
        io_data_type=cudnn.data_type.HALF,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    X = graph.tensor(name="X", dim=list(x.size()), stride=list(x.stride()), data_type=cudnn.data_type.HALF)
    W = graph.tensor_like(w, name="W")
    B = graph.tensor_like(b, name="B")
    C = graph.matmul(name="mm", A=X, B=W)
    D = graph.bias(name="bias", input=C, bias=B)
    Y = graph.gelu(name="act", input=D)
    Y.set_output(True).set_data_type(cudnn.data_type.HALF)

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)

    y = torch.empty(4, 16, 64, dtype=torch.float16)
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8)
    want = torch.nn.functional.gelu(x.double() @ w.double() + b.double())
    for pack in ({X: x, W: w, B: b, Y: y}, {X.get_uid(): x, "W": w, B: b.data_ptr(), Y.get_uid(): y}):
        y.zero_()
        graph.execute(pack, workspace, handle=handle)
        torch.testing.assert_close(y.double(), want, rtol=2e-3, atol=2e-3)
    y.zero_()
    uids = [t.get_uid() for t in (X, W, B, Y)]
    graph.execute((x, w, b, y), workspace, handle=handle, tensor_uids=uids)
    torch.testing.assert_close(y.double(), want, rtol=2e-3, atol=2e-3)
    cudnn.destroy_handle(handle)


def test_attention_with_padding_and_statistics():
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, 8, 16) for _ in range(3))
    seq_q = torch.tensor([8, 5], dtype=torch.int32).view(2, 1, 1, 1)
    seq_kv = torch.tensor([6, 8], dtype=torch.int32).view(2, 1, 1, 1)
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT)
    tensors = [graph.tensor_like(t) for t in (q, k, v, seq_q, seq_kv)]
    o, stats = graph.sdpa(
        name="sdpa", q=tensors[0], k=tensors[1], v=tensors[2], is_inference=False, attn_scale=0.25,
        use_padding_mask=True, seq_len_q=tensors[3], seq_len_kv=tensors[4], use_causal_mask=True,
    )  # fmt: skip
    o.set_output(True).set_dim([2, 3, 8, 16]).set_stride([384, 128, 16, 1])
    stats.set_output(True).set_data_type(cudnn.data_type.FLOAT)
    graph.build([cudnn.heur_mode.A])
    out, lse = torch.empty(2, 3, 8, 16), torch.empty(2, 3, 8, 1)
    graph.execute({**dict(zip(tensors, (q, k, v, seq_q, seq_kv), strict=True)), o: out, stats: lse})
    for n in range(2):
        rows, cols = int(seq_q[n]), int(seq_kv[n])
        mask = torch.ones(8, 8).tril().bool()[:rows, :cols]
        score = (q[n, :, :rows] @ k[n, :, :cols].mT * 0.25).masked_fill(~mask, float("-inf"))
        torch.testing.assert_close(out[n, :, :rows], score.softmax(-1) @ v[n, :, :cols])
        torch.testing.assert_close(lse[n, :, :rows, 0], score.logsumexp(-1))


def test_layernorm_training_returns_statistics_and_inference_none():
    x, scale, bias = torch.randn(4, 8, 16), torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT)
    epsilon = graph.tensor(
        name="eps", dim=[1, 1, 1], stride=[1, 1, 1], is_pass_by_value=True, data_type=cudnn.data_type.FLOAT
    )
    X, S, B = (graph.tensor_like(t) for t in (x, scale, bias))
    Y, mean, inv = graph.layernorm(
        name="LN", norm_forward_phase=cudnn.norm_forward_phase.TRAINING, input=X, scale=S, bias=B, epsilon=epsilon
    )
    for t in (Y, mean, inv):
        t.set_output(True)
    other = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
    assert other.layernorm(
        other.tensor_like(x), other.tensor_like(scale), other.tensor_like(bias), epsilon=1e-5,
        norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
    )[1:] == [None, None]  # fmt: skip
    graph.build()
    out, m, r = torch.empty(4, 8, 16), torch.empty(4, 8, 1), torch.empty(4, 8, 1)
    eps_cpu = torch.full((1, 1, 1), 1e-5)
    graph.execute({X: x, S: scale, B: bias, epsilon: eps_cpu, Y: out, mean: m, inv: r})
    want = torch.nn.functional.layer_norm(x, (16,)) * scale + bias
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(m, x.mean(-1, keepdim=True))
    torch.testing.assert_close(r, (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt())


def test_convolution_in_channels_last():
    x = torch.randn(2, 8, 10, 12).to(memory_format=torch.channels_last)
    w = torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last)
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT)
    X, W = graph.tensor_like(x), graph.tensor_like(w)
    Y = graph.relu(graph.conv_fprop(image=X, weight=W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])).set_output(True)
    graph.build()
    y = torch.empty_strided(Y.get_dim(), Y.get_stride())
    assert y.is_contiguous(memory_format=torch.channels_last)
    graph.execute({X: x, W: w, Y: y})
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x, w, padding=1).relu(), rtol=1e-4, atol=1e-4)


def test_build_plans_all_and_execute_at_index():
    x = torch.randn(2, 3)
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
    X = graph.tensor_like(x)
    Y = graph.tanh(X).set_output(True)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.ALL)
    y = torch.empty(2, 3)
    for index in range(graph.get_execution_plan_count()):
        y.zero_()
        workspace = torch.empty(graph.get_workspace_size_plan_at_index(index), dtype=torch.uint8)
        graph.execute_plan_at_index({X: x, Y: y}, workspace, index)
        torch.testing.assert_close(y, x.tanh())
    with pytest.raises(IndexError):
        graph.execute_plan_at_index({X: x, Y: y}, None, 99)


def test_a_call_out_of_order_says_what_to_call_first():
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
    graph.tanh(graph.tensor(dim=[2, 3])).set_output(True)
    for call in (graph.check_support, graph.build_plans, lambda: graph.select_plan(0)):
        with pytest.raises(cudnn.GraphError, match="create_execution_plans first"):
            call()
    with pytest.raises(cudnn.BuildError, match="build"):
        graph.get_workspace_size()
    assert graph.get_execution_plan_count() == 0


# --- the wrapper form
def test_wrapper_with_named_and_positional_calls():
    x, w = torch.randn(1, 4, 8), torch.randn(1, 8, 6)
    with cudnn.Graph(
        io_data_type=torch.float32, compute_data_type=torch.float32, inputs=["mm::A", "mm::B"], outputs=["out"]
    ) as graph:
        C = graph.matmul(name="mm", A=x, B=w)
        graph.relu(input=C, name="act").set_output(True).set_name("out")
    want = (x @ w).relu()
    torch.testing.assert_close(graph(x, w), want)
    pack = {"mm::A": x * 2, "mm::B": w}
    result = graph(pack)
    assert result is pack
    torch.testing.assert_close(pack["out"], (2 * x @ w).relu())
    mine = torch.empty(1, 4, 6)
    graph({"mm::A": x, "mm::B": w, "out": mine}, handle=cudnn.create_handle())
    torch.testing.assert_close(mine, want)


def test_wrapper_errors_name_the_culprit():
    x, w = torch.randn(1, 4, 8), torch.randn(1, 8, 6)
    with pytest.raises(cudnn.GraphTypeError, match="inputs takes a list"):
        cudnn.Graph(inputs="mm::A")
    with cudnn.Graph(io_data_type="float32") as graph:
        graph.matmul(name="mm", A=x, B=w).set_output(True).set_name("out")
        with pytest.raises(cudnn.GraphError, match="after its with block"):
            graph(x, w)
    with pytest.raises(cudnn.GraphError, match="needs inputs="):
        graph(x, w)
    with pytest.raises(cudnn.GraphError, match="no tensor 'mm::a'.*did you mean 'mm::"):
        graph({"mm::a": x, "mm::B": w})
    for inputs, match in (
        (["mm::A"], "leaves out"),
        (["mm::A", "mm::A"], "twice"),
        (["mm::A", "out"], "none of the graph's inputs"),
    ):
        with pytest.raises(cudnn.GraphError, match=match):
            graph.set_io_tuples(inputs, ["out"])
    graph.set_io_tuples([x, w], ["out"])
    with pytest.raises(cudnn.ExecutionError, match="takes 2 inputs, got 1"):
        graph(x)
    with pytest.raises(cudnn.GraphError, match="entered before"), graph:
        pass


def test_wrapper_drops_nothing_and_propagates_an_exception_of_the_block():
    with pytest.raises(ZeroDivisionError), cudnn.Graph(io_data_type="float32") as graph:
        graph.relu(torch.zeros(2, 3)).set_output(True)
        raise ZeroDivisionError
    assert not graph.is_planned


# --- the recorded table of public names and parameters (frontend 1.32.0)
NAMES = """create_handle destroy_handle set_stream get_stream handle Handle DeviceInfo pygraph Graph tensor data_type heur_mode
build_plan_policy reduction_mode norm_forward_phase tensor_reordering scalar_type reshape_mode diagonal_alignment
attention_implementation moe_grouped_matmul_mode behavior_note numerical_note knob_type cuda_graph_retention backend_version
backend_version_string get_last_error_string create_kernel_cache create_device_properties cudnnGraphNotSupportedError""".split()


@pytest.mark.parametrize("name", NAMES)
def test_every_promised_name_exists_here_and_there(name):
    assert hasattr(cudnn, name)
    assert name in API["module"]


@pytest.mark.parametrize("name", [name for name in API["enums"] if hasattr(cudnn, name)])
def test_enums_have_the_frontends_members_and_numbers(name):
    members = {member.name: int(member) for member in getattr(cudnn, name)}
    assert members == API["enums"][name]


# Builders of the frontend that have no row yet: a further op is a row of the table.
MISSING_OPS = {
    "adalayernorm", "adalayernorm_backward", "batchnorm", "batchnorm_backward", "batchnorm_inference", "conv_dgrad",
    "conv_wgrad", "gdn2", "gdn2_bwd", "gdn2_summary", "gdn2_summary_bwd", "gdn_bwd", "gdn_summary", "gdn_summary_bwd",
    "gdp", "gdp_bwd", "gdp_summary", "gdp_summary_bwd", "genstats", "instancenorm", "instancenorm_backward", "kda_bwd",
    "kda_summary", "kda_summary_bwd", "layernorm_backward", "mamba2", "mamba2_bwd", "mamba2_summary",
    "mamba2_summary_bwd", "moe_grouped_matmul_bwd", "rmsnorm_backward", "rope", "rope_backward", "sdpa_backward",
    "sdpa_fp8", "sdpa_fp8_backward", "sdpa_mxfp8", "sdpa_mxfp8_backward",
}  # fmt: skip
# Of the backend's own plan list, which is an engine like others here.
NOT_OURS = {"backend_plan_entries"}


def test_every_graph_method_of_the_frontend_is_here_or_listed_as_missing():
    missing = {name for name in API["graph_methods"] if not hasattr(cudnn.Graph, name)}
    assert missing == MISSING_OPS | NOT_OURS


def parameters(function, skip_self=True):
    items = list(inspect.signature(function).parameters.values())[1 if skip_self else 0 :]
    return [item.name for item in items if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]


SEQUENCE = ["build_operation_graph", "check_support", "create_execution_plans", "execute", "execute_plan_at_index", "get_workspace_size",
            "get_workspace_size_plan_at_index", "get_execution_plan_count", "get_plan_name_at_index", "get_engine_and_knobs_at_index",
            "select_plan", "build_plan_at_index", "create_execution_plan", "deselect_engines", "deselect_workspace_greater_than",
            "tensor", "tensor_like", "tensor_scalar", "validate", "serialize", "populate_cuda_graph", "update_cuda_graph",
            "select_behavior_notes", "deselect_behavior_notes", "select_numeric_notes", "deselect_numeric_notes"]  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCE)
def test_methods_take_the_frontends_parameters_in_its_order(name):
    theirs = [row[0] for row in API["graph_methods"][name] if row[1] == "pk"]
    keywords = {row[0] for row in API["graph_methods"][name] if row[1] == "ko"}
    ours = parameters(getattr(cudnn.Graph, name))
    assert ours[: len(theirs)] == theirs
    assert keywords <= set(ours)


def test_the_constructor_takes_the_frontends_parameters_in_its_order():
    theirs = [row[0] for row in API["graph_methods"]["__init__"] if row[1] != "vk"]
    assert parameters(cudnn.Graph)[: len(theirs)] == theirs or parameters(cudnn.Graph.__init__)[: len(theirs)] == theirs


@pytest.mark.parametrize("name", sorted(API["tensor_methods"]))
def test_tensor_methods_take_the_frontends_parameters(name):
    theirs = [row[0] for row in API["tensor_methods"][name]]
    ours = parameters(getattr(cudnn.Tensor, name))
    assert len(ours) >= len(theirs)
    if not name.startswith("set_"):  # setters take one value by position
        assert ours[: len(theirs)] == theirs


def test_the_wrapper_takes_the_frontends_keywords():
    theirs = {row[0] for row in API["wrapper_graph"]["methods"]["__init__"] if row[1] != "vk"}
    assert theirs <= set(parameters(cudnn.Graph.__init__))


def test_builders_carry_signature_and_documentation():
    assert parameters(cudnn.Graph.matmul)[:2] == ["A", "B"]
    assert "matmul" in cudnn.Graph.matmul.__qualname__
    assert cudnn.Graph.matmul.__doc__

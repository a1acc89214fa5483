"""Programs as users of the frontend write them. Each ends with ``results``, the tensors that it computed, by name.

``run`` executes one with the frontend, or with only the import changed.
"""

from __future__ import annotations

from typing import Any

FRONTEND, OURS = "import cudnn\n", "import cudnn_core as cudnn\n"

MLP = """
torch.manual_seed(0)
x = torch.randn(2, 192, 256, device="cuda", dtype=torch.bfloat16)
w = torch.randn(1, 256, 384, device="cuda", dtype=torch.bfloat16) / 16
b = torch.randn(1, 1, 384, device="cuda", dtype=torch.bfloat16)

handle = cudnn.create_handle()
stream = torch.cuda.current_stream().cuda_stream
cudnn.set_stream(handle=handle, stream=stream)

graph = cudnn.pygraph(
    handle=handle,
    name="mlp",
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    compute_data_type=cudnn.data_type.FLOAT,
)
X = graph.tensor(name="X", dim=list(x.size()), stride=list(x.stride()), data_type=cudnn.data_type.BFLOAT16)
W = graph.tensor_like(w)
B = graph.tensor_like(b)
H = graph.matmul(name="mm", A=X, B=W)
H = graph.bias(name="bias", input=H, bias=B)
Y = graph.gelu(name="act", input=H)
Y.set_output(True).set_data_type(cudnn.data_type.BFLOAT16)

graph.validate()
graph.build_operation_graph()
graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
graph.check_support()
graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)

y = torch.empty(2, 192, 384, device="cuda", dtype=torch.bfloat16)
workspace = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)
graph.execute({X: x, W: w, B: b, Y: y}, workspace, handle=handle)
again = torch.empty_like(y)
graph.execute({X.get_uid(): x, W.get_uid(): w, B.get_uid(): b, Y.get_uid(): again}, workspace, handle=handle)
torch.cuda.synchronize()
results = {"y": y, "again": again}
"""

ATTENTION = """
torch.manual_seed(1)
batch, heads, kv_heads, s, d = 2, 8, 2, 256, 64
q = torch.randn(batch, s, heads, d, device="cuda", dtype=torch.float16).transpose(1, 2)
k = torch.randn(batch, s, kv_heads, d, device="cuda", dtype=torch.float16).transpose(1, 2)
v = torch.randn(batch, s, kv_heads, d, device="cuda", dtype=torch.float16).transpose(1, 2)
seq_q = torch.tensor([256, 100], device="cuda", dtype=torch.int32).view(batch, 1, 1, 1)
seq_kv = torch.tensor([200, 256], device="cuda", dtype=torch.int32).view(batch, 1, 1, 1)

graph = cudnn.pygraph(
    io_data_type=cudnn.data_type.HALF,
    intermediate_data_type=cudnn.data_type.FLOAT,
    compute_data_type=cudnn.data_type.FLOAT,
)
Q, K, V, SQ, SKV = (graph.tensor_like(t) for t in (q, k, v, seq_q, seq_kv))
O, stats = graph.sdpa(
    name="sdpa",
    q=Q,
    k=K,
    v=V,
    is_inference=False,
    attn_scale=d**-0.5,
    use_padding_mask=True,
    seq_len_q=SQ,
    seq_len_kv=SKV,
    use_causal_mask=True,
)
O.set_output(True).set_dim(list(q.size())).set_stride(list(q.stride()))
stats.set_output(True).set_data_type(cudnn.data_type.FLOAT)
graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])

o = torch.empty(batch, s, heads, d, device="cuda", dtype=torch.float16).transpose(1, 2)
lse = torch.empty(batch, heads, s, 1, device="cuda", dtype=torch.float32)
workspace = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)
graph.execute({Q: q, K: k, V: v, SQ: seq_q, SKV: seq_kv, O: o, stats: lse}, workspace)
torch.cuda.synchronize()
results = {"o": o[0], "o of the short one": o[1, :, :100], "lse": lse[0], "lse of the short one": lse[1, :, :100]}
"""

CONVOLUTION = """
torch.manual_seed(2)
x = torch.randn(4, 32, 28, 28, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
w = torch.randn(64, 32, 3, 3, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last) / 16
b = torch.randn(1, 64, 1, 1, device="cuda", dtype=torch.float16)
graph = cudnn.pygraph(
    io_data_type=cudnn.data_type.HALF,
    intermediate_data_type=cudnn.data_type.FLOAT,
    compute_data_type=cudnn.data_type.FLOAT,
)
X = graph.tensor_like(x)
W = graph.tensor_like(w)
B = graph.tensor(name="bias", dim=[1, 64, 1, 1], stride=[64, 1, 64, 64], data_type=cudnn.data_type.HALF)
Y = graph.relu(graph.bias(graph.conv_fprop(image=X, weight=W, padding=[1, 1], stride=[2, 2], dilation=[1, 1]), B))
Y.set_output(True)
graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
y = torch.empty(4, 64, 14, 14, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
workspace = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)
graph.execute({X: x, W: w, B: b, Y: y}, workspace)
torch.cuda.synchronize()
results = {"y": y}
"""

LAYERNORM = """
torch.manual_seed(3)
rows, hidden = 512, 1024
x = torch.randn(rows, hidden, 1, 1, device="cuda", dtype=torch.bfloat16)
scale = torch.randn(1, hidden, 1, 1, device="cuda", dtype=torch.bfloat16)
bias = torch.randn(1, hidden, 1, 1, device="cuda", dtype=torch.bfloat16)
epsilon = torch.full((1, 1, 1, 1), 1e-5, dtype=torch.float32)
graph = cudnn.pygraph(
    io_data_type=cudnn.data_type.BFLOAT16,
    intermediate_data_type=cudnn.data_type.FLOAT,
    compute_data_type=cudnn.data_type.FLOAT,
)
X, S, B = (graph.tensor_like(t) for t in (x, scale, bias))
E = graph.tensor(name="eps", dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], is_pass_by_value=True,
                 data_type=cudnn.data_type.FLOAT)
Y, mean, inv = graph.layernorm(name="LN", norm_forward_phase=cudnn.norm_forward_phase.TRAINING, input=X, scale=S, bias=B,
                               epsilon=E)
Y.set_output(True)
mean.set_output(True).set_data_type(cudnn.data_type.FLOAT)
inv.set_output(True).set_data_type(cudnn.data_type.FLOAT)
graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
y = torch.empty_like(x)
m, r = (torch.empty(rows, 1, 1, 1, device="cuda", dtype=torch.float32) for _ in range(2))
workspace = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)
graph.execute({X: x, S: scale, B: bias, E: epsilon, Y: y, mean: m, inv: r}, workspace)
torch.cuda.synchronize()
results = {"y": y, "mean": m, "inv_variance": r}
"""

AUTOTUNED = """
torch.manual_seed(4)
a = torch.randn(1, 256, 128, device="cuda", dtype=torch.float16)
b = torch.randn(1, 128, 256, device="cuda", dtype=torch.float16) / 8
handle = cudnn.create_handle()
graph = cudnn.pygraph(handle=handle, io_data_type=cudnn.data_type.HALF, compute_data_type=cudnn.data_type.FLOAT)
A, B = graph.tensor_like(a), graph.tensor_like(b)
C = graph.matmul(A=A, B=B)
C.set_output(True).set_data_type(cudnn.data_type.HALF)
graph.validate()
graph.build_operation_graph()
graph.create_execution_plans([cudnn.heur_mode.A])
graph.check_support()
graph.build_plans(cudnn.build_plan_policy.ALL)
results = {}
for index in range(min(2, graph.get_execution_plan_count())):
    c = torch.empty(1, 256, 256, device="cuda", dtype=torch.float16)
    workspace = torch.empty(graph.get_workspace_size_plan_at_index(index), device="cuda", dtype=torch.uint8)
    graph.execute_plan_at_index({A: a, B: b, C: c}, workspace, index, handle=handle)
    torch.cuda.synchronize()
    results[index] = c
"""

PROGRAMS = {
    "mlp": MLP, "attention": ATTENTION, "convolution": CONVOLUTION, "layernorm": LAYERNORM, "autotuned": AUTOTUNED,
}  # fmt: skip


def run(name: str, first_line: str) -> dict[Any, Any]:
    """The results of a program that begins with ``first_line``."""
    space: dict[str, Any] = {}
    exec(compile(f"{first_line}import torch\n{PROGRAMS[name]}", name, "exec"), space)
    found: dict[Any, Any] = space["results"]
    return found

"""Matmul + bias + GELU: build a graph, see which engine runs it and why, run it."""

import torch

import cudnn_core

device = "cuda" if torch.cuda.is_available() else "cpu"
x, w, b = (torch.randn(shape, device=device) for shape in ((1, 64, 256), (1, 256, 512), (1, 1, 512)))

g = cudnn_core.Graph(io_data_type="float32", compute_data_type="float32", intermediate_data_type="float32")
X, W, B = (g.tensor_like(buffer, name=name) for buffer, name in ((x, "x"), (w, "w"), (b, "bias")))
Y = g.gelu(input=g.bias(input=g.matmul(A=X, B=W), bias=B)).set_output(True).set_name("y")

plan = g.plan()
print(plan.decision)  # every known engine, its state and its reasons

y = torch.empty(1, 64, 512, device=device)
workspace = torch.empty(plan.workspace_size, dtype=torch.uint8, device=device)
plan.execute({X: x, W: w, B: b, Y: y}, workspace)

error = (y - torch.nn.functional.gelu(x @ w + b)).abs().max().item()
print(f"ran on {plan.engine}, largest difference from PyTorch {error:.1e}")

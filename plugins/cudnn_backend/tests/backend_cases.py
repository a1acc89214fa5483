"""Small graphs, one or more for each family of operations, with inputs and tolerances.

Shared by the tests of the lowering, of a real libcudnn and of a GPU. ``Case.build(device)`` gives the graph, its inputs as torch
tensors and its outputs; ``Case.graph()`` the graph alone, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import cudnn_core

__all__ = ["CASES", "Case"]

BATCH, HEADS, SEQ, DIM = 2, 4, 128, 64


class Build:
    """A graph under construction and how its inputs are made."""

    def __init__(self) -> None:
        self.g: Any = None
        self.recipes: list[tuple[Any, Any]] = []

    def graph(self, io: str = "bfloat16", compute: str = "float32") -> Any:
        self.g = cudnn_core.Graph(io_data_type=io, intermediate_data_type=compute, compute_data_type=compute)
        return self.g

    def input(self, dim: Any, dtype: str = "", stride: Any = None, data: Any = None, **fields: Any) -> Any:
        """``data``: nested lists, (low, high) of a uniform distribution, a function (torch, shape) -> tensor, or None: normal."""
        given = {"data_type": dtype} if dtype else {}
        tensor = self.g.tensor(dim=tuple(dim), stride=stride, name=f"x{len(self.recipes)}", **given, **fields)
        self.recipes.append((tensor, data))
        return tensor

    def host(self, value: float, rank: int, dtype: str = "float32") -> Any:
        """A by-value operand."""
        tensor = self.input((1,) * rank, dtype, data=[value])
        tensor.set_is_pass_by_value(True)
        return tensor


def out(tensor: Any, dtype: str = "", dim: Any = None, stride: Any = None) -> Any:
    tensor.set_output(True)
    if dtype:
        tensor.set_data_type(dtype)
    if dim is not None:
        tensor.set_dim(dim)
    if stride is not None:
        tensor.set_stride(stride)
    return tensor


class Case(NamedTuple):
    """``make`` builds on a Build and returns the outputs. ``sm`` is the least capability with an engine; tolerances are for
    results of the scale of 1."""

    name: str
    make: Callable[[Build], list[Any]]
    tolerance: float
    sm: int = 80
    # What cuDNN 9.19 does on an H200: "plan", or "none" if it has no engine there.
    hopper: str = "plan"
    # The code with which the plugin declines it by itself, on every device; "": it does not.
    declined: str = ""

    def graph(self) -> Any:
        build = Build()
        for number, tensor in enumerate(self.make(build)):
            tensor.set_name(f"y{number}")
        return build.g

    def build(self, device: Any = "cuda") -> tuple[Any, dict[Any, Any], list[Any]]:
        """(graph, inputs: tensor of the graph -> torch tensor, outputs)."""
        import torch

        build = Build()
        outputs = self.make(build)
        for number, tensor in enumerate(outputs):
            tensor.set_name(f"y{number}")
        build.g.validate()  # infers the types and layouts that are left open
        generator = torch.Generator().manual_seed(len(self.name))
        inputs = {tensor: _values(torch, tensor, data, generator, device) for tensor, data in build.recipes}
        return build.g, inputs, outputs


TORCH = {
    "float64": "float64", "float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "int64": "int64",
    "int32": "int32", "int8": "int8", "uint8": "uint8", "boolean": "bool", "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2", "fp8_e8m0": "float8_e8m0fnu",
}  # fmt: skip


def torch_dtype(torch: Any, dtype: str) -> Any:
    return getattr(torch, TORCH[str(dtype)])


def empty(torch: Any, tensor: Any, device: Any) -> Any:
    """Memory for an operand in its own layout."""
    dim, stride = tuple(tensor.get_dim()), tuple(tensor.get_stride())
    return torch.empty_strided(dim, stride, dtype=torch_dtype(torch, tensor.get_data_type()), device=device)


def _values(torch: Any, tensor: Any, data: Any, generator: Any, device: Any) -> Any:
    dim, dtype = tuple(tensor.get_dim()), str(tensor.get_data_type())
    if callable(data):
        values = data(torch, dim)
    elif isinstance(data, tuple):
        values = data[0] + (data[1] - data[0]) * torch.rand(dim, generator=generator)
    elif data is not None:
        values = torch.tensor(data).reshape(dim)
    elif dtype in ("int8", "int32", "int64"):
        values = torch.randint(-4, 5, dim, generator=generator)
    elif dtype == "fp8_e8m0":
        values = torch.randint(124, 131, dim, generator=generator).to(torch.uint8).view(torch.float8_e8m0fnu)
    else:
        values = torch.randn(dim, generator=generator)
    where = "cpu" if tensor.get_is_pass_by_value() else device
    wanted = values.to(torch_dtype(torch, dtype))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.element_size()]
    made = empty(torch, tensor, where)
    made.view(bits).copy_(wanted.view(bits))  # some types have no copy between layouts
    return made


# --- matmul


def matmul(
    b: Build, m: int = 128, n: int = 96, k: int = 64, batch: tuple[int, ...] = (1,), io: str = "bfloat16"
) -> Any:
    b.graph(io)
    return b.g.matmul(b.input((*batch, m, k)), b.input((*batch, k, n), data=lambda torch, dim: torch.randn(dim) / 8))


def bias_gelu(b: Build) -> list[Any]:
    c = matmul(b)
    return [out(b.g.gelu(b.g.add(c, b.input((1, 1, 96)))), "bfloat16")]


def scale_relu_amax(b: Build) -> list[Any]:
    c = matmul(b)
    c = b.g.relu(b.g.mul(c, b.host(0.5, 3)))
    amax = b.g.reduction(c, mode="AMAX", out_dims=(1, 1, 1))
    return [out(c, "bfloat16"), out(amax, "float32")]


def batched(b: Build) -> list[Any]:
    """Two batch axes, a bias of lower rank."""
    c = matmul(b, batch=(2, 3), io="float16")
    return [out(b.g.add(c, b.input((96,))), "float16")]


def plain_2d(b: Build) -> list[Any]:
    c = matmul(b, batch=())
    return [out(b.g.mul(c, 2.0), "bfloat16")]


def float32_matmul(b: Build) -> list[Any]:
    return [out(matmul(b, io="float32"), "float32")]


def broadcast_batch(b: Build) -> list[Any]:
    b.graph()
    c = b.g.matmul(b.input((4, 64, 64)), b.input((1, 64, 32), data=lambda torch, dim: torch.randn(dim) / 8))
    return [out(c, "bfloat16")]


def transposed(b: Build) -> list[Any]:
    """A transpose of an operand, folded, and a column-major result."""
    b.graph()
    a = b.g.transpose(b.input((1, 64, 128)), permutation=(0, 2, 1))
    c = b.g.matmul(a, b.input((1, 64, 96), stride=(64 * 96, 1, 64), data=lambda torch, dim: torch.randn(dim) / 8))
    return [out(c, "bfloat16", stride=(128 * 96, 1, 128))]


def padded(b: Build) -> list[Any]:
    """Rows with a gap between them."""
    b.graph()
    c = b.g.matmul(
        b.input((1, 128, 64), stride=(128 * 128, 128, 1)),
        b.input((1, 64, 96), data=lambda torch, dim: torch.randn(dim) / 8),
    )
    return [out(c, "bfloat16", stride=(128 * 160, 160, 1))]


def reshaped(b: Build) -> list[Any]:
    c = matmul(b).set_data_type("bfloat16")
    return [out(b.g.reshape(c, out_dims=(2, 64, 96)))]


def row_sum(b: Build) -> list[Any]:
    c = matmul(b)
    return [out(c, "bfloat16"), out(b.g.reduction(c, mode="ADD", out_dims=(1, 128, 1)), "float32")]


def int8_matmul(b: Build) -> list[Any]:
    b.graph("int8", "int32")
    c = b.g.matmul(b.input((1, 64, 64)), b.input((1, 64, 32), stride=(64 * 32, 1, 64)))
    return [out(c, "int32")]


def fp8_matmul(b: Build) -> list[Any]:
    b.graph("fp8_e4m3")
    c = b.g.matmul(
        b.input((1, 128, 64)),
        b.input((1, 64, 96), stride=(64 * 96, 1, 64), data=lambda torch, dim: torch.randn(dim) / 8),
    )
    return [out(b.g.mul(c, b.input((1, 1, 1), "float32", data=(0.5, 1.5))), "bfloat16")]


def swiglu(b: Build) -> list[Any]:
    """silu of a product with an operand as the gate."""
    c = matmul(b)
    c = b.g.swish(c, swish_beta=1.5)
    return [out(b.g.mul(c, b.input((1, 128, 96))), "bfloat16")]


# --- pointwise


def add_relu_1d(b: Build) -> list[Any]:
    b.graph("float32")
    return [out(b.g.relu(b.g.add(b.input((1000,)), b.input((1000,)))))]


def channel_bias(b: Build) -> list[Any]:
    """Row-major images with one number for each channel."""
    b.graph("float16")
    return [out(b.g.add(b.input((2, 8, 16, 32)), b.input((1, 8, 1, 1))))]


def six_axes(b: Build) -> list[Any]:
    b.graph()
    return [out(b.g.tanh(b.g.mul(b.input((2, 2, 2, 2, 2, 32)), 1.5)))]


def clipped(b: Build) -> list[Any]:
    b.graph()
    return [out(b.g.relu(b.input((4, 32, 64)), lower_clip=0.25, upper_clip=1.0))]


def leaky(b: Build) -> list[Any]:
    b.graph()
    return [out(b.g.leaky_relu(b.input((4, 32, 64)), negative_slope=0.25))]


def relu_gradient(b: Build) -> list[Any]:
    b.graph()
    return [out(b.g.relu_backward(b.input((4, 32, 64)), b.input((4, 32, 64)), negative_slope=0.125))]


def index_select(b: Build) -> list[Any]:
    b.graph()
    x = b.input((4, 32, 64))
    return [out(b.g.binary_select(x, b.g.neg(x), b.g.cmp_gt(b.g.gen_index(x, axis=2), 20)))]


def strided_broadcast(b: Build) -> list[Any]:
    """Padded rows, and an operand whose batch stride is 0."""
    b.graph()
    x, y = b.input((4, 32, 64), stride=(64 * 80, 80, 1)), b.input((1, 32, 64))
    return [out(b.g.sub(x, y))]


def row_bias(b: Build) -> list[Any]:
    """Rows of two axes, one number for each column."""
    b.graph("float16")
    return [out(b.g.relu(b.g.add(b.input((2, 8, 512)), b.input((1, 1, 512)))))]


def row_scale(b: Build) -> list[Any]:
    """One number for each row."""
    b.graph("float16")
    return [out(b.g.mul(b.input((2, 8, 512)), b.input((2, 8, 1))))]


def every_row(b: Build) -> list[Any]:
    """Rows with gaps, and one number for each: the two leading axes can't become one."""
    b.graph("float16")
    return [out(b.g.mul(b.input((2, 8, 512), stride=(16 * 512, 512, 1)), b.input((2, 8, 1))))]


def column_major(b: Build) -> list[Any]:
    b.graph()
    layout = (32 * 64, 1, 32)
    x, y = b.input((4, 32, 64), stride=layout), b.input((4, 32, 64), stride=layout)
    return [out(b.g.max(x, y), stride=layout)]


def _unary(op: str, low: float, high: float) -> Callable[[Build], list[Any]]:
    def make(b: Build) -> list[Any]:
        b.graph("float32")
        return [out(getattr(b.g, op)(b.input((2, 32, 64), data=(low, high))))]

    return make


UNARY = {
    "abs": (-2, 2), "ceil": (-4, 4), "cos": (-3, 3), "elu": (-2, 2), "erf": (-2, 2), "exp": (-3, 3), "floor": (-4, 4),
    "gelu": (-3, 3), "gelu_approx_tanh": (-3, 3), "identity": (-2, 2), "log": (0.1, 4), "neg": (-2, 2),
    "reciprocal": (0.5, 4), "rsqrt": (0.5, 4), "sigmoid": (-3, 3), "sin": (-3, 3), "softplus": (-3, 3), "sqrt": (0.1, 4),
    "swish": (-3, 3), "tan": (-1, 1), "tanh": (-3, 3), "relu": (-2, 2),
}  # fmt: skip


def _binary(op: str, low: float = -2, high: float = 2) -> Callable[[Build], list[Any]]:
    def make(b: Build) -> list[Any]:
        b.graph("float32")
        made = getattr(b.g, op)(b.input((2, 32, 64), data=(low, high)), b.input((2, 32, 64), data=(low, high)))
        if op.startswith("cmp_"):  # a mask is for a selection
            x = b.recipes[0][0]
            made = b.g.binary_select(x, b.g.neg(x), made)
        return [out(made, "float32")]

    return make


BINARY = {
    "add_square": (-2, 2), "div": (0.5, 2), "min": (-2, 2), "mod": (0.5, 4), "pow": (0.5, 2), "cmp_eq": (-2, 2),
    "cmp_ge": (-2, 2), "cmp_le": (-2, 2), "cmp_lt": (-2, 2), "cmp_neq": (-2, 2), "elu_backward": (-2, 2),
    "gelu_backward": (-2, 2), "gelu_approx_tanh_backward": (-2, 2), "sigmoid_backward": (-2, 2),
    "softplus_backward": (-2, 2), "swish_backward": (-2, 2), "tanh_backward": (-2, 2),
}  # fmt: skip


# --- copies


def transpose_view(b: Build) -> list[Any]:
    b.graph()
    return [out(b.g.transpose(b.input((4, 32, 64)), permutation=(2, 0, 1)))]


def reshape_copy(b: Build) -> list[Any]:
    b.graph()
    return [out(b.g.reshape(b.input((4, 32, 64)), out_dims=(128, 64)))]


def logical_reshape(b: Build) -> list[Any]:
    """Of a tensor with gaps: heads are split off."""
    b.graph()
    x = b.input((2, 32, 64), stride=(32 * 96, 96, 1))
    y = b.g.reshape(x, reshape_mode="LOGICAL", out_dims=(64, 64))
    return [out(b.g.relu(y))]


def sliced(b: Build) -> list[Any]:
    b.graph()
    return [out(b.g.slice(b.input((4, 32, 64)), slices=[slice(0, 2), slice(0, 32), slice(0, 48)]))]


def concatenated(b: Build) -> list[Any]:
    b.graph()
    return [out(b.g.concatenate(axis=1, inputs=[b.input((4, 32, 64)), b.input((4, 16, 64))]))]


def moved_transpose(b: Build) -> list[Any]:
    b.graph()
    y = b.g.transpose(b.input((4, 32, 64)), permutation=(0, 2, 1))
    return [out(y, stride=(64 * 32, 32, 1))]


# --- reductions


def _reduction(
    dim: Any, kept: Any, mode: str, io: str = "bfloat16", stride: Any = None
) -> Callable[[Build], list[Any]]:
    def make(b: Build) -> list[Any]:
        b.graph(io)
        return [out(b.g.reduction(b.input(dim, stride=stride), mode=mode, out_dims=kept), "float32")]

    return make


def bias_relu_sum(b: Build) -> list[Any]:
    b.graph()
    y = b.g.relu(b.g.add(b.input((2, 64, 128)), b.input((1, 1, 128))))
    return [out(y, "bfloat16"), out(b.g.reduction(y, mode="ADD", out_dims=(2, 64, 1)), "float32")]


# --- norms


def _norm(
    op: str, dim: Any, scale: Any, phase: str = "INFERENCE", bias: bool = True, epsilon: float | None = None
) -> Callable[[Build], list[Any]]:
    def make(b: Build) -> list[Any]:
        b.graph()
        x = b.input(dim)
        weight = b.input(scale, "float32", data=(0.5, 1.5))
        shift = b.input(scale, "float32") if bias else None
        eps = b.host(1e-5, len(dim)) if epsilon is None else epsilon
        made = getattr(b.g, op)(input=x, scale=weight, bias=shift, epsilon=eps, norm_forward_phase=phase)
        made = made if isinstance(made, (list, tuple)) else [made]
        return [out(t, "float32" if i else "bfloat16") for i, t in enumerate(made) if t is not None]

    return make


# --- convolution


def channels_last(dim: Any) -> tuple[int, ...]:
    _, c, *spatial = dim
    stride = [1] * len(dim)
    running = c
    for axis in reversed(range(2, len(dim))):
        stride[axis] = running
        running *= spatial[axis - 2]
    return (running, 1, *stride[2:])


def conv(
    b: Build, image: Any = (2, 16, 16, 16), weight: Any = (32, 16, 3, 3), io: str = "float16", **geometry: Any
) -> Any:
    b.graph(io)
    x = b.input(image, stride=channels_last(image))
    w = b.input(weight, stride=channels_last(weight), data=lambda torch, dim: torch.randn(dim) / 12)
    return b.g.conv_fprop(x, w, **{"padding": [1] * (len(image) - 2), **geometry})


def conv_bias_relu(b: Build) -> list[Any]:
    y = conv(b)
    return [out(b.g.relu(b.g.add(y, b.input((1, 32, 1, 1)))), "float16")]


def conv_strided(b: Build) -> list[Any]:
    return [
        out(conv(b, padding=None, pre_padding=[1, 0], post_padding=[0, 2], stride=[2, 1], dilation=[1, 2]), "float16")
    ]


def conv_mirrored(b: Build) -> list[Any]:
    return [out(conv(b, convolution_mode="CONVOLUTION"), "float16")]


def conv_1d(b: Build) -> list[Any]:
    return [out(conv(b, (2, 16, 32), (32, 16, 3)), "float16")]


def conv_3d(b: Build) -> list[Any]:
    return [out(conv(b, (1, 16, 6, 8, 8), (32, 16, 3, 3, 3)), "float16")]


def conv_grouped(b: Build) -> list[Any]:
    return [out(conv(b, (2, 16, 16, 16), (32, 8, 3, 3)), "float16")]


# --- attention


def sdpa(
    b: Build,
    queries: int = SEQ,
    keys: int = SEQ,
    kv_heads: int = HEADS,
    dim: int = DIM,
    io: str = "bfloat16",
    extra: Callable[[Build], dict[str, Any]] | None = None,
    bshd: bool = False,
    **options: Any,
) -> list[Any]:
    b.graph(io)

    def operand(heads: int, rows: int) -> Any:
        stride = (rows * heads * dim, dim, heads * dim, 1) if bshd else None
        return b.input((BATCH, heads, rows, dim), stride=stride)

    q, k, v = operand(HEADS, queries), operand(kv_heads, keys), operand(kv_heads, keys)
    more = {} if extra is None else extra(b)
    made = b.g.sdpa(q=q, k=k, v=v, **{"attn_scale": dim**-0.5, **options, **more})
    made = made if isinstance(made, (list, tuple)) else [made]
    results = [out(t, "float32" if i else io) for i, t in enumerate(made) if t is not None]
    side = [more[name] for name in ("score_max", "score_sum_exp") if name in more]
    return results + side


def _lengths(b: Build) -> dict[str, Any]:
    return {
        "seq_len_q": b.input((BATCH,), "int32", data=[100, 128]),
        "seq_len_kv": b.input((BATCH, 1, 1, 1), "int32", data=[77, 128]),
    }


def _attention(**options: Any) -> Callable[[Build], list[Any]]:
    return lambda b: sdpa(b, **options)


def _bias(b: Build) -> dict[str, Any]:
    return {"bias": b.input((1, HEADS, SEQ, SEQ))}


def _dropout_mask(b: Build) -> dict[str, Any]:
    mask = b.input((BATCH, HEADS, SEQ, SEQ), data=lambda torch, dim: (torch.rand(dim) < 0.75).float())
    return {"dropout": (mask, b.input((1, 1, 1, 1), "float32", data=[4 / 3]))}


def _scale(b: Build) -> dict[str, Any]:
    return {"attn_scale": b.host(0.125, 4)}


def _sink(b: Build) -> dict[str, Any]:
    return {"sink_token": b.input((1, HEADS, 1, 1), "float32")}


def _scores(b: Build) -> dict[str, Any]:
    return {
        name: out(b.g.tensor(dim=(BATCH, HEADS, SEQ, 1), data_type="float32", name=name))
        for name in ("score_max", "score_sum_exp")
    }


def ragged(b: Build) -> list[Any]:
    """Sequences of 100 and 128 tokens one after the other in memory."""
    b.graph()
    stride = (SEQ * HEADS * DIM, DIM, HEADS * DIM, 1)
    row = HEADS * DIM
    offsets = b.input((BATCH + 1, 1, 1, 1), "int32", data=[0, 100 * row, 228 * row])

    def operand() -> Any:
        return b.input((BATCH, HEADS, SEQ, DIM), stride=stride).set_ragged_offset(offsets)

    lengths = {name: b.input((BATCH, 1, 1, 1), "int32", data=[100, 128]) for name in ("seq_len_q", "seq_len_kv")}
    made = b.g.sdpa(
        q=operand(), k=operand(), v=operand(), attn_scale=0.125, use_padding_mask=True, use_causal_mask=True, **lengths
    )
    made = made[0] if isinstance(made, (list, tuple)) else made
    return [out(made, "bfloat16", stride=stride).set_ragged_offset(offsets)]


def projected(b: Build) -> list[Any]:
    """Heads are split off rows of one tensor each, and joined again: views of the operands."""
    b.graph()

    def heads() -> Any:
        rows = b.input((BATCH, SEQ, HEADS * DIM))
        split = b.g.reshape(rows, reshape_mode="LOGICAL", out_dims=(BATCH, SEQ, HEADS, DIM))
        return b.g.transpose(split, permutation=(0, 2, 1, 3))

    made = b.g.sdpa(q=heads(), k=heads(), v=heads(), attn_scale=0.125, use_causal_mask=True)
    made = made[0] if isinstance(made, (list, tuple)) else made
    rows = b.g.transpose(made.set_data_type("bfloat16"), permutation=(0, 2, 1, 3))
    return [out(b.g.reshape(rows, reshape_mode="LOGICAL", out_dims=(BATCH, SEQ, HEADS * DIM)))]


def paged(b: Build) -> list[Any]:
    """One query a sequence against keys in pages of 16."""
    b.graph()
    pages = SEQ // 16

    def table() -> Any:
        return b.input(
            (BATCH, 1, pages, 1), "int32",
            data=lambda torch, dim: torch.randperm(math.prod(dim), generator=torch.Generator().manual_seed(3)).reshape(dim),
        )  # fmt: skip

    pool = (BATCH * pages, HEADS, 16, DIM)
    made = b.g.sdpa(
        q=b.input((BATCH, HEADS, 1, DIM)), k=b.input(pool), v=b.input(pool), attn_scale=0.125, use_padding_mask=True,
        seq_len_q=b.input((BATCH, 1, 1, 1), "int32", data=[1, 1]),
        seq_len_kv=b.input((BATCH, 1, 1, 1), "int32", data=[77, 128]),
        paged_attention_k_table=table(), paged_attention_v_table=table(), paged_attention_max_seq_len_kv=SEQ,
    )  # fmt: skip
    made = made[0] if isinstance(made, (list, tuple)) else made
    return [out(made, "bfloat16")]


# --- mixture of experts, block scale


def _moe(
    mode: str = "NONE", starts: tuple[int, ...] = (0, 30, 30, 70), index: str = "int32"
) -> Callable[[Build], list[Any]]:
    def make(b: Build) -> list[Any]:
        b.graph()
        experts, k, n, rows = 4, 64, 96, 128
        weight = b.input((experts, k, n), stride=(k * n, 1, k), data=lambda torch, dim: torch.randn(dim) / 8)
        token = b.input((1, rows, k))
        offsets = b.input((len(starts), 1, 1), index, data=list(starts))
        more = {}
        if mode == "GATHER":
            more["token_index"] = b.input(
                (1, 256, 1), index, data=lambda torch, dim: torch.arange(256).remainder(rows).flip(0).reshape(dim)
            )
        return [out(b.g.moe_grouped_matmul(token, weight, offsets, mode=mode, **more), "bfloat16")]

    return make


def mxfp8(b: Build) -> list[Any]:
    """Both operands fp8 with one power of two for each 32 elements along K."""
    b.graph("bfloat16")
    m, n, k = 128, 128, 256
    scales = {"reordering_type": "F8_128x4"}
    a = b.g.block_scale_dequantize(
        b.input((1, m, k), "fp8_e4m3"), b.input((1, m, k // 32), "fp8_e8m0", **scales), block_size=[32]
    )
    right = b.g.block_scale_dequantize(
        b.input((1, k, n), "fp8_e4m3", stride=(n * k, 1, k), data=lambda torch, dim: torch.randn(dim) / 16),
        b.input((1, k // 32, n), "fp8_e8m0", stride=(n * k // 32, 1, k // 32), **scales),
        block_size=[32],
    )
    return [out(b.g.matmul(a, right), "bfloat16")]


def quantised(b: Build) -> list[Any]:
    c = matmul(b, 128, 128, 64)
    y, scale = b.g.block_scale_quantize(c, block_size=32)
    return [out(y, "fp8_e4m3"), out(scale, "fp8_e8m0").set_reordering_type("F8_128x4")]


HALF = 2e-2  # bfloat16 and float16 results
SINGLE = 2e-5
BROADCAST = "x.cudnn_backend.broadcast"

CASES: list[Case] = [
    Case("matmul-bias-gelu", bias_gelu, HALF),
    Case("matmul-scale-relu-amax", scale_relu_amax, HALF),
    Case("matmul-two-batch-axes", batched, HALF),
    Case("matmul-2d-scalar", plain_2d, HALF),
    Case("matmul-f32", float32_matmul, 5e-3),  # the tensor cores round to tf32
    Case("matmul-broadcast-batch", broadcast_batch, HALF),
    Case("matmul-transposed", transposed, HALF),
    Case("matmul-padded-rows", padded, HALF),
    Case("matmul-reshaped", reshaped, HALF),
    Case("matmul-row-sum", row_sum, HALF),
    Case("matmul-int8", int8_matmul, 0.0),
    Case("matmul-fp8", fp8_matmul, HALF, 89),
    Case("matmul-swish-gate", swiglu, HALF),
    Case("pointwise-1d", add_relu_1d, SINGLE),
    Case("pointwise-channel-bias", channel_bias, HALF, declined=BROADCAST),
    Case("pointwise-six-axes", six_axes, HALF),
    Case("pointwise-clipped", clipped, HALF),
    Case("pointwise-leaky", leaky, HALF),
    Case("pointwise-relu-gradient", relu_gradient, HALF),
    Case("pointwise-index-select", index_select, HALF),
    Case("pointwise-strided-broadcast", strided_broadcast, HALF),
    Case("pointwise-row-bias", row_bias, HALF),
    Case("pointwise-row-scale", row_scale, HALF),
    Case("pointwise-every-row", every_row, HALF),
    Case("pointwise-column-major", column_major, HALF),
    *(Case(f"pointwise-{op}", _unary(op, low, high), 5e-5) for op, (low, high) in UNARY.items()),
    *(Case(f"pointwise-{op}", _binary(op, low, high), 5e-5) for op, (low, high) in BINARY.items()),
    Case("copy-transpose-view", transpose_view, 0.0),
    Case("copy-reshape", reshape_copy, 0.0),
    Case("copy-logical-reshape", logical_reshape, 0.0),
    Case("copy-slice", sliced, 0.0),
    Case("copy-concatenate", concatenated, 0.0, hopper="none"),
    Case("copy-moved-transpose", moved_transpose, 0.0, hopper="none"),
    *(
        Case(f"reduction-rows-{mode}", _reduction((2, 64, 128), (2, 64, 1), mode), 1e-3)
        for mode in ("ADD", "MIN", "MAX", "AMAX", "AVG", "NORM1")
    ),
    Case("reduction-columns", _reduction((2, 64, 128), (1, 1, 128), "ADD"), 1e-3),
    Case("reduction-all", _reduction((2, 64, 128), (1, 1, 1), "MAX"), 1e-3),
    Case("reduction-vector", _reduction((4096,), (1,), "ADD", "float32"), 1e-3),
    Case("reduction-channels", _reduction((2, 16, 8, 8), (1, 16, 1, 1), "ADD", stride=(1024, 1, 128, 16)), 1e-3),
    Case("reduction-bias-relu", bias_relu_sum, HALF),
    Case("layernorm", _norm("layernorm", (2, 64, 256), (1, 1, 256)), HALF),
    Case("layernorm-training", _norm("layernorm", (2, 64, 256), (1, 1, 256), "TRAINING"), HALF),
    Case("layernorm-no-bias", _norm("layernorm", (64, 256), (1, 256), bias=False, epsilon=1e-5), HALF),
    Case("layernorm-planes", _norm("layernorm", (4, 16, 8, 8), (1, 16, 8, 8)), HALF),
    Case("rmsnorm", _norm("rmsnorm", (2, 64, 256), (1, 1, 256), bias=False), HALF),
    Case("rmsnorm-training", _norm("rmsnorm", (2, 64, 256), (1, 1, 256), "TRAINING"), HALF),
    Case("rmsnorm-heads", _norm("rmsnorm", (2, 4, 32, 64), (1, 1, 1, 64), bias=False), HALF),
    Case("conv-bias-relu", conv_bias_relu, HALF),
    Case("conv-strided", conv_strided, HALF),
    Case("conv-mirrored", conv_mirrored, HALF),
    Case("conv-1d", conv_1d, HALF),
    Case("conv-3d", conv_3d, HALF),
    Case("conv-grouped", conv_grouped, HALF),
    Case("sdpa-causal", _attention(use_causal_mask=True, generate_stats=True), HALF),
    Case("sdpa-f16-bshd", _attention(io="float16", bshd=True), HALF),
    Case("sdpa-gqa", _attention(kv_heads=2), HALF),
    Case("sdpa-cross", _attention(queries=64, generate_stats=True), HALF),
    Case("sdpa-bottom-right", _attention(queries=64, use_causal_mask_bottom_right=True), HALF),
    Case("sdpa-window", _attention(use_causal_mask=True, sliding_window_length=32), HALF),
    Case("sdpa-right-bound", _attention(diagonal_band_right_bound=5), HALF),
    Case("sdpa-padding", _attention(use_padding_mask=True, generate_stats=True, extra=_lengths), HALF),
    Case("sdpa-bias", _attention(extra=_bias), HALF),
    Case("sdpa-alibi", _attention(use_causal_mask=True, use_alibi_mask=True), HALF),
    Case("sdpa-dropout-mask", _attention(extra=_dropout_mask), HALF),
    Case("sdpa-scale-operand", _attention(extra=_scale), HALF),
    Case("sdpa-sink", _attention(extra=_sink), HALF),
    Case("sdpa-scores", _attention(extra=_scores), HALF),
    Case("sdpa-ragged", ragged, HALF, 90),
    Case("sdpa-projected", projected, HALF),
    Case("sdpa-paged", paged, HALF),
    Case("moe", _moe(), HALF, 90),
    Case("moe-gather", _moe("GATHER", (0, 60, 60, 140)), HALF, 90, declined="op.attribute"),
    Case("moe-two-groups-an-expert", _moe(starts=(0, 30, 30, 70, 90, 90, 100, 128)), HALF, 90),
    Case("moe-int64", _moe(index="int64"), HALF, 90),
    Case("block-scale-mxfp8", mxfp8, HALF, 100, "none"),
    Case("block-scale-quantize", quantised, 0.0, 100, "none"),
]

"""The kit's cases of attention, convolution, block scaling, grouped matmul and linear attention. Imported by ``_library``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ._cases import Case

__all__ = ["block_cases"]


def block_cases() -> Iterator[Case]:
    yield from _sdpa()
    yield from _conv()
    yield from _block_scale()
    yield from _moe()
    yield from _linear_attention()


def _graph(io: str) -> Any:
    from ._library import new_graph

    return new_graph(io)


def _short(dtype: str) -> str:
    from ._library import SHORT

    return SHORT.get(dtype, dtype)


# --- sdpa
def _sdpa_case(
    name: str,
    io: str = "float32",
    q: Sequence[Any] = (2, 4, 9, 16),
    kv: Sequence[Any] | None = None,
    *,
    bshd: bool = False,
    tensors: Sequence[tuple[str, Sequence[int], str]] = (),
    **options: Any,
) -> Case:
    """``tensors`` are further inputs (parameter, dim, dtype); ``options`` those of the builder, or of the Case."""
    case = {key: options.pop(key) for key in ("values", "domain", "full", "sizes") if key in options}
    kv = tuple(kv or q)

    def build() -> Any:
        graph = _graph(io)

        def operand(label: str, dim: Sequence[Any]) -> Any:
            _, h, s, d = dim
            return graph.tensor(dim, (s * h * d, d, h * d, 1) if bshd else None, name=label)

        extra = {label: graph.tensor(dim, data_type=dtype, name=label) for label, dim, dtype in tensors}
        o, stats = graph.sdpa(operand("q", q), operand("k", kv), operand("v", kv), **extra, **options)
        o.set_output(True).set_name("o").set_data_type(io)
        if bshd:
            _, h, s, d = q
            o.set_stride((s * h * d, d, h * d, 1))
        if stats is not None:
            stats.set_output(True).set_name("stats")
        return graph

    return Case(f"sdpa-{_short(io)}-{name}", build, **case)


def _sdpa() -> Iterator[Case]:
    quarter: dict[str, Any] = {"attn_scale": 0.25}
    for io in ("float32", "bfloat16", "float16"):
        yield _sdpa_case("plain", io, **quarter)
        yield _sdpa_case(
            "causal-64x64-d64", io, (1, 2, 64, 64), use_causal_mask=True, attn_scale=0.125, full=io == "float16"
        )
    yield _sdpa_case("gqa-d128-causal-128x256", "bfloat16", (1, 4, 128, 128), (1, 2, 256, 128), attn_scale=0.09,
                     use_causal_mask_bottom_right=True)  # fmt: skip
    yield _sdpa_case("stats", "float32", generate_stats=True, **quarter)
    yield _sdpa_case("bshd-causal", "bfloat16", (2, 4, 32, 32), bshd=True, use_causal_mask=True, **quarter)
    yield _sdpa_case("gqa", "float32", (2, 6, 8, 16), (2, 2, 12, 16), **quarter)
    yield _sdpa_case(
        "bottom-right", "float32", (1, 2, 5, 8), (1, 2, 11, 8), use_causal_mask_bottom_right=True, **quarter
    )
    yield _sdpa_case("window-4", "float32", (1, 2, 16, 8), sliding_window_length=4, use_causal_mask=True, **quarter)
    yield _sdpa_case("bias", "float32", tensors=[("bias", (1, 4, 9, 9), "float32")], **quarter)
    yield _sdpa_case(
        "padding",
        "float32",
        (3, 2, 9, 8),
        tensors=[("seq_len_q", (3, 1, 1, 1), "int32"), ("seq_len_kv", (3, 1, 1, 1), "int32")],
        use_padding_mask=True,
        values={"seq_len_q": [9, 5, 0], "seq_len_kv": [9, 4, 0]},
        **quarter,
    )
    yield _sdpa_case("alibi", "float32", use_alibi_mask=True, use_causal_mask=True, **quarter)
    yield _sdpa_case("no-batch", "float32", (0, 2, 4, 8), **quarter)


# --- convolution
def _conv_case(name: str, io: str, image: Sequence[int], weight: Sequence[int], **options: Any) -> Case:
    full = options.pop("full", False)

    def build() -> Any:
        graph = _graph(io)

        def channels_last(dim: Sequence[int]) -> list[int]:
            stride, running = [0] * len(dim), 1
            for axis in (1, *reversed(range(2, len(dim))), 0):
                stride[axis], running = running, running * dim[axis]
            return stride

        y = graph.conv_fprop(
            graph.tensor(image, channels_last(image), name="image"),
            graph.tensor(weight, channels_last(weight), name="weight"),
            **options,
        )
        y.set_output(True).set_name("y").set_data_type(io)
        return graph

    return Case(f"conv_fprop-{_short(io)}-{name}", build, special=("image",), full=full)


def _conv() -> Iterator[Case]:
    for io in ("float32", "bfloat16"):
        yield _conv_case("3x3-same", io, (2, 8, 7, 6), (4, 8, 3, 3), padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    yield _conv_case(
        "stride-2-dilated", "float32", (1, 4, 11, 9), (6, 4, 3, 2), padding=[1, 0], stride=[2, 2], dilation=[2, 1]
    )
    yield _conv_case("groups", "float32", (1, 6, 5, 5), (4, 3, 2, 2), padding=[0, 0], stride=[1, 1], dilation=[1, 1])
    yield _conv_case("1d-mirrored", "float32", (2, 3, 12), (5, 3, 4), padding=[2], stride=[1], dilation=[1],
                     convolution_mode="CONVOLUTION")  # fmt: skip
    yield _conv_case("uneven-padding", "float32", (1, 2, 5, 5), (2, 2, 3, 3), pre_padding=[1, 0], post_padding=[0, 2],
                     stride=[1, 1], dilation=[1, 1])  # fmt: skip
    yield _conv_case("3d", "float32", (1, 3, 4, 5, 4), (2, 3, 2, 2, 2), full=True)


# --- block scaling
def _dequantize(name: str, io: str, scale: str, dim: Sequence[int], block: list[int], out: str) -> Case:
    def build() -> Any:
        graph = _graph(out)
        blocks = [1] * (len(dim) - len(block)) + block
        scales = [-(-size // step) for size, step in zip(dim, blocks, strict=True)]
        x = graph.tensor(dim, data_type=io, name="x")
        y = graph.block_scale_dequantize(x, graph.tensor(scales, data_type=scale, name="descale"), block_size=block)
        y.set_output(True).set_name("y").set_data_type(out)
        return graph

    return Case(f"block_scale_dequantize-{name}", build, domain={"descale": (0.25, 8.0)})


def _quantize(name: str, io: str, scale: str, dim: Sequence[int], block: int, axis: int) -> Case:
    def build() -> Any:
        graph = _graph("float32")
        y, scales = graph.block_scale_quantize(graph.tensor(dim, name="x"), block_size=block, axis=axis)
        y.set_output(True).set_name("y").set_data_type(io)
        scales.set_output(True).set_name("scale").set_data_type(scale)
        return graph

    return Case(f"block_scale_quantize-{name}", build)


def _block_scale() -> Iterator[Case]:
    yield _dequantize("mxfp8", "fp8_e4m3", "fp8_e8m0", (4, 64), [32], "float32")
    yield _dequantize("mxfp4", "fp4_e2m1", "fp8_e8m0", (4, 64), [32], "bfloat16")
    yield _dequantize("nvfp4", "fp4_e2m1", "fp8_e4m3", (4, 64), [16], "bfloat16")
    yield _dequantize("tiles", "fp8_e4m3", "float32", (6, 64), [2, 32], "float32")
    yield _dequantize("int4", "int4", "float16", (4, 64), [32], "float32")
    yield _quantize("mxfp8", "fp8_e4m3", "fp8_e8m0", (4, 64), 32, 1)
    yield _quantize("nvfp4", "fp4_e2m1", "fp8_e4m3", (4, 64), 16, 1)
    yield _quantize("columns", "fp8_e5m2", "float32", (40, 6), 32, 0)


# --- grouped matmul
def _moe_case(name: str, io: str, mode: str, values: dict[str, Any], top_k: int | None = None, rows: int = 8) -> Case:
    experts, k, n = 3, 16, 8

    def build() -> Any:
        graph = _graph(io)
        token = graph.tensor((1, 6 if mode == "GATHER" else rows, k), name="token")
        weight = graph.tensor((experts, k, n), name="weight")
        offsets = graph.tensor((len(values["offset"]), 1, 1), data_type="int32", name="offset")
        routing: dict[str, Any] = {
            port: graph.tensor((1, rows, 1), data_type="int32", name=port)
            for port in ("token_index", "token_ks")
            if port in values
        }
        if mode == "COMBINE":
            routing["top_k_scores"] = graph.tensor((1, rows // (top_k or 1), top_k), name="top_k_scores")
        y = graph.moe_grouped_matmul(token, weight, offsets, mode=mode, top_k=top_k, **routing)
        y.set_output(True).set_name("y").set_data_type(io)
        return graph

    return Case(f"moe_grouped_matmul-{_short(io)}-{name}", build, values=values)


def _moe() -> Iterator[Case]:
    bounds = [0, 3, 3, 8]
    order, slots = [3, 0, 2, 1, 0, 3, 1, 2], [0, 0, 0, 0, 1, 1, 1, 1]
    for io in ("float32", "bfloat16"):
        yield _moe_case("none", io, "NONE", {"offset": bounds})
    yield _moe_case("starts", "float32", "NONE", {"offset": bounds[:3]})
    yield _moe_case("gather", "float32", "GATHER", {"offset": bounds, "token_index": [5, 0, 1, 2, 2, 4, 3, 0]})
    routed = {"offset": bounds, "token_index": order, "token_ks": slots}
    yield _moe_case("scatter", "float32", "SCATTER", routed, top_k=2)
    yield _moe_case("combine", "float32", "COMBINE", routed, top_k=2)


# --- linear attention
def _delta_case(
    op: str,
    name: str,
    io: str = "float32",
    heads: tuple[int, int] = (2, 2),
    size: tuple[int, int, int] = (12, 8, 16),
    **options: Any,
) -> Case:
    """``size`` is (tokens, key head dimension, value head dimension)."""
    tokens, key, value = size
    case: dict[str, Any] = {"values": options.pop("values", {})}
    ports = options.pop("ports", {})
    largest = max(heads)

    def build() -> Any:
        graph = _graph(io)
        q, k = (graph.tensor((tokens, heads[0], key), name=label) for label in ("q", "k"))
        v = graph.tensor((tokens, heads[1], value), name="v")
        g = graph.tensor((tokens, largest, key) if op == "kda" else (tokens, largest), data_type="float32", name="g")
        beta = graph.tensor((tokens, largest), data_type="float32", name="beta")
        extra = {label: graph.tensor(dim, data_type=dtype, name=label) for label, (dim, dtype) in ports.items()}
        found = getattr(graph, op)(q, k, v, g, beta, **extra, **options)
        found[0].set_output(True).set_name("o").set_data_type(io)
        if found[1] is not None:
            found[1].set_output(True).set_name("final_state").set_data_type("float32")
        return graph

    case["domain"] = {"g": (-1.0, -0.05), "beta": (0.1, 0.9), "k": (-0.6, 0.6)}
    return Case(f"{op}-{_short(io)}-{name}", build, **case)


def _linear_attention() -> Iterator[Case]:
    for op in ("gdn", "kda"):
        for io in ("float32", "bfloat16"):
            yield _delta_case(op, "plain", io)
        for width in (64, 128):
            yield _delta_case(op, f"d{width}", "bfloat16", (2, 4), (96, width, width), use_qk_l2norm=True)
        yield _delta_case(op, "l2norm-grouped", "float32", (2, 4), use_qk_l2norm=True)
        yield _delta_case(
            op,
            "sequences-state",
            "float32",
            ports={"cu_seqlens": ((4,), "int32"), "initial_state": ((3, 2, 16, 8), "float32")},
            values={"cu_seqlens": [0, 5, 5, 12]},
            output_final_state=True,
        )

"""Every attribute, optional port and tensor field of the core's operations, at its default and changed.

``VARIATIONS``: (op, what) -> (base, changed): functions of a Build. Read by ``test_lower``, which wants each change to show in
the calls or to be declined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from backend_cases import BATCH, CASES, DIM, HEADS, SEQ, Build, conv, out, sdpa

Make = Callable[[Build], Any]


def recorded_graphs() -> Iterator[tuple[str, Any]]:
    for case in CASES:
        yield f"case {case.name}", case.graph()
    for op, make in plain_ops():
        build = Build()
        make(build)
        yield f"op {op}", build.g
    for (op, what), makes in VARIATIONS.items():
        for kind, make in zip(("base", "changed"), makes, strict=True):
            build = Build()
            make(build)
            yield f"{kind} {op}.{what}", build.g


def on(io: str = "bfloat16", compute: str = "float32") -> Callable[[Callable[..., Any]], Callable[..., Make]]:
    """A function of (Build, options) as one that takes the options and waits for the Build."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Make]:
        def options(**given: Any) -> Make:
            def make(b: Build) -> None:
                b.graph(given.pop("io", io), given.pop("compute", compute))
                function(b, **given)

            return make

        return options

    return wrap


@on()
def matmul(b: Build, a: Any = None, **options: Any) -> None:
    left = b.input((1, 64, 32), **(a or {}))
    out(b.g.matmul(left, b.input((1, 32, 48)), **options))


def _apply(b: Build, op: str, *operands: Any, **options: Any) -> None:
    """The op's result, or what its mask selects: booleans in memory are declined."""
    made = getattr(b.g, op)(*operands, **options)
    mask = op.startswith(("cmp_", "logical_"))
    out(b.g.binary_select(operands[0], b.g.neg(operands[0]), made) if mask else made)


@on()
def unary(b: Build, op: str, **options: Any) -> None:
    _apply(b, op, b.input((2, 32, 64)), **options)


@on()
def binary(b: Build, op: str, **options: Any) -> None:
    _apply(b, op, b.input((2, 32, 64)), b.input((2, 32, 64)), **options)


@on()
def ternary(b: Build, op: str, **options: Any) -> None:
    x, y = b.input((2, 32, 64)), b.input((2, 32, 64))
    _apply(b, op, x, y, b.g.cmp_gt(x, y), **options)


@on()
def reduction(b: Build, groups: bool = False, **options: Any) -> None:
    more = {"group_offset": b.input((4, 1, 1), "int32")} if groups else {}
    dims = (4, 1, 64) if groups else (1, 1, 64)
    out(b.g.reduction(b.input((1, 32, 64)), **{"mode": "ADD", "out_dims": dims, **more, **options}), "float32")


@on()
def reshape(b: Build, **options: Any) -> None:
    """Between two tensors inside the graph: not folded."""
    x = b.g.relu(b.input((2, 32, 64))).set_data_type("bfloat16")
    out(b.g.neg(b.g.reshape(x, out_dims=(4, 16, 64), **options)))


@on()
def transpose(b: Build, permutation: Any = (0, 1, 2), **options: Any) -> None:
    x = b.g.relu(b.input((2, 64, 64))).set_data_type("bfloat16")
    out(b.g.neg(b.g.transpose(x, permutation=permutation, **options)))


@on()
def slices(b: Build, last: Any = slice(0, 64), **options: Any) -> None:
    x = b.g.relu(b.input((2, 32, 64))).set_data_type("bfloat16")
    out(b.g.neg(b.g.slice(x, slices=[slice(0, 2), slice(0, 32), last], **options)))


@on()
def concatenate(b: Build, **options: Any) -> None:
    inputs = [b.input((2, 32, 64)), b.input((2, 32, 64))]
    out(b.g.concatenate(**{"axis": 1, "inputs": inputs, **options}))


@on()
def norm(
    b: Build, op: str, bias: bool = False, phase: str = "INFERENCE", statistics: bool = False, **options: Any
) -> None:
    scale = b.input((1, 64), "float32")
    shift = b.input((1, 64), "float32") if bias else None
    made = getattr(b.g, op)(
        input=b.input((32, 64)), scale=scale, bias=shift, epsilon=b.host(1e-5, 2), norm_forward_phase=phase, **options
    )
    made = made if isinstance(made, (list, tuple)) else [made]
    out(made[0])
    for tensor in made[1:] if statistics else ():
        out(tensor, "float32")


def _conv(**options: Any) -> Make:
    def make(b: Build) -> None:
        build_options = {"pre_padding": [1, 1], "post_padding": [1, 1], "padding": None, **options}
        out(conv(b, **build_options), "float16")

    return make


def _sdpa(ports: Callable[[Build], dict[str, Any]] | None = None, **options: Any) -> Make:
    return lambda b: sdpa(b, extra=ports, **options)


@on()
def dequantize(b: Build, block: Any = (32,), output: bool = False, scales: Any = (1, 64, 2), **options: Any) -> None:
    y = b.g.block_scale_dequantize(
        b.input((1, 64, 64), "fp8_e4m3"), b.input(scales, "fp8_e8m0"), block_size=block, **options
    )
    if output:
        out(y, "bfloat16")
    else:
        out(b.g.matmul(y.set_data_type("bfloat16"), b.input((1, 64, 32))))


@on()
def quantize(b: Build, groups: bool = False, **options: Any) -> None:
    if groups:
        options["group_offset"] = b.input((4,), "int32")
    c = b.g.matmul(b.input((1, 128, 64)), b.input((1, 64, 128)))
    y, scale = b.g.block_scale_quantize(c, **{"block_size": 32, **options})
    out(y, "fp8_e4m3")
    out(scale, "fp8_e8m0").set_reordering_type("F8_128x4")


@on()
def moe(b: Build, mode: str = "NONE", **options: Any) -> None:
    token, weight = b.input((1, 128, 64)), b.input((4, 64, 32), stride=(64 * 32, 1, 64))
    starts = b.input((4, 1, 1), "int32")
    if mode in ("GATHER", "SCATTER", "COMBINE"):
        options["token_index"] = b.input((1, 128, 1), "int32")
    if mode in ("SCATTER", "COMBINE"):
        options = {"top_k": 2, **options, "token_ks": b.input((1, 128, 1), "int32")}
    if mode == "COMBINE":
        options["top_k_scores"] = b.input((1, 64, 2))
    out(b.g.moe_grouped_matmul(token, weight, starts, mode=mode, **options))


# Ports of attention


def _port(name: str, dim: Any, dtype: str = "") -> Callable[[Build], dict[str, Any]]:
    return lambda b: {name: b.input(dim, dtype)}


def _output(name: str, last: int = 1) -> Callable[[Build], dict[str, Any]]:
    return lambda b: {name: out(b.g.tensor(dim=(BATCH, HEADS, SEQ, last), data_type="float32"))}


def _lengths(running: bool = False) -> Callable[[Build], dict[str, Any]]:
    kind, count = ("cu_seq_len", BATCH + 1) if running else ("seq_len", BATCH)
    return lambda b: {
        "use_padding_mask": True,
        **{f"{kind}_{side}": b.input((count, 1, 1, 1), "int32") for side in ("q", "kv")},
    }


def _dropout(probability: float, dump: bool = False) -> Callable[[Build], dict[str, Any]]:
    def make(b: Build) -> dict[str, Any]:
        seed, offset = (b.input((1, 1, 1, 1), "int64") for _ in range(2))
        return {"dropout": (probability, seed, offset), **(_output("rng_dump", SEQ)(b) if dump else {})}

    return make


def _masked(scale: str = "float32") -> Callable[[Build], dict[str, Any]]:
    return lambda b: {"dropout": (b.input((BATCH, HEADS, SEQ, SEQ)), b.input((1, 1, 1, 1), scale))}


def paged(keys: bool = True, values: bool = True, longest: int | None = None) -> Make:
    def make(b: Build) -> None:
        b.graph()
        more: dict[str, Any] = {} if longest is None else {"paged_attention_max_seq_len_kv": longest}
        for wanted, side in ((keys, "k"), (values, "v")):
            if wanted:
                more[f"paged_attention_{side}_table"] = b.input((BATCH, 1, 8, 1), "int32")
        pool, rows = (BATCH * 8, HEADS, 16, DIM), (BATCH, HEADS, 128, DIM)
        made = b.g.sdpa(
            q=b.input((BATCH, HEADS, 1, DIM)), k=b.input(pool if keys else rows), v=b.input(pool if values else rows),
            attn_scale=0.125, **_lengths()(b), **more,
        )  # fmt: skip
        out(made[0] if isinstance(made, (list, tuple)) else made)

    return make


def ragged(multiplier: int | None) -> Make:
    def make(b: Build) -> None:
        b.graph()
        offsets = b.input((BATCH + 1, 1, 1, 1), "int32")
        stride = (SEQ * HEADS * DIM, DIM, HEADS * DIM, 1)
        q, k, v = (b.input((BATCH, HEADS, SEQ, DIM), stride=stride) for _ in range(3))
        made = b.g.sdpa(q=q, k=k, v=v, attn_scale=0.125, **_lengths()(b))
        made = out(made[0] if isinstance(made, (list, tuple)) else made, stride=stride)
        for tensor in (q, k, v, made) if multiplier else ():
            tensor.set_ragged_offset(offsets).set_ragged_offset_multiplier(multiplier)

    return make


def host(by_value: bool) -> Make:
    def make(b: Build) -> None:
        b.graph()
        scale = b.input((1, 1, 1), "float32").set_is_pass_by_value(by_value)
        out(b.g.mul(b.input((2, 32, 64)), scale))

    return make


def number(value: float) -> Make:
    def make(b: Build) -> None:
        b.graph()
        out(b.g.mul(b.input((2, 32, 64)), value))

    return make


def _clips(op: str, make: Callable[..., Make], name: str, value: float) -> tuple[Make, Make]:
    return make(op=op), make(op=op, **{name: value})


def plain_ops() -> Iterator[tuple[str, Make]]:
    """Every pointwise op by itself."""
    from cudnn_core._ops._pointwise import ROWS

    for row in ROWS:
        make = (unary, binary, ternary)[len(row.inputs) - 1]
        types = {"io": "int8", "compute": "int32"} if row.name.startswith("logical_") else {}
        yield row.name, make(op=row.name, **types, **({"axis": 1} if row.name == "gen_index" else {}))


_PADDED = _sdpa(_lengths())
_STATS = _sdpa(generate_stats=True)
_FLAT = _sdpa()

VARIATIONS: dict[tuple[str, str], tuple[Make, Make]] = {
    ("matmul", "padding"): (matmul(), matmul(padding=1.5)),
    **{
        (op, name): _clips(op, make, name, 0.5)
        for op, make in (("relu", unary), ("relu_backward", binary))
        for name in ("negative_slope", "lower_clip", "upper_clip")
    },
    ("swish", "swish_beta"): (unary(op="swish"), unary(op="swish", swish_beta=2.0)),
    ("swish_backward", "swish_beta"): (binary(op="swish_backward"), binary(op="swish_backward", swish_beta=2.0)),
    ("gen_index", "axis"): (unary(op="gen_index", axis=1), unary(op="gen_index", axis=2)),
    **{
        ("reduction", f"mode-{mode}"): (reduction(), reduction(mode=mode))
        for mode in ("MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2", "MUL_NO_ZEROS")
    },
    ("reduction", "group_offset"): (reduction(), reduction(groups=True)),
    ("reshape", "reshape_mode"): (reshape(), reshape(reshape_mode="LOGICAL")),
    ("transpose", "permutation"): (transpose(), transpose(permutation=(0, 2, 1))),
    ("slice", "slices"): (slices(), slices(last=slice(0, 32))),
    ("slice", "slices-step"): (slices(last=slice(0, 32)), slices(last=slice(0, 64, 2))),
    ("slice", "slices-start"): (slices(last=slice(0, 32)), slices(last=slice(32, 64))),
    ("concatenate", "axis"): (concatenate(), concatenate(axis=2)),
    ("concatenate", "in_place_index"): (concatenate(), concatenate(in_place_index=1)),
    **{
        (op, what): (norm(op=op), norm(op=op, **changed))
        for op in ("layernorm", "rmsnorm")
        for what, changed in {
            "norm_forward_phase": {"phase": "TRAINING", "statistics": True},
            "bias": {"bias": True},
        }.items()
    },
    ("layernorm", "mean"): (norm(op="layernorm"), norm(op="layernorm", phase="TRAINING", statistics=True)),
    ("layernorm", "inv_variance"): (norm(op="layernorm"), norm(op="layernorm", phase="TRAINING", statistics=True)),
    ("rmsnorm", "inv_variance"): (norm(op="rmsnorm"), norm(op="rmsnorm", phase="TRAINING", statistics=True)),
    ("conv_fprop", "pre_padding"): (_conv(), _conv(pre_padding=[0, 1])),
    ("conv_fprop", "post_padding"): (_conv(), _conv(post_padding=[0, 1])),
    ("conv_fprop", "stride"): (_conv(), _conv(stride=[2, 1])),
    ("conv_fprop", "dilation"): (_conv(), _conv(dilation=[1, 2])),
    ("conv_fprop", "convolution_mode"): (_conv(), _conv(convolution_mode="CONVOLUTION")),
    ("sdpa", "generate_stats"): (_FLAT, _STATS),
    ("sdpa", "Stats"): (_FLAT, _STATS),
    ("sdpa", "scale"): (_FLAT, _sdpa(attn_scale=0.5)),
    ("sdpa", "use_alibi_mask"): (
        _sdpa(use_causal_mask=True),
        _sdpa(use_causal_mask=True, use_alibi_mask=True),
    ),
    ("sdpa", "use_padding_mask"): (_FLAT, _PADDED),
    ("sdpa", "diagonal_alignment"): (
        _sdpa(diagonal_band_right_bound=0),
        _sdpa(diagonal_band_right_bound=0, diagonal_alignment="BOTTOM_RIGHT"),
    ),
    ("sdpa", "left_bound"): (_FLAT, _sdpa(diagonal_band_left_bound=16)),
    ("sdpa", "right_bound"): (_FLAT, _sdpa(diagonal_band_right_bound=3)),
    ("sdpa", "dropout_probability"): (_sdpa(_dropout(0.5)), _sdpa(_dropout(0.25))),
    ("sdpa", "paged_attention_max_seq_len_kv"): (paged(), paged(longest=100)),
    ("sdpa", "max_total_seq_len_q"): (_PADDED, _sdpa(_lengths(), max_total_seq_len_q=200)),
    ("sdpa", "max_total_seq_len_kv"): (_PADDED, _sdpa(_lengths(), max_total_seq_len_kv=200)),
    ("sdpa", "implementation"): (_FLAT, _sdpa(implementation="COMPOSITE")),
    ("sdpa", "unfuse_fma"): (_FLAT, _sdpa(unfuse_fma=True)),
    ("sdpa", "stats_use_log2"): (_STATS, _sdpa(generate_stats=True, stats_use_log2=True)),
    ("sdpa", "attn_scale"): (_FLAT, _sdpa(_port("attn_scale", (1,), "float32"))),
    ("sdpa", "bias"): (_FLAT, _sdpa(_port("bias", (1, HEADS, SEQ, SEQ)))),
    ("sdpa", "block_mask"): (_FLAT, _sdpa(_port("block_mask", (BATCH, HEADS, 1, 1), "uint8"))),
    ("sdpa", "seq_len_q"): (_FLAT, _PADDED),
    ("sdpa", "seq_len_kv"): (_FLAT, _PADDED),
    ("sdpa", "cu_seq_len_q"): (_PADDED, _sdpa(_lengths(running=True))),
    ("sdpa", "cu_seq_len_kv"): (_PADDED, _sdpa(_lengths(running=True))),
    ("sdpa", "seed"): (_FLAT, _sdpa(_dropout(0.5))),
    ("sdpa", "offset"): (_FLAT, _sdpa(_dropout(0.5))),
    ("sdpa", "dropout_mask"): (_FLAT, _sdpa(_masked())),
    ("sdpa", "dropout_scale"): (_sdpa(_masked()), _sdpa(_masked("bfloat16"))),
    ("sdpa", "paged_attention_k_table"): (paged(keys=False), paged()),
    ("sdpa", "paged_attention_v_table"): (paged(values=False), paged()),
    ("sdpa", "sink_token"): (_FLAT, _sdpa(_port("sink_token", (1, HEADS, 1, 1), "float32"))),
    ("sdpa", "score_max"): (_FLAT, _sdpa(_output("score_max"))),
    ("sdpa", "score_sum_exp"): (_FLAT, _sdpa(_output("score_sum_exp"))),
    ("sdpa", "rng_dump"): (_sdpa(_dropout(0.5)), _sdpa(_dropout(0.5, dump=True))),
    ("block_scale_dequantize", "block_size"): (dequantize(), dequantize(block=(16,), scales=(1, 64, 4))),
    ("block_scale_dequantize", "block_size-2"): (dequantize(), dequantize(block=(1, 32))),
    ("block_scale_quantize", "block_size"): (quantize(), quantize(block_size=16)),
    ("block_scale_quantize", "axis"): (quantize(), quantize(axis=1)),
    ("block_scale_quantize", "transpose"): (quantize(), quantize(transpose=True)),
    ("block_scale_quantize", "group_offset"): (quantize(), quantize(groups=True)),
    **{("moe_grouped_matmul", f"mode-{mode}"): (moe(), moe(mode=mode)) for mode in ("GATHER", "SCATTER", "COMBINE")},
    ("moe_grouped_matmul", "top_k"): (moe(mode="SCATTER"), moe(mode="SCATTER", top_k=4)),
    ("moe_grouped_matmul", "token_index"): (moe(), moe(mode="GATHER")),
    ("moe_grouped_matmul", "token_ks"): (moe(mode="GATHER"), moe(mode="SCATTER")),
    ("moe_grouped_matmul", "top_k_scores"): (moe(mode="SCATTER"), moe(mode="COMBINE")),
    # what tensors and nodes carry
    ("tensor", "dtype"): (matmul(), matmul(a={"dtype": "float16"})),
    ("tensor", "stride"): (matmul(), matmul(a={"stride": (64 * 40, 40, 1)})),
    ("tensor", "dim"): (unary(op="neg"), unary(op="abs")),
    ("tensor", "reordering"): (matmul(), matmul(a={"reordering_type": "F16x16"})),
    ("tensor", "by_value"): (host(False), host(True)),
    ("tensor", "value"): (number(1.5), number(2.5)),
    ("tensor", "ragged_offset"): (ragged(None), ragged(1)),
    ("tensor", "ragged_offset_multiplier"): (ragged(1), ragged(HEADS * DIM)),
    **{
        ("compute", op): (make(**given), make(compute="float16", **given))
        for op, make, given in (
            ("matmul", matmul, {}),
            ("add", binary, {"op": "add"}),
            ("relu", unary, {"op": "relu"}),
            ("swish", unary, {"op": "swish"}),
            ("gen_index", unary, {"op": "gen_index", "axis": 1}),
            ("reduction", reduction, {}),
            ("reduction-AVG", reduction, {"mode": "AVG"}),
            ("transpose", transpose, {}),
            ("slice", slices, {}),
            ("layernorm", norm, {"op": "layernorm"}),
            ("rmsnorm", norm, {"op": "rmsnorm"}),
            ("block_scale_dequantize", dequantize, {}),
            ("block_scale_quantize", quantize, {}),
            ("moe_grouped_matmul", moe, {}),
        )
    },
}

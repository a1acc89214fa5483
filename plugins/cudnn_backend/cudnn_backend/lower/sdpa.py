"""The row of ``sdpa``. Imported by the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .rows import Row

if TYPE_CHECKING:
    from cudnn_core import Checks, FrozenNode, FrozenTensor

    from .rows import Emitter

__all__ = ["ROWS"]

_TENSORS = (
    *("bias", "block_mask", "seq_len_q", "seq_len_kv", "cu_seq_len_q", "cu_seq_len_kv"),
    *("paged_attention_k_table", "paged_attention_v_table", "sink_token"),
)
_SIDE_OUTPUTS = ("rng_dump", "score_max", "score_sum_exp")
_BY_NAME = (
    *("use_alibi_mask", "use_padding_mask", "max_total_seq_len_q", "max_total_seq_len_kv"),
    *("unfuse_fma", "stats_use_log2"),
)
_COLUMNS = (
    *("attn_scale", "seq_len_q", "seq_len_kv", "cu_seq_len_q", "cu_seq_len_kv", "seed", "offset", "dropout_scale"),
)

_FLOATS = ("float16", "bfloat16", "float32")
_INDICES = ("int32", "int64")
# Nothing looks at them before the planner, which divides by zero for a dropout mask of booleans.
_TYPES = {
    **dict.fromkeys(("attn_scale", "bias", "dropout_mask", "dropout_scale"), _FLOATS),
    **dict.fromkeys(("seq_len_q", "seq_len_kv", "cu_seq_len_q", "cu_seq_len_kv", "seed", "offset"), _INDICES),
    **dict.fromkeys(("paged_attention_k_table", "paged_attention_v_table"), _INDICES),
    "block_mask": ("uint8",),
    "sink_token": ("float32",),
}


def _used(tensor: FrozenTensor | None) -> bool:
    return tensor is not None and (tensor.role == "output" or bool(tensor.consumers))


def _check(c: Checks, node: FrozenNode) -> None:
    # Its engines for fp8 belong to an operation with scales of its own.
    c.dtype("sdpa.q", node.inputs["q"], "float16", "bfloat16", "float32")
    for port, types in _TYPES.items():
        if port in node.inputs:
            c.dtype(f"sdpa.{port}", node.inputs[port], *types)
    # The operations that attention is made of take the graph's type, not the node's.
    c.require(node.compute_dtype == "float32", "dtype.compute", "sdpa", ["float32"], str(node.compute_dtype))
    probability = node.attrs["dropout_probability"]
    # The binding leaves the generator of a dropout of 0 out, and with it two operands.
    c.require(
        probability is None or probability > 0, "op.attribute", "sdpa.dropout_probability", "more than 0", probability
    )
    for port in _SIDE_OUTPUTS:
        tensor = node.outputs.get(port)
        c.require(
            tensor is None or tensor.role == "output" or not tensor.consumers,
            "op.pattern",
            f"sdpa.{port}",
            "an output",
            "a tensor inside the graph",
        )


def _longest(node: FrozenNode) -> int | None:
    """Keys that the page tables may reach, which the backend does not work out by itself."""
    declared = node.attrs["paged_attention_max_seq_len_kv"]
    for port, table in (("k", "paged_attention_k_table"), ("v", "paged_attention_v_table")):
        if table in node.inputs:
            return int(declared or node.inputs[table].dim[2] * node.inputs[port].dim[2])
    return None


def _dropout(e: Emitter, node: FrozenNode) -> tuple[Any, ...] | None:
    if "dropout_mask" in node.inputs:
        return e.input(node.inputs["dropout_mask"]), e.input(node.inputs["dropout_scale"])
    probability = node.attrs["dropout_probability"]
    if probability is None:
        return None
    return probability, e.input(node.inputs["seed"]), e.input(node.inputs["offset"])


def _emit(e: Emitter, node: FrozenNode) -> None:
    attrs, scale = node.attrs, node.attrs["scale"]
    stats = node.outputs.get("Stats")
    out, made_stats = e.target.sdpa(
        q=e.input(node.inputs["q"]),
        k=e.input(node.inputs["k"]),
        v=e.input(node.inputs["v"]),
        attn_scale=scale if scale is not None else e.optional(node, "attn_scale"),
        diagonal_alignment=e.enum("diagonal_alignment", attrs["diagonal_alignment"]),
        diagonal_band_left_bound=attrs["left_bound"],
        diagonal_band_right_bound=attrs["right_bound"],
        dropout=_dropout(e, node),
        paged_attention_max_seq_len_kv=_longest(node),
        generate_stats=_used(stats),
        implementation=e.enum("attention_implementation", attrs["implementation"]),
        compute_data_type=e.dtype(node.compute_dtype),
        **{port: e.optional(node, port) for port in _TENSORS},
        **{port: e.side_output(node.outputs[port]) for port in _SIDE_OUTPUTS if _used(node.outputs.get(port))},
        **{name: attrs[name] for name in _BY_NAME},
    )
    e.result(out, node.outputs["O"])
    if stats is not None and _used(stats):
        e.result(made_stats, stats)


ROWS = {"sdpa": Row(_emit, _check, columns=dict.fromkeys(_COLUMNS, 4), kind="sdpa")}

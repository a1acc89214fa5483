"""What the engine declines, decided from the graph alone: pure, without torch. Imported by the engine.

``declines(graph)`` is a fact of the graph (``graph.facts(declines)``), so that check_support costs a look-up. Whatever it
lets pass must run: a lowering has no refusals of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cudnn_core import Decline

from ._lower import LOWERED

if TYPE_CHECKING:
    from cudnn_core import FrozenGraph

__all__ = ["declines"]

_STORAGE = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int8",
    "uint8",
    "int4",
    "boolean",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_e8m0",
    "fp8_e5m3",
    "fp4_e2m1",
]
_COMPUTE = (*_STORAGE[:9], "boolean", "fast_float_for_fp8")
_PACKED = ("fp4_e2m1", "int4")
_RAGGED_PORTS = frozenset(
    ["q", "k", "v", "paged_attention_k_table", "paged_attention_v_table", "O", "Stats", "score_max", "score_sum_exp"]
)


def declines(graph: FrozenGraph) -> tuple[Decline, ...]:
    """Every reason why the engine can't run the graph."""
    found: list[Decline] = []
    for tensor in graph.tensors:
        found += _tensor(graph, tensor)
    for node in graph.nodes:
        found += _node(node)
    return tuple(found)


def _label(tensor: Any) -> str:
    return tensor.name or f"tensor {tensor.uid}"


def _tensor(graph: FrozenGraph, tensor: Any) -> Iterator[Decline]:
    if tensor.dtype not in _STORAGE:
        yield Decline("dtype.unsupported", _label(tensor), list(_STORAGE), str(tensor.dtype))
    ports = {port for _, port in tensor.consumers} | ({tensor.producer[1]} if tensor.producer else set())
    ops = {graph.nodes[index].op for index, _ in (*tensor.consumers, *((tensor.producer,) if tensor.producer else ()))}
    if tensor.reordering == "F8_128x4":
        yield from _reordered(tensor, ports, ops)
    elif tensor.reordering != "NONE":
        yield Decline("layout.order", f"{_label(tensor)}.reordering", ["NONE", "F8_128x4"], tensor.reordering)
    offset = tensor.ragged_offset
    if offset is not None:
        if ops != {"sdpa"} or not ports <= _RAGGED_PORTS or tensor.rank != 4 or tensor.dtype in _PACKED:
            yield Decline("layout.ragged", _label(tensor), "ragged operands of sdpa only", sorted(ops))
        elif tensor.role == "virtual" or offset.role != "input":
            yield Decline("layout.ragged", _label(tensor), "an operand whose offsets are a graph input", tensor.role)


def _reordered(tensor: Any, ports: set[str], ops: set[str]) -> Iterator[Decline]:
    if not ports <= {"descale", "scale"} or not ops <= {"block_scale_dequantize", "block_scale_quantize"}:
        yield Decline("layout.order", f"{_label(tensor)}.reordering", "scales of block scaling only", sorted(ops))
        return
    if tensor.rank < 2:
        yield Decline("shape.rank", _label(tensor), "rank 2 or more", tensor.rank)
        return
    sizes = [*tensor.dim, *tensor.stride]
    if not all(isinstance(size, int) for size in sizes):
        yield Decline("shape.dynamic", _label(tensor), "fixed sizes under F8_128x4", list(map(str, sizes)))
        return
    order = sorted(range(tensor.rank), key=lambda axis: (tensor.stride[axis], -axis))
    rows, columns = order[1], order[0]
    for axis, multiple in ((rows, 128), (columns, 4)):
        if tensor.dim[axis] % multiple:
            yield Decline(
                "shape.multiple_of", f"{_label(tensor)}.dim[{axis}]", {"multiple_of": multiple}, tensor.dim[axis]
            )


def _node(node: Any) -> Iterator[Decline]:
    if node.compute_dtype not in _COMPUTE and node.compute_dtype != "not_set":
        yield Decline("dtype.compute", node.op, list(_COMPUTE), str(node.compute_dtype))
    if node.op not in LOWERED:
        yield from _plugin_op(node)
        return
    check = _CHECKS.get(node.op)
    if check is not None:
        yield from check(node)


def _plugin_op(node: Any) -> Iterator[Decline]:
    from cudnn_core import CudnnCoreError, lookup_op

    try:
        reference = lookup_op(node.op).reference
    except CudnnCoreError:
        reference = ""
    if ":" not in reference:
        yield Decline("op.unsupported", node.op, hint="the op's row names no PyTorch reference")


def _attribute(node: Any, name: str, accepted: object, value: object, hint: str = "") -> Decline:
    return Decline("op.attribute", f"{node.op}.{name}", accepted, value, hint)


def _sdpa(node: Any) -> Iterator[Decline]:
    attrs: Mapping[str, Any] = node.attrs
    for name in ("q", "k", "v"):
        if node.inputs[name].rank != 4:
            yield Decline("shape.rank", name, 4, node.inputs[name].rank)
    if attrs.get("dropout_probability"):
        yield _attribute(
            node, "dropout_probability", [None, 0.0], attrs["dropout_probability"], "pass a dropout mask and scale"
        )
    for name, accepted in _SDPA_ATTRS.items():
        if name in attrs and attrs[name] not in accepted:
            yield _attribute(node, name, list(accepted), attrs[name])
    for port in ("rng_dump", "RNG_DUMP"):
        if port in node.outputs:
            yield _attribute(node, port, "absent", "present", "no random numbers are drawn here")
    for name in attrs:
        if name not in _SDPA_KNOWN and attrs[name] not in (None, False):
            yield _attribute(node, name, [None], attrs[name])
    for port in node.inputs:
        if port not in _SDPA_PORTS:
            yield _attribute(node, port, "absent", "present")


# Attributes that change the result and are implemented for these values only.
_SDPA_ATTRS: dict[str, tuple[object, ...]] = {
    "softmax_precision": (None, "FLOAT", "float32", "not_set"),
    "attn_scale_prefolded": (None, False),
}
_SDPA_KNOWN = frozenset(
    [
        "generate_stats",
        "scale",
        "use_alibi_mask",
        "use_padding_mask",
        "diagonal_alignment",
        "left_bound",
        "right_bound",
        "dropout_probability",
        "paged_attention_max_seq_len_kv",
        "implementation",
        "unfuse_fma",
        "stats_use_log2",
        "softmax_precision",
        "attn_scale_prefolded",
        "max_total_seq_len_q",
        "max_total_seq_len_kv",
    ]
)
_SDPA_PORTS = frozenset(
    [
        "q",
        "k",
        "v",
        "attn_scale",
        "bias",
        "block_mask",
        "seq_len_q",
        "seq_len_kv",
        "cu_seq_len_q",
        "cu_seq_len_kv",
        "seed",
        "offset",
        "dropout_mask",
        "dropout_scale",
        "paged_attention_k_table",
        "paged_attention_v_table",
        "sink_token",
    ]
)


def _dequantize(node: Any) -> Iterator[Decline]:
    if node.attrs.get("is_negative_scale"):
        yield _attribute(node, "is_negative_scale", False, True)


def _quantize(node: Any) -> Iterator[Decline]:
    if "group_offset" in node.inputs:
        yield _attribute(node, "group_offset", "absent", "present")
    for port in ("Y", "scale"):
        if node.outputs[port].dtype in ("float64", "float32", "float16", "bfloat16", "boolean") and port == "Y":
            yield Decline("dtype.unsupported", port, "an 8-bit or 4-bit type", str(node.outputs[port].dtype))
    scale = node.outputs["scale"].dtype
    if scale not in ("fp8_e8m0", "fp8_e5m3", "fp8_e4m3", "fp8_e5m2", "float32", "float64", "float16", "bfloat16"):
        yield Decline("dtype.unsupported", "scale", "a float type", str(scale))


def _moe(node: Any) -> Iterator[Decline]:
    offsets, experts = node.inputs["first_token_offset"].dim[0], node.inputs["weight"].dim[0]
    if isinstance(offsets, int) and isinstance(experts, int):
        from ._lower._groups import offset_groups

        if not offset_groups(offsets, experts):
            yield Decline("shape.multiple_of", "first_token_offset", f"G or G + 1 entries, G = n * {experts}", offsets)


_CHECKS: dict[str, Callable[[Any], Iterator[Decline]]] = {
    "sdpa": _sdpa,
    "block_scale_dequantize": _dequantize,
    "block_scale_quantize": _quantize,
    "moe_grouped_matmul": _moe,
}

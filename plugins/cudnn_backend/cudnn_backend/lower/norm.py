"""Rows of ``layernorm`` and ``rmsnorm``. Imported by the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .rows import Row

if TYPE_CHECKING:
    from cudnn_core import Checks, FrozenNode, FrozenTensor

    from .rows import Emitter

__all__ = ["ROWS"]

_STATISTICS = {"layernorm": ("mean", "inv_variance"), "rmsnorm": ("inv_variance",)}


def _used(tensor: FrozenTensor | None) -> bool:
    return tensor is not None and (tensor.role == "output" or bool(tensor.consumers))


def _check(c: Checks, node: FrozenNode) -> None:
    epsilon = node.inputs["epsilon"]
    c.require(
        epsilon.by_value,
        "op.pattern",
        f"{node.op}.epsilon",
        "a number, or a host value (set_is_pass_by_value)",
        "a tensor in device memory",
    )


def _emit(e: Emitter, node: FrozenNode) -> None:
    # Statistics that nobody reads are not asked for; Y is the same.
    statistics = [port for port in _STATISTICS[node.op] if _used(node.outputs.get(port))]
    made = getattr(e.target, node.op)(
        norm_forward_phase=e.enum("norm_forward_phase", "TRAINING" if statistics else "INFERENCE"),
        input=e.input(node.inputs["input"]),
        scale=e.input(node.inputs["scale"]),
        bias=e.optional(node, "bias"),
        epsilon=e.input(node.inputs["epsilon"]),
        compute_data_type=e.dtype(node.compute_dtype),
    )
    e.result(made[0], node.outputs["Y"])
    if statistics:
        for result, port in zip(made[1:], _STATISTICS[node.op], strict=True):
            e.result(result, node.outputs[port])


ROWS = {name: Row(_emit, _check) for name in _STATISTICS}

"""The engines of the manifest. Named by ``cudnn_plugin.toml``; imports the core alone.

The kernels are not written yet: ``check_support`` always declines, and names what will still be true when they exist. Those
reasons follow from the hardware: how TMA addresses memory and which operand layouts ``wgmma`` reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cudnn_core import BuildError, Declined, checks

if TYPE_CHECKING:
    from cudnn_core import CompiledPlan, ExecutionContext, FrozenGraph, FrozenTensor, PlanConfig

__all__ = ["Sm90Wgmma", "Sm100Tcgen05"]

TMA_ALIGNMENT = 16  # bytes; CUDA driver API, cuTensorMapEncodeTiled: globalStrides
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


class _Planned:
    """An engine without kernels; ``k_major_only`` are the data types whose operands must be contiguous along K."""

    summary = ""
    k_major_only: frozenset[str] = frozenset()

    def check_support(self, graph: FrozenGraph, ctx: ExecutionContext) -> Declined:
        c = checks(graph, ctx)
        c.require(False, "not_implemented", "engine", hint=f"{self.summary}: the kernels are not written yet")
        c.require(not graph.facts(has_chained_matmuls), "op.pattern", "matmul", "no matmul before its operands")
        for port, k_axis, tensor in graph.facts(operands_in_memory):
            bad = unaligned_strides(tensor)
            c.require(not bad, "layout.alignment", port, {"stride, in bytes, multiple_of": TMA_ALIGNMENT}, bad)
            k_major = tensor.dtype not in self.k_major_only or tensor.stride[k_axis] == 1
            c.require(k_major, "layout.order", port, f"stride 1 along K for {tensor.dtype}", list(tensor.stride))
        return Declined(tuple(c.declines))

    def build_plan(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> CompiledPlan:
        raise BuildError(f"{self.summary}: the kernels are not written yet")


class Sm90Wgmma(_Planned):
    summary = "wgmma for Hopper"
    # PTX ISA, wgmma.mma_async: 16-bit operands may be transposed by the instruction, 8-bit ones may not.
    k_major_only = frozenset({"fp8_e4m3", "fp8_e5m2", "int8"})


class Sm100Tcgen05(_Planned):
    summary = "tcgen05 for Blackwell and Rubin"


class MatmulOperand(NamedTuple):
    port: str
    k_axis: int
    tensor: FrozenTensor


def operands_in_memory(graph: FrozenGraph) -> tuple[MatmulOperand, ...]:
    """The operands that the matmuls read from memory."""
    return tuple(
        MatmulOperand(port, axis, node.inputs[port])
        for node in graph.nodes
        if node.op == "matmul"
        for port, axis in (("A", -1), ("B", -2))
        if node.inputs[port].role != "virtual"
    )


def unaligned_strides(tensor: FrozenTensor) -> list[int]:
    """Strides, in bytes, that a tensor map can't hold. Runtime strides are checked when a kernel is bound."""
    size = ELEMENT_BYTES.get(tensor.dtype, TMA_ALIGNMENT)
    strides = [s for extent, s in zip(tensor.dim, tensor.stride, strict=True) if extent != 1 and s != 1]
    return [stride * size for stride in strides if isinstance(stride, int) and stride * size % TMA_ALIGNMENT]


def has_chained_matmuls(graph: FrozenGraph) -> bool:
    """Whether an operand of a matmul comes from another matmul: that is a second GEMM, not a prologue."""
    after_matmul: set[int] = set()
    for node in graph.nodes:
        follows = any(tensor.index in after_matmul for tensor in node.inputs.values())
        if follows and node.op == "matmul":
            return True
        if follows or node.op == "matmul":
            after_matmul.update(tensor.index for tensor in node.outputs.values())
    return False

"""The operands of matmuls: how A and B lie in memory, and the ops between memory and the product. Imported by ``lower`` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .binding import Place
from .ir import Matrix, Op, Ref
from .layout import BITS, TMA_ALIGNMENT
from .ops import TABLE
from .tensors import alignment, operand_major, shown
from .values import Values

if TYPE_CHECKING:
    from cudnn_core import Checks, Extent, FrozenTensor

__all__ = ["dense", "matrix"]

MULTIPLIED = ("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8")
LOADED = (*MULTIPLIED, "uint8")  # what a prologue can read
STRIDE_LIMIT = 1 << 40  # bytes; CUDA driver API, cuTensorMapEncodeTiled: globalStrides are below it


def matrix(values: Values, side: str, tensor: FrozenTensor, subject: str) -> tuple[int, FrozenTensor] | None:
    """The index of A or B (``side`` "a" or "b") in the program, and the tensor in memory; None if it was declined."""
    c = values.c
    found = _prologue(values, tensor, subject)
    if found is None:
        return None
    source, prologue = found
    row, col = (source.rank - 2, source.rank - 1) if side == "a" else (source.rank - 1, source.rank - 2)
    mma = str(tensor.dtype)
    hint = "set the data type of what the ops before the matmul give" if prologue else ""
    if mma not in MULTIPLIED:
        c.require(False, "dtype.unsupported", subject, list(MULTIPLIED), mma, hint)
        return None
    if prologue and not c.dtype(subject, source, *(dtype for dtype in LOADED if BITS[dtype] <= BITS[mma])):
        return None
    batch = values.frame.batch(source)
    if isinstance(batch, str):
        c.require(False, "layout.stride", subject, "one stride for the whole batch", batch)
        return None
    dense(c, subject, source, row, col)
    major = operand_major(source, row, col)
    if major is None:
        c.require(False, "layout.order", subject, "stride 1 along one of its two axes", shown(source.stride))
        return None
    if alignment(source, (row if major == "k" else col, batch)) != TMA_ALIGNMENT:
        c.require(
            False,
            "layout.alignment",
            f"{subject}.stride",
            {"multiple_of": TMA_ALIGNMENT * 8 // BITS[source.dtype]},
            shown(source.stride),
            "the tensor memory accelerator steps by multiples of 16 bytes",
        )
    found_matrix = Matrix(str(source.dtype), major, batch is not None, mma, TMA_ALIGNMENT, prologue)
    place = Place("", values.slots[source.index], row, col, batch)
    return values.add(side, found_matrix, place, subject), source


def dense(c: Checks, subject: str, tensor: FrozenTensor, *axes: int) -> None:
    """No stride of 0 along ``axes`` (default: all), and none that the tensor memory accelerator can't encode."""
    dim, stride = tensor.dim, tensor.stride
    for axis in axes or range(len(dim)):
        if stride[axis] == 0 and dim[axis] != 1:
            c.require(False, "layout.stride", f"{subject}.stride[{axis}]", {"min": 1}, 0)
    limit = STRIDE_LIMIT * 8 // BITS[tensor.dtype]
    if [step for step in stride if isinstance(step, int) and step >= limit]:
        c.require(False, "layout.stride", f"{subject}.stride", {"max": limit - 1}, shown(stride))


def _prologue(values: Values, tensor: FrozenTensor, subject: str) -> tuple[FrozenTensor, tuple[Op, ...]] | None:
    """The input behind a matmul's operand and the ops on the way."""
    if not tensor.producer and not tensor.by_value and tensor.rank > 1:
        return tensor, ()
    c, nodes = values.c, values.graph.nodes
    pending = [tensor.producer[0]] if tensor.producer else []
    found: set[int] = set()
    while pending:
        index = pending.pop()
        node = nodes[index]
        pointwise = node.op in TABLE and node.op != "gen_index"
        if not c.require(pointwise, "op.pattern", subject, "an input, behind pointwise ops with scalars", node.op):
            return None
        if index not in found:
            found.add(index)
            pending += [item.producer[0] for item in node.inputs.values() if item.producer]
    inputs = [item for index in sorted(found) for item in nodes[index].inputs.values()] or [tensor]
    shape = _without_leading_ones(tensor.dim)
    sources = {
        item.index: item
        for item in inputs
        if not item.producer and not item.by_value and item.rank > 1 and _without_leading_ones(item.dim) == shape
    }
    if len(sources) > 1 and shape == (1, 1):  # the matrix is a scalar, as the others are
        index = min(sources, key=lambda index: sources[index].dtype not in LOADED)
        sources = {index: sources[index]}
    if not c.require(len(sources) == 1, "op.pattern", subject, "one tensor in memory", f"{len(sources)} tensors"):
        return None
    (source,) = sources.values()
    ops: list[Op] = []
    refs = {source.index: Ref("val", -1)}
    for index in sorted(found):
        values.op(nodes[index], ops, refs, scalars=True)
    if refs[tensor.index] != Ref("val", len(ops) - 1):
        return None  # an op was declined
    return source, tuple(ops)


def _without_leading_ones(dim: tuple[Extent, ...]) -> tuple[Extent, ...]:
    """A matrix's sizes without leading batch axes of one element."""
    first = next((axis for axis, size in enumerate(dim[:-2]) if size != 1), max(len(dim) - 2, 0))
    return dim[first:]

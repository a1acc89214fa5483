"""Graph -> Program, or declines: the one place that decides what the kernels can compute.

``graph.facts(lower)`` gives a ``Lowered``. Every node and every parameter that has an effect is either in the program or declined;
no size and no stride is in it (``Binding`` says where the launch reads them), only majors, broadcasts and alignments. What depends
on the architecture is the engines' business. Subjects of declines are ports ("A", "add.in1"), because names are not part of a graph.

Pattern. One or more matmuls of one shape; pointwise ops with scalars between an input and a matmul's operand (the prologue); any
pointwise ops on the products and on inputs that broadcast to them; outputs anywhere behind a matmul; reductions as outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING

from cudnn_core import checks

from .binding import Binding, Place, SizeOf
from .ir import Gemm, Program, Reduction, Ref, Store
from .layout import BITS
from .operands import dense, matrix
from .ops import REDUCTIONS, TABLE
from .tensors import Frame, alignment, major_of, shown
from .values import FLOAT_COMPUTE, INTEGERS, NOTHING, Values

if TYPE_CHECKING:
    from cudnn_core import Decline, Extent, FrozenGraph, FrozenNode, FrozenTensor

__all__ = ["FP8", "Lowered", "lower", "transposed_bytes"]

INT32_MAX = 2**31 - 1
FP8 = frozenset({"fp8_e4m3", "fp8_e5m2"})
_OPS = ("matmul", "reduction", *(name for name in TABLE if name != "constant"))
_KNOWN = frozenset(_OPS)


@dataclass(frozen=True)
class Lowered:
    """What a graph is to the kernels: a program and its binding, or the reasons why there is none.

    subjects  "a0", "aux1", ... -> what a decline calls that tensor
    """

    program: Program | None
    binding: Binding | None
    declines: tuple[Decline, ...] = ()
    subjects: Mapping[str, str] = field(default_factory=dict)


def lower(graph: FrozenGraph) -> Lowered:
    """The program of a graph. Pure: use it through ``graph.facts(lower)``."""
    return _Lowering(graph).run()


def transposed_bytes(lowered: Lowered) -> tuple[str, ...]:
    """The subjects of operands that reach the matrix unit in 8 bits and are not contiguous along K: wgmma can't read them."""
    program = lowered.program
    if program is None:
        return ()
    return tuple(
        lowered.subjects[f"{side}{i}"]
        for side, group in (("a", program.a), ("b", program.b))
        for i, operand in enumerate(group)
        if operand.major != "k" and BITS[operand.mma_dtype] == 8
    )


class _Lowering:
    def __init__(self, graph: FrozenGraph) -> None:
        self.graph = graph
        self.c = checks(graph)
        self.gemms: list[Gemm] = []
        self.sources: list[FrozenTensor] = []  # A and B of every matmul, as they lie in memory
        self.dtypes: tuple[str, str] | None = None  # of A and B in the matrix unit
        self.accumulate = "float32"
        self.promote = False

    def run(self) -> Lowered:
        c = self.c
        if self._is_known():
            needed = self._needed()
            matmuls = [node for node in needed if node.op == "matmul"]
            if c.require(matmuls, "op.pattern", "matmul", "an output behind a matmul"):
                self.values = Values(self.graph, c, self._frame(matmuls[0]))
                for i, node in enumerate(matmuls):
                    self._matmul(node, f"matmul[{i}]." if len(matmuls) > 1 else "")
                for node in needed:
                    if node.op == "reduction":
                        self._reduction(node)
                    elif node.op != "matmul":
                        self.values.op(node, self.values.ops, self.values.refs)
                self._stores()
        if c.declines:
            return Lowered(None, None, tuple({repr(decline): decline for decline in c.declines}.values()))
        return Lowered(self._program(), self._binding(), (), self.values.subjects)

    # The graph

    def _is_known(self) -> bool:
        c = self.c
        ops = {node.op for node in self.graph.nodes}
        if not ops <= _KNOWN:
            c.ops(*_OPS)
        c.require("matmul" in ops, "op.anchor", "graph", "matmul")
        for tensor in self.graph.tensors:
            if tensor.ragged_offset is not None:
                c.require(False, "layout.ragged", self._subject(tensor), "a dense tensor")
            if tensor.reordering != "NONE":
                c.require(False, "layout.order", self._subject(tensor), "NONE", tensor.reordering)
        return bool(c)

    def _subject(self, tensor: FrozenTensor) -> str:
        for index, port in (tensor.producer, *tensor.consumers) if tensor.producer else tensor.consumers:
            return f"{self.graph.nodes[index].op}.{port}"
        return "graph"

    def _needed(self) -> list[FrozenNode]:
        """The nodes that an output depends on, but for those that only make operands of matmuls."""
        nodes = self.graph.nodes
        pending = [tensor.producer[0] for tensor in self.graph.tensors if tensor.role == "output" and tensor.producer]
        found: set[int] = set()
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                if nodes[index].op not in ("matmul", "gen_index"):  # gen_index reads a shape, no values
                    pending += [tensor.producer[0] for tensor in nodes[index].inputs.values() if tensor.producer]
        return [nodes[index] for index in sorted(found)]

    # Products

    def _frame(self, node: FrozenNode) -> Frame:
        out = node.outputs["C"].dim
        self.k: Extent = node.inputs["A"].dim[-1]
        sizes: dict[str, Extent] = {"M": out[-2], "N": out[-1], "K": self.k, "batch": reduce(mul, out[:-2], 1)}
        for name, size in sizes.items():
            self.c.between(name, size, 1, INT32_MAX)
        return Frame(out)

    def _matmul(self, node: FrozenNode, prefix: str) -> None:
        c, values = self.c, self.values
        a, b, out = node.inputs["A"], node.inputs["B"], node.outputs["C"]
        values.refs[out.index] = NOTHING
        same = out.dim == values.frame.dim and a.dim[-1] == self.k
        if not same:
            shape = {"[..., M, N, K] of every matmul": shown((*values.frame.dim, self.k))}
            c.require(False, "op.pattern", f"{prefix}C", shape, shown((*out.dim, a.dim[-1])))
        values.has_value_dtype(f"{prefix}C", out)
        left, right = matrix(values, "a", a, f"{prefix}A"), matrix(values, "b", b, f"{prefix}B")
        if left is None or right is None or not same:
            return
        self.sources += [left[1], right[1]]
        pair = (str(a.dtype), str(b.dtype))
        alike = pair[0] == pair[1] or set(pair) <= FP8
        if not c.require(alike, "dtype.mixed", f"{prefix}B", f"a type that multiplies {pair[0]}", pair[1]):
            return
        self.dtypes = first = self.dtypes or pair
        if pair != first:
            c.require(False, "dtype.mixed", f"{prefix}A", " and ".join(first), " and ".join(pair))
        compute = str(node.compute_dtype)
        integer = pair[0] == "int8"
        # Sums of int8 products are made in int32, modulo 2^32, in whichever type the graph declares them. That is exact up to
        # 2^31 - 1, which takes K of 131072 to exceed; beyond, the result is not what float32 sums would be.
        allowed = {"int32", "float32"} if integer else FLOAT_COMPUTE
        if compute not in allowed:
            c.require(False, "dtype.compute", f"{prefix}C", sorted(allowed), compute)
        # The attribute ``padding`` is the value beyond the valid extents; every element is valid (the op's definition).
        self.accumulate = "int32" if integer else "float32"
        self.promote = self.promote or (pair[0] in FP8 and compute != "fast_float_for_fp8")
        gemm = Gemm(left[0], right[0], str(out.dtype))
        if gemm not in self.gemms:
            self.gemms.append(gemm)
        values.refs[out.index] = Ref("acc", self.gemms.index(gemm))

    # Outputs

    def _stores(self) -> None:
        values = self.values
        for tensor in self.graph.tensors:
            if tensor.role != "output" or tensor.producer is None:
                continue
            node = self.graph.nodes[tensor.producer[0]]
            if node.op == "reduction":
                continue
            subject = f"{node.op}.{tensor.producer[1]}"
            if not values.frame.covers(tensor.dim):
                self.c.require(False, "op.pattern", subject, shown(values.frame.dim), shown(tensor.dim))
                continue
            if values.refs[tensor.index] == NOTHING or tensor.dtype not in BITS:  # declined where it was made
                continue
            dense(self.c, subject, tensor)
            batch = values.frame.batch(tensor)
            if isinstance(batch, str):
                self.c.require(False, "layout.stride", subject, "one stride for the whole batch", batch)
                continue
            row, col = tensor.rank - 2, tensor.rank - 1
            major = major_of(tensor, (row, col))
            unit = {"n": col, "m": row, "": None}[major]
            # Without a unit stride it is written element by element.
            strided = [axis for axis in (row, col, batch) if axis != unit]
            aligned = alignment(tensor, strided) if major else BITS[tensor.dtype] // 8
            value = values.materialized(values.refs[tensor.index], str(tensor.dtype))
            store = Store(value, str(tensor.dtype), major, aligned)
            values.add("store", store, Place("", values.slots[tensor.index], row, col, batch), subject)

    def _reduction(self, node: FrozenNode) -> None:
        c, values = self.c, self.values
        source, out, mode = node.inputs["input"], node.outputs["Y"], node.attrs["mode"]
        values.refs[out.index] = NOTHING
        ungrouped = c.require("group_offset" not in node.inputs, "op.pattern", "reduction.group_offset", "no groups")
        known = c.require(mode in REDUCTIONS, "op.attribute", "reduction.mode", sorted(REDUCTIONS), mode)
        alone = c.require(not out.consumers, "op.pattern", "reduction.Y", "an output that no op reads")
        covers = values.frame.covers(source.dim)
        c.require(covers, "op.pattern", "reduction.input", shown(values.frame.dim), shown(source.dim))
        if not (ungrouped and known and alone and covers):
            return
        value = values.argument(node, "input", values.ops, values.refs)
        exact = source.dtype in INTEGERS and mode != "AVG"
        declared = str(node.compute_dtype)
        computes = declared in FLOAT_COMPUTE or (declared == "int32" and exact)
        c.require(computes, "dtype.compute", "reduction", ["float32", "int32 of integers"], declared)
        typed = c.dtype("reduction.Y", out, *(("int32", "float32") if exact else ("float32",)))
        if not computes or not typed or value == NOTHING:
            return
        axes = values.frame.axes(out)
        if isinstance(axes, str):
            c.require(False, "layout.stride", "reduction.Y", "one stride for the whole batch", axes)
            return
        dense(c, "reduction.Y", out)
        # An axis of one element counts as reduced where the output has one there too, but for the batch.
        names = "l" if axes.batch is None and values.frame.batch_axes else ""
        names += ("m" if axes.row is None else "") + ("n" if axes.col is None else "")
        if c.require(names, "op.pattern", "reduction.Y", "a reduced axis", shown(out.dim)):
            value = values.materialized(value, str(source.dtype))
            reduction = Reduction(value, mode, names, str(out.dtype))
            values.add("reduction", reduction, Place("", values.slots[out.index], *axes), "reduction.Y")

    # The result

    def _program(self) -> Program:
        members = {name: tuple(member.tensor for member in group) for name, group in self.values.groups.items()}
        return Program(
            a=members["a"],
            b=members["b"],
            gemms=tuple(self.gemms),
            stores=members["store"],
            reductions=members["reduction"],
            aux=members["aux"],
            ops=tuple(self.values.ops),
            accumulate=self.accumulate,
            promote=self.promote,
        )

    def _binding(self) -> Binding:
        values, frame = self.values, self.values.frame
        places = [
            Place(f"{name}{i}", *member.place[1:])
            for name, group in values.groups.items()
            for i, member in enumerate(group)
        ]
        a, b = self.sources[:2]
        shape: dict[str, tuple[SizeOf, ...]] = {
            "m": (SizeOf(values.slots[a.index], a.rank - 2),),
            "n": (SizeOf(values.slots[b.index], b.rank - 1),),
            "k": (SizeOf(values.slots[a.index], a.rank - 1),),
            "l": tuple(self._batch_size(axis - frame.rank) for axis in frame.batch_axes),
        }
        return Binding(tuple(places), shape)

    def _batch_size(self, axis: int) -> SizeOf:
        """Where the size of a batch axis (negative, of the products) is read: an operand that has it."""
        source = next(item for item in self.sources if -axis <= item.rank and item.dim[axis] != 1)
        return SizeOf(self.values.slots[source.index], source.rank + axis)

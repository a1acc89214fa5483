"""Graph -> what to declare: views, folded nodes, slots, and the reasons why not. Pure: use ``graph.facts(analyse)``.

Standalone engines for transposes, reshapes and slices do not exist. Where such a node only reads an operand, or only makes one,
it is folded: the operand is declared in the layout that the other side of the node has. Between two operands it becomes a copy
through such a layout.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cudnn_core import FrozenNode, checks, data_type

from .broadcasts import RIGHT, form, pattern
from .fills import Fill, fills
from .pointwise import ROWS as POINTWISE
from .table import OPS
from .views import Frame, Layout, column, fold_input, fold_output, groups_of, typical

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cudnn_core import Checks, Decline, FrozenGraph, FrozenTensor

__all__ = ["Program", "analyse"]

_STRUCTURAL = frozenset({"transpose", "reshape", "slice"})
_NORMS = frozenset({"layernorm", "rmsnorm"})
_BLOCK_SCALE = frozenset({"block_scale_dequantize", "block_scale_quantize"})
# A copy through float32 is exact for these.
_COPIED = frozenset({"float32", "float16", "bfloat16", "int8", "uint8"})
# Their elements are vectors; the backend wants to know which axis they run along, and the graph does not say.
_VECTORS = frozenset({"int8x4", "uint8x4", "int8x32"})
# What may stand in a graph that is pointwise but for it.
_SAME_ENGINE = _STRUCTURAL | {"concatenate", "reduction"}
# Engines that take sizes at run time exist for these alone.
_DYNAMIC = frozenset({"matmul", "conv_fprop", "layernorm", "rmsnorm"})
_RAGGED_RANK = 4
_FLOAT_MAX = (2 - 2.0**-23) * 2.0**127
_MOST_AXES = 5
_INT64 = 2**63


_NO_FRAME = Frame((), 0, ())


@dataclass(frozen=True)
class Program:
    """What ``lower`` declares.

    nodes      in topological order, folded ones left out
    layouts    tensor index -> the layout to declare
    uids       tensor index -> uid of an operand; ``slots`` operands in all
    constants  tensor index -> the number
    aliases    tensor index -> the operand in whose memory a folded tensor lies
    fills      what to write before cuDNN runs
    """

    declines: tuple[Decline, ...] = ()
    nodes: tuple[FrozenNode, ...] = ()
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    uids: Mapping[int, int] = field(default_factory=dict)
    constants: Mapping[int, float | int] = field(default_factory=dict)
    aliases: Mapping[int, FrozenTensor] = field(default_factory=dict)
    frame: Frame = _NO_FRAME
    slots: int = 0
    fills: tuple[Fill, ...] = ()

    def resolve(self, tensor: FrozenTensor) -> FrozenTensor:
        return self.aliases.get(tensor.index, tensor)

    def axis(self, tensor: FrozenTensor, axis: int) -> int | None:
        """The backend's number of an axis of ``tensor``, or None where other axes share it."""
        return self.frame.axis(axis, tensor.rank, tensor.dim)


def analyse(graph: FrozenGraph) -> Program:
    """The program of a graph, or its declines."""
    return _Analysis(graph).run()


def _ports(ports: Mapping[str, Any]) -> Iterator[tuple[str, FrozenTensor]]:
    for port, value in ports.items():
        if isinstance(value, tuple):
            yield from ((f"{port}[{i}]", tensor) for i, tensor in enumerate(value))
        else:
            yield port, value


class _Analysis:
    def __init__(self, graph: FrozenGraph) -> None:
        self.graph = graph
        self.c: Checks = checks(graph)
        self.aliases: dict[int, FrozenTensor] = {}
        self.moved: dict[int, Layout] = {}  # operands that are declared in another layout than their own
        self.constants: dict[int, float | int] = {}
        self.columns: dict[int, int] = {}

    def run(self) -> Program:
        c, graph = self.c, self.graph
        if not c.ops(*OPS):
            return Program(tuple(c.declines))
        c.require(
            not graph.dims or _DYNAMIC & {node.op for node in graph.nodes},
            "shape.dynamic",
            "graph",
            f"one of {', '.join(sorted(_DYNAMIC))}, or fixed sizes",
            list(graph.dims),
        )
        for node in graph.nodes:
            OPS[node.op].check(c, node)
        self._tensors()
        nodes = self._fold()
        self._columns(nodes)
        frame = self._frame(nodes)
        self._broadcasts(nodes, frame)
        layouts = self._layouts(frame)
        operands = graph.operand_tensors()
        slots = {tensor.index: i for i, tensor in enumerate(operands)}
        filled = fills(c, nodes, self._resolve, slots)
        if not c:
            return Program(tuple({repr(decline): decline for decline in c.declines}.values()))
        program = Program(
            nodes=nodes,
            layouts=layouts,
            uids={index: 1 + slot for index, slot in slots.items()},
            constants=self.constants,
            aliases=self.aliases,
            frame=frame,
            slots=len(operands),
            fills=filled,
        )
        self._axes(program)
        return program if c else Program(tuple(c.declines))

    # Tensors

    def _subject(self, tensor: FrozenTensor) -> str:
        for index, port in (tensor.producer, *tensor.consumers) if tensor.producer else tensor.consumers:
            return f"{self.graph.nodes[index].op}.{port}"
        return "graph"

    def _tensors(self) -> None:
        c = self.c
        for tensor in self.graph.tensors:
            subject = self._subject(tensor)
            if tensor.dtype in _VECTORS:
                c.require(False, "dtype.unsupported", subject, "a type of one element", str(tensor.dtype))
            if tensor.is_constant:
                number = _number(tensor)
                if c.require(
                    number is not None, "dtype.unsupported", subject, ["float32", "int32"], f"constant {tensor.dtype}"
                ):
                    assert number is not None
                    self.constants[tensor.index] = number
            elif tensor.role != "virtual":
                self._strides(tensor, subject)
                self._range(tensor, subject)
                # In the backend's memory eight of them are one byte.
                c.require(
                    tensor.dtype != "boolean", "dtype.unsupported", subject, "booleans inside the graph", "boolean"
                )

    def _strides(self, tensor: FrozenTensor, subject: str) -> None:
        """Some axis is contiguous. Without one the backend finds an engine and fails to compile its kernel."""
        steps = [step for size, step in zip(tensor.dim, tensor.stride, strict=True) if size != 1 and step != 0]
        self.c.require(
            not steps or 1 in steps,
            "layout.stride",
            subject,
            "stride 1 on an axis",
            [typical(step) for step in tensor.stride],
        )

    def _range(self, tensor: FrozenTensor, subject: str) -> None:
        """The backend counts elements, and numbers them in memory, by int64."""
        dim, stride = [typical(size) for size in tensor.dim], [typical(step) for step in tensor.stride]
        span = 1 + sum((size - 1) * step for size, step in zip(dim, stride, strict=True))
        most = max(math.prod(dim), span, *stride, 0)
        self.c.require(
            most < _INT64, "shape.range", subject, "fewer than 2^63 elements, and in as much memory", str(most)
        )

    # Folding

    def _layout(self, tensor: FrozenTensor) -> Layout:
        return self.moved.get(self._resolve(tensor).index, Layout(tensor.dim, tensor.stride))

    def _resolve(self, tensor: FrozenTensor) -> FrozenTensor:
        return self.aliases.get(tensor.index, tensor)

    def _fold(self) -> tuple[FrozenNode, ...]:
        nodes: dict[int, FrozenNode] = {node.index: node for node in self.graph.nodes}
        for node in self.graph.nodes:
            if node.op in _STRUCTURAL and self._fold_input(node):
                del nodes[node.index]
        for node in reversed(self.graph.nodes):
            if node.index in nodes and node.op in _STRUCTURAL and self._fold_output(node):
                del nodes[node.index]
        for node in self.graph.nodes:
            if node.index in nodes and node.op in _STRUCTURAL:
                nodes[node.index] = self._copy(node)
        return tuple(nodes.values())

    def _fold_input(self, node: FrozenNode) -> bool:
        """Fold a node that only reads an operand: its virtual result is that operand in another layout."""
        given, out = node.inputs["input"], node.outputs["Y"]
        source = self._resolve(given)
        if source.role != "input" or out.role != "virtual" or len(given.consumers) > 1 or not _plain(source, out):
            return False
        layout = fold_input(node, self._layout(given))
        if layout is None:
            return False
        self.aliases[out.index] = source
        self.moved[source.index] = layout
        return True

    def _fold_output(self, node: FrozenNode) -> bool:
        """Fold a node that only makes an operand: its virtual input is that operand in another layout."""
        given, out = node.inputs["input"], node.outputs["Y"]
        result = self._resolve(out)
        alone = len(given.consumers) == 1 and not result.consumers and given.index not in self.aliases
        if given.role != "virtual" or result.role != "output" or not alone or not _plain(given, result):
            return False
        layout = fold_output(node, self._layout(out))
        if layout is None:
            return False
        self.aliases[given.index] = result
        self.moved[result.index] = layout
        return True

    def _copy(self, node: FrozenNode) -> FrozenNode:
        """A node between two operands as an identity, where one of them has no other layout to keep."""
        given, out = node.inputs["input"], node.outputs["Y"]
        source, result = self._resolve(given), self._resolve(out)
        if (
            source.role != "input"
            or result.role != "output"
            or given.dtype not in _COPIED
            or not _plain(source, result)
        ):
            return node
        if len(given.consumers) == 1 and (layout := fold_input(node, self._layout(given))) is not None:
            self.moved[source.index] = layout
        elif not out.consumers and (layout := fold_output(node, self._layout(out))) is not None:
            self.moved[result.index] = layout
        else:
            return node
        return FrozenNode(
            index=node.index,
            op="identity",
            name=node.name,
            compute_dtype=data_type.FLOAT,
            inputs={"in0": given},
            outputs={"out": out},
            attrs={},
        )

    # Views

    def _columns(self, nodes: tuple[FrozenNode, ...]) -> None:
        """The vectors that a port wants as columns, and the ragged offsets."""
        for tensor in self.graph.tensors:
            if tensor.ragged_offset is not None:
                self._column(tensor.ragged_offset, _RAGGED_RANK)
        for node in nodes:
            for port, rank in OPS[node.op].columns.items():
                given = node.inputs.get(port)
                if given is not None and not given.is_constant:
                    self._column(given, rank)

    def _column(self, tensor: FrozenTensor, rank: int) -> None:
        known = self.columns.setdefault(tensor.index, rank)
        ports = [(self.graph.nodes[index].op, port) for index, port in tensor.consumers]
        same = known == rank and all(
            OPS[op].columns.get(port, rank if tensor.rank == rank else 0) == rank for op, port in ports
        )
        self.c.require(
            same and (tensor.role != "virtual" or tensor.rank == rank),
            "op.pattern",
            self._subject(tensor),
            f"an operand that is read as a column of rank {rank} only",
            [f"{op}.{port}" for op, port in ports],
        )

    def _seen(self) -> list[tuple[Layout, bool]]:
        """The layouts that the frame must fit, each with whether it is virtual."""
        return [
            (self._layout(tensor), tensor.role == "virtual")
            for tensor in self.graph.tensors
            if tensor.index not in self.aliases and tensor.index not in self.columns and not tensor.is_constant
        ]

    def _frame(self, nodes: tuple[FrozenNode, ...]) -> Frame:
        seen = self._seen()
        ops = {node.op for node in nodes}
        rank = max((len(layout.dim) for layout, _ in seen), default=0)
        kinds = {OPS[op].kind for op in ops}
        if ops & _STRUCTURAL or "concatenate" in ops:
            return Frame.identity(rank, 3)
        for kind, least in (("sdpa", 4), ("conv", 3), ("moe", 3)):
            if kind in kinds:
                return Frame.identity(rank, least)
        alone = [axis + rank - tensor.rank for node in nodes for tensor, axis in _axis_of(node)]
        if "matmul" in ops:
            return self._batched(seen, rank, alone)
        if ops & _NORMS:
            return self._norm(nodes, seen, rank)
        if ops & _BLOCK_SCALE:
            return Frame.identity(rank, 3)
        groups = groups_of(seen, rank, alone=alone, sort=True, keep=2)
        frames = [Frame.channels_last(groups, rank, 4)]
        if "reduction" not in ops and len(groups) <= 3:
            swapped = [Frame.swapped(groups, rank)] if len(groups) == 3 else []
            frames = [Frame.row_major(groups, rank, 3), *swapped, *frames]
        frame = next((frame for frame in frames if not self._unproven(nodes, frame)), frames[0])
        self.c.require(len(frame.axes) <= _MOST_AXES, "shape.rank", "graph", f"{_MOST_AXES} axes or fewer", rank)
        return frame

    def _unproven(self, nodes: tuple[FrozenNode, ...], frame: Frame, *, virtual_alone: bool = False) -> dict[str, str]:
        """The broadcasts of pointwise operations that no row of ``RIGHT`` has: input -> pattern in the frame's view.

        ``virtual_alone``: those of results of the graph itself, which no row covers.
        """
        right = RIGHT.get(form(frame, reduces=any(node.op == "reduction" for node in nodes)), frozenset())
        found = {}
        for node in nodes:
            for port, tensor in node.inputs.items() if node.op in POINTWISE else ():
                if tensor.is_constant or tensor.by_value or (virtual_alone and tensor.role != "virtual"):
                    continue
                result, operand = self._view(frame, node.outputs["out"]), self._view(frame, tensor)
                if result is None or operand is None:  # told by ``_layouts``
                    continue
                meets = pattern(result.dim, operand)
                if set(meets) & {"b", "0"} and (tensor.role == "virtual" or meets not in right):
                    found[f"{node.op}.{port}"] = meets
        return found

    def _view(self, frame: Frame, tensor: FrozenTensor) -> Layout | None:
        return frame.view(self._layout(tensor), virtual=tensor.role == "virtual")

    def _broadcasts(self, nodes: tuple[FrozenNode, ...], frame: Frame) -> None:
        """Other engines than that of pointwise graphs serve what has another kind of operation. Of them nobody has compared a
        computed operand that broadcasts."""
        if self.c:
            pointwise = all(node.op in POINTWISE or node.op in _SAME_ENGINE for node in nodes)
            found = self._unproven(nodes, frame, virtual_alone=not pointwise)
            for subject, meets in found.items():
                self.c.require(
                    False,
                    "x.cudnn_backend.broadcast",
                    subject,
                    "a broadcast that cuDNN is known to get right",
                    f"{meets} (=: the result's size, b: size 1, 0: stride 0, 1: both have size 1)",
                )

    def _batched(self, seen: list[tuple[Layout, bool]], rank: int, alone: list[int]) -> Frame:
        """One batch axis before rows and columns."""
        groups = groups_of(seen, rank, alone=(rank - 2, rank - 1, *alone))
        self.c.require(
            len(groups) <= 3,
            "layout.stride",
            "matmul",
            "batch axes that are one axis in the memory of every tensor",
            [list(group) for group in groups[:-2]],
        )
        return Frame.row_major(groups, rank, 3)

    def _norm(self, nodes: tuple[FrozenNode, ...], seen: list[tuple[Layout, bool]], rank: int) -> Frame:
        """[rows, columns, 1, 1] where the memory allows it, else the axes as they are."""
        norms = [node for node in nodes if node.op in _NORMS]
        columns = {tuple(size != 1 for size in node.inputs["scale"].dim) for node in norms}
        if len(columns) == 1 and all(node.inputs["scale"].rank == rank for node in norms):
            scaled = columns.pop()
            stride = self._layout(norms[0].inputs["input"]).stride
            by_memory = sorted(range(rank), key=lambda axis: -typical(stride[axis]))
            rows = tuple(axis for axis in by_memory if not scaled[axis])
            cols = tuple(axis for axis in by_memory if scaled[axis])
            frame = Frame((rows, cols, (), ()), rank, (0, 2, 3, 1))
            if all(frame.fits(layout, virtual=virtual, among=seen) for layout, virtual in seen):
                return frame
        return Frame.identity(rank, 3)

    def _layouts(self, frame: Frame) -> dict[int, Layout]:
        layouts: dict[int, Layout] = {}
        for tensor in self.graph.tensors:
            if tensor.index in self.aliases or tensor.is_constant:
                continue
            if tensor.index in self.columns:
                layouts[tensor.index] = column(self._layout(tensor), self.columns[tensor.index])
                continue
            view = self._view(frame, tensor)
            if view is not None:
                layouts[tensor.index] = view
            elif self.c:
                self.c.require(
                    False, "layout.stride", self._subject(tensor), "axes that merge", list(map(str, tensor.stride))
                )
        return layouts

    def _axes(self, program: Program) -> None:
        for node in program.nodes:
            for tensor, axis in _axis_of(node):
                self.c.require(
                    program.axis(tensor, axis) is not None,
                    "op.attribute",
                    f"{node.op}.axis",
                    "an axis that the backend sees by itself",
                    axis,
                )


def _axis_of(node: FrozenNode) -> list[tuple[FrozenTensor, int]]:
    """The axes that an operation names by number."""
    if node.op == "gen_index":
        return [(node.inputs["in0"], node.attrs["axis"])]
    if node.op == "block_scale_quantize":
        tensor, axis = node.inputs["input"], node.attrs["axis"]
        return [(tensor, tensor.rank - 1 if axis is None else axis)]
    return []


def _plain(*tensors: FrozenTensor) -> bool:
    """Whether nothing but sizes and strides says how the tensors lie in memory."""
    return all(t.reordering == "NONE" and t.ragged_offset is None and not t.by_value for t in tensors)


def _number(tensor: FrozenTensor) -> float | int | None:
    """The constant as a float32 or an int32 that has its exact value, or None."""
    value, dtype = tensor.value, tensor.dtype
    assert value is not None
    if dtype in ("int32", "int64", "int8", "uint8"):
        return int(value) if -(2**31) <= value < 2**31 else None
    number = float(value)
    if dtype == "float32" or not math.isfinite(number):
        return number if dtype in ("float64", "float32", "float16", "bfloat16") else None
    if dtype == "float16":
        return float(struct.unpack("<e", struct.pack("<e", number))[0])
    if abs(number) > _FLOAT_MAX:
        return None
    single = struct.unpack("<I", struct.pack("<f", number))[0]
    if dtype == "bfloat16":
        rounded = (single + 0x7FFF + (single >> 16 & 1)) & 0xFFFF0000
        return float(struct.unpack("<f", struct.pack("<I", rounded))[0])
    if dtype == "float64" and struct.unpack("<f", struct.pack("<I", single))[0] == number:
        return number
    return None

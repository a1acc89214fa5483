"""Values of a program under construction: pointwise ops, epilogue operands, and the lists that they end up in. Imported by ``lower``
and ``operands`` alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .binding import Place
from .ir import Aux, Op, Ref
from .layout import BITS
from .ops import EXACT, GROWING, TABLE
from .tensors import alignment, major_of, shown

if TYPE_CHECKING:
    from cudnn_core import Checks, FrozenGraph, FrozenNode, FrozenTensor

    from .tensors import Frame

__all__ = ["FLOAT_COMPUTE", "INTEGERS", "NOTHING", "Member", "Values"]

INTEGERS = frozenset({"int32", "int8", "uint8", "boolean"})
# Computed in fp32, at least as precise as declared; FAST_FLOAT_FOR_FP8 also says that fp8 products need no promotion.
FLOAT_COMPUTE = frozenset({"float32", "bfloat16", "float16", "fast_float_for_fp8"})
_EXACT_IN_FLOAT32 = 2**24  # integers up to it are floats
_ROUNDS_TO_INFINITY = 2.0**128 - 2.0**103  # in fp32, from there up
NOTHING = Ref("val", -2)  # stands for a value that could not be lowered; a decline says why


class Member(NamedTuple):
    """A tensor of the program and where it lies."""

    tensor: Any
    place: Place


class Values:
    """The epilogue's ops and the tensors of every group, as they are found. Declines go to ``c``.

    groups    the tensors of "a", "b", "aux", "store" and "reduction"
    subjects  "a0", "aux1", ... -> what a decline calls it
    ops       of the epilogue; refs: tensor index -> its value there
    """

    def __init__(self, graph: FrozenGraph, c: Checks, frame: Frame) -> None:
        self.graph, self.c, self.frame = graph, c, frame
        self.slots = {tensor.index: slot for slot, tensor in enumerate(graph.operand_tensors())}
        self.groups: dict[str, list[Member]] = {"a": [], "b": [], "aux": [], "store": [], "reduction": []}
        self.subjects: dict[str, str] = {}
        self.ops: list[Op] = []
        self.refs: dict[int, Ref] = {}

    def add(self, group: str, tensor: Any, place: Place, subject: str) -> int:
        """The index of a tensor in its group; equal ones at one place are one."""
        members = self.groups[group]
        word = f"{group}{len(members)}"
        member = Member(tensor, place)
        if member in members:
            return members.index(member)
        members.append(member)
        self.subjects[word] = subject
        return len(members) - 1

    def has_value_dtype(self, subject: str, tensor: FrozenTensor) -> bool:
        return tensor.dtype in BITS or self.c.dtype(subject, tensor, *BITS)

    def op(self, node: FrozenNode, ops: list[Op], refs: dict[int, Ref], scalars: bool = False) -> None:
        """Append ``node`` to ``ops``; ``refs`` maps tensors to values there. ``scalars``: other inputs must be scalars."""
        out = node.outputs["out"]
        refs[out.index] = NOTHING
        if not self.has_value_dtype(f"{node.op}.out", out):
            return
        row = TABLE[node.op]
        if node.attrs.keys() != set(row.attrs):
            self.c.require(False, "op.attribute", node.op, sorted(row.attrs), sorted(node.attrs))
            return
        if node.op == "gen_index":
            self._index(node, ops, refs)
            return
        inputs = [node.inputs[port] for port in ("in0", "in1", "in2")[: row.arity]]
        args = [self.argument(node, port, ops, refs, scalars) for port in ("in0", "in1", "in2")[: row.arity]]
        compute = self._compute(node, inputs)
        held = [self._held(f"{node.op}.{name}", value) for name, value in node.attrs.items()]
        if not compute or not all(held) or NOTHING in args:
            return
        if node.op == "identity" and inputs[0].dtype == out.dtype:
            refs[out.index] = args[0]
            return
        ops.append(Op(node.op, tuple(args), str(out.dtype), compute, tuple(sorted(node.attrs.items()))))
        refs[out.index] = Ref("val", len(ops) - 1)

    def argument(self, node: FrozenNode, port: str, ops: list[Op], refs: dict[int, Ref], scalars: bool = False) -> Ref:
        """The value at an input of ``node``; a constant becomes an op, an input of the graph an epilogue operand."""
        tensor = node.inputs[port]
        if tensor.index in refs:
            return refs[tensor.index]
        subject = f"{node.op}.{port}"
        ref = NOTHING
        if not self.has_value_dtype(subject, tensor):
            pass
        elif tensor.is_constant:
            value = int(tensor.value) if isinstance(tensor.value, bool) else tensor.value
            compute = "int32" if tensor.dtype in INTEGERS else "float32"
            if self._held(subject, value):
                ops.append(Op("constant", (), str(tensor.dtype), compute, (("value", value),)))
                ref = Ref("val", len(ops) - 1)
        elif not scalars or self.c.require(
            all(size == 1 for size in tensor.dim), "op.pattern", subject, "a scalar", shown(tensor.dim)
        ):
            ref = self._aux(tensor, subject)
        refs[tensor.index] = ref
        return ref

    def _held(self, subject: str, value: Any) -> bool:
        """Whether a number is finite in the kernel, which computes in fp32, if it is finite; declined if it is not."""
        finite = not isinstance(value, float) or abs(value) < _ROUNDS_TO_INFINITY or not math.isfinite(value)
        return self.c.require(finite, "op.attribute", subject, "a number that float32 holds", value)

    def materialized(self, ref: Ref, dtype: str) -> Ref:
        """``ref`` as the result of an op or an accumulator: outputs are never operands."""
        if ref.kind != "aux":
            return ref
        self.ops.append(Op("identity", (ref,), dtype, "int32" if dtype in INTEGERS else "float32"))
        return Ref("val", len(self.ops) - 1)

    def _aux(self, tensor: FrozenTensor, subject: str) -> Ref:
        axes = self.frame.axes(tensor)
        if isinstance(axes, str):
            self.c.require(False, "op.pattern", subject, {"broadcasts to": shown(self.frame.dim)}, axes)
            return NOTHING
        dtype = str(tensor.dtype)
        if tensor.by_value:
            aux = Aux(dtype, "scalar", by_value=True)
        else:
            kind = ("scalar", "col", "row", "full")[2 * (axes.row is not None) + (axes.col is not None)]
            major = major_of(tensor, axes)
            unit = {"n": axes.col, "m": axes.row, "": None}[major]
            # Without a unit stride it is read element by element.
            aligned = alignment(tensor, [axis for axis in axes if axis != unit]) if major else BITS[dtype] // 8
            aux = Aux(dtype, kind, axes.batch is not None, major, False, aligned)
        return Ref("aux", self.add("aux", aux, Place("", self.slots[tensor.index], *axes), subject))

    def _index(self, node: FrozenNode, ops: list[Op], refs: dict[int, Ref]) -> None:
        """gen_index: 0 along an axis that in0 broadcasts, else the position in the frame."""
        frame, shape, out = self.frame, node.inputs["in0"], node.outputs["out"]
        own = node.attrs["axis"]
        axis = own - shape.rank + frame.rank
        if shape.dim[own] == 1:
            op = Op("constant", (), str(out.dtype), "int32", (("value", 0),))
        else:
            fits = axis >= 0 and shape.dim[own] == frame.dim[axis]
            batch = axis < frame.rank - 2
            alone = fits and (not batch or frame.batch_axes == (axis,))
            expected = "the rows, the columns, or the only batch axis"
            if not self.c.require(alone, "op.attribute", "gen_index.axis", expected, own):
                return
            place = 0 if batch else axis - frame.rank + 3
            op = Op("gen_index", (), str(out.dtype), "int32", (("axis", place),))
        ops.append(op)
        refs[out.index] = Ref("val", len(ops) - 1)

    def _compute(self, node: FrozenNode, inputs: list[FrozenTensor]) -> str:
        """ "float32" or "int32"; "" if the declared compute type can't be had. The op table says which ops keep integers exact."""
        declared = str(node.compute_dtype)
        exact = TABLE[node.op].integer and all(tensor.dtype in INTEGERS for tensor in inputs)
        if node.op == "relu" and _bends(node.attrs):
            exact = False  # a slope or a clip is a float
        if exact and node.op in EXACT:
            if declared in FLOAT_COMPUTE or declared in ("int32", "boolean"):
                floats = (
                    node.op in GROWING and node.outputs["out"].dtype not in INTEGERS and _fits_float32(node.op, inputs)
                )
                return "float32" if floats else "int32"
        elif exact and declared == "int32":
            return "int32"
        elif declared in FLOAT_COMPUTE:
            return "float32"
        self.c.require(False, "dtype.compute", node.op, ["float32", "int32 of integers"], declared)
        return ""


def _bends(attrs: Mapping[str, Any]) -> bool:
    """Whether a relu is more than max(x, 0)."""
    return bool(attrs["negative_slope"]) or attrs["lower_clip"] is not None or attrs["upper_clip"] is not None


def _fits_float32(op: str, inputs: Sequence[FrozenTensor]) -> bool:
    """Whether an op of ``GROWING`` on these integers gives the same in fp32, which is quicker. Of a product zeros would have signs."""
    a, b = (_largest(tensor) for tensor in inputs)
    return op != "mul" and a + (b * b if op == "add_square" else b) <= _EXACT_IN_FLOAT32


def _largest(tensor: FrozenTensor) -> int:
    """The largest magnitude of an integer tensor's elements."""
    if tensor.is_constant:
        return abs(int(tensor.value or 0))
    return {"int8": 2**7, "uint8": 2**8 - 1, "boolean": 1}.get(str(tensor.dtype), 2**31)

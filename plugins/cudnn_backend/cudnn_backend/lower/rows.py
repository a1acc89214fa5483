"""What a row of the lowering table is, and what rows use to declare an operation. Imported by the row modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn_core import Decline

from .views import packed

if TYPE_CHECKING:
    from cudnn_core import Checks, FrozenNode, FrozenTensor

    from .program import Program

__all__ = ["Emitter", "LoweringError", "Row", "nothing"]


class LoweringError(Exception):
    """A graph that turns out to be inexpressible while it is lowered; ``decline`` says why."""

    def __init__(self, decline: Decline) -> None:
        super().__init__(str(decline))
        self.decline = decline


def nothing(c: Checks, node: FrozenNode) -> None:
    """The check of a row that declines nothing by itself."""


class Row(NamedTuple):
    """One core op.

    emit      declares the operation: (emitter, node)
    check     collects what can't be said to the backend: (checks, node). What the backend itself refuses is left to it
    columns   input ports that take a vector as a column -> the rank that the backend wants
    kind      "sdpa", "conv" or "moe": the axes of the graph are the backend's
    """

    emit: Callable[[Emitter, FrozenNode], None]
    check: Callable[[Checks, FrozenNode], None] = nothing
    columns: Mapping[str, int] = {}
    kind: str = ""


class Emitter:
    """Declares tensors and operations of one graph on a ``backend_graph``.

    binding  the frontend's compiled module
    target   its backend_graph
    """

    def __init__(self, binding: Any, target: Any, program: Program) -> None:
        self.binding = binding
        self.target = target
        self.program = program
        self._made: dict[int, Any] = {}
        self._next_uid = 1 + program.slots

    # Values

    def dtype(self, dtype: Any) -> Any:
        """The binding's member of a data type: the names are the frontend's."""
        return getattr(self.binding.data_type, dtype.name)

    def enum(self, kind: str, name: str) -> Any:
        return getattr(getattr(self.binding, kind), name)

    def scalar(self, value: float) -> Any:
        """A number that is part of the graph: a float32 or an int32, which takes no operand."""
        kind = self.enum("scalar_type", "RUNTIME_PARAM")
        return self.target.tensor_scalar(value, kind)

    # Tensors

    def input(self, tensor: FrozenTensor) -> Any:
        """The binding's tensor: declared if nothing made it yet."""
        tensor = self.program.resolve(tensor)
        made = self._made.get(tensor.index)
        if made is None:
            constant = self.program.constants.get(tensor.index)
            made = self._declare(tensor) if constant is None else self.scalar(constant)
            self._made[tensor.index] = made
        return made

    def optional(self, node: FrozenNode, port: str) -> Any:
        """The tensor of an input port, or None without one."""
        tensor = node.inputs.get(port)
        return None if tensor is None else self.input(tensor)

    def _declare(self, tensor: FrozenTensor) -> Any:
        layout = self.program.layouts[tensor.index]
        return self.target._make_tensor(
            dim=list(layout.dim),
            stride=list(layout.stride),
            data_type=self.dtype(tensor.dtype),
            is_virtual=False,
            is_pass_by_value=tensor.by_value,
            ragged_offset=None if tensor.ragged_offset is None else self.input(tensor.ragged_offset),
            reordering_type=self.enum("tensor_reordering", tensor.reordering),
            name=f"t{tensor.index}",
            uid=self._uid(tensor),
            ragged_offset_multiplier=tensor.ragged_offset_multiplier,
        )

    def side_output(self, tensor: FrozenTensor) -> Any:
        """An output that the backend takes as a parameter instead of returning it."""
        made = self._declare(self.program.resolve(tensor))
        made.set_output(True)
        self._made[tensor.index] = made
        return made

    def result(self, made: Any, tensor: FrozenTensor) -> None:
        """Give what an operation returned the type, layout and slot of ``tensor``."""
        tensor = self.program.resolve(tensor)
        layout = self.program.layouts[tensor.index]
        made._set_data_type(self.dtype(tensor.dtype))
        made.set_dim(list(layout.dim)).set_stride(list(layout.stride))
        made.set_uid(self._uid(tensor)).set_name(f"t{tensor.index}")
        made.set_output(tensor.role == "output")
        if tensor.reordering != "NONE":
            made.set_reordering_type(self.enum("tensor_reordering", tensor.reordering))
        if tensor.ragged_offset is not None:
            made.set_ragged_offset(self.input(tensor.ragged_offset))
            if tensor.ragged_offset_multiplier != 1:
                made.set_ragged_offset_multiplier(tensor.ragged_offset_multiplier)
        self._made[tensor.index] = made

    def temporary(self, made: Any, dtype: str, like: FrozenTensor) -> Any:
        """A virtual tensor that the graph does not have, of the sizes of ``like``."""
        layout = self.program.layouts[self.program.resolve(like).index]
        made._set_data_type(getattr(self.binding.data_type, dtype))
        made.set_dim(list(layout.dim)).set_stride(list(packed(layout.dim, self.program.frame.order)))
        made.set_uid(self._uid(None))
        return made

    def _uid(self, tensor: FrozenTensor | None) -> int:
        """1 + the operand's position; beyond the operands for a virtual tensor."""
        slot = None if tensor is None else self.program.uids.get(tensor.index)
        if slot is None:
            slot = self._next_uid
            self._next_uid += 1
        return slot

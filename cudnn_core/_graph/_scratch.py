"""Tensors made from the numbers and framework tensors among an op's arguments. Imported by the graph.

They join the graph only when the whole builder call is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _buffers
from .._arguments import as_number
from .._dtypes import as_dtype, data_type
from ._constants import constant_dtype
from ._tensor import Tensor

if TYPE_CHECKING:
    from ._graph import Graph

__all__ = ["Scratch"]


class Scratch:
    """The tensors of one builder call."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: list[tuple[Tensor, object]] = []

    def tensor(self, value: object, where: str, data: bool) -> Tensor:
        """``value`` as a tensor of the graph: itself, or a constant (``data``: typed by inference), or one like a buffer."""
        if isinstance(value, Tensor):
            return self.graph._own(value, where)
        number = as_number(value)
        if number is not None:
            made = Tensor(self.graph, -1, "")
            made._dim = made._stride = (1,)
            if not data:
                whole = isinstance(number, int) and not isinstance(number, bool)
                made._dtype = data_type.INT64 if whole else constant_dtype(number, self.graph.compute_data_type)
            made._by_value = True
            made._value = number
            self.made.append((made, None))
            return made
        known = self.graph._made_from(value) or next((made for made, buffer in self.made if buffer is value), None)
        if known is not None:
            return known
        made = Tensor(self.graph, -1, where.replace(".", "::", 1))
        describe_as(made, value, where)
        self.made.append((made, value))
        return made

    def adopt(self) -> None:
        for made, buffer in self.made:
            made._uid = self.graph._free_uid()
            self.graph._tensors[made.uid] = made
            if buffer is not None:
                self.graph._bindings[made.uid] = buffer
        if self.made:
            self.graph._changed()


def describe_as(made: Tensor, template: object, where: str) -> None:
    """Give ``made`` the sizes, strides and type of a framework's tensor."""
    view = _buffers.describe(template, where)
    made._dim, made._stride, made._dtype = view.shape, view.stride, as_dtype(view.dtype)
    if view.device_type == "cpu" and view.elements == 1 and not made.is_virtual:
        made._by_value = "auto"

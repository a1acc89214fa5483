"""Where the tensors of a Program lie among a graph's operands. Made by ``lower``, read by ``launch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

__all__ = ["Binding", "Place", "SizeOf"]


class Place(NamedTuple):
    """One tensor of the program.

    word      "a0", "store1", ...: the prefix of its argument words
    operand   its position in ``graph.operands``
    rows, cols, batch   the operand's axes along the tensor's rows, columns and the batch; None where it is broadcast or reduced. The
              rows and columns of A are M and K, of B N and K, of the others M and N. Batch axes of one stride count as one: the innermost,
              or the next one outwards where that has one element.
    """

    word: str
    operand: int
    rows: int | None = None
    cols: int | None = None
    batch: int | None = None

    @property
    def group(self) -> str:
        """The group of the program: "a", "b", "aux", "store" or "reduction"."""
        return self.word.rstrip("0123456789")


class SizeOf(NamedTuple):
    """The size of an axis of an operand."""

    operand: int
    axis: int


@dataclass(frozen=True)
class Binding:
    """The place of every tensor of a program, in the order of ``ir.argument_words``, and where its sizes are read.

    shape   "m", "n", "k" and "l" -> the axes whose sizes multiply to it: one axis, or for "l" any number (none: 1)
    """

    places: tuple[Place, ...]
    shape: Mapping[str, tuple[SizeOf, ...]]

    def swapped(self) -> Binding:
        """The binding of ``Program.swapped()``."""
        turned = [_turned(place) for place in self.places]
        order = ("a", "b", "aux", "store", "reduction")
        shape = {**self.shape, "m": self.shape["n"], "n": self.shape["m"]}
        return Binding(tuple(sorted(turned, key=lambda place: order.index(place.group))), shape)

    def sizes(self, dims: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """M, N, K and L by name, for operands of the sizes ``dims``."""
        return {name: prod(dims[at.operand][at.axis] for at in axes) for name, axes in self.shape.items()}


def _turned(place: Place) -> Place:
    turn = {"a": "b", "b": "a"}
    if place.group in turn:
        return place._replace(word=turn[place.group] + place.word[1:])
    return place._replace(rows=place.cols, cols=place.rows)

"""Where the operands of one call lie: null and misaligned addresses, and memory that two operands share.

``Bounds`` is made once per set of sizes, ``Placed`` once per set of addresses that passed: a steady state asks neither.
Imported by the layout and the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ._dims import evaluate, overlap
from ._dtypes import bits
from ._engine import Runner
from ._errors import ExecutionError
from ._slot import Slot, extent_bytes

__all__ = ["HIGHEST", "Bounds", "Placed", "lowest_address"]

HIGHEST = 1 << 64
_HOST_LOWEST = 4096  # the first page of a process is never mapped
_POINTER_ALIGN = 16  # the alignment class that a runner is bound for when every address has it


class _Block(NamedTuple):
    """Strided memory: an address, bytes from the first to past the last element, and all of it in bits."""

    address: int
    extent: int
    element: int
    dim: tuple[int, ...]
    stride: tuple[int, ...]


class Placed:
    """Addresses that passed the checks: ``align`` divides them all.

    runner     the engine's callable for them, once it is bound
    workspace  the last workspace that was seen to overlap none of them
    """

    __slots__ = ("align", "bounds", "runner", "workspace")

    def __init__(self, bounds: Bounds, merged: int) -> None:
        self.bounds = bounds
        self.align = merged & -merged if merged & (_POINTER_ALIGN - 1) else _POINTER_ALIGN
        self.runner: Runner | None = None
        self.workspace = 0


class Bounds:
    """The operands at one set of sizes: their dims and strides, their bytes, and which of them may not overlap.

    ``aliases`` {(slot, other slot): bytes between their starts} are the overlaps that the graph allows.
    """

    __slots__ = ("_aliases", "_lowest", "_slots", "_table", "dims", "extents", "sizes", "strides")

    def __init__(
        self,
        slots: Sequence[Slot],
        aliases: Mapping[tuple[int, int], int],
        sizes: dict[str, int] | None,
        device_type: str,
    ) -> None:
        self._slots = slots
        self._aliases = aliases
        self._lowest = lowest_address(device_type)
        self.sizes = sizes
        known = sizes or {}
        self.dims = [tuple(evaluate(v, known) for v in slot.dim) for slot in slots]
        self.strides = [tuple(evaluate(v, known) for v in slot.stride) for slot in slots]
        # Of a ragged operand only its first element is known.
        self.extents = [
            -(-bits(slot.dtype) // 8) if slot.ragged else extent_bytes(slot.dtype, dim, stride)
            for slot, dim, stride in zip(slots, self.dims, self.strides, strict=True)
        ]
        outputs = [i for i, slot in enumerate(slots) if slot.operand.role != "input"]
        self._table = tuple(
            (
                out,
                self.extents[out],
                tuple(
                    (other, self.extents[other])
                    for other, slot in enumerate(slots)
                    if other != out and not slot.by_value and not (other in outputs and other < out)
                ),
            )
            for out in outputs
        )
        for out in outputs if sizes else ():
            shared = "" if slots[out].ragged else overlap(self.dims[out], self.strides[out])
            if shared:
                label = slots[out].label
                raise ExecutionError(f"operand {label} has {shared}: its elements would overlap", operand=label)

    def check(self, pointers: Sequence[int]) -> Placed:
        """The addresses as they are, after null, alignment and overlap have been ruled out."""
        merged = 0
        for pointer in pointers:
            merged |= pointer
        if merged & (_POINTER_ALIGN - 1) or merged >> 64 or min(pointers, default=HIGHEST) < self._lowest:
            self._check_each(pointers)
        for out, extent, others in self._table:
            low = pointers[out]
            high = low + extent
            for other, size in others:
                pointer = pointers[other]
                if pointer < high and low < pointer + size and pointer - low != self._aliases.get((out, other)):
                    self._check_pair(pointers, out, other)
        return Placed(self, merged)

    def check_workspace(self, pointers: Sequence[int], address: int, size: int) -> None:
        """ExecutionError if the ``size`` bytes at ``address`` meet an operand."""
        workspace = _Block(address, size, 8, (size,), (8,))
        for i, slot in enumerate(self._slots):
            meets = pointers[i] < address + size and address < pointers[i] + self.extents[i]
            if meets and not slot.by_value and not _disjoint(workspace, self._block(pointers, i)):
                raise ExecutionError(f"the workspace overlaps operand {slot.label}", operand="workspace")

    def _check_each(self, pointers: Sequence[int]) -> None:
        for slot, pointer, extent in zip(self._slots, pointers, self.extents, strict=True):
            if extent and not self._lowest <= pointer < HIGHEST:
                what = "a null address" if pointer == 0 else f"an impossible address, {pointer:#x}"
                raise ExecutionError(f"operand {slot.label} has {what}", operand=slot.label)
            if pointer % slot.align:
                raise ExecutionError(
                    f"operand {slot.label} is at {pointer:#x}, not aligned to {slot.align} bytes", operand=slot.label
                )

    def _check_pair(self, pointers: Sequence[int], out: int, other: int) -> None:
        if _disjoint(self._block(pointers, out), self._block(pointers, other)):
            return
        label, place = self._slots[out].label, self._aliases.get((out, other))
        raise ExecutionError(
            f"operand {label} overlaps operand {self._slots[other].label}"
            + ("" if place is None else f", which may only lie {place} bytes after its start"),
            operand=label,
        )

    def _block(self, pointers: Sequence[int], i: int) -> _Block:
        slot = self._slots[i]
        width = bits(slot.dtype)
        if slot.ragged:
            return _Block(pointers[i], self.extents[i], width, (), ())
        return _Block(pointers[i], self.extents[i], width, self.dims[i], tuple(s * width for s in self.strides[i]))


def lowest_address(device_type: str) -> int:
    """Below it lies no memory of the device; ``HIGHEST`` is beyond all."""
    return _HOST_LOWEST if device_type == "cpu" else 1


def _disjoint(a: _Block, b: _Block) -> bool:
    """Whether two blocks whose ranges meet certainly share no byte: columns of one matrix, say.

    Modulo a stride, the axes whose strides it divides vanish, and each block is a window of its other axes.
    """
    for step in {*_steps(a), *_steps(b)}:
        gap = (b.address - a.address) * 8 % step
        if _window(a, step) <= gap and gap + _window(b, step) <= step:
            return True
    return False


def _steps(block: _Block) -> Iterator[int]:
    """Strides of whole bytes."""
    return (step for size, step in zip(block.dim, block.stride, strict=True) if size > 1 and step > 0 and step % 8 == 0)


def _window(block: _Block, step: int) -> int:
    """Bits, rounded up to bytes, from the first to past the last element along the axes that ``step`` does not divide."""
    inner = sum((size - 1) * s for size, s in zip(block.dim, block.stride, strict=True) if s % step)
    return -(-(inner + block.element) // 8) * 8

"""Raw addresses as tensors: reads operands into value tensors and writes results back. Imported by the plan.

Any non-negative strides and any alignment are honoured; sizes of zero touch no memory. 4-bit elements are addressed by
element offset, two a byte, the even offset in the low half. A tensor with F8_128x4 reordering is stored in tiles of
128 rows by 4 columns: the unit-stride axis counts columns, the axis with the next larger stride rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ._rounding import NATIVE, decode, encode

__all__ = ["Layout", "gather_ragged", "load", "load_ragged", "ragged_rows", "store", "store_ragged", "unpack"]

Tensor = Any


class Layout(NamedTuple):
    """How one operand lies in memory: dims and strides in elements."""

    dtype: str
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    reordering: str = "NONE"

    @property
    def packed(self) -> bool:
        return self.dtype in ("fp4_e2m1", "int4")

    @property
    def torch_dtype(self) -> torch.dtype:
        return NATIVE.get(self.dtype, torch.uint8)

    @property
    def extent(self) -> int:
        """Elements from the first to the last one, inclusive; 0 if there are none."""
        if 0 in self.dim:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.dim, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        if self.packed:
            return (self.extent + 1) // 2
        return self.extent * int(self.torch_dtype.itemsize)


class _CudaMemory:
    """Device bytes, described by the CUDA array interface (version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _flat(address: int, layout: Layout, elements: int, device: torch.device) -> Tensor:
    """``elements`` storage elements at ``address`` (bytes for packed types)."""
    dtype = torch.uint8 if layout.packed else layout.torch_dtype
    if elements == 0:
        return torch.empty(0, dtype=dtype, device=device)
    nbytes = elements * dtype.itemsize
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)
    return torch.as_tensor(_CudaMemory(address, nbytes), device=device).view(dtype)


def load(address: int, layout: Layout, device: torch.device) -> Tensor:
    """The value tensor of an operand; it may share the operand's memory."""
    if layout.packed:
        return decode(unpack(_flat(address, layout, (layout.extent + 1) // 2, device), layout), layout.dtype)
    flat = _flat(address, layout, layout.extent, device)
    if layout.reordering == "F8_128x4":
        return decode(flat[_tiled_offsets(layout, device)], layout.dtype)
    return decode(flat.as_strided(layout.dim, layout.stride), layout.dtype)


def unpack(flat: Tensor, layout: Layout) -> Tensor:
    """The 4-bit codes of a tensor, one an element, from its bytes."""
    offsets = _offsets(layout, flat.device)
    return (flat.reshape(-1)[offsets >> 1] >> ((offsets & 1) * 4).to(torch.uint8)) & 0xF


def store(address: int, layout: Layout, value: Tensor, device: torch.device) -> None:
    """Write ``value``, already rounded to the type, to an operand."""
    storage = encode(value, layout.dtype)
    if layout.packed:
        flat = _flat(address, layout, (layout.extent + 1) // 2, device)
        offsets = _offsets(layout, device).reshape(-1)
        codes = storage.reshape(-1)
        for half in (0, 1):
            mine = (offsets & 1) == half
            at = offsets[mine] >> 1
            flat[at] = (flat[at] & (0xF0 >> (4 * half))) | (codes[mine] << (4 * half))
        return
    flat = _flat(address, layout, layout.extent, device)
    if layout.reordering == "F8_128x4":
        flat[_tiled_offsets(layout, device)] = storage
    elif layout.extent:
        flat.as_strided(layout.dim, layout.stride).copy_(storage)


def ragged_rows(layout: Layout, starts: Sequence[int], lengths: Sequence[int] | None = None) -> list[int]:
    """Valid rows (axis 2) of each batch entry of a ragged tensor.

    ``starts`` are B + 1 element offsets. ``lengths``, where the graph has them, bounds the rows: entries need not be
    adjacent, so the distance of two starts is an upper bound only.
    """
    rows = []
    for batch in range(layout.dim[0]):
        count = min(max(starts[batch + 1] - starts[batch], 0) // max(layout.stride[2], 1), layout.dim[2])
        if lengths is not None:
            count = min(count, max(lengths[batch], 0))
        rows.append(count)
    return rows


def gather_ragged(flat: Tensor, layout: Layout, starts: Sequence[int], rows: Sequence[int]) -> Tensor:
    """A ragged tensor's storage as a dense one of the declared dims; missing rows are zero."""
    dense = flat.new_zeros(layout.dim)
    for batch, count in enumerate(rows):
        dense[batch, :, :count] = _entry(flat, layout, starts[batch], count)
    return dense


def load_ragged(
    address: int, layout: Layout, starts: Sequence[int], rows: Sequence[int], device: torch.device
) -> Tensor:
    flat = _flat(address, layout, _ragged_extent(layout, starts, rows), device)
    return decode(gather_ragged(flat, layout, starts, rows), layout.dtype)


def store_ragged(
    address: int, layout: Layout, value: Tensor, starts: Sequence[int], rows: Sequence[int], device: torch.device
) -> None:
    flat = _flat(address, layout, _ragged_extent(layout, starts, rows), device)
    storage = encode(value, layout.dtype)
    for batch, count in enumerate(rows):
        _entry(flat, layout, starts[batch], count).copy_(storage[batch, :, :count])


def _entry(flat: Tensor, layout: Layout, start: int, count: int) -> Tensor:
    heads, _, width = layout.dim[1:]
    if 0 in (heads, count, width):
        return flat.new_empty((heads, count, width))
    return flat.as_strided((heads, count, width), layout.stride[1:], start)


def _ragged_extent(layout: Layout, starts: Sequence[int], rows: Sequence[int]) -> int:
    extent = 0
    for start, count in zip(starts, rows, strict=False):
        entry = Layout(layout.dtype, (layout.dim[1], count, layout.dim[3]), layout.stride[1:]).extent
        extent = max(extent, start + entry if entry else 0)
    return extent


def _offsets(layout: Layout, device: torch.device) -> Tensor:
    """The element offset of every element."""
    total = torch.zeros(layout.dim, dtype=torch.int64, device=device)
    for axis, (size, step) in enumerate(zip(layout.dim, layout.stride, strict=True)):
        shape = [1] * len(layout.dim)
        shape[axis] = size
        total = total + (torch.arange(size, dtype=torch.int64, device=device) * step).reshape(shape)
    return total


def _tile_axes(dim: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """(row axis, column axis) of a tensor with F8_128x4 reordering."""
    order = sorted(range(len(dim)), key=lambda axis: (stride[axis], -axis))
    return order[1], order[0]


def _tiled_offsets(layout: Layout, device: torch.device) -> Tensor:
    row_axis, column_axis = _tile_axes(layout.dim, layout.stride)

    def index(axis: int) -> Tensor:
        shape = [1] * len(layout.dim)
        shape[axis] = layout.dim[axis]
        return torch.arange(layout.dim[axis], dtype=torch.int64, device=device).reshape(shape)

    row, column = index(row_axis), index(column_axis)
    tiles_in_a_row = layout.dim[column_axis] // 4
    tile = (row // 128) * tiles_in_a_row + column // 4
    total = tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4
    for axis in range(len(layout.dim)):
        if axis not in (row_axis, column_axis):
            total = total + index(axis) * layout.stride[axis]
    return total

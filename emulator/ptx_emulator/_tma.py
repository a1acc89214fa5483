"""Tensor copies of the TMA unit: box geometry, and the bytes of loads, stores and reductions (PTX ISA 5.5, 9.7.9.27).

Contract: `Box` places one box of a tensor map: for every row (innermost extent) its global address and whether it is
inside the tensor, for every 16-byte piece its swizzled shared-memory offset. Elements outside the tensor load as zero
(or NaN) and are not stored; their bytes count for the mbarrier all the same. Element strides, gather4/scatter4 and
packed 4-bit elements are handled; im2col, interleave and padded sub-byte types raise `UnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ._clocks import Access
from ._findings import UnsupportedError
from ._floats import decode, encode
from ._layout import TensorMap, decode_tensor_map, swizzle, tensor_map_problems
from ._memory import GlobalMemory, Region

__all__ = ["Box", "checked_map", "decoded"]

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
PIECE = np.dtype("V16")
_FILL = {"f16": 0x7E00, "bf16": 0x7FC0, "f32": 0x7FC00000, "tf32": 0x7FC00000, "f64": 0x7FF8 << 48}


@lru_cache(maxsize=256)
def decoded(raw: bytes) -> tuple[TensorMap | None, tuple[str, ...]]:
    """The tensor map in `raw` and what is wrong with it."""
    try:
        tensor_map = decode_tensor_map(raw)
    except (ValueError, KeyError, IndexError) as error:
        return None, (str(error),)
    return tensor_map, tuple(tensor_map_problems(tensor_map))


def checked_map(raw: bytes, rank: int, findings: Any, at: Any, who: str) -> TensorMap | None:
    """Decode, report problems, compare the rank with the instruction's."""
    tensor_map, problems = decoded(raw)
    for problem in problems:
        findings.add("descriptor", f"tensor map: {problem}", at, (who,), key=problem)
    if tensor_map is not None and rank and tensor_map.rank != rank:
        findings.add("descriptor", f"tensor map of rank {tensor_map.rank} used by a {rank}d instruction", at, (who,))
        return None
    if problems and tensor_map is not None and tensor_map.box[0] * tensor_map.shared_bits % 128:
        return None  # no row of 16-byte pieces
    if tensor_map is not None and (
        tensor_map.im2col or tensor_map.interleave or tensor_map.data_type.endswith("padded")
    ):
        raise UnsupportedError(at.op, at.line, "im2col, interleaved or padded tensor map")
    return tensor_map


@lru_cache(maxsize=512)
def _pieces(low: int, rows: int, row_bytes: int, mode: str) -> npt.NDArray[np.int64]:
    """Swizzled offsets of the 16-byte pieces [rows, row_bytes / 16] of a dense box that starts at `low` (mod 1024)."""
    linear: Any = low + np.arange(0, rows * row_bytes, 16, dtype=np.int64).reshape(rows, -1)
    out: npt.NDArray[np.int64] = swizzle(linear, mode)
    out.flags.writeable = False
    return out


class Box:
    """One box at `coordinates` (innermost first); `gather` lists four explicit rows instead (gather4, scatter4)."""

    def __init__(self, tensor_map: TensorMap, coordinates: list[int], gather: list[int] | None = None) -> None:
        m = self.map = tensor_map
        if m.element_bits == 4:
            self.element, inner, extent, first = 1, m.box[0] // 2, m.dims[0] // 2, coordinates[0] // 2
        else:
            self.element, inner, extent, first = m.element_bits // 8, m.box[0], m.dims[0], coordinates[0]
        step = m.element_strides[0]
        columns: Any = first + np.arange(0, inner, step, dtype=np.int64)
        self.column_ok = (columns >= 0) & (columns < extent)
        self.row_bytes = len(columns) * self.element
        address: Any = np.zeros(1, np.int64)
        inside: Any = np.ones(1, np.bool_)
        for axis in range(1, m.rank):
            if gather is not None and axis == 1:
                index = np.array(gather, np.int64)
            else:
                index = coordinates[axis] + np.arange(0, m.box[axis], m.element_strides[axis], dtype=np.int64)
            ok = (index >= 0) & (index < m.dims[axis])
            address = (index[:, None] * m.strides[axis - 1] + address[None, :]).reshape(-1)
            inside = (ok[:, None] & inside[None, :]).reshape(-1)
        self.rows: Any = address + m.address
        self.row_ok = inside
        self.column_offsets: Any = columns * self.element
        self.size = len(address) * self.row_bytes
        self.dense = bool(self.column_ok.all()) and step == 1
        self.full = self.dense and bool(inside.all())

    def pieces(self, offset: int) -> npt.NDArray[np.int64]:
        high = offset & ~1023
        return _pieces(offset - high, len(self.rows), self.row_bytes, self.map.swizzle) + high

    def _spans(self) -> tuple[npt.NDArray[np.int64], int]:
        """Start address and byte count of the part of each inside row that is inside the tensor."""
        columns = self.column_offsets[self.column_ok]
        if len(columns) == 0:
            return np.zeros(0, np.int64), 0
        return self.rows[self.row_ok] + int(columns[0]), int(columns[-1]) + self.element - int(columns[0])

    def check_global(self, memory: GlobalMemory, access: Access, writes: bool) -> tuple[int, Region] | None:
        """Check the global side; the allocation, or None when the box reaches outside of it (or is empty)."""
        starts, width = self._spans()
        if len(starts) == 0 or width == 0:
            return None
        found = memory.find(int(starts[0]))
        if found is None:
            memory.findings.add("out_of_bounds", f"tensor map of {self.map.address:#x} reaches {int(starts[0]):#x}, outside "
                                "every allocation", access.at, (memory.agents.name(access.agent),))  # fmt: skip
            return None
        base, region = found
        if not region.check_chunks(starts - base, width, access, writes):
            return None
        return found

    def _index(self, base: int) -> npt.NDArray[np.int64]:
        """Byte offsets [rows inside, columns inside, element] in an allocation."""
        columns = self.column_offsets[self.column_ok]
        element = np.arange(self.element)
        out: npt.NDArray[np.int64] = (self.rows[self.row_ok] - base)[:, None, None] + columns[None, :, None] + element
        return out

    def fetch(self, base: int, region: Region | None) -> Bytes:
        """The box's bytes [rows, row_bytes] from global memory, filled outside."""
        out: Any = np.zeros((len(self.rows), self.row_bytes), np.uint8)
        if self.map.nan_fill and self.map.data_type in _FILL and not self.full:
            pattern = np.frombuffer(_FILL[self.map.data_type].to_bytes(self.element, "little"), np.uint8)
            out[:] = np.tile(pattern, self.row_bytes // self.element)
        if region is None:
            return out
        if self.full:
            starts: Any = self.rows + int(self.column_offsets[0]) - base
            lead = int(starts[0]) % 16
            if self.row_bytes % 16 == 0 and not ((starts - lead) % 16).any():
                usable = (region.size - lead) // 16 * 16
                view = region.data[lead : lead + usable].view(PIECE)
                index = ((starts - lead) // 16)[:, None] + np.arange(self.row_bytes // 16)
                return view[index].view(np.uint8).reshape(len(starts), self.row_bytes)
        values = region.data[self._index(base)]
        cells = out.reshape(len(self.rows), -1, self.element)
        cells[np.ix_(self.row_ok, self.column_ok)] = values
        return out

    def put(self, base: int, region: Region, values: Bytes) -> None:
        """Store the inside part of `values` [rows, row_bytes]."""
        cells = values.reshape(len(self.rows), -1, self.element)
        if self.full:
            region.data[self._index(base)] = cells
        else:
            region.data[self._index(base)] = cells[np.ix_(self.row_ok, self.column_ok)]

    def reduce(self, base: int, region: Region, values: Bytes, name: str) -> None:
        """cp.reduce: combine with what global memory holds, by the tensor map's type."""
        index = self._index(base)
        cells = values.reshape(len(self.rows), -1, self.element)[np.ix_(self.row_ok, self.column_ok)]
        region.data[index] = combine(region.data[index], cells, self.map.data_type, name)


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "inc": lambda a, b: np.where(a >= b, 0, a + 1).astype(a.dtype),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(a.dtype),
}  # fmt: skip


def combine(old: Bytes, new: Bytes, data_type: str, name: str) -> Bytes:
    """Element-wise reduction of byte arrays whose last axis is one element."""
    if data_type == "bf16":
        a, b = (decode(np.ascontiguousarray(v).view(np.uint16)[..., 0], "bf16") for v in (old, new))
        return np.asarray(encode(_COMBINE[name](a, b), "bf16")).astype(np.uint16)[..., None].view(np.uint8)
    dtype: Any = {"f16": np.float16, "f32": np.float32, "tf32": np.float32, "f64": np.float64, "s32": np.int32, "s64": np.int64,
                  "u32": np.uint32, "u64": np.uint64, "u16": np.uint16, "u8": np.uint8}[data_type]  # fmt: skip
    a, b = (np.ascontiguousarray(v).view(dtype)[..., 0] for v in (old, new))
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(_COMBINE[name](a, b).astype(dtype)[..., None]).view(np.uint8)

"""Tensor copies of the TMA unit: box geometry, and the bytes of loads, stores and reductions (PTX ISA 5.5, 9.7.9.27).

Contract: `Box` places one box of a tensor map: for every row (innermost extent) its global address and whether it is
inside the tensor, for every 16-byte piece its swizzled shared-memory offset. Elements outside the tensor load as zero
(or NaN) and are not stored; their bytes count for the mbarrier all the same. Element strides, gather4/scatter4, im2col,
packed 4-bit and padded 4- and 6-bit elements are handled; interleaved maps and the 8-byte flip raise `UnsupportedError`.
That an mbarrier counts the packed bytes of padded types is what CUTLASS and CuTe DSL expect of them.
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
from ._layout import SWIZZLES, TensorMap, decode_tensor_map, swizzle, tensor_map_problems
from ._memory import GlobalMemory, Region

__all__ = ["Box", "checked_map", "decoded"]

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
PIECE = np.dtype("V16")
_PACKED = {"u4_padded": 8, "u6_padded": 12}  # bytes of 16 elements in global memory; in shared memory they take 16
_JUNK = 0xA5  # what padding holds: the ISA leaves it undefined
_FILLED = frozenset(("f16", "bf16", "f32", "f32_ftz", "tf32", "tf32_ftz", "f64"))
_NAN = 0x7FF7  # of every half word (measured on an H200)


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
    if tensor_map is not None and tensor_map.interleave:
        raise UnsupportedError(at.op, at.line, "interleaved tensor map")
    if tensor_map is not None and tensor_map.swizzle not in SWIZZLES:
        raise UnsupportedError(at.op, at.line, f"{tensor_map.swizzle} swizzle")
    return tensor_map


@lru_cache(maxsize=512)
def _pieces(low: int, rows: int, row_bytes: int, mode: str) -> npt.NDArray[np.int64]:
    """Swizzled offsets of the 16-byte pieces [rows, row_bytes / 16] of a dense box that starts at `low` (mod 1024)."""
    linear: Any = low + np.arange(0, rows * row_bytes, 16, dtype=np.int64).reshape(rows, -1)
    out: npt.NDArray[np.int64] = swizzle(linear, mode)
    out.flags.writeable = False
    return out


def _pixels(m: TensorMap, start: list[int]) -> list[list[int]]:
    """Positions (w, h, d, n) of the pixels of an im2col column: w first, back to its lower corner behind the upper one,
    then h, then d, then the next image."""
    spatial = m.rank - 2
    first, step = m.lower, m.element_strides[1:-1]
    last = [m.dims[1 + i] - 1 + m.upper[i] for i in range(spatial)]
    at, out = list(start), []
    for _ in range(m.pixels):
        out.append(list(at))
        for axis in range(spatial):
            at[axis] += step[axis]
            if at[axis] <= last[axis]:
                break
            at[axis] = first[axis]
        else:
            at[spatial] += 1
    return out


class Box:
    """One box at `coordinates` (innermost first). `gather` lists four explicit rows instead (gather4, scatter4); `offsets`
    are the filter offsets of an im2col map. `row_bytes` is a row's size in shared memory, `size` what an mbarrier counts:
    the bytes of the box in global memory."""

    def __init__(self, tensor_map: TensorMap, coordinates: list[int], gather: list[int] | None = None,
                 offsets: list[int] | None = None) -> None:  # fmt: skip
        m = self.map = tensor_map
        self.packed = _PACKED.get(m.data_type, 0)
        inner, extent, first = m.box[0], m.dims[0], coordinates[0]
        if self.packed:  # 16 elements are one
            self.element, inner, extent, first = self.packed, inner // 16, extent // 16, first // 16
        elif m.element_bits == 4:
            self.element, inner, extent, first = 1, inner // 2, extent // 2, first // 2
        else:
            self.element = m.element_bits // 8
        step = 1 if m.im2col else m.element_strides[0]
        columns: Any = first + np.arange(0, inner, step, dtype=np.int64)
        self.column_ok = (columns >= 0) & (columns < extent)
        self.row_bytes = len(columns) * (16 if self.packed else self.element)
        if m.im2col:
            address, inside = self._im2col(coordinates, offsets or [0] * (m.rank - 2))
        else:
            address, inside = self._tiled(coordinates, gather)
        self.rows: Any = address + m.address
        self.row_ok = inside
        self.column_offsets: Any = columns * self.element
        self.size = len(address) * len(columns) * self.element
        self.dense = bool(self.column_ok.all()) and step == 1
        self.full = self.dense and bool(inside.all())

    def _tiled(self, coordinates: list[int], gather: list[int] | None) -> tuple[Any, Any]:
        """Offset of every row from the tensor's start, and which rows are inside."""
        m = self.map
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
        return address, inside

    def _im2col(self, coordinates: list[int], offsets: list[int]) -> tuple[Any, Any]:
        m = self.map
        place = np.array(_pixels(m, coordinates[1:]), np.int64) + np.array([*offsets, 0], np.int64)
        inside = ((place >= 0) & (place < np.array(m.dims[1:], np.int64))).all(axis=1)
        return (place * np.array(m.strides, np.int64)).sum(axis=1), inside

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
        width = len(self.column_offsets) * self.element
        out: Any = np.zeros((len(self.rows), width), np.uint8)
        if self.map.nan_fill and self.map.data_type in _FILLED and not self.full:
            out.view(np.uint16)[:] = _NAN
        if region is None:
            return self._pad(out)
        if self.full and not self.packed:
            starts: Any = self.rows + int(self.column_offsets[0]) - base
            lead = int(starts[0]) % 16
            if width % 16 == 0 and not ((starts - lead) % 16).any():
                usable = (region.size - lead) // 16 * 16
                view = region.data[lead : lead + usable].view(PIECE)
                index = ((starts - lead) // 16)[:, None] + np.arange(width // 16)
                return view[index].view(np.uint8).reshape(len(starts), width)
        values = region.data[self._index(base)]
        cells = out.reshape(len(self.rows), -1, self.element)
        cells[np.ix_(self.row_ok, self.column_ok)] = values
        return self._pad(out)

    def _pad(self, values: Any) -> Bytes:
        """Rows as shared memory holds them: padded types fill 16 bytes with 16 elements."""
        if not self.packed:
            return values
        out = np.full((len(values), values.shape[1] // self.packed, 16), _JUNK, np.uint8)
        out[:, :, : self.packed] = values.reshape(len(values), -1, self.packed)
        return out.reshape(len(values), -1)

    def _cells(self, values: Bytes) -> Bytes:
        """[rows, columns, element] bytes as global memory holds them. A store of 6-bit elements takes one a byte and packs
        them (.b6p2x16)."""
        if not self.packed:
            return values.reshape(len(self.rows), -1, self.element)
        codes = values.reshape(len(self.rows), -1, 4, 4).astype(np.uint32) & np.uint32(63)
        words = (
            codes[..., 0]
            | codes[..., 1] << np.uint32(6)
            | codes[..., 2] << np.uint32(12)
            | codes[..., 3] << np.uint32(18)
        )
        parts = [(words >> np.uint32(8 * i) & np.uint32(0xFF)).astype(np.uint8) for i in range(3)]
        return np.stack(parts, axis=-1).reshape(len(self.rows), -1, 12)

    def put(self, base: int, region: Region, values: Bytes) -> None:
        """Store the inside part of `values` [rows, row_bytes]."""
        cells = self._cells(values)
        if self.full:
            region.data[self._index(base)] = cells
        else:
            region.data[self._index(base)] = cells[np.ix_(self.row_ok, self.column_ok)]

    def reduce(self, base: int, region: Region, values: Bytes, name: str) -> None:
        """cp.reduce: combine with what global memory holds, by the tensor map's type."""
        index = self._index(base)
        cells = self._cells(values)[np.ix_(self.row_ok, self.column_ok)]
        region.data[index] = combine(region.data[index], cells, self.map.data_type, name)

    def problems(self, coordinates: list[int], stores: bool, reduces: bool) -> list[str]:
        """What the ISA forbids (9.7.9.27.1.1) that only instruction and map together show; empty when legal."""
        m, found = self.map, []
        if coordinates[0] * m.element_bits % 128:
            start = coordinates[0] * m.element_bits // 8
            found.append(f"misaligned: the box starts at byte {start} of a row, which is not a multiple of 16")
        if self.packed and coordinates[0] % 128:
            found.append(f"the first coordinate {coordinates[0]} is not a multiple of 128, as padded types need")
        if m.data_type == "u4_padded" and stores:
            found.append("padded 4-bit tensors can't be stored")
        if reduces and m.data_type.startswith(("u4", "u6")):
            found.append(f"tensors of {m.data_type} can't be reduced to")
        if stores and min(coordinates) < 0:
            found.append(f"a store starts at negative coordinates {tuple(coordinates)}")
        for axis in range(m.rank - 2 if m.im2col else 0):
            low, high = m.lower[axis], m.dims[1 + axis] - 1 + m.upper[axis]
            if not low <= coordinates[1 + axis] <= high:
                found.append(
                    f"coordinate {coordinates[1 + axis]} of dimension {1 + axis} is outside the box {low}..{high}"
                )
            if stores and (low < 0 or m.upper[axis] > 0):
                found.append("the im2col box of a store reaches outside the tensor")
        return found


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "inc": lambda a, b: np.where(a >= b, 0, a + 1).astype(a.dtype),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(a.dtype),
}  # fmt: skip


def combine(old: Bytes, new: Bytes, data_type: str, name: str) -> Bytes:
    """Element-wise reduction of byte arrays whose last axis is one element. float32 additions keep subnormal numbers, as
    an H200 does (the ISA says that cp.reduce.async.bulk.add.f32 flushes them)."""
    if data_type == "bf16":
        a, b = (decode(np.ascontiguousarray(v).view(np.uint16)[..., 0], "bf16") for v in (old, new))
        return np.asarray(encode(_COMBINE[name](a, b), "bf16")).astype(np.uint16)[..., None].view(np.uint8)
    dtype: Any = {"f16": np.float16, "f32": np.float32, "f32_ftz": np.float32, "tf32": np.float32, "tf32_ftz": np.float32, "f64": np.float64, "s32": np.int32, "s64": np.int64,
                  "u32": np.uint32, "u64": np.uint64, "u16": np.uint16, "u8": np.uint8}[data_type]  # fmt: skip
    a, b = (np.ascontiguousarray(v).view(dtype)[..., 0] for v in (old, new))
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(_COMBINE[name](a, b).astype(dtype)[..., None]).view(np.uint8)

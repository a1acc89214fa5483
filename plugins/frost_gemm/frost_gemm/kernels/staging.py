"""Outputs on their way through shared memory: registers of a wgmma fragment -> swizzled panels -> TMA store.

A warpgroup stages ``rows`` x ``cols`` elements of one output. They lie in panels whose lines (rows of an n-major output, columns of an m-major
one) have at most 128 bytes, the widest swizzle; a panel is one TMA box. 16-bit types go by stmatrix, transposed for m-major
outputs. Imported by ``wgmma``.

A thread's values are those of the wgmma fragment: value 4j + 2h + c is row lane/4 + 8h and column 2(lane % 4) + 8j + c of the 16 rows
of its warp (PTX ISA, wgmma, "Register Fragments and Shared Memory Matrix Layouts").
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ..layout import BITS
from .args import ELEMENTS

__all__ = ["Staging", "load_shared", "store_shared", "swizzled"]

LINE_BYTES = 128
WARP_ROWS = 16


class Staging:
    """The place of ``rows`` x ``cols`` elements of an output."""

    def __init__(self, dtype: str, major: str, rows: int, cols: int) -> None:
        self.element, self.size = ELEMENTS[dtype], BITS[dtype] // 8
        self.n_major, self.rows, self.cols = major == "n", rows, cols
        extent = cols if self.n_major else rows
        self.extent = min(extent, LINE_BYTES // self.size)  # of a line, in elements
        self.line = self.extent * self.size
        self.panel = (rows, self.extent) if self.n_major else (self.extent, cols)
        self.panel_bytes = self.panel[0] * self.panel[1] * self.size
        self.panels = extent // self.extent

    def panel_layout(self) -> cute.ComposedLayout:
        """Shared memory of a panel."""
        kinds = warpgroup.SmemLayoutAtomKind
        swizzle = {128: "SW128", 64: "SW64", 32: "SW32", 16: "INTER"}[self.line]
        atom = warpgroup.make_smem_layout_atom(kinds[f"{'K' if self.n_major else 'MN'}_{swizzle}"], self.element)
        return cute.tile_to_shape(atom, self.panel, (0, 1) if self.n_major else (1, 0))

    def panel_tensor(self, base: cute.Pointer, index: int) -> cute.Tensor:
        """Panel ``index`` of the place at ``base``."""
        layout = self.panel_layout()
        pointer = cute.recast_ptr(base + index * self.panel_bytes, layout.inner, self.element)
        return cute.make_tensor(pointer, layout.outer)

    def panel_origin(self, index: int) -> tuple[int, int]:
        """Row and column of panel ``index``."""
        return (0, index * self.extent) if self.n_major else (index * self.extent, 0)

    def write(self, base: cute.Pointer, fragment: cute.Tensor, thread: Int32) -> None:
        """The values of ``thread`` (0 to 127 of the warpgroup), already of the output's type, into the place at ``base``."""
        lane, warp_row = thread % 32, thread // 32 * WARP_ROWS
        address = base.toint()
        if self.size == 2:
            self._write_matrices(address, fragment, lane, warp_row)
        elif self.n_major:
            self._write_pairs(address, fragment, lane, warp_row)
        else:
            self._write_elements(address, fragment, lane, warp_row)

    def _offset(self, line: Any, element: Any) -> Any:
        """Bytes from the place's start to ``element`` of ``line``, both over all panels: swizzled."""
        return swizzled(line, element * self.size, self.rows if self.n_major else self.cols, self.line)

    def _write_matrices(self, address: Int32, fragment: cute.Tensor, lane: Int32, warp_row: Int32) -> None:
        """stmatrix: lanes 8i to 8i+7 give the lines of matrix i; the matrices are (rows 0-7, 8-15) x (columns 0-7, 8-15)."""
        words = cute.recast_tensor(fragment, cutlass.Uint32)
        count = min(4, self.cols // 4)
        half = lane >> 4
        if self.n_major:
            first = self._offset(warp_row + lane % WARP_ROWS, 8 * half)
        else:
            first = self._offset(8 * half + lane % 8, warp_row + 8 * ((lane >> 3) & 1))
        for step in range(cute.size(words) // count):
            if self.n_major:  # 16 columns further: other 16-byte pieces of the line, or the next panel
                panel, element = divmod(16 * step, self.extent)
                at = (first ^ (element * self.size)) + panel * self.panel_bytes
            else:  # 16 lines further: whole swizzle patterns
                at = first + 16 * step * self.line
            _stmatrix(address + at, [words[count * step + i] for i in range(count)], transposed=not self.n_major)

    def _write_pairs(self, address: Int32, fragment: cute.Tensor, lane: Int32, warp_row: Int32) -> None:
        """Two neighbours of a row at a time."""
        kind = {1: cutlass.Uint16, 4: cutlass.Uint32}[self.size]
        words = cute.recast_tensor(fragment, kind)
        each = 2 * self.size // (kind.width // 8)
        first = self._offset(warp_row + lane // 4, 2 * (lane % 4))
        for pair in range(self.cols // 4):
            block, half = divmod(pair, 2)
            panel, element = divmod(8 * block, self.extent)
            # 8 rows further is a whole swizzle pattern
            at = (first ^ (element * self.size)) + panel * self.panel_bytes + half * 8 * self.line
            store_shared(address + at, [words[each * pair + i] for i in range(each)], kind.width)

    def _write_elements(self, address: Int32, fragment: cute.Tensor, lane: Int32, warp_row: Int32) -> None:
        kind = {1: cutlass.Uint8, 4: cutlass.Uint32}[self.size]
        words = cute.recast_tensor(fragment, kind)
        for value in range(self.cols // 2):
            block, half, column = value // 4, value // 2 % 2, value % 2
            at = self._offset(2 * (lane % 4) + 8 * block + column, warp_row + lane // 4 + 8 * half)
            store_shared(address + at, [words[value]], kind.width)


def _stmatrix(address: Int32, words: list[Any], *, transposed: bool) -> None:
    operands = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x{len(words)}{'.trans' if transposed else ''}.shared.b16 [{{$r0}}], {{{operands}}};",
        read_only_args=[address, *words],
    )


def swizzled(line: Any, byte: Any, lines: int, width: int) -> Any:
    """Offset of ``byte`` of ``line`` in panels of ``lines`` lines of ``width`` bytes: the 16-byte pieces of a line trade places."""
    panel = byte // width
    linear = line * width + (byte - panel * width)
    return panel * (lines * width) + (linear ^ ((linear >> 3) & ((width // 16 - 1) << 4)))


def load_shared(address: Int32, count: int) -> list[Any]:
    """``count`` words of 32 bits from shared memory: 2, or a multiple of 4."""
    each = min(4, count)
    words: list[Any] = []
    for first in range(0, count, each):
        operands = ", ".join(f"{{$w{i}}}" for i in range(each))
        words += cute.arch.inline_ptx(
            f"ld.shared.v{each}.b32 {{{operands}}}, [{{$r0}}];",
            write_only_types=[cutlass.Uint32] * each,
            read_only_args=[address + 4 * first],
        )
    return words


def store_shared(address: Int32, words: list[Any], bits: int) -> None:
    """One access of ``words`` of ``bits`` bits each, to shared memory."""
    operands = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    if bits == 8:  # PTX has no 8-bit registers
        words = [cutlass.Uint16(word) for word in words]
    if len(words) > 1:
        operands = f"{{{operands}}}"
    vector = f".v{len(words)}" if len(words) > 1 else ""
    cute.arch.inline_ptx(f"st.shared{vector}.b{bits} [{{$r0}}], {operands};", read_only_args=[address, *words])

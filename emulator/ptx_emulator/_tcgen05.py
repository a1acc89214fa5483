"""Arithmetic of tcgen05: operands from shared and tensor memory, matrix multiply, copies (PTX ISA 9.7.17).

Contract: `MatrixOp` is one tcgen05.mma, decoded and checked when it is issued (descriptors, bounds, initialisation,
order, allocation) and computed when the schedule completes it. With cta_group::2 the same descriptors and addresses
apply to both CTAs of the pair: each holds half of A's and D's rows and half of B's. Sparse A is covered with 128 rows a
CTA, for which CUTLASS states the layout of the metadata. `.ashift` moves A after the product (documentation of CuTe DSL).
Inferred: of the copies of A that .ws wants in other lanes only the first is read.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ._clocks import Access
from ._findings import UnsupportedError
from ._fragments import accumulator_map, copy_lanes, scale_map, tmem_operand_lanes, zero_column_mask
from ._layout import (
    MatrixDescriptor,
    decode_instruction,
    decode_tcgen05,
    gather_operand,
    instruction_problems,
    matrix_problems,
    operand_chunks,
)
from ._matmul import accumulate, decode_elements, decode_unpacked, decompress, expand_scales
from ._sparsity import expand, illegal, tensor_columns, tensor_metadata

__all__ = ["CopyOp", "Form", "MatrixOp", "Operands", "ShiftOp", "layout_problems", "report_once"]

Array: TypeAlias = "npt.NDArray[Any]"


def report_once(findings: Any, problems: list[str], what: str, at: Any, who: str) -> bool:
    """Report descriptor problems; True when there are none."""
    for problem in problems:
        findings.add("descriptor", f"{what}: {problem}", at, (who,), key=what + problem[:20])
    return not problems


def layout_problems(region: Any, chunks: Array, desc: MatrixDescriptor) -> list[str]:
    """How a matrix descriptor contradicts the tensor copy that wrote the operand (its first, middle and last piece).

    A tensor copy swizzles by absolute address, so that a base offset is wrong for what it wrote.
    """
    flat, events, problems = chunks.reshape(-1), region.order.events, []
    for event in set(region.order.writer[flat[[0, len(flat) // 2, -1]] >> 2].tolist()):
        mode = events.swizzles.get(event)
        if mode is None:
            continue
        by = f"the tensor copy at PTX line {events.at[event].line}"
        if mode != desc.swizzle:
            problems.append(f"swizzle {desc.swizzle}, but {by} wrote the operand with {mode}")
        elif desc.base_offset:
            problems.append(f"base offset {desc.base_offset}, but {by} swizzled by absolute address")
    return problems


def _slabs(lanes: Array) -> tuple[int, ...]:
    return tuple(np.unique(lanes >> 4).tolist())


class Form(NamedTuple):
    """What the words of a tcgen05.mma say. `vector`: elements per scale factor; D counts 2^-scale_d times; with `shift`
    the rows of A in tensor memory move afterwards."""

    kind: str
    ws: bool = False
    vector: int = 0
    scale_d: int = 0
    sparse: bool = False
    shift: bool = False


class Operands(NamedTuple):
    """Values of its operands. `masked` has a bit per lane of D (128 a CTA) that stays as it is; `zero_columns` is the
    zero-column mask descriptor of .ws (None: no operand)."""

    d: int
    a: int
    a_in_tensor: bool
    b: int
    idesc: int
    enable: bool
    scales: tuple[int, int] | None = None
    masked: int = 0
    zero_columns: int | None = None
    metadata: int = 0


def move_rows(data: Array, lane: int, column: int, columns: int) -> None:
    """Row r of 32 lanes takes row r + 1; the last keeps its own."""
    part = data[lane : lane + 32, column : column + columns]
    part[:31] = part[1:].copy()


class MatrixOp:
    """One tcgen05.mma over the CTAs of `pair`."""

    def __init__(self, w: Any, instr: Any, form: Form, pair: list[Any], operands: Operands, access: Access) -> None:
        machine = w.machine
        arch, findings = machine.module.target, machine.findings
        self.findings, self.at, self.who = findings, instr, w.name
        self.pair, self.form, self.operands = pair, form, operands
        group = len(pair)
        i = self.i = decode_instruction(operands.idesc, form.kind, arch)
        problems = instruction_problems(i, group, form.ws, form.vector)
        if i.sparse != form.sparse:
            problems.append(f"the sparsity bit is {int(i.sparse)}")
        if form.shift and i.m // group != 128:
            problems.append(f".ashift needs 128 rows a CTA, not M={i.m}")
        if form.sparse and i.m // group != 128:
            raise UnsupportedError(instr.op, instr.line, f"sparse M={i.m}")
        self.ok = report_once(findings, problems, "instruction descriptor", instr, w.name)
        if not self.ok:
            return
        bits = i.element_bits
        self.kbytes = i.k * bits // 8
        self.a_kbytes = self.kbytes // 2 if form.sparse else self.kbytes
        self.rows, self.columns = i.m // group, i.n // group
        self.shift, self.zero = 0, None
        if operands.zero_columns is not None:
            self.zero, self.shift = zero_column_mask(operands.zero_columns, i.m, i.n)
            if self.shift > (0, 8, 16, 32)[i.max_shift]:
                problem = f"columns shifted by {self.shift}, at most {(0, 8, 16, 32)[i.max_shift]} by the descriptor"
                self.ok = report_once(findings, [problem], "zero-column mask", instr, w.name)
        cta, lane, column = accumulator_map(i.m, i.n, group, form.ws, form.sparse)
        self.lanes = [lane[cta[:, 0] == g] for g in range(group)]
        self.cols = [column[cta[:, 0] == g] for g in range(group)]
        self.direct = bool((self.lanes[0] == np.arange(self.rows)[:, None]).all()) and bool(
            (self.cols[0] == np.arange(i.n)).all()
        )
        self.d_lane, self.d_column = operands.d >> 16 & 0x7F, operands.d & 0xFFFF
        width = int(self.cols[0].max()) + 1
        limit = 1 << (19 if arch.startswith("sm_107") else 18)
        matrices = [("B", operands.b, self.columns + self.shift, self.kbytes, i.b_major)]
        if not operands.a_in_tensor:
            matrices.append(("A", operands.a, self.rows, self.a_kbytes, i.a_major))
        self.matrices: dict[str, MatrixDescriptor] = {}
        for name, value, rows, kbytes, major in matrices:
            desc = self.matrices[name] = decode_tcgen05(value, arch)
            problems = matrix_problems(desc, rows, kbytes, major, bits, "tcgen05", limit)
            if desc.leading_absolute and not arch.startswith(("sm_103", "sm_107")):
                problems.append(f"an absolute leading address does not exist on {arch}")
            self.ok &= report_once(findings, problems, f"descriptor of {name}", instr, w.name)
        if not self.ok:
            return
        self.ok = machine.shared_bytes > 0
        for g, owner in enumerate(pair):
            for name, _, rows, kbytes, major in matrices:
                chunks = operand_chunks(self.matrices[name], rows, kbytes, major, bits)
                self.ok &= owner.shared.check_chunks(chunks.reshape(-1), 16, access, False)
                if self.ok:
                    wrong = layout_problems(owner.shared, chunks, self.matrices[name])
                    report_once(findings, wrong, f"descriptor of {name}", instr, w.name)
            if operands.a_in_tensor:
                lanes, start = self._tensor_rows()
                part = (_slabs(lanes), start, self.a_kbytes // 4, access)
                self.ok &= owner.tensor.check(*part, form.shift, w.name, form.shift)
            if form.sparse:
                columns = tensor_columns(i.k, bits)
                self.ok &= owner.tensor.check(tuple(range(8)), self._metadata_column(), columns, access, False, w.name)
            if operands.scales is not None:
                self._check_scales(owner, operands.scales, access, w.name)
            self.ok &= owner.tensor.check(
                _slabs(self.lanes[g]), self.d_column, width, access, True, w.name, operands.enable
            )

    def kept(self) -> dict[str, Any]:
        """What tells operands apart that a collector may hold: where they lie and how they are read."""
        i, operands = self.i, self.operands
        return {
            "a": (operands.a, operands.a_in_tensor, self.form.kind, i.a_format, i.a_major, i.m, i.k, len(self.pair)),
            "b": (operands.b, self.form.kind, i.b_format, i.b_major, i.n, i.k, len(self.pair)),
        }

    def _tensor_rows(self) -> tuple[Array, int]:
        """Lanes and first column of A in tensor memory."""
        a = self.operands.a
        return tmem_operand_lanes(self.i.m, len(self.pair), self.form.ws) + (a >> 16 & 0x7F), a & 0xFFFF

    def _metadata_column(self) -> int:
        """First column of the sparsity metadata: the selector picks one of a pair for 16- and 32-bit types."""
        return (self.operands.metadata & 0xFFFF) + self.i.sparsity_id

    def _check_scales(self, owner: Any, scales: tuple[int, int], access: Access, who: str) -> None:
        i = self.i
        for address, rows, index in ((scales[0], self.rows, i.a_scale_id), (scales[1], i.n, i.b_scale_id)):
            lane, column, _ = scale_map(rows, i.k // self.form.vector, index)
            self.ok &= owner.tensor.check(_slabs(lane), address & 0xFFFF, int(column.max()) + 1, access, False, who)

    def _left(self, owner: Any) -> Array:
        i = self.i
        if self.operands.a_in_tensor:
            lanes, start = self._tensor_rows()
            raw = np.ascontiguousarray(owner.tensor.data[lanes, start : start + self.a_kbytes // 4]).view(np.uint8)
            packed = i.element_bits != 8
            values = decode_elements(raw, i.a_format) if packed else decode_unpacked(raw, i.a_format, "tensor")
        else:
            raw = gather_operand(
                owner.shared.data, self.matrices["A"], self.rows, self.a_kbytes, i.a_major, i.element_bits
            )
            values = decode_elements(raw, i.a_format, i.container)
        if self.form.sparse:
            column = self._metadata_column()
            words = owner.tensor.data[:, column : column + tensor_columns(i.k, i.element_bits)]
            codes = tensor_metadata(words, i.k, i.element_bits)
            report_once(
                self.findings, [p for p in [illegal(codes, i.element_bits, True)] if p], "sparsity", self.at, self.who
            )
            values = expand(values, codes, i.element_bits)
        return -values if i.a_negate else values

    def _right(self) -> Array:
        """B of all CTAs of the pair, [n, k]."""
        i, parts = self.i, []
        for owner in self.pair:
            rows = self.columns + self.shift
            raw = gather_operand(owner.shared.data, self.matrices["B"], rows, self.kbytes, i.b_major, i.element_bits)
            values = decode_elements(raw, i.b_format, i.container)[self.shift :]
            parts.append(-values if i.b_negate else values)
        out = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return out if self.zero is None else np.where(self.zero[:, None], 0, out)

    def _scale(self, owner: Any, address: int, rows: int, index: int) -> Array:
        lane, column, byte = scale_map(rows, self.i.k // self.form.vector, index)
        words = owner.tensor.data[lane, (address & 0xFFFF) + column]
        codes = (words >> (8 * byte).astype(np.uint32) & np.uint32(0xFF)).astype(np.uint8)
        return expand_scales(codes, self.i.scale_format, self.form.vector)

    def _accumulator(self, old: Array) -> Array | None:
        if not self.operands.enable:
            return None
        if self.i.accumulator == "s32":
            return old.view(np.int32) if old.flags.c_contiguous else np.ascontiguousarray(old).view(np.int32)
        if self.i.accumulator == "f16":
            c = (old & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
        else:
            c = np.ascontiguousarray(old).view(np.float32)
        return c * np.float32(2.0**-self.form.scale_d) if self.form.scale_d else c

    def complete(self) -> None:
        if not self.ok:
            return
        i, operands = self.i, self.operands
        b = self._right()
        for g, owner in enumerate(self.pair):
            a = self._left(owner)
            if self.direct:
                place: Any = (slice(0, self.rows), slice(self.d_column, self.d_column + i.n))
            else:
                place = (self.lanes[g] + self.d_lane, self.cols[g] + self.d_column)
            data = owner.tensor.data
            old = data[place]
            sa = sb = None
            if operands.scales is not None:
                sa = self._scale(owner, operands.scales[0], self.rows, i.a_scale_id)
                sb = self._scale(owner, operands.scales[1], i.n, i.b_scale_id)
            result = accumulate(a, b, self._accumulator(old), i.accumulator, sa, sb, i.saturate)
            if i.accumulator == "f16":
                bits = result.astype(np.float16).view(np.uint16).astype(np.uint32)
            else:
                bits = result.view(np.uint32)
            if operands.masked:
                off = (operands.masked >> (128 * g)) & ((1 << 128) - 1)
                keep = np.array([off >> n & 1 for n in range(128)], np.bool_)
                bits = np.where(keep[self.lanes[g] + self.d_lane], old, bits)
            data[place] = bits
            if self.form.shift:
                lanes, start = self._tensor_rows()
                for quarter in range(0, 128, 32):
                    move_rows(data, int(lanes[0]) + quarter, start, self.a_kbytes // 4)


class CopyOp:
    """One tcgen05.cp: a shared-memory matrix to tensor memory of every CTA of the pair. `narrow`: bits of elements that it
    decompresses to bytes, 0 without."""

    def __init__(self, w: Any, instr: Any, shape: str, multicast: str, narrow: int, pair: list[Any], address: int,
                 descriptor: int, access: Access) -> None:  # fmt: skip
        self.pair, self.narrow = pair, narrow
        try:
            lanes = copy_lanes(shape, multicast)
        except ValueError as error:
            raise UnsupportedError(instr.op, instr.line) from error
        self.lanes = lanes + (address >> 16 & 0x7F)
        self.rows = len(lanes)
        self.kbytes = int(shape.split("x")[1][:-1]) // 8
        self.column = address & 0xFFFF
        self.desc = decode_tcgen05(descriptor, w.machine.module.target)
        problems = matrix_problems(self.desc, self.rows, self.kbytes, "K", 8)
        if int(self.lanes.max()) > 127:
            problems.append(f"lanes up to {int(self.lanes.max())} from lane {address >> 16 & 0x7F} on")
        self.ok = report_once(w.machine.findings, problems, "descriptor of the copy", instr, w.name)
        if not self.ok:
            return
        for owner in pair:
            chunks = operand_chunks(self.desc, self.rows, self.kbytes, "K", 8)
            self.ok &= owner.shared.check_chunks(chunks.reshape(-1), 16, access, False)
            if self.ok:
                wrong = layout_problems(owner.shared, chunks, self.desc)
                report_once(w.machine.findings, wrong, "descriptor of the copy", instr, w.name)
            self.ok &= owner.tensor.check(_slabs(self.lanes), self.column, self.kbytes // 4, access, True, w.name)

    def complete(self) -> None:
        if not self.ok:
            return
        for owner in self.pair:
            raw = gather_operand(owner.shared.data, self.desc, self.rows, self.kbytes, "K", 8)
            words = np.ascontiguousarray(decompress(raw, self.narrow, "tensor") if self.narrow else raw).view(np.uint32)
            for copy in range(self.lanes.shape[1]):
                owner.tensor.data[self.lanes[:, copy], self.column : self.column + words.shape[1]] = words


class ShiftOp:
    """One tcgen05.shift: 32 bytes of 32 lanes move one row down, the last row stays (the lanes of the address only)."""

    def __init__(self, w: Any, instr: Any, pair: list[Any], address: int, access: Access) -> None:
        self.pair, self.lane, self.column = pair, address >> 16 & 0xFFFF, address & 0xFFFF
        problems = [f"lane {self.lane} is not a multiple of 32 below 128"] if self.lane % 32 or self.lane > 96 else []
        self.ok = report_once(w.machine.findings, problems, "address of the shift", instr, w.name)
        for owner in pair if self.ok else []:
            slabs = (self.lane // 16, self.lane // 16 + 1)
            self.ok &= owner.tensor.check(slabs, self.column, 8, access, True, w.name, True)

    def complete(self) -> None:
        for owner in self.pair if self.ok else []:
            move_rows(owner.tensor.data, self.lane, self.column, 8)

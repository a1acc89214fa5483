"""Arithmetic of tcgen05: operands from shared and tensor memory, matrix multiply, copies (PTX ISA 9.7.17).

Contract: `MatrixOp` is one tcgen05.mma, decoded and checked when it is issued (descriptors, bounds, initialisation,
order, allocation) and computed when the schedule completes it. With cta_group::2 the same descriptors and addresses
apply to both CTAs of the pair: each holds half of A's and D's rows and half of B's. Not covered: .ws, sparsity,
scale_input_d, A in tensor memory with 4- or 6-bit elements.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ._clocks import Access
from ._findings import UnsupportedError
from ._fragments import accumulator_map, copy_lanes, scale_map, tmem_operand_lanes
from ._layout import (
    decode_instruction,
    decode_tcgen05,
    gather_operand,
    instruction_problems,
    matrix_problems,
    operand_chunks,
)
from ._matmul import accumulate, decode_elements, expand_scales

__all__ = ["CopyOp", "MatrixOp", "report_once"]

Array: TypeAlias = "npt.NDArray[Any]"


def report_once(findings: Any, problems: list[str], what: str, at: Any, who: str) -> bool:
    """Report descriptor problems; True when there are none.

    A start inside the swizzle pattern is no problem as long as TMA wrote the data: both swizzle by absolute address,
    and the public Blackwell dense_gemm example starts 128 bytes into the pattern with base offset 0.
    """
    problems = [p for p in problems if "-byte " not in p or "into the" not in p]
    for problem in problems:
        findings.add("descriptor", f"{what}: {problem}", at, (who,), key=what + problem[:20])
    return not problems


def _slabs(lanes: Array) -> tuple[int, ...]:
    return tuple(np.unique(lanes >> 4).tolist())


class MatrixOp:
    """One tcgen05.mma of `kind` over the CTAs of `pair`."""

    def __init__(self, w: Any, instr: Any, kind: str, pair: list[Any], d: int, a: int, a_in_tmem: bool, b: int, idesc: int,
                 enable: bool, scales: tuple[int, int, int] | None, masked: int, access: Access) -> None:  # fmt: skip
        machine, arch = w.machine, w.machine.module.target
        self.pair, self.enable, self.masked = pair, enable, masked
        group = len(pair)
        i = self.i = decode_instruction(idesc, kind, arch)
        if i.sparse:
            raise UnsupportedError(instr.op, instr.line, "sparse")
        findings = machine.findings
        self.ok = report_once(findings, instruction_problems(i, group), "instruction descriptor", instr, w.name)
        if not self.ok:
            return
        bits = i.element_bits
        self.kbytes = i.k * bits // 8
        self.container = 8 if kind in ("f8f6f4", "mxf8f6f4") else 0
        self.rows, self.columns = i.m // group, i.n // group
        cta, lane, column = accumulator_map(i.m, i.n, group)
        self.lanes = [lane[cta[:, 0] == g] for g in range(group)]
        self.cols = [column[cta[:, 0] == g] for g in range(group)]
        self.direct = bool((self.lanes[0] == np.arange(self.rows)[:, None]).all()) and bool(
            (self.cols[0] == np.arange(i.n)).all()
        )
        self.d_lane, self.d_column = d >> 16 & 0x7F, d & 0xFFFF
        width = int(self.cols[0].max()) + 1
        shared = machine.shared_bytes
        self.b = decode_tcgen05(b, arch)
        limit = 1 << (19 if arch.startswith("sm_107") else 18)
        self.ok = report_once(findings, matrix_problems(self.b, self.columns, self.kbytes, i.b_major, bits, "tcgen05", limit),
                              "descriptor of B", instr, w.name)  # fmt: skip
        self.a = decode_tcgen05(a, arch) if not a_in_tmem else None
        self.a_address = a
        if self.a is not None:
            self.ok &= report_once(findings, matrix_problems(self.a, self.rows, self.kbytes, i.a_major, bits, "tcgen05", limit),
                                   "descriptor of A", instr, w.name)  # fmt: skip
        elif bits < 8 or (self.container and i.a_format not in ("e4m3", "e5m2")):
            raise UnsupportedError(instr.op, instr.line, "narrow A in tensor memory")
        self.scales = scales
        if not self.ok:
            return
        self.ok = shared > 0
        for g, owner in enumerate(pair):
            for desc, rows, major in ((self.a, self.rows, i.a_major), (self.b, self.columns, i.b_major)):
                if desc is not None:
                    chunks = operand_chunks(desc, rows, self.kbytes, major, bits)
                    self.ok &= owner.shared.check_chunks(chunks.reshape(-1), 16, access, False)
            if a_in_tmem:
                lanes = tmem_operand_lanes(i.m, group) + (a >> 16 & 0x7F)
                self.ok &= owner.tensor.check(_slabs(lanes), a & 0xFFFF, self.kbytes // 4, access, False, w.name)
            if scales is not None:
                self._check_scales(owner, scales, access, w.name)
            self.ok &= owner.tensor.check(_slabs(self.lanes[g]), self.d_column, width, access, True, w.name, enable)

    def _check_scales(self, owner: Any, scales: tuple[int, int, int], access: Access, who: str) -> None:
        i, (a, b, vector) = self.i, scales
        for address, rows, index in ((a, self.rows, i.a_scale_id), (b, i.n, i.b_scale_id)):
            lane, column, _ = scale_map(rows, i.k // vector, index)
            self.ok &= owner.tensor.check(_slabs(lane), address & 0xFFFF, int(column.max()) + 1, access, False, who)

    def _operand(self, owner: Any, a: bool) -> Array:
        i = self.i
        name = i.a_format if a else i.b_format
        rows, desc, major = (self.rows, self.a, i.a_major) if a else (self.columns, self.b, i.b_major)
        if desc is None:
            lanes = tmem_operand_lanes(i.m, len(self.pair)) + (self.a_address >> 16 & 0x7F)
            start = self.a_address & 0xFFFF
            raw = np.ascontiguousarray(owner.tensor.data[lanes, start : start + self.kbytes // 4]).view(np.uint8)
        else:
            raw = gather_operand(owner.shared.data, desc, rows, self.kbytes, major, i.element_bits)
        values = decode_elements(raw, name, self.container if name in ("e2m1", "e2m3", "e3m2") else 0)
        return -values if (i.a_negate if a else i.b_negate) else values

    def _scale(self, owner: Any, address: int, rows: int, index: int, vector: int) -> Array:
        lane, column, byte = scale_map(rows, self.i.k // vector, index)
        words = owner.tensor.data[lane, (address & 0xFFFF) + column]
        codes = (words >> (8 * byte).astype(np.uint32) & np.uint32(0xFF)).astype(np.uint8)
        return expand_scales(codes, self.i.scale_format, vector)

    def complete(self) -> None:
        if not self.ok:
            return
        i = self.i
        right = [self._operand(owner, False) for owner in self.pair]
        b = right[0] if len(right) == 1 else np.concatenate(right)
        for g, owner in enumerate(self.pair):
            a = self._operand(owner, True)
            if self.direct:
                place: Any = (slice(0, self.rows), slice(self.d_column, self.d_column + i.n))
            else:
                place = (self.lanes[g] + self.d_lane, self.cols[g] + self.d_column)
            data = owner.tensor.data
            old = data[place]
            c: Any = None
            if self.enable:
                if i.accumulator == "s32":
                    c = old.view(np.int32) if old.flags.c_contiguous else np.ascontiguousarray(old).view(np.int32)
                elif i.accumulator == "f16":
                    c = (old & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
                else:
                    c = np.ascontiguousarray(old).view(np.float32)
            sa = sb = None
            if self.scales is not None:
                sa = self._scale(owner, self.scales[0], self.rows, i.a_scale_id, self.scales[2])
                sb = self._scale(owner, self.scales[1], i.n, i.b_scale_id, self.scales[2])
            result = accumulate(a, b, c, i.accumulator, sa, sb, i.saturate)
            if i.accumulator == "f16":
                bits = result.astype(np.float16).view(np.uint16).astype(np.uint32)
            else:
                bits = result.view(np.uint32)
            if self.masked:
                off = (self.masked >> (128 * g)) & ((1 << 128) - 1)
                keep = np.array([off >> n & 1 for n in range(128)], np.bool_)
                rows = self.lanes[g] + self.d_lane
                bits = np.where(keep[rows], old, bits)
            data[place] = bits


class CopyOp:
    """One tcgen05.cp: a shared-memory matrix to tensor memory of every CTA of the pair."""

    def __init__(self, w: Any, instr: Any, shape: str, multicast: str, pair: list[Any], address: int, descriptor: int,
                 access: Access) -> None:  # fmt: skip
        self.pair = pair
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
        self.ok = report_once(w.machine.findings, problems, "descriptor of the copy", instr, w.name)
        if not self.ok:
            return
        for owner in pair:
            chunks = operand_chunks(self.desc, self.rows, self.kbytes, "K", 8)
            self.ok &= owner.shared.check_chunks(chunks.reshape(-1), 16, access, False)
            self.ok &= owner.tensor.check(_slabs(self.lanes), self.column, self.kbytes // 4, access, True, w.name)

    def complete(self) -> None:
        if not self.ok:
            return
        for owner in self.pair:
            raw = gather_operand(owner.shared.data, self.desc, self.rows, self.kbytes, "K", 8)
            words = np.ascontiguousarray(raw).view(np.uint32)
            for copy in range(self.lanes.shape[1]):
                owner.tensor.data[self.lanes[:, copy], self.column : self.column + words.shape[1]] = words

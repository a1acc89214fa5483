"""Instruction descriptors (idesc) of tcgen05.mma: decode, encode, legality (PTX ISA 9.7.16.4.4 and Tables 49 to 55).

sm_103 adds K = 96 (bit 31) for 4-bit kinds. sm_107's fields - k_dim in bit 29 (f8f6f4, i8) or 31 (block scaled), the
second K bit 3, scale_format in bits 23-24 with UE5M3, scale-factor layout in bit 26 - are from the public descriptor
documentation of CuTe DSL; their meaning as K = 64 and K = 128 is inferred from its operator table, not checked.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "InstructionDescriptor", "decode_instruction", "encode_instruction", "instruction_problems"]

_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
# kind -> format names by code, bits per element in memory, base K, block scaled
KINDS: dict[str, tuple[dict[int, str], int, int, bool]] = {
    "f16": ({0: "f16", 1: "bf16"}, 16, 16, False),
    "tf32": ({2: "tf32"}, 32, 8, False),
    "i8": ({0: "u8", 1: "s8"}, 8, 32, False),
    "f8f6f4": (_F8F6F4, 8, 32, False),
    "mxf8f6f4": (_F8F6F4, 8, 32, True),
    "mxf4": ({1: "e2m1"}, 4, 64, True),
    "mxf4nvf4": ({1: "e2m1"}, 4, 64, True),
}
_ACCUMULATORS = {0: "f16", 1: "f32", 2: "s32"}
_SCALES = {0: "ue4m3", 1: "ue8m0", 2: "ue5m3"}


class InstructionDescriptor(NamedTuple):
    """A decoded idesc. m, n, k are the instruction's shape over both CTAs; k counts dense elements.

    element_bits is an element's container in shared memory (4- and 6-bit types of f8f6f4 kinds sit in padded 8-bit
    space). An undefined format code decodes to "invalid<n>".
    """

    kind: str
    m: int
    n: int
    k: int
    a_format: str
    b_format: str
    accumulator: str
    a_major: str = "K"
    b_major: str = "K"
    a_negate: bool = False
    b_negate: bool = False
    sparse: bool = False
    saturate: bool = False
    scale_format: str = ""
    a_scale_id: int = 0
    b_scale_id: int = 0
    sparsity_id: int = 0
    max_shift: int = 0
    scale_layout: int = 0

    @property
    def element_bits(self) -> int:
        return KINDS[self.kind][1]

    @property
    def container(self) -> int:
        """Bits of the container of a narrow element in shared memory (`decode_elements`), 0 where types are packed."""
        return 8 if self.kind in ("f8f6f4", "mxf8f6f4") else 0

    @property
    def block_scaled(self) -> bool:
        return KINDS[self.kind][3]


def _fields(value: int, kind: str, arch: str) -> tuple[int, int]:
    """(K, B format code)."""
    _, bits, base, scaled = KINDS[kind]
    new = arch.startswith("sm_107")
    code = value >> 10 & (3 if bits == 4 else 7)
    if bits == 4:
        mode = value >> 31 & 1 | (value >> 3 & 1) << 1
        known = {0: 64, 1: 96, 2: 128} if new else {0: 64, 1: 96} if arch.startswith("sm_103") else {0: 64}
        return known.get(mode, 0), code
    bit = 31 if scaled else 29
    wide = new and bits == 8 and value >> bit & 1
    return base * (2 if wide else 1), code


def decode_instruction(value: int, kind: str, arch: str = "sm_100a") -> InstructionDescriptor:
    """`kind` without "kind::". Sparse instructions double K; K is 0 where the target does not define its code."""
    formats, _, _, scaled = KINDS[kind]
    k, b_code = _fields(value, kind, arch)
    a_code = value >> 7 & 7
    sparse = bool(value >> 2 & 1)
    common = {
        "kind": kind,
        "n": (value >> 17 & 63) * 8,
        "k": k * 2 if sparse else k,
        "a_format": formats.get(a_code, f"invalid{a_code}"),
        "b_format": formats.get(b_code, f"invalid{b_code}"),
        "a_major": "MN" if value >> 15 & 1 else "K",
        "b_major": "MN" if value >> 16 & 1 else "K",
        "a_negate": bool(value >> 13 & 1),
        "b_negate": bool(value >> 14 & 1),
        "sparse": sparse,
        "sparsity_id": value & 3,
    }
    if scaled:
        new = arch.startswith("sm_107")
        scale = value >> 23 & (3 if new else 1)
        return InstructionDescriptor(
            m=(value >> 27 & 3) * 128,
            accumulator="f32",
            scale_format=_SCALES.get(scale, f"invalid{scale}"),
            a_scale_id=value >> 29 & 3,
            b_scale_id=value >> 4 & 3,
            scale_layout=value >> 26 & 1 if new else 0,
            **common,  # type: ignore[arg-type]
        )
    accumulator = value >> 4 & 3
    return InstructionDescriptor(
        m=(value >> 24 & 31) * 16,
        accumulator=_ACCUMULATORS.get(accumulator, f"invalid{accumulator}"),
        saturate=bool(value >> 3 & 1),
        max_shift=value >> 30 & 3,
        **common,  # type: ignore[arg-type]
    )


def encode_instruction(desc: InstructionDescriptor, arch: str = "sm_100a") -> int:
    """The inverse of `decode_instruction` for defined formats."""
    formats, bits, base, scaled = KINDS[desc.kind]
    code = {name: c for c, name in formats.items()}
    k = desc.k // 2 if desc.sparse else desc.k
    value = (
        desc.sparsity_id
        | int(desc.sparse) << 2
        | code[desc.a_format] << 7
        | code[desc.b_format] << 10
        | int(desc.a_negate) << 13
        | int(desc.b_negate) << 14
        | int(desc.a_major == "MN") << 15
        | int(desc.b_major == "MN") << 16
        | desc.n // 8 << 17
    )
    if scaled:
        scale = next(c for c, name in _SCALES.items() if name == desc.scale_format)
        value |= (
            desc.b_scale_id << 4 | scale << 23 | desc.scale_layout << 26 | desc.m // 128 << 27 | desc.a_scale_id << 29
        )
        if bits == 4:
            mode = {64: 0, 96: 1, 128: 2}[k]
            return value | (mode & 1) << 31 | (mode >> 1) << 3
        return value | int(k > base) << 31
    accumulator = next(c for c, name in _ACCUMULATORS.items() if name == desc.accumulator)
    return (
        value
        | int(desc.saturate) << 3
        | accumulator << 4
        | desc.m // 16 << 24
        | int(k > base) << 29
        | desc.max_shift << 30
    )


def _shape_problem(desc: InstructionDescriptor, cta_group: int, ws: bool) -> str:
    """M and N by kind and CTA group (ISA Table "tcgen05 shapes")."""
    m, n = desc.m, desc.n
    if ws:
        legal = m in (32, 64, 128) and n in (64, 128, 256)
    elif desc.block_scaled:
        legal = m in (128, 128 * cta_group)
        legal = legal and n % (8 * cta_group) == 0 and 8 * cta_group <= n <= 256
    elif cta_group == 1 and desc.kind == "i8":
        legal = m in (64, 128) and 8 <= n <= 256 and (n % 16 == 0 or (m == 64 and n in (8, 24)))
    elif cta_group == 1:
        legal = m in (64, 128) and n % 8 == 0 and 8 <= n <= 256
    else:
        step = 32 if desc.kind == "i8" else 16
        legal = m in (128, 256) and n % step == 0 and step <= n <= 256
    return "" if legal else f"shape M={m} N={n} is not defined for kind::{desc.kind}, cta_group::{cta_group}"


def _scale_problem(desc: InstructionDescriptor, vector: int) -> str:
    """Scale-factor ids by the factors per row (ISA 9.7.16.10.7.2); `vector` is the block size."""
    vector = vector // 2 if desc.sparse else vector
    legal = {16: (0,), 32: (0, 2)}[vector] if desc.element_bits == 4 else (0, 1, 2, 3)
    if desc.k == 96:
        legal = (0, 2) if vector == 16 else (0, 1, 2, 3)
    wrong = [i for i in (desc.a_scale_id, desc.b_scale_id) if i not in legal]
    if not wrong:
        return ""
    return f"scale factor id {wrong[0]} is not defined for blocks of {vector} and K={desc.k}"


def instruction_problems(
    desc: InstructionDescriptor, cta_group: int = 1, ws: bool = False, vector: int = 0
) -> list[str]:
    """Why the descriptor is illegal (empty: legal). `vector`: elements per scale factor, 0 without scaling."""
    problems = [
        f"format code {f[7:]} is not defined"
        for f in (desc.a_format, desc.b_format, desc.accumulator, desc.scale_format)
        if f.startswith("invalid")
    ]
    if desc.k == 0:
        problems.append("undefined K code for this target")
    elif vector and desc.block_scaled and _scale_problem(desc, vector):
        problems.append(_scale_problem(desc, vector))
    if desc.k == 96 and cta_group == 2 and desc.m != 256:
        problems.append("K=96 of a CTA pair needs M=256")
    if desc.sparse and desc.sparsity_id > (1 if desc.element_bits >= 16 else 0):
        problems.append(f"sparsity selector {desc.sparsity_id} is not defined for kind::{desc.kind}")
    if desc.sparse and desc.k == 192:
        problems.append("K=96 has no sparse form")
    if desc.sparse and ws and desc.n == 256:
        problems.append("a sparse .ws instruction has N of 64 or 128")
    shape = _shape_problem(desc, cta_group, ws)
    if shape:
        problems.append(shape)
    if desc.element_bits == 4 and "MN" in (desc.a_major, desc.b_major):
        problems.append(f"kind::{desc.kind} has no MN-major operands")
    for major, form in ((desc.a_major, desc.a_format), (desc.b_major, desc.b_format)):
        if major == "MN" and form in ("e2m3", "e3m2", "e2m1"):
            problems.append(f"MN-major operands of {form} do not exist")
    if desc.b_major == "MN" and desc.element_bits == 8 and desc.n % (16 * cta_group):
        problems.append(f"8-bit MN-major B needs N in steps of {16 * cta_group}")
    if desc.kind == "i8" and (desc.a_negate or desc.b_negate):
        problems.append("kind::i8 cannot negate")
    if desc.kind == "i8" and desc.accumulator != "s32":
        problems.append("kind::i8 accumulates in s32")
    if desc.kind in ("f16", "f8f6f4") and desc.accumulator not in ("f16", "f32"):
        problems.append(f"kind::{desc.kind} accumulates in f16 or f32")
    if desc.kind == "tf32" and desc.accumulator != "f32":
        problems.append("kind::tf32 accumulates in f32")
    if desc.kind == "f16" and desc.accumulator == "f16" and "bf16" in (desc.a_format, desc.b_format):
        problems.append("bf16 operands accumulate in f32")
    if desc.kind in ("mxf8f6f4", "mxf4") and desc.scale_format != "ue8m0":
        problems.append(f"kind::{desc.kind} scales with ue8m0")
    return problems

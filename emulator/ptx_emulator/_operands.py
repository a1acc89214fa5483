"""Operands, instructions and entries: what the parser makes and the translator reads (PTX ISA 9.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ._lexer import Imm

__all__ = ["Addr", "Entry", "Imm", "Instruction", "Label", "Module", "Operand", "Pair", "Param", "Reg", "Sink", "Special",
           "Variable", "Vec"]  # fmt: skip


class Reg(NamedTuple):
    """Register: slot in the warp's register file, declared type; `negated` for `!p` operands."""

    name: str
    slot: int
    type: str
    negated: bool = False


class Special(NamedTuple):
    """Special register, without the percent sign: "tid.x"."""

    name: str


class Variable(NamedTuple):
    """Address of a declared variable: space is "shared", "param", "global", "local" or "const"."""

    name: str
    space: str
    offset: int


class Label(NamedTuple):
    name: str
    target: int


class Addr(NamedTuple):
    """[base + offset]; `extra` holds the coordinates or further operands inside the brackets."""

    base: Reg | Imm | Variable
    offset: int
    extra: tuple[Operand, ...] = ()


class Vec(NamedTuple):
    items: tuple[Operand, ...]


class Pair(NamedTuple):
    """`d|p` destinations."""

    first: Operand
    second: Operand


class Sink(NamedTuple):
    """The `_` operand."""


Operand: TypeAlias = Reg | Imm | Special | Variable | Label | Addr | Vec | Pair | Sink


@dataclass(frozen=True)
class Instruction:
    """One instruction; `opcode` is the root ("ld"), `modifiers` what follows it, dot by dot."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: Reg | None
    line: int
    loc: tuple[str, int] | None = None

    @property
    def op(self) -> str:
        return ".".join((self.opcode, *self.modifiers))

    @property
    def source(self) -> str:
        return f"{self.loc[0]}:{self.loc[1]}" if self.loc else ""


class Param(NamedTuple):
    name: str
    type: str
    offset: int
    size: int
    align: int


@dataclass
class Entry:
    """One kernel. `registers` lists the types by slot; `shared`/`local` map variables to (offset, size)."""

    name: str
    params: list[Param]
    registers: list[str] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    local: dict[str, tuple[int, int]] = field(default_factory=dict)
    static_shared: int = 0
    shared_align: int = 16
    local_bytes: int = 0
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass
class Module:
    """`constants` maps module-scope initialised variables to their bytes."""

    target: str
    version: str
    entries: dict[str, Entry]
    constants: dict[str, bytes] = field(default_factory=dict)

"""Tokens, constants and variable declarations of PTX text (PTX ISA 4.3 - 4.5, 5.4). Imported by the parser only."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from ._findings import EmulationError

__all__ = ["WIDTHS", "Declaration", "Imm", "Tokens", "align_up", "declaration", "integer", "literal"]

WIDTHS = {"pred": 0, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4,
          "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}  # fmt: skip


class Imm(NamedTuple):
    """Constant: an unbounded integer, or the bit pattern of a 0f/0d literal with its width in bytes."""

    value: int
    float_bytes: int = 0


TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"[^"\n]*"|0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|\d+\.\d+\w*|\d+U?
    |[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*|\.[A-Za-z_][\w$]*(?:(?:\.|::)[\w$]+)*|[{}()\[\],;:@!|+\-<>=*&~^%/?]|\n""",
    re.X | re.S,
)


class Tokens:
    """Token stream with the line of every word; comments and blank space are gone."""

    def __init__(self, text: str) -> None:
        self.items: list[tuple[str, int]] = []
        line, end = 1, 0
        for match in TOKEN.finditer(text):
            gap = text[end : match.start()]
            if gap.strip():
                raise EmulationError(f"PTX line {line}: cannot read {gap.strip()[:40]!r}")
            end = match.end()
            word = match.group()
            if word == "\n":
                line += 1
            elif word.startswith(("//", "/*")):
                line += word.count("\n")
            else:
                self.items.append((word, line))
        self.at = 0

    def peek(self, ahead: int = 0) -> str:
        return self.items[self.at + ahead][0] if self.at + ahead < len(self.items) else ""

    @property
    def line(self) -> int:
        return self.items[min(self.at, len(self.items) - 1)][1] if self.items else 0

    def next(self) -> str:
        if self.at >= len(self.items):
            raise EmulationError("PTX ends inside a statement")
        self.at += 1
        return self.items[self.at - 1][0]

    def expect(self, word: str) -> None:
        line, got = self.line, self.next()
        if got != word:
            raise EmulationError(f"PTX line {line}: expected {word!r}, found {got!r}")

    def skip_block(self) -> None:
        """Pass over `{ ... }`."""
        self.expect("{")
        depth = 1
        while depth:
            depth += {"{": 1, "}": -1}.get(self.next(), 0)

    def until(self, stop: str) -> list[str]:
        out: list[str] = []
        while (word := self.next()) != stop:
            out.append(word)
        return out


def integer(word: str) -> int:
    return int(word.rstrip("U"), 0) if not re.fullmatch(r"0[0-7]+U?", word) else int(word.rstrip("U"), 8)


def align_up(offset: int, to: int) -> int:
    return -(-offset // to) * to


class Declaration(NamedTuple):
    names: list[tuple[str, int]]
    type: str
    align: int
    values: list[int]
    unsized: bool


def declaration(tokens: Tokens) -> Declaration:
    """`.align 8 .b8 name[16], other[2][3] = {1, 2}` after the state space, up to `;`, `,` or `)` of a list."""
    align, kind, values, unsized = 0, "b8", [], False
    vector, pointer = 1, False
    while tokens.peek().startswith("."):
        word = tokens.next()
        for part in word[1:].split("."):
            if part == "align":
                value = integer(tokens.next())
                align = align if pointer else value  # after .ptr it is that of what the parameter points to
            elif part in ("v2", "v4"):
                vector = int(part[1:])
            elif part in WIDTHS:
                kind = part
            elif part == "ptr":
                pointer = True
            elif part not in ("global", "const", "shared", "local", "param", "u64", "attribute", "unified", "texref"):
                raise EmulationError(f"PTX line {tokens.line}: cannot read declaration part .{part}")
    names = []
    while True:
        name, count = tokens.next(), 1
        while tokens.peek() == "[":
            inside = tokens.next() and tokens.until("]")
            unsized |= not inside
            count *= integer(inside[0]) if inside else 0
        if tokens.peek() == "=":
            tokens.next()
            depth = 0
            while tokens.peek() != ";" and not (depth == 0 and tokens.peek() == ","):
                word = tokens.next()
                depth += {"{": 1, "}": -1}.get(word, 0)
                if re.match(r"\d", word):
                    values.append(literal(word).value)
        names.append((name, count * WIDTHS[kind] * vector))
        if tokens.peek() != "," or tokens.peek(1).startswith("."):
            return Declaration(names, kind, align or WIDTHS[kind] * vector or 1, values, unsized)
        tokens.next()


def literal(word: str) -> Imm:
    if word[:2] in ("0f", "0F"):
        return Imm(int(word[2:], 16), 4)
    if word[:2] in ("0d", "0D"):
        return Imm(int(word[2:], 16), 8)
    if "." in word:
        return Imm(struct.unpack("<Q", struct.pack("<d", float(word)))[0], 8)
    return Imm(integer(word))

"""Signatures of entries and device functions, and the operands of a call (PTX ISA 5.1.6, 7.1, 9.7.12.5).

Contract: `read_function` reads a .func up to its body, which the parser reads again at every call. Imported by the parser.
"""

from __future__ import annotations

from typing import NamedTuple

from ._findings import EmulationError, UnsupportedError
from ._lexer import Tokens, align_up, declaration, integer
from ._operands import Entry, Instruction, Label, Operand, Param, Reg, Vec

__all__ = ["Function", "read_entry", "read_function", "split_call"]


class Function(NamedTuple):
    """A device function with a body: names of its return and input parameters, first token of the body."""

    name: str
    returns: tuple[str, ...]
    parameters: tuple[str, ...]
    start: int


def _params(tokens: Tokens) -> list[Param]:
    params: list[Param] = []
    tokens.expect("(")
    offset = 0
    while tokens.peek() != ")":
        if tokens.peek() == ",":
            tokens.next()
            continue
        if tokens.peek().startswith(".param"):
            word = tokens.next()
            if word != ".param":  # ".param.align" joined by the lexer
                tokens.at -= 1
                tokens.items[tokens.at] = (word[len(".param") :], tokens.items[tokens.at][1])
        declared = declaration(tokens)
        name, size = declared.names[0]
        offset = align_up(offset, declared.align)
        params.append(Param(name, declared.type, offset, size, declared.align))
        offset += size
    tokens.next()
    return params


def read_entry(tokens: Tokens) -> Entry:
    """Name, parameters and directives of an entry; the body is left for later."""
    entry = Entry(tokens.next(), [])
    entry.params = _params(tokens) if tokens.peek() == "(" else []
    while tokens.peek() != "{":
        directive, values = tokens.next()[1:], []
        while tokens.peek() != "{" and not tokens.peek().startswith("."):
            word = tokens.next()
            if word[0].isdigit():
                values.append(integer(word))
        entry.directives[directive] = tuple(values)
    return entry


def read_function(tokens: Tokens) -> Function | None:
    """The function behind `.func`, or None for a declaration; the tokens after it are next."""
    line = tokens.line
    returns = _params(tokens) if tokens.peek() == "(" else []
    name = tokens.next()
    parameters = _params(tokens) if tokens.peek() == "(" else []
    while tokens.peek() not in ("{", ";", ""):
        tokens.next()
    if tokens.peek() == ";":
        tokens.next()
        return None
    if tokens.peek() == "":
        raise EmulationError(f"PTX line {line}: function {name} has no end")
    start = tokens.at
    tokens.skip_block()
    return Function(name, tuple(p.name for p in returns), tuple(p.name for p in parameters), start)


def split_call(instr: Instruction) -> tuple[tuple[Operand, ...], str, tuple[Operand, ...]]:
    """(return operands, function name, arguments) of `call{.uni} (r), name, (a, ...)`."""
    operands = list(instr.operands)
    returns = operands.pop(0) if operands and isinstance(operands[0], Vec) else Vec(())
    if not operands or isinstance(operands[0], Reg) or not isinstance(operands[0], Label):
        raise UnsupportedError(instr.op, instr.line, "indirect call")
    name = operands.pop(0)
    arguments = operands.pop(0) if operands and isinstance(operands[0], Vec) else Vec(())
    assert isinstance(returns, Vec)
    assert isinstance(name, Label)
    assert isinstance(arguments, Vec)
    return returns.items, name.name, arguments.items

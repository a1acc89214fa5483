"""PTX text to instructions: lexical scopes, register slots, labels, parameters, shared variables, source locations.

Contract: `parse(text)` reads everything that the public CuTe DSL kernels emit (PTX ISA 4 "Syntax", 5 "State spaces",
9.1 "Instruction format") and resolves every name: a register operand carries the slot of its register, a label
operand the index of its instruction. What it cannot read is an `EmulationError` with the line. Imported by the
translator and the grid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ._findings import EmulationError
from ._lexer import WIDTHS, Imm, Tokens, align_up, declaration, integer, literal
from ._operands import (
    Addr,
    Entry,
    Instruction,
    Label,
    Module,
    Operand,
    Pair,
    Param,
    Reg,
    Sink,
    Special,
    Variable,
    Vec,
)  # fmt: skip

__all__ = ["WIDTHS", "Addr", "Entry", "Imm", "Instruction", "Label", "Module", "Operand", "Pair", "Param", "Reg", "Sink",
           "Special", "Variable", "Vec", "parse"]  # fmt: skip

SPECIAL = frozenset(
    [
        "tid",
        "ntid",
        "laneid",
        "warpid",
        "nwarpid",
        "ctaid",
        "nctaid",
        "smid",
        "nsmid",
        "gridid",
        "is_explicit_cluster",
        "clusterid",
        "nclusterid",
        "cluster_ctaid",
        "cluster_nctaid",
        "cluster_ctarank",
        "cluster_nctarank",
        "lanemask_eq",
        "lanemask_le",
        "lanemask_lt",
        "lanemask_ge",
        "lanemask_gt",
        "clock",
        "clock_hi",
        "clock64",
        "globaltimer",
        "globaltimer_lo",
        "globaltimer_hi",
        "total_smem_size",
        "dynamic_smem_size",
        "aggr_smem_size",
        "current_graph_exec",
        "envreg0",
    ]
)


class _Body:
    """Parses one entry's `{ ... }` into its instructions."""

    def __init__(self, tokens: Tokens, entry: Entry, module: dict[str, Variable], files: dict[int, str]) -> None:
        self.tokens, self.entry, self.files = tokens, entry, files
        self.scopes: list[dict[str, Reg | Variable]] = [dict(module)]
        self.scopes[0].update({p.name: Variable(p.name, "param", p.offset) for p in entry.params})
        self.label_scopes: list[int] = [0]
        self.serial = 0
        self.loc: tuple[int, int] | None = None
        self.raw: list[tuple[Instruction, tuple[int, ...]]] = []

    def run(self) -> None:
        self.tokens.expect("{")
        depth = 1
        while depth:
            word = self.tokens.peek()
            if word == "{":
                self.tokens.next()
                depth += 1
                self.serial += 1
                self.scopes.append({})
                self.label_scopes.append(self.serial)
            elif word == "}":
                self.tokens.next()
                depth -= 1
                self.scopes.pop()
                self.label_scopes.pop()
            elif word == ";":
                self.tokens.next()
            elif word.startswith("."):
                self._directive()
            elif self.tokens.peek(1) == ":":
                self.entry.labels[self._label_name(word, self.label_scopes[-1])] = len(self.raw)
                self.tokens.next()
                self.tokens.next()
            else:
                self._instruction()
        self.entry.instructions = [self._link(i, scopes) for i, scopes in self.raw]

    @staticmethod
    def _label_name(name: str, scope: int) -> str:
        return f"{name}#{scope}" if scope else name

    def _link(self, instr: Instruction, scopes: tuple[int, ...]) -> Instruction:
        """Resolve label operands in the innermost scope that declares them."""
        if not any(isinstance(o, Label) for o in instr.operands):
            return instr
        out: list[Operand] = []
        for o in instr.operands:
            if isinstance(o, Label):
                for scope in reversed(scopes):
                    target = self.entry.labels.get(self._label_name(o.name, scope))
                    if target is not None:
                        break
                else:
                    raise EmulationError(f"PTX line {instr.line}: unknown name {o.name!r}")
                out.append(Label(o.name, target))
            else:
                out.append(o)
        return Instruction(instr.opcode, instr.modifiers, tuple(out), instr.predicate, instr.line, instr.loc)

    def _directive(self) -> None:
        tokens, word = self.tokens, self.tokens.next()
        head = word[1:].split(".")[0]
        if head == "reg":
            kind = word[1:].split(".")[1] if "." in word[1:] else tokens.next()[1:]
            kind = kind.split(".")[-1]
            for item in "\0".join(tokens.until(";")).split("\0,\0"):
                parts = item.split("\0")
                count = int(parts[2]) if len(parts) > 1 and parts[1] == "<" else None
                for name in [parts[0]] if count is None else [f"{parts[0]}{i}" for i in range(count)]:
                    self.scopes[-1][name] = Reg(name, len(self.entry.registers), kind)
                    self.entry.registers.append(kind)
        elif head == "loc":
            line = tokens.line
            self.loc = (int(tokens.next()), int(tokens.next()))
            while tokens.line == line:
                tokens.next()
        elif head in ("shared", "local"):
            tokens.at -= 1
            space = head
            declared = declaration(tokens)
            tokens.expect(";")
            table = self.entry.shared if space == "shared" else self.entry.local
            for name, size in declared.names:
                base = self.entry.static_shared if space == "shared" else self.entry.local_bytes
                offset = align_up(base, declared.align)
                table[name] = (offset, size)
                self.scopes[-1][name] = Variable(name, space, offset)
                if space == "shared":
                    self.entry.static_shared = offset + size
                    self.entry.shared_align = max(self.entry.shared_align, declared.align)
                else:
                    self.entry.local_bytes = offset + size
        elif head in ("pragma", "branchtargets", "callprototype"):
            tokens.until(";")
        else:
            raise EmulationError(f"PTX line {tokens.line}: directive {word} is not covered")

    def _instruction(self) -> None:
        tokens, predicate = self.tokens, None
        line = tokens.line
        if tokens.peek() == "@":
            tokens.next()
            negated = tokens.peek() == "!"
            if negated:
                tokens.next()
            found = self._name(tokens.next())
            if not isinstance(found, Reg):
                raise EmulationError(f"PTX line {line}: the guard is not a register")
            predicate = found._replace(negated=negated)
        words = tokens.next().replace("::", "\1").split(".")
        operands: list[Operand] = []
        while tokens.peek() != ";":
            operands.append(self._operand())
            if tokens.peek() == ",":
                tokens.next()
        tokens.next()
        loc = (self.files.get(self.loc[0], f"file {self.loc[0]}"), self.loc[1]) if self.loc else None
        root, *modifiers = (w.replace("\1", "::") for w in words)
        instr = Instruction(root, tuple(modifiers), tuple(operands), predicate, line, loc)
        self.raw.append((instr, tuple(self.label_scopes)))

    def _name(self, word: str) -> Operand:
        for scope in reversed(self.scopes):
            if word in scope:
                return scope[word]
        if word == "_":
            return Sink()
        if word[0] == "%" and word[1:].split(".", maxsplit=1)[0] in SPECIAL:
            return Special(word[1:])
        return Label(word, -1)

    def _operand(self) -> Operand:
        tokens, word = self.tokens, self.tokens.next()
        if word == "{":
            items = []
            while tokens.peek() != "}":
                items.append(self._operand())
                if tokens.peek() == ",":
                    tokens.next()
            tokens.next()
            return Vec(tuple(items))
        if word == "[":
            return self._address()
        if word == "!":
            found = self._operand()
            if isinstance(found, Reg):
                return found._replace(negated=True)
            raise EmulationError(f"PTX line {tokens.line}: ! needs a predicate")
        if word == "-":
            value = literal(tokens.next())
            if value.float_bytes:
                return Imm(value.value ^ (1 << (8 * value.float_bytes - 1)), value.float_bytes)
            return Imm(-value.value)
        if word == "(":
            return Vec(tuple(self._list(")")))
        if word[0].isdigit():
            return literal(word)
        first = self._name(word)
        if isinstance(first, Variable) and tokens.peek() == "+":
            tokens.next()
            return first._replace(offset=first.offset + integer(tokens.next()))
        if tokens.peek() == "|":
            tokens.next()
            return Pair(first, self._operand())
        return first

    def _list(self, stop: str) -> Iterator[Operand]:
        while self.tokens.peek() != stop:
            yield self._operand()
            if self.tokens.peek() == ",":
                self.tokens.next()
        self.tokens.next()

    def _address(self) -> Addr:
        tokens = self.tokens
        word = tokens.next()
        base = literal(word) if word[0].isdigit() else self._name(word)
        offset = 0
        while tokens.peek() in ("+", "-"):
            sign = -1 if tokens.next() == "-" else 1
            if tokens.peek() == "-":
                tokens.next()
                sign = -sign
            offset += sign * integer(tokens.next())
        extra: list[Operand] = []
        while tokens.peek() == ",":
            tokens.next()
            extra.append(self._operand())
        tokens.expect("]")
        if not isinstance(base, (Reg, Imm, Variable)):
            raise EmulationError(f"PTX line {tokens.line}: unknown name in address: {word!r}")
        return Addr(base, offset, tuple(extra))


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


def _external(tokens: Tokens) -> bool:
    """A declaration without a body, such as vprintf's; a call of it is refused as an instruction."""
    ahead = 0
    while tokens.peek(ahead) not in ("{", ";", ""):
        ahead += 1
    return tokens.peek(ahead) == ";"


def parse(text: str) -> Module:
    """Parse a PTX module. Functions other than entries are refused when they have a body."""
    tokens = Tokens(text)
    files: dict[int, str] = {}
    for match in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M):
        files[int(match[1])] = match[2]
    module = Module("", "", {})
    names: dict[str, Variable] = {}
    dynamic: list[str] = []
    shared: dict[str, tuple[int, int, int]] = {}
    while tokens.at < len(tokens.items):
        word = tokens.next()
        if word == ".version":
            module.version = tokens.next()
        elif word == ".target":
            module.target = tokens.next()
            while tokens.peek() == ",":
                tokens.next()
                tokens.next()
        elif word == ".address_size":
            tokens.next()
        elif word in (".visible", ".extern", ".weak"):
            continue
        elif word == ".file":
            line = tokens.line
            while tokens.at < len(tokens.items) and tokens.line == line:
                tokens.next()
        elif word == ".section":
            tokens.until("{")
            tokens.until("}")
        elif word == ".entry":
            entry = Entry(tokens.next(), [])
            entry.params = _params(tokens) if tokens.peek() == "(" else []
            while tokens.peek() != "{":
                directive = tokens.next()[1:]
                values = []
                while tokens.peek() != "{" and not tokens.peek().startswith("."):
                    word = tokens.next()
                    if word[0].isdigit():
                        values.append(integer(word))
                entry.directives[directive] = tuple(values)
            for name, (size, align, _) in shared.items():
                offset = align_up(entry.static_shared, align)
                entry.shared[name] = (offset, size)
                entry.static_shared, entry.shared_align = offset + size, max(entry.shared_align, align)
                names[name] = Variable(name, "shared", offset)
            body = _Body(tokens, entry, names, files)
            body.run()
            # the dynamic window starts behind the static variables, aligned to the largest request
            for name in dynamic:
                entry.shared[name] = (-1, 0)
            module.entries[entry.name] = entry
        elif word == ".func" and _external(tokens):
            tokens.until(";")
        elif word == ".func":
            raise EmulationError(f"PTX line {tokens.line}: device functions are not covered")
        elif word.split(".")[1] in ("shared", "global", "const"):
            space = word.split(".")[1]
            tokens.at -= 1
            declared = declaration(tokens)
            tokens.expect(";")
            for name, size in declared.names:
                if space == "shared" and declared.unsized:
                    dynamic.append(name)
                    names[name] = Variable(name, "shared", -1)
                elif space == "shared":
                    shared[name] = (size, declared.align, 0)
                else:
                    width = WIDTHS[declared.type]
                    raw = b"".join((v % (1 << 8 * width)).to_bytes(width, "little") for v in declared.values)
                    module.constants[name] = raw.ljust(size, b"\0")
                    names[name] = Variable(name, space, 0)
        else:
            raise EmulationError(f"PTX line {tokens.line}: cannot read {word!r} at module scope")
    return module

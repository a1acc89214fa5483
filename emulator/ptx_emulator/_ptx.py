"""PTX text to instructions: lexical scopes, register slots, labels, parameters, shared variables, source locations.

Contract: `parse(text)` reads everything that the public CuTe DSL kernels emit (PTX ISA 4 "Syntax", 5 "State spaces",
9.1 "Instruction format") and resolves every name: a register operand carries the slot of its register, a label
operand the index of its instruction. What it cannot read is an `EmulationError` with the line. Imported by the
translator and the grid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ._findings import EmulationError
from ._functions import Function, read_entry, read_function, split_call
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

SPECIAL = frozenset((
    "tid", "ntid", "laneid", "warpid", "nwarpid", "ctaid", "nctaid", "smid", "nsmid", "gridid", "is_explicit_cluster",
    "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid", "cluster_ctarank", "cluster_nctarank",
    "lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt", "clock", "clock_hi", "clock64",
    "globaltimer", "globaltimer_lo", "globaltimer_hi", "total_smem_size", "dynamic_smem_size", "aggr_smem_size",
    "current_graph_exec", "envreg0",
))  # fmt: skip


class _Body:
    """Parses one entry's `{ ... }` into its instructions. Calls of device functions are replaced by their bodies."""

    def __init__(self, tokens: Tokens, entry: Entry, module: dict[str, Variable], files: dict[int, str],
                 functions: dict[str, Function]) -> None:  # fmt: skip
        self.tokens, self.entry, self.files, self.functions = tokens, entry, files, functions
        self.module = module
        self.calling: list[str] = []
        self.after: Label | None = None  # where ret goes to in a device function
        self.tables: dict[str, list[str]] = {}  # .branchtargets by their label
        self.last_label = ""
        self.scopes: list[dict[str, Reg | Variable]] = [dict(module)]
        self.scopes[0].update({p.name: Variable(p.name, "param", p.offset) for p in entry.params})
        self.label_scopes: list[int] = [0]
        self.serial = 0
        self.loc: tuple[int, int] | None = None
        self.raw: list[tuple[Instruction, tuple[int, ...]]] = []

    def run(self) -> None:
        self._block()
        self.entry.instructions = [self._link(i, scopes) for i, scopes in self.raw]

    def _block(self) -> None:
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
                self.last_label = self.tokens.next()
                self.tokens.next()
            else:
                self._instruction()

    @staticmethod
    def _label_name(name: str, scope: int) -> str:
        return f"{name}#{scope}" if scope else name

    def _link(self, instr: Instruction, scopes: tuple[int, ...]) -> Instruction:
        """Resolve label operands in the innermost scope that declares them."""
        if instr.opcode == "call" or not any(isinstance(o, Label) for o in instr.operands):
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
        elif head in ("shared", "local", "param"):  # parameters of a call are kept in local memory
            tokens.at -= 1
            space = "shared" if head == "shared" else "local"
            declared = declaration(tokens)
            tokens.expect(";")
            table = self.entry.shared if space == "shared" else self.entry.local
            for plain, size in declared.names:
                name = f"{self.calling[-1]}.{plain}" if self.calling and space == "shared" else plain
                if name in table and space == "shared" and self.calling:  # of a function that is called again
                    self.scopes[-1][plain] = Variable(name, space, table[name][0])
                    continue
                base = self.entry.static_shared if space == "shared" else self.entry.local_bytes
                offset = align_up(base, declared.align)
                table[name] = (offset, size)
                self.scopes[-1][plain] = Variable(name, space, offset)
                if space == "shared":
                    self.entry.static_shared = offset + size
                    self.entry.shared_align = max(self.entry.shared_align, declared.align)
                else:
                    self.entry.local_bytes = offset + size
        elif head == "branchtargets":
            self.tables[self.last_label] = [w for w in tokens.until(";") if w != ","]
        elif head in ("pragma", "callprototype"):
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
        if root == "call":
            self._call(instr)
            return
        if root == "brx":
            self._branch_table(instr)
            return
        if root == "ret" and self.after is not None:
            instr = replace(instr, opcode="bra", operands=(self.after,))
        elif root in ("ld", "st") and "param" in modifiers and _base(instr) == "local":
            instr = replace(instr, modifiers=tuple("local" if m == "param" else m for m in modifiers))
        self._emit(instr)

    def _emit(self, instr: Instruction) -> None:
        self.raw.append((instr, tuple(self.label_scopes)))

    def _call(self, instr: Instruction) -> None:
        """A call of a function with a body becomes the body; others stay calls, whose translator refuses most of them."""
        returns, name, arguments = split_call(instr)
        function = self.functions.get(name)
        if function is None:
            self._emit(replace(instr, operands=(Label(name, -2), Vec(returns), Vec(arguments))))
            if name == "__assertfail":
                self._emit(replace(instr, opcode="exit", modifiers=(), operands=()))
            return
        if name in self.calling:
            raise EmulationError(f"PTX line {instr.line}: recursive calls are not covered ({name})")
        formal, actual = (*function.returns, *function.parameters), (*returns, *arguments)
        if len(formal) != len(actual) or not all(isinstance(a, Variable) for a in actual):
            raise EmulationError(f"PTX line {instr.line}: arguments of the call of {name} are not its .param variables")
        end = self._skip(instr)
        saved = self.scopes, self.label_scopes, self.after, self.loc, self.tokens.at
        bound = dict(zip(formal, actual, strict=True))
        self.scopes, self.after, self.tokens.at = [{**self.module, **bound}], end, function.start  # type: ignore[dict-item]
        self.label_scopes = [*self.label_scopes, self.serial]
        self.calling.append(name)
        self._block()
        self.calling.pop()
        self.entry.labels[self._label_name(end.name, saved[1][-1])] = len(self.raw)
        self.scopes, self.label_scopes, self.after, self.loc, self.tokens.at = saved

    def _skip(self, instr: Instruction) -> Label:
        """A new label for what follows `instr`, and the branch to it of the lanes that its guard leaves out."""
        self.serial += 1
        end = Label(f"$end{self.serial}", -1)
        if instr.predicate is not None:
            guard = instr.predicate._replace(negated=not instr.predicate.negated)
            self._emit(replace(instr, opcode="bra", modifiers=(), operands=(end,), predicate=guard))
        return end

    def _branch_table(self, instr: Instruction) -> None:
        """brx.idx becomes a comparison and a branch for every entry of its table; an index outside of it traps."""
        index, table = instr.operands[0], instr.operands[-1]
        if not isinstance(table, Label) or table.name not in self.tables:
            raise EmulationError(f"PTX line {instr.line}: brx.idx without a list of .branchtargets before it")
        end = self._skip(instr)
        hit = Reg("$brx", len(self.entry.registers), "pred")
        self.entry.registers.append("pred")
        plain = replace(instr, predicate=None)
        for number, name in enumerate(self.tables[table.name]):
            self._emit(replace(plain, opcode="setp", modifiers=("eq", "u32"), operands=(hit, index, Imm(number))))
            self._emit(replace(plain, opcode="bra", modifiers=(), operands=(Label(name, -1),), predicate=hit))
        self._emit(replace(plain, opcode="trap", modifiers=(), operands=()))
        self.entry.labels[self._label_name(end.name, self.label_scopes[-1])] = len(self.raw)

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


def _base(instr: Instruction) -> str:
    """State space of the variable that the address operand names, or ""."""
    for operand in instr.operands:
        if isinstance(operand, Addr) and isinstance(operand.base, Variable):
            return operand.base.space
    return ""


def parse(text: str) -> Module:
    """Parse a PTX module."""
    tokens = Tokens(text)
    files: dict[int, str] = {}
    for match in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M):
        files[int(match[1])] = match[2]
    module = Module("", "", {})
    names: dict[str, Variable] = {}
    dynamic: list[str] = []
    shared: dict[str, tuple[int, int, int]] = {}
    functions: dict[str, Function] = {}
    bodies: list[tuple[Entry, int, dict[str, Variable]]] = []
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
            entry = read_entry(tokens)
            for name, (size, align, _) in shared.items():
                offset = align_up(entry.static_shared, align)
                entry.shared[name] = (offset, size)
                entry.static_shared, entry.shared_align = offset + size, max(entry.shared_align, align)
                names[name] = Variable(name, "shared", offset)
            bodies.append((entry, tokens.at, dict(names)))
            tokens.skip_block()
        elif word == ".func":
            function = read_function(tokens)
            if function is not None:
                functions[function.name] = function
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
    for entry, start, visible in bodies:
        tokens.at = start
        _Body(tokens, entry, {**names, **visible}, files, functions).run()
        # the dynamic window starts behind the static variables, aligned to the largest request
        for name in dynamic:
            entry.shared[name] = (-1, 0)
        module.entries[entry.name] = entry
    return module

"""Calls of functions that have no body in the module: vprintf and __assertfail of the device runtime.

Contract: vprintf prints to standard output, lane by lane (`launch` shows what its child process printed on standard
error). A failed assertion is an `assertion` finding, and its lanes exit. Any other function is an `UnsupportedError`.
Sources: CUDA C++ Programming Guide, formatted output and assertion; a vprintf argument lies at a multiple of its size.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from .._findings import UnsupportedError
from .._ptx import Instruction, Label, Variable, Vec
from .._translate import Context, Run
from .memory import load_bytes, store_bytes

__all__ = ["TABLE"]

_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|z|j|t)?([diouxXfFeEgGaAcsp%])")
_LONGEST = 4096


def _text(w: Any, address: int, access: Any) -> str:
    """The zero-terminated string at a generic address."""
    out = bytearray()
    while len(out) < _LONGEST:
        byte = int(load_bytes("generic", w, np.array([address + len(out)]), 1, access)[0, 0])
        if not byte:
            break
        out.append(byte)
    return out.decode(errors="replace")


class _Arguments:
    """Arguments of one lane, read one after the other."""

    def __init__(self, w: Any, address: int, access: Any) -> None:
        self._w, self._at, self._access = w, address, access

    def take(self, size: int) -> bytes:
        self._at = -(-self._at // size) * size
        raw = load_bytes("generic", self._w, np.array([self._at]), size, self._access)
        self._at += size
        return bytes(raw)

    def integer(self, size: int, signed: bool = True) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)


def _format(template: str, arguments: _Arguments, w: Any, access: Any) -> str:
    def one(match: re.Match[str]) -> str:
        flags, width, precision, length, kind = match.groups()
        if kind == "%":
            return "%"
        width = str(arguments.integer(4)) if width == "*" else width or ""
        precision = str(arguments.integer(4)) if precision == "*" else precision
        form = f"%{flags}{width}" + ("" if precision is None else f".{precision}")
        size = 8 if length in ("l", "ll", "z", "j", "t") else 4
        if kind in "di":
            return (form + "d") % arguments.integer(size)
        if kind in "ouxX":
            return (form + ("d" if kind == "u" else kind)) % arguments.integer(size, False)
        if kind == "c":
            return (form + "c") % (arguments.integer(4) & 0xFF)
        if kind == "p":
            return f"0x{arguments.integer(8, False):x}"
        if kind == "s":
            return (form + "s") % _text(w, arguments.integer(8, False), access)
        value = float(np.frombuffer(arguments.take(8), np.float64)[0])
        return value.hex() if kind in "aA" else (form + kind) % value

    return _CONVERSION.sub(one, template)


def _lanes(w: Any) -> Any:
    """The active lanes, each the only active one meanwhile."""
    saved = w.mask
    for lane in np.flatnonzero(saved).tolist():
        w.mask = np.arange(32) == lane
        yield lane
    w.mask = saved


def _parameter(w: Any, variable: Variable, size: int, access: Any) -> int:
    raw = load_bytes("local", w, np.array([variable.offset]), size, access)
    return int.from_bytes(raw.tobytes(), "little")


def _print(instr: Instruction, returns: list[Variable], arguments: list[Variable]) -> Run:
    def run(w: Any) -> None:
        access, said = w.access(instr), []
        for _ in _lanes(w):
            template = _text(w, _parameter(w, arguments[0], 8, access), access)
            values = _Arguments(w, _parameter(w, arguments[1], 8, access), access)
            said.append(_format(template, values, w, access))
            if returns:
                store_bytes("local", w, np.array([returns[0].offset]), np.zeros((1, 4), np.uint8), access)
        sys.stdout.write("".join(said))
        sys.stdout.flush()

    return run


def _fail(instr: Instruction, arguments: list[Variable]) -> Run:
    def run(w: Any) -> None:
        access, found = w.access(instr), []
        for lane in _lanes(w):
            texts = [_text(w, _parameter(w, arguments[i], 8, access), access) for i in (0, 1, 3)]
            line = _parameter(w, arguments[2], 4, access)
            found.append((lane, f"{texts[1]}:{line}: {texts[2]}: assertion `{texts[0]}` failed"))
        lanes = ", ".join(str(lane) for lane, _ in found)
        w.machine.findings.add("assertion", f"{found[0][1]} in lanes {lanes}", instr, (w.name,), key=found[0][1])

    return run


def _call(instr: Instruction, ctx: Context) -> Run:
    name, returns, arguments = instr.operands
    assert isinstance(name, Label)
    lists = [[v for v in o.items if isinstance(v, Variable)] for o in (returns, arguments) if isinstance(o, Vec)]
    if name.name == "vprintf" and len(lists[1]) == 2:
        return _print(instr, lists[0], lists[1])
    if name.name == "__assertfail" and len(lists[1]) == 5:
        return _fail(instr, lists[1])
    raise UnsupportedError(instr.op, instr.line, f"{name.name} has no body in the module")


TABLE = {"call": _call}

"""Instructions to closures, once per launch: register slots, constants, special registers, the table of translators.

Contract: `translate(machine)` returns the code of the entry (one `Step` per instruction plus a final exit), the
template of the register file and the makers of its special registers. Constants and special registers are registers
that nothing writes, so a closure only ever indexes `warp.regs`. Each module of `_ops` maps opcode roots to
translators `translator(instr, ctx) -> closure(warp)`; a root that no table has is an `UnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ._findings import EmulationError, UnsupportedError
from ._memory import LOCAL_WINDOW, PARAM_WINDOW
from ._ptx import WIDTHS, Addr, Imm, Instruction, Label, Operand, Pair, Reg, Sink, Special, Variable, Vec
from ._warp import BRANCH, EXIT, LANES, NORMAL, Step

__all__ = ["DTYPES", "Context", "Translator", "translate", "type_of", "width_of"]

Run: TypeAlias = "Callable[[Any], Any]"
Translator: TypeAlias = "Callable[[Instruction, Context], Run]"
Array: TypeAlias = "npt.NDArray[Any]"

DTYPES: dict[str, Any] = {
    **dict.fromkeys(("b8", "u8", "s8"), np.uint8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), np.uint16),
    **dict.fromkeys(
        ("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32", "u16x2", "s16x2", "u8x4", "s8x4"), np.uint32
    ),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), np.uint64),
    "pred": np.bool_,
}
_BY_WIDTH: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def type_of(instr: Instruction) -> str:
    """The last type modifier of the instruction."""
    for word in reversed(instr.modifiers):
        if word in DTYPES or word == "b128":
            return word
    raise UnsupportedError(instr.op, instr.line, "no type")


def width_of(name: str) -> int:
    return WIDTHS.get(name, 0) or np.dtype(DTYPES[name]).itemsize


def _special(name: str, machine: Any) -> Callable[[Any, int], Any] | None:
    """Maker (cta, warp) -> lane values of a special register that never changes (PTX ISA 10)."""
    root, _, axis_name = name.partition(".")
    axis = "xyz".find(axis_name) if axis_name else 0
    cluster, grid = machine.cluster, machine.grid
    shape = [g // c for g, c in zip(grid, cluster, strict=True)]
    table: dict[str, Callable[[Any, int], Any]] = {
        "tid": lambda cta, warp: cta.thread_ids(warp)[axis],
        "ntid": lambda cta, warp: machine.block[axis],
        "ctaid": lambda cta, warp: cta.index[axis],
        "nctaid": lambda cta, warp: grid[axis],
        "laneid": lambda cta, warp: LANES,
        "warpid": lambda cta, warp: warp,
        "nwarpid": lambda cta, warp: -(-machine.threads // 32),
        "smid": lambda cta, warp: 0,
        "nsmid": lambda cta, warp: 1,
        "gridid": lambda cta, warp: 0,
        "is_explicit_cluster": lambda cta, warp: int(machine.cluster != (1, 1, 1)),
        "clusterid": lambda cta, warp: cta.index[axis] // cluster[axis],
        "nclusterid": lambda cta, warp: shape[axis],
        "cluster_ctaid": lambda cta, warp: cta.index[axis] % cluster[axis],
        "cluster_nctaid": lambda cta, warp: cluster[axis],
        "cluster_ctarank": lambda cta, warp: cta.rank,
        "cluster_nctarank": lambda cta, warp: cluster[0] * cluster[1] * cluster[2],
        "lanemask_eq": lambda cta, warp: 1 << LANES.astype(np.uint64),
        "lanemask_lt": lambda cta, warp: (1 << LANES.astype(np.uint64)) - 1,
        "lanemask_le": lambda cta, warp: (2 << LANES.astype(np.uint64)) - 1,
        "lanemask_gt": lambda cta, warp: 0xFFFFFFFF & ~((2 << LANES.astype(np.int64)) - 1),
        "lanemask_ge": lambda cta, warp: 0xFFFFFFFF & ~((1 << LANES.astype(np.int64)) - 1),
        "dynamic_smem_size": lambda cta, warp: machine.dynamic_smem,
        "total_smem_size": lambda cta, warp: machine.shared_bytes - 1024,
        "clock": lambda cta, warp: 0, "clock_hi": lambda cta, warp: 0, "clock64": lambda cta, warp: 0,
        "globaltimer": lambda cta, warp: 0, "globaltimer_lo": lambda cta, warp: 0, "globaltimer_hi": lambda cta, warp: 0,
    }  # fmt: skip
    return table.get(root)


class Context:
    """What a translator may ask for. Slots index `warp.regs`."""

    def __init__(self, machine: Any) -> None:
        self.machine, self.entry = machine, machine.entry
        self.template: list[Any] = []
        self.dtypes: list[Any] = []
        self.specials: list[tuple[int, Callable[[Any, int], Any]]] = []
        self._known: dict[Any, int] = {}
        self.watch: set[int] = set()  # registers of wgmma and tcgen05.ld, whose users are checked
        for kind in self.entry.registers:
            if kind == "b128":
                self._new(np.zeros((32, 2), np.uint64))
            else:
                self._new(np.zeros(32, DTYPES[kind]))

    def _new(self, value: Any) -> int:
        self.template.append(value)
        self.dtypes.append(value.dtype.type)
        return len(self.template) - 1

    def constant(self, value: int, dtype: Any) -> int:
        """Slot that holds `value` (modulo the width) in every lane."""
        if dtype is np.bool_:
            bits: Any = bool(value)
        else:
            bits = dtype(value % (1 << 8 * np.dtype(dtype).itemsize))
        key = (int(bits), dtype)
        if key not in self._known:
            array = np.full(32, bits, dtype)
            array.flags.writeable = False
            self._known[key] = self._new(array)
        return self._known[key]

    def made(self, key: Any, dtype: Any, make: Callable[[Any, int], Any]) -> int:
        """Slot filled per warp with `make(cta, warp)`."""
        if (key, dtype) not in self._known:
            slot = self._known[key, dtype] = self._new(np.zeros(32, dtype))
            self.specials.append((slot, lambda cta, warp: np.broadcast_to(
                np.asarray(make(cta, warp)), 32).astype(dtype)))  # fmt: skip
        return self._known[key, dtype]

    def slot(self, operand: Operand, dtype: Any, instr: Instruction) -> int:
        """Slot of a source operand; constants get `dtype`, registers keep their own."""
        if isinstance(operand, Reg):
            if operand.negated:
                raise UnsupportedError(instr.op, instr.line, "negated predicate source")
            return operand.slot
        if isinstance(operand, Imm):
            value = operand.value
            if operand.float_bytes == 8 and np.dtype(dtype).itemsize == 4:
                value = int(np.float32(np.uint64(value).view(np.float64)).view(np.uint32))
            return self.constant(value, dtype)
        if isinstance(operand, Sink):
            return self.constant(0, dtype)
        if isinstance(operand, Special):
            make = _special(operand.name, self.machine)
            if make is None:
                raise UnsupportedError("%" + operand.name, instr.line)
            return self.made(operand, dtype, make)
        if isinstance(operand, Variable):
            return self.variable(operand, dtype)
        raise UnsupportedError(instr.op, instr.line, f"operand {operand}")

    def variable(self, variable: Variable, dtype: Any) -> int:
        """Slot with the address of a variable."""
        machine, offset = self.machine, variable.offset
        if variable.space == "param":
            return self.constant(PARAM_WINDOW + offset if dtype is np.uint64 else offset, dtype)
        if variable.space == "local":
            return self.constant(LOCAL_WINDOW + offset if dtype is np.uint64 else offset, dtype)
        if variable.space in ("global", "const"):
            return self.constant(machine.constants[variable.name] + offset, np.uint64)
        start, _ = self.entry.shared[variable.name]
        base = machine.dynamic_base + offset + 1 if start < 0 else 1024 + offset
        return self.made(("shared", base), dtype, lambda cta, warp: cta.base + base)

    def predicate(self, operand: Operand, instr: Instruction) -> Run:
        """Reader of a predicate source, negation included."""
        if isinstance(operand, Reg) and operand.negated:
            slot = operand.slot
            return lambda w: ~w.regs[slot]
        slot = self.slot(operand, np.bool_, instr)
        return lambda w: w.regs[slot]

    def writer(self, operand: Operand, instr: Instruction) -> Callable[[Any, Array], None]:
        """Writer of a destination: casts to the register's width, keeps the lanes that are not active."""
        if isinstance(operand, Sink):
            return lambda w, value: None
        if not isinstance(operand, Reg):
            raise UnsupportedError(instr.op, instr.line, f"destination {operand}")
        slot, dtype = operand.slot, self.dtypes[operand.slot]

        def write(w: Any, value: Array) -> None:
            if value.dtype != dtype:
                value = value.astype(dtype)
            w.regs[slot] = value if w.full else np.where(w.mask, value, w.regs[slot])

        return write

    def address(self, operand: Operand, instr: Instruction) -> Callable[[Any], npt.NDArray[np.int64]]:
        """Per lane addresses of an [address] operand."""
        if not isinstance(operand, Addr):
            raise UnsupportedError(instr.op, instr.line, "needs an address")
        offset = operand.offset
        slot = self.slot(operand.base, np.uint64, instr)
        if offset:
            return lambda w: w.regs[slot].astype(np.int64) + offset
        return lambda w: w.regs[slot].astype(np.int64)

    def uniform(self, operand: Operand, dtype: Any, instr: Instruction) -> Callable[[Any], int]:
        """Value of the first active lane: for operands that the ISA requires to be the same in the warp."""
        slot = self.slot(operand, dtype, instr)
        return lambda w: int(w.regs[slot][w.lead])

    def uniform_address(self, operand: Operand, instr: Instruction) -> Callable[[Any], int]:
        if not isinstance(operand, Addr):
            raise UnsupportedError(instr.op, instr.line, "needs an address")
        offset, slot = operand.offset, self.slot(operand.base, np.uint64, instr)
        return lambda w: int(w.regs[slot][w.lead]) + offset

    def vector(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.items if isinstance(operand, Vec) else (operand,)

    def pair(self, operand: Operand, instr: Instruction) -> tuple[Operand, Operand]:
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())

    def require_warp(self, instr: Instruction) -> Callable[[Any], None]:
        """Check of .aligned: every live lane of the warp must be here."""
        add = self.machine.findings.add

        def check(w: Any) -> None:
            if not w.full:
                add("divergence", f"{instr.op} executed by {w.active} lanes of a diverged warp", instr, (w.name,))

        return check


def _control(instr: Instruction) -> tuple[int, int]:
    """Kind and target of control-flow instructions."""
    if instr.opcode == "bra":
        target = instr.operands[0]
        if not isinstance(target, Label):
            raise UnsupportedError(instr.op, instr.line, "indirect branch")
        return BRANCH, target.target
    if instr.opcode in ("ret", "exit"):
        return EXIT, 0
    return NORMAL, 0


def translate(machine: Any) -> tuple[list[Step], list[Any], list[tuple[int, Callable[[Any, int], Any]]]]:
    from ._ops import TRANSLATORS

    ctx = Context(machine)
    code: list[Step] = []
    for instr in machine.entry.instructions:
        kind, target = _control(instr)
        run: Run = _nothing
        if kind == NORMAL:
            translator = TRANSLATORS.get(instr.opcode)
            if translator is None:
                raise UnsupportedError(instr.op, instr.line)
            try:
                run = translator(instr, ctx)
            except UnsupportedError as error:
                if error.line:
                    raise
                raise UnsupportedError(error.op, instr.line) from error
            except EmulationError:
                raise
            except (IndexError, AttributeError, TypeError, KeyError, ValueError) as error:
                raise UnsupportedError(instr.op, instr.line, f"operands not understood ({error!r})") from error
        guard, negated = (instr.predicate.slot, instr.predicate.negated) if instr.predicate else (-1, False)
        code.append(Step(run, guard, negated, kind, target, _whole(instr)))
    if ctx.watch:
        code = [_watched(step, instr, ctx) for step, instr in zip(code, machine.entry.instructions, strict=True)]
    code.append(Step(_nothing, -1, False, EXIT, 0))
    return code, ctx.template, ctx.specials


def _whole(instr: Instruction) -> bool:
    """Instructions at which the lanes of a warp meet: .aligned ones, bar, and .sync ones whose member mask is full."""
    if "aligned" in instr.modifiers or instr.opcode == "wgmma":
        return True
    if instr.opcode == "bar" and instr.modifiers[0] != "warp":
        return True
    if "sync" in instr.modifiers and instr.opcode in ("shfl", "vote", "match", "redux", "elect", "bar"):
        mask = instr.operands[-1]
        return isinstance(mask, Imm) and mask.value & 0xFFFFFFFF == 0xFFFFFFFF
    return False


def _registers(operand: Any) -> set[int]:
    if isinstance(operand, Reg):
        return {operand.slot}
    if isinstance(operand, Vec):
        return {slot for item in operand.items for slot in _registers(item)}
    if isinstance(operand, Addr):
        return _registers(operand.base)
    return set()


def _watched(step: Step, instr: Instruction, ctx: Context) -> Step:
    """Add the check for registers in flight to an instruction that touches them."""
    slots = {s for o in instr.operands for s in _registers(o)} & ctx.watch
    if not slots or instr.opcode == "wgmma" or instr.modifiers[:1] == ("ld",):
        return step
    run, add = step.run, ctx.machine.findings.add

    def checked(w: Any) -> Any:
        if w.unfenced is not None:
            w.unfenced |= slots
        if w.loading and not slots.isdisjoint(w.loading):
            add(
                "uncommitted",
                f"{instr.op} uses a register of a tcgen05.ld that no tcgen05.wait::ld has completed",
                instr,
                (w.name,),
            )
        if w.pending and not slots.isdisjoint(w.pending):
            add(
                "uncommitted",
                f"{instr.op} uses an accumulator of a wgmma that no wait_group has completed",
                instr,
                (w.name,),
            )
        return run(w)

    return step._replace(run=checked)


def _nothing(w: Any) -> None:
    return None

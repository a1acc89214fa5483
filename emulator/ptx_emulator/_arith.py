"""Arithmetic, logic and comparison of PTX: `operation("fma.rn.f32")` -> function(list of source arrays) -> result.

The opcode is parsed once, at translation; the closure only does array work (any shape, usually 32 lanes). Sources are
unsigned arrays with a register's bits, predicates are bool arrays. A result is uint16 for 16-bit floats and b16 types,
uint32 or uint64 otherwise, bool for setp and testp. Carries: `add.cc`, `addc`, `sub.cc`, `subc`, `mad.lo.cc` ... take a
bool carry as last source where they read it and return (result, carry) where they write it. `setp` with a boolean
operator takes the predicate as third source; `operation(op, pair=True)` returns (p, q) for `setp ... p|q`.
Immediates of lop3 and prmt modes: `lop3.b32` takes the table as fourth source (scalar or array), `prmt.b32.f4e` is a mode.
Semantics: ISA 9.7.1 to 9.7.8; every float NaN result is canonical (0x7fffffff, 0x7fff), f64 keeps the operand's.
`.approx` results are the exact value rounded once: closer to the truth than hardware, within the ISA's error bounds.
Checked lane by lane against an H200 (tests/data/h200_numerics.xz). Float forms live in `_arith_float`, integer forms in `_arith_integer`; this module dispatches and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import _arith_float as floats
from ._arith_integer import UNSIGNED, integer_operation, integer_type
from ._findings import UnsupportedError
from ._floats import quiet

__all__ = ["operation"]

Array: TypeAlias = "NDArray[Any]"
Operation: TypeAlias = "Callable[[Sequence[Array]], Any]"
FLOATS = {"f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2"}
# every modifier that some form reads; another one (fma.rn.oob.f16) makes an instruction that is not covered
_MODIFIERS = """
    rn rz rm rp ftz sat relu approx full NaN xorsign abs cc lo hi wide wrap clamp l r shiftamt f4e b4e rc8 ecl ecr rc16
    eq ne lt le gt ge ls hs equ neu ltu leu gtu geu num nan and or xor
    finite infinite number notanumber normal subnormal
    b16 b32 b64 u8 s8 u16 s16 u32 s32 u64 s64 u16x2 s16x2 u8x4 s8x4 pred f16 bf16 f32 f64 f16x2 bf16x2 f32x2
"""
_WORDS = frozenset(_MODIFIERS.split())

_COMPARE: dict[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_BOOLEAN: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _compare(op: str, compare: str, kind: str, ftz: bool) -> Operation:
    if kind in FLOATS:
        return floats.comparison(op, compare, kind, ftz)
    t = integer_type(kind, op)
    ufunc = _COMPARE.get(_UNSIGNED_NAMES.get(compare, compare))
    if ufunc is None:
        raise UnsupportedError(op)
    return lambda a: ufunc(t.read(a[0]), t.read(a[1]))


def _setp(op: str, mods: list[str], pair: bool) -> Operation:
    test = _compare(op, mods[0], mods[-1], "ftz" in mods)
    combine = next((_BOOLEAN[m] for m in mods[1:-1] if m in _BOOLEAN), None)
    if mods[-1].endswith("x2"):
        if combine is None:
            return test

        def halves(a: Sequence[Array]) -> Any:
            p, q = test(a)
            return combine(p, a[2]), combine(q, a[2])

        return halves
    if combine is None:
        return (lambda a: ((p := test(a)), ~p)) if pair else test
    if pair:
        return lambda a: (combine(p := test(a), a[2]), combine(~p, a[2]))
    return lambda a: combine(test(a), a[2])


def _set(op: str, mods: list[str]) -> Operation:
    """set.cmp{.bool}{.ftz}.dtype.stype: all ones or 1.0 where the comparison holds."""
    dst, kind = mods[-2], mods[-1]
    ones = {
        "u32": 0xFFFFFFFF,
        "s32": 0xFFFFFFFF,
        "f32": 0x3F800000,
        "f16": 0x3C00,
        "bf16": 0x3F80,
        "u16": 0xFFFF,
        "s16": 0xFFFF,
        "f16x2": 0x3C00,
        "bf16x2": 0x3F80,
    }
    if dst not in ones:
        raise UnsupportedError(op)
    test = _setp(op, [*mods[:-2], kind], False)
    if kind.endswith("x2"):
        one = np.uint32(ones[dst] if dst.endswith("x2") else 0xFFFF)

        def halves(a: Sequence[Array]) -> Array:
            low, high = test(a)
            return np.where(low, one, np.uint32(0)) | np.where(high, one << np.uint32(16), np.uint32(0))

        return halves
    dtype: Any = np.uint16 if dst in ("f16", "bf16", "u16", "s16") else np.uint32
    value, zero = dtype(ones[dst]), dtype(0)
    return lambda a: np.where(test(a), value, zero)


def _select(op: str, root: str, mods: list[str]) -> Operation:
    if mods[0] == "pred":
        return lambda a: np.where(a[2], a[0], a[1])
    dtype = UNSIGNED[int(mods[0][1:])]
    if root == "selp":
        return lambda a: np.where(
            a[2], np.asarray(a[0]).astype(dtype, copy=False), np.asarray(a[1]).astype(dtype, copy=False)
        )
    if mods[-1] == "f32":
        ftz = "ftz" in mods
        return lambda a: np.where(
            floats.nonnegative(a[2], ftz), np.asarray(a[0]).astype(dtype), np.asarray(a[1]).astype(dtype)
        )
    return lambda a: np.where(
        np.asarray(a[2]).astype(np.uint32).view(np.int32) >= 0,
        np.asarray(a[0]).astype(dtype),
        np.asarray(a[1]).astype(dtype),
    )


def operation(op: str, pair: bool = False) -> Operation:
    """The function of an arithmetic opcode (complete, with modifiers); UnsupportedError for a form that is not covered.

    Functions that may divide by zero or overflow silence numpy on every call; `run.raw` is the same function without
    that, for a caller that already runs under `np.errstate(all="ignore")`.
    """
    root, *mods = op.split(".")
    if not mods or not _WORDS.issuperset(mods):
        raise UnsupportedError(op)
    if root == "setp":
        return quiet(_setp(op, mods, pair)) if mods[-1] in FLOATS else _setp(op, mods, pair)
    if root == "set":
        return quiet(_set(op, mods))
    if root in ("testp", "copysign") or (root not in ("selp", "slct") and mods[-1] in FLOATS):
        return quiet(floats.float_operation(op, root, mods))
    if root in ("selp", "slct"):
        return _select(op, root, mods)
    return integer_operation(op, root, mods)

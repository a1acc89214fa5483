"""Floating-point forms of `_arith.operation`: f16, bf16, f32, f64 and the packed x2 types (ISA 9.7.3 to 9.7.5).

Results are exact values rounded once. f32 and narrower compute in float64; where the float64 sum is inexact (fma,
directed add) it is rounded to odd first, so the second rounding is innocent. f64 with directed rounding or fma is
computed lane by lane in exact rationals. Only `_arith` imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._arith_exact import quotient, rational_operation, sqrt_fraction
from ._findings import UnsupportedError
from ._floats import FORMATS, decode_function, encode, flush, round_to_odd, two_sum

__all__ = ["comparison", "float_operation", "nonnegative"]

Array: TypeAlias = "NDArray[Any]"
Operation: TypeAlias = "Callable[[Sequence[Array]], Any]"
DTYPES: dict[str, Any] = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}
MODES = ("rn", "rz", "rm", "rp")


def _reader(kind: str, ftz: bool) -> Callable[[Any], Array]:
    read = decode_function(kind)
    if not ftz:
        return read
    if kind == "f32":
        return lambda codes: flush(read(codes))

    def flushed(codes: Any) -> Array:
        bits = np.asarray(codes, dtype=np.uint16)
        return read(np.where(bits & np.uint16(0x7C00), bits, bits & np.uint16(0x8000)))

    return flushed


def _writer(
    kind: str, mode: str = "rn", ftz: bool = False, sat: bool = False, relu: bool = False
) -> Callable[[Array], Array]:
    """Exact (or rounded-to-odd) float64 values, or float32 already rounded, to result bits."""
    nan = DTYPES[kind](FORMATS[kind].nan)
    if kind == "f64":
        return lambda v: (np.where(v > 0, np.minimum(v, 1.0), 0.0) if sat else v).view(np.uint64)

    def write(values: Array) -> Array:
        if sat:
            values = np.where(values > 0, np.minimum(values, 1), 0)
        if relu:
            values = np.where(np.signbit(values) & (values == values), 0, values)
        if kind == "f32" and mode == "rn":
            bits = values.astype(np.float32).view(np.uint32)
        elif kind == "f16" and mode == "rn":
            bits = values.astype(np.float16).view(np.uint16)
        elif kind == "bf16" and mode == "rn":
            bits = _bf16(values)
        else:
            bits = encode(values, kind, mode).astype(DTYPES[kind])
        if ftz and kind == "f32":  # a result below the smallest normal before rounding is flushed
            bits = np.where((np.abs(values) < 2.0**-126) & (values == values), bits & np.uint32(0x80000000), bits)
        elif ftz:
            bits = np.where(bits & np.uint16(0x7C00), bits, bits & np.uint16(0x8000))
        return np.where(values == values, bits, nan)

    return write


def _bf16(values: Array) -> Array:
    """float64 (or float32) to bf16 codes, nearest even: in integers where every result is normal or zero."""
    bits = values.astype(np.float64, copy=False).view(np.uint64)
    magnitude = bits & np.uint64(0x7FFFFFFFFFFFFFFF)
    regular = ((magnitude >= np.uint64(897 << 52)) & (magnitude < np.uint64(1150 << 52))) | (magnitude == 0)
    if not regular.all():
        return encode(values, "bf16").astype(np.uint16)
    rounded = (magnitude + (np.uint64((1 << 44) - 1) + (magnitude >> np.uint64(45) & np.uint64(1)))) >> np.uint64(45)
    code = np.where(magnitude == 0, np.uint64(0), rounded - np.uint64(896 << 7))
    return (bits >> np.uint64(48) & np.uint64(0x8000) | code).astype(np.uint16)


def _double(values: Array) -> Array:
    return values.astype(np.float64)


def _exact_add(x: Array, y: Array) -> Array:
    s, error = two_sum(_double(x), _double(y))
    return round_to_odd(s, error) if error.any() else s


def _exact_fma(x: Array, y: Array, z: Array) -> Array:
    s, error = two_sum(_double(x) * _double(y), _double(z))
    return round_to_odd(s, error) if error.any() else s


def _binary(op: str, root: str, kind: str, mods: list[str]) -> Operation:
    """add, sub, mul, fma, mad of one scalar kind."""
    mode = next((m for m in mods if m in MODES), "rn")
    ftz, sat, relu = "ftz" in mods, "sat" in mods, "relu" in mods
    read, write = _reader(kind, ftz), _writer(kind, mode, ftz, sat, relu)
    three = root in ("fma", "mad")
    if kind == "f64":
        if mode == "rn" and not three:
            ufunc = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[root]
            return lambda a: ufunc(read(a[0]), read(a[1])).view(np.uint64)
        exact: dict[str, Any] = {
            "add": (lambda x, y: x + y, np.add),
            "sub": (lambda x, y: x - y, np.subtract),
            "mul": (lambda x, y: x * y, np.multiply),
            "fma": (lambda x, y, z: x * y + z, lambda x, y, z: x * y + z),
        }
        f64 = rational_operation(mode, "f64", *exact["fma" if three else root])
        return lambda a: f64(*(read(v) for v in a)).view(np.uint64)
    if kind == "f32" and mode == "rn" and not relu:
        function: Any = {"add": np.add, "sub": np.subtract, "mul": np.multiply}.get(root, _fma_f32)
        if ftz:
            return _flushing_f32(function, sat, _binary_exact(root))
        plain = decode_function("f32")
        if sat:
            return lambda a: write(function(*(plain(v) for v in a)))
        return lambda a: _canonical(function(*(plain(v) for v in a)))
    if three:
        return lambda a: write(_zero_sign(_exact_fma(read(a[0]), read(a[1]), read(a[2])), mode, a, read))
    if root == "mul":
        return lambda a: write(_double(read(a[0])) * _double(read(a[1])))
    negate = root == "sub"

    def add(a: Sequence[Array]) -> Array:
        x, y = read(a[0]), read(a[1])
        y = -y if negate else y
        total = _exact_add(x, y)
        if mode == "rm":
            total = np.where((total == 0) & (np.signbit(x) | np.signbit(y)), -0.0, total)
        return write(total)

    return add


def _canonical(values: Array) -> Array:
    """float32 to bits, every NaN the canonical one."""
    return np.where(values == values, values.view(np.uint32), np.uint32(0x7FFFFFFF))


def _binary_exact(root: str) -> Callable[..., Array]:
    """float64 results that round to f32 as the exact ones do."""
    if root == "mul":
        return lambda x, y: _double(x) * _double(y)
    if root == "sub":
        return lambda x, y: _exact_add(x, -y)
    return _exact_add if root == "add" else _exact_fma


def _flushing_f32(function: Callable[..., Array], sat: bool, exact: Callable[..., Array]) -> Operation:
    """.ftz: where no operand and no result is subnormal or the smallest normal number, the plain operation will do."""
    one, limit = np.uint32(1), np.uint32(0x00FFFFFF)
    read, write = _reader("f32", True), _writer("f32", "rn", True, sat)

    def run(a: Sequence[Array]) -> Array:
        bits = [np.ascontiguousarray(v, dtype=np.uint32) for v in a]
        result = function(*(v.view(np.float32) for v in bits))
        smallest = (result.view(np.uint32) << one) - one
        for v in bits:
            smallest = np.minimum(smallest, (v << one) - one)
        if (smallest <= limit).any():
            return write(exact(*(read(v) for v in bits)))
        return write(result) if sat else _canonical(result)

    return run


def _zero_sign(total: Array, mode: str, a: Sequence[Array], read: Callable[[Any], Array]) -> Array:
    """Under rm an exact zero sum of opposite terms is -0."""
    if mode != "rm":
        return total
    product = _double(read(a[0])) * _double(read(a[1]))
    return np.where((total == 0) & (np.signbit(product) | np.signbit(read(a[2]))), -0.0, total)


def _fma_f32(x: Array, y: Array, z: Array) -> Array:
    """fma.rn.f32: float64 sum, corrected only where rounding it again could go wrong (ties and tiny results)."""
    product, z64 = _double(x) * _double(y), _double(z)
    s = product + z64
    risky = ((s.view(np.int64) & 0x1FFFFFFF) == 0x10000000) | (np.abs(s) < 2.0**-125)
    if risky.any():
        s, error = two_sum(product, z64)
        s = round_to_odd(s, error)
    return s.astype(np.float32)


def _min_max(root: str, kind: str, mods: list[str]) -> Operation:
    ftz, propagate, sign, magnitude = "ftz" in mods, "NaN" in mods, "xorsign" in mods, "abs" in mods
    read, write = _reader(kind, ftz), _writer(kind)
    low = root == "min"

    nan_wins = np.minimum if low else np.maximum

    def function(x: Array, y: Array) -> Array:
        result = nan_wins(x, y)
        if propagate:
            return result
        # not np.fmin: what it makes of a signaling NaN depends on the lane (vector body or scalar tail of its loop)
        return np.where(np.isnan(x), y, np.where(np.isnan(y), x, result))

    def pick(x: Array, y: Array) -> Array:
        result = function(x, y)
        zero = result == 0
        if zero.any():  # -0 counts as smaller than +0
            minus = (np.signbit(x) | np.signbit(y)) if low else (np.signbit(x) & np.signbit(y))
            both = (x == 0) & (y == 0)
            result = np.where(zero & both, np.where(minus, -0.0, 0.0).astype(result.dtype), result)
        return result

    def run(a: Sequence[Array]) -> Array:
        values = [read(v) for v in a]
        sources = [np.abs(v) for v in values] if magnitude else values
        result = sources[0]
        for other in sources[1:]:
            result = pick(result, other)
        if not sign:
            return write(result)
        minus = np.signbit(values[0])
        for v in values[1:]:
            minus = minus ^ np.signbit(v)
        return write(np.where(minus, -result, result))

    return run


def _sign_bits(root: str, kind: str, mods: list[str]) -> Operation:
    """abs and neg change only the sign bit; a NaN becomes the canonical one except in f64 (measured)."""
    dtype = DTYPES[kind]
    top = dtype(1 << (FORMATS[kind].bits - 1))
    ftz = "ftz" in mods
    read, write = _reader(kind, ftz), _writer(kind)
    if ftz:
        function = np.abs if root == "abs" else np.negative
        return lambda a: write(function(read(a[0])))
    infinity, nan = dtype(FORMATS[kind].infinity), dtype(FORMATS[kind].nan)

    def run(a: Sequence[Array]) -> Array:
        bits = np.asarray(a[0]).astype(dtype, copy=False)
        magnitude = bits & ~top
        result = magnitude if root == "abs" else bits ^ top
        return result if kind == "f64" else np.where(magnitude > infinity, nan, result)

    return run


_UNARY: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1.0 / x,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def _unary(op: str, root: str, kind: str, mods: list[str]) -> Operation:
    """ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh: `.approx` as the exact value rounded once, rcp/sqrt also .rn and directed."""
    mode = next((m for m in mods if m in MODES), "")
    ftz = "ftz" in mods
    if kind == "f64":
        read = _reader("f64", False)
        if mode in ("", "rn"):
            if "approx" in mods:
                return _approx64(_UNARY[root])
            return lambda a: _UNARY[root](read(a[0])).view(np.uint64)
    read, function = _reader(kind, ftz), _UNARY[root]
    if mode in ("rz", "rm", "rp"):
        exact = sqrt_fraction if root == "sqrt" else lambda x: quotient(Fraction(1), x)
        rational = rational_operation(mode, kind, exact, function)
        return lambda a: _writer(kind)(rational(read(a[0]))) if kind != "f64" else rational(read(a[0])).view(np.uint64)
    if not mode and "approx" not in mods:
        raise UnsupportedError(op)
    write = _writer(kind, "rn", ftz)
    return lambda a: write(function(_double(read(a[0]))))


def _approx64(function: Callable[[Array], Array]) -> Operation:
    """rcp and rsqrt .approx.ftz.f64: upper 32 bits in, upper 32 bits out, subnormals flushed."""
    upper, exponent, sign = np.uint64(0xFFFFFFFF00000000), np.uint64(0x7FF << 52), np.uint64(1 << 63)

    def run(a: Sequence[Array]) -> Array:
        bits = np.asarray(a[0]).astype(np.uint64, copy=False) & upper
        value = np.where(bits & exponent, bits, bits & sign).view(np.float64)
        result = function(value).view(np.uint64) & upper
        result = np.where(result & exponent, result, result & sign)
        return np.where(value == value, result, bits)

    return run


def _divide(op: str, kind: str, mods: list[str]) -> Operation:
    mode = next((m for m in mods if m in MODES), "")
    ftz = "ftz" in mods
    read, write = _reader(kind, ftz), _writer(kind, "rn", ftz)
    if mode in ("rz", "rm", "rp"):
        rational = rational_operation(mode, kind, quotient, np.divide)
        if kind == "f64":
            return lambda a: rational(read(a[0]), read(a[1])).view(np.uint64)
        return lambda a: write(rational(read(a[0]), read(a[1])))
    if not mode and "approx" not in mods and "full" not in mods:
        raise UnsupportedError(op)
    if kind == "f64":
        return lambda a: (read(a[0]) / read(a[1])).view(np.uint64)
    divide = (lambda x, y: _double(x) / _double(y)) if ftz else np.divide
    if "approx" not in mods:
        return lambda a: write(divide(read(a[0]), read(a[1])))

    def approximate(a: Sequence[Array]) -> Array:  # a divisor of at least 2^126 gives zero, or NaN for an infinity
        x, y = read(a[0]), read(a[1])
        huge = (np.abs(y) >= np.float32(2.0**126)) & np.isfinite(y)
        return write(np.where(huge, x * np.copysign(np.float32(0), y), divide(x, y)))

    return approximate


def _testp(op: str, mods: list[str]) -> Operation:
    kind = mods[-1]
    form, dtype = FORMATS[kind], DTYPES[kind]
    mask, infinity, smallest = dtype((1 << (form.bits - 1)) - 1), dtype(form.infinity), dtype(1 << form.mantissa)
    tests: dict[str, Callable[[Array], Array]] = {
        "finite": lambda m: m < infinity,
        "infinite": lambda m: m == infinity,
        "number": lambda m: m <= infinity,
        "notanumber": lambda m: m > infinity,
        "normal": lambda m: ((m >= smallest) & (m < infinity)) | (m == 0),  # zeros count as normal (ISA)
        "subnormal": lambda m: (m < smallest) & (m != 0),
    }
    if mods[0] not in tests:
        raise UnsupportedError(op)
    test = tests[mods[0]]
    return lambda a: test(np.asarray(a[0]).astype(dtype, copy=False) & mask)


def _copysign(kind: str) -> Operation:
    dtype = DTYPES[kind]
    top = dtype(1 << (FORMATS[kind].bits - 1))
    return lambda a: (np.asarray(a[0]).astype(dtype) & top) | (np.asarray(a[1]).astype(dtype) & ~top)


_ORDERED: dict[str, Any] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNORDERED: dict[str, Any] = {
    "equ": lambda x, y: ~((x < y) | (x > y)),
    "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: (x == x) & (y == y),
    "nan": lambda x, y: (x != x) | (y != y),
    "ne": lambda x, y: (x < y) | (x > y),
}


def comparison(op: str, compare: str, kind: str, ftz: bool) -> Operation:
    """setp's float comparison: bool array; (low, high) for packed kinds."""
    test = _ORDERED.get(compare) or _UNORDERED.get(compare)
    if test is None:
        raise UnsupportedError(op)
    if kind in ("f16x2", "bf16x2"):
        one = comparison(op, compare, kind[:-2], ftz)
        return lambda a: tuple(one([_half(v, i) for v in a[:2]]) for i in (0, 1))
    read = _reader(kind, ftz)
    return lambda a: test(read(a[0]), read(a[1]))


def nonnegative(value: Array, ftz: bool) -> Array:
    """slct's test of an f32 operand; -0 counts as zero, NaN as negative."""
    return np.asarray(_reader("f32", ftz)(value) >= 0)


def _half(value: Any, index: int) -> Array:
    return (np.asarray(value).astype(np.uint32, copy=False) >> np.uint32(16 * index)).astype(np.uint16)


def _pairs(one: Operation, bits: int) -> Operation:
    """A scalar operation on both halves of packed registers (x2 types)."""
    full, part = (np.uint64, np.uint32) if bits == 32 else (np.uint32, np.uint16)

    def views(a: Sequence[Array]) -> Array:
        if any(np.ndim(v) == 0 for v in a):
            return split(a)
        words = [np.ascontiguousarray(v, dtype=full).view(part) for v in a]
        return one(words).astype(part, copy=False).view(full)

    if bits == 32:
        low_mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)

        def wide(a: Sequence[Array]) -> Array:
            words = [np.asarray(v).astype(np.uint64, copy=False) for v in a]
            low = one([(w & low_mask).astype(np.uint32) for w in words])
            high = one([(w >> shift).astype(np.uint32) for w in words])
            return high.astype(np.uint64) << shift | low

        split: Operation = wide
        return views

    def halves(a: Sequence[Array]) -> Array:
        words = [np.asarray(v).astype(np.uint32, copy=False) for v in a]
        low = one([w.astype(np.uint16) for w in words])
        high = one([(w >> np.uint32(16)).astype(np.uint16) for w in words])
        return high.astype(np.uint32) << np.uint32(16) | low

    split = halves
    return views


def _mixed(op: str, root: str, mods: list[str]) -> Operation:
    """add, sub and fma of f16 or bf16 with an f32 last source and result (ISA 9.7.5): one rounding, to f32."""
    if root not in ("add", "sub", "fma") or mods[-1] not in ("f16", "bf16"):
        raise UnsupportedError(op)
    one, read = _binary(op, root, "f32", mods[:-1]), _reader(mods[-1], False)

    def run(a: Sequence[Array]) -> Array:
        wide = [read(v).astype(np.float32).view(np.uint32) for v in a[:-1]]
        return np.asarray(one([*wide, a[-1]]))

    return run


def _mixed_pairs(op: str, root: str, mods: list[str]) -> Operation:
    """The same on pairs, as compilers write it for sm_107: op.f32x2.bf16x2.f32x2 names the types of result, narrow and last source."""
    types = [m for m in mods if m.endswith("x2")]
    if types[0] != "f32x2" or types[-1] != "f32x2" or types[1] not in ("f16x2", "bf16x2") or len(types) != 3:
        raise UnsupportedError(op)
    one = _mixed(op, root, [*(m for m in mods if m not in types), "f32", types[1][:-2]])

    def run(a: Sequence[Array]) -> Array:
        halves = []
        for half in range(2):
            narrow = [(np.asarray(v) >> 16 * half & 0xFFFF).astype(np.uint16) for v in a[:-1]]
            last = np.asarray(a[-1]).astype(np.uint64) >> np.uint64(32 * half) & np.uint64(0xFFFFFFFF)
            halves.append(one([*narrow, last.astype(np.uint32)]).astype(np.uint64))
        return np.asarray(halves[1] << np.uint64(32) | halves[0])

    return run


def float_operation(op: str, root: str, mods: list[str]) -> Operation:
    kind = mods[-1]
    if kind == "f32x2" and sum(m.endswith("x2") for m in mods) > 1:
        return _mixed_pairs(op, root, mods)
    if any(m in DTYPES for m in mods[:-1]):
        return _mixed(op, root, mods)
    if kind in ("f16x2", "bf16x2", "f32x2"):
        return _pairs(float_operation(op, root, [*mods[:-1], kind[:-2]]), 32 if kind == "f32x2" else 16)
    if kind not in DTYPES:
        raise UnsupportedError(op)
    makers: dict[str, Callable[[], Operation]] = {
        **{r: partial(_binary, op, r, kind, mods) for r in ("add", "sub", "mul", "fma", "mad")},
        **{r: partial(_min_max, r, kind, mods) for r in ("min", "max")},
        **{r: partial(_sign_bits, r, kind, mods) for r in ("abs", "neg")},
        **{r: partial(_unary, op, r, kind, mods) for r in _UNARY},
        "div": partial(_divide, op, kind, mods),
        "testp": partial(_testp, op, mods),
        "copysign": partial(_copysign, kind),
    }
    if root not in makers:
        raise UnsupportedError(op)
    return makers[root]()

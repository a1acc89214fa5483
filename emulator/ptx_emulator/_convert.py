"""cvt of PTX (ISA 9.7.9.21): `convert("cvt.rn.satfinite.e4m3x2.f32")` -> function(list of source arrays) -> array.

The form is parsed once, at translation; the returned closure only does array work. Sources are unsigned arrays (bits of
the registers; wider than the source type is allowed, the low bits are used). Result dtype: uint64 for 64-bit types,
uint16 for 16-bit floats, packed pairs and e2m1x4, else uint32; 8- and 16-bit integers come back sign- or zero-extended
to 32 bits, so that a narrower register takes the low bits and a wider one the ISA's extension.
Operand order follows the ISA: the first source is the upper element of a packed result; a scale factor and rbits last.
Checked against an H200 (tests/data/h200_numerics.xz) where that GPU has the form; the fp6/fp4/ue8m0/x4 forms against
ml_dtypes and the ISA text only. Inferred, without a public statement by NVIDIA: which rbits an x4 element takes (the ISA
has only a figure; bit order after a public measurement on a B200), ue5m3 (unsigned, converts the magnitude), and
that -0 under .relu gives +0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._findings import UnsupportedError
from ._floats import FORMATS, Format, decode_function, encode, flush, narrow_table, quiet

__all__ = ["convert"]

Array: TypeAlias = "NDArray[Any]"
Operation: TypeAlias = "Callable[[Sequence[Array]], Array]"

INTEGERS = {f"{s}{b}": (s == "s", b) for s in "us" for b in (8, 16, 32, 64)}
UNSIGNED: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
MODES = ("rn", "rz", "rm", "rp", "rna", "rs")
SCALARS = ("f16", "bf16", "f32", "f64", "tf32")


def _packed(name: str) -> tuple[str, int] | None:
    """("e4m3", 2) of "e4m3x2"."""
    base, x, count = name.rpartition("x")
    return (base, int(count)) if x and (base in FORMATS or base == "s2f6") else None


def _widen(value: Array, bits: int, signed: bool) -> Array:
    """An int64/uint64 result (in range or to be wrapped) as the result array of an integer type."""
    if bits == 64:
        return value.astype(np.uint64)
    narrow = value.astype(SIGNED[bits] if signed else UNSIGNED[bits])
    return narrow.astype(np.int32).view(np.uint32) if signed else narrow.astype(np.uint32)


def _integer_to_integer(dst: str, src: str, sat: bool) -> Operation:
    (ds, db), (ss, sb) = INTEGERS[dst], INTEGERS[src]
    source: Any = SIGNED[sb] if ss else UNSIGNED[sb]
    low, high = (-(1 << (db - 1)), (1 << (db - 1)) - 1) if ds else (0, (1 << db) - 1)
    info = np.iinfo(source)
    low, high = max(low, int(info.min)), min(high, int(info.max))

    def run(args: Sequence[Array]) -> Array:
        value = np.asarray(args[0]).astype(UNSIGNED[sb], copy=False).view(source)
        return _widen(np.clip(value, low, high) if sat else value, db, ds)

    return run


def _float_to_integer(op: str, dst: str, src: str, mode: str, ftz: bool) -> Operation:
    if mode not in ROUND:
        raise UnsupportedError(op)
    signed, bits = INTEGERS[dst]
    rounder, read = ROUND[mode], decode_function(src)
    low, high = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if signed else (0.0, 2.0**bits)
    # a NaN gives 0 unless source or destination has 64 bits (ISA), else 1 << (bits - 1); the narrow destinations of a
    # 64-bit source take the low part of the 32-bit result
    nan = 0 if src != "f64" and bits != 64 else 1 << (max(bits, 32) - 1)
    top = (1 << (bits - 1)) - 1 if signed else (1 << bits) - 1
    bottom = -(1 << (bits - 1)) if signed else 0
    container: Any = np.int64 if signed else np.uint64
    mask = (1 << 64) - 1

    def run(args: Sequence[Array]) -> Array:
        value = read(args[0])
        if ftz:
            value = flush(value)
        value = rounder(value.astype(np.float64))
        inside = (value >= low) & (value < high)
        result = np.where(inside, value, 0.0).astype(container)
        if not inside.all():
            result = result.view(np.uint64)
            result = np.where(value >= high, np.uint64(top & mask), result)
            result = np.where(value < low, np.uint64(bottom & mask), result)
            result = np.where(np.isnan(value), np.uint64(nan), result).view(container)
        return _widen(result, bits, signed)

    return run


def _exact_float64(value: Array) -> Array:
    """64-bit integers as float64 whose rounding to at most 50 bits is that of the integer (sticky low bit)."""
    big = (value >> 53 != 0) & (value >> 53 != -1) if value.dtype == np.int64 else value >> np.uint64(53) != 0
    if not big.any():
        return value.astype(np.float64)
    low = value & value.dtype.type(0xFFF)
    return np.where(big, (value - low) | (low != 0).astype(value.dtype) << value.dtype.type(11), value).astype(
        np.float64
    )


def _integer_to_float(op: str, dst: str, src: str, mode: str, sat: bool) -> Operation:
    signed, bits = INTEGERS[src]
    source: Any = SIGNED[bits] if signed else UNSIGNED[bits]
    wide: Any = np.int64 if signed else np.uint64
    if mode not in ("rn", "rz", "rm", "rp"):
        raise UnsupportedError(op)
    if dst == "f64":

        def run_f64(args: Sequence[Array]) -> Array:
            value = np.asarray(args[0]).astype(UNSIGNED[bits], copy=False).view(source)
            result = value.astype(np.float64)
            if mode != "rn" and bits == 64:
                result = _directed_f64(value, mode)
            return result.view(np.uint64)

        return run_f64
    write = _writer(dst, mode, "none", False, sat, False)

    def run(args: Sequence[Array]) -> Array:
        return write(_exact_float64(np.asarray(args[0]).astype(UNSIGNED[bits], copy=False).view(source).astype(wide)))

    return run


def _directed_f64(value: Array, mode: str) -> Array:
    """64-bit integers to float64 with rz, rm or rp, lane by lane in exact integers."""

    def one(x: int) -> float:
        near = float(x)
        if int(near) == x:
            return near
        down = near if int(near) < x else float(np.nextafter(near, -np.inf))
        if mode == "rm" or (mode == "rz" and x > 0):
            return down
        return float(np.nextafter(down, np.inf))

    return np.array([one(int(x)) for x in value.ravel()]).reshape(value.shape)


def _writer(name: str, mode: str, saturate: str, relu: bool, sat: bool, ftz: bool) -> Callable[[Array], Array]:
    """values (float32 or float64, exact) -> result bits of a scalar float format, `.sat` and `.ftz` applied."""

    def clamp(values: Array) -> Array:
        return np.where(values > 0, np.minimum(values, 1), 0)  # NaN and -0 give +0

    form = FORMATS[name]
    nan: Any = None
    plain = mode == "rn" and saturate == "none" and not relu
    if name == "f64":
        return lambda v: (clamp(v) if sat else v).astype(np.float64).view(np.uint64)
    if name == "f32" and plain:
        nan = np.uint32(form.nan)

        def f32(values: Array) -> Array:
            r = (clamp(values) if sat else values).astype(np.float32)
            if ftz:
                r = flush(r)
            return np.where(r == r, r.view(np.uint32), nan)

        return f32
    if name == "f16" and plain:
        nan = np.uint16(form.nan)

        def f16(values: Array) -> Array:
            r = (clamp(values) if sat else values).astype(np.float16)
            return np.where(r == r, r.view(np.uint16), nan)

        return f16
    if name == "bf16" and plain and not sat:

        def bf16(values: Array) -> Array:
            if values.dtype != np.float32:
                return encode(values, "bf16").astype(np.uint16)
            bits = values.view(np.uint32)
            up = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
            return np.where(values == values, up, np.uint32(0x7FFF)).astype(np.uint16)

        return bf16
    shift = 13 if name == "tf32" else 0
    container = UNSIGNED[16] if form.bits == 16 else np.uint32

    def general(values: Array) -> Array:
        codes = encode(clamp(values) if sat else values, name, mode, saturate, relu)
        result = (codes << shift).astype(container) if shift else codes.astype(container)
        return flush(result.view(np.float32)).view(np.uint32) if ftz and name == "f32" else result

    return general


def _float_to_float(op: str, dst: str, src: str, mode: str, flags: set[str]) -> Operation:
    read, ftz = decode_function(src), "ftz" in flags
    if (dst, src) == ("f32", "bf16"):  # a shift: a NaN keeps its payload
        return lambda args: np.asarray(args[0], dtype=np.uint32) << np.uint32(16)
    if dst == "tf32" and mode == "rna" and not flags & {"satfinite", "relu"}:  # a NaN is truncated (H200)
        return lambda args: (
            (np.asarray(args[0], np.uint32) + np.where(np.isnan(read(args[0])), np.uint32(0), np.uint32(0x1000)))
            & np.uint32(0xFFFFE000)
        )
    if mode in ROUND:
        if FORMATS[src].bits != FORMATS[dst].bits:
            raise UnsupportedError(op)
        rounder, write = ROUND[mode], _writer(dst, "rn", "none", False, "sat" in flags, ftz)
    else:
        narrowing = FORMATS[dst].bits < FORMATS[src].bits or {dst, src} == {"f16", "bf16"} or dst == "tf32"
        if narrowing != (mode != ""):
            raise UnsupportedError(op)
        rounder = None
        write = _writer(
            dst, mode or "rn", "finite" if "satfinite" in flags else "none", "relu" in flags, "sat" in flags, ftz
        )
    flush_source = ftz and src == "f32"

    def run(args: Sequence[Array]) -> Array:
        value = read(args[0])
        if flush_source:
            value = flush(value)
        return write(rounder(value) if rounder is not None else value)

    if src == "f64" and dst != "f64" and not flags & {"relu", "sat"}:
        return _keep_payload(run, FORMATS[dst])
    if dst == "f64" and flush_source:  # .ftz makes the NaN canonical before widening
        return lambda args: np.where(np.isnan(read(args[0])), np.uint64(0x7FFFFFFFE0000000), run(args))
    return run


def _keep_payload(run: Operation, form: Format) -> Operation:
    """Narrowing from f64 keeps a NaN's sign and upper payload, quieted (measured; other sources give the canonical NaN)."""
    quiet = form.infinity | 1 << (form.mantissa - 1)

    def kept(args: Sequence[Array]) -> Array:
        result, bits = run(args), np.asarray(args[0], dtype=np.uint64)
        nan = (bits & np.uint64(0x7FFFFFFFFFFFFFFF)) > np.uint64(0x7FF0000000000000)
        if not nan.any():
            return result
        sign = bits >> np.uint64(63) << np.uint64(form.bits - 1)
        payload = bits >> np.uint64(52 - form.mantissa) & np.uint64((1 << form.mantissa) - 1)
        return np.where(nan, (sign | payload | np.uint64(quiet)).astype(result.dtype), result)

    return kept


def _pair_source(src: str) -> Callable[[Sequence[Array]], tuple[Array, Array]]:
    """(upper, lower) float32 of two f32 registers or of one f16x2 / bf16x2 register."""
    if src == "f32":
        read = decode_function("f32")
        return lambda args: (read(args[0]), read(args[1]))
    half = decode_function(src[:-2])

    def split(args: Sequence[Array]) -> tuple[Array, Array]:
        word = np.asarray(args[0], dtype=np.uint32)
        return half((word >> np.uint32(16)).astype(np.uint16)), half(word.astype(np.uint16))

    return split


def _s2f6(values: Array) -> Array:
    """Signed byte in units of 1/64, round to nearest even, saturating; NaN gives the largest positive value."""
    scaled = np.rint(np.clip(np.nan_to_num(values.astype(np.float64) * 64, nan=127.0), -128, 127))
    return scaled.astype(np.int64) & 0xFF


def _bf16_pair(upper: Array, lower: Array) -> Array:
    """Two float32 to bf16x2, round to nearest even in integers."""
    sixteen, one, bias = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)
    high, low = upper.view(np.uint32), lower.view(np.uint32)
    high = high + ((high >> sixteen & one) + bias) & np.uint32(0xFFFF0000)
    low = low + ((low >> sixteen & one) + bias) >> sixteen
    return np.where(upper == upper, high, np.uint32(0x7FFF0000)) | np.where(lower == lower, low, bias)


def _pack(op: str, base: str, src: str, mode: str, flags: set[str]) -> Operation:
    """Two values to f16x2, bf16x2, f8x2, f6x2, f4x2, ue8m0x2, ue5m3x2 or s2f6x2."""
    relu, saturate = "relu" in flags, "finite" if "satfinite" in flags else "none"
    split = _pair_source(src)
    step = 16 if base in ("f16", "bf16") else 4 if base == "e2m1" else 8
    container: Any = np.uint32 if step == 16 or step == 4 else np.uint16
    unsigned = base in FORMATS and not FORMATS[base].signed
    if mode not in MODES or (base == "ue8m0") != (mode in ("rz", "rp") and step == 8 and base == "ue8m0"):
        raise UnsupportedError(op)
    if step < 16 and base != "ue8m0" and not unsigned and saturate == "none":
        raise UnsupportedError(op, detail=".satfinite is required")
    scaled = next((f for f in flags if f.startswith("n") and "scaled" in flags), "")
    if step == 16 and mode != "rs":
        write = _writer(base, mode, saturate, relu, False, False)

        if base == "bf16" and mode == "rn" and saturate == "none" and not relu:
            return lambda args: _bf16_pair(*split(args))

        def halves(args: Sequence[Array]) -> Array:
            upper, lower = split(args)
            return write(upper).astype(np.uint32) << np.uint32(16) | write(lower)

        return halves

    if base in FORMATS and mode != "rs" and not scaled:
        codes = narrow_table(base, mode, saturate, relu)
        high, rest, one = np.uint32(16), np.uint32(0xFFFF), np.uint32(1)
        shift = np.uint32(step)

        def look_up(values: Array) -> Array:
            bits = values.view(np.uint32)
            return codes[bits >> high | np.minimum(bits & rest, one)]

        def fast(args: Sequence[Array]) -> Array:
            upper, lower = split(args)
            return (look_up(upper) << shift | look_up(lower)).astype(container)

        return fast

    def code(values: Array, random: Array | None = None) -> Array:
        if base == "s2f6":
            return _s2f6(np.maximum(values, 0) if relu else values)
        return encode(np.abs(values) if unsigned else values, base, mode, saturate, relu, random)

    def run(args: Sequence[Array]) -> Array:
        upper, lower = split(args)
        random: tuple[Any, Any] = (None, None)
        if scaled:  # downscale: the input is divided by a power of two first
            factor = np.asarray(args[-1], dtype=np.uint32)
            scales = decode_function("ue8m0")
            low = scales((factor & np.uint32(0xFF)).astype(np.uint8))
            high = low if scaled == "n1" else scales((factor >> np.uint32(8)).astype(np.uint8))
            upper = upper.astype(np.float64) / high
            lower = lower.astype(np.float64) / low
        if mode == "rs":  # f16: 13 bits of each half, placed at the top of the 16-bit field; bf16: 16 bits
            bits = np.asarray(args[2], dtype=np.uint32)
            left = 3 if base == "f16" else 0
            random = (
                (bits >> np.uint32(16)) << np.uint32(left) & np.uint32(0xFFFF),
                bits << np.uint32(left) & np.uint32(0xFFFF),
            )
        return (code(upper, random[0]) << step | code(lower, random[1])).astype(container)

    return run


def _reversed16(bits: Array) -> Array:
    result = np.zeros_like(bits)
    for i in range(16):
        result |= (bits >> np.uint32(i) & np.uint32(1)) << np.uint32(15 - i)
    return result


def _pack4(op: str, base: str, mode: str, flags: set[str]) -> Operation:
    """cvt.rs{.relu}.satfinite.<fp8, fp6 or fp4>x4.f32 d, {a, b, e, f}, rbits."""
    if mode != "rs" or "satfinite" not in flags:
        raise UnsupportedError(op)
    relu, step = "relu" in flags, 4 if base == "e2m1" else 8
    container: Any = np.uint16 if step == 4 else np.uint32

    def run(args: Sequence[Array]) -> Array:
        bits = np.asarray(args[4], dtype=np.uint32)
        if step == 8:
            high, low = bits >> np.uint32(16), bits & np.uint32(0xFFFF)
        else:
            high = (bits >> np.uint32(8) & np.uint32(0xFF)) | (bits >> np.uint32(24)) << np.uint32(8)
            low = (bits & np.uint32(0xFF)) | (bits >> np.uint32(16) & np.uint32(0xFF)) << np.uint32(8)
        result: Any = 0
        for value, random in zip(args, (_reversed16(high), high, _reversed16(low), low), strict=False):
            result = result << step | encode(
                np.asarray(value, np.uint32).view(np.float32), base, "rs", "finite", relu, random
            )
        return np.asarray(result).astype(container)

    return run


def _unpack(op: str, base: str, dst: str, flags: set[str]) -> Operation:
    """f8x2, f6x2, f4x2, ue8m0x2, s2f6x2 to f16x2 or bf16x2; every NaN becomes the canonical one, .relu keeps it."""
    relu, step = "relu" in flags, 4 if base == "e2m1" else 8
    finite, scaled = "satfinite" in flags, "scaled" in flags
    write = _writer(dst[:-2], "rn", "finite" if finite else "none", relu, False, False)
    mask = np.uint32((1 << step) - 1)
    if base == "s2f6":

        def read(codes: Array) -> Array:
            return codes.astype(np.uint8).view(np.int8).astype(np.float32) / np.float32(64)

    else:
        values = decode_function(base)

        def read(codes: Array) -> Array:
            return values(codes.astype(np.uint8))

    if dst not in ("f16x2", "bf16x2"):
        raise UnsupportedError(op)

    def run(args: Sequence[Array]) -> Array:
        word = np.asarray(args[0], dtype=np.uint32)
        upper, lower = read(word >> np.uint32(step) & mask), read(word & mask)
        if scaled:
            factor, scales = np.asarray(args[1], dtype=np.uint32), decode_function("ue8m0")
            upper = upper.astype(np.float64) * scales((factor >> np.uint32(8)).astype(np.uint8))
            lower = lower.astype(np.float64) * scales(factor.astype(np.uint8))
        return write(upper).astype(np.uint32) << np.uint32(16) | write(lower)

    return run


def convert(op: str) -> Operation:
    """The conversion that `op` (a complete cvt opcode, `cvt.` included) names; UnsupportedError for any other form."""
    root, *tokens = op.replace("::", ".").split(".")
    flags = set(tokens[:-2]) if len(tokens) > 2 else set()
    mode = next((t for t in tokens[:-2] if t in MODES or t in ROUND), "")
    if (
        root != "cvt"
        or len(tokens) < 2
        or flags - {"ftz", "sat", "relu", "satfinite", "scaled", "n1", "n2", "ue8m0", mode}
    ):
        raise UnsupportedError(op)
    dst, src = tokens[-2:]
    to, of = _packed(dst), _packed(src)
    make: Callable[[], Operation] | None = None
    if dst in INTEGERS and src in INTEGERS and not mode:
        make = partial(_integer_to_integer, dst, src, "sat" in flags)
    elif dst in INTEGERS and src in SCALARS[:4]:
        make = partial(_float_to_integer, op, dst, src, mode, "ftz" in flags)
    elif dst in SCALARS[:4] and src in INTEGERS:
        make = partial(_integer_to_float, op, dst, src, mode, "sat" in flags)
    elif dst in SCALARS and src in SCALARS[:4]:
        make = partial(_float_to_float, op, dst, src, mode, flags)
    elif to and to[1] == 2 and src in ("f32", "f16x2", "bf16x2") and src != dst:
        make = partial(_pack, op, to[0], src, mode, flags)
    elif to and to[1] == 4 and src == "f32":
        make = partial(_pack4, op, to[0], mode, flags)
    elif of and of[1] == 2 and mode == "rn":
        make = partial(_unpack, op, of[0], dst, flags)
    if make is None:
        raise UnsupportedError(op)
    return quiet(make())

"""Element types of the kit in numpy: codes (what lies in memory) and values (fp64), and the spacing of each format.

Written apart from every plugin, so that an engine is not judged by its own conversions. Imported by the kit's run phase.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Array = Any  # of numpy

__all__ = [
    "INTEGERS",
    "Format",
    "code_dtype",
    "decode",
    "encode",
    "format_of",
    "half_spacing",
    "specials",
]


class Format(NamedTuple):
    """A binary float format: ``mantissa`` stored bits, exponent of the smallest normal number, largest finite value."""

    mantissa: int
    emin: int
    largest: float
    infinite: bool = True
    signed: bool = True


# IEEE 754; bfloat16; OCP 8-bit Floating Point 1.0 (e4m3, e5m2); OCP Microscaling 1.0 (e2m1, e8m0); e5m3: unsigned, 0xff NaN.
FORMATS = {
    "float64": Format(52, -1022, 1.7976931348623157e308),
    "float32": Format(23, -126, 3.4028234663852886e38),
    "float16": Format(10, -14, 65504.0),
    "bfloat16": Format(7, -126, 3.3895313892515355e38),
    "fp8_e4m3": Format(3, -6, 448.0, infinite=False),
    "fp8_e5m2": Format(2, -14, 57344.0, infinite=False),  # it has infinities, and conversions saturate below them
    "fp8_e5m3": Format(3, -14, 114688.0, infinite=False, signed=False),
    "fp4_e2m1": Format(1, 0, 6.0, infinite=False),
    "fp8_e8m0": Format(0, -127, 2.0**127, infinite=False, signed=False),
}
INTEGERS = {
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int4": (-8, 7),
    "boolean": (0, 1),
}
_NATIVE = ("float64", "float32", "float16", "int64", "int32", "int8", "uint8")
_BITS = {"fp8_e4m3": 8, "fp8_e5m2": 8, "fp8_e5m3": 8, "fp8_e8m0": 8, "fp4_e2m1": 4}


def format_of(dtype: str) -> Format | None:
    """None for integers."""
    return FORMATS.get(dtype)


def code_dtype(dtype: str) -> np.dtype[Any]:
    """The unsigned integer that holds one element's bits; 4-bit elements take one byte each."""
    import numpy as np

    from .._dtypes import bits

    return np.dtype(f"u{max(1, bits(dtype) // 8)}")


def decode(codes: Array, dtype: str) -> Array:
    """fp64 values; int64 above 2**53 is not exact."""
    import numpy as np

    if dtype in _NATIVE:
        return codes.view(np.dtype(dtype)).astype(np.float64)
    if dtype == "boolean":
        return (codes != 0).astype(np.float64)
    if dtype == "bfloat16":
        with np.errstate(invalid="ignore"):
            return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "int4":
        return ((codes.astype(np.int64) & 15) ^ 8).astype(np.float64) - 8.0
    return _table(dtype)[codes]


@cache
def _table(dtype: str) -> Array:
    """The value of every code of an 8-bit or 4-bit float."""
    import numpy as np

    form, width = FORMATS[dtype], _BITS[dtype]
    values = np.empty(1 << width)
    for code in range(1 << width):
        body = code & ((1 << (width - 1)) - 1) if form.signed else code
        if dtype == "fp8_e8m0":
            value = float("nan") if code == 255 else 2.0 ** (code - 127)
        else:
            field, fraction = body >> form.mantissa, body & ((1 << form.mantissa) - 1)
            hidden = (1 << form.mantissa) if field else 0
            value = (hidden + fraction) * 2.0 ** (max(field, 1) - 1 + form.emin - form.mantissa)
            if value > form.largest:
                value = float("inf") if dtype == "fp8_e5m2" and not fraction else float("nan")
        values[code] = -value if body != code else value
    return values


def encode(values: Array, dtype: str) -> Array:
    """Codes of values, rounded to nearest even; what is out of range saturates or becomes infinite as the format has it."""
    import numpy as np

    values = np.asarray(values, dtype=np.float64)
    if dtype in INTEGERS:
        low, high = INTEGERS[dtype]
        whole = np.clip(np.rint(np.nan_to_num(values)), low, min(high, 2.0**62))
        kind = {"boolean": np.uint8, "int4": np.int8}.get(dtype) or np.dtype(dtype)
        codes = whole.astype(np.int64).astype(kind).view(code_dtype(dtype))
        return codes & 15 if dtype == "int4" else codes
    if dtype in ("float64", "float32", "float16"):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return values.astype(np.dtype(dtype)).view(code_dtype(dtype))
    if dtype == "bfloat16":
        return _encode_bfloat16(values)
    table = _table(dtype)
    usable = np.flatnonzero(np.isfinite(table))
    order = usable[np.argsort(table[usable], kind="stable")]
    ordered = table[order]
    right = np.clip(np.searchsorted(ordered, values), 1, len(order) - 1)
    low, high = ordered[right - 1], ordered[right]
    nearer_low = (values - low < high - values) | ((values - low == high - values) & (order[right - 1] % 2 == 0))
    codes = np.where(nearer_low, order[right - 1], order[right]).astype(np.uint8)
    nan = np.flatnonzero(np.isnan(table))
    codes = np.where(np.isnan(values), nan[0] if len(nan) else codes, codes)
    if FORMATS[dtype].signed:  # what rounds to zero keeps its sign
        codes = np.where(table[codes] == 0, np.signbit(values) << (_BITS[dtype] - 1), codes)
    return codes.astype(np.uint8)


def _encode_bfloat16(values: Array) -> Array:
    """Rounded once, from fp64: by way of float32 a tie could round twice."""
    import numpy as np

    _, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, -126) - 7)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.where(np.isfinite(values), np.rint(values / quantum) * quantum, values)
        rounded = np.where(np.abs(rounded) > FORMATS["bfloat16"].largest, np.copysign(np.inf, values), rounded)
        rounded = np.where(np.isnan(values), np.nan, np.copysign(rounded, values))
        return (rounded.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def half_spacing(dtype: str, magnitude: Array) -> Array:
    """Half the distance of neighbouring values around ``magnitude``: what one rounding to nearest may cost."""
    import numpy as np

    form = FORMATS.get(dtype)
    if form is None:
        return np.zeros_like(magnitude) if dtype == "boolean" else np.full_like(magnitude, 0.5)
    if dtype == "fp8_e8m0":  # a scale: no rounding to nearest, the op says which way
        return np.zeros_like(magnitude)
    size = np.minimum(np.nan_to_num(magnitude, nan=0.0, posinf=form.largest), form.largest)
    _, exponent = np.frexp(size)
    return np.ldexp(1.0, np.maximum(exponent - 1, form.emin) - form.mantissa - 1)


def specials(dtype: str) -> list[float]:
    """Values that break careless code: NaN, infinities, -0 and the ends of the subnormal range, where the type has them."""
    form = FORMATS.get(dtype)
    if form is None or dtype == "fp8_e8m0":
        return []
    smallest = 2.0 ** (form.emin - form.mantissa)
    found = [smallest, 2.0**form.emin - smallest]
    if form.signed:
        found += [-smallest, -0.0]
    if dtype != "fp4_e2m1":
        found.append(float("nan"))
    if form.infinite:
        found += [float("inf"), float("-inf")]
    return found

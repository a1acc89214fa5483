"""The arithmetic of the op table's formulas on vectors of registers: the facade ``m`` that ``formulas`` describes.

``FloatMath`` computes in fp32 and ``IntegerMath`` in integers, on vectors of shape (V,); masks are Boolean vectors. Errors relative to the
exact function of the fp32 argument, where the result is a normal number; what approximate instructions add is from the PTX ISA:

    add sub mul fma div   correctly rounded; ``mul.rn`` and ``fma.rn`` are never contracted with a neighbour
    rcp sqrt rsqrt        2^-23, 2^-23, 2^-22: rcp.approx, sqrt.approx, rsqrt.approx
    erf                   2^-23, and 2^-22 of ex2.approx above 1: a polynomial below 1, 1 - 2^p above
    sigmoid               2^-22 + 2^-23, and |x| 2^-24 for x < 0: ex2.approx, rcp.approx
    normal_cdf            2.3e-6 for x > -5, 1e-5 for x > -8 (6e-16), 3e-3 for x > -9.5 (1e-21): 2^p
    exp log tanh          2^-22, the compiler's library
    sin cos tan pow fmod  the compiler's library: 2e-7 of the largest value, pow 4e-6, fmod exact

Imported by the epilogue and by mainloop prologues.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import arith
from cutlass.cute import math as device

from .vectors import each, each_f32

__all__ = ["FloatMath", "IntegerMath"]

Vector = Any  # cute.TensorSSA of shape (V,)

# erf(x) = x + x p(x^2) for |x| < 1 and +-(1 - 2^(-|x| p(|x|))) from there to 4, beyond which it is 1 in fp32. Minimax fits of degree
# 5 in relative error (4e-8 and 3e-9), lowest power first.
_ERF_SMALL = (
    0.12837912142276764, -0.37612324953079224, 0.11280179768800735, -0.02671131119132042, 0.004917551297694445,
    -0.0005631421809084713,
)  # fmt: skip
_ERF_LARGE = (
    1.6280525922775269, 0.9173109531402588, 0.15165050327777863, -0.032891206443309784, 0.004597784485667944,
    -0.00030389297171495855,
)  # fmt: skip
_ERF_IS_ONE = 4.0
_LOG2_E = 1.4426950408889634
# The normal distribution's tail beyond a >= 0 is 2^(a p(a) - 1): a minimax fit of degree 11 on [0, 8] (1.2e-7), lowest power first.
# Above 8 the polynomial keeps falling, to -infinity.
_NORMAL_TAIL = (
    -1.1511085033416748, -0.4591871201992035, -0.05252784863114357, 0.007046875543892384, -5.47518975508865e-05,
    -0.0002699709730222821, 8.062977576628327e-05, -1.3698608199774753e-05, 1.5127948245208245e-06, -1.0735041655607347e-07,
    4.459164593129117e-09, -8.252101085792773e-11,
)  # fmt: skip


class _Math:
    """What both compute types share. ``index_of`` gives the Int32 positions along an axis (0 batch, 1 row, 2 column)."""

    dtype: Any
    integer: bool

    def __init__(self, size: int, index_of: Callable[[int], Vector] | None = None) -> None:
        self.size, self._index_of = size, index_of

    def const(self, x: float) -> Vector:
        return cute.full((self.size,), x, self.dtype)

    def neg(self, a: Vector) -> Vector:
        return -a

    def lt(self, a: Vector, b: Vector) -> Vector:
        return a < b

    def le(self, a: Vector, b: Vector) -> Vector:
        return a <= b

    def gt(self, a: Vector, b: Vector) -> Vector:
        return a > b

    def ge(self, a: Vector, b: Vector) -> Vector:
        return a >= b

    def eq(self, a: Vector, b: Vector) -> Vector:
        return a == b

    def ne(self, a: Vector, b: Vector) -> Vector:
        return a != b

    def logical_and(self, a: Vector, b: Vector) -> Vector:
        return a & b

    def logical_or(self, a: Vector, b: Vector) -> Vector:
        return a | b

    def logical_not(self, a: Vector) -> Vector:
        return a ^ cute.full_like(a, True, Boolean)

    def select(self, mask: Vector, a: Vector, b: Vector) -> Vector:
        return cute.where(mask, a, b)


class FloatMath(_Math):
    """fp32."""

    dtype = Float32
    integer = False

    def const(self, x: float) -> Vector:
        # The DSL keeps its constants by value, and -0.0 == 0.0: where both occur it takes the first one for either.
        return -super().const(0.0) if x == 0 and math.copysign(1.0, x) < 0 else super().const(x)

    def add(self, a: Vector, b: Vector) -> Vector:
        return a + b

    def sub(self, a: Vector, b: Vector) -> Vector:
        return a - b

    def mul(self, a: Vector, b: Vector) -> Vector:
        # Without .rn, ptxas may contract it with an addition (PTX ISA, mul), and a * b - a * b is not 0.
        return each_f32("mul.rn", a, b)

    def div(self, a: Vector, b: Vector) -> Vector:
        return a / b

    def fma(self, a: Vector, b: Vector, c: Vector) -> Vector:
        return each_f32("fma.rn", a, b, c)

    def abs(self, a: Vector) -> Vector:
        return device.abs(a)

    def min(self, a: Vector, b: Vector) -> Vector:
        return each("min.NaN.f32", Float32, a, b)  # the compiler makes three instructions of arith.minimumf

    def max(self, a: Vector, b: Vector) -> Vector:
        return each("max.NaN.f32", Float32, a, b)

    def fmod(self, a: Vector, b: Vector) -> Vector:
        return device.rem(a, b)

    def floor(self, a: Vector) -> Vector:
        return device.floor(a)

    def ceil(self, a: Vector) -> Vector:
        return device.ceil(a)

    def sqrt(self, a: Vector) -> Vector:
        return each("sqrt.approx.f32", Float32, a)

    def rsqrt(self, a: Vector) -> Vector:
        return each("rsqrt.approx.f32", Float32, a)

    def rcp(self, a: Vector) -> Vector:
        return each("rcp.approx.f32", Float32, a)

    def exp(self, a: Vector) -> Vector:
        return device.exp(a)

    def log(self, a: Vector) -> Vector:
        return device.log(a)

    def sin(self, a: Vector) -> Vector:
        return device.sin(a)

    def cos(self, a: Vector) -> Vector:
        return device.cos(a)

    def tan(self, a: Vector) -> Vector:
        return device.tan(a)

    def tanh(self, a: Vector) -> Vector:
        return device.tanh(a)

    def pow(self, a: Vector, b: Vector) -> Vector:
        return device.pow(a, b)

    def sigmoid(self, a: Vector) -> Vector:
        e = each("ex2.approx.ftz.f32", Float32, self.mul(a, self.const(-_LOG2_E)))
        return each("rcp.approx.ftz.f32", Float32, self.add(self.const(1.0), e))  # from 1 up: nothing is lost by .ftz

    def normal_cdf(self, a: Vector) -> Vector:
        size = self.abs(a)
        first, *rest = reversed(_NORMAL_TAIL)
        p = self.const(first)
        for coefficient in rest:
            p = self.fma(p, size, self.const(coefficient))
        tail = each("ex2.approx.ftz.f32", Float32, self.fma(p, size, self.const(-1.0)))
        return self.select(self.lt(a, self.const(0.0)), tail, self.const(1.0) - tail)

    def erf(self, a: Vector) -> Vector:
        """Without a branch: the library's has one for every element."""
        size = self.abs(a)
        large = size >= self.const(1.0)
        t = self.select(large, self.min(size, self.const(_ERF_IS_ONE)), size * size)
        first, *rest = (
            self.select(large, self.const(high), self.const(low))
            for low, high in zip(reversed(_ERF_SMALL), reversed(_ERF_LARGE), strict=True)
        )
        p = first
        for coefficient in rest:
            p = self.fma(p, t, coefficient)
        tail = self.const(1.0) - each("ex2.approx.ftz.f32", Float32, self.neg(t * p))
        return self.select(large, device.copysign(tail, a), self.fma(p, a, a))


class IntegerMath(_Math):
    """int32: modulo 2^32 but for ``mad``; division truncates, and neither 0 nor -2^31 / -1 reaches it.

    ``wide``: results become floats, so that ``mad`` gives Int64, exact; else it saturates.
    """

    dtype = Int32
    integer = True

    def __init__(self, size: int, index_of: Callable[[int], Vector] | None = None, wide: bool = False) -> None:
        super().__init__(size, index_of)
        self.wide = wide

    def index(self, axis: int) -> Vector:
        assert self._index_of is not None, "positions are known in an epilogue alone"
        return self._index_of(axis)

    def add(self, a: Vector, b: Vector) -> Vector:
        return a + b

    def sub(self, a: Vector, b: Vector) -> Vector:
        return a - b

    def mul(self, a: Vector, b: Vector) -> Vector:
        return a * b

    def fma(self, a: Vector, b: Vector, c: Vector) -> Vector:
        return a * b + c

    def mad(self, a: Vector, b: Vector, c: Vector) -> Vector:
        exact = each("mad.wide.s32", Int64, a, b, c.to(Int64))
        return exact if self.wide else each("cvt.sat.s32.s64", Int32, exact)

    def div(self, a: Vector, b: Vector) -> Vector:
        return _like(a, arith.divsi(a, b))

    def fmod(self, a: Vector, b: Vector) -> Vector:
        return _like(a, arith.remsi(a, b))

    def abs(self, a: Vector) -> Vector:
        return self.max(a, self.neg(a))

    def min(self, a: Vector, b: Vector) -> Vector:
        return _like(a, arith.minsi(a, b))

    def max(self, a: Vector, b: Vector) -> Vector:
        return _like(a, arith.maxsi(a, b))


def _like(a: Vector, value: Any) -> Vector:
    return cute.TensorSSA(value, a.shape, a.dtype)

"""Gates and update weights: device functions on fp32 scalars. Imported by the prepare stages of prefill and by decode.

``Gate`` and ``Beta`` are policies fixed when a kernel is traced; their methods emit straight code without branches. Relative errors
of the formulas, to which a GPU adds the error of the instructions (PTX ISA: ex2.approx 2 ulp, rcp.approx 1 ulp):

    exp         2^-24 (1 + |x|)
    softplus    2^-23 for x >= -1; the tail has the error of its exp, so 1e-6 at x = -16
    sigmoid     2^-23 for x >= 0; the tail as above
    log         correctly rounded by the compiler's library, to 1 ulp

Infinite and NaN arguments give what the exact functions give: exp(-inf) = 0, softplus(inf) = inf, and NaN stays NaN. Exponentials below
2^-126 are 0.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cute import math as device

__all__ = ["LOG2_E", "Beta", "Gate"]

LOG2_E = 1.4426950408889634
SMALLEST_DECAY = 1e-10  # of gates in the linear domain
# log(1 + e) = s p(s^2) with s = e / (2 + e): 2 atanh(s). A minimax fit of degree 4 on [0, 1/9] in relative error (4e-9), lowest
# power first.
_TWICE_ATANH = (2.0, 0.6666631698608398, 0.40024909377098083, 0.27960601449012756, 0.2817833423614502)


class Gate:
    """log decay and decay of one gate.

    domain       "log": ``g`` is a log decay, counted as 0 where it is positive; "linear": ``g`` is a decay, held to [1e-10, 1]
    safe         "": ``g`` is the gate itself; else it is a logit: "softplus": -amplitude softplus(g + bias),
                 "sigmoid": lower_bound sigmoid(amplitude (g + bias))
    a_log, bias  whether the gate has these parameters: without them their factor and summand are not emitted
    """

    def __init__(
        self,
        domain: str = "log",
        safe: str = "",
        lower_bound: float = -5.0,
        a_log: bool = False,
        bias: bool = False,
    ) -> None:
        # Not a dataclass: the DSL would make run-time values of its fields.
        if domain not in ("log", "linear") or safe not in ("", "softplus", "sigmoid") or (safe and domain == "linear"):
            raise ValueError(f"there is no gate with domain {domain!r} and form {safe!r}")
        self.domain, self.safe, self.lower_bound = domain, safe, float(lower_bound)
        self.has_a_log, self.has_bias = a_log, bias

    @classmethod
    def of(cls, problem: Any) -> Gate:
        """The gate of a problem: attributes domain, safe, lower_bound, a_log_dtype and bias_dtype ("": absent)."""
        bound = problem.lower_bound if problem.safe == "sigmoid" else 0.0
        return cls(problem.domain, problem.safe, bound, bool(problem.a_log_dtype), bool(problem.bias_dtype))

    def amplitude(self, a_log: Float32) -> Float32:
        """What the other methods take as ``amplitude``: exp(a_log)."""
        return exp(a_log)

    def log_decay(self, g: Float32, amplitude: Float32, bias: Float32) -> Float32:
        """The natural logarithm of the decay, at most 0. ``amplitude`` and ``bias`` are not read where the gate has none."""
        if self.domain == "linear":
            return device.log(clamped(g))
        if not self.safe:
            return _min(g, Float32(0.0))
        x = g + bias if self.has_bias else g
        if self.safe == "softplus":
            soft = softplus(x)
            return -(amplitude * soft) if self.has_a_log else -soft
        return Float32(self.lower_bound) * sigmoid(amplitude * x if self.has_a_log else x)

    def decay(self, g: Float32, amplitude: Float32, bias: Float32) -> Float32:
        """exp(log_decay), in [0, 1]; without a logarithm where the domain is linear."""
        return clamped(g) if self.domain == "linear" else exp(self.log_decay(g, amplitude, bias))


class Beta:
    """The weight of an update: the value itself, or ``activated`` from a logit: its sigmoid, ``doubled`` for negative eigenvalues."""

    def __init__(self, activated: bool = False, doubled: bool = False) -> None:
        if doubled and not activated:
            raise ValueError("a beta that is no logit is not doubled")
        self.activated, self.doubled = activated, doubled

    @classmethod
    def of(cls, problem: Any) -> Beta:
        """Of a problem with the attributes beta_sigmoid and neg_eigval."""
        return cls(problem.beta_sigmoid, problem.neg_eigval)

    def value(self, b: Float32) -> Float32:
        if not self.activated:
            return b
        weight = sigmoid(b)
        return weight * Float32(2.0) if self.doubled else weight


def exp(x: Float32) -> Float32:
    """e^x for x up to 88."""
    return _ptx("ex2.approx.ftz.f32", x * Float32(LOG2_E))


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e^-x)."""
    return _ptx("rcp.approx.ftz.f32", exp(-x) + Float32(1.0))


def softplus(x: Float32) -> Float32:
    """log(1 + e^x), as max(x, 0) + log(1 + e^-|x|)."""
    above = _ptx("max.NaN.f32", x, Float32(0.0))
    e = exp(_min(x, -x))
    s = e * _ptx("rcp.approx.ftz.f32", e + Float32(2.0))
    t = s * s
    first, *rest = reversed(_TWICE_ATANH)
    p = Float32(first)
    for coefficient in rest:
        p = p * t + Float32(coefficient)
    return above + s * p


def clamped(g: Float32) -> Float32:
    """A decay of the linear domain, held to [1e-10, 1]."""
    return _min(_ptx("max.NaN.f32", g, Float32(SMALLEST_DECAY)), Float32(1.0))


def _min(a: Float32, b: Float32) -> Float32:
    return _ptx("min.NaN.f32", a, b)


def _ptx(instruction: str, *operands: Float32) -> Float32:
    """A PTX instruction from fp32 to fp32."""
    places = ", ".join(f"${i}" for i in range(len(operands) + 1))
    kind = Float32.mlir_type
    found = llvm.inline_asm(
        kind,
        [operand.ir_value() for operand in operands],
        f"{instruction} {places};",
        "=f" + ",f" * len(operands),
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Float32(found)

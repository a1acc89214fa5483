"""The op table: each pointwise op once, as a formula for the kernels and as a numpy reference. Also the reduction modes.

``Row.lower(m, *args, **attrs)`` writes the formula in terms of a facade ``m`` of vector arithmetic, ``Row.reference(*args, **attrs)``
computes it with numpy from the definition, in fp64, or exactly in int64 where every argument is an integer array. The facade's functions
are listed in ``formulas``. Imported by ``lower`` (names), ``reference`` and the kernels; imports numpy when a reference is called.

Contracts that an evaluator keeps (``kernels/math`` and ``reference`` do):
* Arguments are converted to the compute type first; a boolean is 0 or 1; a mask result is 1 or 0.
* What is computed in int32 is exact, in 64 bits where it needs them, whatever becomes of it: a sum or product of int32 values that is
  declared as a float is the float next to it, and one that is declared as an integer saturates. ``lower`` computes the ops of ``EXACT`` in
  int32 wherever all arguments are integers, also where the graph declares a float compute type, and div where it declares int32; other ops
  of integers, a division in float32 among them, convert them to fp32 first. These are the rules of the core's reference engine.
* The result is rounded to the op's declared type, to nearest even. fp16 and bf16 overflow to infinity; fp8 saturates at its largest
  finite value, infinities too; integers saturate, NaN becomes 0 there; boolean is ``!= 0``.
* Sums and products of many int32 values, which are those of a matmul of integers and of the reductions whose result is int32, are modulo
  2^32, whatever compute type is declared: partial results come in any order, and saturated ones would depend on it.
* NaN propagates through every op but comparisons, logical ops and ``binary_select`` (which passes on what it selects).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import formulas as f

if TYPE_CHECKING:
    from .ir import Op

__all__ = [
    "COMPARING",
    "EXACT",
    "GROWING",
    "REDUCTIONS",
    "TABLE",
    "ReductionMode",
    "Row",
    "keeps_zero",
    "zero_preserving",
]

Value = Any  # a facade's vector, or a numpy array


@dataclass(frozen=True)
class Row:
    """One op.

    arity      arguments in a Program (gen_index and constant are sources: none)
    lower      (m, *args, **attrs) -> vector, or mask
    attrs      the attributes that ``lower`` and ``reference`` take, all of them
    at_zero    (attrs) -> whether the result is exactly 0 where the argument is 0: False with more than one argument, because the
               other one may be infinite or NaN
    integer    whether it has an int32 form
    result     "value", or "mask"
    cost       of an element, about, in instructions of the price of an addition; for the cost model
    """

    name: str
    arity: int
    lower: Callable[..., Value]
    attrs: tuple[str, ...] = ()
    at_zero: Callable[[Mapping[str, Any]], bool] = lambda attrs: False
    integer: bool = False
    result: str = "value"
    cost: int = 1

    @property
    def reference(self) -> Callable[..., Any]:
        """(*args, **attrs) -> array; of a source (shape, **attrs) -> array. Imports numpy."""
        from .references import REFERENCE

        return REFERENCE[self.name]


def zero_preserving(name: str, attrs: Mapping[str, Any]) -> bool:
    """Whether op ``name`` with ``attrs`` maps 0 to exactly 0; False for an op that the table does not know."""
    row = TABLE.get(name)
    return row is not None and row.at_zero(attrs)


def keeps_zero(prologue: Sequence[Op]) -> bool:
    """Whether a mainloop prologue certainly maps an element that is 0 to exactly 0, whatever its scalars are.

    Where it does not, the elements past the end of K, which are read as 0, have to be cleared after it: 0 times what the other
    operand's prologue makes of its own zeros may be NaN, and the product of two such values is not 0.
    """
    zero, finite = {-1}, set()  # indices of values that are 0 where the element is, and of finite constants
    for i, op in enumerate(prologue):
        attrs = dict(op.attrs)
        args = [arg.index if arg.kind == "val" else None for arg in op.args]
        if op.name == "constant" and math.isfinite(attrs["value"]):
            finite.add(i)
        scaled = op.name == "mul" and any(arg in zero for arg in args) and all(arg in zero | finite for arg in args)
        if scaled or (len(args) == 1 and args[0] in zero and zero_preserving(op.name, attrs)):
            zero.add(i)
    return not prologue or len(prologue) - 1 in zero


_CLIPS = ("negative_slope", "lower_clip", "upper_clip")


def _always(attrs: Mapping[str, Any]) -> bool:
    return True


def _unless_lifted(attrs: Mapping[str, Any]) -> bool:
    """relu keeps 0 unless the lower clip is above it, or the upper one below."""
    lower, upper = attrs.get("lower_clip"), attrs.get("upper_clip")
    return (lower is None or lower <= 0) and (upper is None or upper >= 0)


def _unary(name: str, lower: Any, cost: int = 1) -> Row:
    return Row(name, 1, lower, cost=cost)


def _unary_at_0(name: str, lower: Any, integer: bool = False, cost: int = 1) -> Row:
    return Row(name, 1, lower, at_zero=_always, integer=integer, cost=cost)


def _binary(name: str, lower: Any, integer: bool = False, cost: int = 1) -> Row:
    return Row(name, 2, lower, integer=integer, cost=cost)


def _mask(name: str, lower: Any, arity: int = 2) -> Row:
    return Row(name, arity, lower, integer=True, result="mask")


_ROWS = (
    _unary_at_0("abs", f.abs_, integer=True),
    _unary_at_0("ceil", f.whole("ceil"), integer=True),
    _unary("cos", f.named("cos"), cost=12),
    _unary_at_0("elu", f.elu, cost=6),
    _unary_at_0("erf", f.named("erf"), cost=16),
    _unary("exp", f.named("exp"), cost=4),
    _unary_at_0("floor", f.whole("floor"), integer=True),
    _unary_at_0("gelu", f.gelu, cost=18),
    _unary_at_0("gelu_approx_tanh", f.gelu_tanh, cost=10),
    _unary_at_0("identity", lambda m, x: x, integer=True),
    _unary("log", f.named("log"), cost=4),
    _mask("logical_not", lambda m, x: m.logical_not(f.nonzero(m, x)), arity=1),
    _unary_at_0("neg", f.negated, integer=True),
    _unary("reciprocal", f.named("rcp"), cost=4),
    _unary("rsqrt", f.named("rsqrt"), cost=4),
    _unary("sigmoid", f.sigmoid, cost=8),
    _unary_at_0("sin", f.named("sin"), cost=12),
    _unary("softplus", f.softplus, cost=10),
    _unary_at_0("sqrt", f.named("sqrt"), cost=4),
    _unary_at_0("tan", f.named("tan"), cost=16),
    _unary_at_0("tanh", f.named("tanh"), cost=6),
    Row("relu", 1, f.relu, _CLIPS, _unless_lifted, integer=True),
    Row("swish", 1, f.swish, ("swish_beta",), _always, cost=9),
    _binary("add", f.add, integer=True),
    _binary("add_square", f.add_square, integer=True),
    _binary("div", f.div, integer=True, cost=8),
    _mask("logical_and", lambda m, a, b: m.logical_and(f.nonzero(m, a), f.nonzero(m, b))),
    _mask("logical_or", lambda m, a, b: m.logical_or(f.nonzero(m, a), f.nonzero(m, b))),
    _binary("mul", f.mul, integer=True),
    _binary("sub", f.sub, integer=True),
    _binary("max", f.named("max"), integer=True),
    _binary("min", f.named("min"), integer=True),
    _binary("mod", f.mod, integer=True, cost=10),
    _binary("pow", f.named("pow"), cost=12),
    _mask("cmp_eq", f.named("eq")),
    _mask("cmp_ge", f.named("ge")),
    _mask("cmp_gt", f.named("gt")),
    _mask("cmp_le", f.named("le")),
    _mask("cmp_lt", f.named("lt")),
    _mask("cmp_neq", f.named("ne")),
    _binary("elu_backward", f.elu_backward, cost=7),
    _binary("gelu_approx_tanh_backward", f.gelu_tanh_backward, cost=16),
    _binary("gelu_backward", f.gelu_backward, cost=24),
    _binary("sigmoid_backward", f.sigmoid_backward, cost=10),
    _binary("softplus_backward", lambda m, loss, x: m.mul(loss, f.sigmoid(m, x)), cost=9),
    _binary("tanh_backward", f.tanh_backward, cost=8),
    Row("relu_backward", 2, f.relu_backward, _CLIPS),
    Row("swish_backward", 2, f.swish_backward, ("swish_beta",), cost=14),
    Row("binary_select", 3, lambda m, a, b, mask: m.select(f.nonzero(m, mask), a, b), integer=True),
    Row("gen_index", 0, lambda m, axis: m.index(axis), ("axis",), integer=True),
    Row("constant", 0, lambda m, value: m.const(value), ("value",), integer=True),
)

TABLE: dict[str, Row] = {row.name: row for row in _ROWS}

# Ops that integers stay integers in whatever the declared compute type is, so that no bit is lost by way of fp32.
EXACT = frozenset(row.name for row in _ROWS if row.integer and row.name not in ("div", "constant"))
# Those whose result may have more digits than their arguments.
GROWING = frozenset({"add", "sub", "mul", "add_square"})
COMPARING = frozenset(row.name for row in _ROWS if row.result == "mask")


@dataclass(frozen=True)
class ReductionMode:
    """How values are reduced: ``prepare`` each value, start from ``identity``, ``combine`` in any order and grouping.

    prepare   "" | "abs" | "nonzero" (0 becomes 1)
    combine   "add" | "mul" | "min" | "max"; a NaN makes the result NaN; sums and products of int32 are modulo 2^32
    identity  of fp32; min and max of int32 start from the largest and the smallest int32
    divide    the result is divided by the number of values that are reduced, at their runtime sizes
    """

    combine: str
    identity: float
    prepare: str = ""
    divide: bool = False


# The core's reduction modes, but NORM2: it needs a square root after the last partial result.
REDUCTIONS: dict[str, ReductionMode] = {
    "ADD": ReductionMode("add", 0.0),
    "MUL": ReductionMode("mul", 1.0),
    "MIN": ReductionMode("min", math.inf),
    "MAX": ReductionMode("max", -math.inf),
    "AMAX": ReductionMode("max", 0.0, "abs"),
    "AVG": ReductionMode("add", 0.0, divide=True),
    "NORM1": ReductionMode("add", 0.0, "abs"),
    "MUL_NO_ZEROS": ReductionMode("mul", 1.0, "nonzero"),
}

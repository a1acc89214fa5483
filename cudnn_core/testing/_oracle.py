"""The kit's own oracle: every op in numpy fp64, each result with a bound of what rounding may have cost an engine.

The error model (running error analysis, to first order with a margin). Let u be the unit roundoff of the node's compute type
(2**-24 for float32; 0 for integers) and e the bound that an input carries (0 for graph inputs, which are exact).

  sum of n products    e(C) = n 2u sum|a||b| + sum(|a| e(b) + e(a) |b| + e(a) e(b))    (2u: tensor cores truncate)
    of 8-bit floats    with the note reduced_precision_reduction: plus ceil(n / 32) 33 2**-13 (max|a| max|b| + |C|), with the largest
                       |a| and |b| of the sum (of a row and a column)
    of float32         with the note down_convert_inputs: e(a) and e(b) of float32 operands grow by 2**-11 (|a| + e(a)); what may round
                       to 0 times an infinity may be NaN and is not judged
  sum of n terms       e    = n 2u sum|x| + sum e(x)
  function f           e    = |f(x +- d) - f(x)| + 4u (|f(x)| + s(x)), d = e(x) + 4u |x| + the smallest normal number (flushing
                       subnormals is allowed); s is the size of what f cancels internally. Exact functions: d = e(x), no 4u.
    approximate        with the note approximate_math: plus 2**-20 (|f(x)| + s(x)) for the functions it names, where s is at least 1 for log,
                       erf, sin and cos and tan**2 for tan; if f contains tanh(u), what 2**-10.5 |tanh(u)| there changes
    max, min,          with the note nan_not_propagated: a result that a NaN reaches is not judged, nor what follows from it; likewise the
    relu_backward      reductions MAX, MIN and AMAX (and an infinity times the slope 0 of relu_backward)
  softmax(s) v         the relative error of a probability is expm1(e(s) + max e(s) + (n + 8) 2u + 2u |s - max|), and it may be
                       rounded once to the type of v
  normalisation        the two rules above, through mean, variance and reciprocal root
  delta rule           stochastic arithmetic: the recurrence is repeated with every operand, update and state perturbed by up to
                       2 max(u(type of q), 2u sqrt(K)) of its size; e = 6 times the root mean square of the change over a head
  virtual tensor       plus half the spacing of its declared type, whether the engine rounds there or not
  output               plus half the spacing of its type around the exact value, and that is the tolerance

The notes. One fp8 wgmma of Hopper adds 32 products to the accumulator: it aligns these 33 addends to the largest exponent among
them and keeps about 13 bits behind the leading one. Each addend loses up to 2**-13 of the largest, which is a product or what has
been summed; taking partial sums in float32 between the instructions (promotion) removes none of it. That 33 addends are never all
cut by a whole unit covers partial sums that are larger than their result. Only operands that the graph declares as 8-bit floats
count, and only for engines that state the note for the graph: to all others the first rule applies. TF32 operands are float32 rounded
to 10 bits behind the leading one. tanh.approx.f32 has a relative error of up to 2**-11 (PTX ISA).

Functions take ``Val`` (value, bound) by port. ``_oracle_blocks`` has the larger ops. Imported by the kit's run phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._enums import numerical_note
from ._codec import FORMATS, decode, encode, half_spacing

if TYPE_CHECKING:
    from .._graph._frozen import FrozenGraph

__all__ = ["RULES", "Context", "Val", "evaluate", "largest_product", "product_error", "unjudged"]

Array = Any  # of numpy


class Val(NamedTuple):
    """Exact values and error bounds, both fp64 and of one shape."""

    v: Array
    e: Array


class Context(NamedTuple):
    """``u``: unit roundoff of the node's arithmetic; ``tiny``: its smallest normal number; the rest: whether the engine states
    ``reduced_precision_reduction``, ``down_convert_inputs``, ``approximate_math``, ``nan_not_propagated``."""

    u: float
    tiny: float
    reduced: bool = False
    converts: bool = False
    approximates: bool = False
    drops_nan: bool = False

    def reduces(self, *operands: Any) -> bool:
        """Whether sums of products of these tensors of the graph are those of reduced precision."""
        return self.reduced and all(str(operand.dtype) in _REDUCED_TYPES for operand in operands)

    def factor(self, value: Val, operand: Any) -> Val:
        """A factor of a sum of products as the engine may read it: ``value``, declared as this tensor of the graph."""
        if not self.converts or str(operand.dtype) != "float32":
            return value
        size = np.where(np.isfinite(value.v), np.abs(value.v), 0.0)
        flushed = np.where(value.v != 0, _CONVERTED_TINY, 0.0)
        return Val(value.v, value.e + _CONVERTED * (size + value.e) + flushed)


# Notes that bounds follow from, by field of Context.
_NOTES = {
    "reduced": str(numerical_note.REDUCED_PRECISION_REDUCTION).lower(),
    "converts": str(numerical_note.DOWN_CONVERT_INPUTS).lower(),
    "approximates": "approximate_math",
    "drops_nan": "nan_not_propagated",
}
_REDUCED_TYPES = ("fp8_e4m3", "fp8_e5m2")
_REDUCED_K, _REDUCED_BITS = 32, 13  # of one instruction; kept behind the leading one
_CONVERTED, _CONVERTED_TINY = 2.0**-11, 2.0**-137  # unit roundoff of TF32; half its smallest number
_TANH, _OTHERS = 2.0**-10.5, 2.0**-20  # of approximations, relative


Rule = Callable[[Any, Mapping[str, Any], Context], dict[str, Val]]
RULES: dict[str, Rule] = {}


def evaluate(graph: FrozenGraph, inputs: Mapping[int, Array], notes: Iterable[str] = ()) -> dict[int, Val]:
    """Every tensor of a graph of fixed sizes by index, from the codes of its inputs. KeyError for an op without a rule.

    notes  what the engine states of its plans of this graph, in any case
    """
    from . import _oracle_blocks  # noqa: F401  fills RULES

    stated = {note.lower() for note in notes}
    flags = {field: note in stated for field, note in _NOTES.items()}
    known: dict[int, Val] = {}
    for tensor in graph.tensors:
        if tensor.is_constant:
            known[tensor.index] = exact(np.full(tensor.dim, float(tensor.value or 0)))
        elif tensor.index in inputs:
            known[tensor.index] = exact(decode(inputs[tensor.index], tensor.dtype))
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            ports = {
                port: [known[item.index] for item in held] if isinstance(held, tuple) else known[held.index]
                for port, held in node.inputs.items()
            }
            rule = _rule(node)
            results = rule(node, ports, _context(node)._replace(**flags))
            if rule is not _pointwise:
                results = _settled(results, ports)
            for port, tensor in node.outputs.items():
                found = results[port]
                value = Val(_shaped(found.v, tensor.dim), _shaped(found.e, tensor.dim))
                known[tensor.index] = _virtual(value, tensor.dtype) if tensor.role == "virtual" else value
    return known


def exact(value: Array) -> Val:
    value = np.asarray(value, dtype=np.float64)
    return Val(value, np.zeros_like(value))


def _settled(results: Mapping[str, Val], ports: Mapping[str, Any]) -> dict[str, Val]:
    """Bounds without NaN, and none where sums are not finite: which kind they are does not depend on rounding."""
    inputs = [x for held in ports.values() for x in (held if isinstance(held, list) else [held])]
    doubtful = any(np.isinf(x.e).any() for x in inputs)
    settled = {}
    for port, (value, error) in results.items():
        bound = np.where(np.isnan(error), np.inf, error)
        settled[port] = Val(value, bound if doubtful else np.where(np.isfinite(value), bound, 0.0))
    return settled


def _rule(node: Any) -> Rule:
    found = RULES.get(node.op)
    if found is None and node.op in POINTWISE:
        return _pointwise
    if found is None:
        raise KeyError(f"the kit's own oracle has no op {node.op}")
    return found


def _context(node: Any) -> Context:
    dtype = str(node.compute_dtype)
    if dtype in ("int32", "int64"):
        return Context(0.0, 0.0)
    form = FORMATS.get(dtype) or FORMATS["float32"]
    return Context(2.0 ** -(form.mantissa + 1), 2.0**form.emin)


def _shaped(value: Array, dim: tuple[int, ...]) -> Array:
    return value if value.shape == tuple(dim) else np.broadcast_to(value, dim)


def _virtual(value: Val, dtype: str) -> Val:
    """An intermediate: narrow types are rounded for real, since what follows depends on it."""
    form = FORMATS.get(dtype)
    rounding = half_spacing(dtype, np.abs(value.v) + value.e)
    if form is not None and form.mantissa >= 7:
        return Val(value.v, value.e + rounding)
    stored = decode(encode(value.v, dtype), dtype)
    return Val(stored, np.where(value.e > 0, value.e + 2 * rounding, 0.0))


def product_error(
    a: Val,
    b: Val,
    multiply: Callable[[Array, Array], Array],
    terms: int,
    u: float,
    *,
    largest: Callable[[Array, Array], Array] | None = None,
) -> Val:
    """The rule for sums of products; ``multiply`` is bilinear.

    largest  of sums of reduced precision: max|a| max|b| of each, from |a| and |b|
    """
    value = multiply(a.v, b.v)
    error = terms * 2 * u * multiply(np.abs(a.v), np.abs(b.v))
    if a.e.any() or b.e.any():
        error = error + multiply(np.abs(a.v), b.e) + multiply(a.e, np.abs(b.v)) + multiply(a.e, b.e)
        value, error = _undecided(a, b, multiply, value, error)
    if largest is not None:
        addends = math.ceil(terms / _REDUCED_K) * (_REDUCED_K + 1)
        top = largest(np.abs(a.v) + a.e, np.abs(b.v) + b.e)
        error = error + addends * 2.0**-_REDUCED_BITS * (top + np.abs(value))
    return Val(value, _clean(error))


def _undecided(
    a: Val, b: Val, multiply: Callable[[Array, Array], Array], value: Array, error: Array
) -> tuple[Array, Array]:
    """Sums that nothing can be said of: with an operand in doubt, or an infinity times what may be 0."""

    def met(x: Array, y: Array) -> Array:
        return multiply(x.astype(np.float64), y.astype(np.float64)) > 0

    doubtful = [np.isinf(x.e) for x in (a, b)]
    infinite = [np.isinf(x.v) for x in (a, b)]
    vanishing = [(x.v != 0) & (np.abs(x.v) < 2.0**-136) & (x.e > 0) for x in (a, b)]
    if not any(map(np.any, doubtful)) and not (any(map(np.any, infinite)) and any(map(np.any, vanishing))):
        return value, error
    every = [np.ones_like(x.v) for x in (a, b)]
    undecided = met(doubtful[0], every[1]) | met(every[0], doubtful[1])
    undecided |= met(infinite[0], vanishing[1]) | met(vanishing[0], infinite[1])
    return np.where(undecided, 0.0, value), np.where(undecided, np.inf, error)


def largest_product(a: Array, b: Array) -> Array:
    """max|a| max|b| of each sum of ``np.matmul``."""
    return np.asarray(a.max(-1, keepdims=True, initial=0.0) * b.max(-2, keepdims=True, initial=0.0))


def _clean(error: Array) -> Array:
    """NaN marks places whose exact value is not finite; they are compared by kind."""
    return np.where(np.isnan(error), 0.0, error)


def propagate(
    function: Callable[..., Array], values: list[Val], c: Context, *, exactly: bool, cancels: Any = 0.0
) -> Val:
    """The rule for functions of elements."""
    value = np.asarray(function(*(x.v for x in values)), dtype=np.float64)
    u, tiny = (0.0, 0.0) if exactly else (c.u, c.tiny)
    error = 4 * u * (np.abs(value) + np.abs(cancels)) if u else np.zeros_like(value)
    for position, x in enumerate(values):
        reach = x.e + 4 * u * np.abs(x.v) + tiny
        if not reach.any():
            continue
        others = [y.v for y in values]
        moved = [
            np.asarray(function(*others[:position], x.v + sign * reach, *others[position + 1 :]), dtype=np.float64)
            for sign in (1, -1)
        ]
        # A NaN that a flushed subnormal would avoid is as doubtful as an infinity.
        flips = np.isnan(value) & (~np.isnan(moved[0]) | ~np.isnan(moved[1]))
        reached = np.maximum(*(_clean(np.abs(other - value)) for other in moved))
        error = error + np.where(flips, np.inf, reached)
    error = np.broadcast_to(_clean(error), value.shape)
    if c.drops_nan:  # an operand that is not judged: neither is the result
        doubt = np.broadcast_to(
            np.logical_or.reduce(np.broadcast_arrays(*(np.isinf(x.e) for x in values))), value.shape
        )
        return unjudged(Val(value, error), doubt)
    return Val(value, error)


def unjudged(value: Val, where: Array) -> Val:
    """``value`` with elements that may be anything."""
    return Val(np.where(where, 0.0, value.v), np.where(where, np.inf, value.e))


# --- pointwise
def _vector(function: Callable[[float], float]) -> Callable[[Array], Array]:
    made = np.vectorize(function, otypes=[np.float64])
    return lambda x: made(x) if np.size(x) else np.asarray(x, dtype=np.float64)


erf = _vector(math.erf)
erfc = _vector(math.erfc)


def sigmoid(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def _density(x: Array) -> Array:
    return np.asarray(np.exp(-x * x / 2) / math.sqrt(2 * math.pi))


def _tanh_inner(x: Array) -> Array:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def _gelu_tanh_slope(x: Array) -> Array:
    t = np.tanh(_tanh_inner(x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


def _relu(x: Array, slope: float, lower: float | None, upper: float | None) -> Array:
    y = np.where(x > 0, x, np.where(np.isnan(x), x, slope * x if slope else 0.0))
    y = y if lower is None else np.where(y < lower, lower, y)
    return y if upper is None else np.where(y > upper, upper, y)


def _relu_slope(x: Array, slope: float, lower: float | None, upper: float | None) -> Array:
    y = np.where(x > 0, x, slope * x)
    inside = np.ones_like(x, dtype=bool) if lower is None else ~(y < lower)
    inside = inside if upper is None else inside & ~(y > upper)
    return np.where(np.isnan(x), x, np.where(inside, np.where(x > 0, 1.0, slope), 0.0))


def _fmod(a: Array, b: Array) -> Array:
    return np.asarray(np.fmod(a, b))


class _Point(NamedTuple):
    """``cancels``: the size of what the textbook formula cancels; ``exactly``: no rounding at all."""

    function: Callable[..., Any]
    cancels: Callable[..., Any] | None = None
    exactly: bool = False


def _one(*x: Array) -> Any:
    return 1.0


def _first(*x: Array) -> Any:
    return x[0]


def _both(a: Array, b: Array) -> Any:
    return np.abs(a) * (1 + np.abs(b))


POINTWISE: dict[str, _Point] = {
    "abs": _Point(np.abs, exactly=True),
    "ceil": _Point(np.ceil, exactly=True),
    "floor": _Point(np.floor, exactly=True),
    "neg": _Point(np.negative, exactly=True),
    "identity": _Point(lambda x: x, exactly=True),
    "max": _Point(np.maximum, exactly=True),
    "min": _Point(np.minimum, exactly=True),
    "mod": _Point(_fmod, exactly=True),
    "binary_select": _Point(lambda a, b, mask: np.where(mask != 0, a, b), exactly=True),
    "cmp_eq": _Point(np.equal, exactly=True),
    "cmp_neq": _Point(np.not_equal, exactly=True),
    "cmp_ge": _Point(np.greater_equal, exactly=True),
    "cmp_gt": _Point(np.greater, exactly=True),
    "cmp_le": _Point(np.less_equal, exactly=True),
    "cmp_lt": _Point(np.less, exactly=True),
    "logical_and": _Point(np.logical_and, exactly=True),
    "logical_or": _Point(np.logical_or, exactly=True),
    "logical_not": _Point(np.logical_not, exactly=True),
    "add": _Point(np.add, lambda a, b: np.abs(a) + np.abs(b)),
    "sub": _Point(np.subtract, lambda a, b: np.abs(a) + np.abs(b)),
    "mul": _Point(np.multiply),
    "div": _Point(np.divide),
    "add_square": _Point(lambda a, b: a + b * b, lambda a, b: np.abs(a) + b * b),
    "pow": _Point(np.power),
    "cos": _Point(np.cos, _one),
    "sin": _Point(np.sin, _one),
    "tan": _Point(np.tan, _one),
    "exp": _Point(np.exp),
    "log": _Point(np.log),
    "erf": _Point(erf),
    "sqrt": _Point(np.sqrt),
    "rsqrt": _Point(lambda x: 1 / np.sqrt(x)),
    "reciprocal": _Point(lambda x: 1 / x),
    "tanh": _Point(np.tanh),
    "sigmoid": _Point(sigmoid),
    "elu": _Point(lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), _one),
    "softplus": _Point(lambda x: np.logaddexp(x, 0), _one),
    "gelu": _Point(lambda x: 0.5 * x * erfc(-x / math.sqrt(2)), _first),
    "gelu_approx_tanh": _Point(lambda x: x * sigmoid(2 * _tanh_inner(x)), _first),
    "elu_backward": _Point(lambda g, x: g * np.where(x > 0, 1.0, np.exp(np.minimum(x, 0))), _first),
    "sigmoid_backward": _Point(lambda g, x: g * sigmoid(x) * sigmoid(-x), _first),
    "softplus_backward": _Point(lambda g, x: g * sigmoid(x), _first),
    "tanh_backward": _Point(lambda g, x: g * (1 - np.tanh(x) ** 2), _first),
    "gelu_backward": _Point(lambda g, x: g * (0.5 * erfc(-x / math.sqrt(2)) + x * _density(x)), _both),
    "gelu_approx_tanh_backward": _Point(lambda g, x: g * _gelu_tanh_slope(x), _both),
}


# --- approximations: absolute errors of f(*x), for the note
def _with_tanh(t: Array, slope: Array, bend: Array) -> Array:
    """What a tanh that is off by d changes: |slope| d + |bend| d**2."""
    d = _TANH * np.abs(t)
    return np.asarray(np.abs(slope) * d + np.abs(bend) * d * d)


def _gelu_backward_error(g: Array, x: Array) -> Array:
    t, bend = np.tanh(_tanh_inner(x)), g * 0.5 * x * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return _with_tanh(t, np.abs(0.5 * g) + 2 * np.abs(bend * t), bend)


_APPROXIMATE_TANH: dict[str, Callable[..., Array]] = {
    "tanh": lambda x: _with_tanh(np.tanh(x), 1.0, 0.0),
    "tanh_backward": lambda g, x: _with_tanh(np.tanh(x), 2 * g * np.tanh(x), g),
    "gelu_approx_tanh": lambda x: _with_tanh(np.tanh(_tanh_inner(x)), 0.5 * x, 0.0),
    "gelu_approx_tanh_backward": _gelu_backward_error,
}
# What to add to the size |f(x)| + s(x) of the others.
_APPROXIMATE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("exp", "sin", "cos", "sigmoid", "softplus", "elu", "swish", "gelu"), lambda x: 0.0),
    **dict.fromkeys([f"{name}_backward" for name in ("sigmoid", "softplus", "elu", "swish", "gelu")], lambda g, x: 0.0),
    "log": _one,
    "erf": _one,
    "tan": lambda x: np.tan(x) ** 2,
}


def _approximated(op: str, values: list[Val], result: Val, cancels: Any) -> Val:
    """``result`` of a function that may be the hardware's approximation."""
    x = [value.v for value in values]
    if op in _APPROXIMATE_TANH:
        extra = _APPROXIMATE_TANH[op](*x)
    elif op in _APPROXIMATE:
        extra = _OTHERS * (np.abs(result.v) + np.abs(cancels) + _APPROXIMATE[op](*x))
    else:
        return result
    return Val(result.v, result.e + _clean(np.asarray(extra)))


def _pointwise_of(node: Any) -> _Point:
    attrs = node.attrs
    if node.op in ("relu", "relu_backward"):
        bounds = attrs["negative_slope"] or 0.0, attrs["lower_clip"], attrs["upper_clip"]
        if node.op == "relu":
            return _Point(lambda x: _relu(x, *bounds), exactly=not bounds[0])
        return _Point(lambda g, x: g * _relu_slope(x, *bounds), exactly=not bounds[0])
    if node.op in ("swish", "swish_backward"):
        beta = attrs["swish_beta"]
        if node.op == "swish":
            return _Point(lambda x: x * sigmoid(beta * x), _first)
        return _Point(lambda g, x: g * (sigmoid(beta * x) + beta * x * sigmoid(beta * x) * sigmoid(-beta * x)), _both)
    return POINTWISE[node.op]


for _name in ("relu", "relu_backward", "swish", "swish_backward"):
    POINTWISE[_name] = _Point(np.abs)  # by attributes: see _pointwise_of


def _pointwise(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    values = [ports[port] for port in ("in0", "in1", "in2") if port in ports]
    row = _pointwise_of(node)
    cancels = 0.0 if row.cancels is None else np.abs(row.cancels(*(x.v for x in values)))
    whole = all(str(t.dtype) in ("int64", "int32", "int8", "uint8", "boolean") for t in node.inputs.values())
    whole = whole and node.op in ("add", "sub", "mul", "add_square")
    result = propagate(row.function, values, c, exactly=row.exactly or whole, cancels=cancels)
    if c.approximates and c.u >= 2.0**-24:
        result = _approximated(node.op, values, result, cancels)
    if c.drops_nan and node.op in ("max", "min", "relu_backward"):
        reached = np.logical_or.reduce(np.broadcast_arrays(*(np.isnan(x.v) for x in values)))
        result = unjudged(result, reached | np.isnan(result.v))  # also of an infinity times the slope 0
    return {"out": result}


def _gen_index(node: Any, ports: Mapping[str, Any], c: Context) -> dict[str, Val]:
    dim, axis = node.outputs["out"].dim, node.attrs["axis"]
    shape = [1] * len(dim)
    shape[axis] = dim[axis]
    return {"out": exact(np.broadcast_to(np.arange(dim[axis], dtype=np.float64).reshape(shape), dim))}


RULES["gen_index"] = _gen_index

"""The facade of ``frost_gemm.formulas`` over numpy: fp32 or int32 vectors, every operation rounded to its type."""

from __future__ import annotations

import math

import numpy as np

_vector_erf = np.vectorize(math.erf, otypes=["float64"])
_vector_erfc = np.vectorize(math.erfc, otypes=["float64"])


class NumpyFacade:
    """Calls are counted in ``used``, so that a test can tell which functions the formulas need."""

    def __init__(self, integer=False, shape=(), wide=False):
        self.integer = integer
        self.wide = wide
        self.dtype = np.int32 if integer else np.float32
        self.shape = shape
        self.used = set()

    def __getattr__(self, name):
        if name not in _FUNCTIONS:
            raise AttributeError(name)
        function = _FUNCTIONS[name]
        self.used.add(name)

        def call(*args):
            assert all(arg.dtype == self.dtype for arg in args), (name, [arg.dtype for arg in args])
            with np.errstate(all="ignore"):
                return function(self, *args)

        return call

    def const(self, x):
        return self.dtype(x)

    def index(self, axis):
        assert self.integer
        return np.indices(self.shape)[axis].astype(np.int32)

    def select(self, mask, a, b):
        assert mask.dtype == bool
        assert a.dtype == b.dtype == self.dtype
        return np.where(mask, a, b)

    def mad(self, a, b, c):
        assert self.integer
        self.used.add("mad")
        exact = a.astype(np.int64) * b + c
        return exact if self.wide else np.clip(exact, -(2**31), 2**31 - 1).astype(np.int32)

    def logical_and(self, a, b):
        return a & b

    def logical_or(self, a, b):
        return a | b

    def logical_not(self, a):
        return ~a

    def div(self, a, b):
        if not self.integer:
            with np.errstate(all="ignore"):
                return np.divide(a, b)
        assert np.all(b != 0), "an int32 division by zero has no defined result"
        assert not np.any((a == -(2**31)) & (b == -1)), "nor has -2**31 / -1"
        return np.trunc(a.astype(np.float64) / b).astype(
            np.int32
        )  # a quotient of int32 is exact in fp64 after truncation

    def fmod(self, a, b):
        if self.integer:
            assert np.all(b != 0), "an int32 remainder by zero has no defined result"
            assert not np.any((a == -(2**31)) & (b == -1)), "nor has -2**31 % -1"
        with np.errstate(all="ignore"):
            return np.fmod(a, b)


def _plain(function):
    return lambda m, *args: function(*args)


def _wide(function):
    """By way of fp64; float functions only."""

    def compute(m, *args):
        assert not m.integer
        return np.asarray(function(*(arg.astype(np.float64) for arg in args))).astype(np.float32)[()]

    return compute


_FUNCTIONS = {
    **{
        name: _plain(getattr(np, full))
        for name, full in {
            "add": "add",
            "sub": "subtract",
            "mul": "multiply",
            "neg": "negative",
            "abs": "abs",
            "min": "minimum",
            "max": "maximum",
            "lt": "less",
            "le": "less_equal",
            "gt": "greater",
            "ge": "greater_equal",
            "eq": "equal",
            "ne": "not_equal",
        }.items()
    },
    "fma": _wide(lambda a, b, c: a * b + c),
    "rcp": _wide(lambda x: 1.0 / x),
    "rsqrt": _wide(lambda x: 1.0 / np.sqrt(x)),
    "erf": _wide(_vector_erf),
    "sigmoid": _wide(lambda x: np.exp(-np.logaddexp(0.0, -x))),
    "normal_cdf": _wide(lambda x: 0.5 * _vector_erfc(-x * math.sqrt(0.5))),
    "pow": _wide(np.power),
    **{name: _wide(getattr(np, name)) for name in ("exp", "log", "sqrt", "sin", "cos", "tan", "tanh", "floor", "ceil")},
}

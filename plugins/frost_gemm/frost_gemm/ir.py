"""The program of a GEMM kernel: what is computed, with every size and stride left to the launch.

``lower`` makes it from a graph; the kernels interpret it while they are traced; the numpy executor (``reference``)
interprets it too. Immutable; ``Program.canonical()`` is the compile-cache key. Nothing here imports the DSL.

Orientation. A is [L, M, K] and B is [L, N, K] (B's rows are the output's columns, whatever the graph's layout was). Values of the
epilogue are [L, M, N]. ``major`` names the axis of unit stride: "k" or "mn" for A and B, "n" or "m" for [M, N] tensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

__all__ = ["TENSOR_WORDS", "Aux", "Gemm", "Matrix", "Op", "Program", "Reduction", "Ref", "Store", "argument_words"]


class Ref(NamedTuple):
    """A value: ``acc`` i is gemm i's accumulator rounded to the gemm's dtype, ``val`` i is op i's result, ``aux`` i is aux i."""

    kind: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


@dataclass(frozen=True)
class Op:
    """One pointwise op (a row of ``ops.TABLE``, or "constant").

    dtype    the declared data type of the result, to which it is rounded
    compute  "float32" or "int32"
    attrs    sorted (name, value) pairs
    """

    name: str
    args: tuple[Ref, ...]
    dtype: str
    compute: str = "float32"
    attrs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Matrix:
    """A or B as it lies in memory.

    dtype      what is stored; mma_dtype what the matrix unit multiplies (another one only with a prologue)
    batched    False: one matrix for every batch (its batch stride is not read)
    alignment  bytes that the address and every stride other than the unit one are multiples of
    prologue   unary ops and binary ops with a scalar, applied to every element before the product: ``val`` -1 is the element
    """

    dtype: str
    major: str = "k"
    batched: bool = True
    mma_dtype: str = ""
    alignment: int = 16
    prologue: tuple[Op, ...] = ()

    def __post_init__(self) -> None:
        if not self.mma_dtype:
            object.__setattr__(self, "mma_dtype", self.dtype)


@dataclass(frozen=True)
class Gemm:
    """One product: ``a`` and ``b`` index ``Program.a`` and ``Program.b``; ``dtype`` is the matmul's output type."""

    a: int = 0
    b: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class Aux:
    """An epilogue operand.

    kind       "scalar" (one element, or one for each batch), "row" (one for each m), "col" (one for each n), "full"
    major      "n" or "m", the axis of unit stride of a full operand or of a vector; "" where no stride is known to be 1
    by_value   a host value: its word holds the host address of the element, read while the launch is prepared
    alignment  bytes that the address and the strides other than the unit one are multiples of
    """

    dtype: str
    kind: str
    batched: bool = False
    major: str = ""
    by_value: bool = False
    alignment: int = 0


@dataclass(frozen=True)
class Store:
    """An output [L, M, N]. ``major``: "n", "m", or "" (any strides, element by element)."""

    value: Ref
    dtype: str
    major: str = "n"
    alignment: int = 16


@dataclass(frozen=True)
class Reduction:
    """A reduced output. ``axes`` names the reduced ones of "lmn", such as "n" or "lmn"; ``mode`` as in the op table."""

    value: Ref
    mode: str
    axes: str
    dtype: str = "float32"


@dataclass(frozen=True)
class Program:
    """A whole kernel. ``accumulate`` is "float32" or "int32"; ``promote`` adds partial sums of fp8 products in full precision."""

    a: tuple[Matrix, ...]
    b: tuple[Matrix, ...]
    gemms: tuple[Gemm, ...]
    stores: tuple[Store, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    aux: tuple[Aux, ...] = ()
    ops: tuple[Op, ...] = ()
    accumulate: str = "float32"
    promote: bool = False

    def canonical(self) -> str:
        """Canonical JSON: equal texts mean equal kernels. Infinities and NaN, which JSON lacks, are {"float": "inf"} and so on."""
        return json.dumps(_plain(asdict(self)), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def swapped(self) -> Program:
        """The transposed problem: C^T = B^T A^T. A and B, rows and columns change places; the arithmetic is the same."""
        turn = {"n": "m", "m": "n", "": ""}
        kinds = {"row": "col", "col": "row"}
        axes = str.maketrans("mn", "nm")
        ops = tuple(
            replace(
                op,
                attrs=tuple(
                    (k, _swapped_axis(v) if op.name == "gen_index" and k == "axis" else v) for k, v in op.attrs
                ),
            )
            for op in self.ops
        )
        return replace(
            self,
            a=self.b,
            b=self.a,
            gemms=tuple(replace(gemm, a=gemm.b, b=gemm.a) for gemm in self.gemms),
            stores=tuple(replace(store, major=turn[store.major]) for store in self.stores),
            reductions=tuple(replace(r, axes="".join(sorted(r.axes.translate(axes)))) for r in self.reductions),
            aux=tuple(replace(aux, kind=kinds.get(aux.kind, aux.kind), major=turn[aux.major]) for aux in self.aux),
            ops=ops,
        )


def _plain(value: Any) -> Any:
    """``value`` in what JSON can say. Floats that are not finite become objects, which no attribute is; -0.0 stays apart from 0.0."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _swapped_axis(axis: int) -> int:
    """gen_index's axis counts [L, M, N]: 0 stays, 1 and 2 change places."""
    return {0: 0, 1: 2, 2: 1}[axis]


# The host function reads its arguments from a block of int64 words: the problem, the workspace, and for each tensor its
# address and its strides in elements along its rows, its columns and the batch. A and B count (M or N, K); the others (M, N).
# The stride of a broadcast axis is 0.
PROBLEM_WORDS = ("m", "n", "k", "l", "workspace")
TENSOR_WORDS = ("address", "row", "col", "batch")


def argument_words(program: Program) -> dict[str, int]:
    """The index of every word: "m", "n", "k", "l", "workspace", then "a0.address", "a0.row", ... for a, b, aux, store, reduction."""
    words = list(PROBLEM_WORDS)
    groups = {
        "a": program.a,
        "b": program.b,
        "aux": program.aux,
        "store": program.stores,
        "reduction": program.reductions,
    }
    for group, members in groups.items():
        words += [f"{group}{i}.{word}" for i in range(len(members)) for word in TENSOR_WORDS]
    return {word: index for index, word in enumerate(words)}

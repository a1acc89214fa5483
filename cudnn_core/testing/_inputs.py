"""Input data of the kit: seeded, by operand, as codes. Imported by the kit's run phase.

Variants: "random" (standard normal, or uniform in the case's domain), "special" (random, and about one element in eight is a
NaN, an infinity, a zero with a sign or a subnormal).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from ._codec import INTEGERS, code_dtype, encode, specials

if TYPE_CHECKING:
    from .._graph._frozen import FrozenGraph, FrozenTensor
    from ._cases import Case

    Array = Any  # of numpy

__all__ = ["has_specials", "make_inputs"]

_RANGES = {"int64": (-100, 100), "int32": (-100, 100), "uint8": (0, 16)}


def make_inputs(case: Case, graph: FrozenGraph, variant: str, seed: int = 0) -> dict[int, Array]:
    """Codes of every input of ``graph`` (fixed sizes), by tensor index."""
    found = {}
    for tensor in graph.operand_tensors():
        if tensor.role == "input":
            found[tensor.index] = _codes(case, tensor, variant, seed)
    return found


def has_specials(case: Case, graph: FrozenGraph) -> bool:
    return any(
        _wants_specials(case, tensor) and bool(specials(tensor.dtype))
        for tensor in graph.operand_tensors()
        if tensor.role == "input"
    )


def _wants_specials(case: Case, tensor: FrozenTensor) -> bool:
    return case.special is True or (isinstance(case.special, tuple) and tensor.name in case.special)


def _codes(case: Case, tensor: FrozenTensor, variant: str, seed: int) -> Array:
    import numpy as np

    dim: Any = tensor.dim
    dtype = str(tensor.dtype)
    if tensor.name in case.values:
        return encode(np.asarray(case.values[tensor.name]).reshape(dim), dtype)
    rng = np.random.default_rng((zlib.crc32(f"{case.name}/{tensor.name}".encode()), seed))
    if tensor.name in case.domain:
        low, high = case.domain[tensor.name]
        values = rng.uniform(low, high, dim)
    elif dtype in INTEGERS:
        lowest, highest = _RANGES.get(dtype, INTEGERS[dtype])
        values = rng.integers(lowest, highest, dim, endpoint=True)
    elif dtype == "fp8_e8m0":
        values = 2.0 ** rng.integers(-3, 4, dim)
    else:
        values = np.abs(rng.standard_normal(dim)) if dtype == "fp8_e5m3" else rng.standard_normal(dim)
    codes = encode(values, dtype)
    odd = specials(dtype)
    if variant == "special" and odd and _wants_specials(case, tensor):
        chosen = rng.random(dim) < 0.125
        codes = np.where(chosen, encode(rng.choice(np.array(odd), dim), dtype), codes)
    return codes.astype(code_dtype(dtype), copy=False)

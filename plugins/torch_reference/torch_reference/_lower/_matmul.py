"""matmul. Batch axes broadcast; ``padding`` has no effect: operands are never padded here. Integers: ``integer_sums``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._math import Math, integer_sums, is_integer
from ._math import matmul as product

__all__ = ["matmul"]


def matmul(node: Any, inputs: Mapping[str, Any], math: Math) -> dict[str, Any]:
    a, b = inputs["A"], inputs["B"]
    if not is_integer(a, b):
        return {"C": product(math.as_float(a), math.as_float(b))}
    return {"C": integer_sums(node, product(a, b))}

"""Numbers in a graph: the data type of a constant, and the value that the type holds.

A constant keeps its value: its type is chosen from the number, the type that the op computes in and the tensors that it meets,
and a number that the type can't hold is an error, not a nearby value. Floats round to their type, as every float does.
Imported by the graph, its inference and the freezing.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .._arguments import shown
from .._dtypes import data_type
from .._errors import GraphError

if TYPE_CHECKING:
    from ._tensor import GraphNode, Tensor

__all__ = ["check_constant", "check_constants", "constant_dtype", "held", "infer_constants"]

Number = float | int | bool

_RANGES = {
    data_type.BOOLEAN: (0, 1),
    data_type.INT8: (-(2**7), 2**7 - 1),
    data_type.UINT8: (0, 2**8 - 1),
    data_type.INT32: (-(2**31), 2**31 - 1),
    data_type.INT64: (-(2**63), 2**63 - 1),
}
_FORMATS = {data_type.FLOAT: "<f", data_type.HALF: "<e"}
_UNSET = (data_type.NOT_SET, data_type.BOOLEAN)  # say nothing of a number's type


def held(value: Number, dtype: data_type) -> Number | None:
    """``value`` as ``dtype`` holds it (a bool, an int or a float), or None: no such integer, or past the largest float."""
    try:
        if dtype in _RANGES:
            low, high = _RANGES[dtype]
            if value != int(value) or not low <= value <= high:
                return None
            return bool(value) if dtype is data_type.BOOLEAN else int(value)
        number = float(value)
        if math.isfinite(number) and dtype in _FORMATS:
            struct.pack(_FORMATS[dtype], number)
    except (OverflowError, ValueError):
        return None
    if dtype is data_type.BFLOAT16 and math.isfinite(number) and abs(number) >= 255.5 * 2.0**120:
        return None
    return number


def constant_dtype(value: Number, compute: data_type, partners: Iterable[data_type] = ()) -> data_type:
    """The type of a number that an op, computing in ``compute``, combines with tensors of the types ``partners``."""
    if isinstance(value, bool):
        return data_type.BOOLEAN
    known = [dtype for dtype in (compute, *partners) if dtype not in _UNSET]
    if known and (known[0] in _RANGES or known[0] == "int4"):
        for dtype in (known[0], data_type.INT32, data_type.INT64):
            if dtype in _RANGES and held(value, dtype) is not None:
                return dtype
    wide = data_type.DOUBLE in known or held(value, data_type.FLOAT) is None
    return data_type.DOUBLE if wide else data_type.FLOAT


def infer_constants(node: GraphNode) -> None:
    """Give the constants of ``node`` that have no type theirs."""
    data = [tensor for port in node.row.inputs if port.data for tensor in _at(node, port.name)]
    partners = [tensor.dtype for tensor in data if tensor.value is None]
    for tensor in data:
        if tensor.value is not None:
            tensor._auto_dtype = constant_dtype(tensor.value, node.compute_dtype, partners)


def check_constants(node: GraphNode) -> None:
    """GraphError if the op computes in an integer type that does not hold a constant among its data."""
    if node.compute_dtype not in _RANGES or node.compute_dtype is data_type.BOOLEAN:
        return
    for port in node.row.inputs:
        for tensor in _at(node, port.name) if port.data else ():
            if tensor.value is not None and held(tensor.value, node.compute_dtype) is None:
                raise GraphError(
                    f"the op computes in {node.compute_dtype}, which does not hold the constant {shown(tensor.value)}",
                    node=node.label,
                    port=port.name,
                )


def check_constant(tensor: Tensor) -> None:
    """GraphError if the tensor's type does not hold its value or default."""
    for what, value in (("value", tensor.value), ("default", tensor.default)):
        if value is not None and held(value, tensor.dtype) is None:
            raise GraphError(f"tensor {tensor.label}: {tensor.dtype} does not hold the {what} {shown(value)}")


def _at(node: GraphNode, port: str) -> tuple[Tensor, ...]:
    value = node.inputs.get(port)
    return () if value is None else value if isinstance(value, tuple) else (value,)

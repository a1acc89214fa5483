"""The precision that a node computes in, and products in it. Imported by the lowerings and the evaluator."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Math", "integer_sums", "is_integer", "matmul", "wrapped"]

Tensor = Any


class Math:
    """``dtype`` is float32 or float64; ``rounding`` says whether roundings inside an op that its contract names happen."""

    __slots__ = ("device", "dtype", "rounding")

    def __init__(self, dtype: torch.dtype, device: torch.device, rounding: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self.rounding = rounding

    def as_float(self, value: Tensor) -> Tensor:
        return value.to(self.dtype)

    def as_floats(self, value: Any) -> Any:
        """As ``as_float``, for what a port holds: a tuple's members, and integers and booleans as they are."""
        if isinstance(value, tuple):
            return tuple(self.as_floats(item) for item in value)
        return value.to(self.dtype) if value.dtype.is_floating_point else value

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def is_integer(*values: Tensor) -> bool:
    """Whether all are integers or booleans."""
    return not any(value.dtype.is_floating_point for value in values)


def wrapped(value: Tensor) -> Tensor:
    """int64 modulo 2^32, as int32 has it."""
    return value.to(torch.int32).to(torch.int64)


def integer_sums(node: Any, sums: Tensor) -> Tensor:
    """A node's sums of integer products as its result is made of: modulo 2^32, as matrix units add them, unless a 64-bit type is
    declared."""
    types = {tensor.dtype for tensor in (*node.inputs.values(), *node.outputs.values())} | {node.compute_dtype}
    return sums if types & {"int64", "float64"} else wrapped(sums)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` over the last two axes: exact for integers, never in TF32 or bf16 whatever the process has set."""
    if is_integer(a, b):
        return _integer_matmul(a.to(torch.int64), b.to(torch.int64))
    if a.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return torch.matmul(a.double(), b.double())
    return torch.matmul(a, b)


def _integer_matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type == "cpu":
        return torch.matmul(a, b)
    # CUDA has no int64 product: 16-bit limbs in fp64 are exact for up to 2**20 terms, then wrap as int64 does.
    result = None
    for i in range(4):
        for j in range(4 - i):
            part = torch.matmul(_limb(a, i), _limb(b, j)).to(torch.int64) << (16 * (i + j))
            result = part if result is None else result + part
    return result


def _limb(value: Tensor, index: int) -> Tensor:
    shifted = value >> (16 * index)
    return (shifted if index == 3 else shifted & 0xFFFF).double()

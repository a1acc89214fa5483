"""Arguments of a TVM-FFI function (`--enable-tvm-ffi`): the values that a caller on a GPU passes, as `TVMFFIAny`.

Contract: `pack_ffi` gives `Packed` values of the kinds "none", "int", "bool", "float", "tensor", "array" and "block" (the
address of a host block, an int). Tensors claim to be on CUDA device 0, as DLPack tensors. Layouts: tvm/ffi/c_api.h of
apache-tvm-ffi and dlpack.h; the child builds them (`_host_call`). Imported by `_launch`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._arena import Arena
from ._arguments import Descriptor, HostMemory, Packed, check_pointers, register
from ._findings import EmulationError
from ._memory import Outputs

__all__ = ["pack_ffi"]

# DLDataTypeCode and bits of one element, by the names of torch, numpy and CuTe in lower case without underscores.
_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_DTYPES = {
    **{f"int{bits}": (_INT, bits, 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (_UINT, bits, 1) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (_FLOAT, bits, 1) for bits in (16, 32, 64)},
    "tfloat32": (_FLOAT, 32, 1),
    "bfloat16": (_BFLOAT, 16, 1),
    "bool": (_BOOL, 8, 1),
    "boolean": (_BOOL, 8, 1),
    "float8e4m3fn": (10, 8, 1),
    "float8e5m2": (12, 8, 1),
    "float8e8m0fnu": (14, 8, 1),
    "float6e2m3fn": (15, 6, 1),
    "float6e3m2fn": (16, 6, 1),
    "float4e2m1fn": (17, 4, 1),
    "float4e2m1fnx2": (17, 4, 2),
}


def pack_ffi(args: Sequence[Any], arena: Arena, outputs: Sequence[Any] | Outputs) -> list[Packed]:
    """The arguments of a call of the function.

    A tensor is a tensor (numpy, torch, runtime `cute.Tensor`), an integer an integer; one that lies in a tensor's memory is
    taken as an address (a pointer argument) and becomes the device's, as does a `ctypes.c_void_p` and 8 bytes. A host block
    is the address of its memory. None is None (a null stream); lists and tuples are arrays.
    """
    fresh = Outputs.of(outputs)
    pointers: list[tuple[int, int]] = []

    def pack(value: Any, number: int, whole: bool) -> Packed:
        name = f"argument {number}"
        if value is None:
            return Packed("none", None)
        if HostMemory.matches(value):
            return Packed("block", HostMemory(value, name))
        if isinstance(value, (list, tuple)):
            return Packed("array", [pack(item, number, whole or id(item) in fresh) for item in value])
        if isinstance(value, Descriptor):
            value = value.tensor
        pointer = register(value, name, arena, whole or id(value) in fresh)
        if pointer:
            pointers.append((number, pointer))
            return Packed("int", pointer)
        tensor = _tensor(value, name)
        return _scalar(value, name) if tensor is None else Packed("tensor", tensor)

    packed = [pack(value, number, id(value) in fresh) for number, value in enumerate(args)]
    check_pointers(pointers, arena)
    return packed


def _tensor(value: Any, name: str) -> dict[str, Any] | None:
    """The fields of a DLTensor with the caller's address, or None."""
    if isinstance(value, np.ndarray):
        if any(step % value.itemsize for step in value.strides):
            raise EmulationError(f"{name}: its strides are no multiples of its element size")
        kind, address, steps = value.dtype, value.ctypes.data, [step // value.itemsize for step in value.strides]
    elif hasattr(value, "untyped_storage"):
        kind, address, steps = value.dtype, value.data_ptr(), list(value.stride())
    elif hasattr(value, "element_type") and isinstance(getattr(value, "data_ptr", None), int):
        kind, address, steps = value.element_type, value.data_ptr, [int(step) for step in value.stride]
    else:
        return None
    said = getattr(kind, "name", None) or getattr(kind, "__name__", None) or str(kind)
    found = _DTYPES.get(said.removeprefix("torch.").lower().replace("_", ""))
    if found is None:
        raise EmulationError(f"{name}: DLPack has no data type for {said}")
    return {"data": int(address), "dtype": found, "shape": [int(n) for n in value.shape], "strides": steps}


def _scalar(value: Any, name: str) -> Packed:
    if isinstance(value, ctypes._SimpleCData):
        value = value.value or 0
    if isinstance(value, (bytes, bytearray)) and len(value) == 8:
        value = int.from_bytes(value, "little")
    if isinstance(value, (bool, np.bool_)):
        return Packed("bool", bool(value))
    if isinstance(value, (int, np.integer)):
        return Packed("int", _signed(int(value), name))
    if isinstance(value, (float, np.floating)):
        return Packed("float", float(value))
    for method, kind in (("__tvm_ffi_opaque_ptr__", "int"), ("__tvm_ffi_int__", "int"), ("__tvm_ffi_float__", "float")):
        if hasattr(value, method):
            found = getattr(value, method)()
            return Packed(kind, _signed(int(found), name) if kind == "int" else float(found))
    if hasattr(value, "__cuda_stream__") or type(value).__name__ == "CUstream":
        return Packed("none", None)
    raise EmulationError(f"{name}: a TVM-FFI function takes no {type(value).__name__}")


def _signed(value: int, name: str) -> int:
    """`value` as the int64 that carries it; addresses may have the highest bit."""
    if not -(2**63) <= value < 2**64:
        raise EmulationError(f"{name}: {value} does not fit into 64 bits")
    return value - 2**64 if value >= 2**63 else value

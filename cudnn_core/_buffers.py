"""Foreign buffers: what a torch, numpy, DLPack or CUDA-array-interface object says of itself.

``describe`` is the slow, general road; the plan has a fast one for torch tensors. No framework is imported: an object is
recognised by the attributes that it has. Imported by the graph (``tensor_like``) and by the plan's packing.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

from ._dtypes import as_dtype, bits, data_type
from ._errors import ExecutionError, GraphError, GraphTypeError

__all__ = ["View", "describe", "encode_scalar", "scalar"]


class View(NamedTuple):
    """address in bytes; dtype as a vocabulary string; shape and stride in elements; device "cpu" or "cuda"."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device_type: str
    device_index: int
    readonly: bool = False

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def describe(value: Any, where: str) -> View:
    """The layout and address of ``value``; GraphTypeError names ``where`` if it is no tensor that we know."""
    if hasattr(value, "data_ptr") and hasattr(value, "stride") and hasattr(value, "device"):
        return _torch(value, where)
    interface = getattr(value, "__array_interface__", None)
    if interface is not None:
        return _array_interface(interface, value, "cpu", where)
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        return _array_interface(interface, value, "cuda", where)
    if hasattr(value, "__dlpack__"):
        return _dlpack(value, where)
    raise GraphTypeError(f"{where} takes a tensor, an array or a DLPack producer, got {type(value).__name__}")


def _torch(value: Any, where: str) -> View:
    if value.layout is not _torch_strided(value):
        raise GraphTypeError(f"{where}: a torch tensor with layout {value.layout} has no strides")
    device = value.device
    kind = device.type
    if kind not in ("cpu", "cuda"):
        raise GraphTypeError(f"{where}: a torch tensor on {device} can't be used")
    return View(
        value.data_ptr(),
        as_dtype(value.dtype).value,
        tuple(value.shape),
        tuple(value.stride()),
        kind,
        device.index if device.index is not None else 0,
    )


def _torch_strided(value: Any) -> Any:
    import sys

    return (
        sys.modules[type(value).__module__.partition(".")[0]].strided
        if type(value).__module__ == "torch"
        else value.layout
    )


def _array_interface(interface: Any, value: Any, kind: str, where: str) -> View:
    shape = tuple(interface["shape"])
    dtype = getattr(value, "dtype", None)
    try:
        name = as_dtype(dtype if dtype is not None else _typestr(interface["typestr"])).value
    except GraphError as error:
        raise GraphTypeError(f"{where}: {error}") from None
    itemsize = int(interface["typestr"][2:])
    strides = interface.get("strides")
    if strides is None:
        packed, running = [], 1
        for size in reversed(shape):
            packed.append(running)
            running *= max(size, 1)
        stride = tuple(reversed(packed))
    else:
        if any(step % itemsize for step in strides):
            raise GraphTypeError(f"{where}: strides of {tuple(strides)} bytes are no multiples of {itemsize}")
        stride = tuple(step // itemsize for step in strides)
    address, readonly = interface["data"]
    index = _cuda_index(value) if kind == "cuda" else 0
    return View(address or 0, name, shape, stride, kind, index, bool(readonly))


def _typestr(typestr: str) -> str:
    kinds = {"f": "float", "i": "int", "u": "uint", "b": "bool"}
    kind = kinds.get(typestr[1], typestr)
    return "boolean" if kind == "bool" else f"{kind}{int(typestr[2:]) * 8}"


def _cuda_index(value: Any) -> int:
    device = getattr(value, "device", None)
    index = getattr(device, "id", getattr(device, "index", 0))
    return index if isinstance(index, int) else 0


# --- DLPack: the capsule is read, never consumed, so the producer keeps ownership (DLPack specification, dlpack.h)
class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# (code, bits) of DLDataType to our vocabulary. Codes: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 7.. the fp8 and fp4 types.
_DL_TYPES = {
    (0, 8): "int8", (0, 32): "int32", (0, 64): "int64", (1, 8): "uint8", (2, 16): "float16", (2, 32): "float32",
    (2, 64): "float64", (4, 16): "bfloat16", (6, 8): "boolean", (10, 8): "fp8_e4m3", (12, 8): "fp8_e5m2",
    (14, 8): "fp8_e8m0", (17, 4): "fp4_e2m1",
}  # fmt: skip


def _dlpack(value: Any, where: str) -> View:
    device = value.__dlpack_device__() if hasattr(value, "__dlpack_device__") else (1, 0)
    if device[0] not in (1, 2, 3, 13):
        raise GraphTypeError(f"{where}: DLPack device type {device[0]} can't be used")
    capsule = value.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        tensor = _DLTensor.from_address(get(capsule, b"dltensor"))
    except ValueError:
        raise GraphTypeError(f"{where}: {type(value).__name__}.__dlpack__() returned no dltensor capsule") from None
    dtype = _DL_TYPES.get((tensor.dtype.code, tensor.dtype.bits))
    if dtype is None or tensor.dtype.lanes not in (1,):
        raise GraphTypeError(
            f"{where}: DLPack type code {tensor.dtype.code}, {tensor.dtype.bits} bits, {tensor.dtype.lanes} lanes"
            " has no counterpart"
        )
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        stride = tuple(tensor.strides[i] for i in range(tensor.ndim))
    else:
        packed, running = [], 1
        for size in reversed(shape):
            packed.append(running)
            running *= max(size, 1)
        stride = tuple(reversed(packed))
    kind = "cuda" if tensor.device.type in (2, 13) else "cpu"
    return View((tensor.data or 0) + tensor.byte_offset, dtype, shape, stride, kind, tensor.device.index)


# --- host scalars
_FORMATS = {
    "float64": "<d", "float32": "<f", "float16": "<e", "int64": "<q", "int32": "<i", "int8": "<b", "uint8": "<B",
    "boolean": "<?",
}  # fmt: skip


def encode_scalar(value: float | bool, dtype: str, where: str) -> bytes:
    """One host element of ``dtype``, little-endian; ExecutionError if the type has no scalar form or can't hold it."""
    try:
        if dtype == "bfloat16":
            raw = int.from_bytes(struct.pack("<f", value), "little")
            if value == value:  # round to nearest even; a NaN keeps its upper half
                raw += 0x7FFF + ((raw >> 16) & 1)
            return (raw >> 16 & 0xFFFF).to_bytes(2, "little")
        form = _FORMATS[dtype]
        return struct.pack(form, value if form in ("<d", "<f", "<e", "<?") else int(value))
    except KeyError:
        raise ExecutionError(f"operand {where}: {dtype} can't be passed by value", operand=where) from None
    except (struct.error, OverflowError) as error:
        raise ExecutionError(f"operand {where}: {value!r} does not fit {dtype}: {error}", operand=where) from None


def scalar(value: Any, where: str) -> float | int | bool:
    """The Python number in a one-element CPU tensor or array."""
    view = describe(value, where)
    if view.device_type != "cpu" or view.elements != 1:
        raise GraphTypeError(f"{where} takes a number or a one-element CPU tensor")
    raw = ctypes.string_at(view.address, (bits(view.dtype) + 7) // 8)
    if view.dtype == data_type.BFLOAT16.value:
        return float(struct.unpack("<f", b"\0\0" + raw)[0])
    if view.dtype not in _FORMATS:
        raise GraphTypeError(f"{where}: {view.dtype} has no scalar form")
    found: float | int | bool = struct.unpack(_FORMATS[view.dtype], raw)[0]
    return found

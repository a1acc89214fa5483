"""DLPack producers: the capsule is read and kept, never consumed, so that it frees what it exports when we let go of it.

Both kinds of capsule are read: the versioned one (asked for first: it can export read-only memory) and the older one
(DLPack specification, dlpack.h). Imported by ``_buffers``.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from ._errors import GraphTypeError

__all__ = ["Capsule", "open_capsule"]


class Capsule(NamedTuple):
    """What a capsule says. ``stride`` is None for row-major; ``lanes`` and ``bits`` as in DLDataType; ``owner`` keeps it."""

    address: int
    code: int
    bits: int
    lanes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    device_type: str
    device_index: int
    readonly: bool
    owner: object


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_READ_ONLY, _COPIED, _PADDED = 1, 2, 4  # flags of the versioned capsule
_DEVICES = {1: "cpu", 3: "cpu", 2: "cuda", 13: "cuda"}  # host, pinned; device, managed


def open_capsule(value: Any, where: str) -> Capsule:
    """What ``value`` exports; GraphTypeError names ``where``. Exceptions of the producer pass through."""
    device = value.__dlpack_device__() if hasattr(value, "__dlpack_device__") else (1, 0)
    if device[0] not in _DEVICES:
        raise GraphTypeError(f"{where}: DLPack device type {int(device[0])} can't be used")
    try:
        owner = value.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer older than version 1
        owner = value.__dlpack__()
    flags, tensor = _read(owner)
    if tensor is None:
        raise GraphTypeError(f"{where}: {type(value).__name__}.__dlpack__() returned no DLPack capsule that is known")
    if tensor.device.type not in _DEVICES or flags & _PADDED:
        raise GraphTypeError(f"{where}: DLPack device type {tensor.device.type} or padded elements can't be used")
    axes = range(tensor.ndim)
    return Capsule(
        (tensor.data or 0) + tensor.byte_offset,
        tensor.dtype.code,
        tensor.dtype.bits,
        tensor.dtype.lanes,
        tuple(tensor.shape[i] for i in axes),
        tuple(tensor.strides[i] for i in axes) if tensor.strides else None,
        _DEVICES[tensor.device.type],
        tensor.device.index,
        bool(flags & (_READ_ONLY | _COPIED)),  # what is written to a copy is lost
        owner,
    )


def _read(capsule: object) -> tuple[int, _Tensor | None]:
    """(flags, tensor) of either kind of capsule; None for anything else."""
    valid, get = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
    valid.restype, valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    if valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(get(capsule, b"dltensor_versioned"))
        return (versioned.flags, versioned.tensor) if versioned.major == 1 else (0, None)
    if valid(capsule, b"dltensor"):
        return 0, _Tensor.from_address(get(capsule, b"dltensor"))
    return 0, None

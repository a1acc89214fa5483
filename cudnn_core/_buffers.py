"""Foreign buffers: what a torch, numpy, DLPack or CUDA-array-interface object says of itself, and numbers as bytes.

``describe`` is the slow, general road; the plan has a fast one for torch tensors. No framework is imported: an object is
recognised by the attributes that it has. Imported by the graph (``tensor_like``) and by the plan's packing.
"""

from __future__ import annotations

import ctypes
import math
import operator
import re
import struct
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ._dims import packed_strides
from ._dtypes import as_dtype, bits
from ._errors import ExecutionError, GraphError, GraphTypeError

__all__ = ["View", "array_layout", "describe", "encode_scalar", "rescale", "same_array", "scalar", "unit_axis"]


class View(NamedTuple):
    """address in bytes; dtype as a vocabulary string; shape and stride in elements of it; device "cpu" or "cuda".

    ``owner`` keeps the memory: whoever uses the address must hold it.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device_type: str
    device_index: int
    readonly: bool
    owner: object

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Row-major and without gaps."""
        packed = packed_strides(self.shape)
        return all(a == b or size <= 1 for a, b, size in zip(self.stride, packed, self.shape, strict=True))


def describe(value: Any, where: str) -> View:
    """The layout and address of ``value``; GraphTypeError names ``where`` if it is no tensor whose memory can be used."""
    try:
        return _describe(value, where)
    except GraphTypeError:
        raise
    except GraphError as error:
        raise GraphTypeError(f"{where}: {error}") from None
    except Exception as error:  # of the object's own code: a tensor without storage, an interface with a missing field
        reason = (str(error).splitlines() or [""])[0]
        raise GraphTypeError(
            f"{where}: the memory of this {type(value).__name__} can't be used: {type(error).__name__}: {reason}"
        ) from error


def _describe(value: Any, where: str) -> View:
    if hasattr(value, "data_ptr") and hasattr(value, "stride") and hasattr(value, "device"):
        return _torch(value, where)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):  # a number, whose interface shows a temporary
        return _array_interface(numpy.asarray(value), "cpu", where)._replace(readonly=True)
    if getattr(value, "__array_interface__", None) is not None:
        return _array_interface(value, "cpu", where)
    if getattr(value, "__cuda_array_interface__", None) is not None:
        return _array_interface(value, "cuda", where)
    if hasattr(value, "__dlpack__"):
        return _dlpack(value, where)
    raise GraphTypeError(f"{where} takes a tensor, an array or a DLPack producer, got {type(value).__name__}")


def _torch(value: Any, where: str) -> View:
    if str(value.layout) != "torch.strided":
        raise GraphTypeError(f"{where}: a torch tensor with layout {value.layout} has no strides")
    device = value.device
    if device.type not in ("cpu", "cuda"):
        raise GraphTypeError(f"{where}: a torch tensor on {device} can't be used")
    if value.is_neg() or value.is_conj():
        raise GraphTypeError(
            f"{where}: the tensor is a lazy negation or conjugation: call resolve_neg() or resolve_conj()"
        )
    dtype = as_dtype(value.dtype).value
    shape, stride = tuple(value.shape), tuple(value.stride())
    if str(value.dtype).endswith("_x2"):
        shape, stride = rescale(shape, stride, unit_axis(shape, stride), 2, 1)
    elif value.element_size() * 8 != bits(dtype):
        raise GraphTypeError(f"{where}: {value.dtype} takes {value.element_size()} bytes an element, {dtype} is packed")
    return View(value.data_ptr(), dtype, shape, stride, device.type, device.index or 0, False, value)


# --- array interfaces
_KINDS = {
    ("b", 1): "boolean", ("i", 1): "int8", ("i", 4): "int32", ("i", 8): "int64", ("u", 1): "uint8", ("f", 2): "float16",
    ("f", 4): "float32", ("f", 8): "float64",
}  # fmt: skip


@lru_cache(maxsize=64)
def _typestr(typestr: str) -> tuple[str, int]:
    """(dtype, bytes of an element); the dtype is "" where another type is stored as raw bytes (kind V)."""
    found = re.fullmatch(r"([<>|=])([A-Za-z])([0-9]+)", typestr)
    if found is None:
        raise GraphError(f"{typestr!r} is no array-interface type")
    order, kind, size = found[1], found[2], int(found[3])
    native = {"<": "little", ">": "big", "=": sys.byteorder}.get(order)
    if size > 1 and kind != "V" and native != sys.byteorder:
        raise GraphError(f"{typestr!r} has another byte order than this machine")
    name = "" if kind == "V" else _KINDS.get((kind, size))
    if name is None:
        raise GraphError(f"{typestr!r} has no counterpart")
    return name, size


def _array_interface(value: Any, kind: str, where: str) -> View:
    interface = value.__array_interface__ if kind == "cpu" else value.__cuda_array_interface__
    dtype, itemsize = _typestr(interface["typestr"])
    dtype = dtype or as_dtype(value.dtype).value
    if itemsize * 8 != bits(dtype):
        raise GraphTypeError(f"{where}: {itemsize} bytes an element, but {dtype} has {bits(dtype)} bits")
    if interface.get("mask") is not None:
        raise GraphTypeError(f"{where}: an array with a mask can't be used")
    data = interface["data"]
    if not isinstance(data, tuple):
        raise GraphTypeError(f"{where}: the array interface gives its memory as {type(data).__name__}, not by address")
    shape = tuple(map(operator.index, interface["shape"]))
    steps = interface.get("strides")
    if steps is None:
        stride = _row_major(shape)
    elif any(step % itemsize for step in steps):
        raise GraphTypeError(f"{where}: strides of {tuple(steps)} bytes are no multiples of {itemsize}")
    else:
        stride = tuple(step // itemsize for step in steps)
    address, readonly = data
    index = _cuda_index(value) if kind == "cuda" else 0
    return View(operator.index(address or 0), dtype, shape, stride, kind, index, bool(readonly), (value, interface))


def array_layout(value: Any, *, writable: bool) -> tuple[Any, ...] | None:
    """What ``same_array`` compares: the layout of a numpy array that ``describe`` has accepted. None for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return None
    interface = value.__array_interface__
    return type(value), value.dtype, interface["typestr"], value.shape, interface.get("strides"), writable


def same_array(value: Any, layout: tuple[Any, ...]) -> tuple[int, object] | None:
    """(address, what keeps it) of an array with exactly this layout, else None: ``describe`` says why."""
    kind, dtype, typestr, shape, strides, writable = layout
    if type(value) is not kind or value.dtype is not dtype:
        return None
    interface = value.__array_interface__
    address, readonly = interface["data"]
    if (
        interface["typestr"] != typestr
        or interface["shape"] != shape
        or interface.get("strides") != strides
        or interface.get("mask") is not None
        or (readonly and writable)
        or type(address) is not int
    ):
        return None
    return address, interface


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return packed_strides(shape)  # type: ignore[return-value]  # ints in, ints out


def _cuda_index(value: Any) -> int:
    device = getattr(value, "device", None)
    index = getattr(device, "id", getattr(device, "index", 0))
    return index if isinstance(index, int) else 0


# (code, bits) of DLDataType to our vocabulary. Codes: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 7.. the fp8 and fp4 types.
_DL_TYPES = {
    (0, 4): "int4", (0, 8): "int8", (0, 32): "int32", (0, 64): "int64", (1, 8): "uint8", (2, 16): "float16",
    (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16", (6, 8): "boolean", (10, 8): "fp8_e4m3",
    (12, 8): "fp8_e5m2", (14, 8): "fp8_e8m0", (17, 4): "fp4_e2m1",
}  # fmt: skip


def _dlpack(value: Any, where: str) -> View:
    from ._dlpack import open_capsule

    found = open_capsule(value, where)
    dtype = _DL_TYPES.get((found.code, found.bits))
    if dtype is None or found.lanes not in ((1, 2) if found.bits == 4 else (1,)):
        raise GraphTypeError(
            f"{where}: DLPack type code {found.code}, {found.bits} bits, {found.lanes} lanes has no counterpart"
        )
    shape, stride = found.shape, found.stride or _row_major(found.shape)
    if found.lanes == 2:
        shape, stride = rescale(shape, stride, unit_axis(shape, stride), 2, 1)
    return View(found.address, dtype, shape, stride, found.device_type, found.device_index, found.readonly, found.owner)


# --- elements that share a byte, and vectors of bytes
def unit_axis(dim: Sequence[Any], stride: Sequence[Any]) -> int:
    """The axis along which elements are neighbours: of stride 1, and if possible of a size above 1; GraphError if none is."""
    axes = [axis for axis, step in enumerate(stride) if step == 1]
    if not axes:
        raise GraphError("a packed type needs an axis of stride 1")
    return next((axis for axis in reversed(axes) if dim[axis] != 1), axes[-1])


def rescale(
    shape: Sequence[int], stride: Sequence[int], axis: int, up: int, down: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides counted in units of which ``up`` fit where ``down`` were, ``axis`` being the unit axis.

    GraphError if they don't come out whole.
    """
    if any(step * up % down for i, step in enumerate(stride) if i != axis) or shape[axis] * up % down:
        raise GraphError(f"shape {tuple(shape)} with strides {tuple(stride)} does not hold whole packed elements")
    return (
        tuple(size * up // down if i == axis else size for i, size in enumerate(shape)),
        tuple(1 if i == axis else step * up // down for i, step in enumerate(stride)),
    )


# --- host scalars
_FORMATS = {
    "float64": "<d", "float32": "<f", "float16": "<e", "int64": "<q", "int32": "<i", "int8": "<b", "uint8": "<B",
    "boolean": "<?",
}  # fmt: skip


def encode_scalar(value: float | bool, dtype: str, where: str) -> bytes:
    """One host element of ``dtype``, little-endian. Floats round to nearest; integers and booleans must be exact.

    ExecutionError names the operand if the type has no scalar form or can't hold the value.
    """
    try:
        if dtype == "bfloat16":
            return struct.pack("<f", _round_bfloat16(float(value)))[2:]
        form = _FORMATS[dtype]
        if form in ("<d", "<f", "<e"):
            return struct.pack(form, value)
        whole = int(value)
        if whole != value or (dtype == "boolean" and whole not in (0, 1)):
            raise ValueError(f"{dtype} holds {'0 and 1' if dtype == 'boolean' else 'whole numbers'}")
        return struct.pack(form, whole)
    except KeyError:
        raise ExecutionError(f"operand {where}: {dtype} can't be passed by value", operand=where) from None
    except (struct.error, OverflowError, ValueError) as error:
        raise ExecutionError(f"operand {where}: {value!r} does not fit {dtype}: {error}", operand=where) from None


def _round_bfloat16(value: float) -> float:
    """The nearest number of 8 significant bits, ties to even; subnormals have fewer."""
    if value == 0 or not math.isfinite(value):
        return value
    unit = max(math.frexp(value)[1], -125) - 8
    return math.copysign(math.ldexp(round(math.ldexp(value, -unit)), unit), value)


def scalar(value: Any, where: str) -> float | int | bool:
    """The Python number in a one-element CPU tensor or array."""
    view = describe(value, where)
    if view.device_type != "cpu" or view.elements != 1 or not view.address:
        raise GraphTypeError(f"{where} takes a number or a one-element CPU tensor")
    if view.dtype != "bfloat16" and view.dtype not in _FORMATS:
        raise GraphTypeError(f"{where}: {view.dtype} has no scalar form")
    raw = ctypes.string_at(view.address, bits(view.dtype) // 8)
    if view.dtype == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + raw)[0])
    found: float | int | bool = struct.unpack(_FORMATS[view.dtype], raw)[0]
    return found

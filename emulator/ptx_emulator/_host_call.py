"""Calls the host function of a job in the child process, with its arguments built in this process's memory.

Contract: `call_host(job, recorder)` loads the runtime and the host object, makes the arguments that `_arguments.relocate`
described, and calls; kernel launches go to `recorder.callback`. Raises what the recorder caught, or `EmulationError` with
the runtime's or the function's own words. Argument memory lives as long as the process. Imported by `_child`.
"""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from ._findings import EmulationError

__all__ = ["call_host"]

_ERRORS = {1: "cudaErrorInvalidValue", 2: "cudaErrorMemoryAllocation"}
_ALIGN = 64
_CUDA = 2  # kDLCUDA
_TYPE = {"none": 0, "int": 1, "bool": 2, "float": 3, "tensor": 7, "array": 71}  # TVMFFITypeIndex; "tensor": DLTensor *


class _Value(ctypes.Union):
    _fields_ = (("int", ctypes.c_int64), ("float", ctypes.c_double), ("pointer", ctypes.c_void_p))


class _Any(ctypes.Structure):
    """TVMFFIAny."""

    _fields_ = (("type", ctypes.c_int32), ("zero", ctypes.c_uint32), ("value", _Value))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Array(ctypes.Structure):
    """TVMFFIObject and TVMFFISeqCell of an ffi.Array; the one reference is never given up."""

    _fields_ = (
        ("references", ctypes.c_uint64),
        ("type", ctypes.c_int32),
        ("zero", ctypes.c_uint32),
        ("deleter", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("items_deleter", ctypes.c_void_p),
    )


class Memory:
    """Host memory that the arguments point to."""

    def __init__(self) -> None:
        self._keep: list[Any] = []

    def bytes(self, raw: bytes) -> int:
        """Address of a copy of `raw`, aligned to 64, with room for a word."""
        held = ctypes.create_string_buffer(max(len(raw), 16) + _ALIGN)
        address = -(-ctypes.addressof(held) // _ALIGN) * _ALIGN
        ctypes.memmove(address, raw, len(raw))
        self._keep.append(held)
        return address

    def block(self, data: str, values: Sequence[tuple[int, str]]) -> int:
        raw = bytearray(base64.b64decode(data))
        for offset, value in values:
            raw[offset : offset + 8] = self.bytes(base64.b64decode(value)).to_bytes(8, "little")
        return self.bytes(bytes(raw))

    def plain(self, kind: str, *value: Any) -> int:
        """Address of an argument of the plain C entry."""
        if kind == "block":
            return self.bytes(self.block(*value).to_bytes(8, "little"))
        return self.bytes(base64.b64decode(value[0]))

    def any(self, target: _Any, kind: str, *value: Any) -> None:
        """Fill a TVMFFIAny."""
        target.type = _TYPE["int" if kind == "block" else kind]
        if kind == "block":
            target.value.int = self.block(*value)
        elif kind == "float":
            target.value.float = value[0]
        elif kind == "tensor":
            target.value.pointer = self._tensor(**value[0])
        elif kind == "array":
            items = self.anys(value[0])
            held = _Array(1, _TYPE["array"], 0, None, ctypes.addressof(items), len(items), len(items), None)
            self._keep.append(held)
            target.value.pointer = ctypes.addressof(held)
        elif kind != "none":
            target.value.int = value[0]

    def anys(self, arguments: Sequence[Sequence[Any]]) -> Any:
        """An array of TVMFFIAny."""
        items = (_Any * len(arguments))()
        self._keep.append(items)
        for item, argument in zip(items, arguments, strict=True):
            self.any(item, *argument)
        return items

    def _tensor(self, data: int, dtype: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> int:
        extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        steps = (ctypes.c_int64 * max(len(strides), 1))(*strides)
        held = _DLTensor(data, _CUDA, 0, len(shape), *dtype, extents, steps, 0)
        self._keep += [extents, steps, held]
        return ctypes.addressof(held)


_memory = Memory()  # as long-lived as the process: kernels run after the call


def call_host(job: Mapping[str, Any], recorder: Any) -> None:
    """Load the object, set up its kernels, call its host function with the arguments."""
    runtime = ctypes.CDLL(job["runtime"], mode=ctypes.RTLD_GLOBAL)
    table = [word for pair in job["attributes"] for word in pair]
    attributes = (ctypes.c_int * len(table))(*table)
    runtime.ptxemu_configure(recorder.callback, attributes, len(job["attributes"]))
    runtime.ptxemu_problem.restype = ctypes.c_char_p
    host = ctypes.CDLL(job["object"])
    call = _ffi if job["ffi"] else _plain
    call(host, runtime, job, recorder)


def _plain(host: Any, runtime: Any, job: Mapping[str, Any], recorder: Any) -> None:
    error, device = ctypes.c_int32(0), ctypes.c_int32(0)
    library = ctypes.c_void_p()
    handle = ctypes.pointer(library)

    def call(symbol: str, *addresses: int) -> None:
        error.value = 0
        packed = (ctypes.c_void_p * (len(addresses) + 1))(*addresses, ctypes.addressof(error))
        function = getattr(host, symbol)
        function.restype = None
        function(packed, ctypes.c_int32(len(packed)))
        _check(symbol, error.value, runtime, recorder)

    call(job["init"], ctypes.addressof(handle))
    call(job["load"], ctypes.addressof(handle), ctypes.addressof(device))
    call(job["call"], *(_memory.plain(*argument) for argument in job["arguments"]))


def _ffi(host: Any, runtime: Any, job: Mapping[str, Any], recorder: Any) -> None:
    arguments, result = _memory.anys(job["arguments"]), _Any()
    function = getattr(host, job["call"])
    function.restype = ctypes.c_int
    failed = function(None, arguments, ctypes.c_int32(len(arguments)), ctypes.byref(result))
    _check(job["call"], runtime.ptxemu_raised() or failed, runtime, recorder)


def _check(symbol: str, error: int, runtime: Any, recorder: Any) -> None:
    if recorder.error is not None:
        raise recorder.error
    if error:
        said = runtime.ptxemu_problem().decode(errors="replace")
        code = "" if error < 0 else f" with {_ERRORS.get(error, f'error {error}')}"
        raise EmulationError(f"the host function failed in {symbol}{code}{': ' + said if said else ''}")

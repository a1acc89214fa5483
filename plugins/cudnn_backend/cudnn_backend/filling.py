"""Fills of operands on a stream, by the CUDA driver. Imported by ``plan``.

Asynchronous: a fill neither allocates nor waits, and a capturing stream records it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cudnn_core import BuildError, Decline, ExecutionError

from . import handles

if TYPE_CHECKING:
    from .lower.fills import Fill

__all__ = ["filler"]

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: the first call of a thread


def filler(fills: Sequence[Fill], labels: Sequence[str], ordinal: int) -> Callable[[Sequence[int], int], None]:
    """``fill(pointers, stream)`` for operands of the device. Raises BuildError without cuda-bindings.

    ``labels`` names the operand of each slot; what the driver answers is an ExecutionError that names it.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        missing = Decline("dep.missing", "cuda-bindings", hint='pip install "cudnn-core[cuda]"')
        raise BuildError(str(missing), decline=missing) from error
    calls = tuple((fill.slot, _call(driver, fill)) for fill in fills)

    def run(pointers: Sequence[int], stream: int) -> None:
        for slot, call in calls:
            try:
                code = call(pointers[slot], stream)
                if code == _NO_CONTEXT:
                    with handles.current(ordinal):
                        code = call(pointers[slot], stream)
            except RuntimeError as error:  # no libcuda
                raise _not_filled(labels[slot], error) from error
            if code:
                raise _not_filled(labels[slot], driver.CUresult(code).name)

    return run


def _call(driver: Any, fill: Fill) -> Callable[[int, int], int]:
    """(pointer, stream) -> the driver's code"""
    _, bits, value, width, height, pitch = fill
    if height == 1:
        flat = getattr(driver, f"cuMemsetD{bits}Async")
        return lambda pointer, stream: int(flat(pointer, value, width, stream)[0])
    rows = getattr(driver, f"cuMemsetD2D{bits}Async")
    return lambda pointer, stream: int(rows(pointer, pitch, value, width, height, stream)[0])


def _not_filled(label: str, why: object) -> ExecutionError:
    return ExecutionError(f"operand {label}: the driver did not fill it past the lengths: {why}", operand=label)

"""What an executor passes to the host function of an artifact: the engine's own arguments, or those of the default signature.

Contract: `host_arguments(plan, compiled, ...)` is a tuple of HostBlock, bytes, numbers, ctypes and numpy scalars, and None.
Imported by the plan, on first use.
"""

from __future__ import annotations

import ctypes
from numbers import Number
from typing import Any

from ._dtypes import nbytes
from ._engine import Artifact, CompiledPlan, HostBlock, Operand, VariantPack
from ._errors import ExecutionError
from ._hooks import describe, short_repr

__all__ = ["host_arguments"]

_SCALARS: dict[str, Any] = {
    "float32": ctypes.c_float, "float64": ctypes.c_double, "int8": ctypes.c_int8, "uint8": ctypes.c_uint8,
    "int32": ctypes.c_int32, "int64": ctypes.c_int64, "boolean": ctypes.c_bool,
}  # fmt: skip
_ALLOWED = (HostBlock, bytes, Number, ctypes._SimpleCData, ctypes.Structure, ctypes.Array, type(None))


def host_arguments(engine: str, compiled: CompiledPlan, artifact: Artifact, pack: VariantPack, workspace: int) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of the host function in `artifact.object`, in its order; addresses are those of `pack` and `workspace`.

    An engine's `host_arguments` decides. Without it: one pointer for each operand in the order of the plan (by-value
    operands: the value), the workspace's pointer if the plan has one, and None, the null stream. Raises ExecutionError.
    """
    own = getattr(compiled, "host_arguments", None)
    if own is None:
        made = [_default(operand, pointer) for operand, pointer in zip(pack.operands, pack.pointers, strict=True)]
        if compiled.workspace_size:
            made.append(ctypes.c_void_p(workspace))
        return (*made, None)
    try:
        given = own(artifact, pack, workspace)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and the like are a plugin's failure too
        raise ExecutionError(
            f"engine {engine} could not give the host arguments of {artifact.name}: {describe(error)}"
        ) from error
    if not isinstance(given, (tuple, list)):
        raise ExecutionError(f"engine {engine} gave host arguments that are no sequence: {short_repr(given)}")
    for number, value in enumerate(given):
        if not isinstance(value, _ALLOWED):
            raise ExecutionError(f"engine {engine} gave host argument {number} of {artifact.name} as {short_repr(value)}, which is no"
                                 " HostBlock, bytes, number, ctypes or numpy scalar or None")  # fmt: skip
    return tuple(given)


def _default(operand: Operand, pointer: int) -> Any:
    if not operand.by_value:
        return ctypes.c_void_p(pointer)
    raw = ctypes.string_at(pointer, nbytes(operand.dtype, 1))
    kind = _SCALARS.get(operand.dtype)
    return raw if kind is None else kind.from_buffer_copy(raw)

"""The forms in which the frontend's calls take operands, overrides and saved plans. Imported by the classic sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from .._arguments import as_int, as_list, as_name
from .._dims import dims_of, evaluate, match_sizes
from .._enums import FrontendEnum, as_member
from .._errors import BuildError, ExecutionError, GraphTypeError, nearest

if TYPE_CHECKING:
    from .._handle import Handle
    from .._plan import Plan

__all__ = ["deserialize_arguments", "names", "note_names", "ordered", "overrides", "unknown_engines"]

E = TypeVar("E", bound=FrontendEnum)


def names(values: Any, where: str) -> list[str]:
    """A list of non-empty strings."""
    found = [as_name(value, f"{where}[{index}]") for index, value in enumerate(as_list(values, where))]
    if "" in found:
        raise GraphTypeError(f"{where} takes names, got an empty one")
    return found


def unknown_engines(patterns: Iterable[str]) -> list[str]:
    """What is wrong with names and globs that cover no engine. One of a plugin whose manifest is unusable may be right."""
    from .._candidates import names_engine
    from .._registry import current

    engines = current().engines
    opaque = {engine.plugin for engine in engines if engine.spec is None}
    known = [*(engine.short_id for engine in engines), *(f"{engine.plugin}:*" for engine in engines)]
    return [
        f"deselect_engines: {pattern!r} covers no installed engine{nearest(pattern, known)};"
        " it takes whole names (plugin:engine) and globs"
        for pattern in patterns
        if pattern.partition(":")[0] not in opaque and not any(names_engine(pattern, engine) for engine in engines)
    ]


def note_names(kind: type[E], values: Any, where: str) -> list[str]:
    """A list of notes, as their names."""
    return [str(as_member(kind, value)) for value in as_list(values, where)]


def ordered(buffers: Any, uids: Any) -> dict[int, Any]:
    """``{uid: buffer}`` of a sequence of buffers and their uids."""
    kinds = (tuple, list)
    if type(uids) in kinds and type(buffers) in kinds and len(uids) == len(buffers):
        try:  # execution: the plan looks every key up anyway
            mapping = dict(zip(uids, buffers))  # noqa: B905  equal lengths, and without the check half the time
            if len(mapping) == len(uids):
                return mapping
        except TypeError:
            pass
    if isinstance(buffers, Mapping):
        raise ExecutionError("with tensor_uids the operands are a sequence of buffers, not a mapping")
    listed = as_list(buffers, "the operands with tensor_uids")
    keys = [as_int(uid, f"tensor_uids[{index}]") for index, uid in enumerate(as_list(uids, "tensor_uids"))]
    if len(listed) != len(keys):
        raise ExecutionError(f"{len(keys)} tensor_uids and {len(listed)} buffers")
    mapping = dict(zip(keys, listed, strict=True))
    if len(mapping) != len(keys):
        raise ExecutionError("tensor_uids repeats a uid")
    return mapping


def overrides(plan: Plan, uids: Any, shapes: Any, strides: Any) -> dict[int, tuple[int, ...]] | None:
    """What of the frontend's overrides a plan is to be told: ``{uid: shape}`` of operands with runtime sizes, or None.

    The plan of fixed sizes is static: an override that says what is declared is accepted, another one is an ExecutionError.
    """
    if uids is None and shapes is None and strides is None:
        return None
    keys = [as_int(uid, f"override_uids[{index}]") for index, uid in enumerate(as_list(uids or (), "override_uids"))]
    listed = as_list(shapes or (), "override_shapes")
    steps = as_list(strides, "override_strides") if strides is not None else [None] * len(keys)
    if not len(keys) == len(listed) == len(steps):
        raise ExecutionError("override_uids, override_shapes and override_strides must have one length")
    operands = {operand.uid: operand for operand in plan.operands}
    sizes: dict[str, int] = {}
    told: dict[int, tuple[int, ...]] = {}
    for uid, given in zip(keys, listed, strict=True):
        operand = operands.get(uid)
        if operand is None:
            raise ExecutionError(f"override_uids names no operand: {uid}", operand=str(uid))
        label = operand.name or f"uid {uid}"
        shape = _ints(given, f"override_shapes of {label}")
        if any(True for _ in dims_of(operand.dim)):
            match_sizes(operand.dim, shape, sizes, label)
            told[uid] = shape
        elif shape != operand.dim:
            raise ExecutionError(
                f"operand {label}: shape {shape} overrides fixed sizes {operand.dim}; declare a Dim where sizes vary",
                operand=label,
            )
    for uid, given in zip(keys, steps, strict=True):
        operand = operands[uid]
        label = operand.name or f"uid {uid}"
        if given is None:
            continue
        stride = _ints(given, f"override_strides of {label}")
        known = all(dim.name in sizes for dim in dims_of(operand.stride))
        if not known or stride != tuple(evaluate(step, sizes) for step in operand.stride):
            raise ExecutionError(
                f"operand {label}: strides {stride} override declared strides"
                f" ({', '.join(map(str, operand.stride))}); declare them with a Dim where they vary",
                operand=label,
            )
    return told or None


def deserialize_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Handle | None, bytes, bool, bool]:
    """(handle, data, enforce_precompiled, trust) of every form of ``deserialize``."""
    from .._handle import Handle

    handle = kwargs.pop("handle_", kwargs.pop("handle", None))
    data = kwargs.pop("pyobj", kwargs.pop("data", None))
    enforce = kwargs.pop("enforce_precompiled", None)
    trust = bool(kwargs.pop("trust", False))
    if kwargs:
        raise GraphTypeError(f"deserialize() has no parameter {next(iter(kwargs))!r}")
    for value in args:
        if isinstance(value, Handle) and handle is None:
            handle = value
        elif isinstance(value, bool) and enforce is None and data is not None:
            enforce = value
        elif data is None:
            data = value
        else:
            raise GraphTypeError(f"deserialize() does not know what {value!r} is")
    if isinstance(data, (list, tuple)):
        try:
            data = bytes(data)
        except (TypeError, ValueError):
            raise BuildError("deserialize takes bytes, or a list of ints from 0 to 255") from None
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise GraphTypeError(f"deserialize() takes the bytes of a plan, got {type(data).__name__}")
    return handle, bytes(data), bool(enforce), trust


def _ints(values: Iterable[Any], where: str) -> tuple[int, ...]:
    return tuple(as_int(value, f"{where}[{index}]") for index, value in enumerate(as_list(values, where)))

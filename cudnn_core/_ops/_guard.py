"""The wall around op rows: a mistake in a plugin's row is a typed error that names the op and the plugin.

``check_row`` checks a row's data once, when it is made; ``guarded`` wraps a function of a row, so that whatever it raises
or returns comes out as a GraphError, or, where the graph can do without the answer, as a warning and a neutral answer.
Imported by the op schema and the builders.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .._dims import Dim, Extent, Product
from .._dtypes import as_dtype
from .._errors import CudnnCoreError, GraphError, ManifestError

if TYPE_CHECKING:
    from ._schema import Op

__all__ = ["call", "check_row", "dims_answer", "guarded", "in_place_answer", "infer_answer", "problems_answer"]

_COMMON = ("name", "compute_data_type", "out_dims")
_RAISE: Any = object()


def call(op: str, stage: str, function: Callable[..., Any], answer: Callable[..., Any], *args: Any) -> Any:
    """``answer(function(*args), *args)``; anything but a GraphError becomes one that names the op and the stage."""
    try:
        return answer(function(*args), *args)
    except GraphError:
        raise
    except (Exception, SystemExit) as error:
        raise GraphError(f"{_origin(op)}: {stage} failed: {_text(error)}") from error


def guarded(
    op: str, stage: str, function: Callable[..., Any], answer: Callable[..., Any], instead: Any = _RAISE
) -> Callable[..., Any]:
    """``function`` behind ``call``; with ``instead``, a failure is logged and that is the answer."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        try:
            return call(op, stage, function, answer, *args)
        except GraphError as error:
            if instead is _RAISE:
                raise
            logging.getLogger("cudnn_core").warning("%s", error)
            return instead

    return run


def _origin(op: str) -> str:
    try:
        from .._registry import current

        owner = next((item for item in current().plugins if item.manifest and op in item.manifest.ops), None)
    except CudnnCoreError:
        owner = None
    return f"op {op!r}" + (f" of plugin {owner.plugin}" if owner else "")


def _text(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:
        return type(error).__name__


# --- what the functions must answer
def infer_answer(outputs: frozenset[str]) -> Callable[..., Any]:
    from ._schema import TensorSpec

    def answer(specs: Any, node: Any) -> Any:
        if not isinstance(specs, Mapping):
            raise TypeError(f"the answer is no mapping: {specs!r}")
        for port, spec in specs.items():
            if port not in outputs:
                raise ValueError(f"there is no output {port!r}")
            if not isinstance(spec, TensorSpec):
                raise TypeError(f"{port} is no TensorSpec: {spec!r}")
            for values in (spec.dim, spec.stride):
                if values is not None and not (isinstance(values, tuple) and all(map(_is_size, values))):
                    raise ValueError(f"{port} has {values!r}, which are no sizes")
            if spec.dtype is not None:
                as_dtype(spec.dtype)
        return specs

    return answer


def problems_answer(problems: Any, node: Any) -> Any:
    from ._schema import Problem

    found = list(problems)
    for problem in found:
        if not isinstance(problem, Problem):
            raise TypeError(f"{problem!r} is no Problem")
    return found


def dims_answer(dims: Any, node: Any) -> Any:
    for name, size in dims.items():
        if not isinstance(name, str) or not _is_size(size):
            raise ValueError(f"{name!r}: {size!r} is no named size")
    return dims


def in_place_answer(places: Any, node: Any) -> Any:
    found = tuple(places)
    for out, source, position, offset in found:
        value = node.inputs[source]
        if isinstance(value, tuple):
            value[position]
        if out not in node.outputs or not isinstance(offset, int):
            raise ValueError(f"{out!r}, {source!r}: {offset!r} is no place in an output")
    return found


def _is_size(value: Extent) -> bool:
    return isinstance(value, (Dim, Product)) or (type(value) is int and value >= 0)


# --- the data of a row
def check_row(op: Op) -> None:
    """ManifestError for the first thing of ``op`` that is not what the schema says."""
    try:
        _check_row(op)
    except (TypeError, AttributeError, IndexError) as error:
        raise ManifestError(f"malformed row: {error}", subject=f"op.{op.name}") from None


def _check_row(op: Op) -> None:
    from ._attrs import TYPES
    from ._schema import Attr, Param, Port

    def need(condition: object, message: str) -> None:
        if not condition:
            raise ManifestError(message, subject=f"op.{op.name}")

    def names(items: Any, kind: type, what: str) -> set[str]:
        need(isinstance(items, tuple) and all(isinstance(item, kind) for item in items), f"{what}: {items!r}")
        found = [item.name for item in items]
        need(len({*found}) == len(found) and all(isinstance(name, str) and name for name in found), f"{what}: {found}")
        return {*found}

    need(isinstance(op.name, str) and op.name.isidentifier(), f"the name {op.name!r} is no identifier")
    inputs = names(op.inputs, Port, "inputs are a tuple of Ports with different names")
    outputs = names(op.outputs, Port, "outputs are a tuple of Ports with different names")
    attrs = names(op.attrs, Attr, "attrs are a tuple of Attrs with different names")
    need(outputs, "there is no output")
    need(not (inputs & outputs or inputs & attrs or outputs & attrs), "a port or attribute shares its name")
    for attr in op.attrs:
        need(attr.type in TYPES, f"attribute {attr.name!r} has an unknown type {attr.type!r}")
        need(attr.type != "enum" or attr.choices, f"attribute {attr.name!r} has no choices")
    for pair in op.alias:
        need(
            isinstance(pair, tuple) and len(pair) == 2 and pair[0] in outputs and pair[1] in inputs,
            f"alias: {pair!r} is no pair of an output and an input",
        )
    flags = {attr.name for attr in op.attrs if attr.type == "bool"}
    for name, pair in op.updates.items():
        need(name in flags and pair in op.alias, f"updates: {name!r}: {pair!r} is no boolean attribute with an alias")
    for name, port in op.operands.items():
        need(port in inputs or port in outputs, f"operand {name!r} names no port: {port!r}")
    for method, entry in op.builders.items():
        need(
            isinstance(entry, tuple) and len(entry) == 2 and (entry[1] is None or callable(entry[1])),
            f"builder {method!r} is no pair of parameters and prepare: {entry!r}",
        )
        params = names(entry[0], Param, f"builder {method!r} takes a tuple of Params with different names")
        targets = {param.to or param.name for param in entry[0]} - {"-"}
        stray = targets - inputs - outputs - attrs - {*_COMMON} if entry[1] is None else ()
        need(not stray, f"builder {method!r}: {sorted(stray)} of {sorted(params)} fill no port or attribute")

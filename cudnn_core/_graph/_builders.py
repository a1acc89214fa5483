"""Op builder methods, made from the op table.

``call_builder`` binds the arguments of ``graph.<op>(...)`` to the row's ports and attributes; ``install`` puts one method
per in-tree builder on the Graph class, with the frontend's signature and a docstring. Imported by ``_graph``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._arguments import as_name
from .._dtypes import as_dtype, data_type
from .._errors import GraphError, GraphTypeError, nearest
from .._ops._attrs import canonical
from .._ops._guard import call
from .._ops._schema import REQUIRED, Op, Param
from .._ops._table import all_builders
from ._tensor import GraphNode, Tensor, extents

if TYPE_CHECKING:
    from ._graph import Graph

__all__ = ["call_builder", "complete_attrs", "install", "make_node", "signature_of"]

_COMMON = ("name", "compute_data_type", "out_dims")


def install(cls: type) -> None:
    """Add a method for every in-tree builder to ``cls``."""
    for method, row in all_builders().items():
        setattr(cls, method, _method(method, row, cls.__name__))


def _method(method: str, row: Op, owner: str) -> Any:
    def build(self: Graph, *args: Any, **kwargs: Any) -> Any:
        return call_builder(self, method, row, args, kwargs)

    build.__name__ = method
    build.__qualname__ = f"{owner}.{method}"
    build.__doc__ = row.doc
    build.__signature__ = signature_of(method, row)  # type: ignore[attr-defined]
    return build


def signature_of(method: str, row: Op) -> inspect.Signature:
    """The builder's signature with ``self``; parameters after a required keyword-only one stay keyword-only."""
    params, _ = row.builders[method]
    kinds = inspect.Parameter
    items = [kinds("self", kinds.POSITIONAL_OR_KEYWORD)]
    keyword_only = False
    seen_default = False
    for param in [*params, *_missing_common(params)]:
        keyword_only = keyword_only or param.keyword_only or (seen_default and param.default is REQUIRED)
        seen_default = seen_default or param.default is not REQUIRED
        default = kinds.empty if param.default is REQUIRED else param.default
        kind = kinds.KEYWORD_ONLY if keyword_only else kinds.POSITIONAL_OR_KEYWORD
        items.append(kinds(param.name, kind, default=default))
    return inspect.Signature(items)


def _missing_common(params: tuple[Param, ...]) -> list[Param]:
    given = {param.name for param in params}
    defaults: dict[str, Any] = {"name": "", "compute_data_type": None, "out_dims": None}
    return [Param(name, defaults[name], keyword_only=True) for name in _COMMON if name not in given]


def call_builder(graph: Graph, method: str, row: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One builder call: returns the output tensor, or a list of them with None for absent ones.

    Raises GraphTypeError for unknown, repeated or missing arguments and GraphError for wrong ones; the graph is then
    unchanged.
    """
    graph._mutable(method)
    params, prepare = row.builders[method]
    every = (*params, *_missing_common(params))
    bound = _bind(method, every, args, kwargs)
    name = as_name(bound.pop("name"), f"{method}(): name")
    compute = as_dtype(bound.pop("compute_data_type"))
    out_dims = bound.pop("out_dims")
    label = name or method
    if prepare is not None:
        values = call(row.name, f"prepare of {method}", prepare, lambda answer, *_: dict(answer), graph, bound)
    else:
        values = {
            param.to or param.name: bound[param.name] for param in params if param.name in bound and param.to != "-"
        }
    result = make_node(graph, row, label, name, compute, values, out_dims)
    for position, param in enumerate(params):
        _record(graph, position if position < len(args) else param.name, bound.get(param.name))
    return result


def _record(graph: Graph, argument: object, value: Any) -> None:
    """Remember a framework tensor as ``node::argument``, the wrapper form's name for it."""
    if isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            _record(graph, f"{argument}::{position}", item)
    else:
        tensor = graph._made_from(value)
        if tensor is not None:
            graph._record_io(graph._nodes[-1].name, str(argument), tensor, value)


def _bind(method: str, params: tuple[Param, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [param.name for param in params]
    positional = [param.name for param in params if not param.keyword_only]
    if len(args) > len(positional):
        raise GraphTypeError(f"{method}() takes {len(positional)} positional arguments, got {len(args)}", node=method)
    bound = dict(zip(positional, args, strict=False))
    for name, value in kwargs.items():
        if name in bound:
            raise GraphTypeError(f"{method}() got {name!r} twice", node=method)
        if name not in names:
            raise GraphTypeError(f"{method}() has no parameter {name!r}{nearest(name, names)}", node=method)
        bound[name] = value
    for param in params:
        if param.name not in bound:
            if param.default is REQUIRED:
                raise GraphTypeError(f"{method}() needs {param.name!r}", node=method, port=param.name)
            bound[param.name] = param.default
    return bound


def make_node(
    graph: Graph,
    row: Op,
    label: str,
    name: str,
    compute: data_type,
    values: Mapping[str, Any],
    out_dims: Any = None,
) -> Any:
    """Add a node with ``values`` (port or attribute -> value); all arguments are checked before the graph changes."""
    attr_names = {attr.name for attr in row.attrs}
    input_ports = {port.name: port for port in row.inputs}
    output_ports = {port.name: port for port in row.outputs}
    for key in values:
        if key not in attr_names and key not in input_ports and key not in output_ports:
            raise GraphTypeError(
                f"{row.name} has no port or attribute {key!r}{nearest(key, [*attr_names, *input_ports])}", node=label
            )
    attrs = complete_attrs(row, {key: value for key, value in values.items() if key in attr_names}, label)

    scratch = graph._scratch()  # tensors made from numbers and buffers; adopted when nothing failed
    inputs: dict[str, Any] = {}
    for port in row.inputs:
        value = values.get(port.name)
        if value is None or (port.variadic and not value):
            if not port.optional:
                raise GraphTypeError(f"input {port.name!r} is missing", node=label, port=port.name)
            continue
        if port.variadic:
            if isinstance(value, (str, bytes)) or not isinstance(value, (list, tuple)):
                raise GraphTypeError(
                    f"{port.name!r} takes a list of tensors, got {value!r}", node=label, port=port.name
                )
            inputs[port.name] = tuple(
                scratch.tensor(item, f"{label}.{port.name}[{i}]", port.data) for i, item in enumerate(value)
            )
        else:
            inputs[port.name] = scratch.tensor(value, f"{label}.{port.name}", port.data)
    if not compute or compute is data_type.NOT_SET:
        compute = graph.compute_data_type
    given: dict[str, Tensor] = {}
    for port in row.outputs:
        value = values.get(port.name)
        if value is not None:
            tensor = graph._own(value, f"{label}.{port.name}")
            if tensor.producer is not None or tensor in given.values():
                raise GraphError(f"tensor {tensor.label} already has a producer", node=label, port=port.name)
            given[port.name] = tensor
    shapes = _out_dims(row, out_dims, label)
    made = {port.name for port in row.outputs if port.name not in given and row.has_output(port, attrs)}

    scratch.adopt()
    outputs: dict[str, Tensor] = {}
    result: list[Tensor | None] = []
    stem = name or graph._next_label(row.name)
    for port in row.outputs:
        if port.name in given:
            outputs[port.name] = given[port.name]
            if not port.optional:
                result.append(given[port.name])
        elif port.name in made:
            outputs[port.name] = graph._new_tensor(f"{stem}::{port.name}", virtual=True)
            result.append(outputs[port.name])
        elif not port.optional:
            result.append(None)
    node = GraphNode(row, stem, compute, inputs, outputs, attrs)
    for tensor in outputs.values():
        tensor._producer = node
    for port_name, shape in shapes.items():
        if port_name in outputs:
            outputs[port_name]._dim = shape
    graph._add_node(node)
    return result[0] if len(row.outputs) == 1 else result


def _out_dims(row: Op, out_dims: Any, label: str) -> dict[str, Any]:
    """``out_dims`` is the first output's shape, or ``{port: shape}``."""
    if out_dims is None:
        return {}
    named = out_dims if isinstance(out_dims, Mapping) else {row.outputs[0].name: out_dims}
    known = [port.name for port in row.outputs]
    for port in named:
        if port not in known:
            raise GraphTypeError(f"out_dims: {row.name} has no output {port!r}{nearest(str(port), known)}", node=label)
    return {port: extents(shape, f"{label}.out_dims.{port}") for port, shape in named.items()}


def complete_attrs(row: Op, given: Mapping[str, Any], label: str) -> dict[str, Any]:
    """All attributes of ``row`` in table order: given ones checked and made canonical, the rest from the defaults."""
    result: dict[str, Any] = {}
    for attr in row.attrs:
        value = given.get(attr.name, REQUIRED)
        if value is REQUIRED or (value is None and attr.default is not REQUIRED):
            if attr.default is REQUIRED:
                raise GraphTypeError(f"attribute {attr.name!r} is missing", node=label, port=attr.name)
            result[attr.name] = attr.default
        else:
            result[attr.name] = canonical(attr, value, label)
    return result

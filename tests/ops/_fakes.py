"""Small stand-ins for a graph: tensors, and ``call`` that binds a builder as the Graph does. For tests of the op rows."""

from __future__ import annotations

from types import SimpleNamespace

from cudnn_core._dims import packed_strides
from cudnn_core._ops._schema import REQUIRED
from cudnn_core._ops._table import all_builders


def tensor(*dim, dtype="float32", stride=None, **fields):
    """A tensor with packed strides by default; ``tensor(None)`` has no shape yet."""
    if dim == (None,):
        return SimpleNamespace(name="t", dim=None, stride=None, dtype=dtype, **fields)
    stride = packed_strides(dim) if stride is None else tuple(stride)
    return SimpleNamespace(name="t", dim=tuple(dim), stride=stride, dtype=dtype, **fields)


def scalar(dtype="float32"):
    return tensor(1, 1, 1, 1, dtype=dtype)


def index(*dim, dtype="int32"):
    return tensor(*dim, dtype=dtype)


def call(method, *args, _out=None, **kwargs):
    """The node that ``graph.<method>(...)`` would make. ``_out``: output port -> overrides of its dim, stride or dtype."""
    row = all_builders()[method]
    params, prepare = row.builders[method]
    bound = {param.name: None if param.default is REQUIRED else param.default for param in params}
    positional = [param.name for param in params if not param.keyword_only]
    bound.update(zip(positional, args, strict=False), **kwargs)
    for common in ("name", "compute_data_type"):
        bound.pop(common, None)
    out_dims = bound.pop("out_dims", None)
    if prepare is None:
        values = {param.to or param.name: bound[param.name] for param in params if param.name in bound}
    else:
        values = prepare(None, bound)
    values = {name: value for name, value in values.items() if value is not None}
    known = {item.name for item in (*row.attrs, *row.inputs, *row.outputs)}
    assert set(values) <= known, set(values) - known
    attrs = {attr.name: values.get(attr.name, attr.default) for attr in row.attrs}
    inputs = {}
    for port in row.inputs:
        if port.name in values:
            value = values[port.name]
            inputs[port.name] = tuple(value) if port.variadic else value
    return make(row, inputs, attrs, {row.outputs[0].name: {"dim": out_dims}} if out_dims else {}, values, _out)


def make(row, inputs, attrs, shapes, values=None, overrides=None):
    outputs = {}
    for port in row.outputs:
        declared = (values or {}).get(port.name)
        if declared is not None:
            outputs[port.name] = declared
        elif not port.optional and (port.when is None or port.when(attrs)):
            outputs[port.name] = tensor(None, dtype="not_set")
    node = SimpleNamespace(op=row.name, name="n", inputs=inputs, outputs=outputs, attrs=attrs, row=row)
    given = {port: {**shapes.get(port, {}), **(overrides or {}).get(port, {})} for port in outputs}
    for port, fields in given.items():
        _assign(outputs[port], fields)
    for port, spec in row.infer(node).items():
        if port in outputs:
            _assign(outputs[port], {**spec._asdict(), **given[port]}, keep=True)
    return node


def _assign(target, fields, keep=False):
    for name, value in fields.items():
        if value is not None and (not keep or getattr(target, name) in (None, "not_set")):
            setattr(target, name, tuple(value) if name in ("dim", "stride") else value)
    if keep:
        if target.dtype == "not_set":
            target.dtype = "float32"
        if target.stride is None and target.dim is not None:
            target.stride = packed_strides(target.dim)


def problems(node):
    return list(node.row.validate(node))


def only_problem(node):
    """The single finding of a node."""
    found = problems(node)
    assert len(found) == 1, found
    return found[0]


def ports_with_problems(node):
    return [problem.port for problem in problems(node)]


def dim_of(node, port=None):
    port = port or next(iter(node.outputs))
    return node.outputs[port].dim


def cost_of(node):
    return node.row.cost(node)

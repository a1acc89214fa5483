"""Frozen graphs by hand and runs through raw addresses, so that lowerings are tested apart from the graph builder."""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
from torch_reference import evaluate
from torch_reference._engine import Eager
from torch_reference._memory import Layout
from torch_reference._rounding import NATIVE

from cudnn_core import ExecutionContext, FrozenGraph, FrozenNode, FrozenTensor, Operand, VariantPack, data_type

# The same tests run on a GPU with REFERENCE_TEST_DEVICE=cuda.
DEVICE = os.environ.get("REFERENCE_TEST_DEVICE", "cpu")


def row_major(dim):
    strides, step = [], 1
    for size in reversed(dim):
        strides.append(step)
        step = step * size if size != 0 else step
    return tuple(reversed(strides))


class Net:
    """A graph in the making: ``t`` declares a tensor by name, ``op`` adds a node over names."""

    def __init__(self):
        self.specs, self.nodes = {}, []

    def t(self, name, dtype, dim, stride=None, **fields):
        stride = row_major(dim) if stride is None else stride
        self.specs[name] = dict(dtype=data_type(dtype), dim=tuple(dim), stride=tuple(stride), **fields)
        return name

    def op(self, op, inputs, outputs, attrs=None, compute="float32"):
        self.nodes.append((op, inputs, outputs, attrs or {}, data_type(compute)))

    def frozen(self):
        produced = {n: (i, port) for i, node in enumerate(self.nodes) for port, n in _flat(node[2])}
        consumed = {}
        for i, node in enumerate(self.nodes):
            for port, name in _flat(node[1]):
                consumed.setdefault(name, []).append((i, port))
        made = {}

        def build(name):
            if name not in made:
                spec = dict(self.specs[name])
                role = spec.pop("role", "output" if name in produced else "input")
                ragged = spec.pop("ragged", None)
                made[name] = FrozenTensor(
                    index=list(self.specs).index(name), uid=100 + list(self.specs).index(name), name=name, role=role,
                    producer=produced.get(name), consumers=tuple(consumed.get(name, ())),
                    ragged_offset=build(ragged) if ragged else None, **spec,
                )  # fmt: skip
            return made[name]

        tensors = tuple(build(name) for name in self.specs)

        def ports(held):
            return {p: tuple(map(build, n)) if isinstance(n, tuple) else build(n) for p, n in held.items()}

        nodes = tuple(
            FrozenNode(index=i, op=op, name="", compute_dtype=c, inputs=ports(ins), outputs=ports(outs), attrs=attrs)
            for i, (op, ins, outs, attrs, c) in enumerate(self.nodes)
        )
        return FrozenGraph(name="", key="0" * 64, tensors=tensors, nodes=nodes)


def _flat(ports):
    for port, held in ports.items():
        for name in held if isinstance(held, tuple) else (held,):
            yield port, name


def single(op, inputs, outputs, attrs=None, compute="float32"):
    """A graph of one node: port -> (dtype, dim[, stride]) for inputs and outputs."""
    net = Net()
    for ports in (inputs, outputs):
        for port, spec in ports.items():
            for i, one in enumerate(spec if isinstance(spec, list) else [spec]):
                net.t(f"{port}{i}" if isinstance(spec, list) else port, *one)

    def names(ports):
        return {p: tuple(f"{p}{i}" for i in range(len(s))) if isinstance(s, list) else p for p, s in ports.items()}

    net.op(op, names(inputs), names(outputs), attrs, compute)
    return net.frozen()


def context():
    return ExecutionContext(None, SimpleNamespace(type=DEVICE, ordinal=0 if DEVICE == "cuda" else None))


def reasons(graph):
    verdict = Eager().check_support(graph, context())
    return [] if verdict else [(r.code, r.subject) for r in verdict.reasons]


def oracle(graph, values, **options):
    """``evaluate`` by tensor name."""
    by_name = {tensor.name: tensor.uid for tensor in graph.tensors}
    found = evaluate(graph, {by_name[name]: value for name, value in values.items()}, **options)
    return {tensor.name: found[tensor.uid] for tensor in graph.tensors if tensor.uid in found}


def run(graph, values, fill=0xA5, through="execute", sizes=None):
    """Check, build and run on DEVICE; name -> storage. Outputs are fresh unless given among ``values``."""
    engine, ctx = Eager(), context()
    verdict = engine.check_support(graph, ctx)
    assert verdict, verdict
    plan = engine.build_plan(graph, verdict.configs[0], ctx)
    assert plan.workspace_size == 0
    sized = graph.at(sizes or {})
    moved = {}

    def at_device(tensor):
        return moved.setdefault(id(tensor), (tensor, tensor.to(DEVICE)))[1]

    operands, pointers, outputs = [], [], {}
    for tensor in sized.operand_tensors():
        layout = Layout(str(tensor.dtype), tensor.dim, tensor.stride)
        given = values.get(tensor.name)
        if given is None:
            assert tensor.role == "output", tensor
            itemsize = NATIVE.get(layout.dtype, torch.uint8).itemsize
            given = torch.full((max(-(-layout.nbytes // itemsize), 1) * itemsize,), fill, dtype=torch.uint8)
        if tensor.role == "output":
            outputs[tensor.name] = (given, layout)
        pointers.append((given if tensor.by_value else at_device(given)).data_ptr())
        operands.append(
            Operand(tensor.uid, tensor.name, tensor.dtype, tensor.dim, tensor.stride, tensor.role, tensor.by_value)
        )
    if through == "execute":
        plan.execute(VariantPack(tuple(operands), tuple(pointers)), ctx)
    else:
        plan.bind(tuple(operands))(tuple(pointers), 0, ctx.stream)
    if DEVICE != "cpu":
        torch.cuda.synchronize()
        with torch.no_grad():
            for host, device in moved.values():
                host.copy_(device)
    return {name: _view(*held) for name, held in outputs.items()}


def _view(storage, layout):
    if layout.packed or not layout.extent:
        return storage if layout.extent else torch.empty(layout.dim)
    flat = storage.reshape(-1).view(torch.uint8).view(NATIVE.get(layout.dtype, torch.uint8))
    return flat.as_strided(layout.dim, layout.stride)


def rand(*dim, seed=0, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(dim, generator=generator, dtype=torch.float64) * scale).to(dtype)

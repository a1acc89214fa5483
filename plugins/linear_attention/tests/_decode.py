"""Decode kernels without a GPU: a case of ``la_cases`` compiled, executed in the emulator and compared with the recurrence."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import ptx_emulator
import torch
from la_cases import running
from linear_attention.decode_compile import compiled
from linear_attention.decode_lowering import lower_gdn_decode, lower_kda_decode
from linear_attention.decode_plan import DecodePlan
from linear_attention.decode_problem import default_config
from linear_attention.graphs import build

from cudnn_core import CompileCache

LOWER = {"gdn_decode": lower_gdn_decode, "kda_decode": lower_kda_decode}
SMS = 8


@functools.cache
def cache():
    return CompileCache("linear_attention", root=Path(tempfile.mkdtemp(prefix="decode-tests-")))


@functools.cache
def kernel(problem, config, target):
    return compiled(problem, config, target, "linear_attention:decode@1", cache())


def lowered(case, tensors=None):
    """What the case's graph is to the engine; ``tensors`` are its inputs by port."""
    graph, _ = build(running.call(case, tensors=tensors)[0].configuration)
    return graph.freeze().facts(LOWER[case.op])


def plan_of(case, target="sm_90a", config=None, tensors=None):
    """The case's plan, for a GPU of ``SMS`` SMs."""
    found = lowered(case, tensors)
    assert found.problem is not None, found.declines
    chosen = config or default_config(found.problem, len(case.lengths), SMS)
    return DecodePlan(found.problem, found.binding, chosen, kernel(found.problem, chosen, target))


def run(case, target="sm_90a", config=None, seed=0, schedule="late", tensors=None):
    """Outputs of the case by port, after a run without findings."""
    plan = plan_of(case, target, config, tensors)
    _, made = running.call(case, tensors=tensors)
    held = {**made.inputs, **made.outputs}
    launch(plan, held, set(made.outputs), seed=seed, schedule=schedule)
    return made.outputs


def launch(plan, held, outputs, **options):
    """Run a plan on tensors by port; the emulator's report."""
    places = plan.binding.places
    operands = [None] * (1 + max(place.operand for place in places.values()))
    pointers = [0] * len(operands)
    for port, place in places.items():
        tensor = held[port]
        dim, stride = tuple(tensor.shape), tuple(tensor.stride())
        operands[place.operand] = SimpleNamespace(dim=dim, stride=stride, name=port, uid=place.operand)
        pointers[place.operand] = tensor.data_ptr()
    block, stream = plan.host_arguments(plan.artifacts[0], SimpleNamespace(operands=operands, pointers=pointers), 0)
    storages = {port: _storage(held[port]) for port in places}
    buffers = list({storage.data_ptr(): storage for storage in storages.values()}.values())
    read = {storages[port].data_ptr() for port in places if port not in outputs}
    written = [storage for storage in buffers if storage.data_ptr() not in read]
    return ptx_emulator.launch(
        plan.artifacts[0], block, stream, buffers=buffers, outputs=written, **{"check": "raise", **options}
    )


def _storage(tensor):
    """All of a tensor's memory, gaps included."""
    flat = torch.empty(0, dtype=tensor.dtype)
    return flat.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes() // tensor.element_size(),))


def check(case, tensors=None, **options):
    """Run the case and compare every output with the recurrence."""
    want = running.expected(case, case.tensors() if tensors is None else tensors)
    found = run(case, tensors=tensors, **options)
    running.check(case, found, want)
    return found

"""Decode kernels without a GPU: a case of ``la_cases`` compiled, executed in the emulator and compared with the recurrence."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ptx_emulator
import torch
from la_cases import running
from linear_attention.decode_compile import compiled
from linear_attention.decode_lowering import lower_gdn_decode, lower_kda_decode
from linear_attention.decode_plan import DecodePlan
from linear_attention.decode_problem import default_config

from cudnn_core import CompileCache

LOWER = {"gdn_decode": lower_gdn_decode, "kda_decode": lower_kda_decode}
SMS = 8


@functools.cache
def cache():
    return CompileCache("linear_attention", root=Path(tempfile.mkdtemp(prefix="decode-tests-")))


@functools.cache
def kernel(problem, config, target):
    return compiled(problem, config, target, "linear_attention:decode@1", cache())


def lowered(case):
    """Of a case's graph."""
    graph, uids = running.graph_of(case)
    frozen = graph.freeze()
    return frozen, uids, frozen.facts(LOWER[case.op])


def plan_of(case, target="sm_90a", config=None, **changed):
    """The case's plan, for a GPU of ``SMS`` SMs. ``changed`` fields of its problem."""
    found = lowered(case)[2]
    assert found.problem is not None, found.declines
    problem = replace(found.problem, **changed)
    chosen = config or default_config(problem, len(case.lengths), SMS)
    return DecodePlan(problem, found.binding, chosen, kernel(problem, chosen, target))


def run(case, target="sm_90a", config=None, seed=0, schedule="late", tensors=None, **changed):
    """Outputs of the case by port, after a run without findings; with the emulator's report."""
    plan = plan_of(case, target, config, **changed)
    _, made = running.call(case, tensors=tensors)
    held = {**made.inputs, **made.outputs}
    places = plan.binding.places
    operands = [None] * (1 + max(place.operand for place in places.values()))
    pointers = [0] * len(operands)
    for port, place in places.items():
        tensor = held[port]
        operands[place.operand] = SimpleNamespace(
            dim=tuple(tensor.shape), stride=tuple(tensor.stride()), name=port, uid=place.operand
        )
        pointers[place.operand] = tensor.data_ptr()
    pack = SimpleNamespace(operands=operands, pointers=pointers)
    block, stream = plan.host_arguments(plan.artifacts[0], pack, 0)
    storages = {port: _storage(held[port]) for port in places}
    buffers = list({storage.data_ptr(): storage for storage in storages.values()}.values())
    starts = {storages[port].data_ptr() for port in places if port not in made.outputs}
    written = [storage for storage in buffers if storage.data_ptr() not in starts]
    report = ptx_emulator.launch(
        plan.artifacts[0], block, stream, buffers=buffers, outputs=written, check="raise", seed=seed, schedule=schedule
    )
    return made.outputs, report


def _storage(tensor):
    """All of a tensor's memory, gaps included."""
    flat = torch.empty(0, dtype=tensor.dtype)
    return flat.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes() // tensor.element_size(),))


def check(case, **options):
    found, report = run(case, **options)
    running.check(case, found)
    return report

"""Plans of the front doors: one for a configuration, kept, and run on torch tensors. Imported by the torch ops.

On CUDA a call works on torch's current stream, with a workspace from torch's allocator. A plan belongs to the settings of
cudnn-core that were in force when it was made: another ``configure()`` has plans of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cudnn_core

from .errors import InputError
from .graphs import Configuration, build

__all__ = ["PlanEntry", "plan_count", "plan_for", "run"]

_MOST = 1024

_plans: dict[Any, PlanEntry] = {}  # by configuration, device, plan name and registry
_building = threading.Lock()
_handles = threading.local()


class PlanEntry(NamedTuple):
    """A plan, and the uid of every port's tensor."""

    plan: cudnn_core.Plan
    uids: dict[str, int]


def plan_for(configuration: Configuration, device: torch.device, plan_name: str, hint: Mapping[str, int]) -> PlanEntry:
    """The plan of a configuration on a device, made on first use. ``hint`` gives the sizes that engines are ranked at.

    Raises GraphError where the configuration breaks a rule of its op, and NoEngineError.
    """
    key = (configuration, device, plan_name, cudnn_core.registry())
    entry = _plans.get(key)
    if entry is None:
        with _building:
            entry = _plans.get(key)
            if entry is None:
                made = _built(configuration, device, plan_name, hint)
                if len(_plans) >= _MOST:
                    _plans.clear()
                _plans[key] = entry = made
    return entry


def run(entry: PlanEntry, tensors: Mapping[str, Tensor]) -> None:
    """Run a plan on ``tensors`` by port, all of them on its device. Raises ExecutionError, naming the port."""
    plan, uids = entry
    device = tensors["q"].device
    operands = {uids[port]: tensor for port, tensor in tensors.items()}
    size = plan.workspace_size
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    if device.type == "cuda":
        with torch.cuda.device(device):  # a plan runs where the current device is its own
            plan.execute(operands, workspace, _handle(device))
    else:
        plan.execute(operands, workspace)


def plan_count() -> int:
    """How many plans are kept."""
    return len(_plans)


def _built(configuration: Configuration, device: torch.device, plan_name: str, hint: Mapping[str, int]) -> PlanEntry:
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"is on {device}, engines run on cpu and cuda", argument="q")
    graph, uids = build(configuration)
    if plan_name:
        _pin(graph, plan_name)
    where = "cpu" if device.type == "cpu" else cudnn_core.device_info(device.index or 0)
    sizes = {name: size for name, size in hint.items() if name in graph.freeze().dims}
    return PlanEntry(graph.plan(device=where, hint=sizes), uids)


def _pin(graph: cudnn_core.Graph, plan_name: str) -> None:
    """Leave the engines whose name (``plugin:engine``, or ``engine`` alone) begins with ``plan_name``; InputError if none does."""
    names = [engine.short_id for engine in cudnn_core.registry().engines]
    wanted = [name for name in names if name.startswith(plan_name) or name.partition(":")[2].startswith(plan_name)]
    if not wanted:
        raise InputError(f"no engine has a name that begins with {plan_name!r}", argument="plan_name")
    graph.deselect_engines([name for name in names if name not in wanted])


def _handle(device: torch.device) -> cudnn_core.Handle:
    """This thread's handle for the device, on torch's current stream."""
    handles: dict[Any, cudnn_core.Handle] = _handles.__dict__
    ordinal = device.index or 0
    handle = handles.get(ordinal)
    if handle is None:
        handles[ordinal] = handle = cudnn_core.create_handle(ordinal)
    handle.set_stream(torch.cuda.current_stream(device).cuda_stream)
    return handle

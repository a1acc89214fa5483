"""The engine's plan: binds sizes and layouts, reads operands, evaluates, writes. Imported by ``build_plan``.

Temporaries come from PyTorch's allocator, and sequence lengths and offsets are read on the host, so that the plan may
synchronise: it does not claim ``cuda_graph``. It uses no workspace. All inputs are read before any output is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ._evaluate import Program, at_sizes, ragged_starts
from ._memory import Layout, load, load_ragged, ragged_rows, store, store_ragged

if TYPE_CHECKING:
    from cudnn_core import DeviceInfo, ExecutionContext, FrozenGraph, Operand, VariantPack

__all__ = ["ReferencePlan"]

_HOST = torch.device("cpu")


class ReferencePlan:
    """Immutable; safe to run from many threads and streams."""

    workspace_size = 0
    artifacts = ()

    def __init__(self, graph: FrozenGraph, device: DeviceInfo) -> None:
        self._graph = graph
        self._device = torch.device("cuda", device.ordinal or 0) if device.type == "cuda" else _HOST
        # Without runtime sizes one program serves every run.
        self._program = None if graph.dims else Program(graph)

    def execute(self, pack: VariantPack, ctx: ExecutionContext) -> None:
        self.bind(pack.operands)(pack.pointers, ctx.workspace, ctx.stream)

    def bind(self, layout: tuple[Operand, ...]) -> Callable[[Sequence[int], int, int], None]:
        program = self._program
        if program is None:
            program = Program(at_sizes(self._graph, (operand.dim for operand in layout)))
        slots = [
            _Slot(position, tensor, operand)
            for position, (tensor, operand) in enumerate(zip(program.graph.operand_tensors(), layout, strict=True))
        ]
        # Offsets and lengths precede the ragged tensors that they describe.
        reads = sorted((s for s in slots if s.tensor.role == "input"), key=lambda slot: slot.ragged)
        writes = [slot for slot in slots if slot.tensor.role == "output"]
        device = self._device

        def run(pointers: Sequence[int], workspace: int, stream: int) -> None:
            with torch.no_grad(), _on_stream(device, stream):
                env: dict[int, Any] = {}
                for slot in reads:
                    value = slot.read(pointers[slot.position], env, program, device)
                    # A value may share the operand's memory: copy it if an output lies there.
                    env[slot.tensor.index] = value.clone() if slot.overlaps(pointers, writes) else value
                program.run(env, device)
                for slot in writes:
                    slot.write(pointers[slot.position], env, program, device)

        return run


class _Slot:
    """One operand: where it stands in the pack and how it lies in memory."""

    __slots__ = ("layout", "position", "ragged", "tensor")

    def __init__(self, position: int, tensor: Any, operand: Operand) -> None:
        self.position = position
        self.tensor = tensor
        self.ragged = tensor.ragged_offset is not None
        dim, stride = tuple(map(int, operand.dim)), tuple(map(int, operand.stride))  # type: ignore[arg-type]
        self.layout = Layout(str(tensor.dtype), dim, stride, tensor.reordering)

    def read(self, address: int, env: dict[int, Any], program: Program, device: torch.device) -> Any:
        if self.tensor.by_value:
            return load(address, self.layout, _HOST).clone().to(device)
        if self.ragged:
            starts, rows = self._rows(env, program)
            return load_ragged(address, self.layout, starts, rows, device)
        return load(address, self.layout, device)

    def write(self, address: int, env: dict[int, Any], program: Program, device: torch.device) -> None:
        value = env[self.tensor.index]
        if self.ragged:
            starts, rows = self._rows(env, program)
            store_ragged(address, self.layout, value, starts, rows, device)
        else:
            store(address, self.layout, value, device)

    def overlaps(self, pointers: Sequence[int], writes: list[_Slot]) -> bool:
        mine = pointers[self.position]
        for other in writes:
            start = pointers[other.position]
            if self.ragged or (start < mine + self.layout.nbytes and mine < start + other.layout.nbytes):
                return not self.tensor.by_value
        return False

    def _rows(self, env: dict[int, Any], program: Program) -> tuple[list[int], list[int]]:
        starts = ragged_starts(self.tensor, env)
        return starts, ragged_rows(self.layout, starts, program.ragged_lengths(self.tensor, env))


def _on_stream(device: torch.device, stream: int) -> AbstractContextManager[Any]:
    if device.type == "cpu":
        return nullcontext()
    found = torch.cuda.ExternalStream(stream, device=device) if stream else torch.cuda.default_stream(device)
    scope: AbstractContextManager[Any] = torch.cuda.stream(found)
    return scope

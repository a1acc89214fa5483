"""Memory for one plan: its operands on the plan's device, a workspace, and the runs. Imported by run and bench.

Plans get addresses, as from any caller that holds pointers; torch is imported for a CUDA device only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .._aliasing import plan_aliases, updated_inputs
from ._inputs import blank, restrided, values_of
from ._output import EnvironmentProblem

if TYPE_CHECKING:
    from .._engine import VariantPack
    from .._graph._frozen import FrozenGraph
    from .._plan import Plan

__all__ = ["Arena", "require_device"]

Array = Any  # a numpy array; numpy is imported when a verb needs it

_ALIGN = 256


class Arena:
    """The operands of ``plan`` at fixed sizes.

    ``graph`` is ``plan.graph`` at those sizes; ``inputs`` maps uid to storage. ``on_host`` keeps the operands in host memory
    whatever the plan's device is: for executors. An output that updates an input lies in its memory, or begins with its values.
    """

    def __init__(self, plan: Plan, graph: FrozenGraph, inputs: Mapping[int, Array], *, on_host: bool = False) -> None:
        self.plan = plan
        self._cuda = plan.device.type == "cuda" and not on_host
        self._memory: dict[int, Any] = {}
        values: dict[int, Any] = {}
        shapes: dict[int, Any] = {}
        operands = graph.operand_tensors()
        updated, shared = updated_inputs(graph), _shared(graph)
        for tensor in sorted(operands, key=lambda tensor: tensor.role != "input"):
            source = updated.get(tensor.uid)
            if tensor.role == "input":
                storage = inputs[tensor.uid]
            elif source is None:
                storage = blank(tensor)
            elif (tensor.uid, source.uid) in shared:
                self._memory[tensor.uid], values[tensor.uid] = self._memory[source.uid], values[source.uid]
                shapes[tensor.uid] = tensor.dim
                continue
            else:
                storage = restrided(inputs[source.uid], source, tensor)
            if tensor.by_value:
                number: Any = values_of(storage, str(tensor.dtype))[0].item()
                values[tensor.uid] = number if str(tensor.dtype).startswith(("float", "bfloat")) else int(number)
                continue
            self._memory[tensor.uid], values[tensor.uid] = self._allocate(storage)
            shapes[tensor.uid] = tensor.dim
        self._outputs = [tensor.uid for tensor in operands if tensor.role != "input"]
        self._values, self._shapes = values, shapes if plan.graph.dims else None
        self._workspace_memory, self.workspace = self._allocate(_bytes(plan.workspace_size))

    def pack(self) -> VariantPack:
        """The operands as an executor gets them: host addresses, not bound to a runner."""
        return self.plan._layout.pack(self._values, self._shapes)

    def execute(self) -> None:
        """One run, checked, and waited for."""
        self.plan.execute(self.plan.pack(self._values, self._shapes), self.workspace)
        self.synchronize()

    def runner(self) -> Callable[[], None]:
        """The engine's own bound callable, without arguments; it keeps the operands alive."""
        pack = self.plan.pack(self._values, self._shapes)
        run = self.plan.bind(pack)
        pointers, workspace = pack.pointers, self.workspace

        def once(_keep: Arena = self) -> None:
            run(pointers, workspace, 0)

        return once

    def synchronize(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.synchronize(self.plan.device.ordinal)

    def outputs(self) -> dict[int, Array]:
        """The outputs' storage, on the host."""
        if not self._cuda:
            return {uid: self._memory[uid] for uid in self._outputs}
        return {uid: self._memory[uid].cpu().numpy() for uid in self._outputs}

    def _allocate(self, storage: Array) -> tuple[Any, int]:
        """A copy of ``storage`` on the device, and its address, aligned."""
        if self._cuda:
            import torch

            held = torch.empty(max(len(storage), 1), dtype=torch.uint8, device=f"cuda:{self.plan.device.ordinal}")
            held[: len(storage)].copy_(torch.from_numpy(storage.copy()))
            return held[: len(storage)], held.data_ptr()
        raw = _bytes(len(storage) + _ALIGN)
        start = -raw.ctypes.data % _ALIGN
        held = raw[start : start + len(storage)]
        held[...] = storage
        return held, raw.ctypes.data + start


def _shared(graph: FrozenGraph) -> set[tuple[int, int]]:
    """uids of an output and an input that may have one address."""
    operands = graph.operand_tensors()
    return {(operands[a].uid, operands[b].uid) for (a, b), offset in plan_aliases(graph).items() if offset == 0}


def _bytes(size: int) -> Array:
    import numpy as np

    return np.zeros(size, dtype=np.uint8)


def require_device(device: Any, what: str) -> None:
    """EnvironmentProblem unless operands can be put on ``device``."""
    if device.synthetic:
        raise EnvironmentProblem(
            f"{what} needs the device itself, and {device.device_name or device.type} is only described"
        )
    if device.type == "cuda":
        if find_spec("torch") is None:
            raise EnvironmentProblem(f"{what} on a GPU needs torch: pip install torch")
        import torch

        if not torch.cuda.is_available():
            raise EnvironmentProblem(f"{what} on a GPU needs a CUDA build of torch; this one sees no GPU")

"""A built plan: what runs. Nothing registry-shaped is reachable from here.

``Plan.execute`` checks its operands and runs; ``pack`` checks once for many runs; ``Plan.bind`` hands out the engine's own
callable. Made by the planner and by ``Plan.load``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._buffers import describe
from ._driver import driver
from ._engine import CompiledPlan, ExecutionContext, Operand, Runner, VariantPack
from ._errors import BuildError, ExecutionError, HandleError
from ._pack import Layout
from ._slot import extent_bytes

if TYPE_CHECKING:
    import os

    from ._decision import Decision
    from ._device import DeviceInfo
    from ._engine import Artifact, PlanConfig
    from ._graph._frozen import FrozenGraph
    from ._handle import Handle

__all__ = ["Plan", "pack"]

WORKSPACE_ALIGN = 256


class Plan:
    """An immutable plan that may run from many threads and streams.

    engine          "plugin:engine@revision"; ``knobs`` and ``variant`` complete the choice
    decision        why this engine, and why no other one
    device          the DeviceInfo that it was built for
    operands        what ``execute`` needs, in canonical order
    workspace_size  bytes to pass as workspace; the maximum over all sizes. On a GPU it must be aligned to 256, which every
                    device allocation is; on the CPU, where none is, the size has room for alignment
    artifacts       the compiled kernels of engines that have some
    """

    __slots__ = (
        "_accepted",
        "_bind",
        "_compiled",
        "_guarded",
        "_handle",
        "_layout",
        "_runners",
        "_slack",
        "_token",
        "config",
        "decision",
        "device",
        "graph",
        "workspace_size",
    )

    def __init__(
        self,
        graph: FrozenGraph,
        compiled: CompiledPlan,
        config: PlanConfig,
        decision: Decision,
        device: DeviceInfo,
        handle: Handle | None = None,
        defaults: Mapping[int, object] | None = None,
        aliases: Mapping[tuple[int, int], int] | None = None,
        ignored: Mapping[object, str] | None = None,
    ) -> None:
        self.graph = graph
        self.config = config
        self.decision = decision
        self.device = device
        # An engine gets an aligned workspace on every device; host allocators don't align, so the core does it there.
        self._slack = WORKSPACE_ALIGN - 1 if device.type == "cpu" and compiled.workspace_size else 0
        self.workspace_size = compiled.workspace_size + self._slack
        self._compiled = compiled
        self._handle = handle
        self._layout = Layout(graph, device, defaults or {}, aliases or {}, ignored or {})
        self._bind: Callable[[tuple[Operand, ...]], Runner] | None = getattr(compiled, "bind", None)
        self._runners: dict[Any, Runner] = {}
        self._token = object()
        self._guarded = device.type == "cuda"
        self._accepted: Handle | None = None

    @property
    def engine(self) -> str:
        return self.config.engine

    @property
    def knobs(self) -> Mapping[str, Any]:
        return self.config.knobs

    @property
    def variant(self) -> str:
        return self.config.variant

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.graph.operands

    @property
    def artifacts(self) -> Sequence[Artifact]:
        return tuple(getattr(self._compiled, "artifacts", ()) or ())

    def __repr__(self) -> str:
        return f"<Plan {self.config.engine} for {self.graph.key[:12]} on {self.device.device_name or self.device.type}>"

    # --- running
    def execute(
        self,
        operands: VariantPack | Mapping[Any, Any],
        workspace: Any = None,
        handle: Handle | None = None,
        *,
        override_shapes: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Run on ``operands``: a pack, or ``{tensor | uid | name: buffer}``.

        A buffer is a torch, numpy or DLPack tensor, a Python number (by-value operands) or an address. ``workspace`` is a
        buffer or an address of at least ``workspace_size`` bytes. ``override_shapes`` gives sizes that bare addresses can't
        tell (uid -> shape). Raises ExecutionError, naming the operand, before anything is written; the engine works on the
        handle's stream.
        """
        if type(operands) is VariantPack:
            if operands.signature is not self._token:
                raise ExecutionError("the pack was made for another plan")
            runner: Runner = operands.runner
            pointers: Sequence[int] = operands.pointers
        else:
            try:
                pointers, merged, sizes, _keep = self._layout.read(operands, override_shapes)  # type: ignore[arg-type]
            except (AttributeError, TypeError):
                _require_mapping(operands)
                raise
            # One runner serves all addresses of one alignment class, so that a plan binds once and not per call.
            align = 16 if not merged & 15 else merged & -merged
            key = align if sizes is None else (align, *sizes.items())
            runner = self._runners.get(key) or self._new_runner(key, align, pointers, sizes)
        if handle is None:
            handle = self._handle
        if handle is None:
            stream = 0
        else:
            if handle is not self._accepted:
                self._accept(handle)
            stream = handle.stream  # raises HandleError once the handle is destroyed
        address = self._workspace(workspace) if self.workspace_size else 0
        if self._guarded:
            self._guard()
        runner(pointers, address, stream)

    def bind(self, pack: VariantPack) -> Runner:
        """The engine's own ``run(pointers, workspace, stream)`` for operands laid out like ``pack``'s.

        Unchecked by contract: sizes, strides, types and alignment are those of ``pack``; the pointers follow
        ``plan.operands``, the workspace is aligned to 256; a by-value slot is a host address read before the call returns, so graph capture bakes it.
        """
        if type(pack) is not VariantPack or pack.signature is not self._token:
            raise ExecutionError("bind takes a pack that was made for this plan")
        if self._guarded:
            self._guard()
        return pack.runner

    def pack(
        self, operands: Mapping[Any, Any], override_shapes: Mapping[int, Sequence[int]] | None = None
    ) -> VariantPack:
        """A reusable pack of checked operands; it keeps its buffers alive."""
        _require_mapping(operands)
        made = self._layout.pack(operands, override_shapes)
        made.signature = self._token
        made.runner = self._runner(made.operands)
        return made

    def _new_runner(self, key: Any, align: int, pointers: Sequence[int], sizes: dict[str, int] | None) -> Runner:
        layout = tuple(operand._replace(alignment=align) for operand in self._layout.operands_at(pointers, sizes))
        runner = self._runner(layout)
        if len(self._runners) >= 256:  # runtime sizes: bounded, any entry can be made again
            self._runners.clear()
        self._runners[key] = runner
        return runner

    def _runner(self, layout: tuple[Operand, ...]) -> Runner:
        if self.device.synthetic:
            raise ExecutionError(
                f"the plan was built for a {self.device.device_name or self.device.type} that is not here:"
                " save it and load it on such a device"
            )
        if self._bind is not None:
            runner = self._bind(layout)
            if not callable(runner):
                raise ExecutionError(f"engine {self.engine} bound no callable but {runner!r}")
            return runner
        compiled, device, handle = self._compiled, self.device, self._handle

        def run(pointers: Sequence[int], workspace: int, stream: int) -> None:
            compiled.execute(VariantPack(layout, tuple(pointers)), ExecutionContext(handle, device, stream, workspace))

        return run

    def _accept(self, handle: Handle) -> None:
        """Check a handle that was not seen before; its device never changes."""
        from ._handle import require_handle

        device = require_handle(handle).device
        if device is not self.device and (
            device.type != self.device.type or (device.type == "cuda" and device.ordinal != self.device.ordinal)
        ):
            raise HandleError(f"the handle is for {_place(device)}, the plan for {_place(self.device)}")
        self._accepted = handle

    def _workspace(self, workspace: Any) -> int:
        need = self.workspace_size
        if isinstance(workspace, int):
            address = workspace
        else:
            try:  # a torch tensor; whatever is irregular is described, and refused, in general terms
                address = workspace.data_ptr()
                if (
                    workspace.nbytes < need
                    or not workspace.is_contiguous()
                    or not (workspace.is_cpu if not self._guarded else workspace.get_device() == self.device.ordinal)
                ):
                    address = self._described_workspace(workspace)
            except (AttributeError, TypeError):
                address = self._described_workspace(workspace)
        if self._slack and address > 0:
            return (address + self._slack) & -WORKSPACE_ALIGN
        if address <= 0 or address % WORKSPACE_ALIGN:
            raise ExecutionError(
                f"the workspace at {address:#x} is not aligned to {WORKSPACE_ALIGN}", operand="workspace"
            )
        return address

    def _described_workspace(self, workspace: Any) -> int:
        """The address of any buffer that is large enough and on the plan's device."""
        need = self.workspace_size
        if workspace is None:
            raise ExecutionError(f"the plan needs a workspace of {need} bytes", operand="workspace")
        try:
            view = describe(workspace, "workspace")
        except TypeError as error:
            raise ExecutionError(str(error), operand="workspace") from None
        if view.device_type != self.device.type or (self._guarded and view.device_index != self.device.ordinal):
            where = view.device_type if view.device_type == "cpu" else f"{view.device_type}:{view.device_index}"
            raise ExecutionError(f"the workspace is on {where}, the plan on {_place(self.device)}", operand="workspace")
        size = extent_bytes(view.dtype, view.shape, view.stride)
        if size < need:
            raise ExecutionError(f"the workspace has {size} bytes, the plan needs {need}", operand="workspace")
        return view.address

    def _guard(self) -> None:
        """Refuse to launch while another GPU is current: the plan's kernels and pointers belong to one device."""
        live = driver()
        current = None if live is None else live.current_device()
        if live is not None and current is None:  # a thread without a context gets the device's primary one
            live.make_current(self.device.ordinal or 0)
        elif live is None or current != self.device.ordinal:
            where = "no CUDA driver is available" if live is None else f"cuda:{current} is current"
            raise ExecutionError(f"the plan is for {_place(self.device)}, but {where}")

    # --- files
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path``: a JSON header and hashed payloads (docs/plan-files.md). Atomic."""
        from ._planfile import save

        save(self, path)

    def to_bytes(self) -> bytes:
        from ._planfile import to_bytes

        return to_bytes(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str], handle: Handle | None = None, *, trust: bool = False) -> Plan:
        """The plan saved at ``path``, on the handle's device (default: the current one).

        Native payloads are used only with ``trust=True``; without it the engine rebuilds from the graph and the knobs.
        Raises BuildError for a truncated, tampered or foreign file and for a device that differs.
        """
        from ._planfile import load

        return load(path, handle, trust=trust)


def pack(
    plan: Plan, operands: Mapping[Any, Any], override_shapes: Mapping[int, Sequence[int]] | None = None
) -> VariantPack:
    """Check ``operands`` once for many runs of ``plan``."""
    if not isinstance(plan, Plan):
        raise ExecutionError(f"pack takes a Plan, got {type(plan).__name__}")
    return plan.pack(operands, override_shapes)


def _require_mapping(operands: Any) -> None:
    if not isinstance(operands, Mapping):
        raise ExecutionError(f"operands must be a mapping or a pack, got {type(operands).__name__}")


def check_compiled(compiled: Any, engine: str) -> None:
    """BuildError unless ``compiled`` is a plan as the protocol has it."""
    size = getattr(compiled, "workspace_size", None)
    if not callable(getattr(compiled, "execute", None)):
        raise BuildError(f"engine {engine} returned {compiled!r}, which is no plan: it has no execute")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise BuildError(f"engine {engine} returned a plan with workspace_size {size!r}")


def _place(device: DeviceInfo) -> str:
    return device.type if device.ordinal is None or device.type == "cpu" else f"{device.type}:{device.ordinal}"

"""A built plan: what runs. Nothing registry-shaped is reachable from here.

``Plan.execute`` checks its operands and runs; ``pack`` checks once for many runs; ``Plan.bind`` hands out the engine's own
callable. Made by the planner and by ``Plan.load``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._arguments import as_number
from ._bounds import HIGHEST, Placed, lowest_address
from ._buffers import array_layout, describe, same_array
from ._driver import driver
from ._engine import CompiledPlan, ExecutionContext, Operand, Runner, VariantPack
from ._errors import ExecutionError, GraphError, HandleError
from ._hooks import describe as describe_error
from ._hooks import short_repr
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
    variant         the member of an engine with variants: the config's, else what the compiled plan says the engine chose, else
                    "". ``config`` is what was chosen from, and what a replay asks for
    decision        why this engine, and why no other one
    device          the DeviceInfo that it was built for
    operands        what ``execute`` needs, in canonical order
    workspace_size  bytes that are enough as workspace; the maximum over all sizes. On a GPU it must be aligned to 256, which
                    every device allocation is; on the CPU, where none is, the size has room for alignment
    engine_workspace_size  the bytes of it that the engine uses: what every workspace limit is compared with, and enough on
                    the CPU too where the buffer is aligned
    artifacts       the compiled kernels of engines that have some
    """

    __slots__ = (
        "_accepted",
        "_bind",
        "_compiled",
        "_guarded",
        "_handle",
        "_layout",
        "_lowest",
        "_runners",
        "_scratch",
        "_seen_workspace",
        "_slack",
        "_token",
        "config",
        "decision",
        "device",
        "engine_workspace_size",
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
        self.engine_workspace_size = compiled.workspace_size
        self.workspace_size = compiled.workspace_size + self._slack
        self._compiled = compiled
        self._handle = handle
        self._layout = Layout(graph, device, defaults or {}, aliases or {}, ignored or {})
        self._bind: Callable[[tuple[Operand, ...]], Runner] | None = getattr(compiled, "bind", None)
        self._runners: dict[Any, Runner] = {}
        self._lowest = lowest_address(device.type)
        self._token = object()
        self._guarded = device.type == "cuda"
        self._accepted: Handle | None = None
        self._seen_workspace: tuple[Callable[[], Any], int, int] = (_nothing, 0, 0)
        self._scratch: tuple[tuple[Any, ...], int] | None = (
            None  # layout and bytes of the last array that was a workspace
        )

    @property
    def engine(self) -> str:
        return self.config.engine

    @property
    def knobs(self) -> Mapping[str, Any]:
        return self.config.knobs

    @property
    def variant(self) -> str:
        return self.config.variant or getattr(self._compiled, "variant", "")

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.graph.operands

    @property
    def artifacts(self) -> Sequence[Artifact]:
        return tuple(getattr(self._compiled, "artifacts", ()) or ())

    def __repr__(self) -> str:
        member = f"{self.engine}/{self.variant}" if self.variant else self.engine
        return f"<Plan {member} for {self.graph.key[:12]} on {self.device.device_name or self.device.type}>"

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
        buffer or an address of ``workspace_size`` bytes. ``override_shapes`` gives sizes that bare addresses can't
        tell (uid -> shape). Raises ExecutionError, naming the operand, before anything is written; the engine works on the
        handle's stream.
        """
        if type(operands) is VariantPack:
            if operands.signature is not self._token:
                raise ExecutionError("the pack was made for another plan")
            runner: Runner | None = operands.runner
            pointers: Sequence[int] = operands.pointers
            placed: Placed | None = None
        else:
            values = operands if type(operands) is dict else _as_dict(operands)
            pointers, placed, _keep = self._layout.read(values, override_shapes)
            runner = placed.runner
        if runner is None:
            runner = self._bound(placed, pointers)  # type: ignore[arg-type]  # a pack has its runner
        if handle is None:
            handle = self._handle
        if handle is None:
            stream = 0
        else:
            if handle is not self._accepted:
                self._accept(handle)
            stream = handle.stream  # raises HandleError once the handle is destroyed
        address = 0
        if self.workspace_size:
            address = self._workspace(workspace)
            if placed is None:
                placed = operands.placed  # type: ignore[union-attr]
            if address != placed.workspace:
                placed.bounds.check_workspace(pointers, address, self.engine_workspace_size)
                placed.workspace = address
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
        made = self._layout.pack(_as_dict(operands), override_shapes)
        made.signature = self._token
        made.runner = self._runner(made.operands)
        return made

    def host_arguments(self, artifact: Artifact, pack: VariantPack, workspace: int) -> tuple[Any, ...]:
        """What an executor passes to the host function in ``artifact.object``, in the function's order.

        ``pack`` and ``workspace`` have host addresses; those in the result are for the executor to translate: bytes and ctypes
        pointers that are one or begin with one, and the words of a HostBlock. None is a null stream. Raises ExecutionError.
        """
        from ._host_arguments import host_arguments

        return host_arguments(self.engine, self._compiled, artifact, pack, workspace)

    def _bound(self, placed: Placed, pointers: Sequence[int]) -> Runner:
        """One runner serves all addresses of one alignment class, so that a plan binds once and not per call."""
        sizes = placed.bounds.sizes
        key = placed.align if sizes is None else (placed.align, *sizes.items())
        runner = self._runners.get(key)
        if runner is None:
            layout = self._layout.operands_at(pointers, placed)
            runner = self._runner(tuple(operand._replace(alignment=placed.align) for operand in layout))
            if len(self._runners) >= 256:  # runtime sizes: bounded, any entry can be made again
                self._runners.clear()
            self._runners[key] = runner
        placed.runner = runner
        return runner

    def _runner(self, layout: tuple[Operand, ...]) -> Runner:
        if self.device.synthetic:
            raise ExecutionError(
                f"the plan was built for a {self.device.device_name or self.device.type} that is not here:"
                " save it and load it on such a device"
            )
        if self._bind is not None:
            try:
                runner = self._bind(layout)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit and the like are a plugin's failure too
                raise ExecutionError(
                    f"engine {self.engine} could not bind its plan: {describe_error(error)}",
                    operand=error.operand if isinstance(error, ExecutionError) else "",
                ) from error
            if not callable(runner):
                raise ExecutionError(f"engine {self.engine} bound no callable but {short_repr(runner)}")
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
        """The aligned address of a workspace, after every check but that it overlaps no operand."""
        if type(workspace) is int:
            address = workspace
        else:
            # The tensor of the last call, where it was: its storage only grows, so that it is still large enough.
            last, at, aligned = self._seen_workspace
            try:
                if last() is workspace and workspace.data_ptr() == at:
                    return aligned
            except Exception:  # noqa: S110  no tensor: described below
                pass
            try:  # a torch tensor; whatever is irregular is described, and refused, in general terms
                address = workspace.data_ptr()
                plain = (
                    workspace.nbytes >= self.engine_workspace_size + (-address % WORKSPACE_ALIGN if self._slack else 0)
                    and workspace.is_contiguous()
                    and (workspace.get_device() == self.device.ordinal if self._guarded else workspace.is_cpu)
                )
            except Exception:
                plain = False
            if not plain:
                address = self._described_workspace(workspace)
            elif self._lowest <= address < HIGHEST and (self._slack or not address % WORKSPACE_ALIGN):
                aligned = (address + self._slack) & -WORKSPACE_ALIGN
                self._seen_workspace = (weakref.ref(workspace), address, aligned)
                return aligned
        if not self._lowest <= address < HIGHEST:
            raise ExecutionError(f"the workspace can't lie at {address:#x}", operand="workspace")
        if self._slack:
            return (address + self._slack) & -WORKSPACE_ALIGN
        if address % WORKSPACE_ALIGN:
            raise ExecutionError(
                f"the workspace at {address:#x} is not aligned to {WORKSPACE_ALIGN}", operand="workspace"
            )
        return address

    def _described_workspace(self, workspace: Any) -> int:
        """The address of any buffer that is large enough, in one piece, writable and on the plan's device."""
        if workspace is None:
            raise ExecutionError(f"the plan needs a workspace of {self.workspace_size} bytes", operand="workspace")
        if self._scratch is not None:
            layout, size = self._scratch
            found = same_array(workspace, layout)
            if found is not None and size >= self.engine_workspace_size + (-found[0] % WORKSPACE_ALIGN):
                return found[0]
        number = as_number(workspace)
        if type(number) is int:
            return number
        try:
            view = describe(workspace, "workspace")
        except GraphError as error:
            raise ExecutionError(str(error), operand="workspace") from error.__cause__
        if view.device_type != self.device.type or (self._guarded and view.device_index != self.device.ordinal):
            where = view.device_type if view.device_type == "cpu" else f"{view.device_type}:{view.device_index}"
            raise ExecutionError(f"the workspace is on {where}, the plan on {_place(self.device)}", operand="workspace")
        if view.readonly or not view.is_contiguous:
            what = "read-only" if view.readonly else "not contiguous"
            raise ExecutionError(f"the workspace is {what}", operand="workspace")
        size = extent_bytes(view.dtype, view.shape, view.stride)
        need = self.engine_workspace_size
        lost = -view.address % WORKSPACE_ALIGN if self._slack else 0
        if size < need + lost:
            where = f" at an address aligned to {WORKSPACE_ALIGN}, {need + lost} at {view.address:#x}" if lost else ""
            raise ExecutionError(f"the workspace has {size} bytes, the plan needs {need}{where}", operand="workspace")
        known = None if self._guarded else array_layout(workspace, writable=True)
        self._scratch = None if known is None else (known, size)
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


def _nothing() -> object:
    """A dead reference that no workspace, None included, is."""
    return _nothing


def pack(
    plan: Plan, operands: Mapping[Any, Any], override_shapes: Mapping[int, Sequence[int]] | None = None
) -> VariantPack:
    """Check ``operands`` once for many runs of ``plan``."""
    if not isinstance(plan, Plan):
        raise ExecutionError(f"pack takes a Plan, got {type(plan).__name__}")
    return plan.pack(operands, override_shapes)


def _as_dict(operands: Any) -> dict[Any, Any]:
    """The items of any mapping; what it makes on the way stays alive with the result."""
    if not isinstance(operands, Mapping):
        raise ExecutionError(f"operands must be a mapping or a pack, got {type(operands).__name__}")
    return dict(operands)


def _place(device: DeviceInfo) -> str:
    return device.type if device.ordinal is None or device.type == "cpu" else f"{device.type}:{device.ordinal}"

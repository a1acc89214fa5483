"""The plans that the engine builds: an execution plan of the binding, and how it is run. Imported by ``engines``.

A compiled plan holds one ``backend_graph`` with one built plan. Operand i has uid i + 1 in it, so that the slots that the binding
fills, which go by uid, are the operands in their order. It is immutable from then on and runs from many threads: the binding
copies what a call needs to its stack, and each call has a block of pointers of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cudnn_core import BuildError, Decline, ExecutionError, Handle, HandleError, PlanConfig

from . import errors, handles, library, lower
from .device_json import device_properties
from .filling import filler
from .select import Choice, built

if TYPE_CHECKING:
    from cudnn_core import (
        Buffers,
        DeviceInfo,
        ExecutionContext,
        FrozenGraph,
        Operand,
        Runner,
        VariantPack,
    )

    from .library import Library

__all__ = ["BackendPlan", "build", "operation_graph", "restored"]

SCHEMA = 1
NATIVE = "SUPPORTS_CUDA_GRAPH_NATIVE_API"
_FAILURES = 256
_SIZES = 64

# What cuDNN said no to, by (graph, device, config): it is asked once.
_failures: OrderedDict[tuple[Any, ...], Decline] = OrderedDict()
_lock = threading.Lock()


def build(graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> BackendPlan | DynamicPlan:
    """Plan and compile for ``ctx.device``, present or not. Raises BuildError with cuDNN's reason."""
    loaded, device = library.load(), ctx.device
    key = (graph.key, device, loaded.version, config.variant, *sorted(config.knobs.items()))
    known = _failures.get(key)
    if known is not None:
        raise BuildError(str(known.actual or known), decline=known)
    try:
        if graph.dims:
            return DynamicPlan(loaded, graph, config, device)
        return _fixed(loaded, graph, config, device)
    except BuildError as error:
        if isinstance(error.decline, Decline):
            with _lock:
                _failures[key] = error.decline
                if len(_failures) > _FAILURES:
                    _failures.popitem(last=False)
        raise


def operation_graph(loaded: Library, graph: FrozenGraph, device: DeviceInfo, cache: Any = None) -> Any:
    """``graph``, of fixed sizes, as the binding's graph, up to the heuristics. ``cache`` makes it one of runtime sizes."""
    # Again, with the sizes and the version that check_support may not have known: the planner dies of some graphs.
    refused = lower.unsupported(graph, device, loaded.version)
    if refused:
        raise BuildError(str(refused[0]), decline=refused[0])
    with errors.translated():
        target = _empty(loaded, device, cache)
        try:
            lower.lower(graph, loaded.module, target)
        except lower.LoweringError as error:
            raise BuildError(str(error.decline), decline=error.decline) from error
        target.validate()
        target.build_operation_graph()
    return target


def restored(
    header: Mapping[str, Any], payloads: Mapping[str, bytes], graph: FrozenGraph, ctx: ExecutionContext
) -> BackendPlan | DynamicPlan:
    """The plan of ``serialize``. Raises BuildError for another format or another cuDNN."""
    loaded = library.load()
    try:
        if header["schema"] != SCHEMA:
            raise BuildError(f"a plan of schema {header['schema']!r}, and this version reads {SCHEMA}")
        version, choice = int(header["cudnn"]), Choice(header["variant"], header["settings"])
        knobs = header["knobs"]
        dynamic = knobs is not None
        config = (
            PlanConfig(
                "",
                {"heuristics": str(knobs["heuristics"]), "engine_knobs": str(knobs["engine_knobs"])},
                str(header.get("member", "")),
            )
            if dynamic
            else None
        )
        data = payloads["kernels" if dynamic else "plan"]
        if dynamic:
            data.decode()
    except (KeyError, TypeError, ValueError) as error:  # of decode, too
        raise BuildError(f"not a plan of this plugin: {type(error).__name__}: {error}") from error
    if version != loaded.version:
        wanted, here = library.version_text(version), library.version_text(loaded.version)
        raise BuildError(f"the plan was built by cuDNN {wanted}, this is {here}")
    if config is not None:
        return DynamicPlan(loaded, graph, config, ctx.device, data)
    with errors.translated():
        target = _empty(loaded, ctx.device)
        target.deserialize(None, list(data))  # 1.31 takes no bytes
    return BackendPlan(loaded, target, graph, ctx.device, choice)


class BackendPlan:
    """A plan of fixed sizes. ``choice`` is the backend's engine, ``variant`` its name."""

    artifacts = ()

    def __init__(self, loaded: Library, target: Any, graph: FrozenGraph, device: DeviceInfo, choice: Choice) -> None:
        self.choice, self.variant = choice, choice.variant
        self._loaded, self._target = loaded, target
        self._ordinal = device.ordinal or 0
        self._mine = handles.per_thread(loaded, self._ordinal)
        count = len(graph.operands)
        with errors.translated():
            target._prepare_variant_pack_template()
            uids = list(target._get_variant_pack_uids_sorted())
            self.workspace_size = int(target.get_workspace_size())
            self.notes = frozenset(note.name for note in target.get_behavior_notes())
        if uids != list(range(1, count + 1)):  # a slot that is not an operand, or one that cuDNN dropped
            raise BuildError(f"cuDNN's plan has the slots {uids} for {count} operands")
        with errors.translated():
            self._needs = tuple(
                0 if operand.by_value else int(target.query_tensor_attributes_of_uid(uid).get_alignment())
                for uid, operand in zip(uids, graph.operands, strict=True)
            )
        self._run = self._runner(count)
        self._fill: Callable[[Buffers, int], None] | None = None
        fills = graph.facts(lower.analyse).fills
        if fills:
            self.notes -= {NATIVE}  # cuDNN would add its own work alone
            self._fill = filler(fills, [_label(operand) for operand in graph.operands], self._ordinal)
            self._run = _after(self._fill, self._run)

    def __repr__(self) -> str:
        return f"<BackendPlan {self.choice.variant}[{self.choice.settings or ''}] workspace={self.workspace_size}>"

    # --- running
    def bind(self, layout: tuple[Operand, ...]) -> Runner:
        """``run(pointers, workspace, stream)``. Where the layout does not vouch for what the plan needs, each call is checked.

        Not refused here: the core binds for the least alignment among all operands, and one that is not aligned so far may be one
        that needs nothing. What a call refuses has not been written to.
        """
        self._mine.ready()
        if all(
            not need or (op.alignment and op.alignment % need == 0)
            for op, need in zip(layout, self._needs, strict=True)
        ):
            return self._run
        return self._checked(layout)

    def execute(self, pack: VariantPack, ctx: ExecutionContext) -> None:
        """On the handle's raw handle if there is one, and on the thread's own otherwise."""
        if ctx.handle is None or ctx.handle.stream != ctx.stream:
            self.bind(pack.operands)(pack.pointers, ctx.workspace, ctx.stream)
            return
        self._check(pack.operands, pack.pointers)
        raw = handles.of_handle(self._loaded, ctx.handle)
        block, address = _block(len(pack.pointers))
        block[:] = pack.pointers
        if self._fill is not None:
            self._fill(pack.pointers, ctx.stream)
        try:
            self._target._execute_with_raw_ptrs(address, len(block), ctx.workspace, raw, -1)
        except Exception as error:
            raise _not_run(error) from error

    def _runner(self, count: int) -> Runner:
        execute = self._target._execute_with_raw_ptrs
        mine = self._mine
        pool: list[_Block] = []  # of pointers: 200 ns cheaper than a new array for each call

        def run(pointers: Buffers, workspace: int, stream: int) -> None:
            try:
                held = mine.held
            except AttributeError:
                held = mine.open()
            if held.stream != stream:
                held.move(stream)
            try:
                array, address = block = pool.pop()
            except IndexError:
                array, address = block = _block(count)
            array[:] = pointers
            try:
                execute(address, count, workspace, held.raw, -1)
            except Exception as error:
                raise _not_run(error) from error
            pool.append(block)

        return run

    def _checked(self, layout: tuple[Operand, ...]) -> Runner:
        run, check = self._run, self._check

        def checked(pointers: Buffers, workspace: int, stream: int) -> None:
            check(layout, pointers)
            run(pointers, workspace, stream)

        return checked

    def _check(self, layout: tuple[Operand, ...], pointers: Buffers) -> None:
        """cuDNN does not look at addresses: it would read or write beside them."""
        for operand, pointer, need in zip(layout, pointers, self._needs, strict=True):
            if need and pointer % need:
                label = _label(operand)
                raise ExecutionError(
                    f"operand {label}: the address is {pointer:#x}, and cuDNN's plan needs a multiple of {need}",
                    operand=label,
                )

    # --- native CUDA graphs
    def populate_cuda_graph(self, handle: Handle, pack: VariantPack, workspace: Any, cuda_graph: Any) -> None:
        """Add the plan's work to an empty cudaGraph_t."""
        self._native("populate_cuda_graph", handle, pack, workspace, cuda_graph)

    def update_cuda_graph(self, handle: Handle, pack: VariantPack, workspace: Any, cuda_graph: Any) -> None:
        """Put the pack's addresses into a cudaGraph_t that ``populate_cuda_graph`` of this plan has filled."""
        self._native("update_cuda_graph", handle, pack, workspace, cuda_graph)

    def _native(self, method: str, handle: Handle, pack: VariantPack, workspace: Any, cuda_graph: Any) -> None:
        if self._fill is not None:
            raise ExecutionError(
                f"{method}: the plan fills what lies past the sequences' lengths, and cuDNN adds its own work alone: "
                "capture execute instead"
            )
        if NATIVE not in self.notes:
            raise ExecutionError(
                f"{method}: cuDNN's {self.choice.variant} has no native CUDA graph: capture execute instead"
            )
        if not isinstance(handle, Handle) or (handle.device.type, handle.device.ordinal or 0) != (
            "cuda",
            self._ordinal,
        ):
            raise HandleError(f"{method} needs a handle of cuda:{self._ordinal}, got {handle!r}")
        space = _address(workspace, "workspace") if workspace is not None else 0
        if self.workspace_size and not space:
            raise ExecutionError(f"the plan needs a workspace of {self.workspace_size} bytes", operand="workspace")
        graph = _address(cuda_graph, "cuda_graph")
        self._check(pack.operands, pack.pointers)
        pointers = dict(enumerate(pack.pointers, 1))
        raw = handles.of_handle(self._loaded, handle)
        try:
            getattr(self._target, method)(raw, pointers, space, graph)
        except Exception as error:
            raise _not_run(error) from error

    # --- files
    def serialize(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        with errors.translated():
            data = bytes(self._target.serialize())  # a list; 1.31 makes no bytes
        return _header(self._loaded, self.choice, None), {"plan": data}


class DynamicPlan:
    """A plan of runtime sizes: for each size that is bound a plan of its own, compiled through one kernel cache.

    The largest sizes are planned first: they say how large the workspace is, and compile what the others share. A size is
    planned when it is first bound, by milliseconds where the cache has its kernels, with the best engine that has room. ``choice`` is
    the engine of the largest; ``variant`` the one that was asked for, "" if each size may have another.
    """

    artifacts = ()

    def __init__(
        self, loaded: Library, graph: FrozenGraph, config: PlanConfig, device: DeviceInfo, kernels: bytes = b""
    ) -> None:
        self._loaded, self._graph, self._config, self._device = loaded, graph, config, device
        with errors.translated():
            self._cache = loaded.module.create_kernel_cache()
            if kernels:
                self._cache.deserialize(kernels.decode())
        self._lock = threading.Lock()
        self._plans: OrderedDict[tuple[int, ...], BackendPlan] = OrderedDict()
        self._room: int | None = None
        largest = self.at(graph.largest_sizes())
        self.choice, self.variant = largest.choice, config.variant
        self.workspace_size = self._room = largest.workspace_size

    def __repr__(self) -> str:
        return f"<DynamicPlan {self.choice.variant} {', '.join(self._graph.dims)} workspace={self.workspace_size}>"

    def at(self, sizes: Mapping[str, int]) -> BackendPlan:
        """The plan of these sizes, of no more workspace than the largest. Raises BuildError."""
        key = tuple(sizes[name] for name in self._graph.dims)
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                try:
                    plan = _fixed(
                        self._loaded, self._graph.at(sizes), self._config, self._device, self._cache, self._room
                    )
                except BuildError as error:
                    at = ", ".join(f"{name}={size}" for name, size in sizes.items())
                    raise BuildError(f"{error} (at {at})", decline=error.decline) from error
                self._plans[key] = plan
                if len(self._plans) > _SIZES:
                    self._plans.popitem(last=False)
            else:
                self._plans.move_to_end(key)
            return plan

    def bind(self, layout: tuple[Operand, ...]) -> Runner:
        return self._of(layout).bind(layout)

    def execute(self, pack: VariantPack, ctx: ExecutionContext) -> None:
        self._of(pack.operands).execute(pack, ctx)

    def populate_cuda_graph(self, handle: Handle, pack: VariantPack, workspace: Any, cuda_graph: Any) -> None:
        self._of(pack.operands).populate_cuda_graph(handle, pack, workspace, cuda_graph)

    def update_cuda_graph(self, handle: Handle, pack: VariantPack, workspace: Any, cuda_graph: Any) -> None:
        self._of(pack.operands).update_cuda_graph(handle, pack, workspace, cuda_graph)

    def serialize(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        with errors.translated():
            kernels = str(self._cache.serialize()).encode()
        return _header(self._loaded, self.choice, self._config), {"kernels": kernels}

    def _of(self, layout: tuple[Operand, ...]) -> BackendPlan:
        sizes = self._graph.sizes_from([operand.dim for operand in layout])
        try:
            return self.at(sizes)
        except BuildError as error:
            raise ExecutionError(f"cuDNN has no plan for these sizes: {error}") from error


# --- pieces


def _empty(loaded: Library, device: DeviceInfo, cache: Any = None) -> Any:
    """A graph of the binding for ``device``, without a handle."""
    module = loaded.module
    types = {kind: getattr(module.data_type, name) for kind, name in lower.GRAPH_TYPES.items()}
    dynamic = {} if cache is None else {"kernel_cache": cache, "is_dynamic_shape_enabled": True}
    return module.backend_graph(
        device_property=device_properties(loaded, device), sm_version=device.sm_version, **types, **dynamic
    )


def _fixed(
    loaded: Library,
    graph: FrozenGraph,
    config: PlanConfig,
    device: DeviceInfo,
    cache: Any = None,
    room: int | None = None,
) -> BackendPlan:
    target = operation_graph(loaded, graph, device, cache)
    choice = built(loaded.module, target, config, room)
    return BackendPlan(loaded, target, graph, device, choice)


def _header(loaded: Library, choice: Choice, config: PlanConfig | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "cudnn": loaded.version,
        "variant": choice.variant,
        "settings": choice.settings,
        "knobs": None if config is None else dict(config.knobs),
        "member": "" if config is None else config.variant,
    }


def _label(operand: Operand) -> str:
    return operand.name or f"uid {operand.uid}"


def _after(fill: Callable[[Buffers, int], None], run: Runner) -> Runner:
    def filled(pointers: Buffers, workspace: int, stream: int) -> None:
        fill(pointers, stream)
        run(pointers, workspace, stream)

    return filled


_Block = tuple[Any, int]


def _block(count: int) -> _Block:
    """Room for the pointers of a call, with its address."""
    array = (ctypes.c_uint64 * count)()
    return array, ctypes.addressof(array)


def _not_run(error: Exception) -> Exception:
    """What a failed call of the binding becomes."""
    if not errors.of_binding(error) and not isinstance(error, (TypeError, OverflowError)):
        return error
    errors.remember(str(error))
    return ExecutionError(f"cuDNN did not run the plan: {errors.reason(error)}")


def _address(value: Any, what: str) -> int:
    """An address: an int, a tensor's, a CUDA object's."""
    for read in ("data_ptr", "getPtr"):
        method = getattr(value, read, None)
        if callable(method):
            # cuda-bindings' getPtr is the address of the handle's own storage; its int is the handle
            return int(method()) if read == "data_ptr" else int(value)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ExecutionError(f"{what}: {value!r} is no address", operand=what) from None

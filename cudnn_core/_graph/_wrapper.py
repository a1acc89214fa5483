"""The frontend's wrapper form: ``with Graph(inputs=..., outputs=...) as g: ...`` and then ``g(...)``.

Leaving the block builds the graph. Framework tensors that were passed to builders are known as ``node::argument``; a call
allocates the outputs that it is not given. Mixed into Graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .._dims import dims_of, evaluate
from .._errors import ExecutionError, GraphError, GraphTypeError, HandleError
from ._tensor import Tensor

if TYPE_CHECKING:
    from .._handle import Handle
    from .._plan import Plan

__all__ = ["WrapperForm"]

_TORCH_NAMES = {
    "boolean": "bool",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_e8m0": "float8_e8m0fnu",
    "fp8_e5m3": "uint8",
    "fp4_e2m1": "uint8",
    "int4": "uint8",
}


class WrapperForm:
    """The ``with`` block and the call."""

    handle: Handle | None

    if TYPE_CHECKING:

        def build(self, heuristics: Any = None) -> None: ...
        @property
        def selected_plan(self) -> Plan: ...
        @property
        def tensors(self) -> tuple[Tensor, ...]: ...
        def get_inputs(self) -> list[Tensor]: ...
        def get_outputs(self) -> list[Tensor]: ...
        def find_tensor(self, key: str | int) -> Tensor | None: ...

    def _init_wrapper(
        self,
        inputs: Iterable[object] | None,
        outputs: Iterable[object] | None,
        heuristics: object,
        workspace_alloc: bool,
    ) -> None:
        for name, value in (("inputs", inputs), ("outputs", outputs), ("heuristics", heuristics)):
            if value is not None and not isinstance(value, (list, tuple)):
                raise GraphTypeError(f"{name} takes a list or a tuple, got {type(value).__name__}")
        self._io_spec = (inputs, outputs)
        self._heuristics = heuristics
        self._workspace_alloc = workspace_alloc
        self._io_names: dict[str, Tensor] = {}
        self._io_objects: dict[int, Tensor] = {}
        self._io: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
        self._entered = False
        self._left = False

    def __enter__(self) -> Any:
        if self._entered:
            raise GraphError("the graph's with block was entered before")
        self._entered = True
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc_type is not None:
            return
        self.build(self._heuristics)
        self._left = True
        inputs, outputs = self._io_spec
        if inputs is not None or outputs is not None:
            self.set_io_tuples(inputs or (), outputs or ())

    def set_io_tuples(self, inputs: Iterable[object], outputs: Iterable[object]) -> None:
        """Fix the order of positional calls. Entries are ``node::argument`` names, tensor names, uids, graph tensors or the
        framework tensors that the graph was built with. Every operand must be listed once."""
        if not self._left:
            self._io_spec = (list(inputs), list(outputs))
            return
        found = tuple(tuple(self._resolve(entry) for entry in entries) for entries in (inputs, outputs))
        for kind, listed, needed in zip(
            ("inputs", "outputs"), found, (self.get_inputs(), self.get_outputs()), strict=True
        ):
            if len({tensor.uid for tensor in listed}) != len(listed):
                raise GraphError(f"{kind} lists a tensor twice")
            for tensor in listed:
                if tensor not in needed:
                    raise GraphError(f"{kind} lists {tensor.label}, which is none of the graph's {kind}")
            for tensor in needed:
                if tensor not in listed:
                    raise GraphError(f"{kind} leaves out {tensor.label}")
        self._io = (found[0], found[1])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``g({key: buffer})`` returns the mapping, completed with allocated outputs; ``g(*inputs)`` (after ``inputs`` and
        ``outputs`` were listed) returns the outputs. Keywords: ``handle``, ``workspace`` and those of ``execute``."""
        if not self._left:
            raise GraphError("call the graph after its with block")
        handle = kwargs.pop("handle", None) or self.handle
        workspace = kwargs.pop("workspace", None)
        plan = self.selected_plan
        if handle is None and plan.device.type == "cuda":
            raise HandleError("need a cudnn handle: pass handle= here or to the constructor")
        if len(args) == 1 and isinstance(args[0], dict):
            buffers, by_tensor = args[0], {}
            for key, value in args[0].items():
                by_tensor[self._resolve(key)] = value
        else:
            if self._io is None:
                raise GraphError("a positional call needs inputs= and outputs=, or set_io_tuples")
            if len(args) != len(self._io[0]):
                raise ExecutionError(f"the graph takes {len(self._io[0])} inputs, got {len(args)}")
            buffers = None
            by_tensor = dict(zip(self._io[0], args, strict=True))
        made: dict[Tensor, Any] = {}
        for tensor in self.get_outputs():
            if tensor not in by_tensor:
                made[tensor] = by_tensor[tensor] = self._allocate(tensor, by_tensor)
        if workspace is None and plan.workspace_size:
            if not self._workspace_alloc:
                raise ExecutionError("workspace_alloc=False: pass workspace=", operand="workspace")
            workspace = _workspace(plan)
        overrides = {name: kwargs.pop(name) for name in ("override_shapes",) if name in kwargs}
        if kwargs:
            raise GraphTypeError(f"the graph takes no keyword {next(iter(kwargs))!r}")
        plan.execute(by_tensor, workspace, handle, **overrides)
        if buffers is not None:
            for tensor, value in made.items():
                buffers[tensor.name or tensor.uid] = value
            return buffers
        assert self._io is not None
        results = tuple(by_tensor[tensor] for tensor in self._io[1])
        return results[0] if len(results) == 1 else results

    def _record_io(self, label: str, argument: str, tensor: Tensor, value: object) -> None:
        self._io_names[f"{label}::{argument}"] = tensor
        self._io_objects[id(value)] = tensor

    def _resolve(self, entry: object) -> Tensor:
        found: Tensor | None = None
        if isinstance(entry, Tensor):
            found = entry if entry in self.tensors else None
        elif isinstance(entry, str):
            found = self._io_names.get(entry) or self.find_tensor(entry)
        elif isinstance(entry, int):
            found = self.find_tensor(entry)
        else:
            found = self._io_objects.get(id(entry))
        if found is None:
            from .._errors import nearest

            hint = nearest(entry, [*self._io_names, *(t.name for t in self.tensors)]) if isinstance(entry, str) else ""
            raise GraphError(
                f"the graph has no tensor {entry if isinstance(entry, (str, int)) else type(entry).__name__!r}{hint}"
            )
        return found

    def _allocate(self, tensor: Tensor, given: Mapping[Tensor, Any]) -> Any:
        """An output like the framework of the inputs would make it."""
        if any(True for _ in dims_of((*(tensor.dim or ()), *(tensor.stride or ())))):
            raise ExecutionError(f"output {tensor.label} has runtime sizes: pass a buffer for it", operand=tensor.name)
        plan = self.selected_plan
        torch = sys.modules.get("torch")
        if torch is not None and any(type(value).__module__.startswith("torch") for value in given.values()):
            dtype = getattr(torch, _TORCH_NAMES.get(tensor.dtype.value, tensor.dtype.value))
            device = "cpu" if plan.device.type == "cpu" else f"cuda:{plan.device.ordinal}"
            return torch.empty_strided(tensor.dim, tensor.stride, dtype=dtype, device=device)
        if plan.device.type == "cpu":
            numpy = sys.modules.get("numpy")
            if numpy is not None:
                return _numpy_empty(numpy, tensor)
        raise ExecutionError(f"output {tensor.label}: pass a buffer for it", operand=tensor.name)


def _numpy_empty(numpy: Any, tensor: Tensor) -> Any:
    name = {"boolean": "bool"}.get(tensor.dtype.value, tensor.dtype.value)
    try:
        dtype = numpy.dtype(name)
    except TypeError:
        raise ExecutionError(
            f"output {tensor.label}: numpy has no {name}; pass a buffer", operand=tensor.name
        ) from None
    shape = [evaluate(size, {}) for size in tensor.dim or ()]
    steps = [evaluate(step, {}) for step in tensor.stride or ()]
    last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    base = numpy.empty(last + 1, dtype)
    return numpy.lib.stride_tricks.as_strided(base, shape, [step * dtype.itemsize for step in steps])


def _workspace(plan: Plan) -> Any:
    """A buffer with an aligned start, allocated for this one call: calls on several streams must not share one."""
    size, align = plan.workspace_size, 256
    if plan.device.type == "cpu":
        import ctypes

        raw = ctypes.create_string_buffer(size + align)
        return _Aligned(raw, -(-ctypes.addressof(raw) // align) * align, size)
    torch = sys.modules.get("torch")
    if torch is None:
        raise ExecutionError("pass workspace=: no framework is loaded that could allocate it", operand="workspace")
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{plan.device.ordinal}")


class _Aligned:
    """An aligned window of a host buffer, as an array interface."""

    def __init__(self, owner: object, address: int, size: int) -> None:
        self._owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}

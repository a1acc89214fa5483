"""The frontend's wrapper form: ``with Graph(inputs=..., outputs=...) as g: ...`` and then ``g(...)``.

Leaving the block builds the graph. Framework tensors that were passed to builders in the block are known as
``node::argument``: they stand for their layout, and every call brings the data. A call allocates the outputs that it is not
given. Mixed into Graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .._dims import dims_of
from .._dtypes import bits
from .._errors import ExecutionError, GraphError, GraphTypeError, HandleError
from .._slot import extent_bytes, storage
from ._tensor import Tensor

if TYPE_CHECKING:
    from .._handle import Handle
    from .._plan import Plan

__all__ = ["WrapperForm"]

# Where the frameworks' name differs; what they lack is allocated as bytes.
_NAMES = {
    "boolean": "bool",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_e8m0": "float8_e8m0fnu",
    "int4": "",  # torch has a name for it that no memory can be of
}
_EXECUTE_KEYWORDS = ("override_uids", "override_shapes", "override_strides")


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
        ``outputs`` were listed) returns the outputs. Keywords: ``handle``, ``workspace`` and the overrides of ``execute``."""
        if not self._left:
            raise GraphError("call the graph after its with block")
        handle = kwargs.pop("handle", None) or self.handle
        workspace = kwargs.pop("workspace", None)
        for name in kwargs:
            if name not in _EXECUTE_KEYWORDS:
                raise GraphTypeError(f"the graph takes no keyword {name!r}")
        plan = self.selected_plan
        if handle is None and plan.device.type == "cuda":
            raise HandleError("need a cudnn handle: pass handle= here or to the constructor")
        buffers = args[0] if len(args) == 1 and isinstance(args[0], dict) else None
        by_tensor = self._positional(args) if buffers is None else self._named(buffers)
        for name, tensor in self._io_names.items():
            if tensor not in by_tensor and tensor in self.get_inputs():
                raise ExecutionError(f"input {name} is missing", operand=name)
        made: dict[Tensor, Any] = {}
        for tensor in self.get_outputs():
            if tensor not in by_tensor:
                made[tensor] = by_tensor[tensor] = self._allocate(tensor, by_tensor)
        if workspace is None and plan.workspace_size:
            if not self._workspace_alloc:
                raise ExecutionError("workspace_alloc=False: pass workspace=", operand="workspace")
            workspace = _workspace(plan)
        graph: Any = self
        graph.execute(by_tensor, workspace, handle, **kwargs)
        if buffers is not None:
            for tensor, value in made.items():
                buffers[tensor.name if self.find_tensor(tensor.name) is tensor else tensor.uid] = value
            return buffers
        assert self._io is not None
        results = tuple(by_tensor[tensor] for tensor in self._io[1])
        return results[0] if len(results) == 1 else results

    def _positional(self, args: tuple[Any, ...]) -> dict[Tensor, Any]:
        if self._io is None:
            raise GraphError("a positional call needs inputs= and outputs=, or set_io_tuples")
        if len(args) != len(self._io[0]):
            raise ExecutionError(f"the graph takes {len(self._io[0])} inputs, got {len(args)}")
        return dict(zip(self._io[0], args, strict=True))

    def _named(self, buffers: Mapping[Any, Any]) -> dict[Tensor, Any]:
        found: dict[Tensor, Any] = {}
        for key, value in buffers.items():
            tensor = self._resolve(key)
            if tensor in found:
                raise ExecutionError(f"operand {tensor.label} is given twice", operand=tensor.label)
            found[tensor] = value
        return found

    def _record_io(self, label: str, argument: str, tensor: Tensor, value: object) -> None:
        """Let ``label::argument`` and ``value`` itself name the tensor that a builder made of ``value``."""
        if not self._entered:
            return
        if self._io_names.setdefault(f"{label}::{argument}", tensor) is not tensor:
            raise GraphError(f"two nodes are named {label!r}: {label}::{argument} would name two tensors", node=label)
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
        dtype, dim, stride = tensor.dtype.value, tensor.dim or (), tensor.stride or ()
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and any(type(value).__module__.startswith("torch") for value in given.values()):
            element, dim, stride = _element(torch, dtype, dim, stride)
            device = "cpu" if plan.device.type == "cpu" else f"cuda:{plan.device.ordinal}"
            return torch.empty_strided(dim, stride, dtype=element, device=device)
        if plan.device.type == "cpu" and numpy is not None:
            element, dim, stride = _element(numpy, dtype, dim, stride)
            size = numpy.dtype(element).itemsize
            memory = numpy.empty(extent_bytes(dtype, tensor.dim or (), tensor.stride or ()), numpy.uint8)  # type: ignore[arg-type]
            return numpy.ndarray(dim, element, memory, strides=[step * size for step in stride])
        raise ExecutionError(f"output {tensor.label}: pass a buffer for it", operand=tensor.name)


def _element(framework: Any, dtype: str, dim: Any, stride: Any) -> tuple[Any, Any, Any]:
    """(type, shape, strides) in which torch or numpy hold such a tensor: bytes if they have no such type."""
    name = _NAMES.get(dtype, dtype)
    try:
        return framework.dtype(name) if framework.__name__ == "numpy" else getattr(framework, name), dim, stride
    except (AttributeError, TypeError):
        pass
    if bits(dtype) == 16:  # bfloat16 in numpy: pairs of bytes would help nobody
        raise ExecutionError(f"{framework.__name__} has no {dtype}: pass a buffer for the output")
    return framework.uint8, *((dim, stride) if bits(dtype) == 8 else storage(dtype, dim, stride))


def _workspace(plan: Plan) -> Any:
    """A buffer allocated for this one call: calls on several streams must not share one."""
    size = plan.workspace_size
    if plan.device.type == "cpu":
        return _HostMemory(size)
    torch = sys.modules.get("torch")
    if torch is None:
        raise ExecutionError("pass workspace=: no framework is loaded that could allocate it", operand="workspace")
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{plan.device.ordinal}")


class _HostMemory:
    """Bytes, as an array interface."""

    def __init__(self, size: int) -> None:
        import ctypes

        self._raw = ctypes.create_string_buffer(size)
        data = (ctypes.addressof(self._raw), False)
        self.__array_interface__ = {"data": data, "shape": (size,), "typestr": "|u1", "version": 3}

"""The graph under construction: tensors, ops, validation. ``Graph`` (also ``pygraph``) is the public class.

Planning, execution and the frontend's classic call sequence are in ``_classic``, the wrapper form in ``_wrapper``; both are
mixed in here. Validation goes by uid and identity, never by name: names are labels and may repeat.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .. import _buffers
from .._arguments import as_int, as_name, as_number
from .._dtypes import as_dtype, data_type
from .._enums import as_member, cuda_graph_retention, scalar_type, tensor_reordering
from .._errors import GraphError, GraphTypeError, nearest
from .._ops._table import lookup_builder, plugin_ops
from ._builders import call_builder, install
from ._classic import ClassicSequence
from ._constants import constant_dtype
from ._infer import infer_node, validate_graph
from ._scratch import Scratch, describe_as
from ._tensor import GraphNode, Tensor, extents
from ._wrapper import WrapperForm

if TYPE_CHECKING:
    from .._handle import Handle
    from ._frozen import FrozenGraph

__all__ = ["Graph"]


class Graph(ClassicSequence, WrapperForm):
    """A graph of operations.

    ``io_data_type`` is the default type of inputs and outputs, ``intermediate_data_type`` of virtual tensors and
    ``compute_data_type`` of the arithmetic; the latter two default to the first. ``handle``, ``device_property``,
    ``sm_version`` and ``sm_count`` say which device the graph is planned for. ``inputs``, ``outputs``, ``heuristics`` and
    ``workspace_alloc`` are those of the frontend's wrapper form. Unknown keywords raise TypeError.
    """

    def __init__(
        self,
        name: str = "test_graph",
        io_data_type: object = None,
        intermediate_data_type: object = None,
        compute_data_type: object = None,
        handle: Handle | str | None = None,
        sm_count: int | None = None,
        sm_version: int | None = None,
        kernel_cache: object = None,
        device_property: object = None,
        is_dynamic_shape_enabled: bool = False,
        is_override_shape_enabled: bool = False,
        cuda_graph_retention: object = None,
        *,
        is_cuda_graph_replay_expected: bool = False,
        inputs: Iterable[object] | None = None,
        outputs: Iterable[object] | None = None,
        heuristics: object = None,
        workspace_alloc: bool = True,
    ) -> None:
        self._name = as_name(name, "name")
        self._io_data_type = as_dtype(io_data_type)
        unset = data_type.NOT_SET
        intermediate, compute = as_dtype(intermediate_data_type), as_dtype(compute_data_type)
        self._intermediate_data_type = self._io_data_type if intermediate is unset else intermediate
        self._compute_data_type = self._io_data_type if compute is unset else compute
        self.handle: Handle | None = _handle(handle)
        self.sm_count = sm_count
        self.sm_version = sm_version
        self.kernel_cache = kernel_cache
        self.device_property = device_property
        self.is_dynamic_shape_enabled = is_dynamic_shape_enabled
        self.is_override_shape_enabled = is_override_shape_enabled
        self.is_cuda_graph_replay_expected = is_cuda_graph_replay_expected
        self._retention = _retention(cuda_graph_retention)
        self._tensors: dict[int, Tensor] = {}
        self._nodes: list[GraphNode] = []
        self._bindings: dict[int, object] = {}
        self._next_uid = 1
        self._labels: dict[str, int] = {}
        self._frozen: dict[str, FrozenGraph] = {}
        self._init_classic()
        self._init_wrapper(inputs, outputs, heuristics, workspace_alloc)

    # What is part of the frozen graph can't be assigned.
    name: str = property(attrgetter("_name"))  # type: ignore[assignment]
    io_data_type: data_type = property(attrgetter("_io_data_type"))  # type: ignore[assignment]
    intermediate_data_type: data_type = property(attrgetter("_intermediate_data_type"))  # type: ignore[assignment]
    compute_data_type: data_type = property(attrgetter("_compute_data_type"))  # type: ignore[assignment]

    def __repr__(self) -> str:
        ops = ", ".join(node.op for node in self._nodes)
        return f"<Graph {self.name!r} [{ops}]>"

    def __getattr__(self, method: str) -> Any:
        """A builder of a plugin's own op."""
        if method.startswith("_"):
            raise AttributeError(method)
        try:
            row = lookup_builder(method)
        except GraphError as error:
            raise AttributeError(str(error)) from None
        if row is None:
            raise AttributeError(f"Graph has no attribute or op builder {method!r}{_nearest_name(method)}")

        def build(*args: Any, **kwargs: Any) -> Any:
            return call_builder(self, method, row, args, kwargs)

        build.__name__ = method
        build.__doc__ = row.doc
        return build

    # --- tensors
    def tensor(
        self,
        dim: Iterable[object],
        stride: Iterable[object] | None = None,
        data_type: object = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Tensor | None = None,
        reordering_type: object = None,
        name: str = "",
        uid: int | None = None,
        ragged_offset_multiplier: int = 1,
        alignment_value: int = 1,
    ) -> Tensor:
        """Declare a tensor: ``dim`` sizes (int or Dim), ``stride`` in elements (default: packed row-major)."""
        self._mutable("tensor")
        label = as_name(name, "tensor name") or "tensor"
        sizes = extents(dim, f"{label}.dim")
        strides = None if stride is None else extents(stride, f"{label}.stride", strides=True)
        dtype = as_dtype(data_type)
        reordering = as_member(tensor_reordering, reordering_type or tensor_reordering.NONE)
        if strides is not None and len(strides) != len(sizes):
            raise GraphError(
                f"{label}: dim and stride differ in rank", expected=len(sizes), actual=len(strides), node=label
            )
        alignment = as_int(alignment_value, f"{label}.alignment_value", 1)
        multiplier = as_int(ragged_offset_multiplier, f"{label}.ragged_offset_multiplier", 1)
        if ragged_offset is not None:
            self._own(ragged_offset, f"{label}.ragged_offset")
        tensor = self._new_tensor(name, virtual=bool(is_virtual), uid=uid)
        tensor._dim = sizes
        tensor._stride = strides
        tensor._dtype = dtype
        tensor._by_value = bool(is_pass_by_value)
        tensor._reordering = reordering
        tensor._ragged_offset = ragged_offset
        tensor._ragged_offset_multiplier = multiplier
        tensor._alignment_value = alignment
        return tensor

    def tensor_like(self, template: object, name: str = "", is_virtual: bool = False) -> Tensor:
        """Declare a tensor with the sizes, strides and type of ``template``: a Tensor, or a torch, numpy or DLPack one.

        A one-element CPU tensor may be passed by value: it becomes a host value where the plan runs on a GPU, and is an
        ordinary operand on the CPU.
        """
        self._mutable("tensor_like")
        if isinstance(template, Tensor):
            if template.dim is None:
                raise GraphError(f"tensor_like: {template.label} has no dim yet")
            made = self._new_tensor(name, virtual=bool(is_virtual))
            made._dim = template.dim
            made._stride = template.stride
            made._dtype = template.dtype
            made._by_value = template.by_value
            made._reordering = template.reordering
            return made
        made = Tensor(self, self._free_uid(), as_name(name, "tensor name"))
        made._is_virtual = bool(is_virtual)
        describe_as(made, template, made.name or "tensor_like")
        self._tensors[made.uid] = made
        self._changed()
        return made

    def tensor_scalar(self, value: float | bool, scalar_type: object, name: str = "") -> Tensor:
        """A one-element by-value tensor: part of the graph (COMPILE_TIME_CONST), or a default that execute may replace
        (RUNTIME_PARAM)."""
        self._mutable("tensor_scalar")
        kind = as_member(_scalar_type, scalar_type)
        number = as_number(value)
        if number is None:
            number = _buffers.scalar(value, name or "tensor_scalar")
        made = self._new_tensor(name)
        made._dim = (1,)
        made._stride = (1,)
        made._dtype = constant_dtype(number, self.compute_data_type)
        made._by_value = True
        if kind is _scalar_type.COMPILE_TIME_CONST:
            made._value = number
        else:
            made._default = number
        return made

    def find_tensor(self, key: str | int) -> Tensor | None:
        """The tensor with this uid, or with this name if only one has it."""
        if isinstance(key, int):
            return self._tensors.get(key)
        found = [tensor for tensor in self._tensors.values() if tensor.name == key]
        return found[0] if len(found) == 1 else None

    def get_inputs(self) -> list[Tensor]:
        """The used tensors that no op produces, constants of the graph left out."""
        return [t for t in self._used_tensors() if t.producer is None and not (t.by_value and t.value is not None)]

    def get_outputs(self) -> list[Tensor]:
        return [t for t in self._used_tensors() if t.producer is not None and not t.is_virtual]

    def get_node(self, name: str) -> GraphNode | None:
        found = [node for node in self._nodes if node.name == name]
        return found[0] if len(found) == 1 else None

    @property
    def nodes(self) -> tuple[GraphNode, ...]:
        return tuple(self._nodes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._tensors.values())

    # --- validation and the immutable form
    def validate(self) -> None:
        """Infer what is not set and check everything; raises GraphError naming node and port."""
        validate_graph(self)

    def freeze(self, device_type: str = "cpu") -> FrozenGraph:
        """The validated, immutable graph. ``device_type`` decides what a one-element CPU tensor becomes."""
        has_auto = any(tensor.by_value == "auto" for tensor in self._tensors.values())
        kind = device_type if has_auto else ""
        if kind not in self._frozen:
            from ._freeze import freeze

            self.validate()
            self._frozen[kind] = freeze(self, host_values=device_type == "cuda")
        return self._frozen[kind]

    def key(self) -> str:
        """64 hex digits that equal graphs share, whatever their names, uids and order of construction."""
        return self.freeze(self._device_type()).key

    def to_json(self) -> str:
        """The graph as canonical JSON (schema 1 of docs/graph-json.md); raises GraphError if it is not valid."""
        from ._json import dumps

        return dumps(self.freeze(self._device_type()), self)

    @classmethod
    def from_json(cls, text: str) -> Graph:
        """A graph from its JSON; raises GraphError for unknown fields, ops and references."""
        from ._json import loads

        return loads(cls, text)

    def inspect(self) -> dict[str, object]:
        """Tensors by uid and nodes in order, as plain data, whether the graph is valid or not."""
        return {
            "name": self.name,
            "tensors": {t.uid: {"name": t.name, "dim": t.get_dim(), "stride": t.get_stride(), "data_type": str(t.dtype),
                                "is_virtual": t.is_virtual, "is_pass_by_value": bool(t.by_value)}
                        for t in self._tensors.values()},
            "nodes": [{"op": n.op, "name": n.name, "attrs": dict(n.attrs)} for n in self._nodes],
        }  # fmt: skip

    def get_cuda_graph_retention(self) -> object:
        return self._retention

    # --- for the builders and descriptors of this package
    def _mutable(self, what: str) -> None:
        if self.is_planned:
            raise GraphError(f"{what}: the graph is planned already; build a new graph")

    def _changed(self) -> None:
        self._frozen.clear()

    def _own(self, value: object, where: str) -> Tensor:
        if not isinstance(value, Tensor):
            raise GraphTypeError(f"{where} takes a tensor of this graph, got {type(value).__name__}")
        if value._owner() is not self:
            raise GraphError(f"{where}: tensor {value.label} belongs to another graph")
        return value

    def _new_tensor(self, name: str = "", *, virtual: bool = False, uid: int | None = None) -> Tensor:
        tensor = Tensor(self, self._free_uid(), as_name(name, "tensor name"))
        tensor._is_virtual = virtual
        if uid is not None:
            self._assign_uid(tensor, uid)
        self._tensors[tensor.uid] = tensor
        self._changed()
        return tensor

    def _free_uid(self) -> int:
        while self._next_uid in self._tensors:
            self._next_uid += 1
        return self._next_uid

    def _assign_uid(self, tensor: Tensor, uid: int) -> None:
        """Give ``tensor`` the user's uid; an automatic holder of it is renumbered, a user's one is an error."""
        if isinstance(uid, bool) or not isinstance(uid, int) or uid < 0:
            raise GraphError(f"tensor {tensor.label}: a uid is an int >= 0, got {uid!r}")
        holder = self._tensors.get(uid)
        if holder is tensor:
            tensor._uid_assigned = True
            return
        if holder is not None and holder._uid_assigned:
            who = f"tensor {tensor.name!r}" if tensor.name else "a tensor"
            other = f"tensor {holder.name!r}" if holder.name else "another tensor"
            raise GraphError(f"{who} can't have uid {uid}: it belongs to {other}")
        mine = tensor.uid
        registered = self._tensors.get(mine) is tensor
        if registered:
            del self._tensors[mine]
        if holder is not None:
            del self._tensors[uid]
            self._tensors[uid] = tensor  # reserve it before a new one is drawn
            holder._uid = self._free_uid()
            self._tensors[holder.uid] = holder
            self._move_binding(uid, holder.uid)
        if registered:
            self._tensors[uid] = tensor
            self._move_binding(mine, uid)
        tensor._uid = uid
        tensor._uid_assigned = True
        self._changed()

    def _move_binding(self, old: int, new: int) -> None:
        if old in self._bindings:
            self._bindings[new] = self._bindings.pop(old)

    def _rename(self, tensor: Tensor, name: str) -> None:
        tensor._name = as_name(name, "tensor name")
        self._changed()

    def _next_label(self, op: str) -> str:
        count = self._labels.get(op, 0)
        self._labels[op] = count + 1
        return f"{op}.{count}"

    def _add_node(self, node: GraphNode) -> None:
        self._nodes.append(node)
        self._changed()
        infer_node(self, node, strict=False)

    def _used_tensors(self) -> list[Tensor]:
        used: dict[int, Tensor] = {}
        for node in self._nodes:
            for tensor in (*node.sources(), *node.output_tensors()):
                used[tensor.uid] = tensor
        return [used[uid] for uid in sorted(used)]

    def _made_from(self, value: object) -> Tensor | None:
        """The tensor that a builder made from this framework tensor."""
        if value is None or isinstance(value, (Tensor, int, float, str)):
            return None
        return next((self._tensors[uid] for uid, bound in self._bindings.items() if bound is value), None)

    def _scratch(self) -> Scratch:
        return Scratch(self)


_scalar_type = scalar_type


def _handle(value: Handle | str | None) -> Handle | None:
    """``"auto"`` is the frontend's word for a default handle: planning and execution then choose the device themselves."""
    from .._handle import require_handle

    return None if value is None or (isinstance(value, str) and value == "auto") else require_handle(value)


def _retention(value: object) -> object:
    return None if value is None else as_member(cuda_graph_retention, value)


def _nearest_name(method: str) -> str:
    return nearest(method, [*(name for name in dir(Graph) if not name.startswith("_")), *plugin_ops()])


def _name_after(cls: type) -> None:
    """Let what a method of a mixin is called in errors and help be ``Graph.plan``, as users know it."""
    for mixin in cls.__mro__[1:-1]:
        for name, member in vars(mixin).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                function.__qualname__ = f"{cls.__name__}.{name}"


install(Graph)
_name_after(Graph)

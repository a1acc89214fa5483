"""The graph under construction: tensors, ops, validation. ``Graph`` (also ``pygraph``) is the public class.

Planning, execution and the frontend's classic call sequence are in ``_classic``, the wrapper form in ``_wrapper``; both are
mixed in here. Validation goes by uid and identity, never by name: names are labels and may repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .. import _buffers
from .._dtypes import as_dtype, data_type
from .._enums import as_member, cuda_graph_retention, scalar_type, tensor_reordering
from .._errors import GraphError, GraphTypeError
from .._ops._table import lookup_builder
from ._builders import call_builder, install
from ._classic import ClassicSequence
from ._infer import infer_node, validate_graph
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
        self.name = name
        self.io_data_type = as_dtype(io_data_type)
        self.intermediate_data_type = as_dtype(intermediate_data_type)
        if self.intermediate_data_type is data_type.NOT_SET:
            self.intermediate_data_type = self.io_data_type
        self.compute_data_type = as_dtype(compute_data_type)
        if self.compute_data_type is data_type.NOT_SET:
            self.compute_data_type = self.io_data_type
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
            raise AttributeError(f"Graph has no attribute or op builder {method!r}")

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
        label = name or "tensor"
        sizes = extents(dim, f"{label}.dim")
        strides = None if stride is None else extents(stride, f"{label}.stride", strides=True)
        dtype = as_dtype(data_type)
        reordering = as_member(tensor_reordering, reordering_type or tensor_reordering.NONE)
        if strides is not None and len(strides) != len(sizes):
            raise GraphError(
                f"{label}: dim and stride differ in rank", expected=len(sizes), actual=len(strides), node=label
            )
        if alignment_value < 1:
            raise GraphError(f"{label}: alignment_value must be >= 1, got {alignment_value}")
        if ragged_offset is not None:
            self._own(ragged_offset, f"{label}.ragged_offset")
        tensor = self._new_tensor(name, virtual=bool(is_virtual), uid=uid)
        tensor._dim = sizes
        tensor._stride = strides
        tensor._dtype = dtype
        tensor.by_value = bool(is_pass_by_value)
        tensor.reordering = reordering
        tensor.ragged_offset = ragged_offset
        tensor.ragged_offset_multiplier = int(ragged_offset_multiplier)
        tensor.alignment_value = int(alignment_value)
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
            made = self._new_tensor(name, virtual=is_virtual)
            made._dim = template.dim
            made._stride = template.stride
            made._dtype = template.dtype
            made.by_value = template.by_value
            made.reordering = template.reordering
            return made
        view = _buffers.describe(template, name or "tensor_like")
        made = self._new_tensor(name, virtual=is_virtual)
        made._dim = view.shape
        made._stride = view.stride
        made._dtype = as_dtype(view.dtype)
        if view.device_type == "cpu" and view.elements == 1 and not is_virtual:
            made.by_value = "auto"
        return made

    def tensor_scalar(self, value: float | bool, scalar_type: object, name: str = "") -> Tensor:
        """A one-element by-value tensor: part of the graph (COMPILE_TIME_CONST), or a default that execute may replace
        (RUNTIME_PARAM)."""
        self._mutable("tensor_scalar")
        kind = as_member(_scalar_type, scalar_type)
        if not isinstance(value, (int, float)):
            value = _buffers.scalar(value, name or "tensor_scalar")
        made = self._new_tensor(name)
        made._dim = (1,)
        made._stride = (1,)
        made._dtype = self._scalar_dtype(value, data=True)
        made.by_value = True
        if kind is _scalar_type.COMPILE_TIME_CONST:
            made.value = value
        else:
            self._bindings[made.uid] = value
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
        if not isinstance(name, str):
            raise GraphTypeError(f"a tensor name is a string, got {name!r}")
        tensor = Tensor(self, self._free_uid(), name)
        tensor.is_virtual = virtual
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
            tensor.uid_assigned = True
            return
        if holder is not None and holder.uid_assigned:
            raise GraphError(f"tensor {tensor.label}: uid {uid} belongs to tensor {holder.label}")
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
        tensor.uid_assigned = True
        self._changed()

    def _move_binding(self, old: int, new: int) -> None:
        if old in self._bindings:
            self._bindings[new] = self._bindings.pop(old)

    def _rename(self, tensor: Tensor, name: str) -> None:
        if not isinstance(name, str):
            raise GraphTypeError(f"a tensor name is a string, got {name!r}")
        tensor._name = name
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
            for tensor in (*node.input_tensors(), *node.output_tensors()):
                used[tensor.uid] = tensor
                if tensor.ragged_offset is not None:
                    used[tensor.ragged_offset.uid] = tensor.ragged_offset
        return [used[uid] for uid in sorted(used)]

    def _scalar_dtype(self, value: object, *, data: bool) -> data_type:
        if isinstance(value, bool):
            return data_type.BOOLEAN
        if isinstance(value, int) and not data:
            return data_type.INT64
        compute = self.compute_data_type
        return compute if compute in (data_type.FLOAT, data_type.DOUBLE, data_type.INT32) else data_type.FLOAT

    def _made_from(self, value: object) -> Tensor | None:
        """The tensor that a builder made from this framework tensor."""
        if value is None or isinstance(value, (Tensor, int, float, str)):
            return None
        return next((self._tensors[uid] for uid, bound in self._bindings.items() if bound is value), None)

    def _scratch(self) -> _Scratch:
        return _Scratch(self)


class _Scratch:
    """Tensors made while an op's arguments are bound; they join the graph only when the whole call is right."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: list[tuple[Tensor, object]] = []

    def tensor(self, value: object, where: str, data: bool) -> Tensor:
        if isinstance(value, Tensor):
            return self.graph._own(value, where)
        if isinstance(value, (bool, int, float)):
            made = Tensor(self.graph, -1, "")
            made._dim = made._stride = (1,)
            made._dtype = self.graph._scalar_dtype(value, data=data)
            made.by_value = True
            made.value = value
            self.made.append((made, None))
            return made
        known = self.graph._made_from(value) or next((made for made, buffer in self.made if buffer is value), None)
        if known is not None:
            return known
        view = _buffers.describe(value, where)
        made = Tensor(self.graph, -1, where.replace(".", "::", 1))
        made._dim, made._stride, made._dtype = view.shape, view.stride, as_dtype(view.dtype)
        if view.device_type == "cpu" and view.elements == 1:
            made.by_value = "auto"
        self.made.append((made, value))
        return made

    def adopt(self) -> None:
        for made, buffer in self.made:
            made._uid = self.graph._free_uid()
            self.graph._tensors[made.uid] = made
            if buffer is not None:
                self.graph._bindings[made.uid] = buffer
        if self.made:
            self.graph._changed()


_scalar_type = scalar_type


def _handle(value: Handle | str | None) -> Handle | None:
    """``"auto"`` is the frontend's word for a default handle: planning and execution then choose the device themselves."""
    from .._handle import require_handle

    return None if value is None or (isinstance(value, str) and value == "auto") else require_handle(value)


def _retention(value: object) -> object:
    return None if value is None else as_member(cuda_graph_retention, value)


def graph_from(mapping: Mapping[str, Any]) -> Graph:
    """An empty graph with the three default types of a JSON document."""
    return Graph(
        io_data_type=mapping.get("io_data_type"),
        intermediate_data_type=mapping.get("intermediate_data_type"),
        compute_data_type=mapping.get("compute_data_type"),
    )


install(Graph)

"""Graph -> Problem, or declines: the one place that decides what the prefill kernels can compute. Imports the core alone.

``graph.facts(lower_gdn)`` and ``graph.facts(lower_kda)`` give a ``Lowered``. The graph is one gdn or kda node; kda may have its gate's
softplus form as pointwise nodes before it (``softplus_gate``). No size is in the problem: ``Binding`` says where the launch reads
them. What depends on the device is the engines' business. Subjects of declines are ports, because names are not part of a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn_core import checks

from .extents import divisor, least, shown
from .limits import GRID_LIMIT, MOST_TOKENS, STRIDE_LIMIT, ctas
from .problem import Problem
from .softplus_gate import POINTWISE, Gate, softplus_gate

if TYPE_CHECKING:
    from cudnn_core import Decline, FrozenGraph, FrozenNode, FrozenTensor

__all__ = ["ALIGNED", "BYTES", "Binding", "Lowered", "Place", "lower_gdn", "lower_kda"]

ALIGNED = 16
"""Bytes: TMA's alignment of addresses and strides; q, k, v and O go through it, kda's g and states are accessed as widely."""
HEAD_SIZES = (64, 128)
LOWER_BOUND = -5.0  # of the op's row, where the attribute is not given
_IO = ("bfloat16", "float16")
_REAL = ("float32", "bfloat16", "float16")
_STATES = ("initial_state", "final_state")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}
"""Of an element of a tensor that has a problem."""


class Place(NamedTuple):
    """One tensor of the problem: its position in ``graph.operands``, and the operand's axis along each word of ``arguments``."""

    operand: int
    axes: Mapping[str, int]


@dataclass(frozen=True)
class Binding:
    """The place of every tensor of a problem, by port."""

    places: Mapping[str, Place]

    @property
    def aligned(self) -> tuple[str, ...]:
        """Ports whose address must be a multiple of 16 bytes."""
        wide = ("q", "k", "v", "O", *_STATES, *(("g",) if "channel" in self.places["g"].axes else ()))
        return tuple(port for port in wide if port in self.places)


@dataclass(frozen=True)
class Lowered:
    """What a graph is to the kernels: a problem and its binding, or the reasons why there is none."""

    problem: Problem | None
    binding: Binding | None
    declines: tuple[Decline, ...] = ()


def lower_gdn(graph: FrozenGraph) -> Lowered:
    """Of an engine for gdn. Pure: use it through ``graph.facts``."""
    return _Lowering(graph, "gdn").run()


def lower_kda(graph: FrozenGraph) -> Lowered:
    """Of an engine for kda. Pure: use it through ``graph.facts``."""
    return _Lowering(graph, "kda").run()


class _Lowering:
    def __init__(self, graph: FrozenGraph, op: str) -> None:
        self.graph, self.op = graph, op
        self.c = checks(graph)
        self.slots = {tensor.index: slot for slot, tensor in enumerate(graph.operand_tensors())}

    def run(self) -> Lowered:
        node, gate = self._node()
        if node is None:
            return Lowered(None, None, tuple(self.c.declines))
        self.node, self.gate = node, gate
        self.tensors: dict[str, FrozenTensor] = {**node.inputs, **node.outputs}
        if gate is not None:
            self.tensors |= {port: tensor for port, tensor in gate.tensors.items() if tensor is not None}
        self._attributes()
        self._dtypes()
        if all(self._dense(port, tensor) for port, tensor in self.tensors.items()):
            self._sizes()
            self._layouts()
        problem = self._problem() if self.c else None
        if problem is not None:
            self._grid(problem)
        if self.c.declines:
            return Lowered(None, None, tuple(self.c.declines))
        return Lowered(problem, self._binding())

    def _node(self) -> tuple[FrozenNode | None, Gate | None]:
        c, op, nodes = self.c, self.op, self.graph.nodes
        found = [node for node in nodes if node.op == op]
        if not c.require(found, "op.anchor", "graph", op):
            return None, None
        if not c.require(len(found) == 1, "op.count", op, 1, len(found)):
            return None, None
        node = found[0]
        if len(nodes) == 1:
            return node, None
        if op != "kda":
            c.ops(op)
            return None, None
        if not c.ops(op, *POINTWISE):
            return None, None
        gate = softplus_gate(self.graph, node)
        if isinstance(gate, str):
            c.require(
                False,
                "op.pattern",
                "kda.g",
                "g = -exp(a_log) softplus(g + dt_bias) in float32, read by kda alone",
                gate,
            )
            return None, None
        return node, gate

    def _attributes(self) -> None:
        c, node = self.c, self.node
        c.attr(node, "checkpoint_every_n_tokens", 0)
        for part in (node, *(self.gate.nodes if self.gate else ())):
            c.require(part.compute_dtype == "float32", "dtype.compute", part.op, "float32", str(part.compute_dtype))

    def _dtypes(self) -> None:
        c, tensors = self.c, self.tensors
        q = tensors["q"]
        if c.dtype("q", q, *_IO):
            o = tensors["O"]
            c.require(o.dtype == q.dtype, "dtype.mixed", "O", str(q.dtype), str(o.dtype))
        for port in ("g", "beta", "a_log", "dt_bias", *_STATES):
            if port in tensors:
                c.dtype(port, tensors[port], *_REAL)

    def _dense(self, port: str, tensor: FrozenTensor) -> bool:
        c = self.c
        host = tensor.by_value or tensor.auto_by_value
        kept = c.require(not host, "op.pattern", port, "a tensor", "a host value")
        kept &= c.require(
            tensor.role != "virtual", "op.pattern", port, "an output of the graph", "an intermediate tensor"
        )
        kept &= c.require(tensor.ragged_offset is None, "layout.ragged", port, "a dense tensor")
        return kept & c.require(tensor.reordering == "NONE", "layout.order", port, "NONE", tensor.reordering)

    def _sizes(self) -> None:
        c = self.c
        q, v = self.tensors["q"], self.tensors["v"]
        fixed = [c.no_dynamic(f"{port}.dim[{axis}]", self.tensors[port].dim[axis]) for port in "qkv" for axis in (1, 2)]
        if all(fixed):
            for port, size in (("q", q.dim[-1]), ("v", v.dim[-1])):
                c.require(size in HEAD_SIZES, "shape.range", f"{port}.dim[-1]", list(HEAD_SIZES), size)
        tokens = least(q.dim[0])
        limits = {"min": 1, "max": MOST_TOKENS}
        c.require(1 <= tokens <= MOST_TOKENS, "shape.range", "q.dim[0]", limits, tokens)
        if "cu_seqlens" in self.tensors:
            boundaries = least(self.tensors["cu_seqlens"].dim[0])
            c.require(boundaries >= 2, "shape.range", "cu_seqlens.dim[0]", {"min": 2}, boundaries)

    def _grid(self, problem: Problem) -> None:
        """The smallest sizes that a run can have fit in a grid."""
        bounds = self.tensors.get("cu_seqlens")
        sequences = 1 if bounds is None else least(bounds.dim[0]) - 1
        needs = ctas(problem, least(self.tensors["q"].dim[0]), sequences)
        hint = "fewer tokens or sequences in a call"
        self.c.require(needs <= GRID_LIMIT, "shape.range", "grid", {"max": GRID_LIMIT}, needs, hint)

    def _layouts(self) -> None:
        for port in ("q", "k", "v", "O", *(("g",) if self.op == "kda" else ())):
            self._unit(port, -1)
            self._wide(port, (0, 1))
        if "dt_bias" in self.tensors and self.op == "kda":
            self._unit("dt_bias", -1)
        for port in ("cu_seqlens", "state_indices"):
            if port in self.tensors:
                self._unit(port, 0)
        layouts = {port: self._state(port) for port in _STATES if port in self.tensors}
        if len({*layouts.values()}) > 1 and "" not in layouts.values():
            self.c.require(False, "layout.order", "final_state", layouts["initial_state"], layouts["final_state"])
        self.layout = next(iter(layouts.values()), "v_major")
        self._reach()

    def _reach(self) -> None:
        """Strides that a launch reads are below the limit of TMA's."""
        for port, place in self._binding().places.items():
            tensor = self.tensors[port]
            most = STRIDE_LIMIT // BYTES.get(str(tensor.dtype), ALIGNED) - 1
            for axis in place.axes.values():
                stride = tensor.stride[axis]
                if tensor.dim[axis] != 1 and isinstance(stride, int):
                    near, subject = 0 <= stride <= most, f"{port}.stride[{axis}]"
                    self.c.require(near, "layout.stride", subject, {"min": 0, "max": most}, stride)

    def _unit(self, port: str, axis: int) -> None:
        tensor = self.tensors[port]
        place, stride = axis % tensor.rank, tensor.stride[axis]
        if tensor.dim[axis] != 1:
            self.c.require(stride == 1, "layout.stride", f"{port}.stride[{place}]", 1, shown(stride))

    def _wide(self, port: str, axes: tuple[int, ...]) -> None:
        """Rows, heads: multiples of 16 bytes."""
        tensor = self.tensors[port]
        multiple = ALIGNED // BYTES.get(str(tensor.dtype), ALIGNED)
        for axis in axes:
            stride = tensor.stride[axis]
            if tensor.dim[axis] != 1 and divisor(stride) % multiple:
                self.c.require(
                    False, "layout.alignment", f"{port}.stride[{axis}]", {"multiple_of": multiple}, shown(stride)
                )

    def _state(self, port: str) -> str:
        """v_major, k_major, or "" for a decline."""
        stride = self.tensors[port].stride
        if stride[3] == 1:
            self._wide(port, (0, 1, 2))
            return "v_major"
        if stride[2] == 1:
            self._wide(port, (0, 1, 3))
            return "k_major"
        expected = "stride 1 along K (the last axis) or along V (the axis before)"
        self.c.require(False, "layout.order", port, expected, [shown(s) for s in stride])
        return ""

    # --- what comes of it
    def _dtype(self, port: str) -> str:
        return str(self.tensors[port].dtype) if port in self.tensors else ""

    def _problem(self) -> Problem:
        tensors, attrs = self.tensors, self.node.attrs
        key: Any = tensors["q"].dim[2]
        heads: dict[str, Any] = {f"heads_{port}": tensors[port].dim[1] for port in "qkv"}
        value: Any = tensors["v"].dim[2]
        safe = "softplus" if self.gate else ""
        if attrs["safe_gate"]:
            safe = "softplus" if self.op == "gdn" else "sigmoid"
        bound = attrs.get("gate_lower_bound")
        scale = attrs["scale"]
        return Problem(
            variant=self.op,
            io=self._dtype("q"),
            **heads,
            key=key,
            value=value,
            gate_dtype=self._dtype("g"),
            beta_dtype=self._dtype("beta"),
            index_dtype=self._dtype("cu_seqlens"),
            initial="initial_state" in tensors,
            final="final_state" in tensors,
            state_dtype=self._dtype("initial_state") or self._dtype("final_state"),
            state_layout=self.layout,
            slot_dtype=self._dtype("state_indices"),
            overwrite=attrs["overwrite_initial_state"],
            l2norm=attrs["use_qk_l2norm"],
            beta_sigmoid=attrs["use_beta_sigmoid"],
            neg_eigval=attrs["allow_neg_eigval"],
            domain=attrs["gate_domain"],
            safe=safe,
            lower_bound=float(LOWER_BOUND if bound is None else bound) if safe == "sigmoid" else 0.0,
            a_log_dtype=self._dtype("a_log"),
            bias_dtype=self._dtype("dt_bias"),
            scale=float(key**-0.5 if scale is None else scale),
            batch_invariant=attrs["batch_invariant"],
        )

    def _binding(self) -> Binding:
        tokens = {"token": 0, "head": 1}
        axes: dict[str, Mapping[str, int]] = dict.fromkeys(self.tensors, tokens)
        axes["g"] = {**tokens, "channel": 2} if self.op == "kda" else tokens
        axes["cu_seqlens"] = axes["state_indices"] = {}
        axes["initial_state"] = axes["final_state"] = {**tokens, "row": 2, "col": 3}
        axes["a_log"] = axes["dt_bias"] = {"head": 1 if self.gate else 0}
        places = {port: Place(self.slots[tensor.index], axes[port]) for port, tensor in self.tensors.items()}
        return Binding(places)

"""Graph -> ``DecodeProblem`` and ``Binding``, or declines: the one place that decides what the decode kernel computes.

``graph.facts(lower_gdn_decode)`` and ``graph.facts(lower_kda_decode)`` give a ``Lowered``. The graph is one node. No size is in the
problem: ``Binding`` says where a launch reads them. What depends on the device is the engines' business. Imports the core alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn_core import checks

from .decode_problem import (
    ACCESS,
    BYTES,
    MOST_ROWS,
    DecodeConfig,
    DecodeProblem,
    configs,
    ctas,
    tensor_words,
)
from .extents import divisor, least, shown
from .limits import GRID_LIMIT

if TYPE_CHECKING:
    from cudnn_core import Decline, FrozenGraph, FrozenNode, FrozenTensor

__all__ = ["Binding", "Lowered", "Place", "Rule", "lower_gdn_decode", "lower_kda_decode"]

HEAD_SIZES = (64, 128)
LOWER_BOUND = -5.0  # of the op's row, where the attribute is not given
STRIDE_LIMIT = 2**31  # bytes
_REAL = ("float32", "bfloat16", "float16")
_STATES = ("initial_state", "final_state")
_AXES = {"token": 0, "row": 0, "slot": 0, "head": 1}  # words -> axes; a_log and dt_bias have their heads first


class Place(NamedTuple):
    """One tensor: its position in ``graph.operands``, the bytes of an element, and the operand's axis of every stride word."""

    operand: int
    size: int
    axes: Mapping[str, int]


class Rule(NamedTuple):
    """Bytes that the strides of a tensor and its address are multiples of, below 2^31 for strides."""

    multiple: int
    dense: int = 0
    """Bytes that the word "line" must be; 0: anything."""


@dataclass(frozen=True)
class Binding:
    """The place of every tensor of a problem, by port, and the rules of its strides and address."""

    places: Mapping[str, Place]
    rules: Mapping[str, Rule]


@dataclass(frozen=True)
class Lowered:
    """What a graph is to the kernel: a problem, its binding and the configurations that it can have, or the reasons why there is
    none."""

    problem: DecodeProblem | None
    binding: Binding | None
    declines: tuple[Decline, ...] = ()
    configs: tuple[DecodeConfig, ...] = ()


def lower_gdn_decode(graph: FrozenGraph) -> Lowered:
    """Pure: use it through ``graph.facts``."""
    return _Lowering(graph, "gdn_decode").run()


def lower_kda_decode(graph: FrozenGraph) -> Lowered:
    """Pure: use it through ``graph.facts``."""
    return _Lowering(graph, "kda_decode").run()


class _Lowering:
    def __init__(self, graph: FrozenGraph, op: str) -> None:
        self.graph, self.op, self.c = graph, op, checks(graph)

    def run(self) -> Lowered:
        c, nodes = self.c, self.graph.nodes
        found = [node for node in nodes if node.op == self.op]
        if c.ops(self.op) and c.require(len(found) == 1, "op.count", self.op, 1, len(found)):
            self.node: FrozenNode = found[0]
            self.tensors: dict[str, FrozenTensor] = {**self.node.inputs, **self.node.outputs}
            self._dtypes()
            dense = [self._plain(port, tensor) for port, tensor in self.tensors.items()]
            if all([*dense, self._sizes()]) and not c.declines:
                return self._lowered()
        return Lowered(None, None, tuple(c.declines))

    def _dtypes(self) -> None:
        c = self.c
        c.require(
            self.node.compute_dtype == "float32", "dtype.compute", self.op, "float32", str(self.node.compute_dtype)
        )
        for port in ("q", "g", "beta", "a_log", "dt_bias", "O", *_STATES):
            if port in self.tensors:
                c.dtype(port, self.tensors[port], *_REAL)

    def _plain(self, port: str, tensor: FrozenTensor) -> bool:
        c = self.c
        host = tensor.by_value or tensor.auto_by_value
        kept = c.require(not host, "op.pattern", port, "a tensor", "a host value")
        kept &= c.require(tensor.ragged_offset is None, "layout.ragged", port, "a dense tensor")
        return kept & c.require(tensor.reordering == "NONE", "layout.order", port, "NONE", tensor.reordering)

    def _sizes(self) -> bool:
        c, tensors = self.c, self.tensors
        fixed = [c.no_dynamic(f"{port}.dim[{axis}]", tensors[port].dim[axis]) for port in "qkv" for axis in (1, 2)]
        if not all(fixed):
            return False
        fits = True
        for port in "qv":
            size = tensors[port].dim[2]
            fits &= c.require(size in HEAD_SIZES, "shape.range", f"{port}.dim[2]", list(HEAD_SIZES), shown(size))
        if "cu_seqlens" in tensors:
            fits &= c.between("cu_seqlens.dim[0]", tensors["cu_seqlens"].dim[0], 2, 2**31 - 1)
        for port in ("q", *_STATES):
            if port in tensors:
                rows = least(tensors[port].dim[0])
                fits &= c.require(rows <= MOST_ROWS, "shape.range", f"{port}.dim[0]", {"max": MOST_ROWS}, rows)
        return fits

    def _launchable(self, problem: DecodeProblem) -> tuple[DecodeConfig, ...]:
        """Configurations whose grids are large enough for the smallest sizes that a run can have."""
        bounds = self.tensors.get("cu_seqlens")
        tokens = least(self.tensors["q"].dim[0])
        sequences = tokens // problem.most if bounds is None else least(bounds.dim[0]) - 1
        needs = {config: ctas(problem, config, sequences) for config in configs(problem)}
        found = tuple(config for config in needs if needs[config] <= GRID_LIMIT)
        self.c.require(
            found, "shape.range", "grid", {"max": GRID_LIMIT}, min(needs.values()), "fewer sequences in a call"
        )
        return found

    def _lowered(self) -> Lowered:
        layouts = {port: self._layout(port) for port in _STATES if port in self.tensors}
        if "" not in layouts.values():
            same = len({*layouts.values()}) <= 1
            self.c.require(
                same, "layout.order", "final_state", layouts.get("initial_state"), layouts.get("final_state")
            )
        problem = self._problem(next(iter(layouts.values()), "v_major"))
        binding = self._binding(problem)
        self._strides(problem, binding)
        launchable = self._launchable(problem)
        if self.c.declines:
            return Lowered(None, None, tuple(self.c.declines))
        return Lowered(problem, binding, configs=launchable)

    def _layout(self, port: str) -> str:
        """v_major, k_major, or "" for a decline."""
        stride = self.tensors[port].stride
        if stride[3] == 1:
            return "v_major"
        if stride[2] == 1:
            return "k_major"
        expected = "stride 1 along K (the last axis) or along V (the axis before)"
        self.c.require(False, "layout.order", port, expected, [shown(size) for size in stride])
        return ""

    def _problem(self, layout: str) -> DecodeProblem:
        tensors, attrs = self.tensors, self.node.attrs
        (q_heads, key), (k_heads, _), (v_heads, value) = (tensors[port].dim[1:] for port in "qkv")
        dims: dict[str, Any] = {"heads_q": q_heads, "heads_k": k_heads, "heads_v": v_heads, "key": key, "value": value}
        safe = ""
        if attrs["safe_gate"]:
            sigmoid = self.op == "kda_decode" and attrs["gate_activation"] == "sigmoid"
            safe = "sigmoid" if sigmoid else "softplus"
        bound, scale = attrs.get("gate_lower_bound"), attrs["scale"]
        line = 2 if layout == "v_major" else 3
        states = [tensors[port] for port in _STATES if port in tensors]
        return DecodeProblem(
            variant=self.op.removesuffix("_decode"),
            io=self._dtype("q"),
            **dims,
            most=attrs["tokens_per_sequence"],
            output=self._dtype("O"),
            gate_dtype=self._dtype("g"),
            beta_dtype=self._dtype("beta"),
            index_dtype=self._dtype("cu_seqlens"),
            initial="initial_state" in tensors,
            final="final_state" in tensors,
            state_dtype=self._dtype("initial_state") or self._dtype("final_state"),
            layout=layout,
            dense=all(state.stride[line] == state.dim[5 - line] for state in states),
            slot_dtype=self._dtype("state_indices"),
            per_token="state_indices" in tensors and len(tensors["state_indices"].dim) == 2,
            accepted_dtype=self._dtype("num_accepted_tokens"),
            l2norm=attrs["use_qk_l2norm"],
            beta_sigmoid=attrs["use_beta_sigmoid"],
            neg_eigval=attrs["allow_neg_eigval"],
            domain=attrs["gate_domain"],
            safe=safe,
            lower_bound=float(LOWER_BOUND if bound is None else bound) if safe == "sigmoid" else 0.0,
            a_log_dtype=self._dtype("a_log"),
            bias_dtype=self._dtype("dt_bias"),
            scale=float(dims["key"] ** -0.5 if scale is None else scale),
        )

    def _dtype(self, port: str) -> str:
        return str(self.tensors[port].dtype) if port in self.tensors else ""

    def _binding(self, problem: DecodeProblem) -> Binding:
        slots = {tensor.index: slot for slot, tensor in enumerate(self.graph.operand_tensors())}
        places, rules = {}, {}
        for port, words in tensor_words(problem).items():
            axes = {word: _AXES[word] for word in words if word in _AXES}
            if port in ("a_log", "dt_bias"):
                axes["head"] = 0
            if "line" in words:
                axes["line"] = 2 if problem.layout == "v_major" else 3
            size = BYTES[self._dtype(port)]
            places[port] = Place(slots[self.tensors[port].index], size, axes)
            dense = size * (problem.key if problem.layout == "v_major" else problem.value)
            rules[port] = Rule(self._aligned(port, problem), dense if "line" in words and problem.dense else 0)
        return Binding(places, rules)

    def _aligned(self, port: str, problem: DecodeProblem) -> int:
        """Bytes that are accessed at once."""
        size = BYTES[self._dtype(port)]
        if port in _STATES:
            return ACCESS
        if port in "qk" or (problem.variant == "kda" and port in ("g", "dt_bias")):  # a lane's channels
            return min(ACCESS, size * problem.vector) if problem.layout == "v_major" else ACCESS
        return size

    def _strides(self, problem: DecodeProblem, binding: Binding) -> None:
        """Unit strides, and the rules as far as the graph's strides are known."""
        units = dict.fromkeys(("q", "k", "v", "O"), 2)
        if problem.variant == "kda":
            units |= {"g": 2, "dt_bias": 1}
        if problem.per_token:
            units["state_indices"] = 1
        for port, axis in units.items():
            if port in self.tensors and self.tensors[port].dim[axis] != 1:
                stride = self.tensors[port].stride[axis]
                self.c.require(stride == 1, "layout.stride", f"{port}.stride[{axis}]", 1, shown(stride))
        for port, place in binding.places.items():
            tensor, rule = self.tensors[port], binding.rules[port]
            multiple = rule.multiple // place.size
            for axis in place.axes.values():
                if tensor.dim[axis] == 1:
                    continue
                stride, subject = tensor.stride[axis], f"{port}.stride[{axis}]"
                aligned = divisor(stride) % multiple == 0
                self.c.require(aligned, "layout.alignment", subject, {"multiple_of": multiple}, shown(stride))
                most = STRIDE_LIMIT // place.size - 1
                if isinstance(stride, int):
                    self.c.require(0 <= stride <= most, "layout.stride", subject, {"min": 0, "max": most}, stride)

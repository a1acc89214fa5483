"""Evaluates a frozen graph on torch tensors, node by node. Imported by the plan and, as the oracle, by the kit.

Precision of a node: fp64 if its compute type is float64, if an input of it is float64, or if the evaluation asks for it;
else fp32. Integers are exact in int64. Every tensor is rounded to its declared type when it is produced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ._lower import Lowering, lowering
from ._lower._lengths import length_ports, sequence_lengths
from ._lower._math import Math
from ._memory import Layout, gather_ragged, ragged_rows, unpack
from ._rounding import decode, round_value

if TYPE_CHECKING:
    from cudnn_core import FrozenGraph

__all__ = ["Program", "at_sizes", "evaluate", "ragged_starts"]

Tensor = Any


def evaluate(
    graph: FrozenGraph,
    inputs: Mapping[int, Any],
    precision: str = "float64",
    round_virtual: bool = True,
    round_outputs: bool = True,
) -> dict[int, Tensor]:
    """The outputs of a graph, by uid, computed in ``precision`` ("float64" or "float32") from its inputs, by uid.

    An input is a Python number or a torch tensor of the declared shape. Its dtype is the declared one, or wider: values
    are rounded to the declared type. uint8 holds codes where an 8-bit float is declared; where a 4-bit type is declared it
    holds codes, one an element, or two a byte in storage order if it is 1-D of half the elements. A ragged input is either dense
    (padded to the declared shape) or 1-D storage. Outputs have the declared shape; a ragged one is dense with zero padding.
    Without ``round_virtual`` and ``round_outputs`` such tensors keep the precision of the computation.
    """
    first = next((x for x in inputs.values() if isinstance(x, torch.Tensor)), None)
    device = first.device if first is not None else torch.device("cpu")
    sized = graph
    if graph.dims:
        given = [(inputs.get(tensor.uid), tensor.rank) for tensor in graph.operand_tensors()]
        shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) and x.ndim == rank else None for x, rank in given]
        sized = at_sizes(graph, shapes)
    program = Program(sized, precision)
    env: dict[int, Tensor] = {}
    for tensor in sorted(sized.operand_tensors(), key=lambda tensor: tensor.ragged_offset is not None):
        if tensor.role == "input":
            env[tensor.index] = _input(tensor, inputs[tensor.uid], env, program, device)
    with torch.no_grad():
        program.run(env, device, round_virtual, round_outputs)
    return {tensor.uid: env[tensor.index] for tensor in sized.tensors if tensor.role == "output"}


def at_sizes(graph: FrozenGraph, shapes: Iterable[Any]) -> FrozenGraph:
    """The graph with the runtime sizes that its operands' shapes have, checked by the rows of its ops: what one name does not tie
    may disagree. Raises ExecutionError, naming the operand."""
    from cudnn_core import ExecutionError, lookup_op

    sized = graph.at(graph.sizes_from(shapes))
    for node in sized.nodes:
        for problem in lookup_op(node.op).validate(node):
            held = {**node.inputs, **node.outputs}.get(problem.port)
            label = getattr(held, "name", "") or f"{node.op}.{problem.port}"
            raise ExecutionError(
                f"operand {label}: {problem.message} (expected {problem.expected}, got {problem.actual})", operand=label
            )
    return sized


def ragged_starts(tensor: Any, env: Mapping[int, Tensor]) -> list[int]:
    """The B + 1 element offsets of a ragged tensor, scaled."""
    offsets = env[tensor.ragged_offset.index].reshape(-1)
    return [int(offset) * tensor.ragged_offset_multiplier for offset in offsets.tolist()]


class Program:
    """The nodes of a graph with fixed sizes, each with its lowering and precision."""

    __slots__ = ("_constants", "_steps", "graph", "lengths_of")

    def __init__(self, graph: FrozenGraph, precision: str = "") -> None:
        if precision not in ("", "float32", "float64"):
            raise ValueError(f"precision is 'float32' or 'float64', got {precision!r}")
        self.graph = graph
        self._constants = tuple(tensor for tensor in graph.tensors if tensor.is_constant)
        self._steps: tuple[tuple[Any, Lowering, torch.dtype], ...] = tuple(
            (node, lowering(node.op), _precision(node, precision)) for node in graph.nodes
        )
        # Index of a ragged tensor -> the sdpa inputs that hold its actual lengths, and which side's they are.
        self.lengths_of = dict(_ragged_lengths(graph))

    def ragged_lengths(self, tensor: Any, env: Mapping[int, Tensor]) -> list[int] | None:
        """The actual lengths of a ragged tensor's entries, where the graph has them as inputs."""
        side, tensors = self.lengths_of.get(tensor.index, ("", {}))
        known = {port: env[held.index] for port, held in tensors.items() if held.index in env}
        lengths = sequence_lengths(known, side, tensor.dim[0]) if known else None
        return None if lengths is None else [int(length) for length in lengths.tolist()]

    def run(
        self,
        env: dict[int, Tensor],
        device: torch.device,
        round_virtual: bool = True,
        round_outputs: bool = True,
    ) -> None:
        """Compute every tensor: ``env`` maps the index of each input to its value and gets all others."""
        for tensor in self._constants:
            env[tensor.index] = _scalar(tensor, tensor.value, device)
        for node, lower, dtype in self._steps:
            inputs = {
                port: tuple(env[item.index] for item in held) if isinstance(held, tuple) else env[held.index]
                for port, held in node.inputs.items()
            }
            results = lower(node, inputs, Math(dtype, device, round_virtual))
            for port, held in node.outputs.items():
                many = isinstance(held, tuple)
                made = results[port] if many else (results[port],)
                for tensor, value in zip(held if many else (held,), made, strict=True):
                    rounded = round_virtual if tensor.role == "virtual" else round_outputs
                    shaped = _shaped(value, tensor.dim)
                    env[tensor.index] = round_value(shaped, tensor.dtype) if rounded else shaped


def _precision(node: Any, asked: str) -> torch.dtype:
    if asked:
        return torch.float64 if asked == "float64" else torch.float32
    tensors = [item for held in node.inputs.values() for item in (held if isinstance(held, tuple) else (held,))]
    wide = node.compute_dtype == "float64" or any(tensor.dtype == "float64" for tensor in tensors)
    return torch.float64 if wide else torch.float32


def _shaped(value: Tensor, dim: tuple[int, ...]) -> Tensor:
    if tuple(value.shape) == tuple(dim):
        return value
    if value.ndim == len(dim) and all(have in (1, want) for have, want in zip(value.shape, dim, strict=True)):
        return value.expand(dim)
    return value.reshape(dim)


def _ragged_lengths(graph: FrozenGraph) -> Iterator[tuple[int, tuple[str, Any]]]:
    for node in graph.nodes:
        if node.op != "sdpa":
            continue
        for side, ports, names in (
            ("q", node.inputs, ("q",)),
            ("kv", node.inputs, ("k", "v")),
            ("q", node.outputs, ("O", "Stats", "score_max", "score_sum_exp")),
        ):
            lengths = {port: node.inputs[port] for port in length_ports(side) if port in node.inputs}
            for name in names:
                if lengths and name in ports and ports[name].ragged_offset is not None:
                    yield ports[name].index, (side, lengths)


def _scalar(tensor: Any, value: Any, device: torch.device) -> Tensor:
    if tensor.dtype == "boolean":
        return torch.full(tensor.dim, bool(value), dtype=torch.bool, device=device)
    kind = torch.float64 if isinstance(value, float) else torch.int64
    return round_value(torch.full(tensor.dim, value, dtype=kind, device=device), tensor.dtype)


def _input(tensor: Any, value: Any, env: Mapping[int, Tensor], program: Program, device: torch.device) -> Tensor:
    if not isinstance(value, torch.Tensor):
        return _scalar(tensor, value, device)
    value = value.to(device)
    layout = Layout(tensor.dtype, tensor.dim, tensor.stride)
    if tensor.ragged_offset is not None and value.ndim == 1:
        starts = ragged_starts(tensor, env)
        rows = ragged_rows(layout, starts, program.ragged_lengths(tensor, env))
        return _value(gather_ragged(value, layout, starts, rows), tensor.dtype)
    if layout.packed and value.dtype == torch.uint8 and tuple(value.shape) != tensor.dim:
        return decode(unpack(value, layout), tensor.dtype)
    return _value(value, tensor.dtype)


def _value(value: Tensor, dtype: str) -> Tensor:
    """A tensor in storage or in any numeric dtype as a value tensor."""
    name = str(value.dtype).removeprefix("torch.")
    if name.startswith(("float8_", "float4_")):
        value = value.view(torch.uint8)
    if value.dtype == torch.uint8 and (dtype.startswith("fp") or dtype == "int4"):
        return decode(value, dtype)
    if value.dtype in (torch.float16, torch.bfloat16):
        value = value.to(torch.float32)
    elif not value.dtype.is_floating_point and value.dtype != torch.bool:
        value = value.to(torch.int64)
    return round_value(value, dtype)

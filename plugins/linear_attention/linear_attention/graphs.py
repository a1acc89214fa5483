"""Graphs of one linear-attention node whose numbers of tokens and sequences are runtime sizes. Imports the core alone.

Imported by the plan cache of the front doors and by tests. A ``Configuration`` is everything that a plan depends on: layouts
without their leading sizes, attributes, and the most tokens and sequences. Those two are powers of two, so that batches that
grow meet few plans, and a workspace for the most of both stays in proportion to the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cudnn_core import Dim, Extent, Graph

__all__ = ["Configuration", "Layout", "build", "room"]

_LARGEST = 2**31 - 1
_TOKENS = ("q", "k", "v", "g", "beta", "O")
_STATES = ("initial_state", "final_state")
_SEQUENCES = ("state_indices", "num_accepted_tokens")


class Layout(NamedTuple):
    """A tensor: ``dtype`` by the core's name, ``inner`` sizes after the leading one (all of them for a_log and dt_bias), and
    the strides in elements."""

    port: str
    dtype: str
    inner: tuple[int, ...]
    stride: tuple[int, ...]


class Configuration(NamedTuple):
    """What a plan depends on. ``op`` is gdn, kda, gdn_decode or kda_decode; ``tokens`` and ``sequences`` are upper bounds."""

    op: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    attrs: tuple[tuple[str, Any], ...]
    tokens: int
    sequences: int


def room(size: int, least: int) -> int:
    """The power of two, at least ``least``, that ``size`` fits in."""
    return min(max(least, 1 << max(size - 1, 0).bit_length()), _LARGEST)


def build(configuration: Configuration) -> tuple[Graph, dict[str, int]]:
    """The graph, and the uid of every port's tensor.

    Runtime sizes are named tokens, sequences, boundaries (N + 1), slots (rows of a pool of states) and checkpoints. A KDA
    prefill with ``gate_activation`` softplus, which the row lacks, has that gate as pointwise nodes before it.
    """
    attrs = dict(configuration.attrs)
    io = next(layout.dtype for layout in configuration.inputs if layout.port == "q")
    graph = Graph(io_data_type=io, intermediate_data_type="float32", compute_data_type="float32")
    leading = _leading(configuration, attrs)
    tensors = {}
    for port, dtype, inner, stride in configuration.inputs:
        dim = (leading[port], *inner) if port in leading else inner
        tensors[port] = graph.tensor(dim=dim, stride=stride, data_type=dtype, name=port)
    softplus = configuration.op == "kda" and attrs.pop("gate_activation", "sigmoid") == "softplus"
    arguments = _softplus_gate(graph, tensors, attrs) if softplus else tensors
    made = getattr(graph, configuration.op)(**arguments, **attrs)
    outputs = dict(zip(("O", "final_state", "state_checkpoints"), made, strict=False))
    for port, dtype, inner, stride in configuration.outputs:
        dim = (leading[port], *inner)
        outputs[port].set_output(True).set_name(port).set_data_type(dtype).set_dim(dim).set_stride(stride)
        tensors[port] = outputs[port]
    return graph, {port: tensor.get_uid() for port, tensor in tensors.items()}


def _leading(configuration: Configuration, attrs: Mapping[str, Any]) -> dict[str, Extent]:
    """The leading size of every port that has a runtime size."""
    present = {layout.port for layout in configuration.inputs}
    sequences: Extent = Dim("sequences", min=1, max=configuration.sequences)
    tokens: Extent = Dim("tokens", min=1, max=configuration.tokens)
    if "cu_seqlens" not in present:
        if configuration.op.endswith("_decode"):
            tokens = attrs["tokens_per_sequence"] * sequences
        else:
            sequences = 1
    slots = Dim("slots", min=1, max=_LARGEST) if "state_indices" in present else sequences
    return {
        **dict.fromkeys(_TOKENS, tokens),
        **dict.fromkeys(_STATES, slots),
        **dict.fromkeys(_SEQUENCES, sequences),
        "cu_seqlens": Dim("boundaries", min=2, max=configuration.sequences + 1),
        "state_checkpoints": Dim("checkpoints", min=1, max=configuration.tokens + configuration.sequences),
    }


def _softplus_gate(graph: Graph, tensors: Mapping[str, Any], attrs: dict[str, Any]) -> dict[str, Any]:
    """The node's inputs with g = -exp(a_log) softplus(g + dt_bias) in their place, in float32."""
    arguments = dict(tensors)
    attrs["safe_gate"] = False
    gate = arguments["g"]
    if "dt_bias" in arguments:
        gate = graph.add(gate, arguments.pop("dt_bias"), name="gate_bias")
    gate = graph.softplus(gate, name="gate_softplus")
    if "a_log" in arguments:
        gate = graph.mul(gate, graph.exp(arguments.pop("a_log"), name="gate_amplitude"), name="gate_scaled")
    arguments["g"] = graph.neg(gate, name="gate")
    return arguments

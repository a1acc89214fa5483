"""Notes of a graph: what holds whichever engine the backend chooses. Imported by ``engines``.

They are upper bounds: an engine that the backend chooses may do better, and a caller that bars a note wants certainty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cudnn_core import DeviceInfo, FrozenGraph, FrozenNode

__all__ = ["ALWAYS", "notes"]

# ``declines_at_build``: whether cuDNN has an engine is known when a plan is built.
ALWAYS = frozenset({"cuda_graph", "declines_at_build"})

# Their operands of float32 go through tensor cores as TF32: on an H200 a result is off by 3e-3 of its size.
_ROUNDED = {"matmul": ("A", "B"), "conv_fprop": ("image", "weight"), "moe_grouped_matmul": ("token", "weight")}
# Hopper's tensor cores keep about 13 bits of a sum of fp8 products, whoever's kernel it is.
_PRODUCTS = frozenset({*_ROUNDED, "sdpa"})
_FP8 = frozenset({"fp8_e4m3", "fp8_e5m2"})
_SHORT_FP8_SUMS = frozenset({(9, 0)})
# Evaluated by the hardware's instructions for exponentials, sines and tanh, which have fewer bits than float32.
_APPROXIMATE = frozenset(
    {
        *("cos", "elu", "erf", "exp", "gelu", "gelu_approx_tanh", "log", "sigmoid", "sin", "softplus", "swish", "tan"),
        *("tanh", "elu_backward", "gelu_backward", "gelu_approx_tanh_backward", "sigmoid_backward"),
        *("softplus_backward", "swish_backward", "tanh_backward"),
    }
)
# max(NaN, x) is x.
_DROPS_NAN = frozenset({"max", "min", "relu_backward"})
_REDUCTIONS_DROP_NAN = frozenset({"MAX", "MIN", "AMAX"})


def notes(graph: FrozenGraph, device: DeviceInfo) -> frozenset[str]:
    """Those of the README's section "Numerics" that the graph has on the device, and ``ALWAYS``."""
    return ALWAYS.union(*(_of(node, device) for node in graph.nodes))


def _of(node: FrozenNode, device: DeviceInfo) -> Iterator[str]:
    op = node.op
    if op in _APPROXIMATE:
        yield "approximate_math"
    if op in _DROPS_NAN or (op == "reduction" and node.attrs["mode"] in _REDUCTIONS_DROP_NAN):
        yield "nan_not_propagated"
    if any(str(node.inputs[port].dtype) == "float32" for port in _ROUNDED.get(op, ())):
        yield "down_convert_inputs"
    if op in _PRODUCTS and device.compute_capability in _SHORT_FP8_SUMS:
        tensors = (
            tensor for value in node.inputs.values() for tensor in (value if isinstance(value, tuple) else (value,))
        )
        if any(str(tensor.dtype) in _FP8 for tensor in tensors):
            yield "reduced_precision_reduction"

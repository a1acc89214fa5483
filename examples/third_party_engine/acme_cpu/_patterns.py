"""What the engines read off a frozen graph: the parts of the pattern, or every reason why it is none.

``matmul_facts`` and ``norm_facts`` are pure functions of a graph, called through ``graph.facts``: computed once and shared by
check_support, estimate and build_plan. Tensors are kept as their ``index``, which ``graph.at(sizes)`` preserves; sizes and
strides may be runtime sizes (``Dim``), which compare and multiply like ints. No numpy here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn_core import Decline

if TYPE_CHECKING:
    from cudnn_core import FrozenGraph, FrozenNode, FrozenTensor

__all__ = ["ACTIVATIONS", "MatmulFacts", "NormFacts", "is_readable_by_blas", "matmul_facts", "norm_facts"]

# Activation -> buffers of the size of the output block that it needs.
ACTIVATIONS = {"": 0, "relu": 0, "gelu_approx_tanh": 1, "gelu": 3}


NORMS = ("layernorm", "rmsnorm", "acme_rmsnorm_gated")


class MatmulFacts(NamedTuple):
    """A (+ bias) (activation) chain. Indices of tensors; ``bias`` is None, an index, or a float for a constant."""

    a: int
    b: int
    out: int
    bias: int | float | None
    activation: str
    pack_a: bool
    pack_b: bool
    tile: bool


class NormFacts(NamedTuple):
    """One row normalisation. Indices of tensors, None where absent; ``epsilon`` is an index, or a float if it is fixed.

    first  the first normalised axis: rows are the axes before it, columns the others
    """

    op: str
    x: int
    scale: int
    bias: int | None
    gate: int | None
    epsilon: int | float
    y: int
    mean: int | None
    inverse: int | None
    first: int


def matmul_facts(graph: FrozenGraph) -> tuple[MatmulFacts | None, tuple[Decline, ...]]:
    """The pattern and no declines, or None and all of them."""
    declines = [*_common(graph)]
    products = [node for node in graph.nodes if node.op == "matmul"]
    if len(products) != 1:
        declines.append(Decline("op.count", "matmul", expected=1, actual=len(products)))
        return None, tuple(declines)
    (product,) = products
    bias: FrozenTensor | None = None
    activation = ""
    current = product.outputs["C"]
    seen = 1
    while current.role == "virtual":
        step = graph.nodes[current.consumers[0][0]] if len(current.consumers) == 1 else None
        if step is not None and step.op == "add" and bias is None and not activation:
            bias = step.inputs["in1" if step.inputs["in0"] is current else "in0"]
            if bias.producer is not None or step.outputs["out"].dim != current.dim:
                declines.append(_pattern("add", "an operand that broadcasts to the product", _shape(bias)))
        elif step is not None and step.op in ACTIVATIONS and not activation:
            activation = step.op
            declines += _relu_attributes(step)
        else:
            found = "several readers of one result" if step is None else f"{step.op} after {activation or 'add'}"
            declines.append(_pattern(product.op, "matmul [+ bias] [activation]", found))
            return None, tuple(declines)
        current = step.outputs["out"]
        seen += 1
    if seen != len(graph.nodes):
        declines.append(_pattern("graph", "one chain with one output", [node.op for node in graph.nodes]))
    a, b = product.inputs["A"], product.inputs["B"]
    for port, tensor in (("A", a), ("B", b)):
        if tensor.by_value or tensor.producer is not None:
            declines.append(_pattern(port, "an operand", "a constant" if tensor.by_value else "a result"))
    if any(step == 0 and size != 1 for step, size in zip(current.stride, current.dim, strict=True)):
        declines.append(Decline("layout.stride", _label(current), "distinct elements", _plain(current.stride)))
    if declines:
        return None, tuple(declines)
    constant = bias is not None and bias.is_constant
    facts = MatmulFacts(
        a.index,
        b.index,
        current.index,
        None if bias is None else float(bias.value or 0) if constant else bias.index,
        activation,
        pack_a=not is_readable_by_blas(a.stride),
        pack_b=not is_readable_by_blas(b.stride),
        # A residual of the output's shape may be the output's own buffer (the op table allows it for `add`), and a
        # product written there would destroy it.
        tile=current.stride[-1] != 1 or (bias is not None and bias.dim == current.dim),
    )
    return facts, ()


def norm_facts(graph: FrozenGraph) -> tuple[NormFacts | None, tuple[Decline, ...]]:
    """As ``matmul_facts``."""
    declines = [*_common(graph)]
    if len(graph.nodes) != 1:
        declines.append(Decline("op.count", "graph", expected=1, actual=len(graph.nodes)))
        return None, tuple(declines)
    (node,) = graph.nodes
    if node.op not in NORMS:
        declines.append(Decline("op.unsupported", node.op, list(NORMS), node.op))
        return None, tuple(declines)
    x, scale = node.inputs["input"], node.inputs["scale"]
    bias, gate = node.inputs.get("bias"), node.inputs.get("gate")
    y, mean = node.outputs["Y"], node.outputs.get("mean")
    inverse = node.outputs.get("inv_rms", node.outputs.get("inv_variance"))
    for port, tensor in node.inputs.items():
        if tensor.by_value and port != "epsilon":
            declines.append(_pattern(port, "an operand", "a host value"))
    first = _first_axis(node, x, scale)
    if first is None:
        actual = f"scale {_shape(scale)} for input {_shape(x)}"
        declines.append(_pattern("scale", "normalised axes that are the last ones", actual))
        return None, tuple(declines)
    declines += [
        Decline("layout.stride", _label(tensor), "dense, evenly spaced rows", _plain(tensor.stride))
        for tensor in (x, gate, y, mean, inverse)
        if tensor is not None and not _is_rows(tensor, first)
    ]
    declines += [
        Decline("layout.stride", _label(tensor), "dense", _plain(tensor.stride))
        for tensor in (scale, bias)
        if tensor is not None and not _is_rows(tensor, len(tensor.dim) - (len(x.dim) - first))
    ]
    epsilon = node.inputs.get("epsilon")
    if declines:
        return None, tuple(declines)
    facts = NormFacts(
        node.op,
        x.index,
        scale.index,
        _index(bias),
        _index(gate),
        node.attrs["epsilon"] if epsilon is None else float(epsilon.value) if epsilon.is_constant else epsilon.index,
        y.index,
        _index(mean),
        _index(inverse),
        first,
    )
    return facts, ()


def is_readable_by_blas(stride: Sequence[Any]) -> bool:
    """Whether one of the last two axes has unit stride, and the other one moves."""
    return bool((stride[-1] == 1 and stride[-2] != 0) or (stride[-2] == 1 and stride[-1] != 0))


def _common(graph: FrozenGraph) -> Iterator[Decline]:
    """Reasons that hold whatever the pattern is."""
    for node in graph.nodes:
        if node.compute_dtype not in ("float32", "not_set"):
            yield Decline("dtype.compute", node.op, ["float32"], str(node.compute_dtype))
    for tensor in graph.tensors:
        allowed = ("float32", "float64") if tensor.by_value else ("float32",)
        if tensor.dtype not in allowed and not tensor.is_constant:
            yield Decline("dtype.unsupported", _label(tensor), list(allowed), str(tensor.dtype))
        if tensor.reordering != "NONE":
            yield Decline("layout.order", _label(tensor), "NONE", tensor.reordering)
        if tensor.ragged_offset is not None:
            yield Decline("layout.ragged", _label(tensor), "dense", "ragged")


def _relu_attributes(node: FrozenNode) -> Iterator[Decline]:
    if node.op != "relu":
        return
    for name, plain in (("negative_slope", 0.0), ("lower_clip", None), ("upper_clip", None)):
        if node.attrs[name] != plain:
            yield Decline("op.attribute", f"relu.{name}", [plain], node.attrs[name])


def _first_axis(node: FrozenNode, x: FrozenTensor, scale: FrozenTensor) -> int | None:
    """The first normalised axis if all axes from there on are normalised (or of size 1), else None."""
    if node.op == "acme_rmsnorm_gated":
        return len(x.dim) - 1
    first = next((axis for axis, size in enumerate(scale.dim) if size != 1), None)
    if first is None or any(have != want for have, want in zip(scale.dim[first:], x.dim[first:], strict=True)):
        return None
    return first


def _is_rows(tensor: FrozenTensor, first: int) -> bool:
    """Whether the axes from ``first`` on are dense, and those before it step evenly."""
    running: Any = 1
    for size, step in reversed(list(zip(tensor.dim[first:], tensor.stride[first:], strict=True))):
        if size != 1 and step != running:
            return False
        running = running * (1 if size == 0 else size)  # an empty axis does not collapse the strides of the others
    running = None
    for size, step in reversed(list(zip(tensor.dim[:first], tensor.stride[:first], strict=True))):
        if size == 1:
            continue
        if running is not None and step != running:
            return False
        running = step * (1 if size == 0 else size)
    return True


def _pattern(subject: str, expected: object, actual: object) -> Decline:
    return Decline("op.pattern", subject, expected, actual)


def _index(tensor: FrozenTensor | None) -> int | None:
    return None if tensor is None else tensor.index


def _label(tensor: FrozenTensor) -> str:
    return tensor.name or f"tensor {tensor.uid}"


def _shape(tensor: FrozenTensor) -> str:
    return "x".join(map(str, tensor.dim))


def _plain(sizes: Sequence[Any]) -> list[object]:
    """JSON-able: runtime sizes by their names."""
    return [size if isinstance(size, int) else str(size) for size in sizes]

"""The row of ``matmul``. Imported by the op table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .._dims import Extent, product, same
from ._common import Checks, broadcast, dim_of, node_bytes, numel, shape_text
from ._schema import Attr, Cost, Node, Op, Param, Port, Problem, TensorSpec

__all__ = ["ROWS"]


def _infer(node: Node) -> Mapping[str, TensorSpec]:
    a, b = dim_of(node, "A"), dim_of(node, "B")
    if a is None or b is None:
        return {"C": TensorSpec()}
    if len(a) < 2 or len(b) < 2:
        return {"C": TensorSpec(dim=a)}
    batch, _ = broadcast((a[:-2], b[:-2]))
    return {"C": TensorSpec(dim=(*batch, a[-2], b[-1]))}


def _validate(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    a, b = node.inputs["A"], node.inputs["B"]
    for port, tensor in (("A", a), ("B", b)):
        check.require(len(tensor.dim) >= 2, port, "needs rows and columns", "rank 2 or more", shape_text(tensor.dim))
        check.require(tensor.dtype != "boolean", port, "wrong data type", "a number", tensor.dtype)
    if check.problems:
        return check.problems
    check.require(same(a.dim[-1], b.dim[-2]), "B", "A's columns and B's rows differ", a.dim[-1], b.dim[-2])
    _, agree = broadcast((a.dim[:-2], b.dim[:-2]))
    check.require(agree, "B", "batch sizes do not broadcast", shape_text(a.dim[:-2]), shape_text(b.dim[:-2]))
    if agree:
        check.inferred(_infer(node))
    return check.problems


def _dims(node: Node) -> Mapping[str, Extent]:
    a, b, c = (tensor.dim for tensor in (node.inputs["A"], node.inputs["B"], node.outputs["C"]))
    return {"m": a[-2], "n": b[-1], "k": a[-1], "batch": product(c[:-2])}


def _cost(node: Node) -> Cost:
    a = node.inputs["A"]
    return Cost(2.0 * numel(node.outputs["C"]) * a.dim[-1], node_bytes(node), tensor=True, dtype=a.dtype)


ROWS: tuple[Op, ...] = (
    Op(
        "matmul",
        inputs=(Port("A"), Port("B")),
        outputs=(Port("C"),),
        attrs=(Attr("padding", "float", 0.0),),
        infer=_infer,
        validate=_validate,
        dims=_dims,
        operands={"A": "A", "B": "B", "C": "C"},
        cost=_cost,
        builders={
            "matmul": (
                (Param("A"), Param("B"), Param("compute_data_type", None), Param("padding", 0.0), Param("name", "")),
                None,
            )
        },
        doc="C = A @ B. A [..., M, K], B [..., K, N] -> C [..., M, N]; the leading axes broadcast as in numpy. "
        "``padding`` is the value beyond the valid extents; every element is valid here, so it has no effect.",
    ),
)

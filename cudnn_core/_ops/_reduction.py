"""The row of ``reduction``. Imported by the op table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .._dims import Extent, product, same
from ._common import (
    INDEX,
    TAIL_OUT_DIMS,
    Checks,
    broadcasts_to,
    elements,
    like_strides,
    node_bytes,
    numel,
    shape_text,
)
from ._schema import Attr, Cost, Node, Op, Param, Port, Problem, TensorSpec

__all__ = ["ROWS"]

MODES = ("ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2", "MUL_NO_ZEROS")


def _infer(node: Node) -> Mapping[str, TensorSpec]:
    out = node.outputs.get("Y")
    dim = None if out is None else out.dim
    return {"Y": TensorSpec(dim, like_strides(node.inputs["input"], dim))}


def _validate(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    source, out = node.inputs["input"].dim, node.outputs["Y"].dim
    if "group_offset" in node.inputs:
        _validate_groups(check, source, out)
    else:
        check.require(
            broadcasts_to(out, source),
            "Y",
            "is not the input with some axes reduced to 1",
            f"each axis 1 or as in {shape_text(source)}",
            shape_text(out),
        )
    return check.problems


def _validate_groups(check: Checks, source: tuple[Extent, ...], out: tuple[Extent, ...]) -> None:
    offsets = elements(check.get("group_offset"))
    check.dtype("group_offset", *INDEX)
    if not (check.rank("input", 3) and check.rank("Y", 3)):
        return
    check.require(same(source[0], 1), "input", "group_offset needs rows in one batch", "(1, M, N)", shape_text(source))
    check.require(
        same(out[1], 1) and (same(out[2], 1) or same(out[2], source[2])),
        "Y",
        "is not one row per group",
        f"(G, 1, 1) or (G, 1, {source[2]})",
        shape_text(out),
    )
    groups = out[0]
    if isinstance(groups, int) and isinstance(offsets, int):
        check.require(
            offsets in (groups, groups + 1), "group_offset", "wrong size", f"{groups} or {groups + 1}", offsets
        )


def _dims(node: Node) -> Mapping[str, Extent]:
    source, out = node.inputs["input"], node.outputs["Y"]
    if "group_offset" in node.inputs:
        return {"rows": elements(out), "cols": source.dim[1]}
    reduced = (size for size, kept in zip(source.dim, out.dim, strict=True) if not same(size, kept))
    return {"rows": elements(out), "cols": product(reduced)}


def _cost(node: Node) -> Cost:
    return Cost(float(numel(node.inputs["input"])), node_bytes(node))


ROWS: tuple[Op, ...] = (
    Op(
        "reduction",
        inputs=(Port("input"), Port("group_offset", optional=True, data=False)),
        outputs=(Port("Y"),),
        attrs=(Attr("mode", "enum", choices=MODES),),
        infer=_infer,
        validate=_validate,
        dims=_dims,
        operands={"A": "input", "C": "Y"},
        cost=_cost,
        builders={
            "reduction": ((Param("input"), Param("group_offset", None), Param("mode"), *TAIL_OUT_DIMS), None),
        },
        doc="Y = input reduced over every axis on which Y has size 1; Y's dim comes from the caller (out_dims or "
        "set_dim). Modes: ADD, MUL, MIN, MAX, AMAX (largest magnitude), AVG, NORM1 (sum of magnitudes), NORM2 (root of "
        "the sum of squares), MUL_NO_ZEROS (product of the elements other than 0). With group_offset (G starts, or G + 1 "
        "boundaries, int32 or int64) input is [1, M, N] and Y [G, 1, N] or [G, 1, 1]: row g reduces rows "
        "group_offset[g] to group_offset[g + 1].",
    ),
)

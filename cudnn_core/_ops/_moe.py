"""The row of ``moe_grouped_matmul``. Imported by the op table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .._dims import Extent, same
from ._common import FLOATS, INDEX, TAIL_OUT_DIMS, Checks, dim_of, elements, node_bytes, shape_text
from ._schema import Attr, Cost, Node, Op, Param, Port, Problem, TensorSpec

__all__ = ["ROWS"]

_NEEDS = {
    "NONE": (),
    "GATHER": ("token_index",),
    "SCATTER": ("token_index", "token_ks"),
    "COMBINE": ("token_index", "token_ks", "top_k_scores"),
}
_ROUTING = ("token_index", "token_ks", "top_k_scores")


def _rows_port(node: Node) -> str:
    """The input whose axis 1 gives the rows of Y."""
    return {"GATHER": "token_index", "COMBINE": "top_k_scores"}.get(node.attrs["mode"], "token")


def _infer(node: Node) -> Mapping[str, TensorSpec]:
    rows, weight = dim_of(node, _rows_port(node)), dim_of(node, "weight")
    if rows is None or weight is None or len(rows) < 2 or len(weight) != 3:
        return {"Y": TensorSpec(dim_of(node, "token"))}
    return {"Y": TensorSpec((1, rows[1], weight[2]))}


def _validate(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    mode = node.attrs["mode"]
    for port in _NEEDS[mode]:
        check.require(port in node.inputs, port, f"mode {mode} needs it", "a tensor", "absent")
    for port in _ROUTING:
        check.require(
            port not in node.inputs or port in _NEEDS[mode], port, f"mode {mode} does not use it", "absent", "a tensor"
        )
    if not check.ranks(3, "token", "weight", *_ROUTING) or check.problems:
        return check.problems
    token, weight = node.inputs["token"], node.inputs["weight"]
    check.require(same(token.dim[0], 1), "token", "wrong shape", "(1, M, K)", shape_text(token.dim))
    check.require(
        same(token.dim[2], weight.dim[1]), "weight", "K differs from the tokens'", token.dim[2], weight.dim[1]
    )
    check.require(weight.dtype == token.dtype, "weight", "data type differs from token", token.dtype, weight.dtype)
    _validate_offsets(check, weight.dim[0])
    _validate_routing(check)
    if not check.problems:
        check.inferred(_infer(node))
    return check.problems


def _validate_offsets(check: Checks, experts: Extent) -> None:
    offsets = check.get("first_token_offset")
    check.dtype("first_token_offset", *INDEX)
    count = elements(offsets)
    check.require(
        same(offsets.dim[0], count) if offsets.dim else False,
        "first_token_offset",
        "is not a column",
        "(G, 1, 1) or (G + 1, 1, 1)",
        shape_text(offsets.dim),
    )
    if isinstance(count, int) and isinstance(experts, int):
        starts = experts > 0 and count > 0 and count % experts == 0
        check.require(
            starts or (experts > 0 and count > 1 and (count - 1) % experts == 0),
            "first_token_offset",
            "wrong number of offsets",
            f"G starts or G + 1 boundaries, G a multiple of {experts}",
            count,
        )


def _validate_routing(check: Checks) -> None:
    node = check.node
    mode, top_k, rows = node.attrs["mode"], node.attrs["top_k"], node.inputs["token"].dim[1]
    for port in ("token_index", "token_ks"):
        check.dtype(port, *INDEX)
    if mode == "GATHER":
        routed = node.inputs["token_index"].dim
        check.shape("token_index", (1, routed[1], 1))
    if mode not in ("SCATTER", "COMBINE"):
        return
    check.shape("token_index", (1, rows, 1))
    check.shape("token_ks", (1, rows, 1))
    experts = node.inputs["weight"].dim[0]
    if not check.require(
        top_k is not None and top_k >= 1 and (not isinstance(experts, int) or top_k <= experts),
        "top_k",
        f"mode {mode} needs the experts of a token",
        f"1 to {experts}",
        top_k,
    ):
        return
    if mode == "SCATTER":
        whole = not isinstance(rows, int) or rows % top_k == 0
        check.require(whole, "token", "rows are not top_k for each token", f"a multiple of {top_k}", rows)
    else:
        scores = node.inputs["top_k_scores"].dim
        check.dtype("top_k_scores", *FLOATS)
        check.shape("top_k_scores", (1, scores[1], top_k))
        if isinstance(rows, int) and isinstance(scores[1], int):
            check.require(
                rows == scores[1] * top_k, "token", "rows are not top_k for each token", scores[1] * top_k, rows
            )


def _dims(node: Node) -> Mapping[str, Extent]:
    token, weight = node.inputs["token"].dim, node.inputs["weight"].dim
    rows = node.inputs["token_index"].dim[1] if node.attrs["mode"] == "GATHER" else token[1]
    return {"m": rows, "n": weight[2], "k": weight[1], "experts": weight[0]}


def _cost(node: Node) -> Cost:
    dims = _dims(node)
    flops = 2.0
    for name in ("m", "n", "k"):
        size = dims[name]
        assert isinstance(size, int)
        flops *= size
    return Cost(flops, node_bytes(node), tensor=True, dtype=node.inputs["token"].dtype)


ROWS: tuple[Op, ...] = (
    Op(
        "moe_grouped_matmul",
        group="moe",
        inputs=(
            Port("token"),
            Port("weight"),
            Port("first_token_offset", data=False),
            Port("token_index", optional=True, data=False),
            Port("token_ks", optional=True, data=False),
            Port("top_k_scores", optional=True),
        ),
        outputs=(Port("Y"),),
        attrs=(Attr("mode", "enum", "NONE", tuple(_NEEDS)), Attr("top_k", "int", None)),
        infer=_infer,
        validate=_validate,
        dims=_dims,
        operands={"A": "token", "B": "weight", "C": "Y"},
        cost=_cost,
        builders={
            "moe_grouped_matmul": (
                (
                    Param("token"),
                    Param("weight"),
                    Param("first_token_offset"),
                    Param("token_index", None),
                    Param("token_ks", None),
                    Param("mode", None),
                    Param("top_k", None),
                    Param("top_k_scores", None, keyword_only=True),
                    *TAIL_OUT_DIMS,
                ),
                None,
            )
        },
        doc="Rows first_token_offset[g] to first_token_offset[g + 1] times weight[g % E]. token [1, M, K], weight [E, K, N], "
        "first_token_offset int32 or int64, G boundaries and the end [G + 1, 1, 1], or the G starts alone (the last group "
        "takes the rest; with one expert two entries or more are boundaries), G being a multiple of E. NONE: Y [1, M, N], rows grouped by expert already. GATHER: grouped row r is token row token_index[r]; token_index "
        "[1, R, 1] -> Y [1, R, N]. SCATTER: result r goes to row token_index[r] * top_k + token_ks[r] of Y [1, M, N]; "
        "token_index and token_ks [1, M, 1]. COMBINE: Y [1, T, N] row t is the sum over its top_k results r of "
        "top_k_scores[t, token_ks[r]] * result r, where token_index[r] = t; top_k_scores [1, T, top_k], M = T * top_k.",
    ),
)

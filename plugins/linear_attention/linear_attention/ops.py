"""Rows of the ops that this plugin adds: ``gdn_decode`` and ``kda_decode``. Named by ``cudnn_plugin.toml``; imports the core alone.

H and HV are the heads of q and v, HO = max(H, HV) those of gates, output and state; K and V the head dimensions; T the tokens
of N sequences, each of at most S = ``tokens_per_sequence`` tokens; P the rows of a pool of states. Names of ports and
attributes are those of the core's rows ``gdn`` and ``kda``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from cudnn_core import Extent, nbytes
from cudnn_core.op_schema import Attr, Cost, Node, Op, Param, Port, Problem, TensorSpec

__all__ = ["GDN_DECODE", "KDA_DECODE", "MOST_TOKENS"]

MOST_TOKENS = 8
"""The most tokens of a sequence in one call."""

_FLOATS = ("float64", "float32", "bfloat16", "float16")
_INDEX = ("int32", "int64")
_PER_TOKEN = ("q", "k", "v", "g", "beta")
_OPTIONAL = ("cu_seqlens", "initial_state", "a_log", "dt_bias", "state_indices", "num_accepted_tokens")


def _dim(node: Node, port: str) -> tuple[Extent, ...] | None:
    tensor = node.inputs.get(port)
    return None if tensor is None or tensor.dim is None else tuple(tensor.dim)


def _larger(a: Extent, b: Extent) -> Extent:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else a


def _sequences(node: Node) -> Extent | None:
    """N; None where nothing tells it."""
    rows = _dim(node, "state_indices")
    if rows:
        return rows[0]
    bounds = _dim(node, "cu_seqlens")
    if bounds and isinstance(bounds[0], int):
        return bounds[0] - 1
    states = _dim(node, "initial_state")
    if states:
        return states[0]
    tokens, most = (_dim(node, "q") or (None,))[0], node.attrs["tokens_per_sequence"]
    if "cu_seqlens" in node.inputs or tokens is None:
        return None
    return _divided(tokens, most)


def _divided(tokens: Any, by: int) -> Extent | None:
    """``tokens / by``, a size or the product of a number and runtime sizes, or None where that is none."""
    factor = tokens if isinstance(tokens, int) else getattr(tokens, "factor", 1)
    if by < 1 or factor % by:
        return None
    if isinstance(tokens, int) or by == 1:
        return tokens // by if isinstance(tokens, int) else tokens
    divided: Extent = math.prod(tokens.dims, start=factor // by)
    return divided


def _infer(node: Node) -> Mapping[str, TensorSpec]:
    q, v = _dim(node, "q"), _dim(node, "v")
    if q is None or v is None or len(q) != 3 or len(v) != 3:
        return {"O": TensorSpec(v)}
    heads = _larger(q[1], v[1])
    specs = {"O": TensorSpec((q[0], heads, v[2]))}
    if node.attrs["output_final_state"]:
        initial, rows = node.inputs.get("initial_state"), _sequences(node)
        if initial is not None and "state_indices" in node.inputs and initial.dim:
            rows = initial.dim[0]
        dtype = "float32" if initial is None else initial.dtype
        dim = None if rows is None else (rows, heads, v[2], q[2])
        specs["final_state"] = TensorSpec(dim, dtype=None if dtype == "not_set" else dtype)
    return specs


class _Findings:
    """The problems of one node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.problems: list[Problem] = []

    def get(self, port: str) -> Any:
        found = self.node.inputs.get(port)
        return self.node.outputs.get(port) if found is None else found

    def require(self, condition: bool, port: str, message: str, expected: object = None, actual: object = None) -> bool:
        if not condition:
            self.problems.append(Problem(port, message, expected, actual))
        return condition

    def shape(self, port: str, expected: tuple[Extent, ...]) -> None:
        tensor = self.get(port)
        if tensor is not None:
            self.require(tuple(tensor.dim) == expected, port, "wrong shape", _text(expected), _text(tensor.dim))

    def rank(self, port: str, *ranks: int) -> bool:
        tensor = self.get(port)
        expected = " or ".join(f"rank {rank}" for rank in ranks)
        return tensor is None or self.require(len(tensor.dim) in ranks, port, "wrong rank", expected, _text(tensor.dim))

    def dtype(self, port: str, *allowed: str) -> None:
        tensor = self.get(port)
        if tensor is not None:
            self.require(tensor.dtype in allowed, port, "wrong data type", " or ".join(allowed), str(tensor.dtype))


def _text(dim: Iterable[Extent]) -> str:
    return "(" + ", ".join(map(str, dim)) + ")"


def _validate(node: Node) -> Iterable[Problem]:
    found = _Findings(node)
    ranks = [found.rank(port, 3) for port in "qkv"]
    if all(ranks):
        _validate_shapes(found)
    _validate_dtypes(found)
    _validate_modes(found)
    _validate_states(found)
    return found.problems


def _validate_shapes(found: _Findings) -> None:
    node = found.node
    q, k, v = (tuple(node.inputs[port].dim) for port in "qkv")
    for port, dim in (("k", k), ("v", v)):
        found.require(dim[0] == q[0], port, "number of tokens differs from q", q[0], dim[0])
    found.require(k[2] == q[2], "k", "head dimension differs from q", q[2], k[2])
    found.require(k[1] in (q[1], v[1]), "k", "number of heads is neither q's nor v's", f"{q[1]} or {v[1]}", k[1])
    if isinstance(q[1], int) and isinstance(v[1], int):
        small, large = sorted((q[1], v[1]))
        grouped = small > 0 and large % small == 0
    else:
        grouped = q[1] == v[1]
    found.require(grouped, "v", "heads of q and v are not in groups", q[1], v[1])
    heads = _larger(q[1], v[1])
    channels = (q[2],) if node.op == "kda_decode" else ()
    found.shape("g", (q[0], heads, *channels))
    found.shape("beta", (q[0], heads))
    found.shape("a_log", (heads,))
    found.shape("dt_bias", (heads, *channels))
    found.shape("O", (q[0], heads, v[2]))
    _validate_tokens(found, q[0])
    sequences = _sequences(node)
    state = node.inputs.get("initial_state")
    if state is not None and found.rank("initial_state", 4):
        rows = state.dim[0] if "state_indices" in node.inputs or sequences is None else sequences
        found.shape("initial_state", (rows, heads, v[2], q[2]))
    specs = _infer(node)
    if "final_state" in specs and specs["final_state"].dim is not None:
        found.shape("final_state", specs["final_state"].dim)


def _validate_tokens(found: _Findings, tokens: Extent) -> None:
    node = found.node
    most, sequences = node.attrs["tokens_per_sequence"], _sequences(node)
    if not found.require(
        1 <= most <= MOST_TOKENS, "tokens_per_sequence", "is out of range", f"1 to {MOST_TOKENS}", most
    ):
        return
    if "cu_seqlens" not in node.inputs:
        wanted = None if sequences is None else most * sequences
        found.require(
            wanted is not None and tokens == wanted,
            "q",
            "without cu_seqlens every sequence has tokens_per_sequence tokens",
            f"a multiple of {most}" if wanted is None else wanted,
            tokens,
        )
    elif found.rank("cu_seqlens", 1):
        bounds = node.inputs["cu_seqlens"].dim[0]
        if isinstance(bounds, int) and (sequences is None or isinstance(sequences, int)):
            wanted = max(bounds, 1) if sequences is None else sequences + 1
            found.require(bounds == wanted, "cu_seqlens", "wrong number of boundaries", f"N + 1 = {wanted}", bounds)


def _validate_dtypes(found: _Findings) -> None:
    inputs = found.node.inputs
    q = inputs["q"]
    found.dtype("q", *_FLOATS)
    for port in "kv":
        found.require(
            inputs[port].dtype == q.dtype, port, "data type differs from q", str(q.dtype), str(inputs[port].dtype)
        )
    for port in ("g", "a_log", "dt_bias", "initial_state", "final_state", "O"):
        found.dtype(port, *_FLOATS)
    found.dtype("beta", *dict.fromkeys(("float32", str(q.dtype))))
    for port in ("cu_seqlens", "state_indices", "num_accepted_tokens"):
        found.dtype(port, *_INDEX)


def _validate_modes(found: _Findings) -> None:
    attrs, inputs = found.node.attrs, found.node.inputs
    scale, safe, bound = attrs["scale"], attrs["safe_gate"], attrs.get("gate_lower_bound")
    found.require(scale is None or math.isfinite(scale), "scale", "is not finite", "a finite number", scale)
    for port in ("a_log", "dt_bias"):
        found.require(safe or port not in inputs, port, "needs safe_gate", True, safe)
    found.require(
        not (safe and attrs["gate_domain"] == "linear"),
        "gate_domain",
        "safe_gate takes logits, not gates",
        "log",
        attrs["gate_domain"],
    )
    found.require(
        attrs["use_beta_sigmoid"] or not attrs["allow_neg_eigval"],
        "allow_neg_eigval",
        "needs use_beta_sigmoid (it doubles the sigmoid)",
        False,
        True,
    )
    softplus = attrs.get("gate_activation") == "softplus"
    found.require(safe or not softplus, "gate_activation", "softplus needs safe_gate", True, safe)
    if bound is not None:
        found.require(safe, "gate_lower_bound", "needs safe_gate", True, safe)
        found.require(not softplus, "gate_lower_bound", "is of the sigmoid form", "sigmoid", "softplus")
        found.require(math.isfinite(bound) and bound < 0, "gate_lower_bound", "is not negative", "< 0", bound)


def _validate_states(found: _Findings) -> None:
    node = found.node
    attrs, inputs = node.attrs, node.inputs
    initial, final = inputs.get("initial_state"), node.outputs.get("final_state")
    pooled, overwrite = "state_indices" in inputs, attrs["overwrite_initial_state"]
    missing = ("a tensor", "absent")
    found.require(
        not pooled or initial is not None, "state_indices", "needs initial_state: it selects its rows", *missing
    )
    found.require(not overwrite or initial is not None, "initial_state", "overwrite_initial_state needs it", *missing)
    found.require(
        not overwrite or attrs["output_final_state"], "overwrite_initial_state", "needs output_final_state", True, False
    )
    # Rows of the pool that no sequence names have no value elsewhere.
    found.require(
        overwrite or not pooled or not attrs["output_final_state"],
        "state_indices",
        "with output_final_state needs overwrite_initial_state",
        True,
        overwrite,
    )
    per_step = False
    if pooled and found.rank("state_indices", 1, 2):
        rows = inputs["state_indices"].dim
        per_step = len(rows) == 2
        if per_step:
            found.shape("state_indices", (rows[0], attrs["tokens_per_sequence"]))
    if "num_accepted_tokens" in inputs:
        found.require(
            per_step,
            "num_accepted_tokens",
            "needs state_indices with a slot for every token",
            "state_indices [N, tokens_per_sequence]",
            _text(inputs["state_indices"].dim) if pooled else "absent",
        )
        sequences = _sequences(node)
        if sequences is not None:
            found.shape("num_accepted_tokens", (sequences,))
    if initial is not None and final is not None:
        found.require(
            final.dtype == initial.dtype,
            "final_state",
            "data type differs from initial_state",
            str(initial.dtype),
            str(final.dtype),
        )


def _dims(node: Node) -> Mapping[str, Extent]:
    q, v, sequences = node.inputs["q"].dim, node.inputs["v"].dim, _sequences(node)
    named: dict[str, Extent] = {
        "total_tokens": q[0],
        "tokens_per_sequence": node.attrs["tokens_per_sequence"],
        "heads_k": node.inputs["k"].dim[1],
        "heads_q": q[1],
        "heads_v": v[1],
        "head_dim_k": q[2],
        "head_dim_v": v[2],
    }
    if sequences is not None:
        named["sequences"] = sequences
    return named


def _cost(node: Node) -> Cost:
    """7 K V operations a token and head; of a pool only the rows that are read and written count."""
    tokens, heads, value = node.outputs["O"].dim
    key = node.inputs["q"].dim[2]
    tensors = [tensor for ports in (node.inputs, node.outputs) for tensor in ports.values()]
    states = {id(node.inputs.get("initial_state")), id(node.outputs.get("final_state"))}
    moved = sum(nbytes(tensor.dtype, math.prod(tensor.dim)) for tensor in tensors if id(tensor) not in states)
    sequences = _sequences(node)
    count = sequences if isinstance(sequences, int) else tokens
    one = count * heads * value * key
    if "initial_state" in node.inputs:
        moved += nbytes(node.inputs["initial_state"].dtype, one)
    if "final_state" in node.outputs:
        slots = node.inputs.get("state_indices")
        written = node.attrs["tokens_per_sequence"] if slots is not None and len(slots.dim) == 2 else 1
        moved += written * nbytes(node.outputs["final_state"].dtype, one)
    return Cost(7.0 * tokens * heads * key * value, moved)


def _when_final(attrs: Mapping[str, Any]) -> bool:
    return bool(attrs["output_final_state"])


_SHARED = (
    Attr("scale", "float", None),
    Attr("output_final_state", "bool", False),
    Attr("use_qk_l2norm", "bool", False),
    Attr("use_beta_sigmoid", "bool", False),
    Attr("allow_neg_eigval", "bool", False),
    Attr("safe_gate", "bool", False),
    Attr("gate_domain", "enum", "log", ("log", "linear")),
)
_KDA_GATE = (
    Attr("gate_lower_bound", "float", None),
    Attr("gate_activation", "enum", "sigmoid", ("sigmoid", "softplus")),
)
_LAST = (Attr("overwrite_initial_state", "bool", False), Attr("tokens_per_sequence", "int", 1))

_DOC = (
    "S = diag(a) S; u = beta (v - S^T k); S = S + k u^T; o = scale S^T q for each token and head, with scale = K^-0.5 by "
    "default, a = exp(min(g, 0)) (g itself, held to [1e-10, 1], with gate_domain linear). q [T, H, K], k [T, H or HV, K], "
    "v [T, HV, V], {gate}, beta [T, HO] -> O [T, HO, V]; HO = max(H, HV), the smaller number of heads being shared by groups "
    "in order. A sequence has tokens_per_sequence tokens (1 to 8), or, with cu_seqlens [N + 1], as many as its boundaries "
    "say: those past the limit count for nothing, and their O is 0. Boundaries are held to [0, T], then to the first and the "
    "last one. A sequence whose second boundary is not the larger has no tokens, and tokens of no sequence have O = 0; where "
    "boundaries decrease, several sequences may have a token, each computes it, and each element of its O is that of one of "
    "them, undefined which. initial_state [N, HO, V, K], or a pool [P, HO, V, K] of "
    "which state_indices [N] selects rows; final_state likewise, in place with overwrite_initial_state. state_indices "
    "[N, tokens_per_sequence] names the row that keeps the state after each token; the sequence starts from the row in "
    "column num_accepted_tokens - 1, held to the columns (absent: column 0). A sequence whose starting row is negative or "
    "past the pool is skipped: its O is 0 and it writes no state; such a row for one token keeps no state of it. "
    "The rows that a call's sequences name must differ. use_qk_l2norm divides q and k by sqrt(sum of squares + 1e-6), "
    "unrounded; use_beta_sigmoid takes logits, allow_neg_eigval doubles their sigmoid. {activation}"
)  # fmt: skip


def _row(name: str, attrs: tuple[Attr, ...], gate: str, activation: str) -> Op:
    return Op(
        name,
        group="linear_attention",
        inputs=(
            *(Port(port) for port in _PER_TOKEN),
            Port("cu_seqlens", optional=True, data=False),
            Port("initial_state", optional=True),
            Port("a_log", optional=True),
            Port("dt_bias", optional=True),
            Port("state_indices", optional=True, data=False),
            Port("num_accepted_tokens", optional=True, data=False),
        ),
        outputs=(Port("O"), Port("final_state", when=_when_final)),
        attrs=attrs,
        infer=_infer,
        validate=_validate,
        dims=_dims,
        operands={"q": "q", "k": "k", "v": "v", "g": "g", "O": "O", "state": "initial_state"},
        cost=_cost,
        builders={
            name: (
                (
                    *(Param(port) for port in _PER_TOKEN),
                    *(Param(port, None) for port in _OPTIONAL),
                    *(Param(attr.name, None) for attr in attrs),
                ),
                None,
            )
        },
        reference=f"linear_attention.reference:{name}",
        alias=(("final_state", "initial_state"),),
        updates={"overwrite_initial_state": ("final_state", "initial_state")},
        doc=_DOC.format(gate=gate, activation=activation),
    )


GDN_DECODE = _row(
    "gdn_decode",
    (*_SHARED, *_LAST),
    "g [T, HO]",
    "safe_gate: g = -exp(a_log) softplus(g + dt_bias), a_log and dt_bias [HO].",
)
KDA_DECODE = _row(
    "kda_decode",
    (*_SHARED, *_KDA_GATE, *_LAST),
    "g [T, HO, K]",
    "safe_gate: g = gate_lower_bound sigmoid(exp(a_log) (g + dt_bias)), a_log [HO], dt_bias [HO, K], the bound -5 by "
    "default; with gate_activation softplus: g = -exp(a_log) softplus(g + dt_bias).",
)

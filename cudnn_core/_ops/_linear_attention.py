"""Rows of ``gdn`` and ``kda`` (group ``linear_attention``). Imported by the op table.

H and HV are the heads of q and v, HO = max(H, HV) those of gates, output and state; K and V the head dimensions; T the
tokens of N packed sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from .._dims import Extent, same
from ._common import FLOATS, INDEX, TAIL_OUT_DIMS, Checks, dim_of, node_bytes, shape_text
from ._schema import Attr, Cost, Node, Op, Param, Port, Problem, TensorSpec

__all__ = ["ROWS"]


def _larger(a: Extent, b: Extent) -> Extent:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else a


def _sequences(node: Node) -> Extent | None:
    """N; None where runtime sizes hide it."""
    bounds = dim_of(node, "cu_seqlens")
    if "cu_seqlens" not in node.inputs:
        return 1
    if bounds is not None and len(bounds) == 1 and isinstance(bounds[0], int):
        return bounds[0] - 1
    rows = dim_of(node, "state_indices") or dim_of(node, "initial_state")
    return rows[0] if rows else None


def _state_rows(node: Node) -> Extent | None:
    """Rows of final_state: the pool's with state_indices, else one for each sequence."""
    state = dim_of(node, "initial_state")
    if "state_indices" in node.inputs and state:
        return state[0]
    return _sequences(node)


def _checkpoint_rows(tokens: Extent, sequences: Extent | None, every: int) -> int | None:
    """Room for the ceil(length / every) checkpoints of every sequence."""
    if isinstance(tokens, int) and isinstance(sequences, int):
        return max(tokens // every + sequences, 1)
    return None


def _infer(node: Node) -> Mapping[str, TensorSpec]:
    q, v, attrs = dim_of(node, "q"), dim_of(node, "v"), node.attrs
    if q is None or v is None or len(q) != 3 or len(v) != 3:
        return {"O": TensorSpec(v)}
    heads = _larger(q[1], v[1])
    state = (heads, v[2], q[2])
    specs = {"O": TensorSpec((q[0], heads, v[2]))}
    if attrs["output_final_state"]:
        rows = _state_rows(node)
        initial = node.inputs.get("initial_state")
        dtype = "float32" if initial is None else initial.dtype
        specs["final_state"] = TensorSpec(
            None if rows is None else (rows, *state), dtype=None if dtype == "not_set" else dtype
        )
    every = attrs["checkpoint_every_n_tokens"]
    if every > 0:
        count = _checkpoint_rows(q[0], _sequences(node), every)
        specs["state_checkpoints"] = TensorSpec(None if count is None else (count, *state))
    return specs


def _validate(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    if check.ranks(3, "q", "k", "v"):
        _validate_shapes(check)
    _validate_dtypes(check)
    _validate_modes(check)
    _validate_states(check)
    return check.problems


def _validate_shapes(check: Checks) -> None:
    node = check.node
    q, k, v = (node.inputs[port].dim for port in ("q", "k", "v"))
    for port, dim in (("k", k), ("v", v)):
        check.require(same(dim[0], q[0]), port, "number of tokens differs from q", q[0], dim[0])
    check.require(same(k[2], q[2]), "k", "head dimension differs from q", q[2], k[2])
    check.require(
        same(k[1], q[1]) or same(k[1], v[1]), "k", "number of heads is neither q's nor v's", f"{q[1]} or {v[1]}", k[1]
    )
    heads, grouped = q[1], v[1]
    if isinstance(heads, int) and isinstance(grouped, int):
        small, large = sorted((heads, grouped))
        check.require(small > 0 and large % small == 0, "v", "heads of q and v are not in groups", heads, grouped)
    else:
        check.require(same(heads, grouped), "v", "heads of q and v are not in groups", heads, grouped)
    gates = (q[0], _larger(heads, grouped))
    channels = (q[2],) if node.op == "kda" else ()
    check.shape("g", (*gates, *channels))
    check.shape("beta", gates)
    check.shape("a_log", gates[1:])
    check.shape("dt_bias", (gates[1], *channels))
    check.shape("O", (*gates, v[2]))
    if node.attrs["checkpoint_every_n_tokens"] >= 0:
        specs = _infer(node)
        for port in ("final_state", "state_checkpoints"):
            if port in specs:
                check.shape(port, specs[port].dim)
    state = check.get("initial_state")
    if state is not None:
        rows = state.dim[0] if "state_indices" in node.inputs and state.dim else _sequences(node)
        if check.rank("initial_state", 4) and rows is not None:
            check.shape("initial_state", (rows, gates[1], v[2], q[2]))


def _validate_dtypes(check: Checks) -> None:
    inputs = check.node.inputs
    q = inputs["q"]
    check.dtype("q", *FLOATS)
    for port in ("k", "v"):
        check.require(inputs[port].dtype == q.dtype, port, "data type differs from q", q.dtype, inputs[port].dtype)
    for port in ("g", "a_log", "dt_bias", "initial_state", "final_state", "state_checkpoints", "O"):
        check.dtype(port, *FLOATS)
    check.dtype("beta", *dict.fromkeys(("float32", str(q.dtype))))
    check.dtype("cu_seqlens", *INDEX)
    check.dtype("state_indices", *INDEX)
    check.rank("cu_seqlens", 1)
    bounds = dim_of(check.node, "cu_seqlens")
    if bounds is not None and len(bounds) == 1 and isinstance(bounds[0], int):
        check.require(bounds[0] >= 1, "cu_seqlens", "has no first boundary", "N + 1", shape_text(bounds))


def _validate_modes(check: Checks) -> None:
    attrs, inputs = check.node.attrs, check.node.inputs
    scale, every, safe = attrs["scale"], attrs["checkpoint_every_n_tokens"], attrs["safe_gate"]
    check.require(scale is None or math.isfinite(scale), "scale", "is not finite", "a finite number", scale)
    check.require(every >= 0, "checkpoint_every_n_tokens", "is negative", ">= 0", every)
    for port in ("a_log", "dt_bias"):
        check.require(safe or port not in inputs, port, "needs safe_gate", True, safe)
    check.require(
        not (safe and attrs["gate_domain"] == "linear"),
        "gate_domain",
        "safe_gate takes logits, not gates",
        "log",
        attrs["gate_domain"],
    )
    check.require(
        attrs["use_beta_sigmoid"] or not attrs["allow_neg_eigval"],
        "allow_neg_eigval",
        "needs use_beta_sigmoid (it doubles the sigmoid)",
        False,
        True,
    )
    bound = attrs.get("gate_lower_bound")
    if bound is not None:
        check.require(safe, "gate_lower_bound", "needs safe_gate", True, safe)
        check.require(math.isfinite(bound) and bound < 0, "gate_lower_bound", "is not negative", "< 0", bound)


def _validate_states(check: Checks) -> None:
    node = check.node
    attrs, initial, final = node.attrs, check.get("initial_state"), check.get("final_state")
    overwrite = attrs["overwrite_initial_state"]
    check.requires("state_indices", "initial_state", why=": it selects rows of that pool")
    sequences = _sequences(node)
    if "state_indices" in node.inputs and sequences is not None:
        check.shape("state_indices", (sequences,))
    check.require(
        not overwrite or initial is not None,
        "initial_state",
        "overwrite_initial_state needs it",
        "a tensor",
        "absent",
    )
    check.require(
        not overwrite or attrs["output_final_state"],
        "overwrite_initial_state",
        "needs output_final_state",
        True,
        attrs["output_final_state"],
    )
    # Without it the rows of final_state that no sequence names would have no value.
    check.require(
        overwrite or "state_indices" not in node.inputs or not attrs["output_final_state"],
        "state_indices",
        "with output_final_state needs overwrite_initial_state",
        True,
        overwrite,
    )
    if initial is not None and final is not None:
        check.require(
            final.dtype == initial.dtype,
            "final_state",
            "data type differs from initial_state",
            initial.dtype,
            final.dtype,
        )


def _dims(node: Node) -> Mapping[str, Extent]:
    q, v, sequences = node.inputs["q"].dim, node.inputs["v"].dim, _sequences(node)
    named: dict[str, Extent] = {
        "total_tokens": q[0],
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
    """The recurrence: a token costs a head K V for the decay and 2 K V each for reading, writing and output."""
    tokens, heads, value = node.outputs["O"].dim
    key = node.inputs["q"].dim[2]
    return Cost(7.0 * tokens * heads * key * value, node_bytes(node), tensor=True, dtype=node.inputs["q"].dtype)


def _when_final(attrs: Mapping[str, Any]) -> bool:
    return bool(attrs["output_final_state"])


def _when_checkpoints(attrs: Mapping[str, Any]) -> bool:
    return bool(attrs["checkpoint_every_n_tokens"] > 0)


_OPTIONAL = ("initial_state", "a_log", "dt_bias", "state_indices")


def _row(name: str, attrs: tuple[Attr, ...], doc: str) -> Op:
    return Op(
        name,
        group="linear_attention",
        inputs=(
            *(Port(port) for port in ("q", "k", "v", "g", "beta")),
            Port("cu_seqlens", optional=True, data=False),
            Port("initial_state", optional=True),
            Port("a_log", optional=True),
            Port("dt_bias", optional=True),
            Port("state_indices", optional=True, data=False),
        ),
        outputs=(Port("O"), Port("final_state", when=_when_final), Port("state_checkpoints", when=_when_checkpoints)),
        attrs=attrs,
        infer=_infer,
        validate=_validate,
        dims=_dims,
        operands={"q": "q", "k": "k", "v": "v", "g": "g", "O": "O", "state": "initial_state"},
        cost=_cost,
        builders={
            name: (
                (
                    *(Param(port) for port in ("q", "k", "v", "g", "beta")),
                    Param("cu_seqlens", None),
                    *(Param(port, None) for port in _OPTIONAL),
                    *(Param(attr.name, None) for attr in attrs),
                    *TAIL_OUT_DIMS,
                ),
                None,
            )
        },
        alias=(("final_state", "initial_state"),),
        updates={"overwrite_initial_state": ("final_state", "initial_state")},
        doc=doc,
    )


_BEFORE_BOUND = (
    Attr("scale", "float", None),
    Attr("output_final_state", "bool", False),
    Attr("use_qk_l2norm", "bool", False),
    Attr("checkpoint_every_n_tokens", "int", 0),
    Attr("use_beta_sigmoid", "bool", False),
    Attr("allow_neg_eigval", "bool", False),
    Attr("safe_gate", "bool", False),
    Attr("gate_domain", "enum", "log", ("log", "linear")),
)
_AFTER_BOUND = (Attr("batch_invariant", "bool", False), Attr("overwrite_initial_state", "bool", False))

_STEP = (
    "S = diag(a) S; u = beta (v - S^T k); S = S + k u^T; o = scale S^T q for each token and head, with scale = K^-0.5 by "
    "default, a = exp(min(g, 0)) (g itself, held to [1e-10, 1], with gate_domain linear). "
)
_SHAPES = (
    "q [T, H, K], k [T, H or HV, K], v [T, HV, V], {gate}, beta [T, HO] -> O [T, HO, V]; HO = max(H, HV), the smaller "
    "number of heads being shared by groups in order. cu_seqlens [N + 1] int32 or int64 bounds the sequences (absent: "
    "one): boundary n counts as the largest of boundaries 0 to n, each held to [0, T], so that one that decreases makes an "
    "empty sequence and a token belongs to at most one; O of tokens in no sequence is 0. initial_state [N, HO, V, K], or a pool of which state_indices [N] selects rows (one outside the pool reads "
    "zeros and writes nothing); final_state likewise, in place with overwrite_initial_state. state_checkpoints "
    "[max(T // n + N, 1), HO, V, K] holds, sequence after sequence, the states that enter tokens 0, n, 2 n, ... use_qk_l2norm divides q and k by sqrt(sum of squares + 1e-6); use_beta_sigmoid takes logits, "
    "allow_neg_eigval doubles their sigmoid. "
)

ROWS: tuple[Op, ...] = (
    _row(
        "gdn",
        (*_BEFORE_BOUND, *_AFTER_BOUND),
        "Gated delta rule with one gate a head. "
        + _STEP
        + _SHAPES.format(gate="g [T, HO]")
        + "safe_gate: g = -exp(a_log) softplus(g + dt_bias), a_log and dt_bias [HO].",
    ),
    _row(
        "kda",
        (*_BEFORE_BOUND, Attr("gate_lower_bound", "float", None), *_AFTER_BOUND),
        "Gated delta rule with one gate a key channel. "
        + _STEP
        + _SHAPES.format(gate="g [T, HO, K]")
        + "safe_gate: g = gate_lower_bound sigmoid(exp(a_log) (g + dt_bias)), a_log [HO], dt_bias [HO, K], the bound "
        "-5 by default.",
    ),
)

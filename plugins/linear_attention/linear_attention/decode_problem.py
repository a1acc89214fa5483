"""``DecodeProblem``: what a decode kernel is compiled for, and the words of its arguments. Imports neither the core nor a DSL.

Made by ``decode_lowering``, read by ``kernels.decode`` and ``decode_plan``. Numbers of tokens, sequences and rows of a pool, strides
and addresses are arguments of a launch: one kernel serves every batch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = [
    "ACCESS",
    "BYTES",
    "MOST_ROWS",
    "DecodeConfig",
    "DecodeProblem",
    "argument_words",
    "configs",
    "ctas",
    "default_config",
    "tensor_words",
]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
ACCESS = 16
"""Bytes of a vector access: the most of every architecture."""
MOST_ROWS = 2**31 - 1
"""Of tokens, and of a pool of states: their indices are int32."""
WARP_ELEMENTS = 1024
"""Elements of a state that a warp keeps: 32 registers a thread. With twice as many, some kernels spill registers."""
TILES = (8, 16, 32, 64)
"""Rows of V that a CTA may have."""
LARGEST_DEFAULT = 32
"""Rows of a CTA in a batch that fills the GPU: 4 warps at K = 128."""


@dataclass(frozen=True)
class DecodeProblem:
    """A decode of op gdn_decode or kda_decode. Data types have the core's names; "" is that of a tensor which is absent.

    variant      "gdn" (a gate for each head) or "kda" (one for each key channel)
    io, output   of q, k and v; of O: float32, bfloat16 or float16
    heads_q, heads_k, heads_v   heads of q, k and v: the smaller of q's and v's divides the larger, k has those of either
    key, value   head dimensions K and V: 64 or 128
    most         tokens of a sequence, at most (with index_dtype) or exactly: 1 to 8
    gate_dtype, beta_dtype      of g and beta
    index_dtype  of cu_seqlens; "": every sequence has ``most`` tokens
    initial, final   whether there is an initial state, a final state; state_dtype: of either ("" if there is none)
    layout       of states, which are [rows, HO, V, K]: "v_major" (stride 1 along K) or "k_major" (stride 1 along V)
    dense        lines of states (rows of K, k_major: of V) follow each other without gaps
    slot_dtype   of state_indices: states are rows of a pool; "": row n is that of sequence n
    per_token    state_indices has a slot for every token: [N, most], and the state after each token is kept
    accepted_dtype   of num_accepted_tokens
    l2norm       q and k are divided by sqrt(sum of squares + 1e-6)
    beta_sigmoid, neg_eigval    beta holds logits; and their sigmoid is doubled
    domain, safe, lower_bound   the form of the gate: see ``kernels.gates.Gate``
    a_log_dtype, bias_dtype     of a_log [HO] and dt_bias (gdn: [HO], kda: [HO, K])
    scale        of q
    """

    variant: str
    io: str
    heads_q: int
    heads_k: int
    heads_v: int
    key: int
    value: int
    most: int = 1
    output: str = "bfloat16"
    gate_dtype: str = "float32"
    beta_dtype: str = "float32"
    index_dtype: str = ""
    initial: bool = False
    final: bool = False
    state_dtype: str = ""
    layout: str = "v_major"
    dense: bool = True
    slot_dtype: str = ""
    per_token: bool = False
    accepted_dtype: str = ""
    l2norm: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    domain: str = "log"
    safe: str = ""
    lower_bound: float = 0.0
    a_log_dtype: str = ""
    bias_dtype: str = ""
    scale: float = 1.0

    @property
    def heads(self) -> int:
        """HO: heads of gates, output and states. Head h reads head h * heads_x // HO of q, k and v."""
        return max(self.heads_q, self.heads_v)

    @property
    def vector(self) -> int:
        """Elements of a state side by side that a thread has: an access."""
        return ACCESS // BYTES[self.state_dtype or "float32"]

    def canonical(self) -> str:
        """Canonical JSON: equal texts mean equal kernels."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class DecodeConfig:
    """How a kernel divides the work: a CTA has ``rows`` rows of V of one head of one sequence, and ``warps`` warps share them."""

    rows: int
    warps: int


_STATE = ("address", "slot", "head", "line")


def tensor_words(problem: DecodeProblem) -> dict[str, tuple[str, ...]]:
    """The words of every tensor that the problem has, by port, in order.

    address     of the first element, in device memory
    token, head, row, slot   stride of tokens, heads, sequences, rows of states
    line        of a state: stride along V (k_major: along K)
    Strides count bytes and are below 2^31; an axis of one element has stride 0. The last axis of q, k, v, O, kda's g and
    dt_bias, and state_indices [N, most], has stride 1.
    """
    ports: dict[str, tuple[str, ...]] = dict.fromkeys(("q", "k", "v", "g", "beta", "O"), ("address", "token", "head"))
    present = {
        "cu_seqlens": (problem.index_dtype, ("address", "row")),
        "initial_state": (problem.initial, _STATE),
        "final_state": (problem.final, _STATE),
        "state_indices": (problem.slot_dtype, ("address", "row")),
        "num_accepted_tokens": (problem.accepted_dtype, ("address", "row")),
        "a_log": (problem.a_log_dtype, ("address", "head")),
        "dt_bias": (problem.bias_dtype, ("address", "head")),
    }
    return ports | {port: words for port, (there, words) in present.items() if there}


def argument_words(problem: DecodeProblem) -> dict[str, int]:
    """The index of every word: "tokens", "sequences", "pool" (rows of states), then "q.address", "q.token", "q.head", ..."""
    words = ["tokens", "sequences", "pool"]
    words += [f"{port}.{word}" for port, names in tensor_words(problem).items() for word in names]
    return {word: index for index, word in enumerate(words)}


def configs(problem: DecodeProblem) -> tuple[DecodeConfig, ...]:
    """Every configuration that a problem can have, small tiles first."""
    found = (DecodeConfig(rows, rows * problem.key // WARP_ELEMENTS) for rows in TILES)
    return tuple(config for config in found if config.warps)


def ctas(problem: DecodeProblem, config: DecodeConfig, sequences: int) -> int:
    """Of a grid."""
    return sequences * problem.heads * (problem.value // config.rows)


def default_config(problem: DecodeProblem, sequences: int, sm_count: int) -> DecodeConfig:
    """The largest tile, up to 32 rows, that gives every SM a CTA; else the smallest one."""
    offered = configs(problem)
    for config in reversed(offered):
        if config.rows <= LARGEST_DEFAULT and ctas(problem, config, sequences) >= sm_count:
            return config
    return offered[0]

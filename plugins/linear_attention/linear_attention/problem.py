"""``Problem``: what a prefill kernel is compiled for. Made by ``lowering``, read by the kernels; imports neither the core nor a DSL.

Everything but sizes is in it: numbers of tokens, sequences and rows of a pool, strides and addresses are arguments of a launch
(``arguments``), so that one kernel serves every batch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["CHUNK", "SLAB", "Problem"]

CHUNK = 64
"""Tokens of a chunk."""
SLAB = 64
"""Rows of V that a CTA keeps the state of."""


@dataclass(frozen=True)
class Problem:
    """A prefill of op gdn or kda. Data types have the core's names; "" is that of a tensor which is absent.

    variant      "gdn" (a gate for each head) or "kda" (one for each key channel)
    io           of q, k, v and o: "bfloat16" or "float16"
    heads_q, heads_k, heads_v   heads of q, k and v: the smaller of q's and v's divides the larger, k has those of either
    key, value   head dimensions K and V: 64 or 128
    gate_dtype, beta_dtype      of g and beta
    index_dtype  of cu_seqlens; "": one sequence, all tokens
    initial, final   whether there is an initial state, a final state; state_dtype: of either ("" if there is none)
    state_layout     "v_major" (stride 1 along K) or "k_major" (stride 1 along V), of either; states are [rows, HO, V, K]
    slot_dtype   of state_indices: states are rows of a pool; "": row n is that of sequence n
    overwrite    the final state is written to where the initial state is read
    l2norm       q and k are divided by sqrt(sum of squares + 1e-6)
    beta_sigmoid, neg_eigval    beta holds logits; and their sigmoid is doubled
    domain       "log": g holds natural logarithms; "linear": decays
    safe         "": g holds gates; "softplus": logits, log decay = -exp(a_log) softplus(g + dt_bias); "sigmoid": logits,
                 log decay = lower_bound sigmoid(exp(a_log) (g + dt_bias))
    lower_bound  of the sigmoid form; 0.0 elsewhere
    a_log_dtype, bias_dtype     of a_log [HO] and dt_bias (gdn: [HO], kda: [HO, K])
    scale        of q
    batch_invariant  results of a sequence don't depend on the others of the call, to the last bit
    """

    variant: str
    io: str
    heads_q: int
    heads_k: int
    heads_v: int
    key: int
    value: int
    gate_dtype: str = "float32"
    beta_dtype: str = "float32"
    index_dtype: str = ""
    initial: bool = False
    final: bool = False
    state_dtype: str = ""
    state_layout: str = "v_major"
    slot_dtype: str = ""
    overwrite: bool = False
    l2norm: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    domain: str = "log"
    safe: str = ""
    lower_bound: float = 0.0
    a_log_dtype: str = ""
    bias_dtype: str = ""
    scale: float = 1.0
    batch_invariant: bool = False

    @property
    def heads(self) -> int:
        """HO: heads of gates, output and states. Head h reads head h * heads_x // HO of q, k and v."""
        return max(self.heads_q, self.heads_v)

    @property
    def pooled(self) -> bool:
        """Whether state_indices selects the rows of states."""
        return bool(self.slot_dtype)

    @property
    def slabs(self) -> int:
        """Slabs of 64 rows of V."""
        return self.value // SLAB

    def canonical(self) -> str:
        """Canonical JSON: equal texts mean equal kernels."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

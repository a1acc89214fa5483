"""The arguments of a prefill kernel: from the block of int64 words (``arguments``) to tensors of device memory.

``unpack`` runs in the host function; its ``Args`` cross the boundary of a kernel. Unit strides and the divisibility of the others
are static in the layouts; extents are Int32 and strides Int64, so that offsets have 64 bits. ``bounds``, ``state_row`` and
``segment`` are for device code: what a boundary or a value of state_indices means, the same for every kernel. Imported by the prefill kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from ..arguments import argument_words, tensor_words
from ..problem import Problem

__all__ = ["ELEMENTS", "Args", "bounds", "segment", "state_row", "unpack"]

ELEMENTS: dict[str, Any] = {
    "float64": cutlass.Float64,
    "float32": cutlass.Float32,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "int64": cutlass.Int64,
    "int32": cutlass.Int32,
}
"""How the elements of a data type are declared to the DSL."""

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}
_ALIGNED = 16


class Args(NamedTuple):
    """tokens (T), sequences (N), pool (rows of states, 0 without), segments (S), sms (SMs of the GPU): Int32.

    workspace   pointer to bytes, the records (``records``); summaries: pointer to float32 in it; 256-byte aligned
    boundaries  [N + 1] int32 in the workspace: 0 <= first <= ... <= last <= T, what ``boundaries`` makes of cu_seqlens, which no other
                kernel reads; None without cu_seqlens
    summaries   where S > 1, [N, HO, S, V + K, K]: of segment s < S - 1 rows 0..V-1 are the state that leaves it from a seed of 0
                (s = 0: from the initial state), and once they are combined the state that leaves it; the others are rows of
                the identity carried through it. Rows 0..V-1 of segment S - 1 are the initial state

    q [T, H, K], k [T, HK, K], v [T, HV, V], o [T, HO, V]: channel stride 1, addresses and other strides multiples of 16 bytes
    g [T, HO], kda: [T, HO, K] with channel stride 1 and the others multiples of 16 bytes; beta [T, HO]
    initial_state, final_state [rows, HO, V, K]: stride 1 along K (k_major: along V), the others and the addresses multiples of 16 bytes
    cu_seqlens [N + 1], state_indices [N], a_log [HO], dt_bias [HO] (kda: [HO, K])
    A tensor that the problem lacks is None.
    """

    tokens: Any
    sequences: Any
    pool: Any
    segments: Any
    sms: Any
    workspace: Any
    boundaries: Any
    summaries: Any
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    o: Any
    cu_seqlens: Any
    initial_state: Any
    final_state: Any
    state_indices: Any
    a_log: Any
    dt_bias: Any


def unpack(problem: Problem, words: Int64) -> Args:
    """The arguments in the block at host address ``words``. For host code."""
    names = argument_words(problem)
    pointer = cute.make_ptr(Int64, words, cute.AddressSpace.generic, assumed_align=8)
    block = cute.make_tensor(pointer, cute.make_layout(len(names)))
    return _Unpacker(problem, {name: block[index] for name, index in names.items()}).args()


class _Unpacker:
    def __init__(self, problem: Problem, words: dict[str, Int64]) -> None:
        self.problem, self.words = problem, words
        self.present = tensor_words(problem)

    def args(self) -> Args:
        p = self.problem
        tokens, sequences, pool = (Int32(self.words[word]) for word in ("tokens", "sequences", "pool"))
        kda = p.variant == "kda"
        channels = (p.key,) if kda else ()
        state = (pool, p.heads, p.value, p.key)
        return Args(
            tokens=tokens,
            sequences=sequences,
            pool=pool,
            segments=Int32(self.words["segments"]),
            sms=Int32(self.words["sms"]),
            workspace=self._pointer("workspace", cutlass.Uint8, 256),
            boundaries=self._boundaries(sequences + 1),
            summaries=self._pointer("summaries", cutlass.Float32, 256),
            q=self._tensor("q", p.io, (tokens, p.heads_q, p.key), True),
            k=self._tensor("k", p.io, (tokens, p.heads_k, p.key), True),
            v=self._tensor("v", p.io, (tokens, p.heads_v, p.value), True),
            g=self._tensor("g", p.gate_dtype, (tokens, p.heads, *channels), kda),
            beta=self._tensor("beta", p.beta_dtype, (tokens, p.heads), False),
            o=self._tensor("O", p.io, (tokens, p.heads, p.value), True),
            cu_seqlens=self._tensor("cu_seqlens", p.index_dtype, (sequences + 1,), False),
            initial_state=self._tensor("initial_state", p.state_dtype, state, True),
            final_state=self._tensor("final_state", p.state_dtype, state, True),
            state_indices=self._tensor("state_indices", p.slot_dtype, (sequences,), False),
            a_log=self._tensor("a_log", p.a_log_dtype, (p.heads,), False),
            dt_bias=self._tensor("dt_bias", p.bias_dtype, (p.heads, *channels), False),
        )

    def _boundaries(self, count: Int32) -> Any:
        if not self.problem.index_dtype:
            return None
        return cute.make_tensor(self._pointer("boundaries", Int32, _BYTES["int32"]), cute.make_layout((count,)))

    def _tensor(self, port: str, dtype: str, shape: tuple[Any, ...], aligned: bool) -> Any:
        """``aligned``: the address and all strides but that of 1 are multiples of 16 bytes."""
        if port not in self.present:
            return None
        size = _BYTES[dtype]
        divby = _ALIGNED // size if aligned else 1
        named = [word for word in self.present[port] if word != "address"]
        strides = [cute.assume(self.words[f"{port}.{word}"], divby=divby) for word in named]
        if "row" in named:
            strides[3 if self.problem.state_layout == "v_major" else 2] = 1
        strides += [1] * (len(shape) - len(strides))
        pointer = self._pointer(f"{port}.address", ELEMENTS[dtype], _ALIGNED if aligned else size)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=tuple(strides)))

    def _pointer(self, word: str, element: Any, align: int) -> Any:
        return cute.make_ptr(element, self.words[word], cute.AddressSpace.gmem, assumed_align=align)


def bounds(args: Args, sequence: Int32) -> tuple[Int32, Int32]:
    """First token and number of tokens of a sequence. For device code."""
    if args.boundaries is None:
        return Int32(0), args.tokens
    start = args.boundaries[sequence]
    return start, args.boundaries[sequence + 1] - start


def segment(chunks: Int32, segments: Int32, index: Int32) -> tuple[Int32, Int32]:
    """First chunk of segment ``index`` of ``segments``, and how many chunks it has: the same for all, fewer or none for the last
    ones. For device code."""
    each = (chunks + segments - 1) // segments
    first = cutlass.min(index * each, chunks)
    return first, cutlass.min(each, chunks - first)


def state_row(args: Args, sequence: Int32) -> tuple[Int32, Any]:
    """The row of states of a sequence, and whether it has one: a slot outside the pool reads zeros and keeps nothing. The row is in
    the pool in either case. For device code of a problem with states."""
    if args.state_indices is None:
        return sequence, cutlass.Boolean(True)
    slot = args.state_indices[sequence]
    kind = type(slot)
    inside = (slot >= kind(0)) & (slot < kind(args.pool))
    return Int32(cutlass.max(cutlass.min(slot, kind(args.pool) - kind(1)), kind(0))), inside

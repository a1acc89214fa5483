"""Public failures of linear-attention kernels, and the tests that would find them here.

Row -> (where it was reported, what must hold, tests). A test is the name of a function in ``properties``, or a number: every
case that lists the row among its invariants. Rows about a backward have no test until there is one; rows for kernels alone
say where their test belongs.
"""

from __future__ import annotations

__all__ = ["TABLE"]

CASES = "cases"
BACKWARD = "backward"
KERNEL = "kernel"

TABLE: dict[int, tuple[str, str, tuple[str, ...]]] = {
    1: ("fla#99, fla#111", "finite for every g in [-inf, 0]: exponents are masked before exp", (CASES,)),
    2: ("fla#104", "g = 0 is the rule without gates", (CASES, "ungated_is_the_delta_rule")),
    3: ("fla#537", "near-collinear and repeated keys of norm 1", (CASES,)),
    4: ("FlashKDA#34, vllm-project/FlashKDA#10", "identical keys with beta near 1: an inverse by substitution", (CASES,)),
    5: ("FlashKDA#1, vllm#43833, FlashKDA#7", "any finite gate: exact, or declined", (CASES,)),
    6: ("FlashKDA#3, tokenspeed#847", "the form of a gate is explicit; softplus is not the bounded sigmoid", (CASES,)),
    7: ("fla#1240", "outputs before t do not depend on tokens from t on, to the last bit", ("causal",)),
    8: ("cuLA#89, sgl-jax#1587", "a chunk belongs to one sequence", (CASES, "alone_as_in_a_batch")),
    9: ("fla#1134", "no load outside the operands: padding and gaps may be NaN", (CASES, "other_slots_untouched")),
    10: ("fla#640, fla#984", "gradients on the real GPU", (BACKWARD,)),
    11: ("fla#607, fla#913", "gradients on each architecture", (BACKWARD,)),
    12: ("flashinfer#3329", "barriers do not depend on lengths: one long and forty short, replayed", (CASES, "replays")),
    13: ("flashinfer#3698", "initial states and sequences of no token in one call", (CASES,)),
    14: ("FlashKDA#24", "final state of an empty sequence is its initial state", (CASES,)),
    15: ("cudnn-frontend#1013", "a last sequence of one token", (CASES,)),
    16: ("cudnn-frontend#994", "small head dimensions are declined", ("test_skeleton",)),
    17: ("cudnn-frontend#1160, #1130", "the same bits again on each architecture", (KERNEL, "replays")),
    18: ("cudnn-frontend#1056, #556", "strides are honoured or declined", (CASES,)),
    19: ("sglang#23353, flashinfer#2793", "a negative slot skips its sequence and writes zeros", (CASES, "other_slots_untouched")),
    20: ("tpu-inference#2408", "a slot that is used again starts as the caller leaves it", ("slots_are_reused",)),
    21: ("sglang#38975, vllm#53877", "beta and g keep float32 up to the update", (CASES, "prefill_then_decode")),
    22: ("vllm#54146", "outputs of a large state in float16 are finite where the true ones are", (CASES,)),
    23: ("xllm#2247, vllm#56419, vllm#50021", "accepted counts are bounded; 0 starts from the first slot",
         (CASES, "speculation_follows_plain_decoding")),
    24: ("unsloth-zoo#1092, mamba#1015", "65,536 heads times sequences; offsets beyond 2^31", (CASES, "far_offsets")),
    25: ("fla#1003, vllm#45819", "a sequence alone and in a batch, to the last bit", (CASES, "alone_as_in_a_batch")),
    26: ("FlashQLA#28", "gradients of gates at strong decay", (BACKWARD,)),
    27: ("vllm#25032, vllm#34948", "indices out of range are masked", (CASES, "decreasing_boundaries", "decreasing_boundaries_of_a_decode")),
}  # fmt: skip

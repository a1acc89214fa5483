"""The scan of the prefill on operand tiles from the workspace, in the emulator, against the recurrence in fp64."""

from __future__ import annotations

import _kernels
import pytest
from linear_attention.problem import Problem


def problem(io="bfloat16", key=64, value=64, heads=1, **options):
    return Problem(
        "kda", io, heads, heads, heads, key, value,
        **{"index_dtype": "int32", "scale": key**-0.5, "final": True, "state_dtype": "float32", **options},
    )  # fmt: skip


def test_a_chunk_and_its_final_state():
    case = _kernels.Case(problem(), [64])
    _kernels.run(case)
    _kernels.check(case)

"""The cases of the other tests are graphs that the reference can run: their inputs are sound."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from backend_cases import CASES  # noqa: E402
from running import reference  # noqa: E402


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_reference_runs_the_case(case):
    graph, inputs, outputs = case.build("cpu")
    for tensor, values in reference(graph, inputs, outputs, "cpu").items():
        assert values.float().isfinite().any(), tensor
        assert values.float().abs().max() > 0

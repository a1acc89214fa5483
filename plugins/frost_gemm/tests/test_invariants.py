"""The README's table of invariants names tests that exist; and the facts of architectures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from frost_gemm.facts import arch_facts

from cudnn_core import DeviceInfo

PLUGIN = Path(__file__).parents[1]
TESTS = [PLUGIN / "tests", PLUGIN.parents[1] / "tests"]


def test_every_named_test_exists():
    if not TESTS[1].joinpath("device").is_dir():
        pytest.skip("the tests of the core are not here")
    defined = {
        name
        for folder in TESTS
        for path in folder.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    table = (PLUGIN / "README.md").read_text().partition("\n## Invariants\n")[2]
    named = set(re.findall(r"`(test_\w+)`", table))
    assert len(named) > 60
    assert named <= defined, named - defined


def _device(sm):
    return DeviceInfo.from_json({"type": "cuda", "compute_capability": list(sm), "sm_count": 100})


@pytest.mark.parametrize("sm", [(8, 0), (8, 9), (10, 1), (11, 0), (12, 0), (12, 1)])
def test_an_architecture_without_a_row_has_no_facts(sm):
    """Not those of its neighbour."""
    assert arch_facts(_device(sm)) is None


@pytest.mark.parametrize(
    ("sm", "target", "mma"),
    [
        ((9, 0), "sm_90a", "wgmma"),
        ((10, 0), "sm_100a", "tcgen05"),
        ((10, 3), "sm_103a", "tcgen05"),
        ((10, 7), "sm_107a", "tcgen05"),
    ],
)
def test_each_row_is_its_own_target(sm, target, mma):
    found = arch_facts(_device(sm))
    assert (found.target, found.mma, found.sm_count) == (target, mma, 100)
    assert (found.tmem_columns > 0) == (mma == "tcgen05")

"""On Hopper: the prefill kernels of GDN and KDA on every case, at the sizes of models, over several calls and replays.

A case runs on the engine or is declined with a documented code: ``la_cases.kernels`` says which.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("cutlass")

import torch
from la_cases import kernels, large, on_device, properties
from la_cases.running import check, outputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OPS = ("gdn", "kda")
both = pytest.mark.parametrize("op", OPS)


@pytest.fixture(scope="module", autouse=True)
def supported():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the prefill kernels are for compute capability 9.0")


@pytest.fixture(autouse=True)
def _memory():
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("case", [case for op in OPS for case in kernels.taken(op)], ids=str)
def test_case(case):
    check(case, outputs(case, "cuda", kernels.ENGINES[case.op]))


@pytest.mark.parametrize("case", [case for case in kernels.UNSUPPORTED if not case.decodes], ids=str)
def test_a_case_without_a_kernel_is_declined(case):
    assert kernels.codes(case) == {kernels.declined(case)}


@pytest.mark.parametrize("case", large.LARGE, ids=str)
def test_large_case(case):
    check(case, outputs(case, "cuda", kernels.ENGINES[case.op]), on_device.expected(case, "cuda"))


FULL = {
    "alone_as_in_a_batch": {"lengths": (5, 64, 0, 700, 1, 4096, 63)},
    "causal": {"tokens": 700, "cuts": (1, 15, 16, 17, 40, 63, 64, 65, 127, 128, 300, 448, 640, 699)},
    "decreasing_boundaries": {"sizes": ((700, 30), (4000, 500), (9000, 4), (5000, 3000))},
    "one_plan_for_all_sizes": {"sizes": ((9, 1), (4000, 3), (1, 1), (33, 7), (16000, 200))},
    "other_slots_untouched": {},
    "prefill_then_decode": {
        "prompt": 1000,
        "steps": 4096,
        "tolerance": 7e-3,
    },  # 5e-3 of a prefill, and a step's rounding
    "slots_are_reused": {},
    "ungated_is_the_delta_rule": {},
    "replays": {"long": 3000, "short": 40, "times": 1000},
}


@both
@pytest.mark.parametrize("name", FULL)
def test_property(op, name):
    getattr(properties, name)(op, "cuda", kernels.PAIRS[op], **FULL[name])


@both
def test_far_offsets(op):
    _needs(80 << 30)
    properties.far_offsets(op, "cuda", kernels.PAIRS[op])


@both
def test_far_slots(op):
    _needs(16 << 30)
    large.far_slots(op, "cuda", kernels.PAIRS[op])


@both
def test_replays_with_other_lengths(op):
    large.replays_with_other_lengths(op, "cuda", kernels.PAIRS[op], tokens=3000, times=1000)


@both
def test_same_bits_again(op):
    large.same_bits_again(op, "cuda", kernels.PAIRS[op], tokens=9000, heads=(2, 8), size=128, times=50)
    large.same_bits_again(op, "cuda", kernels.PAIRS[op], tokens=2000, heads=(16, 32), size=128, times=50)


@both
@pytest.mark.parametrize(("heads", "tokens"), [((16, 32), 6000), ((2, 8), 9000)])
def test_one_sequence_after_another(op, heads, tokens):
    large.one_sequence_after_another(op, "cuda", kernels.PAIRS[op], tokens=tokens, heads=heads, size=128, times=300)


@both
def test_a_sequence_of_few_heads_is_the_same_alone_and_in_a_batch(op):
    """Where a sequence is cut, the cuts are its own with ``batch_invariant``."""
    properties.alone_as_in_a_batch(op, "cuda", kernels.PAIRS[op], lengths=(9000, 3, 0, 12000))


@both
def test_nothing_is_compiled_again(op):
    found = large.nothing_is_compiled_again(op, "cuda", kernels.PAIRS[op])
    assert found, "the engines looked nothing up: this test does not see them"


@both
def test_a_call_waits_for_nothing(op):
    """A call while the stream is busy returns at once."""
    x = properties.inputs(op, 300, "cuda")
    with properties._engines(op, kernels.PAIRS[op]):
        properties.PREFILL[op](**x)
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        properties.PREFILL[op](**x)
        assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def _needs(size):
    free, _ = torch.cuda.mem_get_info()
    if free < size:
        pytest.skip(f"needs {size >> 30} GiB of free device memory")

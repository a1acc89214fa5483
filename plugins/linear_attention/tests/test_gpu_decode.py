"""On a GPU from compute capability 8.0: the decode kernels of GDN and KDA on every case, over pools, steps and replays."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("cutlass")

import torch
from la_cases import kernels, large, properties
from la_cases.cases import named
from la_cases.running import check, outputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OPS = ("gdn_decode", "kda_decode")
both = pytest.mark.parametrize("op", ["gdn", "kda"])


@pytest.fixture(scope="module", autouse=True)
def supported():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the decode kernels are for compute capability 8.0 and later")


@pytest.fixture(autouse=True)
def _memory():
    yield
    torch.cuda.empty_cache()


def pair(op):
    """The decode engine, and whatever prefills: the Hopper engine has tests of its own."""
    return ("", kernels.ENGINES[f"{op}_decode"])


@pytest.mark.parametrize("case", [case for op in OPS for case in kernels.taken(op)], ids=str)
def test_case(case):
    check(case, outputs(case, "cuda", kernels.ENGINES[case.op]))


@pytest.mark.parametrize("case", [case for case in kernels.UNSUPPORTED if case.decodes], ids=str)
def test_a_case_without_a_kernel_is_declined(case):
    assert kernels.codes(case) == {kernels.declined(case)}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [(64, 64), (64, 128), (128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_size_in_a_pool(op, size, batch, state):
    """Heads as models have them; slots in no order."""
    slots = tuple((7 * n + 3) % (batch + 5) if batch > 1 else 2 for n in range(batch))
    if len(set(slots)) < batch:
        slots = tuple(range(batch, 0, -1))
    base = named(f"{op}-slots")
    case = replace(
        base, name=f"{op}-pool-{size}-{batch}-{state}", lengths=(1,) * batch, heads=(4, 4, 8), size=size, slots=slots,
        pool=batch + 5, state=state,
    )  # fmt: skip
    check(case, outputs(case, "cuda", kernels.ENGINES[op]))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [(64, 128), (128, 128)], ids=str)
def test_float32_operands(op, size):
    case = replace(named(f"{op}-slots"), name=f"{op}-fp32-{size}", io=torch.float32, size=size)
    check(case, outputs(case, "cuda", kernels.ENGINES[op]))


@both
def test_speculation_follows_plain_decoding(op):
    properties.speculation_follows_plain_decoding(op, "cuda", pair(op), rounds=200)


@both
def test_boundaries_that_decrease(op):
    wild = [(tokens, properties.wild_boundaries(tokens, n, n).tolist()) for tokens, n in ((3000, 300), (900, 4))]
    for size in (64, 128):
        properties.decreasing_boundaries_of_a_decode(
            op, "cuda", pair(op), given=(*properties.DECREASING, *wild), size=size
        )


@both
def test_decode_replays(op):
    large.decode_replays(op, "cuda", pair(op), batch=64, heads=(8, 16), size=128, times=1000)
    large.decode_replays(op, "cuda", pair(op), batch=1, heads=(2, 4), times=50)


@both
@pytest.mark.parametrize("size", [64, 128])
def test_decoded_tokens_follow_the_recurrence(op, size):
    large.decoded_tokens_follow_the_recurrence(op, "cuda", pair(op), steps=4096, size=size)


@both
def test_a_step_waits_for_nothing(op):
    x = properties.inputs(op, 4, "cuda")
    with properties._engines(op, pair(op)):
        properties.DECODE[op](**x)
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        properties.DECODE[op](**x)
        assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()

"""The prepare kernel of KDA in the emulator: every tile of every record, and what a scan makes of the records."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

import _kda
from la_cases.cases import channel_moving

BOUNDED = {"safe": "sigmoid", "lower_bound": -5.0, "a_log_dtype": "float32", "bias_dtype": "float32"}
SOFTPLUS = {"safe": "softplus", "a_log_dtype": "float32", "bias_dtype": "float32"}
NORMED = {"l2norm": True, "beta_sigmoid": True}


def steep(x):
    """Whole tokens and single channels whose memory ends, among gates that keep nearly all."""
    x["g"].fill_(-1e-3)
    x["g"][::7] = -20.0
    x["g"][5::11] = -100.0
    x["g"][12::16, :, ::3] = -torch.inf
    x["g"][33] = -torch.inf


def steep_logits(x):
    x["g"].fill_(-7.0)
    x["g"][::6] = 20.0
    x["g"][3::9, :, 1::2] = 100.0


def ungated(x):
    x["g"].zero_()


def positive(x):
    x["g"][::3] = 0.5


def identical_keys(x):
    x["k"][:] = torch.nn.functional.normalize(x["k"][:1], dim=-1)
    x["beta"].fill_(0.999)
    x["g"].fill_(-1e-3)


def opposite_keys(x):
    identical_keys(x)
    x["k"][::2] *= -1


def uniform(x):
    """Gates that are the same in every channel: errors of factors, if they had any, would not average out."""
    x["g"].fill_(-0.0012)


@pytest.mark.parametrize(("tokens", "seed", "schedule"), [(64, 0, "late"), (37, 1, "random"), (64, 2, "random")])
def test_all_in_kernel(tokens, seed, schedule):
    p = _kda.problem(**BOUNDED, **NORMED)
    _kda.check(p, (tokens,), seed=seed, schedule=schedule)


def test_steep_gates():
    p = _kda.problem(key=64)
    _kda.check(p, (64,), change=steep)


def test_softplus_of_steep_logits():
    p = _kda.problem("float16", key=64, **SOFTPLUS)
    _kda.check(p, (64,), change=steep_logits)


def test_channels_that_move():
    p = _kda.problem(key=64)
    _kda.check(p, (64,), change=channel_moving)


@pytest.mark.parametrize("change", [identical_keys, opposite_keys])
def test_colliding_keys(change):
    """Every update takes back the one before: the roundings of 64 of them would add up, in channels that no later token corrects."""
    worst = _kda.check(_kda.problem(key=64), (128,), change=change)
    assert worst["O"] <= 2.5e-3
    assert worst["final_state"] <= 2.5e-3


def test_short_sequences_of_a_batch():
    """Chunks of 1, 17 and 15 tokens, sequences of none, NaN behind the last token."""
    p = _kda.problem(key=64)
    _kda.check(p, (0, 1, 17, 0, 0, 15, 0), tail=9, seed=3)


def test_tokens_do_not_see_the_future():
    """Rows of T, P and of K~ and Q~ keep their bits when later tokens change."""
    p = _kda.problem(key=64)
    x = _kda.inputs(p, (64,))
    before = _kda.tiles(p, _kda.run(p, x)[0, 0])
    first = 41
    for port in ("q", "k", "g", "beta"):
        x[port][first:] = x[port][first:] * 0.5 - 0.25
    after = _kda.tiles(p, _kda.run(p, x)[0, 0])
    for name in ("k_in", "q_in", "t", "p"):
        np.testing.assert_array_equal(after[name][:first], before[name][:first])
        assert (after[name][first:] != before[name][first:]).any()


@pytest.mark.L2
@pytest.mark.parametrize("change", [steep, ungated, uniform, positive, identical_keys, channel_moving, None])
@pytest.mark.parametrize("key", [64, 128])
@pytest.mark.parametrize("io", ["bfloat16", "float16"])
def test_gates_and_keys(io, key, change):
    _kda.check(_kda.problem(io, key=key), (100,), change=change, schedule="random", seed=5)


@pytest.mark.L2
@pytest.mark.parametrize("key", [64, 128])
@pytest.mark.parametrize("form", [BOUNDED, SOFTPLUS, {"domain": "linear"}, {"safe": "sigmoid", "lower_bound": -1.5}])
@pytest.mark.parametrize("gate", ["float32", "bfloat16", "float16"])
def test_forms_of_gates(gate, form, key):
    p = _kda.problem(key=key, gate_dtype=gate, l2norm=True, **form)
    _kda.check(p, (70,), seed=2, change=steep_logits if form is SOFTPLUS else None)


@pytest.mark.L2
@pytest.mark.parametrize("heads", [(1, 1, 2), (1, 2, 2), (2, 1, 1), (2, 2, 1), (3, 3, 3)])
def test_head_groups(heads):
    p = _kda.problem(heads=heads, key=64, beta_dtype="bfloat16")
    _kda.check(p, (65, 3), seed=4)


@pytest.mark.L2
@pytest.mark.parametrize(
    "fields", [{"neg_eigval": True}, {"beta_dtype": "bfloat16"}, {"bias_dtype": "bfloat16"}, {"scale": 0.5}]
)
def test_options(fields):
    p = _kda.problem(key=64, **{**BOUNDED, **NORMED, **fields})
    _kda.check(p, (40,), seed=6)


@pytest.mark.L2
@pytest.mark.parametrize("index", ["", "int32", "int64"])
@pytest.mark.parametrize("valid", [1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64])
def test_lengths(index, valid):
    p = _kda.problem(key=64, index_dtype=index, **NORMED)
    _kda.check(p, (64 + valid,), seed=valid, tail=0 if not index else 70)


@pytest.mark.L2
@pytest.mark.parametrize("count", [33, 70])
def test_sequences_are_found(count):
    """More sequences than lanes; many are empty."""
    rng = np.random.default_rng(count)
    lengths = tuple(int(n) for n in rng.choice([0, 0, 1, 2, 65], count))
    p = _kda.problem(key=64)
    _kda.check(p, lengths, seed=1)


@pytest.mark.L2
def test_no_tokens():
    """Nothing is written, and nothing is read."""
    p = _kda.problem(key=64)
    assert (_kda.run(p, _kda.inputs(p, (0, 0))) == 0xA5).all()


@pytest.mark.L2
def test_rows_further_apart():
    """Strides beyond the sizes, NaN between."""
    p = _kda.problem(heads=(2, 2, 2), key=64)
    x = _kda.inputs(p, (70,))
    want = _kda.run(p, x)
    for port in ("q", "k", "g", "beta"):
        shape = x[port].shape
        wide = torch.full((shape[0], math.prod(shape[1:]) + 64), torch.nan, dtype=x[port].dtype)
        x[port] = wide.as_strided(shape, (wide.stride(0), *x[port].stride()[1:])).copy_(x[port])
    np.testing.assert_array_equal(_kda.run(p, x), want)

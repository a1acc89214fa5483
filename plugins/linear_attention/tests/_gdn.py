"""What GDN's stages make of a chunk: its bytes read back, and what they must hold in numpy fp64."""

from __future__ import annotations

import numpy as np
import torch
from linear_attention.layout import MMA
from linear_attention.problem import Problem
from linear_attention.records import VECTORS

CHUNK, TILE = 64, 8192
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
UNIT = {"bfloat16": 2.0**-9, "float16": 2.0**-12}  # half of the last place of values from 1/2 on
A_LOG, BIAS = 0.3, -0.2


class Chunk:
    """One chunk's input in fp64, rounded to the problem's types, NaN in the tokens from ``valid`` on."""

    def __init__(self, problem, valid=64, *, spread=30.0, norm=1.0, g=-0.1, beta=None, seed=0):
        rng = np.random.default_rng(seed)
        k = rng.standard_normal((1, problem.key)) + spread * rng.standard_normal((CHUNK, problem.key))
        q = rng.standard_normal((CHUNK, problem.key))
        k, q = (x * norm / np.linalg.norm(x, axis=1, keepdims=True) for x in (k, q))
        beta = rng.uniform(0, 1, CHUNK) if beta is None else np.broadcast_to(beta, CHUNK)
        g = g(rng) if callable(g) else np.broadcast_to(g, CHUNK)
        kinds = (problem.io, problem.io, problem.gate_dtype, problem.beta_dtype)
        self.valid = valid
        self.held = [torch.tensor(np.array(x)).to(TORCH[kind]) for x, kind in zip((k, q, g, beta), kinds, strict=True)]
        for x in self.held:
            x[valid:] = torch.nan
        self.k, self.q, self.g, self.beta = (x[:valid].double().numpy() for x in self.held)


def problem(key=64, io="bfloat16", **options):
    return Problem("gdn", io, 1, 1, 1, key, 64, scale=0.125, **options)


def spiked(rng):
    """One reset of the state among weak gates."""
    g = np.full(CHUNK, -1e-3)
    g[20] = -1e4
    return g


def mixed(rng):
    """Decays of all sizes, resets too."""
    return -np.exp(rng.uniform(-9, 6, CHUNK))


def expected(problem, chunk):
    """T, P and vectors by name, of the valid tokens; and the size that errors of a matrix' rows are relative to."""
    g = chunk.g
    if problem.domain == "linear":
        g = np.log(np.clip(g, np.float32(1e-10), 1))
    elif problem.safe == "softplus":
        g = -np.exp(A_LOG) * np.logaddexp(g + BIAS, 0)
    beta = 2 / (1 + np.exp(-chunk.beta)) if problem.neg_eigval else chunk.beta
    nk, nq = (1 / np.sqrt((x**2).sum(1) + 1e-6) if problem.l2norm else np.ones(len(x)) for x in (chunk.k, chunk.q))
    total = np.cumsum(g)
    # Not differences of the sums, of which large ones have lost their digits in fp64, too.
    apart = np.array([[g[j + 1 : i + 1].sum() for j in range(len(g))] for i in range(len(g))])
    decay = np.tril(np.exp(np.minimum(apart, 0)))
    scores = chunk.k @ chunk.k.T
    inverse = np.linalg.inv(np.eye(len(g)) + np.tril(beta[:, None] * nk[:, None] * nk * scores, -1))
    return {
        "-g": -g,
        "decays": decay,
        "T": decay * inverse * beta,
        "P": decay * problem.scale * nq[:, None] * nk * (chunk.q @ chunk.k.T),
        "a": np.exp(total) * nk,
        "c": np.exp(apart[-1]) * nk,
        "d": np.exp(total) * problem.scale * nq,
        "sums": total / np.log(2),
        "norms": nk,
    }


def matrix(image):
    """Of its bytes, in fp64."""
    lines = image.reshape(CHUNK, 8, 16)
    lines = np.stack([line[np.arange(8) ^ (row % 8)] for row, line in enumerate(lines)])
    return torch.from_numpy(lines.copy()).view(TORCH[MMA]).reshape(CHUNK, CHUNK).double().numpy()


def decoded(record):
    """T and the vectors of a record by name, in fp64."""
    vectors = record[TILE:].view(np.float32).astype(np.float64)
    return {"T": matrix(record[:TILE])} | {name: vectors[at // 4 :][:CHUNK] for name, at in VECTORS.items()}


def check_chunk(problem, chunk, held, number):
    """Every output that is ``held``, 0 where it has to be 0. Errors of T and P: rounding to the io type, and 1e-4 of the row for the inverse. Of
    all of them: what sums of log decays lose, which count as at least -128 to base 2."""
    want, valid = expected(problem, chunk), chunk.valid
    steps = np.minimum(want.pop("-g"), 128 * np.log(2))
    lost = 2.0**-22 * steps.sum() + 1e-6
    decays = want.pop("decays")
    for name, value in held.items():
        got, exact, size = value, want[name], abs(want[name])
        if name in "TP":
            assert name == "P" or (got[valid:] == 0).all(), (number, name)
            got = got[:valid]
            assert (got[:, valid:] == 0).all(), (number, name)
            assert (np.triu(got, 1) == 0).all(), (number, name)
            got = got[:, :valid]
            if name == "T":  # what rounding takes from a row goes to one behind
                size = (decays[:, :, None] * size).max(1)
            unit = (4.2 if name == "T" else 2.1) * UNIT[MMA]
            bound = (unit + lost) * size + 1e-4 * size.max(1, keepdims=True) + 1e-7
        elif name == "sums":  # of the last one's behind it
            exact, bound = np.pad(-np.cumsum(steps) / np.log(2), (0, CHUNK - valid), mode="edge"), lost
        else:
            assert name == "d" or (got[valid:] == 0).all(), (number, name)
            got, bound = got[:valid], lost * size + 1e-30
        worst = (abs(got - exact) / bound).max()  # NaN is not below 1
        assert worst <= 1, (number, name, worst)

"""What GDN's prepare stage makes of a chunk: its bytes read back, and what they must hold in numpy fp64."""

from __future__ import annotations

import numpy as np
import torch
from linear_attention.kernels.prepare_gdn import VECTORS
from linear_attention.layout import MMA

CHUNK, TILE = 64, 8192
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
UNIT = {"bfloat16": 2.0**-9, "float16": 2.0**-12}  # half of the last place of values from 1/2 on
A_LOG, BIAS = 0.3, -0.2


def expected(problem, chunk):
    """T, P, a, c, d, decay by name, of the valid tokens; and the size that errors of a matrix' rows are relative to."""
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
        "decay": np.exp(total[-1:]),
    }


def decoded(record):
    """T, P and the vectors by name, in fp64, of their bytes."""
    one = {}
    for i, name in enumerate("TP"):
        lines = record[i * TILE : (i + 1) * TILE].reshape(CHUNK, 8, 16)
        lines = np.stack([line[np.arange(8) ^ (row % 8)] for row, line in enumerate(lines)])
        one[name] = torch.from_numpy(lines.copy()).view(TORCH[MMA]).reshape(CHUNK, CHUNK).double().numpy()
    vectors = record[2 * TILE :].view(np.float32)
    for name, at in VECTORS.items():
        one[name] = vectors[at // 4 :][: 1 if name == "decay" else CHUNK].astype(np.float64)
    return one


def check_chunk(problem, chunk, held, number):
    """Every output, 0 where it has to be 0. Errors of T and P: rounding to the io type, and 1e-4 of the row for the inverse. Of all of
    them: what sums of log decays lose, which count as at least -128 to base 2."""
    want, valid = expected(problem, chunk), chunk.valid
    lost = 2.0**-22 * np.minimum(want.pop("-g"), 128 * np.log(2)).sum() + 1e-6
    decays = want.pop("decays")
    for name, exact in want.items():
        got, size = held[name], abs(exact)
        if name in "TP":
            assert (got[valid:] == 0).all(), (number, name)
            assert (got[:, valid:] == 0).all(), (number, name)
            assert (np.triu(got, 1) == 0).all(), (number, name)
            got = got[:valid, :valid]
            if name == "T":  # what rounding takes from a row goes to one behind
                size = (decays[:, :, None] * size).max(1)
            unit = (4.2 if name == "T" else 2.1) * UNIT[MMA]
            bound = (unit + lost) * size + 1e-4 * size.max(1, keepdims=True) + 1e-7
        else:
            assert (got[valid:] == 0).all(), (number, name)
            got = got[:valid]
            bound = lost * size + 1e-30
        worst = (abs(got - exact) / bound).max()  # NaN is not below 1
        assert worst <= 1, (number, name, worst)

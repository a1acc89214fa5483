"""KDA's records: the prepare kernel in the emulator, what its tiles hold, and what they must hold in numpy fp64."""

from __future__ import annotations

import functools

import cuda.bindings.driver as cuda
import numpy as np
import torch
from _blocks import Compiled
from _kernels import counted
from cutlass import Int32, Int64, cute
from la_cases import recurrence
from linear_attention.kernels.arguments import unpack
from linear_attention.kernels.chunks import ALL
from linear_attention.kernels.prepare_kda import PrepareKda
from linear_attention.layout import MMA
from linear_attention.problem import Problem
from linear_attention.records import CHUNK, record_layout, record_slots, records_bytes

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
UNIT = 2.0**-11  # largest relative error of a rounding to MMA
GROUP = 8  # tokens whose updates are folded
SMALLEST = 2.0**-25  # largest error of a number below the normal ones


class Alone:
    """The prepare kernel with a host function of its own."""

    def __init__(self, problem):
        self.problem, self.prepare = problem, PrepareKda(problem)
        self.kernel_parts = {"prepare": self.prepare}

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        self.prepare.launch(unpack(self.problem, words), Int32(ALL), stream)


@functools.cache
def compiled(problem):
    return Compiled(Alone(problem), problem)


def problem(io="bfloat16", heads=(1, 1, 1), key=128, **fields):
    fields = {"index_dtype": "int32", "scale": key**-0.5, **fields}
    return Problem("kda", io, *heads, key, 64, **fields)


def options(p):
    """Those of the recurrence."""
    return {
        "scale": p.scale, "use_qk_l2norm": p.l2norm, "use_beta_sigmoid": p.beta_sigmoid, "allow_neg_eigval": p.neg_eigval,
        "gate_domain": p.domain, "safe_gate": bool(p.safe), "gate_activation": p.safe, "gate_lower_bound": p.lower_bound,
    }  # fmt: skip


def inputs(p, lengths, seed=0, tail=0, change=None):
    """By port, in the types of the problem; ``tail`` NaN tokens behind those of the sequences. ``change`` edits float32 values."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    q, k = normal(tokens, p.heads_q, p.key), normal(tokens, p.heads_k, p.key)
    if not p.l2norm:
        q, k = (torch.nn.functional.normalize(rows, dim=-1) for rows in (q, k))
    g, beta = normal(tokens, p.heads, p.key), normal(tokens, p.heads)
    if not p.beta_sigmoid:
        beta = beta.sigmoid()
    if not p.safe:
        g = torch.nn.functional.logsigmoid(g + 1)
        if p.domain == "linear":
            g = g.exp()
    x = {"q": q, "k": k, "v": normal(tokens, p.heads_v, p.value), "g": g, "beta": beta}
    if p.a_log_dtype:
        x["a_log"] = normal(p.heads) / 2
    if p.bias_dtype:
        x["dt_bias"] = normal(p.heads, p.key) / 2
    if change is not None:
        change(x)
    types = {"g": p.gate_dtype, "beta": p.beta_dtype, "a_log": p.a_log_dtype, "dt_bias": p.bias_dtype}
    x = {port: value.to(TYPES[types.get(port, p.io)]) for port, value in x.items()}
    for port in ("q", "k", "v", "g", "beta"):
        x[port] = torch.cat((x[port], torch.full((tail, *x[port].shape[1:]), torch.nan, dtype=x[port].dtype)))
    if p.index_dtype:
        x["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(getattr(torch, p.index_dtype))
    return x


def bits(tensor):
    """The tensor as numpy holds it: the bits of bf16. The storage is shared."""
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def run(p, x, **emulator):
    """(records [slots, HO, bytes], those that were written: the others keep 0xA5 all over)."""
    tokens, sequences = x["q"].shape[0], len(x["cu_seqlens"]) - 1 if "cu_seqlens" in x else 1
    size = record_layout(p).size
    slots = record_slots(tokens, sequences)
    memory = np.full(records_bytes(p, p.heads, tokens, sequences) + 256, 0xA5, np.uint8)
    workspace = memory[-memory.ctypes.data % 256 :][: slots * p.heads * size]
    arrays = {port: bits(value) for port, value in x.items() if port != "v"}
    compiled(p).run(
        {"tokens": tokens, "sequences": sequences},
        {**arrays, **counted(arrays), "workspace": workspace},
        [],
        **{"seed": 0, **emulator},
    )
    return workspace.reshape(slots, p.heads, size)


def tiles(p, record):
    """The tiles of a record in fp64: k_in, q_in, k_out [64, K], t, p [64, 64], decay [K]."""
    layout = record_layout(p)
    found = {}
    for name, columns in (("k_in", p.key), ("q_in", p.key), ("k_out", p.key), ("t", CHUNK), ("p", CHUNK)):
        at = getattr(layout, name)
        found[name] = unswizzled(record[at : at + CHUNK * columns * 2], columns, TYPES[MMA])
    found["decay"] = record[layout.decay : layout.used].view(np.float32).astype(np.float64)
    return found


def unswizzled(image, columns, dtype):
    """[64, columns] of panels of 64 columns, 16-byte pieces XORed with the line."""
    pieces = image.reshape(columns // 64, CHUNK, 8, 16)
    lines = np.arange(CHUNK)
    turned = np.stack([pieces[:, lines, piece ^ (lines % 8)] for piece in range(8)], axis=2)
    rows = np.ascontiguousarray(turned.transpose(1, 0, 2, 3)).reshape(CHUNK, columns * 2)
    return torch.from_numpy(rows).view(dtype).double().numpy()


def chunks(p, x):
    """(slot, sequence, first token, valid) of every chunk."""
    bounds = x["cu_seqlens"].tolist() if "cu_seqlens" in x else [0, x["q"].shape[0]]
    for n in range(len(bounds) - 1):
        for first in range(bounds[n], bounds[n + 1], CHUNK):
            slot = bounds[n] // CHUNK + n + (first - bounds[n]) // CHUNK
            yield slot, n, first, min(CHUNK, bounds[n + 1] - first)


def prepared(p, x):
    """q (scaled), k, v of every head of O, decays and betas, fp64, with the op's own definition."""
    return recurrence._prepared("kda", {port: value.double().numpy() for port, value in x.items()}, options(p))


def expected(q, k, alpha, beta):
    """The tiles of a chunk of one head from its definition, and the sums of magnitudes behind P and K-. Arrays of its valid tokens."""
    valid, key = q.shape
    span = np.zeros((valid, valid, key))  # product of the decays of tokens j + 1 to i
    for j in range(valid):
        span[j, j] = 1
        for i in range(j + 1, valid):
            span[i, j] = span[i - 1, j] * alpha[i]
    before = np.cumprod(alpha, axis=0)
    behind = span[valid - 1]
    m = np.tril(np.einsum("id,jd,ijd->ij", k, k, span), -1) * beta[:, None]
    # Updates of 8 tokens are D times what leaves the group's own out.
    group = np.arange(valid) // GROUP
    d = np.linalg.inv(np.eye(valid) + np.where(group[:, None] == group, m, 0))
    t = np.linalg.inv(d) @ np.linalg.inv(np.eye(valid) + m) * beta
    p, size = (np.tril(np.einsum("id,jd,ijd->ij", x, y, span)) for x, y in ((q, k), (abs(q), abs(k))))
    found = {"k_in": k * before, "q_in": q * before, "k_out": d.T @ (k * behind), "t": t, "p": p @ d}
    found |= {"p_size": size @ abs(d), "k_size": abs(d).T @ abs(k * behind)}
    found = {
        name: np.pad(tile, [(0, CHUNK - valid), (0, CHUNK - valid if tile.shape[1] == valid else 0)])
        for name, tile in found.items()
    }
    found["decay"] = before[-1]
    return found


def scan(p, x, records):
    """{"O", "final_state"} by LA's chunk recurrence on ``records``, the tiles of (slot, head), in fp64: as the scan computes, but for its
    roundings."""
    v = x["v"].double().numpy()
    sequences = len(x["cu_seqlens"]) - 1 if "cu_seqlens" in x else 1
    state = np.zeros((sequences, p.heads, p.value, p.key))
    o = np.zeros((v.shape[0], p.heads, p.value))
    for slot, n, first, valid in chunks(p, x):
        for head in range(p.heads):
            r = records[slot, head]
            rows = np.zeros((CHUNK, p.value))
            rows[:valid] = v[first : first + valid, head * p.heads_v // p.heads]
            held = state[n, head]
            u = r["t"] @ (rows - r["k_in"] @ held.T)
            o[first : first + valid, head] = (r["q_in"] @ held.T + r["p"] @ u)[:valid]
            state[n, head] = held * r["decay"] + u.T @ r["k_out"]
    return {"O": o, "final_state": state}


def rounded(values):
    return torch.from_numpy(values).to(TYPES[MMA]).double().numpy()


def relative(found, want):
    """Relative RMS error; infinite where something is not finite."""
    if not np.isfinite(found).all():
        return np.inf
    size = np.sqrt(np.mean(want**2))
    return float(np.sqrt(np.mean((found - want) ** 2)) / (size or 1.0))


def check(p, lengths, seed=0, tail=0, change=None, **emulator):
    """Records of a batch: tile by tile, and through the recurrence. Returns the largest errors by tile."""
    x = inputs(p, lengths, seed, tail, change)
    records = run(p, x, **emulator)
    q, k, _, alpha, beta = prepared(p, x)
    unit, small = UNIT, SMALLEST
    worst, found, ideal = {}, {}, {}
    owned = set()
    for slot, _, first, valid in chunks(p, x):
        owned.add(slot)
        for head in range(p.heads):
            rows = slice(first, first + valid)
            want = expected(*(values[rows, head] for values in (q, k, alpha, beta)))
            have = found[slot, head] = tiles(p, records[slot, head])
            ideal[slot, head] = {name: tile if name == "decay" else rounded(tile) for name, tile in want.items()}
            for name in ("k_in", "q_in", "decay"):
                # Rounded three times: the group's operands, the factors of what is before the group, and their products.
                bound = (3 * unit if name != "decay" else 0) * 1.01 + 2e-5
                least = 3 * small if name != "decay" else 1e-37
                error = np.abs(have[name] - want[name]) - bound * np.abs(want[name]) - least
                assert (error <= 0).all(), (name, slot, head, error.max(), np.argwhere(error > 0)[:4])
            # Operands of a group's scores are rounded once each, and the score is; those of other pairs have another factor between.
            for name, sizes in (("p", "p_size"), ("k_out", "k_size")):
                bound = 1.02 * unit * (4 * want[sizes] + np.abs(want[name])) + 200 * small
                error = np.abs(have[name] - want[name]) - bound
                assert (error <= 0).all(), (name, slot, head, error.max(), np.argwhere(error > 0)[:4])
            assert (np.triu(have["p"], 1) == 0).all()
            assert (np.triu(have["t"], 1) == 0).all()
            assert (have["t"][valid:] == 0).all()
            assert (have["t"][:, valid:] == 0).all()
            worst["t"] = max(worst.get("t", 0), relative(have["t"], want["t"]))
            worst["p"] = max(worst.get("p", 0), relative(have["p"], want["p"]))
    assert worst["t"] <= 4 * unit, worst
    others = [slot for slot in range(len(records)) if slot not in owned]
    assert (records[others] == 0xA5).all()
    arrays = {port: value.double().numpy() for port, value in x.items()}
    want = recurrence.prefill("kda", arrays, **options(p))
    have, best = scan(p, x, found), scan(p, x, ideal)
    end = sum(lengths)
    for name, rows in (("O", slice(0, end)), ("final_state", slice(None))):
        # What the rounding of the tiles costs is not the kernel's: equal keys add the errors of T up, to 0.1 in bf16.
        least = relative(best[name][rows], want[name][rows])
        worst[name] = relative(have[name][rows], want[name][rows])
        assert worst[name] <= max(0.9 * unit, 2 * least), (worst, least)
    return worst

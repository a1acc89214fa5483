"""Prefill kernels without the GPU: operands, tiles as the workspace holds them, launches in the emulator, the answer in fp64.

16-bit floats are numpy arrays of their bits.
"""

from __future__ import annotations

import functools

import cuda.bindings.driver as cuda
import numpy as np
import torch
from _blocks import Compiled
from cutlass import Int64, cute
from la_cases import recurrence
from linear_attention.kernels.arguments import unpack
from linear_attention.layout import MMA, plan_layout
from linear_attention.records import record_bytes, record_slots
from linear_attention.segments import summary_bytes, workspace_offsets

CHUNK = 64
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def bits(x, dtype):
    """Rounded to ``dtype``."""
    made = torch.from_numpy(np.ascontiguousarray(x)).to(TORCH[dtype])
    return made.numpy() if dtype == "float32" else made.view(torch.int16).numpy().view(np.uint16)


def values(x, dtype):
    """As float64."""
    if dtype == "float32":
        return x.astype(np.float64)
    return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).view(TORCH[dtype]).double().numpy()


def rounded(x, dtype):
    return values(bits(x, dtype), dtype)


class Case:
    """Operands of a batch of sequences. Tokens of none hold NaN, and O holds 7 everywhere. ``change`` edits values before they are
    rounded."""

    def __init__(self, problem, lengths, *, before=0, after=0, seed=0, decay=0.05, pool=0, slots=None, change=None):
        p, rng = problem, np.random.default_rng(seed)
        self.problem, self.lengths = problem, lengths
        tokens = before + sum(lengths) + after
        self.cu = np.cumsum([before, *lengths])
        held = np.zeros(tokens, bool)
        held[before : before + sum(lengths)] = True
        q, k = (rng.standard_normal((tokens, heads, p.key)) for heads in (p.heads_q, p.heads_k))
        x = {
            "q": 4 * q / np.linalg.norm(q, axis=-1, keepdims=True),
            "k": (3 if p.l2norm else 1) * k / np.linalg.norm(k, axis=-1, keepdims=True),
            "v": rng.standard_normal((tokens, p.heads_v, p.value)),
            "g": -decay * rng.exponential(size=(tokens, p.heads, *((p.key,) if p.variant == "kda" else ()))),
            "beta": rng.uniform(0.1, 1, (tokens, p.heads)),
        }
        if change is not None:
            change(x)
        kinds = {"g": p.gate_dtype, "beta": p.beta_dtype}
        self.arrays, self.x = {}, {}
        for name, value in x.items():
            kind = kinds.get(name, p.io)
            poisoned = np.where(held.reshape(-1, *(1,) * (value.ndim - 1)), value, np.nan)
            self.arrays[name] = bits(poisoned, kind)
            self.x[name] = rounded(value, kind)
        self.arrays["O"] = bits(np.full((tokens, p.heads, p.value), 7.0), p.io)
        if p.index_dtype:
            self.arrays["cu_seqlens"] = self.x["cu_seqlens"] = self.cu.astype(p.index_dtype)
        rows = pool or len(lengths)
        layout = (lambda y: y) if p.state_layout == "v_major" else (lambda y: y.transpose(0, 1, 3, 2))
        if p.slot_dtype:
            self.arrays["state_indices"] = self.x["state_indices"] = np.array(slots, p.slot_dtype)
        if p.initial:
            state = rng.standard_normal((rows, p.heads, p.value, p.key))
            memory = bits(np.ascontiguousarray(layout(state)), p.state_dtype)
            self.arrays["initial_state"] = layout(memory)
            self.x["initial_state"] = rounded(state, p.state_dtype)
        if p.final:
            if p.overwrite:
                self.arrays["final_state"] = self.arrays["initial_state"]
            else:
                memory = bits(np.full((rows, p.heads, p.value, p.key), 9.0), p.state_dtype)
                self.arrays["final_state"] = layout(np.ascontiguousarray(layout(memory)))
        self.sizes = {"tokens": tokens, "sequences": len(lengths), "pool": rows if p.initial or p.final else 0}

    def answer(self):
        """O and final_state in fp64."""
        p = self.problem
        found = recurrence.prefill(
            p.variant, self.x, scale=p.scale, use_qk_l2norm=p.l2norm, use_beta_sigmoid=p.beta_sigmoid,
            allow_neg_eigval=p.neg_eigval, gate_domain=p.domain, safe_gate=bool(p.safe),
        )  # fmt: skip
        return found["O"], found["final_state"]


def identical_keys(x, run=1 << 20):
    """What a key holds is written anew by every token of a run, and nothing decays: T is exact, of ones."""
    k = np.sign(x["k"][np.arange(len(x["k"])) // run])
    x["k"][:] = k / np.sqrt(k.shape[-1])
    x["beta"][:], x["g"][:] = 1.0, 0.0


def image(tile, dtype):
    """Bytes of a [64, columns] tile in shared memory: panels of 64 columns, lines in the 128-byte swizzle."""
    panels = []
    for first in range(0, tile.shape[1], 64):
        pieces = bits(tile[:, first : first + 64], dtype).view(np.uint8).reshape(CHUNK, 8, 16)
        line = np.arange(CHUNK)[:, None]
        swizzled = np.empty_like(pieces)
        swizzled[line, np.arange(8) ^ line % 8] = pieces
        panels.append(swizzled.reshape(-1))
    return np.concatenate(panels)


def tiles(case, start, valid, head):
    """(K~, Q~, K-, T, P [64, ...]), decays [K] of one chunk of KDA, unrounded: the formulas, with padding rows 0."""
    p, x = case.problem, case.x
    at = slice(start, start + valid)
    q, k = (x[n][at, head * x[n].shape[1] // p.heads] for n in "qk")
    if p.l2norm:
        q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    g, beta = x["g"][at, head].reshape(valid, -1), x["beta"][at, head]
    sums = np.broadcast_to(np.cumsum(g, axis=0), (valid, p.key))
    between = np.exp(np.minimum(sums[:, None] - sums[None], 0))
    m = np.tril(beta[:, None] * np.einsum("id,jd,ijd->ij", k, k, between), -1)
    t = np.linalg.inv(np.eye(valid) + m) * beta[None, :]
    scores = np.tril(np.einsum("id,jd,ijd->ij", q, k, between)) * p.scale
    rest = (0, CHUNK - valid)
    rows = [
        np.pad(y, (rest, (0, 0))) for y in (k * np.exp(sums), q * p.scale * np.exp(sums), k * np.exp(sums[-1] - sums))
    ]
    return (*rows, np.pad(t, (rest, rest)), np.pad(scores, (rest, rest))), np.exp(sums[-1])


def matrices(case, start, valid, head):
    """(T [64, 64],), (a, c, G to base 2, nk [64]) of one chunk of GDN, unrounded: the formulas, with padding rows 0 and G as before them."""
    p, x = case.problem, case.x
    at = slice(start, start + valid)
    k = x["k"][at, head * x["k"].shape[1] // p.heads]
    nk = 1 / np.sqrt((k**2).sum(-1) + 1e-6) if p.l2norm else np.ones(valid)
    beta, sums = x["beta"][at, head], np.cumsum(x["g"][at, head])
    between = np.tril(np.exp(np.minimum(sums[:, None] - sums, 0)))
    lower = np.tril(beta[:, None] * nk[:, None] * nk * (k @ k.T), -1)
    t = between * np.linalg.inv(np.eye(valid) + lower) * beta
    rest = (0, CHUNK - valid)
    vectors = [np.pad(y, rest) for y in (np.exp(sums) * nk, np.exp(sums[-1] - sums) * nk, sums / np.log(2), nk)]
    vectors[2][valid:] = vectors[2][valid - 1]
    return (np.pad(t, (rest, rest)),), np.concatenate(vectors)


def records(case):
    """What the prepare kernel leaves in the workspace; the rest of it holds NaN."""
    p = case.problem
    size = record_bytes(p)
    memory = np.full((record_slots(case.sizes["tokens"], len(case.lengths)) * p.heads, size), 0xFF, np.uint8)
    for n, length in enumerate(case.lengths):
        start = int(case.cu[n])
        for chunk in range(-(-length // CHUNK)):
            slot = start // CHUNK + n + chunk
            for head in range(p.heads):
                made, vectors = (tiles if p.variant == "kda" else matrices)(
                    case, start + chunk * CHUNK, min(CHUNK, length - chunk * CHUNK), head
                )
                parts = [image(tile, MMA) for tile in made] + [vectors.astype(np.float32).view(np.uint8)]
                record = np.concatenate(parts)
                memory[slot * p.heads + head, : len(record)] = record
    return memory.reshape(-1)


class Host:
    """A kernel's passes behind ``host(words, stream)``."""

    def __init__(self, problem, summary=False, ctas=None):
        from linear_attention.kernels.prefill import Prefill

        self.problem, self.ctas = problem, ctas
        self.kernel = Prefill(problem, plan_layout(problem), summary=summary)

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        self.kernel.launch(unpack(self.problem, words), stream, self.ctas)


@functools.cache
def compiled(problem, summary=False, ctas=None):
    return Compiled(Host(problem, summary, ctas), problem)


def run(case, *, summary=False, segments=1, workspace=None, ctas=None, **options):
    """One pass; arrays of ``case`` and ``workspace`` are written. Returns the report."""
    p = case.problem
    if workspace is None:
        workspace = new_workspace(case, segments)
    written = [] if p.overwrite or p.pooled else [case.arrays[name] for name in ("final_state",) if name in case.arrays]
    offset = workspace_offsets(p, case.sizes["tokens"], len(case.lengths))["summaries"]
    report, _ = compiled(p, summary, ctas).run(
        {**case.sizes, "segments": segments},
        {**case.arrays, **counted(case.arrays), "workspace": workspace[:offset], "summaries": workspace[offset:]},
        written, **{"schedule": "late", "strict": True, **options},
    )  # fmt: skip
    return report


def counted(arrays):
    """What the boundaries among ``arrays`` count as, as the kernels read it; nothing without any."""
    if "cu_seqlens" not in arrays:
        return {}
    found = recurrence.boundaries(arrays["cu_seqlens"], len(arrays["k"]))
    return {"boundaries": found.astype(np.int32)}


def new_workspace(case, segments=1):
    """Records, and summaries at their place behind them; the rest holds NaN."""
    p, parts = case.problem, [records(case)]
    offset = workspace_offsets(p, case.sizes["tokens"], len(case.lengths))["summaries"]
    rest = offset - len(parts[0]) + max(256, summary_bytes(p, len(case.lengths), segments))
    return np.concatenate([*parts, np.full(rest, 0xFF, np.uint8)])


def error(found, want):
    """RMS of the difference relative to the RMS of ``want``."""
    return np.sqrt(np.mean((found - want) ** 2)) / np.sqrt(np.mean(want**2))


def check(case, bound=3e-3):
    """O and the final state of ``case`` against fp64."""
    p = case.problem
    o, state = case.answer()
    assert error(values(case.arrays["O"], p.io), o) < bound
    if p.final:
        found = values(case.arrays["final_state"], p.state_dtype)
        assert error(found, state) < bound


def run_segments(case, segments, **options):
    """Both passes, with the states of segments combined in numpy between them."""
    p, n = case.problem, len(case.lengths)
    workspace = new_workspace(case, segments)
    offset = workspace_offsets(p, case.sizes["tokens"], n)["summaries"]
    run(case, summary=True, segments=segments, workspace=workspace, **options)
    slots = workspace[offset:].view(np.float32).reshape(n, p.heads, segments, p.value + p.key, p.key)
    for s in range(1, segments - 1):
        slots[:, :, s, : p.value] += slots[:, :, s - 1, : p.value] @ slots[:, :, s, p.value :]
    run(case, segments=segments, workspace=workspace, **options)


def waits(artifact):
    """(wgmma waits that the PTX has, WARPGROUP.DEPBAR that the machine code has). ptxas adds some, after each wgmma at the worst, where it can't
    prove that registers are left alone meanwhile, and says so nowhere where a test could see it."""
    said = artifact.ptx.count("wgmma.wait_group")
    code = np.frombuffer(artifact.cubin[: len(artifact.cubin) // 16 * 16], np.uint64)[::2]
    return said, int(((code & 0x8000_0000_FFFF) == 0x8000_0000_79C5).sum())

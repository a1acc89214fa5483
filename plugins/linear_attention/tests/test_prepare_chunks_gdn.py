"""The prepare kernel of GDN in the emulator: every record against numpy in fp64, and the slots that no chunk has."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import cuda.bindings.driver as cuda
from _blocks import Compiled
from _gdn import A_LOG, BIAS, CHUNK, check_chunk, decoded
from _kernels import Case, counted
from cutlass import Int32, Int64, cute
from linear_attention.kernels.arguments import unpack
from linear_attention.kernels.chunks import ALL
from linear_attention.kernels.prepare_chunks_gdn import RESIDENT, PrepareGdnChunks
from linear_attention.problem import Problem
from linear_attention.records import record_layout, record_slots, records_bytes

UNTOUCHED = 0xA5
SHARED = 228 * 1024  # of an SM
RESERVED = 1024  # of them a CTA


class Alone:
    """The prepare kernel with a host function of its own."""

    def __init__(self, problem):
        self.problem, self.prepare = problem, PrepareGdnChunks(problem)
        self.kernel_parts = {"prepare": self.prepare}

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        self.prepare.launch(unpack(self.problem, words), Int32(ALL), stream)


@functools.cache
def compiled(problem):
    return Compiled(Alone(problem), problem)


def problem(key=64, heads=(1, 1, 1), io="bfloat16", **options):
    return Problem("gdn", io, *heads, key, 64, **{"index_dtype": "int32", "scale": 0.125, **options})


def records(case, **options):
    """[slots, HO, bytes]: what the kernel leaves in a workspace of UNTOUCHED."""
    p, (tokens, sequences) = case.problem, (case.sizes["tokens"], len(case.lengths))
    memory = np.full(records_bytes(p, p.heads, tokens, sequences) + 256, UNTOUCHED, np.uint8)
    workspace = memory[-memory.ctypes.data % 256 :][: len(memory) - 256]
    arrays = {name: case.arrays[name] for name in ("k", "g", "beta", "cu_seqlens") if name in case.arrays}
    for name, kind, value in (("a_log", p.a_log_dtype, A_LOG), ("dt_bias", p.bias_dtype, BIAS)):
        if kind:
            arrays[name] = np.full(p.heads, value, np.float32)
    compiled(p).run(
        {"tokens": tokens, "sequences": sequences}, {**arrays, **counted(arrays), "workspace": workspace}, [],
        **{"schedule": "late", "seed": 0, **options},
    )  # fmt: skip
    return workspace.reshape(record_slots(tokens, sequences), p.heads, -1)


def check(case, **options):
    p, x = case.problem, case.x
    found, used = records(case, **options), record_layout(p).used
    owned = np.zeros(len(found), bool)
    for n, length in enumerate(case.lengths):
        for c in range(-(-length // CHUNK)):
            first = int(case.cu[n]) + c * CHUNK
            slot, valid = int(case.cu[n]) // CHUNK + n + c, min(CHUNK, length - c * CHUNK)
            owned[slot], at = True, slice(first, first + valid)
            for head in range(p.heads):
                q, k = (x[name][at, head * x[name].shape[1] // p.heads] for name in "qk")
                chunk = SimpleNamespace(valid=valid, q=q, k=k, g=x["g"][at, head], beta=x["beta"][at, head])
                record = found[slot, head]
                check_chunk(p, chunk, decoded(record[:used]), (n, c, head))
                assert (record[used:] == UNTOUCHED).all()
    assert (found[~owned] == UNTOUCHED).all()
    return owned


@pytest.mark.parametrize("key", [64, 128])
@pytest.mark.parametrize("heads", [(1, 1, 1), (1, 1, 4)])
def test_shared_memory_has_room_for_the_resident_ctas(key, heads):
    assert RESIDENT * (PrepareGdnChunks(problem(key, heads)).shared_bytes + RESERVED) <= SHARED


@pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("random", 3)])
def test_sequences_with_tails_and_one_of_none(schedule, seed):
    owned = check(Case(problem(), (70, 0, 17), before=5, after=9, seed=1), schedule=schedule, seed=seed)
    assert not owned.all()


@pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("random", 5)])
def test_128_channels_with_norms(schedule, seed):
    p = problem(128, l2norm=True, neg_eigval=True, beta_sigmoid=True, safe="softplus", a_log_dtype="float32", bias_dtype="float32")  # fmt: skip
    check(Case(p, (33, 64), seed=2), schedule=schedule, seed=seed)


def test_groups_of_heads_and_no_boundaries():
    check(Case(problem(heads=(2, 2, 4), index_dtype="", io="float16"), (66,), seed=3))


@pytest.mark.parametrize(("group", "each"), [(1, 1), (4, 4), (5, 1), (6, 3), (8, 4)])
def test_a_cta_makes_up_to_four_heads_that_share_k(group, each):
    assert PrepareGdnChunks(problem(heads=(1, 1, group))).each == each
    assert PrepareGdnChunks(problem(heads=(2 * group, 2, 1))).each == each


@pytest.mark.parametrize(("heads", "schedule"), [((1, 1, 4), "late"), ((1, 1, 6), "random")])
def test_several_heads_of_a_cta(heads, schedule):
    p = problem(128, heads, l2norm=True, safe="softplus", a_log_dtype="float32", bias_dtype="float32")
    owned = check(Case(p, (20, 64), before=70, seed=6), schedule=schedule, seed=1)
    assert not owned.all()


@pytest.mark.L2
@pytest.mark.parametrize("key", [64, 128])
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("io", ["bfloat16", "float16"])
def test_types_sizes_and_norms(io, key, l2norm):
    p = problem(key, (2, 1, 4), io, l2norm=l2norm, index_dtype="int64", gate_dtype=io, beta_dtype=io)
    check(Case(p, (1, 64, 0, 130), before=3, after=70, seed=4), schedule="random", seed=7)

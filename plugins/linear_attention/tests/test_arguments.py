"""Words of the argument block as a kernel receives them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import cuda.bindings.driver as cuda
from _blocks import Compiled
from cutlass import Int32, Int64, cute
from linear_attention.arguments import SCALARS, tensor_words
from linear_attention.kernels.arguments import Args, bounds, segment, state_row, unpack
from linear_attention.problem import Problem

SMALL = {"heads_q": 2, "heads_k": 2, "heads_v": 4, "key": 64, "value": 128}
FULL = Problem(
    "kda", "bfloat16", **SMALL, gate_dtype="bfloat16", index_dtype="int64", initial=True, final=True, state_dtype="float32",
    state_layout="k_major", slot_dtype="int32", a_log_dtype="float32", bias_dtype="float32", safe="softplus",
)  # fmt: skip
BARE = Problem("gdn", "float16", **SMALL)
PORTS = {"O": "o"}


class Echo:
    """Writes the scalars, shapes and strides of its arguments to ``o``'s memory, as int64."""

    def __init__(self, problem):
        self.problem = problem
        self.alignment = {}

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        args = unpack(self.problem, words)
        self.note(args)
        self.kernel(args).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)

    def note(self, args):
        self.args = {name: value is not None for name, value in args._asdict().items()}
        for name, value in args._asdict().items():
            if isinstance(value, cute.Tensor):
                self.alignment[name] = value.iterator.alignment

    @cute.kernel
    def kernel(self, args: Args):
        target = cute.make_tensor(cute.recast_ptr(args.o.iterator, dtype=Int64), cute.make_layout(128))
        for place, value in enumerate(self.listed(args)):
            target[place] = Int64(value)

    def listed(self, args):
        found = [args.tokens, args.sequences, args.pool, args.segments, args.sms]
        found += [args.workspace.toint(), args.summaries.toint()]
        if args.boundaries is not None:
            found += [args.boundaries.iterator.toint(), *args.boundaries.shape, *args.boundaries.stride]
        for port in tensor_words(self.problem):
            tensor = getattr(args, PORTS.get(port, port))
            found += [tensor.iterator.toint(), *tensor.shape, *tensor.stride]
        return found


class Meaning:
    """Writes what ``bounds`` and ``state_row`` make of each sequence to ``o``'s memory: start, length, row, inside."""

    def __init__(self, problem):
        self.problem = problem

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        args = unpack(self.problem, words)
        self.kernel(args).launch(grid=(args.sequences, 1, 1), block=(1, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, args: Args):
        n = cute.arch.block_idx()[0]
        target = cute.make_tensor(cute.recast_ptr(args.o.iterator, dtype=Int32), cute.make_layout(128))
        start, length = bounds(args, n)
        row, inside = state_row(args, n)
        target[4 * n], target[4 * n + 1] = start, length
        target[4 * n + 2], target[4 * n + 3] = row, Int32(inside)


@pytest.mark.parametrize("problem", [FULL, BARE], ids=["full", "bare"])
def test_every_word_arrives(problem):
    o = np.zeros(128, np.int64)
    compiled = Compiled(Echo(problem), problem)
    _, word = compiled.run({}, {"O": o}, [o])
    tokens, heads, pool = word["tokens"], 4, word["pool"]
    channels = (64,) if problem.variant == "kda" else ()
    shapes = {
        "q": (tokens, 2, 64), "k": (tokens, 2, 64), "v": (tokens, 4, 128), "g": (tokens, heads, *channels),
        "beta": (tokens, heads), "O": (tokens, heads, 128), "cu_seqlens": (word["sequences"] + 1,),
        "initial_state": (pool, heads, 128, 64), "final_state": (pool, heads, 128, 64),
        "state_indices": (word["sequences"],), "a_log": (heads,), "dt_bias": (heads, 64),
    }  # fmt: skip
    want = [word[name] for name in SCALARS if name != "boundaries"]
    if problem.index_dtype:
        want += [word["boundaries"], word["sequences"] + 1, 1]
    for port, names in tensor_words(problem).items():
        strides = [word[f"{port}.{name}"] for name in names[1:]]
        if "row" in names:
            strides[2] = 1
        want += [word[f"{port}.address"], *shapes[port], *strides, *[1] * (len(shapes[port]) - len(strides))]
    place = want.index(o.ctypes.data)
    found = o[: len(want)].tolist()
    found[place] = want[place]  # the executor's own
    assert found == want


def test_alignment_is_that_of_the_contract():
    kernel = Echo(FULL)
    Compiled(kernel, FULL)
    aligned = ("q", "k", "v", "o", "g", "initial_state", "final_state")
    assert all(kernel.alignment[name] == 16 for name in aligned)
    assert (kernel.alignment["beta"], kernel.alignment["cu_seqlens"], kernel.alignment["state_indices"]) == (4, 8, 4)


@pytest.mark.parametrize(("index_dtype", "slot_dtype"), [("int64", "int32"), ("int32", "int64"), ("", "")])
def test_boundaries_say_where_sequences_are_and_slots_are_held_to_the_pool(index_dtype, slot_dtype):
    problem = Problem(
        "gdn", "bfloat16", **SMALL, index_dtype=index_dtype, initial=True, state_dtype="float32", slot_dtype=slot_dtype
    )
    arrays = {
        "O": np.zeros(128, np.int32),
        "boundaries": np.array([1, 5, 5, 20, 24, 24], np.int32),
        "state_indices": np.array([3, -1, 7, 6, -(2**31)], slot_dtype or "int32"),
    }
    o = arrays["O"]
    if not slot_dtype:
        del arrays["state_indices"]
    Compiled(Meaning(problem), problem).run({"tokens": 24, "sequences": 5, "pool": 7}, arrays, [o])
    found = o[:20].reshape(5, 4).tolist()
    if not index_dtype:
        assert found == [[0, 24, n, 1] for n in range(5)]
        return
    assert [row[:2] for row in found] == [[1, 4], [5, 0], [5, 15], [20, 4], [24, 0]]
    assert [row[3] for row in found] == [1, 0, 0, 1, 0]
    assert all(0 <= row[2] < 7 for row in found)
    assert (found[0][2], found[3][2]) == (3, 6)


class Parts:
    """Writes the first chunk and the count of each segment of every number of chunks to ``o``'s memory."""

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        args = unpack(BARE, words)
        self.kernel(args).launch(grid=(args.segments, 20, 1), block=(1, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, args: Args):
        s, chunks, _ = cute.arch.block_idx()
        target = cute.make_tensor(cute.recast_ptr(args.o.iterator, dtype=Int32), cute.make_layout(1024))
        place = 2 * (chunks * args.segments + s)
        target[place], target[place + 1] = segment(chunks, args.segments, s)


def test_segments_cover_every_chunk_once():
    compiled = Compiled(Parts(), BARE)
    for segments in (2, 3, 8):
        o = np.zeros(1024, np.int32)
        compiled.run({"segments": segments}, {"O": o}, [o])
        for chunks, parts in enumerate(o[: 40 * segments].reshape(20, segments, 2).tolist()):
            covered = [chunk for first, count in parts for chunk in range(first, first + count)]
            assert covered == list(range(chunks))
            assert max(count for _, count in parts) == -(-chunks // segments)

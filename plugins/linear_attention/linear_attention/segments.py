"""How many segments a sequence is scanned in, and the workspace. Imports no DSL and not the core. Imported by ``plan``.

With few heads and sequences most SMs would have nothing to do. A sequence is then cut into S segments that are scanned side by side, in
two passes: the first finds what each segment makes of any state, ``combine`` chains that, the second scans again from the right
states. The first segment's state is known, so that two segments need no map and nothing to chain. Results differ in rounding alone. S
follows from sizes, not from data, so that equal calls have equal results.
"""

from __future__ import annotations

from .problem import CHUNK, SLAB, Problem
from .records import records_bytes

__all__ = ["MOST_SEGMENTS", "choose_segments", "most_segments", "summary_bytes", "workspace_bytes", "workspace_offsets"]

MOST_SEGMENTS = 32
ALIGNMENT = 256  # bytes, of an area of the workspace

# In times of a chunk in the scan of one CTA. Estimates of instructions and launches, but for the last one.
_SUMMARY = 0.8  # a chunk of the first pass, which has no O
_CTA = 2.0  # a CTA's first loads and last stores
_PASS = 5.0  # two more launches; of two segments, one
_STEP = 1.3  # of ``combine``, a segment
_GAIN = 0.85  # of the time of a single pass; above it, maps are not worth their rounding
# The part of the SMs beyond which CTAs slow each other down. H200: a chunk of kda's records takes 1600 clocks with 64 CTAs and 3400,
# the memory's time, with 128.
_WIDTH = {"gdn": 1.0, "kda": 0.5}


def most_segments(problem: Problem, sequences: int, sms: int) -> int:
    """The most that fill ``sms`` SMs once; 1 where half of them have work without."""
    if problem.batch_invariant or sequences < 1:
        return 1
    fit = sms // (problem.slabs * problem.heads * sequences)
    return max(1, min(fit, MOST_SEGMENTS))


def choose_segments(problem: Problem, tokens: int, sequences: int, sms: int) -> int:
    """S for sequences of equal lengths: the number with the shortest estimated time."""
    chunks = -(-tokens // (CHUNK * max(1, sequences)))
    limit = min(most_segments(problem, sequences, sms), chunks)
    times = {segments: _time(problem, chunks, sequences, sms, segments) for segments in range(1, limit + 1)}
    best = min(times, key=lambda segments: (times[segments], segments), default=1)
    if best > 2 and times[best] >= _GAIN * times[1]:
        best = min((1, 2), key=lambda segments: times[segments])
    return best


def _time(problem: Problem, chunks: int, sequences: int, sms: int, segments: int) -> float:
    """In chunks of the scan."""
    each, heads = -(-chunks // segments), problem.heads * sequences
    scan = _pass(problem, heads * problem.slabs * segments, each, sms)
    if segments == 1:
        return scan
    items = heads * (problem.slabs * (segments - 1) + problem.key // SLAB * (segments - 2))
    return (
        _pass(problem, items, _SUMMARY * each, sms) + _STEP * (segments - 2) + min(_PASS, 2.5 * (segments - 1)) + scan
    )


def _pass(problem: Problem, items: int, chunks: float, sms: int) -> float:
    """``items`` of that many chunks, one a CTA, an SM each."""
    crowd = max(1.0, min(items, sms) / (_WIDTH[problem.variant] * sms))
    return -(-items // sms) * (chunks * crowd + _CTA)


def summary_bytes(problem: Problem, sequences: int, segments: int) -> int:
    """Of the states and maps of all segments, [N, HO, S, V + K, K] float32; 0 for one segment."""
    if segments < 2:
        return 0
    return sequences * problem.heads * segments * (problem.value + problem.key) * problem.key * 4


def workspace_offsets(problem: Problem, tokens: int, sequences: int) -> dict[str, int]:
    """Byte offsets of the areas, by their word (``arguments``), for the sizes of a launch: records, what boundaries count as (of no bytes
    without cu_seqlens), summaries."""
    boundaries = _aligned(records_bytes(problem, problem.heads, tokens, sequences))
    size = 4 * (sequences + 1) if problem.index_dtype else 0
    return {"workspace": 0, "boundaries": boundaries, "summaries": boundaries + _aligned(size)}


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def workspace_bytes(problem: Problem, tokens: int, sequences: int, sms: int) -> int:
    """Enough for every launch of at most ``tokens`` tokens and ``sequences`` sequences."""
    chunks = -(-tokens // CHUNK)
    counts = range(1, min(sequences, sms) + 1)  # with more sequences, none is cut
    segments = {n: min(most_segments(problem, n, sms), chunks) for n in counts}
    summaries = max((summary_bytes(problem, n, count) for n, count in segments.items()), default=0)
    return workspace_offsets(problem, tokens, sequences)["summaries"] + summaries

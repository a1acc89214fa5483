"""GPU time of callables that enqueue work, without the host's part: each is captured in a CUDA graph that repeats it.

Replays of all callables are interleaved, and the medians of one case come from the same minute of the same GPU, so that clocks and
temperature are alike. A callable gets the index of its repetition, so that it can take another set of buffers each time: operands
that the previous repetition left in L2 are then not served from there. Used by the GPU benchmarks; needs torch and a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

__all__ = ["ROUNDS", "GpuTimes", "eager_times", "gpu_times", "host_times"]

ROUNDS = "timed rounds"

Launch = Callable[[int], object]
GpuTimes = dict[str, float]


def gpu_times(
    calls: Mapping[str, Launch],
    *,
    rounds: int = 9,
    milliseconds: float = 4.0,
    most: int = 256,
    failed: dict[str, str] | None = None,
    step: Callable[[str], None] = lambda name: None,
) -> GpuTimes:
    """Microseconds of one repetition of each of ``calls``: the median over ``rounds`` replays.

    A replay lasts about ``milliseconds``, in at most ``most`` repetitions. A callable that can't be captured raises what it raised,
    or, with ``failed``, is left out and there with its reason. ``step`` hears whose turn begins, and ROUNDS when all take turns.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, call in calls.items():
        step(name)
        try:
            graphs[name] = _captured(call, milliseconds, most)
        except Exception as error:
            if failed is None:
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for name, (graph, _) in graphs.items():
        step(name)
        graph.replay()
        torch.cuda.synchronize()
    step(ROUNDS)
    for _ in range(rounds):
        for name, (graph, repetitions) in graphs.items():
            samples[name].append(_elapsed(graph.replay) * 1e3 / repetitions)
    return {name: statistics.median(values) for name, values in samples.items()}


def eager_times(
    calls: Mapping[str, Launch],
    *,
    rounds: int = 9,
    milliseconds: float = 4.0,
    most: int = 64,
    step: Callable[[str], None] = lambda name: None,
) -> GpuTimes:
    """Microseconds of one repetition of each of ``calls`` without a graph, between two events of the stream: the GPU's time, or the
    host's where that is longer. Medians of interleaved rounds of about ``milliseconds``. ``step``: as for ``gpu_times``."""
    counts: dict[str, int] = {}
    for name, call in calls.items():
        step(name)
        counts[name] = max(2, min(most, int(milliseconds / max(_repeated(call, 4), 1e-3))))
    step(ROUNDS)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(_repeated(call, counts[name]) * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def host_times(calls: Mapping[str, Callable[[], object]], *, rounds: int = 9, loops: int = 400) -> dict[str, float]:
    """Microseconds of host time of one call: medians of ``rounds`` interleaved samples. The device is idle before each, and
    ``loops`` stays below the depth of the launch queue."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(loops):
                call()
            samples[name].append((time.perf_counter_ns() - start) / loops / 1e3)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in samples.items()}


def _captured(call: Launch, milliseconds: float, most: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of as many repetitions as fill the time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for i in range(4):
            call(i)
        end.record()
        end.synchronize()
    repetitions = max(4, min(most, int(4 * milliseconds / max(start.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(repetitions):
            call(i)
    return graph, repetitions


def _repeated(call: Launch, count: int) -> float:
    """Milliseconds of one of ``count`` repetitions, the device being idle before."""
    torch.cuda.synchronize()

    def repeat() -> None:
        for i in range(count):
            call(i)

    return _elapsed(repeat) / count


def _elapsed(call: Callable[[], object]) -> float:
    """Milliseconds between two events around ``call``."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)

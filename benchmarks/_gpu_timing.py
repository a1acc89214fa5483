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

__all__ = ["GpuTimes", "gpu_times", "host_times"]

Launch = Callable[[int], object]
GpuTimes = dict[str, float]


def gpu_times(calls: Mapping[str, Launch], *, rounds: int = 9, milliseconds: float = 4.0, most: int = 256) -> GpuTimes:
    """Microseconds of one repetition of each of ``calls``: the median over ``rounds`` replays.

    A replay lasts about ``milliseconds``, in at most ``most`` repetitions. A callable that can't be captured raises what it raised.
    """
    graphs = {name: _captured(call, milliseconds, most) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for graph, _ in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, (graph, repetitions) in graphs.items():
            samples[name].append(_elapsed(graph.replay) * 1e3 / repetitions)
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


def _elapsed(call: Callable[[], object]) -> float:
    """Milliseconds between two events around ``call``."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)

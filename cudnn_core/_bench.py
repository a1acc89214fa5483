"""Timing of every engine that can run a graph, and the tuning record that it makes. Imported by ``cudnn-core bench``.

All competitors are built first and timed in turns, one timing each and round after round, so that a machine that slows down
slows all of them. A timing is the mean of as many back-to-back runs of the bound plan as fill a millisecond, by CUDA events
on a GPU and ``perf_counter`` on the CPU; the result is the median of the timings.

A record is written by a complete sweep only: every engine that competes for the graph was built and timed with every config as
often as was asked for, and neither a pin nor the configuration nor the caller left one out (``_tuning``). Members that an
engine names on request (``_members``) are timed beside its configs; one that does not build or run is left out, as the engine
competes without it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from ._errors import CudnnCoreError
from ._ranking import member_id
from ._tuning import Sample, TuningRecord, device_facts, store

if TYPE_CHECKING:
    from ._engine import PlanConfig
    from ._planner import Survey

__all__ = [
    "Clock",
    "Competitor",
    "Restrictions",
    "Sweep",
    "Timing",
    "cpu_clock",
    "cuda_clock",
    "record_of",
    "restrictions",
    "store_sweep",
    "sweep",
]

_FILL_SECONDS = 1e-3  # a timing takes at least this long: the clock's own cost vanishes in it
_MOST_RUNS = 10_000

# Runs a callable ``count`` times, waits, and returns the seconds that it took.
Clock = Callable[[Callable[[], None], int], float]


class Competitor(NamedTuple):
    """An engine with one config; ``prepare`` builds its plan and returns what runs it once. A sweep is complete without those
    that are ``optional`` and fail."""

    id: str
    config: PlanConfig
    prepare: Callable[[], Callable[[], None]]
    optional: bool = False


class Timing(NamedTuple):
    """What became of one competitor: ``samples_us``, or why there are none in ``failure``; ``counts`` unless an optional one
    failed."""

    id: str
    config: PlanConfig
    samples_us: tuple[float, ...] = ()
    runs: int = 0
    failure: str = ""
    optional: bool = False

    @property
    def counts(self) -> bool:
        return not (self.optional and self.failure)

    @property
    def us(self) -> float | None:
        return median(self.samples_us) if self.samples_us else None

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles over the median."""
        if len(self.samples_us) < 2:
            return 0.0
        low, middle, high = quantiles(self.samples_us, n=4, method="inclusive")
        return (high - low) / 2 / middle


class Sweep(NamedTuple):
    """Every competitor's timing, in the order in which they were given.

    ``incomplete`` is why the timings are no evidence: one failed, or the time limit left it fewer than were asked for; "" for a
    complete sweep.
    """

    timings: tuple[Timing, ...]
    seconds: float
    incomplete: str = ""

    @property
    def complete(self) -> bool:
        return not self.incomplete


def cpu_clock(run: Callable[[], None], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    return time.perf_counter() - start


def cuda_clock(ordinal: int) -> Clock:
    """By events on the default stream of a GPU, on which plans without a handle run."""
    import torch

    device = torch.device("cuda", ordinal)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.default_stream(device)

    def clock(run: Callable[[], None], count: int) -> float:
        with torch.cuda.device(device):
            start.record(stream)
            for _ in range(count):
                run()
            stop.record(stream)
            stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    return clock


def sweep(
    competitors: Iterable[Competitor],
    clock: Clock,
    *,
    repeats: int = 20,
    warmup: int = 3,
    time_limit: float = 60.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> Sweep:
    """Time them all. What one raises is its failure.

    ``time_limit`` is for the timings in seconds; imports, builds and warm-up runs don't count. Once it is over, every competitor
    still gets one timing, and the sweep is incomplete.
    """
    begin = time.perf_counter()
    pool = list(competitors)
    total = len(pool) * (repeats + 1)
    tell = progress or (lambda done, total, what: None)
    runs: dict[int, tuple[Callable[[], None], int]] = {}
    failures: dict[int, str] = {}
    samples: dict[int, list[float]] = {index: [] for index in range(len(pool))}
    done = 0
    for index, competitor in enumerate(pool):
        tell(done, total, competitor.id)
        done += 1
        try:
            run = competitor.prepare()
            clock(run, warmup)
            runs[index] = (run, _runs_to_fill(clock, run))
        except Exception as error:
            failures[index] = _text(error)
    late = False
    built = time.perf_counter()
    for _ in range(repeats):
        for index, (run, count) in list(runs.items()):
            late = late or time.perf_counter() - built > time_limit
            if late and samples[index]:
                continue  # one timing each, so that all of them can be compared
            tell(done, total, pool[index].id)
            done += 1
            try:
                samples[index].append(max(clock(run, count) / count * 1e6, 1e-6))
            except Exception as error:
                failures[index] = _text(error)
                del runs[index]
    tell(total, total, "")
    timings = tuple(
        Timing(item.id, item.config, failure=failures[index], optional=item.optional)
        if index in failures
        else Timing(item.id, item.config, tuple(samples[index]), runs[index][1], optional=item.optional)
        for index, item in enumerate(pool)
    )
    return Sweep(timings, time.perf_counter() - begin, _shortfall(timings, repeats))


def _shortfall(timings: tuple[Timing, ...], repeats: int) -> str:
    """Why ``timings`` are incomplete, or ""."""
    for timing in timings:
        if not timing.counts:
            continue
        if timing.failure:
            return f"{timing.id}: {timing.failure}"
        if len(timing.samples_us) < repeats:
            return f"{timing.id}: {len(timing.samples_us)} of {repeats} timings within the time limit"
    return ""


def _runs_to_fill(clock: Clock, run: Callable[[], None]) -> int:
    seconds = min(clock(run, 1) for _ in range(2))
    return max(1, min(_MOST_RUNS, round(_FILL_SECONDS / max(seconds, 1e-9))))


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, CudnnCoreError) else f"{type(error).__name__}: {error}"


def record_of(found: Survey, timings: Iterable[Timing]) -> TuningRecord:
    """The samples to store: for each engine the best of its configs, at the survey's runtime sizes."""
    from ._env import environment_key

    request = found.request
    assert request is not None
    dists = {item.candidate.config.engine: item.candidate.entry.environment() for item in found.ranked}
    best: dict[str, Timing] = {}
    for timing in timings:
        known = best.get(timing.config.engine)
        if timing.us is not None and (known is None or known.us is None or timing.us < known.us):
            best[timing.config.engine] = timing
    samples = tuple(
        Sample(
            engine, timing.config, timing.us or 0.0, len(timing.samples_us), timing.spread, timing.samples_us,
            dict(request.sizes), dists[engine],
        )
        for engine, timing in best.items()
    )  # fmt: skip
    return TuningRecord(request.graph.key, device_facts(request.device), environment_key(), samples)


class Restrictions(NamedTuple):
    """Why a sweep has not seen the whole competition; empty strings: it has."""

    pinned: str = ""
    filtered: str = ""


def restrictions(found: Survey, only: str | None = None) -> Restrictions:
    """What the configuration, or ``only`` (the caller's glob), kept from competing for the survey's graph.

    An engine that the configuration leaves out counts if its manifest admits the graph: then it might have won. A plugin
    that is denied is not asked; its manifest is data.
    """
    from ._candidates import member_name, pin_rule
    from ._filter import filter_graph

    request = found.request
    assert request is not None
    rule = pin_rule(request)
    pinned = f"rule at {rule.origin}" if rule is not None else ""
    for entry in found.entries:
        forced = request.config.knobs_for(member_name(entry, entry.config.variant))
        for knob, (_, origin) in forced.items():
            pinned = pinned or f"knob {knob} of {member_id(entry.config)} at {origin}"
    if only:
        return Restrictions(pinned, f"--engine {only}")
    specs: Mapping[str, Any] = {entry.id: entry.spec for entry in request.registry.engines}
    for row in found.rows:
        spec = specs.get(row.id)
        if spec is None:
            continue
        by_config = [
            reason
            for reason in row.reasons
            if reason.code in ("config.disabled", "config.not_allowed", "config.avoided")
            or (reason.code == "policy.note_missing" and request.config.require)
            or (reason.code == "resource.workspace" and request.config.max_workspace is not None)
        ]
        if by_config and not filter_graph(spec, request.graph, request.device):
            return Restrictions(pinned, f"{row.id}: {by_config[0]}")
    return Restrictions(pinned)


def store_sweep(found: Survey, done: Sweep, limits: Restrictions) -> str:
    """Write the record; returns "" or why nothing was written."""
    if done.incomplete:
        return f"the sweep is incomplete ({done.incomplete})"
    refused = store(record_of(found, done.timings), pinned=bool(limits.pinned), filtered=bool(limits.filtered))
    detail = limits.pinned or limits.filtered
    return f"{refused} ({detail})" if refused and detail else refused

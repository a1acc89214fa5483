"""``cudnn-core bench``: times every eligible engine with every config, and writes the tuning record that ranks them.

Engines with variants are asked for members to time too. Exit 0 if every competitor but members was timed, 1 if one failed or
there is none. Whether a record was written is in the last line.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ._load import device_named, load_graph, sizes_named
from ._output import Progress, UsageProblem, aligned, emit_json

if TYPE_CHECKING:
    from .._bench import Sweep, Timing
    from .._declines import Decline
    from .._planner import Survey

__all__ = ["bench"]


def bench(options: Any) -> int:
    from ._inputs import need_numpy

    need_numpy()
    from .._bench import Competitor, cpu_clock, cuda_clock, restrictions, store_sweep, sweep
    from .._planner import survey
    from ._arena import require_device
    from ._inputs import make_inputs

    graph = load_graph(options.graph)
    device = device_named(options.device)
    require_device(device, "bench")
    found = survey(graph.freeze(device.type), device, None, sizes_named(graph, device, options.size), need_build=True)
    found.require_engine()
    assert found.request is not None
    sizes = found.request.sizes
    inputs = make_inputs(found.request.graph.at(sizes), options.seed)
    left_out = _add_members(found, options.members, options.engine)
    chosen = [index for index in range(len(found.entries)) if _wanted(found, index, options.engine)]
    if not chosen:
        raise UsageProblem(f"--engine {options.engine}: no engine that can run the graph is called so")
    competitors = [
        Competitor(
            found.name(index),
            found.entries[index].config,
            _preparation(found, index, inputs),
            optional=_is_member(found, index),
        )
        for index in chosen
    ]
    bar = Progress(len(competitors) * (options.repeats + 1), "bench")
    clock = cpu_clock if device.type == "cpu" else cuda_clock(device.ordinal or 0)
    try:
        done = sweep(
            competitors,
            clock,
            repeats=options.repeats,
            warmup=options.warmup,
            time_limit=options.time_limit,
            progress=lambda step, total, what: bar.step(step, what),
        )
    finally:
        bar.close()
    limits = restrictions(found, options.engine)
    refusal = "--no-record" if options.no_record else store_sweep(found, done, limits)
    if options.json:
        emit_json(_document(found, done, refusal, left_out))
    else:
        print(_report(found, done, refusal, left_out))
    return 0 if all(not timing.failure for timing in done.timings if timing.counts) else 1


def _add_members(found: Survey, limit: int, glob: str | None) -> dict[str, tuple[Decline, ...]]:
    """Put the members that the engines name behind the survey's entries. Returns by engine why some were left out."""
    from .._members import ask

    assert found.request is not None
    left_out: dict[str, tuple[Decline, ...]] = {}
    engines = None if glob is None else glob.partition("/")[0]
    for item in found.ranked:
        candidate = item.candidate
        if not _covers(engines, candidate.entry.spec.short_id, candidate.entry.id):
            continue
        configs, reasons = ask(found.request, candidate, limit)
        for config in configs:
            found.place(candidate, config)
        if reasons:
            left_out[candidate.entry.id] = reasons
    return left_out


def _is_member(found: Survey, index: int) -> bool:
    """Whether the engine does not offer the entry itself: it was asked for, or is known from an earlier record."""
    config = found.entries[index].config
    return all(config not in item.candidate.configs for item in found.ranked)


def _wanted(found: Survey, index: int, glob: str | None) -> bool:
    from .._candidates import member_name
    from .._ranking import member_id

    entry = found.entries[index]
    member = (member_name(entry, entry.config.variant), member_id(entry.config))
    return _covers(glob, entry.short_id, entry.id, *member)


def _covers(glob: str | None, *names: str) -> bool:
    return glob is None or any(fnmatchcase(name, glob) for name in names)


def _preparation(found: Survey, index: int, inputs: Any) -> Callable[[], Callable[[], None]]:
    """Builds the plan of an entry and binds it to operands of its own."""

    def prepare() -> Callable[[], None]:
        from .._building import build_config, finish
        from ._arena import Arena

        entry, request = found.entries[index], found.request
        assert request is not None
        assert entry.engine is not None
        compiled = build_config(request, entry.engine, entry.config)
        plan = finish(request.graph, compiled, entry.config, found.decision(), request.device, request.handle, {}, ())
        found.check_built(index, plan)
        return Arena(plan, request.graph.at(request.sizes), inputs).runner()

    return prepare


def _document(found: Survey, done: Sweep, refusal: str, left_out: dict[str, tuple[Decline, ...]]) -> dict[str, Any]:
    from .._ranking import member_id

    request = found.request
    assert request is not None
    return {
        "schema": 1,
        "graph_key": request.graph.key,
        "device": request.device.to_dict(),
        "sizes": dict(request.sizes),
        "seconds": done.seconds,
        "complete": done.complete,
        "recorded": not refusal,
        "not_recorded_because": refusal or None,
        "members_left_out": {engine: [str(reason) for reason in reasons] for engine, reasons in left_out.items()},
        "timings": [
            {
                "id": member_id(timing.config),
                "engine": timing.config.engine,
                "config": timing.config._asdict(),
                "us": timing.us,
                "spread": timing.spread,
                "n": len(timing.samples_us),
                "runs_per_sample": timing.runs,
                "samples_us": timing.samples_us,
                "failure": timing.failure or None,
            }
            for timing in done.timings
        ],
    }


def _report(found: Survey, done: Sweep, refusal: str, left_out: dict[str, tuple[Decline, ...]]) -> str:
    request = found.request
    assert request is not None
    timings = sorted(done.timings, key=lambda timing: (timing.us is None, timing.us or 0.0))
    best = timings[0].us
    lines = [
        found.decision().summary + f" | {request.device.device_name or request.device.type}",
        aligned(
            [_row(timing, best) for timing in timings],
            ("engine", "median", "spread", "timings", "to best", ""),
            right=(1, 2, 3, 4),
        ),
        *(f"members of {engine} left out: {'; '.join(map(str, reasons))}" for engine, reasons in left_out.items()),
        f"not recorded: {refusal}" if refusal else "recorded: later plans of this graph are ranked by these times",
    ]
    return "\n".join(lines)


def _row(timing: Timing, best: float | None) -> tuple[str, ...]:
    if timing.us is None:
        return (timing.id, "-", "", "", "", f"failed: {timing.failure}")
    ratio = f"{timing.us / best:.2f}x" if best else ""
    spread = f"{timing.spread:.1%}" if len(timing.samples_us) > 1 else "-"
    return (timing.id, f"{timing.us:.4g} us", spread, str(len(timing.samples_us)), ratio, "")

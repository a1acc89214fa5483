"""``cudnn-core bench``: times every eligible engine with every config, and writes the tuning record that ranks them.

Exit 0 if every competitor was timed, 1 if one failed or there is none. Whether a record was written is in the last line.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ._load import device_named, load_graph, sizes_named
from ._output import Progress, UsageProblem, aligned, emit_json

if TYPE_CHECKING:
    from .._bench import Sweep, Timing
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
    chosen = [index for index in range(len(found.entries)) if _wanted(found, index, options.engine)]
    if not chosen:
        raise UsageProblem(f"--engine {options.engine}: no engine that can run the graph is called so")
    competitors = [
        Competitor(found.name(index), found.entries[index].config, _preparation(found, index, inputs))
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
        emit_json(_document(found, done, refusal))
    else:
        print(_report(found, done, refusal))
    return 0 if all(not timing.failure for timing in done.timings) else 1


def _wanted(found: Survey, index: int, glob: str | None) -> bool:
    entry = found.entries[index]
    return glob is None or fnmatchcase(entry.short_id, glob) or fnmatchcase(entry.id, glob)


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
        return Arena(plan, request.graph.at(request.sizes), inputs).runner()

    return prepare


def _document(found: Survey, done: Sweep, refusal: str) -> dict[str, Any]:
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
        "timings": [
            {
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


def _report(found: Survey, done: Sweep, refusal: str) -> str:
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
        f"not recorded: {refusal}" if refusal else "recorded: later plans of this graph are ranked by these times",
    ]
    return "\n".join(lines)


def _row(timing: Timing, best: float | None) -> tuple[str, ...]:
    if timing.us is None:
        return (timing.id, "-", "", "", "", f"failed: {timing.failure}")
    ratio = f"{timing.us / best:.2f}x" if best else ""
    spread = f"{timing.spread:.1%}" if len(timing.samples_us) > 1 else "-"
    return (timing.id, f"{timing.us:.4g} us", spread, str(len(timing.samples_us)), ratio, "")

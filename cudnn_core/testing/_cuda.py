"""Checks that need a CUDA device: stream, capture and replay, allocation; and the calibration of estimates.

torch supplies streams, graphs and counters. Imported by the pytest plugin's run phase.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .._engine import Declined
from ._kit import Kit, KitFailure, place
from ._running import Job

if TYPE_CHECKING:
    from .._device import DeviceInfo
    from .._plan import Plan
    from .._registry import EngineEntry
    from ._cases import Case
    from ._rig import Run

__all__ = ["Job", "allocated", "calibrate", "check_allocation", "check_capture", "check_stream"]

Note = Callable[[str], None]
_CYCLES = 20_000_000  # of a spinning kernel: about ten milliseconds


def check_stream(job: Job, note: Note) -> None:
    """Work is ordered by the given stream: inputs that arrive late on it are seen, and no other stream waits."""
    import torch

    plan = job.plan()
    rig = job.rig(plan)
    run = rig.stage()
    late = rig.stage()
    stream = torch.cuda.Stream(device=job.device.ordinal or 0)
    with torch.cuda.stream(stream):
        run.bound(stream.cuda_stream)  # warm up whatever the first launch does
        torch.cuda.synchronize()
        for block in run.blocks:
            if block is not None:
                block._memory.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(_CYCLES)
        for block, other in zip(run.blocks, late.blocks, strict=True):
            if block is not None and other is not None:
                block._memory.copy_(other._memory, non_blocking=True)
        run.bound(stream.cuda_stream)
    wrong = run.wrong()
    if wrong:
        job.fail(f"inputs written on the given stream just before the run: {wrong} (is the stream honoured?)")


def check_capture(job: Job, note: Note) -> None:
    """A captured run replays with the data that is then in the buffers."""
    import torch

    plan = job.plan()
    _needs_graph_note(job, plan)
    rig = job.rig(plan)
    run, other = rig.stage(), rig.stage(seed=1)
    stream = torch.cuda.Stream(device=job.device.ordinal or 0)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            run.bound(stream.cuda_stream)
    except RuntimeError as error:
        job.fail(f"the run can't be captured: {error}")
    _replay(job, run, graph, "replayed")
    if all(block is not None for block in run.blocks):  # a by-value operand is baked
        for block, source in zip(run.blocks, other.blocks, strict=True):
            assert block is not None
            assert source is not None
            block.image[:] = source.image
            block.store()
        run.data = other.data
        _replay(job, run, graph, "replayed with other data")


def _replay(job: Job, run: Run, graph: Any, what: str) -> None:
    graph.replay()
    wrong = run.wrong() or run.trespasses()
    if wrong:
        job.fail(f"{what}: {wrong}")


def check_allocation(job: Job, note: Note) -> None:
    """A run allocates no device memory, neither from PyTorch's allocator nor from the driver."""
    import torch

    plan = job.plan()
    _needs_graph_note(job, plan)
    run = job.rig(plan).stage()
    index = job.device.ordinal or 0
    run.bound()
    torch.cuda.synchronize(index)

    def repeat(times: int) -> None:
        for _ in range(times):
            run.bound()
        torch.cuda.synchronize(index)

    shared = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
    found = allocated(
        repeat, lambda: _allocations(index), None if shared else lambda: torch.cuda.mem_get_info(index)[0]
    )
    if found:
        job.fail(f"a run allocates device memory: {found}")


def allocated(repeat: Callable[[int], None], allocations: Callable[[], int], free: Callable[[], int] | None) -> str:
    """What runs allocated, or "".

    allocations  of PyTorch's allocator, which counts for this process
    free         bytes of the whole device, which other processes change too: less of them counts if it happens three times in a
                 row, and more runs each time. None: not looked at
    """
    said = ""
    for times in (10, 40, 160):
        before, room = allocations(), free() if free is not None else 0
        repeat(times)
        made = allocations() - before
        if made:
            return f"{made} allocations of PyTorch in {times} runs"
        lost = room - free() if free is not None else 0
        if lost <= 0:
            return ""
        said = f"{lost} bytes less are free after {times} runs"
    return said


def _allocations(index: int) -> int:
    import torch

    return int(torch.cuda.memory_stats(index).get("allocation.all.allocated", 0))


def _needs_graph_note(job: Job, plan: Plan) -> None:
    if "cuda_graph" not in job.notes():
        pytest.skip(f"{job.entry.id} does not claim cuda_graph for {job.case.name}")


def calibrate(kit: Kit, entry: EngineEntry, device: DeviceInfo, cases: list[Case], note: Note) -> None:
    """Measure the accepted cases and write the 90th percentile of the relative error of ``estimate`` for this architecture.

    The file is what ``Estimate.calibration`` names: ``{"schema": 1, "sm": {"90a": {"p90_error": 0.12}}}``; other
    architectures in it stay.
    """
    errors = []
    engine: Any = kit.engine(entry)
    if not hasattr(engine, "estimate"):
        pytest.skip(f"{entry.id} has no estimate")
    for case in cases:
        job = Job(kit, entry, device, case)
        found = kit.candidate(entry, case, device)
        if isinstance(found, Declined) or job.refused():
            continue
        for sizes in case.sizes:
            plan = job.plan()
            estimate = engine.estimate(plan.graph.at(sizes), plan.config, kit.context(device))
            if estimate is not None:
                measured = _measure(job.rig(plan, sizes).stage())
                errors.append(abs(estimate.us - measured) / measured)
    if not errors:
        raise KitFailure(f"engine {entry.id}: no accepted graph has an estimate, there is nothing to calibrate")
    p90 = statistics.quantiles(errors, n=10)[-1] if len(errors) > 1 else errors[0]
    path = Path(kit.options.calibration)
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"schema": 1, "sm": {}}
    document["sm"][device.arch] = {"p90_error": round(p90, 4)}
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    note(f"{place(device)} estimates of {len(errors)} graphs: p90 error {p90:.0%}, written to {path}")


def _measure(run: Run) -> float:
    """Microseconds of one run: the median of 5 batches between CUDA events."""
    import torch

    run.bound()
    times: list[float] = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            run.bound(torch.cuda.current_stream().cuda_stream)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 20)
    return statistics.median(times)

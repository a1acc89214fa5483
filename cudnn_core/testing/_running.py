"""Checks that run plans: numerics, contract, knobs, threads, serialization, overhead. CUDA's own are in ``_cuda``."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._candidates import notes_of
from .._engine import Declined, PlanConfig
from .._errors import BuildError, CudnnCoreError, ExecutionError
from .._plan import Plan
from ._inputs import has_specials
from ._kit import Kit, KitFailure, build_decline, failure_text, place
from ._rig import POISON, Rig, Run, expected_by, unwritten

if TYPE_CHECKING:
    from .._device import DeviceInfo
    from .._knobs import KnobSpec
    from .._registry import EngineEntry
    from ._cases import Case

__all__ = [
    "Job",
    "check_contract",
    "check_knobs",
    "check_numerics",
    "check_overhead",
    "check_serialization",
    "check_threads",
]

Note = Callable[[str], None]
_THREADS, _ROUNDS = 8, 4
_OVERHEAD = (
    1.5,
    3.0,
)  # of the bound callable over the engine's own: factor, and microseconds of slack on a busy machine


class Job:
    """An engine on a device with a case: what the run checks take."""

    def __init__(self, kit: Kit, entry: EngineEntry, device: DeviceInfo, case: Case) -> None:
        self.kit = kit
        self.entry = entry
        self.device = device
        self.case = case

    def declined(self) -> str:
        """Why the engine declines the case, or ""."""
        found = self.kit.candidate(self.entry, self.case, self.device)
        return "; ".join(map(str, found.reasons)) if isinstance(found, Declined) else ""

    def refused(self) -> str:
        """Why the engine says no when it builds the plan, or "". Only what states the note may; for others it is a failure."""
        found = self.kit.candidate(self.entry, self.case, self.device)
        if isinstance(found, Declined) or not self.declines_at_build():
            return ""
        try:
            self.plan(found.config)
        except BuildError as error:
            return str(build_decline(error) or "")  # without a reason the check builds again, and fails
        return ""

    def declines_at_build(self) -> bool:
        return "declines_at_build" in self.notes()

    def fail(self, message: str) -> None:
        raise KitFailure(failure_text(self.entry.id, self.device, self.case, message))

    def plan(self, config: PlanConfig | None = None) -> Plan:
        return self.kit.plan(self.entry, self.case, self.device, config)

    def notes(self) -> frozenset[str]:
        """What the engine states of its plans of the case, in lower case; nothing once it declines it."""
        found = self.kit.candidate(self.entry, self.case, self.device)
        if isinstance(found, Declined):
            return frozenset()
        return frozenset(note.lower() for note in notes_of(self.entry.spec, found.support))

    def rig(self, plan: Plan, sizes: Mapping[str, int] | None = None) -> Rig:
        oracle = self.kit.options.oracle
        if oracle == "auto":
            usable = self.entry.plugin != "torch_reference" and find_spec("torch_reference") is not None
            oracle = "torch_reference" if usable else "kit"
        return Rig(plan, self.case, self.case.sizes[0] if sizes is None else sizes, expected_by(oracle, self.notes()))

    def go(self, run: Run, how: Callable[[], None], what: str) -> None:
        """Run, and judge numbers and memory."""
        try:
            how()
        except Exception as error:
            self.fail(f"{what}: the plan raised {type(error).__name__}: {error}")
        wrong = run.wrong() or run.trespasses()
        if wrong:
            self.fail(f"{what}: {wrong}")


def check_numerics(job: Job, note: Note) -> None:
    """Every runtime size, random and special data, aligned and misaligned by one element, against the oracle."""
    plan = job.plan()
    for sizes in job.case.sizes:
        rig = job.rig(plan, sizes)
        label = "".join(f" {name}={size}" for name, size in sizes.items())
        run = rig.stage()
        job.go(run, run.execute, f"random data{label}")
        if has_specials(job.case, rig.graph):
            run = rig.stage("special")
            job.go(run, run.execute, f"NaN, infinities and subnormals{label}")
        _misaligned(job, rig, label)


def _misaligned(job: Job, rig: Rig, label: str) -> None:
    """Right numbers, or an ExecutionError before anything is written."""
    try:
        run = rig.stage(shifted=True)
        run.execute()
    except ExecutionError:
        return
    except Exception as error:
        job.fail(
            f"operands misaligned by one element{label}: {type(error).__name__}: {error}"
            " (raise ExecutionError from bind if the plan needs a larger alignment)"
        )
    wrong = run.wrong() or run.trespasses()
    if wrong:
        job.fail(f"operands misaligned by one element{label}: {wrong}")


def check_contract(job: Job, note: Note) -> None:
    """Every output written whatever was there, no state between runs, bind and execute alike, names and uids irrelevant."""
    plan = job.plan()
    rig = job.rig(plan, job.case.sizes[-1])
    runs = []
    for fill in POISON:
        run = rig.stage(fill=fill)
        job.go(run, run.execute, f"buffers and workspace filled with {fill:#x}")
        runs.append(run)
    missing = unwritten(*runs)
    if missing:
        job.fail(missing)
    run = rig.stage(seed=1)
    job.go(run, run.bound, "the bound callable, other data")
    run = rig.stage()
    job.go(run, run.unbound, "the plan's execute")
    _same_for_other_names(job, rig, plan)


def _same_for_other_names(job: Job, rig: Rig, plan: Plan) -> None:
    other = _renamed(job, plan)
    run = rig.stage(plan=other)
    job.go(run, run.execute, "the same graph with other names and uids")
    if other.workspace_size != plan.workspace_size:
        job.fail(f"the workspace depends on names or uids: {plan.workspace_size} bytes, then {other.workspace_size}")


def _renamed(job: Job, plan: Plan) -> Plan:
    """The plan of the graph with other names and uids, built by the engine itself: the core would share the first."""
    import json

    from .._context import build_device
    from .._graph._graph import Graph

    document = json.loads(job.case.graph.to_json())
    for tensor in document["tensors"]:
        tensor["uid"] += 5000
        tensor["name"] = f"other{tensor['uid']}"
        tensor["ragged_offset"] = None if tensor["ragged_offset"] is None else tensor["ragged_offset"] + 5000
    for node in document["nodes"]:
        node["name"] = f"other_{node['name']}"
        for ports in (node["inputs"], node["outputs"]):
            for port, held in ports.items():
                ports[port] = [uid + 5000 for uid in held] if isinstance(held, list) else held + 5000
    graph = Graph.from_json(json.dumps(document)).freeze(job.device.type)
    if graph.key != plan.graph.key:
        raise KitFailure(f"case {job.case.name}: renaming changes the graph's key")
    try:
        with build_device(job.device):
            compiled = job.kit.engine(job.entry).build_plan(graph, plan.config, job.kit.context(job.device))
    except Exception as error:
        job.fail(f"the same graph with other names and uids does not build: {type(error).__name__}: {error}")
    return Plan(graph, compiled, plan.config, plan.decision, job.device)


def check_knobs(job: Job, note: Note) -> None:
    """Every config that check_support offers builds; so does each choice of each knob, or it is refused with a BuildError.

    An engine that declines at build may refuse an offered one with its reason.
    """
    found = job.kit.candidate(job.entry, job.case, job.device)
    assert not isinstance(found, Declined)
    assert job.entry.spec is not None
    built = refused = 0
    for config in found.configs:
        try:
            plan = job.plan(config)
        except (BuildError, KitFailure) as error:
            if isinstance(error, BuildError) and build_decline(error) is not None and job.declines_at_build():
                refused += 1
                continue
            job.fail(f"check_support offers {_knobs(config)}, and it does not build: {error}")
        _right(job, plan, config)
        built += 1
    base = found.config
    for name, value in _choices(job.entry.spec.knobs, 64 if job.kit.full else 12):
        config = base._replace(knobs={**base.knobs, name: value})
        if config in found.configs:
            continue
        try:
            plan = job.plan(config)
        except BuildError:
            refused += 1
            continue
        _right(job, plan, config)
        built += 1
    if built + refused > 1:
        note(f"{built} configs built, {refused} refused")


def _right(job: Job, plan: Plan, config: PlanConfig) -> None:
    rig = job.rig(plan)
    run = rig.stage()
    job.go(run, run.execute, f"with {_knobs(config)}")


def _knobs(config: PlanConfig) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.knobs.items()) or "no knobs"


def _choices(knobs: Mapping[str, KnobSpec], limit: int) -> Iterator[tuple[str, Any]]:
    """Values to try, one knob after the other until ``limit``."""
    listed: list[list[tuple[str, Any]]] = []
    for name, knob in knobs.items():
        values: Iterable[Any] = knob.choices or (knob.min, knob.max)
        listed.append([(name, value) for value in values if value is not None and knob.decline(value) is None])
    flat = [
        item
        for turn in range(max(map(len, listed), default=0))
        for values in listed
        for item in values[turn : turn + 1]
    ]
    yield from flat[:limit]


def check_threads(job: Job, note: Note) -> None:
    """Eight threads, one plan, each with operands of its own."""
    plan = job.plan()
    rig = job.rig(plan)
    for seed in range(_THREADS):
        rig.expected("random", seed)
    runs = [rig.stage(seed=seed) for seed in range(_THREADS)]
    barrier = threading.Barrier(_THREADS)
    errors: list[BaseException] = []

    def work(run: Run) -> None:
        try:
            barrier.wait()
            for turn in range(_ROUNDS):
                (run.bound if turn % 2 else run.execute)()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        job.fail(f"{_THREADS} threads on one plan: {type(errors[0]).__name__}: {errors[0]}")
    for run in runs:
        wrong = run.wrong() or run.trespasses()
        if wrong:
            job.fail(f"{_THREADS} threads on one plan: {wrong}")


def check_serialization(job: Job, note: Note) -> None:
    """A saved plan runs alike after loading; a changed or missing byte is a BuildError."""
    plan = job.plan()
    with tempfile.TemporaryDirectory(prefix="cudnn-kit-") as folder:
        path = Path(folder, "plan")
        try:
            plan.save(path)
        except CudnnCoreError as error:
            job.fail(f"the plan can't be saved: {error}")
        data = path.read_bytes()
        for trust in (False, True):
            try:
                loaded = _load(job, path, trust=trust)
            except CudnnCoreError as error:
                job.fail(f"the saved plan does not load (trust={trust}): {error}")
            if loaded.workspace_size != plan.workspace_size:
                job.fail(f"the loaded plan has {loaded.workspace_size} bytes of workspace, not {plan.workspace_size}")
            rig = job.rig(loaded)
            run = rig.stage()
            job.go(run, run.execute, f"after save and load (trust={trust})")
        for at in (3, 40, 60, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
            _must_not_load(job, path, f"byte {at} of {len(data)} is changed")
        for size in (0, 20, len(data) - 1):
            path.write_bytes(data[:size])
            _must_not_load(job, path, f"only {size} of {len(data)} bytes are left")


def _load(job: Job, path: Path, *, trust: bool) -> Plan:
    if job.device.type == "cpu":
        return Plan.load(path, trust=trust)
    from .._handle import create_handle

    return Plan.load(path, create_handle(job.device), trust=trust)


def _must_not_load(job: Job, path: Path, what: str) -> None:
    try:
        _load(job, path, trust=True)
    except BuildError:
        return
    except Exception as error:
        job.fail(f"a plan file of which {what}: {type(error).__name__} instead of BuildError: {error}")
    job.fail(f"a plan file of which {what} loads")


def check_overhead(job: Job, note: Note) -> None:
    """What the core's bound callable costs over the engine's own."""
    plan = job.plan()
    run = job.rig(plan).stage()
    pointers, workspace = run.pack.pointers, run.workspace_address
    bound = plan.bind(run.pack)
    bind = getattr(plan._compiled, "bind", None)
    own = bind(run.pack.operands) if bind is not None else bound
    best = {"bound": float("inf"), "own": float("inf")}
    for _ in range(20):
        for name, function in (("bound", bound), ("own", own)):
            start = time.perf_counter()
            function(pointers, workspace, 0)
            best[name] = min(best[name], (time.perf_counter() - start) * 1e6)
    note(f"{place(job.device)} bound run {best['bound']:.1f} us, the engine's launcher {best['own']:.1f} us")
    factor, slack = _OVERHEAD
    if best["bound"] > factor * best["own"] + slack:
        job.fail(f"the bound callable takes {best['bound']:.1f} us, the engine's launcher {best['own']:.1f} us")

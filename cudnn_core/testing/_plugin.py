"""The pytest plugin of the conformance kit: ``pytest -p cudnn_core.testing --cudnn-plugin NAME``.

Generates one test for each engine, check and graph, and collects nothing else unless test files are named too:

    NAME::installed                        the plugin is there and usable
    NAME:engine::manifest                  distribution, factories, knobs, own ops
    NAME:engine::import                    nothing heavy is imported, no thread started (in a child process)
    NAME:engine::check_support             pure, quick, off the driver, well-formed; CPU and one preset an architecture
    NAME:engine::filter                    the manifest never rules out what check_support accepts (fuzzed)
    NAME:engine::numerics[cpu-CASE]        each graph that passes the manifest, against the oracle
    NAME:engine::contract[cpu-OP] knobs threads serialization overhead      one accepted graph an op; at level full each graph
    NAME:engine::stream[cuda:0-OP] capture allocation                       CUDA only
    NAME:engine::calibration[cuda:0]       with --cudnn-calibration FILE

A test is skipped only with a reason: the engine declines the graph (those with the note declines_at_build also when it is built; a
check for which that leaves nothing fails the run), or the device is not there. Importing this module loads
pytest and the standard library alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .._device import DeviceInfo
    from .._registry import EngineEntry
    from ._cases import Case
    from ._kit import Kit

__all__ = ["KitItem"]

_KIT = pytest.StashKey[Any]()
_PROPERTY = "cudnn_core kit"
_REFUSED = "cudnn_core kit: declined when built"
_REASON = 160  # characters of a reason in the summary
_STATIC = ("manifest", "import", "check_support", "filter")
_BY_OP = ("contract", "knobs", "threads", "serialization", "overhead")
_CUDA = ("stream", "capture", "allocation")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cudnn-core", "conformance kit for cudnn-core engines")
    group.addoption(
        "--cudnn-plugin", action="append", default=[], metavar="NAME", help="plugin id to test (repeatable)"
    )
    group.addoption(
        "--cudnn-device",
        action="append",
        default=[],
        metavar="DEVICE",
        help="cpu or cuda:N to run on (default: what is present of the types in the manifest)",
    )
    group.addoption(
        "--cudnn-level",
        choices=("quick", "full"),
        default="quick",
        help="quick (default): about a minute; full: everything",
    )
    group.addoption(
        "--cudnn-cases",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="more graphs: the function returns cudnn_core.testing.Case objects or (name, Graph) pairs",
    )
    group.addoption(
        "--cudnn-oracle",
        choices=("auto", "kit"),
        default="auto",
        help="auto (default): torch_reference if it is installed and not under test; kit: the kit's own",
    )
    group.addoption(
        "--cudnn-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for the first import of an engine (default: 60)",
    )
    group.addoption(
        "--cudnn-calibration",
        default="",
        metavar="FILE",
        help="write the engines' estimation error on this GPU to FILE",
    )
    parser.addini("cudnn_cases", "more graphs for the kit, as --cudnn-cases", type="linelist", default=[])


@pytest.hookimpl(tryfirst=True)  # type: ignore[untyped-decorator]
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    if not config.getoption("cudnn_plugin"):
        return
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []  # no test files were named: the kit's tests alone


@pytest.hookimpl(tryfirst=True)  # type: ignore[untyped-decorator]
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("cudnn_plugin"):
        from .._errors import CudnnCoreError
        from ._kit import KitFailure

        try:
            found = list(_collect(session, _kit(config)))
        except (CudnnCoreError, KitFailure) as error:  # a device or cases that can't be had
            raise pytest.UsageError(str(error)) from error
        items[:0] = found
        report = pytest.CollectReport(nodeid="", outcome="passed", longrepr=None, result=found)
        config.hook.pytest_collectreport(report=report)  # so that the terminal counts them


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the checks measured: up to three lines for each engine and check; and what was declined when it was built."""
    lines: dict[str, list[str]] = {}
    refused: dict[str, Counter[str]] = {}
    for report in _reports(terminalreporter):
        check = report.nodeid.partition("[")[0]
        for key, text in report.user_properties:
            if key == _PROPERTY:
                lines.setdefault(check, []).append(f"{report.nodeid}: {text}")
            if key == _REFUSED:
                refused.setdefault(check, Counter())[text] += 1
    if lines or refused:
        terminalreporter.section("cudnn-core conformance kit")
    for check, found in lines.items():
        for line in found[:3]:
            terminalreporter.line(line)
        if len(found) > 3:
            terminalreporter.line(f"{check}: ... and {len(found) - 3} more")
    for check, reasons in refused.items():
        text = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        terminalreporter.line(f"{check}: {reasons.total()} cases declined when built: {text}")
    for check in _nothing_ran(terminalreporter):
        terminalreporter.line(f"{check}: nothing ran, every case was declined when it was built", red=True)


@pytest.hookimpl(tryfirst=True)  # type: ignore[untyped-decorator]
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A check that ran on no graph has shown nothing: the run fails."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and session.exitstatus == pytest.ExitCode.OK and _nothing_ran(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _reports(reporter: Any) -> list[Any]:
    """What came of every test's call."""
    found = [report for reports in reporter.stats.values() for report in reports]
    return [report for report in found if getattr(report, "when", "") == "call"]


def _nothing_ran(reporter: Any) -> list[str]:
    """The checks of which each test was skipped, and some because the engine said no when it built the plan."""
    ran: set[str] = set()
    refused: dict[str, None] = {}
    for report in _reports(reporter):
        check = report.nodeid.partition("[")[0]
        if not report.skipped:
            ran.add(check)
        elif any(key == _REFUSED for key, _ in report.user_properties):
            refused[check] = None
    return [check for check in refused if check not in ran]


def _kit(config: pytest.Config) -> Kit:
    kit: Kit | None = config.stash.get(_KIT, None)
    if kit is None:
        from ._kit import Kit, Options

        option = config.getoption
        kit = config.stash[_KIT] = Kit(
            Options(
                tuple(dict.fromkeys(option("cudnn_plugin"))),
                tuple(option("cudnn_device")),
                option("cudnn_level"),
                (*config.getini("cudnn_cases"), *option("cudnn_cases")),
                option("cudnn_oracle"),
                option("cudnn_timeout"),
                option("cudnn_calibration"),
            )
        )
    return kit


class KitItem(pytest.Item):  # type: ignore[misc]
    """One check. ``call`` gets a function that notes a line for the summary."""

    def __init__(self, *, kit: Kit, call: Callable[[Callable[[str], None]], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._kit = kit
        self._call = call

    def runtest(self) -> None:
        with self._kit.environment():
            self._call(self._note)

    def _note(self, text: str, key: str = _PROPERTY) -> None:
        self.user_properties.append((key, text))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from ._kit import KitFailure

        return str(excinfo.value) if isinstance(excinfo.value, KitFailure) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.name


def _collect(session: pytest.Session, kit: Kit) -> Iterator[KitItem]:
    def item(name: str, call: Callable[..., None], *marks: str) -> KitItem:
        made: KitItem = KitItem.from_parent(session, name=name, nodeid=name, kit=kit, call=call)
        for mark in marks:
            made.add_marker(mark)
        return made

    with kit.environment():
        for plugin in kit.options.plugins:
            yield item(f"{plugin}::installed", _installed(kit, plugin))
            for entry in kit.entries(plugin):
                if entry.state != "quarantined":
                    for name, call, marks in _tests(kit, entry):
                        yield item(f"{entry.short_id}::{name}", call, *marks)


def _installed(kit: Kit, plugin: str) -> Callable[..., None]:
    def check(note: Callable[[str], None]) -> None:
        from .._errors import nearest
        from ._kit import KitFailure

        found = [entry for entry in kit.registry.plugins if entry.plugin == plugin]
        if not found:
            names = [entry.plugin for entry in kit.registry.plugins]
            raise KitFailure(
                f"plugin {plugin!r} is not installed{nearest(plugin, names)}; installed: {', '.join(names) or 'none'}"
            )
        for entry in found:
            if entry.state != "eligible":
                reasons = "\n  ".join(map(str, entry.reasons))
                raise KitFailure(f"plugin {plugin} of {entry.dist} {entry.version} is {entry.state}:\n  {reasons}")
        if not kit.entries(plugin):
            raise KitFailure(f"plugin {plugin} of {found[0].dist} has no engine")
        reports = [report for report in kit.registry.reports if re.match(rf"{plugin}\b", report.subject)]
        if reports:
            raise KitFailure(f"plugin {plugin}:\n  " + "\n  ".join(map(str, reports)))

    return check


_Test = tuple[str, Callable[..., None], tuple[str, ...]]


def _tests(kit: Kit, entry: EngineEntry) -> Iterator[_Test]:
    for name in _STATIC:
        yield name, _static(kit, entry, name), ()
    assert entry.spec is not None
    for kind in entry.spec.devices:
        devices = kit.devices((kind,))
        marks = ("gpu",) if kind == "cuda" else ()
        if not devices:
            yield f"numerics[{kind}]", _absent(kit, entry, kind), marks
        for device in devices:
            for name, call in _runs(kit, entry, device):
                yield name, call, marks


def _static(kit: Kit, entry: EngineEntry, name: str) -> Callable[..., None]:
    def check(note: Callable[[str], None]) -> None:
        from . import _static

        getattr(_static, name if name == "check_support" else f"check_{name}")(kit, entry, note)

    return check


def _absent(kit: Kit, entry: EngineEntry, kind: str) -> Callable[..., None]:
    def check(note: Callable[[str], None]) -> None:
        from .._driver import why_absent

        named = kit.options.devices
        why = f"--cudnn-device {', '.join(named)}" if named else "" if kind == "cpu" else str(why_absent())
        pytest.skip(f"{entry.id}: no {kind} device to run on ({why})")

    return check


def _runs(kit: Kit, entry: EngineEntry, device: DeviceInfo) -> Iterator[tuple[str, Callable[..., None]]]:
    from ._kit import place

    assert entry.spec is not None
    where = place(device)
    unmet = [*entry.reasons] if entry.state == "filtered" else []
    cases = [] if unmet else kit.cases_for(entry, device)
    if not cases:
        reason = (
            "; ".join(map(str, unmet)) or "no graph of the library passes its manifest (name some with --cudnn-cases)"
        )
        yield f"numerics[{where}]", lambda note: pytest.skip(f"{entry.id} on {where}: {reason}")
        return
    for case in cases:
        yield f"numerics[{where}-{case.name}]", _run(kit, entry, device, "numerics", [case])
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.name if kit.full else case.op, []).append(case)
    for name in (*_BY_OP, *(_CUDA if device.type == "cuda" else ())):
        for label, group in groups.items():
            yield f"{name}[{where}-{label}]", _run(kit, entry, device, name, group)
    if kit.options.calibration:
        yield f"calibration[{where}]", _calibration(kit, entry, device, cases)


def _run(kit: Kit, entry: EngineEntry, device: DeviceInfo, name: str, cases: list[Case]) -> Callable[..., None]:
    """The check on the first of ``cases`` that the engine accepts, and one with runtime sizes if there is one."""

    def check(note: Callable[..., None]) -> None:
        if find_spec("numpy") is None:
            from ._kit import KitFailure

            raise KitFailure("the conformance kit needs numpy to run plans: pip install numpy")
        from . import _running as module

        if name in _CUDA:
            from . import _cuda as module  # type: ignore[no-redef]
        accepted = []
        reason = ""
        for case in cases:
            job = module.Job(kit, entry, device, case)
            declined = job.declined()
            reason = reason or declined
            if not declined:
                accepted.append(job)
        if not accepted:
            pytest.skip(f"declined: {reason}")
        first = _built(accepted, note)
        dynamic = [job for job in accepted[1:] if job.case.freeze().dims]
        if first is None:
            pytest.skip("declined when built")
        for job in (first, _built(dynamic, note)):
            if job is not None:
                getattr(module, f"check_{name}")(job, note)

    return check


def _built(jobs: list[Any], note: Callable[..., None]) -> Any:
    """The first whose plan the engine does not decline to build, or None; what it declines is taken from ``jobs`` and noted."""
    while jobs:
        reason = jobs[0].refused()
        if not reason:
            return jobs[0]
        reason = " ".join(reason.split())
        note(reason if len(reason) <= _REASON else f"{reason[:_REASON]}...", _REFUSED)
        jobs.pop(0)
    return None


def _calibration(kit: Kit, entry: EngineEntry, device: DeviceInfo, cases: list[Case]) -> Callable[..., None]:
    def check(note: Callable[[str], None]) -> None:
        if device.type != "cuda":
            pytest.skip("estimates are calibrated on a GPU")
        from ._cuda import calibrate

        calibrate(kit, entry, device, cases, note)

    return check

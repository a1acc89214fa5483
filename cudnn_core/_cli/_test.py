"""``cudnn-core plugin test``: the conformance kit on an installed plugin, in a child process.

Exit 0 if every test passes, 1 if one fails or the kit has none for the plugin, 3 if the kit can't run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ._output import EnvironmentProblem, emit_json

__all__ = ["test"]

_FAILED, _NO_TESTS = 1, 5  # exit codes of pytest


def test(options: Any) -> int:
    if find_spec("pytest") is None:
        raise EnvironmentProblem("the conformance kit needs pytest: pip install pytest numpy")
    _require_plugin(options.name)
    # In a folder of its own, so that no conftest.py or pytest.ini around the caller takes part.
    with tempfile.TemporaryDirectory(prefix="cudnn-kit-") as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-p", "cudnn_core.testing", "--cudnn-plugin", options.name]
        command += ["-q", "-p", "no:cacheprovider", "--rootdir", folder, f"--junitxml={report}", *options.rest]
        done = subprocess.run(command, check=False, cwd=folder, stdout=sys.stderr if options.json else None)
        if done.returncode not in (0, _FAILED, _NO_TESTS):
            raise EnvironmentProblem(f"pytest ended with code {done.returncode}", pytest=done.returncode)
        results = _results(report)
    if options.json:
        emit_json({"schema": 1, "plugin": options.name, "ok": done.returncode == 0, **results})
    return 0 if done.returncode == 0 else 1


def _require_plugin(name: str) -> None:
    from .._errors import nearest
    from .._registry import current

    plugins = [plugin.plugin for plugin in current(enforce=False).plugins]
    if name not in plugins:
        raise EnvironmentProblem(f"plugin {name!r} is not installed{nearest(name, plugins)}")


def _results(report: Path) -> dict[str, Any]:
    """Counts, and the tests that failed, from pytest's JUnit report of a run that this process started."""
    from xml.etree import ElementTree

    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures: list[dict[str, str]] = []
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  our own child wrote it
            outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            kind = "passed" if outcome is None else "skipped" if outcome.tag == "skipped" else "failed"
            counts[kind] += 1
            if outcome is not None and kind == "failed":
                failures.append({"test": case.get("name", ""), "message": outcome.get("message", "")})
    return {**counts, "failures": failures}

"""One plugin's code, run in a child process that may hang, crash or print. Imported by the doctor, and run as the child.

The child has this process's ``sys.path`` and sees no other plugin (``plugins.allow``), says in its report what it is
about to do and how that went, one JSON object a line, and is ended when the time limit is over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Examined", "Step", "examine"]

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from cudnn_core._cli._child import run; run(*sys.argv[2:])"


class Step(NamedTuple):
    """One thing that the child did: ``error`` is empty if it went well."""

    what: str
    seconds: float
    error: str = ""


class Examined(NamedTuple):
    """What the child reported. ``hung``: what it was doing when its time was over; ``died``: how it ended early."""

    steps: tuple[Step, ...]
    checks: tuple[dict[str, Any], ...]
    limit: float
    hung: str = ""
    died: str = ""


def examine(plugin: str, limit: float) -> Examined:
    """Import and construct everything that ``plugin`` has, in a child, for at most ``limit`` seconds."""
    path = json.dumps([entry or str(Path.cwd()) for entry in sys.path])
    # Files, not pipes: a grandchild that lives on keeps a pipe open, and a full one stops the child.
    with tempfile.TemporaryFile() as report, tempfile.TemporaryFile() as errors:
        os.set_inheritable(report.fileno(), True)
        command = [sys.executable, "-c", _BOOT, path, plugin, str(report.fileno())]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(report.fileno(),),
        )
        over = False
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            over = True
            child.kill()
            child.wait()
        report.seek(0)
        errors.seek(0)
        return _understood(report.read(), child.returncode, over, errors.read(), limit)


def _understood(text: bytes, code: int, over: bool, errors: bytes, limit: float) -> Examined:
    steps: list[Step] = []
    checks: list[dict[str, Any]] = []
    doing, finished = "its start", False
    for line in text.decode("utf-8", "replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            break
        if "begin" in event:
            doing = event["begin"]
        elif "what" in event:
            steps.append(Step(event["what"], event["seconds"], event["error"]))
        elif "checks" in event:
            checks += event["checks"]
        else:
            finished = True
    if finished:
        return Examined(tuple(steps), tuple(checks), limit)
    if over:
        return Examined(tuple(steps), tuple(checks), limit, hung=doing)
    last = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
    return Examined(tuple(steps), tuple(checks), limit, died=f"during {doing}, with code {code} {last[0]}".strip())


# --- in the child
def run(plugin: str, descriptor: str) -> None:
    """Import every factory, op, hook and provided module of ``plugin`` and report each on ``descriptor``."""
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as report:

        def tell(**event: Any) -> None:
            report.write(json.dumps(event) + "\n")
            report.flush()

        def step(what: str, action: Callable[[], Any]) -> Any:
            tell(begin=what)
            start = time.perf_counter()
            error, value = "", None
            try:
                value = action()
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"
            tell(what=what, seconds=time.perf_counter() - start, error=error)
            return value

        from .._config import configure
        from .._registry import current

        configure(plugins={"allow": [plugin]})
        registry = step("the registry and its hooks", partial(current, enforce=False))
        if registry is None:
            tell(done=True)
            return
        for entry in registry.engines:
            if entry.plugin == plugin and entry.spec is None:
                tell(what="the plugin", seconds=0.0, error="; ".join(map(str, entry.reasons)))
            elif entry.plugin == plugin and entry.state == "eligible":
                step(f"engine {entry.spec.name}", entry.instance)
        for name in registry.op_factories:
            step(f"op {name}", partial(registry.op_row, name))
        for name in [
            n for item in registry.plugins if item.plugin == plugin and item.manifest for n in item.manifest.provides
        ]:
            step(f"service {name}", partial(_provided, registry, name))
        step("hook cudnn_core_doctor", lambda: tell(checks=_doctor_checks(registry)))
        tell(done=True)


def _provided(registry: Any, name: str) -> None:
    """Import the module that the plugin provides as ``name``; its failure is data in the registry."""
    if registry.provider(name) is None:
        raise ImportError("; ".join(map(str, registry.provider_declines(name))))


def _doctor_checks(registry: Any) -> list[dict[str, Any]]:
    from .._env import environment_key

    found: list[dict[str, Any]] = []
    for result in registry.call_hooks("cudnn_core_doctor", env=environment_key()):
        found += [
            {"name": str(check.name), "ok": bool(check.ok), "detail": str(check.detail)} for check in result.value or ()
        ]
        if result.error is not None:
            found.append({"name": "hook cudnn_core_doctor", "ok": False, "detail": str(result.error)})
    return found

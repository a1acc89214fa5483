"""The child process that imports an engine for the first time: is it light, quiet and alive?

``run_probe`` starts it; ``main`` is what runs there: import the factory, construct the engine, ask check_support about some
graphs with the driver poisoned, and write down which modules and threads each step brought. Imported by the kit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .._registry import EngineEntry

__all__ = ["FORBIDDEN", "Probe", "run_probe"]

# What the check_support side of an engine may not load: seconds of import time, or a CUDA context.
FORBIDDEN = ("torch", "numpy", "cutlass", "triton", "cuda", "cupy", "jax", "tensorflow", "tvm")


class Probe(NamedTuple):
    """``fatal``: why the engine can't be used at all; ``problems``: what it should not have done; ``seconds``: to import it."""

    fatal: str = ""
    problems: tuple[str, ...] = ()
    seconds: float = 0.0


def run_probe(entry: EngineEntry, graphs: Sequence[str], timeout: float) -> Probe:
    """Import and ask ``entry`` in a fresh interpreter."""
    from ._kit import PRESETS, child_environment

    with tempfile.TemporaryDirectory(prefix="cudnn-kit-") as folder:
        answer = Path(folder, "answer.json")
        question = {
            "engine": entry.short_id,
            "graphs": list(graphs),
            "devices": ["cpu", *PRESETS],
            "answer": str(answer),
        }
        Path(folder, "question.json").write_text(json.dumps(question))
        command = [
            sys.executable,
            "-c",
            "from cudnn_core.testing._probe import main; main()",
            str(Path(folder, "question.json")),
        ]
        try:
            done = subprocess.run(
                command,
                env=child_environment(),
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            stage = json.loads(answer.read_text())["stage"] if answer.exists() else "its import"
            return Probe(f"{stage} did not end within {timeout:g} s")
        found: dict[str, Any] = (
            json.loads(answer.read_text()) if answer.exists() else {"stage": "the start of the child"}
        )
        if done.returncode or "seconds" not in found:
            tail = "\n".join(done.stderr.strip().splitlines()[-12:])
            return Probe(f"{found['stage']} ended the process (exit status {done.returncode})\n{tail}")
        return Probe(found["fatal"], tuple(found["problems"]), found["seconds"])


def main() -> None:
    """In the child: ``sys.argv[1]`` names the question."""
    question = json.loads(Path(sys.argv[1]).read_text())
    answer = Path(question["answer"])

    def at(stage: str, **more: Any) -> None:
        answer.write_text(json.dumps({"stage": stage, **more}))

    at("the registry")
    import time

    from .._context import build_device
    from .._device import DeviceInfo, device_info
    from .._driver import use_driver
    from .._engine import ExecutionContext
    from .._errors import CudnnCoreError
    from .._filter import filter_graph
    from .._graph._graph import Graph
    from ._kit import Kit, Options
    from ._static import RecordingDriver

    kit = Kit(Options(()))
    problems: list[str] = []
    fatal = ""
    with kit.environment():
        entry = kit.registry.find(question["engine"])
        graphs = [Graph.from_json(text).freeze() for text in question["graphs"]]
        devices = [device_info(name) if name == "cpu" else DeviceInfo.preset(name) for name in question["devices"]]
        poisoned = RecordingDriver()
        with use_driver(poisoned):
            before = _state()
            at("its import")
            start = time.perf_counter()
            try:
                engine = entry.instance()
            except CudnnCoreError as error:
                fatal = str(error)
            seconds = time.perf_counter() - start
            problems += _news("importing it", before)
            if not fatal:
                before = _state()
                at("its check_support")
                for graph in graphs:
                    for device in devices:
                        assert entry.spec is not None
                        if not filter_graph(entry.spec, graph, device):
                            try:
                                with build_device(device):
                                    engine.check_support(graph, ExecutionContext(None, device))
                            except Exception:  # noqa: S110  the check of check_support reports it
                                pass
                problems += _news("its check_support", before)
        if poisoned.calls:
            problems.append(f"asks the CUDA driver: {', '.join(sorted(set(poisoned.calls)))}()")
    at("the end", fatal=fatal, problems=problems, seconds=seconds)
    sys.stdout.flush()
    os._exit(0)  # a thread that the engine started must not keep the child alive


def _state() -> tuple[set[str], int]:
    return set(sys.modules), _threads()


def _threads() -> int:
    """Threads of this process, native ones too where the system tells."""
    try:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208
    except OSError:
        import threading

        return threading.active_count()


def _news(what: str, before: tuple[set[str], int]) -> list[str]:
    modules = {name.partition(".")[0] for name in set(sys.modules) - before[0]}
    heavy = sorted(modules.intersection(FORBIDDEN))
    found = [f"{what} loads {', '.join(heavy)} (import them in build_plan)"] if heavy else []
    threads = _threads() - before[1]
    if threads > 0 and not heavy:
        found.append(f"{what} starts {threads} thread{'s' if threads > 1 else ''}")
    return found

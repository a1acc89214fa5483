"""The backend's engines as further candidates of a graph, on request: ``python -m cudnn_backend.members GRAPH.json``.

cuDNN's heuristics say which engines and knobs may run the graph, and those that build are written down, by graph, device and
libcudnn. From then on ``check_support`` offers them behind the backend's own choice: ``cudnn-core bench`` times them, and the
fastest is what later plans use. Nobody who does not ask pays for it. Imported by ``engines``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudnn_core import BuildError, CudnnCoreError, ExecutionContext, PlanConfig

from . import library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cudnn_core import DeviceInfo, FrozenGraph

__all__ = ["main", "offered", "request"]

MOST = 7  # an engine offers eight configs, and its own choice is the first
_SCHEMA = 1
_NAME = "members"
_asked: list[bool] = []  # whether there is any list: found out once, so that who never asks pays nothing


class _Miss(Exception):  # noqa: N818  # no list was asked for, which is not an error
    pass


def offered(graph: FrozenGraph, device: DeviceInfo) -> tuple[PlanConfig, ...]:
    """What ``request`` has written down for the graph on such a device; () if nothing was, or it is not readable."""
    if not _asked:
        _asked.append(bool(_read(_any())))
    where = library.location() if _asked[-1] else None
    if where is None:
        return ()
    try:
        rows = json.loads(_read(_key(graph, device, where)) or b"[]")
        return tuple(PlanConfig("", {"engine_knobs": str(knobs)}, str(variant)) for variant, knobs in rows[:MOST])
    except (TypeError, ValueError):
        return ()


def request(graph: FrozenGraph, device: DeviceInfo) -> list[tuple[PlanConfig, str]]:
    """Ask cuDNN, build what it proposes, and write down what builds: (config, "" or why it did not build), best first.

    The backend's own choice is not in it. Raises BuildError with cuDNN's reason if it has no engine for the graph.
    """
    from .engines import BackendGraph

    engine, ctx = BackendGraph(), ExecutionContext(None, device)
    found: list[tuple[PlanConfig, str]] = []
    for config in engine.members(graph, ctx, MOST + 1)[1:]:  # the first is the own choice
        try:
            engine.build_plan(graph, config._replace(knobs={"heuristics": "A", **config.knobs}), ctx)
        except BuildError as error:  # noqa: PERF203  one of a few, and each compiles
            found.append((config, str(error)))
        else:
            found.append((config, ""))
    rows = [(config.variant, config.knobs["engine_knobs"]) for config, failure in found if not failure]
    where = library.location()
    assert where is not None  # members() has loaded it
    _write(_key(graph, device, where), json.dumps(rows).encode())
    _write(_any(), b"yes")
    _asked.append(True)
    return found


def _key(graph: FrozenGraph, device: DeviceInfo, where: str) -> dict[str, Any]:
    """A list is of one libcudnn, known by its file: its version is not known before it is loaded."""
    file = Path(os.path.realpath(where))
    try:
        facts = file.stat()
        stamp = f"{facts.st_size} {facts.st_mtime_ns}"
    except OSError:
        stamp = ""
    program = [_NAME, _SCHEMA, graph.key, list(map(str, device.key()))]
    return _any() | {"program": program, "arch": device.arch, "toolchain": {"libcudnn": str(file), "stamp": stamp}}


def _any() -> dict[str, Any]:
    return {"program": [_NAME, _SCHEMA], "engine": "cudnn_backend:graph@1", "arch": "any", "toolchain": {}}


def _read(key: dict[str, Any]) -> bytes:
    from cudnn_core import CompileCache

    def miss() -> dict[str, bytes]:
        raise _Miss

    try:
        return CompileCache("cudnn_backend").get(key, miss).get(_NAME, b"")
    except (_Miss, BuildError):
        return b""


def _write(key: dict[str, Any], data: bytes) -> None:
    from cudnn_core import CompileCache

    CompileCache("cudnn_backend").get(key, lambda: {_NAME: data})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 0 if a list was written, 1 if cuDNN has no engine or nothing can be read."""
    import argparse

    import cudnn_core

    parser = argparse.ArgumentParser(prog="python -m cudnn_backend.members", description=__doc__.partition("\n")[0])
    parser.add_argument("graph", type=Path, help="a graph in the core's JSON")
    parser.add_argument("--device", help="an ordinal, or a preset's name; default: the current GPU")
    options = parser.parse_args(arguments)
    try:
        graph = cudnn_core.Graph.from_json(options.graph.read_text(encoding="utf-8"))
        device = _device(options.device)
        found = request(graph.freeze("cuda"), device)
    except (OSError, CudnnCoreError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    lines = [
        f"{config.variant}[{config.knobs['engine_knobs']}] {f'does not build: {failure}' if failure else 'offered'}"
        for config, failure in found
    ]
    count = sum(not failure for _, failure in found)
    lines.append(f"{count} engines beside the backend's own choice on {device.device_name}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _device(name: str | None) -> DeviceInfo:
    import cudnn_core

    if name is None or name.isdecimal():
        return cudnn_core.device_info(int(name or 0))
    return cudnn_core.DeviceInfo.preset(name)


if __name__ == "__main__":
    raise SystemExit(main())
